"""Rotary positions of queries and keys: :func:`positions_of`.

What capture calls ``rotary`` is any sum of two views of the same rows. Here it is found to rotate pairs of channels by
angles of the tokens, in whatever order a model has its pairs. The linear layer then gives the channels of a head in the
operator's order, which no score depends on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import fx

from ..capture.operations import BATCH, PLACES, Operation, UnsupportedError, View, call_behind, counted, place_of_rows

_ALIKE = 1e-5
"""How far cosines and sines of a pair may lie apart, and beyond 1: they were computed in float32, or narrower."""


def _refusal(user: Operation, why: str) -> UnsupportedError:
    return UnsupportedError(f"rotary positions before {user.kind} of {user.name or 'the model'} have no integer form: {why}")


@dataclasses.dataclass(frozen=True, eq=False)
class Positions:
    """Rotary positions of query or key.

    Attributes:
        order: int64 (channels,): of a head's channels the first of each pair, then the second of each.
        cos, sin: float64 (heads or 1, tokens, pairs).
        seen: node of the traced graph with the rotated channels, (images, tokens, heads x channels), in that order.
    """

    order: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    seen: fx.Node

    def begins(self, other: Positions) -> bool:
        """Whether this one rotates as another does, the first of its tokens or all."""
        count, heads = self.cos.shape[1], max(len(self.cos), len(other.cos))
        return torch.equal(self.order, other.order) and all(
            torch.equal(mine.expand(heads, -1, -1), theirs[:, :count].expand(heads, -1, -1))
            for mine, theirs in ((self.cos, other.cos), (self.sin, other.sin))
        )


def positions_of(view: View, user: Operation, like: Positions | None = None) -> tuple[Positions, View]:
    """Return how a view (batch, heads, tokens, channels) of a sum of two was rotated, and the view of what was rotated.

    Args:
        view: of an operation that capture calls rotary.
        user: attention, for messages.
        like: how the keys were rotated, whose pairs are those of queries that are not rotated (a class token's).

    Raises:
        UnsupportedError: the sum is something else than pairs of channels rotated by an angle.
    """
    operation = view.source
    if view.shape[0] != BATCH:
        raise _refusal(user, "tokens are in windows")
    plain, other = (view.of(each) for each in operation.inputs)
    place, partner, channels = plain.places(), other.places(), plain.source.channels
    if any(x.term is not None and bool(x.term.any()) for x in (plain, other)):
        raise _refusal(user, "something is added to channels before or behind them")
    known = partner >= 0
    if int(place.min()) < 0 or not torch.equal((place // channels)[known], (partner // channels)[known]):
        raise _refusal(user, "channels of different tokens are added")
    cos, sin = (
        torch.ones(view.shape, dtype=torch.float64, device="cpu") if x.factor is None else x.factor.expand(view.shape)
        for x in (plain, other)
    )
    sin = torch.where(known, sin, 0.0)
    if bool((swapped := _comes_again(place % channels) & known).any()):
        # a second channel written first * sin + second * cos, where the first one is first * cos - second * sin: the channel
        # that stands first comes again there, and its terms are exchanged
        place, partner = torch.where(swapped, partner, place), torch.where(swapped, place, partner)
        cos, sin = torch.where(swapped, sin, cos), torch.where(swapped, cos, sin)
        plain = dataclasses.replace(plain, index=place)
    if not torch.equal(cos, cos[:1].expand_as(cos)) or not torch.equal(sin, sin[:1].expand_as(sin)):
        raise _refusal(user, "images are rotated by different angles")
    first, second = _pairs(place % channels, partner % channels, known, user, like)
    cos, sin = cos[0], sin[0]
    if not torch.allclose(cos[..., first], cos[..., second], rtol=0, atol=_ALIKE) or not torch.allclose(
        sin[..., first], -sin[..., second], rtol=0, atol=_ALIKE
    ):
        raise _refusal(user, "the two channels of a pair are not rotated by one angle")
    cos, sin = cos[..., first], sin[..., second]
    if max(float(cos.abs().max()), float(sin.abs().max())) > 1 + _ALIKE:
        raise _refusal(user, "it makes channels larger")
    if all(bool((x == x[:1]).all()) for x in (cos, sin)):
        cos, sin = cos[:1], sin[:1]
    order = torch.cat((first, second))
    lead = operation.inputs[0].shape[0] // BATCH

    def rotated(x: torch.Tensor) -> torch.Tensor:
        return view.evaluate(x.reshape(x.shape[0] // lead, -1))[..., order].transpose(1, 2).flatten(2)

    plain = dataclasses.replace(plain, factor=None)
    seen = call_behind(operation.node, "rotated", rotated)
    # of texts each row is of the token that its first head is of
    rows, below = place[0, 0, :, 0] // channels, place_of_rows(plain.source, view.shape[2])
    seen.meta[PLACES] = rows if below is None else below[rows]
    return Positions(order, cos, sin, seen), plain


def _comes_again(column: torch.Tensor) -> torch.Tensor:
    """Tell of each of (..., channels) whether the same channel is among those before it in its row."""
    values, order = column.sort(dim=-1, stable=True)
    again = torch.zeros_like(column, dtype=torch.bool)
    return again.scatter(-1, order[..., 1:], values[..., 1:] == values[..., :-1])


def common_positions(user: Operation, parts: Sequence[Positions | None]) -> Positions | None:
    """Return the rotary positions of the keys of attention, or None where there are none.

    Args:
        user: attention, for messages.
        parts: those of query (if it is no constant), key and value.

    Raises:
        UnsupportedError: queries have others, or values have some.
    """
    *first, value = parts
    if all(part is None for part in parts):
        return None
    if len(first) != 2 or value is not None:
        raise _refusal(user, "only query and key together can have them")
    query, key = first
    # queries can be those of the first tokens alone
    if query is None or key is None or not query.begins(key):
        raise _refusal(user, "query and key are rotated by different angles")
    return key


def _pairs(
    column: torch.Tensor, partner: torch.Tensor, known: torch.Tensor, user: Operation, like: Positions | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first and the second channel of each pair of a head, int64 (pairs,) each.

    Args:
        column, partner: int64 (batch, heads, tokens, channels), channels of the linear layer or the normalisation.
        known: whether there is a partner; channels without one for any token are paired with each other.
        user, like: see :func:`positions_of`.
    """
    width = column.shape[-1]
    flat_column, flat_partner, flat_known = (x.reshape(-1, width) for x in (column, partner, known))
    mate = counted(width)
    for channel in range(width):
        rows = flat_known[:, channel].nonzero()
        if not len(rows):
            continue
        row = int(rows[0])
        found = (flat_column[row] == flat_partner[row, channel]).nonzero()
        if len(found) != 1:
            raise _refusal(user, "a channel is added to one of another head")
        mate[channel] = found[0]
    alone = (mate == counted(width)).nonzero().flatten()
    if like is not None:
        first, second = like.order.chunk(2)
        mate[alone] = torch.cat((second, first))[like.order.argsort()][alone]
    elif len(alone) % 2:
        raise _refusal(user, f"{len(alone)} channels of a head are not rotated, which is an odd number")
    else:
        half = len(alone) // 2
        mate[alone[:half]], mate[alone[half:]] = alone[half:], alone[:half]
    alike = torch.equal(flat_column[:, mate][flat_known], flat_partner[flat_known])
    if not alike or not torch.equal(mate[mate], counted(width)):
        raise _refusal(user, "channels are not added in pairs, the same for all tokens and heads")
    first = (counted(width) < mate).nonzero().flatten()
    return first, mate[first]
