"""Attention over rows of any length on Hopper, for heads of 33 to 128 channels (Gluon; wgmma, TMA).

Computes steps 2 to 9 of ``docs/algorithm.md`` (Equations 3 to 11, Algorithm 1 with the row maximum known first), and
step 1 for the queries, for the default recipe without a mask, with the bits of :mod:`.triton.attention_streaming`.

*Work.* A program takes one block of queries of one head, sixteen rows per warp; a quad of lanes shares rows r and r + 8
(drawing in :mod:`.gluon.row_ops`). "Streaming": the keys pass through shared memory twice, for the row maximum and for
the rest. A step is SPAN keys in tiles of 128, each a wgmma of its own; only the last tile of the last step may be
narrower. An iteration of the loops is UNROLL steps: two, where a step is one tile and their number is even. 72 to 96 channels
are two spans (:mod:`.sm90.layouts`), each with copies and products of its own.

*Memory.* TMA copies keys (keys, channels) and values (channels, keys) to swizzled shared memory, prefetched one step
ahead or more, and mbarriers say when they have arrived. Scores, probabilities and outputs stay in registers, as do
queries where registers suffice. V is packed beforehand by :func:`.triton.attention_streaming.pack_value_kernel`, with
two permutations: keys in the order in which lanes have the scores (:func:`.common.tile_ops.inverse_key_order`), channels such
that a lane's outputs are neighbours (:func:`.common.tile_ops.row_of_channel`). So lanes need not exchange probabilities
or outputs.

*Order.*

1. Start the copies of the first keys and values. Meanwhile: load (and quantise) queries, sums of V's channels, output
   factors.
2. First pass: all products of an iteration are started, then their maxima taken; a slot is refilled as soon as its keys are
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
    warpgroup_mma_wait,
)

from ... import tiles
from ...common.fixed_point import inverse_of_count, split_scale, twice_mean, usable_scale
from ...common.quantize_ops import CHUNKS
from ...common.tile_ops import MASKED, MOST_ROUNDED_KEYS, channel_of_row, packed_sequence, packed_start
from ..ptx_ops import (
    fine_probabilities,
    least_score,
    magnitudes,
    may_wrap,
    output_factors,
    raised,
    row_exponents,
    row_factors,
    to_shared,
)
from ..releases import barrier, load_tile
from ..row_ops import beside_rows, both_rows, one_row, own_twice, row_largest, row_sum
from .layouts import (
    channel_spans,
    product_layout,
    quarter_layout,
    score_layout,
    span_starts,
    span_widths,
    value_widths,
)
from .query_block import (
    add_values,
    allocate,
    begin_outputs,
    exponentiate,
    finished,
    fold_columns,
    last_turns,
    load_queries,
    padded_columns,
    pairs_twice,
    quarter_sums,
    read_queries,
    row_inverses,
    start_scores,
    store_span,
    store_zeros,
    stored_beside_outputs,
    sums_of_four,
    tile_of,
)
from .stage_kv import sums_beside

# Below 96 channels registers are short after quantisation, and always with the ptxas of Triton 3.9, which then waits for
# every product (warning C7512). Queries in shared memory leave room. Where registers suffice this is 1 to 4 % slower.
SHORT_OF_REGISTERS = gl.constexpr(tiles.SHORT_OF_REGISTERS)
# keys of a product
TILE = gl.constexpr(128)


@gluon.constexpr_function
def step_columns(place, unroll, kind, span, left):
    """Return the columns of an iteration's step ``place``; the last step may have fewer in the last (:func:`turn_kinds`)."""
    return (span, left, TILE.value // 2)[kind] if place == unroll - 1 else span


@gluon.constexpr_function
def turn_kinds(varlen):
    """Return how many kinds of iterations there are: of whole steps, and the last one; of packed sequences half a tile, too."""
    return 3 if varlen else 2


@gluon.constexpr_function
def total_width(widths):
    """Return the padded channels of all spans."""
    return sum(widths)


@gluon.constexpr_function
def is_apart(kind):
    """Tell whether what :func:`_put_aside` returned is in shared memory, by its type."""
    return hasattr(kind, "layout")


@gluon.constexpr_function
def tile_count(columns):
    """Return the tiles of a step of ``columns``; all but the last tile are whole."""
    return -(-columns // TILE.value)


@gluon.constexpr_function
def tile_width(index, columns):
    """Return the keys of tile ``index`` of a step of ``columns``."""
    return min(TILE.value, columns - index * TILE.value)


@gluon.jit
def _load_keys(descriptions, row, column, bar, smem, slot, wanted, HEAD_DIM: gl.constexpr):
    """Start the copies of a step of keys, span by span, to a slot; ``bar`` says when they have arrived."""
    FROM: gl.constexpr = span_starts(HEAD_DIM)
    for c in gl.static_range(len(smem)):
        load_tile(descriptions[c], [row, column + FROM[c]], bar, smem[c].index(slot), pred=wanted)


@gluon.jit
def _load_values(descriptions, row, column, bar, smem, slot):
    """Start the copies of a tile of packed values, span by span; see :func:`_load_keys`."""
    first = row
    for c in gl.static_range(len(smem)):
        load_tile(descriptions[c], [first, column], bar, smem[c].index(slot))
        first += smem[c].shape[1]


@gluon.jit
def _value_sums(base, parts, WIDTH: gl.constexpr, D: gl.constexpr, WARPS: gl.constexpr, FRAGMENT: gl.constexpr):
    """Sums of D of V's channels, int32 (channels,), from those of its chunks, which are WIDTH apart.

    With FRAGMENT they are in the order of the rows of packed V.
    """
    L: gl.constexpr = gl.BlockedLayout([CHUNKS, 1], [1, 32], [1, WARPS], [1, 0])
    part = gl.arange(0, CHUNKS, layout=gl.SliceLayout(1, L))[:, None]
    channel = gl.arange(0, D, layout=gl.SliceLayout(0, L))[None, :]
    if FRAGMENT:
        channel = channel_of_row(channel, D)
    return gl.sum(gl.load(base + (part * WIDTH + channel), mask=part < parts, other=0), 0)


@gluon.jit
def _put_aside(numbers):
    """Numbers of channels to shared memory, scalars as they are."""
    found = ()
    for i in gl.static_range(len(numbers)):
        if numbers[i].type.is_block():
            found = found + (to_shared(numbers[i]),)
        else:
            found = found + (numbers[i],)
    return found


@gluon.jit
def _taken_back(numbers, WARPS: gl.constexpr):
    """What :func:`_put_aside` returned, in the layout of outputs."""
    found = ()
    for i in gl.static_range(len(numbers)):
        if is_apart(numbers[i].type):
            found = found + (stored_beside_outputs(numbers[i], WARPS, 1),)
        else:
            found = found + (numbers[i],)
    return found


# Compiled once for all lengths: Triton would otherwise specialise these on multiples of 16.
@gluon.jit(do_not_specialize=("k_rows_z", "k_rows_h", "queries", "keys", "parts", "inverse_count"))
def long_hopper_kernel(
    q_ptr, k_desc, k_last_desc, v_desc, v_last_desc, o_ptr, qs_ptr, ks_ptr, vs_ptr, os_ptr, vo_ptr, sums_ptr,
    q_stride_z, q_stride_h, q_stride_n: gl.constexpr,
    k_rows_z, k_rows_h, k_columns_h,
    o_stride_z, o_stride_h, o_stride_n: gl.constexpr,
    qs_stride_z, qs_stride_h, qs_stride_n,
    ks_stride_z, ks_stride_h,
    vs_stride_z, vs_stride_h, vs_stride_d,
    os_stride_z, os_stride_h, os_stride_d,
    vo_stride_z, vo_stride_h, vo_stride_d,
    cu_q_ptr, cu_k_ptr, queries, keys, parts, inverse_count, constant_mantissa, constant_exponent,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_M: gl.constexpr, RING: gl.constexpr, RECIPE: gl.constexpr,
):  # fmt: skip
    """Attention of one block of queries; launched by :func:`.dispatch.launch_attention`.

    Keys are rows of one matrix (``k_desc``): of head h of batch element z those from ``z * k_rows_z + h * k_rows_h``
    on, in the columns from ``h * k_columns_h`` on. The channels of packed V are rows of another (``v_desc``); their
    sums come in ``parts`` chunks. A head's last span, if it has two, is described once more (``k_last_desc``,
    ``v_last_desc``). SPAN is the keys of a step; an iteration of the loops is UNROLL steps, 1, or 2 if their number is even.
    The last step has LEFT columns; with WHOLE, SPAN keys. With QUANTIZE queries are float and get a scale each.

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
    if RING.VARLEN:
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
    SPAN: gl.constexpr = RING.SPAN
    UNROLL: gl.constexpr = RING.UNROLL
    LEFT: gl.constexpr = RING.LEFT
    SPANS: gl.constexpr = channel_spans(HEAD_DIM)
    FROM: gl.constexpr = span_starts(HEAD_DIM)
    D: gl.constexpr = span_widths(HEAD_DIM)
    DV: gl.constexpr = value_widths(HEAD_DIM)
    COUNT: gl.constexpr = len(SPANS)
    WIDTH: gl.constexpr = total_width(DV)
    WARPS: gl.constexpr = BLOCK_M // 16
    S: gl.constexpr = product_layout(TILE, WARPS)
    EIGHT: gl.constexpr = score_layout(8, WARPS)
    RL: gl.constexpr = gl.SliceLayout(1, EIGHT)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, product_layout(DV[0], WARPS), 4)
    HALVES: gl.constexpr = SPAN // TILE
    steps = gl.cdiv(keys, SPAN)
    k_column = kv_head * k_columns_h

    # steps of keys in shared memory in the first pass, arrived or under way; the second pass takes longer and uses two
    SLOTS: gl.constexpr = 2 * UNROLL
    k_smem = (gl.allocate_shared_memory(gl.int8, [SLOTS, SPAN, D[0]], k_desc.layout),)
    v_smem = (gl.allocate_shared_memory(gl.int8, [2 * HALVES, DV[0], TILE], v_desc.layout),)
    k_descs = (k_desc,)
    v_descs = (v_desc,)
    if COUNT > 1:
        k_smem = k_smem + (gl.allocate_shared_memory(gl.int8, [SLOTS, SPAN, D[1]], k_last_desc.layout),)
        v_smem = v_smem + (gl.allocate_shared_memory(gl.int8, [2 * HALVES, DV[1], TILE], v_last_desc.layout),)
        k_descs = (k_desc, k_last_desc)
        v_descs = (v_desc, v_last_desc)
    ready = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    first_values = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    KEY_BYTES: gl.constexpr = SPAN * total_width(D)
    VALUE_BYTES: gl.constexpr = SPAN * total_width(DV)
    for index in gl.static_range(SLOTS):
        mbarrier.init(ready.index(index), count=1)
    mbarrier.init(first_values, count=1)
    barrier()
    for index in gl.static_range(SLOTS):
        mbarrier.expect(ready.index(index), KEY_BYTES)
        step = index
        if RING.VARLEN:
            # after a single step the second pass begins with the other slot
            step = gl.minimum(index, steps - 1)
        _load_keys(k_descs, k_row + step * SPAN, k_column, ready.index(index), k_smem, index, True, HEAD_DIM)
    mbarrier.expect(first_values, VALUE_BYTES)
    for half in gl.static_range(HALVES):
        _load_values(v_descs, v_row * WIDTH, v_column + half * TILE, first_values, v_smem, half)
    words = load_queries(q_base, q_stride_n, first, queries, HEAD_DIM, WARPS, 1, "")
    # measured: at 64 channels products that begin at the sums are 1 to 2 % faster, at 128 sums that are added at the end
    BEGIN: gl.constexpr = HEAD_DIM <= 64
    sums = ()
    means = ()
    factors = ()
    for c in gl.static_range(COUNT):
        of_span = sums_ptr + head * parts * WIDTH + FROM[c]
        of_rows = -127 * _value_sums(of_span, parts, WIDTH, DV[c], WARPS, True)
        sums = sums + (to_shared(pairs_twice(of_rows)) if BEGIN else to_shared(of_rows),)
        if RECIPE.EXACT:
            mean = twice_mean(_value_sums(of_span, parts, WIDTH, DV[c], WARPS, False), inverse_count, False)
            means = means + (to_shared(mean),)
        else:
            means = means + (0,)
        found = output_factors(
            o_ptr, vs_ptr + z * vs_stride_z + kv_head * vs_stride_h + FROM[c] * vs_stride_d, vs_stride_d,
            os_ptr + z * os_stride_z + h * os_stride_h + FROM[c] * os_stride_d, os_stride_d,
            vo_ptr + z * vo_stride_z + kv_head * vo_stride_h + FROM[c] * vo_stride_d, vo_stride_d, SPANS[c], DV[c],
            RECIPE.VALUE_CHANNEL, RECIPE.OUTPUT_CHANNEL, RECIPE.VALUE_OFFSET, WARPS, gl.BlockedLayout([1], [32], [WARPS], [0]),
        )  # fmt: skip
        factors = factors + (_put_aside(found),)
    head_bits = 0
    if not RECIPE.QUERY_TOKEN:
        head_bits = gl.load(qs_base)
    key_bits = gl.load(ks_ptr.to(gl.pointer_type(gl.int32)) + z * ks_stride_z + kv_head * ks_stride_h)
    spans, query_bits = read_queries(
        words, q_ptr.dtype.element_ty, qs_base, qs_stride_n, head_bits, first, queries, RECIPE, WARPS
    )
    q = ()
    for c in gl.static_range(COUNT):
        q = q + (gl.convert_layout(spans[c], gl.DotOperandLayout(0, S, 4), assert_trivial=True),)
    IN_MEMORY: gl.constexpr = HEAD_DIM < 96 and (RECIPE.QUANTIZE or SHORT_OF_REGISTERS)
    operand = q
    if IN_MEMORY:
        operand = ()
        for c in gl.static_range(COUNT):
            operand = operand + (allocate(BLOCK_M, D[c]),)
            operand[c].store(q[c])
        fence_async_shared()
        barrier()
    usable = usable_scale(key_bits) & usable_scale(query_bits)
    if RING.VARLEN:
        usable = usable & (keys <= most_keys)
    key_mantissa, key_exponent = split_scale(key_bits)
    units = key_mantissa, key_exponent, constant_mantissa, constant_exponent
    multiplier, fraction_bits, _ = row_factors(query_bits, units, "none", RECIPE.MOST, RECIPE.MOST_BITS)

    turns = steps // UNROLL
    # iterations of whole steps; a last one that is not whole has a loop of its own in both passes
    whole = keys // (UNROLL * SPAN)
    narrow = 0
    if RING.VARLEN:
        # the same kernel for all lengths: whether half of the last tile is enough is seen here
        narrow = ((keys - 1) % TILE < TILE // 2).to(gl.int32)
    largest = gl.full((BLOCK_M, 8), MASKED, gl.int32, score_layout(8, WARPS))
    nothing = gl.to_tensor(MASKED)
    for last in gl.static_range(turn_kinds(RING.VARLEN)):
        start, stop = last_turns(last, whole, turns, narrow)
        for turn in range(start, stop):
            # all products of an iteration are started before the first maximum
            scores = ()
            for place in gl.static_range(UNROLL):
                slot = turn % 2 * UNROLL + place
                mbarrier.wait(ready.index(slot), (turn // 2) & 1)
                for half in gl.static_range(tile_count(step_columns(place, UNROLL, last, SPAN, LEFT))):
                    k = tile_of(k_smem, slot, half * TILE, tile_width(half, step_columns(place, UNROLL, last, SPAN, LEFT)), 0)
                    scores = scores + (start_scores(operand, k, WARPS, 1),)
            for tile in gl.static_range(len(scores)):
                step = UNROLL * turn + tile // HALVES
                slot = turn % 2 * UNROLL + tile // HALVES
                s = finished(scores[tile], COUNT * (len(scores) - 1 - tile), WARPS)
                if last and not RING.WHOLE:
                    s = padded_columns(s, keys - step * SPAN - (tile % HALVES) * TILE, nothing)
                largest = gl.maximum(largest, fold_columns(s, WARPS))
                if tile % HALVES == HALVES - 1 or tile == len(scores) - 1:
                    # These keys are read: refill their slot. After the last ones come the first keys of the second pass.
                    barrier()
                    more = turn + 2 < turns
                    following = gl.where(more, step + SLOTS, tile if UNROLL == 2 else step + SLOTS - steps)
                    wanted = more | (turn % 2 == 0) if UNROLL == 2 else True
                    mbarrier.expect(ready.index(slot), KEY_BYTES, pred=wanted)
                    _load_keys(k_descs, k_row + following * SPAN, k_column, ready.index(slot), k_smem, slot, wanted, HEAD_DIM)
    row_max = row_largest(largest)
    sizes = magnitudes(q[0])
    for c in gl.static_range(1, COUNT):
        sizes += gl.convert_layout(magnitudes(q[c]), sizes.type.layout, assert_trivial=True)
    magnitude = one_row(beside_rows(gl.convert_layout(sizes, RL, assert_trivial=True), EIGHT) + largest * 0)
    wrap = gl.max(gl.reshape(may_wrap(magnitude, row_max, multiplier, fraction_bits), (2 * BLOCK_M,)), 0) > 0
    least = both_rows(least_score(row_max, multiplier, fraction_bits), BLOCK_M)
    slope, begin, constant = row_exponents(row_max, multiplier, fraction_bits, RECIPE.OFFSET)
    # keys past the last have the row maximum as score, so the largest probability; it is taken out of the row sum at the end
    most = fine_probabilities(row_max, slope, begin, constant)
    row_max = both_rows(row_max, BLOCK_M)
    slope, begin, constant = both_rows(slope, BLOCK_M), both_rows(begin, BLOCK_M), own_twice(constant, BLOCK_M)
    accumulator = begin_outputs(sums, DV, BEGIN, WARPS, 1)
    total = gl.zeros((BLOCK_M, 4), gl.int32, quarter_layout(WARPS))
    fine = total
    # steps that the first two slots had in the first pass, for the parity of their mbarriers
    passed = (turns + 1) // 2 * 2 if UNROLL == 2 else steps
    mbarrier.wait(ready.index(passed % 2), (passed // 2) & 1)
    mbarrier.wait(first_values, 0)
    # Where the last step is whole, all steps go to the second loop, which raises scores, if exponents could wrap. Not with two
    # steps per iteration: without a branch in the first loop ptxas delays the copies of keys until after the exponentials.
    APART: gl.constexpr = UNROLL == 1 and LEFT == SPAN
    if APART:
        whole = gl.where(wrap, 0, whole)
    if RING.VARLEN:
        narrow = gl.where(wrap, 0, narrow)
    for last in gl.static_range(turn_kinds(RING.VARLEN)):
        start, stop = last_turns(last, whole, turns, narrow)
        for turn in range(start, stop):
            for place in gl.static_range(UNROLL):
                step = UNROLL * turn + place
                slot, other = (place, 1 - place) if UNROLL == 2 else ((passed + step) % 2, (passed + step + 1) % 2)
                v_slot = (place if UNROLL == 2 else step % 2) * HALVES
                for half in gl.static_range(tile_count(step_columns(place, UNROLL, last, SPAN, LEFT))):
                    k = tile_of(k_smem, slot, half * TILE, tile_width(half, step_columns(place, UNROLL, last, SPAN, LEFT)), 0)
                    s = finished(start_scores(operand, k, WARPS, 1), 0, WARPS)
                    if half == tile_count(step_columns(place, UNROLL, last, SPAN, LEFT)) - 1:
                        # these keys are read, and so are the values of the step before: refill both
                        barrier()
                        if step + 1 < steps:
                            mbarrier.expect(ready.index(slot), KEY_BYTES + VALUE_BYTES)
                            row = k_row + (step + 2) * SPAN
                            _load_keys(k_descs, row, k_column, ready.index(slot), k_smem, slot, True, HEAD_DIM)
                            for tile in gl.static_range(HALVES):
                                column = v_column + (step + 1) * SPAN + tile * TILE
                                v_other = HALVES - v_slot + tile
                                _load_values(v_descs, v_row * WIDTH, column, ready.index(slot), v_smem, v_other)
                    if last:
                        s = raised(s, least)
                        if not RING.WHOLE:
                            s = padded_columns(s, keys - step * SPAN - half * TILE, row_max)
                    elif not APART:  # nested: a compile-time condition is not combined with one of run time
                        if wrap:
                            s = raised(s, least)
                    p, finer = exponentiate(s, slope, begin, constant, OPERAND, 0, TILE, RECIPE.EXACT, WARPS, 1)
                    if half == 0:
                        # wait for these values, and for the keys of the next step
                        mbarrier.wait(ready.index(other), ((passed + step + 1) // 2) & 1)
                    v = tile_of(v_smem, v_slot + half, 0, tile_width(half, step_columns(place, UNROLL, last, SPAN, LEFT)), 1)
                    accumulator = add_values(accumulator, p, v, WARPS, 1)
                    total += quarter_sums(sums_of_four(p), WARPS)
                    if RECIPE.EXACT:
                        fine += quarter_sums(finer, WARPS)
    count = (steps - 1) * SPAN + LEFT
    if RING.VARLEN:
        count -= narrow * (TILE // 2)
    total = row_sum(total) + (count - keys) * ((most + 64) >> 7)
    if RECIPE.EXACT:
        fine = row_sum(fine) - (count - keys) * most
        if RING.VARLEN:
            # few keys have the sum of rounded P, of which nothing is missing
            fine = gl.where(keys > MOST_ROUNDED_KEYS, fine, 0)
    if HEAD_DIM % 16:
        # Triton specialises on multiples of 16 only, and would store one number at a time
        o_base = o_ptr + z * (o_stride_z // 8 * 8) + h * (o_stride_h // 8 * 8)
        if RING.VARLEN:
            o_base += first_q * o_stride_n
    row_numbers = row_inverses(total, fine, count, RECIPE.EXACT)
    for c in gl.static_range(COUNT):
        numerator = warpgroup_mma_wait(COUNT - 1 - c, [accumulator[c]])
        if not BEGIN:
            numerator += sums_beside(sums[c], WARPS, 1)
        store_span(
            numerator, row_numbers, usable, _taken_back(factors[c], WARPS), means[c], o_base + FROM[c], o_stride_n, first,
            queries, SPANS[c], RECIPE.EXACT, WARPS,
        )  # fmt: skip
