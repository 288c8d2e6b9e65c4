"""THE RULE: what one optimizer step computes, in plain torch. Read this first.

The functions work on flat floating-point tensors in the arithmetic dtype (FP32; FP64 for FP64 parameters) and leave
their inputs as they are unless the name ends in an underscore. They come in the order of a step:

    clean_grad → momentum → lookahead → variance → direction → cautious_mask        (measure and update)
    → cautious_scale, bound_scale                                                   (scales)
    → step → cliff_governor → decay                                                 (update)

Single numbers are in :class:`StepNumbers`. The update is that of LuminaV (Lumina Moon, 2026; doi 10.57967/hf/10270).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
from torch import Tensor

if TYPE_CHECKING:
    from luminav.hyperparameters import Options

Scalar: TypeAlias = float | Tensor
"""A Python float, or a 0-dim tensor when the step count lives on the device (or one value per element)."""

SMALLEST_DENOMINATOR = 1e-12  # keeps m̃/σ defined while every moment is zero
FP16_EPS = 1e-4  # eps below this vanishes beside FP16 values
COORDINATE_FLOOR = 1e-4  # a zero weight may still move by ρ·√1e-4 = ρ/100 in a step
COORDINATE_RANGE = 1e18  # squares stay finite; beyond it B·tanh(Δ/B) = Δ to the last bit
TANH_RANGE = 20.0  # tanh is ±1 to the last bit of FP64 beyond it, and exp(40) is finite
FP32_TANH_RANGE = 8.0  # the ratio below stays under 1 up to it, and tanh beyond it is 1 to 3 ulp of FP32
TANH_ABOVE = (1.42691724e-8, 2.12510032e-5, 3.53402432e-3, 0.134132448, 0.999999988)
TANH_BELOW = (8.14510041e-7, 3.34886068e-4, 2.60227417e-2, 0.467465675, 1.0)
LINEAR_BELOW = 1e-4  # tanh(r)/r = 1 − r²/3 is 1 in FP32
CLIFF_RATIO, CLIFF_FLOOR = 0.01, 1.5e-4  # FP16 weights: at most 1 % a step, or 1.5e-4 near zero
FP32_MAGNITUDE = 0x7FFFFFFF  # all bits but the sign
SMALLEST_RADIUS = 1e-30  # a bound that underflowed would divide 0 by 0
SMALLEST_MEAN = 1e-36  # of a tile: below it v is under 64²·1e-36, nothing beside the square of the smallest denominator


@dataclass(frozen=True)
class StepNumbers:
    """The numbers of one parameter's step, worked out once in FP64; tensor arithmetic rounds them once."""

    lr: Scalar
    decay: Scalar
    """1 − η·λ."""
    beta1: Scalar
    one_minus_beta1: Scalar
    beta2: Scalar
    root_one_minus_beta2: Scalar
    """√(1−β₂): applied before the square, which then overflows only where v saturates anyway."""
    eps: Scalar
    """ε, raised for FP16 parameters."""
    sigma_scale: Scalar
    """τ·b₁/√b₂, the factor of √v."""
    sigma_floor: Scalar
    """ε·τ·b₁."""
    grad_scale: Scalar
    """What a gradient is multiplied by: 1, −1 to maximise, 1/scale under a loss scaler."""


def step_numbers(
    step: Scalar | int, lr: Scalar, options: Options, dtype: torch.dtype, grad_scale: Scalar
) -> StepNumbers:
    """The numbers of step `step` (1, 2, …).

    Args:
        step: Step count of the parameter: an int, or a 0-dim FP64 tensor.
        lr: Learning rate: a float, or a 0-dim FP64 tensor.
        options: The group's options.
        dtype: Dtype of the parameter; FP16 raises eps.
        grad_scale: Factor on the gradient, sign included.

    Returns:
        Floats, or 0-dim FP64 tensors where `step` or `lr` is one.
    """
    beta1, beta2 = options.betas
    bias_correction1 = 1.0 - beta1 ** (step + 1)  # of the look-ahead: m̃ is one step ahead
    bias_correction2 = 1.0 - beta2**step
    eps = max(options.eps, FP16_EPS) if dtype == torch.float16 else options.eps
    return StepNumbers(
        lr=lr,
        decay=1.0 - lr * options.weight_decay,
        beta1=beta1,
        one_minus_beta1=1.0 - beta1,
        beta2=beta2,
        root_one_minus_beta2=(1.0 - beta2) ** 0.5,
        eps=eps,
        sigma_scale=options.tau * bias_correction1 / bias_correction2**0.5,
        sigma_floor=eps * options.tau * bias_correction1,
        grad_scale=grad_scale,
    )


# ---- ranges --------------------------------------------------------------------------------------------------------
#
# Inductor's minimum and maximum look for NaN, three instructions each beside the one that is meant. Bit patterns of
# FP32, compared as integers, are in the order of the numbers from 0 up. Viewed as integers and back they cost nothing.


def is_finite(x: Tensor) -> Tensor:
    """Which elements are finite, with half the passes of ``torch.isfinite``."""
    return x.abs() < math.inf


def at_most_(x: Tensor, limit: float) -> Tensor:
    """x ≥ 0, but not above a limit."""
    if torch.compiler.is_compiling() and x.dtype == torch.float32:
        return x.view(torch.int32).clamp_max(fp32_bits(limit)).view(torch.float32)
    return x.clamp_max_(limit)


def at_least_(x: Tensor, limit: float) -> Tensor:
    """x ≥ 0, but not below a limit."""
    if torch.compiler.is_compiling() and x.dtype == torch.float32:
        return x.view(torch.int32).clamp_min(fp32_bits(limit)).view(torch.float32)
    return x.clamp_min_(limit)


def saturate_(x: Tensor, limit: float) -> Tensor:
    """x within ±limit."""
    if torch.compiler.is_compiling() and x.dtype == torch.float32:
        bits = x.view(torch.int32)
        magnitude = (bits & FP32_MAGNITUDE).clamp_max(fp32_bits(limit))
        return (magnitude | (bits & ~FP32_MAGNITUDE)).view(torch.float32)
    return x.clamp_(-limit, limit)


def fp32_bits(number: float) -> int:
    """The bit pattern of a positive, normal number of FP32."""
    fraction, exponent = math.frexp(number)
    return ((exponent + 125) << 23) + round(fraction * 2.0**24)


# ---- gradient and moments ----------------------------------------------------------------------------------------


def clean_grad_(grad: Tensor, numbers: StepNumbers) -> Tensor:
    """The gradient as the rule sees it: unscaled, signed, 0 for non-finite elements."""
    if torch.compiler.is_compiling():  # the compiler has a select, but tests for NaN one element at a time
        grad = grad.mul_(numbers.grad_scale)
        return torch.where(is_finite(grad), grad, 0.0)
    return grad.mul_(numbers.grad_scale).nan_to_num_(0.0, 0.0, 0.0)


def momentum_(exp_avg: Tensor, grad_share: Tensor, numbers: StepNumbers) -> Tensor:
    """m ← β₁·m + (1−β₁)·g, given (1−β₁)·g."""
    return exp_avg.mul_(numbers.beta1).add_(grad_share)


def lookahead_(grad_share: Tensor, exp_avg: Tensor, numbers: StepNumbers) -> Tensor:
    """m̃ = β₁·m + (1−β₁)·g with the new m: the momentum's own formula once more.

    ``alpha``, which must be a number, multiplies and adds with one rounding. Where β₁ is a tensor, FP64 does that for
    FP32; FP64 itself then rounds twice.
    """
    if isinstance(numbers.beta1, Tensor):
        product = exp_avg.to(torch.float64) * numbers.beta1.to(exp_avg.dtype)
        return grad_share.copy_(product.add_(grad_share))
    return grad_share.add_(exp_avg, alpha=numbers.beta1)


def variance_(exp_avg_sq: Tensor, exp_avg: Tensor, grad: Tensor, numbers: StepNumbers, largest: float) -> Tensor:
    """v ← β₂·v + (1−β₂)·(g − m)², the variance of the innovation about the new m, saturated at `largest`."""
    innovation_sq = (grad - exp_avg).mul_(numbers.root_one_minus_beta2).square_()
    exp_avg_sq = exp_avg_sq.mul_(numbers.beta2).add_(innovation_sq)
    return at_most_(exp_avg_sq, largest)


class Panels(NamedTuple):
    """Panels of a matrix, one after another in a flat tensor: `rows` rows each, of `tiles` tiles of `width` columns."""

    number: int
    rows: int
    tiles: int
    width: int


class TileMeans(NamedTuple):
    """A variance of rank 1 in every tile of some panels: v = r·c/μ, of row means r and column means c with mean μ.

    Adafactor keeps the square of the gradient so, of whole matrices (Shazeer & Stern 2018, arXiv 1804.04235).
    """

    rows: Tensor
    """r, flat: one for each row of a tile, in the order of the matrix."""
    columns: Tensor
    """c, flat: one for each column of a panel."""
    panels: Sequence[Panels]
    """What the flat tensors consist of."""


def tile_variance_(
    means: TileMeans, exp_avg: Tensor, grad: Tensor, numbers: StepNumbers, largest: float
) -> tuple[TileMeans, Tensor]:
    """r, c ← β₂·(r, c) + (1−β₂)·mean (g − m)², over a tile's columns and rows, saturated; and √v of every element."""
    width = means.panels[0].width
    share = (grad - exp_avg).mul_(numbers.root_one_minus_beta2 * width**-0.5).square_()  # of a row's mean
    rows = at_most_(means.rows.mul_(numbers.beta2).add_(share.view(-1, width).sum(1)), largest)
    columns = means.columns.mul_(numbers.beta2)
    for panels, squares, r, c in zip(means.panels, *tiled(share, rows, columns, means.panels), strict=True):
        at_most_(c.add_(sum_of_rows_(squares).mul_(width / panels.rows)), largest)
        torch.mul(r.sqrt().unsqueeze(3), column_factors(r, c).unsqueeze(1), out=squares)
    return TileMeans(rows, columns, means.panels), share


def column_factors(r: Tensor, c: Tensor) -> Tensor:
    """√(c/μ), by which √r is to be multiplied: [panels, tiles, width] from r [panels, rows, tiles] and c.

    Roots first: no quotient of theirs is beyond the range.
    """
    mean = sum_of_rows_(r / r.shape[1]).clamp_min_(SMALLEST_MEAN)
    return c.sqrt().div_(mean.sqrt_().unsqueeze(2))


def tiled(
    elements: Tensor, rows: Tensor, columns: Tensor, panels: Sequence[Panels]
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Flat tensors as views of what each entry of `panels` says: [panels, rows, tiles, width] without a dimension."""
    shapes = [[(n, r, t, w), (n, r, t), (n, t, w)] for n, r, t, w in panels]
    views = [
        [part.view(shape) for part, shape in zip(flat.split([math.prod(s) for s in kind]), kind, strict=True)]
        for flat, kind in zip((elements, rows, columns), zip(*shapes, strict=True), strict=True)
    ]
    return views[0], views[1], views[2]


def sum_of_rows_(x: Tensor) -> Tensor:
    """Sum over dimension 1. Overwrites x.

    By halves, element by element: a sum by torch adds in an order that depends on how many there are, and on threads.
    """
    count = x.shape[1]
    while count > 1:
        half = (count + 1) // 2
        x[:, : count - half].add_(x[:, half:count])
        count = half
    return x[:, 0]


# ---- direction and gate --------------------------------------------------------------------------------------------


def tanh_(x: Tensor) -> Tensor:
    """tanh in place."""
    return tanh_of_half_(x.mul_(2.0))


def tanh_of_half_(x: Tensor) -> Tensor:
    """tanh(x/2) in place, as e/(e+2) with e = exp(x) − 1: to 2 ulp, in half the time of ``torch.tanh`` on the CPU.

    Inductor's expm1 is exp(x) − 1, which has no correct digit left for small x.
    """
    if torch.compiler.is_compiling():
        return tanh_by_ratio(x.mul_(0.5)) if x.dtype == torch.float32 else x.mul_(0.5).tanh_()
    e = x.clamp_(-2.0 * TANH_RANGE, 2.0 * TANH_RANGE).expm1_()
    return e.div_(e + 2.0)


def tanh_by_ratio(x: Tensor) -> Tensor:
    """tanh of FP32 to 3 ulp by plain arithmetic: x times a ratio of polynomials in x², for compiled code.

    A call of exp there costs twice the time, most of it for the registers that are saved around it. The coefficients
    minimise the largest relative error on [0, 8.5], 1.2e-8, by reweighted least squares.
    """
    x = saturate_(x, FP32_TANH_RANGE)
    square = x * x
    above, below = torch.full_like(x, TANH_ABOVE[0]), torch.full_like(x, TANH_BELOW[0])
    for of_above, of_below in zip(TANH_ABOVE[1:], TANH_BELOW[1:], strict=True):
        above = above * square + of_above
        below = below * square + of_below
    return x * (above / below)


def dual_direction(lookahead: Tensor, root: Tensor, numbers: StepNumbers) -> Tensor:
    """u = tanh(m̃ / max(σ, 1e-12)) with σ = (τ·b₁/√b₂)·√v + ε·τ·b₁, given √v, which is overwritten.

    Works with σ/2, which saves a pass.
    """
    half_sigma = root.mul_(0.5 * numbers.sigma_scale).add_(0.5 * numbers.sigma_floor)
    if isinstance(numbers.sigma_floor, Tensor) or numbers.sigma_floor < SMALLEST_DENOMINATOR:
        half_sigma = at_least_(half_sigma, 0.5 * SMALLEST_DENOMINATOR)
    return tanh_of_half_(torch.div(lookahead, half_sigma, out=half_sigma))


def single_direction(lookahead: Tensor, rms_denominator: Scalar, alpha_ss: float) -> Tensor:
    """u = tanh(z / (1 + α·|z|)) with z = m̃ / max(τ·rms + ε·τ·b₁, 1e-12)."""
    z = lookahead / rms_denominator
    return tanh_(z.div_(z.abs().mul_(alpha_ss).add_(1.0)))


def cautious_mask_(lookahead: Tensor, grad: Tensor) -> Tensor:
    """1 where m̃ and g have the same non-zero sign, else 0; a product with the sign of g cannot underflow.

    Nor can one of both times a large number, which may overflow to the same sign, and is NaN where one of them is 0.
    """
    if torch.compiler.is_compiling():  # where a sign costs nine instructions
        large = 2.0**1000 if grad.dtype == torch.float64 else 2.0**127
        return (lookahead * large * (grad * large) > 0.0).to(grad.dtype)
    return lookahead.mul_(grad.sign_()).gt_(0.0)


class Direction(NamedTuple):
    """What a step needs of one tensor, before its scales are known."""

    exp_avg: Tensor
    exp_avg_sq: Tensor | TileMeans | None
    keep: Tensor | None
    """The gate, 0 or 1; None without one."""
    kept_direction: Tensor
    """keep·u."""


def direction_(
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor | TileMeans | None,
    numbers: StepNumbers,
    options: Options,
    *,
    largest: float,
    rms_denominator: Scalar | None = None,
) -> Direction:
    """Sections gradient to gate in one: the new moments, unrounded, and the gated direction.

    Args:
        grad: The clean gradient.
        exp_avg: Momentum before the step.
        exp_avg_sq: Variance before the step, or what is kept of tiles; None where one RMS per tensor takes its place.
        numbers: The step's numbers.
        options: The group's options.
        largest: Where the variance saturates: the largest finite value of its storage dtype.
        rms_denominator: Without a variance, :func:`single_denominator` of the tensor.
    """
    grad_share = grad * numbers.one_minus_beta1
    exp_avg = momentum_(exp_avg, grad_share, numbers)
    ahead = lookahead_(grad_share, exp_avg, numbers)
    if exp_avg_sq is None:
        assert rms_denominator is not None
        u = single_direction(ahead, rms_denominator, options.alpha_ss)
    else:
        if isinstance(exp_avg_sq, TileMeans):
            exp_avg_sq, root = tile_variance_(exp_avg_sq, exp_avg, grad, numbers, largest)
        else:
            exp_avg_sq = variance_(exp_avg_sq, exp_avg, grad, numbers, largest)
            root = exp_avg_sq.sqrt()
        u = dual_direction(ahead, root, numbers)
    keep = cautious_mask_(ahead, grad) if options.cautious else None
    return Direction(exp_avg, exp_avg_sq, keep, u if keep is None else u.mul_(keep))


# ---- scales: a few numbers per tensor, in FP64 ---------------------------------------------------------------------


class Sums(NamedTuple):
    """Columns of the sums over whole tensors, FP64, one row per tensor."""

    kept: Tensor
    """Σ keep, exact."""
    direction_sq: Tensor
    """Σ (keep·u)²."""
    param_sq: Tensor
    """Σ p² before the step, non-finite weights as 0."""
    numel: Tensor
    nonfinite: Tensor
    """Number of non-finite gradient elements."""

    @classmethod
    def of(cls, table: Tensor) -> Sums:
        """The columns of a table [tensors, NUM_SUMS]."""
        return cls(*table.unbind(1))


NUM_SUMS = len(Sums._fields)


def single_denominator(lookahead_sq: Tensor, numel: Tensor, numbers: StepNumbers, options: Options) -> Tensor:
    """max(τ·rms + ε·τ·b₁, 1e-12) with rms = √(mean(m̃²) + ε), per tensor; rms is rounded to FP32."""
    mean = lookahead_sq / numel.clamp_min(1.0)
    rms = (mean + numbers.eps).sqrt().clamp_max(torch.finfo(torch.float32).max).to(torch.float32).to(torch.float64)
    return (rms * options.tau + numbers.sigma_floor).clamp_min(SMALLEST_DENOMINATOR)


def cautious_scale(sums: Sums, options: Options) -> Tensor:
    """c = 1 / clamp(mean(keep), γ, 1), FP32; 1 without the gate and for an empty tensor."""
    if not options.cautious:
        return torch.ones_like(sums.kept, dtype=torch.float32)
    density = (sums.kept / sums.numel.clamp_min(1.0)).clamp(options.cautious_clamp_min, 1.0)
    return torch.where(sums.numel > 0, 1.0 / density, 1.0).to(torch.float32)


def bound_scale(sums: Sums, cautious_scale: Tensor, lr: Scalar, options: Options) -> Tensor:
    """s = tanh(r)/r with r = η·‖d‖₂ / (ρ·max(‖p‖₂, 1)), FP32; 1 unless the bound is radial."""
    if not (options.bound and options.bound_type == "radial"):
        return torch.ones_like(cautious_scale)
    radius = sums.param_sq.sqrt().clamp_min(1.0) * options.bound_ratio
    r = sums.direction_sq.sqrt() * cautious_scale.to(torch.float64) * lr / radius
    return torch.where(r < LINEAR_BELOW, 1.0, torch.tanh(r) / r).to(torch.float32)


def blend(kept: Tensor, now: Tensor, ema_decay: float) -> Tensor:
    """One-pass mode's memory of a scale: κ·kept + (1−κ)·now, FP32."""
    return (kept.to(torch.float64) * ema_decay + now.to(torch.float64) * (1.0 - ema_decay)).to(torch.float32)


# ---- step, governor, decay -----------------------------------------------------------------------------------------


def delta(kept_direction: Tensor, param: Tensor, step_size: Scalar, options: Options, *, govern: bool) -> Tensor:
    """Δ, how far each weight moves, from the gated direction.

    Args:
        kept_direction: keep·u. Overwritten.
        param: The weights before the step, non-finite ones as 0.
        step_size: η·c·s, one number per tensor.
        options: The group's options.
        govern: Whether the parameter is FP16, so that the cliff governor applies.
    """
    change = kept_direction.mul_(step_size)
    if options.bound and options.bound_type == "coordinate":
        change = soft_limit_(change, coordinate_radius(param, options.bound_ratio))
    return cliff_governor_(change, param) if govern else change


def coordinate_radius(param: Tensor, bound_ratio: float) -> Tensor:
    """B = ρ·√(p² + 1e-4)."""
    p = param.clamp(-COORDINATE_RANGE, COORDINATE_RANGE)
    return p.square_().add_(COORDINATE_FLOOR).sqrt_().mul_(bound_ratio)


def soft_limit_(change: Tensor, radius: Tensor) -> Tensor:
    """Δ ← B·tanh(Δ/B), with B at least 1e-30. Overwrites both."""
    radius.clamp_min_(SMALLEST_RADIUS)
    ratio = change.div_(radius)
    if torch.compiler.is_compiling():  # a value of its own: worked into each of tanh's uses of it, it takes minutes
        ratio = ratio.as_strided(ratio.shape, ratio.stride())
    return tanh_(ratio).mul_(radius)


def cliff_governor_(change: Tensor, param: Tensor) -> Tensor:
    """FP16 weights: B = max(0.01·|p|, 1.5e-4), Δ ← B·tanh(Δ/B)."""
    return soft_limit_(change, param.abs().mul_(CLIFF_RATIO).clamp_min_(CLIFF_FLOOR))


def decay_and_move_(param: Tensor, change: Tensor, numbers: StepNumbers) -> Tensor:
    """p ← p·(1 − η·λ) − Δ."""
    return param.mul_(numbers.decay).sub_(change)
