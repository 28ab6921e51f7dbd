"""Tables, plot and files of ``qflash-lab real``."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.table import Table

from ..baselines import METHODS
from ..baselines.method import FLOAT
from . import figures, real_integer, records
from . import schema as col
from .schema import Row
from .tables import Column, names
from .tables import render as render_table

LAYER_FIELDS = ("network", "layer", "method", col.SQNR_DB, col.WORST_HEAD_DB)
"""Columns of ``real.csv``."""


def render(record: Row) -> Iterator[Table]:
    """Yield the tables of a record of :func:`qflash_lab.bench.real.run_real`."""
    for network in dict.fromkeys(row["network"] for row in record["networks"]):
        yield _network_table(network, record)
    for classifier in dict.fromkeys(row["classifier"] for row in record["top1"]):
        rows = [row for row in record["top1"] if row["classifier"] == classifier]
        yield _top1_table(classifier, rows, record["conditions"]["fashion"])
    if record["integer"]:
        yield render_table(record["integer"], real_integer.COLUMNS, "Integer networks, texts that calibration did not see")


def _own_cells(row: Row) -> dict[str, str]:
    """Return what only this kind of network has, cells by their headings."""
    if "nearest_kept" in row:
        return {
            "nearest kept": f"{row['nearest_kept']}/{row['samples']}",
            "of 5 nearest": f"{row['nearest_five_kept_percent']:.1f} %",
        }
    if "lines_right" in row:
        return {
            "lines right": f"{row['lines_right']}/{row['samples']}",
            "as float": f"{row['lines_same']}/{row['samples']}",
        }
    if "saliency_sqnr_db" in row:
        return {"saliency same": f"{row['saliency_same_percent']:.2f} %", "saliency": f"{row['saliency_sqnr_db']:.1f}"}
    return {}


def _network_table(network: str, record: Row) -> Table:
    whole = [row for row in record["networks"] if row["network"] == network]
    layers = [row for row in record["layers"] if row["network"] == network]
    samples, vectors = "photos", "CLS"
    if "nearest_kept" in whole[0]:
        samples, vectors = "texts", "embedding"
    elif "lines_right" in whole[0]:
        samples, vectors = "lines", "scores"
    title = f"{network}, {whole[0]['samples']} {samples}: SQNR in dB by layer, then the whole network"
    own = {(each[col.METHOD], each[col.LAYER]): each[col.SQNR_DB] for each in layers}

    def layer_column(layer: int) -> Column:
        return Column(str(layer), lambda row: own[row[col.METHOD], layer], ".1f")

    columns = [names("method", col.METHOD), *map(layer_column, sorted({row[col.LAYER] for row in layers}))]
    columns += [Column("worst head", col.WORST_HEAD_DB, ".1f"), Column(vectors, col.SQNR_DB, ".1f")]
    columns += [Column("cosine least", "cosine_min", ".5f"), Column("cosine mean", "cosine_mean", ".5f")]
    columns += [Column(heading, lambda row, heading=heading: _own_cells(row)[heading]) for heading in _own_cells(whole[0])]  # type: ignore[misc]
    return render_table(whole, columns, title)


def _top1_table(classifier: str, rows: Sequence[Row], conditions: Row) -> Table:
    learned = "the method's own" if conditions["training_features"] == "own" else "float attention's"
    title = (
        f"Fashion-MNIST by {classifier} on DINOv2-S features: {conditions['test_images']} test images at "
        f"{conditions['side']} px, {conditions['dtype']}; learned from {learned} features of "
        f"{conditions['training_images']} images"
    )
    return render_table(rows, TOP1, title)


def _ends(key: str, form: str) -> Callable[[Row], str | None]:
    return lambda row: None if row[col.ERROR] else " to ".join(format(end, form) for end in row[key])


TOP1 = (
    names("method", col.METHOD), Column("Top-1, %", "top1_percent", ".2f"),
    Column("95 % interval", _ends("top1_interval_percent", ".2f")), Column("against float", "difference_points", "+.2f"),
    Column("95 % interval", _ends("difference_interval_points", "+.2f")), Column("lost", "lost", "d"),
    Column("gained", "gained", "d"), Column("McNemar p", "mcnemar_p", ".2g"),
    Column("same answer, %", "agreement_percent", ".2f"), Column("features, dB", "feature_sqnr_db"),
)  # fmt: skip
"""Columns of the tables of Top-1."""


def draw_figure(record: Row) -> Any:
    """Draw the SQNR of every layer, one panel a network, one line a method; float methods are left out.

    Returns:
        a matplotlib Figure.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: no row has a finite SQNR.
    """
    quantised = [row for row in record["layers"] if METHODS[row["method"]].query_granularity != FLOAT]
    shown = [row for row in quantised if math.isfinite(row[col.SQNR_DB])]
    if not shown:
        raise ValueError("there are no layers of methods that quantise")
    figure, found = figures.panels(shown, "network", lambda row: str(row["layer"]), width=9, height=3.0)
    for axes, network, series in found:
        for name, mine, _, _, colour in series:
            line = "-" if METHODS[name].integer_only else "--"
            layers = [row["layer"] for row in mine]
            axes.plot(layers, [row[col.SQNR_DB] for row in mine], line, marker="o", markersize=4, color=colour,
                      label=METHODS[name].title)  # fmt: skip
        axes.set_xlabel("attention layer")
        axes.set_ylabel("SQNR, dB")
        axes.set_title(f"{network} (dashed: not integer-only)", loc="left", fontsize="medium")
    figures.add_legend(figure)
    return figure


def write(record: Row, folder: pathlib.Path, say: Callable[[str], None]) -> None:
    """Write ``real.json``, ``real.csv`` (layers) and, where there is something to draw, ``real.png``."""
    records.write_json(folder / "real.json", record)
    records.write_csv(folder / "real.csv", record["layers"], LAYER_FIELDS)
    try:
        draw_figure(record).savefig(folder / "real.png", dpi=150)
        say(f"Written to {folder}: real.json, real.csv, real.png")
    except (ImportError, ValueError) as error:
        say(f"Written to {folder}: real.json, real.csv; no plot: {error}")
