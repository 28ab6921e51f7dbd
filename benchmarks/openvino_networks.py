"""Time integer networks on a CPU beside OpenVINO's and onnxruntime's int8, by processor time.

Methods take turns on the same images, a call each a round; a ratio is the median over the rounds of a method's time over ours
in the same round, so that what else the machine does falls on all of them. Ours is ``network.graph(batch)`` on uint8 pixels,
the others take the normalised images as float32, made before the clock starts. Weights are random. Needs openvino, nncf, onnx,
onnxruntime and timm.

    python benchmarks/openvino_networks.py [--model DeiT-S] [--batch 1] [--without-amx] [--threads 1] [--tables]

writes results/openvino_cpu.json beside this script, keeping what was not measured, and the table of docs/performance/cpu.md;
with --tables only that. ``--without-amx`` keeps all methods from AMX, which most CPUs have not.
"""

from __future__ import annotations

import datetime
import functools
import logging
import os
import pathlib
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
import qflash
from declared import Group, Of, Table, blank, groups, one
from qflash_lab.bench import integer_models, onnx_models
from qflash_lab.bench import schema as col
from qflash_lab.bench.metrics import sqnr
from qflash_lab.bench.models import load
from qflash_lab.bench.tables import Column, names

RESULTS = declared.RESULTS / "openvino_cpu.json"
TIMM = {
    "ViT-B": "vit_base_patch16_224", "SigLIP-B": "vit_base_patch16_siglip_224", "DINOv2-S 518 px": "vit_small_patch14_dinov2",
}  # fmt: skip
"""Models by timm's names, which the lab has no names for."""
MODELS = ("DeiT-S", "Swin-T", "DeiT-B", *TIMM)
BATCHES = (1, 8)
OURS = "QFlash"
OPENVINO = {"OpenVINO": None, "NNCF int8, rest float32": "f32", "NNCF int8, rest bfloat16": "bf16"}
"""Methods of OpenVINO, and the type of what is not int8; None for what it chooses, without calibration."""
ONNXRUNTIME = "onnxruntime int8 dynamic"
AMX, WITHOUT = "yes", "no"
WITHOUT_AMX = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16", "CC": "gcc -mno-amx-int8 -mno-amx-tile"}
"""Environment that keeps OpenVINO's kernels and ours from AMX."""

Run = Callable[[], Any]


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
    parts = [part.numpy() for part in calibration.split(len(images))]
    int8 = nncf.quantize(converted(), nncf.Dataset(parts), model_type=nncf.ModelType.TRANSFORMER)
    runs: dict[str, onnx_models.Run] = {}
    for method, precision in OPENVINO.items():
        options: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1}
        if precision:
            options["INFERENCE_PRECISION_HINT"] = precision
        request = core.compile_model(int8 if precision else converted(), "CPU", options).create_infer_request()
        runs[method] = functools.partial(infer, request)
    return runs


@functools.cache
def quantised(name: str) -> tuple[nn.Module, torch.Tensor, Any]:
    """Return a model, uint8 images that calibrate it, and the network in integers."""
    model, size = load(TIMM.get(name, name))
    config: Any = model.pretrained_cfg
    calibration = integer_models.draw_pixels(16, size, 0)
    network = qflash.quantize_model(model, calibration.split(4), mean=config["mean"], std=config["std"], min_sqnr=None)
    return model, calibration, network


def prepare(name: str, batch: int, threads: int, folder: pathlib.Path) -> tuple[dict[str, Run], torch.Tensor]:
    """Return what runs each method on the same images, and the float model's logits."""
    model, calibration, network = quantised(name)
    channels, height, width = calibration.shape[1:]
    pixels = integer_models.draw_pixels(batch, (channels, height, width), 1)
    images, others = (integer_models._normalised(x, model, torch.float32) for x in (pixels, calibration))
    graph = network.graph(batch)
    runs: dict[str, Run] = {OURS: lambda: network.dequantize(graph(pixels))}
    runs |= {method: functools.partial(run, images) for method, run in openvino_runs(model, images, others, threads).items()}
    path = onnx_models.export_float(model, images[:1], folder / "float.onnx")
    runs[ONNXRUNTIME] = functools.partial(
        onnx_models.load(onnx_models.quantise_dynamic(path, folder / "dynamic.onnx"), threads), images
    )
    return runs, model(images)


def measure(name: str, batch: int, threads: int, seconds: float) -> list[dict[str, Any]]:
    """Return a row a method, after at least 20 rounds and about a number of seconds."""
    with tempfile.TemporaryDirectory() as folder:
        runs, want = prepare(name, batch, threads, pathlib.Path(folder))
        errors = {method: sqnr(want, run()) for method, run in runs.items()}
        times: dict[str, list[float]] = {method: [] for method in runs}
        end = time.monotonic() + seconds
        while len(times[OURS]) < 20 or time.monotonic() < end:
            for method, run in runs.items():
                start = time.process_time_ns()
                run()
                times[method].append((time.process_time_ns() - start) / 1e3)
    rows = []
    for method, found in times.items():
        ratios = [one / ours for one, ours in zip(found, times[OURS], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        rows.append({
            col.MODEL: name, col.BATCH: batch, "threads": threads, col.METHOD: method, col.CPU_US: statistics.median(found),
            "least_us": min(found), col.RATIO: middle, "ratio_q1": low, "ratio_q3": high, "rounds": len(found),
            col.SQNR_DB: errors[method],
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
    declared.keep(RESULTS, [row | own for row in rows], col.MODEL, col.BATCH, "threads", "amx")


def problems() -> list[Group]:
    """Return the results by problem, those with AMX first, then by threads, model and batch."""

    def place(row: dict[str, Any]) -> tuple[bool, int, int, int]:
        return row["amx"] == WITHOUT, row["threads"], MODELS.index(row[col.MODEL]), row[col.BATCH]

    order = sorted(declared.rows(RESULTS.stem), key=place)
    return groups(order, col.MODEL, col.BATCH, "threads", "amx")


OTHERS = (*OPENVINO, ONNXRUNTIME)
LINE = (
    names("Model", one(col.MODEL)), names("Batch", one(col.BATCH)), names("Threads", one("threads")), names("AMX", one("amx")),
)  # fmt: skip
TABLES = {
    "openvino:times": Table(
        problems,
        (
            *LINE, Column("ours, ms", Of(OURS, col.CPU_US), declared.scaled(1e-3, ".1f")),
            *(Column(f"{method} ÷ ours", Of(method, col.RATIO), blank(".2f")) for method in OTHERS),
        ),
    ),
    "openvino:errors": Table(
        problems, (*LINE, *(Column(f"{method}, dB", Of(method, col.SQNR_DB), blank(".1f")) for method in (OURS, *OTHERS)))
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
    parser.add_argument("--without-amx", action="store_true", help="keep all methods from AMX")
    given = parser.parse_args()
    if not given.tables:
        if given.without_amx and os.environ.get("ONEDNN_MAX_CPU_ISA") != WITHOUT_AMX["ONEDNN_MAX_CPU_ISA"]:
            # libraries read it when they are loaded
            os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | WITHOUT_AMX)
        torch.set_num_threads(given.threads)
        amx = AMX if "amx_int8" in cpu()["instructions"] and not given.without_amx else WITHOUT
        for name in given.model or MODELS[:2]:
            for batch in given.batch or BATCHES:
                with torch.no_grad():
                    write(measure(name, batch, given.threads, given.seconds), amx)
    PARTS.write()


if __name__ == "__main__":
    main()
