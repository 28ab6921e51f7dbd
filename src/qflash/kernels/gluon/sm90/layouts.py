"""Layouts of the attention kernels for Hopper, and how a row of scores and a head's channels are divided."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...tiles import channel_spans as spans_of
from ...tiles import is_crowded as crowded
from ...tiles import kernel_width as width_of
from ...tiles import row_widths as widths_of
from ...tiles import value_width as value_width_of

channel_spans = gluon.constexpr_function(spans_of)
is_crowded = gluon.constexpr_function(crowded)
kernel_width = gluon.constexpr_function(width_of)
value_width = gluon.constexpr_function(value_width_of)
row_widths = gluon.constexpr_function(widths_of)


@gluon.constexpr_function
def row_starts(keys):
    """Where the tiles of a row begin."""
    widths = row_widths(keys)
    return tuple(sum(widths[:index]) for index in range(len(widths)))


@gluon.constexpr_function
def span_starts(channels):
    """Where the spans of a head's channels begin."""
    spans = channel_spans(channels)
    return tuple(sum(spans[:index]) for index in range(len(spans)))


@gluon.constexpr_function
def span_widths(channels):
    """Channels of the spans, those past a head's last included."""
    return tuple(kernel_width(span) for span in channel_spans(channels))


@gluon.constexpr_function
def value_widths(channels):
    """The same of values, whose channels are columns of a product."""
    return tuple(value_width(span) for span in channel_spans(channels))


@gluon.constexpr_function
def depth(width):
    """Keys that a tile's product with V takes: the tensor core's least is 32."""
    return max(width, 32)


@gluon.constexpr_function
def product_layout(width, warps, across=1):
    """A product with ``width`` columns; sixteen rows a warp, or ``across`` that share the columns."""
    return gl.NVMMADistributedLayout([3, 0], [warps, across], [16, width // across, 32])


@gluon.constexpr_function
def in_memory(layout):
    """Whether what has this layout lies in shared memory."""
    return isinstance(layout, (gl.NVMMASharedLayout, gl.SwizzledSharedLayout))


@gluon.constexpr_function
def shared_layout(width):
    """Rows of ``width`` bytes in shared memory, as the tensor core reads them."""
    return gl.NVMMASharedLayout(min(width, 128), 8)


@gluon.constexpr_function
def row_layout(channels, bits, warps):
    """Rows of ``channels`` numbers, sixteen bytes a thread."""
    each = 128 // bits
    return gl.BlockedLayout([1, each], [32 * each // channels, channels // each], [warps, 1], [1, 0])


@gluon.constexpr_function
def sum_layout(channels, warps):
    """Rows of ``channels``, sixteen bytes a thread and two threads a row, whatever their length; more where rows are few."""
    rows = min(16, max(1, channels // warps))
    return gl.BlockedLayout([1, 16], [rows, 32 // rows], [warps, 1], [1, 0])


@gluon.constexpr_function
def quad_layout(rows, channels, warps, piece):
    """Four keys a thread, which is what it takes to store neighbouring keys of a channel in one word.

    ``piece`` keys at a time, each warp's part of them shared out by channels, up to sixteen a thread. A tile of fewer
    ``rows`` than that has fewer keys a thread.
    """
    each = max(1, min(16, channels * piece // (128 * warps)))
    lanes = min(8, channels // each)
    across = channels // (lanes * each)
    groups = 32 // lanes * (warps // across)
    return gl.BlockedLayout([min(4, rows // groups), each], [32 // lanes, lanes], [warps // across, across], [1, 0])


@gluon.constexpr_function
def float_piece(channels, warps):
    """Keys at a time where they are to be quantised: for ranges of channels a thread had better have few of these."""
    # two at least
    return 8 * warps * max(1, 32 // channels)


@gluon.constexpr_function
def range_layout(channels, warps):
    """What a thread finds of its own keys' ranges: 32 rows in all, with the channels of :func:`quad_layout`."""
    return quad_layout(32, channels, warps, float_piece(channels, warps))


@gluon.constexpr_function
def key_warps(channels, warps):
    """Warps that share the rows of :func:`range_layout`: the others have other channels."""
    return range_layout(channels, warps).warps_per_cta[0]


@gluon.constexpr_function
def part_words_layout(words, channels, warps):
    """Words of channels from each of those warps, all of a thread's own channels."""
    quads = range_layout(channels, warps)
    each = quads.size_per_thread[1] * words // channels
    return gl.BlockedLayout([quads.warps_per_cta[0], each], quads.threads_per_warp, quads.warps_per_cta, [1, 0])


@gluon.constexpr_function
def all_words_layout(words, parts, warps):
    """The same, all channels in every warp."""
    return gl.BlockedLayout([parts, max(1, words // 32)], [1, 32], [1, warps], [1, 0])


@gluon.constexpr_function
def rows_layout(columns, own, near, warps, across=1, apart=0):
    """Rows as a product has them, sixteen a warp: a lane and its three neighbours have one and perhaps that eight below.

    Args:
        own: bits of what a thread has.
        near: columns from the first of four neighbours to the second, and to the third.
        across: warps that share a row, their columns so many ``apart``; all the same ones if that is 0.
    """
    lanes = [*([0, column] for column in near), [1, 0], [2, 0], [4, 0]]
    rows = [[16 << bit, 0] for bit in range(warps.bit_length() - 1)]
    parts = [[0, apart << bit] for bit in range(across.bit_length() - 1)]
    return gl.DistributedLinearLayout(own, lanes, rows + parts, [], [16 * warps, columns])


@gluon.constexpr_function
def score_layout(columns, warps, across=1):
    """A product's layout, in words of its own."""
    wide = [[0, bit] for bit in (8, 16, 32, 64) if bit * across < columns]
    return rows_layout(columns, [[0, 1], [8, 0], *wide], (2, 4), warps, across, columns // across)


@gluon.constexpr_function
def quarter_layout(warps):
    """Four numbers a row, one for each thread that has a part of it."""
    return rows_layout(4, [[8, 0]], (1, 2), warps)


@gluon.constexpr_function
def half_layout(columns, warps, across=1):
    """The upper eight, or the eight lower, of each warp's rows of a product."""
    wide = [[0, bit] for bit in (8, 16, 32, 64) if bit * across < columns]
    lanes = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    rows = [[8 << bit, 0] for bit in range(warps.bit_length() - 1)]
    parts = [[0, (columns // across) << bit] for bit in range(across.bit_length() - 1)]
    return gl.DistributedLinearLayout([[0, 1], *wide], lanes, rows + parts, [], [8 * warps, columns])


@gluon.constexpr_function
def pairs_layout(columns, warps, across=1):
    """Pairs of a row of ``columns`` numbers, each twice in a row, as a thread's registers of a product have them.

    Four lanes read sixteen bytes each side by side: all banks of shared memory are busy.
    """
    own = [[bit] for bit in (1, 2, 16, 32, 64, 128) if bit * across < 2 * columns]
    rows = [[0] for _ in range(warps.bit_length() - 1)]
    parts = [[(2 * columns // across) << bit] for bit in range(across.bit_length() - 1)]
    return gl.DistributedLinearLayout(own, [[4], [8], [0], [0], [0]], rows + parts, [], [2 * columns])


@gluon.constexpr_function
def eight_layout(warps, across=1):
    """Eight columns of a product, which all warps of a row have."""
    return rows_layout(8, [[0, 1], [8, 0]], (2, 4), warps, across)


@gluon.constexpr_function
def stored_layout(columns, warps, across):
    """Stored probabilities, four neighbours in a word."""
    wide = [[0, bit] for bit in (16, 32, 64) if bit * across < columns]
    return rows_layout(columns, [[0, 1], [0, 2], [8, 0], *wide], (4, 8), warps, across, columns // across)


@gluon.constexpr_function
def part_layout(warps, across):
    """A number of each warp of a row, all of them in all of its threads."""
    own = [[0, 1 << bit] for bit in range(across.bit_length() - 1)]
    return rows_layout(across, [*own, [8, 0]], (0, 0), warps, across)


@gluon.constexpr_function
def query_layout(channels, each, warps, across=1):
    """Words of ``each`` numbers of queries, in the order of a left operand's registers."""
    near, far = [bit for bit in (1, 2) if bit * each < 4], [bit // each for bit in (16, 32, 64) if bit < channels]
    own = [*([0, bit] for bit in near), [8, 0], *([0, bit] for bit in far)]
    return rows_layout(channels // each, own, (4 // each, 8 // each), warps, across)


@gluon.constexpr_function
def output_layout(channels, warps, across=1):
    """Outputs: a quarter of a warp's part of a row's channels a thread."""
    each = channels // (4 * across)
    own = [[0, bit] for bit in (1, 2, 4, 8, 16) if bit < each]
    return rows_layout(channels, [*own, [8, 0]], (each, 2 * each), warps, across, 4 * each)
