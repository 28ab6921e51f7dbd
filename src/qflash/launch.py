"""Repeating a call cheaply: what a call found out for tensors of one shape is kept and done again.

Checking arguments, going through PyTorch's dispatcher and binding fifty kernel arguments takes longer than a vision
transformer's attention takes on the GPU. All of it depends only on shapes, strides, alignment and options. The first
call with some of these goes the whole way; the next ones look up what it found and launch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from .backends import resolve_backend

if TYPE_CHECKING:
    from .kernels.attention import Call

Tensors = Sequence["torch.Tensor | None"]


class Plan(NamedTuple):
    """A call that can be repeated.

    Attributes:
        run: takes the tensors of such a call, in order, and returns its output.
        output_scale: the scale of an int8 output that was given as a number.
    """

    run: Callable[..., torch.Tensor]
    output_scale: torch.Tensor | None


MOST_PLANS = 512
_plans: OrderedDict[Hashable, Plan] = OrderedDict()
_mode_depth = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack


def _plain(tensors: Tensors) -> bool:
    """Tell whether nobody watches: no subclass, no tracing, no dispatch or function mode, no gradient; on the current GPU."""
    if (
        torch.compiler.is_compiling()
        or _mode_depth()
        or _function_modes()
        or torch._C._functorch.maybe_current_level() is not None
        or not torch.cuda.is_initialized()
    ):
        return False
    current, gradients = torch.cuda.current_device(), torch.is_grad_enabled()
    for x in tensors:
        if x is not None and (
            type(x) is not torch.Tensor or not x.is_cuda or x.device.index != current or (gradients and x.requires_grad)
        ):
            return False
    return True


def _signature(tensors: Tensors, options: Hashable) -> Hashable:
    """Everything a launch depends on but the addresses; of those how far they are from a multiple of 16."""
    about: list[Hashable] = [options, torch.cuda.current_device()]  # all tensors are there
    for x in tensors:
        about.append(None if x is None else (x.shape, x.stride(), x.dtype, x.data_ptr() & 15))
    return tuple(about)


def find(tensors: Tensors, options: Hashable) -> Plan | None:
    """Return what repeats an earlier call with the same signature, or None: then the call has to go the whole way.

    Args:
        tensors: of the call, as given, in an order of the caller's; not yet checked.
        options: all its other arguments, as given.
    """
    if not _plain(tensors) or not _plans:
        return None
    try:
        return _plans.get(_signature(tensors, options))
    except TypeError:  # an option that cannot be hashed: the whole way says what is wrong with it
        return None


def remember(
    tensors: Tensors,
    options: Hashable,
    backend: str,
    views: Tensors,
    launches: Callable[[], list[Call]],
    shape: Sequence[int],
    dtype: torch.dtype,
    places: dict[str, int],
    output_scale: torch.Tensor | None = None,
) -> None:
    """Keep a call that went the whole way, if it is one launch on plain tensors of the current GPU.

    Args:
        tensors, options: as for :func:`find`.
        backend: as the caller named it.
        views: the tensors as the operator took them; only views of the caller's qualify.
        launches: returns the kernel launches, or none where they are not worth keeping.
        shape, dtype: of the output, as the caller returns it.
        places: the kernel's names for those of the tensors that it reads, and their numbers.
        output_scale: see :class:`Plan`.
    """
    if not _plain(tensors) or torch.cuda.is_current_stream_capturing():
        return
    query = tensors[0]
    if query is None or resolve_backend(backend, query.device) != "triton":
        return
    for given, view in zip(tensors, views, strict=True):
        if given is not None and (view is None or given.data_ptr() != view.data_ptr()):
            return
    if 0 in shape:
        return
    calls = launches()
    if len(calls) != 1:
        return
    _plans[_signature(tensors, options)] = Plan(calls[0].prepare(shape, dtype, query.device, places), output_scale)
    if len(_plans) > MOST_PLANS:
        _plans.popitem(last=False)
