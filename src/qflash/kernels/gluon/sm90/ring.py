"""Keys and values that pass through shared memory: the stores of :mod:`.sm90.attention_streaming` (Gluon, TMA).

The copy engine brings steps of keys, and tiles of packed values, ahead of their use; mbarriers say when they have arrived.
:class:`FirstRing` is the store of the first pass of :mod:`.sm90.two_pass`, :class:`SecondRing` that of the second. An iteration
is ``RING.UNROLL`` steps of ``RING.SPAN`` keys. Slots are refilled as soon as their keys are read.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ...common.tile_ops import MOST_ROUNDED_KEYS
from ..ptx_ops import fine_probabilities, least_score, magnitudes, may_wrap, raised, row_exponents
from ..releases import aggregate, barrier, load_tile
from ..row_ops import beside_rows, both_rows, one_row, own_twice, row_largest
from .layouts import of_part, score_layout, span_starts, span_widths, value_widths
from .query_block import padded_columns, part_steps, tile_of
from .rows import fine_of_row

# keys of a product
TILE = gl.constexpr(128)


@gluon.constexpr_function
def total_width(widths):
    """Return the padded channels of all spans."""
    return sum(widths)


@gluon.constexpr_function
def _last_columns(ring, part):
    """Return the columns of an iteration's last step in a part of :func:`.sm90.query_block.part_steps`."""
    return (ring.SPAN, ring.LEFT, TILE.value // 2)[part]


@gluon.constexpr_function
def ring_tiles(ring):
    """Return the tiles of an iteration in each part; of packed sequences there is one of half a tile, too."""
    before = (ring.UNROLL - 1) * ring.SPAN // TILE.value
    return tuple(before - -_last_columns(ring, part) // TILE.value for part in range(3 if ring.VARLEN else 2))


@gluon.constexpr_function
def tile_width(ring, part, tile):
    """Return the keys of a tile of an iteration."""
    step, tile = divmod(tile, ring.SPAN // TILE.value)
    columns = _last_columns(ring, part) if step == ring.UNROLL - 1 else ring.SPAN
    return min(TILE.value, columns - tile * TILE.value)


@aggregate
class Copies:
    """What is copied, and where to.

    Attributes:
        k_descs, v_descs: matrices of keys and of packed values, span by span.
        k_smem, v_smem: slots for steps of keys, and for tiles of values.
        k_row, k_column, v_row, v_column: where the head's keys and values begin.
        mask_descs, mask_smem, mask_row: the same of a mask, whose rows are the block's queries; empty tuples without one.
        ready: an mbarrier for each slot of keys.
        HEAD_DIM, SPAN: channels, keys of a step.
    """

    k_descs: gl.tuple
    v_descs: gl.tuple
    k_smem: gl.tuple
    v_smem: gl.tuple
    k_row: gl.tensor
    k_column: gl.tensor
    v_row: gl.tensor
    v_column: gl.tensor
    mask_descs: gl.tuple
    mask_smem: gl.tuple
    mask_row: gl.tensor
    ready: gl.shared_memory_descriptor
    HEAD_DIM: gl.constexpr
    SPAN: gl.constexpr

    @gluon.jit
    def load_keys(self, step, slot, wanted):
        """Start the copies of a step of keys, span by span, and of their mask."""
        FROM: gl.constexpr = span_starts(self.HEAD_DIM)
        bar = self.ready.index(slot)
        row = self.k_row + step * self.SPAN
        for c in gl.static_range(len(self.k_smem)):
            load_tile(self.k_descs[c], [row, self.k_column + FROM[c]], bar, self.k_smem[c].index(slot), pred=wanted)
        for i in gl.static_range(len(self.mask_smem)):
            load_tile(self.mask_descs[i], [self.mask_row, step * self.SPAN], bar, self.mask_smem[i].index(slot), pred=wanted)

    @gluon.jit
    def load_values(self, column, bar, slot):
        """Start the copies of a tile of packed values, span by span, from a column on."""
        row = self.v_row
        for c in gl.static_range(len(self.v_smem)):
            load_tile(self.v_descs[c], [row, column], bar, self.v_smem[c].index(slot))
            row += self.v_smem[c].shape[1]

    @gluon.jit
    def expect(self, slot, VALUES: gl.constexpr, wanted):
        """Tell the mbarrier of a slot how many bytes arrive: a step of keys, its mask, and with VALUES as many values."""
        BYTES: gl.constexpr = step_bytes(self.SPAN, self.HEAD_DIM, VALUES) + mask_bytes(self.mask_smem)
        mbarrier.expect(self.ready.index(slot), BYTES, pred=wanted)


@gluon.constexpr_function
def mask_bytes(slots):
    """Return the bytes of a step's mask, which has one of ``slots`` of shared memory; 0 without any."""
    return sum(x.shape[1] * x.shape[2] * x.dtype.primitive_bitwidth // 8 for x in slots)


@gluon.constexpr_function
def step_bytes(span, head_dim, values):
    """Return the bytes of a step of keys, or with ``values`` of these and their values."""
    return span * (sum(span_widths(head_dim)) + (sum(value_widths(head_dim)) if values else 0))


@aggregate
class ProgramRow:
    """:class:`.sm90.rows.Row` where scores are raised in loops of their own if exponents of any row of the program could wrap.

    Attributes:
        wrap: whether they could.
        APART: whether whole steps go to the second loop then, too.
    """

    slope: gl.tensor
    begin: gl.tensor
    constant: gl.tensor
    least: gl.tensor
    largest: gl.tensor
    most: gl.tensor
    wrap: gl.tensor
    APART: gl.constexpr
    fine = fine_of_row

    @gluon.jit
    def raised(self, s, PART: gl.constexpr, WARPS: gl.constexpr, ACROSS: gl.constexpr):
        if PART > 0:
            s = raised(s, self.least)
        elif not self.APART:  # nested: a compile-time condition is not combined with one of run time
            if self.wrap:
                s = raised(s, self.least)
        return s


# methods of both passes' stores; the first that ``at`` returns is a tile's step


@gluon.jit
def _steps(self, PART: gl.constexpr):
    return part_steps(PART, self.whole, self.iterations, self.narrow)


@gluon.jit
def _unseen(self, WARPS: gl.constexpr):
    return self.bias.unseen(WARPS)


@gluon.jit
def _mask_of(self, s, at):
    """The mask of a tile of scores, in their layout."""
    return self.copies.mask_smem[0].index(at[1]).load(s.type.layout)


@gluon.jit
def _padded(self, s, filler, at, INDEX: gl.constexpr, PART: gl.constexpr):
    HALVES: gl.constexpr = self.RING.SPAN // TILE
    if PART > 0 and not self.RING.WHOLE:
        s = padded_columns(s, self.left - at[0] * self.RING.SPAN - INDEX % HALVES * TILE, filler)
    return s


@gluon.jit
def _program_row(self, largest, multiplier, fraction_bits, OFFSET: gl.constexpr, WARPS: gl.constexpr):
    """The :class:`ProgramRow` of scores without a bias."""
    M: gl.constexpr = 16 * WARPS
    EIGHT: gl.constexpr = score_layout(8, WARPS)
    row_max = row_largest(largest)
    sizes = magnitudes(self.q[0])
    for c in gl.static_range(1, len(self.q)):
        sizes += gl.convert_layout(magnitudes(self.q[c]), sizes.type.layout, assert_trivial=True)
    sizes = gl.convert_layout(sizes, gl.SliceLayout(1, EIGHT), assert_trivial=True)
    magnitude = one_row(beside_rows(sizes, EIGHT) + largest * 0)
    wrap = gl.max(gl.reshape(may_wrap(magnitude, row_max, multiplier, fraction_bits), (2 * M,)), 0) > 0
    least = both_rows(least_score(row_max, multiplier, fraction_bits), M)
    slope, begin, constant = row_exponents(row_max, multiplier, fraction_bits, OFFSET)
    most = fine_probabilities(row_max, slope, begin, constant)
    row_max = both_rows(row_max, M)
    slope, begin, constant = both_rows(slope, M), both_rows(begin, M), own_twice(constant, M)
    # Not with two steps an iteration: without a branch in the first loop ptxas delays the copies of keys until after the
    # exponentials.
    APART: gl.constexpr = self.RING.UNROLL == 1 and self.RING.LEFT == self.RING.SPAN
    return ProgramRow(slope, begin, constant, least, row_max, most, wrap, APART)


@aggregate
class FirstRing:
    """The store of the first pass.

    Attributes:
        copies: see :class:`Copies`.
        left: keys of the head.
        count: steps.
        whole, iterations: iterations of whole steps, and all.
        narrow: 1 if half of the last tile is enough, else 0.
        q: queries in registers, span by span.
        bias: what is added to scores (:mod:`.sm90.bias`).
        passed: steps that slots had before.
        first_values: an mbarrier for the first values.
        RING: :class:`.gluon.constants.Ring`.
    """

    copies: gl.base_value
    left: gl.tensor
    count: gl.tensor
    whole: gl.tensor
    iterations: gl.tensor
    narrow: gl.tensor
    q: gl.tuple
    bias: gl.base_value
    passed: gl.tensor
    first_values: gl.shared_memory_descriptor
    RING: gl.constexpr
    TILES: gl.constexpr
    steps, unseen, padded = _steps, _unseen, _padded

    @gluon.jit
    def at(self, iteration, INDEX: gl.constexpr, PART: gl.constexpr):
        """A tile's step, the slot of its keys, and its iteration."""
        PLACE: gl.constexpr = INDEX // (self.RING.SPAN // TILE)
        return self.RING.UNROLL * iteration + PLACE, (self.passed + iteration) % 2 * self.RING.UNROLL + PLACE, iteration

    @gluon.jit
    def keys(self, at, INDEX: gl.constexpr, PART: gl.constexpr):
        _, slot, iteration = at
        HALVES: gl.constexpr = self.RING.SPAN // TILE
        if INDEX % HALVES == 0:
            mbarrier.wait(self.copies.ready.index(slot), ((self.passed + iteration) // 2) & 1)
        return tile_of(self.copies.k_smem, slot, INDEX % HALVES * TILE, tile_width(self.RING, PART, INDEX), 0)

    @gluon.jit
    def release(self, at, INDEX: gl.constexpr, PART: gl.constexpr):
        """Refill a step's slot once its keys are read. After the last ones come the first keys of the second pass."""
        step, slot, iteration = at
        HALVES: gl.constexpr = self.RING.SPAN // TILE
        SLOTS: gl.constexpr = 2 * self.RING.UNROLL
        if INDEX % HALVES == HALVES - 1 or of_part(self.TILES, PART) - 1 == INDEX:
            barrier()
            more = iteration + 2 < self.iterations
            following = gl.where(more, step + SLOTS, INDEX if SLOTS == 4 else step + SLOTS - self.count)
            wanted = more | (iteration % 2 == 0) if SLOTS == 4 else True
            self.copies.expect(slot, False, wanted)
            self.copies.load_keys(following, slot, wanted)

    @gluon.jit
    def biased(self, s, seen, at, INDEX: gl.constexpr, PART: gl.constexpr):
        if len(self.copies.mask_smem) > 0:
            bias = _mask_of(self, s, at)
            PADDED: gl.constexpr = PART > 0 and not self.RING.WHOLE
            seen = self.bias.noted(seen, bias, self.left - at[0] * self.RING.SPAN, PADDED)
            s = self.bias.added(s, bias)
        return s, seen

    @gluon.jit
    def anew(self, bias):
        """The store of a first pass that is made again with another ``bias``."""
        return FirstRing(
            self.copies, self.left, self.count, self.whole, self.iterations, self.narrow, self.q, bias,
            self.passed + self.count, self.first_values, self.RING, self.TILES,
        )  # fmt: skip

    @gluon.jit
    def row(
        self, q, largest, multiplier, fraction_bits, CHANNELS: gl.constexpr, OFFSET: gl.constexpr, WARPS: gl.constexpr,
        ACROSS: gl.constexpr,
    ):  # fmt: skip
        if len(self.copies.mask_smem) > 0:
            row = self.bias.row(row_largest(largest), fraction_bits, OFFSET, 16 * WARPS)
        else:
            row = _program_row(self, largest, multiplier, fraction_bits, OFFSET, WARPS)
        return row

    @gluon.jit
    def again(self, row):
        """The store of the second pass; the first keys and values have arrived."""
        # steps that the first two slots had in the first pass, for the parity of their mbarriers
        passed = (self.iterations + 1) // 2 * 2 if self.RING.UNROLL == 2 else self.passed + self.count
        mbarrier.wait(self.copies.ready.index(passed % 2), (passed // 2) & 1)
        mbarrier.wait(self.first_values, 0)
        # where exponents could wrap, the loops that raise scores take all steps
        whole, narrow = self.whole, self.narrow
        if row.APART:
            whole = gl.where(row.wrap, 0, whole)
        if self.RING.VARLEN:
            narrow = gl.where(row.wrap, 0, narrow)
        return SecondRing(
            self.copies, self.left, self.count, whole, self.iterations, narrow, self.bias, passed, self.RING, self.TILES,
            (0, 0, 0), TILE,
        )  # fmt: skip


@aggregate
class SecondRing:
    """The store of the second pass; the fields are those of :class:`FirstRing`.

    Attributes:
        passed: steps that the slots had in the first pass.
    """

    copies: gl.base_value
    left: gl.tensor
    count: gl.tensor
    whole: gl.tensor
    iterations: gl.tensor
    narrow: gl.tensor
    bias: gl.base_value
    passed: gl.tensor
    RING: gl.constexpr
    TILES: gl.constexpr
    STARTS: gl.constexpr
    COLUMNS: gl.constexpr
    steps, unseen, padded = _steps, _unseen, _padded

    @gluon.jit
    def at(self, iteration, INDEX: gl.constexpr, PART: gl.constexpr):
        """A tile's step, the slots of its keys and of the next step's, and that of the step's first tile of values."""
        HALVES: gl.constexpr = self.RING.SPAN // TILE
        PLACE: gl.constexpr = INDEX // HALVES
        step = self.RING.UNROLL * iteration + PLACE
        if self.RING.UNROLL == 2:
            slot, ahead, v_slot = PLACE, 1 - PLACE, PLACE * HALVES
        else:
            slot, ahead, v_slot = (self.passed + step) % 2, (self.passed + step + 1) % 2, step % 2 * HALVES
        return step, slot, ahead, v_slot

    @gluon.jit
    def keys(self, at, INDEX: gl.constexpr, PART: gl.constexpr):
        HALVES: gl.constexpr = self.RING.SPAN // TILE
        return tile_of(self.copies.k_smem, at[1], INDEX % HALVES * TILE, tile_width(self.RING, PART, INDEX), 0)

    @gluon.jit
    def biased(self, s, seen, at, INDEX: gl.constexpr, PART: gl.constexpr):
        if len(self.copies.mask_smem) > 0:
            s = self.bias.added(s, _mask_of(self, s, at))
        return s, seen

    @gluon.jit
    def release(self, at, INDEX: gl.constexpr, PART: gl.constexpr):
        """Refill what a step's keys, which are read, and the values of the step before lay in."""
        step, slot, _, v_slot = at
        HALVES: gl.constexpr = self.RING.SPAN // TILE
        if INDEX % HALVES == HALVES - 1 or of_part(self.TILES, PART) - 1 == INDEX:
            barrier()
            if step + 1 < self.count:
                self.copies.expect(slot, True, True)
                self.copies.load_keys(step + 2, slot, True)
                for tile in gl.static_range(HALVES):
                    column = self.copies.v_column + (step + 1) * self.RING.SPAN + tile * TILE
                    self.copies.load_values(column, self.copies.ready.index(slot), HALVES - v_slot + tile)

    @gluon.jit
    def values(self, at, INDEX: gl.constexpr, PART: gl.constexpr):
        step, _, ahead, v_slot = at
        HALVES: gl.constexpr = self.RING.SPAN // TILE
        if INDEX % HALVES == 0:
            # wait for these values, and for the keys of the next step
            mbarrier.wait(self.copies.ready.index(ahead), ((self.passed + step + 1) // 2) & 1)
        return tile_of(self.copies.v_smem, v_slot + INDEX % HALVES, 0, tile_width(self.RING, PART, INDEX), 1)

    @gluon.jit
    def sums(self, total, fine, most, EXACT: gl.constexpr):
        count = (self.count - 1) * self.RING.SPAN + self.RING.LEFT
        if self.RING.VARLEN:
            count -= self.narrow * (TILE // 2)
        # keys past the last had the row maximum as score, so the largest probability
        total += (count - self.left) * ((most + 64) >> 7)
        if EXACT:
            fine -= (count - self.left) * most
            if self.RING.VARLEN:
                # few keys have the sum of rounded P, of which nothing is missing
                fine = gl.where(self.left > MOST_ROUNDED_KEYS, fine, 0)
        return total, fine, count
