"""The documents: links lead somewhere, what they name exists, the README is short and its examples run."""

from __future__ import annotations

import functools
import importlib
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDERS = (ROOT / "docs", ROOT / "benchmarks")
DOCUMENTS = (
    ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(path for folder in FOLDERS for path in sorted(folder.rglob("*.md"))),
)  # fmt: skip
README = DOCUMENTS[0]

pytestmark = pytest.mark.skipif(not README.is_file(), reason="only the repository has the documents")
each = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())


def prose(text: str) -> str:
    """Return a document without its code blocks."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


@functools.cache
def anchors(document: pathlib.Path) -> frozenset[str]:
    """Return what GitHub calls a document's headings in links."""
    found: dict[str, int] = {}
    for heading in re.findall(r"^#+ (.*)$", prose(document.read_text(encoding="utf-8")), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        found[name] = found.get(name, -1) + 1
    return frozenset(name if number == 0 else f"{name}-{number}" for name, last in found.items() for number in range(last + 1))


@each
def test_links_lead_somewhere(document: pathlib.Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(document.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        assert target.exists(), link
        assert target.is_relative_to(ROOT), link
        if anchor:
            assert anchor in anchors(target), link


@each
def test_files_that_are_named_exist(document: pathlib.Path) -> None:
    text = document.read_text(encoding="utf-8")
    paths = re.findall(r"(?<![\w./-])((?:src|tests|docs|benchmarks|scripts)/[\w./-]+)", text)
    missing = [path for path in paths if not (ROOT / path.rstrip(".")).exists()]
    assert not missing


@each
def test_functions_are_in_the_files_that_are_named(document: pathlib.Path) -> None:
    text = " ".join(prose(document.read_text(encoding="utf-8")).split())
    for name, path in re.findall(r"`(\w+)`(?:, `\w+`)* in `(src/[\w./]+)`", text):
        assert re.search(rf"\b{name}\b", (ROOT / path).read_text(encoding="utf-8")), (name, path)


@each
def test_modules_that_are_named_import(document: pathlib.Path) -> None:
    for dotted in set(re.findall(r"(?<![\w./])(qflash(?:\.[A-Za-z_]\w*)+)", document.read_text(encoding="utf-8"))):
        if dotted.endswith((".py", ".js", ".ts", ".wasm")):
            continue
        parts = dotted.split(".")
        found = importlib.import_module(parts[0])
        for number, part in enumerate(parts[1:], 2):
            if not hasattr(found, part):
                importlib.import_module(".".join(parts[:number]))
            found = getattr(found, part)


@each
def test_lines_are_short(document: pathlib.Path) -> None:
    lines = prose(document.read_text(encoding="utf-8")).splitlines()
    assert not [line for line in lines if len(line) > 120 and not re.match(r" *\||!?\[|    ", line)]


@each
def test_no_line_of_a_paragraph_became_a_heading(document: pathlib.Path) -> None:
    """As "#1" at the begin of a line does for some readers of Markdown."""
    assert not re.findall(r"(?<=[^\n>]\n)#.*", prose(document.read_text(encoding="utf-8")))


@pytest.mark.parametrize(("name", "most"), [("README.md", 150), ("docs/performance.md", 150)])
def test_overviews_are_short(name: str, most: int) -> None:
    assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) <= most


@pytest.mark.slow
def test_readme_examples_run() -> None:
    names: dict[str, object] = {}
    for code in re.findall(r"^```python\n(.*?)^```$", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE):
        for package in re.findall(r"^(?:import|from) (timm|transformers)\b", code, re.MULTILINE):
            pytest.importorskip(package)
        exec(compile(code, "README.md", "exec"), names)
