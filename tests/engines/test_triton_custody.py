"""Kept launches of the Triton engine do not look at state that nobody can have changed, and see every change else.

Two optimizers take the same steps: one keeps its launches, the other makes them anew for every step. They must agree to
the last bit. Neither's state is read in between, unless a test does. On a GPU the kernels run; on the CPU a few lines
take their place, which work on the same tables, since the interpreter is slow and the kernels have tests of their own.
"""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import triton_runs
from stand_in import instead_of_kernels
from support import assert_same_bits, normal, optimizer_for
from torch import Tensor, nn
from triton_runs import DEVICE, weights

from luminav import premises
from luminav.engines.triton import launch
from luminav.premises import Premises

pytestmark = triton_runs.MARKS

SHAPES = [(8, 8), (33,), (16, 1)]


@pytest.fixture(autouse=True)
def _no_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    if triton_runs.INTERPRETED:
        monkeypatch.setattr(launch.Launch, "_launch", instead_of_kernels)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[Premises]:
    """Grows with each look that kept launches take at the state."""
    seen: list[Premises] = []
    states = Premises._states

    def counted(self: Premises, custody: Any) -> Any:
        seen.append(self)
        return states(self, custody)

    monkeypatch.setattr(Premises, "_states", counted)
    return seen


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels do nothing: the test is about what the host does."""
    monkeypatch.setattr(launch.Launch, "_launch", lambda *args, **options: None)


@pytest.fixture(params=["bulk", "plain"])
def form_test(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's test of many tensors in one call, and as if torch had none."""
    if request.param == "plain":
        monkeypatch.setattr(premises, "likeness", lambda tensors: premises.never_alike)


class Pair:
    """Equal optimizers of equal weights: `kept` and `anew`."""

    def __init__(self, steps: int = 2, shapes: Any = SHAPES, **options: Any) -> None:
        makers = weights(shapes, torch.bfloat16)
        self.params, self.twins = ([make(DEVICE) for make in makers] for _ in range(2))
        self.kept, self.anew = (optimizer_for(p, execution="triton", **options) for p in (self.params, self.twins))
        self.number = 0
        self.steps(steps)

    @property
    def replay(self) -> Any:
        return self.kept._stepper.replays.get(None)

    def sides(self) -> Iterator[tuple[Any, list[nn.Parameter]]]:
        yield self.kept, self.params
        yield self.anew, self.twins

    def set_grads(self) -> None:
        self.number += 1
        for params in (self.params, self.twins):
            for n, param in enumerate(params):
                param.grad = normal(param.shape, 9 * self.number + n, 1.0, param.dtype).to(DEVICE)

    def step(self) -> None:
        for replay in list(self.anew._stepper.replays.values()):
            self.anew._stepper._end_replay(replay)
        self.kept.step()
        self.anew.step()

    def steps(self, num: int = 2) -> None:
        for _ in range(num):
            self.set_grads()
            self.step()

    def assert_equal(self) -> None:
        for param, twin in zip(self.params, self.twins):
            assert_same_bits(param, twin)
            state, expected = self.kept.state[param], self.anew.state[twin]
            assert state.keys() == expected.keys()
            for key, value in expected.items():
                assert_same_bits(state[key].cpu(), value.cpu(), key)


# ---- when there is nothing to look at --------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"fused_single_pass": True}, {"master_weights": "semi"}], ids=str)
def test_state_that_nobody_has_seen_is_not_looked_at(options: dict[str, Any], looks: list[Premises]) -> None:
    pair = Pair(3, **options)  # the first step of one-pass mode is an exact one
    kept = pair.replay
    looks.clear()
    pair.steps(2)
    assert pair.replay is kept and kept.premises not in looks
    pair.assert_equal()


MODES: list[dict[str, Any]] = [
    {},
    {"fused_single_pass": True},
    {"buffer": 1},
    {"buffer": 1, "block_variance": True, "fused_single_pass": True},
    {"state_bits": 8},
    {"master_weights": "semi"},
    {"master_weights": "full", "split_master_weights": False},
]


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_look_from_outside_costs_two_steps_that_look(mode: dict[str, Any], idle: None, looks: list[Premises]) -> None:
    pair = Pair(3, [(64, 64), (33,), (4,)], **mode)
    kept = pair.replay
    for reading in (lambda: pair.kept.state[pair.params[0]]["exp_avg"].any(), lambda: copy.deepcopy(pair.kept)):
        reading()
        looks.clear()
        pair.steps(4)
        assert pair.replay is kept and looks.count(kept.premises) == 2
    pair.assert_equal()


HOLDS: dict[str, Callable[[Any, nn.Parameter], Any]] = {
    "all": lambda optimizer, param: optimizer.state,
    "view_of_all": lambda optimizer, param: optimizer.state.values(),
    "iterator": lambda optimizer, param: iter(optimizer.state.items()),
    "method": lambda optimizer, param: optimizer.state.__getitem__,
    "one": lambda optimizer, param: optimizer.state[param],
    "view_of_one": lambda optimizer, param: optimizer.state[param].items(),
    "moment": lambda optimizer, param: optimizer.state[param]["exp_avg"],
    "step": lambda optimizer, param: optimizer.state[param]["step"],
    "copy": lambda optimizer, param: copy.copy(optimizer),
    "closure": lambda optimizer, param: lambda state=optimizer.state[param]: state,
    "saved": lambda optimizer, param: optimizer.__getstate__(),
}


@pytest.mark.parametrize("hold", HOLDS)
def test_as_long_as_anything_is_held_every_step_looks(hold: str, looks: list[Premises]) -> None:
    pair = Pair()
    kept = pair.replay
    held = HOLDS[hold](pair.kept, pair.params[1])
    looks.clear()
    pair.steps(4)
    assert pair.replay is kept and looks.count(kept.premises) == 4
    del held
    gc.collect()
    assert pair.kept.state
    looks.clear()
    pair.steps(4)
    assert looks.count(kept.premises) == 2
    pair.assert_equal()


@pytest.mark.parametrize("held", [False, True], ids=["let_go", "held"])
def test_state_held_from_before_the_first_kept_step(held: bool, looks: list[Premises]) -> None:
    pair = Pair(steps=0)
    states = [optimizer.state for optimizer, _ in pair.sides()]
    if not held:
        del states
    pair.steps(3)
    looks.clear()
    pair.steps(2)
    assert looks.count(pair.replay.premises) == (2 if held else 0)
    if held:
        for state, (_, params) in zip(states, pair.sides()):
            state[params[0]]["exp_avg"] = state[params[0]]["exp_avg"] * -2
    pair.steps()
    pair.assert_equal()


# ---- what is changed -------------------------------------------------------------------------------------------------


def _replaced(state: dict[str, Any]) -> None:
    state["exp_avg"] = state["exp_avg"] * -2


def _swapped(state: dict[str, Any]) -> None:
    state["exp_avg_sq"].data = state["exp_avg_sq"] * 4


def _set(state: dict[str, Any]) -> None:
    state["exp_avg"].set_(state["exp_avg"] * -2)


def _deleted(state: dict[str, Any]) -> None:
    del state["exp_avg"]
    state["exp_avg"] = torch.zeros_like(state["exp_avg_sq"])


def _in_place(state: dict[str, Any]) -> None:
    state["exp_avg"].mul_(-2)
    state["step"].fill_(70)


CHANGES = {
    "replaced": _replaced,
    "swapped": _swapped,
    "set": _set,
    "deleted": _deleted,
    "cleared": dict.clear,
    "in_place": _in_place,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("since", ["now", "earlier", "much_earlier"])
def test_changes_are_seen(change: str, since: str) -> None:
    """With the state taken from the optimizer for it, or kept by the caller for some steps."""
    pair = Pair()
    states = [optimizer.state[params[0]] for optimizer, params in pair.sides()]
    if since == "now":
        del states
    pair.steps({"now": 2, "earlier": 1, "much_earlier": 3}[since])
    assert pair.replay is not None
    for number, (optimizer, params) in enumerate(pair.sides()):
        CHANGES[change](optimizer.state[params[0]] if since == "now" else states[number])
    pair.steps(2)
    pair.assert_equal()


def test_a_tensor_that_the_caller_kept_may_be_given_other_memory() -> None:
    pair = Pair()
    tensors = [optimizer.state[params[0]]["exp_avg"] for optimizer, params in pair.sides()]
    pair.steps(4)
    for tensor in tensors:
        tensor.data = tensor * -2
    pair.steps(3)
    pair.assert_equal()


def test_another_state_may_be_set() -> None:
    pair = Pair()
    for optimizer, params in pair.sides():
        others = copy.deepcopy([optimizer.state[param] for param in params])
        others[0]["exp_avg"].mul_(-2)
        state = type(optimizer.state)(dict)
        state.update(zip(params, others))
        optimizer.state = state
    pair.steps(3)
    pair.assert_equal()


@pytest.mark.parametrize("change", ["names", "owners"])
def test_the_same_tensors_under_other_names_are_seen(change: str) -> None:
    """In the order in which they were, so that a look at the tensors alone would see no difference."""
    pair = Pair(shapes=[(8, 8), (8, 8)])
    for optimizer, (first, second) in pair.sides():
        state = optimizer.state
        if change == "owners":
            optimizer.state = type(state)(dict, zip([second, first], [state[first], state[second]]))
        else:
            others = {"exp_avg": "exp_avg_sq", "exp_avg_sq": "exp_avg"}
            state[first] = {others.get(key, key): value for key, value in state[first].items()}
    pair.steps(2)
    pair.assert_equal()


def test_what_others_keep_beside_the_state_of_parameters_is_left_alone(looks: list[Premises]) -> None:
    pair = Pair(steps=0)
    pair.kept.state["theirs"], pair.anew.state["theirs"] = [1], 2
    pair.steps(2)
    kept = pair.replay
    pair.kept.state["theirs"] = torch.ones(3)
    pair.steps(3)
    looks.clear()
    pair.steps(1)
    assert pair.replay is kept
    pair.assert_equal()


# ---- files, copies and pickles ---------------------------------------------------------------------------------------


def test_a_state_dict_can_be_edited_without_a_look(looks: list[Premises]) -> None:
    """Its dicts are copies, its tensors share the memory: what reaches the optimizer lies where it lay."""
    pair = Pair()
    kept = pair.replay
    looks.clear()
    for optimizer, _ in pair.sides():
        saved = optimizer.state_dict()
        first, second = saved["state"][0], saved["state"][1]
        del first["exp_avg_sq"]
        first["step"] = torch.tensor(99)
        first["exp_avg"].mul_(-2)
        second["exp_avg"].data = torch.zeros_like(second["exp_avg"])
        second["exp_avg_sq"].set_(torch.zeros_like(second["exp_avg_sq"]))
        saved["state"].clear()
    pair.steps(3)
    assert pair.replay is kept and kept.premises not in looks
    pair.assert_equal()
    assert all(pair.kept.state[param]["exp_avg_sq"].any() for param in pair.params)


@pytest.mark.parametrize("register", ["register_state_dict_pre_hook", "register_state_dict_post_hook"])
def test_hooks_of_state_dict_have_the_state_in_hand(register: str) -> None:
    pair = Pair()
    taken: list[dict[str, Any]] = []

    def hook(optimizer: Any, *_: Any) -> None:
        taken.append(optimizer.state[optimizer.param_groups[0]["params"][0]])

    for optimizer, _ in pair.sides():
        getattr(optimizer, register)(hook)
        optimizer.state_dict()
    pair.steps(3)
    for state in taken:
        _replaced(state)
    pair.steps()
    pair.assert_equal()


@pytest.mark.parametrize("options", [{}, {"fused_single_pass": True}], ids=str)
def test_a_loaded_state_is_new_to_everybody(options: dict[str, Any], looks: list[Premises]) -> None:
    pair = Pair(**options)
    old = [optimizer.state for optimizer, _ in pair.sides()]
    files = [copy.deepcopy(optimizer.state_dict()) for optimizer, _ in pair.sides()]
    pair.steps(2)
    for (optimizer, _), file in zip(pair.sides(), files):
        optimizer.load_state_dict(file)
    for state in old:
        state.clear()
    pair.steps(2)
    looks.clear()
    pair.steps(2)
    assert pair.replay.premises not in looks
    for (optimizer, params), file in zip(pair.sides(), files):
        file["state"][0].clear()
        _replaced(optimizer.state[params[1]])
    pair.steps(2)
    pair.assert_equal()


@pytest.mark.parametrize("pickled", [False, True], ids=["copied", "pickled"])
def test_copies_and_originals_go_on_alike(pickled: bool, looks: list[Premises]) -> None:
    pair = Pair()
    copied = pickle.loads(pickle.dumps(pair.kept)) if pickled else copy.deepcopy(pair.kept)
    params = [param for group in copied.param_groups for param in group["params"]]
    for step in range(5):
        pair.steps(1)
        for param, twin in zip(params, pair.twins):
            param.grad = twin.grad.clone()
        copied.step()
        if step == 2:
            looks.clear()
    assert copied._stepper.replays[None].premises not in looks and pair.replay.premises not in looks
    pair.assert_equal()
    for param, twin in zip(params, pair.twins):
        assert_same_bits(param, twin)
        for key, value in pair.anew.state[twin].items():
            assert_same_bits(copied.state[param][key], value, key)


def test_two_optimizers_may_share_one_state() -> None:
    """After copy.copy() either's step is the next of both."""
    pair = Pair()
    pair.kept, other, anew, second = pair.kept, copy.copy(pair.kept), pair.anew, copy.copy(pair.anew)
    for _ in range(3):
        for each in ((pair.kept, anew), (other, second), (other, second), (pair.kept, anew)):
            pair.kept, pair.anew = each
            pair.steps(1)
    pair.assert_equal()


# ---- weights and gradients -------------------------------------------------------------------------------------------


def _on_weight(change: Callable[[Tensor], Tensor]) -> Callable[[nn.Parameter], None]:
    def edit(param: nn.Parameter) -> None:
        param.data = change(param.data)

    return edit


def _moved_in_its_storage(weight: Tensor) -> Tensor:
    """To an address that vector loads cannot take."""
    return torch.cat([weight.flatten()[:1], weight.flatten()])[1:].view(weight.shape)


WEIGHTS = {
    "other_storage": lambda weight: weight + 0.25,
    "offset": _moved_in_its_storage,
    "strides": lambda weight: weight.t(),
    "another_dtype": lambda weight: weight.half(),
    "another_dtype_at_the_same_address": lambda weight: weight.view(torch.float16),
}


@pytest.mark.parametrize("change", WEIGHTS)
def test_weights_given_other_memory_are_seen(change: str, form_test: None) -> None:
    pair = Pair()
    for _, params in pair.sides():
        params[0].grad = None
        params[0].data = WEIGHTS[change](params[0].data)
    pair.steps(2)
    pair.assert_equal()


def test_a_weight_of_another_shape_is_refused_as_ever(form_test: None) -> None:
    pair = Pair()
    for optimizer, params in pair.sides():
        for change in (lambda weight: weight[:4], lambda weight: weight.view(64), lambda weight: weight.view(4, 16)):
            old = params[0].data
            params[0].grad = None
            params[0].data = change(old)
            params[0].grad = torch.ones_like(params[0])
            with pytest.raises(ValueError, match="has shape"):
                optimizer.step()
            params[0].grad = None
            params[0].data = old
    pair.steps()
    pair.assert_equal()


GRADIENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "strides": lambda grad: grad.t().contiguous().t(),
    "offset": _moved_in_its_storage,
    "expanded": lambda grad: grad[:1].expand(8, 8),
    "strides_of_ones": lambda grad: grad,
}


@pytest.mark.parametrize("change", GRADIENTS)
def test_gradients_of_another_form_are_seen(change: str, form_test: None) -> None:
    pair = Pair()
    kept = pair.replay
    for times in range(2):
        pair.set_grads()
        for params in (pair.params, pair.twins):
            params[0].grad = GRADIENTS[change](params[0].grad)
            if change == "strides_of_ones":
                params[2].grad = params[2].grad.as_strided((16, 1), (1, 5 + times))
                assert params[2].grad.is_contiguous()
        pair.step()
    assert (pair.replay is kept) == (change == "strides_of_ones")
    pair.steps(1)
    pair.assert_equal()


def test_gradients_that_cannot_be_taken_are_refused(form_test: None) -> None:
    pair = Pair()
    for flaw in ("coo", "shape", "fewer"):
        pair.set_grads()
        for optimizer, params in pair.sides():
            if flaw == "coo":
                params[0].grad = params[0].grad.to_sparse()
            else:
                grad = params[0].grad.data
                params[0].grad.data = grad.view(4, 16) if flaw == "shape" else grad[:4]
            with pytest.raises((TypeError, ValueError)):
                optimizer.step()
    pair.steps()
    pair.assert_equal()


def test_missing_gradients_come_and_go_unlooked_at(looks: list[Premises]) -> None:
    pair = Pair()
    kept = pair.replay
    looks.clear()
    for missing in (0, 2, 1, None):
        pair.set_grads()
        if missing is not None:
            pair.params[missing].grad = pair.twins[missing].grad = None
        pair.step()
    assert pair.replay is kept and kept.premises not in looks
    pair.assert_equal()
