"""Attention on Hopper for rows from 65 keys to what shared memory holds, from int8 or from float (Gluon, wgmma).

Computes steps 1 to 9 of ``docs/algorithm.md`` (Equations 1 to 11, Algorithm 1 with the row maximum known first) for the
default recipe without a mask, with the bits of :mod:`.triton.attention_resident` and :mod:`.triton.attention_streaming`.

*Work.* A program takes one head, or every n-th block of 64 or 128 of its queries; where keys pass twice it may take
consecutive blocks of several heads. Tail queries, past whole blocks, may be computed by :mod:`.sm90.tail_queries`. A row of
scores is a sequence of tiles of 128, 64, 32, 16 and 8 keys; a head's channels are one span or two (:mod:`.sm90.layouts`).

*Memory.* All keys and values of the head lie in shared memory as int8, swizzled for wgmma. Queries, scores,
probabilities and outputs stay in the registers of the lane that loads or computes them; so once the values are staged,
no warp waits for another, unless two share rows. A warp has sixteen rows; a quad of lanes shares rows r and r + 8
(drawing in :mod:`.gluon.row_ops`):

    block of 64 queries, one warp per 16 rows       two warps per 16 rows (ACROSS is 2)
    rows  0..15   warp 0, all keys and channels     warps 0 and 4, half of the columns of each tile and of the channels
    rows 16..31   warp 1                            warps 1 and 5
    rows 32..47   warp 2                            warps 2 and 6
    rows 48..63   warp 3                            warps 3 and 7

*Resident* rows, of up to 288 keys, or up to 608 with two warps: the scores of all tiles stay in registers between
maximum and exponential. Longer rows pass over the keys in shared memory twice per block and compute the scores again
(``PLAN.UNROLL`` is then the tiles of 128 keys per iteration of these loops).

*Order.* Issue loads of queries, keys and values; quantise (:mod:`.sm90.stage_kv`); barrier. Then per block: read
queries, start the products with all keys, row maximum, probabilities tile by tile, products with V, normalise, store.
Products are asynchronous: those of one tile of probabilities with V run while the next tile's exponentials are
computed, and the next block's queries are prefetched. Three permutations keep data in its lane and change no result:
queries are loaded as the tensor core reads them, keys of P V stand in the order in which lanes have the scores,
channels of V in fragment order (:func:`.sm90.query_block.to_fragment_order`).

*Storage offset.* Probabilities are stored as 127 - P, which adds 127 times the channel sums of V to an output. SUMS
says where that is taken out; the best place depends on how full the GPU is.

*Two warps per sixteen rows.* With fewer programs than SMs, a call takes as long as one warp's chain of instructions.
From floats, and for long rows, two warps then share it; their maxima, row sums and probabilities pass through shared
memory.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma_init, warpgroup_mma_wait

from ... import tiles
from ...common.dependent_launch import wait_for_kernels
from ...common.fixed_point import twice_mean
from ...common.quantize_ops import amplitude_to_scale, nan_max
from ...common.tile_ops import POISON
from ..ptx_ops import (
    keep_apart,
    output_factors,
    raised_if_needed,
    score_scales,
    wait_for_copies,
)
from ..releases import barrier
from ..row_ops import row_largest, row_sum
from .bias import Bias, MarkedBias, Mask, NoBias
from .layouts import (
    channel_spans,
    depth,
    exchanged_widths,
    inverse_count,
    is_crowded,
    mask_layout,
    output_layout,
    part_layout,
    product_layout,
    row_starts,
    row_widths,
    score_layout,
    shared_layout,
    span_starts,
    span_widths,
    value_widths,
)
from .query_block import (
    add_values,
    allocate,
    begin_outputs,
    finished,
    fold_columns,
    load_queries,
    load_sums,
    quarter_sums,
    read_queries,
    row_amplitude,
    row_inverses,
    start_scores,
    store_sums,
    stored_beside_outputs,
    stored_columns,
    stored_probabilities,
    sums_of_four,
    to_fragment_order,
    unpack_queries,
)
from .rows import finished_outputs, query_factors, row_maximum, row_numbers, store_outputs
from .stage_kv import all_quads, copy_keys, load_quads, quantize_keys, quantize_values, stored_sums, sums_beside
from .stores import first_channels, first_keys, known_keys, tile_at
from .tail_queries import last_queries, last_rows, load_last
from .two_pass import attend_twice

SHORT_ROW = gl.constexpr(tiles.SHORT_ROW)
# of -127, modulo 2**32: a product with it divides multiples of -127 exactly
INVERSE_OF_127 = gl.constexpr(pow(-127, -1, 1 << 32))


@gluon.jit
def _allocate_tiles(COUNT: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """One piece of shared memory for COUNT tiles, (COUNT, ROWS, COLUMNS) int8, swizzled for wgmma."""
    return gl.allocate_shared_memory(gl.int8, [COUNT, ROWS, COLUMNS], shared_layout(COLUMNS))


@gluon.jit
def _all_scores(q, k_smem, WIDTHS: gl.constexpr, WARPS: gl.constexpr, ACROSS: gl.constexpr):
    """Start the products of a block of queries with all tiles of keys: a tuple of accumulators under way."""
    scores = ()
    for t in gl.static_range(len(WIDTHS)):
        scores = scores + (start_scores(q, first_keys(k_smem[t], WIDTHS[t]), WARPS, ACROSS),)
    return scores


@gluon.jit
def _means_of(x, INVERSE_COUNT: gl.constexpr):
    """Twice the means of V's channels, int32 (rows, channels) like ``x``, -127 times V's sums in every row."""
    M: gl.constexpr = x.shape[0]
    D: gl.constexpr = x.shape[1]
    L: gl.constexpr = x.type.layout
    # a lane has rows r and r + 8, which are equal
    upper, _ = gl.split(gl.permute(gl.reshape(x, (M // 16, 2, 8, D)), (0, 2, 3, 1)))
    mean = twice_mean(upper * INVERSE_OF_127, INVERSE_COUNT, False)
    mean = gl.reshape(gl.permute(gl.join(mean, mean), (0, 3, 1, 2)), (M, D))
    return gl.convert_layout(mean, L, assert_trivial=True)


@gluon.jit
def _load_mask(
    base, stride_m: gl.constexpr, first, queries, START: gl.constexpr, WIDTH: gl.constexpr, KEYS: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """A tile of a mask, in the layout of scores and the order of their keys; past the last query and key these are repeated."""
    ROWS: gl.constexpr = 16 * WARPS
    # of wide tiles the keys are in :func:`.common.tile_ops.key_order`
    QUADS: gl.constexpr = WIDTH >= 32
    L: gl.constexpr = mask_layout(WIDTH, WARPS) if QUADS else score_layout(WIDTH, WARPS)
    row = gl.minimum(first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, L)), queries - 1)
    n = START + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, L))
    if START + WIDTH > KEYS:
        n = gl.minimum(n, KEYS - 1)
    x = gl.load(base + (row[:, None] * stride_m + n[None, :]))
    if QUADS:
        x = gl.reshape(gl.permute(gl.reshape(x, (ROWS, WIDTH // 16, 4, 2, 2)), (0, 1, 3, 2, 4)), (ROWS, WIDTH))
    return gl.convert_layout(x, score_layout(WIDTH, WARPS), assert_trivial=True)


@gluon.jit
def _finished_scores(
    scores, bias, mask_base, stride_m: gl.constexpr, first, queries, KEYS: gl.constexpr, AHEAD: gl.constexpr,
    SPANS: gl.constexpr, WARPS: gl.constexpr, ACROSS: gl.constexpr, RECIPE: gl.constexpr,
):  # fmt: skip
    """All tiles of scores, with a mask if there is one; maxima of columns eight apart; what is noted of a bias.

    AHEAD products were started behind them.
    """
    WIDTHS: gl.constexpr = row_widths(KEYS, ACROSS)
    STARTS: gl.constexpr = row_starts(KEYS)
    TILES: gl.constexpr = len(WIDTHS)
    seen = bias.unseen(WARPS)
    ready = ()
    for t in gl.static_range(TILES):
        s = finished(scores[t], SPANS * (TILES - 1 - t + AHEAD), WARPS, ACROSS)
        if RECIPE.MASK != "none":
            tile = _load_mask(mask_base, stride_m, first, queries, STARTS[t], WIDTHS[t], KEYS, WARPS)
            seen = bias.noted(seen, tile, 0, False)
            s = bias.added(s, tile)
        ready = ready + (s,)
        if t == 0:
            largest = fold_columns(s, WARPS, ACROSS)
        else:
            largest = gl.maximum(largest, fold_columns(s, WARPS, ACROSS))
    return ready, largest, seen


@gluon.jit
def _attend_in_registers(
    q, scores, query_bits, scales, v_smem, exchange, sums, output, masking, o_stride_n: gl.constexpr, first, queries,
    CHANNELS: gl.constexpr, KEYS: gl.constexpr, WARPS: gl.constexpr, ACROSS: gl.constexpr, SUMS: gl.constexpr,
    RECIPE: gl.constexpr, stride_m: gl.constexpr,
):  # fmt: skip
    """Attention of a block of queries from scores that registers hold, to stored outputs.

    Args:
        q, scores: int8 queries, and their products with all tiles of keys, under way.
        query_bits, scales: see :func:`.sm90.rows.query_factors`.
        exchange: shared memory for what warps of a row exchange: probabilities, maxima, row sums.
        sums: -127 times V's channel sums, from :func:`.sm90.stage_kv.stored_sums`; if they are added at the end and registers
            allow, from :func:`.sm90.stage_kv.sums_beside`.
        output: means of V's channels, from the former, too; output factors; the pointer to outputs.
        masking: with a mask the pointer to it, whose rows are ``stride_m`` apart, and the keys in shared memory.
    """
    means, factors, o_base = output
    _, most_smem, _, _ = exchange
    mask_base, _ = masking
    M: gl.constexpr = 16 * WARPS
    SPANS: gl.constexpr = len(v_smem[0])
    TILES: gl.constexpr = len(row_widths(KEYS, ACROSS))
    PV: gl.constexpr = product_layout(v_smem[0][0].shape[0], WARPS, ACROSS)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, PV, 4)
    PRODUCTS: gl.constexpr = SUMS == "products"
    BEHIND: gl.constexpr = TILES if PRODUCTS else 0
    accumulator = ()
    if PRODUCTS:
        accumulator = begin_outputs(sums, value_widths(CHANNELS), SUMS == "begin", WARPS, ACROSS)
        for t in gl.static_range(TILES):
            # -127 times the sums of V's channels, in every row
            number = gl.full((M, v_smem[t][0].shape[1]), -127, gl.int8, OPERAND)
            accumulator = add_values(accumulator, number, v_smem[t], WARPS, ACROSS)
    usable, multiplier, fraction_bits, drop = query_factors(query_bits, scales, RECIPE)
    if RECIPE.MASK == "bias":
        bias = Bias(multiplier, drop, mask_base.dtype.element_ty)
    elif RECIPE.MASK == "bool":
        bias = Mask(multiplier)
    else:
        bias = NoBias(0)
    ready, largest, seen = _finished_scores(
        scores, bias, mask_base, stride_m, first, queries, KEYS, BEHIND, SPANS, WARPS, ACROSS, RECIPE
    )
    if PRODUCTS and RECIPE.EXACT:
        means = ()
        finished_sums = ()
        for c in gl.static_range(SPANS):
            x = warpgroup_mma_wait(0, [accumulator[c]])
            means = means + (_means_of(x, inverse_count(KEYS)),)
            finished_sums = finished_sums + (warpgroup_mma_init(x),)
        accumulator = finished_sums
    if ACROSS > 1:
        most_smem.store(gl.max(gl.reshape(largest, (M, ACROSS, 8)), 2))
        largest = most_smem.load(part_layout(WARPS, ACROSS))
    if RECIPE.MASK != "none":
        row_max = row_largest(largest)
    else:
        row_max = row_maximum(largest, multiplier, WARPS, ACROSS)
    if RECIPE.QUANTIZE and WARPS == 4 and ACROSS == 1:
        # measured: with three programs per SM 2 to 3 % faster in several waves, 2 to 3 % slower in one wave
        keep_apart(scales[2][2], 2)
    output = means, factors, o_base
    if RECIPE.MASK == "bias":
        doubtful, most = bias.doubt(seen, M)
        if doubtful:
            _attend_marked(
                q, (usable, multiplier, fraction_bits, drop), most, accumulator, v_smem, exchange, sums, output, masking,
                o_stride_n, first, queries, CHANNELS, KEYS, WARPS, ACROSS, SUMS, RECIPE, stride_m,
            )  # fmt: skip
        else:
            _weigh_in_registers(
                ready, bias.row(row_max, fraction_bits, RECIPE.OFFSET, M), accumulator, v_smem, exchange, sums, output, usable,
                o_stride_n, first, queries, CHANNELS, KEYS, WARPS, ACROSS, SUMS, RECIPE,
            )  # fmt: skip
    else:
        if RECIPE.MASK == "bool":
            row = bias.row(row_max, fraction_bits, RECIPE.OFFSET, M)
        elif KEYS > SHORT_ROW:
            row = row_numbers(q, row_max, multiplier, fraction_bits, CHANNELS, RECIPE.OFFSET, WARPS)
        else:
            # on three programs per SM there are no registers for queries beside scores
            row = row_numbers((), row_max, multiplier, fraction_bits, CHANNELS, RECIPE.OFFSET, WARPS)
        _weigh_in_registers(
            ready, row, accumulator, v_smem, exchange, sums, output, usable, o_stride_n, first, queries, CHANNELS, KEYS, WARPS,
            ACROSS, SUMS, RECIPE,
        )  # fmt: skip


@gluon.jit
def _attend_marked(
    q, factors, most, accumulator, v_smem, exchange, sums, output, masking, o_stride_n: gl.constexpr, first, queries,
    CHANNELS: gl.constexpr, KEYS: gl.constexpr, WARPS: gl.constexpr, ACROSS: gl.constexpr, SUMS: gl.constexpr,
    RECIPE: gl.constexpr, stride_m: gl.constexpr,
):  # fmt: skip
    """:func:`_attend_in_registers` with :class:`.sm90.bias.MarkedBias`; ``most`` is the largest bias of each row."""
    usable, multiplier, fraction_bits, drop = factors
    mask_base, k_smem = masking
    SPANS: gl.constexpr = len(v_smem[0])
    WIDTHS: gl.constexpr = row_widths(KEYS, ACROSS)
    bias = MarkedBias(multiplier, drop, fraction_bits, most)
    scores = _all_scores(q, k_smem, WIDTHS, WARPS, ACROSS)
    ready, largest, _ = _finished_scores(
        scores, bias, mask_base, stride_m, first, queries, KEYS, 0, SPANS, WARPS, ACROSS, RECIPE
    )
    row_max = row_largest(largest)
    _weigh_in_registers(
        ready, bias.row(row_max, fraction_bits, RECIPE.OFFSET, 16 * WARPS), accumulator, v_smem, exchange, sums, output,
        usable & (row_max < POISON), o_stride_n, first, queries, CHANNELS, KEYS, WARPS, ACROSS, SUMS, RECIPE,
    )  # fmt: skip


@gluon.jit
def _weigh_in_registers(
    ready, row, accumulator, v_smem, exchange, sums, output, usable, o_stride_n: gl.constexpr, first, queries,
    CHANNELS: gl.constexpr, KEYS: gl.constexpr, WARPS: gl.constexpr, ACROSS: gl.constexpr, SUMS: gl.constexpr,
    RECIPE: gl.constexpr,
):  # fmt: skip
    """:func:`_attend_in_registers` from the numbers of rows on: probabilities, products with V, stored outputs."""
    p_smem, _, total_smem, fine_smem = exchange
    WIDTHS: gl.constexpr = row_widths(KEYS, ACROSS)
    STARTS: gl.constexpr = row_starts(KEYS)
    TILES: gl.constexpr = len(WIDTHS)
    PV: gl.constexpr = product_layout(v_smem[0][0].shape[0], WARPS, ACROSS)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, PV, 4)
    PRODUCTS: gl.constexpr = SUMS == "products"
    MASKED: gl.constexpr = RECIPE.MASK != "none"
    EIGHT: gl.constexpr = score_layout(8 * ACROSS, WARPS, ACROSS)
    APART: gl.constexpr = PRODUCTS or is_crowded(KEYS)
    if not (APART or MASKED):
        ready = raised_if_needed(ready, row.least, EIGHT, ACROSS)
    for t in gl.static_range(TILES):
        s = ready[t]
        if MASKED:
            s = row.raised(s, 1, WARPS, ACROSS)
        elif APART:
            # a program alone on its SM is faster if it starts on the first tile, though each tile costs a branch
            s = raised_if_needed((s,), row.least, EIGHT, ACROSS)[0]
        p, finer = stored_probabilities(row.fine(s), OPERAND, STARTS[t], KEYS, RECIPE.EXACT, WARPS, ACROSS)
        if ACROSS == 1:
            if t == 0 and not PRODUCTS:
                accumulator = begin_outputs(sums, value_widths(CHANNELS), SUMS == "begin", WARPS, ACROSS)
            accumulator = add_values(accumulator, p, v_smem[t], WARPS, ACROSS)
        else:
            p_smem[t].store(p)
        more = quarter_sums(sums_of_four(p), WARPS, ACROSS)
        if t == 0:
            parts = more
        else:
            parts += more
        if RECIPE.EXACT:
            more = quarter_sums(finer, WARPS, ACROSS)
            if t == 0:
                fine_parts = more
            else:
                fine_parts += more
    if ACROSS == 1:
        total = row_sum(parts)
        fine = total
        if RECIPE.EXACT:
            fine = row_sum(fine_parts)
    else:
        store_sums(parts, total_smem, ACROSS)
        if RECIPE.EXACT:
            store_sums(fine_parts, fine_smem, ACROSS)
        fence_async_shared()
        barrier()
        if not PRODUCTS:
            accumulator = begin_outputs(sums, value_widths(CHANNELS), SUMS == "begin", WARPS, ACROSS)
        for t in gl.static_range(TILES):
            accumulator = add_values(accumulator, p_smem[t], v_smem[t], WARPS, ACROSS)
        total = load_sums(total_smem, WARPS, ACROSS)
        fine = total
        if RECIPE.EXACT:
            fine = load_sums(fine_smem, WARPS, ACROSS)
    COUNT: gl.constexpr = stored_columns(WIDTHS)
    numerators = finished_outputs(accumulator, sums, SUMS == "end", WARPS, ACROSS)
    rows = row_inverses(total, fine, COUNT, RECIPE.EXACT)
    store_outputs(numerators, rows, usable, output, o_stride_n, first, queries, CHANNELS, RECIPE.EXACT, WARPS, ACROSS, MASKED)


@gluon.jit
def _allocate(
    HEAD_DIM: gl.constexpr, KEYS: gl.constexpr, BLOCK_M: gl.constexpr, TAIL: gl.constexpr, ACROSS: gl.constexpr,
    UNROLL: gl.constexpr,
):  # fmt: skip
    """Shared memory of a head: keys and values per tile, whole tiles in one piece, what warps of a row exchange.

    Where keys are passed over twice (UNROLL) there is room for the probabilities of an iteration, and of each tile behind.
    """
    D: gl.constexpr = span_widths(HEAD_DIM)
    DV: gl.constexpr = value_widths(HEAD_DIM)
    COUNT: gl.constexpr = len(D)
    WIDTHS: gl.constexpr = row_widths(KEYS, ACROSS)
    # for tail queries keys and values are the rows of products, at least 64
    LEAST: gl.constexpr = 64 if TAIL else 32
    VALUE_LEAST: gl.constexpr = 64 if TAIL else 16
    k_smem = ()
    v_tall = ()
    p_smem = ()
    k_whole = ()
    v_whole = ()
    if UNROLL:
        # in one piece, so that loops can index them
        for c in gl.static_range(COUNT):
            k_whole = k_whole + (_allocate_tiles(KEYS // 128, 128, D[c]),)
            v_whole = v_whole + (_allocate_tiles(KEYS // 128, max(DV[c], VALUE_LEAST), 128),)
        for i in gl.static_range(KEYS // 128):
            k_smem, v_tall = k_smem + (tile_at(k_whole, i),), v_tall + (tile_at(v_whole, i),)
    for i in gl.static_range(len(k_smem), len(WIDTHS)):
        keys = ()
        values = ()
        for c in gl.static_range(COUNT):
            keys = keys + (allocate(max(WIDTHS[i], LEAST), D[c]),)
            values = values + (allocate(max(DV[c], VALUE_LEAST), depth(WIDTHS[i])),)
        k_smem, v_tall = k_smem + (keys,), v_tall + (values,)
    most_smem = 0
    total_smem = 0
    fine_smem = 0
    if ACROSS > 1:
        EXCHANGED: gl.constexpr = exchanged_widths(WIDTHS, KEYS // 128, UNROLL)
        for i in gl.static_range(len(EXCHANGED)):
            p_smem = p_smem + (allocate(BLOCK_M, EXCHANGED[i]),)
        EXCHANGE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        most_smem = gl.allocate_shared_memory(gl.int32, [BLOCK_M, ACROSS], EXCHANGE)
        total_smem = gl.allocate_shared_memory(gl.int32, [BLOCK_M, ACROSS], EXCHANGE)
        fine_smem = gl.allocate_shared_memory(gl.int32, [BLOCK_M, ACROSS], EXCHANGE)
    return k_smem, v_tall, k_whole, v_whole, p_smem, most_smem, total_smem, fine_smem


@gluon.jit
def _head(
    tensors, scales, memory, block, blocks, step, last_too, queries, constant_mantissa, constant_exponent,
    HEAD_DIM: gl.constexpr, KEYS: gl.constexpr, BLOCK_M: gl.constexpr, STRIDES: gl.constexpr, RECIPE: gl.constexpr,
    PLAN: gl.constexpr,
):  # fmt: skip
    """Attention of blocks ``block``, ``block + step``, ... below ``blocks`` of one head.

    Args:
        tensors: pointers to the head in query, key, value, output, mask and the places of tokens.
        scales: pointers to its scales.
        memory: from :func:`_allocate`; no thread uses it any more.
        last_too: whether this program also computes the tail queries, TAIL at most, after the last block.
    """
    q_base, k_base, v_base, o_base, mask_base, place = tensors
    qs_base, ks_base, vs_base, os_base, vo_base = scales
    k_smem, v_tall, k_whole, v_whole, p_smem, most_smem, total_smem, fine_smem = memory
    DTYPE: gl.constexpr = q_base.dtype.element_ty
    SPANS: gl.constexpr = channel_spans(HEAD_DIM)
    FROM: gl.constexpr = span_starts(HEAD_DIM)
    DV: gl.constexpr = value_widths(HEAD_DIM)
    COUNT: gl.constexpr = len(SPANS)
    D: gl.constexpr = span_widths(HEAD_DIM)
    WARPS: gl.constexpr = BLOCK_M // 16
    ACROSS: gl.constexpr = PLAN.ACROSS
    ALL: gl.constexpr = WARPS * ACROSS
    WIDTHS: gl.constexpr = row_widths(KEYS, ACROSS)
    STARTS: gl.constexpr = row_starts(KEYS)
    TILES: gl.constexpr = len(WIDTHS)
    TWICE: gl.constexpr = PLAN.UNROLL > 0
    SUMS: gl.constexpr = PLAN.SUMS
    POLICY: gl.constexpr = PLAN.POLICY

    # prefetch: queries arrive while keys and values, or the block before, are computed
    following = load_queries(q_base, STRIDES.q[2], block * BLOCK_M, queries, HEAD_DIM, WARPS, ACROSS, POLICY)
    if PLAN.TAIL and RECIPE.QUANTIZE:
        last = load_last(q_base, STRIDES.q[2], blocks * BLOCK_M, queries, PLAN.TAIL, HEAD_DIM, WARPS, POLICY)
    v_smem = ()
    for i in gl.static_range(TILES):
        v_smem = v_smem + (first_channels(v_tall[i], DV),)

    head_bits = 0
    factors = ()
    TOGETHER: gl.constexpr = not TWICE and COUNT == 1
    EARLY: gl.constexpr = RECIPE.QUANTIZE and RECIPE.QUERY_TOKEN and not PLAN.LOOPS and TOGETHER and not is_crowded(KEYS)
    if RECIPE.QUANTIZE:
        # all loads are issued before the first use, as far as registers allow
        k = all_quads(k_base, STRIDES.k[2], WIDTHS, KEYS, HEAD_DIM, True, ALL, POLICY, True, place, PLAN.PLACES)
        v = ()
        if TOGETHER:
            v = all_quads(
                v_base, STRIDES.v[2], WIDTHS, KEYS, HEAD_DIM, False, ALL, POLICY, RECIPE.VALUE_OFFSET, place, PLAN.PLACES
            )
        if EARLY:
            # queries arrive first, and until keys and values do there is nothing else to compute
            q, query_bits = read_queries(
                following, DTYPE, qs_base, STRIDES.qs[2], 0, block * BLOCK_M, queries, RECIPE, WARPS, ACROSS
            )  # fmt: skip
        key_bits = quantize_keys(k, k_smem, constant_mantissa, RECIPE.CENTER, ALL)
        if not TOGETHER:
            # registers suffice for keys or for values, not for both
            v = all_quads(
                v_base, STRIDES.v[2], WIDTHS, KEYS, HEAD_DIM, False, ALL, POLICY, RECIPE.VALUE_OFFSET, place, PLAN.PLACES
            )
        if not RECIPE.QUERY_TOKEN:
            # one scale for the head's queries: a pass to find it; they are loaded again for the blocks
            words = load_queries(q_base, STRIDES.q[2], 0, queries, HEAD_DIM, WARPS, ACROSS, "")
            largest = row_amplitude(unpack_queries(words, DTYPE, WARPS, ACROSS), WARPS, ACROSS)
            for start in range(BLOCK_M, queries, BLOCK_M):
                words = load_queries(q_base, STRIDES.q[2], start, queries, HEAD_DIM, WARPS, ACROSS, "")
                more = row_amplitude(unpack_queries(words, DTYPE, WARPS, ACROSS), WARPS, ACROSS)
                largest = nan_max(largest, more)
            if ACROSS == 1:
                largest = gl.reduce(largest, 1, nan_max)
            head_bits = amplitude_to_scale(gl.reduce(largest, 0, nan_max)).to(gl.int32, bitcast=True)
    else:
        for i in gl.static_range(TILES):
            for c in gl.static_range(COUNT):
                rows = k_smem[i][c].slice(0, depth(WIDTHS[i]), 0)
                copy_keys(k_base + FROM[c], STRIDES.k[2], rows, STARTS[i], WIDTHS[i], KEYS, SPANS[c], ALL)
        async_copy.commit_group()
        v = ()
        for i in gl.static_range(TILES):
            # A tile at a time: a thread loads up to sixteen channels at once, and a warp stores one word to each bank.
            values = ()
            for c in gl.static_range(COUNT):
                x = load_quads(
                    v_base + FROM[c], STRIDES.v[2], STARTS[i], WIDTHS[i], KEYS, SPANS[c], False, ALL, depth(WIDTHS[i]), POLICY,
                    False,
                )  # fmt: skip
                values = values + (x,)
            v = v + (values,)
        key_bits = gl.load(ks_base)
        if not RECIPE.QUERY_TOKEN:
            head_bits = gl.load(qs_base)
        for c in gl.static_range(COUNT):
            factor = output_factors(
                o_base, vs_base + FROM[c] * STRIDES.vs[2], STRIDES.vs[2], os_base + FROM[c] * STRIDES.os[2], STRIDES.os[2],
                vo_base + FROM[c] * STRIDES.vo[2], STRIDES.vo[2], SPANS[c], DV[c], RECIPE.VALUE_CHANNEL, RECIPE.OUTPUT_CHANNEL,
                RECIPE.VALUE_OFFSET, ALL, gl.SliceLayout(0, output_layout(DV[c], WARPS, ACROSS)),
            )  # fmt: skip
            factors = factors + (factor,)
        for i in gl.static_range(TILES):
            for c in gl.static_range(COUNT):
                v_smem[i][c].permute((1, 0)).store(to_fragment_order(v[i][c], ACROSS))
        wait_for_copies(queries)
    query_scales = score_scales(key_bits, head_bits, constant_mantissa, constant_exponent, RECIPE)
    if PLAN.TAIL:
        last_smem = ()
        for c in gl.static_range(COUNT):
            last_smem = last_smem + (allocate(PLAN.TAIL, D[c]),)
        if not RECIPE.QUANTIZE:
            last = load_last(q_base, STRIDES.q[2], blocks * BLOCK_M, queries, PLAN.TAIL, HEAD_DIM, WARPS, POLICY)
        last_bits = last_queries(
            last, last_smem, qs_base, STRIDES.qs[2], head_bits, blocks * BLOCK_M, queries, RECIPE, WARPS
        )  # fmt: skip
    if EARLY:
        # the products with the keys run while the values are quantised
        fence_async_shared()
        barrier()
        scores = _all_scores(q, k_smem, WIDTHS, WARPS, ACROSS)
    if RECIPE.QUANTIZE:
        # their scales are read after the next barrier, in the layout of outputs
        scale_smem, offset_smem = quantize_values(
            v, v_smem, constant_mantissa, KEYS, WIDTHS, RECIPE.VALUE_OFFSET, RECIPE.VALUE_CHANNEL, ALL, ACROSS
        )
    fence_async_shared()
    barrier()
    if RECIPE.QUANTIZE:
        # Where a program has several blocks, each loads them when it stores its outputs: registers are short before.
        for c in gl.static_range(COUNT):
            factor = scale_smem[c] if PLAN.LOOPS else stored_beside_outputs(scale_smem[c], WARPS, ACROSS)
            offset = 0
            if RECIPE.VALUE_OFFSET:
                offset = offset_smem[c] if PLAN.LOOPS else stored_beside_outputs(offset_smem[c], WARPS, ACROSS)
            factors = factors + ((factor, offset, 0),)
    left = ()
    means = ()
    if SUMS != "products":
        left, means = stored_sums(v_smem, SUMS, RECIPE.EXACT, KEYS, ALL, ACROSS)
    sums = left
    if SUMS == "end" and not (TWICE or RECIPE.QUANTIZE):
        sums = ()
        for c in gl.static_range(COUNT):
            sums = sums + (sums_beside(left[c], WARPS, ACROSS),)

    exchange = p_smem, most_smem, total_smem, fine_smem
    output = means, factors, o_base
    masking = mask_base, k_smem
    if EARLY:
        _attend_in_registers(
            q, scores, query_bits, query_scales, v_smem, exchange, sums, output, masking, STRIDES.o[2], block * BLOCK_M,
            queries, HEAD_DIM, KEYS, WARPS, ACROSS, SUMS, RECIPE, STRIDES.mask[2],
        )  # fmt: skip
        for i in gl.static_range(TILES):
            # Triton sees the last use of the keys where products start; these still read the keys afterwards
            for c in gl.static_range(COUNT):
                k_smem[i][c]._keep_alive()
    else:
        while block < blocks:
            first = block * BLOCK_M
            words = following
            block += step
            if PLAN.LOOPS:
                following = load_queries(q_base, STRIDES.q[2], block * BLOCK_M, queries, HEAD_DIM, WARPS, ACROSS, POLICY)
            q, query_bits = read_queries(
                words, DTYPE, qs_base, STRIDES.qs[2], head_bits, first, queries, RECIPE, WARPS, ACROSS
            )  # fmt: skip
            if TWICE:
                store = known_keys(k_whole, v_whole, k_smem, v_smem, DV, KEYS, PLAN.UNROLL, ACROSS)
                attend_twice(
                    q, query_factors(query_bits, query_scales, RECIPE), store, sums, output, STRIDES.o[2], first, queries,
                    HEAD_DIM, WARPS, SUMS, RECIPE, exchange, ACROSS,
                )  # fmt: skip
            else:
                scores = _all_scores(q, k_smem, WIDTHS, WARPS, ACROSS)
                _attend_in_registers(
                    q, scores, query_bits, query_scales, v_smem, exchange, sums, output, masking, STRIDES.o[2], first, queries,
                    HEAD_DIM, KEYS, WARPS, ACROSS, SUMS, RECIPE, STRIDES.mask[2],
                )  # fmt: skip

    if PLAN.TAIL:
        if last_too:
            last_rows(
                last_smem, last_bits, query_scales, k_smem, v_tall, left, output, STRIDES.o[2], blocks * BLOCK_M, queries,
                HEAD_DIM, KEYS, WARPS, SUMS, RECIPE,
            )  # fmt: skip


# Compiled once for all batches: Triton would otherwise specialise these on 1 and on multiples of 16.
@gluon.jit(do_not_specialize=("share", "total"))
def hopper_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, mask_ptr, place_ptr, qs_ptr, ks_ptr, vs_ptr, os_ptr, vo_ptr, queries, constant_mantissa,
    constant_exponent, share, total, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, KEYS: gl.constexpr,
    BLOCK_M: gl.constexpr, STRIDES: gl.constexpr, RECIPE: gl.constexpr, PLAN: gl.constexpr,
):  # fmt: skip
    """Attention of blocks of queries; launched by :func:`.dispatch.launch_attention` and :func:`.dispatch.launch_fused`.

    Which blocks a program takes: with ``PLAN.BLOCKS``, ``share`` consecutive ones of the ``total`` blocks
    of all heads, head after head; else, every n-th block of the one head that its
    place in the grid names. STRIDES, RECIPE and PLAN are of :mod:`.gluon.constants`.
    """
    DEPENDENT: gl.constexpr = PLAN.DEPENDENT
    wait_for_kernels(DEPENDENT)
    memory = _allocate(HEAD_DIM, KEYS, BLOCK_M, PLAN.TAIL, PLAN.ACROSS, PLAN.UNROLL)
    if PLAN.BLOCKS:
        at = gl.program_id(0) * share
        end = gl.minimum(at + share, total)
        heads = at // PLAN.BLOCKS, (end - 1) // PLAN.BLOCKS + 1
    else:
        heads = 0, 1
    for head in range(heads[0], heads[1]):
        if PLAN.BLOCKS:
            z = (head // PLAN.HEADS).to(gl.int64)
            h = head % PLAN.HEADS
            block = gl.maximum(at - head * PLAN.BLOCKS, 0)
            blocks = gl.minimum(end - head * PLAN.BLOCKS, PLAN.BLOCKS)
            step = 1
            last_too = blocks == PLAN.BLOCKS
        else:
            z = gl.program_id(1 if PLAN.SPREAD else 2).to(gl.int64)
            h = gl.program_id(0 if PLAN.SPREAD else 1)
            block = gl.program_id(2 if PLAN.SPREAD else 0)
            blocks = queries // BLOCK_M if PLAN.TAIL else gl.cdiv(queries, BLOCK_M)
            step = gl.num_programs(2 if PLAN.SPREAD else 0)
            last_too = block + 1 == step
        kv_head = h // GROUP
        masking = z
        if PLAN.PERIOD:
            masking = z % PLAN.PERIOD
        tensors = (
            q_ptr + z * STRIDES.q[0] + h * STRIDES.q[1],
            k_ptr + z * STRIDES.k[0] + kv_head * STRIDES.k[1],
            v_ptr + z * STRIDES.v[0] + kv_head * STRIDES.v[1],
            o_ptr + z * STRIDES.o[0] + h * STRIDES.o[1],
            mask_ptr + masking * STRIDES.mask[0] + h * STRIDES.mask[1],
            place_ptr + masking * STRIDES.place[0] + kv_head * STRIDES.place[1],
        )
        scales = (
            qs_ptr.to(gl.pointer_type(gl.int32)) + z * STRIDES.qs[0] + h * STRIDES.qs[1],
            ks_ptr.to(gl.pointer_type(gl.int32)) + z * STRIDES.ks[0] + kv_head * STRIDES.ks[1],
            vs_ptr + z * STRIDES.vs[0] + kv_head * STRIDES.vs[1],
            os_ptr + z * STRIDES.os[0] + h * STRIDES.os[1],
            vo_ptr + z * STRIDES.vo[0] + kv_head * STRIDES.vo[1],
        )
        _head(
            tensors, scales, memory, block, blocks, step, last_too, queries, constant_mantissa, constant_exponent, HEAD_DIM,
            KEYS, BLOCK_M, STRIDES, RECIPE, PLAN,
        )  # fmt: skip
        if PLAN.BLOCKS:
            # the next head's keys and values overwrite these
            barrier()
