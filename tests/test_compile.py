"""torch.compile: the optimizer runs eagerly inside compiled code, to the same bits, and compiling comes to an end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from runs import STEP_MODES, assert_same_state, grad_of, new_params, state_of, through_a_file, trained
from support import ENGINES, normal
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from luminav import LuminaV


class CountingBackend:
    """Runs the captured graphs as they are and counts them."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        self.graphs += 1
        return graph.forward


@pytest.fixture
def backend() -> Iterator[CountingBackend]:
    torch._dynamo.reset()
    yield CountingBackend()
    torch._dynamo.reset()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("lr", ["float", "tensor"])
@pytest.mark.parametrize("mode", ["default", "one_pass", "semi"])
def test_a_compiled_step_is_right_and_settles(mode: str, lr: str, engine: str, backend: CountingBackend) -> None:
    """pytorch#133898, #130467, Advanced_Optimizers#6: the step count must not be a constant of the compiled code."""
    options = {**STEP_MODES[mode], "execution": engine, "lr": torch.tensor(1e-2) if lr == "tensor" else 1e-2}
    params = new_params()
    optimizer = LuminaV(params, **options)
    step = torch.compile(optimizer.step, backend=backend)
    graphs = []
    for number in range(8):
        for index, param in enumerate(params):
            param.grad = grad_of(index, number, param.shape, param.dtype)
        step()
        optimizer.zero_grad()
        graphs.append(backend.graphs)
    assert_same_state(state_of(optimizer, params), trained(steps=8, **{**options, "lr": float(options["lr"])}))
    assert graphs[-1] == graphs[2], f"still compiling: {graphs}"


@pytest.mark.parametrize("mode", ["default", "single", "full"])
def test_a_compiled_training_step_is_the_eager_one(mode: str, backend: CountingBackend) -> None:
    """Forward, backward and step in one compiled function, under a schedule of lr: no new graph after the 4th step."""
    results = []
    for compiled in (True, False):
        torch.manual_seed(4)
        net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).bfloat16()
        optimizer = LuminaV(net.parameters(), lr=1e-2, **STEP_MODES[mode])
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

        def train(x: Tensor, net: nn.Module = net, optimizer: LuminaV = optimizer) -> Tensor:
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        function = torch.compile(train, backend=backend) if compiled else train
        losses, graphs = [], []
        for step in range(12):
            losses.append(function(normal((16, 6), step, dtype=torch.bfloat16)).item())
            schedule.step()
            graphs.append(backend.graphs)
        assert losses[-1] < losses[0]
        assert graphs[-1] == graphs[3] and (graphs[-1] > 0), f"still compiling: {graphs}"
        results.append((losses, state_of(optimizer, list(net.parameters()))))
    assert results[0][0] == results[1][0]
    assert_same_state(results[0][1], results[1][1])


def test_a_compiled_model_trains_and_its_state_has_plain_names(backend: CountingBackend) -> None:
    """torch.compile(model) wraps the module; its parameters are the same, and so are their names in a checkpoint."""
    torch.manual_seed(4)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    compiled = torch.compile(net, backend=backend)
    optimizer = LuminaV(compiled.parameters())
    for step in range(3):
        compiled(normal((16, 6), step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    file = through_a_file(get_optimizer_state_dict(compiled, optimizer))
    assert set(file["state"]) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    reader = LuminaV(net.parameters())
    set_optimizer_state_dict(net, reader, file)
    params = list(net.parameters())
    assert_same_state(state_of(reader, params), state_of(optimizer, params))
