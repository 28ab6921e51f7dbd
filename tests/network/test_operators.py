"""The integer operators of a network: against float64, against their bounds, at the ends of their ranges."""

from __future__ import annotations

import math

import pytest
import torch

from qflash.fixed_point import Checker
from qflash.network import operators as op

CHECK = Checker(True)


@pytest.mark.parametrize("bits", [0, 6, 8, 10, 11, 12])
def test_gelu_stays_close_for_every_int16(bits: int) -> None:
    x = torch.arange(-(1 << 15), 1 << 15)
    got = op.gelu(x, bits, CHECK).double() / 2**bits
    want = torch.nn.functional.gelu(x.double() / 2**bits)
    assert float((got - want).abs().max()) < 0.0012 + 0.52 / 2**bits


def test_inverse_root_stays_close_over_its_range() -> None:
    v = torch.cat((torch.arange(1 << 28, 1 << 30, 99_991), torch.tensor([(1 << 28), (1 << 30) - 1])))
    x = op.inverse_root(v)
    assert float((x.double() * v.double().sqrt() / 2**44 - 1).abs().max()) < 2.0**-23
    assert int(x.max()) < 1 << 30


@pytest.mark.parametrize(("channels", "spread"), [(1, 5), (3, 1000), (64, 2), (384, 1000), (768, 32767), (4096, 32767)])
def test_rows_are_normalised(channels: int, spread: int) -> None:
    torch.manual_seed(channels)
    h = (torch.randn(30, channels) * spread).round().clamp(-32768, 32767).to(torch.int16)
    h[0], h[1], h[2] = 0, -32768, 32767
    h[3, ::2], h[3, 1::2] = 32767, -32768
    h[4] = 0
    h[4, 0] = 32767
    epsilon = channels * channels // 100 + 1
    got = op.normalise(h, epsilon, CHECK).double() / 2**op.NORM_FRACTION_BITS
    wide = h.double()
    deviation = (wide.var(dim=-1, unbiased=False, keepdim=True) + epsilon / channels**2).sqrt()
    want = (wide - wide.mean(dim=-1, keepdim=True)) / deviation
    assert float((got - want).abs().max()) < 2.0**-17


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32])
def test_layer_norm_saturates_and_rounds_half_up(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    h = torch.randint(-3000, 3000, (16, 48), dtype=torch.int16)
    gain, offset = torch.randint(-(1 << 30), 1 << 30, (48,), dtype=torch.int32), torch.randint(-1000, 1000, (48,))
    shift = 18
    got = op.layer_norm(h, 7, gain, offset.to(torch.int32), shift, dtype, CHECK)
    exact = op.normalise(h, 7).double() * gain.double() / 2**28 + offset.double()
    want = (exact / 2**shift).clamp(*op.LIMITS[dtype])
    assert got.dtype == dtype
    assert float((got.double() - want).abs().max()) <= 0.5 + 2.0**-16


def test_sums_change_their_unit() -> None:
    torch.manual_seed(1)
    x, weight = (torch.randint(-128, 128, shape, dtype=torch.int8) for shape in ((40, 96), (24, 96)))
    bias = torch.randint(-(1 << 20), 1 << 20, (24,), dtype=torch.int32)
    ratio = torch.rand(24, dtype=torch.float64) * 1e-3 + 1e-5
    multiplier = (ratio * 2.0 ** (32 + 9 - 2)).round().to(torch.int32)
    sums = op.accumulate(x, weight, bias, 2, CHECK)
    assert torch.equal(sums, x.long() @ weight.long().T + bias)
    got = op.rescale(sums, multiplier, 2, 9)
    assert float((got.double() - sums.double() * ratio).abs().max()) <= 0.5 + 2.0**-8


def test_sums_out_of_range_are_noticed() -> None:
    x, weight = torch.full((1, 64), -128, dtype=torch.int8), torch.full((1, 64), -128, dtype=torch.int8)
    with pytest.raises(OverflowError, match="acc spans"):
        op.accumulate(x, weight, torch.zeros(1, dtype=torch.int32), 12, CHECK)


def test_pixels_lose_their_top_bit() -> None:
    images = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    assert torch.equal(op.pixels_to_int8(images).long(), images.long() - 128)


def test_gelu_in_int8_rounds_and_saturates() -> None:
    x = torch.arange(-40_000, 40_000, 7)[:, None].expand(-1, 2)
    multiplier, shift = torch.tensor([37, 16383], dtype=torch.int32), 12
    offset = torch.tensor([(1 << 11) - (100 << 12), (1 << 11) + (3 << 12)], dtype=torch.int32)
    got = op.gelu_int8(x, 10, multiplier, offset, shift, CHECK)
    values = op.gelu(x.clamp(-32768, 32767), 10).double() * multiplier.double() / 2**shift
    want = (values + torch.tensor([-100.0, 3.0], dtype=torch.float64)).clamp(-128, 127)
    assert float((got.double() - want).abs().max()) <= 0.5
    assert math.isclose(float(got.double().max()), 127)
