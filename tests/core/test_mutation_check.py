"""The mutation check changes what it should, and its explanations are of changes that exist."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import ModuleType

import pytest

from helpers import load_script

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "mutation_check.py"
pytestmark = pytest.mark.skipif(not SCRIPT.is_file(), reason="only the repository has the script")


@pytest.fixture(scope="module")
def mutation_check() -> ModuleType:
    return load_script(SCRIPT)


PYTHON = '''
def f(x: Annotated[int, 3], n: int = 4) -> int:
    """Adds 1."""
    y = (x << 2) if x.shape[-1] > n else x.round()
    raise ValueError(f"{x + 1}")
'''
CHANGED_PYTHON = [
    "    y = (x >> 2) if x.shape[-1] > n else x.round()",
    "    y = (x << 3) if x.shape[-1] > n else x.round()",
    "    y = (x << 2) if x.shape[-1] >= n else x.round()",
    "    y = (x << 2) if x.shape[-1] > n else x.floor()",
]
CHOICES = """
if not x.ready and y is None:
    x.count = 2 / n
    x.start(
        True,
    )
    total += 1
"""
CHANGED_CHOICES = {
    "not  -> ", "and -> or", "is -> is not", "x.count = 2 / n -> pass", "2 -> 3", "/ -> *", "x.start(True,) -> pass",
    "True -> False", "total += 1 -> pass", "1 -> 2",
}  # fmt: skip
C = """
#include <a8.h>
/* 1 + 2 */
int8_t x = (a + 0x0F) >> 2u; // 3
"""
CHANGED_C = [
    "int8_t x = (a - 0x0F) >> 2u; // 3",
    "int8_t x = (a + 16) >> 2u; // 3",
    "int8_t x = (a + 0x0F) << 2u; // 3",
    "int8_t x = (a + 0x0F) >> 3u; // 3",
]


@pytest.mark.parametrize(("language", "source", "expected"), [("python", PYTHON, CHANGED_PYTHON), ("c", C, CHANGED_C)])
def test_changes(mutation_check: ModuleType, language: str, source: str, expected: list[str]) -> None:
    changed = []
    for start, end, new in getattr(mutation_check, f"mutate_{language}")(source):
        lines = (source[:start] + new + source[end:]).splitlines()
        changed += [line for line, before in zip(lines, source.splitlines(), strict=True) if line != before]
    assert sorted(changed) == sorted(expected)


def test_changes_of_what_is_no_arithmetic(mutation_check: ModuleType) -> None:
    found = {f"{CHOICES[start:end]} -> {new}" for start, end, new in mutation_check.mutate_python(CHOICES, choices=True)}
    assert {"".join(each.split("\n    ")).replace("    True", "True").replace("\n", "") for each in found} == CHANGED_CHOICES
    for start, end, new in mutation_check.mutate_python(CHOICES, choices=True):
        compile(CHOICES[:start] + new + CHOICES[end:], "changed", "exec")
    plain = {CHOICES[start:end] for start, end, _ in mutation_check.mutate_python(CHOICES)}
    assert plain == {"1", "2"}


def test_a_record_counts_results_and_knows_its_mutants(mutation_check: ModuleType) -> None:
    path = "src/qflash/specification/fixed_point.py"
    mutants = mutation_check.find_mutants(path)[:3]
    results = [
        {"path": path, "line": x.text, "change": f"{x.old} -> {x.new}", "place": x.place, "result": result, "again": again}
        for x, result, again in zip(mutants, ("caught", "explained", "caught"), (True, False, False), strict=True)
    ]
    assert [mutation_check.key_of(result) for result in results] == [mutant.key for mutant in mutants]
    record = mutation_check.record(argparse.Namespace(sample=3, seed=2), 2547, results)
    names = ("sample", "seed", "mutants", "tried", "tried again", "caught", "explained", "survived")
    assert [record[name] for name in names] == [3, 2, 2547, 3, 1, 2, 1, 0]
    assert record["files"][path] == {"caught": 2, "explained": 1}
    assert sum(sum(each.values()) for each in record["files"].values()) == 3


@pytest.mark.parametrize(("name", "words"), [("python", "Python files' changes"), ("c", "C sources'")])
def test_the_page_says_what_the_records_say(name: str, words: str) -> None:
    """How many of the changes that passed when they were first tried are caught now, and how many only explained."""
    root = SCRIPT.parents[1]
    record = json.loads((root / "benchmarks" / "results" / "reliability" / f"mutation_{name}.json").read_text("utf-8"))
    again = [each["result"] for each in record["results"] if each.get("again")]
    caught, explained = again.count("caught"), again.count("explained")
    page = " ".join((root / "docs" / "reliability.md").read_text("utf-8").split())
    start = page.index(f"Of the {words} {len(again)} passed")
    said = page[start : start + 200]
    assert f"tests catch {caught} of them now, {explained} are explained" in said
    assert f"{record['explained'] - explained} more are explained and were not tried" in said


def test_explanations_are_of_changes_that_exist(mutation_check: ModuleType) -> None:
    reasons = mutation_check.read_explanations()
    assert all(len(reason) > 20 for reason in reasons.values())
