"""What the ranks do in `test_distributed_checkpoints.py`."""

from __future__ import annotations

import copy
from typing import Any

import sharded
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support import master_of
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard

from luminav import LuminaV

SHAPES = ((2, 3), (766, 64), (766,), (5, 766), (5,))
"""The second is large enough to be kept in blocks, cut between panels on 3 and 4 ranks. Shards of all are uneven."""


class Model(nn.Module):
    """Its gradients are set from outside, the same on any number of ranks."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.first = nn.Linear(64, 766, device=device, dtype=torch.bfloat16)
        self.second = nn.Linear(766, 5, device=device, dtype=torch.bfloat16)
        self.rest = nn.Parameter(torch.empty(2, 3, device=device, dtype=torch.bfloat16))

    def fill(self) -> None:
        values = sharded.wholes(SHAPES, torch.bfloat16)
        with torch.no_grad():
            for param, value in zip(self.parameters(), values):
                whole = isinstance(param, DTensor)
                param.copy_(sharded.placed(value, param.device_mesh, param.placements) if whole else value)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)) + self.rest.sum()


def build(world: int, *, device: str = "cpu", **fsdp: Any) -> Model:
    """Whole for a world of 1, else sharded over the ranks."""
    model = Model(device)
    if world > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)), **fsdp)
    if device == "meta":
        model.to_empty(device="cpu")
    model.fill()
    return model


def train(model: nn.Module, optimizer: LuminaV, steps: range) -> None:
    params = list(model.parameters())
    for step in steps:
        for param, grad in zip(params, sharded.grads_of(SHAPES, step, torch.bfloat16)):
            whole = isinstance(param, DTensor)
            param.grad = sharded.placed(grad, param.device_mesh, param.placements) if whole else grad
        optimizer.step()


def result(model: nn.Module, optimizer: LuminaV) -> dict[str, Tensor]:
    """Whole weights and state by name; of split masters the FP32 values, which may differ by rounding."""
    tensors = {}
    for name, param in model.named_parameters():
        tensors[name] = param.detach()
        tensors |= {f"{name}.{key}": value for key, value in optimizer.state.get(param, {}).items()}
    wholes = {name: whole_of(t) if isinstance(t, DTensor) else t.clone() for name, t in tensors.items()}
    for name in [name for name in wholes if name.endswith(".master_remainder")]:
        weight = name.removesuffix(".master_remainder")
        wholes[f"{weight}.master"] = master_of(wholes[weight], {"master_remainder": wholes.pop(name)})
    return wholes


def whole_of(tensor: DTensor) -> Tensor:
    """`full_tensor()`, also of int16, for which neither gloo nor NCCL has collectives."""
    if tensor.dtype == torch.int16:
        return tensor.to(torch.int32).full_tensor().to(torch.int16)
    return tensor.full_tensor()


def never_stopped(options: dict[str, Any], steps: int) -> dict[str, Tensor]:
    """The run of one process without a process group."""
    model = build(1)
    optimizer = LuminaV(model.parameters(), lr=2e-2, **options)
    train(model, optimizer, range(steps))
    return result(model, optimizer)


# ---- torch.distributed.checkpoint -----------------------------------------------------------------------------------


def save(checkpoint: str, options: dict[str, Any], steps: int) -> None:
    """Train and save, sharded."""
    model = build(dist.get_world_size())
    optimizer = LuminaV(model.parameters(), lr=2e-2, **options)
    train(model, optimizer, range(steps))
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=checkpoint)


def resume(checkpoint: str, options: dict[str, Any], steps: range) -> dict[str, Tensor]:
    """Load what :func:`save` wrote and go on."""
    model = build(dist.get_world_size())
    optimizer = LuminaV(model.parameters(), lr=2e-2, **options)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    loaded = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(loaded, checkpoint_id=checkpoint)
    set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    train(model, optimizer, steps)
    return result(model, optimizer)


def gather_full(options: dict[str, Any], steps: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Whole state dicts, on rank 0."""
    model = build(dist.get_world_size())
    optimizer = LuminaV(model.parameters(), lr=2e-2, **options)
    train(model, optimizer, range(steps))
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return get_model_state_dict(model, options=full), get_optimizer_state_dict(model, optimizer, options=full)


def spread_full(
    model_state: dict[str, Any], optimizer_state: dict[str, Any], options: dict[str, Any], steps: range
) -> dict[str, Tensor]:
    """Load whole state dicts that only rank 0 has."""
    model = build(dist.get_world_size())
    optimizer = LuminaV(model.parameters(), lr=2e-2, **options)
    full = StateDictOptions(full_state_dict=True, broadcast_from_rank0=dist.get_world_size() > 1)
    first = dist.get_rank() == 0
    set_model_state_dict(model, model_state if first else {}, options=full)
    set_optimizer_state_dict(model, optimizer, optimizer_state if first else {}, options=full)
    train(model, optimizer, steps)
    return result(model, optimizer)


def load_whole_directly(state: dict[str, Any], options: dict[str, Any], steps: range) -> dict[str, Tensor]:
    """`load_state_dict` with the whole tensors of an unsharded optimizer, the same on every rank; FP64 master too."""
    model = build(dist.get_world_size())
    optimizer = LuminaV(model.parameters(), lr=2e-2, **options)
    with torch.no_grad():
        for param, value in zip(model.parameters(), state["weights"]):
            param.copy_(sharded.placed(value, param.device_mesh, param.placements))
    optimizer.load_state_dict(state["optimizer"])
    train(model, optimizer, steps)
    exported = {f"master.{name}": value.full_tensor() for name, value in optimizer.master_state_dict(model).items()}
    return result(model, optimizer) | exported


def load_damaged(spoil: bool) -> str:
    """Load a file of other placements, whose first moment has NaN in the rows of rank 0 where `spoil`; what came of it.

    Afterwards the ranks meet once more: none is left behind in the redistribution of a later tensor.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(32.0).view(4, 8)
    params = [nn.Parameter(sharded.placed(whole, mesh, (Shard(0),))) for _ in range(2)]
    moments = [whole.clone() for _ in range(4)]
    moments[0][0, 7] = float("nan") if spoil else 0.0
    moved = [sharded.placed(moment, mesh, (Shard(1),)) for moment in moments]
    optimizer = LuminaV(params)
    file = {"state": {}, "param_groups": optimizer.state_dict()["param_groups"]}
    for number in range(2):
        file["state"][number] = {"step": 3, "exp_avg": moved[2 * number], "exp_avg_sq": moved[2 * number + 1]}
    try:
        optimizer.load_state_dict(file)
        outcome = str(len(optimizer.state))
    except ValueError as error:
        outcome = str(error)
    dist.all_reduce(torch.zeros(1))
    return outcome


# ---- other ways to build -------------------------------------------------------------------------------------------


def from_meta(options: dict[str, Any], steps: int) -> dict[str, Tensor]:
    model = build(dist.get_world_size(), device="meta")
    optimizer = LuminaV(model.parameters(), lr=2e-2, **options)
    train(model, optimizer, range(steps))
    return result(model, optimizer)


def offloaded(options: dict[str, Any], steps: int) -> dict[str, Tensor]:
    model = build(dist.get_world_size(), offload_policy=CPUOffloadPolicy(pin_memory=False))
    optimizer = LuminaV(model.parameters(), lr=2e-2, **options)
    train(model, optimizer, range(steps))
    return result(model, optimizer)


# ---- FSDP1 ---------------------------------------------------------------------------------------------------------


def fsdp1_round_trip(options: dict[str, Any]) -> tuple[bool, list[str]]:
    """FSDP1's own way to save and load: are the weights those of the run that went on, and which keys came along?

    Sharded: on the CPU torch 2.13's FULL_STATE_DICT gives all of a parameter's state the values of the last tensor
    gathered, AdamW's too.
    """

    def start() -> tuple[FullyShardedDataParallel, LuminaV]:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(9, 31), nn.Tanh(), nn.Linear(31, 3)).to(torch.bfloat16)
        model = FullyShardedDataParallel(layers, use_orig_params=True, device_id=torch.device("cpu"))
        return model, LuminaV(model.parameters(), lr=2e-2, fsdp_sync=True, **options)

    def steps(model: FullyShardedDataParallel, optimizer: LuminaV, numbers: range) -> None:
        for step in numbers:
            optimizer.zero_grad()
            torch.manual_seed(100 + step)
            model(torch.randn(4, 9, dtype=torch.bfloat16)).square().sum().backward()
            optimizer.step()

    model, optimizer = start()
    steps(model, optimizer, range(4))
    settings = (StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(), ShardedOptimStateDictConfig())
    FullyShardedDataParallel.set_state_dict_type(model, *settings)
    weights = copy.deepcopy(model.state_dict())
    saved = FullyShardedDataParallel.optim_state_dict(model, optimizer)
    steps(model, optimizer, range(4, 7))

    other, resumed = start()
    FullyShardedDataParallel.set_state_dict_type(other, *settings)
    other.load_state_dict(weights)
    resumed.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(other, resumed, saved))
    steps(other, resumed, range(4, 7))
    equal = all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters()))
    return equal, sorted(next(iter(saved["state"].values())))
