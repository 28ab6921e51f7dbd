"""Residual streams, and how they begin: patches of images with positions and class tokens, or ids of tokens."""

from __future__ import annotations

import math

import torch
from torch import fx

from .. import conversion as cv
from ..capture.operations import BATCH, Operation, View, call_behind, counted, nowhere, same
from ..float_parts import FloatTwin
from ..graph import IMAGES
from ..modules import PatchEmbedding
from ..operators.token_embedding import TokenEmbedding
from .builder import Builder, Group, Ranges, Stream
from .rows import SOME_CONSTANT, Rows, refusal, rows_of


def stream_of(net: Builder, view: View, seen: fx.Node, user: Operation) -> tuple[Stream, Rows]:
    """Return the stream that a view is of, made if an embedding begins it; and the view's rows there.

    Args:
        net: the network.
        view: that ``user`` takes.
        seen: node of the traced graph with it, which the stream's unit has to hold.
        user: for messages.

    Raises:
        UnsupportedError: it is of no stream.
    """
    rows = rows_of(view, user)
    if rows.source.kind == "embedding":
        stream, rows = _embedded_ids(net, rows, user)
    elif rows.source.kind == "linear" and rows.source.inputs[0].source.kind == "images":
        stream, rows = _embedded_patches(net, rows, user)
    elif (found := net.streams.get(rows.source)) is None:
        raise refusal(user, f"it takes what {rows.source.kind} of {rows.source.name or 'the model'} computes")
    elif not same(rows.term, found.term) or rows.factor is not None or not rows.has_all_columns:
        raise refusal(user, "constants are added to, or multiplied with, the residual stream")
    elif rows.has_constant_rows:
        raise refusal(user, SOME_CONSTANT)
    else:
        stream = found
    net.see(stream.group, seen)
    return stream, rows


def gather_of(stream: Stream, rows: Rows) -> torch.Tensor | None:
    """Return which tokens of a stream are taken, or None for all in their order."""
    return None if rows.are_all(stream.rows) else rows.table


def residual_of(net: Builder, operation: Operation, place: int) -> tuple[Stream, str]:
    """Return the stream that an input of a sum is of, and the node with those of its tokens that are added to."""
    stream, rows = stream_of(net, operation.inputs[place], operation.seen[place], operation)
    if not bool((rows.table.diff(dim=0) > 0).all()):
        raise refusal(operation, "tokens of the residual stream are rearranged before the sum")
    if len(rows.table) == stream.rows:
        return stream, stream.node
    return stream, net.first(stream.node, rows.table[:, 0], operation)


# --- ids of tokens ----------------------------------------------------------------------------------------------


def _embedded_ids(net: Builder, rows: Rows, user: Operation) -> tuple[Stream, Rows]:
    if not rows.is_whole:
        raise refusal(user, "it takes some tokens, or some channels, of an embedding")
    if rows.source not in net.streams:
        _embed_ids(net, rows)
    elif not rows.has_constants_of(rows_of(net.references[net.streams[rows.source].node][0], user)):
        raise refusal(user, "tokens are used with different constants around them")
    return net.streams[rows.source], Rows(rows.view, rows.source, rows.table, rows.columns, None, None)


def _embed_ids(net: Builder, rows: Rows) -> None:
    """Add the embedding of ids: a table, and what is added to each place."""
    operation, term = rows.source, rows.term
    assert operation.weight is not None
    table = operation.weight if rows.factor is None else operation.weight * rows.factor
    if term is not None and bool((term == term[:1]).all()):
        # the same for all places, as that of the one segment
        table, term = table + term[:1], None
    vocabulary, channels = table.shape
    positions = 0 if term is None else len(term)
    module = TokenEmbedding(vocabulary, channels, positions, bool(net.captured.tokens), net.captured.filler)
    group = net.group()
    # words that calibration did not see are in the table
    group.most = float(table.abs().max()) + (0.0 if term is None else float(term.abs().max()))
    net.begin(operation, net.add(operation.name or "embed", module, IMAGES), group, rows.view)

    @net.fills
    def fill(ranges: Ranges) -> None:
        module.table.copy_(cv.to_int16(table, group.unit))
        if term is not None and module.position is not None:
            module.position.copy_(cv.to_int16(term, group.unit))


# --- patches of images ------------------------------------------------------------------------------------------


def _embedded_patches(net: Builder, rows: Rows, user: Operation) -> tuple[Stream, Rows]:
    if not rows.has_all_columns:
        raise refusal(user, "it takes some channels of patch embeddings")
    tokens = rows.table[:, 0]
    prefix = int((tokens < 0).sum())
    if not torch.equal(tokens[prefix:], counted(len(tokens) - prefix)) or rows.table.shape[1] != 1:
        raise refusal(user, "tokens are not class tokens, then patches in their order")
    if len(tokens) - prefix != rows.source.rows // BATCH:
        raise refusal(user, "it takes some of the image's patches")
    if rows.source not in net.streams:
        _embed_patches(net, rows, prefix)
    else:
        made = rows_of(net.references[net.streams[rows.source].node][0], user)
        if not rows.has_constants_of(made) or not torch.equal(rows.table, made.table):
            raise refusal(user, "patches are used with different constants around them")
    table = counted(len(tokens))[:, None]
    return net.streams[rows.source], Rows(rows.view, rows.source, table, rows.columns, None, None)


def _embed_patches(net: Builder, rows: Rows, prefix: int) -> None:
    """Add the patch embedding: patches, position embeddings, class tokens."""
    operation, term = rows.source, rows.term
    layer = operation.affine.then(rows.factor)
    patch, order = patch_size(net, operation)
    matrix = layer.matrix if order is None else layer.matrix.columns(order)
    count = len(rows.table) - prefix
    module = PatchEmbedding(net.image[0], patch, operation.channels, 0 if term is None else count, prefix)
    group = net.group()
    name = net.add(operation.name or "embed", module, IMAGES)
    view, pixels = operation.inputs[0], slice(None) if order is None else order
    images = net.captured.operations[0].node
    seen = call_behind(images, "patches", lambda images: view.evaluate(images.flatten(1))[..., pixels])
    net.observed[seen] = True

    @net.fills
    def fill(ranges: Ranges) -> None:
        covariance = ranges[seen].covariance
        cv.convert_pixels(module, matrix.make(), layer.bias, net.mean, net.deviation, group.unit, covariance)
        position = prefixes = None
        if term is not None:
            position, prefixes = term[None, prefix:], term[None, :prefix] if prefix else None
        for part, constant in ((module.position, position), (module.prefix, prefixes)):
            if part is not None and constant is not None:
                part.copy_(cv.to_int16(constant, group.unit))
        of_pixels = cv.pixel_layer(matrix.make(), layer.bias, net.mean, net.deviation)
        net.twins[name] = FloatTwin(*of_pixels, position=position, prefix=prefixes)

    net.begin(operation, name, group, rows.view)


def patch_size(net: Builder, operation: Operation) -> tuple[tuple[int, int], torch.Tensor | None]:
    """Return the (height, width) of patches that a linear layer takes, and the order of its inputs.

    Patches cut the image without overlap; pixels behind the last whole patch are left out. The order says which of the
    layer's inputs is each pixel of (channels, height, width); None where they lie so.
    """
    channels, height, width = net.image[:3]
    pixels = counted(channels * height * width).view(1, channels, height, width)
    places = operation.inputs[0].places()
    one = places[: len(places) // BATCH].reshape(-1, places.shape[-1])
    for high in range(1, height + 1):
        area = places.shape[-1] // channels
        wide = area // high
        if wide * high * channels != places.shape[-1] or (height // high) * (width // max(wide, 1)) != len(one):
            continue
        cut = pixels.unfold(2, high, high).unfold(3, wide, wide).permute(0, 2, 3, 1, 4, 5).reshape(-1, places.shape[-1])
        if torch.equal(cut, one):
            return (high, wide), None
        # the pixels of a patch in another order, the same in all patches
        order = one[0].argsort()[cut[0].argsort().argsort()]
        if torch.equal(cut, one[:, order]):
            return (high, wide), order
    raise refusal(operation, "it takes pixels, but not in patches that tile the image")


def constant_stream(net: Builder, norm: Operation, term: torch.Tensor, group: Group) -> str:
    """Add a node that gives position embeddings, for a normalisation of patches that adds them.

    It is a patch embedding whose weights are 0: no other operator gives a constant.

    Args:
        net: the network.
        norm: the normalisation.
        term: the positions, float64 (tokens, channels).
        group: in whose unit they are.
    """
    patches = norm.inputs[0].source
    if patches.kind != "linear" or patches.inputs[0].source.kind != "images":
        raise refusal(norm, "position embeddings are added behind it, and it does not take patches of the image")
    if len(term) != patches.rows // BATCH:
        raise refusal(norm, "position embeddings are added behind it, and it takes class tokens beside patches")
    patch, _ = patch_size(net, patches)
    module = PatchEmbedding(net.image[0], patch, norm.channels, len(term), 0)
    weight = torch.zeros(norm.channels, math.prod((net.image[0], *patch)), dtype=torch.float64, device="cpu")
    twin = FloatTwin(weight, position=term[None])
    name = net.add(f"{norm.name or 'norm'}_positions", module, IMAGES, twin=twin)
    net.references[name] = View(patches, (BATCH, *term.shape), nowhere(BATCH, *term.shape), term=term[None]), group

    @net.fills
    def fill(ranges: Ranges) -> None:
        cv.convert_pixels(module, weight, None, net.mean, net.deviation, group.unit, ())
        if module.position is not None:
            module.position.copy_(cv.to_int16(term, group.unit)[None])

    return name
