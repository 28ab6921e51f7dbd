"""Attention of a block of queries in two passes over its keys (Gluon, wgmma).

Equations 3 to 11 (steps 2 to 7 of ``docs/algorithm.md``): :func:`row_maxima`, the first pass, keeps no score;
:func:`weigh_values`, the second pass, computes the scores again. Where the keys are, and when they are there, a *store* knows
(:mod:`.sm90.stores`, :mod:`.sm90.ring`):

* ``TILES``: a row of keys is passed over in parts, each a loop over iterations of so many tiles;
* ``steps(part)``: the first iteration of that loop and where it ends;
* ``at(step, tile, part)``: where a tile of an iteration is, for the following;
* ``keys(at, tile, part)`` and ``values(...)``: it in shared memory, span by span;
* ``padded(...)``: a tile's scores, with a filler in the columns of keys past the last, or as they are;
* ``STARTS`` and ``COLUMNS``: a part's first column, and from which one on probabilities are 0;
* ``release(...)``: these keys are read;
* ``row(q, ...)``: numbers of rows between the passes (:class:`.sm90.rows.Row`); ``again(...)``: the store of the second pass;
* ``sums(...)``: sums of stored P per row, of P before rounding, and how many P they have.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...common.tile_ops import MASKED
from .layouts import of_part, product_layout, quarter_layout, score_layout, value_widths
from .query_block import (
    add_values,
    begin_outputs,
    exponentiate,
    finished,
    fold_columns,
    quarter_sums,
    row_inverses,
    start_scores,
    sums_of_four,
)
from .rows import finished_outputs, store_outputs


@gluon.jit
def row_maxima(q, store, WARPS: gl.constexpr):
    """First pass: maxima of columns eight apart of a block's scores, int32 (rows, 8)."""
    largest = gl.full((16 * WARPS, 8), MASKED, gl.int32, score_layout(8, WARPS))
    nothing = gl.to_tensor(MASKED)
    for part in gl.static_range(len(store.TILES)):
        first, end = store.steps(part)
        for step in range(first, end):
            # all products of an iteration are started before the first maximum
            scores = ()
            for tile in gl.static_range(of_part(store.TILES, part)):
                k = store.keys(store.at(step, tile, part), tile, part)
                scores = scores + (start_scores(q, k, WARPS, 1),)
            for tile in gl.static_range(len(scores)):
                at = store.at(step, tile, part)
                s = finished(scores[tile], len(q) * (len(scores) - 1 - tile), WARPS)
                s = store.padded(s, nothing, at, tile, part)
                largest = gl.maximum(largest, fold_columns(s, WARPS))
                store.release(at, tile, part)
    return largest


@gluon.jit
def weigh_values(q, store, row, accumulator, EXACT: gl.constexpr, OPERAND: gl.constexpr, WARPS: gl.constexpr):
    """Second pass: (accumulators of P V, the last products under way; sums of stored P, with EXACT of P before rounding).

    The sums are int32 (rows, 4), for ``store.sums``.

    ``row`` is from ``store.row``.
    """
    total = gl.zeros((16 * WARPS, 4), gl.int32, quarter_layout(WARPS))
    fine = total
    for part in gl.static_range(len(store.TILES)):
        first, end = store.steps(part)
        for step in range(first, end):
            for tile in gl.static_range(of_part(store.TILES, part)):
                at = store.at(step, tile, part)
                s = finished(start_scores(q, store.keys(at, tile, part), WARPS, 1), 0, WARPS)
                store.release(at, tile, part)
                s = store.padded(row.raised(s, part, WARPS), row.largest, at, tile, part)
                p, finer = exponentiate(
                    s, row.slope, row.begin, row.constant, OPERAND, of_part(store.STARTS, part), store.COLUMNS, EXACT, WARPS, 1
                )
                accumulator = add_values(accumulator, p, store.values(at, tile, part), WARPS, 1)
                total += quarter_sums(sums_of_four(p), WARPS)
                if EXACT:
                    fine += quarter_sums(finer, WARPS)
    return accumulator, total, fine


@gluon.jit
def attend_twice(
    q, factors, store, sums, output, o_stride_n: gl.constexpr, first, queries, CHANNELS: gl.constexpr,
    WARPS: gl.constexpr, SUMS: gl.constexpr, RECIPE: gl.constexpr,
):  # fmt: skip
    """Attention of a block of queries, from int8 queries to stored outputs.

    Args:
        q: queries, span by span.
        factors: from :func:`.sm90.rows.query_factors`.
        store: keys and values.
        sums: -127 times the sums of V's channels, in shared memory; products begin at them, or they are added at the end.
        output: see :func:`.sm90.rows.store_outputs`.
        SUMS: "begin" or "end".
        RECIPE: :class:`.gluon.constants.Recipe`.
    """
    DV: gl.constexpr = value_widths(CHANNELS)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, product_layout(DV[0], WARPS), 4)
    usable, multiplier, fraction_bits = factors
    largest = row_maxima(q, store, WARPS)
    row = store.row(q, largest, multiplier, fraction_bits, CHANNELS, RECIPE.OFFSET, WARPS)
    accumulator = begin_outputs(sums, DV, SUMS == "begin", WARPS, 1)
    store = store.again(row)
    accumulator, total, fine = weigh_values(q, store, row, accumulator, RECIPE.EXACT, OPERAND, WARPS)
    total, fine, count = store.sums(total, fine, row.most, RECIPE.EXACT)
    rows = row_inverses(total, fine, count, RECIPE.EXACT)
    numerators = finished_outputs(accumulator, sums, SUMS == "end", WARPS, 1)
    store_outputs(numerators, rows, usable, output, o_stride_n, first, queries, CHANNELS, RECIPE.EXACT, WARPS, 1)
