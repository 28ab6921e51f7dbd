"""Plots in panels, a group of marks for every label and a colour for every method: what bench, models and accuracy draw."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from . import schema as col
from .schema import Row

COLOURS = {
    "fp32": "#8d8d8d", "timm": "#5f6b76", "flash": "#6b7480", "cudnn": "#9b7a4b", "efficient": "#c2a05a", "math": "#b0a99f",
    "i-vit": "#8a63c4", "i-vit-16": "#b49ade", "i-bert": "#c46fa8", "fq-vit": "#dba3c8", "int-flash-full": "#2f9e6e",
    "int-flash-half": "#85c9a6", "qattn": "#c99a0c", "qflash-default": "#2878c8", "qflash-accurate": "#62b3ea",
    "qflash-paper": "#d0573b", "qflash-printed": "#e69a7f", "qflash-authors": "#97331b",
}  # fmt: skip
"""A method's colour in every figure, by what is left of its names in tables; readable on a light and on a dark page."""


def base_name(method: str) -> str:
    """Return what a method is called in :data:`COLOURS`: its kernel, its formula and its rows of every command are one."""
    name = method.removesuffix(" kernel").removeprefix("sdpa ").removeprefix("fp16-").removesuffix(" fp32")
    if name.split()[0] == "qflash":
        recipe = next((word for word in name.split() if word in ("accurate", "paper")), "default")
        return f"qflash-{recipe}"
    return name


def colour_of(method: str) -> Any:
    """Return a method's colour: the fixed one, or for a third party's one that its name gives."""
    from matplotlib import colormaps

    return COLOURS.get(base_name(method)) or colormaps["tab20"](sum(method.encode()) % 20)


class Series(NamedTuple):
    """One method's rows in a panel.

    Attributes:
        name: the method's.
        rows: in the order given.
        spots: where they stand, on an axis on which labels are 0, 1, 2 ...
        width: what a mark may take there.
        colour: the same in all panels.
    """

    name: str
    rows: list[Row]
    spots: list[float]
    width: float
    colour: Any


class Panel(NamedTuple):
    """One panel.

    Attributes:
        axes: matplotlib's, with labels and grid.
        key: what its rows have in common.
        series: one for each method that has rows there.
    """

    axes: Any
    key: Any
    series: list[Series]


def panels(
    rows: Sequence[Row], key: str, label: Callable[[Row], str], *, width: float, height: float
) -> tuple[Any, list[Panel]]:
    """Return a matplotlib Figure with a panel for each value of a field, one below the other, nothing drawn in them yet.

    Args:
        rows: at least one, each with a ``method``.
        key: the field.
        label: what a row is written under.
        width, height: of a panel, in inches.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    keys = list(dict.fromkeys(row[key] for row in rows))
    methods = list(dict.fromkeys(row["method"] for row in rows))
    share = 0.8 / len(methods)
    figure = Figure(figsize=(width, height * len(keys) + 0.8), layout="constrained")
    found = []
    for place, value in enumerate(keys):
        axes = figure.add_subplot(len(keys), 1, place + 1)
        here = [row for row in rows if row[key] == value]
        labels = list(dict.fromkeys(map(label, here)))
        axes.set_xticks(range(len(labels)), labels)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
        series = []
        for index, method in enumerate(methods):
            mine = [row for row in here if row["method"] == method]
            if not mine:
                continue
            spots = [labels.index(label(row)) + (index - (len(methods) - 1) / 2) * share for row in mine]
            series.append(Series(method, mine, spots, share, colour_of(method)))
        found.append(Panel(axes, value, series))
    return figure, found


def bars(
    rows: Sequence[Row], key: str, title: str, *, value: str, heading: Callable[[Any], str], axis: str, width: float,
    height: float, spread: tuple[str, str] | None = None,
) -> tuple[Any, list[Panel]]:  # fmt: skip
    """Draw grouped bars, hatched where they are QFlash's, in the panels of :func:`panels`.

    Args:
        rows: of results; those without a value are left out.
        key: the field that panels are made of.
        title: above all.
        value: the column of the bars.
        spread: the columns of the ends of error bars, None for none.
        heading: makes the title of a panel of its key.
        axis: what the bars are.
        width, height: of a panel, in inches.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: no row has a value.
    """
    timed = [row for row in rows if row[value] is not None]
    if not timed:
        raise ValueError("no method was timed, there is nothing to draw")
    figure, found = panels(timed, key, col.problem_label, width=width, height=height)
    for axes, part, series in found:
        for name, mine, spots, share, colour in series:
            ends = [[abs(row[value] - row[end]) for row in mine] for end in spread] if spread else None
            hatch = "//" if name.startswith(col.QFLASH) else None
            options = {"yerr": ends, "error_kw": {"lw": 0.6}, "hatch": hatch, "color": colour, "label": name}
            axes.bar(spots, [row[value] for row in mine], share, **options)
        axes.set_ylabel(axis)
        axes.set_title(heading(part), loc="left", fontsize="medium")
    add_legend(figure)
    figure.suptitle(title, fontsize="medium")
    return figure, found


def add_legend(figure: Any) -> None:
    """Name every labelled series once, whichever panels it is in."""
    found: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(name, handle)
    figure.legend(found.values(), found, loc="outside lower center", ncols=4, frameon=False, fontsize="small")


def write_figure(folder: pathlib.Path, name: str, figure: Any) -> None:
    """Write ``name.png`` and ``name.svg``."""
    for suffix in ("png", "svg"):
        figure.savefig(folder / f"{name}.{suffix}", dpi=150)
