"""The comparison of whole networks on photos: what it reads, how it keeps rows, and what onnxruntime quantises."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers import load_benchmark
from qflash_lab.bench import onnx_models
from qflash_lab.evaluation.real_data import DataUnavailableError


@pytest.fixture(scope="module")
def peers() -> Any:
    return load_benchmark("peers_real")


@pytest.fixture(scope="module")
def judged() -> Any:
    return load_benchmark("judged_photos")


def test_photos_lie_in_wheels_or_unpacked(judged: Any, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "one.whl", "w") as archive:
        archive.writestr("skimage/data/astronaut.png", b"in a wheel")
    (tmp_path / "imgaug").mkdir()
    (tmp_path / "imgaug" / "quokka.jpg").write_bytes(b"unpacked")
    assert judged.find_photo("skimage/data/astronaut.png", tmp_path) == b"in a wheel"
    assert judged.find_photo("imgaug/quokka.jpg", tmp_path) == b"unpacked"
    with pytest.raises(DataUnavailableError, match=r"skimage/data/coins\.png is in no wheel of"):
        judged.find_photo("skimage/data/coins.png", tmp_path)


def test_other_photos_are_refused(judged: Any, tmp_path: Path) -> None:
    for name in judged.JUDGED:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"another")
    with pytest.raises(DataUnavailableError, match="the photos' files have SHA-256"):
        judged.load(tmp_path)


def test_draws_are_halves_and_differ(peers: Any) -> None:
    photos = torch.arange(20, dtype=torch.uint8)
    assert list(peers.calibrations(photos, 0)) == ["20 photos"]
    draws = peers.calibrations(photos, 2)
    assert [len(set(draw.tolist())) for draw in draws.values()] == [10, 10]
    first, second = (set(draw.tolist()) for draw in draws.values())
    assert first != second
    assert peers.patterns().shape == (4, 3, peers.SIDE, peers.SIDE)


def test_a_method_is_judged_on_each_photo(peers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A method that is a tenth too large has 20 dB everywhere; its rows replace those of the same photos alone."""

    class Tokens(nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return images.flatten(2).mT[:, :5]

    def make(model: nn.Module, calibration: torch.Tensor, mean: Any, std: Any) -> Any:
        assert len(calibration) in (10, 20)
        return lambda images: 1.1 * model(peers.integer_networks.as_float(images, mean, std))

    name = "torchao int8 static (linear layers)"
    monkeypatch.setitem(peers.integer_networks.METHODS, name, make)
    monkeypatch.setattr(peers, "RESULTS", tmp_path / "peers.json")
    photos = torch.randint(0, 256, (20, 3, peers.SIDE, peers.SIDE), dtype=torch.uint8)
    (row,) = peers.measure(Tokens(), name, photos, photos[:3], 0)
    assert row["class_each_db"] == row["patch_each_db"] == pytest.approx([20.0] * 3, abs=0.01)
    assert (row["calibration"], row["integer_only"], row["scales"], row["images"]) == ("20 photos", False, "static", 3)
    peers.write([row])
    peers.write(peers.measure(Tokens(), name, photos, photos[:3], 2))
    peers.write([row | {"class_db": 1.0}])
    rows = json.loads((tmp_path / "peers.json").read_text())["rows"]
    assert [each["calibration"] for each in rows] == ["20 photos", "10 photos, draw 0", "10 photos, draw 1"]
    assert rows[0]["class_db"] == 1.0
    assert all("instructions" in each and each["versions"]["torch"] for each in rows)


@pytest.mark.parametrize("options", [{}, {"linear_only": True}, {"linear_only": True, "wide": True}, {"reduce_range": True}])
def test_what_onnxruntime_quantises(options: dict[str, bool], tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")

    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8, bias=False)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            x = self.layer(images.flatten(2))
            return x @ x.transpose(1, 2)

    images = torch.randn(3, 2, 4, 8)
    path = onnx_models.export_float(Small().eval(), images[:1, :, :1], tmp_path / "float.onnx")
    made = onnx_models.quantise_static(path, images[:, :, :1], tmp_path / "int8.onnx", unsigned=False, **options)
    graph = onnx.load(made).graph
    by_output = {output: node for node in graph.node for output in node.output}
    products = [node for node in graph.node if node.op_type == "MatMul"]
    quantised = [all(by_output[name].op_type == "DequantizeLinear" for name in node.input) for node in products]
    assert quantised == [True, not options.get("linear_only", False)]
    types = {item.name: item.data_type for item in graph.initializer}
    zeros = {types[node.input[2]] for node in graph.node if node.op_type == "QuantizeLinear"}
    assert zeros == ({onnx.TensorProto.UINT16} if options.get("wide") else {onnx.TensorProto.INT8})
    weights = [onnx.numpy_helper.to_array(item) for item in graph.initializer if item.dims == [8, 8]]
    assert max(int(abs(each.astype(int)).max()) for each in weights) == (64 if options.get("reduce_range") else 127)
