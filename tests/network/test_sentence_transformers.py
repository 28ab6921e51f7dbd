"""A SentenceTransformer whose encoder is an integer network: ``encode`` gives what the network gives, pooled."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

import qflash

transformers = pytest.importorskip("transformers")
sentence_transformers = pytest.importorskip("sentence_transformers")

WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefgh")
TOKENS = 10
CALIBRATION = ["a b c", "d e f g h a b c", "h", "g f e d c", "b b", "a h g d", "e f", "c c c c c c d"] * 3
TEXTS = ["a c e", "h g f e d c b a h h h h h h", "b", "d d e"]


@pytest.fixture
def model(tmp_path: Path) -> Any:
    """A small MiniLM: BERT's encoder, the mean over the mask, length 1."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    plain = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    plain.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    transformers.PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(tmp_path)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(WORDS), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=16,
    )  # fmt: skip
    encoder = transformers.BertModel(config, add_pooling_layer=False)
    with torch.no_grad():
        for parameter in encoder.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, parameter.shape[1] ** -0.5)
    encoder.save_pretrained(tmp_path)
    modules = importlib.import_module("sentence_transformers.models")
    first = modules.Transformer(str(tmp_path), max_seq_length=TOKENS)
    return sentence_transformers.SentenceTransformer(
        modules=[first, modules.Pooling(32), modules.Normalize()], device="cpu"
    ).eval()


def coded(model: Any, texts: list[str]) -> Any:
    return model.tokenizer(texts, padding="max_length", max_length=TOKENS, truncation=True, return_tensors="pt")


def quantised(model: Any, texts: Any, outputs: str = "last_hidden_state") -> qflash.network.graph.IntegerNetwork:
    return qflash.quantize_model(model[0].auto_model, [texts], outputs=[outputs], progress=False)


def test_encode_runs_the_network(model: Any) -> None:
    want = model.encode(TEXTS, convert_to_tensor=True)
    network = quantised(model, coded(model, CALIBRATION))
    changed = qflash.sentence_transformer(model, network)
    assert changed is model and not list(model.parameters())
    found = model.encode(TEXTS, convert_to_tensor=True)
    batch = coded(model, TEXTS)
    mask = batch["attention_mask"][:, :, None].float()
    tokens = network.dequantize(network(**batch))
    pooled = torch.nn.functional.normalize((tokens * mask).sum(dim=1) / mask.sum(dim=1), dim=-1)
    # texts are shorter in their batches, and in another order: sums of equal numbers
    assert torch.allclose(found, pooled, atol=1e-6)
    assert float((found * want).sum(dim=1).min()) > 0.99
    # without what pools, all bits
    plain = model.encode(TEXTS, output_value="token_embeddings", convert_to_tensor=True)
    for row, text, real in zip(plain, tokens, batch["attention_mask"], strict=True):
        assert torch.equal(row[: int(real.sum())], text[real.bool()])
    assert torch.equal(model.encode(TEXTS[::-1], batch_size=2, convert_to_tensor=True), found.flip(0))


@pytest.mark.slow
def test_what_does_not_fit_is_said(model: Any) -> None:
    network = quantised(model, coded(model, CALIBRATION))
    with pytest.raises(TypeError, match="model must be a SentenceTransformer, got BertModel"):
        qflash.sentence_transformer(model[0].auto_model, network)
    with pytest.raises(TypeError, match="network must be what quantize_model returns"):
        qflash.sentence_transformer(model, model)
    no_encoder = sentence_transformers.SentenceTransformer(modules=[model[2]], device="cpu")
    with pytest.raises(
        ValueError, match=r"model must have an encoder of transformers in its first module, .* Normalize with None"
    ):
        qflash.sentence_transformer(no_encoder, network)
    model.max_seq_length = TOKENS + 2
    with pytest.raises(ValueError, match=rf"max_seq_length must be at most {TOKENS}, .* is {TOKENS + 2}: set it"):
        qflash.sentence_transformer(model, network)
    model.max_seq_length = TOKENS
    without_mask = quantised(model, coded(model, CALIBRATION)["input_ids"])
    with pytest.raises(ValueError, match="network must take texts of different lengths: calibrate it with an attention_mask"):
        qflash.sentence_transformer(model, without_mask)
    inner = quantised(model, coded(model, CALIBRATION), "encoder.layer.0.output")
    with pytest.raises(ValueError, match=r"give last_hidden_state, .* was given: encoder\.layer\.0\.output"):
        qflash.sentence_transformer(model, inner)
    model[0].auto_model.config.vocab_size += 1
    with pytest.raises(ValueError, match=f"which has {len(WORDS) + 1} tokens and 32 channels, has {len(WORDS)} and 32"):
        qflash.sentence_transformer(model, network)
