"""Fixtures for all tests. Its place here also puts `tests/` on the import path, so that `import support` works."""

from __future__ import annotations

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest tests first: one that is left for the end runs alone, and other processes have nothing to do."""
    items.sort(key=_seconds, reverse=True)


def _seconds(item: pytest.Item) -> float:
    """What the nearest `slow` mark says. 0 without a number: these keep their order."""
    mark = item.get_closest_marker("slow")
    return float(mark.args[0]) if mark is not None and mark.args else 0.0


@pytest.fixture(autouse=True)
def _fixed_random_stream() -> None:
    """Tests draw from their own generators; what still draws from the global one (module initialisation) repeats."""
    torch.manual_seed(0)
