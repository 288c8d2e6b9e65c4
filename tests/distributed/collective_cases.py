"""What the ranks do in `test_collectives.py`: each function runs on every rank and returns what it saw."""

from __future__ import annotations

import copy
import dataclasses
import os
import pickle
import signal
import time
import warnings
from collections.abc import Callable
from typing import Any

import sharded
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from luminav import LuminaV
from luminav.pending import Scaling
from luminav.stepper import Stepper


class Collectives(TorchDispatchMode):
    """Names of the collectives that run inside, whoever asks for them."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional"):
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


def snapshot(optimizer: LuminaV) -> list[Tensor]:
    """Copies of all local weights and state tensors, and how many there are per parameter."""
    tensors = []
    for group in optimizer.param_groups:
        for param in group["params"]:
            state = optimizer.state.get(param, {})
            tensors += [torch.tensor(len(state)), sharded.local(param).clone()]
            tensors += [sharded.local(state[key]).clone() for key in sorted(state)]
    return tensors


def unchanged(before: list[Tensor], after: list[Tensor]) -> bool:
    return len(before) == len(after) and all(torch.equal(a, b) for a, b in zip(before, after))


# ---- how many ------------------------------------------------------------------------------------------------------


def count(way: str, options: dict[str, Any], num_params: int, missing: bool) -> list[list[str]]:
    """The collectives of each of three steps."""
    twins = sharded.Twins(way, options, torch.float32, [(7, 5)] * num_params)
    seen = []
    for step in range(3):
        twins.set_grads(step, sharded.absent_on_some if missing else None)
        with Collectives() as collectives:
            twins.optimizer.step()
        seen.append(collectives.names)
    return seen


def count_domains() -> list[list[str]]:
    """Parameters over all four ranks, over pairs across and along, replicated and plain, in one optimizer."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    ways = [(Shard(0), Shard(1)), (Shard(0), Replicate()), (Replicate(), Shard(0)), (Replicate(), Replicate())]
    tensors = sharded.wholes([(6, 4)] * 9, torch.float32)
    params = [nn.Parameter(distribute_tensor(t, mesh, way)) for t, way in zip(tensors, ways * 2)]
    params.append(nn.Parameter(tensors[-1]))
    optimizer = LuminaV(params, lr=1e-2)
    seen = []
    for _ in range(2):
        for param in params:
            param.grad = torch.ones_like(param)
        with Collectives() as collectives:
            optimizer.step()
        seen.append(collectives.names)
    return seen


def count_ddp() -> tuple[list[str], bool]:
    """A step of a DDP replica, and whether the replicas' weights are bit-equal after five."""
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(9, 33), nn.Tanh(), nn.Linear(33, 5)))
    optimizer = LuminaV(model.parameters(), lr=1e-2)
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(8, 9)).square().sum().backward()
        with Collectives() as collectives:
            optimizer.step()
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    told = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(told, flat)
    return collectives.names, all(torch.equal(other, flat) for other in told)


# ---- who takes part ------------------------------------------------------------------------------------------------


def rank_without_parameters() -> tuple[float, bool]:
    """Rank 1 has no parameters in the first group; all ranks have pieces of the second. Bits as of the whole run."""
    rank, world = dist.get_rank(), dist.get_world_size()
    first, second = sharded.wholes([(40,), (31,)], torch.bfloat16)
    holders = [r for r in range(world) if r != 1]
    cuts = [[0] + [40 * (sum(r <= i for r in holders)) // len(holders) for i in range(world)],
            [31 * i // world for i in range(world + 1)]]  # fmt: skip
    pieces = [slice(cut[rank], cut[rank + 1]) for cut in cuts]
    params = [nn.Parameter(t[piece].clone()) for t, piece in zip((first, second), pieces)]
    whole = [nn.Parameter(t.clone()) for t in (first, second)]
    ours = LuminaV([{"params": params[:1] if rank != 1 else []}, {"params": params[1:]}], lr=2e-2, fsdp_sync=True)
    theirs = LuminaV([{"params": whole[:1]}, {"params": whole[1:]}], lr=2e-2)
    for step in range(5):
        for param, other, piece, grad in zip(
            params, whole, pieces, sharded.grads_of([(40,), (31,)], step, torch.bfloat16)
        ):
            param.grad, other.grad = grad[piece].clone(), grad
        ours.step()
        theirs.step()
    wrong = [float((p - q[piece]).abs().sum()) for p, q, piece in zip(params, whole, pieces)]
    return wrong[1] if rank == 1 else sum(wrong), len(ours.state) == (1 if rank == 1 else 2)


def unequal_groups() -> str:
    """Two parameters on rank 0, one on the others: nobody can know which is missing."""
    params = [nn.Parameter(torch.ones(3)) for _ in range(2 if dist.get_rank() == 0 else 1)]
    optimizer = LuminaV(params, fsdp_sync=True)
    for param in params:
        param.grad = torch.ones(3)
    return _message(optimizer)


def frozen_on_one_rank() -> tuple[str, bool]:
    param = nn.Parameter(torch.ones(5))
    optimizer = LuminaV([param], fsdp_sync=True)
    if dist.get_rank() == 1:
        param.requires_grad_(False)
    else:
        param.grad = torch.ones(5)
    before = snapshot(optimizer)
    return _message(optimizer), unchanged(before, snapshot(optimizer))


def frozen_everywhere() -> tuple[list[str], bool]:
    """A frozen parameter is neither measured nor changed; the others are."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    params = [nn.Parameter(distribute_tensor(t, mesh, [Shard(0)])) for t in sharded.wholes([(6, 2)] * 2, torch.float32)]
    params[0].requires_grad_(False)
    optimizer = LuminaV(params)
    params[1].grad = torch.ones_like(params[1])
    with Collectives() as collectives:
        optimizer.step()
    return collectives.names, params[0] not in optimizer.state and float(optimizer.state[params[1]]["step"]) == 1


def _message(optimizer: LuminaV) -> str:
    try:
        optimizer.step()
    except (ValueError, TypeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def warm_up_from_zero(way: str) -> sharded.Difference:
    """lr=0 and an all-zero gradient on some ranks in the first step, as torch's checkpoints ask for state to load into.

    The others have gradients: no rank may take it for that and leave the collective.
    """
    twins = sharded.Twins(way, {"lr": 0.0}, torch.float32, [(2, 3), (8, 2)])
    for step in range(3):
        twins.set_grads(step)
        if step == 0:
            twins.whole[0].grad.zero_()
            twins.whole[1].grad[2:] = 0.0
            for n in range(2):
                twins.params[n].grad = twins.shards.part_of(n, twins.whole[n].grad)
        twins.step()
        for optimizer in (twins.optimizer, twins.whole_optimizer):
            optimizer.param_groups[0]["lr"] = 1e-2
    assert float(twins.optimizer.state[twins.params[0]]["step"]) == 3
    return twins.difference()


def own_process_group(options: dict[str, Any]) -> tuple[float, list[list[str]]]:
    """Ranks 0, 1 and ranks 2, 3 each share other parameters: two process groups, two runs."""
    rank = dist.get_rank()
    process_groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    (tensor,) = sharded.wholes([(37,)], torch.bfloat16, seed=rank // 2)
    piece = slice(0, 30) if rank % 2 == 0 else slice(30, 37)
    param, whole = nn.Parameter(tensor[piece].clone()), nn.Parameter(tensor.clone())
    ours = LuminaV([param], lr=2e-2, fsdp_sync=True, process_group=process_groups[rank // 2], **options)
    theirs = LuminaV([whole], lr=2e-2, **options)
    seen = []
    for step in range(4):
        (whole.grad,) = sharded.grads_of([(37,)], step + 10 * (rank // 2), torch.bfloat16)
        param.grad = whole.grad[piece].clone()
        with Collectives() as collectives:
            ours.step()
        theirs.step()
        seen.append(collectives.names)
    return float((param - whole[piece]).abs().max()), seen[1:]


def foreign_process_group() -> str:
    """Rank 1 is not in the group that it passes."""
    others = dist.new_group([0])
    try:
        LuminaV([nn.Parameter(torch.ones(2))], fsdp_sync=True, process_group=others)
    except TypeError as error:
        return str(error)
    return ""


def group_added_later() -> float:
    """Offsets are exchanged again when a group was added; the optimizer is copied and pickled on the way."""
    rank = dist.get_rank()
    tensors = sharded.wholes([(9,), (12,)], torch.bfloat16)
    pieces = [slice(0, 5) if rank == 0 else slice(5, 9), slice(0, 12) if rank == 0 else slice(12, 12)]
    params = [nn.Parameter(t[piece].clone()) for t, piece in zip(tensors, pieces)]
    whole = [nn.Parameter(t.clone()) for t in tensors]
    ours, theirs = LuminaV(params[:1], lr=2e-2, fsdp_sync=True), LuminaV(whole[:1], lr=2e-2)
    for step in range(4):
        if step == 2:
            ours.add_param_group({"params": params[1:]})
            theirs.add_param_group({"params": whole[1:]})
            assert pickle.loads(pickle.dumps(copy.deepcopy(ours))).param_groups[1]["process_group"] is None
        for param, other, piece, grad in zip(
            params, whole, pieces, sharded.grads_of([(9,), (12,)], step, torch.bfloat16)
        ):
            param.grad, other.grad = grad[piece].clone(), grad
        ours.step()
        theirs.step()
    return sum(float((p - q[piece]).abs().sum()) for p, q, piece in zip(params, whole, pieces))


# ---- gradients and parameters of other placements --------------------------------------------------------------------


def other_placements() -> list[float]:
    """Gradients that are replicated, sharded along another dimension, or still to be summed."""
    mesh, world = init_device_mesh("cpu", (dist.get_world_size(),)), dist.get_world_size()
    wrong = []
    for placement in (Replicate(), Shard(1), Partial()):
        (tensor,) = sharded.wholes([(5, 7)], torch.float32)
        param, whole = nn.Parameter(distribute_tensor(tensor, mesh, [Shard(0)])), nn.Parameter(tensor.clone())
        ours, theirs = LuminaV([param], lr=2e-2), LuminaV([whole], lr=2e-2)
        for step in range(3):
            (whole.grad,) = sharded.grads_of([(5, 7)], step, torch.float32)
            if isinstance(placement, Partial):
                param.grad = DTensor.from_local(whole.grad / world, mesh, [placement], run_check=False)
            else:
                param.grad = sharded.placed(whole.grad, mesh, [placement])
            ours.step()
            theirs.step()
        wrong.append(float((param.full_tensor() - whole).abs().max()))
    return wrong


def refused() -> tuple[str, str, bool]:
    """A Partial parameter; a sparse gradient of a plain shard: messages, and whether nothing has changed."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    partial = ""
    try:
        LuminaV([nn.Parameter(DTensor.from_local(torch.ones(3), mesh, [Partial()], run_check=False))])
    except ValueError as error:
        partial = str(error)
    params = [nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))]
    optimizer = LuminaV(params, fsdp_sync=True)
    params[0].grad, params[1].grad = torch.ones(4), torch.sparse_coo_tensor([[0]], [1.0], (4,))
    before = snapshot(optimizer)
    return partial, _message(optimizer), unchanged(before, snapshot(optimizer))


# ---- loss scaling --------------------------------------------------------------------------------------------------


def overflow(way: str, options: dict[str, Any], on_device: bool) -> tuple[bool, bool, sharded.Difference]:
    """Step 2 overflows on rank 0 only. Were the ranks' weights and states left, and is the rest the unscaled run?

    Args:
        on_device: Leave the flags where they are, as is done on an accelerator, instead of looking at them.
    """
    if on_device:
        Stepper._scaling = _left_on_device(Stepper._scaling)
    twins = sharded.Twins(way, {"lr": 2e-2, **options}, torch.float16, sharded.SHAPES)
    left, wrote_before = False, False
    for step in range(4):
        twins.set_grads(step)
        for param in twins.params:
            param.grad = param.grad * 4.0
        twins.optimizer.grad_scale = torch.tensor(4.0)
        twins.optimizer.found_inf = torch.tensor(float(step == 2 and dist.get_rank() == 0))
        before = snapshot(twins.optimizer)
        twins.optimizer.step()
        if step == 2:
            left = unchanged(before, snapshot(twins.optimizer))
        else:
            wrote_before |= not unchanged(before, snapshot(twins.optimizer))
            twins.whole_optimizer.step()
    return left, wrote_before, twins.difference()


def _left_on_device(scaling_of: Callable[..., Any]) -> Callable[..., Any]:
    def scaling(stepper: Stepper, pending: list[Any]) -> Scaling:
        found: Scaling = scaling_of(stepper, pending)
        stepped = all(stepper.optimizer.state.get(item.param) for item in pending)
        return dataclasses.replace(found, found_inf=found.overflow) if stepped else found

    return scaling


def grad_scaler() -> tuple[bool, float]:
    """torch's GradScaler over DTensors: a part with an infinite gradient skips the step everywhere."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    param = nn.Parameter(distribute_tensor(torch.ones(6, dtype=torch.float16), mesh, [Shard(0)]))
    optimizer = LuminaV([param], lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(3):
        scaler.scale(torch.ones(1))
        param.grad = torch.ones_like(param)
        if step == 1 and dist.get_rank() == 0:
            param.grad.to_local()[0] = torch.inf
        before = snapshot(optimizer)
        scaler.step(optimizer)
        if step == 1:
            left = unchanged(before, snapshot(optimizer))
        scaler.update()
    return left, float(optimizer.state[param]["step"])


# ---- failures ------------------------------------------------------------------------------------------------------


def one_rank_fails(how: str, way: str, options: dict[str, Any]) -> tuple[str, bool, float]:
    """After two good steps rank 1 fails before the collective; the others tell what they raised, kept and waited."""
    twins = sharded.Twins(way, options, torch.float32, sharded.SHAPES)
    for step in range(2):
        twins.set_grads(step)
        twins.step()
    twins.set_grads(2)
    before, began = snapshot(twins.optimizer), time.monotonic()
    if dist.get_rank() == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        twins.optimizer.param_groups[0]["betas"] = (2.0, 0.9)
    message = _message(twins.optimizer)
    seconds = time.monotonic() - began
    if how == "raises" and dist.get_rank() == 1:
        time.sleep(8.0)  # alive, and not in the collective
    return message, unchanged(before, snapshot(twins.optimizer)), seconds


def no_process_group(options: dict[str, Any]) -> tuple[list[str], bool]:
    """One process without a process group: warnings of three steps, and whether they are the unsharded ones."""
    (tensor,) = sharded.wholes([(9,)], torch.float32)
    param, whole = nn.Parameter(tensor.clone()), nn.Parameter(tensor.clone())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizers = [LuminaV([param], fsdp_sync=True, **options), LuminaV([whole], **options)]
        for step in range(3):
            (grad,) = sharded.grads_of([(9,)], step, torch.float32)
            for tensor, optimizer in zip((param, whole), optimizers):
                tensor.grad = grad.clone()
                optimizer.step()
    return [str(warning.message) for warning in caught], torch.equal(param, whole)
