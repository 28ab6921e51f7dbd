"""Whole vision transformers in integers beside floating point, eager and compiled, beside torchao and onnxruntime.

Every method takes the same uint8 images. The integer network takes them as they are; the others get them normalised, in the
dtype they compute in, before the clock starts. Its own cut into patches is inside the clock.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import pathlib
import tempfile
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

import torch
from torch import nn

from qflash import export_onnx
from qflash.network.graph import IntegerNetwork
from qflash.network.quantize import quantize_model

from ..evaluation import small_models
from ..evaluation.classifiers import resolve_model_name
from ..evaluation.random_weights import randomise
from . import console as bench_console
from . import energy, nvml, onnx_models, report, runner, tables, timers
from . import schema as col
from .metrics import sqnr
from .models import add_images_per_s, label, load
from .runner import TimedMethod
from .schema import Row

MODELS = ("DeiT-S", "DeiT-B", "Swin-T")
CALIBRATION_IMAGES = 16
BASELINE = col.COMPILE
"""What ratios refer to: the float model compiled as torch.compile does by default, with the fastest SDPA it finds."""

FIELDS = col.pick(
    col.MODEL, col.BATCH, col.DTYPE, col.METHOD, col.IMAGES_PER_S, col.MEDIAN_US, col.Q1_US, col.Q3_US, col.SAMPLES,
    col.MJ_PER_IMAGE, col.MJ_MIN, col.MJ_MAX, col.MJ_ABOVE_IDLE, col.READINGS, col.WATTS, col.RATIO, col.SQNR_DB, col.ERROR,
)  # fmt: skip
"""Columns of ``models_integer.csv``; ``ratio`` is the baseline's time over the row's."""


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model and what its methods need.

    Attributes:
        model: float32, on the CPU, in evaluation mode; methods copy it.
        quantise: returns the model in integers, on any device.
        pixels: uint8 images to run, on the device.
        images: the same, normalised, in the float methods' dtype.
        onnx: returns the model's file for onnxruntime, by its kind: ``"float32"``, ``"static"``, ``"dynamic"``,
            ``"integer"``.
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


def _onnxruntime_integer(subject: Subject) -> timers.TimedCall:
    """The exported integer network, once its logits are the network's own."""
    network, run = subject.quantise(), onnx_models.load(subject.onnx("integer"), torch.get_num_threads())
    if not torch.equal(run(subject.pixels), network(subject.pixels)):
        raise AssertionError("onnxruntime's logits are not the network's")
    return lambda: network.dequantize(run(subject.pixels))


def _onnx_files(
    model: nn.Module, calibration: torch.Tensor, quantise: Callable[[], IntegerNetwork], folder: str
) -> Callable[[str], pathlib.Path]:
    """Return what makes a model's files for onnxruntime, each once.

    Args:
        model: float32, on the CPU, in evaluation mode.
        calibration: uint8 images (batch, channels, height, width), on the CPU.
        quantise: returns the model in integers.
        folder: where the files go.
    """

    @functools.cache
    def make(kind: str) -> pathlib.Path:
        images, path = _normalised(calibration, model, torch.float32), pathlib.Path(folder) / f"{kind}.onnx"
        if kind == "integer":
            export_onnx(quantise(), path)
            return path
        if kind == "static":
            return onnx_models.quantise_static(make("float32"), images, path, unsigned=True)
        if kind == "dynamic":
            return onnx_models.quantise_dynamic(make("float32"), path)
        return onnx_models.export_float(model, images[:1], path)

    return make


_TORCHAO, _ONNXRUNTIME = ("torchao",), ("onnx", "onnxruntime")


def _method(name: str, prepare: Callable[..., timers.TimedCall], **options: Any) -> TimedMethod[Subject]:
    word = name.split()[0]
    if word == "torchao":
        return TimedMethod(name, "end-to-end", functools.partial(prepare, **options), needs=_TORCHAO)
    if word == "onnxruntime":
        return TimedMethod(name, "end-to-end", functools.partial(prepare, **options), devices=("cpu",), needs=_ONNXRUNTIME)
    return TimedMethod(name, "end-to-end", functools.partial(prepare, **options))


METHODS = {
    method.name: method
    for method in (
        _method(col.TIMM, _eager),
        _method(BASELINE, _compiled),
        _method("compile max-autotune", _compiled, mode="max-autotune-no-cudagraphs"),
        _method("torchao int8 dynamic", _torchao, config="Int8DynamicActivationInt8WeightConfig"),
        _method("torchao float8 dynamic", _torchao, config="Float8DynamicActivationFloat8WeightConfig"),
        _method("onnxruntime float32", _onnxruntime, kind="float32"),
        _method(f"onnxruntime {col.INTEGER}", _onnxruntime_integer),
        _method("onnxruntime int8 static", _onnxruntime, kind="static"),
        _method("onnxruntime int8 dynamic", _onnxruntime, kind="dynamic"),
        _method(col.INTEGER, _integer),
    )
}


def pick_methods(only: Sequence[str] = (), device: str = "cuda") -> list[TimedMethod[Subject]]:
    """Return the methods to run: those asked for, or all that run on a device; see :func:`qflash_lab.bench.runner.choose`."""
    return runner.choose(list(METHODS.values()), torch.device(device), only)


def _statistics(model: nn.Module) -> dict[str, tuple[float, ...]]:
    """Return the mean and std, a channel each or one for all, that a model's images in [0, 1] are normalised with."""
    config: Any = getattr(model, "pretrained_cfg", None) or {"mean": (0.5,), "std": (0.5,)}
    return {name: tuple(config[name]) for name in ("mean", "std")}


def _normalised(pixels: torch.Tensor, model: nn.Module, dtype: torch.dtype) -> torch.Tensor:
    mean, std = (
        torch.tensor(each, dtype=torch.float32, device=pixels.device).view(1, -1, 1, 1) for each in _statistics(model).values()
    )
    return ((pixels.float() / 255 - mean) / std).to(dtype)


def draw_pixels(batch: int, size: tuple[int, int, int], seed: int) -> torch.Tensor:
    """Draw smooth uint8 images (batch, channels, height, width) on the CPU: noise of an eighth of the size, enlarged."""
    generator = torch.Generator().manual_seed(seed)
    channels, height, width = size
    coarse = torch.rand((batch, channels, height // 8, width // 8), generator=generator, dtype=torch.float32, device="cpu")
    fine = nn.functional.interpolate(coarse, (height, width), mode="bicubic")
    return (fine.clamp(0, 1) * 255).to(torch.uint8)


@dataclasses.dataclass(frozen=True)
class Joules:
    """How energy is read: how many readings of how many seconds each, from which GPU, and its power while nothing runs."""

    gpu: nvml.Gpu
    seconds: float
    readings: int
    idle_watts: float

    def series(self, images: int) -> runner.Series:
        """Return the readings of methods that take so many images a call."""

        def summarise(readings: Sequence[energy.Reading]) -> Row:
            found = energy.summarise(readings, self.idle_watts)
            shown = {
                col.MJ_PER_IMAGE: col.UJ, col.MJ_MIN: col.UJ_MIN, col.MJ_MAX: col.UJ_MAX, col.MJ_ABOVE_IDLE: col.UJ_ABOVE_IDLE,
            }  # fmt: skip
            each = {name: round(found[of] / 1e3 / images, 3) for name, of in shown.items()}
            return each | {col.READINGS: len(readings), col.WATTS: found[col.WATTS]}

        return runner.Series(self.readings, lambda timer: energy.replay_energy(timer, self.gpu, self.seconds), summarise)


def measure(
    name: str,
    model: nn.Module,
    quantise: Callable[[], IntegerNetwork],
    pixels: torch.Tensor,
    onnx: Callable[[str], pathlib.Path],
    methods: Sequence[TimedMethod[Subject]],
    *,
    dtype: torch.dtype,
    rounds: int,
    joules: Joules | None = None,
    tick: Callable[[str], None] = lambda _: None,
) -> list[Row]:
    """Time a model with every method, in alternation; one row each, keys :data:`FIELDS`.

    Args:
        name: for the rows.
        model: float32, on the CPU, in evaluation mode; it is copied, not changed.
        quantise: returns it in integers.
        pixels: uint8 (batch, channels, height, width), on the device to run on.
        onnx: returns its file for onnxruntime, see :class:`Subject`.
        methods: see :func:`pick_methods`.
        dtype: of the float methods.
        rounds: samples a method.
        joules: how to measure the energy of each, on a GPU, after all are timed; None: not.
    """
    device = pixels.device
    subject = Subject(model, quantise, pixels, _normalised(pixels, model, dtype), onnx)
    wanted = copy.deepcopy(model).to(device)(_normalised(pixels, model, torch.float32))

    def prepare(method: TimedMethod[Subject]) -> tuple[timers.TimedCall, Row]:
        call = method.prepare(subject)
        return call, {col.SQNR_DB: round(sqnr(wanted, call()), 2)}

    runs = []
    for method in methods:
        takes = torch.float32 if method.needs == _ONNXRUNTIME else dtype
        kind = "int8" if col.INTEGER in method.name.split() else str(takes).removeprefix("torch.")
        row = col.empty(FIELDS, model=name, batch=len(pixels), dtype=kind, method=method.name)
        runs.append(runner.Run(row, functools.partial(prepare, method)))
    rows = runner.measure(
        runs, device, rounds, after=None if joules is None else joules.series(len(pixels)),
        tick=lambda method: tick(f"{name} b{len(pixels)} {method}"),
    )  # fmt: skip
    add_images_per_s(rows)
    runner.compare(rows, lambda row: row[col.METHOD] == BASELINE)
    return rows


TABLE = (
    tables.names("model", col.MODEL), tables.names("batch", col.BATCH), tables.names("method", col.METHOD),
    tables.Column("images/s", col.IMAGES_PER_S, ".0f"), tables.Column("median µs", col.MEDIAN_US),
    tables.Column("ratio", col.RATIO), tables.Column("mJ an image", col.MJ_PER_IMAGE),
    tables.Column("range", tables.between(col.MJ_MIN, col.MJ_MAX)),
    tables.Column("SQNR dB of logits", col.SQNR_DB),
)  # fmt: skip
"""Of the table on the console."""


@torch.inference_mode()
def run_integer_models(
    names: Sequence[str],
    batches: Sequence[int],
    methods: Sequence[TimedMethod[Subject]],
    *,
    dtype: torch.dtype,
    device: torch.device,
    rounds: int = 15,
    energy_seconds: float = 0.0,
    readings: int = 5,
    pretrained: bool = False,
    image_size: int | None = None,
    output: pathlib.Path | None = None,
) -> dict[str, Any]:
    """Measure, print the table and write ``models_integer.json`` and ``.csv`` into ``output``.

    The files are written after every model and batch, so that a run that is cut short leaves what it had.

    Returns:
        what ``models_integer.json`` holds: environment, timing (in words) and rows.

    Raises:
        ValueError: an unknown model, something in one without an integer form, fewer than one round or reading, or
            energy without a GPU.
        qflash_lab.bench.nvml.NvmlError: energy is asked for, and the GPU's counter cannot be read.
        ImportError: timm is not installed.
    """
    runner.check_rounds(rounds)
    if energy_seconds and device.type != "cuda":
        raise ValueError(f"energy is read from an NVIDIA GPU's counter, the device is {device}")
    if readings < 1:
        raise ValueError(f"readings must be at least 1, got {readings}")
    joules = None
    if energy_seconds:
        gpu = nvml.Gpu(device)
        joules = Joules(gpu, energy_seconds, readings, energy.idle_watts(gpu, device, energy_seconds))
    loaded = {}
    for name in names:
        model, size = load(name, pretrained, image_size)
        if isinstance(model, small_models.SmallClassifier):
            # the network alone, at its own size: what its classifier does to images before it has no integer form
            side = small_models.MODELS[resolve_model_name(name)].side
            model, size = model.backbone, (size[0], side, side)
        loaded[label(name, image_size)] = model, size
        if not pretrained and name not in small_models.MODELS:
            randomise(model)
    where = "one CUDA graph of whole forward passes" if device.type == "cuda" else "forward passes on the CPU"
    done = report.Report(
        "models_integer", "whole models in integers and in floating point", device, FIELDS, output,
        packages={package: metadata.version(package) for method in methods for package in method.needs},
        timing=f"{where}, warm, methods in alternation (order reversed every round), median of {rounds} samples; "
        f"ratio: time of {BASELINE!r} ÷ row's time; normalising images is outside the clock",
        energy=f"NVML's counter from tick to tick over {energy_seconds:g} s of replay, 0.3 s after its start, methods in "
        f"alternation (order reversed every round), median of {readings} readings, idle power included" if joules else None,
        idle_watts=None if joules is None else round(joules.idle_watts, 1),
        sqnr="20 log10(|ref| / |out - ref|) of the logits against the same weights in float32",
        weights="pretrained" if pretrained else "drawn, so that every layer shows in the output (small models: trained)",
    )  # fmt: skip
    done.begin()
    with bench_console.progress_bar(len(loaded) * len(batches) * len(methods)) as tick:
        for name, (model, size) in loaded.items():
            calibration = draw_pixels(CALIBRATION_IMAGES, size, seed=1)
            placed = copy.deepcopy(model).to(device)
            options: dict[str, Any] = {**_statistics(model), "progress": False}
            quantise = functools.cache(functools.partial(quantize_model, placed, [calibration], **options))
            with tempfile.TemporaryDirectory() as folder:
                onnx = _onnx_files(model, calibration, quantise, folder)
                for batch in batches:
                    pixels = draw_pixels(batch, size, seed=0).to(device)
                    rows = measure(
                        name, model, quantise, pixels, onnx, methods, dtype=dtype, rounds=rounds, joules=joules, tick=tick,
                    )  # fmt: skip
                    # what was compiled for one batch is not to be made general for the next
                    torch.compiler.reset()
                    done.add(rows)
    title = f"whole models, integers beside {str(dtype).removeprefix('torch.')}"
    return done.finish(tables.render(done.rows, TABLE, title, groups=2))
