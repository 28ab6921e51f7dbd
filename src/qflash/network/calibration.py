"""What a float network's activations span on calibration images: :func:`observe`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from ..scalars import unboxed
from ..validation import is_number
from .conversion import Range

METHODS = ("minmax", "percentile", "mse")
_ROWS = 4096
"""Rows of a tensor that are kept for percentiles and errors."""


def check_method(method: object, percentile: float) -> float:
    """Require one of :data:`METHODS`, and a percentile that makes sense; return that as a float.

    Raises:
        TypeError: the percentile is no number.
        ValueError: something else; the message names it.
    """
    if method not in METHODS:
        raise ValueError(f"method must be one of {METHODS}, got {method!r}")
    number = unboxed(percentile)
    if not is_number(number):
        raise TypeError(f"percentile must be a number, got {type(number).__name__}")
    if not 50 < number <= 100:
        raise ValueError(f"percentile must be above 50 and at most 100, got {number}")
    return float(number)


class Observer:
    """Ranges of the channels (last dimension) of a tensor over batches.

    Attributes:
        low, high: float64 (channels,), of every element that was seen.
        rows: some of the rows, float32 (rows, channels); only where a method needs them.
    """

    def __init__(self, keep: bool) -> None:
        self.keep, self.count = keep, 0
        self.low: torch.Tensor | None = None
        self.high: torch.Tensor | None = None
        self.total: torch.Tensor | None = None
        self.rows: list[torch.Tensor] = []

    def add(self, x: torch.Tensor) -> None:
        """Look at a tensor (..., channels).

        Raises:
            ValueError: it holds a NaN or an infinity.
        """
        flat = x.detach().reshape(-1, x.shape[-1])
        low, high = torch.aminmax(flat, dim=0)
        low, high = low.double().cpu(), high.double().cpu()
        if not (low.isfinite().all() and high.isfinite().all()):
            raise ValueError("NaN or infinity in an activation of the float network on the calibration images")
        total = flat.sum(dim=0, dtype=torch.float64).cpu()
        self.low = low if self.low is None else torch.minimum(self.low, low)
        self.high = high if self.high is None else torch.maximum(self.high, high)
        self.total = total if self.total is None else self.total + total
        self.count += flat.shape[0]
        if self.keep:
            step = max(1, flat.shape[0] * 8 // _ROWS)
            self.rows.append(flat[::step].float().cpu())

    def range(self, method: str, percentile: float) -> Range:
        """Return the channels' ranges by a method of :data:`METHODS`."""
        assert self.low is not None and self.high is not None and self.total is not None
        low, high, mean = self.low, self.high, self.total / self.count
        if method == "percentile":
            rows = torch.cat(self.rows).double()
            ends = torch.tensor([1 - percentile / 100, percentile / 100], dtype=torch.float64, device="cpu")
            inner_low, inner_high = torch.quantile(rows, ends, dim=0)
            low, high = torch.maximum(low, inner_low), torch.minimum(high, inner_high)
        elif method == "mse":
            low, high = _least_error(torch.cat(self.rows).double(), low, high)
        return Range(low, high, mean.clamp(low, high))


def _least_error(rows: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Shrink ranges about their middles by the one factor that makes the squared error of 8 bits least."""
    middle, half = (low + high) / 2, ((high - low) / 2).clamp(min=1e-12)
    best, chosen = math.inf, 1.0
    for factor in (x / 20 for x in range(20, 5, -1)):
        step = half * factor / 127
        values = ((rows - middle) / step).round().clamp(-128, 127)
        error = float((((values * step + middle - rows) / half) ** 2).sum())
        if error < best:
            best, chosen = error, factor
    return middle - half * chosen, middle + half * chosen


@contextmanager
def observing(model: nn.Module, inputs: Sequence[str], outputs: Sequence[str], keep: bool) -> Iterator[dict[str, Observer]]:
    """Look at the inputs and outputs of submodules while the model runs.

    Args:
        model: float.
        inputs, outputs: names of submodules.
        keep: whether rows are kept.

    Yields:
        observers by ``"name:in"`` and ``"name:out"``.
    """
    observers: dict[str, Observer] = {}
    with ExitStack() as stack:
        for name in inputs:
            observer = observers[f"{name}:in"] = Observer(keep)

            def before(_: nn.Module, arguments: tuple[Any, ...], observer: Observer = observer) -> None:
                observer.add(arguments[0])

            stack.callback(model.get_submodule(name).register_forward_pre_hook(before).remove)
        for name in outputs:
            observer = observers[f"{name}:out"] = Observer(keep)

            def after(_: nn.Module, __: Any, result: torch.Tensor, observer: Observer = observer) -> None:
                observer.add(result)

            stack.callback(model.get_submodule(name).register_forward_hook(after).remove)
        yield observers


@contextmanager
def progress_bar(shown: bool, unit: str) -> Iterator[Callable[[int], None]]:
    """Show how many images or batches have been seen; yields what is told of each batch."""
    if not shown:
        yield lambda count: None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("calibrating"), BarColumn(), TextColumn(f"{{task.completed}} {unit}"), TimeElapsedColumn()
    with Progress(*columns, transient=True) as progress:
        task = progress.add_task("", total=None)
        yield lambda count: progress.advance(task, count)
