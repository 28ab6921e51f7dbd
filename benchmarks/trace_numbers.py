"""Say where every number in a table, and every bold figure, of README and docs comes from; fail if one comes from nowhere.

``python benchmarks/trace_numbers.py``. With a page and a part of a row, ``python benchmarks/trace_numbers.py README.md "A1 to
A3"``, it says where the rows of tables with that text come from: the file, what tells the row apart there, and the keys shown.

A number may stand

* in a part between ``<!-- group:name -->`` and ``<!-- end -->``, which a script of this folder makes from committed results: it
  is made again and must be the same. docs/performance/tables.md is such a part as a whole;
* in a table behind ``<!-- numbers: KIND -->``, where KIND is

  - ``definitions``: sizes, versions, constants and bounds that the page defines or derives. Nothing there is measured;
  - ``published``: figures of others, which were not measured here;
  - a file of ``benchmarks/results``: every number behind the first column is a value in it, rounded (``; also 64``: or 64);
  - ``once``: measured once, in the conditions that stand beside the table; no record was kept;

* in benchmarks/archive/experiments.md, which is a notebook of trials and says so: ``<!-- numbers: notebook -->`` at its top.

Bold figures outside such parts and tables are refused. Decimals and figures with a unit in sentences are looked up in
``prose.py``, which computes them again; in README's sentences there are none but versions.
"""

from __future__ import annotations

import argparse
import collections
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import accuracy
import declared
import evaluate_models
import export_times
import integer_networks
import ladder
import openvino_networks
import pages
import peers_real
import performance_tables
import prose
import published_configurations
import reliability_tables
import reproduction_tables
import single_records
import static_attention
import tosa_networks
import worse_rows

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "scripts"))
import survey_models  # noqa: E402
import survey_networks  # noqa: E402

ROOT = HERE.parent
NOTEBOOK = HERE / "archive" / "experiments.md"
PAGES = (*pages.PAGES, NOTEBOOK)
MAKERS = (
    accuracy, evaluate_models, export_times, integer_networks, ladder, openvino_networks, peers_real, performance_tables,
    published_configurations, reliability_tables, reproduction_tables, single_records, static_attention, survey_models,
    survey_networks, tosa_networks, worse_rows,
)  # fmt: skip

_NUMBER = re.compile(r"(?<![\w.^/\u00d7\u2013-])[-+\u2212]?\d+(?:\.\d+)?(?:e[-+]\d+)?(?![\w^\u00d7]|\.\d)")
_FIGURE = prose.FIGURE
_KIND = re.compile(r"<!-- numbers: ([^>]*?) -->")


class Trace(NamedTuple):
    """Numbers of one place.

    Attributes:
        page: from the repository's root.
        place: a generated part's name, or a line.
        source: where the numbers come from; empty if nowhere.
        count: how many.
        example: what to look for, of numbers from nowhere.
    """

    page: str
    place: str
    source: str
    count: int  # type: ignore[assignment]
    example: str = ""


class Part(NamedTuple):
    """A generated part.

    Attributes:
        text: as its script makes it.
        source: the script and the result files that it reads.
    """

    text: str
    source: str


def made() -> dict[str, Part]:
    """Return every generated part, by its marker's name."""
    parts, tables = {}, declared_tables()
    for maker in MAKERS:
        made = getattr(maker, "PARTS", maker)
        for name, lines in made.blocks().items():
            files = (tables[name].files() if name in tables else []) or sorted(made.files())
            parts[name] = Part("\n".join(lines) + "\n", f"{maker.__name__}.py: {', '.join(files)}")
    return parts


def values_of(record: Any, keys: str = "") -> Iterator[tuple[str, float]]:
    """Yield every number of a result file with its keys."""
    if isinstance(record, bool):
        return
    if isinstance(record, int | float):
        yield keys, float(record)
    elif isinstance(record, dict | list):
        for key, value in record.items() if isinstance(record, dict) else enumerate(record):
            yield from values_of(value, f"{keys}[{key!r}]")


def _is_shown_as(value: float, text: str) -> bool:
    """Tell whether a page may show a value so."""
    digits = len(text.partition(".")[2])
    return abs(value - float(text.replace("\u2212", "-"))) <= 0.5 * 10**-digits * (1 + 1e-9)


def _numbers(line: str) -> list[str]:
    """Return the numbers of a table's row behind its first column."""
    return _NUMBER.findall(line.split("|", 2)[2])


def unsupported(lines: list[str], kind: str) -> list[str]:
    """Return the numbers behind a table's first column that a result file lacks."""
    name, _, more = kind.partition("; also ")
    values = [value for _, value in values_of(json.loads((HERE / "results" / name).read_text()))]
    allowed = set(re.findall(r"[\d.]+", more))
    return [
        text
        for line in lines
        for text in _numbers(line)
        if text not in allowed and not any(_is_shown_as(value, text) for value in values)
    ]


def keys_of(line: str, kind: str) -> str:
    """Say where the numbers of a row of a hand-written table are in its result file; the first place of several."""
    name = kind.partition(";")[0]
    if not name.endswith(".json"):
        return kind
    values = list(values_of(json.loads((HERE / "results" / name).read_text())))
    found = []
    for text in dict.fromkeys(_numbers(line)):
        places = [keys for keys, value in values if _is_shown_as(value, text)]
        if places:
            found.append(f"{text} at {places[0]}" + (f" and {len(places) - 1} more" if len(places) > 1 else ""))
    return f"{name}: {'; '.join(found)}"


def trace(path: Path, parts: dict[str, Part]) -> Iterator[Trace]:
    """Yield where a page's numbers come from."""
    name = path.relative_to(ROOT).as_posix()
    text = path.read_text(encoding="utf-8")
    if path.name != "README.md" and path != NOTEBOOK:
        for figure in prose.figures(name, text):
            yield Trace(name, f"line {figure.line}", figure.source, 1, figure.text)
    if path == performance_tables.TABLES_PAGE:
        same = text == performance_tables.tables_page()
        count = sum(len(_NUMBER.findall(line)) for line in text.splitlines() if line.startswith("|"))
        yield Trace(
            name, "whole page", "performance_tables.py" if same else "", count, "" if same else "the page is out of date"
        )
        return
    for block in pages.blocks_of(text):
        part = parts.get(block.name)
        source = part.source if part and part.text == block.text else ""
        yield Trace(name, block.name, source, len(_NUMBER.findall(block.text)), "not what its script makes")
    if path == NOTEBOOK:
        kind = _KIND.search(text)
        count = sum(len(_NUMBER.findall(line)) for line in text.splitlines() if line.startswith("|"))
        yield Trace(name, "whole page", "notebook" if kind and kind[1] == "notebook" else "", count, "the head says nothing")
        return
    # blank what is generated and code, and keep the lines' numbers
    for block in reversed(list(pages.blocks_of(text))):
        text = text[: block.start] + re.sub(r"[^\n]", "", block.text) + text[block.stop :]
    text = re.sub(r"^```.*?^```$", lambda match: re.sub(r"[^\n]", "", match[0]), text, flags=re.DOTALL | re.MULTILINE)
    yield from _tables(name, text)
    sentences = re.sub(r"^\|.*$", "", text, flags=re.MULTILINE)
    for match in re.finditer(r"\*\*(.+?)\*\*", sentences, re.DOTALL):
        if _FIGURE.search(match[1]):
            yield Trace(name, f"line {sentences[: match.start()].count(chr(10)) + 1}", "", 1, match[0])
    if path.name == "README.md":
        allowed = set(DEFINED)
        words = " ".join(re.sub(r"`[^`]*`|\]\([^)]*\)", "", sentences).split())
        for match in _FIGURE.finditer(words):
            if match[0] not in allowed:
                yield Trace(name, "text", "", 1, words[max(0, match.start() - 30) : match.end() + 30])


DEFINED = ("3.10", "2.11", "3.6", "2.4", "4.53", "2.0", "20", "40", "10", "1", "1.5")
"""Figures in README's text that are versions, the paper's, or what decibels mean; measured ones are generated."""


def _tables(name: str, text: str) -> Iterator[Trace]:
    """Yield the hand-written tables of a page."""
    lines = text.splitlines()
    index = 0
    while index < len(lines):
        if not lines[index].startswith("|"):
            index += 1
            continue
        start = index
        while index < len(lines) and lines[index].startswith("|"):
            index += 1
        table = lines[start:index]
        count = sum(len(_NUMBER.findall(re.sub(r"`[^`]*`|\]\([^)]*\)", "", line))) for line in table)
        if not count:
            continue
        before = "\n".join(lines[max(0, start - 2) : start])
        kinds = _KIND.findall(before)
        kind = kinds[-1] if kinds else ""
        example = table[0]
        if kind.partition(";")[0].endswith(".json"):
            missing = unsupported(table, kind)
            kind, example = ("", f"not in the file: {', '.join(missing)}") if missing else (kind, "")
        elif kind not in ("definitions", "published", "once"):
            kind = ""
        yield Trace(name, f"line {start + 1}", kind, count, example)


def traces() -> list[Trace]:
    """Return where the numbers of every page come from."""
    parts = made()
    return [found for path in PAGES for found in trace(path, parts)]


def declared_tables() -> dict[str, declared.Table]:
    """Return the tables between markers that are declared, by the markers' names."""
    return {name: table for maker in MAKERS if hasattr(maker, "PARTS") for name, table in maker.PARTS.tables.items()}


def _generated(path: Path) -> Iterator[tuple[int, list[str], declared.Table | None, str]]:
    """Yield the generated parts of a page: the line they begin in, their lines, their declaration and their source."""
    text = path.read_text(encoding="utf-8")
    if path == performance_tables.TABLES_PAGE:
        lines = text.splitlines()
        for section in performance_tables.SECTIONS:
            table = section.table.markdown()
            begin = lines.index(table[0], lines.index(f"## {section.title}"))
            yield (
                begin + 1,
                table,
                section.table,
                f"performance_tables.py: {', '.join(f'{file}.json' for file in section.files)}",
            )
        return
    parts, tables = made(), declared_tables()
    for block in pages.blocks_of(text):
        source = parts[block.name].source if block.name in parts else ""
        yield text[: block.start].count("\n") + 1, block.text.splitlines(), tables.get(block.name), source


def rows_with(path: Path, wanted: str) -> Iterator[tuple[int, str, str]]:
    """Yield the rows of a page's tables that hold a text: the line, the row, and where it comes from."""
    covered: dict[int, str] = {}
    for begin, lines, table, source in _generated(path):
        # behind the two lines of the heading
        origins = dict(enumerate(table.origins(), 2)) if table else {}
        for place in range(len(lines)):
            covered[begin + place] = origins.get(place) or source
    places = list(trace(path, made()))
    kind = ""
    for place, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        found = next((item.source for item in places if item.place == f"line {place}"), None)
        kind = found if found is not None else kind
        if not line.startswith("|"):
            kind = "" if not line.strip() else kind
        elif wanted in line and not set(line) <= set("|- "):
            by_hand = keys_of(line, kind) if kind else ""
            yield place, line, covered.get(place) or by_hand or "whole page: a notebook" * (path == NOTEBOOK) or "nothing says"


def tell(page: str, wanted: str) -> int:
    """Print where the rows of a page with a text come from; return 1 if there are none, 2 if there is no such page."""
    path = next((path for path in PAGES if path.resolve() in (Path(page).resolve(), (ROOT / page).resolve())), None)
    if path is None:
        names = ", ".join(path.relative_to(ROOT).as_posix() for path in PAGES)
        print(f"page must be one of {names}, got {page!r}", file=sys.stderr)
        return 2
    found = list(rows_with(path, wanted))
    for place, line, source in found:
        print(f"{path.relative_to(ROOT).as_posix()}:{place}: {line}\n    {source}")
    if not found:
        print(f"no row of a table of {page} holds {wanted!r}", file=sys.stderr)
    return 0 if found else 1


def main() -> int:
    """Print how many numbers come from where; return 1 if some come from nowhere."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("page", nargs="?", metavar="PAGE", help="a page, for instance docs/performance/tables.md")
    parser.add_argument("row", nargs="?", metavar="ROW", help="a text in the rows asked for")
    given = parser.parse_args()
    if given.page is not None:
        if given.row is None:
            parser.error("PAGE needs a ROW: a text in the rows asked for")
        return tell(given.page, given.row)
    found = traces()
    counted: collections.Counter[str] = collections.Counter()
    for item in found:
        kind = item.source.partition(";")[0] if item.source else "nowhere"
        counted[kind] += item.count
    for kind, count in counted.most_common():
        print(f"{count:6} {kind}")
    for item in found:
        if not item.source:
            print(f"{item.page}, {item.place}: {item.example}")
    return 1 if counted["nowhere"] else 0


if __name__ == "__main__":
    sys.exit(main())
