"""A view of an operation's output as rows of it: :func:`rows_of`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from ..capture.operations import BATCH, Operation, UnsupportedError, View, counted, nowhere, same

SOME_CONSTANT = "some tokens that it takes are constants"
"""Why an operation is refused that takes rows of zeros, say, between those of another."""


def refusal(operation: Operation, why: str) -> UnsupportedError:
    """Return the error for an operation that fits into no pattern."""
    return UnsupportedError(f"{operation.kind} of {operation.name or 'the model'} has no integer form: {why}")


@dataclasses.dataclass(eq=False)
class Rows:
    """A view as rows of its source: ``row i`` is made of ``pieces`` rows, of one image after the other.

    Attributes:
        view: what it is of.
        source: the operation that makes the rows.
        table: int64 (rows of an image, pieces): rows of an image of the source, -1 where a row is constant.
        columns: int64 (channels of a piece,): channels of the source.
        factor: float64 (channels,) or None.
        term: float64 (rows of an image, channels), or None.
    """

    view: View
    source: Operation
    table: torch.Tensor
    columns: torch.Tensor
    factor: torch.Tensor | None
    term: torch.Tensor | None

    @property
    def is_whole(self) -> bool:
        """Whether these are all rows and channels of the source, in their order."""
        return self.are_all(self.source.rows // BATCH) and self.has_all_columns

    @property
    def has_all_columns(self) -> bool:
        """Whether a piece is a whole row of the source."""
        return torch.equal(self.columns, counted(self.source.channels))

    @property
    def is_plain(self) -> bool:
        """Whether nothing is multiplied or added."""
        return self.factor is None and self.term is None

    @property
    def has_constant_rows(self) -> bool:
        """Whether a row is made of no row of the source, but of a constant."""
        return bool((self.table < 0).any())

    def are_all(self, count: int) -> bool:
        """Tell whether these are ``count`` rows in their order."""
        return torch.equal(self.table, counted(count)[:, None])

    def has_constants_of(self, other: Rows) -> bool:
        """Tell whether the same is multiplied and added."""
        return same(self.factor, other.factor) and same(self.term, other.term)

    def term_of_all(self, user: Operation, why: str) -> torch.Tensor | None:
        """Return what is added to every row alike, float64 (channels,) or None.

        Raises:
            UnsupportedError: it differs from row to row, for which ``why`` is the reason.
        """
        if self.term is None:
            return None
        if not bool((self.term == self.term[:1]).all()):
            raise refusal(user, why)
        return self.term[0]


def are_same(parts: Sequence[Rows]) -> bool:
    """Tell whether views are of the same rows and channels, with the same constants."""
    first = parts[0]
    return all(
        torch.equal(part.table, first.table) and torch.equal(part.columns, first.columns) and part.has_constants_of(first)
        for part in parts
    )


def rows_of(view: View, user: Operation) -> Rows:
    """Return a view (..., channels) as rows.

    Raises:
        UnsupportedError: it is something else.
    """
    source, channels = view.source, view.shape[-1]
    per_image = source.rows // BATCH
    places = view.places().reshape(-1, channels)
    if source.rows % BATCH or len(places) % BATCH:
        raise refusal(user, "rows are shared between images")
    count = len(places) // BATCH
    first, second = places[:count], places[count : 2 * count]
    stride = per_image * source.channels
    if not torch.equal(torch.where(first < 0, first, first + stride), second):
        raise refusal(user, "images are not treated alike")
    known = first[(first >= 0).all(dim=1)]
    if not len(known):
        raise refusal(user, "it takes constants")
    row, column = known // source.channels, known % source.channels
    # where the row of the source changes, or a channel comes again, a piece ends
    new = (row[0, 1:] != row[0, :-1]) | (column[0, 1:] == column[0, 0])
    width = int(new.nonzero()[0]) + 1 if bool(new.any()) else channels
    if channels % width:
        raise refusal(user, "channels come from several rows in an irregular way")
    row, column = row.view(len(row), -1, width), column.view(len(column), -1, width)
    if not bool((row == row[..., :1]).all()) or not bool((column == column[:1, :1]).all()):
        raise refusal(user, "channels come from several rows in an irregular way")
    table = nowhere(count, channels // width)
    table[(first >= 0).all(dim=1)] = row[..., 0]
    if bool(((first < 0).any(dim=1) & (first >= 0).any(dim=1)).any()):
        raise refusal(user, "rows are constant in part")
    return Rows(view, source, table, column[0, 0], _factor(view, user), _terms(view, count, user))


def _factor(view: View, user: Operation) -> torch.Tensor | None:
    """Return the factor of each channel."""
    if view.factor is None:
        return None
    factor = view.factor.expand(view.shape).reshape(-1, view.shape[-1])
    # rows that are constants have no factor
    factor = factor[view.places().reshape(-1, view.shape[-1])[:, 0] >= 0]
    if not bool((factor == factor[:1]).all()):
        raise refusal(user, "tokens are multiplied by different factors")
    return None if bool((factor[0] == 1).all()) else factor[0].clone()


def _terms(view: View, count: int, user: Operation) -> torch.Tensor | None:
    """Return what is added to each row of an image."""
    if view.term is None:
        return None
    term = view.term.expand(view.shape).reshape(-1, view.shape[-1])
    if not torch.equal(term[:count], term[count : 2 * count]):
        raise refusal(user, "images are not treated alike")
    return term[:count].clone() if bool(term[:count].any()) else None
