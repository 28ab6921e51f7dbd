"""How far an output may be from float64 attention, by the errors that docs/algorithm.md gives for each step.

An output is a mean of values with weights, O = sum(w v) / sum(w). If the weights are off from a multiple of the exact ones by
at most e, then O is off by at most sum(e abs(v - O)) / sum(w): what all weights have in common cancels. So the bound is found
key by key from what each rounding can do to a weight. No constant is fitted to what the code returns.
"""

from __future__ import annotations

import dataclasses
import math

import torch

import qflash
from fuzz.calls import Call, IntegerCall
from helpers import exact_attention
from qflash.specification import quantization
from qflash.specification.recipe import Recipe

_EXPONENTIAL = {"linear": 0.0318, "quadratic": 0.0042}
"""Largest relative error of a weight about a common factor: those of chord and parabola, with the fraction cut to 8 bits."""
_RELEASE = 1.064
"""ScaleRelease multiplies earlier sums by a factor that is too large, by no more than this."""
_OUTPUT = {torch.float32: 2.0**-21, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
"""Relative rounding errors of outputs, generously."""
_MOST_NATS = 100.0
"""Scores that may be off by more say nothing about weights."""
_NATS = math.log(2)


@dataclasses.dataclass(frozen=True)
class _Attention:
    """Attention as the integers see it; everything float64, and of all heads of query.

    Attributes:
        query, key: (batch, heads, tokens, channels), in the unit of the numbers; what was quantised, or stands for it.
        value: the same, without its offset.
        query_scale, key_scale, value_scale: of the int8 tensors, broadcastable to them.
        score_error: of the quantisation, in nats, broadcastable to (batch, heads, queries, keys).
        value_error: of the quantisation.
        exact: exact attention, without value's offset.
        seen: bool, (batch, heads, queries, keys).
        bias: in nats, of what is seen, or None.
        factor: the softmax scale.
        recipe: the numerical choices.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    query_scale: torch.Tensor
    key_scale: torch.Tensor
    value_scale: torch.Tensor
    score_error: torch.Tensor
    value_error: torch.Tensor
    exact: torch.Tensor
    seen: torch.Tensor
    bias: torch.Tensor | None
    factor: float
    recipe: Recipe

    def bound(self) -> torch.Tensor:
        """Return how far the output may be off before it is rounded to its type; 0 for rows without a key."""
        recipe, seen, keys = self.recipe, self.seen, self.key.shape[2]
        products = self.query @ self.key.mT * self.factor
        scores = products if self.bias is None else products + self.bias
        releases = torch.zeros(keys, dtype=torch.float64)
        if recipe.normalization == "online":
            blocks = torch.arange(keys) // recipe.key_block
            releases = (blocks[-1] - blocks).double()
        error, relative, outside = self._exponent_errors(products, int(releases[0]))
        error = torch.where(seen, error, 0.0)
        top = torch.where(seen, scores + error, -math.inf).amax(dim=-1, keepdim=True)
        error = error + torch.where(seen, relative * (top - scores + error), 0.0)
        any_seen = seen.any(dim=-1, keepdim=True)
        outside = outside | (error.amax(dim=-1, keepdim=True) > _MOST_NATS)
        error = error.clamp(max=_MOST_NATS)

        # weights relative to the largest exact one, in which P has steps relative to the largest computed one
        scores = torch.where(seen, scores, -math.inf)
        base = torch.where(any_seen, scores.amax(dim=-1, keepdim=True), 0.0)
        wrong, steps_of_p = _EXPONENTIAL[recipe.exponential], float(2**recipe.probability_bits - 1)
        weight, released = torch.exp(scores - base), _RELEASE**releases
        high = weight * torch.exp(error) * (1 + wrong) * released
        low = weight * torch.exp(-error) * (1 - wrong)
        step = torch.exp((top - base).nan_to_num(0.0, 0.0, 0.0).clamp(max=_MOST_NATS)) * (1 + wrong) / steps_of_p
        rounding = torch.minimum(step * (1.0 if recipe.probability_rounding == "floor" else 0.5) * released, high)
        exact_sum = recipe.takes_exact_sum(keys)
        if exact_sum:
            # the sum before rounding has fractions, which are cut
            rounding = rounding + torch.minimum(step / 128, high)
        off = torch.maximum(high - weight, weight - low) + rounding
        largest = torch.exp((scores - error).amax(dim=-1, keepdim=True) - base) * (1 - wrong) * (1 - 1 / steps_of_p)
        total = torch.maximum((low - rounding).clamp(min=0).sum(-1, keepdim=True), largest)
        total = torch.where(any_seen, total, 1.0)

        distance = (self.value[:, :, None] - self.exact[:, :, :, None]).abs()
        far = distance.amax(dim=3)
        bound = torch.einsum("bhqk,bhqkc->bhqc", off, distance) / total
        # a row sum has no fewer steps than the largest P
        lost = (step / total).clamp(max=1 / (steps_of_p - 1)) * releases[0]
        if exact_sum:
            missing = torch.where(seen, torch.minimum(step / 2 + step / 128, high), 0.0).sum(-1, keepdim=True)
            bound = bound + missing / total * (far + 0.35 * self.value_scale)
            lost = lost + 2.1 * (step / total).clamp(max=1 / (steps_of_p - 1))
        # whatever the weights are, an output is a mean of values
        bound = torch.where(outside, far, torch.minimum(bound, far))
        units = 129 * lost + 2.0**-13 + (1.0 if recipe.output == "value_scale" else 0.0)
        return torch.where(any_seen, bound + units * self.value_scale + self.value_error, 0.0)

    def _exponent_errors(self, products: torch.Tensor, releases: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return errors of scores in nats, relative ones of their differences, and where the formats cannot hold them."""
        biased, dim, error = self.bias is not None, self.query.shape[3], self.score_error
        unit = self.factor * self.query_scale * self.key_scale.amax(dim=2, keepdim=True) / _NATS  # octaves
        if self.key_scale.shape[2] > 1:
            bits = (65536 // dim).bit_length() - 1
            steps = ((products.abs() + error) / (self.factor * self.query_scale * self.key_scale.mT)).clamp(max=2.0**14 * dim)
            error = error + steps * unit * _NATS * 2.0**-bits
            quantum = (8 * unit * 2.0**-bits).clamp(min=2.0**-15 if biased else 2.0**-23)
            relative, outside = torch.full_like(unit, 2.0**-20), unit * 2.0**-bits > 0.25
        else:
            # floors of score and bias, where there is one; M has half its bound's steps, or its exponent stops at 24
            most = (28672 if biased else 57344) // dim
            quantum = (4 * unit / most).clamp(min=2.0**-15) if biased else torch.zeros_like(unit)
            relative = (2.0**-25 / unit).clamp(min=1 / most) + 2.0**-20
            outside = unit > most / 2
        error = error + quantum * _NATS * (1 + releases)
        if self.bias is not None:
            error = error + 2.0**-14 * _NATS + 2.0**-20 * self.bias.abs()
        return error, relative, outside


def _masks(call: Call, mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return which keys are seen, and the bias of those."""
    shape = (call.batch, call.heads, call.queries, call.keys)
    if mask is None:
        seen = torch.ones(shape, dtype=torch.bool)
        return (seen.tril() if call.mask == "causal" else seen), None
    if mask.dtype == torch.bool:
        return mask.expand(shape), None
    seen = (mask > -math.inf).expand(shape)
    return seen, torch.where(seen, mask.double(), 0.0)


def _value_scale(value: torch.Tensor, granularity: str, centered: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales and offsets, float64: those of ``smooth_value`` if ``centered``."""
    if not centered:
        scale = quantization.scale_from_amplitude(quantization.amplitude(value, granularity)).double()
        return scale, torch.zeros((1,) * 4, dtype=torch.float64)
    low, high = (end.double() for end in torch.aminmax(value, dim=2, keepdim=True))
    middle, half = (low + high) / 2, (high - low) / 2
    least = torch.maximum(half / 126.5, middle.abs() * 2.0**-21)
    if granularity != "channel":
        least = least.amax().view(1, 1, 1, 1) if granularity == "tensor" else least.amax(dim=(2, 3), keepdim=True)
    return torch.where(least == 0, 1.0, least.clamp(min=quantization.SMALLEST_SCALE)), middle


def _per_head(x: torch.Tensor, group: int) -> torch.Tensor:
    return x.double().repeat_interleave(group, dim=1) if x.shape[1] > 1 else x.double()


def error_of_floats(
    call: Call, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return exact attention on floats, and how far a call's output may be from it; float64, of the output's shape.

    Biases have to be small beside 1024 nats, or minus infinity.
    """
    recipe, factor = call.recipe, call.factor
    exact = exact_attention(query, key, value, mask, is_causal=call.mask == "causal", scale=factor)
    # what the recipe prepares leaves softmax alone, but for float32's roundings
    q, k = query.float(), key.float()
    error = 2.0**-22 * factor * (q.abs().double() * _per_head(k.abs().amax(2, keepdim=True), call.group)).sum(-1, keepdim=True)
    if recipe.smooth_key:
        k = quantization.center_channels(k)
    if recipe.balance:
        q, k = quantization.balance_channels(q, k)
    if recipe.rotate:
        q, k = quantization.hadamard_transform(q), quantization.hadamard_transform(k)
        factor = factor * q.shape[-1]
    q_scale, k_scale = (
        quantization.scale_from_amplitude(quantization.amplitude(x, granularity))
        for x, granularity in ((q, recipe.query_granularity), (k, recipe.key_granularity))
    )
    q, q_scale, k, k_scale = q.double(), q_scale.double(), _per_head(k, call.group), _per_head(k_scale, call.group)
    q_sum, k_sum = q.abs().sum(-1, keepdim=True), k.abs().sum(-1)[:, :, None]
    half_q, half_k = q_scale / 2, k_scale.mT / 2
    error = error + factor * (k_sum * half_q + q_sum * half_k + q.shape[-1] * half_q * half_k) * 1.001
    error = error + 2.0**-20 * factor * q_sum * k.abs().amax(dim=(2, 3), keepdim=True)
    v_scale, offset = (_per_head(x, call.group) for x in _value_scale(value, recipe.value_granularity, recipe.smooth_value))
    seen, bias = _masks(call, mask)
    attention = _Attention(
        q, k, _per_head(value, call.group) - offset, q_scale, k_scale, v_scale, error,
        0.51 * v_scale + 2.0**-22 * offset.abs(), exact - offset, seen, bias, factor, recipe,
    )  # fmt: skip
    return exact, _round(attention.bound(), exact, call.dtype)


def error_of_integers(
    call: IntegerCall, tensors: tuple[qflash.QuantizedTensor, ...], mask: torch.Tensor | None, out: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return exact attention on what int8 tensors stand for, and how far float outputs ``out`` may be from it; float64.

    Biases have to be floats, small beside 1024 nats, or minus infinity.
    """
    one, group = call.call, call.call.group
    scales = [x.scale.view((1,) * (4 - x.scale.dim()) + x.scale.shape) for x in tensors]
    q, k, v = (_per_head(x.values, n) * _per_head(s, n) for x, s, n in zip(tensors, scales, (1, group, group), strict=True))
    exact = exact_attention(q, k, v, mask, is_causal=one.mask == "causal", scale=one.factor)
    seen, bias = _masks(one, mask)
    none = torch.zeros((1,) * 4, dtype=torch.float64)
    attention = _Attention(
        q, k, v, scales[0].double(), _per_head(scales[1], group), _per_head(scales[2], group), none, none, exact, seen, bias,
        one.factor, one.recipe,
    )  # fmt: skip
    if tensors[2].offset is not None:
        exact = torch.where(seen.any(dim=-1, keepdim=True), exact + _per_head(tensors[2].offset, group), 0.0)
    return exact, _round(attention.bound(), exact, out.dtype)


def _round(bound: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Add what rounding to the output's type can do."""
    wider = bound * (1 + _OUTPUT[dtype]) + _OUTPUT[dtype] * exact.abs()
    return wider + 2.0**-24 if dtype == torch.float16 else wider
