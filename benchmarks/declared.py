"""Tables of the pages as declarations: which rows of which result files, which columns, in which form.

A table knows where each of its lines comes from, which ``python benchmarks/trace_numbers.py PAGE ROW`` prints.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas

import pages
from qflash_lab.bench import schema as col
from qflash_lab.bench import tables
from qflash_lab.bench.schema import Row
from qflash_lab.bench.tables import Column, digits, number

RESULTS = Path(__file__).resolve().parent / "results"
FILE = "file"
"""The key under which a row says which result file it is of."""


@functools.cache
def record(name: str) -> Any:
    """Return a result file, by its name in ``results`` without the suffix."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def rows(*names: str, of: str = "rows") -> list[Row]:
    """Return the rows of result files, each with its file."""
    return [row | {FILE: f"{name}.json"} for name in names for row in record(name)[of]]


def recorded(path: Path) -> list[Row]:
    """Return the rows of a result file, none if it is not there yet."""
    return list(json.loads(path.read_text(encoding="utf-8"))["rows"]) if path.is_file() else []


def keep(path: Path, made: Iterable[Row], *keys: str, order: Callable[[Row], Any] | None = None, **head: Any) -> None:
    """Put rows into a result file, in place of those that are alike in some columns.

    Args:
        path: of the file, which is replaced as a whole.
        made: the rows.
        keys: the columns.
        order: by which all rows are sorted; as they come if None.
        head: what stands in the file before the rows.
    """
    made = list(made)
    done = {tuple(row[key] for key in keys) for row in made}
    found = [row for row in recorded(path) if tuple(row[key] for key in keys) not in done] + made
    if order is not None:
        found.sort(key=order)
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps({**head, "rows": found}, indent=1) + "\n", encoding="utf-8")
    beside.replace(path)


class Group(dict[str, Row]):
    """The rows of one problem, by method."""


def groups(found: Iterable[Row], *keys: str, by: Callable[[Row], str] = lambda row: str(row[col.METHOD])) -> list[Group]:
    """Return rows by problem, in the order in which problems come; of two rows of a method the last stays.

    Args:
        found: the rows.
        keys: columns that tell problems apart.
        by: what a row is called in its group.
    """
    parts: dict[tuple[Any, ...], Group] = {}
    for row in found:
        parts.setdefault(tuple(row.get(key) for key in keys), Group())[by(row)] = row
    return list(parts.values())


def any_row(line: Any) -> Any:
    """Return the row that a line is made from, or one of them."""
    return next(iter(line.values())) if isinstance(line, Group) else line


def one(column: str) -> Callable[[Any], Any]:
    """Return what gives a column that the rows of a line share."""
    return lambda line: any_row(line)[column]


@dataclasses.dataclass(frozen=True)
class Of:
    """A column of a method's row."""

    method: str
    column: str = col.MEDIAN_US

    def __call__(self, group: Group) -> Any:
        """Return the value; None where the method has no row."""
        return group.get(self.method, {}).get(self.column)

    def uses(self) -> list[Of]:
        """Return what it is made from."""
        return [self]


@dataclasses.dataclass(frozen=True)
class Extreme:
    """The least or the greatest figure of some methods."""

    methods: Sequence[str]
    column: str = col.MEDIAN_US
    choose: Callable[[Iterable[Any]], Any] = min

    def __call__(self, group: Group) -> Any:
        """Return the value of those methods that have one; None if none has."""
        found = [value for of in self.uses() if (value := of(group)) is not None]
        return self.choose(found) if found else None

    def uses(self) -> list[Of]:
        """Return what it is made from."""
        return [Of(method, self.column) for method in self.methods]


@dataclasses.dataclass(frozen=True)
class Quotient:
    """One figure divided by another."""

    above: Of | Extreme
    below: Of | Extreme

    def __call__(self, group: Group) -> Any:
        """Return the quotient; None where there is nothing to divide."""
        above, below = self.above(group), self.below(group)
        return above / below if above and below else None

    def uses(self) -> list[Of]:
        """Return what it is made from."""
        return [*self.above.uses(), *self.below.uses()]


def against(methods: Sequence[str], ours: str, column: str = col.MEDIAN_US) -> Quotient:
    """Return the least of some methods' figures divided by one method's."""
    return Quotient(Extreme(methods, column), Of(ours, column))


def quotients(found: Iterable[Group], methods: Sequence[str], ours: str, column: str = col.MEDIAN_US) -> list[float]:
    """Return :func:`against` of every group.

    Raises:
        ValueError: a group lacks the method, or all that it is compared with.
    """
    values = []
    for group in found:
        values.append(against(methods, ours, column)(group))
        if values[-1] is None:
            raise ValueError(f"no {column} of {ours} or of {', '.join(methods)} in {origin(group, ())}")
    return values


def time(heading: str, method: str, count: int = 2) -> Column:
    """Return the column of a method's times."""
    return Column(heading, Of(method), digits(count))


class Heading(str):
    """A line that names the lines below it."""


class Table(NamedTuple):
    """A table of a page.

    Attributes:
        lines: makes what its lines are made from: rows, groups of them, headings, or something else with :attr:`about`.
        columns: of the table; or what makes them of the lines.
        about: says of a line which file it is from; :func:`origin` if None.
    """

    lines: Callable[[], Sequence[Any]]
    columns: Sequence[Column] | Callable[[Sequence[Any]], Sequence[Column]]
    about: Callable[[Any], str] | None = None

    def _columns(self, lines: Sequence[Any]) -> Sequence[Column]:
        return self.columns(lines) if callable(self.columns) else self.columns

    def markdown(self) -> list[str]:
        """Return the lines of the page."""
        lines = self.lines()
        columns = self._columns(lines)
        frame = tables.lay_out([line for line in lines if not isinstance(line, Heading)], columns)
        cells, empty = iter(frame.values.tolist()), [""] * (len(columns) - 1)
        body = [[f"**{line}**", *empty] if isinstance(line, Heading) else next(cells) for line in lines]
        return tables.markdown(pandas.DataFrame(body, columns=frame.columns))

    def files(self) -> list[str]:
        """Return the result files that rows are of."""
        rows = (row for line in self.lines() for row in (line.values() if isinstance(line, Group) else [line]))
        return sorted({row[FILE] for row in rows if isinstance(row, dict) and FILE in row})

    def origins(self) -> list[str]:
        """Return where each line behind the two of the heading comes from."""
        lines = self.lines()
        columns = self._columns(lines)
        about = self.about or functools.partial(origin, columns=columns)
        return ["" if isinstance(line, Heading) else about(line) for line in lines]


class Parts(NamedTuple):
    """The parts of pages that a script makes.

    Attributes:
        tables: by marker.
        texts: what makes other lines, by marker.
        reads: names of the result files behind the texts, or what returns them.
    """

    tables: Mapping[str, Table] = {}
    texts: Mapping[str, Callable[[], list[str]]] = {}
    reads: Sequence[str] | Callable[[], Sequence[str]] = ()

    def blocks(self) -> dict[str, list[str]]:
        """Return the lines between markers, by the markers' names."""
        return {name: table.markdown() for name, table in self.tables.items()} | {
            name: text() for name, text in self.texts.items()
        }

    def files(self) -> list[str]:
        """Return the names of the result files that the texts, and tables that do not say so themselves, are made of."""
        return sorted(set(self.reads() if callable(self.reads) else self.reads))

    def write(self) -> None:
        """Write the parts, from the results that are there now."""
        record.cache_clear()
        pages.write(self.blocks())


def parser(script: str | None) -> argparse.ArgumentParser:
    """Return the parser of a script that measures and then writes its parts, with ``--tables``.

    Args:
        script: its documentation.
    """
    made = argparse.ArgumentParser(description=script, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--tables", action="store_true", help="measure nothing: only write the pages' tables again")
    return made


def origin(line: Any, columns: Sequence[Column]) -> str:
    """Say where a line of a table comes from: the file, what tells its rows apart, and which of their keys are shown."""
    row = any_row(line)
    if not isinstance(row, dict) or FILE not in row:
        return ""
    told = (col.WORKLOAD, col.MODEL, col.LAYER, col.LABEL, col.GROUP, col.BATCH, col.SHAPE, col.BIAS, col.INPUT, col.RECIPE)
    every = list(line.values()) if isinstance(line, Group) else [row]
    keys = [f"{name} = {row[name]}" for name in told if row.get(name) not in (None, False) and _alike(every, name)]
    if not isinstance(line, Group):
        if row.get(col.METHOD):
            keys.append(f"{col.METHOD} = {row[col.METHOD]}")
        shown = [column.value for column in columns if isinstance(column.value, str) and column.value not in told]
        return f"{row[FILE]}: {', '.join(keys)}: {', '.join(shown)}"
    used: dict[str, dict[str, None]] = {}
    for column in columns:
        if isinstance(column.value, Of | Extreme | Quotient):
            for of in column.value.uses():
                if of.method in line:
                    used.setdefault(of.method, {})[of.column] = None
    files = ", ".join(dict.fromkeys(each[FILE] for each in every))
    shown = [f"{', '.join(of)} of {name}" for name, of in used.items()]
    return f"{files}: {', '.join(keys)}: {'; '.join(shown)}"


def _alike(found: Sequence[Row], key: str) -> bool:
    return all(row.get(key) == found[0].get(key) for row in found)


def blank(form: str) -> Callable[[Any], str]:
    """Return a form that leaves the cell of a missing figure empty."""
    return lambda value: "" if value is None else format(value, form)


def scaled(factor: float, form: str) -> Callable[[float], str]:
    """Return the form of figures that are shown in another unit."""
    return lambda value: format(value * factor, form)


def span(values: Iterable[float], count: int = 2) -> str:
    """Format the least and the greatest of some figures."""
    ordered = sorted(values)
    return " to ".join(dict.fromkeys(number(value, count) for value in (ordered[0], ordered[-1])))
