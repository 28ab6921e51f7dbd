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

from . import console as bench_console
from . import latency, nvml, report, runner, tables
from . import problems as bench_problems
from . import schema as col
from . import timers as bench_timers
from .runner import TimedMethod
from .schema import Row

REFERENCE = col.SDPA_FLASH
"""FlashAttention-2 in the run's dtype, to which ratios refer."""

_CHUNK_REPLAYS = 10
_STUCK_SECONDS = 10.0

FIELDS = col.pick(
    *col.PROBLEM, col.MODE, col.METHOD, col.MEDIAN_US, col.SAMPLES, col.CALLS, col.UJ, col.UJ_MIN, col.UJ_MAX,
    col.UJ_ABOVE_IDLE, col.WATTS, col.RATIO, col.SQNR_DB, col.SQNR_OF, col.ERROR,
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
        qflash_lab.bench.nvml.NvmlError: the counter does not move.
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


def summarise(readings: Sequence[Reading], idle_watts: float) -> Row:
    """Return microjoules a call (median over the readings, extremes, and above idle), microseconds and mean power."""
    each = [1e6 * r.joules / r.calls for r in readings]
    above = [1e6 * (r.joules - idle_watts * r.seconds) / r.calls for r in readings]
    return {
        col.UJ: round(statistics.median(each), 2),
        col.UJ_MIN: round(min(each), 2),
        col.UJ_MAX: round(max(each), 2),
        col.UJ_ABOVE_IDLE: round(statistics.median(above), 2),
        col.MEDIAN_US: round(statistics.median(1e6 * r.seconds / r.calls for r in readings), 3),
        col.WATTS: round(statistics.median(r.watts for r in readings), 1),
        col.CALLS: sum(r.calls for r in readings),
    }


def add_ratios(rows: Sequence[Row]) -> None:
    """Set ``ratio``: a row's energy over :data:`REFERENCE`'s on the same problem (below 1: less energy)."""

    def key(row: Row) -> tuple[Any, ...]:
        return row[col.WORKLOAD], row[col.BATCH], row[col.BIAS]

    measured = [row for row in rows if row[col.UJ] is not None]
    reference = {key(row): row[col.UJ] for row in measured if row[col.METHOD] == REFERENCE}
    for row in measured:
        if key(row) in reference:
            row[col.RATIO] = round(row[col.UJ] / reference[key(row)], 3)


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
        qflash_lab.bench.nvml.NvmlError: the counter does not move.
    """
    work = Busy(timer.replay, timer.calls, _recorded_event)
    integrate(gpu.energy, work, 0.3)
    reading = integrate(gpu.energy, work, seconds)
    torch.cuda.synchronize()
    return reading


def idle_watts(gpu: nvml.Gpu, device: torch.device, seconds: float) -> float:
    """Return the power with the CUDA context open and nothing running.

    Raises:
        qflash_lab.bench.nvml.NvmlError: the counter does not move.
    """
    torch.zeros(1, dtype=torch.float32, device=device)
    torch.cuda.synchronize()
    time.sleep(1.0)  # the context's own start is not idle
    return integrate(gpu.energy, _idle, seconds).watts


TABLE = (
    tables.names("workload", col.problem_label), tables.names("batch", lambda row: row[col.BATCH] or "-"),
    tables.names("method", col.METHOD), tables.Column("µJ a call", col.UJ),
    tables.Column("range", tables.between(col.UJ_MIN, col.UJ_MAX)),
    tables.Column("above idle", col.UJ_ABOVE_IDLE), tables.Column("W", col.WATTS), tables.Column("µs", col.MEDIAN_US),
    tables.Column("÷ FA2", col.RATIO), tables.Column("SQNR dB", col.SQNR_DB),
)  # fmt: skip
"""Of the table on the console."""


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
        qflash_lab.bench.nvml.NvmlError: no GPU, no NVML or no energy counter.
        ValueError: ``seconds`` or ``rounds`` is not positive.
    """
    bench_problems.check_input(kind)
    if seconds <= 0 or rounds < 1:
        raise ValueError(f"seconds and rounds must be positive, got {seconds} and {rounds}")
    if device.type != "cuda":
        raise nvml.NvmlError("energy is read from an NVIDIA GPU's counter, and there is no GPU here")
    gpu = nvml.Gpu(device)
    idle = idle_watts(gpu, device, seconds)
    done = report.Report(
        "energy", "energy of one attention call", device, FIELDS, output,
        timing=f"NVML's total-energy counter from tick to tick over {seconds:g} s of CUDA-graph replay, 0.3 s "
        f"after its start; methods in alternation (order reversed every round), median of {rounds} rounds; idle power "
        "counts",
        sqnr=report.SQNR, ratio=f"energy ÷ energy of {REFERENCE!r}", idle_watts=round(idle, 1),
    )  # fmt: skip
    done.begin()
    with bench_console.progress_bar(len(problems) * len(methods) * rounds) as tick:

        def sample(timer: bench_timers.GraphTimer) -> Reading:
            reading = replay_energy(timer, gpu, seconds)
            tick("replaying")
            return reading

        for problem in problems:
            runs = latency.attention_runs(
                problem, methods, lambda method: (method.mode,), FIELDS, kind=kind, dtype=dtype, device=device
            )
            rows = runner.measure(runs, device, rounds, sample=sample, summarise=lambda readings: summarise(readings, idle))
            add_ratios(rows)
            done.add(rows)
    done.record["idle_watts_after"] = round(integrate(gpu.energy, _idle, min(seconds, 2.0)).watts, 1)
    title = f"{kind} inputs, {str(dtype).removeprefix('torch.')}, idle {idle:.1f} W"
    return done.finish(tables.render(done.rows, TABLE, title))
