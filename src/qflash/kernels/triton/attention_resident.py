"""Attention for rows of up to 256 keys, from int8 or from float, in one launch (Triton, any NVIDIA GPU from sm_80 on).

Computes steps 1 to 9 of ``docs/algorithm.md`` (Equations 1 to 11, Algorithm 1 with the row maximum known first) for the
shapes of vision transformers. A program takes one head, or every n-th block of its queries (grid: n programs of a head,
heads, batch). "Resident" means that the scores of a row stay in registers between the maximum and the exponential, as one
tile of BLOCK_N keys or two (TILES), so that Q K^T is computed once.

Order of a program:

1. Keys and values are loaded once, and with QUANTIZE quantised here: ranges per channel, then scales, then int8.
2. For each block of BLOCK_M queries: load (and quantise) it, scores of all tiles, row maximum, probabilities, products with
   V and with ones, normalise, store.

The compiler chooses the layouts. Int8 keys and values lie in shared memory, where the tensor core reads them in every
block. Keys stand in :func:`.common.tile_ops.key_order`, so that probabilities become the operand of the next product
without a shuffle. Floats are loaded as four sets of rows, 4i + 0, 1, 2 and 3 ("quads"): interleaved, four neighbouring
keys of a channel are one register, and the transposed store of V takes words instead of bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.fixed_point import split_scale, twice_mean, usable_scale
from ..common.quantize_ops import (
    amplitude_to_scale,
    centered_scale,
    higher,
    higher_magnitude,
    highest,
    inverse_scale,
    least_to_scale,
    lower,
    lowest,
    nan_max,
    nan_min,
    round_centered,
    round_to_int8,
    zero_point,
)
from ..common.tile_ops import (
    accumulate,
    bias_bases,
    column_scales,
    finish,
    interleave,
    key_order,
    load_key,
    load_value,
    mask_pointer,
    output_factors,
    probability_words,
    row_multiplier,
    scores,
    to_rows,
)


@triton.jit
def _combine_ranges(low_a, high_a, most_a, low_b, high_b, most_b):
    """Reduction of (minimum, maximum, largest magnitude) of channels, for one pass over all three; a NaN wins."""
    return nan_min(low_a, low_b), nan_max(high_a, high_b), nan_max(most_a, most_b)


@triton.jit
def _load_rows(
    base, stride_n, stride_d, place, n, keys, channels, CHANNELS: tl.constexpr, CLAMP: tl.constexpr, PLACES: tl.constexpr
):  # fmt: skip
    """Rows ``n`` of a float tensor, (len(n), channels) as stored; past the last key the last is repeated (CLAMP), or zero.

    With PLACES row n is taken from where ``place`` says.
    """
    inside = channels[None, :] < CHANNELS
    if not CLAMP:
        inside = inside & (n[:, None] < keys)
    if CLAMP or PLACES:
        n = tl.minimum(n, keys - 1)
    if PLACES:
        n = tl.load(place + n)
    return tl.load(base + n[:, None] * stride_n + channels[None, :] * stride_d, mask=inside, other=0.0)


@triton.jit
def _load_quads(
    base, stride_n, stride_d, place, start, keys, channels, CHANNELS: tl.constexpr, BLOCK_N: tl.constexpr, KEY: tl.constexpr,
    CLAMP: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """A (BLOCK_N, channels) tile as four tiles of a quarter of its rows, 4i + 0, 1, 2 and 3; K in :func:`key_order`.

    Past the last key the last is repeated (CLAMP), or zero.
    """
    n = 4 * tl.arange(0, BLOCK_N // 4)
    n0, n1, n2, n3 = n, n + 1, n + 2, n + 3
    if KEY:
        n0, n1, n2, n3 = key_order(n0), key_order(n1), key_order(n2), key_order(n3)
    return (
        _load_rows(base, stride_n, stride_d, place, start + n0, keys, channels, CHANNELS, CLAMP, PLACES),
        _load_rows(base, stride_n, stride_d, place, start + n1, keys, channels, CHANNELS, CLAMP, PLACES),
        _load_rows(base, stride_n, stride_d, place, start + n2, keys, channels, CHANNELS, CLAMP, PLACES),
        _load_rows(base, stride_n, stride_d, place, start + n3, keys, channels, CHANNELS, CLAMP, PLACES),
    )


@triton.jit
def _lowest_of_four(a, b, c, d, GUARD: tl.constexpr):
    """Elementwise minimum of four tiles as loaded."""
    return lower(lower(a, b, GUARD), lower(c, d, GUARD), GUARD)


@triton.jit
def _highest_of_four(a, b, c, d, GUARD: tl.constexpr):
    """Elementwise maximum of four tiles as loaded."""
    return higher(higher(a, b, GUARD), higher(c, d, GUARD), GUARD)


@triton.jit
def _largest_of_four(a, b, c, d, GUARD: tl.constexpr):
    """Elementwise largest magnitude of four tiles as loaded."""
    return higher(higher_magnitude(a, b, GUARD), higher_magnitude(c, d, GUARD), GUARD)


@triton.jit
def _quantize_row(x, middle, inverse, CENTER: tl.constexpr, GUARD: tl.constexpr):
    """One of the four tiles as int8, less the channels' midranges if CENTER."""
    y = x.to(tl.float32)
    if CENTER:
        y = y - middle
    return round_to_int8(y, inverse, GUARD)


@triton.jit
def _quantize_quads(
    a, b, c, d, middle, inverse, CENTER: tl.constexpr, BLOCK_N: tl.constexpr, CHANNELS: tl.constexpr, GUARD: tl.constexpr
):
    """Four tiles of rows quantised and interleaved: (BLOCK_N, CHANNELS) int8."""
    a = _quantize_row(a, middle, inverse, CENTER, GUARD)
    b = _quantize_row(b, middle, inverse, CENTER, GUARD)
    c = _quantize_row(c, middle, inverse, CENTER, GUARD)
    d = _quantize_row(d, middle, inverse, CENTER, GUARD)
    return interleave(a, b, c, d, BLOCK_N, CHANNELS)


@triton.jit
def _quantize_values(
    a, b, c, d, inverse, zero, CENTER: tl.constexpr, START: tl.constexpr, KEYS: tl.constexpr, BLOCK_N: tl.constexpr,
    CHANNELS: tl.constexpr, GUARD: tl.constexpr,
):  # fmt: skip
    """Four tiles of values quantised and interleaved, (BLOCK_N, CHANNELS) int8; with CENTER less their zero points.

    Values past the last key are 0.
    """
    if CENTER:
        a = round_centered(a.to(tl.float32), inverse, zero, GUARD)
        b = round_centered(b.to(tl.float32), inverse, zero, GUARD)
        c = round_centered(c.to(tl.float32), inverse, zero, GUARD)
        d = round_centered(d.to(tl.float32), inverse, zero, GUARD)
        x = interleave(a, b, c, d, BLOCK_N, CHANNELS)
        if START + BLOCK_N > KEYS:
            x = tl.where((START + tl.arange(0, BLOCK_N) < KEYS)[:, None], x, 0)
    else:
        x = _quantize_quads(a, b, c, d, 0.0, inverse, False, BLOCK_N, CHANNELS, GUARD)
    return x


@triton.jit
def short_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, qs_ptr, ks_ptr, vs_ptr, os_ptr, vo_ptr, mask_ptr, strides, place_ptr, numbers,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TILES: tl.constexpr, KEYS: tl.constexpr, INVERSE_COUNT: tl.constexpr,
    HEADS: tl.constexpr, MASKING: tl.constexpr, ARITHMETIC: tl.constexpr, GIVEN: tl.constexpr, GUARD: tl.constexpr,
):  # fmt: skip
    """Attention of one head; launched by :func:`.dispatch.launch_attention` and :func:`.dispatch.launch_fused`.

    With QUANTIZE query, key and value are float, their scales are found here and the output is float. Strides are in elements;
    ``constant`` is ``scale * log2(e)``, INVERSE_COUNT that of :func:`.common.fixed_point.twice_mean`. Other constants are
    objects of :mod:`.triton.constants`.
    """
    GROUP: tl.constexpr = HEADS.GROUP
    BLOCK_D: tl.constexpr = HEADS.BLOCK_D
    BLOCK_DV: tl.constexpr = HEADS.BLOCK_DV
    MASK_PERIOD: tl.constexpr = MASKING.MASK_PERIOD
    VALUE_CHANNEL: tl.constexpr = GIVEN.VALUE_CHANNEL
    OUTPUT_CHANNEL: tl.constexpr = GIVEN.OUTPUT_CHANNEL
    VALUE_OFFSET: tl.constexpr = GIVEN.VALUE_OFFSET
    QUANTIZE: tl.constexpr = GIVEN.QUANTIZE
    HEAD_DIM: tl.constexpr = HEADS.HEAD_DIM
    PLACES: tl.constexpr = GIVEN.PLACES
    VALUE_DIM: tl.constexpr = HEADS.VALUE_DIM
    CENTER: tl.constexpr = GIVEN.CENTER
    QUERY_TOKEN: tl.constexpr = GIVEN.QUERY_TOKEN
    VALUE_ROWS: tl.constexpr = GIVEN.VALUE_ROWS
    KEY_TOKEN: tl.constexpr = GIVEN.KEY_TOKEN
    CHECK: tl.constexpr = MASKING.CHECK
    BITS: tl.constexpr = ARITHMETIC.BITS
    EXACT: tl.constexpr = ARITHMETIC.EXACT
    COLUMN_BITS: tl.constexpr = ARITHMETIC.COLUMN_BITS
    MOST: tl.constexpr = ARITHMETIC.MOST
    MOST_BITS: tl.constexpr = ARITHMETIC.MOST_BITS
    CAUSAL: tl.constexpr = MASKING.CAUSAL
    QUADRATIC: tl.constexpr = ARITHMETIC.QUADRATIC
    NEAREST: tl.constexpr = ARITHMETIC.NEAREST
    OFFSET: tl.constexpr = ARITHMETIC.OFFSET
    FLOOR_OUTPUT: tl.constexpr = ARITHMETIC.FLOOR_OUTPUT
    MASK: tl.constexpr = MASKING.MASK
    z = tl.program_id(2).to(tl.int64)
    h = tl.program_id(1)
    kv_head = h // GROUP
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    q_base = q_ptr + z * strides.q_stride_z + h * strides.q_stride_h
    k_base = k_ptr + z * strides.k_stride_z + kv_head * strides.k_stride_h
    v_base = v_ptr + z * strides.v_stride_z + kv_head * strides.v_stride_h
    qs_base = qs_ptr.to(tl.pointer_type(tl.int32)) + z * strides.qs_stride_z + h * strides.qs_stride_h
    ks_base = ks_ptr.to(tl.pointer_type(tl.int32)) + z * strides.ks_stride_z + kv_head * strides.ks_stride_h
    vs_base = vs_ptr + z * strides.vs_stride_z + kv_head * strides.vs_stride_h
    os_base = os_ptr + z * strides.os_stride_z + h * strides.os_stride_h
    vo_base = vo_ptr + z * strides.vo_stride_z + kv_head * strides.vo_stride_h
    mask_base = mask_pointer(mask_ptr, z, h, strides.mask_stride_z, strides.mask_stride_h, MASK_PERIOD)
    blocks = tl.cdiv(numbers.queries, BLOCK_M)
    # output factors are formed once, before the loop, if there is one per channel or if rows are short and blocks many
    EARLY: tl.constexpr = VALUE_CHANNEL or OUTPUT_CHANNEL or VALUE_OFFSET or TILES == 1

    if QUANTIZE:
        # all loads are issued before the first use, and one reduction finds all ranges
        place = mask_pointer(place_ptr, z, kv_head, numbers.place_stride_z, numbers.place_stride_h, MASK_PERIOD)
        ka, kb, kc, kd = _load_quads(
            k_base, strides.k_stride_n, strides.k_stride_d, place, 0, KEYS, d, HEAD_DIM, BLOCK_N, True, True, PLACES
        )  # fmt: skip
        va, vb, vc, vd = _load_quads(
            v_base, strides.v_stride_n, strides.v_stride_d, place, 0, KEYS, dv, VALUE_DIM, BLOCK_N, False,
            VALUE_OFFSET, PLACES,
        )  # fmt: skip
        if TILES == 2:
            ke, kf, kg, kh = _load_quads(
                k_base, strides.k_stride_n, strides.k_stride_d, place, BLOCK_N, KEYS, d, HEAD_DIM, BLOCK_N, True, True,
                PLACES,
            )  # fmt: skip
            ve, vf, vg, vh = _load_quads(
                v_base, strides.v_stride_n, strides.v_stride_d, place, BLOCK_N, KEYS, dv, VALUE_DIM, BLOCK_N, False,
                VALUE_OFFSET, PLACES,
            )  # fmt: skip
        low, high = _lowest_of_four(ka, kb, kc, kd, GUARD), _highest_of_four(ka, kb, kc, kd, GUARD)
        if TILES == 2:
            low = lower(low, _lowest_of_four(ke, kf, kg, kh, GUARD), GUARD)
            high = higher(high, _highest_of_four(ke, kf, kg, kh, GUARD), GUARD)
        if VALUE_OFFSET:
            value_low, value_high = _lowest_of_four(va, vb, vc, vd, GUARD), _highest_of_four(va, vb, vc, vd, GUARD)
            if TILES == 2:
                value_low = lower(value_low, _lowest_of_four(ve, vf, vg, vh, GUARD), GUARD)
                value_high = higher(value_high, _highest_of_four(ve, vf, vg, vh, GUARD), GUARD)
            value_low, value_high = value_low.to(tl.float32), value_high.to(tl.float32)
            low, high = lowest(low.to(tl.float32), 0, GUARD), highest(high.to(tl.float32), 0, GUARD)
            value_middle, most = centered_scale(lowest(value_low, 0, GUARD), highest(value_high, 0, GUARD))
        else:
            most = _largest_of_four(va, vb, vc, vd, GUARD)
            if TILES == 2:
                most = higher(most, _largest_of_four(ve, vf, vg, vh, GUARD), GUARD)
        if VALUE_OFFSET:
            pass
        elif BLOCK_D == BLOCK_DV and not GUARD:
            low, high, most = tl.reduce((low.to(tl.float32), high.to(tl.float32), most.to(tl.float32)), 0, _combine_ranges)
        else:
            low, high = lowest(low.to(tl.float32), 0, GUARD), highest(high.to(tl.float32), 0, GUARD)
            most = highest(most.to(tl.float32), 0, GUARD)
        middle = low * 0.5 + high * 0.5
        if CENTER:
            low, high = low - middle, high - middle
        amplitude = highest(nan_max(tl.abs(low), tl.abs(high)), 0, GUARD)
        if not VALUE_CHANNEL:
            most = tl.zeros((BLOCK_DV,), tl.float32) + highest(most, 0, GUARD)
        key_scale = amplitude_to_scale(tl.zeros((1, 1), tl.float32) + amplitude)
        if VALUE_OFFSET:
            value_scale = least_to_scale(most)[None, :]
        else:
            value_scale = amplitude_to_scale(most)[None, :]
        key_inverse, value_inverse = inverse_scale(key_scale, GUARD), inverse_scale(value_scale, GUARD)
        key_bits = tl.max(tl.max(key_scale.to(tl.int32, bitcast=True), 0), 0)
        middle = middle[None, :]
        value_zero, value_offset = 0.0, 0
        if VALUE_OFFSET:
            value_zero = zero_point(value_middle[None, :], value_inverse, GUARD)
            value_offset = value_zero * value_scale
        k0 = tl.trans(_quantize_quads(ka, kb, kc, kd, middle, key_inverse, CENTER, BLOCK_N, BLOCK_D, GUARD))
        v0 = _quantize_values(va, vb, vc, vd, value_inverse, value_zero, VALUE_OFFSET, 0, KEYS, BLOCK_N, BLOCK_DV, GUARD)
        if TILES == 2:
            k1 = tl.trans(_quantize_quads(ke, kf, kg, kh, middle, key_inverse, CENTER, BLOCK_N, BLOCK_D, GUARD))
            v1 = _quantize_values(
                ve, vf, vg, vh, value_inverse, value_zero, VALUE_OFFSET, BLOCK_N, KEYS, BLOCK_N, BLOCK_DV, GUARD
            )
        if not QUERY_TOKEN:
            # one scale for the head's numbers.queries: a pass over them to find it
            query_amplitude = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
            for block in range(blocks):
                rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
                q = _load_rows(
                    q_base, strides.q_stride_n, strides.q_stride_d, 0, rows, numbers.queries, d, HEAD_DIM, False, False
                )
                query_amplitude = nan_max(query_amplitude, tl.abs(q.to(tl.float32)))
            query_amplitude = highest(highest(query_amplitude, 1, GUARD), 0, GUARD)
            head_scale = amplitude_to_scale(tl.zeros((BLOCK_M, 1), tl.float32) + query_amplitude)
    else:
        n0 = key_order(tl.arange(0, BLOCK_N))
        k0 = load_key(k_base, strides.k_stride_n, strides.k_stride_d, n0, d, KEYS, HEAD_DIM, BLOCK_D, TILES == 2)
        v0 = load_value(
            v_base,
            strides.v_stride_n,
            strides.v_stride_d,
            0,
            KEYS,
            dv,
            VALUE_DIM,
            BLOCK_DV,
            BLOCK_N,
            VALUE_ROWS,
            TILES == 1,
        )
        if TILES == 2:
            k1 = load_key(k_base, strides.k_stride_n, strides.k_stride_d, BLOCK_N + n0, d, KEYS, HEAD_DIM, BLOCK_D, False)
            v1 = load_value(
                v_base, strides.v_stride_n, strides.v_stride_d, BLOCK_N, KEYS, dv, VALUE_DIM, BLOCK_DV, BLOCK_N,
                VALUE_ROWS, True,
            )  # fmt: skip

    if QUANTIZE:
        keys_usable = usable_scale(key_bits)
        key_mantissa, key_exponent = split_scale(key_bits)
        largest = 0
        factor, shift, half = value_scale, value_offset, 0
    else:
        keys_usable, key_mantissa, key_exponent, largest = column_scales(ks_base, strides.ks_stride_n, KEYS, BLOCK_N, KEY_TOKEN)
        if EARLY:
            factor, shift, half = output_factors(
                o_ptr, vs_base, strides.vs_stride_d, os_base, strides.os_stride_d, vo_base, strides.vo_stride_d,
                VALUE_DIM, BLOCK_DV, VALUE_CHANNEL, OUTPUT_CHANNEL, VALUE_OFFSET, GUARD,
            )  # fmt: skip
    # Keys past the end are copies of the last: V's zero rows keep them out of the numerator, a weight of 0 out of the row sum.
    # With CHECK they are masked.
    ones = tl.full((16, BLOCK_N), 1, tl.int8)
    weight = ones
    if not CHECK and KEYS < TILES * BLOCK_N:
        weight = tl.where((TILES - 1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :] < KEYS, ones, 0)
    # transposed, so that neighbouring keys, which the tensor core reads together, are written together
    ones, weight = tl.trans(ones), tl.trans(weight)
    offsets = tl.full((BLOCK_M, BLOCK_N), -127 if BITS == 8 else 64, tl.int8)
    COUNT: tl.constexpr = TILES * BLOCK_N if CHECK else KEYS
    mean = 0
    if EXACT:
        sums = tl.sum(v0.to(tl.int32), 0)
        if TILES == 2:
            sums += tl.sum(v1.to(tl.int32), 0)
        mean = twice_mean(sums, INVERSE_COUNT, GUARD)[None, :]

    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
        inside = rows < numbers.queries
        q_ptrs = q_base + rows[:, None] * strides.q_stride_n + d[None, :] * strides.q_stride_d
        q = tl.load(q_ptrs, mask=inside[:, None] & (d[None, :] < HEAD_DIM), other=0)
        if QUANTIZE:
            x = q.to(tl.float32)
            if QUERY_TOKEN:
                query_scale = amplitude_to_scale(highest(tl.abs(x), 1, GUARD))[:, None]
            else:
                query_scale = head_scale
            q = round_to_int8(x, inverse_scale(query_scale, GUARD), GUARD)
            query_bits = query_scale.to(tl.int32, bitcast=True)
        elif QUERY_TOKEN:
            query_bits = tl.load(qs_base + rows * strides.qs_stride_n, mask=inside, other=0x3F800000)[:, None]
        else:
            query_bits = tl.load(qs_base)
        if (QUANTIZE or QUERY_TOKEN) and not GUARD:
            query_bits = to_rows(q, query_bits, BLOCK_D)
        usable = keys_usable & usable_scale(query_bits)
        multiplier, fraction_bits, drop = row_multiplier(
            query_bits, key_mantissa, key_exponent, numbers.constant_mantissa, numbers.constant_exponent, MASK,
            KEY_TOKEN, COLUMN_BITS, MOST, MOST_BITS, GUARD,
        )  # fmt: skip
        base = 0.0
        if MASK == "bias" and mask_ptr.dtype.element_ty.is_floating():
            base, even = bias_bases(
                mask_base, strides.mask_stride_m, strides.mask_stride_n, rows, numbers.queries, KEYS, BLOCK_M, BLOCK_N, TILES
            )
            multiplier = tl.where(even, 0, multiplier)
        s0 = scores(
            q, k0, ks_base, strides.ks_stride_n, mask_base, strides.mask_stride_m, strides.mask_stride_n, rows, 0,
            numbers.queries, KEYS, multiplier, fraction_bits, drop, largest, base, BLOCK_M, BLOCK_N, COLUMN_BITS,
            MASK, CAUSAL, KEY_TOKEN, CHECK, GUARD,
        )  # fmt: skip
        row_max = tl.max(s0, 1)[:, None]
        if TILES == 2:
            s1 = scores(
                q, k1, ks_base, strides.ks_stride_n, mask_base, strides.mask_stride_m, strides.mask_stride_n, rows, BLOCK_N,
                numbers.queries, KEYS, multiplier, fraction_bits, drop, largest, base, BLOCK_M, BLOCK_N, COLUMN_BITS,
                MASK, CAUSAL, KEY_TOKEN, CHECK, GUARD,
            )  # fmt: skip
            row_max = tl.maximum(row_max, tl.max(s1, 1)[:, None])
        total = tl.zeros((BLOCK_M, 16), tl.int32)
        high_total = tl.zeros((BLOCK_M, 16), tl.int32)
        accumulator = tl.zeros((BLOCK_M, BLOCK_DV), tl.int32)
        high_part = tl.zeros((BLOCK_M, BLOCK_DV), tl.int32)
        word = probability_words(
            s0, row_max, multiplier, fraction_bits, MASK, KEY_TOKEN, QUADRATIC, BITS,
            NEAREST, OFFSET, CHECK, GUARD,
        )  # fmt: skip
        accumulator, high_part, total, high_total = accumulate(
            word, v0, weight if TILES == 1 else ones, offsets, accumulator, high_part, total, high_total, BLOCK_M, BLOCK_N,
            BITS, EXACT, BITS != 7, GUARD,
        )  # fmt: skip
        if TILES == 2:
            word = probability_words(
                s1, row_max, multiplier, fraction_bits, MASK, KEY_TOKEN, QUADRATIC, BITS,
                NEAREST, OFFSET, CHECK, GUARD,
            )  # fmt: skip
            accumulator, high_part, total, high_total = accumulate(
                word, v1, weight, offsets, accumulator, high_part, total, high_total, BLOCK_M, BLOCK_N, BITS,
                EXACT, BITS != 7, GUARD,
            )  # fmt: skip
        if not QUANTIZE and not EARLY:
            # one number: cheap to form in every block, and here it is off the critical path
            factor, shift, half = output_factors(
                o_ptr, vs_base, 0, os_base, 0, vo_base, 0, VALUE_DIM, BLOCK_DV, False, False, False, GUARD
            )
        o_ptrs = (
            o_ptr
            + z * strides.o_stride_z
            + h * strides.o_stride_h
            + rows[:, None] * strides.o_stride_n
            + dv[None, :] * strides.o_stride_d
        )
        finish(
            accumulator, high_part, total, high_total, COUNT, mean, row_max, usable, factor, shift, half, o_ptrs,
            inside[:, None] & (dv[None, :] < VALUE_DIM), BITS, EXACT, VALUE_OFFSET,
            FLOOR_OUTPUT, MASK, CHECK, GUARD,
        )  # fmt: skip
