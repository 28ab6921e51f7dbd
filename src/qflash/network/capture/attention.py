"""Attention: one operation of ATen, or spelled out as scores, their softmax, and a product with the values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ..matrix import Affine, Matrix
from .operations import BATCH, RefusedError, Symbol, View, wide
from .products import add_layer, means_of_tokens
from .tracer import Handler, Tracer, aten, constant_view, is_computed

HIDDEN = -9999.0
"""What is added to a score that takes no part, at most; models write minus infinity, the least number of a type, or -10000."""


@dataclasses.dataclass(frozen=True)
class Scores(Symbol):
    """Scores of attention on their way to its output: ``factor * (query @ key) + term``, or their softmax.

    Attributes:
        query, key: (batch, heads, tokens, channels).
        shape: of this tensor; the order of elements is that of (batch, heads, queries, keys).
        factor: a number.
        term: float64 that broadcasts to the shape, or None.
        weights: whether softmax has been taken.
        head_scale: float64 (heads,), which the product is multiplied by, too, or None.
    """

    called = "scores of attention"
    query: View
    key: View
    shape: tuple[int, ...]
    factor: float = 1.0
    term: torch.Tensor | None = None
    weights: bool = False
    head_scale: torch.Tensor | None = None

    def reshaped(self, shape: Sequence[int]) -> Scores:
        """Return the same elements in another shape."""
        term = None if self.term is None else self.term.expand(self.shape).reshape(tuple(shape))
        return dataclasses.replace(self, shape=tuple(shape), term=term)

    def plus(self, term: torch.Tensor) -> Scores:
        """Return the scores plus a constant."""
        if self.weights:
            raise RefusedError("sum with weights of attention")
        return dataclasses.replace(self, term=term if self.term is None else self.term + term)

    def times(self, number: torch.Tensor) -> Scores:
        """Return the scores times a number, or a number for each head."""
        term = None if self.term is None else self.term * number
        if number.numel() == 1 and not self.weights:
            return dataclasses.replace(self, factor=self.factor * float(number), term=term)
        heads = self.shape[-3] if len(self.shape) == 4 else 0
        if self.weights or tuple(number.shape[-3:]) != (heads, 1, 1) or number.numel() != heads:
            raise RefusedError("product of scores with a tensor")
        own = number.flatten()
        return dataclasses.replace(self, head_scale=own if self.head_scale is None else self.head_scale * own, term=term)


def matmul(trace: Tracer, a: Any, b: Any, seen: fx.Node | None = None) -> View | Scores:
    """A product of matrices; ``seen`` is the node of the traced graph whose value ``b`` is, if not the second argument's."""
    if isinstance(a, View) and not is_computed(b) and b.dim() == 2:
        return add_layer(trace, a, trace.seen(0), Affine(Matrix.of(b).transposed()))
    if isinstance(b, View) and not is_computed(a):
        means = means_of_tokens(trace, a, b, trace.seen(1)[0] if seen is None else seen)
        if means is not None:
            return means
    if isinstance(b, View) and len(a.shape) == len(b.shape) >= 3 and not isinstance(a, Scores):
        query = a if isinstance(a, View) else constant_view(b.source, a)
        key = b.moved(lambda y: y.transpose(-1, -2))
        return Scores(_with_heads(query), _with_heads(key), (*query.shape[:-1], b.shape[-1]))
    if isinstance(a, Scores) and a.weights and isinstance(b, View):
        out = attend(trace, a, _with_heads(b), is_causal=False)
        return out.moved(lambda y: y.reshape(*a.shape[:-1], b.shape[-1]))
    raise RefusedError("matrix product")


def baddbmm(trace: Tracer, term: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Scores:
    scores = matmul(trace, a, b)
    if is_computed(term) or not isinstance(scores, Scores):
        raise RefusedError("baddbmm")
    scores = scores.times(wide(alpha))
    return scores if beta == 0 else scores.plus(wide(term) * beta)


def masked_fill(trace: Tracer, x: Any, mask: Any, value: Any) -> Scores:
    if not isinstance(x, Scores) or is_computed(mask) or x.weights:
        raise RefusedError("masked_fill")
    term = wide(0.0) if x.term is None else x.term
    return dataclasses.replace(x, term=torch.where(mask.cpu(), wide(value), term))


def where(trace: Tracer, mask: Any, x: Any, other: Any) -> Scores:
    if not isinstance(mask, torch.Tensor) or is_computed(x) == is_computed(other):
        raise RefusedError("aten.where")
    scores, value, hidden = (x, other, ~mask) if is_computed(x) else (other, x, mask)
    if wide(value).numel() != 1:
        raise RefusedError("aten.where")
    return masked_fill(trace, scores, hidden, wide(value).item())


def softmax(trace: Tracer, x: Any, dim: int, *rest: Any, **more: Any) -> Scores:
    if not isinstance(x, Scores) or x.weights or dim not in (-1, len(x.shape) - 1):
        raise RefusedError("softmax of what are no scores of attention")
    return dataclasses.replace(x, weights=True)


def attention(
    trace: Tracer, query: Any, key: Any, value: Any, mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False, *,
    scale: float | None = None, enable_gqa: bool = False,
) -> View:  # fmt: skip
    if not all(isinstance(x, View) for x in (key, value)) or is_computed(mask):
        raise RefusedError("attention of constants, or with a computed mask")
    if not isinstance(query, View):
        query = constant_view(key.source, query)
    if len(query.shape) == len(key.shape) == len(value.shape) == 4:
        # heads of queries that share a key and a value
        key, value = (_of_heads(x, query.shape[1]) for x in (key, value))
    shape, term = query.shape, None
    if mask is not None:
        mask = mask.detach().cpu()
        term = torch.where(mask, 0.0, -math.inf).to(torch.float64) if mask.dtype == torch.bool else wide(mask)
    factor = shape[-1] ** -0.5 if scale is None else float(scale)
    scores = Scores(_with_heads(query), _with_heads(key), (*shape[:-1], key.shape[-2]), factor, term)
    out = attend(trace, scores, _with_heads(value), is_causal=is_causal)
    return out.moved(lambda y: y.reshape(*shape[:-1], value.shape[-1]))


def attend(trace: Tracer, scores: Scores, value: View, *, is_causal: bool) -> View:
    """Add attention and return its output, in the shape of the query."""
    before = (*scores.query.shape[:-1], value.shape[-1])
    query, key = scores.query, scores.key
    if query.shape[1] == key.shape[1] == 1 < value.shape[1] and query.shape[0] == math.prod(value.shape[:2]):
        # scores that were (batch x heads, queries, keys), and are now (batch, heads, queries, keys)
        query, key = (x.moved(lambda y: y.reshape(*value.shape[:2], *y.shape[2:]), in_order=True) for x in (query, key))
    query, key, value = _split_heads(query, key, value)
    if not query.shape[0] == key.shape[0] == value.shape[0]:
        raise RefusedError("attention whose query, key and value have different batches and heads")
    constant = None
    if query.index is not None and bool((query.index < 0).all()):
        assert query.term is not None
        constant = query.term.expand(query.shape)
        if query.factor is not None or not bool((constant == constant[:1]).all()):
            raise RefusedError("attention whose constant query differs from image to image")
        constant = constant[0]
        query = dataclasses.replace(query, term=None)
    for x in (query, key, value):
        if x.term is not None or (x.factor is not None and x.factor.unique().numel() != 1):
            raise RefusedError("attention whose query, key or value had a tensor added or multiplied")
    factor = scores.factor
    for x in (query, key):
        if x.factor is not None:
            factor *= float(x.factor.flatten()[0])
    if value.factor is not None:
        raise RefusedError("attention whose value was multiplied")
    batch, heads, queries, _ = query.shape
    is_padded, mask = False, None
    if scores.term is not None and scores.term.any():
        term = scores.term.expand(scores.shape).reshape(batch, heads, queries, key.shape[2])
        each = batch // BATCH
        is_padded = _hides_padding(trace, term)
        if not is_padded and not torch.equal(term[:each], term[each : 2 * each]):
            raise RefusedError("attention with a mask that differs from image to image")
        mask = _least(term[:each])
        if _is_causal(mask):
            mask, is_causal = None, True
        elif not mask.any():
            mask = None
    width = value.shape[-1]
    out = trace.made(
        "attention", [dataclasses.replace(x, factor=None) for x in (query, key, value)], (),
        (batch, queries, heads * width), scale=factor, mask=mask, is_causal=is_causal, query=constant,
        head_scale=scores.head_scale, is_padded=is_padded,
    )  # fmt: skip
    return out.moved(lambda y: y.view(batch, queries, heads, width).transpose(1, 2).reshape(before))


def _of_heads(x: View, heads: int) -> View:
    """Return keys or values, (batch, heads, tokens, channels), of as many heads as queries have, of which some share one."""
    if not x.shape[1] or heads % x.shape[1]:
        raise RefusedError(f"attention of {heads} heads with {x.shape[1]} of keys or values")
    return x if x.shape[1] == heads else x.moved(lambda y: y.repeat_interleave(heads // x.shape[1], 1))


def _with_heads(x: View) -> View:
    """Return a view as (batch, heads, tokens, channels)."""
    if len(x.shape) == 4:
        return x
    if len(x.shape) == 3:
        return x.moved(lambda y: y.unsqueeze(1), in_order=True)
    return x.moved(lambda y: y.flatten(0, -4), in_order=True)


def _split_heads(query: View, key: View, value: View) -> tuple[View, View, View]:
    """Return (batch, heads, tokens, channels) where batch and heads are one dimension."""
    if key.shape[1] != 1:
        return query, key, value
    rows = key.places()[:, 0, :, 0] // key.source.channels
    heads = int((rows == rows[:1]).all(dim=1).sum())
    if heads == 1 or len(rows) % heads:
        return query, key, value
    query, key, value = (x.moved(lambda y: y.squeeze(1).unflatten(0, (-1, heads)), in_order=True) for x in (query, key, value))
    return query, key, value


def _hides_padding(trace: Tracer, term: torch.Tensor) -> bool:
    """Tell whether scores, (batch, heads, queries, keys), have a term that is the same in both texts but at hidden keys."""
    if trace.visible is None or len(term) != len(trace.visible):
        return False
    whole, hidden = term[0], ~trace.visible[1]
    other = term[1][..., hidden]
    # what is hidden in the first text may have any number in the second
    gone = (other - whole[..., hidden] <= HIDDEN) | (whole[..., hidden] <= HIDDEN)
    return bool(hidden.any()) and bool(gone.all()) and torch.equal(term[1][..., ~hidden], whole[..., ~hidden])


def _is_causal(term: torch.Tensor) -> bool:
    """Tell whether a term of scores, (windows, heads, queries, keys), hides the keys behind each query and nothing else."""
    behind = torch.ones(term.shape[2:], dtype=torch.bool, device="cpu").triu(1)
    few = term.shape[:2] == (1, 1) and term.shape[2] == term.shape[3] > 1
    return few and bool((term[0, 0][behind] <= HIDDEN).all()) and not bool(term[0, 0][~behind].any())


def _least(term: torch.Tensor) -> torch.Tensor:
    """Return a mask with one row where all windows, or all heads, have the same."""
    for dim in (0, 1):
        if term.shape[dim] > 1 and bool((term == term.narrow(dim, 0, 1)).all()):
            term = term.narrow(dim, 0, 1)
    return term.contiguous()


HANDLERS: dict[Any, Handler] = {
    aten.matmul: matmul, aten.mm: matmul, aten.bmm: matmul, aten.baddbmm: baddbmm, aten.masked_fill: masked_fill,
    aten.where: where, aten.softmax: softmax, aten._softmax: softmax,
    aten.scaled_dot_product_attention: attention,
}  # fmt: skip
