"""I-BERT (Kim et al., ICML 2021): softmax through i-exp, a quadratic polynomial in integers (Section 3.5, Algorithm 3).

For a score q at scale S, minus its row's maximum, with q_ln2 = ⌈ln 2 / S⌉, q_b = ⌊1.353 / S⌋ and q_c = ⌊0.344 / (0.3585·S²)⌋:

    z = ⌊-q / q_ln2⌋,  p = q + z·q_ln2             range reduction to (-ln 2, 0]
    i-exp = ((p + q_b)² + q_c) >> z               0.3585·(x + 1.353)² + 0.344
    P = (⌊2³² / Σe⌋ · e) >> 24                     e: i-exp in 16 bits; 8 fraction bits

Algorithm 3 has ⌊ln 2 / S⌋; its authors' code, and FQ-ViT's, floor -ln 2 / S, which is what is computed here: on scores of
8 bits it is worth 1 to 2 dB to FQ-ViT.

Scores enter in int32 at the scale s_Q·s_K·scale, as in I-BERT's attention, not requantised to 8 bits first. A scale below
2⁻¹⁵ is brought to it, so that the polynomial stays within int32; q_ln2 and q_c are kept above zero, which they reach for
scales near 1. There are no kernels: the paper does not time I-BERT.
"""

from __future__ import annotations

import functools
import math

import torch

from .integer import Scores, fixed_point, integer_attention, requantize
from .method import Method

A, B, C = 0.3585, 1.353, 0.344
"""exp(x) ≈ A·(x + B)² + C on (-ln 2, 0]."""

SMALLEST_SCALE = 2.0**-15
FRACTION_BITS = 8
_EXP_BITS = 15


def i_exp(scores: Scores, up: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return e to the scores minus their row's maximum, in fixed point (Algorithms 1 and 3).

    Args:
        scores: brought to a scale of at least 2**-15 here.
        up: octaves to shift left before the shift right by z, which keeps the bits it would cut.

    Returns:
        int64 of the scores' shape, zero for keys that take no part, and its value at the maximum (one element).
    """
    coarser = (SMALLEST_SCALE / scores.scale).nan_to_num(1.0).clamp(min=1.0)
    scale = scores.scale * coarser
    ln2 = (math.log(2) / scale).nan_to_num(1.0).ceil().clamp(min=1).to(torch.int64)
    b = (B / scale).nan_to_num(1.0).floor().to(torch.int64)
    c = (C / (A * scale * scale)).nan_to_num(1.0).floor().clamp(min=1).to(torch.int64)
    q = -requantize(scores.below_maximum(), *fixed_point(1.0 / coarser))
    z = q // ln2
    p = z * ln2 - q
    exp = ((p + b) ** 2 + c << up) >> z.clamp(max=62)
    if scores.keep is not None:
        exp = exp.masked_fill(~scores.keep, 0)
    return exp, b * b + c << up


def i_softmax(scores: Scores) -> tuple[torch.Tensor, int]:
    """Return I-BERT's attention weights, 0 ... 255 in 1/256."""
    exp, most = i_exp(scores)
    exp = requantize(exp, *fixed_point(((1 << _EXP_BITS) - 1) / most.double()))
    factor = (1 << 32) // exp.sum(dim=-1, keepdim=True).clamp(min=1)
    return exp * factor >> (32 - FRACTION_BITS), FRACTION_BITS


I_BERT = Method(
    "i-bert", "I-BERT", "tensor", "tensor", "tensor", True, ((8, 8), (8, 8)),
    functools.partial(integer_attention, softmax=i_softmax),
)  # fmt: skip
