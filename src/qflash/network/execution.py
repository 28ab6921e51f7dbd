"""The operators of an integer network as PyTorch sees them (``torch.ops.qflash``), and what they run.

The reference is :mod:`qflash.network.operators`; the kernels return the same bits wherever its bounds hold.
"""

from __future__ import annotations

from typing import Any

import torch

from ..backends import resolve_backend
from ..validation import check_backend, check_tensor
from . import operators as op

_LIBRARY = torch.library.Library("qflash", "FRAGMENT")
_LIBRARY.define(
    "int8_linear(Tensor x, Tensor weight, Tensor bias, Tensor multiplier, int left, Tensor? residual, "
    "ScalarType out_dtype, str backend) -> Tensor"
)
_LIBRARY.define(
    "int8_linear_gelu(Tensor x, Tensor weight, Tensor bias, Tensor multiplier, int left, "
    "Tensor gelu_multiplier, Tensor gelu_offset, int gelu_shift, str backend) -> Tensor"
)
_LIBRARY.define(
    "integer_layer_norm(Tensor h, int epsilon, Tensor gain, Tensor offset, int shift, ScalarType out_dtype, str backend) "
    "-> Tensor"
)

MAX_EPSILON = 1 << 53
"""Largest epsilon of a normalisation, with which its variance stays below 2**55."""


def _check_number(name: str, x: int, low: int, high: int) -> None:
    if not low <= x <= high:
        raise ValueError(f"{name} must be {low} to {high}, got {x}")


def _check_constants(like: torch.Tensor, size: int, **tensors: torch.Tensor) -> None:
    """Require int32 vectors, a number for each output or channel, where ``like`` is."""
    for name, x in tensors.items():
        check_tensor(name, x, (torch.int32,), 1)
        if x.shape != (size,):
            raise ValueError(f"{name} must have shape ({size},), got {tuple(x.shape)}")
        _check_device(name, x, like)


def _check_device(name: str, x: torch.Tensor, like: torch.Tensor) -> None:
    if x.device != like.device:
        raise ValueError(f"{name} is on {x.device}, the activations are on {like.device}; they must agree")


def _check_output(out_dtype: torch.dtype, backend: str) -> None:
    if out_dtype not in op.LIMITS:
        raise TypeError(f"out_dtype must be int8, int16 or int32, got {str(out_dtype).removeprefix('torch.')}")
    check_backend(backend)


def _check_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    multiplier: torch.Tensor,
    left: int,
    residual: torch.Tensor | None,
    out_dtype: torch.dtype,
    backend: str,
) -> None:
    _check_output(out_dtype, backend)
    check_tensor("x", x, (torch.int8,), 1)
    check_tensor("weight", weight, (torch.int8,), 2)
    if weight.dim() != 2 or weight.shape[1] < 1:
        raise ValueError(f"weight must be (outputs, inputs) with at least one input, got shape {tuple(weight.shape)}")
    if x.shape[-1] != weight.shape[1]:
        raise ValueError(f"x must have the weight's {weight.shape[1]} inputs as its last dimension, got shape {tuple(x.shape)}")
    _check_device("weight", weight, x)
    _check_constants(x, weight.shape[0], bias=bias, multiplier=multiplier)
    _check_number("left", left, 0, 30)
    if residual is None:
        return
    check_tensor("residual", residual, (torch.int16,), 1)
    if out_dtype != torch.int16:
        raise TypeError(f"out_dtype must be int16 with a residual, got {str(out_dtype).removeprefix('torch.')}")
    expected = (*x.shape[:-1], weight.shape[0])
    if residual.shape != expected:
        raise ValueError(f"residual must have the output's shape {tuple(expected)}, got {tuple(residual.shape)}")
    _check_device("residual", residual, x)


def _check_gelu(x: torch.Tensor, outputs: int, multiplier: torch.Tensor, offset: torch.Tensor, shift: int) -> None:
    _check_constants(x, outputs, gelu_multiplier=multiplier, gelu_offset=offset)
    _check_number("gelu_shift", shift, 0, 30)


def _check_layer_norm(
    h: torch.Tensor, epsilon: int, gain: torch.Tensor, offset: torch.Tensor, shift: int, out_dtype: torch.dtype, backend: str
) -> None:
    _check_output(out_dtype, backend)
    check_tensor("h", h, (torch.int16,), 1)
    channels = h.shape[-1]
    if not 1 <= channels <= op.MAX_CHANNELS:
        raise ValueError(f"h must have 1 to {op.MAX_CHANNELS} channels, got shape {tuple(h.shape)}")
    _check_constants(h, channels, gain=gain, offset=offset)
    _check_number("epsilon", epsilon, 0, MAX_EPSILON)
    _check_number("shift", shift, 1, 31)


def _kernels(backend: str, device: torch.device) -> Any:
    """Return the module with a back end's launches of layers; None for the reference, which has none."""
    resolved = resolve_backend(backend, device)
    if resolved == "cpu":
        from ..kernels.cpu import network as cpu

        return cpu
    if resolved == "triton":
        from ..kernels import layers as gpu

        return gpu
    return None


def int8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    multiplier: torch.Tensor,
    left: int,
    residual: torch.Tensor | None,
    out_dtype: torch.dtype,
    backend: str,
) -> torch.Tensor:
    """Return ``saturate(residual + rescale(x W))``; see :class:`qflash.network.modules.Linear`.

    Args:
        x: int8 (..., inputs).
        weight: int8 (outputs, inputs).
        bias, multiplier: int32 (outputs,).
        left: 0 to 30.
        residual: int16 (..., outputs) for int16 outputs, or None.
        out_dtype: int8, int16 or int32.
        backend: see :func:`qflash.attention`.

    Raises:
        TypeError: a tensor or the output has another dtype.
        ValueError: a shape, a device or a number does not fit, or the back end cannot run there.
    """
    _check_linear(x, weight, bias, multiplier, left, residual, out_dtype, backend)
    kernels = _kernels(backend, x.device)
    if kernels is not None:
        launched: torch.Tensor = kernels.launch_linear(x, weight, bias, multiplier, left, residual, out_dtype)
        return launched
    out = op.rescale(op.integer_matmul(x, weight), left, bias, multiplier)
    return op.saturate(out if residual is None else out + residual, out_dtype)


def int8_linear_gelu(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    multiplier: torch.Tensor,
    left: int,
    gelu_multiplier: torch.Tensor,
    gelu_offset: torch.Tensor,
    gelu_shift: int,
    backend: str,
) -> torch.Tensor:
    """Return GELU of a linear layer in int8; see :class:`qflash.network.modules.LinearGelu`.

    Args:
        x, weight, bias, multiplier, left, backend: see :func:`int8_linear`.
        gelu_multiplier, gelu_offset: int32 (outputs,).
        gelu_shift: 0 to 30.

    Raises:
        TypeError, ValueError: as :func:`int8_linear`.
    """
    _check_linear(x, weight, bias, multiplier, left, None, torch.int8, backend)
    _check_gelu(x, weight.shape[0], gelu_multiplier, gelu_offset, gelu_shift)
    gelu = gelu_multiplier, gelu_offset, gelu_shift
    kernels = _kernels(backend, x.device)
    if kernels is not None:
        launched: torch.Tensor = kernels.launch_linear(x, weight, bias, multiplier, left, None, torch.int8, gelu)
        return launched
    u = op.rescale(op.integer_matmul(x, weight), left, bias, multiplier)
    return op.gelu_int8(u, *gelu)


def integer_layer_norm(
    h: torch.Tensor, epsilon: int, gain: torch.Tensor, offset: torch.Tensor, shift: int, out_dtype: torch.dtype, backend: str
) -> torch.Tensor:
    """Normalise int16 rows; see :class:`qflash.network.modules.LayerNorm`.

    Args:
        h: int16 (..., channels), 1 to 4096 of these.
        epsilon: 0 to 2**53.
        gain, offset: int32 (channels,).
        shift: 1 to 31.
        out_dtype: int8, int16 or int32.
        backend: see :func:`qflash.attention`.

    Raises:
        TypeError, ValueError: as :func:`int8_linear`.
    """
    _check_layer_norm(h, epsilon, gain, offset, shift, out_dtype, backend)
    kernels = _kernels(backend, h.device)
    if kernels is not None:
        launched: torch.Tensor = kernels.launch_layer_norm(h, epsilon, gain, offset, shift, out_dtype)
        return launched
    return op.layer_norm(h, epsilon, gain, offset, shift, out_dtype)


def _fake_int8_linear(x: torch.Tensor, weight: torch.Tensor, *arguments: Any) -> torch.Tensor:
    _check_linear(x, weight, *arguments)
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=arguments[4])


def _fake_int8_linear_gelu(x: torch.Tensor, weight: torch.Tensor, *arguments: Any) -> torch.Tensor:
    bias, multiplier, left, *gelu, backend = arguments
    _check_linear(x, weight, bias, multiplier, left, None, torch.int8, backend)
    _check_gelu(x, weight.shape[0], *gelu)
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=torch.int8)


def _fake_integer_layer_norm(h: torch.Tensor, *arguments: Any) -> torch.Tensor:
    _check_layer_norm(h, *arguments)
    return h.new_empty(h.shape, dtype=arguments[4])


for _name, _implementation, _fake in (
    ("int8_linear", int8_linear, _fake_int8_linear),
    ("int8_linear_gelu", int8_linear_gelu, _fake_int8_linear_gelu),
    ("integer_layer_norm", integer_layer_norm, _fake_integer_layer_norm),
):
    _LIBRARY.impl(_name, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"qflash::{_name}", _fake, lib=_LIBRARY)
