"""Tiles of 64 rows and 64 columns: which one a program serves, and the means that are kept of it.

A program has a tile to itself, and so its means: it reads all of them before it writes any that it has read.
"""

from __future__ import annotations

import triton
import triton.language as tl

from luminav import blocks
from luminav.engines.triton import rounding, rule
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
from luminav.engines.triton.tables import EXP_AVG_SQ_COL, NUM_POINTERS, ROW_LENGTH

PANEL_ROWS = tl.constexpr(blocks.PANEL_ROWS)


@triton.jit
def place_tile(pid, t, pointers, first_programs, numels):
    """Which of its tensor's tiles a program has, its first element, how many are left from there, and a row's length.

    Launches have no rows of which 65 would not fit 32 bits, see ``addressable``.
    """
    chunk = (pid - tl.load(first_programs + t)).to(tl.int64)
    row = tl.multiple_of(tl.load(pointers + t * NUM_POINTERS + ROW_LENGTH), rounding.BLOCK)
    panel = chunk // (row // rounding.BLOCK)
    start = panel * PANEL_ROWS * row + (chunk - panel * (row // rounding.BLOCK)) * rounding.BLOCK
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
    BLOCK: tl.constexpr, ITERATIONS: tl.constexpr,
):  # fmt: skip
    """New column means of a tile, [64], and √(c/μ), by which √r is to be multiplied. Changes nothing."""
    ROWS: tl.constexpr = BLOCK // rounding.BLOCK
    share_of_row = 1.0 / tl.maximum((left + (stride - 1)) // stride, 1).to(tl.float32)
    sums = tl.zeros([ROWS, rounding.BLOCK], tl.float32)
    means = tl.zeros([ROWS], tl.float32)
    for i in tl.range(0, ITERATIONS, num_stages=1):
        offsets, mask = tile(i * BLOCK, left, stride, BLOCK, True)
        g, _special = clean_grad(load_stored(grad, offsets, mask, GRAD), grad_scale, GRAD, SCALED, MATH, PAIRS)
        m, scale = load_moment(exp_avg, exp_avg_scale, i * BLOCK, left, stride, offsets, mask, MOMENT, False, BLOCK)
        m, m_decay = widen_moment(m, scale, beta1, MOMENT, SIGNED=True, SHARED=False, MATH=MATH)
        m = rule.momentum(m, g * one_minus_beta1, m_decay)
        r, _ = load_moment(exp_avg_sq, exp_avg_scale, i * BLOCK, left, stride, offsets, mask, MOMENT, True, BLOCK)
        squares = rule.innovation_share(m, g, root_one_minus_beta2)
        r = rule.row_means(widen_row_means(r), squares, beta2, largest(tl.bfloat16))
        sums += squares
        means += r * share_of_row
    columns = tl.arange(0, rounding.BLOCK)
    c = widen_row_means(load_stored(exp_avg_sq_col, columns, columns < left, tl.bfloat16))
    c = rule.column_means(c, tl.sum(sums, 0) * (share_of_row * rounding.BLOCK), beta2, largest(tl.bfloat16))
    return c, rule.column_factors(c, tl.sum(means, 0), MATH)


@triton.jit
def store_row_means(
    exp_avg_sq, first_row, left, stride, r, first, second, low, STOCHASTIC: tl.constexpr, BLOCK: tl.constexpr
):
    """Store new row means, saturated; their noise is that of their block's first element."""
    blocks_, inside = block_tile(first_row, left, stride, BLOCK)
    x = rounding.element_hash(first, second, low + (blocks_ * rounding.BLOCK).to(tl.uint32))
    noise = rounding.stream(x, rounding.EXP_AVG_SQ_STREAM, 16)
    bits = rounded(r, noise, tl.bfloat16, STOCHASTIC, SATURATE=False, PAIRS=False)
    tl.store(stored_pointer(exp_avg_sq, tl.bfloat16) + blocks_, bits, mask=inside)


@triton.jit
def store_column_means(exp_avg_sq_col, left, c, first, second, low, STOCHASTIC: tl.constexpr):
    """Store new column means, saturated; their noise is that of their first element, from a stream of their own.

    Every warp has loaded all of the old ones, and one warp stores: not before the last has loaded.
    """
    tl.debug_barrier()
    columns = tl.arange(0, rounding.BLOCK)
    x = rounding.element_hash(first, second, low + columns.to(tl.uint32))
    noise = rounding.stream(x, rounding.EXP_AVG_SQ_COL_STREAM, 16)
    bits = rounded(c, noise, tl.bfloat16, STOCHASTIC, SATURATE=False, PAIRS=False)
    tl.store(stored_pointer(exp_avg_sq_col, tl.bfloat16) + columns, bits, mask=columns < left)
