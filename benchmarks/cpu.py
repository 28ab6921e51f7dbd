"""Measure the CPU table of docs/performance/tables.md: SDPA in float32, the compiled CPU kernels and the reference, in one run.

    OMP_NUM_THREADS=2 python benchmarks/cpu.py benchmarks/results/cpu.json

Times are milliseconds of eager calls, lowest and median, each method in turn in every round so that other load on
the machine meets all of them. `int8` starts from tensors quantised before the clock starts, as on the GPU.
"""

from __future__ import annotations

import argparse
import datetime
import json
import pathlib
import platform
import statistics
import subprocess
import time
from collections.abc import Callable

import torch

import qflash
from qflash import backends
from qflash.kernels.cpu.launch import _compiler
from qflash_lab.bench import records
from qflash_lab.bench.metrics import sqnr
from qflash_lab.bench.workloads import get_workload

SHAPES = {
    **{f"A{n} b{batch}": get_workload(f"A{n}").shape(batch) for batch in (1, 8) for n in (1, 2, 3, 4, 5, 6, 7)},
    "2x8x1024x64": (2, 8, 1024, 64),
    "1x8x4096x64": (1, 8, 4096, 64),
    "1x4x4096x128": (1, 4, 4096, 128),
}
ROUNDS, SECONDS = 9, 0.1


def once(run: Callable[[], object], count: int) -> float:
    """Return the milliseconds of one of ``count`` calls in a row."""
    start = time.perf_counter()
    for _ in range(count):
        run()
    return (time.perf_counter() - start) / count * 1e3


@torch.inference_mode()
def measure(shape: tuple[int, int, int, int]) -> dict[str, object]:
    """Time all methods on inputs uniform in [-4, 4), float32."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.rand(shape, generator=generator) * 8 - 4 for _ in range(3))
    exact = torch.nn.functional.scaled_dot_product_attention(query.double(), key.double(), value.double())
    q, k, v = (qflash.quantize(x) for x in (query, key, value))
    scale = float(qflash.int8_attention(q, k, v, out_dtype=torch.float32).abs().max()) / 127
    methods: dict[str, Callable[[], torch.Tensor]] = {
        "sdpa float32": lambda: torch.nn.functional.scaled_dot_product_attention(query, key, value),
        "cpu int8": lambda: qflash.int8_attention(q, k, v, output_scale=scale, backend="cpu").dequantize(),
        "cpu float32": lambda: qflash.attention(query, key, value, backend="cpu"),
        "reference float32": lambda: qflash.attention(query, key, value, backend="reference"),
    }
    quality = {name: round(sqnr(exact, run()), 2) for name, run in methods.items() if "sdpa" not in name}
    methods["cpu int8"] = lambda: qflash.int8_attention(q, k, v, output_scale=scale, backend="cpu").values
    counts = {}
    for name, run in methods.items():
        run()
        counts[name] = max(1, int(SECONDS * 1e3 / once(run, 1)))
    slow = "reference float32"
    times: dict[str, list[float]] = {name: [] for name in methods}
    for number in range(ROUNDS):
        for name, run in methods.items():
            if name != slow or number < 3:
                times[name].append(once(run, counts[name]))
    result: dict[str, object] = {"shape": shape, "sqnr_db": quality}
    for name, got in times.items():
        result[name] = {"lowest_ms": round(min(got), 4), "median_ms": round(statistics.median(got), 4), "rounds": len(got)}
    return result


def main() -> None:
    """Measure every shape, write the JSON, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=pathlib.Path, metavar="OUT.json", help="where the results go")
    output = parser.parse_args().output
    if reason := backends.cpu_missing():
        raise SystemExit(f"the compiled CPU kernels are not available: {reason}")
    version = subprocess.run([*_compiler(), "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0]
    conditions = {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        **records.cpu(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "compiler": version,
        "inputs": "uniform in [-4, 4), float32",
    }
    results = {}
    print("| shape | SDPA ms | int8 ms | ratio | SQNR dB | float32 ms | ratio | SQNR dB | reference ms |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, shape in SHAPES.items():
        row = results[name] = measure(shape)
        sdpa, int8, floats, slow = (
            row[method]["lowest_ms"]  # type: ignore[index]
            for method in ("sdpa float32", "cpu int8", "cpu float32", "reference float32")
        )
        quality = row["sqnr_db"]
        print(
            f"| {name} | {sdpa:.3g} | {int8:.3g} | {sdpa / int8:.2f} | {quality['cpu int8']} | {floats:.3g} | "  # type: ignore[index]
            f"{sdpa / floats:.2f} | {quality['cpu float32']} | {slow:.3g} |",  # type: ignore[index]
            flush=True,
        )
    text = json.dumps({"conditions": conditions, "results": results}, indent=1)
    output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
