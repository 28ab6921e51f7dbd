"""``benchmarks/linear_layers.py`` on the CPU: layers whose outputs say something, and a table of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import load_benchmark
from qflash_lab.bench.runner import TimedMethod

CPU = torch.device("cpu")
linear_layers = load_benchmark("linear_layers")


def test_layers_of_a_block() -> None:
    layers = linear_layers.all_layers((1, 8))
    assert len(layers) == 2 * 4 * 4 and len({layer.name for layer in layers}) == len(layers)
    qkv, proj, _, fc2 = linear_layers.block_layers("DeiT-S b1", 197, 384)
    assert qkv.operations == 2 * 197 * 384 * 1152 and qkv.bytes == 197 * 384 + 384 * 1152 + 197 * 1152
    assert proj.bytes == 197 * 384 + 384 * 384 + 4 * 197 * 384 and (fc2.inputs, fc2.outputs) == (1536, 384)


@pytest.mark.parametrize("layer", linear_layers.block_layers("DeiT-S", 40, 384), ids=lambda layer: layer.epilogue)
def test_outputs_are_spread_over_their_range(layer: Any) -> None:
    out = linear_layers.ours(layer, CPU)()
    ends = torch.iinfo(out.dtype)
    inside = (out > ends.min) & (out < ends.max)
    assert inside.double().mean() > 0.5 and out.unique().numel() > 40


def test_what_is_measured_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    linear_layers.run(tmp_path, linear_layers.block_layers("tiny", 9, 32)[:2], CPU, rounds=2)
    record = json.loads((tmp_path / "linear_layers.json").read_text())
    assert [(row["layer"], row["method"]) for row in record["rows"]] == [
        (layer, method) for layer in ("tiny qkv", "tiny proj") for method in ("qflash", "float32")
    ]
    assert all(row["median_us"] > 0 and row["error"] is None for row in record["rows"])
    assert "tiny proj" in capsys.readouterr().out


def test_a_method_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("no such card")

    methods = (linear_layers.METHODS[0], TimedMethod("other", "kernel", fails))
    monkeypatch.setattr(linear_layers, "METHODS", methods)
    ours, other = linear_layers.measure(linear_layers.block_layers("tiny", 9, 32)[0], CPU, rounds=1)
    assert other["error"] == "RuntimeError: no such card" and other["median_us"] is None and ours["median_us"] > 0
