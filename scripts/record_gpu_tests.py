"""Run the tests that a GPU runs, several at a time, and write what was run, on what, with what result, as JSON."""

from __future__ import annotations

import argparse
import datetime
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

ROOT = pathlib.Path(__file__).resolve().parent.parent
TESTS = ("tests/gpu", "tests/test_long_quantize.py")


def pytest_command(*arguments: str) -> list[str]:
    """Return a call of pytest that writes nothing into the tree and prints as it is told here, not in pyproject.toml."""
    return [sys.executable, "-m", "pytest", "-o", "addopts=--strict-markers", "-q", "-p", "no:cacheprovider", *arguments]


def collect(tests: Sequence[str]) -> list[str]:
    """Return the names of all tests in these files and folders.

    Raises:
        SystemExit: there is none, or they cannot be collected.
    """
    done = subprocess.run(pytest_command("--collect-only", *tests), cwd=ROOT, capture_output=True, text=True)
    names = [line for line in done.stdout.splitlines() if "::" in line]
    if done.returncode != 0 or not names:
        sys.exit(f"no tests in {', '.join(tests)}:\n{done.stdout}{done.stderr}")
    return names


def outcome_of(case: ElementTree.Element) -> str:
    """Return what a report says of a test."""
    kinds = {child.tag for child in case}
    return next((kind for kind in ("error", "failure", "skipped") if kind in kinds), "passed")


def main(output: pathlib.Path, processes: int, tests: Sequence[str]) -> int:
    """Run the tests, write ``output``, return 0 if every process of pytest did."""
    names = collect(tests)
    processes = min(processes, len(names))
    print(f"{len(names)} tests in {processes} processes", flush=True)
    start = time.monotonic()
    outcomes: dict[str, Counter[str]] = {}
    failures = []
    with tempfile.TemporaryDirectory() as folder:
        running = []
        for i in range(processes):
            report, log = pathlib.Path(folder, f"{i}.xml"), pathlib.Path(folder, f"{i}.txt")
            # neighbours take about as long as one another, so they are dealt out
            command = pytest_command(f"--junitxml={report}", *names[i::processes])
            with log.open("w") as stream:
                running.append((subprocess.Popen(command, cwd=ROOT, stdout=stream, stderr=stream), report, log))
        status = 0
        for process, report, log in running:
            if process.wait() != 0:
                status = 1
                print(log.read_text(), flush=True)
            for case in ElementTree.parse(report).getroot().iter("testcase") if report.exists() else ():
                outcome, name = outcome_of(case), case.get("name") or ""
                outcomes.setdefault(name.split("[")[0], Counter())[outcome] += 1
                if outcome in ("failure", "error"):
                    failures.append(f"{case.get('classname')}::{name}")
    seconds = time.monotonic() - start
    total = sum(outcomes.values(), Counter[str]())
    said = ", ".join(f"{count} {outcome}" for outcome, count in sorted(total.items())) or "none ran"
    of = f"{' and '.join(tests)}: {said} of {len(names)} in {seconds:.0f} s by {processes} processes"
    print(of)
    has_gpu = torch.cuda.is_available()
    record = {
        "date": datetime.date.today().isoformat(),
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
    sys.exit(main(arguments.output, arguments.processes, arguments.tests))
