"""Tensors may begin at any element of their memory, and overlap: the bits are those of tensors that begin a buffer."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import qflash
from helpers import DEVICE, make_inputs, same_bits

OFFSETS = range(9)
GPU = DEVICE.type == "cuda"
BACKEND = "triton" if GPU else "cpu"  # the interpreter knows no alignment


@dataclasses.dataclass(frozen=True)
class Family:
    """Sizes that dispatch gives to one family of kernels."""

    queries: int
    keys: int
    head_dim: int
    heads: int = 2
    recipe: str = "default"
    mask: str | None = None


FAMILIES = {
    "fused": Family(197, 197, 64),
    "fused masked": Family(100, 100, 64, mask="bool"),
    "fused bias": Family(100, 100, 64, mask="bias"),
    "wide": Family(128, 128, 128),
    "window": Family(49, 49, 32),
    "window bias": Family(49, 49, 32, mask="bias"),
    "large window bias": Family(144, 144, 32, mask="bias"),
    "in registers": Family(577, 577, 64),
    "long": Family(700, 2100, 64),
    "long wide": Family(300, 1100, 128),
    "long bias": Family(130, 1100, 64, mask="bias"),
    "long masked": Family(130, 1100, 64, mask="bool"),
    "accurate": Family(197, 197, 64, recipe="accurate"),
    "accurate bias": Family(49, 49, 32, recipe="accurate", mask="bias"),
    "paper": Family(130, 300, 64, recipe="paper"),
}


def at(x: torch.Tensor, offset: int) -> torch.Tensor:
    """Return a contiguous copy that begins ``offset`` elements into its memory, with other numbers around it."""
    buffer = torch.full((x.numel() + offset + 16,), 1, dtype=x.dtype, device=x.device)
    view = buffer[offset : offset + x.numel()].view(x.shape)
    return view.copy_(x)


def tokens_first(x: torch.Tensor, offset: int) -> torch.Tensor:
    return at(x.transpose(1, 2).contiguous(), offset).transpose(1, 2)


def draw(family: Family, dtype: torch.dtype) -> list[torch.Tensor]:
    tensors = make_inputs(1, family.heads, family.queries, family.keys, head_dim=family.head_dim, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randn((1, family.heads, family.queries, family.keys), generator=generator)
    masks = {"bool": [numbers > -1], "bias": [numbers.to(dtype)], None: []}[family.mask]
    return [x.to(DEVICE) for x in (*tensors, *masks)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.slow
def test_floats_at_any_offset(name: str, dtype: torch.dtype) -> None:
    family = FAMILIES[name]
    tensors = draw(family, dtype)
    expected = qflash.attention(*tensors, recipe=family.recipe, backend="reference")
    for lay in (at, tokens_first):
        for offset in OFFSETS:
            moved = [lay(x, offset) for x in tensors[:3]] + [at(x, offset) for x in tensors[3:]]
            for _ in range(2):
                out = qflash.attention(*moved, recipe=family.recipe, backend=BACKEND)
                assert same_bits(out, expected), f"all at {offset}, {lay.__name__}"
    for where in range(len(tensors)):
        for offset in OFFSETS:
            moved = [at(x, offset if i == where else 0) for i, x in enumerate(tensors)]
            for _ in range(2):
                out = qflash.attention(*moved, recipe=family.recipe, backend=BACKEND)
                assert same_bits(out, expected), f"tensor {where} at {offset}"


@pytest.mark.parametrize("granularity", ["head", "token"])
@pytest.mark.parametrize("name", FAMILIES)
def test_integers_scales_and_fixed_biases_at_any_offset(name: str, granularity: str) -> None:
    family = FAMILIES[name]
    *tensors, mask = [*draw(family, torch.float32), None][:4]
    options: dict[str, Any] = {"recipe": family.recipe, "out_dtype": torch.float16}
    granularities = granularity, granularity, "channel"
    quantized = [qflash.quantize(x, g, backend="reference") for x, g in zip(tensors, granularities, strict=True)]
    if mask is not None and family.mask == "bias":
        mask = qflash.quantize_bias(mask)
    expected = qflash.int8_attention(*quantized, mask, backend="reference", **options)
    for offset in OFFSETS:
        for scale_offset in (0, offset):
            moved = [qflash.QuantizedTensor(at(x.values, offset), at(x.scale, scale_offset)) for x in quantized]
            moved_mask = None if mask is None else at(mask, scale_offset)
            for _ in range(2):
                out = qflash.int8_attention(*moved, moved_mask, backend=BACKEND, **options)
                assert same_bits(out, expected), f"values at {offset}, scales and mask at {scale_offset}"


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("granularity", ["tensor", "head", "token", "channel"])
def test_quantising_at_any_offset(granularity: str, dtype: torch.dtype) -> None:
    x = make_inputs(1, 2, 197, head_dim=64, dtype=dtype)[0].to(DEVICE)
    expected = qflash.quantize(x, granularity, backend="reference")
    for offset in OFFSETS:
        for _ in range(2):
            out = qflash.quantize(at(x, offset), granularity, backend=BACKEND)
            assert same_bits(out.values, expected.values) and same_bits(out.scale, expected.scale), offset


@pytest.mark.parametrize("offsets", [(1, 3, 5), (0, 1, 2), (0, 8, 16), (5, 5, 5), (0, 64, 0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_views_of_one_buffer_that_overlap(offsets: tuple[int, ...], dtype: torch.dtype) -> None:
    shape = (1, 4, 197, 64)
    buffer = torch.randn(4 * 197 * 64 + 64, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
    tensors = [buffer[offset:][: 4 * 197 * 64].view(shape) for offset in offsets]
    expected = qflash.attention(*(x.clone() for x in tensors), backend="reference")
    for _ in range(2):
        assert same_bits(qflash.attention(*tensors, backend=BACKEND), expected)
