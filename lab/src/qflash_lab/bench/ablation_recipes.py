"""Recipes that ``qflash-lab ablate`` compares by accuracy (appendix B.3, this library's own steps), and their inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from qflash.api import attention, int8_attention, quantize
from qflash.specification.quantization import QuantizedTensor, balance_channels, center_channels
from qflash.specification.recipe import ACCURATE, DEFAULT, PAPER, Recipe

from ..baselines import AUTHORS, PRINTED
from . import schema as col
from .methods import RECIPES
from .metrics import exact_attention, sqnr, summary
from .workloads import add_outliers, get_workload, paper_inputs

SEEDS = (0, 1, 2)

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Tick = Callable[[str], None]

# --- inputs ----------------------------------------------------------------------------------------------------------


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


# --- recipes ---------------------------------------------------------------------------------------------------------

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
        ("row sum before rounding", {"row_sum": "exact"}),
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
            ("smooth_value", {"smooth_value": True}),
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
        ("row sum of rounded P", {"row_sum": "rounded"}),
        ("without smooth_key", {"smooth_key": False}),
        ("with smooth_value", {"smooth_value": True}),
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
        quantize(value, recipe.value_granularity, center=recipe.smooth_value),
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
    """Return the paper's own arithmetic, the ladder of :func:`ladder_recipes`, exact softmax and int8 outputs."""

    def ceiling(recipe: Recipe) -> Callable[[Tensors], torch.Tensor]:
        def exact(inputs: Tensors) -> torch.Tensor:
            query, key, value = (x.dequantize() for x in quantized(inputs, recipe))
            return exact_attention(query, key, value)

        return exact

    def int8(recipe: Recipe, fitted: bool) -> Callable[[Tensors], torch.Tensor]:
        return lambda inputs: int8_output(inputs, recipe, fitted, backend)

    coarse = RECIPES["per-tensor"]
    result: list[Row] = [
        ("the paper's own arithmetic", f"{label} ({name})", lambda inputs, method=method: method.attention(*inputs))  # type: ignore[misc]
        for label, name, method in (("as printed", "PRINTED", PRINTED), ("its authors' code", "AUTHORS", AUTHORS))
    ]
    result += attention_rows(ladder_recipes(), backend)
    for label, recipe in (("per-tensor", coarse), ("DEFAULT's", DEFAULT), ("ACCURATE's", ACCURATE)):
        result.append(("float64 softmax on the same int8 tensors", f"{label} scales", ceiling(recipe)))
    for label, recipe in (("per-tensor scales", coarse), ("DEFAULT's scales", DEFAULT)):
        result.append(("int8 output, DEFAULT's arithmetic", f"{label}, output at s_V", int8(recipe, False)))
        result.append(("int8 output, DEFAULT's arithmetic", f"{label}, fitted output scale", int8(recipe, True)))
    return result


def measure_rows(
    rows: Sequence[Row], names: Sequence[str], device: torch.device, tick: Tick, seeds: Sequence[int] = SEEDS
) -> Iterator[dict[str, Any]]:
    """Yield a row of results of every row and every input of :data:`INPUTS` called as in ``names``."""
    drawn: dict[str, list[Tensors]] = {}
    for name in names:
        drawn[name] = []
        for seed in seeds:
            query, key, value = (x.to(device) for x in INPUTS[name][1](seed))
            drawn[name].append((query, key, value))
    exact = {name: [exact_attention(*inputs) for inputs in tensors] for name, tensors in drawn.items()}
    for group, label, function in rows:
        for name, tensors in drawn.items():
            found = [sqnr(wanted, function(inputs)) for inputs, wanted in zip(tensors, exact[name], strict=True)]
            yield {col.GROUP: group, col.LABEL: label, col.INPUT: name} | summary(found)
        tick(label)


def granularity_rows() -> list[Row]:
    """Return the grid :data:`GRANULARITIES` x :data:`ARITHMETIC`; the group is the arithmetic's name."""
    recipes = []
    for name, recipe in ARITHMETIC.items():
        for q, k, v in GRANULARITIES:
            changed = recipe.replace(query_granularity=q, key_granularity=k, value_granularity=v)
            recipes.append((name, f"Q {q}, K {k}, V {v}", changed))
    return attention_rows(recipes)
