"""Images of PIL as uint8: what a model's own preparation does but for the normalisation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import qflash
from qflash.integrations.images import pixels_of
from small_networks import timm

transformers = pytest.importorskip("transformers")
Image = pytest.importorskip("PIL.Image")


def draw(count: int = 1, width: int = 90, height: int = 70, mode: str = "RGB") -> list[Any]:
    """Return smooth random images."""
    found = []
    for number in range(count):
        coarse = np.random.default_rng(number).integers(0, 256, (5, 6, 3), dtype=np.uint8)
        found.append(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC).convert(mode))
    return found


def normalised(transform: qflash.integrations.images.ImageTransform, image: Any) -> torch.Tensor:
    pixels = transform(image)
    assert pixels.dtype == torch.uint8 and pixels.shape == transform.size
    mean, std = (torch.tensor(x).view(-1, 1, 1) for x in (transform.mean, transform.std))
    return (pixels / 255 - mean) / std


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "deit3_small_patch16_224", "vit_base_patch16_siglip_256"])
def test_timm_prepares_the_same(name: str) -> None:
    cfg = timm.models.get_pretrained_cfg(name)
    transform = qflash.image_transform(cfg)
    config = timm.data.resolve_data_config(pretrained_cfg=cfg.to_dict())
    own = timm.data.create_transform(**config, is_training=False)
    for image in (*draw(), *draw(width=300, height=400)):
        assert torch.equal(normalised(transform, image), own(image))
    assert qflash.image_transform(cfg.to_dict()).size == transform.size == cfg.input_size


def test_a_model_has_the_size_it_was_made_for() -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=(32, 64), depth=1, embed_dim=48, num_heads=2)
    assert qflash.image_transform(model).size == (3, 32, 64)
    assert qflash.image_transform(model, 48).size == (3, 48, 48)


PROCESSORS: dict[str, Any] = {
    "ViT": lambda: transformers.ViTImageProcessor(size={"height": 32, "width": 40}),
    "CLIP": lambda: transformers.CLIPImageProcessor(size={"shortest_edge": 36}, crop_size={"height": 32, "width": 32}),
    "DINOv2": lambda: transformers.BitImageProcessor(size={"shortest_edge": 40}, crop_size={"height": 32, "width": 32}),
    "SigLIP": lambda: transformers.SiglipImageProcessor(size={"height": 32, "width": 32}),
    "not normalised": lambda: transformers.ViTImageProcessor(size={"height": 32, "width": 32}, do_normalize=False),
    "not rescaled": lambda: transformers.ViTImageProcessor(
        size={"height": 32, "width": 32}, do_rescale=False, image_mean=[120.0] * 3, image_std=[60.0] * 3
    ),
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_a_processor_prepares_the_same(name: str) -> None:
    processor = PROCESSORS[name]()
    transform = qflash.image_transform(processor)
    for image in (*draw(), *draw(width=300, height=400)):
        wanted = processor(image, return_tensors="pt")["pixel_values"][0]
        assert torch.allclose(normalised(transform, image), wanted.float(), atol=1e-4)
    larger = qflash.image_transform(processor, 64)
    assert larger.size == (3, 64, 64) and larger.mean == transform.mean
    if name == "CLIP":
        wanted = processor(image, size={"shortest_edge": 72}, crop_size={"height": 64, "width": 64}, return_tensors="pt")
        assert torch.allclose(normalised(larger, image), wanted["pixel_values"][0], atol=1e-4)


def test_a_processor_that_does_more_is_refused() -> None:
    class Inverts(transformers.ViTImageProcessor):
        def __call__(self, *args: Any, **options: Any) -> Any:
            found = super().__call__(*args, **options)
            found["pixel_values"] = [1 - x if x.is_floating_point() else x for x in found["pixel_values"]]
            return found

    with pytest.raises(ValueError, match="Inverts does more than resizing"):
        qflash.image_transform(Inverts())


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "1"])
def test_other_modes_are_converted(mode: str) -> None:
    transform = qflash.image_transform({"input_size": (3, 32, 32), "mean": (0.5,) * 3, "std": (0.5,) * 3})
    (image,) = draw(mode=mode)
    assert torch.equal(transform(image), transform(image.convert("RGB")))
    grey = qflash.image_transform({"input_size": (1, 32, 32), "mean": (0.5,), "std": (0.5,)})
    assert grey(image).shape == (1, 32, 32)


@pytest.mark.parametrize("mode", ["I;16", "I", "F"])
def test_more_than_8_bits_are_refused(mode: str) -> None:
    """PIL would cut them off at 255."""
    transform = qflash.image_transform({"input_size": (3, 32, 32), "mean": (0.5,) * 3, "std": (0.5,) * 3})
    image = Image.fromarray(np.arange(90 * 70, dtype=np.uint16).reshape(70, 90)).convert(mode)
    with pytest.raises(ValueError, match=f"must have 8 bits a channel, has mode {mode};"):
        transform(image)
    with pytest.raises(ValueError, match=f"has mode {mode};"):
        qflash.quantize_model(torch.nn.Linear(2, 2).eval(), [[image]], mean=[0.5] * 3, std=[0.5] * 3)


def test_what_is_no_source_or_image_is_refused() -> None:
    with pytest.raises(TypeError, match="source must be a model of timm, its pretrained_cfg or an image processor"):
        qflash.image_transform(torch.nn.Linear(2, 2))
    model = transformers.ViTModel(transformers.ViTConfig(hidden_size=8, num_hidden_layers=0, num_attention_heads=1))
    with pytest.raises(TypeError, match=r"AutoImageProcessor.from_pretrained"):
        qflash.image_transform(model)
    config = {"input_size": (3, 32, 32), "mean": (0.5,) * 3, "std": (0.5,) * 3}
    for size in (0, (3, 3, 3), (2, 2.0), True):
        with pytest.raises(ValueError, match="size must be a number of pixels"):
            qflash.image_transform(config, size)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="image must be of PIL"):
        qflash.image_transform(config)(torch.zeros(3, 4, 4))


def test_networks_are_calibrated_on_images_as_people_have_them() -> None:
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, embed_dim=48, num_heads=2, num_classes=4).eval()
    found, images = qflash.image_transform(model), draw(18)
    pixels = torch.stack([found(image) for image in images])
    options: dict[str, Any] = {"progress": False, "mean": found.mean, "std": found.std}
    wanted = qflash.quantize_model(model, [pixels], **options)(pixels)
    labels = torch.zeros(18)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(pixels, labels), 5)  # type: ignore[var-annotated]
    for batches in (
        loader, images, [images], [(images, labels)], [(image, 3) for image in images],
        [{"pixel_values": pixels, "labels": labels}],
    ):  # fmt: skip
        assert torch.equal(qflash.quantize_model(model, batches, **options)(pixels), wanted)
    with pytest.raises(TypeError, match=r"qflash.image_transform.processor. makes uint8 images"):
        qflash.quantize_model(model, [{"pixel_values": pixels.float()}], progress=False)


def test_images_without_a_transform_need_one_size() -> None:
    assert pixels_of(draw(2), None).shape == (2, 3, 70, 90)
    with pytest.raises(ValueError, match=r"images of PIL must have one size.*\(50, 70\), \(90, 70\)"):
        pixels_of([*draw(), *draw(width=50)], None)
