"""Latency beside accuracy: QFlash, PyTorch's attention and other functions on the same inputs in one run (Figure 3).

On a CUDA device a call is captured many times over in a CUDA graph and the graph is replayed, so that the device's
time is measured and not Python's; ``eager`` measures the rest. Methods take turns, in alternating order, and every
row carries its SQNR against float64 softmax attention. What fails becomes a row with its error.
"""

from __future__ import annotations

import functools
import math
import pathlib
import platform
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.table import Table

from . import figures, peers, report, runner, tables
from . import schema as col
from .console import progress_bar
from .errors import describe
from .metrics import sqnr
from .problems import Inputs, Problem, as_tensor, check_input, exact_part, make_inputs
from .runner import TimedMethod
from .schema import Row
from .timers import CPU_SECONDS, EAGER_CALLS, MOST_CALLS, TimedCall

MODES = ("kernel", "end-to-end", "eager")

FIELDS = col.pick(
    *col.PROBLEM, col.MODE, col.METHOD, *col.TIMES, col.ISSUE_US, col.CPU_US, col.TOPS, col.BEST_SDPA, col.RATIO,
    col.BIAS_COST, col.SQNR_DB, col.SQNR_OF, col.ERROR,
)  # fmt: skip
"""Columns of ``bench.csv``."""


def problem_row(problem: Problem, fields: Sequence[str], kind: str, dtype: torch.dtype | str) -> Row:
    """Return a row of these columns for a problem, its inputs and their dtype."""
    known = {
        col.WORKLOAD: problem.workload, col.BATCH: problem.batch, col.SHAPE: "x".join(map(str, problem.shape)),
        col.KEYS: problem.keys, col.CAUSAL: problem.causal, col.BIAS: problem.bias, col.INPUT: kind,
        col.DTYPE: str(dtype).removeprefix("torch."),
    }  # fmt: skip
    return col.empty(fields) | {name: value for name, value in known.items() if name in fields}


def attention_runs(
    problem: Problem,
    methods: Sequence[TimedMethod[Inputs]],
    modes: Callable[[TimedMethod[Inputs]], Sequence[str]],
    fields: Sequence[str],
    *,
    kind: str,
    dtype: torch.dtype,
    device: torch.device,
) -> list[runner.Run]:
    """Return the methods on one problem in each of their modes, judged against float64 softmax attention."""
    inputs = make_inputs(problem, kind, dtype, device)
    wanted, part, words = exact_part(inputs)

    def prepare(method: TimedMethod[Inputs]) -> tuple[TimedCall, Row]:
        call = method.prepare(inputs)
        return call, {col.SQNR_DB: round(sqnr(wanted, as_tensor(call(), problem)[part]), 2), col.SQNR_OF: words}

    runs = []
    for method in methods:
        once = functools.cache(functools.partial(prepare, method))
        for mode in modes(method):
            row = problem_row(problem, fields, kind, dtype) | {col.MODE: mode, col.METHOD: method.name}
            runs.append(runner.Run(row, once, mode, method.context))
    return runs


def measure(
    problem: Problem,
    methods: Sequence[TimedMethod[Inputs]],
    modes: Sequence[str],
    *,
    kind: str,
    dtype: torch.dtype,
    device: torch.device,
    rounds: int,
    tick: Callable[[str], None] = lambda _: None,
) -> list[Row]:
    """Time every method on one problem, in alternation, and return one row a method and mode, keys :data:`FIELDS`.

    ``ratio`` is the time of the fastest of PyTorch's back ends in the run's dtype (``best_sdpa``), in the same
    way of measuring, divided by the row's. SDPA and peers are measured whatever the modes are.
    """

    def chosen(method: TimedMethod[Inputs]) -> list[str]:
        graph = [method.mode] if method.mode in modes or not (method.is_ours or method.is_baseline) else []
        if device.type != "cuda":
            return graph or ([method.mode] if "eager" in modes else [])
        eager = ["eager"] if "eager" in modes and (method.mode != "kernel" or "kernel" in modes) else []
        return ([] if tuple(modes) == ("eager",) else graph) + eager

    runs = attention_runs(problem, methods, chosen, FIELDS, kind=kind, dtype=dtype, device=device)
    rows = runner.measure(runs, device, rounds, tick=tick)
    sdpa = {method.name for method in methods if method.is_sdpa}
    for row in rows:
        if row[col.MEDIAN_US] is not None:
            row[col.TOPS] = round(problem.operations / row[col.MEDIAN_US] / 1e6, 2)
    for is_eager in (False, True):
        alike = [row for row in rows if (row[col.MODE] == "eager") is is_eager]
        runner.compare(alike, lambda row: row[col.METHOD] in sdpa, name=col.BEST_SDPA)
    return rows


def add_bias_costs(rows: Sequence[Row]) -> None:
    """Set ``bias_cost`` of rows with a bias: their time over the same method's without it."""

    def key(row: Row) -> tuple[Any, ...]:
        return tuple(row[name] for name in (col.WORKLOAD, col.BATCH, col.SHAPE, col.KEYS, col.MODE, col.METHOD))

    timed = [row for row in rows if row[col.MEDIAN_US] is not None]
    plain = {key(row): row[col.MEDIAN_US] for row in timed if not row[col.BIAS]}
    for row in timed:
        if row[col.BIAS] and key(row) in plain:
            row[col.BIAS_COST] = round(row[col.MEDIAN_US] / plain[key(row)], 3)


_TAKES = {"kernel": "int8 in, quantised beforehand", "end-to-end": "float in, quantisation included", "eager": "eager calls"}


def draw(rows: Sequence[Row], title: str) -> Any:
    """Draw Figure 3: latency in grouped bars, a panel a batch (or plain shapes) and mode; graph (or CPU) rows only.

    Returns:
        a matplotlib Figure.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: no row has a time.
    """
    shown = [row for row in rows if row[col.MODE] != "eager" and row[col.MEDIAN_US] is not None] or rows
    shown = [row | {"panel": (row[col.BATCH], row[col.MODE])} for row in shown]

    def heading(panel: tuple[int | None, str]) -> str:
        batch, mode = panel
        return f"{'given shapes' if batch is None else f'batch {batch}'}, {_TAKES.get(mode, mode)}"

    figure, found = figures.bars(
        shown, "panel", title, value=col.MEDIAN_US, spread=(col.Q1_US, col.Q3_US), heading=heading, axis="µs a call",
        width=11, height=3.2,
    )  # fmt: skip
    for panel in found:
        least = min(row[col.MEDIAN_US] for series in panel.series for row in series.rows)
        panel.axes.set_yscale("log")
        panel.axes.set_ylim(bottom=10.0 ** math.floor(math.log10(0.9 * least)))
    return figure


def render(rows: Sequence[Row], title: str) -> Table:
    """Return the rows as a table."""
    columns = [
        tables.names("workload", col.problem_label), tables.names("batch", lambda row: row[col.BATCH] or "-"),
        tables.names("mode", col.MODE), tables.names("method", col.METHOD), tables.Column("median µs", col.MEDIAN_US),
        tables.Column("quartiles", tables.quartiles),
    ]  # fmt: skip
    if any(row[col.ISSUE_US] is not None for row in rows):
        columns += [tables.Column("issue µs", col.ISSUE_US), tables.Column("CPU µs", col.CPU_US)]
    columns += [tables.Column("TOPS", col.TOPS), tables.Column("ratio", col.RATIO)]
    if any(row[col.BIAS] for row in rows):
        columns.append(tables.Column("bias ÷ none", col.BIAS_COST))
    return tables.render(rows, [*columns, tables.Column("SQNR dB", col.SQNR_DB)], title, groups=2)


def timing_method(device: torch.device, rounds: int) -> str:
    """Say in words how times are taken."""
    if device.type != "cuda":
        return (
            f"CPU back ends on {platform.machine()}, {torch.get_num_threads()} threads, wall clock, warm, methods alternating "
            f"(order reversed every round), median of up to {rounds} samples (at least 3, {CPU_SECONDS:.0f} s a method), "
            "each of at least 5 ms or one call; baselines are plain PyTorch formulas; no GPU was measured, and calls are eager "
            "whatever the mode"
        )
    return (
        f"kernel, end-to-end: device time by CUDA events around the replay of a CUDA graph of 1 to {MOST_CALLS} calls (about "
        f"1 ms), behind an untimed replay, warm caches; eager: {EAGER_CALLS} calls or fewer between two synchronisations. "
        f"Methods alternate (reversed every round), median of {rounds} samples; ratio: fastest SDPA back end of the run's "
        "dtype ÷ row. SDPA and peers are float in, float out in every mode; fa3 takes bfloat16 in every run, float8 methods "
        "tensors quantised beforehand; baselines' kernels have int8 (or their float V) in, float16 out (I-ViT: int8 out)"
    )


@torch.inference_mode()
def run_bench(
    problems: Sequence[Problem],
    methods: Sequence[TimedMethod[Inputs]],
    *,
    modes: Sequence[str] = ("kernel", "end-to-end"),
    kind: str = "uniform",
    dtype: torch.dtype,
    device: torch.device,
    rounds: int = 15,
    output: pathlib.Path | None = None,
) -> dict[str, Any]:
    """Measure, print the table and write ``bench.json``, ``.csv``, ``.png`` and ``.svg`` into ``output``.

    ``bench.json`` and ``bench.csv`` are written after every problem, so that a run that is cut short leaves what it had.

    Returns:
        what ``bench.json`` holds: environment, timing (in words) and rows.

    Raises:
        ValueError: an unknown mode, or fewer than one round.
    """
    for mode in modes:
        if mode not in MODES:
            raise ValueError(f"mode must be one of {MODES}, got {mode!r}")
    check_input(kind)
    runner.check_rounds(rounds)
    done = report.Report(
        "bench", "latency of attention with its accuracy", device, FIELDS, output,
        timing=timing_method(device, rounds), sqnr=report.SQNR, modes=list(modes),
        packages=peers.versions([method.name for method in methods]),
    )  # fmt: skip
    done.begin()
    with progress_bar(len(problems) * len(methods)) as tick:
        for problem in problems:
            row = problem_row(problem, FIELDS, kind, dtype)

            def step(method: str, row: Row = row) -> None:
                tick(f"{col.full_label(row)} {method}")

            try:
                rows = measure(problem, methods, modes, kind=kind, dtype=dtype, device=device, rounds=rounds, tick=step)
            except Exception as error:  # inputs or reference did not fit
                rows = [row | {col.MODE: "-", col.METHOD: "(none)", col.ERROR: describe(error)}]
            add_bias_costs([*done.rows, *rows])
            done.add(rows)
    title = f"{kind} inputs, {str(dtype).removeprefix('torch.')}"
    named = f"{done.record['environment']['device']}, {title}"
    return done.finish(render(done.rows, title), draw=lambda: draw(done.rows, named))
