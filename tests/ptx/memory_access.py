"""Loads, stores, and matrices from and to shared memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .bits import LANES, UNSIGNED, WIDTH, Bits, Step
from .machine import _LANE, Warp, _gather, _is_register, _register_width, _scatter
from .numbers import _four, _of, _type
from .parser import _listed


def _address(text: str) -> tuple[str, int]:
    base, _, offset = text.strip("[] ").partition("+")
    return base.strip(), int(offset or 0)


def _make_ld(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    kind = _type(modifiers)
    width = WIDTH[kind]
    names = _listed(operands[0])
    base, offset = _address(operands[1])
    if modifiers[0] == "param":
        wide = kind[0] == "s" or kind == "b64"

        def parameter(warp: Warp) -> None:
            name = warp.program.kernel.parameters[int(warp.read(base, 64)[0])] if base[0] == "%" else base
            number = warp.program.parameters[name]
            # an s32 in a register of 64 bits
            register = 64 if wide and names[0].startswith("%rd") else width
            warp.write(names[0], np.full(LANES, number & (2**register - 1), dtype=UNSIGNED[register]))

        return parameter
    size = len(names) * width // 8
    register = _register_width(names[0])

    def step(warp: Warp) -> None:
        mask = warp.mask
        if "shared" in modifiers[0]:
            address = warp.read(base)[mask].astype(np.int64) + offset
            part, at = warp.program.shared, warp.program.find_shared(address, size)
        else:
            part, at = warp.program.memory.find(warp.read(base, 64)[mask] + np.uint64(offset), size)
        for name, x in zip(names, _gather(part, at, size, width), strict=True):
            full = np.zeros(LANES, dtype=UNSIGNED[register])
            full[mask] = _of(kind, x) if kind[0] == "s" else x
            warp.write(name, full)

    return step


def _make_st(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    width = WIDTH[_type(modifiers)]
    names = _listed(operands[1])
    base, offset = _address(operands[0])
    size = len(names) * width // 8

    def step(warp: Warp) -> None:
        mask = warp.mask
        numbers = [
            warp.read(name, _register_width(name) if _is_register(name) else width)[mask].astype(UNSIGNED[width])
            for name in names
        ]
        if "shared" in modifiers[0]:
            part = warp.program.shared
            at = warp.program.find_shared(warp.read(base)[mask].astype(np.int64) + offset, size)
        else:
            part, at = warp.program.memory.find(warp.read(base, 64)[mask] + np.uint64(offset), size)
        _scatter(part, at, numbers)

    return step


def _matrix_places(warp: Warp, address: str, count: int, transposed: bool) -> Bits:
    """Where the bytes of a thread's words lie: (count, lanes, 4), of matrices of 8 x 8 halves.

    Lane 8 i + j has the address of row j of matrix i, sixteen bytes. A word is two halves of a row or, transposed, a column.
    """
    base, offset = _address(address)
    rows = warp.program.find_shared(warp.read(base).astype(np.int64)[: 8 * count] + offset, 16).reshape(count, 8)
    near, far = _LANE[:, None] // 4, 2 * (_LANE[:, None] % 4) + np.arange(2)
    row, column = (far, near) if transposed else (near, far)
    halves = rows[:, row] + 2 * column
    return (halves[..., None] + np.arange(2)).reshape(count, LANES, 4)


def _make_ldmatrix(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    names = _listed(operands[0])

    def step(warp: Warp) -> None:
        for name, at in zip(names, _matrix_places(warp, operands[1], len(names), "trans" in modifiers), strict=True):
            warp.write(name, warp.program.shared[at].view(np.uint32)[:, 0])

    return step


def _make_stmatrix(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    names = _listed(operands[1])

    def step(warp: Warp) -> None:
        for name, at in zip(names, _matrix_places(warp, operands[0], len(names), "trans" in modifiers), strict=True):
            warp.program.shared[at] = _four(warp.read(name)).astype(np.uint8)

    return step
