"""Small networks with random weights, quantised once."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from qflash.network import modules, storage

timm = pytest.importorskip("timm")

VIT: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 2}
SWIN: dict[str, Any] = {
    "img_size": 32, "patch_size": 2, "embed_dim": 16, "depths": (2, 1), "num_heads": (1, 2), "window_size": 4,
}  # fmt: skip
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "class token": ("vit", {"num_classes": 10}),
    "features": ("vit", {"num_classes": 0}),
    "registers": ("vit", {"num_classes": 5, "reg_tokens": 3, "no_embed_class": True, "init_values": 0.2}),
    "registers embedded": ("vit", {"num_classes": 5, "reg_tokens": 1}),
    "mean then norm": ("vit", {"num_classes": 10, "global_pool": "avg"}),
    "norm then mean": ("vit", {"num_classes": 10, "global_pool": "avg", "fc_norm": False}),
    "norm first": ("vit", {"num_classes": 4, "pre_norm": True, "class_token": False, "global_pool": "avg"}),
    "mean features": ("vit", {"num_classes": 0, "global_pool": "avg", "fc_norm": False}),
    "long rows": ("vit", {"num_classes": 10, "patch_size": 3, "img_size": 27, "depth": 1}),
    "grey": ("vit", {"num_classes": 3, "in_chans": 1, "depth": 1}),
    "no biases": ("vit", {"num_classes": 3, "qkv_bias": False, "proj_bias": False, "depth": 1}),
    "query and key norms": ("vit", {"num_classes": 10, "qk_norm": True}),
    "SiLU": ("vit", {"num_classes": 3, "act_layer": "silu", "depth": 1}),
    "ReLU": ("vit", {"num_classes": 3, "act_layer": "relu", "depth": 1}),
    "SwiGLU": ("vit", {"num_classes": 3, "mlp_layer": timm.layers.SwiGLUPacked, "act_layer": "silu", "depth": 1}),
    "SwiGLU with a norm": ("vit", {"num_classes": 3, "mlp_layer": timm.layers.SwiGLU, "scale_mlp_norm": True, "depth": 1}),
    "rotary": ("eva", {"num_classes": 10, "num_reg_tokens": 2, "init_values": 0.3}),
    "rotary of each head": ("eva", {"num_classes": 4, "rope_type": "mixed", "global_pool": "token", "use_abs_pos_emb": False}),
    "rotary and norms": ("eva", {"num_classes": 4, "qk_norm": True, "rope_rotate_half": True, "rope_type": "dinov3"}),
    "swin": ("swin", {"num_classes": 10}),
    "swin features": ("swin", {"num_classes": 0}),
    "swin v2": ("swin v2", {"num_classes": 10}),
    "root mean squares": ("vit", {"num_classes": 4, "norm_layer": timm.layers.RmsNorm, "qk_norm": True}),
}


def build(family: str, **options: Any) -> Any:
    """Make a float model with weights that do something, in eval mode."""
    torch.manual_seed(0)
    if family == "vit":
        model = timm.models.vision_transformer.VisionTransformer(**{**VIT, **options})
    elif family == "eva":
        defaults = {"use_rot_pos_emb": True, "rope_temperature": 100.0, "head_init_scale": 1.0}
        model = timm.models.eva.Eva(**{**VIT, **defaults, **options})
    elif family == "swin v2":
        model = timm.models.swin_transformer_v2.SwinTransformerV2(**{**SWIN, **options})
    else:
        model = timm.models.swin_transformer.SwinTransformer(**{**SWIN, **options})
    channels = model.patch_embed.proj.in_channels
    model.pretrained_cfg = {"mean": (0.48, 0.45, 0.4)[:channels], "std": (0.22, 0.23, 0.25)[:channels]}
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(2)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def draw_images(count: int, channels: int, side: int, seed: int = 1) -> torch.Tensor:
    """Return random images, uint8, with something to see: blocks and noise."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(count, channels, 4, 4, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, size=(side, side))
    noise = torch.rand(count, channels, side, side, generator=generator)
    return ((0.7 * smooth + 0.3 * noise) * 255).to(torch.uint8)


def draw(model: Any, count: int, seed: int = 1) -> torch.Tensor:
    """Return images for one of timm's models, see :func:`draw_images`."""
    return draw_images(count, model.patch_embed.proj.in_channels, model.patch_embed.img_size[0], seed)


def normalise(model: Any, images: torch.Tensor) -> torch.Tensor:
    """Return images as the float model takes them."""
    mean, std = (torch.tensor(model.pretrained_cfg[name]).view(1, -1, 1, 1) for name in ("mean", "std"))
    return (images.float() / 255 - mean) / std


def decibels(want: torch.Tensor, got: torch.Tensor) -> float:
    """Return the signal-to-quantisation-noise ratio of ``got``."""
    want = want.double()
    return float(10 * (want.square().sum() / (got.double() - want).square().sum()).log10())


def rewrite(content: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    """Return a safetensors file with its header changed."""
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + content[8 + length :]


def in_ours(change: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, Any]], None]:
    """Return, for :func:`rewrite`, a change of what the header of a network's file holds of ours."""

    def change_header(header: dict[str, Any]) -> None:
        ours = json.loads(header["__metadata__"][storage.KEY])
        change(ours)
        header["__metadata__"][storage.KEY] = json.dumps(ours)

    return change_header


@pytest.fixture(scope="session")
def made() -> Callable[[str], tuple[Any, Any]]:
    """Return a function that gives a float model and its integer network by a name of :data:`KINDS`."""
    import qflash

    kept: dict[str, tuple[Any, Any]] = {}

    def get(kind: str) -> tuple[Any, Any]:
        if kind not in kept:
            family, options = KINDS[kind]
            model = build(family, **options)
            kept[kind] = model, qflash.quantize_model(model, [draw(model, 24)], progress=False)
        return kept[kind]

    return get


_REFUSE = """
import resource, sys, qflash
from qflash.network import storage
import safetensors.torch
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in sys.argv[1:]:
    for verify in (True, False):
        try:
            qflash.load_model(path, verify=verify)
        except ValueError as error:
            pass
        else:
            raise SystemExit(path)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def memory_of_refusals(paths: Sequence[str]) -> int:
    """Return how many kilobytes a process grows by that refuses all of these files; an error if it takes one."""
    done = subprocess.run([sys.executable, "-c", _REFUSE, *paths], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return int(done.stdout)


def note_devices(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets the device of every tensor which modules of integer networks make from now on."""
    devices: list[str] = []
    build_buffer = modules.IntegerModule._buffer

    def noted(self: Any, name: str, *form: Any, **options: Any) -> None:
        build_buffer(self, name, *form, **options)
        if self._buffers[name] is not None:
            devices.append(self._buffers[name].device.type)

    monkeypatch.setattr(modules.IntegerModule, "_buffer", noted)
    return devices
