"""What the commands ``qflash convert``, ``coverage``, ``predict`` and ``time`` do; :mod:`.cli` has their arguments."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import time
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table

from .integrations.hub import FloatModel, load_float_model
from .integrations.images import ImageTransform, image_transform
from .integrations.inspection import coverage as attention_coverage
from .integrations.patching import patch
from .network.checks import WARN_DB
from .network.compare import compare
from .network.coverage import network_coverage
from .network.graph import IntegerNetwork
from .network.mixed_sizes import run_mixed
from .network.quality import sqnr_db
from .network.quantize import Normalise, quantize_model
from .network.sizes import shown
from .network.storage import load_model
from .optional_packages import require_packages
from .paths import write_whole

_BATCH = 16
_COMPARED = 4
"""Images on which each residual branch is computed in floating point, once for each branch."""
Row = dict[str, Any]


def parse_size(text: str | None) -> tuple[int, int] | None:
    """Return (height, width) of ``"224"`` or ``"224x448"``.

    Raises:
        ValueError: it is something else.
    """
    if text is None:
        return None
    numbers = text.lower().split("x")
    if len(numbers) > 2 or not all(each.isdecimal() and int(each) for each in numbers):
        raise ValueError(f"size must be pixels, as 224, or height x width, as 224x448, got {text!r}")
    return int(numbers[0]), int(numbers[-1])


def find_device(name: str) -> torch.device:
    """Return a device by name; ``"auto"`` is an NVIDIA GPU if there is one, else the CPU.

    Raises:
        ValueError: there is no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, dtype=torch.uint8, device=name)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device must be auto, cpu or cuda, got {name!r}: {str(error).splitlines()[0]}") from error
    return torch.device(name)


class Images:
    """Images of a folder, or of a ``.npy`` file, in an order of chance that is always the same.

    Of several sizes an image gets the one whose sides are most like its own in proportion, the first of equal ones.

    Attributes:
        names: of the images: paths in the folder, or numbers.
    """

    def __init__(self, path: Path, transform: ImageTransform, *others: ImageTransform, shuffled: bool = False) -> None:
        """Look for them.

        Args:
            path: folder or file.
            transform, others: of one size each.
            shuffled: whether the order is one of chance.

        Raises:
            ValueError: there are no images, or the file holds something else.
            OSError: it cannot be read.
        """
        require_packages("images", "PIL", "torchvision")
        self._transforms = transform, *others
        self._pixels: Any = None
        if path.is_dir():
            from PIL import Image

            kinds = Image.registered_extensions()
            self._files = sorted(each for each in path.rglob("*") if each.suffix.lower() in kinds and each.is_file())
            self.names = [each.relative_to(path).as_posix() for each in self._files]
        elif path.suffix == ".npy":
            import numpy as np

            try:
                self._pixels = np.load(path, mmap_mode="r", allow_pickle=False)
                if not isinstance(self._pixels, np.ndarray):
                    raise ValueError("it holds several arrays")
            except (ValueError, EOFError, zipfile.BadZipFile) as error:
                raise ValueError(f"{path} is no array that numpy.save wrote") from error
            shape, channels = self._pixels.shape, transform.size[0]
            if self._pixels.dtype != np.uint8 or len(shape) != 4 or channels not in (shape[1], shape[3]):
                raise ValueError(
                    f"{path} must be uint8 (images, {channels}, height, width) or (images, height, width, {channels}), is "
                    f"{self._pixels.dtype} {shape}"
                )
            self.names = [str(number) for number in range(len(self._pixels))]
        else:
            raise ValueError(f"IMAGES must be a folder of images or a .npy file, got {path}")
        if not self.names:
            raise ValueError(f"{path} holds no images of a format that PIL reads")
        chance = torch.Generator().manual_seed(0)
        self.order = (
            torch.randperm(len(self), generator=chance, dtype=torch.int64, device="cpu").tolist()
            if shuffled
            else list(range(len(self)))
        )

    def __len__(self) -> int:
        return len(self.names)

    def _prepare(self, image: Any) -> torch.Tensor:
        """Return what the transform of the fitting size makes of a PIL image."""
        # whole numbers before the one division, so that equal proportions are equal
        proportions = [x.size[1] * image.width / (x.size[2] * image.height) for x in self._transforms]
        return self._transforms[min(range(len(proportions)), key=lambda n: abs(math.log(proportions[n])))](image)

    def _load(self, number: int) -> torch.Tensor:
        from PIL import Image, ImageOps

        if self._pixels is None:
            file = self._files[number]
            try:
                with Image.open(file) as image:
                    # a camera may have been held on its side
                    upright = ImageOps.exif_transpose(image)
            except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
                raise ValueError(f"{file} is no image that PIL reads: {error}") from error
            try:
                return self._prepare(upright)
            except ValueError as error:
                raise ValueError(f"{file}: {error}") from error
        import numpy as np

        pixels, sizes = np.array(self._pixels[number]), [x.size for x in self._transforms]
        if pixels.shape in sizes:
            return torch.from_numpy(pixels)
        if pixels.shape[0] == sizes[0][0]:
            pixels = pixels.transpose(1, 2, 0)
        if (pixels.shape[2], *pixels.shape[:2]) in sizes:
            return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()
        return self._prepare(Image.fromarray(pixels.squeeze()))

    def groups(self, first: int = 0, last: int | None = None) -> Iterator[list[torch.Tensor]]:
        """Yield lists of uint8 (channels, height, width) of images by their place in :attr:`order`."""
        numbers = self.order[first:last]
        for start in range(0, len(numbers), _BATCH):
            yield [self._load(number) for number in numbers[start : start + _BATCH]]

    def batches(self, first: int = 0, last: int | None = None) -> Iterator[torch.Tensor]:
        """Yield the same of one size as uint8 (batch, channels, height, width)."""
        return map(torch.stack, self.groups(first, last))


def _show(console: Console, title: str, rows: Sequence[Row]) -> None:
    """Print a table."""
    table = Table(box=SIMPLE_HEAD)
    for number, heading in enumerate(rows[0]):
        table.add_column(heading, overflow="fold", justify="left" if number == 0 else "right")
    for row in rows:
        table.add_row(*(str(cell) for cell in row.values()))
    _say(console, title)
    console.print(table)


def _say(console: Console, text: str) -> None:
    """Print a whole line as it is; a terminal breaks it."""
    console.print(text, soft_wrap=True, highlight=False, markup=False)


def _megabytes(path: Path) -> float:
    return round(path.stat().st_size / 1e6, 3)


def load_float(name: str, size: str | None, random_weights: bool, device: str) -> FloatModel:
    """Return a float model on a device; see :func:`.integrations.hub.load_float_model`.

    Args:
        name, random_weights: see there.
        size: see :func:`parse_size`.
        device: see :func:`find_device`.
    """
    where = find_device(device)
    found = load_float_model(name, random_weights=random_weights, size=parse_size(size))
    found.model.to(where)
    return found


def check_files(output: Path, exports: Mapping[str, Path]) -> None:
    """Require what writing takes, before anything is computed; arguments as of :func:`convert`.

    Raises:
        ImportError: a package is missing.
        ValueError: a folder is missing.
    """
    for kind, package in (("onnx", "onnx"), ("tosa", "tosa_serializer")):
        if kind in exports:
            require_packages(f"--{kind}", package)
    for path in (output, *exports.values()):
        if not path.parent.is_dir():
            raise ValueError(f"there is no folder {path.parent} to write {path.name} to")


def convert(
    found: FloatModel, folder: Path, output: Path, exports: Mapping[str, Path], *, outputs: str | None,
    counts: tuple[int, int], options: Mapping[str, Any], console: Console,
) -> Row:  # fmt: skip
    """Quantise a model, write it, and compare it with the float one, at the first size.

    Args:
        found: the model.
        folder: the images.
        output: the file.
        exports: files by ``"onnx"`` and ``"tosa"``.
        outputs: names between commas, see :func:`qflash.quantize_model`.
        counts: images of calibration, and others that are compared.
        options: of :func:`qflash.quantize_model`.
        console: where to print.

    Returns:
        What was printed, as JSON can hold it.
    """
    if sizes := options.get("sizes"):
        found = dataclasses.replace(found, transform=image_transform(found.images, sizes[0]))
    model, transform = found.model, found.transform
    images = Images(folder, transform, shuffled=True)
    calibrated = min(counts[0], len(images))
    statistics: dict[str, Any] = {"mean": transform.mean, "std": transform.std}
    seconds = time.perf_counter()
    network = quantize_model(
        model, images.batches(0, calibrated), outputs=None if outputs is None else outputs.split(","), min_sqnr=None,
        **statistics, **options,
    )  # fmt: skip
    seconds = time.perf_counter() - seconds
    network.about = {"name": found.name, "labels": list(found.labels), "images": found.images}
    network.save(output)
    files = {str(output): _megabytes(output)}
    for kind, path in exports.items():
        getattr(network, f"export_{kind}")(path)
        files[str(path)] = _megabytes(path)
    held_out = len(images) > calibrated
    first, last = (calibrated, calibrated + counts[1]) if held_out else (0, counts[1])
    report: Row = {
        "model": found.name, "image": list(network.image), "files_mb": files,
        "float_weights_mb": round(4 * sum(x.numel() for x in model.parameters()) / 1e6, 3), "calibration_images": calibrated,
        "conversion_s": round(seconds, 1), "saturated_percent": 0.0 if network.quality is None
        else round(100 * network.quality.saturated_share, 4), "compared_images": min(last, len(images)) - first,
        "held_out": held_out, "float_parts": network.float_parts(),
        "further_sizes": {shown(x.image[1:]): None if x.quality is None else str(x.quality) for x in network.other_sizes()},
        **_compared(network, found, list(images.batches(first, last))),
    }  # fmt: skip
    few = next(images.batches(first, first + _COMPARED)).to(next(model.parameters()).device)
    comparison = compare(network, model, few, **statistics, progress=options.get("progress", True))
    worst = sorted(comparison.contributions.items(), key=lambda each: -each[1])[:3]
    report["worst_parts_db"] = {part: round(gain, 2) for part, gain in worst}
    _print_conversion(report, console)
    return report


def _compared(network: IntegerNetwork, found: FloatModel, batches: Sequence[torch.Tensor]) -> Row:
    """Return SQNR and agreement of each output, and the time of an image in both networks."""
    where = next(found.model.parameters()).device
    normalise = Normalise(found.transform.mean, found.transform.std, where)
    captured = network.lowering.captured
    selected = captured.select(found.model)
    found_of: dict[str, list[dict[str, torch.Tensor]]] = {"float": [], "integer": []}
    spent = dict.fromkeys(found_of, 0.0)
    with torch.inference_mode():
        for batch in track(batches, "comparing", transient=True, console=Console(stderr=True)):
            for kind, outs in found_of.items():
                start = time.perf_counter()
                pixels = batch.to(where)
                made = captured.pick(selected(normalise(pixels))) if kind == "float" else network.run(pixels)
                outs.append({label: out.cpu() for label, out in made.items()})
                spent[kind] += time.perf_counter() - start
    count = sum(map(len, batches))
    rows: dict[str, Row] = {}
    for label in network.outputs:
        want = torch.cat([each[label] for each in found_of["float"]]).float()
        got = torch.cat([each[label] for each in found_of["integer"]]).float() * network.scales[label]
        rows[label] = {"shape": list(got.shape[1:]), "sqnr_db": round(sqnr_db(want, got), 2)}
        if want.dim() == 2 and want.shape[1] > 1:
            rows[label]["agreement_percent"] = round(100 * float((want.argmax(1) == got.argmax(1)).double().mean()), 2)
            rows[label]["least_cosine"] = round(float(torch.cosine_similarity(want, got).min()), 4)
    return {"outputs": rows, "milliseconds_an_image": {kind: round(1000 * x / count, 2) for kind, x in spent.items()}}


def _print_conversion(report: Row, console: Console) -> None:
    """Print what :func:`convert` found."""
    which = "that calibration did not see" if report["held_out"] else "of calibration, for lack of others"
    rows = [
        {
            "output": label, "shape of an image": "x".join(map(str, row["shape"])), "SQNR, dB": row["sqnr_db"],
            "same largest, %": row.get("agreement_percent", "-"), "least cosine": row.get("least_cosine", "-"),
        }
        for label, row in report["outputs"].items()
    ]  # fmt: skip
    _show(console, f"{report['model']}: integers against float32, {report['compared_images']} images {which}", rows)
    times, gains = report["milliseconds_an_image"], report["worst_parts_db"]
    lines = [
        f"converted in {report['conversion_s']} s on {report['calibration_images']} images",
        f"saturated: {report['saturated_percent']} % of int8 activations",
        f"float32 weights: {report['float_weights_mb']} MB",
        *(f"{path}: {size} MB" for path, size in report["files_mb"].items()),
        f"time of an image, one run in batches of up to {_BATCH}: float {times['float']} ms, integers {times['integer']} ms",
        f"worst parts (gain in dB with one in floating point): {', '.join(f'{part} {gain}' for part, gain in gains.items())}",
        *(f"{size} pixels: {quality}" for size, quality in report["further_sizes"].items()),
        "in floating point: " + ", ".join(report["float_parts"]) if report["float_parts"] else "",
    ]
    for line in filter(None, lines):
        _say(console, line)


def coverage(found: FloatModel, outputs: str | None, console: Console, *, compute: bool = True) -> Row:
    """Say what of a model becomes integers; see :func:`.network.coverage.network_coverage`.

    Args:
        found: the model.
        outputs: names between commas.
        console: where to print.
        compute: whether the integer network is made on drawn images, and compared with the model.

    Returns:
        What was printed, as JSON can hold it.
    """
    name = found.name
    transform = found.transform
    covered = network_coverage(
        found.model, transform.size, None if outputs is None else outputs.split(","),
        statistics=(transform.mean, transform.std) if compute else None, progress=not console.quiet,
    )  # fmt: skip
    quality = covered.quality
    report: Row = {
        "model": name, "image": list(transform.size), "integers": not covered.refusals, "nodes": covered.nodes,
        "outputs": {label: list(shape) for label, shape in covered.outputs.items()}, "refused": covered.reasons,
        "captured_db": None if covered.captured_db is None else round(covered.captured_db, 1),
        "sqnr_db": None if quality is None else round(quality.sqnr_db, 2),
    }  # fmt: skip
    if not covered.refusals:
        _show(console, f"{name}: all integers", [{"operator": kind, "nodes": count} for kind, count in covered.nodes.items()])
        for label, shape in covered.outputs.items():
            _say(console, f"output {label}: {'x'.join(map(str, shape))} an image")
        if quality is None:
            _say(console, "nothing was computed (--no-compute)")
        else:
            _say(console, f"captured operations, in floating point: {report['captured_db']} dB beside the model (equal)")
            low = f", less than {WARN_DB:g} dB" if quality.sqnr_db < WARN_DB else ""
            _say(console, f"integers, on {quality.images} drawn images: SQNR {report['sqnr_db']} dB{low}")
        _say(console, "`qflash convert` says how close they are on your images")
        return report
    _say(console, f"{name} does not become an integer network:")
    for reason, count in covered.reasons.items():
        _say(console, f"  {reason}{f' ({count} alike)' if count > 1 else ''}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the reasons that it names are printed here
        try:
            patch(found.model)
        except ValueError as error:
            report["attention"] = {"integer": 0, "float": 0}
            _say(console, f"with qflash.patch: {error}")
            return report
    layers = attention_coverage(found.model)
    report["attention"] = {"integer": len(layers.integer), "float": len(layers.floating)}
    _say(console, f"with qflash.patch: {len(layers.integer)} of {len(layers)} attention layers in integers")
    for layer in {layer.remark: layer for layer in layers.floating}.values():
        _say(console, f"  {layer.name}: {layer.remark}")
    return report


def _labels(path: Path | None, network: IntegerNetwork) -> list[str]:
    """Return names of classes: of a file (JSON list or id2label dictionary, or one a line), else the network's."""
    if path is None:
        return list(network.about.get("labels", []))
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix != ".json":
            return text.splitlines()
        found = json.loads(text)
        found = found.get("id2label", found) if isinstance(found, dict) else found
        return [str(found[key]) for key in sorted(found, key=int)] if isinstance(found, dict) else [str(x) for x in found]
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"--labels must be text with a class a line, or JSON: a list, or classes by number, is {path}: {error}"
        ) from error


def predict(
    file: Path, folder: Path, *, labels: Path | None, output: Path | None, top: int, device: str, console: Console,
    size: str | None = None,
) -> list[Row]:  # fmt: skip
    """Print the likeliest classes of each image, or write all outputs.

    Args:
        file: the network.
        folder: images; of a network with several sizes each gets the one that fits, see :class:`Images`.
        labels: names of classes, in place of the file's.
        output: ``.npy`` for one output, or ``.npz`` for several, float32; then nothing is printed.
        top: classes that are printed.
        device: see :func:`find_device`.
        console: where to print.
        size: one of the network's for all images, see :func:`parse_size`.

    Returns:
        What was printed: for each image its name and (class, probability) of each.
    """
    import numpy as np

    network = load_model(file).to(where := find_device(device))
    network = network if size is None else network.at(parse_size(size) or ())
    names = _labels(labels, network)
    images = Images(folder, *_transforms_of(network))
    if output is not None and output.suffix != (wanted := ".npy" if len(network.outputs) == 1 else ".npz"):
        raise ValueError(f"--output must end in {wanted} for outputs {', '.join(network.outputs)}, got {output}")
    logits = "logits" if "logits" in network.outputs else next(iter(network.outputs))
    rank = len(network.shapes()[network.outputs[logits]])
    if output is None and (rank != 2 or (len(network.outputs) > 1 and logits != "logits")):
        raise ValueError(f"outputs {', '.join(network.outputs)} are no classes; --output writes them")
    rows_of: dict[str, list[torch.Tensor]] = {label: [] for label in network.outputs}
    with torch.inference_mode():
        batches = -(-len(images) // _BATCH)
        for group in track(images.groups(), "predicting", batches, transient=True, console=Console(stderr=True)):
            for label, outs in run_mixed(network, [each.to(where) for each in group]).items():
                rows_of[label] += [out.cpu().float() * network.scales[label] for out in outs]
    if output is not None:
        for label, outs in rows_of.items():
            if len(shapes := sorted({tuple(out.shape) for out in outs})) > 1:
                raise ValueError(f"output {label} has the shapes {shapes}, since images got several sizes; --size chooses one")
        arrays = {label: torch.stack(outs).numpy() for label, outs in rows_of.items()}
        content = io.BytesIO()
        if len(arrays) == 1:
            np.save(content, next(iter(arrays.values())))
        else:
            np.savez(content, **arrays)  # type: ignore[arg-type]
        write_whole(output, content.getvalue())
        for label, array in arrays.items():
            _say(console, f"{output}: {label}, float32 {array.shape}")
        return []
    classes = torch.stack(rows_of[logits]).softmax(1)
    likely = classes.topk(min(top, classes.shape[1]))
    rows: list[Row] = []
    for name, values, places in zip(images.names, likely.values.tolist(), likely.indices.tolist(), strict=True):
        called = [names[place] if place < len(names) else f"class {place}" for place in places]
        rows.append({"image": name, "classes": list(zip(called, values, strict=True))})
        text = ", ".join(f"{label} {100 * value:.1f} %" for label, value in rows[-1]["classes"])
        _say(console, f"{name}: {text}")
    return rows


def _transforms_of(network: IntegerNetwork) -> list[ImageTransform]:
    """Return what prepares images for a network, for each of its sizes: as its file says, or for images that have them."""
    channels = network.image[0]
    source = network.about.get("images")
    if source and len(network.image_sizes) == 1 and image_transform(source).size == network.image:
        return [image_transform(source)]
    plain = {"input_size": network.image, "mean": (0.5,) * channels, "std": (0.5,) * channels, "crop_pct": 1.0}
    return [image_transform(source or plain, size) for size in network.image_sizes]


def measure(
    file: Path, *, batches: Sequence[int], device: str, threads: int | None, rounds: int, console: Console,
    size: str | None = None,
) -> Row:  # fmt: skip
    """Time a network; on a GPU it is replayed as a CUDA graph.

    Args:
        file: the network.
        batches: images a call.
        device: see :func:`find_device`.
        threads: of PyTorch on a CPU; None for what it takes.
        rounds: calls that are timed, behind three that are not.
        console: where to print.
        size: one of the network's, see :func:`parse_size`; the first if None.
    """
    network = load_model(file).to(where := find_device(device))
    network = network if size is None else network.at(parse_size(size) or ())
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    rows: list[Row] = []
    try:
        for batch in track(batches, "timing", transient=True, console=Console(stderr=True)):
            chance = torch.Generator().manual_seed(0)
            images = torch.randint(0, 256, (batch, *network.image), dtype=torch.uint8, device="cpu", generator=chance).to(where)
            with torch.inference_mode():
                times = sorted(_times(network, images, rounds))
            median = times[len(times) // 2]
            rows.append(
                {
                    "batch": batch, "median ms": round(1000 * median, 3), "least ms": round(1000 * times[0], 3),
                    "most ms": round(1000 * times[-1], 3), "images a second": round(batch / median, 1),
                }
            )  # fmt: skip
        how = f"{torch.get_num_threads()} threads of {os.cpu_count()} cores"
    finally:
        torch.set_num_threads(before)
    if where.type == "cuda":
        how = f"{torch.cuda.get_device_name(where)}, CUDA graphs"
    report = {"file": str(file), "device": how, "rounds": rounds, "rows": rows}
    _show(console, f"{file.name}: {how}, {rounds} calls each", rows)
    return report


def _times(network: IntegerNetwork, images: torch.Tensor, rounds: int) -> list[float]:
    """Return the seconds of calls."""
    run: Callable[[torch.Tensor], Any] = network
    if images.device.type == "cuda":
        run = network.graph(len(images))
    found = []
    for number in range(rounds + 3):
        _wait(images.device)
        start = time.perf_counter()
        run(images)
        _wait(images.device)
        if number >= 3:
            found.append(time.perf_counter() - start)
    return found


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
