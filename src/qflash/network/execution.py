"""The operators of an integer network as PyTorch sees them (``torch.ops.qflash``)."""

from __future__ import annotations

from typing import Any

import torch

from ..backends import resolve_backend
from . import operators as op

_LIBRARY = torch.library.Library("qflash", "FRAGMENT")
_LIBRARY.define(
    "int8_linear(Tensor x, Tensor weight, Tensor bias, Tensor multiplier, int left, int shift, Tensor? residual, "
    "ScalarType out_dtype, str backend) -> Tensor"
)
_LIBRARY.define(
    "int8_linear_gelu(Tensor x, Tensor weight, Tensor bias, Tensor multiplier, int left, int shift, int gelu_bits, "
    "Tensor gelu_multiplier, Tensor gelu_offset, int gelu_shift, str backend) -> Tensor"
)
_LIBRARY.define(
    "integer_layer_norm(Tensor h, int epsilon, Tensor gain, Tensor offset, int shift, ScalarType out_dtype, str backend) "
    "-> Tensor"
)


def int8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    multiplier: torch.Tensor,
    left: int,
    shift: int,
    residual: torch.Tensor | None,
    out_dtype: torch.dtype,
    backend: str,
) -> torch.Tensor:
    """Return ``saturate(residual + rescale(x W + b))``; see :class:`qflash.network.modules.Linear`."""
    resolve_backend(backend, x.device)
    out = op.rescale(op.accumulate(x, weight, bias, left), multiplier, left, shift)
    return op.saturate(out if residual is None else out + residual, out_dtype)


def int8_linear_gelu(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    multiplier: torch.Tensor,
    left: int,
    shift: int,
    gelu_bits: int,
    gelu_multiplier: torch.Tensor,
    gelu_offset: torch.Tensor,
    gelu_shift: int,
    backend: str,
) -> torch.Tensor:
    """Return GELU of a linear layer in int8; see :class:`qflash.network.modules.LinearGelu`."""
    resolve_backend(backend, x.device)
    u = op.rescale(op.accumulate(x, weight, bias, left), multiplier, left, shift)
    return op.gelu_int8(u, gelu_bits, gelu_multiplier, gelu_offset, gelu_shift)


def integer_layer_norm(
    h: torch.Tensor, epsilon: int, gain: torch.Tensor, offset: torch.Tensor, shift: int, out_dtype: torch.dtype, backend: str
) -> torch.Tensor:
    """Normalise int16 rows; see :class:`qflash.network.modules.LayerNorm`."""
    resolve_backend(backend, h.device)
    return op.layer_norm(h, epsilon, gain, offset, shift, out_dtype)


def _fake_int8_linear(x: torch.Tensor, weight: torch.Tensor, *arguments: Any) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=arguments[5])


def _fake_int8_linear_gelu(x: torch.Tensor, weight: torch.Tensor, *_: Any) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=torch.int8)


def _fake_integer_layer_norm(h: torch.Tensor, *arguments: Any) -> torch.Tensor:
    return h.new_empty(h.shape, dtype=arguments[4])


for _name, _implementation, _fake in (
    ("int8_linear", int8_linear, _fake_int8_linear),
    ("int8_linear_gelu", int8_linear_gelu, _fake_int8_linear_gelu),
    ("integer_layer_norm", integer_layer_norm, _fake_integer_layer_norm),
):
    _LIBRARY.impl(_name, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"qflash::{_name}", _fake, lib=_LIBRARY)
