"""qflash-lab bench --base and qflash-lab models --base: two revisions in alternation, on the CPU with tiny shapes."""

from __future__ import annotations

import json
import pathlib
import shutil
import subprocess

import pytest
import torch
from typer.testing import CliRunner

from qflash_lab.bench import problems, revisions
from qflash_lab.cli import app

CPU = torch.device("cpu")
OPTIONS = {"recipes": ["default"], "kind": "uniform", "dtype": torch.float32, "device": CPU, "rounds": 1}
MODEL_OPTIONS = {"recipes": ["default"], "dtype": torch.float32, "device": CPU, "rounds": 1}
HERE = str(revisions.PACKAGE.parent)


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
    record = revisions.run_revisions(
        SHAPES, "HEAD", modes=["kernel", "end-to-end", "eager"], output=tmp_path, **OPTIONS | {"rounds": 2}
    )
    rows = record["rows"]
    assert [(row["bias"], row["mode"]) for row in rows] == [
        (bias, mode) for bias in (False, True) for mode in ("kernel", "end-to-end", "eager")
    ]
    for row in rows:
        assert row["error"] is None and row["samples"] == 2
        assert 0 < row["ratio_q1"] <= row["ratio"] <= row["ratio_q3"]
        assert row["same_bits"] is True and row["base_sqnr_db"] == row["new_sqnr_db"] > 30 and row["sqnr_of"] == "whole"
    head = subprocess.run(["git", "-C", str(revisions.PACKAGE), "rev-parse", "HEAD"], capture_output=True, text=True).stdout
    assert head.startswith(record["base"]) and len(record["base"]) == 10
    assert record["new"].removesuffix(" with changes") == record["base"]
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
    assert slow["same_bits"] is False and slow["base_sqnr_db"] < 10 < slow["new_sqnr_db"]
    assert lacking["error"] == f"{folder}: AttributeError: module 'qflash' has no attribute 'quantize'"
    assert lacking["ratio"] is None and lacking["new_sqnr_db"] > 30
    assert "0.0" in (shown := capsys.readouterr().out) and "no attribute" in shown


@pytest.mark.slow
def test_windows_recipes_and_what_a_package_prints(tmp_path: pathlib.Path, capfd: pytest.CaptureFixture) -> None:
    shutil.copytree(revisions.PACKAGE, tmp_path / "qflash")
    with (tmp_path / "qflash" / "__init__.py").open("a") as file:
        file.write("print('loud')")
    swin = [problems.Problem("x", 2, (8, 2, 9, 16), 9, windows=4, bias=True)]
    options = OPTIONS | {"recipes": ["default", "per-tensor"]}
    record = revisions.run_revisions(swin, str(tmp_path), modes=["kernel", "end-to-end"], **options)
    made = [("kernel", "default"), ("end-to-end", "default"), ("end-to-end", "per-tensor")]
    assert [(row["mode"], row["recipe"]) for row in record["rows"]] == made
    assert all(row["error"] is None and row["same_bits"] for row in record["rows"])
    assert capfd.readouterr().err.count("loud") == 1


def test_a_revision_that_ends_under_way_has_a_row_with_the_error(tmp_path: pathlib.Path) -> None:
    folder = package(tmp_path, "import os\ndef attention(*_, **__): os._exit(7)")
    first, second = revisions.run_revisions(SHAPES, str(folder), modes=["end-to-end"], **OPTIONS)["rows"]
    assert first["error"] == second["error"] == f"{folder}: the process that times it ended with status 7"


@pytest.mark.slow
def test_models(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("timm")
    record = revisions.run_model_revisions(["digits-swin"], [1], HERE, output=tmp_path, **MODEL_OPTIONS)
    assert [row["method"] for row in record["rows"]] == ["qflash", "qflash kept bias"]
    for row in record["rows"]:
        assert row["error"] is None and row["same_bits"] is True and row["ratio"] > 0 and row["sqnr_of"] == "logits"
        assert 20 < row["base_sqnr_db"] < 70
    assert json.loads((tmp_path / "models_revisions.json").read_text())["rows"] == record["rows"]
    assert (tmp_path / "models_revisions.csv").read_text().count("\n") == 3


@pytest.mark.slow
def test_a_revision_that_keeps_no_bias(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("timm")
    folder = package(tmp_path, "def patch(model, recipe): return model")
    plain, kept = revisions.run_model_revisions(["digits-swin"], [1], str(folder), **MODEL_OPTIONS)["rows"]
    assert plain["error"] is None and plain["same_bits"] is False and plain["base_sqnr_db"] > 80
    assert kept["error"] == f"{folder}: TypeError: patch() got an unexpected keyword argument 'keep_bias'"


@pytest.mark.parametrize("text", ["import sys; sys.exit(3)", "raise ImportError('broken')"])
@pytest.mark.slow
def test_a_revision_that_does_not_start_is_an_error(tmp_path: pathlib.Path, text: str) -> None:
    with pytest.raises(revisions.RevisionError, match="the process that times it ended with status"):
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
        (["bench", "--shape", "1,2,9,16", "--base", "HEAD", "--method", "sdpa"], "leave --method and --peer out"),
        (["bench", "--shape", "1,2,9,16", "--base", "HEAD", "--mode", "fast"], "mode must be one of"),
        (["bench", "--shape", "1,2,9,16", "--base", "HEAD", "--recipe", "fast"], "recipe must be one of"),
        (["bench", "--shape", "1,2,9,16", "--base", "no-such-revision"], "base must be a git revision"),
        (["models", "--model", "digits-vit", "--base", "HEAD", "--peer", "a=b:c"], "leave --method and --peer out"),
        (["models", "--model", "digits-vit", "--base", "no-such-revision"], "base must be a git revision"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str) -> None:
    pytest.importorskip("timm")
    done = CliRunner().invoke(app, [*arguments, "--device", "cpu"])
    assert done.exit_code == 2 and message in done.output
