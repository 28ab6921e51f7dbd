"""Results of a kind of card were measured with the kernels of one commit: for the card of the pages, the one they name."""

from __future__ import annotations

import functools
import json
import re
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

import qflash
from helpers import BENCHMARKS, load_benchmark
from qflash_lab.bench import records

ROOT = BENCHMARKS.parent
RESULTS = BENCHMARKS / "results"
PAGES_CARD = load_benchmark("pages").CARD
KERNELS = (
    "src/qflash/kernels/common", "src/qflash/kernels/gluon", "src/qflash/kernels/triton", "src/qflash/kernels/heuristics.py",
    "src/qflash/kernels/tiles.py", "src/qflash/network", "lab/src/qflash_lab/baselines/*.py",
)  # fmt: skip
OTHERS = ("authors_kernel", "biased_models", "overlap", "gpu_tests", "real", "accuracy", "peers", "networks")
"""Beginnings of the names of results that are not of this library's kernels, no times, or of a commit that tables name."""

card_of = load_benchmark("measure").card_of


def environments(record: Any) -> list[dict[str, Any]]:
    """Return what a result says of where it was measured, run by run; nothing for a result that is not of a GPU."""
    if not isinstance(record, dict):
        return []
    several = record.get("environments") or [record.get("environment") or record]
    return [each for each in several if "NVIDIA" in str(each.get("device"))]


def read_gpu_results(paths: Iterable[Path]) -> dict[str, list[tuple[str, list[dict[str, Any]]]]]:
    """Return names and environments of the results of GPUs, by kind of card."""
    found: dict[str, list[tuple[str, list[dict[str, Any]]]]] = {}
    for path in sorted(paths):
        runs = environments(json.loads(path.read_text()))
        cards = {card_of(run["device"]).partition("-")[0] for run in runs}
        assert len(cards) <= 1, f"{path.name} is of several cards: {sorted(cards)}"
        for card in cards:
            assert card in re.split("[_-]", path.stem), f"{path.name} was measured on a {runs[0]['device']}"
            found.setdefault(card, []).append((path.stem, runs))
    return found


def differing(
    results: list[tuple[str, list[dict[str, Any]]]], base: str | None, changed: Callable[[str, str], str | None]
) -> list[str]:
    """Name the results of one card whose kernels are not those of the others, or of a commit.

    Args:
        results: of :func:`read_gpu_results`.
        base: the commit; None for that of the first result.
        changed: gives the kernels' files that differ between two commits, None where git does not know them.
    """
    timed = [(name, str(run.get("commit"))) for name, runs in results if not name.startswith(OTHERS) for run in runs]
    base = base or (timed[0][1] if timed else "")
    return [f"{name}: {commit}" for name, commit in timed if commit != base and changed(base, commit) != ""]


def named() -> str:
    """Return the commit that the page of results names."""
    found = re.search(r"kernels of commit ([0-9a-f]{7})", (ROOT / "docs" / "performance.md").read_text())
    assert found
    return found[1]


@functools.cache
def files_changed(base: str, commit: str) -> str | None:
    """Return the kernels' files that differ between two commits; None where git does not know one."""
    command = ["git", "-C", str(ROOT), "diff", "--name-only", base, commit, "--", *KERNELS]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else None


FOUND = read_gpu_results(RESULTS.glob("*.json"))


def test_the_pages_are_of_one_card() -> None:
    assert len(FOUND[PAGES_CARD]) > 15
    assert (
        f"All times and energies of this page and its tables are an {PAGES_CARD.upper()}'s"
        in (ROOT / "docs" / "performance.md").read_text()
    )


@pytest.mark.parametrize("card", sorted(FOUND))
def test_every_result_of_a_card_names_a_commit_with_the_same_kernels(card: str) -> None:
    if files_changed(named(), named()) is None:
        pytest.skip("this is no clone with its history")
    assert not differing(FOUND[card], named() if card == PAGES_CARD else None, files_changed)


def test_tables_beside_other_packages_name_the_commit_of_their_run() -> None:
    page = (ROOT / "docs" / "performance" / "tables.md").read_text().replace("\n", " ")
    found = [(name, run["commit"]) for name, runs in FOUND[PAGES_CARD] if name.startswith("peers_") for run in runs]
    assert len(found) >= 2
    for name, commit in found:
        section = next(part for part in page.split("## ") if f"/{name}.json" in part)
        assert f"Kernels of commit {commit}" in section


def write(folder: Path, name: str, device: str, commit: str | None) -> Path:
    """Write a result as a benchmark would."""
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"environment": {"device": device, "commit": commit}, "rows": []}))
    return path


def test_results_of_another_card_are_compared_with_one_another(tmp_path: Path) -> None:
    a100, ada = "NVIDIA A100-SXM4-80GB", "NVIDIA GeForce RTX 4090"
    paths = [
        write(tmp_path, "bench_a100-sxm4-80gb", a100, "new"), write(tmp_path, "energy_a100", a100, "same"),
        write(tmp_path, "models_4090", ada, "newest"), write(tmp_path, "real_fashion_a100", a100, None),
        write(tmp_path, "bench_cpu", "x86_64 CPU", None),
    ]  # fmt: skip
    found = read_gpu_results(paths)
    assert {card: len(results) for card, results in found.items()} == {"a100": 3, "4090": 1}

    def changed(base: str, commit: str) -> str | None:
        return {"same": "", "other": "kernels.py", "new": ""}.get(commit)

    assert not differing(found["a100"], None, changed) and not differing(found["4090"], None, changed)
    paths.append(write(tmp_path, "shapes_a100", a100, "other"))
    paths.append(write(tmp_path, "varlen_a100", a100, "unknown"))
    paths.append(write(tmp_path, "profile_a100", a100, None))
    different = differing(read_gpu_results(paths)["a100"], None, changed)
    assert different == ["profile_a100: None", "shapes_a100: other", "varlen_a100: unknown"]


def test_the_pages_leave_out_other_cards() -> None:
    shown = load_benchmark("reproduction_tables")._is_shown
    devices = ("NVIDIA H200", "NVIDIA A100-SXM4-80GB", "NVIDIA GeForce RTX 4090", "x86_64 CPU", "?")
    assert [shown(device) for device in devices] == [True, False, False, True, True]


def test_a_result_is_of_the_card_in_its_name(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="was measured on a NVIDIA H100"):
        read_gpu_results([write(tmp_path, "bench_h200", "NVIDIA H100 80GB HBM3", "new")])


def test_results_name_the_commit_that_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QFLASH_COMMIT", "abc1234")
    assert records.environment(torch.device("cpu"))["commit"] == "abc1234"
    monkeypatch.delenv("QFLASH_COMMIT")
    commit = records.environment(torch.device("cpu"))["commit"]
    if (Path(qflash.__file__).resolve().parents[2] / ".git").exists():
        assert re.fullmatch(r"[0-9a-f]{7,}(-dirty)?", commit)
    else:
        assert commit is None


def test_recorded_commands_hold_no_path_of_one_machine() -> None:
    words = ("qflash-lab", "bench", "--output", "/tmp/x/y", "--csv=/root/a.json", "a/b", "--shape", "1,2", "/home/x/")
    assert records.command_line(*words) == "qflash-lab bench --output y --csv=a.json a/b --shape 1,2 x"
    for path in (*RESULTS.rglob("*.json"), *(BENCHMARKS / "archive").glob("*.json")):
        for command in re.findall(r'"command": "([^"\n]*)"', path.read_text(encoding="utf-8")):
            assert not re.search(r"(^|[\s=])/", command), f"{path.name}: {command}"
