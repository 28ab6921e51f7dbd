"""Quantisation kernels: the bits of :mod:`qflash.quantization`, one launch a tensor (two for one scale in all)."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from .. import fixed_point as fp
from ..quantization import LARGEST_SCALE, SMALLEST_SCALE, scale_from_amplitude, scale_shape
from .calls import launch_kernel

SMALLEST = tl.constexpr(SMALLEST_SCALE)
LARGEST = tl.constexpr(LARGEST_SCALE)
# Added to a number this rounds it to nearest, ties to even, in its lowest bits: 1.5 * 2**23, and 1.5 * 2**52 for float64.
ROUND = tl.constexpr(12582912.0)
ROUND_WIDE = tl.constexpr(6755399441055744.0)
# log2(e) * 2**16 and the limit of quantize_bias
BIAS_UNIT = tl.constexpr(math.log2(math.e) * 2**fp.BIAS_FRACTION_BITS)
BIAS_LIMIT = tl.constexpr(float(fp.BIAS_LIMIT))
MOST_BIAS_MAXIMUM = tl.constexpr(fp.MOST_BIAS_MAXIMUM)
LEAST_EVEN_MAXIMUM = tl.constexpr(fp.LEAST_EVEN_MAXIMUM)
BIAS_MASKED = tl.constexpr(fp.BIAS_MASKED)
BIAS_EVEN = tl.constexpr(fp.BIAS_EVEN)
BIAS_POISON = tl.constexpr(fp.BIAS_POISON)
# minima and maxima of two 16-bit floats at a time; a NaN wins
MIN_F16 = tl.constexpr("min.NaN.f16x2 $0, $1, $2;")
MAX_F16 = tl.constexpr("max.NaN.f16x2 $0, $1, $2;")
MIN_BF16 = tl.constexpr("min.NaN.bf16x2 $0, $1, $2;")
MAX_BF16 = tl.constexpr("max.NaN.bf16x2 $0, $1, $2;")
# the same of magnitudes: of a 16-bit abs on halves of words that were packed, ptxas 12.8 makes a wrong one now and then
SIGNS_OFF = "{.reg .b32 a, b; and.b32 a, $1, 0x7fff7fff; and.b32 b, $2, 0x7fff7fff; "
MAX_ABS_F16 = tl.constexpr(SIGNS_OFF + "max.NaN.f16x2 $0, a, b;}")
MAX_ABS_BF16 = tl.constexpr(SIGNS_OFF + "max.NaN.bf16x2 $0, a, b;}")
# a Newton step on the device's estimate: correctly rounded as long as neither side is subnormal (tests/gpu: every scale)
RECIPROCAL = tl.constexpr(
    "{.reg .f32 e; rcp.approx.ftz.f32 $0, $1; neg.f32 e, $1; fma.rn.f32 e, e, $0, 0f3F800000; fma.rn.f32 $0, e, $0, $0;}"
)


@triton.jit
def nan_min(a, b):
    """The smaller of the two; NaN if either is."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def nan_max(a, b):
    """The larger of the two; NaN if either is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def lower(a, b, GUARD: tl.constexpr):
    """:func:`nan_min` of two tiles as they were loaded."""
    if GUARD:
        result = nan_min(a.to(tl.float32), b.to(tl.float32))
    elif a.dtype == tl.float16:
        result = tl.inline_asm_elementwise(MIN_F16, "=r,r,r", [a, b], tl.float16, True, 2)
    elif a.dtype == tl.bfloat16:
        result = tl.inline_asm_elementwise(MIN_BF16, "=r,r,r", [a, b], tl.bfloat16, True, 2)
    else:
        result = nan_min(a, b)
    return result


@triton.jit
def higher(a, b, GUARD: tl.constexpr):
    """:func:`nan_max` of two tiles as they were loaded."""
    if GUARD:
        result = nan_max(a.to(tl.float32), b.to(tl.float32))
    elif a.dtype == tl.float16:
        result = tl.inline_asm_elementwise(MAX_F16, "=r,r,r", [a, b], tl.float16, True, 2)
    elif a.dtype == tl.bfloat16:
        result = tl.inline_asm_elementwise(MAX_BF16, "=r,r,r", [a, b], tl.bfloat16, True, 2)
    else:
        result = nan_max(a, b)
    return result


@triton.jit
def higher_magnitude(a, b, GUARD: tl.constexpr):
    """:func:`nan_max` of the magnitudes of two tiles as they were loaded."""
    if GUARD:
        result = nan_max(tl.abs(a.to(tl.float32)), tl.abs(b.to(tl.float32)))
    elif a.dtype == tl.float16:
        result = tl.inline_asm_elementwise(MAX_ABS_F16, "=r,r,r", [a, b], tl.float16, True, 2)
    elif a.dtype == tl.bfloat16:
        result = tl.inline_asm_elementwise(MAX_ABS_BF16, "=r,r,r", [a, b], tl.bfloat16, True, 2)
    else:
        result = nan_max(tl.abs(a), tl.abs(b))
    return result


@triton.jit
def lowest(x, AXIS: tl.constexpr, GUARD: tl.constexpr):
    """Minimum along an axis; NaN, or in the interpreter minus infinity, if there is a NaN."""
    if GUARD:
        # a reduction of one's own takes the interpreter a step an element; it ignores NaN in those it knows
        return tl.min(tl.where(x == x, x, float("-inf")), AXIS)
    return tl.reduce(x, AXIS, nan_min)


@triton.jit
def highest(x, AXIS: tl.constexpr, GUARD: tl.constexpr):
    """Maximum along an axis; NaN, or in the interpreter infinity, if there is a NaN."""
    if GUARD:
        return tl.max(tl.where(x == x, x, float("inf")), AXIS)
    return tl.reduce(x, AXIS, nan_max)


@triton.jit
def amplitude_to_scale(amplitude):
    """Equation 2's scale: amplitude * (1 / 127), 1 for zero, NaN where the amplitude is not finite."""
    scale = tl.minimum(tl.maximum(amplitude * (1.0 / 127.0), SMALLEST), LARGEST)
    scale = tl.where(amplitude == 0.0, 1.0, scale)
    return tl.where(amplitude < float("inf"), scale, float("nan"))


@triton.jit
def inverse_scale(scale, GUARD: tl.constexpr):
    """1 / scale, correctly rounded, for what :func:`amplitude_to_scale` returns."""
    if GUARD:
        inverse = tl.math.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    else:
        inverse = tl.inline_asm_elementwise(RECIPROCAL, "=&f,f", [scale], tl.float32, True, 1)
    return inverse


@triton.jit
def _rounded_product(x, inverse, GUARD: tl.constexpr):
    """The exact product x * inverse rounded to nearest even, plus ROUND; in the interpreter float64, plus ROUND_WIDE."""
    if GUARD:
        # the interpreter's fma rounds twice; float64 holds the product of two float32 exactly
        return x.to(tl.float64) * inverse.to(tl.float64) + ROUND_WIDE
    return tl.fma(x, inverse + tl.zeros(x.shape, tl.float32), tl.full(x.shape, ROUND, tl.float32))


@triton.jit
def round_to_int8(x, inverse, GUARD: tl.constexpr):
    """The exact product x * inverse rounded to nearest even, for a scale found on x itself: it stays within +-127."""
    rounded = _rounded_product(x, inverse, GUARD)
    return rounded.to(tl.int64 if GUARD else tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def to_int8(x, scale, GUARD: tl.constexpr):
    """Round x / scale to nearest even, saturated to [-128, 127]; 0 where the quotient is NaN."""
    if GUARD:
        inverse = inverse_scale(scale, True)
    else:
        inverse = tl.inline_asm_elementwise("rcp.rn.f32 $0, $1;", "=f,f", [scale], tl.float32, True, 1)
    scaled = _rounded_product(x, inverse, GUARD) - (ROUND_WIDE if GUARD else ROUND)
    scaled = tl.where(scaled == scaled, scaled, 0.0)
    return tl.minimum(tl.maximum(scaled, -128.0), 127.0).to(tl.int8)


@triton.jit
def bias_base(row_max):
    """What :func:`qflash.quantize_bias` takes off a row whose largest bias this is, and whether its keys share it evenly."""
    size = tl.abs(row_max)
    base = tl.where((size > MOST_BIAS_MAXIMUM) & (size < float("inf")), row_max, 0.0)
    return base, tl.abs(base) >= LEAST_EVEN_MAXIMUM


@triton.jit
def bias_to_fixed(bias, GUARD: tl.constexpr):
    """A float32 tile of biases, less their rows' bases, but for its marks: nats to 1/65536 octaves, NaN to 0."""
    scaled = tl.minimum(tl.maximum(bias * BIAS_UNIT, -BIAS_LIMIT), BIAS_LIMIT)
    if GUARD:
        scaled = tl.where(bias == bias, scaled, 0.0)
        return (scaled.to(tl.float64) + ROUND_WIDE).to(tl.int64, bitcast=True).to(tl.int32)
    return tl.inline_asm_elementwise("cvt.rni.s32.f32 $0, $1;", "=r,f", [scaled], tl.int32, True, 1)


@triton.jit
def bias_kernel(
    bias_ptr, fixed_ptr, stride_z, stride_h, stride_m, stride_n, rows, heads, queries, keys,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GUARD: tl.constexpr,
):  # fmt: skip
    """:func:`qflash.quantize_bias` of a block of rows."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    head = row // queries
    begin = bias_ptr + head // heads * stride_z + head % heads * stride_h + row % queries * stride_m
    n = tl.arange(0, BLOCK_N)
    inside = (row < rows)[:, None]
    high = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    for start in range(0, keys, BLOCK_N):
        at = start + n[None, :]
        bias = tl.load(begin[:, None] + at * stride_n, mask=inside & (at < keys), other=float("-inf")).to(tl.float32)
        # a NaN leaves its row as it is
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
def magnitude(x):
    """|x|, with NaN as infinity so that a maximum cannot lose it."""
    return tl.where(x == x, tl.abs(x), float("inf"))


@triton.jit
def quantize_kernel(
    x_ptr, scale_ptr, center_ptr, values_ptr,
    x_stride_z, x_stride_h, x_stride_n, x_stride_d,
    s_stride_z, s_stride_h, s_stride_n, s_stride_d,
    tokens, channels, CENTER: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, GUARD: tl.constexpr,
):  # fmt: skip
    """Quantise a block of tokens of one head with given scales."""
    block, h, z = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
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
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, GUARD: tl.constexpr,
):  # fmt: skip
    """Quantise a block of tokens of one head with one scale found per token."""
    block, h, z = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
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
    """Lowest and highest value of every channel over tokens ``begin`` to ``end``; NaN shows as an infinite range."""
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
    GUARD: tl.constexpr,
):  # fmt: skip
    """Quantise one head, or a chunk of its tokens, with the scales of the whole head.

    With one chunk the ranges of the channels are found here, otherwise :func:`range_kernel` has found every chunk's.
    """
    h, z, part = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
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
def range_kernel(
    x_ptr, low_ptr, high_ptr, x_stride_z, x_stride_h, x_stride_n, x_stride_d, tokens, channels, chunk_tokens,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Lowest and highest value of every channel over one chunk of tokens of one head."""
    chunk, h, z = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    begin = chunk * chunk_tokens
    low, high = _channel_range(
        x_ptr + z * x_stride_z + h * x_stride_h, x_stride_n, x_stride_d, begin, begin + chunk_tokens, tokens, channels, d,
        BLOCK_N, BLOCK_D,
    )  # fmt: skip
    out = ((z * tl.num_programs(1) + h) * tl.num_programs(0) + chunk) * channels + d
    tl.store(low_ptr + out, low, mask=d < channels)
    tl.store(high_ptr + out, high, mask=d < channels)


MOST_CHUNKS = 16
"""Chunks of a long head: few enough that every program can look at the ranges, or the sums, of all."""


def chunk_tokens(tokens: int, least: int) -> int:
    """Return how many tokens a chunk of a head takes: ``least``, or the power of two that makes no more than MOST_CHUNKS."""
    return max(least, triton.next_power_of_2(triton.cdiv(tokens, MOST_CHUNKS)))


def _tokens_per_block(channels: int) -> int:
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
            CENTER=center is not None, BLOCK_N=block, BLOCK_D=triton.next_power_of_2(channels), GUARD=x.device.type == "cpu",
            enable_fp_fusion=False,
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
        BLOCK_M=block_m, BLOCK_N=block_n, GUARD=bias.device.type == "cpu", enable_fp_fusion=False,
    )  # fmt: skip
    return fixed


def launch_quantize(x: torch.Tensor, granularity: str, center: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise ``x`` (batch, heads, tokens, channels), finding its scales: ``(values, scale)``.

    Args:
        granularity: see :func:`qflash.quantize`.
        center: subtract every channel's midrange first (:func:`qflash.quantization.center_channels`).
    """
    batch, heads, tokens, channels = x.shape
    shape = scale_shape(x.shape, granularity)
    if x.numel() == 0:
        return torch.empty(x.shape, dtype=torch.int8, device=x.device), torch.ones(shape, dtype=torch.float32, device=x.device)
    block = _tokens_per_block(channels)
    width = triton.next_power_of_2(channels)
    guard = x.device.type == "cpu"
    if granularity != "tensor":
        values = torch.empty(x.shape, dtype=torch.int8, device=x.device)
        scale = torch.empty(shape, dtype=torch.float32, device=x.device)
        for start in range(0, batch, 65535):
            stop = min(batch, start + 65535)
            arguments = (x[start:stop], values[start:stop], scale[start:stop], *x.stride(), tokens, channels)
            if granularity == "token" and not center:
                launch_kernel(
                    quantize_token_kernel, (triton.cdiv(tokens, block), heads, stop - start), *arguments,
                    BLOCK_N=block, BLOCK_D=width, GUARD=guard, enable_fp_fusion=False,
                )  # fmt: skip
            else:
                # A head of up to 256 tokens is one block: its second pass finds it in the cache. A longer one is divided,
                # into chunks few enough that every program can look at the ranges of all.
                whole = max(1, min(triton.next_power_of_2(tokens), 16384 // width))
                chunk = chunk_tokens(tokens, whole)
                chunks = triton.cdiv(tokens, chunk)
                low = high = values
                if chunks > 1:
                    ranges = (2, stop - start, heads, chunks, channels)
                    low, high = torch.empty(ranges, dtype=torch.float32, device=x.device).unbind()
                    launch_kernel(
                        range_kernel, (chunks, heads, stop - start), x[start:stop], low, high, *x.stride(), tokens, channels,
                        chunk, BLOCK_N=block, BLOCK_D=width,
                    )  # fmt: skip
                launch_kernel(
                    quantize_head_kernel, (heads, stop - start, chunks), *arguments, low, high, chunk,
                    CHUNKS=triton.next_power_of_2(chunks), GRANULARITY=granularity, CENTER=center, BLOCK_N=whole,
                    BLOCK_D=width, GUARD=guard, enable_fp_fusion=False,
                    num_warps=8 if whole * width >= 8192 else 4,
                )  # fmt: skip
        return values, scale
    # one scale for everything: the ranges of all heads have to be in before the first value is written
    chunks = triton.cdiv(tokens, block)
    low = torch.empty((batch, heads, chunks, channels), dtype=torch.float32, device=x.device)
    high = torch.empty_like(low)
    for start in range(0, batch, 65535):
        stop = min(batch, start + 65535)
        launch_kernel(
            range_kernel, (chunks, heads, stop - start), x[start:stop], low[start:stop], high[start:stop], *x.stride(), tokens,
            channels, block, BLOCK_N=block, BLOCK_D=width,
        )  # fmt: skip
    middle = None
    if center:
        low, high = low.amin(dim=2, keepdim=True), high.amax(dim=2, keepdim=True)
        middle = low * 0.5 + high * 0.5
        low, high = low - middle, high - middle
    scale = scale_from_amplitude(torch.maximum(low.abs().amax(), high.abs().amax()).reshape(shape))
    return launch_quantize_values(x, scale, middle), scale
