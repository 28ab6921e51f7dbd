"""A window's keys and values on their way to the products of :mod:`.windows.attention`: loads, quantisation, operands."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...common.quantize_ops import amplitude_to_scale, higher, inverse_scale, lower, nan_max
from ...common.tile_ops import key_order
from ..ptx_ops import aside, barrier, halves, higher_words, keep_apart, lower_words, round_to_int8, word_maxima, word_ranges
from .lane_ops import (
    first_and_second,
    from_lanes,
    in_all_warps,
    in_lanes,
    lane_bit,
    lane_numbers,
    lane_words,
    lanes_layout,
    largest_of_lanes,
    repeated,
    with_partner,
)
from .layouts import (
    all_values_layout,
    operand_layout,
    own_rows_layout,
    part_value_layout,
    rows_layout,
    starts,
    value_layout,
    widths,
)


@gluon.jit
def key_of(n, KEYS: gl.constexpr, DEAL: gl.constexpr):
    """Which key, and which value, column ``n`` of scores is for: with DEAL :func:`.tile_ops.key_order`, in tiles of eight."""
    if DEAL:
        if KEYS % 16 > 0 and KEYS % 16 <= 8:
            n = gl.where(n < KEYS - KEYS % 16, key_order(n), n)
        else:
            n = key_order(n)
    return n


@gluon.jit
def load_rows(base, stride_n: gl.constexpr, first, END: gl.constexpr, ROWS: gl.constexpr):
    """Rows from ``first`` on; past the END the last again."""
    L: gl.constexpr = rows_layout(ROWS, gl.num_warps())
    n = gl.arange(0, ROWS, layout=gl.SliceLayout(1, L))
    d = gl.arange(0, 32, layout=gl.SliceLayout(0, L))
    return gl.load(base + gl.minimum(first + n, END - 1)[:, None] * stride_n + d[None, :])


@gluon.jit
def _load_key(
    base, stride_n: gl.constexpr, START: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, DEAL: gl.constexpr,
    POLICY: gl.constexpr,
):  # fmt: skip
    """The keys of a tile of scores; past the last the last again."""
    L: gl.constexpr = rows_layout(ROWS, gl.num_warps())
    n = gl.arange(0, ROWS, layout=gl.SliceLayout(1, L))
    d = gl.arange(0, 32, layout=gl.SliceLayout(0, L))
    if START + ROWS <= KEYS:
        ptrs = base + (key_of(n, ROWS, DEAL)[:, None] * stride_n + d[None, :]) + START * stride_n
    else:
        ptrs = base + gl.minimum(key_of(START + n, KEYS, DEAL), KEYS - 1)[:, None] * stride_n + d[None, :]
    return gl.load(ptrs, eviction_policy=POLICY)


@gluon.jit
def _load_value(
    base, stride_n: gl.constexpr, START: gl.constexpr, KEYS: gl.constexpr, DEAL: gl.constexpr, POLICY: gl.constexpr
):  # fmt: skip
    """The values of 32 columns of scores from START on, zero past the last key."""
    L: gl.constexpr = value_layout(gl.num_warps())
    n = gl.arange(0, 32, layout=gl.SliceLayout(1, L))
    d = gl.arange(0, 32, layout=gl.SliceLayout(0, L))
    if START + 32 <= KEYS:
        x = gl.load(base + (key_of(n, 32, DEAL)[:, None] * stride_n + d[None, :]) + START * stride_n, eviction_policy=POLICY)
    else:
        n = key_of(START + n, KEYS, DEAL)[:, None]
        inside = (n < KEYS) & (d[None, :] >= 0)
        x = gl.load(base + (n * stride_n + d[None, :]), mask=inside, other=0, eviction_policy=POLICY)
    return x


@gluon.jit
def load_keys(base, stride_n: gl.constexpr, KEYS: gl.constexpr, DEAL: gl.constexpr, POLICY: gl.constexpr):
    """Keys, tile by tile."""
    STARTS: gl.constexpr = starts(KEYS)
    WIDTHS: gl.constexpr = widths(KEYS)
    k = ()
    for i in gl.static_range(len(WIDTHS)):
        k = k + (_load_key(base, stride_n, STARTS[i], WIDTHS[i], KEYS, DEAL, POLICY),)
    return k


@gluon.jit
def load_values(base, stride_n: gl.constexpr, KEYS: gl.constexpr, DEAL: gl.constexpr, POLICY: gl.constexpr):
    """Values, 32 and 32."""
    return _load_value(base, stride_n, 0, KEYS, DEAL, POLICY), _load_value(base, stride_n, 32, KEYS, DEAL, POLICY)


@gluon.jit
def load_key_parts(base, stride_n: gl.constexpr, KEYS: gl.constexpr, DEAL: gl.constexpr):
    """The keys of all tiles, sixteen a warp; past the last the last again."""
    L: gl.constexpr = own_rows_layout(64)
    n = gl.minimum(key_of(gl.arange(0, 64, layout=gl.SliceLayout(1, L)), KEYS, DEAL), KEYS - 1)
    d = gl.arange(0, 32, layout=gl.SliceLayout(0, L))
    return gl.load(base + n[:, None] * stride_n + d[None, :])


@gluon.jit
def load_value_parts(base, stride_n: gl.constexpr, KEYS: gl.constexpr, DEAL: gl.constexpr):
    """The values of 64 columns of scores, sixteen a warp, zero past the last key."""
    L: gl.constexpr = part_value_layout()
    n = key_of(gl.arange(0, 64, layout=gl.SliceLayout(1, L)), KEYS, DEAL)[:, None]
    d = gl.arange(0, 32, layout=gl.SliceLayout(0, L))
    return gl.load(base + (n * stride_n + d[None, :]), mask=(n < KEYS) & (d[None, :] >= 0), other=0)


@gluon.jit
def _key_operand(x):
    """Keys as the right operand, four neighbouring channels of every eight in each half of a product."""
    N: gl.constexpr = x.shape[0]
    x = gl.reshape(gl.permute(gl.reshape(x, (N, 4, 2, 4)), (0, 2, 1, 3)), (N, 32))
    return gl.convert_layout(gl.permute(x, (1, 0)), operand_layout(1, gl.num_warps()), assert_trivial=True)


@gluon.jit
def _value_operand(x):
    """Values as the right operand: keys as threads hold the scores, channel 4 i + j in column 8 j + i."""
    x = gl.permute(gl.reshape(x, (2, 2, 4, 2, 8, 4)), (0, 2, 1, 3, 5, 4))
    return gl.convert_layout(gl.reshape(x, (32, 32)), operand_layout(1, gl.num_warps()), assert_trivial=True)


@gluon.jit
def _key_operands(k):
    keys = ()
    for i in gl.static_range(len(k)):
        keys = keys + (_key_operand(k[i]),)
    return keys


@gluon.jit
def right_operands(k, v):
    """Right operands of int8 keys, tile by tile, and of values."""
    return _key_operands(k), (_value_operand(v[0]), _value_operand(v[1]))


@gluon.jit
def _first_rows(x, ROWS: gl.constexpr):
    """The first ROWS rows, and those behind the first half."""
    a, b = x, x
    if x.shape[0] > ROWS:
        a, b = halves(x)
    first = a
    if a.shape[0] > ROWS:
        first, _ = halves(a)
    return gl.convert_layout(first, rows_layout(ROWS, 4), assert_trivial=True), b


@gluon.jit
def _key_lanes(x, PARTS: gl.constexpr):
    """What lanes have of keys that every warp has, or of which each of PARTS warps has its own: eight channels of each."""
    EIGHTS: gl.constexpr = x.shape[0] // (8 * PARTS)
    x = gl.permute(gl.reshape(x, (PARTS, EIGHTS, 8, 4, 8)), (0, 2, 3, 1, 4))
    return in_lanes(gl.reshape(x, (32 * PARTS, 8 * EIGHTS)))


@gluon.jit
def _key_rows(x, PARTS: gl.constexpr):
    """Undoes :func:`_key_lanes`."""
    EIGHTS: gl.constexpr = x.shape[1] // 8
    x = gl.permute(gl.reshape(x, (PARTS, 8, 4, EIGHTS, 8)), (0, 3, 1, 2, 4))
    return gl.reshape(x, (8 * EIGHTS * PARTS, 32))


@gluon.jit
def _value_lanes(x, PARTS: gl.constexpr):
    """The same of values: two neighbours of every eight, and four channels of each."""
    EIGHTS: gl.constexpr = x.shape[0] // (8 * PARTS)
    x = gl.permute(gl.reshape(x, (PARTS, EIGHTS, 4, 2, 8, 4)), (0, 4, 2, 1, 3, 5))
    return in_lanes(gl.reshape(x, (32 * PARTS, 8 * EIGHTS)))


@gluon.jit
def _value_rows(x):
    """Undoes it for values that every warp has."""
    EIGHTS: gl.constexpr = x.shape[1] // 8
    x = gl.permute(gl.reshape(x, (8, 4, EIGHTS, 2, 4)), (2, 1, 3, 0, 4))
    return gl.convert_layout(gl.reshape(x, (8 * EIGHTS, 32)), value_layout(gl.num_warps()), assert_trivial=True)


@gluon.jit
def _values_aside(v):
    """Left in shared memory for :func:`_aside_operands`: the two registers of a product side by side."""
    v = gl.permute(gl.reshape(v, (2, 2, 32, 4, 4)), (0, 4, 2, 1, 3))
    return aside(gl.reshape(v, (256, 8)))


@gluon.jit
def _aside_operands(smem):
    """Right operands of values that four warps left there."""
    v = gl.permute(gl.reshape(smem.load(all_values_layout()), (2, 4, 8, 4, 2, 4)), (0, 4, 3, 5, 1, 2))
    a, b = halves(gl.reshape(v, (64, 32)))
    L: gl.constexpr = operand_layout(1, 4)
    return gl.convert_layout(a, L, assert_trivial=True), gl.convert_layout(b, L, assert_trivial=True)


@gluon.jit
def shared_operands(k, v):
    """:func:`right_operands` of keys that all of four warps have and values of which each has a part."""
    smem = _values_aside(_value_lanes(v, 4))
    barrier()
    return _key_operands(k), _aside_operands(smem)


@gluon.jit
def _exchanged(k, v, scale, KEYS: gl.constexpr):
    """Parts of keys and values -> all of them, as right operands of every warp; and a scale of values, beside outputs.

    That is one number, or one for each channel.
    """
    WIDTHS: gl.constexpr = widths(KEYS)
    k_smem, v_smem = aside(k), _values_aside(v)
    if scale.type.is_block():
        scale_smem = aside(scale)
    barrier()
    if scale.type.is_block():
        scale = scale_smem.load(gl.SliceLayout(0, own_rows_layout(64)))
    k = k_smem.load(rows_layout(64, 4))
    keys = ()
    for i in gl.static_range(len(WIDTHS)):
        a, k = _first_rows(k, WIDTHS[i])
        keys = keys + (_key_operand(a),)
    return (keys, _aside_operands(v_smem)), scale


@gluon.jit
def _extremes(x, EXTREME: gl.constexpr):
    """Minima (EXTREME is :func:`lower`) or maxima of keys eight apart, two numbers an instruction."""
    if x.shape[0] > 8:
        a, b = halves(x)
        x = _extremes(EXTREME(a, b, False), EXTREME)
    return gl.convert_layout(x, rows_layout(8, gl.num_warps()), assert_trivial=True)


@gluon.jit
def _key_words(low, high, DTYPE: gl.constexpr):
    """A lane's minima and maxima of its eight channels -> of all lanes, and of one word of channels a lane."""
    low, high = lane_words(low), lane_words(high)
    for bit in gl.static_range(4, 1, -1):
        low, high = with_partner(low, bit, lower_words, DTYPE), with_partner(high, bit, higher_words, DTYPE)
    return low, high


@gluon.jit
def _value_words(most, DTYPE: gl.constexpr):
    """The same for largest magnitudes of its four channels."""
    return with_partner(with_partner(lane_words(most), 1, higher_words, DTYPE), 0, higher_words, DTYPE)


@gluon.jit
def _scales(low, high, most, DTYPE: gl.constexpr, CENTER: gl.constexpr, VALUE_CHANNEL: gl.constexpr):
    """Ranges of keys and largest magnitudes of values, a word of channels a lane, to what both are quantised by.

    Returns:
        the middles of a lane's eight channels of keys and the keys' scale; 1 / the values' scales for its four channels, and
        all channels' scales, or one of each.
    """
    low, high = lane_numbers(low, DTYPE), lane_numbers(high, DTYPE)
    middle = 0.0
    if CENTER:
        middle = low * 0.5 + high * 0.5
        low, high = low - middle, high - middle
        middle = from_lanes(middle, 8 // middle.shape[1], 4 * middle.shape[1], 3)
    key_scale = amplitude_to_scale(largest_of_lanes(nan_max(gl.abs(low), gl.abs(high))))
    most = lane_numbers(most, DTYPE)
    if VALUE_CHANNEL:
        if most.shape[1] > 1:
            # a channel a lane
            a, b = first_and_second(most)
            most = gl.where(lane_bit(a, 0), b, a)
        value_scale = amplitude_to_scale(most)
        inverse = from_lanes(inverse_scale(value_scale, False), 4, 1, 28)
        value_scale = gl.reshape(value_scale, (32,))
    else:
        value_scale = amplitude_to_scale(largest_of_lanes(most))
        inverse = inverse_scale(value_scale, False)
    return middle, key_scale, inverse, value_scale


@gluon.jit
def quantize_window(k, v, mantissa, CENTER: gl.constexpr, VALUE_CHANNEL: gl.constexpr, STAGED: gl.constexpr):
    """Keys and values as int8, as operands; the keys' scale; the values' scale.

    ``mantissa`` is for :func:`.gluon.ptx_ops.keep_apart`.
    """
    WARPS: gl.constexpr = gl.num_warps()
    DTYPE: gl.constexpr = k[0].dtype
    low, high = _extremes(k[0], lower), _extremes(k[0], higher)
    for i in gl.static_range(1, len(k)):
        low, high = lower(low, _extremes(k[i], lower), False), higher(high, _extremes(k[i], higher), False)
    low, high = _key_words(_key_lanes(low, 1), _key_lanes(high, 1), DTYPE)
    if not STAGED:
        # measured: with a bias in shared memory 1 to 3 % slower
        keep_apart(mantissa, 0)
    first, second = _value_lanes(v[0], 1), _value_lanes(v[1], 1)
    most = higher(gl.abs(first), gl.abs(second), False)
    for _ in gl.static_range(3):
        a, b = first_and_second(most)
        most = higher(a, b, False)
    middle, key_scale, inverse, value_scale = _scales(low, high, _value_words(most, DTYPE), DTYPE, CENTER, VALUE_CHANNEL)
    key_inverse = inverse_scale(key_scale, False)
    keys = ()
    for i in gl.static_range(len(k)):
        y = _key_lanes(k[i], 1).to(gl.float32)
        if CENTER:
            y = y - repeated(middle, y.shape[1])
        rows = _key_rows(round_to_int8(y, key_inverse), 1)
        keys = keys + (gl.convert_layout(rows, rows_layout(rows.shape[0], WARPS), assert_trivial=True),)
    if VALUE_CHANNEL:
        inverse = repeated(inverse, first.shape[1])
        value_scale = gl.convert_layout(value_scale, gl.SliceLayout(0, own_rows_layout(16 * WARPS)))
    values = (
        _value_rows(round_to_int8(first.to(gl.float32), inverse)),
        _value_rows(round_to_int8(second.to(gl.float32), inverse)),
    )
    return right_operands(keys, values), key_scale, value_scale


@gluon.jit
def _of_all_warps(x):
    """A word of each lane of four warps, lane by lane, in shared memory."""
    return aside(gl.permute(gl.reshape(x, (4, 32)), (1, 0)))


@gluon.jit
def quantize_parts(k, v, mantissa, CENTER: gl.constexpr, VALUE_CHANNEL: gl.constexpr, KEYS: gl.constexpr):
    """:func:`quantize_window` of keys and values of which each of four warps has a part: it quantises that alone.

    Warps pass on ranges through shared memory, then what they quantised.
    """
    DTYPE: gl.constexpr = k.dtype
    k, v = _key_lanes(k, 4), _value_lanes(v, 4)
    a, b = first_and_second(k)
    low, high = _key_words(lower(a, b, False), higher(a, b, False), DTYPE)
    most = gl.abs(v)
    for _ in gl.static_range(2):
        a, b = first_and_second(most)
        most = higher(a, b, False)
    lows, highs, mosts = _of_all_warps(low), _of_all_warps(high), _of_all_warps(_value_words(most, DTYPE))
    keep_apart(mantissa, 0)
    L: gl.constexpr = lanes_layout(32, 4, 4)
    low, high = word_ranges(lows.load(L), highs.load(L), 1, DTYPE)
    most = word_maxima(mosts.load(L), 1, DTYPE)
    middle, key_scale, inverse, value_scale = _scales(low, high, most, DTYPE, CENTER, VALUE_CHANNEL)
    y = k.to(gl.float32)
    if CENTER:
        y = y - in_all_warps(repeated(middle, 16))
    k = _key_rows(round_to_int8(y, inverse_scale(key_scale, False)), 4)
    if VALUE_CHANNEL:
        inverse = in_all_warps(repeated(inverse, 16))
    sides, value_scale = _exchanged(k, round_to_int8(v.to(gl.float32), inverse), value_scale, KEYS)
    # places that are taken again would be waited for
    lows._keep_alive()
    highs._keep_alive()
    mosts._keep_alive()
    return sides, key_scale, value_scale
