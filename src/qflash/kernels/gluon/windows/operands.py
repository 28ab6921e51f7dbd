"""A window's keys and values for :mod:`.windows.attention`: loads, quantisation, and the right operands of its products.

Equations 1 and 2 (step 1 of ``docs/algorithm.md``) for K and V of one window of 33 to 64 keys and 32 channels, in
registers. With t = lane % 4 and g = lane // 4, a lane loads for each eight keys

    K   key g, channels 8t .. 8t + 7                  eight neighbouring channels of one key
    V   keys 2t and 2t + 1, channels 4g .. 4g + 3     four neighbouring channels of two keys

which are, permuted within the lane, its registers of the right operands (:func:`_key_operand`, :func:`_value_operand`).
Loads need no shared memory. Either every warp of a program loads all of K and V, or each of four warps loads sixteen
keys' worth and they exchange through shared memory (the functions with "parts").

In order: load; from floats ranges of channels within each lane, within the warp (:mod:`.windows.lane_ops`), and with parts
between warps through shared memory; scales; int8; operands. Four warps with parts quantise each number once instead of four
times, measured up to 11 % faster where windows are few.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...common.quantize_ops import (
    amplitude_to_scale,
    centered_scale,
    higher,
    inverse_scale,
    lower,
    nan_max,
    value_scale,
)
from ...common.tile_ops import key_order
from ..ptx_ops import (
    as_float32,
    halves,
    higher_words,
    int8_values,
    keep_apart,
    lower_words,
    round_to_int8,
    to_shared,
    word_maxima,
    word_ranges,
    zero_point,
)
from ..releases import barrier
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
def key_of(n, KEYS: gl.constexpr, KEY_ORDER: gl.constexpr):
    """The key, and the value, that belongs to column ``n`` of the scores; ``n`` itself, or with KEY_ORDER key order.

    With KEY_ORDER, :func:`.common.tile_ops.key_order` in groups of sixteen columns; a last tile of eight keeps its
    order. A lane's columns then are four neighbouring keys, whose bias it loads at once.
    """
    if KEY_ORDER:
        if KEYS % 16 > 0 and KEYS % 16 <= 8:
            n = gl.where(n < KEYS - KEYS % 16, key_order(n), n)
        else:
            n = key_order(n)
    return n


@gluon.jit
def _taken(n, place, KEYS: gl.constexpr, PLACES: gl.constexpr):
    """Numbers of keys below KEYS, past the last the last one; with PLACES those that ``place`` has there."""
    n = gl.minimum(n, KEYS - 1)
    if PLACES:
        n = gl.load(place + n)
    return n


@gluon.jit
def load_rows(base, stride_n: gl.constexpr, first, END: gl.constexpr, ROWS: gl.constexpr):
    """Rows from ``first`` on, (ROWS, 32) as stored; past the END the last row is repeated. Every warp has all of them."""
    L: gl.constexpr = rows_layout(ROWS, gl.num_warps())
    n = gl.arange(0, ROWS, layout=gl.SliceLayout(1, L))
    d = gl.arange(0, 32, layout=gl.SliceLayout(0, L))
    return gl.load(base + gl.minimum(first + n, END - 1)[:, None] * stride_n + d[None, :])


@gluon.jit
def _load_key(
    base, stride_n: gl.constexpr, place, START: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, KEY_ORDER: gl.constexpr,
    POLICY: gl.constexpr, PLACES: gl.constexpr,
):  # fmt: skip
    """The keys of one tile of scores, (ROWS, 32) as stored; past the last key it is repeated."""
    L: gl.constexpr = rows_layout(ROWS, gl.num_warps())
    n = gl.arange(0, ROWS, layout=gl.SliceLayout(1, L))
    d = gl.arange(0, 32, layout=gl.SliceLayout(0, L))
    if START + ROWS <= KEYS and not PLACES:
        ptrs = base + (key_of(n, ROWS, KEY_ORDER)[:, None] * stride_n + d[None, :]) + START * stride_n
    else:
        n = _taken(key_of(START + n, KEYS, KEY_ORDER), place, KEYS, PLACES)
        ptrs = base + n[:, None] * stride_n + d[None, :]
    return gl.load(ptrs, eviction_policy=POLICY)


@gluon.jit
def _load_value(
    base, stride_n: gl.constexpr, place, START: gl.constexpr, KEYS: gl.constexpr, KEY_ORDER: gl.constexpr, POLICY: gl.constexpr,
    REPEAT: gl.constexpr, PLACES: gl.constexpr,
):  # fmt: skip
    """The values of 32 columns of scores from START on, (32, 32) as stored; past the last it is repeated (REPEAT), or zero."""
    L: gl.constexpr = value_layout(gl.num_warps())
    n = gl.arange(0, 32, layout=gl.SliceLayout(1, L))
    d = gl.arange(0, 32, layout=gl.SliceLayout(0, L))
    if START + 32 <= KEYS and not PLACES:
        ptrs = base + (key_of(n, 32, KEY_ORDER)[:, None] * stride_n + d[None, :]) + START * stride_n
        x = gl.load(ptrs, eviction_policy=POLICY)
    elif REPEAT:
        n = _taken(key_of(START + n, KEYS, KEY_ORDER), place, KEYS, PLACES)[:, None]
        x = gl.load(base + (n * stride_n + d[None, :]), eviction_policy=POLICY)
    else:
        n = key_of(START + n, KEYS, KEY_ORDER)
        inside = (n < KEYS)[:, None] & (d[None, :] >= 0)
        if PLACES:
            n = _taken(n, place, KEYS, True)
        x = gl.load(base + (n[:, None] * stride_n + d[None, :]), mask=inside, other=0, eviction_policy=POLICY)
    return x


@gluon.jit
def load_keys(
    base, stride_n: gl.constexpr, place, KEYS: gl.constexpr, KEY_ORDER: gl.constexpr, POLICY: gl.constexpr,
    PLACES: gl.constexpr,
):  # fmt: skip
    """All keys of a window, one tensor per tile; with PLACES each from where ``place`` says."""
    STARTS: gl.constexpr = starts(KEYS)
    WIDTHS: gl.constexpr = widths(KEYS)
    k = ()
    for i in gl.static_range(len(WIDTHS)):
        k = k + (_load_key(base, stride_n, place, STARTS[i], WIDTHS[i], KEYS, KEY_ORDER, POLICY, PLACES),)
    return k


@gluon.jit
def load_values(
    base, stride_n: gl.constexpr, place, KEYS: gl.constexpr, KEY_ORDER: gl.constexpr, POLICY: gl.constexpr,
    REPEAT: gl.constexpr, PLACES: gl.constexpr,
):  # fmt: skip
    """All values of a window, two tensors of 32 keys; with PLACES each from where ``place`` says."""
    first = _load_value(base, stride_n, place, 0, KEYS, KEY_ORDER, POLICY, REPEAT, PLACES)
    return first, _load_value(base, stride_n, place, 32, KEYS, KEY_ORDER, POLICY, REPEAT, PLACES)


@gluon.jit
def load_key_parts(
    base, stride_n: gl.constexpr, place, KEYS: gl.constexpr, KEY_ORDER: gl.constexpr, PLACES: gl.constexpr
):  # fmt: skip
    """The keys of all tiles, (64, 32) as stored, sixteen per warp; past the last key it is repeated."""
    L: gl.constexpr = own_rows_layout(64)
    n = _taken(key_of(gl.arange(0, 64, layout=gl.SliceLayout(1, L)), KEYS, KEY_ORDER), place, KEYS, PLACES)
    d = gl.arange(0, 32, layout=gl.SliceLayout(0, L))
    return gl.load(base + n[:, None] * stride_n + d[None, :])


@gluon.jit
def load_value_parts(
    base, stride_n: gl.constexpr, place, KEYS: gl.constexpr, KEY_ORDER: gl.constexpr, REPEAT: gl.constexpr, PLACES: gl.constexpr
):  # fmt: skip
    """The values of 64 columns of scores, (64, 32) as stored, sixteen per warp; REPEAT as in :func:`_load_value`."""
    L: gl.constexpr = part_value_layout()
    n = key_of(gl.arange(0, 64, layout=gl.SliceLayout(1, L)), KEYS, KEY_ORDER)
    d = gl.arange(0, 32, layout=gl.SliceLayout(0, L))
    inside = (n < KEYS)[:, None] & (d[None, :] >= 0)
    if REPEAT or PLACES:
        n = _taken(n, place, KEYS, PLACES)
    if REPEAT:
        return gl.load(base + (n[:, None] * stride_n + d[None, :]))
    return gl.load(base + (n[:, None] * stride_n + d[None, :]), mask=inside, other=0)


@gluon.jit
def _key_operand(x):
    """Keys as the right operand (32, keys): of each lane's eight channels, four go to each half of the product."""
    N: gl.constexpr = x.shape[0]
    x = gl.reshape(gl.permute(gl.reshape(x, (N, 4, 2, 4)), (0, 2, 1, 3)), (N, 32))
    return gl.convert_layout(gl.permute(x, (1, 0)), operand_layout(1, gl.num_warps()), assert_trivial=True)


@gluon.jit
def _value_operand(x):
    """Values as the right operand (32, 32): keys in the lanes' order of scores, channel 4i + j in column 8j + i.

    That order of channels (fragment order) gives a lane of the product eight neighbouring output channels.
    """
    x = gl.permute(gl.reshape(x, (2, 2, 4, 2, 8, 4)), (0, 2, 1, 3, 5, 4))
    return gl.convert_layout(gl.reshape(x, (32, 32)), operand_layout(1, gl.num_warps()), assert_trivial=True)


@gluon.jit
def _key_operands(k):
    """The right operands of all tiles of int8 keys."""
    keys = ()
    for i in gl.static_range(len(k)):
        keys = keys + (_key_operand(k[i]),)
    return keys


@gluon.jit
def right_operands(k, v):
    """(operands of int8 keys, one per tile; two operands of values)."""
    return _key_operands(k), (_value_operand(v[0]), _value_operand(v[1]))


@gluon.jit
def _first_rows(x, ROWS: gl.constexpr):
    """(the first ROWS rows, the second half of the rows) of keys that four warps have."""
    a, b = x, x
    if x.shape[0] > ROWS:
        a, b = halves(x)
    first = a
    if a.shape[0] > ROWS:
        first, _ = halves(a)
    return gl.convert_layout(first, rows_layout(ROWS, 4), assert_trivial=True), b


@gluon.jit
def _key_lanes(x, PARTS: gl.constexpr):
    """(lanes, numbers) of keys, eight channels of every eighth; all warps have them, or each of PARTS its own."""
    EIGHTS: gl.constexpr = x.shape[0] // (8 * PARTS)
    x = gl.permute(gl.reshape(x, (PARTS, EIGHTS, 8, 4, 8)), (0, 2, 3, 1, 4))
    return in_lanes(gl.reshape(x, (32 * PARTS, 8 * EIGHTS)))


@gluon.jit
def _key_rows(x, PARTS: gl.constexpr):
    """The inverse of :func:`_key_lanes`: (keys, 32)."""
    EIGHTS: gl.constexpr = x.shape[1] // 8
    x = gl.permute(gl.reshape(x, (PARTS, 8, 4, EIGHTS, 8)), (0, 3, 1, 2, 4))
    return gl.reshape(x, (8 * EIGHTS * PARTS, 32))


@gluon.jit
def _value_lanes(x, PARTS: gl.constexpr):
    """(lanes, numbers) of values: four channels of two neighbouring keys of every eight; PARTS as in :func:`_key_lanes`."""
    EIGHTS: gl.constexpr = x.shape[0] // (8 * PARTS)
    x = gl.permute(gl.reshape(x, (PARTS, EIGHTS, 4, 2, 8, 4)), (0, 4, 2, 1, 3, 5))
    return in_lanes(gl.reshape(x, (32 * PARTS, 8 * EIGHTS)))


@gluon.jit
def _value_rows(x):
    """The inverse of :func:`_value_lanes`, for values that every warp has: (keys, 32)."""
    EIGHTS: gl.constexpr = x.shape[1] // 8
    x = gl.permute(gl.reshape(x, (8, 4, EIGHTS, 2, 4)), (2, 1, 3, 0, 4))
    return gl.convert_layout(gl.reshape(x, (8 * EIGHTS, 32)), value_layout(gl.num_warps()), assert_trivial=True)


@gluon.jit
def _values_to_shared(v):
    """Values (lanes, numbers) of four warps in shared memory, (256, 8): the two registers of an operand next to each other."""
    v = gl.permute(gl.reshape(v, (2, 2, 32, 4, 4)), (0, 4, 2, 1, 3))
    return to_shared(gl.reshape(v, (256, 8)))


@gluon.jit
def _aside_operands(smem):
    """The two right operands of values that four warps stored with :func:`_values_to_shared`."""
    v = gl.permute(gl.reshape(smem.load(all_values_layout()), (2, 4, 8, 4, 2, 4)), (0, 4, 3, 5, 1, 2))
    a, b = halves(gl.reshape(v, (64, 32)))
    L: gl.constexpr = operand_layout(1, 4)
    return gl.convert_layout(a, L, assert_trivial=True), gl.convert_layout(b, L, assert_trivial=True)


@gluon.jit
def shared_operands(k, v):
    """:func:`right_operands` of keys that each of four warps has all of, and values of which each has a part."""
    smem = _values_to_shared(_value_lanes(v, 4))
    barrier()
    return _key_operands(k), _aside_operands(smem)


@gluon.jit
def _exchanged(k, v, scale, offset, KEYS: gl.constexpr):
    """Parts of int8 keys and values -> (right operands of all of them in every warp; scales and offsets as for outputs).

    The scale and the offset are one number each, or one per channel.
    """
    WIDTHS: gl.constexpr = widths(KEYS)
    k_smem, v_smem = to_shared(k), _values_to_shared(v)
    if scale.type.is_block():
        scale_smem = to_shared(scale)
    if offset.type.is_block():
        offset_smem = to_shared(offset)
    barrier()
    if scale.type.is_block():
        scale = scale_smem.load(gl.SliceLayout(0, own_rows_layout(64)))
    if offset.type.is_block():
        offset = offset_smem.load(gl.SliceLayout(0, own_rows_layout(64)))
    k = k_smem.load(rows_layout(64, 4))
    keys = ()
    for i in gl.static_range(len(WIDTHS)):
        a, k = _first_rows(k, WIDTHS[i])
        keys = keys + (_key_operand(a),)
    return (keys, _aside_operands(v_smem)), scale, offset


@gluon.jit
def _extremes(x, EXTREME: gl.constexpr):
    """Minima (EXTREME is :func:`lower`) or maxima of keys eight apart, (8, 32); 16-bit floats by twos."""
    if x.shape[0] > 8:
        a, b = halves(x)
        x = _extremes(EXTREME(a, b, False), EXTREME)
    return gl.convert_layout(x, rows_layout(8, gl.num_warps()), assert_trivial=True)


@gluon.jit
def _key_words(low, high, DTYPE: gl.constexpr):
    """Ranges of a lane's eight channels -> ranges over all lanes of the warp, one word of channels per lane: (low, high)."""
    low, high = lane_words(low), lane_words(high)
    for bit in gl.static_range(4, 1, -1):
        low, high = with_partner(low, bit, lower_words, DTYPE), with_partner(high, bit, higher_words, DTYPE)
    return low, high


@gluon.jit
def _value_words(x, COMBINE: gl.constexpr, DTYPE: gl.constexpr):
    """Extremes of a lane's four channels -> over all lanes of the warp, one word of channels per lane."""
    return with_partner(with_partner(lane_words(x), 1, COMBINE, DTYPE), 0, COMBINE, DTYPE)


@gluon.jit
def _own_value_extremes(x, EXTREME: gl.constexpr):
    """Extremes of a lane's values of each of its four channels, from (lanes, numbers)."""
    if x.shape[1] > 4:
        a, b = first_and_second(x)
        x = _own_value_extremes(EXTREME(a, b, False), EXTREME)
    return x


@gluon.jit
def _value_extremes(x, CENTER: gl.constexpr, DTYPE: gl.constexpr):
    """Ranges of the channels of values (CENTER), else largest magnitudes, over a warp: words of channels per lane, a tuple."""
    if CENTER:
        low, high = _own_value_extremes(x, lower), _own_value_extremes(x, higher)
        words = (_value_words(low, lower_words, DTYPE), _value_words(high, higher_words, DTYPE))
    else:
        words = (_value_words(_own_value_extremes(gl.abs(x), higher), higher_words, DTYPE),)
    return words


@gluon.jit
def _one_of_two(x):
    """Of the two channels in a word each of two lanes takes one."""
    if x.shape[1] > 1:
        a, b = first_and_second(x)
        x = gl.where(lane_bit(a, 0), b, a)
    return x


@gluon.jit
def _key_scale(low, high, DTYPE: gl.constexpr, CENTER: gl.constexpr):
    """(midranges of a lane's eight key channels, the keys' scale) from ranges, one word of channels per lane."""
    low, high = lane_numbers(low, DTYPE), lane_numbers(high, DTYPE)
    middle = 0.0
    if CENTER:
        middle = low * 0.5 + high * 0.5
        low, high = low - middle, high - middle
        middle = from_lanes(middle, 8 // middle.shape[1], 4 * middle.shape[1], 3)
    return middle, amplitude_to_scale(largest_of_lanes(nan_max(gl.abs(low), gl.abs(high))))


@gluon.jit
def _value_scales(words, DTYPE: gl.constexpr, CENTER: gl.constexpr, VALUE_CHANNEL: gl.constexpr):
    """(1 / scale, zero point) of a lane's four value channels, (scale, offset) of all, from :func:`_value_extremes`.

    Without a scale per channel the scale and its inverse are one number, without CENTER zero point and offset are 0.
    """
    if CENTER:
        middle, most = centered_scale(lane_numbers(words[0], DTYPE), lane_numbers(words[1], DTYPE))
        middle = _one_of_two(middle)
    else:
        most = lane_numbers(words[0], DTYPE)
    if VALUE_CHANNEL:
        most = _one_of_two(most)
    else:
        most = largest_of_lanes(most)
    scale = value_scale(most, CENTER)
    inverse = inverse_scale(scale, False)
    zero = 0.0
    offset = 0
    if CENTER:
        zero = zero_point(middle, inverse)
        offset = gl.reshape(zero * scale, (32,))
        zero = from_lanes(zero, 4, 1, 28)
    if VALUE_CHANNEL:
        inverse = from_lanes(inverse, 4, 1, 28)
        scale = gl.reshape(scale, (32,))
    return inverse, zero, scale, offset


@gluon.jit
def _without_padding(x, START: gl.constexpr, KEYS: gl.constexpr, KEY_ORDER: gl.constexpr):
    """int8 values of columns of scores from START on, with zeros past the last key."""
    N: gl.constexpr = x.shape[0]
    if START + N > KEYS:
        n = key_of(START + gl.arange(0, N, layout=gl.SliceLayout(1, x.type.layout)), KEYS, KEY_ORDER)
        x = gl.where((n < KEYS)[:, None], x, 0)
    return x


@gluon.jit
def quantize_window(
    k, v, mantissa, STAGED: gl.constexpr, KEYS: gl.constexpr, KEY_ORDER: gl.constexpr, RECIPE: gl.constexpr
):  # fmt: skip
    """Quantise K and V that every warp has all of: (right operands, the keys' scale, the values' scale or scales, offsets).

    Unless values are centred the offset is 0.

    ``mantissa`` is any number below 2**30, for :func:`.gluon.ptx_ops.keep_apart`.
    """
    WARPS: gl.constexpr = gl.num_warps()
    DTYPE: gl.constexpr = k[0].dtype
    low, high = _extremes(k[0], lower), _extremes(k[0], higher)
    for i in gl.static_range(1, len(k)):
        low, high = lower(low, _extremes(k[i], lower), False), higher(high, _extremes(k[i], higher), False)
    low, high = _key_words(_key_lanes(low, 1), _key_lanes(high, 1), DTYPE)
    if not STAGED:
        # measured: where the bias is staged in shared memory this would be 1 to 3 % slower
        keep_apart(mantissa, 0)
    first, second = _value_lanes(v[0], 1), _value_lanes(v[1], 1)
    if RECIPE.VALUE_OFFSET:
        least, most = lower(first, second, False), higher(first, second, False)
        least, most = _own_value_extremes(least, lower), _own_value_extremes(most, higher)
        words = (_value_words(least, lower_words, DTYPE), _value_words(most, higher_words, DTYPE))
    else:
        words = _value_extremes(higher(gl.abs(first), gl.abs(second), False), False, DTYPE)
    middle, key_scale = _key_scale(low, high, DTYPE, RECIPE.CENTER)
    inverse, zero, value_scale, offset = _value_scales(words, DTYPE, RECIPE.VALUE_OFFSET, RECIPE.VALUE_CHANNEL)
    key_inverse = inverse_scale(key_scale, False)
    keys = ()
    for i in gl.static_range(len(k)):
        y = as_float32(_key_lanes(k[i], 1))
        if RECIPE.CENTER:
            y = y - repeated(middle, y.shape[1])
        rows = _key_rows(round_to_int8(y, key_inverse), 1)
        keys = keys + (gl.convert_layout(rows, rows_layout(rows.shape[0], WARPS), assert_trivial=True),)
    if RECIPE.VALUE_CHANNEL:
        inverse = repeated(inverse, first.shape[1])
        value_scale = gl.convert_layout(value_scale, gl.SliceLayout(0, own_rows_layout(16 * WARPS)))
    if RECIPE.VALUE_OFFSET:
        zero = repeated(zero, first.shape[1])
        offset = gl.convert_layout(offset, gl.SliceLayout(0, own_rows_layout(16 * WARPS)))
    first = _value_rows(int8_values(as_float32(first), inverse, zero, RECIPE.VALUE_OFFSET))
    second = _value_rows(int8_values(as_float32(second), inverse, zero, RECIPE.VALUE_OFFSET))
    if RECIPE.VALUE_OFFSET:
        second = _without_padding(second, 32, KEYS, KEY_ORDER)
    return right_operands(keys, (first, second)), key_scale, value_scale, offset


@gluon.jit
def _of_all_warps(x):
    """One word per lane of four warps in shared memory, (32, 4)."""
    return to_shared(gl.permute(gl.reshape(x, (4, 32)), (1, 0)))


@gluon.jit
def quantize_parts(k, v, mantissa, KEYS: gl.constexpr, KEY_ORDER: gl.constexpr, RECIPE: gl.constexpr):
    """:func:`quantize_window` of K and V of which each of four warps has a part, which it quantises.

    Two exchanges through shared memory: ranges, then int8 values (:func:`_exchanged`).
    """
    DTYPE: gl.constexpr = k.dtype
    L: gl.constexpr = v.type.layout
    # which values are past the last key, as numbers of a lane
    n = key_of(gl.arange(0, 64, layout=gl.SliceLayout(1, L)), KEYS, KEY_ORDER)
    there = _value_lanes((n < KEYS).to(gl.int8)[:, None] + gl.zeros((64, 32), gl.int8, L), 4)
    k, v = _key_lanes(k, 4), _value_lanes(v, 4)
    a, b = first_and_second(k)
    low, high = _key_words(lower(a, b, False), higher(a, b, False), DTYPE)
    words = _value_extremes(v, RECIPE.VALUE_OFFSET, DTYPE)
    lows, highs, firsts = _of_all_warps(low), _of_all_warps(high), _of_all_warps(words[0])
    seconds = firsts
    if RECIPE.VALUE_OFFSET:
        seconds = _of_all_warps(words[1])
    keep_apart(mantissa, 0)
    LANES: gl.constexpr = lanes_layout(32, 4, 4)
    low, high = word_ranges(lows.load(LANES), highs.load(LANES), 1, DTYPE)
    if RECIPE.VALUE_OFFSET:
        words = word_ranges(firsts.load(LANES), seconds.load(LANES), 1, DTYPE)
    else:
        words = (word_maxima(firsts.load(LANES), 1, DTYPE),)
    middle, key_scale = _key_scale(low, high, DTYPE, RECIPE.CENTER)
    inverse, zero, value_scale, offset = _value_scales(words, DTYPE, RECIPE.VALUE_OFFSET, RECIPE.VALUE_CHANNEL)
    y = as_float32(k)
    if RECIPE.CENTER:
        y = y - in_all_warps(repeated(middle, 16))
    k = _key_rows(round_to_int8(y, inverse_scale(key_scale, False)), 4)
    if RECIPE.VALUE_CHANNEL:
        inverse = in_all_warps(repeated(inverse, 16))
    if RECIPE.VALUE_OFFSET:
        zero = in_all_warps(repeated(zero, 16))
    v = int8_values(as_float32(v), inverse, zero, RECIPE.VALUE_OFFSET)
    if RECIPE.VALUE_OFFSET:
        v = gl.where(there != 0, v, 0)
    sides, value_scale, offset = _exchanged(k, v, value_scale, offset, KEYS)
    # keeps the allocator from reusing this memory, which would add a barrier
    lows._keep_alive()
    highs._keep_alive()
    firsts._keep_alive()
    seconds._keep_alive()
    return sides, key_scale, value_scale, offset
