"""Rearrangements of elements: they make no operation, but another view."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from .attention import Scores
from .norms import RowSize
from .operations import Operation, RefusedError, Symbol, View, nowhere, on_meta, wide
from .tracer import Handler, Tracer, aten, constant_view, is_computed

_IN_ORDER = {
    aten.view, aten.reshape, aten.flatten, aten.unflatten, aten.unsqueeze, aten.squeeze, aten.contiguous, aten.clone,
    aten._unsafe_view, aten.reshape_as, aten.ravel,
}  # fmt: skip
"""Rearrangements that leave elements in their order."""
_OF_ANY_STRIDES = {
    aten.view.default: aten.reshape.default,
    aten._unsafe_view.default: aten.reshape.default,
    aten.view_as.default: aten.reshape_as.default,
}
"""Rearrangements that need certain strides, and those that do the same without."""
_LIKE = {aten.expand_as, aten.view_as, aten.reshape_as}
"""Rearrangements that take a shape from another tensor."""
_MOVES = {
    aten.transpose, aten.permute, aten.t, aten.expand, aten.select, aten.slice, aten.unbind, aten.split, aten.chunk,
    aten.split_with_sizes, aten.roll, aten.index_select, aten.flip, aten.repeat, aten.narrow, aten.movedim,
    aten.swapaxes, aten.numpy_T, aten.unfold, aten.expand_as, aten.view_as, aten.diagonal, aten.tile,
    aten.repeat_interleave, aten.moveaxis, aten.tensor_split, aten.mT, aten.mH, aten.adjoint, aten.swapdims,
    aten.broadcast_to, aten.hsplit, aten.dsplit, aten.unsafe_chunk, aten.unsafe_split, aten.unsafe_split_with_sizes,
    aten.narrow_copy, aten.rot90, aten.fliplr, aten.flipud, aten.pixel_shuffle, aten.pixel_unshuffle, aten.channel_shuffle,
    aten.gather,
}  # fmt: skip
"""Other rearrangements of one tensor."""


@dataclasses.dataclass(frozen=True, eq=False)
class Stacked(Symbol):
    """Tensors of different operations along a new dimension; only their sum can follow.

    Attributes:
        views: of one shape.
        nodes: of the traced graph, whose values they are.
        dim: the new dimension.
    """

    called = "stacked tensors"
    views: list[View]
    nodes: list[fx.Node]
    dim: int


def move(trace: Tracer, x: Any, *args: Any, in_order: bool = False, **kwargs: Any) -> Any:
    """Rearrange as the traced operation does."""
    target: Any = trace.node.target
    if isinstance(x, RowSize) and target.overloadpacket in (aten.expand, aten.expand_as, aten.broadcast_to):
        return x
    if target.overloadpacket in _LIKE and isinstance(args[0], Symbol):
        args = (on_meta(args[0].shape),)
        if not is_computed(x):
            return target(x, *args)
    if not isinstance(x, (View, Scores)) or is_computed(args):
        raise RefusedError(f"{target} that depends on what is computed")
    if isinstance(x, Scores):
        if not in_order:
            raise RefusedError(f"{target} of scores")
        return x.reshaped(target(on_meta(x.shape), *args, **kwargs).shape)
    kwargs.pop("memory_format", None)
    # the traced tensor may have had strides that let it be viewed, which places do not have
    target = _OF_ANY_STRIDES.get(target, target)
    found = target(on_meta(x.shape), *args, **kwargs) if not in_order else None
    if isinstance(found, (list, tuple)):

        def piece(number: int) -> Callable[[torch.Tensor], torch.Tensor]:
            return lambda y: target(y, *args, **kwargs)[number]

        return [x.moved(piece(number)) for number in range(len(found))]
    return x.moved(lambda y: target(y, *args, **kwargs), in_order=in_order)


def cat(trace: Tracer, tensors: Sequence[Any], dim: int = 0) -> View:
    # a cache of keys begins with no element
    tensors = [x for x in tensors if isinstance(x, Symbol) or x.numel()]
    views = [x for x in tensors if isinstance(x, View)]
    if any(isinstance(x, Scores) for x in tensors):
        raise RefusedError("cat of scores")
    if len({view.source for view in views}) == 1:
        parts = [x if isinstance(x, View) else constant_view(views[0].source, x) for x in tensors]
        return _joined(parts, dim)
    shape = list(tensors[0].shape)
    if len(views) == len(tensors) and len(set(map(_base_of, views))) == 1:
        both = [_joined(parts, dim) for parts in zip(*map(_two_terms, views), strict=True)]
        return trace.made("rotary", both, (), both[0].shape)
    if len(views) != len(tensors) or dim % len(shape) != len(shape) - 1:
        raise RefusedError("cat of what different operations compute")
    shape[-1] = sum(x.shape[-1] for x in views)
    return trace.made("join", views, _nodes_of_list(trace), shape)


def stack(trace: Tracer, tensors: Sequence[Any], dim: int = 0) -> View | Stacked:
    views = [x for x in tensors if isinstance(x, View)]
    if len(views) == len(tensors) and len(set(map(_base_of, views))) > 1:
        return Stacked(views, _nodes_of_list(trace), dim % (len(views[0].shape) + 1))
    higher = [x.moved(lambda y: y.unsqueeze(dim)) if isinstance(x, View) else x.unsqueeze(dim) for x in tensors]
    return cat(trace, higher, dim)


def pad(trace: Tracer, x: Any, amounts: Sequence[int], mode: str = "constant", value: float | None = None) -> Any:
    if any(amounts):
        raise RefusedError("padding")
    return x


def side_by_side(trace: Tracer, tensors: Sequence[Any]) -> View:
    return cat(trace, tensors, min(1, len(tensors[0].shape) - 1))


def _nodes_of_list(trace: Tracer) -> list[fx.Node]:
    nodes = trace.node.args[0]
    assert isinstance(nodes, (list, tuple))
    return [x for x in nodes if isinstance(x, fx.Node)]


def _base_of(x: View) -> Operation:
    """Return what a view is of, before channels were mixed."""
    return x.source.inputs[0].source if x.source.kind == "rotary" else x.source


def _two_terms(x: View) -> tuple[View, View]:
    """Return the two views whose sum a view is: of what mixes channels, or itself and zeros."""
    if x.source.kind == "rotary":
        return x.of(x.source.inputs[0]), dataclasses.replace(x, term=None).of(x.source.inputs[1])
    return x, View(x.source, x.shape, nowhere(*x.shape))


def _joined(parts: Sequence[View], dim: int) -> View:
    """Return views of one operation joined to one."""
    index = torch.cat([x.places() for x in parts], dim)
    terms = factors = None
    if any(x.term is not None for x in parts):
        terms = torch.cat([(wide(0.0) if x.term is None else x.term).expand(x.shape) for x in parts], dim)
    if any(x.factor is not None for x in parts):
        factors = torch.cat([(wide(1.0) if x.factor is None else x.factor).expand(x.shape) for x in parts], dim)
    return View(parts[0].source, tuple(index.shape), index, factors, terms)


HANDLERS: dict[Any, Handler] = {
    **dict.fromkeys(_MOVES, move), **dict.fromkeys(_IN_ORDER, functools.partial(move, in_order=True)),
    **dict.fromkeys((aten.cat, aten.concat, aten.concatenate), cat), aten.hstack: side_by_side, aten.stack: stack,
    aten.pad: pad, aten.constant_pad_nd: pad,
    **dict.fromkeys((aten.dropout, aten.alpha_dropout, aten.feature_dropout), lambda trace, x, *rest: x),
}  # fmt: skip
