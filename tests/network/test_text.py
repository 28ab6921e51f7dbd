"""Networks that take ids of tokens: encoders of texts with normalisations behind their sums."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import qflash
from helpers import DEVICE
from qflash.network.bit_operations import bit_operations
from qflash.network.onnx_check import self_test_ids
from qflash.network.operators.token_embedding import TokenEmbedding

transformers = pytest.importorskip("transformers")

TOKENS, VOCABULARY = 12, 90


def draw_ids(count: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (count, TOKENS), generator=torch.Generator().manual_seed(seed))


def build(name: str = "Bert") -> Any:
    """Return a small model of transformers with weights that do something."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=20,
    )  # fmt: skip
    model = getattr(transformers, f"{name}Model")(config).eval()
    with torch.no_grad():
        for label, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.normal_(float(label.endswith("weight")), 0.15)
            else:
                parameter.normal_(0, 0.5 if "embeddings" in label else 1.2 * parameter.shape[1] ** -0.5)
    return model


@pytest.fixture(scope="module")
def made() -> tuple[Any, qflash.network.IntegerNetwork]:
    """Return a BERT and its integer network."""
    model = build()
    batch = {"input_ids": draw_ids(24), "token_type_ids": torch.zeros(24, TOKENS)}
    return model, qflash.quantize_model(model, [batch], outputs=["last_hidden_state"], progress=False)


def test_a_bert_is_close_and_has_the_same_bits_everywhere(made: Any, tmp_path: Path) -> None:
    model, network = made
    assert network.quality.sqnr_db > 28 and network.image == (TOKENS, VOCABULARY)
    ids = draw_ids(5, 2)
    reference = copy.deepcopy(network)
    reference.backend = "reference"
    want = reference(ids)
    with torch.inference_mode():
        hidden = model(ids).last_hidden_state
    error = network.dequantize(want) - hidden
    assert float(10 * (hidden.square().sum() / error.square().sum()).log10()) > 28
    network.save(tmp_path / "network")
    loaded = qflash.load_model(tmp_path / "network")
    loaded.backend = "cpu"
    assert loaded.image == network.image
    for given in (ids, ids.int()):
        assert torch.equal(loaded(given), want)
    assert torch.equal(torch.cat([loaded(part) for part in ids.split(2)]), want)
    assert loaded(ids[:0]).shape == (0, TOKENS, 32)
    other = copy.deepcopy(network)
    other.load_state_dict(loaded.state_dict())
    assert torch.equal(other(ids), want)
    report = qflash.compare(network, model, ids, progress=False)
    assert report.sqnr_db["last_hidden_state"] > 28 and {"TokenEmbedding", "Narrow"} <= {row.kind for row in report.nodes}
    assert set(report.contributions) == {
        f"encoder.layer.{layer}.{part}" for layer in (0, 1) for part in ("attention", "intermediate", "output")
    } or all(name.startswith("encoder.layer") for name in report.contributions)
    assert bit_operations(network).multiply_adds > 0


def test_words_and_places_are_added_in_sixteen_bits(made: Any) -> None:
    model, network = made
    part = network.part("embeddings.word_embeddings")
    assert isinstance(part, TokenEmbedding) and part.position is not None
    ids, unit = draw_ids(3, 3), network.units[0]
    with torch.inference_mode():
        want = model.embeddings.word_embeddings(ids) + model.embeddings.position_embeddings.weight[:TOKENS]
        want += model.embeddings.token_type_embeddings.weight[0]
    assert float((part(ids, "reference") * unit - want).abs().max()) <= unit * 1.01
    large = TokenEmbedding(2, 3, 1)
    large.table[:], large.position[:] = 30000, torch.tensor([30000, -30000, -7], dtype=torch.int16)  # type: ignore[index]
    assert large(torch.tensor([[1]])).tolist() == [[[32767, 0, 29993]]]


@pytest.mark.slow
def test_kernels_have_the_same_bits(made: Any) -> None:
    """In Triton's interpreter, or on a GPU."""
    network, ids = copy.deepcopy(made[1]), draw_ids(2, 4)
    network.backend = "reference"
    want = network(ids)
    network.backend = "triton"
    assert torch.equal(network.to(DEVICE)(ids.to(DEVICE)).cpu(), want)


def test_onnxruntime_has_the_same_bits(made: Any, tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    from qflash.network.onnx_check import check_onnx

    network = made[1]
    network.export_onnx(tmp_path / "network.onnx")
    session = runtime.InferenceSession(str(tmp_path / "network.onnx"), providers=["CPUExecutionProvider"])
    for count in (1, 3):
        ids = draw_ids(count, 5)
        (got,) = session.run(None, {"input_ids": ids.numpy()})
        assert torch.equal(torch.from_numpy(got), network(ids))
    outcomes = check_onnx(tmp_path / "network.onnx", ["onnxruntime"])
    assert len(outcomes) >= 4 and all(outcome.problem is None for outcome in outcomes)
    assert len(self_test_ids(2, 50, 30522).unique()) > 90 and int(self_test_ids(2, 50, 7).max()) < 7


def test_tosa_has_the_same_bits(made: Any, tmp_path: Path) -> None:
    reference_model = pytest.importorskip("tosa_reference_model")
    pytest.importorskip("tosa_serializer")
    network, ids = made[1], draw_ids(2, 6)
    network.export_tosa(tmp_path / "network.tosa", batch=2)
    found, status = reference_model.run((tmp_path / "network.tosa").read_bytes(), [ids.int().numpy()], tosa_level="EIGHTK")
    assert status == reference_model.GraphStatus.TOSA_VALID
    assert torch.equal(torch.from_numpy(found[0].copy()).view(2, TOKENS, 32).int(), network(ids))


@pytest.mark.parametrize(
    ("batch", "error", "words"),
    [
        ({"input_ids": draw_ids(4), "token_type_ids": draw_ids(4)}, ValueError, "token_type_ids must be 0 everywhere"),
        (torch.ones(4, TOKENS), TypeError, "images must be uint8"),
    ],
)
def test_texts_that_are_not_taken(batch: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        qflash.quantize_model(build(), [batch], outputs=["last_hidden_state"], progress=False)


def test_a_network_of_texts_refuses_others(made: Any) -> None:
    network = made[1]
    with pytest.raises(TypeError, match="ids must be an int32 or int64 tensor"):
        network(torch.ones(2, TOKENS))
    with pytest.raises(ValueError, match=rf"ids must have shape \(batch, {TOKENS}\)"):
        network(draw_ids(2)[:, 1:])
    for wrong in (-1, VOCABULARY):
        with pytest.raises(ValueError, match=f"ids must hold numbers below the {VOCABULARY} tokens"):
            network(torch.full((1, TOKENS), wrong))
    op = torch.ops.qflash.token_embedding
    table = torch.ones(5, 4, dtype=torch.int16)
    for ids, rows, position, error, words in (
        (torch.ones(2, 3), table, None, TypeError, "ids must be int32, int64"),
        (torch.ones(2, 3, dtype=torch.int64), table.int(), None, TypeError, "table must be int16"),
        (torch.ones(2, 3, dtype=torch.int64), table, table, ValueError, r"position must have shape \(3, 4\)"),
        (torch.ones(2, 3, 1, dtype=torch.int64), table, None, ValueError, r"ids must be \(batch, tokens\)"),
    ):
        with pytest.raises(error, match=words):
            op(ids, rows, position, "reference")


class LargeIds(nn.Module):
    """Leaves out words by their number."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.words(ids) * (ids > 3)[..., None]


def test_other_uses_of_ids_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"aten\.gt in the model .* has no integer form"):
        qflash.quantize_model(LargeIds().eval(), [draw_ids(4)], progress=False)


class LatePlaces(nn.Module):
    """Adds places behind a normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm, self.places = nn.Embedding(50, 32), nn.LayerNorm(32), nn.Parameter(torch.randn(8, 32))
        self.block = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True, norm_first=True)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.block(self.norm(self.words(input_ids)) + self.places)


def test_places_behind_a_normalisation_are_refused_by_name() -> None:
    ids = torch.randint(0, 50, (4, 8), generator=torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match=r"norm of norm has no .*, and it does not take patches of the image$"):
        qflash.quantize_model(LatePlaces().eval(), [ids], progress=False)


class Segments(nn.Module):
    """Adds places, and the one segment, whose ids are zeros of the same type as those of words."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places, self.segments = nn.Embedding(50, 32), nn.Embedding(8, 32), nn.Embedding(2, 32)
        self.norm, self.block = nn.LayerNorm(32), nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        places = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        x = self.words(input_ids) + self.places(places) + self.segments(torch.zeros_like(input_ids))
        return self.block(self.norm(x))


def test_segments_that_are_zeros_like_ids() -> None:
    ids = torch.randint(0, 50, (24, 8), generator=torch.Generator().manual_seed(0))
    assert qflash.quantize_model(Segments().eval(), [ids], progress=False).quality.sqnr_db > 25
