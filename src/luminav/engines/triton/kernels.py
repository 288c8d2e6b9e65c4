"""The kernels: load, apply the rule, store. Every tensor of a launch in one grid.

A launch covers the chunks of many tensors. Program `pid` finds its tensor by a table and the tensor's pointers in
another, so one launch serves a whole model. The tables are described in ``tables.py``; nothing here allocates, waits
for the host or uses atomics. Sums leave each program as one row of partials, and a second small launch adds the rows
of a tensor in order, in FP64, so results repeat bit for bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from luminav.engines.triton import rounding, rule
from luminav.engines.triton.columns import (
    ACTIVE,
    ALPHA_SS,
    BETA1,
    BETA2,
    BOUND_RATIO,
    DECAY,
    GRAD_SCALE,
    KEY_WIDTH,
    LR,
    MASTER,
    NO_MASTER,
    NUM_PARTIALS,
    NUM_POINTERS,
    NUMBERS_WIDTH,
    ONE_MINUS_BETA1,
    PARAM,
    RMS_DENOMINATOR,
    ROOT_ONE_MINUS_BETA2,
    SIGMA_FLOOR,
    SIGMA_SCALE,
    STEP_SIZE,
)
from luminav.engines.triton.memory import (
    clean_grad,
    finite_weight,
    largest,
    load_moment,
    load_stored,
    load_tile,
    master_pointer,
    noise_words,
    place,
    state_pointers,
    store_master,
    store_moment,
    store_weight,
    tensor_of,
    tensor_pointer,
    tile,
    total,
    widen_moment,
    widen_weight,
    zeros,
)
from luminav.engines.triton.tiles import (
    column_pointer,
    place_tiles,
    store_column_means,
    store_row_means,
    tile_variance,
)


@triton.jit
def place_program(
    pid, t, pointers, first_programs, numels, SPAN: tl.constexpr, SHARED: tl.constexpr, ALIGNED: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """Which of its tensor's programs this is, its first element, how many are left, and how far apart its rows are."""
    if SHARED:
        chunk, start, left, stride = place_tiles(pid, t, pointers, first_programs, numels, TILES)
    else:
        chunk, start, left = place(pid, t, first_programs, numels, SPAN, ALIGNED)
        stride = rounding.BLOCK
    return chunk, start, left, stride


@triton.jit
def direction_numbers(n, DUAL: tl.constexpr):
    """What the direction needs of a tensor's row of numbers; without a variance the last two are denominator and α."""
    beta1 = tl.load(n + BETA1)
    one_minus_beta1 = tl.load(n + ONE_MINUS_BETA1)
    if DUAL:
        beta2 = tl.load(n + BETA2)
        root_one_minus_beta2 = tl.load(n + ROOT_ONE_MINUS_BETA2)
        sigma_scale = tl.load(n + SIGMA_SCALE)
        sigma_floor = tl.load(n + SIGMA_FLOOR)
    else:
        beta2 = beta1
        root_one_minus_beta2 = one_minus_beta1
        sigma_scale = tl.load(n + RMS_DENOMINATOR)
        sigma_floor = tl.load(n + ALPHA_SS)
    return beta1, one_minus_beta1, beta2, root_one_minus_beta2, sigma_scale, sigma_floor


@triton.jit
def widen_moments(
    m, v, m_scale, v_scale, beta1, beta2, MOMENT: tl.constexpr, DUAL: tl.constexpr, SHARED: tl.constexpr,
    MATH: tl.constexpr,
):  # fmt: skip
    """exp_avg and exp_avg_sq as FP32 with what they decay by; with one buffer the first in place of the second."""
    m, m_decay = widen_moment(m, m_scale, beta1, MOMENT, SIGNED=True, SHARED=False, MATH=MATH)
    v_decay = m_decay
    if DUAL:
        v, v_decay = widen_moment(v, v_scale, beta2, MOMENT, SIGNED=False, SHARED=SHARED, MATH=MATH)
    return m, v, m_decay, v_decay


@triton.jit
def gated_direction(
    g, m, v, factors, m_decay, v_decay, beta1, one_minus_beta1, root_one_minus_beta2, sigma_scale, sigma_floor,
    DUAL: tl.constexpr, FLOORED: tl.constexpr, CAUTIOUS: tl.constexpr, MOMENT: tl.constexpr, SHARED: tl.constexpr,
    MATH: tl.constexpr,
):  # fmt: skip
    """New moments, gate and gated direction of a block; where SHARED, v is the row means, with `factors` of columns."""
    grad_share = g * one_minus_beta1
    m = rule.momentum(m, grad_share, m_decay)
    ahead = rule.momentum(m, grad_share, beta1)
    if DUAL:
        if SHARED:
            v = rule.row_means(v, rule.innovation_share(m, g, root_one_minus_beta2), v_decay, largest(tl.bfloat16))
            root = rule.sqrt(v, MATH)[:, None] * factors
        else:
            v = rule.variance(v, m, g, v_decay, root_one_minus_beta2, largest(MOMENT))
            root = rule.sqrt(v, MATH)
        u = rule.dual_direction(ahead, root, sigma_scale, sigma_floor, FLOORED, MATH)
    else:
        u = rule.single_direction(ahead, sigma_scale, sigma_floor, MATH)
    if CAUTIOUS:
        keep = rule.cautious_mask(ahead, g, MATH)
        return m, v, keep, u * keep
    else:
        return m, v, 1.0, u


BAD = tl.constexpr(1024)  # more than the elements that a thread adds up in one number

# ---- measure ---------------------------------------------------------------------------------------------------------


@triton.jit
def lookahead_kernel(
    pointers, grads, numels, first_programs, first_tensors, numbers, keys, partials,
    GRAD: tl.constexpr, MOMENT: tl.constexpr, SHARED: tl.constexpr, SCALED: tl.constexpr, MATH: tl.constexpr,
    PAIRS: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr, ITERATIONS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Single buffer: each program's Σ m̃². Changes nothing but partials."""
    pid = tl.program_id(0)
    t = tensor_of(pid, first_tensors, first_programs)
    if tl.load(keys + t * KEY_WIDTH + ACTIVE) == 0:
        return
    _, start, left = place(pid, t, first_programs, numels, BLOCK * ITERATIONS, ALIGNED)
    n = numbers + t * NUMBERS_WIDTH
    grad = tensor_pointer(grads, t, start, GRAD, ALIGNED, MATH)
    exp_avg, _, exp_avg_scale, _ = state_pointers(pointers, t, start, MOMENT, SHARED, ALIGNED, MATH)
    IN_BLOCKS: tl.constexpr = tl.uint8 == MOMENT
    squares = zeros(BLOCK, tl.float64, IN_BLOCKS, 1)
    beta1, w1, grad_scale = tl.load(n + BETA1), tl.load(n + ONE_MINUS_BETA1), tl.load(n + GRAD_SCALE)
    for i in tl.range(0, ITERATIONS, num_stages=STAGES):
        offsets, mask = tile(i * BLOCK, left, rounding.BLOCK, BLOCK, IN_BLOCKS, 1)
        g, _special = clean_grad(load_stored(grad, offsets, mask, GRAD), grad_scale, GRAD, SCALED, MATH, PAIRS)
        m, scale = load_moment(
            exp_avg, exp_avg_scale, i * BLOCK, left, rounding.BLOCK, offsets, mask, MOMENT, False, BLOCK, 1
        )
        m, m_decay = widen_moment(m, scale, beta1, MOMENT, SIGNED=True, SHARED=False, MATH=MATH)
        share = g * w1
        ahead = rule.momentum(rule.momentum(m, share, m_decay), share, beta1).to(tl.float64)
        squares += ahead * ahead
    tl.store(partials + pid.to(tl.int64), total(squares, IN_BLOCKS))


@triton.jit
def measure_kernel(
    pointers, grads, numels, first_programs, first_tensors, numbers, keys, partials,
    PARAM_TYPE: tl.constexpr, MASTER_FORM: tl.constexpr, GRAD: tl.constexpr, MOMENT: tl.constexpr,
    DUAL: tl.constexpr, FLOORED: tl.constexpr, SHARED: tl.constexpr, CAUTIOUS: tl.constexpr, SCALED: tl.constexpr,
    MATH: tl.constexpr, PAIRS: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr, ITERATIONS: tl.constexpr,
    STAGES: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Each program's share of the sums. Changes nothing but partials."""
    pid = tl.program_id(0)
    t = tensor_of(pid, first_tensors, first_programs)
    if tl.load(keys + t * KEY_WIDTH + ACTIVE) == 0:
        return
    _, start, left, stride = place_program(
        pid, t, pointers, first_programs, numels, BLOCK * ITERATIONS, SHARED, ALIGNED, TILES
    )
    n = numbers + t * NUMBERS_WIDTH
    row = t * NUM_POINTERS
    param = tensor_pointer(pointers, row + PARAM, start, PARAM_TYPE, ALIGNED, MATH)
    master = master_pointer(pointers, row + MASTER, start, MASTER_FORM, ALIGNED, MATH)
    grad = tensor_pointer(grads, t, start, GRAD, ALIGNED, MATH)
    exp_avg, exp_avg_sq, exp_avg_scale, exp_avg_sq_scale = state_pointers(
        pointers, t, start, MOMENT, SHARED, ALIGNED, MATH
    )
    IN_BLOCKS: tl.constexpr = SHARED or tl.uint8 == MOMENT
    beta1, w1, beta2, w2, sigma_scale, sigma_floor = direction_numbers(n, DUAL)
    grad_scale = tl.load(n + GRAD_SCALE)
    counts, pairs, direction_sq, param_sq = no_sums(PARAM_TYPE, BLOCK, IN_BLOCKS, ALIGNED)
    factors = 0.0
    if SHARED:
        exp_avg_sq_col = column_pointer(pointers, t, start, stride, ALIGNED, MATH)
        _, factors = tile_variance(
            grad, exp_avg, exp_avg_scale, exp_avg_sq, exp_avg_sq_col, left, stride, beta1, w1, beta2, w2, grad_scale,
            GRAD, MOMENT, SCALED, MATH, PAIRS, BLOCK, ITERATIONS, STAGES, TILES,
        )  # fmt: skip
    for i in tl.range(0, ITERATIONS, num_stages=STAGES):
        _offsets, mask = tile(i * BLOCK, left, stride, BLOCK, IN_BLOCKS, TILES)
        g, stored, remainder, m, v, m_scale, v_scale = load_tile(
            grad, param, master, exp_avg, exp_avg_sq, exp_avg_scale, exp_avg_sq_scale, i * BLOCK, left, stride,
            GRAD, PARAM_TYPE, MASTER_FORM, MOMENT, DUAL, SHARED, BLOCK, TILES,
        )  # fmt: skip
        g, special_grad = clean_grad(g, grad_scale, GRAD, SCALED, MATH, PAIRS)
        before = widen_weight(stored, remainder, PARAM_TYPE, MASTER_FORM, MATH)
        p, _special = finite_weight(stored, before, PARAM_TYPE, MASTER_FORM, MATH, PAIRS)
        m, v, m_decay, v_decay = widen_moments(m, v, m_scale, v_scale, beta1, beta2, MOMENT, DUAL, SHARED, MATH)
        m, v, keep, kept = gated_direction(
            g, m, v, factors, m_decay, v_decay, beta1, w1, w2, sigma_scale, sigma_floor,
            DUAL, FLOORED, CAUTIOUS, MOMENT, SHARED, MATH,
        )  # fmt: skip
        counts, pairs = count(counts, pairs, keep, mask, special_grad, CAUTIOUS)
        direction_sq = add_up(direction_sq, kept, True)
        param_sq = add_up(param_sq, p, True)
    store_partials(partials, pid, counts, pairs, direction_sq, param_sq, IN_BLOCKS)


@triton.jit
def no_sums(PARAM_TYPE: tl.constexpr, BLOCK: tl.constexpr, IN_BLOCKS: tl.constexpr, ALIGNED: tl.constexpr):
    """What a program's sums start from: both of :func:`count`, Σ(keep·u)², Σp². One number for what a thread loads."""
    TOGETHER: tl.constexpr = (128 // PARAM_TYPE.primitive_bitwidth) if ALIGNED else 1
    return (
        zeros(BLOCK, tl.float32, IN_BLOCKS, TOGETHER),
        zeros(BLOCK, tl.int32, IN_BLOCKS, TOGETHER),
        zeros(BLOCK, tl.float32, IN_BLOCKS, TOGETHER),
        zeros(BLOCK, tl.float32, IN_BLOCKS, TOGETHER),
    )


@triton.jit
def count(counts, pairs, keep, mask, special, CAUTIOUS: tl.constexpr):
    """Count kept elements, and those whose gradient is not finite, as :func:`store_partials` reads them.

    1 for a kept element and BAD more for a special one, whose sums are exact in FP32; or, of masks that come in pairs,
    the sums of pairs, without a look at either of the two.
    """
    if not CAUTIOUS:
        keep = tl.where(mask, 1.0, 0.0)
    if special.dtype == tl.uint16:
        even, odd = neighbours(special)
        both = even.to(tl.uint32) | (odd.to(tl.uint32) << 16)
        return add_up(counts, keep, False), add_up(pairs, both.to(tl.int32, bitcast=True), False)
    else:
        return add_up(counts, keep + tl.where(special, BAD * 1.0, 0.0), False), pairs


@triton.jit
def add_up(sums, x, SQUARES: tl.constexpr):
    """Sums of x, or of its squares, over neighbours: the last dimension is halved until it is as long as that of sums.

    Neighbours lie in one thread, where one register for all of them leaves room for more warps than one for each.
    """
    if x.numel != sums.numel:
        even, odd = neighbours(x)
        return add_up(add_up(sums, even, SQUARES), odd, SQUARES)
    elif SQUARES:
        return tl.fma(x, x, sums)
    else:
        return sums + x


@triton.jit
def neighbours(x):
    """Every other element along the last dimension, and those between."""
    if len(x.shape) == 2:
        return tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
    else:
        return tl.split(tl.reshape(x, [x.shape[0] // 2, 2]))


@triton.jit
def store_partials(partials, pid, counts, pairs, direction_sq, param_sq, IN_BLOCKS: tl.constexpr):
    """A program's row of sums: Σkeep, Σ(keep·u)², Σp², and the non-finite count.

    As numbers, the masks of a pair are 65535 for the lower one and −65536 for the upper one.
    """
    both = counts.to(tl.int32)
    lower = -pairs & 0xFFFF
    upper = (-pairs >> 16) + lower
    bad = both // BAD + lower + upper
    out = partials + pid.to(tl.int64) * NUM_PARTIALS
    tl.store(out, total(both & (BAD - 1), IN_BLOCKS).to(tl.float32))
    tl.store(out + 1, total(direction_sq, IN_BLOCKS))
    tl.store(out + 2, total(param_sq, IN_BLOCKS))
    tl.store(out + 3, total(bad, IN_BLOCKS).to(tl.float32))


# ---- update ----------------------------------------------------------------------------------------------------------


@triton.jit
def update_kernel(
    pointers, grads, numels, first_programs, first_tensors, numbers, keys, steps, partials, first_indices,
    PARAM_TYPE: tl.constexpr, GRAD: tl.constexpr, MOMENT: tl.constexpr, MASTER_FORM: tl.constexpr,
    DUAL: tl.constexpr, FLOORED: tl.constexpr, SHARED: tl.constexpr, CAUTIOUS: tl.constexpr,
    COORDINATE: tl.constexpr, STOCHASTIC: tl.constexpr, GATHER: tl.constexpr, SCALED: tl.constexpr,
    MATH: tl.constexpr, PAIRS: tl.constexpr, OFFSET: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
    ITERATIONS: tl.constexpr, STAGES: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Store new weights and moments; with GATHER also leave each program's share of the sums."""
    pid = tl.program_id(0)
    if not GATHER:  # from the end, whose elements the measure kernel has just left in the cache
        pid = tl.num_programs(0) - 1 - pid
    t = tensor_of(pid, first_tensors, first_programs)
    if tl.load(keys + t * KEY_WIDTH + ACTIVE) == 0:
        return
    chunk, start, left, stride = place_program(
        pid, t, pointers, first_programs, numels, BLOCK * ITERATIONS, SHARED, ALIGNED, TILES
    )
    n = numbers + t * NUMBERS_WIDTH
    row = t * NUM_POINTERS
    param = tensor_pointer(pointers, row + PARAM, start, PARAM_TYPE, ALIGNED, MATH)
    master = master_pointer(pointers, row + MASTER, start, MASTER_FORM, ALIGNED, MATH)
    grad = tensor_pointer(grads, t, start, GRAD, ALIGNED, MATH)
    exp_avg, exp_avg_sq, exp_avg_scale, exp_avg_sq_scale = state_pointers(
        pointers, t, start, MOMENT, SHARED, ALIGNED, MATH
    )
    IN_BLOCKS: tl.constexpr = SHARED or tl.uint8 == MOMENT
    first, second, low = noise_words(keys + t * KEY_WIDTH, first_indices + t, start, OFFSET)
    step_size, bound_ratio, decay = tl.load(n + STEP_SIZE), tl.load(n + BOUND_RATIO), tl.load(n + DECAY)
    left_of_weights = tl.where(tl.load(n + LR) == 0.0, 0, left)  # η = 0 leaves every weight as it is, −0 too
    beta1, w1, beta2, w2, sigma_scale, sigma_floor = direction_numbers(n, DUAL)
    grad_scale = tl.load(n + GRAD_SCALE)
    counts, pairs, direction_sq, param_sq = no_sums(PARAM_TYPE, BLOCK, IN_BLOCKS, ALIGNED)
    factors = 0.0
    if SHARED:
        exp_avg_sq_col = column_pointer(pointers, t, start, stride, ALIGNED, MATH)
        columns, factors = tile_variance(
            grad, exp_avg, exp_avg_scale, exp_avg_sq, exp_avg_sq_col, left, stride, beta1, w1, beta2, w2, grad_scale,
            GRAD, MOMENT, SCALED, MATH, PAIRS, BLOCK, ITERATIONS, STAGES, TILES,
        )  # fmt: skip
        store_column_means(exp_avg_sq_col, left, columns, first, second, low, STOCHASTIC, TILES)
    for i in tl.range(0, ITERATIONS, num_stages=STAGES):
        start_of_tile = i * BLOCK
        offsets, mask = tile(start_of_tile, left, stride, BLOCK, IN_BLOCKS, TILES)
        g, stored, remainder, m, v, m_scale, v_scale = load_tile(
            grad, param, master, exp_avg, exp_avg_sq, exp_avg_scale, exp_avg_sq_scale, start_of_tile, left, stride,
            GRAD, PARAM_TYPE, MASTER_FORM, MOMENT, DUAL, SHARED, BLOCK, TILES,
        )  # fmt: skip
        g, special_grad = clean_grad(g, grad_scale, GRAD, SCALED, MATH, PAIRS)
        before = widen_weight(stored, remainder, PARAM_TYPE, MASTER_FORM, MATH)
        m, v, m_decay, v_decay = widen_moments(m, v, m_scale, v_scale, beta1, beta2, MOMENT, DUAL, SHARED, MATH)
        m, v, keep, kept = gated_direction(
            g, m, v, factors, m_decay, v_decay, beta1, w1, w2, sigma_scale, sigma_floor,
            DUAL, FLOORED, CAUTIOUS, MOMENT, SHARED, MATH,
        )  # fmt: skip
        p, special = finite_weight(stored, before, PARAM_TYPE, MASTER_FORM, MATH, PAIRS)
        if GATHER:
            counts, pairs = count(counts, pairs, keep, mask, special_grad, CAUTIOUS)
            direction_sq = add_up(direction_sq, kept, True)
            param_sq = add_up(param_sq, p, True)
        change = rule.delta(kept, p, step_size, bound_ratio, COORDINATE, tl.float16 == PARAM_TYPE, MATH)
        moved = rule.decay_and_move(p, change, decay)
        x = rounding.element_hash(first, second, low + offsets.to(tl.uint32))
        _, write = tile(start_of_tile, left_of_weights, stride, BLOCK, IN_BLOCKS, TILES)
        if MASTER_FORM != NO_MASTER:
            store_master(master, param, offsets, write, moved, before, special, PARAM_TYPE, MASTER_FORM)
        else:
            noise = rounding.stream(x, rounding.WEIGHT_STREAM, 16)
            store_weight(param, offsets, write, moved, stored, special, noise, PARAM_TYPE, STOCHASTIC, PAIRS)
        noise = rounding.moment_stream(x, SIGNED=True, MOMENT=MOMENT)
        store_moment(
            exp_avg, exp_avg_scale, start_of_tile, left, stride, offsets, mask, m, noise, MOMENT,
            SIGNED=True, STOCHASTIC=STOCHASTIC, MATH=MATH, PAIRS=PAIRS, BLOCK=BLOCK, TILES=TILES,
        )  # fmt: skip
        if SHARED:
            store_row_means(exp_avg_sq, start_of_tile, left, stride, v, first, second, low, STOCHASTIC, BLOCK, TILES)
        elif DUAL:
            noise = rounding.moment_stream(x, SIGNED=False, MOMENT=MOMENT)
            store_moment(
                exp_avg_sq, exp_avg_sq_scale, start_of_tile, left, stride, offsets, mask, v, noise, MOMENT,
                SIGNED=False, STOCHASTIC=STOCHASTIC, MATH=MATH, PAIRS=PAIRS, BLOCK=BLOCK, TILES=TILES,
            )  # fmt: skip
    if GATHER:
        store_partials(partials, pid, counts, pairs, direction_sq, param_sq, IN_BLOCKS)
    if chunk == 0:
        tl.store(steps + t, tl.load(steps + t) + 1)
