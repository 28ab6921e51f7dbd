"""What the operators do: quantise by the recipe, pick the back end, run, and keep what can be repeated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import plan_cache, quantization, reference
from .backends import resolve_backend
from .recipe import Recipe


def quantize(x: torch.Tensor, granularity: str, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a tensor of any rank, finding its scales. Returns ``(values, scale)``."""
    return _quantize(x, granularity, False, backend)


def _quantize(x: torch.Tensor, granularity: str, center: bool, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    resolved = resolve_backend(backend, x.device)
    if resolved != "reference":
        if resolved == "cpu":
            from .kernels.cpu.launch import launch_quantize
        else:
            from .kernels.triton.quantize import launch_quantize

        shape = x.shape
        four = x.reshape((1,) * (4 - x.dim()) + tuple(shape)) if x.dim() < 4 else x.flatten(0, -4)
        values, scale = launch_quantize(four, granularity, center)
        return values.reshape(shape), scale.reshape(quantization.scale_shape(shape, granularity))
    if center:
        x = quantization.center_channels(x)
    scale = quantization.scale_from_amplitude(quantization.amplitude(x, granularity))
    return quantization.quantize_values(x, scale), scale


def quantize_with_scale(x: torch.Tensor, scale: torch.Tensor, backend: str) -> torch.Tensor:
    """Quantise a tensor of any rank with given scales."""
    if resolve_backend(backend, x.device) == "triton":
        from .kernels.triton.quantize import launch_quantize_values

        shape = x.shape
        spread = scale.expand(shape)
        if x.dim() < 4:
            lead = (1,) * (4 - x.dim())
            return launch_quantize_values(x.reshape(lead + tuple(shape)), spread.reshape(lead + tuple(shape))).reshape(shape)
        return launch_quantize_values(x.flatten(0, -4), spread.flatten(0, -4)).reshape(shape)
    return quantization.quantize_values(x, scale)


def quantize_bias(bias: torch.Tensor, backend: str = "auto") -> torch.Tensor:
    """Turn an additive float mask of any rank into fixed point, contiguous; see :func:`qflash.quantize_bias`."""
    if resolve_backend(backend, bias.device) == "triton":
        from .kernels.triton.quantize import launch_quantize_bias

        four = bias.reshape((1,) * (4 - bias.dim()) + tuple(bias.shape)) if bias.dim() < 4 else bias.flatten(0, -4)
        return launch_quantize_bias(four).reshape(bias.shape)
    return quantization.bias_to_fixed(bias)


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
    whole_way: Callable[..., torch.Tensor],
    tensors: plan_cache.Tensors,
    choices: tuple[Any, ...],
    prepare_on_cpu: Callable[[torch.Tensor], Callable[..., torch.Tensor] | None],
) -> torch.Tensor:
    """Return ``whole_way(*tensors, *choices)``, found again if there was such a call before.

    Args:
        choices: of which the last is the back end.
        prepare_on_cpu: returns what repeats the call with the back end for CPUs, from its output.
    """
    run = kept(operator, tensors, choices)
    if run is not None:
        return run(*tensors)

    def go(*tensors: torch.Tensor | None) -> torch.Tensor:
        return whole_way(*tensors, *choices)

    place = plan_cache.place_of(tensors)
    if place is None or plan_cache.is_unrepeatable(tensors, (operator, *choices)):
        return go(*tensors)
    query = tensors[0]
    assert query is not None
    resolved = resolve_backend(choices[-1], query.device)
    if resolved == "triton" and place != plan_cache.CPU:
        from .kernels.launch_recorder import record

        out, prepare = record(go, tensors)
    else:
        out = go(*tensors)

        def prepare() -> Callable[..., torch.Tensor] | None:
            return prepare_on_cpu(out) if resolved == "cpu" else None

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
) -> torch.Tensor:
    """Integer attention on canonical tensors; see :func:`qflash.reference.int8_attention`."""
    tensors = query, query_scale, key, key_scale, value, value_scale, mask, output_scale

    def prepare_on_cpu(out: torch.Tensor) -> Callable[..., torch.Tensor] | None:
        from .kernels.cpu.launch import prepare_int8_attention

        return prepare_int8_attention(
            query, query_scale, key, key_scale, value, value_scale, mask, output_scale, is_causal, scale, out,
            Recipe.from_key(recipe),
        )  # fmt: skip

    return _repeatable(int8_attention, _int8_attention, tensors, (is_causal, scale, out_dtype, recipe, backend), prepare_on_cpu)


def _int8_attention(
    query: torch.Tensor,
    query_scale: torch.Tensor,
    key: torch.Tensor,
    key_scale: torch.Tensor,
    value: torch.Tensor,
    value_scale: torch.Tensor,
    mask: torch.Tensor | None,
    output_scale: torch.Tensor | None,
    is_causal: bool,
    scale: float,
    out_dtype: torch.dtype,
    recipe: str,
    backend: str,
    like: torch.Tensor | None = None,
) -> torch.Tensor:
    """Go the whole way. ``like`` is the query whose order the output has, if that is not the int8 one."""
    if mask is not None and mask.dtype.is_floating_point:
        mask = quantize_bias(mask, backend)
    arguments = (
        query, query_scale, key, key_scale, value, value_scale, mask, is_causal, scale, output_scale, out_dtype,
        Recipe.from_key(recipe),
    )  # fmt: skip
    resolved = resolve_backend(backend, query.device)
    if resolved != "reference":
        if resolved == "cpu":
            from .kernels.cpu.launch import launch_attention
        else:
            from .kernels.dispatch import launch_attention

        return launch_attention(*arguments, like=like)
    return reference.int8_attention(*arguments, like=like)


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

    def prepare_on_cpu(out: torch.Tensor) -> Callable[..., torch.Tensor] | None:
        from .kernels.cpu.launch import prepare_attention

        return prepare_attention(query, key, value, mask, is_causal, scale, out, Recipe.from_key(recipe))

    return _repeatable(attention, _attention, (query, key, value, mask), (is_causal, scale, recipe, backend), prepare_on_cpu)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float,
    recipe: str,
    backend: str,
) -> torch.Tensor:
    """Go the whole way."""
    choices = Recipe.from_key(recipe)
    dtype, like = query.dtype, query
    if resolve_backend(backend, query.device) == "triton":
        from .kernels.dispatch import fusable, launch_fused, launch_long
        from .kernels.tiles import is_short
        from .kernels.triton.quantize_streaming import quantizes_long

        if fusable(query, key, value, mask, is_causal, choices):
            return launch_fused(query, key, value, mask, is_causal, scale, choices)
        if quantizes_long(choices, query.shape[0]) and not is_short(choices, query.shape[3], value.shape[3], key.shape[2]):
            fixed = quantize_bias(mask, backend) if mask is not None and mask.is_floating_point() else mask
            return launch_long(query, key, value, fixed, is_causal, scale, choices)
    center = choices.smooth_key
    if choices.balance or choices.rotate:
        if center:
            key, center = quantization.center_channels(key), False
        if choices.balance:
            query, key = quantization.balance_channels(query, key)
        if choices.rotate:
            query, key = quantization.hadamard_transform(query), quantization.hadamard_transform(key)
            scale = scale * query.shape[-1]
    query_values, query_scale = _quantize(query, choices.query_granularity, False, backend)
    key_values, key_scale = _quantize(key, choices.key_granularity, center, backend)
    value_values, value_scale = _quantize(value, choices.value_granularity, False, backend)
    return _int8_attention(
        query_values, query_scale, key_values, key_scale, value_values, value_scale, mask, None, is_causal, scale, dtype,
        recipe, backend, like,
    )  # fmt: skip
