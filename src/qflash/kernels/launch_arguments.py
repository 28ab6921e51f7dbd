"""Arguments that the attention kernels of every family share."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton

from .. import fixed_point as fp
from ..memory_format import empty_output
from ..recipe import Recipe
from .tiles import (
    Tiles,
)

MOST_BLOCKS = 65535


def kernel_constants(
    recipe: Recipe, head_dim: int, value_dim: int, mask: str, is_causal: bool, key_token: bool, guard: bool
) -> dict[str, Any]:
    """Return the constexpr arguments that follow from the recipe and the shapes (tiles excepted)."""
    offset, _, _ = fp.probability_constants(recipe.exponential, recipe.probability_bits)
    most = fp.most_multiplier(head_dim, mask == "bias")
    return {
        "HEAD_DIM": head_dim,
        "VALUE_DIM": value_dim,
        "BLOCK_D": max(32, triton.next_power_of_2(head_dim)),
        "BLOCK_DV": max(16, triton.next_power_of_2(value_dim)),
        "MASK": mask,
        "CAUSAL": is_causal,
        "KEY_TOKEN": key_token,
        "QUADRATIC": recipe.exponential == "quadratic",
        "BITS": recipe.probability_bits,
        "NEAREST": recipe.probability_rounding == "nearest",
        "OFFSET": offset,
        "FLOOR_OUTPUT": recipe.output == "value_scale",
        "COLUMN_BITS": fp.column_bits(head_dim),
        "MOST": most,
        "MOST_BITS": most.bit_length(),
        "CHECK": is_causal or mask != "none",
        "GUARD": guard,
    }


def side_by_side(x: torch.Tensor, piece: int = 16) -> bool:
    """Whether channels are neighbours and every row can be copied ``piece`` bytes at a time."""
    whole = piece // x.element_size()
    return (
        x.stride(3) == 1 and x.data_ptr() % 16 == 0 and all(x.stride(dim) % whole == 0 for dim in range(3) if x.shape[dim] > 1)
    )


def broadcast_strides(x: torch.Tensor, dims: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(0 if x.shape[dim] == 1 else x.stride(dim) for dim in dims)


def launch_options(tiles: Tiles) -> dict[str, Any]:
    # a product and a sum fused by the compiler would round differently; where one is meant it is spelt out
    options: dict[str, Any] = {"num_warps": tiles.warps, "num_stages": tiles.stages, "enable_fp_fusion": False}
    if tiles.registers:
        options["maxnreg"] = tiles.registers
    return options


class Scales(NamedTuple):
    """Scales of int8 tensors, as the kernels take them; of query None if it is float."""

    query: torch.Tensor | None
    key: torch.Tensor
    value: torch.Tensor
    output: torch.Tensor | None


def new_output(like: torch.Tensor, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # the interpreter truncates where bfloat16 must round, so there PyTorch does that one conversion
    stored = torch.float32 if like.device.type == "cpu" and dtype == torch.bfloat16 else dtype
    return empty_output(like, value.shape[3], stored)
