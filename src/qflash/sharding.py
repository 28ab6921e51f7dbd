"""How the operators run on DTensors, which several devices hold in parts: part by part, with the bits of one device.

Batch elements and heads are independent of each other, and so are queries where neither a mask nor a scale spans them.
Parts that do not fit together otherwise are gathered by DTensor. One scale for a whole tensor takes one reduction of a
maximum, where a recipe asks for it (:func:`attention`, :func:`quantize_tensor`).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from . import torch_internals
from .specification import quantization
from .specification.recipe import Recipe

Placements = tuple[list[Any], list[Any]]
"""Of an operator's outputs, and of its inputs, None for those that are no tensors."""


def prepare(x: torch.Tensor) -> bool:
    """Tell whether a tensor is a DTensor; the operators take such from then on."""
    if type(x) is torch.Tensor:
        return False
    module = sys.modules.get("torch.distributed.tensor")
    if module is None or not isinstance(x, module.DTensor):
        return False
    _register()
    return True


@functools.cache
def _register() -> None:
    """Tell DTensor how the operators may be sharded. What that imports takes a quarter of a second."""
    for name, rule in _RULES.items():
        torch_internals.register_sharding(getattr(torch.ops.qflash, name).default, rule)


def _is_tensor(x: Any) -> bool:
    return hasattr(x, "shape")


def _part(dim: int, shape: Sequence[int]) -> Any:
    """Return the placement of a tensor of a shape where a dimension is sharded; a size of 1 repeats."""
    from torch.distributed.tensor import Replicate, Shard

    return Shard(dim) if shape[dim] > 1 else Replicate()


def _along(dim: int, x: Any) -> Any:
    """Return the same of an argument, None for one that is no tensor."""
    return _part(dim, x.shape) if _is_tensor(x) else None


def _whole(*arguments: Any) -> list[Any]:
    from torch.distributed.tensor import Replicate

    return [Replicate() if _is_tensor(x) else None for x in arguments]


def _independent(query: Any, key: Any, mask: Any, is_causal: bool) -> Iterable[int]:
    """Return the dimensions of query along which every part of attention's output comes of the same part of its inputs."""
    ranks = query.mesh.size()
    period = 1 if mask is None else mask.shape[0]
    # a mask that repeats over the batch repeats over each part alike
    if period in (1, query.shape[0]) or query.shape[0] % (ranks * period) == 0:
        yield 0
    # each part of the query's heads comes with its own heads of key and value, or all share one
    if key.shape[1] in (1, query.shape[1]) or key.shape[1] % ranks == 0:
        yield 1
    # which keys no query sees is asked of all queries
    if not is_causal and (mask is None or mask.shape[2] == 1):
        yield 2


def _mask_along(dim: int, mask: Any, batch: int) -> Any:
    return _whole(mask)[0] if dim == 0 and _is_tensor(mask) and mask.shape[0] != batch else _along(dim, mask)


def _of_keys(dim: int, *arguments: Any) -> list[Any]:
    """Return the placements of key, value and what is said of their tokens, all of which every query takes."""
    return _whole(*arguments) if dim == 2 else [_along(dim, x) for x in arguments]


def _attention(query: Any, key: Any, value: Any, mask: Any, is_causal: bool, *options: Any) -> list[Placements]:
    found = [(_whole(query), _whole(query, key, value, mask, is_causal, *options))]
    recipe = Recipe.from_key(options[1])
    if "tensor" in (recipe.query_granularity, recipe.key_granularity, recipe.value_granularity):
        return found
    for dim in _independent(query, key, mask, is_causal):
        if dim < 2 or (recipe.query_granularity == "token" and not recipe.balance):
            inputs = [_along(dim, query), *_of_keys(dim, key, value), _mask_along(dim, mask, query.shape[0])]
            found.append(([_along(dim, query)], [*inputs, None, *_whole(*options)]))
    return found


def _int8_attention(
    query: Any,
    query_scale: Any,
    key: Any,
    key_scale: Any,
    value: Any,
    value_scale: Any,
    *others: Any,
) -> list[Placements]:
    mask, is_causal, _, output_scale, *options = others
    found = [(_whole(query), _whole(query, query_scale, key, key_scale, value, value_scale, *others))]
    for dim in _independent(query, key, mask, is_causal):
        inputs = [
            _along(dim, query), _along(dim, query_scale), *_of_keys(dim, key, key_scale, value, value_scale),
            _mask_along(dim, mask, query.shape[0]), None, None, _along(dim, output_scale), *_of_keys(dim, *options),
        ]  # fmt: skip
        found.append(([_along(dim, query)], inputs))
    return found


def _varlen_attention(query: Any, key: Any, value: Any, *options: Any) -> list[Placements]:
    found = [(_whole(query), _whole(query, key, value, *options))]
    recipe = Recipe.from_key(options[-2])
    heads = key.shape[1] in (1, query.shape[1]) or key.shape[1] % query.mesh.size() == 0
    if heads and "tensor" not in (recipe.query_granularity, recipe.key_granularity, recipe.value_granularity):
        found.append(([_along(1, query)], [*(_along(1, x) for x in (query, key, value)), *_whole(*options)]))
    return found


def _spanned(dims: int, granularity: str) -> Iterable[int]:
    """Return the dimensions of a tensor that a scale does not span."""
    if granularity != "tensor":
        yield from range(dims - 2)
        if granularity != "head":
            yield dims - 2 if granularity == "token" else dims - 1


def _quantize(x: Any, granularity: str, *backend: str) -> list[Placements]:
    return _quantized(x, granularity, [quantization.scale_shape(x.shape, granularity)])


def _quantize_centered(x: Any, granularity: str, *backend: str) -> list[Placements]:
    return _quantized(x, granularity, [quantization.scale_shape(x.shape, each) for each in (granularity, "channel")])


def _quantized(x: Any, granularity: str, shapes: Sequence[Sequence[int]]) -> list[Placements]:
    from torch.distributed.tensor import Replicate, Shard

    found: list[Placements] = [([Replicate()] * (1 + len(shapes)), [Replicate(), None, None])]
    for dim in _spanned(len(x.shape), granularity):
        others = [_part(dim, shape) for shape in shapes]
        found.append(([Shard(dim), *others], [Shard(dim), None, None]))
    return found


def _quantize_with_scale(x: Any, scale: Any, backend: str, *center: Any) -> list[Placements]:
    from torch.distributed.tensor import Shard

    found: list[Placements] = [(_whole(x), _whole(x, scale, backend, *center))]
    for dim in range(len(x.shape)):
        # both may have fewer dimensions: the first are missing
        others = [
            _part(dim - len(x.shape) + len(each.shape), each.shape)
            if _is_tensor(each) and dim >= len(x.shape) - len(each.shape)
            else _whole(each)[0]
            for each in (scale, *center)
        ]
        found.append(([Shard(dim)], [Shard(dim), others[0], None, *others[1:]]))
    return found


def _quantize_bias(bias: Any) -> list[Placements]:
    from torch.distributed.tensor import Shard

    # not along a row, which may be taken relative to its largest number
    return [(_whole(bias), _whole(bias)), *(([Shard(dim)], [Shard(dim)]) for dim in range(len(bias.shape) - 1))]


_RULES: dict[str, Callable[..., list[Placements]]] = {
    "quantize": _quantize,
    "quantize_centered": _quantize_centered,
    "quantize_with_scale": _quantize_with_scale,
    "quantize_bias": _quantize_bias,
    "int8_attention": _int8_attention,
    "attention": _attention,
    "varlen_attention": _varlen_attention,
}


def _summed(x: Any) -> Any:
    """Return a DTensor without sums that are still to be made."""
    from torch.distributed.tensor import Replicate

    return x.redistribute(placements=[Replicate() if each.is_partial() else each for each in x.placements])


def _tensor_scales(*tensors: Any) -> list[torch.Tensor]:
    """Return the per-tensor scales of DTensors of one mesh, as DTensors, after one reduction for all of them."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    mesh = tensors[0].device_mesh
    own = torch.stack([quantization.amplitude(_summed(x).to_local(), "tensor").reshape(()) for x in tensors])
    most = DTensor.from_local(own, mesh, [Partial("max")] * mesh.ndim).full_tensor()
    return [
        DTensor.from_local(quantization.scale_from_amplitude(each).reshape((1,) * x.dim()), mesh, [Replicate()] * mesh.ndim)
        for each, x in zip(most, tensors, strict=True)
    ]


def quantize_tensor(x: torch.Tensor, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a DTensor with one scale; values lie as ``x`` does."""
    (scale,) = _tensor_scales(x)
    return torch.ops.qflash.quantize_with_scale(x, scale, backend), scale


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
    """Call the operator on DTensors; where all that spans parts is a scale a tensor, with one reduction and no gathering."""
    choices = Recipe.from_key(recipe)
    tensors = query, key, value
    granularities = choices.query_granularity, choices.key_granularity, choices.value_granularity
    more = choices.smooth_key or choices.smooth_value or choices.balance or choices.rotate
    if "tensor" not in granularities or more or mask is not None or is_causal:
        return torch.ops.qflash.attention(query, key, value, mask, is_causal, scale, recipe, backend)
    shared = iter(_tensor_scales(*(x for x, each in zip(tensors, granularities, strict=True) if each == "tensor")))
    operands = []
    for x, granularity in zip(tensors, granularities, strict=True):
        if granularity == "tensor":
            found = next(shared)
            operands += [torch.ops.qflash.quantize_with_scale(x, found, backend), found]
        else:
            operands += torch.ops.qflash.quantize(x, granularity, backend)
    return torch.ops.qflash.int8_attention(*operands, None, False, scale, None, query.dtype, recipe, backend)
