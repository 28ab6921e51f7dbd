"""Quantise timm's SwinTransformer (version 1)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from ..integrations.swin_bias import window_bias
from ..quantization import bias_to_fixed
from ..recipe import Recipe
from . import conversion as cv
from . import reading
from .conversion import Ranges
from .float_network import FloatMerge, FloatNetwork, FloatStage, FloatWindows
from .models import SwinStage, SwinTransformer, SwinTransformerShape


def _unsupported(model: Any) -> Iterator[str]:
    """Say what of a SwinTransformer has no integer form here."""
    wrong = list(reading.wrong_patches(model.patch_embed))
    yield from wrong
    if wrong:
        return
    channels = reading.only(model.patch_embed.proj, "", nn.Conv2d)[0].out_channels
    if reading.is_idle(model.patch_embed.norm):
        yield "patch_embed without a normalisation"
    else:
        yield from reading.wrong_norm(model.patch_embed.norm, "patch_embed.norm", channels)
    for number, stage in enumerate(model.layers):
        merge, before = stage.downsample, model.layers[number - 1]
        if number and type(merge).__name__ != "PatchMerging":
            yield f"layers.{number} without patch merging: downsample of {type(merge).__name__}"
        elif number:
            if any(side % 2 for side in before.output_resolution):
                yield f"layers.{number}.downsample of {before.output_resolution} tokens (only even sides)"
            yield from reading.wrong_norm(merge.norm, f"layers.{number}.downsample.norm", 4 * channels)
            outputs = stage.blocks[0].dim if len(stage.blocks) else None
            yield from reading.wrong_linear(merge.reduction, f"layers.{number}.downsample.reduction", 4 * channels, outputs)
        elif not reading.is_idle(merge):
            yield f"layers.0.downsample of {type(merge).__name__}"
        if not len(stage.blocks):
            yield f"layers.{number} without blocks"
            return
        channels = stage.blocks[0].dim
        yield from _unsupported_stage(stage, number, channels)
    if reading.is_idle(model.norm):
        yield "no final normalisation"
    else:
        yield from reading.wrong_norm(model.norm, "norm", channels)
    if type(model.head).__name__ != "ClassifierHead":
        yield f"head of {type(model.head).__name__} (only ClassifierHead)"
        return
    if reading.part(model, "head.global_pool.pool_type") != "avg":
        yield f"global_pool={reading.part(model, 'head.global_pool.pool_type')!r} (only 'avg')"
    yield from reading.busy(model, "", ("head.drop", "head.flatten"))
    if not reading.is_idle(model.head.fc):
        yield from reading.wrong_linear(model.head.fc, "head.fc", channels)


def _unsupported_stage(stage: Any, number: int, channels: int) -> Iterator[str]:
    """Say what of a stage's blocks has no integer form here."""
    blocks = [(f"layers.{number}.blocks.{index}", block) for index, block in enumerate(stage.blocks)]
    wrong = [
        text
        for name, block in blocks
        for text in reading.wrong_block(block, name, channels, "SwinTransformerBlock", "WindowAttention")
    ]
    if wrong:
        yield from wrong
        return
    yield from reading.unlike(blocks)
    first = blocks[0][1]
    for name, block in blocks:
        if abs(block.attn.scale - reading.head_dim_of(block.attn) ** -0.5) > 1e-9 * block.attn.scale:
            yield f"{name}.attn.scale of {block.attn.scale} (only head_dim ** -0.5)"
        if tuple(block.window_size) != tuple(first.window_size) or tuple(block.input_resolution) != tuple(
            first.input_resolution
        ):
            yield f"{name} with a window {block.window_size} on {block.input_resolution} tokens, unlike {blocks[0][0]}"
        if any(size % window for size, window in zip(block.input_resolution, block.window_size, strict=True)):
            yield f"{name} on {block.input_resolution} tokens, no multiple of its window {block.window_size}"
        if getattr(block, "dynamic_mask", False):
            yield f"{name} with dynamic_mask=True"
        yield from _wrong_bias(block, name)


def _wrong_bias(block: Any, name: str) -> Iterator[str]:
    """Say what of a block's bias and mask does not fit its windows."""
    attention, tokens = block.attn, math.prod(block.window_size)
    windows = math.prod(block.input_resolution) // tokens
    index, table = attention.relative_position_index, attention.relative_position_bias_table
    if index.shape != (tokens, tokens) or table.dim() != 2 or table.shape[1] != attention.num_heads:
        yield f"{name}.attn with a relative position bias of {tuple(index.shape)} tokens and {tuple(table.shape)} entries"
    if not all(0 <= shift < size for shift, size in zip(block.shift_size, block.window_size, strict=True)):
        yield f"{name} with a shift {block.shift_size} in windows {block.window_size}"
    mask = block.attn_mask
    if mask is not None and (not any(block.shift_size) or mask.shape != (windows, tokens, tokens)):
        yield f"{name}.attn_mask of {tuple(mask.shape)} with a shift {block.shift_size} of windows {block.window_size}"


def _windows(block: Any) -> FloatWindows:
    attention = block.attn
    table = attention.relative_position_bias_table.detach().float()
    return FloatWindows(
        tuple(block.input_resolution), tuple(block.window_size), tuple(block.shift_size),
        window_bias(table, attention.relative_position_index, block.attn_mask),
    )  # fmt: skip


def read(model: Any) -> FloatNetwork:
    """Describe a SwinTransformer.

    Raises:
        ValueError: a part has no integer form; the message names it.
    """
    reading.refuse(_unsupported(model))
    embed = model.patch_embed
    stages = []
    for number, stage in enumerate(model.layers):
        name = f"layers.{number}"
        merge = None
        if number:
            norm = reading.norm(stage.downsample.norm, f"{name}.downsample.norm")
            reduction = reading.linear(stage.downsample.reduction, f"{name}.downsample.reduction")
            merge = FloatMerge(tuple(model.layers[number - 1].output_resolution), norm, reduction)
        blocks = (reading.block(block, f"{name}.blocks.{i}", _windows(block)) for i, block in enumerate(stage.blocks))
        stages.append(FloatStage(merge, tuple(blocks)))
    return FloatNetwork(
        image_size=tuple(embed.img_size), patch_size=tuple(embed.patch_size),
        image_channels=reading.only(embed.proj, "", nn.Conv2d)[0].in_channels,
        patch=reading.linear(embed.proj, "patch_embed.proj"), position=None, prefix=None,
        first_norm=reading.norm(embed.norm, "patch_embed.norm"), stages=tuple(stages), pool="mean",
        norm=reading.norm(model.norm, "norm"),
        head=None if reading.is_idle(model.head.fc) else reading.linear(model.head.fc, "head.fc"),
    )  # fmt: skip


def convert(
    plan: FloatNetwork, ranges: Ranges, mean: Sequence[float], deviation: Sequence[float], recipe: Recipe
) -> SwinTransformer:
    """Return the integer network of a float one; arguments as in :func:`.vision_transformer.convert`."""
    stages = []
    for stage in plan.stages:
        first = stage.blocks[0]
        windows = [block.windows for block in stage.blocks if block.windows is not None]
        stages.append(
            SwinStage(
                grid=windows[0].grid, window=windows[0].window, shifts=tuple(each.shift for each in windows),
                channels=first.proj.weight.shape[0], heads=first.heads, head_dim=first.head_dim,
                hidden=first.fc1.weight.shape[0],
            )
        )  # fmt: skip
    shape = SwinTransformerShape(
        image_size=plan.image_size, patch_size=plan.patch_size, image_channels=plan.image_channels, stages=tuple(stages),
        outputs=0 if plan.head is None else plan.head.weight.shape[0], recipe=recipe.key,
    )  # fmt: skip
    network = SwinTransformer(shape)
    network.units = tuple(cv.stream_unit(ranges, stage.blocks) for stage in plan.stages)

    assert plan.first_norm is not None
    before = cv.unit_of(ranges[f"{plan.first_norm.name}:in"])
    cv.convert_pixels(network.embed, plan, mean, deviation, before)
    cv.finish_norm(network.embed_norm, plan.first_norm, before, network.units[0])
    for number, (stage, ours) in enumerate(zip(plan.stages, network.stages, strict=True)):
        unit = network.units[number]
        if stage.merge is not None:
            merge, inputs = network.merges[number - 1], ranges[f"{stage.merge.reduction.name}:in"]
            weight, bias = cv.parameters_of(stage.merge.reduction)
            grid = cv.convert_norm_linear(
                merge.norm, stage.merge.norm, network.units[number - 1], weight, inputs, cv.SPREADS["fc1"]
            )
            cv.quantize_linear(merge.reduction, weight, bias, grid, inputs.mean, unit)
        for block, our in zip(stage.blocks, ours, strict=True):
            cv.convert_block(our, block, ranges, unit)
            assert block.windows is not None
            our.attn.bias.copy_(bias_to_fixed(block.windows.bias))
    cv.convert_norm_mean_head(network, plan, ranges, network.units[-1])
    return network.eval()
