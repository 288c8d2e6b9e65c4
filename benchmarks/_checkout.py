"""Importing this finds the package of this checkout where none is installed, as on a borrowed machine."""

import sys
from importlib.util import find_spec
from pathlib import Path

if find_spec("luminav") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))


def wrong_package(imported: str, folder: Path) -> str | None:
    """What to say if a worker imported luminav (its file is `imported`, "" for none) from elsewhere than `folder`."""
    if not imported or Path(imported).resolve().is_relative_to(folder.resolve()):
        return None
    return f"imported luminav from {imported}, not from {folder}"
