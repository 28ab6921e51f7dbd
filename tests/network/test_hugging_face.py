"""Integer networks where transformers runs models: fields, pipelines."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from families import STATISTICS, images, make, normalise

import qflash
from qflash.network.quality import sqnr_db

transformers = pytest.importorskip("transformers")
Image = pytest.importorskip("PIL.Image")
CLASSES = dict(enumerate(("shirt", "bag", "boot", "coat", "dress", "shoe")))
_made: dict[str, Any] = {}


def made() -> tuple[Any, Any]:
    """Return a float DINOv2 and its network, made once."""
    if not _made:
        float_model = make("transformers: DINOv2")
        float_model.config.id2label = CLASSES
        outputs = ["logits", "tokens", "features", "hidden_states.1"]
        network = qflash.quantize_model(float_model, [images(24)], outputs=outputs, progress=False, **STATISTICS)
        _made["all"] = float_model, network
    return _made["all"]


def processor(**options: Any) -> Any:
    mean, std = STATISTICS["mean"], STATISTICS["std"]
    return transformers.ViTImageProcessor(size={"height": 32, "width": 32}, image_mean=mean, image_std=std, **options)


def pictures() -> list[Any]:
    return [Image.fromarray(x.permute(1, 2, 0).numpy()) for x in images(4, 9)]


def test_fields_are_those_of_the_float_model() -> None:
    float_model, network = made()
    model = qflash.transformers_model(network, float_model.config)
    assert isinstance(model, transformers.PreTrainedModel) and model.config is float_model.config and not model.training
    x = images(3, 5)
    with torch.inference_mode():
        found = model(pixel_values=x)
        wanted = float_model(normalise(x), output_hidden_states=True)
        inner = float_model.dinov2(normalise(x))
    raw = network(x)
    assert torch.equal(found.logits, raw["logits"].float() * network.scales["logits"])
    for got, want in (
        (found.logits, wanted.logits), (found.last_hidden_state, inner.last_hidden_state),
        (found.pooler_output, inner.pooler_output), (found.hidden_states[0], wanted.hidden_states[1]),
    ):  # fmt: skip
        assert got.dtype == torch.float32 and got.shape == want.shape and sqnr_db(want, got) > 25
    assert torch.equal(found[0], found.last_hidden_state) and found.image_embeds is None
    assert torch.equal(model(x, return_dict=False)[0], found[0])
    assert model(x, output_hidden_states=True).hidden_states[0].shape == (3, 17, 32)
    assert (model.dtype, model.device) == (torch.float32, torch.device("cpu"))


def test_pipelines_take_it(caplog: pytest.LogCaptureFixture) -> None:
    float_model, network = made()
    model = qflash.transformers_model(network, float_model.config)
    pixels = processor(do_rescale=False, do_normalize=False)
    with caplog.at_level(logging.ERROR, logger="transformers"):
        logging.getLogger("transformers").propagate = True
        classify = transformers.pipeline("image-classification", model=model, image_processor=pixels)
    assert not [record for record in caplog.records if "not supported" in record.getMessage()]
    own = transformers.pipeline("image-classification", model=float_model, image_processor=processor())
    found, wanted = classify(pictures(), top_k=6), own(pictures(), top_k=6)
    for got, want in zip(found, wanted, strict=True):
        chances = {each["label"]: each["score"] for each in want}
        assert {each["label"] for each in got} == set(CLASSES.values())
        assert all(abs(each["score"] - chances[each["label"]]) < 0.05 for each in got)
    extract = transformers.pipeline("image-feature-extraction", model=model, image_processor=pixels)
    tokens = torch.tensor(extract(pictures()[:1]))
    assert torch.allclose(tokens[0, 0], model(images(4, 9)[:1]).last_hidden_state[0])
    pooled = torch.tensor(extract(pictures()[:1], pool=True))
    assert torch.allclose(pooled[0, 0], model(images(4, 9)[:1]).pooler_output[0])


def test_names_of_classes_are_the_files() -> None:
    _, network = made()
    network.about = {"labels": list(CLASSES.values())}
    assert qflash.transformers_model(network).config.id2label == CLASSES
    network.about = {}
    assert qflash.transformers_model(network).config.num_labels == 2


def test_a_timm_network_has_logits() -> None:
    network = qflash.quantize_model(make("timm: class token"), [images(16)], progress=False, **STATISTICS)
    found = qflash.transformers_model(network)(images(2))
    assert found.logits.shape == (2, 6) and torch.equal(found[0], found.logits)


def test_what_it_cannot_do_is_said() -> None:
    float_model, network = made()
    model = qflash.transformers_model(network, float_model.config)
    with pytest.raises(TypeError, match="pixel_values must be uint8, got float32: load the image processor with do"):
        model(normalise(images(1)))
    with pytest.raises(ValueError, match="does not know output_attentions; quantize_model"):
        model(images(1), output_attentions=True, output_hidden_states=False)
    with pytest.raises(TypeError, match="network must be what quantize_model returns"):
        qflash.transformers_model(float_model)
    with pytest.raises(TypeError, match="config must be a PretrainedConfig"):
        qflash.transformers_model(network, {})
    with pytest.raises(TypeError, match=r"saved with model.network.save"):
        model.save_pretrained("folder")
    other = qflash.quantize_model(float_model, [images(16)], outputs=["dinov2.layernorm"], progress=False, **STATISTICS)
    with pytest.raises(ValueError, match=r"must be of logits, .* each field once, are dinov2.layernorm"):
        qflash.transformers_model(other)


def test_a_text_encoder_in_a_pipeline() -> None:
    """Ids and mask as a tokeniser of transformers returns them, padded to the longest text of a batch."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: number for number, word in enumerate(("[PAD]", "[UNK]", *"abcdefgh"))}
    plain = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="[PAD]", unk_token="[UNK]")
    config = transformers.BertConfig(
        vocab_size=len(words), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=16,
    )  # fmt: skip
    torch.manual_seed(0)
    float_model = transformers.BertModel(config, add_pooling_layer=False).eval()
    texts = ["a b c", "d e f g h a b c", "h", "g f e d c", "b b", "a h g d", "e f", "c c c c c c d"] * 2
    coded = tokenizer(texts, return_tensors="pt", padding="max_length", max_length=8, truncation=True)
    network = qflash.quantize_model(float_model, [coded], outputs=["last_hidden_state"], progress=False)
    model = qflash.transformers_model(network, config)
    assert model.main_input_name == "input_ids"
    batch = tokenizer(texts[2:5], return_tensors="pt", padding=True)
    assert batch["input_ids"].shape == (3, 5)
    found = model(**batch)
    assert torch.equal(found.last_hidden_state, network.dequantize(network(**batch)))
    with torch.inference_mode():
        want = float_model(**batch).last_hidden_state
    real = batch["attention_mask"].bool()
    assert sqnr_db(want[real], found.last_hidden_state[real]) > 24
    extract = transformers.pipeline("feature-extraction", model=model, tokenizer=tokenizer)
    (row,) = extract("g f e d c")
    assert torch.equal(torch.tensor(row), found.last_hidden_state[1])
    with pytest.raises(TypeError, match="input_ids must be an int32 or int64 tensor"):
        model()
