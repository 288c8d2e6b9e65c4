"""Drawn optimizers against the rule in float64: shapes, layouts, dtypes, groups, options, missing and bad gradients.

Before each step the stored weights and moments are read; the rule gives the exact values after it, and the rounding
errors of FP32 (FP64) arithmetic an interval around each. What the optimizer then stores must be in the interval, or
where the format is coarser, one of the two grid points that the rounding may choose from it.

Runs are deterministic. ``LUMINAV_EXPLORE=20000 pytest tests/test_properties.py`` draws that many others.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st
from support import (
    DEFAULTS,
    DTYPES,
    ENGINES,
    LAYOUTS,
    MASTER_CAP_BF16,
    MASTER_MODES,
    SIXTEEN_BIT,
    bits,
    dtype_name,
    grid_above,
    grid_below,
    grid_nearest,
    has_master,
    master_key,
    master_of,
    moment_dtype,
    normal,
    optimizer_for,
    parameter,
)
from torch import Tensor

from luminav.engines import bundle

EXPLORE = int(os.environ.get("LUMINAV_EXPLORE", "0"))
EXAMPLES = 600
"""For each of the four dtypes and their mixture: 3000 in all."""
drawn = settings(
    max_examples=EXPLORE or EXAMPLES,
    derandomize=not EXPLORE,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

ROUNDING = {torch.float32: 2.0**-24, torch.float64: 2.0**-53}
SMALLEST = {torch.float32: 2.0**-149, torch.float64: 5e-324}
SCALE_ROUNDING = 2.0**-24  # c, s and rms are FP32 numbers whatever the parameter is
SUM_ROUNDING = 64  # roundings of a sum of squares over rows of 512, and of its squares


# ---- intervals -------------------------------------------------------------------------------------------------------


@dataclass
class Interval:
    low: Tensor
    high: Tensor

    @classmethod
    def around(cls, value: Tensor, error: Tensor | float) -> Interval:
        return cls(value - error, value + error)

    def clamped(self, limit: float) -> Interval:
        return Interval(self.low.clamp(-limit, limit), self.high.clamp(-limit, limit))

    def rounded(self, dtype: torch.dtype, stochastic: bool) -> Interval:
        """What may be stored: the interval itself if the format is as fine as the arithmetic."""
        if dtype not in SIXTEEN_BIT:
            return self
        if stochastic:
            return Interval(grid_below(self.low, dtype), grid_above(self.high, dtype))
        return Interval(grid_nearest(self.low, dtype), grid_nearest(self.high, dtype))

    def check(self, stored: Tensor, what: str) -> None:
        value = stored.detach().double()
        inside = (self.low <= value) & (value <= self.high)
        if not inside.all():
            bad = int((~inside).flatten().nonzero()[0])
            low, got, high = (t.flatten()[bad].item() for t in (self.low, value, self.high))
            raise AssertionError(f"{what}[{bad}] = {got!r} is not in [{low!r}, {high!r}]")


@dataclass
class Bounds:
    """Where the values after a step must lie."""

    weight: Interval
    exp_avg: Interval
    exp_avg_sq: Interval | None
    cautious_scale: tuple[float, float]
    bound_scale: tuple[float, float]


def _bound_scale(r: float) -> float:
    return 1.0 if r < 1e-4 else math.tanh(r) / r


def bounds_of(
    weight: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor | None,
    grad: Tensor,
    step: int,
    dtype: torch.dtype,
    kept: tuple[float, float] | None,
    options: dict[str, Any],
) -> Bounds:
    """The rule of support.exact_step with the errors of its arithmetic, section by section."""
    o = {**DEFAULTS, **options}
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    e, tiny = ROUNDING[compute], 4 * SMALLEST[compute]
    lr, (beta1, beta2), tau = float(o["lr"]), o["betas"], o["tau"]
    eps = max(o["eps"], 1e-4) if dtype == torch.float16 else o["eps"]
    limit = torch.finfo(moment_dtype(dtype, o)).max
    w, old_m = weight.detach().double(), exp_avg.detach().double()
    p = torch.where(torch.isfinite(w), w, 0.0)
    g = torch.where(torch.isfinite(grad), grad.detach().double(), 0.0) * (-1 if o["maximize"] else 1)

    # momentum and look-ahead
    share = (1 - beta1) * g
    m = beta1 * old_m + share
    m_error = 4 * e * ((beta1 * old_m).abs() + share.abs()) + tiny
    ahead = beta1 * m + share
    ahead_error = 4 * e * ((beta1 * m).abs() + share.abs()) + beta1 * m_error + tiny
    b1, b2 = 1 - beta1 ** (step + 1), 1 - beta2**step
    top, bottom = ahead + ahead_error, ahead - ahead_error

    # direction
    floor = eps * tau * b1
    if o["buffer"] == 2:
        assert exp_avg_sq is not None
        innovation = (g - m).abs()
        error = m_error + e * innovation + tiny
        kept_part, new_part = beta2 * exp_avg_sq.detach().double(), (1 - beta2) * innovation**2
        v = kept_part + new_part
        v_error = 4 * e * v + (1 - beta2) * (2 * innovation * error + error**2) + tiny
        variance = Interval((v - v_error).clamp(0, limit), (v + v_error).clamp_max(limit))
        factor = tau * b1 / math.sqrt(b2)
        sigma_low = ((factor * variance.low.sqrt() + floor) * (1 - 6 * e)).clamp_min(1e-12)
        sigma_high = ((factor * variance.high.sqrt() + floor) * (1 + 6 * e)).clamp_min(1e-12)
        z = Interval(
            torch.minimum(bottom / sigma_low, bottom / sigma_high), torch.maximum(top / sigma_low, top / sigma_high)
        )
    else:
        variance = None
        sizes = [(ahead.abs() - ahead_error).clamp_min(0), ahead.abs() + ahead_error]
        rms = [math.sqrt((size**2).sum().item() / max(w.numel(), 1) + eps) for size in sizes]
        low, high = ((tau * x + floor) * (1 + sign * 6 * SCALE_ROUNDING) for x, sign in zip(rms, (-1, 1)))
        low, high = max(low, 1e-12), max(high, 1e-12)
        z = Interval(torch.minimum(bottom / low, bottom / high), torch.maximum(top / low, top / high))
        z = Interval(z.low / (1 + o["alpha_ss"] * z.low.abs()), z.high / (1 + o["alpha_ss"] * z.high.abs()))
    u_low, u_high = torch.tanh(z.low), torch.tanh(z.high)
    u_low, u_high = u_low - 16 * e * u_low.abs() - tiny, u_high + 16 * e * u_high.abs() + tiny

    # gate
    c_now = (1.0, 1.0)
    if o["cautious"]:
        sure = (ahead.abs() > ahead_error) & (torch.sign(ahead) * torch.sign(g) > 0)
        unsure = (ahead.abs() <= ahead_error) & (g != 0)
        u_low = torch.where(sure, u_low, torch.where(unsure, u_low.clamp_max(0.0), 0.0))
        u_high = torch.where(sure, u_high, torch.where(unsure, u_high.clamp_min(0.0), 0.0))
        if w.numel():
            counts = (int(sure.sum()) + int(unsure.sum()), int(sure.sum()))
            densities = (min(max(n / w.numel(), o["cautious_clamp_min"]), 1.0) for n in counts)
            low, high = (1 / density for density in densities)
            c_now = (low * (1 - SCALE_ROUNDING), high * (1 + SCALE_ROUNDING))

    # bound
    largest_u = torch.maximum(u_low.abs(), u_high.abs())
    smallest_u = torch.where((u_low > 0) | (u_high < 0), torch.minimum(u_low.abs(), u_high.abs()), 0.0)
    slack = SUM_ROUNDING * e
    norms = smallest_u.norm().item() * (1 - slack), largest_u.norm().item() * (1 + slack)
    p_norm = p.norm().item()

    def scale_range(c: tuple[float, float]) -> tuple[float, float]:
        if not (o["bound"] and o["bound_type"] == "radial"):
            return 1.0, 1.0
        r_low = lr * norms[0] * c[0] / (o["bound_ratio"] * max(p_norm * (1 + slack), 1.0))
        r_high = lr * norms[1] * c[1] / (o["bound_ratio"] * max(p_norm * (1 - slack), 1.0))
        if p_norm > 1e18:
            r_low = 0.0  # p² overflows FP32: the radius is taken for infinite
        return _bound_scale(r_high) * (1 - 3 * SCALE_ROUNDING), _bound_scale(r_low) * (1 + SCALE_ROUNDING)

    if o["fused_single_pass"] and kept is not None:
        kappa = o["ema_decay"]
        c_used, s_used = (kept[0], kept[0]), (kept[1], kept[1])
        c_next = tuple(
            (kappa * kept[0] + (1 - kappa) * c) * (1 + x * 2 * SCALE_ROUNDING) for c, x in zip(c_now, (-1, 1))
        )
        s_now = scale_range((c_next[0], c_next[1]))
        s_next = tuple(
            (kappa * kept[1] + (1 - kappa) * s) * (1 + x * 2 * SCALE_ROUNDING) for s, x in zip(s_now, (-1, 1))
        )
    else:
        c_used = c_next = c_now
        s_used = s_next = scale_range(c_now)
    sizes = [lr * c * s * (1 + sign * 2 * e) for c, s, sign in zip(c_used, s_used, (-1, 1))]
    delta = Interval(
        torch.minimum(u_low * sizes[0], u_low * sizes[1]), torch.maximum(u_high * sizes[0], u_high * sizes[1])
    )
    radii = []
    if o["bound"] and o["bound_type"] == "coordinate":
        radii.append(o["bound_ratio"] * (p**2 + 1e-4).sqrt())
    if dtype == torch.float16:
        radii.append((0.01 * p.abs()).clamp_min(1.5e-4))
    for radius in radii:
        delta = Interval(radius * torch.tanh(delta.low / radius), radius * torch.tanh(delta.high / radius))
        delta = Interval(delta.low - 32 * e * delta.low.abs() - tiny, delta.high + 32 * e * delta.high.abs() + tiny)

    # decay, update, saturation
    largest = torch.finfo(dtype).max
    if has_master(dtype, o):
        largest = MASTER_CAP_BF16 if dtype == torch.bfloat16 else torch.finfo(torch.float32).max
    decayed = p * (1 - lr * o["weight_decay"])
    error = 4 * e * (decayed.abs() + torch.maximum(delta.low.abs(), delta.high.abs())) + tiny
    moved = Interval(decayed - delta.high - error, decayed - delta.low + error).clamped(largest)
    return Bounds(
        weight=moved,
        exp_avg=Interval.around(m, m_error).clamped(limit),
        exp_avg_sq=variance,
        cautious_scale=(c_next[0], c_next[1]),
        bound_scale=(s_next[0], s_next[1]),
    )


# ---- what is drawn ---------------------------------------------------------------------------------------------------

SHAPES = st.lists(st.integers(0, 9), max_size=4).map(tuple).filter(lambda shape: math.prod(shape) <= 150)
SEEDS = st.integers(0, 2**20)
BAD = (math.nan, math.inf, -math.inf)


def options() -> st.SearchStrategy[dict[str, Any]]:
    """Overrides of a group, each option present half the time or less."""
    values: dict[str, st.SearchStrategy[Any]] = {
        "lr": st.sampled_from([1e-6, 1e-3, 1e-2, 0.3, 10.0, 0.0, torch.tensor(0.0078125)]),
        "betas": st.sampled_from([(0.0, 0.0), (0.5, 0.9), (0.9, 0.99), (0.95, 0.9999)]),
        "eps": st.sampled_from([0.0, 1e-12, 1e-5, 1e-2]),
        "weight_decay": st.sampled_from([0.0, 1e-2, 1.0, 40.0]),
        "tau": st.sampled_from([0.05, 0.5, 1.0, 5.0]),
        "alpha_ss": st.sampled_from([0.0, 0.1, 4.0]),
        "cautious": st.booleans(),
        "cautious_clamp_min": st.sampled_from([1e-3, 0.3, 1.0]),
        "stochastic_rounding": st.booleans(),
        "bound": st.booleans(),
        "bound_type": st.sampled_from(["radial", "coordinate"]),
        "bound_ratio": st.sampled_from([1e-4, 1e-2, 1.0]),
        "master_weights": st.sampled_from(MASTER_MODES),
        "split_master_weights": st.booleans(),
        "ema_decay": st.sampled_from([0.0, 0.5, 0.99]),
        "seed": st.integers(0, 2**63 - 1),
        "maximize": st.booleans(),
    }
    method = st.sampled_from([{}, {}, {"buffer": 1}, {"fused_single_pass": True}, {"fused_single_pass": True}])
    return st.builds(lambda some, kind: {**some, **kind}, st.fixed_dictionaries({}, optional=values), method)


@st.composite
def weights(draw: st.DrawFn, dtype: torch.dtype) -> torch.nn.Parameter:
    values = normal(draw(SHAPES), draw(SEEDS), draw(st.sampled_from([0.0, 1e-6, 0.02, 1.0, 1.0, 300.0])), torch.float64)
    if draw(st.booleans()) and draw(st.booleans()):
        smallest = torch.finfo(dtype).smallest_normal
        largest = 1e30 if dtype == torch.float64 else torch.finfo(dtype).max  # float64 has no wider reference
        specials = [math.inf, -math.inf, math.nan, largest, -largest, -0.0, smallest / 4, -3 * smallest]
        for position in draw(st.lists(st.integers(0, 149), max_size=4)):
            if position < values.numel():
                values.view(-1)[position] = draw(st.sampled_from(specials))
    return parameter(values, dtype, draw(st.sampled_from(list(LAYOUTS))))


@st.composite
def gradient(draw: st.DrawFn, param: Tensor) -> Tensor | None:
    kind = draw(st.sampled_from(["normal"] * 6 + ["missing", "zero", "bad", "all_bad", "expanded", "mixed"]))
    if kind == "missing":
        return None
    size = draw(st.sampled_from([1e-20, 1e-7, 1e-3, 1.0, 1.0, 40.0, 3e4]))
    grad = normal(param.shape, draw(SEEDS), size, torch.float64)
    if kind == "zero":
        grad.zero_()
    elif kind == "bad":
        for position in draw(st.lists(st.integers(0, 149), max_size=5)):
            if position < grad.numel():
                grad.view(-1)[position] = draw(st.sampled_from(BAD))
    elif kind == "all_bad":
        grad.fill_(draw(st.sampled_from(BAD)))
    elif kind == "expanded" and grad.numel():
        return grad.flatten()[:1].sum().to(param.dtype).expand(param.shape)
    elif kind == "mixed":
        grad *= torch.logspace(-8, 3, max(grad.numel(), 1), dtype=torch.float64)[: grad.numel()].reshape(grad.shape)
    return LAYOUTS[draw(st.sampled_from(list(LAYOUTS)))](grad.to(param.dtype))


@st.composite
def groups(draw: st.DrawFn, dtype: torch.dtype | None) -> list[dict[str, Any]]:
    kinds = st.sampled_from(DTYPES) if dtype is None else st.just(dtype)
    return [
        {"params": [draw(weights(draw(kinds))) for _ in range(draw(st.integers(1, 3)))], **draw(options())}
        for _ in range(draw(st.integers(1, 2)))
    ]


# ---- the test --------------------------------------------------------------------------------------------------------


def snapshot(optimizer: torch.optim.Optimizer, param: Tensor) -> dict[str, Tensor]:
    state = {key: value.clone() for key, value in optimizer.state.get(param, {}).items()}
    return {"weight": param.detach().clone(), **state}


def check_step(before: dict[str, Tensor], after: dict[str, Tensor], grad: Tensor, options: dict[str, Any]) -> None:
    """One parameter's step against the bounds, and against what must not change at all."""
    dtype = before["weight"].dtype
    zeros = torch.zeros_like(before["weight"])
    step = int(before.get("step", torch.zeros(()))) + 1
    stochastic = options.get("stochastic_rounding", True)
    master = has_master(dtype, options)
    old = master_of(before["weight"], before)
    old = old.float() if master else old
    one_pass = options.get("fused_single_pass", False)
    kept = (before["cautious_scale"].item(), before["bound_scale"].item()) if "bound_scale" in before else None
    bounds = bounds_of(
        old, before.get("exp_avg", zeros), before.get("exp_avg_sq", zeros), grad, step, dtype, kept, options
    )
    keys = {"weight", "step", "exp_avg"} | ({"exp_avg_sq"} if options.get("buffer", 2) == 2 else set())
    keys |= ({master_key(dtype, options)} if master else set()) | (
        {"cautious_scale", "bound_scale"} if one_pass else set()
    )
    assert set(after) == keys
    assert int(after["step"]) == step

    moments = moment_dtype(dtype, options)
    assert after["exp_avg"].dtype == moments
    bounds.exp_avg.rounded(moments, stochastic).check(after["exp_avg"], "exp_avg")
    if bounds.exp_avg_sq is not None:
        assert after["exp_avg_sq"].dtype == moments
        bounds.exp_avg_sq.rounded(moments, stochastic).check(after["exp_avg_sq"], "exp_avg_sq")
    if one_pass:
        assert bounds.cautious_scale[0] <= after["cautious_scale"].item() <= bounds.cautious_scale[1]
        assert bounds.bound_scale[0] <= after["bound_scale"].item() <= bounds.bound_scale[1]

    stored = master_of(after["weight"], after)
    if float(options.get("lr", 1.0)) == 0.0:
        assert torch.equal(bits(after["weight"]), bits(before["weight"]))
        return
    finite = torch.isfinite(old)
    assert torch.equal(bits(stored)[~finite], bits(old)[~finite])
    what = bounds.weight if master else bounds.weight.rounded(dtype, stochastic)
    Interval(what.low[finite], what.high[finite]).check(stored[finite], "weight")
    if master:
        assert_nearest(after["weight"][finite], stored[finite])


def assert_nearest(weight: Tensor, master: Tensor) -> None:
    """The 16-bit weight is its finite FP32 master's nearest value."""
    if weight.dtype == torch.bfloat16:
        expected = (bits(master).long() + 0x8000 >> 16) & 0xFFFF
        assert torch.equal(bits(weight).long() & 0xFFFF, expected)
    else:
        assert torch.equal(weight.double(), grid_nearest(master, weight.dtype))


@pytest.mark.filterwarnings("ignore:every element:RuntimeWarning")
@pytest.mark.parametrize("dtype", [*DTYPES, None], ids=lambda dtype: "mixed" if dtype is None else dtype_name(dtype))
def test_every_step_is_the_rule(dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch) -> None:
    @drawn
    @given(st.data())
    def check(data: st.DataObject) -> None:
        monkeypatch.setattr(bundle, "CPU_PIECE", data.draw(st.sampled_from([1 << 18, 16, 5])))
        drawn_groups = data.draw(groups(dtype))
        pairs = [(param, group) for group in drawn_groups for param in group["params"]]
        optimizer = optimizer_for(drawn_groups, execution=data.draw(st.sampled_from(ENGINES)))
        for _ in range(data.draw(st.integers(1, 3))):
            grads = [data.draw(gradient(param)) for param, _ in pairs]
            # With lr 0 and nothing but zeros, torch.distributed.checkpoint asks for state: no step is counted.
            lr_is_zero = all(float(group.get("lr", 1.0)) == 0.0 for group in drawn_groups)
            assume(not (lr_is_zero and all(grad is None or not grad.any() for grad in grads)))
            before = [snapshot(optimizer, param) for param, _ in pairs]
            for (param, _), grad in zip(pairs, grads):
                param.grad = grad
            optimizer.step()
            for (param, group), grad, old in zip(pairs, grads, before):
                after = snapshot(optimizer, param)
                if grad is None:
                    assert after.keys() == old.keys()
                    assert all(torch.equal(bits(after[key]), bits(old[key])) for key in old)
                else:
                    event(f"{dtype_name(param.dtype)}, {'missing before' if 'step' not in old else 'running'}")
                    check_step(old, after, grad, group)

    check()
