"""From parameters to batches and scales: what a step needs besides the optimizer's own state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from luminav import rule
from luminav.blocks import block_shape, in_blocks, panel_shape
from luminav.distributed import Part, check_blocks, check_panels, check_placements, local, local_grad
from luminav.domains import Domain
from luminav.engines import Batch, Engine, Scales, TensorStep, choose_engine
from luminav.hyperparameters import SUPPORTED_DTYPES, Options
from luminav.rounding import noise_key
from luminav.state import (
    KEPT_SCALES,
    NO_COLUMN_MEANS,
    SCALES,
    STATE,
    ParamState,
    has_block_variance,
    is_coded,
    keeps_blocks,
)


@dataclass
class Pending:
    """A parameter with a gradient, checked: nothing can refuse it any more."""

    param: Tensor
    """As its group has it, perhaps a DTensor."""
    grad: Tensor | None
    """The local gradient, zero where it is missing; None when kept launches have taken its address."""
    options: Options
    group: int
    index: int
    """Position in the optimizer, which selects the parameter's noise."""
    engine: Engine
    part: Part
    missing: bool
    """Whether this process has no gradient. The parameter takes its step if another rank has one."""
    state: ParamState = field(default_factory=dict)
    """The parameter's state. A first one becomes the optimizer's when the sums of all ranks are in."""


@dataclass(frozen=True)
class Scaling:
    """What a loss scaler asks of this step."""

    grad_scale: float | Tensor | None
    found_inf: Tensor | None
    """On the accelerator; None when the host knows that nothing overflowed, or is to look at `overflow`."""
    overflow: Tensor | None = None
    """Of sharded parameters: this process's flag, to be added up over the ranks before anything is written."""


UNSCALED = Scaling(None, None)
"""No loss scaler, or none that asks for anything."""


def check_param(param: Tensor, options: Options, name: str | None = None) -> None:
    """Refuse a parameter that the optimizer cannot train; `name` is for the message."""
    if param.is_complex():
        return  # refused when it has a gradient, as torch's optimizers do where they cannot take one
    if param.dtype not in SUPPORTED_DTYPES:
        supported = ", ".join(str(dtype).removeprefix("torch.") for dtype in SUPPORTED_DTYPES)
        raise TypeError(f"parameters must be one of {supported}, got {param.dtype}.")
    check_placements(param)
    if keeps_blocks(param, options):
        check_blocks(param)
    if has_block_variance(param, options):
        check_panels(param, name)
    if param.is_inference():
        raise RuntimeError("a parameter that was made in inference mode cannot be trained. Make the model outside it.")
    if param.device.type != "meta":
        choose_engine(options.execution, param.device)


def check_layout(param: Tensor) -> None:
    """Refuse a parameter whose elements lie in one another's memory: it could not be written."""
    if (
        param.layout == torch.strided
        and param.numel()
        and any(size > 1 and stride == 0 for size, stride in zip(param.shape, param.stride(), strict=True))
    ):
        raise ValueError(
            f"a parameter's elements must not share memory, got shape {tuple(param.shape)} with strides "
            f"{param.stride()}. Clone the expanded tensor."
        )


def check_grad(param: Tensor, grad: Tensor) -> None:
    """Refuse a gradient that the rule cannot take."""
    if grad.layout != torch.strided:
        raise TypeError(f"gradients must be dense, got layout {grad.layout}. Use sparse=False in the embedding.")
    if grad.is_complex():
        raise TypeError("complex parameters are not supported. Train torch.view_as_real(param) instead.")
    if grad.shape != param.shape or grad.device != param.device:
        raise ValueError(
            f"the gradient, {tuple(grad.shape)} on {grad.device}, does not fit its parameter, {tuple(param.shape)} on "
            f"{param.device}. Set param.grad to None when param.data is replaced."
        )


def checked_grad(param: Tensor) -> Tensor:
    """The local gradient of a parameter that has one."""
    assert param.grad is not None
    check_grad(param, param.grad)
    return local_grad(param, param.grad)


def missing_grad(param: Tensor) -> Tensor:
    """Zeros in place of a gradient that another rank may have. They take no memory."""
    return torch.zeros((), dtype=param.dtype, device=param.device).expand(local(param).shape)


def check_state(param: Tensor, state: ParamState, options: Options) -> None:
    """Refuse a running parameter without a variance (its group went from buffer=1 to 2), or that changed its shape."""
    per_block = block_shape(param) if in_blocks(param) else param.shape
    per_column = panel_shape(param) if in_blocks(param) else param.shape
    shapes = {
        "exp_avg_sq": (param.shape, per_block),
        "exp_avg_sq_col": (per_column,),
        **dict.fromkeys(SCALES, (per_block,)),
    }
    for kind in STATE:
        value = state.get(kind.key)
        if not kind.per_tensor and value is not None and value.shape not in shapes.get(kind.key, (param.shape,)):
            raise ValueError(
                f"the parameter has shape {tuple(param.shape)}, its state {tuple(value.shape)}. After replacing "
                "param.data, start its state anew with optimizer.state[param].clear()."
            )
    variance = state.get("exp_avg_sq")
    if in_blocks(param) and variance is not None and variance.shape == per_block and "exp_avg_sq_col" not in state:
        raise ValueError(NO_COLUMN_MEANS.format("a parameter's state"))
    if options.has_variance and state and "exp_avg_sq" not in state and int(state["step"]) > 0:
        raise ValueError(
            "buffer=2 and block_variance=True need a variance, but this parameter has taken its steps so far with one "
            "RMS per tensor. Keep buffer=1, or start its state anew with optimizer.state[param].clear()."
        )


def numbers_on_device(item: Pending, scaling: Scaling) -> bool:
    """Whether step, bias corrections and noise key are read on the device, because the host does not know them."""
    lr = item.options.lr
    lr_on_device = isinstance(lr, Tensor) and lr.device.type != "cpu"
    return item.engine.numbers_on_device or item.options.capturable or scaling.found_inf is not None or lr_on_device


def empty_batch(item: Pending, step: int | Tensor | None, scaling: Scaling) -> Batch:
    """A batch with the numbers of `item`'s step, and no tensors yet."""
    device, options = item.param.device, item.options
    if step is None:
        scale, found_inf = scaling.grad_scale, scaling.found_inf
        return Batch(
            options,
            None,
            [],
            skip=None if found_inf is None else found_inf.to(device).reshape(()) != 0,
            grad_scale=None if scale is None else torch.as_tensor(scale, device=device),
        )
    lr, grad_scale = options.lr, scaling.grad_scale
    if isinstance(step, Tensor):
        step = step.to(torch.float64)
        lr = torch.as_tensor(lr, dtype=torch.float64, device=device).reshape(())
    else:
        lr = float(lr)
    if isinstance(grad_scale, Tensor):
        on_host = grad_scale.device.type == "cpu"
        grad_scale = grad_scale.item() if on_host else grad_scale.to(device=device, dtype=torch.float64).reshape(())
    sign = -1.0 if options.maximize else 1.0
    factor = sign if grad_scale is None else sign / grad_scale
    numbers = rule.step_numbers(step, lr, options, item.param.dtype, factor)
    skip = None if scaling.found_inf is None else scaling.found_inf.to(device).reshape(()) != 0
    return Batch(options, numbers, [], skip)


def tensor_step(item: Pending, step: int | Tensor | None) -> TensorStep:
    """A parameter's share of a step, from its state: local tensors, and where they are in the whole."""
    state, layout = item.state, item.part.layout

    def kept(key: str) -> Tensor | None:
        return local(state[key]) if key in state else None

    return TensorStep(
        param=local(item.param),
        grad=item.grad,
        exp_avg=local(state["exp_avg"]),
        exp_avg_sq=kept("exp_avg_sq"),
        master_param=kept("master_param"),
        master_remainder=kept("master_remainder"),
        noise_key=None if step is None else noise_key(item.options.seed, step, item.index),
        first_index=layout.first_index,
        jumps=layout.jumps,
        index=item.index,
        step=state["step"],
        exp_avg_scale=kept("exp_avg_scale"),
        exp_avg_sq_scale=kept("exp_avg_sq_scale"),
        exp_avg_sq_col=kept("exp_avg_sq_col"),
        kept_scales=(state["cautious_scale"], state["bound_scale"])
        if all(key in state for key in KEPT_SCALES)
        else None,
    )


# ---- work: batches with what only the optimizer knows --------------------------------------------------------------


@dataclass(eq=False)
class Work:
    """A batch on its way through a step."""

    engine: Engine
    batch: Batch
    domain: Domain | None
    early: bool
    """Whether it is updated before the sums are in, by scales that are known."""
    items: list[Pending] = field(default_factory=list)
    """The parameters of the batch's tensors."""
    kept: Scales | None = None
    """The scales, if they are known beforehand."""
    sums: Tensor = field(init=False)
    """:class:`luminav.rule.Sums` of each tensor; over all ranks once :func:`add_up` has seen them."""
    scales: Scales = field(init=False)
    """The scales of this step."""
    is_kept: bool = False
    """Whether this work takes step after step, the tables behind its state made by the first."""

    @property
    def missing(self) -> bool:
        """Whether this process has no gradients for these parameters."""
        return self.items[0].missing

    @property
    def new_kept(self) -> Scales:
        """The scales that one-pass mode keeps for the next step: the old ones, if this one was skipped."""
        if self.kept is None:
            return self.scales
        old, new, skip = self.kept, blended_scales(self.batch, self.kept, self.sums), self.batch.skip
        if skip is None:
            return new
        return Scales(torch.where(skip, old.cautious, new.cautious), torch.where(skip, old.bound, new.bound))

    def keep_scales(self) -> None:
        """Put the scales for one-pass mode's next step into the state, as views of two tables."""
        new = self.new_kept
        if self.is_kept and self.kept is not None:
            self.kept.cautious.copy_(new.cautious)
            self.kept.bound.copy_(new.bound)
            return
        self.kept = new
        for item, *pair in zip(self.items, new.cautious.unbind(), new.bound.unbind(), strict=True):
            item.state.update(zip(KEPT_SCALES, pair, strict=True))

    def keep_only(self, rows: list[int]) -> None:
        """Drop the tensors of all other rows."""
        batch = self.batch
        self.items, batch.steps = [self.items[row] for row in rows], [batch.steps[row] for row in rows]
        self.sums = self.sums[rows]
        if self.kept is not None:
            self.kept = Scales(self.kept.cautious[rows], self.kept.bound[rows])
        if batch.rms_denominator is not None:
            batch.rms_denominator = batch.rms_denominator[rows]


def sort_into_works(pending: Iterable[Pending], scaling: Scaling, *, sharded: bool) -> list[Work]:
    """Sort parameters into batches that share options, device, dtype and step numbers.

    A batch may go early, in one pass over memory, if its scales are known. It must not where another rank decides
    whether it steps at all: under a loss scaler, or where the gradient is missing here.

    Args:
        pending: The parameters.
        scaling: What the loss scaler asks.
        sharded: Whether any of the optimizer's parameters is sharded, so that scales are made outside the engines.
    """
    sorted_in: dict[tuple[Any, ...], Work] = {}
    for item in pending:
        known = scales_known(item)
        early = known and not item.missing and scaling.overflow is None
        on_device = numbers_on_device(item, scaling)
        step = _next_step(item, on_device)
        forms = (is_coded(item.param, item.options), has_block_variance(item.param, item.options))
        alike = (known, early, item.part.domain, item.missing, item.group, item.param.device, item.param.dtype, *forms)
        key = (*alike, item.engine.name, item.index if isinstance(step, Tensor) else step)
        work = sorted_in.get(key)
        if work is None:
            work = Work(item.engine, empty_batch(item, step, scaling), item.part.domain, early)
            sorted_in[key] = work
        work.items.append(item)
        work.batch.steps.append(tensor_step(item, step))
    for (known, *_), work in sorted_in.items():
        if work.batch.numbers is None and sharded:
            work.batch.numbers = numbers_of_all(work, torch.stack([item.state["step"] for item in work.items]))
        work.kept = kept_scales(work) if known else None
    return list(sorted_in.values())


def _next_step(item: Pending, on_device: bool) -> int | Tensor | None:
    """The number of the step to take; None where the engine reads it itself."""
    if item.engine.numbers_on_device:
        return None
    return item.state["step"] + 1 if on_device else int(item.state["step"]) + 1


def numbers_of_all(work: Work, steps_taken: Tensor) -> rule.StepNumbers:
    """Step numbers of all tensors of a batch, FP64, one row per tensor: for scales that are made outside the engine."""
    batch = work.batch
    lr = torch.as_tensor(batch.options.lr, dtype=torch.float64, device=batch.device).reshape(())
    return rule.step_numbers(steps_taken.to(torch.float64) + 1, lr, batch.options, batch.param_dtype, 1.0)


def scales_known(item: Pending) -> bool:
    """Whether a parameter's scales need no sums of this step.

    A sharded parameter without gate and radial bound is measured all the same: in exact mode nothing may be written
    before all ranks are there, and one of them may be the only one with a gradient.
    """
    options = item.options
    if options.fused_single_pass:
        return all(key in item.state for key in KEPT_SCALES)
    return item.part.domain is None and not options.cautious and not (options.bound and options.bound_type == "radial")


def kept_scales(work: Work) -> Scales:
    """The scales of one-pass mode; ones where the rule has none."""
    if not work.batch.options.fused_single_pass:
        ones = torch.ones(len(work.items), device=work.batch.device)
        return Scales(ones, ones)
    pairs = [[item.state[key] for item in work.items] for key in KEPT_SCALES]
    return Scales(torch.stack(pairs[0]), torch.stack(pairs[1]))


def by_engine(works: Sequence[Work]) -> Iterator[tuple[Engine, list[Work], list[Batch]]]:
    """Engines with their work: each is called once, so that it may serve all of it in one launch."""
    for engine in {id(work.engine): work.engine for work in works}.values():
        own = [work for work in works if work.engine is engine]
        yield engine, own, [work.batch for work in own]


def prepare(works: Sequence[Work]) -> None:
    """Let every engine compile what this step needs."""
    for early in (True, False):
        for engine, _, batches in by_engine([work for work in works if work.early == early]):
            engine.prepare(batches, gather=early)


def measure_lookahead(works: Sequence[Work], domains: Sequence[Domain]) -> None:
    """Without a variance, the first of two measurements: it gives every tensor the denominator of its direction."""
    single = [work for work in works if not work.batch.options.has_variance]
    for engine, own, batches in by_engine(single):
        for work, table in zip(own, engine.measure_lookahead(batches), strict=True):
            work.sums = table
    for domain in domains:
        if domain.needs_rms:
            add_up(domain, [work for work in single if work.domain is domain], num_sums=2)
    for work in single:
        lookahead_sq, numel = work.sums[:, 0], work.sums[:, 1]
        numbers, options = work.batch.step_numbers, work.batch.options
        work.batch.rms_denominator = rule.single_denominator(lookahead_sq, numel, numbers, options)


def measure(works: Sequence[Work]) -> None:
    """Take the sums of all works."""
    for engine, own, batches in by_engine(works):
        for work, table in zip(own, engine.measure(batches), strict=True):
            work.sums = table


def update(works: Sequence[Work], *, gather: bool) -> None:
    """Store new weights and moments of all works; with `gather`, take the sums on the way."""
    for work in works:
        work.scales = exact_scales(work.batch, work.sums) if work.kept is None else work.kept
    for engine, own, batches in by_engine(works):
        tables = engine.update(batches, [work.scales for work in own], gather=gather)
        if gather:
            for work, table in zip(own, tables, strict=True):
                work.sums = table


# ---- sums over ranks -----------------------------------------------------------------------------------------------


def combine(works: Sequence[Work], domains: Sequence[Domain], flags: Tensor) -> Tensor:
    """Make the sums of all works those over whole parameters, and drop parameters that no rank has a gradient for.

    Args:
        works: All works, measured.
        domains: The ranks to ask, each in one collective.
        flags: FP64, 1-D. Each domain passes on what the ones before it found, so that on a mesh of several dimensions
            a flag reaches all ranks.

    Returns:
        The flags, added up.
    """
    for domain in domains:
        own = [work for work in works if work.domain is domain]
        flags = add_up(domain, own, num_sums=rule.NUM_SUMS, flags=flags)
        for work in own:
            num_grads = work.sums[:, -1]
            work.sums = work.sums[:, :-1]
            if work.missing:
                work.keep_only(num_grads.nonzero().flatten().tolist())
    return flags


def add_up(domain: Domain, works: Sequence[Work], *, num_sums: int, flags: Tensor | None = None) -> Tensor:
    """Make `sums` those over all ranks of a domain, with the number of ranks that have a gradient as a last column."""
    rows = [torch.empty(0, num_sums + 1, dtype=torch.float64, device=domain.device)]
    for work in works:
        has_grad = work.sums.new_full((len(work.items), 1), float(not work.missing))
        rows.append(torch.cat((work.sums, has_grad), 1).to(domain.device))
    extra = torch.zeros(num_sums + 1, dtype=torch.float64, device=domain.device)
    if flags is not None:
        extra[: len(flags)] = flags
    total, extra = domain.total(torch.cat(rows), [item.part.slot for work in works for item in work.items], extra)
    if num_sums == rule.NUM_SUMS and domain.device.type == "cpu":
        check_numels(domain, works, total)
    for work, sums in zip(works, total.split([len(work.items) for work in works]), strict=True):
        work.sums = sums.to(work.batch.device)
    return extra[:0] if flags is None else extra[: len(flags)]


def check_numels(domain: Domain, works: Sequence[Work], total: Tensor) -> None:
    """Raise on all ranks if one of them did not measure a parameter that has a gradient."""
    items = [item for work in works for item in work.items]
    measured, has_grad = rule.Sums.of(total[:, :-1]).numel.tolist(), total[:, -1].tolist()
    for item, numel, grads in zip(items, measured, has_grad, strict=True):
        if grads and numel != domain.numels[item.part.slot]:
            raise RuntimeError(
                f"parameter {item.index} of the optimizer has a gradient, but not all of its parts were measured: "
                f"{int(numel)} of {domain.numels[item.part.slot]} elements. It must not be frozen "
                "(requires_grad=False) on some ranks only, and its shards must keep their sizes."
            )


# ---- scales --------------------------------------------------------------------------------------------------------


def learning_rate(batch: Batch) -> rule.Scalar:
    """η as the scales take it: a float, or a 0-dim tensor."""
    if batch.numbers is not None:
        return batch.numbers.lr
    lr = batch.options.lr
    return lr.reshape(()) if isinstance(lr, Tensor) else lr


def exact_scales(batch: Batch, table: Tensor) -> Scales:
    """The scales of an exact step."""
    sums = rule.Sums.of(table)
    cautious = rule.cautious_scale(sums, batch.options)
    return Scales(cautious, rule.bound_scale(sums, cautious, learning_rate(batch), batch.options))


def blended_scales(batch: Batch, kept: Scales, table: Tensor) -> Scales:
    """The scales that one-pass mode keeps for the next step."""
    sums, options = rule.Sums.of(table), batch.options
    if not options.fused_single_pass:
        return kept
    cautious = rule.blend(kept.cautious, rule.cautious_scale(sums, options), options.ema_decay)
    bound = rule.bound_scale(sums, cautious, learning_rate(batch), options)
    return Scales(cautious, rule.blend(kept.bound, bound, options.ema_decay))
