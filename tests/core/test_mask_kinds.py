"""CONTRIBUTING says how to add a kind of mask."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DIFF = ROOT / "tests" / "mask_kind.diff"
TELLS = re.compile(r"mask_kind|\bMASK *[!=]=|mask\.dtype *==|masked == \d|by->mask \?|check_mask\(")
"""Code that tells kinds of masks apart."""
TURN = ("src/qflash/network/", "src/qflash/integrations/")
"""Where others' masks become one of these kinds."""


def section() -> str:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    return text.split("### Add a mask kind\n")[1].split("\n### ")[0]


def test_the_places_of_a_mask_kind_are_listed() -> None:
    named = set(re.findall(r"`((?:src|golden|scripts|tests|lab)/[\w/]+\.(?:py|c))`", section()))
    assert [name for name in named if not (ROOT / name).is_file()] == []
    files = [x for folder in ("src/qflash", "golden") for x in (ROOT / folder).rglob("*") if x.suffix in (".py", ".c", ".h")]
    telling = {x.relative_to(ROOT).as_posix() for x in files if TELLS.search(x.read_text(encoding="utf-8"))}
    telling = {name for name in telling if not name.startswith(TURN)}
    assert len(telling) > 10
    # a docstring that refers to the kind
    assert telling - named == {"src/qflash/kernels/triton/constants.py"}


@pytest.mark.slow
def test_a_mask_kind_is_added_by_a_diff(tmp_path: Path) -> None:
    """The test that it brings passes."""
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(["git", "apply", str(DIFF)], cwd=tmp_path, check=True)
    test = "tests/kernels/test_lengths.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--noconftest", test]
    paths = os.pathsep.join([str(tmp_path / "src"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths, "TRITON_INTERPRET": "1"}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert "3 passed" in run.stdout, run.stdout
