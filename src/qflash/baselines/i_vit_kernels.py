"""I-ViT's operators as Triton kernels of their own: a batched int8 product with requantisation, and Shiftmax."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def product_kernel(
    a_ptr, b_ptr, out_ptr,
    a_stride_z, a_stride_m, a_stride_k, b_stride_z, b_stride_k, b_stride_n, out_stride_z, out_stride_m,
    rows, columns, inner, multiplier, shift,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A tile of int8 A B, accumulated in int32, times multiplier / 2**shift, to int8."""
    z = tl.program_id(2).to(tl.int64)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + z * a_stride_z + m[:, None] * a_stride_m + k[None, :] * a_stride_k
    b_ptrs = b_ptr + z * b_stride_z + k[:, None] * b_stride_k + n[None, :] * b_stride_n
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    for start in range(0, inner, BLOCK_K):
        a = tl.load(a_ptrs, mask=(m[:, None] < rows) & (start + k[None, :] < inner), other=0)
        b = tl.load(b_ptrs, mask=(start + k[:, None] < inner) & (n[None, :] < columns), other=0)
        accumulator = tl.dot(a, b, accumulator, out_dtype=tl.int32)
        a_ptrs += BLOCK_K * a_stride_k
        b_ptrs += BLOCK_K * b_stride_k
    wide = accumulator.to(tl.int64) * multiplier
    out = (((wide >> (shift - 1)) + 1) >> 1).to(tl.int32)
    out = tl.minimum(tl.maximum(out, -128), 127).to(tl.int8)
    out_ptrs = out_ptr + z * out_stride_z + m[:, None] * out_stride_m + n[None, :]
    tl.store(out_ptrs, out, mask=(m[:, None] < rows) & (n[None, :] < columns))


@triton.jit
def shiftmax_kernel(x_ptr, out_ptr, rows, keys, unit, shift, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Shiftmax of int8 rows, each held whole; see :mod:`qflash.baselines.i_vit`."""
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    inside = (m[:, None] < rows) & (n[None, :] < keys)
    x = tl.load(x_ptr + m[:, None] * keys + n[None, :], mask=inside, other=-128).to(tl.int32)
    x -= tl.max(x, 1)[:, None]
    x = x + (x >> 1) - (x >> 4)
    x = -tl.maximum(x, -shift * unit)
    octaves = x // unit
    remainder = x - octaves * unit
    exp = ((-remainder >> 1) + unit) << (shift - octaves)
    exp = tl.where(inside, exp, 0)
    factor = 2147483647 // tl.maximum(tl.sum(exp, 1), 1)
    out = (factor[:, None] * exp) >> 24
    tl.store(out_ptr + m[:, None] * keys + n[None, :], out.to(tl.int8), mask=inside)


def product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, multiplier: int, shift: int) -> None:
    """Write the requantised product into ``out``.

    Args:
        a: int8 (batch, heads, rows, inner), batch and heads contiguous.
        b: int8 (batch, heads, inner, columns), likewise.
        out: int8 (batch, heads, rows, columns), contiguous.
        multiplier, shift: see :func:`qflash.baselines.integer.requantize`.
    """
    rows, columns, inner = a.shape[2], b.shape[3], a.shape[3]
    block_m, block_n = (64, 32 if columns <= 32 else 64)
    block_k = 32 if inner <= 32 else 64
    a, b, out = (x.flatten(0, 1) for x in (a, b, out))
    for start in range(0, len(a), 65535):
        part = slice(start, start + 65535)
        grid = (triton.cdiv(rows, block_m), triton.cdiv(columns, block_n), len(a[part]))
        product_kernel[grid](
            a[part], b[part], out[part], *a.stride(), *b.stride(), *out.stride()[:2],
            rows, columns, inner, multiplier, shift, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
        )  # fmt: skip


def shiftmax_rows(x: torch.Tensor, out: torch.Tensor, unit: int, shift: int) -> None:
    """Write Shiftmax of the rows of ``x`` into ``out``.

    Args:
        x: int8 (..., keys), contiguous.
        out: int8, the same shape, contiguous: weights in 1/128.
        unit, shift: I₀ and n of :func:`qflash.baselines.i_vit.shiftmax_constants`.
    """
    keys = x.shape[-1]
    rows = x.numel() // keys
    width = triton.next_power_of_2(keys)
    block = max(1, 2048 // width)
    shiftmax_kernel[(triton.cdiv(rows, block),)](
        x, out, rows, keys, unit, shift, BLOCK_M=block, BLOCK_N=width, num_warps=4 if width <= 2048 else 8
    )
