"""Showing a training run: a live bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from luminav.cli.demo.training import Run

PLAIN_LINES = 10
"""Lines of a run whose output is no terminal."""


class Display(Protocol):
    """What training is shown on."""

    def update(self, run: Run) -> None:
        """Show a step that has just been taken."""


@contextlib.contextmanager
def display(console: Console, run: Run) -> Iterator[Display]:
    """Show `run` from where it stands, on a live bar or as plain lines."""
    if not console.is_terminal:
        yield _Lines(console, run)
        return
    columns = (
        TextColumn("{task.description}", style="bold"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TextColumn("{task.fields[figures]}"),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(run.contender.title, total=run.settings.steps, completed=run.step, figures="")
        yield _Bar(progress, task, run)


class _Pace:
    """Speed since this process took the run up, and what it means for the rest."""

    def __init__(self, run: Run) -> None:
        self._first_step = run.step
        self._started = time.perf_counter()

    def figures(self, run: Run) -> str:
        """Return loss, tokens per second and time left."""
        settings = run.settings
        seconds_a_step = (time.perf_counter() - self._started) / max(1, run.step - self._first_step)
        tokens = settings.batch_size * settings.context / max(seconds_a_step, 1e-9)
        left = round(seconds_a_step * (settings.steps - run.step))
        return f"loss {run.history.loss[-1]:.3f} bits/byte  {tokens:,.0f} tokens/s  {left // 60}:{left % 60:02d} left"


class _Bar:
    def __init__(self, progress: Progress, task: TaskID, run: Run) -> None:
        self._progress, self._task, self._pace = progress, task, _Pace(run)

    def update(self, run: Run) -> None:
        """Move the bar."""
        self._progress.update(self._task, completed=run.step, figures=self._pace.figures(run))


class _Lines:
    def __init__(self, console: Console, run: Run) -> None:
        self._console, self._pace = console, _Pace(run)
        self._every = max(1, run.settings.steps // PLAIN_LINES)

    def update(self, run: Run) -> None:
        """Print every so many steps."""
        if run.step % self._every == 0 or run.step == run.settings.steps:
            line = f"{run.contender.title}: step {run.step}/{run.settings.steps}  {self._pace.figures(run)}"
            self._console.print(line, soft_wrap=True, highlight=False, markup=False)
