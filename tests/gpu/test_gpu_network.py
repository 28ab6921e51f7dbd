"""The compiled kernels of integer networks have the bits of :mod:`qflash.network.operators`."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from helpers import same_bits
from network_cases import KINDS, MOVING, Layer, draw_layer_norm, draw_linear, extremes, integers, linear

pytestmark = pytest.mark.gpu


def check(layer: Layer) -> None:
    expected = layer.run("reference")
    for backend in ("triton", "auto", "reference"):
        assert same_bits(layer.run(backend, "cuda"), expected), (backend, layer)


def test_linear_layers_have_the_reference_bits() -> None:
    for number in range(200):
        check(draw_linear(number))


@pytest.mark.parametrize("kind", KINDS)
def test_layers_of_real_sizes(kind: str) -> None:
    """Small blocks and large ones; inputs that fill blocks and such that do not."""
    chance = random.Random(kind)
    for rows, inputs, outputs in (
        (197, 384, 1152),
        (8 * 197, 1536, 384),
        (64 * 197, 384, 1536),
        (12_000, 588, 1000),
        (64, 27, 9),
    ):
        x = integers(-128, 128, (rows, inputs), torch.int8, chance)
        check(linear(x, integers(-128, 128, (outputs, inputs), torch.int8, chance), kind, chance))


def test_layer_norms_have_the_reference_bits() -> None:
    for number in range(100):
        check(draw_layer_norm(number))
    for channels in (192, 384, 768, 1024, 1536, 3072, 4096):
        check(draw_layer_norm(channels, channels, rows=700))


@pytest.mark.parametrize("draw", MOVING)
def test_tokens_from_and_to_other_places(draw: Callable[[int], Layer]) -> None:
    for number in range(120):
        check(draw(number))


def test_layers_at_the_ends_of_their_ranges() -> None:
    for layer in extremes():
        check(layer)
