"""Asynchronous copies, their barriers, and the tensor memory access engine."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import torch

from .bits import LANES, Bits, Step
from .machine import Announcement, Warp
from .memory_access import _address
from .numbers import _signed


def _make_cp(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    if modifiers[1] == "commit_group":
        return lambda warp: warp.queues["cp"].append([])
    if modifiers[1] == "wait_group":
        return lambda warp: warp.wait("cp", int(operands[0]))
    if modifiers[1] == "bulk":
        return _copy_tile(modifiers, operands)
    assert modifiers[1] in ("ca", "cg"), modifiers
    (to, to_offset), (source, offset) = _address(operands[0]), _address(operands[1])
    size = int(operands[2], 0)

    def step(warp: Warp) -> None:
        mask = warp.mask
        at = warp.program.find_shared(warp.read(to)[mask].astype(np.int64) + to_offset, size)
        taken = warp.read(operands[3])[mask] if len(operands) > 3 else np.full(len(at), size)
        address = warp.read(source, 64)[mask] + np.uint64(offset)

        def copy() -> None:
            warp.program.shared[at[:, None] + np.arange(size)] = 0
            there = taken > 0
            if there.any():
                assert (taken[there] == size).all()
                part, start = warp.program.memory.find(address[there], size)
                warp.program.shared[at[there][:, None] + np.arange(size)] = part[start[:, None] + np.arange(size)]

        warp.program.send(warp.queues["cp"][-1], copy)

    return step


def _make_createpolicy(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    # nothing looks at it: where the L2 keeps something changes no number
    return lambda warp: warp.write(operands[0], np.zeros(LANES, dtype=np.uint64))


def _make_prefetch(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    base, offset = _address(operands[0])

    def step(warp: Warp) -> None:
        # it changes nothing, but has to be for something that is there
        warp.program.memory.find(warp.read(base, 64)[warp.mask] + np.uint64(offset), 1)

    return step


def _make_fence(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    return lambda warp: None


def _make_griddepcontrol(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    # the wait for the kernel ahead: here launches are made one after the other
    return lambda warp: None


def _make_mbarrier(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    kind = modifiers[0]
    at = {"init": 0, "inval": 0, "arrive": 1, "try_wait": 1}[kind]
    base, offset = _address(operands[at])

    def step(warp: Warp) -> str | None:
        announced = warp.program.announced
        (address,) = {int(x) + offset for x in warp.read(base)[warp.mask]}
        if kind == "init":
            announced[address] = Announcement(int(operands[1]))
            return None
        if kind == "inval":
            del announced[address]
            return None
        here = announced[address]
        if kind == "arrive":
            assert modifiers[1] == "expect_tx" and warp.mask.sum() == 1
            here.bytes += int(warp.read(operands[2])[0])
            here.pending -= 1
            here.turn()
            return None
        parity = int(warp.read(operands[2])[0])
        if here.phase % 2 == parity and here.kept:
            # late: what has been sent for comes when a warp has asked and asks again
            while warp in here.asked and here.kept:
                here.kept.pop(0)()
            here.asked.add(warp)
        done = here.phase % 2 != parity
        warp.write(operands[0], np.full(LANES, done))
        return None if done else "spin"

    return step


def _swizzled(at: Bits, pitch: int) -> Bits:
    """Addresses with sixteen bytes changing places by the number of the row of 128 bytes they lie in."""
    return at ^ ((at >> 7 & (pitch // 16 - 1)) << 4)


def _copy_tile(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    """A tile of a described tensor, zeros beyond its edges, to shared memory with its pieces of sixteen bytes swizzled."""
    assert modifiers[2] == "tensor"
    to, to_offset = _address(operands[0])
    map_name, *coordinates = (part.strip() for part in re.split(r"[,{}]+", operands[1].strip("[]")) if part.strip())
    assert modifiers[3] == f"{len(coordinates)}d"
    base, offset = _address(operands[2])

    def step(warp: Warp) -> None:
        (lane,) = np.flatnonzero(warp.mask)
        program = warp.program
        described = program.parameters[program.kernel.parameters[int(warp.read(map_name, 64)[lane])]]
        width = described.layout.swizzle_byte_width
        here = program.announced[int(warp.read(base)[lane]) + offset]
        target = int(warp.read(to)[lane]) + to_offset
        # the instruction names the innermost dimension first
        first = [int(_signed(warp.read(name))[lane]) for name in reversed(coordinates)]
        size = described.base.element_size()
        kept_as = {1: (torch.int8, np.uint8), 2: (torch.int16, np.uint16), 4: (torch.int32, np.uint32)}[size]
        block = [*described.block_shape[:-1], min(described.block_shape[-1], width // size)]

        def copy() -> None:
            index = np.ix_(*(start + np.arange(count) for start, count in zip(first, block, strict=True)))
            inside = np.ones(block, dtype=bool)
            for x, count in zip(index, described.shape, strict=True):
                inside &= (x >= 0) & (x < count)
            numbers = torch.as_strided(described.base, described.shape, described.strides).view(kept_as[0])
            whole = numbers.numpy().view(kept_as[1])
            tile = np.where(inside, whole[tuple(np.where(inside, x, 0) for x in index)], kept_as[1](0)).view(np.uint8)
            at = _swizzled(target + np.arange(tile.size), width)
            program.shared[program.find_shared(at, 1)] = tile.reshape(-1)
            here.bytes -= tile.size
            here.turn()

        program.send(here.kept, copy)

    return step
