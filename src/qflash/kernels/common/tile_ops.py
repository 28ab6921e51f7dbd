"""What an attention kernel does with one tile: load, score, exponentiate, accumulate, normalise (Triton device functions).

Equations 3 to 11 and step 11 of Algorithm 1 for a tile of BLOCK_M queries by BLOCK_N keys: steps 2 to 9 of
``docs/algorithm.md``. All of it is inlined into :mod:`.triton.attention_resident` and :mod:`.triton.attention_streaming`;
the Gluon kernels use the parts that do not depend on a layout. In the order of a kernel:

1. per program: :func:`column_scales`, :func:`output_factors`; per row: :func:`row_multiplier`;
2. per tile of keys: :func:`load_key`, :func:`scores` (Q K^T, mask, bias), :func:`probability_words`, :func:`load_value`,
   :func:`accumulate` (P V and the row sums, both on the tensor core);
3. at the end: :func:`finish`.

Scores, probabilities and accumulators stay in registers; the compiler puts operands of products into shared memory where
the tensor core reads them there. The order of the keys is chosen so that probabilities need not move between threads. With
t = lane % 4, the int8 tensor core gives a lane these parts of a row (a quad of lanes shares rows r and r + 8):

    scores, as accumulator, of 16 columns:     columns 2t, 2t + 1 and 8 + 2t, 8 + 2t + 1
    probabilities, as left operand, 16 bytes:  bytes   4t, 4t + 1, 4t + 2, 4t + 3

If column c of the scores is the key ``key_order(c)``, the four scores of a lane are those of four neighbouring keys, which
are the four bytes that it has to supply:

    column  0  1   2  3   4  5   6  7 |  8  9  10 11  12 13  14 15
    key     0  1   4  5   8  9  12 13 |  2  3   6  7  10 11  14 15
    lane    t = 0  t = 1  t = 2 t = 3 |  t = 0  t = 1  t = 2  t = 3

This changes the order of integer sums only, so no result. Where V is permuted for this (its keys or its channels),
the code calls it fragment order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...specification import fixed_point as fp
from .fixed_point import (
    MAX_FRACTION_BITS,
    column_multiplier,
    combine_scales,
    exponent_offset,
    fine_bits,
    fine_sum,
    fused_multiply_add,
    half_of,
    left_aligned,
    missing_mass,
    multiply_high,
    multiply_round,
    narrow_multiplier,
    output_multiplier,
    probability_word,
    requantize,
    row_inverse,
    row_weight,
    shift_left,
    shift_right,
    split_scale,
    usable_scale,
    wide_multiplier,
    wide_row_inverse,
)
from .quantize_ops import bias_base, bias_to_fixed

MASKED = tl.constexpr(fp.SCORE_MASKED)
MOST_ROUNDED_KEYS = tl.constexpr(fp.MOST_ROUNDED_KEYS)
POISON = tl.constexpr(fp.SCORE_POISON)
BIAS_LIMIT = tl.constexpr(fp.BIAS_LIMIT)
BIAS_MASKED = tl.constexpr(fp.BIAS_MASKED)
BIAS_POISON = tl.constexpr(fp.BIAS_POISON)
BIAS_EVEN = tl.constexpr(fp.BIAS_EVEN)

# Two words with a probability in their top bytes -> two packed int8: byte 3 of each, or byte 2 less 128.
PACK_HIGH = tl.constexpr("{.reg .b32 a; prmt.b32 a, $1, $2, 0x0073; cvt.u16.u32 $0, a;}")
PACK_LOW = tl.constexpr("{.reg .b32 a; prmt.b32 a, $1, $2, 0x0062; xor.b32 a, a, 0x8080; cvt.u16.u32 $0, a;}")
# the same with the lowest bit of each byte set
PACK_FINE = tl.constexpr(
    "{.reg .b32 a; prmt.b32 a, $1, $2, 0x0062; xor.b32 a, a, 0x8080; or.b32 a, a, 0x0101; cvt.u16.u32 $0, a;}"
)
# Byte 3 of a left-aligned fraction, with a 1 above it (256 + byte). The 1 comes from a register whose value ptxas
# cannot know: as an immediate it would cost a move per score.
MANTISSA = tl.constexpr("prmt.b32 $0, $1, $2, 0x5543;")
OPAQUE_ONE = tl.constexpr("{.reg .b32 a; shr.u32 a, $1, 31; add.u32 $0, a, 1;}")


@triton.jit
def _negative(x, GUARD: tl.constexpr):
    """-x as an integer, formed once per row: the compiler would otherwise negate a number for every score."""
    if GUARD:
        return -x
    return tl.inline_asm_elementwise("neg.s32 $0, $1;", "=r,r", [x], tl.int32, True, 1)


@triton.jit
def _high_bytes(word, GUARD: tl.constexpr):
    """Byte 3 of every probability word as int8, same shape: 127 - P (8 bits), P (7 bits) or the high byte of P (15 bits)."""
    if GUARD:
        return (word >> 24).to(tl.int8)
    return tl.inline_asm_elementwise(PACK_HIGH, "=h,r,r", [word], tl.int8, True, 2)


@triton.jit
def _low_bytes(word, GUARD: tl.constexpr):
    """Byte 2 of every probability word less 128 as int8, same shape: the low byte of a 15-bit P."""
    if GUARD:
        return (((word >> 16) & 255) - 128).to(tl.int8)
    return tl.inline_asm_elementwise(PACK_LOW, "=h,r,r", [word], tl.int8, True, 2)


@triton.jit
def _fine_bytes(word, GUARD: tl.constexpr):
    """:func:`_low_bytes` with their lowest bit set, for :func:`.common.fixed_point.fine_sum`."""
    if GUARD:
        return ((((word >> 16) & 255) | 1) - 128).to(tl.int8)
    return tl.inline_asm_elementwise(PACK_FINE, "=h,r,r", [word], tl.int8, True, 2)


@triton.jit
def key_order(columns):
    """The key (modulo 16 in its group of 16) that stands in each column of the scores.

    A lane has two neighbouring columns of each eight of an accumulator, but supplies four neighbouring bytes of a left
    operand. With the keys in this order the two are the same scores, and probabilities need no shuffle (drawing above).
    """
    return (columns & -16) | ((columns & 6) << 1) | ((columns & 8) >> 2) | (columns & 1)


@triton.jit
def inverse_key_order(n):
    """The inverse of :func:`key_order`: which key's values stand at place ``n`` where K is in the keys' own order.

    It permutes the rows of V instead of those of K, for kernels that copy K as it lies in memory.
    """
    return (n & -16) | ((n & 2) << 2) | ((n & 12) >> 1) | (n & 1)


@triton.jit
def row_of_channel(channel, WIDTH: tl.constexpr):
    """The row of packed V, of WIDTH, for a channel in fragment order: permuted so that a lane's outputs are contiguous.

    A lane has columns 2t, 2t + 1 of each eight of a product with V. With channel ``C / 8 * i + j`` in column ``8 j +
    i`` these are C / 4 neighbouring channels, which take few wide stores. Each span of C channels is permuted by itself.
    """
    FIRST: tl.constexpr = 64 if WIDTH > 64 and WIDTH < 128 else WIDTH
    row = channel % (FIRST // 8) * 8 + channel // (FIRST // 8)
    if FIRST < WIDTH:
        LAST: tl.constexpr = WIDTH - FIRST
        place = channel - FIRST
        row = tl.where(place < 0, row, FIRST + place % (LAST // 8) * 8 + place // (LAST // 8))
    return row


@triton.jit
def channel_of_row(row, CHANNELS: tl.constexpr):
    """The channel in a row of a span of packed V in fragment order: the inverse of :func:`row_of_channel`."""
    return (row & 7) * (CHANNELS // 8) + (row >> 3)


@triton.jit
def packed_sequence(cu_ptr, z):
    """(first token, number of tokens) of packed sequence ``z``, of cumulative lengths."""
    first = tl.load(cu_ptr + z).to(tl.int64)
    return first, (tl.load(cu_ptr + z + 1).to(tl.int64) - first).to(tl.int32)


@triton.jit
def packed_start(first, z):
    """Where the values of packed sequence ``z``, whose first key is ``first``, begin in packed V: a multiple of 128.

    Each has places for its keys up to a multiple of 128. Nothing has to be added up for that: the whole blocks before key
    ``first``, and one more for each sequence before, are never fewer than those sequences take.
    """
    return (tl.cdiv(first, 128) + z) * 128


@triton.jit
def _to_operand(p, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """P with its columns in the order of the keys (undoes :func:`key_order`), (BLOCK_M, BLOCK_N); no shuffle."""
    columns = tl.reshape(p, (BLOCK_M, BLOCK_N // 16, 2, 4, 2))
    return tl.reshape(tl.permute(columns, (0, 1, 3, 2, 4)), (BLOCK_M, BLOCK_N))


@triton.jit
def _to_key_order(x, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """A tile with its columns put from the order of the keys into that of :func:`key_order`, (BLOCK_M, BLOCK_N)."""
    natural = tl.reshape(x, (BLOCK_M, BLOCK_N // 16, 4, 2, 2))
    return tl.reshape(tl.permute(natural, (0, 1, 3, 2, 4)), (BLOCK_M, BLOCK_N))


@triton.jit
def interleave(a, b, c, d, BLOCK_N: tl.constexpr, CHANNELS: tl.constexpr):
    """One (BLOCK_N, CHANNELS) tile from its rows 4i, 4i + 1, 4i + 2 and 4i + 3, each (BLOCK_N / 4, CHANNELS).

    Four neighbouring keys of a channel then are one register, which is stored as one word.
    """
    quads = tl.join(tl.join(a, c), tl.join(b, d))
    return tl.reshape(tl.permute(quads, (0, 2, 3, 1)), (BLOCK_N, CHANNELS))


@triton.jit
def load_value(
    v_base, v_stride_n, v_stride_d, start, keys, dv,
    VALUE_DIM: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr, VALUE_ROWS: tl.constexpr, CHECK: tl.constexpr,
    PERMUTED: tl.constexpr = False,
):  # fmt: skip
    """A (keys, channels) int8 tile of V, zero beyond the edges.

    With PERMUTED (and VALUE_ROWS) its keys are in :func:`inverse_key_order`.

    The tensor core reads neighbouring keys of a channel together. Where memory has neighbouring channels together
    instead (VALUE_ROWS), four rows are interleaved in registers, so that they reach shared memory four bytes at a time
    instead of one.
    """
    if not VALUE_ROWS:
        n = start + tl.arange(0, BLOCK_N)
        ptrs = v_base + n[:, None] * v_stride_n + dv[None, :] * v_stride_d
        if CHECK:
            return tl.load(ptrs, mask=(n[:, None] < keys) & (dv[None, :] < VALUE_DIM), other=0)
        if BLOCK_DV != VALUE_DIM:
            return tl.load(ptrs, mask=dv[None, :] < VALUE_DIM, other=0)
        return tl.load(ptrs)
    n = start + 4 * tl.arange(0, BLOCK_N // 4)[:, None]
    FAR: tl.constexpr = 8 if PERMUTED else 2
    if PERMUTED:
        n = inverse_key_order(n)
    ptrs = v_base + n * v_stride_n + dv[None, :] * v_stride_d
    inside = dv[None, :] < VALUE_DIM
    v0 = tl.load(ptrs, mask=inside & (n < keys), other=0)
    v1 = tl.load(ptrs + v_stride_n, mask=inside & (n + 1 < keys), other=0)
    v2 = tl.load(ptrs + FAR * v_stride_n, mask=inside & (n + FAR < keys), other=0)
    v3 = tl.load(ptrs + (FAR + 1) * v_stride_n, mask=inside & (n + FAR + 1 < keys), other=0)
    return interleave(v0, v1, v2, v3, BLOCK_N, BLOCK_DV)


@triton.jit
def load_key(
    k_base, k_stride_n, k_stride_d, n, d, keys, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, INSIDE: tl.constexpr
):  # fmt: skip
    """Keys ``n`` as a (channels, keys) int8 tile, zero in channels past HEAD_DIM.

    Unless INSIDE, keys past the last are copies of it, which leave the row maxima as they are.
    """
    if not INSIDE:
        n = tl.minimum(n, keys - 1)
    ptrs = k_base + n[None, :] * k_stride_n + d[:, None] * k_stride_d
    if BLOCK_D == HEAD_DIM:
        return tl.load(ptrs)
    return tl.load(ptrs, mask=d[:, None] < HEAD_DIM, other=0)


@triton.jit
def to_rows(q, row_bits, BLOCK_D: tl.constexpr):
    """One integer per row, (rows, 1), in the layout of an accumulator's rows.

    What is derived from it per row is then computed where the scores are, instead of passing through shared memory once per
    derived number. The compiler gives that layout to a product, so the integer is selected by a test of one, always false.
    """
    carrier = tl.dot(q, tl.full((BLOCK_D, 16), 1, tl.int8), out_dtype=tl.int32)
    return tl.max(tl.where(carrier == 2147483647, carrier, row_bits), 1)[:, None]


@triton.jit
def mask_pointer(mask_ptr, z, h, stride_z, stride_h, PERIOD: tl.constexpr):
    """Where the mask of a head starts. With a PERIOD the mask repeats after PERIOD elements of the batch."""
    if PERIOD > 0:
        return mask_ptr + (z % PERIOD) * stride_z + h * stride_h
    return mask_ptr + z * stride_z + h * stride_h


@triton.jit
def column_scales(ks_base, ks_stride_n, keys, BLOCK_N: tl.constexpr, KEY_TOKEN: tl.constexpr):
    """(usable, mantissa, exponent, largest) of a head's key scale.

    With one scale per token (KEY_TOKEN) the common scale is the power of two above the largest one, and ``largest`` its
    exponent for :func:`.common.fixed_point.column_multiplier`; else ``largest`` is 0. ``usable``: all scales are
    positive and finite.
    """
    if KEY_TOKEN:
        largest_bits = tl.full((BLOCK_N,), 0, tl.int32)
        smallest_bits = tl.full((BLOCK_N,), 0x3F800000, tl.int32)
        for start in range(0, keys, BLOCK_N):
            columns = start + tl.arange(0, BLOCK_N)
            bits = tl.load(ks_base + columns * ks_stride_n, mask=columns < keys, other=0x00800000)
            largest_bits = tl.maximum(largest_bits, tl.where(usable_scale(bits), bits, 0x7F800000))
            smallest_bits = tl.minimum(smallest_bits, bits)
        most = tl.max(largest_bits, 0)
        usable = (most < 0x7F800000) & (tl.min(smallest_bits, 0) > 0)
        largest = ((most >> 23) & 0xFF) - 150
        mantissa = largest * 0 + (1 << 23)
        exponent = largest + 1
    else:
        bits = tl.load(ks_base)
        usable = usable_scale(bits)
        mantissa, exponent = split_scale(bits)
        largest = 0
    return usable, mantissa, exponent, largest


@triton.jit
def row_multiplier(
    query_bits, key_mantissa, key_exponent, constant_mantissa, constant_exponent, MASK: tl.constexpr, KEY_TOKEN: tl.constexpr,
    COLUMN_BITS: tl.constexpr, MOST: tl.constexpr, MOST_BITS: tl.constexpr, GUARD: tl.constexpr,
):  # fmt: skip
    """(multiplier, F, drop) of the rows' scores: how a score becomes octaves with F fraction bits.

    With a bias, products lose ``drop`` bits by a right shift, so that at most 16 fraction bits are left: the bias has 16.
    """
    mantissa, exponent = combine_scales(query_bits, key_mantissa, key_exponent, constant_mantissa, constant_exponent)
    drop = 0
    if KEY_TOKEN:
        multiplier, fraction_bits = wide_multiplier(
            mantissa, exponent, COLUMN_BITS, 16 if MASK == "bias" else MAX_FRACTION_BITS
        )
    else:
        multiplier, fraction_bits = narrow_multiplier(mantissa, exponent, MOST, MOST_BITS, GUARD)
        if MASK == "bias":
            drop = tl.maximum(fraction_bits - 16, 0)
            fraction_bits = tl.minimum(fraction_bits, 16)
    return multiplier, fraction_bits, drop


@triton.jit
def _mask_tile(
    base, stride_m, stride_n, rows, start, queries, keys, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """A (BLOCK_M, BLOCK_N) tile of the mask, keys in :func:`key_order`; beyond the edges the last row and key are repeated."""
    # loaded in the keys' own order and permuted afterwards, which renames registers instead of computing more addresses
    row = tl.minimum(rows, queries - 1)[:, None]
    column = tl.minimum(start + tl.arange(0, BLOCK_N), keys - 1)[None, :]
    return _to_key_order(tl.load(base + row * stride_m + column * stride_n), BLOCK_M, BLOCK_N)


@triton.jit
def bias_bases(
    base, stride_m, stride_n, rows, queries, keys, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TILES: tl.constexpr
):  # fmt: skip
    """:func:`.common.quantize_ops.bias_base` of rows with a float bias, from all TILES tiles of their keys: two (rows, 1)."""
    high = tl.max(_mask_tile(base, stride_m, stride_n, rows, 0, queries, keys, BLOCK_M, BLOCK_N).to(tl.float32), 1)
    for i in tl.static_range(1, TILES):
        more = _mask_tile(base, stride_m, stride_n, rows, i * BLOCK_N, queries, keys, BLOCK_M, BLOCK_N)
        high = tl.maximum(high, tl.max(more.to(tl.float32), 1))
    return bias_base(high[:, None])


@triton.jit
def scores(
    q, k, ks_base, ks_stride_n, mask_base, mask_stride_m, mask_stride_n,
    rows, start, queries, keys, multiplier, fraction_bits, drop, largest, base, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    COLUMN_BITS: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr, KEY_TOKEN: tl.constexpr, CHECK: tl.constexpr,
    GUARD: tl.constexpr,
):  # fmt: skip
    """Scores of a block of queries and BLOCK_N keys from ``start``, int32 (BLOCK_M, BLOCK_N), in :func:`key_order`.

    The unit is common to a row: S without a bias, ``y = S * A`` with a key scale per token, and with a bias z, in
    octaves with ``fraction_bits`` fraction bits. ``base`` is subtracted from a float bias
    (:func:`.common.quantize_ops.bias_base`). With CHECK, keys that take no part get the int32 minimum, which no other
    score reaches.
    """
    s = tl.dot(q, k, out_dtype=tl.int32)
    n = start + key_order(tl.arange(0, BLOCK_N))
    if KEY_TOKEN:
        bits = tl.load(ks_base + tl.minimum(n, keys - 1) * ks_stride_n)
        s = s * column_multiplier(bits, largest, COLUMN_BITS)[None, :]
    valid = n[None, :] < keys
    if CAUSAL:
        valid = valid & (n[None, :] <= rows[:, None])
    if MASK != "none":
        part = _mask_tile(mask_base, mask_stride_m, mask_stride_n, rows, start, queries, keys, BLOCK_M, BLOCK_N)
        if MASK == "bool":
            valid = valid & (part != 0)
        else:
            if part.dtype.is_int():
                fixed = part
                valid = valid & (part != BIAS_MASKED)
                marked = part > BIAS_LIMIT
                mark = part
            else:
                bias = part.to(tl.float32)
                fixed = bias_to_fixed(bias - base, GUARD)
                valid = valid & (bias != float("-inf"))
                marked = (bias != bias) | (bias == float("inf"))
                mark = POISON
            if KEY_TOKEN:
                s = multiply_high(s, multiplier, GUARD)
            else:
                s = (s * multiplier) >> drop
            s += fixed >> (16 - fraction_bits)
            s = tl.where(marked, mark, s)
    if CHECK:
        s = tl.where(valid, s, MASKED)
    return s


@triton.jit
def probability_words(
    s, row_max, multiplier, fraction_bits,
    MASK: tl.constexpr, KEY_TOKEN: tl.constexpr, QUADRATIC: tl.constexpr, BITS: tl.constexpr, NEAREST: tl.constexpr,
    OFFSET: tl.constexpr, CHECK: tl.constexpr, GUARD: tl.constexpr,
):  # fmt: skip
    """Unnormalised probabilities of a tile of scores, as :func:`.common.fixed_point.probability_word`; same shape.

    Per score: the exponent ``t = (m - s) * M + t0`` in octaves with ``fraction_bits`` fraction bits (Equations 5 and
    6), its whole octaves and the top eight bits of its fraction, then 2**-t (Equations 7 and 8). With CHECK masked
    scores give P = 0.
    """
    base = row_max
    if CHECK:
        base = tl.where(row_max == MASKED, 0, row_max)
    begin = exponent_offset(OFFSET, fraction_bits)
    up = 32 - fraction_bits
    if MASK == "bias" or KEY_TOKEN:
        t = base - s
        if MASK != "bias":
            t = multiply_high(t, multiplier, GUARD)
        t += begin
        flipped = ~shift_left(t, up, GUARD)
    else:
        # Two multiply-adds per score: the exponent, and the complement of its left-aligned fraction. The second saves the shift
        # and the complement that would follow the first.
        begin += base * multiplier
        t = s * _negative(multiplier, GUARD) + begin
        flipped = s * shift_left(multiplier, up, GUARD) + ~shift_left(begin, up, GUARD)
    octaves = shift_right(t, fraction_bits, GUARD)
    if GUARD:
        mantissa = ((flipped >> 24) & 255) | 256
    else:
        one = tl.inline_asm_elementwise(OPAQUE_ONE, "=r,r", [fraction_bits], tl.int32, True, 1)
        mantissa = tl.inline_asm_elementwise(MANTISSA, "=r,r,r", [flipped, one], tl.int32, True, 1)
    word = probability_word(octaves, mantissa, QUADRATIC, BITS, NEAREST, GUARD)
    if CHECK:
        # P = 0, rounded or not
        NOTHING: tl.constexpr = 2147483647 - (1 << 23 if NEAREST else 0) if BITS == 8 else 0
        word = tl.where(s != MASKED, word, NOTHING)
    return word


@triton.jit
def accumulate(
    word, v, weight, offsets, accumulator, high, total, high_total,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BITS: tl.constexpr, EXACT: tl.constexpr, ADD_OFFSET: tl.constexpr,
    GUARD: tl.constexpr,
):  # fmt: skip
    """Add a tile of keys to the products with V (BLOCK_M, BLOCK_DV) and with ones (BLOCK_M, 16), the row sums; int32.

    8-bit probabilities are stored as 127 - P. With ADD_OFFSET a product with -127 removes the 127s, and the accumulator
    is the negative of the numerator. Of 15-bit ones the low byte is 128 too small: two products with 64 correct it.
    ``weight`` is 1, or 0 for keys past the last. Row sums are a product because they cost next to nothing there. With EXACT
    ``high_total`` is the sum of the words' second bytes, for :func:`.common.fixed_point.fine_sum`.
    """
    p = _to_operand(_high_bytes(word, GUARD), BLOCK_M, BLOCK_N)
    if BITS == 15:
        high = tl.dot(p, v, high, out_dtype=tl.int32)
        high_total = tl.dot(p, weight, high_total, out_dtype=tl.int32)
        p = _to_operand(_low_bytes(word, GUARD), BLOCK_M, BLOCK_N)
    if EXACT:
        fine = _to_operand(_fine_bytes(word, GUARD), BLOCK_M, BLOCK_N)
        high_total = tl.dot(fine, weight, high_total, out_dtype=tl.int32)
    total = tl.dot(p, weight, total, out_dtype=tl.int32)
    accumulator = tl.dot(p, v, accumulator, out_dtype=tl.int32)
    if ADD_OFFSET:
        accumulator = tl.dot(offsets, v, accumulator, out_dtype=tl.int32)
        if BITS == 15:
            accumulator = tl.dot(offsets, v, accumulator, out_dtype=tl.int32)
    return accumulator, high, total, high_total


@triton.jit
def _latter(a, b, c, d, e, f):
    """The second three of six: a reduction that keeps one of several equal rows."""
    return d, e, f


@triton.jit
def output_factors(
    o_ptr, vs_base, vs_stride_d, os_base, os_stride_d, vo_base, vo_stride_d, VALUE_DIM: tl.constexpr, BLOCK_DV: tl.constexpr,
    VALUE_CHANNEL: tl.constexpr, OUTPUT_CHANNEL: tl.constexpr, VALUE_OFFSET: tl.constexpr, GUARD: tl.constexpr,
):  # fmt: skip
    """What turns a normalised output into the stored one, one number or one per channel (1, BLOCK_DV).

    For int8 outputs (multiplier, shift, rounding) of value scale / output scale; for float outputs (value scale, offset, 0).
    """
    INTEGER: tl.constexpr = o_ptr.dtype.element_ty == tl.int8
    SPREAD: tl.constexpr = INTEGER and (VALUE_CHANNEL or OUTPUT_CHANNEL) and not GUARD and BLOCK_DV <= 256
    channel = tl.arange(0, BLOCK_DV)[None, :]
    if SPREAD:
        # With enough equal rows the compiler gives a thread one channel or two to compute, instead of many; one row is kept.
        channel += tl.zeros((256 // BLOCK_DV, 1), tl.int32)
    inside = channel < VALUE_DIM
    if VALUE_CHANNEL:
        value_scale = tl.load(vs_base + channel * vs_stride_d, mask=inside, other=1.0)
    else:
        value_scale = tl.load(vs_base)
    if INTEGER:
        if OUTPUT_CHANNEL:
            output_scale = tl.load(os_base + channel * os_stride_d, mask=inside, other=1.0)
        else:
            output_scale = tl.load(os_base)
        value_bits, output_bits = value_scale.to(tl.int32, bitcast=True), output_scale.to(tl.int32, bitcast=True)
        factor, shift = output_multiplier(value_bits, output_bits, GUARD)
        half = half_of(shift)
        if SPREAD:
            factor, shift, half = tl.reduce((factor, shift, half), 0, _latter)
            factor, shift, half = factor[None, :], shift[None, :], half[None, :]
    elif VALUE_OFFSET:
        factor, shift, half = value_scale, tl.load(vo_base + channel * vo_stride_d, mask=inside, other=0.0), 0
    else:
        factor, shift, half = value_scale, 0, 0
    return factor, shift, half


@triton.jit
def finish(
    accumulator, high, total, high_total, count, mean, row_max, usable, factor, shift, half, o_ptrs, stored,
    BITS: tl.constexpr, EXACT: tl.constexpr, VALUE_OFFSET: tl.constexpr, FLOOR_OUTPUT: tl.constexpr, MASK: tl.constexpr,
    CHECK: tl.constexpr, GUARD: tl.constexpr, WIDE_SUMS: tl.constexpr = False, VARLEN: tl.constexpr = False, few_keys=False,
):  # fmt: skip
    """Normalise by the row sums (Algorithm 1, step 11) and store a (BLOCK_M, BLOCK_DV) block of outputs where ``stored``.

    ``count`` columns went into the row sums; it takes the storage offset of P out of them. ``factor``, ``shift`` and
    ``half`` come from :func:`output_factors`. With EXACT the missing mass gets ``mean``, twice the mean of V's channels.
    Float outputs of rows with an unusable scale or a NaN in the bias are NaN.

    With WIDE_SUMS (rows of more than 65536 keys) the accumulator is int64, for 15 bits the whole numerator (``high`` plays no
    part), and what follows from it has 64 bits up to the normalised output. With VARLEN ``few_keys`` says that the row has so
    few keys that its sum is that of rounded P, whatever EXACT says.
    """
    total = tl.max(total, 1)[:, None]
    if WIDE_SUMS:
        total = total.to(tl.int64)
        count = tl.cast(count, tl.int64)
    if BITS == 15:
        total += tl.max(high_total, 1)[:, None].to(total.dtype) * 256 + 128 * count
    elif EXACT:
        fine = fine_sum(total, tl.max(high_total, 1)[:, None], count)
        if VARLEN:
            # the sum of rounded P in the unit of a finer one: nothing is missing
            fine = tl.where(few_keys, 0, fine)
        total, missing = missing_mass(fine, 127 * count - total)
        accumulator -= missing * mean
    elif BITS == 8:
        total = 127 * count - total
    if WIDE_SUMS:
        bits, inverse = wide_row_inverse(total, GUARD)
    else:
        bits, inverse = row_inverse(total, GUARD)
    if EXACT:
        bits = fine_bits(bits)
    SIGN: tl.constexpr = -1 if BITS == 8 else 1
    if WIDE_SUMS:
        numerator = accumulator * SIGN
        scaled = left_aligned(numerator, bits)
    elif BITS == 15:
        numerator = high.to(tl.int64) * 256 + accumulator.to(tl.int64)
        scaled = ((numerator << 24) >> bits.to(tl.int64)).to(tl.int32)
    else:
        numerator = accumulator * SIGN
        scaled = accumulator * (SIGN << (24 - bits))
    if FLOOR_OUTPUT:
        floor = multiply_high(scaled, inverse, GUARD) >> 21
        remainder = numerator - floor * total
        floor += tl.where(total > 0, tl.where(remainder >= total, 1, 0) - tl.where(remainder < 0, 1, 0), 0)

    if o_ptrs.dtype.element_ty == tl.int8:
        if FLOOR_OUTPUT:
            result = requantize(floor, factor >> 2, 1, shift, half, 1, GUARD)
        else:
            row_factor = multiply_round(inverse, factor, GUARD)
            if BITS == 15 or WIDE_SUMS:
                result = requantize(scaled, row_factor, 24, shift, half, 1, GUARD)
            else:
                result = requantize(accumulator, row_factor, bits, shift, half, SIGN, GUARD)
        tl.store(o_ptrs, result, mask=stored)
    else:
        factor = tl.where(usable_scale(factor.to(tl.int32, bitcast=True)), factor, float("nan"))
        if MASK == "bias":
            usable = usable & (row_max < POISON)
        # a NaN in the factor of the row costs less than a select per element
        if FLOOR_OUTPUT:
            result = floor.to(tl.float32) * tl.where(usable, 1.0, float("nan"))
        else:
            result = numerator.to(tl.float32) * tl.where(usable, row_weight(inverse, bits), float("nan"))
        if VALUE_OFFSET and CHECK:
            # rows without a key are 0
            result = tl.where(total > 0, fused_multiply_add(result, factor, shift, GUARD), result * factor)
        elif VALUE_OFFSET:
            result = fused_multiply_add(result, factor, shift, GUARD)
        else:
            result = result * factor
        tl.store(o_ptrs, result.to(o_ptrs.dtype.element_ty), mask=stored)
