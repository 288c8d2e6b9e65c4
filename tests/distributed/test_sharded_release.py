"""Gradient release under FSDP2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ranks
import release_cases as cases

pytestmark = [pytest.mark.distributed, ranks.needs_gloo]


@pytest.mark.parametrize("options", [{}, {"fused_single_pass": True}, {"buffer": 1, "master_weights": "semi"}], ids=str)
@pytest.mark.parametrize("bucket", [1, 1500], ids=str)
def test_release_gives_the_bits_of_ordinary_steps(bucket: int, options: dict[str, Any], tmp_path: Path) -> None:
    """Every rank takes the same collectives: were it not so, this would hang."""
    results = ranks.run(cases.train, 2, tmp_path, options=options, bucket=bucket)
    assert all(equal for equal, _ in results)
    counts = {calls for _, calls in results}
    assert len(counts) == 1 and counts.pop() >= cases.STEPS
