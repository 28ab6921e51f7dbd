"""A float transformer as conversion understands it: :class:`FloatNetwork`.

Conversion reads this description and nothing else of a model. :meth:`FloatNetwork.run` computes what the description says,
with none of the model's own code. So what is missing in the description is missing in both, and a comparison of
:meth:`~FloatNetwork.run` with the model shows it (:mod:`.checks`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import torch
from torch.nn import functional as F

from . import operators as op

Watch = Callable[[str, torch.Tensor], None]
"""Is told of activations by name: of a layer ``"name:in"`` and ``"name:out"``, of a block ``"name:out"``."""


def _unwatched(name: str, x: torch.Tensor) -> None:
    """Do nothing."""


@dataclasses.dataclass(frozen=True, eq=False)
class FloatLinear:
    """A linear layer.

    Attributes:
        name: of the model's submodule.
        weight: (outputs, inputs).
        bias: (outputs,) or None.
    """

    name: str
    weight: torch.Tensor
    bias: torch.Tensor | None

    def run(self, x: torch.Tensor, watch: Watch) -> torch.Tensor:
        """Return (..., outputs) of (..., inputs)."""
        watch(f"{self.name}:in", x)
        x = F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))
        watch(f"{self.name}:out", x)
        return x


@dataclasses.dataclass(frozen=True, eq=False)
class FloatNorm:
    """A layer normalisation.

    Attributes:
        name: of the model's submodule.
        weight, bias: (channels,).
        eps: what is added to the variance.
    """

    name: str
    weight: torch.Tensor
    bias: torch.Tensor
    eps: float

    def run(self, x: torch.Tensor, watch: Watch) -> torch.Tensor:
        """Return normalised rows (..., channels)."""
        watch(f"{self.name}:in", x)
        x = F.layer_norm(x, self.weight.shape, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)
        watch(f"{self.name}:out", x)
        return x


@dataclasses.dataclass(frozen=True, eq=False)
class FloatWindows:
    """How Swin's attention divides the tokens, and what it adds to the scores.

    Attributes:
        grid, window, shift: (rows, columns) of tokens, see :func:`.operators.window_order`.
        bias: (1 or windows, heads, tokens of a window, tokens of a window).
    """

    grid: tuple[int, int]
    window: tuple[int, int]
    shift: tuple[int, int]
    bias: torch.Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class FloatBlock:
    """A transformer block with normalisation first.

    Attributes:
        name: of the model's submodule.
        norm1, qkv, proj: of attention; outputs of qkv are (query, key, value) x heads x channels.
        q_norm, k_norm: of a head's channels, or None.
        heads: of attention.
        scale: of the scores.
        windows: Swin's, or None.
        norm2, fc1, fc2: of the MLP.
        gelu: ``"none"`` or ``"tanh"``, PyTorch's names of its forms.
        factor1, factor2: layer scale (channels,), or None.
    """

    name: str
    norm1: FloatNorm
    qkv: FloatLinear
    q_norm: FloatNorm | None
    k_norm: FloatNorm | None
    heads: int
    scale: float
    windows: FloatWindows | None
    proj: FloatLinear
    factor1: torch.Tensor | None
    norm2: FloatNorm
    fc1: FloatLinear
    gelu: str
    fc2: FloatLinear
    factor2: torch.Tensor | None

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return self.qkv.weight.shape[0] // (3 * self.heads)

    def attend(self, x: torch.Tensor, watch: Watch) -> torch.Tensor:
        """Return attention of (batch, tokens, channels), behind the projection."""
        query, key, value = self.qkv.run(x, watch).unflatten(-1, (3, self.heads, self.head_dim)).permute(2, 0, 3, 1, 4)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm.run(query, watch), self.k_norm.run(key, watch)
        scores = (query * self.scale) @ key.transpose(-2, -1)
        if self.windows is not None:
            bias = self.windows.bias.to(scores)
            scores = (scores.unflatten(0, (-1, bias.shape[0])) + bias).flatten(0, 1)
        return self.proj.run((scores.softmax(dim=-1) @ value).transpose(1, 2).flatten(2), watch)

    def run(self, h: torch.Tensor, watch: Watch) -> torch.Tensor:
        """Return the residual stream (batch, tokens, channels) behind the block."""
        x = self.norm1.run(h, watch)
        if self.windows is None:
            x = self.attend(x, watch)
        else:
            order = op.window_order(self.windows.grid, self.windows.window, self.windows.shift).to(x.device)
            parts = op.gather_tokens(x, order).reshape(-1, self.windows.window[0] * self.windows.window[1], x.shape[2])
            x = op.scatter_tokens(self.attend(parts, watch).reshape(x.shape), order.flatten())
        h = h + (x if self.factor1 is None else x * self.factor1.to(x.dtype))
        x = self.fc1.run(self.norm2.run(h, watch), watch)
        x = self.fc2.run(F.gelu(x, approximate=self.gelu), watch)
        h = h + (x if self.factor2 is None else x * self.factor2.to(x.dtype))
        watch(f"{self.name}:out", h)
        return h


@dataclasses.dataclass(frozen=True, eq=False)
class FloatMerge:
    """Swin's patch merging: two by two tokens of a grid are joined, normalised and projected."""

    grid: tuple[int, int]
    norm: FloatNorm
    reduction: FloatLinear

    def run(self, h: torch.Tensor, watch: Watch) -> torch.Tensor:
        """Return a quarter of the tokens."""
        x = op.gather_tokens(h, op.merge_order(self.grid).to(h.device))
        return self.reduction.run(self.norm.run(x, watch), watch)


@dataclasses.dataclass(frozen=True, eq=False)
class FloatStage:
    """Blocks with one residual stream, and the patch merging before them or None."""

    merge: FloatMerge | None
    blocks: tuple[FloatBlock, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class FloatNetwork:
    """A vision transformer from normalised images to logits or features.

    Attributes:
        image_size, patch_size: (height, width) in pixels.
        image_channels: 3 for colour.
        patch: of a patch, its pixels flattened (channel, row, column).
        position: (1, patches, channels), added to the patches, or None.
        prefix: (1, tokens, channels), class token and registers with their positions, before the patches, or None.
        first_norm: before the first block, or None.
        stages: one, but for Swin.
        pool: ``"token"``: the first token is normalised; ``"mean"``: the mean of the normalised tokens but the prefix;
            ``"mean_then_norm"``: their mean is normalised.
        norm: the last one.
        head: None where the features are the output.
    """

    image_size: tuple[int, int]
    patch_size: tuple[int, int]
    image_channels: int
    patch: FloatLinear
    position: torch.Tensor | None
    prefix: torch.Tensor | None
    first_norm: FloatNorm | None
    stages: tuple[FloatStage, ...]
    pool: str
    norm: FloatNorm
    head: FloatLinear | None

    def blocks(self) -> Iterator[FloatBlock]:
        """Yield the blocks of all stages."""
        for stage in self.stages:
            yield from stage.blocks

    def layers(self) -> Iterator[FloatLinear | FloatNorm]:
        """Yield all linear layers and normalisations, in no particular order."""
        waiting: list[object] = [self]
        while waiting:
            part = waiting.pop()
            if isinstance(part, FloatLinear | FloatNorm):
                yield part
            elif isinstance(part, tuple):
                waiting += part
            elif dataclasses.is_dataclass(part):
                waiting += [getattr(part, field.name) for field in dataclasses.fields(part)]

    def run(self, images: torch.Tensor, watch: Watch = _unwatched) -> torch.Tensor:
        """Return logits (batch, outputs), or features (batch, channels), of normalised images.

        Args:
            images: (batch, channels, height, width), float32 or float64; everything is computed in this type.
            watch: is told of the activations, in the order in which they are computed.
        """
        rows, columns = (side // patch for side, patch in zip(self.image_size, self.patch_size, strict=True))
        h = images.unflatten(3, (columns, -1)).unflatten(2, (rows, -1)).permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        h = F.linear(h, self.patch.weight.to(h.dtype), None if self.patch.bias is None else self.patch.bias.to(h.dtype))
        # as a convolution returns it
        watch(f"{self.patch.name}:out", h.transpose(1, 2).unflatten(2, (rows, columns)))
        if self.position is not None:
            h = h + self.position.to(h.dtype)
        skipped = 0
        if self.prefix is not None:
            skipped = self.prefix.shape[1]
            h = torch.cat((self.prefix.to(h.dtype).expand(len(h), -1, -1), h), dim=1)
        if self.first_norm is not None:
            h = self.first_norm.run(h, watch)
        for stage in self.stages:
            if stage.merge is not None:
                h = stage.merge.run(h, watch)
            for block in stage.blocks:
                h = block.run(h, watch)
        if self.pool == "mean_then_norm":
            h = self.norm.run(h[:, skipped:].mean(dim=1), watch)
        else:
            h = self.norm.run(h, watch)
            h = h[:, 0] if self.pool == "token" else h[:, skipped:].mean(dim=1)
        return h if self.head is None else self.head.run(h, watch)
