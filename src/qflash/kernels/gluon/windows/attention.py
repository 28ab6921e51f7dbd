"""Attention in registers for Swin's windows, 33 to 64 keys and 32 channels (Gluon; mma.sync, from sm_80 on).

Computes steps 1 to 9 of ``docs/algorithm.md`` (Equations 1 to 11, Algorithm 1 with the row maximum known first), with
an additive bias or none, with the bits of :mod:`.triton.attention_resident`.

*Work.* A warp works on tiles of sixteen queries of one window and has all keys and values of it. A program is one warp,
with one window or several that share a bias; where windows are few, it is two or four warps with sixteen queries each:

    4 warps, 49 queries       warp 0: rows 0..15    warp 1: 16..31    warp 2: 32..47    warp 3: 48
    1 warp                    tiles 0, 1, 2 of sixteen rows, then half a tile of eight rows

A row of scores is tiles of 32, 16 and 8 columns: 49 keys take 56 columns, not 64 (:mod:`.windows.layouts`).

*Registers and shared memory.* A lane loads queries, keys and values as the tensor core wants them in registers. So lanes
exchange only numbers of rows and, when they quantise, ranges and scales of channels. A quad of lanes shares rows g and
g + 8, g = lane // 4; with t = lane % 4 a lane has columns 2t, 2t + 1 of every eight scores. Three permutations keep data
in its lane and change no result:

* channels 8t to 8t + 7 of a query and a key are loaded by one lane, four for each half of the product;
* keys of P V stand in the order in which lanes have the scores;
* channels of V are permuted (fragment order), so that a lane's outputs are eight neighbouring channels.

Shared memory serves only a bias that several windows share (STAGED) and what four warps of a program exchange: parts of
K and V (:mod:`.windows.operands`), and flags.

*Order.* Load keys, values and queries; quantise; start the accumulator at -127 times V's channel sums (one product),
which corrects the storage offset of P. Then per tile of queries: scores, bias, row maximum, probabilities, products
with V and with ones, normalise, store; the next queries are prefetched.

*Marks in a bias.* -inf, NaN and biases far from 0 need selects per score. The usual code has none, but sets flags where
it may have been wrong (:func:`_flags`); such a window is computed again with all selects (CAREFUL).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from ...common.dependent_launch import wait_for_kernels
from ...common.fixed_point import row_inverse, usable_scale
from ...common.quantize_ops import (
    BIAS_UNIT,
    MOST_BIAS_MAXIMUM,
    amplitude_to_scale,
    higher,
    inverse_scale,
    nan_max,
)
from ...common.tile_ops import BIAS_MASKED, BIAS_POISON, POISON, _high_bytes, probability_words
from ..bias_ops import add_any_bias, fixed_with_marks, scaled_scores
from ..ptx_ops import (
    as_float32,
    beside_channels,
    beside_outputs,
    fine_probabilities,
    fine_probabilities_16,
    halves,
    keep_apart,
    least_if_needed,
    normalised,
    output_factors,
    pack,
    raised_if_needed,
    round_to_int8,
    row_exponents,
    row_factors,
    score_scales,
    unpack,
)
from ..releases import barrier
from ..row_ops import beside_columns, beside_rows, both_rows, one_row, own_twice, row_largest
from .layouts import (
    all_flags_layout,
    bias_layout,
    has_half,
    operand_layout,
    own_rows_layout,
    product_layout,
    query_layout,
    score_layout,
    stage_layout,
    starts,
    widths,
)
from .operands import (
    key_of,
    load_key_parts,
    load_keys,
    load_rows,
    load_value_parts,
    load_values,
    quantize_parts,
    quantize_window,
    right_operands,
    shared_operands,
)

# inline assembly has to return a value
PREFETCH = gl.constexpr("prefetch.global.L1 [$1]; mov.b32 $0, 0;")


@gluon.jit
def _load_queries(base, stride_n: gl.constexpr, first, ROWS: gl.constexpr, QUERIES: gl.constexpr, POLICY: gl.constexpr):
    """Queries as int32 words in a left operand's order, (ROWS, 32 / numbers per word); a loop carries words."""
    EACH: gl.constexpr = 32 // base.dtype.element_ty.primitive_bitwidth
    L: gl.constexpr = query_layout(ROWS, EACH)
    n = gl.minimum(first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, L)), QUERIES - 1)
    d = gl.arange(0, 32 // EACH, layout=gl.SliceLayout(0, L))
    words = base.to(gl.pointer_type(gl.int32))
    return gl.load(words + n[:, None] * (stride_n // EACH) + d[None, :], eviction_policy=POLICY)


@gluon.jit
def _fetch_queries(base, stride_n: gl.constexpr, first, QUERIES: gl.constexpr):
    """Prefetch 32 queries to L1, one per lane. Loads ahead of an iteration would not help: ptxas moves them to their use."""
    n = gl.minimum(first + gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0])), QUERIES - 1)
    gl.inline_asm_elementwise(PREFETCH, "=r,l", [base + n * stride_n], gl.int32, False, 1)


@gluon.jit
def _sixteen(x):
    """Rows as they are; eight rows are filled up to sixteen with zeros."""
    if x.shape[0] == 8:
        x = gl.reshape(gl.permute(gl.join(x, x * 0), (2, 0, 1)), (16, x.shape[1]))
    return x


@gluon.jit
def _query_operand(x):
    """Queries as the left operand (rows, 32): channel 8c + 4i + j at place 16i + 4c + j."""
    x = _sixteen(x)
    M: gl.constexpr = x.shape[0]
    x = gl.permute(gl.reshape(x, (M, 4, 2, 4)), (0, 2, 1, 3))
    return gl.convert_layout(gl.reshape(x, (M, 32)), operand_layout(0, gl.num_warps()), assert_trivial=True)


@gluon.jit
def _probability_operand(p):
    """32 columns of stored probabilities as the left operand; a lane renames its registers."""
    p = _sixteen(p)
    M: gl.constexpr = p.shape[0]
    p = gl.permute(gl.reshape(p, (M, 2, 2, 4, 2)), (0, 1, 3, 2, 4))
    return gl.convert_layout(gl.reshape(p, (M, 32)), operand_layout(0, gl.num_warps()), assert_trivial=True)


@gluon.jit
def _product(a, b, ROWS: gl.constexpr):
    """The first ROWS rows of a product with fresh accumulators, int32 (ROWS, columns)."""
    x = mma_v2(a, b, gl.zeros((a.shape[0], b.shape[1]), gl.int32, product_layout(gl.num_warps())))
    return _upper(x, ROWS)


@gluon.jit
def _upper(x, ROWS: gl.constexpr):
    """The first ROWS rows, 8 or 16, of an accumulator."""
    N: gl.constexpr = x.shape[1]
    if ROWS == 8:
        x, _ = halves(x)
    return gl.convert_layout(x, score_layout(ROWS, N), assert_trivial=True)


@gluon.jit
def _beside(a, b):
    """The columns of ``a``, then those of ``b``; no data moves."""
    x = gl.reshape(gl.permute(gl.join(a, b), (0, 2, 1)), (a.shape[0], 2 * a.shape[1]))
    return gl.convert_layout(x, score_layout(a.shape[0], 2 * a.shape[1]), assert_trivial=True)


@gluon.jit
def _widen(p):
    """The tiles of a row after the first, next to each other and filled with zeros up to 32 columns."""
    x = p[1]
    if len(p) == 3:
        x = _beside(x, _beside(p[2], p[2] * 0))
    if x.shape[1] == 8:
        x = _beside(x, x * 0)
    if x.shape[1] == 16:
        x = _beside(x, x * 0)
    return x


@gluon.jit
def _first_eight(q):
    """Rows g of a tile of queries, without rows g + 8."""
    q, _ = halves(q)
    return gl.convert_layout(q, query_layout(8, 32 // q.shape[1]), assert_trivial=True)


@gluon.jit
def _row_amplitude(x):
    """Largest magnitude of each row, float32, one row per thread; 16-bit floats by twos until lanes have to exchange."""
    ROWS: gl.constexpr = x.shape[0]
    x = gl.reshape(gl.abs(x), (ROWS, 4, 2, 2, 2))
    a, b = gl.split(gl.permute(x, (0, 1, 3, 4, 2)))
    a, b = gl.split(gl.permute(higher(a, b, False), (0, 1, 3, 2)))
    return row_largest(gl.reshape(higher(a, b, False), (ROWS, 8)).to(gl.float32))


@gluon.jit
def _fold_columns(s):
    """Maxima of columns eight apart, which one lane has: (rows, 8)."""
    x = gl.max(gl.reshape(s, (s.shape[0], s.shape[1] // 8, 8)), 1)
    return gl.convert_layout(x, score_layout(s.shape[0], 8), assert_trivial=True)


@gluon.jit
def _row_max(s, ONE: gl.constexpr):
    """Row maxima over all tiles of a row: one row per thread with ONE, else a vector."""
    largest = _fold_columns(s[0])
    for i in gl.static_range(1, len(s)):
        largest = gl.maximum(largest, _fold_columns(s[i]))
    if ONE:
        largest = row_largest(largest)
    else:
        largest = gl.max(largest, 1)
    return largest


@gluon.jit
def _store(
    numerator, total, usable, factor, shift, half, o_base, o_stride_n: gl.constexpr, first,
    KEYS: gl.constexpr, QUERIES: gl.constexpr, CAREFUL: gl.constexpr, POLICY: gl.constexpr,
):  # fmt: skip
    """Normalise a tile of negative numerators and store its rows below QUERIES: :func:`.common.tile_ops.finish`.

    With CAREFUL rows may have no key; these are 0.
    """
    ROWS: gl.constexpr = numerator.shape[0]
    OL: gl.constexpr = own_rows_layout(ROWS)
    x = gl.reshape(gl.permute(gl.reshape(numerator, (ROWS, 4, 8)), (0, 2, 1)), (ROWS, 32))
    x = gl.convert_layout(x, OL, assert_trivial=True)
    factor, shift, half = beside_channels(factor, OL), beside_channels(shift, OL), beside_channels(half, OL)
    total = 127 * KEYS - one_row(total)
    bits, inverse = row_inverse(total, False)
    DTYPE: gl.constexpr = o_base.dtype.element_ty
    if CAREFUL and gl.int8 != DTYPE:
        if shift.type.is_block():
            shift = gl.where(beside_outputs(total, OL, 1) > 0, shift, 0.0)
    result = normalised(x, bits, inverse, usable, (factor, shift, half), DTYPE, 1)
    rows = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, OL))
    channels = gl.arange(0, 32, layout=gl.SliceLayout(0, OL))
    inside = (rows[:, None] < QUERIES) & (channels[None, :] >= 0)
    gl.store(o_base + rows[:, None] * o_stride_n + channels[None, :], result, mask=inside, eviction_policy=POLICY)


@gluon.jit
def _exponentiate(z, row_max, multiplier, fraction_bits, OFFSET: gl.constexpr):
    """Exponentiate a tile of scores with a bias, some of which may be masked: 127 - P in int8."""
    L: gl.constexpr = z.type.layout
    word = probability_words(
        z, beside_rows(row_max, L), beside_rows(multiplier, L), beside_rows(fraction_bits, L), "bias", False, True, 8, True,
        OFFSET, True, False,
    )  # fmt: skip
    return _high_bytes(word, False)


@gluon.jit
def _sums(p, v, begin, ones, weight, ROWS: gl.constexpr):
    """(negative numerators (ROWS, 32); sums of stored P (ROWS, 8), equal in all columns) over the tiles of a row."""
    p0, p1 = _probability_operand(p[0]), _probability_operand(_widen(p))
    if p0.dtype == gl.int32:
        p0, p1 = pack(p0), pack(p1)
    numerator = mma_v2(p1, v[1], mma_v2(p0, v[0], begin))
    total = mma_v2(p1, weight, mma_v2(p0, ones, gl.zeros((p0.shape[0], 8), gl.int32, product_layout(gl.num_warps()))))
    return _upper(numerator, ROWS), _upper(total, ROWS)


@gluon.jit
def _fine(s, slope, begin, constant):
    """Fine probabilities of one tile."""
    L: gl.constexpr = s.type.layout
    return fine_probabilities(s, beside_rows(slope, L), beside_rows(begin, L), beside_rows(constant, L))


@gluon.jit
def _load_bias(
    base, STRIDES: gl.constexpr, first, ROWS: gl.constexpr, START: gl.constexpr, WIDTH: gl.constexpr, QUERIES: gl.constexpr,
    KEYS: gl.constexpr,
):  # fmt: skip
    """A tile of the bias as stored, (ROWS, WIDTH), keys in order; beyond the edges the last row and key are repeated."""
    L: gl.constexpr = bias_layout(ROWS, WIDTH)
    stride_n: gl.constexpr = STRIDES.mask[1]
    row = gl.minimum(first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, L)), QUERIES - 1) * STRIDES.mask[0]
    column = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, L))[None, :]
    if START + WIDTH <= KEYS:
        bias = gl.load(base + (row[:, None] + column * stride_n) + START * stride_n)
    elif START + 1 == KEYS:
        bias, _ = gl.broadcast(gl.load(base + row + START * stride_n)[:, None], row[:, None] + column)
    else:
        bias = gl.load(base + (row[:, None] + gl.minimum(START + column, KEYS - 1) * stride_n))
    return bias


@gluon.jit
def _load_row_bias(base, STRIDES: gl.constexpr, first, ROWS: gl.constexpr, QUERIES: gl.constexpr, KEYS: gl.constexpr):
    """The bias of all keys for ROWS queries, one tensor per tile."""
    WIDTHS: gl.constexpr = widths(KEYS)
    STARTS: gl.constexpr = starts(KEYS)
    bias = ()
    for i in gl.static_range(len(WIDTHS)):
        bias = bias + (_load_bias(base, STRIDES, first, ROWS, STARTS[i], WIDTHS[i], QUERIES, KEYS),)
    return bias


@gluon.jit
def _beside_scores(bias):
    """A tile of the bias (floats as float32) in the layout of the scores, whose keys are in key order."""
    ROWS: gl.constexpr = bias.shape[0]
    WIDTH: gl.constexpr = bias.shape[1]
    if bias.dtype.is_floating():
        bias = bias.to(gl.float32)
    if WIDTH >= 16:
        bias = gl.reshape(gl.permute(gl.reshape(bias, (ROWS, WIDTH // 16, 4, 2, 2)), (0, 1, 3, 2, 4)), (ROWS, WIDTH))
    return gl.convert_layout(bias, score_layout(ROWS, WIDTH), assert_trivial=True)


@gluon.jit
def _fixed(bias):
    """A bias without marks in 1/65536 octaves, int32; a float accepted by :func:`_beyond` needs no clamp or base."""
    if bias.dtype.is_floating():
        bias = gl.inline_asm_elementwise("cvt.rni.s32.f32 $0, $1;", "=r,f", [bias * BIAS_UNIT], gl.int32, True, 1)
    return bias


@gluon.jit
def _all_fixed(bias):
    """:func:`qflash.quantize_bias` of all tiles of rows, with marks."""
    if bias[0].dtype.is_floating():
        high = _highest(bias[0])
        for i in gl.static_range(1, len(bias)):
            high = gl.maximum(high, _highest(bias[i]))
        fixed = ()
        for i in gl.static_range(len(bias)):
            fixed = fixed + (fixed_with_marks(bias[i], high),)
        bias = fixed
    return bias


@gluon.jit
def _highest(bias):
    """Row maxima of a tile of a float bias."""
    return gl.convert_layout(
        gl.max(bias, 1), gl.SliceLayout(1, score_layout(bias.shape[0], 8)), assert_trivial=True
    )  # fmt: skip


@gluon.jit
def _beyond(bias):
    """(rows, 8): 1 where a tile's float bias is outside what :func:`_fixed` converts (1024 nats, or NaN), else 0."""
    high = _largest(bias[0])
    for i in gl.static_range(1, len(bias)):
        high = nan_max(high, _largest(bias[i]))
    return gl.where(high <= MOST_BIAS_MAXIMUM, 0, 1)


@gluon.jit
def _largest(bias):
    """Largest magnitude of columns eight apart, or NaN: (rows, 8)."""
    x = gl.reduce(gl.reshape(gl.abs(bias), (bias.shape[0], bias.shape[1] // 8, 8)), 1, nan_max)
    return gl.convert_layout(x, score_layout(bias.shape[0], 8), assert_trivial=True)


@gluon.jit
def _any(flags, smem):
    """Whether a flag of any lane of the program is set; several warps exchange theirs through ``smem``."""
    if gl.num_warps() > 1:
        # one flag per lane, and every warp reads those of all: Triton's reduction over warps has two barriers
        a, b = gl.split(gl.permute(gl.reshape(flags, (4, 2, 8, 4, 2)), (0, 2, 3, 4, 1)))
        a, b = gl.split(a | b)
        smem.store(gl.reshape(a | b, (32, 4)))
        flags = smem.load(all_flags_layout())
    # as one vector: a reduction over all lanes of a warp is one instruction (redux)
    flags = gl.reshape((flags != 0).to(gl.int32), (flags.shape[0] * flags.shape[1],))
    return gl.max(flags, 0) > 0


@gluon.jit
def _stage(bias):
    """A tile of the bias permuted for :func:`_staged`: (tiles of eight columns, 128), four numbers per lane."""
    EIGHTS: gl.constexpr = bias.shape[1] // 8
    x = gl.permute(gl.reshape(bias, (2, 8, EIGHTS, 4, 2)), (2, 1, 3, 0, 4))
    return gl.convert_layout(gl.reshape(x, (EIGHTS, 128)), stage_layout(EIGHTS), assert_trivial=True)


@gluon.jit
def _staged(smem, ROWS: gl.constexpr):
    """The first ROWS rows of a tile of the bias that :func:`_stage` permuted, from shared memory by 16-byte loads."""
    EIGHTS: gl.constexpr = smem.shape[0]
    x = gl.reshape(smem.load(stage_layout(EIGHTS)), (EIGHTS, 8, 4, 2, 2))
    return _upper(gl.reshape(gl.permute(x, (3, 1, 0, 2, 4)), (16, 8 * EIGHTS)), ROWS)


@gluon.jit
def _flags(bias, row_max, drop, ROWS: gl.constexpr, STAGED: gl.constexpr):
    """(rows or 8, 8) int32: not 0 where a tile of queries has to be computed again with selects.

    That is where scores are so large that their sum with a mark could look like an unmarked one (``drop`` is 0). For a
    fixed-point bias also where a row's maximum says that no key takes part or that there is a NaN; for a float bias
    where its range is too large or has a NaN (of a STAGED one that was tested when it was staged).
    """
    L: gl.constexpr = score_layout(ROWS, 8)
    flags = beside_rows(own_twice(gl.where(drop < 1, 1, 0), ROWS), L) + gl.zeros((ROWS, 8), gl.int32, L)
    if bias[0].dtype.is_floating():
        flags |= _beyond(bias)
    elif not STAGED:
        # 0 for maxima between half of the mask's mark and half of the NaN's, -2**29 and 2**29
        flags |= beside_rows(own_twice((row_max + BIAS_POISON // 2) & BIAS_MASKED, ROWS), L)
    return _eight_rows(flags)


@gluon.jit
def _eight_rows(flags):
    """Flags of sixteen rows combined to eight; those of several warps as they are."""
    if flags.shape[0] == 16:
        a, b = halves(flags)
        flags = a | b
    return gl.convert_layout(flags, score_layout(flags.shape[0], 8), assert_trivial=True)


@gluon.jit
def _no_flags():
    """Zeros in the form of :func:`_eight_rows`."""
    ROWS: gl.constexpr = 8 if gl.num_warps() == 1 else 16 * gl.num_warps()
    return gl.zeros((ROWS, 8), gl.int32, score_layout(ROWS, 8))


@gluon.jit
def _queries(
    q, DTYPE: gl.constexpr, qs_base, qs_stride_n, head_bits, first,
    ROWS: gl.constexpr, QUERIES: gl.constexpr, RECIPE: gl.constexpr,
):  # fmt: skip
    """(a tile of queries as int8 (ROWS, 32), float32 bits of the scale, or of its rows' scales, one row per thread)."""
    if RECIPE.QUANTIZE and ROWS == 8:
        q = _first_eight(q)
    q = unpack(q, DTYPE, query_layout(q.shape[0], 1))
    bits = head_bits
    if RECIPE.QUANTIZE:
        y = as_float32(q)
        if RECIPE.QUERY_TOKEN:
            scale = amplitude_to_scale(_row_amplitude(q))
            inverse = both_rows(inverse_scale(scale, False), ROWS)
            q = round_to_int8(y, beside_columns(inverse, 8, query_layout(ROWS, 1)))
            bits = scale.to(gl.int32, bitcast=True)
        else:
            q = round_to_int8(y, inverse_scale(head_bits.to(gl.float32, bitcast=True), False))
    elif RECIPE.QUERY_TOKEN:
        L: gl.constexpr = score_layout(ROWS, 8)
        n = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, L))
        bits = gl.load(qs_base + gl.minimum(n, QUERIES - 1) * qs_stride_n)
        bits = one_row(beside_rows(bits, L) + gl.zeros((ROWS, 8), gl.int32, L))
    return q, bits


@gluon.jit
def _attend(
    words, query, operands, output, bias, loaded, tile, DTYPE: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr,
    QUERIES: gl.constexpr, STAGED: gl.constexpr, CAREFUL: gl.constexpr, POLICY: gl.constexpr, STRIDES: gl.constexpr,
    RECIPE: gl.constexpr,
):  # fmt: skip
    """Attention of a tile of ROWS queries, from words of :func:`_load_queries` to stored outputs.

    Args:
        query: where the queries' scales are, and the bits of one for all; what :func:`.gluon.ptx_ops.row_factors` returns then,
            else it is computed here from the last; whether the keys' scale is usable; units.
        operands: keys per tile, values, the accumulator at which products with V begin, and the weights of row sums for
            the first 32 columns and for the others.
        output: output factors and the pointer to the outputs.
        bias: the pointer to the bias, and its staged tiles in shared memory.
        loaded: the tile's bias, if it was prefetched.

    Returns:
        with a bias :func:`_flags`, which say whether the window has to be computed again; zeros with CAREFUL.
    """
    k, v, begin, ones, weight = operands
    factor, shift, half, o_base = output
    mask_base, staged = bias
    qs_base, qs_stride_n, head_bits, row, keys_usable, units = query
    first = tile * 16 * gl.num_warps()
    q, query_bits = _queries(words, DTYPE, qs_base, qs_stride_n, head_bits, first, ROWS, QUERIES, RECIPE)
    if query_bits.type.is_block():
        MASK: gl.constexpr = RECIPE.MASK
        row = row_factors(query_bits, units, MASK, RECIPE.MOST, RECIPE.MOST_BITS)
    multiplier, fraction_bits, drop = row
    AHEAD: gl.constexpr = len(loaded) > 0
    # measured: on int8 this keeps ptxas from issuing the loads of the values after the scores; floats have arrived by now
    APART: gl.constexpr = AHEAD and not loaded[0].dtype.is_floating()
    if APART:
        keep_apart(units[2], 1)
    q = _query_operand(q)
    usable = keys_usable & usable_scale(query_bits)
    s = (_product(q, k[0], ROWS),)
    for i in gl.static_range(1, len(k)):
        s = s + (_product(q, k[i], ROWS),)
    flags, p = 0, ()
    # measured: with one scale for all queries little is computed per row, and one row per thread is 1 to 2 % slower
    ONE: gl.constexpr = query_bits.type.is_block() or RECIPE.MASK == "bias"
    if RECIPE.MASK == "bias":
        scale = both_rows(multiplier, ROWS), both_rows(drop, ROWS)
        b = ()
        if STAGED:
            for i in gl.static_range(len(k)):
                b = b + (_staged(staged[i].index(tile), ROWS),)
        else:
            if not AHEAD:
                loaded = _load_row_bias(mask_base, STRIDES, first, ROWS, QUERIES, KEYS)
            for i in gl.static_range(len(k)):
                b = b + (_beside_scores(loaded[i]),)
        z = ()
        if CAREFUL:
            b, bits = _all_fixed(b), both_rows(fraction_bits, ROWS)
            for i in gl.static_range(len(k)):
                z = z + (add_any_bias(scaled_scores(s[i], scale), b[i], bits),)
            row_max = _row_max(z, ONE)
            flags = _no_flags()
            largest = both_rows(row_max, ROWS)
            for i in gl.static_range(len(k)):
                p = p + (_exponentiate(z[i], largest, scale[0], bits, RECIPE.OFFSET),)
        else:
            for i in gl.static_range(len(k)):
                z = z + (scaled_scores(s[i], scale) + _fixed(b[i]),)
            row_max = _row_max(z, ONE)
            flags = _flags(b, row_max, drop, ROWS, STAGED)
            largest = both_rows(row_max, ROWS)
            for i in gl.static_range(len(k)):
                p = p + (fine_probabilities_16(z[i], beside_rows(largest, score_layout(ROWS, z[i].shape[1])), RECIPE.OFFSET),)
        usable = usable & (row_max < POISON)
    else:
        row_max = _row_max(s, ONE)
        least = least_if_needed(row_max, 32 << 14, multiplier, fraction_bits)
        s = raised_if_needed(s, least, score_layout(ROWS, 8), 1)
        slope, offset, constant = row_exponents(row_max, multiplier, fraction_bits, RECIPE.OFFSET)
        slope, offset, constant = both_rows(slope, ROWS), both_rows(offset, ROWS), own_twice(constant, ROWS)
        for i in gl.static_range(len(k)):
            p = p + (_fine(s[i], slope, offset, constant),)
    numerator, total = _sums(p, v, begin, ones, weight, ROWS)
    if APART:
        keep_apart(units[2], 2)
    _store(numerator, total, usable, factor, shift, half, o_base, STRIDES.o[0], first, KEYS, QUERIES, CAREFUL, POLICY)
    return flags


@gluon.jit
def _given_scales(z, h, kv_head, o_ptr, scales, strides, constant, RECIPE: gl.constexpr):
    """(query bits, key bits, row factors, output multiplier, shift and rounding) of int8 tensors."""
    WARPS: gl.constexpr = gl.num_warps()
    CHANNEL: gl.constexpr = gl.SliceLayout(0, own_rows_layout(16 * WARPS))
    key_bits = gl.load(scales.ks_ptr.to(gl.pointer_type(gl.int32)) + z * strides.ks_stride_z + kv_head * strides.ks_stride_h)
    query_bits = key_bits
    row = 0, 0, 0
    if not RECIPE.QUERY_TOKEN:
        query_bits = gl.load(scales.qs_ptr.to(gl.pointer_type(gl.int32)) + z * strides.qs_stride_z + h * strides.qs_stride_h)
        _, row, _ = score_scales(key_bits, query_bits, constant.constant_mantissa, constant.constant_exponent, RECIPE)
    vs_base = scales.vs_ptr + z * strides.vs_stride_z + kv_head * strides.vs_stride_h
    os_base = scales.os_ptr + z * strides.os_stride_z + h * strides.os_stride_h
    vo_base = scales.vo_ptr + z * strides.vo_stride_z + kv_head * strides.vo_stride_h
    factor, shift, half = output_factors(
        o_ptr, vs_base, strides.vs_stride_d, os_base, strides.os_stride_d, vo_base, strides.vo_stride_d, 32, 32,
        RECIPE.VALUE_CHANNEL, RECIPE.OUTPUT_CHANNEL, RECIPE.VALUE_OFFSET, WARPS, CHANNEL,
    )  # fmt: skip
    if o_ptr.dtype.element_ty != gl.int8:
        # NaN for an unusable scale, as quantisation sets it
        factor = gl.where(usable_scale(factor.to(gl.int32, bitcast=True)), factor, float("nan"))
    return query_bits, key_bits, row, factor, shift, half


@gluon.jit
def _query_scale(q_base, q_stride_n: gl.constexpr, QUERIES: gl.constexpr):
    """One scale for all queries of a window, float32."""
    largest = gl.abs(load_rows(q_base, q_stride_n, 0, QUERIES, 16))
    for start in gl.static_range(16, QUERIES, 16):
        largest = higher(largest, gl.abs(load_rows(q_base, q_stride_n, start, QUERIES, 16)), False)
    return amplitude_to_scale(gl.reduce(gl.reduce(largest.to(gl.float32), 1, nan_max), 0, nan_max))


@gluon.jit
def _quotient(n, inverse):
    """``n`` divided by a launch constant whose inverse, in units of 2**-30 and rounded up, is ``inverse``."""
    return ((n.to(gl.int64) * inverse) >> 30).to(gl.int32)


# An SM fetches arguments 64 bytes at a time when they are first read: those that loads need come first.
@gluon.jit(do_not_specialize=("periods", "groups", "heads", "groups_inverse", "heads_inverse", "share", "longer"))
def windows_kernel(
    k_ptr, v_ptr, q_ptr, strides, mask_ptr, mask_strides, place_ptr, place_strides, scales, constant, o_ptr, o_strides,
    periods, groups, heads, groups_inverse, heads_inverse, share, longer,
    GROUP: gl.constexpr, QUERIES: gl.constexpr, KEYS: gl.constexpr, STRIDES: gl.constexpr, RECIPE: gl.constexpr,
    PLAN: gl.constexpr,
):  # fmt: skip
    """Attention of windows; launched by :func:`.dispatch.launch_attention` and :func:`.dispatch.launch_fused`.

    A bias repeats every ``periods`` windows. Windows with the same bias (z, z + periods, ...) are divided among
    ``groups`` of programs. Which work a program has: without TOGETHER, program (x, h, z) has head h, place z of the
    period and a group and part of the queries by x. With TOGETHER, column x of the grid has the next ``share`` pieces
    of work, the first ``longer`` columns one more, ordered so that those with the same bias are neighbours: programs of
    a column mostly run on one SM, whose L1 then has the bias for all of them.

    STRIDES, RECIPE and PLAN (:class:`.gluon.constants.WindowPlan`) are of :mod:`.gluon.constants`. STRIDES are those of rows
    alone, which a kernel is compiled for; tuples of others are made in :mod:`.windows.launch`.
    """
    DEPENDENT: gl.constexpr = PLAN.DEPENDENT
    POLICY: gl.constexpr = PLAN.POLICY
    wait_for_kernels(DEPENDENT)
    if PLAN.TOGETHER:
        column, layer = gl.program_id(0), gl.program_id(1)
        if layer >= share + (column < longer).to(gl.int32):
            return
        program = column * share + gl.minimum(column, longer) + layer
        first_tile, program = (program.to(gl.uint32) % PLAN.SPLITS).to(gl.int32), program // PLAN.SPLITS
        bias_number = _quotient(program, groups_inverse)
        group = program - bias_number * groups
        place = _quotient(bias_number, heads_inverse)
        h = bias_number - place * heads
    else:
        first_tile, group = gl.program_id(0) % PLAN.SPLITS, gl.program_id(0) // PLAN.SPLITS
        h, place = gl.program_id(1), gl.program_id(2)
        # the grid's size is read faster than an argument
        periods = gl.num_programs(2)
    kv_head = h // GROUP
    WIDTHS: gl.constexpr = widths(KEYS)
    STARTS: gl.constexpr = starts(KEYS)
    WARPS: gl.constexpr = gl.num_warps()
    BLOCK: gl.constexpr = 16 * WARPS
    # Up to eight queries past whole tiles are half a tile. Not where every program has one tile: no program would finish
    # earlier, and there would be more code to fetch.
    ALONE: gl.constexpr = BLOCK * PLAN.SPLITS >= QUERIES
    HALF: gl.constexpr = has_half(QUERIES, WARPS, PLAN.SPLITS)
    TILES: gl.constexpr = (QUERIES + (7 if HALF else BLOCK - 1)) // BLOCK
    DTYPE: gl.constexpr = q_ptr.dtype.element_ty
    # measured: pays for floats where windows are many
    FETCH: gl.constexpr = RECIPE.QUANTIZE and WARPS == 1 and not ALONE and (RECIPE.MASK != "bias" or PLAN.STAGED)
    # with keys in key order a lane loads the bias of four neighbouring keys at once
    KEY_ORDER: gl.constexpr = RECIPE.MASK == "bias"
    REPEAT: gl.constexpr = RECIPE.QUANTIZE and RECIPE.VALUE_OFFSET

    given = 0, 0, (0, 0, 0), 0, 0, 0
    if PLAN.ONE_SCALE:
        # the first scale of each tensor is the only one
        given = _given_scales(0, 0, 0, o_ptr, scales, o_strides, constant, RECIPE)
    # the weights of the row sums: 1 for every key, 0 past the last
    ones = gl.full((32, 8), 1, gl.int8, operand_layout(1, WARPS))
    at = gl.arange(0, 32, layout=gl.SliceLayout(1, operand_layout(1, WARPS)))
    column = 32 + ((at & 16) | ((at & 12) >> 1) | ((at & 2) << 2) | (at & 1))
    weight = gl.where((key_of(column, KEYS, KEY_ORDER) < KEYS)[:, None], ones, ones * 0)

    mask_offset = place.to(gl.int64) * mask_strides.mask_stride_z + h * mask_strides.mask_stride_h
    if PLAN.ALIGNED:
        mask_offset = gl.multiple_of(mask_offset, 4)
    mask_base = mask_ptr + mask_offset
    taken = place_ptr
    if PLAN.PLACES:
        taken = place_ptr + place * place_strides.place_stride_z + kv_head * place_strides.place_stride_h
    staged = ()
    staged_flags = 0
    flags_smem = 0
    if RECIPE.MASK == "bias":
        staged_flags = _no_flags()
        if WARPS > 1:
            # allocated here, so that no other buffer shares the memory
            flags_smem = gl.allocate_shared_memory(gl.int32, [32, 4], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    if PLAN.STAGED:
        gl.static_assert(mask_ptr.dtype.element_ty.is_floating())
        for i in gl.static_range(len(WIDTHS)):
            staged = staged + (
                gl.allocate_shared_memory(
                    gl.int32, [(QUERIES + 15) // 16, WIDTHS[i] // 8, 128], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
                ),
            )
        for tile in range(first_tile, (QUERIES + 15) // 16, PLAN.SPLITS):
            bias = ()
            for i in gl.static_range(len(WIDTHS)):
                part = _load_bias(mask_base, STRIDES, tile * 16, 16, STARTS[i], WIDTHS[i], QUERIES, KEYS)
                bias = bias + (_beside_scores(part),)
            staged_flags |= _eight_rows(_beyond(bias))
            for i in gl.static_range(len(WIDTHS)):
                staged[i].index(tile).store(_stage(_fixed(bias[i])))
        barrier()

    first, step = place + group * periods, groups * periods
    # constant bounds where the loop runs once, so that it is not compiled twice
    SEVERAL: gl.constexpr = PLAN.SEVERAL
    for turn in range(first if SEVERAL else 0, o_strides.windows if SEVERAL else 1, step if SEVERAL else 1):
        z = (turn if SEVERAL else first).to(gl.int64)
        q_base = q_ptr + z * strides.q_stride_z + h * strides.q_stride_h
        k_base = k_ptr + z * strides.k_stride_z + kv_head * strides.k_stride_h
        v_base = v_ptr + z * strides.v_stride_z + kv_head * strides.v_stride_h
        o_base = o_ptr + z * o_strides.o_stride_z + h * o_strides.o_stride_h
        qs_base = scales.qs_ptr.to(gl.pointer_type(gl.int32)) + z * o_strides.qs_stride_z + h * o_strides.qs_stride_h
        if PLAN.DIVIDED and RECIPE.QUANTIZE:
            k = load_key_parts(k_base, STRIDES.k[0], taken, KEYS, KEY_ORDER, PLAN.PLACES)
        else:
            k = load_keys(k_base, STRIDES.k[0], taken, KEYS, KEY_ORDER, POLICY, PLAN.PLACES)
        if PLAN.DIVIDED:
            v = load_value_parts(v_base, STRIDES.v[0], taken, KEYS, KEY_ORDER, REPEAT, PLAN.PLACES)
        else:
            v = load_values(v_base, STRIDES.v[0], taken, KEYS, KEY_ORDER, POLICY, REPEAT, PLAN.PLACES)
        tile = first_tile
        following = _load_queries(q_base, STRIDES.q[0], tile * BLOCK, BLOCK, QUERIES, POLICY)
        AHEAD: gl.constexpr = ALONE and RECIPE.MASK == "bias" and not PLAN.STAGED
        loaded = ()
        if AHEAD:
            loaded = _load_row_bias(mask_base, STRIDES, tile * BLOCK, BLOCK, QUERIES, KEYS)
        if RECIPE.QUANTIZE:
            if PLAN.DIVIDED:
                sides, key_scale, factor, shift = quantize_parts(k, v, constant.constant_mantissa, KEYS, KEY_ORDER, RECIPE)
            else:
                sides, key_scale, factor, shift = quantize_window(
                    k, v, constant.constant_mantissa, PLAN.STAGED, KEYS, KEY_ORDER, RECIPE
                )  # fmt: skip
            key_bits = key_scale.to(gl.int32, bitcast=True)
            head_bits = key_bits
            if not RECIPE.QUERY_TOKEN:
                head_bits = _query_scale(q_base, STRIDES.q[0], QUERIES).to(gl.int32, bitcast=True)
            half = 0
        else:
            if PLAN.DIVIDED:
                sides = shared_operands(k, v)
            else:
                sides = right_operands(k, v)
            if PLAN.ONE_SCALE:
                head_bits, key_bits, row, factor, shift, half = given
            else:
                of_head = _given_scales(z, h, kv_head, o_ptr, scales, o_strides, constant, RECIPE)
                head_bits, key_bits, row, factor, shift, half = of_head
        keys_usable, of_queries, units = score_scales(
            key_bits, head_bits, constant.constant_mantissa, constant.constant_exponent, RECIPE
        )  # fmt: skip
        if RECIPE.QUANTIZE:
            row = of_queries
        right, values = sides
        # probabilities are stored as 127 - P: products begin at -127 times V's sums, and the result is the negative of P V
        offsets = gl.full((BLOCK, 32), -127, gl.int8, operand_layout(0, WARPS))
        begin = gl.zeros((BLOCK, 32), gl.int32, product_layout(WARPS))
        begin = mma_v2(offsets, values[1], mma_v2(offsets, values[0], begin))
        operands = right, values, begin, ones, weight
        query = qs_base, o_strides.qs_stride_n, head_bits, row, keys_usable, units
        output = factor, shift, half, o_base
        bias = mask_base, staged
        flags = staged_flags
        while tile < TILES:
            here = following
            if FETCH:
                _fetch_queries(q_base, STRIDES.q[0], (tile + PLAN.SPLITS) * BLOCK, QUERIES)
            if not ALONE:
                following = _load_queries(q_base, STRIDES.q[0], (tile + PLAN.SPLITS) * BLOCK, BLOCK, QUERIES, POLICY)
            flags |= _attend(
                here, query, operands, output, bias, loaded, tile, DTYPE, BLOCK, KEYS, QUERIES, PLAN.STAGED, False, POLICY,
                STRIDES, RECIPE,
            )  # fmt: skip
            tile += PLAN.SPLITS
        if HALF:
            if tile * 16 < QUERIES:
                flags |= _attend(
                    following, query, operands, output, bias, (), tile, DTYPE, 8, KEYS, QUERIES, PLAN.STAGED, False,
                    POLICY, STRIDES, RECIPE,
                )  # fmt: skip
        if RECIPE.MASK == "bias":
            if _any(flags, flags_smem):
                # compute the window again with all selects, from the bias in global memory, and overwrite the outputs
                for tile in range(first_tile, (QUERIES + BLOCK - 1) // BLOCK, PLAN.SPLITS):
                    words = _load_queries(q_base, STRIDES.q[0], tile * BLOCK, BLOCK, QUERIES, POLICY)
                    _attend(
                        words, query, operands, output, bias, (), tile, DTYPE, BLOCK, KEYS, QUERIES, False, True, POLICY,
                        STRIDES, RECIPE,
                    )  # fmt: skip
