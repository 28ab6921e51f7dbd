"""Quantisation kernels have the bits of the specification."""

from __future__ import annotations

import math

import pytest
import torch

import qflash
from core.test_quantization import DTYPES, GRANULARITIES, draw
from helpers import DEVICE, LAYOUTS, lay_out, move_far, same_bits
from qflash import execution
from qflash.backends import find_backend


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_kernels_have_the_reference_bits(layout: str, granularity: str, center: bool) -> None:
    seed = LAYOUTS.index(layout)
    dtype = DTYPES[seed % 3]
    shape = [(2, 2, 130, 33), (1, 1, 17, 256), (2, 1, 1, 1), (1, 2, 65, 64), (1, 1, 200, 48), (2, 1, 31, 7)][seed]
    x = lay_out(draw(shape, seed, dtype) + 3, layout).to(DEVICE)
    values, scale = find_backend("triton", x.device).quantize(x, granularity, center)
    expected_values, expected_scale = find_backend("reference", x.device).quantize(x, granularity, center)
    assert same_bits(values, expected_values)
    assert same_bits(scale, expected_scale)


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("granularity", ["head", "token", "channel"])
@pytest.mark.parametrize("shape", [(1, 2, 577, 64), (1, 1, 4600, 16), (1, 1, 300, 100)])
@pytest.mark.slow
def test_long_heads_are_quantised_in_chunks_to_the_same_bits(shape: tuple[int, ...], granularity: str, center: bool) -> None:
    x = (draw(shape, 7, torch.float16) + 2).to(DEVICE)
    for _ in range(2):
        values, scale = find_backend("triton", x.device).quantize(x, granularity, center)
        expected_values, expected_scale = find_backend("reference", x.device).quantize(x, granularity, center)
        assert same_bits(values, expected_values)
        assert same_bits(scale, expected_scale)
        x[0, 0, -1, 0] = math.inf


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("center", [False, True])
def test_kernels_agree_on_what_is_not_finite(center: bool, bad: float, granularity: str) -> None:
    x = draw((1, 2, 40, 16), 4)
    x[0, 1, 7, 3] = bad
    _, scale = find_backend("triton", x.to(DEVICE).device).quantize(x.to(DEVICE), granularity, center)
    _, expected_scale = find_backend("reference", x.device).quantize(x, granularity, center)
    assert same_bits(scale.cpu(), expected_scale)
    assert bool(expected_scale.isnan().any())


@pytest.mark.parametrize("shape", [(2, 3, 17, 24), (2, 2, 3, 9, 5), (3, 40)])
def test_given_scales_and_middles(shape: tuple[int, ...]) -> None:
    channels = (shape[-3] if len(shape) > 2 else 1, 1, shape[-1])
    x, middle = draw(shape, 3, torch.float16).to(DEVICE), draw(channels, 4).to(DEVICE)
    middle = middle if len(shape) > 2 else middle[0]
    for scale in (middle.abs() + 0.01, (middle.abs() + 0.01).amax(-1, keepdim=True)):
        got, expected = (execution.quantize_with_scale(x, scale, backend, middle) for backend in ("triton", "reference"))
        assert same_bits(got, expected) and got.shape == x.shape
        assert same_bits(expected, execution.quantize_with_scale(x.float() - middle, scale, "reference"))
        assert not same_bits(expected, execution.quantize_with_scale(x, scale, "reference"))


def test_given_scales_that_nobody_looked_at() -> None:
    """On a GPU scales are not looked at; those that are refused elsewhere give the specification's numbers."""
    x = torch.tensor([1.5, -2.5, 0.0, torch.nan, torch.inf, -torch.inf, 1e30, -1e-30], device=DEVICE).view(1, 1, 1, 8)
    for number in (0.0, -0.0, -0.5, 1e-38, 3e38, torch.inf, torch.nan):
        scale = torch.full((1, 1, 1, 1), number, device=DEVICE)
        got, expected = (execution.quantize_with_scale(x, scale, backend) for backend in ("triton", "reference"))
        assert same_bits(got, expected), number


@pytest.mark.parametrize("rank", [1, 2, 3, 5])
def test_kernels_take_any_rank(rank: int) -> None:
    shape = (2, 2, 3, 9, 5)[-rank:]
    for granularity in GRANULARITIES if rank > 1 else ("tensor",):
        x = draw(shape, rank).to(DEVICE)
        got, expected = (qflash.quantize(x, granularity, backend=backend) for backend in ("triton", "reference"))
        assert same_bits(got.values, expected.values)
        assert same_bits(got.scale, expected.scale)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(5,), (3, 40), (2, 3, 7, 1), (1, 2, 3, 1100), (2, 2, 3, 5, 30), (2, 0, 3), (3, 0)])
def test_the_kernel_makes_the_reference_s_bias(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    bias = move_far(torch.randn(shape, generator=generator), generator).to(dtype) if 0 not in shape else torch.ones(shape)
    bias = torch.where(torch.rand(shape, generator=generator) < 0.01, math.nan, bias)
    for x in (bias, bias.transpose(0, -1).contiguous().transpose(0, -1), bias[..., :1].expand(shape)):
        expected = execution.quantize_bias(x, "reference")
        assert same_bits(execution.quantize_bias(x.to(DEVICE), "triton").cpu(), expected) and expected.is_contiguous()
