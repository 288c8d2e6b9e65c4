"""Blocks of 64 consecutive elements of a row: what ``state_bits=8`` and ``block_variance=True`` keep one number for.

A *row* is ``param[i]``, flattened. Matrices whose rows are multiples of 64 are kept in blocks (:func:`in_blocks`);
vectors, small tensors and odd rows are not: they stay as they are without these options, and take little memory.

**8-bit codes.** A moment is stored as a byte per element and a power of two per block. A byte is a small floating-point
number with four mantissa bits; above them exp_avg has three exponent bits and a sign, exp_avg_sq four exponent bits. So
a block's values reach down to 2⁻⁷, or 2⁻¹⁵, of its largest, each to 1/16 of itself or better, and 0 takes the place of
the smallest one. Widening a code is a shift and an addition on FP32's bit pattern; rounding one stochastically adds
noise to the pattern and cuts it, as for BF16. Scales are powers of two, as in the OCP Microscaling formats (OCP MX 1.0,
2023): a byte each. Other formats were measured by ``benchmarks/state_formats.py``; its figures are in
``docs/memory.md``.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 64
SMALLEST_NUMEL = 4096
"""Smaller tensors are not kept in blocks: there is nothing to save."""

MANTISSA_BITS = 4
SHIFT = 23 - MANTISSA_BITS
"""How far a code lies above the end of FP32's bit pattern."""
EXP_AVG_TOP = 0x7F
"""The largest magnitude among exp_avg's codes: three exponent bits and four mantissa bits."""
EXP_AVG_SQ_TOP = 0xFF
SIGN = 0x80
LARGEST_CODED = (2.0 - 2.0**-MANTISSA_BITS) * 2.0**127
"""The largest value that codes can stand for, to which moments saturate."""
LARGEST_EXPONENT = 254
"""The largest scale; 255 would be that of infinity and NaN."""
HALF = 0x8000
"""In place of 16 noise bits: rounds to nearest, half away from zero."""


def in_blocks(param: Tensor) -> bool:
    """Whether a parameter's state is kept in blocks where an option asks for it.

    Args:
        param: The parameter; of a DTensor the whole counts, so that shards keep what the whole would.
    """
    return param.ndim >= 2 and param.numel() >= SMALLEST_NUMEL and (param.numel() // param.shape[0]) % BLOCK == 0


def block_shape(param: Tensor) -> torch.Size:
    """Shape of what is kept per block of a tensor: its rows, and the blocks of a row."""
    return torch.Size((param.shape[0], param.numel() // max(param.shape[0], 1) // BLOCK))


def encode(value: Tensor, top: int, noise: Tensor | None) -> tuple[Tensor, Tensor]:
    """Round blocks to 8-bit codes.

    Args:
        value: FP32 [blocks, 64], finite, at most :data:`LARGEST_CODED` in magnitude. Not changed.
        top: :data:`EXP_AVG_TOP` or :data:`EXP_AVG_SQ_TOP`, for which no value may be negative.
        noise: Uniform int32 in [0, 65535], shaped like `value`, for stochastic rounding: each value becomes one of its
            two neighbours on the block's grid, the upper with probability equal to its place between them, to 2⁻¹⁶.
            None rounds to nearest.

    Returns:
        Codes, uint8 [blocks, 64], and scales, uint8 [blocks]: the biased exponent of the highest binade.
    """
    bits = value.view(torch.int32)
    magnitude = bits.bitwise_and(0x7FFFFFFF)
    # One binade higher where the largest value lies beyond its binade's last code.
    largest = magnitude.amax(1)
    scale = (largest + ((1 << SHIFT) - 1)).bitwise_right_shift_(23).clamp_min_((top >> MANTISSA_BITS) + 1)
    base = _base(scale, top)
    smallest = (base + (1 << SHIFT)).view(torch.float32)
    rounding = HALF if noise is None else noise
    code = (magnitude - base).add_(rounding << (SHIFT - 16)).bitwise_right_shift_(SHIFT)
    # Between 0 and the smallest value the place is a quotient; both products are exact, so it need not be taken.
    from_zero = magnitude.view(torch.float32) * 65536.0 > smallest * rounding
    code = torch.where(magnitude < smallest.view(torch.int32), from_zero, code)
    if top < SIGN:
        code.bitwise_or_(bits.bitwise_right_shift(24).bitwise_and_(SIGN))
    return code.to(torch.uint8), scale.to(torch.uint8)


def decode(codes: Tensor, scales: Tensor, top: int) -> Tensor:
    """Widen 8-bit codes.

    Args:
        codes: uint8 [blocks, 64].
        scales: uint8 [blocks].
        top: As for :func:`encode`.

    Returns:
        FP32 [blocks, 64].
    """
    code = codes.to(torch.int32)
    magnitude = code.bitwise_and(top)
    bits = torch.where(magnitude > 0, (magnitude << SHIFT) + _base(scales.to(torch.int32), top), 0)
    if top < SIGN:
        bits.bitwise_or_(code.bitwise_and_(SIGN).bitwise_left_shift_(24))
    return bits.view(torch.float32)


def _base(scale: Tensor, top: int) -> Tensor:
    """The FP32 pattern that stands for code 0, as a column: adding a shifted code gives the code's value."""
    return (scale - (top >> MANTISSA_BITS)).bitwise_left_shift_(23).unsqueeze(1)
