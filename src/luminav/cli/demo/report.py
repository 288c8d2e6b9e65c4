"""What a finished demo leaves: the table, the chart, the report page, and the figures as CSV and JSON."""

from __future__ import annotations

import base64
import csv
import html
import io
import json
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from rich.text import Text

from luminav.cli.demo.checkpoint import write_atomically
from luminav.cli.demo.training import Result, Run

_COLOURS = {"luminav": "#2266cc", "adamw": "#cc5522"}
_HEADINGS = (
    "Contender",
    "Validation bits per byte",
    "Bytes per parameter, weights + state",
    "Optimizer ms per step",
    "Training seconds",
)


def finished(run: Run) -> Result:
    """Return the result of a run that has one."""
    assert run.result is not None, "the report is made of finished runs"
    return run.result


def figures(run: Run) -> tuple[str, ...]:
    """Return a contender's row of the table."""
    result = finished(run)
    return (
        run.contender.title,
        f"{result.bits_per_byte:.4f}",
        f"{result.bytes_per_param:.2f}",
        f"{result.optimizer_ms:.2f}",
        f"{result.seconds:.0f}",
    )


def verdict(luminav: Run, adamw: Run) -> str:
    """Return the comparison in a sentence."""
    ours, theirs = finished(luminav), finished(adamw)
    difference = ours.bits_per_byte / theirs.bits_per_byte - 1
    saved = 1 - ours.bytes_per_param / theirs.bytes_per_param
    side = "above" if difference > 0 else "below"
    return (
        f"LuminaV ends {abs(difference):.1%} {side} AdamW in validation bits per byte, "
        f"with {saved:.0%} less memory for weights and optimizer state."
    )


def show(console: Console, luminav: Run, adamw: Run) -> None:
    """Print the table, the verdict and a sample that LuminaV's model wrote."""
    table = Table(title=f"After {luminav.settings.steps} steps")
    for number, heading in enumerate(_HEADINGS):
        table.add_column(heading, justify="left" if number == 0 else "right")
    for run in (luminav, adamw):
        table.add_row(*figures(run))
    console.print(table)
    console.print(verdict(luminav, adamw), highlight=False)
    console.print("\nA sample that LuminaV's model writes:", style="bold")
    result = finished(luminav)
    console.print(Text.assemble((printable(result.prompt), "dim"), printable(result.sample)))


def printable(text: str) -> str:
    """Replace control, format and private characters, which a model may write and a terminal would obey."""
    return "".join("�" if unicodedata.category(char)[0] == "C" and char not in "\n\t" else char for char in text)


def write(folder: Path, config: dict[str, Any], runs: Sequence[Run]) -> Path:
    """Write chart, figures and report page into `folder`.

    Args:
        folder: The run's folder.
        config: What the checkpoints hold as the run's configuration.
        runs: The finished contenders, LuminaV first.

    Returns:
        Where the report page lies.
    """
    chart = draw(runs)
    write_atomically(folder / "loss.png", chart)
    write_atomically(folder / "metrics.csv", metrics_csv(runs).encode())
    write_atomically(folder / "summary.json", summary_json(config, runs).encode())
    page = folder / "report.html"
    write_atomically(page, report_html(config, runs, chart).encode())
    return page


def draw(runs: Sequence[Run]) -> bytes:
    """Return the loss chart as a PNG: training loss, averaged over some steps, and validation points."""
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    for run in runs:
        colour = _COLOURS[run.contender.key]
        steps, losses = _averaged(run.history.loss)
        axes.plot(steps, losses, color=colour, label=f"{run.contender.title}, training", linewidth=1.2)
        points = sorted(run.history.validation.items())
        axes.plot(
            [step for step, _ in points],
            [bits for _, bits in points],
            "o",
            color=colour,
            label=f"{run.contender.title}, validation",
            markersize=4,
        )
    axes.set(xlabel="step", ylabel="bits per byte", title="Loss", ylim=(None, 6))
    axes.grid(alpha=0.3)
    axes.legend()
    content = io.BytesIO()
    figure.savefig(content, format="png")
    return content.getvalue()


def _averaged(losses: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return means over about 100 spans of steps, each placed at its span's middle."""
    span = max(1, len(losses) // 100)
    starts = range(0, len(losses), span)
    means = [sum(losses[start : start + span]) / len(losses[start : start + span]) for start in starts]
    return [start + span / 2 for start in starts], means


def metrics_csv(runs: Sequence[Run]) -> str:
    """Return every step's training loss and learning rate, and the validations in between."""
    content = io.StringIO()
    writer = csv.writer(content, lineterminator="\n")
    writer.writerow(("contender", "step", "lr", "training_bits_per_byte", "validation_bits_per_byte"))
    for run in runs:
        for step in range(run.step + 1):
            trained = (run.settings.learning_rate(run.contender.peak_lr, step - 1), run.history.loss[step - 1])
            row = trained if step else ("", "")
            writer.writerow((run.contender.key, step, *row, run.history.validation.get(step, "")))
    return content.getvalue()


def summary_json(config: dict[str, Any], runs: Sequence[Run]) -> str:
    """Return configuration and results as JSON."""
    results = {
        run.contender.key: {**vars(finished(run)), "bytes_per_param": finished(run).bytes_per_param} for run in runs
    }
    return json.dumps({"config": config, "results": results}, indent=2) + "\n"


def report_html(config: dict[str, Any], runs: Sequence[Run], chart: bytes) -> str:
    """Return the report page, which needs no other file and no network."""
    escape = html.escape
    head = "".join(f"<th>{escape(heading)}</th>" for heading in _HEADINGS)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in figures(run)) + "</tr>" for run in runs)
    samples = "".join(f"<h3>{escape(run.contender.title)}</h3>{_sample_html(finished(run))}" for run in runs)
    settings = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(str(value))}</td></tr>" for name, value in _flat(config)
    )
    return _PAGE.format(
        verdict=escape(verdict(*runs)),
        head=head,
        body=body,
        chart=base64.b64encode(chart).decode(),
        samples=samples,
        settings=settings,
    )


def _sample_html(result: Result) -> str:
    prompt, written = (html.escape(printable(text)) for text in (result.prompt, result.sample))
    return f'<pre><span class="prompt">{prompt}</span>{written}</pre>'


def _flat(config: dict[str, Any]) -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for name, value in config.items():
        rows += _flat(value) if isinstance(value, dict) else [(name, value)]
    return rows


_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>luminav demo</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }}
table {{ border-collapse: collapse; }}
th, td {{ border: 1px solid #ccc; padding: 0.3rem 0.7rem; text-align: left; font-variant-numeric: tabular-nums; }}
th {{ background: #f3f3f3; }}
img {{ max-width: 100%; }}
pre {{ background: #f6f6f6; padding: 0.8rem; overflow-x: auto; white-space: pre-wrap; }}
.prompt {{ color: #888; }}
</style>
</head>
<body>
<h1>LuminaV in 16 bits against AdamW in FP32</h1>
<p>{verdict}</p>
<table><tr>{head}</tr>{body}</table>
<h2>Loss</h2>
<img alt="Training and validation loss of both contenders" src="data:image/png;base64,{chart}">
<h2>Samples</h2>
<p>Both go on from the same held-out text, in grey.</p>
{samples}
<h2>Settings and versions</h2>
<table>{settings}</table>
</body>
</html>
"""
