"""Layouts of :mod:`.windows.attention`, and how a row of scores is divided (Gluon)."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...tiles import has_half_block, window_widths

widths = gluon.constexpr_function(window_widths)
has_half = gluon.constexpr_function(has_half_block)


@gluon.constexpr_function
def product_layout(warps):
    """Sixteen queries a warp."""
    return gl.NVMMADistributedLayout([2, 0], [warps, 1], [16, 8])


@gluon.constexpr_function
def operand_layout(index, warps):
    """What an operand of a product looks like."""
    return gl.DotOperandLayout(index, product_layout(warps), 4)


@gluon.constexpr_function
def _own_rows(rows):
    """Bases of warps that have sixteen rows each."""
    return [[bit, 0] for bit in (16, 32) if bit < rows]


@gluon.constexpr_function
def _same_rows(warps):
    """Bases of warps that all have the same."""
    return [[0, 0] for bit in (1, 2) if bit < warps]


@gluon.constexpr_function
def starts(keys):
    """Where the tiles of a row begin."""
    return (0, 32, 48)[: len(widths(keys))]


@gluon.constexpr_function
def own_rows_layout(rows):
    """Eight of a row's 32 channels a thread, each warp with rows of its own: outputs, and keys that warps share out."""
    high = [[8, 0]] if rows > 8 else []
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[0, 1], [0, 2], [0, 4], *high], lanes, _own_rows(rows), [], [rows, 32])


@gluon.constexpr_function
def rows_layout(rows, warps):
    """The same of rows that every warp has, keys above all."""
    high = [[bit, 0] for bit in (8, 16, 32) if bit < rows]
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[0, 1], [0, 2], [0, 4], *high], lanes, _same_rows(warps), [], [rows, 32])


@gluon.constexpr_function
def value_layout(warps):
    """32 keys of 32 channels, four channels a thread: two neighbouring keys of each of four tiles of eight."""
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [1, 0], [8, 0], [16, 0]], [[2, 0], [4, 0], [0, 4], [0, 8], [0, 16]], _same_rows(warps), [], [32, 32]
    )


@gluon.constexpr_function
def part_value_layout():
    """:func:`value_layout` of 64 keys, sixteen a warp."""
    own, lanes = [[0, 1], [0, 2], [1, 0], [8, 0]], [[2, 0], [4, 0], [0, 4], [0, 8], [0, 16]]
    return gl.DistributedLinearLayout(own, lanes, _own_rows(64), [], [64, 32])


@gluon.constexpr_function
def all_values_layout():
    """What lanes have of 32 keys' values in each of four columns, for both halves of the keys; every warp has it."""
    own = [[0, 1], [0, 2], [0, 4], [32, 0], [64, 0], [128, 0]]
    lanes = [[bit, 0] for bit in (1, 2, 4, 8, 16)]
    return gl.DistributedLinearLayout(own, lanes, _same_rows(4), [], [256, 8])


@gluon.constexpr_function
def all_flags_layout():
    """A number of each lane of four warps, which every warp has."""
    lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[8, 0], [16, 0]], lanes, _same_rows(4), [], [32, 4])


@gluon.constexpr_function
def query_layout(rows, each):
    """Rows of 32 / ``each`` words, each of so many numbers, in the order of an operand's registers."""
    return gl.DistributedLinearLayout(
        [*([0, bit] for bit in (1, 2, 4) if bit * each < 4), *([[8, 0]] if rows > 8 else []), [0, 4 // each]],
        [[0, 8 // each], [0, 16 // each], [1, 0], [2, 0], [4, 0]],
        _own_rows(rows),
        [],
        [rows, 32 // each],
    )


@gluon.constexpr_function
def score_layout(rows, columns):
    """A product, or its upper half of eight rows."""
    wide = [[0, bit] for bit in (8, 16) if bit < columns]
    lanes = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(
        [[0, 1], *([[8, 0]] if rows > 8 else []), *wide], lanes, _own_rows(rows), [], [rows, columns]
    )


@gluon.constexpr_function
def stage_layout(eights):
    """A staged tile of the bias: four numbers a thread for every eight columns."""
    high = [[bit, 0] for bit in (1, 2) if bit < eights]
    lanes = [[0, bit] for bit in (4, 8, 16, 32, 64)]
    return gl.DistributedLinearLayout([[0, 1], [0, 2], *high], lanes, [], [], [eights, 128])


@gluon.constexpr_function
def bias_layout(rows, columns):
    """A tile of the bias as it lies in memory: of sixteen keys a thread has four neighbours, of eight two."""
    near = (1, 2) if columns >= 16 else (1,)
    own = [*([0, bit] for bit in near), *([[8, 0]] if rows > 8 else []), *([0, bit] for bit in (16,) if bit < columns)]
    lanes = [[0, bit << len(near)] for bit in (1, 2)]
    return gl.DistributedLinearLayout(own, [*lanes, [1, 0], [2, 0], [4, 0]], _own_rows(rows), [], [rows, columns])
