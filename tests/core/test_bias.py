"""Additive masks far from 0: only differences within a row matter, in every back end."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

import qflash
from helpers import DEVICE, exact_attention, make_inputs, move_far, quantize_all, same_bits
from qflash.specification import fixed_point as fp
from qflash_lab.bench.metrics import sqnr

FLOAT32 = torch.float32
FAR_BIASES: dict[str, Callable[[int], torch.Tensor]] = {
    "ALiBi by position": lambda keys: 0.7071 * torch.arange(keys, dtype=FLOAT32),
    "ALiBi by distance": lambda keys: -0.7071 * (torch.arange(keys)[:, None] - torch.arange(keys)).abs().to(FLOAT32)[:8],
    "a constant": lambda keys: torch.full((1, keys), 5000.0),
    "a negative constant": lambda keys: torch.full((1, keys), -1e6),
    "a steep slope": lambda keys: -100.0 * torch.arange(keys, dtype=FLOAT32),
    "rows far apart": lambda keys: torch.linspace(-1e5, 1e5, 8)[:, None] + 8 * torch.randn(8, keys),
    "least": lambda keys: torch.full((8, keys), torch.finfo(FLOAT32).min),
    "largest": lambda keys: torch.full((8, keys), torch.finfo(FLOAT32).max),
    "least and -inf": lambda keys: torch.full((8, keys), torch.finfo(FLOAT32).min).masked_fill(
        torch.arange(keys) % 3 == 1, -math.inf
    ),
    "least and less than that": lambda keys: torch.full((8, keys), -1e38).masked_fill(torch.arange(keys) % 3 == 1, -2e38),
    "twice masked": lambda keys: torch.full((8, keys), -1e9).masked_fill(torch.arange(keys) % 3 == 1, -2e9),
}


@pytest.mark.parametrize("recipe", ["default", "accurate"])
@pytest.mark.parametrize("keys", [30, 2048, 8192])
@pytest.mark.parametrize("kind", FAR_BIASES)
@pytest.mark.slow
def test_only_differences_within_a_row_of_a_bias_matter(kind: str, keys: int, recipe: str) -> None:
    query, key, value = make_inputs(1, 1, 8, keys, head_dim=16)
    bias = FAR_BIASES[kind](keys)
    exact = exact_attention(query, key, value, bias)
    out = qflash.attention(query, key, value, bias, recipe=recipe, backend="reference")
    assert sqnr(exact, out) > 30
    assert same_bits(qflash.attention(query, key, value, bias, recipe=recipe, backend="cpu"), out)
    if keys == 30:
        assert same_bits(
            qflash.attention(*(x.to(DEVICE) for x in (query, key, value, bias)), recipe=recipe, backend="triton").cpu(), out
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, FLOAT32])
def test_rows_of_the_least_number_of_their_type(dtype: torch.dtype) -> None:
    inputs = make_inputs(1, 2, 20, 30, dtype=dtype)
    bias = torch.full((20, 30), torch.finfo(dtype).min, dtype=dtype)
    bias[::2, ::3] = 0
    out = qflash.attention(*inputs, bias)
    assert sqnr(exact_attention(*inputs, bias), out) > 30
    if dtype != torch.float16:  # of which a float64 still sees the scores
        mean = inputs[2].double().mean(dim=2, keepdim=True).expand(-1, -1, 10, -1)
        assert sqnr(mean, out[:, :, 1::2]) > 38


@pytest.mark.parametrize("recipe", ["default", "accurate", "paper"])
def test_fixed_biases_may_be_marks(recipe: str) -> None:
    tensors = [qflash.QuantizedTensor(x.values.to(DEVICE), x.scale.to(DEVICE)) for x in quantize_all(make_inputs(1, 2, 20, 90))]
    generator = torch.Generator().manual_seed(0)
    marks = torch.tensor([fp.BIAS_MASKED, fp.BIAS_EVEN, fp.BIAS_POISON, 0, fp.BIAS_LIMIT, -fp.BIAS_LIMIT], dtype=torch.int32)
    bias = marks[torch.randint(6, (2, 20, 90), generator=generator)]
    bias[:, 5] = torch.where(bias[:, 5] > 0, fp.BIAS_EVEN, fp.BIAS_MASKED)
    for out_dtype in (None, FLOAT32):
        outs = [
            qflash.int8_attention(*tensors, bias.to(DEVICE), out_dtype=out_dtype, recipe=recipe, backend=backend)
            for backend in ("reference", "auto", "triton")
        ]
        values = [out if isinstance(out, torch.Tensor) else out.values for out in outs]
        assert same_bits(values[1], values[0]) and same_bits(values[2], values[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, FLOAT32])
@pytest.mark.parametrize("keys", [20, 100])
def test_one_kernel_takes_float_biases_as_the_reference_does(keys: int, dtype: torch.dtype) -> None:
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        inputs = [x.to(DEVICE, dtype) for x in make_inputs(1, 2, 17, keys, head_dim=32, seed=seed)]
        bias = move_far(torch.randn((1, 2, 17, keys), generator=generator).round(), generator)
        bias = bias.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max).to(DEVICE, dtype)
        expected = qflash.attention(*inputs, bias, backend="reference")
        assert same_bits(qflash.attention(*inputs, bias, backend="triton"), expected)
