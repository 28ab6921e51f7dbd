"""The integers of a gated product, ``f(gate) value`` with an activation f: SwiGLU, GEGLU and their like."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .fixed_point import Checker, multiply_round
from .layers import ACTIVATIONS, rescale, saturate

GATE_BITS = 28
"""Fraction bits of what brings gates to the unit of their activation."""
PRODUCT_SHIFT = 2
"""What a product loses, to stay below 2**31."""


class GatedIntegers(NamedTuple):
    """The constants of a gated product, as :func:`gated` takes them."""

    gate_multiplier: int
    multiplier: torch.Tensor
    offset: torch.Tensor
    activation: str


def gated(
    x: torch.Tensor,
    gate_multiplier: int,
    multiplier: torch.Tensor,
    offset: torch.Tensor,
    activation: str,
    out_dtype: torch.dtype,
    check: Checker = Checker(False),  # noqa: B008 - it has no state
) -> torch.Tensor:
    """Multiply values by activations of gates: ``mul(mul(f(u), v, 2) + B, R, 32)`` with ``u = mul(gate, A, 28)``, saturated.

    Args:
        x: int16 (..., 2 * channels): gates, then values v.
        gate_multiplier: A, ``[0, 2**31)``: a gate's unit, in 1 / 2**28 of the activation's.
        multiplier: R, int32 (channels,), ``[0, 2**31)``.
        offset: B, int32 (channels,), ``|B| < 2**30``.
        activation: f, of :data:`.layers.ACTIVATIONS`.
        out_dtype: int8, int16 or int32.
        check: for the bounds.

    Returns:
        (..., channels).
    """
    gate, value = x.to(torch.int64).chunk(2, dim=-1)
    u = check("gated: u", multiply_round(gate, gate_multiplier, GATE_BITS), -(1 << 18), 1 << 18)
    made = ACTIVATIONS[activation][0](u, check)
    product = check("gated: p", multiply_round(made, value, PRODUCT_SHIFT), -(1 << 30), 1 << 30)
    return saturate(rescale(product, 0, offset, multiplier, check), out_dtype)
