"""What a step did, parameter by parameter, for those who ask.

**Design.** The caller asks before a step and reads after it::

    with optimizer.diagnostics() as report:
        optimizer.step()
    writer.log(report.flat())

Hooks around ``step()`` exist only inside the ``with``, so a step that nobody asks about has no launch, no allocation
and no branch more than without this module, on every engine, the kept launches of Triton included. Before the step the
hook copies the weights and lets the reference engine measure what the step is about to do: from the same gradients,
state and loss scale, by the same functions that give an exact step its scales. After it the copies tell how far
weights moved. No engine has to report anything, so the figures mean the same everywhere. They stay on their device
until all are known and come to the host in one transfer for each device.

The price, when asked: a copy of the weights and one measurement, about one more exact step.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from luminav import rule, works
from luminav.engines import choose_engine
from luminav.modes import out_of_other_modes
from luminav.state import Written, catch_up, joined

if TYPE_CHECKING:
    from luminav.pending import Pending
    from luminav.stepper import Stepper

FOREACH = "foreach"
SHOWN = 3
"""How many names a message has."""


@dataclass(frozen=True)
class Figures:
    """What one step did to one parameter."""

    density: float
    """Share of coordinates that the gate let pass; 1 without the gate, 0 for an empty tensor."""
    cautious_scale: float
    """The scale c that this step applied: of this step's gate, or the kept one of one-pass mode."""
    bound_scale: float
    """The scale s that this step applied; 1 unless the bound is radial."""
    update_ratio: float
    """‖Δp‖/‖p‖, decay included, of the weight in full: the FP32 master where there is one. 0 if p was zero."""
    nonfinite_grads: int
    """Number of NaN and infinite elements of the gradient."""
    moved: float
    """Share of the stored weights whose bits the step changed, by its size or by stochastic rounding."""


NAMES = tuple(field.name for field in fields(Figures))


class Report(Mapping[str, Figures]):
    """Figures of one step by parameter name (or its position in the optimizer), in the optimizer's order.

    It is empty until the step is done. Parameters without a gradient are not in it.
    """

    def __init__(self) -> None:
        self._figures: dict[str, Figures] = {}

    def __getitem__(self, name: str) -> Figures:
        if name not in self._figures:
            raise KeyError(self._no_such(name))
        return self._figures[name]

    def __contains__(self, name: object) -> bool:
        return name in self._figures  # the base class would have a message made for each name that is not there

    def _no_such(self, name: Any) -> str:
        """A few of the names that there are, and why others are not."""
        if not self._figures:
            return f"no {name!r}: the report is empty until a step inside the `with` is done."
        near = difflib.get_close_matches(str(name), self._figures, n=SHOWN)
        few = list(dict.fromkeys([*near, *self._figures]))[:SHOWN]
        why = "Parameters without a gradient are not in it."
        if all(key.isdecimal() for key in self._figures):
            why = "They are positions: model.named_parameters() or param_groups(model, names=True) bring names."
        return f"no {name!r} among the {len(self)} parameters of the report, as {', '.join(map(repr, few))}. {why}"

    def __iter__(self) -> Iterator[str]:
        return iter(self._figures)

    def __len__(self) -> int:
        return len(self._figures)

    def flat(self, prefix: str = "luminav") -> dict[str, float]:
        """``{"luminav/<name>/density": 0.71, …}``, as TensorBoard and W&B take it."""
        return {
            f"{prefix}/{name}/{key}": getattr(figures, key) for name, figures in self._figures.items() for key in NAMES
        }


@contextmanager
def watching(stepper: Stepper) -> Iterator[Report]:
    """Hooks around the steps of an optimizer; see :meth:`luminav.LuminaV.diagnostics`."""
    report = Report()
    watched: list[Watched] = []

    def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(value is not None for value in (*args[1:], *kwargs.values())):  # the first is the optimizer
            raise RuntimeError(
                "diagnostics() needs the gradients before the step, but step() was given a closure. Call the closure "
                "first, then step() without it."
            )
        watched[:] = [Watched(stepper)]

    def after(*_: Any) -> None:
        report._figures = watched.pop().figures()

    handles = [
        stepper.optimizer.register_step_pre_hook(before),
        stepper.optimizer.register_step_post_hook(after),
    ]
    try:
        yield report
    finally:
        for handle in handles:
            handle.remove()


class Watched:
    """Weights and scales of a step that is about to be taken."""

    @out_of_other_modes()
    def __init__(self, stepper: Stepper) -> None:
        stepper.sharding.plan(stepper.optimizer.param_groups)
        if stepper.sharding.domains:
            raise RuntimeError(
                "diagnostics() does not serve sharded parameters: their scales are known when all ranks are heard. Ask "
                "on an unsharded run, or read state['cautious_scale'] and state['bound_scale'] of one-pass mode."
            )
        if stepper.release is not None:
            raise RuntimeError(
                "diagnostics() needs all gradients at once, but gradient release takes steps inside backward. Call "
                "remove() on its handle first."
            )
        scaling = stepper.scaling()
        self.items = stepper.pending()
        self.stepper = stepper
        written = stepper.all_written()
        for item in self.items:
            self._as_reference(item, written.get(item.param))
        self.works = works.sort_into_works(self.items, scaling, sharded=False)
        works.measure_lookahead(self.works, [])
        works.measure(self.works)
        self.stored = {item.index: item.param.detach().clone() for item in self.items}
        self.full = {item.index: full_weight(item.param, item.state).clone() for item in self.items}

    @staticmethod
    def _as_reference(item: Pending, written: Written | None) -> None:
        """Have the reference engine work on a view of the state, reading step counts where they are."""
        options = item.options
        item.engine = choose_engine(FOREACH, item.param.device)
        state = dict(item.state)
        on_device = options.capturable or ("step" in state and state["step"].device.type != "cpu")
        item.options = replace(options, capturable=on_device, execution=FOREACH)
        if "master_param" in state and not (written is not None and written.is_still(item.param)):
            state["master_param"] = state["master_param"].clone()  # the step itself is to make it follow an edit
        catch_up(state, item.param, item.options, written, step_on_device=on_device)
        item.state = state

    @torch.no_grad()
    def figures(self) -> dict[str, Figures]:
        """What the step has done, with one transfer for each device."""
        rows: dict[torch.device, list[tuple[int, Tensor]]] = {}
        for work in self.works:
            scales = works.exact_scales(work.batch, work.sums) if work.kept is None else work.kept
            sums = rule.Sums.of(work.sums)
            density = sums.kept / sums.numel.clamp_min(1.0)
            for number, item in enumerate(work.items):
                known = (density, scales.cautious, scales.bound)
                columns = [column[number].to(torch.float64) for column in known]
                columns += [self._update_ratio(item), sums.nonfinite[number], self._moved(item)]
                rows.setdefault(item.param.device, []).append((item.index, torch.stack(columns)))
        found: dict[int, list[float]] = {}
        for pairs in rows.values():
            table = torch.stack([row for _, row in pairs]).tolist()
            found.update(zip([index for index, _ in pairs], table, strict=True))
        names = _names(self.stepper.optimizer.param_groups)
        return {names[index]: _figures(found[index]) for index in sorted(found)}

    def _update_ratio(self, item: Pending) -> Tensor:
        before = self.full[item.index].to(torch.float64)
        now = full_weight(item.param, self.stepper.state.get(item.param, {})).to(torch.float64)
        length = torch.linalg.vector_norm(before)
        moved = torch.linalg.vector_norm(now - before)
        return torch.where(length > 0, moved / length, 0.0)

    def _moved(self, item: Pending) -> Tensor:
        before, now = self.stored[item.index], item.param.detach()
        numel = max(now.numel(), 1)
        return (bits_of(now) != bits_of(before)).sum().to(torch.float64) / numel


def _figures(row: Sequence[float]) -> Figures:
    density, cautious, bound, ratio, nonfinite, moved = row
    return Figures(density, cautious, bound, ratio, int(nonfinite), moved)


def full_weight(param: Tensor, state: Mapping[str, Tensor]) -> Tensor:
    """A parameter's weight in full precision: its master where it has one."""
    if "master_remainder" in state:
        return joined(param, state["master_remainder"])
    return state.get("master_param", param.detach())


def bits_of(tensor: Tensor) -> Tensor:
    """The bit patterns, as integers."""
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.contiguous().view(integer)


def _names(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of the parameters, or their positions where no names were given."""
    names: list[str] = []
    for group in groups:
        given = group.get("param_names")
        names += given if given is not None else map(str, range(len(names), len(names) + len(group["params"])))
    return names


def chart(reports: Sequence[Report]) -> Any:
    """A run at a glance: for each figure a picture with a row for every parameter and a column for every report.

    Args:
        reports: Of a run, in order.

    Returns:
        A matplotlib Figure. Needs matplotlib, from the extra "demo".

    Raises:
        ValueError: There are no reports.
    """
    if not reports:
        raise ValueError("chart() needs at least one report, got none.")
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(name for report in reports for name in report))
    figure = Figure(figsize=(12, 2 + 0.9 * len(names) ** 0.7), layout="constrained")
    for axes, key in zip(figure.subplots(2, 3, sharex=True, sharey=True).flat, NAMES, strict=True):
        missing = float("nan")
        values = [[getattr(r[name], key) if name in r else missing for r in reports] for name in names]
        image = axes.imshow(values, aspect="auto", interpolation="nearest")
        axes.set_title(key.replace("_", " "))
        axes.set_yticks(range(len(names)), names)
        figure.colorbar(image, ax=axes)
    figure.supxlabel("report")
    return figure
