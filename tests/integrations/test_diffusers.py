"""patch() on tiny random models of diffusers: DiT, Flux, a UNet, Wan and a VAE."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import qflash
from qflash_lab.bench.metrics import sqnr

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


MODELS: dict[str, tuple[str, dict[str, Any], Callable[[Any], Any], int]] = {
    "dit": (
        "DiTTransformer2DModel",
        {
            "num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "out_channels": 8, "num_layers": 2,
            "sample_size": 8, "patch_size": 2, "norm_num_groups": 1,
        },
        lambda model: model(
            draw(1, 4, 8, 8), timestep=torch.tensor([3]), class_labels=torch.tensor([1]), return_dict=False
        ),
        2,
    ),
    "flux": (
        "FluxTransformer2DModel",
        {
            "patch_size": 1, "in_channels": 4, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16,
            "num_attention_heads": 2, "joint_attention_dim": 32, "pooled_projection_dim": 32, "axes_dims_rope": [4, 4, 8],
        },
        lambda model: model(
            hidden_states=draw(1, 16, 4), encoder_hidden_states=draw(1, 8, 32), pooled_projections=draw(1, 32),
            timestep=torch.tensor([1.0]), img_ids=torch.zeros(16, 3), txt_ids=torch.zeros(8, 3), return_dict=False,
        ),
        2,
    ),
    "unet": (
        "UNet2DConditionModel",
        {
            "block_out_channels": (16, 32), "layers_per_block": 1, "sample_size": 16, "in_channels": 4, "out_channels": 4,
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"), "cross_attention_dim": 32, "norm_num_groups": 8,
            "attention_head_dim": 4,
        },
        lambda model: model(draw(1, 4, 16, 16), 3, draw(1, 8, 32), return_dict=False),
        8,
    ),
    "wan": (
        "WanTransformer3DModel",
        {
            "patch_size": (1, 2, 2), "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4,
            "out_channels": 4, "text_dim": 16, "freq_dim": 32, "ffn_dim": 32, "num_layers": 2,
        },
        lambda model: model(draw(1, 4, 2, 8, 8), torch.tensor([3]), draw(1, 8, 16), return_dict=False),
        4,
    ),
    "vae": (
        "AutoencoderKL",
        {"block_out_channels": (32,), "layers_per_block": 1, "norm_num_groups": 8},
        lambda model: model(draw(1, 3, 16, 16), return_dict=False),
        2,
    ),
}  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_a_diffusion_model(name: str) -> None:
    kind, settings, call, layers = MODELS[name]
    torch.manual_seed(0)
    model = getattr(diffusers, kind)(**settings).eval()
    exact = call(model)[0]
    qflash.patch(model, strict=True)
    got = call(model)[0]
    assert sqnr(exact, got) > 30.0
    report = qflash.coverage(model)
    assert len(report.integer) == len(report) == layers
    assert all(layer.integer_calls > 0 for layer in report)
    assert torch.equal(call(qflash.unpatch(model))[0], exact)
