"""Numbers of a block's rows: what their exponentials need, and their outputs normalised and stored (Gluon).

Equations 4, 5 and 11 and step 11 of Algorithm 1 (steps 4, 8 and 9 of ``docs/algorithm.md``).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait

from ...common.fixed_point import usable_scale
from ..ptx_ops import fine_probabilities, raised_if_needed, row_exponents, row_factors
from ..releases import aggregate
from ..row_ops import beside_rows, both_rows, own_twice, row_largest
from .layouts import channel_spans, eight_layout, in_memory, is_stored, score_layout, span_starts
from .query_block import least_of_queries, store_span, stored_beside_outputs
from .stage_kv import sums_beside


@gluon.jit
def fine_of_row(self, s):
    """Fine probabilities of a tile of scores."""
    L: gl.constexpr = s.type.layout
    return fine_probabilities(s, beside_rows(self.slope, L), beside_rows(self.begin, L), beside_rows(self.constant, L))


@aggregate
class Row:
    """What the exponentials of a block's rows need (:func:`.gluon.ptx_ops.row_exponents`).

    Attributes:
        slope, begin, constant: see there.
        least: a score to which lower ones are raised (:func:`.gluon.ptx_ops.least_if_needed`).
        largest: the row maxima.
        most: fine probabilities of these, the largest.
    """

    slope: gl.tensor
    begin: gl.tensor
    constant: gl.tensor
    least: gl.tensor
    largest: gl.tensor
    most: gl.tensor
    fine = fine_of_row

    @gluon.jit
    def raised(self, s, PART: gl.constexpr, WARPS: gl.constexpr, ACROSS: gl.constexpr):
        """A tile of scores that do not wrap."""
        return raised_if_needed((s,), self.least, score_layout(8 * ACROSS, WARPS, ACROSS), ACROSS)[0]


@gluon.jit
def query_factors(query_bits, scales, RECIPE: gl.constexpr):
    """(whether scales are usable, multiplier, fraction bits, drop) of a block of queries.

    Args:
        query_bits: float32 bits of the queries' scale, or of each row's.
        scales: from :func:`.gluon.ptx_ops.score_scales`.
    """
    keys_usable, row, units = scales
    usable = keys_usable & usable_scale(query_bits)
    if query_bits.type.is_block():
        MASK: gl.constexpr = RECIPE.MASK
        row = row_factors(query_bits, units, MASK, RECIPE.MOST, RECIPE.MOST_BITS)
    return usable, row[0], row[1], row[2]


@gluon.jit
def row_maximum(largest, multiplier, WARPS: gl.constexpr, ACROSS: gl.constexpr = 1):
    """Row maxima from those of columns eight apart, (rows, 8); where warps share rows, from theirs, (rows, warps).

    If ``multiplier`` is one for all rows, little is computed per row, and one row per thread gains nothing.
    """
    if ACROSS > 1:
        L: gl.constexpr = gl.SliceLayout(1, eight_layout(WARPS, ACROSS))
        row_max = gl.convert_layout(gl.max(largest, 1), L, assert_trivial=True)
    elif multiplier.type.is_block():
        row_max = row_largest(largest)
    else:
        row_max = gl.max(largest, 1)
    return row_max


@gluon.jit
def row_numbers(q, row_max, multiplier, fraction_bits, CHANNELS: gl.constexpr, OFFSET: gl.constexpr, WARPS: gl.constexpr):
    """The :class:`Row` of a block from :func:`row_maximum` and :func:`.gluon.ptx_ops.row_factors`.

    ``q`` are its queries, which bound its scores more closely, or none.
    """
    M: gl.constexpr = 16 * WARPS
    slope, begin, constant = row_exponents(row_max, multiplier, fraction_bits, OFFSET)
    least = least_of_queries(q, row_max, multiplier, fraction_bits, CHANNELS, WARPS)
    most = fine_probabilities(row_max, slope, begin, constant)
    largest = both_rows(row_max, M)
    slope, begin, constant = both_rows(slope, M), both_rows(begin, M), own_twice(constant, M)
    return Row(slope, begin, constant, least, largest, most)


@gluon.jit
def finished_outputs(accumulator, sums, AT_END: gl.constexpr, WARPS: gl.constexpr, ACROSS: gl.constexpr):
    """Wait for a block's products with V: negative numerators, span by span. AT_END ``sums`` of V's channels are added."""
    numerators = ()
    for c in gl.static_range(len(accumulator)):
        numerator = warpgroup_mma_wait(len(accumulator) - 1 - c, [accumulator[c]])
        if AT_END and in_memory(sums[c].type.layout):
            numerator += sums_beside(sums[c], WARPS, ACROSS)
        elif AT_END:
            numerator += sums[c]
        numerators = numerators + (numerator,)
    return numerators


@gluon.jit
def store_outputs(
    numerators, rows, usable, output, o_stride_n: gl.constexpr, first, queries, CHANNELS: gl.constexpr, EXACT: gl.constexpr,
    WARPS: gl.constexpr, ACROSS: gl.constexpr, EMPTY: gl.constexpr = False,
):  # fmt: skip
    """Normalise and store a block's outputs.

    Args:
        rows: from :func:`.sm90.query_block.row_inverses`.
        output: means of V's channels; output factors, in shared memory or beside outputs; the pointer to outputs. All but that
            span by span.
        EMPTY: rows may have no key that takes part.
    """
    means, factors, o_base = output
    SPANS: gl.constexpr = channel_spans(CHANNELS)
    FROM: gl.constexpr = span_starts(CHANNELS)
    for c in gl.static_range(len(SPANS)):
        store_span(
            numerators[c], rows, usable, _beside_outputs(factors[c], WARPS, ACROSS), means[c], o_base + FROM[c], o_stride_n,
            first, queries, SPANS[c], EXACT, WARPS, ACROSS, EMPTY,
        )  # fmt: skip


@gluon.jit
def _beside_outputs(numbers, WARPS: gl.constexpr, ACROSS: gl.constexpr):
    """Numbers of channels in the layout of outputs: those in shared memory are read, others are in it."""
    found = ()
    for i in gl.static_range(len(numbers)):
        if is_stored(numbers[i].type):
            found = found + (stored_beside_outputs(numbers[i], WARPS, ACROSS),)
        else:
            found = found + (numbers[i],)
    return found
