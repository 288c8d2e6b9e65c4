"""The chart of bench_step.py's rows."""

from __future__ import annotations

import csv
from pathlib import Path

from _charts import IMAGES, OTHERS, OURS, panels, save

IMAGE = IMAGES / "step.png"
TITLES = {"qwen4b": "4.2 B parameters, 426 tensors", "gpt2": "GPT-2 small, 148 tensors"}


def latest_times(path: Path) -> dict[str, dict[str, float]]:
    """The last time recorded for each contender, by model; a contender that failed last has none."""
    times: dict[str, dict[str, float]] = {model: {} for model in TITLES}
    with path.open(newline="", encoding="utf-8") as stream:
        for row in csv.DictReader(stream):
            kind, model, key, *rest = [*row["case"].split("/"), "", "", ""][:4]
            if kind != "step" or model not in times or rest != ["device_ms"]:
                continue
            times[model].pop(key, None)
            if not row["value"].startswith("failed"):
                times[model][key] = float(row["value"])
    return times


def draw_chart(path: Path, image: Path = IMAGE) -> Path:
    """Draw milliseconds per step as bars, a panel for each model.

    Args:
        path: The file of rows.
        image: The PNG to write.

    Returns:
        The PNG's path.
    """
    times = {model: values for model, values in latest_times(path).items() if values}
    if not times:
        raise SystemExit(f"{path} has no rows of bench_step.py on a GPU.")
    figure, drawn = panels(len(times), 6 * len(times), 4.8)
    for panel, (model, values) in zip(drawn, times.items()):
        ordered = sorted(values.items(), key=lambda item: -item[1])
        names, heights = zip(*ordered)
        bars = panel.barh(names, heights, color=[OURS if name.startswith("luminav") else OTHERS for name in names])
        panel.bar_label(bars, fmt="%.3g", padding=3, fontsize=8)
        panel.set_title(TITLES[model], fontsize=10)
        panel.set_xlabel("milliseconds per step")
        panel.margins(x=0.12)
    return save(figure, image, dpi=110)
