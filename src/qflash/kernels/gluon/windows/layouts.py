"""Layouts of :mod:`.windows.attention`, and how a row of scores is divided into tiles (Gluon).

Nothing is computed here: these are compile-time functions that return layouts, widths and offsets. Products are
mma.sync of m16n8k32 on int8, with all operands in registers. With t = lane % 4 and g = lane // 4 (a quad of lanes
shares rows g and g + 8):

    operand                         what a lane has                                      loaded as
    left, queries (16, 32)          rows g, g + 8; bytes 4t .. 4t + 3 of both halves     query_layout
    right, keys (32, 8)             column g; bytes 4t .. 4t + 3 of both halves          rows_layout
    right, values (32, 8)           the same                                             value_layout
    accumulator (16, 8)             rows g, g + 8; columns 2t, 2t + 1                    score_layout

"Halves" are channels 0 to 15 and 16 to 31 of a product, or keys. Channels are assigned to the places of a product such
that a lane's eight are neighbours in memory, 8t to 8t + 7 (:mod:`.windows.attention`), which is one wide load. The
layouts are linear, so that conversions which move no data are checked to be trivial when the kernel is compiled.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...tiles import has_half_block, window_widths

widths = gluon.constexpr_function(window_widths)
has_half = gluon.constexpr_function(has_half_block)


@gluon.constexpr_function
def product_layout(warps):
    """Return the accumulator layout of mma.sync: sixteen queries per warp."""
    return gl.NVMMADistributedLayout([2, 0], [warps, 1], [16, 8])


@gluon.constexpr_function
def operand_layout(index, warps):
    """Return the layout of the left (0) or right (1) operand of a product."""
    return gl.DotOperandLayout(index, product_layout(warps), 4)


@gluon.constexpr_function
def _own_rows(rows):
    """Return the bases of warps that have sixteen rows each."""
    return [[bit, 0] for bit in (16, 32) if bit < rows]


@gluon.constexpr_function
def _same_rows(warps):
    """Return the bases of warps that all have the same rows."""
    return [[0, 0] for bit in (1, 2) if bit < warps]


@gluon.constexpr_function
def starts(keys):
    """Return the first column of each tile of a row."""
    return (0, 32, 48)[: len(widths(keys))]


@gluon.constexpr_function
def own_rows_layout(rows):
    """Return a layout of (rows, 32): eight neighbouring channels per thread, sixteen rows per warp."""
    high = [[8, 0]] if rows > 8 else []
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[0, 1], [0, 2], [0, 4], *high], lanes, _own_rows(rows), [], [rows, 32])


@gluon.constexpr_function
def rows_layout(rows, warps):
    """Return :func:`own_rows_layout` of rows that every warp has, above all keys."""
    high = [[bit, 0] for bit in (8, 16, 32) if bit < rows]
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[0, 1], [0, 2], [0, 4], *high], lanes, _same_rows(warps), [], [rows, 32])


@gluon.constexpr_function
def value_layout(warps):
    """Return a layout of 32 keys by 32 channels: a lane has channels 4g to 4g + 3 of keys 2t and 2t + 1 of every eight."""
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [1, 0], [8, 0], [16, 0]], [[2, 0], [4, 0], [0, 4], [0, 8], [0, 16]], _same_rows(warps), [], [32, 32]
    )


@gluon.constexpr_function
def part_value_layout():
    """Return :func:`value_layout` of 64 keys, sixteen per warp."""
    own, lanes = [[0, 1], [0, 2], [1, 0], [8, 0]], [[2, 0], [4, 0], [0, 4], [0, 8], [0, 16]]
    return gl.DistributedLinearLayout(own, lanes, _own_rows(64), [], [64, 32])


@gluon.constexpr_function
def all_values_layout():
    """Return a layout of the values that lanes left in shared memory, (256, 8), of which every warp has all 64 keys.

    A row is a lane of a half of the keys and one of four columns; its eight numbers are the two registers of a right
    operand.
    """
    own = [[0, 1], [0, 2], [0, 4], [32, 0], [64, 0], [128, 0]]
    lanes = [[bit, 0] for bit in (1, 2, 4, 8, 16)]
    return gl.DistributedLinearLayout(own, lanes, _same_rows(4), [], [256, 8])


@gluon.constexpr_function
def all_flags_layout():
    """Return a layout of one number per lane of four warps, (32, 4), of which every warp has all."""
    lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[8, 0], [16, 0]], lanes, _same_rows(4), [], [32, 4])


@gluon.constexpr_function
def query_layout(rows, each):
    """Return a layout of rows of ``32 / each`` words of ``each`` numbers, in the register order of a left operand."""
    return gl.DistributedLinearLayout(
        [*([0, bit] for bit in (1, 2, 4) if bit * each < 4), *([[8, 0]] if rows > 8 else []), [0, 4 // each]],
        [[0, 8 // each], [0, 16 // each], [1, 0], [2, 0], [4, 0]],
        _own_rows(rows),
        [],
        [rows, 32 // each],
    )


@gluon.constexpr_function
def score_layout(rows, columns):
    """Return the layout of an accumulator, or of its rows g alone (eight rows), as a linear layout."""
    wide = [[0, bit] for bit in (8, 16) if bit < columns]
    lanes = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(
        [[0, 1], *([[8, 0]] if rows > 8 else []), *wide], lanes, _own_rows(rows), [], [rows, columns]
    )


@gluon.constexpr_function
def stage_layout(eights):
    """Return a layout of a bias in shared memory, (tiles of eight columns, 128): four numbers per lane and tile."""
    high = [[bit, 0] for bit in (1, 2) if bit < eights]
    lanes = [[0, bit] for bit in (4, 8, 16, 32, 64)]
    return gl.DistributedLinearLayout([[0, 1], [0, 2], *high], lanes, [], [], [eights, 128])


@gluon.constexpr_function
def bias_layout(rows, columns):
    """Return a layout of a tile of the bias as in memory: a lane has four neighbouring keys of sixteen, or two of eight."""
    near = (1, 2) if columns >= 16 else (1,)
    own = [*([0, bit] for bit in near), *([[8, 0]] if rows > 8 else []), *([0, bit] for bit in (16,) if bit < columns)]
    lanes = [[0, bit << len(near)] for bit in (1, 2)]
    return gl.DistributedLinearLayout(own, [*lanes, [1, 0], [2, 0], [4, 0]], _own_rows(rows), [], [rows, columns])
