"""A head's keys and values on their way to shared memory in :mod:`.hopper`, quantised there or brought as they are."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from .by_hand import barrier, beside_channels, channel_maxima, channel_ranges, halves, round_to_int8
from .hopper_blocks import SUM_FOUR, aside, deal, load_channels
from .hopper_layouts import (
    channel_spans,
    depth,
    float_piece,
    kernel_width,
    product_layout,
    quad_layout,
    row_layout,
    row_starts,
    span_starts,
    span_widths,
    value_width,
    value_widths,
)
from .quantize import amplitude_to_scale, higher, inverse_scale, lower, nan_max
from .tile import held_order, key_order

# the names differ between releases of Triton
_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@gluon.jit
def _join_rows(a, b):
    """The rows of ``a``, then those of ``b``."""
    x = gl.permute(gl.join(a, b), (2, 0, 1))
    return gl.reshape(x, (2 * a.shape[0], a.shape[1]))


@gluon.jit
def load_quads(
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
        a = load_quads(base, stride_n, START, WIDTH // 2, KEYS, CHANNELS, KEY, WARPS, PIECE)
        b = load_quads(base, stride_n, START + WIDTH // 2, WIDTH // 2, KEYS, CHANNELS, KEY, WARPS, PIECE)
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
            x = load_channels(base + (n[:, None] * stride_n + d[None, :]) + START * stride_n, n, d, CHANNELS, D)
        elif KEY:
            ptrs = base + (gl.minimum(START + n, KEYS - 1)[:, None] * stride_n + d[None, :])
            x = load_channels(ptrs, n, d, CHANNELS, D)
        else:
            inside = (START + n[:, None] < KEYS) & (d[None, :] < CHANNELS)
            x = gl.load(base + (n[:, None] * stride_n + d[None, :]) + START * stride_n, mask=inside, other=0.0)
    return x


@gluon.jit
def all_quads(
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
            x = load_quads(base + FROM[c], stride_n, START[i], WIDTHS[i], KEYS, SPANS[c], KEY, WARPS, float_piece(D[c], WARPS))
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
def quantize_keys(k, k_smem, CENTER: gl.constexpr, WARPS: gl.constexpr):
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
def quantize_values(v, v_smem, VALUE_CHANNEL: gl.constexpr, WARPS: gl.constexpr, ACROSS: gl.constexpr):
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
            v_smem[i][c].permute((1, 0)).store(deal(round_to_int8(y, _beside(inverse, y)), ACROSS))
    return scales


@gluon.jit
def copy_keys(
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
def _tile_sums(smem, WARPS: gl.constexpr):
    """Sums of the channels of a tile of V in shared memory."""
    v = smem.load(row_layout(smem.shape[1], 8, WARPS))
    return gl.sum(gl.inline_asm_elementwise(SUM_FOUR, "=r,=r,=r,=r,r,r", [v, v * 0 + 1], gl.int32, True, 4), 1)


@gluon.jit
def channel_sums(v_smem, WARPS: gl.constexpr, ACROSS: gl.constexpr):
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
def sums_aside(v_smem, WARPS: gl.constexpr):
    """127 times the sums of V's channels, span by span, left in shared memory for everybody."""
    spans = ()
    for c in gl.static_range(len(v_smem[0])):
        sums = _tile_sums(v_smem[0][c], WARPS)
        for i in gl.static_range(1, len(v_smem)):
            sums += gl.convert_layout(_tile_sums(v_smem[i][c], WARPS), sums.type.layout)
        spans = spans + (aside(127 * sums),)
    barrier()
    return spans
