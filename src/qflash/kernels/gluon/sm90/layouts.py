"""Layouts of the kernels for Hopper; tiles of a row of scores, and spans of a head's channels (Gluon).

Nothing is computed here: these are compile-time functions that return layouts, widths and offsets.

*Tiles.* A row of scores is a sequence of tiles of 128, 64, 32, 16 or 8 keys, each a wgmma product of its own
(:func:`row_widths`): 197 keys take 128 + 64 + 8 = 200 columns, not 256. *Spans.* A head's channels are one operand of
32, 64 or 128, or for 72 to 96 channels two spans of 64 and 32 (:func:`channel_spans`), zero-padded.

*Warps.* A warp has sixteen rows (queries); rows 16w to 16w + 15 of a block are those of warp w. Where ``across`` warps
(two) share the same sixteen rows, each has a contiguous part of the columns of a tile and of the output channels.

*Lanes.* With t = lane % 4 and r = lane // 4, a lane has rows r and r + 8 of its warp (a quad of lanes shares them), and

    accumulator (scores, outputs)   columns 2t, 2t + 1 of every 8                   score_layout
    left operand, int8              bytes 4t .. 4t + 3 of every 16                  query_layout, stored_layout
    outputs to store                channels C/4 * t .. C/4 * (t + 1) - 1 of C      output_layout

These are written as linear layouts, so that a conversion between them that moves no data is checked to be trivial when the
kernel is compiled.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....specification.fixed_point import inverse_count as inverse_of
from ...tiles import channel_spans as spans_of
from ...tiles import exchanged_widths as exchanged_of
from ...tiles import is_crowded as crowded
from ...tiles import kernel_width as width_of
from ...tiles import row_widths as widths_of
from ...tiles import value_width as value_width_of

channel_spans = gluon.constexpr_function(spans_of)
exchanged_widths = gluon.constexpr_function(exchanged_of)
inverse_count = gluon.constexpr_function(inverse_of)
is_crowded = gluon.constexpr_function(crowded)
kernel_width = gluon.constexpr_function(width_of)
value_width = gluon.constexpr_function(value_width_of)
row_widths = gluon.constexpr_function(widths_of)


@gluon.constexpr_function
def of_part(constants, part):
    """Return one of some constants."""
    return constants[part]


@gluon.constexpr_function
def row_starts(keys):
    """Return the first key of each tile of a row."""
    widths = row_widths(keys)
    return tuple(sum(widths[:index]) for index in range(len(widths)))


@gluon.constexpr_function
def span_starts(channels):
    """Return the first channel of each span of a head."""
    spans = channel_spans(channels)
    return tuple(sum(spans[:index]) for index in range(len(spans)))


@gluon.constexpr_function
def span_widths(channels):
    """Return the padded channels of each span, for queries and keys."""
    return tuple(kernel_width(span) for span in channel_spans(channels))


@gluon.constexpr_function
def value_widths(channels):
    """Return the padded channels of each span for values, where channels are columns of a product, at least 16."""
    return tuple(value_width(span) for span in channel_spans(channels))


@gluon.constexpr_function
def depth(width):
    """Return the keys that a tile's product with V takes: its width, but at least 32, the depth of an int8 wgmma."""
    return max(width, 32)


@gluon.constexpr_function
def product_layout(width, warps, across=1):
    """Return wgmma's accumulator layout: ``width`` columns, sixteen rows per warp, a row across ``across`` warps."""
    return gl.NVMMADistributedLayout([3, 0], [warps, across], [16, width // across, 32])


@gluon.constexpr_function
def in_memory(layout):
    """Tell whether a layout is one of shared memory."""
    return isinstance(layout, (gl.NVMMASharedLayout, gl.SwizzledSharedLayout))


@gluon.constexpr_function
def is_stored(kind):
    """Tell by its type whether something is in shared memory."""
    return in_memory(getattr(kind, "layout", None))


@gluon.constexpr_function
def shared_layout(width):
    """Return the swizzled layout of rows of ``width`` bytes in shared memory that wgmma reads; 128-byte swizzle at most."""
    return gl.NVMMASharedLayout(min(width, 128), 8)


@gluon.constexpr_function
def row_layout(channels, bits, warps):
    """Return a register layout of rows of ``channels`` numbers: sixteen neighbouring bytes per thread, for wide copies."""
    each = 128 // bits
    return gl.BlockedLayout([1, each], [32 * each // channels, channels // each], [warps, 1], [1, 0])


@gluon.constexpr_function
def sum_layout(channels, warps):
    """Return a register layout of V, (channels, keys), for its sums: sixteen bytes per thread, up to 16 rows per warp.

    Where a warp has sixteen rows, two threads share a row, whatever its length; with fewer rows, more threads do.
    """
    rows = min(16, max(1, channels // warps))
    return gl.BlockedLayout([1, 16], [rows, 32 // rows], [warps, 1], [1, 0])


@gluon.constexpr_function
def quad_layout(rows, channels, warps, piece):
    """Return a layout of (keys, channels) with four neighbouring keys per thread, so that a transposed store takes words.

    ``piece`` keys are loaded at a time; a warp's part of them is divided by channels, up to sixteen per thread. A tile
    of fewer ``rows`` than a piece has fewer keys per thread.
    """
    each = max(1, min(16, channels * piece // (128 * warps)))
    lanes = min(8, channels // each)
    across = channels // (lanes * each)
    groups = 32 // lanes * (warps // across)
    return gl.BlockedLayout([min(4, rows // groups), each], [32 // lanes, lanes], [warps // across, across], [1, 0])


@gluon.constexpr_function
def float_piece(channels, warps):
    """Return the keys loaded at a time where they are quantised: few channels per thread, which makes their ranges cheaper."""
    # at least two channels per thread
    return 8 * warps * max(1, 32 // channels)


@gluon.constexpr_function
def range_layout(channels, warps):
    """Return the layout of each thread's extremes over its own keys: 32 rows, channels as in :func:`quad_layout`."""
    return quad_layout(32, channels, warps, float_piece(channels, warps))


@gluon.constexpr_function
def key_warps(channels, warps):
    """Return how many warps have different keys in :func:`range_layout`; the other factor of the warps has other channels."""
    return range_layout(channels, warps).warps_per_cta[0]


@gluon.constexpr_function
def part_words_layout(words, channels, warps):
    """Return a layout of (:func:`key_warps`, words): a thread has its own channels' words from each of these warps."""
    quads = range_layout(channels, warps)
    each = quads.size_per_thread[1] * words // channels
    return gl.BlockedLayout([quads.warps_per_cta[0], each], quads.threads_per_warp, quads.warps_per_cta, [1, 0])


@gluon.constexpr_function
def all_words_layout(words, parts, warps):
    """Return a layout of (parts, words of channels) of which every warp has all."""
    return gl.BlockedLayout([parts, max(1, words // 32)], [1, 32], [1, warps], [1, 0])


@gluon.constexpr_function
def rows_layout(columns, own, near, warps, across=1, apart=0):
    """Return a layout of rows as in an accumulator: sixteen per warp, a quad of lanes shares row r and perhaps row r + 8.

    Args:
        own: bases of what a thread has.
        near: columns between the first and second lane of a quad, and between the first and the third.
        across: warps that share a row, their columns ``apart`` from each other; if that is 0 all have the same columns.
    """
    lanes = [*([0, column] for column in near), [1, 0], [2, 0], [4, 0]]
    rows = [[16 << bit, 0] for bit in range(warps.bit_length() - 1)]
    parts = [[0, apart << bit] for bit in range(across.bit_length() - 1)]
    return gl.DistributedLinearLayout(own, lanes, rows + parts, [], [16 * warps, columns])


@gluon.constexpr_function
def score_layout(columns, warps, across=1):
    """Return the accumulator's layout (:func:`product_layout`) as a linear layout."""
    wide = [[0, bit] for bit in (8, 16, 32, 64) if bit * across < columns]
    return rows_layout(columns, [[0, 1], [8, 0], *wide], (2, 4), warps, across, columns // across)


@gluon.constexpr_function
def mask_layout(columns, warps):
    """Return a layout of a mask as in memory, beside scores in key order: a lane has four neighbours of every sixteen."""
    wide = [[0, bit] for bit in (16, 32, 64) if bit < columns]
    return rows_layout(columns, [[0, 1], [0, 2], [8, 0], *wide], (4, 8), warps)


@gluon.constexpr_function
def quarter_layout(warps, across=1):
    """Return a layout of (rows, 4) for each of ``across`` warps: one number per row for each lane that shares the row."""
    return rows_layout(4 * across, [[8, 0]], (1, 2), warps, across, 4)


@gluon.constexpr_function
def half_layout(columns, warps, across=1):
    """Return the layout of rows r alone, or of rows r + 8 alone, of an accumulator: eight rows per warp."""
    wide = [[0, bit] for bit in (8, 16, 32, 64) if bit * across < columns]
    lanes = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    rows = [[8 << bit, 0] for bit in range(warps.bit_length() - 1)]
    parts = [[0, (columns // across) << bit] for bit in range(across.bit_length() - 1)]
    return gl.DistributedLinearLayout([[0, 1], *wide], lanes, rows + parts, [], [8 * warps, columns])


@gluon.constexpr_function
def pairs_layout(columns, warps, across=1):
    """Return a layout of ``2 * columns`` numbers in shared memory: a row of ``columns`` numbers, every pair twice.

    A thread reads the numbers of its accumulator columns for both of its rows. The four lanes of a quad read sixteen
    bytes each, side by side.
    """
    own = [[bit] for bit in (1, 2, 16, 32, 64, 128) if bit * across < 2 * columns]
    rows = [[0] for _ in range(warps.bit_length() - 1)]
    parts = [[(2 * columns // across) << bit] for bit in range(across.bit_length() - 1)]
    return gl.DistributedLinearLayout(own, [[4], [8], [0], [0], [0]], rows + parts, [], [2 * columns])


@gluon.constexpr_function
def eight_layout(warps, across=1):
    """Return the layout of eight accumulator columns; all warps that share a row have the same eight."""
    return rows_layout(8, [[0, 1], [8, 0]], (2, 4), warps, across)


@gluon.constexpr_function
def stored_layout(columns, warps, across):
    """Return the layout of stored probabilities as bytes of a left operand: words of four neighbouring columns."""
    wide = [[0, bit] for bit in (16, 32, 64) if bit * across < columns]
    return rows_layout(columns, [[0, 1], [0, 2], [8, 0], *wide], (4, 8), warps, across, columns // across)


@gluon.constexpr_function
def part_layout(warps, across):
    """Return a layout of (rows, across): one number from each warp that shares a row, all of them in each of its threads."""
    own = [[0, 1 << bit] for bit in range(across.bit_length() - 1)]
    return rows_layout(across, [*own, [8, 0]], (0, 0), warps, across)


@gluon.constexpr_function
def query_layout(channels, each, warps, across=1):
    """Return the layout of queries as words of ``each`` numbers, in the register order of a left operand."""
    near, far = [bit for bit in (1, 2) if bit * each < 4], [bit // each for bit in (16, 32, 64) if bit < channels]
    own = [*([0, bit] for bit in near), [8, 0], *([0, bit] for bit in far)]
    return rows_layout(channels // each, own, (4 // each, 8 // each), warps, across)


@gluon.constexpr_function
def output_layout(channels, warps, across=1):
    """Return the layout of outputs to store: a thread has a contiguous quarter of its warp's channels of both rows."""
    each = channels // (4 * across)
    own = [[0, bit] for bit in (1, 2, 4, 8, 16) if bit < each]
    return rows_layout(channels, [*own, [8, 0]], (each, 2 * each), warps, across, 4 * each)
