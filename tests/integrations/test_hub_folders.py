"""``qflash convert`` and ``predict`` on folders that ``save_pretrained`` writes, small models with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import qflash
from qflash.cli import app

transformers = pytest.importorskip("transformers")
Image = pytest.importorskip("PIL.Image")
VIT: dict[str, Any] = {
    "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 96, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip
SWIN: dict[str, Any] = {
    "image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 1], "num_heads": [1, 2], "window_size": 4,
}  # fmt: skip
TOWERS = {"vision_config": VIT, "text_config": {**VIT, "vocab_size": 60, "max_position_embeddings": 16}}
LABELS = {"num_labels": 3, "id2label": {0: "shoe", 1: "shirt", 2: "bag"}}
SQUARE = {"height": 32, "width": 32}
CROPPED = {"size": {"shortest_edge": 36}, "crop_size": SQUARE}
FOLDERS: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "ViTForImageClassification": ("ViTConfig", {**VIT, **LABELS}, "ViTImageProcessor", {"size": SQUARE}),
    "DeiTForImageClassificationWithTeacher": (
        "DeiTConfig",
        {**VIT, **LABELS},
        "DeiTImageProcessor",
        {"size": {"height": 36, "width": 36}, "crop_size": SQUARE},
    ),
    "Dinov2WithRegistersModel": ("Dinov2WithRegistersConfig", VIT, "BitImageProcessor", CROPPED),
    "DINOv3ViTModel": ("DINOv3ViTConfig", VIT, "DINOv3ViTImageProcessorFast", {"size": SQUARE}),
    "CLIPModel": ("CLIPConfig", TOWERS, "CLIPImageProcessor", CROPPED),
    "CLIPForImageClassification": ("CLIPConfig", {**TOWERS, **LABELS}, "CLIPImageProcessor", CROPPED),
    "SiglipModel": ("SiglipConfig", TOWERS, "SiglipImageProcessor", {"size": SQUARE}),
    "Siglip2Model": ("Siglip2Config", TOWERS, "Siglip2ImageProcessor", {"patch_size": 8, "max_num_patches": 16}),
    "SwinForImageClassification": ("SwinConfig", {**SWIN, **LABELS}, "ViTImageProcessor", {"size": SQUARE}),
    "Swinv2ForImageClassification": ("Swinv2Config", {**SWIN, **LABELS}, "ViTImageProcessor", {"size": SQUARE}),
}
"""By model its configuration and its processor, each with options."""


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    for number in range(20):
        coarse = np.random.default_rng(number).integers(0, 256, (5, 6, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize((80, 60)).save(folder / f"{number}.png")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_of_save_pretrained_becomes_a_file_that_predicts(name: str, photos: Path, tmp_path: Path) -> None:
    config, options, processor, prepared = FOLDERS[name]
    if not all(hasattr(transformers, each) for each in (name, config, processor)):
        pytest.skip(f"this transformers has no {name}")
    torch.manual_seed(0)
    model = getattr(transformers, name)(getattr(transformers, config)(**options))
    with torch.no_grad():
        for x in model.parameters():
            if x.dim() > 1:
                x.copy_(torch.randn_like(x) / x[0].numel() ** 0.5)
    model.save_pretrained(tmp_path / "model")
    getattr(transformers, processor)(**prepared).save_pretrained(tmp_path / "model")
    file, made = tmp_path / "network", tmp_path / "out.npz"
    words = [str(tmp_path / "model"), str(photos), "-o", str(file), "--calibrate", "16", "--format", "json"]
    result = CliRunner().invoke(app, ["convert", *words])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["image"] == [3, 32, 32] and report["compared_images"] == 4
    # of 48 random channels a pooling by attention keeps little; published widths are tested in test_published_configurations
    assert min(row["sqnr_db"] for row in report["outputs"].values()) > 10, report["outputs"]
    if list(report["outputs"]) == ["logits"]:
        result = CliRunner().invoke(app, ["predict", str(file), str(photos), "--format", "json", "--top", "3"])
        (first, *_) = json.loads(result.stdout)
        assert {label for label, _ in first["classes"]} == set(LABELS["id2label"].values())  # type: ignore[attr-defined]
        return
    result = CliRunner().invoke(app, ["predict", str(file), str(photos), "--output", str(made)])
    assert result.exit_code == 0, result.output
    assert np.load(made)["pooler_output"].shape == (20, 48)
    assert qflash.load_model(file).about["images"]["image_processor_type"].startswith(processor.removesuffix("Fast"))
