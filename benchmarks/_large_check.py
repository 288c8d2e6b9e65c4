"""A tensor of more than 2³¹ elements against the reference engine, which works through it in small pieces."""

from __future__ import annotations

from typing import Any

import _checkout  # noqa: F401
import _measure
import torch
from _claims import Claims, bits
from torch import Tensor

from luminav import LuminaV

NUMEL = 2**31 + 4096
WINDOW = 4096
LR = 8e-4
COMPARED_AT_ONCE = 1 << 26
LEAST_EQUAL = 0.99

# Where a 32-bit index would go wrong.
REGIONS = {
    "first": slice(0, WINDOW),
    "around 2^31": slice(2**31 - WINDOW, 2**31 + WINDOW),
    "last": slice(NUMEL - WINDOW, NUMEL),
    "whole": slice(0, NUMEL),
}


def check_large(claims: Claims) -> None:
    """One exact and one one-pass step of a BF16 tensor of 2³¹ + 4096 elements, by the Triton and the single engine."""
    generator = torch.Generator(_measure.DEVICE).manual_seed(5)
    weight = torch.empty(NUMEL, dtype=torch.bfloat16, device=_measure.DEVICE).normal_(0.0, 0.02, generator=generator)
    grad = torch.empty_like(weight)
    ours, reference = torch.nn.Parameter(weight.clone()), torch.nn.Parameter(weight)
    ours.grad = reference.grad = grad
    options: dict[str, Any] = {"lr": LR, "fused_single_pass": True}
    optimizers = [
        LuminaV([ours], execution="triton", **options),
        LuminaV([reference], execution="single", **options),
    ]
    for step, least in (("exact", LEAST_EQUAL), ("onepass", LEAST_EQUAL**2)):
        grad.normal_(0.0, 1e-3, generator=generator)
        for optimizer in optimizers:
            optimizer.step()
        states = [optimizers[0].state[ours], optimizers[1].state[reference]]
        compare(claims, f"{step}/weight", ours.detach(), reference.detach(), LR, least)
        for key in ("exp_avg", "exp_avg_sq"):
            compare(claims, f"{step}/{key}", states[0][key], states[1][key], 0.0, least)
        compare_scales(claims, step, states)


def compare(claims: Claims, name: str, ours: Tensor, reference: Tensor, scale: float, least: float) -> None:
    """Claim bit equality of nearly all elements, and one ulp, taken at `scale` or above, of the rest."""
    for region, part in REGIONS.items():
        equal = far = 0
        for a, b in zip(ours[part].split(COMPARED_AT_ONCE), reference[part].split(COMPARED_AT_ONCE)):
            equal += int((bits(a) == bits(b)).sum())
            far += num_far(a, b, scale)
        number = part.stop - part.start
        share = equal / number
        text = f"{share:.4%} of {number} bit-equal, {far} more than one ulp off"
        good = share >= least and (far == 0 or least < LEAST_EQUAL)  # a flipped gate of step 1 may show in step 2
        claims.claim(f"{name}/{region}", good, text, share * 100 if region == "whole" else None, "% bit-equal")


def num_far(a: Tensor, b: Tensor, scale: float) -> int:
    """Number of BF16 elements more than one ulp apart. Where a weight nearly cancels, the ulp is that of its step."""
    a, b = a.double(), b.double()
    _, exponent = torch.frexp(torch.maximum(a.abs(), b.abs()).clamp_min_(max(scale, 1e-38)))
    ulp = torch.ldexp(torch.ones_like(a), exponent - 8)
    return int(((a - b).abs_() > ulp).sum())


def compare_scales(claims: Claims, step: str, states: list[dict[str, Tensor]]) -> None:
    """Claim that c and s, which come from sums over the whole tensor, agree."""
    for key in ("cautious_scale", "bound_scale"):
        a, b = (float(state[key]) for state in states)
        claims.claim(f"{step}/{key}", abs(a - b) <= 2e-6 * abs(b), f"{a:.8g}, single {b:.8g}")
