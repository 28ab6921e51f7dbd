"""What linear layers take: the int8 output of a node, on a grid that suits their weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import fx

from ...specification.layers import MAX_CHANNELS
from .. import conversion as cv
from ..capture.operations import Operation
from ..conversion import Grid
from ..float_parts import FloatTwin
from ..matrix import Matrix
from ..modules import Join, LayerNorm, Mean
from ..operators.narrow import Narrow
from ..operators.norms import RmsNorm
from .builder import Builder, Group, Ranges
from .rows import SOME_CONSTANT, Rows, refusal, rows_of
from .streams import gather_of, stream_of

Taken = tuple[str, Callable[[Ranges], tuple[Grid, torch.Tensor]]]
"""A node, and what fills it in and returns where its output lies, and the mean of that."""


def float_norm(norm: Operation, factor: torch.Tensor | None = None, term: torch.Tensor | None = None) -> FloatTwin:
    """Return weight, bias and epsilon of a normalisation, with what is multiplied and added behind it."""
    weight = torch.ones(norm.channels, dtype=torch.float64, device="cpu") if norm.weight is None else norm.weight
    bias = torch.zeros(norm.channels, dtype=torch.float64, device="cpu") if norm.bias is None else norm.bias
    if factor is not None:
        weight, bias = weight * factor, bias * factor
    return FloatTwin(weight, bias if term is None else bias + term, norm.epsilon)


@dataclasses.dataclass(eq=False)
class Norm:
    """The node of a normalisation.

    Attributes:
        node: its name.
        module: of it.
        twin: what it stands for in floating point.
        group: of its input.
    """

    node: str
    module: LayerNorm
    twin: FloatTwin
    group: Group

    def fill(self, step: torch.Tensor | float, middle: torch.Tensor | float = 0.0) -> None:
        """Fill it in, with outputs ``step * q + middle``."""
        cv.finish_norm(self.module, self.twin, self.group.unit, step, middle)


def norm_kind(norm: Operation) -> type[LayerNorm]:
    """Return the operator of a normalisation."""
    return LayerNorm if norm.centred else RmsNorm


def norm_module(norm: Operation, dtype: str, gather: torch.Tensor | None, single: bool = False) -> LayerNorm:
    """Return the empty module of a normalisation, of all tokens or those that ``gather`` says."""
    if norm.channels > MAX_CHANNELS:
        raise refusal(norm, f"it has {norm.channels} channels, more than {MAX_CHANNELS}")
    module = norm_kind(norm)(norm.channels, dtype, None if gather is None else gather.shape, single)
    if gather is not None and module.gather is not None:
        module.gather.copy_(gather)
    return module


def add_norm(
    net: Builder, rows: Rows, user: Operation, dtype: str, *residual: str, single: bool = False, suffix: str = "",
) -> Norm:  # fmt: skip
    """Add the normalisation whose rows a linear layer (or a mean, a sum, or the output) takes, in the order it takes them.

    Args:
        net: the network.
        rows: of the normalisation.
        user: what takes them.
        dtype: of the output.
        residual: the node to which a sum adds it.
        single: whether the output is one token, (batch, channels).
        suffix: of the node's name.
    """
    operation = rows.source
    if operation.kind != "norm":
        raise refusal(user, f"it takes what {operation.kind} of {operation.name or 'the model'} computes, not a normalisation")
    stream, before = stream_of(net, operation.inputs[0], operation.seen[0], operation)
    if not rows.has_all_columns:
        raise refusal(user, "it takes some channels of a normalisation")
    if rows.table.shape[1] > 1:
        where = "on both sides of" if before.table.shape[1] > 1 else "behind"
        raise refusal(user, f"tokens are merged {where} a normalisation")
    if rows.has_constant_rows:
        raise refusal(user, SOME_CONSTANT)
    # rows of the normalisation, each made of rows of the stream
    before = dataclasses.replace(before, table=before.table[rows.table[:, 0]])
    module = norm_module(operation, dtype, gather_of(stream, before), single and not stream.is_flat)
    twin = float_norm(operation, rows.factor, rows.term_of_all(user, "position embeddings are added behind a normalisation"))
    name = net.add((operation.name or "norm") + suffix, module, stream.node, *residual, twin=twin)
    return Norm(name, module, twin, stream.group)


def take(
    net: Builder, rows: Rows, user: Operation, seen: fx.Node, matrix: Matrix, layer: str, *, single: bool = False
) -> Taken:  # fmt: skip
    """Return the node whose int8 output a linear layer takes, made if need be, and what fills it in.

    Args:
        net: the network.
        rows: that the layer takes.
        user: the layer.
        seen: node of the traced graph with its input.
        matrix: of the layer.
        layer: of :data:`.conversion.SPREADS`.
        single: whether the layer takes one token of an image, (batch, channels).
    """
    net.watch(seen)
    source, spread = rows.source, cv.SPREADS[layer]
    # a head takes one token an image: too few rows for a covariance, and a range that has to be wider
    net.observed[seen] |= layer != "head"
    room = cv.HEAD_ROOM if layer == "head" else 1.0
    if source in net.values:
        if not rows.is_plain:
            where = f"{source.kind} of {source.name or 'the model'}"
            raise refusal(user, f"constants are added to, or multiplied with, what {where} computes before it")
        if rows.table.shape[1] != 1 or not rows.has_all_columns:
            raise refusal(user, f"it takes a part of what {source.kind} of {source.name or 'the model'} computes")
        node = made = net.values[source]
        if not rows.is_whole:
            node = net.first(made, rows.table[:, 0], user)
        return node, lambda ranges: (ranges[seen].on(net.grids[made]), ranges[seen].mean)
    if net.is_open(source):
        norm = add_norm(net, rows, user, "int8", single=single)
        net.references[norm.node] = rows.view, None

        def fill_norm(ranges: Ranges) -> tuple[Grid, torch.Tensor]:
            inputs = ranges[seen] if room == 1.0 else ranges[seen].widened(room)
            grid = net.grids[norm.node] = spread.grid(inputs, matrix.make())
            norm.fill(grid.step, grid.middle)
            return ranges[seen].on(grid), ranges[seen].mean

        return norm.node, fill_norm
    stream, there = stream_of(net, rows.view, seen, user)
    module: Mean | Narrow
    if rows.table.shape == (1, 1) and single and not stream.is_flat:
        # one token of the residual stream, whose mean is itself
        module = Mean(1, stream.channels, "int8", int(there.table[0, 0]))
        name = net.add(f"{stream.node}_token", module, stream.node, twin=FloatTwin())
    else:
        gather = gather_of(stream, there)
        module = Narrow(stream.channels * there.table.shape[1], None if gather is None else gather.shape)
        if gather is not None and module.gather is not None:
            module.gather.copy_(gather)
        name = net.add(f"{user.name or stream.node}_input", module, stream.node, twin=FloatTwin(), shows=rows.view)

    def fill(ranges: Ranges) -> tuple[Grid, torch.Tensor]:
        inputs = ranges[seen].widened(room)
        grid = net.grids[name] = spread.grid(inputs, matrix.make())
        cv.finish_mean(module, torch.full_like(grid.step, stream.group.unit), grid.step, grid.middle)
        return grid, ranges[seen].mean

    return name, fill


def take_joined(net: Builder, layers: Sequence[tuple[Operation, Matrix]], kind: str, *, single: bool = False) -> Taken:
    """Return what :func:`take` does for layers that become one, which takes the inputs of all, one behind the other.

    Args:
        net: the network.
        layers: with their weights. Each takes one tensor, or several that are joined.
        kind: of :data:`.conversion.SPREADS`; heads make an output.
        single: whether heads that take one token of an image make (batch, channels) of it.
    """
    taken: list[Taken] = []
    for layer, matrix in layers:
        inner = layer.inputs[0].source
        pieces = [(layer.inputs[0], layer.seen[0])]
        if inner.kind == "join":
            joined = rows_of(layer.inputs[0], layer)
            if not joined.is_whole:
                raise refusal(layer, "it takes some of several tensors")
            if not joined.is_plain:
                raise refusal(
                    layer, "constants that differ from token to token are added to, or multiplied with, joined tensors"
                )
            pieces = list(zip(inner.inputs, inner.seen, strict=True))
        first = 0
        for view, seen in pieces:
            part = matrix.columns(slice(first, first + view.shape[-1]))
            first += view.shape[-1]
            rows, is_head = rows_of(view, layer), kind == "head"
            if is_head and len(rows.table) != 1 and len(view.shape) == 2:
                raise refusal(layer, f"it takes {len(rows.table)} tokens of an image")
            taken.append(take(net, rows, layer, seen, part, kind, single=single and len(rows.table) == 1))
    if len(taken) == 1:
        return taken[0]
    net.require_one_shape([name for name, _ in taken], layers[0][0])
    source = net.add(f"{layers[0][0].name or 'output'}_join", Join(), *(name for name, _ in taken))

    def fill(ranges: Ranges) -> tuple[Grid, torch.Tensor]:
        grids, means = zip(*(grid_of(ranges) for _, grid_of in taken), strict=True)
        net.grids[source] = cv.side_by_side(grids)
        return net.grids[source], torch.cat(means)

    return source, fill
