"""A small integer network of random weights for photo files, for tests of the examples at scale. Needs timm and Pillow."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import timm
import torch
from PIL import Image

import qflash


def save_network(paths: Sequence[Path], folder: Path, depth: int, side: int) -> Path:
    """Calibrate a ViT on photos of ``side`` pixels and return its file, in ``folder``."""
    model = timm.create_model("vit_tiny_patch16_224", pretrained=False, depth=depth, num_classes=10, img_size=side).eval()
    transform = qflash.image_transform(model, side)
    pixels = torch.stack([transform(Image.open(path)) for path in paths])
    made = qflash.quantize_model(model, pixels.split(16), mean=transform.mean, std=transform.std, progress=False)
    made.about["images"] = {"input_size": (3, side, side), "mean": transform.mean, "std": transform.std, "crop_pct": 1.0}
    path = folder / "vit.safetensors"
    made.save(path)
    return path


def logits_of(paths: Sequence[Path], network: Path) -> list[list[int]]:
    """Return what a network file makes of each photo by itself."""
    loaded = qflash.load_model(network)
    transform = qflash.image_transform(loaded.about["images"])
    with torch.inference_mode():
        return [loaded(transform(Image.open(path))[None])[0].tolist() for path in paths]
