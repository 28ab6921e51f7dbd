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

    def with_inputs(self, factor: torch.Tensor | None) -> Matrix:
        """Return the matrix with its columns multiplied by float64 (inputs,), if there is such a factor."""
        return self if factor is None else Matrix(self.shape, lambda: self.make() * factor)

    def plus(self, other: Matrix) -> Matrix:
        """Return a sum."""
        return Matrix(self.shape, lambda: self.make() + other.make())

    def times(self, other: Matrix) -> Matrix:
        """Return a product."""
        return Matrix((self.shape[0], other.shape[1]), lambda: self.make() @ other.make())


@dataclasses.dataclass(frozen=True, eq=False)
class Affine:
    """Weights and bias of a linear layer.

    Attributes:
        matrix: (outputs, inputs).
        bias: float64 (outputs,) or None.
    """

    matrix: Matrix
    bias: torch.Tensor | None = None

    @classmethod
    def join(cls, parts: Sequence[Affine]) -> Affine:
        """Return layers of the same inputs as one, whose outputs lie one behind the other."""
        matrix = Matrix.join([part.matrix for part in parts], 0)
        if all(part.bias is None for part in parts):
            return cls(matrix)
        zeros = [torch.zeros(part.matrix.shape[0], dtype=torch.float64, device="cpu") for part in parts]
        return cls(
            matrix, torch.cat([zero if part.bias is None else part.bias for part, zero in zip(parts, zeros, strict=True)])
        )

    def rows(self, which: torch.Tensor | slice) -> Affine:
        """Return some outputs."""
        return Affine(self.matrix.rows(which), None if self.bias is None else self.bias[which])

    def then(self, factor: torch.Tensor | None = None, term: torch.Tensor | None = None) -> Affine:
        """Return the layer with its outputs multiplied and something added, float64 (outputs,) each, or None."""
        matrix, bias = self.matrix.scaled(factor), self.bias
        if bias is not None and factor is not None:
            bias = bias * factor
        if term is not None:
            bias = term if bias is None else bias + term
        return Affine(matrix, bias)

    def plus(self, other: Affine) -> Affine:
        """Return the sum of two layers of the same inputs."""
        biases = [each.bias for each in (self, other) if each.bias is not None]
        return Affine(self.matrix.plus(other.matrix), sum(biases) if biases else None)  # type: ignore[arg-type]

    def after(self, first: Affine) -> Affine:
        """Return this layer of another one's outputs as one layer."""
        return Affine(self.matrix.times(first.matrix), self._bias_after(first.bias))

    def with_inputs(self, factor: torch.Tensor | None, term: torch.Tensor | None) -> Affine:
        """Return the layer for inputs that are yet to be multiplied and added to, by float64 (inputs,) each, or None."""
        return Affine(self.matrix.with_inputs(factor), self._bias_after(term))

    def _bias_after(self, term: torch.Tensor | None) -> torch.Tensor | None:
        """Return the bias once a constant is taken out of the inputs."""
        return self.bias if term is None else self.matrix.make() @ term + (0 if self.bias is None else self.bias)
