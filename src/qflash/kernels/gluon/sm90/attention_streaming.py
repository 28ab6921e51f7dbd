"""Attention over rows of any length on Hopper, for heads of 33 to 128 channels (Gluon; wgmma, TMA).

Computes steps 2 to 9 of ``docs/algorithm.md`` (Equations 3 to 11, Algorithm 1 with the row maximum known first), and
step 1 for the queries, for the default recipe without a mask, with the bits of :mod:`.triton.attention_streaming`.

*Work.* A program takes one block of queries of one head, sixteen rows per warp; a quad of lanes shares rows r and r + 8
(drawing in :mod:`.gluon.row_ops`). "Streaming": the keys pass through shared memory twice, for the row maximum and for
the rest. A step is SPAN keys in tiles of 128, each a wgmma of its own; only the last tile of the last step may be
narrower. A turn of the loops is UNROLL steps: two, where a step is one tile and their number is even.

*Memory.* TMA copies keys (keys, channels) and values (channels, keys) to swizzled shared memory, prefetched one step
ahead or more, and mbarriers say when they have arrived. Scores, probabilities and outputs stay in registers, as do
queries where registers suffice. V is packed beforehand by :func:`.triton.attention_streaming.pack_value_kernel`, with
two permutations: keys in the order in which lanes have the scores (:func:`.common.tile_ops.inverse_key_order`), channels such
that a lane's outputs are neighbours (:func:`.common.tile_ops.row_of_channel`). So lanes need not exchange probabilities
or outputs.

*Order.*

1. Start the copies of the first keys and values. Meanwhile: load (and quantise) queries, sums of V's channels, output
   factors.
2. First pass: all products of a turn are started, then their maxima taken; a slot is refilled as soon as its keys are
   read.
3. Row maximum, slope and offset of the exponentials, and whether exponents could wrap in any row of the program.
4. Second pass, per tile: scores again, probabilities, asynchronous product with V, row sums.
5. Normalise and store.

*Why this way.* On this chip products and integer instructions hardly overlap, so the number of instructions counts:
steps of 256 keys where they fit, the exponential of five instructions, and separate loops for the rare cases (keys past
the last, and scales so large that scores have to be raised).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from ... import tiles
from ...common.fixed_point import inverse_of_count, split_scale, twice_mean, usable_scale
from ...common.quantize_ops import CHUNKS
from ...common.tile_ops import MASKED, MOST_ROUNDED_KEYS, channel_of_row, packed_sequence, packed_start
from ..ptx_ops import (
    aside,
    barrier,
    fine_probabilities,
    least_score,
    magnitudes,
    may_wrap,
    output_factors,
    raised,
    row_exponents,
    row_factors,
)
from ..row_ops import beside_rows, both_rows, one_row, own_twice, row_largest, row_sum
from .layouts import kernel_width, output_layout, product_layout, quarter_layout, score_layout
from .query_block import (
    allocate,
    beside_product,
    finished,
    fold_columns,
    last_turns,
    load_query_span,
    padded_columns,
    padded_rows,
    pairs_twice,
    quarter_sums,
    read_queries,
    row_inverses,
    start_scores,
    store_span,
    store_zeros,
    stored,
    sums_of_four,
)

# the names differ between releases of Triton
_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared

# At 64 channels registers are short after quantisation, and always with the ptxas of Triton 3.9, which then waits after every
# product (warning C7512). Queries in shared memory leave room. Where registers suffice, measured, this is 1 to 4 % slower.
SHORT_OF_REGISTERS = gl.constexpr(tiles.SHORT_OF_REGISTERS)
# keys of a product
TILE = gl.constexpr(128)


@gluon.constexpr_function
def step_columns(place, unroll, kind, span, left):
    """Return the columns of step ``place`` of a turn; in the last one the last step may have fewer (:func:`turn_kinds`)."""
    return (span, left, TILE.value // 2)[kind] if place == unroll - 1 else span


@gluon.constexpr_function
def turn_kinds(varlen):
    """Return how many kinds of turns there are: of whole steps, and the last one; of packed sequences half a tile, too."""
    return 3 if varlen else 2


@gluon.constexpr_function
def tile_count(columns):
    """Return the tiles of a step of ``columns``; all but the last tile are whole."""
    return -(-columns // TILE.value)


@gluon.jit
def _keys(smem, index: gl.constexpr, COLUMNS: gl.constexpr):
    """The keys of tile ``index`` of a step, (keys, channels) in shared memory."""
    return smem.slice(index * TILE, min(TILE, COLUMNS - index * TILE), 0)


@gluon.jit
def _values(smem, index: gl.constexpr, COLUMNS: gl.constexpr):
    """The values of tile ``index`` of a step, (keys, channels) in shared memory, as the right operand."""
    return smem.slice(0, min(TILE, COLUMNS - index * TILE), 1).permute((1, 0))


@gluon.jit
def _value_sums(base, parts, D: gl.constexpr, WARPS: gl.constexpr, FRAGMENT: gl.constexpr):
    """Sums of V's channels, int32 (channels,), from those of its chunks; with FRAGMENT in the rows of packed V."""
    L: gl.constexpr = gl.BlockedLayout([CHUNKS, 1], [1, 32], [1, WARPS], [1, 0])
    part = gl.arange(0, CHUNKS, layout=gl.SliceLayout(1, L))[:, None]
    channel = gl.arange(0, D, layout=gl.SliceLayout(0, L))[None, :]
    if FRAGMENT:
        channel = channel_of_row(channel, D)
    return gl.sum(gl.load(base + (part * D + channel), mask=part < parts, other=0), 0)


# Compiled once for all lengths: Triton would otherwise specialise these on multiples of 16.
@gluon.jit(do_not_specialize=("k_rows_z", "k_rows_h", "queries", "keys", "parts", "inverse_count"))
def long_hopper_kernel(
    q_ptr, k_desc, v_desc, o_ptr, qs_ptr, ks_ptr, vs_ptr, os_ptr, vo_ptr, sums_ptr,
    q_stride_z, q_stride_h, q_stride_n: gl.constexpr,
    k_rows_z, k_rows_h, k_columns_h,
    o_stride_z, o_stride_h, o_stride_n: gl.constexpr,
    qs_stride_z, qs_stride_h, qs_stride_n,
    ks_stride_z, ks_stride_h,
    vs_stride_z, vs_stride_h, vs_stride_d,
    os_stride_z, os_stride_h, os_stride_d,
    vo_stride_z, vo_stride_h, vo_stride_d,
    cu_q_ptr, cu_k_ptr, queries, keys, parts, inverse_count, constant_mantissa, constant_exponent,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_M: gl.constexpr, SPAN: gl.constexpr, UNROLL: gl.constexpr,
    LEFT: gl.constexpr, WHOLE: gl.constexpr, VARLEN: gl.constexpr, EXACT: gl.constexpr, VALUE_OFFSET: gl.constexpr,
    OFFSET: gl.constexpr, MOST: gl.constexpr, MOST_BITS: gl.constexpr, QUANTIZE: gl.constexpr,
    QUERY_TOKEN: gl.constexpr, VALUE_CHANNEL: gl.constexpr, OUTPUT_CHANNEL: gl.constexpr,
):  # fmt: skip
    """Attention of one block of queries; launched by :func:`.dispatch.launch_attention`.

    Keys are rows of one matrix (``k_desc``): of head h of batch element z those from ``z * k_rows_z + h * k_rows_h``
    on, in the columns from ``h * k_columns_h`` on. The channels of packed V are rows of another (``v_desc``); their
    sums come in ``parts`` chunks. SPAN is the keys of a step; a turn of the loops is UNROLL steps, 1, or 2 if their
    number is even. The last step has LEFT columns; with WHOLE, SPAN keys. With QUANTIZE queries are float and get a scale
    each.

    With VARLEN z is a sequence of packed tensors, as in :func:`.triton.attention_streaming.long_kernel`: strides of a batch are
    0 but those of scales and sums, the last step is as wide as all, values begin at :func:`.common.tile_ops.packed_start`, and
    outputs of sequences of more than ``keys`` keys are NaN.
    """
    z = gl.program_id(2).to(gl.int64)
    h = gl.program_id(1)
    kv_head = h // GROUP
    head = gl.program_id(2) * (gl.num_programs(1) // GROUP) + kv_head
    q_base, o_base = q_ptr + z * q_stride_z + h * q_stride_h, o_ptr + z * o_stride_z + h * o_stride_h
    k_row, v_row, v_column = gl.program_id(2) * k_rows_z + kv_head * k_rows_h, head, 0
    first = gl.program_id(0) * BLOCK_M
    if VARLEN:
        most_keys = keys
        first_q, queries = packed_sequence(cu_q_ptr, z)
        first_k, keys = packed_sequence(cu_k_ptr, z)
        inverse_count = inverse_of_count(keys)
        q_base += first_q * q_stride_n
        o_base += first_q * o_stride_n
        k_row += first_k.to(gl.int32)
        v_row, v_column = kv_head, packed_start(first_k, z).to(gl.int32)
        if (first >= queries) | (keys == 0):
            store_zeros(o_base, o_stride_n, first, queries, HEAD_DIM, BLOCK_M // 16)
            return
    qs_base = qs_ptr.to(gl.pointer_type(gl.int32)) + z * qs_stride_z + h * qs_stride_h
    D: gl.constexpr = kernel_width(HEAD_DIM)
    WARPS: gl.constexpr = BLOCK_M // 16
    S: gl.constexpr = product_layout(TILE, WARPS)
    PV: gl.constexpr = product_layout(D, WARPS)
    EIGHT: gl.constexpr = score_layout(8, WARPS)
    RL: gl.constexpr = gl.SliceLayout(1, EIGHT)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, PV, 4)
    CO: gl.constexpr = gl.SliceLayout(0, output_layout(D, WARPS))
    HALVES: gl.constexpr = SPAN // TILE
    steps = gl.cdiv(keys, SPAN)
    k_column = kv_head * k_columns_h

    # steps of keys in shared memory in the first pass, arrived or under way; the second pass takes longer and uses two
    SLOTS: gl.constexpr = 2 * UNROLL
    k_smem = gl.allocate_shared_memory(gl.int8, [SLOTS, SPAN, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(gl.int8, [2 * HALVES, D, TILE], v_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    first_values = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    SIZE: gl.constexpr = SPAN * D
    for index in gl.static_range(SLOTS):
        mbarrier.init(ready.index(index), count=1)
    mbarrier.init(first_values, count=1)
    barrier()
    for index in gl.static_range(SLOTS):
        mbarrier.expect(ready.index(index), SIZE)
        step = index
        if VARLEN:
            # after a single step the second pass begins with the other slot
            step = gl.minimum(index, steps - 1)
        _load(k_desc, [k_row + step * SPAN, k_column], ready.index(index), k_smem.index(index))
    mbarrier.expect(first_values, SIZE)
    for half in gl.static_range(HALVES):
        _load(v_desc, [v_row * D, v_column + half * TILE], first_values, v_smem.index(half))
    words = load_query_span(q_base, q_stride_n, first, queries, HEAD_DIM, WARPS, 1, "")
    sums = -127 * _value_sums(sums_ptr + head * parts * D, parts, D, WARPS, True)
    mean = 0
    if EXACT:
        mean = aside(twice_mean(_value_sums(sums_ptr + head * parts * D, parts, D, WARPS, False), inverse_count, False))
    # measured: at 64 channels products that begin at the sums are 1 to 2 % faster, at 128 sums that are added at the end
    BEGIN: gl.constexpr = D == 64
    sums = aside(pairs_twice(sums)) if BEGIN else aside(sums)
    factor, shift, rounding = output_factors(
        o_ptr, vs_ptr + z * vs_stride_z + kv_head * vs_stride_h, vs_stride_d, os_ptr + z * os_stride_z + h * os_stride_h,
        os_stride_d, vo_ptr + z * vo_stride_z + kv_head * vo_stride_h, vo_stride_d, HEAD_DIM, D, VALUE_CHANNEL, OUTPUT_CHANNEL,
        VALUE_OFFSET, WARPS, gl.BlockedLayout([1], [32], [WARPS], [0]),
    )  # fmt: skip
    CHANNELS: gl.constexpr = factor.type.is_block()
    SHIFTS: gl.constexpr = shift.type.is_block()
    ROUNDINGS: gl.constexpr = rounding.type.is_block()
    if CHANNELS:
        factor = aside(factor)
    if SHIFTS:
        shift = aside(shift)
    if ROUNDINGS:
        rounding = aside(rounding)
    head_bits = 0
    if not QUERY_TOKEN:
        head_bits = gl.load(qs_base)
    key_bits = gl.load(ks_ptr.to(gl.pointer_type(gl.int32)) + z * ks_stride_z + kv_head * ks_stride_h)
    spans, query_bits = read_queries(
        (words,), q_ptr.dtype.element_ty, qs_base, qs_stride_n, head_bits, first, queries, QUANTIZE, QUERY_TOKEN, WARPS
    )
    q = gl.convert_layout(spans[0], gl.DotOperandLayout(0, S, 4), assert_trivial=True)
    IN_MEMORY: gl.constexpr = D == 64 and (QUANTIZE or SHORT_OF_REGISTERS)
    operand = q
    if IN_MEMORY:
        operand = allocate(BLOCK_M, D)
        operand.store(q)
        fence_async_shared()
        barrier()
    usable = usable_scale(key_bits) & usable_scale(query_bits)
    if VARLEN:
        usable = usable & (keys <= most_keys)
    key_mantissa, key_exponent = split_scale(key_bits)
    units = key_mantissa, key_exponent, constant_mantissa, constant_exponent
    multiplier, fraction_bits, _ = row_factors(query_bits, units, "none", MOST, MOST_BITS)

    turns = steps // UNROLL
    # turns of whole steps; a last turn that is not whole has a loop of its own in both passes
    whole = keys // (UNROLL * SPAN)
    narrow = 0
    if VARLEN:
        # the same kernel for all lengths: whether half of the last tile is enough is seen here
        narrow = ((keys - 1) % TILE < TILE // 2).to(gl.int32)
    largest = gl.full((BLOCK_M, 8), MASKED, gl.int32, score_layout(8, WARPS))
    for last in gl.static_range(turn_kinds(VARLEN)):
        start, stop = last_turns(last, whole, turns, narrow)
        for turn in range(start, stop):
            # all products of a turn are started before the first maximum
            scores = ()
            for place in gl.static_range(UNROLL):
                slot = turn % 2 * UNROLL + place
                mbarrier.wait(ready.index(slot), (turn // 2) & 1)
                for half in gl.static_range(tile_count(step_columns(place, UNROLL, last, SPAN, LEFT))):
                    k = _keys(k_smem.index(slot), half, step_columns(place, UNROLL, last, SPAN, LEFT))
                    scores = scores + (start_scores((operand,), (k,), k.shape[0], WARPS, 1),)
            for tile in gl.static_range(len(scores)):
                step = UNROLL * turn + tile // HALVES
                slot = turn % 2 * UNROLL + tile // HALVES
                s = finished(scores[tile], len(scores) - 1 - tile, WARPS)
                if last and not WHOLE:
                    s = padded_columns(s, keys - step * SPAN - (tile % HALVES) * TILE, MASKED)
                largest = gl.maximum(largest, fold_columns(s, WARPS))
                if tile % HALVES == HALVES - 1 or tile == len(scores) - 1:
                    # These keys are read: refill their slot. After the last ones come the first keys of the second pass.
                    barrier()
                    more = turn + 2 < turns
                    following = gl.where(more, step + SLOTS, tile if UNROLL == 2 else step + SLOTS - steps)
                    wanted = more | (turn % 2 == 0) if UNROLL == 2 else True
                    mbarrier.expect(ready.index(slot), SIZE, pred=wanted)
                    _load(k_desc, [k_row + following * SPAN, k_column], ready.index(slot), k_smem.index(slot), pred=wanted)
    row_max = row_largest(largest)
    magnitude = one_row(beside_rows(gl.convert_layout(magnitudes(q), RL, assert_trivial=True), EIGHT) + largest * 0)
    wrap = gl.max(gl.reshape(may_wrap(magnitude, row_max, multiplier, fraction_bits), (2 * BLOCK_M,)), 0) > 0
    least = both_rows(least_score(row_max, multiplier, fraction_bits), BLOCK_M)
    slope, begin, constant = row_exponents(row_max, multiplier, fraction_bits, OFFSET)
    # keys past the last have the row maximum as score, so the largest probability; it is taken out of the row sum at the end
    most = fine_probabilities(row_max, slope, begin, constant)
    row_max = both_rows(row_max, BLOCK_M)
    slope, begin, constant = both_rows(slope, BLOCK_M), both_rows(begin, BLOCK_M), own_twice(constant, BLOCK_M)
    accumulator = beside_product(sums, WARPS) if BEGIN else gl.zeros((BLOCK_M, D), gl.int32, PV)
    accumulator = warpgroup_mma_init(accumulator)
    total = gl.zeros((BLOCK_M, 4), gl.int32, quarter_layout(WARPS))
    fine = total
    # steps that the first two slots had in the first pass, for the parity of their mbarriers
    passed = (turns + 1) // 2 * 2 if UNROLL == 2 else steps
    mbarrier.wait(ready.index(passed % 2), (passed // 2) & 1)
    mbarrier.wait(first_values, 0)
    # Where the last step is whole, all steps go to the second loop, which raises scores, if exponents could wrap. Not with two
    # steps per turn: without a branch in the first loop ptxas delays the copies of keys until after the exponentials.
    APART: gl.constexpr = UNROLL == 1 and LEFT == SPAN
    if APART:
        whole = gl.where(wrap, 0, whole)
    if VARLEN:
        narrow = gl.where(wrap, 0, narrow)
    for last in gl.static_range(turn_kinds(VARLEN)):
        start, stop = last_turns(last, whole, turns, narrow)
        for turn in range(start, stop):
            for place in gl.static_range(UNROLL):
                step = UNROLL * turn + place
                slot, other = (place, 1 - place) if UNROLL == 2 else ((passed + step) % 2, (passed + step + 1) % 2)
                v_slot = (place if UNROLL == 2 else step % 2) * HALVES
                for half in gl.static_range(tile_count(step_columns(place, UNROLL, last, SPAN, LEFT))):
                    k = _keys(k_smem.index(slot), half, step_columns(place, UNROLL, last, SPAN, LEFT))
                    s = finished(start_scores((operand,), (k,), k.shape[0], WARPS, 1), 0, WARPS)
                    if half == tile_count(step_columns(place, UNROLL, last, SPAN, LEFT)) - 1:
                        # these keys are read, and so are the values of the step before: refill both
                        barrier()
                        if step + 1 < steps:
                            mbarrier.expect(ready.index(slot), 2 * SIZE)
                            _load(k_desc, [k_row + (step + 2) * SPAN, k_column], ready.index(slot), k_smem.index(slot))
                            for tile in gl.static_range(HALVES):
                                column = v_column + (step + 1) * SPAN + tile * TILE
                                _load(v_desc, [v_row * D, column], ready.index(slot), v_smem.index(HALVES - v_slot + tile))
                    if last:
                        s = raised(s, least)
                        if not WHOLE:
                            s = padded_rows(s, keys - step * SPAN - half * TILE, row_max)
                    elif not APART:  # nested: a compile-time condition is not combined with one of run time
                        if wrap:
                            s = raised(s, least)
                    p, finer = stored(s, slope, begin, constant, OPERAND, 0, TILE, EXACT, WARPS, 1)
                    if half == 0:
                        # wait for these values, and for the keys of the next step
                        mbarrier.wait(ready.index(other), ((passed + step + 1) // 2) & 1)
                    v = _values(v_smem.index(v_slot + half), half, step_columns(place, UNROLL, last, SPAN, LEFT))
                    accumulator = warpgroup_mma(p, v, accumulator, is_async=True)
                    total += quarter_sums(sums_of_four(p), WARPS)
                    if EXACT:
                        fine += quarter_sums(finer, WARPS)
    if CHANNELS:
        factor = factor.load(CO)
    if SHIFTS:
        shift = shift.load(CO)
    if ROUNDINGS:
        rounding = rounding.load(CO)
    numerator = warpgroup_mma_wait(0, [accumulator])
    if not BEGIN:
        numerator += sums.load(gl.SliceLayout(0, PV))[None, :]
    count = (steps - 1) * SPAN + LEFT
    if VARLEN:
        count -= narrow * (TILE // 2)
    total = row_sum(total) + (count - keys) * ((most + 64) >> 7)
    if EXACT:
        fine = row_sum(fine) - (count - keys) * most
        if VARLEN:
            # few keys have the sum of rounded P, of which nothing is missing
            fine = gl.where(keys > MOST_ROUNDED_KEYS, fine, 0)
    if HEAD_DIM % 16:
        # Triton specialises on multiples of 16 only, and would store one number at a time
        o_base = o_ptr + z * (o_stride_z // 8 * 8) + h * (o_stride_h // 8 * 8)
        if VARLEN:
            o_base += first_q * o_stride_n
    store_span(
        numerator, row_inverses(total, fine, count, EXACT), usable, (factor, shift, rounding), mean, o_base, o_stride_n, first,
        queries, HEAD_DIM, EXACT, WARPS,
    )  # fmt: skip
