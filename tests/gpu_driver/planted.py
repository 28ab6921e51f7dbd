"""Kernels with one fault each, which a tool of compute-sanitizer has to report: what it then says of others can be believed."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl


@triton.jit
def write_behind_kernel(out_ptr, count):
    tl.store(out_ptr + count, 1)


@triton.jit
def copy_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at) + 1)


@triton.jit
def race_kernel(out_ptr, BLOCK: tl.constexpr):
    """Every thread writes one word of shared memory and reads it, with no barrier between."""
    at = tl.arange(0, BLOCK)
    found = tl.inline_asm_elementwise(
        """{
            .shared .align 4 .b32 planted;
            .reg .b32 address;
            mov.u32 address, planted;
            st.volatile.shared.b32 [address], $1;
            ld.volatile.shared.b32 $0, [address];
        }""",
        "=r,r", [at], tl.int32, False, 1,
    )  # fmt: skip
    tl.store(out_ptr + at, found)


@triton.jit
def divergent_barrier_kernel(out_ptr, BLOCK: tl.constexpr):
    """Every second thread of a warp waits at a barrier of all threads; the others go on and end."""
    at = tl.arange(0, BLOCK)
    found = tl.inline_asm_elementwise(
        """{
            .reg .pred even;
            .reg .b32 low;
            and.b32 low, $1, 1;
            setp.eq.s32 even, low, 0;
            @even bar.sync 0;
            mov.b32 $0, $1;
        }""",
        "=r,r", [at], tl.int32, False, 1,
    )  # fmt: skip
    tl.store(out_ptr + at, found)


THREADS = 128


def _new(count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.int32, device="cuda")


def write_behind() -> None:
    """Write the element behind an allocation."""
    write_behind_kernel[(1,)](_new(250), 250)


def read_uninitialised() -> None:
    """Read memory that was never written."""
    copy_kernel[(1,)](_new(THREADS), _new(THREADS), THREADS)


def race() -> None:
    """Let threads race for a word of shared memory."""
    race_kernel[(1,)](_new(THREADS), THREADS, num_warps=4)


def diverge() -> None:
    """Let half of the threads wait at a barrier that the others never reach."""
    divergent_barrier_kernel[(1,)](_new(THREADS), THREADS, num_warps=4)


FAULTS: dict[str, Callable[[], None]] = {
    "memcheck": write_behind,
    "racecheck": race,
    "initcheck": read_uninitialised,
    "synccheck": diverge,
}
"""By tool."""
