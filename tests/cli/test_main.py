"""The entry points: `python -m luminav`, its help, and what it says without the demo extra."""

from __future__ import annotations

import subprocess
import sys

import pytest

import luminav
from luminav import cli

BLOCKED = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("typer", "rich", "matplotlib"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refuse())
sys.argv = ["luminav", "demo"]
from luminav.cli import main
sys.exit(main())
"""


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=120)


def test_module_prints_its_version() -> None:
    ended = python("-m", "luminav", "--version")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, f"luminav {luminav.__version__}\n", "")


def test_without_the_extra_one_line_says_which() -> None:
    ended = python("-c", BLOCKED)
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert ended.stderr.count("\n") == 1
    assert "typer, rich, matplotlib" in ended.stderr
    assert "pip install '.[demo]'" in ended.stderr


@pytest.mark.parametrize("name", ["typer", "rich", "matplotlib", "numpy"])
def test_each_part_of_the_extra_is_missed(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    assert cli.main() == 2
    assert f"needs {name}:" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["--help"], ["demo", "--help"]])
def test_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    from luminav.cli.app import run

    assert run(arguments) == 0
    printed = capsys.readouterr()
    assert "Usage: luminav" in printed.out
    assert printed.err == ""
