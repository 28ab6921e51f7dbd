"""Query, key and value of attention: which channels of linear layers they are, and the nodes that make them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from ...specification.rotary import ONE, pack_turns
from .. import conversion as cv
from ..capture.operations import Operation, View, counted
from ..conversion import Grid
from ..float_parts import FloatTwin
from ..matrix import Affine
from ..modules import Linear
from ..operators.rotary import Rotary
from .builder import Builder, Ranges
from .inputs import float_norm, norm_kind
from .layers import fill_layer
from .rotary import Positions, common_positions, positions_of
from .rows import refusal


@dataclasses.dataclass(eq=False)
class Part:
    """Query, key or value of attention: some channels of a linear layer.

    Attributes:
        linear, norm: operations; the second may be None.
        tokens: int64, rows of an image (or window) of the layer.
        columns: int64 (heads, channels): channels of the layer.
        layer: those channels of it.
        positions: rotary ones behind them, in whose order the channels are, or None.
    """

    linear: Operation
    norm: Operation | None
    tokens: torch.Tensor
    columns: torch.Tensor
    layer: Affine
    positions: Positions | None = None

    @property
    def order(self) -> torch.Tensor | slice:
        """Which of a normalisation's channels :attr:`columns` are."""
        return slice(None) if self.positions is None else self.positions.order

    def float_norm(self) -> FloatTwin:
        """Return the normalisation, its channels in the order of :attr:`columns`."""
        assert self.norm is not None
        found: Any = float_norm(self.norm)
        return FloatTwin(found.weight[self.order], found.bias[self.order], found.epsilon)

    def ends(self, ranges: Ranges) -> cv.Ends:
        """Return the ends of the ranges that attention takes, (heads, channels), or (1, channels) behind a normalisation."""
        if self.positions is None:
            return self.ends_before_positions(ranges)
        made = ranges[self.positions.seen]
        return made.low.view(self.columns.shape), made.high.view(self.columns.shape)

    def ends_before_positions(self, ranges: Ranges) -> cv.Ends:
        """Return the same of what rotary positions take."""
        if self.norm is None:
            made = ranges[self.linear.node]
            return made.low[self.columns], made.high[self.columns]
        made = ranges[self.norm.node]
        return made.low[self.order][None], made.high[self.order][None]


def part_of(view: View, user: Operation, like: Positions | None = None) -> Part:
    """Return the linear layer behind query, key or value, and which of its channels each head takes.

    Args:
        view: (batch, heads, tokens, channels).
        user: attention.
        like: of a query, the keys' rotary positions.
    """
    batch, _, _, width = view.shape
    norm = positions = None
    if view.source.kind == "rotary":
        positions, view = positions_of(view, user, like)
    if view.source.kind == "norm":
        norm = view.source
        # (batch, heads, tokens, channels) of rows (batch x heads x tokens), in any order
        inner, outer = norm.inputs[0].places().reshape(norm.rows, norm.channels), view.places()
        rows = outer // norm.channels
        if not bool((outer % norm.channels == counted(width)).all()):
            raise refusal(user, "heads of query or key are not what was normalised")
        view = View(norm.inputs[0].source, view.shape, inner[rows[..., 0]])
        if norm.inputs[0].factor is not None or norm.inputs[0].term is not None:
            raise refusal(norm, "constants stand before it")
    linear = view.source
    if linear.kind != "linear":
        raise refusal(user, f"its input comes of {linear.kind} of {linear.name or 'the model'}, no linear layer")
    places = view.places()
    row, column = places // linear.channels, places % linear.channels
    per_batch = linear.rows // batch
    some = row[0, 0, :, 0]
    same = (row == some[None, None, :, None] + per_batch * counted(batch)[:, None, None, None]).all()
    if int(places.min()) < 0 or linear.rows % batch or not bool(same) or not bool((some.diff() > 0).all()):
        raise refusal(user, "tokens are rearranged between its linear layers and its scores")
    if not bool((column == column[:1, :, :1]).all()):
        raise refusal(user, "heads take different channels for different tokens")
    columns = column[0, :, 0] if positions is None else column[0, :, 0][:, positions.order]
    return Part(linear, norm, some, columns, linear.affine.rows(columns.flatten()), positions)


def add_heads(net: Builder, user: Operation, prefix: str, source: str, parts: Sequence[Part]) -> Heads:
    """Add the nodes between the normalisation before attention and attention, empty.

    Args:
        net: the network.
        user: attention.
        prefix: of the nodes' names.
        source: node whose output the linear layers take.
        parts: key and value, and the query before them where it is no constant.
    """
    is_plain = all(part.norm is None and part.positions is None for part in parts)
    return (Heads if is_plain else HeadsApart)(net, user, prefix, source, parts)


class Heads:
    """Query, key and value by one linear layer, whose int8 outputs attention takes.

    Attributes:
        names: of the nodes that attention takes.
    """

    names: list[str]

    def __init__(self, net: Builder, user: Operation, prefix: str, source: str, parts: Sequence[Part]) -> None:
        self.net, self.parts = net, parts
        self.layer = Affine.join([part.layer for part in parts])
        self.add(user, prefix, source)

    def add(self, user: Operation, prefix: str, source: str) -> None:
        """Add the nodes, empty; arguments as of :func:`add_heads`."""
        first = self.parts[0].linear
        name = first.name if all(part.linear is first for part in self.parts) else ""
        self.names = [self.add_linear(name or f"{prefix}.qkv", "int8", source, slice(None))]

    def add_linear(self, name: str, dtype: str, source: str, rows: slice) -> str:
        """Add a linear layer with some of the outputs, empty."""
        layer = self.layer.rows(rows)
        module = Linear(layer.matrix.shape[1], layer.matrix.shape[0], dtype)
        return self.net.add(name, module, source, twin=FloatTwin(layer.matrix, layer.bias))

    def fill_linear(
        self, name: str, rows: slice, grid: Grid, mean: torch.Tensor, step: torch.Tensor, *middle: torch.Tensor
    ) -> None:
        """Fill such a layer in: inputs on a grid, with a mean; outputs ``step * q + middle``."""
        fill_layer(self.net.modules[name], self.layer.rows(rows), grid, mean, step, *middle)
        self.net.grids[name] = Grid(step, *middle or [torch.zeros_like(step)])

    def fill(self, ranges: Ranges, grids: cv.AttentionGrids, grid: Grid, mean: torch.Tensor) -> None:
        """Fill the nodes in.

        Args:
            ranges: of calibration.
            grids: where query, key and value lie for attention.
            grid, mean: of the linear layers' inputs.
        """
        steps, middles = [grids.key_step, grids.value_step], [grids.key_middle, grids.value_middle]
        if len(self.parts) == 3:
            steps.insert(0, grids.query_step)
            middles.insert(0, torch.zeros_like(grids.query_step))
        self.fill_linear(self.names[0], slice(None), grid, mean, torch.cat(steps).flatten(), torch.cat(middles).flatten())


class HeadsApart(Heads):
    """Query and key in int16, for normalisations, for rotary positions, or for both; values in int8, or normalised, too.

    Normalisations have the same weights in all heads, whose rows they take in one unit. A pair of channels that positions
    rotate has a step of its own, the same for both, since what is rotated are sums of the two. The last of these nodes gives
    every channel its own int8 step and takes the key's middle off: scores are products of channels there, too.
    """

    def add(self, user: Operation, prefix: str, source: str) -> None:
        self.positions = common_positions(user, [part.positions for part in self.parts])
        query, key, value = self.parts
        self.split = 2 * query.columns.numel()
        self.both = self.add_linear(f"{prefix}.qk", "int16", source, slice(self.split))
        self.norms: list[str] = []
        if query.norm is not None:
            dtype = "int8" if self.positions is None else "int16"
            for letter, part, first in (("q", query, 0), ("k", key, self.split // 2)):
                self.norms.append(self.add_norm(part, user, f"{prefix}.{letter}_norm", dtype, self.both, first))
        taken = self.norms or [self.both]
        self.rotary: list[Rotary] = []
        if self.positions is not None:
            cos, sin = self.positions.cos, self.positions.sin
            self.rotary = [Rotary(self.split // len(taken), cos.shape) for _ in taken]
            angles = FloatTwin(cos=cos, sin=sin)
            taken = [
                self.net.add(f"{prefix}.rotary", each, name, twin=angles) for each, name in zip(self.rotary, taken, strict=True)
            ]
        dtype = "int8" if value.norm is None else "int16"
        last = self.value = self.add_linear(f"{prefix}.v", dtype, source, slice(self.split, None))
        if value.norm is not None:
            last = self.add_norm(value, user, f"{prefix}.v_norm", "int8", last, 0)
        self.names = [*taken, last]

    def add_norm(self, part: Part, user: Operation, name: str, dtype: str, source: str, first: int) -> str:
        """Add a normalisation of heads, which are channels of a node from the first on, empty; return its name."""
        assert part.norm is not None
        heads, width = part.columns.shape
        module = norm_kind(part.norm)(width, dtype, part=(first, heads))
        # a norm that is spelled out has the attention's name
        own = part.norm.name if part.norm.name != user.name else ""
        return self.net.add(own or name, module, source, twin=part.float_norm())

    def fill_norm(self, name: str, part: Part, unit: float, step: torch.Tensor, middle: torch.Tensor) -> None:
        """Fill such a normalisation in: inputs in a unit, outputs ``step * q + middle``, (1, channels)."""
        cv.finish_norm(self.net.modules[name], part.float_norm(), unit, step[0], middle[0])
        self.net.grids[name] = Grid(step[0], middle[0])

    def fill_values(self, ranges: Ranges, grids: cv.AttentionGrids, grid: Grid, mean: torch.Tensor) -> None:
        """Fill the values' nodes in; arguments as of :meth:`fill`."""
        part, rows = self.parts[-1], slice(self.split, None)
        if part.norm is None:
            self.fill_linear(self.value, rows, grid, mean, grids.value_step.flatten(), grids.value_middle.flatten())
            return
        unit = cv.unit_of(ranges[part.norm.seen[0]])
        self.fill_linear(self.value, rows, grid, mean, cv.each([unit], part.columns.numel()))
        self.fill_norm(self.names[-1], part, unit, grids.value_step, grids.value_middle)

    def fill(self, ranges: Ranges, grids: cv.AttentionGrids, grid: Grid, mean: torch.Tensor) -> None:
        parts, made = self.parts[:2], self.net.grids
        self.fill_values(ranges, grids, grid, mean)
        # where query and key lie for attention, and before their positions
        after = [grids.query_step, grids.key_step]
        middles = [torch.zeros_like(grids.query_step), grids.key_middle]
        steps, before = after, middles
        if self.positions is not None:
            steps = [cv.pair_steps(*part.ends_before_positions(ranges)).expand(part.columns.shape) for part in parts]
            before = [torch.zeros_like(step) for step in steps]
        unit = torch.cat(steps).flatten()
        if self.norms:
            units = [cv.unit_of(ranges[part.norm.seen[0]]) for part in parts if part.norm is not None]
            unit = cv.each(units, self.split // 2)
            for arguments in zip(self.norms, parts, units, steps, before, strict=True):
                self.fill_norm(*arguments)
        self.fill_linear(self.both, slice(self.split), grid, mean, unit)
        if self.positions is None:
            return
        table = pack_turns((self.positions.cos * ONE).round(), (self.positions.sin * ONE).round())
        numbers = (torch.cat([x.flatten() for x in each]).chunk(len(self.rotary)) for each in (steps, after, middles))
        for name, rotary, step, behind, middle in zip(self.names, self.rotary, *numbers, strict=False):
            rotary.turns.copy_(table)
            cv.finish_rotary(rotary, step, behind, middle)
            made[name] = Grid(behind, middle)
