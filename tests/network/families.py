"""Small float encoders of several packages, which integer networks are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from small_networks import SWIN, VIT, draw_images, timm

transformers = pytest.importorskip("transformers")
torchvision = pytest.importorskip("torchvision")

SIDE = 32
STATISTICS: dict[str, Any] = {"mean": (0.48, 0.45, 0.4), "std": (0.22, 0.23, 0.25)}
_TRANSFORMERS = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "image_size": SIDE,
    "patch_size": 8, "num_labels": 6,
}  # fmt: skip
_SWIN = {
    "image_size": SIDE, "patch_size": 2, "embed_dim": 16, "depths": [2, 1], "num_heads": [1, 2], "window_size": 4,
    "num_labels": 6,
}  # fmt: skip


def vit(**options: Any) -> nn.Module:
    return timm.models.vision_transformer.VisionTransformer(**{**VIT, "num_classes": 6, **options})


def published(name: str, **options: Any) -> nn.Module:
    return timm.create_model(name, **{"img_size": SIDE, "num_classes": 6, **options})


def clip_classes() -> nn.Module:
    config = transformers.CLIPConfig(vision_config=_TRANSFORMERS, num_labels=6)
    return transformers.CLIPForImageClassification(config)


def of_transformers(name: str, kind: str = "ForImageClassification", **options: Any) -> nn.Module:
    config = getattr(transformers, f"{name}Config")(**(_SWIN if name.startswith("Swin") else _TRANSFORMERS), **options)
    return getattr(transformers, f"{name}{kind}")(config)


class Logits(nn.Module):
    """Runs a model of transformers as one that takes images and returns one tensor."""

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__()
        self.model, self.name = model, name

    def forward(self, images: torch.Tensor) -> Any:
        return getattr(self.model(images), self.name)


class TwoOutputs(nn.Module):
    """Returns features of all tokens beside logits."""

    def __init__(self) -> None:
        super().__init__()
        self.model = vit()

    def forward(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        tokens = self.model.forward_features(images)
        return {"tokens": tokens, "classes": self.model.forward_head(tokens)}


class PatchesTimes(nn.Module):
    """Multiplies its patches, and not its class token."""

    def __init__(self) -> None:
        super().__init__()
        self.model = vit()
        self.model.patch_embed.register_forward_hook(lambda _, __, out: out * torch.linspace(0.5, 2, out.shape[-1]))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.model(images)


class ChannelsLast(nn.Module):
    """Embeds patches by a linear layer that takes the channels of a pixel side by side, as timm's NaFlexVit does."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3 * 8 * 8, 48)
        self.model = vit(patch_size=1, img_size=SIDE // 8, in_chans=48)
        self.model.patch_embed.proj = nn.Identity()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        patches = images.unflatten(2, (-1, 8)).unflatten(4, (-1, 8)).permute(0, 2, 4, 3, 5, 1).flatten(3)
        return self.model(self.embed(patches).movedim(-1, 1))


def eva(**options: Any) -> nn.Module:
    return timm.models.eva.Eva(**{**VIT, "num_classes": 6, "use_rot_pos_emb": True, "head_init_scale": 1.0, **options})


class ConstantQuery(nn.Module):
    """Pools tokens by attention whose queries are parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.body = vit(num_classes=0, global_pool="", class_token=False)
        self.query = nn.Parameter(torch.randn(1, 2, 1, 24))
        self.kv, self.proj, self.norm, self.head = nn.Linear(48, 96), nn.Linear(48, 48), nn.LayerNorm(48), nn.Linear(48, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.body.forward_features(images)
        key, value = self.kv(x).reshape(x.shape[0], -1, 2, 2, 24).permute(2, 0, 3, 1, 4).unbind(0)
        x = nn.functional.scaled_dot_product_attention(self.query.expand(x.shape[0], -1, -1, -1), key, value)
        x = self.proj(x.transpose(1, 2).reshape(x.shape[0], 1, 48))
        return self.head(self.norm(x)[:, 0])


def swin_v2() -> nn.Module:
    return timm.models.swin_transformer_v2.SwinTransformerV2(**{**SWIN, "num_classes": 6})


class NormsBehind(nn.Module):
    """Normalises behind every sum, as the first transformers did: BERT's layers."""

    def __init__(self) -> None:
        super().__init__()
        self.model = vit()
        layers = [nn.TransformerEncoderLayer(48, 2, 96, 0.0, "gelu", batch_first=True) for _ in range(2)]
        self.model.norm_pre, self.model.norm, self.model.blocks = nn.LayerNorm(48), nn.Identity(), nn.Sequential(*layers)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.model(images)


class SpelledOut(nn.Module):
    """A normalisation by the root mean square as language models write it."""

    def __init__(self, channels: int, **options: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "timm: class token": vit,
    "timm: registers": lambda: vit(reg_tokens=2, no_embed_class=True, init_values=0.2),
    "timm: query and key norms": lambda: vit(qk_norm=True),
    "timm: mean": lambda: vit(global_pool="avg", class_token=False),
    "timm: SigLIP": lambda: vit(global_pool="map", class_token=False),
    "timm: all tokens": lambda: vit(num_classes=0, global_pool=""),
    "timm: distilled": lambda: published("deit_tiny_distilled_patch16_224", depth=2, embed_dim=48, num_heads=2, patch_size=8),
    "timm: BEiT": lambda: published("beit_base_patch16_224", depth=2, embed_dim=48, num_heads=2, patch_size=8),
    "timm: relative positions": lambda: published(
        "vit_relpos_small_patch16_224", depth=2, embed_dim=48, num_heads=2, patch_size=8
    ),
    "timm: SwiGLU": lambda: vit(mlp_layer=timm.layers.SwiGLUPacked, act_layer="silu", init_values=0.2),
    "timm: SwiGLU with a norm": lambda: vit(mlp_layer=timm.layers.SwiGLU, scale_mlp_norm=True),
    "timm: rotary": lambda: eva(num_reg_tokens=1, init_values=0.2),
    "timm: rotary of each head, class token": lambda: eva(rope_type="mixed", global_pool="token"),
    "timm: rotary and norms": lambda: eva(qk_norm=True, rope_rotate_half=True, rope_type="dinov3", class_token=False),
    "timm: a norm between attention and its projection": lambda: eva(scale_attn_inner=True, global_pool="token"),
    "timm: Swin": lambda: timm.models.swin_transformer.SwinTransformer(**{**SWIN, "num_classes": 6}),
    "timm: Swin V2": swin_v2,
    "timm: Swin V2, another": lambda: timm.models.swin_transformer_v2_cr.SwinTransformerV2Cr(
        img_size=SIDE, patch_size=2, embed_dim=16, depths=(2, 1), num_heads=(1, 2), window_size=4, num_classes=6
    ),
    "timm: root mean squares": lambda: vit(norm_layer=timm.layers.RmsNorm, qk_norm=True),
    "timm: norms before sums": lambda: vit(block_fn=timm.models.vision_transformer.ResPostBlock, init_values=0.5),
    "timm: norms before sums, relative positions": lambda: published(
        "vit_relpos_small_patch16_rpn_224", depth=2, embed_dim=48, num_heads=2, patch_size=8
    ),
    "timm: EVA, norms before sums": lambda: published(
        "eva02_enormous_patch14_clip_224", depth=2, embed_dim=48, num_heads=2, patch_size=8
    ),
    "timm: norms inside of branches": lambda: vit(scale_attn_norm=True, scale_mlp_norm=True),
    "timm: attention and MLP in parallel": lambda: vit(
        block_fn=timm.models.vision_transformer.ParallelScalingBlock, init_values=0.5, qk_norm=True, qkv_bias=False
    ),
    "timm: two of each in parallel": lambda: vit(block_fn=timm.models.vision_transformer.ParallelThingsBlock, init_values=0.5),
    "timm: positions behind a norm": lambda: published(
        "aimv2_large_patch14_224", depth=2, embed_dim=48, num_heads=2, patch_size=8, mlp_ratio=2.0
    ),
    "norms behind sums": NormsBehind,
    "root mean squares, spelled out": lambda: vit(norm_layer=SpelledOut),
    "transformers: Swin V2": lambda: of_transformers("Swinv2"),
    "torchvision: Swin V2": lambda: torchvision.models.SwinTransformer(
        [2, 2],
        16,
        [2, 1],
        [1, 2],
        [4, 4],
        num_classes=6,
        block=torchvision.models.swin_transformer.SwinTransformerBlockV2,
        downsample_layer=torchvision.models.swin_transformer.PatchMergingV2,
    ),
    "transformers: ViT": lambda: of_transformers("ViT"),
    "transformers: ViT, eager": lambda: of_transformers("ViT", attn_implementation="eager"),
    "transformers: ViT, tokens": lambda: Logits(of_transformers("ViT", "Model", add_pooling_layer=False), "last_hidden_state"),
    "transformers: DeiT": lambda: of_transformers("DeiT"),
    "transformers: DeiT with teacher": lambda: of_transformers("DeiT", "ForImageClassificationWithTeacher"),
    "transformers: DINOv2": lambda: of_transformers("Dinov2"),
    "transformers: DINOv2 with registers": lambda: of_transformers("Dinov2WithRegisters"),
    "transformers: DINOv2, SwiGLU": lambda: of_transformers("Dinov2", use_swiglu_ffn=True),
    "transformers: CLIP": lambda: Logits(of_transformers("CLIPVision", "Model"), "pooler_output"),
    "transformers: CLIP, classes": clip_classes,
    "transformers: BEiT": lambda: of_transformers("Beit", use_relative_position_bias=True),
    "transformers: BEiT, shared positions": lambda: of_transformers("Beit", use_shared_relative_position_bias=True),
    "transformers: SigLIP": lambda: Logits(of_transformers("SiglipVision", "Model"), "pooler_output"),
    "transformers: DINOv3": lambda: Logits(of_transformers("DINOv3ViT", "Model"), "last_hidden_state"),
    "transformers: Swin": lambda: of_transformers("Swin"),
    "torchvision: ViT": lambda: torchvision.models.VisionTransformer(SIDE, 8, 2, 2, 32, 64, num_classes=6),
    "torchvision: Swin": lambda: torchvision.models.SwinTransformer([2, 2], 16, [2, 1], [1, 2], [4, 4], num_classes=6),
    "patches times a number": PatchesTimes,
    "channels last": ChannelsLast,
    "two outputs": TwoOutputs,
    "a constant query": ConstantQuery,
}
"""Small models by name."""


def make(name: str) -> nn.Module:
    """Return a model with weights that do something, in eval mode: no scale near 0 hides a block, no table is zero."""
    torch.manual_seed(0)
    model = FAMILIES[name]()
    with torch.no_grad():
        for label, parameter in model.named_parameters():
            if parameter.dim() == 1 and any(each in label for each in ("gamma", "lambda", "layer_scale", ".ls")):
                parameter.uniform_(0.3, 0.6)
            elif parameter.dim() == 1:
                parameter.normal_(float(label.endswith("weight")), 0.15)
            elif any(each in label for each in ("token", "pos", "table", "query", "latent", "probe")) and "kernel" not in label:
                parameter.normal_(0, 0.5)
            else:
                parameter.normal_(0, 1.2 * parameter[0].numel() ** -0.5)
    return model.eval()


def images(count: int, seed: int = 1) -> torch.Tensor:
    """Return random images for any of them, uint8."""
    return draw_images(count, 3, SIDE, seed)


def normalise(pixels: torch.Tensor) -> torch.Tensor:
    """Return images as the float models take them."""
    mean, std = (torch.tensor(STATISTICS[name]).view(1, -1, 1, 1) for name in ("mean", "std"))
    return (pixels.float() / 255 - mean) / std
