"""Kernels of single numbers, a row per tensor, from step counts to step sizes. What they write is in ``tables.py``."""

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
    BOUND_SCALE,
    CAUTIOUS_SCALE,
    DECAY,
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
    NUM_PARTIALS,
    NUM_SUMS,
    NUMBERS_WIDTH,
    ONE_MINUS_BETA1,
    RMS_DENOMINATOR,
    ROOT_ONE_MINUS_BETA2,
    SIGMA_FLOOR,
    SIGMA_SCALE,
    STEP_SIZE,
)


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
