"""Launches of the kernel for windows."""

from __future__ import annotations

from typing import Any

import torch
import triton

from ...device import processors_of
from ...launch_arguments import MOST_BLOCKS
from ...tiles import (
    Tiles,
)

_UNIT = 1 << 30

"""One, in the unit of inverses that :mod:`.windows.attention` multiplies by instead of dividing."""


def share_windows(
    tiles: Tiles, windows: int, heads: int, queries: int, periods: int, mask: torch.Tensor | None, device: torch.device
) -> tuple[tuple[int, int, int], dict[str, Any], Tiles]:
    """Share windows out among programs of :mod:`.windows.attention`: grid, arguments and registers.

    Args:
        periods: windows after which the bias ``mask`` repeats. Programs may take several windows with the same bias.
    """
    processors, fixed = processors_of(device), mask is not None and mask.dtype == torch.int32
    one_block = 16 * tiles.warps * tiles.splits >= queries
    repeats = windows // periods
    groups = repeats
    if mask is not None:
        # measured: programs of one block are sooner done with more registers, and to convert a bias takes as many
        room, registers = (12, 168) if one_block or not fixed else (16, 128)
        # several warps of a program have one window
        groups = repeats if tiles.warps > 1 else min(repeats, max(1, room * processors // (heads * periods * tiles.splits)))
        groups = triton.cdiv(repeats, triton.cdiv(repeats, groups))
        tiles = tiles._replace(registers=registers)
    several = groups * periods < windows
    programs = groups * tiles.splits * heads * periods
    layers = triton.cdiv(programs, processors)
    # where a program has one block, what it takes to find its place counts for more than a bias that is near; a quotient by
    # a rounded inverse is right below the limit
    together = fixed and not one_block and programs * max(groups, heads) < _UNIT and layers <= MOST_BLOCKS
    arguments = {
        "windows": windows,
        "periods": periods,
        "groups": groups,
        "heads": heads,
        "groups_inverse": triton.cdiv(_UNIT, groups),
        "heads_inverse": triton.cdiv(_UNIT, heads),
        "share": programs // processors,
        "longer": programs % processors,
        "SEVERAL": several,
        # worth it where it saves a conversion
        "STAGED": several and not fixed,
        "TOGETHER": together,
        "SPLITS": tiles.splits,
    }
    if together:
        return (processors, layers, 1), arguments, tiles
    return (groups * tiles.splits, heads, periods), arguments, tiles
