"""One block of queries on Hopper: load and quantise it, start its products, exponentiate, store its outputs (Gluon).

Equations 1 to 3 and 5 to 11 and step 11 of Algorithm 1 for a block of 64 or 128 queries (steps 1 and 3 to 9 of
``docs/algorithm.md``), shared by :mod:`.sm90.attention_resident` and :mod:`.sm90.attention_streaming`. In the order of
a block:

1. :func:`load_queries`, :func:`read_queries`: words from global memory straight into the registers of a left operand;
2. :func:`start_scores`, :func:`finished`: asynchronous wgmma with keys in shared memory, scores in registers;
3. :func:`fold_columns` for the row maximum, :func:`stored_probabilities` for them, :func:`quarter_sums` for row sums;
4. :func:`add_values`: asynchronous wgmma of probabilities with V in shared memory;
5. :func:`row_inverses`, :func:`store_span`: normalise and store.

A warp has sixteen rows of the block; with t = lane % 4 a lane has rows r = lane // 4 and r + 8 (layouts and drawing in
:mod:`.sm90.layouts`). Queries, scores, probabilities and outputs stay in registers of that lane from load to store. Two
permutations make it possible, and change no result: keys of P V stand in the order in which lanes have the scores, and
the channels of V in fragment order (:func:`to_fragment_order`), so that a lane's outputs are neighbours. Only where two
warps share sixteen rows (ACROSS is 2) do probabilities pass through shared memory.

A head's channels may be two spans; then operands, accumulators and outputs are tuples with an element per span.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_init, warpgroup_mma_wait

from ...common.fixed_point import fine_bits, missing_mass, row_inverse, usable_scale
from ...common.quantize_ops import amplitude_to_scale, higher, inverse_scale, nan_max
from ...common.tile_ops import inverse_key_order
from ..ptx_ops import (
    as_float32,
    beside_channels,
    beside_outputs,
    first_of_four,
    least_if_needed,
    least_of_own_rows,
    normalised,
    pack,
    pack_and_sum,
    round_to_int8,
    unpack,
    words_of_four,
)
from ..row_ops import beside_columns, beside_rows, both_rows, one_row, row_largest, row_sum
from .layouts import (
    channel_spans,
    eight_layout,
    half_layout,
    in_memory,
    is_stored,
    kernel_width,
    output_layout,
    pairs_layout,
    part_layout,
    product_layout,
    quarter_layout,
    query_layout,
    score_layout,
    shared_layout,
    span_starts,
    stored_layout,
)

# the sum of four int8, each times its weight, in the first of four outputs, 0 in the other three
SUM_FOUR = gl.constexpr("dp4a.s32.s32 $0, $4, $5, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;")


@gluon.jit
def part_steps(PART: gl.constexpr, whole, steps, narrow):
    """The first iteration of a loop over keys, and where it ends, by part: whole ones, the last one, the last if narrow.

    There are ``whole`` of the first part and ``steps`` in all; ``narrow`` is 1 if half of the last tile is enough, else 0.
    """
    if PART == 0:
        start, stop = 0, whole
    elif PART == 1:
        start, stop = whole, steps - narrow
    else:
        start, stop = steps - narrow, steps
    return start, stop


@gluon.jit
def padded_columns(s, there, filler):
    """A tile of scores with ``filler``, one or one per row, in the columns of keys past the last; ``there`` keys are left."""
    L: gl.constexpr = s.type.layout
    filler = beside_rows(filler, L)
    n = gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, L))
    return gl.where((n < there)[None, :], s, filler)


@gluon.jit
def load_channels(ptrs, n, channels, CHANNELS: gl.constexpr, D: gl.constexpr, POLICY: gl.constexpr):
    """Rows ``n`` of numbers, or of words whose first channels are ``channels``, of D; zero from CHANNELS on."""
    if D == CHANNELS:
        x = gl.load(ptrs, eviction_policy=POLICY)
    else:
        inside = (n[:, None] >= 0) & (channels[None, :] < CHANNELS)
        x = gl.load(ptrs, mask=inside, other=0, eviction_policy=POLICY)
    return x


@gluon.jit
def to_fragment_order(x, ACROSS: gl.constexpr):
    """A (keys, channels) tile with its channels in fragment order: of 64, channel 8i + j in column 8j + i.

    Channels are permuted so that a lane's fragment of the product with V is contiguous. Each of the ACROSS parts of the
    channels is permuted by itself.
    """
    N: gl.constexpr = x.shape[0]
    D: gl.constexpr = x.shape[1]
    return gl.reshape(gl.permute(gl.reshape(x, (N, ACROSS, 8, D // (8 * ACROSS))), (0, 1, 3, 2)), (N, D))


@gluon.jit
def _from_fragment_order(x, ACROSS: gl.constexpr):
    """The inverse of :func:`to_fragment_order`, for (rows, channels) outputs: each lane renames its registers."""
    M: gl.constexpr = x.shape[0]
    D: gl.constexpr = x.shape[1]
    return gl.reshape(gl.permute(gl.reshape(x, (M, ACROSS, D // (8 * ACROSS), 8)), (0, 1, 3, 2)), (M, D))


@gluon.jit
def load_queries(
    base, stride_n: gl.constexpr, first, queries, CHANNELS: gl.constexpr, WARPS: gl.constexpr, ACROSS: gl.constexpr,
    POLICY: gl.constexpr,
):  # fmt: skip
    """The spans of a block of queries as int32 words, which a loop carries as they are; past the last query it is repeated."""
    SPANS: gl.constexpr = channel_spans(CHANNELS)
    FROM: gl.constexpr = span_starts(CHANNELS)
    spans = ()
    for c in gl.static_range(len(SPANS)):
        spans = spans + (load_query_span(base + FROM[c], stride_n, first, queries, SPANS[c], WARPS, ACROSS, POLICY),)
    return spans


@gluon.jit
def load_query_span(
    base, stride_n: gl.constexpr, first, queries, CHANNELS: gl.constexpr, WARPS: gl.constexpr, ACROSS: gl.constexpr,
    POLICY: gl.constexpr,
):  # fmt: skip
    """One span of :func:`load_queries`: CHANNELS numbers per row from ``base`` on, and zeros up to the kernel's width."""
    D: gl.constexpr = kernel_width(CHANNELS)
    EACH: gl.constexpr = 32 // base.dtype.element_ty.primitive_bitwidth
    L: gl.constexpr = query_layout(D, EACH, WARPS, ACROSS)
    n = gl.minimum(first + gl.arange(0, 16 * WARPS, layout=gl.SliceLayout(1, L)), queries - 1)
    d = gl.arange(0, D // EACH, layout=gl.SliceLayout(0, L))
    ptrs = base.to(gl.pointer_type(gl.int32)) + n[:, None] * (stride_n // EACH) + d[None, :]
    return load_channels(ptrs, n, d * EACH, CHANNELS, D, POLICY)


@gluon.jit
def row_amplitude(spans, WARPS: gl.constexpr, ACROSS: gl.constexpr):
    """Largest magnitude of each row over all spans, float32: one row per thread, or a vector where warps share rows."""
    largest = _span_amplitude(spans[0])
    for c in gl.static_range(1, len(spans)):
        more = gl.convert_layout(_span_amplitude(spans[c]), largest.type.layout, assert_trivial=True)
        largest = nan_max(largest, more)
    if ACROSS == 1:
        largest = row_largest(largest)
    else:
        L: gl.constexpr = gl.SliceLayout(1, eight_layout(WARPS, ACROSS))
        largest = gl.convert_layout(gl.reduce(largest, 1, nan_max), L, assert_trivial=True)
    return largest


@gluon.jit
def _span_amplitude(x):
    """(rows, 8) float32 magnitudes, of which one is the row's largest; 16-bit floats by twos until lanes have to exchange."""
    ROWS: gl.constexpr = x.shape[0]
    x = gl.abs(x)
    if x.shape[1] == 128:
        a, b = gl.split(gl.permute(gl.reshape(x, (ROWS, 2, 64)), (0, 2, 1)))
        x = higher(a, b, False)
    if x.shape[1] == 64:
        a, b = gl.split(gl.permute(gl.reshape(x, (ROWS, 2, 32)), (0, 2, 1)))
        x = higher(a, b, False)
    a, b = gl.split(gl.permute(gl.reshape(x, (ROWS, 2, 16)), (0, 2, 1)))
    x = higher(a, b, False)
    a, b = gl.split(gl.permute(gl.reshape(x, (ROWS, 4, 2, 2)), (0, 1, 3, 2)))
    return gl.reshape(higher(a, b, False), (ROWS, 8)).to(gl.float32)


@gluon.jit
def unpack_queries(words, DTYPE: gl.constexpr, WARPS: gl.constexpr, ACROSS: gl.constexpr):
    """The numbers in the words of :func:`load_queries`, span by span."""
    spans = ()
    for c in gl.static_range(len(words)):
        spans = spans + (_unpack_span(words[c], DTYPE, WARPS, ACROSS),)
    return spans


@gluon.jit
def _unpack_span(words, DTYPE: gl.constexpr, WARPS: gl.constexpr, ACROSS: gl.constexpr):
    """The numbers in one span's words, (rows, channels)."""
    L: gl.constexpr = query_layout(words.shape[1] * (32 // DTYPE.primitive_bitwidth), 1, WARPS, ACROSS)
    return unpack(words, DTYPE, L)


@gluon.jit
def round_rows(x, inverse):
    """Floats times the inverse of their row's scale, or of one scale for all, as int8."""
    L: gl.constexpr = x.type.layout
    if len(inverse.shape) == 2:
        inverse = beside_columns(both_rows(inverse, x.shape[0]), 4, L)
    else:
        inverse = beside_rows(inverse, L)
    return round_to_int8(x, inverse)


@gluon.jit
def read_queries(
    words, DTYPE: gl.constexpr, qs_base, qs_stride_n, head_bits, first, queries,
    RECIPE: gl.constexpr, WARPS: gl.constexpr, ACROSS: gl.constexpr = 1,
):  # fmt: skip
    """(a block of queries as int8 per span; float32 bits of its scale, or of its rows' as :func:`row_amplitude`)."""
    q = unpack_queries(words, DTYPE, WARPS, ACROSS)
    bits = head_bits
    if RECIPE.QUANTIZE:
        floats = ()
        for c in gl.static_range(len(q)):
            floats = floats + (as_float32(q[c]),)
        if RECIPE.QUERY_TOKEN:
            scale = amplitude_to_scale(row_amplitude(q, WARPS, ACROSS))
            inverse = inverse_scale(scale, False)
            bits = scale.to(gl.int32, bitcast=True)
        else:
            inverse = inverse_scale(head_bits.to(gl.float32, bitcast=True), False)
        rounded = ()
        for c in gl.static_range(len(q)):
            rounded = rounded + (round_rows(floats[c], inverse),)
        q = rounded
    elif RECIPE.QUERY_TOKEN:
        L: gl.constexpr = eight_layout(WARPS, ACROSS)
        n = first + gl.arange(0, 16 * WARPS, layout=gl.SliceLayout(1, L))
        bits = gl.load(qs_base + gl.minimum(n, queries - 1) * qs_stride_n)
        if ACROSS == 1:
            bits = one_row(beside_rows(bits, L) + gl.zeros((16 * WARPS, 8), gl.int32, L))
    return q, bits


@gluon.jit
def pairs_twice(x):
    """One number per channel of V -> 2 D numbers with every two neighbours twice, for :func:`beside_product`."""
    D: gl.constexpr = x.shape[0]
    return gl.reshape(gl.permute(gl.reshape(gl.join(x, x), (D // 2, 2, 2)), (0, 2, 1)), (2 * D,))


@gluon.jit
def in_order(x):
    """The inverse of :func:`pairs_twice`."""
    D: gl.constexpr = x.shape[0] // 2
    x, _ = gl.split(gl.permute(gl.reshape(x, (D // 2, 2, 2)), (0, 2, 1)))
    return gl.reshape(x, (D,))


@gluon.jit
def beside_product(smem, WARPS: gl.constexpr, ACROSS: gl.constexpr = 1):
    """Numbers of :func:`pairs_twice`, in shared memory, broadcast to an accumulator of a product with V, (rows, D).

    A thread reads them for both of its rows in one load, straight into the registers in which the product starts.
    """
    D: gl.constexpr = smem.shape[0] // 2
    L: gl.constexpr = half_layout(D, WARPS, ACROSS)
    x = gl.permute(gl.reshape(smem.load(pairs_layout(D, WARPS, ACROSS)), (D // 2, 2, 2)), (0, 2, 1))
    upper, lower = gl.split(gl.reshape(x, (D, 2)))
    none = gl.zeros((8 * WARPS, D), gl.int32, L)
    upper = gl.convert_layout(upper, gl.SliceLayout(0, L), assert_trivial=True)[None, :] + none
    lower = gl.convert_layout(lower, gl.SliceLayout(0, L), assert_trivial=True)[None, :] + none
    x = gl.permute(gl.reshape(gl.join(upper, lower), (WARPS, 8, D, 2)), (0, 3, 1, 2))
    return gl.convert_layout(gl.reshape(x, (16 * WARPS, D)), product_layout(D, WARPS, ACROSS), assert_trivial=True)


@gluon.jit
def _no_outputs(D: gl.constexpr, WARPS: gl.constexpr, ACROSS: gl.constexpr):
    """An accumulator of zeros for one span of V."""
    return gl.zeros((16 * WARPS, D), gl.int32, product_layout(D, WARPS, ACROSS))


@gluon.jit
def begin_outputs(sums, WIDTHS: gl.constexpr, AT_SUMS: gl.constexpr, WARPS: gl.constexpr, ACROSS: gl.constexpr):
    """The accumulators at which products with the spans of V, of WIDTHS channels, begin.

    With AT_SUMS they are ``sums``, -127 times those of V's channels (:func:`beside_product`), else zeros.
    """
    spans = ()
    for c in gl.static_range(len(WIDTHS)):
        if AT_SUMS:
            span = beside_product(sums[c], WARPS, ACROSS)
        else:
            span = _no_outputs(WIDTHS[c], WARPS, ACROSS)
        spans = spans + (warpgroup_mma_init(span),)
    return spans


@gluon.jit
def stored_beside_outputs(smem, WARPS: gl.constexpr, ACROSS: gl.constexpr):
    """One number per channel from shared memory, in the layout of outputs."""
    return smem.load(gl.SliceLayout(0, output_layout(smem.shape[0], WARPS, ACROSS)))


@gluon.jit
def tile_of(smem, index, START: gl.constexpr, WIDTH: gl.constexpr, DIM: gl.constexpr):
    """WIDTH keys from START on, along dimension DIM, of piece ``index`` of shared memory, span by span."""
    spans = ()
    for c in gl.static_range(len(smem)):
        spans = spans + (smem[c].index(index).slice(START, WIDTH, DIM),)
    return spans


@gluon.jit
def add_values(accumulator, p, v, WARPS: gl.constexpr, ACROSS: gl.constexpr):
    """Start the products of a tile of probabilities with the spans of a tile of V; returns accumulators under way."""
    spans = ()
    for c in gl.static_range(len(v)):
        spans = spans + (_add_span(accumulator[c], p, v[c], WARPS, ACROSS),)
    return spans


@gluon.jit
def _add_span(accumulator, p, v, WARPS: gl.constexpr, ACROSS: gl.constexpr):
    """Start the product of a tile of probabilities with one span of V, (channels, keys) in shared memory."""
    L: gl.constexpr = product_layout(v.shape[0], WARPS, ACROSS)
    if not in_memory(p.type.layout):
        # a left operand's registers do not depend on the product's width
        p = gl.convert_layout(p, gl.DotOperandLayout(0, L, 4), assert_trivial=True)
    return warpgroup_mma(p, v.permute((1, 0)), accumulator, is_async=True)


@gluon.jit
def start_scores(q, keys, WARPS: gl.constexpr, ACROSS: gl.constexpr):
    """Start the product of a block of queries, in registers or shared memory, with a tile of keys, span by span."""
    WIDTH: gl.constexpr = keys[0].shape[0]
    L: gl.constexpr = product_layout(WIDTH, WARPS, ACROSS)
    s = gl.zeros((16 * WARPS, WIDTH), gl.int32, L)
    for c in gl.static_range(len(q)):
        q_c = q[c]
        if not in_memory(q_c.type.layout):
            # a left operand's registers do not depend on the product's width
            q_c = gl.convert_layout(q_c, gl.DotOperandLayout(0, L, 4), assert_trivial=True)
        s = warpgroup_mma(q_c, keys[c].permute((1, 0)), s, use_acc=c > 0, is_async=True)
    return s


@gluon.jit
def finished(s, ahead: gl.constexpr, WARPS: gl.constexpr, ACROSS: gl.constexpr = 1):
    """Scores int32 (rows, WIDTH), once at most ``ahead`` of the products that were started later are still under way.

    Each span counts as one product.
    """
    s = warpgroup_mma_wait(ahead, [s])
    return gl.convert_layout(s, score_layout(s.shape[1], WARPS, ACROSS), assert_trivial=True)


@gluon.jit
def fold_columns(s, WARPS: gl.constexpr, ACROSS: gl.constexpr = 1):
    """Maxima of columns eight apart, which one lane has: (rows, 8), or eight columns for each warp that shares the row."""
    M: gl.constexpr = s.shape[0]
    if s.shape[1] > 8 * ACROSS:
        s = gl.max(gl.reshape(s, (M, ACROSS, s.shape[1] // (8 * ACROSS), 8)), 2)
        s = gl.reshape(s, (M, 8 * ACROSS))
    return gl.convert_layout(s, score_layout(8 * ACROSS, WARPS, ACROSS), assert_trivial=True)


@gluon.jit
def stored_probabilities(
    p, OPERAND: gl.constexpr, START: gl.constexpr, KEYS: gl.constexpr, EXACT: gl.constexpr, WARPS: gl.constexpr,
    ACROSS: gl.constexpr,
):  # fmt: skip
    """127 - P in int8 of a tile of fine probabilities, as a left operand, or for shared memory (ACROSS is 2).

    The tile has the keys from START on; those from KEYS on have P = 0. An operand has at least 32 columns.

    Returns:
        the operand; and with EXACT the sums by four of probabilities before rounding, in the first of every four columns,
        else the operand again.
    """
    M: gl.constexpr = p.shape[0]
    WIDTH: gl.constexpr = p.shape[1]
    STORED: gl.constexpr = OPERAND if ACROSS == 1 else stored_layout(WIDTH, WARPS, ACROSS)
    if WIDTH == 8:
        p = _twice(p)
    if WIDTH <= 16:
        p = _twice(p)
    N: gl.constexpr = p.shape[1]
    p = gl.permute(gl.reshape(p, (M, N // 16, 2, 4, 2)), (0, 1, 3, 2, 4))
    p = gl.convert_layout(gl.reshape(p, (M, N)), STORED, assert_trivial=True)
    if START + N > KEYS:
        n = gl.arange(0, N, layout=gl.SliceLayout(0, STORED))
        if WIDTH < 32:
            n = inverse_key_order(n)
        p = gl.where((START + n < KEYS)[None, :], p, 0)
    if EXACT:
        p, fine = pack_and_sum(p)
    else:
        p = pack(p)
        fine = p
    return p, fine


@gluon.jit
def _twice(p):
    """The columns, then the same again, to fill an operand of 32 keys: the copies are keys past the last."""
    return gl.reshape(gl.permute(gl.join(p, p), (0, 2, 1)), (p.shape[0], 2 * p.shape[1]))


@gluon.constexpr_function
def stored_columns(widths):
    """Return the columns of the operands that tiles of these widths become."""
    return sum(max(width, 32) for width in widths)


@gluon.jit
def sums_of_four(p):
    """Sums (dp4a) of four neighbouring stored P, in the first of four columns; else 0."""
    return gl.inline_asm_elementwise(SUM_FOUR, "=r,=r,=r,=r,r,r", [p, p * 0 + 1], gl.int32, True, 4)


@gluon.jit
def quarter_sums(parts, WARPS: gl.constexpr, ACROSS: gl.constexpr):
    """Sums of a tile's sums by four: int32 (rows, 4), one per lane of a quad, for each warp that shares the row."""
    M: gl.constexpr = parts.shape[0]
    parts = gl.sum(gl.reshape(first_of_four(parts), (M, ACROSS, parts.shape[1] // (16 * ACROSS), 4)), 2)
    return gl.convert_layout(gl.reshape(parts, (M, 4 * ACROSS)), quarter_layout(WARPS, ACROSS), assert_trivial=True)


@gluon.jit
def store_sums(parts, smem, ACROSS: gl.constexpr):
    """Store the sums that each warp of a row has of :func:`quarter_sums`."""
    smem.store(gl.sum(gl.reshape(parts, (parts.shape[0], ACROSS, 4)), 2))


@gluon.jit
def load_sums(smem, WARPS: gl.constexpr, ACROSS: gl.constexpr):
    """The row sums of what :func:`store_sums` stored, a vector."""
    L: gl.constexpr = gl.SliceLayout(1, eight_layout(WARPS, ACROSS))
    return gl.convert_layout(gl.sum(smem.load(part_layout(WARPS, ACROSS)), 1), L, assert_trivial=True)


@gluon.jit
def row_sums(parts, smem, WARPS: gl.constexpr, ACROSS: gl.constexpr):
    """Row sums from those of :func:`quarter_sums`, one row per thread; where warps share rows a vector, through ``smem``."""
    if ACROSS == 1:
        sums = row_sum(parts)
    else:
        store_sums(parts, smem, ACROSS)
        sums = load_sums(smem, WARPS, ACROSS)
    return sums


@gluon.jit
def _quarters(words, L: gl.constexpr):
    """Words of queries, (rows, columns), as a tuple of (rows, 4) in layout L, without moving data."""
    M: gl.constexpr = words.shape[0]
    N: gl.constexpr = words.shape[1]
    if N == 4:
        pieces = (gl.convert_layout(words, L, assert_trivial=True),)
    else:
        a, b = gl.split(gl.permute(gl.reshape(words, (M, 2, N // 2)), (0, 2, 1)))
        pieces = _quarters(a, L) + _quarters(b, L)
    return pieces


@gluon.jit
def least_of_queries(q, row_max, multiplier, fraction_bits, CHANNELS: gl.constexpr, WARPS: gl.constexpr):
    """:func:`.gluon.ptx_ops.least_if_needed`, by the magnitudes of int8 queries if they are given and a thread has one row."""
    if len(q) == 0 or len(row_max.shape) == 1:
        least = least_if_needed(row_max, CHANNELS << 14, multiplier, fraction_bits)
    else:
        words = ()
        for c in gl.static_range(len(q)):
            words = words + _quarters(words_of_four(q[c]), quarter_layout(WARPS))
        least = least_of_own_rows(words, CHANNELS << 14, row_max, multiplier, fraction_bits, quarter_layout(WARPS))
    return least


@gluon.jit
def row_inverses(total, fine, count, EXACT: gl.constexpr):
    """(bit length, reciprocal, missing mass) of the rows' sums of P.

    ``total`` are the sums of ``count`` stored probabilities 127 - P, ``fine`` with EXACT those of probabilities before
    rounding; else nothing is missing.
    """
    total = 127 * count - total
    missing = total
    if EXACT:
        total, missing = missing_mass(fine, total)
    bits, inverse = row_inverse(total, False)
    if EXACT:
        bits = fine_bits(bits)
    return bits, inverse, missing


@gluon.jit
def _less_missing(numerator, missing, mean, WARPS: gl.constexpr, ACROSS: gl.constexpr):
    """Negative numerators less what the missing mass of their rows adds to them: accumulators."""
    L: gl.constexpr = numerator.type.layout
    S: gl.constexpr = score_layout(numerator.shape[1], WARPS, ACROSS)
    x = gl.convert_layout(numerator, S, assert_trivial=True)
    x -= beside_rows(both_rows(missing, numerator.shape[0]), S) * gl.convert_layout(mean, S, assert_trivial=True)
    return gl.convert_layout(x, L, assert_trivial=True)


@gluon.jit
def store_span(
    numerator, rows, usable, factors, mean, o_base, o_stride_n: gl.constexpr, first, queries,
    CHANNELS: gl.constexpr, EXACT: gl.constexpr, WARPS: gl.constexpr, ACROSS: gl.constexpr = 1, EMPTY: gl.constexpr = False,
):  # fmt: skip
    """Normalise a span of a block's outputs and store its rows below ``queries``: :func:`.common.tile_ops.finish`.

    ``rows`` is what :func:`row_inverses` returns: numbers of rows are one per thread, or vectors where warps share rows.
    With EMPTY rows may have no key that takes part: they are 0.
    ``numerator`` is the negative of the sum of P V. ``mean`` is twice the mean of V's channels, in shared memory, or beside
    ``numerator``.
    """
    factor, shift, half = factors
    bits, inverse, missing = rows
    M: gl.constexpr = numerator.shape[0]
    D: gl.constexpr = numerator.shape[1]
    L: gl.constexpr = output_layout(D, WARPS, ACROSS)
    IN_MEMORY: gl.constexpr = EXACT and is_stored(mean.type)
    if EXACT and not IN_MEMORY:
        numerator = _less_missing(numerator, missing, mean, WARPS, ACROSS)
    x = gl.convert_layout(_from_fragment_order(numerator, ACROSS), L, assert_trivial=True)
    if IN_MEMORY:
        x -= beside_outputs(missing, L, ACROSS) * mean.load(gl.SliceLayout(0, L))[None, :]
    factor, shift, half = beside_channels(factor, L), beside_channels(shift, L), beside_channels(half, L)
    DTYPE: gl.constexpr = o_base.dtype.element_ty
    if gl.int8 != DTYPE:
        factor = gl.where(usable_scale(factor.to(gl.int32, bitcast=True)), factor, float("nan"))
    if EMPTY and shift.type.is_block():
        shift = gl.where(beside_outputs(bits, L, ACROSS) > 0, shift, 0.0)
    result = normalised(x, bits, inverse, usable, (factor, shift, half), DTYPE, ACROSS)
    n = first + gl.arange(0, M, layout=gl.SliceLayout(1, L))
    channels = gl.arange(0, D, layout=gl.SliceLayout(0, L))
    inside = (n[:, None] < queries) & (channels[None, :] < CHANNELS)
    gl.store(o_base + n[:, None] * o_stride_n + channels[None, :], result, mask=inside)


@gluon.jit
def store_zeros(o_base, o_stride_n: gl.constexpr, first, queries, CHANNELS: gl.constexpr, WARPS: gl.constexpr):
    """Store zeros where :func:`store_span` stores a block's outputs."""
    D: gl.constexpr = kernel_width(CHANNELS)
    L: gl.constexpr = output_layout(D, WARPS)
    n = first + gl.arange(0, 16 * WARPS, layout=gl.SliceLayout(1, L))
    channels = gl.arange(0, D, layout=gl.SliceLayout(0, L))
    inside = (n[:, None] < queries) & (channels[None, :] < CHANNELS)
    zeros = gl.zeros((16 * WARPS, D), o_base.dtype.element_ty, L)
    gl.store(o_base + n[:, None] * o_stride_n + channels[None, :], zeros, mask=inside)


@gluon.jit
def allocate(ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Shared memory for ROWS rows of COLUMNS int8, swizzled for wgmma."""
    return gl.allocate_shared_memory(gl.int8, [ROWS, COLUMNS], shared_layout(COLUMNS))
