"""Compiled kernels have the reference's bits where there is no GPU: tests of other modules, their launches run by :mod:`ptx`.

Every launch is run twice, with asynchronous work as soon and as late as may be and warps in either order, and both must agree.
Of random cases these are the first few; tests/gpu has them all.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import os
import random
import re
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import pytest
import torch
from triton.runtime import JITFunction

import network_cases
import ptx
from helpers import attention_launches, run_by_address, same_bits
from qflash import execution, varlen
from qflash.kernels import device, dispatch, launch_recorder
from qflash.kernels.gluon.sm90 import launch as sm90
from qflash.kernels.gluon.sm90 import rules
from qflash.kernels.launch_arguments import LinearCall, LinearPlan, Places
from qflash.kernels.launch_recorder import record
from qflash.kernels.settled import count_launch, weights_stay
from qflash.kernels.tiles import SM90_RESIDENT, SM90_STREAMING, WINDOWS, LinearTiles, Tiles
from qflash.kernels.triton import network as portable
from qflash.kernels.triton.gated import gated_launch
from qflash.kernels.triton.unseen_tokens import launch_places
from qflash.specification import reference
from qflash.specification.attention_call import Lengths, VarlenCall, float_call, int8_call
from qflash.specification.layers import ACTIVATIONS, Activation
from qflash.specification.recipe import DEFAULT, Recipe

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has all of them"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="run by itself, with TRITON_INTERPRET=0"),
    pytest.mark.slow(8),  # nothing else executes these kernels without a GPU
]
CPU = torch.device("cpu")
# four generations of products: mma, wgmma, tcgen05, and mma again
TARGETS = ("sm_80", "sm_90", "sm_100", "sm_120")

HELD = Tiles(64, 128, 4, 1, splits=1, family=SM90_RESIDENT)
LONG = Tiles(64, 128, 4, 3, 168, family=SM90_STREAMING)

Load = Callable[..., ModuleType]


def launch_twice(call: launch_recorder.KernelLaunch, target: str) -> None:
    """Run a launch both ways; the second must leave the same bytes as the first."""
    given = [value for _, value in launch_recorder.each_argument(call.arguments)]
    parts = [part for _, _, part in ptx.Memory(given).parts]
    before = [part.copy() for part in parts]
    ptx.launch(call, target=target)
    after = [part.copy() for part in parts]
    for part, x in zip(parts, before, strict=True):
        part[:] = x
    ptx.launch(call, late=True, backwards=True, target=target)
    assert all((part == x).all() for part, x in zip(parts, after, strict=True)), "what it gives depends on when things are done"


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Load:
    """Return a function that imports a module of tests and has launches on the CPU compiled for a target and run."""
    original = JITFunction.run

    def load(name: str, target: str = "sm_90") -> ModuleType:
        def run(kernel: Any, *values: Any, grid: tuple[int, ...], warmup: bool, **named: Any) -> Any:
            if warmup:
                return original(kernel, *values, grid=grid, warmup=True, **named)
            arguments = dict(zip(kernel.arg_names, values, strict=False))
            arguments.update((key, named.pop(key)) for key in kernel.arg_names if key in named)
            if "GUARD" in arguments:
                # what is compiled is not for the interpreter
                arguments["GUARD"] = False
            x, y, z = (*grid, 1, 1)[:3]
            launch_twice(launch_recorder.KernelLaunch(kernel, (x, y, z), arguments, named), target)
            return None

        monkeypatch.setattr(JITFunction, "run", run)
        module = importlib.import_module(name)
        if hasattr(module, "CUDA"):
            monkeypatch.setattr(module, "CUDA", CPU)
        return module

    return load


@pytest.fixture
def one_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let programs share what they would otherwise have to themselves: windows with one bias, or a head's blocks."""
    monkeypatch.setattr(device, "STAND_IN_PROCESSORS", 1)


@pytest.fixture
def few_processors(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """One to three of them."""
    processors = 1 + request.node.callspec.params["case"] % 3
    monkeypatch.setattr(device, "STAND_IN_PROCESSORS", processors)


@pytest.mark.parametrize("case", range(7))
def test_places_of_hidden_tokens(emulated: Load, case: int) -> None:
    module = emulated("gpu.test_gpu_unseen_tokens", TARGETS[case % 4])
    module.test_places_are_those_of_the_specification(case)


@pytest.mark.parametrize("case", range(7))
def test_tokens_from_their_places(emulated: Load, case: int) -> None:
    module = emulated("gpu.test_gpu_unseen_tokens", TARGETS[case % 4])
    module.test_kernels_that_quantise_take_tokens_from_their_places(case)


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_requantisation(emulated: Load, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = emulated("core.test_fixed_point", target)
    monkeypatch.setattr(module, "GUARD", False)
    module.test_twin_output_multiplier_and_requantize()


@pytest.mark.parametrize(
    "kernels",
    [
        ["windows_kernel"],
        ["hopper_kernel"],
        ["long_range", "long_quantize", "long_hopper"],
        ["cluster_quantize", "long_hopper"],
    ],
)
def test_calls_by_hand_are_repeated(emulated: Load, monkeypatch: pytest.MonkeyPatch, kernels: list[str]) -> None:
    """The launches of a call on other tensors, descriptions of matrices for the copy engine among their arguments."""
    emulated("kernels.test_launch_recorder")
    launched: list[str] = []
    monkeypatch.setattr(launch_recorder.KernelLaunch, "launcher", run_by_address(launched))
    others = {"windows_kernel": (49, 32), "hopper_kernel": (70, 64), "cluster_quantize": (520, 64)}
    tokens, head_dim = others.get(kernels[0], (300, 64))

    def draw(seed: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return [torch.randn(1, 1, tokens, head_dim, generator=generator).half() for _ in range(3)]

    def go(*tensors: torch.Tensor) -> torch.Tensor:
        query, key, value = tensors
        out = torch.empty_like(query)
        if tokens < 300:
            for call in attention_launches(float_call(query, key, value, None, False, 0.2, DEFAULT), out):
                call.run()
            return out
        recipe = DEFAULT.replace(smooth_value=False)
        if kernels[0] == "cluster_quantize":
            found = sm90.quantize_in_clusters(float_call(query, key, value, None, False, 0.2, recipe))
        else:
            found = dispatch.launch_quantize_long(None, key, value, recipe, True)
        for call in attention_launches(
            int8_call(
                query,
                None,
                found.key,
                found.key_scale,
                found.value,
                found.value_scale,
                None,
                False,
                0.2,
                None,
                out.dtype,
                DEFAULT,
            ),
            out,
            tiles=LONG,
            value_sums=found.value_sums,
            fragment_order=True,
        ):
            call.run()
        return out

    _, prepare = record(go, draw(0))
    again = prepare()
    assert again is not None
    others = draw(1)
    got = again(*others)
    assert [name for name, of in zip(launched, kernels, strict=True) if of not in name] == []
    assert same_bits(got, execution.attention(*others, None, False, 0.2, DEFAULT.key, "reference"))


@pytest.mark.parametrize(
    ("longest", "same", "kernels"),
    [(70, True, ["packed_hopper_kernel"]), (300, False, ["long_range_kernel", "long_quantize_kernel", "long_hopper_kernel"])],
)
def test_calls_of_packed_sequences_are_repeated(
    emulated: Load, monkeypatch: pytest.MonkeyPatch, longest: int, same: bool, kernels: list[str]
) -> None:
    """On other tensors and other lengths, of queries and keys alike or not."""
    emulated("kernels.test_launch_recorder")
    launched: list[str] = []
    monkeypatch.setattr(launch_recorder.KernelLaunch, "launcher", run_by_address(launched))
    monkeypatch.setattr(sm90, "packed_refusal", lambda call: None if longest == 70 else "no")
    monkeypatch.setattr(sm90, "varlen_refusal", lambda call: None)
    choices = longest, longest, False, 0.2, DEFAULT.key, "triton"

    def draw(seed: int, first: int) -> tuple[torch.Tensor | None, ...]:
        generator = torch.Generator().manual_seed(seed)
        tensors = [torch.randn(longest + 9, 1, 64, generator=generator).half() for _ in range(3)]
        queries, keys = (torch.tensor([0, begin, longest + 9]) for begin in (first, first if same else 20))
        return varlen.given_tensors(*tensors, queries, queries if same else keys)

    _, prepare = record(lambda *tensors: dispatch.launch_varlen(varlen.call_of(tensors, choices)), draw(0, 9))
    again = prepare()
    assert again is not None and not launched
    query, key, value, queries, keys = others = draw(1, 30)
    got = again(*others)
    assert launched == kernels and (keys is None) == same
    lengths = queries, queries if keys is None else keys
    assert same_bits(got, varlen.varlen_attention(query, key, value, *lengths, *choices[:-1], "reference"))


@pytest.mark.parametrize("target", TARGETS)
def test_window_bias(emulated: Load, target: str) -> None:
    module = emulated("integrations.test_swin_bias", target)
    for sizes in module.SIZES[2:5]:
        module.test_kernel(sizes, (module.HALF, module.HALF))
    module.test_kernel_reads_nothing_that_is_not_the_table()


@pytest.mark.usefixtures("few_processors")
@pytest.mark.parametrize("case", range(6))
def test_windows_int8(emulated: Load, case: int) -> None:
    emulated("gpu.test_gpu_windows", TARGETS[case % 4]).test_int8_attention_has_the_reference_bits(case)


@pytest.mark.usefixtures("few_processors")
@pytest.mark.parametrize("case", range(6))
def test_windows_fused(emulated: Load, case: int) -> None:
    emulated("gpu.test_gpu_windows", TARGETS[case % 4]).test_fused_attention_has_the_reference_bits(case)


@pytest.fixture
def hopper(emulated: Load, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The tests of Hopper's kernel, with as few heads as there can be."""
    module = emulated("gpu.test_gpu_hopper")
    draw = module.draw_shape

    def draw_small(chance: random.Random, head_dims: tuple[int, ...]) -> Any:
        shape = draw(chance, head_dims)
        return dataclasses.replace(shape, batch=1, heads=shape.group)

    monkeypatch.setattr(module, "draw_shape", draw_small)
    return module


@pytest.mark.parametrize("case", range(6))
def test_hopper_int8(hopper: ModuleType, case: int) -> None:
    hopper.test_int8_attention_has_the_reference_bits(case)


@pytest.mark.parametrize("case", range(6))
def test_hopper_fused(hopper: ModuleType, case: int) -> None:
    hopper.test_fused_attention_has_the_reference_bits(case)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("fused", [False, True])
def test_scores_that_fill_the_registers(fused: bool) -> None:
    """577 keys by two warps a row: nothing else is under way beside their scores."""
    (call,), out, expected = one_head(577, 64, fused, Tiles(64, 128, 8, 1, splits=2, family=SM90_RESIDENT), queries=70)
    plan = call.arguments["PLAN"]
    assert (plan.ACROSS, plan.UNROLL, plan.SUMS) == (2, 0, "end")
    call.run()
    assert same_bits(out, expected())


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("keys", "head_dim", "fused", "splits"),
    [(609, 64, True, 2), (640, 64, True, 1), (785, 64, False, 1), (768, 32, True, 1), (650, 80, True, 2), (672, 128, False, 1)],
)
def test_two_warps_share_a_row_that_is_read_twice(keys: int, head_dim: int, fused: bool, splits: int) -> None:
    """They exchange probabilities tile by tile; a program may have both blocks of queries."""
    tiles = Tiles(64, 128, 8, 1, splits=splits, family=SM90_RESIDENT)
    (call,), out, expected = one_head(keys, head_dim, fused, tiles, queries=70)
    plan = call.arguments["PLAN"]
    assert {"ACROSS": 2, "UNROLL": 2, "LOOPS": splits == 1}.items() <= dataclasses.asdict(plan).items()
    call.run()
    assert same_bits(out, expected())


@pytest.fixture
def last_queries(hopper: ModuleType, one_processor: None, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The same with two heads and one processor: of fewer heads than processors a program takes whole blocks alone."""
    whole = hopper.Shape
    monkeypatch.setattr(hopper, "Shape", lambda batch, heads, *sizes: whole(1, 2, *sizes))
    return hopper


@pytest.mark.parametrize(("queries", "keys", "head_dim"), [(65, 197, 64), (137, 257, 80), (208, 401, 64), (72, 100, 128)])
def test_last_queries_int8(last_queries: ModuleType, queries: int, keys: int, head_dim: int) -> None:
    last_queries.test_the_last_few_queries_have_the_reference_bits(queries, keys, head_dim)


@pytest.mark.parametrize(("queries", "keys", "head_dim"), [(72, 100, 64), (65, 300, 40), (208, 401, 64)])
def test_last_queries_fused(last_queries: ModuleType, queries: int, keys: int, head_dim: int) -> None:
    last_queries.test_the_last_few_queries_are_quantised_alike(queries, keys, head_dim)


@pytest.mark.parametrize("case", range(4))
def test_long_hopper_int8(emulated: Load, monkeypatch: pytest.MonkeyPatch, case: int) -> None:
    module = emulated("gpu.test_gpu_long_hopper")
    draw = module.sizes

    def draw_small(chance: random.Random, others: tuple[int, ...]) -> Any:
        (_, heads, queries, d), (_, few, keys, _), _ = draw(chance, others)
        # more tiles of keys than the ring has places, and a second block of queries
        size = (1, 1, min(keys, 450), d)
        return (1, heads // few, min(queries, 70), d), size, size

    monkeypatch.setattr(module, "sizes", draw_small)
    module.test_int8_attention_has_the_reference_bits(case)


@pytest.mark.parametrize(
    ("keys", "head_dim", "dtype"),
    [
        (300, 64, torch.float16),
        (512, 64, torch.float16),
        (520, 128, torch.bfloat16),
        (300, 72, torch.float16),
        (512, 80, torch.bfloat16),
        (520, 96, torch.float16),
    ],
)
def test_long_hopper_fused(emulated: Load, keys: int, head_dim: int, dtype: torch.dtype) -> None:
    """Keys and values quantised by two launches, queries by the third."""
    long_quantize = emulated("qflash.kernels.triton.quantize_streaming")
    generator = torch.Generator().manual_seed(keys)
    query, key, value = (torch.randn(1, 1, n, head_dim, generator=generator).to(dtype) for n in (70, keys, keys))
    found = long_quantize.launch_quantize_long(None, key, value, DEFAULT.replace(smooth_value=False), True)
    out = torch.empty_like(query)
    calls = attention_launches(
        int8_call(
            query, None, found.key, found.key_scale, found.value, found.value_scale, None, False, 0.1, None, out.dtype, DEFAULT
        ),
        out,
        tiles=LONG,
        value_sums=found.value_sums,
        fragment_order=True,
    )
    assert [call.kernel.__name__ for call in calls] == ["long_hopper_kernel"]
    calls[0].run()
    assert same_bits(out, execution.attention(query, key, value, None, False, 0.1, DEFAULT.key, "reference"))


def _no_marks(bias: torch.Tensor) -> None:
    bias[..., 5] = -3000  # where fixed point ends


def _marks(bias: torch.Tensor) -> None:
    rows = bias[0, 0]
    rows[3] = -math.inf
    rows[4, 7:] = -math.inf
    rows[5, 9], rows[6, 10] = math.nan, math.inf
    rows[7] = -2000
    rows[7, 11] = -1999
    rows[8, 12:14] = torch.finfo(bias.dtype).max


def _hidden(bias: torch.Tensor) -> None:
    bias[..., 100:] = -math.inf
    bias[0, 0, 3, 100] = math.nan


def _draw_mask(batch: int, queries: int, keys: int, dtype: torch.dtype, change: Callable[..., None] | None) -> torch.Tensor:
    """Draw a bias and change it; without ``change`` a bool mask of which one row shows nothing, and some keys are hidden."""
    generator = torch.Generator().manual_seed(keys)
    bias = (3 * torch.randn(batch, 1, queries, keys, generator=generator)).to(dtype)
    if change:
        change(bias)
        return bias
    mask = bias > -1
    mask[0, 0, min(3, queries - 1)] = queries == 1
    mask[..., 100:107] = False
    return mask


@pytest.mark.parametrize(
    ("keys", "head_dim", "dtype", "change", "scale", "recipe"),
    [
        (301, 64, torch.float16, _no_marks, 0.1, DEFAULT),
        (384, 128, torch.bfloat16, _marks, 0.1, DEFAULT.replace(smooth_value=True)),
        (520, 80, torch.float16, _marks, 0.1, DEFAULT),
        (264, 64, torch.bfloat16, _hidden, 0.1, DEFAULT.replace(smooth_value=True)),
        (264, 64, torch.float16, _no_marks, 300.0, DEFAULT),  # score units so large that they have few fraction bits
        (392, 64, torch.float16, None, 0.1, DEFAULT.replace(smooth_value=True)),
        (301, 128, torch.bfloat16, None, 30.0, DEFAULT),
        (272, 64, torch.float16, None, 1e-3, DEFAULT),  # score units so small that no distance hides a key
        (272, 64, torch.float16, None, 1e-12, DEFAULT),
    ],
)
def test_long_hopper_biased(
    emulated: Load, keys: int, head_dim: int, dtype: torch.dtype, change: Any, scale: float, recipe: Recipe
) -> None:
    """A mask beside int8 keys: for two batch elements, of which one has marks, and for two heads that share one."""
    long_quantize = emulated("qflash.kernels.triton.quantize_streaming")
    generator = torch.Generator().manual_seed(keys)
    query, key, value = (torch.randn(2, 2, n, head_dim, generator=generator).to(dtype) for n in (70, keys, keys))
    bias = _draw_mask(2, 70, keys, dtype, change)
    places = launch_places(float_call(query, key, value, bias, False, scale, recipe))
    found = long_quantize.launch_quantize_long(None, key, value, recipe, True, places=places)
    out = torch.empty_like(query)
    quantised = int8_call(
        query, None, found.key, found.key_scale, found.value, found.value_scale, bias, False, scale, None, dtype, recipe,
        value_offset=found.value_offset,
    )  # fmt: skip
    launches = attention_launches(quantised, out, value_sums=found.value_sums, fragment_order=True)
    # rows that the copy engine does not read are copied first
    packing = ["pack_mask_kernel"] if keys % (8 if change else 16) else []
    assert [launch.kernel.__name__ for launch in launches] == [*packing, "long_hopper_kernel"]
    for launch in launches:
        launch.run()
    assert same_bits(out, execution.attention(query, key, value, bias, False, scale, recipe.key, "reference"))


@pytest.mark.parametrize(
    ("keys", "head_dim", "dtype", "change", "scale", "recipe"),
    [
        (196, 64, torch.float16, _no_marks, 0.1, DEFAULT),
        (197, 64, torch.bfloat16, _marks, 0.1, DEFAULT.replace(smooth_value=True)),
        (130, 80, torch.float16, _hidden, 0.1, DEFAULT.replace(query_granularity="head", smooth_value=True)),
        (72, 40, torch.bfloat16, _no_marks, 0.1, DEFAULT.replace(smooth_key=False)),
        (256, 32, torch.float16, _no_marks, 300.0, DEFAULT),
        (196, 64, torch.bfloat16, None, 0.1, DEFAULT.replace(smooth_value=True)),
        (131, 88, torch.float16, None, 30.0, DEFAULT.replace(query_granularity="head")),
        (200, 64, torch.float16, None, 1e-3, DEFAULT),
        (140, 64, torch.bfloat16, None, 1e-12, DEFAULT),
    ],
)
def test_hopper_biased(
    emulated: Load, keys: int, head_dim: int, dtype: torch.dtype, change: Any, scale: float, recipe: Recipe
) -> None:
    """Short rows with a mask that repeats after two batch elements, quantised on the way; hidden tokens are replaced."""
    emulated("kernels.test_launch_recorder")
    generator = torch.Generator().manual_seed(keys)
    query, key, value = (torch.randn(4, 1, n, head_dim, generator=generator).to(dtype) for n in (70, keys, keys))
    bias = _draw_mask(2, 70, keys, dtype, change)
    call = float_call(query, key, value, bias, False, scale, recipe)
    call = dataclasses.replace(call, places=launch_places(call))
    out = torch.empty_like(query)
    launches = attention_launches(call, out)
    packing = ["pack_mask_kernel"] if keys % 4 else []
    assert [launch.kernel.__name__ for launch in launches] == [*packing, "hopper_kernel"]
    for launch in launches:
        launch.run()
    assert same_bits(out, execution.attention(query, key, value, bias, False, scale, recipe.key, "reference"))


@pytest.mark.parametrize("keys", [72, 200, 300])
@pytest.mark.parametrize("bias", [True, False])
def test_a_mask_of_one_row(emulated: Load, keys: int, bias: bool) -> None:
    """A row for all queries is not written for each of them; of int8 tensors a bool mask, with rows of any strides."""
    long_quantize = emulated("qflash.kernels.triton.quantize_streaming")
    generator = torch.Generator().manual_seed(keys)
    query, key, value = (torch.randn(2, 2, n, 64, generator=generator).half() for n in (70, keys, keys))
    mask = _draw_mask(2, 1, keys, torch.float16, _no_marks if bias else None)
    call = float_call(query, key, value, mask, False, 0.1, DEFAULT)
    expected = execution.attention(query, key, value, mask, False, 0.1, DEFAULT.key, "reference")
    places = launch_places(call)
    out = torch.empty_like(query)
    if keys > 256:
        found = long_quantize.launch_quantize_long(None, key, value, DEFAULT, True, places=places)
        quantised = int8_call(
            query, None, found.key, found.key_scale, found.value, found.value_scale, mask, False, 0.1, None, query.dtype,
            DEFAULT, value_offset=found.value_offset,
        )  # fmt: skip
        launches = attention_launches(quantised, out, value_sums=found.value_sums, fragment_order=True)
        assert launches[0].arguments["packed_ptr"].shape[2] == 64
    else:
        launches = attention_launches(dataclasses.replace(call, places=places), out)
        assert [launch.kernel.__name__ for launch in launches] == ["hopper_kernel"]
    for launch in launches:
        launch.run()
    assert same_bits(out, expected)


@pytest.mark.parametrize(("keys", "head_dim"), [(77, 64), (197, 80), (300, 64), (270, 128)])
def test_int8_with_a_bool_mask(emulated: Load, keys: int, head_dim: int) -> None:
    """Beside int8 tensors keys lie in their own order."""
    emulated("kernels.test_launch_recorder")
    generator = torch.Generator().manual_seed(keys)
    query, key, value = (
        torch.randint(-128, 128, (2, 2, n, head_dim), generator=generator).to(torch.int8) for n in (70, keys, keys)
    )
    scale = torch.full((1, 1, 1, 1), 0.02)
    mask = _draw_mask(2, 70, keys, torch.float16, None)
    for output, dtype in ((None, torch.float16), (torch.full((1, 1, 1, 1), 0.01), torch.int8)):
        call = int8_call(query, scale, key, scale, value, scale, mask, False, 0.1, output, dtype, DEFAULT)
        out = torch.empty(query.shape, dtype=dtype)
        launches = attention_launches(call, out)
        assert launches[-1].kernel.__name__ == ("hopper_kernel" if keys <= 256 else "long_hopper_kernel")
        for launch in launches:
            launch.run()
        assert same_bits(out, reference.int8_attention(call))


@pytest.mark.parametrize(
    ("keys", "head_dim", "dtype", "recipe", "blocks"),
    [
        (600, 64, torch.float16, DEFAULT, 4),
        (700, 56, torch.bfloat16, DEFAULT.replace(smooth_value=False), 4),
        (300, 128, torch.bfloat16, DEFAULT.replace(smooth_key=False), 4),
        (1100, 104, torch.float16, DEFAULT.replace(smooth_value=True), 8),
        (2100, 128, torch.float16, DEFAULT, 16),
    ],
)
def test_quantised_in_clusters(
    emulated: Load, keys: int, head_dim: int, dtype: torch.dtype, recipe: Recipe, blocks: int
) -> None:  # fmt: skip
    """One launch by clusters gives what two launches give, padding included, for a head that is not finite, too."""
    long_quantize = emulated("qflash.kernels.triton.quantize_streaming")
    generator = torch.Generator().manual_seed(keys)
    # heads side by side in memory, as a model's projection leaves them
    key, value = torch.randn(2, 1, keys, 2, head_dim, generator=generator).to(dtype).transpose(2, 3)
    key[0, 1, 17, 3], value[0, 0, keys - 1, 5] = math.nan, math.inf
    call = float_call(key, key, value, None, False, 0.1, recipe)
    assert sm90.quantizes_in_clusters(call)
    got, expected = sm90.quantize_in_clusters(call), long_quantize.launch_quantize_long(None, key, value, recipe, True)
    assert got.value_sums.shape[2] == blocks
    finite = torch.ones(1, 2, 1, 1, dtype=torch.bool)
    finite[0, 1] = False
    assert same_bits(got.key_scale, expected.key_scale) and bool((got.key_scale.isfinite() == finite).all())
    assert torch.equal(torch.where(finite, got.key, 0), torch.where(finite, expected.key, 0))
    assert same_bits(got.value_scale, expected.value_scale)
    # the row of the channel that is not finite has any numbers
    width, padded = got.value_sums.shape[3], -(-keys // 128) * 128
    row = int(long_quantize.row_of_channel.fn(torch.tensor(5), width))
    packed = [found.value._base.clone() for found in (got, expected)]
    assert [x.shape for x in packed] == 2 * [(1, 2, width, padded)]
    for x in packed:
        x[0, 0, row] = 0
    assert torch.equal(*packed)
    sums = [found.value_sums.sum(2) for found in (got, expected)]
    for x in sums:
        x[0, 0, 5] = 0
    assert torch.equal(*sums)
    assert (got.value_offset is None) == (expected.value_offset is None)
    if got.value_offset is not None and expected.value_offset is not None:
        usable = expected.value_scale.isfinite()
        assert same_bits(torch.where(usable, got.value_offset, 0), torch.where(usable, expected.value_offset, 0))


@pytest.mark.parametrize(
    ("head_dim", "dtype", "recipe", "target"),
    [
        (64, torch.float16, DEFAULT, "sm_90"),
        (80, torch.float16, DEFAULT, "sm_90"),
        (104, torch.bfloat16, DEFAULT.replace(smooth_value=True), "sm_90"),
        (64, torch.float32, DEFAULT, "sm_80"),
    ],
)
def test_packed_sequences(
    emulated: Load, monkeypatch: pytest.MonkeyPatch, head_dim: int, dtype: torch.dtype, recipe: Recipe, target: str
) -> None:
    """No keys, few keys, whose sum is rounded, and several tiles; quantised by one launch, and by two, or with attention."""
    quantize = emulated("qflash.kernels.triton.quantize_streaming", target)
    queries, keys = [1, 3, 0, 70], [140, 0, 0, 64] if dtype == torch.float32 else [270, 0, 0, 64]
    generator = torch.Generator().manual_seed(head_dim)
    query, key, value = (
        torch.randn(sum(lengths), heads, head_dim, generator=generator).to(dtype)
        for lengths, heads in ((queries, 2), (keys, 1), (keys, 1))
    )
    cumulative = [torch.tensor([0, *lengths]).cumsum(0) for lengths in (queries, keys)]
    lengths = Lengths(*cumulative, max(queries), max(keys))
    call = VarlenCall(query, key, value, None, None, lengths, False, 0.2, dtype, recipe)
    expected = varlen.varlen_attention(query, key, value, *lengths, False, 0.2, recipe.key, "reference")
    monkeypatch.setattr(sm90, "varlen_refusal", lambda call: None if target == "sm_90" else "no")
    # longer than was said: that sequence is NaN, and nothing is read or written outside
    short_call = dataclasses.replace(call, lengths=lengths._replace(most_keys=128))
    without = torch.where(torch.arange(len(query))[:, None, None] < queries[0], math.nan, expected)
    if target == "sm_90":
        monkeypatch.setattr(sm90, "packed_refusal", lambda call: None)
        assert same_bits(dispatch.launch_varlen(call), expected)
        assert same_bits(dispatch.launch_varlen(short_call), without)
    monkeypatch.setattr(sm90, "packed_refusal", lambda call: "no")
    for short in (0, 1024):
        monkeypatch.setattr(quantize, "_SHORT", short)
        monkeypatch.setattr(quantize, "_PROGRAMS", 1)
        assert same_bits(dispatch.launch_varlen(call), expected), short
        assert same_bits(dispatch.launch_varlen(short_call), without), short


def draw_packed(case: int) -> VarlenCall:
    """Return packed sequences with lengths next to the edges of tiles, of uneven channels, constants and numbers not finite."""
    chance, generator = random.Random(case), torch.Generator().manual_seed(case)
    head_dim, sequences = 8 * chance.randint(1, 16), chance.randint(1, 3)
    edges = (0, 1, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 160, 192, 193, 256)
    queries = [chance.randint(1, 20), *(min(chance.choice(edges), 130) for _ in range(sequences - 1))]
    keys = [chance.randint(65, 200), *(chance.choice(edges) for _ in range(sequences - 1))]
    group, heads = chance.choice(((1, 1), (2, 1), (1, 2)))
    dtype = chance.choice((torch.float16, torch.bfloat16))

    def draw(tokens: int, heads: int) -> torch.Tensor:
        x = torch.randn(tokens, heads, head_dim + 8 * chance.randint(0, 1), generator=generator)[..., :head_dim]
        kind = chance.randint(0, 7)
        if kind == 0:
            x *= torch.exp2(torch.randint(-12, 8, (head_dim,), generator=generator))
        elif kind == 1:
            x.fill_(chance.choice((0.0, 1.5)))
        elif kind == 2:
            x[chance.randrange(tokens), chance.randrange(heads), -1] = chance.choice((math.nan, math.inf, -math.inf))
        return x.to(dtype)

    tensors = draw(sum(queries), group * heads), draw(sum(keys), heads), draw(sum(keys), heads)
    cumulative = [torch.tensor([0, *lengths]).cumsum(0).to(torch.int32) for lengths in (queries, keys)]
    recipe = DEFAULT.replace(smooth_value=chance.random() < 0.4, smooth_key=chance.random() < 0.8)
    lengths, scale = Lengths(*cumulative, max(queries), max(keys)), chance.choice((head_dim**-0.5, 3.0, 0.01))
    return VarlenCall(*tensors, None, None, lengths, False, scale, dtype, recipe)


@pytest.mark.parametrize("case", range(16))
def test_packed_sequences_of_any_kind(emulated: Load, monkeypatch: pytest.MonkeyPatch, case: int) -> None:
    emulated("qflash.kernels.triton.quantize_streaming")
    call = draw_packed(case)
    tensors, choices = (call.query, call.key, call.value), (False, call.softmax_scale, call.recipe.key, "reference")
    expected = varlen.varlen_attention(*tensors, *call.lengths, *choices)
    for packed in (True, False):
        monkeypatch.setattr(sm90, "packed_refusal", lambda call, packed=packed: None if packed else "no")
        monkeypatch.setattr(sm90, "varlen_refusal", lambda call: None if call.query.shape[2] > 32 else "no")
        assert same_bits(dispatch.launch_varlen(call), expected), packed


@pytest.mark.parametrize(("sequences", "most", "units"), [(5, 64, 2), (64, 64, 12), (70, 256, 10)])
def test_programs_take_long_sequences_first(emulated: Load, sequences: int, most: int, units: int) -> None:
    emulated("qflash.kernels.triton.quantize_streaming")
    from kernels.order_kernel import order_kernel

    chance = random.Random(sequences)
    lengths = [chance.choice((0, 1, 63, 64, 65, 128, 300, chance.randint(1, 700))) for _ in range(sequences)]
    found = torch.full((sequences,), -1, dtype=torch.int32)
    arguments = {"cu_ptr": torch.tensor([0, *lengths]).cumsum(0).to(torch.int32), "o_ptr": found, "MOST": most, "UNITS": units}
    launch_recorder.KernelLaunch(order_kernel, (sequences, 1, 1), arguments, {"num_warps": 4}).run()
    assert found.tolist() == sorted(range(sequences), key=lambda i: -min(math.ceil(lengths[i] / 64), units))


@pytest.mark.parametrize(("case", "target"), [(case, target) for case in range(8) for target in TARGETS[case % 2 :: 2]])
def test_general_kernels(emulated: Load, case: int, target: str) -> None:
    emulated("kernels.test_attention", target).test_kernel_has_the_reference_bits(case)


@pytest.mark.parametrize(("case", "target"), [(case, target) for case in range(4) for target in TARGETS[case % 2 :: 2]])
def test_general_kernels_fused(emulated: Load, case: int, target: str) -> None:
    emulated("kernels.test_attention_resident", target).test_fused_launch_has_the_bits_of_the_specification(case)


def test_quantising_long_rows(emulated: Load) -> None:
    shape, layouts = (2, 2, 40, 257, 48, 80, 1), ("packed", "tokens_first", "channels_first")
    emulated("kernels.test_quantize_streaming").test_bits_are_those_of_single_tensors(shape, layouts, torch.bfloat16, True)


# --- mistakes that must be noticed ------------------------------------------------------------------------


def one_head(
    tokens: int, head_dim: int, fused: bool, tiles: Tiles, queries: int | None = None
) -> tuple[list[launch_recorder.KernelLaunch], torch.Tensor, Callable[[], torch.Tensor]]:
    """The launches of a head of so many tokens, or of as many keys, where they leave its output, and what that should be."""
    generator = torch.Generator().manual_seed(tokens)
    sizes = [(1, 1, count, head_dim) for count in (queries or tokens, tokens, tokens)]
    if fused:
        q, k, v = (torch.randn(size, generator=generator).half() for size in sizes)
        out = torch.empty_like(q)
        calls = attention_launches(float_call(q, k, v, None, False, 0.1, DEFAULT), out, tiles=tiles)
        return calls, out, lambda: execution.attention(q, k, v, None, False, 0.1, DEFAULT.key, "reference")
    q, k, v = (torch.randint(-128, 128, size, generator=generator).to(torch.int8) for size in sizes)
    one = torch.full((1, 1, 1, 1), 0.02)
    out = torch.empty_like(q)
    arguments = q, one, k, one, v, one, None, False, 0.1, one / 9
    calls = attention_launches(int8_call(*arguments, out.dtype, DEFAULT), out, tiles=tiles)
    return calls, out, lambda: reference.int8_attention(int8_call(*arguments, torch.int8, DEFAULT))


@pytest.mark.parametrize(
    ("tokens", "head_dim", "tiles"),
    [
        (49, 32, Tiles(64, 64, 4, 1, splits=1, family=WINDOWS)),
        (100, 64, HELD),
        (100, 64, HELD._replace(warps=8)),
        (400, 64, HELD),
    ],
    ids=["windows", "sums by products", "warps that share rows", "walked over twice"],
)
def test_nothing_is_no_negative_zero(tokens: int, head_dim: int, tiles: Tiles) -> None:
    (call,), out, expected = one_head(tokens, head_dim, True, tiles)
    call.arguments["v_ptr"][..., 1::3] = 0
    ptx.launch(call)
    assert same_bits(out, expected())
    assert not out[..., 1::3].any()


@pytest.mark.parametrize(
    ("tokens", "fused", "tiles", "mistake", "instead"),
    [
        (100, False, HELD, r"wgmma\.wait_group\.sync\.aligned\s+\d+", "wgmma.wait_group.sync.aligned 7"),
        (100, False, HELD, r"cp\.async\.wait_group\s+0", "cp.async.wait_group 7"),
        (100, True, HELD, r"bar\.sync\s+0;", ""),
        (400, False, LONG, r"@!complete bra\.uni waitLoop;", ""),
        (400, False, LONG, r"bar\.sync\s+0;", ""),
        (100, False, HELD, r"wgmma\.mma_async(.*), 0;", r"wgmma.mma_async\1, 1;"),
    ],
    ids=["products", "copies", "barriers", "tiles", "long barriers", "accumulators"],
)
def test_what_is_not_waited_for_is_noticed(tokens: int, fused: bool, tiles: Tiles, mistake: str, instead: str) -> None:
    calls, out, _ = one_head(tokens, 64, fused, tiles)

    def results(edit: Callable[[str], str]) -> list[torch.Tensor]:
        found = []
        for late, backwards in ((False, False), (True, True), (False, True), (True, False)):
            for call in calls:
                last = call is calls[-1]
                ptx.launch(call, late=late, backwards=backwards, edit=edit if last else str)
            found.append(out.clone())
        return found

    right = results(str)
    assert all(same_bits(x, right[0]) for x in right)

    def edit(text: str) -> str:
        edited, count = re.subn(mistake, instead, text)
        assert count, "there is nothing to forget"
        return edited

    try:
        wrong = results(edit)
    except RuntimeError:
        return  # it did not even come to an end
    assert not all(same_bits(x, right[0]) for x in wrong)


def test_what_lies_beside_a_tensor_is_not_read() -> None:
    calls, _, _ = one_head(49, 32, False, Tiles(64, 64, 4, 1, splits=1, family=WINDOWS))
    calls[0].arguments["k_ptr"] = calls[0].arguments["k_ptr"][:, :, :48].clone()
    with pytest.raises(RuntimeError, match="outside every tensor"):
        ptx.launch(calls[0])


@pytest.mark.parametrize("kind", ["int8", "gelu", "silu", "relu", "residual", "int32"])
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "tiles"),
    [
        (130, 400, 256, rules.LINEAR_TILES[0]),  # a tile that is no whole one, below and beside; several for a program
        (70, 96, 96, rules.LINEAR_TILES[1]),  # one step of inputs; groups of 32 outputs
        (197, 128, 192, rules.LINEAR_TILES[2]),
        (70, 400, 80, rules.LINEAR_TILES[3]),  # groups of 16 outputs
        (40, 144, 64, rules.LINEAR_TILES[4]),  # a ring of more steps than there are
    ],
)
def test_linear_layers(
    emulated: Load, monkeypatch: pytest.MonkeyPatch, kind: str, rows: int, inputs: int, outputs: int, tiles: LinearTiles
) -> None:
    emulated("network_cases")
    monkeypatch.setattr(device, "STAND_IN_PROCESSORS", 1)
    monkeypatch.setattr(sm90, "choose_linear_tiles", lambda *_: tiles)
    check_linear(kind, rows, inputs, outputs)


@pytest.mark.parametrize("kind", ["int8", "gelu", "residual"])
@pytest.mark.parametrize(("processors", "inputs", "outputs"), [(132, 400, 72), (132, 144, 128), (1, 144, 136)])
def test_linear_layers_of_a_forward_pass(
    emulated: Load, monkeypatch: pytest.MonkeyPatch, kind: str, processors: int, inputs: int, outputs: int
) -> None:
    """Weights come before the wait for the kernel ahead; a program has one tile, or several; groups of 8 and 64 outputs."""
    emulated("network_cases")
    monkeypatch.setattr(device, "STAND_IN_PROCESSORS", processors)
    monkeypatch.setattr(sm90, "choose_linear_tiles", lambda *_: rules.LINEAR_TILES[3])
    monkeypatch.setattr(sm90, "dependent_launch", lambda *_: "early")
    with weights_stay():
        assert not count_launch()
        plan = check_linear(kind, 70, inputs, outputs)
    assert plan.EARLY and (processors > 1) == plan.AHEAD


def check_linear(kind: str, rows: int, inputs: int, outputs: int) -> LinearPlan:
    """Compare a layer's launch with the reference, and return its plan."""
    chance = random.Random(f"{kind} {rows}")
    x = network_cases.integers(-128, 128, (rows, inputs), torch.int8, chance)
    layer = network_cases.linear(x, network_cases.integers(-128, 128, (outputs, inputs), torch.int8, chance), kind, chance)
    x, weight, bias, multiplier, left, *rest = layer.arguments
    residual, dtype, made = None, torch.int8, None
    if kind in ACTIVATIONS:
        made = Activation(kind, *rest)
    else:
        residual, _, dtype = rest
    out = torch.empty(rows, outputs, dtype=dtype)
    residual = None if residual is None else residual.contiguous()
    launch = sm90.linear_launch(LinearCall(x, weight, bias, multiplier, left, residual, made, out))
    launch.run()
    assert same_bits(out, layer.run("reference"))
    plan: LinearPlan = launch.arguments["PLAN"]
    return plan


@pytest.mark.parametrize("number", range(9))
@pytest.mark.parametrize(
    ("rows", "inputs", "channels", "tiles"),
    [
        (130, 400, 128, rules.LINEAR_TILES[0]),
        (197, 128, 96, rules.LINEAR_TILES[2]),  # a tile that is no whole one across
        (70, 400, 40, rules.LINEAR_TILES[3]),  # groups of 8 products
    ],
)
def test_linear_layers_with_gated_products(
    emulated: Load, monkeypatch: pytest.MonkeyPatch, number: int, rows: int, inputs: int, channels: int, tiles: LinearTiles
) -> None:
    """All activations and types of outputs."""
    emulated("network_cases")
    monkeypatch.setattr(device, "STAND_IN_PROCESSORS", 1)
    monkeypatch.setattr(sm90, "choose_linear_tiles", lambda *_: tiles)
    layer = network_cases.draw_linear_gated(number, rows, inputs, channels)
    x, weight, *constants, factor, multiplier, offset, name, dtype = layer.arguments
    out = torch.empty(rows, channels, dtype=dtype)
    made = Activation(name, multiplier, offset, factor)
    # the kernel takes rows that begin at multiples of 16 bytes, which some of the drawn ones do not
    x, weight = (each.clone(memory_format=torch.contiguous_format) for each in (x, weight))
    call = LinearCall(x, weight, *constants, None, made, out, gated=True)
    sm90.linear_launch(call).run()
    assert same_bits(out, layer.run("reference"))


def check_norms(layers: Iterable[network_cases.Layer]) -> None:
    for layer in layers:
        h, epsilon, gain, offset, shift, gather, _ = layer.arguments
        want = layer.run("reference")
        out = torch.empty(want.shape, dtype=want.dtype).view(-1, len(gain))
        if out.numel():
            order = None if gather is None else gather.contiguous()
            portable.layer_norm_launch(h.contiguous(), epsilon, gain, offset, shift, out, order).run()
        assert same_bits(out.view(want.shape), want), layer


def test_gated_products(emulated: Load) -> None:
    emulated("network_cases")
    for number in range(1, 13):
        layer = network_cases.draw_gated(number)
        x, factor, multiplier, offset, name, dtype = layer.arguments
        out = torch.empty(x.numel() // x.shape[-1], len(multiplier), dtype=dtype)
        if out.numel():
            gated_launch(x.reshape(len(out), -1).contiguous(), factor, multiplier, offset, name, out).run()
        assert same_bits(out.view(*x.shape[:-1], -1), layer.run("reference")), layer


@pytest.mark.parametrize("draw", ["draw_layer_norm", "draw_joined_norm", "edge_norms"])
def test_layer_norms(emulated: Load, draw: str) -> None:
    """Not Gluon, but with inline assembly that the interpreter has not."""
    emulated("network_cases")
    every = getattr(network_cases, draw)
    check_norms(every()[::4] if draw == "edge_norms" else map(every, range(6)))


@pytest.mark.usefixtures("one_processor")
@pytest.mark.parametrize("channels", [128, 256, 300])
def test_layer_norms_of_many_rows(emulated: Load, channels: int) -> None:
    """A program then has several."""
    emulated("network_cases")
    check_norms([network_cases.draw_layer_norm(channels + 2, channels, rows=33)])


@pytest.mark.parametrize("tiles", rules.LINEAR_TILES)
def test_linear_layers_with_tokens_at_other_places(emulated: Load, monkeypatch: pytest.MonkeyPatch, tiles: LinearTiles) -> None:
    emulated("network_cases")
    monkeypatch.setattr(device, "STAND_IN_PROCESSORS", 1)
    monkeypatch.setattr(sm90, "choose_linear_tiles", lambda *_: tiles)
    chance = random.Random(str(tiles))
    x = network_cases.integers(-128, 128, (3, 45, 96), torch.int8, chance)
    weight = network_cases.integers(-128, 128, (96, 96), torch.int8, chance)
    x, weight, bias, multiplier, left, residual, _, dtype = network_cases.linear(x, weight, "residual", chance).arguments
    constants = weight, bias, multiplier, left
    order = network_cases.shuffled(45, chance)
    residual = residual.contiguous()
    out = torch.empty(3, 45, 96, dtype=dtype)
    rows = x.view(-1, 96), *constants, residual.view(-1, 96), None, out.view(-1, 96)
    sm90.linear_launch(LinearCall(*rows, Places(order, 45, 45, 0, 45))).run()
    assert same_bits(out, network_cases.Layer("int8_linear", (x, *constants, residual, order, dtype)).run("reference"))

    # one residual for all images, behind two tokens that stay as they are
    out = torch.full((3, 47, 96), 7, dtype=dtype)
    rows = x.view(-1, 96), *constants, residual[0], None, out.view(-1, 96)
    sm90.linear_launch(LinearCall(*rows, Places(None, 45, 47, 2, 0))).run()
    shared = residual[:1].expand(3, -1, -1)
    assert same_bits(out[:, 2:], network_cases.Layer("int8_linear", (x, *constants, shared, None, dtype)).run("reference"))
    assert out[:, :2].eq(7).all()
