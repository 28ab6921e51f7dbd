"""How sums become numbers of another unit and type, as nodes of :class:`.onnx_graph.Graph`."""

from __future__ import annotations

import numpy as np
import torch

from ..specification import layers as op
from .onnx_graph import ZERO_POINT, Graph, Value


def saturated(graph: Graph, x: Value, dtype: torch.dtype) -> Value:
    """Return :func:`.layers.saturate` of x, to which :func:`after_of` has been added."""
    if dtype == torch.int8:
        return graph.cast(graph.clip(x, 0, 255), np.uint8)
    return graph.cast(x if dtype == torch.int32 else graph.clip(x, *op.LIMITS[dtype]), np.int32)


def after_of(dtype: torch.dtype) -> int:
    """Return what is added to numbers of a type: the zero point of int8."""
    return ZERO_POINT if dtype == torch.int8 else 0


def rescale(
    graph: Graph, sums: Value, bound: np.ndarray, left: int, bias: torch.Tensor, multiplier: torch.Tensor, after: int = 0,
    limits: tuple[int, int] | None = None,
) -> Value:  # fmt: skip
    """Return :func:`.layers.rescale` of int32 sums, plus ``after``.

    Shift, bias and rounding go into the product: ``((acc << left) + b) R + half`` is ``acc (R << left) + (b R + half)``.

    Args:
        graph: to add to.
        sums: int32 (..., channels).
        bound: of their magnitude, (channels,).
        left, bias, multiplier: see :func:`.layers.rescale`.
        after: added to the result.
        limits: see :meth:`.onnx_graph.Graph.affine`.
    """
    factor = multiplier.detach().cpu().numpy().astype(np.int64)
    offset = factor * bias.detach().cpu().numpy().astype(np.int64) + (1 << 31)
    return graph.affine(sums, bound, factor << left, offset, 32, after, limits)
