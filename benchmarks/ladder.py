"""The accuracy tables of README.md and docs/algorithm.md: the ladder of ``qflash-lab ablate --part steps``, and amplitudes.

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
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import qflash
from qflash_lab.baselines import AUTHORS, PRINTED
from qflash_lab.bench.ablation_recipes import INPUTS, SEEDS, gaussian, ladder_rows, measure_rows, quantized, summary
from qflash_lab.bench.console import progress_bar
from qflash_lab.bench.metrics import exact_attention, sqnr

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import pages  # noqa: E402

ROOT = HERE.parent
RESULT = ROOT / "benchmarks" / "results" / "ladder.json"
NAMED = {
    "PRINTED": "`qflash-printed`, the paper to the letter",
    "AUTHORS": "`qflash-authors`, its authors' code",
    "PAPER": "`PAPER`",
    "DEFAULT": "`DEFAULT`",
    "ACCURATE": "`ACCURATE`",
}
"""What the table of README calls the rows that it takes from the ladder."""
PAGES = (ROOT / "docs" / "algorithm.md", ROOT / "README.md")


def ladder() -> list[dict[str, Any]]:
    """Measure every row on every input."""
    rows = ladder_rows("reference")
    with progress_bar(len(rows)) as tick:
        return [
            {"group": group, "step": label, "sqnr_db": figures}
            for group, label, figures in measure_rows(rows, tuple(INPUTS), torch.device("cpu"), tick)
        ]


def exact_on_int8(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return exact attention on the int8 tensors of the default recipe."""
    query, key, value = (x.dequantize() for x in quantized((query, key, value), qflash.DEFAULT))
    return exact_attention(query, key, value)


def amplitudes() -> list[dict[str, object]]:
    """Measure the presets and the paper's own arithmetic over amplitudes of query and key, and a float64 softmax.

    The softmax is on DEFAULT's int8 tensors. All are compared with exact attention on the inputs, float32. What a method
    refuses is None.
    """

    def recipe(choices: qflash.Recipe) -> Callable[..., torch.Tensor]:
        return lambda *inputs: qflash.attention(*inputs, recipe=choices, backend="reference")

    functions: dict[str, Callable[..., torch.Tensor]] = {
        "PRINTED": PRINTED.attention,
        "AUTHORS": AUTHORS.attention,
        "PAPER": recipe(qflash.PAPER),
        "DEFAULT": recipe(qflash.DEFAULT),
        "float64 softmax, DEFAULT's int8 tensors": exact_on_int8,
    }
    measured: list[dict[str, object]] = []
    for amplitude in track((1e-4, 1e-2, 0.1, 1.0, 16.0, 128.0, 1e3), "amplitudes"):
        found: dict[str, list[float]] = {name: [] for name in functions}
        failed: dict[str, str] = {}
        for seed in SEEDS:
            query, key, value = (x.float() for x in gaussian(seed, (1, 2, 1024, 64)))
            inputs = (query * amplitude, key * amplitude, value)
            exact = exact_attention(*inputs)
            for name, function in functions.items():
                try:
                    found[name].append(sqnr(exact, function(*inputs)))
                except ArithmeticError as error:  # round(1 / s) is 0 or leaves 32 bits
                    failed[name] = str(error)
        figures = {name: None if name in failed else summary(values) for name, values in found.items()}
        measured.append({"amplitude": amplitude, "sqnr_db": figures, "refused": failed})
    return measured


def mean(figure: dict | None) -> str:
    """Format a mean, of what a method refused that it did."""
    return "fails" if figure is None else f"{figure['mean']:.2f}"


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
        table.add_row(f"{row['amplitude']:g}", *map(mean, row["sqnr_db"].values()))
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
        for preset, label in NAMED.items():
            if f"({preset})" in row["step"]:
                tables["presets"].append(line(label, row))
    for row in record["steps"]:
        if row["group"].startswith("float64"):
            tables["presets"].append(line(f"{row['group']}, {row['step']}", row))
    columns = list(record["amplitudes"][0]["sqnr_db"])
    tables["amplitudes"] = [f"| amplitude of Q and K | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for row in record["amplitudes"]:
        figures = " | ".join(mean(row["sqnr_db"][name]) for name in columns)
        tables["amplitudes"].append(f"| {row['amplitude']:g} | {figures} |")
    return tables


def blocks() -> dict[str, list[str]]:
    """Return the lines between markers of the pages, by the markers' names."""
    return {f"ladder:{name}": lines for name, lines in markdown(json.loads(RESULT.read_text())).items()}


def write_tables() -> None:
    """Put the tables between their markers in the pages."""
    for page in PAGES:
        page.write_text(pages.fill(page.read_text(), blocks()))


def files() -> list[str]:
    """Return the result files behind the tables."""
    return [RESULT.name]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", action="store_true", help="only write the pages' tables again")
    if parser.parse_args().tables:
        write_tables()
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
    write_tables()


if __name__ == "__main__":
    main()
