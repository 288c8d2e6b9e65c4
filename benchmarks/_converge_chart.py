"""The chart of bench_converge.py's rows: how far each contender is from the bar, and how sure that is."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

from _charts import IMAGES, OTHERS, OURS, panels, save

IMAGE = IMAGES / "converge.png"
TITLES = {"40m": "42 M parameters", "120m": "117 M parameters"}
BEYOND = 0.5
"""Nats: contenders further behind than this are named, not drawn, so that the rest can be told apart."""

Figures = dict[str, dict[str, float]]


def latest_figures(path: Path, recipe: str) -> dict[str, Figures]:
    """By size and contender, the figures recorded last; a contender that diverged has none."""
    found: dict[str, Figures] = {size: {} for size in TITLES}
    with path.open(newline="", encoding="utf-8") as stream:
        for row in csv.DictReader(stream):
            kind, size, own, name, figure = [*row["case"].split("/"), *[""] * 5][:5]
            if (kind, own) != ("converge", recipe) or size not in found or "=" in figure:  # the last: single runs
                continue
            if row["value"] == "diverged":
                found[size].pop(name, None)
            else:
                found[size].setdefault(name, {})[figure] = float(row["value"])
    return {size: figures for size, figures in found.items() if figures}


def _label(name: str, figures: Mapping[str, float]) -> str:
    """A contender, and its memory where that was measured."""
    return f"{name}, {figures['memory']:.1f} B/param" if "memory" in figures else name


def draw_chart(path: Path, image: Path = IMAGE, recipe: str = "pretrain") -> Path:
    """Draw a panel for each size.

    Args:
        path: The file of rows.
        image: The PNG to write.
        recipe: Which runs.

    Returns:
        The PNG's path.
    """
    sizes = latest_figures(path, recipe)
    if not sizes:
        raise SystemExit(f"{path} has no rows of bench_converge.py at {' or '.join(TITLES)}.")
    longest = max(map(len, sizes.values()))
    chart, columns = panels(len(sizes), 8 * len(sizes), 1.6 + 0.32 * longest)
    for panel, (size, figures) in zip(columns, sizes.items()):
        drawn = {name: values for name, values in figures.items() if values.get("difference", BEYOND) < BEYOND}
        names = sorted(drawn, key=lambda name: -drawn[name]["difference"])
        for place, name in enumerate(names):
            values = drawn[name]
            colour = OURS if name.startswith(("luminav", "pretrain")) else OTHERS
            panel.errorbar(
                values["difference"], place, xerr=values.get("interval", 0.0), fmt="o", color=colour, capsize=3
            )
        panel.set_yticks(range(len(names)), [_label(name, drawn[name]) for name in names], fontsize=8)
        panel.axvline(0.0, color=OTHERS, linewidth=0.8)
        left = sorted(set(figures) - set(drawn))
        panel.set_title(TITLES[size] + (f"; further behind: {', '.join(left)}" if left else ""), fontsize=9)
        panel.set_xlabel("validation loss minus FP32 AdamW's, nats (95 % interval)")
    return save(chart, image)
