"""Every name of timm's transformers: a network, or an error that names what has no integer form."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import qflash
from qflash.network.families import read
from qflash_lab.bench.metrics import sqnr
from small_networks import draw, normalise, timm

MODULES = {
    "vision_transformer": {"depth": 2, "embed_dim": 96, "num_heads": 4},
    "swin_transformer": {"depths": (2, 2), "embed_dim": 16, "num_heads": (1, 2)},
    "vision_transformer_hybrid": {"depth": 1},
    "vision_transformer_relpos": {"depth": 1},
    "deit": {"depth": 1},
    "beit": {"depth": 1},
    "eva": {"depth": 1},
    "swin_transformer_v2": {"depths": (1, 1, 1, 1)},
    "vision_transformer_sam": {},
}
"""Modules of timm, and options that make their models small where they take them."""
NAMED = (
    r"model has parts without an integer form: (patch_embed|norm|norm_pre|fc_norm|head|attn_pool|global_pool|dynamic_img_size|"
    r"pool_include_prefix|no (learnt|final)|blocks\.\d|layers\.\d)|model must be timm's .* got timm\.models\.\w+\.\w+"
)
TAKEN = {"vision_transformer": 0.5, "swin_transformer": 0.9, "deit": 0.5}
"""The least share of a module's names there are integer networks for, whatever timm adds; none of the others."""


def make(module: str, name: str, device: str) -> Any:
    """Return a small model in eval mode; at least one without memory for its weights where timm makes no small one."""
    options = dict(MODULES[module])
    if module == "vision_transformer":
        options["img_size"] = 2 * int((re.search(r"patch(\d+)", name) or ["", "16"])[1])
    elif module == "swin_transformer":
        options["img_size"] = 8 * int((re.search(r"window(\d+)", name) or ["", "7"])[1])
    try:
        with torch.device(device):
            return timm.create_model(name, **options).eval()
    except (TypeError, ValueError, AssertionError):
        with torch.device("meta"):
            return timm.create_model(name).eval()


@pytest.mark.parametrize("module", MODULES)
def test_every_name_is_taken_or_refused_by_name(module: str) -> None:
    names = timm.list_models(module=module)
    assert names
    taken = []
    for name in names:
        with pytest.raises((TypeError, ValueError)) as refusal:
            qflash.quantize_model(make(module, name, "meta"), [], progress=False)
        message = str(refusal.value)
        if message.endswith("is on the meta device, without values"):
            taken.append(name)
        else:
            assert re.search(NAMED, message), f"{name}: {message}"
    assert len(taken) >= TAKEN.get(module, 0) * len(names)
    assert bool(taken) == (module in TAKEN)


@pytest.mark.parametrize("module", ["vision_transformer", "swin_transformer"])
def test_a_small_model_of_a_name_is_quantised(module: str) -> None:
    torch.manual_seed(0)
    done = 0
    for name in timm.list_models(module=module)[::8]:
        model = make(module, name, "cpu")
        model.pretrained_cfg = {"mean": (0.5,) * 3, "std": (0.25,) * 3}
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(std=(1 / parameter[0].numel()) ** 0.5)
        try:
            read(model)
        except ValueError:
            continue
        network = qflash.quantize_model(model, [draw(model, 24)], progress=False)
        fresh = draw(model, 6, seed=3)
        with torch.inference_mode():
            assert sqnr(model(normalise(model, fresh)), network.dequantize(network(fresh))) > 20, name
        done += 1
    assert done >= 2
