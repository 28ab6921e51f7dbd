"""What plots in panels share."""

from __future__ import annotations

from pathlib import Path

import pytest

from qflash_lab.baselines import METHODS
from qflash_lab.bench import figures

pytest.importorskip("matplotlib")


def test_a_method_keeps_its_colour_and_has_one_name(tmp_path: Path) -> None:
    rows = [
        {"batch": batch, "method": method, "model": model, "us": 1.0}
        for batch, methods in ((1, "ab"), (8, "bc"))
        for method in methods
        for model in ("x", "y")
    ]
    figure, found = figures.panels(rows, "batch", lambda row: row["model"], width=4, height=2)
    assert [panel.key for panel in found] == [1, 8]
    # each has the methods that have rows there, side by side around the label, where their places are in all panels
    assert [[series.name for series in panel.series] for panel in found] == [["a", "b"], ["b", "c"]]
    assert found[0].series[1].colour == found[1].series[0].colour
    assert found[0].series[1].spots == pytest.approx([0.0, 1.0]) == found[1].series[0].spots
    assert found[1].series[1].spots == pytest.approx([0.8 / 3, 1 + 0.8 / 3])
    for panel in found:
        for series in panel.series:
            panel.axes.bar(series.spots, [row["us"] for row in series.rows], series.width, label=series.name)
    figures.add_legend(figure)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b", "c"]
    figures.write_figure(tmp_path, "plot", figure)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plot.png", "plot.svg"]


def test_a_method_has_one_colour_in_every_command() -> None:
    same = (
        ("qflash", "qflash int8", "qflash cpu", "qflash-default"), ("qflash int8 accurate", "qflash-accurate"),
        ("i-vit kernel", "i-vit"), ("sdpa flash", "fp16-flash"),
    )  # fmt: skip
    for names in same:
        assert len({figures.colour_of(name) for name in names}) == 1
    assert len(set(figures.COLOURS.values())) == len(figures.COLOURS)
    assert set(METHODS) <= {name for name in METHODS if figures.base_name(name) in figures.COLOURS}
    assert figures.colour_of("somebody's") == figures.colour_of("somebody's")
