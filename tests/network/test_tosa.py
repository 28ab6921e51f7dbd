"""Integer networks as TOSA graphs: Arm's reference model returns the reference's bits, in the integer profile alone."""

from __future__ import annotations

import copy
import pathlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

import network_cases
import qflash
from helpers import slow
from network_cases import EXPORTED_RECIPES, Layer, attention_module
from qflash.network import activations
from qflash.network.activations import NAMES
from qflash.network.modules import DTYPES, LayerNorm, Linear, Mean, PatchEmbedding, WideLinear
from qflash.network.operators import WITH_ACTIVATION
from qflash.network.operators.gated import Gated
from qflash.network.operators.narrow import Narrow
from qflash.network.operators.norms import RmsNorm
from qflash.network.operators.rotary import Rotary
from qflash.specification.layers import ACTIVATIONS
from small_networks import KINDS, draw, draw_images

FINEST = 4e-6
"""The least output scale that the values here leave TOSA: an output needs a shift there."""
WHY = "tosa-tools is not installed (pip install tosa-tools)"
ts = pytest.importorskip("tosa_serializer", reason=WHY)
reference_model = pytest.importorskip("tosa_reference_model", reason=WHY)

from qflash.network import tosa_operators  # noqa: E402
from qflash.network.tosa_graph import Graph, Value  # noqa: E402

I8, I16, I32, BOOL = "INT8", "INT16", "INT32", "BOOL"
PROFILE: dict[str, set[tuple[str, ...]]] = {
    "ABS": {(I32, I32)},
    "ADD": {(I32, I32, I32)},
    "ARITHMETIC_RIGHT_SHIFT": {(I32, I32, I32)},
    "BITWISE_AND": {(I32, I32, I32)},
    "BITWISE_OR": {(I32, I32, I32)},
    "CAST": {(I32, I8)},
    "CLZ": {(I32, I32)},
    "CONCAT": {(I8, I8, I8), (I32, I32, I32)},
    "CONV2D": {(I8, I8, I32, I8, I8, I32)},
    "GATHER": {(I8, I32, I8), (I32, I32, I32)},
    "GREATER": {(I32, I32, BOOL)},
    "LOGICAL_LEFT_SHIFT": {(I32, I32, I32)},
    "MATMUL": {(I8, I8, I8, I8, I32)},
    "MAXIMUM": {(I32, I32, I32)},
    "MINIMUM": {(I32, I32, I32)},
    "MUL": {(I32, I32, I8, I32)},
    "REDUCE_MAX": {(I32, I32)},
    "REDUCE_SUM": {(I32, I32)},
    "RESCALE": {(I8, I32, I8, I8, I8, I8), (I32, I32, I8, I32, I8, I8), (I32, I32, I8, I32, I32, I32)},
    "RESHAPE": {(I8, I8), (I32, I32)},
    "SELECT": {(BOOL, I32, I32, I32)},
    "SLICE": {(I8, I8), (I32, I32)},
    "SUB": {(I32, I32, I32)},
    "TRANSPOSE": {(I8, I8), (I32, I32)},
}
"""Operators of TOSA 1.0 and the types, of inputs and output, that its integer profile has without an extension."""
EXTENSION: dict[str, set[tuple[str, ...]]] = {"RESCALE": {(I32, I32, I8, I32, I16, I16)}, "TABLE": {(I16, I16, I32)}}
"""What is used of EXT-INT16 beside that."""


def evaluate(content: bytes, inputs: Sequence[torch.Tensor], outputs: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Return what the reference model, which looks at every bound of TOSA, makes of a graph."""
    found, status = reference_model.run(content, [x.contiguous().numpy() for x in inputs], tosa_level="EIGHTK")
    assert status == reference_model.GraphStatus.TOSA_VALID
    return [
        torch.from_numpy(np.frombuffer(np.ascontiguousarray(x).tobytes(), np.int32).copy()).view(*shape)
        for x, shape in zip(found, outputs, strict=True)
    ]


def run(build: Callable[..., Value], *inputs: torch.Tensor) -> torch.Tensor:
    """Return as int32 what the operators that ``build(graph, *values)`` adds make of tensors of four axes."""
    graph = Graph()
    inputs = tuple(x if x.dtype == torch.int8 else x.to(torch.int32) for x in inputs)
    result = build(graph, *(graph.input(f"in{i}", x.numpy().dtype, tuple(x.shape)) for i, x in enumerate(inputs)))
    if result.dtype == np.int8:
        result = graph.rescale(result, 1 << 30, 30, np.int32)
    graph.output(result, "out", result.shape)
    return evaluate(graph.serialize(), inputs, [result.shape])[0]


def four(x: torch.Tensor) -> torch.Tensor:
    """Return (..., tokens, channels) or (channels,) as a graph has it: (batch, 1, tokens, channels)."""
    return x.reshape(-1, 1, x.shape[-2] if x.dim() > 1 else 1, x.shape[-1])


def fill(module: Any, **values: torch.Tensor) -> Any:
    for name, x in values.items():
        getattr(module, name).copy_(x)
    return module


def module_of(layer: Layer) -> tuple[Any, list[torch.Tensor]]:
    """Return the module of a layer with its numbers, and what it takes."""
    arguments = layer.arguments
    if layer.name.startswith("int8_linear"):
        x, weight, bias, multiplier, left, *rest = arguments
        activation = layer.name.removeprefix("int8_linear").strip("_")
        name = next(key for key, dtype in DTYPES.items() if activation or dtype == rest[2])
        outputs, inputs = weight.shape
        scatter = None if activation else rest[1]
        if x.dtype == torch.int16:
            module: Linear = WideLinear(inputs, outputs)
            module.dtype = DTYPES[name]
        elif activation:
            module = WITH_ACTIVATION[activation](inputs, outputs)
        else:
            module = Linear(inputs, outputs, name, 0 if scatter is None else len(scatter))
        fill(module, weight=weight, bias=bias, multiplier=multiplier).left = left
        if activation:
            fill(module, **{f"{activation}_multiplier": rest[0], f"{activation}_offset": rest[1]})
            setattr(module, f"{activation}_shift", rest[2])
            return module, [x]
        if scatter is not None:
            fill(module, scatter=scatter)
        return module, [x] if rest[0] is None else [x, rest[0]]
    name = next(key for key, dtype in DTYPES.items() if dtype == arguments[-1])
    if layer.name == "integer_layer_norm":
        h, epsilon, gain, offset, shift, gather, _ = arguments
        module = LayerNorm(len(gain), name, None if gather is None else tuple(gather.shape))
        fill(module, gain=gain, offset=offset, **({} if gather is None else {"gather": gather}))
        module.epsilon, module.shift = epsilon, shift
        return module, [h]
    if layer.name == "gated":
        x, factor, multiplier, offset, activation, _ = arguments
        fill(gated := Gated(len(multiplier), name, activation), multiplier=multiplier, offset=offset).gate_multiplier = factor
        return gated, [x]
    if layer.name == "integer_norm":
        h, epsilon, gain, offset, shift, gather, residual, centred, _ = arguments
        module = (LayerNorm if centred else RmsNorm)(len(gain), name, None if gather is None else tuple(gather.shape))
        fill(module, gain=gain, offset=offset, **({} if gather is None else {"gather": gather}))
        module.epsilon, module.shift = epsilon, shift
        return module, [h] if residual is None else [h, residual]
    if layer.name == "integer_narrow":
        h, multiplier, left, offset, gather, _ = arguments
        module = Narrow(len(offset), None if gather is None else tuple(gather.shape))
        fill(module, multiplier=multiplier, offset=offset, **({} if gather is None else {"gather": gather})).left = left
        return module, [h]
    if layer.name == "rotary":
        x, turns, offset, multiplier, _ = arguments
        return fill(Rotary(len(offset), turns.shape), turns=turns, offset=offset, multiplier=multiplier), [x]
    assert layer.name == "integer_mean"
    x, multiplier, left, offset, _ = arguments
    fill(module := Mean(x.shape[1], x.shape[2], name), multiplier=multiplier, offset=offset).left = left
    return module, [x]


def check_layer(layer: Layer) -> None:
    """Compare a layer with the reference."""
    if layer.name in ("integer_narrow", "rotary"):
        # the module's outputs are int8
        layer = Layer(layer.name, (*layer.arguments[:-1], torch.int8))
    want = layer.run("reference")
    if not want.numel():
        return
    module, inputs = module_of(layer)
    values = [four(x) for x in inputs]
    got = run(lambda graph, *parts: tosa_operators.node(graph, module, parts, values[0].shape[0]), *values)
    assert torch.equal(got.view(want.shape), want.to(torch.int32)), repr(layer)


# --- single operations --------------------------------------------------------------------------------------


def test_one_operator_is_a_rounded_product() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-(1 << 31), 1 << 31, (1, 1, 40, 9), generator=generator) for _ in range(2))
    a[..., :2], b[..., :2] = torch.tensor([(1 << 31) - 1, -(1 << 31)]), torch.tensor([-(1 << 31), (1 << 31) - 1])
    for shift in (32, 33, 47, 63):
        graph_runs = run(lambda graph, x, y, n=shift: graph.multiply(x, y, n), a, b)
        assert graph_runs.flatten().tolist() == [
            (x * y + (1 << (shift - 1))) >> shift for x, y in zip(a.flatten().tolist(), b.flatten().tolist(), strict=True)
        ]


@pytest.mark.parametrize(
    ("parts", "order"),
    [
        ((2, 7, 3, 4, 5), (2, 0, 3, 1, 4)),
        ((1, 7, 3, 4, 5), (2, 0, 3, 1, 4)),
        ((1, 7, 1, 4, 5), (2, 0, 3, 1, 4)),
        ((1, 1, 3, 1, 5), (2, 0, 3, 1, 4)),
        ((3, 4, 7, 5), (0, 2, 1, 3)),
        ((1, 4, 7, 5), (0, 2, 1, 3)),
        ((1, 1, 1, 1), (0, 2, 1, 3)),
        ((2, 3, 4, 5), (3, 2, 1, 0)),
    ],
)
def test_axes_are_arranged_with_few_operators(parts: tuple[int, ...], order: tuple[int, ...]) -> None:
    x = torch.arange(torch.Size(parts).numel()).to(torch.int8).view(1, 1, 1, -1)
    want = x.view(parts).permute(order)
    counts: list[int] = []

    def build(graph: Graph, value: Value) -> Value:
        out = graph.arrange(value, parts, order, 1, 1, 1, x.numel())
        counts.append(sum(count for each in graph.counts.values() for count in each.values()))
        return out

    assert torch.equal(run(build, x).flatten(), want.flatten().to(torch.int32))
    assert counts[0] <= 3


def test_a_constant_says_when_a_number_does_not_fit() -> None:
    with pytest.raises(OverflowError, match="constant of table does not fit int8"):
        Graph().constant([128], np.int8, "table")


def test_constants_beyond_a_flatbuffer_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from qflash.network import tosa_graph

    monkeypatch.setattr(tosa_graph, "MOST_BYTES", 100)
    graph = Graph()
    graph.constant(np.zeros(25), np.int32)
    graph.serialize()
    graph.constant(np.zeros(1), np.int8)
    with pytest.raises(ValueError, match="at most 100 bytes of constants to be written as TOSA, has 101"):
        graph.serialize()


@pytest.mark.parametrize("name", NAMES)
def test_activations_by_tables_for_every_number(name: str) -> None:
    ends = torch.tensor([-(1 << 28) + 1, -(1 << 17), (1 << 17) - 2, (1 << 17) - 1, 1 << 17, (1 << 28) - 1])
    u = torch.cat([torch.arange(-33000, 33000), ends])

    def build(graph: Graph, x: Value) -> Value:
        narrow = graph.rescale(x, 1 << 29, 29, np.int16) if activations.has_tables(name) else None
        return activations.tosa(graph, name, x, narrow)

    assert torch.equal(run(build, four(u[None])).flatten().long(), ACTIVATIONS[name][0](u))


def test_a_line_that_no_table_holds_is_named() -> None:
    with pytest.raises(ValueError, match="line from 59898 with slope -10 needs more than 5 bits"):
        activations.line_of_rest(59898, -10, 5)


# --- modules ------------------------------------------------------------------------------------------------


def some(values: Sequence[Any], *quick: Any) -> list[Any]:
    """Return parameters of which all but these are slow."""
    return [value if value in quick else pytest.param(value, marks=pytest.mark.slow) for value in values]


@pytest.mark.parametrize("number", some(range(15), 0, 1))
def test_a_linear_layer(number: int) -> None:
    check_layer(network_cases.draw_linear(number))


@pytest.mark.parametrize("number", some(range(12), 1))
def test_a_layer_normalisation(number: int) -> None:
    check_layer(network_cases.draw_layer_norm(number))


@pytest.mark.parametrize("number", some(range(1, 6), 1))
@pytest.mark.parametrize(
    "draw_layer", [x for x in network_cases.MOVING if x not in (network_cases.draw_embedding, network_cases.draw_linear_gated)]
)
def test_layers_that_move_tokens(draw_layer: Callable[[int], Layer], number: int) -> None:
    check_layer(draw_layer(number))


@pytest.mark.slow
def test_layers_at_the_ends_of_their_ranges() -> None:
    for layer in network_cases.extremes():
        check_layer(layer)


@pytest.mark.parametrize("channels", some([1, 16, 192, 4096], 16))
def test_variances_of_every_size(channels: int) -> None:
    torch.manual_seed(channels)
    module = LayerNorm(channels, "int32")
    fill(module, gain=torch.full((channels,), (1 << 28) - 1), offset=torch.zeros(channels))
    rows = [torch.randint(-(2**n), 2**n, (3, channels)) for n in range(16)]
    rows += [torch.full((1, channels), each) for each in (0, 5, 32767, -32768)]
    # powers of two around which the limbs of a variance change
    rows += [torch.where(torch.arange(channels) == 0, 1 << n, 0)[None] for n in range(15)]
    h = torch.cat(rows).to(torch.int16)
    for epsilon in (0, 1, (1 << 18) - 1, 1 << 18, (1 << 30) - 1, 1 << 30, 1 << 46):
        module.epsilon = epsilon
        got = run(lambda graph, value: tosa_operators.layer_norm(graph, module, value), four(h))
        assert torch.equal(got[0, 0], module(h[None], backend="reference")[0]), epsilon


@pytest.mark.parametrize("number", some(range(1, 7), 1))
def test_a_patch_embedding(number: int) -> None:
    images, size, weight, bias, multiplier, left, position, prefix = network_cases.draw_embedding(number).arguments
    if not images.numel():
        return
    patches = (images.shape[2] // size[0]) * (images.shape[3] // size[1])
    tokens = 0 if prefix is None else prefix.shape[1]
    module = PatchEmbedding(images.shape[1], size, len(weight), 0 if position is None else patches, tokens)
    fill(module, weight=weight, bias=bias, multiplier=multiplier).left = left
    for words, x in ((module.position_words, position), (module.prefix_words, prefix)):
        if words is not None and x is not None:
            words.view(torch.int16)[: x.numel()] = x.flatten()
    got = run(lambda graph, x: tosa_operators.node(graph, module, [x], len(images)), images.contiguous().view(torch.int8))
    want = module(images, backend="reference").to(torch.int32)
    assert torch.equal(got.view(want.shape), want)


@pytest.mark.parametrize("tokens", some([1, 64, 65, 130], 65))
@pytest.mark.parametrize("name", EXPORTED_RECIPES)
def test_attention(tokens: int, name: str) -> None:
    torch.manual_seed(tokens)
    module = attention_module(EXPORTED_RECIPES[name], finest=FINEST)
    batch = 1 + tokens % 2
    x = torch.randint(-128, 128, (batch, tokens, 3 * 96), dtype=torch.int8)
    got = run(lambda graph, value: tosa_operators.attention(graph, module, [value], batch), four(x))
    assert torch.equal(got[:, 0], module(x, backend="reference").to(torch.int32))
    assert got.unique().numel() > 20 + min(tokens, 64)


@pytest.mark.parametrize("tokens", [16, 81])
@pytest.mark.parametrize("windows", [1, 4])
def test_attention_with_a_bias(tokens: int, windows: int) -> None:
    torch.manual_seed(tokens)
    module = attention_module(qflash.DEFAULT, (windows, 6, tokens, tokens), tokens, FINEST)
    x = torch.randint(-128, 128, (3, 4 * tokens, 288), dtype=torch.int8)
    got = run(lambda graph, value: tosa_operators.attention(graph, module, [value], 3), four(x))
    assert torch.equal(got[:, 0], module(x, backend="reference").to(torch.int32))


def test_what_attention_cannot_express_is_named() -> None:
    module = attention_module(qflash.DEFAULT, (1, 6, 4, 4), finest=FINEST)
    assert module.bias is not None
    module.bias[0, 0, 0, 0] = -(1 << 30)
    with pytest.raises(ValueError, match="bias of attention must be finite"):
        run(
            lambda graph, value: tosa_operators.attention(graph, module, [value], 1),
            torch.zeros(1, 1, 4, 288, dtype=torch.int8),
        )
    module = attention_module(qflash.DEFAULT, finest=FINEST)
    module.output_scale[0, 0, 0, 0] = torch.tensor(1e-7).view(torch.int32)
    with pytest.raises(ValueError, match=r"scales below 2\*\*19 times those of its outputs"):
        run(
            lambda graph, value: tosa_operators.attention(graph, module, [value], 1),
            torch.zeros(1, 1, 4, 288, dtype=torch.int8),
        )


# --- whole networks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", some(list(KINDS), "class token"))
def test_the_reference_model_returns_the_network_s_bits(
    kind: str, made: Callable[[str], tuple[Any, Any]], tmp_path: pathlib.Path
) -> None:
    model, network = made(kind)
    network = copy.deepcopy(network)
    network.backend = "reference"
    path = tmp_path / "network.tosa"
    for batch in (1, 2):
        counts = qflash.export_tosa(network, path, batch=np.int64(batch))
        x = draw(model, batch, 10 + batch)
        want = network(x)
        (got,) = evaluate(path.read_bytes(), [x.view(torch.int8)], [want.shape])
        assert torch.equal(got, want)
        assert int(want.unique().numel()) > 2
    check_profile(path, counts)


@pytest.mark.parametrize("kind", some(["class token", "SiLU", "ReLU"], "class token"))
def test_networks_with_tables_of_sixteen_bits(
    kind: str, made: Callable[[str], tuple[Any, Any]], tmp_path: pathlib.Path
) -> None:
    model, network = made(kind)
    path = tmp_path / "network.tosa"
    counts = qflash.export_tosa(network, path, int16=True)
    x = draw(model, 1, 12)
    want = network(x)
    assert torch.equal(evaluate(path.read_bytes(), [x.view(torch.int8)], [want.shape])[0], want)
    check_profile(path, counts, int16=True)
    saved = {"class token": 3, "SiLU": 1, "ReLU": 0}[kind]
    plain = qflash.export_tosa(network, path)
    layers = [name for name, _ in plain.items() if type(network.part(name)).__name__ in ("LinearGelu", "LinearSilu")]
    assert len(layers) * saved == sum(sum(plain[name].values()) - sum(counts[name].values()) for name in plain)
    assert saved == 0 or layers


@pytest.mark.parametrize("depth", [1, slow(12)])
def test_an_image_of_a_deit(depth: int, tmp_path: pathlib.Path) -> None:
    """The largest network that takes seconds; benchmarks/tosa_networks.py runs more images, and other networks."""
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    model = timm.create_model("deit_tiny_patch16_224", depth=depth).eval()
    images = draw_images(2, 3, 224)
    network = qflash.quantize_model(model, [images], min_sqnr=None, progress=False)
    path = tmp_path / "network.tosa"
    counts = qflash.export_tosa(network, path)
    most = 80 + 210 * depth
    assert sum(sum(count.values()) for count in counts.values()) <= most
    want = network(images[:1])
    assert torch.equal(evaluate(path.read_bytes(), [images[:1].view(torch.int8)], [want.shape])[0], want)
    counts = qflash.export_tosa(network, path, int16=True)
    assert sum(sum(count.values()) for count in counts.values()) <= most - 3 * depth
    check_profile(path, counts, int16=True)


DOCUMENT = pathlib.Path(__file__).resolve().parents[2] / "docs" / "tosa.md"


@pytest.mark.skipif(not DOCUMENT.is_file(), reason="only the repository has the documents")
def test_the_document_has_the_counts() -> None:
    def count(build: Callable[[Graph], object]) -> tuple[int, int]:
        """Return the operators without an extension, and with EXT-INT16."""
        graphs = Graph(), Graph(int16=True)
        for graph in graphs:
            build(graph)
        plain, wide = (sum(sum(each.values()) for each in graph.counts.values()) for graph in graphs)
        return plain, wide

    def row(graph: Graph, dtype: Any, tokens: int = 65, channels: int = 288) -> Value:
        return graph.input("x", dtype, (1, 1, tokens, channels))

    found: dict[str, tuple[int, int]] = {}
    layers: dict[str, Linear] = {"linear": Linear(8, 8, "int8")}
    for name, kind in WITH_ACTIVATION.items():
        layers[f"linear, {NAMES[name]}"] = kind(8, 8)
        setattr(layers[f"linear, {NAMES[name]}"], f"{name}_shift", 12)
    for name, module in layers.items():
        found[name] = count(lambda graph, m=module: tosa_operators.linear(graph, m, row(graph, np.int8, 65, 8)))
    residual = np.ones((1, 1, 65, 8))
    module = Linear(8, 8, "int16")
    found["linear, residual"] = count(lambda graph: tosa_operators.linear(graph, module, row(graph, np.int8, 65, 8), residual))
    norm = LayerNorm(8, "int8")
    norm.epsilon, norm.shift = 1, 12
    norm.offset.fill_(1)
    found["layer normalisation"] = count(lambda graph: tosa_operators.layer_norm(graph, norm, row(graph, np.int32, 65, 8)))
    mean = Mean(65, 8, "int8")
    found["mean over tokens"] = count(lambda graph: tosa_operators.mean(graph, mean, row(graph, np.int32, 65, 8)))
    core = attention_module(qflash.DEFAULT, finest=FINEST)
    for name in ("query", "key", "value", "output"):
        getattr(core, f"{name}_scale").fill_(torch.tensor(0.02).view(torch.int32).item())
    for name, tokens in (("attention, up to 64 keys", 64), ("attention, 65 keys and more", 65)):
        found[name] = count(lambda graph, n=tokens: tosa_operators.attention(graph, core, [row(graph, np.int8, n)], 1))
    text = DOCUMENT.read_text(encoding="utf-8")
    rows = {name: f"| {name} | {plain} | {wide} |" for name, (plain, wide) in found.items()}
    assert {name: row in text for name, row in rows.items()} == dict.fromkeys(found, True), found


def check_profile(path: pathlib.Path, counts: dict[str, Any], int16: bool = False) -> None:
    """Look whether a file holds operators and types of the integer profile alone, or EXT-INT16's, as many as were counted."""
    graph = ts.TosaSerializer("")
    assert graph.loadTosaFlatbuffer(str(path))
    (block,) = graph.currRegion.basicBlocks
    found: Counter[str] = Counter()
    shapes = set(block.shapes)
    for operator in block.operators:
        name = operator.op.name
        if name in ("CONST", "CONST_SHAPE"):
            continue
        tensors = [block.getTensorByName(each) for each in (*operator.inputs, *operator.outputs) if each not in shapes]
        types = tuple(each.dtype.name for each in tensors)
        assert types in PROFILE.get(name, set()) | (EXTENSION.get(name, set()) if int16 else set()), name
        assert all(len(each.shape) <= 6 for each in tensors)
        found[name] += 1
    total: Counter[str] = sum((Counter(count) for count in counts.values()), Counter())
    assert found == total


# --- what is refused ----------------------------------------------------------------------------------------


def test_a_path_that_cannot_be_written_is_an_error(made: Callable[[str], tuple[Any, Any]], tmp_path: pathlib.Path) -> None:
    _, network = made("grey")
    with pytest.raises(FileNotFoundError):
        network.export_tosa(tmp_path / "missing" / "network.tosa")
    with pytest.raises(IsADirectoryError):
        network.export_tosa(tmp_path)
