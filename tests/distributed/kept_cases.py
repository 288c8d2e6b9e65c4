"""Sharded steps of the Triton engine that are kept, beside the same ones worked out anew, and what may come between."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import sharded
import torch
import torch.distributed as dist
from stand_in import instead_of_kernels
from torch import Tensor, nn
from torch.distributed.tensor import Replicate

from luminav import LuminaV
from luminav.engines.triton import launch

SHAPES = ((6, 16), (5,), (3, 4))
"""The last shard of the second is shorter."""
LR = 2e-2


class Pair:
    """Equal optimizers of equal shards: `kept`, and `anew`, which forgets after every step what it was built from."""

    def __init__(self, options: dict[str, Any], dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.sides = [sharded.fsdp2(sharded.wholes(SHAPES, dtype)) for _ in range(2)]
        self.kept, self.anew = (LuminaV(s.params, lr=LR, execution="triton", **options) for s in self.sides)
        self.number = 0

    @property
    def replay(self) -> Any:
        return self.kept._stepper.replays.get(None)

    def set_grads(self) -> None:
        self.number += 1
        for side in self.sides:
            for n, grad in enumerate(sharded.grads_of(SHAPES, self.number, self.dtype)):
                side.params[n].grad = side.part_of(n, grad)

    def step(self) -> None:
        """A step of both, under a schedule."""
        for optimizer in (self.kept, self.anew):
            optimizer.param_groups[0]["lr"] = LR / self.number
        for replay in list(self.anew._stepper.replays.values()):
            self.anew._stepper._end_replay(replay)
        self.kept.step()
        self.anew.step()

    def tensors(self, side: int) -> list[Tensor]:
        optimizer, params = (self.kept, self.anew)[side], self.sides[side].params
        values = [value for param in params for _, value in sorted(optimizer.state[param].items())]
        return [sharded.local(tensor) for tensor in [*params, *values]]

    def is_equal(self) -> bool:
        return all(map(torch.equal, self.tensors(0), self.tensors(1)))


def _nothing(pair: Pair, optimizer: LuminaV, params: list[nn.Parameter]) -> None:
    """Nothing comes between."""


def _missing_here(pair: Pair, optimizer: LuminaV, params: list[nn.Parameter]) -> None:
    if dist.get_rank() == 1:
        params[0].grad = None


def _missing_everywhere(pair: Pair, optimizer: LuminaV, params: list[nn.Parameter]) -> None:
    params[1].grad = None


def _replicated_gradient(pair: Pair, optimizer: LuminaV, params: list[nn.Parameter]) -> None:
    grad: Any = params[0].grad
    params[0].grad = grad.redistribute(grad.device_mesh, [Replicate()])


def _other_layout(pair: Pair, optimizer: LuminaV, params: list[nn.Parameter]) -> None:
    grad: Any = params[0].grad
    local = grad.to_local()
    rows = torch.empty_strided(local.shape, (1, local.shape[0]), dtype=local.dtype).copy_(local)
    params[0].grad = type(grad).from_local(rows, grad.device_mesh, grad.placements, shape=grad.shape, stride=(16, 1))


def _loaded(pair: Pair, optimizer: LuminaV, params: list[nn.Parameter]) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def _edited_state(pair: Pair, optimizer: LuminaV, params: list[nn.Parameter]) -> None:
    optimizer.state[params[0]]["exp_avg"].mul_(0.5)
    optimizer.state[params[0]]["step"].add_(3)


def _edited_weight(pair: Pair, optimizer: LuminaV, params: list[nn.Parameter]) -> None:
    with torch.no_grad():
        params[0].mul_(0.5)


def _other_options(pair: Pair, optimizer: LuminaV, params: list[nn.Parameter]) -> None:
    optimizer.param_groups[0]["weight_decay"] = 0.5


def _nonfinite(pair: Pair, optimizer: LuminaV, params: list[nn.Parameter]) -> None:
    grad: Any = params[0].grad
    grad.to_local()[0, 0] = float("nan")


BETWEEN: tuple[Callable[..., None], ...] = (
    _nothing, _missing_here, _missing_everywhere, _replicated_gradient, _other_layout, _loaded, _edited_state,
    _edited_weight, _other_options, _nonfinite,
)  # fmt: skip


def run_beside(option_sets: Sequence[dict[str, Any]], dtype: torch.dtype) -> list[str]:
    """What went wrong: an event after which the two differ, or steps that were not kept."""
    launch.Launch._launch = instead_of_kernels  # type: ignore[method-assign]  # the interpreter would take minutes
    wrong = []
    for options in option_sets:
        pair = Pair(options, dtype)
        for between in BETWEEN:
            for event in (between, *[_nothing] * 3):
                pair.set_grads()
                for optimizer, side in zip((pair.kept, pair.anew), pair.sides):
                    event(pair, optimizer, side.params)
                pair.step()
                if not pair.is_equal():
                    wrong.append(f"{options}: differs at {event.__name__} after {between.__name__}")
            kept = pair.replay
            pair.set_grads()
            pair.step()
            if kept is None or pair.replay is not kept:
                wrong.append(f"{options}: not kept after {between.__name__}")
        counts = [optimizer.nonfinite_grad_count() for optimizer in (pair.kept, pair.anew)]
        if counts[0] != counts[1] or counts[0] == 0:
            wrong.append(f"{options}: non-finite counts {counts}")
    return wrong


def grads_let_go(options: dict[str, Any]) -> bool:
    """Whether kept steps hold on to no gradient."""
    import weakref

    launch.Launch._launch = instead_of_kernels  # type: ignore[method-assign]
    pair = Pair(options, torch.bfloat16)
    for _ in range(4):
        pair.set_grads()
        pair.step()
    parts = [weakref.ref(param.grad.to_local()) for param in pair.sides[0].params]  # type: ignore[union-attr]
    for param in pair.sides[0].params:
        param.grad = None
    return pair.replay is not None and all(part() is None for part in parts)
