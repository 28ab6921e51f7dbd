"""Rows of up to 256 keys on Hopper, with layouts and tensor-core products by hand (Gluon): what :mod:`.short` does, faster.

A program takes one head, or every few blocks of 64 of its queries. A row of scores is held whole, in tiles of 128, 64
and 32 keys, so that 197 keys take 224 columns and not 256. The products of a block are issued one behind the other and
waited for once: those of a tile of probabilities with V run under the exponentials of the next. What the offset of a
stored probability adds to an output, 127 times a channel's sum of V, is formed once a program.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from .by_hand import barrier, halves, output_factors, round_to_int8
from .integer import (
    multiply_high,
    requantize,
    row_inverse,
    row_weight,
    split_scale,
    usable_scale,
)
from .quantize import amplitude_to_scale, higher, inverse_scale, lower, nan_max, nan_min
from .tile import _high_bytes, key_order, probability_words, row_multiplier

# the names differ between releases of Triton
_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared

# the sum of four bytes, each times its weight, and nothing in the other three of four places
SUM_FOUR = gl.constexpr("dp4a.s32.s32 $0, $4, $5, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;")


@gluon.constexpr_function
def row_widths(columns):
    """The tiles of a row, a power of two each, as few as can be."""
    widths = []
    for width in (128, 128, 64, 32):
        if sum(widths) + width <= columns:
            widths.append(width)
    return tuple(widths)


@gluon.constexpr_function
def row_starts(columns):
    """Where the tiles of a row begin."""
    widths = row_widths(columns)
    return tuple(sum(widths[:index]) for index in range(len(widths)))


@gluon.constexpr_function
def product_layout(width, warps):
    """A product with ``width`` columns; sixteen rows a warp."""
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, width, 32])


@gluon.constexpr_function
def shared_layout(width):
    """Rows of ``width`` bytes in shared memory, as the tensor core reads them."""
    return gl.NVMMASharedLayout(min(width, 128), 8)


@gluon.constexpr_function
def row_layout(channels, bits, warps):
    """Rows of ``channels`` numbers, sixteen bytes a thread."""
    each = 128 // bits
    return gl.BlockedLayout([1, each], [32 * each // channels, channels // each], [warps, 1], [1, 0])


@gluon.constexpr_function
def quad_layout(channels, warps):
    """Four keys a thread, which is what it takes to store neighbouring keys of a channel in one word; 32 keys in all."""
    each = min(4, channels // (4 * warps))
    across = channels // (8 * each)
    return gl.BlockedLayout([4, each], [4, 8], [warps // across, across], [1, 0])


@gluon.jit
def _join_rows(a, b):
    """The rows of ``a``, then those of ``b``."""
    x = gl.permute(gl.join(a, b), (2, 0, 1))
    return gl.reshape(x, (2 * a.shape[0], a.shape[1]))


@gluon.jit
def _load_quads(
    base, stride_n: gl.constexpr, START: gl.constexpr, WIDTH: gl.constexpr, KEYS: gl.constexpr, D: gl.constexpr,
    KEY: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """A (WIDTH, D) tile; keys in the order of :func:`.tile.key_order`, the last again past the end; values zero there."""
    if WIDTH > 32:
        # pieces whose addresses differ by a constant
        a = _load_quads(base, stride_n, START, WIDTH // 2, KEYS, D, KEY, WARPS)
        b = _load_quads(base, stride_n, START + WIDTH // 2, WIDTH // 2, KEYS, D, KEY, WARPS)
        x = gl.convert_layout(_join_rows(a, b), quad_layout(D, WARPS), assert_trivial=True)
    else:
        L: gl.constexpr = quad_layout(D, WARPS)
        n = gl.arange(0, WIDTH, layout=gl.SliceLayout(1, L))
        d = gl.arange(0, D, layout=gl.SliceLayout(0, L))
        if KEY:
            n = key_order(n)
        if START + WIDTH <= KEYS:
            x = gl.load(base + (n[:, None] * stride_n + d[None, :]) + START * stride_n)
        elif KEY:
            x = gl.load(base + (gl.minimum(START + n, KEYS - 1)[:, None] * stride_n + d[None, :]))
        else:
            inside = (START + n[:, None] < KEYS) & (d[None, :] >= 0)
            x = gl.load(base + (n[:, None] * stride_n + d[None, :]) + START * stride_n, mask=inside, other=0.0)
    return x


@gluon.jit
def _lowest_rows(x, WARPS: gl.constexpr):
    """Minima of rows 32 apart, two numbers an instruction."""
    if x.shape[0] == 128:
        a, b = halves(x)
        c, d = halves(lower(a, b, False))
        x = lower(c, d, False)
    elif x.shape[0] == 64:
        a, b = halves(x)
        x = lower(a, b, False)
    return gl.convert_layout(x, quad_layout(x.shape[1], WARPS), assert_trivial=True)


@gluon.jit
def _highest_rows(x, WARPS: gl.constexpr):
    if x.shape[0] == 128:
        a, b = halves(x)
        c, d = halves(higher(a, b, False))
        x = higher(c, d, False)
    elif x.shape[0] == 64:
        a, b = halves(x)
        x = higher(a, b, False)
    return gl.convert_layout(x, quad_layout(x.shape[1], WARPS), assert_trivial=True)


@gluon.jit
def _combine(low_a, high_a, most_a, low_b, high_b, most_b):
    return nan_min(low_a, low_b), nan_max(high_a, high_b), nan_max(most_a, most_b)


@gluon.jit
def _quantized(x, middle, inverse, CENTER: gl.constexpr):
    y = x.to(gl.float32)
    if CENTER:
        y = y - middle
    return round_to_int8(y, inverse)


@gluon.jit
def _copy_keys(base, stride_n: gl.constexpr, smem, START: gl.constexpr, KEYS: gl.constexpr, WARPS: gl.constexpr):
    WIDTH: gl.constexpr = smem.shape[0]
    D: gl.constexpr = smem.shape[1]
    L: gl.constexpr = row_layout(D, 8, WARPS)
    n = START + key_order(gl.arange(0, WIDTH, layout=gl.SliceLayout(1, L)))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, L))
    _copy(smem, base + gl.minimum(n, KEYS - 1)[:, None] * stride_n + d[None, :])


@gluon.jit
def _query_rows(first, queries, ROWS: gl.constexpr, L: gl.constexpr):
    """Rows from ``first`` on; past the last row the last again."""
    return gl.minimum(first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, L)), queries - 1)[:, None]


@gluon.jit
def _copy_queries(base, stride_n: gl.constexpr, block, blocks, queries, smem, WARPS: gl.constexpr):
    """Send for a block of queries; past the last, for the rows behind it."""
    ROWS: gl.constexpr = smem.shape[0]
    D: gl.constexpr = smem.shape[1]
    L: gl.constexpr = row_layout(D, base.dtype.element_ty.primitive_bitwidth, WARPS)
    first = gl.minimum(block, blocks) * ROWS
    d = gl.arange(0, D, layout=gl.SliceLayout(0, L))
    _copy(smem, base + _query_rows(first, queries, ROWS, L) * stride_n + d[None, :])
    async_copy.commit_group()


@gluon.jit
def _load_queries(base, stride_n: gl.constexpr, first, queries, ROWS: gl.constexpr, D: gl.constexpr, WARPS: gl.constexpr):
    L: gl.constexpr = row_layout(D, base.dtype.element_ty.primitive_bitwidth, WARPS)
    d = gl.arange(0, D, layout=gl.SliceLayout(0, L))
    return gl.load(base + _query_rows(first, queries, ROWS, L) * stride_n + d[None, :])


@gluon.jit
def _query_scales(base, stride_n, first, queries, QUERY_TOKEN: gl.constexpr, ROWS: gl.constexpr, R: gl.constexpr):
    """Bits of the scales of a block of int8 queries."""
    if QUERY_TOKEN:
        bits = gl.load(base + gl.minimum(first + gl.arange(0, ROWS, layout=R), queries - 1) * stride_n)
    else:
        bits = gl.load(base)
    return bits


@gluon.jit
def _quantize_queries(x, head_scale, QUERY_TOKEN: gl.constexpr, R: gl.constexpr):
    """Quantised queries and the bits of their scales."""
    y = x.to(gl.float32)
    if QUERY_TOKEN:
        scale = amplitude_to_scale(gl.reduce(gl.abs(y), 1, nan_max))
        values = round_to_int8(y, inverse_scale(scale, False)[:, None])
        bits = gl.convert_layout(scale.to(gl.int32, bitcast=True), R)
    else:
        values = round_to_int8(y, inverse_scale(head_scale, False))
        bits = head_scale.to(gl.int32, bitcast=True)
    return values, bits


@gluon.jit
def _channel_sums(smem, WARPS: gl.constexpr):
    """Sums of the channels of a tile of V in shared memory."""
    D: gl.constexpr = smem.shape[0]
    v = smem.load(row_layout(smem.shape[1], 8, WARPS))
    parts = gl.inline_asm_elementwise(SUM_FOUR, "=r,=r,=r,=r,r,r", [v, v * 0 + 1], gl.int32, True, 4)
    return gl.convert_layout(gl.sum(parts, 1), gl.SliceLayout(0, product_layout(D, WARPS)))


@gluon.jit
def _beside_rows(x):
    """A number as it is; one for each channel beside the rows of a tile."""
    if x.type.is_block():
        x = x[None, :]
    return x


@gluon.jit
def _scores(q, k_smem, BLOCK_M: gl.constexpr, WIDTH: gl.constexpr, WARPS: gl.constexpr):
    """Start the product of a block of queries with a tile of keys."""
    zeros = gl.zeros((BLOCK_M, WIDTH), gl.int32, product_layout(WIDTH, WARPS))
    return warpgroup_mma(q, k_smem.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _few_scores(q, k_smem, WIDTH: gl.constexpr):
    """The product of 16 queries with a tile of keys, the columns shared out among the warps."""
    L: gl.constexpr = q.type.layout.parent
    k = k_smem.permute((1, 0)).load(gl.DotOperandLayout(1, L, 4))
    return mma_v2(q, k, gl.zeros((16, WIDTH), gl.int32, L))


@gluon.jit
def _probabilities(s, row_max, multiplier, fraction_bits, OFFSET: gl.constexpr, OPERAND: gl.constexpr, HELD: gl.constexpr):
    """Probabilities of a tile of scores, as an operand of the product with V; HELD: the threads hold theirs already."""
    M: gl.constexpr = s.shape[0]
    N: gl.constexpr = s.shape[1]
    L: gl.constexpr = gl.SliceLayout(1, s.type.layout)
    base = gl.convert_layout(row_max, L, assert_trivial=True)[:, None]
    if multiplier.type.is_block():
        multiplier = gl.convert_layout(multiplier, L, assert_trivial=True)[:, None]
        fraction_bits = gl.convert_layout(fraction_bits, L, assert_trivial=True)[:, None]
    word = probability_words(s, base, multiplier, fraction_bits, "none", False, True, 8, True, OFFSET, False, False)
    p = gl.reshape(_high_bytes(word, False), (M, N // 16, 2, 4, 2))
    p = gl.reshape(gl.permute(p, (0, 1, 3, 2, 4)), (M, N))
    return gl.convert_layout(p, OPERAND, assert_trivial=HELD)


@gluon.jit
def _row_sums(p, START: gl.constexpr, KEYS: gl.constexpr, RO: gl.constexpr):
    """Sums of stored probabilities, those past the last key left out."""
    N: gl.constexpr = p.shape[1]
    n = START + gl.arange(0, N, layout=gl.SliceLayout(0, p.type.layout))
    if START + N <= KEYS:
        weight = p * 0 + 1
    else:
        weight = (n < KEYS).to(gl.int8)[None, :] + p * 0
    parts = gl.inline_asm_elementwise(SUM_FOUR, "=r,=r,=r,=r,r,r", [p, weight], gl.int32, True, 4)
    return gl.convert_layout(gl.sum(parts, 1), RO, assert_trivial=True)


@gluon.jit
def _store_rows(
    numerator, total, usable, factor, shift, half, o_base, o_stride_n: gl.constexpr, first, queries,
    KEYS: gl.constexpr, D: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Normalise a block of outputs and store those of its rows that there are: :func:`.tile.finish`."""
    RO: gl.constexpr = gl.SliceLayout(1, numerator.type.layout)
    bits, inverse = row_inverse(127 * KEYS - total, False)
    if o_base.dtype.element_ty == gl.int8:
        row_factor = multiply_high(inverse[:, None], factor, False)
        result = requantize(numerator << (24 - bits)[:, None], row_factor, shift, half, False)
    else:
        good = usable_scale(factor.to(gl.int32, bitcast=True))
        if usable.type.is_block():
            usable = gl.convert_layout(usable, RO, assert_trivial=True)
        # NaN in a factor a row is cheaper than a choice an element
        weight = gl.where(usable, row_weight(inverse, bits), float("nan"))[:, None]
        result = numerator.to(gl.float32) * weight * gl.where(good, factor, float("nan"))
        result = result.to(o_base.dtype.element_ty)
    OL: gl.constexpr = row_layout(D, o_base.dtype.element_ty.primitive_bitwidth, WARPS)
    rows = first + gl.arange(0, numerator.shape[0], layout=gl.SliceLayout(1, OL))
    channels = gl.arange(0, D, layout=gl.SliceLayout(0, OL))
    o_ptrs = o_base + rows[:, None] * o_stride_n + channels[None, :]
    gl.store(o_ptrs, gl.convert_layout(result, OL), mask=(rows[:, None] < queries) & (channels[None, :] >= 0))


@gluon.jit
def _along(x, L: gl.constexpr):
    """A number, or one for each channel, where a product of layout ``L`` wants it."""
    if x.type.is_block():
        x = gl.convert_layout(x, L)
    return x


@gluon.jit
def _fold_columns(s):
    """Maxima of columns 32 apart, which a thread of :func:`_few_rows` holds."""
    x = gl.max(gl.reshape(s, (s.shape[0], s.shape[1] // 32, 32)), 1)
    return gl.convert_layout(x, s.type.layout)


@gluon.jit
def _few_rows(
    q_smem, qs_base, qs_stride_n, k_smem, v_smem, sums, keys_usable, key_mantissa, key_exponent,
    constant_mantissa, constant_exponent, factor, shift, half, o_base, o_stride_n: gl.constexpr, first, queries,
    D: gl.constexpr, KEYS: gl.constexpr, COLUMNS: gl.constexpr, WARPS: gl.constexpr, OFFSET: gl.constexpr, MOST: gl.constexpr,
    MOST_BITS: gl.constexpr, QUERY_TOKEN: gl.constexpr,
):  # fmt: skip
    """Attention of up to 16 int8 queries. As a block most warps would have none of them; here the warps share the columns."""
    WIDTHS: gl.constexpr = row_widths(COLUMNS)
    STARTS: gl.constexpr = row_starts(COLUMNS)
    L: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, WARPS], [16, 8])
    R: gl.constexpr = gl.SliceLayout(1, L)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, L, 4)
    values = q_smem.slice(0, 16).load(OPERAND)
    query_bits = _query_scales(qs_base, qs_stride_n, first, queries, QUERY_TOKEN, 16, R)
    multiplier, fraction_bits, _ = row_multiplier(
        query_bits, key_mantissa, key_exponent, constant_mantissa, constant_exponent, "none", False, 0, MOST, MOST_BITS, False
    )
    scores = ()
    for t in gl.static_range(len(WIDTHS)):
        scores = scores + (_few_scores(values, k_smem[t], WIDTHS[t]),)
    largest = _fold_columns(scores[0])
    for t in gl.static_range(1, len(WIDTHS)):
        largest = gl.maximum(largest, _fold_columns(scores[t]))
    row_max = gl.max(largest, 1)
    accumulator = gl.zeros((16, D), gl.int32, L)
    total = gl.zeros((16,), gl.int32, R)
    for t in gl.static_range(len(WIDTHS)):
        p = _probabilities(scores[t], row_max, multiplier, fraction_bits, OFFSET, OPERAND, False)
        v = v_smem[t].permute((1, 0)).load(gl.DotOperandLayout(1, L, 4))
        accumulator = mma_v2(p, v, accumulator)
        total += _row_sums(p, STARTS[t], KEYS, R)
    _store_rows(
        _along(sums, L) - accumulator, total, keys_usable & usable_scale(query_bits), _along(factor, L), _along(shift, L),
        _along(half, L), o_base, o_stride_n, first, queries, KEYS, D, WARPS,
    )  # fmt: skip


@gluon.jit
def hopper_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, qs_ptr, ks_ptr, vs_ptr, os_ptr,
    q_stride_z, q_stride_h, q_stride_n: gl.constexpr,
    k_stride_z, k_stride_h, k_stride_n: gl.constexpr,
    v_stride_z, v_stride_h, v_stride_n: gl.constexpr,
    o_stride_z, o_stride_h, o_stride_n: gl.constexpr,
    qs_stride_z, qs_stride_h, qs_stride_n,
    ks_stride_z, ks_stride_h,
    vs_stride_z, vs_stride_h, vs_stride_d,
    os_stride_z, os_stride_h, os_stride_d,
    queries, constant_mantissa, constant_exponent,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, KEYS: gl.constexpr, COLUMNS: gl.constexpr, BLOCK_M: gl.constexpr,
    OFFSET: gl.constexpr, MOST: gl.constexpr, MOST_BITS: gl.constexpr, QUANTIZE: gl.constexpr, CENTER: gl.constexpr,
    QUERY_TOKEN: gl.constexpr, VALUE_CHANNEL: gl.constexpr, OUTPUT_CHANNEL: gl.constexpr, WALK: gl.constexpr,
    TAIL: gl.constexpr,
):  # fmt: skip
    """Attention of one head; see :func:`.attention.launch_attention` and :func:`.attention.launch_fused`.

    With QUANTIZE query, key and value are float, their scales are found here and the output is float. With WALK a
    program takes more than one block of queries; with TAIL (int8, one program a head) up to 16 past whole blocks are
    a matter of their own. COLUMNS are KEYS up to a multiple of 32; a warp has 16 of
    the BLOCK_M queries.
    """
    z = gl.program_id(2).to(gl.int64)
    h = gl.program_id(1)
    kv_head = h // GROUP
    q_base = q_ptr + z * q_stride_z + h * q_stride_h
    k_base = k_ptr + z * k_stride_z + kv_head * k_stride_h
    v_base = v_ptr + z * v_stride_z + kv_head * v_stride_h
    qs_base = qs_ptr.to(gl.pointer_type(gl.int32)) + z * qs_stride_z + h * qs_stride_h
    vs_base = vs_ptr + z * vs_stride_z + kv_head * vs_stride_h
    os_base = os_ptr + z * os_stride_z + h * os_stride_h
    o_base = o_ptr + z * o_stride_z + h * o_stride_h
    blocks = queries // BLOCK_M if TAIL else gl.cdiv(queries, BLOCK_M)
    block = gl.program_id(0)
    D: gl.constexpr = HEAD_DIM
    WARPS: gl.constexpr = BLOCK_M // 16
    WIDTHS: gl.constexpr = row_widths(COLUMNS)
    STARTS: gl.constexpr = row_starts(COLUMNS)
    TILES: gl.constexpr = len(WIDTHS)
    R: gl.constexpr = gl.SliceLayout(1, product_layout(WIDTHS[0], WARPS))
    PV: gl.constexpr = product_layout(D, WARPS)
    RO: gl.constexpr = gl.SliceLayout(1, PV)
    CO: gl.constexpr = gl.SliceLayout(0, PV)

    q_smem = gl.allocate_shared_memory(gl.int8, [2 if WALK else 1, BLOCK_M, D], shared_layout(D))
    # Queries travel while keys and values, or the block before, are worked on. Float ones do in blocks of 128; with three
    # programs a processor, that takes longer than to wait for them.
    AHEAD: gl.constexpr = not QUANTIZE or WARPS == 8
    arrived = q_smem.index(0)
    if QUANTIZE and AHEAD:
        arrived = gl.allocate_shared_memory(q_ptr.dtype.element_ty, [BLOCK_M, D], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    if AHEAD:
        _copy_queries(q_base, q_stride_n, block, blocks, queries, arrived, WARPS)
    k_smem = ()
    v_smem = ()
    for i in gl.static_range(TILES):
        k_smem = k_smem + (gl.allocate_shared_memory(gl.int8, [WIDTHS[i], D], shared_layout(D)),)
        v_smem = v_smem + (gl.allocate_shared_memory(gl.int8, [D, WIDTHS[i]], shared_layout(WIDTHS[i])),)

    head_scale = 0.0
    if QUANTIZE:
        # every load is under way before the first use, and one reduction finds all ranges
        k = ()
        v = ()
        for i in gl.static_range(TILES):
            k = k + (_load_quads(k_base, k_stride_n, STARTS[i], WIDTHS[i], KEYS, D, True, WARPS),)
            v = v + (_load_quads(v_base, v_stride_n, STARTS[i], WIDTHS[i], KEYS, D, False, WARPS),)
        low, high, most = _lowest_rows(k[0], WARPS), _highest_rows(k[0], WARPS), _highest_rows(gl.abs(v[0]), WARPS)
        for i in gl.static_range(1, TILES):
            low, high = lower(low, _lowest_rows(k[i], WARPS), False), higher(high, _highest_rows(k[i], WARPS), False)
            most = higher(most, _highest_rows(gl.abs(v[i]), WARPS), False)
        low, high, most = gl.reduce((low.to(gl.float32), high.to(gl.float32), most.to(gl.float32)), 0, _combine)
        middle = (low + high) * 0.5
        if CENTER:
            low, high = low - middle, high - middle
        key_scale = amplitude_to_scale(gl.reduce(nan_max(gl.abs(low), gl.abs(high)), 0, nan_max))
        if not VALUE_CHANNEL:
            most = most * 0.0 + gl.reduce(most, 0, nan_max)
        value_scale = amplitude_to_scale(most)
        key_inverse, value_inverse = inverse_scale(key_scale, False), inverse_scale(value_scale, False)
        for i in gl.static_range(TILES):
            k_smem[i].store(_quantized(k[i], middle[None, :], key_inverse, CENTER))
            v_smem[i].permute((1, 0)).store(_quantized(v[i], middle[None, :], value_inverse[None, :], False))
        key_bits = key_scale.to(gl.int32, bitcast=True)
        factor, shift, half = gl.convert_layout(value_scale, CO)[None, :], 0, 0
        if not QUERY_TOKEN:
            # one scale for the head's queries: a walk of its own
            largest = gl.abs(_load_queries(q_base, q_stride_n, 0, queries, BLOCK_M, D, WARPS).to(gl.float32))
            for start in range(BLOCK_M, queries, BLOCK_M):
                x = _load_queries(q_base, q_stride_n, start, queries, BLOCK_M, D, WARPS)
                largest = nan_max(largest, gl.abs(x.to(gl.float32)))
            head_scale = amplitude_to_scale(gl.reduce(gl.reduce(largest, 1, nan_max), 0, nan_max))
    else:
        for i in gl.static_range(TILES):
            _copy_keys(k_base, k_stride_n, k_smem[i], STARTS[i], KEYS, WARPS)
        async_copy.commit_group()
        v = ()
        for i in gl.static_range(TILES):
            v = v + (_load_quads(v_base, v_stride_n, STARTS[i], WIDTHS[i], KEYS, D, False, WARPS),)
        key_bits = gl.load(ks_ptr.to(gl.pointer_type(gl.int32)) + z * ks_stride_z + kv_head * ks_stride_h)
        factor, shift, half = output_factors(
            o_ptr, vs_base, vs_stride_d, os_base, os_stride_d, D, VALUE_CHANNEL, OUTPUT_CHANNEL, WARPS, CO
        )
        factor = _beside_rows(factor)
        if o_ptr.dtype.element_ty == gl.int8:
            shift, half = _beside_rows(shift), _beside_rows(half)
        for i in gl.static_range(TILES):
            v_smem[i].permute((1, 0)).store(v[i])
    keys_usable = usable_scale(key_bits)
    key_mantissa, key_exponent = split_scale(key_bits)
    barrier()
    sums = _channel_sums(v_smem[0], WARPS)
    for i in gl.static_range(1, TILES):
        sums += _channel_sums(v_smem[i], WARPS)
    sums = 127 * sums[None, :]

    slot = 0
    while block < blocks:
        first = block * BLOCK_M
        following = block + gl.num_programs(0)
        if AHEAD:
            async_copy.wait_group(0)
        if QUANTIZE:
            if AHEAD:
                x = arrived.load(row_layout(D, q_ptr.dtype.element_ty.primitive_bitwidth, WARPS))
            else:
                x = _load_queries(q_base, q_stride_n, first, queries, BLOCK_M, D, WARPS)
            values, query_bits = _quantize_queries(x, head_scale, QUERY_TOKEN, R)
            q_smem.index(slot).store(values)
        else:
            query_bits = _query_scales(qs_base, qs_stride_n, first, queries, QUERY_TOKEN, BLOCK_M, R)
        fence_async_shared()
        barrier()
        scores = ()
        for t in gl.static_range(TILES):
            scores = scores + (_scores(q_smem.index(slot), k_smem[t], BLOCK_M, WIDTHS[t], WARPS),)
        if WALK:
            # queries alternate between two places, so that nobody overtakes who still reads them
            slot = 1 - slot
            if AHEAD:
                place = arrived if QUANTIZE else q_smem.index(slot)
                _copy_queries(q_base, q_stride_n, following, blocks, queries, place, WARPS)
        usable = keys_usable & usable_scale(query_bits)
        multiplier, fraction_bits, _ = row_multiplier(
            query_bits, key_mantissa, key_exponent, constant_mantissa, constant_exponent, "none", False, 0, MOST, MOST_BITS,
            False,
        )  # fmt: skip
        ready = (warpgroup_mma_wait(TILES - 1, [scores[0]]),)
        row_max = gl.max(ready[0], 1)
        for t in gl.static_range(1, TILES):
            ready = ready + (warpgroup_mma_wait(TILES - 1 - t, [scores[t]]),)
            row_max = gl.maximum(row_max, gl.convert_layout(gl.max(ready[t], 1), R, assert_trivial=True))
        accumulator = warpgroup_mma_init(gl.zeros((BLOCK_M, D), gl.int32, PV))
        total = gl.zeros((BLOCK_M,), gl.int32, RO)
        for t in gl.static_range(TILES):
            p = _probabilities(ready[t], row_max, multiplier, fraction_bits, OFFSET, gl.DotOperandLayout(0, PV, 4), True)
            accumulator = warpgroup_mma(p, v_smem[t].permute((1, 0)), accumulator, is_async=True)
            total += _row_sums(p, STARTS[t], KEYS, RO)
        numerator = sums - warpgroup_mma_wait(0, [accumulator])
        _store_rows(numerator, total, usable, factor, shift, half, o_base, o_stride_n, first, queries, KEYS, D, WARPS)
        block = following

    if TAIL:
        async_copy.wait_group(0)
        barrier()
        _few_rows(
            q_smem.index(slot), qs_base, qs_stride_n, k_smem, v_smem, sums, keys_usable, key_mantissa, key_exponent,
            constant_mantissa, constant_exponent, factor, shift, half, o_base, o_stride_n, blocks * BLOCK_M, queries,
            D, KEYS, COLUMNS, WARPS, OFFSET, MOST, MOST_BITS, QUERY_TOKEN,
        )  # fmt: skip
    elif WALK and AHEAD:
        async_copy.wait_group(0)
