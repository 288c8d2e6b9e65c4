"""The compiled engine: the functions of ``rule.py`` through ``torch.compile``, one fused pass over memory a verb.

Every tensor is seen as rows of 512 elements. A graph takes any number of rows, and what differs from tensor to tensor
or from step to step (learning rate, bias corrections, noise keys, step sizes) is data: numbers of the step, or one
number per row. So a kind of tensor needs one graph for each verb, once in a process (see :class:`Graphs`).

Large tensors are read where they lie. What does not fill its rows (small tensors, the ends of large ones, tensors that
are not contiguous) is copied side by side, padded with zeros, which add nothing to any sum. A graph returns new values
and writes nothing, so that it stays one loop: with stores in place, Inductor splits the sums from the rest.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from luminav import rule
from luminav.engines import bundle as pieces
from luminav.engines import single
from luminav.engines.batch import Batch, Scales, TensorStep
from luminav.engines.bundle import Bundle, Piece, Select, cut, present, present_key
from luminav.hyperparameters import Options
from luminav.rounding import HIGH_WORD_MULTIPLIERS, Noise, NoiseKey, Word, element_noise
from luminav.rule import Scalar, StepNumbers

ROW = 512
LEAST_ROWS = 2
"""Graphs are for any number of rows but one, which the compiler would take for a constant."""
CPU_ROWS = 1 << 11  # new values of a piece, 2 MiB each in BF16, are still in the cache when they are stored
DEVICE_ROWS = 1 << 14
ROWS_READ_IN_PLACE = 16  # less than this is not worth a call of its own
COMPILE_ERRORS = (RuntimeError, NotImplementedError, OSError, subprocess.SubprocessError)
"""What torch.compile raises: its own errors are RuntimeErrors, the others come from starting compilers."""

INLINE_ALL = 1 << 30
SETTINGS = {
    # One loop: nothing is worth a buffer of its own, however often it is used.
    "realize_opcount_threshold": INLINE_ALL,
    "realize_reads_threshold": INLINE_ALL,
    "realize_acc_reads_threshold": INLINE_ALL,
}
FORMULA = (
    "alpha_ss",
    "cautious",
    "buffer",
    "stochastic_rounding",
    "bound",
    "bound_type",
    "bound_ratio",
    "master_weights",
    "block_variance",
)
"""The options that a graph is compiled for. The others reach it as numbers."""
WRITING = ("update", "gather")
NUMBERS = tuple(StepNumbers.__dataclass_fields__)


# ---- inside a graph ------------------------------------------------------------------------------------------------


class Rows(Bundle):
    """Rows of tensors in the place of a :class:`Bundle`, for the functions of ``single.py``: one number per row.

    Args:
        step: Tensors of shape [rows, 512], with two words of the noise key for each row or element.
    """

    def __init__(self, step: TensorStep) -> None:
        self.step = step
        self.stored: list[Tensor] = []

    def known_finite(self, flat: Tensor) -> bool:
        return False

    def load(self, of: Select, dtype: torch.dtype) -> Tensor:
        return present(of(self.step)).to(dtype)

    def copy(self, of: Select, dtype: torch.dtype, share: int = 1) -> Tensor:
        return present(of(self.step)).to(dtype, copy=True)

    def store(self, of: Select, flat: Tensor, unless: Tensor | None = None, share: int = 1) -> None:
        """Keep the new value. The caller stores what :func:`stores` lists, in that order."""
        old = present(of(self.step))
        value = flat.to(old.dtype)
        self.stored.append(value if unless is None else torch.where(unless, old, value))

    def spread(self, per_tensor: Tensor, dtype: torch.dtype) -> Scalar:
        return per_tensor.to(dtype).unsqueeze(1)

    def sum(self, flat: Tensor) -> list[Tensor]:
        return [flat.sum(1, dtype=flat.dtype if flat.is_floating_point() else torch.float32)]

    def noise(self, *, exp_avg_sq: bool) -> Noise:
        column = torch.arange(ROW, dtype=torch.int32, device=self.step.param.device)
        return element_noise(present_key(self.step), column, exp_avg_sq=exp_avg_sq)


@dataclass(frozen=True)
class Kind:
    """What a graph is compiled for."""

    verb: str
    """"lookahead", "measure", "update", or "gather": an update with sums."""
    formula: tuple[Any, ...]
    """Values of the options :data:`FORMULA`."""
    dtypes: tuple[torch.dtype | None, ...]
    """Of parameter, gradient, moments, master and remainder; None for what is not there."""
    noise: str
    """Whether noise has two words for each "row" or "element", or is not needed: ""."""
    device: torch.device

    @property
    def writes(self) -> bool:
        """Whether the graph works out new weights and moments."""
        return self.verb in WRITING


def body(kind: Kind) -> Callable[..., Any]:
    """The function that becomes the graph of `kind`: load → rule → new values, as in ``single.py``."""
    verb, formula = kind.verb, replace(Options(), **dict(zip(FORMULA, kind.formula, strict=True)))

    def run(
        tensors: list[Tensor | None],
        numbers: Tensor,
        skip: Tensor,
        per_row: Tensor | None,
        words: tuple[Tensor, Tensor] | None,
    ) -> tuple[list[Tensor | None], list[Tensor]]:
        param, grad, exp_avg, exp_avg_sq, master, remainder = tensors
        key = None if words is None else NoiseKey(*words)
        assert param is not None and exp_avg is not None
        step = TensorStep(param, grad, exp_avg, exp_avg_sq, master, key, master_remainder=remainder)
        batch = Batch(formula, StepNumbers(*numbers.unbind()), [step], skip)
        if not formula.has_variance and verb != "lookahead":
            assert per_row is not None
            batch.rms_denominator = per_row[1]
        rows = Rows(step)
        if verb == "lookahead":
            return [single.lookahead_squares(batch, rows)[0], None], []
        if verb == "measure":
            return _columns(single.measured(batch, rows)), []
        assert per_row is not None
        sums = single.updated(batch, rows, per_row[0], gather=verb == "gather")
        return [] if sums is None else _columns(sums), rows.stored

    return run


def _columns(sums: single.BundleSums) -> list[Tensor | None]:
    """In the order of :class:`luminav.rule.Sums`; None stands for the number of elements."""
    each = [None if column is None else column[0] for column in sums]
    return [*each[:3], None, each[3]]


class Graphs:
    """Compiled graphs by kind.

    Args:
        backend: Of ``torch.compile``. The tests trace with "eager", which needs no compiler.
    """

    def __init__(self, backend: str = "inductor") -> None:
        self._backend = backend
        self._graphs: dict[Kind, Callable[..., Any]] = {}

    def __len__(self) -> int:
        return len(self._graphs)

    def compiled(self, kind: Kind) -> Callable[..., Any]:
        """The graph of a kind; compiled now, on rows of zeros, if it is new.

        Raises:
            RuntimeError: It does not compile.
        """
        if kind not in self._graphs:
            graph = self._made(kind)
            try:
                graph(*_example(kind))
            except COMPILE_ERRORS as error:
                reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
                raise RuntimeError(
                    f"execution='compile' cannot run here: torch.compile failed ({reason}). On a CPU it needs a C++ "
                    "compiler: name one in the environment variable CXX, or use execution='auto', which needs none."
                ) from error
            self._graphs[kind] = graph
        return self._graphs[kind]

    def _made(self, kind: Kind) -> Callable[..., Any]:
        run = body(kind)
        # Dynamo counts recompilations for each code object, and would give up on the ninth kind of one function.
        run.__code__ = run.__code__.replace(co_name=f"{kind.verb}_{len(self)}")
        settings: Any = SETTINGS if self._backend == "inductor" and kind.device.type == "cpu" else None
        return torch.compile(run, fullgraph=True, backend=self._backend, options=settings)


def _example(kind: Kind) -> list[Any]:
    """Arguments for a graph, with any number of rows."""
    rows = 64
    tensors = [
        None if dtype is None else torch.zeros(rows, ROW, dtype=dtype, device=kind.device) for dtype in kind.dtypes
    ]
    numbers = torch.ones(len(NUMBERS), dtype=torch.float64, device=kind.device)
    skip = torch.zeros((), dtype=torch.bool, device=kind.device)
    columns = ROW if kind.noise == "element" else 1
    words = (
        [torch.zeros(rows, columns, dtype=torch.int32, device=kind.device) for _ in range(2)] if kind.noise else None
    )
    per_row = torch.ones(2, rows, dtype=torch.float64, device=kind.device)
    for tensor in [*tensors, *(words or [])]:
        if tensor is not None:
            torch._dynamo.mark_dynamic(tensor, 0)
    torch._dynamo.mark_dynamic(per_row, 1)
    return [tensors, numbers, skip, per_row, None if words is None else tuple(words)]


# ---- rows of tensors -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fragment:
    """Elements `start` to `stop` of a piece, in `rows` rows of their own, the last one perhaps padded."""

    piece: Piece
    start: int
    stop: int

    @property
    def rows(self) -> int:
        return -(-(self.stop - self.start) // ROW)


class Slab:
    """Fragments of tensors of one batch as rows, one fragment after the other."""

    def __init__(self, steps: Sequence[TensorStep], fragments: Sequence[Fragment]) -> None:
        self.steps, self.fragments = steps, fragments
        self.device = steps[0].param.device
        self.rows = max(LEAST_ROWS, sum(fragment.rows for fragment in fragments))

    def load(self, of: Select) -> Tensor | None:
        """One kind of tensor as [rows, 512]: a view where the rows lie like that, else a copy."""
        parts = [self._part(of, fragment) for fragment in self.fragments]
        first = parts[0]
        if first is None:
            return None
        if len(parts) == 1 and first.numel() == self.rows * ROW:
            return first.reshape(-1).view(self.rows, ROW)
        rows = first.new_zeros(self.rows, ROW)
        targets = self._targets(rows, [present(part) for part in parts])
        torch._foreach_copy_(targets, [present(part) for part in parts])
        return rows

    def store(self, of: Select, rows: Tensor) -> None:
        """Write rows back into the tensors."""
        parts = [present(self._part(of, fragment)) for fragment in self.fragments]
        torch._foreach_copy_(parts, self._targets(rows, parts))

    def _part(self, of: Select, fragment: Fragment) -> Tensor | None:
        tensor = of(self.steps[fragment.piece.tensor])
        if tensor is None:
            return None
        view = tensor.detach()[fragment.piece.index]
        if fragment.stop - fragment.start == fragment.piece.numel:
            return view
        return view.reshape(-1)[fragment.start : fragment.stop]  # of gradients alone it may be a copy

    def _targets(self, rows: Tensor, parts: Sequence[Tensor]) -> list[Tensor]:
        """The places of the fragments in the rows, each in the shape of its part."""
        flat, first, targets = rows.view(-1), 0, []
        for fragment, part in zip(self.fragments, parts, strict=True):
            targets.append(flat[first : first + part.numel()].view(part.shape))
            first += fragment.rows * ROW
        return targets

    def spread(self, per_tensor: Tensor) -> Tensor:
        """Numbers of tensors, in the last dimension, as numbers of rows; a row without a tensor has the last one's."""
        numbers = [fragment.piece.tensor for fragment in self.fragments]
        if len(numbers) == 1:
            return per_tensor[..., numbers].expand(*per_tensor.shape[:-1], self.rows).contiguous()
        counts = [fragment.rows for fragment in self.fragments]
        counts[-1] += self.rows - sum(counts)
        repeats = torch.tensor(counts, device=self.device)
        return per_tensor[..., numbers].repeat_interleave(repeats, dim=-1, output_size=self.rows)

    def add_(self, table: Tensor, columns: Sequence[Tensor | None]) -> None:
        """Add sums of rows to the table's rows: each fragment's in FP64, one after the other. None counts elements."""
        counted = [column for column in columns if column is not None]
        split = torch.stack(counted, 1).to(torch.float64).split([*self._row_counts])
        for fragment, part in zip(self.fragments, split, strict=False):
            sums = iter(part.sum(0).unbind())
            numel = table.new_tensor(fragment.stop - fragment.start)
            table[fragment.piece.tensor] += torch.stack([numel if c is None else next(sums) for c in columns])

    @property
    def _row_counts(self) -> list[int]:
        counts = [fragment.rows for fragment in self.fragments]
        return [*counts, self.rows - sum(counts)]

    # ---- noise -----------------------------------------------------------------------------------------------------

    @cached_property
    def per_element(self) -> bool:
        """Whether the elements of some row are not consecutive in their parameter, as far as the noise is concerned."""
        return any(self._is_scattered(fragment) for fragment in self.fragments)

    def _is_scattered(self, fragment: Fragment) -> bool:
        step = self.steps[fragment.piece.tensor]
        start = step.first_index + fragment.piece.start + fragment.start
        return bool(step.jumps) or start % pieces.LOW_WORD + fragment.rows * ROW > pieces.LOW_WORD

    def words(self) -> tuple[Tensor, Tensor]:
        """What :func:`element_noise` adds to an element's column in each of its two rounds, int32, [rows, 1 or 512]."""
        first, second = zip(*(self._words_of(fragment) for fragment in self.fragments), strict=True)
        return self._padded(first), self._padded(second)

    def _words_of(self, fragment: Fragment) -> tuple[Tensor, Tensor]:
        step = self.steps[fragment.piece.tensor]
        part = Piece(0, (), fragment.piece.start + fragment.start, fragment.stop - fragment.start)
        if self.per_element:
            index = pieces.indices(step, part, self.device)
            index = torch.cat((index, index.new_zeros(fragment.rows * ROW - index.numel()))).view(-1, ROW)
            index -= torch.arange(ROW, device=self.device)
            low, high = index, (index + torch.arange(ROW, device=self.device)).bitwise_right_shift(32)
        else:
            start = step.first_index + part.start
            low = torch.arange(start % pieces.LOW_WORD, start % pieces.LOW_WORD + fragment.rows * ROW, ROW)
            low = low.to(self.device).unsqueeze(1)
            high = torch.full_like(low, start // pieces.LOW_WORD)
        key = present_key(step)
        return _word(key.first, low + high * HIGH_WORD_MULTIPLIERS[0]), _word(
            key.second, high * HIGH_WORD_MULTIPLIERS[1]
        )

    def _padded(self, words: Sequence[Tensor]) -> Tensor:
        missing = self.rows - sum(len(word) for word in words)
        return torch.cat((*words, words[0].new_zeros(missing, words[0].shape[1])))


def _word(key: Word, term: Tensor) -> Tensor:
    """Their sum modulo 2³², int32."""
    return (term + (key.to(torch.int64) if isinstance(key, Tensor) else key)).to(torch.int32)


def slabs(steps: Sequence[TensorStep], device: torch.device) -> Iterator[Slab]:
    """Cut the tensors of a batch into slabs."""
    limit = CPU_ROWS if device.type == "cpu" else DEVICE_ROWS
    waiting: list[Fragment] = []
    held = 0
    for number, step in enumerate(steps):
        whole_pieces = not _rows_lie_in_place(step)
        if waiting and step.present_grad.dtype != steps[waiting[0].piece.tensor].present_grad.dtype:
            yield Slab(steps, waiting)
            waiting, held = [], 0
        for piece in cut(number, step.param.shape, limit * ROW):
            body = piece.numel // ROW * ROW
            if whole_pieces or body < ROWS_READ_IN_PLACE * ROW:
                body = 0
            else:
                yield Slab(steps, [Fragment(piece, 0, body)])
            if body < piece.numel:
                rest = Fragment(piece, body, piece.numel)
                if waiting and held + rest.rows > limit:
                    yield Slab(steps, waiting)
                    waiting, held = [], 0
                waiting.append(rest)
                held += rest.rows
    if waiting:
        yield Slab(steps, waiting)


def _rows_lie_in_place(step: TensorStep) -> bool:
    written = (step.param, step.exp_avg, step.exp_avg_sq, step.master_param, step.master_remainder)
    return all(tensor is None or tensor.is_contiguous() for tensor in written)


# ---- the engine ----------------------------------------------------------------------------------------------------

_TENSORS: tuple[Select, ...] = (
    single.param_of,
    single.grad_of,
    single.exp_avg_of,
    single.exp_avg_sq_of,
    single.master_param_of,
    single.master_remainder_of,
)


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
            verbs = ["gather"] if gather else ["measure", "update"]
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
        self.prepare(batches, gather=gather)
        verb = "gather" if gather else "update"
        tables = [self._run(batch, verb, scale) for batch, scale in zip(batches, scales, strict=True)]
        return tables if gather else []

    @torch.no_grad()
    def _run(self, batch: Batch, verb: str, scales: Scales | None) -> Tensor:
        """One verb on one batch. Returns its sums."""
        pieces.keep_heap()
        num_sums = 2 if verb == "lookahead" else rule.NUM_SUMS
        table = torch.zeros(len(batch.steps), num_sums, dtype=torch.float64, device=batch.device)
        numbers, per_tensor = _numbers_of(batch), _per_tensor(batch, scales)
        skip = torch.zeros((), dtype=torch.bool, device=batch.device) if batch.skip is None else batch.skip
        for slab in _slabs_of(batch):
            kind = kind_of(batch, slab, verb)
            per_row = slab.spread(per_tensor)
            words = slab.words() if kind.noise else None
            tensors = [slab.load(of) for of in _TENSORS]
            columns, new = self.graphs.compiled(kind)(tensors, numbers, skip, per_row, words)
            if kind.writes:
                for of, rows in zip(single.stores(batch), new, strict=True):
                    slab.store(of, rows)
            if columns:
                slab.add_(table, columns)
        return table


def kind_of(batch: Batch, slab: Slab, verb: str) -> Kind:
    """The graph that a verb needs for a slab."""
    first = slab.steps[slab.fragments[0].piece.tensor]
    tensors = [of(first) for of in _TENSORS]
    dtypes = tuple(None if tensor is None else tensor.dtype for tensor in tensors)
    formula = tuple(getattr(batch.options, name) for name in FORMULA)
    noise = ""
    if verb in WRITING and single.rounds_stochastically(batch):
        noise = "element" if slab.per_element else "row"
    return Kind(verb, formula, dtypes, noise, batch.device)


def _slabs_of(batch: Batch) -> list[Slab]:
    """The slabs of a batch, cut once for all verbs of a step."""
    if batch.kept is None or batch.kept[0] != batch.steps:
        batch.kept = (list(batch.steps), list(slabs(batch.steps, batch.device)))
    found: list[Slab] = batch.kept[1]
    return found


def _numbers_of(batch: Batch) -> Tensor:
    """The step's numbers, FP64, in the order of their declaration."""
    numbers = [getattr(batch.step_numbers, name) for name in NUMBERS]
    if any(isinstance(number, Tensor) for number in numbers):
        each = [torch.as_tensor(number, dtype=torch.float64, device=batch.device) for number in numbers]
        return torch.stack([number.reshape(()) for number in each])
    return torch.tensor(numbers, dtype=torch.float64, device=batch.device)


def _per_tensor(batch: Batch, scales: Scales | None) -> Tensor:
    """η·c·s, and with buffer=1 the denominator, of each tensor: FP64, [2, tensors]; 1 where it is not needed."""
    table = torch.ones(2, len(batch.steps), dtype=torch.float64, device=batch.device)
    if scales is not None:
        table[0] = scales.step_sizes(batch.step_numbers.lr)
    if batch.rms_denominator is not None:
        table[1] = batch.rms_denominator
    return table
