"""Tiles of 64 rows and 64 columns: which ones a program serves, and the means that are kept of them.

A program has some tiles side by side to itself, and so their means: it reads all of these before it writes any that it
has read. The more tiles, the longer are the pieces of a row that come from memory one after the other.
"""

from __future__ import annotations

import triton
import triton.language as tl

from luminav import blocks
from luminav.engines.triton import rounding, rule
from luminav.engines.triton.columns import EXP_AVG_SQ_COL, NUM_POINTERS, ROW_LENGTH
from luminav.engines.triton.memory import (
    block_tile,
    clean_grad,
    largest,
    load_moment,
    load_stored,
    rounded,
    stored_pointer,
    tensor_pointer,
    tile,
    widen_moment,
    widen_row_means,
)

PANEL_ROWS = tl.constexpr(blocks.PANEL_ROWS)


@triton.jit
def place_tiles(pid, t, pointers, first_programs, numels, TILES: tl.constexpr):
    """Which of its tensor's programs this is, its first element, how many are left from there, and a row's length.

    Launches have no rows of which 65 would not fit 32 bits, see ``addressable``.
    """
    chunk = (pid - tl.load(first_programs + t)).to(tl.int64)
    row = tl.multiple_of(tl.load(pointers + t * NUM_POINTERS + ROW_LENGTH), rounding.BLOCK)
    width = rounding.BLOCK * TILES
    panel = chunk // (row // width)
    start = panel * PANEL_ROWS * row + (chunk - panel * (row // width)) * width
    left = tl.minimum(tl.load(numels + t) - start, PANEL_ROWS * row).to(tl.int32)
    stride = tl.multiple_of(row.to(tl.int32), rounding.BLOCK)
    return chunk, tl.multiple_of(start, rounding.BLOCK), tl.multiple_of(left, rounding.BLOCK), stride


@triton.jit
def column_pointer(pointers, t, start, stride, ALIGNED: tl.constexpr, MATH: tl.constexpr):
    """The pointer to a program's column means."""
    panel = start // (PANEL_ROWS * stride.to(tl.int64))
    first = start - panel * (PANEL_ROWS - 1) * stride
    return tensor_pointer(pointers, t * NUM_POINTERS + EXP_AVG_SQ_COL, first, tl.bfloat16, ALIGNED, MATH)


@triton.jit
def tile_variance(
    grad, exp_avg, exp_avg_scale, exp_avg_sq, exp_avg_sq_col, left, stride, beta1, one_minus_beta1, beta2,
    root_one_minus_beta2, grad_scale,
    GRAD: tl.constexpr, MOMENT: tl.constexpr, SCALED: tl.constexpr, MATH: tl.constexpr, PAIRS: tl.constexpr,
    BLOCK: tl.constexpr, ITERATIONS: tl.constexpr, STAGES: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """New column means, [TILES, 64], and √(c/μ), by which √r is to be multiplied, shaped as a :func:`tile`.

    Changes nothing.
    """
    BLOCKS: tl.constexpr = BLOCK // rounding.BLOCK
    share_of_row = 1.0 / tl.maximum((left + (stride - 1)) // stride, 1).to(tl.float32)
    sums = tl.zeros([BLOCKS, rounding.BLOCK], tl.float32)
    means = tl.zeros([BLOCKS], tl.float32)
    for i in tl.range(0, ITERATIONS, num_stages=STAGES):
        offsets, mask = tile(i * BLOCK, left, stride, BLOCK, True, TILES)
        g, _special = clean_grad(load_stored(grad, offsets, mask, GRAD), grad_scale, GRAD, SCALED, MATH, PAIRS)
        m, scale = load_moment(
            exp_avg, exp_avg_scale, i * BLOCK, left, stride, offsets, mask, MOMENT, False, BLOCK, TILES
        )
        m, m_decay = widen_moment(m, scale, beta1, MOMENT, SIGNED=True, SHARED=False, MATH=MATH)
        m = rule.momentum(m, g * one_minus_beta1, m_decay)
        r, _ = load_moment(
            exp_avg_sq, exp_avg_scale, i * BLOCK, left, stride, offsets, mask, MOMENT, True, BLOCK, TILES
        )
        squares = rule.innovation_share(m, g, root_one_minus_beta2)
        r = rule.row_means(widen_row_means(r), squares, beta2, largest(tl.bfloat16))
        sums += squares
        means += r * share_of_row
    columns = column_offsets(TILES)
    c = widen_row_means(load_stored(exp_avg_sq_col, columns, columns < left, tl.bfloat16))
    sums = tl.sum(tl.reshape(sums, [BLOCKS // TILES, TILES, rounding.BLOCK]), 0)
    c = rule.column_means(c, sums * (share_of_row * rounding.BLOCK), beta2, largest(tl.bfloat16))
    mean = tl.sum(tl.reshape(means, [BLOCKS // TILES, TILES]), 0)
    factors = rule.column_factors(c, mean[:, None], MATH)
    factors = tl.broadcast_to(factors[None, :, :], [BLOCKS // TILES, TILES, rounding.BLOCK])
    return c, tl.reshape(factors, [BLOCKS, rounding.BLOCK])


@triton.jit
def column_offsets(TILES: tl.constexpr):
    """Offsets of a program's column means, [TILES, 64]."""
    return tl.arange(0, TILES)[:, None] * rounding.BLOCK + tl.arange(0, rounding.BLOCK)[None, :]


@triton.jit
def store_row_means(
    exp_avg_sq, first_row, left, stride, r, first, second, low, STOCHASTIC: tl.constexpr, BLOCK: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """Store new row means, saturated; their noise is that of their block's first element."""
    blocks_, inside = block_tile(first_row, left, stride, BLOCK, TILES)
    x = rounding.element_hash(first, second, low + (blocks_ * rounding.BLOCK).to(tl.uint32))
    noise = rounding.stream(x, rounding.EXP_AVG_SQ_STREAM, 16)
    bits = rounded(r, noise, tl.bfloat16, STOCHASTIC, SATURATE=False, PAIRS=False)
    tl.store(stored_pointer(exp_avg_sq, tl.bfloat16) + blocks_, bits, mask=inside)


@triton.jit
def store_column_means(exp_avg_sq_col, left, c, first, second, low, STOCHASTIC: tl.constexpr, TILES: tl.constexpr):
    """Store new column means, saturated; their noise is that of their first element, from a stream of their own.

    Every warp has loaded all of the old ones, and one warp stores: not before the last has loaded.
    """
    tl.debug_barrier()
    columns = column_offsets(TILES)
    x = rounding.element_hash(first, second, low + columns.to(tl.uint32))
    noise = rounding.stream(x, rounding.EXP_AVG_SQ_COL_STREAM, 16)
    bits = rounded(c, noise, tl.bfloat16, STOCHASTIC, SATURATE=False, PAIRS=False)
    tl.store(stored_pointer(exp_avg_sq_col, tl.bfloat16) + columns, bits, mask=columns < left)
