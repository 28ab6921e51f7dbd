"""A residual stream in int8, for linear layers that read it without a normalisation: :class:`Narrow`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...backends import find_backend
from ...specification import layers as op
from ...validation import check_tensor
from ..modules import OwnForms, _require_sizes, require_lists, require_within
from ..operator_arguments import check_constants, check_gather, check_number, check_output, check_tokens, operator


class Narrow(OwnForms):
    """int16 rows in int8, each channel in a unit and with a zero point of its own.

    Attributes:
        multiplier, offset: int32 (channels,), R and b of :func:`.layers.rescale`.
        left: its shift.
        gather: int32 (new tokens, pieces), of which tokens of an image each row is made, or None for all in their order.
    """

    constants = ("left",)
    by_rows = True
    dtype = torch.int8
    tokens = 1
    """Of a sum, as :func:`..conversion.finish_mean` asks."""
    multiplier: torch.Tensor
    offset: torch.Tensor
    gather: torch.Tensor | None

    def __init__(self, channels: int, gather: Sequence[int] | None = None) -> None:
        """Make it empty.

        Args:
            channels: of a row.
            gather: shape of :attr:`gather`.
        """
        _require_sizes(channels=channels)
        require_lists(2, gather=gather)
        super().__init__(channels=channels, gather=gather and list(gather))
        self.left = 0
        self._buffer("multiplier", (channels,), torch.int32)
        self._buffer("offset", (channels,), torch.int32)
        self._buffer("gather", tuple(gather) if gather else None, torch.int32)

    def check_values(self) -> None:
        require_within("left", self.left, 0, 30)
        require_within("multiplier", self.multiplier, 0, op.INT32[1])
        sums = (1 << 15 << self.left) + self.offset.to(torch.int64).abs()
        require_within("the largest shifted number", sums, 0, op.INT32[1])

    def forward(self, h: torch.Tensor, backend: str = "auto") -> torch.Tensor:
        """Return int8 rows of int16 (batch, tokens, channels)."""
        constants = self.multiplier, self.left, self.offset, self.gather
        out: torch.Tensor = torch.ops.qflash.integer_narrow(h, *constants, self.dtype, backend)
        return out

    def write_onnx(self, graph: Any, inputs: Sequence[Any], shapes: Sequence[tuple[int, ...]]) -> Any:
        import numpy as np

        from ..onnx_rescale import after_of, rescale, saturated

        h = inputs[0]
        if self.gather is not None:
            h = graph.reshape(graph.take(h, self.gather), 0, self.gather.shape[0], self.offset.numel())
        bound = np.full(self.offset.numel(), 1 << 15)
        constants = self.left, self.offset, self.multiplier, after_of(self.dtype), op.INT8
        return saturated(graph, rescale(graph, graph.known(h, *op.INT16), bound, *constants), self.dtype)

    def write_tosa(self, graph: Any, inputs: Sequence[Any], batch: int) -> Any:
        import numpy as np

        h = inputs[0]
        if self.gather is not None:
            order = self.gather.cpu().numpy()
            h = graph.reshape(graph.take(h, order), batch, 1, len(order), self.offset.numel())
        sums = graph.add(graph.shift_left(h, self.left), self.offset.cpu().numpy().astype(np.int64))
        return graph.rescale(sums, self.multiplier.cpu().numpy(), 32, np.int8)


def _check(
    h: torch.Tensor, multiplier: torch.Tensor, left: int, offset: torch.Tensor, gather: torch.Tensor | None,
    out_dtype: torch.dtype, backend: str,
) -> tuple[int, ...]:  # fmt: skip
    """Return the output's shape."""
    check_output(out_dtype, backend)
    check_tensor("h", h, (torch.int16,), 1)
    shape = tuple(h.shape)
    if gather is not None:
        check_gather(gather, h)
        shape = h.shape[0], gather.shape[0], gather.shape[1] * h.shape[2]
    check_constants(h, shape[-1], multiplier=multiplier, offset=offset)
    check_number("left", left, 0, 30)
    return shape


@operator(
    "integer_narrow(Tensor h, Tensor multiplier, int left, Tensor offset, Tensor? gather, ScalarType out_dtype, str backend)",
    _check,
)
def integer_narrow(
    h: torch.Tensor, multiplier: torch.Tensor, left: int, offset: torch.Tensor, gather: torch.Tensor | None,
    out_dtype: torch.dtype, backend: str,
) -> torch.Tensor:  # fmt: skip
    """Return ``saturate(rescale(h))``; see :class:`Narrow`.

    Args:
        h: int16 (..., channels).
        multiplier, offset: int32 (channels of a row,).
        left: 0 to 30.
        gather: int32 (new tokens, pieces), for h (batch, tokens, channels): of which tokens each row is made, one behind the
            other. None: of one each. Numbers beyond the tokens are refused on a CPU; on a GPU such a token counts as zeros.
        out_dtype: int8, int16 or int32.
        backend: see :func:`qflash.attention`.

    Returns:
        (..., channels), or (batch, new tokens, pieces * channels).

    Raises:
        TypeError: a tensor or the output has another dtype.
        ValueError: a shape, a device or a number does not fit, or the back end cannot run there.
    """
    if gather is not None:
        check_tokens("gather", gather, h.shape[1], once=False)
    return find_backend(backend, h.device).narrow(h, multiplier, left, offset, out_dtype, gather)
