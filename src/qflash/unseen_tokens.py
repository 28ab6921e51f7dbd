"""Tokens that no query may see: they are replaced, so that their content cannot reach a scale or a mean.

A shared scale, a midrange or a mean is found over all tokens. A key that a mask hides from every query takes no part in the
softmax, but would take part in those. So, where that can be told from the mask's shape, a hidden token is replaced by a copy of
one that is seen, key and value alike, before anything is found; the mask still hides it. Copies leave ranges as they are, and
they are shared out evenly, so that a mean stays close to that of the seen tokens.

This is done for masks that are the same for all queries (one row, in any broadcast form), and for causal attention with
more keys than queries, whose last keys are left out. Masks that differ between queries are not searched: that would take
longer than many of the calls they belong to. What all their rows hide still counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from . import fixed_point as fp
from .attention_call import AttentionCall


def may_hide(call: AttentionCall) -> bool:
    """Tell whether a call is of a kind whose hidden tokens are replaced."""
    mask = call.mask
    if mask is None:
        return call.is_causal and call.keys > call.queries
    return mask.shape[3] > 1 and (mask.shape[2] == 1 or mask.stride(2) == 0)


def without_unseen(call: AttentionCall, quantize_bias: Callable[[torch.Tensor], torch.Tensor]) -> AttentionCall:
    """Return a call with the same result, whose hidden tokens are copies of seen ones.

    Args:
        call: int8 or float.
        quantize_bias: :func:`qflash.quantize_bias` of the back end.
    """
    if not may_hide(call):
        return call
    if call.mask is None:
        return _first_keys(call, call.queries)
    row = call.mask[:, :, :1]
    if row.dtype.is_floating_point:
        row = quantize_bias(row)
    # a bias at its lower limit gives a weight of 0
    seen = row[:, :, 0] if row.dtype == torch.bool else row[:, :, 0] > -fp.BIAS_LIMIT
    return _taken(call, _places(seen, call))


def _places(seen: torch.Tensor, call: AttentionCall) -> torch.Tensor:
    """Return for each token of each head of key the token to take, (batch, heads, keys), int64.

    Args:
        seen: bool, (period, heads of query | 1, keys). Where a row sees nothing its tokens stay.
    """
    heads = call.key.shape[1]
    if seen.shape[1] not in (1, heads):
        # a head of key is seen by a group of query's heads
        seen = seen.unflatten(1, (heads, -1)).any(dim=2)
    seen = seen | ~seen.any(dim=-1, keepdim=True)
    token = torch.arange(call.keys, dtype=torch.int64, device=seen.device)
    # the seen ones first, in their order
    first = torch.argsort(seen, dim=-1, descending=True, stable=True)
    place = first.gather(-1, token % seen.sum(dim=-1, keepdim=True))
    place = torch.where(seen, token, place)
    if 1 < place.shape[0] < call.batch:
        place = place.repeat(call.batch // place.shape[0], 1, 1)
    return place.expand(call.batch, heads, call.keys)


def _taken(call: AttentionCall, place: torch.Tensor) -> AttentionCall:
    """Return the call with tokens of key and value taken from their places."""

    def take(x: torch.Tensor) -> torch.Tensor:
        return x.gather(2, place[..., None].expand(*place.shape, x.shape[3]))

    scales = call.scales
    if scales is not None and scales.key.shape[2] > 1:
        scales = scales._replace(key=take(scales.key.expand(*call.key.shape[:3], 1)))
    return dataclasses.replace(call, key=take(call.key), value=take(call.value), scales=scales)


def _first_keys(call: AttentionCall, count: int) -> AttentionCall:
    """Return the call with the first keys only: views, so that it can be repeated."""
    scales = call.scales
    if scales is not None and scales.key.shape[2] > 1:
        scales = scales._replace(key=scales.key[:, :, :count])
    return dataclasses.replace(call, key=call.key[:, :, :count], value=call.value[:, :, :count], scales=scales)
