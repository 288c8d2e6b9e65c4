"""Fixtures for all tests. Its place here also puts `tests/` on the import path, so that `import support` works."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _fixed_random_stream() -> None:
    """Tests draw from their own generators; what still draws from the global one (module initialisation) repeats."""
    torch.manual_seed(0)
