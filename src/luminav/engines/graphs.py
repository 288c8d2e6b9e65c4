"""The compiled engine's graphs: the functions of ``rule.py`` through ``torch.compile``, one loop a verb.

A graph takes any number of rows of 512 elements, and what differs from tensor to tensor or from step to step is data.
It is one loop that reads each element before it writes it. Told that it writes what it reads, Inductor would split the
sums from the rest; so the tensors to write are arguments of their own, and every graph is tried once with the same
memory for both before it is given that (see :class:`Graph`).
"""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from luminav.engines import single
from luminav.engines.batch import Batch, TensorStep
from luminav.engines.bundle import Bundle, Per, Select, present, present_key
from luminav.engines.slabs import ROW
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
NUMBERS = tuple(StepNumbers.__dataclass_fields__)
MOMENTS: tuple[Select, ...] = (single.exp_avg_of, single.exp_avg_sq_of)
WEIGHTS: tuple[Select, ...] = (single.param_of, single.master_param_of, single.master_remainder_of)
WRITTEN = (*MOMENTS, *WEIGHTS)
READ: tuple[Select, ...] = (
    single.param_of,
    single.grad_of,
    single.exp_avg_of,
    single.exp_avg_sq_of,
    single.master_param_of,
    single.master_remainder_of,
)


# ---- inside a graph ------------------------------------------------------------------------------------------------


class Rows(Bundle):
    """Rows of tensors in the place of a :class:`Bundle`, for the functions of ``single.py``: one number per row.

    Args:
        step: Tensors of shape [rows, 512], with two words of the noise key for each row or element.
        column: 0, 1, … 511, int32; None where there is no noise. Inductor would fill such a vector number by number.
    """

    def __init__(self, step: TensorStep, column: Tensor | None) -> None:
        self.step = step
        self.stored: dict[Select, Tensor] = {}
        self._column = column

    def known_finite(self, flat: Tensor) -> bool:
        return False

    def load(self, of: Select, dtype: torch.dtype, per: Per = Per.ELEMENT) -> Tensor:
        return present(of(self.step)).to(dtype)

    def copy(self, of: Select, dtype: torch.dtype, per: Per = Per.ELEMENT) -> Tensor:
        return present(of(self.step)).to(dtype, copy=True)

    def store(self, of: Select, flat: Tensor, unless: Tensor | None = None, per: Per = Per.ELEMENT) -> None:
        """Keep the new value. It is written when everything has been read."""
        old = present(of(self.step))
        value = flat.to(old.dtype)
        self.stored[of] = value if unless is None else torch.where(unless, old, value)

    def spread(self, per_tensor: Tensor, dtype: torch.dtype) -> Scalar:
        return per_tensor.to(dtype).unsqueeze(1)

    def sum(self, flat: Tensor) -> list[Tensor]:
        """What is to be summed, see :func:`_row_sums`."""
        return [flat]

    def noise(self, *, exp_avg_sq: bool, moment_bits: int = 16) -> Noise:
        column = present(self._column)
        return element_noise(present_key(self.step), column, exp_avg_sq=exp_avg_sq, moment_bits=moment_bits)


class PerRow(NamedTuple):
    """Numbers of each row, of its tensor, rounded once."""

    step_sizes: Tensor | None
    """η·c·s, for an update."""
    rms_denominators: Tensor | None
    """Without a variance."""
    ones: Tensor


@dataclass(frozen=True)
class Kind:
    """What a graph is compiled for."""

    verb: str
    """"lookahead", "measure", or "update", which gives the sums whether or not they are asked for: they cost next to
    nothing, and one graph less to compile is half a minute."""
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
        return self.verb == "update"

    @property
    def scaled(self) -> bool:
        """Whether the graph needs one RMS per tensor."""
        return self.verb != "lookahead" and not self.options.has_variance

    @property
    def options(self) -> Options:
        """Options with these values, the others being the defaults."""
        return replace(Options(), **dict(zip(FORMULA, self.formula, strict=True)))

    @property
    def guarded(self) -> bool:
        """Whether the graph itself sees that a step is skipped or η is 0; on a CPU the engine does, without waiting."""
        return self.device.type != "cpu"

    @property
    def compute_dtype(self) -> torch.dtype:
        """See :attr:`Batch.compute_dtype`."""
        return torch.float64 if self.dtypes[0] == torch.float64 else torch.float32


def body(kind: Kind) -> Callable[..., Any]:
    """The function that becomes the graph of `kind`: load → rule → new values, as in ``single.py``."""
    verb, options, scaled = kind.verb, kind.options, kind.scaled

    def run(
        tensors: list[Tensor | None],
        into: list[Tensor | None],
        numbers: Tensor,
        skip: Tensor | None,
        per_row: PerRow,
        words: tuple[Tensor, Tensor, Tensor] | None,
    ) -> list[Tensor | None]:
        _same_rows(*tensors, *into)
        param, grad, exp_avg, exp_avg_sq, master, remainder = tensors
        assert param is not None and exp_avg is not None
        key, column = (None, None) if words is None else (NoiseKey(*words[:2]), words[2])
        step = TensorStep(param, grad, exp_avg, exp_avg_sq, master, key, master_remainder=remainder)
        known = dict(zip(NUMBERS, numbers.unbind(), strict=True))
        # Where nothing is to be skipped, η is not looked at: it is part of the step sizes.
        batch = Batch(options, StepNumbers(**known if kind.guarded else {**known, "lr": 1.0}), [step], skip)
        if scaled:
            batch.rms_denominator = per_row.rms_denominators
        rows = Rows(step, column)
        if verb == "lookahead":
            return [single.lookahead_squares(batch, rows)[0].sum(1), None]
        if verb == "measure":
            return _row_sums(single.measured(batch, rows), per_row.ones)
        sums = single.updated(batch, rows, present(per_row.step_sizes), gather=True)
        assert sums is not None
        columns = _row_sums(sums, per_row.ones)
        for of, target in zip(READ, into, strict=True):
            if target is not None:
                target.copy_(rows.stored[of])
        return columns

    return run


def _same_rows(first: Tensor | None, *others: Tensor | None) -> None:
    """Tell the compiler that all have as many rows: it fuses no loops of which it does not know that."""
    for other in others:
        if other is not None:
            torch._check(other.shape[0] == present(first).shape[0])


def _row_sums(sums: single.BundleSums, ones: Tensor) -> list[Tensor | None]:
    """Sums of rows in the order of :class:`luminav.rule.Sums`, FP32 for counts; None is the number of elements.

    Inductor puts into one loop only what reads something in common, which the sum over the weights does not: so two
    sums have a factor 1 from memory. And it takes sums into a loop over values, but not values into a loop over sums:
    so one of the squares is made a value, which no memory is ever written for, by a view that asks for one. The sum
    over it is one of FP32 alone, without which Inductor would work on twice the elements at once, as many as there are
    of BF16 in a register, and run out of registers.
    """
    factor = ones.unsqueeze(1)
    direction_sq, param_sq = sums.direction_sq[0] * factor, sums.param_sq[0] * factor
    direction_sq = direction_sq.as_strided(direction_sq.shape, direction_sq.stride())
    kept, nonfinite = (None if counts is None else counts[0] for counts in (sums.kept, sums.nonfinite))
    each = [kept, direction_sq, param_sq, None, nonfinite]
    return [None if column is None else column.to(ones.dtype).sum(1) for column in each]


@dataclass(frozen=True)
class Graph:
    """A compiled graph."""

    run: Callable[..., list[Tensor | None]]
    in_place: bool
    """Whether the tensors to write may share memory with those to read."""
    same_settings: Callable[[], bool]
    """Whether torch's global settings are those for which it is compiled. For others there is another graph."""


def settings_guard() -> Callable[[], bool]:
    """A test whether torch's global settings (threads, determinism, …) are still what they are now.

    It is what torch.compile guards all graphs with, and like all that is private in torch it may be gone one day. Then
    the settings that users change between steps are compared.
    """
    guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    maker = getattr(guards, "GlobalStateGuard", None)
    if maker is None:
        now = _settings()
        return lambda: _settings() == now
    check: Callable[[], bool] = maker().check
    return check


def _settings() -> tuple[Any, ...]:
    return (
        torch.get_num_threads(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.get_float32_matmul_precision(),
    )


class Graphs:
    """Compiled graphs by kind.

    Args:
        backend: Of ``torch.compile``. The tests trace with "eager", which needs no compiler.
    """

    def __init__(self, backend: str = "inductor") -> None:
        self._backend = backend
        self.by_kind: dict[Kind, list[Graph]] = {}
        """One for each of torch's global settings that steps were taken in."""

    def __len__(self) -> int:
        return len(self.by_kind)

    @torch.no_grad()
    def compiled(self, kind: Kind) -> Graph:
        """The graph of a kind; compiled now, on made-up rows, if it or one of torch's global settings is new.

        It must not be compiled in the middle of a step, for memory that is read and written, which would not be a loop.

        Raises:
            RuntimeError: It does not compile.
        """
        graphs = self.by_kind.get(kind, [])
        known = next((graph for graph in graphs if graph.same_settings()), None)
        if known is not None:
            return known
        run = self._made(kind)  # not the `run` of another, which torch would compile for eight settings and no more
        try:
            apart = _example_results(run, kind, in_place=False)
        except COMPILE_ERRORS as error:
            raise RuntimeError(
                f"execution='compile' cannot run here: torch.compile failed ({_reason(error)}). On a CPU it needs a "
                "C++ compiler: name one in the environment variable CXX, or use execution='auto', which needs none."
            ) from error
        shared = _example_results(run, kind, in_place=True)
        new = Graph(run, all(map(torch.equal, apart, shared)), settings_guard())
        self.by_kind[kind] = [*graphs, new]
        return new

    def _made(self, kind: Kind) -> Callable[..., Any]:
        run = body(kind)
        # Dynamo counts recompilations for each code object, and would give up on the ninth kind of one function.
        run.__code__ = run.__code__.replace(co_name=f"{kind.verb}_{len(self)}")
        settings: Any = SETTINGS if self._backend == "inductor" and kind.device.type == "cpu" else None
        return torch.compile(run, fullgraph=True, backend=self._backend, options=settings)


def _reason(error: BaseException) -> str:
    """What the compiler says, in a line; torch 2.6 says first who says it."""
    first, _, more = str(error).partition("\n")
    said = f"{first} {more.partition(chr(10))[0]}" if first.endswith(":") else first
    return f"{type(error).__name__}: {said}"


@torch.inference_mode(False)
@torch.no_grad()
def _example_results(run: Callable[..., Any], kind: Kind, *, in_place: bool) -> list[Tensor]:
    """What a graph writes and returns for rows of random numbers, always the same ones. It is for any number of rows.

    Args:
        run: The graph.
        kind: Its kind.
        in_place: Whether it writes to the tensors that it reads.
    """
    rows, dtype, generator = 64, kind.compute_dtype, torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    columns = ROW if kind.noise == "element" else 1
    words = [((random(rows, columns) - 0.5) * 2.0**32).to(torch.int32).to(kind.device) for _ in range(2)]
    tensors = [
        None if each is None else (random(rows, ROW) * (99.0 if each == torch.int16 else 1.0)).to(each).to(kind.device)
        for each in kind.dtypes
    ]
    into = targets(tensors, apart=not in_place, unchanged=()) if kind.writes else [None] * len(READ)
    numbers = random(len(NUMBERS)).to(kind.device, dtype)
    each = [random(rows).to(kind.device, dtype) for _ in PerRow._fields]
    per_row = PerRow(each[0] if kind.writes else None, each[1] if kind.scaled else None, each[2])
    skip = torch.zeros((), dtype=torch.bool, device=kind.device) if kind.guarded else None
    for tensor in (*tensors, *into, *words, *per_row):
        if tensor is not None:
            torch._dynamo.mark_dynamic(tensor, 0)
    noise = (*words, places_in_row(kind.device)) if kind.noise else None
    sums = run(tensors, into, numbers, skip, per_row, noise)
    return [result for result in (*into, *sums) if result is not None]


def targets(tensors: Sequence[Tensor | None], *, apart: bool, unchanged: Sequence[Select]) -> list[Tensor | None]:
    """What a graph writes to, in the order of :data:`READ`: the tensors themselves, or memory apart."""

    def target(of: Select, rows: Tensor | None) -> Tensor | None:
        if rows is None or of not in WRITTEN:
            return None
        return torch.empty_like(rows) if apart or of in unchanged else rows.detach()

    return [target(of, rows) for of, rows in zip(READ, tensors, strict=True)]


@functools.cache
def places_in_row(device: torch.device) -> Tensor:
    """The elements' places in a row."""
    return torch.arange(ROW, dtype=torch.int32, device=device)
