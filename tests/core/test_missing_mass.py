"""Row sums before rounding, the missing mass at V's mean, and values with zero points: definitions, bounds, accuracy."""

from __future__ import annotations

import dataclasses
import math
import random
from fractions import Fraction

import numpy as np
import pytest
import torch

import qflash
from helpers import DEVICE, INTERPRETER, draw_case, exact_attention, same_bits
from qflash.backends import cpu_missing
from qflash.specification import fixed_point as fp
from qflash.specification import quantization, reference
from qflash.specification.attention_call import AttentionCall, int8_call
from qflash.specification.recipe import ACCURATE, DEFAULT, PAPER, Recipe
from qflash_lab.bench.metrics import sqnr

BACKENDS = ["reference", pytest.param("cpu", marks=pytest.mark.skipif(cpu_missing() is not None, reason="no compiler"))]
ROUNDED = DEFAULT.replace(row_sum="rounded")
PER_TENSOR = {"query_granularity": "tensor", "key_granularity": "tensor", "value_granularity": "tensor"}


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# --- which rows ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "exact"),
    [
        ({}, True),
        ({"row_sum": "rounded"}, False),
        ({"probability_bits": 7}, False),
        ({"probability_bits": 15}, False),
        ({"probability_rounding": "floor"}, False),
        ({"output": "value_scale"}, False),
        ({"exponential": "linear"}, True),
    ],
)
def test_which_recipes_have_an_exact_sum(changes: dict, exact: bool) -> None:
    recipe = DEFAULT.replace(**changes)
    assert recipe.takes_exact_sum(65) is exact
    assert not recipe.takes_exact_sum(64)


def test_presets() -> None:
    assert not PAPER.takes_exact_sum(1000)
    assert (PAPER.smooth_value, DEFAULT.smooth_value, ACCURATE.smooth_value) == (False, False, True)


def test_rows_of_at_most_64_keys_take_the_rounded_sum() -> None:
    for keys, same in ((64, True), (65, False)):
        q, k, v = draw(0, 1, 2, 9, 32), draw(1, 1, 2, keys, 32), draw(2, 1, 2, keys, 32)
        outputs = [qflash.attention(q, k, v, recipe=recipe) for recipe in (DEFAULT, ROUNDED)]
        assert torch.equal(*outputs) is same


# --- the numbers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exponential", ["linear", "quadratic"])
def test_fine_probabilities_round_to_probabilities(exponential: str) -> None:
    for bits in (7, 8):
        fraction_bits = torch.tensor(12)
        offset, _, _ = fp.probability_constants(exponential, bits)
        t = torch.arange(0, 40 << 12) + fp.exponent_offset(offset, fraction_bits)
        fine = fp.fine_probability(t, fraction_bits, exponential, bits)
        assert torch.equal(fp.round_shift(fine, 7), fp.probability(t, fraction_bits, exponential, bits, True))
        # halving from octave to octave without end: no tail is left behind at the last bit that P has
        assert int(fine.max()) < 128 << bits and int(fine[-1]) == 0


def test_twice_the_mean_is_rounded() -> None:
    chance = random.Random(0)
    for keys in (1, 2, 3, 65, 100, 197, 257, 1370, 4096, 65535, 65536):
        sums = torch.tensor([-128 * keys, 127 * keys, 0, *(chance.randint(-128 * keys, 127 * keys) for _ in range(200))])
        got = fp.twice_mean(sums, keys)
        for total, mean in zip(sums.tolist(), got.tolist(), strict=True):
            assert abs(mean - Fraction(2 * total, keys)) <= Fraction(1, 2) + Fraction(1, 1000)
        assert int(got.abs().max()) <= 256


@pytest.mark.parametrize("keys", [65537, 700_001, (1 << 20) - 1, 1 << 20])
def test_twice_the_mean_of_longer_rows_is_near(keys: int) -> None:
    sums = torch.linspace(-128 * keys, 127 * keys, 1001, dtype=torch.float64).round().to(torch.int64)
    got = fp.twice_mean(sums, keys)
    # the inverse has bit_length(2**31 // keys) bits, 12 for the longest
    assert float((got - 2 * sums.double() / keys).abs().max()) <= 0.5 + 0.125
    assert int(got.abs().max()) <= 256


def beside_ties() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a, b and c whose ``a * b + c`` is next to the middle of two float32, some nearer than float64 tells."""
    large = torch.arange(1 << 23, (1 << 23) + 4096)
    small = ((1 << 46) + 196608) // large
    # products 2**-24 and a little, less than a unit of float64's sum and more than half of it
    chosen = ((large * small - (1 << 46)) * 2.0**-18 - 0.75).abs() < 0.25
    a = torch.cat((large[chosen] * 2.0**-23, torch.full((50,), 1 + 2.0**-15)))
    b = torch.cat((small[chosen] * 2.0**-47, torch.full((50,), (1 - 2.0**-15) * 2.0**-24)))
    c = 1 + torch.arange(len(a)) % 8 * 2.0**-23
    # the sum is small beside the product
    a, b = torch.cat((a, torch.full((4,), 1 + 2.0**-12))), torch.cat((b, torch.full((4,), 1 + 2.0**-12)))
    c = torch.cat((c, torch.tensor([1.0, -1.0, 2.0**-9, -(2.0**-9)]) * 2.0**-60))
    signs = [(x, y, z) for x in (1.0, -1.0) for y in (1.0, -1.0) for z in (1.0, -1.0)]
    return (
        torch.cat([a * x * scale for x, _, _ in signs for scale in (1.0, 2.0**-5)]).float(),
        torch.cat([b * y for _, y, _ in signs for _ in range(2)]).float(),
        torch.cat([c * z * scale for _, _, z in signs for scale in (1.0, 2.0**-5)]).float(),
    )


def test_a_product_and_sum_are_rounded_once() -> None:
    generator = np.random.default_rng(0)
    a, b, c = (torch.from_numpy(x) for x in generator.normal(size=(3, 20000)).astype(np.float32))
    # sums that nearly cancel, and ties
    c[:5000] = -(a * b)[:5000]
    a[5000:10000] = torch.round(a[5000:10000] * 64)
    b[5000:10000] = 2.0**-30
    c[5000:10000] = torch.round(c[5000:10000] * 4096)
    a, b, c = (torch.cat(x) for x in zip((a, b, c), beside_ties(), strict=True))
    got = fp.fused_multiply_add(a, b, c)
    for x, y, z, w in zip(a.tolist(), b.tolist(), c.tolist(), got.tolist(), strict=True):
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        below, above = np.nextafter(np.float32(w), np.float32(-math.inf)), np.nextafter(np.float32(w), np.float32(math.inf))
        error = abs(Fraction(w) - exact)
        assert error <= min(abs(Fraction(float(below)) - exact), abs(Fraction(float(above)) - exact))
    assert fp.fused_multiply_add(torch.tensor([math.nan]), a[:1], b[:1]).isnan().all()


def test_the_missing_mass_goes_to_the_mean() -> None:
    """One strong key and a tail of which every weight rounds to 0: the tail counts, at the mean of the values."""
    keys = 500
    score = torch.zeros(1, 1, 1, keys)
    score[..., 0] = math.log(1500.0)
    values = draw(0, 1, 1, keys, 16)
    values[:, :, 0] = 0.5
    q = torch.ones(1, 1, 1, 16)
    k = (score.mT / 16).expand(1, 1, keys, 16)
    exact = exact_attention(q, k, values, scale=1.0)
    new, old = (qflash.attention(q, k, values, scale=1.0, recipe=recipe) for recipe in (DEFAULT, ROUNDED))
    assert torch.allclose(old, torch.full_like(old, 0.5), atol=0.02)
    assert float((new - exact).abs().max()) < 0.03 < float((old - exact).abs().max())


@pytest.mark.parametrize("keys", [65, 1000, 65536, 131073])
def test_bounds_hold_for_the_largest_sums(keys: int) -> None:
    """Every weight as large as can be, or just below and just above where rounding goes up, and V at its ends."""
    queries = torch.tensor([[0], [1], [127], [-128]], dtype=torch.int8)[None, None].expand(1, 1, 4, 4)
    key = torch.zeros(1, 1, keys, 4, dtype=torch.int8)
    key[:, :, 0] = 127
    key[:, :, 1::3] = 126
    one = torch.ones(1, 1, 1, 1)
    for value in (-128, 127):
        for scale in (2.0**-14, 2.0**-9, 9.0 / 508 / 126, 0.1):
            v = torch.full((1, 1, keys, 3), value, dtype=torch.int8)
            call = int8_call(queries, one, key, one, v, one, None, False, scale, one, torch.int8, DEFAULT)
            assert reference.int8_attention(call, checked=True).eq(value).all()


# --- values with zero points -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("granularity", ["tensor", "head", "channel"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_centred_values_fit_and_stand_for_the_input(granularity: str, backend: str) -> None:
    x = draw(0, 2, 3, 50, 20)
    x[..., 0] *= 1000
    x[..., 1] += 300
    x[..., 2] = 7
    x[..., 3] = 0
    x[..., 4] = 1e30 * x[..., 4]
    got = qflash.quantize(x, granularity, center=True, backend=backend)
    assert got.offset is not None and got.offset.shape == (2, 3, 1, 20)
    assert int(got.values.min()) >= -127 and int(got.values.max()) <= 127
    error = (got.dequantize().double() - x.double()).abs()
    assert bool((error <= got.scale * 0.502 + x.abs() * 2.0**-22).all())
    if granularity == "channel":
        wide = (x.amax(dim=-2) - x.amin(dim=-2)).double() / 2 / 126.5
        assert torch.allclose(got.scale[..., 0, 5:].double(), wide[..., 5:], rtol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_centred_values_of_all_kinds_have_the_same_bits(backend: str) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for bad in (None, math.nan, math.inf):
            x = (draw(3, 2, 2, 70, 24) * 5 + 2).to(dtype)
            if bad is not None:
                x[1, 0, 5, 3] = bad
            for granularity in ("tensor", "head", "channel"):
                expected = quantization.quantize_centered(x, granularity)
                got = qflash.quantize(x, granularity, center=True, backend=backend)
                for one, other in zip((got.values, got.scale, got.offset), expected, strict=True):
                    assert one is not None and same_bits(one, other)


def test_an_offset_of_the_value_is_added_to_the_output() -> None:
    q, k, v = draw(0, 1, 4, 9, 32), draw(1, 1, 2, 80, 32), draw(2, 1, 2, 80, 32) + 40
    a, b, c = qflash.quantize(q, "token"), qflash.quantize(k, "head", center=True), qflash.quantize(v, "channel", center=True)
    exact = exact_attention(q, k, v)
    for backend in ("reference", "auto"):
        out = qflash.int8_attention(a, b, c, enable_gqa=True, backend=backend, out_dtype=torch.float32)
        assert isinstance(out, torch.Tensor) and float((out - exact).abs().max()) < 0.05
        for _ in range(2):
            small = qflash.int8_attention(a, b, c, enable_gqa=True, backend=backend)
            assert isinstance(small, qflash.QuantizedTensor) and small.offset is not None
            assert small.offset.shape == (1, 4, 1, 32)
            assert float((small.dequantize() - exact).abs().max()) < 0.05
        fitted = qflash.int8_attention(a, b, c, enable_gqa=True, backend=backend, output_scale=0.01)
        assert isinstance(fitted, qflash.QuantizedTensor)
        assert float((fitted.dequantize() - exact).abs().max()) < 0.02


def test_a_row_without_a_key_is_zero_beside_an_offset() -> None:
    q, k, v = draw(0, 1, 1, 4, 16), draw(1, 1, 1, 70, 16), draw(2, 1, 1, 70, 16) + 9
    mask = torch.ones(4, 70, dtype=torch.bool)
    mask[2] = False
    for backend in ("reference", "auto"):
        out = qflash.attention(q, k, v, mask, recipe=ACCURATE, backend=backend)
        assert bool((out[:, :, 2] == 0).all()) and float(out[:, :, 1].mean()) > 8


@pytest.mark.parametrize("shape", [(), (1,), (4,), (1, 4), (3, 1, 1), (3, 1, 4), (2, 1, 1, 4), (2, 3, 1, 4), (1, 1, 1, 1)])
def test_an_offset_is_added_to_what_the_values_stand_for(shape: tuple[int, ...]) -> None:
    values, scale, offset = torch.arange(-60, 60, dtype=torch.int8).view(2, 3, 5, 4), torch.tensor(0.5), draw(0, *shape)
    shifted = qflash.QuantizedTensor(values, scale, offset)
    assert torch.equal(shifted.dequantize(), values.float() * 0.5 + offset)


def test_offsets_that_cannot_be() -> None:
    values, scale = torch.zeros(2, 5, 4, dtype=torch.int8), torch.ones(())
    with pytest.raises(TypeError, match=r"offset must be a float32 tensor or None, got torch\.float64 tensor"):
        qflash.QuantizedTensor(values, scale, torch.zeros(4, dtype=torch.float64))
    for shape in ((3,), (2,), (3, 1, 4), (1, 2, 5, 4)):
        with pytest.raises(ValueError, match=rf"offset of shape \({', '.join(map(str, shape))},?\) does not broadcast"):
            qflash.QuantizedTensor(values, scale, torch.zeros(shape))
    with pytest.raises(ValueError, match="offset must be the same for all tokens"):
        qflash.QuantizedTensor(values, scale, torch.zeros(5, 4))
    plain, shifted = (qflash.QuantizedTensor(values, scale, offset) for offset in (None, torch.ones(4)))
    with pytest.raises(ValueError, match="query must have no offset"):
        qflash.int8_attention(shifted, plain, plain)
    with pytest.raises(ValueError, match="center=True finds a scale"):
        qflash.quantize(torch.zeros(3, 4), "token", center=True)
    with pytest.raises(ValueError, match="center=True finds a scale"):
        qflash.quantize(torch.zeros(3, 4), "channel", 0.1, center=True)


# --- back ends -------------------------------------------------------------------------------------------------------


def with_offset(call: AttentionCall, seed: int) -> AttentionCall:
    """Give the values of a call an offset, of a few of the shapes that there may be."""
    chance = random.Random(seed)
    assert call.scales is not None
    shape = (*(chance.choice((1, size)) for size in call.value.shape[:2]), 1, call.value_dim)
    offset = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(call.query.device)
    return dataclasses.replace(call, scales=call.scales._replace(offset=offset))


@pytest.mark.parametrize("case", range(40))
@pytest.mark.slow
def test_kernels_have_the_bits_of_the_reference_beside_an_offset(case: int) -> None:
    from qflash.kernels.dispatch import launch_attention

    drawn = draw_case(5000 + case, INTERPRETER)
    call = with_offset(int8_call(*drawn.arguments(DEVICE)), case)
    expected = reference.int8_attention(call)
    assert same_bits(launch_attention(call, tiles=drawn.tiles), expected)
    if DEVICE.type == "cpu" and cpu_missing() is None:
        from qflash.kernels.cpu.launch import launch_attention as launch_c

        assert same_bits(launch_c(call), expected)


@pytest.mark.parametrize("recipe", [DEFAULT, DEFAULT.replace(smooth_value=True), ROUNDED.replace(smooth_value=True), ACCURATE])
@pytest.mark.parametrize("mask", ["none", "causal", "bool", "bias"])
@pytest.mark.slow
def test_back_ends_agree_from_floats(recipe: Recipe, mask: str) -> None:
    for queries, keys, dtype in ((20, 70, torch.float16), (9, 300, torch.float32), (16, 49, torch.float16)):
        q, k, v = (draw(i, 1, 2, n, 32).to(dtype) for i, n in enumerate((queries, keys, keys)))
        v[..., 0] += 20
        given = None
        if mask == "bool":
            given = draw(7, 1, 1, queries, keys) > -1
            given[:, :, 3] = False
        elif mask == "bias":
            given = draw(7, 1, 2, queries, keys).to(dtype)
        options = {"attn_mask": given, "is_causal": mask == "causal", "recipe": recipe}
        expected = qflash.attention(q, k, v, backend="reference", **options)
        for _ in range(2):
            assert same_bits(qflash.attention(q, k, v, **options), expected)
            assert same_bits(qflash.attention(q.to(DEVICE), k.to(DEVICE), v.to(DEVICE), backend="triton", **options), expected)


# --- accuracy --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "floor"),
    [((2, 6, 197, 64), 36.9), ((1, 1, 1024, 64), 36.0), ((1, 1, 4096, 64), 35.0)],
    ids=["A2", "1024", "4096"],
)
def test_floors_of_uniform_inputs_with_scales_per_tensor(shape: tuple[int, ...], floor: float) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.rand(shape, generator=generator) * 8 - 4 for _ in range(3))
    query = query[:, :, :256]
    exact = exact_attention(query, key, value)
    assert sqnr(exact, qflash.attention(query, key, value, recipe=DEFAULT.replace(**PER_TENSOR))) >= floor


def test_floor_of_values_with_a_common_offset() -> None:
    query, key, value = draw(0, 1, 2, 197, 64), draw(1, 1, 2, 197, 64), draw(2, 1, 2, 197, 64) + 100
    exact = exact_attention(query, key, value)
    apart = exact - value.double().mean(dim=-2, keepdim=True)
    for recipe, floor in ((DEFAULT.replace(smooth_value=True), 34.0), (ACCURATE, 36.5)):
        error = (qflash.attention(query, key, value, recipe=recipe).double() - exact).norm()
        assert 20 * math.log10(float(apart.norm() / error)) >= floor
