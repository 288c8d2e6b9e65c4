"""Gradients: of any form, late, missing, swapped by hooks, not finite."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import support
import torch
from runs import STEP_MODES, assert_same_state, new_params, state_of, take_steps, trained
from support import ENGINES, assert_same_bits, dtype_name, normal, parameter
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from luminav import LuminaV

# ---- gradients of any form -----------------------------------------------------------------------------------------

GRADIENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda values: values.clone(),
    "transposed": lambda values: values.t().contiguous().t(),
    "slice": lambda values: torch.cat([values, values]).unflatten(0, (2, -1))[1],
    "expanded": lambda values: values[:1, :1].expand(values.shape),
    "expanded row": lambda values: values[:1].clone().expand(values.shape),
    "non-finite": lambda values: torch.where(values > 1, float("inf"), values),
    "read-only view": lambda values: values.clone().view(-1).view(values.shape).detach(),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", support.DTYPES, ids=dtype_name)
@pytest.mark.parametrize("form", GRADIENTS)
def test_gradients_of_any_form_are_read_and_never_written(form: str, dtype: torch.dtype, engine: str) -> None:
    """An FP32 gradient is used as it lies in memory. The step is that of a contiguous copy."""
    for options in ({}, {"buffer": 1}, {"fused_single_pass": True}, {"maximize": True}, {"master_weights": "semi"}):
        params = [parameter(normal((12, 9), 0), dtype) for _ in range(2)]
        one, other = (LuminaV([param], execution=engine, **options) for param in params)
        for step in range(3):
            grad = GRADIENTS[form](normal((12, 9), 10 + step, dtype=dtype))
            kept, version = grad.clone(memory_format=torch.contiguous_format), grad._version
            params[0].grad, params[1].grad = grad, kept.clone()
            one.step()
            other.step()
            assert params[0].grad is grad and grad._version == version
            assert_same_bits(grad, kept, form)
        assert_same_state(state_of(one, params[:1]), state_of(other, params[1:]))


@pytest.mark.parametrize("engine", ENGINES)
def test_gradients_of_a_wider_dtype_keep_their_digits(engine: str) -> None:
    """A BF16 parameter may have FP32 gradients: 1 + 2⁻¹² is not rounded to 1 before it is used."""
    if not hasattr(parameter(torch.ones(1)), "grad_dtype"):
        pytest.skip("this torch has no Tensor.grad_dtype")
    param = parameter(torch.ones(4), torch.bfloat16)
    param.grad_dtype = torch.float32
    param.grad = torch.full((4,), 1 + 2.0**-12)
    optimizer = LuminaV([param], execution=engine, master_weights="full", betas=(0.5, 0.5))
    optimizer.step()
    assert (optimizer.state[param]["exp_avg"] == (1 + 2.0**-12) / 2).all()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("mode", ["default", "single", "one_pass"])
def test_every_parameter_has_its_own_step_count(mode: str, engine: str) -> None:
    """pytorch_optimizer#462, DeepSpeed#8471: gradients that come late or now and then, in FP32 against float64."""
    shapes = ((30,), (4, 5), (7,), (3,))
    has_grad = [(1, 1, 1, 1, 1, 1, 1), (0, 0, 0, 1, 1, 1, 1), (1, 0, 1, 0, 0, 1, 1), (0,) * 7]
    params = new_params(torch.float32, shapes)
    optimizer = LuminaV(params, lr=1e-2, execution=engine, **STEP_MODES[mode])
    references = [support.Reference(param, lr=1e-2, **STEP_MODES[mode]) for param in params]
    rows = list(zip(*(support.gradients(shape, 7, seed=number) for number, shape in enumerate(shapes))))
    for row, present in zip(rows, zip(*has_grad)):
        given = [grad if there else None for grad, there in zip(row, present)]
        support.run(optimizer, params, [given])
        for reference, grad in zip(references, given):
            reference.step(grad)
    for param, reference, present in zip(params, references, has_grad):
        assert support.largest_error(param, reference.weight) < 2e-6
        assert int(optimizer.state.get(param, {"step": 0})["step"]) == reference.steps == sum(present)
    assert params[3] not in optimizer.state


def test_frozen_parameters_stay_and_thaw() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = LuminaV(net.parameters(), lr=1e-2)
    net[0].requires_grad_(False)
    before = net[0].weight.detach().clone()
    for frozen in (True, True, False):
        net[0].requires_grad_(not frozen)
        optimizer.zero_grad()
        net(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        assert torch.equal(net[0].weight.detach(), before) == frozen
    assert [int(optimizer.state[layer.weight]["step"]) for layer in net] == [1, 3]


def test_without_any_gradient_nothing_happens() -> None:
    params = new_params()
    optimizer = LuminaV(params)
    for _ in range(3):
        optimizer.step()
    assert not optimizer.state
    take_steps(optimizer, params, range(4))
    assert_same_state(state_of(optimizer, params), trained())


def test_zero_grad_sets_to_none_or_to_zero() -> None:
    param = parameter(torch.ones(3))
    optimizer = LuminaV([param])
    param.grad = torch.ones(3)
    optimizer.zero_grad(set_to_none=False)
    assert param.grad is not None and not param.grad.any()
    optimizer.zero_grad()
    assert param.grad is None


# ---- hooks ---------------------------------------------------------------------------------------------------------


def test_hooks_run_around_the_step_and_may_swap_gradients() -> None:
    """Megatron-LM#5411."""
    param, twin = parameter(torch.ones(4)), parameter(torch.ones(4))
    optimizer, plain = LuminaV([param]), LuminaV([twin])
    mask = torch.tensor([1.0, -1.0, 1.0, 0.0])
    log: list[str] = []

    def swap(*_: Any) -> None:
        log.append("own pre")
        assert param.grad is not None
        param.grad = param.grad * mask

    handles = [
        optimizer.register_step_pre_hook(swap),
        optimizer.register_step_post_hook(lambda *_: log.append("own post")),
        register_optimizer_step_pre_hook(lambda *_: log.append("global pre")),
        register_optimizer_step_post_hook(lambda *_: log.append("global post")),
    ]
    param.grad = torch.ones(4)
    optimizer.step()
    for handle in handles:
        handle.remove()
    assert log == ["global pre", "own pre", "own post", "global post"]
    twin.grad = mask.clone()
    plain.step()
    assert_same_bits(param, twin)


@pytest.mark.parametrize("mode", STEP_MODES)
@pytest.mark.parametrize("style", ["one optimizer", "one per parameter"])
def test_stepping_in_the_backward_pass_is_stepping_after_it(style: str, mode: str) -> None:
    """optimi#3: a step in each parameter's post-accumulate hook. With one optimizer even the rounding is the same."""
    nets = []
    for released in (True, False):
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)).bfloat16()
        options = {"lr": 1e-2, "stochastic_rounding": style == "one optimizer", **STEP_MODES[mode]}
        params = list(net.parameters())
        optimizer = LuminaV(params, **options)
        owner = {p: optimizer if style == "one optimizer" else LuminaV([p], **options) for p in params}

        def step(param: Tensor, owner: Any = owner) -> None:
            owner[param].step()
            param.grad = None

        if released:
            for param in params:
                param.register_post_accumulate_grad_hook(step)
        for number in range(4):
            net(normal((8, 5), number, dtype=torch.bfloat16)).square().sum().backward()
            if not released:
                optimizer.step()
                optimizer.zero_grad()
        nets.append(params)
    for param, expected in zip(*nets):
        assert_same_bits(param, expected)


# ---- non-finite gradients ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("mode", STEP_MODES)
def test_non_finite_elements_are_counted(mode: str, engine: str) -> None:
    params = [parameter(torch.ones(400), torch.bfloat16), parameter(torch.ones(3, 3)), parameter(torch.ones(0))]
    optimizer = LuminaV(params, execution=engine, **STEP_MODES[mode])
    assert optimizer.nonfinite_grad_count() == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(3):
            params[0].grad, params[1].grad, params[2].grad = (torch.ones_like(p) for p in params)
            params[0].grad[::100] = float("nan")
            params[1].grad[0, :step] = -float("inf")
            optimizer.step()
    assert optimizer.nonfinite_grad_count() == 3 * 4 + (0 + 1 + 2)
    assert all(torch.isfinite(p).all() for p in params)
    assert copy.deepcopy(optimizer).nonfinite_grad_count() == 0, "the count is of this process and this object"


def test_one_warning_comes_when_whole_tensors_are_not_finite() -> None:
    """What clip_grad_norm_ makes of an infinite norm: inf·0 = NaN and finite·0 = 0, or all NaN of a NaN norm."""
    params = [parameter(torch.ones(4)) for _ in range(3)]
    optimizer = LuminaV(params)
    for param in params[:2]:
        param.grad = torch.full((4,), float("nan"))
    params[2].grad = torch.ones(4)
    with pytest.warns(RuntimeWarning, match=r"every element of .* gradient") as caught:
        optimizer.step()
        optimizer.step()
    assert len([one for one in caught if one.category is RuntimeWarning]) == 1
    assert optimizer.nonfinite_grad_count() == 16
    assert all(torch.isfinite(p).all() for p in params)


def test_the_warning_may_be_an_error_and_the_step_is_still_whole() -> None:
    """Two batches, one of them all NaN: both have stepped and counted when the warning is raised."""
    params = [parameter(torch.ones(4)), parameter(torch.ones(4), torch.float64)]
    optimizer = LuminaV(params)
    params[0].grad, params[1].grad = torch.full((4,), float("nan")), torch.ones(4, dtype=torch.float64)
    with warnings.catch_warnings(), pytest.raises(RuntimeWarning):
        warnings.simplefilter("error")
        optimizer.step()
    assert [int(optimizer.state[param]["step"]) for param in params] == [1, 1]
    assert all((param != 1).all() for param in params)
