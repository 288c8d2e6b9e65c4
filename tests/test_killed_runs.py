"""A run killed at any moment and resumed from its last checkpoint ends with the bits of one that never stopped.

In the modes whose state is not a tensor like the weight: 8-bit codes with scales, split masters, variances of blocks.
The moment is a call of a function, drawn by seed from all that the unbroken run makes, in Python or C: before, within
and after steps and checkpoints.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from runs import assert_same_state, state_of, take_steps
from support import normal, parameter

from luminav import LuminaV

STEPS, SAVE_EVERY = 9, 2
SHAPES = ((64, 128), (128,), (9, 7), (4, 16, 64))
"""The first and the last are kept in blocks where a mode has any: at least 4096 elements, rows a multiple of 64."""
IN_BLOCKS = (0, 3)

MODES: dict[str, dict[str, Any]] = {
    "8-bit": {"state_bits": 8},
    "8-bit, one pass": {"state_bits": 8, "fused_single_pass": True},
    "8-bit, split semi": {"state_bits": 8, "master_weights": "semi"},
    "split semi": {"master_weights": "semi"},
    "split full, one pass": {"master_weights": "full", "fused_single_pass": True},
    "block variance": {"buffer": 1, "block_variance": True},
    "block variance, 8-bit, one pass": {
        "buffer": 1, "block_variance": True, "state_bits": 8, "fused_single_pass": True,
    },
}  # fmt: skip

_CONTEXT = forked.context()


def train(folder: Path, options: dict[str, Any], last_call: float) -> None:
    """Train from the folder's checkpoint, if there is one, to the end, or until call number `last_call`."""
    calls = itertools.count(1)

    def count(*_: object) -> None:
        if next(calls) == last_call:
            os.kill(os.getpid(), signal.SIGKILL)

    torch.set_num_threads(1)
    sys.setprofile(count)
    params = [parameter(normal(shape, 10 + number, dtype=torch.bfloat16)) for number, shape in enumerate(SHAPES)]
    optimizer = LuminaV(params, lr=1e-2, **options)
    begin = _load(folder, params, optimizer)
    with (folder / "log").open("a") as log:
        log.write(f"{begin}\n")
    for step in range(begin, STEPS):
        take_steps(optimizer, params, range(step, step + 1))
        if (step + 1) % SAVE_EVERY == 0 or step + 1 == STEPS:
            _save(folder, params, optimizer, step + 1)
    sys.setprofile(None)
    (folder / "calls").write_text(str(next(calls)))
    torch.save(state_of(optimizer, params), folder / "end.pt")


def _save(folder: Path, params: list[Any], optimizer: LuminaV, step: int) -> None:
    """Write a checkpoint in such a way that the folder has a whole one at every moment."""
    content = {"step": step, "params": [param.data for param in params], "optimizer": optimizer.state_dict()}
    with (folder / "new.pt").open("wb") as stream:
        torch.save(content, stream)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(folder / "new.pt", folder / "checkpoint.pt")


def _load(folder: Path, params: list[Any], optimizer: LuminaV) -> int:
    if not (folder / "checkpoint.pt").exists():
        return 0
    content = torch.load(folder / "checkpoint.pt", weights_only=True)
    for param, value in zip(params, content["params"]):
        param.data.copy_(value)
    optimizer.load_state_dict(content["optimizer"])
    step: int = content["step"]
    return step


def run(folder: Path, options: dict[str, Any], last_call: float = math.inf) -> int:
    """Train in a process of its own; its exit status, or minus the signal that killed it."""
    folder.mkdir(exist_ok=True)
    process = _CONTEXT.Process(target=train, args=(folder, options, last_call))
    process.start()
    process.join()
    status: int = process.exitcode
    return status


def assert_kept_as_the_mode_says(end: dict[str, torch.Tensor], options: dict[str, Any]) -> None:
    for number in IN_BLOCKS:
        numel = math.prod(SHAPES[number])
        if options.get("state_bits") == 8:
            assert end[f"exp_avg {number}"].dtype == torch.uint8
            assert end[f"exp_avg_scale {number}"].numel() == numel // 64
        if options.get("block_variance"):
            assert end[f"exp_avg_sq {number}"].numel() == numel // 64
        if "master_weights" in options:
            assert end[f"master_remainder {number}"].dtype == torch.int16


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="the system has no SIGKILL")
@pytest.mark.parametrize("mode", MODES)
def test_killed_and_resumed_ends_with_the_same_bits(mode: str, tmp_path: Path) -> None:
    options, draw = MODES[mode], random.Random(mode)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert run(whole, options) == 0
    calls = int((whole / "calls").read_text())
    expected = torch.load(whole / "end.pt", weights_only=True)
    assert_kept_as_the_mode_says(expected, options)

    statuses = [run(broken, options, draw.randrange(calls // 2, calls)), run(broken, options, draw.randrange(calls))]
    statuses.append(run(broken, options))
    assert statuses[0] == -signal.SIGKILL and statuses[1] in (-signal.SIGKILL, 0) and statuses[2] == 0
    assert int((broken / "log").read_text().split()[-1]) > 0, "the last run did not go on from a checkpoint"
    assert_same_state(torch.load(broken / "end.pt", weights_only=True), expected)
