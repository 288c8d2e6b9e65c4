"""The rule: whole runs against the float64 closed form of support.py, single formulas at points computed by hand."""

from __future__ import annotations

import inspect
import itertools
import math
from typing import Any

import pytest
import torch
from support import (
    DEFAULTS,
    DTYPES,
    ENGINES,
    MASTER_CAP_BF16,
    MASTER_MODES,
    MODES,
    OPTION_SETS,
    SIXTEEN_BIT,
    Reference,
    assert_same_bits,
    bits,
    dtype_name,
    exact_step,
    fp32,
    gradients,
    grid_nearest,
    has_master,
    largest_error,
    master_of,
    normal,
    optimizer_for,
    parameter,
    run,
    spacing,
    train,
)
from torch import Tensor

from luminav import LuminaV, rule
from luminav.hyperparameters import Options

LARGEST_ERROR = 2e-6  # of the tensor's largest weight, FP32 arithmetic, ten steps at lr 3e-3
LARGEST_ERROR_FP64 = 1e-14
LARGEST = {dtype: torch.finfo(dtype).max for dtype in DTYPES}

by_mode = pytest.mark.parametrize("mode", MODES)
by_engine = pytest.mark.parametrize("engine", ENGINES)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
by_sixteen_bit = pytest.mark.parametrize("dtype", SIXTEEN_BIT, ids=dtype_name)
by_master = pytest.mark.parametrize("master", MASTER_MODES)


def numbers(step: int = 1, dtype: torch.dtype = torch.float32, **overrides: Any) -> rule.StepNumbers:
    options = Options.from_group(overrides)
    return rule.step_numbers(step, options.lr, options, dtype, 1.0)


def sums_of(
    *, kept: float = 0, direction_sq: float = 0, param_sq: float = 0, numel: float = 0, nonfinite: float = 0
) -> rule.Sums:
    """Sums of one tensor, as an engine would hand them over."""
    return rule.Sums.of(torch.tensor([[kept, direction_sq, param_sq, numel, nonfinite]], dtype=torch.float64))


# ---- whole runs ------------------------------------------------------------------------------------------------------


def test_the_defaults_are_those_of_the_specification() -> None:
    signature = inspect.signature(LuminaV).parameters
    assert {name: signature[name].default for name in DEFAULTS} == dict(DEFAULTS)


@by_mode
def test_fp32_weights_follow_the_closed_form(mode: str) -> None:
    """N(0, 1) weights, 1 to 10⁵ elements, gradient scales 1e-6 to 1e3, ten steps at lr 3e-3."""
    options = {**MODES[mode], "lr": 3e-3}
    cases = list(itertools.product((1, 2, 7, 33, 1000, 4099), (1e-6, 1e-3, 1.0, 30.0, 1e3)))
    cases += [(100_000, scale) for scale in (1e-6, 1.0, 1e3)]
    for numel, scale in cases:
        weights, grads = normal((numel,), numel), gradients((numel,), 10, numel + 1, scale)
        reference = Reference(weights, **options)
        for grad in grads:
            reference.step(grad)
        for engine in ENGINES:
            param, _ = train(weights, grads, execution=engine, **options)
            error = largest_error(param, reference.weight)
            assert error < LARGEST_ERROR, (numel, scale, engine, error)
        assert largest_error(weights, reference.weight) > 100 * LARGEST_ERROR, "the weights must have moved"


@by_dtype
@pytest.mark.parametrize("name", OPTION_SETS)
def test_every_option_follows_the_closed_form(name: str, dtype: torch.dtype) -> None:
    """Moments in full precision: FP32 and FP64 parameters, and 16-bit ones with everything in FP32 beside them."""
    limit = LARGEST_ERROR_FP64 if dtype == torch.float64 else 2 * LARGEST_ERROR  # some sets have ten times the step
    for numel, scale in ((1, 1.0), (47, 1e-4), (600, 0.3)):
        options = {**OPTION_SETS[name], "master_weights": "full"}
        weights = normal((numel,), 31 + numel, 0.5).to(dtype)
        grads = gradients((numel,), 10, 77 + numel, scale, dtype)
        reference = Reference(weights, **options)
        for grad in grads:
            reference.step(grad)
        param, state = train(weights, grads, **options)
        master = master_of(param, state)
        assert largest_error(master, reference.weight) < limit, numel
        assert largest_error(state["exp_avg"], reference.exp_avg) < limit
        if options.get("buffer", 2) == 2:
            assert reference.exp_avg_sq is not None
            assert largest_error(state["exp_avg_sq"], reference.exp_avg_sq) < 2 * limit
        else:
            assert "exp_avg_sq" not in state
        if options.get("fused_single_pass"):
            assert reference.kept is not None
            assert state["cautious_scale"].item() == pytest.approx(reference.kept[0], rel=1e-6)
            assert state["bound_scale"].item() == pytest.approx(reference.kept[1], rel=1e-6)
        if dtype == torch.float16:
            assert_same_bits(param, grid_nearest(master, dtype).to(dtype))


@pytest.mark.parametrize("mode", MODES)
def test_late_steps_use_their_own_bias_corrections(mode: str) -> None:
    """Steps 1000 and 10⁷ from given moments: the corrections are near 1, and 1."""
    options = MODES[mode]
    for steps in (999, 10**7):
        weights, grad = normal((50,), 1), normal((50,), 2)
        param = parameter(weights)
        optimizer = optimizer_for([param], **options)
        run(optimizer, [param], [[grad]])
        state = optimizer.state[param]
        state["step"].fill_(steps)
        before = {key: value.clone() for key, value in state.items()}
        weight = param.detach().clone()
        kept = tuple(before[key].item() for key in ("cautious_scale", "bound_scale") if key in before)
        expected = exact_step(
            weight,
            before["exp_avg"],
            before.get("exp_avg_sq"),
            grad,
            steps + 1,
            torch.float32,
            kept=kept or None,  # type: ignore[arg-type]
            **options,
        )
        run(optimizer, [param], [[grad]])
        assert largest_error(param, expected.weight) < 3e-7
        assert int(state["step"]) == steps + 1


# ---- formulas by hand ------------------------------------------------------------------------------------------------


def test_first_step_of_one_element_by_hand() -> None:
    """g = 2: m = 0.2, m̃ = 0.18 + 0.2, g − m = 1.8, v = 0.00324, σ = 0.8·0.19/√0.001·√0.00324 + ε·0.152."""
    param, state = train(torch.tensor([1.5]), [torch.tensor([2.0])], lr=1e-2, weight_decay=0.5)
    assert state["exp_avg"].item() == pytest.approx(0.2, rel=3e-7)
    assert state["exp_avg_sq"].item() == pytest.approx(0.00324, rel=3e-7)
    u = math.tanh(0.38 / (0.152 * 1.8 + 1e-8 * 0.152))
    r = 1e-2 * u / (0.03 * 1.5)
    assert param.item() == pytest.approx(1.5 * (1 - 0.005) - 1e-2 * u * math.tanh(r) / r, rel=2e-7)


def test_second_step_of_one_element_by_hand() -> None:
    """g = 2, then −1: m = 0.08, m̃ = −0.028, so m̃ agrees with g; b₁ = 1 − 0.9³, b₂ = 1 − 0.999²."""
    param, state = train(
        torch.tensor([1.5]), [torch.tensor([2.0]), torch.tensor([-1.0])], lr=1e-2, weight_decay=0.0, bound=False
    )
    v = 0.999 * 0.00324 + 0.001 * (-1 - 0.08) ** 2
    sigma = 0.8 * (1 - 0.9**3) / math.sqrt(1 - 0.999**2) * math.sqrt(v) + 1e-8 * 0.8 * (1 - 0.9**3)
    assert state["exp_avg"].item() == pytest.approx(0.08, rel=1e-6)
    assert state["exp_avg_sq"].item() == pytest.approx(v, rel=1e-6)
    first = 1.5 - 1e-2 * math.tanh(0.38 / (0.152 * 1.8 + 1e-8 * 0.152))
    assert param.item() == pytest.approx(first - 1e-2 * math.tanh(-0.028 / sigma), rel=3e-7)


def test_single_buffer_by_hand() -> None:
    """g = (3, −4): m̃ = 0.19·g, mean(m̃²) = 0.19²·12.5; z = m̃/(0.8·rms + …), then the soft sign."""
    param, state = train(
        torch.tensor([1.0, 1.0]), [torch.tensor([3.0, -4.0])], buffer=1, lr=1e-2, weight_decay=0.0, bound=False
    )
    rms = math.sqrt(0.19**2 * 12.5 + 1e-8)
    for value, g in zip(param.tolist(), (3.0, -4.0)):
        z = 0.19 * g / (0.8 * rms + 1e-8 * 0.8 * 0.19)
        assert value == pytest.approx(1 - 1e-2 * math.tanh(z / (1 + 0.5 * abs(z))), rel=2e-7)
    assert set(state) == {"step", "exp_avg"}


def test_the_variance_is_about_the_new_momentum_not_zero() -> None:
    """A constant gradient has no innovation in the end: v falls below a thousandth of g²·(1−β₂ᵗ)."""
    _, state = train(torch.ones(1), [torch.tensor([4.0])] * 60, betas=(0.5, 0.9), lr=0.0)
    assert state["exp_avg_sq"].item() < 16 * 1e-3
    assert state["exp_avg"].item() == pytest.approx(4.0, rel=1e-6)


def test_step_numbers_by_hand() -> None:
    at = numbers(3, lr=0.25, weight_decay=0.5, betas=(0.5, 0.75), tau=2.0, eps=1e-2)
    assert (at.lr, at.decay, at.beta1, at.one_minus_beta1) == (0.25, 0.875, 0.5, 0.5)
    assert (at.beta2, at.root_one_minus_beta2, at.eps) == (0.75, 0.5, 1e-2)
    assert at.sigma_scale == pytest.approx(2.0 * (1 - 0.5**4) / math.sqrt(1 - 0.75**3), rel=1e-15)
    assert at.sigma_floor == pytest.approx(1e-2 * 2.0 * (1 - 0.5**4), rel=1e-15)


def test_eps_is_raised_for_fp16_only() -> None:
    for dtype in DTYPES:
        assert numbers(dtype=dtype, eps=1e-8).eps == (1e-4 if dtype == torch.float16 else 1e-8)
        assert numbers(dtype=dtype, eps=1e-2).eps == 1e-2


def test_fp16_eps_floors_the_single_buffers_rms_at_a_hundredth() -> None:
    """Zero-ish gradients: rms = √1e-4, z = m̃/(0.8·0.01 + 1e-4·0.8·0.19)."""
    grad = torch.tensor([1e-4, -1e-4]).half()
    param, _ = train(
        torch.ones(2),
        [grad],
        dtype=torch.float16,
        buffer=1,
        lr=1e-2,
        bound=False,
        master_weights="full",
        weight_decay=0,
    )
    z = 0.19 * grad.double()[0].item() / (0.8 * 0.01 + 1e-4 * 0.8 * 0.19)
    u = math.tanh(z / (1 + 0.5 * z))
    _, state = train(
        torch.ones(2), [grad], dtype=torch.float16, buffer=1, lr=1.0, bound=False, master_weights="full", weight_decay=0
    )
    expected = 1 - 0.01 * math.tanh(u / 0.01)
    assert state["master_param"][0].item() == pytest.approx(expected, rel=3e-7)
    assert param[0] == 1.0  # half a spacing is not reached


@pytest.mark.parametrize(
    ("ahead", "grad", "keep"),
    [
        (1.0, 2.0, 1),
        (-1.0, -2.0, 1),
        (1.0, -2.0, 0),
        (-1.0, 2.0, 0),
        (0.0, 1.0, 0),
        (1.0, 0.0, 0),
        (-0.0, -1.0, 0),
        (-1.0, -0.0, 0),
        (0.0, 0.0, 0),
        (1e-45, 1e-45, 1),  # the product underflows
        (-1e-45, -1e-45, 1),
        (1e-45, -1e-45, 0),
        (3e38, 3e38, 1),  # and overflows
        (3e38, -3e38, 0),
        (3e38, 1e-45, 1),
        (3e38, 0.0, 0),
        (0.0, -3e38, 0),
    ],
)
def test_cautious_mask(ahead: float, grad: float, keep: int) -> None:
    for dtype in (torch.float32, torch.float64):
        pair = torch.full((9,), ahead, dtype=dtype), torch.full((9,), grad, dtype=dtype)
        assert rule.cautious_mask_(*pair).tolist() == [keep] * 9
    tiny = torch.tensor([5e-324], dtype=torch.float64)
    assert rule.cautious_mask_(tiny, tiny.clone()).item() == 1


def test_tanh_is_within_a_few_ulp_and_odd() -> None:
    x = torch.cat([normal((100_000,), 1), normal((10_000,), 2, 1e-5), normal((10_000,), 3, 10.0)])
    got, want = rule.tanh_(x.clone()), torch.tanh(x.double())
    assert ((got.double() - want).abs() / want.abs().clamp_min(1e-30)).max() < 4 * 2.0**-24
    x64 = x.double()
    assert ((rule.tanh_(x64.clone()) - torch.tanh(x64)).abs() / want.abs().clamp_min(1e-30)).max() < 8 * 2.0**-53
    ends = torch.tensor([0.0, -0.0, 20.0, -20.0, 1e30, -1e30, math.inf, -math.inf])
    assert rule.tanh_(ends).tolist() == [0.0, -0.0, 1, -1, 1, -1, 1, -1]


@pytest.mark.parametrize(
    ("kept", "numel", "gamma", "expected"),
    [
        (8, 8, 0.5, 1.0),
        (6, 8, 0.5, 8 / 6),
        (4, 8, 0.5, 2.0),
        (1, 8, 0.5, 2.0),
        (0, 8, 0.5, 2.0),
        (1, 8, 0.05, 8.0),
        (0, 8, 0.05, 20.0),
        (3, 8, 1.0, 1.0),
        (0, 0, 0.5, 1.0),
        (2**24 + 1, 2**25, 0.01, 2**25 / (2**24 + 1)),
    ],
)
def test_cautious_scale(kept: int, numel: int, gamma: float, expected: float) -> None:
    options = Options.from_group({"cautious_clamp_min": gamma})
    scale = rule.cautious_scale(sums_of(kept=kept, numel=numel), options)
    assert scale.dtype == torch.float32 and scale.item() == fp32(expected)
    off = Options.from_group({"cautious_clamp_min": gamma, "cautious": False})
    assert rule.cautious_scale(sums_of(kept=kept, numel=numel), off).item() == 1.0


@pytest.mark.parametrize("c", [1.0, 1.75])
@pytest.mark.parametrize("norm", [0.0, 0.3, 1.0, 7.0])
@pytest.mark.parametrize("r", [0.0, 1e-9, 0.99e-4, 1.01e-4, 1e-2, 0.5, 1.0, 3.0, 40.0, 1e6])
def test_bound_scale(r: float, norm: float, c: float) -> None:
    """r = η·‖c·keep·u‖/(ρ·max(‖p‖, 1)); below 1e-4, s is 1."""
    options = Options.from_group({"bound_ratio": 0.05})
    lr = 1e-2
    gated_norm = r * 0.05 * max(norm, 1.0) / (lr * c)
    sums = sums_of(kept=1, numel=2, direction_sq=gated_norm**2, param_sq=norm**2)
    got = rule.bound_scale(sums, torch.tensor([c]), lr, options)
    expected = 1.0 if r < 1e-4 else math.tanh(r) / r
    assert got.dtype == torch.float32 and got.item() == pytest.approx(expected, rel=1e-7)
    for other in ({"bound": False}, {"bound_type": "coordinate"}):
        assert rule.bound_scale(sums, torch.tensor([c]), lr, Options.from_group(other)).item() == 1.0


def test_scales_are_those_of_the_tensor_by_hand() -> None:
    """One-pass mode keeps c and s of its first, exact step: they can be read from its state."""
    weights = torch.tensor([3.0, 0.0, 4.0, 0.0])
    _, state = train(weights, [torch.tensor([1.0, -2.0, 0.0, 5.0])], fused_single_pass=True, lr=1e-1, eps=0.0)
    assert state["cautious_scale"].item() == fp32(4 / 3)  # a zero gradient is not kept
    u = math.tanh(0.19 / (0.152 * 0.9))  # the same for every g ≠ 0 on the first step
    r = 0.1 * 4 / 3 * math.sqrt(3) * u / (0.03 * 5)
    assert state["bound_scale"].item() == pytest.approx(math.tanh(r) / r, rel=3e-7)


def test_one_pass_blends_the_kept_scales_by_hand() -> None:
    """Step 2 applies the pair of step 1 and then keeps 0.75·old + 0.25·now, s now from ‖keep·u‖·(new c)."""
    options: dict[str, Any] = {
        "fused_single_pass": True,
        "ema_decay": 0.75,
        "lr": 1e-1,
        "weight_decay": 0.0,
        "eps": 0.0,
    }
    weights = torch.tensor([3.0, 0.0, 4.0, 0.0])
    first, second = torch.tensor([1.0, -2.0, 0.0, 5.0]), torch.tensor([1.0, -2.0, 0.0, -50.0])
    param = parameter(weights)
    optimizer = optimizer_for([param], **options)
    run(optimizer, [param], [[first]])
    after_one = param.detach().double()
    c1, s1 = (optimizer.state[param][key].item() for key in ("cautious_scale", "bound_scale"))
    run(optimizer, [param], [[second]])
    m = 0.9 * 0.1 * first.double() + 0.1 * second.double()
    v = 0.999 * 0.001 * (0.9 * first.double()) ** 2 + 0.001 * (second.double() - m) ** 2
    ahead = 0.9 * m + 0.1 * second.double()
    sigma = 0.8 * (1 - 0.9**3) / math.sqrt(1 - 0.999**2) * v.sqrt()
    u = torch.where(sigma > 0, torch.tanh(ahead / sigma.clamp_min(1e-12)), 0.0)
    assert (ahead * second).sign().tolist() == [1, 1, 0, 1]
    expected = after_one - 0.1 * c1 * s1 * u
    assert largest_error(param, expected) < 3e-7
    c2 = 0.75 * c1 + 0.25 * 4 / 3
    assert optimizer.state[param]["cautious_scale"].item() == pytest.approx(c2, rel=3e-7)
    r = 0.1 * u.norm().item() * c2 / (0.03 * max(after_one.norm().item(), 1.0))
    s2 = 0.75 * s1 + 0.25 * math.tanh(r) / r
    assert optimizer.state[param]["bound_scale"].item() == pytest.approx(s2, rel=3e-7)


def test_coordinate_radius_and_cliff_by_hand() -> None:
    p = torch.tensor([0.0, 0.01, 1.0, -2.0, 1e30, -3e38])
    radius = rule.coordinate_radius(p, 0.5)
    expected = [0.005, 0.5 * math.sqrt(2e-4), 0.5 * math.sqrt(1.0001), 0.5 * math.sqrt(4.0001)]
    assert radius[:4].tolist() == pytest.approx(expected, rel=3e-7)
    assert torch.isfinite(radius).all() and (radius[4:] > 1e17).all()
    change = torch.tensor([1.0, -1.0, 1e-6, -1e-6, 1e-3, 1e30])
    p = torch.tensor([0.0, 1.0, 0.0, 1.0, 0.001, 65504.0])
    limit = [1.5e-4, 0.01, 1.5e-4, 0.01, 1.5e-4, 655.04]
    expected = [b * math.tanh(x / b) for b, x in zip(limit, change.tolist())]
    assert rule.cliff_governor_(change.clone(), p.clone()).tolist() == pytest.approx(expected, rel=1e-6)


# ---- bounds: what a step can do at most ------------------------------------------------------------------------------


@by_master
@by_engine
def test_the_governor_limits_fp16_moves(engine: str, master: str) -> None:
    """At any learning rate at most max(1 % of |p|, 1.5e-4), plus one spacing of FP16 where that is rounded."""
    for options in (
        {"bound": False},
        {"buffer": 1, "bound": False},
        {},
        {"bound_type": "coordinate", "bound_ratio": 10.0},
    ):
        weights = torch.cat([normal((500,), 1), normal((500,), 2, 1e-3), torch.zeros(24)]).half()
        param, state = train(
            weights,
            [normal((1024,), 3).half()],
            lr=50.0,
            weight_decay=0.0,
            master_weights=master,
            execution=engine,
            **options,
        )
        moved = (master_of(param, state).double() - weights.double()).abs()
        limit = (0.01 * weights.double().abs()).clamp_min(1.5e-4)
        slack = 1e-6 if master != "none" else spacing(param, torch.float16)
        assert (moved <= limit * (1 + 1e-5) + slack).all()
        if not options:
            continue  # the radial bound is far tighter here
        assert (moved > 0.4 * limit).double().mean() > 0.3, "the limit must have been reached"


@by_engine
def test_the_coordinate_bound_limits_each_element(engine: str) -> None:
    weights = torch.cat([normal((500,), 1), torch.zeros(20), normal((20,), 2, 1e-3)])
    param, _ = train(weights, [normal((540,), 3)], lr=10.0, weight_decay=0.0, bound_type="coordinate", execution=engine)
    moved = (param.double() - weights.double()).abs()
    limit = 0.03 * (weights.double() ** 2 + 1e-4).sqrt()
    assert (moved <= limit * (1 + 1e-5) + 1e-7).all()
    kept = moved > 0
    assert kept.double().mean() > 0.9 and (moved[kept] > 0.99 * limit[kept]).double().mean() > 0.9


@by_engine
@pytest.mark.parametrize("size", [1e-3, 1.0, 30.0])
def test_the_radial_bound_limits_the_length_and_keeps_the_direction(engine: str, size: float) -> None:
    weights, grads = normal((300,), 1, size), [normal((300,), 2)]
    far, _ = train(weights, grads, lr=100.0, weight_decay=0.0, execution=engine, dtype=torch.float64)
    near, _ = train(weights, grads, lr=1e-6, weight_decay=0.0, execution=engine, dtype=torch.float64)
    step, small = far - weights.double(), near - weights.double()
    radius = 0.03 * max(weights.double().norm().item(), 1.0)
    assert step.norm().item() == pytest.approx(radius, rel=1e-6)  # tanh(r) is 1 at this learning rate
    cosine = (step * small).sum() / (step.norm() * small.norm())
    assert cosine.item() == pytest.approx(1.0, abs=1e-9)


# ---- edges -----------------------------------------------------------------------------------------------------------

SPECIALS = (0.0, -0.0, 1.0, -1.0, 1e-8, -1e-8, 3e-5, math.inf, -math.inf, math.nan, 60000.0, -60000.0)


@by_engine
@by_dtype
@pytest.mark.parametrize("lr", [0.0, torch.tensor(0.0)], ids=["float", "tensor"])
@pytest.mark.parametrize("capturable", [False, True], ids=["host", "capturable"])
def test_zero_learning_rate_leaves_every_bit(
    engine: str, dtype: torch.dtype, lr: float | Tensor, capturable: bool
) -> None:
    """In every mode; the moments go on."""
    weights = torch.tensor(SPECIALS * 3).to(dtype)
    for mode, master in itertools.product(MODES.values(), MASTER_MODES):
        param = parameter(weights)
        options = {"lr": lr, "capturable": capturable, "master_weights": master, "execution": engine, **mode}
        optimizer = optimizer_for([param], **options)
        run(optimizer, [param], [[g] for g in gradients(weights.shape, 3, 1)])
        assert_same_bits(param.detach(), weights, str(mode))
        assert optimizer.state[param]["exp_avg"].any()
        if has_master(dtype, {"master_weights": master}):
            master_weight = master_of(param, optimizer.state[param])
            assert_same_bits(torch.nan_to_num(master_weight), torch.nan_to_num(weights.float()))
            assert torch.equal(torch.isnan(master_weight), torch.isnan(weights))


@by_engine
@by_mode
def test_empty_tensors_have_scales_of_one(engine: str, mode: str) -> None:
    shapes = [(0,), (3, 0, 2), (5,)]
    params = [parameter(normal(shape, 1)) for shape in shapes]
    optimizer = optimizer_for(params, execution=engine, **MODES[mode])
    run(optimizer, params, [[normal(shape, step) for shape in shapes] for step in range(2)])
    for param in params[:2]:
        state = optimizer.state[param]
        assert int(state["step"]) == 2 and state["exp_avg"].shape == param.shape
        if "fused_single_pass" in MODES[mode]:
            assert state["cautious_scale"].item() == 1.0 and state["bound_scale"].item() == 1.0
    before = params[2].detach().clone()
    assert not torch.equal(before, normal(shapes[2], 1))
    optimizer.load_state_dict(optimizer.state_dict())
    run(optimizer, params, [[normal(shape, 3) for shape in shapes]])
    assert not torch.equal(params[2].detach(), before)
    alone = [parameter(normal((0,), 1))]  # nothing but empty tensors
    run(optimizer_for(alone, execution=engine, **MODES[mode]), alone, [[torch.zeros(0)]])


EXTREME = (0.0, 1e-45, -1e-45, 1e-38, -1e-30, 1e-20, -1e-10, 1.0, -1e10, 1e20, -1e25, 1e30, 3.3e38, -3.3e38)


@by_engine
@by_dtype
def test_extreme_gradients_keep_everything_finite(engine: str, dtype: torch.dtype) -> None:
    """Each gradient after each other one, in all modes. A finite weight never becomes non-finite."""
    rows = [torch.tensor(EXTREME).roll(shift).to(dtype) for shift in range(0, len(EXTREME), 3)]
    rows = [torch.where(torch.isfinite(row), row, 60000.0) for row in rows]
    for (name, mode), master in itertools.product(OPTION_SETS.items(), MASTER_MODES):
        param, state = train(
            normal((len(EXTREME),), 1), rows, dtype=dtype, execution=engine, **{**mode, "master_weights": master}
        )
        assert torch.isfinite(param).all(), (name, master)
        for key, value in state.items():
            assert torch.isfinite(value).all(), (name, master, key)


@by_engine
@by_dtype
def test_moments_at_the_edge_of_the_range_stay_there(engine: str, dtype: torch.dtype) -> None:
    """β₁·max + (1−β₁)·max is max, but with these β₁ FP32 rounds it to one bit more, which one noise value in 65536
    (BF16) or one in 8192 (FP16) would carry over to infinity. Stored are 2¹⁸ such moments."""
    numel = 1 << 18 if dtype in SIXTEEN_BIT else 64
    for beta1, mode in itertools.product((0.024, 0.029, 0.057, 0.067, 0.9), ({}, {"buffer": 1})):
        param = parameter(torch.ones(numel), dtype)
        optimizer = optimizer_for([param], betas=(beta1, 0.999), cautious=False, bound=False, execution=engine, **mode)
        run(optimizer, [param], [[torch.zeros(numel)]])
        optimizer.state[param]["exp_avg"].fill_(LARGEST[dtype])
        param.grad = torch.full_like(param, LARGEST[dtype])
        optimizer.step()
        assert torch.isfinite(param).all()
        moment = optimizer.state[param]["exp_avg"].double()
        assert (moment <= LARGEST[dtype]).all() and (moment >= LARGEST[dtype] * (1 - 2.0**-7)).all()


@by_engine
@by_dtype
@by_master
def test_weights_at_the_edge_of_the_range_stay_finite(engine: str, dtype: torch.dtype, master: str) -> None:
    """±max pushed outwards stays ±max, for any rounding; pushed inwards it comes back."""
    largest = LARGEST[dtype]
    weights = torch.tensor([largest, -largest] * 600, dtype=torch.float64).to(dtype)
    for rounding, options in itertools.product(
        (True, False), ({"bound": False}, {"bound_type": "coordinate"}, {"bound_type": "radial"}, {"buffer": 1})
    ):
        outwards = -torch.ones_like(weights) * weights.sign()
        param, state = train(
            weights,
            [outwards] * 4,
            lr=16.0,
            weight_decay=0.0,
            cautious=False,
            master_weights=master,
            execution=engine,
            stochastic_rounding=rounding,
            **options,
        )
        assert_same_bits(param, weights)
        if has_master(dtype, {"master_weights": master}):
            cap = MASTER_CAP_BF16 if dtype == torch.bfloat16 else LARGEST[torch.float32]
            assert (master_of(param, state).abs().double() <= cap).all()
    param, _ = train(weights, [outwards], lr=1e-3, weight_decay=100.0, master_weights=master, execution=engine)
    assert (param.abs().double() < largest).all() and torch.isfinite(param).all()


def test_fp16_masters_go_beyond_the_range_of_the_weight() -> None:
    """The FP32 master of an FP16 weight is not FP16: the weight is its nearest value, 65504."""
    param, state = train(
        torch.full((4,), 65504.0),
        [-torch.ones(4)] * 5,
        dtype=torch.float16,
        master_weights="semi",
        lr=1e3,
        bound=False,
        weight_decay=0,
    )
    assert (state["master_param"] > 65504).all() and (param == 65504).all()


@by_engine
@by_dtype
@by_master
def test_weights_that_are_not_finite_stay_as_they_are(engine: str, dtype: torch.dtype, master: str) -> None:
    """To the bit, whichever way they are pushed; for the others they are zeros in the tensor's norm."""
    special = [math.inf, -math.inf, math.nan]
    for options in ({}, {"buffer": 1}, {"fused_single_pass": True}, {"bound_type": "coordinate"}):
        weights = torch.cat([torch.tensor(special * 3), normal((40,), 1)]).to(dtype)
        grads = [torch.cat([torch.tensor([1.0] * 3 + [-1.0] * 3 + [0.0] * 3), g]) for g in gradients((40,), 3, 2)]
        grads = [grad.to(dtype) for grad in grads]
        options = {**options, "master_weights": master, "lr": 2e-2, "weight_decay": 0.5}
        reference = Reference(weights, **options)
        param = parameter(weights)
        optimizer = optimizer_for([param], execution=engine, **options)
        for grad in grads:
            reference.step(grad)
        run(optimizer, [param], [[grad] for grad in grads])
        state = optimizer.state[param]
        stored, expected = bits(param)[:9], bits(weights)[:9]
        if dtype == torch.bfloat16 and master != "none":
            expected = torch.where(torch.isnan(weights[:9]), 0x7FC0, expected)
        assert torch.equal(stored, expected)
        tolerance = {torch.bfloat16: 0.02, torch.float16: 2e-3}.get(dtype, LARGEST_ERROR)
        if master == "full" and dtype in SIXTEEN_BIT:
            tolerance = LARGEST_ERROR
        assert largest_error(master_of(param.detach(), state)[9:], reference.weight[9:]) < tolerance
        for value in state.values():
            assert torch.isfinite(value).all() or (value.dtype == torch.float32 and value.shape == weights.shape)


BAD = (math.nan, math.inf, -math.inf)


@by_engine
@by_dtype
@pytest.mark.parametrize("name", OPTION_SETS)
def test_bad_gradient_elements_count_as_zero(engine: str, dtype: torch.dtype, name: str) -> None:
    """Bit for bit the same step as with zeros in their place, in weights and state."""
    options = {"execution": engine, **OPTION_SETS[name]}
    good = gradients((64,), 4, 1, dtype=dtype)
    bad = [grad.clone() for grad in good]
    for grad, other in zip(good, bad):
        grad[3:12:4] = 0.0
        other[3:12:4] = torch.tensor(BAD).to(dtype)
    results = [train(normal((64,), 2), grads, dtype=dtype, **options) for grads in (good, bad)]
    assert_same_bits(results[1][0], results[0][0])
    for key, value in results[0][1].items():
        assert_same_bits(results[1][1][key], value, key)


def test_bad_gradient_elements_are_counted_and_whole_tensors_warned_of_once() -> None:
    params = [parameter(torch.ones(4)), parameter(torch.ones(2, 3))]
    optimizer = optimizer_for(params)
    run(optimizer, params, [[torch.tensor([1.0, math.nan, math.inf, -math.inf]), torch.ones(2, 3)]])
    assert optimizer.nonfinite_grad_count() == 3
    with pytest.warns(RuntimeWarning, match="every element") as caught:
        run(optimizer, params, [[torch.ones(4), torch.full((2, 3), math.nan)]] * 3)
    assert len([w for w in caught if "every element" in str(w.message)]) == 1
    assert optimizer.nonfinite_grad_count() == 3 + 18


@by_engine
@by_dtype
def test_zero_gradients_move_nothing_but_decay(engine: str, dtype: torch.dtype) -> None:
    """0/0 must not happen, also where eps vanishes in the storage format or is 0."""
    weights = torch.tensor([1.0, -2.0, 0.0, -0.0]).to(dtype)
    for (name, mode), master in itertools.product(OPTION_SETS.items(), MASTER_MODES):
        options = {**mode, "master_weights": master, "weight_decay": 0.0, "execution": engine}
        param, state = train(weights, [torch.zeros(4)] * 3, dtype=dtype, **options)
        assert torch.equal(param, weights), name
        assert not any(state[key].any() for key in ("exp_avg", "exp_avg_sq") if key in state)
    param, _ = train(weights, [torch.zeros(4)], dtype=dtype, lr=0.5, weight_decay=1.0, execution=engine)
    assert param.tolist() == [0.5, -1.0, 0.0, 0.0]


@by_engine
def test_the_variance_saturates_at_its_formats_largest_value(engine: str) -> None:
    """30000² leaves FP16, 1e25² leaves FP32, 1e160² leaves FP64; saturated, v is used as stored and decays again."""
    for dtype, master, size in (
        (torch.float16, "none", 3e4),
        (torch.float16, "full", 6e4),
        (torch.bfloat16, "none", 1e25),
        (torch.float32, "none", 1e25),
        (torch.float64, "none", 1e160),
    ):
        stored = torch.float32 if master == "full" else dtype
        grads = [torch.full((8,), size * (-1) ** k, dtype=torch.float64).to(dtype) for k in range(6)]
        options = {"master_weights": master, "execution": engine, "lr": 1e-2}
        param, state = train(torch.ones(8), grads, dtype=dtype, **options)
        reference = Reference(torch.ones(8).to(dtype), **options)
        for grad in grads:
            reference.step(grad)
        assert reference.exp_avg_sq is not None
        assert state["exp_avg_sq"].dtype == stored and torch.isfinite(state["exp_avg_sq"]).all()
        if master == "none":
            assert (state["exp_avg_sq"].double() == LARGEST[stored]).all()
        tolerance = {torch.bfloat16: 0.02, torch.float16: 2e-3}.get(dtype, LARGEST_ERROR)
        assert largest_error(master_of(param, state), reference.weight) < tolerance
        more, later = train(torch.ones(8), [*grads, *[torch.zeros(8)] * 400], dtype=dtype, **options)
        assert (later["exp_avg_sq"] < state["exp_avg_sq"]).all() and torch.isfinite(more).all()


@by_engine
@by_dtype
@by_mode
def test_maximize_is_the_step_of_the_negated_gradient(engine: str, dtype: torch.dtype, mode: str) -> None:
    weights, grads = normal((70,), 1), gradients((70,), 4, 2, dtype=dtype)
    up, up_state = train(weights, grads, dtype=dtype, execution=engine, maximize=True, **MODES[mode])
    down, down_state = train(weights, [-grad for grad in grads], dtype=dtype, execution=engine, **MODES[mode])
    assert_same_bits(up, down)
    for key, value in down_state.items():
        assert_same_bits(up_state[key], value, key)
    assert not torch.equal(up, parameter(weights, dtype).detach())


@by_engine
@by_dtype
def test_lr_as_a_tensor_is_the_same_step(engine: str, dtype: torch.dtype) -> None:
    """Of any dtype and of one-element shape; read anew at every step."""
    weights, grads = normal((70,), 1), gradients((70,), 4, 2, dtype=dtype)
    for mode in MODES.values():
        plain, _ = train(weights, grads, dtype=dtype, execution=engine, lr=2.0**-7, **mode)
        for lr in (torch.tensor(2.0**-7), torch.tensor([2.0**-7], dtype=torch.float64)):
            other, _ = train(weights, grads, dtype=dtype, execution=engine, lr=lr, **mode)
            assert_same_bits(other, plain, str(mode))
    lr = torch.tensor(2.0**-7)
    param = parameter(weights, dtype)
    optimizer = optimizer_for([param], lr=lr, execution=engine)
    run(optimizer, [param], [[grads[0]]])
    lr.fill_(0.0)
    before = param.detach().clone()
    run(optimizer, [param], [[grads[1]]])
    assert_same_bits(param.detach(), before)


@pytest.mark.parametrize("buffer", [1, 2])
def test_complex_parameters_are_refused_with_nothing_changed(buffer: int) -> None:
    weights = torch.randn(6, dtype=torch.complex64)
    first, second = parameter(normal((3,), 1)), torch.nn.Parameter(weights.clone())
    first.grad, second.grad = torch.ones(3), torch.ones_like(weights)
    before = first.detach().clone()
    with pytest.raises(TypeError, match="complex"):
        optimizer_for([first, second], buffer=buffer).step()
    assert_same_bits(first.detach(), before)
    assert torch.equal(second.detach(), weights)


@by_engine
def test_seeds_are_not_truncated_and_repeat(engine: str) -> None:
    seeds = [0, 1, 2**31 - 1, 2**31, 1 + 2**32, 1 + 2**40, 1 + 2**62, 2**63 - 1]
    weights, grads = torch.ones(4000), [torch.ones(4000)]
    options = {"dtype": torch.bfloat16, "lr": 1.3e-3, "bound": False, "execution": engine}
    results = [train(weights, grads, seed=seed, **options)[0] for seed in seeds]
    for one, other in itertools.combinations(results, 2):
        assert not torch.equal(one, other)
    for seed, result in zip(seeds, results):
        assert_same_bits(train(weights, grads, seed=seed, **options)[0], result)


# ---- what rounding does in the long run ------------------------------------------------------------------------------


def _variance_after_shrinking_gradients(dtype: torch.dtype, **options: Any) -> list[float]:
    """Mean of exp_avg_sq at the end of 400 steps of N(0, 1) gradients and along 3600 of a tenth of them."""
    param = parameter(torch.ones(4096), dtype)
    optimizer = optimizer_for([param], lr=1e-5, **options)
    noise = [normal((4096,), seed).to(torch.bfloat16) for seed in range(16)]
    means = []
    for step in range(4000):
        grad = noise[step * 7 % 16].roll(step * 97)
        param.grad = (grad if step < 400 else 0.1 * grad).to(dtype)
        optimizer.step()
        if step + 1 in (400, 1200, 2400, 4000):
            means.append(optimizer.state[param]["exp_avg_sq"].double().mean().item())
    return means


@pytest.mark.slow
def test_bf16_variance_follows_shrinking_gradients() -> None:
    """β₂ = 0.999: to 1 % with stochastic rounding. To nearest it cannot fall, and ends ten times too large."""
    exact = _variance_after_shrinking_gradients(torch.float32)
    assert exact[-1] < 0.1 * exact[0]
    stochastic = _variance_after_shrinking_gradients(torch.bfloat16)
    for got, want in zip(stochastic, exact):
        assert abs(got / want - 1) < 0.01, (stochastic, exact)
    to_nearest = _variance_after_shrinking_gradients(torch.bfloat16, stochastic_rounding=False)
    assert to_nearest[-1] > 5 * exact[-1], (to_nearest, exact)


@by_engine
@by_sixteen_bit
def test_the_variance_decays_by_beta2_without_gradients(engine: str, dtype: torch.dtype) -> None:
    """0.1 % a step is less than half a spacing of BF16. 0.999⁷⁰⁰ = 0.4964; five deviations of the mean are 1 %."""
    param = parameter(torch.ones(4096), dtype)
    optimizer = optimizer_for([param], lr=0.0, execution=engine)
    param.grad = torch.zeros_like(param)
    optimizer.step()
    optimizer.state[param]["exp_avg_sq"].fill_(1.0)
    for _ in range(700):
        optimizer.step()
    assert abs(optimizer.state[param]["exp_avg_sq"].double().mean().item() / 0.999**700 - 1) < 0.01


@by_engine
@by_sixteen_bit
def test_weights_move_on_average_by_updates_far_below_their_spacing(engine: str, dtype: torch.dtype) -> None:
    """Weights at 1.0 and 40 updates of 2e-5, far below half a spacing; to nearest nothing moves."""
    ways = {"exact": {"dtype": torch.float32}, "stochastic": {}, "nearest": {"stochastic_rounding": False}}
    moved = {}
    for name, way in ways.items():
        options = {"dtype": dtype, "lr": 2e-5, "weight_decay": 0.0, "execution": engine, **way}
        param, _ = train(torch.ones(32768), [torch.ones(32768)] * 40, **options)
        moved[name] = 1 - param.double().mean().item()
    assert (
        abs(moved["stochastic"] / moved["exact"] - 1) < 0.06
    )  # five deviations in BF16: √(40·p(1−p)/32768), p ≈ 0.005
    assert moved["nearest"] == 0.0


def test_the_compiled_form_of_tanh_is_exact_to_three_ulp_and_below_one() -> None:
    x = torch.cat((torch.linspace(-25, 25, 200_001), torch.logspace(-30, 0, 20_001), torch.tensor([0.0, -90.0, 1e30])))
    expected, got = torch.tanh(x.double()), rule.tanh_by_ratio(x.clone())
    assert ((got.double() - expected).abs() <= 3 * 2.0**-23 * expected.abs()).all()
    assert got.abs().max() < 1.0


LIMITS = (5e-13, 1e-4, 1.0, 8.0, 65504.0, torch.finfo(torch.bfloat16).max, torch.finfo(torch.float32).max)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=dtype_name)
def test_the_compiled_forms_of_limits_and_of_the_gate_are_the_eager_ones(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over all magnitudes, with zeros of both signs; for the gate also pairs of which one is zero."""
    sizes = torch.tensor([0.0, 1e-45, 1e-38, 1e-30, 3e-13, *LIMITS, math.inf], dtype=dtype)
    values = torch.cat((sizes, -sizes))
    finite = values[values.isfinite()]
    first, second = torch.cartesian_prod(finite, finite).unbind(1)
    forms: list[list[Tensor]] = []
    for compiling in (False, True):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda compiling=compiling: compiling)
        forms.append([rule.saturate_(values.clone(), limit) for limit in LIMITS])
        forms[-1] += [rule.at_most_(sizes.clone(), limit) for limit in LIMITS]
        forms[-1] += [rule.at_least_(sizes.clone(), limit) for limit in LIMITS]
        forms[-1].append(rule.cautious_mask_(first.clone(), second.clone()))
    for eager, compiled in zip(*forms):
        assert_same_bits(compiled, eager)
