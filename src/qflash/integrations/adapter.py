"""What a ``forward`` written anew for a class of attention modules is, and the attention it calls."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from ..api import attention, causal_mask
from . import static_scales

AttentionFunction = Callable[..., torch.Tensor]
"""Takes query, key, value, ``attn_mask`` and ``scale``; see ``attention`` of :func:`qflash.patch`."""


@dataclasses.dataclass(frozen=True)
class Adapter:
    """How one family of attention modules is recognised and replaced.

    Attributes:
        name: what error messages call it.
        package: the distribution to install for it, also its top-level module.
        classes: ``"module:Class"`` paths; several where the class has moved between releases.
        forward: the replacement for ``forward``; its first argument is the module, whose recipe and back end
            it passes on by calling :func:`attend`.
        unused: submodules that ``forward`` does not call.
    """

    name: str
    package: str
    classes: tuple[str, ...]
    forward: Callable[..., torch.Tensor]
    unused: tuple[str, ...] = ("attn_drop", "softmax")

    def takes(self, module_class: type) -> bool:
        """Tell whether ``forward`` may stand in for ``module_class``'s own.

        A subclass that overrides ``forward`` computes something this adapter does not know and is left alone.
        """
        for path in self.classes:
            # A model can only hold a class whose module has been imported, so nothing is imported here.
            home, _, name = path.partition(":")
            known = getattr(sys.modules.get(home), name, None)
            if isinstance(known, type) and issubclass(module_class, known) and module_class.forward is known.forward:  # type: ignore[attr-defined]
                return True
        return False


def refuse_dropout(rate: float) -> NoReturn:
    """Refuse dropout of probabilities, which are never formed."""
    raise RuntimeError(
        f"attention dropout {rate} is active, and QFlash is for inference: call model.eval(), or qflash.unpatch(model) "
        "before training"
    )


def attend(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, *,
    scale: float, is_causal: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Call the attention an adapter's module was patched to; arguments and shapes are those of :func:`qflash.attention`."""
    if module.training and module.attn_drop.p > 0.0:
        refuse_dropout(module.attn_drop.p)
    return call_chosen(module, query, key, value, mask, is_causal, scale, False)


def call_chosen(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """Call the attention function that a module was patched to."""
    # Under autocast a query/key norm may return float32 beside a float16 value; SDPA would bring them together too.
    query, key = query.to(value.dtype), key.to(value.dtype)
    if module._qflash_attention is not None:
        if enable_gqa and key.shape[-3] != query.shape[-3]:
            key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
        factor = query.shape[-1] ** -0.5 if scale is None else scale
        return attend_with(module._qflash_attention, query, key, value, mask, is_causal, factor)
    watch, scales = module._qflash_watch, module._modules.get(static_scales.NAME)
    is_watched = watch is not None and watch(query, key, value, mask, is_causal)
    if scales is not None and not is_watched:
        return static_scales.static_attention(
            query, key, value, mask, is_causal, scale, enable_gqa, scales.tensors(), module._qflash_recipe,
            module._qflash_backend,
        )  # fmt: skip
    return attention(
        query,
        key,
        value,
        mask,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
        recipe=module._qflash_recipe,
        backend=module._qflash_backend,
    )


def attend_with(
    function: AttentionFunction,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float,
) -> torch.Tensor:
    """Call ``function`` on four-dimensional tensors; leading dimensions are flattened into the batch and restored.

    Such a function knows neither ``is_causal`` nor a mask that repeats over the batch: both become a mask it can
    broadcast, which costs the copy that :func:`qflash.attention` avoids.
    """
    if isinstance(query, torch.fx.Proxy):
        raise TypeError(
            "torch.fx cannot trace a model patched with attention=, because a graph holds no function of the caller's: trace "
            "it patched without, or unpatched"
        )
    if is_causal:
        if mask is not None:
            raise ValueError("attn_mask and is_causal=True exclude each other; put the causal part into attn_mask")
        mask = causal_mask(query, key)
    lead = query.shape[:-3]
    if mask is not None:
        mask = mask.reshape((1,) * max(query.dim() - mask.dim(), 0) + tuple(mask.shape))
        if any(size != 1 for size in mask.shape[:-3]):
            mask = mask.expand(*lead, *mask.shape[-3:])
        mask = mask.flatten(0, -4)
    out = function(query.flatten(0, -4), key.flatten(0, -4), value.flatten(0, -4), attn_mask=mask, scale=scale)
    return out.to(value.dtype).unflatten(0, lead)
