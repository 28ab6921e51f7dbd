"""Whole integer networks: :class:`VisionTransformer` and :class:`SwinTransformer`, from uint8 images to int32 logits."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import MutableMapping
from typing import Any

import torch
from torch import nn

from ..fixed_point import MAX_HEAD_DIM, MAX_KEYS
from ..recipe import Recipe
from ..validation import resolve_softmax_scale
from . import operators as op
from .cuda_graph import NetworkGraph
from .execution import check_images  # which also registers the operators
from .modules import (
    EXTRA_STATE,
    LOADED,
    Block,
    IntegerModule,
    LayerNorm,
    Linear,
    Mean,
    Merge,
    PatchEmbedding,
    WindowBlock,
)
from .quality import Quality

MOST_PIXELS = 1 << 26
"""Of an image."""
MOST_TOKENS = MAX_KEYS
"""Of an image, the row limit of attention; a Swin, whose rows are shorter, has tables as long as that."""
MOST_OF_A_SIZE = 1 << 20
"""Heads, hidden channels, outputs; elements of a tensor then fit 63 bits."""


def _check_sizes(least: int = 1, most: int = MOST_OF_A_SIZE, **sizes: Any) -> None:
    """Require whole numbers from ``least`` to ``most``."""
    for name, size in sizes.items():
        if type(size) is not int or not least <= size <= most:
            raise ValueError(f"{name} must be a whole number from {least} to {most}, got {size!r}")


def _check_pairs(least: int = 1, **pairs: Any) -> None:
    """Require (rows, columns), whole numbers from ``least`` on."""
    for name, pair in pairs.items():
        if type(pair) is not tuple or len(pair) != 2 or not all(type(x) is int and x >= least for x in pair):
            raise ValueError(f"{name} must be two whole numbers of at least {least}, got {pair!r}")


def _check_flags(**flags: Any) -> None:
    for name, flag in flags.items():
        if type(flag) is not bool:
            raise ValueError(f"{name} must be true or false, got {flag!r}")


def _check_image(image_size: tuple[int, int], patch_size: tuple[int, int], prefix_tokens: int = 0) -> None:
    """Require an image of whole patches, and not too many."""
    _check_pairs(image_size=image_size, patch_size=patch_size)
    if image_size[0] % patch_size[0] or image_size[1] % patch_size[1] or image_size[0] * image_size[1] > MOST_PIXELS:
        raise ValueError(
            f"image_size must be a multiple of patch_size {patch_size}, of {MOST_PIXELS} pixels at most, got {image_size}"
        )
    tokens = (image_size[0] // patch_size[0]) * (image_size[1] // patch_size[1]) + prefix_tokens
    if tokens > MOST_TOKENS:
        raise ValueError(f"an image must have at most {MOST_TOKENS} tokens, got {tokens} of image_size {image_size}")


def _check_recipe(recipe: Any) -> None:
    """Require the key of a recipe, with all fields."""
    try:
        whole = type(recipe) is str and Recipe.from_key(recipe).key == recipe
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"recipe must be the key of a qflash.Recipe, got {recipe!r}: {error}") from error
    if not whole:
        raise ValueError(f"recipe must be the key of a qflash.Recipe, which names all of its fields, got {recipe!r}")


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
        _check_sizes(0, prefix_tokens=self.prefix_tokens, outputs=self.outputs)
        _check_image(self.image_size, self.patch_size, self.prefix_tokens)
        _check_sizes(image_channels=self.image_channels, depth=self.depth, heads=self.heads, hidden=self.hidden)
        _check_sizes(channels=self.channels, most=op.MAX_CHANNELS)
        _check_sizes(head_dim=self.head_dim, most=MAX_HEAD_DIM)
        _check_flags(first_norm=self.first_norm, qk_norm=self.qk_norm)
        _check_recipe(self.recipe)
        if not isinstance(self.softmax_scale, (int, float)) or isinstance(self.softmax_scale, bool):
            raise ValueError(f"softmax_scale must be a number, got {self.softmax_scale!r}")
        resolve_softmax_scale(self.softmax_scale, self.head_dim)
        if self.pool not in ("token", "mean", "mean_then_norm"):
            raise ValueError(f"pool must be 'token', 'mean' or 'mean_then_norm', got {self.pool!r}")
        if self.pool == "token" and not self.prefix_tokens:
            raise ValueError("pool 'token' takes the first of the prefix_tokens, and there are none")

    @property
    def grid(self) -> tuple[int, int]:
        """Patches down and across."""
        return self.image_size[0] // self.patch_size[0], self.image_size[1] // self.patch_size[1]

    @property
    def blocks(self) -> int:
        """Transformer blocks."""
        return self.depth

    @property
    def streams(self) -> int:
        """Residual streams, each of which has a unit."""
        return 1


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

    def get_extra_state(self) -> torch.Tensor:
        """Return what a ``state_dict`` holds beside the tensors: the header of a file, JSON as a uint8 tensor."""
        from .storage import header_tensor

        return header_tensor(self)

    def _load_from_state_dict(
        self, state_dict: MutableMapping[str, Any], prefix: str, local_metadata: Any, strict: bool, missing_keys: list[str],
        unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        from .storage import load_state, network_tensors

        names = (*network_tensors(self), EXTRA_STATE)
        given = {name: state_dict[prefix + name] for name in names if prefix + name in state_dict}
        if given:
            try:
                load_state(self, given, assign=local_metadata.get("assign_to_params_buffers", False))
            except ValueError as error:
                error_msgs.append(
                    f"{prefix.rstrip('.') or type(self).__name__} stays as it is: {error}; network.save and qflash.load_model "
                    "keep all of an integer network"
                )
            state_dict.update({prefix + name: LOADED for name in given})
        elif strict:
            missing_keys.append(prefix + EXTRA_STATE)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)

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

    def export_onnx(self, path: str | os.PathLike[str], *, batch: int | str = "dynamic", **options: Any) -> None:
        """Write the network as ONNX with integer operators only; see :func:`qflash.export_onnx`, which has more options."""
        from .onnx_export import export_onnx

        export_onnx(self, path, batch=batch, **options)

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
        self.units = (1.0,) * shape.streams
        self.blocks: Any
        rows, columns = shape.grid
        self.embed = PatchEmbedding(shape.image_channels, shape.patch_size, shape.channels)
        # ``nn.DataParallel`` broadcasts buffers by NCCL, which has no int16; so each lies in a buffer of int32
        self._tokens = {"position": rows * columns, "prefix": shape.prefix_tokens}
        for name, tokens in self._tokens.items():
            self._buffer(f"{name}_words", ((tokens * shape.channels + 1) // 2,), torch.int32, persistent=False)
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

    def _set_embeddings(self, name: str, x: torch.Tensor) -> None:
        """Let a buffer of int32 hold an int16 tensor (1, tokens, channels)."""
        flat = x.detach().flatten()
        self.register_buffer(
            f"{name}_words", nn.functional.pad(flat, (0, flat.numel() % 2)).view(torch.int32), persistent=False
        )

    position = property(lambda self: self._embeddings("position"), lambda self, x: self._set_embeddings("position", x))
    prefix = property(lambda self: self._embeddings("prefix"), lambda self, x: self._set_embeddings("prefix", x))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        for name in self._tokens:
            destination[prefix + name] = self._embeddings(name)
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def integers(self) -> dict[str, torch.Tensor]:
        return {**super().integers(), **{name: self._embeddings(name) for name in self._tokens}}

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
        _check_pairs(grid=self.grid, window=self.window)
        _check_sizes(heads=self.heads, hidden=self.hidden)
        _check_sizes(channels=self.channels, most=op.MAX_CHANNELS)
        _check_sizes(head_dim=self.head_dim, most=MAX_HEAD_DIM)
        if type(self.shifts) is not tuple or not self.shifts:
            raise ValueError(f"shifts must hold one pair for each block, got {self.shifts!r}")
        if self.grid[0] % self.window[0] or self.grid[1] % self.window[1]:
            raise ValueError(f"window must divide the grid {self.grid}, got {self.window}")
        for shift in self.shifts:
            _check_pairs(0, shift=shift)
            if not all(x < most for x, most in zip(shift, self.window, strict=True)):
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
        _check_recipe(self.recipe)
        if type(self.stages) is not tuple or not self.stages or not all(type(stage) is SwinStage for stage in self.stages):
            raise ValueError(f"stages must hold at least one stage, got {self.stages!r}")
        grid = self.image_size[0] // self.patch_size[0], self.image_size[1] // self.patch_size[1]
        for number, stage in enumerate(self.stages):
            if number:
                if grid[0] % 2 or grid[1] % 2:
                    raise ValueError(f"a grid of {grid} tokens cannot be merged two by two")
                grid = grid[0] // 2, grid[1] // 2
            if stage.grid != grid:
                raise ValueError(f"the grid of stage {number} must be {grid}, got {stage.grid}")

    @property
    def blocks(self) -> int:
        """Transformer blocks."""
        return sum(len(stage.shifts) for stage in self.stages)

    @property
    def streams(self) -> int:
        """Residual streams, each of which has a unit."""
        return len(self.stages)


class SwinTransformer(IntegerNetwork):
    """A Swin (version 1) whose every operation is one of integers.

    Attributes:
        shape: its sizes.
    """

    def __init__(self, shape: SwinTransformerShape) -> None:
        super().__init__()
        self.shape = shape
        self.units = (1.0,) * shape.streams
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
