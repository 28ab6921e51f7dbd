"""The arguments of attention calls."""

from __future__ import annotations

import dataclasses

import torch


@dataclasses.dataclass(frozen=True)
class LayerCall:
    """The arguments of one attention call.

    Attributes:
        query, key, value: float (batch, heads, tokens, channels).
        attn_mask: bool (True takes part) or additive, broadcastable to (batch, heads, queries, keys), or None.
        scale: factor of the scores, ``head_dim ** -0.5`` if None.
        rows: bool (batch, queries), which queries count; all if None.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_mask: torch.Tensor | None = None
    scale: float | None = None
    rows: torch.Tensor | None = None

    def to(self, device: torch.device) -> LayerCall:
        """Return the call with all tensors on a device."""
        tensors = (self.query, self.key, self.value, self.attn_mask, self.rows)
        query, key, value, attn_mask, rows = (None if x is None else x.to(device) for x in tensors)
        return LayerCall(query, key, value, attn_mask, self.scale, rows)  # type: ignore[arg-type]
