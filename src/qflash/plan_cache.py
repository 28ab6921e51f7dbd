"""Repeating a call cheaply: what a call found out for tensors of one shape is kept and done again.

Checking arguments, going through PyTorch's dispatcher and binding fifty kernel arguments takes longer than a vision
transformer's attention takes on the GPU, and half as long as it takes on a CPU for one image. All of it depends only on
shapes, strides, alignment and options. The first call with some of these goes the whole way; the next ones look up what
it found and launch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from . import torch_internals

Tensors = Sequence["torch.Tensor | None"]
Run = Callable[..., torch.Tensor]
"""Takes the tensors of such a call, in order, and returns its output."""


MOST_PLANS = 512
_plans: OrderedDict[Hashable, Run] = OrderedDict()
_unrepeatable: OrderedDict[Hashable, bool] = OrderedDict()
"""Calls that turned out to be none that can be repeated; to find that out takes time, too."""
CPU = -1
"""Stands for the CPU where a GPU has its number."""


def place_of(tensors: Tensors) -> int | None:
    """Tell where a call runs on whose way nothing happens but a kernel: a GPU's number, or :data:`CPU`.

    None if there is a tensor that is no plain one (:func:`.torch_internals.has_plain_keys`), a subclass, tracing, a dispatch or
    function mode, a gradient or tangent, or tensors of several devices.
    """
    if torch.compiler.is_compiling() or not torch_internals.is_plain_state(torch_internals.thread_state()):
        return None
    gradients = torch.is_grad_enabled()
    place: int | None = None
    for x in tensors:
        if x is None:
            continue
        if type(x) is not torch.Tensor or not torch_internals.has_plain_keys(x) or (gradients and x.requires_grad):
            return None
        here = x.device.index if x.is_cuda else CPU
        if place is not None and here != place:
            return None
        place = here
    return place


def _signature(state: int, tensors: Tensors, options: tuple[Hashable, ...]) -> Hashable:
    """Everything that tells a call from another but the addresses; of those how far they are from a multiple of 16.

    No call that :func:`place_of` refuses has the signature of one that was kept. What it asks a tensor's dispatch keys shows
    here, and sooner, by the class, the device, a negative view's bit and an address: a tensor that is no strided memory has
    none, or raises.
    """
    gradients = torch.is_grad_enabled()
    device = None
    # options with their types: True, 1 and 1.0 are equal, and not all of them allowed
    about: list[Hashable] = [state, *options, *map(type, options)]
    for x in tensors:
        if x is None:
            about.append(None)
            continue
        if type(x) is not torch.Tensor:
            return None
        device, address = x.device, x.data_ptr()
        about += (
            device, x.dtype, x.shape, x.stride(), address & 15 if address else None, x.is_neg(),
            gradients and x.requires_grad,
        )  # fmt: skip
    # which GPU is the current one plays no part
    about.append(None if device is not None and device.type == "cuda" else torch.get_num_threads())
    return tuple(about)


def _look_up(calls: OrderedDict[Hashable, Any], tensors: Tensors, options: tuple[Hashable, ...]) -> Any:
    """Return what is kept of a call, or None."""
    if not calls:
        return None
    state = torch_internals.thread_state()
    if state is None:
        return None
    try:
        return calls.get(_signature(state, tensors, options))
    except (TypeError, AttributeError, RuntimeError):  # what the whole way says what is wrong with
        return None


def find(tensors: Tensors, options: tuple[Hashable, ...]) -> Run | None:
    """Return what repeats an earlier call with the same signature, or None: then the call has to go the whole way.

    Args:
        tensors: of the call, as given, in an order of the caller's; not yet checked.
        options: all its other arguments, as given.
    """
    if torch.compiler.is_compiling():  # first, or the compiler guards how many plans there are
        return None
    run: Run | None = _look_up(_plans, tensors, options)
    return run


def find_given(tensors: Tensors, options: tuple[Hashable, ...]) -> Run | None:
    """Return what :func:`find` does, for tensors at which nothing was looked yet; None where autocast may change them.

    Nested tensors, subclasses, and what function modes see have no plan: their calls go the whole way.
    """
    if torch.compiler.is_compiling() or torch_internals.may_autocast():
        return None
    return find(tensors, options)


def is_unrepeatable(tensors: Tensors, options: tuple[Hashable, ...]) -> bool:
    """Tell whether a call with the same signature has turned out to be none that can be kept."""
    return _look_up(_unrepeatable, tensors, options) is not None


def remember(
    tensors: Tensors,
    options: tuple[Hashable, ...],
    views: Tensors,
    shape: Sequence[int],
    prepare: Callable[[], Run | None],
) -> None:
    """Keep a call that went the whole way, if it can be repeated on plain tensors of the CPU or of one GPU.

    Args:
        tensors, options: as for :func:`find`.
        views: the tensors as the operator took them; only views of the caller's qualify.
        shape: of the output.
        prepare: returns what repeats the call, taking ``tensors``; None where that is not worth keeping.
    """
    place = place_of(tensors)
    if place is None or 0 in shape or (place != CPU and _is_captured(tensors)):
        return
    for given, view in zip(tensors, views, strict=True):
        if given is not None and (view is None or given.data_ptr() != view.data_ptr()):
            return
    state = torch_internals.thread_state()
    assert state is not None  # or there is no place
    signature = _signature(state, tensors, options)
    if signature in _unrepeatable:
        return
    run = prepare()
    if run is None:
        _keep(_unrepeatable, signature, True)
    else:
        _keep(_plans, signature, run)


def _is_captured(tensors: Tensors) -> bool:
    """Tell whether launches on tensors of a GPU go into a CUDA graph now."""
    from .kernels.device import is_capturing

    return is_capturing(next(x.device for x in tensors if x is not None))


def _keep(calls: OrderedDict[Hashable, Any], signature: Hashable, what: Any) -> None:
    calls[signature] = what
    if len(calls) > MOST_PLANS:
        calls.popitem(last=False)
