"""What the ranks do in `test_frameworks.py`."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
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


def _as_torchrun() -> None:
    """The environment that torchrun gives a rank."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world, LOCAL_SIZE=world)


def accelerate_run(full: bool, checkpoint: str, options: dict[str, Any]) -> tuple[bool, bool, int]:
    """`Accelerator` with its FSDP2 plugin: prepare, accumulate, clip, save_state, load_state.

    Returns:
        Whether the weights are sharded; whether a resumed run ends with the bits of one that never stopped; steps.
    """
    from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, PartialState

    _as_torchrun()
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU  # it keeps its plugins from the CPU
    kind = "FULL_STATE_DICT" if full else "SHARDED_STATE_DICT"
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=kind, cpu_offload=False)
    accelerator = Accelerator(fsdp_plugin=plugin, gradient_accumulation_steps=2)

    def start() -> tuple[nn.Module, Any]:
        model = layers(torch.bfloat16)
        return accelerator.prepare(model, LuminaV(model.parameters(), lr=2e-2, **options))

    def train(model: nn.Module, optimizer: Any, steps: range) -> list[Tensor]:
        for micro_step in range(2 * steps.start, 2 * steps.stop):
            with accelerator.accumulate(model):
                accelerator.backward(model(batch(micro_step)).square().sum())
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 50.0)
                optimizer.step()
                optimizer.zero_grad()
        return copies(list(model.parameters()))

    expected = train(*start(), range(20))
    accelerator.free_memory()
    stopped = start()
    train(*stopped, range(12))
    accelerator.save_state(checkpoint)
    accelerator.free_memory()
    model, optimizer = start()
    accelerator.load_state(checkpoint)
    resumed = equal(train(model, optimizer, range(12, 20)), expected)
    sharded = all(isinstance(param, DTensor) for param in model.parameters())
    (steps,) = {int(state["step"]) for state in optimizer.optimizer.state.values()}
    return sharded, resumed, steps


def deepspeed_run(stage: int, checkpoint: str) -> tuple[bool, float, int]:
    """ZeRO with LuminaV as client optimizer.

    Returns:
        Whether a resumed run goes on bit for bit; the difference from unsharded training of the flat buffer; number of
        domains.
    """
    _as_torchrun()
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}  # it would compile collectives, for minutes
    deepspeed.init_distributed(dist_backend="gloo")
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }

    def start() -> tuple[Any, LuminaV]:
        model = layers(torch.float32)
        optimizer = LuminaV(model.parameters(), lr=2e-2, fsdp_sync=True)
        return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0], optimizer

    def train(engine: Any, optimizer: LuminaV, steps: range) -> list[Tensor]:
        for step in steps:
            engine.backward(engine(batch(step)).square().sum())
            engine.step()
        return copies(list(optimizer.state))

    engine, optimizer = start()
    grads = _recorded(optimizer)
    train(engine, optimizer, range(12))
    engine.save_checkpoint(checkpoint)
    expected = train(engine, optimizer, range(12, 20))
    difference = _unsharded(grads, *expected)
    domains = len(optimizer._stepper.sharding.domains)
    resumed, optimizer = start()
    resumed.load_checkpoint(checkpoint)
    return equal(train(resumed, optimizer, range(12, 20)), expected), difference, domains


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
