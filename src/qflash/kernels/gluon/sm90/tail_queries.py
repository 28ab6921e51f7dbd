"""Tail queries in :mod:`.sm90.attention_resident`: the last few, for which a block would be mostly empty (Gluon).

Equations 1 to 11 and step 11 of Algorithm 1 for at most TAIL (8 or 16) queries. As a block, most warps would have no
query at all. Here both products are transposed, so that all four warps share the keys and then the channels:

    S^T = K Q^T    rows are keys: 64 per product of four warps, sixteen per warp; columns are the queries
    O^T = V^T P^T  rows are channels (:func:`.sm90.query_block.to_fragment_order`); columns are the queries

A lane has rows r = lane // 4 and r + 8 of its warp and columns (queries) 2t, 2t + 1 of every 8, t = lane % 4. So maxima
and sums of a query go across lanes and warps. All operands lie in shared memory: keys and values as staged for the
blocks, the queries (TAIL, channels), and the stored probabilities (TAIL, keys) per tile. In order: :func:`load_last`
and :func:`last_queries` while keys and values arrive, then :func:`last_rows`: scores of all tiles, maximum,
probabilities, barrier, products with V, outputs.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from ...common.fixed_point import fine_bits, missing_mass, multiply_round, requantize, row_inverse, row_weight, usable_scale
from ...common.quantize_ops import amplitude_to_scale, inverse_scale, nan_max
from ...common.tile_ops import MASKED, _high_bytes, channel_of_row, key_order, probability_words
from ..ptx_ops import as_float32, halves, scaled
from ..releases import barrier
from .layouts import (
    channel_spans,
    depth,
    is_stored,
    kernel_width,
    product_layout,
    row_starts,
    row_widths,
    span_starts,
    value_width,
    value_widths,
)
from .query_block import allocate, in_order, load_channels, round_rows
from .rows import query_factors


@gluon.jit
def _load_last_span(
    q_ptr, q_stride_n: gl.constexpr, first, queries, TAIL: gl.constexpr, CHANNELS: gl.constexpr, WARPS: gl.constexpr,
    POLICY: gl.constexpr,
):  # fmt: skip
    """One span of the tail queries as stored, (TAIL, channels); past the last query it is repeated."""
    D: gl.constexpr = kernel_width(CHANNELS)
    # spans of 64 and of 32 channels get the same layout of rows
    EACH: gl.constexpr = 4 if D == 128 else D // 16
    L: gl.constexpr = gl.BlockedLayout([1, EACH], [32 * EACH // D, D // EACH], [WARPS, 1], [1, 0])
    n = gl.minimum(first + gl.arange(0, TAIL, layout=gl.SliceLayout(1, L)), queries - 1)
    d = gl.arange(0, D, layout=gl.SliceLayout(0, L))
    return load_channels(q_ptr + n[:, None] * q_stride_n + d[None, :], n, d, CHANNELS, D, POLICY)


@gluon.jit
def load_last(
    q_ptr, q_stride_n: gl.constexpr, first, queries, TAIL: gl.constexpr, CHANNELS: gl.constexpr, WARPS: gl.constexpr,
    POLICY: gl.constexpr,
):  # fmt: skip
    """The spans of the tail queries as stored, each (TAIL, channels)."""
    SPANS: gl.constexpr = channel_spans(CHANNELS)
    FROM: gl.constexpr = span_starts(CHANNELS)
    spans = ()
    for c in gl.static_range(len(SPANS)):
        spans = spans + (_load_last_span(q_ptr + FROM[c], q_stride_n, first, queries, TAIL, SPANS[c], WARPS, POLICY),)
    return spans


@gluon.jit
def _last_maximum(x, L: gl.constexpr):
    """Largest magnitudes of the rows over all spans, float32 (TAIL,)."""
    largest = gl.reduce(gl.abs(x[0]).to(gl.float32), 1, nan_max)
    for c in gl.static_range(1, len(x)):
        more = gl.reduce(gl.abs(x[c]).to(gl.float32), 1, nan_max)
        largest = nan_max(largest, gl.convert_layout(more, gl.SliceLayout(1, L), assert_trivial=True))
    return largest


@gluon.jit
def last_queries(
    x, smem, qs_base, qs_stride_n, head_bits, first, queries, RECIPE: gl.constexpr, WARPS: gl.constexpr
):  # fmt: skip
    """Store the tail queries in shared memory as int8; return the float32 bits of their scale, or of each query's."""
    ROWS: gl.constexpr = x[0].shape[0]
    L: gl.constexpr = x[0].type.layout
    COLUMN: gl.constexpr = gl.SliceLayout(0, product_layout(ROWS, WARPS))
    bits = head_bits
    if RECIPE.QUANTIZE:
        scale = head_bits.to(gl.float32, bitcast=True) if not RECIPE.QUERY_TOKEN else amplitude_to_scale(_last_maximum(x, L))
        inverse = inverse_scale(scale, False)
        for c in gl.static_range(len(x)):
            smem[c].store(round_rows(as_float32(x[c]), inverse))
        if RECIPE.QUERY_TOKEN:
            bits = gl.convert_layout(scale.to(gl.int32, bitcast=True), COLUMN)
    else:
        for c in gl.static_range(len(x)):
            smem[c].store(x[c])
        if RECIPE.QUERY_TOKEN:
            n = gl.minimum(first + gl.arange(0, ROWS, layout=COLUMN), queries - 1)
            bits = gl.load(qs_base + n * qs_stride_n)
    return bits


@gluon.jit
def _across(x, D: gl.constexpr, L: gl.constexpr):
    """One number per channel in fragment order, broadcast to outputs whose rows are channels; a scalar as it is."""
    if x.type.is_block():
        x = _beside_last(gl.reshape(gl.permute(gl.reshape(x, (8, D // 8)), (1, 0)), (D,)), L)[:, None]
    return x


@gluon.jit
def _beside_last(x, L: gl.constexpr):
    """One number per channel in fragment order, in the layout of O^T's rows; repeated up to 64, a product's fewest."""
    if x.shape[0] < 64:
        x = gl.reshape(gl.permute(gl.join(x, x), (1, 0)), (2 * x.shape[0],))
    if x.shape[0] < 64:
        x = gl.reshape(gl.permute(gl.join(x, x), (1, 0)), (64,))
    return gl.convert_layout(x, gl.SliceLayout(1, L))


@gluon.jit
def _last_sums(smem, SUMS: gl.constexpr, L: gl.constexpr):
    """The sums of :func:`.sm90.stage_kv.stored_sums`, from shared memory, broadcast to outputs whose rows are channels."""
    if SUMS == "begin":
        sums = _beside_last(in_order(smem.load(gl.BlockedLayout([4], [32], [4], [0]))), L)
    elif smem.shape[0] >= 64:
        sums = smem.load(gl.SliceLayout(1, L))
    else:
        sums = _beside_last(smem.load(gl.BlockedLayout([1], [32], [4], [0])), L)
    return sums[:, None]


@gluon.jit
def _last_scores(q_smem, k_smem, WARPS: gl.constexpr):
    """Start S^T, the product of a tile of keys with the tail queries, span by span: int32 (keys, TAIL)."""
    M: gl.constexpr = k_smem[0].shape[0]
    N: gl.constexpr = q_smem[0].shape[0]
    s = gl.zeros((M, N), gl.int32, product_layout(N, WARPS))
    for c in gl.static_range(len(q_smem)):
        s = warpgroup_mma(k_smem[c], q_smem[c].permute((1, 0)), s, use_acc=c > 0, is_async=True)
    return s


@gluon.jit
def _exponentiate_last(
    s, base, multiplier, fraction_bits, smem, START: gl.constexpr, WIDTH: gl.constexpr, KEYS: gl.constexpr,
    OFFSET: gl.constexpr, EXACT: gl.constexpr,
):  # fmt: skip
    """Exponentiate a tile of scores, store 127 - P for the product with V, and return their parts of the row sums.

    The parts are int32 (64, TAIL): of a tile of 128 keys, keys 64 apart are added. Keys past the last are left out. The second
    is, with EXACT, that of probabilities before rounding.
    """
    M: gl.constexpr = s.shape[0]
    N: gl.constexpr = s.shape[1]
    L: gl.constexpr = s.type.layout
    word = probability_words(s, base, multiplier, fraction_bits, "none", False, True, 8, True, OFFSET, False, False)
    p = _high_bytes(word, False)
    n = gl.arange(0, M, layout=gl.SliceLayout(1, L))
    there = n < depth(WIDTH)
    if WIDTH >= 32:
        n = key_order(n)
    inside = (there & (START + n < KEYS))[:, None]
    part = _by_64(gl.where(inside, p.to(gl.int32), 0), L)
    fine = part
    if EXACT:
        # the upper half of a word is 0x7F7F less 256 P; half of it, rounded down, is this less 128 P
        fine = _by_64(gl.where(inside, 16319 - (word >> 17), 0), L)
    p = gl.reshape(gl.permute(gl.reshape(p, (M // 16, 2, 4, 2, N)), (0, 2, 1, 3, 4)), (M, N))
    smem.permute((1, 0)).store(p)
    return part, fine


@gluon.jit
def _by_64(x, L: gl.constexpr):
    """Numbers of 128 keys added to those 64 keys further; those of 64 keys as they are."""
    if x.shape[0] == 128:
        a, b = halves(x)
        x = gl.convert_layout(a + b, L, assert_trivial=True)
    return x


@gluon.jit
def _last_outputs(p_smem, v_smem, sums, c: gl.constexpr, KEYS: gl.constexpr, WARPS: gl.constexpr):
    """Start O^T: products of a span of V (channels as rows) with all tiles of P, int32 (channels, TAIL)."""
    WIDTHS: gl.constexpr = row_widths(KEYS)
    D: gl.constexpr = v_smem[0][c].shape[0]
    N: gl.constexpr = p_smem[0].shape[0]
    accumulator = warpgroup_mma_init(sums + gl.zeros((D, N), gl.int32, product_layout(N, WARPS)))
    for t in gl.static_range(len(WIDTHS)):
        p_t = p_smem[t].slice(0, depth(WIDTHS[t]), 1)
        accumulator = warpgroup_mma(v_smem[t][c], p_t.permute((1, 0)), accumulator, is_async=True)
    return accumulator


@gluon.jit
def last_rows(
    q_smem, query_bits, scales, k_smem, v_smem, sums, output, o_stride_n: gl.constexpr, first, queries,
    CHANNELS: gl.constexpr, KEYS: gl.constexpr, WARPS: gl.constexpr, SUMS: gl.constexpr, RECIPE: gl.constexpr,
):  # fmt: skip
    """Attention of the tail queries, from int8 in shared memory to stored outputs, in the order of the module.

    Args:
        query_bits, scales: see :func:`.sm90.rows.query_factors`.
        v_smem: V with at least 64 rows per span, the fewest of a product; outputs of rows past the channels are not
            stored.
        sums: from :func:`.sm90.stage_kv.stored_sums`: products begin at them.
        output: see :func:`.sm90.rows.store_outputs`.
    """
    N: gl.constexpr = q_smem[0].shape[0]
    SPANS: gl.constexpr = channel_spans(CHANNELS)
    FROM: gl.constexpr = span_starts(CHANNELS)
    COUNT: gl.constexpr = len(SPANS)
    WIDTHS: gl.constexpr = row_widths(KEYS)
    STARTS: gl.constexpr = row_starts(KEYS)
    TILES: gl.constexpr = len(WIDTHS)
    L: gl.constexpr = product_layout(N, WARPS)
    COLUMN: gl.constexpr = gl.SliceLayout(0, L)
    D: gl.constexpr = value_widths(CHANNELS)
    means, factors, o_base = output
    p_smem = ()
    for i in gl.static_range(TILES):
        p_smem = p_smem + (allocate(N, max(WIDTHS[i], 64)),)
    last_sums = ()
    last_factors = ()
    for c in gl.static_range(COUNT):
        factor, shift, half = factors[c]
        factor, shift = _loaded(factor, WARPS), _loaded(shift, WARPS)
        last_sums = last_sums + (_last_sums(sums[c], SUMS, L),)
        last_factors = last_factors + ((_across(factor, D[c], L), _across(shift, D[c], L), _across(half, D[c], L)),)
    usable, multiplier, fraction_bits, _ = query_factors(query_bits, scales, RECIPE)
    scores = ()
    for t in gl.static_range(TILES):
        scores = scores + (_last_scores(q_smem, k_smem[t], WARPS),)
    ready = ()
    for t in gl.static_range(TILES):
        s = warpgroup_mma_wait(COUNT * (TILES - 1 - t), [scores[t]])
        if WIDTHS[t] <= 32:
            # only 32 of the 64 rows of keys were written
            n = gl.arange(0, 64, layout=gl.SliceLayout(1, L))
            s = gl.where((n < 32)[:, None], s, MASKED)
        ready = ready + (s,)
        x = s
        if WIDTHS[t] == 128:
            a, b = halves(s)
            x = gl.convert_layout(gl.maximum(a, b), L, assert_trivial=True)
        if t == 0:
            largest = x
        else:
            largest = gl.maximum(largest, x)
    row_max = gl.convert_layout(gl.max(largest, 0), COLUMN, assert_trivial=True)
    if multiplier.type.is_block():
        multiplier, fraction_bits = multiplier[None, :], fraction_bits[None, :]
    total = gl.zeros((64, N), gl.int32, L)
    fine = total
    for t in gl.static_range(TILES):
        more, finer = _exponentiate_last(
            ready[t], row_max[None, :], multiplier, fraction_bits, p_smem[t], STARTS[t], WIDTHS[t], KEYS, RECIPE.OFFSET,
            RECIPE.EXACT,
        )  # fmt: skip
        total += more
        fine += finer
    # Reduced before the products start: the compiler may give a reduction shared memory that products under way still read.
    total = 127 * KEYS - gl.convert_layout(gl.sum(total, 0), COLUMN, assert_trivial=True)
    missing = total
    if RECIPE.EXACT:
        total, missing = missing_mass(gl.convert_layout(gl.sum(fine, 0), COLUMN, assert_trivial=True), total)
    fence_async_shared()
    barrier()
    accumulators = ()
    for c in gl.static_range(COUNT):
        accumulators = accumulators + (_last_outputs(p_smem, v_smem, last_sums[c], c, KEYS, WARPS),)
    bits, inverse = row_inverse(total, False)
    if RECIPE.EXACT:
        bits = fine_bits(bits)
    for c in gl.static_range(COUNT):
        numerator = warpgroup_mma_wait(TILES * (COUNT - 1 - c), [accumulators[c]])
        if RECIPE.EXACT:
            numerator -= missing[None, :] * _across(means[c].load(gl.BlockedLayout([1], [32], [WARPS], [0])), D[c], L)
        _store_last(numerator, bits, inverse, usable, last_factors[c], o_base + FROM[c], o_stride_n, first, queries, SPANS[c])


@gluon.jit
def _loaded(numbers, WARPS: gl.constexpr):
    """Numbers of channels that may be in shared memory, in registers."""
    if is_stored(numbers.type):
        numbers = numbers.load(gl.BlockedLayout([1], [32], [WARPS], [0]))
    return numbers


@gluon.jit
def _store_last(
    numerator, bits, inverse, usable, factors, o_base, o_stride_n: gl.constexpr, first, queries, CHANNELS: gl.constexpr
):  # fmt: skip
    """Normalise and store a span of outputs with channels as rows, like :func:`.sm90.query_block.store_span`."""
    factor, shift, half = factors
    L: gl.constexpr = numerator.type.layout
    if o_base.dtype.element_ty == gl.int8:
        result = requantize(numerator, multiply_round(inverse[None, :], factor, False), bits[None, :], shift, half, -1, False)
    else:
        good = usable_scale(factor.to(gl.int32, bitcast=True))
        weight = gl.where(usable, -row_weight(inverse, bits), float("nan"))[None, :]
        result = scaled(numerator, weight, gl.where(good, factor, float("nan")), shift)
        result = result.to(o_base.dtype.element_ty)
    D: gl.constexpr = value_width(CHANNELS)
    place = gl.arange(0, numerator.shape[0], layout=gl.SliceLayout(1, L))
    channels = channel_of_row(place, D)
    rows = first + gl.arange(0, numerator.shape[1], layout=gl.SliceLayout(0, L))
    inside = (rows[None, :] < queries) & (channels[:, None] < CHANNELS)
    if numerator.shape[0] > D:
        inside = inside & (place[:, None] < D)
    gl.store(o_base + rows[None, :] * o_stride_n + channels[:, None], result, mask=inside)
