"""Batches on their way through a step: sorted, measured, their sums added up over ranks, scaled, updated."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from luminav import rule
from luminav.domains import Domain
from luminav.engines import Batch, Engine, Scales
from luminav.pending import Pending, Scaling, empty_batch, numbers_on_device, tensor_step
from luminav.state import KEPT_SCALES, has_block_variance, is_coded


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
