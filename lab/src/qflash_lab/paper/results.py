"""Results that commands have written: reading them, and finding rows by the paper's names."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence
from typing import Any

from ..bench.workloads import WORKLOADS
from . import paper_results

_KINDS = {
    "latency of attention with its accuracy": "bench",
    "energy of one attention call": "energy",
    "tensor-core utilisation of one attention call": "profile",
    "ablation of the integer attention": "ablate",
    "SQNR and MSE of attention methods": "accuracy",
    "the paper authors' public kernel": "authors",
    "float instructions in the machine code of the paper authors' public kernel": "authors code",
}

Record = dict[str, Any]
Found = dict[str, list[Record]]


def kind_of(record: Any) -> str | None:
    """Return which command wrote a result, by its ``what`` (or its shape), or None."""
    if isinstance(record, list):
        return "verify" if record and isinstance(record[0], dict) and "float_instructions" in record[0] else None
    if not isinstance(record, dict):
        return None
    if "conditions" in record and "models" in record:
        return "evaluate"
    what = str(record.get("what", ""))
    return next((kind for beginning, kind in _KINDS.items() if what.startswith(beginning)), None)


def read_results(folders: Sequence[pathlib.Path]) -> Found:
    """Read every known result in ``folders``, newest first within a kind.

    Raises:
        ValueError: a folder is not there, or a file is not JSON.
    """
    found: Found = {}
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"results must be a folder, got {str(folder)!r}")
        for path in sorted(folder.glob("*.json")):
            try:
                record = json.loads(path.read_text(encoding="utf-8"))
            except json.JSONDecodeError as error:
                raise ValueError(f"{path} is not JSON: {error}") from error
            kind = kind_of(record)
            if kind is not None:
                record = {"rows": record} if isinstance(record, list) else record
                found.setdefault(kind, []).append(record | {"file": path.name})
    for records in found.values():
        records.sort(key=time_of, reverse=True)
    return found


def time_of(record: Record) -> str:
    """Return when a result was measured, as it says."""
    place = record.get("environment") or record.get("conditions") or record
    return str(place.get("date", "no date"))


def date_of(record: Record) -> str:
    """Return the day of a result."""
    return time_of(record)[:10]


def device_of(record: Record) -> str:
    """Return what a result was measured on."""
    place = record.get("environment") or record.get("conditions") or record
    return str(place.get("device", "?"))


def on_gpu(record: Record) -> bool:
    """Tell whether a result was measured on a GPU."""
    return record.get("environment", {}).get("device_type") == "cuda"


def where_of(record: Record | None) -> str:
    """Return device and day of a result, or nothing."""
    return "" if record is None else f"{device_of(record)}, {date_of(record)}"


def row_of_method(rows: Sequence[Record], method: str, **wanted: Any) -> Record | None:
    """Return the row of a method of the paper in which all ``wanted`` fields agree and that did not fail."""
    for name in paper_results.METHODS[method]:
        for row in rows:
            if row["method"] == name and not row.get("error") and all(row.get(key) == x for key, x in wanted.items()):
                return row
    return None


def accuracy_record(found: Found) -> Record | None:
    """Return the newest result of ``qflash-lab accuracy``, of those on the paper's inputs if there are any."""
    records = found.get("accuracy", [])
    paper = [record for record in records if any(row["input"] == "paper" for row in record["rows"])]
    return next(iter(paper or records), None)


def _paper_cases(record: Record) -> int:
    """Return how many of the paper's workloads, batches and methods a result has."""
    names = {workload.name for workload in WORKLOADS}
    methods = {name for names_of in paper_results.METHODS.values() for name in names_of}
    cases = {(row["workload"], row.get("batch"), row["method"]) for row in record["rows"] if row.get("workload") in names}
    return sum(method in methods for *_, method in cases)


def gpu_rows(found: Found, kind: str) -> tuple[list[Record], Record | None]:
    """Return the rows of a kind's results on the GPU that was measured last, and the record of its main run.

    That is the run of most of the paper's workloads, batches and methods, the newest of several; what it lacks other runs of
    that GPU fill. Ratios are so of one run where one has both methods. Other GPUs are left out.
    """
    records = [record for record in found.get(kind, []) if on_gpu(record)]
    records = [record for record in records if device_of(record) == device_of(records[0])]
    records.sort(key=_paper_cases, reverse=True)
    return [row for record in records for row in record["rows"]], records[0] if records else None
