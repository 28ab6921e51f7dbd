"""Repeating a call cheaply: what :func:`qflash.attention` did for tensors of one shape is kept and done again.

Checking arguments, going through PyTorch's dispatcher and binding fifty kernel arguments takes longer than a vision
transformer's attention takes on the GPU. All of it depends only on shapes, strides, alignment and options. The first
call with some of these goes the whole way; the next ones look up what it found and launch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable

import torch

from .backends import resolve_backend
from .recipe import Recipe

Repeat = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, "torch.Tensor | None"], torch.Tensor]

MOST_PLANS = 512
_plans: OrderedDict[Hashable, Repeat] = OrderedDict()
_mode_depth = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack


def _plain(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Tell whether nobody watches: no subclass, no tracing, no dispatch or function mode, no gradient; on the current GPU."""
    plain = torch.Tensor
    return (
        not torch.compiler.is_compiling()
        and type(query) is plain
        and type(key) is plain
        and type(value) is plain
        and (mask is None or type(mask) is plain)
        and query.is_cuda
        and query.device.index == torch.cuda.current_device()
        and _mode_depth() == 0
        and _function_modes() == 0
        and torch._C._functorch.maybe_current_level() is None
        and not (torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad))
    )


def _signature(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, options: Hashable
) -> Hashable:
    """Everything a launch depends on but the addresses; of those whether they are multiples of 16."""
    about_mask = None
    aligned = (query.data_ptr() | key.data_ptr() | value.data_ptr()) & 15
    if mask is not None:
        about_mask = (mask.shape, mask.stride(), mask.dtype, mask.device, mask.data_ptr() & 15)
    return (
        query.shape, query.stride(), key.shape, key.stride(), value.shape, value.stride(),
        query.dtype, key.dtype, value.dtype, query.device, key.device, value.device,
        aligned, about_mask, options,
    )  # fmt: skip


def find(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, options: Hashable
) -> Repeat | None:
    """Return what repeats an earlier call with the same signature, or None: then the call has to go the whole way.

    Args:
        options: all other arguments of :func:`qflash.attention`, as given.
    """
    if not _plain(query, key, value, mask) or not _plans:
        return None
    try:
        return _plans.get(_signature(query, key, value, mask, options))
    except TypeError:  # an option that cannot be hashed: the whole way says what is wrong with it
        return None


def remember(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    options: Hashable,
    *,
    canonical: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None],
    is_causal: bool,
    choices: Recipe,
    factor: float,
    backend: str,
) -> None:
    """Keep a call that went the whole way, if it is one launch on plain tensors of the current GPU.

    Args:
        options: as for :func:`find`.
        canonical: query, key, value and mask as the operator took them; only views of the caller's qualify.
        is_causal, choices, factor, backend: what the options came to: the recipe and the softmax scale resolved.
    """
    if not _plain(query, key, value, mask) or torch.cuda.is_current_stream_capturing():
        return
    if resolve_backend(backend, query.device) != "triton":
        return
    from .kernels.attention import fusable, prepare_fused

    q, k, v, m = canonical
    if not fusable(choices, q.shape[3], v.shape[3], k.shape[2]):
        return
    for given, view in ((query, q), (key, k), (value, v), (mask, m)):
        if given is not None and view is not None and given.data_ptr() != view.data_ptr():
            return
    # the kernel is specialised on the alignment of every address, the signature holds their common one
    if any(x.data_ptr() & 15 for x in (q, k, v)):
        return
    repeat = prepare_fused(q, k, v, m, is_causal, factor, choices, (*query.shape[:-1], value.shape[-1]))
    if repeat is None:
        return
    _plans[_signature(query, key, value, mask, options)] = repeat
    if len(_plans) > MOST_PLANS:
        _plans.popitem(last=False)
