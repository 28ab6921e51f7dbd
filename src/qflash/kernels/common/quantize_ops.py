"""Quantisation in kernels: ranges, scales, int8 values and fixed-point biases (Triton device functions).

Equations 1 and 2, step 1 of ``docs/algorithm.md``, with the bits of :mod:`qflash.specification.quantization`:

    scale = amplitude * (1 / 127)        value = round(x * (1 / scale)), ties to even, in [-128, 127]

and the conversion of a float bias to units of 1/65536 octaves (step 2). The functions work on tiles in registers, in any
layout. In order: ranges (:func:`lower`, :func:`higher`, :func:`lowest`, :func:`highest`), a scale
(:func:`amplitude_to_scale`, :func:`inverse_scale`), values (:func:`round_to_int8` or :func:`to_int8`).

A NaN has to reach the scale, so minima and maxima propagate it. Ranges of 16-bit floats are found on the numbers as
they were loaded, two per instruction; only what is left is widened to float32. Rounding adds 1.5 * 2**23, which moves
the integer into the low bits of the float: one fused multiply-add, and no conversion instruction. ``GUARD`` is true in
Triton's interpreter, which has no inline assembly and whose fma rounds twice.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from ...specification import fixed_point as fp
from ...specification import quantization

SMALLEST = tl.constexpr(quantization.SMALLEST_SCALE)
LARGEST = tl.constexpr(quantization.LARGEST_SCALE)
CENTERED_AMPLITUDE = tl.constexpr(quantization.CENTERED_AMPLITUDE)
MOST_ZERO_POINT = tl.constexpr(quantization.MOST_ZERO_POINT)

# 1.5 * 2**23, and 1.5 * 2**52 for float64: a number plus this is rounded to nearest, ties to even, and has the integer in its
# lowest bits.
ROUND = tl.constexpr(12582912.0)
ROUND_WIDE = tl.constexpr(6755399441055744.0)

# nats to units of 1/65536 octaves, and the limit of a fixed-point bias in these units
BIAS_UNIT = tl.constexpr(math.log2(math.e) * 2**fp.BIAS_FRACTION_BITS)
BIAS_LIMIT = tl.constexpr(float(fp.BIAS_LIMIT))
MOST_BIAS_MAXIMUM = tl.constexpr(fp.MOST_BIAS_MAXIMUM)
LEAST_EVEN_MAXIMUM = tl.constexpr(fp.LEAST_EVEN_MAXIMUM)
BIAS_MASKED = tl.constexpr(fp.BIAS_MASKED)
BIAS_EVEN = tl.constexpr(fp.BIAS_EVEN)
BIAS_POISON = tl.constexpr(fp.BIAS_POISON)

# minima and maxima of two 16-bit floats per instruction; the result is NaN if an operand is
MIN_F16 = tl.constexpr("min.NaN.f16x2 $0, $1, $2;")
MAX_F16 = tl.constexpr("max.NaN.f16x2 $0, $1, $2;")
MIN_BF16 = tl.constexpr("min.NaN.bf16x2 $0, $1, $2;")
MAX_BF16 = tl.constexpr("max.NaN.bf16x2 $0, $1, $2;")

# The same for magnitudes, on whole words: ptxas 12.8 sometimes miscompiles a 16-bit abs of a half of a packed word.
SIGNS_OFF = "{.reg .b32 a, b; and.b32 a, $1, 0x7fff7fff; and.b32 b, $2, 0x7fff7fff; "
MAX_ABS_F16 = tl.constexpr(SIGNS_OFF + "max.NaN.f16x2 $0, a, b;}")
MAX_ABS_BF16 = tl.constexpr(SIGNS_OFF + "max.NaN.bf16x2 $0, a, b;}")

# One Newton step on rcp.approx: correctly rounded as long as neither side is subnormal (tests/gpu checks every scale).
RECIPROCAL = tl.constexpr(
    "{.reg .f32 e; rcp.approx.ftz.f32 $0, $1; neg.f32 e, $1; fma.rn.f32 e, e, $0, 0f3F800000; fma.rn.f32 $0, e, $0, $0;}"
)


@triton.jit
def nan_min(a, b):
    """Elementwise minimum of float tiles; NaN if either is."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def nan_max(a, b):
    """Elementwise maximum of float tiles; NaN if either is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def lower(a, b, GUARD: tl.constexpr):
    """:func:`nan_min` of two tiles in the dtype they were loaded in (float32 in the interpreter); 16-bit floats by twos."""
    if GUARD:
        result = nan_min(a.to(tl.float32), b.to(tl.float32))
    elif a.dtype == tl.float16:
        result = tl.inline_asm_elementwise(MIN_F16, "=r,r,r", [a, b], tl.float16, True, 2)
    elif a.dtype == tl.bfloat16:
        result = tl.inline_asm_elementwise(MIN_BF16, "=r,r,r", [a, b], tl.bfloat16, True, 2)
    else:
        result = nan_min(a, b)
    return result


@triton.jit
def higher(a, b, GUARD: tl.constexpr):
    """:func:`nan_max` of two tiles in the dtype they were loaded in (float32 in the interpreter); 16-bit floats by twos."""
    if GUARD:
        result = nan_max(a.to(tl.float32), b.to(tl.float32))
    elif a.dtype == tl.float16:
        result = tl.inline_asm_elementwise(MAX_F16, "=r,r,r", [a, b], tl.float16, True, 2)
    elif a.dtype == tl.bfloat16:
        result = tl.inline_asm_elementwise(MAX_BF16, "=r,r,r", [a, b], tl.bfloat16, True, 2)
    else:
        result = nan_max(a, b)
    return result


@triton.jit
def higher_magnitude(a, b, GUARD: tl.constexpr):
    """:func:`nan_max` of the magnitudes of two tiles in the dtype they were loaded in (float32 in the interpreter)."""
    if GUARD:
        result = nan_max(tl.abs(a.to(tl.float32)), tl.abs(b.to(tl.float32)))
    elif a.dtype == tl.float16:
        result = tl.inline_asm_elementwise(MAX_ABS_F16, "=r,r,r", [a, b], tl.float16, True, 2)
    elif a.dtype == tl.bfloat16:
        result = tl.inline_asm_elementwise(MAX_ABS_BF16, "=r,r,r", [a, b], tl.bfloat16, True, 2)
    else:
        result = nan_max(tl.abs(a), tl.abs(b))
    return result


@triton.jit
def lowest(x, AXIS: tl.constexpr, GUARD: tl.constexpr):
    """Minimum along an axis. With a NaN it is NaN, or minus infinity in the interpreter: either makes the range unusable."""
    if GUARD:
        # the interpreter runs a custom reduction element by element, and its built-in ones ignore NaN
        return tl.min(tl.where(x == x, x, float("-inf")), AXIS)
    return tl.reduce(x, AXIS, nan_min)


@triton.jit
def highest(x, AXIS: tl.constexpr, GUARD: tl.constexpr):
    """Maximum along an axis. With a NaN it is NaN, or infinity in the interpreter: either makes the range unusable."""
    if GUARD:
        return tl.max(tl.where(x == x, x, float("inf")), AXIS)
    return tl.reduce(x, AXIS, nan_max)


@triton.jit
def amplitude_to_scale(amplitude):
    """Equation 2's scale, float32: amplitude * (1 / 127), 1 for an amplitude of 0, NaN for one that is not finite."""
    scale = tl.minimum(tl.maximum(amplitude * (1.0 / 127.0), SMALLEST), LARGEST)
    scale = tl.where(amplitude == 0.0, 1.0, scale)
    return tl.where(amplitude < float("inf"), scale, float("nan"))


@triton.jit
def centered_scale(low, high):
    """(midrange, least scale) of channels from their ranges, float32, as in :func:`.quantization.quantize_centered`."""
    middle = low * 0.5 + high * 0.5
    half = (high * 0.5 - low * 0.5) * (1.0 / CENTERED_AMPLITUDE)
    # a NaN, or infinite ends, makes half NaN or infinite, which a maximum must keep
    return middle, tl.maximum(half, tl.abs(middle) * (1.0 / MOST_ZERO_POINT), propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def least_to_scale(least):
    """The scale from a least scale: 1 for 0, NaN for one that is not finite."""
    scale = tl.where(least == 0.0, 1.0, tl.minimum(tl.maximum(least, SMALLEST), LARGEST))
    return tl.where(least < float("inf"), scale, float("nan"))


@triton.jit
def value_scale(most, CENTER: tl.constexpr):
    """Scales of values from their largest magnitudes, or with CENTER from the least scales that their ranges need."""
    if CENTER:
        scale = least_to_scale(most)
    else:
        scale = amplitude_to_scale(most)
    return scale


@triton.jit
def key_magnitudes(low, high, inside, CENTER: tl.constexpr):
    """(midranges, magnitudes) of keys' channels from their ranges; with CENTER magnitudes are of keys less midranges.

    Both are 0 for channels that are not ``inside``.
    """
    middle = tl.where(inside, low * 0.5 + high * 0.5, 0.0)
    if CENTER:
        low -= middle
        high -= middle
    return middle, tl.where(inside, tl.maximum(magnitude(low), magnitude(high)), 0.0)


@triton.jit
def value_magnitudes(low, high, inside, CENTER: tl.constexpr):
    """(midranges, what :func:`value_scale` takes) of values' channels from their ranges; without CENTER any midranges.

    Channels that are not ``inside`` count as zeros.
    """
    if CENTER:
        middle, most = centered_scale(tl.where(inside, low, 0.0), tl.where(inside, high, 0.0))
    else:
        middle, most = low, tl.where(inside, tl.maximum(magnitude(low), magnitude(high)), 0.0)
    return middle, most


@triton.jit
def zero_point(middle, inverse, GUARD: tl.constexpr):
    """The midrange in whole steps, float32."""
    if GUARD:
        zero = (_rounded_product(middle, inverse, True) - ROUND_WIDE).to(tl.float32)
    else:
        zero = _rounded_product(middle, inverse, False) - ROUND
    return zero


@triton.jit
def round_centered(x, inverse, zero, GUARD: tl.constexpr):
    """x * inverse - zero as int8, rounded once to nearest even. No clamp: with a scale found on x itself it stays in range."""
    if GUARD:
        rounded = x.to(tl.float64) * inverse.to(tl.float64) - zero.to(tl.float64) + ROUND_WIDE
        return rounded.to(tl.int64, bitcast=True).to(tl.int8)
    spread = tl.zeros(x.shape, tl.float32)
    return tl.fma(x, inverse + spread, (ROUND - zero) + spread).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def inverse_scale(scale, GUARD: tl.constexpr):
    """1 / scale, float32, correctly rounded, for what :func:`amplitude_to_scale` returns."""
    if GUARD:
        inverse = tl.math.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    else:
        inverse = tl.inline_asm_elementwise(RECIPROCAL, "=&f,f", [scale], tl.float32, True, 1)
    return inverse


@triton.jit
def _rounded_product(x, inverse, GUARD: tl.constexpr):
    """x * inverse rounded once to nearest even, plus ROUND (float32); in the interpreter float64, plus ROUND_WIDE."""
    if GUARD:
        # the interpreter's fma rounds twice; float64 holds the product of two float32 exactly
        return x.to(tl.float64) * inverse.to(tl.float64) + ROUND_WIDE
    return tl.fma(x, inverse + tl.zeros(x.shape, tl.float32), tl.full(x.shape, ROUND, tl.float32))


@triton.jit
def round_to_int8(x, inverse, GUARD: tl.constexpr):
    """x * inverse as int8, rounded to nearest even. No clamp: with a scale found on x itself it stays within +-127."""
    rounded = _rounded_product(x, inverse, GUARD)
    return rounded.to(tl.int64 if GUARD else tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def to_int8(x, scale, GUARD: tl.constexpr):
    """x / scale as int8, rounded to nearest even and saturated to [-128, 127], for any given scale; 0 for a NaN."""
    if GUARD:
        inverse = inverse_scale(scale, True)
    else:
        inverse = tl.inline_asm_elementwise("rcp.rn.f32 $0, $1;", "=f,f", [scale], tl.float32, True, 1)
    scaled = _rounded_product(x, inverse, GUARD) - (ROUND_WIDE if GUARD else ROUND)
    scaled = tl.where(scaled == scaled, scaled, 0.0)
    return tl.minimum(tl.maximum(scaled, -128.0), 127.0).to(tl.int8)


@triton.jit
def bias_base(row_max):
    """(base, even) of a row whose largest bias is ``row_max`` (float32, nats), as in :func:`qflash.quantize_bias`.

    ``base`` is subtracted from the row's biases: ``row_max`` if it is further than 1024 from 0, else 0. ``even`` says
    that it is so large (2**64 and more) that scores count for nothing beside it: the keys that have it share the row
    evenly.
    """
    size = tl.abs(row_max)
    base = tl.where((size > MOST_BIAS_MAXIMUM) & (size < float("inf")), row_max, 0.0)
    return base, tl.abs(base) >= LEAST_EVEN_MAXIMUM


@triton.jit
def bias_to_fixed(bias, GUARD: tl.constexpr):
    """Float32 biases less their bases, in nats, as int32 in 1/65536 octaves, clamped; NaN gives any. It sets no marks."""
    scaled = tl.minimum(tl.maximum(bias * BIAS_UNIT, -BIAS_LIMIT), BIAS_LIMIT)
    if GUARD:
        scaled = tl.where(bias == bias, scaled, 0.0)
        return (scaled.to(tl.float64) + ROUND_WIDE).to(tl.int64, bitcast=True).to(tl.int32)
    return tl.inline_asm_elementwise("cvt.rni.s32.f32 $0, $1;", "=r,f", [scaled], tl.int32, True, 1)


@triton.jit
def magnitude(x):
    """|x|, and infinity for NaN, so that a maximum that ignores NaN cannot lose it."""
    return tl.where(x == x, tl.abs(x), float("inf"))


MOST_CHUNKS = 16
"""Most chunks of tokens of a head: few enough that every program can read the ranges, or the sums, of all of them."""


def chunk_tokens(tokens: int, least: int) -> int:
    """Return the tokens of a chunk: ``least``, or the power of two that makes at most MOST_CHUNKS chunks of a head."""
    return max(least, triton.next_power_of_2(triton.cdiv(tokens, MOST_CHUNKS)))


CHUNKS = tl.constexpr(MOST_CHUNKS)
