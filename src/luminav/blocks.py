"""Blocks of 64 consecutive elements of a row: what ``state_bits=8`` and ``block_variance=True`` keep one number for.

A *row* is ``param[i]``, flattened. Matrices whose rows are multiples of 64 are kept in blocks (:func:`in_blocks`);
vectors, small tensors and odd rows are not: they stay as they are without these options, and take little memory.

**8-bit codes.** A moment is stored as a byte per element and a power of two per block. A byte is a small floating-point
number with four mantissa bits; above them exp_avg has three exponent bits and a sign, exp_avg_sq four exponent bits.
Like FP16 they have subnormals: a block's values reach down to 2⁻⁶, or 2⁻¹⁴, of its largest binade, each to 1/16 of
itself or better, and lie evenly between there and 0. A code, moved up by some places, is an FP16 pattern, and so it is
widened; a value that is scaled to where FP32's subnormals begin is a code and 19 bits below it, so noise is added to
those and they are cut off, as for BF16. Scales are powers of two, as in the OCP Microscaling formats (OCP MX 1.0,
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
FP16_SHIFT = 10 - MANTISSA_BITS
"""How far a code lies above the end of FP16's."""
EXP_AVG_TOP = 0x7F
"""The largest magnitude among exp_avg's codes: three exponent bits and four mantissa bits."""
EXP_AVG_SQ_TOP = 0xFF
SIGN = 0x80
LARGEST_SCALE = 246
"""The largest scale that is stored. A block with values beyond 2¹²⁰ is divided by a power of two until it fits."""
UP = 257
"""A block is multiplied by 2^(127 − scale), and by eight more, so that no factor is beyond FP32."""
NOISE_BITS = SHIFT
"""Noise has all the bits that are cut off."""
HALF = 1 << (NOISE_BITS - 1)
"""In place of noise: rounds to nearest, half away from zero."""


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
        value: FP32 [blocks, 64], finite. Not changed.
        top: :data:`EXP_AVG_TOP` or :data:`EXP_AVG_SQ_TOP`, for which no value may be negative.
        noise: Uniform int32 in [0, 2¹⁹), shaped like `value`, for stochastic rounding: each value becomes one of its
            two neighbours on the block's grid, the upper with probability equal to its place between them. None rounds
            to nearest.

    Returns:
        Codes, uint8 [blocks, 64], and scales, uint8 [blocks]: the biased exponent of the highest binade.
    """
    magnitude = value.abs()
    # One binade higher where the largest value lies beyond its binade's last code.
    scale = (magnitude.amax(1).view(torch.int32) + ((1 << SHIFT) - 1)).bitwise_right_shift_(23)
    scale.clamp_min_(smallest_scale(top))
    magnitude.mul_(power_of_two(UP - scale))
    # The pattern of magnitude · 2^-down. Below FP32's normal numbers it is worked out: some devices have no subnormals.
    down = UP - 127 - (top >> MANTISSA_BITS)
    pattern = torch.where(
        magnitude < 2.0 ** (down - 126),
        (magnitude * 2.0 ** (149 - down)).round_().to(torch.int32),
        magnitude.view(torch.int32) - (down << 23),
    )
    code = pattern.add_(HALF if noise is None else noise).bitwise_right_shift_(SHIFT)
    if top < SIGN:
        code.bitwise_or_(value.view(torch.int32).bitwise_right_shift(24).bitwise_and_(SIGN))
    return code.to(torch.uint8), scale.clamp_max_(LARGEST_SCALE).to(torch.uint8)


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
    pattern = code.bitwise_and(top).bitwise_left_shift_(FP16_SHIFT)
    if top < SIGN:
        pattern.bitwise_or_(code.bitwise_and_(SIGN).bitwise_left_shift_(8))
    value = pattern.to(torch.int16).view(torch.float16).to(torch.float32)
    return value.mul_(power_of_two(scales.to(torch.int32) + (15 - (top >> MANTISSA_BITS))))


def smallest_scale(top: int) -> int:
    """The smallest scale: even the lowest code of such a block is a normal FP32 number."""
    return (top >> MANTISSA_BITS) + MANTISSA_BITS


def power_of_two(exponent: Tensor) -> Tensor:
    """FP32 powers of two with these biased exponents, int32 [blocks], as a column."""
    return exponent.bitwise_left_shift(23).view(torch.float32).unsqueeze(1)
