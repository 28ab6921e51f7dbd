"""Attention whose queries and keys have rotary positions, as nodes: :func:`turn_of`, :class:`TurnedHeads`.

What capture calls ``rotary`` is any sum of two views of the same rows. Here it is found to rotate pairs of channels by
angles of the tokens, in whatever order a model has its pairs. The linear layer then gives the channels of a head in the
operator's order, which no score depends on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ..specification.rotary import ONE, pack_turns
from . import conversion as cv
from .capture import BATCH, Operation, UnsupportedError, View, call_behind, counted
from .conversion import Grid
from .float_parts import FloatTwin
from .matrix import Matrix
from .modules import LayerNorm, Linear
from .operators.norms import RmsNorm
from .operators.rotary import Rotary

_ALIKE = 1e-5
"""How far cosines and sines of a pair may lie apart, and beyond 1: they were computed in float32, or narrower."""


def _refuse(user: Operation, why: str) -> UnsupportedError:
    return UnsupportedError(f"rotary positions before {user.kind} of {user.name or 'the model'} have no integer form: {why}")


@dataclasses.dataclass(frozen=True, eq=False)
class Turn:
    """Rotary positions of query or key.

    Attributes:
        order: int64 (channels,): of a head's channels the first of each pair, then the second of each.
        cos, sin: float64 (heads or 1, tokens, pairs).
        seen: node of the traced graph with the turned channels, (images, tokens, heads x channels), in that order.
    """

    order: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    seen: fx.Node

    def begins(self, other: Turn) -> bool:
        """Whether this one rotates as another does, the first of its tokens or all."""
        count, heads = self.cos.shape[1], max(len(self.cos), len(other.cos))
        return torch.equal(self.order, other.order) and all(
            torch.equal(mine.expand(heads, -1, -1), theirs[:, :count].expand(heads, -1, -1))
            for mine, theirs in ((self.cos, other.cos), (self.sin, other.sin))
        )


def turn_of(view: View, user: Operation, like: Turn | None = None) -> tuple[Turn, View]:
    """Return how a view (batch, heads, tokens, channels) of a sum of two was turned, and the view of what was turned.

    Args:
        view: of an operation that capture calls rotary.
        user: attention, for messages.
        like: how the keys were turned, whose pairs are those of queries that are not turned (a class token's).

    Raises:
        UnsupportedError: the sum is something else than pairs of channels turned by an angle.
    """
    operation = view.source
    if view.shape[0] != BATCH:
        raise _refuse(user, "tokens are in windows")
    plain, other = (view.of(each) for each in operation.inputs)
    place, partner, channels = plain.places(), other.places(), plain.source.channels
    known = partner >= 0
    if int(place.min()) < 0 or not torch.equal((place // channels)[known], (partner // channels)[known]):
        raise _refuse(user, "channels of different tokens are added")
    cos, sin = (
        torch.ones(view.shape, dtype=torch.float64, device="cpu") if x.factor is None else x.factor.expand(view.shape)
        for x in (plain, other)
    )
    cos, sin = cos, torch.where(known, sin, 0.0)
    if not torch.equal(cos, cos[:1].expand_as(cos)) or not torch.equal(sin, sin[:1].expand_as(sin)):
        raise _refuse(user, "images are turned by different angles")
    first, second = _pairs(place % channels, partner % channels, known, user, like)
    cos, sin = cos[0], sin[0]
    if not torch.allclose(cos[..., first], cos[..., second], rtol=0, atol=_ALIKE) or not torch.allclose(
        sin[..., first], -sin[..., second], rtol=0, atol=_ALIKE
    ):
        raise _refuse(user, "the two channels of a pair are not turned by one angle")
    cos, sin = cos[..., first], sin[..., second]
    if max(float(cos.abs().max()), float(sin.abs().max())) > 1 + _ALIKE:
        raise _refuse(user, "it makes channels larger")
    if all(bool((x == x[:1]).all()) for x in (cos, sin)):
        cos, sin = cos[:1], sin[:1]
    order = torch.cat((first, second))
    lead = operation.inputs[0].shape[0] // BATCH

    def turned(x: torch.Tensor) -> torch.Tensor:
        return view.evaluate(x.reshape(x.shape[0] // lead, -1))[..., order].transpose(1, 2).flatten(2)

    plain = dataclasses.replace(plain, factor=None)
    return Turn(order, cos, sin, call_behind(operation.node, "turned", turned)), plain


def _pairs(
    column: torch.Tensor, partner: torch.Tensor, known: torch.Tensor, user: Operation, like: Turn | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first and the second channel of each pair of a head, int64 (pairs,) each.

    Args:
        column, partner: int64 (batch, heads, tokens, channels), channels of the linear layer or the normalisation.
        known: whether there is a partner; channels without one for any token are paired with each other.
        user, like: see :func:`turn_of`.
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
            raise _refuse(user, "a channel is added to one of another head")
        mate[channel] = found[0]
    alone = (mate == counted(width)).nonzero().flatten()
    if like is not None:
        first, second = like.order.chunk(2)
        mate[alone] = torch.cat((second, first))[like.order.argsort()][alone]
    elif len(alone) % 2:
        raise _refuse(user, f"{len(alone)} channels of a head are not turned, which is an odd number")
    else:
        half = len(alone) // 2
        mate[alone[:half]], mate[alone[half:]] = alone[half:], alone[:half]
    alike = torch.equal(flat_column[:, mate][flat_known], flat_partner[flat_known])
    if not alike or not torch.equal(mate[mate], counted(width)):
        raise _refuse(user, "channels are not added in pairs, the same for all tokens and heads")
    first = (counted(width) < mate).nonzero().flatten()
    return first, mate[first]


class Values:
    """Nodes that give attention its values: a linear layer, and a normalisation behind it if they have one.

    Attributes:
        linear, name: the linear layer's node, and that whose output attention takes.
    """

    def __init__(
        self, lowering: Any, prefix: str, source: str, part: Any, matrix: Matrix, bias: torch.Tensor | None
    ) -> None:  # fmt: skip
        """Add the nodes, empty; arguments as of :class:`TurnedHeads`, of the values alone."""
        self.lowering, self.part, self.matrix, self.bias = lowering, part, matrix, bias
        self.layer = Linear(matrix.shape[1], matrix.shape[0], "int8" if part.norm is None else "int16")
        self.linear = self.name = lowering.add(f"{prefix}.v", self.layer, source)
        lowering.twins[self.linear] = FloatTwin(matrix, bias)
        if part.norm is not None:
            heads, width = part.columns.shape
            self.norm = (LayerNorm if part.norm.centred else RmsNorm)(width, "int8", part=(0, heads))
            self.name = lowering.add(f"{prefix}.v_norm", self.norm, self.linear)
            lowering.twins[self.name] = part.float_norm().twin()

    def fill(self, ranges: Mapping[fx.Node, cv.Range], grids: cv.AttentionGrids, grid: Grid, mean: torch.Tensor) -> None:
        """Fill the nodes in; arguments as of :meth:`TurnedHeads.fill`."""
        shape, made = self.part.columns.shape, self.lowering.grids
        step, middle = (x.expand(shape).flatten() for x in (grids.value_step, grids.value_middle))
        if self.part.norm is None:
            cv.fill_linear(self.layer, self.matrix.make(), self.bias, grid, mean, step, middle)
        else:
            # the normalisation has the same weights in all heads, whose rows it takes in one unit
            unit = cv.unit_of(ranges[self.part.norm.seen[0]])
            cv.fill_linear(self.layer, self.matrix.make(), self.bias, grid, mean, unit)
            made[self.linear] = Grid(torch.full_like(step, unit), torch.zeros_like(step))
            cv.finish_norm(self.norm, self.part.float_norm(), unit, step[: shape[1]], middle[: shape[1]])
        made[self.name] = Grid(step, middle)


class TurnedHeads:
    """Nodes between the normalisation before attention and attention: linear layers, normalisations, rotary positions.

    Query and key leave a linear layer in int16. A pair of channels has a step of its own, the same for both, since what is
    rotated are sums of the two. Behind the rotation every channel has its own int8 step and the key's middle is taken off:
    scores are products of channels there, as they are without a rotation.

    Attributes:
        names: of the nodes that attention takes.
    """

    def __init__(
        self, lowering: Any, user: Operation, prefix: str, source: str, parts: Sequence[Any], matrix: Matrix,
        bias: torch.Tensor | None,
    ) -> None:  # fmt: skip
        """Add the nodes, empty.

        Args:
            lowering: the network's :class:`.patterns.Lowering`.
            user: attention.
            prefix: of the nodes' names.
            source: node whose output the linear layer takes.
            parts: query, key and value, each a :class:`.patterns.Part`.
            matrix, bias: of the linear layer, of the three side by side.
        """
        if len(parts) != 3 or parts[2].turn is not None:
            raise _refuse(user, "only query and key together can have them")
        # queries can be those of the first tokens alone
        query, turn = parts[0].turn, parts[1].turn
        if query is None or turn is None or not query.begins(turn):
            raise _refuse(user, "query and key are turned by different angles")
        heads, width = parts[0].columns.shape
        wide = heads * width
        both, values = slice(2 * wide), slice(2 * wide, None)
        self.lowering, self.parts, self.turn = lowering, parts, turn
        self.matrix, self.bias = matrix.rows(both), None if bias is None else bias[both]
        self.linear = Linear(matrix.shape[1], 2 * wide, "int16")
        self.both = lowering.add(f"{prefix}.qk", self.linear, source)
        self.norms: list[tuple[str, LayerNorm, Any]] = []
        taken = [self.both]
        if parts[0].norm is not None:
            taken = []
            for number, part in enumerate(parts[:2]):
                assert part.norm is not None
                norm = (LayerNorm if part.norm.centred else RmsNorm)(width, "int16", part=(number * wide, heads))
                taken.append(lowering.add(part.norm.name or f"{prefix}.norm", norm, self.both))
                self.norms.append((taken[-1], norm, part.float_norm()))
                lowering.twins[taken[-1]] = self.norms[-1][2].twin()
        table = turn.cos.shape
        self.rotary = [Rotary(2 * wide // len(taken), table) for _ in taken]
        self.names = [lowering.add(f"{prefix}.rotary", each, name) for each, name in zip(self.rotary, taken, strict=True)]
        self.values = Values(lowering, prefix, source, parts[2], matrix.rows(values), None if bias is None else bias[values])
        lowering.twins[self.both] = FloatTwin(self.matrix, self.bias)
        for name in self.names:
            lowering.twins[name] = FloatTwin(cos=turn.cos, sin=turn.sin)
        for part in parts[:2]:
            assert part.turn is not None
            lowering.watch(part.turn.seen)
        self.names.append(self.values.name)

    def fill(self, ranges: Mapping[fx.Node, cv.Range], grids: cv.AttentionGrids, grid: Grid, mean: torch.Tensor) -> None:
        """Fill the nodes in.

        Args:
            ranges: of calibration.
            grids: where query, key and value lie for attention.
            grid, mean: of the linear layers' inputs.
        """
        made, wide = self.lowering.grids, self.parts[0].columns.numel()
        self.values.fill(ranges, grids, grid, mean)
        # what the rotations take, in steps of pairs: query, then key
        steps = [cv.pair_steps(*part.ends_before_turn(ranges)).expand(part.columns.shape).flatten() for part in self.parts[:2]]
        before = torch.cat(steps)
        if self.norms:
            units = [cv.unit_of(ranges[part.norm.seen[0]]) for part in self.parts[:2] if part.norm is not None]
            for (name, norm, float_norm), unit, step in zip(self.norms, units, steps, strict=True):
                cv.finish_norm(norm, float_norm, unit, step[: norm.gain.numel()])
                made[name] = Grid(step[: norm.gain.numel()], torch.zeros_like(norm.gain, dtype=torch.float64))
            before = cv.each(units, wide)
        cv.fill_linear(self.linear, self.matrix.make(), self.bias, grid, mean, before)
        made[self.both] = Grid(before, torch.zeros_like(before))
        table = pack_turns((self.turn.cos * ONE).round(), (self.turn.sin * ONE).round())
        after = torch.cat((grids.query_step.flatten(), grids.key_step.flatten()))
        middle = torch.cat((torch.zeros_like(grids.query_step).flatten(), grids.key_middle.flatten()))
        count = len(self.rotary)
        for name, rotary, *numbers in zip(
            self.names, self.rotary, *(x.chunk(count) for x in (torch.cat(steps), after, middle)), strict=False
        ):
            rotary.turns.copy_(table)
            cv.finish_rotary(rotary, *numbers)
            made[name] = Grid(numbers[1], numbers[2])
