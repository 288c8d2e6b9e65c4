"""The kernels: load, apply the rule, store. Every tensor of a launch in one grid.

A launch covers the chunks of many tensors. Program `pid` finds its tensor in a table and the tensor's pointers in
another, so one launch serves a whole model. The tables are described in ``tables.py``; nothing here allocates, waits
for the host or uses atomics. Sums leave each program as one row of partials, and a second small launch adds the rows
of a tensor in order, in FP64, so results repeat bit for bit.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

from luminav.engines.triton import rounding, rule
from luminav.engines.triton.tables import (
    ACTIVE,
    ALPHA_SS,
    BETA1,
    BETA2,
    BOUND_RATIO,
    BOUND_SCALE,
    CAUTIOUS_SCALE,
    DECAY,
    EXP_AVG,
    EXP_AVG_SCALE,
    EXP_AVG_SQ,
    EXP_AVG_SQ_SCALE,
    GRAD_SCALE,
    GROUP_ALPHA_SS,
    GROUP_BETA1,
    GROUP_BETA2,
    GROUP_BOUND_RATIO,
    GROUP_CAUTIOUS,
    GROUP_CLAMP_MIN,
    GROUP_EMA_DECAY,
    GROUP_EPS,
    GROUP_LR,
    GROUP_RADIAL,
    GROUP_SEED,
    GROUP_SIGN,
    GROUP_TAU,
    GROUP_WEIGHT_DECAY,
    GROUP_WIDTH,
    KEY_WIDTH,
    LR,
    MASTER,
    NO_MASTER,
    NUM_PARTIALS,
    NUM_POINTERS,
    NUM_SUMS,
    NUMBERS_WIDTH,
    ONE_MINUS_BETA1,
    PARAM,
    RMS_DENOMINATOR,
    ROOT_ONE_MINUS_BETA2,
    SIGMA_FLOOR,
    SIGMA_SCALE,
    SPLIT_MASTER,
    STEP_SIZE,
    WHOLE_MASTER,
)

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
"""Whether Triton interprets the kernels; it reads this too when they are defined."""

# ---- numbers of a step, one row per tensor ---------------------------------------------------------------------------


@triton.jit
def numbers_kernel(
    numbers, keys, grads, steps, tensor_group, tensor_index, fp16_flags, groups, kept_scales, grad_scale,
    found_inf, num_tensors,
    SCALED: tl.constexpr, FOUND_INF: tl.constexpr, KEPT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Step numbers, noise keys and the active flag of each tensor, from its step count and its group's options.

    A tensor without a gradient (null pointer) and every tensor of an overflowed step is inactive: the other kernels
    leave it alone.
    """
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = t < num_tensors
    active = tl.load(grads + t, mask=inside, other=0) != 0
    if FOUND_INF:
        active = active & (tl.load(found_inf + t * 0) == 0.0)  # one flag for all: interpreters cannot spread a bool
    step = tl.load(steps + t, mask=inside, other=0) + 1
    row = groups + tl.load(tensor_group + t, mask=inside, other=0) * GROUP_WIDTH
    lr = tl.load(row + GROUP_LR, mask=inside, other=0.0)
    beta1 = tl.load(row + GROUP_BETA1, mask=inside, other=0.5)
    beta2 = tl.load(row + GROUP_BETA2, mask=inside, other=0.5)
    tau = tl.load(row + GROUP_TAU, mask=inside, other=1.0)
    eps = tl.load(row + GROUP_EPS, mask=inside, other=1.0)
    eps = tl.where(tl.load(fp16_flags + t, mask=inside, other=0) != 0, tl.maximum(eps, rule.FP16_EPS), eps)
    t64 = step.to(tl.float64)
    bias_correction1 = 1.0 - power(beta1, t64 + 1.0)
    bias_correction2 = 1.0 - power(beta2, t64)
    scale = tl.load(row + GROUP_SIGN, mask=inside, other=1.0)
    if SCALED:
        scale = scale / tl.load(grad_scale).to(tl.float64)
    decay = 1.0 - lr * tl.load(row + GROUP_WEIGHT_DECAY, mask=inside, other=0.0)
    out = numbers + t * NUMBERS_WIDTH
    tl.store(out + BETA1, beta1.to(tl.float32), mask=inside)
    tl.store(out + ONE_MINUS_BETA1, (1.0 - beta1).to(tl.float32), mask=inside)
    tl.store(out + BETA2, beta2.to(tl.float32), mask=inside)
    tl.store(out + ROOT_ONE_MINUS_BETA2, tl.sqrt(1.0 - beta2).to(tl.float32), mask=inside)
    tl.store(out + SIGMA_SCALE, (tau * bias_correction1 / tl.sqrt(bias_correction2)).to(tl.float32), mask=inside)
    tl.store(out + SIGMA_FLOOR, (eps * tau * bias_correction1).to(tl.float32), mask=inside)
    tl.store(out + DECAY, decay.to(tl.float32), mask=inside)
    tl.store(out + LR, lr.to(tl.float32), mask=inside)
    tl.store(out + GRAD_SCALE, scale.to(tl.float32), mask=inside)
    tl.store(out + BOUND_RATIO, tl.load(row + GROUP_BOUND_RATIO, mask=inside, other=1.0).to(tl.float32), mask=inside)
    tl.store(out + ALPHA_SS, tl.load(row + GROUP_ALPHA_SS, mask=inside, other=0.0).to(tl.float32), mask=inside)
    if KEPT:
        c = tl.load(kept_scales + t * 2 + CAUTIOUS_SCALE, mask=inside, other=1.0).to(tl.float64)
        s = tl.load(kept_scales + t * 2 + BOUND_SCALE, mask=inside, other=1.0).to(tl.float64)
        tl.store(out + STEP_SIZE, (lr * c * s).to(tl.float32), mask=inside)
    seed = tl.load(row + GROUP_SEED, mask=inside, other=0.0).to(tl.uint64, bitcast=True)
    index = tl.load(tensor_index + t, mask=inside, other=0).to(tl.uint64)
    first, second = rounding.noise_key(seed, step.to(tl.uint64), index)
    key = keys + t * KEY_WIDTH
    tl.store(key, first.to(tl.int32, bitcast=True), mask=inside)
    tl.store(key + 1, second.to(tl.int32, bitcast=True), mask=inside)
    tl.store(key + ACTIVE, active.to(tl.int32), mask=inside)


@triton.jit
def power(base, exponent):
    """base**exponent in FP64 for 0 ≤ base < 1."""
    return tl.where(base > 0.0, tl.exp(tl.log(tl.maximum(base, 1e-300)) * exponent), 0.0)


# ---- loads and stores ------------------------------------------------------------------------------------------------


@triton.jit
def tensor_pointer(table, row, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """A pointer out of a table of addresses."""
    pointer = tl.load(table + row).to(tl.pointer_type(TYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def master_pointer(table, row, FORM: tl.constexpr, ALIGNED: tl.constexpr):
    """The pointer to master weights, or to remainders."""
    if FORM == SPLIT_MASTER:
        return tensor_pointer(table, row, tl.int16, ALIGNED)
    else:
        return tensor_pointer(table, row, tl.float32, ALIGNED)


@triton.jit
def tile(first, BLOCK: tl.constexpr, IN_BLOCKS: tl.constexpr):
    """BLOCK consecutive offsets from `first` on; for state in blocks as rows of 64."""
    if IN_BLOCKS:
        rows = tl.arange(0, BLOCK // rounding.BLOCK)
        return first + rows[:, None] * rounding.BLOCK + tl.arange(0, rounding.BLOCK)[None, :]
    else:
        return first + tl.arange(0, BLOCK)


@triton.jit
def zeros(BLOCK: tl.constexpr, TYPE: tl.constexpr, IN_BLOCKS: tl.constexpr):
    """Zeros shaped like :func:`tile`."""
    if IN_BLOCKS:
        return tl.zeros([BLOCK // rounding.BLOCK, rounding.BLOCK], TYPE)
    else:
        return tl.zeros([BLOCK], TYPE)


@triton.jit
def total(x, IN_BLOCKS: tl.constexpr):
    """Sum over a tile."""
    if IN_BLOCKS:
        return tl.sum(tl.sum(x, 1), 0)
    else:
        return tl.sum(x, 0)


@triton.jit
def block_tile(first, left, BLOCK: tl.constexpr):
    """For a tile of 64-element rows: offsets of what is kept per row, and which rows there are."""
    rows = tl.arange(0, BLOCK // rounding.BLOCK)
    return first // rounding.BLOCK + rows, first + rows * rounding.BLOCK < left


@triton.jit
def moment_pointer(table, row, start, TYPE: tl.constexpr, SHARED: tl.constexpr, ALIGNED: tl.constexpr):
    """The pointer to a program's part of a moment."""
    if SHARED:
        return tensor_pointer(table, row, tl.float32, ALIGNED) + start // rounding.BLOCK
    else:
        return tensor_pointer(table, row, TYPE, ALIGNED) + start


@triton.jit
def load_moment(
    pointer, scales, first, left, offsets, mask, TYPE: tl.constexpr, TOP: tl.constexpr, SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A moment as FP32, widened from 8-bit codes where those are kept; where SHARED one element per row."""
    if SHARED:
        rows, inside = block_tile(first, left, BLOCK)
        return tl.load(pointer + rows, mask=inside, other=0.0)
    elif tl.uint8 == TYPE:
        rows, inside = block_tile(first, left, BLOCK)
        scale = tl.load(scales + rows, mask=inside, other=0)
        return rounding.decode(tl.load(pointer + offsets, mask=mask, other=0), scale, TOP)
    else:
        return load_float(pointer, offsets, mask, TYPE)


@triton.jit
def store_moment(
    pointer, scales, first, left, offsets, mask, x, noise, TYPE: tl.constexpr, TOP: tl.constexpr,
    SHARED: tl.constexpr, STOCHASTIC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store a moment, already saturated, in the form in which :func:`load_moment` reads it."""
    if SHARED:
        rows, inside = block_tile(first, left, BLOCK)
        tl.store(pointer + rows, x, mask=inside)
    elif tl.uint8 == TYPE:
        rows, inside = block_tile(first, left, BLOCK)
        codes, scale = rounding.encode(x, noise, TOP, STOCHASTIC)
        tl.store(pointer + offsets, codes, mask=mask)
        tl.store(scales + rows, scale, mask=inside)
    else:
        store_rounded(pointer, offsets, mask, x, noise, TYPE, STOCHASTIC)


@triton.jit
def load_float(pointer, offsets, mask, TYPE: tl.constexpr):
    """Values as FP32, 0 outside the mask. The interpreter misses the subnormals of BF16, so there we widen."""
    if INTERPRETED and tl.bfloat16 == TYPE:
        bits = tl.load(pointer.to(tl.pointer_type(tl.uint16)) + offsets, mask=mask, other=0)
        return (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return tl.load(pointer + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_weight(param, master, offsets, mask, TYPE: tl.constexpr, FORM: tl.constexpr):
    """Weights in full, as FP32."""
    if FORM == WHOLE_MASTER:
        return tl.load(master + offsets, mask=mask, other=0.0)
    elif FORM == SPLIT_MASTER:
        upper = tl.load(param.to(tl.pointer_type(tl.uint16)) + offsets, mask=mask, other=0).to(tl.uint32) << 16
        lower = tl.load(master + offsets, mask=mask, other=0).to(tl.int32)
        return rounding.join_master(upper, lower)
    else:
        return load_float(param, offsets, mask, TYPE)


@triton.jit
def store_rounded(pointer, offsets, mask, x, noise, TYPE: tl.constexpr, STOCHASTIC: tl.constexpr):
    """Store FP32 values, already saturated, in TYPE."""
    if tl.bfloat16 == TYPE:
        bits = rounding.to_bf16_bits(x, noise, STOCHASTIC)
        tl.store(pointer.to(tl.pointer_type(tl.uint16)) + offsets, bits, mask=mask)
    elif tl.float16 == TYPE:
        tl.store(pointer + offsets, rounding.to_fp16(x, noise, STOCHASTIC), mask=mask)
    else:
        tl.store(pointer + offsets, x, mask=mask)


@triton.jit
def saturate(x, TYPE: tl.constexpr):
    """x within the finite range of TYPE."""
    return tl.minimum(tl.maximum(x, -largest(TYPE)), largest(TYPE))


@triton.jit
def largest(TYPE: tl.constexpr):
    """The largest finite value of a storage type."""
    if tl.bfloat16 == TYPE:
        return rounding.BF16_MAX
    elif tl.float16 == TYPE:
        return rounding.FP16_MAX
    elif tl.uint8 == TYPE:
        return rounding.LARGEST_CODED
    else:
        return rule.FP32_MAX


@triton.jit
def direction_numbers(n, DUAL: tl.constexpr):
    """What the direction needs of a tensor's row of numbers; with one buffer the last four are β₁ twice, rms and α."""
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
def gated_direction(
    g, m, v, beta1, one_minus_beta1, beta2, root_one_minus_beta2, sigma_scale, sigma_floor,
    DUAL: tl.constexpr, CAUTIOUS: tl.constexpr, MOMENT: tl.constexpr, SHARED: tl.constexpr, MATH: tl.constexpr,
):  # fmt: skip
    """New moments, gate and gated direction of a block."""
    grad_share = g * one_minus_beta1
    m = rule.momentum(m, grad_share, beta1)
    ahead = rule.momentum(m, grad_share, beta1)
    if DUAL:
        v = rule.variance(v, m, g, beta2, root_one_minus_beta2, largest(tl.float32 if SHARED else MOMENT), SHARED)
        spread = v[:, None] if SHARED else v
        u = rule.dual_direction(ahead, spread, sigma_scale, sigma_floor, MATH)
    else:
        u = rule.single_direction(ahead, sigma_scale, sigma_floor, MATH)
    if CAUTIOUS:
        keep = rule.cautious_mask(ahead, g)
        return m, v, keep, tl.where(keep, u, 0.0)
    else:
        return m, v, g == g, u


# ---- measure ---------------------------------------------------------------------------------------------------------


@triton.jit
def lookahead_kernel(
    pointers, grads, numels, first_programs, program_tensor, numbers, keys, partials,
    GRAD: tl.constexpr, MOMENT: tl.constexpr, SHARED: tl.constexpr, SCALED: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr, ITERATIONS: tl.constexpr,
):  # fmt: skip
    """Single buffer: each program's Σ m̃². Changes nothing but partials."""
    pid = tl.program_id(0)
    t = tl.load(program_tensor + pid)
    if tl.load(keys + t * KEY_WIDTH + ACTIVE) == 0:
        return
    start = (pid - tl.load(first_programs + t)).to(tl.int64) * (BLOCK * ITERATIONS)
    numel = tl.load(numels + t)
    if ALIGNED:
        numel = tl.multiple_of(numel, 16)
    n = numbers + t * NUMBERS_WIDTH
    grad = tensor_pointer(grads, t, GRAD, ALIGNED) + start
    row = t * NUM_POINTERS
    exp_avg = moment_pointer(pointers, row + EXP_AVG, start, MOMENT, False, ALIGNED)
    exp_avg_scale = moment_pointer(pointers, row + EXP_AVG_SCALE, start // rounding.BLOCK, tl.uint8, False, ALIGNED)
    left = numel - start
    IN_BLOCKS: tl.constexpr = tl.uint8 == MOMENT
    squares = zeros(BLOCK, tl.float64, IN_BLOCKS)
    beta1, w1, grad_scale = tl.load(n + BETA1), tl.load(n + ONE_MINUS_BETA1), tl.load(n + GRAD_SCALE)
    for i in range(ITERATIONS):
        offsets = tile(i * BLOCK, BLOCK, IN_BLOCKS)
        mask = offsets < left
        g = load_float(grad, offsets, mask, GRAD)
        m = load_moment(
            exp_avg, exp_avg_scale, i * BLOCK, left, offsets, mask, MOMENT, rounding.EXP_AVG_TOP, False, BLOCK
        )
        share = rule.clean_grad(g, grad_scale, SCALED) * w1
        ahead = rule.momentum(rule.momentum(m, share, beta1), share, beta1).to(tl.float64)
        squares += ahead * ahead
    tl.store(partials + pid.to(tl.int64), total(squares, IN_BLOCKS))


@triton.jit
def rms_kernel(
    numels, first_programs, num_programs, partials, sums, numbers, keys, tensor_group, fp16_flags, groups,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Single buffer: Σ m̃² and the length of each tensor, and its denominator into its row of numbers."""
    t = tl.program_id(0)
    if tl.load(keys + t * KEY_WIDTH + ACTIVE) == 0:
        return
    first = tl.load(first_programs + t)
    count = tl.load(num_programs + t)
    total = tl.zeros([BLOCK], tl.float64)
    for i in range(0, count, BLOCK):
        rows = i + tl.arange(0, BLOCK)
        total += tl.load(partials + first + rows, mask=rows < count, other=0.0)
    row = groups + tl.load(tensor_group + t) * GROUP_WIDTH
    eps = tl.load(row + GROUP_EPS)
    eps = tl.where(tl.load(fp16_flags + t) != 0, tl.maximum(eps, rule.FP16_EPS), eps)
    floor = tl.load(numbers + t * NUMBERS_WIDTH + SIGMA_FLOOR).to(tl.float64)
    numel = tl.load(numels + t).to(tl.float64)
    lookahead_sq = tl.sum(total, 0)
    tl.store(sums + t * 2, lookahead_sq)
    tl.store(sums + t * 2 + 1, numel)
    denominator = rule.single_denominator(lookahead_sq, numel, eps, tl.load(row + GROUP_TAU), floor)
    tl.store(numbers + t * NUMBERS_WIDTH + RMS_DENOMINATOR, denominator.to(tl.float32))


@triton.jit
def measure_kernel(
    pointers, grads, numels, first_programs, program_tensor, numbers, keys, partials,
    PARAM_TYPE: tl.constexpr, MASTER_FORM: tl.constexpr, GRAD: tl.constexpr, MOMENT: tl.constexpr,
    DUAL: tl.constexpr, SHARED: tl.constexpr, CAUTIOUS: tl.constexpr, SCALED: tl.constexpr, MATH: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK: tl.constexpr, ITERATIONS: tl.constexpr,
):  # fmt: skip
    """Each program's share of the sums. Changes nothing but partials."""
    pid = tl.program_id(0)
    t = tl.load(program_tensor + pid)
    if tl.load(keys + t * KEY_WIDTH + ACTIVE) == 0:
        return
    start = (pid - tl.load(first_programs + t)).to(tl.int64) * (BLOCK * ITERATIONS)
    numel = tl.load(numels + t)
    if ALIGNED:
        numel = tl.multiple_of(numel, 16)
    left = numel - start
    n = numbers + t * NUMBERS_WIDTH
    row = t * NUM_POINTERS
    param = tensor_pointer(pointers, row + PARAM, PARAM_TYPE, ALIGNED) + start
    master = master_pointer(pointers, row + MASTER, MASTER_FORM, ALIGNED) + start
    grad = tensor_pointer(grads, t, GRAD, ALIGNED) + start
    exp_avg = moment_pointer(pointers, row + EXP_AVG, start, MOMENT, False, ALIGNED)
    exp_avg_sq = moment_pointer(pointers, row + EXP_AVG_SQ, start, MOMENT, SHARED, ALIGNED)
    scales = start // rounding.BLOCK
    exp_avg_scale = moment_pointer(pointers, row + EXP_AVG_SCALE, scales, tl.uint8, False, ALIGNED)
    exp_avg_sq_scale = moment_pointer(pointers, row + EXP_AVG_SQ_SCALE, scales, tl.uint8, False, ALIGNED)
    IN_BLOCKS: tl.constexpr = SHARED or tl.uint8 == MOMENT
    beta1, w1, beta2, w2, sigma_scale, sigma_floor = direction_numbers(n, DUAL)
    grad_scale = tl.load(n + GRAD_SCALE)
    counts = zeros(BLOCK, tl.int32, IN_BLOCKS)
    direction_sq = zeros(BLOCK, tl.float32, IN_BLOCKS)
    param_sq = zeros(BLOCK, tl.float32, IN_BLOCKS)
    for i in range(ITERATIONS):
        start_of_tile = i * BLOCK
        offsets = tile(start_of_tile, BLOCK, IN_BLOCKS)
        mask = offsets < left
        raw = load_float(grad, offsets, mask, GRAD)
        m = load_moment(
            exp_avg, exp_avg_scale, start_of_tile, left, offsets, mask, MOMENT, rounding.EXP_AVG_TOP, False, BLOCK
        )
        v = m
        if DUAL:
            v = load_moment(
                exp_avg_sq,
                exp_avg_sq_scale,
                start_of_tile,
                left,
                offsets,
                mask,
                MOMENT,
                rounding.EXP_AVG_SQ_TOP,
                SHARED,
                BLOCK,
            )
        p = load_weight(param, master, offsets, mask, PARAM_TYPE, MASTER_FORM)
        g = rule.clean_grad(raw, grad_scale, SCALED)
        m, v, keep, kept = gated_direction(
            g, m, v, beta1, w1, beta2, w2, sigma_scale, sigma_floor, DUAL, CAUTIOUS, MOMENT, SHARED, MATH
        )
        p = tl.where(rule.is_finite(p), p, 0.0)
        counts += counted(keep, mask, raw, CAUTIOUS)
        direction_sq = tl.fma(kept, kept, direction_sq)
        param_sq = tl.fma(p, p, param_sq)
    store_partials(partials, pid, counts, direction_sq, param_sq, IN_BLOCKS)


@triton.jit
def counted(keep, mask, raw, CAUTIOUS: tl.constexpr):
    """1 for a kept element, 65536 for one whose gradient is not finite; the latter is never kept behind a gate."""
    if CAUTIOUS:
        return tl.where(keep, 1, tl.where(rule.is_finite(raw), 0, 65536))
    else:
        return tl.where(mask, 1, 0) + tl.where(rule.is_finite(raw), 0, 65536)


@triton.jit
def store_partials(partials, pid, counts, direction_sq, param_sq, IN_BLOCKS: tl.constexpr):
    """A program's row of sums: Σkeep and the non-finite count (in the halves of one word), Σ(keep·u)², Σp²."""
    both = total(counts, IN_BLOCKS)
    out = partials + pid.to(tl.int64) * NUM_PARTIALS
    tl.store(out, (both & 0xFFFF).to(tl.float32))
    tl.store(out + 1, total(direction_sq, IN_BLOCKS))
    tl.store(out + 2, total(param_sq, IN_BLOCKS))
    tl.store(out + 3, (both >> 16).to(tl.float32))


# ---- scales ----------------------------------------------------------------------------------------------------------


@triton.jit
def scales_kernel(
    partials, first_programs, num_programs, numels, sums, nonfinite_counts, whole_nonfinite, numbers, keys,
    tensor_group, groups, kept_scales,
    REDUCE: tl.constexpr, EXACT: tl.constexpr, BLEND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per tensor: its sums from the partials (REDUCE), then its scales.

    EXACT puts η·c·s into the row of numbers and c, s into the kept scales; BLEND moves the kept scales on.
    """
    t = tl.program_id(0)
    if tl.load(keys + t * KEY_WIDTH + ACTIVE) == 0:
        return
    if REDUCE:
        bad = add_partials(partials, first_programs, num_programs, numels, sums, nonfinite_counts, t, BLOCK)
        if (bad > 0.0) & (bad == tl.load(numels + t).to(tl.float64)):
            tl.store(whole_nonfinite, 1)  # whichever tensor it is, they all store the same
    row = groups + tl.load(tensor_group + t) * GROUP_WIDTH
    at = sums + t * NUM_SUMS
    lr = tl.load(row + GROUP_LR)
    c = rule.cautious_scale(tl.load(at), tl.load(at + 3), tl.load(row + GROUP_CLAMP_MIN), tl.load(row + GROUP_CAUTIOUS))
    kept = kept_scales + t * 2
    ratio = tl.load(row + GROUP_BOUND_RATIO)
    radial = tl.load(row + GROUP_RADIAL)
    if BLEND:
        ema_decay = tl.load(row + GROUP_EMA_DECAY)
        c = rule.blend(tl.load(kept + CAUTIOUS_SCALE), c, ema_decay)
        s = rule.bound_scale(tl.load(at + 1), tl.load(at + 2), c, lr, ratio, radial)
        tl.store(kept + CAUTIOUS_SCALE, c)
        tl.store(kept + BOUND_SCALE, rule.blend(tl.load(kept + BOUND_SCALE), s, ema_decay))
    if EXACT:
        s = rule.bound_scale(tl.load(at + 1), tl.load(at + 2), c, lr, ratio, radial)
        tl.store(kept + CAUTIOUS_SCALE, c)
        tl.store(kept + BOUND_SCALE, s)
        step_size = lr * c.to(tl.float64) * s.to(tl.float64)
        tl.store(numbers + t * NUMBERS_WIDTH + STEP_SIZE, step_size.to(tl.float32))


@triton.jit
def add_partials(partials, first_programs, num_programs, numels, sums, nonfinite_counts, t, BLOCK: tl.constexpr):
    """Add the partials of one tensor in FP64, in order, to its row of sums; return its non-finite count."""
    first = tl.load(first_programs + t).to(tl.int64)
    count = tl.load(num_programs + t)
    kept = tl.zeros([BLOCK], tl.float64)
    direction_sq = tl.zeros([BLOCK], tl.float64)
    param_sq = tl.zeros([BLOCK], tl.float64)
    nonfinite = tl.zeros([BLOCK], tl.float64)
    for i in range(0, count, BLOCK):
        rows = i + tl.arange(0, BLOCK)
        mask = rows < count
        at = partials + (first + rows) * NUM_PARTIALS
        kept += tl.load(at, mask=mask, other=0.0).to(tl.float64)
        direction_sq += tl.load(at + 1, mask=mask, other=0.0).to(tl.float64)
        param_sq += tl.load(at + 2, mask=mask, other=0.0).to(tl.float64)
        nonfinite += tl.load(at + 3, mask=mask, other=0.0).to(tl.float64)
    bad = tl.sum(nonfinite, 0)
    out = sums + t * NUM_SUMS
    tl.store(out, tl.sum(kept, 0))
    tl.store(out + 1, tl.sum(direction_sq, 0))
    tl.store(out + 2, tl.sum(param_sq, 0))
    tl.store(out + 3, tl.load(numels + t).to(tl.float64))
    tl.store(out + 4, bad)
    tl.store(nonfinite_counts + t, tl.load(nonfinite_counts + t) + bad)
    return bad


# ---- update ----------------------------------------------------------------------------------------------------------


@triton.jit
def update_kernel(
    pointers, grads, numels, first_programs, program_tensor, numbers, keys, steps, partials, first_indices,
    PARAM_TYPE: tl.constexpr, GRAD: tl.constexpr, MOMENT: tl.constexpr, MASTER_FORM: tl.constexpr,
    DUAL: tl.constexpr, SHARED: tl.constexpr, CAUTIOUS: tl.constexpr, COORDINATE: tl.constexpr,
    STOCHASTIC: tl.constexpr, GATHER: tl.constexpr, SCALED: tl.constexpr, MATH: tl.constexpr, OFFSET: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK: tl.constexpr, ITERATIONS: tl.constexpr,
):  # fmt: skip
    """Store new weights and moments; with GATHER also leave each program's share of the sums."""
    pid = tl.program_id(0)
    t = tl.load(program_tensor + pid)
    if tl.load(keys + t * KEY_WIDTH + ACTIVE) == 0:
        return
    chunk = (pid - tl.load(first_programs + t)).to(tl.int64)
    start = chunk * (BLOCK * ITERATIONS)
    numel = tl.load(numels + t)
    if ALIGNED:
        numel = tl.multiple_of(numel, 16)
    left = numel - start
    n = numbers + t * NUMBERS_WIDTH
    row = t * NUM_POINTERS
    param = tensor_pointer(pointers, row + PARAM, PARAM_TYPE, ALIGNED) + start
    master = master_pointer(pointers, row + MASTER, MASTER_FORM, ALIGNED) + start
    grad = tensor_pointer(grads, t, GRAD, ALIGNED) + start
    exp_avg = moment_pointer(pointers, row + EXP_AVG, start, MOMENT, False, ALIGNED)
    exp_avg_sq = moment_pointer(pointers, row + EXP_AVG_SQ, start, MOMENT, SHARED, ALIGNED)
    scales = start // rounding.BLOCK
    exp_avg_scale = moment_pointer(pointers, row + EXP_AVG_SCALE, scales, tl.uint8, False, ALIGNED)
    exp_avg_sq_scale = moment_pointer(pointers, row + EXP_AVG_SQ_SCALE, scales, tl.uint8, False, ALIGNED)
    IN_BLOCKS: tl.constexpr = SHARED or tl.uint8 == MOMENT
    first, second, low = noise_words(keys + t * KEY_WIDTH, first_indices + t, start, OFFSET)
    step_size, bound_ratio, decay = tl.load(n + STEP_SIZE), tl.load(n + BOUND_RATIO), tl.load(n + DECAY)
    left_of_weights = tl.where(tl.load(n + LR) == 0.0, 0, left)  # η = 0 leaves every weight as it is, −0 too
    beta1, w1, beta2, w2, sigma_scale, sigma_floor = direction_numbers(n, DUAL)
    grad_scale = tl.load(n + GRAD_SCALE)
    counts = zeros(BLOCK, tl.int32, IN_BLOCKS)
    direction_sq = zeros(BLOCK, tl.float32, IN_BLOCKS)
    param_sq = zeros(BLOCK, tl.float32, IN_BLOCKS)
    for i in range(ITERATIONS):
        start_of_tile = i * BLOCK
        offsets = tile(start_of_tile, BLOCK, IN_BLOCKS)
        mask = offsets < left
        raw = load_float(grad, offsets, mask, GRAD)
        m = load_moment(
            exp_avg, exp_avg_scale, start_of_tile, left, offsets, mask, MOMENT, rounding.EXP_AVG_TOP, False, BLOCK
        )
        v = m
        if DUAL:
            v = load_moment(
                exp_avg_sq,
                exp_avg_sq_scale,
                start_of_tile,
                left,
                offsets,
                mask,
                MOMENT,
                rounding.EXP_AVG_SQ_TOP,
                SHARED,
                BLOCK,
            )
        before = load_weight(param, master, offsets, mask, PARAM_TYPE, MASTER_FORM)
        g = rule.clean_grad(raw, grad_scale, SCALED)
        m, v, keep, kept = gated_direction(
            g, m, v, beta1, w1, beta2, w2, sigma_scale, sigma_floor, DUAL, CAUTIOUS, MOMENT, SHARED, MATH
        )
        finite = rule.is_finite(before)
        p = tl.where(finite, before, 0.0)
        if GATHER:
            counts += counted(keep, mask, raw, CAUTIOUS)
            direction_sq = tl.fma(kept, kept, direction_sq)
            param_sq = tl.fma(p, p, param_sq)
        change = rule.delta(kept, p, step_size, bound_ratio, COORDINATE, tl.float16 == PARAM_TYPE, MATH)
        moved = rule.decay_and_move(p, change, decay)
        x = rounding.element_hash(first, second, low + offsets.to(tl.uint32))
        write = offsets < left_of_weights
        if MASTER_FORM != NO_MASTER:
            store_master(master, param, offsets, write, moved, before, finite, PARAM_TYPE, MASTER_FORM)
        else:
            noise = rounding.stream(x, rounding.WEIGHT_STREAM)
            store_weight(param, offsets, write, moved, before, finite, noise, PARAM_TYPE, STOCHASTIC)
        noise = rounding.stream(x, rounding.EXP_AVG_STREAM)
        store_moment(
            exp_avg, exp_avg_scale, start_of_tile, left, offsets, mask, saturate(m, MOMENT), noise, MOMENT,
            rounding.EXP_AVG_TOP, False, STOCHASTIC, BLOCK,
        )  # fmt: skip
        if DUAL:
            noise = rounding.stream(x, rounding.EXP_AVG_SQ_STREAM)
            store_moment(
                exp_avg_sq, exp_avg_sq_scale, start_of_tile, left, offsets, mask, v, noise, MOMENT,
                rounding.EXP_AVG_SQ_TOP, SHARED, STOCHASTIC, BLOCK,
            )  # fmt: skip
    if GATHER:
        store_partials(partials, pid, counts, direction_sq, param_sq, IN_BLOCKS)
    if chunk == 0:
        tl.store(steps + t, tl.load(steps + t) + 1)


@triton.jit
def noise_words(key, first_index, start, OFFSET: tl.constexpr):
    """The tensor's noise key with the high index word mixed in, and the low word of the program's first element.

    Programs start at multiples of their size, so the high word is the same in a program. With OFFSET (a shard) it is so
    because shards that reach beyond 2³² elements go to another engine.
    """
    index = start.to(tl.uint64)
    if OFFSET:
        index += tl.load(first_index).to(tl.uint64)
    high = (index >> 32).to(tl.uint32)
    first = tl.load(key).to(tl.uint32, bitcast=True) + high * rounding.HIGH_0
    second = tl.load(key + 1).to(tl.uint32, bitcast=True) + high * rounding.HIGH_1
    return first, second, index.to(tl.uint32)


@triton.jit
def store_weight(param, offsets, mask, moved, before, finite, noise, TYPE: tl.constexpr, STOCHASTIC: tl.constexpr):
    """Weights without a master. Non-finite ones are stored as they were: a mask per element would cost the vectors."""
    moved = saturate(moved, TYPE)
    if tl.bfloat16 == TYPE:
        bits = rounding.to_bf16_bits(moved, noise, STOCHASTIC)
        old = (before.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16)
        tl.store(param.to(tl.pointer_type(tl.uint16)) + offsets, tl.where(finite, bits, old), mask=mask)
    elif tl.float16 == TYPE:
        rounded = rounding.to_fp16(moved, noise, STOCHASTIC)
        tl.store(param + offsets, tl.where(finite, rounded, before.to(tl.float16)), mask=mask)
    else:
        tl.store(param + offsets, tl.where(finite, moved, before), mask=mask)


@triton.jit
def store_master(master, param, offsets, mask, moved, before, finite, TYPE: tl.constexpr, FORM: tl.constexpr):
    """FP32 master weights, whole or as remainders, and the 16-bit weights that are nearest to them."""
    limit = rounding.MASTER_CAP_BF16 if tl.bfloat16 == TYPE else rule.FP32_MAX
    capped = tl.where(finite, tl.minimum(tl.maximum(moved, -limit), limit), before)
    if FORM == WHOLE_MASTER:
        tl.store(master + offsets, capped, mask=mask)
    if tl.bfloat16 == TYPE:
        bits = rounding.nearest_bf16_bits(capped)
        if FORM == SPLIT_MASTER:
            lower = capped.to(tl.int32, bitcast=True) - (bits.to(tl.uint32) << 16).to(tl.int32, bitcast=True)
            tl.store(master + offsets, tl.where(finite, lower, 0).to(tl.int16), mask=mask)
        tl.store(param.to(tl.pointer_type(tl.uint16)) + offsets, bits, mask=mask)
    else:
        clamped = tl.minimum(tl.maximum(capped, -rounding.FP16_MAX), rounding.FP16_MAX)
        tl.store(param + offsets, tl.where(finite, clamped, capped).to(tl.float16), mask=mask)
