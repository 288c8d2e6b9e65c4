"""What is released: the archives build, say the truth about themselves, and install where there is only torch."""

from __future__ import annotations

import email
import json
import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from test_repository import UNVERSIONED, repository_files

import luminav

ROOT = Path(__file__).resolve().parent.parent
NOT_RELEASED = {".ci/run", "PKG-INFO"}


def run(*command: Any, cwd: Path = ROOT) -> str:
    """Output of a command that must succeed, in an environment without this one's own search path."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source archive, and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (found,) = dist.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def sdist(dist: Path) -> Path:
    (found,) = dist.glob("*.tar.gz")
    return found


# ---- the archives ----------------------------------------------------------------------------------------------------


def test_twine_finds_nothing_wrong(dist: Path, wheel: Path, sdist: Path) -> None:
    out = run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist)
    assert out.count("PASSED") == 2


def test_names_and_metadata_carry_the_version(wheel: Path, sdist: Path) -> None:
    assert wheel.name == f"luminav-{luminav.__version__}-py3-none-any.whl"
    assert sdist.name == f"luminav-{luminav.__version__}.tar.gz"
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("dist-info/METADATA")]
        headers = email.message_from_bytes(archive.read(name))
    assert headers["Version"] == luminav.__version__
    assert headers["License-Expression"] == "Apache-2.0" and headers["License-File"] == "LICENSE"
    assert [line for line in headers.get_all("Requires-Dist") if "extra ==" not in line] == ["torch>=2.6"]


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    package = {path for path in repository_files() if ROOT / "src" in path.parents}
    assert names == {path.relative_to(ROOT / "src").as_posix() for path in package}
    assert {"luminav/__init__.py", "luminav/py.typed", "luminav/engines/triton/kernels.py"} <= names


def test_the_source_archive_holds_the_repository(sdist: Path) -> None:
    """So that who unpacks it can test it, build its documents, and write the single file."""
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    in_git = (ROOT / ".git").exists()
    committed = (
        run("git", "ls-files").splitlines() if in_git else [str(p.relative_to(ROOT)) for p in repository_files()]
    )
    assert set(committed) - NOT_RELEASED <= names
    assert not [name for name in names if UNVERSIONED & set(name.split("/"))]


# ---- an installation with torch and nothing more ---------------------------------------------------------------------


def required_by(name: str, found: dict[str, metadata.Distribution]) -> dict[str, metadata.Distribution]:
    """A distribution and what it requires here, without extras, by canonical name."""
    name = canonicalize_name(name)
    if name not in found:
        found[name] = metadata.distribution(name)
        for line in found[name].requires or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                required_by(requirement.name, found)
    return found


def entries(distribution: metadata.Distribution) -> Iterator[Path]:
    """What a distribution put into its site-packages folder: packages, modules and its metadata."""
    root = Path(str(distribution.locate_file("")))
    tops = {file.parts[0] for file in distribution.files or [] if file.parts[0] not in ("..", "__pycache__")}
    yield from (root / top for top in tops)


@pytest.fixture(scope="module")
def empty_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a new environment that has torch, what torch requires, and nothing else.

    Installing torch anew would take minutes and an index. It is linked from this environment instead, with the
    distributions that its metadata names, so that whatever else is installed here is missing there.
    """
    home = tmp_path_factory.mktemp("empty")
    linked = home / "linked"
    linked.mkdir()
    for distribution in required_by("torch", {}).values():
        for entry in entries(distribution):
            if not (linked / entry.name).exists():
                (linked / entry.name).symlink_to(entry)
    venv.create(home / "env", with_pip=False)
    python = home / "env" / ("Scripts" if os.name == "nt" else "bin") / "python"
    site_packages = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (site_packages / "linked.pth").write_text(f"{linked}\n", encoding="utf-8")
    return python


STEP = """
import importlib.metadata, importlib.util, sys
import torch, luminav

assert importlib.metadata.version("luminav") == luminav.__version__
assert "site-packages" in luminav.__file__
for extra in ("matplotlib", "typer", "rich", "hypothesis", "pytest"):
    assert importlib.util.find_spec(extra) is None, extra
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8)).bfloat16()
optimizer = luminav.LuminaV(luminav.param_groups(model, weight_decay=0.1), lr=1e-2)
x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
losses = []
for _ in range(20):
    loss = (model(x) - x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
assert losses[-1] < 0.9 * losses[0], losses
print("trained")
"""


@pytest.mark.slow
def test_installs_and_trains_where_there_is_only_torch(wheel: Path, empty_python: Path, tmp_path: Path) -> None:
    """pip checks the requirements: it finds no index, so one that is missing fails."""
    pip = (sys.executable, "-m", "pip", "--isolated", "--python", empty_python)
    installed = run(*pip, "install", "--no-index", wheel)
    assert re.search(rf"Successfully installed luminav-{re.escape(luminav.__version__)}\s", installed)
    assert run(empty_python, "-I", "-c", STEP, cwd=tmp_path) == "trained\n"
    command = subprocess.run([empty_python, "-I", "-m", "luminav", "doctor"], capture_output=True, text=True)
    assert command.returncode == 2 and "pip install '.[demo]'" in command.stderr


# ---- importing -------------------------------------------------------------------------------------------------------


def test_importing_luminav_loads_nothing_but_itself() -> None:
    """That is what keeps `import luminav` quick; benchmarks/bench_import.py measures how quick."""
    script = """
import json, sys, torch
there = set(sys.modules)
import luminav
print(json.dumps(sorted(name for name in set(sys.modules) - there if name.partition(".")[0] != "luminav")))
print(json.dumps(sorted(name for name in sys.modules if name.startswith(("luminav.cli", "luminav.engines.triton")))))
"""
    path = str(Path(luminav.__file__).parent.parent)
    environment = os.environ | {"PYTHONPATH": path}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    new, heavy = done.stdout.splitlines()
    assert [name for name in json.loads(new) if name.partition(".")[0] not in sys.stdlib_module_names] == []
    assert json.loads(heavy) == []
