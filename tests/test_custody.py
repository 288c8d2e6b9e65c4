"""`optimizer.state` is what it is in torch, and the package knows when somebody has it in hand."""

from __future__ import annotations

import copy
import pickle
from collections import defaultdict
from itertools import chain, islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from luminav import LuminaV


@pytest.fixture
def optimizer() -> LuminaV:
    """After two steps, its state unseen."""
    return trained()


def trained(**options: Any) -> LuminaV:
    params = [nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(3, 2))]
    optimizer = LuminaV(params, execution="single", **options)
    step(optimizer, 2)
    return optimizer


def step(optimizer: LuminaV, times: int = 1) -> None:
    for _ in range(times):
        for param in params_of(optimizer):
            param.grad = torch.ones_like(param)
        optimizer.step()


def params_of(optimizer: LuminaV) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def is_lent(optimizer: LuminaV) -> bool:
    custody = optimizer._stepper.custody
    return custody.is_lent(list(custody.state.values()), [])


# ---- the property ----------------------------------------------------------------------------------------------------


def test_state_is_a_defaultdict_of_dicts_that_may_be_edited_and_set(optimizer: LuminaV) -> None:
    params = params_of(optimizer)
    assert type(optimizer.state) is defaultdict and optimizer.state is optimizer.state
    assert list(optimizer.state) == params and optimizer.state[nn.Parameter(torch.ones(1))] == {}
    optimizer.state[params[0]]["step"].fill_(7)
    del optimizer.state[params[1]]
    step(optimizer)
    assert [int(optimizer.state[param]["step"]) for param in params] == [8, 1]
    other: defaultdict[Tensor, Any] = defaultdict(dict)
    optimizer.state = other
    step(optimizer)
    assert optimizer.state is other and int(other[params[0]]["step"]) == 1


def test_an_optimizer_that_is_not_yet_made_has_no_state() -> None:
    assert not hasattr(LuminaV.__new__(LuminaV), "state")


class Copying:
    """A wrapper that has a copy of the optimizer's attributes."""

    def __init__(self, optimizer: LuminaV) -> None:
        self.__dict__ = dict(vars(optimizer))
        self.__class__ = type("Wrapped", (Copying, LuminaV), {})


class Asking:
    """A wrapper that asks the optimizer, as Lightning's and Fabric's do."""

    def __init__(self, optimizer: LuminaV) -> None:
        self._optimizer = optimizer
        self.__class__ = type("Wrapped", (Asking, LuminaV), {})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


@pytest.mark.parametrize("wrap", [Copying, Asking])
def test_wrappers_that_are_of_the_optimizers_class_hand_out_its_state(optimizer: LuminaV, wrap: Any) -> None:
    held = wrap(optimizer).state
    assert held is vars(optimizer)["state"] and is_lent(optimizer)


# ---- what counts as handing out --------------------------------------------------------------------------------------


def test_steps_and_files_do_not_hand_out(optimizer: LuminaV) -> None:
    custody = optimizer._stepper.custody
    events = custody.events
    saved = optimizer.state_dict()
    optimizer.zero_grad()
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert custody.events == events and not is_lent(optimizer)
    optimizer.load_state_dict(
        {**saved, "param_groups": [*saved["param_groups"], {**saved["param_groups"][0], "params": [2]}]}
    )
    assert custody.events > events and not is_lent(optimizer)


def test_what_is_still_held_is_lent(optimizer: LuminaV) -> None:
    first = params_of(optimizer)[0]
    assert not is_lent(optimizer)
    for take in (
        lambda: optimizer.state,
        lambda: optimizer.state.items(),
        lambda: optimizer.state[first],
        lambda: optimizer.state[first]["exp_avg"],
        lambda: [optimizer.state[first]["exp_avg"]],
        lambda: copy.copy(optimizer),
    ):
        held = take()
        assert is_lent(optimizer)
        if isinstance(held, LuminaV):  # it and its stepper know each other
            held.__dict__.clear()
        del held
        assert not is_lent(optimizer)


def test_copies_and_pickles_have_a_state_of_their_own(optimizer: LuminaV) -> None:
    for made in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert not is_lent(made)
        step(made)
        assert [int(entry["step"]) for entry in made.state.values()] == [3, 3]
    assert [int(entry["step"]) for entry in optimizer.state.values()] == [2, 2]


def test_a_subclass_may_look_while_it_is_made() -> None:
    class Curious(LuminaV):
        def add_param_group(self, param_group: dict[str, Any]) -> None:
            super().add_param_group(param_group)
            self.seen = self.state

    optimizer = Curious([nn.Parameter(torch.ones(2))])
    step(optimizer)
    assert optimizer.seen is optimizer.state and is_lent(optimizer)


def test_our_own_references_do_not_count(optimizer: LuminaV) -> None:
    custody, states = optimizer._stepper.custody, lambda: list(optimizer._stepper.custody.state.values())
    assert optimizer.state
    entries = states()
    tensors = [entries[0]["exp_avg"], entries[0]["exp_avg"]]
    assert not custody.is_lent(states(), chain(entries, tensors))
    assert custody.is_lent(states(), chain(entries, islice(tensors, 1)))
    assert custody.is_lent(states(), iter(tensors))


# ---- state dicts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"fused_single_pass": True}], ids=str)
def test_the_dicts_of_a_state_dict_are_copies_and_its_tensors_share_memory(options: dict[str, Any]) -> None:
    optimizer, expected = trained(**options), trained(**options)
    saved = optimizer.state_dict()
    entry = saved["state"][0]
    own = optimizer.state[params_of(optimizer)[0]]
    assert entry is not own and entry.keys() == own.keys()
    for key, value in own.items():
        assert entry[key] is not value and entry[key].data_ptr() == value.data_ptr() and torch.equal(entry[key], value)
    for each, state in ((optimizer, entry), (expected, expected.state[params_of(expected)[0]])):
        state["exp_avg"].mul_(-2)
        if each is optimizer:
            state["exp_avg_sq"].data = torch.zeros(4)
            state["step"] = torch.tensor(40)
            saved["state"].clear()
        step(each, 2)
    for param, twin in zip(params_of(optimizer), params_of(expected)):
        assert torch.equal(param, twin)
        assert all(torch.equal(value, expected.state[twin][key]) for key, value in optimizer.state[param].items())
