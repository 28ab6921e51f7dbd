"""Quantise timm's VisionTransformer (ViT, DeiT, DINOv2)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..recipe import Recipe
from . import conversion as cv
from .conversion import Ranges
from .models import VisionTransformer, VisionTransformerShape

POOLS = ("token", "avg")


def unsupported(model: Any) -> Iterator[str]:
    """Say what of a VisionTransformer has no integer form here."""
    if model.global_pool not in POOLS:
        yield f"global_pool={model.global_pool!r} (only {POOLS})"
    if model.attn_pool is not None:
        yield "attn_pool"
    if getattr(model, "pool_include_prefix", False):
        yield "pool_include_prefix=True"
    if getattr(model, "dynamic_img_size", False) or model.patch_embed.img_size is None:
        yield "dynamic_img_size=True (the position embedding must be of one size)"
    if model.pos_embed is None:
        yield "no learnt position embedding"
    if cv.has_weights(model.patch_embed.norm):
        yield "patch_embed.norm"
    if not cv.has_weights(model.norm) and not cv.has_weights(model.fc_norm):
        yield "no final normalisation"
    if cv.has_weights(model.norm) and cv.has_weights(model.fc_norm):
        yield "norm together with fc_norm"
    if model.global_pool == "token" and cv.has_weights(model.fc_norm):
        yield "fc_norm behind the class token"
    for index, block in enumerate(model.blocks):
        yield from cv.unsupported_block(block, f"blocks.{index}")
    if len({cv.has_qk_norm(getattr(block, "attn", None)) for block in model.blocks}) > 1:
        yield "qk_norm in some blocks only"


def observed(model: Any) -> tuple[list[str], list[str]]:
    """Name the submodules whose inputs, and whose outputs, calibration looks at."""
    inputs, outputs = ["head"], ["patch_embed", "norm", "fc_norm"]
    inputs += [name for name in ("norm_pre", "fc_norm") if cv.has_weights(getattr(model, name))]
    for index, block in enumerate(model.blocks):
        more_inputs, more_outputs = cv.observed_block(f"blocks.{index}")
        norms = [f"blocks.{index}.attn.{part}" for part in ("q_norm", "k_norm") if cv.has_qk_norm(block.attn)]
        inputs, outputs = inputs + more_inputs + norms, outputs + more_outputs + norms
    return inputs, outputs


def convert(model: Any, ranges: Ranges, mean: Sequence[float], deviation: Sequence[float], recipe: Recipe) -> VisionTransformer:
    """Return the integer network of a float one.

    Args:
        model: timm's, in eval mode.
        ranges: of what :func:`observed` names.
        mean, deviation: of the image channels, of pixels in [0, 1].
        recipe: of attention.
    """
    first, embed = model.blocks[0], model.patch_embed
    pool = "token" if model.global_pool == "token" else "mean" if cv.has_weights(model.norm) else "mean_then_norm"
    shape = VisionTransformerShape(
        image_size=tuple(embed.img_size), patch_size=tuple(embed.patch_size), image_channels=embed.proj.in_channels,
        channels=model.embed_dim, depth=len(model.blocks), heads=first.attn.num_heads, head_dim=first.attn.head_dim,
        hidden=first.mlp.fc1.out_features, prefix_tokens=model.num_prefix_tokens, pool=pool,
        outputs=getattr(model.head, "out_features", 0), first_norm=cv.has_weights(model.norm_pre),
        softmax_scale=first.attn.scale, recipe=recipe.key, qk_norm=cv.has_qk_norm(first.attn),
    )  # fmt: skip
    network = VisionTransformer(shape)
    unit = cv.stream_unit(ranges, [f"blocks.{index}" for index in range(shape.depth)])
    network.units = (unit,)

    before = unit
    if network.norm_pre is not None:
        before = cv.unit_of(ranges["norm_pre:in"])
        cv.finish_norm(network.norm_pre, model.norm_pre, before, unit)
    cv.convert_pixels(network.embed, embed.proj, mean, deviation, before)
    position = cv.double(model.pos_embed)
    tokens = [cv.double(x) for x in (model.cls_token, model.reg_token) if x is not None]
    prefix = torch.cat([torch.zeros(1, 0, shape.channels, dtype=torch.float64, device="cpu"), *tokens], dim=1)
    if not model.no_embed_class:
        prefix = prefix + position[:, : prefix.shape[1]]
        position = position[:, prefix.shape[1] :]
    network.position.copy_(cv.to_int16(position, before))
    network.prefix.copy_(cv.to_int16(prefix, before))
    for index, (block, ours) in enumerate(zip(model.blocks, network.blocks, strict=True)):
        name = f"blocks.{index}"
        cv.convert_attention(ours, block, name, ranges, unit, cv.scale_of(block.ls1))
        cv.convert_mlp(ours, block, name, ranges, unit, cv.scale_of(block.ls2))

    norm = model.norm if cv.has_weights(model.norm) else model.fc_norm
    made = "norm:out" if cv.has_weights(model.norm) else "fc_norm:out"
    if shape.pool == "mean_then_norm":
        # a mean is smaller than what it is of
        assert network.mean is not None
        pooled = cv.unit_of(ranges["fc_norm:in"])
        units = torch.full((shape.channels,), unit, dtype=torch.float64, device="cpu")
        cv.finish_mean(network.mean, units, units * (pooled / unit))
        unit = pooled
    if shape.pool == "mean":
        cv.convert_norm_mean_head(network, norm, ranges[made], ranges["head:in"], unit, model.head)
    else:
        cv.convert_norm_head(network, norm, ranges[made], ranges["head:in"], unit, model.head)
    return network.eval()
