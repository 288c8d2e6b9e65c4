"""What may change between two steps of the Triton engine: the launches it keeps must go on, or be made anew.

Every edit is done to two optimizers, one on the Triton engine and one on the reference engine, which keeps nothing from
step to step; the steps that follow must agree.
"""

from __future__ import annotations

import copy
import gc
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import triton_runs
from support import assert_same_bits, master_of, normal, optimizer_for, out_of_memory
from torch import Tensor, nn
from triton_runs import DEVICE, INTERPRETED, Race, grad_row, weights

import luminav
from luminav import LuminaV, engines
from luminav.engines.triton import launch

pytestmark = triton_runs.MARKS


@pytest.fixture(autouse=True)
def _small_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    triton_runs.small_programs(monkeypatch)


SHAPES = [(8, 8), (33,)]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def running(dtype: torch.dtype = torch.bfloat16, steps: int = 2, shapes: Any = SHAPES, **options: Any) -> Race:
    """A race whose launches are kept."""
    makers = weights(shapes, dtype)
    race = Race(makers, **options)
    for step in range(steps):
        race.step(grad_row(makers, step))
    assert race.replay is not None
    return race


def go_on(race: Race, steps: int = 2, first: int = 50) -> None:
    """Steps with new gradients for all parameters, compared."""
    for step in range(first, first + steps):
        race.step([normal(p.shape, 9 * step + n, 1.0, p.dtype) for n, p in enumerate(race.params)])


# ---- what the launches go on with ------------------------------------------------------------------------------------


def test_new_gradients_and_learning_rates_repeat_the_launches() -> None:
    race = running(steps=3)
    kept = race.replay
    for step, lr in enumerate((1e-3, 3e-3, 0.0, 1e-2)):
        for optimizer in race.optimizers:
            optimizer.param_groups[0]["lr"] = lr
        go_on(race, 1, first=step)
    race.step([None, normal((33,), 1, 1.0, torch.bfloat16)])
    race.step([None, None])
    go_on(race, 1)
    assert race.replay is kept
    assert int(race.optimizer.state[race.params[0]]["step"]) == 8
    assert int(race.optimizer.state[race.params[1]]["step"]) == 9


def test_a_learning_rate_tensor_is_read_at_every_step() -> None:
    lrs = torch.tensor(1e-3), torch.tensor(1e-3)
    race = running()
    for optimizer, lr in zip(race.optimizers, lrs):
        optimizer.param_groups[0]["lr"] = lr
    go_on(race)
    kept = race.replay
    for lr in lrs:
        lr.fill_(2e-2)
    go_on(race, 1)
    assert race.replay is kept
    before = race.params[0].detach().clone()
    for lr in lrs:
        lr.zero_()
    go_on(race, 1)
    assert_same_bits(race.params[0], before)


@pytest.mark.parametrize("split", [True, False], ids=["split", "whole"])
def test_edits_in_place_are_read(split: bool) -> None:
    """Step counts and kept scales are views of the kernels' tables; moments and masters are the tensors themselves."""
    race = running(steps=3, fused_single_pass=True, master_weights="semi", split_master_weights=split)
    kept = race.replay
    for optimizer, param in race.pairs():
        state = optimizer.state[param]
        state["step"].fill_(500)
        state["cautious_scale"].fill_(1.5)
        state["bound_scale"].fill_(0.25)
        state["exp_avg"].mul_(-2)
        state["exp_avg_sq"].mul_(3)
        if split:
            state["master_remainder"].bitwise_xor_(0x1555)
        else:
            state["master_param"].add_(0.125)
    go_on(race)
    assert race.replay is kept
    assert int(race.optimizer.state[race.params[0]]["step"]) == 502


def test_weights_raise_their_version_counters() -> None:
    """Otherwise autograd would use a weight saved for backward that a step has changed since."""
    race = running()
    param = race.params[0]
    product = (param * param).sum()
    go_on(race, 1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


# ---- what makes the launches anew ------------------------------------------------------------------------------------


def _replace(key: str, change: Callable[[Tensor], Tensor]) -> Callable[[Any, nn.Parameter], None]:
    def edit(optimizer: Any, param: nn.Parameter) -> None:
        optimizer.state[param][key] = change(optimizer.state[param][key])

    return edit


def _swap_data(key: str, change: Callable[[Tensor], Tensor]) -> Callable[[Any, nn.Parameter], None]:
    def edit(optimizer: Any, param: nn.Parameter) -> None:
        tensor = param if key == "param" else optimizer.state[param][key]
        tensor.data = change(tensor.data)

    return edit


def _step_in_the_place_of_the_old(optimizer: Any, param: nn.Parameter) -> None:
    """The new tensor may get the very id of the old one."""
    state = optimizer.state[param]
    del state["step"]
    state["step"] = torch.tensor(40)


def _offloaded_and_back(optimizer: Any, param: nn.Parameter) -> None:
    state = optimizer.state[param]
    for key, value in state.items():
        state[key] = value.to("cpu", copy=True)
    for key in ("exp_avg", "exp_avg_sq"):
        state[key] = state[key].to(param.device)


def _step_data_swapped(optimizer: Any, param: nn.Parameter) -> None:
    optimizer.state[param]["step"].data = torch.tensor(40, device=param.device)


def _weight_edited(optimizer: Any, param: nn.Parameter) -> None:
    with torch.no_grad():
        param.view(-1)[3:6].fill_(0.5)


def _weight_zeroed(optimizer: Any, param: nn.Parameter) -> None:
    """A remainder below zero must not make a NaN of a zero."""
    with torch.no_grad():
        param.view(-1)[3:30].zero_()
    assert not param.numel() > 60 or (optimizer.state[param]["master_remainder"].view(-1)[3:30] < 0).any()


def _cleared(optimizer: Any, param: nn.Parameter) -> None:
    optimizer.state[param].clear()


EDITS: dict[str, Callable[[Any, nn.Parameter], None]] = {
    "exp_avg_replaced": _replace("exp_avg", lambda t: t * -2),
    "exp_avg_sq_replaced": _replace("exp_avg_sq", lambda t: t * 4),
    "exp_avg_in_another_dtype": _replace("exp_avg", lambda t: t.double() * 3),
    "exp_avg_data_swapped": _swap_data("exp_avg", lambda t: t * -2),
    "exp_avg_sq_data_swapped": _swap_data("exp_avg_sq", lambda t: t * 4),
    "exp_avg_transposed": _replace("exp_avg", lambda t: t.t().contiguous().t()),
    "param_data_swapped": _swap_data("param", lambda t: t + 0.25),
    "param_data_transposed": _swap_data("param", lambda t: t.t()),  # the same address
    "param_data_in_another_dtype": _swap_data("param", lambda t: t.to(torch.float16)),
    "step_replaced": _replace("step", lambda t: torch.tensor(40)),
    "step_in_the_place_of_the_old": _step_in_the_place_of_the_old,
    "step_data_swapped": _step_data_swapped,
    "offloaded_and_back": _offloaded_and_back,
    "weight_edited": _weight_edited,
    "state_cleared": _cleared,
}
SPLIT_MASTER_EDITS = {
    "remainder_replaced": _replace("master_remainder", lambda t: t ^ 0x1555),
    "remainder_data_swapped": _swap_data("master_remainder", lambda t: t ^ 0x1555),
    "weight_zeroed": _weight_zeroed,
    "remainder_gone": lambda optimizer, param: optimizer.state[param].pop("master_remainder"),
    "weight_edited": _weight_edited,
    "param_data_swapped": _swap_data("param", lambda t: t + 0.25),
    "param_data_in_another_dtype": _swap_data("param", lambda t: t.to(torch.float16)),
}
MASTER_EDITS = {
    "master_replaced": _replace("master_param", lambda t: t + 0.01),
    "master_data_swapped": _swap_data("master_param", lambda t: t + 0.01),
    "weight_edited": _weight_edited,
    "param_data_swapped": _swap_data("param", lambda t: t + 0.25),
}
SCALE_EDITS = {
    "scale_replaced": _replace("cautious_scale", lambda t: t * 0.5),
    "bound_scale_replaced": _replace("bound_scale", lambda t: t * 0.5),
    "scale_gone": lambda optimizer, param: optimizer.state[param].pop("cautious_scale"),
}
CASES = [
    *((name, edit, {}) for name, edit in EDITS.items()),
    *((name, edit, {"master_weights": "semi"}) for name, edit in SPLIT_MASTER_EDITS.items()),
    *((name, edit, {"master_weights": "semi", "split_master_weights": False}) for name, edit in MASTER_EDITS.items()),
    *((name, edit, {"fused_single_pass": True}) for name, edit in SCALE_EDITS.items()),
]


@pytest.mark.parametrize(("name", "edit", "options"), CASES, ids=[f"{n}-{'-'.join(o) or 'plain'}" for n, _, o in CASES])
def test_edits_of_weights_and_state_are_noticed(name: str, edit: Any, options: dict[str, Any]) -> None:
    race = running(steps=3 if "fused_single_pass" in options else 2, **options)
    for optimizer, param in race.pairs():
        if param.dim() == 2:
            edit(optimizer, param)
    go_on(race)


OPTIONS: dict[str, Any] = {
    "betas": (0.5, 0.9),
    "eps": 1e-2,
    "weight_decay": 3.0,
    "tau": 3.0,
    "cautious": False,
    "cautious_clamp_min": 0.9,
    "buffer": 1,
    "stochastic_rounding": False,
    "bound": False,
    "bound_type": "coordinate",
    "bound_ratio": 1e-4,
    "master_weights": "full",
    "split_master_weights": False,
    "fused_single_pass": True,
    "execution": "single",
    "seed": 7,
    "maximize": True,
    "lr": torch.tensor(3e-3),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_changed_in_a_group_are_noticed(name: str) -> None:
    race = running(lr=1e-2)
    for optimizer in race.optimizers:
        optimizer.param_groups[0][name] = OPTIONS[name]
    go_on(race, 3)


@pytest.mark.parametrize("split", [True, False], ids=["from_split", "from_whole"])
def test_the_form_of_master_weights_changed_in_a_group_is_noticed(split: bool) -> None:
    race = running(master_weights="semi", split_master_weights=split)
    for optimizer in race.optimizers:
        optimizer.param_groups[0]["split_master_weights"] = not split
    go_on(race, 3)
    assert ("master_param" in race.optimizer.state[race.params[0]]) == split


@pytest.mark.parametrize(("name", "value"), [("alpha_ss", 3.0), ("ema_decay", 0.0)])
def test_options_of_one_mode_are_noticed(name: str, value: float) -> None:
    mode: dict[str, Any] = {"buffer": 1} if name == "alpha_ss" else {"fused_single_pass": True}
    race = running(steps=3, lr=1e-2, **mode)
    for optimizer in race.optimizers:
        optimizer.param_groups[0][name] = value
    go_on(race, 3)


def test_a_misspelt_option_in_a_group_is_noticed() -> None:
    """Another key that is new there costs one step that is built anew, and no more."""
    race = running()
    for optimizer in race.optimizers:
        optimizer.param_groups[0]["initial_lr"] = 1e-2
    go_on(race)
    kept = race.replay
    go_on(race, 1)
    assert kept is not None and race.replay is kept
    race.optimizer.param_groups[0]["master_weight"] = "full"
    with pytest.raises(ValueError, match="unknown option 'master_weight'"):
        race.optimizer.step()


def test_every_option_is_in_the_tests_above() -> None:
    from luminav.hyperparameters import OPTIONS as declared

    elsewhere = {"alpha_ss", "ema_decay", "fsdp_sync", "process_group", "capturable"}  # the last three: no other result
    elsewhere |= {"state_bits", "block_variance"}  # of larger tensors: test_state_in_blocks
    assert {*OPTIONS, *elsewhere} == set(declared)


def test_groups_and_parameters_come_go_and_change_places() -> None:
    race = running()
    extra = weights([(21,), (16,)], torch.bfloat16)
    for optimizer, params, device in ((race.optimizer, race.params, DEVICE), (race.reference, race.twins, "cpu")):
        params.extend(make(device) for make in extra)
        optimizer.add_param_group({"params": params[2:], "lr": 3e-3, "weight_decay": 0.5})
    go_on(race)
    for optimizer in race.optimizers:
        optimizer.param_groups[0]["params"].reverse()  # positions select the noise
    go_on(race)
    assert race.replay is not None
    for optimizer, params in ((race.optimizer, race.params), (race.reference, race.twins)):
        del optimizer.param_groups[1]["params"][1], params[-1]
    go_on(race)
    for params in (race.params, race.twins):
        params[0].grad = None
        params[1].grad = torch.ones_like(params[1])
    for optimizer in race.optimizers:
        del optimizer.param_groups[0]["params"][1]  # parameter 0, after the reversal
        optimizer.step()
    race.compare()


def test_a_first_gradient_is_noticed() -> None:
    makers = weights(SHAPES, torch.bfloat16)
    race = Race(makers)
    for step in range(2):
        race.step([grad_row(makers, step)[0], None])
    assert race.replay is not None
    go_on(race)
    assert int(race.optimizer.state[race.params[1]]["step"]) == 2


@pytest.mark.parametrize("change", ["transposed", "strided_slice", "offset_slice"])
def test_gradients_in_another_layout_are_noticed(change: str) -> None:
    """Not contiguous, or contiguous at an address that vector loads cannot take."""
    race = running(shapes=[(8, 8), (64,)])
    grads = [normal((8, 8), 3, 1.0, torch.bfloat16), normal((64,), 4, 1.0, torch.bfloat16)]
    race.step(grads, change)
    race.step(grads)
    kept = race.replay
    for params in (race.params, race.twins):
        for param, grad in zip(params, grads):
            storage = torch.zeros(65, dtype=grad.dtype, device=param.device)
            param.grad = storage[1:].copy_(grad.flatten()).view(param.shape)
    for optimizer in race.optimizers:
        optimizer.step()
    race.compare()
    assert kept is not None and race.replay is not kept
    go_on(race)


def _negated(grad: Tensor) -> Tensor:
    return torch._neg_view(-grad)


def _of_an_imaginary_part(grad: Tensor) -> Tensor:
    """What autograd makes of it."""
    imag = torch.zeros((), device=grad.device, requires_grad=True)
    (torch.complex(torch.ones_like(imag), imag).conj() * 1j).real.backward()
    assert imag.grad is not None and imag.grad.is_neg()
    return imag.grad


def _zeros_without_memory(grad: Tensor) -> Tensor:
    return torch._efficientzerotensor(grad.shape, dtype=grad.dtype, device=grad.device)


@pytest.mark.parametrize("steps", [0, 2], ids=["at_once", "later"])
@pytest.mark.parametrize(
    ("shape", "change"), [((8, 8), _negated), ((), _of_an_imaginary_part), ((8, 8), _zeros_without_memory)]
)
def test_gradients_whose_values_do_not_lie_in_memory_are_taken_for_what_they_read(
    shape: tuple[int, ...], change: Callable[[Tensor], Tensor], steps: int
) -> None:
    makers = weights([shape, (33,)], torch.float32)
    race = Race(makers)
    for step in range(steps):
        race.step(grad_row(makers, step))
    for _ in range(2):
        race.set_grads([torch.ones(shape), torch.ones(33)])
        for params in (race.params, race.twins):
            assert params[0].grad is not None
            params[0].grad = change(params[0].grad)
        for optimizer in race.optimizers:
            optimizer.step()
        race.compare()
    go_on(race)


@pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="this torch has no gradients of another dtype")
def test_gradients_of_another_dtype_are_noticed() -> None:
    race = running()
    for params in (race.params, race.twins):
        for number, param in enumerate(params):
            param.grad = None
            param.grad_dtype = torch.float32
            param.grad = normal(param.shape, number).to(param.device)
    for optimizer in race.optimizers:
        optimizer.step()
    race.compare()
    assert race.replay is not None


def test_a_loss_scale_that_appears_is_noticed() -> None:
    race = running(torch.float32)
    for scale in (8.0, None, torch.tensor(4.0)):
        kept = race.replay
        race.set_grads([normal(p.shape, 3) * (1.0 if scale is None else float(scale)) for p in race.params])
        for optimizer in race.optimizers:
            optimizer.grad_scale, optimizer.found_inf = scale, torch.zeros(())
            optimizer.step()
            del optimizer.grad_scale, optimizer.found_inf
        race.compare()
        assert race.replay is not kept, "the kernels for it must be compiled before anything is written"


@pytest.mark.parametrize(("master", "split"), [("none", True), ("semi", True), ("semi", False)])
def test_a_loaded_file_is_what_the_next_step_goes_on_from(master: str, split: bool) -> None:
    """The model keeps its weights, which the masters of the file must adopt, as on the reference engine."""
    race = running(master_weights=master, split_master_weights=split)
    saved = [
        torch.utils._pytree.tree_map(lambda v: v.clone() if isinstance(v, Tensor) else v, o.state_dict())
        for o in race.optimizers
    ]
    go_on(race, 3)
    for optimizer, file in zip(race.optimizers, saved):
        optimizer.load_state_dict(file)
    go_on(race, 2, first=80)


@pytest.mark.parametrize("master", ["none", "semi", "full"])
def test_a_model_that_becomes_bfloat16_keeps_its_fp32_weights_as_masters(master: str) -> None:
    race = running(torch.float32, master_weights=master)
    before = race.params[0].detach().clone()
    for params in (race.params, race.twins):
        for param in params:
            param.grad = None
            param.data = param.data.bfloat16()
    go_on(race)
    state = race.optimizer.state[race.params[0]]
    assert ("master_remainder" in state) == (master != "none") and "master_param" not in state
    if master != "none":
        assert (master_of(race.params[0], state) - before).abs().max() < 0.01
        assert (race.params[0].detach() - before).abs().max() < 0.01 and state["master_remainder"].any()


def test_fp32_weights_with_masters_may_be_edited_while_the_launches_go_on() -> None:
    """They are their own masters."""
    race = running(torch.float32, master_weights="semi")
    kept = race.replay
    for optimizer, param in race.pairs():
        _weight_edited(optimizer, param)
    go_on(race)
    assert race.replay is kept


# ---- refusals and failures -------------------------------------------------------------------------------------------


def _everything(race: Race) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor, _ in race.states()}


FLAWS = ["lr", "lr_tensor", "lr_in_place", "tau", "sparse", "shape", "grad", "state", "variance"]


@pytest.mark.parametrize("flaw", FLAWS)
def test_a_refused_step_changes_nothing(flaw: str) -> None:
    """Also the scale that a loss scaler has set goes, so that the next step does not see it."""
    lr = torch.tensor(8e-4)
    race = running(lr=lr)
    for optimizer in race.optimizers:
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(1.0), torch.tensor(0.0)
    go_on(race, 1)
    before = _everything(race)
    optimizer, param = race.optimizer, race.params[0]
    group, state = optimizer.param_groups[0], optimizer.state[param]
    race.set_grads([normal(p.shape, 1, 1.0, p.dtype) for p in race.params])
    old = dict(group), dict(state), param.data, param.grad.clone()
    if flaw == "lr":
        group["lr"] = -1.0
    elif flaw == "lr_tensor":
        group["lr"] = torch.tensor(math.nan)
    elif flaw == "lr_in_place":
        lr.fill_(-1.0)
    elif flaw == "tau":
        group["tau"] = 0.0
    elif flaw == "sparse":
        param.grad = normal((8, 8), 1, 1.0, torch.bfloat16).to(DEVICE).to_sparse()
    elif flaw == "shape":
        param.data = param.data[:4]  # the same address, and a gradient that is too long
    elif flaw == "grad":
        param.grad.data = param.grad.data[:4]
    elif flaw == "state":
        state["exp_avg_sq"] = state["exp_avg_sq"][:4].clone()
    elif flaw == "variance":
        del state["exp_avg_sq"]
    with pytest.raises((ValueError, TypeError)):
        optimizer.step()
    assert not hasattr(optimizer, "grad_scale") and not hasattr(optimizer, "found_inf")
    lr.fill_(8e-4)
    group.update(old[0])
    state.clear()
    state.update(old[1])
    param.grad = None
    param.data = old[2]
    for name, tensor in _everything(race).items():
        assert_same_bits(tensor, before[name], name)
    for each in race.optimizers:
        each.__dict__.pop("grad_scale", None)
        each.__dict__.pop("found_inf", None)
    go_on(race)


def _same_as_undisturbed(optimizer: Any, params: list[nn.Parameter], **options: Any) -> None:
    """Three steps of an optimizer, the first of which has failed before, end like those of a fresh one."""
    twins = [make(DEVICE) for make in weights(SHAPES, torch.bfloat16)]
    undisturbed = optimizer_for(twins, **options)
    for step in range(3):
        for group in (params, twins):
            for number, param in enumerate(group):
                param.grad = normal(param.shape, 30 * step + number, 1.0, param.dtype).to(DEVICE)
        optimizer.step()
        undisturbed.step()
    for param, twin in zip(params, twins):
        assert_same_bits(param, twin)
        for key, value in undisturbed.state[twin].items():
            assert_same_bits(optimizer.state[param][key].cpu(), value.cpu(), key)


def _failing(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError("no such instruction")


@pytest.mark.parametrize("mode", [{}, {"fused_single_pass": True}, {"buffer": 1, "master_weights": "semi"}], ids=str)
@pytest.mark.parametrize("verb", ["compile", "measure", "take_partials"])
def test_a_failure_before_the_update_leaves_no_trace(
    mode: dict[str, Any], verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = [make(DEVICE) for make in weights(SHAPES, torch.bfloat16)]
    optimizer = optimizer_for(params, execution="triton", **mode)
    before = [param.detach().clone() for param in params]
    with monkeypatch.context() as broken:
        broken.setattr(launch.Launch, verb, _failing)
        for param in params:
            param.grad = torch.ones_like(param)
        with pytest.raises(RuntimeError, match="no such instruction"):
            optimizer.step()
    assert not any(optimizer.state.values())
    for param, old in zip(params, before):
        assert_same_bits(param, old)
    _same_as_undisturbed(optimizer, params, execution="triton", **mode)


@pytest.mark.parametrize("mode", [{}, {"fused_single_pass": True}], ids=str)
def test_kernels_that_do_not_compile_leave_auto_to_foreach_with_one_warning(
    mode: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from luminav import pending
    from luminav import stepper as module

    given_up: dict[str, str] = {}
    monkeypatch.setattr(engines, "_given_up", given_up)
    chosen = engines.choose_engine

    def auto_is_triton(execution: str, device: torch.device) -> Any:
        """On the CPU, too, as long as nobody has given it up."""
        return chosen("triton" if execution == "auto" and device.type not in given_up else execution, device)

    monkeypatch.setattr(module, "choose_engine", auto_is_triton)
    monkeypatch.setattr(pending, "choose_engine", auto_is_triton)
    monkeypatch.setattr(launch.Launch, "compile", _failing)
    params = [make(DEVICE) for make in weights(SHAPES, torch.bfloat16)]
    optimizer = optimizer_for(params, execution="auto", **mode)
    with pytest.warns(RuntimeWarning, match="foreach engine instead of Triton: .*no such instruction") as warned:
        _same_as_undisturbed(optimizer, params, execution="foreach", **mode)
    assert len(warned) == 1 and set(given_up) == {DEVICE.type}


def test_kept_launches_keep_no_gradients_alive() -> None:
    """Those of the step that the launches were built from would stay in memory for good."""
    params = [torch.nn.Parameter(torch.ones(33, device=DEVICE, dtype=torch.bfloat16)) for _ in range(2)]
    optimizer = LuminaV(params, execution="triton")
    for _ in range(3):
        for param in params:
            param.grad = torch.ones_like(param)
        grads = [weakref.ref(param.grad) for param in params]
        optimizer.step()
        optimizer.zero_grad()
        gc.collect()
        assert [grad() for grad in grads] == [None, None]


# ---- working memory --------------------------------------------------------------------------------------------------


PARTIALS_MODES: dict[str, dict[str, Any]] = {
    "exact": {},
    "one_pass": {"fused_single_pass": True},
    "single": {"buffer": 1},
}
by_partials_mode = pytest.mark.parametrize("mode", PARTIALS_MODES)


@pytest.mark.parametrize("options", [{}, {"buffer": 1}], ids=str)
def test_partials_are_held_during_a_step_only(options: dict[str, Any]) -> None:
    """Nothing as long as there are programs; on a GPU, where the allocator counts, a few bytes for each of them."""
    programs = 36 if INTERPRETED else 1 << 12
    params = [make(DEVICE) for make in weights([(programs * triton_runs.span(),)], torch.bfloat16)]
    on_gpu = DEVICE.type == "cuda"
    before = torch.cuda.memory_allocated() if on_gpu else 0
    optimizer = LuminaV(params, execution="triton", **options)
    for _ in range(2):
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
        optimizer.zero_grad()
    if on_gpu:
        moments = optimizer.state[params[0]].keys() & {"exp_avg", "exp_avg_sq"}
        state = sum(optimizer.state[params[0]][key].nbytes for key in moments)
        assert torch.cuda.memory_allocated() - before - state < 4 * programs
    (kept,) = optimizer._stepper.replays[None]._launches
    assert kept.tables.num_programs_in_all == programs and kept.partials is None
    held = [*vars(kept).values(), *vars(kept.tables).values()]
    assert all(value.numel() < programs for value in held if isinstance(value, Tensor))


@pytest.mark.parametrize("options", [{}, {"fused_single_pass": True}], ids=["exact", "one-pass"])
def test_single_numbers_lie_in_tables_only(options: dict[str, Any]) -> None:
    """On a GPU an allocation takes 512 bytes, whatever is in it: a step count of its own is as much as 64."""
    race = running(steps=3, **options)
    race.optimizer.load_state_dict(copy.deepcopy(race.optimizer.state_dict()))
    singles = [
        weakref.ref(value) for state in race.optimizer.state.values() for value in state.values() if value.dim() == 0
    ]
    assert len(singles) == (3 if options else 1) * len(race.params)
    go_on(race)
    assert not any(single() is not None for single in singles)


class CompiledAhead:
    """A kernel of the interpreter that is compiled ahead, and launched again with the arguments of its source."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.arg_names = kernel, kernel.arg_names

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self.kernel[grid]

    def warmup(self, *_: Any, grid: tuple[int, ...], **__: Any) -> dict[tuple[int, ...], Callable[..., None]]:
        return {(*grid, 1, 1): lambda *values, stream=None: self.kernel[grid](*values)}


@pytest.fixture
def compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches are kept in the interpreter as they are on a GPU."""

    def launch_again(self: launch.Launch, kernels: Sequence[Callable[..., None]]) -> None:
        for kernel in kernels:
            kernel(stream=7)

    if not INTERPRETED:
        return
    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(launch, "RELAUNCHES", True)
    monkeypatch.setattr(launch.Launch, "launch_again", launch_again)
    for module in (launch.kernels, launch.scalars):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, CompiledAhead(getattr(module, name)))


@by_partials_mode
@pytest.mark.usefixtures("compiled_ahead")
def test_partials_lie_elsewhere_in_every_step_and_may_hold_anything(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Tensor] = []  # kept, so that the next ones are others
    take = launch.Launch.take_partials

    def take_nan(self: launch.Launch) -> None:
        take(self)
        assert self.partials is not None
        taken.append(self.partials.fill_(math.nan))

    monkeypatch.setattr(launch.Launch, "take_partials", take_nan)
    race = running(steps=3, shapes=[(3 * triton_runs.span() + 5,), (33,)], **PARTIALS_MODES[mode])
    kept = race.replay
    go_on(race)
    assert kept._kernels
    for old in taken:
        old.fill_(7.0)
    race.step([None, normal((33,), 1, 1.0, torch.bfloat16)])
    go_on(race)
    assert race.replay is kept
    assert all((old == 7.0).all() for old in taken[:-3]), "a launch wrote where the partials of another step were"
    places = {tensor.data_ptr() for tensor in taken}
    assert len(places) == len(taken) >= 8


def test_a_compiled_kernel_is_launched_with_the_partials_of_this_step() -> None:
    """Kernels are compiled on GPUs only; their arguments can be followed anywhere."""
    seen: list[tuple[Any, ...]] = []
    names = ["pointers", "partials", "GATHER"]
    with_them = launch.BoundKernel(lambda *values, stream: seen.append((*values, stream)), [10, 20, True], names)
    without = launch.BoundKernel(lambda *values, stream: seen.append((*values, stream)), [10, 20], ["pointers", "sums"])
    for ready in (with_them, without):
        ready.set_partials(30)
        ready(stream=7)
        ready(stream=8)
    assert seen == [(10, 30, True, 7), (10, 30, True, 8), (10, 20, 7), (10, 20, 8)]


def test_a_kept_step_without_memory_for_partials_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    race = running(steps=3)
    counts = race.replay.late[0].tables.steps
    before = [counts.clone(), *(tensor.clone() for _, tensor, _ in race.states())]
    with monkeypatch.context() as full:
        full.setattr(launch.Launch, "take_partials", out_of_memory)
        race.set_grads([normal(p.shape, 5, 1.0, p.dtype) for p in race.params])
        race.optimizer.grad_scale, race.optimizer.found_inf = torch.tensor(2.0), torch.tensor(0.0)
        with pytest.raises(torch.OutOfMemoryError, match="none is left"):
            race.optimizer.step()
    assert not hasattr(race.optimizer, "grad_scale")
    for old, new in zip(before, [counts, *(tensor for _, tensor, _ in race.states())], strict=True):
        assert torch.equal(old, new)
    go_on(race)


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("out of memory. Tried to allocate"), RuntimeError("Triton Error [CUDA]: out of memory")],
    ids=["torch", "driver"],
)
def test_a_first_step_without_memory_is_no_failure_of_the_kernels(
    error: RuntimeError, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver needs memory for a kernel's code, and says so by an error that compilers raise too."""

    def fail(self: launch.Launch, **_: Any) -> None:
        raise error

    params = [make(DEVICE) for make in weights(SHAPES, torch.bfloat16)]
    optimizer = optimizer_for(params, execution="triton")
    for param in params:
        param.grad = torch.ones_like(param)
    given_up: dict[str, str] = {}
    with monkeypatch.context() as full:
        full.setattr(engines, "_given_up", given_up)
        full.setattr(launch.Launch, "compile", fail)
        with pytest.raises(RuntimeError, match="out of memory") as raised:
            optimizer.step()
    assert raised.value is error and not given_up
    assert not any(optimizer.state.values())
    _same_as_undisturbed(optimizer, params, execution="triton")


# ---- exports ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("released", [False, True], ids=["step", "release"])
def test_an_export_after_a_conversion_sees_what_the_kept_launches_wrote(released: bool) -> None:
    """The FP32 weight is the master of the model that is BF16 now."""
    model = nn.Linear(8, 8).to(DEVICE)
    optimizer = LuminaV(model.parameters(), lr=1e-2, execution="triton", master_weights="full")
    handle = luminav.enable_gradient_release(model, optimizer) if released else None
    for _ in range(3):
        model(torch.ones(2, 8, device=DEVICE)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if handle is not None:
        assert len(optimizer._stepper.replays) == 1
        handle.remove()
        assert not optimizer._stepper.replays
    before = model.weight.detach().clone()
    model.bfloat16()
    assert_same_bits(optimizer.master_state_dict(model)["weight"], before)


# ---- diagnostics -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"fused_single_pass": True}, {"buffer": 1}, {"master_weights": "semi"}], ids=str
)
def test_diagnostics_leave_the_launches_and_report_what_the_reference_does(options: dict[str, Any]) -> None:
    race = running(steps=3, lr=1e-2, **options)
    kept = race.replay
    race.set_grads([normal(p.shape, 70 + n, 1.0, p.dtype) for n, p in enumerate(race.params)])
    with race.optimizer.diagnostics() as report, race.reference.diagnostics() as expected:
        race.optimizer.step()
        race.reference.step()
    race.compare()
    assert race.replay is kept
    for name, figures in expected.items():
        assert report[name].density == figures.density
        assert report[name].nonfinite_grads == 0
        scales = (report[name].cautious_scale, report[name].bound_scale)
        assert scales == pytest.approx((figures.cautious_scale, figures.bound_scale), rel=1e-5)
        assert report[name].update_ratio == pytest.approx(figures.update_ratio, rel=0.05)
        assert report[name].moved == pytest.approx(figures.moved, abs=0.05)
    go_on(race)
