"""Launches of the kernel for windows, which is imported where it runs: Triton's interpreter has no Gluon."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
import triton

from ....specification.memory_format import has_aligned_rows
from ...device import processors_of
from ...heuristics import eviction_policy
from ...launch_arguments import (
    CONSTANT,
    MOST_BLOCKS,
    SCALE_STRIDES,
    KernelRequest,
    broadcast_strides,
    dependent_attention,
    launch_options,
    mask_period,
    parts,
    place_arguments,
    row_arguments,
    side_by_side,
)
from ...launch_recorder import KernelLaunch, ScoreTile, kernel_arguments
from ...tiles import WINDOWS, Tiles, has_half_block, window_widths
from ..constants import WindowPlan, recipe_of, row_strides_of
from .rules import misfit, split_windows

_UNIT = 1 << 30
"""One, in the unit of inverses that :mod:`.windows.attention` multiplies by instead of dividing."""


_GROUPS = {
    "strides": ("k_stride_z", "k_stride_h", "v_stride_z", "v_stride_h", "q_stride_z", "q_stride_h"),
    "mask_strides": ("mask_stride_z", "mask_stride_h"),
    "place_strides": ("place_stride_z", "place_stride_h"),
    "scales": ("ks_ptr", "qs_ptr", "vs_ptr", "os_ptr", "vo_ptr"),
    "constant": CONSTANT,
    "o_strides": ("o_stride_z", "o_stride_h", *SCALE_STRIDES, "windows"),
}
"""What :mod:`.windows.attention` takes as tuples."""


@functools.cache
def _kernel() -> Any:
    from .attention import windows_kernel

    return windows_kernel


def refusal(request: KernelRequest, tiles: Tiles) -> str | None:
    """Return why :mod:`.windows.attention` does not take the call, or None."""
    call = request.call
    if request.guard:
        return "Triton's interpreter has no Gluon"
    if reason := misfit(request.shape, request.capability) or request.too_wide or request.unquantisable:
        return reason
    if call.mask_kind not in ("none", "bias") or call.is_causal or call.has_token_keys:
        return "it takes a bias but no other mask, and one key scale a head"
    if tiles.family != WINDOWS:
        return f"the tiles are for {tiles.family}"
    fits = all(x is None or side_by_side(x) for x in (call.query, call.key, call.value, request.out))
    return None if fits else "channels must be neighbours, and rows begin at multiples of 16 bytes"


def launches(request: KernelRequest, tiles: Tiles) -> list[KernelLaunch]:
    """Spell out the launches of :mod:`.windows.attention`."""
    call, kernel, scales, mask = request.call, _kernel(), request.call.scales, request.call.mask
    tiles = split_windows(tiles, request.work)
    processors = processors_of(call.query.device)
    constants = row_arguments(request, tiles) | {
        "QUERIES": call.queries,
        "ONE_SCALE": scales is not None and all(x is None or x.numel() == 1 for x in scales),
        # a thread takes four neighbours of a bias at once
        "ALIGNED": mask is not None and has_aligned_rows(broadcast_strides(mask, (0, 1, 2, 3)), 4),
        # measured: of int8, with a processor to itself a program has its values sooner if every warp loads them
        "DIVIDED": tiles.warps == 4 and (request.fused or call.batch * call.heads > processors),
        "POLICY": eviction_policy(call.query, call.key, call.value, request.output),
        "DEPENDENT": dependent_attention(request),
    }
    period = mask_period(call)
    found = []
    for part in parts(request):
        periods = 1 if mask is None or mask.shape[0] == 1 else period or part.batch
        grid, shared, tiles = share_windows(tiles, part.batch, call.heads, call.queries, periods, mask, call.query.device)
        arguments = part.arguments | constants | shared | place_arguments(request, part)
        plan = WindowPlan(**{field.name: arguments[field.name] for field in dataclasses.fields(WindowPlan)})
        arguments |= {"STRIDES": row_strides_of(arguments), "RECIPE": recipe_of(arguments), "PLAN": plan}
        arguments = kernel_arguments(kernel, arguments, _GROUPS)
        # one block of sixteen queries a warp, and then one of eight for the rest
        half = has_half_block(call.queries, tiles.warps, tiles.splits)
        scores = ScoreTile(16 * tiles.warps + 8 * half, sum(window_widths(call.keys)), whole=True)
        options = launch_options(tiles) | {"launch_pdl": constants["DEPENDENT"] != ""}
        found.append(KernelLaunch(kernel, grid, arguments, options, "windows", scores))
    return found


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
        # measured: programs of one block take less time with more registers, and converting a bias needs as many
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
