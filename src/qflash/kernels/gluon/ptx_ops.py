"""Device functions of all Gluon kernels: exponential of five instructions, packed PTX operations, output factors.

Equations 5 to 10 for the default recipe (quadratic exponential, 8-bit P, rounded), steps 2 to 5 of
``docs/algorithm.md``, with the same integers as :mod:`.common.tile_ops`. Everything works on registers of one lane at a
time; row numbers are in the forms of :mod:`.gluon.row_ops`.

The exponential of a score s with row maximum m (:func:`row_exponents`, :func:`fine_probabilities`, :func:`pack`). The
exponent is aligned to bytes, so that both its parts are taken by a byte permutation or a shift, without a multiply-add
each:

    bits 31..24         23..16              15..0
    octaves q + 3       fraction byte f     dropped        = s * slope + begin     (one multiply-add)

    x = f - 512                                  prmt: f below the upper bytes of -2
    128 P = (x * x + 2**17) >> (q + 3)           multiply-add, two shifts
    127 - P                                      one multiply-add, and one prmt for four scores
    row sum                                      half a dot product (dp2a), where it is exact

Up to 128 P that is five instructions per score; the general form takes seven. The price: octaves have eight bits, so an
exponent of more than 236 octaves could wrap. :func:`may_wrap`, :func:`least_if_needed` and
:func:`least_of_own_rows` bound the exponents of a row.
Where the bound does not suffice, scores are raised to a score that is at least 64 octaves below the row maximum
(:func:`raised`, :func:`raised_if_needed`); P is 0 for both.

Inline assembly is used where the compiler would emit more instructions, or has no operation for it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..common.fixed_point import (
    MAX_FRACTION_BITS,
    bit_length,
    exponent_offset,
    half_of,
    multiply_round,
    output_multiplier,
    requantize,
    row_weight,
    split_scale,
    usable_scale,
)
from ..common.quantize_ops import (
    MAX_BF16,
    MAX_F16,
    MIN_BF16,
    MIN_F16,
    nan_max,
    nan_min,
)
from ..common.tile_ops import MASKED, row_multiplier
from .row_ops import beside_columns, beside_rows, both_rows, bring_both, own_twice, upper_and_lower

# x * inverse rounded to nearest even: the low bits of its sum with 1.5 * 2**23
ROUNDED_PRODUCT = gl.constexpr("{.reg .f32 a; fma.rn.f32 a, $1, $2, 0f4B400000; mov.b32 $0, a;}")
# the integer itself, as a float
ROUNDED_FLOAT = gl.constexpr("{.reg .f32 a; fma.rn.f32 a, $1, $2, 0f4B400000; add.rn.f32 $0, a, 0fCB400000;}")
# the sum with another addend
ROUNDED_SUM = gl.constexpr("{.reg .f32 a; fma.rn.f32 a, $1, $2, $3; mov.b32 $0, a;}")
# -2 in a register ($1 is not negative) whose value ptxas cannot know: as an immediate it would cost a move per score
OPAQUE = gl.constexpr("{.reg .b32 a; shr.u32 a, $1, 31; add.u32 $0, a, 0xFFFFFFFE;}")
OPAQUE_HALF_WORD = gl.constexpr("{.reg .b32 a; shr.u32 a, $1, 31; add.u32 $0, a, 0x10000;}")
# A probability with 7 fraction bits, rounded down, from an exponent with 24 of them to which 3 octaves and 1/256 were added:
# with f the byte of the fraction and x = f - 512, (x * x + 2**17) >> octaves. The 1/256 turns 511 - f into 512 - f. It may
# carry into the octaves: the parabola is continuous from one octave to the next, so the result is the same.
FINE_PROBABILITY = gl.constexpr("""{.reg .b32 a, b;
prmt.b32 a, $1, $2, 0x5542; mad.lo.s32 a, a, a, 0x20000; shr.u32 b, $1, 24; shr.u32 $0, a, b;}""")
# the same from an exponent with 16 fraction bits
FINE_PROBABILITY_16 = gl.constexpr(FINE_PROBABILITY.value.replace("0x5542", "0x5541").replace("$1, 24", "$1, 16"))
# Four of those -> the bytes 127 - P, P rounded half up. Each half of a word computes 127.5 - P with eight fraction bits
# (0x7F7F is 127.5 less 1/256, which a borrow by the other half may take); its upper byte is the result.
PACK_FOUR = gl.constexpr("""{.reg .b32 a, b;
mad.lo.s32 a, $1, -2, 0x7F7F7F7F; mad.lo.s32 a, $2, -131072, a;
mad.lo.s32 b, $3, -2, 0x7F7F7F7F; mad.lo.s32 b, $4, -131072, b;
prmt.b32 $0, a, b, 0x7531;}""")
# The same, and the sum of the four in the first of four outputs, 0 in the other three. $9 is 65536, as a number that ptxas does
# not know: it would make shifts of the products, which run where the other shifts do.
PACK_FOUR_AND_SUM = gl.constexpr("""{.reg .b32 a, b, c;
mad.lo.s32 a, $6, $9, $5; mad.lo.s32 b, $8, $9, $7;
mov.b32 c, 0x0101; dp2a.lo.u32.u32 $1, a, c, 0; dp2a.lo.u32.u32 $1, b, c, $1;
mad.lo.s32 a, a, -2, 0x7F7F7F7F; mad.lo.s32 b, b, -2, 0x7F7F7F7F;
prmt.b32 $0, a, b, 0x7531; mov.b32 $2, 0; mov.b32 $3, 0; mov.b32 $4, 0;}""")
# the sum of the magnitudes of four int8 in the first of four outputs, 0 in the other three
SUM_MAGNITUDES = gl.constexpr("""{.reg .b32 a, b; xor.b32 a, $4, 0x80808080; mov.b32 b, 0x80808080;
mov.b32 $1, 0; vabsdiff4.u32.u32.u32.add $0, a, b, $1;
mov.b32 $2, 0; mov.b32 $3, 0;}""")
# four int8 as a word in the first of four outputs, 0 in the other three
WORD = gl.constexpr("mov.b32 $0, $4; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;")
# the first or second of two 16-bit floats in a word, as float32
FIRST_F16 = gl.constexpr("{.reg .b16 a, b; mov.b32 {a, b}, $1; cvt.f32.f16 $0, a;}")
SECOND_F16 = gl.constexpr("{.reg .b16 a, b; mov.b32 {a, b}, $1; cvt.f32.f16 $0, b;}")
FIRST_BF16 = gl.constexpr("shl.b32 $0, $1, 16;")
SECOND_BF16 = gl.constexpr("and.b32 $0, $1, 0xFFFF0000;")
BOTH_BF16 = gl.constexpr("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;")
# octaves below which exponents need no bound: FINE_PROBABILITY has 256, of which added constants take up to ten
OCTAVES = gl.constexpr(236)
# If a row of the warp reaches its limit (unsigned comparison), each row's least score, else the int32 minimum in all rows. A
# thread has one row, or two.
LEAST_IF_NEEDED = gl.constexpr(
    f"{{.reg .pred p; setp.ge.u32 p, $1, $2; vote.sync.any.pred p, p, -1; selp.b32 $0, $3, {MASKED.value}, p;}}"
)
LEAST_IF_NEEDED_TWO = gl.constexpr(f"""{{.reg .pred p; setp.ge.u32 p, $2, $4; setp.ge.or.u32 p, $3, $5, p;
vote.sync.any.pred p, p, -1; selp.b32 $0, $6, {MASKED.value}, p; selp.b32 $1, $7, {MASKED.value}, p;}}""")


@gluon.constexpr_function
def _in_rows(rank):
    """Plain row-major shared memory, without swizzle."""
    return gl.SwizzledSharedLayout(1, 1, 1, [*range(rank)][::-1])


@gluon.jit
def to_shared(x):
    """Allocate shared memory, store ``x`` there row-major, and return it."""
    smem = gl.allocate_shared_memory(x.dtype, x.shape, _in_rows(len(x.shape)))
    smem.store(x)
    return smem


@gluon.jit
def wait_for_copies(x):
    """Wait for the thread's own ``cp.async``; ``x`` is any integer.

    Triton's wait adds a barrier, but a fence and a barrier follow anyway before the product that reads the data.
    """
    gl.inline_asm_elementwise("cp.async.wait_group 0; mov.b32 $0, $1;", "=r,r", [x], gl.int32, False, 1)


@gluon.constexpr_function
def _branch_around_trap(place):
    """PTX for a branch around a trap that is always taken: the operand is below 2**30 and never equals ``2**30 + place``."""
    return f"{{.reg .pred p; setp.ne.s32 p, $1, {(1 << 30) + place}; @p bra.uni DONE; trap; DONE: mov.b32 $0, $1;}}"


@gluon.jit
def keep_apart(number, PLACE: gl.constexpr):
    """Keep ptxas from moving instructions across this place.

    ptxas schedules the instructions between two branches together, and large blocks badly: it moves loads or waits to
    where they cost time. This is a branch that is always taken, which ptxas cannot know: ``number`` (a mantissa or a
    tile's number) is below 2**30. Every place in a kernel needs its own PLACE, because ptxas remembers the outcome of a
    comparison it has seen.
    """
    gl.inline_asm_elementwise(_branch_around_trap(PLACE), "=r,r", [number], gl.int32, False, 1)


@gluon.jit
def row_factors(query_bits, units, MASK: gl.constexpr, MOST: gl.constexpr, MOST_BITS: gl.constexpr):
    """(multiplier, F, drop) of rows, as :func:`.common.tile_ops.row_multiplier`, for one key scale per head.

    ``units`` is (key mantissa, key exponent, constant mantissa, constant exponent); the constant is ``scale * log2(e)``.
    """
    return row_multiplier(query_bits, units[0], units[1], units[2], units[3], MASK, False, 0, MOST, MOST_BITS, False)


@gluon.jit
def first_of_four(x):
    """The first of every four neighbouring columns: (rows, columns / 4)."""
    x, _ = gl.split(gl.reshape(x, (x.shape[0], x.shape[1] // 4, 2, 2)))
    x, _ = gl.split(x)
    return x


@gluon.jit
def magnitudes_by_four(x):
    """Sums of the magnitudes of four neighbouring int8 of a row, int32 (rows, columns / 4)."""
    return first_of_four(gl.inline_asm_elementwise(SUM_MAGNITUDES, "=r,=r,=r,=r,r", [x], gl.int32, True, 4))


@gluon.jit
def words_of_four(x):
    """Every four neighbouring int8 of a row as one word, int32 (rows, columns / 4)."""
    return first_of_four(gl.inline_asm_elementwise(WORD, "=r,=r,=r,=r,r", [x], gl.int32, True, 4))


@gluon.jit
def magnitudes(x):
    """Sums of the magnitudes of each int8 row, int32 (rows,)."""
    return gl.sum(magnitudes_by_four(x), 1)


@gluon.jit
def may_wrap(magnitude, row_max, multiplier, fraction_bits):
    """Per row 1 if its exponents could reach OCTAVES, else 0; ``magnitude`` is the sum of its query's magnitudes.

    No score of the row lies below ``-128 * magnitude``.
    """
    return (((128 * magnitude + row_max) * multiplier) >> fraction_bits >= OCTAVES).to(gl.int32)


@gluon.jit
def least_score(row_max, multiplier, fraction_bits):
    """Per row a score that lies 64 to 128 octaves below its maximum: P is 0 there, and for all lower scores."""
    bits = bit_length(multiplier, False)
    return row_max - (1 << gl.minimum(gl.maximum(fraction_bits + 7 - bits, 0), 24))


@gluon.jit
def raised(s, least):
    """A tile of scores, each at least ``least`` of its row."""
    L: gl.constexpr = s.type.layout
    return gl.maximum(s, beside_rows(least, L))


@gluon.constexpr_function
def _raised_in_place(pieces, each, own):
    """PTX for ``pieces`` of ``each`` scores per thread: maxima with the rows' least scores, unless these are INT_MIN.

    The branch around the maxima is uniform in a warp. If each lane has only its ``own`` row's number, neighbours
    exchange theirs.
    """
    count = each * pieces
    least = [f"${2 * count + i}" for i in range(each)]
    exchange = ""
    if own and each == 4:
        exchange = bring_both("a", "b", least[0])
        least = ["a", "a", "b", "b"]
    maxima = " ".join(f"max.s32 ${i}, ${i}, {least[i % each]};" for i in range(count))
    unless = f"setp.eq.s32 p, ${2 * count}, {MASKED.value}; @p bra.uni DONE;"
    return f"{{.reg .pred p; .reg .b32 a, b; {unless} {exchange} {maxima} DONE: }}"


@gluon.constexpr_function
def _in_place(pieces, each):
    """Constraints of :func:`_raised_in_place`: scores are read from the registers that are written."""
    count = each * pieces
    return ",".join(["=r"] * count + [str(i) for i in range(count)] + ["r"] * each)


@gluon.jit
def _apart(s, L: gl.constexpr, ACROSS: gl.constexpr):
    """A tile split by columns into pieces of eight columns per warp, without moving data; ACROSS warps share a row."""
    M: gl.constexpr = s.shape[0]
    N: gl.constexpr = s.shape[1] // ACROSS
    if N == 8:
        pieces = (gl.convert_layout(s, L, assert_trivial=True),)
    else:
        a, b = gl.split(gl.permute(gl.reshape(s, (M, ACROSS, 2, N // 2)), (0, 1, 3, 2)))
        a, b = gl.reshape(a, (M, ACROSS * N // 2)), gl.reshape(b, (M, ACROSS * N // 2))
        pieces = _apart(a, L, ACROSS) + _apart(b, L, ACROSS)
    return pieces


@gluon.jit
def _together(pieces, ACROSS: gl.constexpr):
    """The tile from the pieces of :func:`_apart`."""
    HALF: gl.constexpr = len(pieces) // 2
    if HALF == 0:
        s = pieces[0]
    else:
        a, b = _together(pieces[:HALF], ACROSS), _together(pieces[HALF:], ACROSS)
        M: gl.constexpr = a.shape[0]
        N: gl.constexpr = a.shape[1] // ACROSS
        s = gl.join(gl.reshape(a, (M, ACROSS, N)), gl.reshape(b, (M, ACROSS, N)))
        s = gl.reshape(gl.permute(s, (0, 1, 3, 2)), (M, 2 * ACROSS * N))
    return s


@gluon.jit
def least_if_needed(row_max, most, multiplier, fraction_bits):
    """:func:`least_score` of the rows of a warp if exponents of any of them could reach OCTAVES, else the int32 minimum.

    No score lies below ``-most``. Rows are one per thread, or a vector of more than eight.
    """
    reach = (row_max + most) * multiplier
    least = least_score(row_max, multiplier, fraction_bits)
    limit = row_max * 0 + (OCTAVES << fraction_bits)
    if len(row_max.shape) == 1 and row_max.shape[0] > 8:
        least = gl.inline_asm_elementwise(LEAST_IF_NEEDED_TWO, "=r,=r,r,r,r,r,r,r", [reach, limit, least], gl.int32, True, 2)
    else:
        least = gl.inline_asm_elementwise(LEAST_IF_NEEDED, "=r,r,r,r", [reach, limit, least], gl.int32, True, 1)
    return least


@gluon.constexpr_function
def _least_of_own_rows(words):
    """PTX for :func:`least_of_own_rows`: $0 and $1 from ``words`` words of each of two rows, then the row's own numbers."""
    first = [f"${2 + 2 * i}" for i in range(words)]
    second = [f"${3 + 2 * i}" for i in range(words)]
    row_max, reach, multiplier, limit, least = (f"${2 + 2 * (words + i)}" for i in range(5))

    def added(total, row):
        zero = f"mov.b32 {total}, 0;"
        return zero + "".join(f"xor.b32 x, {w}, z; vabsdiff4.u32.u32.u32.add {total}, x, z, {total};" for w in row)

    return f"""{{.reg .pred p, even; .reg .b32 a, b, x, z;
mov.b32 $0, {MASKED.value}; mov.b32 z, 0x80808080;
setp.ge.u32 p, {reach}, {limit}; vote.sync.any.pred p, p, -1; @!p bra.uni DONE;
{added("a", first)} {added("b", second)}
mov.u32 x, %laneid; and.b32 x, x, 1; setp.eq.u32 even, x, 0;
selp.b32 x, b, a, even; selp.b32 a, a, b, even;
shfl.sync.bfly.b32 x, x, 1, 31, -1; add.s32 a, a, x;
shfl.sync.bfly.b32 x, a, 2, 31, -1; add.s32 a, a, x;
mad.lo.s32 a, a, 128, {row_max}; mul.lo.s32 a, a, {multiplier};
setp.ge.u32 p, a, {limit}; vote.sync.any.pred p, p, -1; selp.b32 $0, {least}, {MASKED.value}, p;
DONE: mov.b32 $1, $0;}}"""


@gluon.jit
def least_of_own_rows(words, most, row_max, multiplier, fraction_bits, L: gl.constexpr):
    """:func:`least_if_needed` by the magnitudes of the rows' own queries, which are added up only if ``most`` is too much.

    No score of a row lies below -128 times the sum of the magnitudes of its query.

    Args:
        words: a warp's queries as words of four int8, a tuple of (rows, 4) in layout L.
        most: no score of any query lies below ``-most``.
        row_max, multiplier, fraction_bits: one row per thread.
    """
    M: gl.constexpr = words[0].shape[0]
    own = (
        row_max, (row_max + most) * multiplier, multiplier, row_max * 0 + (OCTAVES << fraction_bits),
        least_score(row_max, multiplier, fraction_bits),
    )  # fmt: skip
    args = words
    for i in gl.static_range(len(own)):
        args = args + (gl.convert_layout(own_twice(own[i], M), L, assert_trivial=True),)
    least = gl.inline_asm_elementwise(_least_of_own_rows(len(words)), "=&r,=&r" + ",r" * 2 * len(args), args, gl.int32, True, 2)
    least, _ = upper_and_lower(least)
    return gl.convert_layout(least, row_max.type.layout, assert_trivial=True)


@gluon.jit
def raised_if_needed(tiles, least, L: gl.constexpr, ACROSS: gl.constexpr):
    """Tiles of scores, each at least its row's ``least`` (:func:`least_if_needed`), behind one branch per warp.

    ``L`` is the layout of eight columns of each of the ACROSS warps that share a row: two scores per thread and row.
    """
    EACH: gl.constexpr = 4 if tiles[0].shape[0] > 8 else 2
    pieces = ()
    for i in gl.static_range(len(tiles)):
        pieces = pieces + _apart(tiles[i], L, ACROSS)
    COUNT: gl.constexpr = len(pieces)
    OWN: gl.constexpr = len(least.shape) == 2
    least = beside_rows(own_twice(least, tiles[0].shape[0]), L) + gl.zeros_like(pieces[0])
    pieces = gl.inline_asm_elementwise(
        _raised_in_place(COUNT, EACH, OWN), _in_place(COUNT, EACH), pieces + (least,), (gl.int32,) * COUNT, True, EACH
    )
    raised_tiles = ()
    for i in gl.static_range(len(tiles)):
        s = _together(pieces[: tiles[i].shape[1] // (8 * ACROSS)], ACROSS)
        pieces = pieces[tiles[i].shape[1] // (8 * ACROSS) :]
        raised_tiles = raised_tiles + (gl.convert_layout(s, tiles[i].type.layout, assert_trivial=True),)
    return raised_tiles


@gluon.jit
def row_exponents(row_max, multiplier, fraction_bits, OFFSET: gl.constexpr):
    """(slope, begin, constant) of rows, for :func:`fine_probabilities`: ``s * slope + begin`` has 24 fraction bits.

    ``begin`` includes the row maximum, the offset t0, 3 octaves and 1/256.
    """
    up = MAX_FRACTION_BITS - fraction_bits
    # if a score unit is 64 octaves or more, every score below the maximum has P = 0, and any large slope will do
    slope = gl.where((multiplier >> fraction_bits) >= 64, 1 << 30, multiplier << up)
    begin = (exponent_offset(OFFSET, fraction_bits) << up) + ((3 << 24) + (1 << 16)) + row_max * slope
    slope = gl.inline_asm_elementwise("neg.s32 $0, $1;", "=r,r", [slope], gl.int32, True, 1)
    return slope, begin, gl.inline_asm_elementwise(OPAQUE, "=r,r", [fraction_bits], gl.int32, True, 1)


@gluon.jit
def fine_probabilities(s, slope, begin, constant):
    """:func:`.specification.fixed_point.fine_probability` of a tile of scores, int32, same shape; the exponents must not wrap.

    The exponential is quadratic. Rounded half up by :func:`pack` these are 8-bit probabilities. Five instructions per
    score, with the packing: see the module.
    """
    return gl.inline_asm_elementwise(FINE_PROBABILITY, "=r,r,r", [s * slope + begin, constant], gl.int32, True, 1)


@gluon.jit
def fine_probabilities_16(z, row_max, OFFSET: gl.constexpr):
    """:func:`fine_probabilities` of scores that already are octaves with 16 fraction bits; no bound is needed then."""
    begin = row_max + ((OFFSET << 7) + (3 << 16) + (1 << 8))
    constant = gl.inline_asm_elementwise(OPAQUE, "=r,r", [gl.num_programs(0)], gl.int32, True, 1)
    return gl.inline_asm_elementwise(FINE_PROBABILITY_16, "=r,r,r", [begin - z, constant], gl.int32, True, 1)


@gluon.jit
def pack(fine):
    """Stored probabilities 127 - P, int8, from :func:`fine_probabilities`; a thread has four neighbouring columns."""
    return gl.inline_asm_elementwise(PACK_FOUR, "=r,r,r,r,r", [fine], gl.int8, True, 4)


@gluon.jit
def pack_and_sum(fine):
    """(:func:`pack` of fine probabilities; their sums by four in the first of every four columns, else 0: int32)."""
    half = gl.inline_asm_elementwise(OPAQUE_HALF_WORD, "=r,r", [gl.num_programs(0)], gl.int32, True, 1)
    return gl.inline_asm_elementwise(
        PACK_FOUR_AND_SUM, "=r,=r,=r,=r,=r,r,r,r,r,r,r,r,r", [fine, half], (gl.int8, gl.int32), True, 4
    )


@gluon.constexpr_function
def _in_pairs(shape):
    """Return the shape of numbers whose last dimension is taken by twos."""
    return (*shape[:-1], shape[-1] // 2, 2)


@gluon.constexpr_function
def _doubled(shape):
    """Return a shape with twice as many numbers in its last dimension."""
    return (*shape[:-1], 2 * shape[-1])


@gluon.jit
def _pairs(x):
    """Neighbouring 16-bit numbers of a row, two in a word: int32, half as many in the last dimension."""
    a, b = gl.split(gl.reshape(x, _in_pairs(x.shape)))
    return gl.inline_asm_elementwise("mov.b32 $0, {$1, $2};", "=r,h,h", [a, b], gl.int32, True, 1)


@gluon.jit
def _unpaired(x, FIRST: gl.constexpr, SECOND: gl.constexpr):
    """float32 numbers of a row from words of :func:`_pairs`; FIRST and SECOND are the instructions for the two halves."""
    a = gl.inline_asm_elementwise(FIRST, "=r,r", [x], gl.float32, True, 1)
    b = gl.inline_asm_elementwise(SECOND, "=r,r", [x], gl.float32, True, 1)
    return gl.reshape(gl.join(a, b), _doubled(x.shape))


@gluon.jit
def as_float32(x):
    """A tile as float32. bfloat16 in words of two: ``.to`` takes each word apart first, which doubles a tile's registers."""
    if gl.bfloat16 == x.dtype:
        x = gl.inline_asm_elementwise(BOTH_BF16, "=r,=r,r", [x], gl.float32, True, 2)
    else:
        x = x.to(gl.float32)
    return x


@gluon.jit
def words_of(x):
    """A row's numbers as words to exchange: 16-bit ones in pairs, float32 as they are. A thread has at least two."""
    if x.dtype != gl.float32:
        x = _pairs(x)
    return x


@gluon.jit
def numbers_of(x, DTYPE: gl.constexpr):
    """A row's numbers as float32, from the words of :func:`words_of`."""
    if gl.float16 == DTYPE:
        x = _unpaired(x, FIRST_F16, SECOND_F16)
    elif gl.bfloat16 == DTYPE:
        x = _unpaired(x, FIRST_BF16, SECOND_BF16)
    return x


@gluon.jit
def _combined(a, b, F16: gl.constexpr, BF16: gl.constexpr, WIDE: gl.constexpr, DTYPE: gl.constexpr):
    """Elementwise minimum or maximum of words: F16 or BF16 is the packed instruction, WIDE the function for float32."""
    if gl.float16 == DTYPE:
        x = gl.inline_asm_elementwise(F16, "=r,r,r", [a, b], gl.int32, True, 1)
    elif gl.bfloat16 == DTYPE:
        x = gl.inline_asm_elementwise(BF16, "=r,r,r", [a, b], gl.int32, True, 1)
    else:
        x = WIDE(a, b)
    return x


@gluon.jit
def higher_words(a, b, DTYPE: gl.constexpr):
    """Maxima of the numbers in words of :func:`words_of`; a NaN wins."""
    return _combined(a, b, MAX_F16, MAX_BF16, nan_max, DTYPE)


@gluon.jit
def lower_words(a, b, DTYPE: gl.constexpr):
    """Minima of the numbers in words of :func:`words_of`; a NaN wins."""
    return _combined(a, b, MIN_F16, MIN_BF16, nan_min, DTYPE)


@gluon.jit
def _higher_float16(a, b):
    """Maxima of two float16 in a word."""
    return higher_words(a, b, gl.float16)


@gluon.jit
def _higher_bfloat16(a, b):
    """Maxima of two bfloat16 in a word."""
    return higher_words(a, b, gl.bfloat16)


@gluon.jit
def _wider_float16(low_a, high_a, low_b, high_b):
    """(minima, maxima) of two float16 in a word."""
    return lower_words(low_a, low_b, gl.float16), higher_words(high_a, high_b, gl.float16)


@gluon.jit
def _wider_bfloat16(low_a, high_a, low_b, high_b):
    """(minima, maxima) of two bfloat16 in a word."""
    return lower_words(low_a, low_b, gl.bfloat16), higher_words(high_a, high_b, gl.bfloat16)


@gluon.jit
def _wider(low_a, high_a, low_b, high_b):
    """(minimum, maximum) of float32."""
    return nan_min(low_a, low_b), nan_max(high_a, high_b)


@gluon.jit
def word_maxima(x, AXIS: gl.constexpr, DTYPE: gl.constexpr):
    """Maxima along an axis of words of :func:`words_of`; a NaN wins."""
    if gl.float16 == DTYPE:
        x = gl.reduce(x, AXIS, _higher_float16)
    elif gl.bfloat16 == DTYPE:
        x = gl.reduce(x, AXIS, _higher_bfloat16)
    else:
        x = gl.reduce(x, AXIS, nan_max)
    return x


@gluon.jit
def word_ranges(low, high, AXIS: gl.constexpr, DTYPE: gl.constexpr):
    """Minima of ``low`` and maxima of ``high`` along an axis, like :func:`word_maxima`, in one reduction."""
    if gl.float16 == DTYPE:
        low, high = gl.reduce((low, high), AXIS, _wider_float16)
    elif gl.bfloat16 == DTYPE:
        low, high = gl.reduce((low, high), AXIS, _wider_bfloat16)
    else:
        low, high = gl.reduce((low, high), AXIS, _wider)
    return low, high


@gluon.jit
def largest_in_warp(x):
    """The bits (int32) of the largest of non-negative float32 numbers, of which every warp has all.

    The bits have the order of the numbers, with NaN above all, and an integer maximum over a warp is one instruction
    (redux).
    """
    return gl.max(x.to(gl.int32, bitcast=True), 0)


@gluon.jit
def halves(x):
    """(upper, lower) half of the rows."""
    return gl.split(gl.permute(gl.reshape(x, (2, x.shape[0] // 2, x.shape[1])), (1, 2, 0)))


@gluon.jit
def beside_channels(x, L: gl.constexpr):
    """One number per channel broadcast to a tile of layout ``L``; a scalar is returned as it is."""
    if x.type.is_block():
        x = gl.convert_layout(x, gl.SliceLayout(0, L))[None, :]
    return x


@gluon.jit
def rounded_product(x, inverse):
    """x * inverse, rounded to nearest even, in the lowest bytes of int32, for a scale found on x itself."""
    return gl.inline_asm_elementwise(ROUNDED_PRODUCT, "=r,f,f", [x, inverse], gl.int32, True, 1)


@gluon.jit
def round_to_int8(x, inverse):
    """:func:`.common.quantize_ops.round_to_int8`: x * inverse as int8, for a scale found on x itself."""
    return rounded_product(x, inverse).to(gl.int8)


@gluon.jit
def zero_point(middle, inverse):
    """:func:`.common.quantize_ops.zero_point`: midranges in whole steps, float32."""
    return gl.inline_asm_elementwise(ROUNDED_FLOAT, "=f,f,f", [middle, inverse], gl.float32, True, 1)


@gluon.jit
def score_scales(key_bits, head_bits, constant_mantissa, constant_exponent, RECIPE: gl.constexpr):
    """What turns scores into octaves, from float32 bits of scales.

    Returns:
        whether the keys' is usable; :func:`row_factors`, if all queries have the scale ``head_bits``; and the units from which
        these are computed if they have one each.
    """
    usable = usable_scale(key_bits)
    key_mantissa, key_exponent = split_scale(key_bits)
    units = key_mantissa, key_exponent, constant_mantissa, constant_exponent
    row = 0, 0, 0
    if not RECIPE.QUERY_TOKEN:
        MASK: gl.constexpr = RECIPE.MASK  # Triton 3.6 takes no attribute that is a string as an argument
        row = row_factors(head_bits, units, MASK, RECIPE.MOST, RECIPE.MOST_BITS)
    return usable, row, units


@gluon.jit
def int32_values(y, inverse, zero, CENTER: gl.constexpr):
    """Values as int8 in the lowest bytes of int32, with CENTER less their zero points, for scales found on them.

    :func:`.common.quantize_ops.round_centered` or :func:`.common.quantize_ops.round_to_int8`.
    """
    if CENTER:
        x = gl.inline_asm_elementwise(ROUNDED_SUM, "=r,f,f,f", [y, inverse, 12582912.0 - zero], gl.int32, True, 1)
    else:
        x = rounded_product(y, inverse)
    return x


@gluon.jit
def int8_values(y, inverse, zero, CENTER: gl.constexpr):
    """Values as int8, with CENTER less their zero points."""
    return int32_values(y, inverse, zero, CENTER).to(gl.int8)


@gluon.jit
def unpack(x, dtype: gl.constexpr, layout: gl.constexpr):
    """The numbers in words of four bytes, (rows, numbers) in ``layout``; a loop carries words, one register each."""
    if dtype == gl.int8:
        x = gl.join(gl.join(x, x), gl.join(x, x))
        x = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r,r,r", [x], gl.int8, True, 4)
    elif dtype == gl.float16:
        x = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r", [gl.join(x, x)], gl.float16, True, 2)
    elif dtype == gl.bfloat16:
        x = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r", [gl.join(x, x)], gl.bfloat16, True, 2)
    else:
        x = x.to(gl.float32, bitcast=True)
    return gl.convert_layout(gl.reshape(x, layout.shape), layout, assert_trivial=True)


@gluon.jit
def scaled(numerator, weight, factor, offset):
    """Float outputs: numerators times the weights of their rows, times the factor, plus the offsets of channels if there are.

    The last product and the sum are rounded once.
    """
    # the addition of 0 turns -0 (0 times a negative weight) into 0
    average = gl.fma(numerator.to(gl.float32), weight, 0.0)
    if offset.type.is_block():
        factor, _ = gl.broadcast(factor, average)
        offset, _ = gl.broadcast(offset, average)
        result = gl.fma(average, factor, offset)
    else:
        result = average * factor
    return result


@gluon.jit
def beside_outputs(x, L: gl.constexpr, ACROSS: gl.constexpr):
    """Numbers of rows, one per thread, or vectors where ACROSS warps share rows, broadcast to outputs of layout ``L``."""
    if ACROSS == 1:
        x = beside_columns(both_rows(x, L.shape[0]), L.shape[1] // 4, L)
    else:
        x = beside_rows(x, L)
    return x


@gluon.jit
def normalised(x, bits, inverse, usable, factors, DTYPE: gl.constexpr, ACROSS: gl.constexpr):
    """Outputs of type DTYPE from negative numerators, as :func:`.common.tile_ops.finish` makes them.

    Args:
        bits, inverse, usable: bit lengths and reciprocals of the rows' sums of P, and whether scales are usable
            (:func:`beside_outputs`).
        factors: of channels, beside outputs or scalars: multiplier, NaN if a scale is not usable; shift or offset; rounding.
    """
    factor, shift, half = factors
    L: gl.constexpr = x.type.layout
    if gl.int8 == DTYPE:
        if factor.type.is_block():
            row_factor = multiply_round(beside_outputs(inverse, L, ACROSS), factor, False)
        else:
            row_factor = beside_outputs(multiply_round(inverse, factor, False), L, ACROSS)
        result = requantize(x, row_factor, beside_outputs(bits, L, ACROSS), shift, half, -1, False)
    else:
        # a NaN in the factor of the row costs less than a select per element
        weight = beside_outputs(gl.where(usable, -row_weight(inverse, bits), float("nan")), L, ACROSS)
        result = scaled(x, weight, factor, shift).to(DTYPE)
    return result


@gluon.jit
def output_factors(
    o_ptr, vs_base, vs_stride_d, os_base, os_stride_d, vo_base, vo_stride_d,
    CHANNELS: gl.constexpr, D: gl.constexpr, VALUE_CHANNEL: gl.constexpr, OUTPUT_CHANNEL: gl.constexpr,
    VALUE_OFFSET: gl.constexpr, WARPS: gl.constexpr, L: gl.constexpr,
):  # fmt: skip
    """:func:`.common.tile_ops.output_factors`: scalars, or one per channel in layout L; a thread computes one channel.

    Of D channels those past CHANNELS get the last one's.
    """
    channel = gl.arange(0, D, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    if CHANNELS < D:
        channel = gl.minimum(channel, CHANNELS - 1)
    if VALUE_CHANNEL:
        factor = gl.load(vs_base + channel * vs_stride_d)
    else:
        factor = gl.load(vs_base)
    shift, half = 0, 0
    if o_ptr.dtype.element_ty == gl.int8:
        if OUTPUT_CHANNEL:
            output_scale = gl.load(os_base + channel * os_stride_d)
        else:
            output_scale = gl.load(os_base)
        factor, shift = output_multiplier(factor.to(gl.int32, bitcast=True), output_scale.to(gl.int32, bitcast=True), False)
        half = half_of(shift)
        if VALUE_CHANNEL or OUTPUT_CHANNEL:
            shift, half = gl.convert_layout(shift, L), gl.convert_layout(half, L)
    elif VALUE_OFFSET:
        shift = gl.convert_layout(gl.load(vo_base + channel * vo_stride_d), L)
    if factor.type.is_block():
        factor = gl.convert_layout(factor, L)
    return factor, shift, half
