"""torch.compile, torch.export, fake tensors and PyTorch's own checks of the operators."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import timm
import torch
import torch._dynamo.testing
from torch._subclasses.fake_tensor import FakeTensorMode

import qflash
from helpers import DEVICE, few, make_inputs, operator_samples, same_bits
from qflash.backends import cpu_missing
from qflash.kernels.cpu.backend import CpuBackend

MASK = torch.rand(2, 1, 9, 12, generator=torch.Generator().manual_seed(0)) < 0.7


def integer_path(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    tensors = (qflash.quantize(query, "token"), qflash.quantize(key), qflash.quantize(value, "channel"))
    out = qflash.int8_attention(*tensors, output_scale=0.01)
    assert isinstance(out, qflash.QuantizedTensor)
    return out.dequantize()


def float_output(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    tensors = (qflash.quantize(query, "token"), qflash.quantize(key), qflash.quantize(value, "channel"))
    out = qflash.int8_attention(*tensors, out_dtype=torch.float32)
    assert isinstance(out, torch.Tensor)
    return out


CALLS: dict[str, Callable[..., torch.Tensor]] = {
    "default": lambda q, k, v: qflash.attention(q, k, v),
    "accurate": lambda q, k, v: qflash.attention(q, k, v, recipe="accurate"),
    "paper": lambda q, k, v: qflash.attention(q, k, v, recipe=qflash.PAPER),
    "causal": lambda q, k, v: qflash.attention(q, k, v, is_causal=True, scale=0.3),
    "bool mask": lambda q, k, v: qflash.attention(q, k, v, MASK),
    "bias": lambda q, k, v: qflash.attention(q, k, v, MASK.float()) * 2,
    "three dimensions": lambda q, k, v: qflash.attention(q[0], k[0], v[0]),
    "five dimensions": lambda q, k, v: qflash.attention(q[None], k[None], v[None]),
    "integer path": integer_path,
    "float output": float_output,
}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("name", few(CALLS))
def test_compiled_without_a_graph_break_is_eager(name: str) -> None:
    inputs = make_inputs(2, 2, 9, 12, 16)
    compiled = torch.compile(CALLS[name], fullgraph=True, backend="aot_eager")
    assert same_bits(compiled(*inputs), CALLS[name](*inputs))


@pytest.mark.parametrize("name", few(["default", "accurate", "paper", "causal", "integer path"]))
def test_compiled_once_for_all_shapes(name: str) -> None:
    compiled = torch.compile(CALLS[name], fullgraph=True, dynamic=True, backend="aot_eager")
    # sizes that differ, or the compiler assumes that they always agree
    compiled(*make_inputs(5, 2, 9, 12, 16))
    with torch.compiler.set_stance("fail_on_recompile"):
        for shape in ((3, 2, 17, 20, 16), (7, 2, 33, 8, 16)):
            inputs = make_inputs(*shape)
            assert same_bits(compiled(*inputs), CALLS[name](*inputs))


def test_scales_that_vary() -> None:
    inputs = make_inputs(2, 2, 9, 12, 16)
    tensors = [qflash.quantize(x, "head") for x in inputs]

    def call(scale: float, output_scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        out = qflash.int8_attention(*tensors, scale=scale, output_scale=output_scale)
        return qflash.attention(*inputs, scale=scale), out.dequantize()

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="eager")
    for step in range(3):
        scale, output_scale = 0.1 + 0.1 * step, 0.01 + 0.01 * step
        for got, wanted in zip(compiled(scale, output_scale), call(scale, output_scale), strict=True):
            assert same_bits(got, wanted)
    with pytest.raises(ValueError, match="scale"):
        call(float("inf"), 0.01)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224"])
@pytest.mark.slow
def test_a_patched_model_of_any_batch_is_one_graph(name: str) -> None:
    options = {"depths": (1, 2, 1, 1)} if "swin" in name else {"depth": 2}
    model = qflash.patch(timm.create_model(name, img_size=64, num_classes=3, **options).eval())
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    with torch.no_grad():
        for batch in (2, 3, 5):
            images = torch.randn(batch, 3, 64, 64)
            assert same_bits(compiled(images), model(images))
    assert counter.frame_count == 1


def test_a_model_with_static_scales_is_one_graph_and_is_exported() -> None:
    model = qflash.patch(timm.create_model("vit_tiny_patch16_224", img_size=64, num_classes=3, depth=1).eval(), "accurate")
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    images = torch.randn(3, 3, 64, 64)
    # runs what is compiled, which is not to be compiled with what watches it
    qflash.calibrate(compiled, [images], progress=False)
    assert counter.frame_count == 0
    with torch.no_grad():
        want = model(images)
        assert same_bits(compiled(images), want) and counter.frame_count == 1
    program = torch.export.export(model, (images,), dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=8)},))
    names = [str(node.target) for node in program.graph.nodes if "qflash" in str(node.target) and node.op == "call_function"]
    assert names == ["qflash.quantize_with_scale.default"] * 3 + ["qflash.int8_attention.default"]
    with torch.no_grad():
        assert same_bits(program.module()(images), want)
        torch.testing.assert_close(program.module()(images[:2]), want[:2])


@pytest.mark.skipif(DEVICE.type == "cpu" and cpu_missing() is not None, reason="no compiled kernels here")
@pytest.mark.parametrize("name", ["default", "paper", "causal", "three dimensions", "float output"])
def test_a_compiled_call_goes_the_whole_way_once(
    name: str, monkeypatch: pytest.MonkeyPatch, plans: dict[object, object]
) -> None:
    calls = {"attend_floats": 0, "attend_int8": 0}

    def counting(part: str, real: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def call(*arguments: object) -> torch.Tensor:
            calls[part] += 1
            return real(*arguments)

        return call

    inputs = [make_inputs(2, 2, 9, 12, 16, seed=seed) for seed in range(4)]
    call = CALLS[name]
    expected = [call(*one) for one in inputs]
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for part in calls:
        monkeypatch.setattr(CpuBackend, part, counting(part, getattr(CpuBackend, part)))
    plans.clear()
    with torch.no_grad():
        assert all(same_bits(compiled(*one), wanted) for one, wanted in zip(inputs, expected, strict=True))
    # keys behind the last query are hidden, and hidden tokens are replaced in every call
    times = len(inputs) if name == "causal" else 1
    # attention on a CPU is made of the other
    assert calls == {"attend_floats": 0 if name == "float output" else times, "attend_int8": times}


@pytest.mark.slow
def test_inductor_compiles_a_block_around_it() -> None:
    def block(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        query, key, value = (x @ weight).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        return qflash.attention(query, key, value).transpose(1, 2).flatten(-2) + x

    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(2, 9, 32, generator=generator), torch.randn(32, 96, generator=generator) / 6
    try:
        got = torch.compile(block, fullgraph=True)(x, weight)
    except torch._inductor.exc.InductorError as error:  # pragma: no cover
        pytest.skip(f"no C++ compiler for inductor here: {type(error).__name__}")
    torch.testing.assert_close(got, block(x, weight), rtol=1e-3, atol=1e-2)


class Module(torch.nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return CALLS[self.name](query, key, value)


@pytest.mark.parametrize("name", ["default", "accurate", "paper", "causal", "integer path"])
def test_exported_program_is_eager(name: str) -> None:
    inputs = make_inputs(2, 2, 9, 12, 16)
    program = torch.export.export(Module(name), inputs)
    other = make_inputs(2, 2, 9, 12, 16, seed=1)
    assert same_bits(program.module()(*other), CALLS[name](*other))
    assert any("qflash" in str(node.target) for node in program.graph.nodes)


def test_exported_program_keeps_a_free_batch(tmp_path: object) -> None:
    batch = torch.export.Dim("batch", min=2, max=64)
    free = {"query": {0: batch}, "key": {0: batch}, "value": {0: batch}}
    program = torch.export.export(Module("default"), make_inputs(2, 2, 9, 12, 16), dynamic_shapes=free)
    path = f"{tmp_path}/attention.pt2"
    torch.export.save(program, path)
    inputs = make_inputs(7, 2, 9, 12, 16)
    assert same_bits(torch.export.load(path).module()(*inputs), qflash.attention(*inputs))


SAMPLES = list(operator_samples(torch.device("cpu"), "reference"))


def test_every_operator_has_a_sample() -> None:
    names = [name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if name.startswith("qflash::")]
    assert {name.split(".")[0] for name in names} == {name.split()[0] for name in SAMPLES}


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("sample", SAMPLES)
def test_operators_pass_pytorchs_checks(sample: str, backend: str) -> None:
    operator = getattr(torch.ops.qflash, sample.split()[0]).default
    samples = operator_samples(DEVICE if backend == "triton" else torch.device("cpu"), backend)
    torch.library.opcheck(operator, samples[sample], test_utils=("test_schema", "test_faketensor"))


# the interpreter is too slow for them, and they see no more than the fake implementation anyway
@pytest.mark.parametrize("sample", few(SAMPLES))
def test_operators_pass_pytorchs_checks_that_trace(sample: str) -> None:
    operator = getattr(torch.ops.qflash, sample.split()[0]).default
    torch.library.opcheck(operator, operator_samples(torch.device("cpu"), "reference")[sample])


@pytest.mark.parametrize("kind", ["fake", "meta"])
@pytest.mark.parametrize("name", ["default", "accurate", "paper", "causal", "three dimensions", "integer path"])
def test_shapes_are_known_without_data(name: str, kind: str) -> None:
    inputs = make_inputs(2, 2, 9, 12, 16, 24, dtype=torch.float16)
    expected = CALLS[name](*inputs)
    if kind == "meta":
        got = CALLS[name](*(x.to("meta") for x in inputs))
    else:
        with FakeTensorMode() as mode:
            got = CALLS[name](*(mode.from_tensor(x) for x in inputs))
    assert (got.shape, got.dtype, got.stride()) == (expected.shape, expected.dtype, expected.stride())
