"""A launch plan: tensors that one grid serves, their tables, and the launches of a step."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import triton
from torch import Tensor

from luminav.engines.batch import NOT_NULL, Batch, Scales, TensorStep
from luminav.engines.triton import columns, kernels, scalars
from luminav.engines.triton.kinds import TRITON_TYPES, Kind
from luminav.engines.triton.tables import Tables

ROWS = 2048  # partials added at a time by the scales kernel

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton interprets the kernels; it reads this too when they are defined."""
RELAUNCHES = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 6)
"""Whether a compiled kernel takes all arguments of its source, with integers for addresses: seen in 3.6 and 3.9."""


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
        self.math = math
        self.pairs = pairs and kind.aligned
        self.tables = Tables(kind, members)
        self.partials: Tensor | None = None
        """None outside :func:`holding_partials`."""
        self.scaled = False
        self.known_addresses: list[int] | None = None
        """Of the gradients, where these are not at hand in `steps_of`."""
        self.noted: list[tuple[Launch, Callable[..., None] | None]] | None = None
        """Where to note what is launched: the compiled kernel, or None for one that must be looked up every time."""
        self._compiling = False
        self._ready: dict[tuple[Any, ...], BoundKernel] = {}
        self._guard = current_device(self.device)

    @property
    def one_pass(self) -> bool:
        """Whether kept scales are to be moved on; for tensors of other groups they are ones and stay so."""
        return any(batch.options.fused_single_pass for batch in self.batches)

    # ---- partials ----------------------------------------------------------------------------------------------------

    def take_partials(self) -> None:
        """Take memory for the partials, whatever it holds: those of inactive tensors are neither written nor read."""
        shape = (self.tables.num_programs_in_all, columns.NUM_PARTIALS.value)
        self.partials = self.tables.sums.new_empty(shape, dtype=torch.float32)
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
            return self.tables.numbers  # of their dtype, and as aligned; nothing is launched
        assert self.partials is not None
        return self.partials

    def grad_addresses(self) -> list[int]:
        """The gradients' addresses, 0 for none."""
        if self.known_addresses is not None:
            return self.known_addresses
        return [0 if step.grad is None else step.grad.data_ptr() or NOT_NULL for step in self.steps_of]

    # ---- launches ----------------------------------------------------------------------------------------------------

    def begin(self, skip: Tensor | None) -> None:
        """Everything the kernels need to know of this step, for a step outside :class:`luminav.replay.Replay`.

        Args:
            skip: 0-dim bool on the device: True leaves every tensor alone. None is False.
        """
        self.tables.refresh(self.grad_addresses())
        found_inf = None if skip is None else skip.to(torch.float32)
        self.compute_numbers(self.batches[0].grad_scale, found_inf, kept=False)

    def compute_numbers(self, grad_scale: Tensor | None, found_inf: Tensor | None, *, kept: bool) -> None:
        """Numbers, noise keys and active flags of this step; with `kept`, step sizes from the kept scales."""
        tables, num = self.tables, len(self.steps_of)
        self.scaled = grad_scale is not None or any(batch.options.maximize for batch in self.batches)
        self._launch(
            None if grad_scale is not None or found_inf is not None else ("numbers", kept),
            scalars.numbers_kernel, triton.cdiv(num, 32),
            tables.numbers, tables.keys, tables.grads, tables.steps, tables.tensor_group, tables.tensor_index,
            tables.fp16_flags, tables.groups, tables.kept_scales,
            tables.numbers if grad_scale is None else grad_scale,
            tables.numbers if found_inf is None else found_inf, num,
            SCALED=grad_scale is not None, FOUND_INF=found_inf is not None, KEPT=kept, BLOCK=32, num_warps=1,
        )  # fmt: skip

    def measure_lookahead(self) -> None:
        """With one buffer: the sums of m̃² and from them the denominators, before :meth:`measure` or :meth:`update`."""
        tables, partials = self.tables, self._held_partials().view(torch.float64)
        self._launch(
            ("lookahead", self.scaled), kernels.lookahead_kernel, tables.num_programs_in_all,
            *self._common(), partials, MATH=self.math, **self._types(), **self._shape(),
        )  # fmt: skip
        self._launch(
            ("rms",), scalars.rms_kernel, len(self.steps_of),
            tables.numels, tables.first_programs, tables.num_programs, partials, tables.lookahead_sums,
            tables.numbers, tables.keys, tables.tensor_group, tables.fp16_flags, tables.groups, BLOCK=ROWS, num_warps=4,
        )  # fmt: skip

    def measure(self) -> None:
        """Each program's sums, without changing anything."""
        kind = self.kind
        self._launch(
            ("measure", self.scaled), kernels.measure_kernel, self.tables.num_programs_in_all,
            *self._common(), self._held_partials(), PARAM_TYPE=TRITON_TYPES[kind.param], MASTER_FORM=kind.master,
            DUAL=kind.dual, FLOORED=kind.floored, CAUTIOUS=kind.cautious, MATH=self.math, TILES=kind.tiles,
            **self._types(), **self._shape(),
        )  # fmt: skip

    def scale(self, *, reduce: bool, exact: bool = False, blend: bool = False) -> None:
        """Sums from partials (`reduce`); scales from sums, for this step (`exact`) or the next (`blend`)."""
        tables = self.tables
        partials = self._held_partials() if reduce else tables.numbers
        self._launch(
            ("scales", reduce, exact, blend), scalars.scales_kernel, len(self.steps_of),
            partials, tables.first_programs, tables.num_programs, tables.numels, tables.sums, tables.nonfinite_counts,
            tables.whole_nonfinite, tables.numbers, tables.keys, tables.tensor_group, tables.groups, tables.kept_scales,
            REDUCE=reduce, EXACT=exact, BLEND=blend, BLOCK=ROWS, num_warps=8,
        )  # fmt: skip

    def update(self, *, gather: bool) -> None:
        """New weights, moments and step counts; with `gather` also partials."""
        kind, tables = self.kind, self.tables
        partials = self._held_partials() if gather else tables.numbers
        self._launch(
            ("update", gather, self.scaled), kernels.update_kernel, tables.num_programs_in_all,
            *self._common(), tables.steps, partials, tables.first_indices, PARAM_TYPE=TRITON_TYPES[kind.param],
            MASTER_FORM=kind.master, DUAL=kind.dual, FLOORED=kind.floored, CAUTIOUS=kind.cautious,
            COORDINATE=kind.coordinate, STOCHASTIC=kind.stochastic, GATHER=gather, MATH=self.math,
            OFFSET=tables.offset, TILES=kind.tiles, **self._types(), **self._shape(),
        )  # fmt: skip

    def set_denominators(self, per_tensor: Tensor | None, rows: Tensor) -> None:
        """Take the denominators of the single buffer from outside."""
        if per_tensor is not None:
            self.tables.numbers[:, columns.RMS_DENOMINATOR.value] = per_tensor[rows].to(torch.float32)

    def set_scales(self, scales: Scales, rows: Tensor) -> None:
        """Take c and s of this step from outside."""
        tables = self.tables
        lr = tables.groups[:, columns.GROUP_LR.value][tables.tensor_group.to(torch.int64)]
        step_sizes = Scales(scales.cautious[rows], scales.bound[rows]).step_sizes(lr)
        tables.numbers[:, columns.STEP_SIZE.value] = step_sizes.to(torch.float32)

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
        tables = self.tables
        return (
            tables.pointers, tables.grads, tables.numels, tables.first_programs, tables.first_tensors, tables.numbers,
            tables.keys,
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
