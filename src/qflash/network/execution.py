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

_LIBRARY = torch.library.Library("qflash", "FRAGMENT")
_LIBRARY.define(
    "int8_linear(Tensor x, Tensor weight, Tensor bias, Tensor multiplier, int left, Tensor? residual, Tensor? scatter, "
    "ScalarType out_dtype, str backend) -> Tensor"
)
for _name in op.ACTIVATIONS:
    _LIBRARY.define(
        f"int8_linear_{_name}(Tensor x, Tensor weight, Tensor bias, Tensor multiplier, int left, "
        f"Tensor {_name}_multiplier, Tensor {_name}_offset, int {_name}_shift, str backend) -> Tensor"
    )
_LIBRARY.define(
    "integer_layer_norm(Tensor h, int epsilon, Tensor gain, Tensor offset, int shift, Tensor? gather, ScalarType out_dtype, "
    "str backend) -> Tensor"
)
_LIBRARY.define(
    "integer_mean(Tensor x, Tensor multiplier, int left, Tensor offset, ScalarType out_dtype, str backend) -> Tensor"
)
_LIBRARY.define(
    "patch_embedding(Tensor images, int[] patch_size, Tensor weight, Tensor bias, Tensor multiplier, int left, "
    "Tensor? position, Tensor? prefix, str backend) -> Tensor"
)


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


def _check_weight(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, multiplier: torch.Tensor, left: int) -> None:
    check_tensor("weight", weight, (torch.int8,), 2)
    if weight.dim() != 2 or weight.shape[1] < 1:
        raise ValueError(f"weight must be (outputs, inputs) with at least one input, got shape {tuple(weight.shape)}")
    _check_device("weight", weight, x)
    _check_constants(x, weight.shape[0], bias=bias, multiplier=multiplier)
    _check_number("left", left, 0, 30)


def _check_tokens(name: str, x: torch.Tensor, tokens: int, once: bool) -> None:
    """Require numbers of tokens, each of them once if ``once``. On a GPU looking would wait; there kernels pass over others."""
    if x.device.type != "cpu" or x.numel() == 0:
        return
    if int(x.min()) < 0 or int(x.max()) >= tokens or (once and len(x.unique()) != tokens):
        raise ValueError(f"{name} must hold numbers below the {tokens} tokens{', each of them once' if once else ''}")


def _check_linear(
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
) -> None:
    _check_output(out_dtype, backend)
    check_tensor("x", x, inputs, 1)
    _check_weight(x, weight, bias, multiplier, left)
    if x.shape[-1] != weight.shape[1]:
        raise ValueError(f"x must have the weight's {weight.shape[1]} inputs as its last dimension, got shape {tuple(x.shape)}")
    if scatter is not None:
        check_tensor("scatter", scatter, (torch.int32,), 1)
        if x.dim() != 3 or scatter.shape != x.shape[1:2]:
            raise ValueError(
                f"scatter must hold a place for every token of x, (batch, tokens, inputs), got {tuple(scatter.shape)} for "
                f"{tuple(x.shape)}"
            )
        _check_device("scatter", scatter, x)
    _check_residual(residual, (*x.shape[:-1], weight.shape[0]), out_dtype, x)


def _check_residual(residual: torch.Tensor | None, shape: tuple[int, ...], out_dtype: torch.dtype, x: torch.Tensor) -> None:
    """Require None, or a residual for an int16 output of a shape, on the device of x."""
    if residual is None:
        return
    check_tensor("residual", residual, (torch.int16,), 1)
    if out_dtype != torch.int16:
        raise TypeError(f"out_dtype must be int16 with a residual, got {str(out_dtype).removeprefix('torch.')}")
    if residual.shape != shape:
        raise ValueError(f"residual must have the output's shape {shape}, got {tuple(residual.shape)}")
    _check_device("residual", residual, x)


def _check_gather(gather: torch.Tensor, h: torch.Tensor) -> None:
    """Require a table of the tokens that rows of h are made of."""
    check_tensor("gather", gather, (torch.int32,), 2)
    if h.dim() != 3 or gather.dim() != 2 or gather.shape[1] < 1:
        raise ValueError(
            f"gather must be (new tokens, pieces) for h (batch, tokens, channels), got {tuple(gather.shape)} for "
            f"{tuple(h.shape)}"
        )
    _check_device("gather", gather, h)


def _check_activation(x: torch.Tensor, outputs: int, made: op.Activation) -> None:
    _check_constants(x, outputs, **{f"{made.name}_multiplier": made.multiplier, f"{made.name}_offset": made.offset})
    _check_number(f"{made.name}_shift", made.shift, 0, 30)


def _check_layer_norm(
    h: torch.Tensor,
    epsilon: int,
    gain: torch.Tensor,
    offset: torch.Tensor,
    shift: int,
    gather: torch.Tensor | None,
    out_dtype: torch.dtype,
    backend: str,
) -> None:
    _check_output(out_dtype, backend)
    check_tensor("h", h, (torch.int16,), 1)
    channels = h.shape[-1]
    if gather is not None:
        _check_gather(gather, h)
        channels *= gather.shape[1]
    if not 1 <= channels <= op.MAX_CHANNELS:
        joined = "" if gather is None else f" of {gather.shape[1]} tokens"
        raise ValueError(f"h must have 1 to {op.MAX_CHANNELS} channels{joined}, got shape {tuple(h.shape)}")
    _check_constants(h, channels, gain=gain, offset=offset)
    _check_number("epsilon", epsilon, 0, op.MAX_EPSILON)
    _check_number("shift", shift, 1, 29)


def _check_mean(
    x: torch.Tensor, multiplier: torch.Tensor, left: int, offset: torch.Tensor, out_dtype: torch.dtype, backend: str
) -> None:
    _check_output(out_dtype, backend)
    check_tensor("x", x, (torch.int16,), 3)
    if x.dim() != 3 or x.shape[1] < 1:
        raise ValueError(f"x must be (batch, tokens, channels) with at least one token, got shape {tuple(x.shape)}")
    _check_constants(x, x.shape[2], multiplier=multiplier, offset=offset)
    _check_number("left", left, 0, 30)


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
) -> None:
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
    _check_weight(images, weight, bias, multiplier, left)
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
        _check_device(name, x, images)


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
    _check_linear(x, weight, bias, multiplier, left, residual, scatter, out_dtype, backend)
    if scatter is not None:
        _check_tokens("scatter", scatter, x.shape[1], once=True)
    layer = op.LinearIntegers(weight, bias, multiplier, left)
    return find_backend(backend, x.device).linear(x, layer, out_dtype, residual, scatter=scatter)


def _with_activation(name: str) -> tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]:
    """Return the operator of a linear layer with an activation of :data:`.layers.ACTIVATIONS`, and its fake."""

    def checked(x: torch.Tensor, weight: torch.Tensor, *arguments: Any) -> op.Activation:
        bias, multiplier, left, *rest, backend = arguments
        made = op.Activation(name, *rest)
        _check_linear(x, weight, bias, multiplier, left, None, None, torch.int8, backend, (torch.int8,))
        _check_activation(x, weight.shape[0], made)
        return made

    def linear(x: torch.Tensor, *arguments: Any) -> torch.Tensor:
        """Return an activation of a linear layer in int8; see :class:`qflash.network.modules.LinearActivation`.

        Args:
            x, weight, bias, multiplier, left: see :func:`int8_linear`; x is int8.
            multiplier, offset, shift: of the activation, named after it: int32 (outputs,), (outputs,), and 0 to 30.
            backend: see there.

        Raises:
            TypeError, ValueError: as :func:`int8_linear`.
        """
        made = checked(x, *arguments)
        layer = op.LinearIntegers(*arguments[:4])
        return find_backend(arguments[-1], x.device).linear(x, layer, torch.int8, activation=made)

    def fake(x: torch.Tensor, weight: torch.Tensor, *arguments: Any) -> torch.Tensor:
        checked(x, weight, *arguments)
        return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=torch.int8)

    return linear, fake


int8_linear_gelu, _fake_int8_linear_gelu = _with_activation("gelu")
int8_linear_silu, _fake_int8_linear_silu = _with_activation("silu")
int8_linear_relu, _fake_int8_linear_relu = _with_activation("relu")


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
    _check_layer_norm(h, epsilon, gain, offset, shift, gather, out_dtype, backend)
    if gather is not None:
        _check_tokens("gather", gather, h.shape[1], once=False)
    return find_backend(backend, h.device).layer_norm(h, epsilon, gain, offset, shift, out_dtype, gather)


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
    _check_mean(x, multiplier, left, offset, out_dtype, backend)
    return find_backend(backend, x.device).mean(x, multiplier, left, offset, out_dtype)


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
    _check_embedding(images, patch_size, weight, bias, multiplier, left, position, prefix, backend)
    layer = op.LinearIntegers(weight, bias, multiplier, left)
    return find_backend(backend, images.device).embed(images, patch_size, layer, position, prefix)


def _fake_int8_linear(x: torch.Tensor, weight: torch.Tensor, *arguments: Any) -> torch.Tensor:
    _check_linear(x, weight, *arguments)
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=arguments[5])


def _fake_integer_layer_norm(h: torch.Tensor, *arguments: Any) -> torch.Tensor:
    _check_layer_norm(h, *arguments)
    gather, dtype = arguments[4:6]
    return h.new_empty(h.shape if gather is None else (h.shape[0], gather.shape[0], len(arguments[1])), dtype=dtype)


def _fake_integer_mean(x: torch.Tensor, *arguments: Any) -> torch.Tensor:
    _check_mean(x, *arguments)
    return x.new_empty((x.shape[0], x.shape[2]), dtype=arguments[3])


def _fake_patch_embedding(
    images: torch.Tensor, patch_size: Sequence[int], weight: torch.Tensor, *arguments: Any
) -> torch.Tensor:
    _check_embedding(images, patch_size, weight, *arguments)
    prefix = arguments[4]
    tokens = (images.shape[2] // patch_size[0]) * (images.shape[3] // patch_size[1])
    tokens += 0 if prefix is None else prefix.shape[1]
    return images.new_empty((images.shape[0], tokens, weight.shape[0]), dtype=torch.int16)


for _name, _implementation, _fake in (
    ("int8_linear", int8_linear, _fake_int8_linear),
    ("int8_linear_gelu", int8_linear_gelu, _fake_int8_linear_gelu),
    ("int8_linear_silu", int8_linear_silu, _fake_int8_linear_silu),
    ("int8_linear_relu", int8_linear_relu, _fake_int8_linear_relu),
    ("integer_layer_norm", integer_layer_norm, _fake_integer_layer_norm),
    ("integer_mean", integer_mean, _fake_integer_mean),
    ("patch_embedding", patch_embedding, _fake_patch_embedding),
):
    _LIBRARY.impl(_name, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"qflash::{_name}", _fake, lib=_LIBRARY)
