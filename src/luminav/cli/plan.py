"""``luminav plan``: what a training takes in every mode, and the GPU it fits."""

from __future__ import annotations

import json
from typing import Annotated, Optional

import typer
from rich.console import Console
from rich.table import Table

from luminav import planner
from luminav.cli.errors import CommandError
from luminav.hyperparameters import SUPPORTED_DTYPES

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in SUPPORTED_DTYPES}
_DEVICES = ("cuda", "xpu", "mps", "cpu")
_WIDTH = 150  # of the table, where the output is no terminal


def plan(
    model: Annotated[
        str, typer.Argument(help="A Hugging Face config.json, or a number of parameters: `luminav plan 4.2B`.")
    ],
    dtype: Annotated[
        Optional[str],  # noqa: UP045 (the oldest typer we take does not know the other spelling)
        typer.Option(help=f"Dtype of the weights: {', '.join(_DTYPES)}. Default: the config's, or bfloat16."),
    ] = None,
    batch_size: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Sequences per micro-batch, for an estimate of the activations."),
    ] = None,
    sequence_length: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Tokens per sequence, for an estimate of the activations."),
    ] = None,
    activation_checkpointing: Annotated[
        bool, typer.Option("--activation-checkpointing", help="Look for GPUs that fit with activation checkpointing.")
    ] = False,
    device: Annotated[str, typer.Option(help=f"Where the optimizer runs: {', '.join(_DEVICES)}.")] = "cuda",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with sizes in bytes.")] = False,
) -> None:
    """Plan the memory of a training: weights, gradients, state and scratch in every mode, and the GPU it fits."""
    if dtype is not None and dtype not in _DTYPES:
        raise CommandError(f"--dtype must be one of {', '.join(_DTYPES)}, got {dtype!r}.")
    if device not in _DEVICES:
        raise CommandError(f"--device must be one of {', '.join(_DEVICES)}, got {device!r}.")
    sizes = {"--batch-size": batch_size, "--sequence-length": sequence_length}
    missing = [name for name, size in sizes.items() if size is None]
    if missing and (len(missing) == 1 or activation_checkpointing):
        raise CommandError(f"{' and '.join(missing)} missing: an estimate of activations needs {' and '.join(sizes)}.")
    try:
        planned = planner.plan(
            model,
            dtype=None if dtype is None else _DTYPES[dtype],
            batch_size=batch_size,
            sequence_length=sequence_length,
            activation_checkpointing=activation_checkpointing,
            device=device,
        )
    except (ValueError, TypeError, OSError) as error:
        raise CommandError(str(error)) from error
    if as_json:
        print(json.dumps(planned.to_dict(), indent=2))
    else:
        _show(planned)


def _show(planned: planner.Plan) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    headings, *rows = planned.table()
    table = Table()
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number in planner.TEXT_COLUMNS else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    for line in planned.heading():
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    console.print(table)
    for line in planned.footing():
        console.print(line, soft_wrap=True, highlight=False, markup=False)
