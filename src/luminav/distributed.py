"""Who holds which part of a parameter.

A parameter is *whole* here (a plain tensor, or a DTensor that no mesh dimension shards), a DTensor of which this
process holds a part, or a plain shard: with ``fsdp_sync=True``, one of consecutive pieces of the flat tensor in rank
order. :class:`Sharding` works out once what each is. From then on a parameter is a local tensor and a :class:`Part`:
the global index of its elements, for the rounding noise, and the :class:`luminav.domains.Domain` of ranks whose sums
are added to ours.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from torch import distributed as dist

from luminav.blocks import BLOCK, PANEL_ROWS, panel_shape
from luminav.domains import Domain, message_device
from luminav.layout import Layout, Runs, held_at, held_indices, sharded_dim

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

Group: TypeAlias = Mapping[str, Any]


# ---- local tensors -------------------------------------------------------------------------------------------------


def is_dtensor(tensor: Any) -> bool:
    """Whether `tensor` is a DTensor. Does not import them: that takes 0.4 s, and whoever has one has done so."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor: a DTensor's local tensor, its communication finished; else itself.

    To be called under ``torch.no_grad()``: the local tensor of a parameter may then be written.
    """
    if not is_dtensor(tensor):
        return tensor
    held: Any = tensor.to_local()  # type: ignore[attr-defined]
    return held.wait() if hasattr(held, "wait") else held


def held(tensor: Tensor) -> Tensor:
    """The very object that a DTensor holds, perhaps not yet communicated; another tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)


def local_grad(param: Tensor, grad: Tensor) -> Tensor:
    """The part of a gradient that belongs to our part of the parameter.

    A DTensor of other placements, `Partial` included, is redistributed first: every rank of its mesh takes part.

    Raises:
        TypeError: One of the two is a DTensor, the other is not.
        ValueError: They are on different meshes.
    """
    if is_dtensor(param) != is_dtensor(grad):
        names = [type(tensor).__name__ for tensor in (param, grad)]
        raise TypeError(f"parameter and gradient must both be DTensors or neither, got {names[0]} and {names[1]}.")
    if is_dtensor(param):
        own: Any = param
        other: Any = grad
        if own.device_mesh != other.device_mesh:
            raise ValueError(
                f"the gradient's mesh must be its parameter's, {own.device_mesh}, got {other.device_mesh}."
            )
        if own.placements != other.placements:
            grad = other.redistribute(own.device_mesh, own.placements)
    return local(grad)


def placed_like(value: Tensor, param: Tensor) -> Tensor:
    """A whole tensor, or a DTensor of any placements, as its parameter is placed.

    Args:
        value: State from a file. A plain tensor must be the same on every rank: each takes its part of it.
        param: The parameter that it belongs to, of the same global shape.

    Raises:
        ValueError: A DTensor for a plain parameter.
    """
    if not is_dtensor(param):
        if is_dtensor(value):
            raise ValueError(
                "state that is a DTensor cannot be loaded for a plain parameter. Use set_optimizer_state_dict of "
                "torch.distributed.checkpoint.state_dict, or load value.full_tensor()."
            )
        return value
    owner: Any = param
    if not is_dtensor(value):
        tensor = sys.modules["torch.distributed.tensor"]
        whole = [tensor.Replicate()] * owner.device_mesh.ndim
        value = tensor.DTensor.from_local(value, owner.device_mesh, whole, run_check=False)
    placed: Any = value
    return placed if placed.placements == owner.placements else placed.redistribute(owner.device_mesh, owner.placements)


def check_placements(param: Tensor) -> None:
    """Refuse a DTensor that is a sum still to be taken: ValueError."""
    placements = param.placements if is_dtensor(param) else ()  # type: ignore[attr-defined]
    if any(placement.is_partial() for placement in placements):
        raise ValueError(
            f"a parameter must be sharded or replicated, got placements {tuple(placements)}: no rank holds the values "
            "of a Partial. Redistribute it to Replicate() or Shard() first."
        )


def check_blocks(param: Tensor) -> None:
    """Refuse a DTensor whose placements cut a block that state is kept in: ValueError.

    Rows are not cut by Shard(0), nor by anything along a mesh dimension of one rank. Shard(1) may cut them between
    blocks.
    """
    if not is_dtensor(param):
        return
    owner: Any = param
    inner = math.prod(param.shape[2:])
    sizes = owner.device_mesh.shape
    cuts = [None if size == 1 else sharded_dim(p) for size, p in zip(sizes, owner.placements, strict=True)]
    for size, dim in zip(sizes, cuts, strict=True):
        if dim in (None, 0):
            continue
        chunk, blocks = -(-param.shape[1] // size) * inner, -(-param.shape[1] * inner // BLOCK // size)
        if dim != 1 or cuts.count(1) != 1 or chunk != blocks * BLOCK:
            raise ValueError(
                f"state_bits=8 and block_variance=True keep state for every {BLOCK} elements of a row, but a parameter "
                f"of shape {tuple(param.shape)} with placements {tuple(owner.placements)} has shards that begin inside "
                f"such a block. Shard rows (dimension 0), or columns in multiples of {BLOCK}; or give this parameter "
                "a group without these options."
            )


def check_panels(param: Tensor, name: str | None) -> None:
    """Refuse a DTensor of which a shard, on any rank, does not consist of whole panels: ValueError, on all ranks.

    Args:
        param: The parameter.
        name: Its name, if there is one.
    """
    if not is_dtensor(param):
        return
    owner: Any = param
    shape, mesh = panel_shape(param), owner.device_mesh
    cuts = (tuple(mesh.shape), tuple(block_placements(param)))
    if mesh.get_coordinate() is None or _cut_at_panels(param.shape[0], *shape, *cuts):
        return
    rows = held_indices((param.shape[0], shape[1]), mesh, cuts[1])[0]
    ours = ", ".join(f"{run.start} to {run.stop - 1}" for run in rows if run) or "none"
    raise ValueError(
        f"block_variance=True keeps state for panels of {PANEL_ROWS} rows, but a shard of {name or 'a parameter'}, of "
        f"shape {tuple(param.shape)} with placements {tuple(owner.placements)} on a mesh of {tuple(mesh.shape)}, "
        f"begins inside one. Rows on this rank: {ours}. Train on a number of ranks that gives each a multiple of "
        f"{PANEL_ROWS} rows, shard dimension 1 in multiples of {BLOCK} columns, or give this parameter a group with "
        "block_variance=False."
    )


@functools.lru_cache(maxsize=4096)
def _cut_at_panels(
    num_rows: int, num_panels: int, row: int, mesh_shape: tuple[int, ...], placements: tuple[Placement, ...]
) -> bool:
    """Whether every rank's rows are those of the panels that it holds, and its columns those of its blocks."""
    for coordinate in itertools.product(*map(range, mesh_shape)):
        rows, blocks = held_at(coordinate, (num_rows, row // BLOCK), mesh_shape, placements)
        panels, columns = held_at(coordinate, (num_panels, row), mesh_shape, placements)
        whole_rows = [range(p.start * PANEL_ROWS, min(p.stop * PANEL_ROWS, num_rows)) for p in _filled(panels)]
        whole_columns = [range(b.start * BLOCK, b.stop * BLOCK) for b in _filled(blocks)]
        if _filled(rows) != whole_rows or _filled(columns) != whole_columns:
            return False
    return True


def _filled(runs: Runs) -> list[range]:
    """Without empty runs."""
    return [run for run in runs if run]


def block_placements(param: Any) -> list[Placement]:
    """Placements of what is kept per block of a DTensor, which has two dimensions: rows, and the blocks of a row.

    Only along a mesh dimension of one rank may a parameter be sharded beyond these; that is the whole.
    """
    replicate = sys.modules["torch.distributed.tensor"].Replicate()
    return [p if sharded_dim(p) in (None, 0, 1) else replicate for p in param.placements]


def needs_rms(group: Group) -> bool:
    """Whether a group's parameters need the RMS over whole tensors before their directions are known."""
    return group["buffer"] == 1 and not group["block_variance"]


# ---- ranks ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """What this process holds of a parameter."""

    layout: Layout = Layout()
    domain: Domain | None = None
    """The ranks that hold the rest; None if there is no rest."""
    slot: int = 0
    """Its place in the domain's message."""


WHOLE = Part()
MAX_PLANS = 256  # a plan holds on to its parameters


@dataclass(eq=False)
class Plan:
    """Who holds which part of the parameters of an optimizer's groups."""

    made: dict[tuple[int, ...], dist.ProcessGroup]
    """Process groups that had to be made, by their ranks: for a parameter that several mesh dimensions shard."""
    domains: list[Domain] = field(default_factory=list)
    """In the order in which their collectives run: that of the optimizer's parameters."""
    bases: list[int] = field(default_factory=list)
    """Index in the optimizer of each group's first parameter, parameters that only other ranks hold counted."""
    parts: dict[Tensor, Part] = field(default_factory=dict)
    num_params: int = 0

    def add(self, group: Group, shards: _Shards | None) -> None:
        """Place the parameters of the next group.

        Args:
            group: The group.
            shards: Its plain shards on all ranks; None if its plain parameters are whole.
        """
        params: Sequence[Tensor | None] = group["params"]
        if not params and shards is not None:
            params = [None] * len(shards.numels)
        self.bases.append(self.num_params)
        self.num_params += len(params)
        position = 0  # among the plain ones
        for param in params:
            if is_dtensor(param):
                self._place_dtensor(param, needs_rms(group))
            elif shards is not None:
                self._place_shard(param, shards, position, needs_rms(group))
                position += 1

    def _place_dtensor(self, param: Any, rms: bool) -> None:
        mesh, placements = param.device_mesh, param.placements
        if mesh.get_coordinate() is None:  # not a rank of the mesh
            return
        held = held_indices(param.shape, mesh, placements)
        expected, actual = tuple(sum(map(len, runs)) for runs in held), tuple(local(param).shape)
        if expected != actual and not 0 == math.prod(expected) == math.prod(actual):
            raise RuntimeError(
                f"a DTensor of shape {tuple(param.shape)} with placements {placements} should have a local tensor of "
                f"shape {expected} on this rank, got {actual}."
            )
        domain = self._mesh_domain(mesh, placements)
        slot = 0 if domain is None else domain.add_slot(param.numel(), rms)
        self.parts[param] = Part(Layout.of(param.shape, held), domain, slot)

    def _mesh_domain(self, mesh: DeviceMesh, placements: Sequence[Placement]) -> Domain | None:
        """The ranks along the mesh dimensions that shard, at our place along those that replicate."""
        dims = [dim for dim, p in enumerate(placements) if sharded_dim(p) is not None and mesh.size(dim) > 1]
        if not dims:
            return None
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        ours = tuple(slice(None) if dim in dims else coordinate[dim] for dim in range(mesh.ndim))
        ranks: list[int] = mesh.mesh[ours].flatten().tolist()
        known = self._domain_of(ranks)
        if known is not None:
            return known
        group = mesh.get_group(dims[0])
        if len(dims) > 1:
            group = self._group_of(ranks, dist.get_backend_config(group))
        return self._new_domain(group, torch.device(mesh.device_type), ranks)

    def _place_shard(self, param: Tensor | None, shards: _Shards, position: int, rms: bool) -> None:
        if len(shards.ranks) == 1:
            return
        numels = shards.numels[position]
        domain = self._domain_of(shards.ranks)
        if domain is None:
            domain = self._new_domain(shards.process_group, shards.device, shards.ranks)
        slot = domain.add_slot(sum(numels), rms)
        if param is not None:
            rank = dist.get_rank(shards.process_group)
            self.parts[param] = Part(Layout(sum(numels[:rank])), domain, slot)

    def _domain_of(self, ranks: Sequence[int]) -> Domain | None:
        for domain in self.domains:
            if set(dist.get_process_group_ranks(domain.group)) == set(ranks):
                return domain
        return None

    def _new_domain(self, group: dist.ProcessGroup, device: torch.device, ranks: Sequence[int]) -> Domain:
        in_group = dist.get_process_group_ranks(group)
        order = [in_group.index(rank) for rank in ranks]
        self.domains.append(Domain(group, message_device(group, device), order))
        return self.domains[-1]

    def _group_of(self, ranks: Sequence[int], backend: str) -> dist.ProcessGroup:
        """A process group of these ranks: the default one if it fits, else a new one, which they all make here."""
        key = tuple(sorted(ranks))
        if key == tuple(range(dist.get_world_size())):
            return dist.group.WORLD  # type: ignore[return-value]
        if key not in self.made:
            self.made[key] = dist.new_group(list(key), backend=backend, use_local_synchronization=True)
        return self.made[key]


class Sharding:
    """The plans of an optimizer.

    A plan is made before the first step and when the groups have changed; every rank makes it at the same step, since
    process groups may be made and the sizes of plain shards exchanged. Plans are kept: DeepSpeed's ZeRO-3 exchanges the
    parameters of the groups within every step.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._plans: dict[tuple[Any, ...], Plan] = {}
        self._plan = Plan(self._made)
        self._warned = False

    @property
    def domains(self) -> list[Domain]:
        """The domains of the groups planned for last."""
        return self._plan.domains

    @property
    def bases(self) -> list[int]:
        """Index in the optimizer of each group's first parameter."""
        return self._plan.bases

    def part(self, param: Tensor) -> Part:
        """What this process holds of a parameter."""
        return self._plan.parts.get(param, WHOLE)

    def plan(self, groups: Sequence[Group]) -> None:
        """Work out who holds what, unless that is known for these groups already.

        Raises:
            ValueError: The ranks do not have the same groups.
            RuntimeError: A DTensor's local elements are not those its placements say.
        """
        key = tuple(
            (group["fsdp_sync"], group["process_group"], needs_rms(group), *map(id, group["params"]))
            for group in groups
        )
        if key not in self._plans:
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            plan = Plan(self._made)
            sizes = self._exchanged(groups)
            for number, group in enumerate(groups):
                plan.add(group, sizes.get(number))
            self._plans[key] = plan
        self._plan = self._plans[key]

    def _exchanged(self, groups: Sequence[Group]) -> dict[int, _Shards]:
        """The sizes of all ranks' plain shards, by group number; empty where there is nothing to exchange."""
        numbers = [number for number, group in enumerate(groups) if group["fsdp_sync"]]
        if not numbers:
            return {}
        if not (dist.is_available() and dist.is_initialized()):
            self._warn_not_initialised()
            return {}
        by_process_group: dict[dist.ProcessGroup, list[int]] = {}
        for number in numbers:
            process_group: Any = groups[number]["process_group"] or dist.group.WORLD
            by_process_group.setdefault(process_group, []).append(number)
        exchanged: dict[int, _Shards] = {}
        for process_group, of_group in by_process_group.items():
            params = {number: groups[number]["params"] for number in of_group}
            exchanged |= _exchange(process_group, params, len(groups))
        return exchanged

    def _warn_not_initialised(self) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                "fsdp_sync=True, but no process group is initialised: every parameter is taken to be whole. Call "
                "torch.distributed.init_process_group() before the first step, or leave fsdp_sync at False.",
                RuntimeWarning,
                stacklevel=2,
            )


# ---- plain shards --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Shards:
    """One group's plain shards on all ranks of a process group."""

    process_group: dist.ProcessGroup
    ranks: list[int]
    device: torch.device
    numels: list[list[int]]
    """For each parameter, the number of elements on each rank."""


def _exchange(
    process_group: dist.ProcessGroup, params: Mapping[int, Sequence[Tensor]], num_groups: int
) -> dict[int, _Shards]:
    """Tell each other the sizes of plain shards, by group number.

    A rank may have no parameters at all in a group: it then holds an empty piece of each.
    """
    ours = {
        number: [(param.numel(), param.device.type) for param in tensors if not is_dtensor(param)]
        for number, tensors in params.items()
    }
    told: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(told, (num_groups, ours), group=process_group)
    if any(count != num_groups or theirs.keys() != ours.keys() for count, theirs in told):
        raise ValueError(f"all ranks must have the same parameter groups with fsdp_sync=True, got {told}.")
    return {number: _shards(process_group, [theirs[number] for _, theirs in told], number) for number in ours}


def _shards(process_group: dist.ProcessGroup, told: list[list[tuple[int, str]]], number: int) -> _Shards:
    counts = {len(sizes) for sizes in told} - {0}
    if len(counts) > 1:
        raise ValueError(
            f"param_groups[{number}] must have the same number of parameters on every rank, or none, got "
            f"{[len(sizes) for sizes in told]}. A rank without a piece of a parameter passes an empty tensor."
        )
    count = counts.pop() if counts else 0
    kinds = [kind for sizes in told for _, kind in sizes]
    return _Shards(
        process_group=process_group,
        ranks=dist.get_process_group_ranks(process_group),
        device=torch.device(kinds[0] if kinds else "cpu"),
        numels=[[sizes[position][0] if sizes else 0 for sizes in told] for position in range(count)],
    )
