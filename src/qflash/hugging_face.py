"""QFlash as an attention implementation of Hugging Face's transformers: :func:`register_attention`.

Since 4.53 the attention modules of transformers look up the function they call by a name, which
``from_pretrained(..., attn_implementation="integer")`` gives them, or in later releases
``model.set_attn_implementation("integer")``. So there is nothing to patch: ViT, DeiT, CLIP, SigLIP, DINOv2, Swin and whatever
else goes by that table only need the name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .api import attention, causal_mask
from .recipe import Recipe, resolve_recipe
from .validation import check_backend

_OTHERS = ("eager", "sdpa", "flex_attention")
"""Names that transformers has given itself, besides those with "flash" in them."""
_UNKNOWN = {
    "softcap": "a bound on the scores",
    "s_aux": "attention sinks",
    "cache": "a paged cache",
    "output_attentions": "attention weights as an output",
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


def register_attention(name: str = "integer", recipe: Recipe | str | None = None, backend: str = "auto") -> str:
    """Let models of transformers attend with :func:`qflash.attention`, under a name of their ``attn_implementation``.

    Such a model is for inference: attention dropout raises, and backward() is not implemented. Registering a name again
    replaces recipe and back end, for models that have it, too.

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
            f'name must be without "flash", "|" and "/" and none of {_OTHERS}: they are transformers\' own; got {name!r}'
        )
    choices = resolve_recipe(recipe)
    check_backend(backend)
    try:
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    except ImportError as error:
        raise ImportError('register_attention needs transformers 4.53 or newer: pip install "qflash[transformers]"') from error
    ALL_ATTENTION_FUNCTIONS.register(name, _function(choices, backend))
    # without one a model of text would get no mask, and attend to its padding
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    return name
