#!/usr/bin/env python3
"""Run the testbenches of this folder on what ``qflash vectors --trace`` wrote: ``python rtl/run.py FOLDER...``.

Every case of a folder is given to each testbench whose operator has its steps; Icarus Verilog (``iverilog``, ``vvp``) compiles
and runs them. Exit status: 0 all values are equal; 1 some differ, a testbench did not end, or there was nothing to run.
docs/hardware.md has the modules.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
SHARED = ("mul_round", "saturate")
STEPS = {"rescale": "rescale(acc)", "gelu": "GELU: u", "layer_norm": "N", "attention_row": "B"}
"""A module and the step that says that its operator was run."""
DEFAULT = {"c0": 301, "up": 13, "down": 23, "nearest": 1, "two_pass": 1}
"""Of attention that attention_row.sv computes: its constants."""
_RESULT = re.compile(r"(\d+) values, (\d+) mismatches, (\d+) cycles")


class Outcome(NamedTuple):
    """What a testbench found: how many values, which of them differ, how many clock cycles it took; ``log`` if it failed."""

    case: str
    values: int
    mismatches: int
    cycles: int
    log: str


def modules_of(manifest: dict[str, Any]) -> list[str]:
    """Name the modules that compute a case, or a step of it.

    Raises:
        ValueError: the reference cut the case into parts, which a testbench does not put together.
    """
    steps = {x["name"] for x in manifest["tensors"] if x["kind"] == "step"}
    found = [module for module, step in STEPS.items() if step in steps]
    if "attention_row" in found and any(manifest["constants"].get(name) != value for name, value in DEFAULT.items()):
        found.remove("attention_row")
    if found and "query #2" in steps:
        raise ValueError(f"{manifest['name']} has too many scores for one trace; write vectors of fewer images")
    return found


def cases(folders: list[Path]) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Find the cases below folders, with their manifests."""
    for folder in folders:
        for path in sorted(folder.rglob("manifest.json")):
            yield path.parent, json.loads(path.read_text(encoding="utf-8"))


def simulate(module: str, folder: Path, name: str) -> Outcome:
    """Compile a testbench for a case, whose sizes it has from there, and run it."""
    sources = [HERE / f"{each}.sv" for each in (*SHARED, module)]
    with tempfile.TemporaryDirectory() as scratch:
        program = Path(scratch) / "a.vvp"
        command = ["iverilog", "-g2012", "-I", str(folder), "-s", f"{module}_tb", "-o", str(program)]
        command += [*map(str, sources), str(HERE / "tb" / f"{module}_tb.sv")]
        made = subprocess.run(command, capture_output=True, text=True)
        if made.returncode:
            return Outcome(name, 0, 1, 0, made.stdout + made.stderr)
        ran = subprocess.run(["vvp", "-n", str(program)], cwd=folder, capture_output=True, text=True)
    log = ran.stdout + ran.stderr
    result = _RESULT.search(log)
    if ran.returncode or result is None or int(result[1]) == 0 or "WARNING" in log or "ERROR" in log:
        return Outcome(name, 0, 1, 0, log)
    values, mismatches, cycles = map(int, result.groups())
    return Outcome(name, values, mismatches, cycles, log if mismatches else "")


def main() -> int:
    parser = argparse.ArgumentParser(description="Run RTL testbenches on the folders that qflash vectors --trace wrote.")
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument("--module", action="append", choices=list(STEPS), help="only this one; repeatable")
    parser.add_argument("--jobs", type=int, default=2, help="testbenches at a time (default: 2)")
    arguments = parser.parse_args()
    if missing := [tool for tool in ("iverilog", "vvp") if shutil.which(tool) is None]:
        print(f"rtl/run.py: {missing[0]} is not installed (Debian, Ubuntu: apt-get install iverilog)", file=sys.stderr)
        return 1
    wanted = arguments.module or list(STEPS)
    jobs: list[tuple[str, Path, str]] = []
    without: dict[str, int] = {}
    try:
        for folder, manifest in cases(arguments.folders):
            found = modules_of(manifest)
            jobs += [(module, folder, manifest["name"]) for module in found if module in wanted]
            if not found:
                without[manifest["operation"]] = without.get(manifest["operation"], 0) + 1
    except ValueError as error:
        print(f"rtl/run.py: {error}", file=sys.stderr)
        return 1
    with ThreadPoolExecutor(arguments.jobs) as pool:
        outcomes = list(pool.map(lambda job: simulate(*job), jobs))
    for module in wanted:
        own = [outcome for job, outcome in zip(jobs, outcomes, strict=True) if job[0] == module]
        for outcome in own:
            if outcome.mismatches:
                print(f"{module}: {outcome.case} differs or failed:\n{outcome.log[:2000]}")
        values, mismatches, cycles = (sum(getattr(each, name) for each in own) for name in ("values", "mismatches", "cycles"))
        print(f"{module}: {len(own)} cases, {values} values, {mismatches} mismatches, {cycles} cycles")
    if without:
        print("without a module here: " + ", ".join(f"{count} of {name}" for name, count in sorted(without.items())))
    return int(not outcomes or any(outcome.mismatches for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
