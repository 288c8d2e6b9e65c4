"""The typer application: every command, and how each way of ending becomes an exit status."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from luminav import __version__
from luminav.cli.bench import bench
from luminav.cli.demo.command import demo
from luminav.cli.doctor import doctor
from luminav.cli.errors import CommandError
from luminav.cli.plan import plan

app = typer.Typer(
    name="luminav",
    help="LuminaV, an optimizer for networks whose weights live in BF16 or FP16.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
# What follows the benchmark's name is the benchmark's, --help too.
app.command(
    "bench",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False},
)(bench)
app.command("demo")(demo)
app.command("doctor")(doctor)
app.command("plan")(plan)

# typer exports this one of its errors, under a name that has not changed; its parent covers unknown options as well.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"luminav {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """LuminaV, an optimizer for networks whose weights live in BF16 or FP16."""


def run(arguments: Sequence[str]) -> int:
    """Run one command line.

    Args:
        arguments: What follows the program's name; nothing at all asks for the help.

    Returns:
        The exit status.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a sample may hold what the terminal's encoding has not
    try:
        status = app(list(arguments) or ["--help"], prog_name="luminav", standalone_mode=False)
    except _UsageError as error:
        return _refuse(getattr(error, "format_message", error.__str__)())
    except CommandError as error:
        return _refuse(str(error))
    except (KeyboardInterrupt, typer.Abort):
        return 130
    return int(status or 0)


def _refuse(message: str) -> int:
    """Print `message` as one line and return the status for what the user can mend."""
    print(f"luminav: {' '.join(message.split())}", file=sys.stderr)
    return 2
