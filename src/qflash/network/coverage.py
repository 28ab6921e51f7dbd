"""What of a model becomes integers, why the rest does not, and how close they are on drawn images: :func:`network_coverage`."""

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
from .quality import Quality
from .quantize import find_statistics, quantize_model
from .rotation import rotate_streams

DRAWN = 4
"""Images that a model is computed on."""


@dataclasses.dataclass(frozen=True)
class NetworkCoverage:
    """What :func:`qflash.quantize_model` would do with a model.

    Attributes:
        nodes: how many of each operator the integer network has; none if the model is refused.
        outputs: shape of each output for one image, by name.
        refusals: why the model is refused: each operation without an integer form with the submodule and the line of source;
            or the first that fits no pattern; or what went wrong when it was computed.
        captured_db: see :attr:`.Captured.read_db`. None if nothing was computed.
        quality: of the integer network on the same drawn images, or None.
    """

    nodes: dict[str, int]
    outputs: dict[str, tuple[int, ...]]
    refusals: tuple[str, ...]
    captured_db: float | None = None
    quality: Quality | None = None

    @property
    def reasons(self) -> dict[str, int]:
        """How often each refusal comes, by the first of those that differ in numbers of blocks alone."""
        found: dict[str, tuple[str, int]] = {}
        for text in self.refusals:
            key = re.sub(r"\d+", "#", text)
            found[key] = found.get(key, (text, 0))[0], found.get(key, ("", 0))[1] + 1
        return dict(found.values())


def drawn_images(image: Sequence[int]) -> torch.Tensor:
    """Return :data:`DRAWN` images, uint8 (images, channels, height, width), without the noise that no photograph has.

    Args:
        image: (channels, height, width).
    """
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(DRAWN, image[0], 6, 6, generator=generator, dtype=torch.float32, device="cpu")
    fine = nn.functional.interpolate(coarse, tuple(image[1:]), mode="bilinear", align_corners=True)
    fine = fine + 0.05 * torch.randn(fine.shape, generator=generator, dtype=torch.float32, device="cpu")
    return (255 * fine.clamp(0, 1)).round().to(torch.uint8)


def network_coverage(
    model: nn.Module, image: Sequence[int], outputs: Sequence[str] | OutputsOf | None = None, *,
    statistics: tuple[Sequence[float], Sequence[float]] | None = None, progress: bool = False,
) -> NetworkCoverage:  # fmt: skip
    """Say what of a model becomes integers. It is traced and, if wanted, quantised on images that are drawn.

    What is drawn shows that the integer network runs and computes the model. How close it is on photographs needs photographs.

    Args:
        model: as :func:`qflash.quantize_model` takes it.
        image: (channels, height, width).
        outputs: as for :func:`qflash.quantize_model`.
        statistics: mean and standard deviation of each channel, with which the model is computed on drawn images; None computes
            nothing.
        progress: whether to show a bar while it computes.

    Raises:
        TypeError, ValueError: ``outputs`` or ``statistics`` is not what :func:`qflash.quantize_model` takes.
    """
    found = _traced(model, image, outputs)
    if statistics is None or found.refusals:
        return found
    mean, std = statistics
    images = drawn_images(image)
    try:
        network = quantize_model(model, [images], mean=mean, std=std, outputs=outputs, progress=progress)
    except MemoryError:
        raise
    except Exception as error:  # whatever happens is an answer
        # but for statistics that are none: this is called for the error that it raises then
        find_statistics(model, image[0], mean, std)
        kind = "" if isinstance(error, (ValueError, TypeError)) else f"{type(error).__name__}: "
        reason = f"computed on {DRAWN} drawn images: {kind}{error}"
        return NetworkCoverage({}, {}, (reason,))
    return dataclasses.replace(found, captured_db=network.lowering.captured.read_db, quality=network.quality)


def _traced(model: nn.Module, image: Sequence[int], outputs: Sequence[str] | OutputsOf | None) -> NetworkCoverage:
    """Return the same without computing anything."""
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
