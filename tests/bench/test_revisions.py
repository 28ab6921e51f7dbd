"""qflash bench --base: two revisions by turns, on the CPU with tiny shapes."""

from __future__ import annotations

import json
import pathlib
import subprocess

import pytest
import torch
from typer.testing import CliRunner

from qflash.bench import problems, revisions
from qflash.cli import app

CPU = torch.device("cpu")
OPTIONS = {"recipes": ["default"], "kind": "uniform", "dtype": torch.float32, "device": CPU, "rounds": 3}


def in_git() -> bool:
    command = ["git", "-C", str(revisions.PACKAGE), "rev-parse", "--verify", "HEAD:./api.py"]
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


needs_git = pytest.mark.skipif(not in_git(), reason="the package does not lie in a git repository")
SHAPES = problems.make_problems((), ("1,2,9,16",), (1,), bias=True)


@needs_git
@pytest.mark.slow
def test_a_revision_is_compared_with_what_is_here(tmp_path: pathlib.Path) -> None:
    record = revisions.run_revisions(SHAPES, "HEAD", modes=["kernel", "end-to-end", "eager"], output=tmp_path, **OPTIONS)
    rows = record["rows"]
    assert [(row["bias"], row["mode"]) for row in rows] == [
        (bias, mode) for bias in (False, True) for mode in ("kernel", "end-to-end", "eager")
    ]
    for row in rows:
        assert row["error"] is None and row["samples"] == 3
        assert 0 < row["ratio_q1"] <= row["ratio"] <= row["ratio_q3"]
    head = subprocess.run(["git", "-C", str(revisions.PACKAGE), "rev-parse", "HEAD"], capture_output=True, text=True).stdout
    assert head.startswith(record["base"]) and len(record["base"]) == 10
    assert json.loads((tmp_path / "revisions.json").read_text())["rows"] == rows
    assert (tmp_path / "revisions.csv").read_text().count("\n") == len(rows) + 1


def package(folder: pathlib.Path, text: str) -> pathlib.Path:
    """Write a package called qflash."""
    (folder / "qflash").mkdir()
    (folder / "qflash" / "__init__.py").write_text(text)
    return folder


SLOW = """
import time
__version__ = "slow"
def attention(query, key, value, bias, is_causal, recipe):
    time.sleep(0.02)
    return query
"""


def test_the_processes_time_the_packages_that_they_are_told(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture) -> None:
    folder = package(tmp_path, SLOW)
    record = revisions.run_revisions(SHAPES[:1], str(folder), modes=["end-to-end", "kernel"], **OPTIONS)
    slow, lacking = record["rows"]
    # QFlash takes far less than 20 ms, on a busy machine, too
    assert slow["base_us"] > 20_000 and slow["ratio"] < 0.9
    assert lacking["error"] == "AttributeError: module 'qflash' has no attribute 'quantize'"
    assert "0.0" in (shown := capsys.readouterr().out) and "no attribute" in shown


@pytest.mark.parametrize("text", ["import sys; sys.exit(3)", "raise ImportError('broken')"])
def test_a_revision_that_does_not_start_is_an_error(tmp_path: pathlib.Path, text: str) -> None:
    with pytest.raises(RuntimeError, match="the process that times a revision ended with status"):
        revisions.run_revisions(SHAPES, str(package(tmp_path, text)), modes=["kernel"], **OPTIONS)


@needs_git
@pytest.mark.parametrize("base", ["no-such-revision", "", "--output=x", "HEAD:README.md"])
def test_what_is_no_revision_is_refused(base: str) -> None:
    with pytest.raises(ValueError, match=r"base must be a git revision .*, or a folder that holds the package, got"):
        revisions.run_revisions(SHAPES, base, modes=["kernel"], **OPTIONS)


def test_outside_a_repository_only_folders_are_taken(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "qflash").mkdir()
    monkeypatch.setattr(revisions, "PACKAGE", tmp_path / "qflash")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(ValueError, match=r"base must be a git revision .* got 'HEAD'"):
        revisions.export("HEAD", tmp_path)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValueError, match="there is no git here"):
        revisions.export("HEAD", tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--base", "HEAD", "--method", "sdpa"], "leave --method and --peer out"),
        (["--base", "HEAD", "--mode", "fast"], "mode must be one of"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["bench", "--device", "cpu", "--shape", "1,2,9,16", *arguments])
    assert done.exit_code == 2 and message in done.output
