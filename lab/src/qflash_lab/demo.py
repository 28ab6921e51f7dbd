"""The demonstration behind ``qflash-lab demo``: trained models in floating point, with integer attention, and as integer
networks; SQNR on the paper's workloads; a report.

Everything is measured in the call; nothing is downloaded. All back ends compute the same integers, so the accuracy holds for
each of them; times are those of the device and back end that ran.
"""

from __future__ import annotations

import copy
import html
import json
import math
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import nn

from qflash.api import attention, int8_attention, quantize
from qflash.backends import resolve_backend
from qflash.integrations import patching
from qflash.integrations.patching import patch, unpatch
from qflash.optional_packages import require_packages

from .bench import html as page
from .bench import runner
from .bench import schema as col
from .bench.capture import capture_small
from .bench.figures import colour_of
from .bench.metrics import mse, sqnr
from .bench.workloads import WORKLOADS, Workload, paper_inputs
from .evaluation.integer_rows import WHOLE_NETWORKS, IntegerClassifier
from .evaluation.small_models import (
    CALIBRATION,
    CLASSES,
    MODELS,
    SmallClassifier,
    load_images,
    load_model,
    predict_logits,
)

NETWORKS = ("fashion-vit", "fashion-swin")
"""The models that run."""
RECIPES = ("paper", "default", "accurate")
CPU_IMAGES = 256
"""Test images used on a CPU unless a limit says otherwise."""

PAPER_SQNR_DB = {"A2": 32.50, "A7": 31.02}
"""What the paper reports for its int8 attention on uniform inputs."""

SHOWN_IMAGES = 12
"""Test images that the page shows."""

RUNS = ("float", "integer attention", "integer network")
"""How a model runs: with float attention, with QFlash's in a float model, and as a whole in integers."""

MOST_DIFFERENT = 6
"""Images that the page shows of each model: those that the three name differently, and those whose probabilities move most."""

NOISES_DB = (5, 15, 25, 35, 45)
"""What the page shows as pictures."""

_LAYER_IMAGES = 8
_BATCH = 32
_TIMING_BATCH = 8
_ROUNDS = 9
_GREYS = 24


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
    ran = f"QFlash ran as {name} on {device['name']}. It computes the same integers as the GPU kernel, so the accuracy carries "
    ran += "over"
    if device["backend"] == "reference":
        return f"{ran}; no GPU ran, and the reference is not timed."
    return f"{ran}; no GPU ran, and the times are this CPU's."


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


def _measure_model(
    name: str, integers: IntegerClassifier, images: torch.Tensor, labels: torch.Tensor, tick: Callable[[str], None]
) -> dict[str, Any]:
    """Compare float, integer attention and the integer network of one model; images (count, 1, 28, 28), labels (count,)."""
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
    result |= _measure_whole(model, integers, images, labels, exact)
    tick(f"{name}: integers")
    return result


def _measure_whole(
    model: SmallClassifier, integers: IntegerClassifier, images: torch.Tensor, labels: torch.Tensor, exact: torch.Tensor
) -> dict[str, Any]:
    """Compare the float model, the one with integer attention and the integer network: :data:`RUNS`.

    Args:
        model: float.
        integers: its integer network.
        images: (count, 1, 28, 28).
        labels: (count,).
        exact: logits of the float model.

    Returns:
        ``"runs"``: figures of each; ``"differ"``: images that they name differently or less surely, with the class
        that each names and how probable the float model's class is to it; ``"different"``: how many they name differently.
    """
    attention_model = copy.deepcopy(model)
    patch(attention_model)
    logits = {
        "float": exact, "integer attention": predict_logits(attention_model, images, _BATCH),
        "integer network": predict_logits(integers, images, _BATCH),
    }  # fmt: skip
    few = images[:_TIMING_BATCH]
    times: dict[str, float] = {}
    if resolve_backend("auto", images.device) != "reference":
        prepared, pixels = model.prepare(few), model.pixels(few)
        calls: dict[str, Callable[[], object]] = {
            "float": lambda: model.backbone(prepared), "integer attention": lambda: attention_model.backbone(prepared),
            "integer network": lambda: integers.network(pixels),
        }  # fmt: skip
        times = runner.medians(calls, images.device, _ROUNDS)
    floats = sum(4 * x.numel() for x in model.parameters())
    stored = sum(x.numel() * x.element_size() for x in integers.network.buffers())
    choices = {run: found.argmax(1) for run, found in logits.items()}
    runs = {}
    for run, choice in choices.items():
        right = int((choice == labels).sum())
        runs[run] = {
            "right": right, "top1_percent": 100.0 * right / len(labels),
            "agreement_percent": 100.0 * int((choice == choices["float"]).sum()) / len(labels),
            "logits_sqnr_db": None if run == "float" else sqnr(exact, logits[run]),
            "ms_per_image": times[run] / 1000 / len(few) if times else None,
            "size_mb": (stored if run == "integer network" else floats) / 1e6,
        }  # fmt: skip
    stacked = torch.stack(list(choices.values()))
    chances = torch.stack([found.softmax(1).gather(1, choices["float"][:, None])[:, 0] for found in logits.values()])
    different = (stacked != stacked[:1]).any(0)
    order = (different + (chances - chances[:1]).abs().amax(0)).argsort(descending=True)
    differ = [
        {
            "image": images[place, 0].tolist(), "label": int(labels[place]), "says": stacked[:, place].tolist(),
            "percent": (100 * chances[:, place]).tolist(),
        }
        for place in order[:MOST_DIFFERENT].tolist()
    ]  # fmt: skip
    return {"runs": runs, "differ": differ, "different": int(different.sum())}


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
        col.PAPER_SQNR_DB: PAPER_SQNR_DB.get(workload.name),
        "ceiling": {col.SQNR_DB: sqnr(exact, ceiling), "mse": mse(exact, ceiling)},
        "recipes": {},
        "timings_us": None,
    }
    for recipe in RECIPES:
        got = int8_attention(query, key, value, out_dtype=torch.float32, recipe=recipe)
        assert isinstance(got, torch.Tensor)
        result["recipes"][recipe] = {col.SQNR_DB: sqnr(exact, got), "mse": mse(exact, got)}
    if resolve_backend("auto", device) != "reference":
        result["timings_us"] = _time_workload(workload, device)
    return result


def _show_images(
    integers: IntegerClassifier, images: torch.Tensor, labels: torch.Tensor, device: torch.device
) -> list[dict[str, Any]]:
    """Return a few images with what the ViT says and where its last block looks, float beside integer.

    The maps are the class token's weights over the 14 x 14 patches, mean of the heads. Integer weights are what
    :func:`qflash.attention` gives for a value of unit vectors, on the float model's own query and key.

    Args:
        integers: the ViT's integer network.
        images: (count, 1, 28, 28).
        labels: (count,).
        device: where the integer attention runs.
    """
    few = images[:SHOWN_IMAGES].cpu()
    model = load_model(NETWORKS[0])
    exact = predict_logits(model, few, _BATCH).argmax(1)
    model = model.to(device)
    whole = predict_logits(integers, few.to(device), _BATCH).argmax(1).cpu()
    patch(model)
    integer = predict_logits(model, few.to(device), _BATCH).argmax(1).cpu()
    last = capture_small(NETWORKS[0], few)[-1]
    query, key = last.query[:, :, :1], last.key
    factor = query.shape[-1] ** -0.5 if last.scale is None else last.scale
    wanted = torch.softmax(query.double() @ key.double().mT * factor, dim=-1)
    units = torch.eye(key.shape[2], dtype=key.dtype, device="cpu").expand(*key.shape[:2], -1, -1)
    got = attention(query.to(device), key.to(device), units.to(device), scale=last.scale).cpu()
    shown = []
    for index, image in enumerate(few):
        maps = [x[index, :, 0, 1:].mean(0).view(14, 14) for x in (wanted, got.double())]
        shown.append(
            {
                "label": int(labels[index]), "float": int(exact[index]), "integer": int(integer[index]),
                "network": int(whole[index]), "image": image[0].tolist(),
                "float_map": maps[0].tolist(), "integer_map": maps[1].tolist(),
                "map_sqnr_db": sqnr(*maps),
            }
        )  # fmt: skip
    return shown


def _time_workload(workload: Workload, device: torch.device) -> dict[str, float]:
    """Median microseconds of SDPA and QFlash, in alternation: on a GPU in float16 on several images, else in float32 on one."""
    on_gpu = device.type == "cuda"
    inputs = paper_inputs(workload, _TIMING_BATCH if on_gpu else 1, device=device)
    query, key, value = inputs if on_gpu else (x.float() for x in inputs)
    query8, key8, value8 = (quantize(x, "tensor") for x in (query, key, value))
    kind = str(query.dtype).removeprefix("torch.")
    calls: dict[str, Callable[[], object]] = {
        f"sdpa_{kind}": lambda: nn.functional.scaled_dot_product_attention(query, key, value),
        f"qflash_{kind}_in": lambda: attention(query, key, value),
        "qflash_int8_in": lambda: int8_attention(query8, key8, value8),
    }
    return runner.medians(calls, device, _ROUNDS)


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
    models, layers, runs = [], [], []
    for name, model in report["models"].items():
        for run, got in model["runs"].items():
            numbers = [f"{got['top1_percent']:.2f}", f"{got['agreement_percent']:.2f}", _number(got["logits_sqnr_db"])]
            runs.append([name, run, *numbers, _number(got["ms_per_image"]), f"{got['size_mb']:.2f}"])
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
        quality.append([*label, *(_number(r[col.SQNR_DB]) for r in (*ours, row["ceiling"])), _number(row[col.PAPER_SQNR_DB])])
        errors.append([*label, *(f"{r['mse']:.2e}" for r in (*ours, row["ceiling"]))])
        if row["timings_us"]:
            sdpa, floats, int8 = row["timings_us"].values()
            timings.append(
                [*label, f"{sdpa:.1f}", f"{floats:.1f}", f"{sdpa / floats:.2f}", f"{int8:.1f}", f"{sdpa / int8:.2f}"]
            )
    images = report["images"]
    sections = [
        (
            "Float, integer attention, integer network",
            f"The whole model in floating point; with attention of QFlash in a float model; and as a network of "
            f"qflash.quantize_model, where all between uint8 pixels and int32 logits is integers, calibrated on {CALIBRATION} "
            f"training images. Its size holds tables of Swin's bias and mask. Time of an image in batches of {_TIMING_BATCH}, "
            f"median of {_ROUNDS} alternating rounds"
            + ("." if report["device"]["type"] == "cuda" else f", {torch.get_num_threads()} threads; other work here shows."),
            ["model", "runs as", "top-1 %", "same as float %", "logits SQNR dB", "ms an image", "size, MB"],
            runs,
        ),
        (
            "Fashion-MNIST: attention by recipe",
            f"Top-1 is how often a model names the right class, the next column how often integer attention gives the same "
            f"answer as float attention. The logits' SQNR is how far its outputs move: 20 dB is a tenth of their size, 40 dB a "
            f"hundredth. The first {images} of the {report['shipped']} test images that come with qflash, in batches of "
            f"{_BATCH}; one image is {100 / images:.2f} points.",
            ["model", "attention", "top-1 %", "same as float %", "logits SQNR dB"],
            models,
        ),
        (
            "SQNR of each attention layer, dB",
            "How much of each layer's output is right: at 35 dB the error is 1.8 % of it. Output of the attention module "
            f"(after its projection) on the float model's own inputs, {min(images, _LAYER_IMAGES)} images.",
            ["model", "layer", *RECIPES],
            layers,
        ),
        (
            "Table 1 workloads: SQNR, dB",
            "The paper's own test, on random tensors. The ceiling is exact softmax on the same int8 tensors, so the distance "
            "to it is what the integer softmax costs. Query, key and value uniform in "
            "[-4, 4), one image, int8 with one scale per tensor, against float64; reported: in the paper.",
            ["", "shape", *RECIPES, "ceiling", "reported"],
            quality,
        ),
        (
            "Table 1 workloads: mean squared error",
            "The same errors in the unit of the output, squared: ten times less is 10 dB more.",
            ["", "shape", *RECIPES, "ceiling"],
            errors,
        ),
    ]
    if timings:
        on_gpu = report["device"]["type"] == "cuda"
        kind = "float16" if on_gpu else "float32"
        how = (
            f"Batch {_TIMING_BATCH} (shape is one image's), in a CUDA graph, median of {_ROUNDS} alternating rounds, warm."
            if on_gpu
            else f"One image, eager calls by the wall clock, median of {_ROUNDS} alternating rounds, threads: "
            f"{torch.get_num_threads()}. Other work on the machine shows."
        )
        sections.append(
            (
                "Time of one call, microseconds",
                f"What float attention (PyTorch's, SDPA) and integer attention take here; less is faster. '{kind} in' "
                f"quantises inside the clock; 'int8 in' gets tensors quantised before, and returns int8. {how}",
                ["", "shape", f"SDPA {kind}", f"QFlash {kind} in", "SDPA ÷ that", "QFlash int8 in", "SDPA ÷ that"],
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
    ceiling = [row["ceiling"][col.SQNR_DB] for row in workloads]
    axes.plot(places, ceiling, "_", color=page.INK, markersize=26, label="ceiling of int8 inputs")
    for shift, recipe in zip((-0.2, 0.0, 0.2), RECIPES, strict=True):
        values = [row["recipes"][recipe][col.SQNR_DB] for row in workloads]
        axes.plot([p + shift for p in places], values, "o", color=colour_of(f"qflash-{recipe}"), label=recipe)
    reported = [(p, row[col.PAPER_SQNR_DB]) for p, row in enumerate(workloads) if row[col.PAPER_SQNR_DB] is not None]
    axes.plot(*zip(*reported, strict=True), "x", color=colour_of("qflash-paper"), markersize=9, label="reported in the paper")
    axes.set_xticks(list(places), [row["name"] for row in workloads])
    axes.set_ylabel("SQNR, dB")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=page.INK, alpha=0.15)
    figure.legend(loc="outside upper center", ncols=3, frameon=False)
    return figure


def _picture(values: Sequence[Sequence[float]], title: str) -> str:
    """Return numbers of 0 and more as a square picture in shades of the page's ink, as SVG."""
    most = max(max(row) for row in values) or 1.0
    shades: dict[int, list[str]] = {}
    for y, row in enumerate(values):
        for x, value in enumerate(row):
            if shade := round(_GREYS * min(max(value / most, 0.0), 1.0)):
                shades.setdefault(shade, []).append(f"M{x} {y}h1v1h-1z")
    paths = []
    for shade, cells in shades.items():
        paths.append(f'<path d="{"".join(cells)}" fill="currentColor" fill-opacity="{shade / _GREYS:.2f}"/>')
    view, said = f"0 0 {len(values)} {len(values)}", html.escape(title)
    return f'<svg viewBox="{view}" role="img" shape-rendering="crispEdges"><title>{said}</title>{"".join(paths)}</svg>'


def _cards(shown: Sequence[dict[str, Any]]) -> str:
    """Return the images with labels, predictions and maps."""
    cards = []
    for item in shown:
        label, in_float, in_integers = (CLASSES["fashion"][item[key]] for key in ("label", "float", "integer"))
        pictures = _picture(item["image"], label)
        pictures += _picture(item["float_map"], "attention in floating point") + _picture(item["integer_map"], "in integers")
        whole = CLASSES["fashion"][item["network"]]
        said = f"<b>{label}</b>: float says {in_float}, integer attention {in_integers}, integer network {whole}; maps "
        said += f"{_number(item['map_sqnr_db'], 1)} dB"
        cards.append(f'<figure><div class="maps">{pictures}</div><figcaption>{said}</figcaption></figure>')
    return f'<div class="cards" style="--card: 14rem">{"".join(cards)}</div>'


def _different_cards(differ: Sequence[dict[str, Any]]) -> str:
    """Return images with what each of the three says; a right name is bold."""
    cards, names = [], CLASSES["fashion"]
    for item in differ:
        label, first = names[item["label"]], names[item["says"][0]]
        said = [
            f"{run}: {f'<b>{label}</b>' if place == item['label'] else names[place]}, {first} {chance:.1f} %"
            for run, place, chance in zip(RUNS, item["says"], item["percent"], strict=True)
        ]
        caption = f"{label}<br>{'<br>'.join(said)}"
        cards.append(f"<figure>{_picture(item['image'], label)}<figcaption>{caption}</figcaption></figure>")
    return f'<div class="cards" style="--card: min(13rem, 44%)">{"".join(cards)}</div>'


def _noise_cards(image: Sequence[Sequence[float]]) -> str:
    """Return one image with noise of several SQNRs, so that a reader sees what a number of decibels is."""
    clean = torch.tensor(image, dtype=torch.float32, device="cpu")
    noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu")
    cards = []
    for decibels in NOISES_DB:
        level = float(clean.norm() / noise.norm()) * 10.0 ** (-decibels / 20)
        noisy = (clean + level * noise).clamp(min=0)
        error = 100 * 10 ** (-decibels / 20)
        picture = _picture(noisy.tolist(), f"the first image with noise, {decibels} dB")
        cards.append(f"<figure>{picture}<figcaption><b>{decibels} dB</b>: error {error:.2g} %</figcaption></figure>")
    return f'<div class="cards">{"".join(cards)}</div>'


def _html(report: dict[str, Any]) -> str:
    """Render the report as one HTML page that loads nothing."""
    versions = f"qflash {report['qflash']}, PyTorch {report['torch']}, {report['seconds']:.0f} s."
    first, *others = _sections(report)
    parts = [
        "<p>Two small classifiers of clothes (Fashion-MNIST, Copyright 2017 Zalando SE, MIT licence), run in floating point; "
        "with QFlash's attention, whose matrix products and softmax are integers; and as networks that are integers from "
        "pixels to logits.</p>",
        f"<p>{html.escape(_where(report['device']))}</p>",
        f'<p class="note">{html.escape(versions)}</p>',
        page.heading(*first[:2]),
        page.table(*first[2:]),
        page.heading(
            "A dozen images",
            "Each image with the class token's attention in the ViT's last block (stronger: looked at more; mean of heads), "
            "in floating point, then in integers with the default recipe; what the two models say; and the maps' SQNR.",
        ),
        _cards(report["shown"]),
        page.heading(
            "What a number of decibels looks like",
            "SQNR compares the size of a result with the size of its error. The first image with noise of that size: at 5 dB a "
            "guess, at 25 dB a grainy picture, at 35 dB, where integer attention is, hardly to be told from 45 dB.",
        ),
        _noise_cards(report["shown"][0]["image"]),
    ]
    for name, model in report["models"].items():
        said = f"{model['different']} of {report['images']} test images are named differently by one of the three. These "
        said += f"{len(model['differ'])} differ most. Each says a class, bold if right, and how probable the float model's is."
        parts.append(page.heading(f"{name}: where they differ", said))
        parts.append(_different_cards(model["differ"]))
    for title, note, header, rows in others:
        parts.append(page.heading(title, note))
        if title.startswith("Table 1 workloads: SQNR"):
            parts.append(page.plot(lambda: _plot(report["workloads"])))
        parts.append(page.table(header, rows))
    return page.document("QFlash report", [*parts[:3], page.contents(parts), *parts[3:]])


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
        limit: test images per model; if None all 500 that come with the package on a CUDA device and :data:`CPU_IMAGES`
            elsewhere.
        device: where to run; a CUDA device if there is one, else the CPU.
        console: where to print; standard output if None.

    Returns:
        what ``demo.json`` holds: versions, device, models, workloads. Numbers that are not finite are None.

    Raises:
        ImportError: timm or matplotlib is not installed.
        ValueError: ``limit`` is not positive.
    """
    require_packages("the demo", "timm", "matplotlib")
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1 image, got {limit}")
    from qflash import __version__

    start = time.monotonic()
    console = console or Console()
    target = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    split = load_images(MODELS[NETWORKS[0]].dataset)
    if limit is None:
        limit = len(split.labels) if target.type == "cuda" else CPU_IMAGES
    images, labels = split.images[:limit].to(target), split.labels[:limit].to(target)
    described = _describe(target)
    console.print(_where(described), highlight=False)
    report: dict[str, Any] = {
        "qflash": __version__,
        "torch": torch.__version__,
        "device": described,
        "images": len(labels),
        "shipped": len(split.labels),
        "models": {},
        "workloads": [],
    }
    columns = (TextColumn("{task.description:18}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("models", total=len(NETWORKS) * (2 + len(RECIPES)) + len(WORKLOADS))

        def tick(done: str) -> None:
            progress.update(task, advance=1, description=done)

        networks = {}
        for name in NETWORKS:
            networks[name] = WHOLE_NETWORKS[0].build(load_model(name).to(target))
            report["models"][name] = _measure_model(name, networks[name], images, labels, tick)
        report["shown"] = _show_images(networks[NETWORKS[0]], images, labels, target)
        for workload in WORKLOADS:
            report["workloads"].append(_measure_workload(workload, target))
            tick(f"workload {workload.name}")
    report["seconds"] = time.monotonic() - start
    report = _finite(report)
    for title, note, header, rows in _sections(report):
        table = Table(title=title, caption=note, title_justify="left", caption_justify="left")
        for index, column in enumerate(header):
            table.add_column(column, justify="left" if index < 2 else "right", no_wrap=index < 2)
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
