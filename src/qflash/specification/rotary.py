"""Rotary positions of queries and keys, in integers: :func:`rotary`. The equations are in ``docs/integer_network.md``."""

from __future__ import annotations

import torch

from .fixed_point import Checker
from .layers import rescale, saturate

ONE = 1 << 14
"""What stands for a cosine or sine of 1, so that 1 and -1 both fit 16 bits."""
MOST_OFFSET = (1 << 30) - 1
"""Largest offset: with it and two products of 2**29 sums stay within 32 bits."""

_UNCHECKED = Checker(False)


def pack_turns(cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return cosines and sines, from -:data:`ONE` to :data:`ONE`, side by side in int32: the sine in the upper 16 bits.

    Networks hold no int16 tensors, which NCCL does not know; and kernels read both at once.
    """
    return ((sin.to(torch.int64) << 16) | (cos.to(torch.int64) & 0xFFFF)).to(torch.int32)


def unpack_turns(turns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines of :func:`pack_turns`, int64."""
    wide = turns.to(torch.int64)
    return ((wide & 0xFFFF) ^ 0x8000) - 0x8000, wide >> 16


def rotary(
    x: torch.Tensor,
    turns: torch.Tensor,
    offset: torch.Tensor,
    multiplier: torch.Tensor,
    dtype: torch.dtype = torch.int8,
    check: Checker = _UNCHECKED,
) -> torch.Tensor:
    """Rotate pairs of channels by the angles of their token, and bring each channel to a step of its own.

    The channels of a head are two halves; channel i of the first and channel i of the second are a pair (a, b). It becomes
    ``(a cos - b sin, b cos + a sin)``, exact, and each of these ``mul(sum + B, R, 32)``, saturated: rounded once.

    Args:
        x: int16 (batch, tokens, channels), one head behind the other.
        turns: int32 (heads, tokens, channels of a head / 2), of :func:`pack_turns`. A table for each head, which go round
            (query and key side by side are twice as many heads), or one for all.
        offset: B, int32 (channels,), in the unit of the sums, up to :data:`MOST_OFFSET` in magnitude.
        multiplier: R, int32 (channels,), ``[0, 2**31)``.
        dtype: int8 in networks; int16 or int32, which show what it saturates.
        check: for the bounds.

    Returns:
        (batch, tokens, channels).
    """
    heads, _, half = turns.shape
    a, b = x.to(torch.int64).unflatten(-1, (-1, heads, 2, half)).unbind(-2)
    # (tokens, 1, heads, half)
    cos, sin = (table.transpose(0, 1)[:, None] for table in unpack_turns(turns))
    sums = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-2).flatten(2)
    check("a cos - b sin", sums, -(1 << 30), 1 << 30)
    return saturate(rescale(sums, 0, offset, multiplier, check), dtype)
