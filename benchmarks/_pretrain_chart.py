"""The chart of bench_pretrain.py's rows: loss, memory and optimizer time.

Losses and memory are those of full-length runs, which may have shared a GPU; times are those recorded last, in runs of
any length, since only a process that has its GPU for itself records them.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from _charts import IMAGES, OTHERS, OURS, panels, save
from _pretrain_linear import FLA, TORCH

IMAGE = IMAGES / "pretrain.png"
PUBLIC = "#e0a899"

Figures = dict[str, dict[str, float]]


def latest_figures(path: Path, steps: int) -> Figures:
    """The figures recorded last for each contender of full-length runs; what failed last has none.

    Runs with flash-linear-attention if there are any, else those in plain torch: never both in one chart.
    """
    found: dict[str, Figures] = {TORCH: {}, FLA: {}}
    timed: dict[str, dict[str, float]] = {TORCH: {}, FLA: {}}
    with path.open(newline="", encoding="utf-8") as stream:
        for row in csv.DictReader(stream):
            pretrain, model, *words = row["case"].split("/")
            if (pretrain, model) != ("pretrain", "qwen4b") or row["value"].startswith("failed"):
                continue
            linear = FLA if words[0] == FLA else TORCH
            name, *words = words[1:] if linear == FLA else words
            length = words.pop(0) if words and words[0].startswith("steps-") else ""
            if not words or words[0] == "checkpointing" or words[0].startswith("limit-"):
                continue
            if words == ["optimizer_ms"]:
                timed[linear][name] = float(row["value"])
            elif length == f"steps-{steps}":
                found[linear].setdefault(name, {})["/".join(words)] = float(row["value"])
    linear = FLA if found[FLA] else TORCH
    for name, values in found[linear].items():
        if name in timed[linear]:
            values["optimizer_ms"] = timed[linear][name]
    return found[linear]


def colour_of(name: str) -> str:
    """Ours, the public package's, and everybody else's."""
    if name.startswith("public-"):
        return PUBLIC
    return OTHERS if name.startswith(("adamw", "flash")) else OURS


def draw_chart(path: Path, image: Path = IMAGE, steps: int = 250) -> Path:
    """Draw three panels: losses, memory, and times of the optimizer where a contender has any.

    Args:
        path: The file of rows.
        image: The PNG to write.
        steps: Length of the runs that are shown.

    Returns:
        The PNG's path.
    """
    figures = latest_figures(path, steps)
    if not figures:
        raise SystemExit(f"{path} has no rows of bench_pretrain.py with --steps {steps}.")
    timed = {name: values for name, values in figures.items() if "optimizer_ms" in values}
    chart, (loss, memory, *latency) = panels(3 if timed else 2, 17 if timed else 12, 5.5)
    _losses(loss, figures)
    _memory(memory, {name: values for name, values in figures.items() if "static_gib" in values})
    if timed:
        _latency(latency[0], timed)
    return save(chart, image)


def _losses(panel: Any, figures: Figures) -> None:
    from matplotlib import colormaps

    colours = colormaps["tab20"].resampled(20)(range(20))
    for number, (name, values) in enumerate(figures.items()):
        points = sorted((int(key.removeprefix("loss_")), value) for key, value in values.items() if key[:5] == "loss_")
        points = [(1, values["first_loss"]), *points] if "first_loss" in values else points
        style = "--" if colour_of(name) != OURS else "-"
        panel.plot(*zip(*points), style, label=name, linewidth=1.2, color=colours[number % len(colours)])
    panel.set_xlabel("step")
    panel.set_title("training loss, nats", fontsize=10)
    panel.legend(fontsize=7, frameon=False, ncols=2)


def _memory(panel: Any, figures: Figures) -> None:
    names = sorted(figures, key=lambda name: -figures[name]["peak_gib"])
    static = [figures[name]["static_gib"] for name in names]
    dynamic = [figures[name]["peak_gib"] - figures[name]["static_gib"] for name in names]
    colours = [colour_of(name) for name in names]
    panel.barh(names, static, color=colours)
    bars = panel.barh(names, dynamic, left=static, color=colours, alpha=0.45)
    labels = [f"{figures[name]['peak_gib']:.1f}" for name in names]
    panel.bar_label(bars, labels, padding=3, fontsize=8)
    panel.set_title("GPU memory at its peak, GiB (pale: not there between steps)", fontsize=10)


def _latency(panel: Any, figures: Figures) -> None:
    names = sorted(figures, key=lambda name: -figures[name]["optimizer_ms"])
    times = [figures[name]["optimizer_ms"] for name in names]
    bars = panel.barh(names, times, color=[colour_of(name) for name in names])
    panel.bar_label(bars, fmt="%.3g", padding=3, fontsize=8)
    panel.set_title("optimizer step, ms", fontsize=10)
