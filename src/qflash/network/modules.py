"""Modules of an integer network: integer buffers, static shifts, and one operator each.

``forward`` holds no arithmetic of its own beyond shapes: what it computes is :mod:`qflash.network.operators` and
:func:`qflash.int8_attention`. A module is made empty, of its shapes; conversion or a file fills it in.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, MutableMapping
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from .. import fixed_point as fp
from ..recipe import Recipe
from . import operators as op


def require_within(name: str, x: torch.Tensor | int, least: int, most: int) -> None:
    """Raise a ValueError that names ``x`` if it, or an element of it, is not from ``least`` to ``most``."""
    found = [x] if isinstance(x, int) else [int(end) for end in torch.aminmax(x)] if x.numel() else []
    for number in found:
        if not least <= number <= most:
            raise ValueError(f"{name} must be from {least} to {most}, got {number}")


_device: ContextVar[str] = ContextVar("_device", default="cpu")
"""Where modules are made."""


@contextlib.contextmanager
def shapes_only() -> Iterator[None]:
    """Make the modules of a block on the meta device: their tensors have types and shapes, and take no memory."""
    token = _device.set("meta")
    try:
        yield
    finally:
        _device.reset(token)


EXTRA_STATE = "_extra_state"
"""PyTorch's name in a state_dict for what ``get_extra_state`` returns."""
LOADED = object()
"""What stands in a state_dict for a tensor that the whole network has taken from it or refused."""


class IntegerModule(nn.Module):
    """A module whose state is integer buffers and the Python integers named in ``constants``.

    Only a whole :class:`.models.IntegerNetwork` takes a ``state_dict``: the integers of its parts are in units that the parts
    share, and ``constants`` are in the network's entry.
    """

    constants: tuple[str, ...] = ()

    def _load_from_state_dict(
        self, state_dict: MutableMapping[str, Any], prefix: str, local_metadata: Any, strict: bool, missing_keys: list[str],
        unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        own = [prefix + name for name in self.integers()]
        if any(state_dict.get(key, LOADED) is not LOADED for key in own):
            error_msgs.append(
                f"{prefix.rstrip('.') or type(self).__name__} is a part of an integer network, which is loaded as a whole: its "
                "integers mean nothing without the shifts and units of the others. network.save and qflash.load_model keep all"
            )
        elif strict:
            missing_keys.extend(key for key in own if key not in state_dict)
        if strict:
            known = {*own, prefix + EXTRA_STATE}
            inner = tuple(f"{prefix}{name}." for name in self._modules)
            unexpected_keys.extend(
                key for key in state_dict if key.startswith(prefix) and key not in known and not key.startswith(inner)
            )

    def integers(self) -> dict[str, torch.Tensor]:
        """Return this module's own tensors that files and a ``state_dict`` hold."""
        return {name: x for name, x in self._buffers.items() if x is not None and name not in self._non_persistent_buffers_set}

    def check_values(self) -> None:
        """Look whether this module's own integers keep the bounds of :mod:`.operators`, as those of a conversion do.

        Raises:
            ValueError: one does not; the message names it. With it sums would not fit their types.
        """

    def _buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, persistent: bool = True) -> None:
        self.register_buffer(name, torch.zeros(shape, dtype=dtype, device=_device.get()), persistent=persistent)

    def _table(self, name: str, shape: tuple[int, ...], make: Callable[..., torch.Tensor], *arguments: Any) -> None:
        """Register ``make(*arguments)``, int32 of this shape, as a buffer that no file has."""
        meta = _device.get() == "meta"
        x = torch.empty(shape, dtype=torch.int32, device="meta") if meta else make(*arguments)
        self.register_buffer(name, x, persistent=False)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={getattr(self, name)}" for name in self.constants)


class Linear(IntegerModule):
    """An int8 matrix product with its sums brought to another unit.

    Attributes:
        weight: int8 (outputs, inputs), a scale for each output.
        bias: int32 (outputs,), b of :func:`.operators.rescale`; holds the zero points of inputs and outputs as well.
        multiplier: int32 (outputs,), R of it.
        left: its shift.
    """

    constants: tuple[str, ...] = ("left",)
    weight: torch.Tensor
    bias: torch.Tensor
    multiplier: torch.Tensor

    def __init__(self, inputs: int, outputs: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype, self.left = dtype, 0
        self._buffer("weight", (outputs, inputs), torch.int8)
        self._buffer("bias", (outputs,), torch.int32)
        self._buffer("multiplier", (outputs,), torch.int32)

    def check_values(self) -> None:
        require_within("left", self.left, 0, 30)
        require_within("multiplier", self.multiplier, 0, op.INT32[1])
        sums = self.weight.to(torch.int64).abs().sum(dim=1) * 128
        require_within("the largest sum of an output", (sums << self.left) + self.bias.to(torch.int64).abs(), 0, op.INT32[1])

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        backend: str = "auto",
        scatter: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return (..., outputs) of the module's dtype.

        Args:
            x: int8 (..., inputs).
            residual: int16 (..., outputs), added after the change of unit and before saturation; only for int16 outputs.
            backend: see :func:`qflash.attention`.
            scatter: int32 (tokens,), where output and residual have the tokens of x (batch, tokens, inputs).
        """
        out: torch.Tensor = torch.ops.qflash.int8_linear(
            x, self.weight, self.bias, self.multiplier, self.left, residual, scatter, self.dtype, backend
        )
        return out


class PatchEmbedding(Linear):
    """Patches of images by a linear layer, to the int16 residual stream.

    Attributes:
        patch_size: (height, width) in pixels.
    """

    def __init__(self, image_channels: int, patch_size: tuple[int, int], outputs: int) -> None:
        super().__init__(image_channels * patch_size[0] * patch_size[1], outputs, torch.int16)
        self.patch_size = patch_size

    def forward(  # type: ignore[override]
        self, images: torch.Tensor, position: torch.Tensor | None, prefix: torch.Tensor | None, backend: str = "auto"
    ) -> torch.Tensor:
        """Return int16 (batch, tokens, outputs).

        Args:
            images: uint8 (batch, channels, height, width).
            position: int16 (1, patches, outputs), added to the patches after the change of unit.
            prefix: int16 (1, tokens, outputs), put before them.
            backend: see :func:`qflash.attention`.
        """
        out: torch.Tensor = torch.ops.qflash.patch_embedding(
            images, self.patch_size, self.weight, self.bias, self.multiplier, self.left, position, prefix, backend
        )
        return out


class LinearGelu(Linear):
    """A linear layer and GELU, from int8 to int8.

    Attributes:
        gelu_multiplier, gelu_offset: int32 (outputs,), M and B of :func:`.operators.gelu_int8`.
        gelu_shift: its shift.
    """

    constants = ("left", "gelu_shift")
    gelu_multiplier: torch.Tensor
    gelu_offset: torch.Tensor

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, torch.int8)
        self.gelu_shift = 0
        self._buffer("gelu_multiplier", (outputs,), torch.int32)
        self._buffer("gelu_offset", (outputs,), torch.int32)

    def check_values(self) -> None:
        super().check_values()
        require_within("gelu_multiplier", self.gelu_multiplier, 0, op.MAX_GELU_MULTIPLIER)
        require_within("gelu_offset", self.gelu_offset, 1 - (1 << 30), (1 << 30) - 1)
        require_within("gelu_shift", self.gelu_shift, 0, 30)

    def forward(self, x: torch.Tensor, backend: str = "auto") -> torch.Tensor:  # type: ignore[override]
        """Return int8 (..., outputs) of int8 (..., inputs)."""
        out: torch.Tensor = torch.ops.qflash.int8_linear_gelu(
            x, self.weight, self.bias, self.multiplier, self.left, self.gelu_multiplier, self.gelu_offset, self.gelu_shift,
            backend,
        )  # fmt: skip
        return out


class LayerNorm(IntegerModule):
    """Layer normalisation of int16 rows.

    Attributes:
        gain, offset: int32 (channels,), G and B of :func:`.operators.layer_norm`.
        epsilon: E of :func:`.operators.normalise`.
        shift: see :func:`.operators.layer_norm`.
    """

    constants = ("epsilon", "shift")
    gain: torch.Tensor
    offset: torch.Tensor

    def __init__(self, channels: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype, self.epsilon, self.shift = dtype, 0, 1
        self._buffer("gain", (channels,), torch.int32)
        self._buffer("offset", (channels,), torch.int32)

    def check_values(self) -> None:
        require_within("the number of channels", self.gain.numel(), 1, op.MAX_CHANNELS)
        require_within("offset", self.offset, 1 - (1 << 30), (1 << 30) - 1)
        require_within("epsilon", self.epsilon, 0, op.MAX_EPSILON)
        require_within("shift", self.shift, 1, 29)

    def forward(self, h: torch.Tensor, backend: str = "auto", gather: torch.Tensor | None = None) -> torch.Tensor:
        """Return rows of the module's dtype from int16 ones, (..., channels).

        Args:
            h: int16.
            backend: see :func:`qflash.attention`.
            gather: int32 (new tokens, pieces), of which tokens of h (batch, tokens, channels) each row is made.
        """
        out: torch.Tensor = torch.ops.qflash.integer_layer_norm(
            h, self.epsilon, self.gain, self.offset, self.shift, gather, self.dtype, backend
        )
        return out


class Mean(IntegerModule):
    """The mean over tokens, in another unit.

    Attributes:
        tokens: how many there are; the bounds depend on it.
        multiplier: int32 (channels,), R of :func:`.operators.rescale` for sums over all tokens.
        left: its shift.
        offset: int32 (channels,), b of it.
    """

    constants: tuple[str, ...] = ("left",)
    multiplier: torch.Tensor
    offset: torch.Tensor

    def __init__(self, tokens: int, channels: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.tokens, self.dtype, self.left = tokens, dtype, 0
        self._buffer("multiplier", (channels,), torch.int32)
        self._buffer("offset", (channels,), torch.int32)

    def check_values(self) -> None:
        require_within("left", self.left, 0, 30)
        require_within("multiplier", self.multiplier, 0, op.INT32[1])
        sums = (self.tokens << 15 << self.left) + self.offset.to(torch.int64).abs()
        require_within(f"the largest sum of {self.tokens} tokens", sums, 0, op.INT32[1])

    def forward(self, x: torch.Tensor, backend: str = "auto") -> torch.Tensor:
        """Return (batch, channels) of the module's dtype from int16 (batch, tokens, channels)."""
        out: torch.Tensor = torch.ops.qflash.integer_mean(x, self.multiplier, self.left, self.offset, self.dtype, backend)
        return out


class Attention(IntegerModule):
    """Self-attention: query, key and value by one product, integer attention, projection.

    With ``qk_norm`` a head's query and key are normalised over its channels before. They then come as int16 from a product
    of their own.

    Attributes:
        qkv: to int8, (query, key, value) x heads x channels; None with ``qk_norm``.
        qk: to int16, (query, key) x heads x channels; None without.
        v: to int8, heads x channels; None without.
        q_norm, k_norm: to int8, of heads; None without.
        proj: to the residual stream.
        query_scale, key_scale: (1, heads, 1, 1); value_scale, output_scale: (1, heads, 1, channels): the bits of float32
            scales as int32. The integer arithmetic takes mantissa and exponent of them and computes nothing in floating point.
        bias: int32 (1 or windows, heads, tokens, tokens) in fixed point (:func:`qflash.quantize_bias`), or None.
        softmax_scale: the factor of the scores, a constant of the network.
    """

    constants = ()
    query_scale: torch.Tensor
    key_scale: torch.Tensor
    value_scale: torch.Tensor
    output_scale: torch.Tensor
    bias: torch.Tensor | None

    def __init__(
        self,
        channels: int,
        heads: int,
        head_dim: int,
        softmax_scale: float,
        recipe: Recipe,
        bias_shape: tuple[int, ...] | None,
        qk_norm: bool = False,
    ) -> None:
        super().__init__()
        self.heads, self.head_dim, self.softmax_scale, self.recipe = heads, head_dim, softmax_scale, recipe
        self.qkv = None if qk_norm else Linear(channels, 3 * heads * head_dim, torch.int8)
        self.qk = Linear(channels, 2 * heads * head_dim, torch.int16) if qk_norm else None
        self.v = Linear(channels, heads * head_dim, torch.int8) if qk_norm else None
        self.q_norm, self.k_norm = (LayerNorm(head_dim, torch.int8) if qk_norm else None for _ in range(2))
        self.proj = Linear(heads * head_dim, channels, torch.int16)
        for name, width in (("query", 1), ("key", 1), ("value", head_dim), ("output", head_dim)):
            self._buffer(f"{name}_scale", (1, heads, 1, width), torch.int32)
        if bias_shape is None:
            self.register_buffer("bias", None)
        else:
            self._buffer("bias", bias_shape, torch.int32)

    def check_values(self) -> None:
        if not 0 < self.softmax_scale < math.inf:
            raise ValueError(f"softmax_scale must be positive and finite, got {self.softmax_scale}")
        for name in ("query", "key", "value", "output"):
            # the bits of normal float32 numbers
            require_within(f"{name}_scale", getattr(self, f"{name}_scale"), 1 << 23, (0xFF << 23) - 1)
        if self.bias is not None:
            marks = torch.tensor([fp.BIAS_MASKED, fp.BIAS_EVEN, fp.BIAS_POISON], dtype=torch.int32, device=self.bias.device)
            require_within("bias", self.bias.masked_fill(torch.isin(self.bias, marks), 0), -fp.BIAS_LIMIT, fp.BIAS_LIMIT)

    def project(self, x: torch.Tensor, backend: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return query, key and value, int8 (batch, heads, tokens, head_dim), of int8 (batch, tokens, channels)."""
        each = self.heads, self.head_dim
        if self.qkv is not None:
            query, key, value = self.qkv(x, None, backend).unflatten(-1, (3, *each)).unbind(-3)
        else:
            assert self.qk is not None and self.v is not None and self.q_norm is not None and self.k_norm is not None
            query, key = self.qk(x, None, backend).unflatten(-1, (2, *each)).unbind(-3)
            query, key = self.q_norm(query, backend), self.k_norm(key, backend)
            value = self.v(x, None, backend).unflatten(-1, each)
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)

    def attend(self, x: torch.Tensor, backend: str) -> torch.Tensor:
        """Return int8 (batch, tokens, heads * head_dim) of int8 (batch, tokens, channels)."""
        query, key, value = self.project(x, backend)
        scales = (each.view(torch.float32) for each in (self.query_scale, self.key_scale, self.value_scale, self.output_scale))
        query_scale, key_scale, value_scale, output_scale = scales
        out = torch.ops.qflash.int8_attention(
            query, query_scale, key, key_scale, value, value_scale, self.bias, False, self.softmax_scale, output_scale,
            torch.int8, self.recipe.key, backend,
        )  # fmt: skip
        return out.transpose(1, 2).flatten(2)


class Block(IntegerModule):
    """A transformer block with normalisation first, on the int16 residual stream.

    Attributes:
        float_attention, float_mlp: stand in for a part that is kept in floating point, int16 to int16; None as a rule.
    """

    def __init__(
        self,
        channels: int,
        heads: int,
        head_dim: int,
        hidden: int,
        softmax_scale: float,
        recipe: Recipe,
        bias_shape: tuple[int, ...] | None = None,
        qk_norm: bool = False,
    ) -> None:
        super().__init__()
        self.norm1 = LayerNorm(channels, torch.int8)
        self.attn = Attention(channels, heads, head_dim, softmax_scale, recipe, bias_shape, qk_norm)
        self.norm2 = LayerNorm(channels, torch.int8)
        self.fc1 = LinearGelu(channels, hidden)
        self.fc2 = Linear(hidden, channels, torch.int16)
        self.float_attention: nn.Module | None = None
        self.float_mlp: nn.Module | None = None

    @property
    def integer_attention(self) -> Attention | None:
        """The attention that runs in integers, for :func:`qflash.coverage`; None where a float part stands in."""
        return self.attn if self.float_attention is None else None

    def attention_part(self, h: torch.Tensor, backend: str) -> torch.Tensor:
        """Return the residual stream after attention."""
        if self.float_attention is not None:
            return self.float_attention(h)
        return self.attn.proj(self.attn.attend(self.norm1(h, backend), backend), h, backend)

    def mlp_part(self, h: torch.Tensor, backend: str) -> torch.Tensor:
        """Return the residual stream after the MLP."""
        if self.float_mlp is not None:
            return self.float_mlp(h)
        return self.fc2(self.fc1(self.norm2(h, backend), backend), h, backend)

    def forward(self, h: torch.Tensor, backend: str = "auto") -> torch.Tensor:
        """Return int16 (batch, tokens, channels)."""
        return self.mlp_part(self.attention_part(h, backend), backend)


class WindowBlock(Block):
    """A Swin block: attention inside windows of the grid of tokens, which may be shifted.

    Attributes:
        window: (rows, columns) of tokens in a window.
        order: int32 (tokens, 1), the tokens as windows have them (:func:`.operators.window_order`); no part of a file.
    """

    order: torch.Tensor

    def __init__(
        self, grid: tuple[int, int], window: tuple[int, int], shift: tuple[int, int], channels: int, heads: int, head_dim: int,
        hidden: int, softmax_scale: float, recipe: Recipe,
    ) -> None:  # fmt: skip
        tokens, windows = window[0] * window[1], grid[0] * grid[1] // (window[0] * window[1])
        bias_shape = (windows if any(shift) else 1, heads, tokens, tokens)
        super().__init__(channels, heads, head_dim, hidden, softmax_scale, recipe, bias_shape)
        self.grid, self.window = grid, window
        self._table("order", (grid[0] * grid[1], 1), op.window_order, grid, window, shift)

    def attention_part(self, h: torch.Tensor, backend: str) -> torch.Tensor:
        """Return the residual stream after attention."""
        if self.float_attention is not None:
            return self.float_attention(h)
        x = self.norm1(h, backend, self.order)
        windows = x.view(-1, self.window[0] * self.window[1], x.shape[2])
        x = self.attn.attend(windows, backend).view(*x.shape[:2], self.attn.heads * self.attn.head_dim)
        return self.attn.proj(x, h, backend, self.order.flatten())


class Merge(IntegerModule):
    """Swin's patch merging: two by two tokens become one, on the int16 residual stream, which takes another unit.

    Attributes:
        order: int32 (tokens / 4, 4), which tokens become one (:func:`.operators.merge_order`); no part of a file.
    """

    order: torch.Tensor

    def __init__(self, grid: tuple[int, int], channels: int, outputs: int) -> None:
        super().__init__()
        self.norm = LayerNorm(4 * channels, torch.int8)
        self.reduction = Linear(4 * channels, outputs, torch.int16)
        self._table("order", (grid[0] * grid[1] // 4, 4), op.merge_order, grid)

    def forward(self, h: torch.Tensor, backend: str = "auto") -> torch.Tensor:
        """Return int16 (batch, a quarter of the tokens, outputs) of (batch, rows * columns, channels)."""
        out: torch.Tensor = self.reduction(self.norm(h, backend, self.order), None, backend)
        return out
