"""The ``qflash`` command: what it prints and how it exits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import types
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

from qflash.cli import app
from qflash.verify import compile, proof

runner = CliRunner()


def test_version() -> None:
    result = runner.invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.output.strip() == f"qflash {version('qflash')}"


def run_command(folder: Path, program: str) -> str:
    """Run what an installed ``qflash`` runs, but for its last line; return what it prints."""
    script = folder / "qflash"
    script.write_text(f"import sys\nfrom qflash.cli import app\n{program}")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_module_runs_and_help_needs_no_pytorch() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "qflash", "--help"], capture_output=True, text=True, errors="replace"
    )
    assert done.returncode == 0
    for command in ("demo", "verify", "info", "bench", "energy", "profile", "ablate", "report"):
        assert command in done.stdout
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "qflash.cli" in imported and imported.isdisjoint({"torch", "numpy", "triton"})


def test_help_of_every_command_needs_no_pytorch(tmp_path: Path) -> None:
    printed = run_command(
        tmp_path,
        """
import contextlib
def run(*arguments):
    with contextlib.suppress(SystemExit):
        app(arguments)
names = [command.callback.__name__.replace("_", "-") for command in app.registered_commands]
for name in names:
    run(name, "--help")
run("--version")
run("nonsense")
print(*names, {"torch", "numpy", "triton"} & sys.modules.keys())
""",
    )
    assert printed.count("Usage: qflash") == len(app.registered_commands) > 10
    names = [command.callback.__name__.replace("_", "-") for command in app.registered_commands]
    assert printed.endswith(" ".join(names) + " set()\n")


def test_names_are_there_in_the_command_too(tmp_path: Path) -> None:
    printed = run_command(
        tmp_path,
        """
import qflash
assert "torch" not in sys.modules
assert set(qflash.__all__) <= set(dir(qflash))
assert not hasattr(qflash, "nonsense") and "torch" not in sys.modules
from qflash import *
assert all(globals()[name] is vars(qflash)[name] for name in qflash.__all__)
import pickle, torch
x = pickle.loads(pickle.dumps(quantize(torch.ones(2, 3), backend="reference")))
print(type(x) is QuantizedTensor, pickle.loads(pickle.dumps(attention)) is attention, x.values.flatten().tolist())
""",
    )
    assert printed == "True True [127, 127, 127, 127, 127, 127]\n"


def test_importing_the_package_registers_everything() -> None:
    program = "import torch, qflash; torch.ops.qflash.attention; print(set(qflash.__all__) <= vars(qflash).keys())"
    done = subprocess.run([sys.executable, "-c", program, "-m", "qflash"], capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr


def test_info_json() -> None:
    result = runner.invoke(app, ["info", "--format", "json"])
    assert result.exit_code == 0, result.output
    data = json.loads(result.output)
    assert data["versions"]["qflash"] == version("qflash")
    assert data["versions"]["triton"]
    assert data["devices"][0]["device"] == "cpu"
    assert data["devices"][0]["auto"] == ("reference" if data["devices"][0]["cpu_unavailable"] else "cpu")
    assert [row["architecture"] for row in data["architectures"]] == list(compile.TARGETS)
    assert all({"feature", "reference", "cpu", "interpreter", "triton"} == set(row) for row in data["features"])
    assert all(row["package"] for row in data["patching"])


def test_info_table() -> None:
    result = runner.invoke(app, ["info"])
    assert result.exit_code == 0, result.output
    for text in ("Versions", "Devices", "Features", "sm_120"):
        assert text in result.output


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
    monkeypatch.setitem(sys.modules, "qflash.report.demo", module)
    assert runner.invoke(app, ["demo", "--output", str(tmp_path), "--limit", "3"]).exit_code == 0
    assert calls == [(tmp_path, 3)]


def test_demo_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_demo(*_: object) -> None:
        raise ImportError("the demo needs timm")

    monkeypatch.setitem(sys.modules, "qflash.report.demo", types.SimpleNamespace(run_demo=run_demo))
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
    assert f"qflash {command}: the folder for the results, '{folder}', cannot be used: Not a directory" in result.output
    assert time.monotonic() - begin < 60


def test_models_refuses_what_it_cannot_patch_before_timing(tmp_path: Path) -> None:
    pytest.importorskip("timm")
    result = runner.invoke(app, ["models", "--model", "resnet18", "--device", "cpu", "--output", str(tmp_path)])
    assert result.exit_code == 2
    assert "model 'resnet18' cannot be compared: ResNet holds no attention that QFlash can replace" in result.output
    assert not list(tmp_path.iterdir())


def test_interrupted_evaluation_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("timm")
    from qflash.evaluation import top1

    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(top1, "run_evaluate", interrupt)
    arguments = ["evaluate", "--model", "digits-vit", "--output", str(tmp_path / "a b"), "--overwrite"]
    monkeypatch.setattr(sys, "argv", ["qflash", *arguments])
    result = runner.invoke(app, arguments)
    assert result.exit_code == 130
    # the same command, but for what would throw the finished batches away
    assert f"qflash evaluate --model digits-vit --output '{tmp_path / 'a b'}'\n" in result.output
    assert "--overwrite" not in result.output


def test_errors_of_the_system_are_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    from qflash.bench import accuracy

    def fail(*args: object, **kwargs: object) -> None:
        raise PermissionError("no")

    monkeypatch.setattr(accuracy, "run_accuracy", fail)
    result = runner.invoke(app, ["accuracy", "--shape", "1,1,16,32"])
    assert (result.exit_code, result.output) == (2, "qflash accuracy: no\n")


def test_info_cuts_nothing_in_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    result = runner.invoke(app, ["info"])
    assert "…" not in result.output
    assert "CPU with TRITON_INTERPRET=1" in result.output
    assert "(TRITON_INTERPRET=1)" in result.output or "triton: available" in result.output
