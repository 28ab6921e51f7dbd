"""QFlash as its paper prints it and as its authors' public code computes it: two methods, formulas only.

:data:`qflash.PAPER` takes the paper's choices in this library's fixed point. Here nothing is replaced by an equivalent form.
With octaves s = s_Q·s_K·scale·log₂e a unit of the scores, x = S - m ≤ 0 and s_inv = round(1 / s):

    Algorithm 2         M = round(-s·2ᴺ),  q = (x·M) >> N,  r = x + q·s_inv,  e = ((r >> 1) + s_inv) >> q
    Equations 9, 10     ratio = s / (1/127),  n = ⌊log₂ ratio⌋,  r = 8 - n,  P = (e·round(ratio·2ʳ)) >> r
    Algorithm 1         l = ⌊l·α / s_inv⌋ + ΣP,  O = ⌊O·α / s_inv⌋ + P·V,  α = ShiftExp2(m' - m),  output ⌊O / l⌋ at s_V

``qflash-printed`` is this, with what the paper leaves open taken in its favour: N is 32, so that q is the exact quotient, and
a block has 64 keys.

``qflash-authors`` is https://github.com/EfficientCompLab/qflash at commit 46adca5, ``qflash/kernel.py`` with its default
settings. What it does differently:

* N is 16 for M and for P's multiplier: on the paper's inputs M is -12 where -11.7 is meant, and a tenth of their amplitude
  makes it 0, which switches the exponent's octaves off.
* P and ScaleRelease round to nearest where Equation 10 and Algorithm 1 floor: P gains half a step.
* ScaleRelease multiplies with round(2³⁰ / s_inv). l starts at 1. Blocks have 32 keys, padded with scores of -2²⁰.
* The last quotient is one of float32 numbers, cut off towards zero. (Compiled, Triton's division may be off by two units in
  the last place; here it is exact.)
* Scales and quantisation are computed in the inputs' dtype. In float16 s_Q·s_K underflows for small inputs.

Products, shifts and conversions wrap in 32 and 8 bits as the kernel's do, and a shift by more than 31 or a negative amount
moves every bit out, as PTX defines it. Neither method has kernels here.
"""

from __future__ import annotations

import math

import torch

from qflash.specification.quantization import amplitude, quantize_values, scale_from_amplitude

from .integer import integer_product
from .method import Method

PRINTED_BLOCK, AUTHORS_BLOCK = 64, 32
"""Keys a block (B_c)."""

_QUOTIENT_BITS, _AUTHORS_BITS, _RELEASE_BITS = 32, 16, 30
_PRINTED_START, _AUTHORS_START = -(1 << 21), -(1 << 20)
_LOG2_E, _AUTHORS_LOG2_E = math.log2(math.e), 1.44269504


def _inverse(octave: float) -> int:
    """Return round(1 / s).

    Raises:
        ZeroDivisionError: it is 0 (s above 2), or s is 0; the method divides by it.
        OverflowError: it leaves 32 bits.
    """
    if octave == 0.0 or round(1.0 / octave) == 0:
        raise ZeroDivisionError(
            f"round(1 / s) is a divisor, and s = {octave:.3g} octaves a unit of the scores makes it 0 or infinite"
        )
    inverse = round(1.0 / octave)
    if inverse >= 1 << 31:
        raise OverflowError(f"round(1 / s) must fit 32 bits, and s = {octave:.3g} octaves a unit of the scores gives {inverse}")
    return inverse


def _biased(scores: torch.Tensor, attn_mask: torch.Tensor | None, octave: float, masked: int) -> torch.Tensor:
    """Add a mask to int64 scores: bool or additive in nats; a key that takes no part becomes ``masked``.

    The paper says nothing about masks; both methods take them as the authors' code does, which removes what lies below -100.
    """
    if attn_mask is None:
        return scores
    if attn_mask.dtype == torch.bool:
        return scores.masked_fill(~attn_mask, masked)
    removed = attn_mask < -100.0
    bias = (attn_mask.double().masked_fill(removed, 0.0) * _LOG2_E / octave).round().to(torch.int64)
    return (scores + bias).masked_fill(removed, masked)


def shift_exp2(x: torch.Tensor, octave: float, inverse: int) -> torch.Tensor:
    """Return Algorithm 2's ShiftExp2 of int64 ``x`` of 0 or less, at scale ``octave``."""
    q = x * round(-octave * 2.0**_QUOTIENT_BITS) >> _QUOTIENT_BITS
    r = x + q * inverse
    return ((r >> 1) + inverse) >> q.clamp(max=62)


def requantization(ratio: float, bits: int = 8) -> tuple[int, int]:
    """Return Equation 9's shift r and Equation 10's multiplier for a ratio of scales."""
    shift = bits - math.floor(math.log2(ratio))
    return shift, round(ratio * 2.0**shift)


def printed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Compute Algorithms 1 and 2 with Equations 9 and 10; arguments and result as in :class:`qflash_lab.baselines.Method`.

    P saturates at 127, which it passes where 1 / s is small. Where s_inv is below 1 / s, far keys have a negative r, and so a
    negative P; that is as printed. A row without any key is 0.

    Raises:
        ZeroDivisionError: round(1 / s) is 0.
        OverflowError: round(1 / s) does not fit 32 bits.
    """
    scales = [scale_from_amplitude(amplitude(x, "tensor")) for x in (query, key, value)]
    if not all(bool(x.isfinite().all()) for x in scales):
        return torch.full_like(query[..., :1], math.nan).expand(*query.shape[:3], value.shape[3]).to(value.dtype)
    q8, k8, v8 = (quantize_values(x, s) for x, s in zip((query, key, value), scales, strict=True))
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    octave = float(scales[0]) * float(scales[1]) * factor * _LOG2_E
    inverse = _inverse(octave)
    shift, multiplier = requantization(octave * 127)
    hidden = -(1 << 40)
    scores = _biased(integer_product(q8, k8.mT, query.shape[-1] << 14), attn_mask, octave, hidden)
    highest = scores.new_full((*scores.shape[:3], 1), _PRINTED_START)
    sums = scores.new_zeros(())
    for start in range(0, scores.shape[3], PRINTED_BLOCK):
        s = scores[..., start : start + PRINTED_BLOCK]
        above = torch.maximum(highest, s.amax(-1, keepdim=True))
        p = (shift_exp2((s - above).clamp(min=-(1 << 24)), octave, inverse) * multiplier >> shift).clamp(max=127)
        p = p.masked_fill(s == hidden, 0)
        # numerator and, as a last channel, denominator
        here = torch.cat((integer_product(p, v8[..., start : start + PRINTED_BLOCK, :], 1 << 20), p.sum(-1, keepdim=True)), -1)
        alpha = shift_exp2((highest - above).clamp(min=-(1 << 24)), octave, inverse)
        sums = torch.div(sums * alpha, inverse, rounding_mode="floor") + here
        highest = above
    total = sums[..., -1:]
    out = torch.div(sums[..., :-1], total.masked_fill(total == 0, 1), rounding_mode="floor").clamp(-128, 127)
    return (out * scales[2]).to(value.dtype)


def _wrap(x: torch.Tensor, bits: int = 32) -> torch.Tensor:
    """Keep the low bits of int64, signed."""
    half = 1 << (bits - 1)
    return ((x + half) & (2 * half - 1)) - half


def _authors_exp2(x: torch.Tensor, inverse: int, multiplier: int) -> torch.Tensor:
    q = _wrap(x * multiplier) >> _AUTHORS_BITS
    r = _wrap(x + _wrap(q * inverse))
    return _wrap((r >> 1) + inverse) >> torch.where((q < 0) | (q > 31), 31, q)


def _authors_scale(x: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude over 127 in the tensor's own dtype, one element without dimensions."""
    return x.abs().amax() / 127


def authors(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Compute what the authors' code computes; arguments and result as in :class:`qflash_lab.baselines.Method`.

    Raises:
        ZeroDivisionError: round(1 / s) is 0, or s_Q·s_K underflows; the code divides by it on the host.
        OverflowError: round(1 / s) does not fit 32 bits.
    """
    query_scale, key_scale, value_scale = map(_authors_scale, (query, key, value))
    if not all(bool(x.isfinite()) for x in (query_scale, key_scale, value_scale)):
        return torch.full_like(query[..., :1], math.nan).expand(*query.shape[:3], value.shape[3]).to(value.dtype)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    octave = factor * _AUTHORS_LOG2_E * float(query_scale * key_scale)
    inverse = _inverse(octave)
    exp_multiplier = round(-octave * 2**_AUTHORS_BITS)
    requant_multiplier = round(octave * 127 * 2**_AUTHORS_BITS)
    release = round((1 << _RELEASE_BITS) / inverse)

    def quantized(x: torch.Tensor, one: torch.Tensor) -> torch.Tensor:
        return (x / one).round().clamp(-128, 127).to(torch.int8)

    q8, k8, v8 = quantized(query, query_scale), quantized(key, key_scale), quantized(value, value_scale)
    scores = _biased(integer_product(q8, k8.mT, query.shape[-1] << 14), attn_mask, octave, _AUTHORS_START)
    missing = -scores.shape[3] % AUTHORS_BLOCK
    scores = torch.nn.functional.pad(scores, (0, missing), value=_AUTHORS_START)
    v8 = torch.nn.functional.pad(v8, (0, 0, 0, missing))
    highest = scores.new_full((*scores.shape[:3], 1), _AUTHORS_START)
    total = torch.ones_like(highest)
    sums = scores.new_zeros((*scores.shape[:3], value.shape[3]))
    half = 1 << (_RELEASE_BITS - 1)
    for start in range(0, scores.shape[3], AUTHORS_BLOCK):
        s = scores[..., start : start + AUTHORS_BLOCK]
        above = torch.maximum(highest, s.amax(-1, keepdim=True))
        exp = _authors_exp2(s - above, inverse, exp_multiplier)
        p = _wrap(_wrap(exp * requant_multiplier + (1 << (_AUTHORS_BITS - 1))) >> _AUTHORS_BITS, 8)
        alpha = _authors_exp2(highest - above, inverse, exp_multiplier)
        total = _wrap((total * alpha * release + half >> _RELEASE_BITS) + p.sum(-1, keepdim=True))
        product = integer_product(p, v8[..., start : start + AUTHORS_BLOCK, :], 1 << 20)
        sums = _wrap((sums * alpha * release + half >> _RELEASE_BITS) + product)
        highest = above
    quotient = (sums.float() / total.float()).nan_to_num(0.0, 2.0**31, -(2.0**31)).trunc().to(torch.int64)
    out = _wrap(quotient.clamp(-(1 << 31), (1 << 31) - 1), 8).to(torch.int8)
    return (out * value_scale).to(value.dtype)


PRINTED = Method("qflash-printed", "QFlash as printed", "tensor", "tensor", "tensor", True, ((8, 8), (8, 8)), printed)
AUTHORS = Method("qflash-authors", "QFlash authors' code", "tensor", "tensor", "tensor", True, ((8, 8), (8, 8)), authors)
