"""The Triton engine keeps the tables of sharded steps: to the bits of steps whose tables are made anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kept_cases
import pytest
import ranks
import torch

pytestmark = [pytest.mark.distributed, ranks.needs_gloo]

OPTION_SETS: list[dict[str, Any]] = [
    {},
    {"fused_single_pass": True},
    {"buffer": 1},
    {"master_weights": "semi"},
    {"master_weights": "full", "fused_single_pass": True},
    {"cautious": False, "bound": False},
]


def test_kept_steps_are_those_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, whatever comes between: missing, moved or non-finite gradients, edited or loaded state."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    found = ranks.run(kept_cases.run_beside, 2, tmp_path, fresh=True, option_sets=OPTION_SETS, dtype=torch.bfloat16)
    assert found == [[], []]


def test_kept_steps_hold_no_gradient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert all(ranks.run(kept_cases.grads_let_go, 2, tmp_path, fresh=True, options={}))
