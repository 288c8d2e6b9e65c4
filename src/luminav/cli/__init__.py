"""The command line: ``luminav``, or ``python -m luminav``."""

from __future__ import annotations

import sys
from importlib.util import find_spec

_DEMO_EXTRA = ("typer", "rich", "matplotlib", "numpy")


def main() -> int:
    """Run the command line on ``sys.argv``.

    Returns:
        The exit status: 0, 2 for something the user can mend, 128 + n after signal n.
    """
    missing = [name for name in _DEMO_EXTRA if not _installed(name)]
    if missing:
        print(
            f"luminav: the command line needs {', '.join(missing)}: run `pip install '.[demo]'` in the checkout.",
            file=sys.stderr,
        )
        return 2
    from luminav.cli.app import run

    return run(sys.argv[1:])


def _installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):  # an import hook that refuses it, or an entry without a spec
        return False
