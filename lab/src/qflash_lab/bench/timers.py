"""Clocks: CUDA graphs, eager calls and the CPU."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

TimedCall = Callable[[], Any]
"""What a timer calls; the result is dropped."""

_GRAPH_US = 1000.0

MOST_CALLS = 200
"""Calls in a graph: as many as take a millisecond, so that the clock's resolution and the launch do not matter."""

EAGER_CALLS = 50
"""Far fewer than fill the launch queue (1024 entries) even at ten launches a call: issuing never waits for the device."""

CPU_SECONDS = 10.0


def settle_calls(measure: Callable[[int], float]) -> int:
    """Return how many calls to time at once, those that ``measure`` was last asked for: about a millisecond, 200 at most.

    Of few calls Python's and the launch's part is the larger, and another program on the machine may be the largest. So they
    become more until they last half of that.

    Args:
        measure: times so many calls at once and returns the microseconds of one.
    """
    calls, wanted = 0, 1
    while wanted > calls:
        calls = wanted
        us = measure(calls)
        if calls * us < _GRAPH_US / 2:
            wanted = min(MOST_CALLS, round(_GRAPH_US / max(us, 0.1)))
    return calls


class GraphTimer:
    """Times a call by replaying a CUDA graph of many of it, behind one replay that keeps the device busy meanwhile."""

    def __init__(self, call: TimedCall) -> None:
        """Warm up and capture.

        Raises:
            Exception: whatever the call or its capture raises.
        """
        self._call = call  # the graph holds addresses, the call the tensors they belong to
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                call()
            # A call that waits for the device cannot be captured; found here it leaves no half-made graph behind.
            torch.cuda.set_sync_debug_mode("error")
            try:
                call()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self.calls = settle_calls(self._try)

    def _try(self, calls: int) -> float:
        """Make it ``calls`` a sample and return the least microseconds of a few samples."""
        self.calls = calls
        self._graph = self._capture(self._call)
        return min(self.sample()["us"] for _ in range(5))

    def _capture(self, call: TimedCall) -> torch.cuda.CUDAGraph:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph):
                for _ in range(self.calls):
                    call()
        finally:  # a capture that fails leaves its own stream current
            torch.cuda.set_stream(stream)
        torch.cuda.synchronize()
        return graph

    def replay(self) -> None:
        """Enqueue :attr:`calls` calls."""
        self._graph.replay()

    def sample(self) -> dict[str, float]:
        """Return the device's time of one call in microseconds."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._graph.replay()
        begin.record()
        self._graph.replay()
        end.record()
        end.synchronize()
        return {"us": begin.elapsed_time(end) * 1000.0 / self.calls}


class HostTimer:
    """Times calls as a program without graphs makes them, by the wall clock and the process's CPU time."""

    def __init__(self, call: TimedCall, context: Callable[[], AbstractContextManager[Any]], device: torch.device) -> None:
        """Warm up and choose how many calls make a sample: on a GPU up to 50 milliseconds, on a CPU at least five."""
        self._call, self._context, self._on_gpu = call, context, device.type == "cuda"
        self.calls = 1
        once = min(self.sample()["us"] for _ in range(6 if self._on_gpu else 2))
        if self._on_gpu:
            self.calls = max(5, min(EAGER_CALLS, round(50_000 / max(once, 1.0))))
        else:
            self.calls = max(1, min(MOST_CALLS, math.ceil(5000.0 / max(once, 1.0))))

    def _wait(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()

    def sample(self) -> dict[str, float]:
        """Return microseconds a call: ``us`` until the device is done, ``cpu_us``, the process's CPU time until the last call
        returned, and on a GPU ``issue_us``, the wall time until then."""
        with self._context():
            self._wait()
            cpu, begin = time.process_time(), time.perf_counter()
            for _ in range(self.calls):
                self._call()
            issued, cpu_issued = time.perf_counter(), time.process_time()
            self._wait()
            done = time.perf_counter()
        scale = 1e6 / self.calls
        found = {"us": (done - begin) * scale, "cpu_us": (cpu_issued - cpu) * scale}
        return found | ({"issue_us": (issued - begin) * scale} if self._on_gpu else {})


Timer = GraphTimer | HostTimer


def make_timer(
    call: TimedCall, mode: str, device: torch.device, context: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> Timer:
    """Return the timer for ``mode`` on ``device``; ``context`` is entered around all calls, outside the clock."""
    if device.type != "cuda" or mode == "eager":
        return HostTimer(call, context, device)
    with context():
        return GraphTimer(call)


def tidy(device: torch.device) -> None:
    """Give back what a method has left in memory."""
    gc.collect()
    if device.type == "cuda":
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError:  # a broken context breaks every later method, and each says so in its own row
            return
