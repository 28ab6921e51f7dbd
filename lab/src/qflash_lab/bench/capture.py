"""Query, key and value that networks give their attention, captured in a run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import nn

from qflash.integrations.patching import patch, unpatch

from ..baselines import get_method
from .layer_calls import LayerCall
from .metrics import exact_attention


def exact_like(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Return :func:`qflash_lab.bench.metrics.exact_attention` in value's dtype."""
    return exact_attention(query, key, value, attn_mask, scale).to(value.dtype)


class Recorder:
    """An attention function that keeps the arguments of every call.

    Args:
        attention: what the network goes on with.
        rows: of the calls, see :class:`LayerCall`.

    Attributes:
        calls: in the order of the network's layers.
    """

    def __init__(self, attention: Callable[..., torch.Tensor] = exact_like, rows: torch.Tensor | None = None) -> None:
        self.calls: list[LayerCall] = []
        self._attention = attention
        self._rows = rows

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        scale: float | None = None,
    ) -> torch.Tensor:
        self.calls.append(LayerCall(query, key, value, attn_mask, scale, self._rows))
        return self._attention(query, key, value, attn_mask=attn_mask, scale=scale)


@contextlib.contextmanager
def attending(network: nn.Module, attention: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Compute the attention of a network by a function of query, key, value, ``attn_mask`` and ``scale``."""
    try:
        patch(network, attention=attention)
        yield
    finally:
        unpatch(network)


def capture_vision(network: nn.Module, images: torch.Tensor, batch: int) -> tuple[list[list[LayerCall]], torch.Tensor]:
    """Run a timm network with float64 attention.

    Args:
        network: has ``forward_features``; patched and unpatched in place.
        images: (count, 3, height, width).
        batch: images a call.

    Returns:
        the calls of each layer, in the order of the layers, and the features of all tokens (count, tokens, channels).
    """
    found, layers = [], []
    for part in images.split(batch):
        recorder = Recorder()
        with attending(network, recorder):
            found.append(network.forward_features(part))  # type: ignore[operator]
        layers.append(recorder.calls)
    return [list(calls) for calls in zip(*layers, strict=True)], torch.cat(found)


@torch.no_grad()
def capture_small(model_name: str, images: torch.Tensor) -> list[LayerCall]:
    """Run a small model in float32 and return every attention call, in the order of its layers.

    Args:
        model_name: of :data:`qflash_lab.evaluation.small_models.MODELS`.
        images: (batch, 1, height, width) in [0, 1].

    Raises:
        ImportError: timm is not installed.
    """
    from ..evaluation.small_models import load_model

    model, recorder = load_model(model_name), Recorder(get_method("fp32").attention)
    with attending(model, recorder):
        model(images)
    return recorder.calls
