"""Fixed-point arithmetic: scales to multipliers, scores to probabilities, sums to outputs (Triton device functions).

The integer counterpart of Equations 5 to 8 and 12 to 14 and of Algorithm 1, step 11: steps 2, 4, 7, 8 and 9 of
``docs/algorithm.md``. Every function returns the bits of its namesake in :mod:`qflash.specification.fixed_point`, which is the
specification and states the bounds.

Everything is elementwise: a function works on scalars, on one number per row or per channel, or on a tile of scores, in
whatever layout it gets, in registers only. In the order in which a kernel uses them:

1. scales: :func:`split_scale`, :func:`combine_scales`, :func:`narrow_multiplier` or :func:`wide_multiplier`, once per row;
2. probabilities: :func:`exponent_offset`, :func:`probability_word`, once per score;
3. :func:`release_factor`, once per row and block of keys, for ``normalization="online"`` only;
4. outputs: :func:`row_inverse` once per row, :func:`output_multiplier` once per channel, :func:`requantize` per element.

Scales come as the bits of float32 in an int32. Nothing here is a float operation, except :func:`row_weight`, which serves
float outputs. ``GUARD`` is true in Triton's interpreter: it has no inline assembly, and a shift by 32 or more is undefined
there. On a GPU the PTX shifts clamp the amount. Inline assembly stands where the compiler's own code has more instructions.
"""

import triton
import triton.language as tl

from ...specification import fixed_point as fp

MAX_FRACTION_BITS = tl.constexpr(fp.MAX_FRACTION_BITS)

# more + ((a b + 2**31) >> 32): one multiply-add of 64 bits, whose high half alone is kept. Written as mad.wide.s32 it would be
# three instructions.
MULTIPLY_ROUND = tl.constexpr("""{.reg .b64 a, b;
mov.b64 b, {0x80000000, $3};
mul.wide.s32 a, $1, $2;
add.s64 a, a, b;
shr.s64 a, a, 32;
cvt.u32.u64 $0, a;}""")
# An output, rounded: (product + rounding) >> shift in 64 bits. ptxas turns it into one multiply-add of 64 bits and one funnel
# shift; written as mad.wide.s32 it would split it again.
ROUND = tl.constexpr("""{.reg .b64 a;
mul.wide.s32 a, $1, $2;
add.s64 a, a, $3;
shr.s64 a, a, $4;
cvt.u32.u64 $0, a;}""")
# The same where each channel has its own rounding, complemented: (~half - high half of the product) >> shift. As a sum, ptxas
# would fuse it with the product, whose addend is a pair of registers: two moves per element.
ROUND_COMPLEMENT = tl.constexpr("{.reg .b32 a; mul.hi.s32 a, $1, $2; sub.s32 a, $3, a; shr.s32 $0, a, $4;}")
# four 32-bit integers -> four int8 in a word, saturated
SATURATE = tl.constexpr("""{.reg .b32 a;
cvt.pack.sat.s8.s32.b32 a, $4, $3, 0;
cvt.pack.sat.s8.s32.b32 $0, $2, $1, a;}""")
# four 32-bit integers -> the complements of four saturated int8 in a word
SATURATE_COMPLEMENT = tl.constexpr("""{.reg .b32 a;
cvt.pack.sat.s8.s32.b32 a, $4, $3, 0;
cvt.pack.sat.s8.s32.b32 a, $2, $1, a;
not.b32 $0, a;}""")


@triton.jit
def shift_right(x, amount, GUARD: tl.constexpr):
    """Logical right shift of a non-negative 32-bit integer; 0 for amounts of 32 and more."""
    if GUARD:
        return x >> tl.minimum(amount, 31)
    return tl.inline_asm_elementwise("shr.b32 $0, $1, $2;", "=r,r,r", [x, amount], tl.int32, True, 1)


@triton.jit
def shift_left(x, amount, GUARD: tl.constexpr):
    """Left shift of 32 bits, wrapping; 0 for amounts of 32 and more."""
    if GUARD:
        return tl.where(amount > 31, 0, x << tl.minimum(amount, 31))
    return tl.inline_asm_elementwise("shl.b32 $0, $1, $2;", "=r,r,r", [x, amount], tl.int32, True, 1)


@triton.jit
def multiply_high(a, b, GUARD: tl.constexpr):
    """The high 32 bits of the signed 64-bit product. One instruction; the plain form compiles to three."""
    if GUARD:
        return ((a.to(tl.int64) * tl.cast(b, tl.int64)) >> 32).to(tl.int32)
    return tl.inline_asm_elementwise("mul.hi.s32 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, True, 1)


@triton.jit
def multiply_round(a, b, GUARD: tl.constexpr, more=0):
    """``more + ((a * b + 2**31) >> 32)`` of a signed 64-bit product. One instruction."""
    if GUARD:
        return more + ((a.to(tl.int64) * tl.cast(b, tl.int64) + (1 << 31)) >> 32).to(tl.int32)
    return tl.inline_asm_elementwise(MULTIPLY_ROUND, "=r,r,r,r", [a, b, more], tl.int32, True, 1)


@triton.jit
def split_scale(bits):
    """(mantissa, exponent) of float32 bits: the scale is ``mantissa * 2**exponent``, with 24 bits of mantissa."""
    return (bits & 0x7FFFFF) | 0x800000, ((bits >> 23) & 0xFF) - 150


@triton.jit
def usable_scale(bits):
    """Whether the float32 with these bits is positive and finite."""
    return (bits > 0) & (bits < 0x7F800000)


@triton.jit
def combine_scales(query_bits, key_mantissa, key_exponent, constant_mantissa, constant_exponent):
    """(R, E): ``s = R * 2**-E`` of query scale, key scale and ``scale * log2(e)``; R is in [2**30, 2**31).

    s is a score unit in octaves. Integer products only; R is right to 2**-21 of itself.
    """
    query_mantissa, query_exponent = split_scale(query_bits)
    product = (key_mantissa.to(tl.int64) * constant_mantissa.to(tl.int64)) >> 22
    product = ((product * query_mantissa.to(tl.int64)) >> 22) << 3
    extra = tl.where(product < 1 << 30, 1, 0) + tl.where(product < 1 << 29, 1, 0)
    exponent = query_exponent + key_exponent + constant_exponent + 44 - 3 - extra
    return (product << extra.to(tl.int64)).to(tl.int32), -exponent


@triton.jit
def narrow_multiplier(mantissa, exponent, MOST: tl.constexpr, MOST_BITS: tl.constexpr, GUARD: tl.constexpr):
    """(M, F) for one key scale per head: ``M = round(s * 2**F) <= MOST``, with the largest such F up to 24.

    A score then costs one 32-bit multiply-add, ``(m - S) * M``, in octaves with F fraction bits. MOST is 57344 //
    head_dim (half of it with a bias), which keeps that product below 2**31; MOST_BITS is its bit length.
    """
    SHIFT: tl.constexpr = 31 - MOST_BITS
    rounded = ((mantissa >> (SHIFT - 1)) + 1) >> 1
    shift = SHIFT + tl.where(rounded > MOST, 1, 0)
    fraction = exponent - shift
    shift = tl.minimum(shift + tl.maximum(fraction - MAX_FRACTION_BITS, 0), 33)
    rounded = (shift_right(mantissa, shift - 1, GUARD) + 1) >> 1
    return tl.where(fraction < 0, MOST, rounded), tl.minimum(tl.maximum(fraction, 0), MAX_FRACTION_BITS)


@triton.jit
def wide_multiplier(mantissa, exponent, COLUMN_BITS: tl.constexpr, MOST_FRACTION_BITS: tl.constexpr):
    """(R, F) for a key scale per token: ``mulhi(m - y, R)``, ``y = S * A``, is in octaves with F fraction bits."""
    fraction = exponent + (COLUMN_BITS - 32)
    excess = tl.minimum(tl.maximum(fraction - MOST_FRACTION_BITS, 0), 31)
    multiplier = tl.where(fraction < 0, 0x7FFFFFFF, mantissa >> excess)
    return multiplier, tl.minimum(tl.maximum(fraction, 0), MOST_FRACTION_BITS)


@triton.jit
def column_multiplier(bits, largest_exponent, COLUMN_BITS: tl.constexpr):
    """A: a key token's scale in units of ``2**(24 + largest_exponent)``, with COLUMN_BITS fraction bits, at most 1."""
    mantissa, exponent = split_scale(bits)
    shift = tl.minimum((24 - COLUMN_BITS) + largest_exponent - exponent, 31)
    return ((mantissa >> (shift - 1)) + 1) >> 1


@triton.jit
def exponent_offset(OFFSET: tl.constexpr, fraction_bits):
    """The offset t0, OFFSET / 512 octaves, with ``fraction_bits`` fraction bits, rounded up."""
    exact = OFFSET << tl.maximum(fraction_bits - 9, 0)
    return tl.where(fraction_bits >= 9, exact, ((OFFSET << tl.minimum(fraction_bits, 9)) + 511) >> 9)


@triton.jit
def probability_word(
    octaves, mantissa, QUADRATIC: tl.constexpr, BITS: tl.constexpr, NEAREST: tl.constexpr, GUARD: tl.constexpr
):
    """An unnormalised probability in the top bits of an int32, so that a byte permutation takes it without a shift.

    For 8 bits byte 3 is 127 - P, for 7 bits P; for 15 bits bytes 3 and 2 are P. ``mantissa`` is ``g = 511 - f``, f the
    8-bit fraction of the exponent (Equations 7 and 8 when linear, a parabola when QUADRATIC); ``octaves`` its whole
    part, q. The shift left is a product, because the GPU fuses that with the addition of rounding and offset. Where 8 bits
    are rounded, the upper half of the word is ``0x7F7F - floor(256 P)`` of the exact P: :func:`fine_part` reads it.
    """
    if QUADRATIC:
        exp2 = mantissa * mantissa + (1 << 17)
    else:
        exp2 = (mantissa + 1) * ((1 << BITS) - 1)
    UP: tl.constexpr = (14 if BITS == 8 else 13) if QUADRATIC else (7 if BITS == 15 else 15)
    if BITS == 15:
        wide = (exp2 << UP).to(tl.uint32, bitcast=True)
        value = (wide >> tl.minimum(octaves, 31).to(tl.uint32, bitcast=True)).to(tl.int32, bitcast=True)
        return value + (0x8000 if NEAREST else 0)
    value = shift_right(exp2, octaves, GUARD)
    if BITS == 8:
        # 127 - P fits int8, and so does the -127 that cancels the offset later (-128 would not); the constant carries the sign
        LESS: tl.constexpr = 2147483647 - (1 << 23 if NEAREST else 0)
        return value * -(1 << UP) + LESS
    OFFSET: tl.constexpr = 1 << 23 if NEAREST else 0
    return value * (1 << UP) + OFFSET


@triton.jit
def fine_sum(high, low, count):
    """The sum of ``count`` probabilities before rounding, with 7 fraction bits, from those of the bytes of their words.

    ``high`` is the sum of bytes 3, 127 - P; ``low`` that of bytes 2, their lowest bit set, less 128. The sum of the upper
    halves, with that bit, is ``0x7F7F * count`` less twice the result. It fits 32 bits without a sign; of 64-bit
    arguments it has 64 bits.
    """
    twice = 0x7EFF * count - 256 * high - low
    if twice.dtype == tl.int64:
        fine = twice >> 1
    else:
        fine = (twice.to(tl.uint32, bitcast=True) >> 1).to(tl.int32, bitcast=True)
    return fine


@triton.jit
def missing_mass(fine, rounded):
    """(L, rho) of rows: the sum that outputs are divided by, 7 fraction bits, and what the mean of V gets, in units of 2 P.

    ``fine`` and ``rounded`` are the sums of probabilities before and after rounding. Where rounding added mass, nothing is
    missing.
    """
    total = tl.maximum(fine, rounded << 7)
    return total, (total - (rounded << 7)) >> 8


@triton.jit
def twice_mean(sums, inverse_count, GUARD: tl.constexpr):
    """Twice the mean of V's channels from their sums over all keys, rounded; ``inverse_count`` is ``2**31 / keys``."""
    return (multiply_high(sums << 3, inverse_count, GUARD) + 1) >> 1


@triton.jit
def inverse_of_count(keys):
    """:func:`.specification.fixed_point.inverse_count` of a number of keys that only the GPU knows; of 0 keys that of 1."""
    return tl.minimum((1 << 31) // tl.maximum(keys, 1).to(tl.int64), 0x7FFFFFFF).to(tl.int32)


@triton.jit
def fine_bits(bits):
    """The bit length of a row sum with 7 fraction bits turned into that of its integer part; 0 stays 0."""
    return tl.maximum(bits - 7, 0)


@triton.jit
def fused_multiply_add(a, b, c, GUARD: tl.constexpr):
    """a * b + c of float32, rounded once like :func:`.fixed_point.fused_multiply_add`; the interpreter's rounds twice."""
    if GUARD:
        product = a.to(tl.float64) * b.to(tl.float64)
        addend = c.to(tl.float64)
        total = product + addend
        part = total - product
        error = (product - (total - part)) + (addend - part)
        bits = total.to(tl.int64, bitcast=True)
        inexact = (error != 0.0) & (tl.abs(total) < float("inf")) & ((bits & 1) == 0)
        step = tl.where((error > 0.0) == (total > 0.0), 1, -1).to(tl.int64)
        return (bits + tl.where(inexact, step, 0)).to(tl.float64, bitcast=True).to(tl.float32)
    return tl.fma(a, b, c)


@triton.jit
def release_factor(step, fraction_bits, GUARD: tl.constexpr):
    """ScaleRelease's factor 2**-step (Equations 12 to 14), 24 fraction bits; ``step`` is in octaves, ``fraction_bits``."""
    octaves = step >> fraction_bits
    fraction = (shift_left(step, 32 - fraction_bits, GUARD) >> 24) & 255
    return shift_right((512 - fraction) << 15, octaves, GUARD)


@triton.jit
def bit_length(x, GUARD: tl.constexpr):
    """Bit length of ``0 <= x < 2**31``: 32 less the leading zeros; a binary search in the interpreter."""
    if not GUARD:
        return 32 - tl.inline_asm_elementwise("clz.b32 $0, $1;", "=r,r", [x], tl.int32, True, 1)
    length = x * 0
    for index in tl.static_range(5):
        step = 16 >> index
        big = x >= (1 << step)
        length = tl.where(big, length + step, length)
        x = tl.where(big, x >> step, x)
    return length + x


@triton.jit
def reciprocal(divisor, GUARD: tl.constexpr):
    """About ``2**60 / divisor``, divisor in [2**30, 2**31), to a relative 2**-28: a linear start, three Newton steps."""
    x = 1515870810 - multiply_round(divisor, 2021161080, GUARD)
    for _ in tl.static_range(3):
        error = (1 << 28) - multiply_round(divisor, x, GUARD)
        x = multiply_round(x, error << 4, GUARD, x)
    return x


@triton.jit
def row_inverse(denominator, GUARD: tl.constexpr):
    """(B, x) of a row sum l: ``1 / l`` is about ``x * 2**-(29 + B)``, B the bit length of l. For l = 0 x is harmless."""
    bits = bit_length(denominator, GUARD)
    safe = tl.maximum(denominator, 1)
    return bits, reciprocal(safe << (31 - tl.maximum(bits, 1)), GUARD)


@triton.jit
def wide_row_inverse(denominator, GUARD: tl.constexpr):
    """:func:`row_inverse` of an int64 below 2**62: its upper 31 bits count."""
    above = bit_length((denominator >> 31).to(tl.int32), GUARD)
    bits, inverse = row_inverse((denominator >> above.to(tl.int64)).to(tl.int32), GUARD)
    return bits + above, inverse


@triton.jit
def left_aligned(numerator, bits):
    """``numerator * 2**(24 - bits)`` of an int64 numerator, floored: int32, as it is less than 128 times the denominator."""
    left, right = tl.maximum(24 - bits, 0).to(tl.int64), tl.maximum(bits - 24, 0).to(tl.int64)
    return ((numerator << left) >> right).to(tl.int32)


@triton.jit
def row_weight(inverse, bits):
    """1 / row sum as float32, ``inverse * 2**-(29 + bits)`` with :func:`row_inverse`'s integers; for float outputs."""
    return inverse.to(tl.float32) * ((98 - bits) << 23).to(tl.float32, bitcast=True)


@triton.jit
def output_multiplier(value_bits, output_bits, GUARD: tl.constexpr):
    """(R, shift) of value scale / output scale: 31 bits of mantissa, and a right shift (0 to 31) for :func:`requantize`."""
    value, value_exponent = split_scale(value_bits)
    output, output_exponent = split_scale(output_bits)
    ratio = multiply_high(value << 7, reciprocal(output << 7, GUARD), GUARD) << 2
    small = ratio < (1 << 30)
    exponent = 30 - (value_exponent - output_exponent) + tl.where(small, 1, 0)
    return tl.where(small, ratio << 1, ratio), tl.minimum(tl.maximum(exponent - 11, 0), 31)


@triton.jit
def half_of(shift):
    """The addend that makes a right shift round half up: ``2**(shift - 1)``, or 0 for no shift."""
    return tl.where(shift > 0, 1 << tl.maximum(shift - 1, 0), 0)


@triton.jit
def requantize(numerator, multiplier, bits, shift, half, SIGN: tl.constexpr, GUARD: tl.constexpr):
    """int8 outputs, rounded half up and saturated, of SIGN (1 or -1) times numerators; ``bits`` is the row sum's length.

    The result is ``(mulhi(SIGN * numerator << (24 - bits), multiplier) + half) >> shift``. Rounding down twice is
    rounding down once. So on a GPU the low half of the product, and the left shift before it, are dropped by the last
    shift only: one 64-bit multiply-add and one funnel shift per element.
    """
    scaled = numerator * (SIGN << (24 - bits))
    if GUARD:
        rounded = (multiply_high(scaled, multiplier, GUARD) + half) >> shift
        return tl.minimum(tl.maximum(rounded, -128), 127).to(tl.int8)
    if half.type.is_block():
        x = tl.inline_asm_elementwise(ROUND_COMPLEMENT, "=r,r,r,r,r", [scaled, multiplier, ~half, shift], tl.int32, True, 1)
        return tl.inline_asm_elementwise(SATURATE_COMPLEMENT, "=r,r,r,r,r", [x], tl.int8, True, 4)
    down = bits + 8
    up = half.to(tl.int64) << down
    x = tl.inline_asm_elementwise(ROUND, "=r,r,r,l,r", [numerator, multiplier * SIGN, up, down + shift], tl.int32, True, 1)
    return tl.inline_asm_elementwise(SATURATE, "=r,r,r,r,r", [x], tl.int8, True, 4)
