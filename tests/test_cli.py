"""The ``qflash`` command: what it prints and how it exits."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

from qflash import verify
from qflash.cli import app

runner = CliRunner()


def test_version() -> None:
    result = runner.invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.output.strip() == f"qflash {version('qflash')}"


def test_module_runs() -> None:
    done = subprocess.run([sys.executable, "-m", "qflash", "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    for command in ("demo", "verify", "info", "bench", "energy", "profile", "ablate", "report"):
        assert command in done.stdout


def test_info_json() -> None:
    result = runner.invoke(app, ["info", "--format", "json"])
    assert result.exit_code == 0, result.output
    data = json.loads(result.output)
    assert data["versions"]["qflash"] == version("qflash")
    assert data["versions"]["triton"]
    assert data["devices"][0]["device"] == "cpu"
    assert data["devices"][0]["auto"] == ("reference" if data["devices"][0]["cpu_unavailable"] else "cpu")
    assert [row["architecture"] for row in data["architectures"]] == list(verify.TARGETS)
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


def _verify_with(monkeypatch: pytest.MonkeyPatch, reports: list[verify.Report], *arguments: str) -> tuple[int, str]:
    monkeypatch.setattr(verify, "verify", lambda *args, **kwargs: reports)
    result = runner.invoke(app, ["verify", *arguments])
    return result.exit_code, result.output


def test_verify_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    good = verify.Report("vit", "sm_90", tile="64x256", warps=4, instructions=100, tensor_core={"IGMMA.64x64x32": 2})
    bad = verify.Report("vit", "sm_80", float_instructions={"MUFU.RCP at attention.py:1": 2})
    broken = verify.Report("vit", "sm_120", error="CompilationError: no")
    assert _verify_with(monkeypatch, [good])[0] == 0
    status, output = _verify_with(monkeypatch, [good, bad, broken])
    assert status == 1
    assert "2 x MUFU.RCP at attention.py:1" in output
    assert "CompilationError: no" in output
    of_floats = verify.Report("vit-to-float16", "sm_80", integer=False, float_instructions={"FMUL at attention.py:1": 2})
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
    monkeypatch.setitem(sys.modules, "qflash.demo", module)
    assert runner.invoke(app, ["demo", "--output", str(tmp_path), "--limit", "3"]).exit_code == 0
    assert calls == [(tmp_path, 3)]


def test_demo_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_demo(*_: object) -> None:
        raise ImportError("the demo needs timm")

    monkeypatch.setitem(sys.modules, "qflash.demo", types.SimpleNamespace(run_demo=run_demo))
    result = runner.invoke(app, ["demo"])
    assert result.exit_code == 1
    assert "the demo needs timm" in result.output
