"""The hosted workflows run what `.ci/run` and the Makefile say, with few rights and no secrets."""

from __future__ import annotations

import pathlib
import re
import shlex
import shutil
import subprocess
from typing import Any

import pytest

from qflash_lab.verify.compile import TARGETS

yaml = pytest.importorskip("yaml")

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".github" / "workflows"
RUN = ROOT / ".ci" / "run"
NAMES = ("ci", "nightly")

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="only the repository has the workflows")


def workflow(name: str) -> dict[str, Any]:
    return yaml.safe_load((FOLDER / f"{name}.yml").read_text(encoding="utf-8"))


def commands(name: str) -> list[list[str]]:
    """Return what a workflow runs, in order, as words; each command of a matrix once."""
    found = []
    for job in workflow(name)["jobs"].values():
        for step in job["steps"]:
            line = step.get("run")
            if line == "${{ matrix.command }}":
                found += job["strategy"]["matrix"]["command"]
            elif line:
                found.append(line)
    return [shlex.split(line) for line in found]


def steps_of_run() -> list[list[str]]:
    """Return the steps of `.ci/run` as words, as its shell expands them; none of them is run."""
    text, count = re.subn(r"^step\(\) \{\n.*?^\}", "step() { printf '%q ' \"$@\"; echo; }", RUN.read_text(), flags=re.M | re.S)
    assert count == 1
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=True, cwd=RUN.parent)
    return [shlex.split(line) for line in done.stdout.splitlines()]


def test_the_steps_are_those_of_ci_run() -> None:
    assert "setup" in steps_of_run()[0]
    assert commands("ci") == steps_of_run()


def test_every_night_leaves_nothing_out() -> None:
    nightly = commands("nightly")
    for goal in ("test-all", "fuzz", "sanitize"):
        assert ["make", goal] in nightly
    assert [words[-1] for words in nightly if words[:2] == ["make", "verify"]] == [f"ARGS=--target {name}" for name in TARGETS]


def test_every_python_of_the_package_is_tried() -> None:
    versions = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text())
    tried = [words[2].removeprefix("PYTHON=python") for words in commands("nightly") if words[:2] == ["make", "test-python"]]
    made = str(workflow("ci")["jobs"]["ci"]["steps"][1]["with"]["python-version"]).split()
    assert sorted([*tried, made[-1]]) == sorted(versions)
    assert made[0] == min(versions, key=lambda version: int(version.partition(".")[2]))
    (setup,) = (step for step in workflow("nightly")["jobs"]["make"]["steps"] if "setup-python" in step.get("uses", ""))
    assert set(tried) <= set(setup["with"]["python-version"].split())


@pytest.mark.parametrize("name", NAMES)
def test_rights_are_few_and_versions_pinned(name: str) -> None:
    text, parsed = (FOLDER / f"{name}.yml").read_text(), workflow(name)
    assert parsed["permissions"] == {"contents": "read"}
    assert "secrets" not in text and "pull_request_target" not in text
    for job in parsed["jobs"].values():
        assert set(job) <= {"runs-on", "timeout-minutes", "strategy", "steps"}
        for step in job["steps"]:
            assert "run" in step or re.fullmatch(r"actions/[a-z-]+@v\d+", step["uses"])
            # a cache whose key depends on no file never changes
            for path in step.get("with", {}).get("cache-dependency-path", "").split():
                assert (ROOT / path).is_file()


def test_no_workflow_is_left_out_here() -> None:
    assert sorted(path.stem for path in FOLDER.iterdir()) == sorted(NAMES)


@pytest.mark.skipif(shutil.which("actionlint") is None, reason="needs actionlint")
def test_actionlint_finds_nothing() -> None:
    done = subprocess.run(["actionlint", *map(str, FOLDER.glob("*.yml"))], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
