"""A kernel that stores what each program gets from :mod:`qflash.kernels.gluon.sm90.packed_order`."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from qflash.kernels.gluon.sm90.packed_order import sequence_by_length


@gluon.jit
def order_kernel(cu_ptr, o_ptr, MOST: gl.constexpr, UNITS: gl.constexpr):
    """Store the sequence of every program."""
    place = gl.program_id(0)
    gl.store(o_ptr + place, sequence_by_length(cu_ptr, place, gl.num_programs(0), MOST, UNITS, 4))
