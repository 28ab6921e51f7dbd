"""Attention for rows of any length on int8, and the kernel that packs V for it (Triton, any NVIDIA GPU from sm_80 on).

Computes steps 2 to 9 of ``docs/algorithm.md`` (Equations 3 to 14, Algorithm 1). A program takes one block of BLOCK_M
queries of one head (grid: blocks, heads, batch) and loads tiles of BLOCK_N keys in loops. "Streaming" means that scores
do not fit the chip, so with two passes the keys are read twice:

1. for the row maximum: scores of all tiles, kept nowhere;
2. for the rest: the scores again, probabilities, products with V and with ones.

After that it normalises and stores. With ``normalization="online"`` there is one pass (Algorithm 1): before each tile of
``key_block`` keys the sums are scaled by ScaleRelease to the new maximum (Equations 12 to 14).

Rows of more than 65536 keys (WIDE_SUMS) are added up in sections of so many, whose sums fit 32 bits; the sections are added in
64 bits. Where tensors reach further than 32-bit offsets (WIDE_OFFSETS) tokens are counted in 64 bits.

The compiler chooses the layouts: queries, scores and accumulators in registers, tiles of keys and values in shared memory,
prefetched by its software pipelining. Each pass is two loops, whole tiles and the rest, so that the first needs no masks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...specification import fixed_point as fp
from ..common.fixed_point import inverse_of_count, multiply_high, release_factor, split_scale, twice_mean, usable_scale
from ..common.quantize_ops import CHUNKS
from ..common.tile_ops import (
    MASKED,
    MOST_ROUNDED_KEYS,
    accumulate,
    column_scales,
    finish,
    key_order,
    load_key,
    load_value,
    mask_pointer,
    output_factors,
    packed_sequence,
    packed_start,
    probability_words,
    row_multiplier,
    row_of_channel,
    scores,
    to_rows,
)

SECTION_KEYS = tl.constexpr(fp.SECTION_KEYS)


@triton.jit
def pack_value_kernel(
    v_ptr, packed_ptr, sums_ptr, v_stride_z, v_stride_h, v_stride_n, v_stride_d, keys, padded, chunk,
    VALUE_DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr, PERMUTED: tl.constexpr,
    WIDE_OFFSETS: tl.constexpr,
):  # fmt: skip
    """Write a chunk of a head's V as (channels, keys), as the tensor core reads it, and sum its channels over the chunk.

    A head has WIDTH channels there, zero from VALUE_DIM on, and ``padded`` keys, zero past the last. With PERMUTED keys
    are in :func:`.common.tile_ops.inverse_key_order` and channels in :func:`.common.tile_ops.row_of_channel`, as
    :mod:`.sm90.attention_streaming` takes them. Program x is a chunk of ``chunk`` keys and a block of BLOCK_C channels.
    Sums (int32) are stored per chunk rather than added atomically: nothing has to be cleared before.
    """
    z, h = tl.program_id(2).to(tl.int64), tl.program_id(1)
    if WIDE_OFFSETS:
        h, v_stride_n = tl.cast(h, tl.int64), tl.cast(v_stride_n, tl.int64)
    blocks = (WIDTH + BLOCK_C - 1) // BLOCK_C
    part = tl.program_id(0) // blocks
    begin = part * chunk
    channels = tl.program_id(0) % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    rows = row_of_channel(channels, WIDTH) if PERMUTED else channels
    head = z * tl.num_programs(1) + h
    v_base = v_ptr + z * v_stride_z + h * v_stride_h
    sums = tl.zeros((BLOCK_C,), tl.int32)
    for start in range(begin, tl.minimum(begin + chunk, padded), BLOCK_N):
        v = load_value(v_base, v_stride_n, v_stride_d, start, keys, channels, VALUE_DIM, BLOCK_C, BLOCK_N, True, True, PERMUTED)
        sums += tl.sum(v.to(tl.int32), 0)
        n = start + tl.arange(0, BLOCK_N)
        out = packed_ptr + (head * WIDTH + rows[None, :]) * padded + n[:, None]
        tl.store(out, v, mask=(channels[None, :] < WIDTH) & (n[:, None] < padded))
    parts = tl.num_programs(0) // blocks
    tl.store(sums_ptr + (head * parts + part) * WIDTH + channels, sums, mask=channels < WIDTH)


@triton.jit
def pack_key_kernel(
    k_ptr, packed_ptr, k_stride_z, k_stride_h, k_stride_n, keys, WORDS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write a block of a head's keys as rows of WIDTH words of eight channels; from WORDS on nothing is written.

    The copy engine then reads whole lines of memory, whatever the channels and the tensor's strides, which are in words.
    """
    z, h = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64)
    n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)[:, None]
    word = tl.arange(0, WIDTH)[None, :]
    inside = (n < keys) & (word < WORDS)
    words = k_ptr.to(tl.pointer_type(tl.int64)) + z * k_stride_z + h * k_stride_h
    packed = packed_ptr.to(tl.pointer_type(tl.int64)) + (z * tl.num_programs(1) + h) * keys * WIDTH
    tl.store(packed + n * WIDTH + word, tl.load(words + n * k_stride_n + word, mask=inside), mask=inside)


@triton.jit
def pack_mask_kernel(
    mask_ptr, packed_ptr, stride_z, stride_h, stride_m, stride_n, heads, rows, keys, padded, BLOCK_N: tl.constexpr,
    WIDE_OFFSETS: tl.constexpr,
):  # fmt: skip
    """Write a block of a row of a mask to a row of ``padded`` elements; past the last key nothing is written."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    if WIDE_OFFSETS:
        stride_n = tl.cast(stride_n, tl.int64)
    head = row // rows
    begin = mask_ptr + head // heads * stride_z + head % heads * stride_h + row % rows * stride_m
    inside = n < keys
    tl.store(packed_ptr + row * padded + n, tl.load(begin + n * stride_n, mask=inside), mask=inside)


@triton.jit
def _add_keys(
    q, key, value, mask, rows, channels, start, queries, keys, factors, weight, offsets, row_max, sums, INSIDE: tl.constexpr,
    WIDE_SUMS: tl.constexpr, ADD_OFFSET: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEADS: tl.constexpr,
    MASKING: tl.constexpr, ARITHMETIC: tl.constexpr, GIVEN: tl.constexpr, GUARD: tl.constexpr,
):  # fmt: skip
    """Add a tile of keys: scores, probabilities, products with V and ones; after ScaleRelease if ONLINE.

    INSIDE says that no key of the tile is past the last or masked by the causal order. With ONLINE and WIDE_SUMS the products
    are added to ``wide``, int64, which ScaleRelease scales; else that comes back as it is.

    Args:
        key, value: pointers to them, strides of tokens and channels; of keys the pointer to their scales and its stride, too.
        mask: the pointer to it and its strides.
        channels: of keys and of values.
        factors: of scores: multiplier, fraction bits, drop, and the largest scale of a key.
        sums: accumulator, high, total, high_total, wide.

    Returns:
        row_max, and each of the sums.
    """
    HEAD_DIM: tl.constexpr = HEADS.HEAD_DIM
    BLOCK_D: tl.constexpr = HEADS.BLOCK_D
    COLUMN_BITS: tl.constexpr = ARITHMETIC.COLUMN_BITS
    CAUSAL: tl.constexpr = MASKING.CAUSAL
    KEY_TOKEN: tl.constexpr = GIVEN.KEY_TOKEN
    CHECK: tl.constexpr = MASKING.CHECK
    ONLINE: tl.constexpr = ARITHMETIC.ONLINE
    BLOCK_DV: tl.constexpr = HEADS.BLOCK_DV
    QUADRATIC: tl.constexpr = ARITHMETIC.QUADRATIC
    BITS: tl.constexpr = ARITHMETIC.BITS
    NEAREST: tl.constexpr = ARITHMETIC.NEAREST
    OFFSET: tl.constexpr = ARITHMETIC.OFFSET
    VALUE_DIM: tl.constexpr = HEADS.VALUE_DIM
    VALUE_ROWS: tl.constexpr = GIVEN.VALUE_ROWS
    EXACT: tl.constexpr = ARITHMETIC.EXACT
    MASK: tl.constexpr = MASKING.MASK
    k_base, k_stride_n, k_stride_d, ks_base, ks_stride_n = key
    v_base, v_stride_n, v_stride_d = value
    mask_base, mask_stride_m, mask_stride_n = mask
    d, dv = channels
    multiplier, fraction_bits, drop, largest = factors
    accumulator, high, total, high_total, wide = sums
    n = start + key_order(tl.arange(0, BLOCK_N))
    k = load_key(k_base, k_stride_n, k_stride_d, n, d, keys, HEAD_DIM, BLOCK_D, INSIDE)
    s = scores(
        q, k, ks_base, ks_stride_n, mask_base, mask_stride_m, mask_stride_n, rows, start, queries, keys, multiplier,
        fraction_bits, drop, largest, 0.0, BLOCK_M, BLOCK_N, COLUMN_BITS, MASK, CAUSAL,
        KEY_TOKEN, CHECK and not INSIDE, GUARD,
    )  # fmt: skip
    if ONLINE:
        new_max = tl.maximum(row_max, tl.max(s, 1)[:, None])
        step = tl.where(row_max != MASKED, new_max - row_max, 0)
        if KEY_TOKEN and MASK != "bias":
            step = multiply_high(step, multiplier, GUARD)
        elif MASK != "bias":
            step = step * multiplier
        factor = release_factor(step, fraction_bits, GUARD).to(tl.int64)
        if WIDE_SUMS:
            wide = (wide * factor) >> 24
            accumulator = tl.zeros((BLOCK_M, BLOCK_DV), tl.int32)
        else:
            accumulator = ((accumulator.to(tl.int64) * factor) >> 24).to(tl.int32)
        total = ((total.to(tl.int64) * factor) >> 24).to(tl.int32)
        row_max = new_max
    word = probability_words(
        s, row_max, multiplier, fraction_bits, MASK, KEY_TOKEN, QUADRATIC, BITS,
        NEAREST, OFFSET, CHECK and not INSIDE, GUARD,
    )  # fmt: skip
    v = load_value(v_base, v_stride_n, v_stride_d, start, keys, dv, VALUE_DIM, BLOCK_DV, BLOCK_N, VALUE_ROWS, not INSIDE)
    accumulator, high, total, high_total = accumulate(
        word, v, weight, offsets, accumulator, high, total, high_total, BLOCK_M, BLOCK_N, BITS, EXACT,
        ADD_OFFSET, GUARD,
    )  # fmt: skip
    if ONLINE and WIDE_SUMS:
        wide += accumulator.to(tl.int64)
    return row_max, accumulator, high, total, high_total, wide


@triton.jit
def long_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, qs_ptr, ks_ptr, vs_ptr, os_ptr, vo_ptr, mask_ptr, sums_ptr, cu_q_ptr, cu_k_ptr, strides,
    numbers, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEADS: tl.constexpr, MASKING: tl.constexpr,
    ARITHMETIC: tl.constexpr, GIVEN: tl.constexpr, REACH: tl.constexpr, GUARD: tl.constexpr,
):  # fmt: skip
    """Attention of one block of queries; launched by :func:`.dispatch.launch_attention`.

    Constants are objects of :mod:`.triton.constants`. With VALUE_SUMS the channel sums of V, in ``parts`` chunks, correct the
    storage offset of P at the end; without, a product with a constant does in every tile. With EXACT the missing mass gets the
    mean of V, which is made of these sums.

    With VARLEN z is a sequence of packed tensors, whose cumulative lengths are at ``cu_q_ptr`` and ``cu_k_ptr``: strides of a
    batch are 0 but those of what there is for each sequence, and ``queries``, ``keys`` and ``inverse_count`` are found here.
    Unless VALUE_ROWS, values begin at :func:`.common.tile_ops.packed_start`.
    Programs past the end of their sequence's queries take no keys and store nothing. Outputs of sequences of more than ``keys``
    keys are NaN.
    """
    GROUP: tl.constexpr = HEADS.GROUP
    WIDE_OFFSETS: tl.constexpr = REACH.WIDE_OFFSETS
    VARLEN: tl.constexpr = REACH.VARLEN
    CAUSAL: tl.constexpr = MASKING.CAUSAL
    VALUE_ROWS: tl.constexpr = GIVEN.VALUE_ROWS
    BLOCK_D: tl.constexpr = HEADS.BLOCK_D
    BLOCK_DV: tl.constexpr = HEADS.BLOCK_DV
    HEAD_DIM: tl.constexpr = HEADS.HEAD_DIM
    MASK_PERIOD: tl.constexpr = MASKING.MASK_PERIOD
    QUERY_TOKEN: tl.constexpr = GIVEN.QUERY_TOKEN
    KEY_TOKEN: tl.constexpr = GIVEN.KEY_TOKEN
    COLUMN_BITS: tl.constexpr = ARITHMETIC.COLUMN_BITS
    MOST: tl.constexpr = ARITHMETIC.MOST
    MOST_BITS: tl.constexpr = ARITHMETIC.MOST_BITS
    BITS: tl.constexpr = ARITHMETIC.BITS
    VALUE_SUMS: tl.constexpr = REACH.VALUE_SUMS
    CHECK: tl.constexpr = MASKING.CHECK
    ONLINE: tl.constexpr = ARITHMETIC.ONLINE
    WIDE_SUMS: tl.constexpr = REACH.WIDE_SUMS
    EXACT: tl.constexpr = ARITHMETIC.EXACT
    VALUE_DIM: tl.constexpr = HEADS.VALUE_DIM
    VALUE_CHANNEL: tl.constexpr = GIVEN.VALUE_CHANNEL
    OUTPUT_CHANNEL: tl.constexpr = GIVEN.OUTPUT_CHANNEL
    VALUE_OFFSET: tl.constexpr = GIVEN.VALUE_OFFSET
    FLOOR_OUTPUT: tl.constexpr = ARITHMETIC.FLOOR_OUTPUT
    MASK: tl.constexpr = MASKING.MASK
    z = tl.program_id(2).to(tl.int64)
    h = tl.program_id(1)
    if WIDE_OFFSETS:
        h = tl.cast(h, tl.int64)
    kv_head = h // GROUP
    queries, keys, inverse_count = numbers.queries, numbers.keys, numbers.inverse_count
    q_stride_n, k_stride_n = strides.q_stride_n, strides.k_stride_n
    v_stride_n, o_stride_n = strides.v_stride_n, strides.o_stride_n
    qs_stride_n, ks_stride_n = strides.qs_stride_n, strides.ks_stride_n
    mask_stride_m, mask_stride_n = strides.mask_stride_m, strides.mask_stride_n
    if WIDE_OFFSETS:
        q_stride_n, k_stride_n = tl.cast(q_stride_n, tl.int64), tl.cast(k_stride_n, tl.int64)
        v_stride_n, o_stride_n = tl.cast(v_stride_n, tl.int64), tl.cast(o_stride_n, tl.int64)
        qs_stride_n, ks_stride_n = tl.cast(qs_stride_n, tl.int64), tl.cast(ks_stride_n, tl.int64)
        mask_stride_m, mask_stride_n = tl.cast(mask_stride_m, tl.int64), tl.cast(mask_stride_n, tl.int64)
    if VARLEN:
        most_keys = keys
        first_q, queries = packed_sequence(cu_q_ptr, z)
        first_k, keys = packed_sequence(cu_k_ptr, z)
        too_many = keys > most_keys
        if CAUSAL:
            # keys past the last query do not exist
            keys = tl.minimum(keys, queries)
        few_keys = keys <= MOST_ROUNDED_KEYS
        inverse_count = inverse_of_count(keys)
        no_keys = keys == 0
        keys = tl.where(tl.program_id(0) * BLOCK_M < queries, keys, 0)
        q_ptr += first_q * q_stride_n
        k_ptr += first_k * k_stride_n
        v_ptr += first_k * v_stride_n if VALUE_ROWS else packed_start(first_k, z)
        o_ptr += first_q * o_stride_n
        qs_ptr += first_q * qs_stride_n
        ks_ptr += first_k * ks_stride_n
    else:
        few_keys = False
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    inside = rows < queries

    q_ptrs = (
        q_ptr + z * strides.q_stride_z + h * strides.q_stride_h + rows[:, None] * q_stride_n + d[None, :] * strides.q_stride_d
    )
    q = tl.load(q_ptrs, mask=inside[:, None] & (d[None, :] < HEAD_DIM), other=0)
    k_base = k_ptr + z * strides.k_stride_z + kv_head * strides.k_stride_h
    v_base = v_ptr + z * strides.v_stride_z + kv_head * strides.v_stride_h
    ks_base = ks_ptr.to(tl.pointer_type(tl.int32)) + z * strides.ks_stride_z + kv_head * strides.ks_stride_h
    mask_base = mask_pointer(mask_ptr, z, h, strides.mask_stride_z, strides.mask_stride_h, MASK_PERIOD)
    qs_base = qs_ptr.to(tl.pointer_type(tl.int32)) + z * strides.qs_stride_z + h * strides.qs_stride_h
    if QUERY_TOKEN:
        query_bits = tl.load(qs_base + rows * qs_stride_n, mask=inside, other=0x3F800000)[:, None]
    else:
        query_bits = tl.load(qs_base)
    if QUERY_TOKEN and BLOCK_D <= 128 and not GUARD:
        query_bits = to_rows(q, query_bits, BLOCK_D)
    usable, key_mantissa, key_exponent, largest = column_scales(ks_base, ks_stride_n, keys, BLOCK_N, KEY_TOKEN)
    usable = usable & usable_scale(query_bits)
    if VARLEN:
        # without keys an output is 0, whatever the query; where there are more than was said not all may be quantised
        usable = (usable & (too_many == 0)) | no_keys
    multiplier, fraction_bits, drop = row_multiplier(
        query_bits, key_mantissa, key_exponent, numbers.constant_mantissa, numbers.constant_exponent, MASK,
        KEY_TOKEN, COLUMN_BITS, MOST, MOST_BITS, GUARD,
    )  # fmt: skip
    if VARLEN and KEY_TOKEN:
        # One key is one scale for the head, whatever other sequences have. Its weight has the exponent 0 in any unit; only the
        # fraction bits of that count.
        mantissa, exponent = split_scale(tl.load(ks_base, mask=keys == 1, other=0x3F800000))
        _, narrow_bits, _ = row_multiplier(
            query_bits, mantissa, exponent, numbers.constant_mantissa, numbers.constant_exponent, MASK, False,
            COLUMN_BITS, MOST, MOST_BITS, GUARD,
        )  # fmt: skip
        fraction_bits = tl.where(keys == 1, narrow_bits, fraction_bits)

    row_max = tl.full((BLOCK_M, 1), MASKED, tl.int32)
    # row sums are a product with a matrix of ones, which costs the tensor core next to nothing
    total = tl.zeros((BLOCK_M, 16), tl.int32)
    high_total = tl.zeros((BLOCK_M, 16), tl.int32)
    accumulator = tl.zeros((BLOCK_M, BLOCK_DV), tl.int32)
    high = tl.zeros((BLOCK_M, BLOCK_DV), tl.int32)
    offsets = tl.full((BLOCK_M, BLOCK_N), -127 if BITS == 8 else 64, tl.int8)
    ones = tl.full((BLOCK_N, 16), 1, tl.int8)
    ADD_OFFSET: tl.constexpr = BITS != 7 and not VALUE_SUMS
    # Keys past the end are copies of the last: V's zero rows keep them out of the numerator, a weight of 0 out of the row sum.
    # With CHECK they are masked.
    if CHECK:
        weight = ones
    else:
        weight = tl.where((keys & (-BLOCK_N)) + tl.arange(0, BLOCK_N)[:, None] < keys, ones, 0)

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
                n = start + key_order(tl.arange(0, BLOCK_N))
                k = load_key(k_base, k_stride_n, strides.k_stride_d, n, d, keys, HEAD_DIM, BLOCK_D, phase == 0)
                s = scores(
                    q, k, ks_base, ks_stride_n, mask_base, mask_stride_m, mask_stride_n, rows, start, queries, keys, multiplier,
                    fraction_bits, drop, largest, 0.0, BLOCK_M, BLOCK_N, COLUMN_BITS, MASK, CAUSAL,
                    KEY_TOKEN, CHECK and phase == 1, GUARD,
                )  # fmt: skip
                row_max = tl.maximum(row_max, tl.max(s, 1)[:, None])
    key = k_base, k_stride_n, strides.k_stride_d, ks_base, ks_stride_n
    value = v_base, v_stride_n, strides.v_stride_d
    mask = mask_base, mask_stride_m, mask_stride_n
    factors = multiplier, fraction_bits, drop, largest
    # rows of up to SECTION_KEYS keys are one section
    if WIDE_SUMS:
        sums_of_sections = tl.zeros((BLOCK_M, BLOCK_DV), tl.int64)
        for section in range(0, last, SECTION_KEYS):
            stop = tl.minimum(section + SECTION_KEYS, last)
            middle = tl.maximum(section, tl.minimum(full, stop))
            for phase in tl.static_range(2):
                for start in range(section if phase == 0 else middle, middle if phase == 0 else stop, BLOCK_N):
                    row_max, accumulator, high, total, high_total, sums_of_sections = _add_keys(
                        q, key, value, mask, rows, (d, dv), start, queries, keys, factors, ones if phase == 0 else weight,
                        offsets, row_max, (accumulator, high, total, high_total, sums_of_sections), phase == 0, True,
                        ADD_OFFSET, BLOCK_M, BLOCK_N, HEADS, MASKING, ARITHMETIC, GIVEN, GUARD,
                    )  # fmt: skip
            if not ONLINE:
                sums_of_sections += accumulator.to(tl.int64)
                accumulator = tl.zeros((BLOCK_M, BLOCK_DV), tl.int32)
            if BITS == 15:
                sums_of_sections += high.to(tl.int64) * 256
                high = tl.zeros((BLOCK_M, BLOCK_DV), tl.int32)
        accumulator = sums_of_sections
    else:
        for phase in tl.static_range(2):
            for start in range(0 if phase == 0 else full, full if phase == 0 else last, BLOCK_N):
                row_max, accumulator, high, total, high_total, _ = _add_keys(
                    q, key, value, mask, rows, (d, dv), start, queries, keys, factors, ones if phase == 0 else weight, offsets,
                    row_max, (accumulator, high, total, high_total, 0), phase == 0, False, ADD_OFFSET, BLOCK_M, BLOCK_N, HEADS,
                    MASKING, ARITHMETIC, GIVEN, GUARD,
                )  # fmt: skip
    count = keys
    if CHECK:
        count = tl.cdiv(last, BLOCK_N) * BLOCK_N

    mean = 0
    if EXACT or (BITS != 7 and VALUE_SUMS):
        part = tl.arange(0, CHUNKS)[:, None]
        at = ((z * tl.num_programs(1) // GROUP + kv_head) * numbers.parts + part) * VALUE_DIM + dv[None, :]
        sums = tl.sum(tl.load(sums_ptr + at, mask=(part < numbers.parts) & (dv[None, :] < VALUE_DIM), other=0), 0)
        if VALUE_SUMS:
            accumulator += (128 if BITS == 15 else -127) * sums[None, :].to(accumulator.dtype)
        if EXACT:
            mean = twice_mean(sums, inverse_count, GUARD)[None, :]
    if ONLINE:
        # ScaleRelease rounds O and l down separately, which can leave |O| a few units above 128 l
        most = 128 * tl.max(total, 1)[:, None].to(accumulator.dtype)
        accumulator = tl.minimum(tl.maximum(accumulator, -most), most)
    o_ptrs = (
        o_ptr + z * strides.o_stride_z + h * strides.o_stride_h + rows[:, None] * o_stride_n + dv[None, :] * strides.o_stride_d
    )
    factor, shift, half = output_factors(
        o_ptr, vs_ptr + z * strides.vs_stride_z + kv_head * strides.vs_stride_h, strides.vs_stride_d,
        os_ptr + z * strides.os_stride_z + h * strides.os_stride_h, strides.os_stride_d,
        vo_ptr + z * strides.vo_stride_z + kv_head * strides.vo_stride_h, strides.vo_stride_d, VALUE_DIM, BLOCK_DV,
        VALUE_CHANNEL, OUTPUT_CHANNEL, VALUE_OFFSET, GUARD,
    )  # fmt: skip
    finish(
        accumulator, high, total, high_total, count, mean, row_max, usable, factor, shift, half, o_ptrs,
        inside[:, None] & (dv[None, :] < VALUE_DIM), BITS, EXACT, VALUE_OFFSET,
        FLOOR_OUTPUT, MASK, CHECK, GUARD, WIDE_SUMS, VARLEN, few_keys,
    )  # fmt: skip
