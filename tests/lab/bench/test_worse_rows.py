"""The list of rows in which a peer, or an earlier state, is faster: whole, and nothing else in it."""

from __future__ import annotations

from typing import Any

import pytest

from helpers import load_benchmark
from qflash_lab.bench import schema as col


@pytest.fixture(scope="module")
def worse() -> Any:
    return load_benchmark("worse_rows")


def test_a_faster_peer_is_a_line(worse: Any) -> None:
    times = {col.QFLASH: 2.0, col.SDPA_FLASH: 1.0, col.SDPA_CUDNN: 2.0, col.SDPA_EFFICIENT: 3.0}
    group = worse.Group({name: {col.MEDIAN_US: us, worse.FILE: "some.json"} for name, us in times.items()})
    (row,) = worse.lost([group], worse.OURS, worse.FP16, lambda _: "A2 b8")
    assert row == {"what": "A2 b8, from fp16", "peer": "FlashAttention-2", "ratio": 0.5, worse.FILE: "some.json"}


def test_every_loss_of_the_latency_files_is_listed(worse: Any) -> None:
    """Counted again from the rows, without the script's own functions."""
    files = ("bench_h200", "bench_1024_h200", "bench_long_h200", "shapes_h200", "bench_bias_h200")
    found: dict[Any, dict[str, float]] = {}
    for file in files:
        for row in worse.declared.record(file)["rows"]:
            if row["mode"] != "eager" and row["median_us"] and bool(row["bias"]) is (file == "bench_bias_h200"):
                place = (file == "shapes_h200", row["bias"], row["workload"], row["batch"], row["shape"])
                found.setdefault(place, {})[row["method"]] = row["median_us"]
    losses = 0
    for times in found.values():
        fp16 = min((times[name] for name in worse.FP16 if name in times), default=None)
        mixed = min((times[name] for name in worse.MIXED if name in times), default=None)
        losses += sum(fp16 is not None and name in times and fp16 < times[name] for name in worse.OURS)
        losses += mixed is not None and col.QFLASH_INT8 in times and mixed < times[col.QFLASH_INT8]
    listed = [row for row in worse.attention() if "eager" not in row["what"]]
    assert len(listed) == losses > 0
    assert all(row["ratio"] < 1 for row in (*listed, *worse.models(), *worse.earlier()))
