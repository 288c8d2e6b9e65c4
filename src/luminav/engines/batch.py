"""What an engine is given, and what an engine is.

The optimizer sorts the parameters of a step into batches: same group, device, dtype and step count, so that a batch
has one set of step numbers. Engines see local tensors only; they know nothing of groups, process groups or files.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from luminav.hyperparameters import Options
from luminav.rounding import NoiseKey
from luminav.rule import Scalar, StepNumbers

ALIGNMENT = 16
"""Addresses and lengths that are multiples of this can be loaded as vectors."""
NOT_NULL = 16
"""Stands for the address of an empty tensor, which is null."""


def lie_as_they_read(tensors: Sequence[Tensor]) -> bool:
    """Whether the elements of tensors lie in memory, row by row, with the values that they have.

    Autograd leaves negations for later, as for the imaginary part of one element under ``conj()``, and has zeros that
    take no memory, like most subclasses of Tensor.
    """
    return (
        all(map(Tensor.is_contiguous, tensors))
        and not any(map(Tensor.is_neg, tensors))
        and all(map(Tensor.data_ptr, filter(Tensor.numel, tensors)))
    )


@dataclass(eq=False)
class TensorStep:
    """One parameter's share of a step: its tensors, of its shape where nothing else is said, and its noise."""

    param: Tensor
    grad: Tensor | None
    """None when kept launches have taken its address: a step must not keep gradients alive."""
    exp_avg: Tensor
    exp_avg_sq: Tensor | None
    master_param: Tensor | None
    """FP32 master weight of a 16-bit parameter; None where the parameter holds the weight itself, or its upper half."""
    noise_key: NoiseKey | None
    """None for an engine that works it out itself."""
    first_index: int = 0
    """Row-major index of the first local element in the unsharded parameter."""
    jumps: tuple[tuple[int, int], ...] = ()
    """Pairs (block, jump) where local elements are not consecutive in the unsharded parameter: the index of row-major
    local element i is ``first_index + i + Σ (i // block)·jump``. A shard of columns has one pair."""
    index: int = 0
    """Position in the optimizer."""
    step: Tensor | None = None
    """Steps taken so far, 0-dim int64. None when kept launches count in a table."""
    kept_scales: tuple[Tensor, Tensor] | None = None
    """One-pass mode's kept c and s, 0-dim FP32. None when kept launches have them in a table."""
    master_remainder: Tensor | None = None
    """What a BF16 parameter lacks of its FP32 master weight, int16."""
    exp_avg_scale: Tensor | None = None
    """Where exp_avg holds 8-bit codes: their scales, of the shape :func:`luminav.blocks.block_shape`."""
    exp_avg_sq_scale: Tensor | None = None
    """Likewise for exp_avg_sq."""
    exp_avg_sq_col: Tensor | None = None
    """Where tiles have a variance of rank 1: their column means, of the shape :func:`luminav.blocks.panel_shape`. Their
    row means are in exp_avg_sq then, of the shape of the scales."""

    @property
    def present_grad(self) -> Tensor:
        """The gradient, which a step that is not yet taken has."""
        assert self.grad is not None
        return self.grad

    @property
    def kept(self) -> tuple[Tensor | None, ...]:
        """The parameter and all of its state but single numbers, where there is such state."""
        masters, scales = (self.master_param, self.master_remainder), (self.exp_avg_scale, self.exp_avg_sq_scale)
        return (self.param, self.exp_avg, self.exp_avg_sq, self.exp_avg_sq_col, *masters, *scales)

    @property
    def in_blocks(self) -> bool:
        """Whether any of the state is kept in blocks, which must not be cut."""
        return self.in_tiles or self.exp_avg_scale is not None

    @property
    def in_tiles(self) -> bool:
        """Whether the variance is kept by tiles, whose panels must not be cut."""
        return self.exp_avg_sq_col is not None

    @property
    def row_length(self) -> int:
        """Elements of a row, ``param[i]`` flattened."""
        return math.prod(self.param.shape[1:])

    @property
    def has_master(self) -> bool:
        """Whether there is an FP32 master weight, whole or split."""
        return self.master_param is not None or self.master_remainder is not None


@dataclass
class Batch:
    """Tensors that share options, device, dtypes and step numbers."""

    options: Options
    numbers: StepNumbers | None
    """None for an engine that works them out itself."""
    steps: list[TensorStep]
    skip: Tensor | None = None
    """0-dim bool on the device: True leaves weights and state as they were (an overflowed step). None is False."""
    grad_scale: Tensor | None = None
    """For an engine with numbers of its own: the loss scale, one element on the device."""
    rms_denominator: Tensor | None = field(default=None, repr=False)
    """Without a variance: FP64, one number per tensor, set between the two measurements."""
    kept: tuple[list[TensorStep], Any] | None = field(default=None, repr=False)
    """What an engine keeps from one verb to the next, and for which tensors."""

    @property
    def step_numbers(self) -> StepNumbers:
        """The numbers, for an engine that is given them."""
        assert self.numbers is not None
        return self.numbers

    @property
    def device(self) -> torch.device:
        return self.steps[0].param.device

    @property
    def param_dtype(self) -> torch.dtype:
        return self.steps[0].param.dtype

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of the element arithmetic: FP64 for FP64 parameters, else FP32."""
        return torch.float64 if self.param_dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class Scales:
    """What the update needs of each tensor: c and s, FP32, shape [number of tensors]."""

    cautious: Tensor
    bound: Tensor

    def step_sizes(self, lr: Scalar) -> Tensor:
        """η·c·s in FP64, one number per tensor."""
        return self.cautious.to(torch.float64) * self.bound.to(torch.float64) * lr


class Engine(Protocol):
    """The three verbs of a step. `measure…` change nothing; `update` writes weights and state.

    Each takes all batches of the step, so that an engine may serve them in one launch.
    """

    name: str
    numbers_on_device: bool
    """Whether step counts live on the device and the engine works out step numbers and noise keys from them."""

    def prepare(self, batches: Sequence[Batch], *, gather: bool) -> None:
        """Do what may fail for want of a compiler, before any engine writes.

        Args:
            batches: Batches that a step is about to work on.
            gather: Whether they are updated and measured in one go.
        """
        ...

    def measure_lookahead(self, batches: Sequence[Batch]) -> list[Tensor]:
        """Without a variance: Σ m̃² and the number of elements per tensor, FP64, [tensors, 2] for each batch."""
        ...

    def measure(self, batches: Sequence[Batch]) -> list[Tensor]:
        """The sums of :class:`luminav.rule.Sums`, FP64, [tensors, NUM_SUMS] for each batch."""
        ...

    def update(self, batches: Sequence[Batch], scales: Sequence[Scales], *, gather: bool) -> list[Tensor]:
        """Store new weights and moments; with `gather` return the sums of :meth:`measure`, else an empty list."""
        ...
