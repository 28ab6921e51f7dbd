"""Products: mma, wgmma and tcgen05."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from .bits import Bits, Step
from .copies import _swizzled
from .machine import _LANE, Warp, _scatter
from .memory_access import _address
from .numbers import _four, _signed
from .parser import _listed


def _saturated(x: Bits) -> Bits:
    return np.clip(x, -(2**31), 2**31 - 1).astype(np.int32)


def _rows_of(words: Sequence[Bits]) -> Bits:
    """The (16, 32) left operand of which a thread has four words."""
    matrix = np.zeros((16, 32), dtype=np.int8)
    for i, word in enumerate(words):
        rows, columns = _LANE // 4 + 8 * (i & 1), 4 * (_LANE % 4) + 16 * (i >> 1)
        matrix[rows[:, None], columns[:, None] + np.arange(4)] = _four(word)
    return matrix


def _spread_out(product: Bits) -> list[Bits]:
    """A (16, N) product as a thread's registers: two neighbouring columns of two rows eight apart, then the next columns."""
    return [
        np.ascontiguousarray(product[_LANE // 4 + 8 * (i >> 1), 2 * (_LANE % 4) + (i & 1) + start]).view(np.uint32)
        for start in range(0, product.shape[1], 8)
        for i in range(4)
    ]


def _brought_together(words: Sequence[Bits], columns: int) -> Bits:
    """Undo :func:`_spread_out`."""
    matrix = np.zeros((16, columns), dtype=np.int64)
    for i, word in enumerate(words):
        matrix[_LANE // 4 + 8 * (i >> 1 & 1), 2 * (_LANE % 4) + (i & 1) + 8 * (i // 4)] = _signed(word)
    return matrix


def _make_mma(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    assert modifiers[2] == "m16n8k32" and modifiers[-4:] == ["s32", "s8", "s8", "s32"], modifiers
    d, a, b, c = map(_listed, operands)

    def step(warp: Warp) -> None:
        left = _rows_of([warp.read(name) for name in a]).astype(np.int64)
        right = np.zeros((32, 8), dtype=np.int64)
        for i, name in enumerate(b):
            rows = 4 * (_LANE % 4) + 16 * i
            right[rows[:, None] + np.arange(4), (_LANE // 4)[:, None]] = _four(warp.read(name))
        product = left @ right + _brought_together([warp.read(name) for name in c], 8)
        for name, x in zip(d, _spread_out(_saturated(product)), strict=True):
            warp.write(name, x)

    return step


def _described(warp: Warp, descriptor: int, rows: int, pitch: int, across: bool = False) -> Bits:
    """The (rows, 32) bytes of a matrix in shared memory, whose rows lie side by side (K-major) or, ``across``, columns.

    Of the descriptor's swizzling, which targets number differently, ``pitch`` is the width, or 0.
    """
    start, stride = (descriptor & 0x3FFF) << 4, (descriptor >> 32 & 0x3FFF) << 4
    leading = (descriptor >> 16 & 0x3FFF) << 4
    n, k = np.arange(rows)[:, None], np.arange(32)[None, :]
    if across and pitch == 0:
        at = start + n % 16 + n // 16 * stride + k % 8 * 16 + k // 8 * leading
    elif across:
        at = start + n % pitch + n // pitch * leading + k % 8 * pitch + k // 8 * stride
    elif pitch == 0:
        at = start + n // 8 * stride + n % 8 * 16 + k // 16 * leading + k % 16
    else:
        at = start + n // 8 * stride + n % 8 * pitch + k
    if pitch:
        at = _swizzled(at, pitch)
    return warp.program.shared[warp.program.find_shared(at.reshape(-1), 1)].reshape(rows, 32).view(np.int8)


def _make_wgmma(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    if modifiers[0] == "fence":
        return lambda warp: None
    if modifiers[0] == "commit_group":
        return lambda warp: warp.queues["wgmma"].append([])
    if modifiers[0] == "wait_group":
        return lambda warp: warp.wait("wgmma", int(operands[0]))
    shape = re.fullmatch(r"m64n(\d+)k32", modifiers[3])
    assert shape and modifiers[-3:] == ["s32", "s8", "s8"] and len(operands) == 4, (modifiers, operands)
    columns = int(shape[1])
    d, a = _listed(operands[0]), _listed(operands[1])
    b, keep = operands[2], operands[3]

    def described(warp: Warp, descriptor: int, rows: int) -> Bits:
        return _described(warp, descriptor, rows, (0, 128, 64, 32)[descriptor >> 62])

    def step(warp: Warp) -> None:
        right = int(warp.read(b, 64)[0])
        kept = bool(warp.read(keep, 1)[0])
        left = [warp.read(name, 64 if len(a) == 1 else 32) for name in a]

        def multiply() -> None:
            if len(a) == 1:
                rows = described(warp, int(left[0][0]), 64)[16 * (warp.number % 4) :][:16]
            else:
                rows = _rows_of(left)
            product = rows.astype(np.int64) @ described(warp, right, columns).astype(np.int64).T
            if kept:
                product = product + _brought_together([warp.registers[name] for name in d], columns)
            for name, x in zip(d, _spread_out(product.astype(np.int32)), strict=True):
                warp.registers[name] = x

        warp.program.send(warp.queues["wgmma"][-1], multiply)

    return step


def _make_tcgen05(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    """The fifth generation's: operands and sums in tensor memory, 128 lanes of 512 words."""
    kind = modifiers[0]
    if kind in ("relinquish_alloc_permit", "dealloc", "wait::ld", "wait::st", "fence"):
        return lambda warp: None
    if kind in ("ld", "st"):
        return _tensor_memory(modifiers, operands)
    if kind == "alloc":
        base, offset = _address(operands[0])

        def allocate(warp: Warp) -> None:
            at = warp.program.find_shared(warp.read(base)[:1].astype(np.int64) + offset, 4)
            _scatter(warp.program.shared, at, [np.zeros(1, dtype=np.uint32)])

        return allocate
    if kind == "commit":
        base, offset = _address(operands[0])

        def commit(warp: Warp) -> None:
            program = warp.program
            (address,) = {int(x) + offset for x in warp.read(base)[warp.mask]}
            here, work = program.announced[address], program.uncommitted
            program.uncommitted = []

            def finish() -> None:
                for one in work:
                    one()
                here.pending -= 1
                here.turn()

            program.send(here.kept, finish)

        return commit
    assert kind == "mma" and modifiers[1:] == ["cta_group::1", "kind::i8"], modifiers
    return _tensor_product(operands)


def _tensor_memory(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    """Words from or to the quarter of the lanes that a warp has: a lane for each thread, or half of them in two pieces."""
    shape, count = modifiers[3], int(modifiers[4].removeprefix("x"))
    load = modifiers[0] == "ld"
    names = _listed(operands[0] if load else operands[-1])
    base, offset = _address(operands[1] if load else operands[0])
    assert shape in ("32x32b", "16x32bx2") and len(names) == count
    split = int(operands[2] if load else operands[1]) if shape == "16x32bx2" else 0

    def step(warp: Warp) -> None:
        address = int(warp.read(base)[0]) + offset
        lanes = (address >> 16) + (_LANE % 16 if split else _LANE)
        assert (lanes // 32 == warp.number % 4).all(), "lanes of another warp's"
        start = (address & 0xFFFF) + (split * (_LANE // 16) if split else 0 * _LANE)
        for i, name in enumerate(names):
            if load:
                warp.write(name, warp.program.tensor_memory[lanes, start + i])
            else:
                warp.program.tensor_memory[lanes, start + i] = warp.read(name)

    return step


def _tensor_product(operands: Sequence[str]) -> Step:
    (to, to_offset), b, kinds, keep = _address(operands[0]), *operands[2:]
    in_memory = operands[1].startswith("[")
    a, a_offset = _address(operands[1])

    def step(warp: Warp) -> None:
        (lane,) = np.flatnonzero(warp.mask)
        program = warp.program
        form = int(warp.read(kinds)[lane])
        rows, columns = (form >> 24 & 31) << 4, (form >> 17 & 63) << 3
        assert form & 0x7FFF == 0x4A0, "signed bytes, sums of 32 bits"
        left, right = int(warp.read(a, 32 if in_memory else 64)[lane]) + a_offset, int(warp.read(b, 64)[lane])
        target, kept = int(warp.read(to)[lane]) + to_offset, bool(warp.read(keep, 1)[lane])
        # sixteen rows to each quarter of the lanes, or thirty-two
        lanes = np.arange(rows) // (rows // 4) * 32 + np.arange(rows) % (rows // 4)

        def described(descriptor: int, count: int, across: bool = False) -> Bits:
            return _described(warp, descriptor, count, {0: 0, 2: 128, 4: 64, 6: 32}[descriptor >> 61], across)

        def multiply() -> None:
            memory = program.tensor_memory
            if in_memory:
                words = np.ascontiguousarray(memory[lanes + (left >> 16)][:, (left & 0xFFFF) + np.arange(8)])
                x = words.view(np.int8).reshape(rows, 32)
            else:
                x = described(left, rows, bool(form >> 15 & 1))
            product = x.astype(np.int64) @ described(right, columns, bool(form >> 16 & 1)).astype(np.int64).T
            place = (lanes + (target >> 16))[:, None], (target & 0xFFFF) + np.arange(columns)[None, :]
            if kept:
                product = product + _signed(memory[place])
            memory[place] = product.astype(np.int32).view(np.uint32)

        program.send(program.uncommitted, multiply)

    return step
