"""What operators of integer networks ask of their arguments, and how they are defined: :func:`operator`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from ..specification import layers as op
from ..validation import check_backend, check_tensor

_LIBRARY = torch.library.Library("qflash", "FRAGMENT")
_Function = TypeVar("_Function", bound=Callable[..., torch.Tensor])


def operator(
    schema: str, check: Callable[..., Sequence[int]], dtype: torch.dtype | None = None
) -> Callable[[_Function], _Function]:
    """Define an operator of ``torch.ops.qflash``; a decorator of its implementation.

    Args:
        schema: name and arguments. The last is ``str backend``, the one before ``ScalarType out_dtype`` unless ``dtype`` says
            of which type the output is.
        check: looks at the arguments, those of fakes too, and returns the output's shape.
        dtype: see there.
    """
    name = schema.partition("(")[0]

    def define(function: _Function) -> _Function:
        @functools.wraps(function)
        def checked(*arguments: Any) -> torch.Tensor:
            check(*arguments)
            return function(*arguments)

        def fake(x: torch.Tensor, *arguments: Any) -> torch.Tensor:
            return x.new_empty(check(x, *arguments), dtype=arguments[-2] if dtype is None else dtype)

        _LIBRARY.define(f"{schema} -> Tensor")
        _LIBRARY.impl(name, checked, "CompositeExplicitAutograd")
        torch.library.register_fake(f"qflash::{name}", fake, lib=_LIBRARY)
        return checked  # type: ignore[return-value]

    return define


def check_number(name: str, x: int, low: int, high: int) -> None:
    """Require a number in its range."""
    if not low <= x <= high:
        raise ValueError(f"{name} must be {low} to {high}, got {x}")


def check_constants(like: torch.Tensor, size: int, **tensors: torch.Tensor) -> None:
    """Require int32 vectors, a number for each output or channel, where ``like`` is."""
    for name, x in tensors.items():
        check_tensor(name, x, (torch.int32,), 1)
        if x.shape != (size,):
            raise ValueError(f"{name} must have shape ({size},), got {tuple(x.shape)}")
        check_device(name, x, like)


def check_device(name: str, x: torch.Tensor, like: torch.Tensor) -> None:
    """Require a tensor where the activations are."""
    if x.device != like.device:
        raise ValueError(f"{name} is on {x.device}, the activations are on {like.device}; they must agree")


def check_output(out_dtype: torch.dtype, backend: str) -> None:
    """Require a type of outputs, and the name of a back end."""
    if out_dtype not in op.LIMITS:
        raise TypeError(f"out_dtype must be int8, int16 or int32, got {str(out_dtype).removeprefix('torch.')}")
    check_backend(backend)


def check_weight(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, multiplier: torch.Tensor, left: int) -> None:
    """Require weights of a linear layer, and what brings its sums to the outputs' unit."""
    check_tensor("weight", weight, (torch.int8,), 2)
    if weight.dim() != 2 or weight.shape[1] < 1:
        raise ValueError(f"weight must be (outputs, inputs) with at least one input, got shape {tuple(weight.shape)}")
    check_device("weight", weight, x)
    check_constants(x, weight.shape[0], bias=bias, multiplier=multiplier)
    check_number("left", left, 0, 30)


def check_tokens(name: str, x: torch.Tensor, tokens: int, once: bool) -> None:
    """Require numbers of tokens, each of them once if ``once``. On a GPU looking would wait; there kernels pass over others."""
    if x.device.type != "cpu" or x.numel() == 0:
        return
    if int(x.min()) < 0 or int(x.max()) >= tokens or (once and len(x.unique()) != tokens):
        raise ValueError(f"{name} must hold numbers below the {tokens} tokens{', each of them once' if once else ''}")


def check_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    multiplier: torch.Tensor,
    left: int,
    residual: torch.Tensor | None,
    scatter: torch.Tensor | None,
    out_dtype: torch.dtype,
    backend: str,
    inputs: tuple[torch.dtype, ...] = (torch.int8, torch.int16),
) -> tuple[int, ...]:
    """Check the arguments of :func:`.execution.int8_linear`; return the output's shape."""
    check_output(out_dtype, backend)
    check_tensor("x", x, inputs, 1)
    check_weight(x, weight, bias, multiplier, left)
    if x.shape[-1] != weight.shape[1]:
        raise ValueError(f"x must have the weight's {weight.shape[1]} inputs as its last dimension, got shape {tuple(x.shape)}")
    if scatter is not None:
        check_tensor("scatter", scatter, (torch.int32,), 1)
        if x.dim() != 3 or scatter.shape != x.shape[1:2]:
            raise ValueError(
                f"scatter must hold a place for every token of x, (batch, tokens, inputs), got {tuple(scatter.shape)} for "
                f"{tuple(x.shape)}"
            )
        check_device("scatter", scatter, x)
    shape = (*x.shape[:-1], weight.shape[0])
    check_residual(residual, shape, out_dtype, x)
    return shape


def check_residual(residual: torch.Tensor | None, shape: tuple[int, ...], out_dtype: torch.dtype, x: torch.Tensor) -> None:
    """Require None, or a residual for an int16 output of a shape, on the device of x."""
    if residual is None:
        return
    check_tensor("residual", residual, (torch.int16,), 1)
    if out_dtype != torch.int16:
        raise TypeError(f"out_dtype must be int16 with a residual, got {str(out_dtype).removeprefix('torch.')}")
    if residual.shape != shape:
        raise ValueError(f"residual must have the output's shape {shape}, got {tuple(residual.shape)}")
    check_device("residual", residual, x)


def check_gather(gather: torch.Tensor, h: torch.Tensor) -> None:
    """Require a table of the tokens that rows of h are made of."""
    check_tensor("gather", gather, (torch.int32,), 2)
    if h.dim() != 3 or gather.dim() != 2 or gather.shape[1] < 1:
        raise ValueError(
            f"gather must be (new tokens, pieces) for h (batch, tokens, channels), got {tuple(gather.shape)} for "
            f"{tuple(h.shape)}"
        )
    check_device("gather", gather, h)


def check_layer_norm(
    h: torch.Tensor,
    epsilon: int,
    gain: torch.Tensor,
    offset: torch.Tensor,
    shift: int,
    gather: torch.Tensor | None,
    out_dtype: torch.dtype,
    backend: str,
) -> tuple[int, ...]:
    """Check the arguments of :func:`.execution.integer_layer_norm`; return the output's shape."""
    check_output(out_dtype, backend)
    check_tensor("h", h, (torch.int16,), 1)
    channels = h.shape[-1]
    if gather is not None:
        check_gather(gather, h)
        channels *= gather.shape[1]
    if not 1 <= channels <= op.MAX_CHANNELS:
        joined = "" if gather is None else f" of {gather.shape[1]} tokens"
        raise ValueError(f"h must have 1 to {op.MAX_CHANNELS} channels{joined}, got shape {tuple(h.shape)}")
    check_constants(h, channels, gain=gain, offset=offset)
    check_number("epsilon", epsilon, 0, op.MAX_EPSILON)
    check_number("shift", shift, 1, 29)
    return tuple(h.shape) if gather is None else (h.shape[0], gather.shape[0], channels)
