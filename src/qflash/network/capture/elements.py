"""Sums, products and activations, element by element."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from ...specification.layers import ACTIVATIONS
from .attention import Scores
from .curves import Curve, applied, combined
from .moves import Stacked
from .norms import RowSize, Squares, is_number, mean, normalised, power, row_sum, scaled_norm
from .operations import RefusedError, View, wide
from .products import add_layer, sum_of_linear, with_bias
from .tracer import Handler, Sigmoid, Tracer, aten, is_computed


def _of_curves(trace: Tracer, a: Any, b: Any, function: Callable[..., torch.Tensor], what: str) -> View | Curve | None:
    """Return a sum or a product of two, of which one is a curve; None where none is."""
    for x, other in ((a, b), (b, a)):
        if isinstance(x, Curve) and not is_computed(other) and wide(other).numel() == 1:
            return applied(trace, x, functools.partial(function, other=float(wide(other))), what)
    if isinstance(a, Curve) or isinstance(b, Curve):
        if (curve := combined(trace, a, b, function)) is not None:
            return curve
        trace.refuse_steps(a, b)
    return None


def add(trace: Tracer, a: Any, b: Any, *, alpha: Any = 1) -> Any:
    if not is_computed(a):
        a, b = b, a
        if alpha != 1:
            raise RefusedError("add with alpha")
    if isinstance(a, RowSize) and is_computed(b):
        raise RefusedError("sum of norms of rows")
    if alpha == 1 or not is_computed(b):
        curve = _of_curves(trace, a, b if is_computed(b) else wide(b) * alpha, torch.add, "sum")
        if curve is not None:
            return curve
    if not is_computed(b):
        if not isinstance(a, (View, Scores, RowSize)):
            raise RefusedError("sum of squares or stacked tensors and a constant")
        if isinstance(a, View) and alpha == 1 and isinstance(b, torch.Tensor) and (layer := with_bias(trace, a, b)) is not None:
            return layer
        return a.plus(wide(b) * alpha)
    if isinstance(a, Scores) or isinstance(b, Scores) or alpha != 1:
        raise RefusedError("sum of scores")
    if a.shape != b.shape:
        raise RefusedError(f"sum of shapes {a.shape} and {b.shape}")
    if (both := sum_of_linear(a, b)) is not None:
        return add_layer(trace, both.view, both.seen, both.layer)
    if _mixes_channels(a, b):
        return trace.made("rotary", (a, b), (), a.shape)
    return trace.made("add", (a, b), trace.seen(0, 1), a.shape)


def _mixes_channels(a: View, b: View) -> bool:
    """Tell whether the sum of two views mixes channels of the same rows of one linear layer or normalisation."""
    if a.source is not b.source or a.source.kind not in ("linear", "norm") or a.term is not None or b.term is not None:
        return False
    first, second, channels = a.places(), b.places(), a.source.channels
    if min(int(first.min()), int(second.min())) < 0 or torch.equal(first, second):
        return False
    return torch.equal(first // channels, second // channels)


def sub(trace: Tracer, a: Any, b: Any, *, alpha: Any = 1) -> Any:
    if isinstance(a, View) and isinstance(b, View) and alpha == 1 and a.source is b.source:
        return add(trace, a, b.scaled(wide(-1.0)))
    if is_computed(b) or not isinstance(a, (View, Scores, Curve)):
        raise RefusedError("difference")
    return add(trace, a, -wide(b) * alpha)


def mul(trace: Tracer, a: Any, b: Any) -> Any:
    for place, (x, other) in enumerate(((a, b), (b, a))):
        if isinstance(x, View) and isinstance(other, Sigmoid) and (slope := other.slope(x)) is not None:
            return trace.made("silu", (x,), trace.seen(place), x.shape, slope=slope)
    if (curve := _of_curves(trace, a, b, torch.mul, "product")) is not None:
        return curve
    trace.refuse_steps(*(x for x in (a, b) if not isinstance(x, View)))
    if isinstance(a, RowSize):
        a, b = b, a
    if isinstance(b, RowSize) and not is_computed(a) and is_number(wide(a), b):
        return b.times(float(wide(a)))
    if isinstance(b, RowSize):
        return normalised(trace, a, b, times=True)
    if isinstance(a, View) and a is b:
        return power(trace, a, 2)
    if is_computed(a) and is_computed(b):
        for place, (gate, value) in enumerate(((a, b), (b, a))):
            if isinstance(gate, View) and isinstance(value, View) and gate.source.kind in ACTIVATIONS:
                if gate.shape != value.shape:
                    break
                return trace.made("product", (gate, value), trace.seen(place, 1 - place), gate.shape)
        if (curve := combined(trace, a, b, torch.mul)) is not None:
            return curve
        raise RefusedError("product of two computed tensors")
    if not is_computed(a):
        a, b = b, a
    if isinstance(a, Scores):
        return a.times(wide(b))
    if isinstance(a, Squares):
        raise RefusedError("product of squares")
    return scaled_norm(trace, a, wide(b)) or a.scaled(wide(b))


def div(trace: Tracer, a: Any, b: Any, *, rounding_mode: Any = None) -> Any:
    if isinstance(b, RowSize) and rounding_mode is None:
        return normalised(trace, a, b, times=False)
    if is_computed(b) or rounding_mode is not None:
        raise RefusedError("division")
    return mul(trace, a, 1 / wide(b))


def activation(kind: str, trace: Tracer, x: Any, **constants: Any) -> View:
    if not isinstance(x, View):
        raise RefusedError(f"{kind} of scores or norms")
    return trace.made(kind, (x,), trace.seen(0), x.shape, **constants)


def _sigmoid(trace: Tracer, x: Any) -> Sigmoid:
    if not isinstance(x, View):
        raise RefusedError("aten.sigmoid")
    return Sigmoid(x, trace.node)


def _reversed(trace: Tracer, x: Any, other: Any, alpha: Any = 1) -> Any:
    """``other - alpha * x``."""
    return add(trace, mul(trace, x, -alpha), other)


def total(trace: Tracer, x: Any, dims: Any = None, keepdim: bool = False, **more: Any) -> View | RowSize:
    """A sum over a dimension: of two stacked tensors, of tokens, or of the squares of rows."""
    if isinstance(x, View) and dims is not None:
        found = mean(trace, x, dims, keepdim)
        assert isinstance(found, View)
        return found.scaled(wide(math.prod(x.shape) / math.prod(found.shape)))
    if not isinstance(x, Stacked):
        return row_sum(trace, x, dims, keepdim)
    over = [dims] if isinstance(dims, int) else dims
    if over not in ([x.dim], [x.dim - len(x.views[0].shape) - 1]) or keepdim or len(x.views) != 2:
        raise RefusedError("sum of more than two stacked tensors, or over another dimension")
    return trace.made("add", x.views, x.nodes, x.views[0].shape)


_SILU, _RELU = functools.partial(activation, "silu"), functools.partial(activation, "relu")
HANDLERS: dict[Any, Handler] = {
    **dict.fromkeys((aten.add, aten.add_), add), **dict.fromkeys((aten.sub, aten.sub_, aten.subtract), sub),
    **dict.fromkeys((aten.mul, aten.mul_, aten.multiply), mul),
    **dict.fromkeys((aten.div, aten.div_, aten.divide, aten.true_divide), div),
    **dict.fromkeys((aten.neg, aten.neg_, aten.negative), lambda trace, x: mul(trace, x, -1.0)), aten.rsub: _reversed,
    aten.sum: total,
    aten.gelu: functools.partial(activation, "gelu"), aten.silu: _SILU, aten.silu_: _SILU, aten.relu: _RELU, aten.relu_: _RELU,
    aten.sigmoid: _sigmoid,
    aten.tanh: lambda trace, x: applied(trace, x, torch.tanh, "aten.tanh"),
    aten.erf: lambda trace, x: applied(trace, x, torch.erf, "aten.erf"),
}  # fmt: skip
