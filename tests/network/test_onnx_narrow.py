"""ONNX without 64-bit arithmetic: every operator at the ends of its range, in whatever runtimes are installed."""

from __future__ import annotations

import importlib.util
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

import qflash
from network_cases import (
    EXPORTED_RECIPES,
    activated_module,
    attention_module,
    draw_gated,
    fill_linear,
    gated_module,
    linear_module,
)
from qflash.network.modules import LayerNorm, LinearActivation, LinearGelu, LinearSilu, Mean, WideLinear
from qflash.network.operators.norms import RmsNorm
from qflash.specification import fixed_point as fp
from qflash.specification import layers as op
from small_networks import draw

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

from qflash.network import onnx_operators  # noqa: E402
from qflash.network.onnx_narrow import NarrowGraph  # noqa: E402

from qflash.network.onnx_graph import Value  # noqa: E402  # isort: skip

OPERATORS = {
    "Abs", "Add", "BitwiseAnd", "BitwiseXor", "Cast", "Concat", "Div", "Expand", "Gather", "Identity", "MatMulInteger", "Max",
    "Min", "Mul", "ReduceSum", "Reshape", "Shape", "Slice", "Split", "Squeeze", "Sub", "TopK", "Transpose",
}  # fmt: skip
"""All that docs/onnx.md lists."""


def with_openvino(model: Any, arrays: dict[str, np.ndarray]) -> np.ndarray:
    from openvino import Core

    core = Core()
    found: np.ndarray = core.compile_model(core.read_model(model), "CPU")(arrays)[0]
    return found


def results(build: Callable[..., Value], *inputs: torch.Tensor) -> list[torch.Tensor]:
    """Return what each runtime makes of the nodes that ``build(graph, *values)`` adds."""
    from onnx.reference import ReferenceEvaluator

    graph = NarrowGraph()
    arrays = {f"in{i}": x.numpy() for i, x in enumerate(inputs)}
    values = [Value(name, x.dtype) for name, x in arrays.items()]
    out = build(graph, *values)
    model = graph.model([(each, arrays[each.name].shape) for each in values], [(out, "out", [None])], "part", "0", {})
    model.graph.output[0].type.tensor_type.ClearField("shape")
    assert {node.op_type for node in model.graph.node} <= OPERATORS
    content = model.SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    found = [session.run(None, arrays)[0], ReferenceEvaluator(model).run(None, arrays)[0]]
    if importlib.util.find_spec("openvino"):
        found.append(with_openvino(content, arrays))
    return [torch.from_numpy(np.array(x)) for x in found]


def check(want: torch.Tensor, build: Callable[..., Value], *inputs: torch.Tensor) -> None:
    for found in results(build, *inputs):
        assert torch.equal(
            found.to(torch.int64), (want.to(torch.int64) + 128 if want.dtype == torch.int8 else want.to(torch.int64))
        )


def unsigned(x: torch.Tensor) -> torch.Tensor:
    """Return int8 as the graph holds it."""
    return (x.to(torch.int16) + 128).to(torch.uint8)


def near(*ends: int, count: int = 200) -> torch.Tensor:
    """Return int32 at and near these numbers, and between the least and the largest."""
    generator = torch.Generator().manual_seed(len(ends))
    around = [each + d for each in ends for d in (-2, -1, 0, 1, 2) if min(ends) <= each + d <= max(ends)]
    drawn = torch.randint(min(ends), max(ends) + 1, (count,), generator=generator, dtype=torch.int64)
    return torch.cat((torch.tensor(around, dtype=torch.int64), drawn)).to(torch.int32)


def half(x: torch.Tensor, y: torch.Tensor | int, shift: int) -> torch.Tensor:
    return fp.multiply_round(x, y, shift)


@pytest.mark.parametrize(
    ("ends", "other", "shift"),
    [
        # a row's denominator and its inverse, and the slope; 2**31 - 2**15 is where rounding the halves leaves int32
        ((1 << 30, (1 << 31) - (1 << 15), (1 << 31) - 1), ((1 << 29) - (1 << 26), (1 << 30) + (1 << 26)), 32),
        (((1 << 29) - (1 << 26), (1 << 30) + (1 << 26)), (-(1 << 24), 0, 1 << 24), 28),
        # a variance, its root and its error
        ((1 << 28, (1 << 30) - 1), ((1 << 29) - (1 << 26), (1 << 30) + 64), 30),
        (((1 << 29) - (1 << 26), (1 << 30) + 64), (-(1 << 26), 0, 1 << 26), 29),
        # a normalised row
        ((-(1 << 30), 0, 1 << 30), ((1 << 28) - 64, 1 << 30), 32),
        # a gate's activation and a value
        ((-(1 << 15), 0, (1 << 17) - 1), (-(1 << 15), (1 << 15) - 1), 2),
    ],
)
def test_products_of_two_tensors_at_their_ends(ends: Sequence[int], other: Sequence[int], shift: int) -> None:
    a, b = near(*ends)[:, None], near(*other)[None]

    def build(graph: NarrowGraph, x: Value, y: Value) -> Value:
        return graph.multiply_round(graph.known(x, min(ends), max(ends)), graph.known(y, min(other), max(other)), shift)

    check(half(a.long(), b.long(), shift), build, a, b)


@pytest.mark.parametrize("slope", [fp.RECIPROCAL_SLOPE, op.ROOT_SLOPE, (1 << 31) - 1, 1])
def test_products_with_a_constant_at_their_ends(slope: int) -> None:
    x = near(1 << 28, 1 << 30, (1 << 31) - (1 << 15), (1 << 31) - 1)
    check(half(x.long(), slope, 32), lambda graph, v: graph.multiply_round(graph.known(v, 1 << 28, (1 << 31) - 1), slope), x)


def test_rounding_down_with_a_shift_for_every_channel() -> None:
    shifts = np.array([0, 1, 11, 12, 31])
    a, b = near(-(1 << 31), 0, 127 << 24)[:, None], near(1 << 26, 1 << 29, count=4)[:5][None]
    wide = (a.long() * b.long()) >> 32
    want = torch.where(
        torch.from_numpy(shifts) > 0, (wide + ((1 << torch.from_numpy(shifts)) >> 1)) >> torch.from_numpy(shifts), wide
    )

    def build(graph: NarrowGraph, x: Value, y: Value) -> Value:
        out = graph.multiply_shift(graph.known(y, 1 << 26, 1 << 29), graph.known(x, -(1 << 31), 127 << 24), shifts, 128)
        return graph.cast(graph.clip(out, 0, 255), np.uint8)

    check(want.clamp(-128, 127).to(torch.int8), build, a, b)


@pytest.mark.parametrize("shift", [1, 7, 8, 16, 22])
@pytest.mark.parametrize("bound", [(1 << 31) - 1, (1 << 24) + 3, 5000])
def test_shifts_round_down(shift: int, bound: int) -> None:
    if bound >> shift > 1 << 24 and shift > 16:
        pytest.skip("quotients have more bits than a float32")
    x = near(-bound, 0, bound)
    check((x.long() >> shift) + 5, lambda graph, v: graph.shift_right(v, shift, bound, after=5), x)


def test_bit_lengths() -> None:
    x = torch.tensor([each for n in range(31) for each in ((1 << n) - 1, 1 << n)] + [(1 << 31) - 1], dtype=torch.int32)[:, None]
    want = torch.tensor([int(each).bit_length() for each in x])[:, None]
    check(want, lambda graph, v: graph.bit_length(graph.known(v, 0, (1 << 31) - 1), 31), x)


@pytest.mark.parametrize("count", [1, 2, 65, 600])
def test_sums_of_many_large_numbers(count: int) -> None:
    x = torch.randint(0, 1 << 20, (3, count), dtype=torch.int32)
    x[0] = (1 << 20) - 1
    check(x.long().sum(dim=1, keepdim=True), lambda graph, v: graph.total(graph.known(v, 0, (1 << 20) - 1), 1, count), x)


@pytest.mark.parametrize("inner", [500, 700, 1300])
def test_matrix_products_of_many_terms(inner: int) -> None:
    x, y = (torch.randint(0, 256, shape, dtype=torch.uint8) for shape in ((2, 9, inner), (2, inner, 5)))
    x[:, :2], y[..., :2] = 255, 255
    want = x.long() @ (y.long() - 128)
    check(want, lambda graph, a, b: graph.matmul(a, b, x_zero=0, inner=inner), x, y)
    # what follows alone is not computed with the product's floats
    check(want * 7, lambda graph, a, b: graph.multiply(graph.matmul(a, b, x_zero=0, inner=inner), 7), x, y)


@pytest.mark.slow
@pytest.mark.parametrize(("left", "bits"), [(0, 31), (9, 31), (9, 16), (10, 1), (0, 24)])
@pytest.mark.parametrize("dtype", ["int8", "int16", "int32"])
def test_a_linear_layer(left: int, bits: int, dtype: str) -> None:
    module, x = linear_module(left, bits, dtype)
    want = module(x, backend="reference")
    check(want, lambda graph, v: onnx_operators.linear(graph, module, v), unsigned(x))
    if dtype == "int16":
        residual = torch.randint(-32768, 32768, want.shape, dtype=torch.int16)
        want = module(x, residual, backend="reference")
        check(want, lambda graph, *v: onnx_operators.linear(graph, module, *v), unsigned(x), residual.int())


def test_a_linear_layer_of_int16() -> None:
    module = WideLinear(300, 24)
    fill_linear(module, (1 << 31) - 1)
    x = torch.randint(-32768, 32768, (2, 7, 300), dtype=torch.int16)
    x[0, 0], x[0, 1], x[0, 2] = 32767, -32768, -1
    module.multiplier[2:] = 1 << 20
    check(module(x, backend="reference"), lambda graph, v: onnx_operators.linear(graph, module, v), x.int())


@pytest.mark.slow
@pytest.mark.parametrize(("bits", "shift"), [(18, 0), (22, 12), (31, 30), (31, 0)])
@pytest.mark.parametrize("kind", [LinearGelu, LinearSilu])
def test_a_linear_layer_with_an_activation(bits: int, shift: int, kind: type[LinearActivation]) -> None:
    torch.manual_seed(bits)
    module = activated_module(kind, bits, shift)
    x = torch.randint(-128, 128, (64, 32), dtype=torch.int8)
    check(module(x, backend="reference"), lambda graph, v: onnx_operators.linear(graph, module, v), unsigned(x))


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2, 3, 4, 5, 6])
def test_a_gated_product(number: int) -> None:
    layer = draw_gated(number)
    module, x = gated_module(layer), layer.arguments[0]
    check(layer.run("reference"), lambda graph, v: module.write_onnx(graph, [v], [x.shape]), x.to(torch.int32))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("channels", "shift", "dtype"),
    [(1, 12, "int8"), (192, 1, "int8"), (384, 29, "int16"), (1000, 12, "int32"), (4096, 12, "int8")],
)
@pytest.mark.parametrize("kind", [LayerNorm, RmsNorm])
def test_a_normalisation(channels: int, shift: int, dtype: str, kind: type[LayerNorm]) -> None:
    torch.manual_seed(channels + shift)
    module = kind(channels, dtype)
    module.shift = shift
    module.gain.copy_(torch.randint(-(1 << 31) + 1, 1 << 31, (channels,)))
    module.gain[0] = (1 << 31) - 1
    module.offset.copy_(torch.randint(1 - (1 << 30), 1 << 30, (channels,)))
    rows = [torch.randint(-(2**n), 2**n, (2, channels)) for n in range(16)]
    rows += [torch.full((1, channels), each) for each in (0, 5, 32767, -32768)]
    first = torch.arange(channels) == 0
    rows += [torch.where(first, 1 << n, 0)[None] for n in range(15)]
    rows += [torch.where(torch.arange(channels) % 2 == 0, 32767, -32768)[None], torch.where(first, 32767, 0)[None]]
    h = torch.cat(rows).to(torch.int16)
    for epsilon in (0, (1 << 18) - 1, 1 << 30, (1 << 46) - 1):
        module.epsilon = epsilon
        want = module(h[None], backend="reference")[0]
        check(want, lambda graph, v: onnx_operators.layer_norm(graph, module, v), h.to(torch.int32))


@pytest.mark.parametrize("dtype", ["int8", "int32"])
def test_a_mean_over_tokens(dtype: str) -> None:
    module = Mean(600, 8, dtype)
    module.multiplier.copy_(torch.randint(0, 1 << 22, (8,)))
    module.offset.copy_(torch.randint(-(1 << 20), 1 << 20, (8,)))
    x = torch.randint(-32768, 32768, (3, 600, 8), dtype=torch.int16)
    x[0] = -32768
    check(module(x), lambda graph, v: onnx_operators.mean(graph, module, v), x.to(torch.int32))


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 65, 600])
@pytest.mark.parametrize("name", EXPORTED_RECIPES)
def test_attention(tokens: int, name: str) -> None:
    if tokens == 600 and name not in ("default", "rounded"):
        pytest.skip("long rows differ in sums alone")
    torch.manual_seed(tokens)
    module = attention_module(EXPORTED_RECIPES[name])
    x = torch.randint(-128, 128, (1, tokens, 3 * 96), dtype=torch.int8)
    want = module(x, backend="reference")
    check(want, lambda graph, v: onnx_operators.attention(graph, module, [v], [(1, tokens, 288)]), unsigned(x))


@pytest.mark.parametrize(("tokens", "windows"), [(16, 4), (81, 1)])
def test_attention_with_a_bias(tokens: int, windows: int) -> None:
    torch.manual_seed(tokens)
    module = attention_module(qflash.DEFAULT, (windows, 6, tokens, tokens), tokens)
    x = torch.randint(-128, 128, (1, 4 * tokens, 288), dtype=torch.int8)
    want = module(x, backend="reference")
    check(want, lambda graph, v: onnx_operators.attention(graph, module, [v], [(1, 4 * tokens, 288)]), unsigned(x))


NETWORKS = ("class token", "query and key norms", "SwiGLU with a norm", "rotary", "swin", "swin v2", "root mean squares")


@pytest.mark.slow
@pytest.mark.parametrize("kind", NETWORKS)
def test_networks_have_the_reference_s_bits_and_no_64_bits(
    kind: str, made: Callable[[str], tuple[Any, Any]], tmp_path: pathlib.Path
) -> None:
    model, network = made(kind)
    x = draw(model, 3, 13)
    want = network(x).numpy()
    network.export_onnx(tmp_path / "functions.onnx", int64=False)
    network.export_onnx(tmp_path / "flat.onnx", int64=False, inline=True, batch=3)
    for name in ("functions", "flat"):
        session = onnxruntime.InferenceSession(str(tmp_path / f"{name}.onnx"), providers=["CPUExecutionProvider"])
        assert np.array_equal(session.run(None, {"images": x.numpy()})[0], want)
    flat = onnx.load(tmp_path / "flat.onnx")
    onnx.checker.check_model(flat, full_check=True)
    assert {node.op_type for node in flat.graph.node} <= OPERATORS
    types = {each.name: each.type.tensor_type.elem_type for each in flat.graph.value_info}
    of = onnx.TensorProto
    for node in flat.graph.node:
        # the second output of TopK, and sizes
        for name in node.output[:1]:
            if node.op_type not in ("Shape", "Concat", "Identity"):
                assert types.get(name, of.INT32) in (of.INT32, of.UINT8)
    if importlib.util.find_spec("openvino"):
        assert np.array_equal(with_openvino((tmp_path / "flat.onnx").read_bytes(), {"images": x.numpy()}), want)


def test_what_has_no_form_is_named(made: Callable[[str], tuple[Any, Any]], tmp_path: pathlib.Path) -> None:
    graph = NarrowGraph()
    x = Value("x", np.dtype(np.int32))
    with pytest.raises(OverflowError, match=r"Add_.* spans .*, which int32 does not hold"):
        graph.add(x, 1)
    with pytest.raises(OverflowError, match="x times y has no form without 64 bits"):
        graph.multiply_round(x, Value("y", np.dtype(np.int32)))
    with pytest.raises(ValueError, match="has no form without 64 bits"):
        graph.cast(x, np.int64)
    with pytest.raises(TypeError, match="int64 must be True or False, got"):
        made("class token")[1].export_onnx(tmp_path / "network.onnx", int64=0)
    assert not list(tmp_path.iterdir())
