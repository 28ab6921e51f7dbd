"""Measure how long networks take to be written as ONNX, TOSA and C, and how large the files are.

Weights are random; one thread; processor time, so that what else the machine does matters little. Quantising a model on two
images is a row of its own. Needs onnx and timm, and tosa-tools for TOSA, which is left out without it.

    python benchmarks/export_times.py [--model DeiT-T] [--tables]

writes results/export_times.json beside this script, keeping the models that were not measured, and the tables of
docs/onnx.md; with --tables nothing is measured.
"""

from __future__ import annotations

import datetime
import gc
import importlib.util
import pathlib
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any

import torch

import declared
import qflash
from declared import Group, Of, Table, blank, groups, one
from openvino_networks import cpu
from qflash.network.graph import IntegerNetwork
from qflash_lab.bench import integer_models
from qflash_lab.bench import schema as col
from qflash_lab.bench.models import load
from qflash_lab.bench.tables import Column, names

RESULTS = declared.RESULTS / "export_times.json"
MODELS = {
    "DeiT-T": "DeiT-T", "DeiT-S": "DeiT-S", "Swin-T": "Swin-T", "ViT-B": "vit_base_patch16_224",
    "ViT-L": "vit_large_patch16_224",
}  # fmt: skip
"""By the names of the table, those of :func:`qflash_lab.bench.models.load`."""
QUANTISE = "quantise"
FORMS: dict[str, Callable[[IntegerNetwork, pathlib.Path], object]] = {
    "ONNX": lambda network, folder: qflash.export_onnx(network, folder / "network.onnx"),
    "ONNX, inline": lambda network, folder: qflash.export_onnx(network, folder / "network.onnx", inline=True),
    "ONNX, int64=False": lambda network, folder: qflash.export_onnx(network, folder / "network.onnx", int64=False),
    "TOSA": lambda network, folder: qflash.export_tosa(network, folder / "network.tosa"),
    "C program": lambda network, folder: qflash.export_c(network, folder),
}


def measure(name: str) -> list[dict[str, Any]]:
    """Return the rows of a model: quantising it, and each form."""
    model, size = load(MODELS[name])
    config: Any = model.pretrained_cfg
    images = integer_models.draw_pixels(2, size, 0)
    row = {col.MODEL: name, "parameters": sum(x.numel() for x in model.parameters())}
    rows: list[dict[str, Any]] = []

    def timed(method: str, call: Callable[[], Any]) -> Any:
        gc.collect()
        start, begun = time.process_time(), time.monotonic()
        made = call()
        rows.append(row | {col.METHOD: method, "cpu_s": time.process_time() - start, "wall_s": time.monotonic() - begun})
        return made

    options = {"mean": config["mean"], "std": config["std"], "min_sqnr": None, "progress": False}
    network = timed(QUANTISE, lambda: qflash.quantize_model(model, [images], **options))
    # the C kernels are compiled once on a machine
    network(images[:1])
    for form, export in FORMS.items():
        if form == "TOSA" and importlib.util.find_spec("tosa_serializer") is None:
            print("TOSA is left out: tosa-tools is not installed")
            continue
        with tempfile.TemporaryDirectory() as folder:
            place = pathlib.Path(folder)
            timed(form, lambda export=export, place=place: export(network, place))  # type: ignore[misc]
            rows[-1]["bytes"] = sum(path.stat().st_size for path in place.iterdir())
        print({key: rows[-1][key] for key in (col.MODEL, col.METHOD, "cpu_s", "wall_s", "bytes")}, flush=True)
    return rows


def write(rows: list[dict[str, Any]]) -> None:
    """Put a model's rows into the results, in place of those that it has there."""
    packages = ["onnx", "torch", "timm"] + ["tosa-tools"] * any(row[col.METHOD] == "TOSA" for row in rows)
    versions = {name: metadata.version(name) for name in packages}
    date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    own = {"date": date, "versions": versions, **cpu()}
    declared.keep(RESULTS, [row | own for row in rows], col.MODEL, order=lambda row: list(MODELS).index(row[col.MODEL]))


def problems() -> list[Group]:
    """Return the rows by model."""
    return groups(declared.rows(RESULTS.stem), col.MODEL)


def _table(*columns: Column) -> Table:
    return Table(
        problems,
        (
            names("Model", one(col.MODEL)),
            Column("Parameters, millions", one("parameters"), declared.scaled(1e-6, ".1f")),
            *columns,
        ),
    )


TABLES = {
    "export:seconds": _table(
        *(Column(name, Of(name, "cpu_s"), blank(".1f")) for name in (QUANTISE, *FORMS)),
    ),
    "export:bytes": _table(
        *(Column(name, Of(name, "bytes"), lambda value: "" if value is None else f"{value / 1e6:.1f}") for name in FORMS),
    ),
}
"""Between markers of the page."""


PARTS = declared.Parts(TABLES)


def main() -> None:
    """Measure, and write results and tables."""
    parser = declared.parser(__doc__)
    parser.add_argument("--model", choices=MODELS, action="append", help="these models; all if none is named")
    given = parser.parse_args()
    if not given.tables:
        torch.set_num_threads(1)
        for name in given.model or MODELS:
            with torch.no_grad():
                write(measure(name))
    PARTS.write()


if __name__ == "__main__":
    main()
