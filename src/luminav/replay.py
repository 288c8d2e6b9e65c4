"""A step of the Triton engine that is kept: checked quickly, and launched again.

If what the last step was built from still holds (:class:`luminav.premises.Premises`), a step is a few launches.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from luminav.custody import Custody
from luminav.engines import give_up_triton
from luminav.pending import UNSCALED, Scaling
from luminav.premises import Premises
from luminav.state import KEPT_SCALES
from luminav.works import Work, numbers_of_all


class TritonFailed(Exception):
    """The Triton engine's kernels did not compile. Nothing has been launched."""

    def __init__(self, works: Sequence[Work], reason: str) -> None:
        super().__init__(reason)
        self._works, self._reason = works, reason

    def settle(self) -> None:
        """Let "auto" use another engine from now on, with one warning; raise RuntimeError if Triton was asked for."""
        if any(work.batch.options.execution == "triton" for work in self._works):
            raise RuntimeError(f"execution='triton' cannot run here: {self._reason}.") from self.__cause__
        for device in {work.batch.device for work in self._works}:
            give_up_triton(device, self._reason)
        message = f"luminav uses the foreach engine instead of Triton: {self._reason}."
        warnings.warn(message, RuntimeWarning, stacklevel=5)


class KeptStep:
    """What a step that is kept was built from, and the tables behind its state.

    Args:
        works: The works of a step that the Triton engine serves alone.
        launches: Their launches.
    """

    def __init__(self, works: Sequence[Work], launches: Sequence[Any]) -> None:
        self.premises = Premises(works)
        self._works, self._launches = list(works), list(launches)
        places = {id(step): place for place, step in enumerate(self.premises.steps)}
        self._places = [[places[id(step)] for step in launch.steps_of] for launch in launches]
        """For each launch, where its tensors stand among the premises'."""

    def remember(self, groups: list[dict[str, Any]], custody: Custody, *, alone: bool) -> None:
        """Note what the step was built from, after it. Step counts must be views of the launches' tables by now.

        Args:
            groups: The optimizer's groups.
            custody: The optimizer's state.
            alone: Whether these parameters are all that take a step, so that none of the others may have a gradient.
        """
        in_vectors = [step for launch in self._launches if launch.kind.aligned for step in launch.steps_of]
        tables = [self.premises.items[places[0]].state["step"] for places in self._places]
        self.premises.remember(groups, custody, alone=alone, in_vectors=in_vectors, tables=tables)


class Replay(KeptStep):
    """The launches of a step.

    It is made and compiled before anything is written, and touches the optimizer's state only in :meth:`remember`, when
    its first step is done: a step that fails leaves no trace there.

    Args:
        works: The works of a step that the Triton engine serves alone and unsharded.
    """

    def __init__(self, works: Sequence[Work]) -> None:
        engine: Any = works[0].engine
        self.early: list[Any] = engine.launches([work.batch for work in works if work.early])
        self.late: list[Any] = engine.launches([work.batch for work in works if not work.early])
        super().__init__(works, self.early + self.late)
        self._in_order = [own == list(range(len(self.premises.steps))) for own in self._places]
        self._kernels: list[tuple[Any, list[Any]]] | None = None
        self._holding_partials = engine.holding_partials
        self._watch = Watch([launch.tables.whole_nonfinite for launch in self._launches])
        self._compiled: tuple[bool, bool] | None = None

    def remember(self, groups: list[dict[str, Any]], custody: Custody, *, alone: bool) -> None:
        """As :meth:`KeptStep.remember`; step counts and kept scales become views of the tables that kernels write."""
        for launch, places in zip(self._launches, self._places, strict=True):
            for row, place in enumerate(places):
                item = self.premises.items[place]
                item.state["step"] = launch.tables.steps[row]
                if item.options.fused_single_pass:
                    item.state.update(zip(KEPT_SCALES, launch.tables.kept_scales[row].unbind(), strict=True))
        super().remember(groups, custody, alone=alone)

    def holds(self, groups: list[dict[str, Any]], custody: Custody, scaling: Scaling | None) -> bool:
        """Whether a step now would do the same launches. Takes over new gradients and learning rates if so."""
        return self.premises.hold(groups, custody) and (scaling is None or _kind_of(scaling) == self._compiled)

    def compile(self, scaling: Scaling) -> None:
        """Compile all kernels that a step under this kind of scaling needs; raises what the compiler raises."""
        for launch in self._launches:
            launch.compile(exact=launch in self.late, **_on_device(scaling, launch.device))
        self._compiled = _kind_of(scaling)

    def run(self, scaling: Scaling) -> None:
        """Take the step. Nothing of an exact tensor is written before every exact tensor is measured."""
        addresses = self.premises.grad_addresses
        with self._holding_partials(self._launches):
            for launch, places, in_order in zip(self._launches, self._places, self._in_order, strict=True):
                launch.tables.refresh(addresses if in_order else [addresses[place] for place in places])
            if self._kernels is None:
                self._kernels = self._launch_and_note(scaling)
            elif self._kernels:
                for launch, kernels in self._kernels:
                    launch.launch_again(kernels)
            else:
                self._launch(scaling)
        torch.autograd.graph.increment_version(self.premises.parts)
        self.premises.note_writes()
        self._watch.after_step()

    def _launch_and_note(self, scaling: Scaling) -> list[tuple[Any, list[Any]]]:
        """Launch, and note the kernels by device and in their order, so that no further step asks which they are.

        None are noted where one has to be looked up in every step, or is not compiled ahead.
        """
        noted: list[tuple[Any, Any]] = []
        for launch in self._launches:
            launch.noted = noted
        self._launch(scaling)
        for launch in self._launches:
            launch.noted = None
        if not all(kernel for _, kernel in noted):
            return []
        runs = [list(run) for _, run in groupby(noted, key=lambda pair: pair[0].device)]
        return [(run[0][0], [kernel for _, kernel in run]) for run in runs]

    def _launch(self, scaling: Scaling) -> None:
        for launch in self._launches:
            launch.compute_numbers(**_on_device(scaling, launch.device), kept=launch in self.early)
            if not launch.kind.dual:
                launch.measure_lookahead()
        for launch in self.late:
            launch.measure()
        for launch in self.early:
            launch.update(gather=True)
            launch.scale(reduce=True, blend=launch.one_pass)
        for launch in self.late:
            launch.scale(reduce=True, exact=True)
            launch.update(gather=False)

    @property
    def is_steady(self) -> bool:
        """Whether the next step can do the same launches: not where one-pass mode took its exact first step."""
        return not any(map(first_of_one_pass, self._works))

    @property
    def saw_whole_nonfinite(self) -> bool:
        """Whether a gradient without any finite element is known to have come; the host learns of it with delay."""
        return self._watch.seen

    def nonfinite_counts(self) -> list[tuple[torch.device, Tensor]]:
        """Number of non-finite gradient elements seen by each launch, on its device."""
        return [(launch.device, launch.tables.nonfinite_counts.sum()) for launch in self._launches]


class ShardedReplay(KeptStep):
    """A step of sharded parameters that is kept: its works, with the tables of their launches.

    In the middle of such a step sums leave the engine, to be added up over ranks, so it goes on through its verbs.

    Args:
        works: The works of a step that the Triton engine has just taken, without a loss scaler.
        take: Takes a step with these works.
    """

    saw_whole_nonfinite = False

    def __init__(self, works: Sequence[Work], take: Callable[[], object]) -> None:
        engine: Any = works[0].engine
        super().__init__(works, [launch for work in works for launch, _ in engine.launches_of(work.batch)])
        self._take = take

    @staticmethod
    def can_keep(works: Sequence[Work], scaling: Scaling) -> bool:
        """Whether the next step can be taken with the same works, if all else stays as it is."""
        return (
            scaling == UNSCALED
            and bool(works)
            and all(work.engine.numbers_on_device and not work.missing for work in works)
            and not any(map(first_of_one_pass, works))
        )

    def remember(self, groups: list[dict[str, Any]], custody: Custody, *, alone: bool) -> None:
        """As :meth:`KeptStep.remember`; from now on only the tables count steps and hold kept scales."""
        super().remember(groups, custody, alone=alone)
        for work in self._works:
            work.is_kept = True

    def holds(self, groups: list[dict[str, Any]], custody: Custody, scaling: Scaling | None) -> bool:
        """Whether a step now would be taken with the same works. A missing gradient may be there on another rank."""
        return scaling == UNSCALED and self.premises.hold(groups, custody) and 0 not in self.premises.grad_addresses

    def run(self, scaling: Scaling) -> None:
        """Take the step."""
        addresses = self.premises.grad_addresses
        for launch, places in zip(self._launches, self._places, strict=True):
            launch.known_addresses = [addresses[place] for place in places]
        engine: Any = self._works[0].engine
        for work in self._works:
            work.batch.numbers = numbers_of_all(work, engine.steps_taken(work.batch))
        self._take()
        self.premises.note_writes()

    def nonfinite_counts(self) -> list[tuple[torch.device, Tensor]]:
        """None: every step counts its own."""
        return []


class Watch:
    """Flags on devices, read by the host now and then without waiting: it looks at a copy ordered long before."""

    EVERY = 64  # steps between two looks, far more than the host can be ahead of the device

    def __init__(self, flags: list[Tensor]) -> None:
        self.seen = False
        self._steps = 0
        self._flags = flags
        self._copies = [
            torch.zeros(1, dtype=flag.dtype, device="cpu", pin_memory=flag.device.type != "cpu") for flag in flags
        ]

    def after_step(self) -> None:
        """Order a copy after the first step and every 64 steps from then on; look at it 32 steps later."""
        if self._steps % self.EVERY == 0:
            for copy, flag in zip(self._copies, self._flags, strict=True):
                copy.copy_(flag, non_blocking=True)
        elif self._steps % self.EVERY == self.EVERY // 2:
            self.seen = any(copy.item() for copy in self._copies)
        self._steps += 1


def _kind_of(scaling: Scaling) -> tuple[bool, bool]:
    """What the kernels are specialised for: whether gradients are scaled, and whether a step may be skipped."""
    return scaling.grad_scale is not None, scaling.found_inf is not None


def _on_device(scaling: Scaling, device: torch.device) -> dict[str, Tensor | None]:
    scale, found_inf = scaling.grad_scale, scaling.found_inf
    if isinstance(scale, float):
        scale = torch.tensor(scale, dtype=torch.float64)
    return {
        "grad_scale": None if scale is None else torch.as_tensor(scale, device=device),
        "found_inf": None if found_inf is None else found_inf.to(device),
    }


def first_of_one_pass(work: Work) -> bool:
    """Whether one-pass mode takes its exact first step, so that the next one will be another kind of step."""
    return work.items[0].options.fused_single_pass and not work.early
