"""The tables of docs/performance.md and docs/performance/tables.md are those of the committed results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers import load_benchmark


@pytest.fixture
def tables() -> Any:
    return load_benchmark("performance_tables")


def test_page_has_the_figures_of_the_results(tables: Any) -> None:
    page = tables.PAGE.read_text()
    assert tables.laid_out(page) == page
    assert tables.tables_page() == tables.TABLES.read_text()


def test_aims_count_what_the_latency_table_shows(tables: Any) -> None:
    rows = [row for row in tables.latency() if row.startswith(("| A1 ", "| A2 ", "| A3 "))]
    ratios = [float(row.split("|")[14]) for row in rows]
    aim = next(row for row in tables.aims() if "A1 to A3, fp16" in row)
    assert aim.endswith(
        f"| {min(ratios):.2f} to {max(ratios):.2f} | {sum(ratio >= 1.2 for ratio in ratios)} of {len(ratios)} |"
    )


def test_figure_is_drawn_from_every_shape(tables: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(tables, "FIGURE", tmp_path / "speed.svg")
    tables.draw()
    drawn = (tmp_path / "speed.svg").read_text()
    assert all(f">{name}</text>" in drawn for name in tables.latencies())
