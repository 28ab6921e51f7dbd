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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import qflash
from qflash_lab.bench import errors, records, timers


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


def ours(batch: Batch, device: torch.device, dtype: torch.dtype) -> timers.TimedCall:
    """Return our call, after a look at its bits."""
    call = functools.partial(qflash.varlen_attention, *draw(batch, device, dtype))
    if not torch.equal(call(), call(backend="reference")):
        raise AssertionError(f"{batch.name}: not the reference's bits")
    return call


def flash(batch: Batch, device: torch.device, dtype: torch.dtype) -> timers.TimedCall:
    """Return PyTorch's call of FlashAttention 2."""
    from torch.nn.attention.varlen import varlen_attn

    return functools.partial(varlen_attn, *draw(batch, device, dtype))


def methods_for(device: torch.device) -> dict[str, Callable[[Batch, torch.device, torch.dtype], timers.TimedCall]]:
    """Return what is timed on a device, by name."""
    return {"qflash": ours} if device.type == "cpu" else {"qflash": ours, "flash varlen": flash}


def measure(batch: Batch, device: torch.device, rounds: int) -> dict[str, Any]:
    """Return a batch's row: microseconds of every method in turns, of the device alone and of calls without a graph."""
    row: dict[str, Any] = dataclasses.asdict(batch) | {"us": {}, "eager_us": {}, "errors": {}}
    dtype = torch.float32 if device.type == "cpu" else torch.float16
    modes = ("kernel",) if device.type == "cpu" else ("kernel", "eager")
    running: dict[tuple[str, str], timers.Timer] = {}
    for name, prepare in methods_for(device).items():
        try:
            with errors.explained():
                call = prepare(batch, device, dtype)
                running |= {(mode, name): timers.make_timer(call, mode, device) for mode in modes}
        except Exception as error:
            row["errors"][name] = errors.describe(error)
    for (mode, name), found in timers.sample_by_turns(running, rounds).items():
        row["us" if mode == "kernel" else "eager_us"][name] = found["median_us"]
    del running
    timers.tidy(device)
    return row


def render(rows: Sequence[dict[str, Any]]) -> Table:
    """Return the rows as a table."""
    names = list(dict.fromkeys(name for row in rows for name in row["us"]))
    table = Table(title="packed sequences, µs", title_justify="left")
    for heading in ("batch", "tokens", "heads x channels", *names, *(f"{name}, eager" for name in names)):
        table.add_column(heading, no_wrap=True, justify="left" if heading == "batch" else "right")
    for row in rows:
        times = [f"{row[of][name]:.1f}" if name in row[of] else "" for of in ("us", "eager_us") for name in names]
        table.add_row(row["name"], str(sum(row["lengths"])), f"{row['heads']} x {row['head_dim']}", *times)
    return table


@torch.inference_mode()
def run(folder: Path, batches: Sequence[Batch], device: torch.device, rounds: int) -> list[dict[str, Any]]:
    """Measure, print the table, and write ``varlen.json`` after every batch."""
    folder.mkdir(parents=True, exist_ok=True)
    timed = "CUDA-graph replay, and eager calls until the device is done" if device.type == "cuda" else "calls on the CPU"
    record: dict[str, Any] = {
        "what": "attention of packed sequences, float16 in and out, quantisation within the clock",
        "environment": records.environment(device),
        "timing": f"{timed}, warm, methods in turns, median of {rounds} samples",
        "rows": [],
    }
    rows: list[dict[str, Any]] = record["rows"]
    for batch in track(batches, "Batches", console=Console(stderr=True)):
        rows.append(measure(batch, device, rounds))
        records.write_json(folder / "varlen.json", record)
    Console(width=160).print(render(rows))
    return rows


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
