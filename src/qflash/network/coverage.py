"""What of a model becomes integers, and why the rest does not, without images: :func:`network_coverage`."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..specification.recipe import DEFAULT
from .capture import capture
from .capture.operations import BATCH, UnsupportedError
from .capture.unread import drop_unread_rows, split_layers
from .outputs import OutputsOf
from .patterns import Lowering
from .rotation import rotate_streams


@dataclasses.dataclass(frozen=True)
class NetworkCoverage:
    """What :func:`qflash.quantize_model` would do with a model.

    Attributes:
        nodes: how many of each operator the integer network has; none if the model is refused.
        outputs: shape of each output for one image, by name.
        refusals: why the model is refused: each operation without an integer form with the submodule and the line of source;
            or the first that fits no pattern.
    """

    nodes: dict[str, int]
    outputs: dict[str, tuple[int, ...]]
    refusals: tuple[str, ...]

    @property
    def reasons(self) -> dict[str, int]:
        """How often each refusal comes, by the first of those that differ in numbers of blocks alone."""
        found: dict[str, tuple[str, int]] = {}
        for text in self.refusals:
            key = re.sub(r"\d+", "#", text)
            found[key] = found.get(key, (text, 0))[0], found.get(key, ("", 0))[1] + 1
        return dict(found.values())


def network_coverage(
    model: nn.Module, image: Sequence[int], outputs: Sequence[str] | OutputsOf | None = None
) -> NetworkCoverage:
    """Say what of a model becomes integers. It is traced, and nothing is calibrated; how close the integers are needs images.

    Args:
        model: as :func:`qflash.quantize_model` takes it.
        image: (channels, height, width).
        outputs: as for :func:`qflash.quantize_model`.

    Raises:
        TypeError, ValueError: ``outputs`` is not what :func:`qflash.quantize_model` takes.
    """
    parameter = next(model.parameters())
    images = torch.randn(BATCH, *image, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu")
    refusals: list[str] = []
    try:
        captured = capture(model, images.to(parameter), outputs, refusals)
        if refusals:
            return NetworkCoverage({}, {}, tuple(refusals))
        split_layers(captured)
        drop_unread_rows(captured)
        rotate_streams(captured)
        sizes: Any = tuple(image)
        network = Lowering(captured, DEFAULT, sizes).lower()
    except UnsupportedError as error:
        return NetworkCoverage({}, {}, (*refusals, str(error)))
    shapes = network.shapes()
    kinds = Counter(type(network.part(node.name)).__name__ for node in network.nodes)
    return NetworkCoverage(dict(kinds), {name: shapes[node][1:] for name, node in network.outputs.items()}, ())
