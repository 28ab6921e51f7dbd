"""Zero-shot classification with both towers of a CLIP as integer networks.

With weights: ``CLIPModel.from_pretrained(name)``, texts from its tokeniser, and images from
``CLIPImageProcessor.from_pretrained(name, do_rescale=False, do_normalize=False)``, which keeps them uint8.
"""

import torch
from transformers import CLIPConfig, CLIPModel

import qflash

END, TOKENS = 99, 12
text = {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
        "max_position_embeddings": TOKENS, "bos_token_id": 98, "eos_token_id": END, "pad_token_id": 0}  # fmt: skip
vision = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32,
          "patch_size": 8}  # fmt: skip
torch.manual_seed(0)
model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=32)).eval()
with torch.no_grad():
    for parameter in model.parameters():
        if parameter.dim() > 1:
            # random weights that do something
            parameter.normal_(0, parameter[0].numel() ** -0.5)


def draw_texts(count: int) -> dict[str, torch.Tensor]:
    """Return ids and mask as a tokeniser pads them: a text ends with END."""
    ids = torch.randint(1, 98, (count, TOKENS))
    ends = torch.randint(3, TOKENS, (count, 1))
    places = torch.arange(TOKENS)
    ids = torch.where(places == ends, END, ids).masked_fill(places > ends, 0)
    return {"input_ids": ids, "attention_mask": (places <= ends).long()}


def text_embeds(model: CLIPModel, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return what the text tower gives."""
    pooled = model.text_model(input_ids=ids, attention_mask=mask).pooler_output
    return {"text_embeds": model.text_projection(pooled)}


def image_embeds(model: CLIPModel, images: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return what the image tower gives."""
    return {"image_embeds": model.visual_projection(model.vision_model(pixel_values=images).pooler_output)}


MEAN, STD = (0.4815, 0.4578, 0.4082), (0.2686, 0.2613, 0.2758)
pixels = torch.randint(0, 256, (32, 3, 32, 32), dtype=torch.uint8)
texts = qflash.quantize_model(model, [draw_texts(64)], outputs=text_embeds, progress=False)
images = qflash.quantize_model(model, [pixels], outputs=image_embeds, mean=MEAN, std=STD, progress=False)

labels, shown = draw_texts(10), torch.randint(0, 256, (16, 3, 32, 32), dtype=torch.uint8)
both = qflash.zero_shot_model(images, texts, model)
scores = both(**labels, pixel_values=shown).logits_per_image
with torch.inference_mode():
    mean, std = (torch.tensor(x).view(3, 1, 1) for x in (MEAN, STD))
    exact = model(**labels, pixel_values=(shown / 255 - mean) / std).logits_per_image
print(f"texts: {texts.quality}")
print(f"images: {images.quality}")
print(f"same class for {int((scores.argmax(1) == exact.argmax(1)).sum())} of {len(shown)} images")
