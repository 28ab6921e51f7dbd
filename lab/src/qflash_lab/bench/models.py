"""Whole vision transformers: images a second with PyTorch's attention, with QFlash's and with others, in one run.

A kernel's latency is not what a deployment sees: around it are projections, normalisation, and the copies that an
output in the wrong order costs. Here a timm model runs as a whole, in one CUDA graph, and every row carries the SQNR of
its logits against the same weights in float32.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import pathlib
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from rich.table import Table
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from qflash.integrations.patching import AttentionFunction, patch, unpatch
from qflash.kernels import lengths

from ..baselines import METHODS
from ..baselines.method import FLOAT
from ..evaluation import small_models
from ..evaluation.classifiers import require_timm, resolve_model_name
from . import console as bench_console
from . import errors, figures, report, runner, tables, timers
from . import methods as bench_methods
from . import schema as col
from .metrics import sqnr
from .runner import TimedMethod
from .schema import Row

MODELS = ("DeiT-T", "DeiT-S", "DeiT-B", "Swin-T")
"""The models whose attention A1 to A7 are."""

FIELDS = col.pick(
    col.MODEL, col.BATCH, col.DTYPE, col.METHOD, col.IMAGES_PER_S, *col.TIMES, col.BEST_SDPA, col.RATIO, col.SQNR_DB, col.ERROR
)
"""Columns of ``models.csv``."""


@dataclasses.dataclass(frozen=True)
class ModelInputs:
    """A model, which whoever prepares a call of it may change, and its images, in one dtype and on one device."""

    model: nn.Module
    images: torch.Tensor


def _has_bias(model: nn.Module) -> bool:
    # timm's Swin, and Swin V2
    names = "relative_position_bias_table", "cpb_mlp"
    return any(hasattr(module, name) for module in model.modules() for name in names)


def _use_sdpa(model: nn.Module) -> None:
    """Have timm's modules call SDPA, all of them: Swin's do not by default."""
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = True  # type: ignore[assignment]


def _method(
    name: str,
    change: Callable[[nn.Module], object] = lambda model: model,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    *,
    is_sdpa: bool = False,
    is_ours: bool = False,
    compiled: bool = False,
    calls: int = 0,
    devices: tuple[str, ...] = ("cuda", "cpu"),
) -> TimedMethod[ModelInputs]:
    """Return the method that runs a model after ``change`` has made it compute its attention so, compiled or not.

    ``calls`` is how often it is called before it is compiled.
    """

    def prepare(inputs: ModelInputs) -> timers.TimedCall:
        change(inputs.model)
        for _ in range(calls):
            inputs.model(inputs.images)
        return functools.partial(torch.compile(inputs.model) if compiled else inputs.model, inputs.images)

    return TimedMethod(name, "end-to-end", prepare, context, is_sdpa=is_sdpa, is_ours=is_ours, devices=devices)


def _with(function: AttentionFunction) -> Callable[[nn.Module], object]:
    return functools.partial(patch, attention=function)


def own_variants(recipes: Sequence[str]) -> dict[str, tuple[str, bool]]:
    """Return QFlash's methods by name: the recipe of each, and whether it keeps the bias of Swin's layers."""
    found = {col.QFLASH if recipe == "default" else f"{col.QFLASH} {recipe}": (recipe, False) for recipe in recipes}
    return found | ({col.KEPT_BIAS: ("default", True)} if "default" in recipes else {})


def applies(name: str, model: nn.Module) -> bool:
    """Tell whether a method differs from the others in ``model``.

    Without a bias none can be kept, and a model that calls SDPA anyway is compiled with it once.
    """
    if name == col.COMPILE_SDPA:
        return any(getattr(module, "fused_attn", True) is False for module in model.modules())
    return name not in (col.KEPT_BIAS, col.COMPILE_KEPT_BIAS) or _has_bias(model)


def make_methods(
    device: torch.device, recipes: Sequence[str] = ("default",), peers: Sequence[str] = (), only: Sequence[str] = ()
) -> list[TimedMethod[ModelInputs]]:
    """Return the methods that can run in a model on ``device``: timm's choice, SDPA's back ends, baselines, ours, peers.

    On a GPU also ``torch.compile`` (default mode) of the model as it is, as it calls SDPA, and patched with the default recipe.

    Args:
        device: a CUDA device or the CPU.
        recipes: QFlash's recipes, keys of :data:`qflash_lab.bench.methods.RECIPES`.
        peers: see :func:`qflash_lab.bench.methods.import_peer`.
        only: names to keep; all if empty.

    Raises:
        ValueError: an unknown recipe, peer or name, or a name given twice.
    """
    bench_methods.check_recipes(recipes)
    gpu = ("cuda",)
    found = [_method(col.TIMM), _method(col.SDPA, _use_sdpa, is_sdpa=True)]
    for name, backend in bench_methods.FUSED_SDPA.items():
        found.append(_method(name, _use_sdpa, functools.partial(sdpa_kernel, backend), is_sdpa=True, devices=gpu))
    for method in METHODS.values():
        if method.prepare is not None and not method.integer_only and method.query_granularity != FLOAT:
            found.append(_method(method.name, _with(method.attention), devices=gpu))
    for name, (recipe, keep_bias) in own_variants(recipes).items():
        change = functools.partial(patch, recipe=bench_methods.RECIPES[recipe], keep_bias=keep_bias)
        found.append(_method(name, change, is_ours=True))
    found.append(_method(col.COMPILE, compiled=True, devices=gpu))
    found.append(_method(col.COMPILE_SDPA, _use_sdpa, compiled=True, devices=gpu))
    if "default" in recipes:
        found.append(_method(col.COMPILE_QFLASH, patch, is_ours=True, compiled=True, devices=gpu))
        keep = functools.partial(patch, keep_bias=True)
        # the first call sees a mask, the second keeps the sum
        found.append(_method(col.COMPILE_KEPT_BIAS, keep, is_ours=True, compiled=True, calls=2, devices=gpu))
    for text in peers:
        name, function = bench_methods.import_peer(text)
        found.append(_method(name, _with(functools.partial(function, is_causal=False))))
    return runner.choose(found, device, only)


def measure(
    name: str,
    model: nn.Module,
    images: torch.Tensor,
    methods: Sequence[TimedMethod[ModelInputs]],
    *,
    dtype: torch.dtype,
    rounds: int,
    tick: Callable[[str], None] = lambda _: None,
) -> list[Row]:
    """Time a model with every method, in alternation; one row each, keys :data:`FIELDS`.

    Args:
        name: for the rows.
        model: in float32, in evaluation mode; it is copied, not changed.
        images: float32, (batch, 3, height, width), on the device to run on.
        methods: see :func:`make_methods`; those that do not apply to the model are left out.
        dtype: of weights and images while they are timed.
        rounds: samples a method.
    """
    device = images.device
    with sdpa_kernel(SDPBackend.MATH):
        wanted = copy.deepcopy(model).to(device)(images)

    def prepare(method: TimedMethod[ModelInputs]) -> tuple[timers.TimedCall, Row]:
        call = method.prepare(ModelInputs(copy.deepcopy(model).to(device, dtype), images.to(dtype)))
        return call, {col.SQNR_DB: round(sqnr(wanted, call()), 2)}

    known = {col.MODEL: name, col.BATCH: len(images), col.DTYPE: str(dtype).removeprefix("torch.")}
    mine = [method for method in methods if applies(method.name, model)]
    runs = [
        runner.Run(
            col.empty(FIELDS, **known, method=method.name), functools.partial(prepare, method), method.mode, method.context
        )
        for method in mine
    ]
    rows = runner.measure(runs, device, rounds, tick=lambda method: tick(f"{name} b{len(images)} {method}"))
    add_images_per_s(rows)
    sdpa = {method.name for method in mine if method.is_sdpa}
    runner.compare(rows, lambda row: row[col.METHOD] in sdpa, name=col.BEST_SDPA)
    if "torch._dynamo" in sys.modules:
        # what was compiled for one batch is not to be made general for the next
        torch.compiler.reset()
    return rows


def add_images_per_s(rows: Sequence[Row]) -> None:
    """Set ``images_per_s`` of rows that have a time."""
    for row in rows:
        if row[col.MEDIAN_US] is not None:
            row[col.IMAGES_PER_S] = round(row[col.BATCH] * 1e6 / row[col.MEDIAN_US], 2)


def load(name: str, pretrained: bool = False, image_size: int | None = None) -> tuple[nn.Module, tuple[int, int, int]]:
    """Return a model in float32 and evaluation mode, and the size of an image it takes (channels, height, width).

    Args:
        name: see :func:`qflash_lab.evaluation.classifiers.resolve_model_name`.
        pretrained: download timm's weights, or take them from its cache; otherwise they are drawn, always the same.
        image_size: height and width of the images it is built for; timm's own if ``None``.

    Every length gets a kernel of its own from now on: a process with this model alone would compile it.

    Raises:
        ValueError: no such model, or it cannot be built for images of this size.
        ImportError: timm is not installed.
    """
    lengths.expect_all()
    full = resolve_model_name(name)
    if full in small_models.MODELS:
        if image_size is not None:
            raise ValueError(
                f"image_size is for timm's models; {name} takes {small_models.MODELS[full].image_shape[-1]} pixels"
            )
        return small_models.load_model(full), small_models.MODELS[full].image_shape
    timm = require_timm()
    options = {} if image_size is None else {"img_size": image_size}

    def create(**more: bool) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return timm.create_model(full, pretrained=pretrained, **options, **more)

    try:
        model = create()
        if getattr(model, "dynamic_img_size", False):
            # DINOv3 else makes its positions on the CPU in every call, which a CUDA graph cannot hold
            model = create(dynamic_img_size=False)
    except (TypeError, ValueError, AssertionError) as error:
        if image_size is None:
            raise
        raise ValueError(
            f"model {name!r} cannot be built for an image_size of {image_size}: {errors.describe(error)}"
        ) from error
    channels, *own = model.pretrained_cfg["input_size"]
    return model.eval(), (channels, *(own if image_size is None else (image_size, image_size)))


def label(name: str, image_size: int | None) -> str:
    """Return what rows call a model, which names an image size that is not its own."""
    return name if image_size is None else f"{name} {image_size} px"


def draw_images(batch: int, size: tuple[int, int, int], device: torch.device) -> torch.Tensor:
    """Draw images from N(0, 1) on the CPU, the same on every device."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn((batch, *size), generator=generator, dtype=torch.float32, device="cpu").to(device)


def without_qflash(model: nn.Module, images: torch.Tensor) -> tuple[nn.Module, torch.Tensor]:
    """Return a model of timm's classes alone, which another revision of QFlash can unpickle, and its images.

    A small model prepares its images itself; here it is done beforehand.
    """
    return (model.backbone, model.prepare(images)) if isinstance(model, small_models.SmallClassifier) else (model, images)


TABLE = (
    tables.names("model", col.MODEL), tables.names("batch", col.BATCH), tables.names("attention", col.METHOD),
    tables.Column("images/s", col.IMAGES_PER_S, ".0f"), tables.Column("median µs", col.MEDIAN_US),
    tables.Column("quartiles", tables.quartiles), tables.Column("ratio", col.RATIO),
    tables.Column("SQNR dB of logits", col.SQNR_DB),
)  # fmt: skip
"""Of the table on the console."""


def render(rows: Sequence[Row], title: str) -> Table:
    """Return the rows as a table."""
    return tables.render(rows, TABLE, title, groups=2)


def draw(rows: Sequence[dict[str, Any]], title: str) -> Any:
    """Draw images a second in grouped bars, one panel a batch.

    Returns:
        a matplotlib Figure.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: no row has a time.
    """
    options: dict[str, Any] = {"value": col.IMAGES_PER_S, "axis": "images/s", "width": 9, "height": 2.8}
    figure, _ = figures.bars(rows, col.BATCH, title, heading=lambda batch: f"batch {batch}", **options)
    return figure


def load_patchable(
    names: Sequence[str], pretrained: bool = False, image_size: int | None = None
) -> dict[str, tuple[nn.Module, tuple[int, int, int]]]:
    """Load models by :func:`label`, and require that :func:`qflash.patch` takes their attention, before anything is timed.

    Raises:
        ValueError: there is no such model, or nothing in it can be patched; the message names it.
        ImportError: timm is not installed.
    """
    loaded = {}
    for name in names:
        model, size = load(name, pretrained, image_size)
        try:
            unpatch(patch(model))
        except ValueError as error:
            raise ValueError(f"model {name!r} cannot be compared: {error}") from error
        loaded[label(name, image_size)] = model, size
    return loaded


@torch.inference_mode()
def run_models(
    names: Sequence[str],
    batches: Sequence[int],
    methods: Sequence[TimedMethod[ModelInputs]],
    *,
    dtype: torch.dtype,
    device: torch.device,
    rounds: int = 15,
    pretrained: bool = False,
    image_size: int | None = None,
    output: pathlib.Path | None = None,
) -> dict[str, Any]:
    """Measure, print the table and write ``models.json``, ``.csv``, ``.png`` and ``.svg`` into ``output``.

    The files are written after every model and batch, so that a run that is cut short leaves what it had.

    Returns:
        what ``models.json`` holds: environment, timing (in words) and rows.

    Raises:
        ValueError: an unknown model, or fewer than one round.
        ImportError: timm is not installed.
    """
    runner.check_rounds(rounds)
    loaded = load_patchable(names, pretrained, image_size)
    where = "one CUDA graph of whole forward passes" if device.type == "cuda" else "eager forward passes on the CPU"
    done = report.Report(
        "models", "whole models with different attention", device, FIELDS, output,
        timing=f"{where}, warm, methods in alternation (order reversed every round), median of {rounds} samples; "
        "ratio: time with the fastest SDPA back end ÷ row's time",
        sqnr="20 log10(|ref| / |out - ref|) of the logits against the same weights in float32 with float32 attention",
        weights="pretrained" if pretrained else "as timm initialises them (small models: trained)",
    )  # fmt: skip
    done.begin()
    runs = len(batches) * sum(applies(method.name, model) for model, _ in loaded.values() for method in methods)
    with bench_console.progress_bar(runs) as tick:
        for (name, (model, size)), batch in itertools.product(loaded.items(), batches):
            images = draw_images(batch, size, device)
            done.add(measure(name, model, images, methods, dtype=dtype, rounds=rounds, tick=tick))
    title = f"whole models, {str(dtype).removeprefix('torch.')}"
    named = f"{done.record['environment']['device']}, {title}"
    return done.finish(render(done.rows, title), draw=lambda: draw(done.rows, named))
