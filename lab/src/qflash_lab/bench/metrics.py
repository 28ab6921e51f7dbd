"""How far an output is from its reference, and the float64 reference itself."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import torch

from . import schema as col


def _pair(reference: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if reference.shape != output.shape:
        raise ValueError(f"output must have reference's shape {tuple(reference.shape)}, got {tuple(output.shape)}")
    return reference.detach().to(torch.float64), output.detach().to(device=reference.device, dtype=torch.float64)


def sqnr(reference: torch.Tensor, output: torch.Tensor) -> float:
    """Return the signal-to-quantisation-noise ratio ``20 log10(|reference| / |output - reference|)`` in dB.

    Args:
        reference: any shape and real dtype.
        output: the same shape.

    Returns:
        decibels, computed in float64: infinity where the two are equal, minus infinity where only the
        reference is zero, NaN where either holds a NaN or an infinity.

    Raises:
        ValueError: the shapes differ.
    """
    exact, got = _pair(reference, output)
    return decibels(torch.linalg.vector_norm(exact).item(), torch.linalg.vector_norm(got - exact).item())


def decibels(signal: float, noise: float) -> float:
    """Return ``20 log10(signal / noise)`` of two amplitudes.

    Args:
        signal, noise: norms, not their squares; not negative.

    Returns:
        infinity without noise, minus infinity with noise and no signal, NaN where either is not finite.
    """
    if not (math.isfinite(signal) and math.isfinite(noise)):
        return math.nan
    if noise == 0.0:
        return math.inf
    return 20.0 * math.log10(signal / noise) if signal > 0.0 else -math.inf


def summary(values: Sequence[float]) -> dict[str, float]:
    """Return the columns of a few decibel values: mean, lowest and highest."""
    found = {col.SQNR_DB: statistics.fmean(values), col.SQNR_MIN_DB: min(values), col.SQNR_MAX_DB: max(values)}
    return {name: round(value, 3) for name, value in found.items()}


def mse(reference: torch.Tensor, output: torch.Tensor) -> float:
    """Return the mean squared error in float64; NaN for empty tensors.

    Args:
        reference: any shape and real dtype.
        output: the same shape.

    Raises:
        ValueError: the shapes differ.
    """
    exact, got = _pair(reference, output)
    return (got - exact).square().mean().item()


def exact_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Return softmax attention in float64, what outputs are measured against; a row without any key is zero.

    Args:
        query, key, value: (batch, heads, tokens, channels).
        attn_mask: bool (True takes part) or additive in nats, broadcastable to (batch, heads, queries, keys).
        scale: factor of the scores, ``head_dim ** -0.5`` if None.
    """
    query, key, value = query.double(), key.double(), value.double()
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else scores + attn_mask.double()
    return torch.softmax(scores, dim=-1).nan_to_num(0.0) @ value
