"""What only a GPU can show: the compiled kernels' bits, CUDA graphs, no synchronisation, large batches.

Run alone: ``python -m pytest tests/gpu``. Compiling dominates (one to three seconds a kernel), so every case of
:func:`helpers.draw_case` is compiled once and run on several draws of its data.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch

import qflash
from helpers import (
    GPU,
    LAYOUTS,
    count_calls,
    draw_case,
    draw_fused_case,
    lay_out,
    make_inputs,
    operator_samples,
    outlier_inputs,
    quantize_all,
    same_bits,
)
from qflash import execution
from qflash.backends import find_backend
from qflash.kernels.launch_recorder import record
from qflash.specification import reference
from qflash.specification.attention_call import float_call, int8_call
from qflash.unseen_tokens import without_unseen

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
GEOMETRIES = 80
FUSED_GEOMETRIES = 60
DRAWS = 6
PRESETS = ("default", "accurate", "paper")


def inputs_on_gpu(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float16, **options) -> tuple[torch.Tensor, ...]:
    return tuple(x.to(CUDA) for x in make_inputs(*shape, seed=seed, dtype=dtype, **options))


# --- bits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", [65_537, 131_200, 1 << 20])
@pytest.mark.parametrize("recipe", PRESETS)
@pytest.mark.parametrize("sign", [None, -128, 127])
def test_rows_of_several_sections_have_the_reference_bits(sign: int | None, recipe: str, keys: int) -> None:
    from qflash.kernels.cpu.launch import launch_attention as on_the_cpu
    from qflash.kernels.dispatch import launch_attention

    generator = torch.Generator().manual_seed(keys)
    draw = [torch.randint(-128, 128, (1, 1, tokens, 32), generator=generator) for tokens in (70, keys, keys)]
    query, key, value = (x.to(torch.int8) if sign is None else torch.full_like(x, sign, dtype=torch.int8) for x in draw)
    scale = torch.full((1, 1, 1, 1), 0.01)
    for output_scale, dtype in ((scale, torch.int8), (None, torch.float32)):
        call = int8_call(
            query,
            scale,
            key,
            scale,
            value,
            scale,
            None,
            False,
            0.2,
            output_scale,
            dtype,
            qflash.recipe.PRESETS[recipe],
        )
        scales = call.scales._replace(**{name: x.to(CUDA) for name, x in call.scales._asdict().items() if x is not None})
        there = dataclasses.replace(call, query=query.to(CUDA), key=key.to(CUDA), value=value.to(CUDA), scales=scales)
        assert same_bits(launch_attention(there).cpu(), on_the_cpu(call)), dtype


@pytest.mark.parametrize("recipe", PRESETS)
def test_tokens_beyond_32_bit_offsets_have_the_reference_bits(recipe: str) -> None:
    """Tokens that lie 2**21 elements apart, so that an offset to the last has 33 bits."""
    tokens, stride = 1100, 1 << 21
    inputs = inputs_on_gpu(1, 2, tokens, head_dim=64)
    far = []
    for x in inputs:
        room = torch.empty((tokens - 1) * stride + 128, dtype=x.dtype, device=CUDA)
        far.append(room.as_strided(x.shape, (128, 64, stride, 1)).copy_(x))
        if len(far) == 2:  # three take 14 GB
            break
    expected = qflash.attention(*(x.cpu() for x in inputs), recipe=recipe, backend="reference")
    assert same_bits(qflash.attention(*far, inputs[2], recipe=recipe, backend="triton").cpu(), expected)


@pytest.mark.parametrize("geometry", range(GEOMETRIES))
def test_kernel_has_the_reference_bits(geometry: int) -> None:
    from qflash.kernels.dispatch import launch_attention

    case = draw_case(10_000 + geometry, GPU)
    for draw in range(DRAWS):
        amplitude = (case.amplitude, 1.0, 0.01, 30.0)[draw % 4]
        varied = dataclasses.replace(case, data=1000 * geometry + draw, amplitude=amplitude, extreme=draw % 3 == 2)
        arguments = varied.arguments(CUDA)
        got = launch_attention(int8_call(*arguments), tiles=case.tiles)
        assert same_bits(got, reference.int8_attention(int8_call(*arguments))), varied


@pytest.mark.parametrize("geometry", range(FUSED_GEOMETRIES))
def test_fused_launch_has_the_reference_bits(geometry: int) -> None:
    from qflash.kernels.dispatch import launch_fused, one_launch

    case = draw_fused_case(20_000 + geometry, small=False)
    for draw in range(DRAWS):
        amplitude = (case.amplitude, 1.0, 0.01, 30.0)[draw % 4]
        varied = dataclasses.replace(case, data=1000 * geometry + draw, amplitude=amplitude)
        query, key, value, mask, is_causal, scale, recipe = varied.arguments(CUDA)
        call = without_unseen(float_call(query, key, value, mask, is_causal, scale, recipe), execution.quantize_bias)
        got = launch_fused(call, one_launch(call, case.tiles))
        expected = execution.attention(query, key, value, mask, is_causal, scale, recipe.key, "reference")
        assert same_bits(got, expected), varied


def test_a_repeated_call_has_the_same_bits() -> None:
    from qflash import plan_cache

    plan_cache._plans.clear()
    for shape in ((2, 3, 197), (4, 2, 49)):
        for dtype in (torch.float16, torch.bfloat16):
            kept = count_calls(plan_cache._plans)
            for seed in range(4):
                query, key, value = inputs_on_gpu(*shape, head_dim=64, seed=seed, dtype=dtype)
                bias = torch.randn(1, shape[1], shape[2], shape[2], device=CUDA, dtype=dtype)
                for mask in (None, bias):
                    got = qflash.attention(query, key, value, mask)
                    expected = qflash.attention(query, key, value, mask, backend="reference")
                    assert same_bits(got, expected), (shape, dtype, seed)
            assert count_calls(plan_cache._plans) == kept + 2
    # other strides, alignment, windows: each its own plan or none, never another's
    query, key, value = inputs_on_gpu(4, 2, 49, head_dim=64)
    shifted = torch.cat([query.flatten(), query.new_zeros(1)])[1:].view(query.shape)
    for q in (query.mT.contiguous().mT, shifted, query[:, :, ::2]):
        for _ in range(2):
            assert same_bits(qflash.attention(q, key, value), qflash.attention(q, key, value, backend="reference"))
    five = [x.unflatten(0, (2, 2)) for x in (query, key, value)]
    windows = torch.randn(2, 2, 49, 49, device=CUDA)
    for _ in range(2):
        got = qflash.attention(*five, windows)
        assert got.shape == five[0].shape
        assert same_bits(got, qflash.attention(*five, windows, backend="reference"))
    with torch.inference_mode():
        assert same_bits(qflash.attention(query, key, value), qflash.attention(query, key, value, backend="reference"))
    query.requires_grad_()
    with pytest.raises(NotImplementedError):
        qflash.attention(query, key, value).sum().backward()


def test_a_repeated_int8_call_has_the_same_bits() -> None:
    from qflash import plan_cache

    plan_cache._plans.clear()
    fitted = torch.rand(4, 6, 1, 64, device=CUDA) * 0.01 + 0.01
    bias = qflash.quantize_bias(torch.randn(1, 6, 197, 197, device=CUDA))
    ways: tuple[dict[str, Any], ...] = (
        {},
        {"output_scale": 0.02},
        {"output_scale": 0.03},
        {"output_scale": fitted},
        {"out_dtype": torch.float16},
        {"attn_mask": bias, "output_scale": fitted},
        {"is_causal": True, "recipe": "accurate"},
    )
    for seed in range(3):
        for granularities in (("tensor",) * 3, ("token", "head", "channel")):
            scaled = (x * (1 + seed) for x in inputs_on_gpu(4, 6, 197, head_dim=64, seed=seed))
            int8 = [qflash.quantize(x, kind) for x, kind in zip(scaled, granularities, strict=True)]
            for way in ways:
                got = qflash.int8_attention(*int8, **way)
                expected = qflash.int8_attention(*int8, **way, backend="reference")
                if isinstance(expected, torch.Tensor):
                    assert isinstance(got, torch.Tensor)
                    assert same_bits(got, expected)
                else:
                    assert same_bits(got.values, expected.values), (seed, granularities, way)
                    assert same_bits(got.scale, expected.scale)
        assert count_calls(plan_cache._plans) == 2 * len(ways)
    # a float mask, which a kernel of its own converts
    with mock.patch("qflash.kernels.backend.record", wraps=record) as recorded:
        for seed in range(2):
            floating = torch.randn(197, 197, device=CUDA)
            got, expected = (qflash.int8_attention(*int8, floating, backend=backend) for backend in ("auto", "reference"))
            assert same_bits(got.values, expected.values), seed
    assert recorded.call_count == 1
    with pytest.raises(ValueError, match="output_scale"):
        qflash.int8_attention(*int8, output_scale=-1.0)
    with pytest.raises(TypeError, match="recipe"):
        qflash.int8_attention(*int8, recipe=[1])


@pytest.mark.parametrize(
    ("tokens", "head_dim", "recipe"),
    [(2000, 64, "default"), (1100, 128, "default"), (150, 160, "default"), (400, 64, "paper"), (700, 32, "default")],
)
@pytest.mark.parametrize("causal", [False, True])
def test_a_call_of_several_launches_is_repeated(tokens: int, head_dim: int, recipe: str, causal: bool) -> None:
    """Rows that one program does not hold: temporary tensors and descriptions for the copy engine are made anew."""
    from qflash import plan_cache

    plan_cache._plans.clear()
    options: dict[str, Any] = {"is_causal": causal, "recipe": recipe}
    for seed in range(3):
        inputs = inputs_on_gpu(2, 3, tokens, head_dim=head_dim, seed=seed)
        for given in (inputs, (inputs[0], inputs[1], inputs[1])):
            got = qflash.attention(*given, **options)
            assert same_bits(got, qflash.attention(*given, **options, backend="reference")), seed
        int8 = [qflash.quantize(x * (1 + seed)) for x in inputs]
        int8_got = qflash.int8_attention(*int8, **options)
        expected = qflash.int8_attention(*int8, **options, backend="reference")
        assert same_bits(int8_got.values, expected.values), seed
        assert same_bits(int8_got.scale, expected.scale), seed
        # in a graph, too: what a repeated call allocates there stays there
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = qflash.attention(*inputs, **options)
            also = qflash.int8_attention(*int8, **options)
        for _ in range(2):
            graph.replay()
        assert same_bits(captured, qflash.attention(*inputs, **options, backend="reference")), seed
        assert same_bits(also.values, expected.values), seed
    # PyTorch puts the paper's one scale of a whole tensor together
    assert count_calls(plan_cache._plans) == (1 if recipe == "paper" else 2)


@pytest.mark.parametrize("geometry", range(200, 212))
def test_reference_has_the_same_bits_on_cpu_and_gpu(geometry: int) -> None:
    case = dataclasses.replace(draw_case(geometry, GPU), batch=1, mask_dims=(1, True, True, True))
    on_gpu = reference.int8_attention(int8_call(*case.arguments(CUDA)))
    assert same_bits(on_gpu.cpu(), reference.int8_attention(int8_call(*case.arguments(torch.device("cpu")))))


@pytest.mark.parametrize("granularity", ["tensor", "head", "token", "channel"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_quantisation_has_the_reference_bits(dtype: torch.dtype, granularity: str) -> None:
    for seed, layout in enumerate(LAYOUTS):
        x = lay_out(make_inputs(2, 3, 300 + seed, head_dim=64, seed=seed, dtype=dtype)[1] * 3 + 1, layout)
        for center in (False, True):
            got = find_backend("triton", x.to(CUDA).device).quantize(x.to(CUDA), granularity, center)
            expected = find_backend("reference", x.device).quantize(x, granularity, center)
            assert all(same_bits(a.cpu(), b) for a, b in zip(got, expected, strict=True)), (layout, center)


@pytest.mark.parametrize("recipe", PRESETS)
def test_whole_call_has_the_bits_of_the_cpu(recipe: str) -> None:
    for inputs in (make_inputs(2, 6, 197, head_dim=64, dtype=torch.float16), outlier_inputs()):
        got = qflash.attention(*(x.to(CUDA) for x in inputs), recipe=recipe)
        assert same_bits(got.cpu(), qflash.attention(*inputs, recipe=recipe, backend="reference"))


def test_auto_is_triton() -> None:
    inputs = inputs_on_gpu(1, 2, 50)
    assert same_bits(qflash.attention(*inputs), qflash.attention(*inputs, backend="triton"))


def test_nan_reaches_the_output() -> None:
    for where in range(3):
        inputs = inputs_on_gpu(2, 2, 50)
        inputs[where][1, 0, 2, 3] = torch.nan
        out = qflash.attention(*inputs)
        assert bool(out[1, 0].isnan().any())
        assert not bool(out[0].isnan().any())
        tensors = quantize_all(inputs)
        assert bool(qflash.int8_attention(*tensors, out_dtype=torch.float16).isnan().all())  # type: ignore[union-attr]


def test_empty_dimensions() -> None:
    for shape in ((0, 2, 5, 6, 8), (2, 2, 0, 6, 8), (2, 2, 5, 0, 8), (2, 0, 5, 6, 8)):
        out = qflash.attention(*inputs_on_gpu(*shape))
        assert out.shape == (*shape[:3], 8)
        assert not bool(out.any())


# --- large batches ------------------------------------------------------------------------------------------

WINDOWS, IMAGES = 3, 21_846


@pytest.mark.parametrize("mask", ["none", "windows", "every window"])
def test_more_windows_than_a_grid_dimension(mask: str) -> None:
    query, key, value = inputs_on_gpu(WINDOWS * IMAGES, 1, 5, 7, 16)
    assert query.shape[0] > 65535
    inputs = [x.unflatten(0, (IMAGES, WINDOWS)) for x in (query, key, value)]
    generator = torch.Generator(CUDA).manual_seed(0)
    shape = (WINDOWS, 1, 5, 7) if mask == "windows" else (IMAGES, WINDOWS, 1, 5, 7)
    bias = None if mask == "none" else torch.randn(shape, generator=generator, device=CUDA)
    got = qflash.attention(*inputs, bias)
    assert same_bits(got, qflash.attention(*inputs, bias, backend="reference"))


@pytest.mark.parametrize("images", [16, 43, 100])
@pytest.mark.parametrize("biased", [False, True])
def test_many_windows_have_the_reference_bits(images: int, biased: bool) -> None:
    # the tiles depend on how many heads there are: 3 heads in 4 windows an image
    query, key, value = inputs_on_gpu(images * 4, 3, 49, head_dim=32)
    bias = torch.randn(4, 3, 49, 49, device=CUDA) if biased else None
    whole = None if bias is None else bias.repeat(images, 1, 1, 1)
    got = qflash.attention(query, key, value, whole)
    assert same_bits(got, qflash.attention(query, key, value, whole, backend="reference"))
    fixed = None if whole is None else qflash.quantize_bias(whole)
    for granularities in (("tensor",) * 3, ("token", "head", "channel")):
        int8 = [qflash.quantize(x, kind) for x, kind in zip((query, key, value), granularities, strict=True)]
        got, expected = (qflash.int8_attention(*int8, fixed, backend=backend) for backend in ("auto", "reference"))
        assert same_bits(got.values, expected.values), granularities


@pytest.mark.parametrize("granularity", ["head", "token", "channel"])
def test_more_heads_to_quantise_than_a_grid_dimension(granularity: str) -> None:
    x = inputs_on_gpu(70_000, 1, 3, head_dim=16)[0]
    got, expected = (qflash.quantize(x, granularity, backend=backend) for backend in ("triton", "reference"))
    assert same_bits(got.values, expected.values)
    assert same_bits(got.scale, expected.scale)


# --- nothing waits for the device ---------------------------------------------------------------------------


def integer_path(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    tensors = (qflash.quantize(query, "token"), qflash.quantize(key, "head"), qflash.quantize(value, "channel"))
    out = qflash.int8_attention(*tensors, output_scale=0.01)
    assert isinstance(out, qflash.QuantizedTensor)
    return out.dequantize()


def float_mask(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return qflash.attention(query, key, value, query.float() @ key.float().mT / 8)


CALLS: dict[str, Callable[..., torch.Tensor]] = {
    "default": lambda q, k, v: qflash.attention(q, k, v),
    "accurate": lambda q, k, v: qflash.attention(q, k, v, recipe="accurate"),
    "rotated": lambda q, k, v: qflash.attention(q, k, v, recipe=qflash.DEFAULT.replace(rotate=True)),
    "paper": lambda q, k, v: qflash.attention(q, k, v, recipe="paper"),
    "causal": lambda q, k, v: qflash.attention(q, k, v, is_causal=True),
    "float mask": float_mask,
    "integer path": integer_path,
}


@contextlib.contextmanager
def no_synchronisation() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_guard_notices_a_synchronisation() -> None:
    with pytest.raises(RuntimeError), no_synchronisation():
        torch.ones((), device=CUDA).item()


@pytest.mark.parametrize("name", CALLS)
def test_no_call_waits_for_the_device(name: str) -> None:
    inputs = inputs_on_gpu(2, 3, 197, head_dim=64)
    expected = CALLS[name](*inputs)
    with no_synchronisation():
        got = CALLS[name](*inputs)
    assert same_bits(got, expected)


@pytest.mark.parametrize("tokens", [197, 600])
@pytest.mark.parametrize("name", CALLS)
def test_captured_graph_replays_on_new_data(name: str, tokens: int) -> None:
    inputs = inputs_on_gpu(2, 3, tokens, head_dim=64)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        CALLS[name](*inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = CALLS[name](*inputs)
    for seed in (1, 2):
        fresh = inputs_on_gpu(2, 3, tokens, head_dim=64, seed=seed)
        for static, x in zip(inputs, fresh, strict=True):
            static.copy_(x)
        graph.replay()
        assert same_bits(out, CALLS[name](*fresh))


# --- PyTorch's compilers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["default", "accurate", "paper", "integer path"])
def test_compiled_without_a_graph_break_is_eager(name: str) -> None:
    torch._dynamo.reset()
    inputs = inputs_on_gpu(2, 3, 197, head_dim=64)
    compiled = torch.compile(CALLS[name], fullgraph=True)
    assert same_bits(compiled(*inputs), CALLS[name](*inputs))


def test_compiled_for_changing_shapes() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(CALLS["default"], fullgraph=True, dynamic=True)
    for shape in ((5, 3, 100, 120), (2, 3, 197, 64), (7, 3, 33, 300)):
        inputs = inputs_on_gpu(*shape)
        assert same_bits(compiled(*inputs), CALLS["default"](*inputs))


def test_compiled_with_cuda_graphs() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(CALLS["default"], fullgraph=True, mode="reduce-overhead")
    for seed in range(4):
        inputs = inputs_on_gpu(2, 3, 197, head_dim=64, seed=seed)
        torch.compiler.cudagraph_mark_step_begin()
        assert same_bits(compiled(*inputs).clone(), CALLS["default"](*inputs))


class Module(torch.nn.Module):
    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return qflash.attention(query, key, value)


def test_exported_program_is_eager() -> None:
    program = torch.export.export(Module(), inputs_on_gpu(2, 3, 197, head_dim=64))
    other = inputs_on_gpu(2, 3, 197, head_dim=64, seed=1)
    assert same_bits(program.module()(*other), qflash.attention(*other))


@pytest.mark.parametrize("sample", list(operator_samples(torch.device("cpu"), "reference")))
def test_operators_pass_pytorchs_checks(sample: str) -> None:
    arguments = operator_samples(CUDA, "triton")[sample]
    torch.library.opcheck(getattr(torch.ops.qflash, sample.split()[0]).default, arguments)


# --- packed sequences ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("recipe", PRESETS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_packed_sequences_have_the_bits_of_separate_calls(dtype: torch.dtype, recipe: str, causal: bool) -> None:
    queries, keys = [1, 0, 19, 300, 64, 3], [7, 0, 0, 140, 66, 1000]
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(sum(lengths), heads, 64, generator=generator).to(dtype)
        for lengths, heads in ((queries, 4), (keys, 2), (keys, 2))
    )
    lengths = [torch.tensor([0, *each]).cumsum(0).to(torch.int32) for each in (queries, keys)]
    longest = max(queries), max(keys)
    options = {"is_causal": causal, "enable_gqa": True, "recipe": recipe}
    expected = qflash.varlen_attention(query, key, value, *lengths, *longest, **options, backend="reference")
    there = [x.to(CUDA) for x in (query, key, value, *lengths)]
    qflash.varlen_attention(*there, *longest, **options)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = qflash.varlen_attention(*there, *longest, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert same_bits(got.cpu(), expected)
    # a call like those before, of other numbers
    others = [x.flip(0).contiguous() for x in (query, key, value)]
    expected = qflash.varlen_attention(*others, *lengths, *longest, **options, backend="reference")
    again = qflash.varlen_attention(*(x.to(CUDA) for x in others), *there[3:], *longest, **options)
    assert same_bits(again.cpu(), expected)
    x = torch.nested.nested_tensor_from_jagged(there[0], offsets=there[3]).transpose(1, 2)
    assert same_bits(
        qflash.attention(x, x, x, recipe=recipe).transpose(1, 2).values(),
        qflash.varlen_attention(there[0], there[0], there[0], there[3], there[3], longest[0], longest[0], recipe=recipe),
    )
