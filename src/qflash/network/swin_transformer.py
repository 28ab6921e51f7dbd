"""Quantise timm's SwinTransformer (version 1)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..integrations.swin_bias import window_bias
from ..quantization import bias_to_fixed
from ..recipe import Recipe
from . import conversion as cv
from .conversion import Ranges
from .models import SwinStage, SwinTransformer, SwinTransformerShape


def unsupported(model: Any) -> Iterator[str]:
    """Say what of a SwinTransformer has no integer form here."""
    if not cv.has_weights(model.patch_embed.norm):
        yield "patch_embed without a normalisation"
    if model.head.global_pool.pool_type != "avg":
        yield f"global_pool={model.head.global_pool.pool_type!r} (only 'avg')"
    if not cv.has_weights(model.norm):
        yield "no final normalisation"
    for number, stage in enumerate(model.layers):
        if number and any(side % 2 for side in model.layers[number - 1].output_resolution):
            yield f"layers.{number}.downsample of {model.layers[number - 1].output_resolution} tokens (only even sides)"
        if number and not hasattr(stage.downsample, "reduction"):
            yield f"layers.{number} without patch merging"
        if not number and hasattr(stage.downsample, "reduction"):
            yield "layers.0.downsample"
        for index, block in enumerate(stage.blocks):
            name = f"layers.{number}.blocks.{index}"
            yield from cv.unsupported_block(block, name)
            if any(size % window for size, window in zip(block.input_resolution, block.window_size, strict=True)):
                yield f"{name} on {block.input_resolution} tokens, no multiple of its window {block.window_size}"
            if getattr(block, "dynamic_mask", False):
                yield f"{name} with dynamic_mask=True"


def observed(model: Any) -> tuple[list[str], list[str]]:
    """Name the submodules whose inputs, and whose outputs, calibration looks at."""
    inputs, outputs = ["patch_embed.norm", "head.fc"], ["norm"]
    for number, stage in enumerate(model.layers):
        if number:
            inputs += [f"layers.{number}.downsample.reduction"]
        for index in range(len(stage.blocks)):
            more_inputs, more_outputs = cv.observed_block(f"layers.{number}.blocks.{index}")
            inputs, outputs = inputs + more_inputs, outputs + more_outputs
    return inputs, outputs


def convert(model: Any, ranges: Ranges, mean: Sequence[float], deviation: Sequence[float], recipe: Recipe) -> SwinTransformer:
    """Return the integer network of a float one; arguments as in :func:`.vision_transformer.convert`."""
    embed = model.patch_embed
    stages = []
    for stage in model.layers:
        first = stage.blocks[0]
        heads = first.attn.num_heads
        stages.append(
            SwinStage(
                grid=tuple(first.input_resolution), window=tuple(first.window_size),
                shifts=tuple(tuple(block.shift_size) for block in stage.blocks), channels=first.dim, heads=heads,
                head_dim=first.attn.qkv.out_features // (3 * heads), hidden=first.mlp.fc1.out_features,
            )
        )  # fmt: skip
    shape = SwinTransformerShape(
        image_size=tuple(embed.img_size), patch_size=tuple(embed.patch_size), image_channels=embed.proj.in_channels,
        stages=tuple(stages), outputs=getattr(model.head.fc, "out_features", 0), recipe=recipe.key,
    )  # fmt: skip
    network = SwinTransformer(shape)
    names = [
        [f"layers.{number}.blocks.{index}" for index in range(len(stage.blocks))] for number, stage in enumerate(model.layers)
    ]
    network.units = tuple(cv.stream_unit(ranges, each) for each in names)

    before = cv.unit_of(ranges["patch_embed.norm:in"])
    cv.convert_pixels(network.embed, embed.proj, mean, deviation, before)
    cv.finish_norm(network.embed_norm, embed.norm, before, network.units[0])
    for number, (stage, ours) in enumerate(zip(model.layers, network.stages, strict=True)):
        unit = network.units[number]
        if number:
            merge, name = network.merges[number - 1], f"layers.{number}.downsample.reduction:in"
            weight, bias = cv.parameters_of(stage.downsample.reduction)
            grid = cv.convert_norm_linear(
                merge.norm, stage.downsample.norm, network.units[number - 1], weight, ranges[name], cv.SPREADS["fc1"]
            )
            cv.quantize_linear(merge.reduction, weight, bias, grid, ranges[name].mean, unit)
        for name, block, our in zip(names[number], stage.blocks, ours, strict=True):
            cv.convert_attention(our, block, name, ranges, unit, 1.0)
            cv.convert_mlp(our, block, name, ranges, unit, 1.0)
            attention = block.attn
            bias = window_bias(
                attention.relative_position_bias_table.detach().float(), attention.relative_position_index, block.attn_mask
            )
            our.attn.bias.copy_(bias_to_fixed(bias))
    cv.convert_norm_mean_head(network, model.norm, ranges["norm:out"], ranges["head.fc:in"], network.units[-1], model.head.fc)
    return network.eval()
