"""Both towers of CLIP and SigLIP in integers, where transformers and open_clip run the float models."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from families import STATISTICS, images, normalise

import qflash
from helpers import slow
from qflash.network.graph import IntegerNetwork
from qflash.network.modules import Attention
from qflash.network.operators.select_token import SelectToken
from qflash.network.quality import sqnr_db

transformers = pytest.importorskip("transformers")

TOKENS, MOST, END = 10, 64, 89
SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
Made = tuple[Any, IntegerNetwork, IntegerNetwork]


def draw_texts(count: int, seed: int = 1, tokens: int = TOKENS) -> dict[str, torch.Tensor]:
    """Return ids that end in ``END``, with padding behind it, and the mask."""
    generator = torch.Generator().manual_seed(seed)
    ends = torch.randint(2, TOKENS, (count, 1), generator=generator)
    ids, places = torch.randint(2, END, (count, tokens), generator=generator), torch.arange(tokens)
    ids = torch.where(places == ends, END, ids).masked_fill(places > ends, 0)
    return {"input_ids": ids, "attention_mask": (places <= ends).long()}


def draw_weights(model: Any) -> Any:
    """Give a model weights with which images and texts differ."""
    torch.manual_seed(0)
    with torch.no_grad():
        for label, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.normal_(float(label.endswith("weight")), 0.15)
            elif parameter.dim() > 1:
                position = any(each in label for each in ("embedding", "probe", "pos")) and "patch" not in label
                parameter.normal_(0, 0.5 if position else 1.2 * parameter[0].numel() ** -0.5)
    return model.eval()


def text_embeds(model: Any, ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    found = model.get_text_features(input_ids=ids, attention_mask=mask)
    # older versions of transformers return the tensor
    return found if isinstance(found, torch.Tensor) else found.pooler_output


def plain_text_embeds(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return text_embeds(model, ids, None)


def image_embeds(model: Any, pixels: torch.Tensor) -> torch.Tensor:
    found = model.get_image_features(pixel_values=pixels)
    return found if isinstance(found, torch.Tensor) else found.pooler_output


@functools.cache
def of_transformers(kind: str) -> Made:
    """Return a float model, and networks of its images and texts."""
    text = {**SIZES, "vocab_size": END + 1, "max_position_embeddings": MOST, "eos_token_id": END, "pad_token_id": 0}
    vision = {**SIZES, "image_size": 32, "patch_size": 8}
    if kind == "CLIP":
        config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    else:
        config = transformers.SiglipConfig(text_config={**text, "projection_size": 32}, vision_config=vision)
    model = draw_weights(getattr(transformers, f"{kind}Model")(config))
    batch: Any = draw_texts(32)
    outputs: Any = text_embeds
    if kind == "Siglip":
        # its tokeniser gives no mask: the model has learned with padding
        batch, outputs = draw_texts(32, tokens=MOST)["input_ids"], plain_text_embeds
    texts = qflash.quantize_model(model, [batch], outputs=outputs, progress=False)
    return model, qflash.quantize_model(model, [images(24)], outputs=image_embeds, progress=False, **STATISTICS), texts


def given_to(kind: str) -> dict[str, torch.Tensor]:
    return draw_texts(5, 3) if kind == "CLIP" else {"input_ids": draw_texts(5, 3, MOST)["input_ids"]}


@pytest.mark.parametrize("kind", ["CLIP", slow("Siglip")])
def test_similarities_are_of_the_networks_embeddings(kind: str) -> None:
    float_model, of_images, of_texts = of_transformers(kind)
    cores = [part for node in of_texts.nodes if isinstance(part := of_texts.part(node.name), Attention)]
    ends = [node for node in of_texts.nodes if isinstance(of_texts.part(node.name), SelectToken)]
    # SigLIP's last token, whatever it is, sees all of the 64
    assert all(core.causal == core.padded == (kind == "CLIP") for core in cores) and len(ends) == (kind == "CLIP")
    model = qflash.zero_shot_model(of_images, of_texts, float_model)
    assert isinstance(model, transformers.PreTrainedModel) and model.config is float_model.config and not model.training
    pixels, texts = images(6, 4), given_to(kind)
    found = model(pixel_values=pixels, **texts)
    unit = torch.nn.functional.normalize
    assert torch.equal(found.image_embeds, unit(of_images.dequantize(of_images(pixels)), dim=-1))
    assert torch.equal(found.text_embeds, unit(of_texts.dequantize(of_texts(**texts)), dim=-1))
    with torch.inference_mode():
        want = float_model(pixel_values=normalise(pixels), **texts)
    for name in ("logits_per_image", "logits_per_text", "image_embeds", "text_embeds"):
        assert getattr(found, name).shape == getattr(want, name).shape, name
        assert sqnr_db(getattr(want, name), getattr(found, name)) > 20, name
    bias = getattr(float_model, "logit_bias", torch.zeros(()))
    exact = found.image_embeds @ found.text_embeds.T * float_model.logit_scale.exp() + bias
    assert torch.allclose(found.logits_per_image, exact, atol=1e-5)
    assert torch.equal(model(**texts, pixel_values=pixels, return_dict=False)[0], found.logits_per_image)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["CLIP", "Siglip"])
def test_the_pipeline_classifies(kind: str) -> None:
    from PIL import Image
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    float_model, of_images, of_texts = of_transformers(kind)
    model = qflash.zero_shot_model(of_images, of_texts, float_model)
    words = {f"w{number}" if number > 1 else ("[PAD]", "[UNK]")[number]: number for number in range(END)} | {"[END]": END}
    plain = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    plain.post_processor = processors.TemplateProcessing(single="$A [END]", special_tokens=[("[END]", END)])
    names = ["input_ids", "attention_mask"] if kind == "CLIP" else ["input_ids"]
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="[PAD]", model_input_names=names)
    mean, std = STATISTICS["mean"], STATISTICS["std"]
    options = {"size": {"height": 32, "width": 32}, "image_mean": mean, "image_std": std}
    whole = transformers.ViTImageProcessor(**options)
    bare = transformers.ViTImageProcessor(**options, do_rescale=False, do_normalize=False)
    labels, shown = ["w3 w4", "w70", "w9 w50 w6", "w33 w33"], Image.fromarray(images(1, 9)[0].permute(1, 2, 0).numpy())
    scores = []
    for one, processor in ((model, bare), (float_model, whole)):
        classify = transformers.pipeline(
            "zero-shot-image-classification", model=one, tokenizer=tokenizer, image_processor=processor
        )
        found = classify(shown, candidate_labels=labels, hypothesis_template="w5 {}")
        scores.append({each["label"]: each["score"] for each in found})
    assert all(abs(scores[0][label] - score) < 0.1 for label, score in scores[1].items())


def test_what_does_not_go_together_is_said() -> None:
    model, of_images, of_texts = of_transformers("CLIP")
    with pytest.raises(
        TypeError, match=r"like must be a CLIPModel or SiglipModel of transformers, or .* open_clip, got Linear"
    ):
        qflash.zero_shot_model(of_images, of_texts, torch.nn.Linear(1, 1))
    with pytest.raises(TypeError, match=r"like must be a CLIPModel .*, got CLIPTextModel"):
        qflash.zero_shot_model(of_images, of_texts, transformers.CLIPTextModel(model.config.text_config))
    with pytest.raises(TypeError, match="texts must be what quantize_model returns, got CLIPModel"):
        qflash.zero_shot_model(of_images, model, model)
    with pytest.raises(ValueError, match="images must be a network that takes images, takes ids"):
        qflash.zero_shot_model(of_texts, of_texts, model)
    with pytest.raises(ValueError, match="texts must be a network that takes ids of tokens, takes images"):
        qflash.zero_shot_model(of_images, of_images, model)
    found = qflash.zero_shot_model(of_images, of_texts, model)
    texts = draw_texts(2)
    with pytest.raises(TypeError, match="images must be uint8, got float32: leave out rescaling and normalising"):
        found(pixel_values=normalise(images(1)), **texts)
    with pytest.raises(TypeError, match="pixel_values must be given"):
        found(**texts)
    with pytest.raises(TypeError, match="input_ids must be an int32 or int64 tensor"):
        found(pixel_values=images(1))
    with pytest.raises(ValueError, match="the integer networks do not know output_attentions, position_ids"):
        found(pixel_values=images(1), **texts, output_attentions=True, position_ids=torch.arange(TOKENS)[None])
    with pytest.raises(TypeError, match=r"saved with model.images.save"):
        found.save_pretrained("folder")


@pytest.mark.slow
def test_embeddings_must_have_as_many_channels_and_one_output() -> None:
    model, of_images, _ = of_transformers("CLIP")
    _, _, wide = of_transformers("Siglip")
    with pytest.raises(ValueError, match="embeddings of as many channels, have 16 and 32"):
        qflash.zero_shot_model(of_images, wide, model)
    tokens = qflash.quantize_model(
        model.text_model, [draw_texts(32)], outputs=["last_hidden_state"], progress=False, min_sqnr=None
    )
    with pytest.raises(ValueError, match=r"texts must have one output, \(batch, channels\), has last_hidden_state"):
        qflash.zero_shot_model(of_images, tokens, model)


def of_open_clip(kind: str) -> Made:
    open_clip = pytest.importorskip("open_clip")
    vision = open_clip.CLIPVisionCfg(image_size=32, layers=1, width=32, head_width=16, patch_size=8)
    text = {"context_length": TOKENS, "vocab_size": END + 1, "width": 32, "heads": 2, "layers": 1}
    if kind == "CLIP":
        model = open_clip.CLIP(16, vision, open_clip.CLIPTextCfg(**text), quick_gelu=True)
    else:
        # SigLIP's: no causal order, the last token
        text |= {"pool_type": "last", "no_causal_mask": True, "proj_bias": True}
        model = open_clip.CustomTextCLIP(16, vision, open_clip.CLIPTextCfg(**text), init_logit_bias=-3.0, output_dict=True)
    draw_weights(model)
    of_texts = qflash.quantize_model(
        model, [draw_texts(32)["input_ids"]], outputs=lambda model, ids: model.encode_text(ids), progress=False
    )
    of_images = qflash.quantize_model(
        model, [images(24)], outputs=lambda model, x: model.encode_image(x), progress=False, **STATISTICS
    )
    return model, of_images, of_texts


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["CLIP", "CustomTextCLIP"])
def test_code_of_open_clip_takes_it(kind: str) -> None:
    float_model, of_images, of_texts = of_open_clip(kind)
    import open_clip

    model = qflash.zero_shot_model(of_images, of_texts, float_model)
    pixels, ids = images(6, 4), draw_texts(5, 3)["input_ids"]
    assert torch.equal(model.encode_image(pixels), of_images.dequantize(of_images(pixels)))
    assert torch.equal(model.encode_text(ids), of_texts.dequantize(of_texts(ids)))
    with torch.inference_mode():
        wanted = float_model(normalise(pixels), ids)
        logits = float_model.get_logits(normalise(pixels), ids)
    found = model(pixels, ids)
    if kind == "CustomTextCLIP":
        assert list(found) == list(wanted) == ["image_features", "text_features", "logit_scale", "logit_bias"]
        found, wanted = tuple(found.values()), tuple(wanted.values())
    assert len(found) == len(wanted)
    for got, want in zip((*found, *model.get_logits(pixels, ids)), (*wanted, *logits), strict=True):
        assert got.shape == want.shape and sqnr_db(want, got) > 20
    assert model(image=pixels)["text_features" if kind == "CustomTextCLIP" else 1] is None
    # its own zero-shot classifier
    calls = {
        "tokenizer": lambda texts: draw_texts(len(texts), 8)["input_ids"],
        "templates": [str, str.upper],
        "classnames": ["a", "b", "c"],
    }
    with torch.no_grad():
        heads = [open_clip.build_zero_shot_classifier(each, **calls) for each in (model, float_model)]
    assert heads[0].shape == (16, 3) and sqnr_db(heads[1], heads[0]) > 20
    with pytest.raises(TypeError, match="images must be uint8, got float32"):
        model.encode_image(normalise(pixels))
    float_model.context_length = TOKENS + 1
    with pytest.raises(ValueError, match=rf"texts must take the {TOKENS + 1} tokens of a text of like, takes {TOKENS}"):
        qflash.zero_shot_model(of_images, of_texts, float_model)
