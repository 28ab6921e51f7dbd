"""Gated products as an operator of integer networks; its integers are :func:`qflash.specification.gated.gated`.

A network runs the linear layer that makes gates and values together with it: ``int8_linear_gated``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ...backends import find_backend
from ...specification.gated import GATE_BITS, PRODUCT_SHIFT, GatedIntegers
from ...specification.layers import ACTIVATIONS, INT16, INT32, LIMITS, LinearIntegers
from ...validation import check_tensor
from .. import activations
from ..modules import DTYPES, Linear, OwnForms, require_lists, require_within
from ..operator_arguments import check_constants, check_linear, check_output, operator


def _check(
    x: torch.Tensor, gate_multiplier: int, multiplier: torch.Tensor, offset: torch.Tensor, activation: str,
    out_dtype: torch.dtype, backend: str, prefix: str = "",
) -> tuple[int, ...]:  # fmt: skip
    """Return the output's shape."""
    check_output(out_dtype, backend)
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    check_tensor("x", x, (torch.int16,), 1)
    if x.shape[-1] % 2:
        raise ValueError(f"x must have gates and as many values as its last dimension, got shape {tuple(x.shape)}")
    require_within("gate_multiplier", gate_multiplier, 0, INT32[1])
    channels = x.shape[-1] // 2
    check_constants(x, channels, **{f"{prefix}multiplier": multiplier, f"{prefix}offset": offset})
    return *x.shape[:-1], channels


@operator(
    "gated(Tensor x, int gate_multiplier, Tensor multiplier, Tensor offset, str activation, ScalarType out_dtype, str backend)",
    _check,
)
def gated(
    x: torch.Tensor, gate_multiplier: int, multiplier: torch.Tensor, offset: torch.Tensor, activation: str,
    out_dtype: torch.dtype, backend: str,
) -> torch.Tensor:  # fmt: skip
    """Multiply values by activations of gates; see :class:`Gated`.

    Args:
        x: int16 (..., 2 * channels): gates, then values.
        gate_multiplier: 0 to 2**31 - 1.
        multiplier, offset: int32 (channels,).
        activation: of :data:`qflash.specification.layers.ACTIVATIONS`.
        out_dtype: int8, int16 or int32.
        backend: see :func:`qflash.attention`.

    Returns:
        (..., channels).

    Raises:
        TypeError: a tensor or the output has another dtype.
        ValueError: a shape, a device, a number or a name does not fit, or the back end cannot run there.
    """
    return find_backend(backend, x.device).gated(x, gate_multiplier, multiplier, offset, activation, out_dtype)


def _check_both(x: torch.Tensor, weight: torch.Tensor, *arguments: Any) -> tuple[int, ...]:
    bias, multiplier, left, gate_multiplier, product_multiplier, product_offset, activation, out_dtype, backend = arguments
    shape = check_linear(x, weight, bias, multiplier, left, None, None, torch.int16, backend, (torch.int8,))
    if weight.shape[0] % 2:
        raise ValueError(f"weight must make gates and as many values, got shape {tuple(weight.shape)}")
    made = torch.empty((0, weight.shape[0]), dtype=torch.int16, device=x.device)
    _check(made, gate_multiplier, product_multiplier, product_offset, activation, out_dtype, backend, "product_")
    return *shape[:-1], shape[-1] // 2


@operator(
    "int8_linear_gated(Tensor x, Tensor weight, Tensor bias, Tensor multiplier, int left, int gate_multiplier, "
    "Tensor product_multiplier, Tensor product_offset, str activation, ScalarType out_dtype, str backend)",
    _check_both,
)
def int8_linear_gated(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, multiplier: torch.Tensor, left: int, gate_multiplier: int,
    product_multiplier: torch.Tensor, product_offset: torch.Tensor, activation: str, out_dtype: torch.dtype, backend: str,
) -> torch.Tensor:  # fmt: skip
    """Run a linear layer to int16 and the gated product of its outputs.

    Args:
        x, weight, bias, multiplier, left: see :func:`qflash.network.execution.int8_linear`; x is int8, the outputs are gates,
            then values.
        gate_multiplier, activation, out_dtype, backend: see :func:`gated`.
        product_multiplier, product_offset: its ``multiplier`` and ``offset``.

    Returns:
        (..., outputs / 2).

    Raises:
        TypeError: a tensor or the output has another dtype.
        ValueError: a shape, a device, a number or a name does not fit, or the back end cannot run there.
    """
    product = GatedIntegers(gate_multiplier, product_multiplier, product_offset, activation)
    return find_backend(backend, x.device).linear_gated(x, LinearIntegers(weight, bias, multiplier, left), product, out_dtype)


class Gated(OwnForms):
    """Values times activations of gates, int16 (gates, then values) to int8 for a linear layer or int16 for a normalisation.

    Attributes:
        activation: of :data:`qflash.specification.layers.ACTIVATIONS`.
        gate_multiplier: A of :func:`qflash.specification.gated.gated`.
        multiplier, offset: int32 (channels,), R and B of it.
    """

    constants: tuple[str, ...] = ("gate_multiplier",)
    by_rows = True
    multiplier: torch.Tensor
    offset: torch.Tensor

    def __init__(self, channels: int, dtype: str, activation: str) -> None:
        """Make it empty.

        Args:
            channels: of the values.
            dtype: of the outputs.
            activation: see there.
        """
        super().__init__(channels=channels, dtype=dtype, activation=activation)
        require_lists(1, channels=[channels])
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
        if not isinstance(activation, str) or activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
        self.dtype, self.activation, self.gate_multiplier = DTYPES[dtype], activation, 0
        self._buffer("multiplier", (channels,), torch.int32)
        self._buffer("offset", (channels,), torch.int32)

    def check_values(self) -> None:
        require_within("gate_multiplier", self.gate_multiplier, 0, INT32[1])
        require_within("multiplier", self.multiplier, 0, INT32[1])
        require_within("offset", self.offset, 1 - (1 << 30), (1 << 30) - 1)

    def forward(self, x: torch.Tensor, backend: str = "auto") -> torch.Tensor:
        """Return (..., channels) of the module's dtype from int16 (..., 2 * channels)."""
        out: torch.Tensor = torch.ops.qflash.gated(
            x, self.gate_multiplier, self.multiplier, self.offset, self.activation, self.dtype, backend
        )
        return out

    def behind(self, layer: Linear, x: torch.Tensor, backend: str = "auto") -> torch.Tensor:
        """Return the product of what a linear layer makes of int8 (..., inputs)."""
        out: torch.Tensor = torch.ops.qflash.int8_linear_gated(
            x, layer.weight, layer.bias, layer.multiplier, layer.left, self.gate_multiplier, self.multiplier, self.offset,
            self.activation, self.dtype, backend,
        )  # fmt: skip
        return out

    def write_onnx(self, graph: Any, inputs: Sequence[Any], shapes: Sequence[tuple[int, ...]]) -> Any:
        gate, value = graph.split(graph.known(inputs[0], *INT16), 2)
        u = graph.cast(graph.multiply_round(gate, self.gate_multiplier, GATE_BITS), np.int32)
        product = graph.multiply_round(activations.onnx(graph, self.activation, u), value, PRODUCT_SHIFT)
        factor, offset = (x.cpu().numpy().astype(np.int64) for x in (self.multiplier, self.offset))
        # (p + B) R + half a unit is p R + (B R + half)
        after = 128 if self.dtype == torch.int8 else 0
        limits = None if self.dtype == torch.int32 else LIMITS[self.dtype]
        out = graph.affine(product, 1 << 30, factor, factor * offset + (1 << 31), 32, after, limits)
        if self.dtype == torch.int8:
            return graph.cast(graph.clip(out, 0, 255), np.uint8)
        return graph.cast(out if self.dtype == torch.int32 else graph.clip(out, *LIMITS[self.dtype]), np.int32)

    def write_tosa(self, graph: Any, inputs: Sequence[Any], batch: int) -> Any:
        channels, x = self.multiplier.numel(), inputs[0]
        gate, value = graph.cut(x, 0, channels, 3), graph.cut(x, channels, 2 * channels, 3)
        u = graph.multiply(gate, self.gate_multiplier, GATE_BITS)
        product = graph.multiply(activations.tosa(graph, self.activation, u), value, PRODUCT_SHIFT)
        product = graph.add(product, self.offset.cpu().numpy())
        factor = self.multiplier.cpu().numpy()
        if self.dtype == torch.int8:
            return graph.rescale(product, factor, 32, np.int8)
        out = graph.rescale(product, factor, 32, np.int32)
        if self.dtype == torch.int32:
            return out
        low, high = LIMITS[self.dtype]
        return graph.maximum(graph.minimum(out, high), low)
