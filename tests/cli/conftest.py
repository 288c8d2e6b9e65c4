"""A tiny demo: a text, and what one uninterrupted run leaves."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import processes
import pytest


def _write_text(folder: Path) -> None:
    """Write some real text."""
    (folder / "text.txt").write_bytes(Path(argparse.__file__).read_bytes()[:50_000])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with nothing but a text in it."""
    _write_text(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def finished_once(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, processes.Ended]:
    """A folder in which the tiny demo ran to its end, to be looked at only, and how it ended."""
    place = tmp_path_factory.mktemp("finished")
    _write_text(place)
    ended = processes.luminav(*processes.TINY, folder=place)
    assert ended.status == 0, ended.err
    return place, ended


@pytest.fixture
def finished(finished_once: tuple[Path, processes.Ended], tmp_path: Path) -> Path:
    """A copy of the finished run's folder, to be changed at will."""
    shutil.copytree(finished_once[0], tmp_path, dirs_exist_ok=True)
    return tmp_path
