"""Run the tests that a GPU runs, several at a time, and write what was run, on what, with what result, as JSON."""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import pathlib
import platform
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence

import torch
import triton

from qflash_lab.bench.records import source_commit

ROOT = pathlib.Path(__file__).resolve().parent.parent
TESTS = ("tests/gpu", "tests/kernels/test_quantize_streaming.py")


def outcome_of(case: ElementTree.Element) -> str:
    """Return what a report says of a test."""
    kinds = {child.tag for child in case}
    return next((kind for kind in ("error", "failure", "skipped") if kind in kinds), "passed")


def run_tests(tests: Sequence[str], processes: int) -> tuple[int, list[ElementTree.Element]]:
    """Run tests; return pytest's exit status and what its report says of each test."""
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", *tests, "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        status = subprocess.run([*command, *(["-n", str(processes)] if processes > 1 else [])], cwd=ROOT).returncode
        cases = list(ElementTree.parse(report).getroot().iter("testcase")) if report.exists() else []
    if not cases:
        sys.exit(f"no test ran, nothing is recorded: pytest ended with status {status}")
    return status, cases


def main(output: pathlib.Path, processes: int, tests: Sequence[str]) -> int:
    """Run the tests, write ``output``, return pytest's exit status."""
    start = time.monotonic()
    status, cases = run_tests([*tests, "--all"], processes)
    outcomes: dict[str, Counter[str]] = {}
    failures = []
    for case in cases:
        outcome, name = outcome_of(case), case.get("name") or ""
        outcomes.setdefault(name.split("[")[0], Counter())[outcome] += 1
        if outcome in ("failure", "error"):
            failures.append(f"{case.get('classname')}::{name}")
    seconds = time.monotonic() - start
    total = sum(outcomes.values(), Counter[str]())
    said = ", ".join(f"{count} {outcome}" for outcome, count in sorted(total.items()))
    of = f"{' and '.join(tests)}: {said} in {seconds:.0f} s by {processes} processes"
    print(of)
    has_gpu = torch.cuda.is_available()
    record = {
        "date": datetime.date.today().isoformat(),
        "commit": source_commit(),
        "device": torch.cuda.get_device_name() if has_gpu else None,
        "capability": torch.cuda.get_device_capability() if has_gpu else None,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "of": of,
        "status": status,
        "tests": {name: dict(counts) for name, counts in sorted(outcomes.items())},
        "failures": failures,
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(record, indent=1) + "\n")
    return status


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=pathlib.Path, metavar="OUT.json", help="where the record goes")
    parser.add_argument("tests", nargs="*", default=TESTS, help="files, folders or single tests (default: all that need a GPU)")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 1) - 1), help="of pytest, side by side")
    arguments = parser.parse_args()
    if arguments.processes < 1:
        parser.error(f"--processes must be at least 1, got {arguments.processes}")
    if arguments.processes > 1 and importlib.util.find_spec("xdist") is None:
        parser.error("several processes need pytest-xdist, which is not installed; --processes 1 does without")
    sys.exit(main(arguments.output, arguments.processes, arguments.tests))
