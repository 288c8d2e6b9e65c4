"""Small data, and the comparison that all tests of this folder end with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import support
import torch
from torch import Tensor

STEPS = 20
STOP = 12
"""The step after which a run stops and another one goes on from its checkpoint."""

each_mode = pytest.mark.parametrize(
    "options",
    [{}, {"master_weights": "semi"}, {"fused_single_pass": True, "buffer": 2}],
    ids=["none", "semi", "one-pass"],
)


def tokens(rows: int, length: int, vocabulary: int) -> Tensor:
    """Rows that count up from a random start, so that there is something to learn."""
    starts = torch.randint(vocabulary, (rows, 1), generator=support.generator(7))
    return (starts + torch.arange(length)) % vocabulary


def assert_same_weights(actual: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        support.assert_same_bits(actual[name], tensor, name)
