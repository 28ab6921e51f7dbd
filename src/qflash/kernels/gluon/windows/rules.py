"""Which calls the kernel for windows takes, and measured rules for how it divides them. They change speed, never a bit.

A number without another note was found on one H200 with Triton 3.6, CUDA-graph replay, medians of nine, all divisions of a
shape in alternation. The data lie in ``benchmarks/archive``: ``tried_h200.json``, and of windows on int8 without
a bias ``division_h100.json``, on one H100.
"""

from __future__ import annotations

import triton

from ...heuristics import REGISTERS_OF_FOUR, Work
from ...tiles import WINDOWS, AttentionShape, Tiles, is_short, unusual
from ...triton import rules as portable

WINDOW_LOADS = {(False, False): (2.5, 6), (False, True): (3, 8), (True, False): (7, 7), (True, True): (4, 8)}
"""By (from floats, with a bias): up to how many windows a processor four warps share a window, and up to how many two do."""


def misfit(shape: AttentionShape, capability: tuple[int, int]) -> str | None:
    """Return why :mod:`.windows.attention` does not take shapes and recipe like these, or None."""
    if reason := unusual(shape.recipe):
        return reason
    sizes = shape.head_dim == shape.value_dim == 32 and 8 < shape.queries <= 64 and 32 < shape.keys <= 64
    if sizes and is_short(shape):
        return None
    return "it takes windows: 9 to 64 queries, 33 to 64 keys, 32 channels"


def plan(shape: AttentionShape, capability: tuple[int, int]) -> Tiles:
    """Return the tiles of :mod:`.windows.attention`; but for splits they are for the kernels that take what it does not."""
    return portable.resident_plan(shape, capability)._replace(family=WINDOWS)


def split_windows(tiles: Tiles, work: Work) -> Tiles:
    """Fill in how many warps share a window, in one program or several.

    The queries of few windows are shared out among warps; one warp a window loads and prepares the keys once. A bias is waited
    for longer than keys are prepared.
    """
    fused, masked, processors = work.fused, work.masked, work.processors
    four, two = (load * processors for load in WINDOW_LOADS[fused, masked])
    splits = tiles.splits or (4 if work.heads <= four else 2 if work.heads <= two else 1)
    splits = min(splits, triton.next_power_of_2(triton.cdiv(work.queries, 16)))
    # one program is sooner launched than several; beside a bias two warps of one would have to pass on its marks
    warps = 1 if masked and splits < 4 else splits
    # sixteen programs a processor; without a bound the compiler takes registers for fourteen
    registers = REGISTERS_OF_FOUR if fused and not masked else 0
    return tiles._replace(splits=splits // warps, warps=warps, registers=registers)
