"""Launches of ``network.c``: layers of integer networks on the CPU, with the bits of :mod:`qflash.specification.layers`."""

from __future__ import annotations

import ctypes

import torch

from ...specification.layers import Gelu, LinearIntegers, row_constants
from . import launch

_Linear = launch.arguments_type(("x", "weight", "bias", "multiplier", "residual", "gelu_multiplier", "gelu_offset", "out"), 8)
_LayerNorm = launch.arguments_type(("h", "gain", "offset", "residual", "out"), 11)
_Narrow = launch.arguments_type(("h", "multiplier", "offset", "out"), 5)


def launch_linear(
    x: torch.Tensor, layer: LinearIntegers, out_dtype: torch.dtype, residual: torch.Tensor | None, gelu: Gelu | None
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
    gelu_multiplier, gelu_offset, gelu_shift = (None, None, 0) if gelu is None else gelu
    gelu_multiplier = None if gelu_multiplier is None else gelu_multiplier.contiguous()
    gelu_offset = None if gelu_offset is None else gelu_offset.contiguous()
    tensors = (x, weight, bias, multiplier, residual, gelu_multiplier, gelu_offset, out)
    rows = out.numel() // outputs
    arguments = _Linear(
        *(0 if tensor is None else tensor.data_ptr() for tensor in tensors),
        (
            rows, inputs, outputs, left, out.element_size(), gelu_shift, launch.threads_for(rows * inputs * outputs),
            x.element_size(),
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
