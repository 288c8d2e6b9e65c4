"""A step gives the same bits whatever surrounds it: grad modes, defaults, autocast, threads, random states."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import pytest
import support
import torch
from runs import STEP_MODES, assert_same_state, grad_of, new_params, state_of, take_steps, trained
from support import dtype_name
from torch import Tensor

from luminav import LuminaV


def in_inference_mode(step: Callable[[], None]) -> None:
    with torch.inference_mode():
        step()


def with_gradients(step: Callable[[], None]) -> None:
    with torch.enable_grad():
        step()


def deterministically(step: Callable[[], None]) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        step()
    finally:
        torch.use_deterministic_algorithms(False)


def with_default_dtype(dtype: torch.dtype) -> Callable[[Callable[[], None]], None]:
    def surround(step: Callable[[], None]) -> None:
        torch.set_default_dtype(dtype)
        try:
            step()
        finally:
            torch.set_default_dtype(torch.float32)

    return surround


def with_another_default_device(step: Callable[[], None]) -> None:
    """As after torch.set_default_device("cuda"), with a model on the CPU: nothing may be made on the default device."""
    with torch.device("meta"):
        step()


def under_autocast(step: Callable[[], None]) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        step()


def with_anomaly_detection(step: Callable[[], None]) -> None:
    with torch.autograd.set_detect_anomaly(True):
        step()


def with_other_random_numbers(step: Callable[[], None]) -> None:
    torch.manual_seed(random.randrange(1 << 30))
    torch.rand(3)
    step()


def in_a_thread(step: Callable[[], None]) -> None:
    thread = threading.Thread(target=step)
    thread.start()
    thread.join()


@pytest.mark.parametrize("mode", STEP_MODES)
@pytest.mark.parametrize(
    "surround",
    [
        in_inference_mode,
        with_gradients,
        deterministically,
        pytest.param(with_default_dtype(torch.float64), id="default_float64"),
        pytest.param(with_default_dtype(torch.bfloat16), id="default_bfloat16"),
        pytest.param(with_default_dtype(torch.float16), id="default_float16"),
        with_another_default_device,
        under_autocast,
        with_anomaly_detection,
        with_other_random_numbers,
        in_a_thread,
    ],
)
def test_the_surroundings_of_a_step_change_no_bit(surround: Callable[[Callable[[], None]], None], mode: str) -> None:
    """Steps in them and outside them, in turn: what is made inside must serve outside."""
    for dtype in support.DTYPES:
        params = new_params(dtype)
        optimizer = LuminaV(params, **STEP_MODES[mode])
        for step in range(4):
            for number, param in enumerate(params):
                param.grad = grad_of(number, step, param.shape, param.dtype)
            optimizer.step() if step == 2 else surround(optimizer.step)
        assert_same_state(state_of(optimizer, params), trained(dtype=dtype, **STEP_MODES[mode]))


def test_random_states_are_neither_read_nor_written() -> None:
    torch.manual_seed(5)
    before, pythons = torch.get_rng_state(), random.getstate()
    first = trained()
    assert torch.equal(torch.get_rng_state(), before) and random.getstate() == pythons
    torch.manual_seed(6)
    assert_same_state(trained(), first)


def test_flushing_subnormal_numbers_is_survived() -> None:
    """torch.set_flush_denormal changes FP32 arithmetic itself, so only large numbers must keep their bits."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormal numbers")
    try:
        flushed = {mode: trained(**options) for mode, options in STEP_MODES.items()}
    finally:
        torch.set_flush_denormal(False)
    for mode, options in STEP_MODES.items():
        assert_same_state(flushed[mode], trained(**options))


def test_optimizers_in_several_threads_do_not_disturb_each_other() -> None:
    expected = {mode: trained(steps=20, **options) for mode, options in STEP_MODES.items()}
    found: dict[str, dict[str, Tensor]] = {}

    def work(mode: str) -> None:
        found[mode] = trained(steps=20, **STEP_MODES[mode])

    threads = [threading.Thread(target=work, args=(mode,)) for mode in STEP_MODES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found.keys() == expected.keys()
    for mode in STEP_MODES:
        assert_same_state(found[mode], expected[mode])


@pytest.mark.parametrize("dtype", support.SIXTEEN_BIT, ids=dtype_name)
def test_replicas_stay_identical_whatever_their_random_streams_do(dtype: torch.dtype) -> None:
    """Advanced_Optimizers#7, pytorch#101105."""
    replicas = []
    for rank in range(3):
        torch.manual_seed(rank)
        params = new_params(dtype)
        optimizer = LuminaV(params, lr=1e-2)
        for step in range(5):
            torch.rand(rank + 1)
            take_steps(optimizer, params, range(step, step + 1))
        replicas.append(state_of(optimizer, params))
    assert_same_state(replicas[1], replicas[0])
    assert_same_state(replicas[2], replicas[0])


def test_clearing_the_state_starts_anew() -> None:
    params = new_params()
    optimizer = LuminaV(params, master_weights="semi", fused_single_pass=True)
    take_steps(optimizer, params, range(3))
    for param, fresh in zip(params, new_params()):
        with torch.no_grad():
            param.copy_(fresh)
    optimizer.state.clear()
    take_steps(optimizer, params, range(4))
    assert_same_state(state_of(optimizer, params), trained(master_weights="semi", fused_single_pass=True))


def test_its_text_names_the_options() -> None:
    text = repr(LuminaV(new_params(), tau=0.5))
    assert text.startswith("LuminaV (") and "tau: 0.5" in text
