"""The arguments of attention calls, and the safetensors files that keep them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

SUFFIX = ".safetensors"
_NEEDED = ("query", "key", "value")
_PARTS = (*_NEEDED, "attn_mask", "scale")


@dataclasses.dataclass(frozen=True)
class LayerCall:
    """The arguments of one attention call.

    Attributes:
        query, key, value: float (batch, heads, tokens, channels).
        attn_mask: bool (True takes part) or additive, broadcastable to (batch, heads, queries, keys), or None.
        scale: factor of the scores, ``head_dim ** -0.5`` if None.
        rows: bool (batch, queries), which queries count; all if None.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_mask: torch.Tensor | None = None
    scale: float | None = None
    rows: torch.Tensor | None = None

    def to(self, device: torch.device) -> LayerCall:
        """Return the call with all tensors on a device."""
        tensors = (self.query, self.key, self.value, self.attn_mask, self.rows)
        query, key, value, attn_mask, rows = (None if x is None else x.to(device) for x in tensors)
        return LayerCall(query, key, value, attn_mask, self.scale, rows)  # type: ignore[arg-type]


def write_calls(path: Path, calls: Mapping[str, LayerCall], metadata: Mapping[str, str] | None = None) -> None:
    """Write calls into a safetensors file, for :func:`read_calls`.

    Args:
        path: of the file.
        calls: by label. The tensors are ``LABEL.query``, ``LABEL.key`` and ``LABEL.value``, and where a call has them
            ``LABEL.attn_mask`` and ``LABEL.scale``, float64 without dimensions.
        metadata: strings for the file's header.

    Raises:
        ValueError: a call has ``rows``, which the file has no place for.
    """
    tensors = {}
    for label, call in calls.items():
        if call.rows is not None:
            raise ValueError(f"calls with rows cannot be written, {label} has {tuple(call.rows.shape)}")
        for part in _PARTS:
            x = getattr(call, part)
            if x is not None:
                x = torch.tensor(x, dtype=torch.float64, device="cpu") if part == "scale" else x
                tensors[f"{label}.{part}"] = x.detach().cpu().contiguous()
    save_file(tensors, path, dict(metadata or {}))


def read_calls(path: Path) -> dict[str, LayerCall]:
    """Read the calls of a safetensors file, on the CPU.

    Args:
        path: of a file with the tensors that :func:`write_calls` names. Those without a label (``query``, ``key``,
            ``value``) are of a call that gets the file's name.

    Returns:
        calls by label, in alphabetical order.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no safetensors file, lacks a tensor, or has one with another name, shape, dtype or value than
            it must have.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} must be a safetensors file: {error}") from error
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name in tensors:
        label, _, part = name.rpartition(".")
        if part not in _PARTS:
            raise ValueError(f"{path}: names of tensors must be or end in one of {', '.join(_PARTS)}, got {name!r}")
        found.setdefault(label or path.stem, {})[part] = tensors[name]
    if not found:
        raise ValueError(f"{path} must hold query, key and value, it holds no tensor")
    return {label: _call(f"{path}, {label}", parts) for label, parts in sorted(found.items())}


def _call(where: str, parts: Mapping[str, torch.Tensor]) -> LayerCall:
    """Return the call of tensors by the names of :data:`_PARTS`; ``where`` they are is what messages begin with."""
    missing = [part for part in _NEEDED if part not in parts]
    if missing:
        raise ValueError(f"{where}: {', '.join(missing)} must be in the file, too")
    query, key, value = (parts[part] for part in _NEEDED)
    attn_mask, scale = parts.get("attn_mask"), parts.get("scale")
    for part, x in zip(_NEEDED, (query, key, value), strict=True):
        if not x.is_floating_point() or x.dtype != query.dtype:
            raise ValueError(f"{where}: {part} must be floating point like query, got {x.dtype} and {query.dtype}")
        if x.dim() != 4 or not x.numel():
            raise ValueError(f"{where}: {part} must be (batch, heads, tokens, channels), none of them 0, got {tuple(x.shape)}")
        if not x.isfinite().all():
            raise ValueError(f"{where}: {part} must be finite")
    heads, tokens = query.shape[:2], query.shape[2]
    if key.shape != (*heads, key.shape[2], query.shape[3]) or value.shape[:3] != key.shape[:3]:
        raise ValueError(
            f"{where}: batch and heads must be the same, query's and key's channels, and key's and value's tokens; got "
            f"{tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}"
        )
    if attn_mask is not None:
        _check_mask(where, attn_mask, (*heads, tokens, key.shape[2]))
    if scale is not None and (scale.numel() != 1 or not 0.0 < scale.item() < float("inf")):
        raise ValueError(f"{where}: scale must be one positive number, got {scale.tolist()}")
    return LayerCall(query, key, value, attn_mask, None if scale is None else float(scale.item()))


def _check_mask(where: str, attn_mask: torch.Tensor, scores: tuple[int, ...]) -> None:
    if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
        raise ValueError(f"{where}: attn_mask must be bool or floating point, got {attn_mask.dtype}")
    try:
        fits = torch.broadcast_shapes(attn_mask.shape, scores) == scores
    except RuntimeError:
        fits = False
    if not fits:
        raise ValueError(f"{where}: attn_mask must broadcast to {scores}, got {tuple(attn_mask.shape)}")
