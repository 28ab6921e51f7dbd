"""The token that stands for a text: :class:`SelectToken`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...specification.texts import place_of
from ..modules import OwnForms, _require_sizes


class SelectToken(OwnForms):
    """The token of each text whose id is given, or is the largest: the end of a text for CLIP.

    Attributes:
        token: the id, whose first place counts; None for the largest.
    """

    dtype = torch.int16

    def __init__(self, token: int | None) -> None:
        """Make it.

        Args:
            token: see there.
        """
        super().__init__(token=token)
        if token is not None:
            _require_sizes(0, token=token)
        self.token = token

    def forward(self, h: torch.Tensor, ids: torch.Tensor, backend: str = "auto") -> torch.Tensor:
        """Return int16 (batch, channels) of h, int16 (batch, tokens, channels), and ids, int32 or int64 (batch, tokens)."""
        place = place_of(ids, self.token)[:, None, None].expand(-1, 1, h.shape[2])
        return h.gather(1, place)[:, 0]

    def write_onnx(self, graph: Any, inputs: Sequence[Any], shapes: Sequence[tuple[int, ...]]) -> Any:
        import numpy as np

        h, ids = inputs
        if self.token is not None and graph.wide == np.int32:
            ids = graph.subtract(
                graph.constant(1, np.int32), graph.minimum(graph.node("Abs", graph.subtract(ids, self.token)), 1)
            )
        elif self.token is not None:
            ids = graph.node("Equal", ids, graph.constant(self.token, np.int64), dtype=np.bool_)
        place = graph.node("ArgMax", graph.cast(ids, np.int32), dtype=np.int64, axis=1, keepdims=1, select_last_index=0)
        return graph.node("GatherND", h, place, batch_dims=1)

    def write_tosa(self, graph: Any, inputs: Sequence[Any], batch: int) -> Any:
        raise ValueError("SelectToken has no form in TOSA: ARGMAX there takes int8, ids of tokens need more bits")
