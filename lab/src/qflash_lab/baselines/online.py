"""FlashAttention-2's softmax in floating point over integer scores, as a plain formula: what the baselines share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from qflash.backends import triton_unavailable
from qflash.validation import FLOAT_DTYPES, check_attention_shapes, check_tensor

if TYPE_CHECKING:
    from qflash.kernels.launch_recorder import KernelLaunch

LOG2_E = math.log2(math.e)

KERNEL_CHANNELS = 128
"""Most channels that the Triton kernel takes."""

BLOCK = 64
"""Keys a tile. Weights are rounded relative to the largest score so far, so it belongs to the mathematics."""


def check_scale(scale: float | None, head_dim: int) -> float:
    """Return the factor of the scores, ``head_dim ** -0.5`` if None.

    Raises:
        ValueError: not positive and finite: the largest score must stay the largest.
    """
    if scale is None:
        return head_dim**-0.5
    if not (scale > 0 and math.isfinite(scale)):
        raise ValueError(f"scale must be positive and finite, got {scale}")
    return scale


def integer_scores(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return Q Kᵀ of int8 values (batch, heads, tokens, channels) as float32, exact up to 1040 channels."""
    return query.to(torch.float32) @ key.to(torch.float32).mT


def online_softmax(
    scores: torch.Tensor,
    row: torch.Tensor,
    product: Callable[[torch.Tensor, int], torch.Tensor],
    attn_mask: torch.Tensor | None,
    *,
    most: float = 1.0,
    block: int = BLOCK,
) -> torch.Tensor:
    """Compute softmax(scores * row) V over tiles of ``block`` keys, rescaling sums when the row's maximum grows.

    FlashAttention-2 (Dao, 2023), Algorithm 1, in base 2.

    Args:
        scores: float32 (batch, heads, queries, keys).
        row: float32, broadcastable to (batch, heads, queries, 1): one octave's share of a score; positive.
        product: takes a tile's weights, float32 and at most ``most``, and the position of its first key; returns
            their product with V, float32.
        attn_mask: bool (True takes part) or additive in nats, broadcastable to ``scores``.
        most: the largest weight.
        block: keys a tile.

    Returns:
        float32 (batch, heads, queries, value channels); a row without a key is zero.
    """
    if attn_mask is not None:
        # with a bias the maximum is not that of the scores, so the row's factor goes in first
        octaves = scores * row
        if attn_mask.dtype == torch.bool:
            octaves = octaves.masked_fill(~attn_mask, -math.inf)
        else:
            octaves = octaves + attn_mask.to(torch.float32) * LOG2_E
        scores, row = octaves, torch.ones_like(row)
    shape = (*scores.shape[:3], 1)
    highest = scores.new_full(shape, -math.inf)
    total = scores.new_zeros(shape)
    out: torch.Tensor | float = 0.0
    for start in range(0, scores.shape[3], block):
        tile = scores[..., start : start + block]
        above = torch.maximum(highest, tile.amax(dim=-1, keepdim=True))
        reached = torch.where(above == -math.inf, 0.0, above)  # no key yet: infinity less infinity is no number
        weights = torch.exp2(tile * row - (reached * row - math.log2(most)))
        release = torch.exp2((highest - reached) * row)
        total = total * release + weights.sum(dim=-1, keepdim=True)
        out = out * release + product(weights, start)
        highest = above
    assert isinstance(out, torch.Tensor)
    return torch.where(total == 0.0, 0.0, out / total)


def check_inputs(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Require three float tensors (batch, heads, tokens, channels) that fit together.

    Raises:
        TypeError: not a float tensor.
        ValueError: shapes or devices do not fit together.
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, x, FLOAT_DTYPES, 4)
    check_attention_shapes(query, key, value, False)
    for name, x in (("key", key), ("value", value)):
        if x.shape[:2] != query.shape[:2]:
            raise ValueError(f"{name} must have query's batch and heads {tuple(query.shape[:2])}, got {tuple(x.shape[:2])}")


def kernel_missing(query: torch.Tensor, value: torch.Tensor) -> str | None:
    """Return why the Triton kernel cannot compute this attention, or None."""
    widest = max(query.shape[-1], value.shape[-1])
    if widest > KERNEL_CHANNELS:
        return f"the kernel takes at most {KERNEL_CHANNELS} channels, got {widest}"
    if query.numel() == 0 or value.numel() == 0:
        return f"query {tuple(query.shape)} or value {tuple(value.shape)} is empty"
    return triton_unavailable(query.device)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
    *,
    quantize_operands: Callable[..., Any],
    formula: Callable[..., torch.Tensor],
    kernel_call: Callable[..., KernelLaunch],
) -> torch.Tensor:
    """Quantise and attend, with the kernel where it can run and no mask is given; see :class:`qflash_lab.baselines.Method`.

    Args:
        quantize_operands: makes a method's operands of query, key and value.
        formula: computes with operands, mask and scale; float32.
        kernel_call: makes the launch of operands and scale that fills a tensor.
    """
    check_inputs(query, key, value)
    factor = check_scale(scale, query.shape[-1])
    shape = (*query.shape[:3], value.shape[3])
    if query.numel() == 0 or value.numel() == 0:
        return value.new_zeros(shape)
    operands = quantize_operands(query, key, value)
    if query.is_cuda and attn_mask is None and kernel_missing(query, value) is None:
        out = value.new_empty(shape)
        kernel_call(operands, factor, out).run()
        return out
    return formula(operands, attn_mask, factor).to(value.dtype)


def check_kernel(title: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Require inputs on which a method's kernel runs.

    Args:
        title: the method's, for the error.
        query, key, value: float (batch, heads, tokens, channels).

    Raises:
        TypeError: not a float tensor.
        ValueError: the kernel cannot run there or on these shapes.
    """
    check_inputs(query, key, value)
    if reason := kernel_missing(query, value):
        raise ValueError(f"{title}'s kernel cannot run: {reason}")


def prepare_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    title: str,
    quantize_operands: Callable[..., Any],
    kernel_call: Callable[..., KernelLaunch],
) -> Callable[[], torch.Tensor]:
    """Quantise, and return a call that launches the kernel alone; it returns the same float16 tensor every time.

    Raises:
        ValueError: the kernel cannot run there or on these shapes.
    """
    check_kernel(title, query, key, value)
    out = torch.empty((*query.shape[:3], value.shape[3]), dtype=torch.float16, device=query.device)
    call = kernel_call(quantize_operands(query, key, value), query.shape[-1] ** -0.5, out)

    def run() -> torch.Tensor:
        call.run()
        return out

    return run
