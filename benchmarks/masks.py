"""What the search for hidden tokens costs: ``python benchmarks/masks.py [OUT.json]``.

Attention with masks that have a row for each query, which are searched for tokens that no row shows. In microseconds, on a GPU
the time of a call in a CUDA graph and of an eager one, on a CPU the processor time of a call, each the least of several rounds.
With another checkout's ``src`` in PYTHONPATH the same script measures that one. "none" is attention without a mask.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

import qflash
from qflash_lab.bench import records

ROUNDS = 9
SHAPES = {
    # batch, heads, tokens, head dimension, masks' batch elements
    "swin": (1024, 3, 49, 32, 64),
    "swin, one image": (64, 3, 49, 32, 64),
    "vit": (32, 12, 197, 64, 32),
    "long": (2, 16, 2048, 64, 2),
}
ON_CPU = {name: (max(1, batch // 32), *rest[:-1], max(1, batch // 32)) for name, (batch, *rest) in SHAPES.items()}


def masks(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yield masks: one for all, for each batch element or head; bool or float; that hide no key or a quarter of them."""
    _, heads, tokens, _, period = shape
    yield "none", None
    for name, lead in (("1, 1", (1, 1)), ("b, 1", (period, 1)), ("b, h", (period, heads))):
        shown = torch.rand(*lead, tokens, tokens, device=device) < 0.7
        shown |= torch.eye(tokens, dtype=torch.bool, device=device)
        hiding = shown.clone()
        hiding[..., 3 * tokens // 4 :] = False
        for about, mask in (("nothing", shown), ("a quarter", hiding)):
            yield f"({name}, n, n) bool, hides {about}", mask
            yield f"({name}, n, n) float, hides {about}", torch.where(mask, 0.5, -torch.inf).to(dtype)


def on_gpu(call: Callable[[], torch.Tensor]) -> dict[str, float]:
    """Return microseconds of a replay of a graph, and of an eager call."""
    for _ in range(3):
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            call()
    best = {}
    for name, run, count in (("graph", graph.replay, 10), ("eager", call, 1)):
        times = []
        for _ in range(ROUNDS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            begin.record()
            for _ in range(20):
                run()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) * 1000 / 20 / count)
        best[name] = round(min(times), 2)
    return best


def on_cpu(call: Callable[[], torch.Tensor]) -> dict[str, float]:
    """Return microseconds of processor time of a call."""
    call()
    times = []
    for _ in range(ROUNDS):
        begin = time.process_time()
        call()
        times.append(time.process_time() - begin)
    return {"processor": round(min(times) * 1e6, 1)}


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Attend as :func:`qflash.attention` does."""
    return qflash.attention(query, key, value, mask)


def main() -> None:
    """Measure all shapes and masks, print them, and write them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("output", nargs="?", type=Path, help="JSON file")
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shapes, dtype = (SHAPES, torch.float16) if device.type == "cuda" else (ON_CPU, torch.float32)
    rows = []
    for name, shape in shapes.items():
        batch, heads, tokens, head_dim, period = shape
        sizes = batch // period, period, heads, tokens, head_dim
        query, key, value = (torch.randn(sizes, device=device, dtype=dtype) for _ in range(3))
        for about, mask in masks(shape, device, dtype):
            found = (on_gpu if device.type == "cuda" else on_cpu)(functools.partial(attention, query, key, value, mask))
            rows.append({"shape": name, "sizes": shape, "mask": about, **found})
            print(f"{name:16} {about:36} {found}", flush=True)
    if given.output is not None:
        records.write_json(given.output, {"rows": rows, "device": str(device), "torch": torch.__version__})


if __name__ == "__main__":
    with torch.inference_mode():
        main()
