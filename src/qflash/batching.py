"""What ``torch.vmap`` makes of the operators: one call with more batch elements, with the bits of the separate calls.

Where a scale is shared by a whole tensor, which is one call's, the calls are made one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .specification.recipe import Recipe

InDims = Sequence["int | None"]


def _front(x: torch.Tensor, dim: int | None, size: int) -> torch.Tensor:
    """Return a tensor with the mapped dimension first; one that has none, expanded."""
    return x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)


def _flat(x: torch.Tensor, dim: int | None, size: int, batch: int) -> torch.Tensor:
    """Return a (batch or 1, ...) of each mapped element as one tensor (size * batch or 1, ...)."""
    if dim is None and x.shape[0] == 1:
        return x
    x = _front(x, dim, size)
    if x.shape[1] == 1 != batch:
        x = x.expand(size, batch, *x.shape[2:])
    return x.flatten(0, 1)


def _flat_mask(mask: torch.Tensor | None, dim: int | None, size: int, batch: int) -> torch.Tensor | None:
    """Return a mask that repeats over each element's batch as one that repeats over all."""
    if mask is None or dim is None:
        return mask
    mask = mask.movedim(dim, 0)
    period = mask.shape[1]
    if period != batch:
        mask = mask.unsqueeze(1).expand(size, batch // period, *mask.shape[1:]).flatten(1, 2)
    return mask.flatten(0, 1)


def _one_by_one(operator: Callable[..., Any], in_dims: InDims, size: int, arguments: Sequence[Any]) -> tuple[Any, Any]:
    """Make the separate calls and stack what they return."""
    results = [
        operator(*(x if dim is None else x.select(dim, i) for x, dim in zip(arguments, in_dims, strict=True)))
        for i in range(size)
    ]
    if isinstance(results[0], torch.Tensor):
        return torch.stack(results), 0
    return tuple(torch.stack(parts) for parts in zip(*results, strict=True)), (0,) * len(results[0])


def attention(info: Any, in_dims: InDims, *arguments: Any) -> tuple[torch.Tensor, int]:
    """Map ``torch.ops.qflash.attention``."""
    query, key, value, mask, *options = arguments
    size, recipe = info.batch_size, Recipe.from_key(options[2])
    if size == 0 or "tensor" in (recipe.query_granularity, recipe.key_granularity, recipe.value_granularity):
        return _one_by_one(torch.ops.qflash.attention, in_dims, size, arguments)
    batch = query.shape[1 if in_dims[0] == 0 else 0]
    query, key, value = (
        _flat(x, dim, size, batch) if dim is not None else _front(x, dim, size).flatten(0, 1)
        for x, dim in zip((query, key, value), in_dims[:3], strict=True)
    )
    out = torch.ops.qflash.attention(query, key, value, _flat_mask(mask, in_dims[3], size, batch), *options)
    return out.unflatten(0, (size, batch)), 0


def int8_attention(info: Any, in_dims: InDims, *arguments: Any) -> tuple[torch.Tensor, int]:
    """Map ``torch.ops.qflash.int8_attention``."""
    size = info.batch_size
    query, query_scale, key, key_scale, value, value_scale, mask, is_causal, scale, output_scale, *options = arguments
    batch = query.shape[1 if in_dims[0] == 0 else 0]
    query, key, value = (_front(x, in_dims[place], size).flatten(0, 1) for x, place in ((query, 0), (key, 2), (value, 4)))
    query_scale, key_scale, value_scale = (
        _flat(x, in_dims[place], size, batch) for x, place in ((query_scale, 1), (key_scale, 3), (value_scale, 5))
    )
    output_scale = None if output_scale is None else _flat(output_scale, in_dims[9], size, batch)
    if len(options) > 3 and options[3] is not None:
        options[3] = _flat(options[3], in_dims[13], size, batch)
    out = torch.ops.qflash.int8_attention(
        query, query_scale, key, key_scale, value, value_scale, _flat_mask(mask, in_dims[6], size, batch), is_causal, scale,
        output_scale, *options,
    )  # fmt: skip
    return out.unflatten(0, (size, batch)), 0


def quantize(
    info: Any, in_dims: InDims, x: torch.Tensor, granularity: str, backend: str
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[int, int]]:
    """Map ``torch.ops.qflash.quantize``."""
    x = _front(x, in_dims[0], info.batch_size)
    if granularity != "tensor":
        return torch.ops.qflash.quantize(x, granularity, backend), (0, 0)
    # one scale for each element: a row of its own
    values, scale = torch.ops.qflash.quantize(x.reshape(len(x), -1), "token", backend)
    return (values.reshape(x.shape), scale.reshape(-1, *(1,) * (x.dim() - 1))), (0, 0)


def quantize_centered(info: Any, in_dims: InDims, x: torch.Tensor, granularity: str, backend: str) -> tuple[Any, Any]:
    """Map ``torch.ops.qflash.quantize_centered``."""
    if granularity == "tensor":
        return _one_by_one(torch.ops.qflash.quantize_centered, in_dims, info.batch_size, (x, granularity, backend))
    return torch.ops.qflash.quantize_centered(_front(x, in_dims[0], info.batch_size), granularity, backend), (0, 0, 0)


def quantize_with_scale(
    info: Any, in_dims: InDims, x: torch.Tensor, scale: torch.Tensor, backend: str, center: torch.Tensor | None = None
) -> tuple[torch.Tensor, int]:
    """Map ``torch.ops.qflash.quantize_with_scale``."""
    x = _front(x, in_dims[0], info.batch_size)

    def beside(given: torch.Tensor, dim: int | None) -> torch.Tensor:
        """Return what broadcasts to each element as what broadcasts to all."""
        if dim is None:
            return given
        given = given.movedim(dim, 0)
        return given.reshape(len(given), *(1,) * (x.dim() - given.dim()), *given.shape[1:])

    if center is not None:
        center = beside(center, in_dims[3])
    return torch.ops.qflash.quantize_with_scale(x, beside(scale, in_dims[1]), backend, center), 0


def quantize_bias(info: Any, in_dims: InDims, bias: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Map ``torch.ops.qflash.quantize_bias``."""
    return torch.ops.qflash.quantize_bias(_front(bias, in_dims[0], info.batch_size)), 0


def varlen_attention(info: Any, in_dims: InDims, *arguments: Any) -> tuple[torch.Tensor, int]:
    """Map ``torch.ops.qflash.varlen_attention``, call by call."""
    out, dim = _one_by_one(torch.ops.qflash.varlen_attention, in_dims, info.batch_size, arguments)
    return out, dim


RULES: dict[str, Callable[..., Any]] = {
    "quantize": quantize,
    "quantize_centered": quantize_centered,
    "quantize_with_scale": quantize_with_scale,
    "quantize_bias": quantize_bias,
    "int8_attention": int8_attention,
    "attention": attention,
    "varlen_attention": varlen_attention,
}
"""The rule of each operator."""
