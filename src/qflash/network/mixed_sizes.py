"""Images of several sizes in one call: :func:`run_mixed`.

Linear layers, normalisations and gated products compute row by row. They take the tokens of all images at once, one behind the
other: a launch in place of one for each size, with the weights read once. What knows of places (patches, attention, rotary
positions, means) takes the images of one size at a time. The bits are those of each image alone, since nothing is padded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from .inputs import IMAGES
from .modules import IntegerModule, is_hooked


@dataclasses.dataclass(eq=False)
class Packed:
    """What a node gives for images of several sizes.

    Attributes:
        rows: of all images, one behind the other, (1, rows, ...).
        shapes: (batch, tokens), or (batch,), of each size.
    """

    rows: torch.Tensor
    shapes: list[torch.Size]


Value = Packed | list[torch.Tensor]
"""Of a node: rows of all sizes, or a tensor for each size."""


def _packed(value: Value) -> Packed:
    if isinstance(value, Packed):
        return value
    return Packed(torch.cat([x.flatten(end_dim=-2) for x in value])[None], [x.shape[:-1] for x in value])


def _apart(value: Value) -> list[torch.Tensor]:
    """Return a tensor for each size; of rows that are packed these are views."""
    if not isinstance(value, Packed):
        return value
    pieces = value.rows[0].split([shape.numel() for shape in value.shapes])
    return [piece.view(*shape, *piece.shape[1:]) for piece, shape in zip(pieces, value.shapes, strict=True)]


def _is_of_rows(part: IntegerModule) -> bool:
    """Tell whether a module computes row by row, whatever image a row is of, and no hook wants to see it do so."""
    if not part.by_rows or is_hooked(part) or getattr(part, "single", False):
        return False
    return part._buffers.get("gather") is None and part._buffers.get("scatter") is None


def run_packed(network: Any, batches: Sequence[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Return the outputs of several batches, each of one size, by name: what works row by row takes all rows at once.

    Args:
        network: integer.
        batches: uint8 (batch, channels, height, width) each.

    Raises:
        TypeError, ValueError: one is of another type or size.
    """
    parts = [network.parts_for(batch) for batch in batches]
    values: dict[str, Value] = {IMAGES: list(batches)}
    for index, node in enumerate(network.nodes):
        if node.name in values:
            continue
        part = parts[0][node.name]
        if _is_of_rows(part) and all(each[node.name] is part for each in parts):
            taken = [_packed(values[name]) for name in node.inputs]
            values.update(zip(node.inputs, taken, strict=True))
            after = network.product_of(index, parts[0])
            if after is None:
                out = part(*(x.rows for x in taken), backend=network.backend)
            else:
                out = parts[0][after].behind(part, taken[0].rows, network.backend)
            values[after or node.name] = Packed(out, taken[0].shapes)
        else:
            given = [_apart(values[name]) for name in node.inputs]
            values[node.name] = [
                each[node.name](*inputs, backend=network.backend) for each, *inputs in zip(parts, *given, strict=True)
            ]
        network.forget(values, index)
    made = {name: _apart(values[node]) for name, node in network.outputs.items()}
    return [{name: x[number] for name, x in made.items()} for number in range(len(batches))]


def run_mixed(network: Any, images: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Return the outputs of images of several sizes, by name; see :func:`run_packed`.

    Args:
        network: integer.
        images: uint8 (channels, height, width) each.

    Returns:
        In the order of the images a tensor of outputs that have one row an image, a list of tensors of others.

    Raises:
        TypeError, ValueError: there are none, or one is of another type or size.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for number, image in enumerate(images):
        if not isinstance(image, torch.Tensor) or image.dim() != 3:
            what = f"shape {tuple(image.shape)}" if isinstance(image, torch.Tensor) else type(image).__name__
            raise TypeError(f"images of a list must be tensors (channels, height, width), images[{number}] is {what}")
        groups.setdefault(tuple(image.shape), []).append(number)
    if not groups:
        raise ValueError("images must hold at least one image, got an empty list")
    batches = [torch.stack([images[number] for number in numbers]) for numbers in groups.values()]
    found = [network.run(batches[0])] if len(batches) == 1 else run_packed(network, batches)
    rows: dict[str, dict[int, torch.Tensor]] = {name: {} for name in network.outputs}
    for numbers, outputs in zip(groups.values(), found, strict=True):
        for name, out in outputs.items():
            rows[name].update(zip(numbers, out, strict=True))
    in_order = {name: [each[number] for number in range(len(images))] for name, each in rows.items()}
    return {name: torch.stack(each) if each[0].dim() == 1 else each for name, each in in_order.items()}
