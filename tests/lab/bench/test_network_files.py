"""``benchmarks/export_times.py`` and ``benchmarks/tosa_networks.py`` on a small network: rows, a run that goes on, tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import qflash
from helpers import load_benchmark
from small_networks import build, draw_images

onnx = pytest.importorskip("onnx")

export_times = load_benchmark("export_times")
tosa_networks = load_benchmark("tosa_networks")


def test_rows_take_the_place_of_those_that_are_alike(tmp_path: Path) -> None:
    keep, path = tosa_networks.declared.keep, tmp_path / "rows.json"
    keep(path, [{"model": "b", "batch": 1, "x": 1}, {"model": "a", "batch": 1, "x": 2}], "model", "batch", what="a trial")
    keep(path, [{"model": "b", "batch": 8, "x": 3}], "model", "batch")
    keep(path, [{"model": "b", "batch": 1, "x": 4}], "model", "batch", order=lambda row: row["model"], what="another")
    found = json.loads(path.read_text())
    assert found["what"] == "another" and [row["x"] for row in found["rows"]] == [2, 3, 4]
    assert [each.name for each in tmp_path.iterdir()] == ["rows.json"]


@pytest.mark.slow
def test_export_times_have_a_row_for_each_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("vit", num_classes=3, depth=1)
    monkeypatch.setattr(export_times, "load", lambda name: (model, (3, 32, 32)))
    monkeypatch.setattr(export_times, "RESULTS", tmp_path / "export_times.json")
    rows = export_times.measure("DeiT-T")
    export_times.write(rows)
    export_times.write(rows[:1])
    found = json.loads(export_times.RESULTS.read_text())["rows"]
    assert [row["method"] for row in found] == ["quantise"]
    assert {row["method"] for row in rows} >= {"quantise", "ONNX", "ONNX, inline", "ONNX, int64=False", "C program"}
    assert all(row["cpu_s"] > 0 and row.get("bytes", 1e5) > 1e4 for row in rows)


def test_runs_of_the_reference_model_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tosa_reference_model")
    drawn: list[int] = []

    def small() -> Any:
        model = build("vit", num_classes=3, depth=1)
        network = qflash.quantize_model(model, [draw_images(8, 3, 32)], min_sqnr=None, progress=False)

        def draw(seed: int) -> torch.Tensor:
            drawn.append(seed)
            return draw_images(1, 3, 32, seed)

        return network, draw

    monkeypatch.setattr(tosa_networks, "MODELS", {"small": small})
    monkeypatch.setattr(tosa_networks, "RESULTS", tmp_path / "tosa_reference_model.json")
    for inputs in (2, 3, 3):
        tosa_networks.measure("small", inputs)
    (row,) = tosa_networks.declared.recorded(tosa_networks.RESULTS)
    assert drawn == [tosa_networks.CALIBRATION + number for number in range(3)]
    assert (row["inputs"], row["outputs"], row["differ"], row["status"]) == (3, 9, 0, {"TOSA_VALID": 3})
    assert row["operators_int16"] == row["operators_bare"] - 3 and row["cpu_s"] > 0
    # another file begins anew
    tosa_networks.write(row | {"sha256": ""})
    tosa_networks.measure("small", 1)
    assert tosa_networks.declared.recorded(tosa_networks.RESULTS)[0]["inputs"] == 1
    # an output that is not the network's is counted
    content = tosa_networks.written("small")[2]
    x = draw_images(1, 3, 32)
    wanted = tosa_networks.written("small")[0](x)
    wanted[0, 0] += 1
    assert tosa_networks.run(content, x, wanted)[:2] == (1, "TOSA_VALID")
