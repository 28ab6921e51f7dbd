"""Scores with a mask: of bool, or a bias of 16-bit floats (Gluon).

Steps 2 to 4 of ``docs/algorithm.md``. :class:`Bias` is what most biases need: scores become octaves with 16 fraction bits,
so no exponent wraps (:func:`.gluon.ptx_ops.fine_probabilities_16`). The first pass notes the largest bias of each row. If
that is far from 0 or NaN, or score units are large, the program passes over its keys again with :class:`MarkedBias`, which
has the selects for marks and bases.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...common.fixed_point import exponent_offset
from ...common.quantize_ops import MOST_BIAS_MAXIMUM
from ...common.tile_ops import MASKED, POISON
from ..bias_ops import add_any_bias, clamped_bias, fixed_with_marks, scaled_scores
from ..ptx_ops import (
    as_float32,
    fine_probabilities,
    fine_probabilities_16,
    higher_words,
    least_score,
    numbers_of,
    raised,
    row_exponents,
    word_maxima,
    words_of,
)
from ..releases import aggregate
from ..row_ops import beside_rows, both_rows, own_twice, row_largest
from .layouts import quarter_layout
from .rows import fine_of_row
from .two_pass import attend_again, row_maxima

# bits that scores lose before a bias is added: with fewer, those of a row could differ by 2**27 units or more, which
# :func:`.gluon.bias_ops.clamped_bias` does not allow
LEAST_DROP = gl.constexpr(3)


# methods that several have


@gluon.jit
def _nothing(self, WARPS: gl.constexpr):
    return gl.to_tensor(0)


@gluon.jit
def _not_noted(self, seen, mask, there, PADDED: gl.constexpr):
    return seen


@gluon.jit
def _in_octaves(self, s):
    """A tile of scores in octaves."""
    M: gl.constexpr = s.shape[0]
    return scaled_scores(s, (both_rows(self.multiplier, M), both_rows(self.drop, M)))


@gluon.jit
def _as_it_is(self, s, PART: gl.constexpr, WARPS: gl.constexpr, ACROSS: gl.constexpr):
    return s


@aggregate
class NoBias:
    """Nothing is added to the scores."""

    NONE: gl.constexpr
    unseen = _nothing


@aggregate
class Bias:
    """A bias without marks.

    Attributes:
        multiplier, drop: what turns scores into octaves (:func:`.common.tile_ops.row_multiplier`).
        DTYPE: of the bias.
    """

    multiplier: gl.tensor
    drop: gl.tensor
    DTYPE: gl.constexpr
    in_octaves = _in_octaves

    @gluon.jit
    def unseen(self, WARPS: gl.constexpr):
        """What :meth:`noted` begins with: words of two numbers, -inf, (rows, 4)."""
        LOWEST: gl.constexpr = -0x7F0080 if gl.bfloat16 == self.DTYPE else -0x3FF0400
        return gl.full((16 * WARPS, 4), LOWEST, gl.int32, quarter_layout(WARPS))

    @gluon.jit
    def noted(self, seen, bias, there, PADDED: gl.constexpr):
        """The largest so far of each row's bias; with PADDED ``there`` keys are left of the tile."""
        L: gl.constexpr = bias.type.layout
        M: gl.constexpr = bias.shape[0]
        if PADDED:
            n = gl.arange(0, bias.shape[1], layout=gl.SliceLayout(0, L))
            bias = gl.where((n < there)[None, :], bias, float("-inf"))
        words = gl.reshape(words_of(bias), (M, bias.shape[1] // 8, 4))
        words = gl.convert_layout(word_maxima(words, 1, self.DTYPE), seen.type.layout, assert_trivial=True)
        return higher_words(seen, words, self.DTYPE)

    @gluon.jit
    def doubt(self, seen, ROWS: gl.constexpr):
        """Whether this may be wrong for any row of the program; and the largest bias of each row, one per thread."""
        largest = row_largest(numbers_of(seen, self.DTYPE))
        size = gl.abs(largest)
        doubtful = gl.where(size <= MOST_BIAS_MAXIMUM, 0, 1) | gl.where(self.drop < LEAST_DROP, 1, 0)
        return gl.max(gl.reshape(doubtful, (2 * ROWS,)), 0) > 0, largest

    @gluon.jit
    def added(self, s, bias):
        """A tile of scores in octaves, with the bias."""
        return self.in_octaves(s) + clamped_bias(bias)

    @gluon.jit
    def row(self, row_max, fraction_bits, OFFSET: gl.constexpr, ROWS: gl.constexpr):
        """The numbers of rows between the passes; ``row_max`` is one per thread."""
        most = fine_probabilities_16(row_max, row_max, OFFSET)
        return BiasRow(both_rows(row_max, ROWS), most, OFFSET, False)


@aggregate
class MarkedBias:
    """A bias of any numbers.

    Attributes:
        multiplier, drop, fraction_bits: what turns scores into octaves.
        largest: the largest bias of each row, one per thread.
    """

    multiplier: gl.tensor
    drop: gl.tensor
    fraction_bits: gl.tensor
    largest: gl.tensor
    unseen, noted, in_octaves = _nothing, _not_noted, _in_octaves

    @gluon.jit
    def added(self, s, bias):
        M: gl.constexpr = s.shape[0]
        fixed = fixed_with_marks(as_float32(bias), both_rows(self.largest, M))
        return add_any_bias(self.in_octaves(s), fixed, both_rows(self.fraction_bits, M))

    @gluon.jit
    def row(self, row_max, fraction_bits, OFFSET: gl.constexpr, ROWS: gl.constexpr):
        most = _fine_of_marked(row_max, row_max, fraction_bits, OFFSET)
        return MarkedRow(both_rows(row_max, ROWS), most, both_rows(fraction_bits, ROWS), OFFSET, False)


@aggregate
class Mask:
    """A bool mask: keys take part where it is not 0.

    Attributes:
        multiplier: of exponents.
    """

    multiplier: gl.tensor
    unseen, noted = _nothing, _not_noted

    @gluon.jit
    def added(self, s, mask):
        return gl.where(mask != 0, s, MASKED)

    @gluon.jit
    def row(self, row_max, fraction_bits, OFFSET: gl.constexpr, ROWS: gl.constexpr):
        # a row without a key has any maximum: each P is 0
        row_max = gl.where(row_max == MASKED, 0, row_max)
        slope, begin, constant = row_exponents(row_max, self.multiplier, fraction_bits, OFFSET)
        least = least_score(row_max, self.multiplier, fraction_bits)
        most = fine_probabilities(row_max, slope, begin, constant)
        slope, begin, constant = both_rows(slope, ROWS), both_rows(begin, ROWS), own_twice(constant, ROWS)
        return MaskRow(slope, begin, constant, both_rows(least, ROWS), both_rows(row_max, ROWS), most, False)


@aggregate
class MaskRow:
    """:class:`.sm90.rows.Row` of scores with :class:`Mask`.

    Where a score unit is tiny no distance below the row maximum is sure to have a P of 0: masked scores are told by value.
    """

    slope: gl.tensor
    begin: gl.tensor
    constant: gl.tensor
    least: gl.tensor
    largest: gl.tensor
    most: gl.tensor
    APART: gl.constexpr
    raised = _as_it_is

    @gluon.jit
    def fine(self, s):
        return gl.where(s == MASKED, 0, fine_of_row(self, raised(s, self.least)))


@aggregate
class BiasRow:
    """:class:`.sm90.rows.Row` of scores with :class:`Bias`, whose exponents do not wrap.

    Attributes:
        largest, most: see there.
        OFFSET: of exponents.
        APART: whether whole steps may go to the loop for the last one.
    """

    largest: gl.tensor
    most: gl.tensor
    OFFSET: gl.constexpr
    APART: gl.constexpr
    raised = _as_it_is

    @gluon.jit
    def fine(self, s):
        L: gl.constexpr = s.type.layout
        return fine_probabilities_16(s, beside_rows(self.largest, L), self.OFFSET)


@aggregate
class MarkedRow:
    """The same with :class:`MarkedBias`.

    Attributes:
        fraction_bits: of scores.
    """

    largest: gl.tensor
    most: gl.tensor
    fraction_bits: gl.tensor
    OFFSET: gl.constexpr
    APART: gl.constexpr
    raised = _as_it_is

    @gluon.jit
    def fine(self, s):
        L: gl.constexpr = s.type.layout
        return _fine_of_marked(s, beside_rows(self.largest, L), beside_rows(self.fraction_bits, L), self.OFFSET)


@gluon.jit
def _fine_of_marked(z, row_max, fraction_bits, OFFSET: gl.constexpr):
    """Fine probabilities of scores in octaves of any ``fraction_bits`` up to 16; those that are masked have 0."""
    t = gl.where(row_max == MASKED, 0, row_max) - z
    # from 64 octaves on P is 0
    up = 16 - fraction_bits
    t = (gl.minimum(t, 64 << fraction_bits) + exponent_offset(OFFSET, fraction_bits)) << up
    fine = fine_probabilities_16(-t, z * 0 - (OFFSET << 7), OFFSET)
    return gl.where(z == MASKED, 0, fine)


@gluon.jit
def _attend_marked(
    q, factors, store, largest, sums, output, o_stride_n: gl.constexpr, first, queries, CHANNELS: gl.constexpr,
    WARPS: gl.constexpr, SUMS: gl.constexpr, RECIPE: gl.constexpr,
):  # fmt: skip
    """Both passes with :class:`MarkedBias`; ``largest`` is the largest bias of each row."""
    usable, multiplier, fraction_bits, drop = factors
    marked = store.anew(MarkedBias(multiplier, drop, fraction_bits, largest))
    found, _ = row_maxima(q, marked, WARPS, 1)
    numbers = (usable & (row_largest(found) < POISON), multiplier, fraction_bits, drop)
    attend_again(
        q, numbers, marked, found, sums, output, o_stride_n, first, queries, CHANNELS, WARPS, SUMS, RECIPE, ((), 0, 0, 0), 1
    )


@gluon.jit
def attend_biased(
    q, factors, store, sums, output, o_stride_n: gl.constexpr, first, queries, CHANNELS: gl.constexpr, WARPS: gl.constexpr,
    SUMS: gl.constexpr, RECIPE: gl.constexpr,
):  # fmt: skip
    """:func:`.sm90.two_pass.attend_twice` where ``store`` has a :class:`Bias`."""
    found, seen = row_maxima(q, store, WARPS, 1)
    doubtful, largest = store.bias.doubt(seen, 16 * WARPS)
    if doubtful:
        _attend_marked(q, factors, store, largest, sums, output, o_stride_n, first, queries, CHANNELS, WARPS, SUMS, RECIPE)
    else:
        attend_again(
            q, factors, store, found, sums, output, o_stride_n, first, queries, CHANNELS, WARPS, SUMS, RECIPE, ((), 0, 0, 0), 1
        )
