"""Print random numbers of README and docs, whose sources a reader then looks up: half from tables, half from prose.

``python benchmarks/draw_numbers.py --seed 74 --count 60`` prints page, line and text of each: in tables
those between markers or of a result file, in prose decimals and figures with a unit.
"""

from __future__ import annotations

import argparse
import random
import re
from pathlib import Path
from typing import NamedTuple

import pages
import trace_numbers


class Drawn(NamedTuple):
    """A number of a page.

    Attributes:
        page: from the repository's root.
        line: of the page.
        number: as it stands there.
        text: what is around it.
    """

    page: str
    line: int
    number: str
    text: str


def in_prose(path: Path) -> list[Drawn]:
    """Return the figures of a page's prose."""
    text = path.read_text(encoding="utf-8")
    name, prose = path.relative_to(trace_numbers.ROOT).as_posix(), pages.prose_of(text)
    return [
        Drawn(
            name,
            prose.count("\n", 0, found.start()) + 1,
            found[0],
            " ".join(text[max(0, found.start() - 50) : found.end() + 20].split()),
        )
        for found in trace_numbers.prose.FIGURE.finditer(prose)
    ]


def in_tables(path: Path) -> list[Drawn]:
    """Return the numbers of a page's tables of measurements, without the first column."""
    name, found, measured = (
        path.relative_to(trace_numbers.ROOT).as_posix(),
        [],
        path == trace_numbers.performance_tables.TABLES_PAGE,
    )
    whole = measured
    for place, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("<!--"):
            measured = whole or bool(re.match(r"<!-- (?!numbers|end)|<!-- numbers: \S+\.json", line))
        elif line.startswith("|") and measured and not set(line) <= set("|- "):
            found += [Drawn(name, place, number, line) for number in trace_numbers._numbers(line)]
    return found


def draw(seed: int, count: int) -> list[Drawn]:
    """Return ``count`` numbers, half from tables and half from prose, by page and line."""
    chosen = random.Random(seed)
    drawn: list[Drawn] = []
    for kind, size in ((in_tables, count - count // 2), (in_prose, count // 2)):
        every = [each for path in pages.PAGES for each in kind(path)]
        drawn += sorted(chosen.sample(every, size))
    return drawn


def main() -> None:
    """Print the numbers."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seed", type=int, default=74)
    parser.add_argument("--count", type=int, default=60)
    given = parser.parse_args()
    for place, each in enumerate(draw(given.seed, given.count), 1):
        print(f"{place}. {each.page}:{each.line}: {each.number}: {each.text}")


if __name__ == "__main__":
    main()
