"""The integer operators of a network: against float64, against their bounds, at the ends of their ranges."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from qflash.specification import fixed_point as fp
from qflash.specification import layers as op
from qflash.specification.fixed_point import Checker

CHECK = Checker(True)


def test_gelu_stays_close_up_to_its_limit() -> None:
    x = torch.arange(-(1 << 15), op.ACTIVATION_LIMIT + 1)
    got = op.gelu(x, CHECK).double() * op.GELU_UNIT
    want = torch.nn.functional.gelu(x.double() * op.GELU_UNIT)
    assert float((got - want).abs().max()) < 0.0023
    # a number is rounded to a unit before, and GELU's slope is at most 1.13
    assert torch.equal(op.gelu(torch.tensor([1 - (1 << 30), (1 << 30) - 1]), CHECK), torch.tensor([0, op.ACTIVATION_LIMIT]))


@pytest.mark.parametrize(("slope", "name"), [(1.0, "SiLU"), (1.702, "QuickGELU")])
def test_silu_stays_close_up_to_its_limit(slope: float, name: str) -> None:
    x, unit = torch.arange(-(1 << 15), op.ACTIVATION_LIMIT + 1), op.SILU_UNIT / slope
    got, values = op.silu(x, CHECK).double() * unit, x.double() * unit
    assert float((got - values * torch.sigmoid(slope * values)).abs().max()) < 0.0039 / slope, name
    # a number is rounded to a unit before, and SiLU's slope is at most 1.1
    assert torch.equal(op.silu(torch.tensor([1 - (1 << 30), (1 << 30) - 1]), CHECK), torch.tensor([0, op.ACTIVATION_LIMIT]))


def test_relu_is_exact_up_to_its_limit() -> None:
    ends = torch.tensor([1 - (1 << 30), -1, 0, 1, op.ACTIVATION_LIMIT, op.ACTIVATION_LIMIT + 1, (1 << 30) - 1])
    want = torch.tensor([0, 0, 0, 1, op.ACTIVATION_LIMIT, op.ACTIVATION_LIMIT, op.ACTIVATION_LIMIT])
    assert torch.equal(op.relu(ends, CHECK), want)


def test_the_constants_of_silu_are_the_best_near_them(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.arange(op.TAIL_END + 1)
    want = torch.nn.functional.silu(-x.double() * op.SILU_UNIT)

    def worst(constants: tuple[int, ...]) -> float:
        monkeypatch.setattr(op, "SILU_CONSTANTS", constants)
        return float((op.silu(-x).double() * op.SILU_UNIT - want).abs().max())

    g, c, e, f = op.SILU_CONSTANTS
    best = worst((g, c, e, f))
    for other in ((g - 100, c, e, f), (g + 100, c, e, f), (g, c, e - 200, f), (g, c, e + 200, f), (g, c + 1, e, f)):
        assert worst(other) > best


def test_the_constants_of_gelu_are_the_best_near_them() -> None:
    x = torch.arange(op.TAIL_END + 1)
    want = torch.nn.functional.gelu(-x.double() * op.GELU_UNIT)

    def worst(constants: tuple[int, ...]) -> float:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(op, "GELU_CONSTANTS", constants)
            return float((op.gelu(-x).double() * op.GELU_UNIT - want).abs().max())

    g, c, e, d = op.GELU_CONSTANTS
    best = worst((g, c, e, d))
    for other in ((g - 300, c, e, d), (g + 300, c, e, d), (g, c, e - 100, d), (g, c, e + 100, d), (g, c, e, d + 1)):
        assert worst(other) > best


def test_inverse_root_stays_close_over_its_range() -> None:
    v = torch.cat((torch.arange(1 << 28, 1 << 30, 99_991), torch.tensor([(1 << 28), (1 << 30) - 1])))
    x = op.inverse_root(v)
    assert float((x.double() * v.double().sqrt() / 2**44 - 1).abs().max()) < 2.0**-23
    assert int(x.max()) <= 1 << 30


@pytest.mark.parametrize(("channels", "spread"), [(1, 5), (3, 1000), (64, 2), (384, 1000), (768, 32767), (4096, 32767)])
def test_rows_are_normalised(channels: int, spread: int) -> None:
    torch.manual_seed(channels)
    h = (torch.randn(30, channels) * spread).round().clamp(-32768, 32767).to(torch.int16)
    h[0], h[1], h[2] = 0, -32768, 32767
    h[3, ::2], h[3, 1::2] = 32767, -32768
    h[4] = 0
    h[4, 0] = 32767
    epsilon = 16 * channels // 100 + 1
    got = op.normalise(h, epsilon, CHECK).double() / 2**op.NORM_FRACTION_BITS
    wide = h.double()
    mean = wide.mean(dim=-1, keepdim=True)
    # squares are of the distance from the nearest quarter of a unit
    variance = (wide - (4 * mean + 0.5).floor() / 4).square().mean(dim=-1, keepdim=True) + epsilon / (16 * channels)
    assert float((got - (wide - mean) / variance.sqrt()).abs().max()) < 2.0**-17
    exact = wide.var(dim=-1, unbiased=False, keepdim=True) + epsilon / (16 * channels)
    assert float((variance - exact).abs().max()) < 1 / 64 + 2.0**-20


@pytest.mark.parametrize(("channels", "spread"), [(1, 5), (3, 1000), (64, 2), (384, 1000), (768, 32767), (4096, 32767)])
def test_rows_are_divided_by_their_root_mean_square(channels: int, spread: int) -> None:
    torch.manual_seed(channels)
    h = (torch.randn(30, channels) * spread + spread).round().clamp(-32768, 32767).to(torch.int16)
    h[0], h[1], h[2] = 0, -32768, 32767
    h[3] = 0
    h[3, 0] = 32767
    for epsilon in (0, 16 * channels // 100 + 1, op.MAX_EPSILON - 1):
        got = op.normalise(h, epsilon, CHECK, centred=False).double() / 2**op.NORM_FRACTION_BITS
        square = h.double().square().mean(dim=-1, keepdim=True) + epsilon / (16 * channels)
        want = h.double() / square.sqrt().clamp(min=1e-9)
        assert bool(((got - want).abs() <= want.abs() * 2.0**-23 + 2.0**-20).all())


def test_a_residual_is_added_before_saturation() -> None:
    torch.manual_seed(0)
    h = torch.randint(-3000, 3000, (16, 48), dtype=torch.int16)
    gain, offset = torch.full((48,), 1 << 30, dtype=torch.int32), torch.randint(-1000, 1000, (48,), dtype=torch.int32)
    residual = torch.where(torch.rand(16, 48) < 0.5, 32000, -32000).to(torch.int16)
    wide = op.layer_norm(h, 7, gain, offset, 10, torch.int32, CHECK)
    for centred in (True, False):
        wide = op.layer_norm(h, 7, gain, offset, 10, torch.int32, CHECK, centred=centred)
        got = op.layer_norm(h, 7, gain, offset, 10, torch.int16, CHECK, centred=centred, residual=residual)
        assert torch.equal(got.int(), (wide + residual).clamp(-32768, 32767)) and int(wide.abs().max()) > 2000


def test_a_stream_is_narrowed() -> None:
    h = torch.arange(-32768, 32768, 7, dtype=torch.int32).to(torch.int16)[:, None].expand(-1, 3)
    multiplier = torch.tensor([1 << 24, 1 << 22, (1 << 31) - 1], dtype=torch.int32)
    offset = torch.tensor([0, 12345, -(1 << 29)], dtype=torch.int32)
    got = op.narrow(h, multiplier, 2, offset, check=CHECK)
    want = ((h.double() * 4 + offset) * multiplier / 2.0**32 + 0.5).floor().clamp(-128, 127)
    assert got.dtype == torch.int8 and torch.equal(got.double(), want)


@pytest.mark.parametrize("channels", [*range(1, 18), 63, 64, 65, 384, 1023, 4095, 4096])
def test_constants_of_rows_are_exact(channels: int) -> None:
    by = op.row_constants(channels)
    assert 1 << 29 <= by.inverse <= 1 << 30 and 1 << 29 <= by.root <= 1 << 30
    assert abs(by.inverse * channels - (4 << by.bits)) <= channels / 2
    assert abs(by.root / 2.0 ** (30 + by.shift) * channels**0.5 / 4 - 1) < 2.0**-29


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


@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.int32), ("meta", torch.float64)])
def test_only_a_cpu_multiplies_integers(device: str, dtype: torch.dtype) -> None:
    """PyTorch has no integer product elsewhere; float64 holds the sums."""
    seen = []

    class Types(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.matmul:
                seen.extend(x.dtype for x in args)
            return func(*args, **(kwargs or {}))

    with Types():
        out = op.integer_matmul(*(torch.ones(shape, dtype=torch.int8, device=device) for shape in ((3, 5), (4, 5))))
    assert seen == [dtype, dtype]
    assert out.shape == (3, 4) and out.dtype == torch.int32


def test_sums_change_their_unit() -> None:
    torch.manual_seed(1)
    x, weight = (torch.randint(-128, 128, shape, dtype=torch.int8) for shape in ((40, 96), (24, 96)))
    bias = torch.randint(-(1 << 20), 1 << 20, (24,), dtype=torch.int32)
    ratio = torch.rand(24, dtype=torch.float64) * 1e-3 + 1e-5
    multiplier = (ratio * 2.0 ** (32 - 2)).round()
    offset = bias * 4
    sums = op.integer_matmul(x, weight)
    assert torch.equal(sums, (x.long() @ weight.long().T).int())
    got = op.rescale(sums, 2, offset.to(torch.int32), multiplier.to(torch.int32), CHECK)
    exact = (sums + bias).double() * multiplier * 2.0 ** (2 - 32)
    assert torch.equal(got, (exact + 0.5).floor().long())


def test_sums_out_of_range_are_noticed() -> None:
    x, weight = torch.full((1, 64), -128, dtype=torch.int8), torch.full((1, 64), -128, dtype=torch.int8)
    none = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(OverflowError, match=r"\(acc << left\) \+ b spans"):
        op.rescale(op.integer_matmul(x, weight), 12, none, none, CHECK)


def test_pixels_lose_their_top_bit() -> None:
    images = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    assert torch.equal(op.pixels_to_int8(images).long(), images.long() - 128)


@pytest.mark.parametrize("name", op.ACTIVATIONS)
def test_an_activation_in_int8_rounds_and_saturates(name: str) -> None:
    x = torch.arange(-140_000, 140_000, 7)[:, None].expand(-1, 2)
    multiplier, shift = torch.tensor([37, 8192], dtype=torch.int32), 12
    offset = torch.tensor([(1 << 11) - (100 << 12), (1 << 11) + (3 << 12)], dtype=torch.int32)
    got = op.activate(x, op.Activation(name, multiplier, offset, shift), CHECK)
    values = op.ACTIVATIONS[name][0](x).double() * multiplier.double() / 2**shift
    want = (values + torch.tensor([-100.0, 3.0], dtype=torch.float64)).clamp(-128, 127)
    assert float((got.double() - want).abs().max()) <= 0.5
    assert math.isclose(float(got.double().max()), 127)


@pytest.mark.parametrize(("channels", "spread"), [(2, 9), (48, 2), (384, 1), (384, 30), (384, 300), (1023, 80), (4096, 3)])
def test_normalised_rows_are_as_exact_as_the_document_says(channels: int, spread: int) -> None:
    torch.manual_seed(channels)
    h = (spread * torch.randn(30, channels) + 40 * torch.randn(30, 1)).round().to(torch.int16)
    epsilon = channels // 6 + 1
    got = op.normalise(h, epsilon, CHECK).double() / 2**op.NORM_FRACTION_BITS
    wide = h.double()
    variance = wide.var(dim=-1, unbiased=False, keepdim=True) + epsilon / (16 * channels)
    want = (wide - wide.mean(dim=-1, keepdim=True)) / variance.sqrt()
    # a variance about m / 4 is up to 1/64 more than that about the mean
    assert bool(((got - want).abs() <= want.abs() * (1 / (128 * variance) + 2.0**-23) + 2.0**-20).all())


def test_rows_of_one_value_and_the_largest_epsilon_give_zero() -> None:
    for channels in (1, 2, 3, 5, 384, 4096):
        h = torch.tensor([0, 1, -7, 32767, -32768], dtype=torch.int16)[:, None].expand(-1, channels)
        for epsilon in (0, 1, op.MAX_EPSILON):
            assert not op.normalise(h, epsilon, CHECK).any()
    one = torch.zeros(1, 8, dtype=torch.int16)
    one[0, 0] = 1
    assert int(op.normalise(one, op.MAX_EPSILON, CHECK).abs().max()) <= 1


def test_the_constants_of_every_number_of_channels_are_rounded() -> None:
    for channels in range(1, op.MAX_CHANNELS + 1):
        by = op.row_constants(channels)
        assert 1 << 29 <= by.inverse < 1 << 30 and 1 << 29 <= by.root <= 1 << 30
        assert abs(by.inverse * channels - (4 << by.bits)) * 2 <= channels
        # (root - 1/2)**2 <= 16 * 4**(30 + shift) / channels <= (root + 1/2)**2
        square = 1 << (66 + 2 * by.shift)
        assert (2 * by.root - 1) ** 2 * channels <= square <= (2 * by.root + 1) ** 2 * channels


def test_inverse_roots_have_24_bits() -> None:
    v = torch.cat((torch.arange(1 << 28, 1 << 30, 99_991), torch.tensor([(1 << 28), (1 << 30) - 1])))
    x = op.inverse_root(v)
    assert float((x.double() * v.double().sqrt() / 2**44 - 1).abs().max()) < 2.0**-24
    assert int(x.min()) >= (1 << 29) - 64 and int(x.max()) < 1 << 30


def test_ties_of_sums_go_up() -> None:
    sums = torch.tensor([[-3, -2, -1, 0, 1, 2, 3]]).mT
    got = op.rescale(sums, 1, torch.tensor([0]), torch.tensor([1 << 30]), CHECK)
    assert got.flatten().tolist() == [-1, -1, 0, 0, 1, 1, 2]


def test_products_are_rounded_half_up() -> None:
    a = torch.tensor([-5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5])
    for shift in (1, 2, 9, 32, 40):
        by = 1 << max(0, shift - 3)
        exact = a.double() * by / 2.0**shift
        assert torch.equal(fp.multiply_round(a, by, shift).double(), (exact + 0.5).floor())
        assert torch.equal(fp.multiply_round(a, torch.tensor(by), shift), fp.multiply_round(a, by, shift))
    ends = torch.tensor([-(1 << 31), (1 << 31) - 1])
    assert fp.multiply_round(ends, ends).tolist() == [1 << 30, (1 << 30) - 1]
