"""Runs of the command line in processes of their own that start in no time, and die at a chosen moment.

A fork server imports torch and the command line once; each run is forked from it. (test_main.py starts
`python -m luminav` as a user does.)
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forked

TINY = (
    *("demo", "--data", "text.txt", "--steps", "12", "--width", "16", "--layers", "1", "--heads", "2"),
    *("--context", "16", "--batch-size", "4", "--validation-bytes", "512", "--checkpoint-every", "4"),
)
"""A demo of a second or two."""

_CONTEXT = forked.context()


@dataclass(frozen=True)
class Ended:
    """How a run ended: exit status, or minus the signal that killed it, and what it printed."""

    status: int
    out: str
    err: str


@dataclass(frozen=True)
class SignalAt:
    """Send this process a signal at the `count`-th call of a function, just before it or just after."""

    module: str
    function: str
    count: int = 1
    number: int = signal.SIGKILL
    after: bool = False

    def install(self) -> None:
        owner: Any = __import__(self.module, fromlist=["_"])
        *path, name = self.function.split(".")
        for part in path:
            owner = getattr(owner, part)
        original: Callable[..., Any] = getattr(owner, name)
        calls = 0

        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == self.count and not self.after:
                os.kill(os.getpid(), self.number)
            result = original(*args, **kwargs)
            if calls == self.count and self.after:
                os.kill(os.getpid(), self.number)
            return result

        setattr(owner, name, counted)


def luminav(*arguments: str | Path, folder: Path, signal_at: SignalAt | None = None) -> Ended:
    """Run ``luminav`` with `folder` as the current one, and wait for its end."""
    process = start(*arguments, folder=folder, signal_at=signal_at)
    process.join()
    assert process.exitcode is not None
    return Ended(process.exitcode, (folder / "stdout").read_text(), (folder / "stderr").read_text())


def start(*arguments: str | Path, folder: Path, signal_at: SignalAt | None = None) -> multiprocessing.Process:
    """Start ``luminav`` and return its process."""
    process: multiprocessing.Process = _CONTEXT.Process(
        target=_child, args=([str(a) for a in arguments], folder, signal_at)
    )
    process.start()
    return process


def _child(arguments: list[str], folder: Path, signal_at: SignalAt | None) -> None:
    os.chdir(folder)
    for name, number in (("stdout", 1), ("stderr", 2)):
        descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, number)
    from luminav.cli.app import run

    if signal_at is not None:
        signal_at.install()
    sys.exit(run(arguments))
