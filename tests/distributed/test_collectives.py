"""One collective a step, whoever holds what; what the ranks agree on in it; and what happens when one is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import collective_cases as cases
import pytest
import ranks
import torch.distributed as dist

pytestmark = [pytest.mark.distributed, ranks.needs_gloo]

GATHER = "_allgather_base_"
ONE_PASS = {"fused_single_pass": True}
SHORT_TIMEOUT = 5.0


# ---- how many ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", [False, True], ids=["", "missing"])
@pytest.mark.parametrize(
    ("options", "expected"), [({}, 1), (ONE_PASS, 1), ({"buffer": 1}, 2), ({"cautious": False, "bound": False}, 1)]
)
def test_one_collective_a_step(options: dict[str, Any], expected: int, missing: bool, tmp_path: Path) -> None:
    """Whatever the number of tensors, and whether gradients are missing; two with buffer=1."""
    for num_params in (1, 5):
        arguments = {"way": "fsdp2", "options": options, "num_params": num_params, "missing": missing}
        assert ranks.run(cases.count, 2, tmp_path, **arguments) == [[[GATHER] * expected] * 3] * 2


def test_plain_shards_exchange_their_sizes_once(tmp_path: Path) -> None:
    seen = ranks.run(cases.count, 3, tmp_path, way="flat_pieces", options={}, num_params=4, missing=False)
    assert [steps[1:] for steps in seen] == [[[GATHER]] * 2] * 3
    assert all(len(steps[0]) > 1 for steps in seen)


def test_one_collective_for_each_set_of_ranks(tmp_path: Path) -> None:
    """Over both mesh dimensions, over one, over the other. Making the group of all four takes none of ours."""
    assert [steps[-1] for steps in ranks.run(cases.count_domains, 4, tmp_path)] == [[GATHER] * 3] * 4


def test_ddp_replicas_need_none(tmp_path: Path) -> None:
    assert ranks.run(cases.count_ddp, 2, tmp_path) == [([], True)] * 2


# ---- who takes part ------------------------------------------------------------------------------------------------


def test_a_rank_without_parameters_takes_part(tmp_path: Path) -> None:
    assert ranks.run(cases.rank_without_parameters, 3, tmp_path) == [(0.0, True)] * 3


def test_unequal_groups_are_refused_everywhere(tmp_path: Path) -> None:
    for message in ranks.run(cases.unequal_groups, 3, tmp_path):
        assert message.startswith("ValueError: param_groups[0] must have the same number of parameters on every rank")


def test_frozen_on_one_rank_only_is_refused_everywhere(tmp_path: Path) -> None:
    first, second = ranks.run(cases.frozen_on_one_rank, 2, tmp_path)
    assert "5 of 10 elements" in first[0] and first[1]
    assert second == ("", True)


def test_frozen_parameters_are_left_alone(tmp_path: Path) -> None:
    assert ranks.run(cases.frozen_everywhere, 2, tmp_path) == [([GATHER], True)] * 2


@pytest.mark.parametrize("way", ["fsdp2", "flat_pieces"])
def test_warm_up_from_zero(way: str, tmp_path: Path) -> None:
    for difference in ranks.run(cases.warm_up_from_zero, 3, tmp_path, way=way):
        assert difference.largest <= 1e-6


@pytest.mark.parametrize("options", [{}, {"buffer": 1}, ONE_PASS], ids=str)
def test_process_group_chooses_the_ranks(options: dict[str, Any], tmp_path: Path) -> None:
    expected = [[GATHER] * (2 if "buffer" in options else 1)] * 3
    assert ranks.run(cases.own_process_group, 4, tmp_path, options=options) == [(0.0, expected)] * 4


def test_process_group_of_others_is_refused(tmp_path: Path) -> None:
    inside, outside = ranks.run(cases.foreign_process_group, 2, tmp_path)
    assert not inside and outside.startswith("process_group must be")


def test_groups_added_later(tmp_path: Path) -> None:
    assert ranks.run(cases.group_added_later, 2, tmp_path) == [0.0, 0.0]


# ---- placements ----------------------------------------------------------------------------------------------------


def test_gradients_of_other_placements_are_redistributed(tmp_path: Path) -> None:
    for wrong in ranks.run(cases.other_placements, 2, tmp_path):
        assert max(wrong) <= 1e-6


def test_refusals_change_nothing(tmp_path: Path) -> None:
    for partial, sparse, kept in ranks.run(cases.refused, 2, tmp_path):
        assert partial.startswith("a parameter must be sharded or replicated, got placements (Partial(sum),)")
        assert sparse.startswith("TypeError: gradients must be dense") and kept


@pytest.mark.skipif(dist.is_available() and dist.is_initialized(), reason="needs a process without a process group")
@pytest.mark.parametrize("options", [{}, {"buffer": 1}, ONE_PASS], ids=str)
def test_fsdp_sync_without_process_group_warns_once(options: dict[str, Any]) -> None:
    messages, equal = cases.no_process_group(options)
    assert (
        equal and len(messages) == 1 and messages[0].startswith("fsdp_sync=True, but no process group is initialised")
    )


# ---- loss scaling --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("way", "on_device"), [("fsdp2", False), ("flat_pieces", False), ("fsdp2", True)])
@pytest.mark.parametrize("options", [{}, {"buffer": 1}, ONE_PASS], ids=str)
def test_overflow_on_one_rank_skips_the_step_on_all(
    way: str, on_device: bool, options: dict[str, Any], tmp_path: Path
) -> None:
    """The flag is looked at on the CPU; on an accelerator it stays there and is only selected by."""
    arguments = {"way": way, "on_device": on_device, "options": options}
    for left, wrote, difference in ranks.run(cases.overflow, 2, tmp_path, **arguments):
        assert left and wrote and difference.ulps <= 1


def test_grad_scaler(tmp_path: Path) -> None:
    assert ranks.run(cases.grad_scaler, 2, tmp_path) == [(True, 2.0)] * 2


# ---- failures ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["fsdp2", "flat_pieces"])
@pytest.mark.parametrize("how", ["killed", "raises"])
def test_a_failing_rank_ends_the_step_on_all(how: str, way: str, tmp_path: Path) -> None:
    """The others raise within the group's timeout; no weight, state or step count has changed on any rank."""
    ended = ranks.start(
        cases.one_rank_fails, 3, tmp_path, how=how, way=way, options={}, group_timeout=SHORT_TIMEOUT, together=False
    )
    for rank in (0, 2):
        message, kept, seconds = ended[rank].result
        assert message.startswith("RuntimeError") or "Error" in message
        assert kept and seconds < 2 * SHORT_TIMEOUT
    if how == "raises":
        message, kept, _ = ended[1].result
        assert message.startswith("ValueError: betas") and kept
    else:
        assert ended[1].result is None
