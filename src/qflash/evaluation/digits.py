"""Two small image classifiers with the paper's attention shapes, trained on scikit-learn's handwritten digits.

``"vit"`` is a ViT of two blocks with 197 tokens and 3 heads of 64 channels: Table 1's A1. ``"swin"`` has two
stages on a 14 x 14 grid of patches, with 4 and 1 windows of 49 tokens and 12 and 24 heads of 32 channels: A6 and
A7, the first with a shifted-window block. A4 and A5 would need a 56 x 56 grid, sixteen times the tokens, and
minutes where the demo has seconds. The Swin's residual stream is narrower than its attention (the heads keep
their 32 channels), and both have short MLPs. Accuracy on digits says nothing about ImageNet; these are trained
weights whose attention has the right shape, small enough to ship.
"""

from __future__ import annotations

import importlib.resources
from typing import Any

import torch
from torch import nn

from ..optional_packages import install_hint

MODELS = ("vit", "swin")
IMAGE_SIZE = 56
"""Side the 8 x 8 digits are enlarged to, 14 x 14 patches of 4 x 4."""

_HINT = f"the digits models need timm and scikit-learn: {install_hint('timm', 'sklearn')}"
_LARGEST_PIXEL = 16.0


class DigitsClassifier(nn.Module):
    """Enlarge digits to :data:`IMAGE_SIZE` and classify them.

    Attributes:
        backbone: the timm model.
    """

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Classify.

        Args:
            images: (batch, 1, 8, 8) in [0, 1], in the weights' dtype.

        Returns:
            logits (batch, 10).
        """
        return self.backbone(self.enlarge(images))

    def enlarge(self, images: torch.Tensor) -> torch.Tensor:
        """Return the images that the timm model takes: :data:`IMAGE_SIZE` wide and high, in [-1, 1]."""
        large = nn.functional.interpolate(images, size=(IMAGE_SIZE, IMAGE_SIZE), mode="bilinear", align_corners=False)
        return large * 2.0 - 1.0

    def pixels(self, images: torch.Tensor) -> torch.Tensor:
        """Return the same as uint8, (batch, 1, IMAGE_SIZE, IMAGE_SIZE), which integer networks take."""
        return ((self.enlarge(images) + 1) * 127.5).round().to(torch.uint8)


def load_digits_split(seed: int = 0, held_out: float = 0.3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split the 1797 digits, class by class, into a training and a held-out part.

    Args:
        seed: seed of the split; the shipped weights were trained on seed 0 with the default share.
        held_out: share of the images that is held out.

    Returns:
        training images, training labels, held-out images, held-out labels. Images are float32
        (count, 1, 8, 8) in [0, 1], labels int64 (count,).

    Raises:
        ImportError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError as error:
        raise ImportError(_HINT) from error
    digits = load_digits()
    images, test_images, labels, test_labels = train_test_split(
        digits.images, digits.target, test_size=held_out, random_state=seed, stratify=digits.target
    )
    return (*_tensors(images, labels), *_tensors(test_images, test_labels))


def _tensors(images: Any, labels: Any) -> tuple[torch.Tensor, torch.Tensor]:
    pixels = torch.tensor(images, dtype=torch.float32, device="cpu").unsqueeze(1) / _LARGEST_PIXEL
    return pixels, torch.tensor(labels, dtype=torch.int64, device="cpu")


def build_model(name: str) -> DigitsClassifier:
    """Build an untrained classifier.

    Args:
        name: ``"vit"`` or ``"swin"``.

    Returns:
        a float32 model on the CPU, in training mode.

    Raises:
        ValueError: no model has that name.
        ImportError: timm is not installed.
    """
    if name not in MODELS:
        raise ValueError(f"name must be one of {MODELS}, got {name!r}")
    try:
        from timm.models.swin_transformer import SwinTransformer
        from timm.models.vision_transformer import VisionTransformer
    except ImportError as error:
        raise ImportError(_HINT) from error
    common: dict[str, Any] = {"img_size": IMAGE_SIZE, "patch_size": 4, "in_chans": 1, "num_classes": 10}
    if name == "vit":
        return DigitsClassifier(VisionTransformer(embed_dim=192, depth=2, num_heads=3, mlp_ratio=1.0, **common))
    shape: dict[str, Any] = {"embed_dim": 64, "depths": (2, 1), "num_heads": (12, 24), "head_dim": 32, "window_size": 7}
    return DigitsClassifier(SwinTransformer(mlp_ratio=2.0, drop_path_rate=0.0, **shape, **common))


def load_model(name: str) -> DigitsClassifier:
    """Build a classifier and fill in the weights that come with the package.

    Args:
        name: ``"vit"`` or ``"swin"``.

    Returns:
        a float32 model on the CPU, in eval mode. The weights are stored in float16.

    Raises:
        ValueError: no model has that name.
        ImportError: timm is not installed.
    """
    from safetensors.torch import load

    model = build_model(name)
    stored = (importlib.resources.files("qflash") / "weights" / f"digits-{name}.safetensors").read_bytes()
    model.load_state_dict({key: value.float() for key, value in load(stored).items()})
    return model.eval()


@torch.no_grad()
def predict_logits(model: nn.Module, images: torch.Tensor, batch: int = 64) -> torch.Tensor:
    """Run ``model`` over ``images`` in batches.

    Args:
        model: takes what :class:`DigitsClassifier` takes.
        images: (count, 1, 8, 8).
        batch: images per step; it shapes the scales of recipes with per-tensor granularity.

    Returns:
        logits (count, 10).
    """
    return torch.cat([model(part) for part in images.split(batch)])
