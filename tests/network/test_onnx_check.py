"""``qflash check-onnx``: the self-test of an ONNX file, in the runtimes that are installed."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from helpers import slow
from qflash.cli import app
from qflash.network import onnx_check
from qflash.network.onnx_check import check_onnx, self_test_images

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

runner = CliRunner()
Made = Callable[[str], tuple[Any, Any]]


@pytest.fixture
def path(made: Made, tmp_path: Path) -> Path:
    path = tmp_path / "network.onnx"
    made("class token")[1].export_onnx(path)
    return path


def change(path: Path, how: Callable[[Any], object]) -> None:
    model = onnx.load(path)
    how(model)
    onnx.save(model, path)


def texts(model: Any) -> dict[str, Any]:
    return {entry.key: entry for entry in model.metadata_props}


def formula(count: int, channels: int, height: int, width: int) -> list[int]:
    """The pixels as docs/onnx.md says, with Python's integers."""

    def mix(n: int) -> int:
        n = n * 2654435761 % 2**32
        return (n // 2**15 ^ n) * 73244475 % 2**32 // 2**24

    return [
        (3 * mix(64 * (i * channels + c) + 8 * (8 * y // height) + 8 * x // width)
         + mix(((i * channels + c) * height + y) * width + x)) // 4
        for i in range(count) for c in range(channels) for y in range(height) for x in range(width)
    ]  # fmt: skip


@pytest.mark.parametrize("size", [(2, 3, 32, 32), (2, 1, 27, 9), (1, 3, 4, 6)])
def test_images_follow_the_formula(size: tuple[int, int, int, int]) -> None:
    images = self_test_images(*size)
    assert images.shape == size and images.dtype == torch.uint8
    assert images.flatten().tolist() == formula(*size)


def test_images_differ_in_what_a_network_sees() -> None:
    images = self_test_images(2, 3, 224, 224)
    means = images.double().unfold(2, 28, 28).unfold(3, 28, 28).mean(dim=(-1, -2))
    assert means.std() > 40 and images.min() < 10 and images.max() > 245 and not torch.equal(images[0], images[1])


@pytest.mark.parametrize("kind", ["class token", "swin", slow("mean features"), slow("grey")])
@pytest.mark.parametrize("batch", ["dynamic", 1, 3])
def test_a_good_file_is_equal_everywhere(made: Made, tmp_path: Path, kind: str, batch: Any) -> None:
    path = tmp_path / "network.onnx"
    made(kind)[1].export_onnx(path, batch=batch)
    done = runner.invoke(app, ["check-onnx", str(path), "--runtime", "onnxruntime", "--runtime", "reference"])
    lines = done.output.splitlines()
    assert done.exit_code == 0, done.output
    assert len(lines) == 1 + len(onnxruntime.GraphOptimizationLevel.__members__)
    assert all(line.endswith(": equal") for line in lines)
    assert f"onnxruntime {onnxruntime.__version__}, CPUExecutionProvider, ORT_DISABLE_ALL: equal" in lines


def test_the_self_test_has_the_network_s_logits(made: Made, path: Path) -> None:
    network = made("class token")[1]
    want = network(self_test_images(2, 3, 32, 32))
    assert json.loads(texts(onnx.load(path))["self_test"].value) == {"logits": want.tolist()}


def test_a_changed_weight_is_found(path: Path) -> None:
    def negate(model: Any) -> None:
        tensor = next(x for x in model.graph.initializer if x.name.startswith("blocks.0.mlp.fc2/weight"))
        tensor.raw_data = bytes(byte ^ 0x40 for byte in tensor.raw_data)

    change(path, negate)
    done = runner.invoke(app, ["check-onnx", str(path), "--provider", "CPUExecutionProvider"])
    assert done.exit_code == 1
    assert "CPUExecutionProvider, ORT_ENABLE_ALL: " in done.output and "logits differ, by up to" in done.output
    assert "equal" not in done.output


def test_a_runtime_that_is_wrong_or_fails_is_told(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (right,) = [run for name, run in onnx_check._reference(path, None)]

    def changed(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray, list[str]], list[np.ndarray]]:
        return lambda images, names: [change(out) for out in right(images, names)]

    def fail(images: np.ndarray, names: list[str]) -> list[np.ndarray]:
        raise RuntimeError("no\nkernel")

    ways = {
        "right": right, "off by one": changed(lambda out: out + np.eye(2, 10, dtype=np.int32)), "fails": fail,
        "another type": changed(lambda out: out.astype(np.int64)), "another shape": changed(lambda out: out[:1]),
    }  # fmt: skip
    monkeypatch.setitem(onnx_check._WAYS, "openvino", lambda path, providers: iter(ways.items()))
    monkeypatch.setitem(sys.modules, "openvino", types.ModuleType("openvino"))
    sys.modules["openvino"].__spec__ = sys.__spec__
    found = {outcome.runtime: outcome.problem for outcome in check_onnx(path, ["openvino"])}
    assert found == {
        "right": None, "off by one": "2 of 20 logits differ, by up to 1", "fails": "cannot run it: RuntimeError: no kernel",
        "another type": "logits must be torch.int32 (2, 10), are torch.int64 (2, 10)",
        "another shape": "logits must be torch.int32 (2, 10), are torch.int32 (1, 10)",
    }  # fmt: skip
    done = runner.invoke(app, ["check-onnx", str(path), "--runtime", "openvino"])
    assert done.exit_code == 1 and "right: equal\n" in done.output


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:5000]), "is no readable ONNX file"),
        (lambda path: path.write_bytes(b"no model"), "is no readable ONNX file|has no self-test"),
        (lambda path: path.unlink(), "No such file"),
        (lambda path: change(path, lambda model: model.ClearField("metadata_props")), "has no self-test"),
        *(
            (lambda path, v=v: change(path, lambda model: setattr(texts(model)["self_test"], "value", v)), "that is damaged")
            for v in ("", "{", "[]", "{}", '{"logits": 1}', '{"logits": [[1.5]]}', '{"logits": [[1], [2, 3]]}',
                      '{"logits": [[1]]}', '{"logits": [[99999999999], [1]]}', "[" * 100000)
        ),
        (lambda path: change(path, lambda model: model.graph.input.pop()), "self-test that is damaged"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_checked(path: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(path)
    done = runner.invoke(app, ["check-onnx", str(path)])
    assert done.exit_code == 1, done.output
    assert done.output.startswith("qflash check-onnx: ")
    with pytest.raises((ValueError, OSError), match=message):
        check_onnx(path)


def test_what_is_not_known_is_named(path: Path) -> None:
    with pytest.raises(ValueError, match="runtime must be one of onnxruntime, reference, openvino, got 'tensorrt'"):
        check_onnx(path, ["tensorrt"])
    with pytest.raises(ValueError, match=r"provider must be one of .*CPUExecutionProvider.*, got 'Cpu'"):
        check_onnx(path, None, ["Cpu"])


def test_a_missing_runtime_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in ("openvino", "onnxruntime") else find(name))
    with pytest.raises(ImportError, match="check-onnx also needs openvino"):
        check_onnx(path, ["openvino"])
    with pytest.raises(ImportError, match="check-onnx also needs onnxruntime"):
        check_onnx(path, None, ["CPUExecutionProvider"])
    assert [outcome.runtime for outcome in check_onnx(path)] == [f"onnx {onnx.__version__}, reference evaluator"]
