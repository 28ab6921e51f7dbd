"""What the operators do: quantise by the recipe, pick the back end, run, and keep what can be repeated."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from . import plan_cache
from .backends import resolve_backend
from .specification import quantization, reference
from .specification.attention_call import AttentionCall, Scales, float_call, int8_call
from .specification.memory_format import as_four, is_expanded
from .specification.recipe import Recipe
from .unseen_tokens import leaves_out_keys, once, searches, seen_tokens, without_unseen


def quantize(x: torch.Tensor, granularity: str, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a tensor of any rank, finding its scales. Returns ``(values, scale)``."""
    return find_scales(x, granularity, False, backend)


def find_scales(x: torch.Tensor, granularity: str, center: bool, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`quantize`, with every channel's midrange subtracted first if ``center``; of expanded batches once for all."""
    if is_expanded(x):
        values, scale = find_scales(x[:1], granularity, center, backend)
        return values.expand(x.shape), scale if granularity == "tensor" else scale.expand(x.shape[0], *scale.shape[1:])
    resolved = resolve_backend(backend, x.device)
    if resolved != "reference":
        if resolved == "cpu":
            from .kernels.cpu.launch import launch_quantize
        else:
            from .kernels.triton.quantize import launch_quantize

        values, scale = launch_quantize(as_four(x), granularity, center)
        return values.reshape(x.shape), scale.reshape(quantization.scale_shape(x.shape, granularity))
    if center:
        x = quantization.center_channels(x)
    scale = quantization.scale_from_amplitude(quantization.amplitude(x, granularity))
    return quantization.quantize_values(x, scale), scale


def quantize_centered(x: torch.Tensor, granularity: str, backend: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantise a tensor of any rank with a zero point per channel: ``(values, scale, offset)``."""
    resolved = resolve_backend(backend, x.device)
    if resolved == "reference":
        return quantization.quantize_centered(x, granularity)
    if resolved == "cpu":
        from .kernels.cpu.launch import launch_quantize_centered
    else:
        from .kernels.triton.quantize import launch_quantize_centered

    values, scale, offset = launch_quantize_centered(as_four(x), granularity)
    shapes = x.shape, quantization.scale_shape(x.shape, granularity), quantization.scale_shape(x.shape, "channel")
    return values.reshape(shapes[0]), scale.reshape(shapes[1]), offset.reshape(shapes[2])


def quantize_with_scale(x: torch.Tensor, scale: torch.Tensor, backend: str, center: torch.Tensor | None = None) -> torch.Tensor:
    """Quantise a tensor of any rank with given scales.

    Args:
        x: float (..., tokens, channels).
        scale: float32, broadcastable to x.
        backend: see :func:`qflash.attention`.
        center: float32, broadcastable to x and the same for all tokens; subtracted first, in float32. None for nothing.
    """
    resolved = resolve_backend(backend, x.device)
    if resolved == "triton":
        from .kernels.triton.quantize import launch_quantize_values

        middle = None if center is None else as_four(center.expand(*x.shape[:-2], 1, x.shape[-1]))
        return launch_quantize_values(as_four(x), as_four(scale.expand(x.shape)), middle).reshape(x.shape)
    if resolved == "cpu":
        from .kernels.cpu import launch

        given = [each if each is None or each.dim() > 3 else as_four(each) for each in (scale, center)]
        # of whole heads or channels; a scale for each token has no kernel
        if all(each is None or (each.dim() == 4 and each.shape[0] == each.shape[2] == 1) for each in given):
            return launch.launch_quantize_values(as_four(x), given[0], given[1]).reshape(x.shape)  # type: ignore[arg-type]
    return quantization.quantize_values(x if center is None else x.to(torch.float32) - center, scale)


def quantize_bias(bias: torch.Tensor, backend: str = "auto") -> torch.Tensor:
    """Turn an additive float mask of any rank into fixed point, contiguous; see :func:`qflash.quantize_bias`."""
    resolved = resolve_backend(backend, bias.device)
    if resolved == "reference":
        return quantization.bias_to_fixed(bias)
    if resolved == "cpu":
        from .kernels.cpu.launch import launch_quantize_bias
    else:
        from .kernels.triton.quantize import launch_quantize_bias

    return launch_quantize_bias(as_four(bias)).reshape(bias.shape)


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
    call: Callable[..., AttentionCall],
) -> torch.Tensor:
    """Return what an operator returns, found again if there was such a call before.

    Args:
        operator: :func:`attention` or :func:`int8_attention`.
        choices: its arguments besides ``tensors``, of which the last is the back end.
        call: makes a call of the tensors.
    """
    run = kept(operator, tensors, choices)
    if run is not None:
        return run(*tensors)
    backend = choices[-1]

    def go(*tensors: torch.Tensor | None) -> torch.Tensor:
        return attend(call(*tensors), backend)

    place = plan_cache.place_of(tensors)
    if place is None or plan_cache.is_unrepeatable(tensors, (operator, *choices)):
        return go(*tensors)
    query = tensors[0]
    assert query is not None
    resolved = resolve_backend(backend, query.device)
    if resolved == "triton" and place != plan_cache.CPU:
        from .kernels.launch_recorder import record

        out, prepare = record(go, tensors)
    else:
        out = go(*tensors)

        def prepare() -> Callable[..., torch.Tensor] | None:
            made = call(*tensors)
            # keys that are left out are other addresses' views
            if resolved != "cpu" or leaves_out_keys(made):
                return None
            from .kernels.cpu.launch import launch_seen, prepare_attention

            plan = prepare_attention(made, out)
            if plan is None or not searches(made):
                return plan
            layouts = [None if x is None else (x.shape, x.stride()) for x in tensors]

            def run(*given: torch.Tensor | None) -> torch.Tensor:
                views = [x if x is None or y is None else x.as_strided(*y) for x, y in zip(given, layouts, strict=True)]
                # hidden tokens are replaced in every call anew
                seen = seen_tokens(call(*views), lambda bias: quantize_bias(bias, backend), launch_seen)
                return plan(*given) if bool(seen.all()) else go(*views)

            return run

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


def attend(call: AttentionCall, backend: str) -> torch.Tensor:
    """Go the whole way: quantise float tensors by the recipe, turn a float bias into fixed point, run the back end."""
    if call.mask is not None:
        call = dataclasses.replace(call, mask=once(call.mask))
    resolved = resolve_backend(backend, call.query.device)
    if searches(call) and resolved == "triton":
        call = _without_unseen_on_gpu(call, backend)
    else:
        shown: Callable[[torch.Tensor, int], torch.Tensor] | None = None
        if resolved == "cpu":
            from .kernels.cpu.launch import launch_seen

            shown = launch_seen
        if searches(call) and call.mask is not None and call.mask.is_floating_point():
            # once for both the search and attention
            call = dataclasses.replace(call, mask=quantize_bias(call.mask, backend))
        call = without_unseen(call, lambda bias: quantize_bias(bias, backend), shown)
    return _attend_floats(call, backend) if call.scales is None else _attend_int8(call, backend)


def _without_unseen_on_gpu(call: AttentionCall, backend: str) -> AttentionCall:
    """Do what :func:`.unseen_tokens.without_unseen` does by launches that can be made again, and without waiting for a GPU."""
    from .kernels.dispatch import can_quantize_apart, is_one_launch
    from .kernels.triton.unseen_tokens import launch_places, take

    whole = is_one_launch(call)
    if call.mask is not None and call.mask.is_floating_point() and not whole:
        call = dataclasses.replace(call, mask=quantize_bias(call.mask, backend))
    places = launch_places(call)
    if whole or (call.scales is None and can_quantize_apart(call)):
        return dataclasses.replace(call, places=places)
    return take(call, places)


def _attend_int8(call: AttentionCall, backend: str) -> torch.Tensor:
    if call.mask is not None and call.mask.dtype.is_floating_point:
        call = dataclasses.replace(call, mask=quantize_bias(call.mask, backend))
    resolved = resolve_backend(backend, call.query.device)
    if resolved == "reference":
        return reference.int8_attention(call)
    if resolved == "cpu":
        from .kernels.cpu.launch import launch_attention
    else:
        from .kernels.dispatch import launch_attention

    return launch_attention(call)


def _attend_floats(call: AttentionCall, backend: str) -> torch.Tensor:
    query, key, value, mask, recipe, scale = call.query, call.key, call.value, call.mask, call.recipe, call.softmax_scale
    if resolve_backend(backend, query.device) == "triton":
        from .kernels.dispatch import can_quantize_apart, is_one_launch, launch_fused, launch_long

        if is_one_launch(call):
            return launch_fused(call)
        if can_quantize_apart(call):
            fixed = quantize_bias(mask, backend) if mask is not None and mask.is_floating_point() else mask
            return launch_long(dataclasses.replace(call, mask=fixed))
    center = recipe.smooth_key
    if recipe.balance or recipe.rotate:
        if center:
            key, center = quantization.center_channels(key), False
        if recipe.balance:
            query, key = quantization.balance_channels(query, key)
        if recipe.rotate:
            query, key = quantization.hadamard_transform(query), quantization.hadamard_transform(key)
            scale = scale * query.shape[-1]
    query_values, query_scale = find_scales(query, recipe.query_granularity, False, backend)
    key_values, key_scale = find_scales(key, recipe.key_granularity, center, backend)
    value_offset = None
    if recipe.smooth_value:
        once = value[:1] if is_expanded(value) else value
        value_values, value_scale, value_offset = quantize_centered(once, recipe.value_granularity, backend)
        value_values = value_values.expand(value.shape)
    else:
        value_values, value_scale = find_scales(value, recipe.value_granularity, False, backend)
    quantised = dataclasses.replace(
        call,
        query=query_values,
        key=key_values,
        value=value_values,
        scales=Scales(query_scale, key_scale, value_scale, None, value_offset),
        softmax_scale=scale,
        like=call.query,
    )
    return _attend_int8(quantised, backend)
