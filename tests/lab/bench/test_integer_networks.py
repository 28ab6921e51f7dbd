"""benchmarks/integer_networks.py: what it keeps of earlier results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from helpers import load_benchmark


def test_rows_of_other_libraries_stay_where_this_one_is_measured_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    integer_networks = load_benchmark("integer_networks")
    monkeypatch.setattr(integer_networks, "RESULTS", tmp_path / "results.json")

    def row(network: str, method: str, decibels: float) -> dict[str, Any]:
        return {"network": network, "method": method, "sqnr_db": decibels}

    for network in ("a", "b"):
        rows = [row(network, method, 1.0) for method in ("float32", "QFlash integer network", "torchao int8 static")]
        integer_networks.write(rows, "CPU", {})
    integer_networks.write([row("a", "float32", 2.0), row("a", "QFlash integer network", 2.0)], "CPU", {}, ours_alone=True)
    found = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert [(each["network"], each["sqnr_db"]) for each in found] == [("a", 2.0), ("a", 2.0), ("a", 1.0), *[("b", 1.0)] * 3]
    integer_networks.write([row("a", "float32", 3.0)], "CPU", {})
    assert [each["sqnr_db"] for each in json.loads((tmp_path / "results.json").read_text())["rows"]] == [3.0, 1.0, 1.0, 1.0]
