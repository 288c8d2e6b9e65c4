"""`luminav bench`: a benchmark of the checkout runs with its own options, and a missing checkout is said plainly."""

from __future__ import annotations

from pathlib import Path

import pytest

import luminav
from luminav.cli.app import run
from luminav.cli.bench import SCRIPTS

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

SCRIPT = """
import sys
from pathlib import Path

Path(__file__).with_name("told.txt").write_text("|".join(sys.argv[1:]))
sys.exit(3)
"""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that lies in a checkout with a benchmark of its own."""
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "results.csv").touch()
    (tmp_path / "benchmarks" / SCRIPTS["converge"]).write_text(SCRIPT)
    monkeypatch.setattr(luminav, "__file__", str(tmp_path / "src" / "luminav" / "__init__.py"))
    return tmp_path


def test_options_and_status_are_the_scripts(checkout: Path) -> None:
    assert run(["bench", "converge", "--help", "--grid", "all", "--lr=1e-3"]) == 3
    assert (checkout / "benchmarks" / "told.txt").read_text() == "--help|--grid|all|--lr=1e-3"


def test_unknown_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "nonsense"]) == 2
    assert "one of step, pretrain, converge" in capsys.readouterr().err


def test_without_a_name_the_names_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench"]) == 2
    message = capsys.readouterr().err
    assert all(name in message for name in SCRIPTS) and "luminav bench step --help" in message


def test_script_of_another_version(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "pretrain"]) == 2
    assert "another version" in capsys.readouterr().err


def test_without_a_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(luminav, "__file__", str(tmp_path / "lib" / "site" / "luminav" / "__init__.py"))
    monkeypatch.chdir(tmp_path)
    assert run(["bench", "converge"]) == 2
    assert "run this in a checkout" in capsys.readouterr().err


def test_the_current_folder_may_be_the_checkout(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(luminav, "__file__", str(checkout / "lib" / "site" / "luminav" / "__init__.py"))
    monkeypatch.chdir(checkout)
    assert run(["bench", "converge"]) == 3


def test_every_name_has_its_script() -> None:
    assert {name: (BENCHMARKS / script).exists() for name, script in SCRIPTS.items()} == dict.fromkeys(SCRIPTS, True)


def test_every_benchmark_has_its_name() -> None:
    """But the one that torchrun starts, on every rank."""
    scripts = {path.name for path in BENCHMARKS.glob("bench_*.py")}
    assert scripts - set(SCRIPTS.values()) == {"bench_fsdp2.py"}
