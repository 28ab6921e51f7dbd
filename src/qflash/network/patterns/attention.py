"""Attention: ``norm, linear(s), attention, linear``. The projection behind it comes with what takes it."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import fx

from ...specification.fixed_point import LEAST_EVEN_MAXIMUM
from ...specification.quantization import bias_to_fixed
from .. import conversion as cv
from ..capture.operations import BATCH, Operation, counted, whole
from ..float_parts import FloatTwin
from ..graph import IMAGES
from ..matrix import Affine, Matrix
from ..modules import Attention, Linear
from .builder import Builder, Ranges
from .heads import Part, add_heads, part_of
from .inputs import take
from .layers import fill_layer, scaled
from .rows import Rows, are_same, refusal, rows_of

_LOST = -(2.0**20)
"""Scores that have less than this added are lost in float32's rounding."""


def lower_attention(net: Builder, operation: Operation) -> None:
    """norm, linear(s), attention."""
    batch, heads, queries, width = operation.inputs[0].shape
    tokens, constant, mask = operation.inputs[1].shape[2], operation.query, operation.mask
    projection = net.layer_behind(operation)
    if projection is None and net.only_kind(operation) != "norm":
        raise refusal(operation, "it stands before something else than one linear layer or normalisation")
    parts, rows, before = _parts_of(net, operation)
    matrix = Matrix.join([part.layer.matrix for part in parts], 0)
    source, grid_of = take(net, rows, operation, before, matrix, "qkv")
    prefix = operation.name or "attention"
    factors = [operation.scale, *([] if operation.head_scale is None else operation.head_scale.tolist())]
    if not all(0 < factor < math.inf for factor in factors):
        raise refusal(operation, f"its scores are multiplied by {min(factors):g}, and not by a number above 0")
    if operation.is_causal and mask is not None:
        raise refusal(operation, "it is causal and has a bias")
    if mask is not None and _hides_all_keys(mask):
        raise refusal(operation, "its mask hides all keys from a query")
    shape = None if mask is None else (mask.shape[0], heads, queries, tokens)
    window = tokens if batch > BATCH else 0
    module = Attention(
        heads, width, operation.scale, net.recipe.key, shape, window, 0 if constant is None else queries,
        queries if constant is None and queries != tokens else 0, operation.is_padded, operation.is_causal,
    )  # fmt: skip
    made = add_heads(net, operation, prefix, source, parts)
    twin = FloatTwin(
        mask=None if mask is None or shape is None else mask.expand(shape),
        query=None if constant is None else constant[None], head_scale=operation.head_scale,
    )  # fmt: skip
    ids = [IMAGES] if operation.is_padded else []
    node = net.add(f"{prefix}.core", module, *made.names, *ids, twin=twin, shows=whole(operation))
    after = fill_stream = None
    if projection is None:
        seen = net.users[operation][0][0].seen[0]
        fill_stream = _attention_stream(net, operation, node, seen)
    else:
        layer, seen, columns = projection
        net.values[operation], after = node, scaled(net, layer).columns(columns)
    for part in parts:
        net.watch(part.linear.node, *(() if part.norm is None else (part.norm.seen[0], part.norm.node)))
        if part.positions is not None:
            net.watch(part.positions.seen)
    net.watch(seen)

    @net.fills
    def fill(ranges: Ranges) -> None:
        ends = [part.ends(ranges) for part in parts]
        if constant is not None:
            ends.insert(0, (constant.amin(dim=1), constant.amax(dim=1)))
        grids = cv.attention_grids(*ends)
        made.fill(ranges, grids, *grid_of(ranges))
        if constant is not None and module.query is not None:
            values8 = (constant / grids.query_step[:, None]).round().clamp(-127, 127)
            module.query.copy_(values8.to(torch.int8)[None])
        grids.fill(module, operation.head_scale)
        weight = None if after is None else after.make()
        net.grids[node] = cv.fill_output(module, ranges[seen], grids.value_middle.expand(heads, width).flatten(), weight)
        if fill_stream is not None:
            fill_stream(ranges)
        if mask is not None and module.bias is not None:
            module.bias.copy_(bias_to_fixed(mask.to(torch.float32).expand(module.bias.shape)))


def _hides_all_keys(mask: torch.Tensor) -> bool:
    """Tell whether a mask, as of :class:`.operations.Operation`, leaves a query no key.

    Its output in the float network is 0, or a mean over all keys where they are hidden by a number beside which float32 does
    not show the scores. Rows of the least number of a type are such a mean in integers, too.
    """
    most = mask.amax(dim=-1)
    return bool(((most < _LOST) & ((most > -LEAST_EVEN_MAXIMUM) | most.isneginf())).any())


def _parts_of(net: Builder, operation: Operation) -> tuple[list[Part], Rows, fx.Node]:
    """Return query (if it is no constant), key and value, the rows that their layers take, and the traced node with these."""
    query, key, value = operation.inputs
    if key.shape != value.shape or key.shape[:2] != query.shape[:2] or key.shape[3] != query.shape[3]:
        raise refusal(operation, "query, key and value have different heads or channels")
    parts = [part_of(view, operation) for view in (key, value)]
    if operation.query is None:
        parts.insert(0, part_of(query, operation, parts[0].positions))
    normed = [part for part in parts if part.norm is not None]
    if normed and (len(parts) != 3 or normed not in (parts[:2], parts)):
        raise refusal(operation, "only query and key together, or both with the values, can be normalised")
    if any(not torch.equal(part.tokens, counted(len(part.tokens))) for part in parts):
        raise refusal(operation, "it takes some tokens of its linear layers that are not the first ones")
    if any(len(part.tokens) != part.linear.rows // query.shape[0] for part in parts[-2:]):
        raise refusal(operation, "keys or values are some tokens of those that its linear layers take")
    taken = [rows_of(part.linear.inputs[0], part.linear) for part in parts]
    # constants of one stay with what all take, those of the others become part of their layers
    chosen = 0 if are_same(taken) else next((place for place, rows in enumerate(taken) if rows.is_plain), 0)
    for part, rows in zip(parts, taken, strict=True):
        if rows.source is not taken[0].source or not torch.equal(rows.table, taken[0].table):
            raise refusal(operation, "query, key and value are not of the same tokens")
        if not torch.equal(rows.columns, taken[0].columns):
            raise refusal(operation, "query, key and value take the same channels in different orders")
        if any(user.kind not in ("attention", "norm", "rotary") for user, _ in net.users[part.linear]):
            raise refusal(operation, "query, key or value are used elsewhere, too")
        part.layer = part.layer.with_inputs(*_constants_behind(rows, taken[chosen], operation))
    return parts, taken[chosen], parts[chosen].linear.seen[0]


def _constants_behind(rows: Rows, first: Rows, user: Operation) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return by what the same rows with other constants are multiplied, and what is then added, float64 (channels,) or None.

    Args:
        rows: with constants.
        first: the same rows, with those that are there already.
        user: attention, for messages.
    """
    if rows.has_constants_of(first):
        return None, None
    why = "what is added before query, key and value differs from token to token, and not in the same way for all"
    factor, term = rows.factor, rows.term_of_all(user, why)
    own, own_term = first.factor, first.term_of_all(user, why)
    if own is not None:
        if not bool(own.all()):
            raise refusal(user, "query, key and value are multiplied by different constants, some of which are 0")
        factor = (torch.ones_like(own) if factor is None else factor) / own
    if own_term is not None:
        moved = own_term if factor is None else own_term * factor
        term = -moved if term is None else term - moved
    return factor, term


def _attention_stream(net: Builder, operation: Operation, core: str, seen: fx.Node) -> Callable[[Ranges], None]:
    """Add what brings attention's outputs, with a step a channel, to one int16 unit, which a normalisation takes.

    A linear layer whose matrix is diagonal: there is no other operator from int8 to int16.

    Args:
        net: the network.
        operation: attention.
        core: its node.
        seen: node of the traced graph with its output.

    Returns:
        What fills it in, once attention is filled in.
    """
    channels = operation.channels
    module, group = Linear(channels, channels, "int16"), net.group()
    same = Affine(Matrix((channels, channels), lambda: torch.eye(channels, dtype=torch.float64, device="cpu")))
    node = net.add(f"{core}_wide", module, core, twin=FloatTwin(same.matrix))
    net.begin(operation, node, group)
    net.see(group, seen)
    return lambda ranges: fill_layer(module, same, net.grids[core], ranges[seen].mean, group.unit)
