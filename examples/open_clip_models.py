"""Integer attention in a model of open_clip: its image and its text encoder."""

import open_clip
import torch

import qflash

torch.manual_seed(0)
# or open_clip.create_model_and_transforms("ViT-B-32", pretrained=...)
model = open_clip.CLIP(
    embed_dim=64,
    vision_cfg={"layers": 2, "width": 64, "head_width": 32, "patch_size": 8, "image_size": 32},
    text_cfg={"layers": 2, "width": 64, "heads": 2, "context_length": 16, "vocab_size": 100},
).eval()
images, texts = torch.randn(2, 3, 32, 32), torch.randint(1, 100, (2, 16))

with torch.inference_mode():
    exact = model.encode_image(images), model.encode_text(texts)
    qflash.patch(model)
    features = model.encode_image(images), model.encode_text(texts)

print(qflash.coverage(model))
for name, a, b in zip(("image", "text"), exact, features, strict=True):
    print(f"{name} features: cosine to floating point {torch.cosine_similarity(a, b).min():.5f}")
