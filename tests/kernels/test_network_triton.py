"""The Triton kernels of integer networks have the bits of :mod:`.specification.layers`, in the interpreter or on a GPU."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from helpers import DEVICE, same_bits, slow
from network_cases import KINDS, MOVING, Layer, draw_layer_norm, draw_linear, edge_norms, extremes, integers, linear
from qflash.kernels import device
from qflash.kernels.triton import network as portable
from small_networks import made  # noqa: F401 - a fixture


def check(layer: Layer) -> None:
    assert same_bits(layer.run("triton", DEVICE), layer.run("reference")), layer


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_linear_layers_have_the_reference_bits(first: int) -> None:
    for number in range(first, first + 20):
        check(draw_linear(number))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_blocks_of_every_size(kind: str) -> None:
    """Small blocks and, with enough rows, large ones; inputs that fill blocks and such that do not."""
    chance = random.Random(kind)
    for rows, inputs, outputs in ((70, 128, 65), (130, 100, 16 * 132 * 8), (200, 17, 70)):
        x = integers(-128, 128, (rows, inputs), torch.int8, chance)
        check(linear(x, integers(-128, 128, (outputs, inputs), torch.int8, chance), kind, chance))


@pytest.mark.slow
def test_layer_norms_have_the_reference_bits() -> None:
    for number in range(40):
        check(draw_layer_norm(number))


@pytest.mark.parametrize("channels", [128, 300, 768])
def test_layer_norms_of_many_rows(channels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program then has several."""
    monkeypatch.setattr(device, "STAND_IN_PROCESSORS", 1)
    check(draw_layer_norm(channels + 2, channels, rows=33 if DEVICE.type == "cpu" else 6000))


@pytest.mark.parametrize("images", [1, 2])
@pytest.mark.parametrize("channels", [24, 32])
def test_norms_of_heads_beside_others(images: int, channels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries or keys of a row that has both, and are not copied for it."""
    monkeypatch.setattr(device, "STAND_IN_PROCESSORS", 1)
    _, *constants = draw_layer_norm(channels, channels).arguments
    tokens = 9 if DEVICE.type == "cpu" else 3000
    both = integers(-3000, 3000, (images, tokens, 10, channels), torch.int16, random.Random(channels))
    for h in (both[:, :, :5], both[:, :, 5:]):
        assert portable.heads_apart(h)
        check(Layer("integer_layer_norm", (h, *constants)))
    assert not portable.heads_apart(both.transpose(1, 2))
    assert not portable.heads_apart(both[..., 1:])


@pytest.mark.parametrize("first", [0, slow(9), slow(18)])
@pytest.mark.parametrize("draw", MOVING)
def test_tokens_from_and_to_other_places(draw: Callable[[int], Layer], first: int) -> None:
    for number in range(first, first + 9):
        check(draw(number))


@pytest.mark.parametrize("step", [19, slow(7)])
def test_layers_at_the_ends_of_their_ranges(step: int) -> None:
    # the interpreter takes a tenth of a second for each; a step divides none of the ways in which they differ
    every, norms = extremes(), edge_norms()
    for layer in (*norms, *every[len(norms) : -15 : step], *every[-15:]):
        check(layer)


def test_attention_with_query_and_key_norms(made: Any) -> None:  # noqa: F811
    network = made("query and key norms")[1]
    parts: list[Any] = [
        copy.deepcopy(network.part(f"blocks.0.attn.{name}")) for name in ("qk", "q_norm", "k_norm", "v", "core")
    ]
    channels = parts[0].weight.shape[1]
    x = integers(-128, 128, (1, 5, channels), torch.int8, random.Random(3))

    def attend(x: torch.Tensor, backend: str) -> torch.Tensor:
        qk, q_norm, k_norm, v, core = (part.to(x.device) for part in parts)
        both = qk(x, backend=backend)
        return core(q_norm(both, backend=backend), k_norm(both, backend=backend), v(x, backend=backend), backend=backend)

    want = attend(x, "reference")
    assert same_bits(attend(x.to(DEVICE), "triton").cpu(), want) and want.unique().numel() > 20
