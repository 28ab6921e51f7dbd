"""Modules of an integer network: integer buffers, static shifts, and one operator each.

``forward`` holds no arithmetic of its own beyond shapes: what it computes is :mod:`qflash.specification.layers` and
:func:`qflash.int8_attention`. A module is made empty, of its shapes; conversion or a file fills it in.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Iterator, MutableMapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from ..specification import fixed_point as fp
from ..specification import layers as op
from ..specification.recipe import Recipe
from ..specification.texts import is_token
from ..validation import check_tensor, resolve_softmax_scale


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


def _require_sizes(least: int = 1, **sizes: Any) -> None:
    """Require whole numbers from ``least`` to 2^24."""
    for name, size in sizes.items():
        if type(size) is not int or not least <= size <= 1 << 24:
            raise ValueError(f"{name} must be whole and from {least} to {1 << 24}, got {size!r}")


def require_lists(length: int, least: int = 1, **lists: Any) -> None:
    """Require None or so many whole numbers."""
    for name, found in lists.items():
        if found is not None and (not isinstance(found, (list, tuple)) or len(found) != length):
            raise ValueError(f"{name} must be None or have {length} numbers, got {found!r}")
        for number in found or []:
            _require_sizes(least, **{name: number})


def _require_flags(**flags: Any) -> None:
    for name, flag in flags.items():
        if type(flag) is not bool:
            raise ValueError(f"{name} must be True or False, got {flag!r}")


def is_hooked(part: nn.Module) -> bool:
    """Tell whether calling a module runs code of a user: hooks, a ``forward`` of its own (accelerate's), parametrisations."""
    hooks = part._forward_hooks or part._forward_pre_hooks
    return bool(hooks) or "forward" in vars(part) or "parametrizations" in part._modules


class IntegerModule(nn.Module):
    """A module whose state is integer buffers and the Python integers named in ``constants``.

    Only a whole :class:`.graph.IntegerNetwork` takes a ``state_dict``: the integers of its parts are in units that the parts
    share, and ``constants`` are in the network's entry.

    Attributes:
        sizes: what it was made with, as JSON holds it: ``type(module)(**sizes)`` is an empty one of the same shapes.

    Raises:
        ValueError: on construction, a size is not a whole number in its range.
    """

    constants: tuple[str, ...] = ()
    by_rows = False
    """Whether a row of the output needs that row of the inputs alone, whatever image it is of; unless a table moves rows."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__()
        self.sizes = sizes

    def _load_from_state_dict(
        self, state_dict: MutableMapping[str, Any], prefix: str, local_metadata: Any, strict: bool, missing_keys: list[str],
        unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        own = [prefix + name for name in self.tensors()]
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

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return this module's own tensors that files and a ``state_dict`` hold."""
        return {name: x for name, x in self._buffers.items() if x is not None and name not in self._non_persistent_buffers_set}

    def input_names(self, count: int) -> tuple[str, ...]:
        """Return what :meth:`forward` calls so many inputs; those of any number are ``part0``, ``part1`` and so on."""
        parameters = list(inspect.signature(type(self).forward).parameters.values())[1:]
        names = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD and each.name != "backend"]
        return tuple(names[:count] if len(names) >= count else [f"part{number}" for number in range(count)])

    def check_values(self) -> None:
        """Look whether this module's own integers keep the bounds of :mod:`qflash.specification.layers`.

        Raises:
            ValueError: one does not; the message names it. With it sums would not fit their types.
        """

    def _buffer(self, name: str, shape: tuple[int, ...] | None, dtype: torch.dtype) -> None:
        self.register_buffer(name, None if shape is None else torch.zeros(shape, dtype=dtype, device=_device.get()))

    def extra_repr(self) -> str:
        values = {**self.sizes, **{name: getattr(self, name) for name in self.constants}}
        return ", ".join(
            f"{name}={value}" for name, value in values.items() if value not in (None, 0, False) and name != "recipe"
        )


class OwnForms(IntegerModule):
    """An operator whose file also says how it is written as ONNX and TOSA.

    The exports ask the module; they know nothing of these operators.
    """

    def write_onnx(self, graph: Any, inputs: Sequence[Any], shapes: Sequence[tuple[int, ...]]) -> Any:
        """Return the output's value in an :class:`.onnx_graph.Graph`.

        Args:
            graph: to add to.
            inputs: values that the node takes: int8 as uint8 with a zero point of 128, int16 as int32.
            shapes: theirs, for one image.
        """
        raise NotImplementedError

    def write_tosa(self, graph: Any, inputs: Sequence[Any], batch: int) -> Any:
        """Return the output's value in a :class:`.tosa_graph.Graph`.

        Args:
            graph: to add to.
            inputs: values that the node takes.
            batch: images.
        """
        raise NotImplementedError


DTYPES = {"int8": torch.int8, "int16": torch.int16, "int32": torch.int32}
"""Types of activations, by name."""


def _type(name: Any) -> torch.dtype:
    if not isinstance(name, str) or name not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {name!r}")
    return DTYPES[name]


class Linear(IntegerModule):
    """An int8 matrix product with its sums brought to another unit.

    Attributes:
        weight: int8 (outputs, inputs), a scale for each output.
        bias: int32 (outputs,), b of :func:`.layers.rescale`; holds the zero points of inputs and outputs as well.
        multiplier: int32 (outputs,), R of it.
        left: its shift.
        scatter: int32 (tokens,), to which token of an image each row goes, or None.
    """

    constants: tuple[str, ...] = ("left",)
    by_rows = True
    input_dtype, largest_input = torch.int8, 128
    """Of what it takes; the second in magnitude, for the bound of its sums."""
    weight: torch.Tensor
    bias: torch.Tensor
    multiplier: torch.Tensor
    scatter: torch.Tensor | None

    def __init__(self, inputs: int, outputs: int, dtype: str, tokens: int = 0) -> None:
        """Make it empty.

        Args:
            inputs, outputs: channels.
            dtype: of the outputs.
            tokens: how many rows of an image :attr:`scatter` brings to other places; 0 for none.
        """
        super().__init__(inputs=inputs, outputs=outputs, dtype=dtype, tokens=tokens)
        _require_sizes(inputs=inputs, outputs=outputs)
        _require_sizes(0, tokens=tokens)
        self.dtype, self.left = _type(dtype), 0
        self._buffer("weight", (outputs, inputs), torch.int8)
        self._buffer("bias", (outputs,), torch.int32)
        self._buffer("multiplier", (outputs,), torch.int32)
        self._buffer("scatter", (tokens,) if tokens else None, torch.int32)

    def check_values(self) -> None:
        require_within("left", self.left, 0, 30)
        require_within("multiplier", self.multiplier, 0, op.INT32[1])
        sums = self.weight.to(torch.int64).abs().sum(dim=1) * self.largest_input
        require_within("the largest sum of an output", (sums << self.left) + self.bias.to(torch.int64).abs(), 0, op.INT32[1])

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None, backend: str = "auto") -> torch.Tensor:
        """Return (..., outputs) of the module's dtype.

        Args:
            x: int8 (..., inputs).
            residual: int16 (..., outputs), added after the change of unit and before saturation; only for int16 outputs.
            backend: see :func:`qflash.attention`.
        """
        check_tensor("x", x, (self.input_dtype,), 1)  # the operator takes both kinds
        out: torch.Tensor = torch.ops.qflash.int8_linear(
            x, self.weight, self.bias, self.multiplier, self.left, residual, self.scatter, self.dtype, backend
        )
        return out


class WideLinear(Linear):
    """A linear layer of int16 inputs, which takes what leaves a rotated residual stream out of the rotation, to int32."""

    input_dtype, largest_input = torch.int16, 1 << 15

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, "int32")
        self.sizes = {"inputs": inputs, "outputs": outputs}


class PatchEmbedding(Linear):
    """Patches of images by a linear layer, to the int16 residual stream.

    Attributes:
        patch_size: (height, width) in pixels.
        position_words, prefix_words: int32, the int16 numbers of :attr:`position` and :attr:`prefix` two by two, since
            ``nn.DataParallel`` broadcasts buffers by NCCL, which has no int16; None where there are none.
    """

    by_rows = False
    position_words: torch.Tensor | None
    prefix_words: torch.Tensor | None

    def __init__(
        self, image_channels: int, patch_size: Sequence[int], outputs: int, positions: int, prefix_tokens: int
    ) -> None:
        """Make it empty.

        Args:
            image_channels: of the images.
            patch_size, outputs: see there.
            positions: patches of an image, of which each has a position embedding; 0 for none.
            prefix_tokens: class token and registers.
        """
        _require_sizes(image_channels=image_channels)
        require_lists(2, patch_size=patch_size)
        _require_sizes(0, positions=positions, prefix_tokens=prefix_tokens)
        high, wide = patch_size
        super().__init__(image_channels * high * wide, outputs, "int16")
        self.sizes = {
            "image_channels": image_channels, "patch_size": [high, wide], "outputs": outputs, "positions": positions,
            "prefix_tokens": prefix_tokens,
        }  # fmt: skip
        self.patch_size = high, wide
        self._tokens = {"position": positions, "prefix": prefix_tokens}
        for name, tokens in self._tokens.items():
            self._buffer(f"{name}_words", ((tokens * outputs + 1) // 2,) if tokens else None, torch.int32)

    def _tokens_of(self, name: str) -> torch.Tensor | None:
        words: torch.Tensor | None = getattr(self, f"{name}_words")
        if words is None:
            return None
        shape = 1, self._tokens[name], self.bias.numel()
        return words.view(torch.int16)[: shape[1] * shape[2]].view(shape)

    @property
    def position(self) -> torch.Tensor | None:
        """int16 (1, patches, outputs), added to the patches after the change of unit, or None."""
        return self._tokens_of("position")

    @property
    def prefix(self) -> torch.Tensor | None:
        """int16 (1, tokens, outputs), put before them, or None: class token and registers."""
        return self._tokens_of("prefix")

    def forward(self, images: torch.Tensor, backend: str = "auto") -> torch.Tensor:  # type: ignore[override]
        """Return int16 (batch, tokens, outputs) of uint8 images (batch, channels, height, width)."""
        out: torch.Tensor = torch.ops.qflash.patch_embedding(
            images, self.patch_size, self.weight, self.bias, self.multiplier, self.left, self.position, self.prefix, backend
        )
        return out


class LinearActivation(Linear):
    """A linear layer and an activation, from int8 to int8: :class:`LinearGelu` and its like.

    Its integers are named after the activation: GELU has ``gelu_multiplier`` and ``gelu_offset``, int32 (outputs,), M and B of
    :func:`.layers.activate`, and ``gelu_shift``, n of it.

    Attributes:
        activation: of :data:`.layers.ACTIVATIONS`.
    """

    activation: str

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, "int8")
        self.sizes = {"inputs": inputs, "outputs": outputs}
        self.constants = ("left", f"{self.activation}_shift")
        setattr(self, f"{self.activation}_shift", 0)
        for name in ("multiplier", "offset"):
            self._buffer(f"{self.activation}_{name}", (outputs,), torch.int32)

    @property
    def activated(self) -> op.Activation:
        """What follows the change of unit."""
        return op.Activation(
            self.activation, *(getattr(self, f"{self.activation}_{name}") for name in op.Activation._fields[1:])
        )

    def check_values(self) -> None:
        super().check_values()
        name, multiplier, offset, shift = self.activated
        require_within(f"{name}_multiplier", multiplier, 0, op.MAX_ACTIVATION_MULTIPLIER)
        require_within(f"{name}_offset", offset, 1 - (1 << 30), (1 << 30) - 1)
        require_within(f"{name}_shift", shift, 0, 30)

    def forward(self, x: torch.Tensor, backend: str = "auto") -> torch.Tensor:  # type: ignore[override]
        """Return int8 (..., outputs) of int8 (..., inputs)."""
        run = getattr(torch.ops.qflash, f"int8_linear_{self.activation}")
        out: torch.Tensor = run(x, self.weight, self.bias, self.multiplier, self.left, *self.activated[1:], backend)
        return out


class LinearGelu(LinearActivation):
    """With GELU."""

    activation = "gelu"


class LinearSilu(LinearActivation):
    """With SiLU, or QuickGELU in another unit."""

    activation = "silu"


class LinearRelu(LinearActivation):
    """With ReLU."""

    activation = "relu"


class LayerNorm(IntegerModule):
    """Layer normalisation of int16 rows.

    Attributes:
        gain, offset: int32 (channels,), G and B of :func:`.layers.layer_norm`.
        epsilon: E of :func:`.layers.normalise`.
        shift: see :func:`.layers.layer_norm`.
        gather: int32 (new tokens, pieces), of which tokens of an image each row is made, or None for all in their order.
        single: whether the one row of an image comes as (batch, channels).
        part: (first channel, heads): the rows are heads of some channels of the input, which come as (batch, tokens, heads,
            channels).
    """

    constants = ("epsilon", "shift")
    by_rows = True
    centred = True
    """Whether the mean is taken out of rows."""
    gain: torch.Tensor
    offset: torch.Tensor
    gather: torch.Tensor | None

    def __init__(
        self, channels: int, dtype: str, gather: Sequence[int] | None = None, single: bool = False,
        part: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        """Make it empty.

        Args:
            channels: of a row.
            dtype: of the outputs.
            gather: shape of :attr:`gather`.
            single, part: see there.
        """
        _require_sizes(channels=channels)
        require_lists(2, gather=gather)
        require_lists(2, 0, part=part)
        sizes = {"channels": channels, "dtype": dtype, "gather": gather and list(gather), "single": single}
        super().__init__(**sizes, part=part and list(part))
        _require_flags(single=single)
        self.dtype, self.epsilon, self.shift, self.single, self.part = _type(dtype), 0, 1, single, part
        self._buffer("gain", (channels,), torch.int32)
        self._buffer("offset", (channels,), torch.int32)
        self._buffer("gather", tuple(gather) if gather else None, torch.int32)

    def check_values(self) -> None:
        require_within("the number of channels", self.gain.numel(), 1, op.MAX_CHANNELS)
        require_within("offset", self.offset, 1 - (1 << 30), (1 << 30) - 1)
        require_within("epsilon", self.epsilon, 0, op.MAX_EPSILON - (not self.centred))
        require_within("shift", self.shift, 1, 29)

    def forward(self, h: torch.Tensor, residual: torch.Tensor | None = None, backend: str = "auto") -> torch.Tensor:
        """Return rows of the module's dtype from int16 (batch, tokens, channels).

        Args:
            h: see there.
            residual: int16, of the rows' shape, added before saturation; only for int16 rows.
            backend: see :func:`qflash.attention`.
        """
        if self.part is not None:
            first, heads = self.part
            h = h[..., first : first + heads * self.gain.numel()].unflatten(-1, (heads, -1))
        constants = self.epsilon, self.gain, self.offset, self.shift, self.gather
        out: torch.Tensor
        if self.centred and residual is None:
            out = torch.ops.qflash.integer_layer_norm(h, *constants, self.dtype, backend)
        else:
            out = torch.ops.qflash.integer_norm(h, *constants, residual, self.centred, self.dtype, backend)
        return out[:, 0] if self.single else out


class Mean(IntegerModule):
    """The mean over tokens, in another unit.

    Attributes:
        tokens: how many there are; the bounds depend on it.
        multiplier: int32 (channels,), R of :func:`.layers.rescale` for sums over all tokens.
        left: its shift.
        offset: int32 (channels,), b of it.
        first: the first token that counts.
    """

    constants: tuple[str, ...] = ("left",)
    multiplier: torch.Tensor
    offset: torch.Tensor

    def __init__(self, tokens: int, channels: int, dtype: str, first: int = 0) -> None:
        super().__init__(tokens=tokens, channels=channels, dtype=dtype, first=first)
        _require_sizes(tokens=tokens, channels=channels)
        _require_sizes(0, first=first)
        self.tokens, self.dtype, self.first, self.left = tokens, _type(dtype), first, 0
        self._buffer("multiplier", (channels,), torch.int32)
        self._buffer("offset", (channels,), torch.int32)

    def check_values(self) -> None:
        require_within("left", self.left, 0, 30)
        require_within("multiplier", self.multiplier, 0, op.INT32[1])
        sums = (self.tokens << 15 << self.left) + self.offset.to(torch.int64).abs()
        require_within(f"the largest sum of {self.tokens} tokens", sums, 0, op.INT32[1])

    def forward(self, x: torch.Tensor, backend: str = "auto") -> torch.Tensor:
        """Return (batch, channels) of the module's dtype from int16 (batch, tokens, channels)."""
        if x.shape[1] != self.tokens:
            x = x[:, self.first : self.first + self.tokens]
        out: torch.Tensor = torch.ops.qflash.integer_mean(x, self.multiplier, self.left, self.offset, self.dtype, backend)
        return out


class Attention(IntegerModule):
    """Integer attention between the linear layers of query, key and value, and the projection.

    Attributes:
        query_scale, key_scale: (1, heads, 1, 1); value_scale, output_scale: (1, heads, 1, channels): the bits of float32
            scales as int32. The integer arithmetic takes mantissa and exponent of them and computes nothing in floating point.
        bias: int32 (1 or windows, heads, tokens, tokens) in fixed point (:func:`qflash.quantize_bias`), or None.
        softmax_scale: the factor of the scores, a constant of the network.
        tokens: of a window; 0 where all tokens of an image attend to each other.
        query: int8 (1, heads, queries, channels), queries that are a constant of the network, or None.
        first: how many of the first tokens ask; 0 for all.
        padded: whether the last input is ids of tokens, (batch, tokens): keys where they are negative take no part.
        causal: whether query i sees keys 0 to i.
    """

    is_integer_attention = True
    """For :func:`qflash.coverage`."""
    query_scale: torch.Tensor
    key_scale: torch.Tensor
    value_scale: torch.Tensor
    output_scale: torch.Tensor
    bias: torch.Tensor | None
    query: torch.Tensor | None

    def __init__(
        self, heads: int, head_dim: int, softmax_scale: float, recipe: str, bias: Sequence[int] | None = None, tokens: int = 0,
        queries: int = 0, first: int = 0, padded: bool = False, causal: bool = False,
    ) -> None:  # fmt: skip
        """Make it empty.

        Args:
            heads, head_dim, softmax_scale, tokens, first, padded, causal: see there.
            recipe: :attr:`qflash.Recipe.key`.
            bias: shape of :attr:`bias`.
            queries: how many constant ones there are; 0 where they are computed.
        """
        _require_sizes(heads=heads, head_dim=head_dim)
        _require_sizes(0, tokens=tokens, queries=queries, first=first)
        require_lists(4, bias=bias)
        sizes = {"heads": heads, "head_dim": head_dim, "softmax_scale": softmax_scale, "recipe": recipe}
        _require_flags(padded=padded, causal=causal)
        # what is not so is not named, as in older files
        flags = {name: True for name, flag in (("padded", padded), ("causal", causal)) if flag}
        super().__init__(**sizes, bias=bias and list(bias), tokens=tokens, queries=queries, first=first, **flags)
        if (padded or causal) and (tokens or queries or (causal and bias)):
            raise ValueError("padded and causal are for attention of whole texts, causal for attention without a bias")
        if isinstance(softmax_scale, bool) or not isinstance(softmax_scale, (int, float)):
            raise ValueError(f"softmax_scale must be a number, got {softmax_scale!r}")
        resolve_softmax_scale(softmax_scale, head_dim)
        Recipe.from_key(recipe)
        self.heads, self.head_dim, self.softmax_scale, self.recipe = heads, head_dim, softmax_scale, recipe
        self.tokens, self.first, self.padded, self.causal = tokens, first, padded, causal
        for name, width in (("query", 1), ("key", 1), ("value", head_dim), ("output", head_dim)):
            self._buffer(f"{name}_scale", (1, heads, 1, width), torch.int32)
        self._buffer("bias", tuple(bias) if bias else None, torch.int32)
        self._buffer("query", (1, heads, queries, head_dim) if queries else None, torch.int8)

    def check_values(self) -> None:
        if not 0 < self.softmax_scale < math.inf:
            raise ValueError(f"softmax_scale must be positive and finite, got {self.softmax_scale}")
        for name in ("query", "key", "value", "output"):
            # the bits of normal float32 numbers
            require_within(f"{name}_scale", getattr(self, f"{name}_scale"), 1 << 23, (0xFF << 23) - 1)
        if self.bias is not None:
            marks = torch.tensor([fp.BIAS_MASKED, fp.BIAS_EVEN, fp.BIAS_POISON], dtype=torch.int32, device=self.bias.device)
            require_within("bias", self.bias.masked_fill(torch.isin(self.bias, marks), 0), -fp.BIAS_LIMIT, fp.BIAS_LIMIT)

    def score_multiplier(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return M and F of :func:`.fixed_point.narrow_multiplier`, which is all that exports need of the scores' scales.

        Returns:
            int64 (1, heads, 1, 1).
        """
        query, key = (fp.split_scale(x.view(torch.float32)) for x in (self.query_scale, self.key_scale))
        constant = fp.split_float(self.softmax_scale * math.log2(math.e))
        return fp.narrow_multiplier(*fp.combine_scales(query, key, constant), self.head_dim, self.bias is not None)

    def heads_of(self, parts: Sequence[torch.Tensor], query: torch.Tensor | None) -> list[torch.Tensor]:
        """Return query, key and value, each (batch or windows, heads, tokens, channels), of what :meth:`forward` takes.

        Args:
            parts: see there.
            query: a constant one, or None.
        """
        batch = parts[0].shape[0]  # len() would fix it in torch.export
        views = [] if query is None else [query.expand(batch, -1, -1, -1)]
        for part in parts:
            tokens = self.tokens or part.shape[1]
            x = part.reshape(-1, tokens, math.prod(part.shape[2:]) // (self.heads * self.head_dim), self.heads, self.head_dim)
            views += [each.transpose(1, 2) for each in x.unbind(2)]
        if self.first:
            views[0] = views[0][:, :, : self.first]
        return views

    def mask_of(self, ids: torch.Tensor | None, queries: int, *, biased: bool = True) -> tuple[torch.Tensor | None, bool]:
        """Return what :func:`qflash.int8_attention` takes as its mask, bool or int32 that broadcast to the scores, and whether
        it is causal beside that.

        Args:
            ids: of tokens, if :attr:`padded`.
            queries: how many.
            biased: whether the bias is part of it.
        """
        bias = self.bias if biased else None
        if ids is None:
            return bias, self.causal
        visible = is_token(ids)[:, None, None]
        if self.causal:
            here = torch.arange(ids.shape[1], dtype=torch.int64, device=ids.device)
            visible = visible & (here <= here[:queries, None])
        return visible if bias is None else torch.where(visible, bias, fp.BIAS_MASKED), False

    def forward(self, *parts: torch.Tensor, backend: str = "auto") -> torch.Tensor:
        """Return int8 (batch, tokens, heads * head_dim).

        Args:
            parts: int8 (batch, tokens, n * heads * head_dim), n of query, key and value side by side, or one of them as (batch,
                tokens, heads, head_dim); all together query, key and value, or key and value where the query is a constant;
                behind them ids of tokens, int32 or int64 (batch, tokens), if :attr:`padded`.
            backend: see :func:`qflash.attention`.
        """
        ids = None
        if self.padded:
            *parts, ids = parts  # type: ignore[assignment]
        query, key, value = self.heads_of(parts, self.query)
        mask, is_causal = self.mask_of(ids, query.shape[2])
        scales = (x.view(torch.float32) for x in (self.query_scale, self.key_scale, self.value_scale, self.output_scale))
        query_scale, key_scale, value_scale, output_scale = scales
        out = torch.ops.qflash.int8_attention(
            query, query_scale, key, key_scale, value, value_scale, mask, is_causal, self.softmax_scale, output_scale,
            torch.int8, self.recipe, backend,
        )  # fmt: skip
        windows = parts[0].shape[1] // self.tokens if self.tokens else 1
        return out.transpose(1, 2).reshape(parts[0].shape[0], windows * out.shape[2], self.heads * self.head_dim)


class First(IntegerModule):
    """The first tokens of an image.

    Attributes:
        count: how many.
    """

    def __init__(self, count: int) -> None:
        super().__init__(count=count)
        _require_sizes(count=count)
        self.count = count

    def forward(self, h: torch.Tensor, backend: str = "auto") -> torch.Tensor:
        """Return (batch, count, channels) of (batch, tokens, channels)."""
        return h[:, : self.count]


class Join(IntegerModule):
    """Channels of int8 tensors side by side."""

    def forward(self, *parts: torch.Tensor, backend: str = "auto") -> torch.Tensor:
        """Return int8 (batch, channels of all)."""
        return torch.cat(parts, dim=-1)


class Widen(IntegerModule):
    """A token of the residual stream, or all, as an output.

    Attributes:
        token: its number; None for all.
    """

    def __init__(self, token: int | None) -> None:
        super().__init__(token=token)
        if token is not None:
            _require_sizes(0, token=token)
        self.token = token

    def forward(self, h: torch.Tensor, backend: str = "auto") -> torch.Tensor:
        """Return int32 (batch, channels) or (batch, tokens, channels) of int16 (batch, tokens, channels)."""
        return (h if self.token is None else h[:, self.token]).to(torch.int32)
