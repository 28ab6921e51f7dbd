"""Linear layers and convolutions. One layer on another, and a sum of two, are one with other weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ..matrix import Affine, Matrix
from .operations import Product, RefusedError, View, counted, same, wide
from .tracer import Handler, Tracer, aten, image_order, is_computed


def product_of(x: View) -> Product | None:
    """Return a view of a linear layer's output as a linear layer of its own, or None where it is something else."""
    layer, channels = x.source, x.shape[-1]
    if layer.kind != "linear" or channels != layer.channels:
        return None
    places = x.places().reshape(-1, channels)
    rows = places[:, 0] // channels
    constants = [None if each is None else each.expand(x.shape).reshape(-1, channels) for each in (x.factor, x.term)]
    if not torch.equal(places, rows[:, None] * channels + counted(channels)) or int(rows.min()) < 0:
        return None
    if any(each is not None and not bool((each == each[:1]).all()) for each in constants):
        return None
    view = layer.inputs[0].moved(lambda y: y.reshape(layer.rows, -1)[rows].reshape(*x.shape[:-1], -1))
    return Product(view, layer.seen, layer.affine.then(*(None if each is None else each[0] for each in constants)))


def sum_of_linear(a: View, b: View) -> Product | None:
    """Return the linear layer that the sum of two with the same input is, or None where it is something else."""
    if not a.source.kind == b.source.kind == "linear" or a.source.inputs[0].source is not b.source.inputs[0].source:
        return None
    one, other = product_of(a), product_of(b)
    if one is None or other is None or not torch.equal(one.view.places(), other.view.places()):
        return None
    if not same(one.view.factor, other.view.factor) or not same(one.view.term, other.view.term):
        return None
    return Product(one.view, one.seen, one.layer.plus(other.layer))


def add_layer(trace: Tracer, view: View, seen: Sequence[fx.Node], layer: Affine) -> View:
    """Add a linear layer. One on another is one with the product of their weights, as a low-rank update of weights is."""
    alone = made = Product(view, list(seen), layer)
    if (first := product_of(view)) is not None:
        made = Product(first.view, first.seen, layer.after(first.layer))
    shape = *made.view.shape[:-1], layer.matrix.shape[0]
    out = trace.made("linear", (made.view,), made.seen, shape, matrix=made.layer.matrix, bias=made.layer.bias)
    if alone is not made:
        if (order := image_order(made.view)) is not None:
            alone = dataclasses.replace(alone, view=view.moved(lambda y: y.reshape(-1, y.shape[-1])[order]))
        trace.operations[-1].apart = alone
    return out


def linear(trace: Tracer, x: Any, weight: Any, bias: Any = None) -> View:
    if not isinstance(x, View) or is_computed((weight, bias)):
        raise RefusedError("linear layer with computed weights")
    return add_layer(trace, x, trace.seen(0), Affine(Matrix.of(weight), None if bias is None else wide(bias)))


def addmm(trace: Tracer, bias: Any, x: Any, weight: Any, *, beta: Any = 1, alpha: Any = 1) -> View:
    if not isinstance(x, View) or is_computed((weight, bias)) or (beta, alpha) != (1, 1):
        raise RefusedError("addmm")
    return add_layer(trace, x, trace.seen(1), Affine(Matrix.of(weight).transposed(), wide(bias)))


def convolution(
    trace: Tracer, x: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, *rest: Any
) -> View:
    """A convolution is a linear layer on patches."""
    sizes = weight.shape[2:]
    each = [(x_,) * len(sizes) if isinstance(x_, int) else tuple(x_) for x_ in (stride, padding, dilation)]
    steps, pads, gaps = (e * len(sizes) if len(e) == 1 else e for e in each)
    groups = rest[-1] if rest else 1
    if not isinstance(x, View) or any(pads) or any(g != 1 for g in gaps) or groups != 1 or (len(rest) > 1 and rest[0]):
        raise RefusedError("convolution with padding, dilation or groups")
    moved = x.places()
    for dim, (size, step) in enumerate(zip(sizes, steps, strict=True), 2):
        moved = moved.unfold(dim, size, step)
    grid = moved.shape[2 : 2 + len(sizes)]
    # (batch, channels, *grid, *sizes) -> (batch, *grid, channels, *sizes)
    order = (0, *range(2, 2 + len(sizes)), 1, *range(2 + len(sizes), 2 + 2 * len(sizes)))
    patches = moved.permute(order).reshape(x.shape[0], *grid, -1)
    if x.factor is not None or x.term is not None:
        raise RefusedError("convolution of what a constant was added to")
    out = linear(trace, View(x.source, tuple(patches.shape), patches), weight, bias)
    return out.moved(lambda y: y.movedim(-1, 1))


HANDLERS: dict[Any, Handler] = {
    aten.linear: linear, aten.addmm: addmm, aten.conv2d: convolution, aten.convolution: convolution,
}  # fmt: skip
