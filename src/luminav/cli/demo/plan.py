"""From the command line to a run that has passed every check that needs no writing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from luminav.cli.demo.checkpoint import RunFolder
from luminav.cli.demo.contenders import contenders, rehearse
from luminav.cli.demo.data import Corpus, load_corpus
from luminav.cli.demo.model import native_compute_dtype
from luminav.cli.demo.options import resumed_settings, settings_from
from luminav.cli.demo.settings import DemoSettings
from luminav.cli.environment import device_name, find_device, versions
from luminav.cli.errors import CommandError

Checkpoints = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Plan:
    """What is to run."""

    settings: DemoSettings
    corpus: Corpus
    device: torch.device
    config: dict[str, Any]
    """What every checkpoint holds beside weights and state: the settings, and what else decides the bits."""

    def compute_dtype(self, key: str) -> torch.dtype:
        """Return the dtype of a contender's activations, which a resumed run keeps whatever the machine is fast at."""
        dtype: torch.dtype = getattr(torch, self.config["compute"][key])
        return dtype


def new_plan(settings: DemoSettings) -> Plan:
    """Check settings, device and text, and fix what "auto" means.

    Raises:
        CommandError: One of them is no good.
    """
    # Not idle even for the number that torch has already: until such a call MKL may take fewer threads as it sees fit,
    # and add in another order. A resumed run makes the call, so a new one must.
    torch.set_num_threads(torch.get_num_threads())
    device = find_device(settings.device)
    settings = replace(settings, device=str(device))
    rehearse(settings, device)
    corpus = load_corpus(None if settings.data is None else Path(settings.data), settings.context)
    config = {
        "settings": settings.as_dict(),
        "text": {"name": corpus.name, "files": corpus.num_files, "bytes": corpus.num_bytes, "sha256": corpus.sha256},
        "compute": {
            c.key: str(native_compute_dtype(c.dtype, device)).removeprefix("torch.") for c in contenders(settings)
        },
        "threads": torch.get_num_threads(),
        "device_name": device_name(device),
        "versions": versions(),
    }
    return Plan(settings, corpus, device, config)


def resumed_plan(folder: RunFolder, values: Mapping[str, Any], explicit: set[str]) -> Plan:
    """Plan to go on with the run in the folder, or a new one where a kill came before the first checkpoint.

    Args:
        folder: Where the run lies.
        values: The options' values.
        explicit: Names of the options that were given on the command line.

    Raises:
        CommandError: A checkpoint is damaged, the options contradict the run, or its text or device is not there.
    """
    checkpoints = folder.checkpoints()
    if not checkpoints:
        return new_plan(settings_from(values))
    stored = next(iter(checkpoints.values()))["config"]
    began_with = DemoSettings.from_dict(stored["settings"])
    settings = resumed_settings(began_with, values, explicit, folder.path)
    torch.set_num_threads(stored["threads"])
    plan = new_plan(settings)
    if plan.corpus.sha256 != stored["text"]["sha256"]:
        raise CommandError(
            f"the text of {plan.corpus.name} is not what the run in {folder.path} began with. "
            "Restore it, or start anew with --overwrite or another --out."
        )
    return replace(plan, config=stored)


def make_room(folder: RunFolder, overwrite: bool) -> bool:
    """Move the run in the folder to previous/, if there is one.

    Returns:
        Whether there was one.

    Raises:
        CommandError: The run is unfinished, or damaged, and nobody asked for it to be overwritten.
    """
    if not overwrite:
        checkpoints = folder.checkpoints()
        if checkpoints and not all(key in checkpoints and checkpoints[key]["result"] for key in folder.keys):
            raise CommandError(
                f"{folder.path} holds an unfinished run. Go on with it (--resume), start anew (--overwrite), "
                "or choose another folder (--out)."
            )
    return folder.set_aside()


def check_same_run(checkpoints: Checkpoints, plan: Plan, folder: RunFolder) -> None:
    """Refuse checkpoints that are not of the planned run."""
    for key, checkpoint in checkpoints.items():
        if checkpoint["config"] != plan.config:
            raise CommandError(
                f"the checkpoints in {folder.path} are of different runs ({key} is not like the first). "
                "Restore them, or start anew with --overwrite."
            )
