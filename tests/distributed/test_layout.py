"""The global index of every element of a shard, for all placements, without a process group."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from luminav.distributed import _cut_at_panels
from luminav.engines.bundle import Bundle, Piece, Workspace, cut
from luminav.layout import Layout, held_indices

tensor = pytest.importorskip("torch.distributed.tensor")
placement_types = pytest.importorskip("torch.distributed.tensor.placement_types")

Replicate, Shard = tensor.Replicate, tensor.Shard


@dataclass
class Mesh:
    """What the layout asks of a device mesh."""

    shape: tuple[int, ...]
    coordinate: tuple[int, ...]

    def get_coordinate(self) -> tuple[int, ...]:
        return self.coordinate


def strided(dim: int, split_factor: int) -> Any:
    return placement_types._StridedShard(dim, split_factor=split_factor)


def torchs_part(index: Tensor, mesh: Mesh, placements: tuple[Any, ...]) -> Tensor:
    """What torch itself leaves to a rank of a tensor of global indices."""
    for num_chunks, number, placement in zip(mesh.shape, mesh.coordinate, placements):
        if not isinstance(placement, Replicate):
            index = placement._split_tensor(index, num_chunks, with_padding=False, contiguous=False)[0][number]
    return index


def engines_index(layout: Layout, shape: torch.Size, limit: int) -> Tensor:
    """Low word and high word of the index as the engines compute it, piece by piece, put together again."""
    step = SimpleNamespace(param=torch.empty(shape), first_index=layout.first_index, jumps=layout.jumps)
    return torch.cat([indices(step, piece) for piece in cut(0, shape, limit)] or [torch.empty(0).long()])


def indices(step: Any, piece: Piece) -> Tensor:
    low, high, start = Bundle([step], [piece], Workspace(piece.numel, torch.device("cpu")))._element_index
    return ((low.long() + start) & 0xFFFFFFFF) + (torch.as_tensor(high).long() << 32)


CASES = [
    ((8,), (2,), (Shard(0),)),
    ((7, 5), (4,), (Shard(0),)),
    ((7, 5), (4,), (Shard(1),)),
    ((2, 3), (4,), (Shard(0),)),
    ((3, 4, 5), (3,), (Shard(1),)),
    ((3, 4, 5), (3,), (Shard(2),)),
    ((6, 4, 5), (2, 3), (Shard(0), Shard(2))),
    ((6, 4, 5), (2, 3), (Shard(2), Shard(1))),
    ((9, 7), (2, 3), (Shard(1), Shard(1))),
    ((9, 7), (2, 3), (Replicate(), Shard(1))),
    ((9, 7), (2, 3), (Shard(0), Replicate())),
    ((8, 3), (2, 2), (strided(0, 2), Shard(0))),
    ((7, 3), (2, 2), (strided(0, 2), Shard(0))),
    ((5, 3), (2, 2), (strided(0, 2), Shard(0))),
    ((5, 3), (3, 2), (strided(0, 2), Replicate())),
    ((8, 6), (2, 2), (strided(1, 2), Replicate())),
    ((3, 8, 2), (2, 2), (strided(1, 2), Shard(2))),
    ((12, 5), (2, 3), (strided(0, 3), Shard(0))),
    ((16, 16), (2, 2, 2), (strided(0, 4), strided(0, 2), Shard(1))),
    ((1,), (3,), (Shard(0),)),
    ((0, 4), (2,), (Shard(1),)),
    ((), (2,), (Replicate(),)),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "mesh_shape", "placements"), CASES, ids=str)
def test_index_is_that_of_torchs_own_shards(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], placements: tuple[Any, ...]
) -> None:
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    for coordinate in itertools.product(*map(range, mesh_shape)):
        mesh = Mesh(mesh_shape, coordinate)
        expected = torchs_part(whole, mesh, placements)
        held = held_indices(shape, mesh, placements)
        if expected.numel():
            assert tuple(sum(map(len, runs)) for runs in held) == tuple(expected.shape)
        layout = Layout.of(shape, held)
        for limit in (1 << 20, 7, 3, 1):
            assert engines_index(layout, expected.shape, limit).equal(expected.flatten())


def test_consecutive_elements_need_no_jumps() -> None:
    """Rows, and columns of a tensor with one row: the engines' fast path, and what Triton's kernels take."""
    for shape, placement in (((8, 6), Shard(0)), ((1, 6), Shard(1)), ((6,), Shard(0))):
        assert Layout.of(shape, held_indices(shape, Mesh((2,), (1,)), (placement,))).jumps == ()


def test_indices_beyond_32_bits() -> None:
    """A shard of columns far into a tensor of 2⁴⁰ elements."""
    shape, mesh = (1 << 20, 1 << 20), Mesh((1 << 18,), (5,))
    layout = Layout.of(shape, held_indices(shape, mesh, (Shard(1),)))
    assert layout == Layout(20, ((4, (1 << 20) - 4),))
    step = SimpleNamespace(param=torch.empty(1), first_index=layout.first_index, jumps=layout.jumps)
    row = (1 << 12) + 3
    found = indices(step, Piece(0, (...,), 4 * row, 6))
    rows, columns = [row] * 4 + [row + 1] * 2, [20, 21, 22, 23, 20, 21]
    assert found.tolist() == [(r << 20) + c for r, c in zip(rows, columns)]


def test_irregular_strides_are_refused() -> None:
    """Runs at uneven distances have no closed form. 14 rows in 3 pieces: 5, 5 and 4."""
    with pytest.raises(RuntimeError, match="do not repeat regularly"):
        Layout.of((14, 2), held_indices((14, 2), Mesh((2,), (1,)), (strided(0, 3),)))


PANEL_CASES = [
    ((2,), (Shard(0),)), ((3,), (Shard(0),)), ((2,), (Shard(1),)), ((4,), (Shard(1),)), ((2,), (Replicate(),)),
    ((2, 2), (Shard(0), Shard(0))), ((2, 2), (Shard(0), Shard(1))), ((2, 2), (Replicate(), Shard(0))),
    ((2, 2), (strided(0, 2), Shard(0))),
]  # fmt: skip


@pytest.mark.parametrize(("sizes", "placements"), PANEL_CASES, ids=str)
def test_panels_are_whole_where_torchs_shards_of_rows_are_those_of_panels(
    sizes: tuple[int, ...], placements: tuple[Any, ...]
) -> None:
    """Column means are sharded as the parameter is: every rank must hold the elements of its columns of panels."""
    found = set()
    for rows, row in itertools.product((1, 64, 65, 127, 128, 130, 191, 192, 255, 256, 383, 384), (128, 256)):
        panels, whole = -(-rows // 64), True
        for coordinate in itertools.product(*map(range, sizes)):
            mesh = Mesh(sizes, coordinate)
            ours = torchs_part(torch.arange(rows * row).view(rows, row), mesh, placements).flatten()
            columns = torchs_part(torch.arange(panels * row).view(panels, row), mesh, placements).flatten()
            of_element = torch.arange(rows * row).view(rows, row)
            wanted = of_element[torch.isin(of_element // row // 64 * row + of_element % row, columns)]
            whole &= torch.equal(ours.sort()[0], wanted) and bool((ours.view(-1)[::64] % 64 == 0).all())
        assert _cut_at_panels(rows, panels, row, sizes, placements) == whole, (rows, row)
        found.add(whole)
    assert True in found and (False in found or not any(p == Shard(0) for p in placements))
