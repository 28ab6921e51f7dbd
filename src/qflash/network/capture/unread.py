"""Operations that are left out or cut to what is read of them: :func:`drop_unread_rows`, :func:`split_layers`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

from ...specification.layers import ACTIVATIONS
from .captured import Captured
from .operations import BATCH, Operation, View, counted, nowhere


def drop_unread_rows(captured: Captured) -> None:
    """Leave out what no output depends on in the last block: a class token's head needs no other token's query and MLP.

    Every row that stays has the values it had.
    """
    # what attention needs that was shortened: keys and values are of all tokens, and queries come of the same layer
    needed: set[Operation] = set()
    users = captured.users()
    for operation in reversed(captured.operations[1:]):
        if operation in needed:
            needed.update(view.source for view in operation.inputs)
            continue
        ends = [output for output in captured.outputs if output.view.source is operation]
        views = [user.inputs[place] for user, place in users[operation]] + [output.view for output in ends]
        count = operation.rows // BATCH
        whole = not views or any(view.index is None for view in views)
        if operation.kind in ("mean", "join") or (whole and operation.kind != "attention"):
            continue
        if whole:
            return
        read = torch.cat([view.index[: view.shape[0] // BATCH].flatten() for view in views if view.index is not None])
        keep = (read[read >= 0] // operation.channels).unique()
        heads = operation.inputs[0].shape if operation.kind == "attention" else (BATCH,)
        # the first tokens alone, where that saves much
        few = 2 * len(keep) <= count and torch.equal(keep, counted(len(keep)))
        if not few or operation.inputs[0].source.kind == "images" or heads[0] != BATCH:
            if operation.kind == "attention":
                return
            continue
        if operation.kind == "attention":
            if operation.query is not None or operation.inputs[0].source.kind not in ("linear", "rotary"):
                return
            operation.inputs[0] = operation.inputs[0].moved(_queries_of(keep))
            needed.update(view.source for view in operation.inputs)
            operation.mask = None if operation.mask is None else operation.mask[:, :, keep]
        else:
            fewer = [x.moved(_rows_of(count, keep)) for x in operation.inputs]
            if any(x.index is not None and bool((x.index < 0).all()) for x in fewer):
                continue  # what a lone block makes of its class token, a constant: no part of a stream
            operation.inputs = fewer
        operation.rows = BATCH * len(keep)
        position = nowhere(count)
        position[keep] = counted(len(keep))

        def renumbered(view: View, operation: Operation = operation, position: torch.Tensor = position) -> View:
            assert view.index is not None
            row, column = view.index // operation.channels, view.index % operation.channels
            image, row = row // len(position), position[row % len(position)]
            index = (image * (operation.rows // BATCH) + row) * operation.channels + column
            return dataclasses.replace(view, index=torch.where(view.index < 0, -1, index))

        for user, place in users[operation]:
            user.inputs[place] = renumbered(user.inputs[place])
        for output in ends:
            output.view = renumbered(output.view)


def split_layers(captured: Captured) -> None:
    """Make a layer of its own of those channels of a linear layer that an activation takes, where attention takes others.

    Blocks that compute attention and MLP next to each other have one layer before both.
    """
    for layer, users in captured.users().items():
        if layer.kind != "linear" or layer.inputs[0].source.kind == "images":
            continue
        if not any(user.kind in ("attention", "norm", "rotary") for user, _ in users):
            continue
        for user, place in users:
            view = user.inputs[place]
            rows = view.places().reshape(-1, view.shape[-1])
            columns = rows[0]
            if user.kind not in ACTIVATIONS or len(rows) != layer.rows or len(columns) == layer.channels:
                continue
            constants = view.constants_of_rows()
            if constants is None or not torch.equal(rows, layer.channels * counted(len(rows))[:, None] + columns):
                continue
            made = layer.affine.rows(columns).then(*constants)
            alone = dataclasses.replace(
                layer, node=user.seen[0], channels=len(columns), inputs=list(layer.inputs), seen=list(layer.seen),
                matrix=made.matrix, bias=made.bias,
            )  # fmt: skip
            captured.operations.insert(captured.operations.index(user), alone)
            user.inputs[0] = View(alone, view.shape)


def _queries_of(keep: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what takes some tokens of (batch, heads, tokens, channels)."""
    return lambda x: x[:, :, keep]


def _rows_of(count: int, keep: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what takes some of an image's rows of (..., channels)."""
    return lambda x: x.reshape(BATCH, count, x.shape[-1])[:, keep].flatten(0, 1)


def used_operations(operations: Sequence[Operation], outputs: Sequence[View]) -> list[Operation]:
    """Return the operations that outputs depend on, and the images.

    A linear layer on another one, whose output is a residual stream as well, takes the stream.
    """
    used = {operations[0], *(view.source for view in outputs)}
    streams: set[Operation] = set()
    for operation in reversed(operations):
        if operation in used:
            used.update(view.source for view in operation.inputs)
            if operation.kind in ("add", "norm"):
                streams.update(view.source for view in operation.inputs)
    merged = [each for each in operations if each in used and each.apart and each.apart.view.source in streams]
    for operation in merged:
        assert operation.apart is not None
        alone, operation.apart = operation.apart, None
        operation.inputs, operation.seen = [alone.view], alone.seen
        operation.matrix, operation.bias = alone.layer.matrix, alone.layer.bias
    return used_operations(operations, outputs) if merged else [each for each in operations if each in used]
