"""The Triton engine against `single`: every mode, dtype and layout, odd shapes and odd values, step by step."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import interpreted
import pytest
import torch
import triton
import triton.language as tl
import triton_runs
from support import (
    LAYOUTS,
    MODES,
    SIXTEEN_BIT,
    VARIATIONS,
    assert_same_bits,
    dtype_name,
    master_of,
    normal,
    optimizer_for,
    out_of_memory,
    parameter,
)
from torch import Tensor
from triton_runs import DEVICE, INTERPRETED, Race, by_dtype, by_sixteen_bit, grad_row, weights

from luminav import rule
from luminav.engines import Batch, Scales, TensorStep, choose_engine
from luminav.engines.single import SingleEngine
from luminav.engines.triton import launch, tables
from luminav.engines.triton.kinds import Kind
from luminav.engines.triton.memory import tensor_of
from luminav.hyperparameters import Options
from luminav.rounding import noise_key

pytestmark = triton_runs.MARKS


@pytest.fixture(autouse=True)
def _small_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    triton_runs.small_programs(monkeypatch)


STORAGES = [
    (torch.float32, "none"),
    *((dtype, master) for dtype in SIXTEEN_BIT for master in ("none", "semi", "full")),
]
by_storage = pytest.mark.parametrize(("dtype", "master"), STORAGES, ids=lambda value: str(value).removeprefix("torch."))
CORE_MODES: dict[str, dict[str, Any]] = {
    "exact": {},
    "one_pass": {"fused_single_pass": True},
    "single": {"buffer": 1},
    "free": {"cautious": False, "bound": False},
}
"""One mode for each order of launches."""
by_core_mode = pytest.mark.parametrize("mode", CORE_MODES)


def test_the_engine_asked_for_is_the_one_that_runs() -> None:
    """Otherwise the races would be of `single` or `foreach` against `single`."""
    engine = choose_engine("triton", DEVICE)
    assert engine.name == "triton"
    assert choose_engine("auto", DEVICE).name == ("foreach" if INTERPRETED else "triton")
    race = Race(weights([(33,)], torch.bfloat16))
    race.step(grad_row(weights([(33,)], torch.bfloat16), 0))
    assert race.replay is not None


# ---- modes -----------------------------------------------------------------------------------------------------------


FEW_MODES = ("dual-gated-radial", "dual-ungated-coordinate", "one_pass-gated-coordinate", "single-gated-radial")
CASES = [
    pytest.param(mode, dtype, master, id=f"{mode}-{dtype_name(dtype)}-{master}")
    for mode in MODES
    for dtype, master in STORAGES
    if master == "none" or mode in FEW_MODES or not INTERPRETED  # the interpreter is slow
]


@pytest.mark.parametrize(("mode", "dtype", "master"), CASES)
def test_every_mode(mode: str, dtype: torch.dtype, master: str) -> None:
    """Three steps: one-pass mode takes an exact one and two with kept scales. One tensor aligned, one of odd length."""
    makers = weights([(16, 9), (67,)], dtype)
    race = Race(makers, lr=8e-4, master_weights=master, **MODES[mode])
    for step in range(3 if "one_pass" in mode else 2):
        race.step(grad_row(makers, step))
    assert race.replay is not None and int(race.optimizer.state[race.params[0]]["step"]) == step + 1


BLOCK_SHAPES = [(80, 64), (67,), (1, 8192), (63, 192), (130, 2, 128), (600, 1024), (64, 64)]
BLOCK_MODES: dict[str, dict[str, Any]] = {
    "codes": {"state_bits": 8},
    "codes-one_pass-semi": {"state_bits": 8, "fused_single_pass": True, "master_weights": "semi"},
    "codes-single-nearest": {"state_bits": 8, "buffer": 1, "stochastic_rounding": False},
    "shared-full": {"buffer": 1, "block_variance": True, "master_weights": "full"},
    "both-one_pass": {"state_bits": 8, "buffer": 1, "block_variance": True, "fused_single_pass": True},
}


@by_dtype
@pytest.mark.parametrize("mode", BLOCK_MODES)
def test_state_in_blocks(mode: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """8-bit codes and variances of tiles: a last program with few of its rows, an all-zero row and a huge one."""
    if INTERPRETED:
        interpreted.small_programs(1024, 2, monkeypatch.setattr)
    makers = weights([(80, 64), (67,), (33, 128)] if INTERPRETED else BLOCK_SHAPES, dtype)
    race = Race(makers, lr=8e-4, **BLOCK_MODES[mode])
    for step in range(3 if "one_pass" in mode else 2):
        grads = grad_row(makers, step)
        assert grads[0] is not None
        grads[0][0] = 0.0
        grads[0][5] *= 1e4
        grads[0][7, 3] = float("nan")
        race.step(grads)
    coded = race.optimizer.state[race.params[0]]["exp_avg"].dtype == torch.uint8
    assert race.replay is not None and coded == mode.startswith(("codes", "both"))


@by_core_mode
@pytest.mark.parametrize("master", ["semi", "full"])
def test_split_and_whole_masters_give_the_same_bits(mode: str, master: str) -> None:
    """Weights, masters and moments, non-finite weights among them; on the same engine nothing at all may differ."""
    makers = weights([(16, 9), (67,)], torch.bfloat16)
    runs = []
    for split in (True, False):
        params = [make(DEVICE) for make in makers]
        special = torch.tensor([0x7F80, -0x80, 0x7FC0], dtype=torch.int16)  # ±inf, and NaN as it is stored
        params[0].data.view(-1)[:3] = special.view(torch.bfloat16).to(DEVICE)
        options = {"lr": 3e-3, "master_weights": master, "split_master_weights": split, **CORE_MODES[mode]}
        optimizer = optimizer_for(params, execution="triton", **options)
        for step in range(4):
            for param, grad in zip(params, grad_row(makers, step), strict=True):
                assert grad is not None
                param.grad = grad.to(DEVICE)
            optimizer.step()
        runs.append((params, [optimizer.state[param] for param in params]))
    for number, (param, state, other, expected) in enumerate(zip(*runs[0], *runs[1], strict=True)):
        assert_same_bits(param, other, f"weight {number}")
        assert_same_bits(master_of(param, state), expected["master_param"], f"master {number}")
        for key in expected.keys() - {"master_param"}:
            assert_same_bits(state[key], expected[key], f"{key} {number}")
        assert (
            state.keys() ^ expected.keys() == {"master_remainder", "master_param"} and state["master_remainder"].any()
        )


@by_dtype
@pytest.mark.parametrize("name", VARIATIONS)
def test_every_option(name: str, dtype: torch.dtype) -> None:
    makers = weights([(96,)], dtype)
    race = Race(makers, **VARIATIONS[name])
    for step in range(2):
        race.step(grad_row(makers, step))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=dtype_name)
@by_core_mode
def test_groups_differ_in_every_number(mode: str, dtype: torch.dtype) -> None:
    """Tensors of several groups share a launch; each has its own numbers."""
    makers = weights([(33,), (48,), (7,), (40,)], dtype)
    overrides: list[dict[str, Any]] = [
        {},
        {"lr": 3e-3, "betas": (0.5, 0.9), "weight_decay": 0.0, "seed": 2**63 - 1, "cautious_clamp_min": 0.1},
        {"tau": 3.0, "eps": 1e-2, "bound_ratio": 1e-3, "seed": 0x7FF0000000000001, "alpha_ss": 2.0, "ema_decay": 0.3},
        {"maximize": True, "bound": False, "lr": torch.tensor(2e-3)},
    ]
    race = Race(makers, lambda ps: [{"params": [p], **o} for p, o in zip(ps, overrides)], **CORE_MODES[mode])
    for step in range(3):
        race.step(grad_row(makers, step))


@pytest.mark.parametrize("first", ["fused", "exact"])
def test_one_pass_groups_share_a_launch_with_others(first: str) -> None:
    """Without a gate, a one-pass group and one without scales have kernels in common, in either order of the groups."""
    makers = weights([(40,), (56,)], torch.float32)
    overrides: list[dict[str, Any]] = [{"fused_single_pass": True, "bound_ratio": 1e-4}, {"bound": False}]
    if first == "exact":
        overrides.reverse()
    race = Race(makers, lambda ps: [{"params": [p], **o} for p, o in zip(ps, overrides)], cautious=False, lr=1e-2)
    for step in range(4):
        race.step(grad_row(makers, step, 0.1**step))


def test_dtypes_mix_in_one_group() -> None:
    dtypes = [torch.bfloat16, torch.float32, torch.float16, torch.float64]
    makers = [weights([(50,)], dtype)[0] for dtype in dtypes]
    race = Race(makers, master_weights="semi")
    for step in range(3):
        race.step(grad_row(makers, step))


@by_core_mode
def test_capturable_and_learning_rates_on_the_device(mode: str) -> None:
    makers = weights([(33,), (5,)], torch.bfloat16)
    on_device = torch.tensor(8e-4, device=DEVICE)
    race = Race(makers, capturable=True, lr=8e-4, **CORE_MODES[mode])
    for group in race.optimizer.param_groups:
        group["lr"] = on_device
    for step in range(4):
        for group in race.reference.param_groups:
            group["lr"] = on_device.item()
        race.step(grad_row(makers, step))
        on_device.mul_(0.7)


# ---- shapes and layouts ----------------------------------------------------------------------------------------------


@by_storage
@by_core_mode
def test_shapes(mode: str, dtype: torch.dtype, master: str) -> None:
    """Nothing, one element, primes, powers of two and their neighbours, one program's elements and more."""
    whole = triton_runs.span()
    shapes: list[tuple[int, ...]] = [(), (1,), (2, 0, 3), (31,), (65,), (whole,), (whole + 1,), (2 * whole - 1,)]
    in_full = (("exact", torch.bfloat16, "none"), ("one_pass", torch.float16, "semi"))
    if INTERPRETED and (mode, dtype, master) not in in_full:
        shapes = [(0,), (whole + 3,)]
    makers = weights(shapes, dtype)
    race = Race(makers, master_weights=master, **CORE_MODES[mode])
    for step in range(2):
        race.step(grad_row(makers, step))
    steps = [int(race.optimizer.state[param]["step"]) for param in race.params]
    assert steps == [2] * len(shapes)


def test_many_tensors_of_one_program_between_longer_ones() -> None:
    """More than there are between two entries of the table that programs find their tensors by."""
    makers = weights([*[(3,)] * 66, (0,), (3 * triton_runs.span() + 1,), (2,)], torch.float32)
    Race(makers).step(grad_row(makers, 0))


@triton.jit
def _tensors_kernel(found, first_tensors, first_programs):
    pid = tl.program_id(0)
    tl.store(found + pid, tensor_of(pid, first_tensors, first_programs))


@pytest.mark.parametrize(
    "counts",
    [[1], [64], [65, 1], [1] * 130, [200, 1, 1, 62, 1], [1, 63, 64, 1, 128, 2], [1 + n * n % 9 for n in range(90)]],
    ids=lambda counts: f"{len(counts)}tensors{sum(counts)}programs",
)
def test_programs_find_their_tensors(counts: list[int]) -> None:
    firsts = [sum(counts[:n]) for n in range(len(counts))]
    table = tables.first_tensors_of(firsts, sum(counts))
    assert len(table) == -(-sum(counts) // 64) + 1
    found = torch.full((sum(counts),), -1, dtype=torch.int32, device=DEVICE)
    on_device = [torch.tensor(values, dtype=torch.int32, device=DEVICE) for values in (table, firsts)]
    _tensors_kernel[(sum(counts),)](found, *on_device)
    assert found.tolist() == [tensor for tensor, count in enumerate(counts) for _ in range(count)]


@pytest.mark.parametrize("eps", [1e-8, 1e-14])
def test_the_smallest_denominator_holds_where_eps_is_smaller(eps: float) -> None:
    """A kernel that cannot fall below it does not ask; gradients are so small that it decides the direction."""
    makers = weights([(64,)], torch.float32)
    race = Race(makers, eps=eps)
    for step in range(2):
        race.step(grad_row(makers, step, 1e-14))
    launches = race.replay._launches
    assert [kept.kind.floored for kept in launches] == [eps == 1e-14]


@by_dtype
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_keep_their_memory(layout: str, dtype: torch.dtype) -> None:
    """What the kernels cannot address goes another way, to the same result; the elements between stay as they are."""
    makers = weights([(3, 2, 4, 3), (9, 7), (40,)], dtype, [layout, layout, "contiguous"])
    race = Race(makers)
    wholes = [torch.empty(0, dtype=dtype, device=DEVICE).set_(p.detach().untyped_storage()) for p in race.params]
    outside = [torch.ones(whole.shape, dtype=torch.bool, device=DEVICE) for whole in wholes]
    for mask, param in zip(outside, race.params):
        mask.as_strided(param.shape, param.stride(), param.storage_offset()).fill_(False)
    before = [(p.stride(), p.data_ptr(), whole[mask].clone()) for p, whole, mask in zip(race.params, wholes, outside)]
    for step, grad_layout in enumerate(("contiguous", layout, "transposed")):
        race.step(grad_row(makers, step), grad_layout)
    for param, (stride, address, untouched), whole, mask in zip(race.params, before, wholes, outside):
        assert (param.stride(), param.data_ptr()) == (stride, address)
        assert_same_bits(whole[mask], untouched)


@by_dtype
def test_slices_of_a_flat_buffer(dtype: torch.dtype) -> None:
    """Addresses at every remainder, lengths that are multiples of 16 and not, gradients likewise, side by side."""
    lengths = [16, 16, 3, 32, 1, 48, 29]
    flat = {device: normal((sum(lengths) + 1,), 5, 0.02, dtype).to(device) for device in {"cpu", str(DEVICE)}}
    flat_twin = flat["cpu"].clone()

    def slices(buffer: Tensor) -> list[Tensor]:
        return list(buffer[1:].split(lengths))

    makers = [
        lambda device, n=n: torch.nn.Parameter(slices(flat_twin if device == "cpu" else flat[str(DEVICE)])[n])
        for n in range(7)
    ]
    race = Race(makers)
    grads = normal((sum(lengths) + 1,), 6, 1.0, dtype)
    for _ in range(2):
        for params, device in ((race.params, DEVICE), (race.twins, "cpu")):
            for param, grad in zip(params, slices(grads.to(device))):
                param.grad = grad
        race.optimizer.step()
        race.reference.step()
        race.compare()
    assert race.replay is not None
    assert_same_bits(flat[str(DEVICE)][:1].cpu(), flat_twin[:1])


# ---- values ----------------------------------------------------------------------------------------------------------


@by_storage
@by_core_mode
def test_nonfinite_gradients_count_as_zero_and_nonfinite_weights_stay(
    mode: str, dtype: torch.dtype, master: str
) -> None:
    makers = weights([(48,), (37,)], dtype)
    race = Race(makers, master_weights=master, **CORE_MODES[mode])
    special = torch.tensor([math.nan, math.inf, -math.inf, -math.nan], dtype=dtype)
    for _, param in race.pairs():
        param.data.view(-1)[7:11] = special.to(param.device)
    counted = 0
    for step in range(2):
        grads = grad_row(makers, step)
        for grad in grads:
            assert grad is not None
            grad[4:8] = special
            grad[20:24] = special
            counted += 8
        race.step(grads)
        for param in race.params:
            stored = param.detach().cpu()[7:11]
            assert torch.equal(torch.nan_to_num(stored), torch.nan_to_num(special)), stored
            assert param.isfinite().sum() == param.numel() - 4
    for optimizer in race.optimizers:
        assert optimizer.nonfinite_grad_count() == counted
    race.reference.param_groups[0]["lr"] = race.optimizer.param_groups[0]["lr"] = 1e-3  # the count survives a new plan
    race.optimizer._stepper._end_replay(race.replay)
    assert race.optimizer.nonfinite_grad_count() == counted


@by_storage
def test_values_at_the_ends_of_the_formats(dtype: torch.dtype, master: str) -> None:
    """Weights, moments and gradients from subnormal to the largest, ±0 too: all saturate, none becomes infinite."""
    info = torch.finfo(dtype)
    magnitudes = torch.tensor(
        [
            0.0,
            info.smallest_normal / 64,
            info.smallest_normal / 3,
            info.smallest_normal,
            1e-20,
            1e-6,
            1.0,
            info.max / 2,
            info.max,
        ],
        dtype=torch.float64,
    )
    ends = torch.cat((magnitudes, -magnitudes)).to(dtype)
    values = ends.repeat(5)
    makers = [lambda device: torch.nn.Parameter(values.clone().to(device))]
    for options in (
        {},
        {"cautious": False, "bound_type": "coordinate"},
        {"maximize": True, "weight_decay": 30.0, "lr": 0.1},
    ):
        race = Race(makers, master_weights=master, **options)
        for step in range(2):
            # tanh is exact to 1e-7 absolute only, which beside weights of nothing is all there is of a step.
            race.step([ends.repeat_interleave(5).roll(step)], slack=2e-7 * race.optimizer.defaults["lr"])
            for _, tensor, _ in race.states():
                assert tensor.isfinite().all()


@by_storage
def test_no_learning_rate_leaves_every_bit(dtype: torch.dtype, master: str) -> None:
    """−0 and NaN with their patterns; the moments move on."""
    patterns = torch.tensor([0x8000, 0x7FC0, 0x7E01, 0x7F81, 1, 0x8001, 0x7C00, 0xFC01, 0xFF80]).to(torch.int16)
    values = (
        torch.cat((patterns.view(dtype), normal((15,), 1, 0.02, dtype)))
        if dtype != torch.float32
        else torch.cat(((patterns.int() << 16).view(dtype), normal((15,), 1, 0.02)))
    )
    makers = [lambda device: torch.nn.Parameter(values.clone().to(device))]
    race = Race(makers, master_weights=master, lr=0.0)
    before = race.params[0].detach().clone()
    for step in range(2):
        race.set_grads([normal((24,), step).to(dtype)])
        race.optimizer.step()
    assert_same_bits(race.params[0], before)
    assert race.optimizer.state[race.params[0]]["exp_avg"].abs().sum() > 0


@by_sixteen_bit
def test_noise_follows_step_index_and_seed(dtype: torch.dtype) -> None:
    """A representable value is stored as it is; one between two takes either, as `single` does with the same noise."""
    makers = [lambda device: torch.nn.Parameter(torch.full((400,), 1.0, dtype=dtype, device=device)) for _ in range(2)]
    race = Race(makers, lr=1e-3, bound=False)
    race.step([torch.ones(400, dtype=dtype)] * 2)
    first, second = (param.detach().clone() for param in race.params)
    assert len(first.unique()) == 2 and not torch.equal(first, second)


def test_gradients_shrink_and_the_variance_follows() -> None:
    """Nearest rounding would leave a BF16 variance where it was; the moments' streams are in the comparison too."""
    makers = weights([(200,)], torch.bfloat16)
    race = Race(makers)
    for step in range(6):
        race.step(grad_row(makers, step, 10.0**-step))


# ---- gradients now and then, scalers ---------------------------------------------------------------------------------


@by_core_mode
def test_gradients_come_late_and_now_and_then(mode: str) -> None:
    """A tensor without a gradient rests, its step count too, and its neighbours do not notice."""
    makers = weights([(33,), (17,), (64,), (5,)], torch.bfloat16)
    race = Race(makers, **CORE_MODES[mode])
    present = ["1101", "1001", "1111", "0110", "0001", "0000", "1111"]
    for step, row in enumerate(present):
        race.step([grad if flag == "1" else None for grad, flag in zip(grad_row(makers, step), row)])
    counts = [sum(row[number] == "1" for row in present) for number in range(4)]
    assert [int(race.optimizer.state[param]["step"]) for param in race.params] == counts


@by_dtype
@by_core_mode
def test_a_loss_scalers_flags(mode: str, dtype: torch.dtype) -> None:
    """A scaled step equals the unscaled one; an overflowed one changes nothing. Unscaled steps lie between."""
    makers = weights([(33,), (48,)], dtype)
    race = Race(makers, **CORE_MODES[mode])
    for step, (scale, overflow) in enumerate([(None, 0), (256.0, 0), (256.0, 1), (64.0, 0), (None, 0), (2.0, 0)]):
        race.set_grads(
            [None if g is None else (g.float() * (scale or 1.0)).to(g.dtype) for g in grad_row(makers, step, 0.1)]
        )
        before = [tensor.clone() for _, tensor, _ in race.states()]
        if scale is not None:
            for optimizer, device in ((race.optimizer, DEVICE), (race.reference, "cpu")):
                optimizer.grad_scale = torch.tensor(scale, device=device)
                optimizer.found_inf = torch.tensor(float(overflow), device=device)
        for optimizer in race.optimizers:
            optimizer.step()
            optimizer.__dict__.pop("grad_scale", None)
            optimizer.__dict__.pop("found_inf", None)
        if overflow:
            for (name, tensor, _), old in zip(race.states(), before):
                assert_same_bits(tensor, old, name)
        race.compare()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=dtype_name)
def test_overflow_known_to_the_device_only(dtype: torch.dtype) -> None:
    """`Scaling.found_inf` reaches the kernels, which then leave everything alone, the step count too."""
    from luminav.pending import Scaling

    makers = weights([(33,), (16,)], dtype)
    race = Race(makers)
    race.step(grad_row(makers, 0))
    before = [tensor.clone() for _, tensor, _ in race.states()]
    race.set_grads(grad_row(makers, 1))
    scaling = Scaling(torch.tensor(1.0, device=DEVICE), torch.tensor([1.0], device=DEVICE))
    race.optimizer._stepper._scaling = lambda pending: scaling
    race.optimizer.step()
    race.optimizer.step()
    assert race.replay is not None
    for (name, tensor, _), old in zip(race.states(), before):
        assert_same_bits(tensor, old, name)
    scaling = Scaling(torch.tensor(1.0, device=DEVICE), torch.tensor([0.0], device=DEVICE))
    race.optimizer.step()
    race.reference.step()
    race.compare()


def test_a_scaler_trains_with_it() -> None:
    makers = weights([(33,), (48,)], torch.float32)
    race = Race(makers, fused_single_pass=True)
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=8.0, growth_interval=2)
    for step in range(5):
        grads = grad_row(makers, step)
        loss = sum((param * grad.to(DEVICE)).sum() for param, grad in zip(race.params, grads) if grad is not None)
        scaler.scale(loss).backward()
        if step == 3:
            race.params[0].grad[2] = math.inf
        else:
            for twin, grad in zip(race.twins, grads):
                twin.grad = grad
            race.reference.step()
        scaler.step(race.optimizer)
        scaler.update()
        race.optimizer.zero_grad()
        race.compare()


# ---- saving, copying -------------------------------------------------------------------------------------------------


@by_core_mode
@pytest.mark.parametrize("way", ["load", "deepcopy"])
def test_going_on_elsewhere_is_never_having_stopped(mode: str, way: str) -> None:
    makers = weights([(33,), (7,)], torch.bfloat16)
    options = {"master_weights": "semi", **CORE_MODES[mode]}
    params = [make(DEVICE) for make in makers]
    plain = [make(DEVICE) for make in makers]
    from luminav import LuminaV

    optimizer = LuminaV(params, execution="triton", **options)
    unbroken = LuminaV(plain, execution="triton", **options)
    for step in range(4):
        for number, grad in enumerate(grad_row(makers, step)):
            assert grad is not None
            late = number == 1 and step < 3
            plain[number].grad = None if late else grad.to(DEVICE)
            params[number].grad = None if late else grad.to(DEVICE)
        if step == 2:
            if way == "load":
                saved = copy.deepcopy(optimizer.state_dict())
                optimizer = LuminaV(params, execution="triton", **options)
                optimizer.load_state_dict(saved)
            else:
                params, optimizer = copy.deepcopy((params, optimizer))
                for number, param in enumerate(params):
                    param.grad = plain[number].grad
        optimizer.step()
        unbroken.step()
    for param, expected in zip(params, plain):
        assert_same_bits(param, expected)
        for key, value in unbroken.state[expected].items():
            assert_same_bits(optimizer.state[param][key], value, key)


# ---- the verbs, which sharded steps use ------------------------------------------------------------------------------


def _batch(
    device: torch.device, grad_dtype: torch.dtype, first_index: int, options: Options, dtype: torch.dtype
) -> Batch:
    steps = []
    for number, length in enumerate((37, 160, 0)):
        tensors = [normal((length,), 10 * number + i, 0.02, dtype).to(device) for i in range(2)]
        steps.append(
            TensorStep(
                param=tensors[0],
                grad=normal((length,), 10 * number + 2, 1.0, grad_dtype).to(device),
                exp_avg=tensors[1],
                exp_avg_sq=normal((length,), 10 * number + 3, 0.02, dtype).square().to(device)
                if options.buffer == 2
                else None,
                master_param=None,
                noise_key=noise_key(options.seed, 5, number),
                first_index=first_index,
                index=number,
                step=torch.tensor(4),
            )
        )
    return Batch(options, rule.step_numbers(5, float(options.lr), options, dtype, 1.0), steps)


@by_dtype
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=dtype_name)
def test_the_verbs_with_gradients_of_any_dtype_on_a_shard(dtype: torch.dtype, grad_dtype: torch.dtype) -> None:
    """Sums, then weights by scales from outside, with the noise of elements in the middle of a larger tensor."""
    first_index = {torch.float32: 2**32 - 160, torch.bfloat16: 12345}.get(grad_dtype, 0)
    buffer = 1 if first_index == 12345 else 2
    options = Options.from_group({"lr": 8e-4, "buffer": buffer})
    engine, reference = choose_engine("triton", DEVICE), SingleEngine()
    ours, theirs = (_batch(d, grad_dtype, first_index, options, dtype) for d in (DEVICE, torch.device("cpu")))
    if buffer == 1:
        (table,), (expected,) = engine.measure_lookahead([ours]), reference.measure_lookahead([theirs])
        torch.testing.assert_close(table.cpu(), expected, rtol=1e-6, atol=0)
        assert theirs.numbers is not None
        theirs.rms_denominator = rule.single_denominator(expected[:, 0], expected[:, 1], theirs.numbers, options)
        ours.rms_denominator = theirs.rms_denominator.to(DEVICE)
    (table,), (expected,) = engine.measure([ours]), reference.measure([theirs])
    torch.testing.assert_close(table.cpu(), expected, rtol=1e-5, atol=0)
    scales = torch.full((3,), 1.25), torch.full((3,), 0.5)
    (on_the_way,) = engine.update([ours], [Scales(*(s.to(DEVICE) for s in scales))], gather=True)
    reference.update([theirs], [Scales(*scales)], gather=False)
    assert torch.equal(on_the_way, table)
    for step, other in zip(ours.steps, theirs.steps):
        for key in ("param", "exp_avg", "exp_avg_sq"):
            got, wanted = getattr(step, key), getattr(other, key)
            if wanted is None:
                continue
            if dtype in SIXTEEN_BIT:
                apart = triton_runs.ulps_apart(got.cpu(), wanted)
                assert (apart > 0).sum() <= max(1, 0.02 * len(apart)) and (not len(apart) or apart.max() <= 1), key
            else:
                assert triton_runs.error(got.cpu(), wanted) <= 1e-6, key


def test_tables_are_made_once_for_all_verbs_of_a_step_and_anew_for_other_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A tensor that no rank has a gradient for leaves the batch between measure and update."""
    options = Options.from_group({"lr": 8e-4})
    engine, batch = choose_engine("triton", DEVICE), _batch(DEVICE, torch.float32, 0, options, torch.float32)
    made: list[int] = []
    original = tables.Tables._make_static

    def noting(self: tables.Tables, kind: Kind, members: Sequence[tuple[Batch, TensorStep]]) -> None:
        made.append(len(members))
        original(self, kind, members)

    monkeypatch.setattr(tables.Tables, "_make_static", noting)
    engine.measure([batch])
    scales = [Scales(torch.ones(3, device=DEVICE), torch.ones(3, device=DEVICE))]
    engine.update([batch], scales, gather=False)
    assert sum(made) == 3
    gone = batch.steps.pop()
    before = gone.param.clone()
    engine.update([batch], scales, gather=False)
    assert sum(made) == 5 and torch.equal(gone.param, before)


def test_a_skip_that_only_another_rank_knows_of_reaches_the_kernels() -> None:
    options = Options.from_group({"lr": 8e-4})
    batch = _batch(DEVICE, torch.float32, 0, options, torch.float32)
    engine = choose_engine("triton", DEVICE)
    (plain,) = engine.measure([batch])
    before = [step.param.clone() for step in batch.steps]
    batch.skip = torch.tensor(True, device=DEVICE)
    (table,) = engine.measure([batch])
    assert torch.equal(table, plain), "what is to be added up over ranks must not depend on the flag"
    ones = torch.ones(3, device=DEVICE)
    engine.update([batch], [Scales(ones, ones)], gather=False)
    for step, old in zip(batch.steps, before):
        assert_same_bits(step.param, old)
    batch.skip = torch.tensor(False, device=DEVICE)
    engine.update([batch], [Scales(ones, ones)], gather=False)
    assert not torch.equal(batch.steps[0].param, before[0])


def test_an_update_takes_no_memory_unless_it_adds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last update of a sharded step does not: a rank that failed there would have taken half of the step."""
    batch = _batch(DEVICE, torch.float32, 0, Options.from_group({"lr": 8e-4}), torch.float32)
    engine, scales = choose_engine("triton", DEVICE), [Scales(*(torch.ones(3, device=DEVICE) for _ in range(2)))]
    before = [step.param.clone() for step in batch.steps]
    monkeypatch.setattr(launch.Launch, "take_partials", out_of_memory)
    with pytest.raises(torch.OutOfMemoryError, match="none is left"):
        engine.update([batch], scales, gather=True)
    for step, old in zip(batch.steps, before):
        assert_same_bits(step.param, old)
    engine.update([batch], scales, gather=False)
    assert not any(torch.equal(step.param, old) for step, old in zip(batch.steps[:2], before))


def test_the_same_run_twice_gives_the_same_bits() -> None:
    results = []
    for _ in range(2):
        makers = weights([(2 * triton_runs.span() + 5,), (33,)], torch.float32)
        params = [make(DEVICE) for make in makers]
        from luminav import LuminaV

        optimizer = LuminaV(params, execution="triton")
        for step in range(2):
            for param, grad in zip(params, grad_row(makers, step)):
                assert grad is not None
                param.grad = grad.to(DEVICE)
            optimizer.step()
        results.append([param.detach().cpu() for param in params])
    for first, second in zip(*results):
        assert_same_bits(first, second)


def test_a_parameter_in_two_storages_is_unaligned_only_in_one() -> None:
    """The same values, aligned and not, give the same bits: vector loads and single ones are one computation."""
    values = normal((64,), 3, 0.02, torch.bfloat16)
    results = []
    for offset in (0, 1):
        storage = torch.zeros(96, dtype=torch.bfloat16, device=DEVICE)
        param = torch.nn.Parameter(storage[offset : offset + 64].copy_(values))
        from luminav import LuminaV

        optimizer = LuminaV([param], execution="triton")
        param.grad = normal((64,), 4, 1.0, torch.bfloat16).to(DEVICE)
        optimizer.step()
        optimizer.step()
        results.append(param.detach().cpu())
    assert_same_bits(results[0], results[1])
    assert not torch.equal(results[0], parameter(values))
