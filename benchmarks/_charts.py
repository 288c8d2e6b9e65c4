"""What the charts of all benchmarks share: their colours, panels side by side, and how a picture is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
OURS, OTHERS = "#c4432b", "#8a8f98"


def panels(count: int, width: float, height: float) -> tuple[Any, list[Any]]:
    """A figure with `count` panels side by side, and the panels; `width` and `height` of the figure in inches."""
    from matplotlib.figure import Figure  # an optional package; without pyplot there is no window and no global state

    figure = Figure(figsize=(width, height))
    return figure, list(figure.subplots(1, count, squeeze=False)[0])


def save(figure: Any, image: Path, dpi: int = 100) -> Path:
    """Write a figure as PNG, without the frame's upper and right edges; returns the PNG's path."""
    for panel in figure.axes:
        panel.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    image.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(image, dpi=dpi)
    return image
