"""SQNR and MSE of every method on A2 and A7 with 8 images and on the other distributions; docs/baselines.md's tables.

python benchmarks/accuracy.py measures, writes results/accuracy.json and .csv beside this script and the tables into the page.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path
from typing import Any

from qflash.bench.accuracy import INPUTS, make_cases, run_accuracy

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "baselines.md"
SEEDS = 5


def cell(row: dict[str, Any], spread: bool) -> str:
    text = "failed" if row["error"] else f"{row['sqnr_db']:.2f}"
    if spread and not row["error"]:
        text += f" [{row['sqnr_min_db']:.1f}, {row['sqnr_max_db']:.1f}]"
    return text


def paper_table(rows: list[dict[str, Any]]) -> list[str]:
    """Lay out the paper's inputs: our mean and range, the paper's figure."""
    lines = [
        "| | A2, here | A2, paper | A7, here | A7, paper | MSE A2, here | paper | MSE A7, here | paper |",
        "|---|" + "---|" * 8,
    ]
    for name in dict.fromkeys(row["method"] for row in rows):
        pair = [row for row in rows if row["method"] == name and row["input"] == "paper"]
        cells = []
        for row in pair:
            cells += [cell(row, True), "-" if row["paper_sqnr_db"] is None else f"{row['paper_sqnr_db']:.2f}"]
        for row in pair:
            cells += [f"{row['mse']:.2e}", "-" if row["paper_mse"] is None else f"{row['paper_mse']:.2e}"]
        lines.append(f"| {pair[0]['title']} | {' | '.join(cells)} |")
    return lines


def other_table(rows: list[dict[str, Any]]) -> list[str]:
    """Lay out the other inputs, means only."""
    others = [row for row in rows if row["input"] != "paper"]
    labels = list(dict.fromkeys((row["input"], row["workload"]) for row in others))
    names = [label if kind == "captured" else f"{kind} {label}" for kind, label in labels]
    lines = ["| SQNR, dB | " + " | ".join(names) + " |", "|---|" + "---|" * len(labels)]
    for name in dict.fromkeys(row["method"] for row in others):
        mine = [row for row in others if row["method"] == name]
        lines.append(f"| {mine[0]['title']} | {' | '.join(cell(row, False) for row in mine)} |")
    return lines


def insert(page: str, mark: str, lines: list[str]) -> str:
    """Replace what lies between a mark and the next end mark."""
    head, rest = page.split(f"<!-- accuracy:{mark} -->\n")
    return f"{head}<!-- accuracy:{mark} -->\n" + "\n".join(lines) + "\n" + rest[rest.index("<!-- end -->") :]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        record = run_accuracy(make_cases(INPUTS, ("A2", "A7"), batch=8), seeds=SEEDS, output=Path(folder))
        for kind in ("json", "csv"):
            shutil.copyfile(Path(folder) / f"accuracy.{kind}", HERE / "results" / f"accuracy.{kind}")
    page = PAGE.read_text(encoding="utf-8")
    page = insert(page, "paper", paper_table(record["rows"]))
    PAGE.write_text(insert(page, "other", other_table(record["rows"])), encoding="utf-8")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
