"""Time attention of packed sequences of several lengths beside FlashAttention 2, float16 in and out.

    python benchmarks/varlen.py FOLDER

The batches are those of vision models that take images of any size or attend in windows. Ours quantises within the clock. It is
compared with the reference's bits before it is timed. Where there is no GPU, ours alone is timed, on small batches.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import track

import qflash
from qflash_lab.bench import report, runner, tables, timers
from qflash_lab.bench import schema as col


@dataclasses.dataclass(frozen=True)
class Batch:
    """Packed sequences: their lengths, and heads of so many channels."""

    name: str
    lengths: tuple[int, ...]
    heads: int
    head_dim: int


def image_sizes(images: int, least: int, most: int) -> tuple[int, ...]:
    """Return the patches of images, each side between ``least`` and ``most`` patches, drawn evenly from a fixed seed."""
    chance = random.Random(0)
    return tuple(chance.randint(least, most) * chance.randint(least, most) for _ in range(images))


BATCHES = (
    Batch("64 images, ViT-B/14, sides 112 to 378", image_sizes(64, 8, 27), 12, 64),
    Batch("64 images, ViT-B/16, sides 128 to 256", image_sizes(64, 8, 16), 12, 64),
    Batch("64 images, SO400M/16, sides 128 to 384", image_sizes(64, 8, 24), 16, 72),
    Batch("64 equal images, ViT-B/16, 384 pixels", (576,) * 64, 12, 64),
    Batch("8 images, ViT-B/14, sides 280 to 896", image_sizes(8, 20, 64), 12, 64),
    Batch("8 images, ViT-H/14, sides 280 to 896", image_sizes(8, 20, 64), 16, 80),
    Batch("256 windows of 64 patches, ViT-H/14", (64,) * 256, 16, 80),
)


def draw(batch: Batch, device: torch.device, dtype: torch.dtype) -> tuple[Any, ...]:
    """Return the arguments that all methods take: query, key, value, cumulative lengths twice, the longest twice."""
    generator = torch.Generator().manual_seed(0)
    # views of one projection, as models have them
    size = (sum(batch.lengths), 3, batch.heads, batch.head_dim)
    tensors = torch.randn(size, generator=generator).to(dtype).to(device).unbind(1)
    cumulative = torch.tensor([0, *batch.lengths]).cumsum(0).to(torch.int32).to(device)
    return *tensors, cumulative, cumulative, max(batch.lengths), max(batch.lengths)


class Problem(NamedTuple):
    """A batch, and where and in what dtype it is attended to."""

    batch: Batch
    device: torch.device
    dtype: torch.dtype


def ours(problem: Problem) -> timers.TimedCall:
    """Return our call, after a look at its bits."""
    call = functools.partial(qflash.varlen_attention, *draw(*problem))
    if not torch.equal(call(), call(backend="reference")):
        raise AssertionError(f"{problem.batch.name}: not the reference's bits")
    return call


def flash(problem: Problem) -> timers.TimedCall:
    """Return PyTorch's call of FlashAttention 2."""
    from torch.nn.attention.varlen import varlen_attn

    return functools.partial(varlen_attn, *draw(*problem))


METHODS = (
    runner.TimedMethod(col.QFLASH, "kernel", ours, is_ours=True),
    runner.TimedMethod(col.FLASH_VARLEN, "kernel", flash, devices=("cuda",)),
)
FIELDS = col.pick(
    col.WORKLOAD, col.LENGTHS, col.HEADS, col.HEAD_DIM, col.DTYPE, col.MODE, col.METHOD, *col.TIMES, col.ISSUE_US, col.CPU_US,
    col.ERROR,
)  # fmt: skip


def measure(batch: Batch, device: torch.device, rounds: int) -> list[col.Row]:
    """Return a batch's rows: every method in alternation, the device alone and calls without a graph."""
    problem = Problem(batch, device, torch.float32 if device.type == "cpu" else torch.float16)
    known = {
        col.WORKLOAD: batch.name, col.LENGTHS: " ".join(map(str, batch.lengths)), col.HEADS: batch.heads,
        col.HEAD_DIM: batch.head_dim, col.DTYPE: str(problem.dtype).removeprefix("torch."),
    }  # fmt: skip
    modes = ("kernel",) if device.type == "cpu" else ("kernel", "eager")
    runs = []
    for method in runner.choose(METHODS, device):
        once = functools.cache(functools.partial(runner.unjudged, method, problem))
        for mode in modes:
            runs.append(runner.Run(col.empty(FIELDS) | known | {col.MODE: mode, col.METHOD: method.name}, once, mode))
    return runner.measure(runs, device, rounds)


TABLE = (
    tables.names("batch", col.WORKLOAD), tables.names("heads", col.HEADS), tables.names("channels", col.HEAD_DIM),
    tables.names("mode", col.MODE), tables.names("method", col.METHOD), tables.Column("µs", col.MEDIAN_US),
    tables.Column("quartiles", tables.quartiles),
)  # fmt: skip


@torch.inference_mode()
def run(folder: Path, batches: Sequence[Batch], device: torch.device, rounds: int) -> list[col.Row]:
    """Measure, print the table, and write ``varlen.json`` and ``.csv`` after every batch."""
    timed = "CUDA-graph replay, and eager calls until the device is done" if device.type == "cuda" else "calls on the CPU"
    done = report.Report(
        "varlen", "attention of packed sequences, float16 in and out, quantisation within the clock", device, FIELDS, folder,
        timing=f"{timed}, warm, methods in alternation, median of {rounds} samples",
    )  # fmt: skip
    for batch in track(batches, "Batches", console=Console(stderr=True)):
        done.add(measure(batch, device, rounds))
    done.finish(tables.render(done.rows, TABLE, "packed sequences", groups=3))
    return done.rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path, metavar="FOLDER", help="where varlen.json goes")
    parser.add_argument("--rounds", type=int, default=9, help="samples a method")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {arguments.rounds}")
    on_gpu = torch.cuda.is_available()
    chosen = BATCHES if on_gpu else (Batch("4 images", image_sizes(4, 4, 14), 3, 64),)
    run(arguments.output, chosen, torch.device("cuda" if on_gpu else "cpu"), arguments.rounds)
