"""Tokens of a text on the residual stream: :class:`TokenEmbedding`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...backends import find_backend
from ...specification.texts import is_token
from ...validation import check_backend, check_tensor
from ..modules import OwnForms, _require_flags, _require_sizes
from ..operator_arguments import check_device, check_tokens, operator


class TokenEmbedding(OwnForms):
    """Rows of a table by ids of tokens, plus a row for each place, to the int16 residual stream.

    Attributes:
        padded: whether texts may have places without a token, whose ids are -1: they have the table's row 0, which no other
            token sees. Such texts may also be shorter than :attr:`position`.
        filler: the id that fills texts up, where the model counts places by the ids that are another (RoBERTa): a place's row
            is right if all tokens come first and none has this id, which is checked on a CPU. None where places are places.
        table_words, position_words: int32, the int16 numbers of :attr:`table` and :attr:`position` two by two, since
            ``nn.DataParallel`` broadcasts buffers by NCCL, which has no int16; the second None where there are no positions.
    """

    dtype = torch.int16
    table_words: torch.Tensor
    position_words: torch.Tensor | None

    def __init__(self, vocabulary: int, channels: int, positions: int, padded: bool = False, filler: int | None = None) -> None:
        """Make it empty.

        Args:
            vocabulary: rows of the table.
            channels: of the stream.
            positions: tokens of a text, of which each place has a row; 0 for none.
            padded, filler: see there.
        """
        _require_sizes(vocabulary=vocabulary, channels=channels)
        _require_sizes(0, positions=positions)
        _require_flags(padded=padded)
        more: dict[str, Any] = {"padded": True} if padded else {}
        if filler is not None:
            _require_sizes(0, filler=filler)
            more["filler"] = filler
        super().__init__(vocabulary=vocabulary, channels=channels, positions=positions, **more)
        self.padded, self.filler = padded, filler
        self._shapes = {"table": (vocabulary, channels), "position": (positions, channels)}
        for name, (rows, _) in self._shapes.items():
            self._buffer(f"{name}_words", ((rows * channels + 1) // 2,) if rows else None, torch.int32)

    def _rows(self, name: str) -> torch.Tensor | None:
        words: torch.Tensor | None = getattr(self, f"{name}_words")
        rows, channels = self._shapes[name]
        return None if words is None else words.view(torch.int16)[: rows * channels].view(rows, channels)

    @property
    def table(self) -> torch.Tensor:
        """int16 (vocabulary, channels)."""
        found = self._rows("table")
        assert found is not None
        return found

    @property
    def position(self) -> torch.Tensor | None:
        """int16 (tokens, channels), or None."""
        return self._rows("position")

    def forward(self, ids: torch.Tensor, backend: str = "auto") -> torch.Tensor:
        """Return int16 (batch, tokens, channels) of ids, int32 or int64 (batch, tokens)."""
        position = self.position
        if self.filler is not None and ids.device.type == "cpu" and not torch.compiler.is_compiling():
            self._check_places(ids)
        if self.padded:
            ids = ids.clamp(min=0)
            position = None if position is None else position[: ids.shape[1]]
        out: torch.Tensor = torch.ops.qflash.token_embedding(ids, self.table, position, backend)
        return out

    def _check_places(self, ids: torch.Tensor) -> None:
        """Require texts whose tokens come first, and none of whose ids is :attr:`filler`."""
        visible = is_token(ids)
        assert self.filler is not None
        if bool(ids.eq(self.filler).any()) or bool((visible[:, 1:] > visible[:, :-1]).any()):
            raise ValueError(
                f"ids must have all tokens of a text before its padding, and no token with the id {self.filler}, which the "
                "model does not count as a place: give an attention_mask, and pad on the right"
            )

    def write_onnx(self, graph: Any, inputs: Sequence[Any], shapes: Sequence[tuple[int, ...]]) -> Any:
        import numpy as np

        ids = graph.maximum(inputs[0], 0) if self.padded else inputs[0]
        h = graph.cast(graph.gather(graph.constant(self.table, np.int16, "table"), ids), np.int32)
        if self.position is None:
            return h
        return graph.clip(
            graph.add(h, graph.cast(graph.constant(self.position, np.int16, "position"), np.int32)), -32768, 32767
        )

    def write_tosa(self, graph: Any, inputs: Sequence[Any], batch: int) -> Any:
        import numpy as np

        (_, tokens), (rows, channels) = inputs[0].shape, self._shapes["table"]
        table = graph.constant(self.table.cpu().numpy().reshape(1, rows, channels), np.int32, "table")
        ids = graph.maximum(inputs[0], 0) if self.padded else inputs[0]
        index = graph.reshape(ids, 1, batch * tokens)
        h = graph.node("GATHER", (table, index), np.int32, (1, batch * tokens, channels))
        h = graph.reshape(h, batch, 1, tokens, channels)
        if self.position is None:
            return h
        wide = graph.add(h, self.position.cpu().numpy().astype(np.int64))
        return graph.maximum(graph.minimum(wide, 32767), -32768)


def _check(ids: torch.Tensor, table: torch.Tensor, position: torch.Tensor | None, backend: str) -> tuple[int, ...]:
    """Return the output's shape."""
    check_backend(backend)
    check_tensor("ids", ids, (torch.int32, torch.int64), 2)
    check_tensor("table", table, (torch.int16,), 2)
    if ids.dim() != 2 or table.dim() != 2 or min(table.shape) < 1:
        raise ValueError(
            f"ids must be (batch, tokens) and table (vocabulary, channels), got {tuple(ids.shape)} and {tuple(table.shape)}"
        )
    check_device("table", table, ids)
    if position is not None:
        check_tensor("position", position, (torch.int16,), 2)
        if position.shape != (ids.shape[1], table.shape[1]):
            raise ValueError(
                f"position must have shape {(ids.shape[1], table.shape[1])}, a row for each token, got {tuple(position.shape)}"
            )
        check_device("position", position, ids)
    return *ids.shape, table.shape[1]


@operator("token_embedding(Tensor ids, Tensor table, Tensor? position, str backend)", _check, torch.int16)
def token_embedding(ids: torch.Tensor, table: torch.Tensor, position: torch.Tensor | None, backend: str) -> torch.Tensor:
    """Return ``sat16(table[ids] + position)``; see :class:`TokenEmbedding`.

    Args:
        ids: int32 or int64 (batch, tokens), below the vocabulary; others are refused on a CPU.
        table: int16 (vocabulary, channels).
        position: int16 (tokens, channels), or None.
        backend: see :func:`qflash.attention`; all of them gather with PyTorch's own operators.

    Returns:
        int16 (batch, tokens, channels).

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: a shape, a device or an id does not fit, or the back end cannot run there.
    """
    check_tokens("ids", ids, table.shape[0], once=False)
    return find_backend(backend, ids.device).embed_tokens(ids, table, position)
