"""The compiled CPU kernels return the reference's bits; where they cannot be compiled the back end says why."""

from __future__ import annotations

import concurrent.futures
import errno
import functools
import math
import multiprocessing
import os
import pathlib
import platform
import select
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import cpu_driver
import qflash
from cpu_driver.matrix import LONG
from helpers import INTERPRETER, LAYOUTS, count_calls, draw_case, few, lay_out, make_inputs, move_far, same_bits, slow
from network_cases import draw_layer_norm, draw_linear, extremes
from qflash import backends, execution
from qflash.kernels.cpu import launch as cpu
from qflash.specification import fixed_point as fp
from qflash.specification import quantization, reference
from qflash.specification.attention_call import int8_call
from qflash.specification.recipe import PRESETS

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _needs_a_compiler(request: pytest.FixtureRequest) -> None:
    if "without" not in request.node.name and backends.cpu_missing():
        pytest.skip(str(backends.cpu_missing()))


@pytest.mark.parametrize("first", range(0, 600, 30))
def test_kernel_has_the_reference_bits(first: int) -> None:
    for number in range(first, first + 30):
        case = draw_case(number, INTERPRETER)
        arguments = case.arguments(CPU)
        assert same_bits(cpu.launch_attention(int8_call(*arguments)), reference.int8_attention(int8_call(*arguments))), case


@pytest.mark.parametrize("first", range(2000, 2040, 5))
def test_long_rows_have_the_reference_bits(first: int) -> None:
    cases = [draw_case(number, LONG) for number in range(first, first + 5)]
    assert any(case.keys > 512 and case.recipe.normalization == "two_pass" for case in cases)
    for case in cases:
        arguments = case.arguments(CPU)
        assert same_bits(cpu.launch_attention(int8_call(*arguments)), reference.int8_attention(int8_call(*arguments))), case


@pytest.mark.parametrize("octave", [-19, -20, -21])
def test_the_finest_output_scales_have_the_reference_bits(octave: int) -> None:
    """A key of weight 1 among 299 of 255, at scales for which the output's shift is 1, 0, and 0 because it cannot be less."""
    query, key = torch.full((1, 1, 2, 16), 127, dtype=torch.int8), torch.full((1, 1, 300, 16), 127, dtype=torch.int8)
    value = torch.zeros(1, 1, 300, 16, dtype=torch.int8)
    key[:, :, 0] = -59
    value[:, :, 0] = torch.arange(-8, 8)
    one = torch.ones(1, 1, 1, 1)
    eight_octaves = 8 * math.log(2) / ((127 + 59) * 127 * 16)
    arguments = query, one, key, one, value, one, None, False, eight_octaves, one * 2.0**octave, torch.int8, qflash.DEFAULT
    expected = reference.int8_attention(int8_call(*arguments))
    exact = value[:, :, :1] / (1 + 299 * 255) * 2.0 ** min(-octave, 20)
    assert float((expected - exact).abs().max()) < 1.1  # rounded down where the shift is 0
    assert same_bits(cpu.launch_attention(int8_call(*arguments)), expected)


@pytest.mark.parametrize("keys", [16_500, 33_000, 65_536, 140_000])
@pytest.mark.parametrize(("bits", "output"), [(7, "value_scale"), (8, "value_scale"), (8, "accumulator"), (15, "accumulator")])
def test_the_longest_rows_have_the_reference_bits(bits: int, output: str, keys: int) -> None:
    """Of all lengths of a row's sum."""
    generator = torch.Generator().manual_seed(keys)
    query, key, value = (
        torch.randint(-128, 128, (1, 1, tokens, channels), generator=generator).to(torch.int8)
        for tokens, channels in ((12, 2), (keys, 2), (keys, 40))
    )
    # sums next to whole multiples of the denominator, too
    value[..., :20] = torch.arange(-120, 120, 12)
    query[:, :, :6] = 0
    one = torch.ones(1, 1, 1, 1)
    recipe = qflash.DEFAULT.replace(probability_bits=bits, output=output)
    for dtype in (torch.int8, torch.float32):
        arguments = query, one, key, one, value, one, None, False, 1e-4, one / 3, dtype, recipe
        assert same_bits(cpu.launch_attention(int8_call(*arguments)), reference.int8_attention(int8_call(*arguments))), dtype


@pytest.mark.parametrize("sign", [-128, 127])
@pytest.mark.parametrize("recipe", ["default", "accurate", "paper"])
def test_the_largest_sums_have_the_reference_bits(recipe: str, sign: int) -> None:
    """Of rows so long that no 32 bits hold a sum."""
    keys = 2 * fp.SECTION_KEYS + 5
    query, key, value = (torch.full((1, 1, tokens, 2), sign, dtype=torch.int8) for tokens in (2, keys, keys))
    one = torch.ones(1, 1, 1, 1)
    for dtype in (torch.int8, torch.float32):
        choices = PRESETS[recipe].replace(key_block=256)
        arguments = query, one, key, one, value, one, None, False, 1.0, one, dtype, choices
        expected = reference.int8_attention(int8_call(*arguments))
        assert (expected - sign).abs().max() < 1e-4
        assert same_bits(cpu.launch_attention(int8_call(*arguments)), expected), dtype


def test_many_roundings_have_the_reference_bits() -> None:
    query, key, value = make_inputs(1, 1, 2000, 30, head_dim=16, value_dim=256)
    int8 = [qflash.quantize(x, kind) for x, kind in ((query, "token"), (key, "head"), (value, "channel"))]
    scale = int8[2].scale * (0.2 + torch.rand((1, 1, 1, 256), generator=torch.Generator().manual_seed(0)))
    got, expected = (qflash.int8_attention(*int8, output_scale=scale, backend=backend) for backend in ("cpu", "reference"))
    assert isinstance(got, qflash.QuantizedTensor) and isinstance(expected, qflash.QuantizedTensor)
    assert same_bits(got.values, expected.values)


@pytest.mark.parametrize("width", ["baseline", "avx2", "avx-vnni", "avx512", "avx512-vnni", "amx"])
@pytest.mark.slow
def test_other_vector_widths_have_the_reference_bits(
    width: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    known = pathlib.Path("/proc/cpuinfo").read_text() if pathlib.Path("/proc/cpuinfo").is_file() else ""
    named = {"avx2": "avx2", "avx-vnni": "avx_vnni", "amx": "amx_int8"}
    if named.get(width, "") not in ("", *known.split()):
        pytest.skip("this CPU has not these vectors")
    if width.startswith("avx512") and platform.machine() != "x86_64":
        pytest.skip("not this kind of CPU")
    # instructions that hardly a CPU has are written out in C
    written_out = ("-w", "-include", str(pathlib.Path(cpu_driver.__file__).with_name("vectors_in_c.h")), "-DIN_C_AVX512")
    haswell = ("-march=haswell", "-fopenmp")
    flags = {
        "baseline": (),
        "avx2": haswell,
        "avx-vnni": (*haswell, "-mavxvnni"),
        "avx512": written_out,
        "avx512-vnni": (*written_out, "-DIN_C_AVX512VNNI"),
        "amx": ("-march=cascadelake", "-mamx-tile", "-mamx-int8", "-fopenmp"),
    }
    monkeypatch.setattr(cpu, "_TRIES", (flags[width],))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library = cpu.load.__wrapped__()
    assert len(list((tmp_path / "qflash").iterdir())) == 1
    monkeypatch.setattr(cpu, "load", lambda: library)
    # those in C take many times longer
    some = slice(None, None, 5 if width.startswith("avx512") else 1)
    for number in range(3000, 3120)[some]:
        case = draw_case(number, INTERPRETER)
        arguments = case.arguments(CPU)
        assert same_bits(cpu.launch_attention(int8_call(*arguments)), reference.int8_attention(int8_call(*arguments))), case
    for layer in [*map(draw_linear, range(60)), *map(draw_layer_norm, range(30)), *extremes()][some]:
        assert same_bits(layer.run("cpu"), layer.run("reference")), layer


@pytest.mark.parametrize("recipe", PRESETS)
def test_threads_leave_the_bits_alone(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_inputs(2, 3, 130, 200, head_dim=48)
    expected = qflash.attention(*inputs, recipe=recipe, backend="reference")
    for threads in (1, 2, 5, 64):
        monkeypatch.setattr(cpu, "threads_for", lambda work, threads=threads: threads)
        assert same_bits(qflash.attention(*inputs, recipe=recipe, backend="cpu"), expected), threads


@pytest.fixture
def one_thread_of_pytorch() -> Iterator[None]:
    """PyTorch itself waits in a forked process for threads that only the other process has, if it had any."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread_of_pytorch")
def test_a_forked_process_computes_on(monkeypatch: pytest.MonkeyPatch, plans: dict[object, object]) -> None:
    """GCC's OpenMP would wait there for threads that only the other process has."""
    monkeypatch.setattr(cpu, "threads_for", lambda work: 3)
    inputs, layers = make_inputs(2, 3, 65, head_dim=16), (draw_linear(1), draw_layer_norm(1))
    packed, lengths = [x[0].transpose(0, 1) for x in inputs], torch.tensor([0, 20, 65], dtype=torch.int32)

    def outputs() -> list[torch.Tensor]:
        attended = [qflash.attention(*inputs, torch.zeros(65, 65), recipe="accurate"), qflash.attention(*inputs)]
        attended.append(qflash.varlen_attention(*packed, lengths, lengths, 45, 45))
        return [*attended, *(layer.run("cpu") for layer in layers)]

    outputs()
    expected = outputs()
    assert plans

    def compare() -> None:
        assert all(same_bits(got, wanted) for got, wanted in zip(outputs(), expected, strict=True))

    process = multiprocessing.get_context("fork").Process(target=compare)
    process.start()
    process.join(timeout=300)  # long enough for any machine, and only a failure takes that
    process.kill()
    process.join()
    assert process.exitcode == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_given_scales_and_middles_have_the_reference_bits(layout: str) -> None:
    generator = torch.Generator().manual_seed(LAYOUTS.index(layout))
    x = torch.randn(3, 4, 19, 24, generator=generator) * 3
    x[0, 0, 0, :6] = torch.tensor([math.nan, math.inf, -math.inf, 3e38, -3e38, 0.0])
    steps = torch.rand(4, 1, 24, generator=generator) * 0.05 + 0.01
    # those that are not positive and finite are refused where they are looked at, which is not everywhere
    steps[2, 0, :6] = torch.tensor([math.nan, 2.0**-126, 1e30, 0.0, -0.01, math.inf])
    middle = torch.randn(4, 1, 24, generator=generator)
    # ties, and what lies just inside and outside of the ends
    x[1, 1, :12, 0] = steps[1, 0, 0] * torch.tensor([0.5, 1.5, 2.5, -0.5, 126.5, 127.5, 127.4, -127.5, -128.5, -129, 130, 1e6])
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for scale in (steps, steps[:1], steps[..., 4:5], steps[0, 0, 5], steps[0, :, 5:6]):
            for center in (None, middle, middle[..., :1]):
                given = lay_out(x.to(dtype), layout)
                got, expected = (
                    execution.quantize_with_scale(given, scale, backend, center) for backend in ("cpu", "reference")
                )
                assert same_bits(got, expected), (dtype, tuple(scale.shape), center is None)
    windows = x.unflatten(0, (1, 3))
    assert same_bits(*(execution.quantize_with_scale(windows, steps, backend, middle) for backend in ("cpu", "reference")))
    tokens = torch.rand(19, 1, generator=generator) + 0.1
    assert same_bits(*(execution.quantize_with_scale(x, tokens, backend) for backend in ("cpu", "reference")))


def quantize_both(x: torch.Tensor, granularity: str, center: bool) -> tuple[torch.Tensor, ...]:
    """Return values and scale of the compiled kernel, then those of the specification."""
    y = quantization.center_channels(x) if center else x
    scale = quantization.scale_from_amplitude(quantization.amplitude(y, granularity))
    return (*cpu.launch_quantize(x, granularity, center), quantization.quantize_values(y, scale), scale)


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("granularity", quantization.GRANULARITIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_quantisation_has_the_reference_bits(layout: str, granularity: str, center: bool) -> None:
    for number, dtype in enumerate((torch.float16, torch.bfloat16, torch.float32)):
        for amplitude in (1e-42, 1e-3, 1.0, 1e4):
            x = make_inputs(2, 3, 37, head_dim=20, seed=number)[0] * amplitude
            values, scale, expected, expected_scale = quantize_both(lay_out(x.to(dtype), layout), granularity, center)
            assert same_bits(values, expected) and same_bits(scale, expected_scale), (dtype, amplitude)
    ties = torch.arange(-254, 254).view(1, 2, 2, 127) / 2
    ties[..., 0] = 127
    values, scale, expected, expected_scale = quantize_both(ties, granularity, center)
    assert same_bits(values, expected) and same_bits(scale, expected_scale)


@pytest.mark.parametrize("granularity", quantization.GRANULARITIES)
@pytest.mark.parametrize("channels", [32, 64, 128])
def test_quantisation_of_usual_heads_has_the_reference_bits(channels: int, granularity: str) -> None:
    x = make_inputs(2, 3, 37, head_dim=channels)[0]
    for center in (False, True):
        values, scale, expected, expected_scale = quantize_both(x, granularity, center)
        assert same_bits(values, expected) and same_bits(scale, expected_scale), center


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("granularity", quantization.GRANULARITIES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3e38, 0.0])
def test_quantisation_agrees_on_what_is_not_finite(bad: float, granularity: str, center: bool) -> None:
    x = make_inputs(2, 2, 9, head_dim=20)[0]
    x[1, 0, 3, 7] = bad
    x[0, 1] = bad
    x[0, 0, 2, 1] = -bad
    values, scale, expected, expected_scale = quantize_both(x, granularity, center)
    assert same_bits(values, expected) and same_bits(scale, expected_scale)


@pytest.mark.parametrize("recipe", PRESETS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_whole_call_has_the_reference_bits(layout: str, recipe: str) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        inputs = make_inputs(4, 6, 33, 70, head_dim=20, value_dim=40, key_heads=2, dtype=dtype, layout=layout)
        generator = torch.Generator().manual_seed(0)
        bias = torch.randn((4, 1, 33, 70), generator=generator)
        for options in ({"is_causal": True}, {"attn_mask": bias}, {"attn_mask": bias > 0}):
            got = qflash.attention(*inputs, **options, enable_gqa=True, recipe=recipe, backend="cpu")
            expected = qflash.attention(*inputs, **options, enable_gqa=True, recipe=recipe, backend="reference")
            assert same_bits(got, expected), (dtype, options)


@pytest.mark.parametrize("where", [0, 1, 2])
@pytest.mark.parametrize("recipe", PRESETS)
def test_what_is_not_finite_reaches_the_same_outputs(recipe: str, where: int) -> None:
    inputs = make_inputs(2, 2, 9, 33, head_dim=16)
    inputs[where][1, 0, 3, 5] = math.nan
    expected = qflash.attention(*inputs, recipe=recipe, backend="reference")
    assert expected.isnan().any()
    assert same_bits(qflash.attention(*inputs, recipe=recipe, backend="cpu"), expected)


@pytest.mark.parametrize("recipe", PRESETS)
@pytest.mark.parametrize("layout", few(LAYOUTS))
def test_a_repeated_call_has_the_reference_bits(layout: str, recipe: str, plans: dict[object, object]) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        kept = len(plans)
        for seed in range(3):
            inputs = make_inputs(2, 4, 70, 70, head_dim=20, value_dim=40, key_heads=2, dtype=dtype, layout=layout, seed=seed)
            mask = torch.rand((2, 1, 70, 70), generator=torch.Generator().manual_seed(seed)) > 0.3
            for options in ({}, {"is_causal": True}, {"attn_mask": mask}, {"attn_mask": mask[:1] * 1.0}):
                got = qflash.attention(*inputs, **options, enable_gqa=True, recipe=recipe)
                expected = qflash.attention(*inputs, **options, enable_gqa=True, recipe=recipe, backend="reference")
                assert same_bits(got, expected), (dtype, seed, options)
        # float masks go the whole way, and so does what PyTorch prepares; operators keep what they were called for, too
        assert len(plans) - kept == (0 if recipe == "accurate" else 6)


@pytest.mark.usefixtures("plans")
def test_that_a_call_cannot_be_repeated_is_found_out_once() -> None:
    with mock.patch.object(cpu, "prepare_attention", wraps=cpu.prepare_attention) as prepare:
        for keys in (20, 21):
            for seed in range(3):
                inputs = make_inputs(1, 2, 9, keys, head_dim=16, seed=seed)
                mask = torch.randn(9, keys, generator=torch.Generator().manual_seed(seed))
                assert same_bits(qflash.attention(*inputs, mask), qflash.attention(*inputs, mask, backend="reference"))
    assert prepare.call_count == 2


def test_a_repeated_call_of_other_ranks_has_the_reference_bits(plans: dict[object, object]) -> None:
    for shape in ((9, 16), (3, 9, 16), (2, 2, 3, 9, 16)):
        for dtype in (torch.float16, torch.float32):
            for seed in range(2):
                generator = torch.Generator().manual_seed(seed)
                inputs = [torch.randn(shape, generator=generator).to(dtype) for _ in range(3)]
                assert same_bits(qflash.attention(*inputs), qflash.attention(*inputs, backend="reference"))
                sliced = [torch.randn((*shape[:-1], 24), generator=generator).to(dtype)[..., 8:] for _ in range(3)]
                assert same_bits(qflash.attention(*sliced), qflash.attention(*sliced, backend="reference"))
    assert len(plans) >= 6
    inputs[0].requires_grad_()
    with pytest.raises(NotImplementedError):
        qflash.attention(*inputs).sum().backward()


def test_a_repeated_int8_call_has_the_reference_bits(plans: dict[object, object]) -> None:
    bias = qflash.quantize_bias(torch.randn(1, 4, 33, 33))
    ways = (
        {}, {"output_scale": 0.02}, {"output_scale": 0.03}, {"out_dtype": torch.float16}, {"attn_mask": bias},
        {"is_causal": True, "recipe": "accurate"}, {"output_scale": torch.full((1, 4, 1, 16), 0.02)},
    )  # fmt: skip
    for seed in range(3):
        for granularities in (("tensor",) * 3, ("token", "head", "channel")):
            inputs = make_inputs(2, 4, 33, head_dim=16, seed=seed)
            int8 = [qflash.quantize(x * (1 + seed), kind) for x, kind in zip(inputs, granularities, strict=True)]
            for way in ways:
                got, expected = (qflash.int8_attention(*int8, **way, backend=backend) for backend in ("auto", "reference"))
                if isinstance(expected, torch.Tensor):
                    assert isinstance(got, torch.Tensor) and same_bits(got, expected), (seed, granularities, way)
                else:
                    assert same_bits(got.values, expected.values), (seed, granularities, way)
                    assert same_bits(got.scale, expected.scale)
    # an output scale that is a tensor is looked at in every call
    assert count_calls(plans) == 2 * (len(ways) - 1)
    with pytest.raises(ValueError, match="output_scale"):
        qflash.int8_attention(*int8, output_scale=torch.full((1, 4, 1, 16), -0.02))


@pytest.mark.usefixtures("plans")
def test_repeated_calls_side_by_side_do_not_mix() -> None:
    inputs = [make_inputs(2, 4, 65, head_dim=32, seed=seed) for seed in range(8)]
    expected = [qflash.attention(*one, backend="reference") for one in inputs]
    qflash.attention(*inputs[0])
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            assert all(map(same_bits, pool.map(lambda one: qflash.attention(*one), inputs), expected))


def test_tensors_that_have_to_be_copied_first_are_copied_in_every_call() -> None:
    """Leading dimensions that are no single one, of the tensors or of the mask."""
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        apart = [torch.randn((3, 2, 2, 9, 16), generator=generator).transpose(0, 1) for _ in range(3)]
        together = [x.contiguous() for x in apart]
        hidden = torch.rand((2, 1, 1, 9, 9), generator=generator) > 0.3
        for inputs, mask in ((apart, None), ((together[0], apart[1], together[2]), None), (together, hidden)):
            expected = qflash.attention(*inputs, mask, backend="reference")
            assert same_bits(qflash.attention(*inputs, mask), expected), seed
            int8 = [qflash.quantize(x, "head", backend="reference") for x in inputs]
            for scale in (None, 0.007):
                ways = (qflash.int8_attention(*int8, mask, output_scale=scale, backend=name) for name in ("auto", "reference"))
                got, wanted = (way.values for way in ways if isinstance(way, qflash.QuantizedTensor))
                assert same_bits(got, wanted), (seed, scale)


@pytest.mark.parametrize("granularity", ["tensor", "head", "token", "channel"])
def test_nan_of_any_payload_has_the_reference_bits(granularity: str) -> None:
    """Its low bits must not become values."""
    x = torch.randn(2, 2, 40, 24, generator=torch.Generator().manual_seed(0))
    x.view(torch.int32)[0, 0, 3, :8] = torch.tensor(
        [0x7FC00001, 0x7F800001, 0x7FFFFFFF, -1, 0x7FC00055, -0x3FFFFF, 0x7FC0007F, 0]
    )
    got, expected = (qflash.quantize(x, granularity, backend=name) for name in ("cpu", "reference"))
    assert same_bits(got.values, expected.values)
    assert same_bits(got.scale.isnan(), expected.scale.isnan())


@pytest.mark.parametrize("keys", [17141, 17248, 17457, 60000])
def test_averages_just_below_an_integer_are_floored(keys: int) -> None:
    """With three of these row sums the reciprocal's quotient is above the exact one."""

    def row(numbers: list[int], scale: float) -> qflash.QuantizedTensor:
        return qflash.QuantizedTensor(torch.tensor(numbers, dtype=torch.int8).view(1, 1, -1, 1), torch.tensor(scale))

    # weights of 127, and one of 1
    tensors = row([127], 1 / 127), row([0] * keys + [-90], 1.0), row([127] * keys + [126], 1.0)
    recipe = qflash.PAPER.replace(normalization="two_pass")
    for backend in ("cpu", "reference"):
        out = qflash.int8_attention(*tensors, scale=0.05, out_dtype=torch.float32, recipe=recipe, backend=backend)
        assert float(out) == 126.0


@pytest.mark.parametrize("most", [fp.BIAS_LIMIT, fp.BIAS_LIMIT - 1, fp.BIAS_LIMIT + 1])
def test_a_fixed_point_bias_about_its_limit_has_the_reference_bits(most: int) -> None:
    """What is above stands for infinity."""
    inputs = make_inputs(1, 2, 5, 40, 16)
    int8 = [qflash.quantize(x, "head", backend="reference") for x in inputs]
    bias = torch.full((1, 1, 5, 40), most, dtype=torch.int32)
    got, expected = (qflash.int8_attention(*int8, bias, out_dtype=torch.float32, backend=name) for name in ("cpu", "reference"))
    assert same_bits(got, expected)


@pytest.mark.parametrize("octaves", [300.0, 700.0, 1100.0, 1500.0, 1900.0, 3000.0])
def test_multipliers_about_their_bound_have_the_reference_bits(octaves: float) -> None:
    """Of scores a step of which is so many octaves, made up for by a bias: where a multiplier has no fraction bits left."""
    query = qflash.QuantizedTensor(torch.ones(1, 1, 1, 16, dtype=torch.int8), torch.tensor(1.0))
    # scores of 0, 1 and 2
    key = torch.zeros(1, 1, 3, 16, dtype=torch.int8)
    key[0, 0, 1, 0], key[0, 0, 2, :2] = 1, 1
    value = qflash.QuantizedTensor(torch.tensor([-100, 20, 90], dtype=torch.int8).view(1, 1, 3, 1), torch.tensor(1.0))
    int8 = query, qflash.QuantizedTensor(key, torch.tensor(1.0)), value
    seen = set()
    for shift in torch.linspace(-1.0, 1.0, 9):
        bias = torch.tensor([0.0, -octaves, -2 * octaves + float(shift)]).mul(65536).round().to(torch.int32).view(1, 1, 1, 3)
        scale = octaves * math.log(2)
        got, expected = (
            qflash.int8_attention(*int8, bias, scale=scale, out_dtype=torch.float32, backend=name)
            for name in ("cpu", "reference")
        )
        assert same_bits(got, expected)
        seen.add(float(expected))
    assert len(seen) > 1 or octaves > 1792


@pytest.mark.parametrize("octaves", [0.7, 1.3, 2.6, 3.3, 5.1, 7.9, 11.0])
def test_large_steps_of_a_score_are_released_like_the_reference(octaves: float) -> None:
    """Multipliers with few fraction bits, and tiles of keys whose maxima are a step of a score apart."""
    values = torch.full((1, 1, 200, 1), -100, dtype=torch.int8)
    values[:, :, 90:] = 70
    # most channels are zero: they only make the multiplier's bound small
    query, key = torch.zeros(1, 1, 1, 256, dtype=torch.int8), torch.zeros(1, 1, 200, 256, dtype=torch.int8)
    query[..., 0], key[:, :, 90:, 0], key[:, :, 170, 0] = 1, 1, 2
    one = torch.tensor(1.0)
    int8 = [qflash.QuantizedTensor(x, one) for x in (query, key, values)]
    recipe = qflash.PAPER.replace(normalization="online")
    got, expected = (
        qflash.int8_attention(*int8, scale=octaves * math.log(2), out_dtype=torch.float32, recipe=recipe, backend=name)
        for name in ("cpu", "reference")
    )
    assert same_bits(got, expected)


@pytest.mark.parametrize("channel", [0, 1, 16, 38])
@pytest.mark.parametrize("granularity", ["head", "channel"])
def test_nan_in_one_channel_has_the_reference_bits(granularity: str, channel: int) -> None:
    x = torch.randn(1, 2, 40, 39, generator=torch.Generator().manual_seed(0))
    x[0, 1, 7, channel] = math.nan
    got, expected = (qflash.quantize(x, granularity, center=True, backend=name) for name in ("cpu", "reference"))
    assert same_bits(got.values, expected.values) and same_bits(got.scale, expected.scale)
    assert got.offset is not None and expected.offset is not None and same_bits(got.offset, expected.offset)


@pytest.mark.parametrize("zero", ["query", "key", "value"])
@pytest.mark.parametrize("granularity", ["tensor", "token"])
def test_scales_of_zero_have_the_reference_bits(granularity: str, zero: str) -> None:
    """They are refused where a tensor is made, but may be written later."""
    tensors = {}
    for name, x in zip(("query", "key", "value"), make_inputs(1, 2, 5, 40, 16), strict=True):
        tensors[name] = qflash.quantize(x, "tensor" if name == "value" else granularity, backend="reference")
    tensors[zero].scale.zero_()
    got, expected = (
        qflash.int8_attention(*tensors.values(), out_dtype=torch.float32, backend=name) for name in ("cpu", "reference")
    )
    assert same_bits(got, expected) and bool(expected.isnan().all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_bias_has_the_reference_bits(dtype: torch.dtype) -> None:
    """Rows near 0 and far from it, of every length, with what is not finite; with one thread and with several."""
    marks = [math.inf, -math.inf, math.nan, -math.nan, torch.finfo(dtype).max, torch.finfo(dtype).min]
    generator = torch.Generator().manual_seed(0)
    shapes = [(), (40,), (3, 1), (2, 1, 7, 17), (1, 6, 49, 49), (2, 2, 70, 131), (0, 5), (5, 0)]
    for number in range(40):
        shape = shapes[number % len(shapes)]
        bias = torch.randn(shape, generator=generator) * 10.0 ** (number % 7 - 2)
        if number % 3:
            bias = move_far(bias, generator) if len(shape) > 1 and 0 not in shape else bias + 5000.0
        for mark in marks[: number % (len(marks) + 1)]:
            bias = torch.where(torch.rand(shape, generator=generator) < 0.03, torch.tensor(mark), bias)
        for x in (
            (bias.to(dtype), bias.to(dtype).T if len(shape) == 2 else bias.to(dtype)[..., :1].expand(shape))
            if shape
            else (bias,)
        ):
            fixed = cpu.launch_quantize_bias(x)
            assert fixed.is_contiguous() and same_bits(fixed, quantization.bias_to_fixed(x)), number


def _float_output(*inputs: torch.Tensor) -> torch.Tensor:
    out = qflash.int8_attention(*(qflash.quantize(x, "head") for x in inputs), out_dtype=torch.float32)
    assert isinstance(out, torch.Tensor)
    return out


CALLS = {"attention": qflash.attention, "int8_attention": _float_output}


class _DoublingOperators(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        return 2 * out if function in (torch.ops.qflash.attention.default, torch.ops.qflash.int8_attention.default) else out


class _DoublingFunctions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        return 2 * out if function in (qflash.attention, qflash.int8_attention) else out


@pytest.mark.parametrize("mode", [_DoublingOperators, _DoublingFunctions])
@pytest.mark.parametrize("name", CALLS)
def test_modes_have_their_say_in_a_repeated_call(name: str, mode: type, plans: dict[object, object]) -> None:
    inputs, call = make_inputs(2, 2, 9, 12, head_dim=16), CALLS[name]
    with mode():
        first = call(*inputs)
    expected = call(*inputs)
    assert plans
    assert same_bits(first, 2 * expected)
    with mode():
        assert same_bits(call(*inputs), 2 * expected)
    assert same_bits(call(*inputs), expected)


class _Named(torch.Tensor):
    """Operators of such tensors return such tensors."""


@pytest.mark.parametrize("where", [0, 1, 2])
def test_subclasses_have_their_say_in_a_repeated_call(where: int, plans: dict[object, object]) -> None:
    inputs = list(make_inputs(2, 2, 9, 12, head_dim=16))
    expected = qflash.attention(*inputs)
    assert plans
    inputs[where] = inputs[where].as_subclass(_Named)
    for _ in range(2):
        got = qflash.attention(*inputs)
        assert type(got) is _Named and same_bits(got.as_subclass(torch.Tensor), expected)


@pytest.mark.filterwarnings("ignore:.*batching rule")
@pytest.mark.parametrize("transform", ["vmap", "functionalize", "compile"])
@pytest.mark.parametrize("name", CALLS)
def test_transforms_of_a_call_that_was_made_before(name: str, transform: str, plans: dict[object, object]) -> None:
    inputs, call = make_inputs(2, 2, 9, 12, head_dim=16, seed=1), CALLS[name]
    expected = [torch.stack([call(*(x[i] for x in one)) for i in range(2)]) for one in (make_inputs(2, 2, 9, 12, 16), inputs)]
    assert same_bits(call(*inputs), expected[1])
    assert plans
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    if transform == "compile":
        torch._dynamo.reset()
        transformed = torch.compile(call, fullgraph=True, backend=keep)
    else:
        transformed = getattr(torch.func, transform)(call)
    assert same_bits(transformed(*inputs), expected[1])
    assert same_bits(transformed(*make_inputs(2, 2, 9, 12, 16)), expected[0])
    assert all(f"qflash.{name}" in graph.code for graph in graphs) and len(graphs) == (transform == "compile")


def test_auto_is_the_compiled_kernel_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert backends.resolve_backend("auto", CPU) == "cpu"
    called: list[str] = []
    monkeypatch.setattr(reference, "int8_attention", lambda *_: called.append("reference"))
    qflash.attention(*make_inputs(1, 1, 5))
    assert not called
    with pytest.raises(ValueError, match="not on cuda"):
        backends.resolve_backend("cpu", torch.device("cuda"))


@pytest.fixture
def uncached(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, plans: dict[object, object]) -> None:
    """A machine that has compiled nothing yet, for this test only."""
    monkeypatch.setattr(cpu, "load", cpu.load.__wrapped__)
    monkeypatch.setattr(backends, "cpu_missing", backends.cpu_missing.__wrapped__)
    backends._warn_of_reference.cache_clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.skipif(platform.system() != "Linux", reason="limits of a process's memory are Linux's")
def test_a_call_that_memory_runs_out_in_says_so() -> None:
    program = pathlib.Path(__file__).with_name("out_of_memory.py")
    done = subprocess.run([sys.executable, program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = [line.split(" ", 1) for line in done.stdout.splitlines()]
    assert [name for name, _ in said] == ["int8_attention"] * 2 + ["attention"] * 2 + ["int8_linear"] * 2
    assert all(words.startswith("not enough memory ") for _, words in said)


@pytest.mark.usefixtures("uncached")
def test_without_a_compiler_auto_is_the_reference(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.warns(RuntimeWarning, match="reference here.*no C compiler was found") as warned:
        assert [backends.resolve_backend("auto", CPU) for _ in range(2)] == ["reference"] * 2
    assert len(warned) == 1
    assert backends.resolve_backend("reference", CPU) == "reference"
    inputs = make_inputs(1, 1, 5)
    assert same_bits(qflash.attention(*inputs), qflash.attention(*inputs, backend="reference"))
    with pytest.raises(ValueError, match="no C compiler"):
        qflash.attention(*inputs, backend="cpu")
    with pytest.raises(ValueError, match="no C compiler"):
        qflash.quantize(inputs[0], backend="cpu")


@pytest.mark.usefixtures("uncached")
def test_without_a_working_compiler_its_words_are_passed_on(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    broken = tmp_path / "broken-cc"
    broken.write_text("#!/bin/sh\necho 'fatal error: limits of taste exceeded' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    assert "limits of taste" in str(backends.cpu_missing())
    assert not list((tmp_path / "cache" / "qflash").iterdir())


def libraries(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted((folder / "cache" / "qflash").glob("cpu-*.so"))


@functools.cache
def compiled() -> dict[tuple[str, ...], bytes]:
    """Libraries by the command that made them, without its paths."""
    return {}


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[pathlib.Path]:
    """The folders that something was compiled into: a compiler runs once, for a second; what it makes is tested elsewhere."""
    into: list[pathlib.Path] = []
    build, run = cpu._build, cpu._run

    def run_once(command: list[str]) -> tuple[int, str]:
        made = pathlib.Path(command[command.index("-o") + 1])
        about = (command[0], *(word for word in command[1:] if not word.startswith(os.sep)))
        if about in compiled():
            made.write_bytes(compiled()[about])
            return 0, ""
        status, said = run(command)
        if status == 0 and made.is_file():
            compiled()[about] = made.read_bytes()
        return status, said

    monkeypatch.setattr(cpu, "_run", run_once)
    monkeypatch.setattr(cpu, "_TRIES", (("-O0",),))
    monkeypatch.setattr(cpu, "_build", lambda folder, *rest: into.append(folder) or build(folder, *rest))
    return into


def load_in_processes(count: int) -> list[int | None]:
    """Load the library in new processes, which a bad one may end, all at once; return their exit statuses."""
    processes = [multiprocessing.get_context("fork").Process(target=cpu.load) for _ in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return [process.exitcode for process in processes]


@pytest.mark.usefixtures("uncached")
@pytest.mark.parametrize("damage", ["truncated", "garbage", "empty", "another's bytes"])
@pytest.mark.slow
def test_a_damaged_library_is_compiled_again(damage: str, tmp_path: pathlib.Path, compilations: list[pathlib.Path]) -> None:
    cpu.load()
    cpu.load()
    assert len(compilations) == 1
    (path,) = libraries(tmp_path)
    whole = path.read_bytes()
    # another file: the process of this test has the library's own in its memory
    path.unlink()
    path.write_bytes({"truncated": whole[:8192], "garbage": b"no library", "empty": b""}.get(damage, whole + b"\0"))
    path.chmod(0o700)
    assert load_in_processes(1) == [0]
    assert [one.read_bytes() for one in libraries(tmp_path)] == [whole]


@pytest.mark.usefixtures("uncached")
@pytest.mark.skipif(not hasattr(os, "getuid"), reason="no owners and no modes here")
def test_a_library_that_others_can_have_written_is_compiled_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, compilations: list[pathlib.Path]
) -> None:
    for mask in (0o000, 0o002, 0o077):
        before = os.umask(mask)
        try:
            monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / str(mask) / "cache"))
            cpu.load()
        finally:
            os.umask(before)
        (path,) = libraries(tmp_path / str(mask))
        assert [stat.S_IMODE(x.stat().st_mode) for x in (path.parent, path)] == [0o700, 0o700]
    for mode in (0o720, 0o702):
        compilations.clear()
        path.chmod(mode)
        cpu.load()
        assert len(compilations) == 1 and stat.S_IMODE(path.stat().st_mode) == 0o700
    if os.getuid() == 0:
        os.chown(path, 12345, -1)
        compilations.clear()
        cpu.load()
        assert len(compilations) == 1 and path.stat().st_uid == 0


@pytest.mark.usefixtures("uncached")
@pytest.mark.skipif(not hasattr(os, "getuid"), reason="no owners and no modes here")
@pytest.mark.parametrize("fault", ["group", slow("all"), "owner", "a file"])
def test_a_folder_that_others_can_write_is_not_used(
    fault: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, compilations: list[pathlib.Path]
) -> None:
    folder = tmp_path / "cache" / "qflash"
    cpu.load()
    (kept,) = libraries(tmp_path)
    if fault == "owner":
        if os.getuid() != 0:
            pytest.skip("only root can give a folder away")
        os.chown(folder, 12345, -1)
    elif fault == "a file":
        monkeypatch.setenv("XDG_CACHE_HOME", str(kept))
    else:
        folder.chmod(0o770 if fault == "group" else 0o707)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.warns(RuntimeWarning, match="for this process alone"):
        library = cpu.load()
    assert library.qflash_attention
    assert compilations[0] == folder and compilations[1].parent == tmp_path and not compilations[1].exists()
    assert libraries(tmp_path) == [kept]


@pytest.mark.usefixtures("uncached")
@pytest.mark.parametrize("fault", ["read-only", "full", "full for the compiler"])
def test_a_folder_that_cannot_be_written_to_is_not_used(
    fault: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, compilations: list[pathlib.Path]
) -> None:
    folder = tmp_path / "cache" / "qflash"
    number = errno.EROFS if fault == "read-only" else errno.ENOSPC
    wrapper, compiler = tmp_path / "cc", cpu._compiler()[0]
    wrapper.write_text(f'#!/bin/sh\ncase "$*" in *"{folder}"*) exit 1;; esac\nexec "{compiler}" "$@"\n')
    wrapper.chmod(0o755)
    if fault == "full for the compiler":
        monkeypatch.setenv("CC", str(wrapper))

    def refuse(owner: object, name: str) -> None:
        does = getattr(owner, name)

        def stub(path: pathlib.Path | str, *rest: object, **options: object) -> object:
            if str(path).startswith(str(folder)):
                raise OSError(number, os.strerror(number), str(path))
            return does(path, *rest, **options)

        monkeypatch.setattr(owner, name, stub)

    if fault == "read-only":
        refuse(pathlib.Path, "mkdir")
    else:
        refuse(pathlib.Path, "write_text" if fault == "full" else "write_bytes")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.warns(RuntimeWarning, match=f"for this process alone.*{os.strerror(number)}"):
        assert cpu.load().qflash_attention
    assert not libraries(tmp_path)
    assert [into.parent == tmp_path for into in compilations] == ([True] if fault == "read-only" else [False, True])


@pytest.mark.usefixtures("uncached", "compilations")
def test_cpus_that_share_a_folder_have_libraries_of_their_own(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """Machine code for one may be none for another."""
    info = "processor : 0\nmodel name : {}\ncpu MHz : {}\nflags : sse2 {}\n"
    read_text = pathlib.Path.read_text
    found = set()
    for model, clock, flags in (("A", 1, "avx2"), ("A", 2, "avx2"), ("A", 1, "avx2 avx512bw"), ("B", 1, "avx2")):
        text = info.format(model, clock, flags)
        monkeypatch.setattr(
            pathlib.Path,
            "read_text",
            lambda self, *rest, text=text, **options: (
                text if self == pathlib.Path("/proc/cpuinfo") else read_text(self, *rest, **options)
            ),
        )
        cpu.load()
        found.add(tuple(path.name for path in libraries(tmp_path)))
    assert sorted(map(len, found)) == [1, 2, 3]


@pytest.mark.usefixtures("uncached")
@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_compiler_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """And what it started, as compilers start others. The time is up when it holds the pipe, on a machine of any speed."""
    pipe, hanging = tmp_path / "pipe", tmp_path / "hanging-cc"
    os.mkfifo(pipe)
    hanging.write_text(f'#!/bin/sh\n( exec > "{pipe}"; exec sleep 1000000 ) &\nwait\n')
    hanging.chmod(0o755)
    monkeypatch.setenv("CC", str(hanging))
    readers: list[int] = []

    def communicate(process: subprocess.Popen[str], timeout: float) -> tuple[str, str]:
        assert timeout == cpu._COMPILER_SECONDS
        readers.append(os.open(pipe, os.O_RDONLY))
        raise subprocess.TimeoutExpired(process.args, timeout)

    monkeypatch.setattr(subprocess.Popen, "communicate", communicate)
    reason = backends.cpu_missing()
    assert reason is not None and "hanging-cc did not end within" in reason
    (reader,) = readers
    # its end is read when nobody can write any more
    ready, _, _ = select.select([reader], [], [], 300)
    assert ready and os.read(reader, 1) == b""
    os.close(reader)
    assert not list((tmp_path / "cache" / "qflash").iterdir())


@pytest.mark.usefixtures("uncached", "compilations")
def test_without_any_folder_the_reason_is_given(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    blocked = tmp_path / "a file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))

    def no_folder() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", no_folder)
    reason = backends.cpu_missing()
    assert reason is not None and "No usable temporary directory" in reason and "a file" in reason


@pytest.mark.usefixtures("uncached", "compilations")
def test_processes_that_start_together_get_the_same_library(tmp_path: pathlib.Path) -> None:
    assert load_in_processes(4) == [0] * 4
    assert len(libraries(tmp_path)) == 1
    assert len(list((tmp_path / "cache" / "qflash").iterdir())) == 1


@pytest.mark.usefixtures("uncached")
def test_every_word_of_cc_is_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, compilations: list[pathlib.Path]
) -> None:
    wrapper = tmp_path / "a wrapper"
    wrapper.write_text(f'#!/bin/sh\nprintf "%s|" "$@" > "{tmp_path}/said"\nexec "$@"\n')
    wrapper.chmod(0o755)
    compiler = cpu._compiler()[0]
    monkeypatch.setenv("CC", f"'{wrapper}' {compiler} -DTWO='a b'")
    assert backends.cpu_missing() is None
    assert (tmp_path / "said").read_text().startswith(f"{compiler}|-DTWO=a b|-O3|")
    # another command may make other code
    monkeypatch.setenv("CC", f"'{wrapper}' {compiler}")
    assert backends.cpu_missing() is None
    assert len(compilations) == 2
    # what it says need not be text
    wrapper.write_text("#!/bin/sh\nprintf 'error: \\377' >&2\nexit 1\n")
    monkeypatch.setenv("CC", f"'{wrapper}' {compiler} -DTHREE")
    reason = backends.cpu_missing()
    assert reason is not None and "error: \ufffd" in reason and f"{compiler} -DTHREE" in reason


@pytest.mark.usefixtures("uncached", "compilations")
def test_a_cc_that_is_no_compiler_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setenv("CC", "gcc 'and no end")
    reason = backends.cpu_missing()
    assert reason is not None and "'and no end" in reason and "CC" in reason
    monkeypatch.setenv("CC", "nonsense-cc -m64")
    with pytest.warns(RuntimeWarning, match="'nonsense-cc' was not found.*is used instead"):
        assert backends.cpu_missing() is None
    monkeypatch.setenv("PATH", str(tmp_path))
    reason = backends.cpu_missing()
    assert reason is not None and "'nonsense-cc' was not found" in reason
    for makes in ("", 'while [ "$1" != -o ]; do shift; done; echo nonsense > "$2"'):
        (tmp_path / "fake").write_text(f"#!/bin/sh\n{makes}\n")
        (tmp_path / "fake").chmod(0o755)
        monkeypatch.setenv("CC", "fake")
        reason = backends.cpu_missing()
        assert reason is not None and ("cannot be kept or loaded" if makes else "no library") in reason
