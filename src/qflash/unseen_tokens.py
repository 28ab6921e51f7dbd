"""Tokens that no query may see: they are replaced, so that their content cannot reach a scale or a mean.

A shared scale, a midrange or a mean is found over all tokens. A key that a mask hides from every query takes no part in the
softmax, but would take part in those. So a hidden token is replaced by a copy of one that is seen, key and value alike,
before anything is found; the mask still hides it. Copies leave ranges as they are, and they are shared out evenly, so that a
mean stays close to that of the seen tokens. Which tokens are hidden is told from the mask's values, whatever its shape and
strides.

Causal attention with more keys than queries leaves out the last keys instead.

This module does it in PyTorch. On a GPU :mod:`.kernels.triton.unseen_tokens` finds the places of tokens, without a look at them
on the host.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from .specification import fixed_point as fp
from .specification.attention_call import AttentionCall


def leaves_out_keys(call: AttentionCall) -> bool:
    """Tell whether keys lie behind the last query of a causal call."""
    return call.is_causal and call.mask is None and call.keys > call.queries


def searches(call: AttentionCall) -> bool:
    """Tell whether a call's mask is searched for hidden tokens: whether they could reach a bit.

    Of int8 tensors only a scale a key, of which the largest is taken, and the mean of an exact row sum are found over tokens.
    """
    if call.mask is None or call.mask.shape[3] == 1 or 0 in (call.batch, call.heads, call.queries, call.keys):
        return False
    return call.scales is None or call.has_token_keys or call.exact_sum


def once(mask: torch.Tensor) -> torch.Tensor:
    """Return a mask whose batch elements, heads or rows lie in one place of memory with one of them, a view."""
    for dim in range(3):
        if mask.shape[dim] > 1 and mask.stride(dim) == 0:
            mask = mask.narrow(dim, 0, 1)
    return mask


def without_unseen(
    call: AttentionCall,
    quantize_bias: Callable[[torch.Tensor], torch.Tensor],
    shown: Callable[[torch.Tensor, int], torch.Tensor] | None = None,
) -> AttentionCall:
    """Return a call with the same result, whose hidden tokens are copies of seen ones.

    Args:
        call: int8 or float.
        quantize_bias: :func:`qflash.quantize_bias` of the back end, for a float mask.
        shown: :func:`shown_tokens` of the back end; this module's if None.
    """
    if leaves_out_keys(call):
        return first_keys(call)
    if not searches(call):
        return call
    seen = seen_tokens(call, quantize_bias, shown)
    # nothing waits for a CPU
    if seen.device.type == "cpu" and bool(seen.all()):
        return call
    return taken(call, _places(seen, call))


def seen_tokens(
    call: AttentionCall,
    quantize_bias: Callable[[torch.Tensor], torch.Tensor],
    shown: Callable[[torch.Tensor, int], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Return which tokens a query sees, bool, (period, heads of key | 1, keys), of a call that :func:`searches`."""
    assert call.mask is not None
    mask = once(call.mask)
    return (shown or shown_tokens)(quantize_bias(mask) if mask.dtype.is_floating_point else mask, call.key.shape[1])


def shown_tokens(mask: torch.Tensor, key_heads: int) -> torch.Tensor:
    """Return which tokens any row of a mask shows to a head of key, bool, (period, heads of key | 1, keys).

    Args:
        mask: bool or in fixed point, (period, heads | 1, queries, keys).
        key_heads: each of which belongs to a group of the mask's heads, if it has several.
    """
    # a bias at its lower limit gives a weight of 0
    seen = mask.any(dim=2) if mask.dtype == torch.bool else mask.amax(dim=2) > -fp.BIAS_LIMIT
    if seen.shape[1] not in (1, key_heads):
        seen = seen.unflatten(1, (key_heads, -1)).any(dim=2)
    return seen


def _places(seen: torch.Tensor, call: AttentionCall) -> torch.Tensor:
    """Return for each token the token to take, int64, of the shape of ``seen``. Where a head sees nothing its tokens stay."""
    seen = seen | ~seen.any(dim=-1, keepdim=True)
    token = torch.arange(call.keys, dtype=torch.int64, device=seen.device)
    # the seen ones first, in their order
    first = torch.argsort(seen, dim=-1, descending=True, stable=True)
    return torch.where(seen, token, first.gather(-1, token % seen.sum(dim=-1, keepdim=True)))


def taken(call: AttentionCall, place: torch.Tensor) -> AttentionCall:
    """Return the call with tokens of key and value, and scales of tokens, taken from their places.

    Args:
        place: (period, heads of key | 1, keys), int64.
    """
    if 1 < place.shape[0] < call.batch:
        place = place.repeat(call.batch // place.shape[0], 1, 1)
    place = place.expand(call.key.shape[:3])

    def take(x: torch.Tensor) -> torch.Tensor:
        return x.gather(2, place[..., None].expand(*place.shape, x.shape[3]))

    scales = call.scales
    if scales is not None and scales.key.shape[2] > 1:
        scales = scales._replace(key=take(scales.key.expand(*call.key.shape[:3], 1)))
    return dataclasses.replace(call, key=take(call.key), value=take(call.value), scales=scales)


def first_keys(call: AttentionCall) -> AttentionCall:
    """Return a causal call without the keys behind its last query: views, so that it can be repeated."""
    count, scales = call.queries, call.scales
    if scales is not None and scales.key.shape[2] > 1:
        scales = scales._replace(key=scales.key[:, :, :count])
    return dataclasses.replace(call, key=call.key[:, :, :count], value=call.value[:, :, :count], scales=scales)
