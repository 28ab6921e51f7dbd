"""SigLIP 2 NaFlex of transformers, whose float model takes patches: as an integer network it takes images of several sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import qflash
from qflash.network.quality import sqnr_db

transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.models.siglip2")
Image = pytest.importorskip("PIL.Image")
PATCH, SIZES = 8, [(32, 48), (48, 32), (40, 40)]
PARTS = {
    "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 3, "num_patches": 16,
    "patch_size": PATCH,
}  # fmt: skip


def photo(number: int, width: int, height: int) -> Any:
    coarse = np.random.default_rng(number).integers(0, 256, (5, 6, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height))


def redrawn(model: Any) -> Any:
    torch.manual_seed(0)
    with torch.no_grad():
        for x in model.parameters():
            x.copy_(torch.randn_like(x) * (0.3 if x.dim() == 1 else 1.5 / x.shape[-1] ** 0.5) + (x.dim() == 1) * 0.5)
    return model.eval()


@pytest.fixture(scope="module")
def model() -> Any:
    return redrawn(transformers.Siglip2VisionModel(transformers.Siglip2VisionConfig(**PARTS)))


@pytest.fixture(scope="module")
def processor() -> Any:
    return transformers.Siglip2ImageProcessor(patch_size=PATCH, max_num_patches=28)


@pytest.fixture(scope="module")
def network(model: Any, processor: Any) -> Any:
    transform = qflash.image_transform(processor, SIZES[0])
    images = torch.stack([transform(photo(number, 90, 60)) for number in range(16)])
    return qflash.quantize_model(model, [images], mean=transform.mean, std=transform.std, sizes=SIZES, progress=False)


def test_images_of_any_proportions_give_what_the_model_gives_of_their_padded_patches(
    model: Any, processor: Any, network: Any
) -> None:
    photos = [photo(20, 90, 60), photo(21, 60, 90), photo(22, 70, 70)]
    batch = processor(photos, return_tensors="pt")
    assert batch["spatial_shapes"].tolist() == [[height // PATCH, width // PATCH] for height, width in SIZES]
    assert batch["pixel_attention_mask"].sum(1).tolist() == [24, 24, 25]
    images = [qflash.image_transform(processor, size)(each) for size, each in zip(SIZES, photos, strict=True)]
    with torch.inference_mode():
        wanted = model(**batch)
        made = network.dequantize(network(images))
    for number, tokens in enumerate(made["last_hidden_state"]):
        assert sqnr_db(wanted.last_hidden_state[number, : len(tokens)], tokens) > 20
        assert sqnr_db(wanted.pooler_output[number], made["pooler_output"][number]) > 15
        alone = network(images[number][None])
        assert torch.equal(network(images)["pooler_output"][number], alone["pooler_output"][0])
    assert network.quality.sqnr_db > 20
    batch = processor(photos, return_tensors="pt", do_rescale=False, do_normalize=False)
    with pytest.raises(ValueError, match="takes images, not patches with spatial_shapes: prepare them with"):
        qflash.transformers_model(network)(**batch)


@pytest.mark.slow
def test_parts_and_logits_can_be_outputs(model: Any) -> None:
    images = torch.stack([torch.from_numpy(np.array(photo(number, 24, 32))).permute(2, 0, 1) for number in range(8)])
    options: dict[str, Any] = {"mean": [0.5] * 3, "std": [0.5] * 3, "progress": False, "min_sqnr": None}
    names = ["features", "encoder.layers.0", "hidden_states.1"]
    found = qflash.quantize_model(model, [images], outputs=names, **options)
    assert list(found.outputs) == names and found.quality.sqnr_db > 20
    config = transformers.Siglip2Config(vision_config=PARTS, text_config={"hidden_size": 48}, num_labels=5)
    classifier = redrawn(transformers.Siglip2ForImageClassification(config))
    found = qflash.quantize_model(classifier, [images], **options)
    assert list(found.outputs) == ["logits"] and found(images).shape == (8, 5) and found.quality.sqnr_db > 20
    assert not classifier._forward_pre_hooks and not model._forward_pre_hooks


def test_what_is_no_whole_patch_is_refused(model: Any, processor: Any) -> None:
    pixels = torch.randint(0, 256, (2, 3, 36, 32), dtype=torch.uint8)
    with pytest.raises(ValueError, match="images must have sides that are multiples of 8, got 36 x 32"):
        qflash.quantize_model(model, [pixels], mean=[0.5] * 3, std=[0.5] * 3, progress=False)
    with pytest.raises(ValueError, match="size must be of multiples of 8, the side of a patch, got 30 x 30"):
        qflash.image_transform(processor, 30)
    assert qflash.image_transform(processor).size == (3, 40, 40)
    with pytest.raises(ValueError, match="images must have 3 channels, got 1"):
        qflash.quantize_model(model, [pixels[:, :1, :32]], mean=[0.5], std=[0.5], progress=False)


@pytest.mark.parametrize("options", [{"do_resize": False}, {"max_num_patches": 0}])
def test_processors_that_do_not_resize_are_refused(options: dict[str, Any]) -> None:
    made = transformers.Siglip2ImageProcessor(**{"patch_size": PATCH, "max_num_patches": 28, **options})
    with pytest.raises(ValueError, match="Siglip2ImageProcessor must resize images to at most max_num_patches patches"):
        qflash.image_transform(made)


def test_patches_of_another_kind_are_refused(processor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = type(processor).__call__

    def brighter(self: Any, *args: Any, **options: Any) -> Any:
        found = whole(self, *args, **options)
        found["pixel_values"] = found["pixel_values"] + 0.1
        return found

    monkeypatch.setattr(type(processor), "__call__", brighter)
    with pytest.raises(ValueError, match="does more than resizing"):
        qflash.image_transform(processor, SIZES[0])


def test_a_tower_of_two_is_taken_by_a_function() -> None:
    config = transformers.Siglip2Config(vision_config=PARTS, text_config={"hidden_size": 48})
    both = redrawn(transformers.Siglip2Model(config))
    images = torch.stack([torch.from_numpy(np.array(photo(number, 24, 32))).permute(2, 0, 1) for number in range(8)])
    found = qflash.quantize_model(
        both, [images], mean=[0.5] * 3, std=[0.5] * 3, progress=False, min_sqnr=None,
        outputs=lambda model, pixels: {"pooled": model.vision_model(pixels).pooler_output},
    )  # fmt: skip
    assert list(found.outputs) == ["pooled"] and not both.vision_model._forward_pre_hooks
