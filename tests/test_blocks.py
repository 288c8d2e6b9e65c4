"""State kept in blocks and tiles: 8-bit codes against their grid written out, tiles' variances by closed form.

The expected grids come from this file: with n values a binade, value c of a block is (1 + (c mod n)/n) · 2^(scale − 127
− binades + c//n) from c = n on, and c/n · 2^(scale − 127 − binades + 1) below. For exp_avg n is 32 and binades 3, for
exp_avg_sq 16 and 15.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import assert_same_state, state_of, through_a_file
from support import ENGINES, RankOne, dtype_name, exact_step, grid_above, grid_below, normal, optimizer_for, parameter
from torch import Tensor, nn

from luminav import LuminaV
from luminav.blocks import (
    EXP_AVG_FORMAT,
    EXP_AVG_SQ_FORMAT,
    LARGEST_SCALE,
    CodeFormat,
    block_shape,
    decode,
    encode,
    in_blocks,
)
from luminav.hyperparameters import Options
from luminav.state import conform


class Grid(NamedTuple):
    """What is expected of a format of codes."""

    top: int
    per_binade: int
    binades: int
    signed: bool


GRIDS = {EXP_AVG_FORMAT: Grid(127, 32, 3, True), EXP_AVG_SQ_FORMAT: Grid(255, 16, 15, False)}
FORMATS = {"exp_avg": EXP_AVG_FORMAT, "exp_avg_sq": EXP_AVG_SQ_FORMAT}
NOISES = 1 << 19
CODED: dict[str, Any] = {"state_bits": 8}
SHARED: dict[str, Any] = {"buffer": 1, "block_variance": True}
MODES: Mapping[str, dict[str, Any]] = {
    "codes": CODED,
    "codes-one_pass": CODED | {"fused_single_pass": True},
    "codes-single": CODED | {"buffer": 1},
    "codes-semi": CODED | {"master_weights": "semi"},
    "codes-nearest": CODED | {"stochastic_rounding": False},
    "shared": SHARED,
    "shared-one_pass": SHARED | {"fused_single_pass": True},
    "shared-nearest": SHARED | {"stochastic_rounding": False},
    "shared-full": SHARED | {"master_weights": "full"},
    "both": CODED | SHARED,
    "both-one_pass": CODED | SHARED | {"fused_single_pass": True},
}
SHAPES = ((64, 128), (70, 64), (3, 32, 64), (100, 50), (65,), ())
"""The first three are kept in blocks, the last panel of the second has 6 rows; (100, 50) has odd rows."""
by_form = pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
by_engine = pytest.mark.parametrize("engine", ENGINES)


def grid(scale: int, form: CodeFormat) -> Tensor:
    """The magnitudes of a block, float64, in the order of their codes."""
    top, n, binades, _ = GRIDS[form]
    codes = torch.arange(top + 1, dtype=torch.float64)
    values = (1 + codes.remainder(n) / n) * torch.exp2(scale - 127 - binades + codes.div(n).floor())
    values[:n] = codes[:n] / n * 2.0 ** (scale - 127 - binades + 1)
    return values


def smallest_scale(largest: float, form: CodeFormat) -> int:
    """The lowest scale whose grid reaches up to `largest`, and whose smallest value FP32 has as a normal number."""
    lowest = next(s for s in range(1, 255) if grid(s, form)[1].item() >= 2.0**-126)
    return next(s for s in range(lowest, LARGEST_SCALE + 1) if grid(s, form)[-1].item() >= largest)


def widened(codes: Tensor, scales: Tensor, form: CodeFormat) -> Tensor:
    """What codes stand for, in float64."""
    blocks = codes.reshape(-1, 64)
    grids = torch.stack([grid(scale, form) for scale in scales.flatten().tolist()])
    magnitude = grids.gather(1, (blocks & GRIDS[form].top).long())
    sign = torch.where((blocks & 0x80 > 0) & GRIDS[form].signed, -1.0, 1.0)
    return (magnitude * sign).reshape(codes.shape)


# ---- the codes -----------------------------------------------------------------------------------------------------


@by_form
@pytest.mark.parametrize("scale", [19, 20, 100, 127, 200, LARGEST_SCALE])
def test_every_code_stands_for_its_value_and_is_kept(scale: int, form: CodeFormat) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(4, 64).clone()
    codes[:, 0] = GRIDS[form].top  # so that each block needs this scale
    scales = torch.full((4,), scale, dtype=torch.uint8)
    value = decode(codes, scales, form)
    assert torch.equal(value.double(), widened(codes, scales, form))
    for noise in (None, torch.zeros(4, 64, dtype=torch.int32), torch.full((4, 64), NOISES - 1, dtype=torch.int32)):
        again, same = encode(value, form, noise)
        assert torch.equal(again, codes) and torch.equal(same, scales)


@by_form
@pytest.mark.parametrize("place", [0.0, 2**-17, 0.25, 0.5 + 2**-10, 1 - 2**-12])
@pytest.mark.parametrize("code", [0, 1, 15, 16, 60, 126])
def test_the_share_of_noises_that_round_up_is_the_place(code: int, place: float, form: CodeFormat) -> None:
    """All 2¹⁹ noises at once, so nothing is left to chance: floor or ceiling of place·2¹⁹ of them round up."""
    scale = 120
    low, high = grid(scale, form)[code].item(), grid(scale, form)[code + 1].item()
    value = torch.full((NOISES // 32, 64), low + place * (high - low))
    value[:, 32:] = grid(scale, form)[-1].item()
    noise = torch.arange(NOISES, dtype=torch.int32).view(-1, 32).repeat(1, 2)
    codes, scales = encode(value, form, noise)
    assert (scales == scale).all()
    rounded = codes[:, :32].long()
    exact = (value[0, 0].double().item() - low) / (high - low)
    assert set(rounded.unique().tolist()) <= {code, code + 1}
    assert abs(int((rounded == code + 1).sum()) - exact * NOISES) <= 1


LARGEST_CODED = 1.9375 * 2.0 ** (LARGEST_SCALE - 127)
finite = st.floats(-LARGEST_CODED, LARGEST_CODED, width=32, allow_nan=False)


@settings(max_examples=300, derandomize=True, database=None, deadline=None)
@given(st.data(), st.sampled_from(list(GRIDS)), st.one_of(st.none(), st.integers(0, NOISES - 1)))
def test_blocks_of_any_values(data: st.DataObject, form: CodeFormat, noise: int | None) -> None:
    """Each value becomes a neighbour on the lowest grid that holds the block: edges, zeros, huge and tiny values."""
    few = data.draw(st.lists(finite, min_size=1, max_size=8))
    block = torch.tensor([few[i % len(few)] for i in range(64)], dtype=torch.float32)
    block = block if GRIDS[form].signed else block.abs()
    drawn = None if noise is None else torch.full((1, 64), noise, dtype=torch.int32)
    codes, scales = encode(block.view(1, 64), form, drawn)
    read = widened(codes, scales, form)[0]
    assert torch.equal(read, decode(codes, scales, form)[0].double())
    scale = int(scales)
    assert scale == smallest_scale(block.abs().max().item(), form)
    values, magnitude = grid(scale, form), block.double().abs()
    above = values[torch.searchsorted(values, magnitude).clamp_max(GRIDS[form].top)]
    below = values[(torch.searchsorted(values, magnitude, right=True) - 1).clamp_min(0)]
    assert ((read.abs() == above) | (read.abs() == below)).all()
    assert torch.equal(torch.signbit(read), torch.signbit(block) & GRIDS[form].signed)
    if noise is None:
        assert ((read.abs() - magnitude).abs() <= (above - below) / 2).all()


@by_form
@pytest.mark.parametrize("largest", [LARGEST_CODED * 1.02, 2.0**121, torch.finfo(torch.float32).max])
def test_a_block_beyond_the_largest_scale_is_divided_until_it_fits(largest: float, form: CodeFormat) -> None:
    """By one power of two for the whole block, so that its values keep their proportions."""
    share = torch.linspace(1, 0, 64, dtype=torch.float64)
    block = (share * largest).float().view(1, 64)
    codes, scales = encode(block, form, None)
    read = widened(codes, scales, form)[0]
    factor = 2.0 ** round(math.log2(read[0].item() / largest))
    assert int(scales) == LARGEST_SCALE and 2.0**-13 <= factor < 1
    step = torch.maximum(block[0].double() * factor / GRIDS[form].per_binade / 2, grid(LARGEST_SCALE, form)[1] / 2)
    assert ((read - block[0].double() * factor).abs() <= step).all()


@by_form
def test_zeros_stay_zeros(form: CodeFormat) -> None:
    codes, scales = encode(torch.zeros(2, 64), form, torch.full((2, 64), NOISES - 1, dtype=torch.int32))
    assert not codes.any() and torch.equal(decode(codes, scales, form), torch.zeros(2, 64))


# ---- steps ---------------------------------------------------------------------------------------------------------


def new_params(dtype: torch.dtype) -> list[nn.Parameter]:
    return [parameter(normal(shape, number, scale=0.1), dtype) for number, shape in enumerate(SHAPES)]


def take_steps(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: range) -> None:
    """Gradients whose size changes from block to block, with an all-zero block, and non-finite elements in one step."""
    for step in steps:
        for number, param in enumerate(params):
            grad = normal(param.shape, 1000 * step + number, scale=0.3)
            if in_blocks(param):
                blocks = grad.view(-1, 64)
                blocks *= torch.logspace(-4, 2, len(blocks))[:, None]
                blocks[1] = 0.0
                blocks[2, 5] = {1: math.nan, 2: -math.inf}.get(step, 0.5)
            param.grad = grad.to(param.dtype)
        optimizer.step()
        optimizer.zero_grad()


def moments(param: Tensor, state: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | RankOne | None]:
    """exp_avg and exp_avg_sq per element or tile, float64, from whatever form they are kept in."""
    found: list[Any] = []
    for key, form in FORMATS.items():
        value = state.get(key)
        if value is None:
            found.append(None)
        elif value.dtype == torch.uint8:
            found.append(widened(value, state[f"{key}_scale"], form))
        elif value.shape != param.shape:
            found.append(RankOne(value.double(), state["exp_avg_sq_col"].double()))
        else:
            found.append(value.double())
    assert found[0] is not None
    return found[0], found[1]


@by_engine
@pytest.mark.parametrize("mode", ["codes", "codes-nearest", "codes-single", "shared", "shared-nearest", "both"])
def test_steps_follow_the_rule_from_what_is_stored(mode: str, engine: str) -> None:
    """FP32 weights: each step's weights within FP32 of float64, each stored moment a neighbour of the exact one."""
    options = {"lr": 1e-2, **MODES[mode]}
    params = new_params(torch.float32)
    optimizer = LuminaV(params, execution=engine, **options)
    for step in range(1, 5):
        before = [(param.detach().clone(), copy.deepcopy(optimizer.state.get(param, {}))) for param in params]
        take_steps(optimizer, params, range(step, step + 1))
        for number, (param, (weight, state)) in enumerate(zip(params, before, strict=True)):
            zero = torch.zeros(param.shape, dtype=torch.float64)
            shared = options.get("block_variance", False)
            start = RankOne.zeros(param.shape) if shared and in_blocks(param) else zero
            m, v = moments(param, state) if state else (zero, start)
            grad = gradient_of(step, number, param)
            rule = options | ({} if in_blocks(param) or not shared else {"buffer": 2, "block_variance": False})
            exact = exact_step(weight, m, v, grad, step, torch.float32, **rule)
            scale = weight.abs().max().item() + 1e-2
            assert (param.detach().double() - exact.weight).abs().max().item() <= 4e-7 * scale, (step, number)
            kept = optimizer.state[param]
            for key, wanted, read in zip(
                ("exp_avg", "exp_avg_sq"), (exact.exp_avg, exact.exp_avg_sq), moments(param, kept), strict=True
            ):
                if read is None:
                    assert wanted is None
                    continue
                assert wanted is not None
                if isinstance(wanted, RankOne):
                    for rounded, unrounded in zip(read, wanted, strict=True):
                        assert_neighbours(rounded, unrounded, nearest="nearest" in mode)
                    continue
                error = (read - wanted).abs()
                if kept[key].dtype == torch.uint8:  # the step between codes
                    _, n, binades, _ = GRIDS[FORMATS[key]]
                    small = torch.exp2(kept[f"{key}_scale"].double() - 127 - binades + 1) / n * 1.0001
                    small = small.reshape(-1, 1).expand(-1, 64).reshape(param.shape)
                    assert (error <= torch.maximum(wanted.abs() / n * 1.0001, small)).all(), (step, number, key)
                else:
                    blocks = wanted.reshape(-1, 64) if in_blocks(param) else wanted.reshape(1, -1)
                    largest = blocks.abs().amax(1, keepdim=True).expand(blocks.shape).reshape(wanted.shape)
                    assert (error <= 4e-7 * largest).all(), (step, number, key)


def assert_neighbours(rounded: Tensor, exact: Tensor, *, nearest: bool) -> None:
    """BF16 numbers next to others, which are known to FP32's last bits; or the nearest ones."""
    low, high = (grid_below(exact * (1 - 1e-6), torch.bfloat16), grid_above(exact * (1 + 1e-6), torch.bfloat16))
    assert ((low <= rounded) & (rounded <= high)).all()
    if nearest:
        assert ((rounded - exact).abs() <= exact * (2.0**-8 + 1e-6)).all()


def gradient_of(step: int, number: int, param: Tensor) -> Tensor:
    """What :func:`take_steps` gives parameter `number` in a step."""

    class Catch(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            caught.extend(p.grad.clone() for p in self.param_groups[0]["params"])

    caught: list[Tensor] = []
    take_steps(Catch(params := new_params(param.dtype), lr=0.0), params, range(step, step + 1))
    return caught[number]


@by_engine
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=dtype_name)
@pytest.mark.parametrize("mode", MODES)
def test_what_is_kept(mode: str, dtype: torch.dtype, engine: str) -> None:
    """Dtypes and shapes of the state; at most 1.07 bytes a moment in codes, 0.1 for shared variances."""
    options = MODES[mode]
    params = new_params(dtype)
    optimizer = LuminaV(params, execution=engine, **options)
    take_steps(optimizer, params, range(2))
    for param in params:
        state = optimizer.state[param]
        coded = options.get("state_bits") == 8 and in_blocks(param)
        shared = options.get("block_variance", False) and in_blocks(param)
        moment = torch.float32 if options.get("master_weights") == "full" and dtype != torch.float32 else dtype
        assert state["exp_avg"].dtype == (torch.uint8 if coded else moment) and state["exp_avg"].shape == param.shape
        assert ("exp_avg_scale" in state) == coded
        assert ("exp_avg_sq_scale" in state) == (coded and options.get("buffer", 2) == 2)
        if shared:
            rows, columns = state["exp_avg_sq"], state["exp_avg_sq_col"]
            assert rows.dtype == columns.dtype == torch.bfloat16 and rows.shape == block_shape(param)
            assert columns.shape == (math.ceil(len(param) / 64), param[0].numel())
            assert len(param) < 64 or rows.nbytes + columns.nbytes <= 0.1 * param.numel()
        assert ("exp_avg_sq_col" in state) == shared
        for key in ("exp_avg", "exp_avg_sq"):
            if f"{key}_scale" in state:
                assert state[f"{key}_scale"].shape == block_shape(param)
                assert state[key].nbytes + state[f"{key}_scale"].nbytes <= 1.07 * param.numel()


@by_engine
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=dtype_name)
@pytest.mark.parametrize("mode", MODES)
def test_engines_agree_and_resumed_runs_too(mode: str, dtype: torch.dtype, engine: str) -> None:
    """Against the reference engine, whole tensors beside one another or not; and saved, loaded in a new optimizer."""
    results = []
    for execution, stop in (("single", False), (engine, True)):
        params = new_params(dtype)
        optimizer = optimizer_for(params, execution=execution, lr=1e-2, **MODES[mode])
        take_steps(optimizer, params, range(3))
        if stop:
            file = through_a_file(optimizer.state_dict())
            params = [nn.Parameter(param.detach().clone()) for param in params]
            optimizer = LuminaV(params, execution=execution)
            optimizer.load_state_dict(file)
        take_steps(optimizer, params, range(3, 6))
        results.append(state_of(optimizer, params))
    assert_same_state(*results)


@by_engine
@pytest.mark.parametrize("layout", ["transposed", "channels_last"])
@pytest.mark.parametrize("mode", ["codes", "both-one_pass"])
def test_layouts_change_no_bit(mode: str, layout: str, engine: str) -> None:
    shape = (8, 16, 8, 8) if layout == "channels_last" else (80, 64)
    results = []
    for strides in ("contiguous", layout):
        params = [parameter(normal(shape, 0, scale=0.1), torch.bfloat16, strides)]
        assert in_blocks(params[0])
        optimizer = LuminaV(params, execution=engine, lr=1e-2, **MODES[mode])
        for step in range(3):
            params[0].grad = normal(shape, step, dtype=torch.bfloat16)
            optimizer.step()
        results.append({key: value.contiguous() for key, value in state_of(optimizer, params).items()})
    assert_same_state(*results)


PIECED = [(64, 128), (1, 4096), (2, 3, 704), (2, 8, 8, 48), (2, 2, 1056), (4, 33, 64), (200, 64), (130, 2, 3, 64)]


@by_engine
@pytest.mark.parametrize("shape", PIECED)
@pytest.mark.parametrize("mode", ["codes", "shared", "both"])
def test_pieces_change_no_bit(mode: str, shape: tuple[int, ...], engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks and panels stay whole however small the pieces are; rows too large for one are cut between blocks.

    Of (2, 2, 1056) the inner rows end within a block, so that only two of them together can be a piece.
    """
    results = []
    for limit in (1 << 18, 100):
        monkeypatch.setattr("luminav.engines.bundle.CPU_PIECE", limit)
        params = [parameter(normal(shape, n, scale=0.1), torch.bfloat16) for n in range(2)]
        assert in_blocks(params[0])
        options = {"bound": False, "cautious": False, **MODES[mode]}  # no sums over pieces
        optimizer = LuminaV(params, lr=1e-2, execution=engine, **options)
        take_steps(optimizer, params, range(3))
        results.append(state_of(optimizer, params))
    assert_same_state(*results)


# ---- switching forms -----------------------------------------------------------------------------------------------


def switched(start: dict[str, Any], then: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """A parameter, its state after some steps, and that state as another mode keeps it."""
    param = parameter(normal((64, 128), 0, scale=0.1), torch.float32)
    optimizer = LuminaV([param], **start)
    take_steps(optimizer, [param], range(3))
    before = {key: value.clone() for key, value in optimizer.state[param].items()}
    after = dict(before)
    conform(after, param, Options.from_group(then), step_on_device=False)
    return param, before, after


def test_codes_are_widened_when_the_group_wants_16_bits() -> None:
    param, before, after = switched(CODED, {})
    assert after["exp_avg"].dtype == torch.float32 and "exp_avg_scale" not in after
    for old, new in zip(moments(param, before), moments(param, after), strict=True):
        assert old is not None and new is not None and torch.equal(old, new)


def test_moments_are_coded_when_the_group_wants_8_bits() -> None:
    _param, before, after = switched({}, CODED)
    assert after["exp_avg"].dtype == torch.uint8 == after["exp_avg_sq"].dtype
    for key, form in FORMATS.items():
        codes, scales = encode(before[key].view(-1, 64), form, None)
        assert torch.equal(scales.view(64, 2), after[f"{key}_scale"])
        assert torch.equal(codes.view(64, 128), after[key])


def test_a_variance_of_tiles_has_the_means_and_spreads_again() -> None:
    param, before, after = switched({}, SHARED)
    wanted = RankOne.zeros(param.shape).moved(before["exp_avg_sq"].double(), 0.0, math.inf)
    for key, means in (("exp_avg_sq", wanted.rows), ("exp_avg_sq_col", wanted.columns)):
        assert_neighbours(after[key].double(), means, nearest=True)
    param, before, after = switched(SHARED, {})
    assert after["exp_avg_sq"].shape == param.shape and "exp_avg_sq_col" not in after
    kept = moments(param, before)[1]
    assert isinstance(kept, RankOne)
    torch.testing.assert_close(after["exp_avg_sq"].double(), kept.product(), rtol=1e-6, atol=0.0)


SWITCHES = [
    (CODED, {}), ({}, CODED), ({}, SHARED), (SHARED, {}), (CODED, SHARED), (SHARED, CODED), (CODED, CODED | SHARED),
    (CODED | SHARED, CODED), (CODED | SHARED, {}), ({}, CODED | SHARED), (SHARED, CODED | SHARED),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=dtype_name)
@pytest.mark.parametrize(("start", "then"), SWITCHES, ids=str)
def test_a_switched_group_is_saved_in_the_form_that_it_says(
    start: dict[str, Any], then: dict[str, Any], dtype: torch.dtype
) -> None:
    """A parameter without a gradient since the switch still has the old form; the live state stays as it is."""
    params = new_params(dtype)
    optimizer = LuminaV(params, lr=1e-2, **start)
    take_steps(optimizer, params, range(3))
    plain = {"state_bits": 16, "buffer": 2, "block_variance": False}
    optimizer.param_groups[0].update(plain | then)
    before = state_of(optimizer, params)
    file = through_a_file(optimizer.state_dict())
    assert_same_state(state_of(optimizer, params), before)
    copies = [nn.Parameter(param.detach().clone()) for param in params]
    reader = LuminaV(copies)
    reader.load_state_dict(file)
    for one, its in ((optimizer, params), (reader, copies)):
        take_steps(one, its, range(3, 5))
    assert_same_state(state_of(reader, copies), state_of(optimizer, params))


@pytest.mark.parametrize(("start", "then"), [({}, SHARED), (SHARED, {})], ids=str)
def test_fp64_moments_keep_their_digits_and_range(start: dict[str, Any], then: dict[str, Any]) -> None:
    """A variance beyond FP32 is neither infinite nor rounded to FP32 on its way."""
    param = parameter(normal((64, 64), 0), torch.float64)
    optimizer = LuminaV([param], **start)
    param.grad = normal((64, 64), 1).double() * 1e30
    optimizer.step()
    after = dict(optimizer.state[param])
    conform(after, param, Options.from_group(then), step_on_device=False)
    means = optimizer.state[param]["exp_avg_sq"].reshape(64, -1).mean(1)
    torch.testing.assert_close(after["exp_avg_sq"].reshape(64, -1).mean(1), means, rtol=1e-14, atol=0.0)
    assert means.max() > torch.finfo(torch.float32).max


@pytest.mark.parametrize("mode", ["codes", "both", "codes-one_pass"])
def test_codes_cross_to_an_fp64_model_and_back(mode: str) -> None:
    """FP64 parameters keep no codes; a BF16 model's file goes into one all the same, its values unchanged."""
    params = new_params(torch.bfloat16)
    optimizer = LuminaV(params, **MODES[mode])
    take_steps(optimizer, params, range(3))
    wide = [nn.Parameter(param.detach().double()) for param in params]
    reader = LuminaV(wide)
    reader.load_state_dict(through_a_file(optimizer.state_dict()))
    file = through_a_file(reader.state_dict())
    for number, (param, copy_) in enumerate(zip(params, wide, strict=True)):
        assert "exp_avg_scale" not in file["state"][number] and file["state"][number]["exp_avg"].dtype == torch.float64
        for old, new in zip(moments(param, optimizer.state[param]), moments(copy_, file["state"][number]), strict=True):
            pairs = zip(old, new, strict=True) if isinstance(old, RankOne) else [(old, new)]
            assert old is None or all(torch.equal(one, other) for one, other in pairs)
    narrow = LuminaV(params)
    narrow.load_state_dict(file)
    take_steps(narrow, params, range(3, 4))
    assert narrow.state[params[0]]["exp_avg"].dtype == torch.uint8


@pytest.mark.parametrize(
    ("start", "then", "message"),
    [
        (CODED, {}, r"'exp_avg' must be 8-bit codes.* got torch.bfloat16.* construct it with state_bits=8"),
        ({}, CODED, r"'exp_avg' must be a floating-point tensor.* got torch.uint8.* construct it with state_bits=16"),
    ],
    ids=["8 to 16", "16 to 8"],
)
def test_codes_that_were_made_numbers_are_refused(
    start: dict[str, Any], then: dict[str, Any], message: str, tmp_path: Any
) -> None:
    """``torch.distributed.checkpoint`` reads codes into 16-bit state as the numbers 0 to 255, and the other way."""
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    params = new_params(torch.bfloat16)
    optimizer = LuminaV(params, **start)
    take_steps(optimizer, params, range(2))
    dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    reader = LuminaV(params, **then)
    take_steps(reader, params, range(2))
    template = {"optimizer": reader.state_dict()}
    partial = dcp.DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(template, checkpoint_id=tmp_path, no_dist=True, planner=partial)
    before = state_of(reader, params)
    with pytest.raises(ValueError, match=rf"state\[0\]: {message}"):
        reader.load_state_dict(template["optimizer"])
    assert_same_state(state_of(reader, params), before)


@pytest.mark.parametrize("mode", ["codes", "shared", "both", "codes-semi"])
def test_state_of_another_shape_is_refused(mode: str) -> None:
    """Even where the old shape is that of one element for each block of the new one."""
    param = parameter(normal((64, 64), 0), torch.bfloat16)
    optimizer = LuminaV([param], **MODES[mode])
    take_steps(optimizer, [param], range(1))
    param.data = torch.ones(64, 4096, dtype=torch.bfloat16)
    param.grad = torch.ones_like(param)
    with pytest.raises(ValueError, match=r"has shape \(64, 4096\), its state \(64, (64|1)\)"):
        optimizer.step()
    assert (param == 1).all()


def test_an_older_file_is_coded_when_it_is_loaded() -> None:
    """A file from before there was `state_bits` says nothing of it: the optimizer's own setting holds."""
    params = new_params(torch.bfloat16)
    old = LuminaV(params)
    take_steps(old, params, range(2))
    file = old.state_dict()
    for group in file["param_groups"]:
        del group["state_bits"], group["block_variance"]
    new = LuminaV(params, **CODED)
    new.load_state_dict(through_a_file(file))
    take_steps(new, params, range(2, 3))
    assert new.state[params[0]]["exp_avg"].dtype == torch.uint8
    single = LuminaV(params, **SHARED)
    single.load_state_dict(through_a_file(file))
    assert not single.param_groups[0]["block_variance"] and single.param_groups[0]["buffer"] == 2


# ---- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"state_bits": 4}, r"state_bits must be one of 8, 16, got 4\."),
        ({"block_variance": True}, r"block_variance=True needs buffer=1"),
        ({"state_bits": 8, "master_weights": "full"}, r'Use master_weights="semi"'),
        ({"state_bits": 8, "fsdp_sync": True}, r"state_bits=8 cannot be combined with fsdp_sync=True"),
        ({"fsdp_sync": True, **SHARED}, r"block_variance=True cannot be combined with fsdp_sync=True"),
    ],
)
def test_what_excludes_each_other_is_refused(options: dict[str, Any], message: str) -> None:
    param = nn.Parameter(torch.zeros(64, 64))
    with pytest.raises(ValueError, match=message):
        LuminaV([param], **options)
    optimizer = LuminaV([param])
    optimizer.param_groups[0].update(options)
    param.grad = torch.ones_like(param)
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    assert not param.detach().any() and not optimizer.state.get(param)


def test_codes_without_scales_are_refused() -> None:
    params = new_params(torch.bfloat16)
    optimizer = LuminaV(params, **CODED)
    take_steps(optimizer, params, range(1))
    file = optimizer.state_dict()
    file["state"][0] = {key: value for key, value in file["state"][0].items() if key != "exp_avg_scale"}
    with pytest.raises(ValueError, match="has 8-bit codes as 'exp_avg', but no 'exp_avg_scale'"):
        LuminaV(params, **CODED).load_state_dict(file)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=dtype_name)
@pytest.mark.parametrize("mode", MODES)
def test_what_the_wildest_run_saves_is_loaded(mode: str, dtype: torch.dtype) -> None:
    """Gradients at both ends of their range, NaN and infinite ones, then none that is not 0 for a while."""
    param = parameter(torch.ones(64, 64), dtype)
    optimizer = LuminaV([param], **MODES[mode])
    largest = torch.finfo(dtype).max
    wild = torch.tensor([largest, -largest, largest, math.nan, math.inf, -math.inf, 0.0, 1e-7], dtype=dtype)
    for step in range(8):
        param.grad = wild.roll(step % 3).repeat(512).view(64, 64) * (step < 6)
        optimizer.step()
    reader = LuminaV([param])
    reader.load_state_dict(through_a_file(optimizer.state_dict()))
    assert_same_state(state_of(reader, [param]), state_of(optimizer, [param]))
    assert param.isfinite().all()


@pytest.mark.parametrize(("key", "value"), [("exp_avg", 7), ("exp_avg", 243), ("exp_avg_sq", 18), ("exp_avg_sq", 255)])
def test_impossible_scales_are_refused(key: str, value: int) -> None:
    """Where there are codes to read by them: what has never been written has scale 0."""
    params = new_params(torch.bfloat16)
    optimizer = LuminaV(params, **CODED)
    take_steps(optimizer, params, range(2))
    file = through_a_file(optimizer.state_dict())
    file["state"][0][f"{key}_scale"][1, 1] = value
    before = state_of(optimizer, params)
    with pytest.raises(ValueError, match=rf"'{key}_scale' must be in \[(8|19), 242\], but holds {value}. Is the file"):
        optimizer.load_state_dict(file)
    assert_same_state(state_of(optimizer, params), before)
    file["state"][0][key].view(-1, 64)[3] = 0
    optimizer.load_state_dict(file)
