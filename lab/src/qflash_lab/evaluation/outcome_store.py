"""What became of every image under one method: kept in files as a run goes, so that it can be taken up again."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from qflash.paths import write_whole

MOST_GUESSES = 5
"""Predictions kept of an image: Top-5."""
LOSS_DIGITS = 6
"""Digits kept of a loss, in a file as in a run: one that is taken up again comes to the same numbers."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of one image.

    Attributes:
        index: its place in the whole set.
        id: its path below the image folder, or its place in the split.
        label: its class.
        predictions: up to five classes, most likely first; empty where the logits were not finite.
        loss: cross entropy of the label in nats, rounded to :data:`LOSS_DIGITS`; NaN where the logits were not finite.
    """

    index: int
    id: str
    label: int
    predictions: tuple[int, ...]
    loss: float

    @property
    def top1(self) -> bool:
        """Whether the first prediction is right."""
        return self.predictions[:1] == (self.label,)

    @property
    def top5(self) -> bool:
        """Whether one of the predictions is right."""
        return self.label in self.predictions


class Store:
    """Per-image outcomes in one folder: ``run.json`` says of which run, ``METHOD.csv`` is a finished method.

    While a method runs, every process appends whole batches to a ``METHOD.part-*.csv`` of its own.

    Args:
        folder: made by :meth:`open`.
        guesses: predictions kept of an image.
        methods: every name a file may have; only such files are ever removed.
    """

    def __init__(self, folder: Path, guesses: int, methods: Iterable[str] = ()) -> None:
        self.folder = folder
        self.methods = tuple(methods)
        self.header = ["index", "id", "label", *(f"top{k + 1}" for k in range(guesses)), "correct1", "correct5", "loss"]

    def open(self, fingerprint: dict[str, Any], overwrite: bool) -> None:
        """Make the folder, or make sure that what it holds belongs to this run.

        Raises:
            ValueError: it holds another run's results, and ``overwrite`` is not set.
        """
        record = self.folder / "run.json"
        # what was not written by this command stays
        written = [record, *(path for name in self.methods for path in (self._final(name), *self._parts(name)))]
        if overwrite:
            for path in written:
                path.unlink(missing_ok=True)
        if record.exists():
            before = json.loads(record.read_text(encoding="utf-8"))
            differing = sorted(key for key in before.keys() | fingerprint.keys() if before.get(key) != fingerprint.get(key))
            if differing:
                changes = "; ".join(f"{key} was {before.get(key)!r} and is {fingerprint.get(key)!r}" for key in differing)
                raise ValueError(
                    f"{self.folder} holds the results of another run: {changes}. "
                    "Give another output folder, or overwrite to start anew"
                )
            return
        if any(path.exists() for path in written):
            raise ValueError(f"{self.folder} holds results without a run.json that says whose; overwrite starts anew")
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(record, json.dumps(fingerprint, indent=1) + "\n")

    def _final(self, method: str) -> Path:
        return self.folder / f"{method}.csv"

    def _parts(self, method: str) -> list[Path]:
        return sorted(self.folder.glob(f"{method}.part-*.csv"))

    def load(self, method: str) -> list[Outcome]:
        """Return what is there of ``method``, finished or not; a line cut off in writing is left out."""
        paths = [self._final(method)] if self._final(method).exists() else self._parts(method)
        outcomes: dict[int, Outcome] = {}
        for path in paths:
            text = path.read_text(encoding="utf-8")
            for row in list(csv.reader(text[: text.rfind("\n") + 1].splitlines()))[1:]:
                predictions = tuple(int(cell) for cell in row[3:-3] if cell)
                outcomes[int(row[0])] = Outcome(int(row[0]), row[1], int(row[2]), predictions, float(row[-1]))
        return list(outcomes.values())

    def appender(self, method: str, rank: int) -> _Appender:
        """Open this process's part of ``method``."""
        return _Appender(self.folder / f"{method}.part-{rank}.csv", self.header, self._row)

    def consolidate(self, method: str, outcomes: Sequence[Outcome], finished: bool) -> None:
        """Replace the parts of ``method`` by one file that holds ``outcomes``, in the order of the images."""
        parts = self._parts(method)
        rest = self.folder / f"{method}.part-kept.csv"
        lines = [self.header, *(self._row(outcome) for outcome in sorted(outcomes, key=lambda o: o.index))]
        write_whole(self._final(method) if finished else rest, to_csv(lines))
        if not finished:
            self._final(method).unlink(missing_ok=True)
        for path in parts:
            if finished or path != rest:
                path.unlink()

    def _row(self, outcome: Outcome) -> list[Any]:
        guesses = len(self.header) - 6
        cells = [*outcome.predictions, *[""] * (guesses - len(outcome.predictions))]
        return [
            outcome.index,
            outcome.id,
            outcome.label,
            *cells,
            int(outcome.top1),
            int(outcome.top5),
            f"{outcome.loss:.{LOSS_DIGITS}g}",
        ]


class _Appender:
    """Writes batches to the end of a file, each flushed as a whole."""

    def __init__(self, path: Path, header: list[str], row: Callable[[Outcome], list[Any]]) -> None:
        self._row = row
        # consolidate() has removed the parts of a former run, so that this one starts with its header
        self._file = path.open("w", encoding="utf-8", newline="")
        self._file.write(to_csv([header]))

    def __enter__(self) -> _Appender:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, outcomes: Iterable[Outcome]) -> None:
        self._file.write(to_csv([self._row(outcome) for outcome in outcomes]))
        self._file.flush()


def to_csv(rows: Iterable[Sequence[Any]]) -> str:
    """Lay rows of cells out as CSV."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def load_outcomes(path: Path | str) -> list[Outcome]:
    """Read the per-image results of one finished method (``MODEL/METHOD.csv`` in the output folder).

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it holds something else.
    """
    path = Path(path)
    with path.open(encoding="utf-8") as file:
        header = file.readline().strip()
        if not (header.startswith("index,id,label,top1") and header.endswith(",loss")):
            raise ValueError(f"path must be a file of per-image results, got {path}")
    return Store(path.parent, MOST_GUESSES).load(path.name.removesuffix(".csv"))
