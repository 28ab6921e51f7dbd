"""timm's attention: forwards written anew for its commonest classes.

All other classes of timm are patched by what their forward calls (:mod:`qflash.integrations.patching`).
"""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import has_torch_function

from .. import plan_cache
from .adapter import Adapter, attend
from .swin_bias import window_bias

_Tensors = tuple[torch.Tensor, ...]


@dataclasses.dataclass(frozen=True)
class _Kept:
    """Tensors worked out from others, which are looked at again whenever they are asked for.

    Attributes:
        sources: what they were worked out from.
        kinds: of what type these were, on which device, and to which type autocast would have brought products.
        marks: where they lay, and how many times they had been written to.
        result: the tensors.
    """

    sources: _Tensors
    kinds: tuple[Any, ...]
    marks: tuple[Any, ...]
    result: _Tensors

    def is_of(self, sources: _Tensors) -> bool:
        """Tell whether it was worked out from these tensors, whatever has been written to them since."""
        same = len(sources) == len(self.sources) and all(a is b for a, b in zip(sources, self.sources, strict=True))
        return same and self.kinds == _kinds(sources)

    def holds(self, sources: _Tensors) -> bool:
        """Tell whether it would come out the same again."""
        return self.is_of(sources) and self.marks == _marks(sources)


def _kinds(tensors: _Tensors) -> tuple[Any, ...]:
    device = tensors[0].device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    # Module.to() leaves a parameter's object and changes everything else of it
    return autocast, *((x.dtype, x.device) for x in tensors)


def _marks(tensors: _Tensors) -> tuple[Any, ...]:
    # what is made in inference mode counts no writes
    return tuple((x.data_ptr(), None if x.is_inference() else x._version) for x in tensors)


def _needs_gradient(tensors: _Tensors) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def _keep(module: Any, sources: _Tensors, function: Callable[[], _Tensors]) -> _Tensors:
    """Return ``function()``, or what it returned the last time if its sources were the same."""
    kept = module._qflash_kept
    if kept is not None and kept.holds(sources):
        return kept.result
    result = function()
    if plan_cache.place_of([source.detach() for source in sources]) is None:
        # something else than a kernel was on the way, such as a trace or a fake tensor, to which the result belongs
        return result
    if sources[0].is_cuda:
        from ..kernels.device import is_capturing

        if is_capturing(sources[0].device):
            # not there before the graph has run, and then the graph's own
            return result
        # from now on other streams may read it, and nobody reads the one before any more
        torch.cuda.synchronize(sources[0].device)
    module.__dict__["_qflash_kept"] = _Kept(sources, _kinds(sources), _marks(sources), result)
    return result


def _heads(module: Any, packed: torch.Tensor) -> torch.Tensor:
    """Return query, key and value of a projection (batch, tokens, channels): a view (3, batch, heads, tokens, head_dim)."""
    return packed.unflatten(-1, (3, module.num_heads, -1)).permute(2, 0, 3, 1, 4)


def _timm_attention(self: Any, x: torch.Tensor, attn_mask: torch.Tensor | None = None, is_causal: bool = False) -> torch.Tensor:
    """Stand in for timm's ``Attention.forward``.

    Args:
        self: the module.
        x: (batch, tokens, channels).
        attn_mask: bool or float, broadcastable to (batch, heads, tokens, tokens).
        is_causal: token i sees tokens 0 to i.

    Returns:
        (batch, tokens, output channels).

    Raises:
        RuntimeError: in training mode with attention dropout.
    """
    query, key, value = _heads(self, self.qkv(x)).unbind(0)
    query, key = self.q_norm(query), self.k_norm(key)
    out = attend(self, query, key, value, attn_mask, scale=self.scale, is_causal=is_causal).transpose(1, 2).flatten(2)
    # Releases differ: neither of these two is there in all of them, and either may be None.
    norm, gate = getattr(self, "norm", None), getattr(self, "gate", None)
    if norm is not None:
        out = norm(out)
    if gate is not None:
        out = out * gate(x).sigmoid()
    return self.proj_drop(self.proj(out))


def _worked_out(module: Any, weights: _Tensors, mask: torch.Tensor | None, function: Callable[[], _Tensors]) -> _Tensors:
    """Return ``function()``, what a Swin layer works out from its weights and a mask, such as a bias.

    With ``patch(..., keep_bias=True)`` it is worked out once, unless the mask is another tensor in every call. What was kept
    before ``torch.compile`` is an input of the compiled code, which cannot look at marks.
    """
    sources = weights if mask is None else (*weights, mask)
    keep = module._qflash_keep_bias
    if keep and torch.compiler.is_dynamo_compiling():
        kept = None if _needs_gradient(weights) else module._qflash_kept
        return kept.result if kept is not None and kept.is_of(sources) else function()
    traced = torch.compiler.is_compiling() or torch.jit.is_tracing() or has_torch_function(sources)
    keep = keep and not traced
    if keep and mask is not None and module._qflash_mask() is not mask:
        module.__dict__["_qflash_mask"] = weakref.ref(mask)
        keep = False
    return _keep(module, sources, function) if keep and not _needs_gradient(weights) else function()


def _attend_windows(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor, mask: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:  # fmt: skip
    """Attend within windows, (images * windows, heads, tokens, head_dim), join the heads and project: (..., tokens, channels).

    The bias has the mask in it, where there is one.
    """
    if mask is None:
        out = attend(module, query, key, value, bias, scale=scale)
    else:
        # With the windows in a dimension of their own the mask broadcasts over the images: its size does not
        # depend on the batch.
        windows = mask.shape[0]
        query, key, value = (part.unflatten(0, (-1, windows)) for part in (query, key, value))
        out = attend(module, query, key, value, bias, scale=scale).flatten(0, 1)
    return module.proj_drop(module.proj(out.transpose(1, 2).flatten(2)))


def _timm_window_attention(self: Any, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Stand in for the forward of timm's Swin ``WindowAttention``.

    Args:
        self: the module.
        x: (images * windows, tokens, channels), the windows of one image next to each other.
        mask: float (windows, tokens, tokens) for shifted windows, added to the scores, or None.

    Returns:
        (images * windows, tokens, channels).

    Raises:
        RuntimeError: in training mode with attention dropout.
    """
    query, key, value = _heads(self, self.qkv(x)).unbind(0)
    table, index = self.relative_position_bias_table, self.relative_position_index
    (bias,) = _worked_out(self, (table, index), mask, lambda: (window_bias(table, index, mask),))
    return _attend_windows(self, query, key, value, bias, mask, self.scale)


def _cosine_constants(module: Any, mask: torch.Tensor | None) -> _Tensors:
    """Return what a Swin V2 layer works out from its weights: bias and mask, scales of heads, bias of the projection if any.

    The network of the continuous bias gives a number for each distance, which a sigmoid bounds before it is looked up.
    """
    table = 16 * torch.sigmoid(module.cpb_mlp(module.relative_coords_table).view(-1, module.num_heads))
    bias = window_bias(table, module.relative_position_index, mask)
    scale = module.logit_scale.clamp(max=math.log(100.0)).exp()
    if module.q_bias is None:
        return bias, scale
    return bias, scale, torch.cat((module.q_bias, module.k_bias, module.v_bias))


def _timm_cosine_window_attention(self: Any, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Stand in for the forward of timm's Swin V2 ``WindowAttention``: queries and keys of length one, a scale a head.

    Arguments, result and error are those of :func:`_timm_window_attention`.
    """
    weights = (self.logit_scale, self.relative_coords_table, self.relative_position_index, *self.cpb_mlp.parameters())
    if self.q_bias is not None:
        weights = (*weights, self.q_bias, self.k_bias, self.v_bias)
    bias, scale, *rest = _worked_out(self, weights, mask, lambda: _cosine_constants(self, mask))
    if not rest:
        packed = self.qkv(x)
    elif self.qkv_bias_separate:
        packed = self.qkv(x) + rest[0]
    else:
        packed = torch.nn.functional.linear(x, self.qkv.weight, rest[0])
    heads = _heads(self, packed)
    # queries and keys in one go
    query, key = torch.nn.functional.normalize(heads[:2], dim=-1).unbind(0)
    return _attend_windows(self, query * scale, key, heads[2], bias, mask, 1.0)


# which classes are replaced, and the forward that they get; integrations/patching.py changes the class of a module
ADAPTERS: tuple[Adapter, ...] = (
    Adapter(
        "timm Attention (ViT, DeiT and relatives)",
        "timm",
        ("timm.layers.attention:Attention", "timm.models.vision_transformer:Attention"),
        _timm_attention,
    ),
    Adapter("timm WindowAttention (Swin)", "timm", ("timm.models.swin_transformer:WindowAttention",), _timm_window_attention),
    Adapter(
        "timm WindowAttention (Swin V2)", "timm", ("timm.models.swin_transformer_v2:WindowAttention",),
        _timm_cosine_window_attention,
    ),
)  # fmt: skip
"""The supported families."""
