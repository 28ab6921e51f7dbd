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


def tosa(graph: Any, name: str, u: Any) -> Any:
    """Return an activation of int32 in a :class:`.tosa_graph.Graph`, int32."""
    positive = graph.minimum(graph.maximum(u, 0), op.ACTIVATION_LIMIT)
    if name not in _TOSA_TAILS:
        return positive
    rest = graph.maximum(graph.subtract(op.TAIL_END, graph.absolute(u)), 0)
    return graph.subtract(positive, _TOSA_TAILS[name](graph, rest))


def _gelu_tail(graph: Any, rest: Any) -> Any:
    g, c, e, d = op.GELU_CONSTANTS
    square = graph.multiply(rest, rest, 9)
    first = graph.multiply(square, graph.subtract(g, graph.multiply(rest, c)), 15)
    second = graph.add(graph.shift_left(first, 2), graph.subtract(e, graph.multiply(rest, d)))
    return graph.multiply(first, second, 20)


def _silu_tail(graph: Any, rest: Any) -> Any:
    g, c, e, f = op.SILU_CONSTANTS
    line, square = graph.multiply(rest, c), graph.multiply(rest, rest, 9)
    first = graph.multiply(square, graph.add(graph.subtract(g, line), graph.add(square, square)), 15)
    return graph.multiply(first, graph.subtract(graph.add(line, e), graph.multiply(square, f)), 22)


_TOSA_TAILS = {"gelu": _gelu_tail, "silu": _silu_tail}
