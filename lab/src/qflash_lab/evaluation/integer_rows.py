"""Whole integer networks as rows of ``qflash-lab evaluate``: :data:`WHOLE_NETWORKS`.

Small models are calibrated on training images that come with the package, others on images of the folder that are not judged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import nn

from qflash.network.graph import IntegerNetwork
from qflash.network.quantize import quantize_model
from qflash.specification.recipe import PRESETS

from .small_models import SmallClassifier, calibration_images

_BATCH = 16


class IntegerClassifier(nn.Module):
    """A small model whose every operation between uint8 pixels and int32 logits is one of integers.

    Attributes:
        classifier: the float model, which knows how images are brought to its size.
        network: quantised.
    """

    def __init__(self, classifier: SmallClassifier, network: IntegerNetwork) -> None:
        super().__init__()
        self.classifier, self.network = classifier, network

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return float32 logits (batch, 10) of images as :class:`.SmallClassifier` takes them."""
        return self.network.dequantize(self.network(self.classifier.pixels(images)))


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Images to calibrate on.

    Attributes:
        pixels: uint8 (images, channels, height, width), as the model's preprocessing cuts them.
        mean, std: of the model's preprocessing, of pixels from 0 to 1.
    """

    pixels: torch.Tensor
    mean: Sequence[float]
    std: Sequence[float]


def pixels_of(images: torch.Tensor, mean: Sequence[float], std: Sequence[float]) -> torch.Tensor:
    """Return the uint8 pixels that normalised images, float32 or float16 (..., channels, height, width), were made of."""
    shift, factor = (torch.tensor(x, dtype=torch.float32, device=images.device).view(-1, 1, 1) for x in (mean, std))
    return ((images.to(torch.float32) * factor + shift) * 255).round().clamp(0, 255).to(torch.uint8)


class FolderClassifier(nn.Module):
    """An integer network that takes what timm's preprocessing returns, normalised images.

    Attributes:
        network: quantised.
        mean, std: of the preprocessing.
    """

    def __init__(self, network: IntegerNetwork, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.network, self.mean, self.std = network, mean, std

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return float32 logits (batch, classes)."""
        out: torch.Tensor = self.network.dequantize(self.network(pixels_of(images, self.mean, self.std)))
        return out


@dataclasses.dataclass(frozen=True)
class WholeNetwork:
    """A row for :func:`qflash.quantize_model`, beside the attention methods.

    Attributes:
        name: what commands call it.
        title: what tables call it.
        recipe: of its attention, a preset's name.
        integer_only: as of a method.
    """

    name: str
    title: str
    recipe: str
    integer_only: bool = True

    @property
    def bits(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Widths of the operands of Q Kᵀ and of P V."""
        return (8, 8), (16 if PRESETS[self.recipe].probability_bits > 8 else 8, 8)

    def build_of(self, model: nn.Module, given: Calibration) -> FolderClassifier:
        """Quantise a model of timm.

        Args:
            model: float, in eval mode; it is not changed.
            given: images that are not judged.
        """
        batches = given.pixels.to(next(model.parameters()).device).split(_BATCH)
        network = quantize_model(model, batches, self.recipe, mean=given.mean, std=given.std, progress=False)
        return FolderClassifier(network, given.mean, given.std)

    def build(self, classifier: SmallClassifier) -> IntegerClassifier:
        """Quantise a small model, on training images that come with the package; others are judged.

        Args:
            classifier: float, in eval mode; it is not changed.
        """
        like = next(classifier.parameters())
        images = calibration_images(classifier.spec.dataset).to(like.device, like.dtype)
        network = quantize_model(
            classifier.backbone, classifier.pixels(images).split(_BATCH), self.recipe, mean=(0.5,), std=(0.5,), progress=False
        )
        return IntegerClassifier(classifier, network)


WHOLE_NETWORKS = tuple(
    WholeNetwork(f"integer-{recipe}", f"Integer network, {recipe.upper()} attention", recipe)
    for recipe in ("default", "accurate")
)
