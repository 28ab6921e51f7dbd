"""Integer networks as ONNX: onnxruntime returns the reference's bits, and the graph holds integers only."""

from __future__ import annotations

import copy
import json
import pathlib
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import qflash
from helpers import few
from network_cases import (
    EXPORTED_RECIPES,
    activated_module,
    attention_module,
    draw_gated,
    fill_linear,
    gated_module,
    linear_module,
)
from qflash.network.graph import IntegerNetwork, Node
from qflash.network.modules import (
    Attention,
    LayerNorm,
    Linear,
    LinearActivation,
    LinearGelu,
    LinearRelu,
    LinearSilu,
    Mean,
    PatchEmbedding,
    WideLinear,
)
from qflash.network.onnx_check import check_onnx
from qflash.specification import layers as op
from qflash.specification.reference import ARITHMETIC_VERSION
from small_networks import KINDS, build, draw

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

from qflash.network import onnx_operators  # noqa: E402
from qflash.network.onnx_graph import Graph, Value  # noqa: E402

OPERATORS = {
    "Abs", "Add", "BitShift", "BitwiseXor", "Cast", "Clip", "Concat", "Expand", "Gather", "GreaterOrEqual", "Identity",
    "MatMulInteger",
    "Max", "Min", "Mul", "ReduceSum", "Reshape", "Shape", "Slice", "Split", "Sub", "TopK", "Transpose",
}  # fmt: skip
"""All that docs/onnx.md lists."""
TYPES = {"BOOL", "UINT8", "INT8", "INT16", "INT32", "UINT32", "INT64", "UINT64"}


def session(model: Any) -> Any:
    return onnxruntime.InferenceSession(
        model if isinstance(model, str) else model.SerializeToString(), providers=["CPUExecutionProvider"]
    )


def run(build: Callable[..., Value], *inputs: torch.Tensor) -> torch.Tensor:
    """Return what onnxruntime makes of the nodes that ``build(graph, *values)`` adds."""
    graph = Graph()
    arrays = {f"in{i}": x.numpy() for i, x in enumerate(inputs)}
    values = [Value(name, x.dtype) for name, x in arrays.items()]
    result = build(graph, *values)
    ends = [(value, x.shape) for value, x in zip(values, arrays.values(), strict=True)]
    model = graph.model(ends, [(result, "out", [None])], "part", "0", {})
    for info in (*model.graph.input, *model.graph.output):
        info.type.tensor_type.ClearField("shape")
    return torch.from_numpy(session(model).run(None, arrays)[0])


def unsigned(x: torch.Tensor) -> torch.Tensor:
    """Return int8 as the graph holds it."""
    return (x.to(torch.int16) + 128).to(torch.uint8)


# --- single operations --------------------------------------------------------------------------------------


def extremes(bound: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    near = torch.tensor([0, 1, -1, 2, -2, bound, -bound, bound - 1, 1 - bound, bound // 2, -bound // 2], dtype=torch.int64)
    return torch.cat((near, torch.randint(-bound, bound, (500,), generator=generator))).to(dtype)


@pytest.mark.parametrize(
    ("dtype", "shift"),
    [*((torch.int32, n) for n in (0, 1, 7, 30, 31)), *((torch.int64, n) for n in (0, 1, 31, 32, 33, 47, 62, 63))],
)
@pytest.mark.parametrize("room", [0, 1, 2, 9])
def test_shifts_of_signed_numbers_round_down(dtype: torch.dtype, room: int, shift: int) -> None:
    bound = (1 << (8 * dtype.itemsize - 1 - room)) - 1
    x = extremes(bound, dtype)
    got = run(lambda graph, value: graph.shift_right(value, shift, bound, after=5), x)
    assert torch.equal(got.to(torch.int64), (x.to(torch.int64) >> shift) + 5)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_every_channel_has_its_own_shift(dtype: torch.dtype) -> None:
    bits = 8 * dtype.itemsize
    for bound in ((1 << (bits - 1)) - 10, (1 << (bits - 3)) - 1):
        shifts, before = np.array([0, 1, 5, bits // 2, bits - 1]), np.array([3, 0, 9, -4, 1])
        x = extremes(bound - 9, dtype)[:, None].expand(-1, 5).contiguous()
        got = run(lambda graph, value, s=shifts, b=before, most=bound: graph.shift_right(value, s, most, b), x)
        assert torch.equal(got.to(torch.int64), (x.to(torch.int64) + torch.from_numpy(before)) >> torch.from_numpy(shifts))


@pytest.mark.parametrize("shift", [1, 2, 32, 33, 62, 63])
@pytest.mark.parametrize("bound", [(1 << 63) - 2, (1 << 62) + 5, 1 << 40])
def test_rounding_shifts_have_room_for_the_half(shift: int, bound: int) -> None:
    x = extremes(bound, torch.int64)
    got = run(lambda graph, value: graph.round_shift(value, shift, bound, after=-3), x)
    want = [((int(each) + (1 << (shift - 1))) >> shift) - 3 for each in x]
    assert got.tolist() == want


def test_a_shift_says_when_a_number_does_not_fit() -> None:
    with pytest.raises(OverflowError, match="does not fit int32"):
        Graph().shift_right(Value("x", np.dtype(np.int32)), 3, 1 << 31)
    with pytest.raises(OverflowError, match="constant of table does not fit int8"):
        Graph().constant([128], np.int8, "table")


def test_rounded_products_and_bit_lengths() -> None:
    a, b = extremes((1 << 31) - 1, torch.int64), extremes((1 << 31) - 1, torch.int64).flip(0)
    got = run(lambda graph, x, y: graph.multiply_round(x, y), a, b)
    assert torch.equal(got, (a * b + (1 << 31)) >> 32)
    x = torch.cat([torch.tensor([0]), *(torch.tensor([(1 << n) - 1, 1 << n]) for n in range(54))])[:, None]
    got = run(lambda graph, value: graph.bit_length(value, 55), x)
    assert got.flatten().tolist() == [int(each).bit_length() for each in x]


@pytest.mark.parametrize("lead", [(), (2, 3)])
def test_products_at_the_ends_of_int8_are_exact(lead: tuple[int, ...]) -> None:
    # pairs of products at the ends are what a kernel that adds in 16 bits gets wrong
    for a, b in ((255, 0), (255, 255), (0, 255), (0, 0)):
        x = torch.full((*lead, 9, 197), a, dtype=torch.uint8)
        y = torch.full((*lead, 197, 70), b, dtype=torch.uint8)
        y[..., ::3] = 255 - b
        signed_y = y.to(torch.int64) - 128
        assert torch.equal(run(lambda graph, p, q: graph.matmul(p, q, inner=197), x, y).long(), (x.long() - 128) @ signed_y)
        assert torch.equal(run(lambda graph, p, q: graph.matmul(p, q, x_zero=0, inner=197), x, y).long(), x.long() @ signed_y)


# --- modules ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("left", "bits"), [(0, 31), (9, 31), (9, 16), (10, 1), (0, 24)])
@pytest.mark.parametrize("dtype", ["int8", "int16", "int32"])
def test_a_linear_layer(left: int, bits: int, dtype: str) -> None:
    module, x = linear_module(left, bits, dtype)
    want = module(x, backend="reference")
    got = run(lambda graph, value: onnx_operators.linear(graph, module, value), unsigned(x))
    assert torch.equal(got, unsigned(want) if dtype == "int8" else want.to(torch.int32))
    if dtype == "int16":
        residual = torch.randint(-32768, 32768, want.shape, dtype=torch.int16)
        want = module(x, residual, backend="reference")
        got = run(lambda graph, *values: onnx_operators.linear(graph, module, *values), unsigned(x), residual.int())
        assert torch.equal(got, want.to(torch.int32))


@pytest.mark.parametrize(("left", "bits", "most"), [(0, 31, 127), (3, 31, 63), (6, 20, 1)])
def test_a_linear_layer_of_int16(left: int, bits: int, most: int) -> None:
    torch.manual_seed(bits)
    module = WideLinear(64, 24)
    fill_linear(module, (1 << bits) - 1)
    module.left = left
    module.weight.copy_(torch.randint(-most, most + 1, (24, 64)))
    module.bias.copy_(torch.randint(-(1 << 28), 1 << 28, (24,)))
    module.check_values()
    x = torch.randint(-32768, 32768, (2, 7, 64), dtype=torch.int16)
    x[0, 0], x[0, 1], x[0, 2] = 32767, -32768, -1
    got = run(lambda graph, value: onnx_operators.linear(graph, module, value), x.to(torch.int32))
    assert torch.equal(got, module(x, backend="reference"))


@pytest.mark.parametrize("bits", [18, 22, 31])
@pytest.mark.parametrize("shift", [0, 12, 30])
@pytest.mark.parametrize("kind", [LinearGelu, LinearSilu, LinearRelu])
def test_a_linear_layer_with_an_activation(bits: int, shift: int, kind: type[LinearActivation]) -> None:
    torch.manual_seed(bits)
    module = activated_module(kind, bits, shift)
    x = torch.randint(-128, 128, (64, 32), dtype=torch.int8)
    got = run(lambda graph, value: onnx_operators.linear(graph, module, value), unsigned(x))
    assert torch.equal(got, unsigned(module(x, backend="reference")))


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5, 6, 7, 9, 11, 13, 14, 17])
def test_a_gated_product(number: int) -> None:
    layer = draw_gated(number)
    module, x = gated_module(layer), layer.arguments[0]
    got = run(lambda graph, value: module.write_onnx(graph, [value], [x.shape]), x.to(torch.int32))
    want = layer.run("reference")
    assert torch.equal(got, unsigned(want) if want.dtype == torch.int8 else want.to(torch.int32))


@pytest.mark.parametrize("channels", [1, 16, 384, 4096])
@pytest.mark.parametrize("shift", [1, 12, 29])
@pytest.mark.parametrize("dtype", ["int8", "int16", "int32"])
def test_a_layer_normalisation(channels: int, shift: int, dtype: str) -> None:
    torch.manual_seed(channels + shift)
    module = LayerNorm(channels, dtype)
    module.shift = shift
    module.gain.copy_(torch.randint(-(1 << 31) + 1, 1 << 31, (channels,)))
    module.gain[0] = (1 << 31) - 1
    module.offset.copy_(torch.randint(1 - (1 << 30), 1 << 30, (channels,)))
    rows = [torch.randint(-(2**n), 2**n, (3, channels)) for n in range(16)]
    rows += [torch.full((1, channels), each) for each in (0, 5, 32767, -32768)]
    ends = torch.where(torch.arange(channels) % 2 == 0, 32767, -32768)[None]
    single = torch.where(torch.arange(channels) == 0, 32767, 0)[None]
    h = torch.cat([*rows, ends, single]).to(torch.int16)
    for epsilon in (0, 7, 1 << 46):
        module.epsilon = epsilon
        got = run(lambda graph, value: onnx_operators.layer_norm(graph, module, value), h.to(torch.int32))
        want = module(h, backend="reference")
        assert torch.equal(got, unsigned(want) if dtype == "int8" else want.to(torch.int32))


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32"])
def test_a_mean_over_tokens(dtype: str) -> None:
    torch.manual_seed(0)
    module = Mean(49, 8, dtype)
    module.left = 5
    module.multiplier.copy_(torch.randint(0, 1 << 22, (8,)))
    module.offset.copy_(torch.randint(-(1 << 20), 1 << 20, (8,)))
    x = torch.randint(-32768, 32768, (3, 49, 8), dtype=torch.int16)
    x[0] = -32768
    got = run(lambda graph, value: onnx_operators.mean(graph, module, value), x.to(torch.int32))
    want = module(x)
    assert torch.equal(got, unsigned(want) if dtype == "int8" else want.to(torch.int32))


@pytest.mark.parametrize("tokens", [1, 64, 65, 130])
@pytest.mark.parametrize("name", EXPORTED_RECIPES)
def test_attention(tokens: int, name: str) -> None:
    torch.manual_seed(tokens)
    module = attention_module(EXPORTED_RECIPES[name])
    x = torch.randint(-128, 128, (2, tokens, 3 * 96), dtype=torch.int8)
    got = run(lambda graph, value: onnx_operators.attention(graph, module, [value], [(1, tokens, 288)]), unsigned(x))
    assert torch.equal(got, unsigned(module(x, backend="reference")))
    assert got.unique().numel() > 20 + min(tokens, 64)


@pytest.mark.parametrize("tokens", [16, 81])
@pytest.mark.parametrize("windows", [1, 4])
def test_attention_with_a_bias(tokens: int, windows: int) -> None:
    torch.manual_seed(tokens)
    module = attention_module(qflash.DEFAULT, (windows, 6, tokens, tokens), tokens)
    assert module.bias is not None
    module.bias[1:3] = module.bias[:1]
    x = torch.randint(-128, 128, (3, 4 * tokens, 288), dtype=torch.int8)
    got = run(lambda graph, value: onnx_operators.attention(graph, module, [value], [(1, 4 * tokens, 288)]), unsigned(x))
    assert torch.equal(got, unsigned(module(x, backend="reference")))


def test_a_bias_that_masks_keys_is_refused() -> None:
    module = attention_module(qflash.DEFAULT, (1, 6, 4, 4))
    assert module.bias is not None
    module.bias[0, 0, 0, 0] = -(1 << 30)
    with pytest.raises(ValueError, match="bias of attention must be finite"):
        onnx_operators.attention(Graph(), module, [Value("x", np.dtype(np.uint8))], [(1, 4, 288)])


# --- whole networks -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=few(KINDS, 3))
def exported(
    request: pytest.FixtureRequest, made: Callable[[str], tuple[Any, Any]], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Any, pathlib.Path]:
    """A float model, its integer network on the reference, and the file."""
    model, network = made(request.param)
    path = tmp_path_factory.mktemp("onnx") / "network.onnx"
    network.export_onnx(path, inline=True)  # tests/network/test_onnx_functions.py has the other form
    network = copy.deepcopy(network)
    network.backend = "reference"
    return model, network, path


@pytest.mark.slow
def test_onnxruntime_returns_the_reference_s_bits(exported: tuple[Any, Any, pathlib.Path]) -> None:
    model, network, path = exported
    runtime = session(str(path))
    for batch in range(1, 6):
        x = draw(model, batch, 10 + batch)
        want = network(x)
        got = torch.from_numpy(runtime.run(None, {"images": x.numpy()})[0])
        assert got.dtype == torch.int32 and torch.equal(got, want)
        assert int(want.unique().numel()) > 2


def test_bits_do_not_depend_on_optimisation_or_threads(exported: tuple[Any, Any, pathlib.Path]) -> None:
    model, network, path = exported
    x = draw(model, 2, 3)
    for level in onnxruntime.GraphOptimizationLevel.__members__.values():
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = level
        options.intra_op_num_threads = 2
        runtime = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        assert np.array_equal(runtime.run(None, {"images": x.numpy()})[0], network(x).numpy())


def test_the_graph_holds_integers_only(exported: tuple[Any, Any, pathlib.Path]) -> None:
    _, _, path = exported
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    graph = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True).graph
    assert {node.op_type for node in graph.node} <= OPERATORS
    assert all(node.domain == "" for node in graph.node)
    name_of = onnx.TensorProto.DataType.Name
    known = {x.name: name_of(x.type.tensor_type.elem_type) for x in (*graph.value_info, *graph.input, *graph.output)}
    known |= {x.name: name_of(x.data_type) for x in graph.initializer}
    used = {name for node in graph.node for name in (*node.input, *node.output)}
    assert used <= known.keys()
    assert {known[name] for name in used} <= TYPES
    # onnxruntime computes with these two types alone in all versions
    arithmetic = [node for node in graph.node if node.op_type in ("Add", "Sub", "Mul", "Min", "Max", "Clip", "Abs")]
    assert {known[node.output[0]] for node in arithmetic} == {"INT32", "INT64"}
    (first,), (last,) = graph.input, graph.output
    assert (first.name, known[first.name], last.name, known[last.name]) == ("images", "UINT8", "logits", "INT32")


def test_the_file_says_what_it_is(exported: tuple[Any, Any, pathlib.Path]) -> None:
    _, network, path = exported
    model = onnx.load(path)
    assert [(x.domain, x.version) for x in model.opset_import] == [("", 18)]
    texts = {x.key: x.value for x in model.metadata_props}
    assert float(texts.pop("output_scale")) == network.output_scale
    assert list(json.loads(texts.pop("self_test"))) == ["logits"]
    assert texts == {
        "arithmetic_version": str(ARITHMETIC_VERSION), "kind": type(network).__name__, "qflash_version": qflash.__version__,
    }  # fmt: skip


def dimensions(graph: Any) -> dict[str, list[Any]]:
    """Return the shapes that a graph says of its tensors, dimensions without a number by their names."""
    infos = (*graph.value_info, *graph.output)
    return {
        x.name: [d.dim_value if d.HasField("dim_value") else d.dim_param for d in x.type.tensor_type.shape.dim] for x in infos
    }


def test_every_tensor_has_a_shape(exported: tuple[Any, Any, pathlib.Path]) -> None:
    _, _, path = exported
    model = onnx.load(path)
    shapes = dimensions(model.graph)
    assert shapes.keys() >= {name for node in model.graph.node for name in node.output}
    assert all(size == "batch" or (isinstance(size, int) and size > 0) for shape in shapes.values() for size in shape)


def test_onnxruntime_s_symbolic_inference_finds_the_same_shapes(exported: tuple[Any, Any, pathlib.Path]) -> None:
    pytest.importorskip("sympy")
    from onnxruntime.tools.symbolic_shape_infer import SymbolicShapeInference

    model = onnx.load(exported[2])
    shapes = dimensions(model.graph)
    model.graph.ClearField("value_info")
    assert dimensions(SymbolicShapeInference.infer_shapes(model).graph).items() >= shapes.items()


@pytest.mark.parametrize("kind", ["class token", "swin"])
def test_large_tensors_go_into_a_file_beside(
    made: Callable[[str], tuple[Any, Any]], tmp_path: pathlib.Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, network = made(kind)
    path, x = tmp_path / "network.onnx", draw(model, 2, 3)
    sizes = [x.numel() for x in network.state_dict().values()]
    network.export_onnx(path, external_data_threshold=sum(sizes) // 2)
    data = [each for each in tmp_path.iterdir() if each != path]
    assert len(data) == 1 and re.fullmatch(r"network\.onnx\.[0-9a-f]{16}\.data", data[0].name)
    tensors = onnx.load(path, load_external_data=False).graph.initializer
    outside = [x for x in tensors if x.data_location == onnx.TensorProto.EXTERNAL]
    assert {entry.value for x in outside for entry in x.external_data if entry.key == "location"} == {data[0].name}
    assert all(len(x.raw_data) < 1024 for x in tensors) and len(outside) > 5
    # relative to the file, not to the process
    moved = tmp_path / "moved"
    moved.mkdir()
    for each in (path, *data):
        each.rename(moved / each.name)
    monkeypatch.chdir("/")
    network = copy.deepcopy(network)
    network.backend = "reference"
    assert np.array_equal(session(str(moved / path.name)).run(None, {"images": x.numpy()})[0], network(x).numpy())
    onnx.checker.check_model(str(moved / path.name), full_check=True)
    assert all(each.problem is None for each in check_onnx(moved / path.name, ["onnxruntime", "reference"]))


def test_data_of_another_network_is_never_met(made: Callable[[str], tuple[Any, Any]], tmp_path: pathlib.Path) -> None:
    _, network = made("class token")
    other = copy.deepcopy(network)
    other.part("blocks.0.mlp.fc1").weight.neg_()
    path = tmp_path / "network.onnx"
    (tmp_path / "network.onnx.data").touch()
    network.export_onnx(path, external_data_threshold=0)
    first = set(tmp_path.iterdir())
    network.export_onnx(path, external_data_threshold=0)
    assert set(tmp_path.iterdir()) == first
    other.export_onnx(path, external_data_threshold=0)
    assert len(set(tmp_path.iterdir()) - first) == 1 and len(list(tmp_path.iterdir())) == 3
    other.export_onnx(path)
    assert {each.name for each in tmp_path.iterdir()} == {"network.onnx", "network.onnx.data"}


def test_one_file_holds_a_megabyte_at_a_threshold_above_it(tmp_path: pathlib.Path) -> None:
    network = wide_network()
    network.export_onnx(tmp_path / "one.onnx", external_data_threshold=10_000_000)
    assert [each.name for each in tmp_path.iterdir()] == ["one.onnx"]
    network.export_onnx(tmp_path / "two.onnx", external_data_threshold=1_000_000)
    assert len(list(tmp_path.iterdir())) == 3 and (tmp_path / "two.onnx").stat().st_size < 1_000_000


@pytest.mark.parametrize(
    ("threshold", "error"), [(True, TypeError), (1.0, TypeError), (None, TypeError), (-1, ValueError), (1 << 31, ValueError)]
)
def test_a_threshold_that_is_not_allowed(tmp_path: pathlib.Path, threshold: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="external_data_threshold must be"):
        small_network().export_onnx(tmp_path / "network.onnx", external_data_threshold=threshold)
    assert not list(tmp_path.iterdir())


def test_writing_twice_gives_the_same_file(made: Callable[[str], tuple[Any, Any]], tmp_path: pathlib.Path) -> None:
    _, network = made("class token")
    paths = [tmp_path / name for name in ("a.onnx", "b.onnx")]
    for path in paths:
        qflash.export_onnx(network, str(path), batch=4)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert [d.dim_value for d in onnx.load(paths[0]).graph.input[0].type.tensor_type.shape.dim] == [4, 3, 32, 32]
    with pytest.raises(Exception, match="invalid dimensions"):
        session(str(paths[0])).run(None, {"images": np.zeros((2, 3, 32, 32), np.uint8)})


def network_of(side: int, patch: int, channels: int, heads: int, hidden: int, outputs: int) -> Any:
    """Return a network of one block, all zeros."""
    tokens = (side // patch) ** 2
    parts: dict[str, tuple[Any, tuple[str, ...]]] = {
        "embed": (PatchEmbedding(3, (patch, patch), channels, tokens, 1), ("images",)),
        "norm1": (LayerNorm(channels, "int8"), ("embed",)),
        "qkv": (Linear(channels, 3 * channels, "int8"), ("norm1",)),
        "core": (Attention(heads, channels // heads, 0.125, qflash.DEFAULT.key), ("qkv",)),
        "proj": (Linear(channels, channels, "int16"), ("core", "embed")),
        "norm2": (LayerNorm(channels, "int8"), ("proj",)),
        "fc1": (LinearGelu(channels, hidden), ("norm2",)),
        "fc2": (Linear(hidden, channels, "int16"), ("fc1", "proj")),
        "norm": (LayerNorm(channels, "int8", (1, 1), True), ("fc2",)),
        "head": (Linear(channels, outputs, "int32"), ("norm",)),
    }
    nodes = [Node(name, inputs) for name, (_, inputs) in parts.items()]
    return IntegerNetwork(
        nodes, {name: part for name, (part, _) in parts.items()}, (3, side, side), qflash.DEFAULT, {"output": "head"}
    )


def wide_network() -> Any:
    """Return a network of 2 MB."""
    network = network_of(32, 16, 384, 6, 1536, 1000)
    for module in network.modules():
        if isinstance(module, Linear):
            fill_linear(module, 1 << 20)
    for name in ("query", "key", "value", "output"):
        getattr(network.part("core"), f"{name}_scale").fill_(torch.tensor(0.01).view(torch.int32).item())
    return network


def test_pixels_behind_the_last_whole_patch_are_left_out(tmp_path: pathlib.Path) -> None:
    """As SigLIP's so400m leaves 6 of 384 pixels: in ONNX, in floating point, and in a forward pass as one call."""
    model = build("vit", num_classes=10, depth=1)
    model.patch_embed.proj = torch.nn.Conv2d(3, 48, 7, 7)
    images = draw(model, 16)
    for options, kept in (({}, ()), ({"int64": False}, ()), ({}, ("patch_embed.proj",))):
        network = qflash.quantize_model(model, [images], progress=False, keep_float=kept)
        assert not network(images[:2]).equal(network(images[:2].flip(3)))
        blank = images[:2].clone()
        blank[..., 28:], blank[..., 28:, :] = 0, 255
        assert torch.equal(network(blank), network(images[:2]))
        network.export_onnx(tmp_path / "network.onnx", **options)
        assert {outcome.problem for outcome in check_onnx(tmp_path / "network.onnx", ["onnxruntime"])} == {None}
        if not kept:
            assert torch.equal(network.graph(2)(images[:2]), network(images[:2]))


def test_weights_are_stored_as_int8(tmp_path: pathlib.Path) -> None:
    network = wide_network()
    path = tmp_path / "wide.onnx"
    network.export_onnx(path)
    weights = sum(module.weight.numel() for module in network.modules() if isinstance(module, Linear))
    assert weights > 2_000_000
    assert path.stat().st_size < 1.1 * weights
    network.backend = "reference"
    x = torch.randint(0, 256, (1, 3, 32, 32), dtype=torch.uint8)
    assert np.array_equal(session(str(path)).run(None, {"images": x.numpy()})[0], network(x).numpy())


# --- what is refused ----------------------------------------------------------------------------------------


def small_network() -> Any:
    return network_of(8, 4, 8, 1, 8, 2)


def test_a_network_with_float_parts_is_close(made: Callable[[str], tuple[Any, Any]], tmp_path: pathlib.Path) -> None:
    model, _ = made("class token")
    network = qflash.quantize_model(model, [draw(model, 24)], keep_float=["blocks.1.mlp"], progress=False)
    path = tmp_path / "network.onnx"
    network.export_onnx(path)
    stored = {entry.key: entry.value for entry in onnx.load(path).metadata_props}
    assert json.loads(stored["float_parts"]) == network.float_parts()
    assert all(outcome.problem is None for outcome in check_onnx(path, ["onnxruntime", "reference"]))
    # a network that computes something else is found out
    wrong = json.loads(stored["self_test"])
    wrong["logits"][0].reverse()
    model = onnx.load(path)
    next(entry for entry in model.metadata_props if entry.key == "self_test").value = json.dumps(wrong)
    onnx.save(model, path)
    assert all("at least 30 are wanted" in str(outcome.problem) for outcome in check_onnx(path, ["onnxruntime"]))


def test_wrong_arguments_are_named(tmp_path: pathlib.Path) -> None:
    network, path = small_network(), tmp_path / "network.onnx"
    with pytest.raises(TypeError, match="network must be what quantize_model returns, got Linear"):
        qflash.export_onnx(torch.nn.Linear(2, 2), path)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="path must be a string or a path, got int"):
        network.export_onnx(3)  # type: ignore[arg-type]
    for batch in (True, 1.0, None):
        with pytest.raises(TypeError, match="batch must be 'dynamic' or an integer"):
            network.export_onnx(path, batch=batch)  # type: ignore[arg-type]
    for batch in (0, -1, "fixed"):
        with pytest.raises(ValueError, match=f"batch must be 'dynamic' or an integer of at least 1, got {batch!r}"):
            network.export_onnx(path, batch=batch)
    with pytest.raises(FileNotFoundError):
        network.export_onnx(tmp_path / "missing" / "network.onnx")
    with pytest.raises(IsADirectoryError):
        network.export_onnx(tmp_path)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r'export_onnx also needs onnx: pip install "?onnx'):
        small_network().export_onnx(tmp_path / "network.onnx")


@pytest.mark.parametrize("name", ["gelu", "silu"])
def test_the_tail_of_an_activation_is_a_table_of_the_specification(name: str) -> None:
    function = op.ACTIVATIONS[name][0]
    x = torch.arange(-140_000, 140_000)
    table = -function(-torch.arange(op.TAIL_END + 1))
    assert int(table[-1]) == 0
    assert torch.equal(x.clamp(0, op.ACTIVATION_LIMIT) - table[x.abs().clamp(max=op.TAIL_END)], function(x))
