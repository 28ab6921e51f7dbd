"""Quantisation for long rows: query, key and value in two launches, V brought to the tensor core's order on the way."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..recipe import Recipe
from .quantize import (
    MOST_CHUNKS,
    amplitude_to_scale,
    highest,
    inverse_scale,
    lowest,
    magnitude,
    nan_max,
    nan_min,
    round_to_int8,
)
from .tile import dealt_channel, held_order, interleave

_MOST_BATCH = 65535 // 3


@triton.jit
def _load(base, stride_n, stride_d, n, last, d, channels):
    """Tokens ``n`` of a head as they are; past the ``last`` the last again."""
    ptrs = base + tl.minimum(n, last)[:, None] * stride_n + d[None, :] * stride_d
    return tl.load(ptrs, mask=d[None, :] < channels, other=0.0)


@triton.jit
def _range(
    base, stride_n, stride_d, begin, end, channels, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, GUARD: tl.constexpr
):  # fmt: skip
    """Lowest and highest value of every channel over tokens ``begin`` to ``end``; NaN (or infinity) where there is a NaN."""
    d = tl.arange(0, BLOCK_D)
    low = _load(base, stride_n, stride_d, begin + tl.arange(0, BLOCK_N), end - 1, d, channels).to(tl.float32)
    high = low
    for start in range(begin + BLOCK_N, end, BLOCK_N):
        x = _load(base, stride_n, stride_d, start + tl.arange(0, BLOCK_N), end - 1, d, channels).to(tl.float32)
        low, high = nan_min(low, x), nan_max(high, x)
    return lowest(low, 0, GUARD), highest(high, 0, GUARD)


@triton.jit
def long_range_kernel(
    k_ptr, v_ptr, low_ptr, high_ptr, sums_ptr, k_stride_z, k_stride_h, k_stride_n, k_stride_d,
    v_stride_z, v_stride_h, v_stride_n, v_stride_d, tokens, channels, value_channels, chunk,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, GUARD: tl.constexpr,
):  # fmt: skip
    """Ranges of the channels of a chunk of a head's keys or values (program z even or odd); sums to add to begin at zero."""
    part, h, z = tl.program_id(0), tl.program_id(1), (tl.program_id(2) // 2).to(tl.int64)
    is_value = tl.program_id(2) % 2
    d = tl.arange(0, BLOCK_D)
    begin = part * chunk
    end = tl.minimum(begin + chunk, tokens)
    head = z * tl.num_programs(1) + h
    if is_value == 0:
        base = k_ptr + z * k_stride_z + h * k_stride_h
        low, high = _range(base, k_stride_n, k_stride_d, begin, end, channels, BLOCK_N, BLOCK_D, GUARD)
    else:
        base = v_ptr + z * v_stride_z + h * v_stride_h
        low, high = _range(base, v_stride_n, v_stride_d, begin, end, value_channels, BLOCK_N, BLOCK_D, GUARD)
        tl.store(
            sums_ptr + head * value_channels + d,
            tl.zeros((BLOCK_D,), tl.int32),
            mask=(d < value_channels) & (d * 0 + part == 0),
        )
    out = ((2 * head + is_value) * tl.num_programs(0) + part) * BLOCK_D + d
    tl.store(low_ptr + out, low)
    tl.store(high_ptr + out, high)


@triton.jit
def _whole_range(low_ptr, high_ptr, row, chunks, CHUNKS: tl.constexpr, BLOCK_D: tl.constexpr, GUARD: tl.constexpr):
    """The range of a head's channels from those of its chunks."""
    parts = tl.arange(0, CHUNKS)[:, None]
    at = (row * chunks + parts) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    low = lowest(tl.load(low_ptr + at, mask=parts < chunks, other=float("inf")), 0, GUARD)
    return low, highest(tl.load(high_ptr + at, mask=parts < chunks, other=float("-inf")), 0, GUARD)


@triton.jit
def _queries(
    base,
    stride_n,
    stride_d,
    values,
    scales,
    begin,
    end,
    channels,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GUARD: tl.constexpr,
):
    """Quantise queries ``begin`` to ``end`` of a head, a scale a token."""
    d = tl.arange(0, BLOCK_D)
    for start in range(begin, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        inside = (n[:, None] < end) & (d[None, :] < channels)
        x = _load(base, stride_n, stride_d, n, end - 1, d, channels).to(tl.float32)
        scale = amplitude_to_scale(highest(tl.abs(x), 1, GUARD))[:, None]
        tl.store(scales + n[:, None], scale, mask=n[:, None] < end)
        x = round_to_int8(x, inverse_scale(scale, GUARD), GUARD)
        tl.store(values + n[:, None] * channels + d[None, :], x, mask=inside)


@triton.jit
def _keys(
    base, stride_n, stride_d, values, scale_ptr, low, high, begin, end, channels,
    CENTER: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, GUARD: tl.constexpr,
):  # fmt: skip
    """Quantise keys ``begin`` to ``end`` of a head, whose channels' ranges are given, with one scale."""
    d = tl.arange(0, BLOCK_D)
    middle = tl.where(d < channels, (low + high) * 0.5, 0.0)
    if CENTER:
        low -= middle
        high -= middle
    amplitude = tl.where(d < channels, tl.maximum(magnitude(low), magnitude(high)), 0.0)
    scale = tl.zeros((1, 1), tl.float32) + amplitude_to_scale(tl.zeros((1,), tl.float32) + tl.max(amplitude, 0))[None, :]
    tl.store(scale_ptr + tl.zeros((1, 1), tl.int32), scale, mask=begin + tl.zeros((1, 1), tl.int32) == 0)
    inverse = inverse_scale(scale, GUARD)
    for start in range(begin, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        inside = (n[:, None] < end) & (d[None, :] < channels)
        x = _load(base, stride_n, stride_d, n, end - 1, d, channels).to(tl.float32)
        if CENTER:
            x = x - middle[None, :]
        tl.store(values + n[:, None] * channels + d[None, :], round_to_int8(x, inverse, GUARD), mask=inside)


@triton.jit
def _value_rows(base, stride_n, stride_d, n, tokens, d, channels, inverse, GUARD: tl.constexpr):
    inside = (n[:, None] < tokens) & (d[None, :] < channels)
    x = tl.load(base + n[:, None] * stride_n + d[None, :] * stride_d, mask=inside, other=0.0).to(tl.float32)
    return round_to_int8(x, inverse, GUARD)


@triton.jit
def _values(
    base, stride_n, stride_d, packed, scale_ptr, sums_ptr, low, high, begin, end, tokens, padded, channels,
    DEALT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, GUARD: tl.constexpr,
):  # fmt: skip
    """Quantise values ``begin`` to ``end`` of a head, a scale a channel, and store them (channels, tokens up to ``padded``)."""
    d = tl.arange(0, BLOCK_D)
    amplitude = tl.where(d < channels, tl.maximum(magnitude(low), magnitude(high)), 0.0)
    scale = amplitude_to_scale(amplitude)[None, :]
    tl.store(scale_ptr + d[None, :], scale, mask=(d[None, :] < channels) & (begin + tl.zeros((1, 1), tl.int32) == 0))
    inverse = inverse_scale(scale, GUARD)
    sums = tl.zeros((BLOCK_D,), tl.int32)
    FAR: tl.constexpr = 8 if DEALT else 2
    for start in range(begin, end, BLOCK_N):
        # rows four apart are interleaved in registers, so that four neighbours of a channel are stored as one word
        n = start + 4 * tl.arange(0, BLOCK_N // 4)
        if DEALT:
            n = held_order(n)
        v0 = _value_rows(base, stride_n, stride_d, n, tokens, d, channels, inverse, GUARD)
        v1 = _value_rows(base, stride_n, stride_d, n + 1, tokens, d, channels, inverse, GUARD)
        v2 = _value_rows(base, stride_n, stride_d, n + FAR, tokens, d, channels, inverse, GUARD)
        v3 = _value_rows(base, stride_n, stride_d, n + FAR + 1, tokens, d, channels, inverse, GUARD)
        values = interleave(v0, v1, v2, v3, BLOCK_N, BLOCK_D)
        sums += tl.sum(values.to(tl.int32), 0)
        column = start + tl.arange(0, BLOCK_N)
        inside = (d[None, :] < channels) & (column[:, None] < padded)
        row = d
        if DEALT:
            row = dealt_channel(d, BLOCK_D)
        tl.store(packed + row[None, :] * padded + column[:, None], values, mask=inside)
    tl.atomic_add(sums_ptr + d, sums, mask=d < channels)


@triton.jit
def long_quantize_kernel(
    q_ptr, k_ptr, v_ptr, low_ptr, high_ptr, query_ptr, query_scale_ptr, key_ptr, key_scale_ptr, packed_ptr, value_scale_ptr,
    sums_ptr, q_stride_z, q_stride_h, q_stride_n, q_stride_d, k_stride_z, k_stride_h, k_stride_n, k_stride_d,
    v_stride_z, v_stride_h, v_stride_n, v_stride_d, queries, tokens, padded, channels, value_channels, key_heads, chunk,
    CHUNKS: tl.constexpr, CENTER: tl.constexpr, DEALT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    GUARD: tl.constexpr,
):  # fmt: skip
    """Quantise a chunk of a head's queries (a scale a token), keys (a scale a head) or values (a scale a channel).

    Program z modulo 3 tells which. The values come out as the tensor core reads them, (channels, tokens up to
    ``padded``, zero past the end), and their channels are added up: see :func:`.long.pack_value_kernel`.
    """
    h, z = tl.program_id(1), (tl.program_id(2) // 3).to(tl.int64)
    kind = tl.program_id(2) % 3
    begin = tl.program_id(0) * chunk
    if kind == 0:
        head = z * tl.num_programs(1) + h
        _queries(
            q_ptr + z * q_stride_z + h * q_stride_h, q_stride_n, q_stride_d, query_ptr + head * queries * channels,
            query_scale_ptr + head * queries, begin, tl.minimum(queries, begin + chunk), channels, BLOCK_N, BLOCK_D, GUARD,
        )  # fmt: skip
    elif h < key_heads and begin < tokens:
        head = z * key_heads + h
        low, high = _whole_range(low_ptr, high_ptr, 2 * head + kind - 1, tl.cdiv(tokens, chunk), CHUNKS, BLOCK_D, GUARD)
        if kind == 1:
            _keys(
                k_ptr + z * k_stride_z + h * k_stride_h, k_stride_n, k_stride_d, key_ptr + head * tokens * channels,
                key_scale_ptr + head, low, high, begin, tl.minimum(tokens, begin + chunk), channels, CENTER, BLOCK_N, BLOCK_D,
                GUARD,
            )  # fmt: skip
        else:
            _values(
                v_ptr + z * v_stride_z + h * v_stride_h, v_stride_n, v_stride_d, packed_ptr + head * value_channels * padded,
                value_scale_ptr + head * value_channels, sums_ptr + head * value_channels, low, high, begin,
                tl.minimum(padded, begin + chunk), tokens, padded, value_channels, DEALT, BLOCK_N, BLOCK_D, GUARD,
            )  # fmt: skip


def quantizes_long(recipe: Recipe, batch: int) -> bool:
    """Tell whether :func:`launch_quantize_long` finds the scales the recipe asks for."""
    granularities = recipe.query_granularity, recipe.key_granularity, recipe.value_granularity
    return (
        granularities == ("token", "head", "channel")
        and not recipe.balance
        and not recipe.rotate
        and recipe.normalization == "two_pass"
        and batch <= _MOST_BATCH
    )


class LongQuantized(NamedTuple):
    """What :func:`launch_quantize_long` returns: int8 tensors (value with its tokens side by side), scales, channel sums."""

    query: torch.Tensor
    query_scale: torch.Tensor
    key: torch.Tensor
    key_scale: torch.Tensor
    value: torch.Tensor
    value_scale: torch.Tensor
    value_sums: torch.Tensor


def launch_quantize_long(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, center: bool, dealt: bool = False
) -> LongQuantized:
    """Quantise everything a call with long rows needs, in two launches: ranges, then values.

    Scales are one a token for query, one a head for key, one a channel for value.

    Args:
        query, key, value: float (batch, heads, tokens, channels), on one device, not empty.
        dealt: leave V as :mod:`.long_hopper` takes it; see :func:`.long.pack_value_kernel`.
        center: subtract every key channel's midrange first (:func:`qflash.quantization.center_channels`).
    """
    batch, heads, queries, channels = query.shape
    key_heads, tokens, value_channels = key.shape[1], key.shape[2], value.shape[3]
    padded = triton.cdiv(tokens, 128) * 128
    width = triton.next_power_of_2(max(channels, value_channels))
    chunk = max(128, triton.next_power_of_2(triton.cdiv(max(tokens, queries), MOST_CHUNKS)))
    chunks = triton.cdiv(tokens, chunk)

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=query.device)

    low, high = new(batch, key_heads, 2, chunks, width), new(batch, key_heads, 2, chunks, width)
    packed = new(batch, key_heads, value_channels, padded, dtype=torch.int8)
    found = LongQuantized(
        new(*query.shape, dtype=torch.int8),
        new(batch, heads, queries, 1),
        new(*key.shape, dtype=torch.int8),
        new(batch, key_heads, 1, 1),
        packed[..., :tokens].mT,
        new(batch, key_heads, 1, value_channels),
        new(batch, key_heads, value_channels, dtype=torch.int32),
    )
    block, guard = min(chunk, max(16, 8192 // width)), query.device.type == "cpu"
    long_range_kernel[(chunks, key_heads, 2 * batch)](
        key, value, low, high, found.value_sums, *key.stride(), *value.stride(), tokens, channels, value_channels, chunk,
        BLOCK_N=max(16, block // 2), BLOCK_D=width, GUARD=guard,
    )  # fmt: skip
    long_quantize_kernel[(triton.cdiv(max(padded, queries), chunk), heads, 3 * batch)](
        query, key, value, low, high, found.query, found.query_scale, found.key, found.key_scale, packed, found.value_scale,
        found.value_sums, *query.stride(), *key.stride(), *value.stride(), queries, tokens, padded, channels, value_channels,
        key_heads, chunk, CHUNKS=triton.next_power_of_2(chunks), CENTER=center, DEALT=dealt, BLOCK_N=block, BLOCK_D=width,
        GUARD=guard, enable_fp_fusion=False,
    )  # fmt: skip
    return found
