"""Rows of any length on Hopper, with layouts and tensor-core products by hand (Gluon): what :mod:`.long` does, faster.

A program takes one block of queries of one head and walks over the keys twice, for the maximum of its rows and for the
rest. Keys and values come through rings in shared memory, a tile ahead; queries, scores, probabilities and outputs stay in
registers, in the orders of :mod:`.hopper`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from .by_hand import (
    barrier,
    beside_rows,
    least_score,
    magnitudes,
    may_wrap,
    output_factors,
    pack,
    row_exponents,
    twice_probabilities,
)
from .hopper import (
    SUM_FOUR,
    _fold_columns,
    _load_queries,
    _queries,
    _store,
    output_layout,
    product_layout,
    score_layout,
    warp_rows,
)
from .integer import split_scale, usable_scale
from .tile import MASKED, row_multiplier

# the names differ between releases of Triton
_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared

# tiles in a ring
SLOTS = gl.constexpr(2)


@gluon.constexpr_function
def quarter_layout(warps):
    """Four numbers a row, one for each thread that has a part of it."""
    return gl.DistributedLinearLayout([[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], warp_rows(warps), [], [16 * warps, 4])


@gluon.jit
def _fetch(desc, row, column, smem, ready, tile, there):
    """Start to fetch a tile into its place in the ring, if it is ``there``."""
    SIZE: gl.constexpr = smem.shape[1] * smem.shape[2]
    slot = tile % SLOTS
    mbarrier.expect(ready.index(slot), SIZE, pred=there)
    _load(desc, [row, column], ready.index(slot), smem.index(slot), pred=there)


@gluon.jit
def _scores(q, smem, ready, tile, WARPS: gl.constexpr):
    """The product of a block of queries with a tile of keys."""
    N: gl.constexpr = smem.shape[1]
    L: gl.constexpr = product_layout(N, WARPS)
    zeros = gl.zeros((16 * WARPS, N), gl.int32, L)
    mbarrier.wait(ready.index(tile % SLOTS), (tile // SLOTS) & 1)
    s = warpgroup_mma(q, smem.index(tile % SLOTS).permute((1, 0)), zeros, use_acc=False, is_async=True)
    return gl.convert_layout(warpgroup_mma_wait(0, [s]), score_layout(N, WARPS), assert_trivial=True)


@gluon.jit
def _raised(s, least):
    L: gl.constexpr = s.type.layout
    return gl.maximum(s, beside_rows(least, L))


@gluon.jit
def _padded(s, there, filler):
    """Scores, and a filler for keys past the last."""
    L: gl.constexpr = s.type.layout
    n = gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, L))
    return gl.where((n < there)[None, :], s, filler)


@gluon.jit
def _sums(p, WARPS: gl.constexpr):
    """Sums of a tile's stored probabilities, four a row."""
    M: gl.constexpr = p.shape[0]
    N: gl.constexpr = p.shape[1]
    parts = gl.inline_asm_elementwise(SUM_FOUR, "=r,=r,=r,=r,r,r", [p, p * 0 + 1], gl.int32, True, 4)
    parts, _ = gl.split(gl.reshape(parts, (M, N // 4, 2, 2)))
    parts, _ = gl.split(parts)
    return gl.convert_layout(gl.sum(gl.reshape(parts, (M, N // 16, 4)), 1), quarter_layout(WARPS), assert_trivial=True)


@gluon.jit
def long_hopper_kernel(
    q_ptr, k_desc, v_desc, o_ptr, qs_ptr, ks_ptr, vs_ptr, os_ptr, sums_ptr,
    q_stride_z, q_stride_h, q_stride_n: gl.constexpr,
    k_rows_z, k_rows_h, k_columns_h,
    o_stride_z, o_stride_h, o_stride_n: gl.constexpr,
    qs_stride_z, qs_stride_h, qs_stride_n,
    ks_stride_z, ks_stride_h,
    vs_stride_z, vs_stride_h, vs_stride_d,
    os_stride_z, os_stride_h, os_stride_d,
    queries, keys, constant_mantissa, constant_exponent,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    OFFSET: gl.constexpr, MOST: gl.constexpr, MOST_BITS: gl.constexpr,
    QUERY_TOKEN: gl.constexpr, VALUE_CHANNEL: gl.constexpr, OUTPUT_CHANNEL: gl.constexpr,
):  # fmt: skip
    """Attention of one block of queries; see :func:`.attention.launch_attention`."""
    z = gl.program_id(2).to(gl.int64)
    h = gl.program_id(1)
    kv_head = h // GROUP
    head = gl.program_id(2) * (gl.num_programs(1) // GROUP) + kv_head
    q_base = q_ptr + z * q_stride_z + h * q_stride_h
    qs_base = qs_ptr.to(gl.pointer_type(gl.int32)) + z * qs_stride_z + h * qs_stride_h
    D: gl.constexpr = HEAD_DIM
    WARPS: gl.constexpr = BLOCK_M // 16
    S: gl.constexpr = product_layout(BLOCK_N, WARPS)
    L: gl.constexpr = score_layout(BLOCK_N, WARPS)
    PV: gl.constexpr = product_layout(D, WARPS)
    RL: gl.constexpr = gl.SliceLayout(1, score_layout(8, WARPS))
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, PV, 4)
    CO: gl.constexpr = gl.SliceLayout(0, output_layout(D, WARPS))
    first = gl.program_id(0) * BLOCK_M
    tiles = gl.cdiv(keys, BLOCK_N)
    k_row = gl.program_id(2) * k_rows_z + kv_head * k_rows_h
    k_column = kv_head * k_columns_h

    k_smem = gl.allocate_shared_memory(gl.int8, [SLOTS, BLOCK_N, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(gl.int8, [SLOTS, D, BLOCK_N], v_desc.layout)
    k_ready = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(k_ready.index(slot), count=1)
        mbarrier.init(v_ready.index(slot), count=1)
    barrier()
    for tile in gl.static_range(SLOTS):
        _fetch(k_desc, k_row + tile * BLOCK_N, k_column, k_smem, k_ready, tile, True)
    words = _load_queries(q_base, q_stride_n, first, queries, D, WARPS)
    head_bits = 0
    if not QUERY_TOKEN:
        head_bits = gl.load(qs_base)
    key_bits = gl.load(ks_ptr.to(gl.pointer_type(gl.int32)) + z * ks_stride_z + kv_head * ks_stride_h)
    q, query_bits = _queries(words, gl.int8, qs_base, qs_stride_n, head_bits, first, queries, False, QUERY_TOKEN, WARPS)
    q = gl.convert_layout(q, gl.DotOperandLayout(0, S, 4), assert_trivial=True)
    usable = usable_scale(key_bits) & usable_scale(query_bits)
    key_mantissa, key_exponent = split_scale(key_bits)
    multiplier, fraction_bits, _ = row_multiplier(
        query_bits, key_mantissa, key_exponent, constant_mantissa, constant_exponent, "none", False, 0, MOST, MOST_BITS, False
    )

    largest = gl.full((BLOCK_M, 8), MASKED, gl.int32, score_layout(8, WARPS))
    for tile in range(tiles):
        s = _scores(q, k_smem, k_ready, tile, WARPS)
        # nobody reads the tile any more
        barrier()
        # behind the last tile the second walk begins
        following = tile + SLOTS
        following = gl.where(following < tiles, following, following - tiles)
        _fetch(k_desc, k_row + following * BLOCK_N, k_column, k_smem, k_ready, tile, True)
        if (tile + 1) * BLOCK_N > keys:
            s = _padded(s, keys - tile * BLOCK_N, MASKED)
        largest = gl.maximum(largest, _fold_columns(s, WARPS))
    row_max = gl.max(largest, 1)

    wrap = (
        gl.max(may_wrap(gl.convert_layout(magnitudes(q), RL, assert_trivial=True), row_max, multiplier, fraction_bits), 0) > 0
    )
    least = least_score(row_max, multiplier, fraction_bits)
    slope, begin, constant = row_exponents(row_max, multiplier, fraction_bits, OFFSET)
    accumulator = warpgroup_mma_init(gl.zeros((BLOCK_M, D), gl.int32, PV))
    total = gl.zeros((BLOCK_M, 4), gl.int32, quarter_layout(WARPS))
    _fetch(v_desc, head * D, 0, v_smem, v_ready, 0, True)
    for tile in range(tiles):
        s = _scores(q, k_smem, k_ready, tiles + tile, WARPS)
        # nobody reads the tile any more, nor the values of the tile before
        barrier()
        _fetch(k_desc, k_row + (tile + SLOTS) * BLOCK_N, k_column, k_smem, k_ready, tiles + tile, tile + SLOTS < tiles)
        _fetch(v_desc, head * D, (tile + 1) * BLOCK_N, v_smem, v_ready, tile + 1, tile + 1 < tiles)
        if wrap:
            s = _raised(s, least)
        if (tile + 1) * BLOCK_N > keys:
            s = _padded(s, keys - tile * BLOCK_N, beside_rows(row_max, L))
        p = twice_probabilities(s, beside_rows(slope, L), beside_rows(begin, L), beside_rows(constant, L))
        p = gl.permute(gl.reshape(p, (BLOCK_M, BLOCK_N // 16, 2, 4, 2)), (0, 1, 3, 2, 4))
        p = pack(gl.convert_layout(gl.reshape(p, (BLOCK_M, BLOCK_N)), OPERAND, assert_trivial=True))
        mbarrier.wait(v_ready.index(tile % SLOTS), (tile // SLOTS) & 1)
        accumulator = warpgroup_mma(p, v_smem.index(tile % SLOTS).permute((1, 0)), accumulator, is_async=True)
        total += _sums(p, WARPS)
    place = gl.arange(0, D, layout=gl.SliceLayout(0, PV))
    sums = 127 * gl.load(sums_ptr + head * D + (place & 7) * (D // 8) + (place >> 3))
    factor, shift, half = output_factors(
        o_ptr, vs_ptr + z * vs_stride_z + kv_head * vs_stride_h, vs_stride_d, os_ptr + z * os_stride_z + h * os_stride_h,
        os_stride_d, D, VALUE_CHANNEL, OUTPUT_CHANNEL, WARPS, CO,
    )  # fmt: skip
    numerator = sums[None, :] - warpgroup_mma_wait(0, [accumulator])
    # what stood for keys past the last had the largest probability
    count = tiles * BLOCK_N
    most = (twice_probabilities(row_max, slope, begin, constant) + 1) >> 1
    total = gl.convert_layout(gl.sum(total, 1), RL, assert_trivial=True) + (count - keys) * most
    _store(
        numerator, total, usable, factor, shift, half, o_ptr + z * o_stride_z + h * o_stride_h, o_stride_n, first, queries,
        count, WARPS,
    )  # fmt: skip
