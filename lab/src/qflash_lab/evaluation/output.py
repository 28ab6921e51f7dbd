"""What ``qflash-lab evaluate`` shows: its table, sentences, plot and files."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from qflash.paths import write_whole

from .classifiers import FASHION_PART
from .outcome_store import to_csv
from .statistics import CONFIDENCE
from .summaries import SIGNIFICANCE

_COLUMNS = (
    "model", "method", "integer_only", "bits", "gbops", "gbops_as_in_paper", "images", "right", "top1_percent", "top1_low",
    "top1_high", "top5_percent", "difference_points", "difference_low", "difference_high", "lost", "gained", "mcnemar_p",
    "same_prediction_percent", "loss_change", "not_finite", "network_gbops",
)  # fmt: skip


def _bits(summary: dict[str, Any]) -> str:
    return ", ".join("x".join(str(width) for width in pair) for pair in summary["bits"])


def _rows(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Flatten the report to one row per model and method, keyed by :data:`_COLUMNS`."""
    rows = []
    for result in report["models"]:
        for summary in result["methods"]:
            against = summary.get("against_fp32", {})
            row = {key: summary.get(key, against.get(key, "")) for key in _COLUMNS}
            row |= {"model": result["model"], "images": result["images"], "bits": _bits(summary)}
            row |= dict(zip(("top1_low", "top1_high"), summary["top1_interval_percent"], strict=True))
            row |= dict(
                zip(("difference_low", "difference_high"), against.get("difference_interval_points", ("", "")), strict=True)
            )
            rows.append(row)
    return rows


def publish(report: dict[str, Any], folder: Path, console: Console) -> None:
    """Print the table and write the files."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "evaluate.json", json.dumps(report, indent=1, allow_nan=False) + "\n")
    rows = _rows(report)
    write_whole(
        folder / "evaluate.csv",
        to_csv([_COLUMNS, *([f"{x:.6g}" if isinstance(x, float) else x for x in row.values()] for row in rows)]),
    )
    _plot(report, folder / "evaluate.svg")
    conditions = report["conditions"]
    for result in report["models"]:
        console.print(_table(result, conditions))
        for line in _sentences(result):
            console.print(line, highlight=False)
    console.print(f"Results: {folder / 'evaluate.json'}, per image: {folder}/MODEL/METHOD.csv", highlight=False)


def _table(result: dict[str, Any], conditions: dict[str, Any]) -> Table:
    title = f"{result['model']}: {result['images']} images of {result['run']['data']['name']}"
    caption = (
        f"{conditions['device']}, {conditions['dtype']}, batches of {conditions['batch']}. GBOPs: of attention. "
        f"Brackets: {CONFIDENCE:.0%} intervals (Wilson; paired bootstrap). "
        "Lost, gained: images right with FP32 only, with the method only. p: McNemar, exact. "
        "Loss change: mean absolute difference of an image's cross entropy to FP32's, nats."
    )
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
    for header in ("method", "integer", "bits QK, PV"):
        table.add_column(header)
    for header in ("GBOPs", "paper's", "Top-1 %", "Top-5 %", "to FP32, points", "lost", "gained", "p", "loss change"):
        table.add_column(header, justify="right")
    for s in result["methods"]:
        low, high = s["top1_interval_percent"]
        cells = [
            s["method"],
            "yes" if s["integer_only"] else "no",
            _bits(s),
            f"{s['gbops']:.3g}",
            f"{s['gbops_as_in_paper']:.3g}",
        ]
        cells += [f"{s['top1_percent']:.2f} [{low:.2f}, {high:.2f}]", f"{s['top5_percent']:.2f}"]
        if "against_fp32" in s:
            a = s["against_fp32"]
            low, high = a["difference_interval_points"]
            cells += [f"{a['difference_points']:+.2f} [{low:+.2f}, {high:+.2f}]"]
            cells += [str(a["lost"]), str(a["gained"]), f"{a['mcnemar_p']:.2g}"]
            cells += ["-" if a["loss_change"] is None else f"{a['loss_change']:.2g}"]
        table.add_row(*cells)
    return table


def _sentences(result: dict[str, Any]) -> list[str]:
    """Say in words which integer-only method is best, and what went wrong."""
    lines = []
    verdict = result["integer_only"]
    if verdict is not None:
        line = f"Integer-only, most images right: {', '.join(verdict['best'])} ({verdict['top1_percent']:.2f} %)."
        if verdict["tied"]:
            names = ", ".join(f"{tie['method']} (p = {tie['mcnemar_p']:.2g})" for tie in verdict["tied"])
            line += f" Not distinguishable from it on these images (McNemar, {SIGNIFICANCE:.0%}): {names}."
        if verdict["by_loss_change"]:
            line += f" Closest to FP32 by loss change: {', '.join(verdict['by_loss_change'][:3])}."
        lines.append(line)
    if result["run"]["data"]["name"] == FASHION_PART:
        lines.append("These images come with qflash. All 10,000 test images: --data FOLDER, with Fashion-MNIST's idx files.")
    whole = [summary for summary in result["methods"] if "network_gbops" in summary]
    if whole:
        figures = ", ".join(f"{summary['method']} {summary['network_gbops']:.3g}" for summary in whole)
        lines.append(f"GBOPs an image of the whole network, multiply-adds times the widths of both operands: {figures}.")
    for summary in result["methods"]:
        if summary["not_finite"]:
            lines.append(f"{summary['method']}: {summary['not_finite']} images without finite logits, counted as wrong.")
    return lines


def _plot(report: dict[str, Any], path: Path) -> None:
    """Draw Top-1 with its interval by method, one panel per model."""
    import matplotlib
    from matplotlib.figure import Figure

    results = report["models"]
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "qflash", "font.family": "sans-serif"}):
        columns = min(len(results), 4)
        lines = math.ceil(len(results) / columns)
        height = lines * (0.8 + 0.28 * len(results[0]["methods"])) + 0.4
        figure = Figure(figsize=(1.6 + 3.2 * columns, height), layout="constrained")
        panels = figure.subplots(lines, columns, squeeze=False, sharey=True).flatten()
        for axes in panels[len(results) :]:
            axes.set_axis_off()
        for axes, result in zip(panels, results, strict=False):
            summaries = result["methods"]
            for place, s in enumerate(summaries):
                low, high = s["top1_interval_percent"]
                colour = "#3b82c4" if s["integer_only"] else "#6b7480"
                axes.plot([low, high], [place, place], "-", color=colour)
                axes.plot(s["top1_percent"], place, "o" if s["integer_only"] else "s", color=colour, markersize=5)
            axes.axvline(summaries[0]["top1_percent"], color="#6b7480", linewidth=0.8, linestyle=":")
            axes.set_yticks(range(len(summaries)), [s["title"] for s in summaries])
            axes.set_title(result["model"], fontsize="medium")
            axes.set_xlabel("Top-1, %")
            axes.spines[["top", "right"]].set_visible(False)
        panels[0].set_ylim(len(results[0]["methods"]) - 0.4, -0.6)
        marks = [matplotlib.lines.Line2D([], [], color=c, marker=m, label=t) for c, m, t in (
            ("#3b82c4", "o", "integer-only"), ("#6b7480", "s", "not integer-only"),
        )]  # fmt: skip
        figure.legend(handles=marks, loc="outside lower center", ncols=2, frameon=False)
        figure.savefig(path, metadata={"Date": None})
