"""Attention that quantises nothing: the float32 reference and FlashAttention-2 in float16, both through PyTorch."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from .method import FLOAT, Method


def _sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
    *,
    dtype: torch.dtype,
    flash: bool = False,
) -> torch.Tensor:
    """Compute softmax attention in ``dtype``; ``flash`` asks for FlashAttention-2 where it can run.

    That is on a CUDA device without a mask, which its kernel does not take; PyTorch chooses elsewhere.
    """
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        attn_mask = attn_mask.to(dtype)
    chosen = flash and query.is_cuda and attn_mask is None
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if chosen else contextlib.nullcontext():
        out = scaled_dot_product_attention(query.to(dtype), key.to(dtype), value.to(dtype), attn_mask=attn_mask, scale=scale)
    return out.to(value.dtype)


def _prepare(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Callable[[], torch.Tensor]:
    return functools.partial(_sdpa, query.half(), key.half(), value.half(), dtype=torch.float16, flash=True)


FP32 = Method("fp32", "FP32", FLOAT, FLOAT, FLOAT, False, ((32, 32), (32, 32)), functools.partial(_sdpa, dtype=torch.float32))
FP16_FLASH = Method(
    "fp16-flash", "Flash-2 FP16", FLOAT, FLOAT, FLOAT, False, ((16, 16), (16, 16)),
    functools.partial(_sdpa, dtype=torch.float16, flash=True), _prepare,
)  # fmt: skip
"""FlashAttention-2 (Dao, 2023), the paper's FP16 kernel; on a CPU PyTorch's float16 attention."""
