"""Instructions for control, barriers and exchange between lanes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .bits import LANES, Step
from .machine import _LANE, CLUSTER, Warp, _branch
from .numbers import _bits, _of, _type

_make_bra = _branch


def _make_ret(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    return lambda warp: "end"


def _make_trap(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    def step(warp: Warp) -> str:
        raise AssertionError("a trap was reached")

    return step


def _make_bar(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    if modifiers[0] == "warp":
        return lambda warp: None

    if modifiers[0] == "cluster":
        arrives = {"arrive": True, "wait": False}[modifiers[1]]

        def at_cluster(warp: Warp) -> str | None:
            if warp.arrived is arrives:
                raise RuntimeError("a warp waits at its cluster's barrier without having arrived, or arrives twice")
            warp.arrived = arrives
            if arrives:
                return None
            warp.barrier = CLUSTER, 0
            return "barrier"

        return at_cluster

    def step(warp: Warp) -> str:
        number, *count = (int(warp.read(name)[0]) for name in operands)
        warp.barrier = number, count[0] if count else 0
        return "barrier"

    return step


_make_barrier = _make_bar


def _make_elect(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    return lambda warp: warp.write(operands[0].partition("|")[2], _LANE == 0)


def _make_shfl(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    kind = modifiers[1]
    target, source, lane = operands[0].partition("|")[0], operands[1], operands[2]
    # the lanes that exchange are those alike in the bits of a mask
    alike = int(operands[3], 0) >> 8
    if kind == "up":
        # of all lanes of the warp; those at its beginning keep what they have
        assert int(operands[3], 0) == 0

        def shift(warp: Warp) -> None:
            which = _LANE - warp.read(lane).astype(np.int64)
            warp.write(target, warp.read(source)[np.where(which < 0, _LANE, which)])

        return shift
    assert kind in ("bfly", "idx") and int(operands[3], 0) & 255 == 31

    def step(warp: Warp) -> None:
        which = warp.read(lane).astype(np.int64)
        within = _LANE ^ which if kind == "bfly" else which
        warp.write(target, warp.read(source)[(_LANE & alike) | (within & 31 & ~alike)])

    return step


def _make_vote(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    assert modifiers[1] in ("any", "all")
    fold = np.any if modifiers[1] == "any" else np.all
    return lambda warp: warp.write(operands[0], np.full(LANES, fold(warp.read(operands[1], 1))))


def _make_redux(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    kind = _type(modifiers)
    beside_nan = kind == "f32" and "NaN" not in modifiers
    fold = {
        "max": np.nanmax if beside_nan else np.max, "min": np.nanmin if beside_nan else np.min, "add": np.sum,
        "or": np.bitwise_or.reduce, "and": np.bitwise_and.reduce,
    }[modifiers[1]]  # fmt: skip
    assert set(modifiers[2:-1]) <= {"abs", "NaN"}, modifiers

    def step(warp: Warp) -> None:
        x = _of(kind, warp.read(operands[1]))
        if "abs" in modifiers:
            x = np.abs(x)
        warp.write(operands[0], _bits(np.full(LANES, fold(x), dtype=x.dtype)))

    return step
