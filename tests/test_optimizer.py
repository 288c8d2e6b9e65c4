"""The contract with PyTorch: closures, learning rates and schedulers, groups.

What a step computes is tested elsewhere. Here runs are compared bit for bit with runs that must be the same. More of
the contract: test_gradients.py, test_surroundings.py, and for steps that are refused test_refusals.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import support
import torch
from runs import SHAPES, STEP_MODES, assert_same_state, new_params, state_of, take_steps, trained
from support import ENGINES, assert_same_bits, dtype_name, normal, parameter
from torch import Tensor, nn
from torch.optim.lr_scheduler import (
    CosineAnnealingWarmRestarts,
    CyclicLR,
    LambdaLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
)

from luminav import LuminaV

# ---- closure -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("surroundings", [torch.no_grad, torch.enable_grad])
def test_the_closure_runs_once_first_and_with_gradients(surroundings: Callable[[], Any]) -> None:
    """SOAP#21, sam#91, Lightning#18268."""
    param, twin = parameter(torch.ones(3)), parameter(torch.ones(3))
    optimizer, plain = LuminaV([param], lr=1e-2), LuminaV([twin], lr=1e-2)
    calls = []

    def closure() -> Tensor:
        calls.append((torch.is_grad_enabled(), param.detach().clone()))
        optimizer.zero_grad()
        loss = (param**2).sum()
        loss.backward()
        return loss

    param.grad = torch.full((3,), -7.0)  # stale
    with surroundings():
        before = torch.is_grad_enabled()
        loss = optimizer.step(closure)
        assert torch.is_grad_enabled() == before
    assert len(calls) == 1 and calls[0][0] and torch.equal(calls[0][1], torch.ones(3))
    assert loss is not None and loss.item() == 3.0
    (twin**2).sum().backward()
    assert plain.step() is None
    assert_same_bits(param, twin)


def test_what_the_closure_returns_comes_back() -> None:
    param = parameter(torch.ones(3))
    optimizer = LuminaV([param])
    value = object()
    assert optimizer.step(lambda: value) is value  # type: ignore[arg-type, return-value]
    assert optimizer.step(closure=lambda: 1.5) == 1.5
    assert optimizer.step(lambda: None) is None  # type: ignore[arg-type, return-value]
    assert not optimizer.state and torch.equal(param.detach(), torch.ones(3))


def test_a_closure_may_change_the_groups() -> None:
    """The step takes what is there when the closure is done."""
    first, second = parameter(torch.ones(3)), parameter(torch.ones(2))
    optimizer = LuminaV([first])

    def closure() -> float:
        optimizer.add_param_group({"params": [second], "lr": 0.0})
        optimizer.param_groups[0]["lr"] = 0.0
        first.grad, second.grad = torch.ones(3), torch.ones(2)
        return 0.0

    optimizer.step(closure)
    assert [int(optimizer.state[p]["step"]) for p in (first, second)] == [1, 1]
    assert torch.equal(first.detach(), torch.ones(3)) and torch.equal(second.detach(), torch.ones(2))


# ---- learning rate -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("mode", STEP_MODES)
@pytest.mark.parametrize("make", [lambda x: torch.tensor(x), lambda x: torch.tensor([x], dtype=torch.float64)])
def test_a_tensor_as_learning_rate_is_the_number_it_holds(
    make: Callable[[float], Tensor], mode: str, capturable: bool
) -> None:
    lr = make(3e-3)
    as_tensor = trained(lr=lr, capturable=capturable, **STEP_MODES[mode])
    assert_same_state(as_tensor, trained(lr=float(lr), **STEP_MODES[mode]))
    assert lr.item() == make(3e-3).item(), "the tensor is the user's"


def test_a_learning_rate_changed_in_place_is_used() -> None:
    lr = torch.tensor(1e-3)
    runs = []
    for value in (lr, None):
        params = new_params()
        optimizer = LuminaV(params, lr=1e-3 if value is None else value)
        for step, number in enumerate((1e-3, 5e-3, 0.0, 2e-3)):
            new = torch.tensor(number)
            if value is None:
                optimizer.param_groups[0]["lr"] = new.item()
            else:
                value.copy_(new)
            take_steps(optimizer, params, range(step, step + 1))
        runs.append(state_of(optimizer, params))
    assert_same_state(*runs)


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda optimizer: LambdaLR(optimizer, [lambda step: 0.9**step, lambda step: 1 + step]),
    "one_cycle": lambda optimizer: OneCycleLR(optimizer, max_lr=[1e-2, 2e-2], total_steps=8),
    "cosine": lambda optimizer: CosineAnnealingWarmRestarts(optimizer, T_0=3),
    "cyclic": lambda optimizer: CyclicLR(optimizer, 1e-4, 1e-2, step_size_up=2, cycle_momentum=True),
    "plateau": lambda optimizer: ReduceLROnPlateau(optimizer, patience=0, factor=0.5),
}


@pytest.mark.parametrize("kind", ["float", "tensor"])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_schedulers_drive_the_step(scheduler: str, kind: str) -> None:
    """Every step is that of a run whose lr and betas are set by hand to what the scheduler says."""
    lrs = [3e-3, 1e-3] if kind == "float" else [torch.tensor(3e-3), torch.tensor(1e-3)]
    runs = [new_params(), new_params()]
    groups = [
        [{"params": p[:2], "lr": lr0}, {"params": p[2:], "lr": lr1}] for p, (lr0, lr1) in zip(runs, [lrs, [1, 1]])
    ]
    driven, by_hand = LuminaV(groups[0]), LuminaV(groups[1])
    schedule = SCHEDULERS[scheduler](driven)
    seen = []
    for step in range(6):
        for group, other in zip(driven.param_groups, by_hand.param_groups):
            other["lr"], other["betas"] = float(group["lr"]), group["betas"]
        seen.append((by_hand.param_groups[0]["lr"], by_hand.param_groups[0]["betas"]))
        take_steps(driven, runs[0], range(step, step + 1))
        take_steps(by_hand, runs[1], range(step, step + 1))
        schedule.step() if isinstance(schedule, LRScheduler) and scheduler != "plateau" else schedule.step(1.0)
    assert_same_state(state_of(driven, runs[0]), state_of(by_hand, runs[1]))
    assert len({lr for lr, _ in seen}) > 2, "the scheduler did nothing"
    assert (len({betas for _, betas in seen}) > 2) == (scheduler in ("one_cycle", "cyclic"))
    if kind == "tensor" and scheduler != "plateau":  # older versions of torch put a float there
        assert all(isinstance(group["lr"], Tensor) for group in driven.param_groups)


@pytest.mark.parametrize("lr", [0.0, torch.tensor(0.0)], ids=["float", "tensor"])
@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("dtype", support.DTYPES, ids=dtype_name)
@pytest.mark.parametrize("mode", STEP_MODES)
def test_with_a_learning_rate_of_zero_no_bit_of_a_weight_changes(
    mode: str, dtype: torch.dtype, capturable: bool, lr: Any
) -> None:
    """Zeros of either sign, NaN, infinities and subnormal numbers too; the moments go on."""
    tiny = torch.finfo(dtype).tiny
    values = torch.tensor([0.0, -0.0, float("nan"), float("inf"), -float("inf"), tiny / 4, -tiny, 1.5], dtype=dtype)
    param = parameter(values)
    optimizer = LuminaV([param], lr=lr, capturable=capturable, **STEP_MODES[mode])
    take_steps(optimizer, [param], range(3))
    assert_same_bits(param, values)
    assert int(optimizer.state[param]["step"]) == 3 and optimizer.state[param]["exp_avg"].any()


# ---- groups --------------------------------------------------------------------------------------------------------

OVERRIDES: dict[str, Any] = {
    "lr": 3e-2,
    "betas": (0.5, 0.9),
    "eps": 1e-1,
    "weight_decay": 2.0,
    "tau": 3.0,
    "alpha_ss": 3.0,
    "cautious": False,
    "cautious_clamp_min": 1.0,
    "buffer": 1,
    "stochastic_rounding": False,
    "bound": False,
    "bound_type": "coordinate",
    "bound_ratio": 1e-3,
    "master_weights": "hybrid",
    "fused_single_pass": True,
    "ema_decay": 0.1,
    "seed": 7,
    "maximize": True,
    "state_bits": 8,
    "block_variance": True,
}
NEEDS = {"alpha_ss": {"buffer": 1}, "ema_decay": {"fused_single_pass": True}, "block_variance": {"buffer": 1}}
"""Options that act in a mode only."""


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", OVERRIDES)
def test_an_option_of_a_group_is_that_of_a_constructor(name: str, engine: str) -> None:
    """Ranger#9, pytorch#89987: given to the constructor, to the group, or to a group added later; and it acts."""
    base = {"lr": 1e-2, "bound_ratio": 0.2, "execution": engine, **NEEDS.get(name, {})}
    default = base.get(name, support.DEFAULTS[name])
    results = []
    for way in ("group", "constructor", "added", "not at all"):
        params = new_params(shapes=(*SHAPES[:-1], (66, 64)))  # the last is large enough to be kept in blocks
        last = {"params": params[1:]}
        if way == "constructor":
            optimizer = LuminaV([{"params": params[:1], name: default}, last], **{**base, name: OVERRIDES[name]})
        elif way == "added":
            optimizer = LuminaV(params[:1], **base)
            optimizer.add_param_group({**last, name: OVERRIDES[name]})
        else:
            groups = [{"params": params[:1]}, last if way == "not at all" else {**last, name: OVERRIDES[name]}]
            optimizer = LuminaV(groups, **base)
        take_steps(optimizer, params, range(5))
        results.append(state_of(optimizer, params))
    assert_same_state(results[0], results[1])
    assert_same_state(results[2], results[1])
    assert_same_bits(results[3]["weight 0"], results[0]["weight 0"])
    assert not torch.equal(results[3]["weight 4"], results[0]["weight 4"]), f"{name} has no effect"


def test_every_option_of_the_rule_is_overridden_above() -> None:
    assert set(OVERRIDES) == set(support.DEFAULTS)


def test_the_engine_may_differ_between_groups() -> None:
    params = new_params()
    optimizer = LuminaV([{"params": params[:2], "execution": "single"}, {"params": params[2:]}], execution="foreach")
    take_steps(optimizer, params, range(4))
    assert_same_state(state_of(optimizer, params), trained())


def test_a_group_does_not_change_what_the_caller_passed() -> None:
    group = {"params": new_params(), "master_weights": True, "betas": [0.8, 0.9]}
    kept = copy.copy(group)
    LuminaV([group])
    assert group["master_weights"] is True and group["betas"] == [0.8, 0.9] and group.keys() == kept.keys()


def test_names_of_parameters_are_accepted_and_change_nothing() -> None:
    params = new_params()
    named = [(f"layer.{number}", param) for number, param in enumerate(params)]
    optimizer = LuminaV([{"params": iter(named[:2])}, {"params": named[2:]}])
    assert optimizer.param_groups[1]["param_names"] == ["layer.2", "layer.3", "layer.4"]
    take_steps(optimizer, params, range(4))
    assert_same_state(state_of(optimizer, params), trained())
    reader = LuminaV(named)
    assert reader.param_groups[0]["param_names"][0] == "layer.0"
    with pytest.raises(ValueError, match="with/without names"):
        optimizer.add_param_group({"params": [parameter(torch.ones(1))]})
    with pytest.raises(ValueError, match="names are missing"):
        LuminaV([named[0], params[1]])


def in_inference_mode() -> nn.Parameter:
    with torch.inference_mode():
        return nn.Parameter(torch.ones(3))


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        (list, ValueError, "empty parameter list. Has the generator been used before"),
        (lambda: nn.Linear(2, 2), TypeError, r"got a module, Linear. Pass model.parameters\(\)"),
        (lambda: parameter(torch.ones(2)), TypeError, "iterable"),
        (lambda: [{"params": {parameter(torch.ones(2)), parameter(torch.ones(2))}}], TypeError, "sets"),
        (lambda: [3.0], TypeError, "can only optimize Tensors"),
        (lambda: [parameter(torch.ones(2)) * 2], ValueError, "non-leaf"),
        (
            lambda: [torch.ones(2, dtype=torch.int64)],
            TypeError,
            "parameters must be one of float16, .* got torch.int64",
        ),
        (lambda: [torch.ones(2).to(torch.float8_e4m3fn)], TypeError, "got torch.float8_e4m3fn"),
        (
            lambda: [nn.Parameter(torch.ones(3, 1).expand(3, 5))],
            ValueError,
            r"must not share memory, got shape \(3, 5\)",
        ),
        (lambda: [in_inference_mode()], RuntimeError, "made in inference mode cannot be trained"),
        (lambda: [{"params": [parameter(torch.ones(2))]}] * 2, ValueError, "more than one parameter group"),
    ],
)
def test_what_cannot_be_parameters_is_refused(params: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        LuminaV(params())


def test_a_parameter_that_comes_twice_in_a_group_steps_once() -> None:
    """torch warns of it and goes on."""
    param, twin = parameter(normal((9,), 0)), parameter(normal((9,), 0))
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = LuminaV([param, param])
    plain = LuminaV([twin])
    take_steps(optimizer, [param], range(3))
    take_steps(plain, [twin], range(3))
    assert_same_bits(param, twin)
    assert int(optimizer.state[param]["step"]) == 3
    optimizer.load_state_dict(optimizer.state_dict())
    take_steps(optimizer, [param], range(3, 4))
    assert int(optimizer.state[param]["step"]) == 4


def test_parameters_on_the_meta_device_are_accepted_and_filled_later() -> None:
    """Deferred initialisation: the optimizer is made first, then the parameters' contents are exchanged."""
    with torch.device("meta"):
        net = nn.Linear(3, 2)
    optimizer = LuminaV(net.parameters())
    optimizer.step()
    assert not optimizer.state
    real = nn.Linear(3, 2)
    for param, filled in zip(net.parameters(), real.parameters()):
        torch.utils.swap_tensors(param, filled)
    take_steps(optimizer, list(net.parameters()), range(2))
    assert int(optimizer.state[net.weight]["step"]) == 2 and net.weight.device.type == "cpu"


def test_lazy_parameters_are_accepted() -> None:
    """Their shape is known after the first forward pass, often when the optimizer is there already."""
    torch.manual_seed(0)
    net = nn.LazyLinear(3)
    optimizer = LuminaV(net.parameters())
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    net(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert optimizer.state[net.weight]["exp_avg"].shape == (3, 4)


def test_a_step_count_may_be_set_by_hand() -> None:
    param = parameter(normal((4,), 0))
    optimizer = LuminaV([param])
    take_steps(optimizer, [param], range(2))
    optimizer.state[param]["step"] = 7
    take_steps(optimizer, [param], range(2, 3))
    step = optimizer.state[param]["step"]
    assert isinstance(step, Tensor) and step.dtype == torch.int64 and int(step) == 8
