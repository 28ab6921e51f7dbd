"""Some tokens as an output, a map of them, or several as one row: :class:`Tokens`. Numbers stay what they are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ..modules import OwnForms, _require_flags, _require_sizes, require_lists


def arrange(
    x: torch.Tensor, first: int, count: int, shape: Sequence[int] | None = None, channels_first: bool = False,
    joined: Sequence[int] | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return some tokens of (batch, tokens, channels).

    Args:
        x: of any type.
        first, count: which tokens.
        shape: (height, width) of the map that they are, or None.
        channels_first: see the result.
        joined: (rows, channels) or (channels,) of a result whose rows are several tokens each, or None.

    Returns:
        (batch, count, channels); as a map (batch, height, width, channels), or (batch, channels, height, width); with
        ``joined`` (batch, rows, channels) or (batch, channels).
    """
    x = x.narrow(1, first, count)
    if joined is not None:
        return x.reshape(len(x), *joined)
    if shape is None:
        return x
    return x.transpose(1, 2).unflatten(2, tuple(shape)) if channels_first else x.unflatten(1, tuple(shape))


class Tokens(OwnForms):
    """Tokens that follow each other, as they are, as a map, or several as one row.

    Attributes:
        first, count, shape, channels_first, joined: see :func:`arrange`.
    """

    def __init__(
        self, first: int, count: int, shape: Sequence[int] | None = None, channels_first: bool = False,
        joined: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        # files of networks without it say nothing of it
        more = {} if joined is None else {"joined": list(joined) if isinstance(joined, tuple) else joined}
        super().__init__(first=first, count=count, shape=shape and list(shape), channels_first=channels_first, **more)
        _require_sizes(0, first=first)
        _require_sizes(count=count)
        require_lists(2, shape=shape)
        _require_flags(channels_first=channels_first)
        if shape is not None and shape[0] * shape[1] != count:
            raise ValueError(f"shape must be (height, width) of {count} tokens, got {list(shape)}")
        if joined is not None:
            require_lists(1 if isinstance(joined, (list, tuple)) and len(joined) == 1 else 2, joined=joined)
            if shape is not None or math.prod(joined) % count:
                raise ValueError(
                    f"joined must be (rows, channels) or (channels,) of {count} tokens, and no shape, got {joined}"
                )
        self.first, self.count, self.shape, self.channels_first, self.joined = first, count, shape, channels_first, joined

    def forward(self, x: torch.Tensor, backend: str = "auto") -> torch.Tensor:
        """Return them of (batch, tokens, channels), as :func:`arrange` does."""
        return arrange(x, self.first, self.count, self.shape, self.channels_first, self.joined).contiguous()

    def write_onnx(self, graph: Any, inputs: Sequence[Any], shapes: Sequence[tuple[int, ...]]) -> Any:
        channels = shapes[0][-1]
        x = graph.cut(inputs[0], self.first, self.first + self.count, 1)
        if self.joined is not None:
            return graph.reshape(x, 0, *self.joined)
        if self.shape is None:
            return x
        if self.channels_first:
            return graph.reshape(graph.transpose(x, 0, 2, 1), 0, channels, *self.shape)
        return graph.reshape(x, 0, *self.shape, channels)

    def write_tosa(self, graph: Any, inputs: Sequence[Any], batch: int) -> Any:
        # (batch, 1, tokens, channels); an output gets its shape where it is declared
        x = graph.cut(inputs[0], self.first, self.first + self.count, 2)
        return graph.transpose(x, 0, 1, 3, 2) if self.shape is not None and self.channels_first else x
