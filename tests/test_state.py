"""State: what is kept, in which dtype, what loading takes from a file, and what it refuses."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import support
import torch
from runs import all_modes, assert_same_state, file_size, new_params, state_of, take_steps, through_a_file, wanted_state
from support import ENGINES, SIXTEEN_BIT, dtype_name, normal, parameter
from torch import Tensor, nn

from luminav import LuminaV, param_groups
from luminav.state import STATE

# ---- what is kept --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", support.DTYPES, ids=dtype_name)
def test_the_state_is_the_table_and_nothing_else(dtype: torch.dtype, engine: str) -> None:
    """In the optimizer, in its file, and after loading; shaped and laid out like the parameter."""
    modes = all_modes()
    if dtype == torch.bfloat16:
        whole = {name: {**mode, "split_master_weights": False} for name, mode in modes.items() if "-none" not in name}
        modes |= {f"{name}-whole": mode for name, mode in whole.items()}
    for name, options in modes.items():
        params = [parameter(normal((6, 4), 1), dtype, "transposed"), parameter(normal((), 2), dtype)]
        optimizer = LuminaV(params, execution=engine, **options)
        take_steps(optimizer, params, range(2))
        file = through_a_file(optimizer.state_dict())
        loaded = LuminaV(params, split_master_weights=options.get("split_master_weights", True))
        loaded.load_state_dict(file)
        expected = wanted_state(dtype, options)
        for number, param in enumerate(params):
            for state in (optimizer.state[param], file["state"][number], loaded.state[param]):
                assert {key: value.dtype for key, value in state.items()} == expected, name
                for key in state.keys() & {"exp_avg", "exp_avg_sq", "master_param", "master_remainder"}:
                    assert state[key].shape == param.shape and state[key].stride() == param.stride(), (name, key)
                for key in state.keys() & {"step", "cautious_scale", "bound_scale"}:
                    assert state[key].ndim == 0, (name, key)
            assert_same_state(state_of(loaded, params), state_of(optimizer, params))
    forms = [
        wanted_state(kept, {"master_weights": "full", "fused_single_pass": True})
        for kept in (torch.float16, torch.bfloat16)
    ]
    assert {kind.key for kind in STATE} == forms[0].keys() | forms[1].keys() | {
        "exp_avg_scale",
        "exp_avg_sq_scale",
        "exp_avg_sq_col",
    } and len(STATE) == 10
    for form in forms:
        assert [kind.key for kind in STATE if kind.key in form] == list(form)


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "strided_slice", "offset_slice"])
@pytest.mark.parametrize(
    ("dtype", "options", "bytes_per_param"),
    [
        (torch.float32, {}, 8),
        (torch.float32, {"master_weights": "full"}, 8),
        (torch.float32, {"buffer": 1}, 4),
        (torch.float64, {"master_weights": "semi"}, 16),
        (torch.bfloat16, {}, 4),
        (torch.bfloat16, {"buffer": 1}, 2),
        (torch.bfloat16, {"fused_single_pass": True}, 4),
        (torch.bfloat16, {"master_weights": "semi"}, 6),
        (torch.bfloat16, {"master_weights": "full"}, 10),
        (torch.bfloat16, {"master_weights": "semi", "buffer": 1}, 4),
        (torch.bfloat16, {"master_weights": "full", "buffer": 1}, 6),
        (torch.bfloat16, {"master_weights": "semi", "split_master_weights": False}, 8),
        (torch.bfloat16, {"master_weights": "full", "split_master_weights": False}, 12),
        (torch.float16, {"master_weights": "full", "buffer": 1}, 8),
    ],
    ids=str,
)
def test_the_file_holds_the_moments_and_the_master_only(
    dtype: torch.dtype, options: dict[str, Any], bytes_per_param: int, layout: str
) -> None:
    """No alias of the weight, no cache, and no whole storage of which the parameter is a slice."""
    param = parameter(normal((256, 200), 0), dtype, layout)
    optimizer = LuminaV([param], **options)
    take_steps(optimizer, [param], range(2))
    size, numel = file_size(optimizer.state_dict()), param.numel()
    assert bytes_per_param * numel <= size < bytes_per_param * numel * 1.02 + 8000
    pointers = [value.untyped_storage().data_ptr() for value in optimizer.state[param].values()]
    assert len(set(pointers)) == len(pointers) and param.untyped_storage().data_ptr() not in pointers
    loaded = LuminaV([param], split_master_weights=options.get("split_master_weights", True))
    loaded.load_state_dict(optimizer.state_dict())
    assert file_size(loaded.state_dict()) == size


# ---- loading: copies, forms of step, hooks -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {}),
        (torch.bfloat16, {"master_weights": "full"}),
        (torch.bfloat16, {"fused_single_pass": True, "lr": torch.tensor(1e-2)}),
    ],
    ids=["fp32", "full", "one_pass-lr_tensor"],
)
def test_loading_the_live_state_of_another_optimizer_ties_nothing(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """pytorch#196083: torch's own optimizers share tensors here, the step count and lr among them."""
    a, b = (parameter(normal((10,), 0), dtype) for _ in range(2))
    one, other = LuminaV([a], **copy.deepcopy(options)), LuminaV([b])
    take_steps(one, [a], range(2))
    other.load_state_dict(one.state_dict())
    pointers = [
        {value.data_ptr() for value in its.state[its.param_groups[0]["params"][0]].values()} for its in (one, other)
    ]
    assert not pointers[0] & pointers[1]
    before, lr = state_of(one, [a]), float(one.param_groups[0]["lr"])
    if isinstance(other.param_groups[0]["lr"], Tensor):
        other.param_groups[0]["lr"].fill_(0.5)
    take_steps(other, [b], range(2, 4))
    assert_same_state(state_of(one, [a]), before)
    assert float(one.param_groups[0]["lr"]) == lr
    take_steps(one, [a], range(2, 4))  # nor the other way round
    assert int(other.state[b]["step"]) == 4


@pytest.mark.parametrize(
    "form",
    [
        int,
        float,
        lambda n: torch.tensor(float(n)),
        lambda n: torch.tensor(n, dtype=torch.float64),
        lambda n: torch.tensor(n),
        lambda n: torch.tensor(n, dtype=torch.int32),
        lambda n: torch.tensor([float(n)]),
        lambda n: torch.tensor([[n]]),
        lambda n: torch.tensor(n, dtype=torch.bfloat16),
    ],
    ids=["int", "float", "f32", "f64", "i64", "i32", "one_element", "one_by_one", "bf16"],
)
def test_step_in_a_file_may_have_any_form(form: Callable[[int], Any]) -> None:
    """pytorch#103256, #127197, #80809. The next update is that of the closed form at step 3."""
    weight, grads = normal((9,), 0), support.gradients((9,), 3, seed=1)
    param = parameter(weight)
    optimizer = LuminaV([param], lr=1e-2)
    support.run(optimizer, [param], [[grad] for grad in grads[:2]])
    file = copy.deepcopy(optimizer.state_dict())
    file["state"][0]["step"] = form(2)
    param = parameter(param)
    loaded = LuminaV([param])
    loaded.load_state_dict(through_a_file(file))
    support.run(loaded, [param], [[grads[2]]])
    reference = support.Reference(weight, lr=1e-2)
    for grad in grads:
        reference.step(grad)
    assert support.largest_error(param, reference.weight) < 1e-6
    step = loaded.state_dict()["state"][0]["step"]
    assert step.dtype == torch.int64 and step.ndim == 0 and int(step) == 3


def test_large_step_counts_survive() -> None:
    """Beyond 2²⁴ an FP32 counter would stand still."""
    param = parameter(normal((3,), 0))
    optimizer = LuminaV([param])
    take_steps(optimizer, [param], range(1))
    file = optimizer.state_dict()
    file["state"][0]["step"] = 2**24 + 1
    optimizer.load_state_dict(through_a_file(file))
    take_steps(optimizer, [param], range(1))
    assert int(optimizer.state[param]["step"]) == 2**24 + 2


def test_hooks_run_in_torchs_order_and_see_the_plain_file() -> None:
    param = parameter(normal((3,), 0))
    optimizer = LuminaV([param], process_group=object())
    take_steps(optimizer, [param], range(2))
    seen: list[str] = []

    def saved(_: Any, file: dict[str, Any]) -> None:
        seen.append("saved")
        assert file["param_groups"][0]["process_group"] is None

    def loading(_: Any, file: dict[str, Any]) -> None:
        seen.append("loading")
        assert isinstance(file["state"][0]["exp_avg"], Tensor)

    optimizer.register_state_dict_pre_hook(lambda _: seen.append("saving"))
    optimizer.register_state_dict_post_hook(saved)
    optimizer.register_load_state_dict_pre_hook(loading)
    optimizer.register_load_state_dict_post_hook(lambda _: seen.append("loaded"))
    for _ in range(2):  # a second time: nothing of the first is left over
        seen.clear()
        optimizer.load_state_dict(optimizer.state_dict())
        assert seen == ["saving", "saved", "loading", "loaded"]
    assert optimizer.param_groups[0]["process_group"] is not None


def test_hooks_may_rewrite_the_file() -> None:
    """A post-hook wraps the file, a pre-hook unwraps it and changes lr: nothing between them needs to know."""
    param = parameter(normal((3,), 0), torch.bfloat16)
    optimizer = LuminaV([param], lr=1e-2, master_weights="full")
    take_steps(optimizer, [param], range(2))
    expected = state_of(optimizer, [param])
    optimizer.register_state_dict_post_hook(lambda _, file: {"wrapped": file})
    file = through_a_file(optimizer.state_dict())
    assert list(file) == ["wrapped"]
    loaded = LuminaV([param])

    def unwrap(_: Any, wrapped: dict[str, Any]) -> dict[str, Any]:
        inner = wrapped["wrapped"]
        groups = [{**group, "lr": 0.25} for group in inner["param_groups"]]
        return {"state": inner["state"], "param_groups": groups}

    loaded.register_load_state_dict_pre_hook(unwrap)
    loaded.load_state_dict(file)
    assert_same_state(state_of(loaded, [param]), expected)
    assert loaded.param_groups[0]["lr"] == 0.25


def test_a_hook_that_raises_leaves_the_optimizer_as_it_was() -> None:
    param = parameter(normal((3,), 0))
    optimizer = LuminaV([param])
    take_steps(optimizer, [param], range(2))
    file, before = optimizer.state_dict(), state_of(optimizer, [param])

    def refuse(*_: Any) -> None:
        raise KeyError("no")

    handles = [optimizer.register_load_state_dict_pre_hook(refuse), optimizer.register_state_dict_post_hook(refuse)]
    for call in (optimizer.state_dict, lambda: optimizer.load_state_dict(file)):
        with pytest.raises(KeyError):
            call()
    for handle in handles:
        handle.remove()
    assert_same_state(state_of(optimizer, [param]), before)
    optimizer.load_state_dict(optimizer.state_dict())
    assert_same_state(state_of(optimizer, [param]), before)


# ---- refused files -------------------------------------------------------------------------------------------------

Spoil = Callable[[dict[str, Any]], Any]


def spoilt_entry(key: str, value: Any) -> Spoil:
    def spoil(file: dict[str, Any]) -> None:
        file["state"][1][key] = value

    return spoil


def spoilt_element(key: str, value: float) -> Spoil:
    def spoil(file: dict[str, Any]) -> None:
        file["state"][1][key].view(-1)[-1] = value

    return spoil


def without(*path: Any) -> Spoil:
    def spoil(file: dict[str, Any]) -> None:
        inner: Any = file
        for key in path[:-1]:
            inner = inner[key]
        del inner[path[-1]]

    return spoil


def newer(group: dict[str, Any]) -> None:
    """Make of a group one as luminav 1.5.3, a name for luminamoon, writes it."""
    del group["alpha_ss"]
    group |= {"lam": 0.3, "centered_defect": False, "bound_type": 2, "master_weights": 0, "execution": 0}
    group["version"] = "1.5.3"


SPOILT: dict[str, tuple[Spoil, str]] = {
    "shape": (spoilt_entry("exp_avg", torch.zeros(4)), r"state\[1\]: 'exp_avg' has shape \(4,\), expected \(5,\)"),
    "scalar for a tensor": (spoilt_entry("exp_avg_sq", torch.zeros(())), "'exp_avg_sq' has shape"),
    "tensor for a scale": (spoilt_entry("bound_scale", torch.ones(2)), "'bound_scale' has shape"),
    "master shape": (spoilt_entry("master_param", torch.zeros(5, 1)), "'master_param' has shape"),
    "remainder shape": (spoilt_entry("master_remainder", torch.zeros(5, 1).short()), "'master_remainder' has shape"),
    "float remainder": (spoilt_entry("master_remainder", torch.zeros(5)), "'master_remainder' must be an integer tens"),
    "list of remainders": (spoilt_entry("master_remainder", [0] * 5), "'master_remainder' must be .* got list"),
    "no exp_avg": (without("state", 1, "exp_avg"), r"state\[1\] has no 'exp_avg'"),
    "no exp_avg_sq": (without("state", 1, "exp_avg_sq"), "no 'exp_avg_sq', which buffer=2 of its group needs"),
    "nan exp_avg": (
        spoilt_element("exp_avg", math.nan),
        r"state\[1\]: 'exp_avg' must be finite, but holds nan. Is the",
    ),
    "infinite exp_avg": (spoilt_element("exp_avg", math.inf), "'exp_avg' must be finite, but holds inf"),
    "infinite negative exp_avg": (spoilt_element("exp_avg", -math.inf), "'exp_avg' must be finite, but holds -inf"),
    "nan exp_avg_sq": (spoilt_element("exp_avg_sq", math.nan), "'exp_avg_sq' must be finite and >= 0, but holds nan"),
    "negative exp_avg_sq": (spoilt_element("exp_avg_sq", -0.5), "'exp_avg_sq' must be finite and >= 0, but holds -0.5"),
    "infinite exp_avg_sq": (spoilt_element("exp_avg_sq", math.inf), "'exp_avg_sq' must be .* but holds inf"),
    "nan cautious_scale": (spoilt_element("cautious_scale", math.nan), "'cautious_scale' must be .* but holds nan"),
    "negative bound_scale": (spoilt_element("bound_scale", -1.0), "'bound_scale' must be .* but holds -1"),
    "infinite bound_scale": (spoilt_element("bound_scale", math.inf), "'bound_scale' must be .* but holds inf"),
    "negative step": (spoilt_entry("step", -1), "'step' must be a whole number >= 0, got -1"),
    "half a step": (spoilt_entry("step", 2.5), "'step' must be a whole number"),
    "nan step": (spoilt_entry("step", float("nan")), "'step' must be a whole number"),
    "infinite step": (spoilt_entry("step", torch.tensor(float("inf"))), "'step' must be a whole number"),
    "huge step": (spoilt_entry("step", 2**63), "'step' must be a whole number"),
    "step as text": (spoilt_entry("step", "three"), "'step' must be a whole number .* got 'three'"),
    "several steps": (spoilt_entry("step", torch.tensor([1, 2])), "'step' must be a whole number"),
    "complex step": (spoilt_entry("step", torch.tensor(1j)), "'step' must be a whole number"),
    "complex moment": (spoilt_entry("exp_avg", torch.zeros(5, dtype=torch.complex64)), "floating-point tensor"),
    "integer moment": (spoilt_entry("exp_avg", torch.zeros(5, dtype=torch.int32)), "floating-point tensor"),
    "list for a tensor": (spoilt_entry("exp_avg", [0.0] * 5), "'exp_avg' must be a floating-point tensor, got list"),
    "entry is a tensor": (lambda file: file["state"].update({1: torch.zeros(5)}), r"state\[1\] must be a dict"),
    "no state": (without("state"), "no 'state'"),
    "no groups": (without("param_groups"), "no 'param_groups'"),
    "no step": (
        without("state", 1, "step"),
        r"state\[1\] has no 'step', without .* 'exp_avg' .* Is the file damaged\?",
    ),
    "step is None": (spoilt_entry("step", None), r"state\[1\] has no 'step'"),
    "only a variance": (lambda file: file["state"].update({1: {"exp_avg_sq": torch.ones(5)}}), "no 'step'.*exp_avg_sq"),
    "only a master": (lambda file: file["state"].update({1: {"master_param": torch.ones(5)}}), "no 'step'.*master_p"),
    "state is a list": (lambda file: file.update(state=[]), "'state' of the loaded .* must be a dict, got list"),
    "state is None": (lambda file: file.update(state=None), "'state' of the loaded .* must be a dict, got NoneType"),
    "groups are a dict": (lambda file: file.update(param_groups={}), "'param_groups' of .* must be a list, got dict"),
    "group is None": (lambda file: file["param_groups"].append(None), r"param_groups\[2\] .* must be a dict, got None"),
    "no params": (without("param_groups", 1, "params"), r"param_groups\[1\] of the loaded state dict has no 'params'"),
    "group count": (
        lambda file: file["param_groups"].append(file["param_groups"][0]),
        r"different number of parameter groups: 3, the optimizer 2\. Build the optimizer with the groups",
    ),
    "group size": (
        lambda file: file["param_groups"][1]["params"].append(3),
        r"doesn't match the size of optimizer's group: param_groups\[1\] has 2 parameters, the optimizer's 1\. Build",
    ),
    "newer": (lambda file: newer(file["param_groups"][1]), r"\[1\] .* luminav 1\.5 or newer.* \(version '1\.5\.3'\)"),
    "bad option": (lambda file: file["param_groups"][1].update(tau=-1.0), "tau must be > 0 and finite, got -1.0"),
    "bad mode": (lambda file: file["param_groups"][1].update(master_weights="fp8"), "master_weights must be one of"),
}


def two_groups() -> tuple[list[nn.Parameter], LuminaV]:
    params = [parameter(normal((5,), number), torch.bfloat16) for number in range(3)]
    groups = [{"params": params[:2]}, {"params": params[2:], "lr": 1e-2, "tau": 0.5}]
    return params, LuminaV(groups, master_weights="full", fused_single_pass=True)


@pytest.mark.parametrize("fault", SPOILT)
def test_a_spoilt_file_is_refused_and_changes_nothing(fault: str) -> None:
    spoil, message = SPOILT[fault]
    params, optimizer = two_groups()
    take_steps(optimizer, params, range(3))
    file = copy.deepcopy(optimizer.state_dict())
    file["param_groups"][0]["lr"] = 0.125  # the fault comes later in the file than this
    file["state"][0]["exp_avg"].fill_(1.0)
    spoil(file)
    params, optimizer = two_groups()
    take_steps(optimizer, params, range(4))
    untouched_params, untouched = two_groups()
    take_steps(untouched, untouched_params, range(4))
    before, groups = state_of(optimizer, params), copy.deepcopy(optimizer.state_dict()["param_groups"])
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(file)
    assert_same_state(state_of(optimizer, params), before)
    assert optimizer.state_dict()["param_groups"] == groups
    for one, its in ((optimizer, params), (untouched, untouched_params)):
        take_steps(one, its, range(4, 6))
    assert_same_state(state_of(optimizer, params), state_of(untouched, untouched_params))


@pytest.mark.parametrize("value", [None, "checkpoint.pt", b"", 3, [], torch.ones(2)], ids=lambda v: type(v).__name__)
def test_what_is_no_state_dict_is_refused(value: Any) -> None:
    """The name of a file among it. A list and a tensor would come as far as torch's own checks."""
    optimizer = LuminaV([parameter(torch.ones(2))])
    name = type(value).__name__
    message = rf"state_dict must be a dict .*, got {name}\. Read a file first: torch\.load\(path\)"
    with pytest.raises(TypeError, match=message):
        optimizer.load_state_dict(value)
    optimizer.register_load_state_dict_pre_hook(lambda *_: value)
    if value is not None:  # which says that the hook has changed its argument
        with pytest.raises(TypeError, match=message):
            optimizer.load_state_dict(optimizer.state_dict())


def test_a_file_of_one_group_for_an_optimizer_of_two_names_the_way_out() -> None:
    model = nn.Linear(3, 2)
    file = LuminaV(model.parameters()).state_dict()
    optimizer = LuminaV(param_groups(model))
    with pytest.raises(ValueError, match=r"groups: 1, the optimizer 2\. .*luminav\.param_groups\(model\) makes up to"):
        optimizer.load_state_dict(file)
    LuminaV(model.parameters()).load_state_dict(file)


@pytest.mark.parametrize("entry", [{}, {"scratch": torch.zeros(5), "buf_count": 2}, {"theirs": 1}, {"step": 0}])
def test_an_entry_without_moments_needs_no_step(entry: dict[str, Any]) -> None:
    param = parameter(torch.ones(2))
    optimizer = LuminaV([param])
    optimizer.load_state_dict({"state": {0: entry}, "param_groups": optimizer.state_dict()["param_groups"]})
    assert not optimizer.state


def test_another_framework_s_keys_make_no_newer_file() -> None:
    param = parameter(torch.ones(2))
    optimizer = LuminaV([param])
    file = optimizer.state_dict()
    file["param_groups"][0] |= {"lam": 2.0, "version": "1.5.3"}
    optimizer.load_state_dict(file)
    assert optimizer.param_groups[0]["lam"] == 2.0


@pytest.mark.parametrize("dtype", support.DTYPES, ids=dtype_name)
@pytest.mark.parametrize("options", [{}, {"buffer": 1}, {"master_weights": "full"}], ids=str)
@pytest.mark.parametrize("number", [0, 1234, 4095])
def test_a_damaged_moment_is_refused_wherever_it_is(number: int, options: dict[str, Any], dtype: torch.dtype) -> None:
    """Before anything changes: the one element would become a NaN weight, with one RMS per tensor all of them."""
    param = parameter(normal((64, 64), 0), dtype, "transposed")
    optimizer = LuminaV([param], **options)
    take_steps(optimizer, [param], range(2))
    before = state_of(optimizer, [param])
    for key in {"exp_avg", "exp_avg_sq"} & optimizer.state[param].keys():
        file = through_a_file(optimizer.state_dict())
        file["state"][0][key][number // 64, number % 64] = math.nan
        with pytest.raises(ValueError, match=rf"state\[0\]: '{key}' must be finite.*, but holds nan"):
            optimizer.load_state_dict(file)
        assert_same_state(state_of(optimizer, [param]), before)


@pytest.mark.parametrize("name", all_modes())
@pytest.mark.parametrize("dtype", support.DTYPES, ids=dtype_name)
def test_what_the_wildest_run_saves_is_loaded(dtype: torch.dtype, name: str) -> None:
    """Moments saturate: gradients at the ends of their range, NaN and infinite ones, and weights that are NaN."""
    options, params = all_modes()[name], [parameter(torch.ones(64, 64), dtype), parameter(torch.ones(()), dtype)]
    with torch.no_grad():
        params[0][0, 0] = math.nan
    optimizer = LuminaV(params, **options)
    largest = torch.finfo(dtype).max
    wild = torch.tensor([largest, -largest, largest, math.nan, math.inf, -math.inf, 0.0, 1.0], dtype=dtype)
    for step in range(8):
        for param in params:
            param.grad = wild.roll(step % 3).repeat(512)[: param.numel()].view(param.shape)
        optimizer.step()
    reader = LuminaV(params, split_master_weights=options.get("split_master_weights", True))
    reader.load_state_dict(through_a_file(optimizer.state_dict()))
    assert_same_state(state_of(reader, params), state_of(optimizer, params))
    assert params[0].isnan().sum() == 1 and params[1].isfinite()


def test_the_ends_of_the_range_are_loaded() -> None:
    """Largest moments of either sign, and a variance that is −0."""
    param, largest = parameter(torch.ones(2), torch.bfloat16), torch.finfo(torch.bfloat16).max
    optimizer = LuminaV([param])
    entry = {"step": 3, "exp_avg": torch.tensor([largest, -largest]), "exp_avg_sq": torch.tensor([largest, -0.0])}
    optimizer.load_state_dict({"state": {0: entry}, "param_groups": optimizer.state_dict()["param_groups"]})
    assert optimizer.state[param]["exp_avg"].tolist() == [largest, -largest]
    assert optimizer.state[param]["exp_avg_sq"].tolist() == [largest, 0.0]


@pytest.mark.parametrize("dtype", SIXTEEN_BIT, ids=dtype_name)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_master_that_is_not_finite_does_not_reach_its_weight(value: float, dtype: torch.dtype) -> None:
    """It is loaded, since its weight may be so too; where that is finite, the master begins there anew."""
    options = {"master_weights": "semi", "split_master_weights": False, "weight_decay": 0.0}
    param = parameter(torch.tensor([1.0, 2.0]), dtype)
    optimizer = LuminaV([param], **options)
    take_steps(optimizer, [param], range(1))
    file = through_a_file(optimizer.state_dict())
    file["state"][0]["master_param"][0] = value
    with torch.no_grad():
        param.copy_(torch.tensor([1.0, 2.0]))
    optimizer.load_state_dict(file)
    param.grad = torch.zeros_like(param)
    optimizer.param_groups[0]["betas"] = (0.0, 0.999)  # no momentum: nothing moves
    optimizer.step()
    assert param.tolist() == [1.0, 2.0] and optimizer.state[param]["master_param"].tolist()[0] == 1.0


def test_state_on_the_meta_device_is_loaded_unread() -> None:
    param = parameter(normal((4, 4), 0))
    optimizer = LuminaV([param])
    take_steps(optimizer, [param], range(1))
    empty = nn.Parameter(torch.empty(4, 4, device="meta"))
    reader = LuminaV([empty])
    reader.load_state_dict(optimizer.state_dict())
    assert reader.state[empty]["exp_avg"].is_meta


@pytest.mark.parametrize("other", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_the_file_of_another_optimizer_is_refused(other: type[torch.optim.Optimizer]) -> None:
    """AdamW's exp_avg_sq has the right shape, and means something else."""
    param = parameter(normal((5,), 0))
    theirs, optimizer = other([param], lr=1e-2), LuminaV([param])
    take_steps(theirs, [param], range(1))
    with pytest.raises(ValueError, match="'tau': it was not written by LuminaV"):
        optimizer.load_state_dict(theirs.state_dict())
    assert not optimizer.state and optimizer.param_groups[0]["lr"] == 8e-4


def test_a_refused_file_does_not_change_itself() -> None:
    params, optimizer = two_groups()
    take_steps(optimizer, params, range(2))
    file = optimizer.state_dict()
    kept = copy.deepcopy(file)
    optimizer.load_state_dict(file)
    assert file.keys() == kept.keys() and file["param_groups"] == kept["param_groups"]
    for number, entry in kept["state"].items():
        assert_same_state(file["state"][number], entry)


# ---- options of a file ---------------------------------------------------------------------------------------------


def test_options_of_the_rule_come_from_the_file_and_those_of_the_process_stay(caplog: pytest.LogCaptureFixture) -> None:
    param = parameter(normal((4,), 0))
    group = object()
    writer = LuminaV(
        [param], lr=1e-2, tau=0.5, seed=7, betas=(0.8, 0.99), execution="foreach", capturable=True, maximize=True
    )
    reader = LuminaV([param], execution="single", process_group=group)
    with caplog.at_level(logging.INFO, logger="luminav"):
        reader.load_state_dict(through_a_file(writer.state_dict()))
    loaded = reader.param_groups[0]
    assert (loaded["execution"], loaded["capturable"], loaded["process_group"]) == ("single", False, group)
    assert (loaded["lr"], loaded["tau"], loaded["seed"], loaded["betas"]) == (1e-2, 0.5, 7, (0.8, 0.99))
    told = {record.getMessage().split(": ")[1].split("=")[0]: record.levelno for record in caplog.records}
    differing = {"tau", "seed", "betas", "maximize"}
    assert told == dict.fromkeys(differing, logging.WARNING) | {"lr": logging.INFO}
    tau = next(record.getMessage() for record in caplog.records if " tau=" in record.getMessage())
    assert tau == "param_groups[0]: tau=0.5 comes from the loaded file; the optimizer had 0.8."


def test_the_same_options_are_loaded_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    """Also when the file spells a mode in another way, or holds a list for the pair of betas."""
    param = parameter(normal((4,), 0))
    optimizer = LuminaV([param], master_weights="full", betas=(0.8, 0.99), lr=torch.tensor(1e-2))
    file = optimizer.state_dict()
    file["param_groups"][0] |= {"master_weights": True, "betas": [0.8, 0.99]}
    with caplog.at_level(logging.INFO, logger="luminav"):
        optimizer.load_state_dict(through_a_file(file))
    assert not caplog.records
    assert optimizer.param_groups[0]["master_weights"] == "full"
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.99)


@pytest.mark.parametrize("capturable", [False, True])
def test_capturable_belongs_to_the_process(capturable: bool) -> None:
    """A file from the one kind of run goes on in the other, with the same bits."""
    results = []
    for reader in (capturable, not capturable):
        params = new_params(torch.bfloat16)
        optimizer = LuminaV(params, capturable=capturable, fused_single_pass=True)
        take_steps(optimizer, params, range(3))
        loaded = LuminaV(params, capturable=reader)
        loaded.load_state_dict(through_a_file(optimizer.state_dict()))
        take_steps(loaded, params, range(3, 6))
        assert loaded.param_groups[0]["capturable"] is reader
        results.append(state_of(loaded, params))
    assert_same_state(results[1], results[0])


@pytest.mark.parametrize("dtype", SIXTEEN_BIT, ids=dtype_name)
@pytest.mark.parametrize(
    "written", [{}, {"master_weights": "semi"}, {"master_weights": "full"}, {"buffer": 1}], ids=str
)
def test_the_file_decides_the_mode(written: dict[str, Any], dtype: torch.dtype) -> None:
    """Whatever the reader's constructor said, masters are not rounded away and moments keep their dtype."""
    for made in ({}, {"master_weights": "semi"}, {"master_weights": "full"}, {"buffer": 1}):
        param = parameter(normal((30,), 0), dtype)
        optimizer = LuminaV([param], **written)
        take_steps(optimizer, [param], range(3))
        reader = LuminaV([param], **made)
        reader.load_state_dict(through_a_file(optimizer.state_dict()))
        assert_same_state(state_of(reader, [param]), state_of(optimizer, [param]))
        for key, value in (("master_weights", "none"), ("buffer", 2)):
            assert reader.param_groups[0][key] == written.get(key, value)


def test_options_that_an_older_file_does_not_have_stay() -> None:
    param = parameter(normal((4,), 0))
    optimizer = LuminaV([param], ema_decay=0.5, maximize=True)
    take_steps(optimizer, [param], range(1))
    file = optimizer.state_dict()
    for name in ("ema_decay", "maximize", "capturable"):
        del file["param_groups"][0][name]
    reader = LuminaV([param], ema_decay=0.25)
    reader.load_state_dict(file)
    assert (reader.param_groups[0]["ema_decay"], reader.param_groups[0]["maximize"]) == (0.25, False)
    take_steps(reader, [param], range(1, 2))


def test_keys_of_others_in_a_group_are_kept() -> None:
    """Schedulers and frameworks keep keys of their own in a group; they come from the file, as in torch."""
    param = parameter(normal((4,), 0))
    optimizer = LuminaV([{"params": [param], "initial_lr": 0.5, "lr_scale": 2.0}])
    file = through_a_file(optimizer.state_dict())
    reader = LuminaV([param])
    reader.load_state_dict(file)
    assert (reader.param_groups[0]["initial_lr"], reader.param_groups[0]["lr_scale"]) == (0.5, 2.0)


def test_unknown_state_of_a_file_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    """Entries beyond the parameters, with a word of it, and keys beyond the table."""
    param = parameter(normal((4,), 0))
    optimizer = LuminaV([param])
    take_steps(optimizer, [param], range(2))
    file = copy.deepcopy(optimizer.state_dict())
    file["state"][0]["max_exp_avg_sq"] = torch.ones(4)
    file["state"]["global"] = {"x": torch.ones(4)}
    file["state"][17] = {"step": 3}
    reader = LuminaV([param])
    with caplog.at_level(logging.WARNING, logger="luminav"):
        reader.load_state_dict(file)
    assert_same_state(state_of(reader, [param]), state_of(optimizer, [param]))
    assert list(reader.state) == [param]
    assert [record.getMessage() for record in caplog.records] == [
        "state['global'] in the loaded file (of 2 such) belongs to no parameter: dropped."
    ]


@pytest.mark.parametrize("theirs", [5, [1], {"x": 1}, torch.ones(3)], ids=["int", "list", "dict", "tensor"])
@pytest.mark.parametrize("steps", [0, 2], ids=["before", "later"])
def test_what_others_keep_beside_the_state_of_parameters_is_left_alone(theirs: Any, steps: int) -> None:
    """torch's optimizers take anything there, and save it."""
    param, twin = parameter(normal((4,), 0)), parameter(normal((4,), 0))
    optimizer, expected = LuminaV([param]), LuminaV([twin])
    take_steps(optimizer, [param], range(steps))
    optimizer.state["theirs"] = theirs  # type: ignore[index]
    take_steps(optimizer, [param], range(steps, 4))
    take_steps(expected, [twin], range(4))
    file = optimizer.state_dict()
    assert file["state"]["theirs"] is theirs or file["state"]["theirs"] == theirs
    assert_same_state(state_of(optimizer, [param]), state_of(expected, [twin]))
    reader = LuminaV([param])
    reader.load_state_dict(file)
    assert_same_state(state_of(reader, [param]), state_of(expected, [twin]))


def test_a_group_added_after_loading_trains() -> None:
    first, second = parameter(normal((4,), 0)), parameter(normal((3,), 1))
    optimizer = LuminaV([first])
    take_steps(optimizer, [first], range(2))
    reader = LuminaV([first])
    reader.load_state_dict(through_a_file(optimizer.state_dict()))
    reader.add_param_group({"params": [second], "master_weights": True, "lr": 1e-2})
    take_steps(reader, [first, second], range(2, 4))
    assert [int(reader.state[p]["step"]) for p in (first, second)] == [4, 2]
    assert reader.param_groups[1]["master_weights"] == "full"


def test_a_file_goes_into_a_model_of_another_dtype() -> None:
    """FP32 moments beyond FP16 saturate: an infinite variance would never decay."""
    wide = parameter(torch.tensor([1.0, 2.0]))
    optimizer = LuminaV([wide])
    support.run(optimizer, [wide], [[torch.tensor([1e6, 1.0])]])
    assert optimizer.state[wide]["exp_avg_sq"].max() > 65504
    narrow = parameter(wide, torch.float16)
    reader = LuminaV([narrow])
    reader.load_state_dict(through_a_file(optimizer.state_dict()))
    state = reader.state[narrow]
    assert state["exp_avg"].tolist()[0] == 65504 and state["exp_avg_sq"].tolist()[0] == 65504
    assert state["exp_avg"].dtype == torch.float16 and state["exp_avg"][1] == torch.tensor(0.1).half()


def test_loading_in_inference_mode_makes_ordinary_state() -> None:
    param = parameter(normal((4,), 0), torch.bfloat16)
    optimizer = LuminaV([param], master_weights="full")
    take_steps(optimizer, [param], range(2))
    with torch.inference_mode():
        optimizer.load_state_dict(through_a_file(optimizer.state_dict()))
    take_steps(optimizer, [param], range(2, 3))
    assert not any(value.is_inference() for value in optimizer.state[param].values())
