"""Latency on a GPU: QFlash against PyTorch's fused FP16 attention, in one run, each row with its accuracy.

Every figure is the median over CUDA-graph replays of 20 calls, warm, on the paper's inputs (uniform in [-4, 4), fp16).
``int8`` is int8 in, int8 out on tensors quantised before the clock starts (one scale a tensor, the paper's setting);
``fp16`` quantises inside. Usage: ``python benchmarks/latency.py benchmarks/results/latency_h200.json``
"""

from __future__ import annotations

import datetime
import json
import pathlib
import statistics
import sys
from collections.abc import Callable

import torch
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

import qflash
from qflash.metrics import sqnr
from qflash.workloads import WORKLOADS

CALLS, REPLAYS = 20, 15
LONG = ((4, 32, 1024, 64), (4, 32, 4096, 64), (2, 32, 16384, 64), (4, 16, 1024, 128), (4, 16, 4096, 128), (2, 16, 16384, 128))


def graph_time(call: Callable[[], object], calls: int) -> tuple[float, float]:
    """Return the median time of one call in microseconds and the spread (max - min) over the median."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / calls)
    median = statistics.median(times)
    return median, (max(times) - min(times)) / median


def measure(name: str, shape: tuple[int, int, int, int]) -> dict[str, object]:
    """Time every method on one shape (batch, heads, tokens, head_dim)."""
    generator = torch.Generator("cuda").manual_seed(0)
    query, key, value = ((torch.rand(shape, generator=generator, device="cuda") * 8 - 4).to(torch.float16) for _ in range(3))
    tensors = [qflash.quantize(x) for x in (query, key, value)]
    part = slice(0, min(shape[0], 8)), slice(0, 2)
    wanted = sdpa(*(x[part].double() for x in (query, key, value)))
    fitted = (wanted.abs().max() / 127).float()

    def with_backend(backend: SDPBackend) -> torch.Tensor:
        with sdpa_kernel(backend):
            return sdpa(query, key, value)

    methods: dict[str, Callable[[], object]] = {
        "fa2": lambda: with_backend(SDPBackend.FLASH_ATTENTION),
        "cudnn": lambda: with_backend(SDPBackend.CUDNN_ATTENTION),
        "int8": lambda: qflash.int8_attention(*tensors, output_scale=fitted),
        "fp16": lambda: qflash.attention(query, key, value),
    }
    row: dict[str, object] = {"name": name, "shape": shape}
    calls = CALLS if shape[2] <= 1024 else 3
    for method, call in methods.items():
        got = call()
        got = got.dequantize() if isinstance(got, qflash.QuantizedTensor) else got
        time, spread = graph_time(call, calls)
        row[method] = {"us": round(time, 2), "spread": round(spread, 3), "sqnr_db": round(sqnr(wanted, got[part]), 2)}
    best = min(row["fa2"]["us"], row["cudnn"]["us"])  # type: ignore[index]
    tops = 4e-6 * shape[0] * shape[1] * shape[2] ** 2 * shape[3]
    for method in ("int8", "fp16"):
        row[method]["ratio_to_best_fp16"] = round(best / row[method]["us"], 2)  # type: ignore[index]
        row[method]["tops"] = round(tops / row[method]["us"], 1)  # type: ignore[index]
    figures = "  ".join(f"{method} {row[method]['us']:8.2f}" for method in methods)  # type: ignore[index]
    print(f"{name:>16}  {figures}  us", flush=True)
    return row


def main(output: pathlib.Path) -> None:
    """Measure all shapes and write ``output``."""
    rows = [measure(f"{w.name} b{batch}", w.shape(batch)) for batch in (1, 8, 64) for w in WORKLOADS]
    rows += [measure("x".join(map(str, shape)), shape) for shape in LONG]
    record = {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "method": f"CUDA-graph replay of {CALLS} calls (3 above 1024 tokens), median of {REPLAYS}",
        "rows": rows,
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
