"""Which packed sequence a program takes: the long ones first, so that no long one is left to the end (Gluon).

Programs start in the order of their numbers, and lengths are known to the GPU alone. So each program looks all of them up and
finds its own sequence by bisection: once, in one warp's registers, without shared memory.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def bits_of(number):
    """Return the bits of a number."""
    return number.bit_length()


@gluon.jit
def sequence_by_length(cu_ptr, place, sequences, MOST: gl.constexpr, UNITS: gl.constexpr, WARPS: gl.constexpr):
    """The packed sequence at ``place`` of ``sequences``, the longest first; as many units of 64 tokens, the first first.

    Sequences of UNITS units and more count as equally long.

    Args:
        cu_ptr: cumulative lengths.
        MOST: the most sequences, a power of two from 32 on.
    """
    # every warp has all of them
    L: gl.constexpr = gl.SliceLayout(0, gl.BlockedLayout([1, MOST // 32], [1, 32], [WARPS, 1], [1, 0]))
    i = gl.arange(0, MOST, layout=L)
    at = cu_ptr + gl.minimum(i, sequences - 1)
    tokens = (gl.load(at + 1) - gl.load(at)).to(gl.int32)
    units = gl.maximum(gl.minimum(gl.cdiv(tokens, 64), UNITS), 0)
    # no two have the same number, and none has 0
    numbers = gl.where(i < sequences, (units + 1) * MOST + (MOST - 1 - i), 0)
    BITS: gl.constexpr = bits_of((UNITS + 2) * MOST - 1)
    number = 0
    for bit in range(BITS):
        more = number + (1 << (BITS - 1 - bit))
        count = gl.sum((numbers >= more).to(gl.int32), 0)
        number = gl.where(count > place, more, number)
    return MOST - 1 - (number & (MOST - 1))
