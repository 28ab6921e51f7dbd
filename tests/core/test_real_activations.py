"""The signal-to-noise ratios of every preset on query, key and value of a pretrained vision transformer.

``tests/activations.safetensors`` holds heads that are hard in one way each, and ordinary ones; tests/activations.md says where
they come from.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

import qflash
from helpers import exact_attention, quantize_all
from qflash.specification.recipe import PRESETS
from qflash_lab.baselines import get_method
from qflash_lab.bench.layer_calls import read_calls
from qflash_lab.bench.metrics import sqnr

PATH = Path(__file__).resolve().parents[1] / "activations.safetensors"
METHODS = ("qflash-default", "qflash-accurate", "qflash-paper", "qflash-printed", "qflash-authors")
FLOORS = {
    "hardest": (24.6, 39.7, 1.9, 1.8, 12.9),
    "key-offset": (39.0, 41.3, 23.3, 22.9, 23.7),
    "loud-channels": (45.5, 51.2, 22.7, 21.6, 29.5),
    "one-key": (49.1, 48.8, 25.3, 30.1, 32.0),
    "ordinary-early": (38.5, 42.9, 21.3, 21.2, 27.2),
    "ordinary-late": (40.9, 45.6, 21.5, 21.1, 27.6),
    "ordinary-middle": (40.1, 46.1, 18.4, 18.3, 24.7),
    "strong-key": (31.8, 39.2, 12.8, 12.7, 16.8),
    "strong-key-late": (34.9, 42.4, 13.8, 13.8, 20.4),
    "value-offset": (36.4, 47.4, 16.2, 16.1, 21.5),
}
"""dB by head, in the order of :data:`METHODS`: 0.3 below what is measured, rounded down. A better arithmetic raises them."""
INT8_FLOORS = {
    "hardest": (24.2, 35.5),
    "key-offset": (24.9, 23.9),
    "loud-channels": (38.9, 39.8),
    "one-key": (34.5, 33.9),
    "ordinary-early": (34.8, 36.0),
    "ordinary-late": (38.2, 39.6),
    "ordinary-middle": (36.8, 38.5),
    "strong-key": (31.3, 32.3),
    "strong-key-late": (32.6, 35.5),
    "value-offset": (31.9, 35.2),
}
"""The same for int8 in and out, of DEFAULT and ACCURATE."""
HARMS = {
    "the sum of the rounded probabilities": qflash.DEFAULT.replace(row_sum="rounded"),
    "chords of the exponential": qflash.DEFAULT.replace(exponential="linear"),
    "probabilities of 7 bits": qflash.DEFAULT.replace(probability_bits=7),
    "floored probabilities": qflash.DEFAULT.replace(probability_rounding="floor"),
    "keys with their offset": qflash.DEFAULT.replace(smooth_key=False),
    "one scale for all queries": qflash.DEFAULT.replace(query_granularity="tensor"),
    "one scale for all channels of the value": qflash.DEFAULT.replace(value_granularity="tensor"),
}

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@functools.cache
def heads() -> dict[str, Tensors]:
    return {label: (call.query, call.key, call.value) for label, call in read_calls(PATH).items()}


def test_every_preset_and_head_has_a_floor() -> None:
    assert list(heads()) == list(FLOORS) == list(INT8_FLOORS)
    assert {f"qflash-{name}" for name in PRESETS} <= set(METHODS)
    assert PATH.stat().st_size < 1_000_000
    for tensors in heads().values():
        assert {(x.shape, x.dtype) for x in tensors} == {((1, 1, 257, 64), torch.float16)}


@pytest.mark.parametrize("head", FLOORS)
def test_float_outputs(head: str) -> None:
    tensors = heads()[head]
    exact = exact_attention(*tensors)
    got = {name: sqnr(exact, get_method(name).attention(*tensors)) for name in METHODS}
    below = {name: got[name] for name, least in zip(METHODS, FLOORS[head], strict=True) if not got[name] >= least}
    assert not below


@pytest.mark.parametrize("head", INT8_FLOORS)
def test_int8_output_at_a_fitted_scale(head: str) -> None:
    tensors = heads()[head]
    exact = exact_attention(*tensors)
    for recipe, least in zip((qflash.DEFAULT, qflash.ACCURATE), INT8_FLOORS[head], strict=True):
        out = qflash.int8_attention(*quantize_all(tensors, recipe), output_scale=float(exact.abs().max()) / 127, recipe=recipe)
        assert isinstance(out, qflash.QuantizedTensor)
        assert sqnr(exact, out.dequantize()) >= least


@pytest.mark.parametrize("harm", HARMS)
def test_the_floors_notice_harm(harm: str) -> None:
    """Each choice of the default recipe matters to some head: without it a floor is missed."""
    below = [
        head
        for head, tensors in heads().items()
        if sqnr(exact_attention(*tensors), qflash.attention(*tensors, recipe=HARMS[harm])) < FLOORS[head][0]
    ]
    assert below


def test_the_heads_are_what_their_labels_say() -> None:
    weights, strongest = {}, {}
    for head, (query, key, _) in heads().items():
        weights[head] = torch.softmax(query[0, 0].double() @ key[0, 0].double().mT * query.shape[-1] ** -0.5, dim=-1)
        strongest[head] = float(weights[head].mean(0).max())
    assert strongest["strong-key"] > 0.5 and strongest["strong-key-late"] > 0.3
    assert float(weights["one-key"].max(1).values.min()) > 0.9

    def channels(head: str, place: int) -> torch.Tensor:
        return heads()[head][place][0, 0].double()

    def loudness(x: torch.Tensor) -> float:
        return float(x.max() / x.median())

    assert loudness(channels("one-key", 1).norm(dim=1)) > 4  # a massive token of the key
    assert loudness(channels("one-key", 2).abs().amax(0)) > 15  # and a massive channel of the value
    assert loudness(channels("loud-channels", 0).abs().amax(0)) > 5
    assert loudness(channels("loud-channels", 1).abs().amax(0)) > 7
    key = channels("key-offset", 1)
    assert float((key.mean(0).abs() / key.std(0)).max()) > 40
    value = channels("value-offset", 2)
    assert float(value.mean(0).norm() / value.std(0).norm()) > 0.8
    for head in FLOORS:
        if head.startswith("ordinary"):
            assert strongest[head] < 0.2
