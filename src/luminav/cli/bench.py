"""``luminav bench``: run a benchmark of the checkout; the installed package has none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

import luminav
from luminav.cli.errors import CommandError

SCRIPTS = {
    "step": "bench_step.py",
    "pretrain": "bench_pretrain.py",
    "converge": "bench_converge.py",
    "distributed": "bench_distributed.py",
    "import": "bench_import.py",
    "report": "report.py",
}
"""Name on the command line to file under benchmarks/."""


def bench(
    context: typer.Context,
    name: Annotated[
        str | None, typer.Argument(show_default=False, help=f"One of {', '.join(SCRIPTS)}; its own options follow.")
    ] = None,
) -> int:
    """Run a benchmark of the checkout: `luminav bench converge --help` lists its options.

    Most append rows to the checkout's benchmarks/results.csv; with --out to another file.
    """
    if name is None:
        raise CommandError(f"name a benchmark, one of {', '.join(SCRIPTS)}: `luminav bench step --help`, say.")
    if name not in SCRIPTS:
        raise CommandError(f"a benchmark is one of {', '.join(SCRIPTS)}, got {name!r}.")
    script = _folder() / SCRIPTS[name]
    if not script.exists():
        raise CommandError(f"{script} is not there: this checkout's benchmarks are of another version.")
    return subprocess.run([sys.executable, str(script), *context.args]).returncode


def _folder() -> Path:
    """The folder benchmarks/ of the checkout that the package is imported from, or of the current folder.

    Raises:
        CommandError: There is none.
    """
    places = [Path(luminav.__file__).resolve().parents[2], Path.cwd()]
    for place in places:
        if (place / "benchmarks" / "results.csv").exists():
            return place / "benchmarks"
    raise CommandError(
        "the benchmarks are not part of the installed package: run this in a checkout of the repository, or install "
        "the checkout with `pip install -e '.[demo]'`."
    )
