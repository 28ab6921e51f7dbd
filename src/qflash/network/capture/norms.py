"""Normalisations of rows: by their name, or spelled out, as ``x / norm(x)`` or ``x * rsqrt(mean(x * x) + eps)``; means."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from .curves import applied
from .operations import RefusedError, Symbol, View, counted, same, wide
from .tracer import Handler, Tracer, aten, is_computed

MOST_FLOOR = 1e-4
"""Largest number that a row's norm may be bounded by from below: it is far below what a residual stream's unit shows.

Of a norm that is multiplied by a small number, the number may be as large beside the root of the mean of the row's squares.
"""


@dataclasses.dataclass(frozen=True, eq=False)
class Squares(Symbol):
    """The squares of a tensor's elements.

    Attributes:
        view: of the tensor.
        seen: the node of the traced graph whose value it is.
        shape: of the tensor.
    """

    called = "squares"
    view: View
    seen: fx.Node
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class RowSize(Symbol):
    """A number for each row of a tensor: ``(scale * sum(x**2) + epsilon) ** exponent``.

    Attributes:
        squares: of the tensor.
        shape: of the numbers, (..., 1).
        scale, epsilon, exponent: see there.
    """

    called = "norms of rows"
    squares: Squares
    shape: tuple[int, ...]
    scale: float = 1.0
    epsilon: float = 0.0
    exponent: float = 1.0

    def plus(self, term: torch.Tensor) -> RowSize:
        """Return the numbers plus a constant."""
        if not is_number(term, self):
            raise RefusedError("sum of norms of rows and more than one number")
        if self._may_be_at_least(float(term)):
            return self.at_least(float(term))
        if self.exponent != 1 or float(term) < 0:
            raise RefusedError("sum of norms of rows")
        return dataclasses.replace(self, epsilon=self.epsilon + float(term))

    def at_least(self, number: float) -> RowSize:
        """Return the larger of the numbers and a small constant; only rows as small as that differ from a sum of both."""
        if not self._may_be_at_least(number):
            raise RefusedError("least number of norms of rows")
        return dataclasses.replace(self, epsilon=self.epsilon + number**2)

    def _may_be_at_least(self, number: float) -> bool:
        """Tell whether the numbers are norms, and a constant is far below those of rows that a network has."""
        # of a root of the mean of squares a product of 1/channels and channels may be rounded
        most = MOST_FLOOR * min(1.0, (self.scale * self.squares.shape[-1]) ** 0.5 * (1 + 1e-6))
        return self.exponent == 0.5 and 0 <= number <= most

    def times(self, number: float) -> RowSize:
        """Return the numbers times a positive one."""
        if number <= 0:
            raise RefusedError("product of norms of rows")
        try:
            inside = number ** (1 / self.exponent)
        except ArithmeticError:
            raise RefusedError(f"product of {number} and a power {self.exponent} of sums of squares") from None
        return dataclasses.replace(self, scale=self.scale * inside, epsilon=self.epsilon * inside)

    def power(self, exponent: float) -> RowSize:
        """Return a power of the numbers."""
        return dataclasses.replace(self, exponent=self.exponent * exponent)

    def normalises(self, view: View, *, times: bool) -> bool:
        """Tell whether a view times these numbers, or divided by them, is the tensor with its rows normalised."""
        own = self.squares.view
        if self.exponent != (-0.5 if times else 0.5) or view.source is not own.source or view.shape != own.shape:
            return False
        return same(view.index, own.index) and same(view.factor, own.factor) and same(view.term, own.term)


def is_number(x: torch.Tensor, other: Symbol) -> bool:
    """Tell whether a constant is one number, which leaves the shape of another tensor as it is."""
    return x.numel() == 1 and x.dim() <= len(other.shape)


def layer_norm(
    trace: Tracer, x: Any, shape: Sequence[int], weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any
) -> View:
    if not isinstance(x, View) or len(shape) != 1:
        raise RefusedError("layer normalisation over several dimensions")
    weight, bias = (None if each is None else wide(each) for each in (weight, bias))
    return trace.made("norm", (x,), trace.seen(0), x.shape, weight=weight, bias=bias, epsilon=float(eps))


def rms_norm(trace: Tracer, x: Any, shape: Sequence[int], weight: Any = None, eps: float | None = None) -> View:
    if not isinstance(x, View) or len(shape) != 1 or is_computed(weight):
        raise RefusedError("RMS normalisation over several dimensions")
    epsilon = torch.finfo(trace.node.meta["val"].dtype).eps if eps is None else float(eps)
    weight = None if weight is None else wide(weight)
    return trace.made("norm", (x,), trace.seen(0), x.shape, weight=weight, epsilon=epsilon, centred=False)


def power(trace: Tracer, x: Any, exponent: Any) -> Any:
    node = trace.node.args[0]
    if isinstance(x, View) and exponent == 3:
        return applied(trace, x, lambda y: y**3, f"power {exponent}")
    if isinstance(x, View) and exponent == 2 and isinstance(node, fx.Node):
        return Squares(x, node, x.shape)
    if not isinstance(x, RowSize) or is_computed(exponent):
        raise RefusedError(f"power {exponent}")
    return x.power(float(exponent))


def row_sum(trace: Tracer, x: Any, dims: Any = None, keepdim: bool = False, **more: Any) -> RowSize:
    dims = [dims] if isinstance(dims, int) else dims
    if not isinstance(x, Squares) or dims is None or [d % len(x.shape) for d in dims] != [len(x.shape) - 1] or not keepdim:
        raise RefusedError("sum over a dimension")
    return RowSize(x, (*x.shape[:-1], 1))


def vector_norm(trace: Tracer, x: Any, order: Any = 2, dims: Any = None, keepdim: bool = False, **more: Any) -> RowSize:
    if not isinstance(x, View) or order != 2:
        raise RefusedError(f"norm of order {order}")
    return row_sum(trace, power(trace, x, 2), dims, keepdim).power(0.5)


def clamp_min(trace: Tracer, x: Any, least: Any) -> Any:
    if isinstance(x, View) and not is_computed(least) and bool((wide(least) == 0).all()):
        return trace.made("relu", (x,), trace.seen(0), x.shape)
    if is_computed(least) or not isinstance(x, RowSize) or not is_number(wide(least), x):
        raise RefusedError("least number of norms of rows")
    return x.at_least(float(least))


def normalised(trace: Tracer, x: Any, size: RowSize, *, times: bool) -> View:
    """Return a tensor over the norm of its own rows: a normalisation that leaves the mean."""
    if not isinstance(x, View) or not size.normalises(x, times=times):
        raise RefusedError("product with norms of rows of another tensor")
    # x / sqrt(scale * sum + epsilon) in terms of the mean of the squares
    per_mean = size.scale * x.shape[-1]
    weight = None if per_mean == 1 else wide([per_mean**-0.5]).expand(x.shape[-1])
    epsilon = size.epsilon / per_mean
    return trace.made("norm", (x,), [size.squares.seen], x.shape, weight=weight, epsilon=epsilon, centred=False)


def scaled_norm(trace: Tracer, x: View, factor: torch.Tensor) -> View | None:
    """Return a normalisation that leaves the mean with its weight, or None where it is something else."""
    norm, width = x.source, x.shape[-1]
    if norm.kind != "norm" or norm.centred or norm.channels != width or (x.factor is not None) or (x.term is not None):
        return None
    if factor.numel() != width or factor.shape[-1:] != (width,) or norm.bias is not None:
        return None
    if x.index is not None and not bool((x.index % width == counted(width)).all()):
        return None
    weight = factor.flatten() if norm.weight is None else norm.weight * factor.flatten()
    trace.operations.append(dataclasses.replace(norm, weight=weight, node=trace.node))
    return dataclasses.replace(x, source=trace.operations[-1])


def mean(trace: Tracer, x: Any, dims: Any = None, keepdim: bool = False, **more: Any) -> View | RowSize:
    if isinstance(x, Squares):
        return dataclasses.replace(row_sum(trace, x, dims, keepdim), scale=1 / x.shape[-1])
    if not isinstance(x, View) or dims is None:
        raise RefusedError("mean of everything")
    dims = sorted(d % len(x.shape) for d in ([dims] if isinstance(dims, int) else dims))
    kept = [d for d in range(len(x.shape)) if d not in dims]
    if all(x.shape[d] == 1 for d in dims):
        # of one query, as a pooling head has it
        return x if keepdim else x.moved(lambda y: y.squeeze(tuple(dims)))
    if len(kept) != 2 or kept[0] != 0:
        raise RefusedError(f"mean over dimensions {dims} of {x.shape}")
    rows = x.moved(lambda y: y.permute(kept[0], *dims, kept[1]).flatten(1, -2))
    out = trace.made("mean", (rows,), trace.seen(0), (rows.shape[0], rows.shape[2]))
    shape = [1 if d in dims else size for d, size in enumerate(x.shape)] if keepdim else out.shape
    return out.moved(lambda y: y.reshape(tuple(shape)), in_order=True)


def pool_all(trace: Tracer, x: Any, size: Any) -> View | RowSize:
    if not isinstance(x, View) or any(s != 1 for s in ([size] if isinstance(size, int) else size)):
        raise RefusedError("pooling")
    return mean(trace, x, list(range(2, len(x.shape))), True)


HANDLERS: dict[Any, Handler] = {
    aten.layer_norm: layer_norm, aten.rms_norm: rms_norm, aten.linalg_vector_norm: vector_norm, aten.clamp_min: clamp_min,
    aten.pow: power, aten.square: lambda trace, x: power(trace, x, 2), aten.sqrt: lambda trace, x: power(trace, x, 0.5),
    aten.rsqrt: lambda trace, x: power(trace, x, -0.5), aten.reciprocal: lambda trace, x: power(trace, x, -1),
    aten.mean: mean, aten.adaptive_avg_pool1d: pool_all, aten.adaptive_avg_pool2d: pool_all,
}  # fmt: skip
