"""Quantisation of query, key and value for long rows, or packed sequences, packing V for the tensor core (Triton).

Equations 1 and 2 (step 1 of ``docs/algorithm.md``), for a scale per query token, per key head and per value channel. In
order:

1. :func:`long_range_kernel`: minima and maxima of the channels of K and V, per chunk of tokens;
2. :func:`long_quantize_kernel`: every program combines the ranges of its head, then writes a chunk of K, V or Q as int8.

A program takes tiles of BLOCK_N tokens by BLOCK_D channels in registers and loads the next tile before it stores the
last. V is written as (channels, keys), with the sums of its channels, as
:func:`.triton.attention_streaming.pack_value_kernel` does: four neighbouring keys are interleaved in registers, so that
they are stored as one word. One launch for all three tensors saves launches; the ranges cannot be part of it, because a
scale needs those of all chunks. Where a program has a whole head of a packed sequence, it finds them itself.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ...specification.attention_call import Lengths
from ...specification.recipe import Recipe
from ..common.quantize_ops import (
    amplitude_to_scale,
    chunk_tokens,
    higher,
    highest,
    inverse_scale,
    key_magnitudes,
    lower,
    lowest,
    round_centered,
    round_to_int8,
    value_magnitudes,
    value_scale,
    zero_point,
)
from ..common.tile_ops import interleave, inverse_key_order, packed_sequence, packed_start, row_of_channel
from ..launch_arguments import broadcast_strides, needs_wide_offsets
from ..launch_recorder import group, launch_kernel
from ..tiles import kernel_width, packed_width

_MOST_BATCH = 65535 // 3
_PROGRAMS = 256
"""Programs that find ranges, at least: fewer would leave SMs idle, more would leave more ranges to read."""
_CHUNK = 256
"""Tokens that a program quantises, at least."""
_SHORT = 1024
"""Most tokens of a head whose ranges one program finds."""


@dataclasses.dataclass(frozen=True)
class Packing:
    """Where tokens are: constants of both kernels.

    Attributes:
        VARLEN: in packed sequences.
        CAUSAL: keys that no query sees are left out.
        PLACES: those of keys and values at places (:mod:`.triton.unseen_tokens`).
        UNIT: strides and channels are multiples of so many.
        WIDE_OFFSETS: tensors reach further than 32-bit offsets.
    """

    VARLEN: bool
    CAUSAL: bool
    PLACES: bool
    UNIT: int
    WIDE_OFFSETS: bool


@dataclasses.dataclass(frozen=True)
class Form:
    """What is written: constants of :func:`long_quantize_kernel`.

    Attributes:
        WIDTH: channels of V, padded.
        KINDS: tensors, 2 or 3.
        RANGES: the most ranges of a head, or 0.
        CENTER, CENTER_VALUE: keys, values are centred.
        PERMUTED: V is in the orders of :func:`.triton.attention_streaming.pack_value_kernel`.
    """

    WIDTH: int
    KINDS: int
    RANGES: int
    CENTER: bool
    CENTER_VALUE: bool
    PERMUTED: bool


@triton.jit
def _load(base, stride_n, stride_d, place, n, last, d, channels, PLACES: tl.constexpr):
    """Tokens ``n`` of a head, (tokens, channels) as stored; past the ``last`` one it is repeated.

    With PLACES token n is taken from where ``place`` says (:mod:`.triton.unseen_tokens`).
    """
    n = tl.minimum(n, last)
    if PLACES:
        n = tl.load(place + n)
    ptrs = base + n[:, None] * stride_n + d[None, :] * stride_d
    return tl.load(ptrs, mask=d[None, :] < channels, other=0.0)


@triton.jit
def _place(ptr, z, h, stride_z, stride_h, stride_n, UNIT: tl.constexpr, WIDE_OFFSETS: tl.constexpr):
    """(pointer to a head's tokens, their stride), as multiples of UNIT elements, so that the compiler sees the alignment."""
    if WIDE_OFFSETS:
        h, stride_n = tl.cast(h, tl.int64), tl.cast(stride_n, tl.int64)
    return ptr + z * (stride_z // UNIT * UNIT) + h * (stride_h // UNIT * UNIT), stride_n // UNIT * UNIT


@triton.jit
def _head_places(ptr, z, h, stride_z, stride_h, period):
    """Where the places of a head's tokens begin; they repeat with the mask."""
    return ptr + z % period * stride_z + h * stride_h


@triton.jit
def _seen_keys(cu_q_ptr, cu_k_ptr, z, CAUSAL: tl.constexpr):
    """(first key, number of keys that a query sees) of packed sequence ``z``: :mod:`qflash.unseen_tokens`."""
    first, keys = packed_sequence(cu_k_ptr, z)
    if CAUSAL:
        _, queries = packed_sequence(cu_q_ptr, z)
        keys = tl.minimum(keys, queries)
    return first, keys


@triton.jit
def _range(
    base, stride_n, stride_d, place, begin, end, channels, PLACES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    GUARD: tl.constexpr,
):  # fmt: skip
    """(minima, maxima) of a head's channels over tokens ``begin`` to ``end``, at least one: two (BLOCK_D,) float32.

    A channel with a NaN has NaN there, or infinity in the interpreter.
    """
    n, d = begin + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    low = _load(base, stride_n, stride_d, place, n, end - 1, d, channels, PLACES)
    if GUARD:
        low = low.to(tl.float32)
    high = low
    for start in range(BLOCK_N, end - begin, BLOCK_N):
        x = _load(base, stride_n, stride_d, place, start + n, end - 1, d, channels, PLACES)
        low, high = lower(low, x, GUARD), higher(high, x, GUARD)
    return lowest(low.to(tl.float32), 0, GUARD), highest(high.to(tl.float32), 0, GUARD)


# This and the next are compiled once for all lengths: Triton would otherwise specialise them on multiples of 16.
@triton.jit(do_not_specialize=("tokens",))
def long_range_kernel(
    k_ptr, v_ptr, low_ptr, high_ptr, cu_q_ptr, cu_k_ptr, place_ptr, strides, tokens, channels, value_channels, chunk,
    PACKING: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, GUARD: tl.constexpr,
):  # fmt: skip
    """Write the minimum and maximum of every channel over a chunk of a head's keys (program z even) or values (z odd).

    With VARLEN z is a packed sequence, as in :func:`long_quantize_kernel`. PACKING is a :class:`Packing`.
    """
    part, h, z = tl.program_id(0), tl.program_id(1), (tl.program_id(2) // 2).to(tl.int64)
    is_value = tl.program_id(2) % 2
    begin = part * chunk
    base, stride_n = _place(
        k_ptr, z, h, strides.k_stride_z, strides.k_stride_h, strides.k_stride_n, PACKING.UNIT, PACKING.WIDE_OFFSETS
    )
    stride_d = strides.k_stride_d
    if is_value == 1:
        base, stride_n = _place(
            v_ptr, z, h, strides.v_stride_z, strides.v_stride_h, strides.v_stride_n, PACKING.UNIT, PACKING.WIDE_OFFSETS
        )
        stride_d = strides.v_stride_d
        channels = value_channels
    if PACKING.VARLEN:
        first, tokens = _seen_keys(cu_q_ptr, cu_k_ptr, z, PACKING.CAUSAL)
        base += first * stride_n
    channels = channels // PACKING.UNIT * PACKING.UNIT
    # of a chunk past the end the last token's range is written, which changes none
    if tokens > 0:
        places = _head_places(place_ptr, z, h, strides.place_stride_z, strides.place_stride_h, strides.period)
        low, high = _range(
            base, stride_n, stride_d, places, begin, tl.minimum(begin + chunk, tokens), channels, PACKING.PLACES, BLOCK_N,
            BLOCK_D, GUARD,
        )  # fmt: skip
        out = (((2 * z + is_value) * tl.num_programs(1) + h) * tl.num_programs(0) + part) * BLOCK_D + tl.arange(0, BLOCK_D)
        tl.store(low_ptr + out, low)
        tl.store(high_ptr + out, high)


@triton.jit
def _whole_range(
    low_ptr, high_ptr, row, ranges, base, stride_n, stride_d, tokens, channels, RANGES: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, GUARD: tl.constexpr,
):  # fmt: skip
    """(minimum, maximum) of a head's channels, two (BLOCK_D,) float32, from those of its chunks; if RANGES is 0, its tokens."""
    if RANGES == 0:
        # of packed sequences, which have no mask
        low, high = _range(base, stride_n, stride_d, 0, 0, tokens, channels, False, BLOCK_N, BLOCK_D, GUARD)
    else:
        parts = tl.arange(0, RANGES)[:, None]
        at = (row * ranges + parts) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
        low = lowest(tl.load(low_ptr + at, mask=parts < ranges, other=float("inf")), 0, GUARD)
        high = highest(tl.load(high_ptr + at, mask=parts < ranges, other=float("-inf")), 0, GUARD)
    return low, high


@triton.jit
def _queries(
    base, stride_n, stride_d, values, scales, begin, end, channels,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, GUARD: tl.constexpr,
):  # fmt: skip
    """Write queries ``begin`` to ``end`` of a head as int8, and a scale per token."""
    d = tl.arange(0, BLOCK_D)
    for start in range(begin, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        inside = (n[:, None] < end) & (d[None, :] < channels)
        x = _load(base, stride_n, stride_d, 0, n, end - 1, d, channels, False).to(tl.float32)
        scale = amplitude_to_scale(highest(tl.abs(x), 1, GUARD))[:, None]
        tl.store(scales + n[:, None], scale, mask=n[:, None] < end)
        x = round_to_int8(x, inverse_scale(scale, GUARD), GUARD)
        tl.store(values + n[:, None] * channels + d[None, :], x, mask=inside)


@triton.jit
def _key_scale(low, high, d, channels, CENTER: tl.constexpr):
    """(midrange per channel (BLOCK_D,), scale of the head (1, 1)), from the ranges of its channels."""
    middle, amplitude = key_magnitudes(low, high, d < channels, CENTER)
    return middle, tl.zeros((1, 1), tl.float32) + amplitude_to_scale(tl.zeros((1,), tl.float32) + tl.max(amplitude, 0))[None, :]


@triton.jit
def _store_keys(
    values, stride_n, y, middle, inverse, n, end, d, channels, CENTER: tl.constexpr, GUARD: tl.constexpr
):  # fmt: skip
    """Store a tile of keys as int8, less the channels' midranges if CENTER."""
    if CENTER:
        y = y - middle[None, :]
    inside = (n[:, None] < end) & (d[None, :] < channels)
    tl.store(values + n[:, None] * stride_n + d[None, :], round_to_int8(y, inverse, GUARD), mask=inside)


@triton.jit
def _keys(
    base, stride_n, stride_d, place, values, values_stride_n, scale_ptr, low_ptr, high_ptr, row, ranges, begin, end, tokens,
    channels, PLACES: tl.constexpr, RANGES: tl.constexpr, CENTER: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    GUARD: tl.constexpr,
):  # fmt: skip
    """Write keys ``begin`` to ``end`` of a head as int8; the first chunk's program also writes the scale."""
    d = tl.arange(0, BLOCK_D)
    n = begin + tl.arange(0, BLOCK_N)
    # prefetch: this load runs while the ranges are combined, later ones while the tile before is stored
    x = _load(base, stride_n, stride_d, place, n, end - 1, d, channels, PLACES)
    low, high = _whole_range(
        low_ptr, high_ptr, row, ranges, base, stride_n, stride_d, tokens, channels, RANGES, BLOCK_N, BLOCK_D, GUARD
    )
    middle, scale = _key_scale(low, high, d, channels, CENTER)
    tl.store(scale_ptr + tl.zeros((1, 1), tl.int32), scale, mask=begin + tl.zeros((1, 1), tl.int32) == 0)
    inverse = inverse_scale(scale, GUARD)
    for _ in range(begin, end, BLOCK_N):
        y = x.to(tl.float32)
        x = _load(base, stride_n, stride_d, place, n + BLOCK_N, end - 1, d, channels, PLACES)
        _store_keys(values, values_stride_n, y, middle, inverse, n, end, d, channels, CENTER, GUARD)
        n += BLOCK_N


@triton.jit
def _load_placed(base, stride_n, stride_d, place, n, tokens, d, channels):
    """Rows ``n`` from where ``place`` says, zero past the last token."""
    inside = n < tokens
    n = tl.load(place + n, mask=inside, other=0)
    ptrs = base + n[:, None] * stride_n + d[None, :] * stride_d
    return tl.load(ptrs, mask=inside[:, None] & (d[None, :] < channels), other=0.0)


@triton.jit
def _load_values(
    base, stride_n, stride_d, place, n, tokens, d, channels, PLACES: tl.constexpr, FAR: tl.constexpr
):  # fmt: skip
    """Four tiles of rows, zero past the last token: ``n``, ``n + 1``, ``n + FAR`` and ``n + FAR + 1``."""
    if PLACES:
        v0 = _load_placed(base, stride_n, stride_d, place, n, tokens, d, channels)
        v1 = _load_placed(base, stride_n, stride_d, place, n + 1, tokens, d, channels)
        v2 = _load_placed(base, stride_n, stride_d, place, n + FAR, tokens, d, channels)
        v3 = _load_placed(base, stride_n, stride_d, place, n + FAR + 1, tokens, d, channels)
    else:
        ptrs, inside = base + n[:, None] * stride_n + d[None, :] * stride_d, d[None, :] < channels
        v0 = tl.load(ptrs, mask=inside & (n[:, None] < tokens), other=0.0)
        v1 = tl.load(ptrs + stride_n, mask=inside & (n[:, None] + 1 < tokens), other=0.0)
        v2 = tl.load(ptrs + FAR * stride_n, mask=inside & (n[:, None] + FAR < tokens), other=0.0)
        v3 = tl.load(ptrs + (FAR + 1) * stride_n, mask=inside & (n[:, None] + FAR + 1 < tokens), other=0.0)
    return v0, v1, v2, v3


@triton.jit
def _int8_values(x, n, tokens, inverse, zero, CENTER: tl.constexpr, GUARD: tl.constexpr):
    """Rows ``n`` of values as int8, 0 past the last token."""
    if CENTER:
        return tl.where((n < tokens)[:, None], round_centered(x.to(tl.float32), inverse, zero, GUARD), 0)
    return round_to_int8(x.to(tl.float32), inverse, GUARD)


@triton.jit
def _four_int8(tiles, n, tokens, inverse, zero, FAR: tl.constexpr, CENTER: tl.constexpr, GUARD: tl.constexpr):
    """Four tiles of values of :func:`_load_values` as int8; with CENTER less their zero points."""
    i0 = _int8_values(tiles[0], n, tokens, inverse, zero, CENTER, GUARD)
    i1 = _int8_values(tiles[1], n + 1, tokens, inverse, zero, CENTER, GUARD)
    i2 = _int8_values(tiles[2], n + FAR, tokens, inverse, zero, CENTER, GUARD)
    i3 = _int8_values(tiles[3], n + FAR + 1, tokens, inverse, zero, CENTER, GUARD)
    return i0, i1, i2, i3


@triton.jit
def _store_values(packed, four, rows, start, padded, row_stride, d, width, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """Store four tiles of values, interleaved, from key ``start`` on; return the elementwise sum of the four, int32."""
    i0, i1, i2, i3 = four
    column = start + tl.arange(0, BLOCK_N)
    inside = (d[None, :] < width) & (column[:, None] < padded)
    tl.store(packed + rows[None, :] * row_stride + column[:, None], interleave(i0, i1, i2, i3, BLOCK_N, BLOCK_D), mask=inside)
    return (i0.to(tl.int32) + i1.to(tl.int32)) + (i2.to(tl.int32) + i3.to(tl.int32))


@triton.jit
def _values(
    base, stride_n, stride_d, place, packed, row_stride, scale_ptr, offset_ptr, sums_ptr, low_ptr, high_ptr, row, ranges, begin,
    end, tokens, padded, channels, PLACES: tl.constexpr, FORM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    GUARD: tl.constexpr,
):  # fmt: skip
    """Write values ``begin`` to ``end`` of a head, with zeros up to WIDTH and ``padded``, their scales and sums."""
    d = tl.arange(0, BLOCK_D)
    # four tiles are interleaved in registers, so that four neighbouring keys of a channel are stored as one word
    n = begin + 4 * tl.arange(0, BLOCK_N // 4)
    FAR: tl.constexpr = 8 if FORM.PERMUTED else 2
    if FORM.PERMUTED:
        n = inverse_key_order(n)
    v0, v1, v2, v3 = _load_values(base, stride_n, stride_d, place, n, tokens, d, channels, PLACES, FAR)
    low, high = _whole_range(
        low_ptr, high_ptr, row, ranges, base, stride_n, stride_d, tokens, channels, FORM.RANGES, BLOCK_N, BLOCK_D, GUARD
    )
    middle, most = value_magnitudes(low, high, d < channels, FORM.CENTER_VALUE)
    middle, scale = middle[None, :], value_scale(most, FORM.CENTER_VALUE)[None, :]
    first = (d[None, :] < channels) & (begin + tl.zeros((1, 1), tl.int32) == 0)
    tl.store(scale_ptr + d[None, :], scale, mask=first)
    inverse = inverse_scale(scale, GUARD)
    zero = 0.0
    if FORM.CENTER_VALUE:
        zero = zero_point(middle, inverse, GUARD)
        tl.store(offset_ptr + d[None, :], zero * scale, mask=first)
    sums = tl.zeros((BLOCK_N // 4, BLOCK_D), tl.int32)
    rows = row_of_channel(d, FORM.WIDTH) if FORM.PERMUTED else d
    for start in range(begin, end, BLOCK_N):
        four = _four_int8((v0, v1, v2, v3), n, tokens, inverse, zero, FAR, FORM.CENTER_VALUE, GUARD)
        n += BLOCK_N
        v0, v1, v2, v3 = _load_values(
            base, stride_n, stride_d, place, n, tl.minimum(tokens, end), d, channels, PLACES, FAR
        )  # fmt: skip
        sums += _store_values(packed, four, rows, start, padded, row_stride, d, FORM.WIDTH, BLOCK_N, BLOCK_D)
    tl.store(sums_ptr + d, tl.sum(sums, 0), mask=d < FORM.WIDTH)


@triton.jit(do_not_specialize=("queries", "tokens"))
def long_quantize_kernel(
    q_ptr, k_ptr, v_ptr, low_ptr, high_ptr, query_ptr, query_scale_ptr, key_ptr, key_scale_ptr, packed_ptr, value_scale_ptr,
    value_offset_ptr, sums_ptr, cu_q_ptr, cu_k_ptr, place_ptr, strides, queries, tokens, sizes, PACKING: tl.constexpr,
    FORM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, GUARD: tl.constexpr,
):  # fmt: skip
    """Quantise a chunk of a head's keys (a scale per head), values (a scale per channel) or queries (a scale per token).

    Program z modulo KINDS (2 or 3), counted from the last program, tells which. Values are written as the tensor core
    reads them, (WIDTH channels, ``padded`` keys, zeros past the real ones), with the channel sums of each chunk;
    with PERMUTED in the orders of :func:`.triton.attention_streaming.pack_value_kernel`. If RANGES is 0 a program finds the
    ranges of its head itself.

    With VARLEN z is a sequence of packed tensors, of which cumulative lengths are at ``cu_q_ptr`` and ``cu_k_ptr``: scales and
    sums are those of sequences, and all else is that of one batch element with ``queries``, ``tokens`` and ``padded`` in all.
    Its values begin at :func:`.common.tile_ops.packed_start`. With CAUSAL keys that no query sees are left out.

    PACKING is a :class:`Packing`, FORM a :class:`Form`.
    """
    # from the last chunk to the first: the last ones are still in the cache from the search for ranges
    part, h = tl.num_programs(0) - 1 - tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1)
    last = tl.num_programs(2) - 1 - tl.program_id(2)
    z, kind = (last // FORM.KINDS).to(tl.int64), last % FORM.KINDS
    channels = sizes.channels // PACKING.UNIT * PACKING.UNIT
    value_channels = sizes.value_channels // PACKING.UNIT * PACKING.UNIT
    padded, chunk = sizes.padded, sizes.chunk
    begin = part * chunk
    if kind == 2:
        base, stride_n = _place(
            q_ptr, z, h, strides.q_stride_z, strides.q_stride_h, strides.q_stride_n, PACKING.UNIT, PACKING.WIDE_OFFSETS
        )
        place = (z * tl.num_programs(1) + h) * queries
        if PACKING.VARLEN:
            first, count = packed_sequence(cu_q_ptr, z)
            base += first * stride_n
            # a head has all sequences' queries
            place = h * tl.cast(queries, tl.int64) + first
            queries = count
        _queries(
            base, stride_n, strides.q_stride_d, query_ptr + place * channels,
            query_scale_ptr + place, begin, tl.minimum(queries, begin + chunk), channels, BLOCK_N, BLOCK_D, GUARD,
        )  # fmt: skip
    elif h < sizes.key_heads and part < sizes.parts:
        head = z * sizes.key_heads + h
        row = (2 * z + kind) * sizes.key_heads + h
        place, packed, row_stride = head * tokens, packed_ptr + head * FORM.WIDTH * padded, padded
        places = _head_places(place_ptr, z, h, strides.place_stride_z, strides.place_stride_h, strides.period)
        first, inside, empty = 0, True, False
        if PACKING.VARLEN:
            first, count = _seen_keys(cu_q_ptr, cu_k_ptr, z, PACKING.CAUSAL)
            inside, empty = begin < count, count == 0
            place = h * tl.cast(tokens, tl.int64) + first
            packed = packed_ptr + h * tl.cast(padded, tl.int64) * FORM.WIDTH + packed_start(first, z)
            tokens, padded = count, tl.cdiv(count, 128) * 128
        if kind == 0:
            base, stride_n = _place(
                k_ptr, z, h, strides.k_stride_z, strides.k_stride_h, strides.k_stride_n, PACKING.UNIT, PACKING.WIDE_OFFSETS
            )
            if inside:
                _keys(
                    base + first * stride_n, stride_n, strides.k_stride_d, places, key_ptr + place * sizes.key_stride_n,
                    sizes.key_stride_n, key_scale_ptr + head, low_ptr, high_ptr, row, sizes.ranges, begin,
                    tl.minimum(tokens, begin + chunk), tokens, channels, PACKING.PLACES, FORM.RANGES, FORM.CENTER, BLOCK_N,
                    BLOCK_D, GUARD,
                )  # fmt: skip
        else:
            base, stride_n = _place(
                v_ptr, z, h, strides.v_stride_z, strides.v_stride_h, strides.v_stride_n, PACKING.UNIT, PACKING.WIDE_OFFSETS
            )
            scales, offsets = value_scale_ptr + head * value_channels, value_offset_ptr + head * value_channels
            sums = sums_ptr + (head * sizes.parts + part) * FORM.WIDTH
            if empty:
                d = tl.arange(0, BLOCK_D)
                tl.store(scales + d, 1.0, mask=d < value_channels)
                tl.store(sums + d, 0, mask=d < FORM.WIDTH)
                if FORM.CENTER_VALUE:
                    tl.store(offsets + d, 0.0, mask=d < value_channels)
            else:
                _values(
                    base + first * stride_n, stride_n, strides.v_stride_d, places, packed, row_stride, scales, offsets, sums,
                    low_ptr, high_ptr, row, sizes.ranges, begin, tl.minimum(padded, begin + chunk), tokens, padded,
                    value_channels, PACKING.PLACES, FORM, BLOCK_N, BLOCK_D, GUARD,
                )  # fmt: skip


def quantizes_long(recipe: Recipe, batch: int) -> bool:
    """Tell whether :func:`launch_quantize_long` finds scales of the granularity that the recipe asks for."""
    granularities = recipe.query_granularity, recipe.key_granularity, recipe.value_granularity
    return (
        granularities == ("token", "head", "channel")
        and not recipe.balance
        and not recipe.rotate
        and recipe.normalization == "two_pass"
        and batch <= _MOST_BATCH
    )


class LongQuantized(NamedTuple):
    """What :func:`launch_quantize_long` returns: int8 tensors (value contiguous along tokens), scales, channel sums.

    The sums are per chunk of tokens, (batch, heads, chunks, channels). Query is None if none was given, the offset if the
    values are not centred.
    """

    query: torch.Tensor | None
    query_scale: torch.Tensor | None
    key: torch.Tensor
    key_scale: torch.Tensor
    value: torch.Tensor
    value_scale: torch.Tensor
    value_offset: torch.Tensor | None
    value_sums: torch.Tensor


def new_quantized(
    key: torch.Tensor, value: torch.Tensor, recipe: Recipe, fragment_order: bool, padded: int, parts: int,
    lengths: Lengths | None = None,
) -> tuple[torch.Tensor, LongQuantized]:  # fmt: skip
    """Return memory for quantised keys and values: packed V, (batch, heads, channels, ``padded`` keys), and all as results.

    Args:
        key, value, recipe, fragment_order, lengths: of :func:`launch_quantize_long`.
        padded: keys of packed V.
        parts: of the sums of V's channels.
    """
    batch, heads, keys, channels = key.shape
    value_channels = value.shape[3]
    # the next kernel copies as many channels as it computes with, fastest where no row begins inside a line of memory
    row = kernel_width(channels) if fragment_order else channels
    width = packed_width(value_channels) if fragment_order else value_channels
    sequences, seen = (batch, keys) if lengths is None else (lengths.sequences, padded)

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=key.device)

    packed = new(batch, heads, width, padded, dtype=torch.int8)
    found = LongQuantized(
        None,
        None,
        new(batch, heads, keys, row, dtype=torch.int8)[..., :channels],
        new(sequences, heads, 1, 1),
        packed[:, :, :value_channels, :seen].mT,
        new(sequences, heads, 1, value_channels),
        new(sequences, heads, 1, value_channels) if recipe.smooth_value else None,
        new(sequences, heads, parts, width, dtype=torch.int32),
    )
    return packed, found


def finds_ranges(tokens: int, heads: int) -> bool:
    """Tell whether programs find the ranges of whole heads of packed sequences: enough heads, that are short."""
    return tokens <= _SHORT and heads >= _PROGRAMS


def quantize_tile(block_d: int, together: bool) -> tuple[int, int]:
    """Return (tokens a tile, warps) of :func:`long_quantize_kernel`, measured on an H100; ``together``: it finds ranges, too.

    Wider tiles take more registers than there are. With four warps Triton 3.6 miscompiles an address (one head of at most 32
    channels).
    """
    if together and block_d == 64:
        return 128, 4
    return max(32, (4096 if together else 2048) // block_d), 2


def _range_chunk(tokens: int, heads: int) -> int:
    """Return how many tokens a program of :func:`long_range_kernel` reads."""
    chunk = 1024
    while chunk > 128 and 2 * heads * triton.cdiv(tokens, chunk) < _PROGRAMS:
        chunk //= 2
    return chunk_tokens(tokens, chunk)


def launch_quantize_long(
    query: torch.Tensor | None, key: torch.Tensor, value: torch.Tensor, recipe: Recipe, fragment_order: bool = False,
    lengths: Lengths | None = None, is_causal: bool = False, places: torch.Tensor | None = None,
) -> LongQuantized:  # fmt: skip
    """Quantise query, key and value of a call with long rows in two launches: ranges, then values.

    There is a scale per token for query, per head for key and per channel for value.

    Args:
        query: float (batch, heads, tokens, channels), not empty; None if it needs no quantising here.
        key, value: the same, on the same device.
        recipe: whether to subtract the midrange of every key channel first (``smooth_key``), and to give every value channel a
            zero point (``smooth_value``).
        fragment_order: write V in the orders that :mod:`.sm90.attention_streaming` takes, see
            :func:`.triton.attention_streaming.pack_value_kernel`; then rows of keys are padded to its width.
        lengths: of packed sequences, all in one batch element. Scales and sums then are those of sequences, and values begin at
            :func:`.common.tile_ops.packed_start`. Many short sequences are one launch (:func:`finds_ranges`).
        is_causal: leave out the keys of a sequence past its last query.
        places: from where tokens of key and value are taken: :attr:`qflash.specification.attention_call.AttentionCall.places`.
    """
    _, key_heads, total, channels = key.shape
    value_channels = value.shape[3]
    like = key if query is None else query
    heads, all_queries = like.shape[1:3]
    if lengths is None:
        batch, tokens, queries, padded = key.shape[0], total, all_queries, triton.cdiv(total, 128) * 128
        cumulative = (key, key)  # not used; any tensors will do
    else:
        batch, tokens, queries = lengths.sequences, lengths.most_keys, lengths.most_queries
        padded = (triton.cdiv(total, 128) + batch) * 128
        cumulative = (lengths.queries, lengths.keys)
    block_d, guard = triton.next_power_of_2(max(channels, value_channels)), key.device.type == "cpu"
    together = lengths is not None and finds_ranges(tokens, batch * key_heads)
    chunk = chunk_tokens(max(tokens, queries), max(_CHUNK, triton.next_power_of_2(tokens)) if together else _CHUNK)
    parts = max(1, triton.cdiv(tokens, chunk))

    # Triton specialises on multiples of 16 only; UNIT tells the kernel about multiples of 8
    numbers = [channels, value_channels, *(x.stride(dim) for x in (like, key, value) for dim in range(3))]
    wide = needs_wide_offsets(like, key, value)
    unit = 8 if channels % 16 == 8 and all(number % 8 == 0 for number in numbers) else 1

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return an empty tensor on the device of the keys."""
        return torch.empty(shape, dtype=dtype, device=key.device)

    def strides(**tensors: torch.Tensor) -> Any:
        """Return strides; sequences have the same memory as the one batch element that they make up."""
        found = {
            f"{name}_stride_{axis}": 0 if axis == "z" and lengths is not None else stride
            for name, x in tensors.items()
            for axis, stride in zip("zhnd", x.stride(), strict=True)
        }
        return group(**place_strides, **found)

    packed, found = new_quantized(key, value, recipe, fragment_order, padded, parts, lengths)
    if query is not None:
        scales = new(key.shape[0], heads, all_queries, 1)
        found = found._replace(query=new(*query.shape, dtype=torch.int8), query_scale=scales)
    packs = {"PACKING": Packing(lengths is not None, is_causal, places is not None, unit, wide), "GUARD": guard}
    # without places the pointer is not used; any tensor will do
    placed, *of_places = (key, 0, 0, 1) if places is None else (places, *broadcast_strides(places, (0, 1)), places.shape[0])
    place_strides = dict(zip(("place_stride_z", "place_stride_h", "period"), of_places, strict=True))
    ranges, low, high = 0, key, key
    if not together:
        range_chunk = _range_chunk(tokens, batch * key_heads)
        ranges = max(1, triton.cdiv(tokens, range_chunk))
        low, high = new(batch, 2, key_heads, ranges, block_d), new(batch, 2, key_heads, ranges, block_d)
        block = min(range_chunk, max(16, 8192 // block_d))
        launch_kernel(
            long_range_kernel, (ranges, key_heads, 2 * batch), key, value, low, high, *cumulative, placed,
            strides(k=key, v=value), total, channels, value_channels, range_chunk, BLOCK_N=block, BLOCK_D=block_d,
            num_warps=2 if block == range_chunk else 4, **packs,
        )  # fmt: skip
    kinds = 2 if query is None else 3
    chunks = parts if query is None else max(parts, triton.cdiv(queries, chunk))
    # without queries these pointers are not used; any tensors will do
    query_out = (key, key) if found.query is None or found.query_scale is None else (found.query, found.query_scale)
    # Up to 16 ranges are one kernel: to read empty ones costs less than to compile for each number of them. Triton 3.6 also
    # miscompiles an address for a single range of 32 channels.
    block, warps = quantize_tile(block_d, together)
    sizes = group(
        padded=padded, channels=channels, key_stride_n=found.key.stride(2), value_channels=value_channels, key_heads=key_heads,
        ranges=ranges, parts=parts, chunk=chunk,
    )  # fmt: skip
    most_ranges = 0 if together else max(16, triton.next_power_of_2(ranges))
    form = Form(packed.shape[2], kinds, most_ranges, recipe.smooth_key, recipe.smooth_value, fragment_order)
    launch_kernel(
        long_quantize_kernel, (chunks, heads, kinds * batch), like, key, value, low, high, *query_out, found.key,
        found.key_scale, packed, found.value_scale,
        found.value_scale if found.value_offset is None else found.value_offset, found.value_sums, *cumulative, placed,
        strides(q=like, k=key, v=value), all_queries, total, sizes, FORM=form, BLOCK_N=min(chunk, block), BLOCK_D=block_d,
        enable_fp_fusion=False, num_warps=warps, **packs,
    )  # fmt: skip
    return found
