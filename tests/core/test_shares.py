"""The slow cases that are run without ``--all`` are always the same ones, and no case depends on another."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

TESTS = Path(__file__).parents[1]
ANOTHER_DAY = """
import datetime, time

class date(datetime.date):
    @classmethod
    def today(cls):
        return cls({0})

class Datetime(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls({0}, tzinfo=tz)

now = Datetime({0}).timestamp()
datetime.date, datetime.datetime = date, Datetime
time.time = lambda: now
"""


def collected(folder: Path, day: str, *options: str) -> list[str]:
    """Return the names of the cases that pytest would run on a day."""
    folder.mkdir()
    (folder / "another_day.py").write_text(ANOTHER_DAY.format(day))
    paths = os.pathsep.join([str(folder), *sys.path])
    command = [sys.executable, "-m", "pytest", "-p", "another_day", "--collect-only", "-p", "no:cacheprovider", *options]
    done = subprocess.run(
        [*command, "-m", "slow", str(TESTS / "core" / "test_fixed_point.py"), str(TESTS / "core" / "test_reference.py")],
        cwd=TESTS.parent, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [line for line in done.stdout.splitlines() if "::" in line]


def test_every_day_has_the_same_cases(tmp_path: Path) -> None:
    days = [collected(tmp_path / day.replace(", ", "-"), day) for day in ("2026, 1, 1", "2031, 12, 31")]
    assert days[0] == days[1] != []
    every = collected(tmp_path / "all", "2026, 1, 1", "--all")
    assert len(every) > len(days[0]) and {*days[0]} < {*every}


class Item:
    """A case with a name."""

    def __init__(self, nodeid: str, slow: pytest.MarkDecorator | None = None) -> None:
        self.nodeid, self.slow = nodeid, slow

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return self.slow.mark if self.slow and name == "slow" else None


def test_a_part_of_the_slow_cases_and_all_others_are_run(pytestconfig: pytest.Config) -> None:
    # there are several modules of this name
    plugins: Any = pytestconfig.pluginmanager.get_plugins()
    conftest = next(each for each in plugins if getattr(each, "__file__", "") == str(TESTS / "conftest.py"))
    names = [f"test[{number}]" for number in range(8000)]
    assert all(conftest.is_chosen(Item(name)) for name in names)
    for mark, share in ((pytest.mark.slow, conftest.SHARE), (pytest.mark.slow(5), 5)):
        assert abs(sum(conftest.is_chosen(Item(name, mark)) for name in names) - 8000 / share) < 100
    # the one place that has the number
    assert any(f"one of {conftest.SHARE} is run" in line for line in pytestconfig.getini("markers"))


@pytest.mark.parametrize("number", range(2))
def test_what_is_drawn_without_a_seed_is_the_same_in_every_test(number: int) -> None:
    drawn = torch.randint(0, 1 << 60, (1,)).item(), random.random(), float(np.random.random())
    generator = torch.Generator().manual_seed(0)
    expected = torch.randint(0, 1 << 60, (1,), generator=generator).item(), random.Random(0).random()
    assert drawn == (*expected, float(np.random.RandomState(0).random()))


def test_hypothesis_has_the_same_examples_in_every_run() -> None:
    hypothesis = pytest.importorskip("hypothesis")
    assert hypothesis.settings().derandomize and hypothesis.settings().database is None
