"""The promises of the repository itself: its documents, its data files, and who imports whom."""

from __future__ import annotations

import ast
import csv
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import luminav
from luminav import LuminaV
from luminav.hyperparameters import OPTIONS, PRESETS

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "luminav"
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LIBRARIES = [str(ROOT / "tests" / "integrations" / "script.py")]
"""Runs a script that uses the libraries of the test extra."""
LARGEST_FILE = 1_000_000
UNVERSIONED = {".git", ".venv", "__pycache__", "build", "dist", "runs"}


def repository_files() -> list[Path]:
    """The files that are or would be committed; in an unpacked archive, all but builds and caches."""
    if not (ROOT / ".git").exists():
        return [p for p in ROOT.rglob("*") if p.is_file() and not UNVERSIONED & set(p.relative_to(ROOT).parts)]
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def texts() -> Iterator[tuple[str, str]]:
    """Name and text of every text file of the repository."""
    for path in repository_files():
        try:
            yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue


def plain(value: Any) -> Any:
    """Tuples as lists, so that a value can be compared with one read from JSON."""
    return list(value) if isinstance(value, tuple) else value


# ---- documents ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_python_blocks_of_the_documents_run(document: Path, tmp_path: Path) -> None:
    """Top to bottom in a new interpreter, beside a copy of config.json, as a reader would."""
    blocks = re.findall(r"^```python\n(.*?)^```$", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    if not blocks:
        return
    shutil.copy(ROOT / "config.json", tmp_path)
    (tmp_path / "blocks.py").write_text("\n".join(blocks), encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(Path(luminav.__file__).parent.parent)}  # the package under test
    command = [sys.executable, *(LIBRARIES if "transformers" in "".join(blocks) else []), "blocks.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


def test_names_of_the_code_in_contributing_are_still_there() -> None:
    """What is quoted as one name, or as names with dots between them; names of files only if they are Python's."""
    text = re.sub(r"^```.*?^```$", "", (ROOT / "CONTRIBUTING.md").read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    quoted = [
        name for name in re.findall(r"`([A-Za-z_][\w.]*)`", text) if not re.search(r"\.(md|json|toml|yml)$", name)
    ]
    assert len(quoted) > 60
    known = {Path(name).stem for name, _ in texts()}
    known |= {word for name, code in texts() if name.endswith((".py", ".yml")) for word in re.findall(r"\w+", code)}
    assert {part for name in quoted for part in name.removesuffix(".py").split(".")} <= known


@pytest.mark.parametrize(
    "document", [*DOCUMENTS, ROOT / "CONTRIBUTING.md", ROOT / "BENCHMARKS.md"], ids=lambda path: path.name
)
def test_links_of_the_documents_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", document.read_text(encoding="utf-8")):
        if not target.startswith("https://"):
            assert (document.parent / target).exists(), target


def test_readme_table_is_the_declaration() -> None:
    """Name, default and meaning of every option, in order. Mend the README, or OPTIONS, until they agree."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    between = re.search(r"<!-- options.*?-->(.*?)<!-- /options -->", readme, flags=re.DOTALL)
    assert between
    rows = re.findall(r"^\| `(\w+)` \| `(.+?)` \| (.+) \|$", between.group(1), flags=re.MULTILINE)
    stated = [(name, ast.literal_eval(default), meaning) for name, default, meaning in rows]
    assert stated == [(o.name, o.default, o.meaning) for o in OPTIONS.values()]


def test_table_of_presets_is_the_declaration() -> None:
    text = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")
    rows = re.findall(r'^\| `"(\w+)"` \| .+ \| `(.+)` \|$', text, flags=re.MULTILINE)
    stated = {name: eval(f"dict({options})") for name, options in rows}
    assert stated == {name: dict(preset.options) for name, preset in PRESETS.items()}


def test_quoted_messages_are_those_of_the_code() -> None:
    """Under "An option is refused". An ellipsis stands for whatever a message fills in."""
    section = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8").partition("## An option is refused")[2]
    quoted = re.findall(r"^\| `([^`]+)` \|", section, flags=re.MULTILINE)
    texts = [text for path in modules() for text in string_literals(path)]
    assert quoted
    for message in quoted:
        pattern = re.compile(".+".join(map(re.escape, message.split("…"))))
        assert any(map(pattern.search, texts)), message


def string_literals(path: Path) -> Iterator[str]:
    """The strings of a module, with an ellipsis for each field of a formatted one."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_both_dois_are_named() -> None:
    for name in ("README.md", "CITATION.cff"):
        text = (ROOT / name).read_text(encoding="utf-8")
        assert "10.57967/hf/10270" in text and "10.57967/hf/10365" in text, name


# ---- data and packaging --------------------------------------------------------------------------------------------


def test_config_json_holds_the_rules_defaults() -> None:
    """The options of the rule, not those of the running process, and they make an optimizer."""
    params = json.loads((ROOT / "config.json").read_text(encoding="utf-8"))["default_params"]
    assert params == {name: plain(option.default) for name, option in OPTIONS.items() if not option.process}
    optimizer = LuminaV([torch.nn.Parameter(torch.ones(3))], **params)
    assert {name: plain(optimizer.defaults[name]) for name in params} == params


def test_config_json_carries_the_presets() -> None:
    presets = json.loads((ROOT / "config.json").read_text(encoding="utf-8"))["presets"]
    assert presets == {
        name: {option: plain(value) for option, value in preset.options.items()} for name, preset in PRESETS.items()
    }


def test_version_stands_in_one_place() -> None:
    """The changelog and the recorded figures tell history, so they may name versions too."""
    quoted = re.compile(r"(?<![\w.])" + re.escape(luminav.__version__) + r"(?![\w.])")
    history = ("CHANGELOG.md", "BENCHMARKS.md", "benchmarks/results.csv")
    places = [name for name, text in texts() if quoted.search(text) and name not in history]
    assert places == ["src/luminav/__init__.py"]


def test_no_machine_paths_and_no_registry_hosts() -> None:
    machine_path = re.compile(r"(?<![\w.~-])/(?:root|work|opt|etc|mnt|Users/\w+|home/\w+)/|[A-Z]:\\Users")
    registry = re.compile(r"pypi\.org|pythonhosted\.org|download\.pytorch\.org")
    found = [
        f"{name}: {match.group()}"
        for name, text in texts()
        for match in [*machine_path.finditer(text), *registry.finditer(text)]
    ]
    assert found == []


def test_benchmarks_report_is_what_the_rows_say() -> None:
    """Mend with `python benchmarks/report.py`."""
    command = [sys.executable, "benchmarks/report.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_no_large_files() -> None:
    large = {str(p.relative_to(ROOT)): p.stat().st_size for p in repository_files() if p.stat().st_size > LARGEST_FILE}
    assert large == {}


# ---- who imports whom ------------------------------------------------------------------------------------------------

LEVELS = {
    "spelling": 0,
    "hyperparameters": 0,
    "rule": 1,
    "rounding": 1,
    "blocks": 1,
    "layout": 1,
    "engines": 2,
    "state": 3,  # these serve the optimizer
    "checkpoints": 3,
    "extents": 3,
    "pending": 3,
    "works": 3,
    "custody": 3,
    "modes": 3,
    "premises": 3,
    "replay": 3,
    "distributed": 3,
    "domains": 3,
    "model_shapes": 3,
    "diagnostics": 3,
    "param_groups": 3,
    "stepper": 3,
    "optimizer": 4,
    "gradient_release": 5,
    "planner": 5,
    "cli": 6,
}
"""A module may import from its own level and below; `luminav/__init__.py` from everywhere but the command line."""
PUBLIC_NAMES = 5
"""Level of `from luminav import LuminaV`, which is the whole package but the command line."""

NOT_FOR_ENGINES = {name for name, level in LEVELS.items() if level > LEVELS["engines"]} | {"layout"}
"""Not even for types. What of a parameter a shard holds reaches an engine as numbers."""


def imports(path: Path, *, runtime_only: bool = False) -> Iterator[str]:
    """Full names of what a module of the package imports, wherever in it the import stands."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    package = ["luminav", *path.relative_to(SOURCE).parts[:-1]]
    for node in ast.walk(tree):
        if runtime_only and id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def room(name: str) -> str | None:
    """The module or folder of the package that a full name leads into; None outside the package."""
    parts = name.split(".")
    return parts[1] if parts[0] == "luminav" and len(parts) > 1 else None


def modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def test_every_module_has_its_place() -> None:
    """A new module at the top of the package belongs in LEVELS, and in the table of CONTRIBUTING.md."""
    rooms = {p.relative_to(SOURCE).parts[0].removesuffix(".py") for p in modules()} - {"__init__", "__main__"}
    assert rooms <= set(LEVELS), rooms - set(LEVELS)


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_downwards(path: Path) -> None:
    own = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    level = {"__init__": PUBLIC_NAMES, "__main__": LEVELS["cli"]}.get(own) or LEVELS[own]
    for name in imports(path, runtime_only=True):
        if name.split(".")[0] == "luminav":
            assert LEVELS.get(room(name) or "", PUBLIC_NAMES) <= level, f"{own} must not import {name}"


def test_the_rule_imports_torch_only() -> None:
    outside = {name.split(".")[0] for name in imports(SOURCE / "rule.py", runtime_only=True)}
    assert outside - set(sys.stdlib_module_names) == {"torch"}


@pytest.mark.parametrize("path", sorted((SOURCE / "engines").rglob("*.py")), ids=lambda path: path.name)
def test_engines_see_tensors_only(path: Path) -> None:
    """No process group, no DTensor, no config file, nothing from the rooms above."""
    for name in imports(path):
        assert not f"{name}.".startswith("torch.distributed."), name
        assert name.split(".")[0] not in {"json", "tomllib", "configparser"}, name
        assert room(name) not in NOT_FOR_ENGINES, name


def test_rows_that_the_documents_name_are_there() -> None:
    """ "…" stands for any part of a case. A figure whose row is gone, or was never measured, is no evidence."""
    with (ROOT / "benchmarks" / "results.csv").open(newline="", encoding="utf-8") as stream:
        cases = [row["case"] for row in csv.DictReader(stream)]
    named = {
        (document.name, pattern)
        for document in DOCUMENTS
        for pattern in re.findall(r"\brows?\s+`([^`]*/[^`]*)`", document.read_text(encoding="utf-8"), re.IGNORECASE)
    }
    assert len(named) >= 8
    missing = [
        (document, pattern)
        for document, pattern in sorted(named)
        if not any(re.fullmatch(".*".join(map(re.escape, pattern.split("…"))), case) for case in cases)
    ]
    assert not missing
