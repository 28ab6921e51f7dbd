"""QFlash's presets as methods, so that they stand in one list with what they are compared with."""

from __future__ import annotations

import torch

from qflash.api import attention as qflash_attention
from qflash.specification.recipe import PRESETS

from .method import Method


def _method(recipe: str) -> Method:
    """Return the method of a preset."""
    choices = PRESETS[recipe]

    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        scale: float | None = None,
    ) -> torch.Tensor:
        return qflash_attention(query, key, value, attn_mask, scale=scale, recipe=choices)

    return Method(
        f"qflash-{recipe}",
        f"QFlash {recipe.upper()}",
        choices.query_granularity,
        choices.key_granularity,
        choices.value_granularity,
        True,
        ((8, 8), (16 if choices.probability_bits > 8 else 8, 8)),
        attention,
    )


QFLASH = tuple(_method(recipe) for recipe in ("default", "accurate", "paper"))
