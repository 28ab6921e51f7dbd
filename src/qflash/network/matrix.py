"""The weights of a linear layer in float64, computed when they are asked for: :class:`Matrix`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch


def _count(which: torch.Tensor | slice, size: int) -> int:
    return len(range(size)[which]) if isinstance(which, slice) else len(which)


@dataclasses.dataclass(frozen=True, eq=False)
class Matrix:
    """A matrix (outputs, inputs) that is made anew each time, since all of a network's in float64 take twice its memory.

    Attributes:
        shape: (outputs, inputs).
        make: returns it, float64 on the CPU.
    """

    shape: tuple[int, int]
    make: Callable[[], torch.Tensor]

    @classmethod
    def of(cls, x: torch.Tensor) -> Matrix:
        """Return a parameter's matrix, whose dimensions behind the first are flattened."""
        kept = x.detach().flatten(1)
        return cls((kept.shape[0], kept.shape[1]), lambda: kept.to("cpu", torch.float64))

    @classmethod
    def join(cls, parts: Sequence[Matrix], dim: int) -> Matrix:
        """Return matrices one below the other (``dim`` 0) or side by side (1)."""
        sizes = list(parts[0].shape)
        sizes[dim] = sum(part.shape[dim] for part in parts)
        return cls((sizes[0], sizes[1]), lambda: torch.cat([part.make() for part in parts], dim))

    def transposed(self) -> Matrix:
        """Return the transpose."""
        return Matrix((self.shape[1], self.shape[0]), lambda: self.make().t().contiguous())

    def rows(self, which: torch.Tensor | slice) -> Matrix:
        """Return some rows."""
        return Matrix((_count(which, self.shape[0]), self.shape[1]), lambda: self.make()[which])

    def columns(self, which: torch.Tensor | slice) -> Matrix:
        """Return some columns."""
        return Matrix((self.shape[0], _count(which, self.shape[1])), lambda: self.make()[:, which])

    def scaled(self, factor: torch.Tensor | None) -> Matrix:
        """Return the matrix with its rows multiplied by float64 (outputs,), if there is such a factor."""
        return self if factor is None else Matrix(self.shape, lambda: self.make() * factor[:, None])

    def with_inputs(self, factor: torch.Tensor) -> Matrix:
        """Return the matrix for inputs that were multiplied by float64 (inputs,) before."""
        return Matrix(self.shape, lambda: self.make() * factor)

    def plus(self, other: Matrix) -> Matrix:
        """Return a sum."""
        return Matrix(self.shape, lambda: self.make() + other.make())

    def times(self, other: Matrix) -> Matrix:
        """Return a product."""
        return Matrix((self.shape[0], other.shape[1]), lambda: self.make() @ other.make())
