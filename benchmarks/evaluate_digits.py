"""Top-1 of both digits models with every method, on all 540 held-out digits; docs/evaluation.md's table.

python benchmarks/evaluate_digits.py [FOLDER] evaluates (and continues where a run in FOLDER stopped), writes
results/evaluate_digits.json and .csv beside this script and the table into the page.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from qflash.evaluation.top1 import run_evaluate

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import pages  # noqa: E402

PAGE = HERE.parent / "docs" / "evaluation.md"


def table(report: dict[str, Any]) -> list[str]:
    """Lay the report out in Markdown."""
    names = " | ".join(result["model"] for result in report["models"])
    lines = [f"| Top-1, % | integer-only | {names} |", "|---|---|" + "---|" * len(report["models"])]
    for rows in zip(*(result["methods"] for result in report["models"]), strict=True):
        cells = []
        for row in rows:
            low, high = row["top1_interval_percent"]
            cell = f"{row['top1_percent']:.2f} [{low:.2f}, {high:.2f}]"
            if (against := row.get("against_fp32")) is not None:
                cell += f"; -{against['lost']} +{against['gained']}, p = {against['mcnemar_p']:.2g}"
                cell += f"; {against['loss_change']:.1e}"
            cells.append(cell)
        lines.append(f"| {rows[0]['title']} | {'yes' if rows[0]['integer_only'] else 'no'} | {' | '.join(cells)} |")
    return lines


def blocks() -> dict[str, list[str]]:
    """Return the lines between markers of the page, by the markers' names."""
    return {"evaluate:digits": table(json.loads((HERE / "results" / "evaluate_digits.json").read_text()))}


def files() -> list[str]:
    """Return the result files behind the table."""
    return ["evaluate_digits.json"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=Path("build/evaluate-digits"), help="where the evaluation goes")
    folder = parser.parse_args().folder
    run_evaluate(["digits-vit", "digits-swin"], output=folder)
    results = HERE / "results"
    for kind in ("json", "csv"):
        shutil.copyfile(folder / f"evaluate.{kind}", results / f"evaluate_digits.{kind}")
    PAGE.write_text(pages.fill(PAGE.read_text(encoding="utf-8"), blocks()), encoding="utf-8")


if __name__ == "__main__":
    main()
