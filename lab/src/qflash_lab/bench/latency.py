"""Latency beside accuracy: QFlash, PyTorch's attention and other functions on the same inputs in one run (Figure 3).

On a CUDA device a call is captured many times over in a CUDA graph and the graph is replayed, so that the device's
time is measured and not Python's; ``eager`` measures the rest. Methods take turns, in alternating order, and every
row carries its SQNR against float64 softmax attention. What fails becomes a row with its error.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
import platform
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from . import figures, nvml
from .console import format_number, progress_bar, table_console
from .errors import describe, explained
from .methods import TimedMethod
from .metrics import sqnr
from .problems import Inputs, Problem, as_tensor, check_input, exact_part, make_inputs
from .records import environment, write_csv, write_json
from .timers import CPU_SECONDS, EAGER_CALLS, MOST_CALLS, TimedCall, Timer, make_timer, summarise, tidy

MODES = ("kernel", "end-to-end", "eager")


@dataclasses.dataclass
class _Runner:
    method: TimedMethod[Inputs]
    mode: str
    row: dict[str, Any]
    timer: Timer | None = None
    samples: list[dict[str, float]] = dataclasses.field(default_factory=list)
    seconds: float = 0.0


FIELDS = (
    "workload", "batch", "shape", "keys", "causal", "bias", "input", "dtype", "mode", "method", "median_us", "q1_us", "q3_us",
    "min_us", "max_us", "samples", "calls", "issue_us", "cpu_us", "tops", "best_sdpa", "ratio", "bias_cost", "sqnr_db",
    "sqnr_of", "error",
)  # fmt: skip
"""Columns of ``bench.csv`` and keys of a row; what does not apply is None."""


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
) -> list[dict[str, Any]]:
    """Time every method on one problem, in turns, and return one row a method and mode, keys :data:`FIELDS`.

    ``ratio`` is the time of the fastest of PyTorch's back ends in the run's dtype (``best_sdpa``), in the same
    way of measuring, divided by the row's. SDPA and peers are measured whatever the modes are.
    """
    inputs = make_inputs(problem, kind, dtype, device)
    wanted, part, words = exact_part(inputs)
    runners: list[_Runner] = []
    for method in methods:
        graph_modes = [method.mode] if method.mode in modes or not (method.is_ours or method.is_baseline) else []
        if device.type != "cuda":
            chosen = graph_modes or ([method.mode] if "eager" in modes else [])
        else:
            only_eager = tuple(modes) == ("eager",)
            eager = ["eager"] if "eager" in modes and (method.mode != "kernel" or "kernel" in modes) else []
            chosen = (graph_modes if not only_eager else []) + eager
        if not chosen:
            continue
        base: dict[str, Any] = dict.fromkeys(FIELDS)
        base |= {
            "workload": problem.workload,
            "batch": problem.batch,
            "shape": "x".join(map(str, problem.shape)),
            "keys": problem.keys,
            "causal": problem.causal,
            "bias": problem.bias,
            "input": kind,
            "dtype": str(dtype).removeprefix("torch."),
            "method": method.name,
        }
        call: TimedCall | None = None
        for mode in chosen:
            runner = _Runner(method, mode, base | {"mode": mode})
            runners.append(runner)
            try:
                if call is None:
                    with explained(), method.context():
                        made = method.prepare(inputs)
                        got = as_tensor(made(), problem)[part]
                    call = made
                    base["sqnr_db"], base["sqnr_of"] = round(sqnr(wanted, got), 2), words
                    runner.row |= {"sqnr_db": base["sqnr_db"], "sqnr_of": words}
                    del got
                runner.timer = make_timer(call, mode, device, method.context)
            except Exception as error:
                runner.row["error"] = describe(error)
                tidy(device)
        tick(method.name)
    ready = [runner for runner in runners if runner.timer is not None]
    for index in range(rounds):
        for runner in ready if index % 2 == 0 else reversed(ready):
            enough = device.type != "cuda" and runner.seconds > CPU_SECONDS and len(runner.samples) >= 3
            if runner.timer is None or enough:
                continue
            begin = time.monotonic()
            try:
                runner.samples.append(runner.timer.sample())
            except Exception as error:
                runner.row["error"], runner.timer = describe(error), None
            runner.seconds += time.monotonic() - begin
    for runner in runners:
        if runner.timer is not None and runner.samples:
            runner.row |= summarise(runner.samples)
            runner.row |= {"samples": len(runner.samples), "calls": runner.timer.calls}
            runner.row["tops"] = round(problem.operations / runner.row["median_us"] / 1e6, 2)
    for is_eager in (False, True):
        add_ratios([(r.method.is_sdpa, r.row) for r in runners if (r.mode == "eager") is is_eager])
    rows = [runner.row for runner in runners]
    del runners, ready, inputs, call
    tidy(device)
    return rows


def add_ratios(timed: Sequence[tuple[bool, dict[str, Any]]]) -> None:
    """Set ``best_sdpa`` and ``ratio`` of rows timed in the same way, each with whether it is one of PyTorch's back ends."""
    done = [(is_sdpa, row) for is_sdpa, row in timed if row["median_us"] is not None]
    best = min((row for is_sdpa, row in done if is_sdpa), key=lambda row: float(row["median_us"]), default=None)
    if best is not None:
        for _, row in done:
            row["best_sdpa"] = best["method"]
            row["ratio"] = round(best["median_us"] / row["median_us"], 3)


def add_bias_costs(rows: Sequence[dict[str, Any]]) -> None:
    """Set ``bias_cost`` of rows with a bias: their time over the same method's without it."""

    def key(row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row[name] for name in ("workload", "batch", "shape", "keys", "mode", "method"))

    plain = {key(row): row["median_us"] for row in rows if not row["bias"] and row["median_us"] is not None}
    for row in rows:
        if row["bias"] and row["median_us"] is not None and key(row) in plain:
            row["bias_cost"] = round(row["median_us"] / plain[key(row)], 3)


_TAKES = {"kernel": "int8 in, quantised beforehand", "end-to-end": "float in, quantisation included", "eager": "eager calls"}


def draw(rows: Sequence[dict[str, Any]], title: str) -> Any:
    """Draw Figure 3: latency in grouped bars, a panel a batch (or plain shapes) and mode; graph (or CPU) rows only.

    Returns:
        a matplotlib Figure.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: no row has a time.
    """
    timed = [row for row in rows if row["median_us"] is not None and row["mode"] != "eager"]
    timed = timed or [row for row in rows if row["median_us"] is not None]
    if not timed:
        raise ValueError("no method was timed, there is nothing to draw")
    timed = [row | {"panel": (row["batch"], row["mode"])} for row in timed]
    figure, found = figures.panels(timed, "panel", _label, width=11, height=3.2)
    for axes, (batch, mode), series in found:
        for name, mine, spots, width, colour in series:
            middle = [row["median_us"] for row in mine]
            spread = [
                [row["median_us"] - row["q1_us"] for row in mine],
                [row["q3_us"] - row["median_us"] for row in mine],
            ]
            hatch = "//" if name.startswith("qflash") else None
            axes.bar(spots, middle, width, yerr=spread, color=colour, hatch=hatch, label=name, error_kw={"lw": 0.6})
        least = min(row["median_us"] for one in series for row in one.rows)
        axes.set_yscale("log")
        axes.set_ylim(bottom=10.0 ** math.floor(math.log10(0.9 * least)))
        axes.set_ylabel("µs a call")
        what = "given shapes" if batch is None else f"batch {batch}"
        axes.set_title(f"{what}, {_TAKES.get(mode, mode)}", loc="left", fontsize="medium")
    figures.add_legend(figure)
    figure.suptitle(title, fontsize="medium")
    return figure


def _label(row: dict[str, Any]) -> str:
    return row["workload"] + " causal" * row["causal"] + " bias" * row["bias"]


def render(rows: Sequence[dict[str, Any]], title: str) -> Table:
    """Return the rows as a table."""
    table = Table(title=title, title_justify="left", caption_justify="left")
    eager = any(row["issue_us"] is not None for row in rows)
    bias = any(row["bias"] for row in rows)
    for heading in ("workload", "batch", "mode", "method"):
        table.add_column(heading, no_wrap=True)
    headings = ["median µs", "quartiles", *(["issue µs", "CPU µs"] if eager else []), "TOPS", "ratio"]
    for heading in (*headings, *(["bias ÷ none"] if bias else []), "SQNR dB"):
        table.add_column(heading, justify="right", no_wrap=True)
    last: tuple[Any, ...] | None = None
    for row in rows:
        here = (row["workload"], row["batch"], row["bias"])
        if last is not None and here != last:
            table.add_section()
        first = (_label(row), str(row["batch"] or "-")) if here != last else ("", "")
        last = here
        if row["median_us"] is None:
            cells = ["failed", *[""] * (len(headings) - 1)]
        else:
            cells = [format_number(row["median_us"]), f"{format_number(row['q1_us'])} - {format_number(row['q3_us'])}"]
            cells += [format_number(row["issue_us"]), format_number(row["cpu_us"])] if eager else []
            cells += [format_number(row["tops"]), format_number(row["ratio"])]
        cells += [format_number(row["bias_cost"])] if bias else []
        table.add_row(*first, row["mode"], row["method"], *cells, format_number(row["sqnr_db"]))
    return table


def print_errors(rows: Sequence[dict[str, Any]], console: Console) -> None:
    """Print the rows that failed, with the reason."""
    for row in rows:
        if row["error"]:
            where = f"{_label(row)} b{row['batch']}" if row["batch"] else _label(row)
            console.print(f"failed: {where}, {row['mode']}, {row['method']}: {row['error']}", markup=False, soft_wrap=True)


def timing_method(device: torch.device, rounds: int) -> str:
    """Say in words how times are taken."""
    if device.type != "cuda":
        return (
            f"CPU back ends on {platform.machine()}, {torch.get_num_threads()} threads, wall clock, warm, methods in turns "
            f"(order reversed every round), median of up to {rounds} samples (at least 3, {CPU_SECONDS:.0f} s a method), "
            "each of at least 5 ms or one call; baselines are plain PyTorch formulas; no GPU was measured, and calls are eager "
            "whatever the mode"
        )
    return (
        f"kernel, end-to-end: device time by CUDA events around the replay of a CUDA graph of 1 to {MOST_CALLS} calls (about "
        f"1 ms), behind an untimed replay, warm caches; eager: {EAGER_CALLS} calls or fewer between two synchronisations. "
        f"Methods in turns (order reversed every round), median of {rounds} samples. ratio: fastest SDPA back end of the run's "
        "dtype ÷ row. SDPA and peers are float in, float out in every mode; baselines' kernels have int8 (or their float V) "
        "in, float16 out (I-ViT: int8 out)"
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
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    record: dict[str, Any] = {
        "what": "latency of attention with its accuracy",
        "environment": environment(device),
        "timing": timing_method(device, rounds),
        "sqnr": "20 log10(|ref| / |out - ref|) against float64 softmax attention on the inputs before quantisation",
        "modes": list(modes),
        "rows": [],
    }
    rows: list[dict[str, Any]] = record["rows"]
    console = table_console()
    console.print(f"{record['environment']['device']}. {record['timing']}.\n")
    with progress_bar(len(problems) * len(methods)) as tick:
        for problem in problems:
            label = f"{problem.label} b{problem.batch}" if problem.batch else problem.label

            def step(done: str, label: str = label) -> None:
                tick(f"{label} {done}")

            try:
                rows += measure(problem, methods, modes, kind=kind, dtype=dtype, device=device, rounds=rounds, tick=step)
            except Exception as error:  # inputs or reference did not fit
                tidy(device)
                failed: dict[str, Any] = dict.fromkeys(FIELDS)
                rows.append(
                    failed
                    | {
                        "workload": problem.workload, "batch": problem.batch, "shape": "x".join(map(str, problem.shape)),
                        "keys": problem.keys, "causal": problem.causal, "bias": problem.bias, "input": kind,
                        "dtype": str(dtype).removeprefix("torch."), "mode": "-", "method": "(none)", "error": describe(error),
                    }
                )  # fmt: skip
            if output is not None:
                add_bias_costs(rows)
                write_json(output / "bench.json", record)
                write_csv(output / "bench.csv", rows, FIELDS)
    add_bias_costs(rows)
    if device.type == "cuda":
        record["environment"]["nvml_after"] = nvml.snapshot(device)
    title = f"{kind} inputs, {str(dtype).removeprefix('torch.')}"
    console.print(render(rows, title))
    print_errors(rows, console)
    if output is not None:
        write_json(output / "bench.json", record)
        write_csv(output / "bench.csv", rows, FIELDS)
        try:
            figures.write_figure(output, "bench", draw(rows, f"{record['environment']['device']}, {title}"))
            console.print(f"Written to {output}: bench.json, bench.csv, bench.png, bench.svg")
        except (ImportError, ValueError) as error:
            console.print(f"Written to {output}: bench.json, bench.csv; no plot: {error}")
    return record
