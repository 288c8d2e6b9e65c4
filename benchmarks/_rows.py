"""Rows of benchmarks/results.csv: one measured figure each, with where, when and how it was measured."""

from __future__ import annotations

import csv
import datetime
import os
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import torch

from luminav.cli.environment import device_name, versions

RESULTS = Path(__file__).with_name("results.csv")
COLUMNS = ("case", "value", "unit", "device", "versions", "commit", "date", "command")


def append_rows(
    rows: Iterable[tuple[str, float | str, str]],
    device: torch.device | str,
    path: Path = RESULTS,
    more_versions: Mapping[str, str] | None = None,
) -> None:
    """Append measured figures.

    Args:
        rows: (case, value, unit) of each. A float is written with six significant digits.
        device: Where it was measured.
        path: The file; it gets its header if it is new.
        more_versions: Package to version, of what these figures depend on besides what all do.
    """
    marks = stamp(device, more_versions).values()
    new = not path.exists() or path.stat().st_size == 0
    with path.open("a", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        if new:
            writer.writerow(COLUMNS)
        for case, value, unit in rows:
            writer.writerow((case, f"{value:.6g}" if isinstance(value, float) else value, unit, *marks))
    print(f"rows appended to {path}", file=sys.stderr)


def stamp(device: torch.device | str, more_versions: Mapping[str, str] | None = None) -> dict[str, str]:
    """Where, with what, when and by which command a figure is measured: the last columns of a row."""
    all_versions = {**_versions(), **(more_versions or {})}
    return {
        "device": device_name(torch.device(device)),
        "versions": " ".join(f"{name} {version}" for name, version in all_versions.items()),
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "command": shlex.join([Path(sys.executable).name.rstrip("0123456789."), *_own_arguments()]),
    }


def _versions() -> dict[str, str]:
    with_triton = {"triton": metadata.version("triton")} if find_spec("triton") else {}
    return {**versions(), **with_triton}


def _own_arguments() -> list[str]:
    script = os.path.relpath(sys.argv[0], RESULTS.parent.parent)
    return [script, *(Path(word).name if os.path.isabs(word) else word for word in sys.argv[1:])]


def _commit() -> str:
    """Return the commit measured, with "+" where the package differs from it.

    A copy of the checkout on another machine may have no history: MEASURED_COMMIT then says which one it is.
    """
    if "MEASURED_COMMIT" in os.environ:
        return os.environ["MEASURED_COMMIT"]

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(RESULTS.parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    if not (RESULTS.parent.parent / ".git").exists():
        return "unknown"
    changed = git("status", "--porcelain", "--", str(RESULTS.parent.parent / "src"))
    return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")
