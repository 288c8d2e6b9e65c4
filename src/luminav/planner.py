"""How much memory a training takes, before it is started: :func:`plan`.

State is counted by making it, on the meta device, from the table in ``state.py``; so what is kept and what is planned
cannot differ.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from luminav.blocks import PANEL_ROWS, block_shape, panel_shape
from luminav.engines.bundle import piece_limit
from luminav.gradient_release import buckets
from luminav.hyperparameters import SUPPORTED_DTYPES, Options
from luminav.model_shapes import FAMILIES, Activations, Source, read_model
from luminav.rounding import SIXTEEN_BIT
from luminav.state import ParamState, conform, has_block_variance

MODES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("none", {}),
    ("none, buffer=1", {"buffer": 1}),
    ("none, block variance", {"buffer": 1, "block_variance": True}),
    ("none, 8-bit", {"state_bits": 8}),
    ("none, block variance, 8-bit", {"buffer": 1, "block_variance": True, "state_bits": 8}),
    ("none, buffer=1, 8-bit", {"buffer": 1, "state_bits": 8}),
    ("semi", {"master_weights": "semi"}),
    ("semi, buffer=1", {"master_weights": "semi", "buffer": 1}),
    ("semi, 8-bit", {"master_weights": "semi", "state_bits": 8}),
    ("semi, unsplit", {"master_weights": "semi", "split_master_weights": False}),
    ("full", {"master_weights": "full"}),
    ("full, buffer=1", {"master_weights": "full", "buffer": 1}),
    ("full, unsplit", {"master_weights": "full", "split_master_weights": False}),
)
"""Name and options of every mode that differs in memory. (One-pass mode keeps eight bytes per tensor more.)"""

PEERS = (("torch AdamW, FP32", torch.float32), ("torch AdamW, BF16", torch.bfloat16))
"""Name and dtype of ``torch.optim.AdamW(fused=True)``, for comparison: two moments in the parameters' dtype."""

GIB = 1 << 30
GPUS = (
    ("RTX 3060 12", 11.6),
    ("RTX 4080 16", 15.6),
    ("RTX 3090/4090 24", 23.5),
    ("RTX 5090 32", 31.3),
    ("A100 40", 39.4),
    ("L40S 48", 44.4),
    ("A100/H100 80", 79.1),
    ("H200 141", 139.7),
    ("B200 180", 178.3),
)
"""Name with the nominal size, and the GiB that torch finds there: "total capacity" in its out-of-memory messages."""
RESERVE = 1 * GIB
"""Kept free on a GPU: the CUDA context, the libraries' workspaces, and gaps that the allocator leaves."""

# Upper limits for the Triton engine, see engines/triton/tables.py: its tables, of which one has 4 bytes for every 64th
# program, and during a step 16 bytes for a program's sums.
TABLE_BYTES_PER_TENSOR = 512
BYTES_PER_PROGRAM = 17
PROGRAM_NUMEL, PROGRAM_TILES = 8192, 4
FOREACH_TEMPORARIES = 16  # FP32, of a piece each: 16 MiB on a CPU, row step/cpu-gpt2/luminav-none-exact/scratch


def state_bytes(param: Tensor, options: Options) -> int:
    """Bytes of optimizer state that a parameter keeps from its first step on.

    Args:
        param: The parameter, on any device; the meta device will do.
        options: Its group's options.
    """
    state: ParamState = {}
    conform(state, param.detach().to("meta"), options, step_on_device=False, template=True)
    return sum(tensor.untyped_storage().nbytes() for tensor in state.values())


@dataclass(frozen=True)
class PlanRow:
    """Bytes of one mode."""

    mode: str
    options: Mapping[str, Any]
    """What to give to LuminaV; empty for other optimizers."""
    weights: int
    gradients: int
    state: int
    scratch: int
    transient: int
    """The largest parameter's gradient, or 0 if unknown: autograd holds one more for a moment where it adds two, for
    tied embeddings and from the second micro-batch on. Not part of the totals."""
    released_gradients: int | None
    """Gradients with gradient release: the largest bucket's. None where that is unknown, or not offered."""

    @property
    def total(self) -> int:
        """All of it, with every gradient there at once."""
        return self.weights + self.gradients + self.state + self.scratch

    @property
    def released_total(self) -> int | None:
        """All of it with gradient release."""
        released = self.released_gradients
        return None if released is None else self.total - self.gradients + released


@dataclass(frozen=True)
class Plan:
    """The memory of a training, mode by mode. ``print(plan)`` shows a table."""

    source: str
    num_params: int
    num_tensors: int
    largest: tuple[str, tuple[int, ...]] | None
    """Name and shape of the largest trainable parameter; None if only a count is known."""
    activations: Activations | None
    activation_checkpointing: bool
    device: str
    """Type of the device that the optimizer runs on."""
    rows: tuple[PlanRow, ...]

    def peak(self, row: PlanRow, *, release: bool = False) -> int | None:
        """Estimated peak in bytes: a row's total, the transient, and the activations if they are known.

        Args:
            row: One of :attr:`rows`.
            release: Whether with gradient release.

        Returns:
            None if gradient release is asked for and the row has no figure for it.
        """
        total = row.released_total if release else row.total
        known = self.activations
        activations = 0 if known is None else known.checkpointed if self.activation_checkpointing else known.full
        return None if total is None else total + row.transient + activations

    def fits(self, row: PlanRow, *, release: bool = False) -> tuple[str, ...]:
        """Names of the GPUs in :data:`GPUS` that hold a row's :meth:`peak` beside :data:`RESERVE`, smallest first.

        None on a CPU, which has the memory that it has.
        """
        peak = None if self.device == "cpu" else self.peak(row, release=release)
        return tuple(name for name, size in GPUS if peak is not None and peak + RESERVE <= size * GIB)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain dicts, lists and numbers; sizes in bytes."""
        rows = [
            {
                **asdict(row),
                "total": row.total,
                "released_total": row.released_total,
                "bytes_per_param": row.total / self.num_params,
                "released_bytes_per_param": _per_param(row.released_total, self.num_params),
                "fits": list(self.fits(row)),
                "released_fits": list(self.fits(row, release=True)),
            }
            for row in self.rows
        ]
        return {**asdict(self), "reserve": RESERVE, "rows": rows}

    # ---- text --------------------------------------------------------------------------------------------------------

    def heading(self) -> list[str]:
        """Lines above the table: what is planned, and what is the same in every mode."""
        lines = [f"{self.source}: {self.num_params:,} parameters in {self.num_tensors:,} tensors"]
        if self.largest:
            name, shape = self.largest
            gradient = _size(self.rows[0].transient)
            lines.append(
                f"Largest tensor: {name}, {list(shape)}. Its gradient, {gradient}, may exist twice for a moment."
            )
        else:
            lines = [
                f"{self.source} of {self.num_params:,} parameters. Gradient release depends on the tensors: give them."
            ]
        if self.activations is not None:
            a = self.activations
            lines.append(
                f"Activations (estimate), {a.batch_size} x {a.sequence_length} tokens: {_size(a.full)}, with "
                f"checkpointing {_size(a.checkpointed)}; {_size(a.loss)} of each is the loss."
            )
        return lines

    def table(self) -> list[tuple[str, ...]]:
        """The table's cells, headings first."""
        unit, name = _unit(max(row.total for row in self.rows))
        headings = (
            "weights",
            "grads",
            "state",
            "scratch",
            *("total", "B/param", "fits"),
            *("released", "B/param", "fits"),
        )
        missing = "-" if self.device == "cpu" else "none"
        cells: list[tuple[str, ...]] = [(f"sizes in {name}", *headings)]
        for row in self.rows:
            columns = [f"{size / unit:.2f}" for size in (row.weights, row.gradients, row.state, row.scratch)]
            for release in (False, True):
                total = row.released_total if release else row.total
                fit = self.fits(row, release=release)
                if total is None:
                    columns += ["-"] * 3
                else:
                    columns += [f"{total / unit:.2f}", f"{total / self.num_params:.2f}", fit[0] if fit else missing]
            cells.append((row.mode, *columns))
        return cells

    def footing(self) -> list[str]:
        """Lines below the table: what the columns say."""
        known = self.activations is not None
        checkpointed = " with checkpointing" if self.activation_checkpointing else ""
        activations = f"the activations{checkpointed}" if known else "no activations (give batch and sequence length)"
        released = "released: the total with gradient release, where the gradients are those of the largest bucket."
        if self.device == "cpu":
            return [released]
        return [
            released,
            f"fits: the smallest GPU for the total, one more gradient of the largest tensor, {activations}, and "
            f"{_size(RESERVE)} for CUDA itself.",
        ]

    def __str__(self) -> str:
        cells = self.table()
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(_padded(row, widths)).rstrip() for row in cells]
        return "\n".join([*self.heading(), "", *lines, "", *self.footing()])


TEXT_COLUMNS = (0, 7, 10)


def _padded(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    """Cells as wide as their columns, numbers to the right."""
    return [
        cell.ljust(width) if number in TEXT_COLUMNS else cell.rjust(width)
        for number, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]


def _unit(num_bytes: int) -> tuple[int, str]:
    """The unit for a number of bytes, and its name."""
    return (GIB, "GiB") if num_bytes >= GIB else (1 << 20, "MiB") if num_bytes >= 1 << 20 else (1 << 10, "KiB")


def _size(num_bytes: int) -> str:
    unit, name = _unit(num_bytes)
    return f"{num_bytes / unit:.2f} {name}"


def _per_param(num_bytes: int | None, num_params: int) -> float | None:
    return None if num_bytes is None else num_bytes / num_params


# ---- the plan --------------------------------------------------------------------------------------------------------


def plan(
    model: nn.Module | Iterable[Any] | Mapping[str, Any] | str | os.PathLike[str] | int,
    *,
    dtype: torch.dtype | None = None,
    batch_size: int | None = None,
    sequence_length: int | None = None,
    activation_checkpointing: bool = False,
    device: torch.device | str = "cuda",
) -> Plan:
    """Plan the memory of training a model: weights, gradients, optimizer state and scratch in every mode.

    Nothing is allocated. Weights, gradients and state are exact; buffers of the model are not counted; activations are
    an estimate, see :meth:`luminav.model_shapes.Decoder.activations`.

    Args:
        model: A module; parameters or (name, parameter) pairs; a Hugging Face ``config.json``, as a path or a dict; or
            a number of parameters, as an int or like ``"4.2B"``. Parameters may be on the meta device. Frozen ones
            count as weights only, of a DTensor the local part.
        dtype: Dtype that floating-point parameters are taken to be converted to. None keeps a model's own and a
            config's; for a number of parameters it is BF16.
        batch_size: Sequences per micro-batch, for the estimate of activations; None leaves it out.
        sequence_length: Tokens per sequence; given together with `batch_size`.
        activation_checkpointing: Whether the GPUs named are those for training with activation checkpointing.
        device: Where the optimizer runs, which decides on the scratch: the Triton engine on "cuda" and "xpu", else the
            foreach engine.

    Returns:
        The plan; print it, or take :attr:`Plan.rows`.

    Raises:
        ValueError: The architecture is unknown, a parameter's dtype is not supported, a size is missing or not
            positive, or there is no parameter to train.
        TypeError: `model` is something else.
        FileNotFoundError: There is no such file.
    """
    if dtype is not None and dtype not in SUPPORTED_DTYPES:
        names = ", ".join(map(str, SUPPORTED_DTYPES))
        raise ValueError(f"dtype must be one that LuminaV trains, {names}, got {dtype!r}.")
    if activation_checkpointing and batch_size is None and sequence_length is None:
        raise ValueError(
            "activation_checkpointing=True asks for an estimate of activations: give batch_size and sequence_length."
        )
    source = read_model(model, dtype)
    trainable = [(name, param) for name, param in source.params if param.requires_grad and param.numel()]
    if not trainable:
        raise ValueError(
            f"{source.name} has no parameters to train. Has the generator been used before, or is every one frozen?"
        )
    for name, param in trainable:
        if param.dtype not in SUPPORTED_DTYPES:
            raise ValueError(f"{name} has dtype {param.dtype}, which LuminaV does not train. Convert it, or freeze it.")
    name, largest = max(trainable, key=lambda item: item[1].nbytes)
    params = [param for _, param in source.params]
    return Plan(
        source=source.name,
        num_params=sum(param.numel() for param in params),
        num_tensors=len(params),
        largest=None if source.is_count else (name, tuple(largest.shape)),
        activations=_activations(source, batch_size, sequence_length, largest.element_size()),
        activation_checkpointing=activation_checkpointing,
        device=torch.device(device).type,
        rows=_rows(params, torch.device(device), count_only=source.is_count),
    )


def _activations(
    source: Source, batch_size: int | None, sequence_length: int | None, itemsize: int
) -> Activations | None:
    if batch_size is None and sequence_length is None:
        return None
    for name, value in (("batch_size", batch_size), ("sequence_length", sequence_length)):
        if value is None:
            raise ValueError(f"{name} is missing: activations need both, batch_size and sequence_length.")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be an int > 0, got {value!r}.")
    if source.decoder is None:
        raise ValueError(
            f"{source.name}: its activations are not known. Leave batch_size and sequence_length out, or pass the "
            f"config.json of one of {', '.join(FAMILIES)}."
        )
    assert batch_size is not None and sequence_length is not None
    return source.decoder.activations(batch_size, sequence_length, itemsize)


def _rows(params: Sequence[Tensor], device: torch.device, *, count_only: bool) -> tuple[PlanRow, ...]:
    """All rows. If only the number of parameters is known, there is no largest one and no bucket."""
    trainable = [param for param in params if param.requires_grad]
    alike = Counter((param.shape, param.dtype) for param in trainable)
    weights, gradients = (sum(param.nbytes for param in some) for some in (params, trainable))
    largest = 0 if count_only else max(param.numel() for param in trainable)
    transient = 0 if count_only else max(param.nbytes for param in trainable)
    waiting = None if count_only else max(sum(param.nbytes for param in bucket) for bucket in buckets(trainable))
    rows = []
    for mode, options in MODES:
        if _differs(options, trainable):
            kept, scratch = _state(alike, options), _scratch(trainable, device, options)
            rows.append(PlanRow(mode, options, weights, gradients, kept, scratch, transient, waiting))
    numel = sum(param.numel() for param in trainable)
    for name, dtype in PEERS:
        size = numel * dtype.itemsize
        state = 2 * size + 4 * len(trainable)  # each step count is an FP32 tensor
        rows.append(PlanRow(name, {}, weights - gradients + size, size, state, 0, largest * dtype.itemsize, None))
    return tuple(rows)


def _differs(options: Mapping[str, Any], trainable: Sequence[Tensor]) -> bool:
    """Whether a mode differs from those before it: masters need 16 bits, and split ones BF16."""
    dtypes = {param.dtype for param in trainable}
    if "split_master_weights" in options:
        return torch.bfloat16 in dtypes
    return "master_weights" not in options or not dtypes.isdisjoint(SIXTEEN_BIT)


def _state(alike: Mapping[tuple[torch.Size, torch.dtype], int], options: Mapping[str, Any]) -> int:
    """State of all parameters, counted once for each shape and dtype."""
    checked = Options.from_group(options)
    return sum(
        count * state_bytes(torch.empty(shape, dtype=dtype, device="meta"), checked)
        for (shape, dtype), count in alike.items()
    )


def _scratch(trainable: Sequence[Tensor], device: torch.device, options: Mapping[str, Any]) -> int:
    """Upper estimate of what an engine holds beside the state."""
    checked = Options.from_group(options)
    if device.type in ("cuda", "xpu"):
        programs = sum(_num_programs(param, checked) for param in trainable)
        return len(trainable) * TABLE_BYTES_PER_TENSOR + programs * BYTES_PER_PROGRAM
    panels = [PANEL_ROWS * panel_shape(param)[1] for param in trainable if has_block_variance(param, checked)]
    numel = sum(param.numel() for param in trainable)
    return FOREACH_TEMPORARIES * 4 * min(max([piece_limit(device), *panels]), numel)


def _num_programs(param: Tensor, options: Options) -> int:
    """How many programs of the Triton engine serve a parameter."""
    if has_block_variance(param, options):
        tiles = block_shape(param)[1]  # side by side
        return panel_shape(param)[0] * (tiles // math.gcd(tiles, PROGRAM_TILES))
    return -(-param.numel() // PROGRAM_NUMEL)
