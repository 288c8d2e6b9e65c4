"""Where the elements of a shard are in the unsharded parameter.

A DTensor's placements cut a tensor along its dimensions, one mesh dimension after the other. What is left to a rank is
a set of indices along each dimension, in runs of consecutive ones, and from these follows the global index of every
local element, which the rounding noise is drawn by.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

Runs: TypeAlias = Sequence[range]
"""The indices along one dimension that a shard holds, as runs of consecutive ones."""


def _chunk(runs: Runs, num_chunks: int, number: int) -> list[range]:
    """Chunk `number` of `num_chunks` of an index sequence, cut as :func:`torch.chunk` cuts."""
    size = -(-sum(map(len, runs)) // num_chunks)
    start, stop = number * size, (number + 1) * size
    chunk: list[range] = []
    for run in runs:
        chunk += [run[max(start, 0) : max(stop, 0)]]
        start, stop = start - len(run), stop - len(run)
    return _joined(chunk)


def _joined(runs: Iterable[range]) -> list[range]:
    """The same indices in as few runs as possible."""
    joined: list[range] = []
    for run in runs:
        if joined and run and joined[-1].stop == run.start:
            joined[-1] = range(joined[-1].start, run.stop)
        elif run:
            joined.append(run)
    return joined


def _shard_of(runs: Runs, num_shards: int, number: int, split_factor: int) -> list[range]:
    """What `Shard` keeps of an index sequence, and `_StridedShard`, which shards each of `split_factor` pieces."""
    pieces = [_chunk(runs, split_factor, piece) for piece in range(split_factor)]
    return _joined(run for piece in pieces for run in _chunk(piece, num_shards, number))


def held_indices(shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]) -> list[Runs]:
    """The indices that this rank holds along each dimension."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    return held_at(coordinate, shape, mesh.shape, placements)


def held_at(
    coordinate: Sequence[int], shape: Sequence[int], mesh_shape: Sequence[int], placements: Sequence[Placement]
) -> list[Runs]:
    """The indices held along each dimension at a place of the mesh: each placement cuts what the one before it left."""
    held: list[Runs] = [[range(size)] for size in shape]
    for num_shards, number, placement in zip(mesh_shape, coordinate, placements, strict=True):
        dim = sharded_dim(placement)
        if dim is not None:
            held[dim] = _shard_of(held[dim], num_shards, number, getattr(placement, "split_factor", 1))
    return held


def sharded_dim(placement: Placement) -> int | None:
    """The tensor dimension that a placement shards, `_StridedShard` included; None if it replicates."""
    return getattr(placement, "dim", None)


@dataclass(frozen=True)
class Layout:
    """Where local elements are in the unsharded parameter, both in row-major order.

    The global index of local element i is ``first_index + i + Σ (i // block)·jump``: as far on as locally, and a jump
    ahead after each block.
    """

    first_index: int = 0
    jumps: tuple[tuple[int, int], ...] = ()
    """Pairs (block, jump); none if the local elements are consecutive."""

    @classmethod
    def of(cls, shape: Sequence[int], held: Sequence[Runs]) -> Layout:
        """The layout of a shard of a tensor of this shape, from the indices held along each dimension.

        Raises:
            RuntimeError: The runs along a dimension are not regular.
        """
        sizes = [sum(map(len, runs)) for runs in held]
        if 0 in sizes:
            return cls()
        first_index, jumps = 0, dict[int, int]()
        block = stride = 1  # elements in one step along the dimension: local, global
        for dim in reversed(range(len(shape))):
            first_index += held[dim][0].start * stride
            if len(held[dim]) > 1:
                run, gap = _regular(held[dim], outermost=dim == 0)
                jumps[block * run] = jumps.get(block * run, 0) + gap * stride
                # The next row begins with the first run again.
                jumps[block * sizes[dim]] = jumps.get(block * sizes[dim], 0) - sizes[dim] // run * gap * stride
            outer = block * sizes[dim]
            jumps[outer] = jumps.get(outer, 0) + (shape[dim] - sizes[dim]) * stride
            block, stride = outer, stride * shape[dim]
        return cls(first_index, tuple(sorted((at, jump) for at, jump in jumps.items() if jump and at < block)))


def _regular(runs: Runs, *, outermost: bool) -> tuple[int, int]:
    """Length of equal runs and the gap between them; only the last may be shorter, in the outermost dimension."""
    length = len(runs[0])
    gap = runs[1].start - runs[0].stop
    starts = [runs[0].start + number * (length + gap) for number in range(len(runs))]
    last = runs[-1].stop if outermost else starts[-1] + length
    expected = [range(start, start + length) for start in starts[:-1]] + [range(starts[-1], last)]
    if list(runs) != expected or len(runs[-1]) > length:
        raise RuntimeError(
            f"a _StridedShard whose local indices along a dimension are {list(runs)} is not supported: they do not "
            "repeat regularly. Redistribute the parameter to Shard(), or make the dimension divisible by the mesh."
        )
    return length, gap
