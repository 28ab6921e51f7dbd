"""The layers of ``network.c`` have the bits of :mod:`qflash.specification.layers`."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from helpers import same_bits
from network_cases import KINDS, MOVING, Layer, draw_layer_norm, draw_linear, extremes, integers, linear
from qflash.kernels.cpu import launch as cpu
from qflash.specification import layers as operators


def check(layer: Layer) -> None:
    layer.check_bounds()
    assert same_bits(layer.run("cpu"), layer.run("reference")), layer


@pytest.mark.parametrize("first", range(0, 400, 50))
def test_linear_layers_have_the_reference_bits(first: int) -> None:
    for number in range(first, first + 50):
        check(draw_linear(number))


def test_layer_norms_have_the_reference_bits() -> None:
    for number in range(150):
        check(draw_layer_norm(number))


@pytest.mark.parametrize("draw", MOVING)
def test_tokens_from_and_to_other_places(draw: Callable[[int], Layer]) -> None:
    for number in range(60):
        check(draw(number))


def test_layers_at_the_ends_of_their_ranges() -> None:
    for layer in extremes():
        check(layer)


@pytest.mark.parametrize("kind", KINDS)
def test_long_rows_and_many_of_them(kind: str) -> None:
    """More rows than a block has, weights of more inputs than are packed at a time, and rows of which few are a block."""
    chance = random.Random(kind)
    for rows, inputs, outputs in ((400, 384, 40), (70, 3072, 19), (1500, 588, 17), (30, 20000, 17)):
        x = integers(-128, 128, (rows, inputs), torch.int8, chance)
        check(linear(x, integers(-128, 128, (outputs, inputs), torch.int8, chance), kind, chance))


@pytest.mark.parametrize("threads", [1, 2, 5, 64])
def test_threads_leave_the_bits_alone(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "threads_for", lambda work: threads)
    for number in range(20):
        check(draw_linear(number))
        check(draw_layer_norm(number))


def test_auto_is_the_compiled_kernel_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("integer_matmul", "layer_norm"):
        monkeypatch.setattr(operators, name, lambda *_: pytest.fail("that is the reference"))
    for layer in (draw_linear(0), draw_linear(4), draw_layer_norm(0)):
        assert same_bits(layer.run("auto"), layer.run("cpu"))
