"""FQ-ViT (Lin et al., IJCAI 2022): Log-Int-Softmax, an attention map of 4-bit powers of two.

    e = i-exp of the scores (I-BERT), requantised to 8 bits between their minimum and maximum
    a = round(log₂ round(Σe / e)),  the key is dropped for a > 15
    O = Σ V << (15 - a),  15 fraction bits

log₂ is the position of the leading bit, plus one if the next bit is set: the step lies at 1.5, not at √2. The weights are
powers of two and do not sum to one. There are no kernels: the paper does not time FQ-ViT.
"""

from __future__ import annotations

import functools

import torch

from .i_bert import i_exp
from .integer import Scores, integer_attention
from .method import Method

MAP_BITS = 4
MOST_OCTAVES = (1 << MAP_BITS) - 1
_UP = 16


def log2_round(x: torch.Tensor) -> torch.Tensor:
    """Return log₂ of positive int64 below 2**53, rounded by the bit after the leading one."""
    floor = torch.frexp(x.double()).exponent.to(torch.int64) - 1
    return floor + ((2 * x >> floor) & 1)


def log_int_softmax(scores: Scores) -> tuple[torch.Tensor, int]:
    """Return FQ-ViT's attention weights, zero or 2**(15 - a) in 2**-15, 0 ≤ a ≤ 15."""
    exp, _ = i_exp(scores.requantize(255, scores.spread()), _UP)
    total = exp.sum(dim=-1, keepdim=True)
    some = exp.clamp(min=1)
    octaves = log2_round(((2 * total + some) // (2 * some)).clamp(1, 1 << 52))
    weights = torch.where((exp > 0) & (octaves <= MOST_OCTAVES), 1 << (MOST_OCTAVES - octaves).clamp(min=0), 0)
    return weights, MOST_OCTAVES


FQ_VIT = Method(
    "fq-vit", "FQ-ViT", "tensor", "tensor", "tensor", True, ((8, 8), (MAP_BITS, 8)),
    functools.partial(integer_attention, softmax=log_int_softmax),
)  # fmt: skip
