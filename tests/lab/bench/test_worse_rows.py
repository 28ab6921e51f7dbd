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
    float8 = ("fa3 float8", "cudnn float8")
    peers = ("sdpa flash", "sdpa cudnn", "sdpa efficient", "fa3", "fa3 split", "sageattention")
    ours = ("qflash", "qflash int8")
    files: dict[str, tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]] = {
        "peers_float16_h200": ((ours, peers), (("qflash int8",), float8)), "peers_bfloat16_h200": ((("qflash",), peers),),
    }  # fmt: skip
    mixed = ("int-flash-full kernel", "int-flash-half kernel", "qattn kernel")
    for name in ("bench", "bench_1024", "bench_long", "shapes", "bench_bias"):
        files[f"{name}_h200"] = ((ours, peers[:3]), (("qflash int8",), mixed))
    losses = 0
    for file, pairs in files.items():
        found: dict[Any, dict[str, float]] = {}
        for row in worse.declared.record(file)["rows"]:
            if row["mode"] != "eager" and row["median_us"] and bool(row["bias"]) is (file == "bench_bias_h200"):
                found.setdefault((row["workload"], row["batch"], row["shape"]), {})[row["method"]] = row["median_us"]
        for times in found.values():
            for mine, others in pairs:
                least = min((times[name] for name in others if name in times), default=None)
                losses += sum(least is not None and name in times and least < times[name] for name in mine)
    listed = [row for row in worse.attention() if "eager" not in row["what"]]
    assert len(listed) == losses > 0
    assert all(row["ratio"] < 1 for row in (*listed, *worse.models(), *worse.earlier()))
