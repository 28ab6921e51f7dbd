"""QFlash as an attention implementation of Hugging Face's transformers: :func:`register_attention`.

Since 4.53 the attention modules of transformers look up the function they call by a name, which
``from_pretrained(..., attn_implementation="integer")`` gives them, or in later releases
``model.set_attn_implementation("integer")``. So there is nothing to patch: ViT, DeiT, CLIP, SigLIP, DINOv2, Swin and whatever
else goes by that table only need the name.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ..api import attention, causal_mask
from ..specification.recipe import Recipe, resolve_recipe
from ..validation import check_backend
from . import patching
from .inspection import coverage, described, goes_by_name

_OTHERS = ("eager", "sdpa", "flex_attention")
"""Names that transformers has given itself, besides those with "flash" in them."""
_UNKNOWN = {
    "softcap": "a bound on the scores",
    "s_aux": "attention sinks",
    "cache": "a paged cache",
}
"""Keywords of other implementations that change what is computed."""


def _mask(mask: torch.Tensor | None, bias: torch.Tensor | None, keys: int) -> torch.Tensor | None:
    """One mask of a mask (bool, or additive) and an additive bias, for so many keys."""
    if mask is not None:
        mask = mask[..., :keys]
    if bias is None or mask is None:
        return mask if bias is None else bias
    return bias.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else bias + mask


def _function(recipe: Recipe, backend: str) -> Callable[..., tuple[torch.Tensor, None]]:
    def integer_attention_forward(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        position_bias: torch.Tensor | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attend as transformers asks.

        Query, key and value are (batch, heads, tokens, head_dim), the output (batch, tokens, heads, head_dim), without weights.
        """
        for name, what in _UNKNOWN.items():
            given = options.get(name)
            if given is not None and given is not False:
                raise ValueError(f"{name}: QFlash lacks {what}; {type(module).__name__} needs another attn_implementation")
        if options.get("output_attentions"):
            # transformers' own "sdpa" warns, too, and returns none
            warnings.warn(
                "output_attentions=True: attention weights are never formed here, and none are returned; "
                'attn_implementation="eager" has them',
                stacklevel=2,
            )
        if dropout > 0.0:
            raise RuntimeError(f"attention dropout {dropout} is active, and QFlash is for inference: call model.eval()")
        if is_causal is None:
            is_causal = getattr(module, "is_causal", True)
        is_causal = bool(is_causal) and attention_mask is None and query.shape[2] > 1
        if is_causal and position_bias is not None:
            attention_mask, is_causal = causal_mask(query, key), False
        mask = _mask(attention_mask, position_bias, key.shape[2])
        # under autocast a norm of query or key returns float32 beside a float16 value
        query, key = query.to(value.dtype), key.to(value.dtype)
        out = attention(
            query, key, value, mask, is_causal=is_causal, scale=scaling, enable_gqa=True, recipe=recipe, backend=backend
        )  # fmt: skip
        return out.transpose(1, 2).contiguous(), None

    return integer_attention_forward


_warned: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Modules named in a warning when a part of their model was made."""
_configs_at_first: weakref.WeakKeyDictionary[nn.Module, list[Any]] = weakref.WeakKeyDictionary()
"""The configs that a model was given; while it is made it may put others in their place."""


def _refuse_classes(model: Any) -> None:
    """Refuse a model that makes its attention of one of several classes, where our name would be a bare KeyError."""
    _configs_at_first[model] = list(_configs(model.config))
    name = model.config._attn_implementation
    if not goes_by_name(name):
        return
    for choices in vars(sys.modules[type(model).__module__]).values():
        if isinstance(choices, dict) and isinstance(choices.get("eager"), type) and name not in choices:
            raise ValueError(
                f"attn_implementation must be one of {tuple(choices)} for {type(model).__name__}, which has a class for "
                f"each and looks no function up, so that QFlash cannot take its place; got {name!r}. Where that is a part of "
                f'another model a dictionary gives it another one, for instance {{"": {name!r}, "vision_config": "sdpa"}}'
            )


def _configs(config: Any) -> Iterator[Any]:
    """Return a config and those of its parts."""
    yield config
    for name in getattr(config, "sub_configs", ()):
        yield from _configs(getattr(config, name, None))


def _warn_of_floats(model: Any, requested: object = None) -> None:
    """Name the attention of a model that stays in floating point although its config, or the caller, says our name."""
    everywhere = requested if goes_by_name(requested) else None
    configs, modules = _configs_at_first.get(model, []), dict(model.named_modules())
    asked: dict[str, Any] = {}
    for place, module in modules.items():
        asked[place] = asked.get(place.rpartition(".")[0], everywhere)
        config: Any = getattr(module, "config", None)
        if everywhere is None and hasattr(config, "_attn_implementation"):
            if goes_by_name(config._attn_implementation):
                asked[place] = config._attn_implementation
            elif any(config is each for each in configs):
                asked[place] = None
            # else a part with a config of its own, which was not told what the model was
    left = [layer for layer in coverage(model).floating if asked[layer.name] is not None]
    if requested is None:
        left = [layer for layer in left if modules[layer.name] not in _warned]
        _warned.update(modules[layer.name] for layer in left)
    if left:
        more = "; qflash.patch(model) takes it" * all(patching.is_supported(modules[layer.name]) for layer in left)
        shown = [dataclasses.replace(layer, reason=None) for layer in left]
        warnings.warn(
            f"attn_implementation={asked[left[0].name]!r}: {type(model).__name__} keeps attention in floating point that "
            f"does not look this name up, {described(shown)}{more}",
            stacklevel=4,
        )


def _watch(base: Any) -> None:
    """Have transformers' models look what goes by our name, when they are made and when they are told it.

    Nothing of ours is called by a model that does not look the name up, and transformers takes any registered name.
    """
    for method, look in (
        ("__init__", lambda model, *_, **__: _refuse_classes(model)),
        ("post_init", _warn_of_floats),
        ("set_attn_implementation", lambda model, attn_implementation, *_, **__: _warn_of_floats(model, attn_implementation)),
    ):
        # 4.53 has no set_attn_implementation
        own = vars(base).get(method)
        if own is not None and not hasattr(own, "_qflash_watched"):
            setattr(base, method, _followed(own, look))


def _followed(method: Callable[..., Any], look: Callable[..., None]) -> Callable[..., Any]:
    @functools.wraps(method)
    def followed(model: Any, *args: Any, **options: Any) -> Any:
        result = method(model, *args, **options)
        look(model, *args, **options)
        return result

    followed._qflash_watched = True  # type: ignore[attr-defined]
    return followed


def register_attention(name: str = "integer", recipe: Recipe | str | None = None, backend: str = "auto") -> str:
    """Let models of transformers attend with :func:`qflash.attention`, under a name of their ``attn_implementation``.

    Such a model is for inference: attention dropout raises, and backward() is not implemented. Registering a name again
    replaces recipe and back end, for models that have it, too.

    Some models ignore the name in all or some of their layers, and transformers does not say so. Once a name is registered, a
    model that is made with it, or switched to it, warns of attention that stays in floating point (:func:`qflash.coverage`;
    :func:`qflash.patch` may take it). A model that could not be made with the name is refused with a ValueError.

    Args:
        name: what the implementation is to be called; several recipes need several names. Not with "flash" in it, which
            transformers takes for one of its own.
        recipe: see :func:`qflash.attention`.
        backend: see :func:`qflash.attention`.

    Returns:
        ``name``, for ``from_pretrained(..., attn_implementation=name)`` or ``model.set_attn_implementation(name)``.

    Raises:
        TypeError: ``name`` is not a string, or ``recipe`` not a recipe.
        ValueError: transformers has a meaning of its own for ``name``; no such recipe or back end.
        ImportError: transformers is not installed, or is older than 4.53.
    """
    if not isinstance(name, str):
        raise TypeError(f"name must be a string, got {type(name).__name__}")
    if not name or name in _OTHERS or any(part in name for part in ("flash", "|", "/")):
        raise ValueError(
            f'name must not contain "flash", "|" or "/", nor be one of {_OTHERS}, which mean something else in transformers; '
            f"got {name!r}"
        )
    choices = resolve_recipe(recipe)
    check_backend(backend)
    try:
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
    except ImportError as error:
        raise ImportError('register_attention needs transformers 4.53 or newer: pip install "qflash[transformers]"') from error
    ALL_ATTENTION_FUNCTIONS.register(name, _function(choices, backend))
    # without one a model of text would get no mask, and attend to its padding
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    _watch(PreTrainedModel)
    return name
