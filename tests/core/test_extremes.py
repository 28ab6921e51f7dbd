"""Finite inputs give finite outputs, and the right ones, up to the end of every type."""

from __future__ import annotations

import pytest
import torch

import qflash
from helpers import DEVICE, same_bits
from qflash.specification.quantization import center_channels, hadamard_transform, scale_from_amplitude
from qflash_lab.bench.metrics import sqnr

RECIPES = {
    "default": qflash.DEFAULT,
    "accurate": qflash.ACCURATE,
    "paper": qflash.PAPER,
    "rotate": qflash.DEFAULT.replace(rotate=True),
    "rotate and balance": qflash.ACCURATE.replace(rotate=True),
    "rotate, not centred": qflash.DEFAULT.replace(rotate=True, smooth_key=False),
    "tensor": qflash.DEFAULT.replace(query_granularity="tensor", key_granularity="tensor", value_granularity="tensor"),
    "token": qflash.DEFAULT.replace(key_granularity="token"),
}


def exact(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    return torch.softmax(query.double() @ key.double().mT * scale, -1) @ value.double()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("large", ["query", "key", "value", "shifted key", "all"])
def test_numbers_near_the_end_of_a_type(large: str, dtype: torch.dtype, recipe: str) -> None:
    end = torch.finfo(dtype).max
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.rand((1, 2, 24, 32), generator=generator, dtype=torch.float64) * 2 - 1 for _ in range(3))
    # the largest of them is the largest there is
    query, key, value = (x / x.abs().amax() for x in (query, key, value))
    scale = 4.0
    if large in ("query", "all"):
        query, scale = query * end, scale / end
    if large in ("key", "all"):
        key, scale = key * end, scale / end
    if large == "shifted key":
        # all around two thirds of the end, of one sign a channel
        key = (key * 0.3 + torch.tensor([1.0, -1.0] * 16) * 0.7) * end
        scale = scale / end
    if large in ("value", "all"):
        value = value * end
        value[..., 0] = end
    least = 2.0**-60
    if scale < least:
        # what the softmax scale does not reach, the other factor has
        other = "query" if "key" in large else "key"
        if large == "all":
            pytest.skip("scores that no softmax scale brings back")
        if other == "query":
            query, scale = query * (scale / least), least
        else:
            key, scale = key * (scale / least), least
    query, key, value = (x.to(dtype) for x in (query, key, value))
    expected = exact(query, key, value, scale)
    wanted = qflash.attention(query, key, value, scale=scale, recipe=RECIPES[recipe], backend="reference")
    assert wanted.isfinite().all()
    assert sqnr(expected / end, wanted.double() / end) > (12 if recipe == "paper" else 20)
    # the interpreter takes long
    interpreted = DEVICE.type == "cpu" and (dtype != torch.float32 or large not in ("shifted key", "all"))
    for backend, device in (("cpu", torch.device("cpu")), *(() if interpreted else (("triton", DEVICE),))):
        given = [x.to(device) for x in (query, key, value)]
        for _ in range(2):
            out = qflash.attention(*given, scale=scale, recipe=RECIPES[recipe], backend=backend)
            assert same_bits(out.cpu(), wanted), backend


@pytest.mark.parametrize("granularity", ["tensor", "head", "token", "channel"])
@pytest.mark.parametrize("backend", ["reference", "cpu", "triton"])
def test_the_largest_float_can_be_quantised(backend: str, granularity: str) -> None:
    end = torch.finfo(torch.float32).max
    x = torch.tensor([[[end, -end, 1.0], [end * 0.99999, 0.0, end]]]).to(DEVICE if backend == "triton" else "cpu")
    out = qflash.quantize(x, granularity, backend=backend)
    assert out.dequantize().isfinite().all()
    assert torch.equal(out.values.cpu(), qflash.quantize(x.cpu(), granularity, backend="reference").values)
    assert out.values.max() == 127 and out.values.min() == -127


def test_arithmetic_before_quantisation_stays_finite() -> None:
    end = torch.finfo(torch.float32).max
    x = torch.full((1, 1, 4, 256), end)
    x[..., ::2] *= -1
    assert hadamard_transform(x).isfinite().all() and hadamard_transform(x).abs().amax() == end
    centred = center_channels(torch.tensor([[end], [end * 0.5]]))
    assert centred.isfinite().all() and torch.allclose(centred, torch.tensor([[end * 0.25], [-end * 0.25]]))
    assert (scale_from_amplitude(torch.tensor([end, end * 0.9999])) * 127 < end).all()


def test_the_transform_over_its_size_is_orthogonal() -> None:
    x = torch.randn(1, 1, 5, 48, dtype=torch.float32, generator=torch.Generator().manual_seed(0))
    out = hadamard_transform(x).double()
    assert out.shape[-1] == 64
    assert torch.allclose(out @ out.mT * 64, x.double() @ x.double().mT, atol=1e-5)
