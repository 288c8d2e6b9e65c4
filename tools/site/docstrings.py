"""Docstrings as the API page needs them: roles become code, formulas in TeX become MathML, which browsers draw."""

from __future__ import annotations

import re
from typing import Any

import griffe
from latex2mathml.converter import convert

ROLE = re.compile(r":(?:class|func|meth|mod|attr|data):`~?([^`]+)`")
MATH = re.compile(r"^\.\. math::\n((?:[ \t]+.*\n|\n)+)", flags=re.MULTILINE)


def markdown(text: str) -> str:
    """A docstring's text with what Markdown does not know replaced."""
    return MATH.sub(lambda match: formulas(match.group(1)), ROLE.sub(r"`\1`", text))


def formulas(tex: str) -> str:
    """Each line of a formula as a block of its own."""
    rows = (" ".join(row.replace("&", " ").split()) for row in tex.split(r"\\"))
    return "\n\n".join(f'<div class="formula">{convert(row, display="block")}</div>' for row in rows if row) + "\n\n"


class Readable(griffe.Extension):
    """Applies :func:`markdown` to every docstring."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called once for each object that was read from the sources."""
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)
