"""Blocks of 64 consecutive elements of a row, and tiles of 64 rows of them: state is kept for these, not for elements.

A *row* is ``param[i]``, flattened. Matrices whose rows are multiples of 64 are kept in blocks (:func:`in_blocks`);
vectors, small tensors and odd rows are not: they stay as they are without these options, and take little memory.
``state_bits=8`` keeps a scale for every block.

**Tiles.** ``block_variance=True`` cuts a matrix into *panels* of 64 rows, of which the last may have fewer, and panels
into tiles of 64 columns: a block of each row. A variance of rank 1 is kept of a tile, as means of its rows and of its
columns (:class:`luminav.rule.TileMeans`), which have the shapes :func:`block_shape` and :func:`panel_shape`.

**8-bit codes.** A moment is stored as a byte per element and a power of two per block. A byte is a small floating-point
number: a sign, two exponent bits and five mantissa bits for exp_avg; four and four for exp_avg_sq, which has no sign.
Like FP16 they have subnormals: a block's values reach down to 2⁻², or 2⁻¹⁴, of its largest binade, each to 1/32, or
1/16, of itself or better, and lie evenly between there and 0. A code, moved up by some places, is an FP16 pattern, and
so it is widened; a value that is scaled to where FP32's subnormals begin is a code and some bits below it, so noise is
added to those and they are cut off, as for BF16. Scales are powers of two, as in the OCP Microscaling formats (OCP MX
1.0, 2023): a byte each. Other formats were measured by ``benchmarks/state_formats.py``; its figures are in
``docs/memory.md``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 64
PANEL_ROWS = 64
SMALLEST_NUMEL = 4096
"""Smaller tensors are not kept in blocks: there is nothing to save."""

SIGN = 0x80


class CodeFormat(NamedTuple):
    """What the bits of an 8-bit code mean."""

    top: int
    """The largest magnitude among the codes; where the sign's bit is not among it, codes have a sign."""
    mantissa_bits: int

    @property
    def binades(self) -> int:
        """The largest exponent."""
        return self.top >> self.mantissa_bits

    @property
    def shift(self) -> int:
        """How far a code lies above the end of FP32's bit pattern: how many bits rounding cuts off."""
        return 23 - self.mantissa_bits

    @property
    def smallest_scale(self) -> int:
        """The smallest scale: even the lowest code of such a block is a normal FP32 number."""
        return self.binades + self.mantissa_bits


EXP_AVG_FORMAT = CodeFormat(0x7F, 5)
EXP_AVG_SQ_FORMAT = CodeFormat(0xFF, 4)
NOISE_BITS = 19
"""As many as the moment with the shorter mantissa needs; the other takes the upper ones."""
LARGEST_SCALE = 242
"""The largest scale that is stored. A block with values beyond 2¹¹⁶ is divided by a power of two until it fits."""
UP = 257
"""A block is multiplied by 2^(127 − scale), and by eight more, so that no factor is beyond FP32."""
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


def panel_shape(param: Tensor) -> torch.Size:
    """Shape of what is kept for each column of a panel: the panels, and the elements of a row."""
    return torch.Size((-(-param.shape[0] // PANEL_ROWS), param.numel() // max(param.shape[0], 1)))


def tile_means(value: Tensor) -> tuple[Tensor, Tensor]:
    """Row and column means of the tiles of a matrix.

    Args:
        value: [rows, columns].

    Returns:
        Row means [rows, tiles of a panel] and column means [panels, columns].
    """
    blocks = value.view(len(value), value.shape[1] // BLOCK, BLOCK)
    columns = [panel.mean(0) for panel in value.split(PANEL_ROWS)]
    return blocks.mean(2), torch.stack(columns) if len(value) else value


def tile_products(rows: Tensor, columns: Tensor) -> Tensor:
    """The matrix of rank 1 in each tile that has the row means that :func:`tile_means` gives, and its column means.

    Returns:
        [rows, columns]; where a tile's mean is 0, zeros.
    """
    if not len(rows):
        return columns
    panels = []
    for r, c in zip(rows.split(PANEL_ROWS), columns, strict=True):
        share = r / (r / len(r)).sum(0).clamp_min(torch.finfo(r.dtype).tiny)
        panels.append((share.unsqueeze(2) * c.view(1, -1, BLOCK)).view(len(r), -1))
    return torch.cat(panels)


def encode(value: Tensor, form: CodeFormat, noise: Tensor | None) -> tuple[Tensor, Tensor]:
    """Round blocks to 8-bit codes.

    Args:
        value: FP32 [blocks, 64], finite. Not changed.
        form: :data:`EXP_AVG_FORMAT` or :data:`EXP_AVG_SQ_FORMAT`, for which no value may be negative.
        noise: Uniform int32 in [0, 2¹⁹), shaped like `value`, for stochastic rounding: each value becomes one of its
            two neighbours on the block's grid, the upper with probability equal to its place between them. None rounds
            to nearest.

    Returns:
        Codes, uint8 [blocks, 64], and scales, uint8 [blocks]: the biased exponent of the highest binade.
    """
    magnitude = value.abs()
    # One binade higher where the largest value lies beyond its binade's last code.
    scale = (magnitude.amax(1).view(torch.int32) + ((1 << form.shift) - 1)).bitwise_right_shift_(23)
    scale.clamp_min_(form.smallest_scale)
    magnitude.mul_(power_of_two(UP - scale))
    # The pattern of magnitude · 2^-down. Below FP32's normal numbers it is worked out: some devices have no subnormals.
    down = UP - 127 - form.binades
    pattern = torch.where(
        magnitude < 2.0 ** (down - 126),
        (magnitude * 2.0 ** (149 - down)).round_().to(torch.int32),
        magnitude.view(torch.int32) - (down << 23),
    )
    below = (HALF if noise is None else noise) >> (NOISE_BITS - form.shift)
    code = pattern.add_(below).bitwise_right_shift_(form.shift)
    if form.top < SIGN:
        code.bitwise_or_(value.view(torch.int32).bitwise_right_shift(24).bitwise_and_(SIGN))
    return code.to(torch.uint8), scale.clamp_max_(LARGEST_SCALE).to(torch.uint8)


def decode(codes: Tensor, scales: Tensor, form: CodeFormat) -> Tensor:
    """Widen 8-bit codes.

    Args:
        codes: uint8 [blocks, 64].
        scales: uint8 [blocks].
        form: As for :func:`encode`.

    Returns:
        FP32 [blocks, 64].
    """
    code = codes.to(torch.int32)
    pattern = code.bitwise_and(form.top).bitwise_left_shift_(10 - form.mantissa_bits)
    if form.top < SIGN:
        pattern.bitwise_or_(code.bitwise_and_(SIGN).bitwise_left_shift_(8))
    value = pattern.to(torch.int16).view(torch.float16).to(torch.float32)
    return value.mul_(power_of_two(scales.to(torch.int32) + (15 - form.binades)))


def power_of_two(exponent: Tensor) -> Tensor:
    """FP32 powers of two with these biased exponents, int32 [blocks], as a column."""
    return exponent.bitwise_left_shift(23).view(torch.float32).unsqueeze(1)
