"""The runner and the scripts of benchmarks on a GPU: graphs, calls without one, and rows of both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from helpers import load_benchmark
from qflash_lab import demo
from qflash_lab.bench import runner, tune
from qflash_lab.bench.workloads import WORKLOADS
from qflash_lab.cli import app

pytestmark = pytest.mark.gpu


def test_medians_are_of_the_device() -> None:
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.float16)
    found = runner.medians({"one": lambda: x @ x, "two": lambda: (x @ x, x @ x)}, x.device, 9)
    assert 1.6 < found["two"] / found["one"] < 2.4


@torch.inference_mode()
def test_packed_sequences_are_timed_with_and_without_a_graph() -> None:
    varlen = load_benchmark("varlen")
    rows = varlen.measure(varlen.Batch("small", (33, 64, 5), 2, 64), torch.device("cuda"), rounds=2)
    assert [(row["method"], row["mode"]) for row in rows] == [
        (method, mode) for method in ("qflash", "flash varlen") for mode in ("kernel", "eager")
    ]
    for row in rows:
        assert row["error"] is None and row["median_us"] > 0
        assert (row["issue_us"] is not None) == (row["mode"] == "eager")


@torch.inference_mode()
def test_linear_layers_are_timed_beside_cublas() -> None:
    layers = load_benchmark("linear_layers")
    rows = layers.measure(layers.block_layers("small", 256, 384)[0], torch.device("cuda"), rounds=2)
    names = ["qflash", "cuBLAS float16", "cuBLAS float8", "cuBLAS int8 to int32"]
    assert [row["method"] for row in rows] == names
    assert all(row["median_us"] > 0 for row in rows if row["error"] is None) and rows[0]["error"] is None


@torch.inference_mode()
def test_the_demo_and_tuning_have_times() -> None:
    times = demo._time_workload(WORKLOADS[6], torch.device("cuda"))
    assert list(times) == ["sdpa_float16", "qflash_float16_in", "qflash_int8_in"] and min(times.values()) > 0
    device = torch.device("cuda", torch.cuda.current_device())
    rule, best, rule_us, best_us = tune.tune_shape((1, 2, 197, 64), 197, fused=False, device=device)
    assert 0 < best_us <= rule_us and (best == rule) == (best_us == rule_us)


def test_energy_of_whole_models_is_read_by_turns(tmp_path: Path) -> None:
    pytest.importorskip("timm")
    pytest.importorskip("pynvml")
    words = "models --integer --model digits-vit --batch 2 --method timm --method integer --rounds 2 --energy 0.2 --readings 2"
    done = CliRunner().invoke(app, [*words.split(), "--output", str(tmp_path)])
    assert done.exit_code == 0, done.output
    record = json.loads((tmp_path / "models_integer.json").read_text())
    assert record["idle_watts"] > 0
    for row in record["rows"]:
        assert row["error"] is None and row["readings"] == 2
        assert 0 < row["mj_per_image_min"] <= row["mj_per_image"] <= row["mj_per_image_max"]
        assert row["mj_per_image_above_idle"] < row["mj_per_image"]
