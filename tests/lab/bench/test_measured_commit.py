"""What the pages show of a GPU was measured on one kind of card, with the kernels of one commit, which they name."""

from __future__ import annotations

import functools
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import qflash
from helpers import BENCHMARKS
from qflash_lab.bench import records

ROOT = BENCHMARKS.parent
CARD = "h200"
KERNELS = (
    "src/qflash/kernels/common", "src/qflash/kernels/gluon", "src/qflash/kernels/triton", "src/qflash/kernels/heuristics.py",
    "src/qflash/kernels/tiles.py", "src/qflash/network", "lab/src/qflash_lab/baselines/*.py",
)  # fmt: skip
OTHERS = ("authors_kernel", "overlap", "gpu_tests")
"""Beginnings of the names of results that are not of this library's kernels, or no times."""


def named() -> str:
    """Return the commit that the page of results names."""
    found = re.search(r"kernels of commit ([0-9a-f]{7})", (ROOT / "docs" / "performance.md").read_text())
    assert found
    return found[1]


def gpu_results() -> list[Path]:
    """Return the results of a GPU beside ``trials``."""
    found = [path for path in (BENCHMARKS / "results").glob("*.json") if re.search(r"_[a-z]+\d{2,}$", path.stem)]
    return sorted(path for path in found if not path.stem.startswith(("verify", "cpu")))


def environments(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what a result file says of where it was measured, run by run."""
    several: list[dict[str, Any]] = record.get("environments") or [record["environment"]]
    return several


@functools.cache
def changed(commit: str) -> str | None:
    """Return the kernels' files that differ between a commit and the one that is named; None where git does not know it."""
    command = ["git", "-C", str(ROOT), "diff", "--name-only", named(), commit, "--", *KERNELS]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else None


def test_every_result_is_of_one_card() -> None:
    assert len(gpu_results()) > 15
    # accuracy does not depend on the card: all have the same bits
    assert [path.name for path in gpu_results() if not path.stem.endswith(CARD)] == ["real_fashion_h100.json"]


@pytest.mark.parametrize("path", [path for path in gpu_results() if path.stem.endswith(CARD)], ids=lambda path: path.stem)
def test_every_result_names_a_commit_with_the_same_kernels(path: Path) -> None:
    record = json.loads(path.read_text())
    if path.stem.startswith(OTHERS):
        assert "H200" in record["device"]
        return
    for environment in environments(record):
        assert "H200" in environment["device"]
        if changed(named()) is None:
            pytest.skip("this is no clone with its history")
        assert changed(environment["commit"]) == "", environment["commit"]


def test_results_name_the_commit_that_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QFLASH_COMMIT", "abc1234")
    assert records.environment(torch.device("cpu"))["commit"] == "abc1234"
    monkeypatch.delenv("QFLASH_COMMIT")
    commit = records.environment(torch.device("cpu"))["commit"]
    if (Path(qflash.__file__).resolve().parents[2] / ".git").exists():
        assert re.fullmatch(r"[0-9a-f]{7,}(-dirty)?", commit)
    else:
        assert commit is None
