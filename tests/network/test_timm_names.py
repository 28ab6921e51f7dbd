"""Every name of timm's transformers: a network, or an error that names what has no integer form."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import qflash
from qflash_lab.bench.metrics import sqnr
from small_networks import draw_images, normalise, timm

NARROW = {"depth": 1, "embed_dim": 96, "num_heads": 3}
MODULES: dict[str, dict[str, Any]] = {
    "vision_transformer": {"depth": 2, "embed_dim": 96, "num_heads": 4},
    "swin_transformer": {"depths": (2, 1), "embed_dim": 16, "num_heads": (1, 2)},
    "vision_transformer_hybrid": {"depth": 1},
    "vision_transformer_relpos": NARROW,
    "deit": NARROW,
    "beit": NARROW,
    "eva": NARROW,
    "swin_transformer_v2": {"depths": (1, 1), "embed_dim": 16, "num_heads": (1, 2)},
    "vision_transformer_sam": NARROW,
}
"""Modules of timm, and options that make their models small where they take them."""
NAMED = r" has no integer form|torch\.export cannot trace the model: "
TAKEN = {"vision_transformer", "swin_transformer", "deit", "beit", "vision_transformer_relpos", "swin_transformer_v2", "eva"}
"""Modules of which some names become integer networks."""


def make(module: str, name: str) -> Any:
    """Return a small model in eval mode, or None where timm makes no small one."""
    options = dict(MODULES[module])
    if module.startswith("swin_transformer"):
        options["img_size"] = 8 * int((re.search(r"window(\d+)", name) or ["", "7"])[1])
    elif module != "vision_transformer_hybrid":
        options["img_size"] = 2 * int((re.search(r"patch(\d+)", name) or ["", "16"])[1])
    try:
        return timm.create_model(name, **options).eval()
    except (TypeError, ValueError, AssertionError, RuntimeError):
        return None


# all of each eighth are for make test-all: a module takes up to 16 s
@pytest.mark.parametrize("count", [2, pytest.param(None, marks=pytest.mark.slow(1 << 32))])
@pytest.mark.parametrize("module", MODULES)
def test_every_name_is_taken_or_refused_by_name(module: str, count: int | None) -> None:
    """Each eighth of a module, or two of these, for time: ``scripts/survey_networks.py`` takes all."""
    torch.manual_seed(0)
    taken = tried = 0
    for name in timm.list_models(module=module)[::8][:count]:
        if (model := make(module, name)) is None:
            continue
        tried += 1
        for label, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(std=(1 / parameter[0].numel()) ** 0.5)
            elif "gamma" in label:
                # layer scale begins near 0, where no class token sees an image
                parameter.data.uniform_(0.3, 0.6)
        side = max(model.default_cfg["input_size"][1:]) if "img_size" not in MODULES[module] else 0
        side = getattr(getattr(model, "patch_embed", None), "img_size", (side,))[0]
        calibration, fresh = draw_images(40, 3, side, 1), draw_images(4, 3, side, 3)
        model.pretrained_cfg = {"mean": (0.5,) * 3, "std": (0.25,) * 3}
        network, refusal = None, ""
        try:
            network = qflash.quantize_model(model, [calibration], progress=False)
        except ValueError as error:
            refusal = str(error)
        if network is None:
            assert re.search(NAMED, refusal), f"{name}: {refusal}"
            continue
        taken += 1
        with torch.inference_mode():
            assert sqnr(model(normalise(model, fresh)), network.dequantize(network(fresh))) > 20, name
    assert tried and bool(taken) == (module in TAKEN)
