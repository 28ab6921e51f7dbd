"""The demonstration behind ``qflash demo``: accuracy of real models, SQNR on the paper's workloads, a report.

Everything is measured in the call; nothing is downloaded. The CPU back ends compute the same
integers as the GPU kernel, so the accuracy is the kernel's; speed is measured on a CUDA device only.
"""

from __future__ import annotations

import html
import json
import math
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import nn

from ..api import attention, int8_attention, quantize
from ..backends import resolve_backend
from ..bench.metrics import mse, sqnr
from ..bench.workloads import WORKLOADS, Workload, paper_inputs
from ..evaluation.digits import MODELS, load_digits_split, load_model, predict_logits
from ..integrations import patching
from ..integrations.patching import patch, unpatch
from ..optional_packages import require_packages
from . import html as page

RECIPES = ("paper", "default", "accurate")
CPU_IMAGES = 128
"""Held-out images used on a CPU unless a limit says otherwise."""

PAPER_SQNR_DB = {"A2": 32.50, "A7": 31.02}
"""What the paper reports for its int8 attention on uniform inputs."""

_LAYER_IMAGES = 8
_BATCH = 32
_TIMING_BATCH = 8
_COLOURS = {"paper": "#c8553d", "default": "#3b82c4", "accurate": "#2f9e6e"}


def _describe(device: torch.device) -> dict[str, str]:
    """Say what the attention runs on: device type, its name and the back end."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    return {"type": device.type, "name": name, "backend": resolve_backend("auto", device)}


def _where(device: dict[str, str]) -> str:
    if device["backend"] == "triton":
        return f"QFlash ran as its Triton kernel on {device['name']}."
    name = {"cpu": "its compiled CPU kernel", "reference": "its PyTorch reference"}[device["backend"]]
    return (
        f"QFlash ran as {name} on {device['name']}. It computes the same integers as the GPU kernel, "
        "so the accuracy carries over; no GPU ran and no speed was measured."
    )


def _supported_attention(model: nn.Module) -> dict[str, nn.Module]:
    return {name: m for name, m in model.named_modules() if patching._adapter_for(type(m)) is not None}


def _capture(model: nn.Module, images: torch.Tensor) -> dict[str, tuple[tuple[Any, ...], dict[str, Any], torch.Tensor]]:
    """Run the float model once; return each attention module's arguments and output by name."""
    seen: dict[str, tuple[tuple[Any, ...], dict[str, Any], torch.Tensor]] = {}

    def hook(name: str) -> Callable[..., None]:
        def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor) -> None:
            seen[name] = (args, kwargs, output)

        return keep

    handles = [m.register_forward_hook(hook(name), with_kwargs=True) for name, m in _supported_attention(model).items()]
    try:
        model(images)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _measure_model(name: str, images: torch.Tensor, labels: torch.Tensor, tick: Callable[[str], None]) -> dict[str, Any]:
    """Compare float and integer attention in one digits model; images (count, 1, 8, 8), labels (count,)."""
    model = load_model(name).to(images.device)
    exact = predict_logits(model, images, _BATCH)
    captured = _capture(model, images[:_LAYER_IMAGES])
    modules = _supported_attention(model)
    tick(f"{name}: float")
    choice = exact.argmax(1)
    right = int((choice == labels).sum())
    result: dict[str, Any] = {
        "float": {"right": right, "top1_percent": 100.0 * right / len(labels)},
        "recipes": {},
    }
    for recipe in RECIPES:
        patch(model, recipe)
        logits = predict_logits(model, images, _BATCH)
        layers = {
            layer.removeprefix("backbone."): sqnr(output, modules[layer](*args, **kwargs))
            for layer, (args, kwargs, output) in captured.items()
        }
        unpatch(model)
        got = logits.argmax(1)
        right = int((got == labels).sum())
        result["recipes"][recipe] = {
            "right": right,
            "top1_percent": 100.0 * right / len(labels),
            "agreement_percent": 100.0 * int((got == choice).sum()) / len(labels),
            "logits_sqnr_db": sqnr(exact, logits),
            "layers_sqnr_db": layers,
        }
        tick(f"{name}: {recipe}")
    return result


def _float_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attention in float64, the yardstick; (..., tokens, channels)."""
    query, key, value = (x.to(torch.float64) for x in (query, key, value))
    return torch.softmax(query @ key.mT * query.shape[-1] ** -0.5, dim=-1) @ value


def _measure_workload(workload: Workload, device: torch.device) -> dict[str, Any]:
    """SQNR and mean squared error of one image's uniform inputs, int8 with one scale per tensor."""
    inputs = paper_inputs(workload, 1, device=device)
    exact = _float_attention(*inputs)
    query, key, value = (quantize(x, "tensor") for x in inputs)
    ceiling = _float_attention(query.dequantize(), key.dequantize(), value.dequantize())
    result: dict[str, Any] = {
        "name": workload.name,
        "source": workload.source,
        "shape": list(workload.shape(1)),
        "paper_sqnr_db": PAPER_SQNR_DB.get(workload.name),
        "ceiling": {"sqnr_db": sqnr(exact, ceiling), "mse": mse(exact, ceiling)},
        "recipes": {},
        "timings_us": None,
    }
    for recipe in RECIPES:
        got = int8_attention(query, key, value, out_dtype=torch.float32, recipe=recipe)
        assert isinstance(got, torch.Tensor)
        result["recipes"][recipe] = {"sqnr_db": sqnr(exact, got), "mse": mse(exact, got)}
    if device.type == "cuda":
        result["timings_us"] = _time_workload(workload, device)
    return result


def _time_workload(workload: Workload, device: torch.device) -> dict[str, float]:
    """Median microseconds of SDPA and QFlash on float16 inputs of several images; CUDA events, warmed up."""
    query, key, value = paper_inputs(workload, _TIMING_BATCH, device=device)
    query8, key8, value8 = (quantize(x, "tensor") for x in (query, key, value))
    calls: dict[str, Callable[[], object]] = {
        "sdpa_float16": lambda: nn.functional.scaled_dot_product_attention(query, key, value),
        "qflash_float16_in": lambda: attention(query, key, value),
        "qflash_int8_in": lambda: int8_attention(query8, key8, value8),
    }
    return {name: _median_us(call) for name, call in calls.items()}


def _median_us(call: Callable[[], object], repeats: int = 50, calls: int = 10) -> float:
    """Return the median over ``repeats`` of the device time of one call, averaged over ``calls`` in a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # Without the graph, calls this short would measure how fast Python launches them.
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    graph.replay()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000.0 / calls)
    return statistics.median(times)


def _finite(x: Any) -> Any:
    """Replace what JSON has no word for (NaN, infinity) by None, recursively."""
    if isinstance(x, dict):
        return {key: _finite(value) for key, value in x.items()}
    if isinstance(x, list):
        return [_finite(value) for value in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x


def _number(x: float | None, digits: int = 2) -> str:
    return "-" if x is None else f"{x:.{digits}f}"


def _sections(report: dict[str, Any]) -> list[tuple[str, str, list[str], list[list[str]]]]:
    """Lay the report out as tables: (title, note, header, rows), shared by the terminal and the HTML."""
    models, layers = [], []
    for name, model in report["models"].items():
        models.append([name, "float", f"{model['float']['top1_percent']:.2f}", "", ""])
        for recipe, got in model["recipes"].items():
            numbers = [f"{got['top1_percent']:.2f}", f"{got['agreement_percent']:.2f}", _number(got["logits_sqnr_db"])]
            models.append([name, recipe, *numbers])
        for layer in next(iter(model["recipes"].values()))["layers_sqnr_db"]:
            layers.append([name, layer, *(_number(model["recipes"][r]["layers_sqnr_db"][layer]) for r in RECIPES)])
    quality, errors, timings = [], [], []
    for row in report["workloads"]:
        label = [row["name"], "x".join(str(n) for n in row["shape"])]
        ours = [row["recipes"][r] for r in RECIPES]
        quality.append([*label, *(_number(r["sqnr_db"]) for r in (*ours, row["ceiling"])), _number(row["paper_sqnr_db"])])
        errors.append([*label, *(f"{r['mse']:.2e}" for r in (*ours, row["ceiling"]))])
        if row["timings_us"]:
            timings.append([*label, *(f"{us:.1f}" for us in row["timings_us"].values())])
    images = report["images"]
    sections = [
        (
            "Handwritten digits: held-out images",
            f"The first {images} of {report['held_out']} held-out images, in batches of {_BATCH}; "
            f"one image is {100 / images:.2f} points.",
            ["model", "attention", "top-1 %", "same as float %", "logits SQNR dB"],
            models,
        ),
        (
            "SQNR of each attention layer, dB",
            "Output of the attention module (after its projection) on the float model's own inputs, "
            f"{min(images, _LAYER_IMAGES)} images.",
            ["model", "layer", *RECIPES],
            layers,
        ),
        (
            "Table 1 workloads: SQNR, dB",
            "Query, key and value uniform in [-4, 4), one image, int8 with one scale per tensor, against float64. "
            "Ceiling: exact softmax on the same int8 tensors. Paper: as reported there.",
            ["", "shape", *RECIPES, "ceiling", "reported"],
            quality,
        ),
        ("Table 1 workloads: mean squared error", "The same tensors.", ["", "shape", *RECIPES, "ceiling"], errors),
    ]
    if timings:
        sections.append(
            (
                "Device time of one call, microseconds",
                f"Batch {_TIMING_BATCH} (shape is one image's), inside a CUDA graph, median of 50, inputs warm in cache. "
                "'float16 in' quantises as well; 'int8 in' gets int8 tensors.",
                ["", "shape", "SDPA float16", "QFlash float16 in", "QFlash int8 in"],
                timings,
            )
        )
    return sections


def _plot(workloads: Sequence[dict[str, Any]]) -> Any:
    """Draw SQNR by workload as a matplotlib Figure."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.add_subplot()
    places = range(len(workloads))
    ceiling = [row["ceiling"]["sqnr_db"] for row in workloads]
    axes.plot(places, ceiling, "_", color=page.INK, markersize=26, label="ceiling of int8 inputs")
    for shift, recipe in zip((-0.2, 0.0, 0.2), RECIPES, strict=True):
        values = [row["recipes"][recipe]["sqnr_db"] for row in workloads]
        axes.plot([p + shift for p in places], values, "o", color=_COLOURS[recipe], label=recipe)
    reported = [(p, row["paper_sqnr_db"]) for p, row in enumerate(workloads) if row["paper_sqnr_db"] is not None]
    axes.plot(*zip(*reported, strict=True), "x", color=_COLOURS["paper"], markersize=9, label="reported in the paper")
    axes.set_xticks(list(places), [row["name"] for row in workloads])
    axes.set_ylabel("SQNR, dB")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=page.INK, alpha=0.15)
    figure.legend(loc="outside upper center", ncols=3, frameon=False)
    return figure


def _html(report: dict[str, Any]) -> str:
    """Render the report as one HTML page that loads nothing."""
    versions = f"qflash {report['qflash']}, PyTorch {report['torch']}, {report['seconds']:.0f} s."
    parts = [f"<p>{html.escape(_where(report['device']))}</p>", f'<p class="note">{html.escape(versions)}</p>']
    for title, note, header, rows in _sections(report):
        parts.append(page.heading(title, note))
        if title.startswith("Table 1 workloads: SQNR"):
            parts.append(page.plot(lambda: _plot(report["workloads"])))
        parts.append(page.table(header, rows))
    return page.document("QFlash report", parts)


@torch.no_grad()
def run_demo(
    output_dir: Path | str = Path("qflash-report"),
    limit: int | None = None,
    *,
    device: torch.device | str | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Measure, print tables and write ``report.html`` and ``demo.json`` into ``output_dir``.

    Args:
        output_dir: created if it is not there.
        limit: held-out images per model; if None all 540 on a CUDA device and :data:`CPU_IMAGES` elsewhere.
        device: where to run; a CUDA device if there is one, else the CPU.
        console: where to print; standard output if None.

    Returns:
        what ``demo.json`` holds: versions, device, models, workloads. Numbers that are not finite are None.

    Raises:
        ImportError: timm, scikit-learn or matplotlib is not installed.
        ValueError: ``limit`` is not positive.
    """
    require_packages("the demo", "timm", "sklearn", "matplotlib")
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1 image, got {limit}")
    from .. import __version__

    start = time.monotonic()
    console = console or Console()
    target = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    _, _, images, labels = load_digits_split()
    held_out = len(labels)
    if limit is None:
        limit = held_out if target.type == "cuda" else CPU_IMAGES
    images, labels = images[:limit].to(target), labels[:limit].to(target)
    described = _describe(target)
    console.print(_where(described), highlight=False)
    report: dict[str, Any] = {
        "qflash": __version__,
        "torch": torch.__version__,
        "device": described,
        "images": len(labels),
        "held_out": held_out,
        "models": {},
        "workloads": [],
    }
    columns = (TextColumn("{task.description:18}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("models", total=len(MODELS) * (1 + len(RECIPES)) + len(WORKLOADS))

        def tick(done: str) -> None:
            progress.update(task, advance=1, description=done)

        for name in MODELS:
            report["models"][name] = _measure_model(name, images, labels, tick)
        for workload in WORKLOADS:
            report["workloads"].append(_measure_workload(workload, target))
            tick(f"workload {workload.name}")
    report["seconds"] = time.monotonic() - start
    report = _finite(report)
    for title, note, header, rows in _sections(report):
        table = Table(title=title, caption=note, title_justify="left", caption_justify="left")
        for index, column in enumerate(header):
            table.add_column(column, justify="left" if index < 2 else "right")
        for cells in rows:
            table.add_row(*cells)
        console.print(table)
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "demo.json").write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    (folder / "report.html").write_text(_html(report), encoding="utf-8")
    console.print(
        f"{report['seconds']:.0f} s. Report: {folder / 'report.html'}, numbers: {folder / 'demo.json'}", highlight=False
    )
    return report
