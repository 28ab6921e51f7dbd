"""Models that differ from timm's in one place: each becomes a right network, or is refused with the operation's name."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import qflash
from helpers import few
from qflash_lab.bench.metrics import sqnr
from small_networks import build, draw, normalise, timm

RIGHT = "right"


class LoRALinear(nn.Linear):
    """A layer with a product of its own besides, as PEFT merges none."""

    def __init__(self, base: nn.Linear, scale: float = 0.3) -> None:
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


def means_of_four(factor: float) -> torch.Tensor:
    """Return a matrix for means of every fourth of 16 patches, behind a class token that is in none, times a factor."""
    return F.pad(torch.eye(4).repeat(1, 4) * factor / 4, (1, 0))[None]


class Pixels(nn.Module):
    """Normalises channels once more, as models do that take pixels from 0 to 1."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x - torch.tensor([0.2, -0.4, 0.1])[:, None, None]) / torch.tensor([0.6, 2.0, 1.5])[:, None, None]


class Clamp(nn.Module):
    """Clips at two buffers, and above alone without a bound."""

    def __init__(self, bound: float | None = None) -> None:
        super().__init__()
        self.register_buffer("most", torch.tensor(torch.inf if bound is None else bound))
        self.register_buffer("least", None if bound is None else torch.tensor(-bound))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.clamp(self.least, self.most)


class GELU(nn.Module):
    """Of the same name as timm's, and a sigmoid."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(1.702 * x)


class Itself(timm.layers.Mlp):  # type: ignore[name-defined]
    """The activation of a tensor times the tensor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.fc1(x)
        return self.fc2(x * x.relu())


class Rolled(timm.layers.Mlp):  # type: ignore[name-defined]
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.fc1(x)
        return self.fc2(x.roll(1, dims=1) * x.relu())


class Twice(timm.layers.Mlp):  # type: ignore[name-defined]
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.fc1(x)
        gate = torch.nn.functional.silu(x)
        return self.fc2(x * gate) + self.fc2(gate)


class Shifted(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(x + 1)


class Falling(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(-x)


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


def merge(model: Any) -> None:
    """Give it a linear layer that takes four tokens behind the last normalisation, a mean of these and a normalisation."""
    model.merge, model.fc_norm = nn.Linear(4 * 48, 48), nn.LayerNorm(48)

    def forward_head(_: Any, x: torch.Tensor) -> Any:
        return model.head(model.fc_norm(model.merge(x[:, 1:].reshape(-1, 4, 4 * 48)).mean(1)))

    method("", "forward_head", forward_head)(model)


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
    "head: two layers": ("vit", put("head", lambda x: nn.Sequential(nn.Linear(48, 48), x)), RIGHT),
    "head: norm, linear": ("vit", put("head", lambda x: nn.Sequential(nn.LayerNorm(48), x)), RIGHT),
    "head: relu": ("vit", put("head", lambda x: nn.Sequential(x, nn.ReLU())), r"relu (in|of) head.1"),
    "head: cosine": ("vit", put("head", lambda x: Cosine(48, 10)), RIGHT),
    "head: wrapped": ("vit", put("head", Wrapped), RIGHT),
    "head: bias-free": ("vit", put("head", lambda x: nn.Linear(48, 7, bias=False)), RIGHT),
    "head: removed": ("vit", put("head", lambda x: nn.Identity()), RIGHT),
    "head: none": ("vit", put("head", lambda x: Doubled()), RIGHT),
    "head: softmax": (
        "vit",
        hook("head", lambda _, __, out: out.softmax(-1)),
        r"softmax of what are no scores of attention in head",
    ),
    "head: of other inputs": (
        "vit",
        put("head", lambda x: nn.Linear(40, 10)),
        r"torch.export cannot trace the model: RuntimeError: a and b must have same reduction dim",
    ),
    "head: two towers": (
        "vit",
        put("head", lambda x: nn.ModuleList([x, x])),
        r"Module \[ModuleList\] is missing the required",
    ),
    "head_drop: a linear": ("vit", put("head_drop", lambda x: nn.Linear(48, 48)), RIGHT),
    "head_drop: doubled": ("vit", put("head_drop", lambda x: Doubled()), RIGHT),
    # attention
    "qkv: LoRA": ("vit", put("blocks.0.attn.qkv", LoRALinear), RIGHT),
    "qkv: LoRA of nothing": ("vit", put("blocks.0.attn.qkv", zero_lora), RIGHT),
    "qkv: weak LoRA": ("vit", put("blocks.0.attn.qkv", lambda x: LoRALinear(x, 1e-2)), RIGHT),
    "qkv: a container": ("vit", put("blocks.0.attn.qkv", lambda x: nn.Sequential(x)), RIGHT),
    "qkv: clamped": ("vit", hook("blocks.1.attn.qkv", lambda _, __, out: out.clamp(-0.5, 0.5)), r"clamp in blocks.1.attn.qkv"),
    "attention: a causal one": (
        "vit",
        method("blocks.0.attn", "forward", lambda old, x: old(x).cumsum(1)),
        r"cumsum in blocks.0.attn",
    ),
    "attention: pruned heads": ("vit", prune_heads, RIGHT),
    "attention: all scales": ("vit", every_scale, RIGHT),
    "attention: one scale": ("vit", put("blocks.1.attn.scale", lambda x: 2 * x), RIGHT),
    "attention: a query norm that is none": ("vit", put("blocks.0.attn.q_norm", lambda x: Doubled()), RIGHT),
    "attention: proj hooked": (
        "vit",
        hook("blocks.0.attn.proj", lambda _, x: (x[0] + 0.1,), before=True),
        r"linear of blocks.0.attn.proj has no integer form",
    ),
    "attention: dropout of a scale": (
        "vit",
        put("blocks.0.attn.proj_drop", lambda x: nn.Linear(48, 48)),
        RIGHT,
    ),
    "attention: skipped": (
        "vit",
        put("blocks.1.attn", lambda x: nn.Identity()),
        r"Identity.forward.. got an unexpected keyword",
    ),
    "attention: subclass": (
        "vit",
        become(type("Mine", (timm.models.vision_transformer.Attention,), {}), "blocks.0.attn"),
        RIGHT,
    ),
    # MLP
    "mlp: another product": ("vit", become(Mlp, "blocks.0.mlp"), r"tanh in blocks.0.mlp"),
    "mlp: another activation": ("vit", put("blocks.0.mlp.act", lambda x: GELU()), RIGHT),
    "mlp: tanh": ("vit", put("blocks.0.mlp.act", lambda x: nn.GELU(approximate="tanh")), RIGHT),
    "mlp: SiLU": ("vit", put("blocks.1.mlp.act", lambda x: nn.SiLU()), RIGHT),
    "mlp: ReLU": ("vit", put("blocks.0.mlp.act", lambda x: nn.ReLU(inplace=True)), RIGHT),
    "mlp: another sigmoid": ("vit", put("blocks.0.mlp.act", lambda x: Shifted()), r"sigmoid in blocks.0.mlp.act"),
    "mlp: falling": ("vit", put("blocks.0.mlp.act", lambda x: Falling()), r"sigmoid in blocks.0.mlp.act"),
    "mlp: hard swish": ("vit", put("blocks.0.mlp.act", lambda x: nn.Hardswish()), r"hardswish in blocks.0.mlp.act"),
    "mlp: SwiGLU": ("vit", put("blocks.1.mlp", lambda x: timm.layers.SwiGLUPacked(48, 128)), RIGHT),
    "mlp: SwiGLU of two layers, with a norm": (
        "vit",
        put("blocks.0.mlp", lambda x: timm.layers.SwiGLU(48, 100, norm_layer=nn.LayerNorm)),
        RIGHT,
    ),
    "mlp: GEGLU": ("vit", put("blocks.0.mlp", lambda x: timm.layers.GluMlp(48, 96, act_layer=nn.GELU)), RIGHT),
    "mlp: QuickGELU before a product, no bias": (
        "vit",
        put("blocks.0.mlp", lambda x: timm.layers.GluMlp(48, 96, act_layer=GELU, bias=False, gate_last=False)),
        RIGHT,
    ),
    "mlp: ReGLU of one half": ("vit", put("blocks.0.mlp", lambda x: Itself(48, 96)), RIGHT),
    "mlp: gate and value of different tokens": (
        "vit",
        put("blocks.0.mlp", lambda x: Rolled(48, 96)),
        r"product of blocks.0.mlp has no integer form",
    ),
    "mlp: gate used twice": ("vit", put("blocks.0.mlp", lambda x: Twice(48, 96)), r"blocks.0.mlp\S* has no integer form"),
    "mlp: a product of two linear layers": (
        "vit",
        put("blocks.0.mlp", lambda x: timm.layers.GluMlp(48, 96, act_layer=nn.Identity)),
        r"product of two computed tensors in blocks.0.mlp",
    ),
    "mlp: narrow": (
        "vit",
        put("blocks.1.mlp", lambda x: timm.layers.Mlp(48, 96)),
        RIGHT,
    ),
    "mlp: hooked": ("vit", hook("blocks.0.mlp", lambda _, __, out: 0.5 * out), RIGHT),
    "mlp: drop between": (
        "vit",
        put("blocks.0.mlp.drop1", lambda x: nn.ReLU()),
        r"gelu of blocks.0.mlp.act .* stands before something else",
    ),
    "mlp: LoRA in fc2": ("vit", put("blocks.1.mlp.fc2", LoRALinear), RIGHT),
    "mlp: clamped at infinity": ("vit", put("blocks.1.mlp.fc2", lambda x: nn.Sequential(Clamp(torch.inf), x, Clamp())), RIGHT),
    "mlp: clamped": (
        "vit",
        put("blocks.1.mlp.fc2", lambda x: nn.Sequential(x, Clamp(2.0))),
        r"aten.clamp.* in blocks.1.mlp.fc2.1",
    ),
    "mlp: weight norm": ("vit", weight_norm("blocks.0.mlp.fc1"), RIGHT),
    # normalisation
    "norm: subclass": ("vit", put("blocks.0.norm1", lambda x: Halved(48)), RIGHT),
    "norm: another eps": ("vit", put("blocks.0.norm2", lambda x: nn.LayerNorm(48, eps=0.5)), RIGHT),
    "norm: last of RMS": ("vit", put("norm", lambda x: timm.layers.RmsNorm(48)), RIGHT),
    "norm: last without bias": ("vit", put("norm", lambda x: nn.LayerNorm(48, bias=False)), RIGHT),
    "norm: BatchNorm": ("vit", put("blocks.0.norm1", lambda x: nn.BatchNorm1d(17)), r"batch_norm in blocks.0.norm1"),
    "norm_pre: a linear": ("vit", put("norm_pre", lambda x: nn.Linear(48, 48)), RIGHT),
    "layer scale: another": ("vit", put("blocks.0.ls1", lambda x: nn.Linear(48, 48)), RIGHT),
    "layer scale: timm's": ("vit", put("blocks.0.ls2", lambda x: timm.models.vision_transformer.LayerScale(48, 0.3)), RIGHT),
    "drop path: a scale": ("vit", put("blocks.0.drop_path1", lambda x: nn.ReLU()), r"relu of blocks.0.drop_path1"),
    # embedding
    "stem: another stride": (
        "vit",
        put("patch_embed.proj", lambda x: nn.Conv2d(3, 48, 8, 4)),
        r"torch.export cannot trace the model: RuntimeError: The size of tensor",
    ),
    "stem: overlapping": (
        "vit",
        put("patch_embed.proj", lambda x: nn.Conv2d(3, 48, 12, 8, 2)),
        r"convolution with padding, dilation or groups in patch_embed.proj",
    ),
    "stem: pixels left over": ("vit", put("patch_embed.proj", lambda x: nn.Conv2d(3, 48, 7, 7)), RIGHT),
    "stem: dilated": (
        "vit",
        put("patch_embed.proj", lambda x: nn.Conv2d(3, 48, 4, 8, dilation=2)),
        r"convolution with padding, dilation or groups in patch_embed.proj",
    ),
    "stem: Sequential": (
        "vit",
        put("patch_embed.proj", lambda x: nn.Sequential(nn.Conv2d(3, 24, 2, 2), nn.ReLU(), nn.Conv2d(24, 48, 4, 4))),
        r"relu of patch_embed.proj.1",
    ),
    "stem: a container": ("vit", put("patch_embed.proj", lambda x: nn.Sequential(x)), RIGHT),
    "stem: subclass": ("vit", become(Sharper, "patch_embed.proj"), r"difference in patch_embed.proj"),
    "stem: pixels in another unit": ("vit", put("patch_embed.proj", lambda x: nn.Sequential(Pixels(), x)), RIGHT),
    "stem: pixels in several units": (
        "vit",
        method("", "forward", lambda old, x: old(x * torch.linspace(1, 2, x.shape[-1]))),
        r"linear layer on pixels that a model treats differently from patch to patch",
    ),
    "stem: hooked": (
        "vit",
        hook("patch_embed", lambda _, __, out: out.flip(1)),
        r"tokens are not class tokens, then patches in their order",
    ),
    "positions: replaced": (
        "vit",
        method("", "_pos_embed", lambda old, x: old(x).roll(1, 1)),
        r"tokens are not class tokens, then patches in their order",
    ),
    "positions: of another shape": ("vit", put("pos_embed", lambda x: nn.Parameter(x[:, :1])), RIGHT),
    # the whole
    "forward: flips": (
        "vit",
        own_forward,
        r"linear of patch_embed.proj has no integer form: it takes pixels, but not in patches that tile",
    ),
    "forward: softmax": (
        "vit",
        method("", "forward", lambda old, x: old(x).softmax(-1)),
        r"softmax of what are no scores of attention",
    ),
    "forward: a tuple": (
        "vit",
        method("", "forward", lambda old, x: (old(x), x)),
        r"output 'output1' is the images, rearranged",
    ),
    "forward: features": ("vit", method("", "forward_head", lambda old, x: x[:, 0]), RIGHT),
    "pool: replaced": ("vit", method("", "pool", lambda old, x: x[:, 1:].mean(1)), RIGHT),
    "pool: a norm behind the mean of a norm": (
        "vit",
        method("", "pool", lambda old, x: F.layer_norm(x[:, 1:].mean(1), (48,))),
        RIGHT,
    ),
    "pool: four tokens of a norm in a row": ("vit", merge, RIGHT),
    "pool: means by a matrix": ("vit", method("", "forward_head", lambda old, x: means_of_four(1.0) @ x), RIGHT),
    "pool: sums by a matrix": (
        "vit",
        method("", "forward_head", lambda old, x: means_of_four(4.0) @ x),
        r"output 'output' is a step on the way to attention",
    ),
    "blocks: shared": ("vit", share, RIGHT),
    "blocks: shared and repeated": ("vit", repeat, RIGHT),
    "blocks: hooked before": (
        "vit",
        hook("blocks.1", lambda _, x: (x[0] * 1.1,), before=True),
        r"norm of blocks.1.norm1 has no integer form: constants are added",
    ),
    "blocks: a watching hook": ("vit", hook("blocks.1", lambda _, __, out: None), RIGHT),
    "blocks: fewer": ("vit", put("blocks", lambda x: x[:1]), RIGHT),
    "blocks: none": ("vit", put("blocks", lambda x: x[:0]), r"model gives 8 different calibration images the same output"),
    "blocks: a list": (
        "vit",
        put("blocks", lambda x: nn.Sequential(*x, nn.Linear(48, 48))),
        RIGHT,
    ),
    "blocks: ResPost": (
        "vit",
        put("blocks.0", lambda x: timm.models.vision_transformer.ResPostBlock(48, 2)),
        RIGHT,
    ),
    "weights: frozen": ("vit", frozen, RIGHT),
    "weights: float64": ("vit", double, RIGHT),
    "weights: loud qkv": (
        "vit",
        lambda model: model.blocks[0].attn.qkv.weight.data.mul_(1e8),
        r"Most is lost in .*blocks.0.attn.proj",
    ),
    "weights: loud norm": (
        "vit",
        lambda model: model.blocks[0].norm1.weight.data.mul_(1e8),
        r"Most is lost in|degenerate|GELU",
    ),
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
    "swin head: a linear": ("swin", put("head", lambda x: nn.Linear(32, 10)), RIGHT),
    "swin head: cosine": (
        "swin",
        put("head.fc", lambda x: Cosine(32, 10)),
        RIGHT,
    ),
    "swin head: drop": ("swin", put("head.drop", lambda x: nn.Linear(32, 32)), RIGHT),
    "swin head: subclass": ("swin", become(type("Mine", (timm.layers.ClassifierHead,), {}), "head"), RIGHT),
    "swin: qkv LoRA": ("swin", put("layers.1.blocks.0.attn.qkv", LoRALinear), RIGHT),
    "swin: another scale": ("swin", put("layers.0.blocks.1.attn.scale", lambda x: 2 * x), RIGHT),
    "swin: another scale of a stage": ("swin", put("layers.1.blocks.0.attn.scale", lambda x: 2 * x), RIGHT),
    "swin: merging hooked": (
        "swin",
        hook("layers.1.downsample", lambda _, __, out: out.flip(-1)),
        r"norm of layers.1.blocks.0.norm1 has no integer form: constants are added",
    ),
    "swin: merging norm": (
        "swin",
        put("layers.1.downsample.norm", lambda x: nn.Identity()),
        RIGHT,
    ),
    "swin: merging Sequential": (
        "swin",
        put("layers.1.downsample.reduction", lambda x: nn.Sequential(nn.Linear(64, 64), x)),
        RIGHT,
    ),
    "swin: mask dropped": (
        "swin",
        put("layers.0.blocks.1.attn_mask", lambda x: None),
        RIGHT,
    ),
    "swin: stale shift": ("swin", put("layers.0.blocks.1.shift_size", lambda x: (0, 0)), RIGHT),
    "swin: attention replaced": (
        "swin",
        method("layers.0.blocks.0.attn", "forward", lambda old, x: old(x) + 0.5 * x),
        r"layers.0.blocks.0.attn has no integer form",
    ),
    "swin: norm of RMS": ("swin", put("norm", lambda x: timm.layers.RmsNorm(32)), RIGHT),
    "swin: mlp product": ("swin", become(Mlp, "layers.0.blocks.0.mlp"), r"tanh in layers.0.blocks.0.mlp"),
    "swin: stem of ConvNeXt": (
        "swin",
        put("patch_embed", lambda x: nn.Sequential(nn.Conv2d(3, 16, 2, 2))),
        r"norm of layers.0.blocks.0.norm1 has no integer form",
    ),
}


@pytest.mark.parametrize("name", few(ALTERED, 8))
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
