"""Integer attention in a model of torchvision."""

import torch
import torchvision

import qflash

torch.manual_seed(0)
# or torchvision.models.vit_b_16(weights="DEFAULT")
model = torchvision.models.VisionTransformer(
    image_size=64, patch_size=8, num_layers=2, num_heads=2, hidden_dim=64, mlp_dim=96, num_classes=10
).eval()
torch.nn.init.normal_(model.heads[-1].weight, std=0.1)
images = torch.randn(2, 3, 64, 64)

with torch.inference_mode():
    exact = model(images)
    qflash.patch(model)
    logits = model(images)

print(qflash.coverage(model))
print(f"largest difference of logits {(logits - exact).abs().max():.4f}, largest logit {exact.abs().max():.4f}")
