"""What quantisation has to find over the tokens of each of several packed sequences, in PyTorch and without their lengths.

For the C kernels, and on a GPU for recipes that :mod:`.kernels.triton.quantize_streaming` does not know.

The bits are those of :mod:`.quantization` on each sequence alone: minima and maxima do not depend on an order, and all else
is elementwise. Nothing waits for a GPU: which sequence a token belongs to is found on its device.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import torch

from .specification import quantization
from .specification.attention_call import Scales, VarlenCall
from .specification.fixed_point import times_power_of_two


class Ranges(NamedTuple):
    """Minima and maxima of every sequence's channels, (sequences, heads, channels), float32; 0 where there is no token.

    A channel with a NaN has an infinite range.
    """

    low: torch.Tensor
    high: torch.Tensor

    @property
    def amplitude(self) -> torch.Tensor:
        """The largest magnitudes, as :func:`.quantization.amplitude` finds them of channels."""
        return torch.maximum(self.low.abs(), self.high.abs())


class _Segments:
    """Tokens of packed sequences.

    Attributes:
        index: (tokens,), int64: the sequence of each; one more than there are for tokens that belong to none, or are hidden.
        count: sequences.
    """

    def __init__(self, cumulative: torch.Tensor, tokens: int, most: torch.Tensor | None = None) -> None:
        """Find the sequence of each token; of each sequence those past the first ``most`` are hidden."""
        self.count = cumulative.shape[0] - 1
        place = torch.arange(tokens, device=cumulative.device, dtype=cumulative.dtype)
        self.index = torch.searchsorted(cumulative[1:].contiguous(), place, right=True)
        if most is not None and self.count:
            known = self.index.clamp(max=self.count - 1)
            hidden = place - cumulative[:-1][known] >= most[known]
            self.index = torch.where(hidden, self.count, self.index)

    def ranges(self, x: torch.Tensor) -> Ranges:
        """Return the ranges of the channels of (tokens, heads, channels)."""
        x = x.to(torch.float32)
        shape, at = (self.count + 1, *x.shape[1:]), self.index[:, None, None].expand_as(x)
        nan = x.isnan()
        low = x.new_full(shape, math.inf).scatter_reduce_(0, at, torch.where(nan, -math.inf, x), "amin")
        high = x.new_full(shape, -math.inf).scatter_reduce_(0, at, torch.where(nan, math.inf, x), "amax")
        empty = low > high
        return Ranges(torch.where(empty, 0.0, low)[:-1], torch.where(empty, 0.0, high)[:-1])

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """Return for each token what its sequence has; of those without one the last sequence's."""
        return x[self.index.clamp(max=self.count - 1)]

    def sums(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sums of each sequence's tokens, int32."""
        zeros = x.new_zeros((self.count + 1, *x.shape[1:]), dtype=torch.int32)
        return zeros.index_add_(0, self.index, x.to(torch.int32))[:-1]


def _of_queries_and_keys(call: VarlenCall) -> tuple[_Segments, _Segments]:
    lengths = call.lengths
    queries = _Segments(lengths.queries, call.query.shape[0])
    # keys that no query sees do not exist: unseen_tokens
    keys = _Segments(lengths.keys, call.key.shape[0], lengths.queries.diff() if call.is_causal else None)
    return queries, keys


def prepare(call: VarlenCall) -> VarlenCall:
    """Balance and rotate query and key, and centre the key before, where the recipe asks for it."""
    recipe, query, key, scale = call.recipe, call.query, call.key, call.softmax_scale
    if not (recipe.balance or recipe.rotate) or key.shape[0] == 0:
        return call
    queries, keys = _of_queries_and_keys(call)
    if recipe.smooth_key:
        ranges = keys.ranges(key)
        key = key.to(torch.float32) - keys.of(ranges.low * 0.5 + ranges.high * 0.5)
    if recipe.balance:
        above, below = queries.ranges(query).amplitude, keys.ranges(key).amplitude
        exponent = quantization.balance_exponents(above.unflatten(1, (key.shape[1], -1)).amax(dim=2), below)
        per_query = exponent.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        query = times_power_of_two(query.to(torch.float32), -queries.of(per_query))
        key = times_power_of_two(key.to(torch.float32), keys.of(exponent))
    if recipe.rotate:
        query, key = quantization.hadamard_transform(query), quantization.hadamard_transform(key)
        scale = scale * query.shape[-1]
    done = recipe.replace(smooth_key=False, balance=False, rotate=False)
    return dataclasses.replace(call, query=query, key=key, softmax_scale=scale, recipe=done)


def _reduced(amplitude: torch.Tensor, granularity: str) -> torch.Tensor:
    """Return what shares a scale of (sequences, heads, channels)."""
    if granularity == "channel":
        return amplitude
    return amplitude.amax(dim=(1, 2) if granularity == "tensor" else 2, keepdim=True)


def _quantized(x: torch.Tensor, tokens: _Segments, granularity: str, center: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8 values and scales, for each token or each sequence."""
    if granularity == "token" and not center:
        scale = quantization.scale_from_amplitude(quantization.amplitude(x, "token"))
        return quantization.quantize_values(x, scale), scale
    ranges = tokens.ranges(x)
    if center:
        middle = ranges.low * 0.5 + ranges.high * 0.5
        x = x.to(torch.float32) - tokens.of(middle)
        ranges = Ranges(ranges.low - middle, ranges.high - middle)
    if granularity == "token":
        return _quantized(x, tokens, granularity, False)
    scale = quantization.scale_from_amplitude(_reduced(ranges.amplitude, granularity))
    return quantization.quantize_values(x, tokens.of(scale)), scale


def quantize(call: VarlenCall) -> VarlenCall:
    """Return a prepared call with int8 tensors, their scales, and the sums of its values."""
    recipe = call.recipe
    queries, keys = _of_queries_and_keys(call)
    query, query_scale = _quantized(call.query, queries, recipe.query_granularity, False)
    key, key_scale = _quantized(call.key, keys, recipe.key_granularity, recipe.smooth_key)
    offset = None
    if recipe.smooth_value:
        middle, least = quantization.least_scale(*keys.ranges(call.value))
        value_scale = quantization.scale_from_least(_reduced(least, recipe.value_granularity))
        zero = quantization.zero_point(middle, value_scale)
        offset = zero.to(torch.float32) * value_scale
        value = quantization.centered_values(call.value, keys.of(value_scale.expand_as(zero)), keys.of(zero))
    else:
        value, value_scale = _quantized(call.value, keys, recipe.value_granularity, False)
    scales = Scales(query_scale, key_scale, value_scale, None, offset)
    return dataclasses.replace(call, query=query, key=key, value=value, scales=scales, value_sums=keys.sums(value)[:, :, None])
