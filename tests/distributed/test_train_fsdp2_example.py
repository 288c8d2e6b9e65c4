"""The example, as its docstring tells to run it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import ranks

pytestmark = [pytest.mark.distributed, pytest.mark.slow, ranks.needs_gloo]

ROOT = Path(__file__).resolve().parents[2]


def torchrun(num_processes: int, *options: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_processes}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [*command, str(ROOT / "examples" / "train_fsdp2.py"), *options],
        env=environment, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_trains_on_two_and_resumes_on_one(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("".join(f"{n} times {n + 1} is {n * (n + 1)}.\n" for n in range(4000)))
    options = ("--data", str(text), "--checkpoint", str(tmp_path / "saved"))
    first = torchrun(2, *options, "--steps", "12")
    assert "2 ranks on " in first and "from step 0" in first
    second = torchrun(1, *options, "--steps", "18", "--resume")
    assert "1 ranks on " in second and "from step 12" in second
    losses = [float(loss) for loss in re.findall(r"validation loss ([\d.]+)", first + second)]
    assert losses[1] < losses[0] < 4.0
