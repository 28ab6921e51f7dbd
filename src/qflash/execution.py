"""What the operators do: find the back end, have it run, and keep what can be repeated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import plan_cache
from .backends import find_backend
from .specification.attention_call import AttentionCall, float_call, int8_call
from .specification.recipe import Recipe


def quantize(x: torch.Tensor, granularity: str, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a tensor of any rank, finding its scales. Returns ``(values, scale)``."""
    return find_backend(backend, x.device).quantize(x, granularity)


def quantize_centered(x: torch.Tensor, granularity: str, backend: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantise a tensor of any rank with a zero point per channel: ``(values, scale, offset)``."""
    return find_backend(backend, x.device).quantize_centered(x, granularity)


def quantize_with_scale(x: torch.Tensor, scale: torch.Tensor, backend: str, center: torch.Tensor | None = None) -> torch.Tensor:
    """Quantise a tensor of any rank with given scales; see :meth:`.reference_backend.Backend.quantize_with_scale`."""
    return find_backend(backend, x.device).quantize_with_scale(x, scale, center)


def quantize_bias(bias: torch.Tensor, backend: str = "auto") -> torch.Tensor:
    """Turn an additive float mask of any rank into fixed point, contiguous; see :func:`qflash.quantize_bias`."""
    return find_backend(backend, bias.device).quantize_bias(bias)


def attend(call: AttentionCall, backend: str) -> torch.Tensor:
    """Attend, without looking for an earlier call."""
    return find_backend(backend, call.query.device).attend(call)


def kept(
    operator: Callable[..., torch.Tensor], tensors: plan_cache.Tensors, choices: tuple[Any, ...]
) -> Callable[..., torch.Tensor] | None:
    """Return what an earlier ``operator(*tensors, *choices)`` left for tensors like these, which it takes, of any rank.

    Args:
        operator: :func:`attention` or :func:`int8_attention`.
    """
    return plan_cache.find(tensors, (operator, *choices))


def _repeatable(
    operator: Callable[..., torch.Tensor],
    tensors: plan_cache.Tensors,
    choices: tuple[Any, ...],
    make: Callable[..., AttentionCall],
) -> torch.Tensor:
    """Return what an operator returns, found again if there was such a call before.

    Args:
        operator: :func:`attention` or :func:`int8_attention`.
        choices: its arguments besides ``tensors``, of which the last is the back end.
        make: makes a call of the tensors.
    """
    run = kept(operator, tensors, choices)
    if run is not None:
        return run(*tensors)
    query = tensors[0]
    assert query is not None
    backend = find_backend(choices[-1], query.device)
    place = plan_cache.place_of(tensors)
    if place is None or plan_cache.is_unrepeatable(tensors, (operator, *choices)):
        return backend.attend(make(*tensors))
    out, prepare = backend.attend_repeatably(make, tensors, place)
    plan_cache.remember(tensors, (operator, *choices), tensors, out.shape, prepare)
    return out


def int8_attention(
    query: torch.Tensor,
    query_scale: torch.Tensor,
    key: torch.Tensor,
    key_scale: torch.Tensor,
    value: torch.Tensor,
    value_scale: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float,
    output_scale: torch.Tensor | None,
    out_dtype: torch.dtype,
    recipe: str,
    backend: str,
    value_offset: torch.Tensor | None = None,
) -> torch.Tensor:
    """Integer attention on canonical tensors; see :func:`qflash.specification.reference.int8_attention`."""

    def call(*tensors: torch.Tensor | None) -> AttentionCall:
        query, query_scale, key, key_scale, value, value_scale, mask, output_scale, value_offset = tensors
        assert query is not None and key is not None and value is not None
        assert key_scale is not None and value_scale is not None
        return int8_call(
            query, query_scale, key, key_scale, value, value_scale, mask, is_causal, scale, output_scale, out_dtype,
            Recipe.from_key(recipe), value_offset=value_offset,
        )  # fmt: skip

    return _repeatable(
        int8_attention,
        (query, query_scale, key, key_scale, value, value_scale, mask, output_scale, value_offset),
        (is_causal, scale, out_dtype, recipe, backend),
        call,
    )


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float,
    recipe: str,
    backend: str,
) -> torch.Tensor:
    """Quantise by the recipe, then attend in integers; the output has the query's dtype."""

    def call(*tensors: torch.Tensor | None) -> AttentionCall:
        query, key, value, mask = tensors
        assert query is not None and key is not None and value is not None
        return float_call(query, key, value, mask, is_causal, scale, Recipe.from_key(recipe))

    return _repeatable(attention, (query, key, value, mask), (is_causal, scale, recipe, backend), call)
