"""Top-1 of the small models on all of their test images, with every method and as integer networks: docs/evaluation.md.

python benchmarks/evaluate_models.py [FOLDER] [--only NAME] [--fashion IDX] evaluates (and continues where a run in FOLDER
stopped), writes results/evaluate_*.json and .csv beside this script and the tables into the page. --tables writes only
those.
"""

from __future__ import annotations

import functools
import shutil
from pathlib import Path
from typing import Any

import declared
from qflash_lab.evaluation.real_data import FASHION_FOLDERS
from qflash_lab.evaluation.top1 import run_evaluate

DIGITS, FASHION = ["digits-vit", "digits-swin"], ["fashion-vit", "fashion-swin"]
RUNS: dict[str, dict[str, Any]] = {
    "digits": {"models": DIGITS},
    "integer": {"models": DIGITS, "methods": ["qflash-default", "qflash-accurate"], "integer": True},
    "fashion": {"models": FASHION},
    "fashion_integer": {"models": FASHION, "methods": ["fp32"], "integer": True},
}
"""What is evaluated, by the name of its table, or of a part of it."""
PROBE = "real_fashion_h100"
"""Of the classifiers on DINOv2-S's features, by ``qflash-lab real --part fashion``."""
FILES = {
    "digits": "evaluate_digits", "integer": "evaluate_digits_integer", "fashion": "evaluate_fashion",
    "fashion_integer": "evaluate_fashion_integer",
}  # fmt: skip
"""Names of the committed results."""
SHOWN = {"digits": ("digits",), "integer": ("integer",), "fashion": ("fashion", "fashion_integer")}
"""Which runs a table shows; what two of them have is of the first."""


def table(*runs: str) -> list[str]:
    """Lay reports of the same models out in Markdown."""
    found: dict[str, dict[str, Any]] = {}
    for run in runs:
        for result in declared.record(FILES[run])["models"]:
            rows_of = found.setdefault(result["model"], {})
            rows_of |= {row["method"]: row for row in result["methods"] if row["method"] not in rows_of}
    lines = [f"| Top-1, % | integer-only | {' | '.join(found)} |", "|---|---|" + "---|" * len(found)]
    for rows in zip(*(rows_of.values() for rows_of in found.values()), strict=True):
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


def probe_table() -> list[str]:
    """Lay Top-1 on a pretrained network's features out in Markdown."""
    report = declared.record(PROBE)
    lines = [
        "| Top-1, % | integer-only | linear probe | same answer, % | nearest neighbours | same answer, % | features, dB |",
        "|---|---|---|---|---|---|---|",
    ]
    by = {(row["classifier"], row["method"]): row for row in report["top1"]}
    for row in report["top1"][: len(by) // 2]:
        cells = [row["title"], "yes" if row["integer_only"] else "no"]
        for name in ("linear probe", "nearest neighbours"):
            own = by[name, row["method"]]
            low, high = own["top1_interval_percent"]
            compared = f"; -{own['lost']} +{own['gained']}, p = {own['mcnemar_p']:.2g}" if row["method"] != "fp32" else ""
            cells += [f"{own['top1_percent']:.2f} [{low:.2f}, {high:.2f}]{compared}", f"{own['agreement_percent']:.2f}"]
        cells.append("" if row["method"] == "fp32" else f"{row['feature_sqnr_db']:.1f}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


PARTS = declared.Parts(
    texts={
        **{f"evaluate:{name}": functools.partial(table, *runs) for name, runs in SHOWN.items()},
        "evaluate:probe": probe_table,
    },
    reads=[f"{file}.json" for file in (*FILES.values(), PROBE)],
)


def main() -> None:
    """Evaluate, and write results and tables."""
    parser = declared.parser(__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("build/evaluate-models"), help="where evaluations go")
    parser.add_argument("--only", choices=RUNS, action="append", help="these runs; all if none is named")
    parser.add_argument("--fashion", default=FASHION_FOLDERS[0], help="folder of Fashion-MNIST's idx files")
    parser.add_argument("--device", help="cpu, cuda or cuda:N; a GPU if there is one")
    given = parser.parse_args()
    for name in () if given.tables else given.only or RUNS:
        folder = given.folder / name
        data = {"data": given.fashion} if RUNS[name]["models"] == FASHION else {}
        run_evaluate(output=folder, device=given.device, **RUNS[name], **data)
        for kind in ("json", "csv"):
            shutil.copyfile(folder / f"evaluate.{kind}", declared.RESULTS / f"{FILES[name]}.{kind}")
    PARTS.write()


if __name__ == "__main__":
    main()
