"""The arithmetic of an integer network's layers (Triton device functions).

Every function returns the bits of its namesake in :mod:`qflash.specification.layers`, which states the bounds; all of it is
elementwise, in 32 bits but for :func:`row_factors`, without a float and without a division. ``GUARD`` is true in Triton's
interpreter, see :mod:`.fixed_point`.
"""

import triton
import triton.language as tl

from ...specification import layers as op
from .fixed_point import SATURATE, bit_length, multiply_high, multiply_round

TAIL_END = tl.constexpr(op.TAIL_END)
ACTIVATION_LIMIT = tl.constexpr(op.ACTIVATION_LIMIT)
GELU_CONSTANTS = tl.constexpr(op.GELU_CONSTANTS)
SILU_CONSTANTS = tl.constexpr(op.SILU_CONSTANTS)
ROOT_START = tl.constexpr(op.ROOT_START)
ROOT_SLOPE = tl.constexpr(op.ROOT_SLOPE << 1)


@triton.jit
def saturate(x, DTYPE: tl.constexpr, PLAIN: tl.constexpr):
    """Clamp int32 to the range of int8, int16 or int32 and take that type.

    PLAIN: without inline assembly, which takes four numbers of a thread at once: in the interpreter, or where it has fewer.
    """
    BITS: tl.constexpr = DTYPE.primitive_bitwidth
    if BITS == 32:
        out = x
    elif PLAIN:
        out = tl.minimum(tl.maximum(x, -(1 << (BITS - 1))), (1 << (BITS - 1)) - 1).to(DTYPE)
    elif BITS == 16:
        out = tl.inline_asm_elementwise("cvt.pack.sat.s16.s32 $0, $2, $1;", "=r,r,r", [x], tl.int16, True, 2)
    else:
        out = tl.inline_asm_elementwise(SATURATE, "=r,r,r,r,r", [x], tl.int8, True, 4)
    return out


@triton.jit
def gelu_tail(rest):
    """GELU's tail of numbers that end ``rest`` before where it counts as 0."""
    square = (rest * rest + (1 << 8)) >> 9
    first = (square * (rest * -GELU_CONSTANTS[1] + GELU_CONSTANTS[0]) + (1 << 14)) >> 15
    second = (first << 2) + (rest * -GELU_CONSTANTS[3] + GELU_CONSTANTS[2])
    return (first * second + (1 << 19)) >> 20


@triton.jit
def silu_tail(rest):
    """SiLU's tail of numbers that end ``rest`` before where it counts as 0."""
    line = rest * SILU_CONSTANTS[1]
    square = (rest * rest + (1 << 8)) >> 9
    first = (square * (SILU_CONSTANTS[0] - line + (square << 1)) + (1 << 14)) >> 15
    second = SILU_CONSTANTS[2] + line - square * SILU_CONSTANTS[3]
    return (first * second + (1 << 21)) >> 22


@triton.jit
def less_tail(positive, rest, ACTIVATION: tl.constexpr):
    """An activation of numbers, of what they are above 0, and by how much they end before where its tail counts as 0."""
    if ACTIVATION == "gelu":
        out = positive - gelu_tail(rest)
    elif ACTIVATION == "silu":
        out = positive - silu_tail(rest)
    else:
        out = positive
    return out


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """An activation of numbers below 2**30, in their unit."""
    rest = tl.maximum(tl.minimum(x, -x) + TAIL_END, 0)
    return less_tail(tl.minimum(tl.maximum(x, 0), ACTIVATION_LIMIT), rest, ACTIVATION)


@triton.jit
def inverse_root(v, GUARD: tl.constexpr):
    """About ``2**44 / sqrt(v)`` for ``2**28 <= v < 2**30``, in int32."""
    x = ROOT_START - multiply_round(v << 1, ROOT_SLOPE, GUARD)
    for _ in tl.static_range(3):
        # x stays below 2**30: tried for every v
        square = multiply_round(x << 1, x << 1, GUARD)
        error = (1 << 28) - multiply_round(square << 1, v << 1, GUARD)
        x = multiply_round(x, error << 3, GUARD, x)
    return x


@triton.jit
def row_factors(total, squares, epsilon, CHANNELS: tl.constexpr, CONSTANTS: tl.constexpr, GUARD: tl.constexpr):
    """What :func:`normalise` takes, of rows, from the sums of their channels (int32) and of these squared (int64).

    CONSTANTS are :func:`.layers.row_constants`. Products with the channels may wrap round: the differences fit.
    """
    BITS: tl.constexpr = CONSTANTS[1]
    # of few channels, whose sum has room for it, the product is made wider than its rounding needs
    UP: tl.constexpr = 33 - BITS if BITS < 33 else 0
    DOWN: tl.constexpr = BITS + UP - 32
    middle = (multiply_high(total << UP, CONSTANTS[0], GUARD) + (1 << (DOWN - 1))) >> DOWN
    # the sum of (4 h - middle)**2
    variance = squares * 16 + middle.to(tl.int64) * (middle * CHANNELS - total * 8).to(tl.int64) + epsilon
    high = (variance >> 17).to(tl.int32)
    length = tl.where(high > 0, 17, 0) + bit_length(tl.where(high > 0, high, variance.to(tl.int32)), GUARD)
    half = (length - 29) >> 1
    v = (variance >> tl.maximum(2 * half, 0).to(tl.int64)).to(tl.int32) << tl.maximum(-2 * half, 0)
    x = inverse_root(tl.maximum(v, 1 << 28), GUARD)
    # both doubled and negative, as 2**31 is no int32: the root may be 2**30
    factor = multiply_round(x * -2, CONSTANTS[2] * -2, GUARD)
    left = 8 - CONSTANTS[3] - half
    up, down = tl.maximum(left, 0), tl.maximum(-left, 0)
    # half a unit of what the shift to the right leaves is taken from the sum, and so added to deviations
    return (total * 0 + CHANNELS) << up, (total << up) - ((1 << down) >> 1), factor, down


@triton.jit
def normalise(h, channels, total, factor, shift, GUARD: tl.constexpr):
    """Channels less their mean, over the deviation, with 20 fraction bits; all others of :func:`row_factors`."""
    return multiply_round((h * channels - total) >> shift, factor, GUARD)


@triton.jit
def places_of(
    row, rows, places_ptr, tokens, image_inverse, image_bits, out_tokens, first, residual_tokens, TABLE: tl.constexpr
):
    """Rows of the output and of the residual for rows of a linear layer's input, int64, and whether there is such a row.

    See :class:`..launch_arguments.Places`.
    """
    wide = row.to(tl.int64)
    image = (wide * image_inverse) >> image_bits
    place = (wide - image * tokens).to(tl.int32)
    there = row < rows
    if TABLE:
        place = tl.load(places_ptr + place, mask=there, other=0)
        there = there & (place >= 0) & (place < out_tokens)
    return image * out_tokens + first + place, image * residual_tokens + place, there
