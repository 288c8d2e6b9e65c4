"""A demo killed at any moment and resumed ends with the same bits as one never stopped."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
from processes import TINY, SignalAt

from luminav.cli.app import run
from luminav.cli.demo.signals import StopRequest
from luminav.cli.errors import Interrupted

TIMINGS = {"optimizer_seconds", "seconds", "optimizer_ms"}

CHECKPOINT = "luminav.cli.demo.checkpoint"
TRAINING = "luminav.cli.demo.training"

# A checkpoint is two calls of fsync, the file's and the folder's, and one of replace. Each contender writes five:
# new, at steps 4, 8 and 12, and finished.
MOMENTS = {
    "before the first checkpoint is in place": SignalAt(CHECKPOINT, "os.replace", 1),
    "before the first step": SignalAt(TRAINING, "Run.take_step", 1),
    "while a checkpoint is being written": SignalAt(CHECKPOINT, "os.fsync", 5),
    "between writing a checkpoint and putting it in place": SignalAt(CHECKPOINT, "os.replace", 3),
    "just after a checkpoint was put in place": SignalAt(CHECKPOINT, "os.replace", 3, after=True),
    "between two checkpoints": SignalAt(TRAINING, "Run.take_step", 7, after=True),
    "within an optimizer step": SignalAt("luminav.stepper", "Stepper._finish", 20),
    "within a validation": SignalAt(TRAINING, "Run._nats", 40),
    "before the first contender is known as finished": SignalAt(CHECKPOINT, "os.replace", 5),
    "between the contenders": SignalAt(CHECKPOINT, "os.replace", 5, after=True),
    "in the second contender": SignalAt(TRAINING, "Run.take_step", 18, after=True),
    "while the report is being written": SignalAt(CHECKPOINT, "os.replace", 12),
}


def outcome(folder: Path) -> dict[str, Any]:
    """Everything in both checkpoints but the timings."""
    found = {}
    for key in ("luminav", "adamw"):
        content = torch.load(folder / f"runs/demo/checkpoints/{key}.pt", weights_only=True)
        del content["config"]  # names the folder
        for part in ("history", "result"):
            content[part] = {name: value for name, value in content[part].items() if name not in TIMINGS}
        found[key] = content
    return found


def same(left: Any, right: Any) -> bool:
    """Whether two nested values are equal, tensors to the bit."""
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


@pytest.mark.parametrize("moment", MOMENTS.values(), ids=MOMENTS.keys())
def test_killed_and_resumed_ends_with_the_same_bits(
    moment: SignalAt, folder: Path, finished_once: tuple[Path, processes.Ended]
) -> None:
    killed = processes.luminav(*TINY, folder=folder, signal_at=moment)
    assert killed.status == -signal.SIGKILL, killed.err
    assert processes.luminav(*TINY, "--resume", folder=folder).status == 0
    assert same(outcome(folder), outcome(finished_once[0]))
    metrics = "runs/demo/metrics.csv"
    assert (folder / metrics).read_text() == (finished_once[0] / metrics).read_text()


@pytest.mark.parametrize("arguments", [TINY, ["demo", "--resume"]], ids=["new", "resumed"])
def test_new_and_resumed_runs_forbid_mkl_to_change_the_threads(
    arguments: list[str], finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MKL takes fewer threads now and then, and other sums, unless the number was set by a call."""
    numbers: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", numbers.append)
    monkeypatch.chdir(finished)
    assert run(list(arguments)) == 0
    assert torch.get_num_threads() in numbers


def test_killed_again_and_again(folder: Path, finished_once: tuple[Path, processes.Ended]) -> None:
    for steps in (6, 5, 4, 3, 9, 4):
        moment = SignalAt(TRAINING, "Run.take_step", steps, after=True)
        assert processes.luminav(*TINY, "--resume", folder=folder, signal_at=moment).status == -signal.SIGKILL
    assert processes.luminav("demo", "--resume", folder=folder).status == 0
    assert same(outcome(folder), outcome(finished_once[0]))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("where", ["Run.take_step", "Run._nats"])
def test_asked_to_stop_saves_and_says_how_to_go_on(
    number: signal.Signals, where: str, folder: Path, finished_once: tuple[Path, processes.Ended]
) -> None:
    moment = SignalAt(TRAINING, where, 18, number, after=True)
    stopped = processes.luminav(*TINY, folder=folder, signal_at=moment)
    assert stopped.status == 128 + number
    assert stopped.err == ""
    assert stopped.out.endswith("Stopped and saved. Go on with: luminav demo --resume --out runs/demo\n")
    resumed = processes.luminav("demo", "--resume", folder=folder)
    assert resumed.status == 0
    assert "resumed at step" in resumed.out
    assert same(outcome(folder), outcome(finished_once[0]))


def test_a_stop_loses_no_step(folder: Path) -> None:
    processes.luminav(*TINY, folder=folder, signal_at=SignalAt(TRAINING, "Run.take_step", 7, signal.SIGINT, after=True))
    saved = torch.load(folder / "runs/demo/checkpoints/luminav.pt", weights_only=True)
    assert saved["step"] == len(saved["history"]["loss"]) == 7


def test_a_second_request_is_obeyed_at_once() -> None:
    request = StopRequest()
    request.check()
    request.note(signal.SIGINT, None)
    with pytest.raises(Interrupted):
        request.check()
    with pytest.raises(KeyboardInterrupt):
        request.note(signal.SIGINT, None)


def test_resuming_a_finished_run_trains_nothing(finished: Path) -> None:
    before = {path.name: path.read_bytes() for path in (finished / "runs/demo/checkpoints").iterdir()}
    (finished / "runs/demo/report.html").unlink()
    ended = processes.luminav("demo", "--resume", folder=finished)
    assert ended.status == 0
    assert {path.name: path.read_bytes() for path in (finished / "runs/demo/checkpoints").iterdir()} == before
    assert (finished / "runs/demo/report.html").exists()
