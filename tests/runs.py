"""Short training runs for the tests of state and checkpoints: models, gradients, steps, and what they leave."""

from __future__ import annotations

import io
import itertools
from collections.abc import Sequence
from typing import Any

import support
import torch
from support import MASTER_MODES, MODES, assert_same_bits, normal, parameter
from torch import Tensor, nn

BEFORE, AFTER = 3, 4  # steps before the save and after it
LATE = 5  # the step, from 0, in which the late parameter has its first gradient: after the save
SHAPES = ((9, 5), (6,), (), (0, 3), (12, 5, 5))


def grad_of(number: int, step: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A gradient that depends on nothing but its arguments."""
    return normal(shape, 7919 * number + step, scale=0.3, dtype=dtype)


def take_steps(
    optimizer: torch.optim.Optimizer, params: Sequence[nn.Parameter], steps: range, late: int | None = None
) -> None:
    """Steps number `steps`; parameter number `late` has no gradient before step LATE."""
    for step in steps:
        for number, param in enumerate(params):
            has_one = number != late or step >= LATE
            param.grad = grad_of(number, step, param.shape, param.dtype) if has_one else None
        optimizer.step()
        optimizer.zero_grad()


def state_of(optimizer: torch.optim.Optimizer, params: Sequence[nn.Parameter]) -> dict[str, Tensor]:
    """Copies of every weight and state tensor, by name."""
    kept = {f"weight {number}": param.detach().clone() for number, param in enumerate(params)}
    for number, param in enumerate(params):
        for key, value in optimizer.state.get(param, {}).items():
            kept[f"{key} {number}"] = value.detach().clone()
    return kept


def assert_same_state(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert_same_bits(actual[name], value, name)


def through_a_file(value: Any) -> Any:
    """What the safe loader reads from a file of `value`."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def file_size(value: Any) -> int:
    file = io.BytesIO()
    torch.save(value, file)
    return file.tell()


def wanted_state(dtype: torch.dtype, options: dict[str, Any]) -> dict[str, torch.dtype]:
    """Section 10 of the specification, written out: key to dtype."""
    keys = {"step": torch.int64, "exp_avg": support.moment_dtype(dtype, options)}
    if options.get("buffer", 2) == 2:
        keys["exp_avg_sq"] = support.moment_dtype(dtype, options)
    if (key := support.master_key(dtype, options)) is not None:
        keys[key] = {"master_param": torch.float32, "master_remainder": torch.int16}[key]
    if options.get("fused_single_pass"):
        keys |= {"cautious_scale": torch.float32, "bound_scale": torch.float32}
    return keys


STEP_MODES = {
    "default": {},
    "single": {"buffer": 1},
    "one_pass": {"fused_single_pass": True},
    "coordinate": {"bound_type": "coordinate"},
    "free": {"bound": False, "cautious": False},
    "semi": {"master_weights": "semi"},
    "full": {"master_weights": "full"},
}
"""A mode for each way through the code."""


def all_modes() -> dict[str, dict[str, Any]]:
    """Every mode × master weights × stochastic rounding, by name."""
    return {
        f"{mode}-{master}-{'stochastic' if rounding else 'nearest'}": {
            **options,
            "master_weights": master,
            "stochastic_rounding": rounding,
            "lr": 3e-3,
        }
        for (mode, options), master, rounding in itertools.product(MODES.items(), MASTER_MODES, (True, False))
    }


def new_params(dtype: torch.dtype = torch.bfloat16, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[nn.Parameter]:
    return [parameter(normal(shape, number), dtype) for number, shape in enumerate(shapes)]


class Net(nn.Module):
    """Parameters of several shapes; `late` (number 4) has no gradient at first, `frozen` never."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.body = nn.Linear(5, 7)
        self.norm = nn.LayerNorm(7)
        self.late = nn.Parameter(torch.zeros(3, 2))
        self.scale = nn.Parameter(torch.zeros(()))
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.register_buffer("count", torch.tensor([3, 4]))
        self.register_buffer("mean", torch.full((2,), 0.1))
        for number, param in enumerate(self.parameters()):
            param.data = normal(param.shape, number)
        self.to(dtype)

    def trained(self) -> list[nn.Parameter]:
        return [param for param in self.parameters() if param.requires_grad]


LATE_NUMBER = [name for name, _ in Net(torch.float32).named_parameters()].index("late")
NET_MODES = {
    "default": {},
    "single": {"buffer": 1},
    "one_pass": {"fused_single_pass": True},
    "semi": {"master_weights": "semi"},
    "full one_pass": {"master_weights": "full", "fused_single_pass": True},
    "lr tensor": {"lr": torch.tensor(3e-3)},
}


def assert_weights_equal(net: nn.Module, other: nn.Module) -> None:
    for (name, param), expected in zip(net.named_parameters(), other.parameters()):
        assert_same_bits(param, expected, name)


def holding(param: nn.Parameter) -> nn.Module:
    """A model whose one weight is `param`."""
    module = nn.Module()
    module.register_parameter("weight", param)
    return module


def trained(steps: int = 4, dtype: torch.dtype = torch.bfloat16, **options: Any) -> dict[str, Tensor]:
    """Weights and state of a plain run, which others must repeat."""
    params = new_params(dtype)
    optimizer = support.optimizer_for(params, **options)
    take_steps(optimizer, params, range(steps))
    return state_of(optimizer, params)
