"""Where a program's keys and values are while :mod:`.sm90.two_pass` passes over them (Gluon).

A store has the fields and methods that :mod:`.sm90.two_pass` lists.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...common.tile_ops import MOST_ROUNDED_KEYS
from ..releases import aggregate
from .layouts import row_starts, row_widths
from .query_block import padded_columns, part_steps, stored_columns, tile_of
from .rows import row_maximum, row_numbers


@gluon.constexpr_function
def known_tiles(keys, unroll, across):
    """Return the tiles of each part of a row of known length: iterations of ``unroll`` whole ones, then each that is left."""
    return (unroll,) + (1,) * (len(row_widths(keys, across)) - keys // (128 * unroll) * unroll)


@gluon.constexpr_function
def known_tile(keys, unroll, part):
    """Return which tile of a row of known length a part behind the first is."""
    return keys // (128 * unroll) * unroll + part - 1


@gluon.constexpr_function
def known_starts(keys, unroll):
    """Return the first key of each part of a row of known length; 0 for whole tiles, which have no key past the last."""
    return (0, *row_starts(keys)[known_tile(keys, unroll, 1) :])


# methods of both stores: all keys and values of a head are in shared memory


@gluon.jit
def _at(self, step, TILE: gl.constexpr, PART: gl.constexpr):
    return step


@gluon.jit
def _unseen(self, WARPS: gl.constexpr):
    return gl.to_tensor(0)


@gluon.jit
def _biased(self, s, seen, step, TILE: gl.constexpr, PART: gl.constexpr):
    return s, seen


@gluon.jit
def _release(self, step, TILE: gl.constexpr, PART: gl.constexpr):
    pass


@gluon.jit
def _row(
    self, q, largest, multiplier, fraction_bits, CHANNELS: gl.constexpr, OFFSET: gl.constexpr, WARPS: gl.constexpr,
    ACROSS: gl.constexpr,
):  # fmt: skip
    row_max = row_maximum(largest, multiplier, WARPS, ACROSS)
    return row_numbers(q, row_max, multiplier, fraction_bits, CHANNELS, OFFSET, WARPS)


@gluon.jit
def _again(self, row):
    return self


@aggregate
class KnownKeys:
    """All keys and values of a head in shared memory, whose number is a constant.

    Attributes:
        k_whole, v_whole: keys and values of whole tiles of 128, each span in one piece, so that loops can index them.
        k_smem, v_smem: every tile's spans.
        WIDTHS: channels of the spans of values.
        UNROLL: whole tiles an iteration.
        ACROSS: warps that share sixteen queries.
        COLUMNS, TILES, STARTS: as :mod:`.sm90.two_pass` wants them.
    """

    k_whole: gl.tuple
    v_whole: gl.tuple
    k_smem: gl.tuple
    v_smem: gl.tuple
    WIDTHS: gl.constexpr
    UNROLL: gl.constexpr
    ACROSS: gl.constexpr
    COLUMNS: gl.constexpr
    TILES: gl.constexpr
    STARTS: gl.constexpr
    at, unseen, biased, release, row, again = _at, _unseen, _biased, _release, _row, _again

    @gluon.jit
    def steps(self, PART: gl.constexpr):
        STEPS: gl.constexpr = self.COLUMNS // (128 * self.UNROLL) if PART == 0 else 1
        return 0, STEPS

    @gluon.jit
    def keys(self, step, TILE: gl.constexpr, PART: gl.constexpr):
        if PART == 0:
            k = tile_at(self.k_whole, step * self.UNROLL + TILE)
        else:
            AT: gl.constexpr = known_tile(self.COLUMNS, self.UNROLL, PART)
            k = first_keys(self.k_smem[AT], row_widths(self.COLUMNS, self.ACROSS)[AT])
        return k

    @gluon.jit
    def values(self, step, TILE: gl.constexpr, PART: gl.constexpr):
        if PART == 0:
            v = first_channels(tile_at(self.v_whole, step * self.UNROLL + TILE), self.WIDTHS)
        else:
            v = self.v_smem[known_tile(self.COLUMNS, self.UNROLL, PART)]
        return v

    @gluon.jit
    def padded(self, s, filler, step, TILE: gl.constexpr, PART: gl.constexpr):
        return s

    @gluon.jit
    def sums(self, total, fine, most, EXACT: gl.constexpr):
        COUNT: gl.constexpr = stored_columns(row_widths(self.COLUMNS, self.ACROSS))
        return total, fine, COUNT


@gluon.jit
def known_keys(
    k_whole, v_whole, k_smem, v_smem, WIDTHS: gl.constexpr, KEYS: gl.constexpr, UNROLL: gl.constexpr, ACROSS: gl.constexpr
):  # fmt: skip
    """The store of all KEYS keys and values of a head; see :class:`KnownKeys`."""
    TILES: gl.constexpr = known_tiles(KEYS, UNROLL, ACROSS)
    STARTS: gl.constexpr = known_starts(KEYS, UNROLL)
    return KnownKeys(k_whole, v_whole, k_smem, v_smem, WIDTHS, UNROLL, ACROSS, KEYS, TILES, STARTS)


@gluon.jit
def first_keys(keys, WIDTH: gl.constexpr):
    """The spans of a tile of keys, (keys, channels), without the rows past its WIDTH."""
    spans = ()
    for c in gl.static_range(len(keys)):
        spans = spans + (keys[c].slice(0, WIDTH, 0),)
    return spans


@gluon.jit
def first_channels(values, WIDTHS: gl.constexpr):
    """The spans of a tile of values, (channels, keys), without the rows past their WIDTHS."""
    spans = ()
    for c in gl.static_range(len(values)):
        spans = spans + (values[c].slice(0, WIDTHS[c], 0),)
    return spans


@gluon.jit
def tile_at(whole, i):
    """The spans of whole tile ``i``."""
    spans = ()
    for c in gl.static_range(len(whole)):
        spans = spans + (whole[c].index(i),)
    return spans


@gluon.constexpr_function
def last_width(kind, tile):
    """Return the keys of a tile of a kind of :func:`.sm90.query_block.part_steps`, where whole ones have ``tile``."""
    return tile // 2 if kind == 2 else tile


@aggregate
class PackedKeys:
    """All keys and values of a head in shared memory, whose number only the GPU knows; a tile an iteration.

    Attributes:
        k_smem, v_smem: tiles of COLUMNS keys, each span in one piece.
        left: keys of the head.
        COLUMNS, TILES, STARTS: as :mod:`.sm90.two_pass` wants them: a tile an iteration, in parts of :func:`part_steps`.
    """

    k_smem: gl.tuple
    v_smem: gl.tuple
    left: gl.tensor
    COLUMNS: gl.constexpr
    TILES: gl.constexpr
    STARTS: gl.constexpr
    at, unseen, biased, release, row, again = _at, _unseen, _biased, _release, _row, _again

    @gluon.jit
    def steps(self, PART: gl.constexpr):
        return part_steps(PART, self.left // self.COLUMNS, gl.cdiv(self.left, self.COLUMNS), self.narrow())

    @gluon.jit
    def narrow(self):
        """1 if half of the last tile is enough, else 0."""
        return ((self.left - 1) % self.COLUMNS < self.COLUMNS // 2).to(gl.int32)

    @gluon.jit
    def keys(self, step, TILE: gl.constexpr, PART: gl.constexpr):
        return tile_of(self.k_smem, step, 0, last_width(PART, self.COLUMNS), 0)

    @gluon.jit
    def values(self, step, TILE: gl.constexpr, PART: gl.constexpr):
        return tile_of(self.v_smem, step, 0, last_width(PART, self.COLUMNS), 1)

    @gluon.jit
    def padded(self, s, filler, step, TILE: gl.constexpr, PART: gl.constexpr):
        if PART > 0:
            s = padded_columns(s, self.left - step * self.COLUMNS, filler)
        return s

    @gluon.jit
    def sums(self, total, fine, most, EXACT: gl.constexpr):
        count = gl.cdiv(self.left, self.COLUMNS) * self.COLUMNS - self.narrow() * (self.COLUMNS // 2)
        # keys past the last had the row maximum as score, so the largest probability
        total += (count - self.left) * ((most + 64) >> 7)
        if EXACT:
            # few keys have the sum of rounded P, of which nothing is missing
            fine = gl.where(self.left > MOST_ROUNDED_KEYS, fine - (count - self.left) * most, 0)
        return total, fine, count
