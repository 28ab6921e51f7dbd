"""The Triton kernels return the reference's bits, whatever the tiles, strides, masks and recipes."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import triton

import qflash
from helpers import DEVICE, INTERPRETER, LAYOUTS, draw_case, lay_out, make_inputs, quantize_all, same_bits
from qflash import execution
from qflash.kernels.dispatch import launch_attention
from qflash.kernels.families import choose_tiles
from qflash.kernels.launch_arguments import shape_of
from qflash.kernels.launch_recorder import LaunchRecorder
from qflash.kernels.tiles import PORTABLE, SM90_STREAMING
from qflash.kernels.triton import attention_streaming, launch
from qflash.specification import reference
from qflash.specification.attention_call import AttentionCall, float_call, int8_call
from qflash.specification.recipe import ACCURATE, DEFAULT, PAPER

pytestmark = pytest.mark.skipif(DEVICE.type == "cuda", reason="tests/gpu draws the same cases larger on a GPU")

CASES = 240


@pytest.mark.parametrize("number", range(CASES))
@pytest.mark.slow
def test_kernel_has_the_reference_bits(number: int) -> None:
    case = draw_case(number, INTERPRETER)
    arguments = case.arguments(DEVICE)
    assert same_bits(
        launch_attention(int8_call(*arguments), tiles=case.tiles), reference.int8_attention(int8_call(*arguments))
    ), case


@pytest.mark.parametrize("recipe", ["default", "accurate", "paper"])
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "contiguous"])
def test_whole_call_has_the_reference_bits_for_any_strides(recipe: str, layout: str) -> None:
    dtype = {"default": torch.float16, "accurate": torch.bfloat16, "paper": torch.float32}[recipe]
    inputs = make_inputs(2, 1, 33, 40, head_dim=20, dtype=dtype, layout=layout, seed=len(layout))
    got = qflash.attention(*inputs, recipe=recipe, backend="triton")
    assert same_bits(got, qflash.attention(*inputs, recipe=recipe, backend="reference"))
    assert same_bits(got, qflash.attention(*(x.contiguous() for x in inputs), recipe=recipe, backend="reference"))


def window_inputs(seed: int) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Return Swin's layout: (images, windows, heads, tokens, channels) and a bias of (windows, heads, tokens, tokens)."""
    images, windows, heads, tokens = 2, 2, 2, 9
    query, key, value = make_inputs(images * windows, heads, tokens, head_dim=16, seed=seed)
    inputs = tuple(x.unflatten(0, (images, windows)) for x in (query, key, value))
    generator = torch.Generator().manual_seed(seed)
    bias = torch.randn((windows, heads, tokens, tokens), generator=generator) * 2
    hidden = torch.rand((windows, heads, tokens, tokens), generator=generator) < 0.2
    return inputs, torch.where(hidden, -torch.inf, bias)


@pytest.mark.parametrize("form", ["full", "windows", "one window", "one head", "bool", "expanded"])
@pytest.mark.slow
def test_window_masks_repeat_over_the_images(form: str) -> None:
    inputs, bias = window_inputs(len(form))
    if form == "one window":
        bias = bias[:1]
    elif form == "one head":
        bias = bias[:, :1]
    elif form == "bool":
        bias = bias > 0
    mask = {"full": bias.expand(2, *bias.shape).clone(), "expanded": bias.expand(2, *bias.shape)}.get(form, bias)
    got = qflash.attention(*inputs, mask, backend="triton")
    assert same_bits(got, qflash.attention(*inputs, mask, backend="reference"))
    singly = [qflash.attention(*(x[i] for x in inputs), bias, backend="reference") for i in range(2)]
    assert same_bits(got, torch.stack(singly))


def test_tiles_leave_the_bits_alone() -> None:
    case = draw_case(3, INTERPRETER)
    case = dataclasses.replace(
        case, batch=1, heads=1, key_heads=1, queries=33, keys=97, value_dim=64, mask="none", recipe=qflash.DEFAULT
    )
    arguments = case.arguments(DEVICE)
    expected = reference.int8_attention(int8_call(*arguments))
    for tiles in ((16, 32, 4, 1), (32, 64, 4, 2), (64, 128, 4, 1)):
        assert same_bits(launch_attention(int8_call(*arguments), tiles=tiles), expected), tiles


def test_launch_writes_nothing_outside_its_output() -> None:
    inputs = make_inputs(1, 2, 17, 33, head_dim=20, value_dim=9)
    kept = [x.clone() for x in inputs]
    qflash.attention(*inputs, backend="triton")
    assert all(torch.equal(x, copy) for x, copy in zip(inputs, kept, strict=True))


def test_the_comparison_sees_one_wrong_bit() -> None:
    case = draw_case(0, INTERPRETER)
    expected = reference.int8_attention(int8_call(*case.arguments(DEVICE)))
    changed = expected.clone()
    changed.view(torch.uint8).view(-1)[0] ^= 1
    assert same_bits(expected, expected.clone())
    assert not same_bits(changed, expected)
    assert lay_out(expected, "packed").stride() != expected.stride()


WIDE_RECIPES = {
    "default": DEFAULT,
    "rounded": DEFAULT.replace(row_sum="rounded"),
    "value scale": DEFAULT.replace(output="value_scale"),
    "accurate": ACCURATE,
    "paper": PAPER,
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", WIDE_RECIPES)
@pytest.mark.slow
def test_sums_of_sections_have_the_reference_bits(name: str, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of several sections, which are made short here: real ones take the interpreter minutes."""
    monkeypatch.setattr(launch.fp, "SECTION_KEYS", 64)
    monkeypatch.setattr(attention_streaming, "SECTION_KEYS", triton.language.constexpr(64))
    recipe = WIDE_RECIPES[name]
    queries, keys = (140, 135) if causal else (20, 150)
    query, key, value = quantize_all(make_inputs(1, 1, queries, keys, head_dim=16), recipe)
    one = torch.ones(1, 1, 1, 1) / 3
    for output_scale, dtype in ((one, torch.int8), (None, torch.float32)):
        call = int8_call(
            query.values, query.scale, key.values, key.scale, value.values, value.scale, None, causal, 0.25, output_scale,
            dtype, recipe,
        )  # fmt: skip
        assert call.keys > 2 * launch.fp.SECTION_KEYS
        tiles = 64, recipe.key_block if recipe.normalization == "online" else 32, 4, 1
        assert same_bits(launch_attention(call, tiles=tiles), reference.int8_attention(call)), dtype


def test_longer_rows_are_for_the_portable_kernels() -> None:
    """Those for Hopper have 32 bits for a sum, and all others 32 bits for an offset."""

    def call_of(tokens: int, heads: int) -> AttentionCall:
        tensors = [torch.empty(1, tokens, heads, 64, dtype=torch.float16, device="meta").transpose(1, 2) for _ in range(3)]
        return float_call(*tensors, None, False, 0.125, DEFAULT)

    kinds = [choose_tiles(shape_of(call_of(tokens, 1), False), (9, 0)).family for tokens in (65536, 65537)]
    assert kinds == [SM90_STREAMING, PORTABLE]
    for tokens, heads in ((65537, 1), (65536, 1024)):
        with LaunchRecorder(launching=False) as recording:
            execution.attend(call_of(tokens, heads), "triton")
        assert recording.launches[-1].family == "triton.streaming"
        assert recording.launches[-1].arguments["REACH"].WIDE_SUMS is (tokens > 65536)
        wide = {
            x.WIDE_OFFSETS for launch in recording.launches for x in launch.arguments.values() if hasattr(x, "WIDE_OFFSETS")
        }
        assert wide == {heads == 1024}


@pytest.mark.parametrize("tokens", [20, 300])
@pytest.mark.parametrize("masked", [False, True])
def test_heads_further_apart_than_32_bits_reach(tokens: int, masked: bool) -> None:
    """The third head of each tensor begins 2**31 elements behind the first; nobody touches the memory between."""
    generator = torch.Generator().manual_seed(tokens)

    def apart(x: torch.Tensor) -> torch.Tensor:
        far = torch.empty((2 << 30) + x[0, 0].numel(), dtype=x.dtype).as_strided(x.shape, (0, 1 << 30, x.shape[3], 1))
        return far.copy_(x)

    query, key, value = (torch.randn(1, 3, tokens, 32, generator=generator).half() for _ in range(3))
    mask = torch.rand(1, 3, tokens, tokens, generator=generator) < 0.8 if masked else None
    expected = execution.attention(query, key, value, mask, False, 0.2, DEFAULT.key, "reference")
    far = mask if mask is None else apart(mask)
    for tensors in ((apart(query), key, value), (query, apart(key), value), (query, key, apart(value))):
        assert same_bits(execution.attention(*tensors, far, False, 0.2, DEFAULT.key, "triton"), expected)
    if mask is not None:
        bias = torch.where(mask, torch.randn(mask.shape, generator=generator), -torch.inf)
        expected = execution.attention(query, key, value, bias, False, 0.2, DEFAULT.key, "reference")
        assert same_bits(execution.attention(query, key, value, apart(bias), False, 0.2, DEFAULT.key, "triton"), expected)
    integers = [qflash.quantize(x) for x in (query, key, value)]
    expected = qflash.int8_attention(*integers, out_dtype=torch.float32, backend="reference")
    integers[1] = dataclasses.replace(integers[1], values=apart(integers[1].values))
    integers[2] = dataclasses.replace(integers[2], values=apart(integers[2].values))
    assert same_bits(qflash.int8_attention(*integers, out_dtype=torch.float32, backend="triton"), expected)
