"""Times one revision of QFlash for :mod:`qflash.bench.revisions`, which runs this file in a process a revision.

It imports whatever ``qflash`` comes first on the path, and of that only public names. Orders come as JSON, one a line, and
are answered so. Both revisions are timed by the same code on the same inputs; one works while the other waits.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import qflash

SAMPLE_US = 1000.0
"""What a sample should take at least."""
MOST_CALLS = 200
EAGER_CALLS = 50
"""Fewer than fill a GPU's launch queue, so that issuing never waits."""


def draw_inputs(order: dict[str, Any]) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """Draw query, key, value and bias on the CPU, the same in every process."""
    generator = torch.Generator().manual_seed(0)
    device, dtype = torch.device(order["device"]), getattr(torch, order["dtype"])
    batch, heads, queries, head_dim = order["shape"]
    keys, windows = order["keys"], order["windows"]

    def draw(*shape: int) -> torch.Tensor:
        if order["inputs"] == "normal":
            return torch.randn(shape, generator=generator)
        return torch.rand(shape, generator=generator) * 8 - 4

    tensors = [draw(batch, heads, tokens, head_dim).to(device, dtype) for tokens in (queries, keys, keys)]
    bias = None
    if order["bias"]:
        bias = qflash.align_bias(torch.randn((windows, heads, queries, keys), generator=generator).to(device, dtype))
    return tensors, bias


def make_call(order: dict[str, Any]) -> Callable[[], object]:
    """Return the call to time: int8 to int8 on tensors quantised beforehand, or float to float."""
    (query, key, value), bias = draw_inputs(order)
    options: dict[str, Any] = {"is_causal": order["causal"], "recipe": order["recipe"]}
    if order["mode"] != "kernel":
        return lambda: qflash.attention(query, key, value, bias, **options)
    tensors = qflash.quantize(query), qflash.quantize(key), qflash.quantize(value)
    fixed = None if bias is None else qflash.align_bias(qflash.quantize_bias(bias))
    calibration = qflash.int8_attention(*tensors, fixed, **options, out_dtype=torch.float32)
    assert isinstance(calibration, torch.Tensor)
    scale = (calibration.abs().amax() / 127).reshape(1, 1, 1, 1)
    return lambda: qflash.int8_attention(*tensors, fixed, **options, output_scale=scale)


class GraphSamples:
    """Device time of a call by replays of a CUDA graph of many."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.call = call
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                call()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self.capture(8)
        once = min(self.sample() for _ in range(3))
        self.capture(max(1, min(MOST_CALLS, round(SAMPLE_US / max(once, 0.1)))))

    def capture(self, calls: int) -> None:
        self.calls, self.graph = calls, torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for _ in range(calls):
                self.call()
        torch.cuda.synchronize()

    def sample(self) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.graph.replay()  # keeps the device busy while the next is enqueued
        begin.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1000.0 / self.calls


class EagerSamples:
    """Time until calls without a graph are issued; on a CPU until they are done."""

    def __init__(self, call: Callable[[], object], device: torch.device) -> None:
        self.call, self.on_gpu = call, device.type == "cuda"
        for _ in range(3):
            call()
        self.calls = 1
        once = min(self.sample() for _ in range(3))
        self.calls = max(1, min(EAGER_CALLS if self.on_gpu else MOST_CALLS, round(SAMPLE_US / max(once, 0.1))))

    def sample(self) -> float:
        if self.on_gpu:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(self.calls):
            self.call()
        return (time.perf_counter() - begin) * 1e6 / self.calls


def serve() -> None:
    """Answer orders until there are no more."""
    samples: GraphSamples | EagerSamples | None = None
    for line in sys.stdin:
        order = json.loads(line)
        answer: dict[str, Any]
        try:
            with torch.inference_mode():
                if order["do"] == "prepare":
                    samples = None  # gives its memory back first
                    device = torch.device(order["device"])
                    call = make_call(order)
                    graph = device.type == "cuda" and order["mode"] != "eager"
                    samples = GraphSamples(call) if graph else EagerSamples(call, device)
                    answer = {"calls": samples.calls}
                elif order["do"] == "sample":
                    assert samples is not None
                    answer = {"us": samples.sample()}
                else:
                    answer = {"version": getattr(qflash, "__version__", "?"), "package": qflash.__path__[0]}
        except Exception as error:  # the other process has to hear of anything
            answer = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve()
