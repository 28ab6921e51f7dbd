"""What each lane of a warp has, in the kernels in Gluon: (lanes, numbers), 32 lanes that are alike in all warps, or all lanes.

Lanes that have the same channels of different rows put what they find together by halves: of two lanes each goes on with
one half of the channels and hands the other what it has of the other half. In the end a lane has one word of channels, whose
scales are worked out nowhere else in its warp, and from where those who need them fetch them.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...common.quantize_ops import nan_max
from ..ptx_ops import largest_in_warp, numbers_of, words_of
from ..row_ops import of_partner, shuffled


@gluon.constexpr_function
def lanes_layout(lanes, numbers, warps):
    """All ``numbers`` of a lane in one thread."""
    own = [[0, 1 << bit] for bit in range(numbers.bit_length() - 1)]
    apart = [[32 * bit if lanes > 32 else 0, 0] for bit in (1, 2, 4) if bit < warps]
    return gl.DistributedLinearLayout(own, [[1, 0], [2, 0], [4, 0], [8, 0], [16, 0]], apart, [], [lanes, numbers])


@gluon.constexpr_function
def _apart_layout(numbers, warps):
    """(warps, 32, numbers)."""
    own = [[0, 0, 1 << bit] for bit in range(numbers.bit_length() - 1)]
    lanes = [[0, 1 << bit, 0] for bit in range(5)]
    return gl.DistributedLinearLayout(own, lanes, [[bit, 0, 0] for bit in (1, 2, 4) if bit < warps], [], [warps, 32, numbers])


@gluon.jit
def in_lanes(x):
    """(lanes, numbers) that lie so already."""
    return gl.convert_layout(x, lanes_layout(x.shape[0], x.shape[1], gl.num_warps()), assert_trivial=True)


@gluon.jit
def in_all_warps(x):
    """What every warp has alike, as numbers of all lanes."""
    N: gl.constexpr = x.shape[1]
    L: gl.constexpr = _apart_layout(N, gl.num_warps())
    x = gl.convert_layout(x, gl.SliceLayout(0, L), assert_trivial=True)[None, :, :]
    x, _ = gl.broadcast(x, gl.zeros((gl.num_warps(), 32, N), x.dtype, L))
    return in_lanes(gl.reshape(x, (32 * gl.num_warps(), N)))


@gluon.jit
def first_and_second(x):
    """Two halves of each lane's numbers."""
    a, b = gl.split(gl.permute(gl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))
    return in_lanes(a), in_lanes(b)


@gluon.jit
def _behind(a, b):
    """Each lane's numbers of ``a``, then those of ``b``."""
    return in_lanes(gl.reshape(gl.permute(gl.join(a, b), (0, 2, 1)), (a.shape[0], 2 * a.shape[1])))


@gluon.jit
def repeated(x, NUMBERS: gl.constexpr):
    """Each lane's numbers again and again, NUMBERS in all."""
    if x.shape[1] < NUMBERS:
        x = repeated(_behind(x, x), NUMBERS)
    return x


@gluon.jit
def lane_words(x):
    """:func:`.gluon.ptx_ops.words_of` each lane's numbers."""
    return in_lanes(words_of(x))


@gluon.jit
def lane_numbers(x, DTYPE: gl.constexpr):
    """The numbers, as float32, of a word of each of 32 lanes: (32, numbers) of them."""
    x = numbers_of(gl.reshape(x, (32,)), DTYPE)
    return in_lanes(gl.reshape(x, (32, x.shape[0] // 32)))


@gluon.constexpr_function
def _of_lane(lane, kept):
    """Assembly for a number of the lane that is ``lane`` but for the bits ``kept`` of one's own, segments of a shuffle."""
    return f"shfl.sync.idx.b32 $0, $1, {lane}, {kept << 8 | 31}, -1;"


@gluon.jit
def lane_bit(x, BIT: gl.constexpr):
    """Whether a bit of a lane's number is set, beside numbers of lanes."""
    L: gl.constexpr = gl.SliceLayout(1, x.type.layout)
    return ((gl.arange(0, x.shape[0], layout=L) >> BIT) & 1)[:, None] != 0


@gluon.jit
def with_partner(x, BIT: gl.constexpr, COMBINE: gl.constexpr, DTYPE: gl.constexpr):
    """Words combined with those of the lane whose number differs in a bit; of several each of the two goes on with one half."""
    other = x
    if x.shape[1] > 1:
        a, b = first_and_second(x)
        upper = lane_bit(a, BIT)
        x, other = gl.where(upper, b, a), gl.where(upper, a, b)
    return COMBINE(x, shuffled(other, of_partner(BIT)), DTYPE)


@gluon.jit
def from_lanes(x, COUNT: gl.constexpr, STEP: gl.constexpr, KEPT: gl.constexpr, FIRST: gl.constexpr = 0):
    """The numbers of COUNT lanes, from FIRST in steps of STEP, one behind the other; in the bits KEPT of lanes' numbers their
    own stand."""
    if COUNT > 1:
        HALF: gl.constexpr = COUNT // 2
        x = _behind(from_lanes(x, HALF, STEP, KEPT, FIRST), from_lanes(x, HALF, STEP, KEPT, FIRST + HALF * STEP))
    else:
        x = shuffled(x, _of_lane(FIRST, KEPT))
    return x


@gluon.jit
def largest_of_lanes(x):
    """The largest of magnitudes that every warp has alike."""
    return largest_in_warp(gl.reduce(x, 1, nan_max)).to(gl.float32, bitcast=True)
