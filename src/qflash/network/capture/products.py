"""Linear layers and convolutions. One layer on another, and a sum of two, are one with other weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from ..matrix import Affine, Matrix
from .operations import BATCH, Product, RefusedError, View, call_behind, counted, same, wide
from .tracer import Handler, Tracer, aten, image_order, is_computed


def product_of(x: View) -> Product | None:
    """Return a view of a linear layer's output as a linear layer of its own, or None where it is something else."""
    layer, channels = x.source, x.shape[-1]
    if layer.kind != "linear" or channels != layer.channels:
        return None
    places = x.places().reshape(-1, channels)
    rows, constants = places[:, 0] // channels, x.constants_of_rows()
    if not torch.equal(places, rows[:, None] * channels + counted(channels)) or int(rows.min()) < 0 or constants is None:
        return None
    view = layer.inputs[0].moved(lambda y: y.reshape(layer.rows, -1)[rows].reshape(*x.shape[:-1], -1))
    return Product(view, layer.seen, layer.affine.then(*constants))


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
    """Add a linear layer. One on another is one with the product of their weights, as a low-rank update of weights is.

    Of several tokens joined channel by channel it takes one token after the other.
    """
    if view.source.kind == "images":
        view, layer = _on_pixels(view, layer)
    if view.source.kind == "join" and (constants := view.constants_of_rows()) is not None:
        # tensors that are joined are quantised one by one: what comes behind them all is the layer's
        view, layer = dataclasses.replace(view, factor=None, term=None), layer.with_inputs(*constants)
    if (order := _token_order(view)) is not None:
        layer = Affine(layer.matrix.columns(order), layer.bias)
        view, seen = view.moved(_channels(order)), [call_behind(seen[0], "ordered", _channels(order))]
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


def _on_pixels(view: View, layer: Affine) -> tuple[View, Affine]:
    """Return a linear layer on pixels with what a model multiplies them by, and adds to them, in its weights and bias."""
    if (constants := view.constants_of_rows()) is None:
        raise RefusedError("linear layer on pixels that a model treats differently from patch to patch")
    return dataclasses.replace(view, factor=None, term=None), layer.with_inputs(*constants)


def _channels(order: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what takes channels of (..., channels) in an order."""
    return lambda x: x[..., order.to(x.device)]


def _token_order(view: View) -> torch.Tensor | None:
    """Return an order of channels, int64, that has one token after the other; None where they lie so or are something else."""
    channels, width = view.source.channels, view.shape[-1]
    if view.source.kind == "images" or view.index is None or width <= channels or width % channels:
        return None
    places = view.index.reshape(-1, width)
    places = places[(places >= 0).all(dim=1)]
    if not len(places):
        return None
    tokens, column = places[0] // channels, places[0] % channels
    # tokens in the order in which the first row has them
    rank = (tokens == tokens[:, None]).int().argmax(dim=1)
    order = (rank * channels + column).argsort()
    found = places[:, order].unflatten(1, (-1, channels))
    if bool((found[..., :1] % channels).any()) or not torch.equal(found, found[..., :1] + counted(channels)):
        return None
    return None if torch.equal(order, counted(width)) else order


def means_of_tokens(trace: Tracer, weights: torch.Tensor, x: View, seen: fx.Node) -> View | None:
    """Return means of as many tokens each that a constant matrix gives: a linear layer on those tokens side by side.

    Args:
        trace: the tracer, at their product.
        weights: (images or 1, means, tokens).
        x: (images, tokens, channels).
        seen: the node of the traced graph whose value that is.

    Returns:
        (images, means, channels), or None where the matrix is something else.

    Raises:
        RefusedError: what it averages is of several images.
    """
    if weights.dim() != 3 or len(x.shape) != 3 or not bool((weights == weights[:1]).all()):
        return None
    numbers, channels = wide(weights[0]), x.shape[-1]
    used = numbers != 0
    count = int(used[0].sum())
    if not count or not bool((used.sum(dim=1) == count).all()) or not torch.allclose(numbers[used], wide(1 / count)):
        return None
    tokens = used.nonzero()[:, 1].view(-1, count)

    def together(y: torch.Tensor) -> torch.Tensor:
        return y[:, tokens.to(y.device)].flatten(2)

    if count == 1:
        return x.moved(together)
    image = x.places().flatten(1) // max(x.source.rows * x.source.channels // BATCH, 1)
    # constant tokens are of no image
    if not bool(((image == image.amax(dim=1, keepdim=True)) | (image < 0)).all()):
        raise RefusedError("means of tokens whose channels are of several images (the batch must be before the tokens)")
    mean = torch.eye(channels, dtype=torch.float64, device="cpu").repeat(1, count) / count
    return add_layer(trace, x.moved(together), [call_behind(seen, "together", together)], Affine(Matrix.of(mean)))


def with_bias(trace: Tracer, x: View, bias: torch.Tensor) -> View | None:
    """Return a linear layer without a bias that has one added behind it, or None where it is something else."""
    if x.source.bias is not None or x.factor is not None or x.term is not None:
        return None
    # (channels,), or with ones ahead
    if not 0 < bias.dim() <= len(x.shape) or not bias.numel() == bias.shape[-1] == x.shape[-1]:
        return None
    if (product := product_of(x)) is None or product.view.source.kind == "images":
        return None
    layer = product.layer.then(None, wide(bias.flatten()))
    return trace.made("linear", (product.view,), product.seen, x.shape, matrix=layer.matrix, bias=layer.bias)


def linear(trace: Tracer, x: Any, weight: Any, bias: Any = None) -> View:
    if is_computed((weight, bias)):
        raise RefusedError("linear layer with computed weights")
    if not isinstance(x, View):
        raise RefusedError(f"linear layer of {x.called}")
    return add_layer(trace, x, trace.seen(0), Affine(Matrix.of(weight), None if bias is None else wide(bias)))


def addmm(trace: Tracer, bias: Any, x: Any, weight: Any, *, beta: Any = 1, alpha: Any = 1) -> View:
    if not isinstance(x, View) or is_computed((weight, bias)) or (beta, alpha) != (1, 1):
        raise RefusedError("addmm")
    return add_layer(trace, x, trace.seen(1), Affine(Matrix.of(weight).transposed(), wide(bias)))


def convolution(
    trace: Tracer, x: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, *rest: Any
) -> View:
    """A convolution is a linear layer on patches."""
    if is_computed((weight, bias)):
        raise RefusedError("convolution with computed weights")
    sizes = weight.shape[2:]
    each = [(x_,) * len(sizes) if isinstance(x_, int) else tuple(x_) for x_ in (stride, padding, dilation)]
    steps, pads, gaps = (e * len(sizes) if len(e) == 1 else e for e in each)
    groups = rest[-1] if rest else 1
    if not isinstance(x, View) or any(pads) or any(g != 1 for g in gaps) or groups != 1 or (len(rest) > 1 and rest[0]):
        raise RefusedError("convolution with padding, dilation or groups")
    count = len(sizes)
    # (batch, channels, *grid, *sizes) -> (batch, *grid, channels, *sizes)
    order = (0, *range(2, 2 + count), 1, *range(2 + count, 2 + 2 * count))

    def patches(y: torch.Tensor) -> torch.Tensor:
        for dim, (size, step) in enumerate(zip(sizes, steps, strict=True), 2):
            y = y.unfold(dim, size, step)
        return y.permute(order).flatten(1 + count)

    view = x.moved(patches)
    # what calibration looks at has channels last, as the layer's inputs; pixels are looked at where they come in
    seen = trace.seen(0) if x.source.kind == "images" else [call_behind(trace.seen(0)[0], "patches", patches)]
    out = add_layer(trace, view, seen, Affine(Matrix.of(weight), None if bias is None else wide(bias)))
    return out.moved(lambda y: y.movedim(-1, 1))


HANDLERS: dict[Any, Handler] = {
    aten.linear: linear, aten.addmm: addmm,
    **dict.fromkeys((aten.conv1d, aten.conv2d, aten.conv3d, aten.convolution), convolution),
}  # fmt: skip
