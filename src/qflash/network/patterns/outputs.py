"""What stands behind the blocks: the token of a text, means over tokens, and the network's outputs."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import fx

from .. import conversion as cv
from ..capture.captured import Output
from ..capture.operations import BATCH, Operation, UnsupportedError, View, counted
from ..conversion import Grid
from ..float_parts import FloatTwin
from ..graph import IMAGES
from ..matrix import Matrix
from ..modules import Linear, Mean, WideLinear, Widen
from ..operators.select_token import SelectToken
from ..operators.tokens import Tokens
from .builder import Builder, Ranges, Stream
from .inputs import add_norm, take_joined
from .layers import summands
from .rows import SOME_CONSTANT, Rows, refusal, rows_of
from .streams import stream_of


def lower_select(net: Builder, operation: Operation) -> None:
    """The token that stands for a text, of the stream before the last normalisation."""
    stream, rows = stream_of(net, operation.inputs[0], operation.seen[0], operation)
    if not rows.is_whole or stream.is_flat:
        raise refusal(operation, "it takes some tokens of the residual stream")
    name = net.add(_below(operation, "select"), SelectToken(operation.token), stream.node, IMAGES)
    net.begin(operation, name, stream.group)


def _below(operation: Operation, name: str) -> str:
    return f"{operation.name}.{name}".lstrip(".")


# --- means ------------------------------------------------------------------------------------------------------


def lower_mean(net: Builder, operation: Operation) -> None:
    """A mean over tokens: of a normalisation behind the blocks, or of the stream before one."""
    view = operation.inputs[0]
    rows = rows_of(view, operation)
    kinds = net.kinds_behind(operation)
    if rows.table.shape[1] != 1 or not rows.has_all_columns or len(kinds) != 1:
        raise refusal(operation, net.stands_before(operation))
    is_open = net.is_open(rows.source)
    if not is_open:
        # in rows of the stream, which may have class tokens that patches have not
        stream, rows = stream_of(net, view, operation.seen[0], operation)
    tokens = rows.table[:, 0].sort().values
    first = int(tokens[0])
    if first < 0:
        raise refusal(operation, SOME_CONSTANT)
    if not torch.equal(tokens, counted(len(tokens), first)):
        raise refusal(operation, "it averages tokens that do not follow each other")
    matrix, seen = _taken_of_mean(net, operation)
    if is_open:
        _mean_of_norm(net, operation, rows, (len(tokens), first), matrix, seen)
        return
    if not kinds <= {"norm", "output", "unrotate"} and matrix is None:
        raise refusal(operation, "only a normalisation, a linear layer or an output can follow it")
    module = Mean(len(tokens), operation.channels, "int16" if matrix is None else "int8", first)
    name = net.add(_below(operation, "mean"), module, stream.node, twin=FloatTwin())
    if matrix is not None and seen is not None:
        net.values[operation] = name
        net.watch(seen)
    else:
        group = net.group()
        net.begin(operation, name, group)

    @net.fills
    def fill(ranges: Ranges) -> None:
        if matrix is None or seen is None:
            unit = cv.each([stream.group.unit], operation.channels)
            cv.finish_mean(module, unit, unit * (group.unit / stream.group.unit))
            return
        inputs = ranges[seen]
        grid = net.grids[name] = Grid(cv.SPREADS["head"].steps(inputs.half * cv.HEAD_ROOM, matrix.make()), inputs.middle)
        cv.finish_mean(module, torch.full_like(grid.step, stream.group.unit), grid.step, grid.middle)


def _mean_of_norm(
    net: Builder, operation: Operation, rows: Rows, tokens: tuple[int, int], matrix: Matrix | None, seen: fx.Node | None
) -> None:
    """Add a normalisation and the mean of its tokens.

    Args:
        net: the network.
        operation, rows: the mean, and what it takes.
        tokens: how many, and the first of them.
        matrix, seen: see :func:`_taken_of_mean`.
    """
    kinds = net.kinds_behind(operation)
    if kinds not in ({"linear"}, {"join"}, {"output"}, {"unrotate"}):
        raise refusal(operation, net.stands_before(operation))
    # a join that nothing takes is an output, which is refused there
    if matrix is None and any(user.kind == "linear" or net.users[user] for user, _ in net.users[operation]):
        raise refusal(operation, "several linear layers take it, and not all of them take it alone")
    source = rows.source
    every = dataclasses.replace(rows, table=counted(source.rows // BATCH)[:, None])
    norm, term = add_norm(net, every, operation, "int16"), rows.term_of_all(operation, "what is added to tokens differs")
    dtype = "int8"
    if matrix is None:
        dtype = "int32" if seen is None else "int16"
    module = Mean(tokens[0], operation.channels, dtype, tokens[1])
    node = net.values[operation] = net.add(_below(operation, "mean"), module, norm.node, twin=FloatTwin())
    net.watch(source.node, *(() if seen is None else (seen,)))

    @net.fills
    def fill(ranges: Ranges) -> None:
        inputs = None if seen is None else ranges[seen]
        weight = None if matrix is None else matrix.make()
        made = ranges[source.node].with_constants(rows.factor, term)
        grid, scale, net.grids[norm.node] = cv.fill_norm_mean(
            norm.module, module, norm.twin, made, inputs, norm.group.unit, weight
        )
        if grid is None:
            net.scales[node] = scale
        else:
            net.grids[node] = grid


def _taken_of_mean(net: Builder, operation: Operation) -> tuple[Matrix | None, fx.Node | None]:
    """Return the weights of the one linear layer behind a mean, perhaps with other tensors beside it, and what it takes.

    Those of several layers that take the mean alone are one below the other: one grid has to suit them all. There are no
    weights where an output is taken out of a rotated stream, and nothing where the mean is an output.
    """
    if (behind := net.layer_behind(operation)) is not None:
        layer, seen, columns = behind
        return layer.affine.matrix.columns(columns), seen
    layers = [user for user, _ in net.users[operation]]
    if net.kinds_behind(operation) == {"linear"} and all(x.affine.matrix.shape[1] == operation.channels for x in layers):
        return Matrix.join([x.affine.matrix for x in layers], 0), layers[0].seen[0]
    return None, net.users[operation][0][0].seen[0] if net.only_kind(operation) == "unrotate" else None


# --- outputs ----------------------------------------------------------------------------------------------------


def lower_output(net: Builder, output: Output) -> str:
    """Return the node that makes an output."""
    shape = output.view.shape
    if len(shape) == 1:
        raise UnsupportedError(f"output {output.name!r} must have shape (batch, channels), has (batch)")
    node = _made(net, output)
    if node in net.flat and len(shape) != 2:
        shown = ", ".join(map(str, shape[1:]))
        raise UnsupportedError(f"output {output.name!r} must have shape (batch, channels), has (batch, {shown}) of one row")
    if (tokens := output.arrangement) is None:
        return node
    made = Tokens(tokens.first, tokens.count, tokens.shape, tokens.channels_first, tokens.joined)
    return _arranged(net, output, made, node)


def drop_tokens(net: Builder, output: Output, node: str, tokens: int) -> str:
    """Return a node that makes (batch, channels) of one token of an image: a layer behind a pooling by attention, say."""
    source = output.view.source
    if tokens not in (1, source.rows // BATCH):
        raise refusal(source, f"the output takes one of {tokens} tokens")
    first = 0 if tokens == 1 else int(rows_of(output.view, source).table[0, 0])
    return _arranged(net, output, Tokens(first, 1, joined=output.view.shape[1:]), node)


def _arranged(net: Builder, output: Output, made: Tokens, node: str) -> str:
    name = net.add(output.name, made, node)
    net.fills(lambda ranges: net.scales.__setitem__(name, net.scales[node]))
    return name


def _made(net: Builder, output: Output) -> str:
    """Return the node that makes the tokens of an output, which may be arranged otherwise."""
    source, shape = output.view.source, output.view.shape
    if len(shape) > 3:
        raise refusal(source, f"the output has shape (batch, {', '.join(map(str, shape[1:]))}), not tokens")
    if source.kind in ("linear", "add") and source not in net.streams:
        return _head(net, output)
    if source.kind == "mean" and source in net.values:
        rows = rows_of(output.view, source)
        if not (rows.is_whole and rows.is_plain):
            raise refusal(source, "the output is a part of it, or constants are added to it or multiplied with it")
        return net.values[source]
    if source.kind == "unrotate":
        return _unrotate(net, source)
    if net.is_open(source):
        norm = add_norm(net, rows_of(output.view, source), source, "int32", single=_is_single(output.view, source))
        net.watch(source.node)

        @net.fills
        def fill(ranges: Ranges) -> None:
            net.scales[norm.node] = cv.feature_unit(ranges[source.node])
            norm.fill(net.scales[norm.node])

        return norm.node
    if source.kind == "join":
        raise refusal(source, "an output is several tensors side by side; outputs can name them one by one")
    stream, token = _tokens_of_stream(net, output.view, output.node, source)
    name = net.add(output.name, Widen(None if stream.is_flat else token), stream.node)
    net.fills(lambda ranges: net.scales.__setitem__(name, stream.group.unit))
    return name


def _is_single(view: View, user: Operation) -> bool:
    """Tell whether a view is one token of each image, (batch, channels)."""
    return len(view.shape) == 2 and len(rows_of(view, user).table) == 1


def _tokens_of_stream(net: Builder, view: View, seen: fx.Node, user: Operation) -> tuple[Stream, int | None]:
    """Return the stream that an output is of, and its token, or None for all."""
    stream, there = stream_of(net, view, seen, user)
    if _is_single(view, user):
        return stream, int(there.table[0, 0])
    if there.table.shape[1] > 1:
        raise refusal(view.source, "several tokens are a row of an output, with constants")
    if not there.are_all(stream.rows):
        raise refusal(view.source, "an output is some tokens of the residual stream")
    return stream, None


def _head(net: Builder, output: Output) -> str:
    """Add the last linear layer; several whose sum is the output become one, which takes the inputs of all."""
    source = output.view.source
    rows = rows_of(output.view, source)
    if rows.table.shape[1] > 1:
        raise refusal(source, "several tokens are a row of an output, with constants")
    # one row of them is taken later
    if len(output.view.shape) == 3 and not rows.are_all(source.rows // BATCH):
        raise refusal(source, "the output is some of its tokens, with constants or in another order")
    if not rows.has_all_columns:
        advice = f"; outputs=[{source.name!r}] gives all of it" if source.name else ""
        raise refusal(source, f"the output is a part of it{advice}")
    # what the sum is multiplied by does not change how its inputs are best quantised
    layers, layer = summands(dataclasses.replace(output.view, factor=None, term=None), source)
    layer = layer.then(rows.factor, rows.term_of_all(source, "what is added to tokens differs"))
    node, grid_of = take_joined(net, layers, "head", single=len(output.view.shape) == 2)
    module = Linear(layer.matrix.shape[1], layer.matrix.shape[0], "int32")
    name = net.add(layers[0][0].name or output.name, module, node, twin=FloatTwin(layer.matrix, layer.bias))

    @net.fills
    def fill(ranges: Ranges) -> None:
        net.grids[node], mean = grid_of(ranges)
        net.scales[name] = cv.convert_head(module, layer.matrix.make(), layer.bias, net.grids[node], mean)

    return name


def _unrotate(net: Builder, operation: Operation) -> str:
    """Add what rotates an output back: the stream, or what a normalisation behind it computes, in int16."""
    view, seen, layer = operation.inputs[0], operation.seen[0], operation.affine
    source = view.source
    net.watch(seen, operation.node)
    token: Any = None
    if source in net.values:
        name = net.values[source]
    elif net.is_open(source):
        single = _is_single(view, operation)
        norm = add_norm(net, rows_of(view, operation), operation, "int16", single=single, suffix="_rotated")
        name = norm.node

        @net.fills
        def fill_norm(ranges: Ranges) -> None:
            net.scales[name] = cv.unit_of(ranges[seen])
            norm.fill(net.scales[name])
    else:
        stream, place = _tokens_of_stream(net, view, seen, operation)
        name = stream.node
        if place is not None and not stream.is_flat:
            token = Mean(1, stream.channels, "int16", place)
            name = net.add(f"{stream.node}_token", token, stream.node, twin=FloatTwin())

        @net.fills
        def fill_stream(ranges: Ranges) -> None:
            net.scales[name] = stream.group.unit
            if token is not None:
                unit = cv.each([stream.group.unit], stream.channels)
                cv.finish_mean(token, unit, unit)

    matrix = layer.matrix
    module = WideLinear(matrix.shape[1], matrix.shape[0])
    node = net.add(operation.name, module, name, twin=FloatTwin(matrix, layer.bias))

    @net.fills
    def fill(ranges: Ranges) -> None:
        net.scales[node] = cv.feature_unit(ranges[operation.node])
        unit = cv.each([net.scales[name]], matrix.shape[1])
        grid = Grid(unit, torch.zeros_like(unit))
        cv.convert_back(module, matrix.make(), layer.bias, grid, ranges[seen].mean, net.scales[node])

    return node
