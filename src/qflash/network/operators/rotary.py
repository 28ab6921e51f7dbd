"""Rotary positions as an operator of integer networks; its integers are :func:`qflash.specification.rotary.rotary`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ...backends import find_backend
from ...specification.layers import INT8, INT16, INT32
from ...specification.rotary import MOST_OFFSET, ONE, unpack_turns
from ...validation import check_tensor
from ..modules import OwnForms, require_lists, require_within
from ..operator_arguments import check_constants, check_device, check_output, operator


def _check(
    x: torch.Tensor, turns: torch.Tensor, offset: torch.Tensor, multiplier: torch.Tensor, out_dtype: torch.dtype, backend: str
) -> tuple[int, ...]:
    """Return the output's shape."""
    check_output(out_dtype, backend)
    check_tensor("x", x, (torch.int16,), 3)
    check_tensor("turns", turns, (torch.int32,), 3)
    if x.dim() != 3 or turns.dim() != 3 or not turns.shape[0] or not turns.shape[2] or x.shape[1] != turns.shape[1]:
        raise ValueError(
            f"turns must be (heads, tokens, half the channels of a head) for x (batch, tokens, channels), got "
            f"{tuple(turns.shape)} for {tuple(x.shape)}"
        )
    if x.shape[2] % (2 * turns.shape[0] * turns.shape[2]):
        raise ValueError(
            f"x must have whole heads of {2 * turns.shape[2]} channels, and a multiple of the {turns.shape[0]} heads of turns, "
            f"got shape {tuple(x.shape)}"
        )
    check_device("turns", turns, x)
    check_constants(x, x.shape[2], offset=offset, multiplier=multiplier)
    return tuple(x.shape)


@operator("rotary(Tensor x, Tensor turns, Tensor offset, Tensor multiplier, ScalarType out_dtype, str backend)", _check)
def rotary(
    x: torch.Tensor, turns: torch.Tensor, offset: torch.Tensor, multiplier: torch.Tensor, out_dtype: torch.dtype, backend: str
) -> torch.Tensor:
    """Rotate pairs of channels by the angles of their token; see :class:`Rotary`.

    Args:
        x: int16 (batch, tokens, channels).
        turns: int32 (heads, tokens, half the channels of a head).
        offset, multiplier: int32 (channels,).
        out_dtype: int8, int16 or int32.
        backend: see :func:`qflash.attention`.

    Returns:
        (batch, tokens, channels).

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: a shape or a device does not fit, or the back end cannot run there.
    """
    return find_backend(backend, x.device).rotary(x, turns, offset, multiplier, out_dtype)


def by_token(table: torch.Tensor) -> torch.Tensor:
    """Return cosines or sines (heads, tokens, half) as they meet pairs (batch, tokens, n, heads, half)."""
    return table.transpose(0, 1)[:, None]


class Rotary(OwnForms):
    """Rotary positions of query, key, or both side by side: int16 to int8, of which attention takes its inputs.

    The channels of a head come as two halves, so that channel i of one and channel i of the other are a pair; conversion
    orders the outputs of the linear layer before accordingly.

    Attributes:
        turns: int32 (heads or 1, tokens, half the channels of a head): cosines in the lower and sines in the upper 16 bits, in
            1 / 2**14. Tokens that stay as they are (class token, registers) have a cosine of 1.
        offset, multiplier: int32 (channels,), B and R of :func:`qflash.specification.rotary.rotary`.
    """

    dtype = torch.int8
    turns: torch.Tensor
    offset: torch.Tensor
    multiplier: torch.Tensor

    def __init__(self, channels: int, turns: Sequence[int]) -> None:
        """Make it empty.

        Args:
            channels: of all heads.
            turns: shape of :attr:`turns`.
        """
        require_lists(3, turns=() if turns is None else turns)
        require_lists(1, channels=[channels])
        super().__init__(channels=channels, turns=list(turns))
        if channels % (2 * turns[0] * turns[2]):
            raise ValueError(f"channels must be whole heads of those of turns, {tuple(turns)}, got {channels}")
        self._buffer("turns", tuple(turns), torch.int32)
        self._buffer("offset", (channels,), torch.int32)
        self._buffer("multiplier", (channels,), torch.int32)

    def check_values(self) -> None:
        for name, x in zip(("a cosine", "a sine"), unpack_turns(self.turns), strict=True):
            require_within(name, x, -ONE, ONE)
        require_within("offset", self.offset, -MOST_OFFSET, MOST_OFFSET)
        require_within("multiplier", self.multiplier, 0, INT32[1])

    def forward(self, x: torch.Tensor, backend: str = "auto") -> torch.Tensor:
        """Return int8 (batch, tokens, channels) of int16 (batch, tokens, channels), or (batch, tokens, heads, channels)."""
        out: torch.Tensor = torch.ops.qflash.rotary(x.flatten(2), self.turns, self.offset, self.multiplier, self.dtype, backend)
        return out

    @staticmethod
    def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Return what it computes in floating point.

        Args:
            x: float (batch, tokens, channels), or (batch, tokens, heads, channels).
            cos, sin: float, of the shape of :attr:`turns`.
        """
        heads, _, half = cos.shape
        a, b = x.flatten(2).unflatten(-1, (-1, heads, 2, half)).unbind(-2)
        cos, sin = by_token(cos), by_token(sin)
        return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-2).flatten(2)

    def turned_onnx(self, graph: Any, x: Any, cos: Any, sin: Any) -> Any:
        """Return turned pairs (batch, tokens, channels) in an :class:`..onnx_graph.Graph`, of integers or floats.

        Args:
            graph: to add to.
            x: value (batch, tokens, channels), or (batch, tokens, heads, channels).
            cos, sin: values of :func:`by_token`.
        """
        channels, (heads, tokens, half) = self.offset.numel(), self.turns.shape
        a, b = graph.split(graph.reshape(x, 0, tokens, channels // (2 * half * heads), heads, 2 * half), 2)
        turned = (
            graph.subtract(graph.multiply(a, cos), graph.multiply(b, sin)),
            graph.add(graph.multiply(b, cos), graph.multiply(a, sin)),
        )
        return graph.reshape(graph.node("Concat", *turned, axis=-1), 0, tokens, channels)

    def write_onnx(self, graph: Any, inputs: Sequence[Any], shapes: Sequence[tuple[int, ...]]) -> Any:
        tables = [graph.constant(by_token(x), np.int16, "turns") for x in unpack_turns(self.turns)]
        sums = self.turned_onnx(graph, graph.known(inputs[0], *INT16), *tables)
        graph.known(sums, -(1 << 30), 1 << 30)
        factor, offset = (x.cpu().numpy().astype(np.int64) for x in (self.multiplier, self.offset))
        # (sum + B) R + half a unit is sum R + (B R + half)
        out = graph.affine(sums, 1 << 30, factor, factor * offset + (1 << 31), 32, 128, INT8)
        return graph.cast(graph.clip(out, 0, 255), np.uint8)

    def write_tosa(self, graph: Any, inputs: Sequence[Any], batch: int) -> Any:
        channels, (heads, tokens, half) = self.offset.numel(), self.turns.shape
        pairs = graph.reshape(inputs[0], batch, tokens, channels // (2 * half * heads), heads, 2 * half)
        a, b = graph.cut(pairs, 0, half, 4), graph.cut(pairs, half, 2 * half, 4)
        cos, sin = (graph.constant(by_token(x)[None].cpu().numpy(), np.int32, "turns") for x in unpack_turns(self.turns))
        turned = (
            graph.subtract(graph.multiply(a, cos), graph.multiply(b, sin)),
            graph.add(graph.multiply(b, cos), graph.multiply(a, sin)),
        )
        sums = graph.reshape(graph.concat(turned, 4), batch, 1, tokens, channels)
        sums = graph.add(sums, self.offset.cpu().numpy())
        return graph.rescale(sums, self.multiplier.cpu().numpy(), 32, np.int8)
