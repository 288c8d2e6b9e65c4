"""The rule as Triton device functions, in the order and with the names of ``luminav/rule.py``.

Blocks are FP32; numbers come from one row per tensor of the numbers table (see ``tables.py``). Where a product and a
sum are one instruction, ``tl.fma`` says so, and compilers fuse nothing of their own: their choice would differ between
a kernel that gathers sums and one that does not, or between an aligned tensor and its shard, and with it the last bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from luminav import blocks, rule

SMALLEST_DENOMINATOR = tl.constexpr(rule.SMALLEST_DENOMINATOR)
FP16_EPS = tl.constexpr(rule.FP16_EPS)
COORDINATE_FLOOR = tl.constexpr(rule.COORDINATE_FLOOR)
COORDINATE_RANGE = tl.constexpr(rule.COORDINATE_RANGE)
LINEAR_BELOW = tl.constexpr(rule.LINEAR_BELOW)
TANH_RANGE = tl.constexpr(rule.TANH_RANGE)
CLIFF_RATIO = tl.constexpr(rule.CLIFF_RATIO)
CLIFF_FLOOR = tl.constexpr(rule.CLIFF_FLOOR)
SMALLEST_RADIUS = tl.constexpr(rule.SMALLEST_RADIUS)
SMALLEST_MEAN = tl.constexpr(rule.SMALLEST_MEAN)
ROOT_OF_SHARE = tl.constexpr(blocks.BLOCK**-0.5)
TWO_LOG2_E = tl.constexpr(2.8853900817779268)

# How elementary functions are computed.
PORTABLE = tl.constexpr(0)  # Triton's own
NVIDIA = tl.constexpr(1)  # approximate instructions, 2 ulp
NVIDIA_COARSE = tl.constexpr(2)  # tanh to 2⁻¹¹ as well: for BF16 weights without a master
FP32_MAX = tl.constexpr(3.4028234663852886e38)


# ---- gradient and moments --------------------------------------------------------------------------------------------


@triton.jit
def is_special(x):
    """Whether x is ±inf or NaN."""
    return (tl.abs(x) <= FP32_MAX) == 0


@triton.jit
def clean_grad(grad, grad_scale, SCALED: tl.constexpr):
    """The gradient as the rule sees it: 0 for non-finite elements; unscaled and signed where SCALED."""
    if SCALED:
        grad *= grad_scale
    return tl.where(is_special(grad), 0.0, grad)


@triton.jit
def momentum(exp_avg, grad_share, beta1):
    """m ← β₁·m + (1−β₁)·g, given (1−β₁)·g; the look-ahead is the same formula on the new m."""
    return tl.fma(exp_avg, beta1, grad_share)


@triton.jit
def variance(exp_avg_sq, exp_avg, grad, beta2, root_one_minus_beta2, LARGEST: tl.constexpr):
    """v ← β₂·v + (1−β₂)·(g − m)², saturated at LARGEST."""
    innovation = (grad - exp_avg) * root_one_minus_beta2
    return tl.minimum(tl.fma(exp_avg_sq, beta2, innovation * innovation), LARGEST)


@triton.jit
def innovation_share(exp_avg, grad, root_one_minus_beta2):
    """(1−β₂)·(g − m)²/64: what an element adds to the mean of its tile's row."""
    innovation = (grad - exp_avg) * (root_one_minus_beta2 * ROOT_OF_SHARE)
    return innovation * innovation


@triton.jit
def row_means(r, shares, beta2, LARGEST: tl.constexpr):
    """r ← β₂·r + the sum of the shares [rows, 64], saturated at LARGEST."""
    return tl.minimum(tl.fma(r, beta2, tl.sum(shares, 1)), LARGEST)


@triton.jit
def column_means(c, mean, beta2, LARGEST: tl.constexpr):
    """c ← β₂·c + (1−β₂)·mean, with the factor in the mean, saturated at LARGEST."""
    return tl.minimum(tl.fma(c, beta2, mean), LARGEST)


@triton.jit
def column_factors(c, mean, MATH: tl.constexpr):
    """√(c/μ), by which √r is to be multiplied. Roots first: no quotient of theirs is beyond the range."""
    return divide(sqrt(c, MATH), sqrt(tl.maximum(mean, SMALLEST_MEAN), MATH), MATH)


# ---- direction and gate ----------------------------------------------------------------------------------------------


@triton.jit
def sqrt(x, MATH: tl.constexpr):
    """√x; on NVIDIA GPUs one instruction, to 1 ulp, with subnormals as 0."""
    if MATH == PORTABLE:
        return tl.sqrt(x)
    else:
        return tl.inline_asm_elementwise(
            "sqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def divide(x, y, MATH: tl.constexpr):
    """x/y; on NVIDIA GPUs two instructions, to 2 ulp, for y from the smallest normal number to 2¹²⁶."""
    if MATH == PORTABLE:
        return x / y
    else:
        return tl.inline_asm_elementwise(
            "div.approx.ftz.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def tanh(x, MATH: tl.constexpr):
    """tanh as 1 − 2/(1 + exp 2x), to 1e-7 absolute; with NVIDIA_COARSE to 2⁻¹¹ relative in one instruction."""
    if MATH == NVIDIA_COARSE:
        return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    elif MATH == NVIDIA:
        e = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * TWO_LOG2_E], dtype=tl.float32, is_pure=True, pack=1
        )
        y = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [e + 1.0], dtype=tl.float32, is_pure=True, pack=1
        )
        return tl.fma(y, -2.0, 1.0)
    else:
        return 1.0 - 2.0 / (tl.exp(2.0 * tl.minimum(x, TANH_RANGE)) + 1.0)


@triton.jit
def dual_direction(lookahead, root, sigma_scale, sigma_floor, FLOORED: tl.constexpr, MATH: tl.constexpr):
    """u = tanh(m̃ / max(σ, 1e-12)) with σ = (τ·b₁/√b₂)·√v + ε·τ·b₁, given √v; FLOORED unless ε·τ·b₁ is above 1e-12."""
    sigma = tl.fma(root, sigma_scale, sigma_floor)
    if FLOORED:
        sigma = tl.maximum(sigma, SMALLEST_DENOMINATOR)
    return tanh(divide(lookahead, sigma, MATH), MATH)


@triton.jit
def single_direction(lookahead, rms_denominator, alpha_ss, MATH: tl.constexpr):
    """u = tanh(z / (1 + α·|z|)) with z = m̃ / max(τ·rms + ε·τ·b₁, 1e-12)."""
    z = divide(lookahead, rms_denominator, MATH)
    return tanh(divide(z, tl.fma(tl.abs(z), alpha_ss, 1.0), MATH), MATH)


@triton.jit
def cautious_mask(lookahead, grad, MATH: tl.constexpr):
    """1 where m̃ and g have the same non-zero sign, else 0.

    NVIDIA GPUs multiply twice as fast as they compare: a product with infinity, held between 0 and 1. It is ±inf where
    both factors are non-zero, else NaN, and NaN is held at 0.
    """
    if MATH == PORTABLE:
        sign = grad.to(tl.int32, bitcast=True) & -0x80000000
        signed = (lookahead.to(tl.int32, bitcast=True) ^ sign).to(tl.float32, bitcast=True)
        return tl.where((grad != 0.0) & (signed > 0.0), 1.0, 0.0)
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .f32 endless; mul.f32 endless, $1, 0f7F800000; mul.sat.f32 $0, endless, $2; }",
            "=f,f,f", [lookahead, grad], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip


# ---- scales: a few numbers per tensor, in FP64 -----------------------------------------------------------------------


@triton.jit
def single_denominator(lookahead_sq, numel, eps, tau, sigma_floor):
    """max(τ·rms + ε·τ·b₁, 1e-12) with rms = √(mean(m̃²) + ε), rounded to FP32 once."""
    rms = tl.sqrt(lookahead_sq / tl.maximum(numel, 1.0) + eps)
    rms = tl.minimum(rms, FP32_MAX).to(tl.float32).to(tl.float64)
    return tl.maximum(rms * tau + sigma_floor, SMALLEST_DENOMINATOR)


@triton.jit
def cautious_scale(kept, numel, clamp_min, cautious):
    """c = 1 / clamp(mean(keep), γ, 1), FP32; 1 without the gate and for an empty tensor."""
    density = tl.minimum(tl.maximum(kept / tl.maximum(numel, 1.0), clamp_min), 1.0)
    return tl.where((numel > 0.0) & (cautious != 0.0), 1.0 / density, 1.0).to(tl.float32)


@triton.jit
def bound_scale(direction_sq, param_sq, cautious_scale, lr, bound_ratio, radial):
    """s = tanh(r)/r with r = η·‖d‖₂ / (ρ·max(‖p‖₂, 1)), FP32; 1 unless the bound is radial."""
    radius = tl.maximum(tl.sqrt(param_sq), 1.0) * bound_ratio
    r = tl.sqrt(direction_sq) * cautious_scale.to(tl.float64) * lr / radius
    linear = r < LINEAR_BELOW
    safe = tl.where(linear, 1.0, r)
    e = tl.exp(-2.0 * tl.minimum(safe, TANH_RANGE))
    s = (1.0 - e) / (1.0 + e) / safe
    return tl.where(linear | (radial == 0.0), 1.0, s).to(tl.float32)


@triton.jit
def blend(kept, now, ema_decay):
    """One-pass mode's memory of a scale: κ·kept + (1−κ)·now, FP32."""
    return (kept.to(tl.float64) * ema_decay + now.to(tl.float64) * (1.0 - ema_decay)).to(tl.float32)


# ---- step, governor, decay -------------------------------------------------------------------------------------------


@triton.jit
def soft_limit(change, radius, MATH: tl.constexpr):
    """Δ ← B·tanh(Δ/B), with B at least 1e-30."""
    radius = tl.maximum(radius, SMALLEST_RADIUS)
    return tanh(divide(change, radius, MATH), MATH) * radius


@triton.jit
def coordinate_radius(param, bound_ratio):
    """B = ρ·√(p² + 1e-4)."""
    p = tl.minimum(tl.maximum(param, -COORDINATE_RANGE), COORDINATE_RANGE)
    return tl.sqrt(tl.fma(p, p, COORDINATE_FLOOR)) * bound_ratio


@triton.jit
def delta(
    kept_direction, param, step_size, bound_ratio, COORDINATE: tl.constexpr, GOVERN: tl.constexpr, MATH: tl.constexpr
):
    """Δ, how far each weight moves."""
    change = kept_direction * step_size
    if COORDINATE:
        change = soft_limit(change, coordinate_radius(param, bound_ratio), MATH)
    if GOVERN:
        change = soft_limit(change, tl.maximum(tl.abs(param) * CLIFF_RATIO, CLIFF_FLOOR), MATH)
    return change


@triton.jit
def decay_and_move(param, change, decay):
    """p ← p·(1 − η·λ) − Δ."""
    return tl.fma(param, decay, -change)
