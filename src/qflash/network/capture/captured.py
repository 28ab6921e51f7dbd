"""A float network as operations, which can be computed without its own code: :class:`Captured`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree
from torch import fx, nn

from ...specification.texts import is_token, place_of
from ..operators.tokens import arrange
from .operations import BATCH, Operation, View, counted, whole


@dataclasses.dataclass(frozen=True)
class Arrangement:
    """Some tokens of (batch, tokens, channels), perhaps as a map, or several in a row.

    Attributes:
        first, count: which tokens.
        shape: (height, width) of a map, or None where they stay tokens.
        channels_first: whether a map is (batch, channels, height, width), otherwise (batch, height, width, channels).
        joined: (rows, channels) or (channels,), where several tokens are a row, or None.
    """

    first: int
    count: int
    shape: tuple[int, int] | None = None
    channels_first: bool = False
    joined: tuple[int, ...] | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return them of (batch, tokens, channels); see :func:`.operators.tokens.arrange`."""
        return arrange(x, self.first, self.count, self.shape, self.channels_first, self.joined)


@dataclasses.dataclass
class Output:
    """One output of the float network.

    Attributes:
        name: of it.
        view: what it is.
        node: of the traced graph.
        place: of it among all tensors that the model returns.
        arrangement: which tokens of ``view`` are the output, where it is not the view itself.
    """

    name: str
    view: View
    node: fx.Node
    place: int
    arrangement: Arrangement | None = None

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """Return the output of the view's values."""
        return values if self.arrangement is None else self.arrangement(values)


@dataclasses.dataclass
class Captured:
    """A float network as operations.

    Attributes:
        module: the traced graph, which runs: images to outputs, for any batch.
        operations: in order; the first is the images.
        outputs: of the network.
        select: returns the module that gives a model's outputs.
        tokens: by node of the traced graph, int64 (rows,): of which place of a text each row of the node's value is, for one
            text. Empty where there are no masks.
        read_db: SQNR in dB of the operations, computed in floating point, beside the model; of several outputs the least.
            Infinity before they are compared.
        filler: id that the model fills texts up with, where it counts places by the ids that are another; or None.
    """

    module: fx.GraphModule
    operations: list[Operation]
    outputs: list[Output]
    select: Callable[[nn.Module], nn.Module] = lambda model: model
    tokens: dict[fx.Node, torch.Tensor] = dataclasses.field(default_factory=dict)
    filler: int | None = None
    read_db: float = math.inf

    def users(self) -> dict[Operation, list[tuple[Operation, int]]]:
        """Return by operation those that take its output, and which of their inputs it is."""
        found: dict[Operation, list[tuple[Operation, int]]] = {operation: [] for operation in self.operations}
        for operation in self.operations:
            for place, view in enumerate(operation.inputs):
                found[view.source].append((operation, place))
        return found

    def pick(self, returned: Any) -> dict[str, torch.Tensor]:
        """Return the outputs, by name, of what :attr:`select`'s module returned."""
        leaves = torch.utils._pytree.tree_leaves(returned)
        return {output.name: leaves[output.place] for output in self.outputs}

    def compute(self, images: torch.Tensor, *, whole: bool = True) -> dict[Operation, torch.Tensor]:
        """Compute every operation without the model's own code.

        Args:
            images: as the model takes them, any number.
            whole: whether all outputs are returned; else those that the network's outputs are made of.

        Returns:
            By operation, (images, elements of an image).
        """
        last_use = {x.source: place for place, operation in enumerate(self.operations) for x in operation.inputs}
        kept = {output.view.source for output in self.outputs}
        computed: dict[Operation, torch.Tensor] = {}
        for place, operation in enumerate(self.operations):
            inputs = [x.evaluate(computed[x.source]) for x in operation.inputs]
            computed[operation] = _compute(operation, inputs, images).reshape(len(images), -1)
            for source in {x.source for x in operation.inputs}:
                if not whole and last_use[source] == place and source not in kept:
                    del computed[source]
        return computed

    def __call__(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        """Compute the outputs, by name, from the operations alone."""
        computed = self.compute(images, whole=False)
        return {output.name: output.of(output.view.evaluate(computed[output.view.source])) for output in self.outputs}


def rms_norm(
    x: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    """Divide rows by their root mean square; arguments are those of ``layer_norm``, of which ``shape`` has one number."""
    out = x / (x.square().mean(dim=-1, keepdim=True) + eps).sqrt()
    out = out if weight is None else out * weight
    return out if bias is None else out + bias


def _compute(operation: Operation, inputs: list[torch.Tensor], images: torch.Tensor) -> torch.Tensor:
    """Return an operation's output."""
    if operation.kind == "images":
        return images
    if operation.kind == "embedding":
        assert operation.weight is not None
        return nn.functional.embedding(inputs[0].clamp(min=0), operation.weight.to(images.device, torch.float32))
    if operation.kind == "select":
        return inputs[0][torch.arange(len(images), dtype=torch.int64, device=images.device), place_of(images, operation.token)]
    ids = images
    images = inputs[0]  # for the type and the device
    weight, bias = (None if x is None else x.to(images) for x in (operation.weight, operation.bias))
    if operation.kind in ("linear", "unrotate"):
        assert operation.matrix is not None
        return nn.functional.linear(inputs[0], operation.matrix.make().to(images), bias)
    if operation.kind == "norm":
        norm = nn.functional.layer_norm if operation.centred else rms_norm
        return norm(inputs[0], inputs[0].shape[-1:], weight, bias, operation.epsilon)
    if operation.kind == "gelu":
        return nn.functional.gelu(inputs[0], approximate=operation.approximate)
    if operation.kind == "silu":
        return inputs[0] * torch.sigmoid(inputs[0] * operation.slope)
    if operation.kind == "relu":
        return nn.functional.relu(inputs[0])
    if operation.kind in ("add", "rotary"):
        return inputs[0] + inputs[1]
    if operation.kind == "product":
        return inputs[0] * inputs[1]
    if operation.kind == "mean":
        return inputs[0].mean(dim=1)
    if operation.kind == "join":
        return torch.cat(inputs, dim=-1)
    query, key, value = inputs
    if operation.query is not None:
        query = operation.query.to(images).expand(query.shape)
    if operation.head_scale is not None:
        query = query * operation.head_scale.to(images)[:, None, None]
    mask = operation.mask
    if mask is not None:
        mask = mask.to(images).repeat(query.shape[0] // mask.shape[0], 1, 1, 1)
    is_causal = operation.is_causal
    if operation.is_padded:
        visible = is_token(ids)[:, None, None]
        if is_causal:
            square = torch.ones((query.shape[2], key.shape[2]), dtype=torch.bool, device=ids.device)
            visible, is_causal = visible & square.tril(), False
        mask = visible if mask is None else mask.masked_fill(~visible, -math.inf)
    out = nn.functional.scaled_dot_product_attention(query, key, value, mask, is_causal=is_causal, scale=operation.scale)
    return out.transpose(1, 2)


def _arrangement(view: View) -> Arrangement | None:
    """Return which tokens of its source an output is, or None where it is one token, all in their order, or something else."""
    source, shape = view.source, view.shape
    count = source.rows // BATCH
    if (view.index is None and len(shape) == 3) or len(shape) not in (3, 4) or view.factor is not None or view.term is not None:
        return None
    for channels_first in (False, True)[: len(shape) - 2]:
        rows = view.moved(lambda x: x.movedim(1, -1)) if channels_first else view
        if rows.shape[-1] != source.channels:
            continue
        places = rows.places().reshape(BATCH, -1, source.channels)
        first = int(places[0, 0, 0]) // source.channels
        tokens = count * counted(BATCH)[:, None] + first + counted(places.shape[1])
        if first < 0 or not torch.equal(places, tokens[..., None] * source.channels + counted(source.channels)):
            continue
        if len(shape) == 3 and places.shape[1] == count:
            return None
        return Arrangement(first, places.shape[1], rows.shape[1:3] if len(shape) == 4 else None, channels_first)  # type: ignore[arg-type]
    return None


def _tokens_of_rows(view: View) -> View | None:
    """Return (batch, tokens, channels) of an output whose rows are several tokens each, or None where they are not."""
    channels, shape = view.source.channels, view.shape
    if len(shape) not in (2, 3) or shape[-1] == channels or shape[-1] % channels:
        return None
    if view.factor is not None or view.term is not None:
        return None
    tokens = view.moved(lambda x: x.reshape(BATCH, -1, channels), in_order=True)
    places = tokens.places()
    first = places[..., :1]
    whole = (first >= 0) & (first % channels == 0) & (places == first + counted(channels))
    return tokens if bool(whole.all()) else None


def output_of(name: str, view: View, node: fx.Node, place: int) -> Output:
    """Return an output of the network, that a view is."""
    tokens = _tokens_of_rows(view)
    arrangement = _arrangement(view if tokens is None else tokens)
    if tokens is not None:
        joined = tuple(view.shape[1:])
        if arrangement is None:
            return Output(name, tokens, view.source.node, place, Arrangement(0, tokens.shape[1], joined=joined))
        arrangement = dataclasses.replace(arrangement, joined=joined)
    if arrangement is None:
        return Output(name, view, node, place)
    return Output(name, whole(view.source), view.source.node, place, arrangement)
