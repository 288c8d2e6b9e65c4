"""A step that is refused or fails changes nothing, and a group may change its mode in mid-training."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import support
import torch
from runs import STEP_MODES, assert_same_state, grad_of, new_params, state_of, take_steps, trained, wanted_state
from support import ENGINES, assert_same_bits, dtype_name, normal, parameter
from torch import Tensor, nn

from luminav import LuminaV
from luminav.engines import Batch, choose_engine
from luminav.engines.single import SingleEngine

# ---- refused steps -----------------------------------------------------------------------------------------------


def sparse_gradient(optimizer: LuminaV, params: Sequence[nn.Parameter]) -> None:
    params[-1].grad = torch.ones_like(params[-1]).to_sparse()


def complex_parameter(optimizer: LuminaV, params: Sequence[nn.Parameter]) -> None:
    param = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    optimizer.add_param_group({"params": [param]})
    param.grad = torch.ones_like(param)


def bad_option(optimizer: LuminaV, params: Sequence[nn.Parameter]) -> None:
    optimizer.param_groups[-1]["tau"] = -1.0


def bad_pair_of_options(optimizer: LuminaV, params: Sequence[nn.Parameter]) -> None:
    optimizer.param_groups[-1] |= {"buffer": 1, "fused_single_pass": True}


def negative_lr_in_a_tensor(optimizer: LuminaV, params: Sequence[nn.Parameter]) -> None:
    optimizer.param_groups[-1]["lr"] = torch.tensor(-1.0)


def bad_option_of_a_group_without_gradients(optimizer: LuminaV, params: Sequence[nn.Parameter]) -> None:
    optimizer.add_param_group({"params": [parameter(torch.ones(2))]})
    optimizer.param_groups[-1]["lr"] = None


def engine_that_is_none(optimizer: LuminaV, params: Sequence[nn.Parameter]) -> None:
    optimizer.param_groups[-1]["execution"] = "tritn"


def parameter_on_the_meta_device(optimizer: LuminaV, params: Sequence[nn.Parameter]) -> None:
    param = nn.Parameter(torch.ones(3, device="meta"))
    optimizer.add_param_group({"params": [param]})
    param.grad = torch.ones_like(param)


def parameter_of_another_shape(optimizer: LuminaV, params: Sequence[nn.Parameter]) -> None:
    """Its data replaced, its old gradient still there."""
    params[-1].data = torch.ones(2, 2, dtype=params[-1].dtype)


REFUSED: list[tuple[Callable[[LuminaV, Sequence[nn.Parameter]], None], type[Exception], str]] = [
    (sparse_gradient, TypeError, "gradients must be dense, got layout torch.sparse_coo. Use sparse=False"),
    (complex_parameter, TypeError, r"complex parameters are not supported. Train torch.view_as_real\(param\)"),
    (bad_option, ValueError, "tau must be > 0 and finite, got -1.0."),
    (bad_pair_of_options, ValueError, "buffer=1 cannot be combined with fused_single_pass=True"),
    (negative_lr_in_a_tensor, ValueError, "lr must be >= 0 and finite, got -1.0."),
    (bad_option_of_a_group_without_gradients, TypeError, "lr must be a number >= 0 and finite, got None."),
    (engine_that_is_none, ValueError, "execution must be one of"),
    (parameter_on_the_meta_device, RuntimeError, "a step needs real tensors, .* meta device"),
    (parameter_of_another_shape, ValueError, r"the gradient, .* does not fit its parameter, \(2, 2\)"),
]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("steps", [0, 3], ids=["first step", "mid-training"])
@pytest.mark.parametrize(("spoil", "error", "message"), REFUSED, ids=lambda value: getattr(value, "__name__", ""))
def test_a_refused_step_changes_nothing(
    spoil: Callable[[LuminaV, Sequence[nn.Parameter]], None],
    error: type[Exception],
    message: str,
    steps: int,
    engine: str,
) -> None:
    """The fault is in the last parameter or group, behind others that could have stepped, in every mode."""
    for options in STEP_MODES.values():
        params = new_params()
        optimizer = LuminaV([{"params": params[:2]}, {"params": params[2:]}], execution=engine, **options)
        take_steps(optimizer, params, range(steps))
        for number, param in enumerate(params):
            param.grad = grad_of(number, steps, param.shape, param.dtype)
        spoil(optimizer, params)
        good = params[:-1]
        before, weight = state_of(optimizer, good), params[-1].detach().clone()
        held, known = copy.deepcopy(dict(optimizer.state.get(params[-1], {}))), list(optimizer.state)
        grads = [param.grad for param in good]
        for _ in range(2):
            with pytest.raises(error, match=message):
                optimizer.step()
        assert_same_state(state_of(optimizer, good), before)
        assert_same_bits(params[-1], weight)
        assert_same_state(dict(optimizer.state.get(params[-1], {})), held)
        assert all(param.grad is grad for param, grad in zip(good, grads))
        assert list(optimizer.state) == known and (known == [] or steps > 0)


@pytest.mark.parametrize("mode", STEP_MODES)
def test_training_goes_on_after_a_refused_step(mode: str) -> None:
    """With the fault mended the run is the one that never had it."""
    params = new_params()
    optimizer = LuminaV(params, **STEP_MODES[mode])
    for step in range(4):
        for number, param in enumerate(params):
            param.grad = grad_of(number, step, param.shape, param.dtype)
        kept = params[0].grad
        params[0].grad = torch.ones_like(params[0]).to_sparse()
        with pytest.raises(TypeError):
            optimizer.step()
        params[0].grad = kept
        optimizer.step()
    assert_same_state(state_of(optimizer, params), trained(**STEP_MODES[mode]))


def test_the_message_for_a_resized_parameter_names_the_way_out() -> None:
    param = parameter(torch.ones(3))
    optimizer = LuminaV([param])
    take_steps(optimizer, [param], range(2))
    param.data = torch.ones(5)
    param.grad = torch.ones(5)
    with pytest.raises(ValueError, match=r"has shape \(5,\), its state \(3,\)"):
        optimizer.step()
    optimizer.state[param].clear()
    optimizer.step()
    assert int(optimizer.state[param]["step"]) == 1


def test_triton_says_clearly_that_it_cannot_run_on_the_cpu() -> None:
    """Refused when the optimizer is made, and when a group changes; never replaced by another engine in silence."""
    param = parameter(torch.ones(3))
    with pytest.raises(RuntimeError, match="execution='triton'"):
        LuminaV([param], execution="triton")
    optimizer = LuminaV([param])
    with pytest.raises(RuntimeError, match="execution='triton'"):
        optimizer.add_param_group({"params": [parameter(torch.ones(2))], "execution": "triton"})
    optimizer.param_groups[0]["execution"] = "triton"
    param.grad = torch.ones(3)
    with pytest.raises(RuntimeError, match="execution='triton'"):
        optimizer.step()
    assert not optimizer.state and torch.equal(param.detach(), torch.ones(3))


# ---- failures on the way -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 3], ids=["first step", "mid-training"])
@pytest.mark.parametrize("verb", ["measure_lookahead", "measure", "update"])
@pytest.mark.parametrize("mode", ["default", "single", "coordinate", "semi", "full"])
def test_an_exact_step_whose_engine_fails_before_writing_leaves_everything(
    mode: str, verb: str, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of memory in a measurement: weights, state and step count are as before, and the step can be repeated."""
    if (verb == "measure_lookahead") != (mode == "single") and verb == "measure_lookahead":
        return
    options = STEP_MODES[mode]
    params = new_params()
    optimizer = LuminaV(params, execution="single", **options)
    take_steps(optimizer, params, range(steps))
    before = state_of(optimizer, params)

    def fail(self: SingleEngine, batches: Sequence[Batch], *_: Any, **__: Any) -> list[Tensor]:
        raise MemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(SingleEngine, verb, fail)
        with pytest.raises(MemoryError):
            take_steps(optimizer, params, range(steps, steps + 1))
    after = state_of(optimizer, params)
    assert_same_state({name: after[name] for name in before}, before)
    assert all(int(value) == 0 for name, value in after.items() if name not in before and name.startswith("step"))
    take_steps(optimizer, params, range(steps, 4))
    assert_same_state(state_of(optimizer, params), trained(**options))


def test_a_one_pass_step_that_fails_after_the_update_keeps_the_old_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and moments are valid then, and the kept scales not blended."""
    params = new_params()
    optimizer = LuminaV(params, execution="single", fused_single_pass=True)
    take_steps(optimizer, params, range(3))
    before = state_of(optimizer, params)
    real = SingleEngine.update

    def fail_after(self: SingleEngine, *args: Any, **options: Any) -> list[Tensor]:
        real(self, *args, **options)
        raise MemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(SingleEngine, "update", fail_after)
        with pytest.raises(MemoryError):
            take_steps(optimizer, params, range(3, 4))
    after = state_of(optimizer, params)
    for name, value in before.items():
        if name.split()[0] in ("step", "cautious_scale", "bound_scale"):
            assert_same_bits(after[name], value, name)
        assert value.isfinite().all() and after[name].isfinite().all()
    take_steps(optimizer, params, range(3, 5))


def test_an_exception_in_a_closure_or_hook_leaves_everything() -> None:
    params = new_params()
    optimizer = LuminaV(params)
    take_steps(optimizer, params, range(2))
    before = state_of(optimizer, params)

    def fail(*_: Any) -> float:
        for param in params:
            param.grad = torch.ones_like(param)
        raise KeyError("mine")

    with pytest.raises(KeyError):
        optimizer.step(fail)
    handle = optimizer.register_step_pre_hook(fail)
    with pytest.raises(KeyError):
        optimizer.step()
    handle.remove()
    assert_same_state(state_of(optimizer, params), before)
    take_steps(optimizer, params, range(2, 4))
    assert_same_state(state_of(optimizer, params), trained())


# ---- a group changes its mode ------------------------------------------------------------------------------------

SWITCHES = {
    "one-pass on": ({}, {"fused_single_pass": True}),
    "one-pass off": ({"fused_single_pass": True}, {"fused_single_pass": False}),
    "one-pass off and single": ({"fused_single_pass": True}, {"fused_single_pass": False, "buffer": 1}),
    "dual to single": ({}, {"buffer": 1}),
    "none to full": ({}, {"master_weights": "full"}),
    "full to semi": ({"master_weights": True}, {"master_weights": "half"}),
    "semi to none": ({"master_weights": "semi"}, {"master_weights": False}),
    "gate off": ({}, {"cautious": False}),
    "bound": ({}, {"bound_type": "coordinate"}),
    "maximize": ({}, {"maximize": True}),
    "betas": ({}, {"betas": [0.5, 0.99]}),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("switch", SWITCHES)
def test_a_group_may_change_its_options_between_steps(switch: str, engine: str) -> None:
    """FP32 against the float64 rule, which changes at the same step."""
    before, after = SWITCHES[switch]
    weight = normal((40,), 0)
    param = parameter(weight)
    optimizer = LuminaV([param], lr=1e-2, execution=engine, **before)
    reference = support.Reference(weight, lr=1e-2, **before)
    for step, grad in enumerate(support.gradients((40,), 7, seed=1)):
        if step == 4:
            optimizer.param_groups[0].update(after)
            reference.options.update(after)
            reference.kept = None
        support.run(optimizer, [param], [[grad]])
        reference.step(grad)
    assert support.largest_error(param, reference.weight) < 2e-6
    assert optimizer.state[param].keys() == wanted_state(torch.float32, {**before, **after}).keys()


@pytest.mark.parametrize("dtype", support.SIXTEEN_BIT, ids=dtype_name)
@pytest.mark.parametrize("switch", SWITCHES)
def test_16_bit_state_is_converted_when_a_group_changes_its_mode(switch: str, dtype: torch.dtype) -> None:
    """The step after the switch is the closed form's from the values that were stored, masters from the weight."""
    before, after = SWITCHES[switch]
    param = parameter(normal((40,), 0), dtype)
    optimizer = LuminaV([param], lr=1e-2, stochastic_rounding=False, **before)
    take_steps(optimizer, [param], range(3))
    options = {**before, **after}
    options["master_weights"] = {True: "full", "half": "semi", False: "none"}.get(
        options.get("master_weights", "none"), options.get("master_weights", "none")
    )
    old = {key: value.clone() for key, value in optimizer.state[param].items()}
    stored = support.moment_dtype(dtype, options)
    weight = param.detach().clone()
    if support.has_master(dtype, options):
        weight = support.master_of(weight, old).float()
    optimizer.param_groups[0].update(after)
    take_steps(optimizer, [param], range(3, 4))
    state = optimizer.state[param]
    assert {key: value.dtype for key, value in state.items()} == wanted_state(dtype, options)
    expected = support.exact_step(
        weight,
        old["exp_avg"].to(stored),
        old["exp_avg_sq"].to(stored),
        grad_of(0, 3, param.shape, dtype),
        4,
        dtype,
        lr=1e-2,
        **options,
    )
    result = support.master_of(param, state)
    tolerance = support.spacing(expected.weight, result.dtype) * (0.51 if result.dtype == dtype else 4)
    assert ((result.double() - expected.weight).abs() <= tolerance).all()


@pytest.mark.parametrize("mode", ["none", "full"])
def test_the_single_buffer_cannot_become_dual(mode: str) -> None:
    """There is no variance to go on with. A state that is started anew may."""
    params = new_params()
    optimizer = LuminaV(params, buffer=1, master_weights=mode)
    take_steps(optimizer, params, range(3))
    before = state_of(optimizer, params)
    optimizer.param_groups[0]["buffer"] = 2
    with pytest.raises(
        ValueError, match=r"buffer=2 and block_variance=True need a variance, .* optimizer.state\[param\].clear\(\)"
    ):
        take_steps(optimizer, params, range(3, 4))
    assert_same_state(state_of(optimizer, params), before)
    for param in params:
        optimizer.state[param].clear()
    take_steps(optimizer, params, range(3, 4))
    assert all(int(optimizer.state[param]["step"]) == 1 for param in params)
    assert "exp_avg_sq" in optimizer.state[params[0]]


def test_engines_are_chosen_in_one_place() -> None:
    assert choose_engine("auto", torch.device("cpu")).name == "foreach"
    assert [choose_engine(name, torch.device("cpu")).name for name in ENGINES] == list(ENGINES)
