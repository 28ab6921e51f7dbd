"""Quantise timm's VisionTransformer (ViT, DeiT, DINOv2)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ..recipe import Recipe
from . import conversion as cv
from . import reading
from .conversion import Ranges
from .float_network import FloatNetwork, FloatStage
from .models import VisionTransformer, VisionTransformerShape

POOLS = ("token", "avg")


def _unsupported(model: Any) -> Iterator[str]:
    """Say what of a VisionTransformer has no integer form here."""
    if model.global_pool not in POOLS:
        yield f"global_pool={model.global_pool!r} (only {POOLS})"
    if model.attn_pool is not None:
        yield f"attn_pool of {type(model.attn_pool).__name__}"
    if getattr(model, "pool_include_prefix", False):
        yield "pool_include_prefix=True"
    if getattr(model, "dynamic_img_size", False):
        yield "dynamic_img_size=True (the position embedding must be of one size)"
    wrong = list(reading.wrong_patches(model.patch_embed))
    yield from wrong
    if wrong:
        return
    channels = model.embed_dim
    yield from reading.busy(model, "", ("patch_embed.norm", "pos_drop", "patch_drop", "head_drop"))
    prefix = 0
    for name in ("cls_token", "reg_token"):
        tokens = getattr(model, name)
        if tokens is not None:
            prefix += tokens.shape[1]
            yield from reading.positions(tokens, name, tokens.shape[1], channels)
    if model.num_prefix_tokens != prefix:
        yield f"num_prefix_tokens={model.num_prefix_tokens} with {prefix} tokens"
    if model.pos_embed is None:
        yield "no learnt position embedding"
    else:
        patches = model.patch_embed.num_patches + (0 if model.no_embed_class else prefix)
        yield from reading.positions(model.pos_embed, "pos_embed", patches, channels)
    for name in ("norm_pre", "norm", "fc_norm"):
        if not reading.is_idle(getattr(model, name)):
            yield from reading.wrong_norm(getattr(model, name), name, channels)
    last = [name for name in ("norm", "fc_norm") if not reading.is_idle(getattr(model, name))]
    if not last:
        yield "no final normalisation"
    if len(last) == 2:
        yield "norm together with fc_norm"
    if model.global_pool == "token" and "fc_norm" in last:
        yield "fc_norm behind the class token"
    if not reading.is_idle(model.head):
        yield from reading.wrong_linear(model.head, "head", channels)
    blocks = [(f"blocks.{index}", block) for index, block in enumerate(model.blocks)]
    if not blocks:
        yield "no blocks"
    wrong = [text for name, block in blocks for text in reading.wrong_block(block, name, channels, "Block", "Attention")]
    yield from wrong or reading.unlike(blocks)


def read(model: Any) -> FloatNetwork:
    """Describe a VisionTransformer.

    Raises:
        ValueError: a part has no integer form; the message names it.
    """
    reading.refuse(_unsupported(model))
    embed = model.patch_embed
    tokens = [x.detach() for x in (model.cls_token, model.reg_token) if x is not None]
    prefix, position = torch.cat(tokens, dim=1) if tokens else None, model.pos_embed.detach()
    if prefix is not None and not model.no_embed_class:
        count = prefix.shape[1]
        prefix, position = prefix + position[:, :count], position[:, count:]
    idle = reading.is_idle
    pool = "token" if model.global_pool == "token" else "mean_then_norm" if idle(model.norm) else "mean"
    return FloatNetwork(
        image_size=tuple(embed.img_size), patch_size=tuple(embed.patch_size),
        image_channels=reading.only(embed.proj, "", nn.Conv2d)[0].in_channels,
        patch=reading.linear(embed.proj, "patch_embed.proj"), position=position, prefix=prefix,
        first_norm=None if idle(model.norm_pre) else reading.norm(model.norm_pre, "norm_pre"),
        stages=(
            FloatStage(None, tuple(reading.block(block, f"blocks.{i}", None) for i, block in enumerate(model.blocks))),
        ),
        pool=pool, norm=reading.norm(model.fc_norm, "fc_norm") if idle(model.norm) else reading.norm(model.norm, "norm"),
        head=None if idle(model.head) else reading.linear(model.head, "head"),
    )  # fmt: skip


def convert(
    plan: FloatNetwork, ranges: Ranges, mean: Sequence[float], deviation: Sequence[float], recipe: Recipe
) -> VisionTransformer:
    """Return the integer network of a float one.

    Args:
        plan: what :func:`read` returns.
        ranges: of what :func:`.conversion.observed` names.
        mean, deviation: of the image channels, of pixels in [0, 1].
        recipe: of attention.
    """
    (stage,) = plan.stages
    first = stage.blocks[0]
    shape = VisionTransformerShape(
        image_size=plan.image_size, patch_size=plan.patch_size, image_channels=plan.image_channels,
        channels=plan.patch.weight.shape[0], depth=len(stage.blocks), heads=first.heads, head_dim=first.head_dim,
        hidden=first.fc1.weight.shape[0], prefix_tokens=0 if plan.prefix is None else plan.prefix.shape[1], pool=plan.pool,
        outputs=0 if plan.head is None else plan.head.weight.shape[0], first_norm=plan.first_norm is not None,
        softmax_scale=first.scale, recipe=recipe.key, qk_norm=first.q_norm is not None,
    )  # fmt: skip
    network = VisionTransformer(shape)
    unit = cv.stream_unit(ranges, stage.blocks)
    network.units = (unit,)

    before = unit
    if plan.first_norm is not None and network.norm_pre is not None:
        before = cv.unit_of(ranges[f"{plan.first_norm.name}:in"])
        cv.finish_norm(network.norm_pre, plan.first_norm, before, unit)
    cv.convert_pixels(network.embed, plan, mean, deviation, before)
    assert plan.position is not None
    network.position.copy_(cv.to_int16(cv.double(plan.position), before))
    if plan.prefix is not None:
        network.prefix.copy_(cv.to_int16(cv.double(plan.prefix), before))
    for block, ours in zip(stage.blocks, network.blocks, strict=True):
        cv.convert_block(ours, block, ranges, unit)

    if shape.pool == "mean_then_norm":
        # a mean is smaller than what it is of
        assert network.mean is not None
        pooled = cv.unit_of(ranges[f"{plan.norm.name}:in"])
        units = torch.full((shape.channels,), unit, dtype=torch.float64, device="cpu")
        cv.finish_mean(network.mean, units, units * (pooled / unit))
        unit = pooled
    if shape.pool == "mean":
        cv.convert_norm_mean_head(network, plan, ranges, unit)
    else:
        cv.convert_norm_head(network, plan, ranges, unit)
    return network.eval()
