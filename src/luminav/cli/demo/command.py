"""``luminav demo``: options in, two trainings, a report out."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from luminav.cli.demo import report
from luminav.cli.demo.checkpoint import RunFolder, save_checkpoint
from luminav.cli.demo.contenders import contenders
from luminav.cli.demo.options import offers_settings, settings_from
from luminav.cli.demo.plan import Checkpoints, Plan, check_same_run, make_room, new_plan, resumed_plan
from luminav.cli.demo.progress import display
from luminav.cli.demo.signals import StopRequest, stop_requests
from luminav.cli.demo.training import Run, train
from luminav.cli.environment import versions
from luminav.cli.errors import CommandError, Interrupted

KEYS = ("luminav", "adamw")
_PANEL = "Run"


@offers_settings
def demo(
    ctx: typer.Context,
    out: Annotated[Path, typer.Option(help="Folder for checkpoints and report.", rich_help_panel=_PANEL)] = Path(
        "runs/demo"
    ),
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on with the run in the folder, with its settings.", rich_help_panel=_PANEL),
    ] = False,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite",
            help="Start anew although the folder holds an unfinished run, which moves to previous/.",
            rich_help_panel=_PANEL,
        ),
    ] = False,
    checkpoint_every: Annotated[
        int, typer.Option(min=1, help="Steps between checkpoints.", rich_help_panel=_PANEL)
    ] = 50,
    **values: Any,
) -> int:
    """Train a small byte-level transformer twice, with LuminaV in BF16 and with AdamW in FP32, and compare.

    The same initial values, data order, steps and schedule for both. Ctrl-C, or a kill, loses nothing: --resume goes
    on, and on a CPU it ends with the same bits as a run that was never stopped.
    """
    if resume and overwrite:
        raise CommandError("--resume and --overwrite exclude each other: go on with the run, or start anew.")
    explicit = {name for name in ctx.params if getattr(ctx.get_parameter_source(name), "name", "") == "COMMANDLINE"}
    folder = RunFolder(out, KEYS)
    plan = resumed_plan(folder, values, explicit) if resume else new_plan(settings_from(values))
    with folder.locked():
        session = _Session(plan, folder, checkpoint_every)
        session.begin(resume=resume, overwrite=overwrite)
        return session.run()


class _Session:
    """This process's part of a run: from where the checkpoints stand to the report, or to a stop."""

    def __init__(self, plan: Plan, folder: RunFolder, checkpoint_every: int) -> None:
        self._plan = plan
        self._folder = folder
        self._checkpoint_every = checkpoint_every
        self._console = Console()
        try:
            self._runs = [
                Run(c, plan.settings, plan.corpus, plan.device, plan.compute_dtype(c.key))
                for c in contenders(plan.settings)
            ]
        except RuntimeError as error:
            raise CommandError(f"cannot set up a model of these sizes: {error}") from error

    def _say(self, line: str) -> None:
        """Print a line as it is, however long."""
        self._console.print(line, soft_wrap=True, highlight=False, markup=False)

    def begin(self, *, resume: bool, overwrite: bool) -> None:
        """Take the folder: go on from the checkpoints in it, or make room. Say what is about to run."""
        path = self._folder.path
        checkpoints: Checkpoints = self._folder.checkpoints() if resume else {}
        check_same_run(checkpoints, self._plan, self._folder)
        if not resume and make_room(self._folder, overwrite):
            self._say(f"The run that was in {path} is now in {path / 'previous'}.")
        if resume and not checkpoints:
            self._say(f"There is no run in {path} to resume: starting one.")
        config = self._plan.config
        text = config["text"]
        self._say(f"Text: {text['name']}, {text['bytes']:,} bytes in {text['files']} files, 1 block in 16 held out")
        self._say(f"Device: {config['device_name']}")
        if checkpoints and config["versions"] != versions():
            self._say(f"The run began with {config['versions']}, this is {versions()}: bits may differ.")
        for run in self._runs:
            if run.contender.key in checkpoints:
                self._restore(run, checkpoints[run.contender.key])

    def _restore(self, run: Run, checkpoint: Mapping[str, Any]) -> None:
        try:
            run.restore(checkpoint)
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            path = self._folder.checkpoint_path(run.contender.key)
            raise CommandError(f"the checkpoint {path} does not fit its own settings: {error}") from error
        self._say(f"{run.contender.title}: resumed at step {run.step} of {run.settings.steps}")

    def run(self) -> int:
        """Train what is not finished and report; return the exit status."""
        try:
            with stop_requests() as request:
                for run in self._runs:
                    if run.result is None:
                        self._train(run, request)
        except Interrupted as stop:
            place = shlex.quote(str(self._folder.path))
            self._say(f"Stopped and saved. Go on with: luminav demo --resume --out {place}")
            return 128 + stop.signal_number
        page = report.write(self._folder.path, self._plan.config, self._runs)
        report.show(self._console, *self._runs)
        self._say(f"\nReport: {page}")
        return 0

    def _train(self, run: Run, request: StopRequest) -> None:
        """Train a contender to its end, and save it now and then, when asked to stop, and at the end."""

        def each_step(run: Run) -> None:
            shown.update(run)
            if run.step % self._checkpoint_every == 0:
                self._save(run)

        self._save(run)  # a new run takes the folder before its first step
        try:
            with display(self._console, run) as shown:
                train(run, check=request.check, each_step=each_step)
        except Interrupted:
            self._save(run)
            raise
        except torch.OutOfMemoryError as error:
            raise CommandError(f"{run.contender.title} ran out of memory on {run.device}: {error}") from error
        self._save(run)

    def _save(self, run: Run) -> None:
        path = self._folder.checkpoint_path(run.contender.key)
        save_checkpoint(path, {**run.checkpoint(), "config": self._plan.config})
