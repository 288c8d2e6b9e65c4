"""Parameters sharded in many ways, fed with parts of the same global gradients as whole ones."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import interpreted
import torch
import torch.distributed as dist
from support import normal
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from luminav import LuminaV

Shapes: TypeAlias = Sequence[tuple[int, ...]]

SHAPES = ((7, 5), (1,), (3, 4, 5), (16, 6), (2, 9), (5,))
"""Uneven over 2, 3 and 4 ranks, and empty on some."""
LARGE_SHAPES = ((131, 257), (199, 130), *SHAPES)
"""60,000 elements: 0.01 % of them is a number one can count."""


@dataclass
class Shards:
    """This rank's parts of whole parameters."""

    params: list[nn.Parameter]
    part_of: Callable[[int, Tensor], Tensor | DTensor]
    """``part_of(n, whole)``: of a whole tensor, what this rank has of parameter number n."""
    options: dict[str, Any]
    """What the optimizer must be told."""

    def local(self, number: int, whole: Tensor) -> Tensor:
        return local(self.part_of(number, whole))


def local(tensor: Tensor) -> Tensor:
    """This rank's values."""
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


def wholes(shapes: Shapes, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """The same values on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def placed(whole: Tensor, mesh: DeviceMesh, placements: Sequence[Any]) -> DTensor:
    """A whole tensor, the same on every rank, cut without communication."""
    return DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False).redistribute(mesh, placements)


# ---- ways to shard -------------------------------------------------------------------------------------------------


def _as_dtensors(params: list[nn.Parameter]) -> Shards:
    return Shards(params, lambda n, whole: placed(whole, params[n].device_mesh, params[n].placements), {})


def _module(tensors: Sequence[Tensor]) -> nn.Module:
    module = nn.Module()
    for number, tensor in enumerate(tensors):
        module.register_parameter(f"p{number}", nn.Parameter(tensor.clone()))
    module.forward = lambda x: x
    return module


def fsdp2(tensors: Sequence[Tensor]) -> Shards:
    """`fully_shard` over all ranks."""
    module = _module(tensors)
    fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return _as_dtensors(list(module.parameters()))


def hsdp(tensors: Sequence[Tensor]) -> Shards:
    """`fully_shard` over pairs of ranks, replicated over the pairs."""
    module = _module(tensors)
    fully_shard(module, mesh=init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("r", "s")))
    return _as_dtensors(list(module.parameters()))


def tensor_parallel(tensors: Sequence[Tensor]) -> Shards:
    """`Shard(1)` where there are columns, else replicated."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return _as_dtensors(
        [nn.Parameter(distribute_tensor(t, mesh, [Shard(1) if t.ndim > 1 else Replicate()])) for t in tensors]
    )


def two_dimensional(tensors: Sequence[Tensor]) -> Shards:
    """Rows over one mesh dimension and columns over the other; both over rows; rows and replicas."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("a", "b"))
    ways = ((Shard(0), Shard(1)), (Shard(0), Shard(0)), (Replicate(), Shard(0)), (Shard(1), Shard(0)))
    ways = [way if t.ndim > 1 else (Shard(0), Replicate()) for t, way in zip(tensors, ways * len(tensors))]
    return _as_dtensors([nn.Parameter(distribute_tensor(t, mesh, way)) for t, way in zip(tensors, ways)])


class _Layer(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def fsdp2_with_tensor_parallel(tensors: Sequence[Tensor]) -> Shards:
    """FSDP2 over tensor parallel layers: the rows of the column-wise ones are cut by both, as `_StridedShard`."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    layers = nn.Sequential()
    for tensor in tensors:
        matrix = tensor if tensor.ndim == 2 else tensor.reshape(-1, tensor.shape[-1])
        layer = _Layer(matrix.shape[1], matrix.shape[0], bias=False)
        layer.weight = nn.Parameter(matrix.clone())
        layers.append(layer)
    plan = {str(n): ColwiseParallel() if n % 2 == 0 else RowwiseParallel() for n in range(len(layers))}
    parallelize_module(layers, mesh["tp"], plan)
    fully_shard(layers, mesh=mesh["dp"])
    params = [layer.weight for layer in layers]

    def part_of(number: int, whole: Tensor) -> DTensor:
        param = params[number]
        return placed(whole.reshape(param.shape), param.device_mesh, param.placements)

    return Shards(params, part_of, {})


def fsdp1(tensors: Sequence[Tensor]) -> Shards:
    """FSDP1 with `use_orig_params`: each parameter is a piece of the flat one."""
    module = FullyShardedDataParallel(_module(tensors), use_orig_params=True, device_id=torch.device("cpu"))
    params = list(module.parameters())
    counts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(counts, [param.numel() for param in params])

    def part_of(number: int, whole: Tensor) -> Tensor:
        start = sum(row[number] for row in counts[: dist.get_rank()])
        return whole.reshape(-1)[start : start + params[number].numel()]

    return Shards(params, part_of, {"fsdp_sync": True})


def flat_pieces(tensors: Sequence[Tensor]) -> Shards:
    """Pieces of odd lengths, empty ones among them, in rank order."""
    world, rank = dist.get_world_size(), dist.get_rank()

    def cut(number: int, whole: Tensor) -> Tensor:
        numel = whole.numel()
        cuts = [0, *(numel * (i + number) ** 2 // (world + number) ** 2 for i in range(1, world)), numel]
        return whole.reshape(-1)[cuts[rank] : cuts[rank + 1]]

    return Shards([nn.Parameter(cut(n, t).clone()) for n, t in enumerate(tensors)], cut, {"fsdp_sync": True})


WAYS = {
    way.__name__: way
    for way in (fsdp2, hsdp, tensor_parallel, two_dimensional, fsdp2_with_tensor_parallel, fsdp1, flat_pieces)
}


# ---- a run beside its unsharded twin -------------------------------------------------------------------------------


def grads_of(shapes: Shapes, step: int, dtype: torch.dtype) -> list[Tensor]:
    """Global gradients of a step; their scale changes, so that the variance has something to follow."""
    return [g * (0.1 + step % 3) for g in wholes(shapes, dtype, seed=1000 + step)]


@dataclass
class Difference:
    """How far the shards of this rank are from the unsharded run's."""

    numel: int = 0
    unequal: int = 0
    """Number of weights that are not bit-equal."""
    largest: float = 0.0
    """Largest difference relative to max(|weight|, 1e-2)."""
    ulps: float = 0.0
    """Largest difference in units of the last place of the weight's dtype."""
    unequal_state: int = 0
    digest: str = ""
    """Of this rank's weights and state."""

    def add(self, part: Tensor, whole: Tensor) -> None:
        if part.numel():
            a, b = part.double().flatten(), whole.double().flatten()
            self.numel += a.numel()
            self.unequal += int((a != b).sum())
            self.largest = max(self.largest, float(((a - b).abs() / b.abs().clamp_min(1e-2)).max()))
            spacing = torch.exp2(torch.floor(torch.log2(b.abs().clamp_min(2.0**-14)))) * torch.finfo(part.dtype).eps
            self.ulps = max(self.ulps, float(((a - b).abs() / spacing).max()))


class Twins:
    """The same parameters whole and sharded, each with an optimizer, fed with the same global gradients."""

    def __init__(self, way: str, options: dict[str, Any], dtype: torch.dtype, shapes: Shapes) -> None:
        tensors = wholes(shapes, dtype)
        self.shapes, self.dtype = shapes, dtype
        self.shards = WAYS[way](tensors)
        self.params = self.shards.params
        like = [p.shape if isinstance(p, DTensor) else t.shape for t, p in zip(tensors, self.params)]
        self.whole = [nn.Parameter(t.reshape(shape).clone()) for t, shape in zip(tensors, like)]
        self.optimizer = LuminaV(self.params, **options, **self.shards.options)
        self.whole_optimizer = LuminaV(self.whole, **options)

    def set_grads(self, step: int, absent: Callable[[int, int, int], bool] | None = None) -> None:
        """Give both the gradients of a step.

        Args:
            absent: ``absent(n, step, rank)`` tells whether a rank has no gradient for its part of parameter n. The
                whole one's gradient is zero in that part; None if no rank has any.
        """
        for n, grad in enumerate(grads_of(self.shapes, step, self.dtype)):
            grad = grad.reshape(self.whole[n].shape)
            self.params[n].grad, self.whole[n].grad = self.shards.part_of(n, grad), grad
            if absent is None:
                continue
            ranks = [rank for rank in range(dist.get_world_size()) if absent(n, step, rank)]
            held = self._held_by(n, ranks)
            if dist.get_rank() in ranks:
                self.params[n].grad = None
            all_absent = len(ranks) == dist.get_world_size()
            self.whole[n].grad = None if all_absent else torch.where(held, 0.0, grad).to(grad.dtype)

    def _held_by(self, number: int, ranks: list[int]) -> Tensor:
        """Mask, shaped as the whole parameter, of the elements that these ranks hold."""
        index = torch.arange(self.whole[number].numel()).reshape(self.whole[number].shape)
        mine = self.shards.local(number, index).flatten() if dist.get_rank() in ranks else index.flatten()[:0]
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, mine)
        return torch.isin(index, torch.cat(told))

    def step(self) -> None:
        self.optimizer.step()
        self.whole_optimizer.step()

    def difference(self) -> Difference:
        found, digest = Difference(), hashlib.sha256()
        for n, (param, whole) in enumerate(zip(self.params, self.whole)):
            ours, theirs = self.optimizer.state.get(param, {}), self.whole_optimizer.state.get(whole, {})
            assert {k: v.dtype for k, v in ours.items()} == {k: v.dtype for k, v in theirs.items()}
            found.add(local(param), self.shards.local(n, whole))
            for key, value in ours.items():
                per_element = value.ndim > 0 or param.ndim == 0
                assert isinstance(value, DTensor) == (per_element and isinstance(param, DTensor)), key
                expected = self.shards.local(n, theirs[key]) if per_element else theirs[key]
                if isinstance(value, DTensor) and value.shape != param.shape:  # per block, also where there are no rows
                    assert local(value).shape == expected.shape, key
                found.unequal_state += int((local(value).flatten() != expected.flatten()).sum())
            for tensor in (param, *ours.values()):
                digest.update(local(tensor).contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        found.digest = digest.hexdigest()
        return found


def absent_on_some(number: int, step: int, rank: int) -> bool:
    """Parameter 0 has late gradients everywhere, parameter 1 none, others are missing on one rank or another."""
    if number == 0:
        return step < 2
    return number == 1 or (number + step + rank) % 3 == 0


def compare(
    way: str,
    option_sets: Sequence[dict[str, Any]],
    *,
    dtype: torch.dtype = torch.float32,
    shapes: Shapes = SHAPES,
    steps: int = 6,
    missing: bool = False,
) -> list[Difference]:
    """Train twins under each set of options, and compare."""
    found = []
    for options in option_sets:
        twins = Twins(way, options, dtype, shapes)
        for step in range(steps):
            twins.set_grads(step, absent_on_some if missing else None)
            twins.step()
        found.append(twins.difference())
    return found


def compare_columns(option_sets: Sequence[dict[str, Any]]) -> list[str]:
    """For each set of options, with columns cut between blocks and within: equal to the whole run, or refused."""
    found = []
    for options in option_sets:
        (difference,) = compare("tensor_parallel", [options], shapes=((80, 256), (64, 128)))
        equal = difference.largest <= 1e-6 and difference.unequal_state == 0
        found.append("equal" if equal else f"differs by {difference}")
        try:
            Twins("tensor_parallel", options, torch.float32, ((80, 192),))
        except ValueError as error:
            match = re.search("columns in multiples of 64", str(error))
            found.append(f"refused: {match[0] if match else error}")
        else:
            found.append("taken")
    return found


def refuse_cut_panels() -> tuple[str, str, bool]:
    """What is said of 40 rows to a rank, at first and after a switch, and whether the weights stayed as they were."""
    shards = fsdp2(wholes(((80, 64),), torch.float32))
    (param,), options = shards.params, {"buffer": 1, "block_variance": True}
    messages = []
    try:
        LuminaV([("first.weight", param)], **options)
    except ValueError as error:
        messages.append(str(error))
    optimizer = LuminaV([param])
    optimizer.param_groups[0].update(options)
    param.grad = shards.part_of(0, wholes(((80, 64),), torch.float32, seed=1)[0])
    before = local(param).clone()
    try:
        optimizer.step()
    except ValueError as error:
        messages.append(str(error))
    return messages[0], messages[1], torch.equal(before, local(param)) and not optimizer.state


def run_along_one_rank(option_sets: Sequence[dict[str, Any]]) -> list[bool]:
    """Whether a parameter sharded along mesh dimensions of one rank trains as a whole one, also from its state."""
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))
    shape, found = (16, 3, 2, 64), []  # large enough to be kept in blocks
    for options in option_sets:
        for placements in ([Shard(0), Shard(2)], [Shard(2), Shard(3)], [Shard(1), Shard(1)]):
            start = normal(shape, 1, dtype=torch.bfloat16)
            whole = nn.Parameter(start.clone())
            param = nn.Parameter(distribute_tensor(start.clone(), mesh, placements))
            other, ours = LuminaV([whole], **options), LuminaV([param], **options)
            for step in range(6):
                whole.grad = normal(shape, 10 + step, dtype=torch.bfloat16)
                param.grad = distribute_tensor(whole.grad.clone(), mesh, placements)
                other.step()
                ours.step()
                if step == 2:
                    saved = ours.state_dict()
                    ours = LuminaV([param], **options)
                    ours.load_state_dict(saved)
            found += [torch.equal(local(param), whole)]
            found += [torch.equal(local(ours.state[param][k]), v) for k, v in other.state[whole].items()]
    return found


def compare_triton(cases: Sequence[tuple[str, bool]], option_sets: Sequence[dict[str, Any]]) -> list[Difference]:
    """:func:`compare` with the Triton engine, for several ways, with and without missing gradients."""
    interpreted.small_programs()
    interpreted.do_nothing_twice()
    option_sets = [{**options, "execution": "triton"} for options in option_sets]
    shapes = SHAPES[:1] + SHAPES[-2:]  # the interpreter takes hundredths of a second for a tensor
    return [d for way, missing in cases for d in compare(way, option_sets, missing=missing, shapes=shapes, steps=3)]
