"""The site's pages: each is in the navigation, and every public name is in the reference."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import qflash

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"

pytestmark = pytest.mark.skipif(not DOCS.is_dir(), reason="only the repository has the documents")


def test_every_public_name_is_in_the_reference_once() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in (DOCS / "reference").glob("*.md"))
    named = re.findall(r"^::: qflash\.(\w+)$", text, re.MULTILINE)
    assert sorted(named) == sorted(qflash.__all__)
    for dotted in re.findall(r"^::: (\S+)$", text, re.MULTILINE):
        module, _, name = dotted.rpartition(".")
        assert getattr(importlib.import_module(module), name).__doc__


def test_members_that_the_reference_lists_exist() -> None:
    for path in (DOCS / "reference").glob("*.md"):
        shown = re.findall(r"^::: (\S+)\n    options: .*members: \[([^\]]+)\]", path.read_text(encoding="utf-8"), re.MULTILINE)
        for dotted, members in shown:
            module, _, name = dotted.rpartition(".")
            owner = getattr(importlib.import_module(module), name)
            assert not [member for member in members.split(", ") if not hasattr(owner, member)]


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert not [page for page in pages if not re.search(rf"(: |- ){re.escape(page)}$", navigation, re.MULTILINE)]


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    for package in ("mkdocs", "mkdocstrings", "material"):
        pytest.importorskip(package)
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    pages = "".join(path.read_text(encoding="utf-8") for path in tmp_path.glob("reference/*.html"))
    assert not [name for name in qflash.__all__ if f'id="qflash.{name}"' not in pages]
    home = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert not re.findall(r'<(?:script|img|link)[^>]* (?:src|href)="http[^"]*"', home), "a page asks another server"
