"""What ``qflash-lab ablate`` shows of a record: tables, plots and the CSV file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas

from . import schema as col
from .ablation_formulas import STEPS, TILES
from .ablation_recipes import ARITHMETIC
from .figures import colour_of
from .schema import Row
from .tables import number

PARTS = ("kernel", "scales", "throughput", "granularity", "steps")

FIELDS = col.pick(
    col.PART, col.GROUP, col.LABEL, col.INPUT, *col.TIMES, col.GOPS, col.SPEEDUP, col.SQNR_DB, col.SQNR_MIN_DB, col.SQNR_MAX_DB,
    col.ERROR,
)  # fmt: skip
"""Columns of ``ablate.csv``."""

TITLES = {
    "kernel": "From float to integer (appendix A)",
    "scales": "Scale accumulation against scale release (appendix B.1): SQNR, dB",
    "throughput": "Integer operations (appendix B.2)",
    "granularity": "Granularity of the scales (appendix B.3): SQNR, dB",
    "steps": "QFlash's own steps: SQNR, dB",
}


def _mean(row: Row) -> str:
    return number(row.get(col.SQNR_DB))


def sections(record: dict[str, Any]) -> list[tuple[str, str, pandas.DataFrame]]:
    """Lay a record out as tables: (part, title, cells), shared by the terminal and the report."""
    found = []
    for part in PARTS:
        rows = [row for row in record["rows"] if row["part"] == part]
        if not rows:
            continue
        if part == "kernel":
            titles = dict(STEPS)
            header, body = ["step", "", "input", "SQNR dB", "median µs", "quartiles", "against V0"], []
            for row in rows:
                timed = row.get(col.MEDIAN_US) is not None
                times = [f"{row[col.MEDIAN_US]:.1f}", f"{row[col.Q1_US]:.1f} - {row[col.Q3_US]:.1f}"] if timed else ["-", "-"]
                speed = f"{row[col.SPEEDUP]:.2f}" if row.get(col.SPEEDUP) else "-"
                what = ""
                if row["group"] == "kernel":
                    what = row.get(col.ERROR) or f"kernel, {titles.get(row['label'][:2], 'PyTorch')}"
                body.append([row["label"], what or f"formula, {row['title']}", row["input"], _mean(row), *times, speed])
        elif part == "throughput":
            header = ["operation", "Gop/s", "how"]
            body = [[row["label"], f"{row[col.GOPS]:.2f}", row["input"]] for row in rows]
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
        found.append((part, TITLES[part], pandas.DataFrame(body, columns=header)))
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
        rows = [row for row in rows if row.get(col.MEDIAN_US) is not None] or [row for row in rows if row["group"] == "formula"]
    if not rows or part == "steps":
        return None
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.add_subplot()
    if part == "scales":
        for index, kind in enumerate(dict.fromkeys(row["group"] for row in rows)):
            mine = [row for row in rows if row["group"] == kind]
            dashes = "-" if "scale" in kind else "--"
            axes.plot(
                [row["tiles"] for row in mine], [float(row[col.SQNR_DB]) for row in mine], dashes, marker="o",
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
        for group in ARITHMETIC:
            means = {row["label"]: row[col.SQNR_DB] for row in rows if row["group"] == group and row["input"] == "outliers"}
            spots = [names.index(name) for name in means]
            axes.plot([float(x) for x in means.values()], spots, "o", color=colour_of(f"qflash {group}"), label=group)
        axes.set_yticks(range(len(names)), names, fontsize="small")
        axes.invert_yaxis()
        axes.set_xlabel("SQNR on inputs with outlier channels, dB")
        figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize="small")
    else:
        labels = [row["label"] for row in rows]
        timed = part == "throughput" or rows[0].get(col.MEDIAN_US) is not None
        if part == "throughput":
            heights, title = [row[col.GOPS] for row in rows], "10⁹ operations a second"
        elif timed:
            heights, title = [row[col.MEDIAN_US] for row in rows], "µs a call"
        else:
            heights, title = [float(row[col.SQNR_DB]) for row in rows], "SQNR, dB"
        bars = axes.bar(labels, heights, color=colours[1], width=0.6)
        axes.bar_label(bars, fmt="%.0f" if part == "throughput" else "%.4g", fontsize="small")
        axes.set_ylabel(title)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="both" if part == "scales" else "y", alpha=0.3)
    axes.set_axisbelow(True)
    return figure
