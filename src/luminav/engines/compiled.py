"""The compiled engine: the functions of ``rule.py`` through ``torch.compile``, one fused pass over memory a verb.

Every tensor is seen as rows of 512 elements. A graph takes any number of rows, and what differs from tensor to tensor
or from step to step (learning rate, bias corrections, noise keys, step sizes) is data: numbers of the step, or one
number per row. So a kind of tensor needs one graph for each verb, once in a process (see ``graphs.py``).

Large tensors are read where they lie. What does not fill its rows (small tensors, the ends of large ones, tensors that
are not contiguous) is copied side by side, padded with zeros, which add nothing to any sum.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from luminav import rule
from luminav.engines import single
from luminav.engines.batch import Batch, Scales
from luminav.engines.bundle import Select, keep_heap
from luminav.engines.graphs import (
    FORMULA,
    NUMBERS,
    READ,
    WEIGHTS,
    WRITTEN,
    Graphs,
    Kind,
    PerRow,
    places_in_row,
    targets,
)
from luminav.engines.slabs import Slab, slabs


class CompiledEngine:
    """Runs compiled graphs over slabs; see :class:`luminav.engines.batch.Engine` for the verbs.

    State in blocks is not among its kinds: parameters that keep it go to the foreach engine, see ``able_engine``.
    """

    name = "compile"
    numbers_on_device = False

    def __init__(self, graphs: Graphs | None = None) -> None:
        self.graphs = Graphs() if graphs is None else graphs

    def prepare(self, batches: Sequence[Batch], *, gather: bool) -> None:
        for batch in batches:
            verbs = ["update"] if gather else ["measure", "update"]
            if not batch.options.has_variance:
                verbs.insert(0, "lookahead")
            for slab in _slabs_of(batch):
                for verb in verbs:
                    self.graphs.compiled(kind_of(batch, slab, verb))

    def measure_lookahead(self, batches: Sequence[Batch]) -> list[Tensor]:
        return [self._run(batch, "lookahead", None) for batch in batches]

    def measure(self, batches: Sequence[Batch]) -> list[Tensor]:
        return [self._run(batch, "measure", None) for batch in batches]

    def update(self, batches: Sequence[Batch], scales: Sequence[Scales], *, gather: bool) -> list[Tensor]:
        self.prepare(batches, gather=gather)  # for callers of this verb alone: none may fail when another has written
        tables = [self._run(batch, "update", scale) for batch, scale in zip(batches, scales, strict=True)]
        return tables if gather else []

    @torch.inference_mode(False)
    @torch.no_grad()
    def _run(self, batch: Batch, verb: str, scales: Scales | None) -> Tensor:
        """One verb on one batch. Returns its sums."""
        keep_heap()
        numbers, dtype = _numbers_of(batch), batch.compute_dtype
        step_sizes = None if scales is None else scales.step_sizes(batch.step_numbers.lr).to(dtype)
        denominators = None if batch.rms_denominator is None else batch.rms_denominator.to(dtype)
        unchanged = _unchanged(batch)
        columns: list[Tensor | None] = [None] * (2 if verb == "lookahead" else rule.NUM_SUMS)
        sums = []
        for slab in _slabs_of(batch):
            kind = kind_of(batch, slab, verb)
            graph = self.graphs.compiled(kind)
            skip = _skip_of(batch) if kind.guarded else None
            words = (*slab.words(), places_in_row(batch.device)) if kind.noise else None
            tensors = [slab.load(of) for of in READ]
            into: list[Tensor | None] = [None] * len(READ)
            if kind.writes:
                into = targets(tensors, apart=not graph.in_place, unchanged=unchanged)
            per_row = PerRow(
                step_sizes=None if step_sizes is None else slab.spread(step_sizes),
                rms_denominators=None if denominators is None else slab.spread(denominators),
                ones=torch.ones(slab.rows, dtype=dtype, device=batch.device),
            )
            columns = graph.run(tensors, into, numbers, skip, per_row, words)
            for of, rows in zip(READ, into, strict=True):
                if rows is not None and of not in unchanged and not (graph.in_place and slab.in_place):
                    slab.store(of, rows)
            sums.append(slab.sums([column for column in columns if column is not None]))
        return _table(batch, sums, [column is not None for column in columns])


def _table(batch: Batch, sums: Sequence[Tensor], summed: Sequence[bool]) -> Tensor:
    """Sums of the tensors, one row each, from those of their fragments, one after the other.

    Args:
        batch: The batch.
        sums: For each slab, see :meth:`Slab.sums`.
        summed: For each column of the result, whether it is there; if not, it is the number of elements.
    """
    table = torch.zeros(len(batch.steps), len(summed), dtype=torch.float64, device=batch.device)
    fragments = [fragment for slab in _slabs_of(batch) for fragment in slab.fragments]
    if not fragments:
        return table
    numel = table.new_tensor([fragment.stop - fragment.start for fragment in fragments])
    columns = iter(torch.cat([*sums]).unbind(1))
    rows = torch.stack([next(columns) if there else numel for there in summed], 1)
    for fragment, row in zip(fragments, rows.unbind(), strict=True):
        table[fragment.piece.tensor] += row
    return table


def kind_of(batch: Batch, slab: Slab, verb: str) -> Kind:
    """The graph that a verb needs for a slab."""
    first = slab.steps[slab.fragments[0].piece.tensor]
    tensors = [of(first) for of in READ]
    dtypes = tuple(None if tensor is None else tensor.dtype for tensor in tensors)
    formula = tuple(getattr(batch.options, name) for name in FORMULA)
    noise = ""
    if verb == "update" and single.rounds_stochastically(batch):
        noise = "element" if slab.per_element else "row"
    return Kind(verb, formula, dtypes, noise, batch.device)


def _slabs_of(batch: Batch) -> list[Slab]:
    """The slabs of a batch, cut once for all verbs of a step."""
    if batch.kept is None or batch.kept[0] != batch.steps:
        batch.kept = (list(batch.steps), list(slabs(batch.steps, batch.device)))
    found: list[Slab] = batch.kept[1]
    return found


def _unchanged(batch: Batch) -> tuple[Select, ...]:
    """What an update of tensors on the CPU leaves as it is; elsewhere the graph sees to that."""
    if batch.device.type != "cpu":
        return ()
    if batch.skip is not None and bool(batch.skip):
        return WRITTEN
    return WEIGHTS if float(batch.step_numbers.lr) == 0.0 else ()


def _skip_of(batch: Batch) -> Tensor:
    return torch.zeros((), dtype=torch.bool, device=batch.device) if batch.skip is None else batch.skip


def _numbers_of(batch: Batch) -> Tensor:
    """The step's numbers in the order of their declaration, rounded once."""
    numbers = [getattr(batch.step_numbers, name) for name in NUMBERS]
    if any(isinstance(number, Tensor) for number in numbers):
        each = [torch.as_tensor(number, dtype=torch.float64, device=batch.device) for number in numbers]
        return torch.stack([number.reshape(()) for number in each]).to(batch.compute_dtype)
    return torch.tensor(numbers, dtype=batch.compute_dtype, device=batch.device)
