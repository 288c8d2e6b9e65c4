"""``block_variance=True``: a variance of rank 1 in every tile of 64 rows and columns, by the closed form in float64."""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import pytest
import torch
from runs import assert_same_state, state_of, through_a_file
from support import ENGINES, RankOne, Reference, exact_step, grid_above, grid_below, largest_error, normal, parameter
from torch import Tensor, nn

from luminav import LuminaV, rule
from luminav.state import conform

TILES: dict[str, Any] = {"buffer": 1, "block_variance": True}
BF16_MAX = torch.finfo(torch.bfloat16).max
SHAPES = ((1, 4096), (2, 8192), (63, 128), (64, 64), (65, 192), (130, 64), (16, 8, 4, 8), (70, 2, 1, 64))
"""A single row, panels one row short and one too long, three panels, and the weights of convolutions."""
by_engine = pytest.mark.parametrize("engine", ENGINES)
by_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def kept_of(state: dict[str, Tensor]) -> RankOne:
    """The means of tiles as they are stored, float64."""
    return RankOne(state["exp_avg_sq"].double(), state["exp_avg_sq_col"].double())


def uneven(shape: tuple[int, ...], seed: int) -> Tensor:
    """Gradients whose size differs from row to row and from column to column, and elements on their own."""
    values = normal(shape, seed).view(shape[0], -1)
    values *= torch.logspace(-3, 1, shape[0]).roll(seed)[:, None] * torch.logspace(-2, 2, values.shape[1])
    return values.view(shape)


def assert_rounded(stored: RankOne, exact: RankOne) -> None:
    """Each BF16 number is a neighbour of the exact one, which FP32 knows to its last bits."""
    for rounded, wanted in zip(stored, exact, strict=True):
        low, high = (grid_below(wanted * (1 - 1e-6), torch.bfloat16), grid_above(wanted * (1 + 1e-6), torch.bfloat16))
        assert ((low <= rounded) & (rounded <= high)).all()


# ---- the rule --------------------------------------------------------------------------------------------------------


@by_engine
@by_shape
@pytest.mark.parametrize(
    "options",
    [{}, {"fused_single_pass": True}, {"cautious": False, "bound_type": "coordinate"}, {"capturable": True}],
    ids=str,
)
def test_steps_are_those_of_the_closed_form(options: dict[str, Any], shape: tuple[int, ...], engine: str) -> None:
    """FP32, step by step from what is stored: weights within FP32's rounding, means neighbours of the exact ones."""
    options = {"lr": 1e-2, **TILES, **options}
    param = parameter(normal(shape, 0, scale=0.1), torch.float32)
    optimizer = LuminaV([param], execution=engine, **options)
    m, kept, scales = torch.zeros(shape), RankOne.zeros(shape), None
    for step in range(1, 5):
        weight, grad = param.detach().clone(), uneven(shape, step)
        param.grad = grad.clone()
        optimizer.step()
        exact = exact_step(weight, m, kept, grad, step, torch.float32, kept=scales, **options)
        assert largest_error(param, exact.weight) < 4e-7
        state = optimizer.state[param]
        assert isinstance(exact.exp_avg_sq, RankOne)
        assert_rounded(kept_of(state), exact.exp_avg_sq)
        m, kept = state["exp_avg"].clone(), kept_of(state)
        if options.get("fused_single_pass"):
            scales = (state["cautious_scale"].item(), state["bound_scale"].item())


@by_shape
def test_fp64_follows_the_closed_form_without_rounding(shape: tuple[int, ...]) -> None:
    param = parameter(normal(shape, 0, scale=0.1), torch.float64)
    reference = Reference(param, **TILES)
    optimizer = LuminaV([param], **TILES)
    for step in range(1, 6):
        param.grad = uneven(shape, step).double()
        reference.step(param.grad)
        optimizer.step()
    state = optimizer.state[param]
    assert largest_error(param, reference.weight) < 1e-8  # scales are rounded to FP32
    assert isinstance(reference.exp_avg_sq, RankOne)
    for key, wanted in zip(("exp_avg_sq", "exp_avg_sq_col"), reference.exp_avg_sq, strict=True):
        assert state[key].dtype == torch.float64
        torch.testing.assert_close(state[key], wanted, rtol=1e-12, atol=0.0)


def test_a_gradient_of_rank_one_has_its_own_variance_in_every_element() -> None:
    """|g_ij| = a_i·b_j makes (g − m)² of rank 1, which the means keep exactly: the steps are those of two buffers."""
    rows, columns = normal((130,), 1).double().exp(), normal((128,), 2).double().exp()
    results = []
    for options in (TILES, {"buffer": 2}):
        param = parameter(normal((130, 128), 0, scale=0.1), torch.float64)
        optimizer = LuminaV([param], lr=1e-2, bound=False, **options)
        for step in range(5):
            param.grad = torch.outer(rows, columns) * (1.0 + step)
            optimizer.step()
        results.append(param.detach())
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


@by_engine
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-18, 1e4, 1e18, 3e38])
def test_zero_tiny_and_huge_tiles(size: float, dtype: torch.dtype, engine: str) -> None:
    """One tile among ordinary ones; NaN and infinite elements count as zero. Nothing becomes non-finite."""
    shape = (70, 192)
    param = parameter(normal(shape, 0, scale=0.1), dtype)
    optimizer = LuminaV([param], lr=1e-2, execution=engine, **TILES)
    size = min(size, torch.finfo(dtype).max)
    for step in range(1, 4):
        before = param.detach().clone()
        grad = normal(shape, step)
        grad[:64, 64:128] = size * normal((64, 64), 10 + step).sign()
        grad[3, 5], grad[66, 190], grad[10, 70] = math.nan, math.inf, -math.inf
        param.grad = grad.to(dtype)
        optimizer.step()
        assert param.isfinite().all()
        state = optimizer.state[param]
        for means in kept_of(state):
            assert means.isfinite().all() and (means >= 0).all() and means.max() <= BF16_MAX
    tile = (slice(0, 64), slice(64, 128))
    if size == 0.0:
        assert not state["exp_avg_sq"][:64, 1].any() and not state["exp_avg_sq_col"][0, 64:128].any()
    if size >= 1e38:
        assert (state["exp_avg_sq"][:64, 1] == BF16_MAX).all()
    moved = (param.detach().double() - before.double()).abs()
    assert moved.max() <= 2 * 1e-2 + 1e-3 and (size == 0.0 or moved[tile].max() > 0)


def test_one_huge_row_leaves_the_other_tiles_alone() -> None:
    """A row that saturates is divided by itself; tiles beside and below it are what they are without it."""
    results = []
    for huge in (False, True):
        param = parameter(normal((128, 128), 0, scale=0.1), torch.float32)
        optimizer = LuminaV([param], cautious=False, bound=False, **TILES)
        for step in range(3):
            param.grad = normal((128, 128), 1 + step)
            if huge:
                param.grad[5, :64] = 3e38
            optimizer.step()
        results.append(param.detach())
    ordinary, other = results
    assert torch.equal(ordinary[64:], other[64:]) and torch.equal(ordinary[:, 64:], other[:, 64:])
    assert other.isfinite().all() and not torch.equal(ordinary[:64, :64], other[:64, :64])


def test_factors_do_not_leave_the_range() -> None:
    """√(c/μ) from means at the ends of FP32, and of states that no run has: a mean of 0 beside columns that are not."""
    for r, c in itertools.product((0.0, 1e-45, 1e-30, 1.0, BF16_MAX), repeat=2):
        means = torch.full((1, 64, 1), r), torch.full((1, 1, 64), c)
        root = means[0].sqrt().unsqueeze(3) * rule.column_factors(*means).unsqueeze(1)
        assert not root.isnan().any()
        if r == c and r >= 1e-30:
            torch.testing.assert_close(root.double(), torch.full_like(root, r).double().sqrt(), rtol=1e-6, atol=0.0)


# ---- storage ---------------------------------------------------------------------------------------------------------


@by_engine
def test_means_decay_when_gradients_stop(engine: str) -> None:
    """With β₁ = 0 nothing is added, and v should shrink by β₂ in each of 300 steps. To nearest it stays as it is.

    A rounding to one of two neighbours δ apart has a deviation of at most δ/2; below 1 δ is 2⁻⁸. So the sum of 300 is
    within √300·2⁻⁹ = 0.034, the mean of 4096 independent ones within 5.3e-4, and 6 deviations come once in 5e8 runs.
    """
    values = {}
    for stochastic in (True, False):
        param = parameter(torch.zeros(256, 1024), torch.float32)
        optimizer = LuminaV(
            [param], betas=(0.0, 0.999), execution=engine, stochastic_rounding=stochastic, bound=False, **TILES
        )
        param.grad = torch.zeros_like(param)
        optimizer.step()
        for key in ("exp_avg_sq", "exp_avg_sq_col"):
            optimizer.state[param][key].fill_(1.0)
        for _ in range(300):
            optimizer.step()
        values[stochastic] = kept_of(optimizer.state[param])
    for means in values[True]:
        assert means.numel() == 4096 and abs(means.mean() - 0.999**300) < 6 * 5.3e-4
    assert all((means == 1.0).all() for means in values[False])


def noise(first: int, second: int, index: int, multiplier: int) -> int:
    """The documented hash of an element below 2³², in unbounded integers; see ``test_rounding.py``."""
    word = 1 << 32
    x = (index + first) * 0x7FEB352D % word
    x ^= x >> 16
    x = (x ^ second % word) * 0x846CA68B % word
    x ^= x >> 15
    return x * multiplier % word >> 16


@by_engine
def test_noise_is_that_of_the_first_element_in_streams_of_their_own(engine: str) -> None:
    """Row means: their block's first element, third stream. Column means: their panel's first row, fourth stream."""
    from luminav.rounding import noise_key

    shape, seed = (130, 128), 7
    params = [parameter(torch.zeros(number), torch.float32) for number in (5, 3)]
    params.append(parameter(torch.zeros(shape), torch.float32))
    optimizer = LuminaV(params, betas=(0.0, 0.75), seed=seed, execution=engine, **TILES)
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    state = optimizer.state[params[2]]
    rows, columns = normal((130, 2), 1).exp().bfloat16(), normal((3, 128), 2).exp().bfloat16()
    state["exp_avg_sq"].copy_(rows)
    state["exp_avg_sq_col"].copy_(columns)
    optimizer.step()
    key = noise_key(seed, 2, 2)
    assert isinstance(key.first, int) and isinstance(key.second, int)
    for stored, before, multiplier, stride in (
        (state["exp_avg_sq"], rows, 0x27D4EB2D, lambda i, j: i * 128 + j * 64),
        (state["exp_avg_sq_col"], columns, 0xC4F2152B, lambda i, j: i * 64 * 128 + j),
    ):
        exact = before.float() * 0.75
        drawn = [[noise(key.first, key.second, stride(i, j), multiplier) for j in range(exact.shape[1])]
                 for i in range(exact.shape[0])]  # fmt: skip
        patterns = (exact.view(torch.int32) + torch.tensor(drawn, dtype=torch.int32)) & -65536
        assert torch.equal(stored.float(), patterns.view(torch.float32))


@by_engine
def test_a_skipped_step_leaves_the_means(engine: str) -> None:
    param = parameter(normal((65, 64), 0), torch.float32)
    optimizer: Any = LuminaV([param], execution=engine, capturable=True, **TILES)
    for step, found in enumerate((0.0, 1.0, 0.0)):
        before = {key: value.clone() for key, value in optimizer.state[param].items()}
        param.grad = normal((65, 64), step)
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(1.0), torch.tensor(found)
        optimizer.step()
        after = optimizer.state[param]
        same = [key for key in before if torch.equal(before[key], after[key])]
        assert len(same) == (len(after) if found else 0)


# ---- files and states of another form --------------------------------------------------------------------------------


def former(entry: dict[str, Tensor], param: Tensor) -> dict[str, Tensor]:
    """State with one FP32 variance for 64 elements."""
    entry = {key: value for key, value in entry.items() if key != "exp_avg_sq_col"}
    return entry | {"exp_avg_sq": torch.ones(len(param), param[0].numel() // 64)}


def test_one_variance_per_block_is_refused() -> None:
    """In a file, in a state that was unpickled, and where one half was left out when a file was read."""
    param = parameter(normal((64, 128), 0), torch.bfloat16)
    optimizer = LuminaV([param], **TILES)
    param.grad = normal((64, 128), 1, dtype=torch.bfloat16)
    optimizer.step()
    message = "one 'exp_avg_sq' for every 64 elements, but no 'exp_avg_sq_col' beside it.* start the state"
    before = state_of(optimizer, [param])
    file = through_a_file(optimizer.state_dict())
    file["state"][0] = former(file["state"][0], param)
    with pytest.raises(ValueError, match=rf"state\[0\] has {message}"):
        optimizer.load_state_dict(file)
    file = through_a_file(optimizer.state_dict())
    file["state"][0]["exp_avg_sq_col"].zero_()
    with pytest.raises(ValueError, match=rf"state\[0\] has {message}"):
        optimizer.load_state_dict(file)
    assert_same_state(state_of(optimizer, [param]), before)
    optimizer.state[param] = former(dict(optimizer.state[param]), param)
    for options in (TILES, {"buffer": 2, "block_variance": False}):
        optimizer.param_groups[0].update(options)
        weight = param.detach().clone()
        with pytest.raises(ValueError, match=f"a parameter's state has {message}"):
            optimizer.step()
        assert torch.equal(param, weight)


@pytest.mark.parametrize("stochastic", [True, False])
def test_column_means_that_round_to_zero_are_no_missing_half(stochastic: bool) -> None:
    """One row's gradient, so small that a 64th of its square is below BF16: the state's own file loads."""
    param = parameter(normal((64, 64), 0), torch.float32)
    optimizer = LuminaV([param], **TILES, stochastic_rounding=stochastic)
    param.grad = torch.zeros(64, 64)
    param.grad[0] = 1e-18  # (1−β₂)·1e-36 in the row's mean, and 1.6e-41 in each column's
    optimizer.step()
    optimizer.state[param]["exp_avg_sq_col"].zero_()  # as some noise would have it
    assert optimizer.state[param]["exp_avg_sq"].any()
    before = state_of(optimizer, [param])
    optimizer.load_state_dict(through_a_file(optimizer.state_dict()))
    assert_same_state(state_of(optimizer, [param]), before)


@pytest.mark.parametrize("key", ["exp_avg_sq", "exp_avg_sq_col"])
def test_means_of_another_shape_are_refused(key: str) -> None:
    param = parameter(normal((64, 128), 0), torch.bfloat16)
    optimizer = LuminaV([param], **TILES)
    param.grad = normal((64, 128), 1, dtype=torch.bfloat16)
    optimizer.step()
    file = through_a_file(optimizer.state_dict())
    file["state"][0][key] = torch.ones(3, 5)
    with pytest.raises(ValueError, match=rf"'{key}' has shape \(3, 5\)"):
        optimizer.load_state_dict(file)


@pytest.mark.parametrize("key", ["exp_avg_sq", "exp_avg_sq_col"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_means_that_no_run_saves_are_refused(value: float, key: str) -> None:
    param = parameter(normal((64, 128), 0), torch.bfloat16)
    optimizer = LuminaV([param], **TILES)
    param.grad = normal((64, 128), 1, dtype=torch.bfloat16)
    optimizer.step()
    file, before = through_a_file(optimizer.state_dict()), state_of(optimizer, [param])
    file["state"][0][key].view(-1)[70] = value
    with pytest.raises(ValueError, match=rf"state\[0\]: '{key}' must be finite and >= 0, but holds {value:g}"):
        optimizer.load_state_dict(file)
    assert_same_state(state_of(optimizer, [param]), before)


@pytest.mark.parametrize("shape", [(130, 128), (1, 4096), (65, 64)], ids=str)
def test_a_switch_and_back_keeps_the_variance(shape: tuple[int, ...]) -> None:
    """A variance of rank 1 per tile spreads to every element, and these have its means."""
    from luminav.hyperparameters import Options

    param = nn.Parameter(normal(shape, 0).double())
    optimizer = LuminaV([param], **TILES)
    param.grad = uneven(shape, 1).double()
    optimizer.step()
    state = copy.copy(optimizer.state[param])
    before = kept_of(state)
    conform(state, param, Options.from_group({"buffer": 2}), step_on_device=False)
    torch.testing.assert_close(state["exp_avg_sq"], before.product().view(shape), rtol=1e-12, atol=0.0)
    conform(state, param, Options.from_group(TILES), step_on_device=False)
    for means, wanted in zip(kept_of(state), before, strict=True):
        torch.testing.assert_close(means, wanted, rtol=1e-12, atol=0.0)
