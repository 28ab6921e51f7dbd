"""Rows of 65 keys to what shared memory holds on Hopper, with layouts and tensor-core products by hand (Gluon).

What :mod:`.short` does, faster, and for longer rows what :mod:`.long` does. A program takes one head, or every few blocks of
64 or 128 of its queries. A row of scores comes in tiles of 128, 64, 32, 16 and 8 keys, so that 197 keys take 200 columns and
not 256. Rows of up to 288 keys are held whole. Longer ones are walked over twice, for their maximum and for the rest; the
second walk computes the scores again (:func:`.tiles.is_held`). Keys and values lie in shared memory, all of them; queries,
probabilities and outputs stay in the registers of whom they belong to, so that after the values are there no warp waits
for another. Three orders make that possible; they leave every product as it is:

* queries are loaded as the tensor core holds them;
* the keys of a product with V come in the order in which threads hold the scores;
* the channels of V are dealt to the columns of its product so that a thread ends up with neighbouring outputs.

The products of a block are issued one behind the other and waited for tile by tile: those of a tile of probabilities
with V run under the exponentials of the next. What the offset of a stored probability adds to an output, 127 times a
channel's sum of V, is formed once a program; where tensor cores would idle it is a product with -127 in every block.

Where there are more processors than programs, a call takes as long as one warp's chain of instructions. From floats, and
where rows are long, two warps then share sixteen queries: each has half of the scores and half of the outputs, and
probabilities pass through shared memory. So rows of up to 608 keys are held whole.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from .by_hand import (
    barrier,
    beside_channels,
    beside_rows,
    channel_maxima,
    channel_ranges,
    first_of_four,
    halves,
    least_if_needed,
    output_factors,
    pack,
    raised_if_needed,
    round_to_int8,
    row_exponents,
    row_factors,
    twice_probabilities,
    unpack,
)
from .integer import (
    multiply_high,
    requantize,
    row_inverse,
    row_weight,
    split_scale,
    usable_scale,
)
from .quantize import amplitude_to_scale, higher, inverse_scale, lower, nan_max
from .tile import MASKED, _high_bytes, channel_of_row, held_order, key_order, probability_words
from .tiles import channel_spans as spans_of
from .tiles import kernel_width as width_of
from .tiles import row_widths as widths_of
from .tiles import value_width as value_width_of

# the names differ between releases of Triton
_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared

channel_spans = gluon.constexpr_function(spans_of)
kernel_width = gluon.constexpr_function(width_of)
value_width = gluon.constexpr_function(value_width_of)
row_widths = gluon.constexpr_function(widths_of)

# the sum of four bytes, each times its weight, and nothing in the other three of four places
SUM_FOUR = gl.constexpr("dp4a.s32.s32 $0, $4, $5, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;")


@gluon.constexpr_function
def row_starts(keys):
    """Where the tiles of a row begin."""
    widths = row_widths(keys)
    return tuple(sum(widths[:index]) for index in range(len(widths)))


@gluon.constexpr_function
def span_starts(channels):
    """Where the spans of a head's channels begin."""
    spans = channel_spans(channels)
    return tuple(sum(spans[:index]) for index in range(len(spans)))


@gluon.constexpr_function
def span_widths(channels):
    """Channels of the spans, those past a head's last included."""
    return tuple(kernel_width(span) for span in channel_spans(channels))


@gluon.constexpr_function
def value_widths(channels):
    """The same of values, whose channels are columns of a product."""
    return tuple(value_width(span) for span in channel_spans(channels))


@gluon.constexpr_function
def depth(width):
    """Keys that a tile's product with V takes: the tensor core's least is 32."""
    return max(width, 32)


@gluon.constexpr_function
def product_layout(width, warps, across=1):
    """A product with ``width`` columns; sixteen rows a warp, or ``across`` that share the columns."""
    return gl.NVMMADistributedLayout([3, 0], [warps, across], [16, width // across, 32])


@gluon.constexpr_function
def is_operand(layout):
    """Whether a product finds this in registers."""
    return isinstance(layout, gl.DotOperandLayout)


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
def quad_layout(rows, channels, warps, piece):
    """Four keys a thread, which is what it takes to store neighbouring keys of a channel in one word.

    ``piece`` keys at a time, each warp's part of them shared out by channels, up to sixteen a thread. A tile of fewer
    ``rows`` than that has fewer keys a thread.
    """
    each = max(1, min(16, channels * piece // (128 * warps)))
    lanes = min(8, channels // each)
    across = channels // (lanes * each)
    groups = 32 // lanes * (warps // across)
    return gl.BlockedLayout([min(4, rows // groups), each], [32 // lanes, lanes], [warps // across, across], [1, 0])


@gluon.constexpr_function
def float_piece(channels, warps):
    """Keys at a time where they are to be quantised: for ranges of channels a thread had better have few of these."""
    # two at least
    return 8 * warps * max(1, 32 // channels)


@gluon.constexpr_function
def rows_layout(columns, own, near, warps, across=1, apart=0):
    """Rows as a product has them, sixteen a warp: a lane and its three neighbours have one and perhaps that eight below.

    Args:
        own: bits of what a thread has.
        near: columns from the first of four neighbours to the second, and to the third.
        across: warps that share a row, their columns so many ``apart``; all the same ones if that is 0.
    """
    lanes = [*([0, column] for column in near), [1, 0], [2, 0], [4, 0]]
    rows = [[16 << bit, 0] for bit in range(warps.bit_length() - 1)]
    parts = [[0, apart << bit] for bit in range(across.bit_length() - 1)]
    return gl.DistributedLinearLayout(own, lanes, rows + parts, [], [16 * warps, columns])


@gluon.constexpr_function
def score_layout(columns, warps, across=1):
    """A product's layout, in words of its own."""
    wide = [[0, bit] for bit in (8, 16, 32, 64) if bit * across < columns]
    return rows_layout(columns, [[0, 1], [8, 0], *wide], (2, 4), warps, across, columns // across)


@gluon.constexpr_function
def quarter_layout(warps):
    """Four numbers a row, one for each thread that has a part of it."""
    return rows_layout(4, [[8, 0]], (1, 2), warps)


@gluon.constexpr_function
def eight_layout(warps, across=1):
    """Eight columns of a product, which all warps of a row have."""
    return rows_layout(8, [[0, 1], [8, 0]], (2, 4), warps, across)


@gluon.constexpr_function
def stored_layout(columns, warps, across):
    """Stored probabilities, four neighbours in a word."""
    wide = [[0, bit] for bit in (16, 32, 64) if bit * across < columns]
    return rows_layout(columns, [[0, 1], [0, 2], [8, 0], *wide], (4, 8), warps, across, columns // across)


@gluon.constexpr_function
def part_layout(warps, across):
    """A number of each warp of a row, all of them in all of its threads."""
    own = [[0, 1 << bit] for bit in range(across.bit_length() - 1)]
    return rows_layout(across, [*own, [8, 0]], (0, 0), warps, across)


@gluon.constexpr_function
def query_layout(channels, each, warps, across=1):
    """Words of ``each`` numbers of queries, in the order of a left operand's registers."""
    near, far = [bit for bit in (1, 2) if bit * each < 4], [bit // each for bit in (16, 32, 64) if bit < channels]
    own = [*([0, bit] for bit in near), [8, 0], *([0, bit] for bit in far)]
    return rows_layout(channels // each, own, (4 // each, 8 // each), warps, across)


@gluon.constexpr_function
def output_layout(channels, warps, across=1):
    """Outputs: a quarter of a warp's part of a row's channels a thread."""
    each = channels // (4 * across)
    own = [[0, bit] for bit in (1, 2, 4, 8, 16) if bit < each]
    return rows_layout(channels, [*own, [8, 0]], (each, 2 * each), warps, across, 4 * each)


@gluon.jit
def _join_rows(a, b):
    """The rows of ``a``, then those of ``b``."""
    x = gl.permute(gl.join(a, b), (2, 0, 1))
    return gl.reshape(x, (2 * a.shape[0], a.shape[1]))


@gluon.jit
def _load_channels(ptrs, n, channels, CHANNELS: gl.constexpr, D: gl.constexpr):
    """Rows ``n`` of numbers, or of words that begin with the given ``channels`` of D; zero from CHANNELS on."""
    if D == CHANNELS:
        x = gl.load(ptrs)
    else:
        x = gl.load(ptrs, mask=(n[:, None] >= 0) & (channels[None, :] < CHANNELS), other=0)
    return x


@gluon.jit
def _load_quads(
    base, stride_n: gl.constexpr, START: gl.constexpr, WIDTH: gl.constexpr, KEYS: gl.constexpr, CHANNELS: gl.constexpr,
    KEY: gl.constexpr, WARPS: gl.constexpr, PIECE: gl.constexpr,
):  # fmt: skip
    """Keys (past the end the last again) or values (zero there) for a tile of scores of WIDTH columns, or 32 if it has fewer.

    Channels past CHANNELS, up to the kernel's width, are zero.

    PIECE keys at a time (:func:`quad_layout`). A wide tile deals the keys by :func:`.tile.key_order`, one of 8 or 16 the
    values by :func:`held_order`.
    """
    D: gl.constexpr = kernel_width(CHANNELS) if KEY else value_width(CHANNELS)
    if WIDTH > PIECE:
        # pieces whose addresses differ by a constant
        a = _load_quads(base, stride_n, START, WIDTH // 2, KEYS, CHANNELS, KEY, WARPS, PIECE)
        b = _load_quads(base, stride_n, START + WIDTH // 2, WIDTH // 2, KEYS, CHANNELS, KEY, WARPS, PIECE)
        x = gl.convert_layout(_join_rows(a, b), quad_layout(WIDTH, D, WARPS, PIECE), assert_trivial=True)
    else:
        ROWS: gl.constexpr = depth(WIDTH)
        L: gl.constexpr = quad_layout(ROWS, D, WARPS, PIECE)
        n = gl.arange(0, ROWS, layout=gl.SliceLayout(1, L))
        d = gl.arange(0, D, layout=gl.SliceLayout(0, L))
        if KEY and WIDTH >= 32:
            n = key_order(n)
        elif not KEY and WIDTH < 32:
            n = held_order(n)
        if START + ROWS <= KEYS:
            x = _load_channels(base + (n[:, None] * stride_n + d[None, :]) + START * stride_n, n, d, CHANNELS, D)
        elif KEY:
            ptrs = base + (gl.minimum(START + n, KEYS - 1)[:, None] * stride_n + d[None, :])
            x = _load_channels(ptrs, n, d, CHANNELS, D)
        else:
            inside = (START + n[:, None] < KEYS) & (d[None, :] < CHANNELS)
            x = gl.load(base + (n[:, None] * stride_n + d[None, :]) + START * stride_n, mask=inside, other=0.0)
    return x


@gluon.jit
def _all_quads(
    base, stride_n: gl.constexpr, WIDTHS: gl.constexpr, KEYS: gl.constexpr, CHANNELS: gl.constexpr, KEY: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Every tile of keys or values, span by span, to be quantised."""
    START: gl.constexpr = row_starts(KEYS)
    SPANS: gl.constexpr = channel_spans(CHANNELS)
    FROM: gl.constexpr = span_starts(CHANNELS)
    D: gl.constexpr = span_widths(CHANNELS) if KEY else value_widths(CHANNELS)
    spans = ()
    for c in gl.static_range(len(SPANS)):
        tiles = ()
        for i in gl.static_range(len(WIDTHS)):
            x = _load_quads(base + FROM[c], stride_n, START[i], WIDTHS[i], KEYS, SPANS[c], KEY, WARPS, float_piece(D[c], WARPS))
            tiles = tiles + (x,)
        spans = spans + (tiles,)
    return spans


@gluon.jit
def _own_halves(x, WARPS: gl.constexpr):
    """Two halves of the rows, the same part of each a thread's: of pieces, or of what a thread has of one."""
    if x.shape[0] > float_piece(x.shape[1], WARPS):
        a, b = halves(x)
    else:
        a, b = gl.split(gl.permute(gl.reshape(x, (x.shape[0] // 2, 2, x.shape[1])), (0, 2, 1)))
    return a, b


@gluon.jit
def _own_extremes(x, EXTREME: gl.constexpr, WARPS: gl.constexpr):
    """Minima (EXTREME is :func:`lower`) or maxima of the rows of a thread, 32 in all; two numbers an instruction."""
    if x.shape[0] > 32:
        a, b = _own_halves(x, WARPS)
        x = _own_extremes(EXTREME(a, b, False), EXTREME, WARPS)
    return gl.convert_layout(x, quad_layout(32, x.shape[1], WARPS, float_piece(x.shape[1], WARPS)), assert_trivial=True)


@gluon.jit
def _beside(x, tile):
    """Numbers of channels beside a tile of keys or values."""
    L: gl.constexpr = tile.type.layout
    return beside_channels(x, L)


@gluon.jit
def _key_amplitude(k, CENTER: gl.constexpr, WARPS: gl.constexpr):
    """The bits of the largest magnitude in a span of all keys, centred or not, and the middles of its channels."""
    low, high = _own_extremes(k[0], lower, WARPS), _own_extremes(k[0], higher, WARPS)
    for i in gl.static_range(1, len(k)):
        low = lower(low, _own_extremes(k[i], lower, WARPS), False)
        high = higher(high, _own_extremes(k[i], higher, WARPS), False)
    low, high = channel_ranges(low, high)
    middle = (low + high) * 0.5
    if CENTER:
        low, high = low - middle, high - middle
    # every warp for itself: a reduction by all of them would pass through shared memory twice
    D: gl.constexpr = low.shape[0]
    amplitude = gl.convert_layout(nan_max(gl.abs(low), gl.abs(high)), gl.BlockedLayout([D // 32], [32], [WARPS], [0]))
    # the bits of magnitudes have their order, NaN above all, and one instruction finds a warp's largest integer
    return gl.max(amplitude.to(gl.int32, bitcast=True), 0), middle


@gluon.jit
def _quantize_keys(k, k_smem, CENTER: gl.constexpr, WARPS: gl.constexpr):
    """Quantise the spans of all tiles of keys into shared memory; return the bits of their scale."""
    largest = 0
    middles = ()
    for c in gl.static_range(len(k)):
        amplitude, middle = _key_amplitude(k[c], CENTER, WARPS)
        middles = middles + (middle,)
        largest = amplitude if c == 0 else gl.maximum(largest, amplitude)
    scale = amplitude_to_scale(largest.to(gl.float32, bitcast=True))
    inverse = inverse_scale(scale, False)
    for c in gl.static_range(len(k)):
        for i in gl.static_range(len(k[c])):
            y = k[c][i].to(gl.float32)
            if CENTER:
                y = y - _beside(middles[c], y)
            # a tile of 16 columns or fewer has 32 rows here, the last key repeated
            k_smem[i][c].slice(0, k[c][i].shape[0], 0).store(round_to_int8(y, inverse))
    return scale.to(gl.int32, bitcast=True)


@gluon.jit
def _quantize_values(v, v_smem, VALUE_CHANNEL: gl.constexpr, WARPS: gl.constexpr, ACROSS: gl.constexpr):
    """Quantise the spans of all tiles of values into shared memory, transposed; return the channels' scales, of each span."""
    maxima = ()
    for c in gl.static_range(len(v)):
        most = _own_extremes(gl.abs(v[c][0]), higher, WARPS)
        for i in gl.static_range(1, len(v[c])):
            most = higher(most, _own_extremes(gl.abs(v[c][i]), higher, WARPS), False)
        maxima = maxima + (channel_maxima(most),)
    if not VALUE_CHANNEL:
        largest = gl.reduce(maxima[0], 0, nan_max)
        for c in gl.static_range(1, len(v)):
            largest = nan_max(largest, gl.reduce(maxima[c], 0, nan_max))
    scales = ()
    for c in gl.static_range(len(v)):
        most = maxima[c]
        if not VALUE_CHANNEL:
            most = most * 0.0 + largest
        scale = amplitude_to_scale(most)
        scales = scales + (scale,)
        inverse = inverse_scale(scale, False)
        for i in gl.static_range(len(v[c])):
            y = v[c][i].to(gl.float32)
            v_smem[i][c].permute((1, 0)).store(_deal(round_to_int8(y, _beside(inverse, y)), ACROSS))
    return scales


@gluon.jit
def _copy_keys(
    base, stride_n: gl.constexpr, smem, START: gl.constexpr, WIDTH: gl.constexpr, KEYS: gl.constexpr, CHANNELS: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Bring a tile of keys to shared memory. In channels past CHANNELS anything may stand: there queries are zero."""
    D: gl.constexpr = smem.shape[1]
    L: gl.constexpr = row_layout(D, 8, WARPS)
    n = gl.arange(0, smem.shape[0], layout=gl.SliceLayout(1, L))
    if WIDTH >= 32:
        n = key_order(n)
    d = gl.arange(0, D, layout=gl.SliceLayout(0, L))
    ptrs = base + gl.minimum(START + n, KEYS - 1)[:, None] * stride_n + d[None, :]
    if D == CHANNELS:
        _copy(smem, ptrs)
    else:
        _copy(smem, ptrs, mask=(n[:, None] >= 0) & (d[None, :] < CHANNELS))


@gluon.jit
def _deal(x, ACROSS: gl.constexpr):
    """Channels 8 i + j (of 64) in columns 8 j + i: a thread of a product with V then holds neighbouring outputs.

    The same in each part of the channels that warps of a row share.
    """
    N: gl.constexpr = x.shape[0]
    D: gl.constexpr = x.shape[1]
    return gl.reshape(gl.permute(gl.reshape(x, (N, ACROSS, 8, D // (8 * ACROSS))), (0, 1, 3, 2)), (N, D))


@gluon.jit
def _undeal(x, ACROSS: gl.constexpr):
    M: gl.constexpr = x.shape[0]
    D: gl.constexpr = x.shape[1]
    return gl.reshape(gl.permute(gl.reshape(x, (M, ACROSS, D // (8 * ACROSS), 8)), (0, 1, 3, 2)), (M, D))


@gluon.jit
def _load_queries(
    base, stride_n: gl.constexpr, first, queries, CHANNELS: gl.constexpr, WARPS: gl.constexpr, ACROSS: gl.constexpr = 1
):  # fmt: skip
    """Spans of queries as words of four bytes, which a loop hands on as they are; past the last the last again."""
    SPANS: gl.constexpr = channel_spans(CHANNELS)
    FROM: gl.constexpr = span_starts(CHANNELS)
    spans = ()
    for c in gl.static_range(len(SPANS)):
        spans = spans + (_load_query_span(base + FROM[c], stride_n, first, queries, SPANS[c], WARPS, ACROSS),)
    return spans


@gluon.jit
def _load_query_span(
    base, stride_n: gl.constexpr, first, queries, CHANNELS: gl.constexpr, WARPS: gl.constexpr, ACROSS: gl.constexpr = 1
):  # fmt: skip
    D: gl.constexpr = kernel_width(CHANNELS)
    EACH: gl.constexpr = 32 // base.dtype.element_ty.primitive_bitwidth
    L: gl.constexpr = query_layout(D, EACH, WARPS, ACROSS)
    n = gl.minimum(first + gl.arange(0, 16 * WARPS, layout=gl.SliceLayout(1, L)), queries - 1)
    d = gl.arange(0, D // EACH, layout=gl.SliceLayout(0, L))
    ptrs = base.to(gl.pointer_type(gl.int32)) + n[:, None] * (stride_n // EACH) + d[None, :]
    return _load_channels(ptrs, n, d * EACH, CHANNELS, D)


@gluon.jit
def _row_amplitude(spans, WARPS: gl.constexpr, ACROSS: gl.constexpr):
    """Largest magnitude of each row, as float32."""
    largest = _span_amplitude(spans[0])
    for c in gl.static_range(1, len(spans)):
        more = gl.convert_layout(_span_amplitude(spans[c]), largest.type.layout, assert_trivial=True)
        largest = nan_max(largest, more)
    L: gl.constexpr = gl.SliceLayout(1, eight_layout(WARPS, ACROSS))
    return gl.convert_layout(gl.reduce(largest, 1, nan_max), L, assert_trivial=True)


@gluon.jit
def _span_amplitude(x):
    """Eight magnitudes a row, of which one is the largest; two numbers an instruction while a thread is by itself."""
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
def _unpack_queries(words, DTYPE: gl.constexpr, WARPS: gl.constexpr, ACROSS: gl.constexpr):
    spans = ()
    for c in gl.static_range(len(words)):
        spans = spans + (_unpack_span(words[c], DTYPE, WARPS, ACROSS),)
    return spans


@gluon.jit
def _unpack_span(words, DTYPE: gl.constexpr, WARPS: gl.constexpr, ACROSS: gl.constexpr):
    L: gl.constexpr = query_layout(words.shape[1] * (32 // DTYPE.primitive_bitwidth), 1, WARPS, ACROSS)
    return unpack(words, DTYPE, L)


@gluon.jit
def _round_rows(x, inverse):
    L: gl.constexpr = x.type.layout
    return round_to_int8(x, beside_rows(inverse, L))


@gluon.jit
def _queries(
    words, DTYPE: gl.constexpr, qs_base, qs_stride_n, head_bits, first, queries,
    QUANTIZE: gl.constexpr, QUERY_TOKEN: gl.constexpr, WARPS: gl.constexpr, ACROSS: gl.constexpr = 1,
):  # fmt: skip
    """A block of queries as int8, span by span, and the bits of its scale or of its rows'."""
    q = _unpack_queries(words, DTYPE, WARPS, ACROSS)
    bits = head_bits
    if QUANTIZE:
        floats = ()
        for c in gl.static_range(len(q)):
            floats = floats + (q[c].to(gl.float32),)
        if QUERY_TOKEN:
            scale = amplitude_to_scale(_row_amplitude(q, WARPS, ACROSS))
            inverse = inverse_scale(scale, False)
            bits = scale.to(gl.int32, bitcast=True)
        else:
            inverse = inverse_scale(head_bits.to(gl.float32, bitcast=True), False)
        rounded = ()
        for c in gl.static_range(len(q)):
            rounded = rounded + (_round_rows(floats[c], inverse),)
        q = rounded
    elif QUERY_TOKEN:
        n = first + gl.arange(0, 16 * WARPS, layout=gl.SliceLayout(1, eight_layout(WARPS, ACROSS)))
        bits = gl.load(qs_base + gl.minimum(n, queries - 1) * qs_stride_n)
    return q, bits


@gluon.jit
def _tile_sums(smem, WARPS: gl.constexpr):
    """Sums of the channels of a tile of V in shared memory."""
    v = smem.load(row_layout(smem.shape[1], 8, WARPS))
    return gl.sum(gl.inline_asm_elementwise(SUM_FOUR, "=r,=r,=r,=r,r,r", [v, v * 0 + 1], gl.int32, True, 4), 1)


@gluon.jit
def _channel_sums(v_smem, WARPS: gl.constexpr, ACROSS: gl.constexpr):
    """127 times the sums of V's channels, span by span, beside a product with V."""
    spans = ()
    for c in gl.static_range(len(v_smem[0])):
        sums = _sums_beside(v_smem[0][c], WARPS, ACROSS)
        for i in gl.static_range(1, len(v_smem)):
            sums += _sums_beside(v_smem[i][c], WARPS, ACROSS)
        spans = spans + (127 * sums,)
    return spans


@gluon.jit
def _sums_beside(smem, WARPS: gl.constexpr, ACROSS: gl.constexpr):
    D: gl.constexpr = smem.shape[0]
    return gl.convert_layout(_tile_sums(smem, WARPS * ACROSS), gl.SliceLayout(0, product_layout(D, WARPS, ACROSS)))


@gluon.jit
def _sums_aside(v_smem, WARPS: gl.constexpr):
    """127 times the sums of V's channels, span by span, left in shared memory for everybody."""
    spans = ()
    for c in gl.static_range(len(v_smem[0])):
        sums = _tile_sums(v_smem[0][c], WARPS)
        for i in gl.static_range(1, len(v_smem)):
            sums += gl.convert_layout(_tile_sums(v_smem[i][c], WARPS), sums.type.layout)
        spans = spans + (_aside(127 * sums),)
    barrier()
    return spans


@gluon.jit
def _add_values(accumulator, p, v, WARPS: gl.constexpr, ACROSS: gl.constexpr):
    """Start the products of a tile of probabilities with the spans of a tile of V."""
    spans = ()
    for c in gl.static_range(len(v)):
        spans = spans + (_add_span(accumulator[c], p, v[c], WARPS, ACROSS),)
    return spans


@gluon.jit
def _add_span(accumulator, p, v, WARPS: gl.constexpr, ACROSS: gl.constexpr):
    L: gl.constexpr = product_layout(v.shape[0], WARPS, ACROSS)
    if is_operand(p.type.layout):
        # the order of probabilities is that of any product
        p = gl.convert_layout(p, gl.DotOperandLayout(0, L, 4), assert_trivial=True)
    return warpgroup_mma(p, v.permute((1, 0)), accumulator, is_async=True)


@gluon.jit
def _scores(q, k_smem, WIDTH: gl.constexpr, WARPS: gl.constexpr, ACROSS: gl.constexpr):
    """Start the product of a block of queries with a tile of keys, span by span."""
    L: gl.constexpr = product_layout(WIDTH, WARPS, ACROSS)
    s = gl.zeros((16 * WARPS, WIDTH), gl.int32, L)
    for c in gl.static_range(len(q)):
        k = k_smem[c].slice(0, WIDTH, 0)
        # the layout of the queries is that of any product
        q_c = gl.convert_layout(q[c], gl.DotOperandLayout(0, L, 4), assert_trivial=True)
        s = warpgroup_mma(q_c, k.permute((1, 0)), s, use_acc=c > 0, is_async=True)
    return s


@gluon.jit
def _finished(s, ahead: gl.constexpr, WARPS: gl.constexpr, ACROSS: gl.constexpr = 1):
    """The scores of a product, once no more than ``ahead`` of those started later, spans by themselves, are under way."""
    s = warpgroup_mma_wait(ahead, [s])
    return gl.convert_layout(s, score_layout(s.shape[1], WARPS, ACROSS), assert_trivial=True)


@gluon.jit
def _fold_columns(s, WARPS: gl.constexpr, ACROSS: gl.constexpr = 1):
    """Maxima of columns eight apart, which a thread holds."""
    M: gl.constexpr = s.shape[0]
    if s.shape[1] > 8 * ACROSS:
        s = gl.max(gl.reshape(s, (M, ACROSS, s.shape[1] // (8 * ACROSS), 8)), 2)
        s = gl.reshape(s, (M, 8 * ACROSS))
    return gl.convert_layout(s, score_layout(8 * ACROSS, WARPS, ACROSS), assert_trivial=True)


@gluon.jit
def _stored(s, slope, begin, constant, OPERAND: gl.constexpr, WARPS: gl.constexpr, ACROSS: gl.constexpr):
    """Stored probabilities of a tile of scores, as a product with V takes them: an operand, or on its way to memory."""
    M: gl.constexpr = s.shape[0]
    L: gl.constexpr = s.type.layout
    STORED: gl.constexpr = OPERAND if ACROSS == 1 else stored_layout(s.shape[1], WARPS, ACROSS)
    p = twice_probabilities(s, beside_rows(slope, L), beside_rows(begin, L), beside_rows(constant, L))
    if s.shape[1] == 8:
        p = _twice(p)
    if s.shape[1] <= 16:
        p = _twice(p)
    N: gl.constexpr = p.shape[1]
    p = gl.permute(gl.reshape(p, (M, N // 16, 2, 4, 2)), (0, 1, 3, 2, 4))
    return pack(gl.convert_layout(gl.reshape(p, (M, N)), STORED, assert_trivial=True))


@gluon.jit
def _twice(p):
    """The columns, and the same again: what stands there meets values of zero."""
    return gl.reshape(gl.permute(gl.join(p, p), (0, 2, 1)), (p.shape[0], 2 * p.shape[1]))


@gluon.jit
def _sums_of_four(p, START: gl.constexpr, WIDTH: gl.constexpr, KEYS: gl.constexpr):
    """Sums of four neighbouring stored probabilities, those past the last key left out, at the first of them; else zero."""
    N: gl.constexpr = p.shape[1]
    n = gl.arange(0, N, layout=gl.SliceLayout(0, p.type.layout))
    if WIDTH < 32:
        n = held_order(n)
    if START + N <= KEYS:
        weight = p * 0 + 1
    else:
        weight = (START + n < KEYS).to(gl.int8)[None, :] + p * 0
    return gl.inline_asm_elementwise(SUM_FOUR, "=r,=r,=r,=r,r,r", [p, weight], gl.int32, True, 4)


@gluon.jit
def quarter_sums(p, START: gl.constexpr, WIDTH: gl.constexpr, KEYS: gl.constexpr, WARPS: gl.constexpr):
    """Sums of a tile's stored probabilities, four a row."""
    M: gl.constexpr = p.shape[0]
    N: gl.constexpr = p.shape[1]
    parts = gl.reshape(first_of_four(_sums_of_four(p, START, WIDTH, KEYS)), (M, N // 16, 4))
    return gl.convert_layout(gl.sum(parts, 1), quarter_layout(WARPS), assert_trivial=True)


@gluon.jit
def _part_sums(p, START: gl.constexpr, WIDTH: gl.constexpr, KEYS: gl.constexpr, ACROSS: gl.constexpr):
    """Sums of stored probabilities over places of a warp that are 32 apart, those past the last key left out."""
    M: gl.constexpr = p.shape[0]
    N: gl.constexpr = p.shape[1]
    parts = _sums_of_four(p, START, WIDTH, KEYS)
    return gl.reshape(gl.sum(gl.reshape(parts, (M, ACROSS, N // 32, 32 // ACROSS)), 2), (M, 32))


@gluon.jit
def _one_row(x, WARPS: gl.constexpr):
    """Of numbers of rows, which four neighbours have, one for each thread: of its two rows they take one each."""
    L: gl.constexpr = eight_layout(WARPS)
    x = gl.convert_layout(x, gl.SliceLayout(1, L), assert_trivial=True)[:, None] + gl.zeros((16 * WARPS, 8), gl.int32, L)
    x, _ = gl.split(gl.reshape(x, (16 * WARPS, 4, 2)))
    x, y = gl.split(gl.permute(gl.reshape(x, (WARPS, 2, 8, 4)), (0, 2, 3, 1)))
    R: gl.constexpr = x.type.layout
    c = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, R)))
    return gl.where((c & 1)[None, None, :] == 0, x, y)


@gluon.jit
def _all_rows(x, WARPS: gl.constexpr):
    """What :func:`_one_row` distributed, back: (rows, 4), the same in all columns."""
    x = gl.reshape(x, (WARPS, 8, 2, 2))
    R: gl.constexpr = x.type.layout
    even = (gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, R)))) == 0)[None, None, None, :]
    first = gl.expand_dims(gl.sum(gl.where(even, x, x * 0), 3), 3) + gl.zeros_like(x)
    second = gl.expand_dims(gl.sum(gl.where(even, x * 0, x), 3), 3) + gl.zeros_like(x)
    return gl.reshape(gl.permute(gl.join(first, second), (0, 4, 1, 2, 3)), (16 * WARPS, 4))


@gluon.jit
def _spread(x, D: gl.constexpr, L: gl.constexpr):
    """Four numbers a row, all alike, each for a quarter of the channels."""
    x = gl.join(x, x)
    x = gl.join(x, x)
    if D >= 32:
        x = gl.join(x, x)
    if D >= 64:
        x = gl.join(x, x)
    if D == 128:
        x = gl.join(x, x)
    return gl.convert_layout(gl.reshape(x, (x.shape[0], D)), L, assert_trivial=True)


@gluon.jit
def _beside_outputs(x, D: gl.constexpr, L: gl.constexpr, WARPS: gl.constexpr, ACROSS: gl.constexpr):
    """Numbers of rows, as :func:`_store` has them, beside outputs."""
    if ACROSS == 1:
        x = _spread(_all_rows(x, WARPS), D, L)
    else:
        x = beside_rows(x, L)
    return x


@gluon.jit
def row_inverses(total, count, WARPS: gl.constexpr, ACROSS: gl.constexpr = 1):
    """What :func:`_store_span` normalises by: ``total`` adds up ``count`` stored probabilities of each row."""
    if ACROSS == 1:
        total = _one_row(total, WARPS)
    return row_inverse(127 * count - total, False)


@gluon.jit
def _store_span(
    numerator, bits, inverse, usable, factors, o_base, o_stride_n: gl.constexpr, first, queries,
    CHANNELS: gl.constexpr, WARPS: gl.constexpr, ACROSS: gl.constexpr = 1,
):  # fmt: skip
    """Normalise a block of a span's outputs and store those of its rows that there are: :func:`.tile.finish`."""
    factor, shift, half = factors
    M: gl.constexpr = numerator.shape[0]
    D: gl.constexpr = numerator.shape[1]
    L: gl.constexpr = output_layout(D, WARPS, ACROSS)
    x = gl.convert_layout(_undeal(numerator, ACROSS), L, assert_trivial=True)
    factor, shift, half = beside_channels(factor, L), beside_channels(shift, L), beside_channels(half, L)
    if o_base.dtype.element_ty == gl.int8:
        scaled = x * _beside_outputs(1 << (24 - bits), D, L, WARPS, ACROSS)
        if factor.type.is_block():
            row_factor = multiply_high(_beside_outputs(inverse, D, L, WARPS, ACROSS), factor, False)
        else:
            row_factor = _beside_outputs(multiply_high(inverse, factor, False), D, L, WARPS, ACROSS)
        result = requantize(scaled, row_factor, shift, half, False)
    else:
        good = usable_scale(factor.to(gl.int32, bitcast=True))
        weight = row_weight(inverse, bits)
        if ACROSS == 1:
            weight = _all_rows(weight.to(gl.int32, bitcast=True), WARPS).to(gl.float32, bitcast=True)
            W: gl.constexpr = weight.type.layout
            # NaN in a factor a row is cheaper than a choice an element
            weight = gl.where(beside_rows(usable, W), weight, float("nan"))
            weight = _spread(weight, D, L)
        else:
            weight = beside_rows(gl.where(usable, weight, float("nan")), L)
        result = (x.to(gl.float32) * weight * gl.where(good, factor, float("nan"))).to(o_base.dtype.element_ty)
    rows = first + gl.arange(0, M, layout=gl.SliceLayout(1, L))
    channels = gl.arange(0, D, layout=gl.SliceLayout(0, L))
    inside = (rows[:, None] < queries) & (channels[None, :] < CHANNELS)
    gl.store(o_base + rows[:, None] * o_stride_n + channels[None, :], result, mask=inside)


@gluon.jit
def _allocate(ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    return gl.allocate_shared_memory(gl.int8, [ROWS, COLUMNS], shared_layout(COLUMNS))


@gluon.jit
def _allocate_tiles(COUNT: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    return gl.allocate_shared_memory(gl.int8, [COUNT, ROWS, COLUMNS], shared_layout(COLUMNS))


@gluon.jit
def _aside(x):
    """Numbers of channels, left in shared memory."""
    smem = gl.allocate_shared_memory(x.dtype, x.shape, gl.SwizzledSharedLayout(1, 1, 1, [0]))
    smem.store(x)
    return smem


@gluon.jit
def _load_last_span(
    q_ptr, q_stride_n: gl.constexpr, first, queries, TAIL: gl.constexpr, CHANNELS: gl.constexpr, WARPS: gl.constexpr
):  # fmt: skip
    D: gl.constexpr = kernel_width(CHANNELS)
    # rows lie alike in spans of 64 and of 32
    EACH: gl.constexpr = 4 if D == 128 else D // 16
    L: gl.constexpr = gl.BlockedLayout([1, EACH], [32 * EACH // D, D // EACH], [WARPS, 1], [1, 0])
    n = gl.minimum(first + gl.arange(0, TAIL, layout=gl.SliceLayout(1, L)), queries - 1)
    d = gl.arange(0, D, layout=gl.SliceLayout(0, L))
    return _load_channels(q_ptr + n[:, None] * q_stride_n + d[None, :], n, d, CHANNELS, D)


@gluon.jit
def _load_last(
    q_ptr, q_stride_n: gl.constexpr, first, queries, TAIL: gl.constexpr, CHANNELS: gl.constexpr, WARPS: gl.constexpr
):  # fmt: skip
    """The spans of the last few queries."""
    SPANS: gl.constexpr = channel_spans(CHANNELS)
    FROM: gl.constexpr = span_starts(CHANNELS)
    spans = ()
    for c in gl.static_range(len(SPANS)):
        spans = spans + (_load_last_span(q_ptr + FROM[c], q_stride_n, first, queries, TAIL, SPANS[c], WARPS),)
    return spans


@gluon.jit
def _last_maximum(x, L: gl.constexpr):
    """Largest magnitudes of the rows of all spans, as float32."""
    largest = gl.reduce(gl.abs(x[0]).to(gl.float32), 1, nan_max)
    for c in gl.static_range(1, len(x)):
        more = gl.reduce(gl.abs(x[c]).to(gl.float32), 1, nan_max)
        largest = nan_max(largest, gl.convert_layout(more, gl.SliceLayout(1, L), assert_trivial=True))
    return largest


@gluon.jit
def _last_queries(
    x, smem, qs_base, qs_stride_n, head_bits, first, queries, QUANTIZE: gl.constexpr, QUERY_TOKEN: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Leave the last few queries in shared memory, as int8; return the bits of their scale or scales."""
    ROWS: gl.constexpr = x[0].shape[0]
    L: gl.constexpr = x[0].type.layout
    COLUMN: gl.constexpr = gl.SliceLayout(0, product_layout(ROWS, WARPS))
    bits = head_bits
    if QUANTIZE:
        scale = head_bits.to(gl.float32, bitcast=True) if not QUERY_TOKEN else amplitude_to_scale(_last_maximum(x, L))
        inverse = inverse_scale(scale, False)
        for c in gl.static_range(len(x)):
            smem[c].store(_round_rows(x[c].to(gl.float32), inverse))
        if QUERY_TOKEN:
            bits = gl.convert_layout(scale.to(gl.int32, bitcast=True), COLUMN)
    else:
        for c in gl.static_range(len(x)):
            smem[c].store(x[c])
        if QUERY_TOKEN:
            n = gl.minimum(first + gl.arange(0, ROWS, layout=COLUMN), queries - 1)
            bits = gl.load(qs_base + n * qs_stride_n)
    return bits


@gluon.jit
def _across(x, D: gl.constexpr, L: gl.constexpr):
    """A number, or one for each (dealt) channel, beside outputs whose rows are the channels."""
    if x.type.is_block():
        x = _beside_last(gl.reshape(gl.permute(gl.reshape(x, (8, D // 8)), (1, 0)), (D,)), L)[:, None]
    return x


@gluon.jit
def _beside_last(x, L: gl.constexpr):
    """A number for each column of V beside the rows of its transposed product, of which there are 64 at least."""
    if x.shape[0] < 64:
        x = gl.reshape(gl.permute(gl.join(x, x), (1, 0)), (2 * x.shape[0],))
    if x.shape[0] < 64:
        x = gl.reshape(gl.permute(gl.join(x, x), (1, 0)), (64,))
    return gl.convert_layout(x, gl.SliceLayout(1, L))


@gluon.jit
def _last_sums(sums, ASIDE: gl.constexpr, L: gl.constexpr):
    """What is added to outputs whose rows are the channels, from registers or from shared memory."""
    if ASIDE and sums.shape[0] >= 64:
        sums = sums.load(gl.SliceLayout(1, L))
    elif ASIDE:
        sums = _beside_last(sums.load(gl.BlockedLayout([1], [32], [4], [0])), L)
    else:
        sums = _beside_last(sums, L)
    return sums


@gluon.jit
def _last_scores(q_smem, k_smem, WARPS: gl.constexpr):
    """Start the product of a tile of keys with the last few queries, span by span."""
    M: gl.constexpr = k_smem[0].shape[0]
    N: gl.constexpr = q_smem[0].shape[0]
    s = gl.zeros((M, N), gl.int32, product_layout(N, WARPS))
    for c in gl.static_range(len(q_smem)):
        s = warpgroup_mma(k_smem[c], q_smem[c].permute((1, 0)), s, use_acc=c > 0, is_async=True)
    return s


@gluon.jit
def _last_stored(
    s, base, multiplier, fraction_bits, smem, START: gl.constexpr, WIDTH: gl.constexpr, KEYS: gl.constexpr, OFFSET: gl.constexpr
):
    """Store probabilities of a tile, as the product with V takes them, and return their sums over keys 64 apart."""
    M: gl.constexpr = s.shape[0]
    N: gl.constexpr = s.shape[1]
    L: gl.constexpr = s.type.layout
    word = probability_words(s, base, multiplier, fraction_bits, "none", False, True, 8, True, OFFSET, False, False)
    p = _high_bytes(word, False)
    n = gl.arange(0, M, layout=gl.SliceLayout(1, L))
    there = n < depth(WIDTH)
    if WIDTH >= 32:
        n = key_order(n)
    part = gl.where((there & (START + n < KEYS))[:, None], p.to(gl.int32), 0)
    if M == 128:
        a, b = halves(part)
        part = gl.convert_layout(a + b, L, assert_trivial=True)
    p = gl.reshape(gl.permute(gl.reshape(p, (M // 16, 2, 4, 2, N)), (0, 2, 1, 3, 4)), (M, N))
    smem.permute((1, 0)).store(p)
    return part


@gluon.jit
def _last_outputs(p_smem, v_smem, c: gl.constexpr, KEYS: gl.constexpr, WARPS: gl.constexpr):
    """Start the products of a span of V, channels as rows, with the last few queries' probabilities."""
    WIDTHS: gl.constexpr = row_widths(KEYS)
    D: gl.constexpr = v_smem[0][c].shape[0]
    N: gl.constexpr = p_smem[0].shape[0]
    accumulator = warpgroup_mma_init(gl.zeros((D, N), gl.int32, product_layout(N, WARPS)))
    for t in gl.static_range(len(WIDTHS)):
        p_t = p_smem[t].slice(0, depth(WIDTHS[t]), 1)
        accumulator = warpgroup_mma(v_smem[t][c], p_t.permute((1, 0)), accumulator, is_async=True)
    return accumulator


@gluon.jit
def _last_rows(
    q_smem, query_bits, row, keys_usable, units, k_smem, v_smem, output, ASIDE: gl.constexpr, o_stride_n: gl.constexpr, first,
    queries, CHANNELS: gl.constexpr, KEYS: gl.constexpr, WARPS: gl.constexpr, OFFSET: gl.constexpr, MOST: gl.constexpr,
    MOST_BITS: gl.constexpr,
):  # fmt: skip
    """Attention of the last few queries. As a block most warps would have none; here the keys, then the channels are shared.

    Both products are transposed: rows are keys and channels, columns the queries.
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
    p_smem = ()
    for i in gl.static_range(TILES):
        p_smem = p_smem + (_allocate(N, max(WIDTHS[i], 64)),)
    sums, factors, o_base = output
    last_sums = ()
    last_factors = ()
    for c in gl.static_range(COUNT):
        factor, shift, half = factors[c]
        last_sums = last_sums + (_last_sums(sums[c], ASIDE, L),)
        last_factors = last_factors + ((_across(factor, D[c], L), _across(shift, D[c], L), _across(half, D[c], L)),)
    usable = keys_usable & usable_scale(query_bits)
    if query_bits.type.is_block():
        row = row_factors(query_bits, units, "none", MOST, MOST_BITS)
    multiplier, fraction_bits, _ = row
    scores = ()
    for t in gl.static_range(TILES):
        scores = scores + (_last_scores(q_smem, k_smem[t], WARPS),)
    ready = ()
    for t in gl.static_range(TILES):
        s = warpgroup_mma_wait(COUNT * (TILES - 1 - t), [scores[t]])
        if WIDTHS[t] <= 32:
            # nobody has written the second half of the tile
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
    for t in gl.static_range(TILES):
        total += _last_stored(
            ready[t], row_max[None, :], multiplier, fraction_bits, p_smem[t], STARTS[t], WIDTHS[t], KEYS, OFFSET
        )
    # here, because a reduction may use the shared memory of what nobody waits for any more, such as products under way
    total = gl.convert_layout(gl.sum(total, 0), COLUMN, assert_trivial=True)
    fence_async_shared()
    barrier()
    accumulators = ()
    for c in gl.static_range(COUNT):
        accumulators = accumulators + (_last_outputs(p_smem, v_smem, c, KEYS, WARPS),)
    bits, inverse = row_inverse(127 * KEYS - total, False)
    for c in gl.static_range(COUNT):
        numerator = last_sums[c][:, None] - warpgroup_mma_wait(TILES * (COUNT - 1 - c), [accumulators[c]])
        _store_last(numerator, bits, inverse, usable, last_factors[c], o_base + FROM[c], o_stride_n, first, queries, SPANS[c])


@gluon.jit
def _store_last(
    numerator, bits, inverse, usable, factors, o_base, o_stride_n: gl.constexpr, first, queries, CHANNELS: gl.constexpr
):  # fmt: skip
    """Normalise and store a span of outputs whose rows are the channels."""
    factor, shift, half = factors
    L: gl.constexpr = numerator.type.layout
    if o_base.dtype.element_ty == gl.int8:
        result = requantize(
            numerator << (24 - bits)[None, :], multiply_high(inverse[None, :], factor, False), shift, half, False
        )
    else:
        good = usable_scale(factor.to(gl.int32, bitcast=True))
        weight = gl.where(usable, row_weight(inverse, bits), float("nan"))[None, :]
        result = (numerator.to(gl.float32) * weight * gl.where(good, factor, float("nan"))).to(o_base.dtype.element_ty)
    D: gl.constexpr = value_width(CHANNELS)
    place = gl.arange(0, numerator.shape[0], layout=gl.SliceLayout(1, L))
    channels = channel_of_row(place, D)
    rows = first + gl.arange(0, numerator.shape[1], layout=gl.SliceLayout(0, L))
    inside = (rows[None, :] < queries) & (channels[:, None] < CHANNELS)
    if numerator.shape[0] > D:
        inside = inside & (place[:, None] < D)
    gl.store(o_base + rows[None, :] * o_stride_n + channels[:, None], result, mask=inside)


@gluon.jit
def _all_scores(q, k_smem, WIDTHS: gl.constexpr, WARPS: gl.constexpr, ACROSS: gl.constexpr):
    """Start the products of a block of queries with all keys."""
    scores = ()
    for t in gl.static_range(len(WIDTHS)):
        scores = scores + (_scores(q, k_smem[t], WIDTHS[t], WARPS, ACROSS),)
    return scores


@gluon.jit
def _tile_at(whole, i):
    """The spans of whole tile ``i``."""
    spans = ()
    for c in gl.static_range(len(whole)):
        spans = spans + (whole[c].index(i),)
    return spans


@gluon.jit
def _first_rows(v, D: gl.constexpr):
    """Spans of a tile of V without rows past their channels."""
    spans = ()
    for c in gl.static_range(len(D)):
        if v[c].shape[0] > D[c]:
            spans = spans + (v[c].slice(0, D[c], 0),)
        else:
            spans = spans + (v[c],)
    return spans


@gluon.jit
def _first_walk(q, k_whole, k_smem, KEYS: gl.constexpr, TURN: gl.constexpr, WARPS: gl.constexpr):
    """Maxima of columns eight apart of a block's scores, which are not kept."""
    WIDTHS: gl.constexpr = row_widths(KEYS)
    TURNS: gl.constexpr = KEYS // (128 * TURN)
    largest = gl.full((16 * WARPS, 8), MASKED, gl.int32, score_layout(8, WARPS))
    for turn in range(TURNS):
        scores = ()
        for i in gl.static_range(TURN):
            scores = scores + (_scores(q, _tile_at(k_whole, turn * TURN + i), 128, WARPS, 1),)
        for i in gl.static_range(TURN):
            s = _finished(scores[i], len(q) * (TURN - 1 - i), WARPS)
            largest = gl.maximum(largest, _fold_columns(s, WARPS))
    for t in gl.static_range(TURNS * TURN, len(WIDTHS)):
        s_t = _finished(_scores(q, k_smem[t], WIDTHS[t], WARPS, 1), 0, WARPS)
        largest = gl.maximum(largest, _fold_columns(s_t, WARPS))
    return largest


@gluon.jit
def _second_walk(
    q, k_whole, v_whole, k_smem, v_smem, accumulator, least, slope, begin, constant, CHANNELS: gl.constexpr,
    KEYS: gl.constexpr, TURN: gl.constexpr, WARPS: gl.constexpr, OPERAND: gl.constexpr,
):  # fmt: skip
    """Start the products of a block's probabilities with V, the last still under way, and sum the probabilities up."""
    WIDTHS: gl.constexpr = row_widths(KEYS)
    STARTS: gl.constexpr = row_starts(KEYS)
    TURNS: gl.constexpr = KEYS // (128 * TURN)
    EIGHT: gl.constexpr = score_layout(8, WARPS)
    total = gl.zeros((16 * WARPS, 4), gl.int32, quarter_layout(WARPS))
    for turn in range(TURNS):
        for i in gl.static_range(TURN):
            s = _finished(_scores(q, _tile_at(k_whole, turn * TURN + i), 128, WARPS, 1), 0, WARPS)
            s = raised_if_needed((s,), least, EIGHT, 1)[0]
            p = _stored(s, slope, begin, constant, OPERAND, WARPS, 1)
            v = _first_rows(_tile_at(v_whole, turn * TURN + i), value_widths(CHANNELS))
            accumulator = _add_values(accumulator, p, v, WARPS, 1)
            total += quarter_sums(p, 0, 128, KEYS, WARPS)
    for t in gl.static_range(TURNS * TURN, len(WIDTHS)):
        s_t = _finished(_scores(q, k_smem[t], WIDTHS[t], WARPS, 1), 0, WARPS)
        s_t = raised_if_needed((s_t,), least, EIGHT, 1)[0]
        p_t = _stored(s_t, slope, begin, constant, OPERAND, WARPS, 1)
        accumulator = _add_values(accumulator, p_t, v_smem[t], WARPS, 1)
        total += quarter_sums(p_t, STARTS[t], WIDTHS[t], KEYS, WARPS)
    return accumulator, gl.sum(total, 1)


@gluon.jit
def _no_outputs(D: gl.constexpr, WARPS: gl.constexpr, ACROSS: gl.constexpr):
    """A span of zeros for products with V to add to."""
    return warpgroup_mma_init(gl.zeros((16 * WARPS, D), gl.int32, product_layout(D, WARPS, ACROSS)))


@gluon.jit
def _block(
    q, scores, query_bits, row, keys_usable, units, memory, output, o_stride_n: gl.constexpr, first, queries,
    CHANNELS: gl.constexpr, KEYS: gl.constexpr, WARPS: gl.constexpr, ACROSS: gl.constexpr, FOLD: gl.constexpr,
    TURN: gl.constexpr, OFFSET: gl.constexpr, MOST: gl.constexpr, MOST_BITS: gl.constexpr,
):  # fmt: skip
    """Attention of a block of queries.

    Args:
        scores: their products with the keys, under way; none where rows are walked over twice.
        row: what :func:`.by_hand.row_factors` returns, if queries have one scale; else it is formed here from ``units``.
        memory: keys and values, in the order of tiles and the whole tiles in one piece, each span by span, and where warps
            that share a row leave probabilities, maxima and sums.
        output: 127 times the sums of channels and what outputs are multiplied with and shifted by, span by span; where they go.
    """
    k_smem, v_smem, k_whole, v_whole, p_smem, most_smem, total_smem = memory
    sums, factors, o_base = output
    TWICE: gl.constexpr = TURN > 0
    M: gl.constexpr = 16 * WARPS
    SPANS: gl.constexpr = len(q)
    WIDTHS: gl.constexpr = row_widths(KEYS, ACROSS)
    STARTS: gl.constexpr = row_starts(KEYS)
    TILES: gl.constexpr = len(WIDTHS)
    PV: gl.constexpr = product_layout(v_smem[0][0].shape[0], WARPS, ACROSS)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, PV, 4)
    RL: gl.constexpr = gl.SliceLayout(1, eight_layout(WARPS, ACROSS))
    accumulator = ()
    for c in gl.static_range(SPANS):
        accumulator = accumulator + (_no_outputs(v_smem[0][c].shape[0], WARPS, ACROSS),)
    BEHIND: gl.constexpr = TILES if FOLD else 0
    if FOLD:
        for t in gl.static_range(TILES):
            # -127 times the sums of V's channels, in every row
            number = gl.full((M, v_smem[t][0].shape[1]), -127, gl.int8, OPERAND)
            accumulator = _add_values(accumulator, number, v_smem[t], WARPS, ACROSS)
    usable = keys_usable & usable_scale(query_bits)
    if query_bits.type.is_block():
        row = row_factors(query_bits, units, "none", MOST, MOST_BITS)
    multiplier, fraction_bits, _ = row
    ready = ()
    if TWICE:
        largest = _first_walk(q, k_whole, k_smem, KEYS, TURN, WARPS)
    else:
        ready = (_finished(scores[0], SPANS * (TILES - 1 + BEHIND), WARPS, ACROSS),)
        largest = _fold_columns(ready[0], WARPS, ACROSS)
        for t in gl.static_range(1, TILES):
            ready = ready + (_finished(scores[t], SPANS * (TILES - 1 - t + BEHIND), WARPS, ACROSS),)
            largest = gl.maximum(largest, _fold_columns(ready[t], WARPS, ACROSS))
    if ACROSS == 1:
        row_max = gl.max(largest, 1)
    else:
        most_smem.store(gl.max(gl.reshape(largest, (M, ACROSS, 8)), 2))
        row_max = gl.convert_layout(gl.max(most_smem.load(part_layout(WARPS, ACROSS)), 1), RL, assert_trivial=True)
    slope, begin, constant = row_exponents(row_max, multiplier, fraction_bits, OFFSET)
    least = least_if_needed(row_max, CHANNELS << 14, multiplier, fraction_bits)
    EIGHT: gl.constexpr = score_layout(8 * ACROSS, WARPS, ACROSS)
    if TWICE:
        accumulator, total = _second_walk(
            q,
            k_whole,
            v_whole,
            k_smem,
            v_smem,
            accumulator,
            least,
            slope,
            begin,
            constant,
            CHANNELS,
            KEYS,
            TURN,
            WARPS,
            OPERAND,
        )
    elif not FOLD:
        ready = raised_if_needed(ready, least, EIGHT, ACROSS)
    for t in gl.static_range(len(ready)):
        s = ready[t]
        if FOLD:
            # with a processor to itself a program starts on the first tile rather than saves a branch
            s = raised_if_needed((s,), least, EIGHT, ACROSS)[0]
        p = _stored(s, slope, begin, constant, OPERAND, WARPS, ACROSS)
        if ACROSS == 1:
            accumulator = _add_values(accumulator, p, v_smem[t], WARPS, ACROSS)
        else:
            p_smem[t].store(p)
        if t == 0:
            parts = _part_sums(p, STARTS[t], WIDTHS[t], KEYS, ACROSS)
        else:
            more = _part_sums(p, STARTS[t], WIDTHS[t], KEYS, ACROSS)
            parts += gl.convert_layout(more, parts.type.layout, assert_trivial=True)
    if ACROSS == 1 and not TWICE:
        total = gl.sum(parts, 1)
    elif not TWICE:
        total_smem.store(gl.sum(gl.reshape(parts, (M, ACROSS, 32 // ACROSS)), 2))
        fence_async_shared()
        barrier()
        for t in gl.static_range(TILES):
            accumulator = _add_values(accumulator, p_smem[t], v_smem[t], WARPS, ACROSS)
        total = gl.sum(total_smem.load(part_layout(WARPS, ACROSS)), 1)
    total = gl.convert_layout(total, RL, assert_trivial=True)
    numerators = ()
    for c in gl.static_range(SPANS):
        numerator = 0 - warpgroup_mma_wait(SPANS - 1 - c, [accumulator[c]])
        if TWICE:
            numerator += sums[c].load(gl.SliceLayout(0, numerator.type.layout))[None, :]
        elif not FOLD:
            numerator += sums[c][None, :]
        numerators = numerators + (numerator,)
    bits, inverse = row_inverses(total, KEYS, WARPS, ACROSS)
    SPAN: gl.constexpr = channel_spans(CHANNELS)
    FROM: gl.constexpr = span_starts(CHANNELS)
    for c in gl.static_range(SPANS):
        _store_span(
            numerators[c],
            bits,
            inverse,
            usable,
            factors[c],
            o_base + FROM[c],
            o_stride_n,
            first,
            queries,
            SPAN[c],
            WARPS,
            ACROSS,
        )


@gluon.jit
def hopper_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, qs_ptr, ks_ptr, vs_ptr, os_ptr,
    q_stride_z: gl.constexpr, q_stride_h: gl.constexpr, q_stride_n: gl.constexpr,
    k_stride_z: gl.constexpr, k_stride_h: gl.constexpr, k_stride_n: gl.constexpr,
    v_stride_z: gl.constexpr, v_stride_h: gl.constexpr, v_stride_n: gl.constexpr,
    o_stride_z: gl.constexpr, o_stride_h: gl.constexpr, o_stride_n: gl.constexpr,
    qs_stride_z: gl.constexpr, qs_stride_h: gl.constexpr, qs_stride_n: gl.constexpr,
    ks_stride_z: gl.constexpr, ks_stride_h: gl.constexpr,
    vs_stride_z: gl.constexpr, vs_stride_h: gl.constexpr, vs_stride_d: gl.constexpr,
    os_stride_z: gl.constexpr, os_stride_h: gl.constexpr, os_stride_d: gl.constexpr,
    queries, constant_mantissa, constant_exponent,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, KEYS: gl.constexpr, BLOCK_M: gl.constexpr,
    OFFSET: gl.constexpr, MOST: gl.constexpr, MOST_BITS: gl.constexpr, QUANTIZE: gl.constexpr, CENTER: gl.constexpr,
    QUERY_TOKEN: gl.constexpr, VALUE_CHANNEL: gl.constexpr, OUTPUT_CHANNEL: gl.constexpr, WALK: gl.constexpr,
    TAIL: gl.constexpr, ACROSS: gl.constexpr, FOLD: gl.constexpr, TURN: gl.constexpr,
):  # fmt: skip
    """Attention of one head; see :func:`.attention.launch_attention` and :func:`.attention.launch_fused`.

    With QUANTIZE query, key and value are float, their scales are found here and the output is float. With WALK a
    program takes more than one block of queries; with TAIL up to so many past whole blocks, 8 or 16, are a
    matter of their own. A warp has 16 of the BLOCK_M queries, by itself or with ACROSS - 1 others that share the keys of
    its scores and the channels of its outputs. With FOLD the sums of V's channels are part of a block's products. Rows that are
    walked over twice are so TURN tiles of 128 keys a turn; where they are held whole it is 0.
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
    DTYPE: gl.constexpr = q_ptr.dtype.element_ty
    SPANS: gl.constexpr = channel_spans(HEAD_DIM)
    FROM: gl.constexpr = span_starts(HEAD_DIM)
    D: gl.constexpr = span_widths(HEAD_DIM)
    DV: gl.constexpr = value_widths(HEAD_DIM)
    COUNT: gl.constexpr = len(SPANS)
    WARPS: gl.constexpr = BLOCK_M // 16
    ALL: gl.constexpr = WARPS * ACROSS
    WIDTHS: gl.constexpr = row_widths(KEYS, ACROSS)
    STARTS: gl.constexpr = row_starts(KEYS)
    TILES: gl.constexpr = len(WIDTHS)
    TWICE: gl.constexpr = TURN > 0

    # queries are on their way while keys and values, or the block before, are worked on
    following = _load_queries(q_base, q_stride_n, block * BLOCK_M, queries, HEAD_DIM, WARPS, ACROSS)
    if TAIL and QUANTIZE:
        last = _load_last(q_base, q_stride_n, blocks * BLOCK_M, queries, TAIL, HEAD_DIM, WARPS)
    # the last queries take keys and values as rows of products, of which there are at least 64
    LEAST: gl.constexpr = 64 if TAIL else 32
    VALUE_LEAST: gl.constexpr = 64 if TAIL else 16
    k_smem = ()
    v_tall = ()
    p_smem = ()
    k_whole = ()
    v_whole = ()
    if TWICE:
        # in one piece, for loops
        for c in gl.static_range(COUNT):
            k_whole = k_whole + (_allocate_tiles(KEYS // 128, 128, D[c]),)
            v_whole = v_whole + (_allocate_tiles(KEYS // 128, max(DV[c], VALUE_LEAST), 128),)
        for i in gl.static_range(KEYS // 128):
            k_smem, v_tall = k_smem + (_tile_at(k_whole, i),), v_tall + (_tile_at(v_whole, i),)
    for i in gl.static_range(len(k_smem), TILES):
        keys = ()
        values = ()
        for c in gl.static_range(COUNT):
            keys = keys + (_allocate(max(WIDTHS[i], LEAST), D[c]),)
            values = values + (_allocate(max(DV[c], VALUE_LEAST), depth(WIDTHS[i])),)
        k_smem, v_tall = k_smem + (keys,), v_tall + (values,)
        if ACROSS > 1:
            p_smem = p_smem + (_allocate(BLOCK_M, WIDTHS[i]),)
    v_smem = ()
    for i in gl.static_range(TILES):
        v_smem = v_smem + (_first_rows(v_tall[i], DV),)

    most_smem = 0
    total_smem = 0
    if ACROSS > 1:
        EXCHANGE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        most_smem = gl.allocate_shared_memory(gl.int32, [BLOCK_M, ACROSS], EXCHANGE)
        total_smem = gl.allocate_shared_memory(gl.int32, [BLOCK_M, ACROSS], EXCHANGE)

    head_bits = 0
    factors = ()
    TOGETHER: gl.constexpr = not TWICE and COUNT == 1
    EARLY: gl.constexpr = QUANTIZE and QUERY_TOKEN and not WALK and TOGETHER
    if QUANTIZE:
        # every load is under way before the first use, as far as registers go
        k = _all_quads(k_base, k_stride_n, WIDTHS, KEYS, HEAD_DIM, True, ALL)
        v = ()
        if TOGETHER:
            v = _all_quads(v_base, v_stride_n, WIDTHS, KEYS, HEAD_DIM, False, ALL)
        if EARLY:
            # queries came first, and nobody has anything else to do until keys and values are there
            q, query_bits = _queries(
                following, DTYPE, qs_base, qs_stride_n, 0, block * BLOCK_M, queries, QUANTIZE, QUERY_TOKEN, WARPS, ACROSS
            )
        key_bits = _quantize_keys(k, k_smem, CENTER, ALL)
        if not TOGETHER:
            # of keys and values registers hold one
            v = _all_quads(v_base, v_stride_n, WIDTHS, KEYS, HEAD_DIM, False, ALL)
        if not QUERY_TOKEN:
            # one scale for the head's queries: a walk of its own
            words = _load_queries(q_base, q_stride_n, 0, queries, HEAD_DIM, WARPS, ACROSS)
            largest = _row_amplitude(_unpack_queries(words, DTYPE, WARPS, ACROSS), WARPS, ACROSS)
            for start in range(BLOCK_M, queries, BLOCK_M):
                words = _load_queries(q_base, q_stride_n, start, queries, HEAD_DIM, WARPS, ACROSS)
                more = _row_amplitude(_unpack_queries(words, DTYPE, WARPS, ACROSS), WARPS, ACROSS)
                largest = nan_max(largest, more)
            head_bits = amplitude_to_scale(gl.reduce(largest, 0, nan_max)).to(gl.int32, bitcast=True)
    else:
        for i in gl.static_range(TILES):
            for c in gl.static_range(COUNT):
                rows = k_smem[i][c].slice(0, depth(WIDTHS[i]), 0)
                _copy_keys(k_base + FROM[c], k_stride_n, rows, STARTS[i], WIDTHS[i], KEYS, SPANS[c], ALL)
        async_copy.commit_group()
        v = ()
        for i in gl.static_range(TILES):
            # a tile at a time: a thread loads up to sixteen channels at once, and a warp stores a word to each bank of memory
            values = ()
            for c in gl.static_range(COUNT):
                x = _load_quads(
                    v_base + FROM[c], v_stride_n, STARTS[i], WIDTHS[i], KEYS, SPANS[c], False, ALL, depth(WIDTHS[i])
                )
                values = values + (x,)
            v = v + (values,)
        key_bits = gl.load(ks_ptr.to(gl.pointer_type(gl.int32)) + z * ks_stride_z + kv_head * ks_stride_h)
        if not QUERY_TOKEN:
            head_bits = gl.load(qs_base)
        for c in gl.static_range(COUNT):
            factor = output_factors(
                o_ptr, vs_base + FROM[c] * vs_stride_d, vs_stride_d, os_base + FROM[c] * os_stride_d, os_stride_d, SPANS[c],
                DV[c], VALUE_CHANNEL, OUTPUT_CHANNEL, ALL, gl.SliceLayout(0, output_layout(DV[c], WARPS, ACROSS)),
            )  # fmt: skip
            factors = factors + (factor,)
        for i in gl.static_range(TILES):
            for c in gl.static_range(COUNT):
                v_smem[i][c].permute((1, 0)).store(_deal(v[i][c], ACROSS))
        async_copy.wait_group(0)
    keys_usable = usable_scale(key_bits)
    key_mantissa, key_exponent = split_scale(key_bits)
    units = key_mantissa, key_exponent, constant_mantissa, constant_exponent
    row = 0, 0, 0
    if not QUERY_TOKEN:
        row = row_factors(head_bits, units, "none", MOST, MOST_BITS)
    if TAIL:
        last_smem = ()
        for c in gl.static_range(COUNT):
            last_smem = last_smem + (_allocate(TAIL, D[c]),)
        if not QUANTIZE:
            last = _load_last(q_base, q_stride_n, blocks * BLOCK_M, queries, TAIL, HEAD_DIM, WARPS)
        last_bits = _last_queries(
            last, last_smem, qs_base, qs_stride_n, head_bits, blocks * BLOCK_M, queries, QUANTIZE, QUERY_TOKEN, WARPS
        )
    if EARLY:
        # scores are on their way while the values are quantised
        fence_async_shared()
        barrier()
        scores = _all_scores(q, k_smem, WIDTHS, WARPS, ACROSS)
    if QUANTIZE:
        value_scales = _quantize_values(v, v_smem, VALUE_CHANNEL, ALL, ACROSS)
        # in outputs' order they are read later, once everybody has to wait anyway
        scale_smem = ()
        for c in gl.static_range(COUNT):
            scale_smem = scale_smem + (_aside(value_scales[c]),)
    fence_async_shared()
    barrier()
    if QUANTIZE:
        for c in gl.static_range(COUNT):
            factor = scale_smem[c].load(gl.SliceLayout(0, output_layout(DV[c], WARPS, ACROSS)))
            factors = factors + ((factor, 0, 0),)
    sums = ()
    if TWICE:
        sums = _sums_aside(v_smem, ALL)
    elif not FOLD:
        sums = _channel_sums(v_smem, WARPS, ACROSS)

    memory = k_smem, v_smem, k_whole, v_whole, p_smem, most_smem, total_smem
    output = sums, factors, o_base
    if EARLY:
        _block(
            q, scores, query_bits, row, keys_usable, units, memory, output, o_stride_n, block * BLOCK_M, queries, HEAD_DIM,
            KEYS, WARPS, ACROSS, FOLD, TURN, OFFSET, MOST, MOST_BITS,
        )  # fmt: skip
        for i in gl.static_range(TILES):
            # Triton sees the last use of the keys where products start that still read them
            for c in gl.static_range(COUNT):
                k_smem[i][c]._keep_alive()
    else:
        while block < blocks:
            first = block * BLOCK_M
            words = following
            block += gl.num_programs(0)
            if WALK:
                following = _load_queries(q_base, q_stride_n, block * BLOCK_M, queries, HEAD_DIM, WARPS, ACROSS)
            q, query_bits = _queries(
                words, DTYPE, qs_base, qs_stride_n, head_bits, first, queries, QUANTIZE, QUERY_TOKEN, WARPS, ACROSS
            )
            scores = ()
            if not TWICE:
                scores = _all_scores(q, k_smem, WIDTHS, WARPS, ACROSS)
            _block(
                q, scores, query_bits, row, keys_usable, units, memory, output, o_stride_n, first, queries, HEAD_DIM, KEYS,
                WARPS, ACROSS, FOLD, TURN, OFFSET, MOST, MOST_BITS,
            )  # fmt: skip

    if TAIL:
        if gl.program_id(0) + 1 == gl.num_programs(0):
            _last_rows(
                last_smem, last_bits, row, keys_usable, units, k_smem, v_tall, output, TWICE, o_stride_n, blocks * BLOCK_M,
                queries, HEAD_DIM, KEYS, WARPS, OFFSET, MOST, MOST_BITS,
            )  # fmt: skip
