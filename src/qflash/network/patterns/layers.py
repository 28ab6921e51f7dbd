"""Linear layers, activations, gated products, and the sums of residual connections."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from ...specification.layers import ACTIVATIONS
from .. import conversion as cv
from ..capture.operations import BATCH, Operation, View, counted, nowhere, same, whole
from ..conversion import Grid, Range
from ..float_parts import FloatTwin
from ..matrix import Affine, Matrix
from ..modules import Linear
from ..operators import WITH_ACTIVATION
from ..operators.gated import Gated
from .builder import Builder, Ranges
from .inputs import Taken, add_norm, float_norm, norm_module, take, take_joined
from .rows import are_same, refusal, rows_of
from .streams import constant_stream, gather_of, residual_of, stream_of


def fill_layer(module: Linear, layer: Affine, *arguments: torch.Tensor | Grid | float) -> None:
    """Fill a linear layer in; arguments as of :func:`.conversion.quantized_linear`, from the inputs' grid on."""
    cv.fill_linear(module, layer.matrix.make(), layer.bias, *arguments)


def scaled(net: Builder, linear: Operation) -> Matrix:
    """Return the weights of a linear layer with what a sum behind it multiplies them by (layer scale)."""
    matrix, source = linear.affine.matrix, linear
    while len(users := net.users[source]) == 1 and users[0][0].kind == "add":
        user, place = users[0]
        rows = rows_of(user.inputs[place], user)
        if not rows.has_all_columns:
            raise refusal(user, "it adds some channels of a linear layer")
        matrix = matrix.scaled(rows.factor)
        if not net.is_sum(user):
            break
        source = user
    return matrix


# --- activations and gated products -----------------------------------------------------------------------------


def lower_activation(net: Builder, operation: Operation) -> None:
    """norm, linear, activation: the first half of an MLP."""
    if net.kinds_behind(operation) == {"product"}:
        return  # where it is used
    rows = rows_of(operation.inputs[0], operation)
    first = rows.source
    if first.kind != "linear" or not rows.is_whole or not rows.is_plain:
        raise refusal(operation, "it follows no linear layer")
    if net.users[first] != [(operation, 0)]:
        raise refusal(operation, "something else takes its linear layer, too")
    layer = first.affine
    if net.only_kind(operation) == "norm":
        _activation_stream(net, operation, first)
        return
    behind = net.layer_behind(operation)
    if behind is None:
        raise refusal(operation, "it stands before something else than one linear layer or normalisation")
    second, seen, columns = behind
    source, grid_of = take(net, rows_of(first.inputs[0], first), first, first.seen[0], layer.matrix, "fc1")
    module = WITH_ACTIVATION[operation.kind](layer.matrix.shape[1], layer.matrix.shape[0])
    twin = FloatTwin(layer.matrix, layer.bias, slope=operation.slope)
    node = net.values[operation] = net.add(first.name or "fc1", module, source, twin=twin, shows=whole(operation))
    net.watch(seen)
    after = scaled(net, second).columns(columns)

    @net.fills
    def fill(ranges: Ranges) -> None:
        made = ranges[seen]
        unit = cv.activation_unit(operation.kind, operation.slope, made)
        fill_layer(module, layer, *grid_of(ranges), unit)
        net.grids[node] = cv.activation_steps(module, unit, made, after.make())


def _activation_stream(net: Builder, operation: Operation, first: Operation) -> None:
    """An activation whose output a normalisation takes: a gated product whose values are 1, since that makes int16."""
    layer, ones = first.affine, torch.ones(operation.channels, dtype=torch.float64, device="cpu")
    shape = layer.matrix.shape
    constant = Affine(Matrix(shape, lambda: torch.zeros(shape, dtype=torch.float64, device="cpu")), ones)
    taken = take(net, rows_of(first.inputs[0], first), first, first.seen[0], layer.matrix, "fc1")
    names = first.name or "fc1", f"{operation.name or 'activation'}.product"
    _add_gated(
        net, operation, operation, Affine.join([layer, constant]), taken, names, lambda ranges: Range(ones, ones, ones)
    )  # fmt: skip


def lower_product(net: Builder, operation: Operation) -> None:
    """norm, linear layer(s), activation of some channels times others: the first half of a gated MLP."""
    gates = rows_of(operation.inputs[0], operation)
    activation = gates.source
    parts = [rows_of(activation.inputs[0], operation), rows_of(operation.inputs[1], operation)]
    if not gates.is_whole or not all(each.is_plain for each in (gates, *parts)):
        raise refusal(operation, "constants stand between its linear layers and it, or it takes some rows of them")
    linears = [part.source for part in parts]
    tables = [rows_of(each.inputs[0], each) for each in linears if each.kind == "linear"]
    if len(tables) != 2 or tables[0].source is not tables[1].source or not are_same(tables):
        raise refusal(operation, "gate and value are not linear layers of the same tokens")
    if not all(part.are_all(operation.rows // BATCH) for part in parts):
        raise refusal(operation, "tokens are rearranged between its linear layers and it")
    users = {user for each in linears for user, _ in net.users[each]}
    if users != {activation, operation} or len(net.users[activation]) != 1:
        raise refusal(operation, "gate or value are used elsewhere, too")
    if net.only_kind(operation) not in ("linear", "norm"):
        raise refusal(operation, f"{net.stands_before(operation)}, not one layer")
    layer = Affine.join([each.affine.rows(part.columns) for each, part in zip(linears, parts, strict=True)])
    prefix = operation.name or "mlp"
    taken = take(net, tables[0], operation, linears[0].seen[0], layer.matrix, "fc1")
    name = linears[0].name if linears[0] is linears[1] and linears[0].name else f"{prefix}.gate_value"
    net.watch(operation.seen[1])
    names = name, f"{prefix}.product"
    _add_gated(net, operation, activation, layer, taken, names, lambda ranges: ranges[operation.seen[1]])


def _add_gated(
    net: Builder, operation: Operation, activation: Operation, layer: Affine, taken: Taken, names: tuple[str, str],
    value_of: Callable[[Ranges], Range],
) -> None:  # fmt: skip
    """Add the linear layer of gates and values, and their product.

    Args:
        net: the network.
        operation: whose output it is.
        activation: of the gates.
        layer: of gates, then values.
        taken: the layer's input, see :func:`.inputs.take`.
        names: of both nodes.
        value_of: returns the range of the values.
    """
    source, grid_of = taken
    behind = net.users[operation][0][0]
    both = Linear(layer.matrix.shape[1], layer.matrix.shape[0], "int16")
    linear = net.add(names[0], both, source, twin=FloatTwin(layer.matrix, layer.bias))
    module = Gated(operation.channels, "int8" if behind.kind == "linear" else "int16", activation.kind)
    node = net.add(names[1], module, linear, twin=FloatTwin(slope=activation.slope), shows=whole(operation))
    net.watch(activation.node)
    group = after = None
    if behind.kind == "norm":
        group = net.group()
        net.begin(operation, node, group)
        net.see(group, operation.node)
    else:
        net.values[operation] = node
        net.watch(behind.seen[0])
        after = scaled(net, behind)

    @net.fills
    def fill(ranges: Ranges) -> None:
        units = cv.gated_units(activation.kind, activation.slope, ranges[activation.node], value_of(ranges))
        steps = torch.cat((torch.full_like(units.value, units.gate), units.value))
        fill_layer(both, layer, *grid_of(ranges), steps)
        net.grids[linear] = Grid(steps, torch.zeros_like(steps))
        if after is not None:
            made = ranges[behind.seen[0]]
            net.grids[node] = cv.finish_gated(module, units, cv.SPREADS["fc2"].steps(made.half, after.make()), made.middle)
        elif group is not None:
            cv.finish_gated(module, units, torch.full_like(units.value, group.unit), torch.zeros_like(units.value))


# --- streams that linear layers and normalisations begin ------------------------------------------------------------


def lower_linear(net: Builder, operation: Operation) -> None:
    """A linear layer whose output is a residual stream; others come with what takes them."""
    kinds = net.kinds_behind(operation)
    is_alone = len(kinds) == 1 and kinds <= {*ACTIVATIONS, "product", "attention", "add", "output"}
    is_gate = "product" in kinds and kinds <= {*ACTIVATIONS, "product"}
    if is_alone or is_gate or operation.inputs[0].source.kind == "images":
        return
    behind = {kind for user, _ in net.users[operation] if user.kind in ("norm", "rotary") for kind in net.kinds_behind(user)}
    if kinds <= {"norm", "attention", "rotary"} and behind and behind <= {"attention", "rotary"}:
        return
    if not kinds <= {"norm", "add", "linear", "mean", "output", "unrotate"} or kinds == {"linear"}:
        raise refusal(operation, net.stands_before(operation))
    begin_stream(net, operation)


def begin_stream(net: Builder, operation: Operation) -> None:
    """A linear layer whose output is a residual stream: patch merging, the projection of a pooling by attention."""
    layer = operation.affine
    source, grid_of = take(net, rows_of(operation.inputs[0], operation), operation, operation.seen[0], layer.matrix, "fc1")
    module = Linear(layer.matrix.shape[1], layer.matrix.shape[0], "int16")
    node = net.add(operation.name or "reduction", module, source, twin=FloatTwin(layer.matrix, layer.bias))
    group = net.group()
    net.begin(operation, node, group)
    net.fills(lambda ranges: fill_layer(module, layer, *grid_of(ranges), group.unit))


def lower_norm(net: Builder, operation: Operation) -> None:
    """A normalisation whose output is a residual stream; others come with what takes them, which chooses their grid."""
    kinds = net.kinds_behind(operation)
    is_of_heads = kinds <= {"attention", "rotary"} and operation.inputs[0].source.kind == "linear"
    if is_of_heads or net.is_branch(operation):
        return
    if not kinds & {"norm", "add"} and not any(_takes_stream(net, *user) for user in net.users[operation]):
        return
    stream, rows = stream_of(net, operation.inputs[0], operation.seen[0], operation)
    module = norm_module(operation, "int16", gather_of(stream, rows))
    group, term, twin = net.group(), _term_behind(net, operation), float_norm(operation)
    residual = [] if term is None else [constant_stream(net, operation, term, group)]
    name = net.add(operation.name or "norm", module, stream.node, *residual, twin=twin)
    view = whole(operation)
    net.begin(operation, name, group, view if term is None else view.plus(term[None])).term = term
    net.fills(lambda ranges: cv.finish_norm(module, twin, stream.group.unit, group.unit))


def _takes_stream(net: Builder, user: Operation, place: int) -> bool:
    """Tell whether an operation takes a normalisation as a stream: several tokens as one row, or a mean to normalise."""
    if user.kind == "linear":
        rows = rows_of(user.inputs[place], user)
        return rows.table.shape[1] > 1 and rows.has_all_columns
    return user.kind == "mean" and net.kinds_behind(user) == {"norm"}


def _term_behind(net: Builder, operation: Operation) -> torch.Tensor | None:
    """Return what all that take an operation's output add to its rows, float64 (rows of an image, channels), or None."""
    views = [(user.inputs[place], user) for user, place in net.users[operation]]
    views += [(output.view, operation) for output in net.captured.outputs if output.view.source is operation]
    if any(view.term is None for view, _ in views):
        return None
    found = [rows_of(view, user) for view, user in views]
    first = found[0].term
    return first if all(rows.is_whole and same(rows.term, first) for rows in found) else None


# --- residual connections -------------------------------------------------------------------------------------------


def lower_add(net: Builder, operation: Operation) -> None:
    """A residual connection: a linear layer that adds to the stream, or a normalisation behind one."""
    if net.is_sum(operation):
        return  # where it is added
    sources = [view.source for view in operation.inputs]
    branches = [place for place in (0, 1) if net.is_summand(sources[place])]
    if net.kinds_behind(operation) == {"output"} and len(branches) == 2 and operation.rows == BATCH:
        return  # two heads, of which the output is the sum
    norms = [place for place in (0, 1) if net.is_branch(sources[place])]
    if not norms and not branches:
        raise refusal(operation, "neither side is a linear layer")
    if norms and branches:
        # the layer begins a stream, to which the normalisation adds
        if sources[branches[0]].kind != "linear":
            raise refusal(operation, "it adds a normalisation to a sum of linear layers")
        begin_stream(net, sources[branches[0]])
    place = (norms or branches)[-1]
    view = operation.inputs[place]
    stream, residual = residual_of(net, operation, 1 - place)
    rows, group = rows_of(view, operation), stream.group
    if norms:
        norm = add_norm(net, rows, operation, "int16", residual)
        node, taken = norm.node, net.nodes[-1].inputs[0]
        net.fills(lambda ranges: norm.fill(group.unit))
    else:
        if rows.table.shape[1] != 1:
            raise refusal(operation, "tokens of the residual stream are rearranged before the sum")
        if not torch.equal(rows.table[:, 0].sort().values, counted(rows.source.rows // BATCH)):
            raise refusal(operation, "it does not add each token of a linear layer once")
        layers, layer = summands(view, operation)
        source, grid_of = take_joined(net, layers, "fc1")
        scatter, count = None, len(rows.table)
        if not rows.are_all(count):
            scatter = nowhere(count)
            scatter[rows.table[:, 0]] = counted(count)
        module = Linear(layer.matrix.shape[1], layer.matrix.shape[0], "int16", 0 if scatter is None else count)
        if scatter is not None and module.scatter is not None:
            module.scatter.copy_(scatter)
        twin = FloatTwin(layer.matrix, layer.bias)
        node = net.add(layers[0][0].name or "projection", module, source, residual, twin=twin)
        taken = source
        net.fills(lambda ranges: fill_layer(module, layer, *grid_of(ranges), group.unit))
    net.require_one_shape([taken, residual], operation)
    net.begin(operation, node, group)
    net.see(group, operation.node)


def summands(view: View, user: Operation) -> tuple[list[tuple[Operation, Matrix]], Affine]:
    """Return the linear layers whose sum a view is of, each with its weights times what follows, and the layer of them all.

    Args:
        view: of a linear layer, or of a sum of some.
        user: what takes it.

    Raises:
        UnsupportedError: some rows or channels are missing.
    """
    source, rows = view.source, rows_of(view, user)
    if not rows.has_all_columns:
        raise refusal(user, "it adds some channels of a linear layer")
    if source.kind == "linear":
        layers, biases = [(source, source.affine.matrix)], [source.affine.bias]
    else:
        if not rows.is_whole or not all(rows_of(each, user).is_whole for each in source.inputs):
            raise refusal(user, "it adds some rows or channels of a sum of linear layers")
        parts = [summands(each, source) for each in source.inputs]
        layers, biases = [each for found, _ in parts for each in found], [layer.bias for _, layer in parts]
    layers = [(layer, matrix.scaled(rows.factor)) for layer, matrix in layers]
    terms = [bias if rows.factor is None else bias * rows.factor for bias in biases if bias is not None]
    if (term := rows.term_of_all(user, "what is added to tokens differs")) is not None:
        terms.append(term)
    matrix = Matrix.join([matrix for _, matrix in layers], 1)
    return layers, Affine(matrix, functools.reduce(torch.add, terms) if terms else None)
