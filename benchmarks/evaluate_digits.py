"""Top-1 of both digits models on all 540 held-out digits, with every method and as integer networks: docs/evaluation.md.

python benchmarks/evaluate_digits.py [FOLDER] [--only digits|integer] evaluates (and continues where a run in FOLDER
stopped), writes results/evaluate_NAME.json and .csv beside this script and the tables into the page.
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
RUNS: dict[str, dict[str, Any]] = {
    "digits": {"methods": ["all"]},
    "integer": {"methods": ["qflash-default", "qflash-accurate"], "integer": True},
}
"""What is evaluated, by the name of its table."""


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


def result_file(name: str, kind: str) -> str:
    """Return the name of a run's committed results."""
    return f"evaluate_{'digits' if name == 'digits' else f'digits_{name}'}.{kind}"


def blocks() -> dict[str, list[str]]:
    """Return the lines between markers of the page, by the markers' names."""
    return {
        f"evaluate:{name}": table(json.loads((HERE / "results" / result_file(name, "json")).read_text(encoding="utf-8")))
        for name in RUNS
    }


def files() -> list[str]:
    """Return the result files behind the tables."""
    return [result_file(name, "json") for name in RUNS]


def main() -> None:
    """Evaluate, and write results and tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=Path("build/evaluate-digits"), help="where evaluations go")
    parser.add_argument("--only", choices=RUNS, action="append", help="these runs; all if none is named")
    given = parser.parse_args()
    for name in given.only or RUNS:
        folder = given.folder / name
        run_evaluate(["digits-vit", "digits-swin"], output=folder, **RUNS[name])
        for kind in ("json", "csv"):
            shutil.copyfile(folder / f"evaluate.{kind}", HERE / "results" / result_file(name, kind))
    PAGE.write_text(pages.fill(PAGE.read_text(encoding="utf-8"), blocks()), encoding="utf-8")


if __name__ == "__main__":
    main()
