"""Formulas of ``qflash-lab ablate``: appendix A's steps between float and integer attention, and B.1's ways to accumulate."""

from __future__ import annotations

import math

import torch

from qflash.api import int8_attention, quantize
from qflash.specification import fixed_point as fp
from qflash.specification.quantization import QuantizedTensor
from qflash.specification.recipe import PAPER

KEY_BLOCK = 64
"""Keys in a tile of the formulas; keys and queries in a tile of the kernels that compute the same steps."""

# --- appendix A: from float to integer, step by step -----------------------------------------------------------------

STEPS = (
    ("V0", "float16 FlashAttention-2"),
    ("V1", "int8 Q Kᵀ"),
    ("V2", "int8 P V"),
    ("V3", "integer exponential"),
    ("V4", "integer accumulation"),
)
"""Appendix A's names and what each step changes."""


def _per_tensor(*tensors: torch.Tensor) -> list[QuantizedTensor]:
    return [quantize(x, "tensor") for x in tensors]


def _octaves(query: QuantizedTensor, key: QuantizedTensor) -> tuple[float, int, torch.Tensor]:
    """Return the factor from int32 scores to octaves, and the same as the recipe's multiplier and fraction bits."""
    head_dim = query.values.shape[-1]
    constant = head_dim**-0.5 * math.log2(math.e)
    scale = fp.combine_scales(fp.split_scale(query.scale), fp.split_scale(key.scale), fp.split_float(constant))
    multiplier, bits = fp.narrow_multiplier(*scale, head_dim)
    return float(query.scale) * float(key.scale) * constant, int(multiplier), bits


def _shift_exp2(distance: torch.Tensor, multiplier: int, bits: torch.Tensor) -> torch.Tensor:
    """Return the 7-bit P of recipe ``paper`` for distances ``m - S >= 0`` (Algorithm 2, Equation 10)."""
    return fp.probability(distance * multiplier + fp.exponent_offset(1, bits), bits, "linear", 7, False)


def step_formula(step: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Compute appendix A's step V0 to V4 in plain tensors, online over blocks of :data:`KEY_BLOCK` keys.

    V0: float16 operands, float32 sums and softmax. V1: Q and K in int8. V2: P (7 bits, rounded) and V in int8 too. V3:
    ShiftExp2 gives P. V4: Algorithm 1 (recipe ``paper``), its output floored to int8 at V's scale. One scale a tensor.

    Args:
        step: 0 to 4.
        query, key, value: float, ``(batch, heads, tokens, head_dim)``.

    Returns:
        float32, the query's shape.

    Raises:
        ValueError: another step.
    """
    if step not in range(len(STEPS)):
        raise ValueError(f"step must be 0 to {len(STEPS) - 1}, got {step!r}")
    if step == 4:
        query8, key8, value8 = _per_tensor(query, key, value)
        out = int8_attention(query8, key8, value8, out_dtype=torch.float32, recipe=PAPER)
        assert isinstance(out, torch.Tensor)
        return out
    q, k, v = query.half().float(), key.half().float(), value.half().float()
    factor, multiplier, value_scale = query.shape[-1] ** -0.5 * math.log2(math.e), 0, 1.0
    bits = q.new_zeros(())
    if step > 0:
        query8, key8 = quantize(query, "tensor"), quantize(key, "tensor")
        factor, multiplier, bits = _octaves(query8, key8)
        q, k = query8.values.float(), key8.values.float()  # sums below 2**24: float32 products of int8 are exact
    if step > 1:
        value8 = quantize(value, "tensor")
        v, value_scale = value8.values.float(), float(value8.scale)
    row_max: torch.Tensor | None = None
    numerator = denominator = q.new_zeros(())
    for start in range(0, k.shape[2], KEY_BLOCK):
        s = q @ k[:, :, start : start + KEY_BLOCK].mT
        here = s.amax(-1, keepdim=True)
        new_max = here if row_max is None else torch.maximum(row_max, here)
        if step < 3:
            p = torch.exp2((s - new_max) * factor)
            total = p if step < 2 else (p := torch.floor(p * 127 + 0.5))
            p = p.half().float()
        else:
            total = p = _shift_exp2((new_max - s).int(), multiplier, bits).float()
        alpha = 0.0 if row_max is None else torch.exp2((row_max - new_max) * factor)
        numerator = numerator * alpha + p @ v[:, :, start : start + KEY_BLOCK]
        denominator = denominator * alpha + total.sum(-1, keepdim=True)
        row_max = new_max
    return numerator / denominator * value_scale


# --- appendix B.1: scale accumulation against scale release ----------------------------------------------------------

ACCUMULATIONS = (
    "scale accumulation, 32 bits",
    "scale accumulation, 64 bits",
    "scale release (paper)",
    "scale release (QFlash online)",
    "no rescaling (QFlash two_pass)",
    "float rescaling of the same P",
)
TILES = (1, 2, 3, 4, 6, 8, 16, 32, 64)


def _wrap(x: torch.Tensor) -> torch.Tensor:
    """Keep the low 32 bits of int64, signed."""
    return ((x + (1 << 31)) & 0xFFFFFFFF) - (1 << 31)


def _alpha(rise: torch.Tensor, octave: float, inverse: int) -> torch.Tensor:
    """Return Algorithm 2's ShiftExp2 of ``-rise`` (int64, scale ``octave``), with 32 fraction bits in M."""
    q = (rise * round(octave * 2.0**32)) >> 32
    remainder = q * inverse - rise
    return ((remainder >> 1) + inverse) >> q.clamp(max=62)


def accumulation(kind: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Accumulate the tiles of one attention in one of the ways :data:`ACCUMULATIONS`, everything else alike.

    P is recipe ``paper``'s (linear, 7 bits, floored) against the running maximum. Scale accumulation lets the scale
    of α̂, which is the scale of the scores in octaves, pile up: after tile j sums have the scale ``s_α**j``, so that
    the new product is divided by ``s_α**j`` (the appendix prints ``s_α``, which would add numbers of different
    scales). Scale release divides by
    ``round(1 / s_α)`` in every step. The quotient is taken in float64, so that only the accumulation differs.

    Args:
        kind: one of :data:`ACCUMULATIONS`.
        query, key, value: float, ``(batch, heads, tokens, head_dim)``.

    Returns:
        float64, the query's shape.

    Raises:
        ValueError: another ``kind``.
    """
    if kind not in ACCUMULATIONS:
        raise ValueError(f"kind must be one of {ACCUMULATIONS}, got {kind!r}")
    if "QFlash" in kind:
        recipe = PAPER.replace(output="accumulator", normalization="online" if "online" in kind else "two_pass")
        query8, key8, value8 = _per_tensor(query, key, value)
        out = int8_attention(query8, key8, value8, out_dtype=torch.float32, recipe=recipe)
        assert isinstance(out, torch.Tensor)
        return out.double()
    query8, key8, value8 = _per_tensor(query, key, value)
    octave, multiplier, bits = _octaves(query8, key8)
    inverse = round(1 / octave)
    q, k, v = (x.values.double() for x in (query8, key8, value8))
    row_max: torch.Tensor | None = None
    sums = torch.zeros((), dtype=torch.float64 if kind.startswith("float") else torch.int64, device=query.device)
    power = 1
    for start in range(0, k.shape[2], KEY_BLOCK):
        s = (q @ k[:, :, start : start + KEY_BLOCK].mT).long()
        here = s.amax(-1, keepdim=True)
        new_max = here if row_max is None else torch.maximum(row_max, here)
        p = _shift_exp2((new_max - s).int(), multiplier, bits).double()
        # numerator and, as a last channel, denominator
        product = torch.cat([p @ v[:, :, start : start + KEY_BLOCK], p.sum(-1, keepdim=True)], -1)
        rise = torch.zeros_like(new_max) if row_max is None else new_max - row_max
        if kind.startswith("float"):
            sums = sums * torch.exp2(-rise.double() * octave) + product
        elif "release" in kind:
            sums = torch.div(sums * _alpha(rise, octave, inverse), inverse, rounding_mode="floor") + product.long()
        else:
            power = (power * inverse + (1 << 63)) % (1 << 64) - (1 << 63)
            sums = sums * _alpha(rise, octave, inverse) + product.long() * power  # int64 wraps by itself
            if "32" in kind:
                sums = _wrap(sums)
        row_max = new_max
    sums = sums.double()
    out = sums[..., :-1] / sums[..., -1:]
    return torch.where(torch.isfinite(out), out, 0.0) * float(value8.scale)
