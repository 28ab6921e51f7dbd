"""Launches of the attention kernels for Hopper (sm_90)."""

from __future__ import annotations

from typing import Any

import torch
import triton

from ....recipe import Recipe
from ...launch_arguments import side_by_side
from ...tiles import (
    HOPPER,
    LONG_HOPPER,
    Tiles,
    fits_block,
    fits_hopper,
    fits_long_hopper,
    kernel_width,
)

_LONG_TILE = 128

"""Keys a tile of :mod:`.sm90.attention_streaming`."""


def rows_of_keys(key: torch.Tensor) -> tuple[int, int, int] | None:
    """Return where a head's keys lie if all keys are rows of one matrix: rows a batch, rows and columns a head."""
    stride_z, stride_h, stride_n = (key.stride(dim) if key.shape[dim] > 1 else 0 for dim in range(3))
    if stride_n <= 0 or stride_z % stride_n:
        return None
    rows_h, columns_h = divmod(stride_h, stride_n)
    if columns_h * (key.shape[1] - 1) + key.shape[3] > stride_n:
        return None
    return stride_z // stride_n, rows_h, columns_h


def _matrix(x: torch.Tensor, rows: int, columns: int, stride: int, block: tuple[int, int]) -> Any:
    """Describe int8 rows for the copy engine, which fetches blocks of them to shared memory."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = gl.NVMMASharedLayout(swizzle_byte_width=min(block[1], 128), element_bitwidth=8, rank=2)
    return TensorDescriptor(x, [rows, columns], [stride, 1], list(block), layout)


def long_steps(width: int, keys: int) -> tuple[int, int]:
    """Return how many keys :mod:`.sm90.attention_streaming` takes at a time, and how many times a turn of its loops.

    Two tiles at a time where they fit; else two steps a turn where their number is even.
    """
    if width <= 64:
        return 2 * _LONG_TILE, 1
    return _LONG_TILE, 2 if triton.cdiv(keys, _LONG_TILE) % 2 == 0 else 1


def last_step(keys: int, span: int) -> int:
    """Return the columns of the last step: whole tiles, and one of 32, 64 or 128."""
    whole, left = divmod(keys % span or span, _LONG_TILE)
    return whole * _LONG_TILE + (max(32, triton.next_power_of_2(left)) if left else 0)


def long_arguments(key: torch.Tensor, value: torch.Tensor, rows: tuple[int, int, int]) -> dict[str, Any]:
    """Return what :mod:`.sm90.attention_streaming` takes in place of pointers to keys and packed values."""
    batch, heads, keys, channels = key.shape
    width = kernel_width(channels)
    span, unroll = long_steps(width, keys)
    rows_z, rows_h, columns_h = rows
    count = (batch - 1) * rows_z + (heads - 1) * rows_h + keys
    columns, padded = (heads - 1) * columns_h + channels, value.stride(3)
    return {
        "k_desc": _matrix(key, count, columns, key.stride(2), (span, width)),
        "v_desc": _matrix(value, batch * heads * width, padded, padded, (width, _LONG_TILE)),
        "SPAN": span,
        "UNROLL": unroll,
        "LEFT": last_step(keys, span),
        "k_rows_z": rows_z,
        "k_rows_h": rows_h,
        "k_columns_h": columns_h,
    }


def meant_for_long_hopper(tiles: Tiles, recipe: Recipe, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Tell whether :mod:`.sm90.attention_streaming` knows shapes and recipe, whatever the tensors' memory format."""
    sizes = query.shape[3], value.shape[3], query.shape[2], key.shape[2]
    return tiles.kernel in (HOPPER, LONG_HOPPER) and fits_long_hopper(recipe, *sizes)


def held_by_hand(tiles: Tiles, recipe: Recipe, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Tell whether :mod:`.sm90.attention_resident` takes tensors in this memory format, with no mask and a key scale a head."""
    return (
        tiles.kernel == HOPPER
        and fits_hopper(recipe, query.shape[3], value.shape[3], query.shape[2], key.shape[2])
        and fits_block(tiles.block_m, tiles.warps, query.shape[3], key.shape[2])
        and query.element_size() <= 2
        and all(side_by_side(x, 8) for x in (query, key, value))
    )
