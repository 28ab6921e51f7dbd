"""Tables of results: declared as columns, laid out once, and rendered for the console, a page of Markdown or one of HTML."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import pandas
from rich.table import Table

from . import html
from . import schema as col
from .schema import Row

Form = str | Callable[[Any], str]


def number(value: float | str | None, digits: int = 2) -> str:
    """Return a figure as tables show it: without digits from 1000 on, ``-`` for one that is missing."""
    if value is None or isinstance(value, str):
        return value or "-"
    if isinstance(value, float) and math.isnan(value):
        return "-"
    return f"{value:.0f}" if math.isfinite(value) and abs(value) >= 1000 else f"{value:.{digits}f}"


class Column(NamedTuple):
    """One column of a table.

    Attributes:
        heading: above it.
        value: a column of the rows, or what makes the cell's value of a row.
        form: a format such as ``".1f"``, or what makes text of the value; :func:`number` if empty, for numbers.
        left: set left, as names are.
    """

    heading: str
    value: str | Callable[[Any], Any]
    form: Form = ""
    left: bool = False

    def cell(self, row: Any) -> str:
        """Return a row's cell."""
        value = self.value(row) if callable(self.value) else row.get(self.value)
        missing = value is None or (isinstance(value, float) and math.isnan(value))
        if callable(self.form):
            return self.form(value)
        if isinstance(value, str) or missing:
            return "-" if missing else value
        return format(value, self.form) if self.form else number(value)


def names(heading: str, value: str | Callable[[Any], Any]) -> Column:
    """Return a column of names, set left and empty where there is none."""
    return Column(heading, value, lambda text: "" if text is None else str(text), left=True)


def digits(count: int) -> Form:
    """Return the form of figures with so many digits, see :func:`number`."""
    return lambda value: number(value, count)


def between(low: str, high: str, count: int = 2) -> Callable[[Row], str | None]:
    """Return what makes a cell of two columns, as ``1.00 - 2.00``."""

    def cell(row: Row) -> str | None:
        return None if row[low] is None else f"{number(row[low], count)} - {number(row[high], count)}"

    return cell


quartiles = between(col.Q1_US, col.Q3_US)


def lay_out(rows: Sequence[Any], columns: Sequence[Column], groups: int = 0) -> pandas.DataFrame:
    """Return a table's cells as text.

    Args:
        rows: rows of results. One with an error and no figure says "failed" in the first column of figures.
        columns: of the table.
        groups: so many first columns are empty where they repeat the row above.
    """
    lines: list[list[str]] = []
    before: list[str] = []
    for row in rows:
        failed = isinstance(row, dict) and bool(row.get(col.ERROR))
        cells, said = [], False
        for column in columns:
            text = column.cell(row)
            if failed and not column.left and text == "-":
                text, said = "" if said else "failed", True
            cells.append(text)
        here = cells[:groups]
        if groups and here == before:
            cells[:groups] = [""] * groups
        before = here
        lines.append(cells)
    return pandas.DataFrame(lines, columns=[column.heading for column in columns], dtype=str)


def markdown(frame: pandas.DataFrame) -> list[str]:
    """Return the lines of a table in Markdown."""

    def line(cells: Iterable[str]) -> str:
        return "|" + "".join(f" {cell} |" if cell else " |" for cell in cells)

    return [line(frame.columns), "|" + "---|" * len(frame.columns), *map(line, frame.itertuples(index=False, name=None))]


def console(frame: pandas.DataFrame, title: str, left: int = 1, groups: int = 0, fold: bool = False) -> Table:
    """Return a table for the console.

    Args:
        frame: from :func:`lay_out`.
        title: above it.
        left: so many first columns are set left.
        groups: of :func:`lay_out`; a line is drawn where they change.
        fold: headings of figures may be broken into lines.
    """
    table = Table(title=title, title_justify="left", caption_justify="left")
    for place, heading in enumerate(frame.columns):
        table.add_column(heading, justify="left" if place < left else "right", no_wrap=place < left or not fold)
    for place, cells in enumerate(frame.itertuples(index=False, name=None)):
        if groups and place and any(cells[:groups]):
            table.add_section()
        table.add_row(*cells)
    return table


def page(frame: pandas.DataFrame, labels: int = 2) -> str:
    """Return a table in HTML, see :func:`qflash_lab.bench.html.table`."""
    return html.table(list(frame.columns), [list(cells) for cells in frame.itertuples(index=False, name=None)], labels)


def render(rows: Sequence[Row], columns: Sequence[Column], title: str, groups: int = 0) -> Table:
    """Return rows as a table for the console."""
    left = next((place for place, column in enumerate(columns) if not column.left), len(columns))
    return console(lay_out(rows, columns, groups), title, left, groups)
