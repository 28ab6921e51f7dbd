"""Quantising everything for long rows in two launches has exactly the bits of quantising tensor by tensor."""

from __future__ import annotations

import math

import pytest
import torch

import qflash
from helpers import DEVICE, attention_launches, lay_out, make_inputs, print_products, products_printed_by, same_bits, slow
from qflash.backends import find_backend
from qflash.kernels.gluon.sm90.launch import last_step, streaming_steps
from qflash.kernels.triton.launch import pack_key, pack_value
from qflash.kernels.triton.quantize_streaming import launch_quantize_long, quantizes_long
from qflash.specification.attention_call import int8_call
from qflash.specification.recipe import ACCURATE, DEFAULT, PAPER

PLAIN = DEFAULT.replace(smooth_value=False)


@pytest.mark.parametrize(
    ("shape", "layouts", "dtype", "center"),
    [
        ((1, 2, 300, 270, 64, 64, 2), ("contiguous", "contiguous", "contiguous"), torch.float16, True),
        ((2, 2, 40, 257, 48, 80, 1), ("packed", "tokens_first", "channels_first"), torch.bfloat16, True),
        ((1, 1, 500, 129, 20, 16, 1), ("every_second", "packed", "packed"), torch.float32, False),
        ((2, 3, 1, 400, 32, 128, 3), ("tokens_first", "expanded", "packed"), torch.float16, False),
        ((1, 1, 33, 2100, 8, 24, 1), ("contiguous", "contiguous", "contiguous"), torch.float16, True),
        # so many heads that a program looks through all keys of one
        ((4, 32, 5, 130, 32, 32, 32), ("contiguous", "contiguous", "contiguous"), torch.float16, True),
    ],
)
@pytest.mark.slow
def test_bits_are_those_of_single_tensors(shape: tuple, layouts: tuple, dtype: torch.dtype, center: bool) -> None:
    batch, heads, queries, keys, head_dim, value_dim, key_heads = shape
    inputs = make_inputs(batch, heads, queries, keys, head_dim, value_dim, key_heads=key_heads, dtype=dtype)
    inputs[1][0, 0] += 3.0  # channels off their centre
    inputs[2][-1, -1, :, 0] = 0.0  # a channel of zeros
    query, key, value = (lay_out(x, layout).to(DEVICE) for x, layout in zip(inputs, layouts, strict=True))
    found = launch_quantize_long(query, key, value, PLAIN.replace(smooth_key=center))
    for x, granularity, middle, got, scale in (
        (query, "token", False, found.query, found.query_scale),
        (key, "head", center, found.key, found.key_scale),
        (value, "channel", False, found.value, found.value_scale),
    ):
        expected, expected_scale = find_backend("reference", x.device).quantize(x, granularity, middle)
        assert same_bits(scale, expected_scale), granularity
        assert same_bits(got, expected), granularity
    assert torch.equal(found.value_sums.sum(2), found.value.to(torch.int64).sum(2))
    assert found.value.stride(2) == 1
    whole = found.value.mT.as_strided((*value.shape[:2], value_dim, -(-keys // 128) * 128), found.value.mT.stride())
    assert not whole[..., keys:].any()


@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.slow
def test_what_is_not_finite(which: int, special: float) -> None:
    inputs = [x.to(DEVICE) for x in make_inputs(1, 2, 260, head_dim=16)]
    inputs[which][0, 1, 200, 3] = special
    found = launch_quantize_long(*inputs, PLAIN)
    scales = found.query_scale, found.key_scale, found.value_scale
    for index, (scale, x, granularity) in enumerate(zip(scales, inputs, ("token", "head", "channel"), strict=True)):
        expected, expected_scale = find_backend("reference", x.device).quantize(x, granularity, index == 1)
        assert same_bits(scale, expected_scale)
        assert bool(torch.isnan(scale).any()) == (index == which)
        # what stands where a scale is NaN comes out as NaN, whatever it is
        there = (~torch.isnan(scale)).expand(x.shape)
        assert torch.equal((found.query, found.key, found.value)[index][there], expected[there])
    got = qflash.attention(*inputs, backend="triton")
    assert same_bits(got, qflash.attention(*inputs, backend="reference"))
    assert torch.isnan(got).any()


@pytest.mark.parametrize("mask", ["none", "causal", "bool", "float"])
def test_attention_has_the_bits_of_the_specification(mask: str) -> None:
    query, key, value = (x.to(DEVICE) for x in make_inputs(1, 2, 70, 300, 32, 32, key_heads=1, dtype=torch.float16))
    options: dict = {"enable_gqa": True, "is_causal": mask == "causal"}
    if mask == "bool":
        options["attn_mask"] = (torch.rand(70, 300) < 0.7).to(DEVICE)
    elif mask == "float":
        options["attn_mask"] = torch.randn(2, 70, 300).to(DEVICE, torch.float16)
    got = qflash.attention(query, key, value, backend="triton", **options)
    assert same_bits(got, qflash.attention(query, key, value, backend="reference", **options))


@pytest.mark.parametrize(("channels", "width"), [slow(64, 64), (40, 64), (72, 80), slow(96, 96), (104, 128)])
def test_values_can_be_left_as_the_hopper_kernel_takes_them(channels: int, width: int) -> None:
    inputs = [x.to(DEVICE) for x in make_inputs(1, 2, 300, head_dim=channels, dtype=torch.float16)]
    plain, permuted = (launch_quantize_long(*inputs, PLAIN, order) for order in (False, True))
    # channels of the kernel's width, of values zero past the last
    values, again = (
        torch.as_strided(x.value, (1, 2, rows, 384), (2 * rows * 384, rows * 384, 384, 1))
        for x, rows in ((plain, channels), (permuted, width))
    )
    values = torch.nn.functional.pad(values, (0, 0, 0, width - channels))
    assert torch.equal(permuted.key, plain.key) and permuted.key.stride(2) == (64 if channels <= 64 else 128)
    place = torch.arange(384, device=DEVICE)
    key = (place & -16) | ((place & 2) << 2) | ((place & 12) >> 1) | (place & 1)
    # 72 to 96 channels are two spans, each permuted by itself
    spans = (64, width - 64) if width in (80, 96) else (width,)
    rows = [torch.arange(span, device=DEVICE) for span in spans]
    channel = torch.cat([64 * place + (row & 7) * (len(row) // 8) + (row >> 3) for place, row in enumerate(rows)])
    assert torch.equal(again, values[..., key][:, :, channel])
    assert torch.equal(permuted.value_sums, torch.nn.functional.pad(plain.value_sums, (0, width - channels)))
    packed, sums, calls = pack_value(plain.value.contiguous(), True)
    for call in calls:
        call.run()
    assert torch.equal(torch.as_strided(packed, again.shape, again.stride()), again)
    assert torch.equal(sums.sum(2), permuted.value_sums.sum(2))


@pytest.mark.parametrize("layout", ["contiguous", "tokens_first", "expanded"])
@pytest.mark.parametrize(("channels", "width"), [(24, 32), (40, 64), (72, 128), (120, 128)])
def test_keys_can_be_copied_to_whole_lines(channels: int, width: int, layout: str) -> None:
    key = lay_out(torch.randint(-128, 128, (2, 3, 300, channels), dtype=torch.int8), layout).to(DEVICE)
    packed, calls = pack_key(key)
    for call in calls:
        call.run()
    assert torch.equal(packed, key) and packed.stride() == (3 * 300 * width, 300 * width, width, 1)


@pytest.mark.parametrize(
    ("channels", "layout", "copied"),
    [
        (64, "contiguous", False),
        (64, "packed", False),
        (40, "contiguous", True),  # no multiple of 16
        (48, "contiguous", False),
        (72, "tokens_first", True),
        (80, "contiguous", True),
        (80, "packed", True),
        (128, "tokens_first", False),
    ],
)
def test_which_int8_keys_are_copied_before_they_stream(channels: int, layout: str, copied: bool) -> None:
    x = lay_out(torch.empty(2, 8, 2000, channels, dtype=torch.int8, device="meta"), layout)
    one, out = torch.ones(1, 1, 1, 1, device="meta"), torch.empty_like(x)
    calls = attention_launches(int8_call(x, one, x, one, x, one, None, False, 0.1, one, out.dtype, DEFAULT), out)
    copies = ["pack_key_kernel"] * copied
    assert [call.kernel.__name__ for call in calls] == ["pack_value_kernel", *copies, "long_hopper_kernel"]


def test_queries_can_be_left_to_the_attention_kernel() -> None:
    query, key, value = (x.to(DEVICE) for x in make_inputs(2, 4, 300, head_dim=64, key_heads=2, dtype=torch.float16))
    whole, rest = launch_quantize_long(query, key, value, PLAIN), launch_quantize_long(None, key, value, PLAIN)
    assert rest.query is rest.query_scale is None
    for name in ("key", "key_scale", "value", "value_scale", "value_sums"):
        assert same_bits(getattr(rest, name), getattr(whole, name)), name


@pytest.mark.parametrize("keys", [257, 289, 384, 385, 577, 700, 1024, 1100, 2100, 4096])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_steps_of_the_hopper_kernel(head_dim: int, keys: int) -> None:
    span, unroll = streaming_steps(head_dim, keys)
    steps = -(-keys // span)
    assert steps % unroll == 0
    # the second walk is under way before the first is over
    assert steps >= 2
    assert span * head_dim <= 16384
    # the last one takes all keys that are left over, and no more than it has to
    whole = keys - (steps - 1) * span
    columns = last_step(keys, span)
    assert whole <= columns <= span
    assert columns % 128 in (0, 64) and columns - whole < 64


def _compile_for_hopper() -> None:
    """Compile the Hopper kernel, from floats, whose queries it quantises, and from int8; print how many products it has."""

    def empty(*shape: int, dtype: torch.dtype = torch.int8) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def number(*shape: int) -> torch.Tensor:
        return empty(*shape, dtype=torch.float32)

    for dtype, d, width in ((torch.float16, 64, 64), (torch.bfloat16, 128, 128), (torch.float16, 72, 128)):
        query, key = empty(1, 4, 512, d, dtype=dtype), empty(1, 2, 512, 16 * -(-d // 16))[..., :d]
        value = empty(1, 2, width, 512)[:, :, :d].mT
        sums = empty(1, 2, 2, width, dtype=torch.int32)
        calls = attention_launches(
            int8_call(
                query,
                None,
                key,
                number(1, 2, 1, 1),
                value,
                number(1, 2, 1, d),
                None,
                False,
                0.1,
                None,
                torch.empty_like(query).dtype,
                DEFAULT,
            ),
            torch.empty_like(query),
            value_sums=sums,
            fragment_order=True,
        )
        assert [call.kernel.__name__ for call in calls] == ["long_hopper_kernel"]
        print_products(calls[0])
    x, one = empty(1, 4, 4096, 64), number(1, 1, 1, 1)
    print_products(attention_launches(int8_call(x, one, x, one, x, one, None, False, 0.1, one, x.dtype, DEFAULT), x)[-1])


@pytest.mark.slow
def test_the_hopper_kernel_compiles() -> None:
    products = products_printed_by(__file__)
    assert len(products) == 4
    assert min(products) > 8


def test_which_recipes() -> None:
    assert quantizes_long(DEFAULT, 21845)
    assert quantizes_long(DEFAULT.replace(smooth_key=False, probability_bits=15), 1)
    assert not quantizes_long(DEFAULT, 21846)
    others = PAPER, ACCURATE, DEFAULT.replace(rotate=True), DEFAULT.replace(value_granularity="tensor")
    assert not any(quantizes_long(recipe, 1) for recipe in others)


def test_attention_takes_values_in_order_without_packing_them_again() -> None:
    inputs = [x.to(DEVICE) for x in make_inputs(1, 1, 300, head_dim=32, dtype=torch.float16)]
    found = launch_quantize_long(*inputs, PLAIN)
    arguments = (found.query, found.query_scale, found.key, found.key_scale, found.value, found.value_scale, None, False, 0.1)
    out, guard = torch.empty_like(inputs[0]), DEVICE.type == "cpu"
    calls = attention_launches(int8_call(*arguments, None, out.dtype, DEFAULT), out, guard=guard, value_sums=found.value_sums)
    assert [call.kernel.__name__ for call in calls] == ["long_kernel"]
    again = attention_launches(int8_call(*arguments, None, out.dtype, DEFAULT), out, guard=guard)
    assert [call.kernel.__name__ for call in again] == ["pack_value_kernel", "long_kernel"]


if __name__ == "__main__":
    _compile_for_hopper()
