"""Importing this finds the package of this checkout where none is installed, as on a borrowed machine."""

import sys
from importlib.util import find_spec
from pathlib import Path

if find_spec("luminav") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))
