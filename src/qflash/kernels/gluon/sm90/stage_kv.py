"""A head's keys and values to shared memory for :mod:`.sm90.attention_resident`, quantised on the way if they are float.

Equations 1 and 2 (step 1 of ``docs/algorithm.md``) for K and V of one head, and the sums of V's channels that correct the
storage offset of P (step 5). All warps of the program share the work. In order:

1. int8: :func:`copy_keys` (``cp.async``) and :func:`load_quads` for V. Floats: :func:`all_quads` loads all tiles into
   registers;
2. floats: :func:`quantize_keys` and :func:`quantize_values`: ranges within each thread, then within each warp by
   shuffles, then through shared memory between warps, once; every thread computes the scales it needs; int8 values go
   to shared memory;
3. :func:`stored_sums`: sums of V's channels.

A thread has four neighbouring keys ("quads") of a few channels (:func:`.sm90.layouts.quad_layout`). So the transposed
store of V writes words of four keys. In shared memory, per tile and span, swizzled for wgmma:

    K   (keys, channels)     rows in key order for tiles of 32 keys and more
    V   (channels, keys)     channels in fragment order; keys in inverse key order for tiles of 8 and 16

Either permutation makes the scores of a lane the bytes that it has to supply to the product with V
(:func:`.common.tile_ops.key_order` and its inverse). Narrow tiles permute V, since key order needs sixteen columns and a
tile may have eight. With channels in fragment order (:func:`.sm90.query_block.to_fragment_order`) a lane's outputs are
neighbours.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...common.fixed_point import twice_mean
from ...common.quantize_ops import (
    amplitude_to_scale,
    centered_scale,
    higher,
    inverse_scale,
    lower,
    nan_max,
    value_scale,
)
from ...common.tile_ops import inverse_key_order, key_order
from ..ptx_ops import (
    as_float32,
    beside_channels,
    first_of_four,
    halves,
    int8_values,
    keep_apart,
    largest_in_warp,
    numbers_of,
    round_to_int8,
    to_shared,
    word_maxima,
    word_ranges,
    words_of,
    zero_point,
)
from ..releases import barrier, copy_to_shared
from .layouts import (
    all_words_layout,
    channel_spans,
    depth,
    float_piece,
    inverse_count,
    kernel_width,
    key_warps,
    part_words_layout,
    product_layout,
    quad_layout,
    range_layout,
    row_layout,
    row_starts,
    span_starts,
    span_widths,
    sum_layout,
    value_width,
    value_widths,
)
from .query_block import SUM_FOUR, load_channels, pairs_twice, to_fragment_order


@gluon.jit
def _join_rows(a, b):
    """The rows of ``a``, then those of ``b``; no data moves."""
    x = gl.permute(gl.join(a, b), (2, 0, 1))
    return gl.reshape(x, (2 * a.shape[0], a.shape[1]))


@gluon.jit
def load_quads(
    base, stride_n: gl.constexpr, START: gl.constexpr, WIDTH: gl.constexpr, KEYS: gl.constexpr, CHANNELS: gl.constexpr,
    KEY: gl.constexpr, WARPS: gl.constexpr, PIECE: gl.constexpr, POLICY: gl.constexpr, REPEAT: gl.constexpr, place=0,
    PLACES: gl.constexpr = False,
):  # fmt: skip
    """A tile of keys or values as stored, (keys, channels), in quads; past the last it is repeated (REPEAT), or zero.

    The tile has WIDTH keys, but at least 32 rows; channels from CHANNELS up to the kernel's width are zero. PIECE keys
    are loaded at a time (:func:`.sm90.layouts.quad_layout`). Of wide tiles the keys are in
    :func:`.common.tile_ops.key_order`, of tiles of 8 or 16 the values in :func:`.common.tile_ops.inverse_key_order`.
    With PLACES they are taken from where ``place`` says.
    """
    D: gl.constexpr = kernel_width(CHANNELS) if KEY else value_width(CHANNELS)
    if WIDTH > PIECE:
        # pieces whose addresses differ by a constant
        HALF: gl.constexpr = WIDTH // 2
        a = load_quads(base, stride_n, START, HALF, KEYS, CHANNELS, KEY, WARPS, PIECE, POLICY, REPEAT, place, PLACES)
        b = load_quads(base, stride_n, START + HALF, HALF, KEYS, CHANNELS, KEY, WARPS, PIECE, POLICY, REPEAT, place, PLACES)
        x = gl.convert_layout(_join_rows(a, b), quad_layout(WIDTH, D, WARPS, PIECE), assert_trivial=True)
    else:
        ROWS: gl.constexpr = depth(WIDTH)
        L: gl.constexpr = quad_layout(ROWS, D, WARPS, PIECE)
        n = gl.arange(0, ROWS, layout=gl.SliceLayout(1, L))
        d = gl.arange(0, D, layout=gl.SliceLayout(0, L))
        if KEY and WIDTH >= 32:
            n = key_order(n)
        elif not KEY and WIDTH < 32:
            n = inverse_key_order(n)
        if PLACES:
            rows = gl.load(place + gl.minimum(START + n, KEYS - 1))
            ptrs = base + (rows[:, None] * stride_n + d[None, :])
            if REPEAT or START + ROWS <= KEYS:
                x = load_channels(ptrs, n, d, CHANNELS, D, POLICY)
            else:
                inside = (START + n[:, None] < KEYS) & (d[None, :] < CHANNELS)
                x = gl.load(ptrs, mask=inside, other=0.0, eviction_policy=POLICY)
        elif START + ROWS <= KEYS:
            x = load_channels(base + (n[:, None] * stride_n + d[None, :]) + START * stride_n, n, d, CHANNELS, D, POLICY)
        elif REPEAT:
            ptrs = base + (gl.minimum(START + n, KEYS - 1)[:, None] * stride_n + d[None, :])
            x = load_channels(ptrs, n, d, CHANNELS, D, POLICY)
        else:
            inside = (START + n[:, None] < KEYS) & (d[None, :] < CHANNELS)
            ptrs = base + (n[:, None] * stride_n + d[None, :]) + START * stride_n
            x = gl.load(ptrs, mask=inside, other=0.0, eviction_policy=POLICY)
    return x


@gluon.jit
def all_quads(
    base, stride_n: gl.constexpr, WIDTHS: gl.constexpr, KEYS: gl.constexpr, CHANNELS: gl.constexpr, KEY: gl.constexpr,
    WARPS: gl.constexpr, POLICY: gl.constexpr, REPEAT: gl.constexpr, place, PLACES: gl.constexpr,
):  # fmt: skip
    """All tiles of keys or values of a head, span by span, in registers, to be quantised; the rest as in :func:`load_quads`."""
    START: gl.constexpr = row_starts(KEYS)
    SPANS: gl.constexpr = channel_spans(CHANNELS)
    FROM: gl.constexpr = span_starts(CHANNELS)
    D: gl.constexpr = span_widths(CHANNELS) if KEY else value_widths(CHANNELS)
    spans = ()
    for c in gl.static_range(len(SPANS)):
        tiles = ()
        for i in gl.static_range(len(WIDTHS)):
            x = load_quads(
                base + FROM[c], stride_n, START[i], WIDTHS[i], KEYS, SPANS[c], KEY, WARPS, float_piece(D[c], WARPS), POLICY,
                REPEAT, place, PLACES,
            )  # fmt: skip
            tiles = tiles + (x,)
        spans = spans + (tiles,)
    return spans


@gluon.jit
def _own_halves(x, WARPS: gl.constexpr):
    """Two halves of the rows such that a thread has the same part of each: by pieces, or within one piece."""
    if x.shape[0] > float_piece(x.shape[1], WARPS):
        a, b = halves(x)
    else:
        a, b = gl.split(gl.permute(gl.reshape(x, (x.shape[0] // 2, 2, x.shape[1])), (0, 2, 1)))
    return a, b


@gluon.jit
def own_extremes(x, EXTREME: gl.constexpr, WARPS: gl.constexpr):
    """Minima (EXTREME is :func:`lower`) or maxima over the rows of each thread: 32 rows in all; 16-bit floats by twos."""
    if x.shape[0] > 32:
        a, b = _own_halves(x, WARPS)
        x = own_extremes(EXTREME(a, b, False), EXTREME, WARPS)
    return gl.convert_layout(x, range_layout(x.shape[1], WARPS), assert_trivial=True)


@gluon.jit
def beside_tile(x, tile):
    """One number per channel broadcast to a tile of keys or values; a scalar as it is."""
    L: gl.constexpr = tile.type.layout
    return beside_channels(x, L)


@gluon.jit
def _by_warps(x, WARPS: gl.constexpr):
    """What :func:`_own_extremes` returned, as words, (warps with different keys, rows of each, words of channels)."""
    PARTS: gl.constexpr = key_warps(x.shape[1], WARPS)
    x = words_of(x)
    return gl.reshape(x, (PARTS, 32 // PARTS, x.shape[1]))


@gluon.jit
def _own_words(smem, tile, WARPS: gl.constexpr):
    """The words, per warp, of the channels that a thread has of ``tile``, from shared memory."""
    return smem.load(part_words_layout(smem.shape[1], tile.shape[1], WARPS))


@gluon.jit
def _all_words(smem, WARPS: gl.constexpr):
    """The words, per warp, of all channels, from shared memory into every warp."""
    return smem.load(all_words_layout(smem.shape[1], smem.shape[0], WARPS))


@gluon.jit
def _own_numbers(words, tile, WARPS: gl.constexpr):
    """The numbers of a thread's own channels, float32, from their words."""
    L: gl.constexpr = gl.SliceLayout(0, range_layout(tile.shape[1], WARPS))
    return gl.convert_layout(numbers_of(words, tile.dtype), L, assert_trivial=True)


@gluon.jit
def _all_extremes(tiles, WARPS: gl.constexpr):
    """(minima, maxima) of a span of all tiles over the rows of each thread."""
    low, high = own_extremes(tiles[0], lower, WARPS), own_extremes(tiles[0], higher, WARPS)
    for i in gl.static_range(1, len(tiles)):
        low = lower(low, own_extremes(tiles[i], lower, WARPS), False)
        high = higher(high, own_extremes(tiles[i], higher, WARPS), False)
    return low, high


@gluon.jit
def key_amplitude(low, high, mantissa, CENTER: gl.constexpr, WARPS: gl.constexpr):
    """(bits of a span's largest magnitude over all keys, midranges of a thread's channels); centred first if CENTER.

    ``low`` and ``high`` are the extremes over the rows of each thread (:func:`own_extremes`). Warps exchange ranges through
    shared memory once. After that every thread combines what it needs by itself, which takes more instructions but no
    second exchange.
    """
    DTYPE: gl.constexpr = low.dtype
    tile = low
    low, high = word_ranges(_by_warps(low, WARPS), _by_warps(high, WARPS), 1, DTYPE)
    lows, highs = to_shared(low), to_shared(high)
    keep_apart(mantissa, 0)
    low, high = word_ranges(_all_words(lows, WARPS), _all_words(highs, WARPS), 0, DTYPE)
    low, high = numbers_of(low, DTYPE), numbers_of(high, DTYPE)
    if CENTER:
        middle = low * 0.5 + high * 0.5
        low, high = low - middle, high - middle
    amplitude = largest_in_warp(nan_max(gl.abs(low), gl.abs(high)))
    middle = 0.0
    if CENTER:
        low, high = word_ranges(_own_words(lows, tile, WARPS), _own_words(highs, tile, WARPS), 0, DTYPE)
        middle = _own_numbers(low, tile, WARPS) * 0.5 + _own_numbers(high, tile, WARPS) * 0.5
    return amplitude, middle


@gluon.jit
def quantize_keys(k, k_smem, mantissa, CENTER: gl.constexpr, WARPS: gl.constexpr):
    """Quantise the spans of all tiles of keys into shared memory; return the float32 bits of the head's scale.

    ``mantissa`` is any number below 2**30, for :func:`.gluon.ptx_ops.keep_apart`.
    """
    largest = 0
    middles = ()
    for c in gl.static_range(len(k)):
        low, high = _all_extremes(k[c], WARPS)
        amplitude, middle = key_amplitude(low, high, mantissa, CENTER, WARPS)
        middles = middles + (middle,)
        largest = gl.maximum(largest, amplitude)
    scale = amplitude_to_scale(largest.to(gl.float32, bitcast=True))
    inverse = inverse_scale(scale, False)
    for c in gl.static_range(len(k)):
        for i in gl.static_range(len(k[c])):
            y = as_float32(k[c][i])
            if CENTER:
                y = y - beside_tile(middles[c], y)
            # a tile of 8 or 16 columns has 32 rows here, the last key repeated
            k_smem[i][c].slice(0, k[c][i].shape[0], 0).store(round_to_int8(y, inverse))
    return scale.to(gl.int32, bitcast=True)


@gluon.jit
def _largest_magnitudes(v, WARPS: gl.constexpr):
    """Largest magnitudes of a span of all tiles over the rows of each thread."""
    most = own_extremes(gl.abs(v[0]), higher, WARPS)
    for i in gl.static_range(1, len(v)):
        most = higher(most, own_extremes(gl.abs(v[i]), higher, WARPS), False)
    return most


@gluon.jit
def value_maxima(most, WARPS: gl.constexpr):
    """Largest magnitudes of a span's channels over all values, as words per warp, in shared memory."""
    return to_shared(word_maxima(_by_warps(most, WARPS), 1, most.dtype))


@gluon.jit
def value_ranges(low, high, WARPS: gl.constexpr):
    """(minima, maxima) of a span's channels over all values, as words per warp, in shared memory."""
    DTYPE: gl.constexpr = low.dtype
    low, high = word_ranges(_by_warps(low, WARPS), _by_warps(high, WARPS), 1, DTYPE)
    return to_shared(low), to_shared(high)


@gluon.jit
def value_scales(left, tile, CENTER: gl.constexpr, VALUE_CHANNEL: gl.constexpr, WARPS: gl.constexpr):
    """(midranges, least scales or largest magnitudes) of a thread's own channels; and the largest of those of all, as bits.

    ``left`` is from :func:`value_ranges` with CENTER, else from :func:`value_maxima`. The midranges are 0 without CENTER,
    the bits with VALUE_CHANNEL.
    """
    DTYPE: gl.constexpr = tile.dtype
    middle = 0.0
    largest = 0
    if CENTER:
        low, high = word_ranges(_own_words(left[0], tile, WARPS), _own_words(left[1], tile, WARPS), 0, DTYPE)
        middle, most = centered_scale(_own_numbers(low, tile, WARPS), _own_numbers(high, tile, WARPS))
        if not VALUE_CHANNEL:
            low, high = word_ranges(_all_words(left[0], WARPS), _all_words(left[1], WARPS), 0, DTYPE)
            _, every = centered_scale(numbers_of(low, DTYPE), numbers_of(high, DTYPE))
            largest = largest_in_warp(every)
    else:
        most = _own_numbers(word_maxima(_own_words(left[0], tile, WARPS), 0, DTYPE), tile, WARPS)
        if not VALUE_CHANNEL:
            largest = largest_in_warp(numbers_of(word_maxima(_all_words(left[0], WARPS), 0, DTYPE), DTYPE))
    return middle, most, largest


@gluon.jit
def quantize_values(
    v, v_smem, mantissa, KEYS: gl.constexpr, WIDTHS: gl.constexpr, CENTER: gl.constexpr, VALUE_CHANNEL: gl.constexpr,
    WARPS: gl.constexpr, ACROSS: gl.constexpr,
):  # fmt: skip
    """Quantise all tiles of values into shared memory, transposed; with CENTER less a zero point per channel.

    ``mantissa`` is any number below 2**30, for :func:`.gluon.ptx_ops.keep_apart`.

    Returns:
        the scales, and with CENTER the offsets, else the scales again, per span, in shared memory.
    """
    STARTS: gl.constexpr = row_starts(KEYS)
    lefts = ()
    middles = ()
    maxima = ()
    largest = 0
    for c in gl.static_range(len(v)):
        if CENTER:
            low, high = _all_extremes(v[c], WARPS)
            left = value_ranges(low, high, WARPS)
        else:
            left = (value_maxima(_largest_magnitudes(v[c], WARPS), WARPS),)
        lefts = lefts + (left,)
        middle, most, more = value_scales(left, v[c][0], CENTER, VALUE_CHANNEL, WARPS)
        middles = middles + (middle,)
        maxima = maxima + (most,)
        largest = gl.maximum(largest, more)
    scales = ()
    offsets = ()
    keep_apart(mantissa, 1)
    for c in gl.static_range(len(v)):
        most = maxima[c]
        if not VALUE_CHANNEL:
            most = most * 0.0 + largest.to(gl.float32, bitcast=True)
        scale = value_scale(most, CENTER)
        inverse = inverse_scale(scale, False)
        zero = inverse
        if CENTER:
            zero = zero_point(middles[c], inverse)
        for i in gl.static_range(len(v[c])):
            y = as_float32(v[c][i])
            x = int8_values(y, beside_tile(inverse, y), beside_tile(zero, y), CENTER)
            if CENTER:
                x = _without_padding(x, STARTS[i], WIDTHS[i], KEYS)
            v_smem[i][c].permute((1, 0)).store(to_fragment_order(x, ACROSS))
        scales = scales + (to_shared(scale),)
        if CENTER:
            offsets = offsets + (to_shared(zero * scale),)
    for c in gl.static_range(len(v)):
        # keeps the allocator from reusing this memory, which would add a barrier
        for part in gl.static_range(len(lefts[c])):
            lefts[c][part]._keep_alive()
    if not CENTER:
        offsets = scales
    return scales, offsets


@gluon.jit
def _without_padding(x, START: gl.constexpr, WIDTH: gl.constexpr, KEYS: gl.constexpr):
    """A tile of int8 values of WIDTH keys, in the order of :func:`load_quads`, with zeros past the last key."""
    N: gl.constexpr = x.shape[0]
    if START + N > KEYS:
        n = gl.arange(0, N, layout=gl.SliceLayout(1, x.type.layout))
        if WIDTH < 32:
            n = inverse_key_order(n)
        x = gl.where((START + n < KEYS)[:, None], x, 0)
    return x


@gluon.jit
def copy_keys(
    base, stride_n: gl.constexpr, smem, START: gl.constexpr, WIDTH: gl.constexpr, KEYS: gl.constexpr, CHANNELS: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Start the copy (``cp.async``) of a tile of int8 keys. Channels past CHANNELS are arbitrary: queries are zero there."""
    D: gl.constexpr = smem.shape[1]
    L: gl.constexpr = row_layout(D, 8, WARPS)
    n = gl.arange(0, smem.shape[0], layout=gl.SliceLayout(1, L))
    if WIDTH >= 32:
        n = key_order(n)
    d = gl.arange(0, D, layout=gl.SliceLayout(0, L))
    ptrs = base + gl.minimum(START + n, KEYS - 1)[:, None] * stride_n + d[None, :]
    if D == CHANNELS:
        copy_to_shared(smem, ptrs)
    else:
        copy_to_shared(smem, ptrs, mask=(n[:, None] >= 0) & (d[None, :] < CHANNELS))


@gluon.jit
def parts_of_sums(smem, WARPS: gl.constexpr):
    """Sums of the channels of a tile of V, in eight parts: int32 (channels, 8), in the same layout for all tiles."""
    D: gl.constexpr = smem.shape[0]
    v = smem.load(sum_layout(D, WARPS))
    x = first_of_four(gl.inline_asm_elementwise(SUM_FOUR, "=r,=r,=r,=r,r,r", [v, v * 0 + 1], gl.int32, True, 4))
    return gl.sum(gl.reshape(x, (D, smem.shape[1] // 32, 8)), 1)


@gluon.jit
def _sums(v_smem, SPAN: gl.constexpr, WARPS: gl.constexpr):
    """The sums of a span's channels of V, int32 (channels,), in fragment order."""
    parts = parts_of_sums(v_smem[0][SPAN], WARPS)
    for i in gl.static_range(1, len(v_smem)):
        parts += gl.convert_layout(parts_of_sums(v_smem[i][SPAN], WARPS), parts.type.layout, assert_trivial=True)
    return gl.sum(parts, 1)


@gluon.jit
def natural_order(x, ACROSS: gl.constexpr):
    """One number per channel, from fragment order (:func:`.sm90.query_block.to_fragment_order`) to the channels' own."""
    D: gl.constexpr = x.shape[0]
    return gl.reshape(gl.permute(gl.reshape(x, (ACROSS, D // (8 * ACROSS), 8)), (0, 2, 1)), (D,))


@gluon.jit
def stored_sums(
    v_smem, SUMS: gl.constexpr, EXACT: gl.constexpr, KEYS: gl.constexpr, WARPS: gl.constexpr, ACROSS: gl.constexpr
):  # fmt: skip
    """(-127 times the sums of V's channels, twice their means), in shared memory, span by span.

    The first corrects the storage offset of P in outputs: for products that begin there as pairs, otherwise one per channel in
    fragment order, and none where "products" find it. Without EXACT the second is the first.
    """
    spans = ()
    means = ()
    for c in gl.static_range(len(v_smem[0])):
        sums = _sums(v_smem, c, WARPS)
        if EXACT:
            means = means + (to_shared(natural_order(twice_mean(sums, inverse_count(KEYS), False), ACROSS)),)
        if SUMS == "begin":
            spans = spans + (to_shared(pairs_twice(-127 * sums)),)
        elif SUMS == "end":
            spans = spans + (to_shared(-127 * sums),)
    barrier()
    if not EXACT:
        means = spans
    return spans, means


@gluon.jit
def sums_beside(smem, WARPS: gl.constexpr, ACROSS: gl.constexpr):
    """One span of sums, one per channel, broadcast to the accumulator of a product with V, (1, channels)."""
    L: gl.constexpr = product_layout(smem.shape[0], WARPS, ACROSS)
    return smem.load(gl.SliceLayout(0, L))[None, :]
