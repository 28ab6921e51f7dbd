"""Tensor-core utilisation (Table 2) by Nsight Compute: ``ncu`` runs this module as a program of its own.

The child calls every method once between a start and a stop of the profiler, behind a marker kernel that tells the
kernels of one call from those of the next.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from rich.table import Table

from . import console as bench_console
from . import errors, latency, records, report, tables
from . import methods as bench_methods
from . import problems as bench_problems
from . import schema as col
from .metrics import sqnr
from .schema import Row

_PERCENT = ".avg.pct_of_peak_sustained_active"
_TENSOR = re.compile(r"sm__(pipe_tensor|inst_executed_pipe_tensor|ops_path_tensor_src)\w*")
_ALWAYS = (
    "gpu__time_duration.sum",
    "sm__inst_issued" + _PERCENT,
    "sm__warps_active" + _PERCENT,
    "sm__inst_executed.sum",
    "launch__registers_per_thread",
)
# ncu without --query-metrics: the names that most architectures share
_USUAL = ("sm__pipe_tensor_cycles_active", "sm__pipe_tensor_op_imma_cycles_active", "sm__pipe_tensor_op_hmma_cycles_active")

# What a column is: cycles in which a tensor pipe worked on products of that type, in percent of all cycles of an active
# multiprocessor. On Hopper both count a warp's own products and a warp group's, and add up to the whole pipe's, so that the
# two may be compared. Counters of instructions or of operations are percentages of something else for each type.
COLUMNS = {
    "imma": "sm__pipe_tensor_op_imma_cycles_active",
    "hmma": "sm__pipe_tensor_op_hmma_cycles_active",
    "tensor": "sm__pipe_tensor_cycles_active",
    "issue": "sm__inst_issued",
    "occupancy": "sm__warps_active",
}
"""The counter behind each column of percentages; empty where an architecture lacks it."""
_MARKER = "spin_kernel"
_MOST_METRICS = 40

FIELDS = col.pick(
    *col.PROBLEM, col.MODE, col.METHOD, col.KERNELS, col.DURATION_US, col.IMMA_PERCENT, col.HMMA_PERCENT, col.TENSOR_PERCENT,
    col.ISSUE_PERCENT, col.OCCUPANCY_PERCENT, col.REGISTERS, col.INSTRUCTIONS, col.SQNR_DB, col.SQNR_OF, col.ERROR,
)  # fmt: skip
"""Columns of ``profile.csv``."""


class ProfileError(RuntimeError):
    """Nsight Compute cannot be used here; the message says why."""


def parse_query(text: str) -> list[str]:
    """Return the base names of metrics that ``ncu --query-metrics`` printed."""
    found = re.findall(r"^\s*([a-z0-9]+__[a-z0-9_]+)\b", text, re.MULTILINE)
    return list(dict.fromkeys(found))


def choose_metrics(available: Sequence[str]) -> list[str]:
    """Return the metrics to collect: duration, issue slots, occupancy, and what there is on the tensor pipes.

    Args:
        available: base names; the usual ones are assumed if empty.
    """
    tensor = [name for name in available if _TENSOR.fullmatch(name) and "sparsity" not in name] or list(_USUAL)
    tensor.sort(key=lambda name: name not in COLUMNS.values())  # stable: those that columns need stay if the list is cut
    return [*_ALWAYS, *(name + _PERCENT for name in tensor[:_MOST_METRICS])]


def parse_csv(text: str) -> list[dict[str, Any]]:
    """Read what ``ncu --csv --page raw`` printed: one dictionary a kernel launch, in their order.

    Messages of ncu before and after the table are skipped. The table has a line of headings, a line of units and one
    line a launch.

    Returns:
        ``"kernel"`` and every metric by name: a float, or None where ncu has no number.

    Raises:
        ProfileError: there is no table.
    """
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise ProfileError(f"ncu printed no table: {_complaint(text)}")
    rows = list(csv.reader(line for line in lines[start:] if line.startswith('"')))
    heading = rows[0]
    found = []
    for row in rows[1:]:
        if len(row) != len(heading) or not row[0]:  # the line of units has no ID
            continue
        cells = dict(zip(heading, row, strict=True))
        kernel: dict[str, Any] = {"kernel": cells["Kernel Name"]}
        for name, cell in cells.items():
            if "__" in name:
                kernel[name] = _parse_number(cell)
        found.append(kernel)
    return found


def _parse_number(text: str) -> float | None:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def _complaint(text: str) -> str:
    """Return what ncu complained about, with what can be done."""
    if "ERR_NVGPUCTRPERM" in text:
        return (
            "no permission to read the GPU's performance counters (ERR_NVGPUCTRPERM): run as root, or have the driver loaded "
            "with NVreg_RestrictProfilingToAdminUsers=0"
        )
    lines = [line.strip() for line in text.splitlines() if line.startswith("==ERROR==")] or text.strip().splitlines()[-3:]
    return " ".join(lines)[:500] or "it printed nothing"


def split_calls(kernels: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Split launches at the marker kernel: the launches of every call, the marker left out."""
    calls: list[list[dict[str, Any]]] = []
    for kernel in kernels:
        if _MARKER in kernel["kernel"]:
            calls.append([])
        elif calls:
            calls[-1].append(kernel)
    return calls


def summarise(kernels: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one call's figures: durations added up (microseconds), percentages weighted by duration."""
    durations = [kernel.get("gpu__time_duration.sum") or 0.0 for kernel in kernels]
    total = sum(durations)
    result: Row = {col.KERNELS: len(kernels), col.DURATION_US: round(total / 1000.0, 3)}
    for column, name in COLUMNS.items():
        counted = [kernel.get(name + _PERCENT) for kernel in kernels]
        figure = None
        if total and any(x is not None for x in counted):
            figure = round(sum(d * (x or 0.0) for d, x in zip(durations, counted, strict=True)) / total, 2)
        result[f"{column}_percent"] = figure
    registers = [kernel["launch__registers_per_thread"] for kernel in kernels if kernel.get("launch__registers_per_thread")]
    result[col.REGISTERS] = max(registers, default=None)
    result[col.INSTRUCTIONS] = sum(kernel.get("sm__inst_executed.sum") or 0.0 for kernel in kernels)
    return result


def _ncu() -> str:
    path = shutil.which("ncu")
    if path is None:
        raise ProfileError("Nsight Compute's ncu is not on PATH; it comes with the CUDA toolkit (package nsight-compute)")
    return path


def _run(command: list[str]) -> str:
    """Run ncu; return all that it printed."""
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=os.environ,
        )
    except OSError as error:
        raise ProfileError(f"ncu cannot be started: {error}") from error
    return done.stdout


def collect(plan: dict[str, Any]) -> tuple[list[dict[str, Any]], list[list[dict[str, Any]]], list[str]]:
    """Run the child under ncu.

    Args:
        plan: what :func:`child` reads.

    Returns:
        the child's record of every call, the launches of every call, the metrics asked for.

    Raises:
        ProfileError: ncu is missing, may not read the counters or fails.
    """
    ncu = _ncu()
    metrics = choose_metrics(parse_query(_run([ncu, "--query-metrics"])))
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        jobs, log = folder / "plan.json", folder / "ncu.csv"
        jobs.write_text(json.dumps(plan), encoding="utf-8")
        for _ in range(3):
            printed = _run(
                [
                    ncu, "--csv", "--page", "raw", "--print-units", "base", "--profile-from-start", "off",
                    "--clock-control", "none", "--cache-control", "none", "--metrics", ",".join(metrics),
                    "--log-file", str(log), "--force-overwrite", sys.executable, "-m", "qflash_lab.bench.profile", str(jobs),
                ]
            )  # fmt: skip
            table = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
            unknown = set(re.findall(r"(?:Failed to find|Unknown) metric[^\w]*([\w.]+)", printed + table))
            kept = [metric for metric in metrics if metric not in unknown and metric.split(".")[0] not in unknown]
            if kept == metrics:
                break
            metrics = kept
        done = folder / "done.json"
        calls = json.loads(done.read_text(encoding="utf-8")) if done.exists() else []
        if '"ID"' not in table:
            raise ProfileError(_complaint(table + "\n" + printed))
    return calls, split_calls(parse_csv(table)), metrics


@torch.inference_mode()
def child(path: pathlib.Path) -> None:
    """Call every method of a plan once with the profiler on; write what happened beside it, as ``done.json``."""
    plan = json.loads(path.read_text(encoding="utf-8"))
    device = bench_console.pick_device(plan["device"])
    dtype = bench_console.DTYPES[plan["dtype"]]
    methods = {m.name: m for m in bench_methods.make_methods(device, plan["recipes"], plan["peers"], plan["methods"])}
    done: list[dict[str, Any]] = []
    for fields in plan["problems"]:
        problem = bench_problems.Problem(**fields | {"shape": tuple(fields["shape"])})
        inputs = bench_problems.make_inputs(problem, plan["input"], dtype, device)
        wanted, part, words = bench_problems.exact_part(inputs)
        for name in plan["methods"]:
            method, call = methods[name], None
            found: Row = {col.ERROR: None, col.SQNR_DB: None, col.SQNR_OF: words}
            with method.context():
                try:
                    with errors.explained():
                        call = method.prepare(inputs)
                        found[col.SQNR_DB] = round(sqnr(wanted, bench_problems.as_tensor(call(), problem)[part]), 2)
                        for _ in range(2):
                            call()
                except Exception as error:
                    found[col.ERROR], call = errors.describe(error), None
                torch.cuda.synchronize()
                torch.cuda.cudart().cudaProfilerStart()
                torch.cuda._sleep(1000)  # the marker
                try:
                    if call is not None:
                        call()
                except Exception as error:
                    found[col.ERROR] = errors.describe(error)
                torch.cuda.synchronize()
                torch.cuda.cudart().cudaProfilerStop()
            done.append(found)
            (path.parent / "done.json").write_text(json.dumps(records.finite(done)), encoding="utf-8")


def make_rows(
    problems: Sequence[bench_problems.Problem],
    methods: Sequence[bench_methods.TimedMethod[bench_problems.Inputs]],
    calls: Sequence[dict[str, Any]],
    launches: Sequence[Sequence[dict[str, Any]]],
    *,
    kind: str,
    dtype: str,
) -> list[Row]:
    """Return one row a problem and method, in the child's order; keys :data:`FIELDS` and ``launches``."""
    rows = []
    for index, (problem, method) in enumerate((p, m) for p in problems for m in methods):
        row = latency.problem_row(problem, FIELDS, kind, dtype)
        row |= {col.MODE: method.mode, col.METHOD: method.name, "launches": []}
        if index >= len(calls):
            row[col.ERROR] = "the profiled program ended before it got here"
        else:
            row |= calls[index]
            mine = list(launches[index]) if index < len(launches) else []
            row["launches"] = mine
            if mine and row[col.ERROR] is None:
                row |= summarise(mine)
            elif row[col.ERROR] is None:
                row[col.ERROR] = "ncu saw no kernel of this call"
        rows.append(row)
    return rows


TABLE = (
    tables.names("workload", col.problem_label), tables.names("batch", lambda row: row[col.BATCH] or "-"),
    tables.names("method", col.METHOD), tables.Column("kernels", col.KERNELS, "d"), tables.Column("µs", col.DURATION_US),
    tables.Column("IMMA %", col.IMMA_PERCENT), tables.Column("HMMA %", col.HMMA_PERCENT),
    tables.Column("tensor %", col.TENSOR_PERCENT), tables.Column("issue %", col.ISSUE_PERCENT),
    tables.Column("occupancy %", col.OCCUPANCY_PERCENT), tables.Column("registers", col.REGISTERS, ".0f"),
    tables.Column("SQNR dB", col.SQNR_DB),
)  # fmt: skip
"""Of the table on the console."""


def render(rows: Sequence[Row], title: str) -> Table:
    """Return the rows as a table."""
    return tables.render(rows, TABLE, title)


def run_profile(
    problems: Sequence[bench_problems.Problem],
    methods: Sequence[bench_methods.TimedMethod[bench_problems.Inputs]],
    *,
    recipes: Sequence[str] = ("default",),
    peers: Sequence[str] = (),
    kind: str = "uniform",
    dtype: torch.dtype,
    device: torch.device,
    output: pathlib.Path | None = None,
) -> dict[str, Any]:
    """Profile, print the table and write ``profile.json`` and ``profile.csv`` into ``output``.

    Args:
        problems: what to run.
        methods: from :func:`qflash_lab.bench.methods.make_methods` with the same ``recipes`` and ``peers``.
        recipes, peers: handed on to the child.
        kind, dtype: of the inputs.
        device: a CUDA device.
        output: made if it is not there.

    Returns:
        what ``profile.json`` holds; a row's ``launches`` are all metrics of every kernel.

    Raises:
        ProfileError: no GPU; ncu is missing, lacks permission or fails.
    """
    bench_problems.check_input(kind)
    _ncu()
    if device.type != "cuda":
        raise ProfileError("Nsight Compute profiles kernels on an NVIDIA GPU, and there is no GPU here")
    name = str(dtype).removeprefix("torch.")
    plan = {
        "problems": [dataclasses.asdict(problem) for problem in problems],
        "methods": [method.name for method in methods],
        "recipes": list(recipes),
        "peers": list(peers),
        "input": kind,
        "dtype": name,
        "device": str(device),
    }
    jobs = len(problems) * len(methods)
    with bench_console.progress_bar(1) as tick:
        tick(f"ncu: {jobs} calls")
        calls, launches, metrics = collect(plan)
    done = report.Report(
        "profile", "tensor-core utilisation of one attention call, percent of the peak while a multiprocessor is active",
        device, FIELDS, output,
        timing="Nsight Compute, one call after three, clocks and caches left alone; of several kernels in a call "
        "durations are added and percentages weighted by duration",
        columns={column: counter + _PERCENT for column, counter in COLUMNS.items()}, metrics=metrics, sqnr=report.SQNR,
    )  # fmt: skip
    done.add(make_rows(problems, methods, calls, launches, kind=kind, dtype=name))
    return done.finish(render(done.rows, f"{done.record['environment']['device']}, {kind} inputs, {name}"))


if __name__ == "__main__":
    child(pathlib.Path(sys.argv[1]))
