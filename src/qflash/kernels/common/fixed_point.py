"""The fixed-point arithmetic of :mod:`qflash.fixed_point`, as Triton functions that give the same bits.

Scales arrive as the raw bits of float32 (int32); nothing here is a float operation. ``GUARD`` is true in
Triton's interpreter, where inline assembly does not exist and a shift by 32 or more is undefined; on a GPU
the PTX shifts clamp.
"""

import triton
import triton.language as tl

from ... import fixed_point as fp

MAX_FRACTION_BITS = tl.constexpr(fp.MAX_FRACTION_BITS)

# An output rounded: product and rounding in one multiply-add of 64 bits, of which a funnel shift takes what is wanted. Written
# as mad.wide the assembler takes it apart.
ROUND = tl.constexpr("""{.reg .b64 a;
mul.wide.s32 a, $1, $2;
add.s64 a, a, $3;
shr.s64 a, a, $4;
cvt.u32.u64 $0, a;}""")
# The same with a rounding for each channel, complemented: (~half - product's high half) >> shift. As a sum the assembler would
# fuse it with the product, whose addend is a pair of registers: two moves an element.
ROUND_COMPLEMENT = tl.constexpr("{.reg .b32 a; mul.hi.s32 a, $1, $2; sub.s32 a, $3, a; shr.s32 $0, a, $4;}")
# four 32-bit integers -> four bytes, saturating
SATURATE = tl.constexpr("""{.reg .b32 a;
cvt.pack.sat.s8.s32.b32 a, $4, $3, 0;
cvt.pack.sat.s8.s32.b32 $0, $2, $1, a;}""")
# and their complements
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
def shift_right_signed(x, amount, GUARD: tl.constexpr):
    """Arithmetic right shift of a 32-bit integer; 0 or -1 for amounts of 32 and more."""
    if GUARD:
        return x >> tl.minimum(amount, 31)
    return tl.inline_asm_elementwise("shr.s32 $0, $1, $2;", "=r,r,r", [x, amount], tl.int32, True, 1)


@triton.jit
def shift_left(x, amount, GUARD: tl.constexpr):
    """Left shift of 32 bits, wrapping; 0 for amounts of 32 and more."""
    if GUARD:
        return tl.where(amount > 31, 0, x << tl.minimum(amount, 31))
    return tl.inline_asm_elementwise("shl.b32 $0, $1, $2;", "=r,r,r", [x, amount], tl.int32, True, 1)


@triton.jit
def multiply_high(a, b, GUARD: tl.constexpr):
    """High 32 bits of the signed 64-bit product: one instruction, where the plain form takes three."""
    if GUARD:
        return ((a.to(tl.int64) * tl.cast(b, tl.int64)) >> 32).to(tl.int32)
    return tl.inline_asm_elementwise("mul.hi.s32 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, True, 1)


@triton.jit
def split_scale(bits):
    """float32 bits -> 24-bit mantissa, exponent."""
    return (bits & 0x7FFFFF) | 0x800000, ((bits >> 23) & 0xFF) - 150


@triton.jit
def usable_scale(bits):
    """Whether the float32 with these bits is positive and finite."""
    return (bits > 0) & (bits < 0x7F800000)


@triton.jit
def combine_scales(query_bits, key_mantissa, key_exponent, constant_mantissa, constant_exponent):
    """``s = R * 2**-E`` of query scale, key scale and the host constant; R in [2**30, 2**31)."""
    query_mantissa, query_exponent = split_scale(query_bits)
    product = (key_mantissa.to(tl.int64) * constant_mantissa.to(tl.int64)) >> 22
    product = ((product * query_mantissa.to(tl.int64)) >> 22) << 3
    extra = tl.where(product < 1 << 30, 1, 0) + tl.where(product < 1 << 29, 1, 0)
    exponent = query_exponent + key_exponent + constant_exponent + 44 - 3 - extra
    return (product << extra.to(tl.int64)).to(tl.int32), -exponent


@triton.jit
def narrow_multiplier(mantissa, exponent, MOST: tl.constexpr, MOST_BITS: tl.constexpr, GUARD: tl.constexpr):
    """(M, F): one 32-bit multiply-add a score. MOST is 57344 // head_dim, MOST_BITS its bit length."""
    SHIFT: tl.constexpr = 31 - MOST_BITS
    rounded = ((mantissa >> (SHIFT - 1)) + 1) >> 1
    shift = SHIFT + tl.where(rounded > MOST, 1, 0)
    fraction = exponent - shift
    shift = tl.minimum(shift + tl.maximum(fraction - MAX_FRACTION_BITS, 0), 33)
    rounded = (shift_right(mantissa, shift - 1, GUARD) + 1) >> 1
    return tl.where(fraction < 0, MOST, rounded), tl.minimum(tl.maximum(fraction, 0), MAX_FRACTION_BITS)


@triton.jit
def wide_multiplier(mantissa, exponent, COLUMN_BITS: tl.constexpr, MOST_FRACTION_BITS: tl.constexpr):
    """(R, F): one multiply-high a score of ``y = S * A``."""
    fraction = exponent + (COLUMN_BITS - 32)
    excess = tl.minimum(tl.maximum(fraction - MOST_FRACTION_BITS, 0), 31)
    multiplier = tl.where(fraction < 0, 0x7FFFFFFF, mantissa >> excess)
    return multiplier, tl.minimum(tl.maximum(fraction, 0), MOST_FRACTION_BITS)


@triton.jit
def column_multiplier(bits, largest_exponent, COLUMN_BITS: tl.constexpr):
    """A: a key token's scale relative to the largest exponent of its head."""
    mantissa, exponent = split_scale(bits)
    shift = tl.minimum((24 - COLUMN_BITS) + largest_exponent - exponent, 31)
    return ((mantissa >> (shift - 1)) + 1) >> 1


@triton.jit
def exponent_offset(OFFSET: tl.constexpr, fraction_bits):
    """OFFSET / 512 octaves in fixed point, rounded up."""
    exact = OFFSET << tl.maximum(fraction_bits - 9, 0)
    return tl.where(fraction_bits >= 9, exact, ((OFFSET << tl.minimum(fraction_bits, 9)) + 511) >> 9)


@triton.jit
def probability_word(
    octaves, mantissa, QUADRATIC: tl.constexpr, BITS: tl.constexpr, NEAREST: tl.constexpr, GUARD: tl.constexpr
):
    """A probability in the top bits of a word: byte 3 is what the matrix product reads.

    For 8 bits byte 3 is 127 - P, for 7 bits P; for 15 bits bytes 3 and 2 are P. ``mantissa`` is
    g = 511 - fraction. Rounding and the offset ride in one added constant, and taking a byte costs no shift.
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
    if BITS == 8:
        # 127 - P is an int8, and so is the -127 that brings the offset back; the shifted constant carries the sign
        LESS: tl.constexpr = 2147483647 - (1 << 23 if NEAREST else 0)
        return exp2 * shift_right_signed(-(1 << UP), octaves, GUARD) + LESS
    OFFSET: tl.constexpr = 1 << 23 if NEAREST else 0
    return exp2 * shift_right(1 << UP, octaves, GUARD) + OFFSET


@triton.jit
def release_factor(step, fraction_bits, GUARD: tl.constexpr):
    """ScaleRelease's 2**-step with 24 fraction bits."""
    octaves = step >> fraction_bits
    fraction = (shift_left(step, 32 - fraction_bits, GUARD) >> 24) & 255
    return shift_right((512 - fraction) << 15, octaves, GUARD)


@triton.jit
def bit_length(x, GUARD: tl.constexpr):
    """Bit length of 0 <= x < 2**31."""
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
    """About 2**60 / divisor for a divisor in [2**30, 2**31): three Newton steps, no division."""
    x = 1515870810 - multiply_high(divisor, 2021161080, GUARD)
    for _ in tl.static_range(3):
        error = (1 << 28) - multiply_high(divisor, x, GUARD)
        x = x + multiply_high(x, error << 4, GUARD)
    return x


@triton.jit
def row_inverse(denominator, GUARD: tl.constexpr):
    """(bit length, reciprocal) of a row sum; a row sum of 0 gives harmless values."""
    bits = bit_length(denominator, GUARD)
    safe = tl.maximum(denominator, 1)
    return bits, reciprocal(safe << (31 - tl.maximum(bits, 1)), GUARD)


@triton.jit
def row_weight(inverse, bits):
    """1 / row sum as float32, of :func:`row_inverse`'s integers: ``inverse * 2**-(29 + bits)``."""
    return inverse.to(tl.float32) * ((98 - bits) << 23).to(tl.float32, bitcast=True)


@triton.jit
def output_multiplier(value_bits, output_bits, GUARD: tl.constexpr):
    """(R, shift) of value scale / output scale."""
    value, value_exponent = split_scale(value_bits)
    output, output_exponent = split_scale(output_bits)
    ratio = multiply_high(value << 7, reciprocal(output << 7, GUARD), GUARD) << 2
    small = ratio < (1 << 30)
    exponent = 30 - (value_exponent - output_exponent) + tl.where(small, 1, 0)
    return tl.where(small, ratio << 1, ratio), tl.minimum(tl.maximum(exponent - 11, 0), 31)


@triton.jit
def half_of(shift):
    """What makes a right shift round half up."""
    return tl.where(shift > 0, 1 << tl.maximum(shift - 1, 0), 0)


@triton.jit
def requantize(numerator, multiplier, bits, shift, half, SIGN: tl.constexpr, GUARD: tl.constexpr):
    """SIGN (1 or -1) times the numerators of rows whose sums have ``bits`` bits -> int8, half up, saturating.

    What is shifted is ``mulhi(numerator << (24 - bits), multiplier) + half``. Rounding down twice is rounding down once, so
    the product's low half, and with it the shift before it, can stay where it is until the end.
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
