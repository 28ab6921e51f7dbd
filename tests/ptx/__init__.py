"""Runs compiled kernels on a CPU, from their PTX: what lets the kernels in Gluon be tested where there is no GPU.

A program's warps run one after the other, each up to a barrier, 32 lanes at a time as numpy arrays. Registers hold bits;
what an instruction makes of them is its own affair, as in PTX. Memory is the tensors of the launch and nothing else: a
load or store beside them, or one that is not aligned, raises. Shared memory and registers begin as noise.

Asynchronous work (products, copies) is done either when it is sent for (``late=False``) or when it is waited for
(``late=True``). A kernel that waits for too little, or overwrites what is still to be read, is wrong in one of the two.
Warps take their turns in either order, for the same reason; so do the blocks of a cluster, from barrier to barrier.

Source: the PTX ISA's descriptions of its instructions. Only those are here that the kernels have.
"""

from __future__ import annotations

from . import copies, exchange, memory_access, numbers, tensor_core
from .bits import LANES
from .machine import INSTRUCTIONS, Kernel, Memory, Program, Warp, launch, run_together

__all__ = ["LANES", "Kernel", "Memory", "Program", "Warp", "launch", "run_together"]

for _module in (numbers, exchange, memory_access, copies, tensor_core):
    INSTRUCTIONS.update(
        {name.removeprefix("_make_"): make for name, make in vars(_module).items() if name.startswith("_make_")}
    )
