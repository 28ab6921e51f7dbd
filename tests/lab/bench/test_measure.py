"""benchmarks/measure.py measures what the committed results hold."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers import BENCHMARKS, load_benchmark
from qflash_lab.bench import problems as bench_problems

MEASURE = load_benchmark("measure")


def measured(run: Any) -> dict[str, dict[str, Any]]:
    """Return the results of a run, by card."""
    found = {}
    for path in (BENCHMARKS / "results").glob(f"{run.name}_*.json"):
        record = json.loads(path.read_text())
        card = MEASURE.card_of(record.get("environment", {}).get("device", ""))
        if path.stem == f"{run.name}_{card}":
            found[card] = record
    return found


PEERS = [run for run in MEASURE.PEER_RUNS if run.name != "peers_float8" or measured(run)]
"""float8 alone may not have been measured: its rows are then those of another run."""


@pytest.mark.parametrize("run", [*MEASURE.RUNS, *PEERS], ids=lambda run: run.name)
def test_run_has_the_rows_of_the_results(run: Any) -> None:
    results = measured(run)
    assert "h200" in results
    for record in results.values():
        check_rows(run, record)


def check_rows(run: Any, record: dict[str, Any]) -> None:
    problems = bench_problems.make_problems(run.workloads, run.shapes, run.batches, bias=run.bias)
    wanted = {(problem.workload, problem.batch, problem.bias) for problem in problems}
    assert {(row["workload"], row["batch"], row["bias"]) for row in record["rows"]} == wanted
    if run.methods:
        # the tables of other shapes say that PyTorch's memory-efficient kernel was not in the committed run
        missing = {"sdpa efficient"} if run.name == "shapes" else set()
        assert set(run.methods) - missing <= {row["method"] for row in record["rows"]} <= set(run.methods)
    assert {row["method"] for row in record["rows"]} >= set(MEASURE.col.OURS) & set(run.methods or MEASURE.col.OURS)
    assert {row["mode"] for row in record["rows"]} == set(run.modes)


def test_parts_are_the_run() -> None:
    for run in (*MEASURE.RUNS, *MEASURE.PEER_RUNS):
        parts = [
            bench_problems.make_problems(part.workloads, part.shapes, part.batches, bias=part.bias) for part in run.parts()
        ]
        whole = bench_problems.make_problems(run.workloads, run.shapes, run.batches, bias=run.bias)
        assert {problem for part in parts for problem in part} == set(whole)


@pytest.mark.parametrize(
    ("device", "card"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb"),
        ("NVIDIA GeForce RTX 4090", "4090"),
        ("Fast", "gpu"),
    ],
)
def test_cards_are_called_by_their_model(device: str, card: str) -> None:
    assert MEASURE.card_of(device) == card


@pytest.mark.slow
def test_results_are_written_and_failures_counted(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    small = MEASURE.Run("small", shapes=("1,1,16,32",), methods=(), rounds=2, device="cpu")
    wrong = MEASURE.Run("wrong", workloads=("A9",), device="cpu")
    failed = MEASURE.main(tmp_path, [small, wrong], 2)
    printed = capfd.readouterr().out
    assert failed == 1 and "A9" in printed
    record = json.loads((tmp_path / "small_cpu.json").read_text())
    assert {row["workload"] for row in record["rows"]} == {"1x1x16x32"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["small_cpu.csv", "small_cpu.json"]


def test_arguments_are_checked() -> None:
    done = subprocess.run([sys.executable, MEASURE.__file__, "x", "--processes", "0"], capture_output=True, text=True)
    assert done.returncode == 2 and "--processes must be at least 1, got 0" in done.stderr


def test_the_run_on_a_cpu_has_the_rows_of_the_results() -> None:
    problems = bench_problems.make_problems(MEASURE.CPU_RUN.workloads, MEASURE.CPU_RUN.shapes, MEASURE.CPU_RUN.batches)
    wanted = {("x".join(map(str, problem.shape)), method) for problem in problems for method in MEASURE.CPU_RUN.methods}
    for name in ("cpu", "cpu_vnni", "cpu_zen4"):
        rows = json.loads((BENCHMARKS / "results" / f"{name}.json").read_text())["rows"]
        assert {(row["shape"], row["method"]) for row in rows} == wanted
