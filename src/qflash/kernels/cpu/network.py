"""Launches of ``network.c``: layers of integer networks on the CPU, with the bits of :mod:`qflash.specification.layers`."""

from __future__ import annotations

import ctypes

import torch

from ...specification.layers import ACTIVATIONS, Activation, LinearIntegers, row_constants
from . import launch

_Linear = launch.arguments_type(
    ("x", "weight", "bias", "multiplier", "residual", "activation_multiplier", "activation_offset", "out"), 9
)
_Gated = launch.arguments_type(("x", "multiplier", "offset", "out"), 6)
_LayerNorm = launch.arguments_type(("h", "gain", "offset", "residual", "out"), 11)
_Narrow = launch.arguments_type(("h", "multiplier", "offset", "out"), 5)


def _number(activation: str) -> int:
    """Return an activation's number in ``network.c``."""
    return 1 + list(ACTIVATIONS).index(activation)


def launch_linear(
    x: torch.Tensor, layer: LinearIntegers, out_dtype: torch.dtype, residual: torch.Tensor | None, activation: Activation | None
) -> torch.Tensor:
    """Run a linear layer and what is fused with it: :meth:`qflash.reference_backend.Backend.linear`."""
    weight, bias, multiplier, left = layer
    outputs, inputs = weight.shape
    out = torch.empty((*x.shape[:-1], outputs), dtype=out_dtype, device="cpu")
    if out.numel() == 0:
        return out
    # held until the call returns: these may be copies
    x, weight, bias, multiplier = x.contiguous(), weight.contiguous(), bias.contiguous(), multiplier.contiguous()
    residual = None if residual is None else residual.contiguous()
    factors = (None, None) if activation is None else (activation.multiplier.contiguous(), activation.offset.contiguous())
    tensors = (x, weight, bias, multiplier, residual, *factors, out)
    rows = out.numel() // outputs
    arguments = _Linear(
        *(0 if tensor is None else tensor.data_ptr() for tensor in tensors),
        (
            rows, inputs, outputs, left, out.element_size(), 0 if activation is None else activation.shift,
            launch.threads_for(rows * inputs * outputs), x.element_size(),
            0 if activation is None else _number(activation.name),
        ),
    )  # fmt: skip
    launch.check_memory(launch.load().qflash_linear(ctypes.byref(arguments)), "for the packed weights of a linear layer")
    return out


def launch_layer_norm(
    h: torch.Tensor, epsilon: int, gain: torch.Tensor, offset: torch.Tensor, shift: int, out_dtype: torch.dtype, *,
    centred: bool, residual: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """Normalise rows; arguments are those of :func:`qflash.network.operators.norms.integer_norm`, which checks them."""
    out = torch.empty(h.shape, dtype=out_dtype, device="cpu")
    if out.numel() == 0:
        return out
    h, gain, offset = h.contiguous(), gain.contiguous(), offset.contiguous()
    residual = None if residual is None else residual.contiguous()
    channels = h.shape[-1]
    arguments = _LayerNorm(
        *(0 if x is None else x.data_ptr() for x in (h, gain, offset, residual, out)),
        (
            h.numel() // channels, channels, epsilon, shift, out.element_size(), launch.threads_for(8 * h.numel()),
            *row_constants(channels), centred,
        ),
    )  # fmt: skip
    launch.load().qflash_layer_norm(ctypes.byref(arguments))
    return out


def launch_gated(
    x: torch.Tensor, gate_multiplier: int, multiplier: torch.Tensor, offset: torch.Tensor, activation: str,
    out_dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """Run a gated product; arguments are those of :func:`qflash.network.operators.gated.gated`, which checks them."""
    channels = x.shape[-1] // 2
    out = torch.empty((*x.shape[:-1], channels), dtype=out_dtype, device="cpu")
    if out.numel() == 0:
        return out
    x, multiplier, offset = x.contiguous(), multiplier.contiguous(), offset.contiguous()
    arguments = _Gated(
        *(tensor.data_ptr() for tensor in (x, multiplier, offset, out)),
        (
            out.numel() // channels, channels, gate_multiplier, _number(activation), out.element_size(),
            launch.threads_for(8 * out.numel()),
        ),
    )  # fmt: skip
    launch.load().qflash_gated(ctypes.byref(arguments))
    return out


def launch_narrow(
    h: torch.Tensor, multiplier: torch.Tensor, left: int, offset: torch.Tensor, out_dtype: torch.dtype
) -> torch.Tensor:
    """Bring rows to int8; arguments are those of :func:`qflash.network.operators.narrow.integer_narrow`, which checks them."""
    out = torch.empty(h.shape, dtype=out_dtype, device="cpu")
    if out.numel() == 0:
        return out
    h, multiplier, offset = h.contiguous(), multiplier.contiguous(), offset.contiguous()
    channels = h.shape[-1]
    arguments = _Narrow(
        *(x.data_ptr() for x in (h, multiplier, offset, out)),
        (h.numel() // channels, channels, left, launch.threads_for(2 * h.numel()), out.element_size()),
    )
    launch.load().qflash_narrow(ctypes.byref(arguments))
    return out
