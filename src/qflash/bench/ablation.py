"""What each step of the integer attention is worth: ``qflash ablate`` (the paper's appendix, and this library's own steps).

Accuracy comes from plain formulas or from the back end ``auto`` picks, on any device. Latency and throughput are the GPU's
where there is one; without it, nothing but the plain timing of integer operations is measured, and is called that.
"""

from __future__ import annotations

import functools
import math
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from rich.table import Table

from .. import fixed_point as fp
from ..api import attention, int8_attention, quantize
from ..quantization import QuantizedTensor, balance_channels, center_channels
from ..recipe import ACCURATE, DEFAULT, PAPER, Recipe
from . import console as bench_console
from . import figures, latency, problems, records
from . import methods as bench_methods
from . import timers as bench_timers
from .metrics import exact_attention, sqnr
from .workloads import add_outliers, get_workload, paper_inputs

PARTS = ("kernel", "scales", "throughput", "granularity", "steps")
SEEDS = (0, 1, 2)
KEY_BLOCK = 64
"""Keys a tile in the formulas, and keys and queries a tile in the kernels of the steps."""

GPU_BATCH, CPU_BATCH = 1024, 8
_ACCURACY_BATCH = 8

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Tick = Callable[[str], None]

FIELDS = ("part", "group", "label", "input", "sqnr_db", "sqnr_min", "sqnr_max", "median_us", "q1_us", "q3_us", "gops", "error")
"""Columns of ``ablate.csv``."""


# --- inputs ---------------------------------------------------------------------------------------------------


def gaussian(seed: int, shape: tuple[int, ...] = (1, 4, 1024, 64)) -> Tensors:
    """Draw query, key and value from N(0, 1), rounded to float16."""
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").half() for _ in range(3))
    return query, key, value


def outliers(seed: int) -> Tensors:
    """Draw N(0, 1) tensors with a loud query channel, two shifted key channels and a shifted value channel."""
    query, key, value = gaussian(seed, (1, 6, 197, 64))
    add_outliers(query, key, value)
    return query, key, value


INPUTS: dict[str, tuple[str, Callable[[int], Tensors]]] = {
    "A2": ("A2, batch 8, uniform [-4, 4), float16", lambda seed: paper_inputs(get_workload("A2"), 8, seed)),
    "A7": ("A7, batch 8, uniform [-4, 4), float16", lambda seed: paper_inputs(get_workload("A7"), 8, seed)),
    "normal": ("1 x 4 x 1024 x 64, N(0, 1), float16", gaussian),
    "outliers": ("1 x 6 x 197 x 64, N(0, 1) with outlier channels, float16", outliers),
}


def summary(values: Sequence[float]) -> dict[str, float]:
    """Return mean, lowest and highest of a few decibel values."""
    return {"mean": round(statistics.fmean(values), 3), "min": round(min(values), 3), "max": round(max(values), 3)}


# --- appendix A: from float to integer, step by step -------------------------------------------------------------

STEPS = (
    ("V0", "float16 FlashAttention-2"),
    ("V1", "int8 Q Kᵀ"),
    ("V2", "int8 P V"),
    ("V3", "integer exponential"),
    ("V4", "integer accumulation"),
)
"""Appendix A's names and what each step changes."""


def _per_tensor(*tensors: torch.Tensor) -> list[QuantizedTensor]:
    return [quantize(x, "tensor") for x in tensors]


def _octaves(query: QuantizedTensor, key: QuantizedTensor) -> tuple[float, int, torch.Tensor]:
    """Return the factor from int32 scores to octaves, and the same as the recipe's multiplier and fraction bits."""
    head_dim = query.values.shape[-1]
    constant = head_dim**-0.5 * math.log2(math.e)
    scale = fp.combine_scales(fp.split_scale(query.scale), fp.split_scale(key.scale), fp.split_float(constant))
    multiplier, bits = fp.narrow_multiplier(*scale, head_dim)
    return float(query.scale) * float(key.scale) * constant, int(multiplier), bits


def _shift_exp2(distance: torch.Tensor, multiplier: int, bits: torch.Tensor) -> torch.Tensor:
    """Return the 7-bit P of recipe ``paper`` for distances ``m - S >= 0`` (Algorithm 2, Equation 10)."""
    return fp.probability(distance * multiplier + fp.exponent_offset(1, bits), bits, "linear", 7, False)


def step_formula(step: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Compute appendix A's step V0 to V4 in plain tensors, online over blocks of :data:`KEY_BLOCK` keys.

    V0: float16 operands, float32 sums and softmax. V1: Q and K in int8. V2: P (7 bits, rounded) and V in int8 too. V3:
    ShiftExp2 gives P. V4: Algorithm 1 (recipe ``paper``), its output floored to int8 at V's scale. One scale a tensor.

    Args:
        step: 0 to 4.
        query, key, value: float, ``(batch, heads, tokens, head_dim)``.

    Returns:
        float32, the query's shape.

    Raises:
        ValueError: another step.
    """
    if step not in range(len(STEPS)):
        raise ValueError(f"step must be 0 to {len(STEPS) - 1}, got {step!r}")
    if step == 4:
        query8, key8, value8 = _per_tensor(query, key, value)
        out = int8_attention(query8, key8, value8, out_dtype=torch.float32, recipe=PAPER)
        assert isinstance(out, torch.Tensor)
        return out
    q, k, v = query.half().float(), key.half().float(), value.half().float()
    factor, multiplier, value_scale = query.shape[-1] ** -0.5 * math.log2(math.e), 0, 1.0
    bits = q.new_zeros(())
    if step > 0:
        query8, key8 = quantize(query, "tensor"), quantize(key, "tensor")
        factor, multiplier, bits = _octaves(query8, key8)
        q, k = query8.values.float(), key8.values.float()  # sums below 2**24: float32 products of int8 are exact
    if step > 1:
        value8 = quantize(value, "tensor")
        v, value_scale = value8.values.float(), float(value8.scale)
    row_max: torch.Tensor | None = None
    numerator = denominator = q.new_zeros(())
    for start in range(0, k.shape[2], KEY_BLOCK):
        s = q @ k[:, :, start : start + KEY_BLOCK].mT
        here = s.amax(-1, keepdim=True)
        new_max = here if row_max is None else torch.maximum(row_max, here)
        if step < 3:
            p = torch.exp2((s - new_max) * factor)
            total = p if step < 2 else (p := torch.floor(p * 127 + 0.5))
            p = p.half().float()
        else:
            total = p = _shift_exp2((new_max - s).int(), multiplier, bits).float()
        alpha = 0.0 if row_max is None else torch.exp2((row_max - new_max) * factor)
        numerator = numerator * alpha + p @ v[:, :, start : start + KEY_BLOCK]
        denominator = denominator * alpha + total.sum(-1, keepdim=True)
        row_max = new_max
    return numerator / denominator * value_scale


def _prepare_kernel(inputs: problems.Inputs, *, step: int) -> bench_timers.TimedCall:
    from .ablation_kernels import prepare_step

    tensors: list[Any] = [inputs.query.half(), inputs.key.half(), inputs.value.half()]
    for place in range(min(3, step and step + 1)):
        tensors[place] = quantize(tensors[place], "tensor")
    query, key, value = tensors
    return prepare_step(step, query, key, value, inputs.query.shape[-1] ** -0.5, block=KEY_BLOCK)


def kernel_methods(device: torch.device) -> list[bench_methods.TimedMethod[problems.Inputs]]:
    """Return what appendix A compares on a GPU: SDPA's FlashAttention-2, the kernels V0 to V3, QFlash's own as V4."""
    methods = [m for m in bench_methods.make_methods(device) if m.name == "sdpa flash"]
    for step, (name, _) in enumerate(STEPS[:4]):
        methods.append(bench_methods.TimedMethod(name, "kernel", functools.partial(_prepare_kernel, step=step), is_ours=True))
    methods.append(bench_methods.TimedMethod("V4 paper", "kernel", _prepare_paper, is_ours=True))
    methods.append(bench_methods.TimedMethod("V4 default", "kernel", _prepare_default, is_ours=True))
    return methods


def _prepare_paper(inputs: problems.Inputs) -> bench_timers.TimedCall:
    """int8 to int8 at V's scale, as Algorithm 1 has it."""
    query, key, value = _per_tensor(inputs.query, inputs.key, inputs.value)
    return functools.partial(int8_attention, query, key, value, recipe=PAPER)


def _prepare_default(inputs: problems.Inputs) -> bench_timers.TimedCall:
    return bench_methods._prepare_qflash_int8(inputs, recipe=DEFAULT, backend="auto")


def kernel_part(device: torch.device, batch: int, rounds: int, tick: Tick) -> list[dict[str, Any]]:
    """Measure V0 to V4: SQNR of the formulas, and on a GPU latency and SQNR of the kernels.

    Args:
        device: where.
        batch: images of A2 for the kernels; the formulas take at most 8, at each seed.
        rounds: samples a kernel.
        tick: called after every row.

    Returns:
        rows; ``speedup`` of a kernel is V0's time (the same Triton kernel in float16) over its own.
    """
    rows: list[dict[str, Any]] = []
    workload, few = get_workload("A2"), min(batch, _ACCURACY_BATCH)
    drawn = [paper_inputs(workload, few, seed, device=device) for seed in SEEDS]
    for step, (name, title) in enumerate(STEPS):
        found = [sqnr(exact_attention(*inputs), step_formula(step, *inputs)) for inputs in drawn]
        row = {"part": "kernel", "group": "formula", "label": name, "title": title, "input": f"A2, batch {few}"}
        rows.append(row | {"sqnr_db": summary(found)})
        tick(f"formula {name}")
    if device.type == "cuda":
        problem = problems.Problem("A2", batch, workload.shape(batch), workload.tokens)
        options: dict[str, Any] = {"kind": "uniform", "dtype": torch.float16, "device": device, "rounds": rounds}
        timed = latency.measure(problem, kernel_methods(device), ("kernel", "end-to-end"), **options, tick=tick)
        base = next((row["median_us"] for row in timed if row["method"] == "V0"), None)
        for row in timed:
            value = row["sqnr_db"]
            rows.append(
                row
                | {
                    "part": "kernel", "group": "kernel", "label": row["method"], "input": f"A2, batch {batch}",
                    "sqnr_db": None if value is None else summary([float(value)]),
                    "speedup": round(base / row["median_us"], 3) if base and row["median_us"] else None,
                }
            )  # fmt: skip
    return rows


# --- appendix B.1: scale accumulation against scale release --------------------------------------------------------

ACCUMULATIONS = (
    "scale accumulation, 32 bits",
    "scale accumulation, 64 bits",
    "scale release (paper)",
    "scale release (QFlash online)",
    "no rescaling (QFlash two_pass)",
    "float rescaling of the same P",
)
TILES = (1, 2, 3, 4, 6, 8, 16, 32, 64)


def _wrap(x: torch.Tensor) -> torch.Tensor:
    """Keep the low 32 bits of int64, signed."""
    return ((x + (1 << 31)) & 0xFFFFFFFF) - (1 << 31)


def _alpha(rise: torch.Tensor, octave: float, inverse: int) -> torch.Tensor:
    """Return Algorithm 2's ShiftExp2 of ``-rise`` (int64, scale ``octave``), with 32 fraction bits in M."""
    q = (rise * round(octave * 2.0**32)) >> 32
    remainder = q * inverse - rise
    return ((remainder >> 1) + inverse) >> q.clamp(max=62)


def accumulation(kind: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Accumulate the tiles of one attention in one of the ways :data:`ACCUMULATIONS`, everything else alike.

    P is recipe ``paper``'s (linear, 7 bits, floored) against the running maximum. Scale accumulation lets the scale
    of α̂, which is the scale of the scores in octaves, pile up: after tile j sums have the scale ``s_α**j``, so that
    the new product is divided by ``s_α**j`` (the appendix prints ``s_α``, which would add numbers of different
    scales). Scale release divides by
    ``round(1 / s_α)`` in every step. The quotient is taken in float64, so that only the accumulation differs.

    Args:
        kind: one of :data:`ACCUMULATIONS`.
        query, key, value: float, ``(batch, heads, tokens, head_dim)``.

    Returns:
        float64, the query's shape.

    Raises:
        ValueError: another ``kind``.
    """
    if kind not in ACCUMULATIONS:
        raise ValueError(f"kind must be one of {ACCUMULATIONS}, got {kind!r}")
    if "QFlash" in kind:
        recipe = PAPER.replace(output="accumulator", normalization="online" if "online" in kind else "two_pass")
        query8, key8, value8 = _per_tensor(query, key, value)
        out = int8_attention(query8, key8, value8, out_dtype=torch.float32, recipe=recipe)
        assert isinstance(out, torch.Tensor)
        return out.double()
    query8, key8, value8 = _per_tensor(query, key, value)
    octave, multiplier, bits = _octaves(query8, key8)
    inverse = round(1 / octave)
    q, k, v = (x.values.double() for x in (query8, key8, value8))
    row_max: torch.Tensor | None = None
    sums = torch.zeros((), dtype=torch.float64 if kind.startswith("float") else torch.int64, device=query.device)
    power = 1
    for start in range(0, k.shape[2], KEY_BLOCK):
        s = (q @ k[:, :, start : start + KEY_BLOCK].mT).long()
        here = s.amax(-1, keepdim=True)
        new_max = here if row_max is None else torch.maximum(row_max, here)
        p = _shift_exp2((new_max - s).int(), multiplier, bits).double()
        # numerator and, as a last channel, denominator
        product = torch.cat([p @ v[:, :, start : start + KEY_BLOCK], p.sum(-1, keepdim=True)], -1)
        rise = torch.zeros_like(new_max) if row_max is None else new_max - row_max
        if kind.startswith("float"):
            sums = sums * torch.exp2(-rise.double() * octave) + product
        elif "release" in kind:
            sums = torch.div(sums * _alpha(rise, octave, inverse), inverse, rounding_mode="floor") + product.long()
        else:
            power = (power * inverse + (1 << 63)) % (1 << 64) - (1 << 63)
            sums = sums * _alpha(rise, octave, inverse) + product.long() * power  # int64 wraps by itself
            if "32" in kind:
                sums = _wrap(sums)
        row_max = new_max
    sums = sums.double()
    out = sums[..., :-1] / sums[..., -1:]
    return torch.where(torch.isfinite(out), out, 0.0) * float(value8.scale)


def scales_part(device: torch.device, tick: Tick) -> list[dict[str, Any]]:
    """Measure :data:`ACCUMULATIONS` over :data:`TILES` tiles of 64 keys; 64 queries, 4 heads, d = 64, uniform in [-4, 4)."""
    rows = []
    for tiles in TILES:
        found: dict[str, list[float]] = {kind: [] for kind in ACCUMULATIONS}
        for seed in SEEDS:
            generator = torch.Generator().manual_seed(seed)

            def draw(tokens: int, generator: torch.Generator = generator) -> torch.Tensor:
                uniform = torch.rand((1, 4, tokens, 64), generator=generator, dtype=torch.float32, device="cpu")
                return (uniform * 8 - 4).to(device)

            inputs = draw(KEY_BLOCK), draw(tiles * KEY_BLOCK), draw(tiles * KEY_BLOCK)
            exact = exact_attention(*inputs)
            for kind, values in found.items():
                values.append(sqnr(exact, accumulation(kind, *inputs)))
        for kind, values in found.items():
            row: dict[str, Any] = {"part": "scales", "group": kind, "label": f"{tiles} tiles", "tiles": tiles}
            rows.append(row | {"input": "uniform", "sqnr_db": summary(values)})
        tick(f"{tiles} tiles")
    return rows


# --- appendix B.2: division against multiply and shift ---------------------------------------------------------------


def _cpu_operations(x: torch.Tensor) -> dict[str, Callable[[], object]]:
    out = torch.empty_like(x)

    def shifted() -> None:
        torch.mul(x, 45007, out=out)
        torch.bitwise_right_shift(out, 16, out=out)

    return {
        "multiply": lambda: torch.mul(x, 45007, out=out),
        "multiply and shift": shifted,
        "divide": lambda: torch.div(x, 45007, rounding_mode="trunc", out=out),
    }


def throughput_part(device: torch.device, rounds: int, tick: Tick) -> list[dict[str, Any]]:
    """Measure int32 operations a second: on a GPU in a Triton kernel, elsewhere by PyTorch's own (a pass an operation)."""
    rows = []
    timers: dict[str, Any] = {}
    if device.type == "cuda":
        from .ablation_kernels import OPERATIONS, operations, prepare_throughput

        programs, loops = 16 * torch.cuda.get_device_properties(device).multi_processor_count, 16
        count = operations(programs, loops)
        method = "int32 in registers, Triton: the operation and an exclusive or, 16 x 16 times an element"
        for name in OPERATIONS:
            timers[name] = bench_timers.GraphTimer(prepare_throughput(name, device, programs=programs, loops=loops))
    else:
        count = 1 << 15
        method = "plain timing of PyTorch's int32 operations on 2^15 elements in cache; multiply and shift are two passes"
        x = torch.arange(1, count + 1, dtype=torch.int32, device="cpu")
        timers = {name: _CpuSample(call) for name, call in _cpu_operations(x).items()}
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in timers}
    for _ in range(rounds):
        for name, timer in timers.items():
            samples[name].append(timer.sample())
    for name, found in samples.items():
        row: dict[str, Any] = {"part": "throughput", "group": "int32", "label": name, "input": method} | bench_timers.summarise(
            found
        )
        rows.append(row | {"gops": round(count / row["median_us"] / 1e3, 3)})
        tick(name)
    return rows


class _CpuSample:
    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call
        call()

    def sample(self) -> dict[str, float]:
        begin = time.perf_counter()
        for _ in range(20):
            self._call()
        return {"us": (time.perf_counter() - begin) * 1e6 / 20}


# --- appendix B.3 and this library's own steps -----------------------------------------------------------------------

GRANULARITIES = (
    *((q, k, "tensor") for q in ("tensor", "head", "token") for k in ("tensor", "head", "token")),
    ("token", "token", "head"),
    ("token", "token", "channel"),
)
"""Of query, key and value."""

ARITHMETIC = {
    name: recipe.replace(smooth_key=False, balance=False)
    for name, recipe in (("paper", PAPER), ("default", DEFAULT), ("accurate", ACCURATE))
}
"""The presets without preparation of the key, so that a granularity is all that differs."""

LADDER_PRESETS = {DEFAULT: " (DEFAULT)", ACCURATE: " (ACCURATE)"}


def ladder_recipes() -> list[tuple[str, str, Recipe]]:
    """Return (group, label, recipe), each recipe one change from the one before it in its group."""
    recipe = PAPER
    rows = [("arithmetic", "Algorithm 1 (PAPER)", recipe)]
    for label, change in (
        ("true row maximum first (two_pass)", {"normalization": "two_pass"}),
        ("output keeps the accumulator's precision", {"output": "accumulator"}),
        ("P rounded, not floored", {"probability_rounding": "nearest"}),
        ("P has 8 bits", {"probability_bits": 8}),
        ("quadratic exponential", {"exponential": "quadratic"}),
        ("P has 15 bits", {"probability_bits": 15}),
    ):
        recipe = recipe.replace(**change)
        rows.append(("arithmetic", label, recipe))
    for bits in (8, 15):
        group = f"scales, {bits}-bit P"
        finer = recipe.replace(probability_bits=bits)
        rows.append((group, "one scale per tensor", finer))
        for label, scales in (
            ("query scale per token", {"query_granularity": "token"}),
            ("key scale per head", {"key_granularity": "head"}),
            ("value scale per channel", {"value_granularity": "channel"}),
            ("smooth_key", {"smooth_key": True}),
            ("key scale per token", {"key_granularity": "token"}),
            ("balance", {"balance": True}),
            ("rotate", {"rotate": True}),
        ):
            finer = finer.replace(**scales)
            rows.append((group, label + LADDER_PRESETS.get(finer, ""), finer))
    return rows


def single_changes() -> list[tuple[str, str, Recipe]]:
    """Return (group, label, recipe): DEFAULT, and DEFAULT with one thing changed."""
    group = "DEFAULT, one thing changed"
    changes: tuple[tuple[str, dict[str, Any]], ...] = (
        ("nothing", {}),
        ("linear exponential", {"exponential": "linear"}),
        ("P floored", {"probability_rounding": "floor"}),
        ("P has 7 bits", {"probability_bits": 7}),
        ("P has 15 bits", {"probability_bits": 15}),
        ("output floored at s_V", {"output": "value_scale"}),
        ("without smooth_key", {"smooth_key": False}),
        ("with balance", {"balance": True}),
        ("with rotate", {"rotate": True}),
        ("query scale per tensor", {"query_granularity": "tensor"}),
        ("key scale per tensor", {"key_granularity": "tensor"}),
        ("key scale per token", {"key_granularity": "token"}),
        ("value scale per tensor", {"value_granularity": "tensor"}),
    )
    return [(group, label, DEFAULT.replace(**change)) for label, change in changes]


def quantized(inputs: Tensors, recipe: Recipe) -> tuple[QuantizedTensor, QuantizedTensor, QuantizedTensor]:
    """Return the int8 tensors that ``qflash.attention`` forms under ``recipe`` (without rotation)."""
    query, key, value = inputs
    if recipe.smooth_key:
        key = center_channels(key)
    if recipe.balance:
        query, key = balance_channels(query, key)
    return (
        quantize(query, recipe.query_granularity),
        quantize(key, recipe.key_granularity),
        quantize(value, recipe.value_granularity),
    )


def int8_output(inputs: Tensors, recipe: Recipe, fitted: bool, backend: str = "auto") -> torch.Tensor:
    """Return the integer-only path's int8 output, dequantised, at s_V or at a scale that just holds the output.

    Either has the granularity of the value's scale.
    """
    tensors = quantized(inputs, recipe)
    scale = None
    if fitted:
        amplitude = exact_attention(*inputs).abs().float()
        reduced = -2 if recipe.value_granularity == "channel" else (-4, -3, -2, -1)
        scale = amplitude.amax(dim=reduced, keepdim=True) / 127
    out = int8_attention(*tensors, output_scale=scale, recipe=recipe, backend=backend)
    assert isinstance(out, QuantizedTensor)
    return out.dequantize()


Row = tuple[str, str, Callable[[Tensors], torch.Tensor]]


def attention_rows(recipes: Sequence[tuple[str, str, Recipe]], backend: str = "auto") -> list[Row]:
    """Return (group, label, function from inputs to the output of ``qflash.attention``)."""

    def run(recipe: Recipe) -> Callable[[Tensors], torch.Tensor]:
        return lambda inputs: attention(*inputs, recipe=recipe, backend=backend)

    return [(group, label, run(recipe)) for group, label, recipe in recipes]


def ladder_rows(backend: str = "auto") -> list[Row]:
    """Return the ladder of :func:`ladder_recipes`, exact softmax on the same int8 tensors, and int8 outputs."""

    def ceiling(recipe: Recipe) -> Callable[[Tensors], torch.Tensor]:
        def exact(inputs: Tensors) -> torch.Tensor:
            query, key, value = (x.dequantize() for x in quantized(inputs, recipe))
            return exact_attention(query, key, value)

        return exact

    def int8(recipe: Recipe, fitted: bool) -> Callable[[Tensors], torch.Tensor]:
        return lambda inputs: int8_output(inputs, recipe, fitted, backend)

    coarse = bench_methods.RECIPES["per-tensor"]
    result = attention_rows(ladder_recipes(), backend)
    for label, recipe in (("per-tensor", coarse), ("DEFAULT's", DEFAULT), ("ACCURATE's", ACCURATE)):
        result.append(("float64 softmax on the same int8 tensors", f"{label} scales", ceiling(recipe)))
    for label, recipe in (("per-tensor scales", coarse), ("DEFAULT's scales", DEFAULT)):
        result.append(("int8 output, DEFAULT's arithmetic", f"{label}, output at s_V", int8(recipe, False)))
        result.append(("int8 output, DEFAULT's arithmetic", f"{label}, fitted output scale", int8(recipe, True)))
    return result


def measure_rows(
    rows: Sequence[Row], names: Sequence[str], device: torch.device, tick: Tick, seeds: Sequence[int] = SEEDS
) -> Iterator[tuple[str, str, dict[str, dict[str, float]]]]:
    """Yield (group, label, SQNR by input) of every row, on the inputs :data:`INPUTS` called ``names``."""
    drawn: dict[str, list[Tensors]] = {}
    for name in names:
        drawn[name] = []
        for seed in seeds:
            query, key, value = (x.to(device) for x in INPUTS[name][1](seed))
            drawn[name].append((query, key, value))
    exact = {name: [exact_attention(*inputs) for inputs in tensors] for name, tensors in drawn.items()}
    for group, label, function in rows:
        figures = {}
        for name, tensors in drawn.items():
            found = [sqnr(wanted, function(inputs)) for inputs, wanted in zip(tensors, exact[name], strict=True)]
            figures[name] = summary(found)
        tick(label)
        yield group, label, figures


def granularity_rows() -> list[Row]:
    """Return the grid :data:`GRANULARITIES` x :data:`ARITHMETIC`; the group is the arithmetic's name."""
    recipes = []
    for name, recipe in ARITHMETIC.items():
        for q, k, v in GRANULARITIES:
            changed = recipe.replace(query_granularity=q, key_granularity=k, value_granularity=v)
            recipes.append((name, f"Q {q}, K {k}, V {v}", changed))
    return attention_rows(recipes)


def _flat(part: str, measured: Iterator[tuple[str, str, dict[str, dict[str, float]]]]) -> list[dict[str, Any]]:
    return [
        {"part": part, "group": group, "label": label, "input": name, "sqnr_db": figure}
        for group, label, figures in measured
        for name, figure in figures.items()
    ]


# --- output -----------------------------------------------------------------------------------------------------------

TITLES = {
    "kernel": "From float to integer (appendix A)",
    "scales": "Scale accumulation against scale release (appendix B.1): SQNR, dB",
    "throughput": "Integer operations (appendix B.2)",
    "granularity": "Granularity of the scales (appendix B.3): SQNR, dB",
    "steps": "QFlash's own steps: SQNR, dB",
}


def _mean(row: dict[str, Any]) -> str:
    figure = row.get("sqnr_db")
    return "-" if figure is None else f"{figure['mean']:.2f}" if isinstance(figure["mean"], float) else str(figure["mean"])


def sections(record: dict[str, Any]) -> list[tuple[str, str, list[str], list[list[str]]]]:
    """Lay a record out as tables: (part, title, header, rows), shared by the terminal and the report."""
    found = []
    for part in PARTS:
        rows = [row for row in record["rows"] if row["part"] == part]
        if not rows:
            continue
        if part == "kernel":
            titles = dict(STEPS)
            header, body = ["step", "", "input", "SQNR dB", "median µs", "quartiles", "against V0"], []
            for row in rows:
                timed = row.get("median_us") is not None
                times = [f"{row['median_us']:.1f}", f"{row['q1_us']:.1f} - {row['q3_us']:.1f}"] if timed else ["-", "-"]
                speed = f"{row['speedup']:.2f}" if row.get("speedup") else "-"
                what = row["error"] or f"kernel, {titles.get(row['label'][:2], 'PyTorch')}" if row["group"] == "kernel" else ""
                body.append([row["label"], what or f"formula, {row['title']}", row["input"], _mean(row), *times, speed])
        elif part == "throughput":
            header = ["operation", "Gop/s", "how"]
            body = [[row["label"], f"{row['gops']:.2f}", row["input"]] for row in rows]
        else:
            columns = "label" if part == "scales" else "input"
            lines = ("group",) if part == "scales" else ("group", "label")
            names = list(dict.fromkeys(row[columns] for row in rows))
            keys = list(dict.fromkeys(tuple(row[line] for line in lines) for row in rows))
            by = {(*(row[line] for line in lines), row[columns]): _mean(row) for row in rows}
            header = [*("" for _ in lines), *names]
            body = [[*key, *(by.get((*key, name), "-") for name in names)] for key in keys]
            if len(lines) == 2:  # a group is named once, on its first line
                for line, key, before in zip(body, keys, [("",), *keys], strict=False):
                    line[0] = "" if key[0] == before[0] else line[0]
        found.append((part, TITLES[part], header, body))
    return found


def draw(
    record: dict[str, Any],
    part: str,
    colours: Sequence[str] = ("#c8553d", "#3b82c4", "#2f9e6e", "#b8860b", "#8a63c4", "#6b7480"),
) -> Any:
    """Draw one part as a matplotlib Figure; None where a part has nothing to draw.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    rows = [row for row in record["rows"] if row["part"] == part]
    if part == "kernel":
        rows = [row for row in rows if row.get("median_us") is not None] or [row for row in rows if row["group"] == "formula"]
    if not rows or part == "steps":
        return None
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.add_subplot()
    if part == "scales":
        for index, kind in enumerate(dict.fromkeys(row["group"] for row in rows)):
            mine = [row for row in rows if row["group"] == kind]
            dashes = "-" if "scale" in kind else "--"
            axes.plot(
                [row["tiles"] for row in mine], [float(row["sqnr_db"]["mean"]) for row in mine], dashes, marker="o",
                markersize=4,
                color=colours[index % len(colours)], label=kind,
            )  # fmt: skip
        axes.set_xscale("log", base=2)
        axes.set_xticks(TILES, [str(n) for n in TILES])
        axes.set_xlabel("tiles of 64 keys")
        axes.set_ylabel("SQNR, dB")
        figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize="small")
    elif part == "granularity":
        names = list(dict.fromkeys(row["label"] for row in rows))
        for index, group in enumerate(ARITHMETIC):
            means = {
                row["label"]: row["sqnr_db"]["mean"] for row in rows if row["group"] == group and row["input"] == "outliers"
            }
            spots = [names.index(name) for name in means]
            axes.plot([float(x) for x in means.values()], spots, "o", color=colours[index], label=group)
        axes.set_yticks(range(len(names)), names, fontsize="small")
        axes.invert_yaxis()
        axes.set_xlabel("SQNR on inputs with outlier channels, dB")
        figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize="small")
    else:
        labels = [row["label"] for row in rows]
        timed = part == "throughput" or rows[0].get("median_us") is not None
        if part == "throughput":
            heights, title = [row["gops"] for row in rows], "10⁹ operations a second"
        elif timed:
            heights, title = [row["median_us"] for row in rows], "µs a call"
        else:
            heights, title = [float(row["sqnr_db"]["mean"]) for row in rows], "SQNR, dB"
        bars = axes.bar(labels, heights, color=colours[1], width=0.6)
        axes.bar_label(bars, fmt="%.4g", fontsize="small")
        axes.set_ylabel(title)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="both" if part == "scales" else "y", alpha=0.3)
    axes.set_axisbelow(True)
    return figure


def write(folder: pathlib.Path, record: dict[str, Any]) -> None:
    """Write ``ablate.json`` and ``ablate.csv``."""
    records.write_json(folder / "ablate.json", record)
    rows = []
    for row in record["rows"]:
        figure = row.get("sqnr_db") or {}
        rows.append(row | {"sqnr_db": figure.get("mean"), "sqnr_min": figure.get("min"), "sqnr_max": figure.get("max")})
    records.write_csv(folder / "ablate.csv", rows, FIELDS)


@torch.inference_mode()
def run_ablate(
    *,
    parts: Sequence[str] = PARTS,
    device: torch.device,
    batch: int | None = None,
    rounds: int = 15,
    output: pathlib.Path | None = None,
) -> dict[str, Any]:
    """Measure, print tables and write ``ablate.json``, ``.csv`` and a plot a part into ``output``.

    Args:
        parts: of :data:`PARTS`.
        device: a CUDA device or the CPU.
        batch: images of A2 for V0 to V4; 1024 on a GPU (the paper's), 8 on a CPU if None.
        rounds: samples of every time.
        output: made if it is not there.

    Returns:
        what ``ablate.json`` holds: environment, conditions and rows.

    Raises:
        ValueError: an unknown part; batch or rounds below 1.
    """
    for part in parts:
        if part not in PARTS:
            raise ValueError(f"part must be one of {PARTS}, got {part!r}")
    batch = batch if batch is not None else GPU_BATCH if device.type == "cuda" else CPU_BATCH
    if batch < 1 or rounds < 1:
        raise ValueError(f"batch and rounds must be at least 1, got {batch} and {rounds}")
    started = time.monotonic()
    record: dict[str, Any] = {
        "what": "ablation of the integer attention",
        "environment": records.environment(device),
        "sqnr": "20 log10(|ref| / |out - ref|) against float64 softmax attention on the inputs before quantisation; mean, "
        f"lowest and highest over seeds {SEEDS}",
        "timing": latency.timing_method(device, rounds) if device.type == "cuda" else "no GPU: no kernel was timed",
        "inputs": {name: text for name, (text, _) in INPUTS.items()},
        "rows": [],
    }
    steps = [*ladder_rows(), *attention_rows(single_changes())]
    grid = granularity_rows()
    jobs = {"kernel": len(STEPS) + 7 * (device.type == "cuda"), "scales": len(TILES), "throughput": 3}
    jobs |= {"granularity": len(grid), "steps": len(steps)}
    with bench_console.progress_bar(sum(jobs[part] for part in PARTS if part in parts)) as tick:
        for part in PARTS:
            if part not in parts:
                continue
            if part == "kernel":
                rows = kernel_part(device, batch, rounds, tick)
            elif part == "scales":
                rows = scales_part(device, tick)
            elif part == "throughput":
                rows = throughput_part(device, rounds, tick)
            elif part == "granularity":
                rows = _flat(part, measure_rows(grid, ("A2", "normal", "outliers"), device, tick))
            else:
                rows = _flat(part, measure_rows(steps, tuple(INPUTS), device, tick))
            record["rows"] += rows
            if output is not None:
                write(output, record)
    record["seconds"] = round(time.monotonic() - started, 1)
    console = bench_console.table_console()
    console.print(f"{record['environment']['device']}. {record['timing']}.\n")
    for _, title, header, body in sections(record):
        table = Table(title=title, title_justify="left")
        for index, column in enumerate(header):
            table.add_column(column, justify="left" if index == 0 or not column or column == "how" else "right")
        for cells in body:
            table.add_row(*cells)
        console.print(table)
    if output is not None:
        write(output, record)
        try:
            for part in PARTS:
                figure = draw(record, part)
                if figure is not None:
                    figures.write_figure(output, f"ablate-{part}", figure)
            plots = " and a plot a part"
        except ImportError as error:
            plots = f"; no plots: {error}"
        console.print(f"Written to {output}: ablate.json, ablate.csv{plots}")
    return record
