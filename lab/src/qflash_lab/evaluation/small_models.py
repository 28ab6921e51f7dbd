"""Four small image classifiers that come with the package, trained, whose attention has the paper's shapes.

============== ============================ ========================================================================
``digits-vit``   scikit-learn's digits        two blocks, 197 tokens, 3 heads of 64 channels: Table 1's A1
``digits-swin``  the same                     4 and 1 windows of 49 tokens, 12 and 24 heads of 32 channels: A6 and A7
``fashion-vit``  Fashion-MNIST                four blocks with A1's attention
``fashion-swin`` the same                     16, 4 and 1 windows, 6, 12 and 24 heads: A5, A6 and A7
============== ============================ ========================================================================

The digits are enlarged; Fashion-MNIST's 28 x 28 pixels are taken as they are, in patches of 2 x 2 (ViT) and of one
pixel (Swin). A4 would need a 56 x 56 grid. The Swins' residual streams are narrower than their attention (the heads
keep their 32 channels), and all have short MLPs. Their accuracy says nothing about ImageNet.

The digits come with scikit-learn. Of Fashion-MNIST 500 test images and 64 training images come with this package
(Copyright 2017 Zalando SE, MIT licence, see ``weights/README.md``); a folder of its idx files has all.
"""

from __future__ import annotations

import dataclasses
import importlib.resources
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qflash.optional_packages import install_hint

from .real_data import FASHION_CLASSES, load_fashion

CALIBRATION = 64
"""Training images that integer networks are calibrated on."""
SUBSET = "fashion-images.safetensors"
"""The images of Fashion-MNIST that come with the package."""

_LARGEST_DIGIT, _LARGEST_PIXEL = 16.0, 255.0
_WINDOWS: dict[str, Any] = {"head_dim": 32, "window_size": 7, "embed_dim": 64, "drop_path_rate": 0.0}


@dataclasses.dataclass(frozen=True)
class SmallModel:
    """What a classifier is built from.

    Attributes:
        dataset: ``"digits"`` or ``"fashion"``.
        family: ``"vit"`` or ``"swin"``.
        side: pixels that the network takes on a side.
        image_shape: of an image as data sets have it.
        options: of timm's class.
    """

    dataset: str
    family: str
    side: int
    image_shape: tuple[int, int, int]
    options: Mapping[str, Any]


MODELS: Mapping[str, SmallModel] = {
    "digits-vit": SmallModel(
        "digits", "vit", 56, (1, 8, 8), {"patch_size": 4, "embed_dim": 192, "depth": 2, "num_heads": 3, "mlp_ratio": 1.0}
    ),
    "digits-swin": SmallModel(
        "digits", "swin", 56, (1, 8, 8),
        {"patch_size": 4, "depths": (2, 1), "num_heads": (12, 24), "mlp_ratio": 2.0, **_WINDOWS},
    ),
    "fashion-vit": SmallModel(
        "fashion", "vit", 28, (1, 28, 28), {"patch_size": 2, "embed_dim": 192, "depth": 4, "num_heads": 3, "mlp_ratio": 2.0}
    ),
    "fashion-swin": SmallModel(
        "fashion", "swin", 28, (1, 28, 28),
        {"patch_size": 1, "depths": (2, 2, 1), "num_heads": (6, 12, 24), "mlp_ratio": 1.5, **_WINDOWS},
    ),
}  # fmt: skip
"""The classifiers by name."""

CLASSES: Mapping[str, tuple[str, ...]] = {"digits": tuple("0123456789"), "fashion": FASHION_CLASSES}
"""What the classes of a data set are called."""


class SmallClassifier(nn.Module):
    """Bring images to the size and range that a network takes, and classify them.

    Attributes:
        backbone: the timm model.
        spec: what it was built from.
    """

    def __init__(self, backbone: nn.Module, spec: SmallModel) -> None:
        super().__init__()
        self.backbone = backbone
        self.spec = spec

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Classify.

        Args:
            images: (batch, 1, height, width) in [0, 1], in the weights' dtype.

        Returns:
            logits (batch, 10).
        """
        return self.backbone(self.prepare(images))

    def prepare(self, images: torch.Tensor) -> torch.Tensor:
        """Return the images that the timm model takes: as wide and high as it wants, in [-1, 1]."""
        side = self.spec.side
        if tuple(images.shape[-2:]) != (side, side):
            images = nn.functional.interpolate(images, size=(side, side), mode="bilinear", align_corners=False)
        return images * 2.0 - 1.0

    def pixels(self, images: torch.Tensor) -> torch.Tensor:
        """Return the same as uint8, which integer networks take; Fashion-MNIST's own bytes."""
        return ((self.prepare(images) + 1) * 127.5).round().to(torch.uint8)


@dataclasses.dataclass(frozen=True)
class Split:
    """Images to train or calibrate on, and images to judge by.

    Attributes:
        train_images: float32 (count, 1, height, width) in [0, 1].
        train_labels: int64 (count,).
        images: to judge by.
        labels: their classes.
    """

    train_images: torch.Tensor
    train_labels: torch.Tensor
    images: torch.Tensor
    labels: torch.Tensor


def load_images(dataset: str, folder: Path | None = None) -> Split:
    """Return a data set's images.

    Args:
        dataset: ``"digits"``, all 1797, of which 540 are held out; or ``"fashion"``, see the module.
        folder: of Fashion-MNIST's idx files; the images that come with the package if None.

    Raises:
        ValueError: no data set has that name, or the digits are wanted out of a folder.
        qflash_lab.evaluation.real_data.DataUnavailableError: the folder's files are not there, or not what they should be.
        ImportError: scikit-learn is not installed, for digits.
    """
    if dataset == "digits":
        if folder is not None:
            raise ValueError(f"folder must be None for digits, which come with scikit-learn, got {folder}")
        return load_digits_split()
    if dataset != "fashion":
        raise ValueError(f"dataset must be one of {', '.join(CLASSES)}, got {dataset!r}")
    if folder is None:
        stored = _read(SUBSET)
        parts = [stored[name] for name in ("train_images", "train_labels", "images", "labels")]
    else:
        train, test = load_fashion(folder)
        parts = [train.images, train.labels, test.images, test.labels]
    images, labels = (parts[0], parts[2]), (parts[1], parts[3])
    floats = [each.to(torch.float32).unsqueeze(1) / _LARGEST_PIXEL for each in images]
    return Split(floats[0], labels[0].long(), floats[1], labels[1].long())


def load_digits_split(seed: int = 0, held_out: float = 0.3) -> Split:
    """Split the 1797 digits, class by class, into a training and a held-out part.

    Args:
        seed: seed of the split; the shipped weights were trained on seed 0 with the default share.
        held_out: share of the images that is held out.

    Raises:
        ImportError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError as error:
        raise ImportError(f"the digits need scikit-learn: {install_hint('sklearn')}") from error
    digits = load_digits()
    images, test_images, labels, test_labels = train_test_split(
        digits.images, digits.target, test_size=held_out, random_state=seed, stratify=digits.target
    )
    return Split(*_tensors(images, labels), *_tensors(test_images, test_labels))


def _tensors(images: Any, labels: Any) -> tuple[torch.Tensor, torch.Tensor]:
    pixels = torch.tensor(images, dtype=torch.float32, device="cpu").unsqueeze(1) / _LARGEST_DIGIT
    return pixels, torch.tensor(labels, dtype=torch.int64, device="cpu")


def calibration_images(dataset: str) -> torch.Tensor:
    """Return training images that come with the data set, (:data:`CALIBRATION`, 1, height, width)."""
    return load_images(dataset).train_images[:CALIBRATION]


def build_model(name: str) -> SmallClassifier:
    """Build an untrained classifier.

    Args:
        name: of :data:`MODELS`.

    Returns:
        a float32 model on the CPU, in training mode.

    Raises:
        ValueError: no model has that name.
        ImportError: timm is not installed.
    """
    if name not in MODELS:
        raise ValueError(f"name must be one of {', '.join(MODELS)}, got {name!r}")
    try:
        from timm.models.swin_transformer import SwinTransformer
        from timm.models.vision_transformer import VisionTransformer
    except ImportError as error:
        raise ImportError(f"{name} needs timm: {install_hint('timm')}") from error
    spec = MODELS[name]
    network = {"vit": VisionTransformer, "swin": SwinTransformer}[spec.family]
    return SmallClassifier(network(img_size=spec.side, in_chans=1, num_classes=10, **spec.options), spec)


def load_model(name: str) -> SmallClassifier:
    """Build a classifier and fill in the weights that come with the package.

    Args:
        name: of :data:`MODELS`.

    Returns:
        a float32 model on the CPU, in eval mode. The weights are stored in float16.

    Raises:
        ValueError: no model has that name.
        ImportError: timm is not installed.
    """
    model = build_model(name)
    model.load_state_dict({key: value.float() for key, value in _read(f"{name}.safetensors").items()})
    return model.eval()


def _read(file: str) -> dict[str, torch.Tensor]:
    from safetensors.torch import load

    return load((importlib.resources.files("qflash_lab") / "weights" / file).read_bytes())


@torch.no_grad()
def predict_logits(model: nn.Module, images: torch.Tensor, batch: int = 64) -> torch.Tensor:
    """Run ``model`` over ``images`` in batches.

    Args:
        model: takes what :class:`SmallClassifier` takes.
        images: (count, 1, height, width).
        batch: images per step; it shapes the scales of recipes with per-tensor granularity.

    Returns:
        logits (count, 10).
    """
    return torch.cat([model(part) for part in images.split(batch)])
