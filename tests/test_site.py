"""The documents as a site: it builds without a warning, names everything, and its pictures show what the code does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

import luminav

ROOT = Path(__file__).resolve().parent.parent
IMAGES = sorted((ROOT / "docs" / "images").glob("*.svg"))
LARGEST_PICTURE = 60_000
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. Strict: a dead link, a page outside the navigation or an unclear docstring fails here."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def test_every_document_is_a_page(site: Path) -> None:
    for path in (ROOT / "docs").glob("*.md"):
        page = site / "index.html" if path.stem == "index" else site / path.stem / "index.html"
        assert "<h1 id=" in page.read_text(encoding="utf-8"), path.name
    assert (site / "changelog" / "index.html").exists()


def test_the_api_page_has_every_public_name(site: Path) -> None:
    page = (site / "api" / "index.html").read_text(encoding="utf-8")
    anchors = set(re.findall(r'<h2 id="luminav\.(?:\w+\.)*(\w+)"', page))
    assert set(luminav.__all__) - {"__version__"} <= anchors
    assert "<math" in page
    for markup in (".. math::", ":class:", ":meth:", ":func:"):
        assert markup not in page


def test_pages_load_nothing_from_other_hosts(site: Path) -> None:
    loads = re.compile(
        r'<(?:script|img|iframe)[^>]+src="(https?:[^"]+)"|<link[^>]+rel="stylesheet"[^>]+href="(https?:[^"]+)"'
    )
    for page in site.rglob("*.html"):
        assert loads.findall(page.read_text(encoding="utf-8")) == [], page.name


def test_pictures_are_part_of_their_pages(site: Path) -> None:
    """Inline, so that they take the page's colours, without the style that they have by themselves."""
    page = (site / "rounding" / "index.html").read_text(encoding="utf-8")
    assert page.count('class="picture"') == 1 and "prefers-color-scheme:dark){.picture" not in page


# ---- pictures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.stem)
def test_pictures_are_small_and_used(path: Path) -> None:
    assert path.stat().st_size < LARGEST_PICTURE
    root = ElementTree.fromstring(path.read_text(encoding="utf-8"))
    title = root.find("{http://www.w3.org/2000/svg}title")
    assert title is not None and title.text
    pages = [page.name for page in (ROOT / "docs").glob("*.md") if f"(images/{path.name})" in page.read_text("utf-8")]
    assert pages


def test_pictures_show_what_the_code_computes(tmp_path: Path) -> None:
    """Drawn again; places may differ by a unit, a 480th of the width, since processors differ in last bits."""
    script = ROOT / "tools" / "site" / "pictures.py"
    environment = os.environ | {"PYTHONPATH": str(Path(luminav.__file__).parent.parent)}
    command = [sys.executable, str(script), "--output", str(tmp_path)]
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=240)
    assert sorted(path.name for path in tmp_path.iterdir()) == [path.name for path in IMAGES]
    for path in IMAGES:
        drawn, kept = ((folder / path.name).read_text(encoding="utf-8") for folder in (tmp_path, path.parent))
        assert NUMBER.sub("#", drawn) == NUMBER.sub("#", kept), path.name
        apart = [abs(float(a) - float(b)) for a, b in zip(NUMBER.findall(drawn), NUMBER.findall(kept), strict=True)]
        assert max(apart) <= 1.0, path.name
