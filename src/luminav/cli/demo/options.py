"""The command line's options, made from the settings and from the optimizer's own table of options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Optional, TypeVar, get_type_hints

import typer

from luminav.cli.demo.settings import LUMINAV_OPTIONS, DemoSettings, default_options
from luminav.cli.errors import CommandError
from luminav.hyperparameters import OPTIONS

F = TypeVar("F", bound=Callable[..., Any])


def offers_settings(function: F) -> F:
    """Give a typer command one option for each setting, in place of its ``**values`` parameter."""
    signature = inspect.signature(function, eval_str=True)
    own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    offered = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, default, annotation in _offered()
    ]
    parameters = [*own, *offered]
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    function.__annotations__ = {p.name: p.annotation for p in parameters}
    return function


def _offered() -> Iterator[tuple[str, Any, Any]]:
    """Name, default and annotation of every setting's option."""
    types = get_type_hints(DemoSettings)
    for setting in fields(DemoSettings):
        if setting.name == "luminav":
            continue
        option = typer.Option(help=setting.metadata["help"], rich_help_panel=setting.metadata["panel"])
        kind = types[setting.name]
        if kind == str | None:
            kind = Optional[str]  # noqa: UP045 (the oldest typer we take does not know the other spelling)
        yield setting.name, setting.default, Annotated[kind, option]
    for name, default in default_options().items():
        pair = " Two numbers." if name == "betas" else ""
        option = typer.Option(help=OPTIONS[name].meaning + pair, rich_help_panel="LuminaV")
        kind = tuple[float, float] if pair else type(default)
        yield name, default, Annotated[kind, option]


def settings_from(values: Mapping[str, Any]) -> DemoSettings:
    """Return the settings that the options' `values` describe.

    Raises:
        CommandError: A value is out of range.
    """
    plain = {setting.name: values[setting.name] for setting in fields(DemoSettings) if setting.name != "luminav"}
    if plain["data"] == "":
        raise CommandError("--data is empty: name a file or a folder, or leave it out.")
    if plain["data"] is not None:
        plain["data"] = str(Path(plain["data"]).absolute())
    try:
        return DemoSettings(**plain, luminav={name: values[name] for name in LUMINAV_OPTIONS})
    except ValueError as error:
        raise CommandError(str(error)) from error


def resumed_settings(stored: DemoSettings, values: Mapping[str, Any], explicit: set[str], where: Path) -> DemoSettings:
    """Return the settings of a run to resume: its own, which the options given now must not contradict.

    Args:
        stored: What the run began with.
        values: The options' values.
        explicit: Names of the options that were given on the command line.
        where: The run's folder, for the message.

    Raises:
        CommandError: An option given now differs from the run's.
    """
    known = {**stored.as_dict(), **stored.luminav}
    for name in explicit:
        if name == "data" or (name == "device" and values[name] == "auto"):
            continue  # the text is compared byte by byte, wherever it lies; "auto" asks for nothing in particular
        if name in known and values[name] != known[name]:
            option = f"--{name.replace('_', '-')}"
            raise CommandError(
                f"{option} is {values[name]} now and was {known[name]} when the run in {where} began. "
                "Leave it out to resume, or start anew with --overwrite or another --out."
            )
    given = {**known, **({"data": values["data"]} if "data" in explicit else {})}
    return settings_from(given)
