"""What the ranks do in `test_frameworks.py`."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from luminav import LuminaV


def layers(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(9, 31), nn.Tanh(), nn.Linear(31, 3)).to(dtype)


def batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(4, 9, generator=generator).to(torch.bfloat16)


def copies(tensors: list[Tensor]) -> list[Tensor]:
    return [(t.to_local() if isinstance(t, DTensor) else t).detach().clone() for t in tensors]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def accelerate_round_trip(full: bool, checkpoint: str) -> bool:
    """Accelerate's own functions for FSDP checkpoints, which it does not reach on the CPU by itself."""
    from accelerate import FullyShardedDataParallelPlugin, PartialState
    from accelerate.utils.fsdp_utils import load_fsdp_model, load_fsdp_optimizer, save_fsdp_model, save_fsdp_optimizer

    state = PartialState(cpu=True)
    kind = "FULL_STATE_DICT" if full else "SHARDED_STATE_DICT"
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=kind, cpu_offload=False)
    accelerator = SimpleNamespace(
        process_index=dist.get_rank(), is_main_process=dist.get_rank() == 0, is_fsdp2=True,
        wait_for_everyone=dist.barrier, num_processes=dist.get_world_size(), state=state, device=torch.device("cpu"),
    )  # fmt: skip

    def start() -> tuple[nn.Module, LuminaV]:
        model = layers(torch.bfloat16)
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        return model, LuminaV(model.parameters(), lr=2e-2, fused_single_pass=True)

    def train(model: nn.Module, optimizer: LuminaV, steps: range) -> list[Tensor]:
        for step in steps:
            optimizer.zero_grad()
            model(batch(step)).square().sum().backward()
            optimizer.step()
        return copies(list(model.parameters()))

    model, optimizer = start()
    train(model, optimizer, range(4))
    save_fsdp_model(plugin, accelerator, model, checkpoint)
    save_fsdp_optimizer(plugin, accelerator, optimizer, model, checkpoint)
    expected = train(model, optimizer, range(4, 7))
    model, optimizer = start()
    load_fsdp_model(plugin, accelerator, model, checkpoint)
    load_fsdp_optimizer(plugin, accelerator, optimizer, model, checkpoint)
    return equal(train(model, optimizer, range(4, 7)), expected)


def deepspeed_run(stage: int, checkpoint: str) -> tuple[bool, float, int]:
    """ZeRO with LuminaV as client optimizer.

    Returns:
        Whether a resumed run goes on bit for bit; the difference from unsharded training of the flat buffer; number of
        domains.
    """
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK=str(dist.get_rank()), LOCAL_SIZE=str(dist.get_world_size()))
    os.environ.update(RANK=str(dist.get_rank()), WORLD_SIZE=str(dist.get_world_size()))
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")
    model = layers(torch.float32)
    optimizer = LuminaV(model.parameters(), lr=2e-2, fsdp_sync=True)
    grads = _recorded(optimizer)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def train(steps: range) -> list[Tensor]:
        for step in steps:
            engine.backward(engine(batch(step)).square().sum())
            engine.step()
        return copies(list(optimizer.state))

    (flat,) = train(range(4))
    difference = _unsharded(grads, flat)
    domains = len(optimizer._stepper.sharding.domains)
    engine.save_checkpoint(checkpoint)
    expected = train(range(4, 7))
    engine.load_checkpoint(checkpoint)
    return equal(train(range(4, 7)), expected), difference, domains


def _recorded(optimizer: LuminaV) -> list[tuple[Tensor, Tensor]]:
    """Weights before each step and gradients, of the only parameter, as DeepSpeed hands them over."""
    seen: list[tuple[Tensor, Tensor]] = []

    def look(optimizer: LuminaV, *_: Any) -> None:
        (param,) = [param for group in optimizer.param_groups for param in group["params"]]
        seen.append((param.detach().clone(), param.grad.detach().clone()))

    optimizer.register_step_pre_hook(look)
    return seen


def _unsharded(seen: list[tuple[Tensor, Tensor]], flat: Tensor) -> float:
    """The largest difference between our piece and that of one unsharded parameter with the joined gradients."""

    def joined(piece: Tensor) -> Tensor:
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, piece)
        return torch.cat(told)

    whole = nn.Parameter(joined(seen[0][0]))
    optimizer = LuminaV([whole], lr=2e-2)
    for _, grad in seen:
        whole.grad = joined(grad)
        optimizer.step()
    return float((joined(flat) - whole.detach()).abs().max())
