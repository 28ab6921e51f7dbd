"""Run the tests that a GPU runs and write what was run, on what, with what result, as JSON."""

from __future__ import annotations

import argparse
import datetime
import json
import pathlib
import platform
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter

import torch
import triton

ROOT = pathlib.Path(__file__).resolve().parent.parent


def main(output: pathlib.Path) -> int:
    """Run the tests, write ``output``, return pytest's exit status."""
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / "report.xml"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "tests/gpu",
            "tests/test_long_quantize.py",
            "-q",
            "-p",
            "no:cacheprovider",
            f"--junitxml={report}",
        ]
        status = subprocess.run(command, cwd=ROOT).returncode
        cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    outcomes: dict[str, Counter[str]] = {}
    failures = []
    for case in cases:
        kinds = {child.tag for child in case} & {"failure", "error", "skipped"}
        outcome = kinds.pop() if kinds else "passed"
        name = (case.get("name") or "").split("[")[0]
        outcomes.setdefault(name, Counter())[outcome] += 1
        if outcome in ("failure", "error"):
            failures.append(case.get("name"))
    record = {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "capability": torch.cuda.get_device_capability(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
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
    sys.exit(main(parser.parse_args().output))
