"""The hooks of `.pre-commit-config.yaml`: the tools of `make lint`, and patterns that the files at hand pass."""

from __future__ import annotations

import pathlib
import re
import subprocess
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")

ROOT = pathlib.Path(__file__).resolve().parents[2]
CONFIGURATION = ROOT / ".pre-commit-config.yaml"

pytestmark = pytest.mark.skipif(not CONFIGURATION.is_file(), reason="only the repository has the hooks")


def hooks(language: str) -> dict[str, dict[str, Any]]:
    (local,) = yaml.safe_load(CONFIGURATION.read_text(encoding="utf-8"))["repos"]
    assert local["repo"] == "local"
    return {hook["id"]: hook for hook in local["hooks"] if hook["language"] == language}


def test_tools_are_those_of_make_lint() -> None:
    recipe = re.search(r"^lint:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert recipe is not None
    tools = [re.sub(r" (--check|\.)(?= |$)", "", line.strip().removeprefix("$(BIN)/")) for line in recipe[1].splitlines()]
    found = [re.sub(r" --\S+", "", hook["entry"]) for hook in hooks("system").values()]
    assert found == [f".venv/bin/{tool}" for tool in tools]


def refused(hook: dict[str, Any], content: bytes) -> bool:
    """Tell whether a pattern is found in a file, as pre-commit looks for it: line by line, or in the whole."""
    if "--multiline" in hook.get("args", ()):
        return re.search(hook["entry"].encode(), content, re.MULTILINE | re.DOTALL) is not None
    return any(re.search(hook["entry"].encode(), line) for line in content.splitlines())


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("trailing-whitespace", b"a \nb\n"),
        ("trailing-whitespace", b"a\n\t\nb\n"),
        ("end-of-file", b"a\nb"),
        ("end-of-file", b"a\n\n"),
        ("merge-conflict", b"<<<<<<< HEAD\n"),
    ],
)
def test_patterns_find_what_they_are_for(name: str, bad: bytes) -> None:
    assert refused(hooks("pygrep")[name], bad)
    assert not refused(hooks("pygrep")[name], b"a\n\nb = 1 << 7\n")


def test_the_files_at_hand_pass() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("needs a clone")
    endings = {".py", ".md", ".yml", ".yaml", ".toml", ".c", ".h", ".sh"}
    paths = [ROOT / name for name in listed.stdout.split("\0") if pathlib.Path(name).suffix in endings]
    assert len(paths) > 300
    files = {path: path.read_bytes() for path in paths if path.is_file()}
    bad = [(name, str(path)) for name, hook in hooks("pygrep").items() for path, data in files.items() if refused(hook, data)]
    assert not bad
