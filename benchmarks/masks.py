"""Time the search for hidden tokens: attention with masks that have a row for each query, and without a mask.

    python benchmarks/masks.py FOLDER

On a GPU calls are timed in a CUDA graph and eager, float16 in and out, on a CPU in float32 on fewer images. With another
checkout's ``src`` in PYTHONPATH the same script measures that one.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track

import qflash
from qflash_lab.bench import report, runner, tables
from qflash_lab.bench import schema as col

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


FIELDS = col.pick(
    col.WORKLOAD, col.SHAPE, col.MASK, col.DTYPE, col.MODE, col.METHOD, *col.TIMES, col.ISSUE_US, col.CPU_US, col.ERROR
)
TABLE = (
    tables.names("shape", col.WORKLOAD), tables.names("mask", col.MASK), tables.names("mode", col.MODE),
    tables.Column("µs", col.MEDIAN_US), tables.Column("quartiles", tables.quartiles),
)  # fmt: skip


def measure(name: str, shape: tuple[int, ...], device: torch.device, rounds: int) -> list[col.Row]:
    """Return a shape's rows: attention without a mask and with each one, in alternation."""
    batch, heads, tokens, head_dim, period = shape
    dtype, modes = (torch.float16, ("kernel", "eager")) if device.type == "cuda" else (torch.float32, ("kernel",))
    sizes = batch // period, period, heads, tokens, head_dim
    query, key, value = (torch.randn(sizes, device=device, dtype=dtype) for _ in range(3))
    known = {
        col.WORKLOAD: name, col.SHAPE: "x".join(map(str, shape[:4])), col.DTYPE: str(dtype).removeprefix("torch."),
        col.METHOD: col.QFLASH,
    }  # fmt: skip
    runs = []
    for about, mask in masks(shape, device, dtype):
        call = functools.partial(qflash.attention, query, key, value, mask)
        for mode in modes:
            row = col.empty(FIELDS) | known | {col.MASK: about, col.MODE: mode}
            runs.append(runner.Run(row, lambda call=call: (call, {}), mode))  # type: ignore[misc]
    return runner.measure(runs, device, rounds)


@torch.inference_mode()
def run(folder: Path, shapes: Mapping[str, tuple[int, ...]], device: torch.device, rounds: int) -> list[col.Row]:
    """Measure, print the table, and write ``masks.json`` and ``.csv`` after every shape."""
    timed = "CUDA-graph replay, and eager calls until the device is done" if device.type == "cuda" else "calls on the CPU"
    done = report.Report(
        "masks", "attention with masks that have a row for each query", device, FIELDS, folder,
        timing=f"{timed}, warm, masks in alternation, median of {rounds} samples",
    )  # fmt: skip
    for name, shape in track(shapes.items(), "Shapes", console=Console(stderr=True)):
        done.add(measure(name, shape, device, rounds))
    done.finish(tables.render(done.rows, TABLE, "masks with a row for each query"))
    return done.rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path, metavar="FOLDER", help="where masks.json goes")
    parser.add_argument("--rounds", type=int, default=9, help="samples a mask")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {arguments.rounds}")
    on_gpu = torch.cuda.is_available()
    chosen = SHAPES if on_gpu else ON_CPU
    run(arguments.output, chosen, torch.device("cuda" if on_gpu else "cpu"), arguments.rounds)
