"""``qflash-lab bench --first-call``: processes of its own, whose caches are its own, too."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
from typer.testing import CliRunner

from qflash.kernels.cpu import launch as cpu
from qflash_lab.bench import first_call
from qflash_lab.cli import app

SMALL = ("1,1,9,16", "1,1,9,16,12")


def test_every_problem_is_called_once_with_empty_and_once_with_filled_caches(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """The C library of the CPU back end is compiled by the first process, and found by the second."""
    compiler = tmp_path / "cc"
    # of two options -O the last counts: what is compiled need not be fast
    compiler.write_text(f'#!/bin/sh\nexec "{cpu._compiler()[0]}" "$@" -O0\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    seen: list[set[str]] = []
    run = first_call._run

    def watched(order: dict[str, Any], folder: str, tick: Any) -> list[dict[str, Any]]:
        answers = run(order, folder, tick)
        seen.append({path.name for path in pathlib.Path(folder).rglob("*") if path.is_file()})
        return answers

    monkeypatch.setattr(first_call, "_run", watched)
    done = CliRunner().invoke(
        app, ["bench", "--first-call", "--device", "cpu", *(f"--shape={shape}" for shape in SMALL), "--output", str(tmp_path)]
    )
    assert done.exit_code == 0, done.output
    assert seen[0] and seen[0] == seen[1]
    record = json.loads((tmp_path / "first_call.json").read_text())
    assert [(row["shape"], row["keys"], row["dtype"], row["error"]) for row in record["rows"]] == [
        ("1x1x9x16", 9, "float32", None), ("1x1x9x16", 12, "float32", None),
    ]  # fmt: skip
    for which in ("empty_s", "warm_s"):
        assert all(row[which] > 0 for row in record["rows"])
        assert record["total"][which] == pytest.approx(sum(row[which] for row in record["rows"]))
    assert "all 2" in done.output and (tmp_path / "first_call.csv").is_file()


def test_an_error_is_a_row() -> None:
    told: list[dict[str, Any]] = []
    order = {"device": "cpu", "dtype": "float64", "problems": [((1, 1, 2, 16), 2, False)]}
    first_call.time_calls(order, lambda line: told.append(json.loads(line)))
    assert list(told[0]) == ["error"] and told[0]["error"].startswith("TypeError: query must be")


def test_a_process_that_ends_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_call.sys, "executable", "/bin/false")
    found = first_call._run({"device": "cpu", "dtype": "float32", "problems": [((1, 1, 2, 16), 2, False)]}, "/nowhere", print)
    assert found == [{"error": "the process ended with status 1"}]


@pytest.mark.parametrize("option", ["--method=qflash", "--recipe=accurate", "--mode=eager", "--base=HEAD", "--bias"])
def test_what_does_not_go_together(option: str) -> None:
    done = CliRunner().invoke(app, ["bench", "--first-call", "--device", "cpu", "--shape", SMALL[0], option])
    assert done.exit_code == 2 and "first-call" in done.output
