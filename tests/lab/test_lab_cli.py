"""The ``qflash-lab`` command: what it prints and how it exits."""

from __future__ import annotations

import itertools
import json
import sys
import time
import types
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

from helpers import HELP_OF_ALL, imported_by, run_command
from qflash.cli import MOVED
from qflash_lab.cli import app
from qflash_lab.verify import proof

runner = CliRunner()


def test_version() -> None:
    result = runner.invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.output.strip() == f"qflash-lab {version('qflash-lab')}"


def test_module_runs_and_help_needs_no_pytorch() -> None:
    printed, imported = imported_by("qflash_lab", "--help")
    for command in MOVED:
        assert command in printed
    assert "qflash_lab.cli" in imported and imported.isdisjoint({"torch", "numpy", "triton"})


def test_help_of_every_command_needs_no_pytorch(tmp_path: Path) -> None:
    printed = run_command(tmp_path, "qflash-lab", "qflash_lab.cli", HELP_OF_ALL)
    names = [command.callback.__name__ for command in app.registered_commands if command.callback]
    assert printed.count("Usage: qflash-lab") == len(names) and set(MOVED) <= set(names)
    assert printed.endswith(" ".join(names) + " set()\n")


def help_of(*command: str) -> str:
    """Return what ``--help`` prints on a terminal of 80 columns."""
    return runner.invoke(app, [*command, "--help"], env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"}).output


def test_help_names_defaults_and_no_types_of_switches() -> None:
    assert "<bool>" not in "".join(line for line in help_of().splitlines() if "--version" in line)
    text = help_of("models")
    switches = [line for line in text.splitlines() if "--pretrained" in line or "--integer " in line]
    assert switches and not any("<bool>" in line for line in switches)
    flowing = " ".join(text.replace("│", " ").split())
    for default in (
        "Swin-T",
        "1, 8 and 64 on a GPU",
        "(all)",
        "(default)",
        "float16 on a GPU",
        "timm's own",
        "if there is one",
    ):
        assert default in flowing.partition("Options")[2], default


@pytest.mark.parametrize("command", ["verify", "models", "bench", "evaluate"])
def test_help_is_broken_at_the_terminals_width(command: str) -> None:
    prose = help_of(command).partition("╭")[0].splitlines()[2:]
    for line, after in itertools.pairwise(prose):
        if line.strip() and after.strip():
            # the next word would not have had room
            assert len(line.rstrip()) + 1 + len(after.split()[0]) > 79, line


@pytest.mark.parametrize(("option", "value", "known"), [("--target", "sm_75", "sm_90"), ("--case", "nonsense", "swin")])
def test_verify_refuses_unknown_names(option: str, value: str, known: str) -> None:
    result = runner.invoke(app, ["verify", option, value])
    assert result.exit_code == 2
    assert value in result.output
    assert known in result.output


def _verify_with(monkeypatch: pytest.MonkeyPatch, reports: list[proof.Report], *arguments: str) -> tuple[int, str]:
    monkeypatch.setattr(proof, "verify", lambda *args, **kwargs: reports)
    result = runner.invoke(app, ["verify", *arguments])
    return result.exit_code, result.output


def test_verify_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    good = proof.Report("vit", "sm_90", tile="64x256", warps=4, instructions=100, tensor_core={"IGMMA.64x64x32": 2})
    bad = proof.Report("vit", "sm_80", float_instructions={"MUFU.RCP at attention.py:1": 2})
    broken = proof.Report("vit", "sm_120", error="CompilationError: no")
    assert _verify_with(monkeypatch, [good])[0] == 0
    status, output = _verify_with(monkeypatch, [good, bad, broken])
    assert status == 1
    assert "2 x MUFU.RCP at attention.py:1" in output
    assert "CompilationError: no" in output
    of_floats = proof.Report("vit-to-float16", "sm_80", integer=False, float_instructions={"FMUL at attention.py:1": 2})
    status, output = _verify_with(monkeypatch, [good, of_floats])
    assert status == 0
    assert "1 of 1 kernels hold no float instruction; 1 more read or write floats" in output
    assert "FMUL" not in output
    status, output = _verify_with(monkeypatch, [bad], "--format", "json")
    assert status == 1
    assert json.loads(output)[0]["float_count"] == 2


def test_demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = []
    module = types.SimpleNamespace(run_demo=lambda output, limit: calls.append((output, limit)))
    monkeypatch.setitem(sys.modules, "qflash_lab.demo", module)
    assert runner.invoke(app, ["demo", "--output", str(tmp_path), "--limit", "3"]).exit_code == 0
    assert calls == [(tmp_path, 3)]


def test_demo_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_demo(*_: object) -> None:
        raise ImportError("the demo needs timm")

    monkeypatch.setitem(sys.modules, "qflash_lab.demo", types.SimpleNamespace(run_demo=run_demo))
    result = runner.invoke(app, ["demo"])
    assert result.exit_code == 1
    assert "the demo needs timm" in result.output


SMALL = {
    "bench": ["--shape", "1,1,16,32", "--rounds", "1"],
    "models": ["--model", "digits-vit", "--batch", "1", "--rounds", "1"],
    "accuracy": ["--shape", "1,1,16,32", "--seeds", "1"],
    "ablate": ["--part", "scales"],
    "demo": ["--limit", "1"],
    "evaluate": ["--model", "digits-vit", "--subset", "1"],
    "report": [],
    "real": [],
}


@pytest.mark.parametrize("command", SMALL)
def test_output_is_checked_before_anything_is_measured(command: str, tmp_path: Path) -> None:
    """What cannot become a folder: a file stands in its way. Measuring would take longer than this test may."""
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "results"
    begin = time.monotonic()
    result = runner.invoke(app, [command, *SMALL[command], "--device", "cpu", "--output", str(folder)] if command not in
                           ("demo", "report") else [command, *SMALL[command], "--output", str(folder)])  # fmt: skip
    assert result.exit_code in (1, 2), result.output
    assert f"qflash-lab {command}: the folder for the results, '{folder}', cannot be used: Not a directory" in result.output
    assert time.monotonic() - begin < 60


def test_models_refuses_what_it_cannot_patch_before_timing(tmp_path: Path) -> None:
    pytest.importorskip("timm")
    result = runner.invoke(app, ["models", "--model", "resnet18", "--device", "cpu", "--output", str(tmp_path)])
    assert result.exit_code == 2
    assert "model 'resnet18' cannot be compared: ResNet holds no attention that QFlash can replace" in result.output
    assert not list(tmp_path.iterdir())


def test_interrupted_evaluation_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("timm")
    from qflash_lab.evaluation import top1

    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(top1, "run_evaluate", interrupt)
    arguments = ["evaluate", "--model", "digits-vit", "--output", str(tmp_path / "a b"), "--overwrite"]
    monkeypatch.setattr(sys, "argv", ["qflash-lab", *arguments])
    result = runner.invoke(app, arguments)
    assert result.exit_code == 130
    # the same command, but for what would throw the finished batches away
    assert f"qflash-lab evaluate --model digits-vit --output '{tmp_path / 'a b'}'\n" in result.output
    assert "--overwrite" not in result.output


def test_errors_of_the_system_are_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    from qflash_lab.bench import accuracy

    def fail(*args: object, **kwargs: object) -> None:
        raise PermissionError("no")

    monkeypatch.setattr(accuracy, "run_accuracy", fail)
    result = runner.invoke(app, ["accuracy", "--shape", "1,1,16,32"])
    assert (result.exit_code, result.output) == (2, "qflash-lab accuracy: no\n")
