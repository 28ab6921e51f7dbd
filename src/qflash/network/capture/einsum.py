"""``einsum``: a rearrangement, a linear layer, scores of attention, or their product with values."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from ..matrix import Affine, Matrix
from .attention import Scores, matmul
from .operations import RefusedError, View, call_behind
from .products import add_layer
from .tracer import Handler, Tracer, aten, is_computed

_NAMES = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
"""Of dimensions that an equation has as dots."""


def _subscripts(equation: str, ranks: Sequence[int]) -> tuple[list[str], str]:
    """Return a letter for each dimension of each tensor, and of the result.

    Raises:
        RefusedError: a letter comes twice in one of them.
    """
    left, arrow, out = equation.replace(" ", "").partition("->")
    parts = left.split(",")
    if arrow and len(parts) == len(ranks):
        spare = [x for x in _NAMES if x not in equation]
        counts = [rank - len(part.replace("...", "")) for part, rank in zip(parts, ranks, strict=True)]
        dots = "".join(spare[: max(counts)])
        # dots that stand for fewer dimensions stand for the last ones
        found = [part.replace("...", dots[len(dots) - count :]) for part, count in zip(parts, counts, strict=True)]
        out = out.replace("...", dots)
        if all(len(set(each)) == len(each) for each in (*found, out)):
            return found, out
    raise RefusedError(f"einsum {equation}")


def _arranged(order: Sequence[int], lead: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what permutes a tensor, and makes one dimension of those behind the first ``lead``."""
    return lambda x: x.permute(*order).flatten(lead) if len(order) > lead else x.permute(*order).unsqueeze(lead)


def einsum(trace: Tracer, equation: str, tensors: Sequence[Any], **more: Any) -> View | Scores:
    ranks = [len(x.shape) for x in tensors]
    parts, out = _subscripts(equation, ranks)
    if len(tensors) == 1 and isinstance(tensors[0], View) and set(parts[0]) == set(out):
        order = [parts[0].index(x) for x in out]
        return tensors[0].moved(lambda y: y.permute(*order))
    nodes = trace.node.args[1]
    if len(tensors) != 2 or not isinstance(nodes, (list, tuple)):
        raise RefusedError(f"einsum {equation}")
    pair = list(zip(tensors, parts, nodes, strict=True))
    shared = [x for x in parts[0] if x in parts[1]]
    batch = [x for x in out if x in shared]
    # weights come second, those of attention first; scores are (..., queries, keys)
    is_layer = not batch and not all(map(is_computed, tensors))
    scores = [isinstance(x, Scores) for x in tensors]
    if scores[1] or (is_layer and not is_computed(tensors[0])) or (not any(scores) and out[-1] in parts[0] and not is_layer):
        pair.reverse()
    (x, of_x, node), (y, of_y, other_node) = pair
    summed = [letter for letter in of_x if letter in shared and letter not in out]
    left, right = ([letter for letter in of if letter not in shared] for of in (of_x, of_y))
    if not summed or {*batch, *left, *right} != {*out}:
        raise RefusedError(f"einsum {equation}")
    sizes = {letter: size for each, of, _ in pair for letter, size in zip(of, each.shape, strict=True)}
    order = [of_x.index(letter) for letter in (*batch, *left, *summed)]
    other = [of_y.index(letter) for letter in (*batch, *summed, *right)]
    made: Any
    if is_layer:
        if not isinstance(x, View):
            raise RefusedError(f"einsum {equation} of scores")
        arranged = _arranged(order, len(left))
        weights = y.permute(*other).reshape(math.prod(sizes[letter] for letter in summed), -1)
        in_order = order == sorted(order) and len(summed) == 1
        assert isinstance(node, fx.Node)
        seen = node if in_order else call_behind(node, "arranged", arranged)
        made = add_layer(trace, x if in_order else x.moved(arranged), [seen], Affine(Matrix.of(weights).transposed()))
    else:
        if isinstance(x, Scores):
            if order != sorted(order) or len(left) != 1 or len(summed) != 1:
                raise RefusedError(f"einsum {equation} of scores")
        else:
            rows, width = (math.prod(sizes[letter] for letter in of) for of in (left, summed))
            x = _rearranged(x, order, [*(sizes[letter] for letter in batch), rows, width])
        inner, columns = (math.prod(sizes[letter] for letter in of) for of in (summed, right))
        seen = None
        if not is_computed(x):
            assert isinstance(other_node, fx.Node)
            seen = call_behind(other_node, "arranged", lambda z: z.permute(*other).reshape(-1, inner, columns))
        made = matmul(trace, x, _rearranged(y, other, [*(sizes[letter] for letter in batch), inner, columns]), seen)
    found = [*batch, *left, *right]
    shape = [sizes[letter] for letter in found]
    if isinstance(made, Scores):
        if found != list(out):
            raise RefusedError(f"einsum {equation} of scores")
        return made.reshaped(shape)
    back = [found.index(letter) for letter in out]
    return made.moved(lambda z: z.reshape(shape).permute(*back))


def _rearranged(x: Any, order: Sequence[int], shape: Sequence[int]) -> Any:
    """Return a tensor, computed or not, with its dimensions in an order and then of a shape."""
    if isinstance(x, View):
        return x.moved(lambda y: y.permute(*order).reshape(tuple(shape)))
    if is_computed(x):
        raise RefusedError("einsum of scores")
    return x.permute(*order).reshape(tuple(shape))


HANDLERS: dict[Any, Handler] = {aten.einsum: einsum}
