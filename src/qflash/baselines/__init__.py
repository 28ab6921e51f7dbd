"""Attention methods behind one protocol: float attention and QFlash's own presets."""

from __future__ import annotations

import dataclasses

import torch

from ..api import attention as qflash_attention

Bits = tuple[tuple[int, int], tuple[int, int]]


@dataclasses.dataclass(frozen=True)
class Method:
    """One attention method.

    Attributes:
        name: what commands call it.
        title: what tables call it.
        integer_only: whether the softmax between the two matrix products is integer arithmetic too.
        bits: widths of the operands of Q Kᵀ and of P V.
        recipe: QFlash's recipe, or None for float attention in the inputs' dtype.
    """

    name: str
    title: str
    integer_only: bool
    bits: Bits
    recipe: str | None = None

    def attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        scale: float | None = None,
    ) -> torch.Tensor:
        """Compute attention.

        Args:
            query, key, value: float, (batch, heads, tokens, channels).
            attn_mask: bool or additive, broadcastable to (batch, heads, queries, keys), or None.
            scale: factor of the scores, ``head_dim ** -0.5`` if None.

        Returns:
            (batch, heads, queries, value channels) in value's dtype.
        """
        if self.recipe is not None:
            return qflash_attention(query, key, value, attn_mask, scale=scale, recipe=self.recipe)
        if attn_mask is not None and attn_mask.dtype != torch.bool:
            attn_mask = attn_mask.float()
        out = torch.nn.functional.scaled_dot_product_attention(
            query.float(), key.float(), value.float(), attn_mask=attn_mask, scale=scale
        )
        return out.to(value.dtype)


METHODS = {
    method.name: method
    for method in (
        Method("fp32", "FP32", False, ((32, 32), (32, 32))),
        Method("qflash-default", "QFlash DEFAULT", True, ((8, 8), (8, 8)), "default"),
        Method("qflash-accurate", "QFlash ACCURATE", True, ((8, 8), (16, 8)), "accurate"),
        Method("qflash-paper", "QFlash PAPER", True, ((8, 8), (8, 8)), "paper"),
    )
}
"""All methods by name."""


def get_method(name: str) -> Method:
    """Return the method called ``name``.

    Raises:
        ValueError: no method has that name.
    """
    if name not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {name!r}")
    return METHODS[name]
