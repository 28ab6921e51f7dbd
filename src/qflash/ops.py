"""The operators PyTorch sees (``torch.ops.qflash``): implementations, fakes, and what backward says.

Operators take canonical arguments, which :mod:`qflash.api` prepares: four dimensions ``(batch, heads, tokens,
channels)``, masks of shape ``(period, heads | 1, queries | 1, keys | 1)`` that repeat over the batch, a recipe
as its key, a resolved back end. What a call found out is kept for the next one (:mod:`qflash.launch`), which a compiled model
makes here and not by way of :mod:`qflash.api`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import fixed_point as fp
from . import launch, quantization, reference
from .backends import resolve_backend
from .layout import empty_output
from .recipe import Recipe

_LIBRARY = torch.library.Library("qflash", "DEF")
_LIBRARY.define("quantize(Tensor x, str granularity, str backend) -> (Tensor, Tensor)")
_LIBRARY.define("quantize_with_scale(Tensor x, Tensor scale, str backend) -> Tensor")
_LIBRARY.define("quantize_bias(Tensor bias) -> Tensor")
_LIBRARY.define(
    "int8_attention(Tensor query, Tensor query_scale, Tensor key, Tensor key_scale, Tensor value, Tensor value_scale, "
    "Tensor? mask, bool is_causal, float scale, Tensor? output_scale, ScalarType out_dtype, str recipe, str backend) -> Tensor"
)
_LIBRARY.define(
    "attention(Tensor query, Tensor key, Tensor value, Tensor? mask, bool is_causal, float scale, str recipe, "
    "str backend) -> Tensor"
)


def quantize(x: torch.Tensor, granularity: str, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a tensor of any rank, finding its scales. Returns ``(values, scale)``."""
    return _quantize(x, granularity, False, backend)


def _quantize(x: torch.Tensor, granularity: str, center: bool, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    resolved = resolve_backend(backend, x.device)
    if resolved != "reference":
        if resolved == "cpu":
            from .kernels.cpu import launch_quantize
        else:
            from .kernels.quantize import launch_quantize

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
        from .kernels.quantize import launch_quantize_values

        shape = x.shape
        spread = scale.expand(shape)
        if x.dim() < 4:
            lead = (1,) * (4 - x.dim())
            return launch_quantize_values(x.reshape(lead + tuple(shape)), spread.reshape(lead + tuple(shape))).reshape(shape)
        return launch_quantize_values(x.flatten(0, -4), spread.flatten(0, -4)).reshape(shape)
    return quantization.quantize_values(x, scale)


def quantize_bias(bias: torch.Tensor) -> torch.Tensor:
    """Turn an additive float mask into fixed point: int32, 1/65536 octaves (``bias * log2(e) * 2**16``).

    Minus infinity becomes the mark of a key that takes no part; NaN and plus infinity become the mark that
    turns a row into NaN; finite values beyond 4096 octaves (2839 nats) are clamped there.
    """
    wide = bias.to(torch.float32)
    scaled = (wide * (math.log2(math.e) * 2**fp.BIAS_FRACTION_BITS)).clamp(-fp.BIAS_LIMIT, fp.BIAS_LIMIT)
    fixed = scaled.nan_to_num(0.0).round().to(torch.int32)
    fixed = torch.where(wide == -math.inf, fp.BIAS_MASKED, fixed)
    return torch.where((wide != wide) | (wide == math.inf), fp.BIAS_POISON, fixed)


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
    options = "int8 operator", is_causal, scale, out_dtype, recipe, backend
    plan = launch.find(tensors, options)
    if plan is not None:
        return plan.run(*tensors)
    out = _int8_attention(
        query, query_scale, key, key_scale, value, value_scale, mask, is_causal, scale, output_scale, out_dtype, recipe, backend
    )

    def prepare() -> Callable[..., torch.Tensor] | None:
        at = 5 if output_scale is None else 7
        return prepare_int8_attention(tensors, is_causal, scale, Recipe.from_key(recipe), backend, out, out.shape, at)

    launch.remember(tensors, options, tensors, out.shape, prepare)
    return out


def _int8_attention(
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
    like: torch.Tensor | None = None,
) -> torch.Tensor:
    """Go the whole way. ``like`` is the query whose order the output has, if that is not the int8 one."""
    if mask is not None and mask.dtype.is_floating_point:
        mask = quantize_bias(mask)
    arguments = (
        query, query_scale, key, key_scale, value, value_scale, mask, is_causal, scale, output_scale, out_dtype,
        Recipe.from_key(recipe),
    )  # fmt: skip
    resolved = resolve_backend(backend, query.device)
    if resolved != "reference":
        if resolved == "cpu":
            from .kernels.cpu import launch_attention
        else:
            from .kernels.attention import launch_attention

        return launch_attention(*arguments, like=like)
    return reference.int8_attention(*arguments, like=like)


def prepare_int8_attention(
    tensors: Sequence[torch.Tensor | None],
    is_causal: bool,
    scale: float,
    recipe: Recipe,
    backend: str,
    out: torch.Tensor,
    shape: tuple[int, ...],
    output_scale_at: int | None,
) -> Callable[..., torch.Tensor] | None:
    """Return what repeats :func:`int8_attention` on tensors of the same shapes and strides, or None where it is not worth it.

    Args:
        tensors: query, its scale, key, its scale, value, its scale, mask and output scale; such tensors it takes.
        out: what the call returned; new outputs are like it.
        shape: of the output, as the caller wants it.
        output_scale_at: which of the tensors is the output scale, or takes its place where there is none; None: always the
            one there is now.
    """
    query, query_scale, key, key_scale, value, value_scale, mask, output_scale = tensors
    assert query is not None and key is not None and value is not None
    assert query_scale is not None and key_scale is not None and value_scale is not None
    resolved = resolve_backend(backend, query.device)
    # a float mask is converted by launches of its own
    if resolved == "reference" or (mask is not None and mask.dtype.is_floating_point):
        return None
    arguments = (query, query_scale, key, key_scale, value, value_scale, mask, is_causal, scale, output_scale)
    places = {"q": 0, "qs": 1, "k": 2, "ks": 3, "v": 4, "vs": 5} | ({} if mask is None else {"mask": 6})
    if output_scale_at is not None:
        places["os"] = output_scale_at
    if resolved == "cpu":
        from .kernels import cpu

        # there every call looks at the values of an output scale of its own
        return None if output_scale_at == 7 else cpu.prepare_int8_attention(*arguments, out, recipe, shape, places)
    from .kernels.attention import attention_calls
    from .kernels.tiles import fits_hopper, is_short

    widths, keys = (query.shape[3], value.shape[3]), key.shape[2]
    if not query.is_cuda or not (is_short(recipe, *widths, keys) or fits_hopper(recipe, *widths, query.shape[2], keys)):
        return None
    calls = attention_calls(*arguments, torch.empty_like(out), recipe)
    return calls[0].prepare(out.view(shape), places) if len(calls) == 1 else None


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
    tensors, options = (query, key, value, mask), ("operator", is_causal, scale, recipe, backend)
    plan = launch.find(tensors, options)
    if plan is not None:
        return plan.run(*tensors)
    out = _attention(query, key, value, mask, is_causal, scale, recipe, backend)

    def prepare() -> Callable[..., torch.Tensor] | None:
        return prepare_attention(query, key, value, mask, is_causal, scale, Recipe.from_key(recipe), backend, out, out.shape)

    launch.remember(tensors, options, tensors, out.shape, prepare)
    return out


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
        from .kernels.attention import fusable, launch_fused, launch_long
        from .kernels.long_quantize import quantizes_long
        from .kernels.tiles import is_short

        if fusable(query, key, value, mask, is_causal, choices):
            return launch_fused(query, key, value, mask, is_causal, scale, choices)
        if quantizes_long(choices, query.shape[0]) and not is_short(choices, query.shape[3], value.shape[3], key.shape[2]):
            fixed = quantize_bias(mask) if mask is not None and mask.is_floating_point() else mask
            return launch_long(query, key, value, fixed, is_causal, scale, choices)
    center = choices.smooth_key
    if choices.balance or choices.rotate:
        if center:
            key, center = quantization.center_channels(key), False
        if choices.balance:
            query, key = quantization.balance_channels(query, key)
        if choices.rotate:
            query, key = quantization.hadamard_transform(query), quantization.hadamard_transform(key)
            scale = scale / query.shape[-1]
    query_values, query_scale = _quantize(query, choices.query_granularity, False, backend)
    key_values, key_scale = _quantize(key, choices.key_granularity, center, backend)
    value_values, value_scale = _quantize(value, choices.value_granularity, False, backend)
    return _int8_attention(
        query_values, query_scale, key_values, key_scale, value_values, value_scale, mask, is_causal, scale, None, dtype,
        recipe, backend, like,
    )  # fmt: skip


def prepare_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float,
    recipe: Recipe,
    backend: str,
    out: torch.Tensor,
    shape: tuple[int, ...],
) -> Callable[..., torch.Tensor] | None:
    """Return what repeats :func:`attention` on query, key, value and mask of the same shapes and strides.

    None where it is not worth it. ``out`` and ``shape`` are as for :func:`prepare_int8_attention`.
    """
    resolved = resolve_backend(backend, query.device)
    if resolved == "cpu":
        from .kernels import cpu

        return cpu.prepare_attention(query, key, value, mask, is_causal, scale, out, recipe, shape)
    if resolved != "triton" or not query.is_cuda:
        return None
    from .kernels.attention import fusable, fused_calls

    if not fusable(query, key, value, mask, is_causal, recipe):
        return None
    calls = fused_calls(query, key, value, mask, is_causal, scale, torch.empty_like(out), recipe)
    places = {"q": 0, "k": 1, "v": 2} | ({} if mask is None else {"mask": 3})
    return calls[0].prepare(out.view(shape), places) if len(calls) == 1 else None


def _fake_quantize(x: torch.Tensor, granularity: str, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    shape = quantization.scale_shape(x.shape, granularity)
    return x.new_empty(x.shape, dtype=torch.int8), x.new_empty(shape, dtype=torch.float32)


def _fake_quantize_with_scale(x: torch.Tensor, scale: torch.Tensor, backend: str) -> torch.Tensor:
    return x.new_empty(x.shape, dtype=torch.int8)


def _fake_quantize_bias(bias: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(bias, dtype=torch.int32)


def _fake_int8_attention(query: torch.Tensor, *arguments: Any) -> torch.Tensor:
    value, out_dtype = arguments[3], arguments[9]
    return empty_output(query, value.shape[3], out_dtype)


def _fake_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
    return empty_output(query, value.shape[3], query.dtype)


def _no_backward(ctx: Any, *grads: Any) -> None:
    raise NotImplementedError("QFlash is for inference: integer attention has no gradient")


for _name, _implementation, _fake in (
    ("quantize", quantize, _fake_quantize),
    ("quantize_with_scale", quantize_with_scale, _fake_quantize_with_scale),
    ("quantize_bias", quantize_bias, _fake_quantize_bias),
    ("int8_attention", int8_attention, _fake_int8_attention),
    ("attention", attention, _fake_attention),
):
    _LIBRARY.impl(_name, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"qflash::{_name}", _fake, lib=_LIBRARY)
for _name in ("quantize", "quantize_with_scale", "attention"):
    torch.library.register_autograd(f"qflash::{_name}", _no_backward, lib=_LIBRARY)
