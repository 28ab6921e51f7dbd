"""Measure what each change to the paper's arithmetic is worth, in decibels, on the CPU.

Every row differs from the one above it by one field of the recipe. The reference back end computes them, so
the figures hold for every back end. ``docs/algorithm.md`` explains the rows and quotes the result.

    python benchmarks/ladder.py             # measure, print, write results/ladder.json and the tables in the pages
    python benchmarks/ladder.py --tables    # only write the pages' tables again, from results/ladder.json
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import platform
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import qflash
from qflash import QuantizedTensor, Recipe
from qflash.metrics import sqnr
from qflash.quantization import balance_channels, center_channels
from qflash.workloads import get_workload, paper_inputs

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
SEEDS = (0, 1, 2)
ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "ladder.json"
PRESETS = {qflash.DEFAULT: " (DEFAULT)", qflash.ACCURATE: " (ACCURATE)"}
PAGES = (ROOT / "docs" / "algorithm.md", ROOT / "README.md")


def gaussian(seed: int, shape: tuple[int, ...] = (1, 4, 1024, 64)) -> Tensors:
    """Draw query, key and value from N(0, 1), rounded to float16."""
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(shape, generator=generator).half() for _ in range(3))
    return query, key, value


def outliers(seed: int) -> Tensors:
    """Draw N(0, 1) tensors with a loud query channel, two shifted key channels and a shifted value channel."""
    query, key, value = gaussian(seed, (1, 6, 197, 64))
    query[..., 3] *= 8
    key[..., 3] += 12
    key[..., 7] -= 9
    value[..., 5] += 4
    return query, key, value


INPUTS: dict[str, tuple[str, Callable[[int], Tensors]]] = {
    "A2": ("A2, batch 8, uniform [-4, 4), float16", lambda seed: paper_inputs(get_workload("A2"), 8, seed)),
    "A7": ("A7, batch 8, uniform [-4, 4), float16", lambda seed: paper_inputs(get_workload("A7"), 8, seed)),
    "normal": ("1 x 4 x 1024 x 64, N(0, 1), float16", gaussian),
    "outliers": ("1 x 6 x 197 x 64, N(0, 1) with outlier channels, float16", outliers),
}


def exact_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return softmax attention in float64."""
    query, key, value = query.double(), key.double(), value.double()
    return torch.softmax(query @ key.mT * query.shape[-1] ** -0.5, dim=-1) @ value


def recipes() -> list[tuple[str, str, Recipe]]:
    """Return (group, label, recipe), each recipe one change from the one before it in its group."""
    recipe = qflash.PAPER
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
        for label, change in (
            ("query scale per token", {"query_granularity": "token"}),
            ("key scale per head", {"key_granularity": "head"}),
            ("value scale per channel", {"value_granularity": "channel"}),
            ("smooth_key", {"smooth_key": True}),
            ("key scale per token", {"key_granularity": "token"}),
            ("balance", {"balance": True}),
            ("rotate", {"rotate": True}),
        ):
            finer = finer.replace(**change)
            rows.append((group, label + PRESETS.get(finer, ""), finer))
    return rows


def quantized(inputs: Tensors, recipe: Recipe) -> tuple[QuantizedTensor, QuantizedTensor, QuantizedTensor]:
    """Return the int8 tensors that ``qflash.attention`` forms under ``recipe`` (without rotation)."""
    query, key, value = inputs
    if recipe.smooth_key:
        key = center_channels(key)
    if recipe.balance:
        query, key = balance_channels(query, key)
    return (
        qflash.quantize(query, recipe.query_granularity),
        qflash.quantize(key, recipe.key_granularity),
        qflash.quantize(value, recipe.value_granularity),
    )


def int8_output(inputs: Tensors, recipe: Recipe, fitted: bool) -> torch.Tensor:
    """Return the integer-only path's int8 output, dequantised, at s_V or at a scale that just holds the output.

    Either has the granularity of the value's scale.
    """
    tensors = quantized(inputs, recipe)
    scale = None
    if fitted:
        amplitude = exact_attention(*inputs).abs().float()
        reduced = -2 if recipe.value_granularity == "channel" else (-4, -3, -2, -1)
        scale = amplitude.amax(dim=reduced, keepdim=True) / 127
    out = qflash.int8_attention(*tensors, output_scale=scale, recipe=recipe, backend="reference")
    assert isinstance(out, QuantizedTensor)
    return out.dequantize()


def rows() -> list[tuple[str, str, Callable[[Tensors], torch.Tensor]]]:
    """Return (group, label, function from inputs to an output)."""

    def run(recipe: Recipe) -> Callable[[Tensors], torch.Tensor]:
        return lambda inputs: qflash.attention(*inputs, recipe=recipe, backend="reference")

    def ceiling(recipe: Recipe) -> Callable[[Tensors], torch.Tensor]:
        return lambda inputs: exact_attention(*(x.dequantize() for x in quantized(inputs, recipe)))

    def int8(recipe: Recipe, fitted: bool) -> Callable[[Tensors], torch.Tensor]:
        return lambda inputs: int8_output(inputs, recipe, fitted)

    coarse = qflash.DEFAULT.replace(
        query_granularity="tensor", key_granularity="tensor", value_granularity="tensor", smooth_key=False
    )
    result = [(group, label, run(recipe)) for group, label, recipe in recipes()]
    for label, recipe in (("per-tensor", coarse), ("DEFAULT's", qflash.DEFAULT), ("ACCURATE's", qflash.ACCURATE)):
        result.append(("float64 softmax on the same int8 tensors", f"{label} scales", ceiling(recipe)))
    for label, recipe in (("per-tensor scales", coarse), ("DEFAULT's scales", qflash.DEFAULT)):
        result.append(("int8 output, DEFAULT's arithmetic", f"{label}, output at s_V", int8(recipe, False)))
        result.append(("int8 output, DEFAULT's arithmetic", f"{label}, fitted output scale", int8(recipe, True)))
    return result


def summary(values: list[float]) -> dict[str, float]:
    """Return mean, lowest and highest of a few decibel values."""
    return {"mean": round(statistics.fmean(values), 3), "min": round(min(values), 3), "max": round(max(values), 3)}


def ladder() -> list[dict[str, object]]:
    """Measure every row on every input."""
    data = {name: [draw(seed) for seed in SEEDS] for name, (_, draw) in INPUTS.items()}
    exact = {name: [exact_attention(*inputs) for inputs in drawn] for name, drawn in data.items()}
    measured: list[dict[str, object]] = []
    for group, label, function in track(rows(), "ladder"):
        figures = {
            name: summary([sqnr(reference, function(inputs)) for inputs, reference in zip(drawn, exact[name], strict=True)])
            for name, drawn in data.items()
        }
        measured.append({"group": group, "step": label, "sqnr_db": figures})
    return measured


def amplitudes() -> list[dict[str, object]]:
    """Measure DEFAULT and PAPER over amplitudes of query and key, and a float64 softmax on DEFAULT's int8 tensors.

    All three are compared with exact attention on the inputs.
    """
    measured: list[dict[str, object]] = []
    for amplitude in track((1e-4, 1e-2, 0.1, 1.0, 16.0, 128.0, 1e3), "amplitudes"):
        found: dict[str, list[float]] = {"PAPER": [], "DEFAULT": [], "float64 softmax, DEFAULT's int8 tensors": []}
        for seed in SEEDS:
            query, key, value = (x.float() for x in gaussian(seed, (1, 2, 1024, 64)))
            inputs = (query * amplitude, key * amplitude, value)
            exact = exact_attention(*inputs)
            outputs = (
                qflash.attention(*inputs, recipe=qflash.PAPER, backend="reference"),
                qflash.attention(*inputs, recipe=qflash.DEFAULT, backend="reference"),
                exact_attention(*(x.dequantize() for x in quantized(inputs, qflash.DEFAULT))),
            )
            for values, out in zip(found.values(), outputs, strict=True):
                values.append(sqnr(exact, out))
        measured.append({"amplitude": amplitude, "sqnr_db": {name: summary(values) for name, values in found.items()}})
    return measured


def show(steps: list[dict], scaled: list[dict]) -> None:
    """Print both tables."""
    console = Console()
    table = Table("step", *INPUTS, title=f"SQNR in dB, mean over seeds {SEEDS}")
    group = None
    for row in steps:
        if row["group"] != group:
            group = row["group"]
            table.add_section()
            table.add_row(f"[bold]{group}")
        table.add_row(row["step"], *(f"{row['sqnr_db'][name]['mean']:.2f}" for name in INPUTS))
    console.print(table)
    table = Table("amplitude of Q and K", *scaled[0]["sqnr_db"], title="N(0, 1), N = 1024, D = 64")
    for row in scaled:
        table.add_row(f"{row['amplitude']:g}", *(f"{value['mean']:.2f}" for value in row["sqnr_db"].values()))
    console.print(table)


def markdown(record: dict) -> dict[str, list[str]]:
    """Return the pages' tables, by the name of their markers."""
    heading = [f"| SQNR, dB | {' | '.join(INPUTS)} |", "|---" * (len(INPUTS) + 1) + "|"]

    def line(label: str, row: dict) -> str:
        return f"| {label} | " + " | ".join(f"{row['sqnr_db'][name]['mean']:.2f}" for name in INPUTS) + " |"

    tables: dict[str, list[str]] = {"all": list(heading), "presets": list(heading)}
    group = None
    for row in record["steps"]:
        if row["group"] != group:
            group = row["group"]
            tables["all"].append(f"| **{group}** |" + " |" * len(INPUTS))
        tables["all"].append(line(row["step"], row))
        for preset in ("PAPER", "DEFAULT", "ACCURATE"):
            if f"({preset})" in row["step"]:
                tables["presets"].append(line(f"`{preset}`", row))
    for row in record["steps"]:
        if row["group"].startswith("float64"):
            tables["presets"].append(line(f"{row['group']}, {row['step']}", row))
    columns = list(record["amplitudes"][0]["sqnr_db"])
    tables["amplitudes"] = [f"| amplitude of Q and K | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for row in record["amplitudes"]:
        figures = " | ".join(f"{row['sqnr_db'][name]['mean']:.2f}" for name in columns)
        tables["amplitudes"].append(f"| {row['amplitude']:g} | {figures} |")
    return tables


def write_tables(record: dict) -> None:
    """Put the tables between their markers, ``<!-- ladder:name -->`` and ``<!-- end -->``, in the pages."""
    for page in PAGES:
        text = page.read_text()
        for name, lines in markdown(record).items():
            first = f"<!-- ladder:{name} -->\n"
            head, found, rest = text.partition(first)
            if found:
                text = head + first + "\n".join(lines) + "\n" + rest[rest.index("<!-- end -->") :]
        page.write_text(text)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", action="store_true", help="only write the pages' tables again")
    if parser.parse_args().tables:
        write_tables(json.loads(RESULT.read_text()))
        return
    steps, scaled = ladder(), amplitudes()
    assert all(math.isfinite(figure["mean"]) for row in steps for figure in row["sqnr_db"].values())
    show(steps, scaled)
    record = {
        "what": "SQNR against float64 attention on the unquantised inputs, 20 log10(|ref| / |out - ref|)",
        "date": datetime.date.today().isoformat(),
        "device": "CPU",
        "backend": "reference",
        "versions": {"qflash": qflash.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "seeds": list(SEEDS),
        "inputs": {name: text for name, (text, _) in INPUTS.items()},
        "steps": steps,
        "amplitudes": scaled,
    }
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps(record, indent=1) + "\n")
    write_tables(record)


if __name__ == "__main__":
    main()
