"""Quantisation in kernels: device functions with the bits of :mod:`qflash.quantization`."""

from __future__ import annotations

import math

import triton
import triton.language as tl

from ... import fixed_point as fp
from ...quantization import LARGEST_SCALE, SMALLEST_SCALE

SMALLEST = tl.constexpr(SMALLEST_SCALE)

LARGEST = tl.constexpr(LARGEST_SCALE)

# Added to a number this rounds it to nearest, ties to even, in its lowest bits: 1.5 * 2**23, and 1.5 * 2**52 for float64.
ROUND = tl.constexpr(12582912.0)

ROUND_WIDE = tl.constexpr(6755399441055744.0)

# log2(e) * 2**16 and the limit of quantize_bias
BIAS_UNIT = tl.constexpr(math.log2(math.e) * 2**fp.BIAS_FRACTION_BITS)

BIAS_LIMIT = tl.constexpr(float(fp.BIAS_LIMIT))

MOST_BIAS_MAXIMUM = tl.constexpr(fp.MOST_BIAS_MAXIMUM)

LEAST_EVEN_MAXIMUM = tl.constexpr(fp.LEAST_EVEN_MAXIMUM)

BIAS_MASKED = tl.constexpr(fp.BIAS_MASKED)

BIAS_EVEN = tl.constexpr(fp.BIAS_EVEN)

BIAS_POISON = tl.constexpr(fp.BIAS_POISON)

# minima and maxima of two 16-bit floats at a time; a NaN wins
MIN_F16 = tl.constexpr("min.NaN.f16x2 $0, $1, $2;")

MAX_F16 = tl.constexpr("max.NaN.f16x2 $0, $1, $2;")

MIN_BF16 = tl.constexpr("min.NaN.bf16x2 $0, $1, $2;")

MAX_BF16 = tl.constexpr("max.NaN.bf16x2 $0, $1, $2;")

# the same of magnitudes: of a 16-bit abs on halves of words that were packed, ptxas 12.8 makes a wrong one now and then
SIGNS_OFF = "{.reg .b32 a, b; and.b32 a, $1, 0x7fff7fff; and.b32 b, $2, 0x7fff7fff; "

MAX_ABS_F16 = tl.constexpr(SIGNS_OFF + "max.NaN.f16x2 $0, a, b;}")

MAX_ABS_BF16 = tl.constexpr(SIGNS_OFF + "max.NaN.bf16x2 $0, a, b;}")

# a Newton step on the device's estimate: correctly rounded as long as neither side is subnormal (tests/gpu: every scale)
RECIPROCAL = tl.constexpr(
    "{.reg .f32 e; rcp.approx.ftz.f32 $0, $1; neg.f32 e, $1; fma.rn.f32 e, e, $0, 0f3F800000; fma.rn.f32 $0, e, $0, $0;}"
)


@triton.jit
def nan_min(a, b):
    """The smaller of the two; NaN if either is."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def nan_max(a, b):
    """The larger of the two; NaN if either is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def lower(a, b, GUARD: tl.constexpr):
    """:func:`nan_min` of two tiles as they were loaded."""
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
    """:func:`nan_max` of two tiles as they were loaded."""
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
    """:func:`nan_max` of the magnitudes of two tiles as they were loaded."""
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
    """Minimum along an axis; NaN, or in the interpreter minus infinity, if there is a NaN."""
    if GUARD:
        # a reduction of one's own takes the interpreter a step an element; it ignores NaN in those it knows
        return tl.min(tl.where(x == x, x, float("-inf")), AXIS)
    return tl.reduce(x, AXIS, nan_min)


@triton.jit
def highest(x, AXIS: tl.constexpr, GUARD: tl.constexpr):
    """Maximum along an axis; NaN, or in the interpreter infinity, if there is a NaN."""
    if GUARD:
        return tl.max(tl.where(x == x, x, float("inf")), AXIS)
    return tl.reduce(x, AXIS, nan_max)


@triton.jit
def amplitude_to_scale(amplitude):
    """Equation 2's scale: amplitude * (1 / 127), 1 for zero, NaN where the amplitude is not finite."""
    scale = tl.minimum(tl.maximum(amplitude * (1.0 / 127.0), SMALLEST), LARGEST)
    scale = tl.where(amplitude == 0.0, 1.0, scale)
    return tl.where(amplitude < float("inf"), scale, float("nan"))


@triton.jit
def inverse_scale(scale, GUARD: tl.constexpr):
    """1 / scale, correctly rounded, for what :func:`amplitude_to_scale` returns."""
    if GUARD:
        inverse = tl.math.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    else:
        inverse = tl.inline_asm_elementwise(RECIPROCAL, "=&f,f", [scale], tl.float32, True, 1)
    return inverse


@triton.jit
def _rounded_product(x, inverse, GUARD: tl.constexpr):
    """The exact product x * inverse rounded to nearest even, plus ROUND; in the interpreter float64, plus ROUND_WIDE."""
    if GUARD:
        # the interpreter's fma rounds twice; float64 holds the product of two float32 exactly
        return x.to(tl.float64) * inverse.to(tl.float64) + ROUND_WIDE
    return tl.fma(x, inverse + tl.zeros(x.shape, tl.float32), tl.full(x.shape, ROUND, tl.float32))


@triton.jit
def round_to_int8(x, inverse, GUARD: tl.constexpr):
    """The exact product x * inverse rounded to nearest even, for a scale found on x itself: it stays within +-127."""
    rounded = _rounded_product(x, inverse, GUARD)
    return rounded.to(tl.int64 if GUARD else tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def to_int8(x, scale, GUARD: tl.constexpr):
    """Round x / scale to nearest even, saturated to [-128, 127]; 0 where the quotient is NaN."""
    if GUARD:
        inverse = inverse_scale(scale, True)
    else:
        inverse = tl.inline_asm_elementwise("rcp.rn.f32 $0, $1;", "=f,f", [scale], tl.float32, True, 1)
    scaled = _rounded_product(x, inverse, GUARD) - (ROUND_WIDE if GUARD else ROUND)
    scaled = tl.where(scaled == scaled, scaled, 0.0)
    return tl.minimum(tl.maximum(scaled, -128.0), 127.0).to(tl.int8)


@triton.jit
def bias_base(row_max):
    """What :func:`qflash.quantize_bias` takes off a row whose largest bias this is, and whether its keys share it evenly."""
    size = tl.abs(row_max)
    base = tl.where((size > MOST_BIAS_MAXIMUM) & (size < float("inf")), row_max, 0.0)
    return base, tl.abs(base) >= LEAST_EVEN_MAXIMUM


@triton.jit
def bias_to_fixed(bias, GUARD: tl.constexpr):
    """A float32 tile of biases, less their rows' bases, but for its marks: nats to 1/65536 octaves, NaN to 0."""
    scaled = tl.minimum(tl.maximum(bias * BIAS_UNIT, -BIAS_LIMIT), BIAS_LIMIT)
    if GUARD:
        scaled = tl.where(bias == bias, scaled, 0.0)
        return (scaled.to(tl.float64) + ROUND_WIDE).to(tl.int64, bitcast=True).to(tl.int32)
    return tl.inline_asm_elementwise("cvt.rni.s32.f32 $0, $1;", "=r,f", [scaled], tl.int32, True, 1)


@triton.jit
def magnitude(x):
    """|x|, with NaN as infinity so that a maximum cannot lose it."""
    return tl.where(x == x, tl.abs(x), float("inf"))


MOST_CHUNKS = 16

"""Chunks of a long head: few enough that every program can look at the ranges, or the sums, of all."""


def chunk_tokens(tokens: int, least: int) -> int:
    """Return how many tokens a chunk of a head takes: ``least``, or the power of two that makes no more than MOST_CHUNKS."""
    return max(least, triton.next_power_of_2(triton.cdiv(tokens, MOST_CHUNKS)))


CHUNKS = tl.constexpr(MOST_CHUNKS)
