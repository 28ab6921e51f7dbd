"""The ``qflash`` command: what it prints and how it exits."""

from __future__ import annotations

import enum
import json
import re
import subprocess
import sys
import types
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

import qflash.cli
import qflash_lab.cli
from helpers import HELP_OF_ALL, imported_by, run_command
from qflash.cli import MOVED, app
from qflash_lab.verify import compile

runner = CliRunner()


def test_version() -> None:
    result = runner.invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.output.strip() == f"qflash {version('qflash')}"


def test_module_runs_and_help_needs_no_pytorch() -> None:
    printed, imported = imported_by("qflash", "--help")
    assert "info" in printed
    assert "qflash.cli" in imported and imported.isdisjoint({"torch", "numpy", "triton"})


def test_commands_that_moved_say_where_they_went() -> None:
    shown = runner.invoke(app, ["--help"]).output
    for name in MOVED:
        result = runner.invoke(app, [name, "--case", "vit", "--help", "more"])
        assert result.exit_code == 2
        assert f"`qflash {name}` is `qflash-lab {name}` now" in result.output and "pip install" in result.output
        assert not re.search(rf"\b{name}\b", shown)


def test_help_of_every_command_needs_no_pytorch(tmp_path: Path) -> None:
    printed = run_command(tmp_path, "qflash", "qflash.cli", HELP_OF_ALL)
    shown = [command for command in app.registered_commands if not command.hidden]
    names = [command.callback.__name__.replace("_", "-") for command in shown if command.callback]
    assert printed.count("Usage: qflash") == len(shown)
    assert printed.endswith(" ".join(names) + " set()\n")


def test_names_are_there_in_the_command_too(tmp_path: Path) -> None:
    printed = run_command(
        tmp_path,
        "qflash",
        "qflash.cli",
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


def test_help_shows_no_type_of_a_switch() -> None:
    shown = runner.invoke(app, ["--help"], env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"}).output
    (line,) = (line for line in shown.splitlines() if "--version" in line)
    assert "<bool>" not in line


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
    # not adapters alone: any module that calls SDPA or spells attention out, of any library
    routes = [row["route"] for row in data["patching"]]
    assert routes[:2] == ["sdpa", "softmax"] and {*routes[2:]} == {"adapter"}
    assert all(row["package"] == "any" and row["unavailable"] is None for row in data["patching"][:2])


def test_info_table() -> None:
    result = runner.invoke(app, ["info"])
    assert result.exit_code == 0, result.output
    for text in ("Versions", "Devices", "Features", "sm_120"):
        assert text in result.output


def test_info_cuts_nothing_in_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    result = runner.invoke(app, ["info"])
    assert "…" not in result.output
    assert "CPU with TRITON_INTERPRET=1" in result.output
    assert "(TRITON_INTERPRET=1)" in result.output or "triton: available" in result.output


@pytest.mark.parametrize("module", [qflash.cli, qflash_lab.cli])
def test_defaults_are_among_their_choices(module: types.ModuleType) -> None:
    """As Click 8.2 compares them; Typer before 0.16 gives it the members of an enumeration as they are."""
    click = pytest.importorskip("click", "8.2")
    kinds = [kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, enum.Enum)]
    assert kinds
    for kind in kinds:
        choice = click.Choice([member.value for member in kind])
        assert [choice.convert(member, None, None) for member in kind] == [member.value for member in kind]
