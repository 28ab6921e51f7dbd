"""Models as people wrap them: compiled, cut by torchvision, with heads of their own, of two towers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import STATISTICS, images, make, normalise
from torch import nn

import qflash
from qflash.network.capture import UnsupportedError
from qflash.network.quality import sqnr_db

OPTIONS: dict[str, Any] = {"progress": False, **STATISTICS}


class Segmentation(nn.Module):
    """A convolution over the map of patch tokens; the batch's size by ``len``, or as torch.export wants it."""

    def __init__(self, by_len: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.by_len = make("timm: class token"), by_len
        self.head = nn.Conv2d(self.body.embed_dim, 5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.body.forward_features(x)[:, 1:]
        side = int(tokens.shape[1] ** 0.5)
        batch = len(x) if self.by_len else x.shape[0]
        return self.head(tokens.transpose(1, 2).reshape(batch, -1, side, side))


@pytest.mark.slow
def test_a_head_over_the_map_of_tokens() -> None:
    model = Segmentation(False).eval()
    network = qflash.quantize_model(model, [images(24)], **OPTIONS)
    some = images(3, seed=7)
    with torch.inference_mode():
        wanted = model(normalise(some))
    assert sqnr_db(wanted, network.dequantize(network(some))) > 20 and network(some).shape == wanted.shape


def test_what_fixes_the_batch_is_told_how_not_to() -> None:
    with pytest.raises(UnsupportedError, match=r"any batch: x\.shape\[0\] or -1 in place of len\(x\) or a number$"):
        qflash.quantize_model(Segmentation(True).eval(), [images(4)], **OPTIONS)


@pytest.mark.slow
def test_a_compiled_model_is_the_model() -> None:
    model = make("timm: class token")
    networks = [qflash.quantize_model(each, [images(24)], **OPTIONS) for each in (model, torch.compile(model))]
    assert torch.equal(*(network(images(2)) for network in networks))


@pytest.mark.slow
def test_what_torchvision_cuts_out_of_a_swin() -> None:
    """Its module is in eval mode, a copy of it is not."""
    pytest.importorskip("torchvision")
    from torchvision.models.feature_extraction import create_feature_extractor
    from torchvision.models.swin_transformer import SwinTransformer

    torch.manual_seed(0)
    model = SwinTransformer([2, 2], 24, [2, 2], [2, 4], [4, 4], num_classes=5).eval()
    cut = create_feature_extractor(model, {"features.1": "stage", "flatten": "pooled"}).eval()
    network = qflash.quantize_model(cut, [images(24)], **OPTIONS)
    assert list(network.outputs) == ["stage", "pooled"] and network.quality.sqnr_db > 25


def test_a_model_of_two_towers_is_told_how() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 60,
        "image_size": 32, "patch_size": 8,
    }  # fmt: skip
    model = transformers.CLIPModel(transformers.CLIPConfig(vision_config=sizes, text_config=sizes)).eval()
    with pytest.raises(
        UnsupportedError, match=r"outputs=lambda model, x: model\.get_image_features\(x\), or get_text_features$"
    ):
        qflash.quantize_model(model, [images(4)], **OPTIONS)


def test_an_output_that_is_constant_is_told_the_others() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.scale = make("timm: class token"), nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> Any:
            return self.body(x), self.scale.exp()

    with pytest.raises(UnsupportedError, match=r"'output1' does not depend on the images; outputs=\['output0'\] leaves it out"):
        qflash.quantize_model(Scaled().eval(), [images(4)], **OPTIONS)
