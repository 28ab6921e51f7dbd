"""What the readers of model families share: they look at a model's parts and describe them (:mod:`.float_network`).

A part is taken by its class. What is not known is named, with what would be taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .float_network import FloatBlock, FloatLinear, FloatNorm, FloatWindows

_IDLE = ("DropPath", "PatchDropout")
"""Classes of timm that do nothing in eval mode, as dropout."""


def part(module: Any, path: str) -> Any:
    """Return what a dotted path leads to, None where there is no such attribute."""
    for name in path.split("."):
        module = getattr(module, name, None)
    return module


def is_idle(module: Any) -> bool:
    """Tell whether a part does nothing in eval mode: none, Identity, dropout, or a container of such."""
    if isinstance(module, nn.Sequential):
        return all(map(is_idle, module))
    dropout = nn.modules.dropout._DropoutNd
    return module is None or isinstance(module, nn.Identity | dropout) or type(module).__name__ in _IDLE


def only(module: Any, name: str, kind: type) -> tuple[Any, str]:
    """Return the one part of a class that a part holds beside dropout, and its name; the part itself as a rule.

    Args:
        module: of ``kind``, or a Sequential of one such and parts that do nothing.
        name: of it.
        kind: class.

    Returns:
        None and the name where there is no such part.
    """
    if type(module) is nn.Sequential:
        rest = [(each, f"{name}.{index}") for index, each in module.named_children() if not is_idle(each)]
        return only(*rest[0], kind) if len(rest) == 1 else (None, name)
    return (module if isinstance(module, kind) else None), name


def busy(model: Any, prefix: str, paths: tuple[str, ...]) -> Iterator[str]:
    """Name the parts that have to do nothing in eval mode and do something."""
    for path in paths:
        if not is_idle(part(model, path)):
            yield f"{prefix}{path} of {type(part(model, path)).__name__} (only dropout or Identity)"


def wrong_linear(module: Any, name: str, inputs: int | None = None, outputs: int | None = None) -> Iterator[str]:
    """Say why a part is no linear layer of so many inputs and outputs (any where None)."""
    layer, _ = only(module, name, nn.Linear)
    if layer is None:
        yield f"{name} of {type(module).__name__} (only Linear, alone or with dropout)"
    elif inputs not in (None, layer.in_features) or outputs not in (None, layer.out_features):
        yield (
            f"{name} from {layer.in_features} to {layer.out_features} channels (only from {inputs or layer.in_features} to "
            f"{outputs or layer.out_features})"
        )


def wrong_norm(norm: Any, name: str, channels: int) -> Iterator[str]:
    """Say why a part is no layer normalisation with weight and bias, of so many channels."""
    if not isinstance(norm, nn.LayerNorm) or norm.weight is None or norm.bias is None:
        yield f"{name} of {type(norm).__name__} (only LayerNorm with weight and bias)"
    elif norm.weight.shape != (channels,):
        yield f"{name} over {tuple(norm.weight.shape)} channels (only {channels})"


def wrong_patches(embed: Any) -> Iterator[str]:
    """Say what of a patch embedding has no integer form."""
    if type(embed).__name__ != "PatchEmbed":
        yield f"patch_embed of {type(embed).__name__} (only PatchEmbed)"
        return
    layer, name = only(embed.proj, "patch_embed.proj", nn.Conv2d)
    size = tuple(embed.patch_size)
    if layer is None:
        yield f"patch_embed.proj of {type(embed.proj).__name__} (only Conv2d)"
    elif (layer.kernel_size, layer.stride, layer.dilation, layer.groups) != (size, size, (1, 1), 1) or layer.padding not in (
        (0, 0), "valid",
    ):  # fmt: skip
        yield (
            f"{name} with kernel {layer.kernel_size}, stride {layer.stride}, padding {layer.padding}, dilation "
            f"{layer.dilation} and {layer.groups} groups (only patches of {size} side by side)"
        )
    if embed.img_size is None:
        yield "patch_embed.img_size=None (the position embedding must be of one size)"
    elif any(side % patch for side, patch in zip(embed.img_size, size, strict=True)):
        yield f"patch_embed of images {tuple(embed.img_size)} (only multiples of the patch {size})"


def is_normed(attention: Any) -> bool:
    """Tell whether attention does something to query or key before the scores."""
    return not all(isinstance(part(attention, name), nn.Identity | None) for name in ("q_norm", "k_norm"))


def head_dim_of(attention: Any) -> int:
    """Return the channels of a head, 0 where the outputs of ``qkv`` are no multiple of its heads'."""
    layer, _ = only(attention.qkv, "qkv", nn.Linear)
    heads = part(attention, "num_heads")
    if type(heads) is not int or heads < 1 or layer.out_features % (3 * heads):
        return 0
    return layer.out_features // (3 * heads)


def wrong_block(block: Any, name: str, channels: int, block_class: str, attention_class: str) -> Iterator[str]:
    """Say what of a transformer block has no integer form here; its parts are named.

    Args:
        block: timm's.
        name: of the block.
        channels: of the residual stream.
        block_class, attention_class: names of the classes that are known.
    """
    if type(block).__name__ != block_class:
        yield f"{name} of {type(block).__name__} (only {block_class})"
        return
    for each in ("norm1", "norm2"):
        yield from wrong_norm(part(block, each), f"{name}.{each}", channels)
    yield from busy(block, f"{name}.", ("drop_path1", "drop_path2"))
    for each in ("ls1", "ls2"):
        factor = part(block, each)
        if not is_idle(factor) and (
            type(factor).__name__ != "LayerScale" or getattr(part(factor, "gamma"), "shape", None) != (channels,)
        ):
            yield f"{name}.{each} of {type(factor).__name__} (only LayerScale of {channels} channels)"
    yield from _wrong_attention(part(block, "attn"), f"{name}.attn", channels, attention_class)
    yield from _wrong_mlp(part(block, "mlp"), f"{name}.mlp", channels)


def _wrong_attention(attention: Any, name: str, channels: int, known: str) -> Iterator[str]:
    if type(attention).__name__ != known:
        yield f"{name} of {type(attention).__name__} (only {known})"
        return
    wrong = list(wrong_linear(part(attention, "qkv"), f"{name}.qkv", channels))
    yield from wrong
    if wrong:
        return
    heads, width = part(attention, "num_heads"), head_dim_of(attention)
    if not width or part(attention, "head_dim") not in (None, width):
        yield f"{name} with {heads} heads of {part(attention, 'head_dim')} channels, which its qkv does not give"
        return
    if not isinstance(attention.scale, int | float) or not 0 < attention.scale < float("inf"):
        yield f"{name}.scale of {attention.scale!r} (only a positive number)"
    yield from wrong_linear(part(attention, "proj"), f"{name}.proj", heads * width, channels)
    yield from busy(attention, f"{name}.", ("norm", "gate", "attn_drop", "proj_drop"))
    if is_normed(attention):
        for each in ("q_norm", "k_norm"):
            yield from wrong_norm(part(attention, each), f"{name}.{each}", width)


def _wrong_mlp(mlp: Any, name: str, channels: int) -> Iterator[str]:
    if type(mlp).__name__ != "Mlp":
        yield f"{name} of {type(mlp).__name__} (only fc1, GELU, fc2)"
        return
    wrong = list(wrong_linear(part(mlp, "fc1"), f"{name}.fc1", channels))
    yield from wrong
    hidden = None if wrong else only(mlp.fc1, "fc1", nn.Linear)[0].out_features
    yield from wrong_linear(part(mlp, "fc2"), f"{name}.fc2", hidden, channels)
    act = type(part(mlp, "act")).__name__
    if "gelu" not in act.lower() or "quick" in act.lower():
        yield f"{name}.act of {act} (only GELU)"
    yield from busy(mlp, f"{name}.", ("norm", "drop1", "drop2"))


def unlike(blocks: list[tuple[str, Any]]) -> Iterator[str]:
    """Name blocks whose attention or MLP has other sizes than the first one's, which the integer network has once."""
    if not blocks:
        return
    sizes = [
        {
            "heads": block.attn.num_heads, "head_dim": head_dim_of(block.attn), "scale": float(block.attn.scale),
            "hidden": only(block.mlp.fc1, "", nn.Linear)[0].out_features, "qk_norm": is_normed(block.attn),
        }
        for _, block in blocks
    ]  # fmt: skip
    for (name, _), each in zip(blocks, sizes, strict=True):
        if other := [key for key in each if each[key] != sizes[0][key]]:
            found = ", ".join(f"{key} {each[key]} for {sizes[0][key]}" for key in other)
            yield f"{name} unlike {blocks[0][0]} ({found})"


def linear(module: Any, name: str) -> FloatLinear:
    """Describe a layer; of a convolution the weight is a matrix."""
    layer, name = only(module, name, nn.Linear | nn.Conv2d)  # type: ignore[arg-type]
    return FloatLinear(name, layer.weight.detach().flatten(1), None if layer.bias is None else layer.bias.detach())


def norm(module: Any, name: str) -> FloatNorm:
    """Describe a layer normalisation."""
    return FloatNorm(name, module.weight.detach(), module.bias.detach(), module.eps)


def block(module: Any, name: str, windows: FloatWindows | None) -> FloatBlock:
    """Describe a transformer block of which :func:`wrong_block` has nothing to say."""
    attention, mlp = module.attn, module.mlp
    normed = is_normed(attention)
    factors = (part(module, f"{each}.gamma") for each in ("ls1", "ls2"))
    factor1, factor2 = (None if each is None else each.detach() for each in factors)
    act = mlp.act
    tanh = "tanh" in type(act).__name__.lower() or part(act, "approximate") == "tanh"
    return FloatBlock(
        name=name, norm1=norm(module.norm1, f"{name}.norm1"), qkv=linear(attention.qkv, f"{name}.attn.qkv"),
        q_norm=norm(attention.q_norm, f"{name}.attn.q_norm") if normed else None,
        k_norm=norm(attention.k_norm, f"{name}.attn.k_norm") if normed else None,
        heads=attention.num_heads, scale=float(attention.scale), windows=windows,
        proj=linear(attention.proj, f"{name}.attn.proj"), factor1=factor1, norm2=norm(module.norm2, f"{name}.norm2"),
        fc1=linear(mlp.fc1, f"{name}.mlp.fc1"), gelu="tanh" if tanh else "none", fc2=linear(mlp.fc2, f"{name}.mlp.fc2"),
        factor2=factor2,
    )  # fmt: skip


def refuse(problems: Iterator[str]) -> None:
    """Raise a ValueError that names the parts without an integer form, if there are any."""
    found = list(problems)
    if found:
        more = f" and {len(found) - 5} more" if len(found) > 5 else ""
        raise ValueError(f"model has parts without an integer form: {'; '.join(found[:5])}{more}")


def positions(x: Any, name: str, tokens: int, channels: int) -> Iterator[str]:
    """Say why constants are not (1, tokens, channels)."""
    if not isinstance(x, torch.Tensor) or x.shape != (1, tokens, channels):
        yield f"{name} of {tuple(getattr(x, 'shape', ()))} (only {(1, tokens, channels)})"
