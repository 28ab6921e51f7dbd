"""Attention over rows of any length on Hopper, for heads of 33 to 128 channels (Gluon; wgmma, TMA).

Computes steps 2 to 9 of ``docs/algorithm.md`` (Equations 3 to 11, Algorithm 1 with the row maximum known first), and step 1
for the queries, for the default recipe without a mask or with one of :mod:`.sm90.bias`, with the bits of
:mod:`.triton.attention_streaming`.

*Work.* A program takes one block of queries of one head, sixteen rows per warp; a quad of lanes shares rows r and r + 8
(drawing in :mod:`.gluon.row_ops`). "Streaming": the keys pass through shared memory twice, for the row maximum and for the
rest. A step is SPAN keys in tiles of 128, each a wgmma of its own; only the last tile of the last step may be narrower, and
with a mask a step is one whole tile. An iteration of the loops is UNROLL steps: two, where a step is one tile and their
number is even. 72 to 96 channels are two spans (:mod:`.sm90.layouts`), each with copies and products of its own.

*Memory.* TMA copies keys (keys, channels) and values (channels, keys) to swizzled shared memory, prefetched one step
ahead or more, and mbarriers say when they have arrived. Scores, probabilities and outputs stay in registers, as do
queries where registers suffice. V is packed beforehand by :func:`.triton.attention_streaming.pack_value_kernel`, with
two permutations: keys in the order in which lanes have the scores (:func:`.common.tile_ops.inverse_key_order`), channels such
that a lane's outputs are neighbours (:func:`.common.tile_ops.row_of_channel`). So lanes need not exchange probabilities
or outputs. A mask's tile comes with the keys.

*Order.*

1. Start the copies of the first keys and values. Meanwhile: load (and quantise) queries, sums of V's channels, output
   factors.
2. First pass: all products of an iteration are started, then their maxima taken; a slot is refilled as soon as its keys are
   read.
3. Row maximum, slope and offset of the exponentials, and whether exponents could wrap in any row of the program.
   Where a bias has marks the first pass is made again before that.
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
)

from ... import tiles
from ...common.fixed_point import inverse_of_count, twice_mean
from ...common.quantize_ops import CHUNKS
from ...common.tile_ops import channel_of_row, packed_sequence, packed_start
from ..ptx_ops import (
    output_factors,
    score_scales,
    to_shared,
)
from ..releases import barrier
from .bias import Bias, Mask, NoBias, attend_biased
from .layouts import (
    channel_spans,
    product_layout,
    span_starts,
    span_widths,
    value_widths,
)
from .query_block import (
    allocate,
    load_queries,
    pairs_twice,
    read_queries,
    store_zeros,
)
from .ring import TILE, Copies, FirstRing, ring_tiles, total_width
from .rows import query_factors
from .two_pass import attend_twice

# Below 96 channels registers are short after quantisation and for two spans, and always with the ptxas of Triton 3.9, which
# then waits for every product (warning C7512). Queries in shared memory leave room. Where registers suffice this is 1 to 4 %
# slower.
SHORT_OF_REGISTERS = gl.constexpr(tiles.SHORT_OF_REGISTERS)


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
def _stored(numbers):
    """Numbers of channels to shared memory, scalars as they are."""
    found = ()
    for i in gl.static_range(len(numbers)):
        if numbers[i].type.is_block():
            found = found + (to_shared(numbers[i]),)
        else:
            found = found + (numbers[i],)
    return found


# Compiled once for all lengths: Triton would otherwise specialise these on multiples of 16.
@gluon.jit(do_not_specialize=("k_rows_z", "k_rows_h", "queries", "keys", "parts", "inverse_count"))
def long_hopper_kernel(
    q_ptr, k_desc, k_last_desc, v_desc, v_last_desc, mask_desc, o_ptr, scales, sums_ptr, q_strides, k_rows_z, k_rows_h, strides,
    cu, queries, keys, parts, inverse_count, constant,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_M: gl.constexpr, STRIDES: gl.constexpr, RING: gl.constexpr,
    RECIPE: gl.constexpr,
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

    Tuples and constants are made in :func:`.sm90.launch.streaming_launches`; STRIDES are those of rows alone, which a kernel is
    compiled for.
    """
    z = gl.program_id(2).to(gl.int64)
    h = gl.program_id(1)
    kv_head = h // GROUP
    head = gl.program_id(2) * (gl.num_programs(1) // GROUP) + kv_head
    q_base = q_ptr + z * q_strides.q_stride_z + h * q_strides.q_stride_h
    o_base = o_ptr + z * strides.o_stride_z + h * strides.o_stride_h
    k_row, v_row, v_column = gl.program_id(2) * k_rows_z + kv_head * k_rows_h, head, gl.to_tensor(0)
    first = gl.program_id(0) * BLOCK_M
    if RING.VARLEN:
        most_keys = keys
        first_q, queries = packed_sequence(cu.cu_q_ptr, z)
        first_k, keys = packed_sequence(cu.cu_k_ptr, z)
        inverse_count = inverse_of_count(keys)
        q_base += first_q * STRIDES.q[0]
        o_base += first_q * STRIDES.o[0]
        k_row += first_k.to(gl.int32)
        v_row, v_column = kv_head, packed_start(first_k, z).to(gl.int32)
        if (first >= queries) | (keys == 0):
            store_zeros(o_base, STRIDES.o[0], first, queries, HEAD_DIM, BLOCK_M // 16)
            return
    qs_base = scales.qs_ptr.to(gl.pointer_type(gl.int32)) + z * strides.qs_stride_z + h * strides.qs_stride_h
    SPANS: gl.constexpr = channel_spans(HEAD_DIM)
    FROM: gl.constexpr = span_starts(HEAD_DIM)
    D: gl.constexpr = span_widths(HEAD_DIM)
    DV: gl.constexpr = value_widths(HEAD_DIM)
    COUNT: gl.constexpr = len(SPANS)
    WIDTH: gl.constexpr = total_width(DV)
    WARPS: gl.constexpr = BLOCK_M // 16
    S: gl.constexpr = product_layout(TILE, WARPS)
    HALVES: gl.constexpr = RING.SPAN // TILE
    steps = gl.cdiv(keys, RING.SPAN)

    # steps of keys in shared memory in the first pass, arrived or under way; the second pass takes longer and uses two
    SLOTS: gl.constexpr = 2 * RING.UNROLL
    k_smem = (gl.allocate_shared_memory(gl.int8, [SLOTS, RING.SPAN, D[0]], k_desc.layout),)
    v_smem = (gl.allocate_shared_memory(gl.int8, [2 * HALVES, DV[0], TILE], v_desc.layout),)
    k_descs = (k_desc,)
    v_descs = (v_desc,)
    if COUNT > 1:
        k_smem = k_smem + (gl.allocate_shared_memory(gl.int8, [SLOTS, RING.SPAN, D[1]], k_last_desc.layout),)
        v_smem = v_smem + (gl.allocate_shared_memory(gl.int8, [2 * HALVES, DV[1], TILE], v_last_desc.layout),)
        k_descs = (k_desc, k_last_desc)
        v_descs = (v_desc, v_last_desc)
    ready = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    first_values = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for index in gl.static_range(SLOTS):
        mbarrier.init(ready.index(index), count=1)
    mbarrier.init(first_values, count=1)
    barrier()
    k_column = kv_head * strides.k_columns_h
    mask_descs = ()
    mask_smem = ()
    mask_row = gl.to_tensor(0)
    if RECIPE.MASK != "none":
        mask_descs = (mask_desc,)
        mask_smem = (gl.allocate_shared_memory(mask_desc.dtype, [SLOTS, BLOCK_M, RING.SPAN], mask_desc.layout),)
        masking = gl.program_id(2)
        if RING.PERIOD:
            masking = masking % RING.PERIOD
        mask_row = masking * strides.mask_rows_z + h * strides.mask_rows_h + first * strides.mask_step
    copies = Copies(
        k_descs, v_descs, k_smem, v_smem, k_row, k_column, v_row * WIDTH, v_column, mask_descs, mask_smem, mask_row, ready,
        HEAD_DIM, RING.SPAN,
    )  # fmt: skip
    for index in gl.static_range(SLOTS):
        copies.expect(index, False, True)
        step = index
        if RING.VARLEN:
            # after a single step the second pass begins with the other slot
            step = gl.minimum(index, steps - 1)
        copies.load_keys(step, index, True)
    mbarrier.expect(first_values, RING.SPAN * WIDTH)
    for half in gl.static_range(HALVES):
        copies.load_values(v_column + half * TILE, first_values, half)
    words = load_queries(q_base, STRIDES.q[0], first, queries, HEAD_DIM, WARPS, 1, "")
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
        vs_base = scales.vs_ptr + z * strides.vs_stride_z + kv_head * strides.vs_stride_h + FROM[c] * strides.vs_stride_d
        os_base = scales.os_ptr + z * strides.os_stride_z + h * strides.os_stride_h + FROM[c] * strides.os_stride_d
        vo_base = scales.vo_ptr + z * strides.vo_stride_z + kv_head * strides.vo_stride_h + FROM[c] * strides.vo_stride_d
        found = output_factors(
            o_ptr, vs_base, strides.vs_stride_d, os_base, strides.os_stride_d, vo_base, strides.vo_stride_d, SPANS[c], DV[c],
            RECIPE.VALUE_CHANNEL, RECIPE.OUTPUT_CHANNEL, RECIPE.VALUE_OFFSET, WARPS, gl.BlockedLayout([1], [32], [WARPS], [0]),
        )  # fmt: skip
        factors = factors + (_stored(found),)
    head_bits = 0
    if not RECIPE.QUERY_TOKEN:
        head_bits = gl.load(qs_base)
    key_bits = gl.load(scales.ks_ptr.to(gl.pointer_type(gl.int32)) + z * strides.ks_stride_z + kv_head * strides.ks_stride_h)
    spans, query_bits = read_queries(
        words, q_ptr.dtype.element_ty, qs_base, strides.qs_stride_n, head_bits, first, queries, RECIPE, WARPS
    )
    q = ()
    for c in gl.static_range(COUNT):
        q = q + (gl.convert_layout(spans[c], gl.DotOperandLayout(0, S, 4), assert_trivial=True),)
    IN_MEMORY: gl.constexpr = HEAD_DIM < 96 and (COUNT > 1 or RECIPE.QUANTIZE or SHORT_OF_REGISTERS)
    operand = q
    if IN_MEMORY:
        operand = ()
        for c in gl.static_range(COUNT):
            operand = operand + (allocate(BLOCK_M, D[c]),)
            operand[c].store(q[c])
        fence_async_shared()
        barrier()
    scores = score_scales(key_bits, query_bits, constant.constant_mantissa, constant.constant_exponent, RECIPE)
    usable, multiplier, fraction_bits, drop = query_factors(query_bits, scores, RECIPE)
    if RING.VARLEN:
        usable = usable & (keys <= most_keys)
    narrow = 0
    if RING.VARLEN:
        # the same kernel for all lengths: whether half of the last tile is enough is seen here
        narrow = (keys - 1) % TILE < TILE // 2
    # a last iteration that is not whole has a loop of its own in both passes
    whole, iterations = keys // (RING.UNROLL * RING.SPAN), steps // RING.UNROLL
    narrow = gl.to_tensor(narrow).to(gl.int32)
    if RECIPE.MASK == "bias":
        bias = Bias(multiplier, drop, mask_desc.dtype)
    elif RECIPE.MASK == "bool":
        bias = Mask(multiplier)
    else:
        bias = NoBias(0)
    store = FirstRing(
        copies, keys, steps, whole, iterations, narrow, q, bias, gl.to_tensor(0), first_values, RING, ring_tiles(RING)
    )
    if HEAD_DIM % 16:
        # Triton specialises on multiples of 16 only, and would store one number at a time
        o_base = o_ptr + z * (strides.o_stride_z // 8 * 8) + h * (strides.o_stride_h // 8 * 8)
        if RING.VARLEN:
            o_base += first_q * STRIDES.o[0]
    query = (usable, multiplier, fraction_bits, drop)
    output = (means, factors, o_base)
    AT: gl.constexpr = "begin" if BEGIN else "end"
    if RECIPE.MASK == "bias":
        attend_biased(operand, query, store, sums, output, STRIDES.o[0], first, queries, HEAD_DIM, WARPS, AT, RECIPE)
    else:
        attend_twice(
            operand, query, store, sums, output, STRIDES.o[0], first, queries, HEAD_DIM, WARPS, AT, RECIPE, ((), 0, 0, 0), 1
        )
