"""Attention with integer scores and a softmax in floating point: the kernel of the baselines.

One kernel is INT-FlashAttention (Full, Half) and QAttn, which differ in what shares a scale and in the type of the
second product. A program computes one block of queries of one head in one pass over the keys. Tensors are contiguous,
so that a head is an address; masks there are none, as in the methods' papers.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from qflash.kernels.launch_recorder import KernelLaunch, ScoreTile

from .online import BLOCK
from .tuning import BaselineShape, tuned_tiles

# added to a number below 2**22 this rounds it to nearest, ties to even, in its lowest bits
ROUND = tl.constexpr(12582912.0)


class Tiles(NamedTuple):
    """How the kernel divides its work.

    Attributes:
        block_m: queries a program.
        block_n: keys a tile; weights are rounded relative to the largest score so far, so it shows in the last bits.
        warps: warps a program.
        stages: loads in flight in the loop.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int


@triton.jit
def _to_bfloat16(x, GUARD: tl.constexpr):
    """Round float32 to bfloat16; for the interpreter, which cannot, to the same numbers in float32."""
    if GUARD:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        return bits.to(tl.float32, bitcast=True)
    return x.to(tl.bfloat16)


@triton.jit
def _tile(
    out, total, highest, q, row, k_base, v_base, ks_base, start, keys, padded,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr,
    PRODUCT: tl.constexpr, KEY_TOKEN: tl.constexpr, TAIL: tl.constexpr, OFFSET: tl.constexpr, GUARD: tl.constexpr,
):  # fmt: skip
    """Take one tile of keys into the sums."""
    n = start + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    c = tl.arange(0, BLOCK_DV)
    k_ptrs = k_base + n[None, :] * HEAD_DIM + d[:, None]
    if TAIL or BLOCK_D != HEAD_DIM:
        k = tl.load(k_ptrs, mask=(n[None, :] < keys) & (d[:, None] < HEAD_DIM), other=0)
    else:
        k = tl.load(k_ptrs)
    scores = tl.dot(q, k, out_dtype=tl.int32).to(tl.float32)
    if KEY_TOKEN:
        if TAIL:
            key_scale = tl.load(ks_base + n, mask=n < keys, other=0.0)
        else:
            key_scale = tl.load(ks_base + n)
        scores *= key_scale[None, :]
    if TAIL:
        scores = tl.where(n[None, :] < keys, scores, float("-inf"))
    above = tl.maximum(highest, tl.max(scores, 1))
    weights = tl.exp2(scores * row[:, None] - (above * row - OFFSET)[:, None])
    release = tl.exp2((highest - above) * row)
    total = total * release + tl.sum(weights, 1)
    out *= release[:, None]
    if PRODUCT == "int8":
        # V lies (channels, keys): the int8 tensor core reads both operands along the keys. It is padded to whole tiles.
        v_ptrs = v_base + c[None, :] * padded + n[:, None]
        if BLOCK_DV != VALUE_DIM:
            v = tl.load(v_ptrs, mask=c[None, :] < VALUE_DIM, other=0)
        else:
            v = tl.load(v_ptrs)
        p = (weights + ROUND).to(tl.int32, bitcast=True).to(tl.int8)
        out += tl.dot(p, v, out_dtype=tl.int32).to(tl.float32)
    else:
        v_ptrs = v_base + n[:, None] * VALUE_DIM + c[None, :]
        if TAIL or BLOCK_DV != VALUE_DIM:
            v = tl.load(v_ptrs, mask=(n[:, None] < keys) & (c[None, :] < VALUE_DIM), other=0)
        else:
            v = tl.load(v_ptrs)
        if PRODUCT == "float16":
            p = weights.to(tl.float16)
        else:
            p = _to_bfloat16(weights, GUARD)
            v = _to_bfloat16(v.to(tl.float32), GUARD)  # exact: an int8 has at most eight bits
        out = tl.dot(p, v, out)
    return out, total, above


@triton.jit
def float_softmax_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, qs_ptr, ks_ptr, vs_ptr, os_ptr, queries, keys, whole, padded, blocks, log2_scale,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TAIL_N: tl.constexpr, PRODUCT: tl.constexpr, TOKEN: tl.constexpr,
    VALUE_SCALE: tl.constexpr, INT8_OUT: tl.constexpr, OFFSET: tl.constexpr, GUARD: tl.constexpr,
):  # fmt: skip
    """Compute one block of queries of one head.

    Q, K: int8 (heads in all, tokens, HEAD_DIM), with float32 scales a token if TOKEN, else one each. V: for PRODUCT
    "int8" int8 (heads, VALUE_DIM, padded), for "float16" float16 and for "bfloat16" int8 (heads, keys, VALUE_DIM); its
    scale is one a "head", one a "tensor" or "none". O: (heads, queries, VALUE_DIM), float, or int8 at the scale of os_ptr.
    """
    program = tl.program_id(0)
    head = (program // blocks).to(tl.int64)
    m = (program % blocks) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    c = tl.arange(0, BLOCK_DV)
    inside = m < queries
    q_ptrs = q_ptr + head * queries * HEAD_DIM + m[:, None] * HEAD_DIM + d[None, :]
    if BLOCK_D != HEAD_DIM:
        q = tl.load(q_ptrs, mask=inside[:, None] & (d[None, :] < HEAD_DIM), other=0)
    else:
        q = tl.load(q_ptrs, mask=inside[:, None], other=0)
    if TOKEN:
        row = tl.load(qs_ptr + head * queries + m, mask=inside, other=1.0) * log2_scale
    else:
        row = tl.zeros((BLOCK_M,), tl.float32) + tl.load(qs_ptr) * tl.load(ks_ptr) * log2_scale
    k_base = k_ptr + head * keys * HEAD_DIM
    ks_base = ks_ptr + head * keys
    if PRODUCT == "int8":
        v_base = v_ptr + head * VALUE_DIM * padded
    else:
        v_base = v_ptr + head * keys * VALUE_DIM
    out = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    highest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    for start in range(0, whole, BLOCK_N):
        start = tl.multiple_of(start, BLOCK_N)
        out, total, highest = _tile(
            out, total, highest, q, row, k_base, v_base, ks_base, start, keys, padded,
            HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV, BLOCK_N, PRODUCT, TOKEN, False, OFFSET, GUARD,
        )  # fmt: skip
    if TAIL_N > 0:  # the keys after the last whole tile
        out, total, highest = _tile(
            out, total, highest, q, row, k_base, v_base, ks_base, whole, keys, padded,
            HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV, TAIL_N, PRODUCT, TOKEN, True, OFFSET, GUARD,
        )  # fmt: skip
    factor = 1.0 / total
    if VALUE_SCALE == "head":
        factor *= tl.load(vs_ptr + head)
    elif VALUE_SCALE == "tensor":
        factor *= tl.load(vs_ptr)
    if INT8_OUT:
        factor *= 1.0 / tl.load(os_ptr)
    out *= factor[:, None]
    if INT8_OUT:
        out = tl.minimum(tl.maximum(out, -128.0), 127.0)
        stored = (out + ROUND).to(tl.int32, bitcast=True).to(tl.int8)
    else:
        stored = out.to(o_ptr.dtype.element_ty)
    o_ptrs = o_ptr + head * queries * VALUE_DIM + m[:, None] * VALUE_DIM + c[None, :]
    if BLOCK_DV != VALUE_DIM:
        tl.store(o_ptrs, stored, mask=inside[:, None] & (c[None, :] < VALUE_DIM))
    else:
        tl.store(o_ptrs, stored, mask=inside[:, None])


def choose_tiles(queries: int, keys: int, head_dim: int) -> Tiles:
    """Return tiles by shape, from the registers that the compiled kernels take on sm_80 and sm_90 (none spills)."""
    if queries <= 32:
        return Tiles(16 if queries <= 16 else 32, BLOCK, 4, 2)
    if keys <= 256 or head_dim > 64:
        return Tiles(64, BLOCK, 4, 2 if keys <= 256 else 3)
    return Tiles(128, BLOCK, 8, 3)


def tiles_for(product: str, query: torch.Tensor, key: torch.Tensor, value_dim: int) -> Tiles:
    """Return the tiles of a call: the table's if it has this card and shape, else the rule's.

    Args:
        product: see :func:`float_softmax_call`.
        query, key: (batch, heads, tokens, head_dim).
        value_dim: channels of the output.
    """
    batch, heads, queries, head_dim = query.shape
    shape = BaselineShape(batch * heads, queries, key.shape[2], head_dim, value_dim)
    found = tuned_tiles("float_softmax", product, shape, query.device)
    return Tiles(*found) if found else choose_tiles(queries, key.shape[2], max(head_dim, value_dim))


def pack_value(values: torch.Tensor, block_n: int) -> torch.Tensor:
    """Return int8 V (batch, heads, keys, channels) as (batch, heads, channels, keys up to a multiple of ``block_n``)."""
    *lead, keys, channels = values.shape
    packed = values.new_empty((*lead, channels, triton.cdiv(keys, block_n) * block_n))  # weights past the end are zero
    packed[..., :keys].copy_(values.mT)
    return packed


def float_softmax_call(
    query: torch.Tensor,
    query_scale: torch.Tensor,
    key: torch.Tensor,
    key_scale: torch.Tensor,
    value: torch.Tensor,
    value_scale: torch.Tensor | None,
    scale: float,
    out: torch.Tensor,
    product: str,
    *,
    output_scale: torch.Tensor | None = None,
    tiles: tuple[int, ...] | None = None,
) -> KernelLaunch:
    """Spell out the launch that fills ``out``.

    Args:
        query, key: int8, contiguous (batch, heads, tokens, head_dim), at most 128 channels.
        query_scale, key_scale: float32, both (batch, heads, tokens, 1) or both of shape ().
        value: for product ``"int8"`` from :func:`pack_value`; for ``"float16"`` float16, for ``"bfloat16"`` int8, contiguous
            (batch, heads, keys, channels).
        value_scale: float32, shape () or (batch, heads, 1, 1); None for a float value.
        scale: factor of the scores, positive.
        out: (batch, heads, queries, channels), contiguous, int8 if and only if ``output_scale`` is given.
        product: type of the second product's operands: ``"int8"``, ``"float16"`` or ``"bfloat16"``.
        output_scale: float32, shape (): the int8 output's; it is rounded to nearest, ties to even.
        tiles: :class:`Tiles`, for tests and tuning; :func:`tiles_for` if None.

    Raises:
        ValueError: an int8 output without a scale, or a float one with it.
    """
    if (out.dtype == torch.int8) != (output_scale is not None):
        raise ValueError(f"output_scale goes with an int8 out, got {out.dtype} and {output_scale}")
    batch, heads, queries, head_dim = query.shape
    keys, value_dim = key.shape[2], out.shape[3]
    chosen = Tiles(*tiles) if tiles else tiles_for(product, query, key, value_dim)
    blocks = triton.cdiv(queries, chosen.block_m)
    rest = keys % chosen.block_n
    arguments: dict[str, Any] = {
        "q_ptr": query,
        "k_ptr": key,
        "v_ptr": value,
        "o_ptr": out,
        "qs_ptr": query_scale,
        "ks_ptr": key_scale,
        "vs_ptr": query_scale if value_scale is None else value_scale,
        "os_ptr": query_scale if output_scale is None else output_scale,
        "queries": queries,
        "keys": keys,
        "whole": keys - rest,
        "padded": value.shape[3] if product == "int8" else 0,
        "blocks": blocks,
        "log2_scale": scale * math.log2(math.e),
        "HEAD_DIM": head_dim,
        "VALUE_DIM": value_dim,
        "BLOCK_D": max(32, triton.next_power_of_2(head_dim)),
        "BLOCK_DV": max(16, triton.next_power_of_2(value_dim)),
        "BLOCK_M": chosen.block_m,
        "BLOCK_N": chosen.block_n,
        "TAIL_N": max(32, triton.next_power_of_2(rest)) if rest else 0,
        "PRODUCT": product,
        "TOKEN": query_scale.dim() == 4,
        "VALUE_SCALE": "none" if value_scale is None else "head" if value_scale.dim() == 4 else "tensor",
        "INT8_OUT": output_scale is not None,
        "OFFSET": math.log2(127.0) if product == "int8" else 0.0,
        "GUARD": query.device.type == "cpu",
    }
    options = {"num_warps": chosen.warps, "num_stages": chosen.stages}
    scores = ScoreTile(chosen.block_m, chosen.block_n, whole=False)
    return KernelLaunch(float_softmax_kernel, (batch * heads * blocks, 1, 1), arguments, options, "baseline", scores)
