"""Save on some ranks, go on on others: the bits of the run that never stopped."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import checkpoint_cases as cases
import pytest
import ranks
import torch
from torch import Tensor

from luminav import LuminaV

pytestmark = [pytest.mark.distributed, ranks.needs_gloo]

STOP, END = 6, 12
OPTION_SETS = [
    {},
    {"buffer": 1},
    {"fused_single_pass": True},
    {"master_weights": "full"},
    {"master_weights": "semi"},
    {"master_weights": "semi", "split_master_weights": False},
    {"state_bits": 8},
    {"state_bits": 8, "buffer": 1, "block_variance": True, "fused_single_pass": True},
]


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """16-bit tensors bit for bit: over 5000 elements and 6 steps none is expected to cross a rounding threshold.

    FP32 tensors to an ulp of the largest element for each step: the sums behind a tensor's scale are added up in
    another grouping on another number of ranks, which can move the scale by one FP32 rounding.
    """
    assert found.keys() == expected.keys()
    for name, wanted in expected.items():
        if wanted.dtype == torch.float32 and wanted.numel():
            tolerance = (END - STOP) * 2.0**-23 * float(wanted.abs().max())
            torch.testing.assert_close(found[name], wanted, rtol=0.0, atol=tolerance, msg=name)
        else:
            assert torch.equal(found[name], wanted), name


@pytest.mark.parametrize("options", OPTION_SETS, ids=str)
def test_save_on_four_resume_on_fewer(options: dict[str, Any], tmp_path: Path) -> None:
    """Sharded files of uneven shards."""
    expected = cases.never_stopped(options, END)
    ranks.run(cases.save, 4, tmp_path, checkpoint=str(tmp_path / "saved"), options=options, steps=STOP)
    for world in (3, 1):
        arguments = {"checkpoint": str(tmp_path / "saved"), "options": options, "steps": range(STOP, END)}
        for found in ranks.run(cases.resume, world, tmp_path, **arguments):
            assert_equal(found, expected)


def test_save_on_one_resume_on_four(tmp_path: Path) -> None:
    checkpoint, options = str(tmp_path / "saved"), {"fused_single_pass": True}
    ranks.run(cases.save, 1, tmp_path, checkpoint=checkpoint, options=options, steps=STOP)
    for found in ranks.run(cases.resume, 4, tmp_path, checkpoint=checkpoint, options=options, steps=range(STOP, END)):
        assert_equal(found, cases.never_stopped(options, END))


@pytest.mark.parametrize("options", OPTION_SETS[2:4], ids=str)
def test_whole_state_dicts(options: dict[str, Any], tmp_path: Path) -> None:
    """Gathered on four ranks, loaded from rank 0 on two and on one."""
    expected = cases.never_stopped(options, END)
    model_state, optimizer_state = ranks.run(cases.gather_full, 4, tmp_path, options=options, steps=STOP)[0]
    for world in (2, 1):
        for found in ranks.run(
            cases.spread_full, world, tmp_path, model_state=model_state, optimizer_state=optimizer_state,
            options=options, steps=range(STOP, END),
        ):  # fmt: skip
            assert_equal(found, expected)


def test_unsharded_file_on_shards(tmp_path: Path) -> None:
    """`load_state_dict` gives each rank its part of whole tensors; `master_state_dict` exports whole FP32 weights."""
    options = {"master_weights": "semi"}
    model = cases.build(1)
    optimizer = LuminaV(model.parameters(), lr=2e-2, **options)
    cases.train(model, optimizer, range(STOP))
    state = {
        "weights": [p.detach().clone() for p in model.parameters()],
        "optimizer": copy.deepcopy(optimizer.state_dict()),
    }
    cases.train(model, optimizer, range(STOP, END))
    expected = cases.result(model, optimizer)
    expected |= {f"master.{name}": value for name, value in optimizer.master_state_dict(model).items()}
    for found in ranks.run(
        cases.load_whole_directly, 3, tmp_path, state=state, options=options, steps=range(STOP, END)
    ):
        assert_equal(found, expected)


def test_a_damaged_part_is_refused_where_it_is_and_nobody_waits(tmp_path: Path) -> None:
    refused = "state[0]: 'exp_avg' must be finite, but holds nan. Is the file damaged?"
    assert ranks.run(cases.load_damaged, 2, tmp_path, spoil=True) == [refused, "2"]
    assert ranks.run(cases.load_damaged, 2, tmp_path, spoil=False) == ["2", "2"]


@pytest.mark.parametrize("build", [cases.from_meta, cases.offloaded], ids=lambda f: f.__name__)
def test_other_ways_to_build(build: Any, tmp_path: Path) -> None:
    """On the meta device first; with FSDP2's CPU offload policy."""
    options = {"master_weights": "semi"}
    for found in ranks.run(build, 2, tmp_path, options=options, steps=STOP):
        assert_equal(found, cases.never_stopped(options, STOP))


def test_fsdp1_saves_and_loads(tmp_path: Path) -> None:
    """Plain shards keep whole masters: FSDP1 saves no state that mixes floating-point and integer tensors."""
    for options, extra in (
        ({"master_weights": "full"}, ["master_param"]),
        ({"fused_single_pass": True}, ["bound_scale", "cautious_scale"]),
    ):
        for equal, keys in ranks.run(cases.fsdp1_round_trip, 2, tmp_path, options=options):
            assert equal and keys == sorted(["step", "exp_avg", "exp_avg_sq", *extra])
