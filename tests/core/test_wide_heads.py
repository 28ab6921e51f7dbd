"""Heads of more than 256 channels, as autoencoders have them: bounds, bits and accuracy."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn import functional as F

import qflash
from helpers import DEVICE, make_inputs, same_bits
from qflash.backends import triton_unavailable
from qflash.specification import reference
from qflash.specification.attention_call import int8_call
from qflash.specification.fixed_point import MAX_HEAD_DIM
from qflash.specification.recipe import resolve_recipe

RECIPES = ("default", "accurate", "paper")


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("scale", [2.0**-12, 1.0, 2.0**12])
@pytest.mark.parametrize("biased", [False, True])
def test_no_bound_is_left_at_the_ends_of_int8(recipe: str, scale: float, biased: bool) -> None:
    ends = torch.tensor([-128, 127], dtype=torch.int8)
    rows = torch.stack([ends[0].expand(MAX_HEAD_DIM), ends[1].expand(MAX_HEAD_DIM), ends.repeat(MAX_HEAD_DIM // 2)])[None, None]
    value = ends.repeat(3)[:3, None].expand(3, MAX_HEAD_DIM)[None, None].contiguous()
    bias = torch.tensor([[-(2**28), 2**28, 0]], dtype=torch.int32)[None, None] if biased else None
    for query_scale, key_scale in itertools.product((scale, 2.0**-20), (1.0, 2.0**-20)):
        key_scales = torch.tensor([key_scale, key_scale / 3, key_scale / 1000])[None, None, :, None]
        for scales in (key_scales, key_scales[:, :, :1]):
            call = int8_call(
                rows, torch.full((1, 1, 3, 1), query_scale), rows, scales, value, torch.ones(1, 1, 1, 1), bias, False, 1.0,
                None, torch.float32, resolve_recipe(recipe),
            )  # fmt: skip
            out = reference.int8_attention(call, checked=True)
            assert bool((out.abs() <= 128).all())


@pytest.mark.parametrize("backend", ["cpu", "triton"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("head_dim", "value_dim"), [(512, 512), (320, 40), (40, 400)])
@pytest.mark.slow
def test_back_ends_return_the_same_bits(head_dim: int, value_dim: int, recipe: str, backend: str) -> None:
    device = torch.device("cpu") if backend == "cpu" else DEVICE
    if backend == "triton" and (reason := triton_unavailable(device)):
        pytest.skip(reason)
    tensors = [x.to(device) for x in make_inputs(1, 2, 18, 70, head_dim, value_dim, key_heads=1)]
    masks = (None, torch.randn(18, 70, generator=torch.Generator().manual_seed(1)).to(device))
    for mask in masks:
        out = qflash.attention(*tensors, mask, enable_gqa=True, recipe=recipe, backend=backend)
        want = qflash.attention(*tensors, mask, enable_gqa=True, recipe=recipe, backend="reference")
        assert same_bits(out, want)


@pytest.mark.parametrize(("recipe", "least"), [("default", 33.0), ("accurate", 35.0)])
@pytest.mark.parametrize("biased", [False, True])
def test_accuracy(recipe: str, least: float, biased: bool) -> None:
    tensors = make_inputs(1, 1, 64, 200, 512)
    mask = torch.randn(64, 200, generator=torch.Generator().manual_seed(1)) if biased else None
    want = F.scaled_dot_product_attention(*(x.double() for x in tensors), None if mask is None else mask.double())
    out = qflash.attention(*tensors, mask, recipe=recipe)
    assert 10 * torch.log10(want.square().sum() / (out - want).square().sum()) > least


def test_an_autoencoders_attention_runs_in_integers() -> None:
    torch.manual_seed(0)
    project, x = torch.nn.Linear(512, 3 * 512), torch.randn(1, 100, 512)
    with torch.inference_mode(), qflash.sdpa(fallback="error") as report:
        query, key, value = project(x).view(1, 100, 3, 1, 512).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(query, key, value)
    assert report.integer == 1 and out.shape == (1, 1, 100, 512)
