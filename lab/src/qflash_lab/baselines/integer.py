"""What the unfused integer pipelines (I-ViT, I-BERT, FQ-ViT) have in common: products, masks and requantisation.

All three quantise query, key and value per tensor, form scores in int32, turn them into attention weights of a few
bits in integers, multiply those with the value in int32 and requantise the result to int8. They differ in the softmax.
These are plain formulas on any device; the 32-bit quantities of the papers are in int64 tensors.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch

from qflash.specification.quantization import amplitude, quantize_values, scale_from_amplitude

MASK_BIAS = -64.0
"""An additive mask at or below this many nats removes the key. Swin's -100 between regions is such a mask: kept as a number
it would set the scale of all scores."""

_MOST_BIAS = 1 << 30


@dataclasses.dataclass(frozen=True)
class Scores:
    """Integer scores of a call.

    Attributes:
        values: int64 (batch, heads, queries, keys), with an additive mask already in them.
        scale: nats a unit, float64, one element.
        keep: bool, broadcastable to ``values``, or None: keys that take part.
    """

    values: torch.Tensor
    scale: torch.Tensor
    keep: torch.Tensor | None

    def amplitude(self) -> torch.Tensor:
        """Return the largest magnitude among the scores that take part; 1 if all are zero."""
        values = self.values if self.keep is None else self.values.masked_fill(~self.keep, 0)
        return values.abs().amax().clamp(min=1)

    def spread(self) -> torch.Tensor:
        """Return the difference between the largest and the smallest score that take part; 1 if there is none."""
        if self.keep is None:
            low, high = self.values.aminmax()
        else:
            low = self.values.masked_fill(~self.keep, 1 << 40).amin()
            high = self.values.masked_fill(~self.keep, -(1 << 40)).amax()
        return (high - low).clamp(min=1)

    def below_maximum(self) -> torch.Tensor:
        """Return every score minus its row's maximum over the keys that take part (0 or less for those)."""
        if self.keep is None:
            return self.values - self.values.amax(dim=-1, keepdim=True)
        highest = self.values.masked_fill(~self.keep, -(1 << 40)).amax(dim=-1, keepdim=True)
        return (self.values - highest).clamp(max=0)

    def requantize(self, steps: int, span: torch.Tensor) -> Scores:
        """Bring ``span`` units to ``steps``: the 8-bit scores that I-ViT and FQ-ViT feed to their softmax."""
        values = requantize(self.values, *fixed_point(steps / span.double()))
        return dataclasses.replace(self, values=values, scale=self.scale * span.double() / steps)


Softmax = Callable[[Scores], tuple[torch.Tensor, int]]
"""Turns scores into integer weights and the number of their fraction bits."""


def integer_product(a: torch.Tensor, b: torch.Tensor, most: int) -> torch.Tensor:
    """Return the matrix product of integer tensors, whose elements and partial sums stay within ``most``, as int64.

    In floating point, wide enough that every partial sum is exact.
    """
    dtype = torch.float32 if most < 1 << 24 and a.device.type == "cpu" else torch.float64
    return torch.matmul(a.to(dtype), b.to(dtype)).to(torch.int64)


def fixed_point(ratio: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split a positive float64 into ``multiplier * 2**-shift`` with a multiplier of 31 bits (a dyadic number), int64."""
    mantissa, exponent = torch.frexp(ratio.double().nan_to_num(1.0))
    return (mantissa * 2.0**31).round().to(torch.int64), (31 - exponent.to(torch.int64)).clamp(1, 62)


def requantize(x: torch.Tensor, multiplier: torch.Tensor | int, shift: torch.Tensor | int) -> torch.Tensor:
    """Return ``x * multiplier / 2**shift`` rounded to nearest, halves up: one multiplication and one shift."""
    return ((x * multiplier >> (shift - 1)) + 1) >> 1


def quantize_input(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a float tensor per tensor, Equations 1-2: int8 values and a float32 scale of one element."""
    scale = scale_from_amplitude(amplitude(x, "tensor"))
    return quantize_values(x, scale), scale


def make_scores(query: torch.Tensor, key: torch.Tensor, unit: torch.Tensor, attn_mask: torch.Tensor | None = None) -> Scores:
    """Return Q Kᵀ (Equation 3) with the mask applied.

    Args:
        query, key: int8 (batch, heads, tokens, head_dim).
        unit: nats a unit of the product, float64, one element.
        attn_mask: bool or additive (nats), broadcastable to (batch, heads, queries, keys), or None.
    """
    values = integer_product(query, key.mT, query.shape[-1] << 14)
    if attn_mask is None:
        return Scores(values, unit, None)
    if attn_mask.dtype == torch.bool:
        return Scores(values, unit, attn_mask)
    bias = attn_mask.double()
    keep = bias > MASK_BIAS
    fixed = (bias / unit).nan_to_num(0.0, _MOST_BIAS, -_MOST_BIAS).clamp(-_MOST_BIAS, _MOST_BIAS).round().to(torch.int64)
    return Scores(values + fixed, unit, keep)


def integer_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
    *,
    softmax: Softmax,
) -> torch.Tensor:
    """Compute attention with an integer softmax; arguments and result as in :class:`qflash_lab.baselines.Method`.

    The int8 output's scale is fitted to the accumulator. A row without any key is zero; a NaN or infinity in an input
    makes the whole output NaN, since all of it shares the scale.
    """
    (query_int8, query_scale), (key_int8, key_scale), (value_int8, value_scale) = map(quantize_input, (query, key, value))
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    unit = query_scale.double() * key_scale.double() * factor
    scores = make_scores(query_int8, key_int8, unit.reshape(()), attn_mask)
    weights, bits = softmax(scores)
    accumulator = integer_product(weights, value_int8, key.shape[-2] << (bits + 7))
    most = accumulator.abs().amax().clamp(min=1)
    output = requantize(accumulator, *fixed_point(127 / most.double())).clamp(-128, 127)
    output_scale = value_scale.double() * most * math.ldexp(1.0, -bits) / 127
    poison = (query_scale + key_scale) * 0.0
    return (output * output_scale + poison).to(value.dtype)
