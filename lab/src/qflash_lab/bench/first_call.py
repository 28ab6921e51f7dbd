"""How long the first calls of a process take: ``qflash-lab bench --first-call``.

Kernels are compiled when they are first needed and kept on disk. One process makes the calls with empty caches and a second one
with what the first has left; both do so in the order given, so that a shape may find the kernels of those before it.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

import qflash
from qflash import attention
from qflash.paths import with_package

from . import latency, report, tables
from . import schema as col
from .console import progress_bar
from .problems import Problem

FIELDS = col.pick(col.WORKLOAD, col.BATCH, col.SHAPE, col.KEYS, col.DTYPE, col.EMPTY_S, col.WARM_S, col.ERROR)
"""Columns of ``first_call.csv``; seconds of the first call, with empty and with filled caches."""

_PACKAGES = pathlib.Path(qflash.__file__).resolve().parents[1], pathlib.Path(__file__).resolve().parents[2]


def time_calls(order: dict[str, Any], tell: Callable[[str], None]) -> None:
    """Make one call of each problem; tell its seconds, or its error, as JSON.

    Args:
        order: ``device``, ``dtype`` and ``problems``: (query's shape, keys, whether causal).
        tell: takes the JSON.
    """
    device, dtype = torch.device(order["device"]), getattr(torch, order["dtype"])
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    for (batch, heads, queries, channels), keys, causal in order["problems"]:
        query, key, value = (
            torch.zeros(batch, heads, tokens, channels, dtype=dtype, device=device) for tokens in (queries, keys, keys)
        )
        wait()
        begin = time.perf_counter()
        try:
            with torch.inference_mode():
                attention(query, key, value, is_causal=causal)
            wait()
            tell(json.dumps({"s": time.perf_counter() - begin}))
        except Exception as error:
            tell(json.dumps({"error": f"{type(error).__name__}: {error}"}))


def serve() -> None:
    """Do what comes on standard input, and answer on standard output."""
    time_calls(json.loads(sys.stdin.read()), lambda line: print(line, flush=True))


def _run(order: dict[str, Any], folder: str, tick: Callable[[str], None]) -> list[dict[str, Any]]:
    """Return what a fresh process answers whose caches are in ``folder``."""
    caches = {"XDG_CACHE_HOME": folder, "TRITON_CACHE_DIR": str(pathlib.Path(folder, "triton"))}
    environment = with_package(*_PACKAGES) | caches
    command = [sys.executable, "-c", "from qflash_lab.bench.first_call import serve; serve()"]
    answers = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, which its status tells
            process.stdin.write(json.dumps(order))
            process.stdin.close()
        for line in process.stdout:
            answers.append(json.loads(line))
            tick("first calls")
    missing = len(order["problems"]) - len(answers)
    return answers + [{"error": f"the process ended with status {process.returncode}"}] * missing


def run_first_call(
    problems: Sequence[Problem], *, dtype: torch.dtype, device: torch.device, output: pathlib.Path | None = None
) -> dict[str, Any]:
    """Time the first calls, print the table and write ``first_call.json`` and ``.csv`` into ``output``.

    Args:
        problems: made one after the other in one process.
        dtype, device: of the inputs, which are zeros; the recipe is the default.
        output: made if it is not there.

    Returns:
        what ``first_call.json`` holds: environment, timing (in words), seconds in all, and rows.

    Raises:
        ValueError: a problem has a bias.
    """
    if any(problem.bias for problem in problems):
        raise ValueError("--first-call times calls without a bias; leave --bias out")
    name = str(dtype).removeprefix("torch.")
    order = {
        "device": str(device),
        "dtype": name,
        "problems": [(problem.shape, problem.keys, problem.causal) for problem in problems],
    }
    with tempfile.TemporaryDirectory() as folder, progress_bar(2 * len(problems)) as tick:
        found = [_run(order, folder, tick) for _ in range(2)]
    rows = []
    for problem, empty, warm in zip(problems, *found, strict=True):
        row = latency.problem_row(problem, FIELDS, "zeros", dtype)
        row |= {col.EMPTY_S: empty.get("s"), col.WARM_S: warm.get("s"), col.ERROR: empty.get("error") or warm.get("error")}
        rows.append(row)
    total = {which: sum(row[which] or 0.0 for row in rows) for which in (col.EMPTY_S, col.WARM_S)}
    done = report.Report(
        "first_call", "first calls of a process", device, FIELDS, output,
        timing="one call each until the device is done, in one process; kernels' modules are imported in the first one, "
        "PyTorch's and the GPU's start is outside the clock",
        total=total,
    )  # fmt: skip
    done.add(rows)
    columns = (
        tables.names("shape", lambda row: row.get("all") or col.full_label(row)),
        tables.Column("empty caches, s", col.EMPTY_S), tables.Column("warm caches, s", col.WARM_S),
    )  # fmt: skip
    title = f"{done.record['environment']['device']}, first calls, {name}"
    return done.finish(tables.render([*rows, total | {"all": f"all {len(rows)}"}], columns, title))
