"""Integer attention in models of transformers, by name and by patching."""

import torch
from transformers import Swinv2Config, Swinv2Model, ViTConfig, ViTModel

import qflash

torch.manual_seed(0)
images = torch.randn(2, 3, 32, 32)

# A model that looks its attention up goes by a name: from_pretrained(..., attn_implementation="integer")
qflash.register_attention()
config = ViTConfig(
    hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=96, image_size=32, patch_size=8
)
model = ViTModel._from_config(config, attn_implementation="integer").eval()
with torch.inference_mode():
    tokens = model(pixel_values=images).last_hidden_state
print(qflash.coverage(model))

# Any other model is patched
config = Swinv2Config(image_size=32, patch_size=2, embed_dim=32, depths=[2, 2], num_heads=[2, 4], window_size=8)
model = Swinv2Model(config).eval()
with torch.inference_mode():
    exact = model(pixel_values=images).last_hidden_state
    qflash.patch(model)
    tokens = model(pixel_values=images).last_hidden_state
print(qflash.coverage(model))
print(f"largest difference {(tokens - exact).abs().max():.4f}, largest feature {exact.abs().max():.4f}")
