"""Quantisation kernels: the bits of :mod:`qflash.quantization`, in one pass per token or two per head."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..quantization import SMALLEST_SCALE, scale_from_amplitude, scale_shape

ROUND = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding and subtracting it rounds to nearest, ties to even
SMALLEST = tl.constexpr(SMALLEST_SCALE)


@triton.jit
def amplitude_to_scale(amplitude):
    """Equation 2's scale: amplitude / 127, 1 for zero, NaN where the amplitude is not finite."""
    scale = tl.maximum(tl.math.div_rn(amplitude, tl.full(amplitude.shape, 127.0, tl.float32)), SMALLEST)
    scale = tl.where(amplitude == 0.0, 1.0, scale)
    return tl.where(amplitude < float("inf"), scale, float("nan"))


@triton.jit
def to_int8(x, scale):
    """Round x / scale to nearest even, saturated to [-128, 127]; 0 where the quotient is NaN."""
    scaled = x * tl.math.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    scaled = tl.where(scaled == scaled, scaled, 0.0)
    scaled = tl.minimum(tl.maximum(scaled, -128.0), 127.0)
    return ((scaled + ROUND) - ROUND).to(tl.int8)


@triton.jit
def magnitude(x):
    """|x|, with NaN as infinity so that a maximum cannot lose it."""
    return tl.where(x == x, tl.abs(x), float("inf"))


@triton.jit
def quantize_kernel(
    x_ptr, scale_ptr, center_ptr, values_ptr, out_scale_ptr,
    x_stride_z, x_stride_h, x_stride_n, x_stride_d,
    s_stride_z, s_stride_h, s_stride_n, s_stride_d,
    tokens, channels,
    PER_TOKEN: tl.constexpr, CENTER: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Quantise a block of tokens of one head with given scales, or (PER_TOKEN) with one scale found per token."""
    block, h, z = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    heads = tl.num_programs(1)
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    inside = (n[:, None] < tokens) & (d[None, :] < channels)
    x_ptrs = x_ptr + z * x_stride_z + h * x_stride_h + n[:, None] * x_stride_n + d[None, :] * x_stride_d
    x = tl.load(x_ptrs, mask=inside, other=0.0).to(tl.float32)
    head = z * heads + h
    if CENTER:
        x = x - tl.load(center_ptr + head * channels + d, mask=d < channels, other=0.0)[None, :]
        x = tl.where(inside, x, 0.0)
    if PER_TOKEN:
        scale = amplitude_to_scale(tl.max(magnitude(x), 1))[:, None]
        tl.store(out_scale_ptr + head * tokens + n[:, None], scale, mask=n[:, None] < tokens)
    else:
        s_ptrs = scale_ptr + z * s_stride_z + h * s_stride_h + n[:, None] * s_stride_n + d[None, :] * s_stride_d
        scale = tl.load(s_ptrs, mask=inside, other=1.0)
    values_ptrs = values_ptr + (head * tokens + n[:, None]) * channels + d[None, :]
    tl.store(values_ptrs, to_int8(x, scale), mask=inside)


@triton.jit
def range_kernel(
    x_ptr, low_ptr, high_ptr, x_stride_z, x_stride_h, x_stride_n, x_stride_d, tokens, channels,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Lowest and highest value of every channel over one chunk of tokens of one head."""
    chunk, h, z = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    n = chunk * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    inside = (n[:, None] < tokens) & (d[None, :] < channels)
    x_ptrs = x_ptr + z * x_stride_z + h * x_stride_h + n[:, None] * x_stride_n + d[None, :] * x_stride_d
    x = tl.load(x_ptrs, mask=inside, other=0.0).to(tl.float32)
    finite = x == x
    low = tl.min(tl.where(inside, tl.where(finite, x, float("-inf")), float("inf")), 0)
    high = tl.max(tl.where(inside, tl.where(finite, x, float("inf")), float("-inf")), 0)
    out = ((z * tl.num_programs(1) + h) * tl.num_programs(0) + chunk) * channels + d
    tl.store(low_ptr + out, low, mask=d < channels)
    tl.store(high_ptr + out, high, mask=d < channels)


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
        quantize_kernel[(triton.cdiv(tokens, block), heads, stop - start)](
            x[start:stop], spread[start:stop], centers, values[start:stop], scale,
            *x.stride(), *spread.stride(), tokens, channels,
            PER_TOKEN=False, CENTER=center is not None, BLOCK_N=block, BLOCK_D=triton.next_power_of_2(channels),
        )  # fmt: skip
    return values


def launch_quantize(x: torch.Tensor, granularity: str, center: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise ``x`` (batch, heads, tokens, channels), finding its scales: ``(values, scale)``.

    Args:
        granularity: see :func:`qflash.quantize`.
        center: subtract every channel's midrange first (:func:`qflash.quantization.center_channels`).
    """
    batch, heads, tokens, channels = x.shape
    shape = scale_shape(x.shape, granularity)
    if x.numel() == 0:
        return torch.empty(x.shape, dtype=torch.int8, device=x.device), torch.ones(shape, device=x.device)
    block = _tokens_per_block(channels)
    width = triton.next_power_of_2(channels)
    middle = None
    low = high = None
    if center or granularity != "token":
        chunks = triton.cdiv(tokens, block)
        low = torch.empty((batch, heads, chunks, channels), device=x.device)
        high = torch.empty_like(low)
        for start in range(0, batch, 65535):
            stop = min(batch, start + 65535)
            range_kernel[(chunks, heads, stop - start)](
                x[start:stop], low[start:stop], high[start:stop], *x.stride(), tokens, channels, BLOCK_N=block, BLOCK_D=width
            )
        low, high = low.amin(dim=2, keepdim=True), high.amax(dim=2, keepdim=True)
        if center:
            middle = (low + high) * 0.5
            low, high = low - middle, high - middle
    if granularity == "token":
        values = torch.empty(x.shape, dtype=torch.int8, device=x.device)
        scale = torch.empty(shape, device=x.device)
        for start in range(0, batch, 65535):
            stop = min(batch, start + 65535)
            quantize_kernel[(triton.cdiv(tokens, block), heads, stop - start)](
                x[start:stop], scale, scale if middle is None else middle[start:stop], values[start:stop], scale[start:stop],
                *x.stride(), 0, 0, 0, 0, tokens, channels,
                PER_TOKEN=True, CENTER=center, BLOCK_N=block, BLOCK_D=width,
            )  # fmt: skip
        return values, scale
    assert low is not None and high is not None
    amplitude = torch.maximum(low.abs(), high.abs())
    if granularity != "channel":
        amplitude = amplitude.amax(dim=3, keepdim=True)
    if granularity == "tensor":
        amplitude = amplitude.amax().reshape(shape)
    scale = scale_from_amplitude(amplitude)
    return launch_quantize_values(x, scale, middle), scale
