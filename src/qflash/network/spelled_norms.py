"""Normalisations that a model spells out, as capture meets them: ``x / norm(x)``, ``x * rsqrt(mean(x * x) + eps)``."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import fx

MOST_FLOOR = 1e-4
"""Largest number that a row's norm may be bounded by from below: it is far below what a residual stream's unit shows."""


@dataclasses.dataclass(frozen=True, eq=False)
class Squares:
    """The squares of a tensor's elements.

    Attributes:
        view: of the tensor, a :class:`.capture.View`.
        seen: the node of the traced graph whose value it is.
    """

    view: Any
    seen: fx.Node

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor."""
        shape: tuple[int, ...] = self.view.shape
        return shape


@dataclasses.dataclass(frozen=True, eq=False)
class RowSize:
    """A number for each row of a tensor: ``(scale * sum(x**2) + epsilon) ** exponent``.

    Attributes:
        squares: of the tensor.
        scale, epsilon, exponent: see there.
    """

    squares: Squares
    scale: float
    epsilon: float = 0.0
    exponent: float = 1.0

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the numbers."""
        return (*self.squares.shape[:-1], 1)

    def plus(self, number: float) -> RowSize | None:
        """Return the numbers plus a constant, or None where that is no such number."""
        return dataclasses.replace(self, epsilon=self.epsilon + number) if self.exponent == 1 and number >= 0 else None

    def at_least(self, number: float) -> RowSize | None:
        """Return the larger of the numbers and a small constant; only rows as small as that differ from a sum of both."""
        if self.exponent != 0.5 or not 0 <= number <= MOST_FLOOR:
            return None
        return dataclasses.replace(self, epsilon=self.epsilon + number**2)

    def power(self, exponent: float) -> RowSize:
        """Return a power of the numbers."""
        return dataclasses.replace(self, exponent=self.exponent * exponent)

    def normalises(self, view: Any, *, times: bool) -> bool:
        """Tell whether a view times these numbers, or divided by them, is the tensor with its rows normalised."""
        own = self.squares.view
        if self.exponent != (-0.5 if times else 0.5) or view.source is not own.source or view.shape != own.shape:
            return False
        pairs = ((view.index, own.index), (view.factor, own.factor), (view.term, own.term))
        return all(a is b or (a is not None and b is not None and a.equal(b)) for a, b in pairs)
