"""PyTorch's default dtype and device are the caller's to set: they change nothing here."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import pytest
import timm
import torch

import qflash
from helpers import DEVICE, default_dtype, make_inputs, same_bits
from qflash.integrations.swin_bias import window_bias

DTYPES = (torch.float16, torch.bfloat16, torch.float64)
BACKENDS = ("reference", "cpu", "triton")
GRANULARITIES = ("tensor", "head", "token", "channel")


@contextlib.contextmanager
def _default_device(name: str) -> Iterator[None]:
    before = torch.get_default_device()
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)
        assert torch.get_default_device() == before


DEFAULTS = {
    **{str(dtype).removeprefix("torch."): lambda dtype=dtype: default_dtype(dtype) for dtype in DTYPES},
    "default device meta": lambda: _default_device("meta"),
    "device context meta": lambda: torch.device("meta"),
}
every_default = pytest.mark.parametrize("default", DEFAULTS.values(), ids=DEFAULTS)
every_backend = pytest.mark.parametrize("backend", BACKENDS)


def _device(backend: str) -> torch.device:
    return DEVICE if backend == "triton" else torch.device("cpu")


@every_default
@every_backend
@pytest.mark.parametrize("recipe", ["default", "accurate", "paper", "rotated"])
@pytest.mark.slow
def test_attention(default, backend: str, recipe: str) -> None:
    choices = qflash.ACCURATE.replace(rotate=True) if recipe == "rotated" else recipe
    # the interpreter takes a second for a long row
    sizes = ((20, False), (300, True)) if backend != "triton" else ((20, recipe == "default"),)
    for (tokens, masked), dtype in itertools.product(sizes, (torch.float32, torch.float16)):
        inputs = [x.to(_device(backend), dtype) for x in make_inputs(1, 1, tokens, head_dim=32)]
        mask = torch.randn(tokens, tokens).to(_device(backend)) if masked else None
        expected = qflash.attention(*inputs, mask, recipe=choices, backend=backend)
        with default():
            for _ in range(2):
                assert same_bits(qflash.attention(*inputs, mask, recipe=choices, backend=backend), expected)


@every_default
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_attention_of_many_tokens(default, dtype: torch.dtype) -> None:
    inputs = make_inputs(2, 8, 1000, head_dim=64, dtype=dtype)
    expected = qflash.attention(*inputs)
    with default():
        for _ in range(2):
            assert same_bits(qflash.attention(*inputs), expected)


@every_default
@every_backend
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_quantize(default, backend: str, granularity: str) -> None:
    for shape in ((1, 3, 40, 20), (2, 3, 0, 20)):
        x = torch.randn(shape).to(_device(backend))
        expected = qflash.quantize(x, granularity, backend=backend)
        with default():
            found = qflash.quantize(x, granularity, backend=backend)
            assert same_bits(found.values, expected.values)
            assert same_bits(found.scale, expected.scale)
            given = qflash.quantize(x, scale=0.125, backend=backend)
            assert given.scale.dtype == torch.float32 and given.scale.device == x.device
            assert found.dequantize().dtype == torch.float32


@every_default
@every_backend
@pytest.mark.parametrize("out_dtype", [None, torch.float16])
@pytest.mark.parametrize("recipe", ["default", "paper"])
@pytest.mark.slow
def test_int8_attention(default, backend: str, out_dtype: torch.dtype | None, recipe: str) -> None:
    device = _device(backend)
    tensors = [qflash.quantize(x.to(device), "head", backend="reference") for x in make_inputs(1, 1, 20)]
    masks = (None, torch.randn(20, 20).to(device))
    for mask in masks:
        options = {"out_dtype": out_dtype, "recipe": recipe, "backend": backend, "output_scale": None if out_dtype else 0.01}
        expected = qflash.int8_attention(*tensors, mask, **options)
        with default():
            for _ in range(2):
                found = qflash.int8_attention(*tensors, mask, **options)
                if out_dtype is None:
                    assert same_bits(found.values, expected.values) and same_bits(found.scale, expected.scale)
                else:
                    assert same_bits(found, expected)


@every_default
def test_causal_and_biases(default) -> None:
    inputs = make_inputs(1, 2, 40)
    bias, table = torch.randn(2, 40, 40), torch.randn(10, 2)
    index, mask = torch.randint(0, 10, (7, 7)), torch.randn(4, 7, 7)
    expected = (
        qflash.attention(*inputs, is_causal=True),
        qflash.quantize_bias(bias),
        qflash.align_bias(bias[..., :39]),
        window_bias(table, index, mask),
    )
    with default():
        found = (
            qflash.attention(*inputs, is_causal=True),
            qflash.quantize_bias(bias),
            qflash.align_bias(bias[..., :39]),
            window_bias(table, index, mask),
        )
    for got, wanted in zip(found, expected, strict=True):
        assert same_bits(got, wanted)


@every_default
@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224"])
def test_patched_models(default, name: str) -> None:
    options = {"depths": (2, 2, 2, 2)} if "swin" in name else {"depth": 2}
    model = qflash.patch(timm.create_model(name, img_size=112, **options).eval())
    images = torch.randn(1, 3, 112, 112)
    with torch.no_grad():
        expected = model(images)
        with default():
            assert same_bits(model(images), expected)
