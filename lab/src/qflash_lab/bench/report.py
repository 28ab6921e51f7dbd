"""What a command that measures leaves behind: a record in JSON, its rows in CSV, a table, and perhaps a figure."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from . import figures, nvml, records, timers
from . import schema as col
from .console import table_console
from .schema import Row

SQNR = "20 log10(|ref| / |out - ref|) against float64 softmax attention on the inputs before quantisation"


class Report:
    """Rows and how they were measured, written whenever there are more: a run that is cut short leaves what it had.

    Attributes:
        record: what the JSON file holds: ``what``, ``environment``, the words given, and ``rows``.
        rows: of the record.
    """

    def __init__(
        self, name: str, what: str, device: torch.device, fields: Sequence[str], output: pathlib.Path | None, **words: Any
    ) -> None:
        """Begin a report.

        Args:
            name: of the files, without their suffix.
            what: the record holds.
            device: that is measured.
            fields: columns of the CSV file.
            output: folder of the files, made if it is not there; None to write none.
            words: more of the record, as ``timing``; ``rows`` stay last.
        """
        self._name, self._device, self._fields, self._output = name, device, fields, output
        self.rows: list[Row] = []
        self.record: dict[str, Any] = {"what": what, "environment": records.environment(device)} | words | {"rows": self.rows}
        self.console: Console = table_console()

    def begin(self) -> None:
        """Print the device and how times are taken."""
        self.console.print(f"{self.record['environment']['device']}. {self.record['timing']}.\n")

    def add(self, rows: Iterable[Row]) -> None:
        """Add rows, write the files, and give back what the rows' methods left in memory."""
        self.rows += rows
        timers.tidy(self._device)
        self.write()

    def write(self) -> None:
        """Write the files."""
        if self._output is not None:
            records.write_json(self._output / f"{self._name}.json", self.record)
            records.write_csv(self._output / f"{self._name}.csv", self.rows, self._fields)

    def finish(self, *tables: Table, draw: Callable[[], Any] | None = None) -> dict[str, Any]:
        """Print the tables, what failed, and where the files are; draw the figure; return the record."""
        if self._device.type == "cuda":
            self.record["environment"]["nvml_after"] = nvml.snapshot(self._device)
        for table in tables:
            self.console.print(table)
        self.say_failures()
        if self._output is not None:
            self.write()
            names = [f"{self._name}.json", f"{self._name}.csv"]
            missing = ""
            if draw is not None:
                try:
                    figures.write_figure(self._output, self._name, draw())
                    names += [f"{self._name}.png", f"{self._name}.svg"]
                except (ImportError, ValueError) as error:
                    missing = f"; no plot: {error}"
            self.console.print(f"Written to {self._output}: {', '.join(names)}{missing}")
        return self.record

    def say_failures(self) -> None:
        """Print the rows that failed, with the reason."""
        for row in self.rows:
            if row.get(col.ERROR):
                about = (col.full_label(row), row.get(col.MODE), row.get(col.RECIPE), row.get(col.METHOD))
                text = ", ".join(part for part in about if part)
                self.console.print(f"failed: {text}: {row[col.ERROR]}", markup=False, soft_wrap=True)
