"""What ids of tokens say of a text: which places hold a token, and which token stands for the text.

A batch of texts is one tensor of ids, int32 or int64 (batch, tokens), with :data:`PADDING` at places without a token.
"""

from __future__ import annotations

import torch

PADDING = -1
"""The id of a place without a token."""


def with_padding(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return ids, (batch, tokens), with :data:`PADDING` where ``mask``, of any integer type or bool, is 0."""
    return torch.where(mask != 0, ids, PADDING)


def is_token(ids: torch.Tensor) -> torch.Tensor:
    """Return bool (batch, tokens): whether there is a token."""
    return ids >= 0


def place_of(ids: torch.Tensor, token: int | None) -> torch.Tensor:
    """Return the place of the token that stands for each text, int64 (batch,).

    Args:
        ids: int32 or int64 (batch, tokens).
        token: the first place with this id, or 0 where there is none; None for the first place of the largest id.
    """
    # of equal numbers argmax takes the first
    return (ids if token is None else (ids == token).to(torch.int32)).argmax(dim=1)
