"""The fused attention kernel: int8 in, integers throughout, int8 or float out; and its launcher.

One program computes one block of queries of one head. With the whole row in one tile the scores are formed
once; longer rows are walked twice (row maximum first), or once with ScaleRelease when the recipe is online.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .. import fixed_point as fp
from ..recipe import Recipe
from .integer import (
    column_multiplier,
    combine_scales,
    exponent_offset,
    multiply_high,
    narrow_multiplier,
    output_multiplier,
    probability_word,
    release_factor,
    requantize,
    row_inverse,
    shift_left,
    shift_right,
    split_scale,
    usable_scale,
    wide_multiplier,
)

MASKED = tl.constexpr(fp.SCORE_MASKED)
POISON = tl.constexpr(fp.SCORE_POISON)
BIAS_MASKED = tl.constexpr(fp.BIAS_MASKED)
BIAS_POISON = tl.constexpr(fp.BIAS_POISON)


# Two words, each a probability in its top bytes -> two packed bytes: byte 3 of each, or byte 2 less 128.
PACK_HIGH = tl.constexpr("{.reg .b32 a; prmt.b32 a, $1, $2, 0x0073; cvt.u16.u32 $0, a;}")
PACK_LOW = tl.constexpr("{.reg .b32 a; prmt.b32 a, $1, $2, 0x0062; xor.b32 a, a, 0x8080; cvt.u16.u32 $0, a;}")
# Byte 3 of a left-aligned fraction with a 1 put above it. The 1 comes from a register that the assembler cannot
# see through: as an immediate it would cost a move a score.
MANTISSA = tl.constexpr("prmt.b32 $0, $1, $2, 0x5543;")
OPAQUE_ONE = tl.constexpr("{.reg .b32 a; shr.u32 a, $1, 31; add.u32 $0, a, 1;}")


@triton.jit
def _negative(x, GUARD: tl.constexpr):
    """-x, formed once a row: the compiler would rather negate every score."""
    if GUARD:
        return -x
    return tl.inline_asm_elementwise("neg.s32 $0, $1;", "=r,r", [x], tl.int32, True, 1)


@triton.jit
def _high_bytes(word, GUARD: tl.constexpr):
    """Byte 3 of every probability word, as int8."""
    if GUARD:
        return (word >> 24).to(tl.int8)
    return tl.inline_asm_elementwise(PACK_HIGH, "=h,r,r", [word], tl.int8, True, 2)


@triton.jit
def _low_bytes(word, GUARD: tl.constexpr):
    """Byte 2 of every probability word less 128, as int8."""
    if GUARD:
        return (((word >> 16) & 255) - 128).to(tl.int8)
    return tl.inline_asm_elementwise(PACK_LOW, "=h,r,r", [word], tl.int8, True, 2)


@triton.jit
def _key_order(columns):
    """Which key of its sixteen stands in which column of the scores.

    A thread of the tensor core holds two neighbouring columns of a product but must hand over four neighbouring
    bytes of an operand. With the keys dealt like this what it holds is what it must hand over: no shuffle.
    """
    return (columns & -16) | ((columns & 6) << 1) | ((columns & 8) >> 2) | (columns & 1)


@triton.jit
def _to_operand(p, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Put the columns of P back into the order of the keys (undoes :func:`_key_order`)."""
    dealt = tl.reshape(p, (BLOCK_M, BLOCK_N // 16, 2, 4, 2))
    return tl.reshape(tl.permute(dealt, (0, 1, 3, 2, 4)), (BLOCK_M, BLOCK_N))


@triton.jit
def _load_value(
    v_base, v_stride_n, v_stride_d, start, keys, dv,
    VALUE_DIM: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr, VALUE_ROWS: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    """A (keys, channels) tile of V, zero beyond the edges.

    The tensor core wants the keys of a channel side by side. Where they are not (VALUE_ROWS) four rows are
    interleaved in registers, so that they reach shared memory four bytes at a time instead of one.
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
    ptrs = v_base + n * v_stride_n + dv[None, :] * v_stride_d
    inside = dv[None, :] < VALUE_DIM
    v0 = tl.load(ptrs, mask=inside & (n < keys), other=0)
    v1 = tl.load(ptrs + v_stride_n, mask=inside & (n + 1 < keys), other=0)
    v2 = tl.load(ptrs + 2 * v_stride_n, mask=inside & (n + 2 < keys), other=0)
    v3 = tl.load(ptrs + 3 * v_stride_n, mask=inside & (n + 3 < keys), other=0)
    fours = tl.join(tl.join(v0, v2), tl.join(v1, v3))
    return tl.reshape(tl.permute(fours, (0, 2, 3, 1)), (BLOCK_N, BLOCK_DV))


@triton.jit
def _load_key(
    k_base, k_stride_n, k_stride_d, n, d, keys, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, INSIDE: tl.constexpr
):  # fmt: skip
    """Keys ``n`` as a (channels, keys) tile. Past the end the last key stands in, which leaves row maxima true."""
    if not INSIDE:
        n = tl.minimum(n, keys - 1)
    ptrs = k_base + n[None, :] * k_stride_n + d[:, None] * k_stride_d
    if BLOCK_D == HEAD_DIM:
        return tl.load(ptrs)
    return tl.load(ptrs, mask=d[:, None] < HEAD_DIM, other=0)


@triton.jit
def _scores(
    q, k, ks_base, ks_stride_n, mask_base, mask_stride_m, mask_stride_n,
    rows, n, queries, keys, multiplier, fraction_bits, largest,
    COLUMN_BITS: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr, KEY_TOKEN: tl.constexpr, CHECK: tl.constexpr,
    GUARD: tl.constexpr,
):  # fmt: skip
    """Scores of a block of queries against keys ``n``, in a unit common to the row; and who takes part.

    With CHECK whoever takes no part is set to the minimum.
    """
    s = tl.dot(q, k, out_dtype=tl.int32)
    if KEY_TOKEN:
        bits = tl.load(ks_base + tl.minimum(n, keys - 1) * ks_stride_n)
        s = s * column_multiplier(bits, largest, COLUMN_BITS)[None, :]
    valid = n[None, :] < keys
    if CAUSAL:
        valid = valid & (n[None, :] <= rows[:, None])
    if MASK != "none":
        inside = (rows[:, None] < queries) & (n[None, :] < keys)
        part = tl.load(mask_base + rows[:, None] * mask_stride_m + n[None, :] * mask_stride_n, mask=inside, other=0)
        if MASK == "bool":
            valid = valid & (part != 0)
        else:
            if not KEY_TOKEN:
                s = s << COLUMN_BITS
            valid = valid & (part != BIAS_MASKED)
            s = multiply_high(s, multiplier, GUARD) + (part >> (16 - fraction_bits))
            s = tl.where(part == BIAS_POISON, POISON, s)
    if CHECK:
        s = tl.where(valid, s, MASKED)
    return s, valid


@triton.jit
def _probability_words(
    s, valid, row_max, multiplier, fraction_bits,
    MASK: tl.constexpr, KEY_TOKEN: tl.constexpr, QUADRATIC: tl.constexpr, BITS: tl.constexpr, NEAREST: tl.constexpr,
    OFFSET: tl.constexpr, CHECK: tl.constexpr, GUARD: tl.constexpr,
):  # fmt: skip
    """Unnormalised probabilities of a block of scores, as words (see :func:`.integer.probability_word`)."""
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
        # two multiply-adds a score: the exponent, and the complement of its fraction alone, left-aligned
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
        word = tl.where(valid, word, -2147483648 if BITS == 8 else 0)
    return word


@triton.jit
def _accumulate(
    word, v, weight, halves, accumulator, high, total, high_total,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BITS: tl.constexpr, ADD_OFFSET: tl.constexpr, GUARD: tl.constexpr,
):  # fmt: skip
    """Add a block of keys to the products with V and with ones (the row sums).

    Stored 8- and 15-bit probabilities are 128 too small; with ADD_OFFSET the tensor core adds 128 times V back, as
    two products with 64s.
    """
    p = _to_operand(_high_bytes(word, GUARD), BLOCK_M, BLOCK_N)
    if BITS == 15:
        high = tl.dot(p, v, high, out_dtype=tl.int32)
        high_total = tl.dot(p, weight, high_total, out_dtype=tl.int32)
        p = _to_operand(_low_bytes(word, GUARD), BLOCK_M, BLOCK_N)
    total = tl.dot(p, weight, total, out_dtype=tl.int32)
    accumulator = tl.dot(p, v, accumulator, out_dtype=tl.int32)
    if ADD_OFFSET:
        accumulator = tl.dot(halves, v, accumulator, out_dtype=tl.int32)
        accumulator = tl.dot(halves, v, accumulator, out_dtype=tl.int32)
    return accumulator, high, total, high_total


@triton.jit
def pack_value_kernel(
    v_ptr, packed_ptr, sums_ptr, v_stride_z, v_stride_h, v_stride_n, v_stride_d, keys, padded,
    VALUE_DIM: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Bring a head's V to the order the tensor core reads, (channels, keys), zero up to ``padded``; and sum each channel."""
    z, h = tl.program_id(2).to(tl.int64), tl.program_id(1)
    channels = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    head = z * tl.num_programs(1) + h
    v_base = v_ptr + z * v_stride_z + h * v_stride_h
    sums = tl.zeros((BLOCK_C,), tl.int32)
    for start in range(0, padded, BLOCK_N):
        v = _load_value(v_base, v_stride_n, v_stride_d, start, keys, channels, VALUE_DIM, BLOCK_C, BLOCK_N, True, True)
        sums += tl.sum(v.to(tl.int32), 0)
        n = start + tl.arange(0, BLOCK_N)
        out = packed_ptr + (head * VALUE_DIM + channels[None, :]) * padded + n[:, None]
        tl.store(out, v, mask=channels[None, :] < VALUE_DIM)
    tl.store(sums_ptr + head * VALUE_DIM + channels, sums, mask=channels < VALUE_DIM)


@triton.jit
def attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    o_ptr,
    qs_ptr,
    ks_ptr,
    vs_ptr,
    os_ptr,
    mask_ptr,
    sums_ptr,
    q_stride_z,
    q_stride_h,
    q_stride_n,
    q_stride_d,
    k_stride_z,
    k_stride_h,
    k_stride_n,
    k_stride_d,
    v_stride_z,
    v_stride_h,
    v_stride_n,
    v_stride_d,
    o_stride_z,
    o_stride_h,
    o_stride_n,
    o_stride_d,
    qs_stride_z,
    qs_stride_h,
    qs_stride_n,
    ks_stride_z,
    ks_stride_h,
    ks_stride_n,
    vs_stride_z,
    vs_stride_h,
    vs_stride_d,
    os_stride_z,
    os_stride_h,
    os_stride_d,
    mask_stride_z,
    mask_stride_h,
    mask_stride_m,
    mask_stride_n,
    queries,
    keys,
    constant_mantissa,
    constant_exponent,
    GROUP: tl.constexpr,
    MASK_PERIOD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASK: tl.constexpr,
    CAUSAL: tl.constexpr,
    KEY_TOKEN: tl.constexpr,
    QUADRATIC: tl.constexpr,
    BITS: tl.constexpr,
    NEAREST: tl.constexpr,
    OFFSET: tl.constexpr,
    ONLINE: tl.constexpr,
    FLOOR_OUTPUT: tl.constexpr,
    COLUMN_BITS: tl.constexpr,
    MOST: tl.constexpr,
    MOST_BITS: tl.constexpr,
    TILES: tl.constexpr,
    KEYS: tl.constexpr,
    CHECK: tl.constexpr,
    VALUE_SUMS: tl.constexpr,
    VALUE_ROWS: tl.constexpr,
    QUERY_TOKEN: tl.constexpr,
    VALUE_CHANNEL: tl.constexpr,
    OUTPUT_CHANNEL: tl.constexpr,
    GUARD: tl.constexpr,
):
    """Attention of one block of queries; see :func:`launch_attention` for the arguments."""
    z = tl.program_id(2).to(tl.int64)
    h = tl.program_id(1)
    kv_head = h // GROUP
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    inside = rows < queries

    q_ptrs = q_ptr + z * q_stride_z + h * q_stride_h + rows[:, None] * q_stride_n + d[None, :] * q_stride_d
    q = tl.load(q_ptrs, mask=inside[:, None] & (d[None, :] < HEAD_DIM), other=0)
    k_base = k_ptr + z * k_stride_z + kv_head * k_stride_h
    v_base = v_ptr + z * v_stride_z + kv_head * v_stride_h
    ks_base = ks_ptr.to(tl.pointer_type(tl.int32)) + z * ks_stride_z + kv_head * ks_stride_h
    mask_base = mask_ptr
    if MASK != "none":
        if MASK_PERIOD > 0:
            mask_base = mask_ptr + (z % MASK_PERIOD) * mask_stride_z + h * mask_stride_h
        else:
            mask_base = mask_ptr + z * mask_stride_z + h * mask_stride_h

    qs_base = qs_ptr.to(tl.pointer_type(tl.int32)) + z * qs_stride_z + h * qs_stride_h
    if QUERY_TOKEN:
        query_bits = tl.load(qs_base + rows * qs_stride_n, mask=inside, other=0x3F800000)[:, None]
    else:
        query_bits = tl.load(qs_base)
    usable = usable_scale(query_bits)
    largest = 0
    if KEY_TOKEN:
        largest_bits = tl.full((BLOCK_N,), 0, tl.int32)
        smallest_bits = tl.full((BLOCK_N,), 0x3F800000, tl.int32)
        for start in range(0, keys, BLOCK_N):
            columns = start + tl.arange(0, BLOCK_N)
            bits = tl.load(ks_base + columns * ks_stride_n, mask=columns < keys, other=0x00800000)
            largest_bits = tl.maximum(largest_bits, tl.where(usable_scale(bits), bits, 0x7F800000))
            smallest_bits = tl.minimum(smallest_bits, bits)
        most = tl.max(largest_bits, 0)
        usable = usable & (most < 0x7F800000) & (tl.min(smallest_bits, 0) > 0)
        largest = ((most >> 23) & 0xFF) - 150
        key_mantissa = largest * 0 + (1 << 23)
        key_exponent = largest + 1
    else:
        key_bits = tl.load(ks_base)
        usable = usable & usable_scale(key_bits)
        key_mantissa, key_exponent = split_scale(key_bits)
    mantissa, exponent = combine_scales(query_bits, key_mantissa, key_exponent, constant_mantissa, constant_exponent)
    if MASK == "bias":
        multiplier, fraction_bits = wide_multiplier(mantissa, exponent, COLUMN_BITS, 16)
    elif KEY_TOKEN:
        multiplier, fraction_bits = wide_multiplier(mantissa, exponent, COLUMN_BITS, 28)
    else:
        multiplier, fraction_bits = narrow_multiplier(mantissa, exponent, MOST, MOST_BITS, GUARD)

    row_max = tl.full((BLOCK_M, 1), MASKED, tl.int32)
    # row sums are a product with a matrix of ones: the tensor core adds them up for nothing
    total = tl.zeros((BLOCK_M, 16), tl.int32)
    high_total = tl.zeros((BLOCK_M, 16), tl.int32)
    accumulator = tl.zeros((BLOCK_M, BLOCK_DV), tl.int32)
    high = tl.zeros((BLOCK_M, BLOCK_DV), tl.int32)
    halves = tl.full((BLOCK_M, BLOCK_N), 64, tl.int8)
    ones = tl.full((BLOCK_N, 16), 1, tl.int8)
    ADD_OFFSET: tl.constexpr = BITS != 7 and not VALUE_SUMS
    # keys past the end are copies of the last: V's zero rows keep them out of the numerator, a weight of 0 out of
    # the row sum. Under a mask they are masked like any other.
    if CHECK:
        weight = ones
    else:
        weight = tl.where((keys & (-BLOCK_N)) + tl.arange(0, BLOCK_N)[:, None] < keys, ones, 0)

    if TILES > 0:
        # the whole row at once, in one tile or two; every load is under way before the first product
        n = _key_order(tl.arange(0, BLOCK_N))
        if TILES == 1:
            weight = tl.where(tl.arange(0, BLOCK_N)[:, None] < KEYS, ones, 0) if not CHECK else ones
        else:
            weight = tl.where(BLOCK_N + tl.arange(0, BLOCK_N)[:, None] < KEYS, ones, 0) if not CHECK else ones
        k0 = _load_key(k_base, k_stride_n, k_stride_d, n, d, KEYS, HEAD_DIM, BLOCK_D, TILES == 2)
        if TILES == 2:
            k1 = _load_key(k_base, k_stride_n, k_stride_d, BLOCK_N + n, d, KEYS, HEAD_DIM, BLOCK_D, False)
        v0 = _load_value(v_base, v_stride_n, v_stride_d, 0, KEYS, dv, VALUE_DIM, BLOCK_DV, BLOCK_N, VALUE_ROWS, TILES == 1)
        if TILES == 2:
            v1 = _load_value(v_base, v_stride_n, v_stride_d, BLOCK_N, KEYS, dv, VALUE_DIM, BLOCK_DV, BLOCK_N, VALUE_ROWS, True)
        s0, valid0 = _scores(
            q, k0, ks_base, ks_stride_n, mask_base, mask_stride_m, mask_stride_n, rows, n, queries, KEYS, multiplier,
            fraction_bits, largest, COLUMN_BITS, MASK, CAUSAL, KEY_TOKEN, CHECK, GUARD,
        )  # fmt: skip
        row_max = tl.max(s0, 1)[:, None]
        if TILES == 2:
            s1, valid1 = _scores(
                q, k1, ks_base, ks_stride_n, mask_base, mask_stride_m, mask_stride_n, rows, BLOCK_N + n, queries, KEYS,
                multiplier, fraction_bits, largest, COLUMN_BITS, MASK, CAUSAL, KEY_TOKEN, CHECK, GUARD,
            )  # fmt: skip
            row_max = tl.maximum(row_max, tl.max(s1, 1)[:, None])
        word = _probability_words(
            s0, valid0, row_max, multiplier, fraction_bits, MASK, KEY_TOKEN, QUADRATIC, BITS, NEAREST, OFFSET, CHECK, GUARD
        )
        accumulator, high, total, high_total = _accumulate(
            word, v0, weight if TILES == 1 else ones, halves, accumulator, high, total, high_total, BLOCK_M, BLOCK_N, BITS,
            ADD_OFFSET, GUARD,
        )  # fmt: skip
        if TILES == 2:
            word = _probability_words(
                s1, valid1, row_max, multiplier, fraction_bits, MASK, KEY_TOKEN, QUADRATIC, BITS, NEAREST, OFFSET, CHECK, GUARD
            )
            accumulator, high, total, high_total = _accumulate(
                word, v1, weight, halves, accumulator, high, total, high_total, BLOCK_M, BLOCK_N, BITS, ADD_OFFSET, GUARD
            )
        count = TILES * BLOCK_N if CHECK else KEYS
    else:
        last = keys
        full = keys & (-BLOCK_N)
        if CAUSAL:
            last = tl.minimum(keys, (tl.program_id(0) + 1) * BLOCK_M)
            full = tl.minimum(full, (tl.program_id(0) * BLOCK_M) & (-BLOCK_N))
        if MASK != "none":
            full = 0
        if not ONLINE:
            for phase in tl.static_range(2):
                for start in range(0 if phase == 0 else full, full if phase == 0 else last, BLOCK_N):
                    n = start + _key_order(tl.arange(0, BLOCK_N))
                    k = _load_key(k_base, k_stride_n, k_stride_d, n, d, keys, HEAD_DIM, BLOCK_D, phase == 0)
                    s, valid = _scores(
                        q, k, ks_base, ks_stride_n, mask_base, mask_stride_m, mask_stride_n, rows, n, queries, keys,
                        multiplier, fraction_bits, largest, COLUMN_BITS, MASK, CAUSAL, KEY_TOKEN, CHECK and phase == 1, GUARD,
                    )  # fmt: skip
                    row_max = tl.maximum(row_max, tl.max(s, 1)[:, None])
        for phase in tl.static_range(2):
            for start in range(0 if phase == 0 else full, full if phase == 0 else last, BLOCK_N):
                n = start + _key_order(tl.arange(0, BLOCK_N))
                k = _load_key(k_base, k_stride_n, k_stride_d, n, d, keys, HEAD_DIM, BLOCK_D, phase == 0)
                s, valid = _scores(
                    q, k, ks_base, ks_stride_n, mask_base, mask_stride_m, mask_stride_n, rows, n, queries, keys,
                    multiplier, fraction_bits, largest, COLUMN_BITS, MASK, CAUSAL, KEY_TOKEN, CHECK and phase == 1, GUARD,
                )  # fmt: skip
                if ONLINE:
                    new_max = tl.maximum(row_max, tl.max(s, 1)[:, None])
                    step = tl.where(row_max != MASKED, new_max - row_max, 0)
                    if KEY_TOKEN and MASK != "bias":
                        step = multiply_high(step, multiplier, GUARD)
                    elif MASK != "bias":
                        step = step * multiplier
                    factor = release_factor(step, fraction_bits, GUARD).to(tl.int64)
                    accumulator = ((accumulator.to(tl.int64) * factor) >> 24).to(tl.int32)
                    total = ((total.to(tl.int64) * factor) >> 24).to(tl.int32)
                    row_max = new_max
                word = _probability_words(
                    s, valid, row_max, multiplier, fraction_bits, MASK, KEY_TOKEN, QUADRATIC, BITS, NEAREST, OFFSET,
                    CHECK and phase == 1, GUARD,
                )  # fmt: skip
                v = _load_value(
                    v_base, v_stride_n, v_stride_d, start, keys, dv, VALUE_DIM, BLOCK_DV, BLOCK_N, VALUE_ROWS, phase == 1
                )
                accumulator, high, total, high_total = _accumulate(
                    word, v, ones if phase == 0 else weight, halves, accumulator, high, total, high_total, BLOCK_M, BLOCK_N,
                    BITS, ADD_OFFSET, GUARD,
                )  # fmt: skip
        count = keys
        if CHECK:
            count = tl.cdiv(last, BLOCK_N) * BLOCK_N

    total = tl.max(total, 1)[:, None]
    if BITS == 15:
        total += tl.max(high_total, 1)[:, None] * 256
    if BITS != 7:
        total += 128 * count
    if BITS != 7 and VALUE_SUMS:
        sums = tl.load(sums_ptr + (z * tl.num_programs(1) // GROUP + kv_head) * VALUE_DIM + dv, mask=dv < VALUE_DIM, other=0)
        accumulator += 128 * sums[None, :]
    if ONLINE:
        # ScaleRelease floors both sums apart, which can leave |O| a few units above 128 l
        accumulator = tl.minimum(tl.maximum(accumulator, -128 * total), 128 * total)
    bits, inverse = row_inverse(total, GUARD)
    if BITS == 15:
        numerator = high.to(tl.int64) * 256 + accumulator.to(tl.int64)
        scaled = ((numerator << 24) >> bits.to(tl.int64)).to(tl.int32)
    else:
        scaled = accumulator << (24 - bits)
    normalized = multiply_high(scaled, inverse, GUARD)
    if FLOOR_OUTPUT:
        floor = normalized >> 21
        remainder = accumulator - floor * total
        floor += tl.where(total > 0, tl.where(remainder >= total, 1, 0) - tl.where(remainder < 0, 1, 0), 0)
        normalized = floor << 21

    vs_ptrs = vs_ptr + z * vs_stride_z + kv_head * vs_stride_h
    os_ptrs = os_ptr + z * os_stride_z + h * os_stride_h
    if VALUE_CHANNEL:
        vs_ptrs += dv[None, :] * vs_stride_d
    if OUTPUT_CHANNEL:
        os_ptrs += dv[None, :] * os_stride_d
    o_ptrs = o_ptr + z * o_stride_z + h * o_stride_h + rows[:, None] * o_stride_n + dv[None, :] * o_stride_d
    stored = inside[:, None] & (dv[None, :] < VALUE_DIM)
    if o_ptr.dtype.element_ty == tl.int8:
        value_bits = tl.load(vs_ptrs.to(tl.pointer_type(tl.int32)), mask=(dv[None, :] < VALUE_DIM) if VALUE_CHANNEL else None)
        output_bits = tl.load(os_ptrs.to(tl.pointer_type(tl.int32)), mask=(dv[None, :] < VALUE_DIM) if OUTPUT_CHANNEL else None)
        out_multiplier, out_shift = output_multiplier(value_bits, output_bits, GUARD)
        tl.store(o_ptrs, requantize(normalized, out_multiplier, out_shift, GUARD), mask=stored)
    else:
        value_scale = tl.load(vs_ptrs, mask=(dv[None, :] < VALUE_DIM) if VALUE_CHANNEL else None)
        value_bits = value_scale.to(tl.int32, bitcast=True)
        result = normalized.to(tl.float32) * (value_scale * (1.0 / 2097152.0))
        good = usable & usable_scale(value_bits)
        if MASK == "bias":
            good = good & (row_max < POISON)
        result = tl.where(good, result, float("nan"))
        tl.store(o_ptrs, result.to(o_ptr.dtype.element_ty), mask=stored)


def kernel_constants(
    recipe: Recipe, head_dim: int, value_dim: int, mask: str, is_causal: bool, key_token: bool, guard: bool
) -> dict[str, Any]:
    """Return the constexpr arguments that follow from the recipe and the shapes (tiles excepted)."""
    offset, _, _ = fp.probability_constants(recipe.exponential, recipe.probability_bits)
    return {
        "HEAD_DIM": head_dim,
        "VALUE_DIM": value_dim,
        "BLOCK_D": max(32, triton.next_power_of_2(head_dim)),
        "BLOCK_DV": max(16, triton.next_power_of_2(value_dim)),
        "MASK": mask,
        "CAUSAL": is_causal,
        "KEY_TOKEN": key_token,
        "QUADRATIC": recipe.exponential == "quadratic",
        "BITS": recipe.probability_bits,
        "NEAREST": recipe.probability_rounding == "nearest",
        "OFFSET": offset,
        "ONLINE": recipe.normalization == "online",
        "FLOOR_OUTPUT": recipe.output == "value_scale",
        "COLUMN_BITS": fp.column_bits(head_dim),
        "MOST": fp.MULTIPLIER_BUDGET // head_dim,
        "MOST_BITS": (fp.MULTIPLIER_BUDGET // head_dim).bit_length(),
        "GUARD": guard,
    }


def choose_tiles(
    recipe: Recipe, head_dim: int, queries: int, keys: int, masked: bool, capability: tuple[int, int]
) -> tuple[int, int, int, int]:
    """Return (BLOCK_M, BLOCK_N, warps, stages) for an architecture. Tiles change speed, never a bit."""
    block_m = 64 if queries > 32 else 32 if queries > 16 else 16
    hopper = capability[0] == 9
    wide = head_dim > 64 or recipe.probability_bits == 15
    if recipe.normalization == "online":
        return block_m, recipe.key_block, 4, 2
    if keys <= 256 and not (masked and keys > 128):
        return block_m, max(32, min(128, triton.next_power_of_2(keys))), 8 if wide and not hopper and block_m == 64 else 4, 1
    if not hopper and wide:
        return block_m, 64, 8 if block_m == 64 else 4, 2
    return block_m, 64, 4, 3


def _strides(x: torch.Tensor, dims: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(0 if x.shape[dim] == 1 else x.stride(dim) for dim in dims)


class Call(NamedTuple):
    """One kernel launch, spelt out: what :func:`launch_attention` runs and ``qflash verify`` compiles."""

    kernel: Any
    grid: tuple[int, int, int]
    arguments: dict[str, Any]
    options: dict[str, int]

    def run(self) -> None:
        """Launch it on the tensors it names."""
        self.kernel[self.grid](**self.arguments, **self.options)


def _pack_value(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, list[Call]]:
    """Return V with its keys side by side, the sums of its channels, and the launches that fill both.

    The view returned has V's shape; its storage is (batch, heads, channels, keys up to a multiple of 128), zero
    past the end.
    """
    batch, heads, keys, channels = value.shape
    padded = triton.cdiv(keys, 128) * 128
    packed = torch.empty((batch, heads, channels, padded), dtype=torch.int8, device=value.device)
    sums = torch.empty((batch, heads, channels), dtype=torch.int32, device=value.device)
    block = min(32, triton.next_power_of_2(channels))
    calls = []
    for start in range(0, batch, 65535):
        arguments = {
            "v_ptr": value[start:],
            "packed_ptr": packed[start:],
            "sums_ptr": sums[start:],
            **{f"v_stride_{axis}": value.stride(dim) for dim, axis in enumerate("zhnd")},
            "keys": keys,
            "padded": padded,
            "VALUE_DIM": channels,
            "BLOCK_C": block,
            "BLOCK_N": 128,
        }
        grid = (triton.cdiv(channels, block), heads, min(65535, batch - start))
        calls.append(Call(pack_value_kernel, grid, arguments, {"num_warps": 4, "num_stages": 2}))
    return packed[..., :keys].mT, sums, calls


def attention_calls(
    query: torch.Tensor,
    query_scale: torch.Tensor,
    key: torch.Tensor,
    key_scale: torch.Tensor,
    value: torch.Tensor,
    value_scale: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    softmax_scale: float,
    output_scale: torch.Tensor | None,
    out: torch.Tensor,
    recipe: Recipe,
    *,
    tiles: tuple[int, int, int, int] | None = None,
    guard: bool = False,
    capability: tuple[int, int] | None = None,
) -> list[Call]:
    """Return the launches that fill ``out`` with the attention of int8 tensors, in order.

    Rows that fit two tiles are one launch; longer ones first bring V to the tensor core's order, which pays
    because every block of queries reads it. More than 65535 batch elements are split.

    Args:
        tiles: (BLOCK_M, BLOCK_N, warps, stages), for tests and tuning; chosen by shape if None.
        guard: compile for Triton's interpreter, without inline assembly.
        capability: the architecture to choose tiles for; the query's device if None.
    """
    batch, heads, queries, head_dim = query.shape
    keys, value_dim = key.shape[2], value.shape[3]
    if capability is None:
        capability = torch.cuda.get_device_capability(query.device) if query.device.type == "cuda" else (9, 0)
    block_m, block_n, warps, stages = tiles or choose_tiles(recipe, head_dim, queries, keys, mask is not None, capability)
    if block_m * triton.next_power_of_2(value_dim) > 16384:
        # past this the accumulators crowd out everything else and the compiler has been seen to emit a broken kernel
        raise ValueError(f"BLOCK_M must be at most {16384 // triton.next_power_of_2(value_dim)} here, got {block_m}")
    two_pass = recipe.normalization == "two_pass"
    row_tiles = triton.cdiv(keys, block_n) if two_pass and keys <= 2 * block_n else 0
    check = is_causal or mask is not None
    sums: torch.Tensor | None = None
    calls: list[Call] = []
    if keys > 256 and two_pass:
        value, sums, calls = _pack_value(value)
    kind = "none" if mask is None else "bias" if mask.dtype == torch.int32 else "bool"
    mask_view = query if mask is None else mask.view(torch.uint8) if mask.dtype == torch.bool else mask
    constant = fp.split_float(softmax_scale * math.log2(math.e))
    # a mask of one image's windows repeats over the batch; one that is given per batch element is sliced with it
    period = 0 if mask is None or mask.shape[0] in (1, batch) else mask.shape[0]
    step = 65535 // max(period, 1) * max(period, 1)
    fixed = {
        "queries": queries,
        "keys": keys,
        "constant_mantissa": constant[0],
        "constant_exponent": constant[1],
        "GROUP": heads // key.shape[1],
        "MASK_PERIOD": period,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "TILES": row_tiles,
        "KEYS": keys if row_tiles else 0,
        "CHECK": check,
        "VALUE_SUMS": sums is not None and not is_causal,
        "VALUE_ROWS": value.stride(2) != 1 or value.shape[2] == 1,
        "QUERY_TOKEN": query_scale.shape[2] > 1,
        "VALUE_CHANNEL": value_scale.shape[3] > 1,
        "OUTPUT_CHANNEL": output_scale is not None and output_scale.shape[3] > 1,
        **kernel_constants(recipe, head_dim, value_dim, kind, is_causal, key_scale.shape[2] > 1, guard),
    }
    for start in range(0, batch, step):

        def part(x: torch.Tensor, start: int = start) -> torch.Tensor:
            return x if start == 0 or x.shape[0] == 1 else x[start:]

        arguments: dict[str, Any] = {}
        scales = {"qs": query_scale, "ks": key_scale, "vs": value_scale}
        scales["os"] = value_scale if output_scale is None else output_scale
        for name, x in (("q", query), ("k", key), ("v", value), ("o", out)):
            arguments[f"{name}_ptr"] = part(x)
            arguments.update({f"{name}_stride_{axis}": x.stride(dim) for dim, axis in enumerate("zhnd")})
        for name, x in scales.items():
            arguments[f"{name}_ptr"] = part(x)
            axes = ((0, "z"), (1, "h"), (2, "n")) if name in ("qs", "ks") else ((0, "z"), (1, "h"), (3, "d"))
            strides = _strides(x, tuple(dim for dim, _ in axes))
            arguments.update({f"{name}_stride_{axis}": stride for (_, axis), stride in zip(axes, strides, strict=True)})
        arguments["mask_ptr"] = mask_view if period else part(mask_view)
        arguments["sums_ptr"] = query if sums is None else part(sums)
        strides = (0, 0, 0, 0) if mask is None else _strides(mask_view, (0, 1, 2, 3))
        arguments.update({f"mask_stride_{axis}": stride for axis, stride in zip("zhmn", strides, strict=True)})
        grid = (triton.cdiv(queries, block_m), heads, min(step, batch - start))
        calls.append(Call(attention_kernel, grid, arguments | fixed, {"num_warps": warps, "num_stages": stages}))
    return calls


def launch_attention(
    query: torch.Tensor,
    query_scale: torch.Tensor,
    key: torch.Tensor,
    key_scale: torch.Tensor,
    value: torch.Tensor,
    value_scale: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    softmax_scale: float,
    output_scale: torch.Tensor | None,
    out_dtype: torch.dtype,
    recipe: Recipe,
    *,
    tiles: tuple[int, int, int, int] | None = None,
) -> torch.Tensor:
    """Run :func:`qflash.reference.int8_attention` as one kernel: same arguments, same bits."""
    guard = query.device.type == "cpu"
    # the interpreter truncates where bfloat16 must round, so there PyTorch does that one conversion
    stored_dtype = torch.float32 if guard and out_dtype == torch.bfloat16 else out_dtype
    out = torch.empty((*query.shape[:3], value.shape[3]), dtype=stored_dtype, device=query.device)
    if out.numel() == 0 or key.shape[2] == 0:
        return out.zero_().to(out_dtype)
    calls = attention_calls(
        query, query_scale, key, key_scale, value, value_scale, mask, is_causal, softmax_scale, output_scale, out, recipe,
        tiles=tiles, guard=guard,
    )  # fmt: skip
    for call in calls:
        call.run()
    return out.to(out_dtype)
