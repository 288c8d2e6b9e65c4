"""What the ranks do in `test_sharded_release.py`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import luminav
from luminav import LuminaV, gradient_release

STEPS = 4


class Counter(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the all-gathers of the optimizer's own messages, which are FP64."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and args[1].dtype == torch.float64:
            self.calls += 1
        return func(*args, **(kwargs or {}))


class Net(nn.Module):
    """Layers of which one is not always used."""

    def __init__(self) -> None:
        super().__init__()
        sizes = ((9, 31), (31, 31), (31, 31), (31, 3))
        self.layers = nn.ModuleList(nn.Linear(*size) for size in sizes)

    def forward(self, x: Tensor, *, all_layers: bool) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number != 2 or all_layers:
                x = torch.tanh(layer(x))
        return x.float().square().sum()


def train(options: dict[str, Any], bucket: int) -> tuple[bool, int]:
    """Whether release gives the bits of ordinary steps on this rank, and its collectives in a backward pass."""
    gradient_release.BUCKET = bucket
    ordinary, _ = run(options, released=False)
    released, calls = run(options, released=True)
    return all(torch.equal(a, b) for a, b in zip(ordinary, released, strict=True)), calls


def run(options: dict[str, Any], *, released: bool) -> tuple[list[Tensor], int]:
    """Local weights after some steps under FSDP2, with uneven shards."""
    torch.manual_seed(0)
    model = Net().bfloat16()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = LuminaV(model.parameters(), lr=1e-2, **options)
    if released:
        luminav.enable_gradient_release(model, optimizer)
    counter = Counter()
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        x = torch.randn(4, 9, generator=generator).bfloat16()
        loss = model(x, all_layers=step % 2 == 1)
        with counter:
            loss.backward()
        if released:
            assert all(param.grad is None for param in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    return [param.to_local().detach().clone() for param in model.parameters()], counter.calls  # type: ignore[attr-defined]
