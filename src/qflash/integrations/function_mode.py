"""Integer attention for whatever a module calls while its forward runs: :class:`IntegerAttention`.

Calls of ``scaled_dot_product_attention`` are answered as they come. A product, a softmax over keys and another product are
put together to one call (:mod:`qflash.integrations.deferred_scores`). What does not qualify runs as the module wrote it,
and its reason is noted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from . import deferred_scores
from .adapter import refuse_dropout
from .deferred_scores import Deferred, work_out
from .sdpa import (
    _FLOAT,
    _MULTI_HEAD,
    NESTED,
    _multi_head_body,
    _process_attention,
    _process_multi_head,
    _thread,
    as_sdpa_returns,
    call_alone,
    has_nested,
)

AttentionFunction = Callable[..., torch.Tensor]
"""Takes query, key, value, mask, is_causal, scale and enable_gqa; raises ValueError or TypeError for what it does not take."""

NOT_SEEN = "its forward called neither scaled_dot_product_attention nor a softmax between two products"


class IntegerAttention(TorchFunctionMode):
    """Answers the attention that runs inside.

    Args:
        attend: the attention function.
        note: called with the reason for each attention that stays in floating point, and with None for each that does not.
    """

    def __init__(self, attend: AttentionFunction, note: Callable[[str | None], None]) -> None:
        super().__init__()
        self._attend, self._note = attend, note
        self.seen = 0
        self.broken: str | None = None
        self.weights = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _thread.decided:
            return func(*args, **kwargs)
        if func in (_FLOAT, _process_attention):
            return self._answer(*work_out(args), **work_out(kwargs))
        if func in (_MULTI_HEAD, _process_multi_head):
            with self:
                return _multi_head_body(*args, **kwargs)
        if deferred_scores.is_deferred(args) or deferred_scores.is_deferred(tuple(kwargs.values())):
            return deferred_scores.call(func, args, kwargs)
        if deferred_scores.is_product(func):
            product = deferred_scores.product(func, args, kwargs, self)
            if product is not None:
                return product
        if deferred_scores.name_of(func) == "softmax":
            self._see_softmax(args)
        return func(*args, **kwargs)

    def _answer(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """Stand for a call of scaled_dot_product_attention."""
        if dropout_p > 0.0:
            refuse_dropout(dropout_p)
        given = query, key, value, attn_mask
        if has_nested(given):
            self.note(NESTED)
            out = None
        else:
            heads = query.shape[-3] if query.dim() > 2 else 1
            if not enable_gqa and heads > 1 and key.dim() > 2 and key.shape[-3] == value.shape[-3] == 1:
                # one head of keys for all of the query's, which SDPA broadcasts
                key, value = (x.expand(*x.shape[:-3], heads, -1, -1) for x in (key, value))
            out = self._try(query, key, value, attn_mask, is_causal, scale, enable_gqa)
        if out is None:
            return call_alone(_FLOAT, (*given, dropout_p, is_causal), {"scale": scale, "enable_gqa": enable_gqa})
        return as_sdpa_returns(out, *given, is_causal, scale, enable_gqa)

    def _try(self, *arguments: Any) -> torch.Tensor | None:
        """Call the attention function; None, with the reason noted, if it does not take the arguments."""
        try:
            out = call_alone(self._attend, arguments, {})
        except (TypeError, ValueError) as error:
            self.note(str(error))
            return None
        self.note(None)
        return out

    def _see_softmax(self, args: Any) -> None:
        """Note a softmax in floating point, if it is one of three dimensions or more."""
        if args and isinstance(args[0], torch.Tensor) and args[0].dim() > 2:
            self.note(
                "its softmax is not one of a product of query and key"
                if self.broken is None
                else f"its scores go into {self.broken} before the softmax"
            )
            self.broken = None

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None, scale: float
    ) -> torch.Tensor | None:
        """Attend for deferred probabilities; None, with the reason noted, if the function does not take them."""
        return self._try(query, key, value, bias, False, scale, False)

    def note(self, reason: str | None) -> None:
        self.seen += 1
        self._note(reason)

    def worked_out(self, x: Deferred, name: str) -> None:
        """Hear that a deferred tensor is wanted by a function that has no part in attention."""
        if not x.is_softmax:
            self.broken = name
        elif x.is_answered:
            self.weights = True
        elif not x.is_noted:
            x.is_noted = True
            self.note(f"its probabilities go into {name}")
