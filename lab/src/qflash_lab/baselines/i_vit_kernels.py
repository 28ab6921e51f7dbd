"""I-ViT's operators as Triton kernels of their own: a batched int8 product with requantisation, and Shiftmax.

Rows of scores and weights are as long as a multiple of :data:`ALIGNMENT`, so that they are read and written 16 bytes at a time;
what is behind a row's keys is zero and does not count.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from qflash.kernels.launch_recorder import KernelLaunch

ALIGNMENT = 16
"""Bytes that a row of scores is a multiple of."""


class ProductTiles(NamedTuple):
    """How the product divides its work.

    Attributes:
        block_m, block_n: rows and columns a program.
        block_k: products added up in an iteration.
        warps: warps a program.
        stages: loads in flight in the loop.
    """

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int


class ShiftmaxTiles(NamedTuple):
    """How Shiftmax divides its work: rows and warps a program."""

    rows: int
    warps: int


@triton.jit
def product_kernel(
    a_ptr, b_ptr, out_ptr,
    a_stride_z, a_stride_m, a_stride_k, b_stride_z, b_stride_k, b_stride_n, out_stride_z, out_stride_m,
    rows, columns, width, inner, blocks_m, blocks_n, multiplier, shift,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    WHOLE_N: tl.constexpr, WHOLE_K: tl.constexpr, WHOLE_OUT: tl.constexpr, HIGH: tl.constexpr,
):  # fmt: skip
    """A tile of int8 A B, accumulated in int32, times multiplier / 2**shift, to int8.

    B has ``columns``, the output ``width``; what it has more is zero. WHOLE_N, WHOLE_K, WHOLE_OUT: whether tiles end with B's
    columns, with the sum and with the output's rows. HIGH: shift is 33 or more.
    """
    program = tl.program_id(0)
    z = (program // (blocks_m * blocks_n)).to(tl.int64)
    rest = program % (blocks_m * blocks_n)
    m = (rest // blocks_n) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = (rest % blocks_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + z * a_stride_z + m[:, None] * a_stride_m + k[None, :] * a_stride_k
    b_ptrs = b_ptr + z * b_stride_z + k[:, None] * b_stride_k + n[None, :] * b_stride_n
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    for start in range(0, inner, BLOCK_K):
        if WHOLE_K:
            a = tl.load(a_ptrs, mask=m[:, None] < rows, other=0)
        else:
            a = tl.load(a_ptrs, mask=(m[:, None] < rows) & (start + k[None, :] < inner), other=0)
        if WHOLE_K and WHOLE_N:
            b = tl.load(b_ptrs)
        elif WHOLE_K:
            b = tl.load(b_ptrs, mask=n[None, :] < columns, other=0)
        elif WHOLE_N:
            b = tl.load(b_ptrs, mask=start + k[:, None] < inner, other=0)
        else:
            b = tl.load(b_ptrs, mask=(start + k[:, None] < inner) & (n[None, :] < columns), other=0)
        accumulator = tl.dot(a, b, accumulator, out_dtype=tl.int32)
        a_ptrs += BLOCK_K * a_stride_k
        b_ptrs += BLOCK_K * b_stride_k
    wide = accumulator.to(tl.int64) * multiplier
    if HIGH:
        # wide >> (shift - 1) is (wide >> 32) >> (shift - 33), floors both; the upper half of a 63-bit product has 31 bits
        out = (((wide >> 32).to(tl.int32) >> (shift - 33)) + 1) >> 1
    else:
        out = (((wide >> (shift - 1)) + 1) >> 1).to(tl.int32)
    out = tl.minimum(tl.maximum(out, -128), 127).to(tl.int8)
    out_ptrs = out_ptr + z * out_stride_z + m[:, None] * out_stride_m + n[None, :]
    if WHOLE_OUT:
        tl.store(out_ptrs, out, mask=m[:, None] < rows)
    else:
        tl.store(out_ptrs, out, mask=(m[:, None] < rows) & (n[None, :] < width))


@triton.jit
def shiftmax_kernel(
    x_ptr, out_ptr, rows, keys, stride, UNIT: tl.constexpr, SHIFT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Shiftmax of int8 rows, each whole, ``stride`` apart; see :mod:`qflash_lab.baselines.i_vit`. Zero behind the keys."""
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    inside = (m[:, None] < rows) & (n[None, :] < stride)
    key = n[None, :] < keys
    x = tl.load(x_ptr + m[:, None] * stride + n[None, :], mask=inside, other=-128).to(tl.int32)
    x = tl.where(key, x, -128)
    x -= tl.max(x, 1)[:, None]
    x = x + (x >> 1) - (x >> 4)
    x = -tl.maximum(x, -SHIFT * UNIT)
    octaves = (x.to(tl.uint32) // UNIT).to(tl.int32)  # not negative, and unsigned a multiplication and a shift
    remainder = x - octaves * UNIT
    exp = ((-remainder >> 1) + UNIT) << (SHIFT - octaves)
    exp = tl.where(key, exp, 0)
    factor = 2147483647 // tl.maximum(tl.sum(exp, 1), 1)
    out = (factor[:, None] * exp) >> 24
    tl.store(out_ptr + m[:, None] * stride + n[None, :], out.to(tl.int8), mask=inside)


def aligned_keys(keys: int) -> int:
    """Return the length of a row of scores in memory."""
    return triton.cdiv(keys, ALIGNMENT) * ALIGNMENT


def choose_product_tiles(columns: int, inner: int) -> ProductTiles:
    """Return the tiles of a product by its columns and the length of its sums."""
    return ProductTiles(64, 32 if columns <= 32 else 64, 32 if inner <= 32 else 64, 4, 3)


def choose_shiftmax_tiles(keys: int) -> ShiftmaxTiles:
    """Return the tiles of Shiftmax by the length of a row."""
    width = triton.next_power_of_2(keys)
    return ShiftmaxTiles(max(1, 2048 // width), 4 if width <= 2048 else 8)


def product_call(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, multiplier: int, shift: int, *, tiles: tuple[int, ...] | None = None
) -> KernelLaunch:
    """Spell out the launch that writes the requantised product into ``out``.

    Args:
        a: int8 (batch, heads, rows, inner), batch and heads contiguous.
        b: int8 (batch, heads, inner, columns), likewise.
        out: int8 (batch, heads, rows, columns or more), contiguous; columns that ``b`` lacks become zero.
        multiplier, shift: see :func:`qflash_lab.baselines.integer.requantize`.
        tiles: :class:`ProductTiles`; by :func:`choose_product_tiles` if None.
    """
    rows, columns, inner, width = a.shape[2], b.shape[3], a.shape[3], out.shape[3]
    chosen = ProductTiles(*tiles) if tiles else choose_product_tiles(columns, inner)
    a, b, out = (x.flatten(0, 1) for x in (a, b, out))
    blocks_m, blocks_n = triton.cdiv(rows, chosen.block_m), triton.cdiv(width, chosen.block_n)
    names = product_kernel.arg_names
    values = (
        a, b, out, *a.stride(), *b.stride(), *out.stride()[:2],
        rows, columns, width, inner, blocks_m, blocks_n, multiplier, shift,
    )  # fmt: skip
    arguments = dict(zip(names, values, strict=False)) | {
        "BLOCK_M": chosen.block_m,
        "BLOCK_N": chosen.block_n,
        "BLOCK_K": chosen.block_k,
        "WHOLE_N": columns % chosen.block_n == 0,
        "WHOLE_K": inner % chosen.block_k == 0,
        "WHOLE_OUT": width % chosen.block_n == 0,
        "HIGH": shift >= 33,
    }
    options = {"num_warps": chosen.warps, "num_stages": chosen.stages}
    return KernelLaunch(product_kernel, (len(a) * blocks_m * blocks_n, 1, 1), arguments, options)


def shiftmax_call(
    x: torch.Tensor, out: torch.Tensor, keys: int, unit: int, shift: int, *, tiles: tuple[int, ...] | None = None
) -> KernelLaunch:
    """Spell out the launch that writes Shiftmax of the rows of ``x`` into ``out``.

    Args:
        x: int8 (..., :func:`aligned_keys` of ``keys``), contiguous.
        out: int8, the same shape, contiguous: weights in 1/128, zero behind the keys.
        keys: of a row.
        unit, shift: I₀ and n of :func:`qflash_lab.baselines.i_vit.shiftmax_constants`; constants of the compiled kernel.
        tiles: :class:`ShiftmaxTiles`; by :func:`choose_shiftmax_tiles` if None.
    """
    stride = x.shape[-1]
    rows = x.numel() // stride
    chosen = ShiftmaxTiles(*tiles) if tiles else choose_shiftmax_tiles(stride)
    arguments = {
        "x_ptr": x,
        "out_ptr": out,
        "rows": rows,
        "keys": keys,
        "stride": stride,
        "UNIT": unit,
        "SHIFT": shift,
        "BLOCK_M": chosen.rows,
        "BLOCK_N": triton.next_power_of_2(stride),
    }
    return KernelLaunch(shiftmax_kernel, (triton.cdiv(rows, chosen.rows), 1, 1), arguments, {"num_warps": chosen.warps})
