"""Kinds of tensors: what kernels are specialised for, and how much of a tensor a program serves."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton.language as tl

from luminav.blocks import BLOCK, PANEL_ROWS
from luminav.engines.batch import ALIGNMENT, TensorStep
from luminav.engines.triton import columns
from luminav.hyperparameters import Options
from luminav.rule import SMALLEST_DENOMINATOR, step_numbers


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
    """How the weight is kept: NO_MASTER, WHOLE_MASTER or SPLIT_MASTER of ``columns.py``."""
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


def _smallest_sigma(options: Options, dtype: torch.dtype) -> Any:
    """ε·τ·b₁ of the first step, below which σ never is."""
    return step_numbers(1, 0.0, options, dtype, 1.0).sigma_floor


def _master_form(step: TensorStep) -> int:
    if step.master_remainder is not None:
        return int(columns.SPLIT_MASTER.value)
    return int((columns.NO_MASTER if step.master_param is None else columns.WHOLE_MASTER).value)
