"""What mkdocs does besides the pages of docs/: pages and files from elsewhere in the repository, and pictures inline.

Documents link to files as they lie in the repository, so that the links work there too. On the site the changelog is a
page, and a script from examples/ is a file to be read.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = {"CHANGELOG.md": "changelog.md", "README.md": "index.md"}
"""Documents outside docs/, and the pages that stand for them."""

LINK = re.compile(r"\]\(\.\./([^)#\s]+)")
IMAGE = re.compile(r'<img alt="([^"]*)" src="([^"]+\.svg)"[^>]*>')
STYLE = re.compile(r"<style>.*?</style>", flags=re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Add the changelog and the examples."""
    files.append(File.generated(config, "changelog.md", abs_src_path=str(ROOT / "CHANGELOG.md")))
    for path in sorted((ROOT / "examples").glob("*.py")):
        name = f"examples/{path.name}.txt"  # a type that browsers show
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links out of docs/ lead to what stands for their target on the site."""

    def on_site(match: re.Match[str]) -> str:
        target = match.group(1)
        place = PAGES.get(target, f"{target}.txt")
        if files.get_file_from_path(place) is None:
            raise ValueError(
                f"{page.file.src_uri} links to {target}, which is not on the site: see tools/site/hooks.py."
            )
        return f"]({posixpath.relpath(place, posixpath.dirname(page.file.src_uri) or '.')}"

    return LINK.sub(on_site, markdown)


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Put pictures into the page, where they take its colours; by themselves they follow the system's."""

    def inline(match: re.Match[str]) -> str:
        text, source = match.groups()
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page.url), source))
        svg = (Path(config["docs_dir"]) / path).read_text(encoding="utf-8")
        return STYLE.sub("", svg).replace("<svg ", f'<svg aria-label="{text}" ', 1)

    return IMAGE.sub(inline, html)
