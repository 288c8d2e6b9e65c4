"""The single file that `tools/bundle.py` writes gives the package's bits, and needs no more than the package does."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from engines.test_triton_interpreted import why_not

import luminav

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path(luminav.__file__).parent.parent


def bundler() -> ModuleType:
    spec = importlib.util.spec_from_file_location("luminav_bundler", ROOT / "tools" / "bundle.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with nothing in it but luminav.py."""
    made = tmp_path_factory.mktemp("single_file")
    command = [sys.executable, ROOT / "tools" / "bundle.py", "-o", made / "luminav.py"]
    subprocess.run(command, check=True, capture_output=True)
    return made


def start(home: Path, *arguments: Any, **environment: str) -> subprocess.Popen[str]:
    """A Python process that finds `luminav` in `home`, and the helpers of the tests."""
    path = os.pathsep.join([str(home), str(ROOT / "tests")])
    settings = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | environment
    command = [sys.executable, *map(str, arguments)]
    return subprocess.Popen(command, env=settings, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def output(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=280)
    assert process.returncode == 0, err[-4000:]
    return out


def compare_runs(folder: Path, engines: list[str], least: int, **environment: str) -> None:
    """Both sources of luminav, side by side; they must come from where they should, and agree in every run."""
    script = ROOT / "tests" / "single_file_runs.py"
    processes = [start(home, script, *engines, **environment) for home in (PACKAGE, folder)]
    package, single = (json.loads(output(process).splitlines()[-1]) for process in processes)
    assert package["file"] == luminav.__file__ and single["file"] == str(folder / "luminav.py")
    assert len(single["runs"]) >= least and len(set(single["runs"].values())) > least // 4
    assert single["runs"] == package["runs"]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["single", "foreach"])
def test_every_mode_has_the_packages_bits(folder: Path, engine: str) -> None:
    compare_runs(folder, [engine], least=300)


@pytest.mark.slow
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_triton_has_the_packages_bits(folder: Path) -> None:
    """In the interpreter, which rewrites the kernels' source: it must be found in the file."""
    compare_runs(folder, ["triton"], least=20, TRITON_INTERPRET="1")


# ---- what it is ------------------------------------------------------------------------------------------------------


def test_same_bytes_each_time(folder: Path) -> None:
    assert bundler().bundle() == (folder / "luminav.py").read_text(encoding="utf-8")


def test_the_top_says_what_it_is(folder: Path) -> None:
    out = output(start(folder, "-c", "import luminav; print(luminav.__doc__, luminav.LuminaV.__doc__)"))
    for words in (luminav.__version__, "Apache License", "tools/bundle.py", "10.57967/hf/10270"):
        assert words in out
    assert str(luminav.LuminaV.__doc__) in out


def test_all_public_names_and_modules_but_the_command_line(folder: Path) -> None:
    script = """
import importlib, json, sys, luminav
assert sorted(name for name in luminav.__all__ if hasattr(luminav, name)) == sorted(luminav.__all__)
names = sorted(name.removeprefix("luminav.") for name in sys.meta_path[0].texts)
for name in names:
    importlib.import_module(f"luminav.{name}")
print(json.dumps({"public": luminav.__all__, "modules": names}))
"""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("the Triton engine's modules import Triton")
    found = json.loads(output(start(folder, "-c", script)))
    source = ROOT / "src" / "luminav"
    files = [path.relative_to(source).with_suffix("").parts for path in source.rglob("*.py")]
    wanted = {".".join(parts).removesuffix(".__init__") for parts in files if parts[0] != "cli"}
    assert found == {"public": luminav.__all__, "modules": sorted(wanted - {"__init__", "__main__"})}


def test_needs_torch_only_and_steps_without_triton(folder: Path) -> None:
    script = """
import sys
sys.modules["triton"] = None  # an import of it fails, as where it is not installed
import torch
there = {name.partition(".")[0] for name in sys.modules}
import luminav
new = {name.partition(".")[0] for name in sys.modules} - there - set(sys.stdlib_module_names)
weight = torch.nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
optimizer = luminav.LuminaV([weight], lr=1e-2)
weight.grad = torch.ones_like(weight)
optimizer.step()
assert (weight < 1).all()
print(sorted(new))
"""
    assert output(start(folder, "-c", script)).strip() == "['luminav']"


def test_works_under_another_name_inside_a_package(tmp_path: Path, folder: Path) -> None:
    """Beside the package, which it neither uses nor disturbs."""
    vendored = tmp_path / "project" / "optimizers"
    vendored.mkdir(parents=True)
    (vendored / "lumina_v.py").write_bytes((folder / "luminav.py").read_bytes())
    script = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
from project.optimizers.lumina_v import LuminaV
assert LuminaV.__module__ == "project.optimizers.lumina_v.optimizer"
assert not any(name.partition(".")[0] == "luminav" for name in sys.modules)
import luminav, pickle, torch
assert luminav.LuminaV is not LuminaV
copy = pickle.loads(pickle.dumps(LuminaV([torch.nn.Parameter(torch.ones(2))], tau=0.5)))
assert type(copy) is LuminaV and copy.param_groups[0]["tau"] == 0.5
"""
    output(start(PACKAGE, "-c", script))


def test_tracebacks_and_sources_are_lines_of_the_file(folder: Path) -> None:
    script = """
import inspect, traceback, luminav, luminav.rule
lines = open(luminav.__file__, encoding="utf-8").read().splitlines()
source, first = inspect.getsourcelines(luminav.rule.cautious_mask_)
assert source[0].startswith("def cautious_mask_(") and source[0].rstrip() == lines[first - 1]
try:
    luminav.LuminaV([], lr=-1.0)
except ValueError as error:
    last = traceback.extract_tb(error.__traceback__)[-1]
assert last.filename == luminav.__file__ and "raise ValueError(" in lines[last.lineno - 1]
"""
    output(start(folder, "-c", script))


# ---- files and pickles go from one to the other ----------------------------------------------------------------------

FIRST_HALF = """
import pickle, sys, torch
from runs import new_params, state_of, take_steps
from luminav import LuminaV
params = new_params()
optimizer = LuminaV(params, lr=3e-3, master_weights="semi", fused_single_pass=True)
take_steps(optimizer, params, range(3))
torch.save({"weights": [p.detach() for p in params], "optimizer": optimizer.state_dict()}, sys.argv[1] + "/state.pt")
with open(sys.argv[1] + "/pickle", "wb") as file:
    pickle.dump(optimizer, file)
torch.save(optimizer, sys.argv[1] + "/whole.pt")
"""

SECOND_HALF = """
import pickle, sys, torch
from runs import assert_same_state, new_params, state_of, take_steps
with open(sys.argv[1] + "/pickle", "rb") as file:
    unpickled = pickle.load(file)  # before luminav is imported: the file names the module
from luminav import LuminaV
assert type(unpickled) is LuminaV
saved = torch.load(sys.argv[1] + "/state.pt", weights_only=True)
params = new_params()
for param, weight in zip(params, saved["weights"]):
    param.data.copy_(weight)
loaded = LuminaV(params, lr=1.0)
loaded.load_state_dict(saved["optimizer"])
straight = new_params()
never_stopped = LuminaV(straight, lr=3e-3, master_weights="semi", fused_single_pass=True)
take_steps(never_stopped, straight, range(5))
for optimizer in (loaded, unpickled, torch.load(sys.argv[1] + "/whole.pt", weights_only=False)):
    own = optimizer.param_groups[0]["params"]
    take_steps(optimizer, own, range(3, 5))
    assert_same_state(state_of(optimizer, own), state_of(never_stopped, straight))
"""


@pytest.mark.parametrize("writer", ["package", "single file"])
def test_checkpoints_and_pickles_cross_over(writer: str, folder: Path, tmp_path: Path) -> None:
    homes = [PACKAGE, folder] if writer == "package" else [folder, PACKAGE]
    for home, script in zip(homes, (FIRST_HALF, SECOND_HALF)):
        output(start(home, "-c", script, tmp_path))


# ---- what the tool refuses -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import luminav.rule\n", "from luminav import"),
        ("x = '''a'''\n", "double quotes"),
        ("import os; from  luminav.rule import delta\n", "cannot make relative"),
    ],
)
def test_refuses_what_it_cannot_carry(text: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = bundler()
    (tmp_path / "module.py").write_text(text, encoding="utf-8")
    monkeypatch.setattr(tool, "SOURCE", tmp_path)
    with pytest.raises(SystemExit, match=words):
        tool.section(Path("module.py"))


def test_imports_become_relative_to_their_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = bundler()
    monkeypatch.setattr(tool, "SOURCE", tmp_path)
    places = {"a.py": ".", "b/__init__.py": "..", "b/c.py": "..", "b/d/e.py": "..."}
    for place, dots in places.items():
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        text = "from luminav import rule\n\n\ndef f():\n    from luminav.b.c import (\n        x,\n    )\n"
        (tmp_path / place).write_text(text, encoding="utf-8")
        changed = text.replace("from luminav import", f"from {dots} import").replace("luminav.b.c", f"{dots}b.c")
        assert tool.with_relative_imports(Path(place)) == changed
