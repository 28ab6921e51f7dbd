"""Time whole models whose attention has a bias, compiled, patched and not.

    python benchmarks/biased_models.py FOLDER samvit_base_patch16:1:float16 beit_base_patch16_224:8:bfloat16

A case is a timm model, a batch and a type. Weights are drawn, those of relative positions, too. Processes with other cases and
the same folder may run beside this one: they compile together, and time one after the other. With another checkout's ``src`` in
PYTHONPATH ``--version`` names that one.
"""

from __future__ import annotations

import argparse
import copy
import fcntl
import functools
import json
from pathlib import Path
from typing import Any

import timm
import torch

import qflash
from qflash_lab.bench import records, timers
from qflash_lab.bench.metrics import sqnr

ROUNDS = 11


def draw(name: str, dtype: torch.dtype) -> Any:
    """Return a model whose biases of relative positions are not zero, as timm leaves them."""
    torch.manual_seed(0)
    model = timm.create_model(name)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if "rel_pos" in key or "relative_position" in key:
                weight.normal_(0, 0.3)
    return model.eval().to("cuda", dtype)


@torch.no_grad()
def measure(name: str, batch: int, dtype: torch.dtype, lock: Path, methods: list[str]) -> list[dict[str, Any]]:
    """Return a row a method."""
    model = draw(name, dtype)
    side = model.default_cfg["input_size"][1]
    x = torch.randn(batch, 3, side, side, device="cuda", dtype=dtype)
    patched = copy.deepcopy(model)
    qflash.patch(patched)
    calls = {method: functools.partial(torch.compile(patched if "qflash" in method else model), x) for method in methods}
    timers_of = {method: timers.GraphTimer(call) for method, call in calls.items()}
    outputs = {method: call() for method, call in calls.items()}
    with lock.open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        times: dict[str, list[float]] = {method: [] for method in methods}
        for index in range(ROUNDS):
            for method in methods[:: 1 if index % 2 else -1]:
                times[method].append(timers_of[method].sample()["us"])
        exact = model.float()(x.float())
    rows = []
    for method, y in outputs.items():
        ordered = sorted(times[method])
        known = {"model": name, "pixels": side, "batch": batch, "dtype": str(dtype).removeprefix("torch."), "method": method}
        figures = {key: round(ordered[ROUNDS * place // 4], 1) for key, place in (("q1_us", 1), ("median_us", 2), ("q3_us", 3))}
        rows.append(known | figures | {"sqnr_db": round(float(sqnr(exact, y.float())), 1)})
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("cases", nargs="+", metavar="MODEL:BATCH:DTYPE")
    parser.add_argument("--version", default="", help="only the patched model, with this name")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for case in arguments.cases:
        name, batch, dtype = case.split(":")
        methods = [f"qflash, {arguments.version}"] if arguments.version else ["sdpa", "qflash"]
        rows = measure(name, int(batch), getattr(torch, dtype), arguments.folder / "turn.lock", methods)
        for row in rows:
            print(json.dumps(row), flush=True)
        part = {"environment": records.environment(torch.device("cuda")), "rows": rows}
        (arguments.folder / f"{case.replace(':', '_')}{arguments.version}.json").write_text(json.dumps(part), encoding="utf-8")
