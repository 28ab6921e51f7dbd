"""Integer attention in a diffusion model of diffusers."""

import torch
from diffusers import WanTransformer3DModel

import qflash

torch.manual_seed(0)
# or pipe.transformer, pipe.unet, pipe.vae of a pipeline
model = WanTransformer3DModel(
    patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16,
    freq_dim=32, ffn_dim=32, num_layers=2,
).eval()  # fmt: skip
video, text = torch.randn(1, 4, 2, 8, 8), torch.randn(1, 8, 16)

with torch.inference_mode():
    exact = model(video, torch.tensor([3]), text).sample
    qflash.patch(model)
    noise = model(video, torch.tensor([3]), text).sample

print(qflash.coverage(model))
print(f"largest difference {(noise - exact).abs().max():.4f}, largest output {exact.abs().max():.4f}")
