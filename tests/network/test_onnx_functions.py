"""ONNX files with a node for each operator of the network: the functions that they call are the flat graph's nodes."""

from __future__ import annotations

import pathlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import qflash
from small_networks import build, draw

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

from qflash.network.onnx_check import check_onnx  # noqa: E402
from qflash.network.onnx_functions import DOMAIN  # noqa: E402

CHOSEN = ("class token", "registers", "long rows", "mean features", "query and key norms", "rotary", "swin", "swin features")


@pytest.fixture(scope="module", params=CHOSEN)
def files(
    request: pytest.FixtureRequest, made: Callable[[str], tuple[Any, Any]], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, pathlib.Path, pathlib.Path]:
    """An integer network, and its files with functions and without."""
    _, network = made(request.param)
    folder = tmp_path_factory.mktemp("onnx")
    network.export_onnx(folder / "functions.onnx")
    network.export_onnx(folder / "flat.onnx", inline=True)
    return network, folder / "functions.onnx", folder / "flat.onnx"


def test_every_level_and_the_reference_evaluator_give_the_bits(files: tuple[Any, pathlib.Path, pathlib.Path]) -> None:
    outcomes = check_onnx(files[1], ["onnxruntime", "reference"])
    assert len(outcomes) > 4 and all(each.problem is None for each in outcomes), outcomes


def test_the_graph_reads_like_the_network(files: tuple[Any, pathlib.Path, pathlib.Path]) -> None:
    network, path, flat = files
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    assert [(x.domain, x.version) for x in model.opset_import] == [("", 18), (DOMAIN, 1)] and model.ir_version == 8
    calls = {node.name: node for node in model.graph.node if node.domain == DOMAIN}
    parts = {node.name: network.part(node.name) for node in network.nodes}
    # those of one node or none, and the names of the outputs
    others = [node for node in model.graph.node if node.domain != DOMAIN]
    assert {node.op_type for node in others} <= {"Slice", "Gather", "Concat", "Identity"}
    assert calls.keys() <= parts.keys()
    assert {type(parts[name]).__name__ for name in parts.keys() - calls.keys()} <= {"First", "Widen", "Join"}
    names = {"PatchEmbedding": "Embed"}
    for name, call in calls.items():
        kind = type(parts[name]).__name__
        assert call.op_type.split("_")[0].removesuffix("Residual") == names.get(kind, kind)
        assert list(call.output) == [name]
        takes = next(node.inputs for node in network.nodes if node.name == name)
        assert len(takes) <= len(call.input)
    assert len(onnx.load(flat).graph.node) > 15 * len(model.graph.node)


def test_every_edge_has_its_shape(files: tuple[Any, pathlib.Path, pathlib.Path]) -> None:
    network, path, _ = files
    graph = onnx.load(path).graph
    shapes = {
        x.name: [d.dim_param or d.dim_value for d in x.type.tensor_type.shape.dim] for x in (*graph.value_info, *graph.output)
    }
    assert {name for node in graph.node for name in node.output} <= shapes.keys()
    for name, shape in network.shapes().items():
        if name in shapes:
            assert shapes[name] == ["batch", *shape[1:]]


def test_functions_hold_tables_and_no_weights(files: tuple[Any, pathlib.Path, pathlib.Path]) -> None:
    network, path, _ = files
    model = onnx.load(path)
    called = Counter(node.op_type for node in model.graph.node if node.domain == DOMAIN)
    assert called.keys() == {function.name for function in model.functions}
    assert len(called) < called.total()
    stored = {x.name for x in model.graph.initializer}
    weights = [x for x in model.graph.initializer if x.data_type == onnx.TensorProto.INT8]
    assert sum(int(np.prod(x.dims)) for x in weights) == sum(
        x.numel() for name, x in network.state_dict().items() if name.endswith(".weight")
    )
    for function in model.functions:
        assert function.domain == DOMAIN and "docs/integer_network.md" in function.doc_string
        for node in function.node:
            assert node.domain == ""
            if node.op_type == "Constant":
                assert node.attribute[0].t.data_type != onnx.TensorProto.INT8
    values = {name for node in model.graph.node for name in node.output} | {"images"}
    assert {name for node in model.graph.node for name in node.input} <= values | stored


def test_inlined_they_are_the_flat_graph(files: tuple[Any, pathlib.Path, pathlib.Path]) -> None:
    from onnx.inliner import inline_local_functions

    _, path, flat = files
    inlined = inline_local_functions(onnx.load(path))
    count = Counter(node.op_type for node in inlined.graph.node)
    del count["Constant"]
    assert count == Counter(node.op_type for node in onnx.load(flat).graph.node)


def test_twelve_blocks_are_89_nodes_and_few_functions(tmp_path: pathlib.Path) -> None:
    model = build("vit", depth=12, num_classes=10)
    network = qflash.quantize_model(model, [draw(model, 4)], progress=False)
    network.export_onnx(tmp_path / "network.onnx")
    stored = onnx.load(tmp_path / "network.onnx")
    assert len(stored.graph.node) == 89
    assert len(stored.functions) <= 12
    session = onnxruntime.InferenceSession(str(tmp_path / "network.onnx"), providers=["CPUExecutionProvider"])
    x = draw(model, 3, seed=5)
    assert np.array_equal(session.run(None, {"images": x.numpy()})[0], network(x).numpy())


def test_inline_must_be_a_flag(made: Callable[[str], tuple[Any, Any]], tmp_path: pathlib.Path) -> None:
    with pytest.raises(TypeError, match="inline must be True or False, got"):
        made("class token")[1].export_onnx(tmp_path / "network.onnx", inline=1)
    assert not list(tmp_path.iterdir())
