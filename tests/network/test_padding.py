"""Texts of different lengths: attention masks, causal attention, and the token that stands for a text."""

from __future__ import annotations

import copy
import importlib.util
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import qflash
from helpers import DEVICE, few
from qflash.network.capture import UnsupportedError
from qflash.network.graph import IntegerNetwork
from qflash.network.modules import Attention
from qflash.network.onnx_check import check_onnx
from qflash.network.operators.select_token import SelectToken
from qflash.network.operators.token_embedding import TokenEmbedding
from qflash.network.outputs import takes_mask
from qflash.network.quality import sqnr_db
from qflash.network.quantize import _check_weights
from qflash.specification.texts import place_of, with_padding

transformers = pytest.importorskip("transformers")

TOKENS, VOCABULARY, END = 12, 90, 89
Made = tuple[Any, IntegerNetwork]


def draw_texts(lengths: list[int], seed: int = 1, tokens: int = TOKENS) -> dict[str, torch.Tensor]:
    """Return what a tokeniser does: ids that end in ``END``, and the mask; what is behind the end is drawn, too."""
    ids = torch.randint(3, END - 9, (len(lengths), tokens), generator=torch.Generator().manual_seed(seed))
    ends = torch.tensor(lengths)
    ids[torch.arange(len(ids)), ends - 1] = END
    return {"input_ids": ids, "attention_mask": (torch.arange(tokens) < ends[:, None]).long()}


def draw_weights(model: Any) -> Any:
    """Give a model weights that do something."""
    torch.manual_seed(0)
    with torch.no_grad():
        for label, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.normal_(float(label.endswith("weight")), 0.15)
            else:
                parameter.normal_(0, 0.5 if "embedding" in label else parameter.shape[1] ** -0.5)
    return model.eval()


SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
    "max_position_embeddings": 20,
}  # fmt: skip


def build_bert() -> Any:
    return draw_weights(transformers.BertModel(transformers.BertConfig(**SIZES), add_pooling_layer=False))


def build_clip(end: int = END) -> Any:
    """Return the text tower of a CLIP. Older configurations have the end 2, and take the largest id."""
    more = {"eos_token_id": end, "bos_token_id": 1, "pad_token_id": 0, "projection_dim": 16}
    return draw_weights(transformers.CLIPTextModelWithProjection(transformers.CLIPTextConfig(**SIZES, **more)))


CALIBRATION = draw_texts([3, 12, 5, 9, 7, 4, 12, 6] * 3, seed=5)
TEXTS = draw_texts([3, 5, 12, 7], seed=2)


@pytest.fixture(scope="module")
def bert() -> Made:
    model = build_bert()
    return model, qflash.quantize_model(model, [CALIBRATION], outputs=["last_hidden_state"], progress=False)


@pytest.fixture(scope="module")
def clip() -> Made:
    model = build_clip()
    return model, qflash.quantize_model(model, [CALIBRATION], outputs=["text_embeds", "last_hidden_state"], progress=False)


def with_backend(network: IntegerNetwork, backend: str) -> IntegerNetwork:
    twin = copy.deepcopy(network)
    twin.backend = backend
    return twin


def test_a_text_has_the_same_bits_with_and_without_padding(bert: Made, tmp_path: Path) -> None:
    model, network = bert
    assert network.is_padded and network.takes_shorter
    want = with_backend(network, "reference")(**TEXTS)
    network.save(tmp_path / "network")
    loaded = with_backend(qflash.load_model(tmp_path / "network"), "cpu")
    ids, mask = TEXTS["input_ids"], TEXTS["attention_mask"]
    for number, length in enumerate(mask.sum(dim=1).tolist()):
        alone = loaded(ids[number : number + 1, :length])
        assert torch.equal(alone[0], want[number, :length])
    # what stands at places without a token does not matter, nor how the mask is given
    other = torch.where(mask == 1, ids, 7)
    for given in (
        loaded(TEXTS), loaded(other, attention_mask=mask.bool()), loaded(with_padding(ids, mask).int()),
        loaded(input_ids=other, attention_mask=mask.int(), token_type_ids=torch.zeros_like(ids)),
    ):  # fmt: skip
        assert torch.equal(given[mask == 1], want[mask == 1])
    with torch.inference_mode():
        hidden = model(**TEXTS).last_hidden_state
    assert sqnr_db(hidden[mask == 1], network.dequantize(want)[mask == 1]) > 26


def test_keys_are_hidden_wherever_they_are(bert: Made) -> None:
    """On the left, in the middle, or all."""
    network = bert[1]
    ids = TEXTS["input_ids"].clone()
    ids[0, :4] = ids[1, 3:6] = ids[2, ::2] = -1
    ids[3] = -1
    want = with_backend(network, "reference")(ids)
    assert torch.equal(with_backend(network, "cpu")(ids), want)
    with torch.inference_mode():
        hidden = bert[0](ids.clamp(min=0), attention_mask=(ids >= 0).long()).last_hidden_state
    some = ids >= 0
    assert sqnr_db(hidden[some], network.dequantize(want)[some]) > 24


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "clip"])
def test_kernels_have_the_same_bits(name: str, request: pytest.FixtureRequest) -> None:
    """In Triton's interpreter, or on a GPU."""
    network = request.getfixturevalue(name)[1]
    texts = {key: x[:2] for key, x in TEXTS.items()}
    want = with_backend(network, "reference").run(network.prepared(texts))
    moved = with_backend(network, "triton").to(DEVICE)
    found = moved.run(moved.prepared({key: x.to(DEVICE) for key, x in texts.items()}))
    assert all(torch.equal(found[key].cpu(), x) for key, x in want.items())


def test_rotated_streams_are_compared_where_there_are_tokens() -> None:
    """OPT gives all padding one position, which the network does not know."""
    config = transformers.OPTConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, ffn_dim=64, word_embed_proj_dim=32,
        max_position_embeddings=20, use_cache=False,
    )  # fmt: skip
    with pytest.raises(UnsupportedError, match="images are not treated alike"):
        qflash.quantize_model(draw_weights(transformers.OPTModel(config)), [CALIBRATION], progress=False)


@pytest.mark.filterwarnings("ignore:the integer network")
@pytest.mark.parametrize("kind", few(["Qwen3Model", "Gemma3TextModel"], 1))
def test_ranges_of_normalised_heads_do_not_see_padding(kind: str) -> None:
    made = []
    for factor in (1, 30):
        config_class = getattr(transformers, kind).config_class
        config = config_class(**SIZES, head_dim=16, num_key_value_heads=1, use_cache=False)
        model = draw_weights(getattr(transformers, kind)(config))
        with torch.no_grad():
            model.embed_tokens.weight[0] *= factor  # what the model is given at places without a token
        made.append(qflash.quantize_model(model, [CALIBRATION], min_sqnr=None, progress=False))
    parts = [dict(network.part("layers.0.self_attn.q_norm").named_buffers()) for network in made]
    assert parts[0] and all(torch.equal(x, parts[1][name]) for name, x in parts[0].items())
    assert made[0].quality is not None and made[0].quality.sqnr_db > 15


@pytest.mark.slow
def test_ranges_do_not_see_padding() -> None:
    """Positions that no calibration text has may hold any number."""
    texts = draw_texts([3, 8, 5, 7, 4, 6] * 3, seed=5)
    made = []
    for factor in (1, 30):
        model = build_bert()
        with torch.no_grad():
            model.embeddings.position_embeddings.weight[8:] *= factor
        # the unit of the embedding holds all of its table
        made.append(qflash.quantize_model(model, [texts], outputs=["last_hidden_state"], progress=False))
    first, second = made
    assert first.units[1:] == second.units[1:] and first.scales == second.scales and first.units[0] < second.units[0]
    for node in first.nodes:
        part, other = first.part(node.name), second.part(node.name)
        if isinstance(part, Attention) and isinstance(other, Attention):
            assert torch.equal(part.value_scale, other.value_scale) and torch.equal(part.key_scale, other.key_scale)
    assert second.quality is not None and second.quality.sqnr_db > 24


def test_onnxruntime_has_the_same_bits_with_a_mask(bert: Made, clip: Made, tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    for _, network in (bert, clip):
        network.export_onnx(tmp_path / "network.onnx")
        session = runtime.InferenceSession(str(tmp_path / "network.onnx"), providers=["CPUExecutionProvider"])
        assert [x.name for x in session.get_inputs()] == ["input_ids", "attention_mask"]
        found = session.run(None, {name: x.numpy() for name, x in TEXTS.items()})
        for got, want in zip(found, network.run(network.prepared(TEXTS)).values(), strict=True):
            assert torch.equal(torch.from_numpy(got), want)
        assert all(outcome.problem is None for outcome in check_onnx(tmp_path / "network.onnx", ["onnxruntime"]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bert", "clip", "clip, largest id"])
def test_files_without_64_bits_have_the_same_bits(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Padding, causal attention, and the end of a text, whose id may come again behind it."""
    onnx = pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    from onnx.reference import ReferenceEvaluator

    _, network = request.getfixturevalue(kind[:4])
    if kind.endswith("id"):
        network = copy.deepcopy(network)
        for part in network.modules():
            if isinstance(part, SelectToken):
                part.token = None
    texts = {name: x.clone() for name, x in TEXTS.items()}
    texts["input_ids"][0, 6] = END
    wanted = [x.numpy() for x in network.run(network.prepared(texts)).values()]
    given = {name: x.numpy() for name, x in texts.items()}
    network.export_onnx(tmp_path / "network.onnx", int64=False)
    network.export_onnx(tmp_path / "flat.onnx", int64=False, inline=True, batch=len(texts["input_ids"]))
    session = runtime.InferenceSession(str(tmp_path / "network.onnx"), providers=["CPUExecutionProvider"])
    found = [session.run(None, given), ReferenceEvaluator(str(tmp_path / "network.onnx")).run(None, given)]
    if importlib.util.find_spec("openvino"):
        from openvino import Core

        results = Core().compile_model(tmp_path / "flat.onnx", "CPU")(given)
        found.append([results[i] for i in range(len(wanted))])
    for each in found:
        assert all(np.array_equal(got, want) for got, want in zip(each, wanted, strict=True))
    flat = onnx.load(tmp_path / "flat.onnx")
    assert not {node.op_type for node in flat.graph.node} & {"BitShift", "Clip", "Equal", "GreaterOrEqual", "Where", "And"}


def test_the_text_tower_of_clip(clip: Made, tmp_path: Path) -> None:
    """Causal attention, and the end of the text as its embedding, by its id or as the largest one."""
    model, network = clip
    cores = [part for node in network.nodes if isinstance(part := network.part(node.name), Attention)]
    assert all(part.causal and part.padded and part.bias is None for part in cores)
    (end,) = (part for node in network.nodes if isinstance(part := network.part(node.name), SelectToken))
    assert end.token == END
    want = with_backend(network, "reference")(**TEXTS)
    found = with_backend(network, "cpu")(**TEXTS)
    assert all(torch.equal(found[name], x) for name, x in want.items())
    with torch.inference_mode():
        exact = model(**TEXTS)
    assert sqnr_db(exact.text_embeds, network.dequantize(want)["text_embeds"]) > 24
    report = qflash.compare(network, model, TEXTS, progress=False, contributions=False)
    assert {"SelectToken", "TokenEmbedding"} <= {row.kind for row in report.nodes}
    # without a mask: what stands behind the end is seen by nobody before it
    older = build_clip(2)
    plain = qflash.quantize_model(older, [CALIBRATION["input_ids"]], outputs=["text_embeds"], progress=False)
    assert not plain.is_padded
    (end,) = (part for node in plain.nodes if isinstance(part := plain.part(node.name), SelectToken))
    assert end.token is None
    other = torch.where(TEXTS["attention_mask"] == 1, TEXTS["input_ids"], 4)
    assert torch.equal(plain(other), plain(TEXTS["input_ids"]))
    plain.save(tmp_path / "plain")
    assert torch.equal(qflash.load_model(tmp_path / "plain")(other), plain(other))
    with torch.inference_mode():
        exact = older(input_ids=TEXTS["input_ids"])
    assert sqnr_db(exact.text_embeds, plain.dequantize(plain(other))) > 24


@pytest.mark.slow
def test_a_layer_in_floating_point_sees_the_mask(bert: Made, tmp_path: Path) -> None:
    model, network = bert
    mixed = qflash.quantize_model(
        model, [CALIBRATION], outputs=["last_hidden_state"], progress=False, keep_float=["encoder.layer.0.attention"]
    )
    assert mixed.quality is not None and network.quality is not None and mixed.quality.sqnr_db > network.quality.sqnr_db
    mask = TEXTS["attention_mask"]
    other = torch.where(mask == 1, TEXTS["input_ids"], 7)
    assert torch.equal(mixed(**TEXTS)[mask == 1], mixed(other, attention_mask=mask)[mask == 1])
    pytest.importorskip("onnx")
    with pytest.raises(ValueError, match="attention with masked keys that is kept in floating point has no form in ONNX"):
        mixed.export_onnx(tmp_path / "mixed.onnx")


def test_causal_attention_without_a_mask_sees_nothing_behind() -> None:
    """The exact row sum takes the mean of all keys where there are more than 64."""
    ids = draw_texts([80] * 8, tokens=80)["input_ids"]
    model = draw_weights(transformers.CLIPTextModel(transformers.CLIPTextConfig(**SIZES | {"max_position_embeddings": 80})))
    network = qflash.quantize_model(model, [ids], "default", outputs=["last_hidden_state"], progress=False, min_sqnr=None)
    assert network.recipe.row_sum == "rounded" and not network.is_padded
    changed = ids.clone()
    changed[:, 70:] = 5
    assert torch.equal(network(changed)[:, :70], network(ids)[:, :70])


def test_which_functions_of_outputs_take_a_mask(bert: Made) -> None:
    model = bert[0]
    assert takes_mask(model, None) and takes_mask(model, lambda model, ids, mask: model(ids, attention_mask=mask)[0])
    assert not takes_mask(model, lambda model, ids, layers=(0, 1): model(ids)[0])
    assert not takes_mask(model, lambda model, ids, **options: model(ids)[0])


def test_a_shorter_text_is_compared_with_the_model(bert: Made) -> None:
    model, network = bert
    short = {name: x[:, :7] for name, x in draw_texts([7, 5, 3], seed=3).items()}
    long = draw_texts([7, 5, 3], seed=3)
    found, wanted = (qflash.compare(network, model, each, contributions=False, progress=False) for each in (short, long))
    assert found.sqnr_db == wanted.sqnr_db


@pytest.mark.slow
def test_batches_may_be_shorter_than_the_first(bert: Made) -> None:
    """As tokenisers pad each batch to its longest text."""
    short = {name: x[8:16, :9] for name, x in CALIBRATION.items()}
    first, last = ({name: x[part] for name, x in CALIBRATION.items()} for part in (slice(8), slice(16, 24)))
    keep = (CALIBRATION["attention_mask"] * (torch.arange(TOKENS) < 9)).clone()
    keep[:8], keep[16:] = CALIBRATION["attention_mask"][:8], CALIBRATION["attention_mask"][16:]
    whole = {"input_ids": CALIBRATION["input_ids"], "attention_mask": keep}
    made = [
        qflash.quantize_model(bert[0], batches, outputs=["last_hidden_state"], progress=False)
        for batches in ([first, short, last], [whole])
    ]
    assert torch.equal(made[0](**TEXTS), made[1](**TEXTS))


def test_places_of_tokens() -> None:
    ids = torch.tensor([[3, 9, 5, 9], [1, 2, 8, -1], [4, 4, 4, 4]])
    assert place_of(ids, None).tolist() == [1, 2, 0]
    assert place_of(ids, 9).tolist() == [1, 0, 0]
    assert place_of(ids.int(), 8).tolist() == [0, 2, 0]
    assert with_padding(ids, torch.tensor([[1, 0, 1, 1]])).tolist() == [[3, -1, 5, 9], [1, -1, 8, -1], [4, -1, 4, 4]]
    h = torch.arange(24, dtype=torch.int16).view(3, 4, 2)
    assert SelectToken(None)(h, ids).tolist() == [[2, 3], [12, 13], [16, 17]]
    assert SelectToken(9)(h, ids.int()).tolist() == [[2, 3], [8, 9], [16, 17]]
    padded = TokenEmbedding(5, 2, 4, padded=True)
    padded.table.copy_(torch.arange(10).view(5, 2))
    padded.position.copy_(torch.arange(0, 80, 10).view(4, 2))  # type: ignore[union-attr]
    assert padded(torch.tensor([[2, -1, 4]])).tolist() == [[[4, 15], [20, 31], [48, 59]]]


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"attention_mask": torch.ones(4, 3)}, ValueError, r"attention_mask must be a tensor of the shape of input_ids"),
        ({"attention_mask": [1, 1]}, ValueError, "attention_mask must be a tensor of the shape"),
        ({"token_type_ids": torch.ones(4, TOKENS)}, ValueError, "token_type_ids must be 0 everywhere"),
        ({"input_ids": torch.ones(4, TOKENS)}, TypeError, "input_ids must be an int32 or int64 tensor"),
        ({"input_ids": None}, TypeError, "input_ids must be an int32 or int64 tensor"),
    ],
)
def test_texts_that_do_not_fit(bert: Made, change: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        bert[1](**(TEXTS | change))


def test_what_is_refused(bert: Made, clip: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, network = bert
    with pytest.raises(ValueError, match=rf"ids must have shape \(batch, {TOKENS}\) or fewer tokens"):
        network(torch.ones(2, TOKENS + 1, dtype=torch.int64))
    empty = {"input_ids": TEXTS["input_ids"], "attention_mask": torch.zeros(4, TOKENS)}
    with pytest.raises(ValueError, match="attention_mask must have a token in every text of calibration"):
        qflash.quantize_model(model, [empty], outputs=["last_hidden_state"], progress=False)
    plain = qflash.quantize_model(model, [CALIBRATION["input_ids"]], outputs=["last_hidden_state"], progress=False)
    with pytest.raises(ValueError, match="attention_mask must be 1 everywhere"):
        plain(**TEXTS)
    with monkeypatch.context() as patched:
        patched.setattr(torch.compiler, "is_compiling", lambda: True)
        with pytest.raises(ValueError, match=r"attention_mask must be left out under torch\.compile"):
            plain(**TEXTS)
    with pytest.raises(TypeError, match="input_ids must be given once"):
        network(TEXTS["input_ids"], **TEXTS)
    with pytest.raises(ValueError, match="ids of tokens has no C kernel"):
        network.graph(2)
    pytest.importorskip("tosa_serializer")
    for each in (network, clip[1]):
        with pytest.raises(ValueError, match="has no form in TOSA"):
            each.export_tosa(tmp_path / "network.tosa")


def test_a_mask_or_a_bound_may_be_a_buffer_and_nothing_else_infinite() -> None:
    """As in open_clip's text tower, and where a model clamps at infinity."""
    mask = torch.full((2, 2), -math.inf).triu(1)
    for name, other in (
        ("mask", mask),
        ("bound", torch.tensor(math.inf)),
        ("nan", mask * math.nan),
        ("above", -mask),
        ("weight", None),
    ):
        model = torch.nn.Linear(2, 2).eval()
        if other is None:
            model.weight.data[0] = -math.inf
        else:
            model.register_buffer(name, other)
        if name in ("mask", "bound"):
            _check_weights(model)
            continue
        with pytest.raises(ValueError, match=f"model must have finite weights, NaN or infinity is in {name}"):
            _check_weights(model)


@pytest.mark.parametrize("sizes", [{"tokens": 4}, {"queries": 2}, {"causal": True, "bias": [1, 2, 4, 4]}])
def test_masks_are_for_whole_texts(sizes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="padded and causal are for attention of whole texts"):
        Attention(2, 8, 0.3, qflash.Recipe().key, **({"padded": True} | sizes))


def _with_rotary_positions() -> Any:
    config = {**SIZES, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
    return transformers.ModernBertModel(transformers.ModernBertConfig(**config))


def _with_narrow_embeddings() -> Any:
    return transformers.ElectraModel(transformers.ElectraConfig(**SIZES, embedding_size=16))


def _with_root_mean_squares() -> Any:
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "vocab_size": VOCABULARY}
    return transformers.T5EncoderModel(transformers.T5Config(**sizes))


@pytest.mark.parametrize(
    "build", few([_with_rotary_positions, _with_narrow_embeddings, _with_root_mean_squares], 1), ids=lambda x: x.__name__
)
def test_ranges_are_found_behind_rotations(build: Any) -> None:
    """Of positions, and of the residual stream."""
    model = draw_weights(build())
    network = qflash.quantize_model(model, [CALIBRATION], progress=False)
    assert network.is_padded
    mask = TEXTS["attention_mask"] == 1
    with torch.inference_mode():
        hidden = model(**TEXTS).last_hidden_state
    assert sqnr_db(hidden[mask], network.dequantize(network(**TEXTS))[mask]) > 20


FILLER = 1


def _counting(name: str, filler: int = FILLER) -> Any:
    """Return a model that counts places by ids other than one."""
    config = getattr(transformers, f"{name}Config")(**SIZES, pad_token_id=filler, bos_token_id=3, eos_token_id=2)
    return draw_weights(getattr(transformers, f"{name}Model")(config))


@pytest.mark.parametrize("name", few(["XLMRoberta", "MPNet"], 1))
def test_places_that_are_counted_by_ids(name: str, tmp_path: Path) -> None:
    model = _counting(name)
    network = qflash.quantize_model(model, [CALIBRATION], outputs=["last_hidden_state"], progress=False)
    network.save(tmp_path / "network")
    network = qflash.load_model(tmp_path / "network")
    ids, mask = TEXTS["input_ids"], TEXTS["attention_mask"]
    filled = torch.where(mask == 1, ids, FILLER)
    with torch.inference_mode():
        hidden = model(filled, attention_mask=mask).last_hidden_state
    assert sqnr_db(hidden[mask == 1], network.dequantize(network(filled, attention_mask=mask))[mask == 1]) > 24
    for wrong in (
        {"input_ids": filled},  # without the mask
        {"input_ids": filled.flip(1), "attention_mask": mask.flip(1)},  # padded on the left
        {"input_ids": torch.where(ids == ids[0, 1], FILLER, ids), "attention_mask": torch.ones_like(mask)},
    ):
        with pytest.raises(ValueError, match=r"no token with the id 1, which .* pad on the right"):
            network(**wrong)
    plain = qflash.quantize_model(model, [CALIBRATION["input_ids"]], outputs=["last_hidden_state"], progress=False)
    assert not plain.is_padded
    with pytest.raises(ValueError, match=r"no token with the id 1"):
        plain(filled)


def test_what_is_at_places_without_a_token_is_not_compared() -> None:
    """With 0 as padding they have other places in the model than in the network."""
    model = _counting("Roberta", 0)
    network = qflash.quantize_model(model, [CALIBRATION], outputs=["last_hidden_state"], progress=False)
    assert network.quality.sqnr_db > 24


def test_calibration_texts_padded_on_the_left_are_refused() -> None:
    texts = {key: x.flip(1) for key, x in CALIBRATION.items()}
    with pytest.raises(ValueError, match="pad on the right"):
        qflash.quantize_model(_counting("XLMRoberta"), [texts], outputs=["last_hidden_state"], progress=False)


class _Pooled(torch.nn.Module):
    """Means over tokens, which the model finds by their ids."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = _counting("XLMRoberta")

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        hidden = self.encoder(input_ids, attention_mask=attention_mask).last_hidden_state
        weight = input_ids.ne(FILLER)[..., None].to(hidden.dtype)
        return (hidden * weight).sum(1) / weight.sum(1)


def test_pooling_by_ids_is_refused() -> None:
    """Ids say which are tokens only where places are counted: padding would be averaged, too."""
    ids = torch.where(CALIBRATION["attention_mask"] == 1, CALIBRATION["input_ids"], FILLER)
    for texts in (CALIBRATION | {"input_ids": ids}, CALIBRATION["input_ids"]):
        with pytest.raises(UnsupportedError, match="of which ids are tokens"):
            qflash.quantize_model(_Pooled().eval(), [texts], progress=False)


class _OfAll(torch.nn.Module):
    """What a function makes of all places."""

    def __init__(self, pool: Any) -> None:
        super().__init__()
        self.encoder, self.pool = build_bert(), pool

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.pool(self.encoder(input_ids, attention_mask=attention_mask).last_hidden_state)  # type: ignore[no-any-return]


POOLS: dict[str, Any] = {"a mean": lambda x: x.mean(1), "some": lambda x: x[:, 1:].mean(1), "the last": lambda x: x[:, -1]}


@pytest.mark.parametrize("name", POOLS)
def test_outputs_of_places_without_a_token_are_refused(name: str) -> None:
    """What a model gives for padding depends on its id, which the network has not."""
    full = CALIBRATION | {"attention_mask": torch.ones_like(CALIBRATION["attention_mask"])}
    for texts in (CALIBRATION, full):
        with pytest.raises(ValueError, match="output 'output' of places without a token, too"):
            qflash.quantize_model(_OfAll(POOLS[name]).eval(), [texts], progress=False)
