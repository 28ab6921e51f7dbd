"""Layers of an integer network on a GPU: which kernel takes a call, and its launch."""

from __future__ import annotations

import torch

from .gluon.sm90 import launch as sm90
from .launch_arguments import LinearCall
from .triton import network as portable


def launch_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    multiplier: torch.Tensor,
    left: int,
    residual: torch.Tensor | None,
    out_dtype: torch.dtype,
    gelu: tuple[torch.Tensor, torch.Tensor, int] | None = None,
) -> torch.Tensor:
    """Run a linear layer and what is fused with it.

    Arguments are those of :func:`qflash.network.execution.int8_linear`, which checks them.

    Args:
        gelu: M, B and shift of :func:`qflash.network.operators.gelu_int8`, for int8 outputs.
    """
    outputs, inputs = weight.shape
    out = torch.empty((*x.shape[:-1], outputs), dtype=out_dtype, device=x.device)
    if out.numel() == 0:
        return out
    if gelu is not None:
        gelu = gelu[0].contiguous(), gelu[1].contiguous(), gelu[2]
    if residual is not None:
        residual = residual.contiguous().view(-1, outputs)
    call = LinearCall(
        x.contiguous().view(-1, inputs), weight.contiguous(), bias.contiguous(), multiplier.contiguous(), left, residual,
        gelu, out.view(-1, outputs),
    )  # fmt: skip
    (sm90.linear_launch(call) if sm90.accepts_linear(call) else portable.linear_launch(call)).run()
    return out


def launch_layer_norm(
    h: torch.Tensor, epsilon: int, gain: torch.Tensor, offset: torch.Tensor, shift: int, out_dtype: torch.dtype
) -> torch.Tensor:
    """Normalise rows; arguments are those of :func:`qflash.network.execution.integer_layer_norm`, which checks them."""
    out = torch.empty(h.shape, dtype=out_dtype, device=h.device)
    if out.numel():
        rows, channels = h.contiguous().view(-1, h.shape[-1]), h.shape[-1]
        portable.layer_norm_launch(rows, epsilon, gain.contiguous(), offset.contiguous(), shift, out.view(-1, channels)).run()
    return out
