"""Collect what tests/network/test_published_configurations.py found, and write the table of docs/models.md.

``pytest --all -o junit_family=xunit1 --junitxml=FILE tests/network/test_published_configurations.py``, then
``python benchmarks/published_configurations.py FILE ...``; without files it writes the table alone.
"""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import declared

RESULTS = Path(__file__).resolve().parent / "results" / "published_configurations.json"


def read_reports(text: str) -> dict[str, dict[str, Any]]:
    """Return what each test that passed has recorded in pytest's XML file, by the part of its name in brackets.

    An encoder of texts, whose input is (tokens, vocabulary), has "texts" behind the name.
    """
    found = {}
    for case in ElementTree.fromstring(text).iter("testcase"):
        for each in case.iter("property"):
            if each.get("name") == "report" and case.find("failure") is None:
                report = json.loads(each.get("value", ""))
                name = str(case.get("name")).partition("[")[2].rstrip("]")
                found[name if len(report["input"]) == 3 else f"{name}, texts"] = report
    return found


def table() -> list[str]:
    """Return the table as lines of the page."""
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    lines = ["| Configuration | Input | Output: dB | float32 weights, MB | File, MB | ONNX, MB |", "|---|---|---|---|---|---|"]
    for name, row in sorted(found["configurations"].items()):
        sizes = row["input"]
        given = f"{sizes[0]} tokens" if len(sizes) == 2 else f"{sizes[1]} x {sizes[2]}"
        outputs = ", ".join(f"{label}: {value:.1f}" for label, value in row["sqnr_db"].items())
        files = " | ".join(f"{row[key] / 1e6:.1f}" for key in ("file_bytes", "onnx_bytes"))
        lines.append(f"| {name} | {given} | {outputs} | {row['float_mb']:.1f} | {files} |")
    return lines


PARTS = declared.Parts(texts={"published:configurations": table}, reads=[RESULTS.name])


def main(paths: list[str]) -> None:
    found = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {"configurations": {}}
    for path in paths:
        found["configurations"] |= read_reports(Path(path).read_text(encoding="utf-8"))
        found["date"] = datetime.date.today().isoformat()
    if paths:
        RESULTS.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    PARTS.write()


if __name__ == "__main__":
    main(sys.argv[1:])
