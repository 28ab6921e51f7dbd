"""What the commands that measure share on the console."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from qflash.validation import resolve_device

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}

GPU_BATCHES, CPU_BATCHES = (1, 8, 64), (1, 8)


@contextmanager
def progress_bar(total: int) -> Iterator[Callable[[str], None]]:
    """Show a bar on standard error if it is a terminal; yields a function that names what is done and moves on by one."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description:40.40}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("starting", total=total)
        yield lambda done: progress.update(task, advance=1, description=done)


def table_console() -> Console:
    """Return standard output's console; a pipe has no width, and rich would fold a table into 80 columns."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(width=200, highlight=False)


def pick_device(name: str | None) -> torch.device:
    """Return the device called ``name``, or the GPU if there is one, or the CPU.

    Raises:
        ValueError: no device's name, a CUDA device that is not there, or a device that is neither CUDA nor CPU.
    """
    device = resolve_device(name)
    if device.type not in ("cuda", "cpu"):
        raise ValueError(f"device must be cuda or cpu, got {name!r}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def pick_dtype(name: str | None, device: torch.device) -> torch.dtype:
    """Return the dtype called ``name``, or float16 on a GPU and float32 on the CPU.

    Raises:
        ValueError: unknown name.
    """
    if name is None:
        return torch.float16 if device.type == "cuda" else torch.float32
    if name not in DTYPES:
        raise ValueError(f"dtype must be one of {tuple(DTYPES)}, got {name!r}")
    return DTYPES[name]
