"""The operators of an integer network as PyTorch sees them (``torch.ops.qflash``), and what they run.

The reference is :mod:`qflash.specification.layers`; the kernels return the same bits wherever its bounds hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..backends import find_backend
from ..specification import layers as op
from ..validation import check_backend, check_tensor
from .operator_arguments import (
    check_constants,
    check_device,
    check_layer_norm,
    check_linear,
    check_number,
    check_output,
    check_tokens,
    check_weight,
    operator,
)  # fmt: skip


def check_images(images: torch.Tensor, channels: int, size: tuple[int, int]) -> None:
    """Require uint8 images (batch, channels, height, width) of a size.

    Raises:
        TypeError, ValueError: they are something else; the message names it.
        RuntimeError: a tracer is at work that cannot take a network.
    """
    if isinstance(images, torch.fx.Proxy):
        raise TypeError(
            "torch.fx cannot trace an integer network (feature extractors do so); register a forward hook on the submodule "
            "whose output is wanted, or use torch.export"
        )
    if torch.jit.is_tracing() or torch.onnx.is_in_onnx_export():
        raise RuntimeError(
            "torch.jit.trace and torch.onnx.export cannot take an integer network: for ONNX use network.export_onnx, otherwise "
            "torch.export or torch.compile"
        )
    if not isinstance(images, torch.Tensor):
        raise TypeError(f"images must be a uint8 tensor, got {type(images).__name__}")
    if images.dtype != torch.uint8:
        raise TypeError(
            f"images must be uint8 pixels, 0 to 255 and not normalised (the network does that itself), got {images.dtype}"
        )
    want = (channels, *size)
    if images.dim() != 4 or tuple(images.shape[1:]) != want:
        raise ValueError(f"images must have shape (batch, {', '.join(map(str, want))}), got {tuple(images.shape)}")


@operator(
    "int8_linear(Tensor x, Tensor weight, Tensor bias, Tensor multiplier, int left, Tensor? residual, Tensor? scatter, "
    "ScalarType out_dtype, str backend)",
    check_linear,
)
def int8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    multiplier: torch.Tensor,
    left: int,
    residual: torch.Tensor | None,
    scatter: torch.Tensor | None,
    out_dtype: torch.dtype,
    backend: str,
) -> torch.Tensor:
    """Return ``saturate(residual + rescale(x W))``; see :class:`qflash.network.modules.Linear`.

    Args:
        x: int8 or int16 (..., inputs).
        weight: int8 (outputs, inputs).
        bias, multiplier: int32 (outputs,).
        left: 0 to 30.
        residual: int16 (..., outputs) for int16 outputs, or None.
        scatter: int32 (tokens,), for x (batch, tokens, inputs): where output and residual have token i, each place once. None:
            in the same place. Places beyond the tokens are refused on a CPU, and not written on a GPU.
        out_dtype: int8, int16 or int32.
        backend: see :func:`qflash.attention`.

    Raises:
        TypeError: a tensor or the output has another dtype.
        ValueError: a shape, a device or a number does not fit, or the back end cannot run there.
    """
    if scatter is not None:
        check_tokens("scatter", scatter, x.shape[1], once=True)
    layer = op.LinearIntegers(weight, bias, multiplier, left)
    return find_backend(backend, x.device).linear(x, layer, out_dtype, residual, scatter=scatter)


def _with_activation(name: str) -> Callable[..., torch.Tensor]:
    """Return the operator of a linear layer with an activation of :data:`.layers.ACTIVATIONS`."""

    def check(x: torch.Tensor, weight: torch.Tensor, *arguments: Any) -> tuple[int, ...]:
        bias, own, left, multiplier, offset, shift, backend = arguments
        shape = check_linear(x, weight, bias, own, left, None, None, torch.int8, backend, (torch.int8,))
        check_constants(x, weight.shape[0], **{f"{name}_multiplier": multiplier, f"{name}_offset": offset})
        check_number(f"{name}_shift", shift, 0, 30)
        return shape

    @operator(
        f"int8_linear_{name}(Tensor x, Tensor weight, Tensor bias, Tensor multiplier, int left, Tensor {name}_multiplier, "
        f"Tensor {name}_offset, int {name}_shift, str backend)",
        check,
        torch.int8,
    )
    def linear(x: torch.Tensor, *arguments: Any) -> torch.Tensor:
        """Return an activation of a linear layer in int8; see :class:`qflash.network.modules.LinearActivation`.

        Args:
            x, weight, bias, multiplier, left: see :func:`int8_linear`; x is int8.
            multiplier, offset, shift: of the activation, named after it: int32 (outputs,), (outputs,), and 0 to 30.
            backend: see there.

        Raises:
            TypeError, ValueError: as :func:`int8_linear`.
        """
        layer, made = op.LinearIntegers(*arguments[:4]), op.Activation(name, *arguments[4:7])
        return find_backend(arguments[-1], x.device).linear(x, layer, torch.int8, activation=made)

    return linear


int8_linear_gelu, int8_linear_silu, int8_linear_relu = map(_with_activation, ("gelu", "silu", "relu"))


@operator(
    "integer_layer_norm(Tensor h, int epsilon, Tensor gain, Tensor offset, int shift, Tensor? gather, ScalarType out_dtype, "
    "str backend)",
    check_layer_norm,
)
def integer_layer_norm(
    h: torch.Tensor,
    epsilon: int,
    gain: torch.Tensor,
    offset: torch.Tensor,
    shift: int,
    gather: torch.Tensor | None,
    out_dtype: torch.dtype,
    backend: str,
) -> torch.Tensor:
    """Normalise int16 rows; see :class:`qflash.network.modules.LayerNorm`.

    Args:
        h: int16 (..., channels).
        epsilon: 0 to 2**46.
        gain, offset: int32 (channels of a row,), 1 to 4096 of these.
        shift: 1 to 29.
        gather: int32 (new tokens, pieces), for h (batch, tokens, channels): of which tokens each row is made, one behind the
            other. None: of one each. Numbers beyond the tokens are refused on a CPU; on a GPU such a token counts as zeros.
        out_dtype: int8, int16 or int32.
        backend: see :func:`qflash.attention`.

    Returns:
        (..., channels), or (batch, new tokens, pieces * channels).

    Raises:
        TypeError, ValueError: as :func:`int8_linear`.
    """
    if gather is not None:
        check_tokens("gather", gather, h.shape[1], once=False)
    return find_backend(backend, h.device).layer_norm(h, epsilon, gain, offset, shift, out_dtype, gather)


def _check_mean(
    x: torch.Tensor, multiplier: torch.Tensor, left: int, offset: torch.Tensor, out_dtype: torch.dtype, backend: str
) -> tuple[int, ...]:
    check_output(out_dtype, backend)
    check_tensor("x", x, (torch.int16,), 3)
    if x.dim() != 3 or x.shape[1] < 1:
        raise ValueError(f"x must be (batch, tokens, channels) with at least one token, got shape {tuple(x.shape)}")
    check_constants(x, x.shape[2], multiplier=multiplier, offset=offset)
    check_number("left", left, 0, 30)
    return x.shape[0], x.shape[2]


@operator(
    "integer_mean(Tensor x, Tensor multiplier, int left, Tensor offset, ScalarType out_dtype, str backend)",
    _check_mean,
)
def integer_mean(
    x: torch.Tensor, multiplier: torch.Tensor, left: int, offset: torch.Tensor, out_dtype: torch.dtype, backend: str
) -> torch.Tensor:
    """Average tokens; see :class:`qflash.network.modules.Mean`.

    Args:
        x: int16 (batch, tokens, channels), at least one token.
        multiplier, offset: int32 (channels,).
        left: 0 to 30.
        out_dtype: int8, int16 or int32.
        backend: see :func:`qflash.attention`; on a CPU the reference computes it.

    Returns:
        (batch, channels).

    Raises:
        TypeError, ValueError: as :func:`int8_linear`.
    """
    return find_backend(backend, x.device).mean(x, multiplier, left, offset, out_dtype)


def _check_embedding(
    images: torch.Tensor,
    patch_size: Sequence[int],
    weight: torch.Tensor,
    bias: torch.Tensor,
    multiplier: torch.Tensor,
    left: int,
    position: torch.Tensor | None,
    prefix: torch.Tensor | None,
    backend: str,
) -> tuple[int, ...]:
    check_backend(backend)
    check_tensor("images", images, (torch.uint8,), 4)
    if len(patch_size) != 2 or min(patch_size) < 1:
        raise ValueError(f"patch_size must be (height, width), at least 1 each, got {tuple(patch_size)}")
    height, width = images.shape[2:] if images.dim() == 4 else (0, 0)
    if height < patch_size[0] or width < patch_size[1]:
        raise ValueError(
            f"images must be (batch, channels, height, width) of at least one patch of {tuple(patch_size)}, got shape "
            f"{tuple(images.shape)}"
        )
    check_weight(images, weight, bias, multiplier, left)
    inputs = images.shape[1] * patch_size[0] * patch_size[1]
    if weight.shape[1] != inputs:
        raise ValueError(f"weight must have the {inputs} inputs that a patch has, got shape {tuple(weight.shape)}")
    patches = (images.shape[2] // patch_size[0]) * (images.shape[3] // patch_size[1])
    for name, x in (("position", position), ("prefix", prefix)):
        if x is None:
            continue
        check_tensor(name, x, (torch.int16,), 3)
        tokens = patches if name == "position" else x.shape[-2]
        if x.shape != (1, tokens, weight.shape[0]):
            raise ValueError(
                f"{name} must have shape (1, {patches if name == 'position' else 'tokens'}, {weight.shape[0]}), "
                f"got {tuple(x.shape)}"
            )
        check_device(name, x, images)
    return images.shape[0], patches + (0 if prefix is None else prefix.shape[1]), weight.shape[0]


@operator(
    "patch_embedding(Tensor images, int[] patch_size, Tensor weight, Tensor bias, Tensor multiplier, int left, "
    "Tensor? position, Tensor? prefix, str backend)",
    _check_embedding,
    torch.int16,
)
def patch_embedding(
    images: torch.Tensor,
    patch_size: Sequence[int],
    weight: torch.Tensor,
    bias: torch.Tensor,
    multiplier: torch.Tensor,
    left: int,
    position: torch.Tensor | None,
    prefix: torch.Tensor | None,
    backend: str,
) -> torch.Tensor:
    """Bring images to the residual stream; see :class:`qflash.network.modules.PatchEmbedding`.

    Args:
        images: uint8 (batch, channels, height, width); pixels behind the last whole patch are not read.
        patch_size: (height, width).
        weight, bias, multiplier, left, backend: see :func:`int8_linear`; an input for each value of a patch.
        position: int16 (1, patches, outputs), or None.
        prefix: int16 (1, tokens, outputs), tokens that come first, or None.

    Returns:
        int16 (batch, prefix tokens + patches, outputs).

    Raises:
        TypeError, ValueError: as :func:`int8_linear`.
    """
    layer = op.LinearIntegers(weight, bias, multiplier, left)
    return find_backend(backend, images.device).embed(images, patch_size, layer, position, prefix)
