"""torch.amp: a scaled step is the unscaled one, an overflowed step is none.

Scales are powers of two, so that scaling loses no bit and runs can be compared bit for bit with plain ones. Gradients
are multiples of 1/64, which FP16 holds exactly at every scale used here.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import support
import torch
from runs import STEP_MODES, assert_same_state, new_params, state_of
from support import ENGINES, assert_same_bits, dtype_name, normal, out_of_memory, parameter
from torch import Tensor, nn

from luminav import LuminaV
from luminav.engines.foreach import ForeachEngine
from luminav.pending import Scaling
from luminav.stepper import Stepper

ROWS = 5


def gradients(number: int, step: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return (normal(shape, 31 * number + step, dtype=torch.float64) * 64).round().clamp(-255, 255).div(64).to(dtype)


def scaler_of(scale: float, **options: Any) -> torch.amp.GradScaler:
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, **{"growth_interval": 10**6, **options})
    scaler.scale(torch.ones(()))  # makes the scale, as scaling the first loss does
    return scaler


def step_scaled(
    scaler: torch.amp.GradScaler,
    optimizer: LuminaV,
    params: Sequence[nn.Parameter],
    step: int,
    *,
    overflow: bool = False,
) -> None:
    """One step on gradients times the present scale, with an infinity among them if `overflow`."""
    for number, param in enumerate(params):
        param.grad = gradients(number, step, param.shape, param.dtype) * scaler.get_scale()
    if overflow:
        assert params[0].grad is not None
        params[0].grad.view(-1)[3] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def step_plainly(optimizer: LuminaV, params: Sequence[nn.Parameter], step: int) -> None:
    for number, param in enumerate(params):
        param.grad = gradients(number, step, param.shape, param.dtype)
    optimizer.step()
    optimizer.zero_grad()


def plain(steps: int = ROWS, dtype: torch.dtype = torch.bfloat16, **options: Any) -> dict[str, Tensor]:
    params = new_params(dtype)
    optimizer = LuminaV(params, **options)
    for step in range(steps):
        step_plainly(optimizer, params, step)
    return state_of(optimizer, params)


# ---- scaled steps ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=dtype_name)
@pytest.mark.parametrize("mode", STEP_MODES)
def test_a_scaled_step_is_the_unscaled_one(mode: str, dtype: torch.dtype, engine: str) -> None:
    """FP16 gradients too, which torch's own unscaling refuses. The gradients themselves are not unscaled."""
    for scale, maximize in itertools.product((2.0**12, 0.25, 1.0), (False, True)):
        options = {**STEP_MODES[mode], "maximize": maximize, "execution": engine}
        params = new_params(dtype)
        optimizer, scaler = LuminaV(params, **options), scaler_of(scale)
        for step in range(ROWS):
            step_scaled(scaler, optimizer, params, step)
        assert_same_state(state_of(optimizer, params), plain(dtype=dtype, **options))
    assert not hasattr(optimizer, "grad_scale") and not hasattr(optimizer, "found_inf")


def test_the_scale_may_change_between_steps() -> None:
    params = new_params(torch.float16)
    optimizer, scaler = LuminaV(params), scaler_of(4.0, growth_interval=2)
    scales = []
    for step in range(ROWS):
        scales.append(scaler.get_scale())
        step_scaled(scaler, optimizer, params, step)
    assert scales == [4.0, 4.0, 8.0, 8.0, 16.0]
    assert_same_state(state_of(optimizer, params), plain(dtype=torch.float16))


def test_a_scale_that_is_no_power_of_two_is_divided_out() -> None:
    param = parameter(normal((50,), 0))
    optimizer, scaler = LuminaV([param], lr=1e-2), scaler_of(1000.0)
    reference = support.Reference(param, lr=1e-2)
    for step in range(ROWS):
        step_scaled(scaler, optimizer, [param], step)
        reference.step(gradients(0, step, (50,), torch.float64))
    assert support.largest_error(param, reference.weight) < 2e-6


@pytest.mark.parametrize("mode", STEP_MODES)
def test_a_disabled_scaler_is_none(mode: str) -> None:
    params = new_params()
    optimizer, scaler = LuminaV(params, **STEP_MODES[mode]), torch.amp.GradScaler("cpu", enabled=False)
    for step in range(ROWS):
        for number, param in enumerate(params):
            param.grad = gradients(number, step, param.shape, param.dtype)
        scaler.step(optimizer)
        scaler.update()
    assert_same_state(state_of(optimizer, params), plain(**STEP_MODES[mode]))


@pytest.mark.parametrize("mode", STEP_MODES)
def test_gradients_unscaled_and_clipped_by_the_user_are_taken_as_they_are(mode: str) -> None:
    runs = []
    for scale in (None, 2.0**14):
        params = new_params(torch.float32)
        optimizer, scaler = LuminaV(params, **STEP_MODES[mode]), scaler_of(scale or 1.0)
        for step in range(ROWS):
            for number, param in enumerate(params):
                param.grad = gradients(number, step, param.shape, torch.float32) * (scale or 1.0)
            if scale:
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(params, 0.5)
            if scale:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
        runs.append(state_of(optimizer, params))
    assert_same_state(*runs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=dtype_name)
def test_a_training_loop_with_autocast_and_scaler(dtype: torch.dtype) -> None:
    """As in torch's documentation. A loss times a power of two gives gradients times that power, so nothing differs."""
    results = []
    for scale in (None, 2.0**4):
        torch.manual_seed(3)
        net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
        optimizer = LuminaV(net.parameters(), lr=1e-2)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
        losses = []
        for step in range(20):
            x = normal((32, 6), step)
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = (net(x).float() - x.sum(1, keepdim=True)).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
        assert losses[-1] < losses[0]
        results.append(losses)
    assert results[0] == results[1]


# ---- overflow ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=dtype_name)
@pytest.mark.parametrize("mode", STEP_MODES)
def test_an_overflowed_step_changes_nothing(mode: str, dtype: torch.dtype, engine: str) -> None:
    """The first step, and in mid-training: no weight, no state, no step count. Then it goes on as if it never was."""
    options = {**STEP_MODES[mode], "execution": engine}
    params = new_params(dtype)
    optimizer, scaler = LuminaV(params, **options), scaler_of(2.0**10)
    step_scaled(scaler, optimizer, params, 0, overflow=True)
    assert not any(optimizer.state.values())
    for param, start in zip(params, new_params(dtype)):
        assert_same_bits(param, start)
    for step in range(ROWS):
        step_scaled(scaler, optimizer, params, step)
        before = state_of(optimizer, params)
        step_scaled(scaler, optimizer, params, 77, overflow=True)
        assert_same_state(state_of(optimizer, params), before)
    assert scaler.get_scale() == 2.0 ** (10 - 6)
    assert_same_state(state_of(optimizer, params), plain(dtype=dtype, **options))


def test_an_overflowed_step_is_no_reason_to_warn() -> None:
    """A whole infinite gradient under a scaler is what the scaler is for."""
    param = parameter(torch.ones(4))
    optimizer, scaler = LuminaV([param]), scaler_of(4.0)
    param.grad = torch.full((4,), float("inf"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scaler.step(optimizer)
        scaler.update()
    assert optimizer.nonfinite_grad_count() == 0


# ---- several optimizers, refusals, scales set by hand ------------------------------------------------------------


def test_one_of_two_optimizers_may_have_no_gradients() -> None:
    """torch then gives it the number 0 for its overflow flag instead of a tensor."""
    used, unused = parameter(torch.ones(3)), parameter(torch.ones(3))
    one, other = LuminaV([used]), LuminaV([unused])
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for _ in range(2):
        scaler.scale((used**2).sum()).backward()
        scaler.step(one)
        scaler.step(other)
        scaler.update()
    assert int(one.state[used]["step"]) == 2 and not other.state


def test_a_refused_step_leaves_no_scale_behind() -> None:
    """GradScaler takes its scale away only after a step that returned, and would multiply by it the next time."""
    params = new_params(torch.float16)
    optimizer, scaler = LuminaV(params), scaler_of(8.0)
    for step in range(ROWS):
        optimizer.param_groups[0]["tau"] = -1.0
        with pytest.raises(ValueError, match="tau"):
            step_scaled(scaler, optimizer, params, step)
        assert not hasattr(optimizer, "grad_scale") and not hasattr(optimizer, "found_inf")
        optimizer.param_groups[0]["tau"] = 0.8
        step_scaled(scaler, optimizer, params, step)
    assert_same_state(state_of(optimizer, params), plain(dtype=torch.float16))


@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_failed_step_leaves_no_scale_behind(steps_before: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that runs out of memory before it writes, which may simply be tried again."""
    params = new_params(torch.float16)
    optimizer, scaler = LuminaV(params, execution="foreach"), scaler_of(8.0)

    for step in range(ROWS):
        if step == steps_before:
            with monkeypatch.context() as full, pytest.raises(torch.OutOfMemoryError, match="none is left"):
                full.setattr(ForeachEngine, "measure", out_of_memory)
                step_scaled(scaler, optimizer, params, step)
            assert not hasattr(optimizer, "grad_scale") and not hasattr(optimizer, "found_inf")
        step_scaled(scaler, optimizer, params, step)
    assert_same_state(state_of(optimizer, params), plain(dtype=torch.float16))


@pytest.mark.parametrize("mode", STEP_MODES)
@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("kind", [float, torch.tensor, lambda x: torch.tensor([x], dtype=torch.float64)])
def test_a_scale_may_be_set_by_hand(kind: Any, capturable: bool, mode: str) -> None:
    options = {**STEP_MODES[mode], "capturable": capturable}
    params = new_params(torch.float16)
    optimizer = LuminaV(params, **options)
    optimizer.grad_scale = kind(16.0)
    for step in range(ROWS):
        for number, param in enumerate(params):
            param.grad = gradients(number, step, param.shape, param.dtype) * 16
        optimizer.step()
    assert_same_state(state_of(optimizer, params), plain(dtype=torch.float16, **STEP_MODES[mode]))


def test_an_overflow_flag_may_be_set_by_hand() -> None:
    params = new_params()
    optimizer = LuminaV(params)
    for step in range(ROWS):
        for flag in (1.0, 0.0):
            optimizer.found_inf = torch.tensor(flag)
            step_plainly(optimizer, params, step)
    assert_same_state(state_of(optimizer, params), plain())


# ---- the way of a device, where the host does not look at the flag ------------------------------------------------


@pytest.fixture
def flag_stays_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines get the overflow flag as a tensor, as on an accelerator; the CPU would otherwise look at once."""

    on_the_host = Stepper._scaling

    def scaling(self: Stepper, pending: Any) -> Scaling | None:
        if not hasattr(self.optimizer, "found_inf"):
            return on_the_host(self, pending)
        return Scaling(getattr(self.optimizer, "grad_scale", None), self.optimizer.found_inf)

    monkeypatch.setattr(Stepper, "_scaling", scaling)


@pytest.mark.usefixtures("flag_stays_on_the_device")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", support.DTYPES, ids=dtype_name)
@pytest.mark.parametrize("mode", STEP_MODES)
def test_a_step_that_the_flag_forbids_writes_nothing(mode: str, dtype: torch.dtype, engine: str) -> None:
    """Step, bias corrections and noise key are tensors then, and give the same bits; forbidden steps do not count."""
    options = {**STEP_MODES[mode], "execution": engine}
    params = new_params(dtype)
    optimizer = LuminaV(params, **options)
    optimizer.grad_scale = torch.tensor(4.0)
    for step in range(ROWS):
        for flag in (0.0, 1.0, 2.0):  # the flag is a sum over devices
            optimizer.found_inf = torch.tensor(flag)
            before = state_of(optimizer, params)
            for number, param in enumerate(params):
                param.grad = gradients(number, step, param.shape, param.dtype) * 4
                if flag:
                    param.grad.fill_(float("inf"))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                optimizer.step()
            if flag:
                assert_same_state(state_of(optimizer, params), before)
    expected = plain(dtype=dtype, **options)
    assert_same_state(state_of(optimizer, params), expected)


@pytest.mark.usefixtures("flag_stays_on_the_device")
@pytest.mark.parametrize("mode", ["default", "single", "coordinate", "semi", "full"])
def test_a_forbidden_first_step_leaves_a_state_that_has_taken_none(mode: str) -> None:
    """Its zeros are there, its count is 0, and a file of it is that of a parameter that has not begun."""
    params = new_params()
    optimizer = LuminaV(params, **STEP_MODES[mode])
    optimizer.found_inf = torch.tensor(1.0)
    step_plainly(optimizer, params, 9)
    assert all(int(state["step"]) == 0 and not state["exp_avg"].any() for state in optimizer.state.values())
    for param, start in zip(params, new_params()):
        assert_same_bits(param, start)
    reader = LuminaV(params)
    reader.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert not reader.state
    optimizer.found_inf = torch.tensor(0.0)
    for step in range(ROWS):
        step_plainly(optimizer, params, step)
    assert_same_state(state_of(optimizer, params), plain(**STEP_MODES[mode]))
