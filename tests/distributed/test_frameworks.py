"""Frameworks that are not needed for anything else: each test asks for its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import framework_cases as cases
import pytest
import ranks

pytestmark = [pytest.mark.distributed, pytest.mark.slow, ranks.needs_gloo]


@pytest.mark.parametrize(
    ("full", "options"),
    [(False, {}), (False, {"master_weights": "semi"}), (True, {"fused_single_pass": True})],
    ids=["sharded", "sharded-semi", "whole-one-pass"],
)
def test_accelerate_fsdp2_resumes_to_the_bit(full: bool, options: dict[str, Any], tmp_path: Path) -> None:
    """FSDP2. For FSDP1 it offloads, which loses state of CPU tensors, AdamW's too (torch 2.13)."""
    arguments = {"full": full, "checkpoint": str(tmp_path / "saved"), "options": options}
    for sharded, resumed, steps in ranks.run(cases.accelerate_run, 2, tmp_path, **arguments):
        assert sharded and resumed and steps == 20


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_zero(stage: int, tmp_path: Path) -> None:
    """Client optimizer of ZeRO: one flat tensor over two ranks, the steps of the unsharded one, and resuming."""
    pytest.importorskip("deepspeed")
    for resumed, difference, num_domains in ranks.run(
        cases.deepspeed_run, 2, tmp_path, stage=stage, checkpoint=str(tmp_path / "saved")
    ):
        assert resumed and difference <= 1e-6 and num_domains == 1
