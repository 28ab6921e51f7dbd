"""Attention of packed sequences on Hopper in one launch, from float tensors (Gluon, wgmma).

Computes steps 1 to 9 of ``docs/algorithm.md`` (Equations 1 to 11, Algorithm 1 with the row maximum known first) for the
default recipe without a mask, with the bits of :mod:`.triton.attention_streaming` on each sequence.

*Work.* A program takes a few blocks of queries of one head of one sequence, sixteen rows per warp; a quad of lanes shares
rows r and r + 8 (drawing in :mod:`.gluon.row_ops`). Programs past the end of their sequence store nothing. The longest
sequences come first (:mod:`.sm90.packed_order`).

*Memory.* All keys and values of the head lie in shared memory as int8, in tiles of 128 keys (or one of 64), as in
:mod:`.sm90.attention_resident`, of which this is the form for lengths that only the GPU knows: loops over tiles instead of
code for each. Floats are read twice, for ranges and to be quantised, the second time from a cache. Keys lie in their own
order and values in :func:`.common.tile_ops.inverse_key_order`.

*Order.* Ranges of keys and values; scales; int8 to shared memory; sums of V's channels; barrier. Then per block: queries;
maxima of all scores; scores again, probabilities, asynchronous products with V; normalise, store. A last tile that is at most
half full is taken as half of one.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ...common.fixed_point import inverse_of_count, twice_mean
from ...common.quantize_ops import amplitude_to_scale, higher, inverse_scale, lower, value_scale
from ...common.tile_ops import inverse_key_order, packed_sequence
from ..ptx_ops import as_float32, int8_values, round_to_int8, score_scales, to_shared, zero_point
from ..releases import barrier
from .layouts import (
    channel_spans,
    float_piece,
    kernel_width,
    quad_layout,
    shared_layout,
    span_starts,
    span_widths,
    value_width,
    value_widths,
)
from .packed_order import sequence_by_length
from .query_block import (
    load_channels,
    load_queries,
    read_queries,
    store_zeros,
    to_fragment_order,
)
from .rows import query_factors
from .stage_kv import (
    beside_tile,
    key_amplitude,
    natural_order,
    own_extremes,
    parts_of_sums,
    value_maxima,
    value_ranges,
    value_scales,
)
from .stores import PackedKeys
from .two_pass import attend_twice


@gluon.jit
def _load_tile(
    base, stride_n: gl.constexpr, tile, keys, CHANNELS: gl.constexpr, KEY: gl.constexpr, BLOCK_N: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """A tile of a span of keys or values as stored, (keys, channels), in quads; past the last key it is repeated."""
    D: gl.constexpr = kernel_width(CHANNELS) if KEY else value_width(CHANNELS)
    L: gl.constexpr = quad_layout(BLOCK_N, D, WARPS, float_piece(D, WARPS))
    n = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, L))
    if not KEY:
        n = inverse_key_order(n)
    d = gl.arange(0, D, layout=gl.SliceLayout(0, L))
    ptrs = base + (gl.minimum(tile * BLOCK_N + n, keys - 1)[:, None] * stride_n + d[None, :])
    return load_channels(ptrs, n, d, CHANNELS, D, "")


@gluon.jit
def _without_padding(x, tile, keys, BLOCK_N: gl.constexpr):
    """A tile of int8 values with zeros past the last key."""
    n = inverse_key_order(gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, x.type.layout)))
    return gl.where((tile * BLOCK_N + n < keys)[:, None], x, 0)


@gluon.jit
def _load_tiles(
    k_base, v_base, k_stride_n: gl.constexpr, v_stride_n: gl.constexpr, tile, keys, CHANNELS: gl.constexpr,
    BLOCK_N: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """A tile of a span of keys, and of values."""
    k = _load_tile(k_base, k_stride_n, tile, keys, CHANNELS, True, BLOCK_N, WARPS)
    return k, _load_tile(v_base, v_stride_n, tile, keys, CHANNELS, False, BLOCK_N, WARPS)


@gluon.jit
def _ranges_of_span(
    k_base, v_base, k_stride_n: gl.constexpr, v_stride_n: gl.constexpr, first, tiles, keys, mantissa, CHANNELS: gl.constexpr,
    CENTER: gl.constexpr, VALUE_OFFSET: gl.constexpr, BLOCK_N: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """What quantising a span needs, whose first tiles of keys and values are loaded.

    Returns:
        bits of the keys' largest magnitude, their midranges; midranges and largest magnitudes (or least scales) of values.
    """
    first_k, first_v = first
    low, high = own_extremes(first_k, lower, WARPS), own_extremes(first_k, higher, WARPS)
    if VALUE_OFFSET:
        v_low, v_high = own_extremes(first_v, lower, WARPS), own_extremes(first_v, higher, WARPS)
    else:
        v_high = own_extremes(gl.abs(first_v), higher, WARPS)
        v_low = v_high
    for tile in range(1, tiles):
        k, v = _load_tiles(k_base, v_base, k_stride_n, v_stride_n, tile, keys, CHANNELS, BLOCK_N, WARPS)
        low = lower(low, own_extremes(k, lower, WARPS), False)
        high = higher(high, own_extremes(k, higher, WARPS), False)
        if VALUE_OFFSET:
            v_low = lower(v_low, own_extremes(v, lower, WARPS), False)
            v_high = higher(v_high, own_extremes(v, higher, WARPS), False)
        else:
            v_high = higher(v_high, own_extremes(gl.abs(v), higher, WARPS), False)
    amplitude, middle = key_amplitude(low, high, mantissa, CENTER, WARPS)
    if VALUE_OFFSET:
        left = value_ranges(v_low, v_high, WARPS)
    else:
        left = (value_maxima(v_high, WARPS),)
    value_middle, most, _ = value_scales(left, v_high, VALUE_OFFSET, True, WARPS)
    return amplitude, middle, value_middle, most


@gluon.jit
def _fill_tile(
    k, v, k_smem, v_smem, tile, keys, scaling, CENTER: gl.constexpr, VALUE_OFFSET: gl.constexpr, BLOCK_N: gl.constexpr
):  # fmt: skip
    """Write a tile of a span of keys and values as int8 to shared memory."""
    inverse, middle, value_inverse, zero = scaling
    y, x = as_float32(k), as_float32(v)
    if CENTER:
        y = y - beside_tile(middle, y)
    k_smem.index(tile).store(round_to_int8(y, inverse))
    rounded = int8_values(x, beside_tile(value_inverse, x), beside_tile(zero, x), VALUE_OFFSET)
    v_smem.index(tile).permute((1, 0)).store(to_fragment_order(_without_padding(rounded, tile, keys, BLOCK_N), 1))


@gluon.jit
def _fill_span(
    k_base, v_base, k_stride_n: gl.constexpr, v_stride_n: gl.constexpr, k_smem, v_smem, tiles, keys, inverse, found,
    CHANNELS: gl.constexpr, CENTER: gl.constexpr, VALUE_OFFSET: gl.constexpr, TILES: gl.constexpr, BLOCK_N: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Write a span of all keys and values as int8 to shared memory; return scales, offsets (else scales) of V's channels.

    ``found`` is what :func:`_ranges_of_span` returns behind the keys' magnitude, and the first tiles. Single ones are not
    loaded again.
    """
    middle, value_middle, most, first = found
    scale = value_scale(most, VALUE_OFFSET)
    value_inverse = inverse_scale(scale, False)
    zero = value_inverse
    if VALUE_OFFSET:
        zero = zero_point(value_middle, value_inverse)
    scaling = inverse, middle, value_inverse, zero
    if TILES == 1:
        _fill_tile(first[0], first[1], k_smem, v_smem, 0, keys, scaling, CENTER, VALUE_OFFSET, BLOCK_N)
    else:
        for tile in range(tiles):
            k, v = _load_tiles(k_base, v_base, k_stride_n, v_stride_n, tile, keys, CHANNELS, BLOCK_N, WARPS)
            _fill_tile(k, v, k_smem, v_smem, tile, keys, scaling, CENTER, VALUE_OFFSET, BLOCK_N)
    offsets = to_shared(scale)
    scales = offsets
    if VALUE_OFFSET:
        offsets = to_shared(zero * scale)
    return scales, offsets


@gluon.jit
def _sums_of_span(v_smem, tiles, inverse_count, WARPS: gl.constexpr):
    """(-127 times the sums of a span's channels of V in fragment order, twice their means), in shared memory."""
    parts = parts_of_sums(v_smem.index(0), WARPS)
    for tile in range(1, tiles):
        parts += gl.convert_layout(parts_of_sums(v_smem.index(tile), WARPS), parts.type.layout, assert_trivial=True)
    sums = gl.sum(parts, 1)
    return to_shared(-127 * sums), to_shared(natural_order(twice_mean(sums, inverse_count, False), 1))


@gluon.jit(do_not_specialize=("share", "most_keys"))
def packed_hopper_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, cu_q_ptr, cu_k_ptr, constant_mantissa, constant_exponent, share, most_keys,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_M: gl.constexpr, TILES: gl.constexpr, BLOCK_N: gl.constexpr,
    ORDERED: gl.constexpr, STRIDES: gl.constexpr, RECIPE: gl.constexpr,
):  # fmt: skip
    """Attention of ``share`` blocks of queries of a head of a packed sequence, which has at most TILES tiles of BLOCK_N keys.

    Cumulative lengths are at ``cu_q_ptr`` and ``cu_k_ptr``; tensors are (tokens, heads, channels). ORDERED is the most
    sequences that :mod:`.sm90.packed_order` puts in order, or 0 if they are taken as they lie. Outputs of sequences of more
    than ``most_keys`` keys are NaN. STRIDES and RECIPE are of :mod:`.gluon.constants`.
    """
    z, h = gl.program_id(2), gl.program_id(1)
    kv_head = h // GROUP
    WARPS: gl.constexpr = BLOCK_M // 16
    if ORDERED:
        z = sequence_by_length(cu_k_ptr, z, gl.num_programs(2), ORDERED, TILES * BLOCK_N // 64, WARPS)
    SPANS: gl.constexpr = channel_spans(HEAD_DIM)
    FROM: gl.constexpr = span_starts(HEAD_DIM)
    D: gl.constexpr = span_widths(HEAD_DIM)
    DV: gl.constexpr = value_widths(HEAD_DIM)
    COUNT: gl.constexpr = len(SPANS)
    first_q, queries = packed_sequence(cu_q_ptr, z)
    first_k, keys = packed_sequence(cu_k_ptr, z)
    too_many = keys > most_keys
    keys = gl.minimum(keys, TILES * BLOCK_N)
    q_base = q_ptr + first_q * STRIDES.q[2] + h * STRIDES.q[1]
    o_base = o_ptr + first_q * STRIDES.o[2] + h * STRIDES.o[1]
    k_base = k_ptr + first_k * STRIDES.k[2] + kv_head * STRIDES.k[1]
    v_base = v_ptr + first_k * STRIDES.v[2] + kv_head * STRIDES.v[1]
    block = gl.program_id(0) * share
    blocks = gl.minimum(block + share, gl.cdiv(queries, BLOCK_M))
    if (block >= blocks) | (keys == 0):
        for each in range(block, blocks):
            store_zeros(o_base, STRIDES.o[2], each * BLOCK_M, queries, HEAD_DIM, WARPS)
        return
    tiles = gl.cdiv(keys, BLOCK_N)
    inverse_count = inverse_of_count(keys)
    k_smem = ()
    v_smem = ()
    for c in gl.static_range(COUNT):
        k_smem = k_smem + (gl.allocate_shared_memory(gl.int8, [TILES, BLOCK_N, D[c]], shared_layout(D[c])),)
        v_smem = v_smem + (gl.allocate_shared_memory(gl.int8, [TILES, DV[c], BLOCK_N], shared_layout(BLOCK_N)),)
    # those of all spans, before any of them is waited for
    firsts = ()
    for c in gl.static_range(COUNT):
        first = _load_tiles(k_base + FROM[c], v_base + FROM[c], STRIDES.k[2], STRIDES.v[2], 0, keys, SPANS[c], BLOCK_N, WARPS)
        firsts = firsts + (first,)
    largest = 0
    found = ()
    for c in gl.static_range(COUNT):
        amplitude, middle, value_middle, most = _ranges_of_span(
            k_base + FROM[c], v_base + FROM[c], STRIDES.k[2], STRIDES.v[2], firsts[c], tiles, keys, constant_mantissa, SPANS[c],
            RECIPE.CENTER, RECIPE.VALUE_OFFSET, BLOCK_N, WARPS,
        )  # fmt: skip
        largest = gl.maximum(largest, amplitude)
        found = found + ((middle, value_middle, most, firsts[c]),)
    key_scale = amplitude_to_scale(largest.to(gl.float32, bitcast=True))
    key_bits = key_scale.to(gl.int32, bitcast=True)
    inverse = inverse_scale(key_scale, False)
    factors = ()
    for c in gl.static_range(COUNT):
        scale, offset = _fill_span(
            k_base + FROM[c], v_base + FROM[c], STRIDES.k[2], STRIDES.v[2], k_smem[c], v_smem[c], tiles, keys, inverse,
            found[c], SPANS[c], RECIPE.CENTER, RECIPE.VALUE_OFFSET, TILES, BLOCK_N, WARPS,
        )  # fmt: skip
        if RECIPE.VALUE_OFFSET:
            factors = factors + ((scale, offset, 0),)
        else:
            factors = factors + ((scale, 0, 0),)
    fence_async_shared()
    barrier()
    sums = ()
    means = ()
    for c in gl.static_range(COUNT):
        span_sums, span_means = _sums_of_span(v_smem[c], tiles, inverse_count, WARPS)
        sums, means = sums + (span_sums,), means + (span_means,)
    barrier()
    usable, row, units = score_scales(key_bits, key_bits, constant_mantissa, constant_exponent, RECIPE)
    query_scales = usable & (too_many == 0), row, units
    store = PackedKeys(k_smem, v_smem, keys, BLOCK_N, (1, 1, 1), (0, 0, 0))
    output = means, factors, o_base
    for each in range(block, blocks):
        words = load_queries(q_base, STRIDES.q[2], each * BLOCK_M, queries, HEAD_DIM, WARPS, 1, "")
        q, query_bits = read_queries(
            words, q_ptr.dtype.element_ty, q_base, 0, 0, each * BLOCK_M, queries, RECIPE, WARPS
        )  # fmt: skip
        query = query_factors(query_bits, query_scales, RECIPE)
        attend_twice(
            q, query, store, sums, output, STRIDES.o[2], each * BLOCK_M, queries, HEAD_DIM, WARPS, "end",
            RECIPE, ((), 0, 0, 0), 1,
        )  # fmt: skip
