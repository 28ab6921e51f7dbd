"""Whole vision transformers in integers beside floating point, eager and compiled, beside torchao and onnxruntime.

Every method takes the same uint8 images. The integer network takes them as they are; the others get them normalised, in the
dtype they compute in, before the clock starts. Its own cut into patches is inside the clock.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib.util
import pathlib
import tempfile
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

import torch
from rich.table import Table
from torch import nn

from qflash.network.models import IntegerNetwork
from qflash.network.quantize import quantize_model
from qflash.optional_packages import require_packages

from . import console as bench_console
from . import energy, errors, nvml, onnx_models, records, timers
from .metrics import sqnr
from .models import label, load

MODELS = ("DeiT-S", "DeiT-B", "Swin-T")
CALIBRATION_IMAGES = 16
BASELINE = "compile"
"""What ratios refer to: the float model compiled as torch.compile does by default, with the fastest SDPA it finds."""

FIELDS = (
    "model", "batch", "dtype", "method", "images_per_s", "median_us", "q1_us", "q3_us", "samples", "ratio", "mj_per_image",
    "watts", "sqnr_db", "error",
)  # fmt: skip
"""Columns of ``models_integer.csv``; ``ratio`` is the baseline's time over the row's, ``mj_per_image`` millijoules."""


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model and what its methods need.

    Attributes:
        model: float32, on the CPU, in evaluation mode; methods copy it.
        quantise: returns the model in integers, on any device.
        pixels: uint8 images to run, on the device.
        images: the same, normalised, in the float methods' dtype.
        onnx: returns the model's file for onnxruntime, by its kind: ``"float32"``, ``"static"`` or ``"dynamic"``.
    """

    model: nn.Module
    quantise: Callable[[], IntegerNetwork]
    pixels: torch.Tensor
    images: torch.Tensor
    onnx: Callable[[str], pathlib.Path]


def _float(subject: Subject) -> nn.Module:
    return copy.deepcopy(subject.model).to(subject.images.device, subject.images.dtype)


def _integer(subject: Subject) -> timers.TimedCall:
    network = copy.deepcopy(subject.quantise()).to(subject.pixels.device)
    # the scale is no part of the network: it is for comparing logits, and one product of a small tensor
    return lambda: network.dequantize(network(subject.pixels))


def _eager(subject: Subject) -> timers.TimedCall:
    return functools.partial(_float(subject), subject.images)


def _compiled(subject: Subject, **options: Any) -> timers.TimedCall:
    return functools.partial(torch.compile(_float(subject), **options), subject.images)


_TORCHAO_OPTIONS: dict[str, Any] = {
    "coordinate_descent_tuning": True,
    "coordinate_descent_check_all_directions": True,
    "force_fuse_int_mm_with_mul": True,
}
"""How torchao wants its layers compiled."""


def _torchao(subject: Subject, config: str) -> timers.TimedCall:
    from torch._inductor import config as inductor
    from torchao import quantization

    model = _float(subject)
    # torchao sets its options for the whole process; other methods are not to be compiled with them
    with inductor.patch(_TORCHAO_OPTIONS):
        quantization.quantize_(model, getattr(quantization, config)())
    return functools.partial(torch.compile(model, options=_TORCHAO_OPTIONS), subject.images)


def _onnxruntime(subject: Subject, kind: str) -> timers.TimedCall:
    return functools.partial(onnx_models.load(subject.onnx(kind), torch.get_num_threads()), subject.images.float())


def _onnx_files(model: nn.Module, calibration: torch.Tensor, folder: str) -> Callable[[str], pathlib.Path]:
    """Return what makes a model's files for onnxruntime, each once.

    Args:
        model: float32, on the CPU, in evaluation mode.
        calibration: uint8 images (batch, channels, height, width), on the CPU.
        folder: where the files go.
    """

    @functools.cache
    def make(kind: str) -> pathlib.Path:
        images, path = _normalised(calibration, model, torch.float32), pathlib.Path(folder) / f"{kind}.onnx"
        if kind == "static":
            return onnx_models.quantise_static(make("float32"), images, path, unsigned=True)
        if kind == "dynamic":
            return onnx_models.quantise_dynamic(make("float32"), path)
        return onnx_models.export_float(model, images[:1], path)

    return make


METHODS: dict[str, Callable[[Subject], timers.TimedCall]] = {
    "timm": _eager,
    BASELINE: _compiled,
    "compile max-autotune": functools.partial(_compiled, mode="max-autotune-no-cudagraphs"),
    "torchao int8 dynamic": functools.partial(_torchao, config="Int8DynamicActivationInt8WeightConfig"),
    "torchao float8 dynamic": functools.partial(_torchao, config="Float8DynamicActivationFloat8WeightConfig"),
    "onnxruntime float32": functools.partial(_onnxruntime, kind="float32"),
    "onnxruntime int8 static": functools.partial(_onnxruntime, kind="static"),
    "onnxruntime int8 dynamic": functools.partial(_onnxruntime, kind="dynamic"),
    "integer": _integer,
}
_NEEDS = {"torchao": ("torchao",), "onnxruntime": ("onnx", "onnxruntime")}
"""Packages that methods need, by the first word of their names; onnxruntime runs on the CPU."""


def pick_methods(only: Sequence[str] = (), device: str = "cuda") -> dict[str, Callable[[Subject], timers.TimedCall]]:
    """Return the methods to run, by name: those asked for, or all that run on a device and whose packages are installed.

    Args:
        only: names; all if empty.
        device: ``"cuda"`` or ``"cpu"``.

    Raises:
        ValueError: a name is none of :data:`METHODS`, or a method does not run on the device.
        ImportError: a method asked for needs a package that is not installed.
    """
    found = {}
    for name in only:
        if name not in METHODS:
            raise ValueError(f"unknown method {name!r}; choose from {', '.join(METHODS)}")
        require_packages(f"method {name!r}", *_NEEDS.get(name.split()[0], ()))
        if device != "cpu" and name.startswith("onnxruntime"):
            raise ValueError(f"method {name!r} runs on the CPU, and the device is {device!r}")
    for name, method in METHODS.items():
        first = name.split()[0]
        there = all(importlib.util.find_spec(package) is not None for package in _NEEDS.get(first, ()))
        if name in only if only else there and (device == "cpu" or first != "onnxruntime"):
            found[name] = method
    return found


def _normalised(pixels: torch.Tensor, model: nn.Module, dtype: torch.dtype) -> torch.Tensor:
    config: Any = getattr(model, "pretrained_cfg", None) or {"mean": (0.5,) * 3, "std": (0.5,) * 3}
    mean, std = (
        torch.tensor(config[name], dtype=torch.float32, device=pixels.device).view(1, -1, 1, 1) for name in ("mean", "std")
    )
    return ((pixels.float() / 255 - mean) / std).to(dtype)


def draw_pixels(batch: int, size: tuple[int, int, int], seed: int) -> torch.Tensor:
    """Draw smooth uint8 images (batch, channels, height, width) on the CPU: noise of an eighth of the size, enlarged."""
    generator = torch.Generator().manual_seed(seed)
    channels, height, width = size
    coarse = torch.rand((batch, channels, height // 8, width // 8), generator=generator, dtype=torch.float32, device="cpu")
    fine = nn.functional.interpolate(coarse, (height, width), mode="bicubic")
    return (fine.clamp(0, 1) * 255).to(torch.uint8)


@dataclasses.dataclass
class _Runner:
    row: dict[str, Any]
    timer: timers.Timer | None = None
    samples: list[dict[str, float]] = dataclasses.field(default_factory=list)


def measure(
    name: str,
    model: nn.Module,
    quantise: Callable[[], IntegerNetwork],
    pixels: torch.Tensor,
    onnx: Callable[[str], pathlib.Path],
    methods: dict[str, Callable[[Subject], timers.TimedCall]],
    *,
    dtype: torch.dtype,
    rounds: int,
    energy_seconds: float = 0.0,
    tick: Callable[[str], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """Time a model with every method, in turns; one row each, keys :data:`FIELDS`.

    Args:
        name: for the rows.
        model: float32, on the CPU, in evaluation mode; it is copied, not changed.
        quantise: returns it in integers.
        pixels: uint8 (batch, channels, height, width), on the device to run on.
        onnx: returns its file for onnxruntime, see :class:`Subject`.
        methods: see :func:`pick_methods`.
        dtype: of the float methods.
        rounds: samples a method.
        energy_seconds: how long to measure the energy of each, on a GPU, after all are timed; 0: not.
    """
    device = pixels.device
    subject = Subject(model, quantise, pixels, _normalised(pixels, model, dtype), onnx)
    wanted = copy.deepcopy(model).to(device)(_normalised(pixels, model, torch.float32))
    runners = []
    for method, prepare in methods.items():
        row: dict[str, Any] = dict.fromkeys(FIELDS)
        takes = torch.float32 if method.startswith("onnxruntime") else dtype
        kind = "int8" if method == "integer" else str(takes).removeprefix("torch.")
        row |= {"model": name, "batch": len(pixels), "dtype": kind, "method": method}
        runner = _Runner(row)
        runners.append(runner)
        try:
            with errors.explained():
                call = prepare(subject)
                row["sqnr_db"] = round(sqnr(wanted, call()), 2)
                runner.timer = timers.make_timer(call, "end-to-end", device)
        except Exception as error:
            row["error"] = errors.describe(error)
            timers.tidy(device)
        tick(f"{name} b{len(pixels)} {method}")
    for index in range(rounds):
        for runner in runners if index % 2 == 0 else reversed(runners):
            if runner.timer is not None:
                runner.samples.append(runner.timer.sample())
    for runner in runners:
        if runner.samples:
            found = timers.summarise(runner.samples)
            runner.row |= {key: value for key, value in found.items() if key in FIELDS}
            runner.row |= {"samples": len(runner.samples), "images_per_s": round(len(pixels) * 1e6 / found["median_us"], 2)}
            if energy_seconds and isinstance(runner.timer, timers.GraphTimer):
                try:
                    reading = energy.replay_energy(runner.timer, nvml.Gpu(device), energy_seconds)
                    runner.row["mj_per_image"] = round(1e3 * reading.joules / (reading.calls * len(pixels)), 3)
                    runner.row["watts"] = round(reading.watts, 1)
                except nvml.NvmlError as error:
                    runner.row["error"] = errors.describe(error)
    rows = [runner.row for runner in runners]
    base = next((row["median_us"] for row in rows if row["method"] == BASELINE), None)
    for row in rows:
        if base is not None and row["median_us"] is not None:
            row["ratio"] = round(base / row["median_us"], 3)
    del runners
    timers.tidy(device)
    return rows


def render(rows: Sequence[dict[str, Any]], title: str) -> Table:
    """Return the rows as a table."""
    table = Table(title=title, title_justify="left")
    for heading in ("model", "batch", "method"):
        table.add_column(heading, no_wrap=True)
    for heading in ("images/s", "median µs", "ratio", "mJ an image", "SQNR dB of logits"):
        table.add_column(heading, justify="right", no_wrap=True)
    number = bench_console.format_number
    for row in rows:
        speed = "failed" if row["images_per_s"] is None else f"{row['images_per_s']:.0f}"
        table.add_row(
            row["model"], str(row["batch"]), row["method"], speed, number(row["median_us"]), number(row["ratio"]),
            number(row["mj_per_image"]), number(row["sqnr_db"]),
        )  # fmt: skip
    return table


@torch.inference_mode()
def run_integer_models(
    names: Sequence[str],
    batches: Sequence[int],
    methods: dict[str, Callable[[Subject], timers.TimedCall]],
    *,
    dtype: torch.dtype,
    device: torch.device,
    rounds: int = 15,
    energy_seconds: float = 0.0,
    pretrained: bool = False,
    image_size: int | None = None,
    output: pathlib.Path | None = None,
) -> dict[str, Any]:
    """Measure, print the table and write ``models_integer.json`` and ``.csv`` into ``output``.

    The files are written after every model and batch, so that a run that is cut short leaves what it had.

    Returns:
        what ``models_integer.json`` holds: environment, timing (in words) and rows.

    Raises:
        TypeError: a model has no integer form here.
        ValueError: an unknown model, one with layers without an integer form, fewer than one round, or energy without a GPU.
        ImportError: timm is not installed.
    """
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    if energy_seconds and device.type != "cuda":
        raise ValueError(f"energy is read from an NVIDIA GPU's counter, the device is {device}")
    loaded = {label(name, image_size): load(name, pretrained, image_size) for name in names}
    where = "one CUDA graph of whole forward passes" if device.type == "cuda" else "forward passes on the CPU"
    record: dict[str, Any] = {
        "what": "whole models in integers and in floating point",
        "environment": records.environment(device),
        "packages": {name: metadata.version(name) for first, *_ in map(str.split, methods) for name in _NEEDS.get(first, ())},
        "timing": f"{where}, warm, methods in turns (order reversed every round), median of {rounds} samples; "
        f"ratio: time of {BASELINE!r} ÷ row's time; normalising images is outside the clock",
        "energy": f"NVML's counter over {energy_seconds:g} s of replay, idle power included" if energy_seconds else None,
        "sqnr": "20 log10(|ref| / |out - ref|) of the logits against the same weights in float32",
        "weights": "pretrained" if pretrained else "as timm initialises them",
        "rows": [],
    }
    rows: list[dict[str, Any]] = record["rows"]
    console = bench_console.table_console()
    console.print(f"{record['environment']['device']}. {record['timing']}.\n")
    with bench_console.progress_bar(len(loaded) * len(batches) * len(methods)) as tick:
        for name, (model, size) in loaded.items():
            calibration = draw_pixels(CALIBRATION_IMAGES, size, seed=1)
            placed = copy.deepcopy(model).to(device)
            quantise = functools.cache(functools.partial(quantize_model, placed, [calibration], progress=False))
            with tempfile.TemporaryDirectory() as folder:
                onnx = _onnx_files(model, calibration, folder)
                for batch in batches:
                    pixels = draw_pixels(batch, size, seed=0).to(device)
                    rows += measure(
                        name, model, quantise, pixels, onnx, methods, dtype=dtype, rounds=rounds,
                        energy_seconds=energy_seconds, tick=tick,
                    )  # fmt: skip
                    # what was compiled for one batch is not to be made general for the next
                    torch.compiler.reset()
                    if output is not None:
                        records.write_json(output / "models_integer.json", record)
                        records.write_csv(output / "models_integer.csv", rows, FIELDS)
    if device.type == "cuda":
        record["environment"]["nvml_after"] = nvml.snapshot(device)
    console.print(render(rows, f"whole models, integers beside {str(dtype).removeprefix('torch.')}"))
    for row in rows:
        if row["error"]:
            text = f"failed: {row['model']} b{row['batch']}, {row['method']}: {row['error']}"
            console.print(text, markup=False, soft_wrap=True)
    if output is not None:
        records.write_json(output / "models_integer.json", record)
        console.print(f"Written to {output}: models_integer.json, models_integer.csv")
    return record
