"""SQNR and MSE of every method: A2 and A7 with 8 images, other distributions, real activations; tables of README and docs.

python benchmarks/accuracy.py measures, writes results/accuracy*.json and .csv beside this script and the tables into the
pages. ``--real`` measures only what ``qflash-lab accuracy --input real`` downloads, and the activations of the tests.
"""

from __future__ import annotations

import functools
import math
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import declared
import pages
from declared import Extreme, Group, Of, Table, groups, one
from qflash_lab.baselines import get_method
from qflash_lab.baselines.integer import make_scores, quantize_input
from qflash_lab.bench import schema as col
from qflash_lab.bench.accuracy import INPUTS, Case, make_cases, run_accuracy
from qflash_lab.bench.metrics import exact_attention, sqnr
from qflash_lab.bench.records import environment, write_json
from qflash_lab.bench.tables import Column, names
from qflash_lab.bench.workloads import get_workload, paper_inputs

ACTIVATIONS = pages.ROOT / "tests" / "activations.safetensors"
DRAWN = tuple(kind for kind in INPUTS if kind != "real")
SEEDS, I_VIT_SEEDS = 5, 20
REAL_BATCH = 4
"""Photos a call; the five seeds take all twenty."""
SHOWN = (
    "qflash-default", "qflash-accurate", "qflash-paper", "qflash-printed", "qflash-authors", "int-flash-half", "int-flash-full",
    "qattn",
)  # fmt: skip
"""Methods of the table of single heads."""
INVERSE, TEMPERATURE, SQNR = "inverse_scale", "temperature_percent", col.SQNR_DB


def number(row: col.Row, spread: bool = False) -> str:
    """Return a row's SQNR, with the range over the seeds if that is wanted."""
    if row[col.ERROR]:
        return "failed"
    text = f"{row[col.SQNR_DB]:.2f}"
    return text + f" [{row[col.SQNR_MIN_DB]:.1f}, {row[col.SQNR_MAX_DB]:.1f}]" if spread else text


def place_of(row: col.Row) -> str:
    """Return what a column is called: the workload, and what it was drawn from where it was drawn."""
    return row[col.WORKLOAD] if row[col.INPUT] == "captured" else f"{row[col.INPUT]} {row[col.WORKLOAD]}"


def by_method(file: str, chosen: Callable[[col.Row], bool], by: Callable[[col.Row], str] = place_of) -> list[Group]:
    """Return the rows of a file that are chosen, a group for the inputs of each method."""
    return groups(filter(chosen, declared.rows(file)), col.METHOD, by=by)


def sqnr_column(heading: str, place: str, spread: bool = False) -> Column:
    """Return the column of an input, or of a method where lines are inputs."""
    return Column(heading, lambda line: number(line[place], spread))


def every(heading: str, lines: Sequence[Group]) -> list[Column]:
    """Return a column of SQNR for each input."""
    return [names(heading, one(col.TITLE)), *(sqnr_column(place, place) for place in lines[0])]


def paper_columns() -> Iterator[Column]:
    """Yield the columns of the paper's inputs: our mean and range, the paper's figure."""
    yield names("", one(col.TITLE))
    for name in ("A2", "A7"):
        yield sqnr_column(f"{name}, here", name, spread=True)
        yield Column(f"{name}, paper", Of(name, col.PAPER_SQNR_DB))
    for name, heading in (("A2", "MSE A2, here"), ("A7", "MSE A7, here")):
        yield Column(heading, Of(name, col.MSE), ".2e")
        yield Column("paper", Of(name, col.PAPER_MSE), ".2e")


def layer_columns(lines: Sequence[Group]) -> list[Column]:
    """Return the columns of the layers of the pretrained network, means only."""
    columns = [names("SQNR, dB, in layer", one(col.TITLE))]
    for layer in lines[0]:
        columns.append(Column(layer.removeprefix("DINOv2-S layer "), Of(layer, col.SQNR_DB), ".1f"))
    for heading, choose in (("least", min), ("mean", statistics.fmean)):
        columns.append(Column(heading, Extreme(tuple(lines[0]), col.SQNR_DB, choose), ".1f"))
    return columns


def activations() -> list[Group]:
    """Return the tests' activations: a row a head."""
    mine = (row for row in declared.rows("accuracy_real") if row[col.INPUT] == ACTIVATIONS.name)
    return groups(mine, col.WORKLOAD)


def shown_columns(lines: Sequence[Group]) -> list[Column]:
    """Return a column for each of :data:`SHOWN`."""
    found = [names("SQNR, dB", one(col.WORKLOAD))]
    for name in SHOWN:
        heading = lines[0][name][col.TITLE].removeprefix("QFlash ")
        found.append(sqnr_column(heading, name))
    return found


TABLES = {
    "accuracy:paper": Table(
        lambda: by_method("accuracy", lambda row: row[col.INPUT] == "paper", one(col.WORKLOAD)), tuple(paper_columns())
    ),
    "accuracy:other": Table(
        lambda: by_method("accuracy", lambda row: row[col.INPUT] != "paper"), functools.partial(every, "SQNR, dB")
    ),
    "accuracy:layers": Table(
        lambda: by_method("accuracy_real", lambda row: row[col.INPUT] == "real", one(col.WORKLOAD)), layer_columns
    ),
    "accuracy:activations": Table(activations, shown_columns),
}
"""Declared tables between markers of the pages."""


def measure_i_vit() -> dict[str, Any]:
    """Measure I-ViT on A2 and A7 over twenty draws: 1 / S, what rounding it does to the temperature, and the SQNR."""
    rows = []
    for name in ("A2", "A7"):
        for seed in range(I_VIT_SEEDS):
            inputs = paper_inputs(get_workload(name), 8, seed)
            (query, query_scale), (key, key_scale) = map(quantize_input, inputs[:2])
            unit = (query_scale.double() * key_scale.double() * query.shape[-1] ** -0.5).reshape(())
            scores = make_scores(query, key, unit)
            inverse = 127 / (float(scores.amplitude()) * float(unit))
            # 1.4375 for log2(e), and 1 / S rounded
            temperature = round(inverse) * math.log2(math.e) / (1.4375 * inverse) - 1
            found = sqnr(exact_attention(*inputs), get_method("i-vit").attention(*inputs))
            row = {"workload": name, "seed": seed, "inverse_scale": round(inverse, 3), col.SQNR_DB: round(found, 3)}
            rows.append(row | {"temperature_percent": round(100 * temperature, 2)})
    what = (
        "I-ViT on the paper's inputs, batch 8: 1 / S of the 8-bit scores, its rounding as a change of the temperature, and SQNR"
    )
    return {"what": what, "environment": environment(torch.device("cpu")), "rows": rows}


def i_vit_table() -> list[str]:
    """Eight of the draws on A2, by 1 / S, and the means."""
    rows = declared.rows("accuracy_i_vit")
    a2, a7 = ([row for row in rows if row["workload"] == name] for name in ("A2", "A7"))
    ordered = sorted(a2, key=lambda row: -row["inverse_scale"])
    shown = [ordered[round(index * (len(ordered) - 1) / 7)] for index in range(8)]
    lines = [f"| 1 / S | {' | '.join(f'{row[INVERSE]:.2f}' for row in shown)} |", "|---" * 9 + "|"]
    lines.append(f"| temperature | {' | '.join(f'{row[TEMPERATURE]:+.1f} %' for row in shown)} |")
    lines.append(f"| SQNR, dB | {' | '.join(f'{row[SQNR]:.1f}' for row in shown)} |")
    said = []
    for name, of in (("A2", a2), ("A7", a7)):
        values = [row[SQNR] for row in of]
        said.append(f"{name} {statistics.fmean(values):.1f} dB, from {min(values):.1f} to {max(values):.1f}")
    return [*lines, "", *pages.wrap(f"Means of {I_VIT_SEEDS} seeds: {'; '.join(said)}.")]


def real_line() -> list[str]:
    """README's sentence about real activations."""
    rows = declared.rows("real_cpu", of="layers")
    photos = next(row["samples"] for row in declared.rows("real_cpu", of="networks") if row["network"] == "DINOv2-S 224 px")

    def span(method: str) -> str:
        values = [row[col.SQNR_DB] for row in rows if (row["network"], row["method"]) == ("DINOv2-S 224 px", method)]
        return f"{min(values):.1f} to {max(values):.1f} dB"

    return pages.wrap(
        "In a trained ViT-S/14 of DINOv2's layout ([whose weights](docs/evaluation.md#the-dinov2-s-of-these-pages)) attention "
        f"layers have {span('qflash-default')} with `DEFAULT`, {span('qflash-accurate')} with `ACCURATE` and "
        f"{span('qflash-paper')} with `PAPER`, on {photos} photos."
    )


PARTS = declared.Parts(
    TABLES, {"accuracy:i-vit": i_vit_table, "accuracy:real": real_line}, ["accuracy_i_vit.json", "real_cpu.json"]
)


def measure(name: str, cases: list[Case]) -> None:
    """Measure every method and keep ``NAME.json`` and ``NAME.csv``."""
    with tempfile.TemporaryDirectory() as folder:
        run_accuracy(cases, seeds=SEEDS, output=Path(folder))
        for kind in ("json", "csv"):
            shutil.copyfile(Path(folder) / f"accuracy.{kind}", declared.RESULTS / f"{name}.{kind}")


def measure_drawn() -> None:
    """Measure on what needs no download."""
    measure("accuracy", make_cases(DRAWN, ("A2", "A7"), batch=8))
    write_json(declared.RESULTS / "accuracy_i_vit.json", measure_i_vit())


def measure_real(data: Path | None) -> None:
    """Measure on the pretrained network's activations.

    Args:
        data: folder of the wheels; None to download them.
    """
    measure("accuracy_real", make_cases(("real", str(ACTIVATIONS)), batch=REAL_BATCH, data=data))


if __name__ == "__main__":
    parser = declared.parser(__doc__)
    parser.add_argument("--real", action="store_true", help="measure real activations only")
    parser.add_argument("--data", type=Path, help="folder of the wheels that real activations need; downloaded if left out")
    arguments = parser.parse_args()
    if not arguments.tables:
        if not arguments.real:
            measure_drawn()
        measure_real(arguments.data)
    PARTS.write()
