"""The scripts of examples/ run and end with all attention in integers."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SMALL = {"dense_head": ("--train", "200", "--test", "60")}
"""Arguments that make an example shorter."""
EXAMPLES = Path(__file__).parents[2] / "examples"
NEEDS = {
    "timm_models": "timm",
    "torchvision_models": "torchvision",
    "transformers_models": "transformers",
    "open_clip_models": "open_clip",
    "diffusers_models": "diffusers",
    "export_and_compile": "timm",
    "integer_network": "qflash_lab",
    "dense_head": "qflash_lab",
    "clip_zero_shot": "transformers",
}
ELSEWHERE = {"features_ray_data", "features_torchrun", "serve_ray", "serve_ray_load"}
"""Examples that tests/scale runs."""


def test_every_example_is_run() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*NEEDS, *ELSEWHERE}


@pytest.mark.slow
@pytest.mark.parametrize("name", NEEDS)
def test_example(name: str) -> None:
    if importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"{NEEDS[name]} is not installed")
    run = subprocess.run(
        [sys.executable, "-W", "error::UserWarning:qflash", str(EXAMPLES / f"{name}.py"), *SMALL.get(name, ())],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    if name == "export_and_compile":
        assert run.stdout.splitlines() == ["torch.compile: True", "torch.export: True (1, 10)"]
        return
    if name == "integer_network":
        assert re.match(r"\d+ operators, \d+\.\d dB", run.stdout), run.stdout
        return
    if name == "dense_head":
        line = r"(\w+) features, (\w+) head: ([\d.]+) % of patches right, mean IoU ([\d.]+) %, ([\d.]+) % as in floating point"
        found = re.findall(line, run.stdout)
        assert [row[:2] for row in found] == [("float", "float"), ("integer", "float"), ("integer", "integer")]
        (right, iou, whole), *others = [tuple(map(float, row[2:])) for row in found]
        assert right > 75 and iou > 50 and whole == 100
        assert all(abs(x - right) < 0.5 and abs(y - iou) < 1 and 98 < same < 100 for x, y, same in others)
        return
    if name == "clip_zero_shot":
        same = re.search(r"same class for (\d+) of 16 images", run.stdout)
        assert same and int(same[1]) >= 11, run.stdout
        return
    heads = [line.split() for line in run.stdout.splitlines() if "attention layers in integers" in line]
    assert heads
    assert all(words[0] == words[2] != "0" for words in heads), run.stdout
