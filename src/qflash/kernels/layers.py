"""Layers of an integer network on a GPU: which kernel takes a call, and its launch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from ..specification.gated import GatedIntegers
from ..specification.layers import Activation, LinearIntegers
from .gluon.sm90 import launch as sm90
from .launch_arguments import LinearCall, Places
from .settled import weights_were_written
from .triton import network as portable
from .triton.gated import gated_launch
from .triton.rotary import rotary_launch


def launch_linear(
    x: torch.Tensor,
    layer: LinearIntegers,
    out_dtype: torch.dtype,
    residual: torch.Tensor | None,
    activation: Activation | None,
    scatter: torch.Tensor | None,
) -> torch.Tensor:
    """Run a linear layer and what is fused with it: :meth:`qflash.reference_backend.Backend.linear`."""
    outputs = layer.weight.shape[0]
    out = torch.empty((*x.shape[:-1], outputs), dtype=out_dtype, device=x.device)
    places = None
    if scatter is not None:
        tokens = x.shape[1]
        places = Places(scatter.contiguous(), tokens, tokens, 0, tokens)
    _run_linear(LinearCall(x, *layer, residual, activation, out, places))
    return out


def launch_linear_gated(x: torch.Tensor, layer: LinearIntegers, product: GatedIntegers, out_dtype: torch.dtype) -> torch.Tensor:
    """Run a linear layer and a gated product: :meth:`qflash.reference_backend.Backend.linear_gated`."""
    out = torch.empty((*x.shape[:-1], len(product.offset)), dtype=out_dtype, device=x.device)
    activation = Activation(product.activation, product.multiplier, product.offset, product.gate_multiplier)
    call = _as_rows(LinearCall(x, *layer, None, activation, out, gated=True))
    if call is not None:
        if sm90.linear_refusal(call):
            return launch_gated(launch_linear(x, layer, torch.int16, None, None, None), *product, out_dtype)
        sm90.linear_launch(call).run()
    return out


def _run_linear(call: LinearCall) -> None:
    """Run a layer whose tensors, but for the output, may have any memory format and any leading dimensions."""
    rows = _as_rows(call)
    if rows is not None:
        (portable if sm90.linear_refusal(rows) else sm90).linear_launch(rows).run()


def _as_rows(call: LinearCall) -> LinearCall | None:
    """Return the call with contiguous tensors of two dimensions; None where there is nothing to do."""
    outputs, inputs = call.weight.shape
    if call.x.numel() == 0 or outputs == 0:
        return None
    made = call.activation
    if not call.weight.is_contiguous():
        weights_were_written()  # the copy that is made here
    if made is not None:
        made = made._replace(multiplier=made.multiplier.contiguous(), offset=made.offset.contiguous())
    return dataclasses.replace(
        call,
        x=call.x.contiguous().view(-1, inputs),
        weight=call.weight.contiguous(),
        bias=call.bias.contiguous(),
        multiplier=call.multiplier.contiguous(),
        residual=None if call.residual is None else call.residual.contiguous().view(-1, outputs),
        activation=made,
        out=call.out.view(-1, call.out.shape[-1]),
    )


def launch_embedding(
    images: torch.Tensor,
    patch_size: Sequence[int],
    layer: LinearIntegers,
    position: torch.Tensor | None,
    prefix: torch.Tensor | None,
) -> torch.Tensor:
    """Embed patches: :meth:`qflash.reference_backend.Backend.embed`."""
    batch, _, height, width = images.shape
    patches = (height // patch_size[0]) * (width // patch_size[1])
    before = 0 if prefix is None else prefix.shape[1]
    outputs, inputs = layer.weight.shape
    out = torch.empty((batch, before + patches, outputs), dtype=torch.int16, device=images.device)
    if out.numel() == 0:
        return out
    x = torch.empty((batch, patches, inputs), dtype=torch.int8, device=images.device)
    portable.patches_launch(images.contiguous(), patch_size, x, None if prefix is None else prefix.contiguous(), out).run()
    places = Places(None, patches, before + patches, before, 0)
    _run_linear(LinearCall(x, *layer, position, None, out, places))
    return out


def launch_layer_norm(
    h: torch.Tensor,
    epsilon: int,
    gain: torch.Tensor,
    offset: torch.Tensor,
    shift: int,
    out_dtype: torch.dtype,
    gather: torch.Tensor | None = None,
    *,
    centred: bool = True,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Normalise rows; arguments are those of :func:`qflash.network.operators.norms.integer_norm`, which checks them."""
    channels = len(gain)
    shape = h.shape if gather is None else (h.shape[0], gather.shape[0], channels)
    out = torch.empty(shape, dtype=out_dtype, device=h.device)
    if out.numel():
        if gather is not None or not portable.heads_apart(h):
            h = h.contiguous()
        portable.layer_norm_launch(
            h, epsilon, gain.contiguous(), offset.contiguous(), shift, out.view(-1, channels),
            None if gather is None else gather.contiguous(), centred=centred,
            residual=None if residual is None else residual.contiguous(),
        ).run()  # fmt: skip
    return out


def launch_narrow(
    h: torch.Tensor, multiplier: torch.Tensor, left: int, offset: torch.Tensor, out_dtype: torch.dtype,
    gather: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Bring rows to int8; arguments are those of :func:`qflash.network.operators.narrow.integer_narrow`, which checks them."""
    shape = h.shape if gather is None else (h.shape[0], gather.shape[0], len(offset))
    out = torch.empty(shape, dtype=out_dtype, device=h.device)
    if out.numel():
        portable.narrow_launch(
            h.contiguous(), multiplier.contiguous(), left, offset.contiguous(), out,
            None if gather is None else gather.contiguous(),
        ).run()  # fmt: skip
    return out


def launch_mean(
    x: torch.Tensor, multiplier: torch.Tensor, left: int, offset: torch.Tensor, out_dtype: torch.dtype
) -> torch.Tensor:
    """Average tokens; arguments are those of :func:`qflash.network.execution.integer_mean`, which checks them."""
    out = torch.empty((x.shape[0], x.shape[2]), dtype=out_dtype, device=x.device)
    if out.numel():
        # tokens without the prefix are part of a larger tensor
        x = x if x[0].is_contiguous() else x.contiguous()
        portable.mean_launch(x, multiplier.contiguous(), left, offset.contiguous(), out).run()
    return out


def launch_gated(
    x: torch.Tensor, gate_multiplier: int, multiplier: torch.Tensor, offset: torch.Tensor, activation: str,
    out_dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """Run a gated product; arguments are those of :func:`qflash.network.operators.gated.gated`, which checks them."""
    channels = x.shape[-1] // 2
    out = torch.empty((*x.shape[:-1], channels), dtype=out_dtype, device=x.device)
    if out.numel():
        rows = x.contiguous().view(-1, 2 * channels)
        made = out.view(-1, channels)
        gated_launch(rows, gate_multiplier, multiplier.contiguous(), offset.contiguous(), activation, made).run()
    return out


def launch_rotary(
    x: torch.Tensor, turns: torch.Tensor, offset: torch.Tensor, multiplier: torch.Tensor, out_dtype: torch.dtype
) -> torch.Tensor:
    """Rotate pairs of channels; arguments are those of :func:`qflash.network.operators.rotary.rotary`, which checks them."""
    out = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    if out.numel():
        rotary_launch(x.contiguous(), turns.contiguous(), offset.contiguous(), multiplier.contiguous(), out).run()
    return out
