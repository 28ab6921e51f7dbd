"""``qflash-lab profile``: what ncu is asked and how its answer is read; a real run where there are a GPU and ncu."""

from __future__ import annotations

import json
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from qflash_lab.bench import console
from qflash_lab.bench import methods as bench_methods
from qflash_lab.bench import problems as bench_problems
from qflash_lab.bench import profile as profiling
from qflash_lab.cli import app

QUERY = """\
Device NVIDIA H200 (GH100)
--------------------------------------------------- --------------- --------------- -----------------------------
Metric Name                                         Metric Type     Metric Unit     Metric Description
--------------------------------------------------- --------------- --------------- -----------------------------
gpu__time_duration                                  Counter         nanosecond      incremental duration
sm__inst_issued                                     Counter         inst            # of warp instructions issued
sm__pipe_tensor_op_imma_cycles_active               Counter         inst            # of ...
sm__ops_path_tensor_src_int8                        Counter                         # of ...
sm__ops_path_tensor_src_int8_sparsity_on            Counter                         # of ...
sm__pipe_tensor_cycles_active                       Counter         cycle           # of cycles where ...
"""

HEAD = '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC",'
CSV = (
    "==PROF== Connected to process 4242 (/usr/bin/python3.12)\n"
    + HEAD
    + '"gpu__time_duration.sum","launch__registers_per_thread","sm__inst_executed.sum",'
    + '"sm__inst_issued.avg.pct_of_peak_sustained_active",'
    + '"sm__pipe_tensor_op_imma_cycles_active.avg.pct_of_peak_sustained_active",'
    + '"sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active","sm__warps_active.avg.pct_of_peak_sustained_active"\n'
    + '"","","","","","","","","","","","ns","register/thread","inst","%","%","%","%"\n'
    + "".join(
        f'"{index}","4242","python3.12","127.0.0.1","{kernel}","1","7","(128, 1, 1)","(4, 6, 8)","0","9.0",{rest}\n'
        for index, kernel, rest in (
            (0, "spin_kernel(long)", '"1,504","16","9","0.1","0","0","1.5"'),
            (1, "_quantize", '"2,000","32","1,000","20","0","n/a","50"'),
            (2, "_attention, fused", '"6,000","168","5,000","40","10","12","30"'),
            (3, "spin_kernel(long)", '"1,504","16","9","0.1","0","0","1.5"'),
            (4, "spin_kernel(long)", '"1,504","16","9","0.1","0","0","1.5"'),
            (5, "flash_fwd", '"4,000","255","7","30","0","20","25"'),
        )
    )
    + "==PROF== Disconnected from process 4242\n"
)


def test_query_and_choice() -> None:
    names = profiling.parse_query(QUERY)
    assert names[0] == "gpu__time_duration"
    assert len(names) == 6
    chosen = profiling.choose_metrics(names)
    assert chosen[: len(profiling._ALWAYS)] == list(profiling._ALWAYS)
    percent = ".avg.pct_of_peak_sustained_active"
    assert set(chosen[len(profiling._ALWAYS) :]) == {
        "sm__pipe_tensor_op_imma_cycles_active" + percent,
        "sm__ops_path_tensor_src_int8" + percent,
        "sm__pipe_tensor_cycles_active" + percent,
    }
    assert "sm__pipe_tensor_cycles_active" + percent in profiling.choose_metrics([])


def test_csv() -> None:
    kernels = profiling.parse_csv(CSV)
    assert [kernel["kernel"] for kernel in kernels][2] == "_attention, fused"
    assert kernels[2]["gpu__time_duration.sum"] == 6000.0
    assert kernels[1]["sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active"] is None
    calls = profiling.split_calls(kernels)
    assert [len(call) for call in calls] == [2, 0, 1]
    row = profiling.summarise(calls[0])
    assert (row["kernels"], row["duration_us"], row["registers"], row["instructions"]) == (2, 8.0, 168.0, 6000.0)
    assert row["imma_percent"] == 7.5  # 0 for 2 us, 10 for 6 us
    assert row["tensor_percent"] == 9.0
    assert row["issue_percent"] == 35.0
    assert row["occupancy_percent"] == 35.0
    assert row["hmma_percent"] is None


RECORDED = json.loads((Path(__file__).parents[3] / "benchmarks" / "results" / "profile_h200.json").read_text())


def test_columns_of_a_recorded_profile() -> None:
    """A GPU's own counters: fp16 kernels have fp16 products, int8 ones int8, and both add up to the tensor pipe."""
    assert RECORDED["columns"] == {
        name: counter + ".avg.pct_of_peak_sustained_active" for name, counter in profiling.COLUMNS.items()
    }
    assert set(RECORDED["columns"].values()) <= set(RECORDED["metrics"])
    for row in RECORDED["rows"]:
        assert row.items() >= profiling.summarise(row["launches"]).items()
        imma, hmma = row["imma_percent"], row["hmma_percent"]
        assert imma + hmma == pytest.approx(row["tensor_percent"], abs=0.02)
        assert (imma > 0, hmma > 0) == {
            "sdpa flash": (False, True), "sdpa cudnn": (False, True), "sdpa efficient": (False, True),
            "i-vit kernel": (True, False), "int-flash-full kernel": (True, False), "int-flash-half kernel": (True, True),
            "qattn kernel": (True, True), "int-flash-full": (True, True), "int-flash-half": (True, True), "qattn": (True, True),
            "qflash int8": (True, False), "qflash": (True, False),
        }[row["method"]]  # fmt: skip
        if row["method"] in ("int-flash-half kernel", "qattn kernel"):  # as in the paper's Table 2: fp16 takes twice as long
            assert hmma == pytest.approx(2 * imma, rel=0.05)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access ...", "no permission.*root"),
        ("==ERROR== Failed to initialize the profiler: LibraryNotLoaded\n", "LibraryNotLoaded"),
        ("", "printed nothing"),
    ],
)
def test_no_table(text: str, message: str) -> None:
    with pytest.raises(profiling.ProfileError, match=message):
        profiling.parse_csv(text)


def test_rows() -> None:
    problems = bench_problems.make_problems(("A2", "A7"), (), (8,))
    methods = bench_methods.make_methods(torch.device("cuda"), only=("sdpa flash", "qflash"))
    calls = [
        {"error": None, "sqnr_db": 36.0, "sqnr_of": "whole"},
        {"error": "RuntimeError: no", "sqnr_db": None, "sqnr_of": "whole"},
    ]
    calls.append(calls[0])
    rows = profiling.make_rows(
        problems, methods, calls, profiling.split_calls(profiling.parse_csv(CSV)), kind="uniform", dtype="float16"
    )
    assert [(row["workload"], row["method"]) for row in rows] == [
        ("A2", "sdpa flash"), ("A2", "qflash"), ("A7", "sdpa flash"), ("A7", "qflash"),
    ]  # fmt: skip
    assert [row["kernels"] for row in rows] == [2, None, 1, None]
    assert rows[1]["error"] == "RuntimeError: no"
    assert "ended before" in rows[3]["error"]
    assert len(rows[0]["launches"]) == 2


FAKE_NCU = """#!/bin/sh
if [ "$1" = --query-metrics ]; then cat "$FAKE_NCU_FOLDER/query"; exit 0; fi
log=; metrics=
while [ $# -gt 0 ]; do
  case "$1" in --log-file) log=$2 ;; --metrics) metrics=$2 ;; esac
  last=$1; shift
done
echo "$metrics" >> "$FAKE_NCU_FOLDER/asked"
case "$metrics" in *op_imma*) echo "==ERROR== Failed to find metric sm__pipe_tensor_op_imma_cycles_active"; exit 1 ;; esac
cp "$FAKE_NCU_FOLDER/table" "$log"
echo '[{"error": null, "sqnr_db": 36.0, "sqnr_of": "whole"}]' > "$(dirname "$last")/done.json"
"""


@pytest.fixture
def fake_ncu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    program = tmp_path / "ncu"
    program.write_text(FAKE_NCU)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "query").write_text(QUERY)
    (tmp_path / "table").write_text(CSV)
    monkeypatch.setenv("FAKE_NCU_FOLDER", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


def test_collect_drops_metrics_that_ncu_does_not_know(fake_ncu: Path) -> None:
    plan: dict[str, Any] = {"problems": []}
    calls, launches, metrics = profiling.collect(plan)
    assert calls[0]["sqnr_db"] == 36.0
    assert len(launches) == 3
    assert not any("op_imma" in metric for metric in metrics)
    asked = (fake_ncu / "asked").read_text().splitlines()
    assert len(asked) == 2
    assert "op_imma" in asked[0]


def test_collect_without_permission(fake_ncu: Path) -> None:
    (fake_ncu / "table").write_text("==ERROR== ERR_NVGPUCTRPERM\n")
    with pytest.raises(profiling.ProfileError, match="no permission"):
        profiling.collect({})


def test_missing_ncu_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    result = CliRunner().invoke(app, ["profile", "--device", "cpu"])
    assert result.exit_code == 2
    assert "ncu is not on PATH" in result.output


def test_needs_a_gpu(fake_ncu: Path) -> None:
    result = CliRunner().invoke(app, ["profile", "--device", "cpu"])
    assert result.exit_code == 2
    assert "there is no GPU here" in result.output


@pytest.mark.gpu
def test_profile_on_the_gpu() -> None:
    if shutil.which("ncu") is None:
        pytest.skip("needs Nsight Compute")
    device = console.pick_device("cuda")
    methods = bench_methods.make_methods(device, only=("sdpa flash", "qflash int8"))
    try:
        record = profiling.run_profile(
            bench_problems.make_problems(("A2",), (), (8,)), methods, dtype=torch.float16, device=device
        )
    except profiling.ProfileError as error:
        if "no permission" in str(error) or "LibraryNotLoaded" in str(error):
            pytest.skip(str(error))
        raise
    flash, ours = record["rows"]
    assert flash["error"] is None and ours["error"] is None
    assert flash["kernels"] == 1 and ours["kernels"] == 1
    assert flash["tensor_percent"] > 0 and ours["tensor_percent"] > 0
    assert 1 < ours["duration_us"] < 200
