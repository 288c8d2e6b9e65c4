"""Shards of the same parameters, fed with the same global gradients, take the steps of the unsharded run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ranks
import sharded
import torch

pytestmark = [pytest.mark.distributed, ranks.needs_gloo]

OPTION_SETS: list[dict[str, Any]] = [
    {},
    {"execution": "single", "capturable": True},
    {"buffer": 1},
    {"fused_single_pass": True},
    {"cautious": False, "bound": False},
    {"bound_type": "coordinate", "weight_decay": 1.0, "maximize": True},
]
LARGE_STEP = {"lr": 2e-2}  # the bounds and scales then matter: with the default the radial bound changes no FP32 bit

EVERY_WAY = [
    ("fsdp2", 1), ("fsdp2", 2), ("fsdp2", 3), ("fsdp2", 4),
    ("fsdp1", 2), ("fsdp1", 3), ("fsdp1", 4),
    ("flat_pieces", 2), ("flat_pieces", 3), ("flat_pieces", 4),
    ("tensor_parallel", 2), ("tensor_parallel", 3),
    ("hsdp", 4), ("two_dimensional", 4), ("fsdp2_with_tensor_parallel", 4),
]  # fmt: skip

FP32_TOLERANCE = 1e-6
"""Sums are taken in other pieces, so that a scale may differ in the last bit of FP32, 6e-8."""

EQUAL_SHARE = 0.9999
"""A scale's last bit moves a rounding threshold by 1e-7 of the step: a few elements in a million fall otherwise."""


@pytest.mark.parametrize(("way", "world"), EVERY_WAY)
def test_fp32_is_the_unsharded_run(way: str, world: int, tmp_path: Path) -> None:
    option_sets = [{**LARGE_STEP, **options} for options in OPTION_SETS]
    for found in ranks.run(sharded.compare, world, tmp_path, way=way, option_sets=option_sets):
        for options, difference in zip(option_sets, found):
            assert difference.largest <= FP32_TOLERANCE, options


BLOCK_SETS: list[dict[str, Any]] = [
    {"state_bits": 8},
    {"buffer": 1, "block_variance": True},
    {"state_bits": 8, "buffer": 1, "block_variance": True, "fused_single_pass": True},
]
BLOCK_SHAPES = ((80, 64), (33, 192), (7, 32, 64), (1, 4096), (5, 3))
"""The fourth leaves ranks without a row."""
PANEL_SHAPES = ((384, 64), (383, 2, 64), (1, 4096), (5, 3))
"""On 2 and 3 ranks all shards begin at multiples of 64 rows; the second's last ones are a row short."""


@pytest.mark.parametrize(("way", "world"), [("fsdp2", 2), ("fsdp2", 3), ("hsdp", 4)])
def test_blocks_are_those_of_the_unsharded_run(way: str, world: int, tmp_path: Path) -> None:
    """8-bit codes: rows are never cut, so every rank draws the whole run's noise. Tiles: nor are panels."""
    for sets, shapes in ((BLOCK_SETS[:1], BLOCK_SHAPES), (BLOCK_SETS, PANEL_SHAPES)):
        option_sets = [{**LARGE_STEP, **options} for options in sets]
        for found in ranks.run(sharded.compare, world, tmp_path, way=way, option_sets=option_sets, shapes=shapes):
            for options, difference in zip(option_sets, found):
                assert difference.largest <= FP32_TOLERANCE, options


@pytest.mark.parametrize("way", ["fsdp2", "two_dimensional"])
def test_tiles_draw_the_noise_of_the_unsharded_run(way: str, tmp_path: Path) -> None:
    """Without sums every bit of BF16 weights and state is equal. Rows cut by two mesh dimensions, columns as well."""
    world = 4 if way == "two_dimensional" else 3
    shapes = ((384, 128), (256, 64), (384, 64)) if way == "two_dimensional" else PANEL_SHAPES
    option_sets = [{**LARGE_STEP, "cautious": False, "bound": False, **BLOCK_SETS[1]}]
    found = ranks.run(
        sharded.compare, world, tmp_path, way=way, dtype=torch.bfloat16, shapes=shapes, option_sets=option_sets
    )
    assert [(d.unequal, d.unequal_state) for (d,) in found] == [(0, 0)] * world


def test_shards_that_cut_panels_are_refused_on_every_rank(tmp_path: Path) -> None:
    """When the optimizer is made, and when a group is switched, before anything has changed."""
    for rank, (made, switched, unchanged) in enumerate(ranks.run(sharded.refuse_cut_panels, 2, tmp_path)):
        rows = ("0 to 39", "40 to 79")[rank]
        for message, name in ((made, "first.weight"), (switched, "a parameter")):
            assert f"a shard of {name}, of shape (80, 64) with placements (Shard(dim=0),)" in message
            assert f"Rows on this rank: {rows}. Train on a number of ranks" in message
            assert "shard dimension 1" in message and "block_variance=False" in message
        assert unchanged


def test_columns_may_be_cut_between_blocks_only(tmp_path: Path) -> None:
    """Tensor parallelism: multiples of 64 columns to a rank give the whole run's weights, others are refused."""
    for found in ranks.run(sharded.compare_columns, 2, tmp_path, option_sets=BLOCK_SETS):
        assert found == ["equal", "refused: columns in multiples of 64"] * len(BLOCK_SETS)


def test_a_mesh_dimension_of_one_rank_cuts_nothing(tmp_path: Path) -> None:
    """Whatever dimension of the parameter it is said to shard."""
    (found,) = ranks.run(sharded.run_along_one_rank, 1, tmp_path, option_sets=[{}, *BLOCK_SETS])
    assert all(found)


@pytest.mark.parametrize(
    ("way", "world"), [("fsdp2", 4), ("fsdp1", 3), ("flat_pieces", 3), ("fsdp2_with_tensor_parallel", 4)]
)
def test_missing_gradients_count_as_zero(way: str, world: int, tmp_path: Path) -> None:
    """On some ranks; where no rank has one, the parameter is skipped: steps and states are the unsharded run's."""
    option_sets = [{**LARGE_STEP, **options} for options in OPTION_SETS]
    for found in ranks.run(sharded.compare, world, tmp_path, way=way, option_sets=option_sets, missing=True):
        for options, difference in zip(option_sets, found):
            assert difference.largest <= FP32_TOLERANCE, options


@pytest.mark.parametrize(
    ("way", "world", "options"),
    [
        ("fsdp2", 2, {}),
        ("fsdp2", 3, {"master_weights": "semi"}),
        ("fsdp2", 4, {"buffer": 1}),
        ("hsdp", 4, {"fused_single_pass": True}),
        ("tensor_parallel", 3, {}),
        ("two_dimensional", 4, {}),
        ("fsdp2_with_tensor_parallel", 4, {}),
        ("fsdp1", 3, {}),
        ("flat_pieces", 4, {"fused_single_pass": True}),
    ],
)
def test_bf16_draws_the_noise_of_the_unsharded_run(
    way: str, world: int, options: dict[str, Any], tmp_path: Path
) -> None:
    """After 50 steps 99.99 % of the weights are bit-equal and the rest within two ulps; without sums, all are."""
    found = ranks.run(
        sharded.compare, world, tmp_path, way=way, dtype=torch.bfloat16, shapes=sharded.LARGE_SHAPES, steps=50,
        option_sets=[{**LARGE_STEP, **options}, {**LARGE_STEP, "cautious": False, "bound": False}],
    )  # fmt: skip
    scaled, unscaled = [list(column) for column in zip(*found)]
    assert sum(d.unequal for d in scaled) <= (1 - EQUAL_SHARE) * sum(d.numel for d in scaled)
    assert max(d.ulps for d in scaled) <= 2
    assert [(d.unequal, d.unequal_state) for d in unscaled] == [(0, 0)] * world


@pytest.mark.slow
def test_triton_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter: sharded steps take the engine's verbs one by one.

    Shards of columns, and the zeros in place of missing gradients, go to the foreach engine, in the same collective.
    """
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    cases = [("fsdp2", True), ("tensor_parallel", False)]
    option_sets = [{**LARGE_STEP, **options} for options in ({}, {"buffer": 1}, {"fused_single_pass": True})]
    for found in ranks.run(sharded.compare_triton, 2, tmp_path, fresh=True, cases=cases, option_sets=option_sets):
        assert max(difference.largest for difference in found) <= FP32_TOLERANCE


def test_replicas_stay_bit_identical(tmp_path: Path) -> None:
    """HSDP: ranks 0 and 2 hold the same shards, and so do 1 and 3. FP16 steps depend on every bit of the scales."""
    options = [{"lr": 2e-2}, {"lr": 2e-2, "buffer": 1}, {"lr": 2e-2, "fused_single_pass": True}]
    found = ranks.run(sharded.compare, 4, tmp_path, way="hsdp", dtype=torch.float16, option_sets=options, steps=8)
    for first, second in ((0, 2), (1, 3)):
        assert [d.digest for d in found[first]] == [d.digest for d in found[second]]
    assert found[0] != found[1]
