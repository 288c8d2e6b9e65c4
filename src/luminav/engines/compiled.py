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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from luminav import rule
from luminav.engines import single
from luminav.engines.batch import Batch, Scales, TensorStep
from luminav.engines.bundle import Bundle, Select, keep_heap, present, present_key
from luminav.engines.slabs import ROW, Slab, slabs
from luminav.hyperparameters import Options
from luminav.rounding import Noise, NoiseKey, element_noise
from luminav.rule import Scalar, StepNumbers

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

    def load(self, of: Select, dtype: torch.dtype, share: int = 1) -> Tensor:
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

    def noise(self, *, exp_avg_sq: bool, moment_bits: int = 16) -> Noise:
        column = torch.arange(ROW, dtype=torch.int32, device=self.step.param.device)
        return element_noise(present_key(self.step), column, exp_avg_sq=exp_avg_sq, moment_bits=moment_bits)


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
        keep_heap()
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
    """η·c·s, and without a variance the denominator, of each tensor: FP64, [2, tensors]; 1 where it is not needed."""
    table = torch.ones(2, len(batch.steps), dtype=torch.float64, device=batch.device)
    if scales is not None:
        table[0] = scales.step_sizes(batch.step_numbers.lr)
    if batch.rms_denominator is not None:
        table[1] = batch.rms_denominator
    return table
