"""``benchmarks/varlen.py`` on the CPU: what batches are made of, and a record and a table of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from helpers import load_benchmark

CPU = torch.device("cpu")
varlen = load_benchmark("varlen")


def test_sizes_are_within_the_sides_and_the_same_every_time() -> None:
    sizes = varlen.image_sizes(50, 3, 6)
    assert sizes == varlen.image_sizes(50, 3, 6) and len(sizes) == 50 and len(set(sizes)) > 4
    assert min(sizes) >= 9 and max(sizes) <= 36


def test_batches_are_packed() -> None:
    batch = varlen.Batch("two", (3, 5), 2, 8)
    query, key, value, queries, keys, *longest = varlen.draw(batch, CPU, torch.float32)
    assert query.shape == key.shape == value.shape == (8, 2, 8) and not torch.equal(query, key)
    assert queries.tolist() == keys.tolist() == [0, 3, 8] and longest == [5, 5]


def test_what_is_measured_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    varlen.run(tmp_path, [varlen.Batch("tiny", (3, 5), 2, 8)], CPU, rounds=2)
    (row,) = json.loads((tmp_path / "varlen.json").read_text())["rows"]
    assert (row["workload"], row["lengths"], row["method"]) == ("tiny", "3 5", "qflash") and row["median_us"] > 0
    assert "tiny" in capsys.readouterr().out


def test_other_bits_than_the_references_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen.qflash, "varlen_attention", lambda query, *_, backend="auto", **__: query + (backend == "auto"))
    (row,) = varlen.measure(varlen.Batch("tiny", (3, 5), 2, 8), CPU, rounds=1)
    assert row["median_us"] is None and row["error"] == "AssertionError: tiny: not the reference's bits"
