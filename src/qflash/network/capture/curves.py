"""Activations that a model spells out, as ``0.5 * x * (1 + tanh(0.798 * (x + 0.0447 * x**3)))``: :class:`Curve`.

What is computed of each element alone is kept as a function, until it is one that has an operator.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from .operations import RefusedError, View, same
from .tracer import Step, Tracer, aten

_ALIKE = 1e-6
"""How far a function may lie from the one of an operator: models write its constants with seven digits or more."""
Function = Callable[[torch.Tensor], torch.Tensor]


@dataclasses.dataclass(frozen=True, eq=False)
class Curve(Step):
    """A function of each element of a tensor, on the way to an activation.

    Attributes:
        base: the tensor, with neither factor nor term.
        function: of its elements, float64.
        shape: of the tensor.
        node: of the traced graph, where the function is no longer a product with a number.
        what: the operation there, for a refusal.
    """

    takers = frozenset(
        (
            aten.add, aten.add_, aten.sub, aten.sub_, aten.subtract, aten.mul, aten.mul_, aten.multiply, aten.div, aten.div_,
            aten.divide, aten.true_divide, aten.tanh, aten.erf,
        )
    )  # fmt: skip
    base: View
    function: Function
    shape: tuple[int, ...]
    node: fx.Node
    what: str


def base_of(x: Any) -> tuple[View, float] | None:
    """Return the tensor that a view is a number times, and the number; None where it is something else."""
    if not isinstance(x, View) or x.term is not None:
        return None
    factors = [1.0] if x.factor is None else x.factor.unique().tolist()
    return (dataclasses.replace(x, factor=None), float(factors[0])) if len(factors) == 1 else None


def curve_of(trace: Tracer, x: Any, what: str) -> Curve:
    """Return a view, or a curve, as a curve.

    Raises:
        RefusedError: a view had more than a number multiplied; the error names ``what``.
    """
    if isinstance(x, Curve):
        return x
    if (found := base_of(x)) is None:
        raise RefusedError(what)
    base, factor = found
    return Curve(base, lambda y: factor * y, base.shape, trace.node, what)


def applied(trace: Tracer, x: Any, function: Function, what: str) -> View | Curve:
    """Return a function of a view, or of a curve."""
    curve = curve_of(trace, x, what)
    return _known(trace, dataclasses.replace(curve, function=lambda y: function(curve.function(y))))


def combined(trace: Tracer, a: Any, b: Any, function: Callable[..., torch.Tensor]) -> View | Curve | None:
    """Return a sum or a product of two, of which one is a curve, or of two views of one tensor; None where they are others."""
    if not (isinstance(a, Curve) or isinstance(b, Curve)) and (base_of(a) is None or base_of(b) is None):
        return None
    first, second = (curve_of(trace, x, "product of two computed tensors") for x in (a, b))
    one, other = first.base, second.base
    if one.source is not other.source or one.shape != other.shape or not same(one.index, other.index):
        return None
    which = second if isinstance(b, Curve) else first
    return _known(trace, dataclasses.replace(which, function=lambda y: function(first.function(y), second.function(y))))


def _known(trace: Tracer, curve: Curve) -> View | Curve:
    """Return the activation that a curve is, or the curve."""
    x = torch.linspace(-9, 9, 1801, dtype=torch.float64, device="cpu")
    values = curve.function(x)
    for approximate in ("none", "tanh"):
        if float((values - F.gelu(x, approximate=approximate)).abs().max()) < _ALIKE:
            seen = next((node for node, found in trace.env.items() if _is(found, curve.base)), None)
            if seen is not None:
                return trace.made("gelu", (curve.base,), (seen,), curve.shape, approximate=approximate)
    return curve


def _is(x: Any, base: View) -> bool:
    """Tell whether a value of the traced graph is a tensor."""
    if not isinstance(x, View) or x.source is not base.source or x.shape != base.shape:
        return False
    return x.factor is None and x.term is None and same(x.index, base.index)
