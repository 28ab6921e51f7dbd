"""``benchmarks/masks.py`` on the CPU: the masks, and a record and a table of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from helpers import load_benchmark

CPU = torch.device("cpu")
TINY = (4, 2, 8, 8, 2)
masks = load_benchmark("masks")


def test_every_mask_hides_what_it_says_and_shows_each_query_a_key() -> None:
    drawn = dict(masks.masks(TINY, CPU, torch.float32))
    assert drawn.pop("none") is None and len(drawn) == 12
    for name, mask in drawn.items():
        shown = mask if mask.dtype == torch.bool else mask > -torch.inf
        assert (mask.dtype == torch.bool) == ("bool" in name)
        assert shown[..., 6:].any() == ("nothing" in name), name
        assert shown.any(-1)[..., :6].all(), name


def test_what_is_measured_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    masks.run(tmp_path, {"tiny": TINY}, CPU, rounds=2)
    rows = json.loads((tmp_path / "masks.json").read_text())["rows"]
    assert [row["mask"] for row in rows] == [name for name, _ in masks.masks(TINY, CPU, torch.float32)]
    assert all(row["error"] is None and row["median_us"] > 0 and row["shape"] == "4x2x8x8" for row in rows)
    assert "tiny" in capsys.readouterr().out
