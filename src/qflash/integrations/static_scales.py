"""Attention of a patched module whose scales were found beforehand: :class:`StaticScales`, :func:`static_attention`.

:func:`qflash.calibrate` finds them. They are buffers of a submodule of the patched module, so that they are saved, loaded and
moved with it, and no maximum over the data is taken when it runs.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Collection, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn
from torch.overrides import handle_torch_function, has_torch_function

from ..api import int8_attention
from ..specification.quantization import SMALLEST_SCALE, QuantizedTensor, hadamard_transform, rotated_head_dim
from ..specification.recipe import Recipe
from ..validation import autocast, check_attention

NAME = "qflash_scales"
"""What the submodule of a patched module is called."""
_FIELDS = (
    "query_granularity", "key_granularity", "value_granularity", "smooth_key", "smooth_value", "balance", "rotate",
)  # fmt: skip
"""Fields of a recipe that scales belong to."""
_SCALES = ("query_step", "query_scale", "key_step", "key_scale", "value_scale")
_MIDDLES = ("key_middle", "value_middle")


@dataclasses.dataclass(frozen=True)
class LayerScales:
    """Scales of one attention layer, all float32 (heads or 1, 1, channels or 1).

    Attributes:
        query_step: what a query is divided by and rounded.
        query_scale: what a unit of it counts for in the scores, (heads or 1, 1, 1). It is the step but for the balance between
            channels, which is in the steps only.
        key_step, key_scale: the same of the key.
        value_scale: of the value.
        key_middle, value_middle: subtracted before; None for nothing.
    """

    query_step: torch.Tensor
    query_scale: torch.Tensor
    key_step: torch.Tensor
    key_scale: torch.Tensor
    value_scale: torch.Tensor
    key_middle: torch.Tensor | None
    value_middle: torch.Tensor | None


def recipe_text(recipe: Recipe) -> str:
    """Name the choices of a recipe that its scales belong to, the same text for the same choices."""
    return json.dumps({field: getattr(recipe, field) for field in _FIELDS})


class StaticScales(nn.Module):
    """Scales of one layer as buffers, which stay float32 whatever the model is converted to.

    Attributes:
        query_step, query_scale, key_step, key_scale, key_middle, value_scale, value_middle: see :class:`LayerScales`.
        recipe: uint8, the text of :func:`recipe_text`.
    """

    recipe: torch.Tensor

    def __init__(self, scales: LayerScales, recipe: Recipe) -> None:
        super().__init__()
        for name in (*_SCALES, *_MIDDLES):
            x = getattr(scales, name)
            # a step may be its scale, and files and traces take no tensor twice
            self.register_buffer(name, None if x is None else x.clone())
        text = torch.tensor(list(recipe_text(recipe).encode()), dtype=torch.uint8, device=scales.query_step.device)
        self.register_buffer("recipe", text)

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """Return the buffers that :func:`static_attention` takes."""
        return tuple(getattr(self, name) for name in (*_SCALES, *_MIDDLES))

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> StaticScales:
        # half() and the like come here, as to(device) does
        for name, x in self._buffers.items():
            if x is not None:
                moved = fn(x)
                self._buffers[name] = moved if moved.dtype == x.dtype else x.to(moved.device)
        return self

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *arguments: Any) -> None:
        given = {key[len(prefix) :]: x for key, x in state_dict.items() if key.startswith(prefix)}
        # where there are none, the patched module has said what is to be said
        if not given:
            return
        if not self.recipe.is_meta:
            wanted = {name: x for name, x in self._buffers.items() if x is not None}
            text = bytes(self.recipe.tolist()).decode()
            problem = _problem(given, wanted.keys(), text, prefix.rstrip(".") or "the module")
            if problem is not None:
                arguments[-1].append(problem)
                return
            check_scales(given, json.loads(text), prefix)
            for name, x in wanted.items():
                if given[name].shape != x.shape:
                    raise ValueError(
                        f"{prefix}{name} in the state_dict must be of shape {tuple(x.shape)}, as it is here, and is "
                        f"{tuple(given[name].shape)}; after qflash.patch(model) other shapes can be loaded"
                    )
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={tuple(x.shape)}" for name, x in self._buffers.items() if x is not None and name != "recipe")


def _problem(given: Mapping[str, Any], wanted: Collection[str], own: str, where: str) -> str | None:
    """Say why entries of a state_dict are not the scales of a layer; None if they are, as far as that can be told by kind.

    Args:
        given: the entries.
        wanted: their names.
        own: :func:`recipe_text` of the layer.
        where: the layer's name.
    """
    text = given.get("recipe")
    if isinstance(text, torch.Tensor) and text.dtype == torch.uint8 and not text.is_meta:
        found = bytes(text.flatten().tolist()).decode(errors="replace")
        if found != own:
            return (
                f"the static scales for {where} in the state_dict were calibrated for a recipe with {found}, and it is patched "
                f"with {own}: give qflash.patch the same recipe"
            )
    if odd := sorted(set(wanted) ^ given.keys()):
        return f"the state_dict must hold all static scales for {where} or none: {odd} are missing or not known"
    kinds = {name: x.dtype if isinstance(x, torch.Tensor) else type(x).__name__ for name, x in given.items()}
    if any(kind != (torch.uint8 if name == "recipe" else torch.float32) for name, kind in kinds.items()):
        return f"static scales for {where} in the state_dict must be float32, and recipe uint8, got {kinds}"
    return None


def check_scales(given: Mapping[str, torch.Tensor], fields: Mapping[str, Any], prefix: str) -> None:
    """Look whether scales of a state_dict have the shapes that their recipe gives them, and are numbers to divide by.

    Args:
        given: float32, by the names of :class:`LayerScales`.
        fields: of the recipe, as :func:`recipe_text` has them.
        prefix: of their names in the state_dict.

    Raises:
        ValueError: a shape or number is wrong, or two shapes contradict; the message names the entry.
    """
    # which entries have one number a head, and which one a channel
    shared = {part: fields[f"{part}_granularity"] == "tensor" for part in ("query", "key", "value")}
    balance = fields["balance"]
    heads = {
        "query_scale": not shared["query"], "query_step": balance or not shared["query"], "key_scale": not shared["key"],
        "key_step": balance or not shared["key"], "value_scale": not shared["value"], "key_middle": True, "value_middle": True,
    }  # fmt: skip
    channels = {"query_step": balance, "key_step": balance, "value_scale": fields["value_granularity"] == "channel",
                "key_middle": True, "value_middle": True}  # fmt: skip
    sizes: dict[str, tuple[int, str]] = {}
    for name in (*_SCALES, *_MIDDLES):
        x = given.get(name)
        if x is None:
            continue
        entry = f"{prefix}{name} in the state_dict"
        counts = ("heads" if heads[name] else "1", "1", "channels" if channels.get(name) else "1")
        if x.dim() != 3 or 0 in x.shape or any(count == "1" != str(size) for count, size in zip(counts, x.shape, strict=True)):
            raise ValueError(f"{entry} must be of shape ({', '.join(counts)}), is {tuple(x.shape)}")
        # query and key have the same channels, key and value the same heads
        owner = name.partition("_")[0]
        for what, wanted, size in (
            ("heads of the query" if owner == "query" else "heads of key and value", heads[name], x.shape[0]),
            ("channels of the value" if owner == "value" else "channels of query and key", channels.get(name), x.shape[2]),
        ):
            if wanted:
                before, of = sizes.setdefault(what, (size, name))
                if size != before:
                    raise ValueError(f"{entry} has {size} {what}, and {prefix}{of} has {before}")
        if x.is_meta:
            continue
        least = SMALLEST_SCALE if name in _SCALES else -math.inf
        if not bool((x.isfinite() & (x >= least)).all()):
            kind = f"finite and at least {SMALLEST_SCALE:.3g}" if name in _SCALES else "finite"
            raise ValueError(f"{entry} must be {kind}, has {x[~(x.isfinite() & (x >= least))][0].item()}")
    query, key = (sizes.get(what, (1, ""))[0] for what in ("heads of the query", "heads of key and value"))
    if query % key and "heads of the query" in sizes:
        raise ValueError(
            f"{prefix}query_step in the state_dict has {query} heads, which the {key} of key and value do not divide"
        )


def prepare_loading(module: Any, state: Mapping[str, Any], prefix: str) -> str | None:
    """Make room in a patched module for the scales that a state_dict holds for it.

    Args:
        module: patched, about to load its part.
        state: the state_dict.
        prefix: of the module's names in it.

    Returns:
        why they do not fit, or that there are none for a calibrated module; None if all is well.

    Raises:
        ValueError: see :func:`check_scales`.
    """
    start = f"{prefix}{NAME}."
    given = {key[len(start) :]: x for key, x in state.items() if key.startswith(start)}
    where = prefix.rstrip(".") or "the model"
    if not given:
        if NAME in module._modules and any(key.startswith(prefix) for key in state):
            return (
                f"{where} has static scales, and the state_dict holds weights for it without any: call qflash.patch(model) "
                "again before loading for dynamic scales, and qflash.calibrate(model, ...) after it for new ones"
            )
        return None
    if module._qflash_attention is not None:
        return f"the state_dict holds static scales for {where}, which is patched with attention= and takes none"
    recipe: Recipe = module._qflash_recipe
    middles = [name for name, wanted in zip(_MIDDLES, (recipe.smooth_key, recipe.smooth_value), strict=True) if wanted]
    problem = _problem(given, {*_SCALES, *middles, "recipe"}, recipe_text(recipe), where)
    if problem is not None:
        return problem
    check_scales(given, json.loads(recipe_text(recipe)), start)
    if NAME not in module._modules:
        like = next((x for x in (*module.parameters(), *module.buffers())), given["query_step"])
        scales = {name: torch.empty_like(given[name], device=like.device) if name in given else None
                  for name in (*_SCALES, *_MIDDLES)}  # fmt: skip
        module.add_module(NAME, StaticScales(LayerScales(**scales), recipe))  # type: ignore[arg-type]
    return None


def take_out(state: MutableMapping[str, Any], prefix: str) -> None:
    """Remove a module's scales from a state_dict, so that those it has stay as they are."""
    for key in [key for key in state if key.startswith(f"{prefix}{NAME}.")]:
        del state[key]


def _check_fit(name: str, x: torch.Tensor, scales: torch.Tensor | None, channels: int) -> None:
    heads = x.shape[-3] if x.dim() > 2 else 1
    if scales is not None and (scales.shape[0] not in (1, heads) or scales.shape[-1] not in (1, channels)):
        raise RuntimeError(
            f"static scales of the {name} are for {scales.shape[0]} heads of {scales.shape[-1]} channels (1: for all), and it "
            f"has {heads} of {channels}; qflash.calibrate finds others, qflash.patch(model) goes back to dynamic ones"
        )


class _NoGradient(torch.autograd.Function):
    """Passes an output on, for which int8 tensors leave no way back, and raises where a gradient is to go through it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(out: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        return out.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise NotImplementedError("QFlash is for inference: integer attention has no gradient")


def static_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    scales: tuple[torch.Tensor | None, ...],
    recipe: Recipe,
    backend: str,
) -> torch.Tensor:
    """Attend as :func:`qflash.attention` does, with given scales.

    What lies beyond the calibrated range saturates. So do infinities, and a NaN counts as 0: no scale is found in which they
    could show.

    Args:
        query, key, value, attn_mask, is_causal, scale, enable_gqa, recipe, backend: see :func:`qflash.attention`.
        scales: from :meth:`StaticScales.tensors`.

    Raises:
        TypeError, ValueError: as :func:`qflash.attention`.
        RuntimeError: the scales are for other numbers of heads or channels.
        NotImplementedError: from ``backward()``.
    """
    if has_torch_function((query, key, value, attn_mask)):
        return handle_torch_function(
            static_attention, (query, key, value, attn_mask), query, key, value, attn_mask, is_causal, scale, enable_gqa,
            scales, recipe, backend,
        )  # fmt: skip
    query, key, value = autocast(query, key, value)
    factor, dtype = check_attention(query, key, value, attn_mask, 0.0, is_causal, scale, enable_gqa), query.dtype
    query_step, query_scale, key_step, key_scale, value_scale, key_middle, value_middle = scales
    width = rotated_head_dim(query.shape[-1]) if recipe.rotate else query.shape[-1]
    _check_fit("query", query, query_step, width)
    for each in (key_step, key_middle):
        _check_fit("key", key, each, width)
    for each in (value_scale, value_middle):
        _check_fit("value", value, each, value.shape[-1])
    if recipe.rotate:
        query, key = hadamard_transform(query), hadamard_transform(key)
        factor = factor * width
    quantize = torch.ops.qflash.quantize_with_scale
    out = int8_attention(
        QuantizedTensor.from_kernel(quantize(query, query_step, backend), query_scale),  # type: ignore[arg-type]
        QuantizedTensor.from_kernel(quantize(key, key_step, backend, key_middle), key_scale),  # type: ignore[arg-type]
        QuantizedTensor.from_kernel(quantize(value, value_scale, backend, value_middle), value_scale, value_middle),  # type: ignore[arg-type]
        attn_mask,
        is_causal=is_causal,
        scale=factor,
        enable_gqa=enable_gqa,
        out_dtype=dtype,
        recipe=recipe,
        backend=backend,
    )
    assert isinstance(out, torch.Tensor)
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)) and not torch.jit.is_tracing()
    return _NoGradient.apply(out, query, key, value) if wanted else out
