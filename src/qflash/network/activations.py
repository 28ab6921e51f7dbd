"""Activations of integer networks outside of kernels: what they are called, in floating point, in ONNX and in TOSA.

Their integers are functions of :data:`qflash.specification.layers.ACTIVATIONS`, whose names are used here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from ..specification import layers as op

NAMES = {"gelu": "GELU", "silu": "SiLU", "relu": "ReLU"}
"""As people write them."""
_FLOATS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"gelu": F.gelu, "silu": F.silu, "relu": F.relu}


def floating(name: str, slope: float, x: torch.Tensor) -> torch.Tensor:
    """Return ``f(slope x) / slope`` in floating point."""
    return _FLOATS[name](x * slope) / slope


def floating_onnx(graph: Any, name: str, slope: float, x: Any) -> Any:
    """Return :func:`floating` in an :class:`.onnx_graph.Graph`."""

    def constant(number: float, what: str) -> Any:
        return graph.constant(np.float32(number), np.float32, what)

    if name == "relu":
        return graph.node("Relu", x)
    if name == "silu":
        return graph.node("Mul", x, graph.node("Sigmoid", graph.node("Mul", x, constant(slope, "slope"))))
    half = graph.node("Mul", x, constant(0.5, "half"))
    error = graph.node("Erf", graph.node("Mul", x, constant(math.sqrt(0.5), "root")))
    return graph.node("Mul", half, graph.node("Add", error, constant(1.0, "one")))


def onnx(graph: Any, name: str, u: Any) -> Any:
    """Return an activation of int32 in an :class:`.onnx_graph.Graph`, int32; its tail is a table."""
    positive = graph.clip(u, 0, op.ACTIVATION_LIMIT)
    table = -op.ACTIVATIONS[name][0](-torch.arange(op.TAIL_END + 1, dtype=torch.int64, device="cpu"))
    if not table.any():
        return positive
    tail = graph.gather(graph.constant(table, np.int32, f"{name}_tail"), graph.minimum(graph.node("Abs", u), op.TAIL_END))
    return graph.subtract(positive, tail)


def tosa(graph: Any, name: str, u: Any, narrow: Any = None) -> Any:
    """Return an activation of int32 in a :class:`.tosa_graph.Graph`, int32.

    Args:
        graph: to add to.
        name: of :data:`NAMES`.
        u: int32.
        narrow: u saturated to int16, if tables of EXT-INT16 may be used; see :func:`has_tables`.
    """
    positive = graph.minimum(graph.maximum(u, 0), op.ACTIVATION_LIMIT)
    if name not in _TOSA_TAILS:
        return positive
    if narrow is None:
        rest = graph.maximum(graph.subtract(op.TAIL_END, graph.absolute(u)), 0)
    else:
        rest = graph.table(narrow, line_of_rest(0, 1, 0))
    return graph.subtract(positive, _TOSA_TAILS[name](graph, rest, narrow))


def has_tables(name: str) -> bool:
    """Tell whether an activation has operators less with tables of EXT-INT16."""
    return name in _TOSA_TAILS


def line_of_rest(start: int, slope: int, bits: int) -> np.ndarray:
    """Return a table of :meth:`.tosa_graph.Graph.table`: ``(start + slope * rest) << bits`` of u, ``rest = max(end - |u|, 0)``.

    It is exact, since the line bends at multiples of 128 only.

    Raises:
        ValueError: ``bits`` are too few for entries that are whole.
    """
    rest = (op.TAIL_END - np.abs(128 * np.arange(-256, 257))).clip(min=0)
    wide = (start + slope * rest) << bits
    if (wide % 128).any():
        raise ValueError(f"a line from {start} with slope {slope} needs more than {bits} bits in a table")
    return wide // 128


def _gelu_tail(graph: Any, rest: Any, narrow: Any) -> Any:
    g, c, e, d = op.GELU_CONSTANTS
    square = graph.multiply(rest, rest, 9)
    if narrow is not None:
        # with the least bits that make entries whole, which shifts take off
        first = graph.multiply(square, graph.table(narrow, line_of_rest(g, -c, 6)), 15 + 6)
        second = graph.add(graph.shift_left(first, 2 + 5), graph.table(narrow, line_of_rest(e, -d, 5)))
        return graph.multiply(first, second, 20 + 5)
    first = graph.multiply(square, graph.subtract(g, graph.multiply(rest, c)), 15)
    second = graph.add(graph.shift_left(first, 2), graph.subtract(e, graph.multiply(rest, d)))
    return graph.multiply(first, second, 20)


def _silu_tail(graph: Any, rest: Any, narrow: Any) -> Any:
    g, c, e, f = op.SILU_CONSTANTS
    line, square = graph.multiply(rest, c), graph.multiply(rest, rest, 9)
    first = graph.multiply(square, graph.add(graph.subtract(g, line), graph.add(square, square)), 15)
    return graph.multiply(first, graph.subtract(graph.add(line, e), graph.multiply(square, f)), 22)


_TOSA_TAILS = {"gelu": _gelu_tail, "silu": _silu_tail}
