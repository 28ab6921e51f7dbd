"""Models that differ from timm's in one place: each becomes a right network, or is refused with the place's name."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import qflash
from qflash_lab.bench.metrics import sqnr
from small_networks import build, draw, normalise, timm

RIGHT = "right"


class LoRALinear(nn.Linear):
    """A layer with a product of its own besides, as PEFT merges none."""

    def __init__(self, base: nn.Linear, scale: float = 1.0) -> None:
        super().__init__(base.in_features, base.out_features, base.bias is not None)
        self.load_state_dict(base.state_dict())
        self.down, self.up = nn.Linear(base.in_features, 4, bias=False), nn.Linear(4, base.out_features, bias=False)
        nn.init.normal_(self.up.weight, std=scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.up(self.down(x))


class Wrapped(nn.Module):
    """A layer that hands out the weight of the one that it holds."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, base.out_features, bias=False)  # type: ignore[arg-type]

    @property
    def weight(self) -> Any:
        return self.base.weight

    @property
    def bias(self) -> Any:
        return self.base.bias

    def forward(self, x: torch.Tensor) -> Any:
        return self.base(x) + self.down(x)


class Cosine(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 20 * F.linear(F.normalize(x, dim=-1), F.normalize(self.weight, dim=-1))


class Halved(nn.LayerNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.5 * super().forward(x)


class Doubled(nn.Identity):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


class Mlp(timm.layers.Mlp):  # type: ignore[name-defined]
    """Of the same name as timm's, with another product."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * x.mean(-1, keepdim=True).tanh()


class GELU(nn.Module):
    """Of the same name as timm's, and a sigmoid."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(1.702 * x)


class Sharper(nn.Conv2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x - 0.3 * x.mean((2, 3), keepdim=True))


def become(kind: type, path: str) -> Callable[[Any], None]:
    """Return what gives a submodule another class."""
    return lambda model: setattr(model.get_submodule(path), "__class__", kind)


def put(path: str, make: Callable[[Any], Any]) -> Callable[[Any], None]:
    """Return what replaces an attribute by what is made of it."""

    def change(model: Any) -> None:
        parent, _, name = path.rpartition(".")
        held = model.get_submodule(parent)
        value = make(getattr(held, name))
        setattr(held, name, value.eval() if isinstance(value, nn.Module) else value)

    return change


def hook(path: str, function: Callable[..., Any], before: bool = False) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        module = model.get_submodule(path)
        module.register_forward_pre_hook(function) if before else module.register_forward_hook(function)

    return change


def method(path: str, name: str, wrap: Callable[[Any, Any], Any]) -> Callable[[Any], None]:
    """Return what replaces a method on an instance, by a function of (the old one, its argument)."""

    def change(model: Any) -> None:
        held = model.get_submodule(path)
        old = getattr(held, name)
        setattr(held, name, lambda x, *rest, **named: wrap(lambda y: old(y, *rest, **named), x))

    return change


def share(model: Any) -> None:
    model.blocks[1] = model.blocks[0]


def repeat(model: Any) -> None:
    model.blocks = nn.Sequential(model.blocks[0], model.blocks[1], model.blocks[0], model.blocks[1])


def prune_heads(model: Any) -> None:
    attention = model.blocks[1].attn
    attention.qkv, attention.proj = nn.Linear(48, 72), nn.Linear(24, 48)
    attention.num_heads, attention.attn_dim = 1, 24


def weight_norm(path: str) -> Callable[[Any], None]:
    return lambda model: nn.utils.parametrizations.weight_norm(model.get_submodule(path))


def every_scale(model: Any) -> None:
    for block in model.blocks:
        block.attn.scale, block.attn.fused_attn = 0.1, False


def own_forward(model: Any) -> None:
    model.forward = types.MethodType(lambda self, x: self.forward_head(self.forward_features(x.flip(-1))), model)


def frozen(model: Any) -> None:
    model.requires_grad_(False)


def double(model: Any) -> None:
    model.double()


def zero_lora(base: nn.Linear) -> nn.Module:
    layer = LoRALinear(base)
    nn.init.zeros_(layer.up.weight)
    return layer


ALTERED: dict[str, tuple[str, Callable[[Any], None], str]] = {
    # heads
    "head: dropout, linear": ("vit", put("head", lambda x: nn.Sequential(nn.Dropout(0.2), x)), RIGHT),
    "head: linear, identity": ("vit", put("head", lambda x: nn.Sequential(x, nn.Identity())), RIGHT),
    "head: nested": ("vit", put("head", lambda x: nn.Sequential(nn.Sequential(nn.Dropout(0.1), x), nn.Dropout())), RIGHT),
    "head: two layers": ("vit", put("head", lambda x: nn.Sequential(nn.Linear(48, 48), x)), "head of Sequential"),
    "head: norm, linear": ("vit", put("head", lambda x: nn.Sequential(nn.LayerNorm(48), x)), "head of Sequential"),
    "head: relu": ("vit", put("head", lambda x: nn.Sequential(x, nn.ReLU())), "head of Sequential"),
    "head: cosine": ("vit", put("head", lambda x: Cosine(48, 10)), r"what head \(Cosine\) returns"),
    "head: wrapped": ("vit", put("head", Wrapped), "head of Wrapped"),
    "head: bias-free": ("vit", put("head", lambda x: nn.Linear(48, 7, bias=False)), RIGHT),
    "head: removed": ("vit", put("head", lambda x: nn.Identity()), RIGHT),
    "head: none": ("vit", put("head", lambda x: Doubled()), "output has .* All parts that it knows agree"),
    "head: softmax": ("vit", hook("head", lambda _, __, out: out.softmax(-1)), r"what head \(Linear\) returns"),
    "head: of other inputs": ("vit", put("head", lambda x: nn.Linear(40, 10)), "head from 40 to 10"),
    "head: two towers": ("vit", put("head", lambda x: nn.ModuleList([x, x])), "head of ModuleList"),
    "head_drop: a linear": ("vit", put("head_drop", lambda x: nn.Linear(48, 48)), "head_drop of Linear"),
    "head_drop: doubled": ("vit", put("head_drop", lambda x: Doubled()), "the input of head"),
    # attention
    "qkv: LoRA": ("vit", put("blocks.0.attn.qkv", LoRALinear), r"what blocks.0.attn.qkv \(LoRALinear\) returns"),
    "qkv: LoRA of nothing": ("vit", put("blocks.0.attn.qkv", zero_lora), RIGHT),
    "qkv: weak LoRA": ("vit", put("blocks.0.attn.qkv", lambda x: LoRALinear(x, 1e-2)), r"blocks.0.attn.qkv \(LoRA"),
    "qkv: a container": ("vit", put("blocks.0.attn.qkv", lambda x: nn.Sequential(x)), RIGHT),
    "qkv: clamped": ("vit", hook("blocks.1.attn.qkv", lambda _, __, out: out.clamp(-0.5, 0.5)), "what blocks.1.attn.qkv"),
    "attention: a causal one": (
        "vit",
        method("blocks.0.attn", "forward", lambda old, x: old(x).cumsum(1)),
        "the input of blocks.0.norm2",
    ),
    "attention: pruned heads": ("vit", prune_heads, r"blocks.1 unlike blocks.0 \(heads 1 for 2\)"),
    "attention: all scales": ("vit", every_scale, RIGHT),
    "attention: one scale": ("vit", put("blocks.1.attn.scale", lambda x: 2 * x), "blocks.1 unlike blocks.0"),
    "attention: a query norm that is none": ("vit", put("blocks.0.attn.q_norm", lambda x: Doubled()), "blocks.0.attn"),
    "attention: proj hooked": (
        "vit",
        hook("blocks.0.attn.proj", lambda _, x: (x[0] + 0.1,), before=True),
        "blocks.0.attn.proj",
    ),
    "attention: dropout of a scale": (
        "vit",
        put("blocks.0.attn.proj_drop", lambda x: nn.Linear(48, 48)),
        "proj_drop of Linear",
    ),
    "attention: skipped": ("vit", put("blocks.1.attn", lambda x: nn.Identity()), "blocks.1.attn of Identity"),
    "attention: subclass": (
        "vit",
        become(type("Mine", (timm.models.vision_transformer.Attention,), {}), "blocks.0.attn"),
        "blocks.0.attn of Mine",
    ),
    # MLP
    "mlp: another product": ("vit", become(Mlp, "blocks.0.mlp"), r"what blocks.0 \(Block\) returns"),
    "mlp: another activation": ("vit", put("blocks.0.mlp.act", lambda x: GELU()), "the input of blocks.0.mlp.fc2"),
    "mlp: tanh": ("vit", put("blocks.0.mlp.act", lambda x: nn.GELU(approximate="tanh")), RIGHT),
    "mlp: SiLU": ("vit", put("blocks.1.mlp.act", lambda x: nn.SiLU()), r"blocks.1.mlp.act of SiLU \(only GELU\)"),
    "mlp: narrow": (
        "vit",
        put("blocks.1.mlp", lambda x: timm.layers.Mlp(48, 96)),
        r"blocks.1 unlike blocks.0 \(hidden 96 for 192\)",
    ),
    "mlp: hooked": ("vit", hook("blocks.0.mlp", lambda _, __, out: 0.5 * out), r"what blocks.0 \(Block\) returns"),
    "mlp: drop between": ("vit", put("blocks.0.mlp.drop1", lambda x: nn.ReLU()), "blocks.0.mlp.drop1 of ReLU"),
    "mlp: LoRA in fc2": ("vit", put("blocks.1.mlp.fc2", LoRALinear), r"what blocks.1.mlp.fc2 \(LoRALinear\)"),
    "mlp: weight norm": ("vit", weight_norm("blocks.0.mlp.fc1"), RIGHT),
    # normalisation
    "norm: subclass": ("vit", put("blocks.0.norm1", lambda x: Halved(48)), r"what blocks.0.norm1 \(Halved\) returns"),
    "norm: another eps": ("vit", put("blocks.0.norm2", lambda x: nn.LayerNorm(48, eps=0.5)), RIGHT),
    "norm: last of RMS": ("vit", put("norm", lambda x: timm.layers.RmsNorm(48)), "norm of RmsNorm"),
    "norm: last without bias": ("vit", put("norm", lambda x: nn.LayerNorm(48, bias=False)), r"norm of LayerNorm \(only LayerN"),
    "norm: BatchNorm": ("vit", put("blocks.0.norm1", lambda x: nn.BatchNorm1d(17)), "blocks.0.norm1 of BatchNorm1d"),
    "norm_pre: a linear": ("vit", put("norm_pre", lambda x: nn.Linear(48, 48)), "norm_pre of Linear"),
    "layer scale: another": ("vit", put("blocks.0.ls1", lambda x: nn.Linear(48, 48)), "blocks.0.ls1 of Linear"),
    "layer scale: timm's": ("vit", put("blocks.0.ls2", lambda x: timm.models.vision_transformer.LayerScale(48, 0.3)), RIGHT),
    "drop path: a scale": ("vit", put("blocks.0.drop_path1", lambda x: nn.ReLU()), "blocks.0.drop_path1 of ReLU"),
    # embedding
    "stem: another stride": (
        "vit",
        put("patch_embed.proj", lambda x: nn.Conv2d(3, 48, 8, 4)),
        r"patch_embed.proj with kernel \(8, 8\), stride \(4, 4\)",
    ),
    "stem: overlapping": ("vit", put("patch_embed.proj", lambda x: nn.Conv2d(3, 48, 12, 8, 2)), "patch_embed.proj with kernel"),
    "stem: dilated": ("vit", put("patch_embed.proj", lambda x: nn.Conv2d(3, 48, 4, 8, dilation=2)), "patch_embed.proj with k"),
    "stem: Sequential": (
        "vit",
        put("patch_embed.proj", lambda x: nn.Sequential(nn.Conv2d(3, 24, 2, 2), nn.ReLU(), nn.Conv2d(24, 48, 4, 4))),
        "patch_embed.proj of Sequential",
    ),
    "stem: a container": ("vit", put("patch_embed.proj", lambda x: nn.Sequential(x)), RIGHT),
    "stem: subclass": ("vit", become(Sharper, "patch_embed.proj"), r"what patch_embed.proj \(Sharper\) returns"),
    "stem: hooked": ("vit", hook("patch_embed", lambda _, __, out: out.flip(1)), "the input of blocks.0.norm1"),
    "positions: replaced": ("vit", method("", "_pos_embed", lambda old, x: old(x).roll(1, 1)), "the input of blocks.0.norm1"),
    "positions: of another shape": ("vit", put("pos_embed", lambda x: nn.Parameter(x[:, :1])), r"pos_embed of \(1, 1, 48\)"),
    # the whole
    "forward: flips": ("vit", own_forward, "what patch_embed.proj"),
    "forward: softmax": ("vit", method("", "forward", lambda old, x: old(x).softmax(-1)), "differs behind what head"),
    "forward: a tuple": ("vit", method("", "forward", lambda old, x: (old(x), x)), "must return a tensor .* returns tuple"),
    "forward: features": ("vit", method("", "forward_head", lambda old, x: x[:, 0]), r"shape \(8, 48\) and not \(8, 10\)"),
    "pool: replaced": ("vit", method("", "pool", lambda old, x: x[:, 1:].mean(1)), "the input of head"),
    "blocks: shared": ("vit", share, RIGHT),
    "blocks: shared and repeated": ("vit", repeat, RIGHT),
    "blocks: hooked before": ("vit", hook("blocks.1", lambda _, x: (x[0] * 1.1,), before=True), "input of blocks.1.norm1"),
    "blocks: a watching hook": ("vit", hook("blocks.1", lambda _, __, out: None), RIGHT),
    "blocks: fewer": ("vit", put("blocks", lambda x: x[:1]), RIGHT),
    "blocks: none": ("vit", put("blocks", lambda x: x[:0]), "no blocks"),
    "blocks: a list": ("vit", put("blocks", lambda x: nn.Sequential(*x, nn.Linear(48, 48))), r"blocks.2 of Linear"),
    "blocks: ResPost": (
        "vit",
        put("blocks.0", lambda x: timm.models.vision_transformer.ResPostBlock(48, 2)),
        r"blocks.0 of ResPostBlock \(only Block\)",
    ),
    "weights: frozen": ("vit", frozen, RIGHT),
    "weights: float64": ("vit", double, RIGHT),
    "weights: loud qkv": (
        "vit",
        lambda model: model.blocks[0].attn.qkv.weight.data.mul_(1e8),
        "Most is lost in blocks.0.attent",
    ),
    "weights: loud norm": ("vit", lambda model: model.blocks[0].norm1.weight.data.mul_(1e8), "blocks.0|degenerate|GELU"),
    "weights: a zero head": (
        "vit",
        lambda model: model.head.weight.data.zero_(),
        "model gives 8 different calibration images the same",
    ),
    "weights: NaN in the head": (
        "vit",
        lambda model: model.head.bias.data[:1].fill_(torch.nan),
        "NaN or infinity is in head.bias",
    ),
    "weights: infinite": ("vit", lambda model: model.pos_embed.data[0, 0, :1].fill_(torch.inf), "infinity is in pos_embed"),
    # Swin
    "swin head: dropout, linear": ("swin", put("head.fc", lambda x: nn.Sequential(nn.Dropout(0.2), x)), RIGHT),
    "swin head: a linear": ("swin", put("head", lambda x: nn.Linear(32, 10)), "head of Linear"),
    "swin head: cosine": ("swin", put("head.fc", lambda x: Cosine(32, 10)), r"what head.fc \(Cosine\) returns"),
    "swin head: drop": ("swin", put("head.drop", lambda x: nn.Linear(32, 32)), "head.drop of Linear"),
    "swin head: subclass": ("swin", become(type("Mine", (timm.layers.ClassifierHead,), {}), "head"), "head of Mine"),
    "swin: qkv LoRA": ("swin", put("layers.1.blocks.0.attn.qkv", LoRALinear), "what layers.1.blocks.0.attn.qkv"),
    "swin: another scale": ("swin", put("layers.0.blocks.1.attn.scale", lambda x: 2 * x), r"layers.0.blocks.1 unlike"),
    "swin: another scale of a stage": ("swin", put("layers.1.blocks.0.attn.scale", lambda x: 2 * x), "attn.scale of"),
    "swin: merging hooked": (
        "swin",
        hook("layers.1.downsample", lambda _, __, out: out.flip(-1)),
        "input of layers.1.blocks.0.norm1",
    ),
    "swin: merging norm": ("swin", put("layers.1.downsample.norm", lambda x: nn.Identity()), "layers.1.downsample.norm of Id"),
    "swin: merging Sequential": (
        "swin",
        put("layers.1.downsample.reduction", lambda x: nn.Sequential(nn.Linear(64, 64), x)),
        "layers.1.downsample.reduction of Sequential",
    ),
    "swin: mask dropped": (
        "swin",
        put("layers.0.blocks.1.attn_mask", lambda x: None),
        RIGHT,
    ),
    "swin: stale shift": ("swin", put("layers.0.blocks.1.shift_size", lambda x: (0, 0)), "layers.0.blocks.1"),
    "swin: attention replaced": (
        "swin",
        method("layers.0.blocks.0.attn", "forward", lambda old, x: old(x) + 0.5 * x),
        "layers.0.blocks.0",
    ),
    "swin: norm of RMS": ("swin", put("norm", lambda x: timm.layers.RmsNorm(32)), "norm of RmsNorm"),
    "swin: mlp product": ("swin", become(Mlp, "layers.0.blocks.0.mlp"), "layers.0.blocks.0"),
    "swin: stem of ConvNeXt": (
        "swin",
        put("patch_embed", lambda x: nn.Sequential(nn.Conv2d(3, 16, 2, 2))),
        "patch_embed of Sequential",
    ),
}


@pytest.mark.parametrize("name", ALTERED)
def test_an_altered_model_is_right_or_refused_by_name(name: str) -> None:
    family, change, expected = ALTERED[name]
    model = build(family, num_classes=10)
    images, fresh = draw(model, 24), draw(model, 12, seed=5)
    with torch.no_grad():
        change(model)
    if expected != RIGHT:
        with pytest.raises((ValueError, TypeError), match=expected):
            qflash.quantize_model(model, [images], progress=False)
        return
    network = qflash.quantize_model(model, [images], progress=False)
    with torch.inference_mode():
        want = model(normalise(model, fresh).to(next(model.parameters()).dtype))
    assert sqnr(want, network.dequantize(network(fresh))) > 24
    assert network.quality is not None and network.quality.held_out and network.quality.images == 8
    assert network.quality.sqnr_db > 24
