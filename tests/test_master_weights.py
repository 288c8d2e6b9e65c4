"""FP32 master weights: they follow edits from outside, live through conversions of the model, and can be exported.

A BF16 weight's master is kept split, as the weight and a remainder, unless the process asks for the whole; both give
the same bits. What only a whole master can do is tested with `split_master_weights=False`.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import support
import torch
from runs import (
    LATE_NUMBER,
    NET_MODES,
    Net,
    assert_same_state,
    assert_weights_equal,
    grad_of,
    holding,
    state_of,
    take_steps,
    through_a_file,
    wanted_state,
)
from support import MASTER_MODES, MODES, SIXTEEN_BIT, assert_same_bits, dtype_name, master_of, normal, parameter
from torch import Tensor, nn

from luminav import LuminaV

# ---- edits from outside --------------------------------------------------------------------------------------------


def trained_with_master(
    dtype: torch.dtype = torch.bfloat16, mode: str = "semi", *, split: bool = True, **options: Any
) -> tuple[nn.Parameter, LuminaV]:
    param = parameter(normal((300,), 0), dtype)
    options = {"master_weights": mode, "lr": 1e-3, "split_master_weights": split, **options}
    optimizer = LuminaV([param], **options)
    take_steps(optimizer, [param], range(3))
    return param, optimizer


def edit_by_copy(param: nn.Parameter, values: Tensor) -> None:
    with torch.no_grad():
        param.copy_(values)


def edit_by_index(param: nn.Parameter, values: Tensor) -> None:
    with torch.no_grad():
        for number in (values != param).nonzero().flatten().tolist():
            param[number] = values[number]


def edit_by_load_state_dict(param: nn.Parameter, values: Tensor) -> None:
    holding(param).load_state_dict({"weight": values})


def edit_by_replacing_data(param: nn.Parameter, values: Tensor) -> None:
    """The version counter says nothing of it."""
    param.data = values.to(param.dtype).clone()


def edit_by_vector_to_parameters(param: nn.Parameter, values: Tensor) -> None:
    nn.utils.vector_to_parameters(values.to(param.dtype), [param])


def edit_by_data_and_a_touch(param: nn.Parameter, values: Tensor) -> None:
    """What docs/checkpoints.md asks for after a write through param.data."""
    param.data.copy_(values)
    with torch.no_grad():
        param.mul_(1)


by_form = pytest.mark.parametrize("split", [True, False], ids=["split", "whole"])
EDITS = [
    edit_by_copy,
    edit_by_index,
    edit_by_load_state_dict,
    edit_by_replacing_data,
    edit_by_vector_to_parameters,
    edit_by_data_and_a_touch,
]


@pytest.mark.parametrize("dtype", SIXTEEN_BIT, ids=dtype_name)
@pytest.mark.parametrize("edit", EDITS)
def test_whole_masters_follow_edits_from_outside_and_only_where_there_was_one(
    edit: Callable[[nn.Parameter, Tensor], None], dtype: torch.dtype
) -> None:
    """Elements 0 to 99 get new weights; the others keep the full precision of their master."""
    param, optimizer = trained_with_master(dtype, split=False)
    master = optimizer.state[param]["master_param"].clone()
    values = param.detach().clone()
    values[:100] = normal((100,), 5, dtype=dtype) + 3
    edit(param, values)
    edited = optimizer.master_state_dict(holding(param))["weight"]
    assert_same_bits(edited[:100], values[:100].float())
    assert_same_bits(edited[100:], master[100:])
    param.grad = torch.zeros_like(param)
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert_same_bits(optimizer.state[param]["master_param"], edited)
    assert_same_bits(param, values)


def edit_by_data_alone(param: nn.Parameter, values: Tensor) -> None:
    """The version counter says nothing of it; the weight is the upper half of its master whoever wrote it."""
    param.data.copy_(values)


@pytest.mark.parametrize("edit", [*EDITS, edit_by_data_alone])
def test_an_edited_weight_keeps_its_old_remainder(edit: Callable[[nn.Parameter, Tensor], None]) -> None:
    """Split, there is nothing to notice: the master is the new weight and what the old one lacked, at most half an ulp
    away. The others keep every bit."""
    param, optimizer = trained_with_master()
    remainder = optimizer.state[param]["master_remainder"].clone()
    values = param.detach().clone()
    values[:100] = normal((100,), 5, dtype=torch.bfloat16) + 3
    edit(param, values)
    expected = master_of(values, {"master_remainder": remainder})
    assert (remainder[:100] != 0).sum() > 90 and (expected[:100] != values[:100].float()).sum() > 90
    off = (expected.double() - values.double()).abs()
    assert (off <= 0.5 * support.spacing(values, torch.bfloat16)).all()
    assert_same_bits(optimizer.master_state_dict(holding(param))["weight"], expected)
    assert_same_bits(optimizer.state[param]["master_remainder"], remainder)
    moments = {key: optimizer.state[param][key].clone() for key in ("exp_avg", "exp_avg_sq")}
    take_steps(optimizer, [param], range(3, 4))
    grad = grad_of(0, 3, param.shape, torch.bfloat16)
    stepped = support.exact_step(expected, *moments.values(), grad, 4, torch.bfloat16, lr=1e-3, master_weights="semi")
    assert support.largest_error(master_of(param, optimizer.state[param]), stepped.weight) < 1e-6


@pytest.mark.parametrize("engine", support.ENGINES)
def test_a_step_of_nothing_keeps_an_edited_weight_and_its_remainder(engine: str) -> None:
    """No gradient, no momentum, no decay; with lr 0 and with lr 1e-3, which stores all anew."""
    for lr in (0.0, 1e-3):
        param, optimizer = trained_with_master(execution=engine, weight_decay=0.0)
        remainder = optimizer.state[param]["master_remainder"].clone()
        edit_by_copy(param, normal((300,), 5, dtype=torch.bfloat16))
        edited = param.detach().clone()
        optimizer.param_groups[0]["lr"] = lr
        optimizer.state[param]["exp_avg"].zero_()
        param.grad = torch.zeros_like(param)
        optimizer.step()
        assert_same_bits(optimizer.state[param]["master_remainder"], remainder)
        assert_same_bits(param, edited)


def test_a_write_through_param_data_is_not_seen_by_a_whole_master() -> None:
    """docs/checkpoints.md says so: torch keeps no count of it. The master wins in the next step."""
    param, optimizer = trained_with_master(split=False)
    master = optimizer.state[param]["master_param"].clone()
    param.data.fill_(5.0)
    param.grad = torch.zeros_like(param)
    optimizer.param_groups[0]["weight_decay"] = 0.0
    before = optimizer.state[param]["exp_avg"].clone()
    optimizer.step()
    assert (optimizer.state[param]["master_param"] - master).abs().max() < 3e-3
    assert (param - 5.0).abs().min() > 0.5 and before.any()


@pytest.mark.parametrize("dtype", SIXTEEN_BIT, ids=dtype_name)
@pytest.mark.parametrize("mode", ["semi", "full"])
@pytest.mark.parametrize("order", ["model first", "optimizer first", "model only afterwards, twice"])
@by_form
def test_model_and_optimizer_may_be_loaded_in_either_order(
    order: str, mode: str, dtype: torch.dtype, split: bool
) -> None:
    param, optimizer = trained_with_master(dtype, mode, split=split)
    model_file = through_a_file(holding(param).state_dict())
    optimizer_file = through_a_file(optimizer.state_dict())
    other = parameter(torch.ones(300), dtype)
    reader = LuminaV([other], split_master_weights=split)
    loads = {
        "m": lambda: holding(other).load_state_dict(model_file),
        "o": lambda: reader.load_state_dict(optimizer_file),
    }
    for what in {"model first": "mo", "optimizer first": "om"}.get(order, "omm"):
        loads[what]()
    for one, its in ((optimizer, param), (reader, other)):
        take_steps(one, [its], range(3, 6))
    assert_same_state(state_of(reader, [other]), state_of(optimizer, [param]))


def test_an_older_optimizer_file_alone_does_not_pull_the_weights_back() -> None:
    """Masters of the file that do not belong to the present weights are re-made from them."""
    param, optimizer = trained_with_master(split=False)
    file = through_a_file(optimizer.state_dict())
    take_steps(optimizer, [param], range(3, 40))
    before = param.detach().clone()
    moved = support.grid_nearest(file["state"][0]["master_param"], torch.bfloat16) != before.double()
    optimizer.load_state_dict(file)
    optimizer.param_groups[0]["lr"] = 0.0
    take_steps(optimizer, [param], range(1))
    assert moved.sum() > 50
    assert_same_bits(param, before)
    assert_same_bits(optimizer.state[param]["master_param"][moved], before[moved].float())


def test_an_older_split_file_alone_leaves_the_weights_with_its_remainders() -> None:
    param, optimizer = trained_with_master()
    file = through_a_file(optimizer.state_dict())
    take_steps(optimizer, [param], range(3, 40))
    before = param.detach().clone()
    assert not torch.equal(optimizer.state[param]["master_remainder"], file["state"][0]["master_remainder"])
    optimizer.load_state_dict(file)
    optimizer.param_groups[0]["lr"] = 0.0
    take_steps(optimizer, [param], range(1))
    assert_same_bits(param, before)
    assert_same_bits(optimizer.state[param]["master_remainder"], file["state"][0]["master_remainder"])


def test_another_models_weights_replace_the_whole_masters() -> None:
    """A checkpoint of another model loaded after training: the next step starts from its weights."""
    param, optimizer = trained_with_master(split=False)
    other = normal((300,), 77, dtype=torch.bfloat16)
    other[other == param] = 5.0  # an element that happens to be the same was not edited
    holding(param).load_state_dict({"weight": other})
    param.grad = torch.zeros_like(param)
    optimizer.state[param]["exp_avg"].zero_()
    optimizer.param_groups[0]["weight_decay"] = 0.0
    optimizer.step()
    assert_same_bits(param, other)
    assert_same_bits(optimizer.state[param]["master_param"], other.float())


@by_form
@pytest.mark.parametrize("engine", support.ENGINES)
def test_non_finite_weights_from_outside_stay_what_they_are(engine: str, split: bool) -> None:
    param, optimizer = trained_with_master(split=split, execution=engine)
    with torch.no_grad():
        param[:3] = torch.tensor([float("nan"), float("inf"), float("-inf")])
    take_steps(optimizer, [param], range(3, 6))
    assert param[:3].isnan().tolist() == [True, False, False]
    assert param[1:3].tolist() == [float("inf"), float("-inf")]
    assert param[3:].isfinite().all() and master_of(param, optimizer.state[param])[3:].isfinite().all()


NAN_PATTERNS = (0x7FC0, 0x7F81, 0x7FFF, 0xFF81, 0xFFC0, 0xFFFF)


@pytest.mark.parametrize("engine", support.ENGINES)
@pytest.mark.parametrize("mode", ["semi", "full"])
def test_non_finite_weights_have_no_remainder(mode: str, engine: str) -> None:
    """NaN of any pattern is stored as 0x7FC0, ±inf as it is, both with remainder 0: whatever the remainder was."""
    special = torch.tensor([*NAN_PATTERNS, 0x7F80, 0xFF80]).to(torch.int16)
    count = len(special)
    param, optimizer = trained_with_master(mode=mode, execution=engine)
    with torch.no_grad():
        param[:count] = special.view(torch.bfloat16)
    state = optimizer.state[param]
    state["master_remainder"][:count] = torch.tensor([-1, 1, -(2**15), 2**15 - 1, 5, 0, -3, 7], dtype=torch.int16)
    exported = optimizer.master_state_dict(holding(param))["weight"]
    assert exported[:6].isnan().all() and exported[6:8].tolist() == [float("inf"), float("-inf")]
    take_steps(optimizer, [param], range(3, 6))
    assert (support.bits(param)[:count].int() & 0xFFFF).tolist() == [0x7FC0] * 6 + [0x7F80, 0xFF80]
    assert not state["master_remainder"][:count].any() and state["master_remainder"][count:].any()
    assert master_of(param, state)[count:].isfinite().all() and param[count:].isfinite().all()


@pytest.mark.parametrize("engine", support.ENGINES)
@by_form
def test_weights_edited_to_the_edge_of_the_range_stay_finite(split: bool, engine: str) -> None:
    """An edited ±max with a remainder of any size is a finite master, capped at ±0x7F7F7FFF, and can be pushed inwards
    again."""
    largest = torch.finfo(torch.bfloat16).max
    for outwards in (True, False):
        param, optimizer = trained_with_master(
            split=split, execution=engine, bound=False, weight_decay=0.0, cautious=False, lr=1e36
        )
        with torch.no_grad():
            param.copy_(torch.tensor([largest, -largest] * 150))
        if split:
            extremes = torch.tensor([2**15 - 1, 2**15 - 1, -(2**15), -(2**15), 0, 0], dtype=torch.int16)
            optimizer.state[param]["master_remainder"].copy_(extremes.repeat(50))
        optimizer.state[param]["exp_avg"].zero_()
        for _ in range(5):
            param.grad = param.detach().sign() * (-1.0 if outwards else 1.0)
            optimizer.step()
        master = master_of(param, optimizer.state[param]).double()
        assert param.isfinite().all() and master.isfinite().all() and (master.abs() <= support.MASTER_CAP_BF16).all()
        if outwards:
            assert (param.abs() == largest).all() and (master.abs() == support.MASTER_CAP_BF16).all()
        else:
            assert (param.abs() < largest).all()


@pytest.mark.parametrize("engine", support.ENGINES)
@pytest.mark.parametrize("zero", [0.0, -0.0])
@pytest.mark.parametrize("mode", [{}, {"buffer": 1}, {"fused_single_pass": True}, {"bound": False}], ids=str)
def test_weights_zeroed_from_outside_are_zeros_with_any_remainder(
    mode: dict[str, Any], zero: float, engine: str
) -> None:
    """Pruning, or a padding row that is cleared: the pattern of ±0 less something would be a NaN. The remainder of a
    zero is some 10⁻⁴¹ at most, so the next step is that from zero."""
    param, optimizer = trained_with_master(execution=engine, **mode)
    state = optimizer.state[param]
    assert (state["master_remainder"][:100] < 0).sum() > 20 and (state["master_remainder"][:100] > 0).sum() > 20
    before = master_of(param, state)
    before[:100] = zero
    with torch.no_grad():
        param[:100] = zero
    exported = optimizer.master_state_dict(holding(param))["weight"]
    assert (exported[:100].abs() < 1e-40).all()
    assert_same_bits(exported[100:], before[100:])
    m, v = state["exp_avg"].clone(), state.get("exp_avg_sq")
    kept = None
    if "fused_single_pass" in mode:
        kept = (state["cautious_scale"].item(), state["bound_scale"].item())
    expected = support.exact_step(
        before,
        m,
        None if v is None else v.clone(),
        grad_of(0, 3, param.shape, torch.bfloat16),
        4,
        torch.bfloat16,
        kept=kept,
        lr=1e-3,
        master_weights="semi",
        **mode,
    )
    take_steps(optimizer, [param], range(3, 4))
    assert param.isfinite().all() and all(value.isfinite().all() for value in state.values())
    assert support.largest_error(master_of(param, state), expected.weight) < 1e-6


def test_steps_without_edits_keep_every_bit_of_the_master() -> None:
    """One step of 1e-6 moves no BF16 weight of 1/16, and 500 of them must: the master remembers."""
    options = {"lr": 1e-6, "weight_decay": 0.0, "master_weights": "full"}
    param = parameter(torch.full((64,), 0.0625), torch.bfloat16)
    optimizer = LuminaV([param], **options)
    reference = support.Reference(param, **options)
    for step in range(1, 501):
        param.grad = torch.ones_like(param)
        optimizer.step()
        reference.step(torch.ones_like(param))
        if step == 250:  # halfway the model is saved and loaded again
            holding(param).load_state_dict({"weight": param.detach().clone()})
    travelled = 0.0625 - master_of(param, optimizer.state[param]).double()
    assert (travelled / (0.0625 - reference.weight) - 1).abs().max() < 2e-3  # each step is rounded by up to 2⁻²⁹, 0.2 %
    assert (param < 0.0625).all()


# ---- split and whole: the same bits in half the memory -------------------------------------------------------------

GROUPS_OF_MODES = {
    f"{master}-{mode}": {**options, "master_weights": master}
    for master in ("semi", "full")
    for mode, options in MODES.items()
}
"""Every way through the rule × both modes that have masters."""


def joined_state(optimizer: LuminaV, params: list[nn.Parameter]) -> dict[str, Tensor]:
    """Weights, moments and scales as they are stored, and masters of either form in full."""
    result = {}
    for number, param in enumerate(params):
        state = optimizer.state.get(param, {})
        result[f"weight {number}"] = param.detach().clone()
        if not state.keys().isdisjoint({"master_param", "master_remainder"}):
            result[f"master {number}"] = master_of(param, state)
        for key in state.keys() - {"master_param", "master_remainder"}:
            result[f"{key} {number}"] = state[key].clone()
    return result


@pytest.mark.parametrize("engine", support.ENGINES)
@pytest.mark.parametrize("name", GROUPS_OF_MODES)
def test_split_and_whole_masters_give_the_same_bits(name: str, engine: str) -> None:
    """A hundred steps; weights from 1e-20 to the largest, zeros of both signs and non-finite ones among them; strides;
    missing and non-finite gradients; looked at after the first step and every tenth."""
    special = torch.tensor([0, -0x8000, 0x7F80, -0x80, 0x7FC0, 0x7F7F, -0x81, 1], dtype=torch.int16)
    weights = [
        normal((9, 17), 0, 0.05, torch.bfloat16),
        torch.cat([special.view(torch.bfloat16), normal((40,), 1, 1e-20, torch.bfloat16)]),
        normal((3, 5, 4, 2), 2, 1.0, torch.bfloat16),
        normal((), 3, 1.0, torch.bfloat16),
    ]
    layouts = ["contiguous", "contiguous", "channels_last", "contiguous"]
    runs = []
    for split in (True, False):
        params = [parameter(values, layout=layout) for values, layout in zip(weights, layouts, strict=True)]
        options = {**GROUPS_OF_MODES[name], "execution": engine, "split_master_weights": split}
        runs.append((params, LuminaV(params, lr=3e-3, **options)))
    for step in range(100):
        for params, optimizer in runs:
            for number, param in enumerate(params):
                missing = number == 3 and step % 3 == 0
                grad = grad_of(number, step, param.shape, torch.bfloat16)
                if number == 0 and step % 7 == 1:
                    grad.view(-1)[:3] = torch.tensor([float("nan"), float("inf"), float("-inf")])
                param.grad = None if missing else grad
            optimizer.step()
        if step == 0 or step % 10 == 9:
            assert_same_state(joined_state(*reversed(runs[0])), joined_state(*reversed(runs[1])))
            for (params, optimizer), key in zip(runs, ("master_remainder", "master_param"), strict=True):
                assert all(key in optimizer.state[param] for param in params if optimizer.state.get(param))
            remainder = runs[0][1].state[runs[0][0][0]]["master_remainder"]
            assert remainder.unique().numel() > 100, "the remainders must say something"
    assert int(runs[0][1].state[runs[0][0][0]]["step"]) == 100
    assert not torch.equal(runs[0][0][0], weights[0])


def test_ties_are_split_away_from_zero_and_come_back() -> None:
    """Masters set by hand to the middle between two BF16 numbers, and beside it, through a step that moves nothing."""
    patterns = [0x3F808000, 0x3F807FFF, 0x3F808001, 0x3F818000, 0x00008000, 0x00007FFF, 0x7F7F7FFF, 0x00000001]
    patterns += [pattern - 2**31 for pattern in patterns]  # the same, negative
    master = torch.tensor(patterns, dtype=torch.int32).view(torch.float32)
    weight, remainder = support.split_by_hand(master)
    options = {"master_weights": "semi", "weight_decay": 0.0, "bound": False}
    runs = []
    for split in (True, False):
        param = parameter(weight)
        optimizer = LuminaV([param], split_master_weights=split, lr=1e-3, **options)
        optimizer.state[param] = {"step": torch.tensor(3), "exp_avg": torch.zeros_like(param)}
        optimizer.state[param]["exp_avg_sq"] = torch.ones_like(param)
        optimizer.state[param] |= {"master_remainder": remainder.clone()} if split else {"master_param": master.clone()}
        param.grad = torch.zeros_like(param)
        optimizer.step()
        runs.append((param, optimizer.state[param]))
    for param, state in runs:
        assert_same_bits(param, weight)
        assert_same_bits(master_of(param, state), master)
    assert_same_bits(runs[0][1]["master_remainder"], remainder)
    assert remainder[:4].tolist() == [-(2**15), 2**15 - 1, -(2**15) + 1, -(2**15)]


@pytest.mark.parametrize("engine", support.ENGINES)
@pytest.mark.parametrize(
    ("options", "whole", "split"),
    [
        ({"master_weights": "semi"}, 12, 10),
        ({"master_weights": "full"}, 16, 14),
        ({"master_weights": "semi", "buffer": 1}, 10, 8),
        ({"master_weights": "full", "buffer": 1}, 12, 10),
        ({"master_weights": "semi", "fused_single_pass": True}, 12, 10),
    ],
    ids=str,
)
def test_bytes_per_parameter(options: dict[str, Any], whole: int, split: int, engine: str) -> None:
    """BF16 weight, gradient and state, measured on their storages: no scratch, no view of something larger."""
    numel = 1 << 16
    for form, expected in ((True, split), (False, whole)):
        param = parameter(normal((256, 256), 0), torch.bfloat16)
        optimizer = LuminaV([param], execution=engine, split_master_weights=form, **options)
        for step in range(2):
            param.grad = grad_of(0, step, param.shape, torch.bfloat16)
            optimizer.step()
        held = [param, param.grad, *optimizer.state[param].values()]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held if t is not None}
        small = sum(t.untyped_storage().nbytes() for t in optimizer.state[param].values() if t.ndim == 0)
        assert sum(storages.values()) - small == expected * numel and small <= 16


# ---- files of either form ------------------------------------------------------------------------------------------

FILE_MODES = {
    "semi": {"master_weights": "semi"},
    "full": {"master_weights": "full"},
    "semi single": {"master_weights": "semi", "buffer": 1},
    "full one_pass": {"master_weights": "full", "fused_single_pass": True},
}


@by_form
@pytest.mark.parametrize("order", ["model first", "optimizer first", "model only afterwards, twice"])
@pytest.mark.parametrize("mode", FILE_MODES)
def test_a_file_of_the_other_form_goes_on_to_the_same_bits(mode: str, order: str, split: bool) -> None:
    """A new model of other weights and a new optimizer of the other form: as if there had been no other form."""
    net = Net(torch.bfloat16)
    optimizer = LuminaV(net.trained(), lr=3e-3, split_master_weights=split, **FILE_MODES[mode])
    take_steps(optimizer, net.trained(), range(3), late=LATE_NUMBER)
    net_file, optimizer_file = through_a_file(net.state_dict()), through_a_file(optimizer.state_dict())
    other = Net(torch.bfloat16)
    for param in other.parameters():
        param.data.fill_(0.5)
    reader = LuminaV(other.trained(), split_master_weights=not split)
    loads = {"m": lambda: other.load_state_dict(net_file), "o": lambda: reader.load_state_dict(optimizer_file)}
    for what in {"model first": "mo", "optimizer first": "om"}.get(order, "omm"):
        loads[what]()
    assert reader.param_groups[0]["split_master_weights"] is not split  # belongs to the process
    exported = optimizer.master_state_dict(net)
    for name, value in reader.master_state_dict(other).items():
        assert_same_bits(value, exported[name], name)
    for one, its in ((optimizer, net), (reader, other)):
        take_steps(one, its.trained(), range(3, 8), late=LATE_NUMBER)
    assert_same_state(joined_state(reader, other.trained()), joined_state(optimizer, net.trained()))
    options = {**FILE_MODES[mode], "split_master_weights": not split}
    for param in other.trained():
        assert {key: v.dtype for key, v in reader.state[param].items()} == wanted_state(torch.bfloat16, options)
    exported = optimizer.master_state_dict(net)
    for name, value in reader.master_state_dict(other).items():
        assert_same_bits(value, exported[name], name)


@pytest.mark.parametrize("mode", FILE_MODES)
def test_a_file_may_go_to_the_other_form_and_back(mode: str) -> None:
    """Without a step, then with one, between: nothing is lost on the way."""
    for steps in (0, 1):
        param, optimizer = trained_with_master(**{"mode": "semi", **FILE_MODES[mode]})
        plain, unbroken = trained_with_master(**{"mode": "semi", **FILE_MODES[mode]})
        for split in (False, True, False, True):
            reader = LuminaV([param], split_master_weights=split)
            reader.load_state_dict(through_a_file(optimizer.state_dict()))
            done = int(optimizer.state[param]["step"])
            for one, its in ((reader, param), (unbroken, plain)):
                take_steps(one, [its], range(done, done + steps))
            optimizer = reader
        for one, its in ((optimizer, param), (unbroken, plain)):
            take_steps(one, [its], range(20, 22))
        assert_same_state(state_of(optimizer, [param]), state_of(unbroken, [plain]))


@by_form
def test_a_file_says_which_form_it_holds(split: bool) -> None:
    """By the key and dtype of the state, and by the group's option; FP16 has one form only."""
    param, optimizer = trained_with_master(split=split)
    file = through_a_file(optimizer.state_dict())
    assert file["param_groups"][0]["split_master_weights"] is split
    held = {key: value.dtype for key, value in file["state"][0].items()}
    assert held == wanted_state(torch.bfloat16, {"master_weights": "semi", "split_master_weights": split})
    assert ("master_remainder" in held) == split and ("master_param" in held) != split
    assert_same_bits(master_of(param, file["state"][0]), master_of(param, optimizer.state[param]))
    _, half = trained_with_master(torch.float16, split=split)
    assert half.state_dict()["state"][0]["master_param"].dtype == torch.float32


@pytest.mark.parametrize("layout", ["1.3", "ours"])
@pytest.mark.parametrize("order", ["model first", "optimizer first"])
def test_an_fp32_master_file_goes_into_the_default(order: str, layout: str) -> None:
    """A file that knows nothing of the option, of masters that are no BF16 numbers: the next step is the closed form's
    from the file's masters, and the weights are the nearest to the new ones."""
    master = normal((300,), 3)
    master = torch.where(master.view(torch.int32) & 0xFFFF == 0x8000, master * 1.25, master)  # no ties
    weight, remainder = support.split_by_hand(master)
    m, v = normal((300,), 4, 0.1, torch.bfloat16), normal((300,), 5, 0.1).square().to(torch.bfloat16)
    entry: dict[str, Any] = {"step": 5, "exp_avg": m, "exp_avg_sq": v, "master_param": master}
    if layout == "1.3":
        entry |= {"scratch": torch.zeros(5), "buf_count": 2}
    group = dict(LuminaV([parameter(weight)], lr=1e-3).state_dict()["param_groups"][0])
    del group["split_master_weights"]
    group["master_weights"] = "semi"
    file = through_a_file({"state": {0: entry}, "param_groups": [group]})
    param = parameter(torch.full((300,), 0.5), torch.bfloat16)
    reader = LuminaV([param])
    loads = {
        "m": lambda: holding(param).load_state_dict({"weight": weight}),
        "o": lambda: reader.load_state_dict(file),
    }
    for what in {"model first": "mo", "optimizer first": "om"}[order]:
        loads[what]()
    assert_same_bits(reader.master_state_dict(holding(param))["weight"], master)
    grad = normal((300,), 6, 0.3, torch.bfloat16)
    support.run(reader, [param], [[grad]])
    state = reader.state[param]
    assert {key: value.dtype for key, value in state.items()} == wanted_state(
        torch.bfloat16, {"master_weights": "semi"}
    )
    expected = support.exact_step(master, m, v, grad, 6, torch.bfloat16, lr=1e-3, master_weights="semi")
    assert support.largest_error(master_of(param, state), expected.weight) < 1e-6
    from_the_weight = support.exact_step(weight, m, v, grad, 6, torch.bfloat16, lr=1e-3, master_weights="semi")
    assert support.largest_error(from_the_weight.weight.float(), expected.weight) > 1e-4, "the masters must matter"
    upper, lower = support.split_by_hand(master_of(param, state))
    assert_same_bits(param, upper)
    assert_same_bits(state["master_remainder"], lower)
    assert remainder.any()


@by_form
@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_copies_keep_their_form_and_go_on(way: str, split: bool) -> None:
    param, optimizer = trained_with_master(split=split)
    pair = (param, optimizer)
    other, copied = copy.deepcopy(pair) if way == "deepcopy" else pickle.loads(pickle.dumps(pair))
    assert copied.param_groups[0]["split_master_weights"] is split and other is not param
    assert_same_state(state_of(copied, [other]), state_of(optimizer, [param]))
    for one, its in ((optimizer, param), (copied, other)):
        take_steps(one, [its], range(3, 6))
    assert_same_state(state_of(copied, [other]), state_of(optimizer, [param]))
    key = "master_remainder" if split else "master_param"
    assert copied.state[other][key].data_ptr() != optimizer.state[param][key].data_ptr()


@by_form
@pytest.mark.parametrize("engine", support.ENGINES)
def test_a_group_may_change_its_form_between_steps(engine: str, split: bool) -> None:
    param, optimizer = trained_with_master(split=split, execution=engine)
    plain, unbroken = trained_with_master(split=split, execution=engine)
    optimizer.param_groups[0]["split_master_weights"] = not split
    for one, its in ((optimizer, param), (unbroken, plain)):
        take_steps(one, [its], range(3, 6))
    assert ("master_remainder" in optimizer.state[param]) is not split
    assert_same_state(joined_state(optimizer, [param]), joined_state(unbroken, [plain]))


# ---- model.bfloat16(), model.to(), state moved away and back -------------------------------------------------------


def trained_linear(mode: str, dtype: torch.dtype = torch.float32, *, split: bool = True) -> tuple[nn.Linear, LuminaV]:
    net = nn.Linear(20, 30).to(dtype)
    optimizer = LuminaV(net.parameters(), master_weights=mode, lr=1e-3, split_master_weights=split)
    take_steps(optimizer, list(net.parameters()), range(3))
    return net, optimizer


@pytest.mark.parametrize("dtype", SIXTEEN_BIT, ids=dtype_name)
@pytest.mark.parametrize("mode", ["semi", "full"])
@by_form
def test_the_fp32_weight_becomes_the_master_when_the_model_is_converted(
    mode: str, dtype: torch.dtype, split: bool
) -> None:
    """An FP32 weight is its own master. After model.bfloat16() it lives on, in storage of its own, to the bit."""
    options = {"master_weights": mode, "split_master_weights": split}
    net, optimizer = trained_linear(mode, split=split)
    old = {name: param.detach().clone() for name, param in net.named_parameters()}
    net.to(dtype)
    for name, exported in optimizer.master_state_dict(net).items():
        assert_same_bits(exported, old[name], name)
    moments = {name: copy.deepcopy(optimizer.state[param]) for name, param in net.named_parameters()}
    take_steps(optimizer, list(net.parameters()), range(3, 4))
    for number, (name, param) in enumerate(net.named_parameters()):
        state = optimizer.state[param]
        assert {key: value.dtype for key, value in state.items()} == wanted_state(dtype, options)
        key = support.master_key(dtype, options)
        assert key is not None
        assert state[key].untyped_storage().data_ptr() != param.untyped_storage().data_ptr()
        size = 2 if key == "master_remainder" else 4
        assert state[key].untyped_storage().nbytes() == size * param.numel()
        stored = support.moment_dtype(dtype, {"master_weights": mode})
        m, v = (moments[name][key].to(stored) for key in ("exp_avg", "exp_avg_sq"))
        grad = grad_of(number, 3, param.shape, dtype)
        expected = support.exact_step(old[name], m, v, grad, 4, dtype, lr=1e-3, master_weights=mode)
        assert support.largest_error(master_of(param, state), expected.weight) < 1e-6


@pytest.mark.parametrize("master", ["none", "semi"])
def test_moments_saturate_when_the_model_is_converted(master: str) -> None:
    """A variance of 10⁸ is nothing to FP32 and infinite to FP16, where it would never decay."""
    net, optimizer = trained_linear(master)
    optimizer.state[net.weight]["exp_avg_sq"].fill_(1e8)
    optimizer.state[net.weight]["exp_avg"].fill_(-1e8)
    net.half()
    net.weight.grad = torch.zeros_like(net.weight)
    optimizer.step()
    state = optimizer.state[net.weight]
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.float16
    beta1, beta2 = 0.9, 0.999
    m = torch.tensor(-65504 * beta1, dtype=torch.float64)
    v = torch.tensor(65504 * beta2, dtype=torch.float64) + (1 - beta2) * m**2  # (g − m)² with g = 0
    v = v.clamp_max(65504)
    assert ((state["exp_avg"].double() - m).abs() <= support.spacing(m, torch.float16)).all()
    assert ((state["exp_avg_sq"].double() - v).abs() <= support.spacing(v, torch.float16)).all()


def test_converting_to_and_fro_between_the_16_bit_dtypes_keeps_the_master() -> None:
    """The weights are rounded to FP16 and back to BF16, with steps between; a frozen one keeps all its digits."""
    net, optimizer = trained_linear("full", torch.bfloat16, split=False)
    master = optimizer.state[net.weight]["master_param"].clone()
    optimizer.param_groups[0]["lr"] = 0.0
    for dtype in (torch.float16, torch.bfloat16, torch.float16):
        net.to(dtype)
        take_steps(optimizer, list(net.parameters()), range(1))
        assert_same_bits(optimizer.state[net.weight]["master_param"], master)


def test_a_split_master_of_another_16_bit_dtype_starts_from_the_weight() -> None:
    """The remainder is one of a BF16 weight; FP16 keeps a whole master, which a way back to BF16 splits."""
    net, optimizer = trained_linear("full", torch.bfloat16)
    weight = net.weight.detach().clone()
    optimizer.param_groups[0]["lr"] = 0.0
    for dtype in (torch.float16, torch.bfloat16):
        net.to(dtype)
        take_steps(optimizer, list(net.parameters()), range(1))
        state = optimizer.state[net.weight]
        assert {key: value.dtype for key, value in state.items()} == wanted_state(dtype, {"master_weights": "full"})
        assert (master_of(net.weight, state).double() - weight.double()).abs().max() < 2.0**-9 * weight.abs().max()


@by_form
def test_an_edit_after_the_conversion_is_seen(split: bool) -> None:
    net, optimizer = trained_linear("semi", split=split)
    old = net.weight.detach().clone()
    net.bfloat16()
    with torch.no_grad():
        net.weight[0] = 7.0
    optimizer.param_groups[0]["lr"] = 0.0
    take_steps(optimizer, list(net.parameters()), range(1))
    master = master_of(net.weight, optimizer.state[net.weight])
    assert (master[0] == 7.0).all()
    assert_same_bits(master[1:], old[1:])


@pytest.mark.parametrize("dtype", SIXTEEN_BIT, ids=dtype_name)
@pytest.mark.parametrize("mode", ["semi", "full"])
@by_form
def test_an_fp64_model_may_become_16_bit(mode: str, dtype: torch.dtype, split: bool) -> None:
    """The master is the FP64 weight in FP32."""
    net, optimizer = trained_linear(mode, torch.float64, split=split)
    old = net.weight.detach().float()
    net.to(dtype)
    optimizer.param_groups[0]["lr"] = 0.0
    take_steps(optimizer, list(net.parameters()), range(3, 4))
    assert_same_bits(master_of(net.weight, optimizer.state[net.weight]), old)


@pytest.mark.parametrize("master", MASTER_MODES)
def test_a_16_bit_model_may_become_fp32(master: str) -> None:
    """The weight is then its own master; moments widen exactly, and the step is the closed form's."""
    net, optimizer = trained_linear(master, torch.bfloat16)
    moments = {key: optimizer.state[net.weight][key].double() for key in ("exp_avg", "exp_avg_sq")}
    net.float()
    before = net.weight.detach().clone()
    take_steps(optimizer, list(net.parameters()), range(3, 4))
    state = optimizer.state[net.weight]
    assert {key: value.dtype for key, value in state.items()} == wanted_state(torch.float32, {})
    grad = grad_of(0, 3, net.weight.shape, torch.float32)
    expected = support.exact_step(before, moments["exp_avg"], moments["exp_avg_sq"], grad, 4, torch.float32, lr=1e-3)
    assert support.largest_error(net.weight, expected.weight) < 1e-6


@pytest.mark.parametrize("mode", NET_MODES)
def test_another_memory_layout_in_mid_training_changes_no_bit(mode: str) -> None:
    """model.to(memory_format=…) replaces the data of the weights; the state keeps its old strides."""
    results = []
    for converted in (False, True):
        torch.manual_seed(0)
        net = nn.Conv2d(3, 4, 3).bfloat16()
        optimizer = LuminaV(net.parameters(), **copy.deepcopy(NET_MODES[mode]))
        take_steps(optimizer, list(net.parameters()), range(2))
        if converted:
            net.to(memory_format=torch.channels_last)
            assert net.weight.stride() != results[0][1]
        take_steps(optimizer, list(net.parameters()), range(2, 4))
        results.append((state_of(optimizer, list(net.parameters())), net.weight.stride()))
    assert_same_state(results[1][0], results[0][0])


@pytest.mark.parametrize("mode", NET_MODES)
def test_state_may_be_moved_away_and_back(mode: str) -> None:
    """Offloading replaces the tensors, in whatever dtype holds them; the next step takes them back."""
    nets = Net(torch.bfloat16), Net(torch.bfloat16)
    for moved, net in zip((True, False), nets):
        optimizer = LuminaV(net.trained(), **copy.deepcopy(NET_MODES[mode]))
        take_steps(optimizer, net.trained(), range(2), late=LATE_NUMBER)
        if moved:
            for state in optimizer.state.values():
                for key, value in state.items():
                    state[key] = value.double()  # holds every int16 and FP32 number
        take_steps(optimizer, net.trained(), range(2, 4), late=LATE_NUMBER)
        dtypes = {key: value.dtype for key, value in optimizer.state[net.body.weight].items()}
        assert dtypes == wanted_state(torch.bfloat16, NET_MODES[mode])
    assert_weights_equal(*nets)


def test_swapped_parameters_keep_their_state() -> None:
    """torch.__future__.set_swap_module_params_on_conversion: the parameter object stays, its contents are exchanged."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        net, optimizer = trained_linear("full")
        old = net.weight.detach().clone()
        net.weight.grad = net.bias.grad = None
        net.bfloat16()
        optimizer.param_groups[0]["lr"] = 0.0
        take_steps(optimizer, list(net.parameters()), range(3, 5))
        assert int(optimizer.state[net.weight]["step"]) == 5
        assert_same_bits(master_of(net.weight, optimizer.state[net.weight]), old)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


# ---- FP32 export ---------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """Input and output embedding share one weight; a module of FP32 and a buffer of integers beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.output = nn.Linear(4, 6, bias=False)
        self.output.weight = self.embedding.weight
        self.untrained = nn.Parameter(torch.full((2,), 0.3))


@pytest.mark.parametrize("mode", MASTER_MODES)
@by_form
def test_master_state_dict_is_the_model_in_fp32(mode: str, split: bool) -> None:
    net = Tied().bfloat16()
    net.inner[0].float()
    trained = [param for name, param in net.named_parameters() if name != "untrained"]
    optimizer = LuminaV(trained, master_weights=mode, split_master_weights=split)
    assert_export_is_widened(optimizer.master_state_dict(net), net)  # before there is any state
    assert not optimizer.state
    take_steps(optimizer, trained, range(3))
    exported = optimizer.master_state_dict(net)
    assert list(exported) == list(net.state_dict())
    assert exported["inner.1.running_mean"].dtype == torch.bfloat16 and "inner.1.num_batches_tracked" in exported
    assert_same_bits(exported["output.weight"], exported["embedding.weight"])
    assert_same_bits(exported["untrained"], net.untrained.float())
    if mode == "none":
        assert_export_is_widened(exported, net)
        return
    master = master_of(net.embedding.weight, optimizer.state[net.embedding.weight])
    assert_same_bits(exported["embedding.weight"], master)
    assert_same_bits(exported["inner.0.weight"], net.inner[0].weight)
    exported["embedding.weight"].fill_(0.0)  # a copy
    assert_same_bits(master_of(net.embedding.weight, optimizer.state[net.embedding.weight]), master)
    assert master.any() and net.embedding.weight.any()
    wide = Tied()
    wide.load_state_dict({name: value.clone() for name, value in optimizer.master_state_dict(net).items()})
    assert_same_bits(wide.embedding.weight, master)


def assert_export_is_widened(exported: dict[str, Tensor], net: nn.Module) -> None:
    for name, param in net.named_parameters(remove_duplicate=False):
        assert_same_bits(exported[name], param.float(), name)


def test_loading_the_export_into_the_16_bit_model_keeps_the_masters() -> None:
    """torch rounds ties to even where the optimizer rounds them away from zero: neither is an edit of a whole one."""
    param = parameter(torch.tensor([1.0, 1.0, -3.0, 0.5]), torch.bfloat16)
    optimizer = LuminaV([param], master_weights="semi", split_master_weights=False)
    take_steps(optimizer, [param], range(1))
    ulp = 2.0**-7  # of BF16 in [1, 2)
    master = optimizer.state[param]["master_param"]
    master.copy_(torch.tensor([1 + ulp / 2, 1 + 3 * ulp / 2, -1 - ulp / 2, 1 + ulp / 3]))
    expected = master.clone()
    optimizer.param_groups[0]["lr"] = 0.0
    holding(param).load_state_dict({"weight": expected.clone()})
    param.grad = torch.zeros_like(param)
    optimizer.step()
    assert_same_bits(optimizer.state[param]["master_param"], expected)


# ---- on a device ---------------------------------------------------------------------------------------------------


@pytest.fixture
def device() -> Iterator[torch.device]:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    yield torch.device("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("mode", NET_MODES)
def test_model_and_state_move_to_the_device_and_back(mode: str, device: torch.device) -> None:
    """Moments and masters follow the weights; moving loses nothing. What engines compute there is tested elsewhere."""
    net = Net(torch.bfloat16)
    optimizer = LuminaV(net.trained(), **copy.deepcopy(NET_MODES[mode]))
    take_steps(optimizer, net.trained(), range(2))
    before = state_of(optimizer, net.trained())
    optimizer.param_groups[0]["lr"] = 0.0
    for target in (device, torch.device("cpu")):
        net.to(target)
        for param in net.trained():
            param.grad = torch.zeros_like(param)
        optimizer.step()
        optimizer.zero_grad()
        assert {value.device.type for key, value in optimizer.state[net.scale].items() if key != "step"} == {
            target.type
        }
    after = state_of(optimizer, net.trained())
    for name, value in before.items():
        if name.split()[0] in ("weight", "master_param", "master_remainder"):
            assert_same_bits(after[name], value, name)
    file = through_a_file(optimizer.state_dict())
    net.to(device)
    reader = LuminaV(net.trained())
    reader.load_state_dict(file)
    assert_same_state({k: v.cpu() for k, v in state_of(reader, net.trained()).items()}, after)
