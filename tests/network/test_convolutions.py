"""Convolutions on maps of tokens are linear layers on patches; steps of attention that no rule knows are refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import qflash
from small_networks import decibels, draw_images

MEAN, STD = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)


class Merging(nn.Module):
    """Patches, a normalisation, a convolution on their map, and a head on the mean."""

    def __init__(self, channels: int, merge: nn.Module) -> None:
        super().__init__()
        self.embed, self.norm, self.merge = nn.Conv2d(3, channels, 4, 4), nn.LayerNorm(channels), merge
        self.behind, self.head = nn.LayerNorm(48), nn.Linear(48, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embed(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.head(self.behind(self.merge(x).flatten(2).transpose(1, 2)).mean(1))


class OnTokens(nn.Module):
    """A 1 x 1 convolution as the linear layer that it is."""

    def __init__(self, convolution: nn.Conv2d) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(convolution.weight.flatten(1)), convolution.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x.permute(0, 2, 3, 1), self.weight, self.bias).permute(0, 3, 1, 2)


def converted(model: nn.Module) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Return the integer network of a model, the images that calibrated it, and what the model gives for them."""
    images = draw_images(12, 3, 32)
    network = qflash.quantize_model(model, [images], mean=MEAN, std=STD, min_sqnr=None, progress=False)
    floats = (images.float() / 255 - 0.5) / 0.25
    with torch.no_grad():
        return network, images, model(floats)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("channels", [8, 32])
def test_a_convolution_on_tokens_is_a_linear_layer_on_patches(channels: int, size: int) -> None:
    """With 8 channels on an 8 x 8 map, where columns and channels could be taken for each other, and with 32."""
    torch.manual_seed(0)
    model = Merging(channels, nn.Conv2d(channels, 48, size, size)).eval()
    network, images, want = converted(model)
    assert decibels(want, network.dequantize(network(images))) > 30
    if size == 1:
        same = copy.deepcopy(model)
        same.merge = OnTokens(model.merge)  # type: ignore[arg-type]
        other = converted(same)[0]
        # floating point sums in another order move the ranges, and so a few roundings of weights
        assert decibels(other.dequantize(other(images)), network.dequantize(network(images))) > 33


class Attending(nn.Module):
    """One head of attention whose weights go through a function."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.embed, self.norm, self.qkv, self.head = (
            nn.Conv2d(3, 32, 8, 8),
            nn.LayerNorm(32),
            nn.Linear(32, 96),
            nn.Linear(32, 10),
        )
        self.change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(self.embed(x).flatten(2).transpose(1, 2))).chunk(3, -1)
        return self.head((self.change(q @ k.transpose(1, 2)) @ v).mean(1))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda scores: scores.softmax(-1) + 0.01, "sum with weights of attention"),
        (torch.relu, "relu of scores or norms"),
    ],
)
def test_what_attention_does_not_do_is_refused(change: Any, reason: str) -> None:
    with pytest.raises(qflash.network.capture.operations.UnsupportedError, match=reason):  # type: ignore[attr-defined]
        converted(Attending(change).eval())
