"""The Triton engine's kernels compile for every GPU that is promised, without one: registers, spills, vector loads.

A target that the installed Triton or its assembler does not know is a failure, with the compiler's own words.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("triton_aot.py")
TARGETS = [
    *(("cuda", arch) for arch in ("75", "80", "86", "89", "100", "120")),  # for 90, every plan: the second test
    ("hip", "gfx942"),
    ("hip", "gfx1100"),
]
FEW_BYTES = 64
KERNELS = {"numbers_kernel", "lookahead_kernel", "rms_kernel", "measure_kernel", "scales_kernel", "update_kernel"}


def compile_for(backend: str, arch: str, cache: Path, *options: str) -> list[dict[str, Any]]:
    """What `triton_aot.py` reports, in a process where Triton compiles, with an empty cache."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache), "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), backend, arch, *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{backend} {arch}: {done.stderr[-4000:]}"
    results: list[dict[str, Any]] = json.loads(done.stdout)
    for result in results:
        print(f"{backend} {arch}: {result['kernel']:16} {result['registers']:3} registers, "
              f"{result['spilled']} spilled ({result['plan']})")  # fmt: skip
    return results


@pytest.mark.parametrize(("backend", "arch"), TARGETS, ids=lambda value: value)
def test_kernels_compile_and_do_not_spill(backend: str, arch: str, tmp_path: Path) -> None:
    """But for a few bytes, where a warp fewer would cost more.

    What sm_75 spills, with half the threads, is reported.
    """
    results = compile_for(backend, arch, tmp_path)
    assert {result["kernel"] for result in results} == KERNELS
    assert not spilling(results) or arch == "75", spilling(results)


def spilling(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [r for r in results if r["spilled"] > FEW_BYTES and "unaligned" not in r["plan"]]


@pytest.mark.slow(40)
def test_no_plan_spills_and_the_loops_load_vectors_before_they_compute(tmp_path: Path) -> None:
    """8 or 16 bytes a thread and access for aligned tensors, and loads that are under way three iterations ahead.

    They go into shared memory: a load into registers would be waited for, and the assembler likes to move it down to
    its first use. Measured on an H200, that and scalar loads separate the kernels from the memory's speed.
    """
    results = compile_for("cuda", "90", tmp_path, "--all", "--code")
    assert {result["kernel"] for result in results} == KERNELS
    assert not spilling(results), spilling(results)
    loops = {(r["kernel"], r["plan"]): r["loop"] for r in results if "loop" in r and "unaligned" not in r["plan"]}
    assert len(loops) >= 12
    for (kernel, plan), loop in loops.items():
        accesses = [name[0] for text in loop if (name := re.search(r"\b(LDG|LDGSTS|STG)\.\S+", text))]
        wide = [name for name in accesses if re.search(r"\.(64|128)\b", name)]
        assert len(wide) >= (3 if kernel == "measure_kernel" else 5), (kernel, plan, accesses)
        narrow = set(accesses) - set(wide)
        if "8-bit" in plan or "block variance" in plan:  # one number for a block
            narrow = {name for name in narrow if ".U8" not in name and ".U16" not in name}
        assert not narrow, (kernel, plan, narrow)
    for kernel, plan in (
        ("update_kernel", "bf16 one-pass"),
        ("update_kernel", "bf16 exact"),
        ("measure_kernel", "bf16 exact"),
    ):
        loop = loops[kernel, plan]
        direct = [text for text in loop if "LDG." in text]
        assert not direct, f"{kernel}, {plan}: {direct}, not into shared memory"
        assert sum("LDGSTS." in text for text in loop) == 4, (kernel, plan)
