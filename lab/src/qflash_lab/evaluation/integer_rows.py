"""Whole integer networks as rows of ``qflash-lab evaluate``: :data:`WHOLE_NETWORKS`."""

from __future__ import annotations

import dataclasses

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
