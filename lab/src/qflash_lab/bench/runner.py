"""The one way to time methods beside each other: prepare all, then sample in alternation.

A method that fails keeps its row, with the error. Who asks says what a sample is: a time, energy, or another process's time.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, Protocol, TypeVar

import torch

from qflash.optional_packages import require_packages

from . import errors, timers
from . import schema as col
from .schema import Row
from .timers import CPU_SECONDS, TimedCall

Setup = TypeVar("Setup")
"""What a timed method is prepared for: the inputs of one attention, a model with its images, a linear layer."""
_Name = TypeVar("_Name", bound=Hashable)
_Found = TypeVar("_Found")

LEAST_SAMPLES = 3
"""On a CPU a method that takes long is sampled no more than this."""


# --- the registry -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class TimedMethod(Generic[Setup]):
    """Something that is timed, and how.

    Attributes:
        name: what tables call it.
        mode: ``"kernel"`` (int8 in, quantised before the clock starts) or ``"end-to-end"`` (float in, float out).
        prepare: makes, from a problem, the call to time; what it does itself is not timed.
        context: entered around all calls, outside the clock.
        is_sdpa: one of PyTorch's back ends in the run's dtype, to which ratios refer.
        is_ours: QFlash's own; timed only in the modes asked for.
        is_baseline: a method of :mod:`qflash_lab.baselines`; like ours it is timed only in the modes asked for.
        devices: the types of devices it runs on.
        needs: modules that must be installed.
    """

    name: str
    mode: str
    prepare: Callable[[Setup], TimedCall]
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    is_sdpa: bool = False
    is_ours: bool = False
    is_baseline: bool = False
    devices: tuple[str, ...] = ("cuda", "cpu")
    needs: tuple[str, ...] = ()


def choose(methods: Sequence[TimedMethod[Setup]], device: torch.device, only: Sequence[str] = ()) -> list[TimedMethod[Setup]]:
    """Return the methods called as in ``only``, or if it is empty all that run on ``device`` and have what they need.

    Raises:
        ValueError: two methods have one name, none has a name in ``only``, or one does not run on ``device``.
        ImportError: a method in ``only`` needs a package that is not installed.
    """
    here = [method for method in methods if device.type in method.devices]
    names = [method.name for method in here]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two methods are called {name!r}; give the peer another name")
    for name in only:
        if name in names:
            continue
        elsewhere = [method for method in methods if method.name == name]
        if elsewhere:
            places = " and ".join({"cpu": "the CPU", "cuda": "a GPU"}[kind] for kind in elsewhere[0].devices)
            raise ValueError(f"method {name!r} runs on {places}, and the device is {device.type!r}")
        raise ValueError(f"method must be one of {names}, got {name!r}")
    for method in here:
        if method.name in only:
            require_packages(f"method {method.name!r}", *method.needs)
    return [method for method in here if (method.name in only if only else _has(method.needs))]


def _has(modules: Sequence[str]) -> bool:
    return all(importlib.util.find_spec(module) is not None for module in modules)


# --- the runner -------------------------------------------------------------------------------------------------------


def check_rounds(rounds: int) -> None:
    """Require at least one round, or raise ValueError."""
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")


class Sampled(Protocol):
    """What can be sampled: :data:`qflash_lab.bench.timers.Timer`, or processes that have one."""

    def sample(self) -> Any:
        """Return one sample."""


def by_turns(
    running: Mapping[_Name, Sampled],
    rounds: int,
    device: torch.device,
    *,
    sample: Callable[[Any], _Found] = lambda timer: timer.sample(),
    failed: Callable[[_Name, Exception], None] | None = None,
) -> dict[_Name, list[_Found]]:
    """Sample everything in every round, in every second round backwards; return the samples of each.

    On a CPU what has taken :data:`CPU_SECONDS` gets no more samples than :data:`LEAST_SAMPLES`.

    Args:
        running: what to sample, by name.
        rounds: samples of each.
        device: where it runs.
        sample: takes one.
        failed: told of an exception, after which that one is left out; if None it is raised.
    """
    found: dict[_Name, list[_Found]] = {name: [] for name in running}
    seconds = dict.fromkeys(running, 0.0)
    order = list(running)
    for _ in range(rounds):
        for name in list(order):
            if device.type != "cuda" and seconds[name] > CPU_SECONDS and len(found[name]) >= LEAST_SAMPLES:
                continue
            begin = time.monotonic()
            try:
                found[name].append(sample(running[name]))
            except Exception as error:
                if failed is None:
                    raise
                failed(name, error)
                order.remove(name)
            seconds[name] += time.monotonic() - begin
        order.reverse()
    return found


def summarise(samples: Sequence[dict[str, float]]) -> Row:
    """Return median, quartiles and extremes of the samples' ``us``, and the medians of what else they hold."""
    times = sorted(sample["us"] for sample in samples)
    quartiles = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3
    row = dict(zip((col.Q1_US, col.MEDIAN_US, col.Q3_US), quartiles, strict=True))
    row |= {col.MIN_US: times[0], col.MAX_US: times[-1]}
    row |= {name: statistics.median(sample[name] for sample in samples) for name in samples[0] if name != "us"}
    return {name: round(value, 3) for name, value in row.items()}


Prepared = Callable[[], tuple[TimedCall, Row]]
"""Makes the call to time; also returns the columns that are known then, as its SQNR."""


def unjudged(method: TimedMethod[Setup], problem: Setup) -> tuple[TimedCall, Row]:
    """Prepare a method whose output nothing is said of."""
    return method.prepare(problem), {}


@dataclasses.dataclass
class Run:
    """A method on a problem.

    Attributes:
        row: the columns that it has, those that are known filled in.
        prepare: see :data:`Prepared`.
        mode: of the clock, see :func:`qflash_lab.bench.timers.make_timer`.
        context: entered around all calls, outside the clock.
        timer: once it is prepared.
    """

    row: Row
    prepare: Prepared
    mode: str = "end-to-end"
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    timer: Any = None

    def fill(self, **found: Any) -> None:
        """Put what was found into those columns that the row has."""
        self.row |= {name: value for name, value in found.items() if name in self.row}


@dataclasses.dataclass(frozen=True)
class Series:
    """Samples of another kind, taken in alternation when all methods have been timed.

    Attributes:
        rounds: samples a method.
        sample: takes one with a timer.
        summarise: makes columns of them.
    """

    rounds: int
    sample: Callable[[Any], Any]
    summarise: Callable[[Sequence[Any]], Row]


def measure(
    runs: Sequence[Run],
    device: torch.device,
    rounds: int,
    *,
    sample: Callable[[Any], Any] = lambda timer: timer.sample(),
    summarise: Callable[[Sequence[Any]], Row] = summarise,
    after: Series | None = None,
    tick: Callable[[str], None] = lambda _: None,
) -> list[Row]:
    """Prepare every method, sample all in alternation, and return their rows with what was found.

    Args:
        runs: the methods on one problem.
        device: where they run.
        rounds: samples a method.
        sample: takes a sample with a timer.
        summarise: makes columns of samples.
        after: more samples of the methods that have been timed.
        tick: told of every method that is prepared.
    """

    def note(place: int, error: Exception) -> None:
        runs[place].row[col.ERROR] = errors.describe(error)
        runs[place].timer = None

    for place, run in enumerate(runs):
        try:
            with errors.explained(), run.context():
                call, known = run.prepare()
            run.row |= known
            run.timer = timers.make_timer(call, run.mode, device, run.context)
            del call
        except Exception as error:
            note(place, error)
            timers.tidy(device)
        tick(str(run.row[col.METHOD]))
    ready = {place: run.timer for place, run in enumerate(runs) if run.timer is not None}
    found: dict[int, list[Any]] = by_turns(ready, rounds, device, sample=sample, failed=note)
    for place, run in enumerate(runs):
        if run.timer is not None and found[place]:
            run.fill(**{col.SAMPLES: len(found[place]), col.CALLS: run.timer.calls} | summarise(found[place]))
    if after is not None:
        timed = {place: run.timer for place, run in enumerate(runs) if run.timer is not None and found[place]}
        for place, samples in by_turns(timed, after.rounds, device, sample=after.sample, failed=note).items():
            if runs[place].timer is not None:
                runs[place].fill(**after.summarise(samples))
    for run in runs:  # what they hold is not to outlive this
        run.timer, run.prepare = None, _spent
    return [run.row for run in runs]


def _spent() -> tuple[TimedCall, Row]:
    raise RuntimeError("this method has been measured")


def medians(calls: Mapping[_Name, TimedCall], device: torch.device, rounds: int) -> dict[_Name, float]:
    """Return the microseconds of several calls without their launch, medians of samples in alternation; what fails raises."""
    running = {name: timers.make_timer(call, "kernel", device) for name, call in calls.items()}
    samples: dict[_Name, list[dict[str, float]]] = by_turns(running, rounds, device)
    return {name: summarise(found)[col.MEDIAN_US] for name, found in samples.items()}


def compare(rows: Sequence[Row], base: Callable[[Row], bool], of: str = col.MEDIAN_US, name: str | None = None) -> None:
    """Set ``ratio``: the least of the figures of those rows that are a base, divided by the row's own.

    Args:
        rows: of one problem.
        base: tells which rows are compared with.
        of: the column of figures.
        name: a column for the method of the row that is compared with.
    """
    timed = [row for row in rows if row[of] is not None]
    best = min(filter(base, timed), key=lambda row: float(row[of]), default=None)
    if best is not None:
        for row in timed:
            row[col.RATIO] = round(best[of] / row[of], 3)
            if name is not None:
                row[name] = best[col.METHOD]
