"""Bit operations of whole networks against a count by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import qflash
from qflash.network.bit_operations import bit_operations
from small_networks import build, draw


def test_a_vision_transformer(made: Any) -> None:
    _, network = made("class token")
    found = bit_operations(network)
    # 4 x 4 patches of 3 x 8 x 8 pixels, 48 channels, two blocks with 2 heads of 24, 17 tokens, 10 classes; the last block has
    # one query, the class token
    linear = 16 * 192 * 48 + 2 * 17 * 48 * 144 + (17 + 1) * (48 * 48 + 2 * 48 * 192) + 48 * 10
    scores = 2 * (17 + 1) * 17 * 24
    assert (found.linear, found.scores, found.values, found.probability_bits) == (linear, scores, scores, 8)
    assert found.multiply_adds == linear + 2 * scores
    assert found.integer == pytest.approx(64 * found.multiply_adds / 1e9)
    assert found.floating() == pytest.approx(16 * found.integer) and found.floating(16) == pytest.approx(4 * found.integer)
    assert "(16.0 times)" in str(found)
    # query and key norms take the products apart and add none; all tokens ask there
    apart = bit_operations(made("query and key norms")[1])
    assert (apart.linear, apart.scores) == (linear, 2 * 2 * 17 * 17 * 24)


def test_a_swin_is_counted_by_pytorch_as_well(made: Any) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    model, network = made("swin")
    x = torch.zeros(1, 3, 32, 32)
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        model(x)
    assert 2 * bit_operations(network).multiply_adds == counter.get_total_flops()


def test_wide_probabilities_and_float_parts() -> None:
    model = build("vit", num_classes=2, depth=1)
    network = qflash.quantize_model(model, [draw(model, 2)], "accurate", progress=False)
    found = bit_operations(network)
    assert found.probability_bits == 16
    assert found.integer == pytest.approx((64 * (found.linear + found.scores) + 128 * found.values) / 1e9)
    mixed = qflash.quantize_model(model, [draw(model, 2)], keep_float=["blocks.0.mlp"], progress=False)
    with pytest.raises(ValueError, match=r"keeps in floating point: .*blocks\.0\.mlp\.fc1, blocks\.0\.mlp\.fc2"):
        bit_operations(mixed)
    with pytest.raises(TypeError, match="network must be what quantize_model returns, got Linear"):
        bit_operations(torch.nn.Linear(2, 2))  # type: ignore[arg-type]
