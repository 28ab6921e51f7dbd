"""Write the tables of docs/reliability.md from the records in results/reliability.

``python benchmarks/reliability_tables.py``
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import declared
import pages
from declared import FILE, Table
from qflash_lab.bench.schema import Row
from qflash_lab.bench.tables import Column, names

FOLDER = "reliability"
PLACE = "place"
"""The key under which a line says where in its file it is."""


def record(name: str) -> Any:
    """Return a record by its name in results/reliability."""
    return declared.record(f"{FOLDER}/{name}")


def line(file: str, place: str, found: Row, **more: Any) -> Row:
    """Return a line of a table: an entry of a record, where that is, and what else is shown."""
    return found | more | {FILE: f"{FOLDER}/{file}.json", PLACE: place}


def checks(options: Row, flags: Iterable[str]) -> str:
    """Return what looked for faults in a run of the CPU kernels."""
    if "-fsanitize-undefined-trap-on-error" in flags:
        return "UndefinedBehaviorSanitizer's traps, zones around buffers, in qemu"
    return "both sanitizers" + ", without optimisation" * ("--optimise=-O0" in options["command"])


def sanitized() -> list[Row]:
    """Return the instruction sets under the sanitizers."""
    found = []
    for place, run in enumerate(record("sanitize_cpu")["runs"]):
        for name, level in run["levels"].items():
            why = f"not run: {level['left_out']}" if "left_out" in level else checks(run, level["flags"])
            found.append(line("sanitize_cpu", f"runs[{place}].levels[{name!r}]", level, name=name, why=why))
    return found


def races() -> list[Row]:
    """Return the instruction sets under ThreadSanitizer."""
    return [line("races_cpu", f"levels[{name!r}]", level, name=name) for name, level in record("races_cpu")["levels"].items()]


TOOLS = "memcheck", "racecheck", "initcheck", "synccheck"
"""Of compute-sanitizer."""


def gpu_runs() -> list[Row]:
    """Return the runs of the GPU kernels."""
    found_by = record("sanitize_gpu")
    plain = found_by["plain"]
    name = f"plain, with zones around {plain['allocations_with_zones']} allocations"
    found = [line("sanitize_gpu", "plain", plain, name=name, errors=len(plain["faults"]), planted="")]
    for tool in TOOLS:
        entry = found_by["tools"][tool]
        planted = "found" if entry["planted"]["found"] else "not found"
        found.append(line("sanitize_gpu", f"tools[{tool!r}]", entry, name=tool, planted=planted))
    return found


NEWTON = {
    "reciprocal": "reciprocal of a row sum, all D from 2^30, below 2^31",
    "inverse_root": "inverse root of a variance, all v from 2^28, below 2^30",
}


def newton() -> list[Row]:
    """Return the Newton iterations."""
    entries = record("bounds")["newton"]
    return [line("bounds", f"newton[{key!r}]", entries[key], name=name) for key, name in NEWTON.items()]


def newton_errors() -> list[str]:
    """Say how large the relative errors are."""
    worst = [f"2^{math.log2(row['worst']):.1f}" for row in newton()]
    return pages.wrap(f"The largest relative errors are {' and '.join(worst)}.")


def of_file(file: str, part: str, what: str) -> Row:
    """Return the changes of one source file."""
    entry = record(file)["files"][part]
    entry = {key: entry.get(key, 0) for key in ("caught", "explained", "survived")}
    return line(file, f"files[{part!r}]", entry, what=what, tried=sum(entry.values()), date=record(file)["date"])


def mutants() -> list[Row]:
    """Return what was changed and what became of it."""
    whole = {
        "mutation_python": "`fixed_point.py`, `reference.py`, `quantization.py` and `layers.py` whole",
        "mutation_choices": "six files that hold more than arithmetic, a sample",
        "mutation_seed2": "all files, `--sample 250 --seed 2`, ended early",
    }
    rows = [line(file, "totals", record(file), what=what) for file, what in whole.items()]
    network = of_file("mutation_c", "src/qflash/kernels/cpu/network.c", "`network.c` whole, what changes the machine code")
    attention = of_file("mutation_c", "src/qflash/kernels/cpu/attention.c", "`attention.c`, three samples")
    return [rows[0], network, attention, *rows[1:]]


def again(file: str) -> str:
    """Say what became of the changes that tests let pass at first."""
    results = record(file)["results"]
    late = [row for row in results if row["again"] or row["result"] == "survived"]
    count = {kind: sum(row["result"] == kind for row in late) for kind in ("caught", "explained", "survived")}
    untried = sum(row["result"] == "explained" and not row["again"] for row in results)
    said = f"{len(late)} passed when they were first tried: tests catch {count['caught']} of them now"
    said += f", {count['explained']} {'is' if count['explained'] == 1 else 'are'} explained"
    said += f", {count['survived']} still passed in that run" * bool(count["survived"])
    return said + f"; {untried} more are explained and were not tried" * bool(untried) + "."


def mutants_again() -> list[str]:
    """Say it of each record."""
    parts = {
        "mutation_python": "Of the Python files' changes",
        "mutation_c": "Of the C sources'",
        "mutation_choices": "Of the six files'",
    }
    return pages.wrap(" ".join(f"{text} {again(file)}" for file, text in parts.items()))


SAVED = ("test_changed_bytes", "test_changed_headers", "test_changed_tensors")
"""Tests of tests/fuzz that change files of networks."""


def fuzzed() -> list[str]:
    """Say how many random examples were run."""
    entry = record("fuzz")
    files = sum(entry["tests"][name]["passed"] for name in SAVED)
    failed = f"{entry['failed']} failed" if entry["failed"] else "none failed"
    return pages.wrap(
        f"On {entry['date']} `--times {entry['times']}` ran {entry['passed'] - files} examples of calls and {files} of changed "
        f"files on a CPU, {failed}."
    )


def pythons() -> list[Row]:
    """Return the runs with each Python."""
    return [line("python_versions", f"runs[{name!r}]", run) for name, run in record("python_versions")["runs"].items()]


def got(key: str) -> Callable[[Row], Any]:
    """Return what gives a line's value."""
    return lambda row: row.get(key)


def table(lines: Callable[[], list[Row]], first: str, key: str, others: dict[str, str]) -> Table:
    """Return a table of whole values: a column of names, then a column for each key with its heading."""
    columns = (names(first, key), *(Column(heading, got(key), declared.blank("")) for key, heading in others.items()))
    return Table(lines, columns, lambda row: f"{row[FILE]}: {row[PLACE]}: {', '.join(key for key in others if key in row)}")


CALLS = {"calls": "Calls", "failed": "Faults", "seconds": "Seconds"}
VERSIONS = {"torch": "PyTorch", "triton": "Triton", "numpy": "NumPy", "timm": "timm", "transformers": "transformers"}
TABLES = {
    "reliability:sanitizers": table(sanitized, "Instructions", "name", CALLS | {"why": "Checks"}),
    "reliability:races": table(races, "Instructions", "name", {"calls": "Calls", "failed": "Races", "seconds": "Seconds"}),
    "reliability:gpu": table(
        gpu_runs, "Run", "name",
        {"calls": "Calls", "launches": "Launches", "errors": "Reports", "planted": "Planted fault", "seconds": "Seconds"},
    ),
    "reliability:newton": table(
        newton, "Newton iteration", "name", {"tried": "Arguments", "low": "Lowest result", "high": "Highest result"}
    ),
    "reliability:mutation": table(
        mutants, "What", "what",
        {"date": "Until", "tried": "Tried", "caught": "Caught", "explained": "Explained", "survived": "Passed"},
    ),
    "reliability:pythons": table(
        pythons, "Python", "python", VERSIONS | {"passed": "Passed", "skipped": "Skipped", "failed": "Failed"}
    ),
}  # fmt: skip
"""Between markers of the page."""


PARTS = declared.Parts(
    TABLES,
    {"reliability:errors": newton_errors, "reliability:again": mutants_again, "reliability:fuzz": fuzzed},
    lambda: [*{row[FILE] for each in TABLES.values() for row in each.lines()}, f"{FOLDER}/fuzz.json"],
)


if __name__ == "__main__":
    PARTS.write()
