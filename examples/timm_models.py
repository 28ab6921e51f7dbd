"""Integer attention in a model of timm."""

import timm
import torch

import qflash

torch.manual_seed(0)
# or pretrained=True, at its own size
model = timm.create_model("mvitv2_tiny", img_size=64, num_classes=10).eval()
images = torch.randn(2, 3, 64, 64)

with torch.inference_mode():
    exact = model(images)
    qflash.patch(model)
    logits = model(images)

print(qflash.coverage(model))
print(f"largest difference of logits {(logits - exact).abs().max():.4f}, largest logit {exact.abs().max():.4f}")
