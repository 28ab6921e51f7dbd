"""One network for images of several sizes: its bits at each, files, copies, exports, and what is refused."""

from __future__ import annotations

import copy
import json
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from test_replicas import broadcast
from torch.nn.parallel import comm, replicate
from torch.utils._python_dispatch import TorchDispatchMode

import qflash
from qflash.network import storage
from qflash.network.calibration import Calibration
from qflash.network.graph import IntegerNetwork
from qflash.network.onnx_check import check_onnx
from qflash.network.resampling import model_at
from qflash.network.rotation import Rotation
from small_networks import build, decibels, draw_images, in_ours, normalise, rewrite, timm

FIRST, TALL, WIDE = (32, 32), (48, 32), (32, 64)
EMBED = "patch_embed.proj"


def draw(size: tuple[int, int], count: int = 3, seed: int = 5) -> torch.Tensor:
    return draw_images(count, 3, max(size), seed)[:, :, : size[0], : size[1]].contiguous()


def quantise(model: Any, sizes: Any = (32, TALL, WIDE), **options: Any) -> IntegerNetwork:
    return qflash.quantize_model(model, [draw(FIRST, 16, 1)], sizes=sizes, progress=False, **options)


@pytest.fixture(scope="module")
def made() -> tuple[Any, IntegerNetwork, list[Any]]:
    """Return a float model, its network of three sizes, and the ranges that its calibration found."""
    ranges: list[Any] = []
    whole = Calibration.ranges

    def kept(self: Calibration, *arguments: Any) -> Any:
        found = whole(self, *arguments)
        ranges.extend(found.values())
        return found

    model = build("vit", num_classes=10, reg_tokens=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Calibration, "ranges", kept)
        return model, quantise(model, outputs=["logits", "tokens"]), ranges


def equal(a: Any, b: Any) -> bool:
    return a.keys() == b.keys() and all(torch.equal(x, b[name]) for name, x in a.items())


@pytest.mark.parametrize("size", [TALL, WIDE])
def test_a_size_has_the_bits_of_a_network_made_for_it(
    made: Any, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, network, ranges = made
    other = copy.deepcopy(model)
    other.set_input_size(size)

    # the same scales: what calibration of the three sizes has found
    monkeypatch.setattr(Calibration, "ranges", lambda self, *_: dict(zip(self.observers, ranges, strict=True)))
    alone = qflash.quantize_model(other, [draw(size, 16, 1)], outputs=["logits", "tokens"], progress=False)
    taken = network.at(size)
    assert alone.image == taken.image == (3, *size) and alone.scales == network.scales and not alone.others
    assert equal(storage.network_tensors(alone), storage.network_tensors(taken))
    images = draw(size)
    found = network(images)
    assert equal(found, alone(images)) and equal(found, taken(images))
    with torch.no_grad():
        wanted = other(normalise(model, images))
    assert decibels(wanted, network.dequantize(found)["logits"]) > 35
    assert network.at(size).quality.sqnr_db > 35 and network.at(size).quality.images == 8


def test_positions_are_resampled_from_the_float_ones(made: Any) -> None:
    model, network, _ = made
    rotation = Rotation.of(48)
    assert rotation is not None
    for size in (TALL, WIDE):
        grid = [pixels // 8 for pixels in size]
        floats = timm.layers.resample_abs_pos_embed(model.pos_embed, grid, [4, 4], num_prefix_tokens=2).detach()
        position = network.at(size).part(EMBED).position
        assert torch.equal(position, (rotation(floats[:, 2:].double()) / network.units[0]).round().to(torch.int16))
    first, other = network.part(EMBED), network.others["48x32"]
    assert other.names == {EMBED} and other.part(EMBED).weight is first.weight
    assert [*other.part(EMBED).tensors()] == ["position_words"]


def test_images_of_other_sizes_are_refused(made: Any) -> None:
    network = made[1]
    assert network.image_sizes == (FIRST, TALL, WIDE)
    with pytest.raises(ValueError, match=r"sizes, 32 x 32, 48 x 32, 32 x 64 \(height x width\), got 32 x 48"):
        network(draw((32, 48)))
    with pytest.raises(ValueError, match="32 x 32, 48 x 32, 32 x 64"):
        network.at((32, 48))
    with pytest.raises(ValueError, match="size must be a number of pixels or"):
        network.at("tall")
    with pytest.raises(TypeError, match="must be uint8"):
        network(draw(TALL).float())
    with pytest.raises(ValueError, match=r"shape \(batch, 3, 48, 32\)"):
        network(draw(TALL)[:, :1])
    with pytest.raises(ValueError, match="sizes, 32 x 32, 48 x 32"):
        network([draw(TALL)[0], draw((32, 48))[0]])
    with pytest.raises(TypeError, match=r"images\[1\] is shape \(1, 3, 48, 32\)"):
        network([draw(TALL)[0], draw(TALL, 1)])
    with pytest.raises(TypeError, match=r"images\[0\] is str"):
        network(["a"])
    with pytest.raises(ValueError, match="empty list"):
        network([])
    with pytest.raises(TypeError, match="got a dictionary of 'pixel_values'"):
        network({"pixel_values": draw(TALL)})
    assert "48 x 32: " in repr(network) and "32 x 64: " in repr(network)


class Counted(TorchDispatchMode):
    """Counts calls of this package's operators, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "qflash":
            self.calls[func._opname] += 1
        return func(*args, **(kwargs or {}))


def check_mixed(network: IntegerNetwork, sizes: Sequence[tuple[int, int]]) -> Any:
    """Return a list's outputs, which have to be those of each image alone."""
    images = [draw(size, 1, seed)[0] for seed, size in enumerate(sizes)]
    found = network.run(images[0][None]).keys()
    mixed = network(images)
    for number, image in enumerate(images):
        alone = network.run(image[None])
        assert all(torch.equal((mixed[x] if len(found) > 1 else mixed)[number], alone[x][0]) for x in found)
    return mixed


@pytest.mark.parametrize("backend", ["reference", "cpu", pytest.param("triton", marks=pytest.mark.slow)])
def test_a_batch_of_mixed_sizes_has_the_bits_of_each_alone(made: Any, backend: str) -> None:
    network = copy.copy(made[1])
    network.backend = backend
    found = check_mixed(network, (WIDE, FIRST, TALL, FIRST, WIDE))
    assert found["logits"].shape == (5, 10) and [len(x) for x in found["tokens"]] == [34, 18, 26, 18, 34]
    floats = network.dequantize(found)
    assert floats["tokens"][1].dtype == torch.float32 and torch.equal(
        floats["logits"], found["logits"] * network.scales["logits"]
    )


def test_layers_take_the_tokens_of_all_sizes_at_once(made: Any) -> None:
    network, sizes = made[1], (WIDE, FIRST, TALL)
    images = [draw(size, 1)[0] for size in sizes]
    with Counted() as alone:
        network(images[:1])
    with Counted() as mixed:
        want = network(images)
    # a head takes one token of an image
    apart = {name: count for name, count in mixed.calls.items() if count != alone.calls[name]}
    assert apart == {name: 3 * alone.calls[name] for name in ("patch_embedding", "int8_attention")} | {
        "integer_layer_norm": alone.calls["integer_layer_norm"] + 2
    }
    seen = []
    part = network.part("blocks.0.mlp.fc1")
    hook = part.register_forward_hook(lambda module, given, out: seen.append(given[0].shape[:2]))
    again = network(images)
    hook.remove()
    assert seen == [(1, 34), (1, 18), (1, 26)]
    assert torch.equal(again["logits"], want["logits"])


def test_a_file_holds_all_sizes_and_the_weights_once(made: Any, tmp_path: Path) -> None:
    _, network, _ = made
    network.save(tmp_path / "network")
    loaded = qflash.load_model(tmp_path / "network")
    assert loaded.image_sizes == network.image_sizes
    assert [loaded.at(size).quality for size in loaded.image_sizes] == [network.at(size).quality for size in loaded.image_sizes]
    for size in network.image_sizes:
        assert equal(loaded(draw(size)), network(draw(size)))
    of_sizes = {name: x.numel() for name, x in storage.network_tensors(network).items() if "@" in name}
    assert of_sizes == {f"{EMBED}.position_words@48x32": 6 * 4 * 24, f"{EMBED}.position_words@32x64": 4 * 8 * 24}
    network.at(TALL).save(tmp_path / "alone")
    alone = qflash.load_model(tmp_path / "alone")
    assert alone.image == (3, *TALL) and equal(alone(draw(TALL)), network(draw(TALL)))


def _entry(change: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, Any]], object]:
    return lambda header: change(header["sizes"][0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda header: header.update(sizes={}), "sizes must be a list"),
        (lambda header: header.pop("sizes"), r"position_words@.* are missing or not known"),
        (lambda header: header["sizes"].append(header["sizes"][0]), "comes twice"),
        (_entry(lambda entry: entry.update(image=[3, 32, 32])), "comes twice"),
        (_entry(lambda entry: entry.update(image=[1, 48, 32])), "must have the network's channels"),
        (_entry(lambda entry: entry.update(image=[3, 48, 0])), "image must be"),
        (_entry(lambda entry: entry.update(image=[3, 40, 32])), "@40x32"),
        (_entry(lambda entry: entry.update(nodes={"other": 1})), "nodes of a size must fit"),
        (_entry(lambda entry: entry.update(extra=1)), "a size must fit"),
        (_entry(lambda entry: entry["nodes"][EMBED]["sizes"].update(positions=16)), "must be torch.int32"),
        (_entry(lambda entry: entry["nodes"][EMBED]["sizes"].update(outputs=1)), "be of that size alone"),
        (_entry(lambda entry: entry["nodes"][EMBED].update(tensors=["colour"])), "must be of"),
        (_entry(lambda entry: entry["nodes"][EMBED].update(tensors=[])), "be of that size alone"),
        (_entry(lambda entry: entry["nodes"][EMBED]["constants"].update(left="1")), "must be an integer"),
        (_entry(lambda entry: entry["nodes"][EMBED]["constants"].update(left=40)), "at 48 x 32 pixels: .*left must be"),
        (_entry(lambda entry: entry.update(quality=1)), "quality must have"),
    ],
)
def test_a_wrong_header_is_refused(made: Any, tmp_path: Path, change: Any, message: str) -> None:
    made[1].save(tmp_path / "network")
    (tmp_path / "network").write_bytes(rewrite((tmp_path / "network").read_bytes(), in_ours(change)))
    with pytest.raises(ValueError, match=message):
        qflash.load_model(tmp_path / "network", verify=False)


def test_copies_share_weights_between_sizes(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, network, _ = made
    images = draw(TALL)
    want = network(images)
    twin = copy.deepcopy(network)
    for parameter in (twin.part(EMBED).weight, twin.part(EMBED).bias):
        parameter.zero_()
    assert not equal(twin(images), want), "the other size has weights of its own"
    state = network.state_dict()
    assert sum("others." in name for name in state) == 2
    for assign in (False, True):
        broken = copy.deepcopy(twin)
        broken.load_state_dict(state, assign=assign)
        assert equal(broken(images), want) and broken.others["48x32"].part(EMBED).weight is broken.part(EMBED).weight
    with pytest.raises(RuntimeError, match="position_words@32x64"):
        network.at(FIRST).load_state_dict({name: x for name, x in state.items() if "others." not in name})
    moved = copy.deepcopy(network)._apply(torch.clone)
    assert moved.others["48x32"].part(EMBED).weight is moved.part(EMBED).weight and equal(moved(images), want)
    monkeypatch.setattr(comm, "broadcast_coalesced", broadcast)
    with torch.no_grad():
        assert all(equal(replica(images), want) for replica in replicate(network, [0, 1], detach=True))


def test_graphs_and_programs_are_of_one_size(made: Any, tmp_path: Path) -> None:
    network = made[1]
    images = draw(TALL, 2)
    run = network.graph(2, TALL)
    assert equal(run(images), network(images))
    with pytest.raises(ValueError, match=r"shape \(batch, 3, 48, 32\)"):
        run(draw(FIRST, 2))
    assert equal(network.graph(2)(draw(FIRST, 2)), network(draw(FIRST, 2)))
    with pytest.raises(ValueError, match="48 x 32"):
        network.graph(2, (48, 48))
    network.export_c(tmp_path / "tall", batch=2, size=TALL)
    network.at(TALL).export_c(tmp_path / "alone", batch=2)
    content = (tmp_path / "tall" / "network.bin").read_bytes()
    assert content == (tmp_path / "alone" / "network.bin").read_bytes()
    # plan's and constants' sizes, then those of the images
    assert struct.unpack("<4q", content[8 * 7 : 8 * 11]) == (2, 3, *TALL)


def test_tosa_of_a_size(made: Any, tmp_path: Path) -> None:
    pytest.importorskip("tosa_serializer")
    network = made[1]
    network.export_tosa(tmp_path / "tall", size=TALL)
    network.at(TALL).export_tosa(tmp_path / "alone")
    network.export_tosa(tmp_path / "first")
    content = [(tmp_path / name).read_bytes() for name in ("tall", "alone", "first")]
    assert content[0] == content[1] != content[2]


def test_onnx_of_a_size(made: Any, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    network = made[1]
    network.export_onnx(tmp_path / "tall.onnx", size=TALL)
    outcomes = check_onnx(tmp_path / "tall.onnx", ["onnxruntime"])
    assert outcomes and not any(outcome.problem for outcome in outcomes)
    import onnx
    import onnxruntime

    model = onnx.load(tmp_path / "tall.onnx")
    assert [x.dim_value for x in model.graph.input[0].type.tensor_type.shape.dim[1:]] == [3, *TALL]
    images = draw(TALL)
    session = onnxruntime.InferenceSession(tmp_path / "tall.onnx", providers=["CPUExecutionProvider"])
    found = dict(zip(network.outputs, session.run(None, {"images": images.numpy()}), strict=True))
    assert equal({name: torch.from_numpy(x) for name, x in found.items()}, network(images))


def _transformers_vit() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=32, patch_size=8,
        num_labels=6, initializer_range=0.3,
    )  # fmt: skip
    model = transformers.ViTForImageClassification(config).eval()
    model.pretrained_cfg = {"mean": (0.5,) * 3, "std": (0.5,) * 3}
    return model


MODELS: dict[str, Callable[[], Any]] = {
    "any size": lambda: build("vit", num_classes=4, dynamic_img_size=True, depth=1),
    "rotary": lambda: build("eva", num_classes=4, depth=1),
    "gated": lambda: build("eva", num_classes=4, depth=1, swiglu_mlp=True, qk_norm=True, scale_mlp=True),
    "mean": lambda: build("vit", num_classes=4, global_pool="avg", class_token=False, depth=1),
    "transformers": _transformers_vit,
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_other_models(kind: str, tmp_path: Path) -> None:
    model = MODELS[kind]()
    before = copy.deepcopy(model.state_dict())
    network = quantise(model, [FIRST, TALL])
    assert equal(before, model.state_dict())
    images = draw(TALL)
    found = network(images)
    with torch.no_grad():
        wanted = model_at(model, TALL)(normalise(model, images))
    assert decibels(getattr(wanted, "logits", wanted), network.dequantize(found)) > 15
    network.save(tmp_path / "network")
    loaded = qflash.load_model(tmp_path / "network")
    loaded.backend = "reference"
    assert torch.equal(loaded(images), found)
    check_mixed(network, (TALL, FIRST, TALL))


@pytest.mark.slow
def test_a_part_in_floating_point(tmp_path: Path) -> None:
    network = quantise(build("vit", num_classes=4, depth=1), [FIRST, TALL], keep_float=[EMBED])
    assert network.float_parts() == [EMBED] and network.at(TALL).float_parts() == [EMBED]
    network.save(tmp_path / "network")
    assert torch.equal(qflash.load_model(tmp_path / "network")(draw(TALL)), network(draw(TALL)))
    check_mixed(network, (TALL, FIRST))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([], "sizes must be a list"),
        (224, "sizes must be a list"),
        (22.4, "sizes must be a list"),
        ([32, FIRST], "each once"),
        ([32, (1, 2, 3)], "size must be a number"),
        ([32.0], "size must be a number"),
        ([32, None], "each once"),
        ([TALL, FIRST], "first of sizes, 48 x 32, are 32 x 32"),
    ],
)
def test_what_are_no_sizes_is_refused(made: Any, sizes: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quantise(made[0], sizes)


@pytest.mark.slow
def test_models_that_cannot_run_at_a_size_are_refused() -> None:
    with pytest.raises(ValueError, match=r"model SwinTransformer has no integer form at 48 x 32 pixels: .*height"):
        quantise(build("swin", num_classes=4), [FIRST, TALL])
    with pytest.raises(ValueError, match="at 44 x 32 pixels"):
        quantise(build("vit", num_classes=4, depth=1), [FIRST, (44, 32)])
    transformers = pytest.importorskip("transformers")
    config = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 9}
    text = transformers.BertModel(transformers.BertConfig(**config)).eval()
    with pytest.raises(ValueError, match="sizes must be None"):
        qflash.quantize_model(text, [torch.ones(3, 4, dtype=torch.int64)], sizes=[32], progress=False)


@pytest.mark.slow
def test_the_first_size_alone_is_a_network_of_one_size() -> None:
    vit = build("vit", num_classes=4, depth=1)
    network, plain = quantise(vit, [32]), quantise(vit, None)
    assert not network.others and network.image_sizes == (FIRST,)
    assert json.dumps(storage.network_header(network)) == json.dumps(storage.network_header(plain))
    assert equal(storage.network_tensors(network), storage.network_tensors(plain))
