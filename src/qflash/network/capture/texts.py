"""What text encoders do with ids of tokens: embeddings, masks of padding, the token that stands for a text."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from ...specification.texts import place_of
from .moves import move
from .norms import clamp_min
from .operations import BATCH, RefusedError, Symbol, View, counted, wide
from .tracer import Counted, Handler, Tracer, aten, is_computed


@dataclasses.dataclass(frozen=True, eq=False)
class Place(Symbol):
    """The place of a token in each text, or on the way to it: whether ids are those of a token.

    Attributes:
        shape: of the tensor.
        token: id of the token; None for the largest.
        found: whether it is the place.
    """

    takers = frozenset((aten.argmax,))
    shape: tuple[int, ...]
    token: int | None
    found: bool = False


def is_ids(x: Any) -> bool:
    """Tell whether a value is the model's ids of tokens, in their order."""
    plain = isinstance(x, View) and x.source.kind == "images" and x.index is None and x.factor is None and x.term is None
    return plain and len(x.shape) == 2


def embedding(trace: Tracer, weight: Any, ids: Any, *rest: Any) -> View:
    if not is_ids(ids) or is_computed(weight):
        raise RefusedError("embedding of what are not the model's ids of tokens")
    return trace.made("embedding", (ids,), trace.seen(1), (*ids.shape, weight.shape[1]), weight=wide(weight))


def clamp(trace: Tracer, x: Any, least: Any = None, most: Any = None, **named: Any) -> Any:
    least, most = named.get("min", least), named.get("max", most)
    if trace.visible is not None and is_ids(x) and least == 0 and most is None:
        return x  # where there is no token there may be any
    if isinstance(x, View) and _clips_nothing(least, most):
        return x
    if most is not None or least is None:
        _refuse_call(trace)
    return clamp_min(trace, x, least)


def _clips_nothing(least: Any, most: Any) -> bool:
    """Tell whether bounds are constants that lie at infinity, or None."""
    bounds = [(x, end) for x, end in ((least, -math.inf), (most, math.inf)) if x is not None]
    return not is_computed((least, most)) and all(bool((wide(x) == end).all()) for x, end in bounds)


def at_least(trace: Tracer, x: Any, least: Any) -> Any:
    if trace.visible is None or not is_ids(x) or least != 0:
        _refuse_call(trace)
    return trace.visible


def is_id(trace: Tracer, x: Any, token: Any) -> Place:
    if not is_ids(x) or type(token) is not int:
        _refuse_call(trace)
    return Place(x.shape, token)


def is_other(trace: Tracer, x: Any, token: Any) -> Counted:
    """Whether ids are not the one that fills texts up: true of all tokens, of which alone a network counts places."""
    if not is_ids(x) or type(token) is not int or token < 0 or trace.filler not in (None, token):
        _refuse_call(trace)
    trace.filler = token
    return Counted(x.shape, torch.ones(x.shape, dtype=torch.bool, device=trace.node.meta["val"].device))


def argmax(trace: Tracer, x: Any, dim: int | None = None, keepdim: bool = False) -> Place:
    if keepdim or dim not in (1, -1) or not (isinstance(x, Place) or is_ids(x)):
        _refuse_call(trace)
    return Place(x.shape[:1], x.token if isinstance(x, Place) else None, found=True)


def index(trace: Tracer, x: Any, places: Sequence[Any]) -> Any:
    if not any(isinstance(place, Place) for place in places):
        return move(trace, x, places)
    each, place, *rest = *places, None, None
    rows = isinstance(each, torch.Tensor) and torch.equal(each.flatten().cpu(), counted(BATCH))
    if rest[:-2] or not rows or not isinstance(place, Place) or not place.found or not isinstance(x, View):
        _refuse_call(trace)
    return _selected(trace, x, place.token)


def _selected(trace: Tracer, x: View, token: int | None) -> View:
    """Return the token that stands for each text, of (batch, tokens, channels).

    A normalisation before comes behind it.
    """
    norm = x.source
    plain = x.index is None and x.factor is None and x.term is None and len(x.shape) == 3
    if not plain or norm.kind != "norm" or norm.inputs[0].index is not None:
        raise RefusedError("the token of a text, of what is no normalisation")
    hidden, (seen,) = norm.inputs[0], norm.seen
    ids = next(n for n in trace.node.graph.nodes if n.op == "placeholder")

    def select(h: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return h[torch.arange(len(ids), dtype=torch.int64, device=ids.device), place_of(ids, token)]

    # before this node, so that nobody interprets it
    with trace.node.graph.inserting_before(trace.node):
        node = trace.node.graph.create_node("call_function", select, (seen, ids), {}, "selected")
    node.meta = dict(trace.node.meta)
    shape = (x.shape[0], x.shape[2])
    chosen = trace.made("select", (dataclasses.replace(hidden, shape=x.shape),), (seen,), shape, token=token)
    chosen.source.node = node
    trace.operations.append(dataclasses.replace(norm, inputs=[chosen], seen=[node], node=trace.node, rows=shape[0]))
    return View(trace.operations[-1], shape)


def _refuse_call(trace: Tracer) -> NoReturn:
    raise RefusedError(str(getattr(trace.node.target, "overloadpacket", trace.node.target)))


HANDLERS: dict[Any, Handler] = {
    aten.embedding: embedding, aten.clamp: clamp, aten.ge: at_least, aten.eq: is_id, aten.ne: is_other, aten.argmax: argmax,
    aten.index: index,
}  # fmt: skip
