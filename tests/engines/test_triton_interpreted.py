"""The Triton engine's tests on the CPU, in Triton's interpreter.

The interpreter is chosen for a whole process, before Triton is imported. In this process `execution="triton"` stays
what it is without a GPU: an error.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import Version

HERE = Path(__file__).parent
PARTS = {
    "options": ("test_triton.py", "test_every"),
    "shapes_and_values": ("test_triton.py", "not test_every"),
    "replay": ("test_triton_replay.py", ""),
    "custody": ("test_triton_custody.py", ""),
}
"""File and `-k` expression; each a process of up to a minute and a half."""


def why_not() -> str | None:
    """What keeps Triton's interpreter from running here."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    triton, numpy = (Version(importlib.metadata.version(name)) for name in ("triton", "numpy"))
    if triton < Version("3.9") and numpy >= Version("2.4"):
        return f"the interpreter of Triton {triton} cannot count loops with NumPy {numpy}; it can with NumPy < 2.4"
    return None


@pytest.mark.slow(80)
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
@pytest.mark.parametrize("part", PARTS)
def test_in_the_interpreter(part: str) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    options = ["-q", "--tb=short", "--maxfail=20", "-p", "no:cacheprovider", "-W", "ignore:overflow:RuntimeWarning"]
    file, chosen = PARTS[part]
    command = [sys.executable, "-m", "pytest", str(HERE / file), "-k", chosen, *options]
    done = subprocess.run(command, env=environment, cwd=HERE.parent.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout
