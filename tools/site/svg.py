"""A little SVG: axes, lines, bars, boxes and arrows, in colours that a page can set.

Everything neutral is `currentColor`, so that a picture inside a page has the page's ink; by itself it follows the
system's light or dark mode through its own style.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

Points = Sequence[tuple[float, float]]

WIDTH = 480  # text of 12 units stays legible on a phone, where this many units are 360 pixels
BLUE, ORANGE, GREEN, RED = "#3b82f6", "#f08c2e", "#2fa56b", "#e0524d"
STYLE = (
    "<style>.picture{color:#24292f}@media(prefers-color-scheme:dark){.picture{color:#d0d7de}}</style>"
    "<defs><marker id='tip' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='7' markerHeight='7' orient='auto'>"
    "<path d='M0 0L8 4L0 8z' fill='#8b949e'/></marker></defs>"
)


class Picture:
    """Elements, in the order in which they are drawn."""

    def __init__(self, title: str, height: int) -> None:
        self.title, self.height = title, height
        self.parts: list[str] = []

    def text(
        self, x: float, y: float, words: str, *, anchor: str = "start", size: float = 13, color: str = "currentColor",
        bold: bool = False, faint: bool = False,
    ) -> None:  # fmt: skip
        more = (' font-weight="600"' if bold else "") + (' opacity="0.75"' if faint else "")
        place = f'x="{x:.4g}" y="{y:.4g}" text-anchor="{anchor}" font-size="{size}"'
        self.parts.append(f'<text {place} fill="{color}"{more}>{escape(words)}</text>')

    def line(self, x1: float, y1: float, x2: float, y2: float, *, color: str = "currentColor", width: float = 1,
             dashed: bool = False, opacity: float = 1.0) -> None:  # fmt: skip
        more = (' stroke-dasharray="4 3"' if dashed else "") + (f' opacity="{opacity}"' if opacity < 1 else "")
        place = f'x1="{x1:.4g}" y1="{y1:.4g}" x2="{x2:.4g}" y2="{y2:.4g}"'
        self.parts.append(f'<line {place} stroke="{color}" stroke-width="{width}"{more}/>')

    def arrow(self, x1: float, y1: float, x2: float, y2: float) -> None:
        place = f'x1="{x1:.4g}" y1="{y1:.4g}" x2="{x2:.4g}" y2="{y2:.4g}"'
        self.parts.append(f'<line {place} stroke="#8b949e" stroke-width="1.5" marker-end="url(#tip)"/>')

    def rect(self, x: float, y: float, width: float, height: float, color: str, *, opacity: float = 1.0,
             outline: bool = False, radius: float = 0) -> None:  # fmt: skip
        paint = f'fill="{color}" fill-opacity="{opacity}"' + (f' stroke="{color}"' if outline else "")
        place = f'x="{x:.4g}" y="{y:.4g}" width="{width:.4g}" height="{height:.4g}" rx="{radius}"'
        self.parts.append(f"<rect {place} {paint}/>")

    def box(self, x: float, y: float, width: float, words: Sequence[str], color: str = "#8b949e") -> None:
        """A labelled box; the first line of its words is bold."""
        height = 14 + 15 * len(words)
        self.rect(x, y, width, height, color, opacity=0.14, outline=True, radius=4)
        for number, word in enumerate(words):
            size = 13 if number == 0 else 12
            self.text(x + width / 2, y + 19 + 15 * number, word, anchor="middle", size=size, bold=number == 0)

    def curve(
        self, points: Sequence[tuple[float, float]], color: str, *, width: float = 2, dashed: bool = False
    ) -> None:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        more = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{width}"{more}/>')

    def svg(self) -> str:
        """The picture as a file."""
        head = f'<svg xmlns="http://www.w3.org/2000/svg" class="picture" viewBox="0 0 {WIDTH} {self.height}" role="img"'
        font = 'font-family="system-ui, sans-serif"'
        body = "\n".join(self.parts)
        return f"{head} {font}>{STYLE}\n<title>{escape(self.title)}</title>\n{body}\n</svg>\n"


class Axes:
    """A plot's frame: turns values into places."""

    def __init__(
        self, picture: Picture, x: tuple[float, float], y: tuple[float, float], *, top: float = 16,
        bottom: float | None = None, left: float = 44, right: float = WIDTH - 18,
    ) -> None:  # fmt: skip
        self.picture, self.x, self.y = picture, x, y
        self.left, self.right, self.top = left, right, top
        self.bottom = picture.height - 36 if bottom is None else bottom

    def place(self, x: float, y: float) -> tuple[float, float]:
        across = (x - self.x[0]) / (self.x[1] - self.x[0])
        up = (y - self.y[0]) / (self.y[1] - self.y[0])
        return self.left + across * (self.right - self.left), self.bottom - up * (self.bottom - self.top)

    def frame(self, x_ticks: dict[float, str], y_ticks: dict[float, str], x_label: str, y_label: str) -> None:
        picture = self.picture
        for value, words in y_ticks.items():
            _, y = self.place(self.x[0], value)
            picture.line(self.left, y, self.right, y, opacity=0.15)
            picture.text(self.left - 6, y + 4, words, anchor="end", size=12, faint=True)
        for value, words in x_ticks.items():
            x, _ = self.place(value, self.y[0])
            picture.text(x, self.bottom + 15, words, anchor="middle", size=12, faint=True)
        picture.line(self.left, self.bottom, self.right, self.bottom, opacity=0.5)
        picture.text((self.left + self.right) / 2, self.bottom + 31, x_label, anchor="middle")
        picture.text(4, self.top - 6, y_label)

    def curve(
        self, points: Sequence[tuple[float, float]], color: str, *, width: float = 2, dashed: bool = False
    ) -> None:
        self.picture.curve([self.place(x, y) for x, y in points], color, width=width, dashed=dashed)
