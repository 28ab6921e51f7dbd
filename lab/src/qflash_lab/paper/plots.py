"""Plots of the pages that the commands do not draw: dots on horizontal lines, which a phone shows without overlaps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..bench import figures
from ..bench import schema as col
from ..bench.html import INK

Row = dict[str, Any]

WIDTH = 4.4
"""Of a plot in inches: letters are readable where it is as wide as a phone."""

_TITLES = {
    col.SDPA_FLASH: "FlashAttention-2", col.SDPA_CUDNN: "cuDNN", col.SDPA_EFFICIENT: "memory-efficient",
    col.QFLASH: "QFlash, fp16",
    col.QFLASH_INT8: "QFlash, int8", col.I_VIT: "I-ViT", col.INT_FLASH_FULL: "INT-Flash-Full",
    col.INT_FLASH_HALF: "INT-Flash-Half", col.QATTN: "QAttn",
}  # fmt: skip


def _lines(count: int, columns: int = 1) -> tuple[Any, list[Any]]:
    """Return a figure for ``count`` labelled lines and its axes side by side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, 0.24 * count + 1.1), layout="constrained")
    axes = list(figure.subplots(1, columns, sharey=True, squeeze=False)[0])
    for one in axes:
        one.spines[["top", "right", "left"]].set_visible(False)
        one.tick_params(axis="y", length=0)
        one.grid(axis="y", color=INK, alpha=0.12)
        one.set_axisbelow(True)
        one.set_ylim(count - 0.5, -0.5)
    return figure, axes


def ratio_dots(rows: Sequence[Row], mode: str, label: Callable[[Row], str]) -> Any:
    """Draw how many times as fast as the fastest 16-bit kernel each method is, a line a shape.

    Args:
        rows: of ``qflash-lab bench``, with times.
        mode: ``"end-to-end"`` or ``"kernel"``: what is drawn. Ratios are to PyTorch's kernels in either.
        label: names a row's line.

    Returns:
        a matplotlib Figure, or None where no row has that mode or nothing to be compared with.
    """
    best: dict[str, float] = {}
    for row in rows:
        if row["method"] in col.FP16:
            best[label(row)] = min(best.get(label(row), row[col.MEDIAN_US]), row[col.MEDIAN_US])
    drawn = [row for row in rows if row["mode"] == mode and label(row) in best]
    if not drawn:
        return None
    labels = list(dict.fromkeys(map(label, drawn)))
    figure, (axes,) = _lines(len(labels))
    for method in dict.fromkeys(row["method"] for row in drawn):
        mine = [row for row in drawn if row["method"] == method]
        ours = method.startswith("qflash")
        axes.plot(
            [best[label(row)] / row[col.MEDIAN_US] for row in mine], [labels.index(label(row)) for row in mine],
            "D" if ours else "o", color=figures.colour_of(method), markersize=6 if ours else 4.5,
            label=_TITLES.get(method, method), zorder=3 if ours else 2,
        )  # fmt: skip
    axes.axvline(1, color=INK, linewidth=0.8, alpha=0.6)
    axes.set_xscale("log", base=2)
    low, high = axes.get_xlim()
    ticks = [tick for tick in (0.125, 0.25, 0.5, 1, 2, 4, 8) if low <= tick <= high]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_yticks(range(len(labels)), labels, fontsize="small")
    axes.set_xlabel("times as fast as the fastest 16-bit kernel", fontsize="small")
    figure.legend(loc="outside upper left", ncols=3, frameon=False, fontsize="small", handletextpad=0.2, columnspacing=1.0)
    return figure


def sqnr_dots(rows: Sequence[Row], workloads: Sequence[str]) -> Any:
    """Draw the SQNR of every method on workloads side by side: mean and range over the seeds, the paper's as a cross.

    Returns:
        a matplotlib Figure, or None where nothing was measured.
    """
    by = {(row["workload"], row["title"]): row for row in rows if isinstance(row[col.SQNR_DB], float)}
    titles = list(dict.fromkeys(title for _, title in by))
    present = [name for name in workloads if any(workload == name for workload, _ in by)]
    if not titles or not present:
        return None
    figure, every = _lines(len(titles), len(present))
    least, most = (pick(row[col.SQNR_DB] for row in by.values()) for pick in (min, max))
    limits = (least - 0.1 * (most - least) - 1, most + 0.1 * (most - least) + 1)
    for axes, workload in zip(every, present, strict=True):
        for place, title in enumerate(titles):
            row = by.get((workload, title))
            if row is None:
                continue
            colour = figures.colour_of(row["method"])
            axes.plot([row[col.SQNR_MIN_DB], row[col.SQNR_MAX_DB]], [place, place], "-", color=colour, linewidth=3, alpha=0.5)
            axes.plot(row[col.SQNR_DB], place, "o" if row["integer_only"] else "s", color=colour, markersize=5.5)
            if row[col.PAPER_SQNR_DB]:
                axes.plot(row[col.PAPER_SQNR_DB], place, "x", color=INK, markersize=6, zorder=4)
        axes.set_title(workload, loc="left", fontsize="small")
        axes.set_xlim(*limits)
        axes.set_xlabel("SQNR, dB", fontsize="small")
        axes.grid(axis="x", color=INK, alpha=0.12)
    every[0].set_yticks(range(len(titles)), titles, fontsize="small")
    return figure
