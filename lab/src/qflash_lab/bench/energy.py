"""Energy of one attention call (Table 3): the GPU's energy counter over seconds of CUDA-graph replay."""

from __future__ import annotations

import collections
import dataclasses
import pathlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.table import Table

from . import console as bench_console
from . import errors, latency, nvml, records
from . import problems as bench_problems
from . import timers as bench_timers
from .methods import TimedMethod
from .metrics import sqnr

REFERENCE = "sdpa flash"
"""FlashAttention-2 in the run's dtype, to which ratios refer."""

_CHUNK_REPLAYS = 10
_STUCK_SECONDS = 10.0

FIELDS = (
    "workload", "batch", "shape", "keys", "causal", "bias", "input", "dtype", "mode", "method", "uj", "uj_min", "uj_max",
    "uj_above_idle", "us", "watts", "rounds", "calls", "ratio", "sqnr_db", "sqnr_of", "error",
)  # fmt: skip
"""Columns of ``energy.csv``."""


@dataclasses.dataclass(frozen=True)
class Reading:
    """Energy in joules, wall time in seconds and the calls made in it."""

    joules: float
    seconds: float
    calls: int

    @property
    def watts(self) -> float:
        """Mean power."""
        return self.joules / self.seconds


def integrate(
    read: Callable[[], float], work: Callable[[], int], seconds: float, clock: Callable[[], float] = time.perf_counter
) -> Reading:
    """Read a counter over at least ``seconds`` of work, from one of its ticks to another.

    The counter moves every so many milliseconds only; from tick to tick the error is one piece of work, not one tick.

    Args:
        read: the counter, in joules.
        work: waits until a piece of work is done, returns how many calls it was.
        seconds: least time.
        clock: in seconds.

    Raises:
        qflash.nvml.NvmlError: the counter does not move.
    """

    def edge(after: float, begin: float) -> tuple[float, float, int]:
        """Work until the counter moves, not before ``after`` seconds since ``begin``."""
        last, calls = read(), 0
        while True:
            calls += work()
            now, energy = clock(), read()
            if energy != last and now - begin >= after:
                return energy, now, calls
            if energy == last and now - begin > after + _STUCK_SECONDS:
                raise nvml.NvmlError(f"the energy counter stood still at {energy} J for {_STUCK_SECONDS:.0f} s")
            last = energy

    first, begin, _ = edge(0.0, clock())
    energy, end, calls = edge(seconds, begin)
    return Reading(energy - first, end - begin, calls)


def summarise(readings: Sequence[Reading], idle_watts: float) -> dict[str, Any]:
    """Return microjoules a call (median over the readings, extremes, and above idle), microseconds and mean power."""
    each = [1e6 * r.joules / r.calls for r in readings]
    above = [1e6 * (r.joules - idle_watts * r.seconds) / r.calls for r in readings]
    return {
        "uj": round(statistics.median(each), 2),
        "uj_min": round(min(each), 2),
        "uj_max": round(max(each), 2),
        "uj_above_idle": round(statistics.median(above), 2),
        "us": round(statistics.median(1e6 * r.seconds / r.calls for r in readings), 3),
        "watts": round(statistics.median(r.watts for r in readings), 1),
        "rounds": len(readings),
        "calls": sum(r.calls for r in readings),
    }


def add_ratios(rows: Sequence[dict[str, Any]]) -> None:
    """Set ``ratio``: a row's energy over :data:`REFERENCE`'s on the same problem (below 1: less energy)."""

    def key(row: dict[str, Any]) -> tuple[Any, ...]:
        return row["workload"], row["batch"], row["bias"]

    reference = {key(row): row["uj"] for row in rows if row["method"] == REFERENCE and row["uj"] is not None}
    for row in rows:
        if row["uj"] is not None and key(row) in reference:
            row["ratio"] = round(row["uj"] / reference[key(row)], 3)


def _idle() -> int:
    time.sleep(0.005)
    return 0


class Busy:
    """Pieces of work in a row with the next always under way: the device idles neither while the counter is read, which
    takes milliseconds, nor while the host prepares.

    Args:
        start: enqueues one call's worth or more of work.
        calls: how many calls ``start`` enqueues.
        marker: returns something whose ``synchronize`` waits for what is enqueued so far.
    """

    def __init__(self, start: Callable[[], None], calls: int, marker: Callable[[], Any]) -> None:
        self._start, self._calls, self._marker = start, calls * _CHUNK_REPLAYS, marker
        self._ends: collections.deque[Any] = collections.deque()

    def __call__(self) -> int:
        """Wait for the oldest piece, with one more behind it; return its calls."""
        while len(self._ends) < 2:
            for _ in range(_CHUNK_REPLAYS):
                self._start()
            self._ends.append(self._marker())
        self._ends.popleft().synchronize()
        return self._calls


def _recorded_event() -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record()
    return event


def replay_energy(timer: bench_timers.GraphTimer, gpu: nvml.Gpu, seconds: float) -> Reading:
    """Replay a graph for some seconds, after 0.3 s in which power and clocks settle.

    Raises:
        qflash.nvml.NvmlError: the counter does not move.
    """
    work = Busy(timer.replay, timer.calls, _recorded_event)
    integrate(gpu.energy, work, 0.3)
    reading = integrate(gpu.energy, work, seconds)
    torch.cuda.synchronize()
    return reading


def measure(
    problem: bench_problems.Problem,
    methods: Sequence[TimedMethod[bench_problems.Inputs]],
    gpu: nvml.Gpu,
    idle_watts: float,
    *,
    kind: str,
    dtype: torch.dtype,
    device: torch.device,
    seconds: float,
    rounds: int,
    tick: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Measure every method on one problem, in turns; one row each, keys :data:`FIELDS`."""
    inputs = bench_problems.make_inputs(problem, kind, dtype, device)
    wanted, part, words = bench_problems.exact_part(inputs)
    rows: list[dict[str, Any]] = []
    timers: list[bench_timers.GraphTimer | None] = []
    readings: list[list[Reading]] = [[] for _ in methods]
    for method in methods:
        row: dict[str, Any] = dict.fromkeys(FIELDS)
        row |= {
            "workload": problem.workload, "batch": problem.batch, "shape": "x".join(map(str, problem.shape)),
            "keys": problem.keys, "causal": problem.causal, "bias": problem.bias, "input": kind,
            "dtype": str(dtype).removeprefix("torch."), "mode": method.mode, "method": method.name,
        }  # fmt: skip
        rows.append(row)
        timer = None
        try:
            with errors.explained(), method.context():
                call = method.prepare(inputs)
                got = bench_problems.as_tensor(call(), problem)[part]
                row |= {"sqnr_db": round(sqnr(wanted, got), 2), "sqnr_of": words}
                timer = bench_timers.GraphTimer(call)
        except Exception as error:
            row["error"] = errors.describe(error)
            bench_timers.tidy(device)
        timers.append(timer)
    for index in range(rounds):
        order = range(len(methods)) if index % 2 == 0 else range(len(methods) - 1, -1, -1)
        for place in order:
            timer = timers[place]
            if timer is not None:
                try:
                    readings[place].append(replay_energy(timer, gpu, seconds))
                except Exception as error:
                    rows[place]["error"], timers[place] = errors.describe(error), None
            tick(f"{problem.label} {methods[place].name}")
    for row, timer, found in zip(rows, timers, readings, strict=True):
        if timer is not None and found:
            row |= summarise(found, idle_watts)
    del timers, inputs
    bench_timers.tidy(device)
    return rows


def render(rows: Sequence[dict[str, Any]], title: str) -> Table:
    """Return the rows as a table."""
    table = Table(title=title, title_justify="left")
    for heading in ("workload", "batch", "method"):
        table.add_column(heading, no_wrap=True)
    for heading in ("µJ a call", "range", "above idle", "W", "µs", "÷ FA2", "SQNR dB"):
        table.add_column(heading, justify="right", no_wrap=True)
    number = bench_console.format_number
    for row in rows:
        names = (latency._label(row), str(row["batch"] or "-"), row["method"])
        if row["uj"] is None:
            cells = ["failed", *[""] * 5]
        else:
            cells = [number(row["uj"]), f"{number(row['uj_min'])} - {number(row['uj_max'])}"]
            cells += [number(row[name]) for name in ("uj_above_idle", "watts", "us", "ratio")]
        table.add_row(*names, *cells, number(row["sqnr_db"]))
    return table


@torch.inference_mode()
def run_energy(
    problems: Sequence[bench_problems.Problem],
    methods: Sequence[TimedMethod[bench_problems.Inputs]],
    *,
    kind: str = "uniform",
    dtype: torch.dtype,
    device: torch.device,
    seconds: float = 3.0,
    rounds: int = 3,
    output: pathlib.Path | None = None,
) -> dict[str, Any]:
    """Measure, print the table and write ``energy.json`` and ``energy.csv`` into ``output``.

    Returns:
        what ``energy.json`` holds; ``idle_watts`` is the power with the CUDA context open and nothing running.

    Raises:
        qflash.nvml.NvmlError: no GPU, no NVML or no energy counter.
        ValueError: ``seconds`` or ``rounds`` is not positive.
    """
    bench_problems.check_input(kind)
    if seconds <= 0 or rounds < 1:
        raise ValueError(f"seconds and rounds must be positive, got {seconds} and {rounds}")
    if device.type != "cuda":
        raise nvml.NvmlError("energy is read from an NVIDIA GPU's counter, and there is no GPU here")
    gpu = nvml.Gpu(device)
    torch.zeros(1, dtype=torch.float32, device=device)
    time.sleep(1.0)  # the context's own start is not idle
    idle = integrate(gpu.energy, _idle, seconds).watts
    record: dict[str, Any] = {
        "what": "energy of one attention call",
        "environment": records.environment(device),
        "timing": f"NVML's total-energy counter from tick to tick over {seconds:g} s of CUDA-graph replay, 0.3 s "
        f"after its start; methods in turns (order reversed every round), median of {rounds} rounds; idle power "
        "counts",
        "sqnr": "20 log10(|ref| / |out - ref|) against float64 softmax attention on the inputs before quantisation",
        "ratio": f"energy ÷ energy of {REFERENCE!r}",
        "idle_watts": round(idle, 1),
        "rows": [],
    }
    rows: list[dict[str, Any]] = record["rows"]
    with bench_console.progress_bar(len(problems) * len(methods) * rounds) as tick:
        for problem in problems:
            options: dict[str, Any] = {"kind": kind, "dtype": dtype, "device": device}
            rows += measure(problem, methods, gpu, idle, **options, seconds=seconds, rounds=rounds, tick=tick)
            add_ratios(rows)
            if output is not None:
                records.write_json(output / "energy.json", record)
                records.write_csv(output / "energy.csv", rows, FIELDS)
    record["environment"]["nvml_after"] = nvml.snapshot(device)
    record["idle_watts_after"] = round(integrate(gpu.energy, _idle, min(seconds, 2.0)).watts, 1)
    console = bench_console.table_console()
    console.print(f"{record['environment']['device']}, idle {idle:.1f} W. {record['timing']}.\n")
    console.print(render(rows, f"{kind} inputs, {str(dtype).removeprefix('torch.')}"))
    latency.print_errors(rows, console)
    if output is not None:
        records.write_json(output / "energy.json", record)
        console.print(f"Written to {output}: energy.json, energy.csv")
    return record
