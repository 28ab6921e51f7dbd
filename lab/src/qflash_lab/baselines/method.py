"""The protocol of an attention method: what it is called, what shares a scale, and a function that computes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from qflash.specification.quantization import QuantizedTensor

Bits = tuple[tuple[int, int], tuple[int, int]]
Output = torch.Tensor | QuantizedTensor
Prepare = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Callable[[], Output]]

FLOAT = "none"
"""Granularity of an operand that stays in floating point."""


@dataclasses.dataclass(frozen=True)
class Method:
    """One attention method.

    Attributes:
        name: what commands call it.
        title: what tables call it.
        query_granularity, key_granularity, value_granularity: what shares one scale: ``"tensor"``, ``"head"``,
            ``"token"``, ``"channel"``, or ``"none"`` where the operand is not quantised.
        integer_only: whether the softmax between the two matrix products is integer arithmetic too.
        bits: widths of the operands of Q Kᵀ and of P V.
        attention: computes it, quantisation included, on any device:
            ``attention(query, key, value, attn_mask=None, scale=None)`` with float tensors (batch, heads, tokens,
            channels), a bool (True takes part) or additive mask broadcastable to (batch, heads, queries, keys) or
            None, and the factor of the scores, ``head_dim ** -0.5`` if None. It returns (batch, heads, queries,
            value channels) in value's dtype.
        prepare: quantises the same three tensors, without mask and with the default scale, and returns a call that
            runs the method's Triton or CUDA kernels on them and does not wait for the device; its result is a tensor,
            or int8 with its scale. None where the method has no kernels. (QFlash's own are timed by ``qflash-lab bench``.)
    """

    name: str
    title: str
    query_granularity: str
    key_granularity: str
    value_granularity: str
    integer_only: bool
    bits: Bits
    attention: Callable[..., torch.Tensor]
    prepare: Prepare | None = None
