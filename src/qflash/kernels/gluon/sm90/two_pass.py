"""Attention of a block of queries in two passes over its keys (Gluon, wgmma).

Equations 3 to 11 (steps 2 to 7 of ``docs/algorithm.md``): :func:`row_maxima`, the first pass, keeps no score;
:func:`weigh_values`, the second pass, computes the scores again. Where the keys are, and when they are there, a *store* knows
(:mod:`.sm90.stores`, :mod:`.sm90.ring`):

* ``TILES``: a row of keys is passed over in parts, each a loop over iterations of so many tiles;
* ``steps(part)``: the first iteration of that loop and where it ends;
* ``at(step, tile, part)``: where a tile of an iteration is, for the following;
* ``keys(at, tile, part)`` and ``values(...)``: it in shared memory, span by span;
* ``unseen(warps)`` and ``biased(...)``: a tile's scores with what is added to them, and what the first pass notes of that;
* ``padded(...)``: a tile's scores, with a filler in the columns of keys past the last, or as they are;
* ``STARTS`` and ``COLUMNS``: a part's first column, and from which one on probabilities are 0;
* ``release(...)``: these keys are read;
* ``row(q, ...)``: numbers of rows between the passes (:class:`.sm90.rows.Row`); ``again(...)``: the store of the second pass;
* ``sums(...)``: sums of stored P per row, of P before rounding, and how many P they have.

Two warps may share sixteen queries (ACROSS is 2), each with half of a tile's keys and half of the outputs' channels. They
exchange row maxima, probabilities and row sums in shared memory.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ...common.tile_ops import MASKED
from ..releases import barrier
from .layouts import of_part, part_layout, product_layout, quarter_layout, score_layout, value_widths
from .query_block import (
    add_values,
    begin_outputs,
    finished,
    fold_columns,
    quarter_sums,
    row_inverses,
    row_sums,
    start_scores,
    stored_probabilities,
    sums_of_four,
)
from .rows import finished_outputs, store_outputs


@gluon.jit
def row_maxima(q, store, WARPS: gl.constexpr, ACROSS: gl.constexpr):
    """First pass: maxima of columns eight apart of a block's scores, int32 (rows, 8), or eight for each warp of a row.

    Behind them what the store noted of a bias.
    """
    largest = gl.full((16 * WARPS, 8 * ACROSS), MASKED, gl.int32, score_layout(8 * ACROSS, WARPS, ACROSS))
    nothing = gl.to_tensor(MASKED)
    seen = store.unseen(WARPS)
    for part in gl.static_range(len(store.TILES)):
        first, end = store.steps(part)
        for step in range(first, end):
            # all products of an iteration are started before the first maximum
            scores = ()
            for tile in gl.static_range(of_part(store.TILES, part)):
                k = store.keys(store.at(step, tile, part), tile, part)
                scores = scores + (start_scores(q, k, WARPS, ACROSS),)
            for tile in gl.static_range(len(scores)):
                at = store.at(step, tile, part)
                s = finished(scores[tile], len(q) * (len(scores) - 1 - tile), WARPS, ACROSS)
                s, seen = store.biased(s, seen, at, tile, part)
                s = store.padded(s, nothing, at, tile, part)
                largest = gl.maximum(largest, fold_columns(s, WARPS, ACROSS))
                store.release(at, tile, part)
    return largest, seen


@gluon.jit
def weigh_values(
    q, store, row, accumulator, p_smem, EXACT: gl.constexpr, OPERAND: gl.constexpr, WARPS: gl.constexpr, ACROSS: gl.constexpr
):  # fmt: skip
    """Second pass: (accumulators of P V, the last products under way; sums of stored P, with EXACT of P before rounding).

    The sums are int32 (rows, 4), four for each warp of a row.

    ``row`` is from ``store.row``. ``p_smem`` is shared memory for the probabilities of each tile of an iteration, and of each
    part behind the first, where warps share rows.
    """
    total = gl.zeros((16 * WARPS, 4 * ACROSS), gl.int32, quarter_layout(WARPS, ACROSS))
    fine = total
    for part in gl.static_range(len(store.TILES)):
        first, end = store.steps(part)
        for step in range(first, end):
            for tile in gl.static_range(of_part(store.TILES, part)):
                at = store.at(step, tile, part)
                s = finished(start_scores(q, store.keys(at, tile, part), WARPS, ACROSS), 0, WARPS, ACROSS)
                s, _ = store.biased(s, 0, at, tile, part)
                store.release(at, tile, part)
                s = store.padded(row.raised(s, part, WARPS, ACROSS), row.largest, at, tile, part)
                p, finer = stored_probabilities(
                    row.fine(s), OPERAND, of_part(store.STARTS, part), store.COLUMNS, EXACT, WARPS, ACROSS
                )
                operand = p
                if ACROSS > 1:
                    # A place is filled again after two barriers: all warps had waited for its product before the second.
                    operand = p_smem[tile if part == 0 else of_part(store.TILES, 0) + part - 1]
                    operand.store(p)
                    fence_async_shared()
                    barrier()
                accumulator = add_values(accumulator, operand, store.values(at, tile, part), WARPS, ACROSS)
                total += quarter_sums(sums_of_four(p), WARPS, ACROSS)
                if EXACT:
                    fine += quarter_sums(finer, WARPS, ACROSS)
    return accumulator, total, fine


@gluon.jit
def attend_twice(
    q, factors, store, sums, output, o_stride_n: gl.constexpr, first, queries, CHANNELS: gl.constexpr,
    WARPS: gl.constexpr, SUMS: gl.constexpr, RECIPE: gl.constexpr, exchange, ACROSS: gl.constexpr,
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
        exchange: shared memory for what ACROSS warps of a row exchange: probabilities, maxima, row sums.
    """
    largest, _ = row_maxima(q, store, WARPS, ACROSS)
    attend_again(
        q, factors, store, largest, sums, output, o_stride_n, first, queries, CHANNELS, WARPS, SUMS, RECIPE, exchange, ACROSS
    )


@gluon.jit
def attend_again(
    q, factors, store, largest, sums, output, o_stride_n: gl.constexpr, first, queries, CHANNELS: gl.constexpr,
    WARPS: gl.constexpr, SUMS: gl.constexpr, RECIPE: gl.constexpr, exchange, ACROSS: gl.constexpr,
):  # fmt: skip
    """:func:`attend_twice` from the row maxima on."""
    p_smem, most_smem, total_smem, fine_smem = exchange
    DV: gl.constexpr = value_widths(CHANNELS)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, product_layout(DV[0], WARPS, ACROSS), 4)
    EMPTY: gl.constexpr = RECIPE.MASK != "none"
    usable, multiplier, fraction_bits, _ = factors
    if ACROSS > 1:
        most_smem.store(gl.max(gl.reshape(largest, (16 * WARPS, ACROSS, 8)), 2))
        largest = most_smem.load(part_layout(WARPS, ACROSS))
    row = store.row(q, largest, multiplier, fraction_bits, CHANNELS, RECIPE.OFFSET, WARPS, ACROSS)
    accumulator = begin_outputs(sums, DV, SUMS == "begin", WARPS, ACROSS)
    store = store.again(row)
    accumulator, total, fine = weigh_values(q, store, row, accumulator, p_smem, RECIPE.EXACT, OPERAND, WARPS, ACROSS)
    total = row_sums(total, total_smem, WARPS, ACROSS)
    if RECIPE.EXACT:
        fine = row_sums(fine, fine_smem, WARPS, ACROSS)
    total, fine, count = store.sums(total, fine, row.most, RECIPE.EXACT)
    rows = row_inverses(total, fine, count, RECIPE.EXACT)
    numerators = finished_outputs(accumulator, sums, SUMS == "end", WARPS, ACROSS)
    store_outputs(numerators, rows, usable, output, o_stride_n, first, queries, CHANNELS, RECIPE.EXACT, WARPS, ACROSS, EMPTY)
