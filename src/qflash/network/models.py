"""Whole integer networks: :class:`VisionTransformer` and :class:`SwinTransformer`, from uint8 images to int32 logits."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import torch
from torch import nn

from ..recipe import Recipe
from .cuda_graph import NetworkGraph
from .execution import check_images  # which also registers the operators
from .modules import Block, IntegerModule, LayerNorm, Linear, Mean, Merge, PatchEmbedding, WindowBlock
from .quality import Quality

MOST_PIXELS = 1 << 26
"""Of an image; tables of tokens grow with them."""


def _check_sizes(least: int = 1, **sizes: Any) -> None:
    """Require whole numbers from ``least`` on, or pairs of them."""
    for name, size in sizes.items():
        numbers = size if isinstance(size, tuple) and len(size) == 2 else (size,)
        if not all(type(number) is int and number >= least for number in numbers):
            raise ValueError(f"{name} must be whole and at least {least}, got {size!r}")


def _check_image(image_size: tuple[int, int], patch_size: tuple[int, int]) -> None:
    """Require an image of whole patches, and not too many."""
    _check_sizes(height=image_size[0], width=image_size[1], patch_height=patch_size[0], patch_width=patch_size[1])
    if image_size[0] % patch_size[0] or image_size[1] % patch_size[1] or image_size[0] * image_size[1] > MOST_PIXELS:
        raise ValueError(
            f"image_size must be a multiple of patch_size {patch_size}, of {MOST_PIXELS} pixels at most, got {image_size}"
        )


@dataclasses.dataclass(frozen=True)
class VisionTransformerShape:
    """What an integer vision transformer is made of.

    Attributes:
        image_size: (height, width) in pixels.
        patch_size: (height, width) in pixels.
        image_channels: 3 for colour.
        channels: of the residual stream.
        depth: blocks.
        heads, head_dim: of attention.
        hidden: channels inside the MLP.
        prefix_tokens: class token and registers.
        pool: ``"token"`` takes the first token; ``"mean"`` averages the normalised others; ``"mean_then_norm"`` averages
            first.
        outputs: logits; 0 for features, the normalised pooled token itself.
        first_norm: whether tokens are normalised before the first block.
        softmax_scale: factor of the scores.
        recipe: of attention (:attr:`qflash.Recipe.key`).
        qk_norm: whether query and key of a head are normalised.

    Raises:
        ValueError: a size is none, or the others do not go with it.
    """

    image_size: tuple[int, int]
    patch_size: tuple[int, int]
    image_channels: int
    channels: int
    depth: int
    heads: int
    head_dim: int
    hidden: int
    prefix_tokens: int
    pool: str
    outputs: int
    first_norm: bool
    softmax_scale: float
    recipe: str
    qk_norm: bool = False

    def __post_init__(self) -> None:
        _check_image(self.image_size, self.patch_size)
        _check_sizes(
            image_channels=self.image_channels, channels=self.channels, depth=self.depth, heads=self.heads,
            head_dim=self.head_dim, hidden=self.hidden,
        )  # fmt: skip
        _check_sizes(0, prefix_tokens=self.prefix_tokens, outputs=self.outputs)
        if self.pool not in ("token", "mean", "mean_then_norm"):
            raise ValueError(f"pool must be 'token', 'mean' or 'mean_then_norm', got {self.pool!r}")
        if self.pool == "token" and not self.prefix_tokens:
            raise ValueError("pool 'token' takes the first of the prefix_tokens, and there are none")

    @property
    def grid(self) -> tuple[int, int]:
        """Patches down and across."""
        return self.image_size[0] // self.patch_size[0], self.image_size[1] // self.patch_size[1]


class IntegerNetwork(IntegerModule):
    """A quantised network: uint8 images in, int32 out, integers between.

    Attributes:
        output_scale: what a unit of the output stands for, a float: ``logits.float() * output_scale``. A network computes
            nothing with it.
        units: what a unit of the residual stream stands for, stage by stage; nothing is computed with them either.
        backend: of every operator, see :func:`qflash.attention`.
        quality: how close it is to the float model (:class:`.quality.Quality`), as found when it was quantised; None where that
            is not known, as of a file that does not say it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.quality: Quality | None = None
        self.shape: Any
        self.output_scale = 1.0
        self.units: tuple[float, ...] = ()
        self.backend = "auto"

    def extra_repr(self) -> str:
        return "quality unknown" if self.quality is None else f"quality: {self.quality}"

    def __prepare_scriptable__(self) -> nn.Module:
        raise TypeError("torch.jit.script cannot take an integer network: use torch.export or torch.compile")

    def float_parts(self) -> list[str]:
        """Name the parts that are kept in floating point; none in a network that is ready."""
        kinds = ("attention", "mlp")
        return [
            f"{name}.{kind}"
            for name, module in self.named_modules()
            if isinstance(module, Block)
            for kind in kinds
            if getattr(module, f"float_{kind}") is not None
        ]

    def check_values(self) -> None:
        """Look whether all integers keep their bounds, :meth:`.modules.IntegerModule.check_values` of every module.

        Raises:
            ValueError: one does not; the message names it.
        """
        for name, module in self.named_modules():
            if module is not self and isinstance(module, IntegerModule):
                try:
                    module.check_values()
                except ValueError as error:
                    raise ValueError(f"{name}: {error}") from error

    def graph(self, batch: int) -> NetworkGraph:
        """Capture the forward pass of so many images in a CUDA graph, and return what replays it: images in, logits out.

        The network stays as it is. A graph knows nothing of later changes: moved, or loaded with other weights, capture it
        again.

        Args:
            batch: images a call, at least 1.

        Raises:
            TypeError, ValueError: ``batch`` is no such number, or the network is not on an NVIDIA GPU.

        Example::

            run = network.cuda().graph(64)
            logits = run(images)
        """
        return NetworkGraph(self, batch)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the network to a file; see :func:`qflash.load_model`."""
        from .storage import save_model

        save_model(self, path)

    def export_onnx(self, path: str | os.PathLike[str], *, batch: int | str = "dynamic") -> None:
        """Write the network as ONNX with integer operators only; see :func:`qflash.export_onnx`."""
        from .onnx_export import export_onnx

        export_onnx(self, path, batch=batch)

    def dequantize(self, output: torch.Tensor) -> torch.Tensor:
        """Return int32 logits or features as float32."""
        return output.to(torch.float32) * self.output_scale


def check_integer(network: object) -> None:
    """Require a network without parts in floating point, as files hold them.

    Raises:
        TypeError: ``network`` is none.
        ValueError: it has such parts; the message names them.
    """
    if not isinstance(network, IntegerNetwork):
        raise TypeError(f"network must be what quantize_model returns, got {type(network).__name__}")
    if parts := network.float_parts():
        raise ValueError(f"network must hold integers only, but keeps in floating point: {', '.join(parts)}")


class VisionTransformer(IntegerNetwork):
    """A ViT, DeiT or DINOv2 whose every operation is one of integers.

    Attributes:
        shape: its sizes.
        position: int16 (1, patches, channels): position embeddings in the unit of the residual stream.
        prefix: int16 (1, prefix tokens, channels): class token and registers with theirs.
        first: int32 (1, 1), the number of the class token; no part of a file.
    """

    first: torch.Tensor

    def __init__(self, shape: VisionTransformerShape) -> None:
        super().__init__()
        self.shape = shape
        self.blocks: Any
        rows, columns = shape.grid
        self.embed = PatchEmbedding(shape.image_channels, shape.patch_size, shape.channels)
        # ``nn.DataParallel`` broadcasts buffers by NCCL, which has no int16; so each lies in a buffer of int32
        self._tokens = {"position": rows * columns, "prefix": shape.prefix_tokens}
        for name, tokens in self._tokens.items():
            words = torch.zeros((tokens * shape.channels + 1) // 2, dtype=torch.int32, device="cpu")
            self.register_buffer(f"{name}_words", words, persistent=False)
        self.register_buffer("first", torch.zeros((1, 1), dtype=torch.int32, device="cpu"), persistent=False)
        self.norm_pre = LayerNorm(shape.channels, torch.int16) if shape.first_norm else None
        self.blocks = nn.ModuleList(
            Block(
                shape.channels, shape.heads, shape.head_dim, shape.hidden, shape.softmax_scale, Recipe.from_key(shape.recipe),
                qk_norm=shape.qk_norm,
            )
            for _ in range(shape.depth)
        )  # fmt: skip
        last = torch.int8 if shape.outputs else torch.int32
        self.norm = LayerNorm(shape.channels, torch.int16 if shape.pool == "mean" else last)
        pooled = {"token": None, "mean_then_norm": torch.int16, "mean": last}[shape.pool]
        self.mean = None if pooled is None else Mean(rows * columns, shape.channels, pooled)
        self.head = Linear(shape.channels, shape.outputs, torch.int32) if shape.outputs else None

    def _embeddings(self, name: str) -> torch.Tensor:
        """Return the int16 tensor (1, tokens, channels) that lies in a buffer of int32."""
        shape = 1, self._tokens[name], self.shape.channels
        words: torch.Tensor = getattr(self, f"{name}_words")
        return words.view(torch.int16)[: shape[1] * shape[2]].view(shape)

    @property
    def position(self) -> torch.Tensor:
        return self._embeddings("position")

    @property
    def prefix(self) -> torch.Tensor:
        return self._embeddings("prefix")

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        for name in self._tokens:
            destination[prefix + name] = self._embeddings(name)
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool, missing_keys: Any, unexpected_keys: Any,
        error_msgs: Any,
    ) -> None:  # fmt: skip
        rest = dict(state_dict)
        for name in self._tokens:
            x, own = rest.pop(prefix + name, None), self._embeddings(name)
            if x is None:
                if strict:
                    missing_keys.append(prefix + name)
            elif x.shape != own.shape or x.dtype != own.dtype:
                error_msgs.append(
                    f"{prefix}{name} must be {own.dtype} of shape {tuple(own.shape)}, got {x.dtype} of {tuple(x.shape)}"
                )
            else:
                if local_metadata.get("assign_to_params_buffers", False):
                    words = getattr(self, f"{name}_words")
                    setattr(self, f"{name}_words", torch.zeros_like(words, device=x.device))
                self._embeddings(name).copy_(x)
        super()._load_from_state_dict(rest, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)

    def embed_patches(self, images: torch.Tensor) -> torch.Tensor:
        """Return the residual stream before the first block, int16 (batch, tokens, channels)."""
        check_images(images, self.shape.image_channels, self.shape.image_size)
        h = self.embed(images, self.position, self.prefix if self.shape.prefix_tokens else None, self.backend)
        return h if self.norm_pre is None else self.norm_pre(h, self.backend)

    def stream(self, images: torch.Tensor) -> torch.Tensor:
        """Return the residual stream behind the last block, int16 (batch, tokens, channels)."""
        h = self.embed_patches(images)
        for block in self.blocks:
            h = block(h, self.backend)
        return h

    def pool(self, h: torch.Tensor) -> torch.Tensor:
        """Return what the head takes: int8 (or int32 features) (batch, channels) of the last residual stream."""
        if self.mean is None:
            return self.norm(h, self.backend, self.first)[:, 0]
        h = h[:, self.shape.prefix_tokens :]
        if self.shape.pool == "mean_then_norm":
            return self.norm(self.mean(h, self.backend), self.backend)
        return self.mean(self.norm(h, self.backend), self.backend)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Classify images.

        Args:
            images: uint8 (batch, image channels, height, width), RGB, not normalised.

        Returns:
            int32 (batch, outputs), or features (batch, channels) of a network without a head; times
            :attr:`output_scale` in the float network's unit.

        Raises:
            TypeError, ValueError: images are of another type or size.
        """
        x = self.pool(self.stream(images))
        return x if self.head is None else self.head(x, None, self.backend)

    def forward_features(self, images: torch.Tensor) -> torch.Tensor:
        """Return the normalised features of all tokens, int32 (batch, tokens, channels), of a network without a head."""
        if self.head is not None or self.mean is not None:
            raise ValueError("forward_features is for a network of num_classes=0 whose feature is the class token")
        return self.norm(self.stream(images), self.backend)


@dataclasses.dataclass(frozen=True)
class SwinStage:
    """One stage of :class:`SwinTransformerShape`; grids and windows are (rows, columns) of tokens."""

    grid: tuple[int, int]
    window: tuple[int, int]
    shifts: tuple[tuple[int, int], ...]
    channels: int
    heads: int
    head_dim: int
    hidden: int

    def __post_init__(self) -> None:
        _check_sizes(
            grid=self.grid, window=self.window, channels=self.channels, heads=self.heads, head_dim=self.head_dim,
            hidden=self.hidden,
        )  # fmt: skip
        if self.grid[0] % self.window[0] or self.grid[1] % self.window[1]:
            raise ValueError(f"window must divide the grid {self.grid}, got {self.window}")
        for shift in self.shifts:
            if not all(type(x) is int and 0 <= x < most for x, most in zip(shift, self.window, strict=True)):
                raise ValueError(f"a shift must be from 0 to less than the window {self.window}, got {shift}")


@dataclasses.dataclass(frozen=True)
class SwinTransformerShape:
    """What an integer Swin is made of; ``outputs``, ``recipe`` and sizes as in :class:`VisionTransformerShape`.

    Raises:
        ValueError: a size is none, or the others do not go with it.
    """

    image_size: tuple[int, int]
    patch_size: tuple[int, int]
    image_channels: int
    stages: tuple[SwinStage, ...]
    outputs: int
    recipe: str

    def __post_init__(self) -> None:
        _check_image(self.image_size, self.patch_size)
        _check_sizes(image_channels=self.image_channels)
        _check_sizes(0, outputs=self.outputs)
        if not self.stages:
            raise ValueError("a Swin has at least one stage")
        grid = self.image_size[0] // self.patch_size[0], self.image_size[1] // self.patch_size[1]
        for number, stage in enumerate(self.stages):
            if number:
                if grid[0] % 2 or grid[1] % 2:
                    raise ValueError(f"a grid of {grid} tokens cannot be merged two by two")
                grid = grid[0] // 2, grid[1] // 2
            if stage.grid != grid:
                raise ValueError(f"the grid of stage {number} must be {grid}, got {stage.grid}")


class SwinTransformer(IntegerNetwork):
    """A Swin (version 1) whose every operation is one of integers.

    Attributes:
        shape: its sizes.
    """

    def __init__(self, shape: SwinTransformerShape) -> None:
        super().__init__()
        self.shape = shape
        self.merges: Any
        self.stages: Any
        recipe = Recipe.from_key(shape.recipe)
        first, last = shape.stages[0], shape.stages[-1]
        self.embed = PatchEmbedding(shape.image_channels, shape.patch_size, first.channels)
        self.embed_norm = LayerNorm(first.channels, torch.int16)
        self.merges = nn.ModuleList(
            Merge(before.grid, before.channels, stage.channels)
            for before, stage in zip(shape.stages, shape.stages[1:], strict=False)
        )
        self.stages = nn.ModuleList(
            nn.ModuleList(
                WindowBlock(
                    stage.grid, stage.window, shift, stage.channels, stage.heads, stage.head_dim, stage.hidden,
                    stage.head_dim**-0.5, recipe,
                )
                for shift in stage.shifts
            )
            for stage in shape.stages
        )  # fmt: skip
        self.norm = LayerNorm(last.channels, torch.int16)
        self.mean = Mean(last.grid[0] * last.grid[1], last.channels, torch.int8 if shape.outputs else torch.int32)
        self.head = Linear(last.channels, shape.outputs, torch.int32) if shape.outputs else None

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Classify images; see :meth:`VisionTransformer.forward`."""
        check_images(images, self.shape.image_channels, self.shape.image_size)
        h = self.embed(images, None, None, self.backend)
        h = self.embed_norm(h, self.backend)
        for index, stage in enumerate(self.stages):
            if index:
                h = self.merges[index - 1](h, self.backend)
            for block in stage:
                h = block(h, self.backend)
        x = self.mean(self.norm(h, self.backend), self.backend)
        return x if self.head is None else self.head(x, None, self.backend)
