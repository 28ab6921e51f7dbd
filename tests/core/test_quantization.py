"""Quantisation by its definition: Equations 1 and 2 at every granularity, smoothing, balancing, rotation, biases."""

from __future__ import annotations

import io
import itertools
import math

import pytest
import torch

import qflash
from helpers import DEVICE, make_inputs, same_bits
from qflash import execution
from qflash.backends import cpu_missing
from qflash.specification import quantization

GRANULARITIES = ("tensor", "head", "token", "channel")


DTYPES = (torch.float16, torch.bfloat16, torch.float32)


REDUCED = {"head": (-2, -1), "token": (-1,), "channel": (-2,)}


def draw(shape: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * torch.exp2(torch.randn(shape, generator=generator))).to(dtype)


def equation_2(x: torch.Tensor, granularity: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the quotient x / s and s, in float64."""
    x = x.double()
    dims = tuple(range(x.dim())) if granularity == "tensor" else REDUCED[granularity]
    scale = x.abs().amax(dim=dims, keepdim=True) / 127
    scale = torch.where(scale == 0, 1.0, scale)
    return x / scale, scale


SHAPES = [(7, 5), (3, 17, 20), (2, 3, 17, 20), (2, 1, 3, 9, 33)]


@pytest.mark.parametrize(("granularity", "shape"), [("tensor", (40,)), *itertools.product(GRANULARITIES, SHAPES)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_and_scale_follow_equation_2(granularity: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = draw(shape, len(shape), dtype)
    quantized = qflash.quantize(x, granularity)
    quotient, scale = equation_2(x, granularity)
    assert quantized.values.dtype == torch.int8
    assert quantized.scale.dtype == torch.float32
    assert quantized.scale.shape == scale.shape
    assert quantized.shape == x.shape
    torch.testing.assert_close(quantized.scale.double(), scale, rtol=2.0**-23, atol=0)
    assert float((quantized.values - quotient).abs().max()) <= 0.5 + 127 * 2.0**-22
    assert int(quantized.values.min()) >= -127
    error = (quantized.dequantize().double() - x.double()).abs()
    assert bool((error <= scale * (0.5 + 2.0**-15)).all())


def test_ties_go_to_even_and_given_scales_saturate() -> None:
    x = torch.tensor([0.5, 1.5, 2.5, 3.5, -0.5, -1.5, -2.5, 126.5, 127.4, 128.0, 1e9, -127.5, -128.4, -129.0, -1e9])
    expected = [0, 2, 2, 4, 0, -2, -2, 126, 127, 127, 127, -128, -128, -128, -128]
    for scale in (1, 1.0, torch.ones(()), torch.ones(15)):
        quantized = qflash.quantize(x, scale=scale)
        assert quantized.values.tolist() == expected
        assert same_bits(qflash.quantize(x.to(DEVICE), scale=1.0, backend="triton").values.cpu(), quantized.values)


@pytest.mark.parametrize("scale_shape", [(), (1,), (1, 1, 1, 1), (3, 1, 1), (2, 3, 7, 1), (5,), (2, 3, 7, 5)])
def test_given_scales_broadcast(scale_shape: tuple[int, ...]) -> None:
    x = draw((2, 3, 7, 5))
    scale = torch.exp2(torch.randn(scale_shape, generator=torch.Generator().manual_seed(1))) / 50
    quantized = qflash.quantize(x, scale=scale)
    assert torch.equal(quantized.scale, scale)
    quotient = (x.double() / scale.double()).clamp(-128, 127)
    assert float((quantized.values - quotient).abs().max()) <= 0.5 + 127 * 2.0**-22
    assert same_bits(qflash.quantize(x.to(DEVICE), scale=scale.to(DEVICE), backend="triton").values.cpu(), quantized.values)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_zeros_have_scale_one(granularity: str, backend: str) -> None:
    x = torch.zeros(2, 3, 4, 5, device=DEVICE)
    quantized = qflash.quantize(x, granularity, backend=backend)
    assert bool((quantized.scale == 1).all())
    assert not quantized.values.any()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_what_is_not_finite_shows_in_its_own_scale(granularity: str, backend: str, bad: float) -> None:
    x = draw((2, 2, 6, 5)).to(DEVICE)
    x[1, 0, 2, 3] = bad
    quantized = qflash.quantize(x, granularity, backend=backend)
    touched = torch.zeros(x.shape, dtype=torch.bool, device=DEVICE)
    touched[1, 0, 2, 3] = True
    touched = touched.any() if granularity == "tensor" else touched.sum(REDUCED[granularity], keepdim=True) > 0
    assert torch.equal(quantized.scale.isnan(), touched.expand(quantized.scale.shape))
    assert bool(quantized.dequantize()[1, 0, 2, 3].isnan())


@pytest.mark.parametrize("shape", [(0,), (0, 5), (2, 0, 5), (0, 2, 3, 4), (2, 2, 0, 4)])
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_empty_tensors_stay_empty(shape: tuple[int, ...], backend: str) -> None:
    granularities = ("tensor",) if len(shape) == 1 or shape[-1] == 0 else GRANULARITIES
    for granularity in granularities:
        if shape[-1] == 0:
            with pytest.raises(ValueError, match="x must"):
                qflash.quantize(torch.zeros(shape), granularity)
            continue
        quantized = qflash.quantize(torch.zeros(shape, device=DEVICE), granularity, backend=backend)
        assert quantized.shape == shape
        assert quantized.scale.shape == quantization.scale_shape(torch.Size(shape), granularity)


@pytest.mark.parametrize("factor", [2.0**-149, 1e-44, 2.0**-126, 1e-38, 1e-30, 1e30, 3e38])
def test_float32_extremes(factor: float) -> None:
    x = torch.tensor([[1.0, -0.55, 0.25, 0.0], [0.125, 0.75, -1.0, 0.3]]) * factor
    quantized = qflash.quantize(x)
    assert bool(quantized.scale.isfinite())
    assert float(quantized.scale) >= 2.0**-126
    if factor > 1e-30:
        assert quantized.values.tolist() == [[127, -70, 32, 0], [16, 95, -127, 38]]
    error = (quantized.dequantize().double() - x.double()).abs()
    assert float(error.max()) <= float(quantized.scale) * 0.51
    triton = qflash.quantize(x.to(DEVICE), backend="triton")
    assert same_bits(triton.values.cpu(), quantized.values)
    assert same_bits(triton.scale.cpu(), quantized.scale)


def test_half_precision_is_quantised_as_the_float32_it_stands_for() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        x = draw((2, 3, 40, 20), 3, dtype)
        narrow, wide = qflash.quantize(x, "head"), qflash.quantize(x.float(), "head")
        assert same_bits(narrow.values, wide.values)
        assert same_bits(narrow.scale, wide.scale)


def test_centering_a_key_takes_out_the_midrange() -> None:
    _, key, _ = make_inputs(keys=50)
    centered = quantization.center_channels(key + 7)
    torch.testing.assert_close(centered.amax(dim=-2), -centered.amin(dim=-2), rtol=1e-5, atol=1e-6)
    # a token alone is its own midrange
    for alone in (key[:, :, :1], key[0, 0, :1, :1]):
        assert not quantization.center_channels(alone).any()


def test_balancing_and_rotating_leave_the_scores_alone() -> None:
    query, key, _ = make_inputs(2, 4, 30, 50, head_dim=20, key_heads=2)
    query[..., 3] *= 100
    exact = query.double() @ key.double().repeat_interleave(2, dim=1).mT
    balanced = quantization.balance_channels(query, key)
    assert float(balanced[0].abs().max()) < float(query.abs().max()) / 4
    # powers of two: the products themselves are the same
    assert torch.equal(balanced[0].double() @ balanced[1].double().repeat_interleave(2, dim=1).mT, exact)
    rotated = [quantization.hadamard_transform(x).double() for x in (query, key)]
    assert rotated[0].shape[-1] == 32
    torch.testing.assert_close(rotated[0] @ rotated[1].repeat_interleave(2, dim=1).mT * 32, exact, rtol=1e-5, atol=1e-3)


def test_balancing_halves_the_octaves_between_the_largest_of_a_group_and_its_key() -> None:
    # query's largest magnitude in either head of a group, key's, and by how many octaves the one falls and the other rises
    channels = [
        (1, 1, 1, 0),
        (2, 1, 1, 0), (1, 1, 2, 0),  # one octave is none, either way
        (8, 1, 1, 1), (1, 1, 8, -1),
        (2, 64, 1, 3), (64, 2, 1, 3),  # the larger head counts, whichever it is
        (0, 0, 1024, 0), (64, 64, 0, 0), (0, 64, 1, 3),
        (math.inf, 1, 1024, 0), (64, 64, math.inf, 0), (math.nan, 64, 1, 0),
    ]  # fmt: skip
    first, second, below, octaves = (torch.tensor(row, dtype=torch.float32) for row in zip(*channels, strict=True))
    query, key = torch.stack((first, second, first, second)).expand(3, 4, -1), torch.stack((below, below)).expand(3, 2, -1)
    signs = torch.tensor([1.0, -0.5])[:, None]
    query, key = query[:, :, None] * signs, key[:, :, None] * signs
    balanced = quantization.balance_channels(query, key)
    assert same_bits(balanced[0], query * torch.exp2(-octaves))
    assert same_bits(balanced[1], key * torch.exp2(octaves))


def test_rotation_is_sylvesters_matrix_of_the_next_power_of_two() -> None:
    for channels, size in {1: 1, 2: 2, 3: 4, 4: 4, 5: 8, 8: 8, 32: 32, 33: 64}.items():
        assert quantization.rotated_head_dim(channels) == size
        matrix = torch.ones(1, 1)
        while len(matrix) < size:
            matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
        rotated = quantization.hadamard_transform(torch.eye(channels)[None, None])[0, 0]
        assert torch.equal(rotated * size, matrix[:channels])


@pytest.mark.parametrize(
    ("shape", "granularity"),
    [((2, 1), "token"), ((1, 2), "channel"), ((2, 2), "element"), ((2,), "channel"), ((), "tensor"), ((2, 1, 1), "head")],
)
def test_two_scales_are_enough_to_tell_the_granularity(shape: tuple[int, ...], granularity: str) -> None:
    assert qflash.QuantizedTensor(torch.zeros(2, 2, 2, dtype=torch.int8), torch.ones(shape)).granularity == granularity


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_granularity_is_read_off_the_scale(granularity: str) -> None:
    quantized = qflash.quantize(draw((2, 3, 7, 5)), granularity)
    assert quantized.granularity == granularity
    assert quantized.device.type == "cpu"


@pytest.mark.parametrize(
    "backend",
    [
        "reference", "triton",
        pytest.param("cpu", marks=pytest.mark.skipif(DEVICE.type != "cpu" or cpu_missing() is not None, reason="not here")),
    ],
)  # fmt: skip
def test_bias_is_rounded_to_fixed_point_and_marks_what_is_not_finite(backend: str) -> None:
    least, most = torch.finfo(torch.float32).min, torch.finfo(torch.float32).max
    near = [0.0, 1.0, -1.0, 1e-6, 1000.0, -2838.0, -1e30, least]
    bias = torch.tensor([near, [x + 5000.0 for x in near[:6]] + [-1e30, least], [x - 1e6 for x in near[:6]] + [-1e30, least]])
    fixed = execution.quantize_bias(bias.to(DEVICE), backend).cpu()
    assert fixed.dtype == torch.int32
    far = torch.tensor([0.0, 6000.0, -999000.0])[:, None]
    exact = ((bias.double() - far) * math.log2(math.e) * 65536).clamp(-(2**28), 2**28)
    assert bool(((fixed - exact).abs() <= 0.5 + exact.abs() * 2.0**-22).all())
    masked, even, poison = -(2**30), 2**30 - 1, 2**30
    rows = [[-math.inf, math.inf, math.nan, 0.0], [-math.inf] * 4, [least, least, -math.inf, least], [1e30, most, most, 0.0]]
    marks = [[masked, poison, poison, 0], [masked] * 4, [even, even, masked, even], [masked, even, even, masked]]
    assert execution.quantize_bias(torch.tensor(rows, device=DEVICE), backend).tolist() == marks


@pytest.mark.parametrize("dtype", [torch.int32, torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(49, 49), (4, 3, 49, 49), (2, 1, 1, 9), (1, 3, 5, 1)])
def test_aligned_bias_is_the_same_bias(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    bias = (torch.randn(shape) * 100).to(dtype)
    aligned = qflash.align_bias(bias)
    assert same_bits(aligned, bias)
    assert aligned.stride(-1) == 1 and all(stride % 8 == 0 for stride in aligned.stride()[:-1])
    assert aligned.stride(-2) < shape[-1] + 8
    assert qflash.align_bias(aligned) is aligned
    expanded = qflash.align_bias(bias.expand(5, *shape))
    assert expanded.shape == (5, *shape) and expanded.stride(0) == 0 and same_bits(expanded[4], bias)


def test_columns_that_begin_at_multiples_are_no_aligned_rows() -> None:
    bias = torch.randn(3, 24, 128)[..., ::8]
    aligned = qflash.align_bias(bias)
    assert aligned.stride() == (24 * 16, 16, 1) and same_bits(aligned, bias)


def test_aligned_bias_gives_the_same_attention() -> None:
    query, key, value = (torch.randn(2, 4, 3, 49, 32) for _ in range(3))
    bias = torch.randn(4, 3, 49, 49)
    for backend in ("cpu", "reference"):
        plain, aligned = (qflash.attention(query, key, value, x, backend=backend) for x in (bias, qflash.align_bias(bias)))
        assert same_bits(plain, aligned)


def test_tensors_without_elements_are_quantised() -> None:
    empty = torch.empty(2, 1, 0, 8)
    values, scale, offset = quantization.quantize_centered(empty, "head")
    assert (values.shape, scale.shape, offset.shape) == ((2, 1, 0, 8), (2, 1, 1, 1), (2, 1, 1, 8))
    assert bool((scale == 1).all()) and bool((offset == 0).all())
    assert quantization.bias_to_fixed(torch.empty(3, 0)).shape == (3, 0)
    for query, key in ((empty, draw((2, 1, 3, 8))), (draw((2, 1, 3, 8)), empty)):
        balanced = quantization.balance_channels(query, key)
        assert torch.equal(balanced[0], query) and torch.equal(balanced[1], key)


def test_tensors_of_one_element_are_not_taken_for_empty_ones() -> None:
    x = torch.full((1, 1, 1, 1), 0.3)
    values, scale, offset = quantization.quantize_centered(x, "tensor")
    assert float(values * scale + offset) == pytest.approx(0.3, rel=2.0**-20)
    assert int(quantization.bias_to_fixed(torch.full((1, 1), 0.3))) == round(0.3 * math.log2(math.e) * 2**16)
    query, key = quantization.balance_channels(torch.full((1, 1, 1, 1), 64.0), torch.full((1, 1, 1, 1), 1.0))
    assert float(query) == 8.0
    assert float(key) == 8.0


def test_a_zero_point_is_no_negative_zero() -> None:
    zero = quantization.zero_point(torch.tensor([-1e-3, 0.0, -0.0]), torch.tensor([1.0, 1.0, 1.0]))
    assert not bool(torch.signbit(zero).any())


def test_equality_is_of_elements() -> None:
    x = torch.randn(2, 3, 5, 8)
    one, same = qflash.quantize(x, "token"), qflash.quantize(x, "token")
    other = qflash.QuantizedTensor(one.values, one.scale * 2)
    assert (one == same).dtype == torch.bool and (one == same).shape == x.shape and bool((one == same).all())
    assert not (one != same).any()
    assert torch.equal(one == other, one.values == 0) and torch.equal(one != other, one.values != 0)
    assert bool((one == one.dequantize()).all()) and torch.equal(one == 0.0, one.values == 0)
    assert (one == "x") is False and (one != None) is True  # noqa: E711
    assert len({one, one, same}) == 2 and one in [one]


def test_to_another_device() -> None:
    x = qflash.quantize(torch.randn(2, 3, 5, 8), "channel", center=True)
    assert x.to("cpu") is x and x.to(device=torch.device("cpu")) is x
    copied = x.to("cpu", copy=True)
    assert copied is not x and copied.values.data_ptr() != x.values.data_ptr() and bool((copied == x).all())
    moved = x.to("meta")
    assert moved.offset is not None and moved.offset.is_meta
    assert moved.values.is_meta and moved.scale.is_meta and moved.granularity == "channel"
    query = qflash.quantize(torch.randn(2, 3, 5, 8))
    out = qflash.int8_attention(query, query, x, output_scale=0.25)
    assert isinstance(out, qflash.QuantizedTensor)
    number = out.to("meta")
    assert number.scale.is_meta and number.scale.shape == ()
    for wrong in (torch.float16, torch.int8, torch.zeros(1)):
        with pytest.raises(TypeError, match=r"to\(\) takes a device"):
            x.to(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("center", [False, True])
def test_saved_and_loaded_by_the_safe_default(center: bool) -> None:
    x = qflash.quantize(torch.randn(2, 3, 5, 8), "channel", center=center)
    query = qflash.quantize(torch.randn(2, 3, 5, 8))
    number = qflash.int8_attention(query, query, x, output_scale=0.25)
    written = io.BytesIO()
    torch.save({"x": x, "number": number}, written)
    written.seek(0)
    loaded = torch.load(written, weights_only=True)
    for name, want in (("x", x), ("number", number)):
        assert isinstance(want, qflash.QuantizedTensor)
        again = loaded[name]
        assert torch.equal(again.values, want.values) and torch.equal(again.scale, want.scale)
        assert (again.offset is None) == (want.offset is None) and bool((again == want).all())
