"""The accuracy tables of README.md and docs/algorithm.md: the ladder of ``qflash-lab ablate --part steps``, and amplitudes.

Every row differs from the one above it by one field of the recipe. The reference back end computes them, so
the figures hold for every back end. ``docs/algorithm.md`` explains the rows and quotes the result.

    python benchmarks/ladder.py             # measure, print, write results/ladder.json and the tables in the pages
    python benchmarks/ladder.py --tables    # only write the pages' tables again, from results/ladder.json
"""

from __future__ import annotations

import datetime
import json
import math
import platform
from collections.abc import Callable, Sequence

import torch
from rich.progress import track

import declared
import qflash
from declared import Group, Heading, Of, Table, groups, one
from qflash_lab.baselines import AUTHORS, PRINTED
from qflash_lab.bench import schema as col
from qflash_lab.bench.ablation_recipes import INPUTS, SEEDS, gaussian, ladder_rows, measure_rows, quantized
from qflash_lab.bench.console import progress_bar
from qflash_lab.bench.metrics import exact_attention, sqnr, summary
from qflash_lab.bench.tables import Column, names

RESULT = declared.RESULTS / "ladder.json"
NAMED = {
    "PRINTED": "`qflash-printed`, the paper to the letter",
    "AUTHORS": "`qflash-authors`, its authors' code",
    "PAPER": "`PAPER`",
    "DEFAULT": "`DEFAULT`",
    "ACCURATE": "`ACCURATE`",
}
"""What the table of README calls the rows that it takes from the ladder."""


def ladder() -> list[col.Row]:
    """Measure every row on every input."""
    rows = ladder_rows("reference")
    with progress_bar(len(rows)) as tick:
        return list(measure_rows(rows, tuple(INPUTS), torch.device("cpu"), tick))


def exact_on_int8(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return exact attention on the int8 tensors of the default recipe."""
    query, key, value = (x.dequantize() for x in quantized((query, key, value), qflash.DEFAULT))
    return exact_attention(query, key, value)


def amplitudes() -> list[col.Row]:
    """Measure the presets and the paper's own arithmetic over amplitudes of query and key, and a float64 softmax.

    The softmax is on DEFAULT's int8 tensors. All are compared with exact attention on the inputs, float32. What a method
    refuses has the error.
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
    measured: list[col.Row] = []
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
        for name, values in found.items():
            row: col.Row = {col.AMPLITUDE: amplitude, col.METHOD: name, col.SQNR_DB: None, col.ERROR: failed.get(name)}
            measured.append(row if name in failed else row | summary(values))
    return measured


def by_input() -> list[Group]:
    """Return the ladder's rows, a group for the inputs of each."""
    return groups(declared.rows("ladder", of="steps"), col.GROUP, col.LABEL, by=lambda row: row[col.INPUT])


def every_step() -> list[Group | Heading]:
    """Return all lines, each group behind its name."""
    lines: list[Group | Heading] = []
    before = ""
    for line in by_input():
        if one(col.GROUP)(line) != before:
            before = one(col.GROUP)(line)
            lines.append(Heading(before))
        lines.append(line)
    return lines


def preset_of(line: Group) -> str | None:
    """Return what README calls a line, None where it leaves it out."""
    label = str(one(col.LABEL)(line))
    if one(col.GROUP)(line).startswith("float64"):
        return f"{one(col.GROUP)(line)}, {label}"
    return next((title for preset, title in NAMED.items() if f"({preset})" in label), None)


def presets() -> list[Group]:
    """Return the lines of README's table, those of the exact softmax last."""
    return sorted((line for line in by_input() if preset_of(line)), key=lambda line: one(col.GROUP)(line).startswith("float64"))


def amplitude_columns(lines: Sequence[Group]) -> list[Column]:
    """Return a column for each method."""
    first = names("amplitude of Q and K", lambda line: f"{one(col.AMPLITUDE)(line):g}")
    return [
        first,
        *(Column(method, Of(method, col.SQNR_DB), lambda db: "fails" if db is None else f"{db:.2f}") for method in lines[0]),
    ]


SQNR = tuple(Column(kind, Of(kind, col.SQNR_DB)) for kind in INPUTS)
TABLES = {
    "ladder:all": Table(every_step, (names("SQNR, dB", one(col.LABEL)), *SQNR)),
    "ladder:presets": Table(presets, (names("SQNR, dB", preset_of), *SQNR)),
    "ladder:amplitudes": Table(lambda: groups(declared.rows("ladder", of="amplitudes"), col.AMPLITUDE), amplitude_columns),
}
"""Between markers of the pages."""


PARTS = declared.Parts(TABLES)


def main() -> None:
    """Measure, print, write."""
    if declared.parser(__doc__).parse_args().tables:
        PARTS.write()
        return
    steps, scaled = ladder(), amplitudes()
    if not all(math.isfinite(row[col.SQNR_DB]) for row in steps):
        raise ValueError("a result is not finite")
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
    RESULT.write_text(json.dumps(record, indent=1) + "\n")
    PARTS.write()
    for lines in PARTS.blocks().values():
        print("\n".join(lines))


if __name__ == "__main__":
    main()
