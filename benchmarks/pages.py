"""Generated parts of README and docs: what lies between ``<!-- group:name -->`` and ``<!-- end -->``."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
WIDTH = 118
CARD = "h200"
"""The GPU that the pages are of, as files' names have it; results of other ones may lie beside its."""
_MARKED = re.compile(r"<!-- ((?!numbers)[a-z]+:[a-z0-9-]+) -->\n(.*?)<!-- end -->", re.DOTALL)


class Block(NamedTuple):
    """One generated part.

    Attributes:
        name: ``group:name`` of its marker.
        text: what the page has there.
        start, stop: where that lies in the page.
    """

    name: str
    text: str
    start: int
    stop: int


def blocks_of(page: str) -> Iterator[Block]:
    """Yield the generated parts of a page."""
    for match in _MARKED.finditer(page):
        yield Block(match[1], match[2], match.start(2), match.end(2))


def prose_of(text: str) -> str:
    """Return a page with all that is no prose blanked, in the same places."""

    def blank(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", match[0])

    for block in reversed(list(blocks_of(text))):
        text = text[: block.start] + re.sub(r"[^\n]", " ", block.text) + text[block.stop :]
    for pattern in (r"^```.*?^```$", r"^\|.*$", r"^    .*$", r"^<!--.*$"):
        text = re.sub(pattern, blank, text, flags=re.DOTALL | re.MULTILINE if "```" in pattern else re.MULTILINE)
    return re.sub(r"`[^`]*`|\]\([^)]*\)|\d{4}-\d\d-\d\d", blank, text)


def fill(page: str, blocks: Mapping[str, Sequence[str]]) -> str:
    """Return a page with the parts that ``blocks`` names replaced; it may have others."""

    def lines(match: re.Match[str]) -> str:
        if match[1] not in blocks:
            return match[0]
        return f"<!-- {match[1]} -->\n" + "\n".join(blocks[match[1]]) + "\n<!-- end -->"

    return _MARKED.sub(lines, page)


def write(blocks: Mapping[str, Sequence[str]]) -> None:
    """Put parts where pages have their markers."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if (filled := fill(text, blocks)) != text:
            page.write_text(filled, encoding="utf-8")


def card(device: str) -> str:
    """Return what a GPU's name has for its model: ``H100`` for ``NVIDIA H100 80GB HBM3``; ``GPU`` where no word has a digit."""
    return next((word for word in device.split() if any(map(str.isdigit, word))), "GPU")


def wrap(paragraph: str, indent: str = "") -> list[str]:
    """Break a paragraph into lines of a page."""
    return textwrap.wrap(paragraph, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def flow(text: str) -> str:
    """Break paragraphs of text into lines of a page; a paragraph that begins with ``*`` is a list."""
    done = []
    for paragraph in text.split("\n\n"):
        items = re.split(r"\n(?=\* )", paragraph)
        done.append("\n".join("\n".join(wrap(" ".join(item.split()), "  " if item.startswith("* ") else "")) for item in items))
    return "\n\n".join(done)
