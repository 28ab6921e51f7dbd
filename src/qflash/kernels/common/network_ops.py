"""The arithmetic of an integer network's layers (Triton device functions).

Every function returns the bits of its namesake in :mod:`qflash.specification.layers`, which states the bounds; all of it is
elementwise, in 32 bits but for :func:`row_statistics`, without a float and without a division. ``GUARD`` is true in Triton's
interpreter, see :mod:`.fixed_point`.
"""

import triton
import triton.language as tl

from ...specification import layers as op
from .fixed_point import SATURATE, bit_length, multiply_high

GELU_END = tl.constexpr(op.GELU_END)
GELU_LIMIT = tl.constexpr(op.GELU_LIMIT)
GELU_CONSTANTS = tl.constexpr(op.GELU_CONSTANTS)
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
    square = (rest * rest) >> 9
    first = (square * (rest * -GELU_CONSTANTS[1] + GELU_CONSTANTS[0])) >> 15
    second = (first << 2) + (rest * -GELU_CONSTANTS[3] + GELU_CONSTANTS[2])
    return (first * second + (1 << 19)) >> 20


@triton.jit
def gelu(x):
    """GELU of numbers below 2**30, in their unit."""
    rest = tl.maximum(tl.minimum(x, -x) + GELU_END, 0)
    return tl.minimum(tl.maximum(x, 0), GELU_LIMIT) - gelu_tail(rest)


@triton.jit
def gelu_int8(x, multiplier, offset, shift, GUARD: tl.constexpr):
    """GELU in int8, with a step and a zero point for every channel."""
    return saturate((gelu(x) * multiplier + offset) >> shift, tl.int8, GUARD)


@triton.jit
def inverse_root(v, GUARD: tl.constexpr):
    """About ``2**44 / sqrt(v)`` for ``2**28 <= v < 2**30``, in int32."""
    x = ROOT_START - multiply_high(v << 1, v * 0 + ROOT_SLOPE, GUARD)
    for _ in tl.static_range(3):
        square = multiply_high(x << 1, x << 1, GUARD)
        error = (1 << 28) - multiply_high(square << 1, v << 1, GUARD)
        x = x + multiply_high(x, error << 3, GUARD)
    return x


@triton.jit
def row_constants(total, squares, channels, epsilon, GUARD: tl.constexpr):
    """What :func:`normalise` takes, of rows, from the sums of their channels (int32) and of these squared (int64).

    Products with ``factor`` may wrap round: the differences fit.
    """
    root, half = row_statistics(total, squares, channels, epsilon, GUARD)
    left = tl.maximum(8 - half, 0)
    return (total * 0 + channels) << left, total << left, root, tl.maximum(half - 8, 0)


@triton.jit
def row_statistics(total, squares, channels, epsilon, GUARD: tl.constexpr):
    """(root, k) of rows, from the sums of their channels (int32) and of these squared (int64).

    ``root`` is the inverse root of the variance, which had to be shifted right by ``2 k`` for it.
    """
    wide = total.to(tl.int64)
    variance = squares * channels - wide * wide + epsilon
    high = (variance >> 31).to(tl.int32)
    low = (variance & 0x7FFFFFFF).to(tl.int32)
    bits = tl.where(high > 0, 31 + bit_length(high, GUARD), bit_length(low, GUARD))
    half = (bits - 29) >> 1
    up = tl.maximum(-2 * half, 0).to(tl.int64)
    down = tl.maximum(2 * half, 0).to(tl.int64)
    v = ((variance << up) >> down).to(tl.int32)
    return inverse_root(tl.maximum(v, 1 << 28), GUARD), half


@triton.jit
def normalise(h, factor, total, root, shift, GUARD: tl.constexpr):
    """``channels * h - total`` over the deviation, with 20 fraction bits; all others of :func:`row_constants`."""
    return multiply_high(h * factor - total, root, GUARD) >> shift


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
