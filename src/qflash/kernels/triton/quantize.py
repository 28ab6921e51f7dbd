"""Quantisation of a tensor (batch, heads, tokens, channels) to int8, and of a float bias to fixed point (Triton).

Equations 1 and 2, step 1 of ``docs/algorithm.md``, with the bits of :mod:`.specification.quantization`. One launch per tensor
where a scale belongs to a token, or to a head short enough for one program. More for long heads, whose ranges are found
by :func:`range_kernel` first, and for one scale for the whole tensor.

A program takes a tile of BLOCK_N tokens by BLOCK_D channels of one head at a time, in registers, in the layout the
compiler chooses. Where it has to find a scale of the whole head it goes through the tokens twice: ranges of all
channels, then values. Fused multiply-adds are off (``enable_fp_fusion=False``), since they would change the last bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...specification.quantization import least_scale, scale_from_amplitude, scale_from_least, scale_shape
from ..common.quantize_ops import (
    BIAS_EVEN,
    BIAS_MASKED,
    BIAS_POISON,
    amplitude_to_scale,
    bias_base,
    bias_to_fixed,
    centered_scale,
    chunk_tokens,
    inverse_scale,
    least_to_scale,
    magnitude,
    round_centered,
    to_int8,
    zero_point,
)
from ..launch_arguments import needs_wide_offsets
from ..launch_recorder import launch_kernel


@triton.jit
def bias_kernel(
    bias_ptr, fixed_ptr, stride_z, stride_h, stride_m, stride_n, rows, heads, queries, keys,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDE_OFFSETS: tl.constexpr, GUARD: tl.constexpr,
):  # fmt: skip
    """:func:`qflash.quantize_bias` of BLOCK_M rows: nats to int32 in 1/65536 octaves, with marks for -inf, +inf and NaN.

    Two passes over the keys: the largest bias of each row, then the values relative to
    :func:`.common.quantize_ops.bias_base`.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    if WIDE_OFFSETS:
        stride_n = tl.cast(stride_n, tl.int64)
    head = row // queries
    begin = bias_ptr + head // heads * stride_z + head % heads * stride_h + row % queries * stride_m
    n = tl.arange(0, BLOCK_N)
    inside = (row < rows)[:, None]
    high = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    for start in range(0, keys, BLOCK_N):
        at = start + n[None, :]
        bias = tl.load(begin[:, None] + at * stride_n, mask=inside & (at < keys), other=float("-inf")).to(tl.float32)
        # NaN counts as infinity, for which bias_base subtracts nothing
        high = tl.maximum(high, tl.max(tl.where(bias == bias, bias, float("inf")), 1))
    base, even = bias_base(high[:, None])
    for start in range(0, keys, BLOCK_N):
        at = start + n[None, :]
        bias = tl.load(begin[:, None] + at * stride_n, mask=inside & (at < keys), other=0.0).to(tl.float32)
        fixed = tl.where(even, tl.where(bias == base, BIAS_EVEN, BIAS_MASKED), bias_to_fixed(bias - base, GUARD))
        fixed = tl.where(bias == float("-inf"), BIAS_MASKED, fixed)
        fixed = tl.where(bias < float("inf"), fixed, BIAS_POISON)
        tl.store(fixed_ptr + row[:, None] * keys + at, fixed, mask=inside & (at < keys))


@triton.jit
def quantize_kernel(
    x_ptr, scale_ptr, center_ptr, values_ptr,
    x_stride_z, x_stride_h, x_stride_n, x_stride_d,
    s_stride_z, s_stride_h, s_stride_n, s_stride_d,
    tokens, channels, CENTER: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, WIDE_OFFSETS: tl.constexpr,
    GUARD: tl.constexpr,
):  # fmt: skip
    """Write BLOCK_N tokens of a head as int8 with given scales (any granularity, by strides), less ``center``."""
    block, h, z = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    if WIDE_OFFSETS:
        h, x_stride_n, s_stride_n = tl.cast(h, tl.int64), tl.cast(x_stride_n, tl.int64), tl.cast(s_stride_n, tl.int64)
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    inside = (n[:, None] < tokens) & (d[None, :] < channels)
    x_ptrs = x_ptr + z * x_stride_z + h * x_stride_h + n[:, None] * x_stride_n + d[None, :] * x_stride_d
    x = tl.load(x_ptrs, mask=inside, other=0.0).to(tl.float32)
    head = z * tl.num_programs(1) + h
    if CENTER:
        x = x - tl.load(center_ptr + head * channels + d, mask=d < channels, other=0.0)[None, :]
    s_ptrs = scale_ptr + z * s_stride_z + h * s_stride_h + n[:, None] * s_stride_n + d[None, :] * s_stride_d
    scale = tl.load(s_ptrs, mask=inside, other=1.0)
    tl.store(values_ptr + (head * tokens + n[:, None]) * channels + d[None, :], to_int8(x, scale, GUARD), mask=inside)


@triton.jit
def quantize_token_kernel(
    x_ptr, values_ptr, scale_ptr, x_stride_z, x_stride_h, x_stride_n, x_stride_d, tokens, channels,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, WIDE_OFFSETS: tl.constexpr, GUARD: tl.constexpr,
):  # fmt: skip
    """Write BLOCK_N tokens of one head as int8, and one scale per token, found here."""
    block, h, z = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    if WIDE_OFFSETS:
        h, x_stride_n = tl.cast(h, tl.int64), tl.cast(x_stride_n, tl.int64)
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    inside = (n[:, None] < tokens) & (d[None, :] < channels)
    x_ptrs = x_ptr + z * x_stride_z + h * x_stride_h + n[:, None] * x_stride_n + d[None, :] * x_stride_d
    x = tl.load(x_ptrs, mask=inside, other=0.0).to(tl.float32)
    head = z * tl.num_programs(1) + h
    scale = amplitude_to_scale(tl.max(magnitude(x), 1))[:, None]
    tl.store(scale_ptr + head * tokens + n[:, None], scale, mask=n[:, None] < tokens)
    tl.store(values_ptr + (head * tokens + n[:, None]) * channels + d[None, :], to_int8(x, scale, GUARD), mask=inside)


@triton.jit
def _channel_range(
    x_base, x_stride_n, x_stride_d, begin, end, tokens, channels, d, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """(minimum, maximum) of channels over tokens ``begin`` to ``end``, (BLOCK_D,) float32; infinite with a NaN."""
    low = tl.full((BLOCK_N, BLOCK_D), float("inf"), tl.float32)
    high = tl.full((BLOCK_N, BLOCK_D), float("-inf"), tl.float32)
    for start in range(begin, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        inside = (n[:, None] < tokens) & (d[None, :] < channels)
        x = tl.load(x_base + n[:, None] * x_stride_n + d[None, :] * x_stride_d, mask=inside, other=0.0).to(tl.float32)
        low = tl.minimum(low, tl.where(inside, tl.where(x == x, x, float("-inf")), float("inf")))
        high = tl.maximum(high, tl.where(inside, tl.where(x == x, x, float("inf")), float("-inf")))
    return tl.min(low, 0), tl.max(high, 0)


@triton.jit
def quantize_head_kernel(
    x_ptr, values_ptr, scale_ptr, x_stride_z, x_stride_h, x_stride_n, x_stride_d, tokens, channels, low_ptr, high_ptr, chunk,
    CHUNKS: tl.constexpr, GRANULARITY: tl.constexpr, CENTER: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    WIDE_OFFSETS: tl.constexpr, GUARD: tl.constexpr,
):  # fmt: skip
    """Write one head, or a chunk of its tokens, as int8 with scales of the whole head, or per token of centred channels.

    With one chunk the ranges of the channels are found here, otherwise :func:`range_kernel` has found those of every chunk.
    """
    h, z, part = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    if WIDE_OFFSETS:
        h, x_stride_n = tl.cast(h, tl.int64), tl.cast(x_stride_n, tl.int64)
    head = z * tl.num_programs(0) + h
    d = tl.arange(0, BLOCK_D)
    x_base = x_ptr + z * x_stride_z + h * x_stride_h
    if CHUNKS == 1:
        low, high = _channel_range(x_base, x_stride_n, x_stride_d, 0, tokens, tokens, channels, d, BLOCK_N, BLOCK_D)
    else:
        parts = tl.arange(0, CHUNKS)[:, None]
        there = (parts < tl.num_programs(2)) & (d[None, :] < channels)
        at = (head * tl.num_programs(2) + parts) * channels + d[None, :]
        low = tl.min(tl.load(low_ptr + at, mask=there, other=float("inf")), 0)
        high = tl.max(tl.load(high_ptr + at, mask=there, other=float("-inf")), 0)
    middle = tl.where(d < channels, low * 0.5 + high * 0.5, 0.0)
    if CENTER:
        low -= middle
        high -= middle
    amplitude = tl.where(d < channels, tl.maximum(magnitude(low), magnitude(high)), 0.0)
    first = part + tl.zeros((1, 1), tl.int32) == 0
    if GRANULARITY == "head":
        scale = tl.zeros((1, 1), tl.float32) + amplitude_to_scale(tl.zeros((1,), tl.float32) + tl.max(amplitude, 0))[None, :]
        tl.store(scale_ptr + head + tl.zeros((1, 1), tl.int32), scale, mask=first)
    elif GRANULARITY == "channel":
        scale = amplitude_to_scale(amplitude)[None, :]
        tl.store(scale_ptr + head * channels + d[None, :], scale, mask=(d[None, :] < channels) & first)
    for start in range(part * chunk, tl.minimum(tokens, part * chunk + chunk), BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        inside = (n[:, None] < tokens) & (d[None, :] < channels)
        x = tl.load(x_base + n[:, None] * x_stride_n + d[None, :] * x_stride_d, mask=inside, other=0.0).to(tl.float32)
        if CENTER:
            x = tl.where(inside, x - middle[None, :], 0.0)
        if GRANULARITY == "token":
            scale = amplitude_to_scale(tl.max(magnitude(x), 1))[:, None]
            tl.store(scale_ptr + head * tokens + n[:, None], scale, mask=n[:, None] < tokens)
        tl.store(values_ptr + (head * tokens + n[:, None]) * channels + d[None, :], to_int8(x, scale, GUARD), mask=inside)


@triton.jit
def quantize_centered_kernel(
    x_ptr, values_ptr, scale_ptr, offset_ptr, x_stride_z, x_stride_h, x_stride_n, x_stride_d, tokens, channels, low_ptr,
    high_ptr, chunk, GRANULARITY: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    WIDE_OFFSETS: tl.constexpr, GUARD: tl.constexpr,
):  # fmt: skip
    """Write a chunk of a head's tokens as int8 less a zero point per channel; scales and offsets by the first chunk's program.

    :func:`range_kernel` has found the ranges of every chunk. The scale of a tensor is there already.
    """
    h, z, part = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    if WIDE_OFFSETS:
        h, x_stride_n = tl.cast(h, tl.int64), tl.cast(x_stride_n, tl.int64)
    head = z * tl.num_programs(0) + h
    d = tl.arange(0, BLOCK_D)
    parts = tl.arange(0, CHUNKS)[:, None]
    there = (parts < tl.num_programs(2)) & (d[None, :] < channels)
    at = (head * tl.num_programs(2) + parts) * channels + d[None, :]
    low = tl.min(tl.load(low_ptr + at, mask=there, other=float("inf")), 0)
    high = tl.max(tl.load(high_ptr + at, mask=there, other=float("-inf")), 0)
    low, high = tl.where(d < channels, low, 0.0), tl.where(d < channels, high, 0.0)
    middle, least = centered_scale(low, high)
    first = (part + tl.zeros((1, 1), tl.int32) == 0) & (d[None, :] < channels)
    if GRANULARITY == "tensor":
        scale = tl.zeros((1, BLOCK_D), tl.float32) + tl.load(scale_ptr)
    elif GRANULARITY == "head":
        # NaN counts as infinity, which a maximum keeps
        least = tl.where(least == least, least, float("inf"))
        scale = least_to_scale(tl.zeros((1, BLOCK_D), tl.float32) + tl.max(least, 0))
        tl.store(scale_ptr + head + d[None, :] * 0, scale, mask=first)
    else:
        scale = least_to_scale(least)[None, :]
        tl.store(scale_ptr + head * channels + d[None, :], scale, mask=first)
    usable = scale == scale
    inverse = inverse_scale(scale, GUARD)
    zero = zero_point(middle[None, :], inverse, GUARD)
    tl.store(offset_ptr + head * channels + d[None, :], zero * scale, mask=first)
    x_base = x_ptr + z * x_stride_z + h * x_stride_h
    for start in range(part * chunk, tl.minimum(tokens, part * chunk + chunk), BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        inside = (n[:, None] < tokens) & (d[None, :] < channels)
        x = tl.load(x_base + n[:, None] * x_stride_n + d[None, :] * x_stride_d, mask=inside, other=0.0).to(tl.float32)
        x = tl.where(usable, round_centered(x, inverse, zero, GUARD), 0)
        tl.store(values_ptr + (head * tokens + n[:, None]) * channels + d[None, :], x, mask=inside)


@triton.jit
def range_kernel(
    x_ptr, low_ptr, high_ptr, x_stride_z, x_stride_h, x_stride_n, x_stride_d, tokens, channels, chunk_tokens,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, WIDE_OFFSETS: tl.constexpr,
):  # fmt: skip
    """Write the minimum and maximum of every channel over one chunk of tokens of one head."""
    chunk, h, z = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    if WIDE_OFFSETS:
        h, x_stride_n = tl.cast(h, tl.int64), tl.cast(x_stride_n, tl.int64)
    d = tl.arange(0, BLOCK_D)
    begin = chunk * chunk_tokens
    low, high = _channel_range(
        x_ptr + z * x_stride_z + h * x_stride_h, x_stride_n, x_stride_d, begin, begin + chunk_tokens, tokens, channels, d,
        BLOCK_N, BLOCK_D,
    )  # fmt: skip
    out = ((z * tl.num_programs(1) + h) * tl.num_programs(0) + chunk) * channels + d
    tl.store(low_ptr + out, low, mask=d < channels)
    tl.store(high_ptr + out, high, mask=d < channels)


def _tokens_per_block(channels: int) -> int:
    """Return the tokens of a tile of 4096 elements."""
    return max(1, 4096 // triton.next_power_of_2(channels))


def launch_quantize_values(x: torch.Tensor, scale: torch.Tensor, center: torch.Tensor | None = None) -> torch.Tensor:
    """Quantise ``x`` (batch, heads, tokens, channels) with ``scale`` (broadcastable), minus ``center`` if given."""
    batch, heads, tokens, channels = x.shape
    values = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    if values.numel() == 0:
        return values
    block = _tokens_per_block(channels)
    spread = scale.expand(x.shape)
    for start in range(0, batch, 65535):
        stop = min(batch, start + 65535)
        centers = values if center is None else center[start:stop].contiguous()
        launch_kernel(
            quantize_kernel, (triton.cdiv(tokens, block), heads, stop - start),
            x[start:stop], spread[start:stop], centers, values[start:stop],
            *x.stride(), *spread.stride(), tokens, channels,
            CENTER=center is not None, BLOCK_N=block, BLOCK_D=triton.next_power_of_2(channels),
            WIDE_OFFSETS=needs_wide_offsets(x, spread), GUARD=x.device.type == "cpu", enable_fp_fusion=False,
        )  # fmt: skip
    return values


def launch_quantize_bias(bias: torch.Tensor) -> torch.Tensor:
    """Turn a float bias (batch, heads, queries, keys) into fixed point: :func:`qflash.quantize_bias`."""
    _, heads, queries, keys = bias.shape
    fixed = torch.empty(bias.shape, dtype=torch.int32, device=bias.device)
    if fixed.numel() == 0:
        return fixed
    rows, block_n = fixed.numel() // keys, min(1024, triton.next_power_of_2(keys))
    block_m = 2048 // block_n
    launch_kernel(
        bias_kernel, (triton.cdiv(rows, block_m), 1, 1), bias, fixed, *bias.stride(), rows, heads, queries, keys,
        BLOCK_M=block_m, BLOCK_N=block_n, WIDE_OFFSETS=needs_wide_offsets(bias), GUARD=bias.device.type == "cpu",
        enable_fp_fusion=False,
    )  # fmt: skip
    return fixed


def launch_quantize(x: torch.Tensor, granularity: str, center: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise ``x`` (batch, heads, tokens, channels), finding its scales: ``(values, scale)``.

    Args:
        granularity: see :func:`qflash.quantize`.
        center: subtract every channel's midrange first (:func:`qflash.specification.quantization.center_channels`).
    """
    batch, heads, tokens, channels = x.shape
    shape = scale_shape(x.shape, granularity)
    if x.numel() == 0:
        return torch.empty(x.shape, dtype=torch.int8, device=x.device), torch.ones(shape, dtype=torch.float32, device=x.device)
    block = _tokens_per_block(channels)
    width = triton.next_power_of_2(channels)
    guard, wide = x.device.type == "cpu", needs_wide_offsets(x)
    if granularity != "tensor":
        values = torch.empty(x.shape, dtype=torch.int8, device=x.device)
        scale = torch.empty(shape, dtype=torch.float32, device=x.device)
        for start in range(0, batch, 65535):
            stop = min(batch, start + 65535)
            arguments = (x[start:stop], values[start:stop], scale[start:stop], *x.stride(), tokens, channels)
            if granularity == "token" and not center:
                launch_kernel(
                    quantize_token_kernel, (triton.cdiv(tokens, block), heads, stop - start), *arguments,
                    BLOCK_N=block, BLOCK_D=width, WIDE_OFFSETS=wide, GUARD=guard, enable_fp_fusion=False,
                )  # fmt: skip
            else:
                # A short head is one block: its second pass finds it in the cache. A longer one is divided into chunks, few
                # enough that every program can read the ranges of all of them.
                whole = max(1, min(triton.next_power_of_2(tokens), 16384 // width))
                chunk = chunk_tokens(tokens, whole)
                chunks = triton.cdiv(tokens, chunk)
                low = high = values
                if chunks > 1:
                    ranges = (2, stop - start, heads, chunks, channels)
                    low, high = torch.empty(ranges, dtype=torch.float32, device=x.device).unbind()
                    launch_kernel(
                        range_kernel, (chunks, heads, stop - start), x[start:stop], low, high, *x.stride(), tokens, channels,
                        chunk, BLOCK_N=block, BLOCK_D=width, WIDE_OFFSETS=wide,
                    )  # fmt: skip
                launch_kernel(
                    quantize_head_kernel, (heads, stop - start, chunks), *arguments, low, high, chunk,
                    CHUNKS=triton.next_power_of_2(chunks), GRANULARITY=granularity, CENTER=center, BLOCK_N=whole,
                    BLOCK_D=width, WIDE_OFFSETS=wide, GUARD=guard, enable_fp_fusion=False,
                    num_warps=8 if whole * width >= 8192 else 4,
                )  # fmt: skip
        return values, scale
    # one scale for the whole tensor: the ranges of all heads are needed before the first value is written
    chunks = triton.cdiv(tokens, block)
    low = torch.empty((batch, heads, chunks, channels), dtype=torch.float32, device=x.device)
    high = torch.empty_like(low)
    for start in range(0, batch, 65535):
        stop = min(batch, start + 65535)
        launch_kernel(
            range_kernel, (chunks, heads, stop - start), x[start:stop], low[start:stop], high[start:stop], *x.stride(), tokens,
            channels, block, BLOCK_N=block, BLOCK_D=width, WIDE_OFFSETS=wide,
        )  # fmt: skip
    middle = None
    if center:
        low, high = low.amin(dim=2, keepdim=True), high.amax(dim=2, keepdim=True)
        middle = low * 0.5 + high * 0.5
        low, high = low - middle, high - middle
    scale = scale_from_amplitude(torch.maximum(low.abs().amax(), high.abs().amax()).reshape(shape))
    return launch_quantize_values(x, scale, middle), scale


def launch_quantize_centered(x: torch.Tensor, granularity: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run :func:`qflash.specification.quantization.quantize_centered` on ``x`` (batch, heads, tokens, channels): same bits."""
    batch, heads, tokens, channels = x.shape
    device = x.device
    values = torch.empty(x.shape, dtype=torch.int8, device=device)
    scale = torch.empty(scale_shape(x.shape, granularity), dtype=torch.float32, device=device)
    offset = torch.empty((batch, heads, 1, channels), dtype=torch.float32, device=device)
    if x.numel() == 0:
        return values, scale.fill_(1.0), offset.zero_()
    block, width = _tokens_per_block(channels), triton.next_power_of_2(channels)
    chunk = chunk_tokens(tokens, max(1, min(triton.next_power_of_2(tokens), 16384 // width)))
    chunks = triton.cdiv(tokens, chunk)
    low, high = torch.empty((2, batch, heads, chunks, channels), dtype=torch.float32, device=device).unbind()
    slices = [slice(start, min(batch, start + 65535)) for start in range(0, batch, 65535)]
    for part in slices:
        launch_kernel(
            range_kernel, (chunks, heads, part.stop - part.start), x[part], low[part], high[part], *x.stride(), tokens,
            channels, chunk, BLOCK_N=block, BLOCK_D=width, WIDE_OFFSETS=needs_wide_offsets(x),
        )  # fmt: skip
    if granularity == "tensor":
        least = least_scale(low.amin(dim=2), high.amax(dim=2))[1]
        scale.copy_(scale_from_least(least.amax()).reshape(scale.shape))
    for part in slices:
        launch_kernel(
            quantize_centered_kernel, (heads, part.stop - part.start, chunks), x[part], values[part],
            scale if granularity == "tensor" else scale[part], offset[part], *x.stride(), tokens, channels, low[part],
            high[part], chunk, GRANULARITY=granularity, CHUNKS=triton.next_power_of_2(chunks), BLOCK_N=block, BLOCK_D=width,
            WIDE_OFFSETS=needs_wide_offsets(x), GUARD=device.type == "cpu", enable_fp_fusion=False,
        )  # fmt: skip
    return values, scale, offset
