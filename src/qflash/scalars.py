"""Numbers that come in a box: scalars of NumPy, tensors of one element."""

from __future__ import annotations

import sys
from typing import Any

import torch

from .torch_internals import in_transform


def unboxed(x: Any) -> Any:
    """Return the Python number, or truth value, in a scalar of NumPy or in a plain tensor or array of one element.

    Anything else comes back as it is. So does a tensor that needs a gradient, and one whose number is not known yet: on
    ``meta``, under ``torch.compile``, in a transform of ``torch.func``. A look into a tensor on a GPU waits for it.
    """
    if x is None or isinstance(x, (int, float, str)) or torch.compiler.is_compiling():
        return x
    if type(x) in (torch.Tensor, torch.nn.Parameter):
        is_known = x.layout == torch.strided and not x.is_meta and not x.requires_grad and not in_transform()
        return x.item() if is_known and x.numel() == 1 else x
    numpy = sys.modules.get("numpy")  # or there is no such scalar
    return x.item() if numpy is not None and isinstance(x, (numpy.generic, numpy.ndarray)) and x.size == 1 else x


def whole_number(name: str, x: Any, least: int | None = None) -> int:
    """Return an integer, also one in a box (:func:`unboxed`) or one that a compiler keeps open.

    Raises:
        TypeError: it is not an integer, or it is True or False.
        ValueError: it is below ``least``.
    """
    x = unboxed(x)
    if isinstance(x, bool) or not isinstance(x, (int, torch.SymInt)):
        raise TypeError(f"{name} must be an integer, got {type(x).__name__}")
    if least is not None and x < least:
        raise ValueError(f"{name} must be at least {least}, got {x}")
    return x  # type: ignore[return-value]
