"""Launches of ``network.c``: layers of integer networks on the CPU, with the bits of :mod:`qflash.specification.layers`.

All they do, copies too, are calls of C that :func:`.launch.run_call` makes, so that a whole forward pass can be noted.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...specification.layers import ACTIVATIONS, Activation, LinearIntegers, row_constants
from . import launch

LINEAR = launch.arguments_type(
    ("x", "weight", "bias", "multiplier", "residual", "activation_multiplier", "activation_offset", "out", "packed", "scratch"),
    9,
)
_Gated = launch.arguments_type(("x", "multiplier", "offset", "out"), 6)
_Rotary = launch.arguments_type(("x", "turns", "offset", "multiplier", "out"), 7)
_LayerNorm = launch.arguments_type(("h", "gain", "offset", "residual", "out"), 11)
_Narrow = launch.arguments_type(("h", "multiplier", "offset", "out"), 5)
_Mean = launch.arguments_type(("x", "multiplier", "offset", "out"), 7)
_Patches = launch.arguments_type(("x", "out"), 7)
_Rows = launch.arguments_type(("x", "index", "out"), 8)


def _move(x: torch.Tensor, index: torch.Tensor | None, out: torch.Tensor, strides: tuple[int, int], row: int) -> None:
    """Copy rows of ``row`` numbers from x to out (images, rows, row), whose rows lie together.

    Args:
        x: of any shape.
        index: int32, which row of an image of x each row is; None for all in their order.
        out: the same type.
        strides: of x, from image to image and from row to row.
        row: numbers.
    """
    size = x.element_size()
    images, rows = out.shape[:2]
    work = launch.threads_for(8 * out.numel())
    integers = images, rows, row * size, strides[0] * size, strides[1] * size, out.stride(0) * size, out.stride(1) * size, work
    launch.run_call("move_rows", _Rows, (x, index, out), integers)


def contiguous(x: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor with x's numbers."""
    if x.is_contiguous():
        return x
    # the last dimensions are rows; what is before them has at most two steps
    row, kept = 1, x.dim()
    while kept and x.stride(kept - 1) == row:
        kept -= 1
        row *= x.shape[kept]
    steps = [(size, stride) for size, stride in zip(x.shape[:kept], x.stride()[:kept], strict=True) if size != 1]
    while len(steps) > 1 and steps[-2][1] == steps[-1][0] * steps[-1][1]:
        steps[-2:] = [(steps[-2][0] * steps[-1][0], steps[-1][1])]
    if len(steps) > 2 or not x.numel():
        return x.contiguous()
    (images, image), (rows, step) = [(1, 0)] * (2 - len(steps)) + steps
    out = torch.empty(x.shape, dtype=x.dtype, device="cpu")
    _move(x, None, out.view(images, rows, row), (image, step), row)
    return out


def gather_rows(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return the rows ``index`` of each image of (images, rows, channels): (images, len(index), channels)."""
    x = contiguous(x)
    out = torch.empty((x.shape[0], index.numel(), x.shape[2]), dtype=x.dtype, device="cpu")
    if out.numel():
        _move(x, index.contiguous(), out, (x.stride(0), x.stride(1)), x.shape[2])
    return out


def gather_tokens(h: torch.Tensor, gather: torch.Tensor | None) -> torch.Tensor:
    """Run :func:`qflash.specification.layers.gather_tokens`; all tokens in their order for None."""
    if gather is None:
        return h
    return gather_rows(h, gather.flatten()).view(len(h), gather.shape[0], gather.shape[1] * h.shape[2])


def _number(activation: str) -> int:
    """Return an activation's number in ``network.c``."""
    return 1 + list(ACTIVATIONS).index(activation)


def launch_linear(
    x: torch.Tensor,
    layer: LinearIntegers,
    out_dtype: torch.dtype,
    residual: torch.Tensor | None,
    activation: Activation | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run a linear layer and what is fused with it: :meth:`qflash.reference_backend.Backend.linear`.

    Args:
        out: where its outputs go, contiguous; None for a new tensor.
    """
    weight, bias, multiplier, left = layer
    outputs, inputs = weight.shape
    if out is None:
        out = torch.empty((*x.shape[:-1], outputs), dtype=out_dtype, device="cpu")
    if out.numel() == 0:
        return out
    x, weight, bias, multiplier = contiguous(x), weight.contiguous(), bias.contiguous(), multiplier.contiguous()
    residual = None if residual is None else contiguous(residual)
    factors = (None, None) if activation is None else (activation.multiplier.contiguous(), activation.offset.contiguous())
    tensors = (x, weight, bias, multiplier, residual, *factors, out, None, None)
    rows = out.numel() // outputs
    integers = (
        rows, inputs, outputs, left, out.element_size(), 0 if activation is None else activation.shift,
        launch.threads_for(rows * inputs * outputs), x.element_size(), 0 if activation is None else _number(activation.name),
    )  # fmt: skip
    launch.run_call("linear", LINEAR, tensors, integers, "for the packed weights of a linear layer")
    return out


def launch_embedding(
    images: torch.Tensor,
    patch_size: Sequence[int],
    layer: LinearIntegers,
    position: torch.Tensor | None,
    prefix: torch.Tensor | None,
) -> torch.Tensor:
    """Embed patches: :meth:`qflash.reference_backend.Backend.embed`."""
    images = contiguous(images)
    batch, _, height, width = images.shape
    patches = (height // patch_size[0]) * (width // patch_size[1])
    before = 0 if prefix is None else prefix.shape[1]
    outputs, inputs = layer.weight.shape
    out = torch.empty((batch, before + patches, outputs), dtype=torch.int16, device="cpu")
    if out.numel() == 0:
        return out
    x = torch.empty((batch, patches, inputs), dtype=torch.int8, device="cpu")
    launch.run_call("patches", _Patches, (images, x), (*images.shape, *patch_size, launch.threads_for(8 * images.numel())))
    if position is None and prefix is None:
        return launch_linear(x, layer, torch.int16, None, None, out)
    # the positions of an image are the residual of its patches
    residual = None if position is None else position[0]
    for image in range(batch):
        launch_linear(x[image], layer, torch.int16, residual, None, out[image, before:])
    if prefix is not None and before:
        _move(prefix, None, out[:, :before].view(batch, before, outputs), (0, outputs), outputs)
    return out


def launch_layer_norm(
    h: torch.Tensor, epsilon: int, gain: torch.Tensor, offset: torch.Tensor, shift: int, out_dtype: torch.dtype, *,
    centred: bool, residual: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """Normalise rows; arguments are those of :func:`qflash.network.operators.norms.integer_norm`, which checks them."""
    out = torch.empty(h.shape, dtype=out_dtype, device="cpu")
    if out.numel() == 0:
        return out
    h, gain, offset = contiguous(h), gain.contiguous(), offset.contiguous()
    residual = None if residual is None else contiguous(residual)
    channels = h.shape[-1]
    integers = (
        h.numel() // channels, channels, epsilon, shift, out.element_size(), launch.threads_for(8 * h.numel()),
        *row_constants(channels), centred,
    )  # fmt: skip
    launch.run_call("layer_norm", _LayerNorm, (h, gain, offset, residual, out), integers)
    return out


def launch_mean(
    x: torch.Tensor, multiplier: torch.Tensor, left: int, offset: torch.Tensor, out_dtype: torch.dtype
) -> torch.Tensor:
    """Average tokens; arguments are those of :func:`qflash.network.execution.integer_mean`, which checks them."""
    images, tokens, channels = x.shape
    out = torch.empty((images, channels), dtype=out_dtype, device="cpu")
    if out.numel():
        x = x if x.stride(2) == 1 else contiguous(x)
        integers = (images, tokens, channels, x.stride(0), x.stride(1), left, out.element_size())
        launch.run_call("mean", _Mean, (x, multiplier.contiguous(), offset.contiguous(), out), integers)
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
    tensors = contiguous(x), multiplier.contiguous(), offset.contiguous(), out
    integers = (
        out.numel() // channels, channels, gate_multiplier, _number(activation), out.element_size(),
        launch.threads_for(8 * out.numel()),
    )  # fmt: skip
    launch.run_call("gated", _Gated, tensors, integers)
    return out


def launch_rotary(
    x: torch.Tensor, turns: torch.Tensor, offset: torch.Tensor, multiplier: torch.Tensor, out_dtype: torch.dtype
) -> torch.Tensor:
    """Rotate pairs of channels; arguments are those of :func:`qflash.network.operators.rotary.rotary`, which checks them."""
    out = torch.empty(x.shape, dtype=out_dtype, device="cpu")
    if out.numel() == 0:
        return out
    tensors = contiguous(x), turns.contiguous(), offset.contiguous(), multiplier.contiguous(), out
    (heads, tokens, half), channels = turns.shape, x.shape[-1]
    integers = x.numel() // channels, tokens, channels, heads, half, out.element_size(), launch.threads_for(4 * x.numel())
    launch.run_call("rotary", _Rotary, tensors, integers)
    return out


def launch_narrow(
    h: torch.Tensor, multiplier: torch.Tensor, left: int, offset: torch.Tensor, out_dtype: torch.dtype
) -> torch.Tensor:
    """Bring rows to int8; arguments are those of :func:`qflash.network.operators.narrow.integer_narrow`, which checks them."""
    out = torch.empty(h.shape, dtype=out_dtype, device="cpu")
    if out.numel() == 0:
        return out
    channels = h.shape[-1]
    integers = h.numel() // channels, channels, left, launch.threads_for(2 * h.numel()), out.element_size()
    launch.run_call("narrow", _Narrow, (contiguous(h), multiplier.contiguous(), offset.contiguous(), out), integers)
    return out
