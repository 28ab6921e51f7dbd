"""What ``scripts/sanitize_gpu.py`` does, as far as that needs no GPU: its calls, its zones, and how it reads the tools."""

from __future__ import annotations

import argparse
import json
import pathlib
import re
import subprocess
import sys

import pytest
import torch

import qflash
from gpu_driver import matrix, read_findings, zones_on
from helpers import load_script

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "sanitize_gpu.py"

MEMCHECK = """========= COMPUTE-SANITIZER
call: 3 short rows: one
call: 4 short rows: two
========= Invalid __global__ write of size 4 bytes
=========     at write_behind_kernel+0xd0 in planted.py:15
=========     by thread (0,0,0) in block (0,0,0)
=========     Access to 0x7f22e0a003e8 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f22e0a00000 of size 1,000 bytes
=========
========= Program hit cudaErrorLaunchFailure (error 719) due to "unspecified launch failure" on CUDA API call to cudaMemcpy.
=========     Saved host backtrace up to driver entry point at error
=========         Host Frame: [0x2d3a1d] in libcuda.so.1
=========
========= ERROR SUMMARY: 2 errors
========= ERROR SUMMARY: 7 errors were not printed. Use --print-limit option to adjust the number of printed errors
"""
RACECHECK = """========= COMPUTE-SANITIZER
call: 9 windows: three
========= Error: Race reported between Write access at race_kernel+0x90 in planted.py:30
=========     and Read access at race_kernel+0xa0 in planted.py:30 [384 hazards]
=========     and Write access at race_kernel+0x90 in planted.py:30 [128 hazards]
=========
========= Warning: Race reported between Read access at other_kernel+0x90 in planted.py:30
=========     and Write access at other_kernel+0xa0 in planted.py:30 [4 hazards]
=========
========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)
"""
INITCHECK = """========= COMPUTE-SANITIZER
========= Uninitialized __global__ memory read of size 4 bytes
=========     at copy_kernel+0x70 in planted.py:21
=========     by thread (31,0,0) in block (0,0,0)
=========     Access to 0x7f5b3fa0007c
=========
========= ERROR SUMMARY: 128 errors
"""
CLEAN = "call: 0 short rows: one\n========= ERROR SUMMARY: 0 errors\n"


@pytest.fixture(scope="module")
def script():
    return load_script(SCRIPT)


def test_errors_are_read():
    found = read_findings(MEMCHECK)
    assert (found.errors, found.warnings, found.ended, found.faults) == (2, 0, True, 2)
    (first,) = found.reports  # one a call
    assert found.by_call == {"call: 4 short rows: two": 2}
    assert first[:3] == [
        "call: 4 short rows: two", "Invalid __global__ write of size 4 bytes", "at write_behind_kernel+0xd0 in planted.py:15",
    ]  # fmt: skip
    (report,) = read_findings("\n".join(MEMCHECK.splitlines()[9:])).reports
    assert report[0].startswith("Program hit cudaErrorLaunchFailure") and not any("Host Frame" in line for line in report)
    assert read_findings(INITCHECK).errors == 128


def test_races_are_read():
    found = read_findings(RACECHECK)
    assert (found.errors, found.warnings, found.ended, found.faults) == (1, 1, True, 2)
    assert [report[1].split(":")[0] for report in found.reports] == ["Error"]
    assert sum(found.by_call.values()) == 2
    clean = read_findings("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n")
    assert clean.ended and clean.faults == 0


def test_a_tool_that_comes_to_no_end_is_a_fault():
    assert read_findings(CLEAN).faults == 0
    assert read_findings(CLEAN.splitlines()[0]).faults == 1
    assert read_findings("========= Internal Sanitizer Error: no room\n" + CLEAN).errors == 1
    many = "".join(MEMCHECK.replace("two", str(number)) for number in range(20))
    assert len(read_findings(many).reports) == 8 and len(read_findings(many).by_call) == 20


def test_calls_reach_every_kernel():
    folder = pathlib.Path(qflash.__file__).parent / "kernels"
    sources = (path.read_text(encoding="utf-8") for path in folder.rglob("*.py"))
    kernels = {name for source in sources for name in re.findall(r"^def ([a-z]\w*_kernel)\(", source, re.MULTILINE)}
    calls = matrix.calls()
    assert len({call.name for call in calls}) == len(calls)
    assert {name for call in calls for name in matrix.kernels_on_hopper(call)} == kernels - {"launch_kernel"}


def worker(**given: object) -> argparse.Namespace:
    usual = {"device": "cpu", "share": (1, 1), "limit": None, "zones": True, "report": None}
    return argparse.Namespace(**{**usual, **given})


def test_a_worker_compares_bits(script, tmp_path, monkeypatch, capsys):
    report = tmp_path / "report.json"
    assert script.work(worker(share=(11, 42), report=report)) == 0
    done = json.loads(report.read_text())
    assert done["calls"] >= 6 and done["faults"] == [] and done["allocations_with_zones"] > 6
    # results of another call
    monkeypatch.setattr(matrix, "calls", lambda: [Wrong("kind", "wrong", lambda backend, device: ())])
    assert script.work(worker()) == 1
    assert "wrong: other bits than the reference" in capsys.readouterr().err


class Wrong(matrix.Call):
    def results(self, backend, device):
        return (torch.zeros(3) + (backend == "reference"),)


def test_bytes_around_allocations_are_looked_at():
    with zones_on(torch.device("cpu")) as zones:
        x = torch.empty((3, 5), dtype=torch.int16, device="cpu").fill_(7)
        assert x.new_empty(4, dtype=torch.int64).data_ptr() % 8 == 0 and torch.empty_like(x).shape == x.shape
        assert zones.take() == (3, 0)
        for places in (-1, 15):
            x = torch.empty((3, 5), dtype=torch.int16, device="cpu")
            x.as_strided((1,), (1,), x.storage_offset() + places).fill_(1)
            assert zones.take() == (1, 1)


STAND_IN = """#!/bin/sh
# as compute-sanitizer does: runs what stands behind its options, and writes around it
for last; do :; done
while [ "$1" != "{python}" ]; do shift; done
case "$last" in
memcheck) echo "========= Invalid __global__ write of size 4 bytes"; echo "========= ERROR SUMMARY: 1 error"; exit 9 ;;
initcheck) echo "========= ERROR SUMMARY: 0 errors"; exit 0 ;;
esac
"$@" --device cpu
echo "========= ERROR SUMMARY: 0 errors"
"""


def test_workers_behind_a_tool(script, tmp_path):
    sanitizer = tmp_path / "compute-sanitizer"
    sanitizer.write_text(STAND_IN.format(python=sys.executable), encoding="utf-8")
    sanitizer.chmod(0o755)
    runner = script.Runner(str(sanitizer), ["--print-limit", "3"], 300.0, tmp_path)
    assert runner.options("memcheck")[-2:] == ["--print-limit", "3"]
    done = runner.share("memcheck", 160, 170, 1)
    assert (done["calls"], done["errors"], done["faults"]) == (1, 0, [])
    total = script.add_up([done, done])
    assert (total["calls"], total["processes"], total["errors"]) == (2, 2, 0)
    total["planted"] = runner.planted("memcheck")
    assert script.is_clean(total) and total["planted"]["report"] == [["Invalid __global__ write of size 4 bytes"]]
    total["planted"] = runner.planted("initcheck")
    assert not script.is_clean(total)
    assert not script.is_clean(total | {"planted": {"found": True}, "warnings": 1})


def test_without_a_gpu_it_says_so():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("sanitize_gpu.py needs an NVIDIA GPU")
