"""A launch plan: tensors that one grid serves, their tables, and the launches of a step."""

from __future__ import annotations

import ctypes
import math
import os
import struct
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from luminav.blocks import BLOCK, PANEL_ROWS
from luminav.engines.batch import ALIGNMENT, NOT_NULL, Batch, Scales, TensorStep
from luminav.engines.triton import kernels, scalars
from luminav.engines.triton import tables as columns
from luminav.hyperparameters import Options
from luminav.rule import NUM_SUMS, SMALLEST_DENOMINATOR, step_numbers

ROWS = 2048  # partials added at a time by the scales kernel


@dataclass(frozen=True)
class Shape:
    """How much a program does, and with how many threads and registers."""

    block: int
    """Elements of an iteration: eight per thread, one 16-byte load of BF16."""
    iterations: int
    num_warps: int
    stages: int
    """How many iterations are under way at once, the loads of later ones into shared memory; 1 for no such thing."""
    maxnreg: int
    """Registers per thread. More would leave room for fewer warps. With fewer, as the assembler would choose where one
    iteration is under way, it moves a load down to its first use, and every iteration waits for memory."""


_read_by_graphs: list[Tensor] = []  # for good: a captured graph may outlive the optimizer, and its replays read them
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton interprets the kernels; it reads this too when they are defined."""
RELAUNCHES = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 6)
"""Whether a compiled kernel takes all arguments of its source, with integers for addresses: seen in 3.6 and 3.9."""
SPAN = 1 << 13
"""Elements of a program. Its iterations must stay below ``kernels.BAD``, which keeps two counts in one number apart."""
IN_WHOLE = Shape(block=1024, iterations=SPAN // 1024, num_warps=4, stages=4, maxnreg=96)
IN_CODES = Shape(block=256, iterations=SPAN // 256, num_warps=1, stages=4, maxnreg=96)
"""A program of one warp: scales change hands within it, and no warp waits for another."""

MOST_TILES = 4
"""Tiles of a program: 256 columns are pieces of 512 bytes of BF16."""

TRITON_TYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
    torch.uint8: tl.uint8,
}


@dataclass(frozen=True)
class Kind:
    """What the kernels are specialised for; tensors of one kind share a launch."""

    param: torch.dtype
    grad: torch.dtype
    moment: torch.dtype
    """Of exp_avg; uint8 is 8-bit codes, those of exp_avg_sq included unless that is shared."""
    master: int
    """How the weight is kept: NO_MASTER, WHOLE_MASTER or SPLIT_MASTER of ``tables.py``."""
    dual: bool
    floored: bool
    """Whether σ may be below the smallest denominator; False without a variance."""
    shared: bool
    """Whether exp_avg_sq is the row means of tiles."""
    cautious: bool
    coordinate: bool
    stochastic: bool
    tiles: int
    """Of those, how many side by side a program serves; else 1."""
    aligned: bool
    """Addresses and lengths are multiples of 16, so that loads and stores are vectors."""

    @property
    def shape(self) -> Shape:
        """How its programs are laid out."""
        shape = IN_CODES if self.moment == torch.uint8 else IN_WHOLE
        if self.shared:
            shape = replace(shape, iterations=PANEL_ROWS * BLOCK * self.tiles // shape.block)
        return shape if self.aligned else replace(shape, stages=1)  # loads of single elements are not worth it

    def num_programs(self, step: TensorStep) -> int:
        """How many programs serve a tensor; an empty one still counts steps."""
        numel, row = step.param.numel(), max(step.row_length, 1)
        in_tiles = -(-numel // (PANEL_ROWS * row)) * (row // (BLOCK * self.tiles))
        return max(1, in_tiles if self.shared else -(-numel // SPAN))

    @classmethod
    def of(cls, step: TensorStep, options: Options) -> Kind:
        addresses = [tensor.data_ptr() for tensor in (step.grad, *step.kept) if tensor is not None]
        return cls(
            param=step.param.dtype,
            grad=step.present_grad.dtype,
            moment=step.exp_avg.dtype,
            master=_master_form(step),
            dual=step.exp_avg_sq is not None,
            floored=step.exp_avg_sq is not None and _smallest_sigma(options, step.param.dtype) < SMALLEST_DENOMINATOR,
            shared=step.in_tiles,
            cautious=options.cautious,
            coordinate=options.bound and options.bound_type == "coordinate",
            stochastic=options.stochastic_rounding,
            tiles=math.gcd(step.row_length // BLOCK, MOST_TILES) if step.in_tiles else 1,
            aligned=step.param.numel() % ALIGNMENT == 0 and all(address % ALIGNMENT == 0 for address in addresses),
        )


class BoundKernel:
    """A compiled kernel with its arguments, to be launched again and again.

    Args:
        run: Launches the kernel.
        values: Its arguments; for tensors, addresses where those will do.
        names: What they are called.
    """

    def __init__(self, run: Callable[..., None], values: list[Any], names: Sequence[str]) -> None:
        self._run, self._values = run, values
        self._partials = names.index("partials") if "partials" in names else None

    def set_partials(self, partials: Any) -> None:
        """Note where the partials are in this step."""
        if self._partials is not None:
            self._values[self._partials] = partials

    def __call__(self, **options: Any) -> None:
        self._run(*self._values, **options)


class Launch:
    """The tables and launches of the tensors of one kind.

    Args:
        kind: What they have in common.
        members: (batch, step) of each tensor.
        math: How elementary functions are computed: PORTABLE, NVIDIA or NVIDIA_COARSE of ``rule.py``.
        pairs: Whether the device compares two BF16 numbers at a time.
    """

    def __init__(self, kind: Kind, members: Sequence[tuple[Batch, TensorStep]], math: int, pairs: bool) -> None:
        self.kind = kind
        self.steps_of = [step for _, step in members]
        self.batches = list({id(batch): batch for batch, _ in members}.values())
        self.device = self.steps_of[0].param.device
        self.scaled = False
        self._compiling = False
        self._ready: dict[tuple[Any, ...], BoundKernel] = {}
        self.noted: list[tuple[Launch, Callable[..., None] | None]] | None = None
        """Where to note what is launched: the compiled kernel, or None for one that must be looked up every time."""
        self._guard = current_device(self.device)
        self.math = math
        self.pairs = pairs and kind.aligned
        self._fill_static_tables(members)
        self._make_working_tables()
        self.known_addresses: list[int] | None = None
        """Of the gradients, where these are not at hand in `steps_of`."""
        self._uploaded: tuple[list[int], list[bytes]] | None = None
        self._addresses: list[int] | None = None
        self._rows: dict[int, tuple[Options, bytes]] = {}

    @property
    def one_pass(self) -> bool:
        """Whether kept scales are to be moved on; for tensors of other groups they are ones and stay so."""
        return any(batch.options.fused_single_pass for batch in self.batches)

    # ---- tables ------------------------------------------------------------------------------------------------------

    def _fill_static_tables(self, members: Sequence[tuple[Batch, TensorStep]]) -> None:
        counts = list(map(self.kind.num_programs, self.steps_of))
        firsts = [0]
        for count in counts:
            firsts.append(firsts[-1] + count)
        self.num_programs_in_all = firsts.pop()
        rows = {id(batch): row for row, batch in enumerate(self.batches)}
        self.pointers = self._int64([_addresses(step) for step in self.steps_of])
        self.numels = self._int64([step.param.numel() for step in self.steps_of])
        self.first_programs = self._int32(firsts)
        self.num_programs = self._int32(counts)
        self.first_tensors = self._int32(_first_tensors(firsts, self.num_programs_in_all))
        self.tensor_group = self._int32([rows[id(batch)] for batch, _ in members])
        self.tensor_index = self._int64([step.index for step in self.steps_of])
        self.first_indices = self._int64([step.first_index for step in self.steps_of])
        self.fp16_flags = self._int32([int(step.param.dtype == torch.float16) for step in self.steps_of])
        self.offset = any(step.first_index for step in self.steps_of)

    def _make_working_tables(self) -> None:
        num, device = len(self.steps_of), self.device
        width = columns.GROUP_WIDTH.value
        rows = len(self.batches) * width  # first, since their length keeps both tables aligned for the kernels
        self._words = torch.zeros(rows + num, dtype=torch.int64, device=device)
        self.groups = self._words[:rows].view(torch.float64).view(-1, width)
        self.grads = self._words[rows:]
        self._captured = False
        self._spare_host = self._host_memory(rows + num)
        self.numbers = torch.zeros(num, columns.NUMBERS_WIDTH.value, dtype=torch.float32, device=device)
        self.keys = torch.zeros(num, columns.KEY_WIDTH.value, dtype=torch.int32, device=device)
        self.steps = torch.stack([step.step.to(device) for step in self.steps_of if step.step is not None])
        self.kept_scales = torch.ones(num, 2, dtype=torch.float32, device=device)
        for row, step in enumerate(self.steps_of):
            if step.kept_scales is not None:
                self.kept_scales[row] = torch.stack(step.kept_scales)
        self.partials: Tensor | None = None
        """None outside :func:`holding_partials`."""
        self.lookahead_sums = torch.zeros(0 if self.kind.dual else num, 2, dtype=torch.float64, device=device)
        self.sums = torch.zeros(num, NUM_SUMS, dtype=torch.float64, device=device)
        self.whole_nonfinite = torch.zeros(1, dtype=torch.int32, device=device)
        self.nonfinite_counts = torch.zeros(num, dtype=torch.float64, device=device)

    def _int32(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32).to(self.device)

    def _int64(self, values: list[Any]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self.device)

    def take_partials(self) -> None:
        """Take memory for the partials, whatever it holds: those of inactive tensors are neither written nor read."""
        shape = (self.num_programs_in_all, columns.NUM_PARTIALS.value)
        self.partials = self.sums.new_empty(shape, dtype=torch.float32)
        self._hand_on(self.partials)

    def give_back_partials(self) -> None:
        """Let go of them: all launches that need them are ordered, on the stream that their memory belongs to."""
        self.partials = None
        self._hand_on(None)

    def _hand_on(self, partials: Tensor | None) -> None:
        argument = self._argument(partials)
        for kernel in self._ready.values():
            kernel.set_partials(argument)

    def _argument(self, value: Any) -> Any:
        """What a compiled kernel is launched with: for a tensor its address, where that is known to work."""
        return value.data_ptr() if isinstance(value, Tensor) and self.device.type == "cuda" else value

    def _held_partials(self) -> Tensor:
        if self._compiling:
            return self.numbers  # of their dtype, and as aligned; nothing is launched
        assert self.partials is not None
        return self.partials

    def grad_addresses(self) -> list[int]:
        """The gradients' addresses, 0 for none."""
        if self.known_addresses is not None:
            return self.known_addresses
        return [0 if step.grad is None else step.grad.data_ptr() or NOT_NULL for step in self.steps_of]

    def refresh(self, addresses: list[int]) -> None:
        """Upload what changed since the last step, gradient addresses and options, in one copy."""
        rows = list(map(self._row, self.batches))
        capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if capturing or self._captured or self._uploaded != (addresses, rows):
            self._uploaded = (addresses, rows)
            self._upload(addresses, rows, capturing)
        for row, batch in enumerate(self.batches):
            if isinstance(batch.options.lr, Tensor) and batch.options.lr.device.type != "cpu":
                self.groups[row, columns.GROUP_LR.value].copy_(batch.options.lr.reshape(()))

    def _row(self, batch: Batch) -> bytes:
        """A batch's row of the table `groups`, packed anew when its options are others, or may be."""
        options, row = self._rows.get(id(batch), (None, b""))
        if options is not batch.options or isinstance(batch.options.lr, Tensor):
            row = _group_row(batch.options)
            self._rows[id(batch)] = batch.options, row
        return row

    def _upload(self, addresses: list[int], rows: list[bytes], capturing: bool) -> None:
        """Copy to the device; a graph that is being captured gets host memory of its own, which its replays read again.

        Replays write the table behind our back, so from the first capture on every eager step uploads.
        """
        if addresses is not self._addresses:
            self._addresses, self._address_words = addresses, array("q", addresses)
        words = array("q", b"".join(rows)) + self._address_words
        if capturing:
            host = self._spare_host
            _read_by_graphs.append(host)
            self._captured = True
            self._spare_host = self._host_memory(len(words))
        else:
            host = self._host_memory(len(words))
        ctypes.memmove(host.data_ptr(), words.buffer_info()[0], len(words) * words.itemsize)
        self._words.copy_(host, non_blocking=True)

    def _host_memory(self, num_words: int) -> Tensor:
        """Pinned, from the caching allocator, which keeps the memory until a copy that was ordered is done."""
        pinned = self.device.type != "cpu"
        return torch.empty(num_words, dtype=torch.int64, device="cpu", pin_memory=pinned)

    # ---- launches ----------------------------------------------------------------------------------------------------

    def begin(self, skip: Tensor | None) -> None:
        """Everything the kernels need to know of this step, for a step outside :class:`luminav.replay.Replay`.

        Args:
            skip: 0-dim bool on the device: True leaves every tensor alone. None is False.
        """
        self.refresh(self.grad_addresses())
        found_inf = None if skip is None else skip.to(torch.float32)
        self.compute_numbers(self.batches[0].grad_scale, found_inf, kept=False)

    def compute_numbers(self, grad_scale: Tensor | None, found_inf: Tensor | None, *, kept: bool) -> None:
        """Numbers, noise keys and active flags of this step; with `kept`, step sizes from the kept scales."""
        num = len(self.steps_of)
        self.scaled = grad_scale is not None or any(batch.options.maximize for batch in self.batches)
        self._launch(
            None if grad_scale is not None or found_inf is not None else ("numbers", kept),
            scalars.numbers_kernel, triton.cdiv(num, 32),
            self.numbers, self.keys, self.grads, self.steps, self.tensor_group, self.tensor_index, self.fp16_flags,
            self.groups, self.kept_scales,
            self.numbers if grad_scale is None else grad_scale, self.numbers if found_inf is None else found_inf, num,
            SCALED=grad_scale is not None, FOUND_INF=found_inf is not None, KEPT=kept, BLOCK=32, num_warps=1,
        )  # fmt: skip

    def measure_lookahead(self) -> None:
        """With one buffer: the sums of m̃² and from them the denominators, before :meth:`measure` or :meth:`update`."""
        partials = self._held_partials().view(torch.float64)
        self._launch(
            ("lookahead", self.scaled), kernels.lookahead_kernel, self.num_programs_in_all,
            *self._common(), partials, MATH=self.math, **self._types(), **self._shape(),
        )  # fmt: skip
        self._launch(
            ("rms",), scalars.rms_kernel, len(self.steps_of),
            self.numels, self.first_programs, self.num_programs, partials, self.lookahead_sums,
            self.numbers, self.keys, self.tensor_group, self.fp16_flags, self.groups, BLOCK=ROWS, num_warps=4,
        )  # fmt: skip

    def measure(self) -> None:
        """Each program's sums, without changing anything."""
        kind = self.kind
        self._launch(
            ("measure", self.scaled), kernels.measure_kernel, self.num_programs_in_all,
            *self._common(), self._held_partials(), PARAM_TYPE=TRITON_TYPES[kind.param], MASTER_FORM=kind.master,
            DUAL=kind.dual, FLOORED=kind.floored, CAUTIOUS=kind.cautious, MATH=self.math, TILES=kind.tiles,
            **self._types(), **self._shape(),
        )  # fmt: skip

    def scale(self, *, reduce: bool, exact: bool = False, blend: bool = False) -> None:
        """Sums from partials (`reduce`); scales from sums, for this step (`exact`) or the next (`blend`)."""
        partials = self._held_partials() if reduce else self.numbers
        self._launch(
            ("scales", reduce, exact, blend), scalars.scales_kernel, len(self.steps_of),
            partials, self.first_programs, self.num_programs, self.numels, self.sums, self.nonfinite_counts,
            self.whole_nonfinite, self.numbers, self.keys, self.tensor_group, self.groups, self.kept_scales,
            REDUCE=reduce, EXACT=exact, BLEND=blend, BLOCK=ROWS, num_warps=8,
        )  # fmt: skip

    def update(self, *, gather: bool) -> None:
        """New weights, moments and step counts; with `gather` also partials."""
        kind = self.kind
        partials = self._held_partials() if gather else self.numbers
        self._launch(
            ("update", gather, self.scaled), kernels.update_kernel, self.num_programs_in_all,
            *self._common(), self.steps, partials, self.first_indices, PARAM_TYPE=TRITON_TYPES[kind.param],
            MASTER_FORM=kind.master, DUAL=kind.dual, FLOORED=kind.floored, CAUTIOUS=kind.cautious,
            COORDINATE=kind.coordinate, STOCHASTIC=kind.stochastic, GATHER=gather, MATH=self.math, OFFSET=self.offset,
            TILES=kind.tiles, **self._types(), **self._shape(),
        )  # fmt: skip

    def set_denominators(self, per_tensor: Tensor | None, rows: Tensor) -> None:
        """Take the denominators of the single buffer from outside."""
        if per_tensor is not None:
            self.numbers[:, columns.RMS_DENOMINATOR.value] = per_tensor[rows].to(torch.float32)

    def set_scales(self, scales: Scales, rows: Tensor) -> None:
        """Take c and s of this step from outside."""
        lr = self.groups[:, columns.GROUP_LR.value][self.tensor_group.to(torch.int64)]
        step_sizes = Scales(scales.cautious[rows], scales.bound[rows]).step_sizes(lr)
        self.numbers[:, columns.STEP_SIZE.value] = step_sizes.to(torch.float32)

    def compile(self, *, exact: bool, grad_scale: Tensor | None = None, found_inf: Tensor | None = None) -> None:
        """Compile every kernel of a step without launching any: what cannot be compiled must fail before it writes."""
        if INTERPRETED:
            return
        self._compiling = True
        self.compute_numbers(grad_scale, found_inf, kept=not exact)
        if not self.kind.dual:
            self.measure_lookahead()
        if exact:
            self.measure()
        self.scale(reduce=True, exact=exact, blend=not exact and self.one_pass)
        self.update(gather=not exact)
        self._compiling = False

    def _launch(self, key: tuple[Any, ...] | None, kernel: Any, num_programs: int, *args: Any, **options: Any) -> None:
        """Launch a kernel, or compile it only.

        Args:
            key: Names the kernel and all that follows, which are then the same in every step, so that its compiled form
                can be launched again without Triton's look at every argument. None if they are not.
            kernel: The kernel.
            num_programs: Size of the grid.
            *args: Its arguments.
            **options: Its compile-time arguments and options.
        """
        with self._guard:
            ready = None if key is None or self._compiling else self._ready.get(key)
            if self.noted is not None:
                self.noted.append((self, ready))
            if ready is not None:
                ready()
                return
            options["enable_fp_fusion"] = False  # see rule.py; the default is True up to Triton 3.9
            if not self._compiling:
                kernel[(num_programs,)](*args, **options)
                return
            compiled = kernel.warmup(*args, grid=(num_programs,), **options)
            if key is not None and RELAUNCHES:
                values = [*map(self._argument, args), *(options[name] for name in kernel.arg_names[len(args) :])]
                self._ready[key] = BoundKernel(compiled[(num_programs, 1, 1)], values, kernel.arg_names)

    def launch_again(self, kernels: Sequence[Callable[..., None]]) -> None:
        """Launch kernels, of this device, that were noted before."""
        with self._guard:
            driver = triton.runtime.driver.active
            stream = driver.get_current_stream(driver.get_current_device())
            for kernel in kernels:
                kernel(stream=stream)

    def _common(self) -> tuple[Tensor, ...]:
        return (
            self.pointers, self.grads, self.numels, self.first_programs, self.first_tensors, self.numbers, self.keys,
        )  # fmt: skip

    def _types(self) -> dict[str, Any]:
        kind = self.kind
        return {
            "GRAD": TRITON_TYPES[kind.grad], "MOMENT": TRITON_TYPES[kind.moment], "SCALED": self.scaled,
            "ALIGNED": kind.aligned, "SHARED": kind.shared, "PAIRS": self.pairs,
        }  # fmt: skip

    def _shape(self) -> dict[str, Any]:
        shape, options = self.kind.shape, {"STAGES": 1}
        if self.device.type == "cuda" and torch.version.hip is None:
            options = {"STAGES": shape.stages, "maxnreg": shape.maxnreg}
        return {"BLOCK": shape.block, "ITERATIONS": shape.iterations, "num_warps": shape.num_warps, **options}


@contextmanager
def holding_partials(launches: Sequence[Launch]) -> Iterator[None]:
    """Hold the memory of the launches' partials; it must be there before a step writes anything."""
    with ExitStack() as held:
        for launch in launches:
            launch.take_partials()
            held.callback(launch.give_back_partials)
        yield


def current_device(device: torch.device) -> AbstractContextManager[Any]:
    """A context, to be entered again and again, in which `device` is the one that kernels are launched on."""
    if device.type == "cpu":
        return nullcontext()
    context: AbstractContextManager[Any] = torch.get_device_module(device).device(device)
    return context


def _first_tensors(firsts: Sequence[int], num_programs: int) -> list[int]:
    """The table of that name: the tensor of every 64th program, and the last tensor, where the last search ends.

    Args:
        firsts: The first program of each tensor. Every tensor has one, or it would not be found.
        num_programs: Of all tensors.
    """
    entries = range(0, num_programs, columns.PROGRAMS_PER_ENTRY.value)
    return [*(bisect_right(firsts, program) - 1 for program in entries), len(firsts) - 1]


def _addresses(step: TensorStep) -> list[int]:
    """A row of the table `pointers`."""
    param = step.param.data_ptr()
    return [
        param,
        step.exp_avg.data_ptr(),
        0 if step.exp_avg_sq is None else step.exp_avg_sq.data_ptr(),
        next((t.data_ptr() for t in (step.master_param, step.master_remainder) if t is not None), param),
        0 if step.exp_avg_scale is None else step.exp_avg_scale.data_ptr(),
        0 if step.exp_avg_sq_scale is None else step.exp_avg_sq_scale.data_ptr(),
        0 if step.exp_avg_sq_col is None else step.exp_avg_sq_col.data_ptr(),
        max(step.row_length, BLOCK),
    ]


def _smallest_sigma(options: Options, dtype: torch.dtype) -> Any:
    """ε·τ·b₁ of the first step, below which σ never is."""
    return step_numbers(1, 0.0, options, dtype, 1.0).sigma_floor


def _master_form(step: TensorStep) -> int:
    if step.master_remainder is not None:
        return int(columns.SPLIT_MASTER.value)
    return int((columns.NO_MASTER if step.master_param is None else columns.WHOLE_MASTER).value)


def _group_row(options: Options) -> bytes:
    """A row of the table `groups`; lr is filled in on the device if it lives there."""
    lr = options.lr
    if isinstance(lr, Tensor):
        lr = lr.item() if lr.device.type == "cpu" else 0.0
    numbers = [
        lr, *options.betas, options.eps, options.weight_decay, options.tau, options.alpha_ss,
        options.cautious_clamp_min, options.bound_ratio, options.ema_decay,
    ]  # fmt: skip
    flags = [
        -1.0 if options.maximize else 1.0,
        float(options.cautious),
        float(options.bound and options.bound_type == "radial"),
    ]
    return struct.pack(f"{len(numbers)}dq{len(flags)}d2d", *numbers, options.seed, *flags, 0.0, 0.0)
