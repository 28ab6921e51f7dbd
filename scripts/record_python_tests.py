"""Run a part of the tests with this Python on the installed wheel, and add the result to a record if one is named."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import platform
import sys
import time
from collections import Counter
from typing import Any

import qflash
from qflash.versions import package_version
from record_gpu_tests import outcome_of, run_tests

TESTS = (
    "tests/core", "tests/network", "tests/fuzz", "tests/integrations/test_patching.py", "tests/integrations/test_sdpa.py",
    "tests/integrations/test_timm.py", "tests/kernels/test_attention.py", "tests/kernels/test_cpu.py",
)  # fmt: skip
"""Half of all tests: the core, models and saved networks, and the kernels for CPUs and some in Triton's interpreter."""
PACKAGES = ("torch", "triton", "numpy", "timm", "transformers", "onnx", "onnxruntime")


def main(output: pathlib.Path | None, processes: int) -> int:
    """Run the tests, add what came out to ``output``, return pytest's exit status."""
    if not pathlib.Path(qflash.__file__).is_relative_to(sys.prefix):
        sys.exit(f"the wheel is to be tested, but qflash is {qflash.__file__}")
    start = time.monotonic()
    status, cases = run_tests(TESTS, processes)
    outcomes = Counter(outcome_of(case) for case in cases)
    failed = [case for case in cases if outcome_of(case) in ("failure", "error")]
    reasons = Counter(child.get("message") or "" for case in cases for child in case if child.tag == "skipped")
    result = {
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        **{package: package_version(package) for package in PACKAGES},
        "passed": outcomes["passed"],
        "skipped": outcomes["skipped"],
        "failed": len(failed),
        "seconds": round(time.monotonic() - start),
        "skipped because": dict(reasons.most_common()),
        "failures": [f"{case.get('classname')}::{case.get('name')}" for case in failed],
    }
    print(json.dumps(result, indent=1))
    if output is not None:
        record: dict[str, Any] = json.loads(output.read_text()) if output.exists() else {"tests": list(TESTS), "runs": {}}
        if record["tests"] != list(TESTS):
            record = {"tests": list(TESTS), "runs": {}}
        record["runs"]["{}.{}".format(*sys.version_info)] = result
        record["runs"] = dict(sorted(record["runs"].items()))
        output.write_text(json.dumps(record, indent=1) + "\n")
    return status


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=pathlib.Path, metavar="RECORD.json", help="a new or an existing record")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="of pytest, side by side")
    arguments = parser.parse_args()
    sys.exit(main(arguments.output, arguments.processes))
