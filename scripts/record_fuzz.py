"""Run tests/fuzz and write how many random examples ran in each test, and how many failed, to a record.

``python scripts/record_fuzz.py OUT.json --times 30``, in the repository: as ``make fuzz``, in one process.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import platform
import re
import sys
import time

import pytest

FOLDER = "tests/fuzz"
_COUNTS = re.compile(r"(\d+) passing, (\d+) failing")


class Counter:
    """A plugin of pytest that adds up hypothesis' statistics; ``tests`` has (passed, failed) examples of each test."""

    def __init__(self) -> None:
        self.tests: dict[str, tuple[int, int]] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        """Count the examples of a test that ran."""
        found = _COUNTS.findall(getattr(item, "hypothesis_statistics", ""))
        if found:
            self.tests[item.name] = (sum(int(each[0]) for each in found), sum(int(each[1]) for each in found))


def main(output: pathlib.Path, times: int, tests: list[str]) -> int:
    """Run the tests, write what came out, return pytest's exit status."""
    os.environ["QFLASH_FUZZ"] = str(times)  # tests/fuzz reads it when it is imported
    counter, start = Counter(), time.monotonic()
    status = pytest.main(["-q", "-p", "no:xdist", "-p", "no:cacheprovider", *tests], plugins=[counter])
    passed, failed = (sum(each) for each in zip(*counter.tests.values(), strict=True)) if counter.tests else (0, 0)
    record = {
        "what": "random examples of tests/fuzz", "date": datetime.date.today().isoformat(), "times": times,
        "python": platform.python_version(), "machine": platform.machine(), "status": int(status), "passed": passed,
        "failed": failed, "seconds": round(time.monotonic() - start),
        "tests": {name: {"passed": each[0], "failed": each[1]} for name, each in sorted(counter.tests.items())},
    }  # fmt: skip
    output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({key: value for key, value in record.items() if key != "tests"}))
    return int(status)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("output", type=pathlib.Path, metavar="OUT.json", help="the record")
    parser.add_argument(
        "--times", type=int, default=30, help="as many times the examples of the test suite; TIMES of make fuzz"
    )
    parser.add_argument("--test", action="append", help="a file or a test of it, repeatable; all if left out")
    given = parser.parse_args()
    if given.times < 1:
        parser.error(f"--times must be at least 1, got {given.times}")
    sys.exit(main(given.output, given.times, given.test or [FOLDER]))
