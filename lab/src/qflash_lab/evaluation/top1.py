"""``qflash-lab evaluate``: Top-1 and Top-5 of image classifiers with any method in their attention (Table 5).

Only attention is quantised, dynamically, while everything else stays in floating point, as in the paper's Top-1
experiment; rows of whole integer networks can be added. A scale that is shared over a batch depends on which images
are in it, so the batches are fixed before any is computed: batch b holds the same images whatever the number of
processes, and whether or not a run was interrupted. Every image's outcome is kept, so that methods are compared on the
same images.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import hashlib
import math
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import nn

import qflash
from qflash.integrations.patching import patch, unpatch
from qflash.network.bit_operations import BitOperations, bit_operations
from qflash.network.quality import sqnr_db
from qflash.optional_packages import require_packages
from qflash.validation import resolve_device

from ..baselines import METHODS, get_method
from .classifiers import PAPER_MODELS, SHIPPED, Images, digest_weights, draw_subset, load_classifier
from .integer_rows import WHOLE_NETWORKS, Calibration, FolderClassifier, IntegerClassifier, WholeNetwork, pixels_of
from .outcome_store import LOSS_DIGITS, MOST_GUESSES, Outcome, Store
from .output import publish
from .small_models import MODELS, SmallClassifier
from .statistics import CONFIDENCE, RESAMPLES
from .summaries import REFERENCE, attention_products, compare_outcomes, integer_verdict, summarise

CALIBRATION_IMAGES = 64
"""That integer networks of image folders are calibrated on."""
SQNR_IMAGES = 64
"""Of those that are judged, on which an integer network's logits are compared with the float model's."""
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

# --- processes ----------------------------------------------------------------------------------------------


class _Processes:
    """This process among those ``torchrun`` has started; alone without it. Only small objects are exchanged."""

    def __init__(self) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.count = int(os.environ.get("WORLD_SIZE", "1"))
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self._started = False

    def __enter__(self) -> _Processes:
        if self.count > 1 and not torch.distributed.is_initialized():
            # gloo on a GPU too: no tensor crosses. A process may wait as long as the slowest one's share takes.
            torch.distributed.init_process_group("gloo", timeout=datetime.timedelta(days=1))
            self._started = True
        return self

    def __exit__(self, error: object, *_: object) -> None:
        if self._started:
            if error is None:
                # who leaves while another still talks to it can abort the other
                torch.distributed.barrier()
            torch.distributed.destroy_process_group()

    @property
    def first(self) -> bool:
        return self.rank == 0

    def gather(self, mine: Any) -> list[Any]:
        """Return every process's object, in the order of their ranks."""
        if self.count == 1:
            return [mine]
        everyone: list[Any] = [None] * self.count
        torch.distributed.all_gather_object(everyone, mine)
        return everyone

    def from_first(self, compute: Callable[[], Any]) -> Any:
        """Return what ``compute`` gives in the first process, or raise its error in all of them."""
        result: Any = None
        if self.first:
            try:
                result = compute()
            except Exception as error:
                result = error
        if self.count > 1:
            shared = [result]
            torch.distributed.broadcast_object_list(shared)
            result = shared[0]
        if isinstance(result, Exception):
            raise result
        return result


# --- one method on one model --------------------------------------------------------------------------------


def _batches(places: Sequence[int], size: int) -> list[list[int]]:
    return [list(places[start : start + size]) for start in range(0, len(places), size)]


@torch.inference_mode()
def _classify(
    model: nn.Module, images: Images, batches: Sequence[list[int]], device: torch.device, dtype: torch.dtype, workers: int
) -> Iterator[list[Outcome]]:
    """Yield the outcomes of each batch of places in ``images``."""
    loader = torch.utils.data.DataLoader(
        images.dataset, batch_sampler=batches, num_workers=workers, pin_memory=device.type == "cuda"
    )
    for places, (inputs, _) in zip(batches, loader, strict=True):
        logits = model(inputs.to(device=device, dtype=dtype, non_blocking=True)).float()
        finite = logits.isfinite().all(1).tolist()
        best = logits.topk(min(MOST_GUESSES, logits.shape[1]), dim=1).indices.tolist()
        labels = torch.tensor([int(images.labels[place]) for place in places], dtype=torch.int64, device=device)
        exact = torch.nn.functional.cross_entropy(logits.double(), labels, reduction="none").tolist()
        losses = [float(f"{loss:.{LOSS_DIGITS}g}") if fine else math.nan for loss, fine in zip(exact, finite, strict=True)]
        yield [
            Outcome(place, images.ids[place], int(images.labels[place]), tuple(best[row]) if finite[row] else (), losses[row])
            for row, place in enumerate(places)
        ]


@contextlib.contextmanager
def _attending(model: nn.Module, method: Any, networks: Mapping[str, nn.Module]) -> Iterator[nn.Module]:
    """Put ``method`` into the model's attention for the length of a ``with`` block, or yield the row's network."""
    if method.name in networks:
        yield networks[method.name]
        return
    try:
        yield patch(model, attention=method.attention)
    finally:
        unpatch(model)


# --- a whole run --------------------------------------------------------------------------------------------


@functools.cache
def _source_digest() -> str:
    """Return the SHA-256 of both packages' sources: another method may be behind the same name tomorrow."""
    digest = hashlib.sha256()
    for root in (Path(qflash.__file__).parent, Path(__file__).parents[1]):
        for path in sorted(root.rglob("*.py")):
            digest.update(path.relative_to(root.parent).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU" if device.type == "cpu" else device.type


def _folder_name(model: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "_", model)


def _resolve_methods(names: Sequence[str]) -> list[Any]:
    """Return the methods asked for, the reference first, each once."""
    wanted = list(METHODS) if "all" in names else list(names)
    return [get_method(name) for name in dict.fromkeys([REFERENCE, *wanted])]


def _check_integer(models: Sequence[str], data: str | Path, dtype: str, calibration: int) -> None:
    """Require what integer networks of image folders need."""
    others = [name for name in models if name not in MODELS]
    if others and str(data) == SHIPPED:
        raise ValueError(
            f"data must be a folder or a list of images for integer networks of {', '.join(others)}: only "
            f"{', '.join(MODELS)} come with images to calibrate on"
        )
    if calibration < 2:
        raise ValueError(f"calibration must be at least 2 images, got {calibration}")
    if dtype == "bfloat16" and others:
        raise ValueError("dtype must be float32 or float16 with integer networks of image folders: pixels do not fit bfloat16")


def _divided(images: Images, settings: _Settings) -> tuple[list[int], list[int]]:
    """Return the places of images to judge and to calibrate on, which are others.

    Raises:
        ValueError: there are too few images.
    """
    count = len(images.labels)
    if settings.calibration >= count:
        raise ValueError(f"data must hold more than the {settings.calibration} images to calibrate on, got {count}")
    taken = draw_subset(images.labels, settings.calibration, settings.seed)
    rest = sorted(set(range(count)) - set(taken))
    chosen = draw_subset([images.labels[place] for place in rest], settings.subset, settings.seed)
    return [rest[place] for place in chosen], taken


def _calibration(images: Images, places: Sequence[int]) -> Calibration:
    """Return the images at some places as pixels."""
    config = images.identity["preprocessing"]
    inputs = torch.stack([images.dataset[place][0] for place in places])
    return Calibration(pixels_of(inputs, config["mean"], config["std"]), config["mean"], config["std"])


def _quantised(
    row: WholeNetwork, model: nn.Module, images: Images, places: Sequence[int], processes: _Processes, settings: _Settings
) -> IntegerClassifier | FolderClassifier:
    """Return an integer network, calibrated on the images at some places or, of small models, on those of the package.

    The first process calibrates. The others get its file: float layers may round differently on their devices, and ranges
    that differ would be other networks.
    """

    def build() -> IntegerClassifier | FolderClassifier:
        return row.build(model) if isinstance(model, SmallClassifier) else row.build_of(model, _calibration(images, places))

    def content() -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            build().network.save(path := Path(folder) / "network.safetensors")
            return path.read_bytes()

    if processes.count == 1:
        return build()
    with tempfile.TemporaryDirectory() as folder:
        (path := Path(folder) / "network.safetensors").write_bytes(processes.from_first(content))
        network = qflash.load_model(path, settings.device)
    if isinstance(model, SmallClassifier):
        return IntegerClassifier(model, network)
    config = images.identity["preprocessing"]
    return FolderClassifier(network, config["mean"], config["std"])


@torch.inference_mode()
def _logits_db(model: nn.Module, network: nn.Module, images: Images, places: Sequence[int], settings: _Settings) -> float:
    """Return the SQNR in dB of a network's logits against the model's, on the images at some places."""
    exact, got = [], []
    for batch in _batches(places, settings.batch):
        inputs = torch.stack([images.dataset[place][0] for place in batch])
        inputs = inputs.to(device=settings.device, dtype=DTYPES[settings.dtype])
        exact.append(model(inputs).float())
        got.append(network(inputs))
    return sqnr_db(torch.cat(exact), torch.cat(got))


def _resolve_models(names: Sequence[str]) -> list[str]:
    wanted = [each for name in names for each in (PAPER_MODELS if name == "all" else (name,))]
    if not wanted:
        raise ValueError("model must name at least one model, got none")
    return list(dict.fromkeys(wanted))


def _require(models: Sequence[str]) -> None:
    digits = ["sklearn"] if any(name in MODELS and MODELS[name].dataset == "digits" for name in models) else []
    require_packages("evaluation", "timm", "matplotlib", *digits)


@dataclasses.dataclass(frozen=True)
class _Settings:
    """What all models of a run share."""

    data: str
    output: Path
    pretrained: bool
    weights: Path | None
    batch: int
    workers: int
    subset: int | None
    seed: int
    device: torch.device
    dtype: str
    overwrite: bool
    calibration: int


def _add_network_bops(summaries: Sequence[dict[str, Any]], counted: Mapping[str, BitOperations]) -> None:
    """Say in the rows of integer networks, and in the reference's, how many bit operations the whole network has."""
    for summary in summaries:
        if summary["method"] in counted:
            summary["network_gbops"] = counted[summary["method"]].integer
        elif summary["method"] == REFERENCE and counted:
            summary["network_gbops"] = next(iter(counted.values())).floating()


def _evaluate_model(
    name: str, methods: Sequence[Any], settings: _Settings, processes: _Processes, progress: Progress
) -> dict[str, Any]:
    """Evaluate one model with every method; all processes return the same."""
    model, images = load_classifier(name, settings.data, pretrained=settings.pretrained, weights=settings.weights)
    dtype = DTYPES[settings.dtype]
    whole = [method for method in methods if isinstance(method, WholeNetwork)]
    divided = bool(whole) and name not in MODELS
    if divided:
        places, calibration_places = _divided(images, settings)
    else:
        places, calibration_places = draw_subset(images.labels, settings.subset, settings.seed), []
    fingerprint = {
        "model": name,
        "weights": digest_weights(model),
        "data": images.identity,
        "subset": settings.subset,
        "seed": settings.seed,
        "batch": settings.batch,
        "dtype": settings.dtype,
        "device": _device_name(settings.device),
        "torch": torch.__version__,
        "source": _source_digest(),
        **({"calibration_images": len(calibration_places)} if divided else {}),
    }
    if any(other != fingerprint for other in processes.gather(fingerprint)):
        raise ValueError(
            f"the processes do not agree on the run of {name}: data, weights, device and versions must be the same"
        )
    known = (*METHODS, *(row.name for row in WHOLE_NETWORKS))
    store = Store(settings.output / _folder_name(name), min(MOST_GUESSES, images.classes), known)
    processes.from_first(lambda: store.open(fingerprint, settings.overwrite))
    # images of small models are in memory already
    workers = 0 if name in MODELS else settings.workers
    products = attention_products(model, images.dataset[0][0].shape)
    model.to(device=settings.device, dtype=dtype)
    batches = _batches(places, settings.batch)
    networks = {row.name: _quantised(row, model, images, calibration_places, processes, settings) for row in whole}

    def finished_batches(method: str) -> list[Outcome]:
        kept = store.load(method)
        have = {outcome.index for outcome in kept}
        whole = {place for batch in batches if have.issuperset(batch) for place in batch}
        kept = [outcome for outcome in kept if outcome.index in whole]
        if len(kept) < len(places):
            store.consolidate(method, kept, finished=False)
        return kept

    outcomes: dict[str, list[Outcome]] = {}
    for method in methods:
        kept: list[Outcome] = processes.from_first(functools.partial(finished_batches, method.name))
        have = {outcome.index for outcome in kept}
        pending = [batch for batch in batches if batch[0] not in have]
        if pending:
            mine = pending[processes.rank :: processes.count]
            task = progress.add_task(f"{name}: {method.name}", total=sum(map(len, mine)))
            new: list[Outcome] = []
            with store.appender(method.name, processes.rank) as file, _attending(model, method, networks) as changed:
                for done in _classify(changed, images, mine, settings.device, dtype, workers):
                    file.add(done)
                    new += done
                    progress.advance(task, len(done))
            progress.remove_task(task)
            kept = [*kept, *(outcome for share in processes.gather(new) for outcome in share)]
        kept = sorted(kept, key=lambda outcome: outcome.index)
        if [outcome.index for outcome in kept] != places:
            raise RuntimeError(f"{name}, {method.name}: {len(kept)} outcomes for {len(places)} images")
        if pending:
            processes.from_first(functools.partial(store.consolidate, method.name, kept, finished=True))
        outcomes[method.name] = kept

    exact = outcomes[REFERENCE]
    summaries = [summarise(method, outcomes[method.name], exact, products, settings.seed) for method in methods]
    counted = {name: bit_operations(network.network) for name, network in networks.items()}
    _add_network_bops(summaries, counted)
    for summary in summaries if divided else ():
        if summary["method"] in networks:
            few = places[:SQNR_IMAGES]
            db = _logits_db(model, networks[summary["method"]], images, few, settings)
            summary |= {"logits_sqnr_db": db, "sqnr_images": len(few), "calibration_images": len(calibration_places)}
    names = [method.name for method in methods]
    pairs = {
        (a, b): compare_outcomes(outcomes[a], outcomes[b], settings.seed) for i, a in enumerate(names) for b in names[i + 1 :]
    }
    return {
        "model": name,
        "run": fingerprint,
        "images": len(places),
        "attention_calls": len(products),
        "methods": summaries,
        # of attention methods: a whole network has other errors
        "integer_only": integer_verdict([each for each in summaries if each["method"] not in networks], pairs),
        "pairs": [{"first": a, "second": b, **pair} for (a, b), pair in pairs.items()],
    }


def run_evaluate(
    models: Sequence[str],
    methods: Sequence[str] = ("all",),
    *,
    data: str | Path = SHIPPED,
    output: Path | str = Path("qflash-evaluate"),
    pretrained: bool = False,
    weights: Path | str | None = None,
    batch: int = 64,
    workers: int = 4,
    subset: int | None = None,
    seed: int = 0,
    device: str | None = None,
    dtype: str = "float32",
    overwrite: bool = False,
    integer: bool = False,
    calibration: int = CALIBRATION_IMAGES,
    console: Console | None = None,
) -> dict[str, Any]:
    """Measure Top-1 and Top-5, print a table and write ``evaluate.json``, ``evaluate.csv`` and ``evaluate.svg``.

    Under ``torchrun`` the batches are shared out among the processes; every process returns the same, the first one
    prints and writes. A run that was interrupted is taken up where it stopped when it is called again.

    Args:
        models: short names of Table 5, names of timm, or the small models that come with the package
            (:data:`qflash_lab.evaluation.small_models.MODELS`); ``all`` is Table 5's seven.
        methods: names of :data:`qflash_lab.baselines.METHODS`, or ``all``; the float32 reference is always among them.
        data: a folder with one folder of images per class, or a text file with a path and a class number in each line; for
            Fashion-MNIST's models one with its idx files; ``shipped``, the images that come with the small models.
        output: folder for the results; per-image results lie in one folder per model, one file per method.
        pretrained: download timm's weights.
        weights: take them from this safetensors file or torch checkpoint instead; for one model.
        batch: images per step; it shapes the scales of methods that share one over the batch.
        workers: processes that read images, for each process that computes; none for small models.
        subset: only that many images, drawn evenly from the classes.
        seed: seed of the subset and of the bootstrap.
        device: cpu, cuda or cuda:N; if None a CUDA device if there is one. Under torchrun cuda is each process's own.
        dtype: float32, float16 or bfloat16, of everything but the method's own arithmetic.
        overwrite: remove the results of an earlier run with other settings.
        integer: add rows for whole integer networks (:func:`qflash.quantize_model`). Small models are calibrated on training
            images that come with the package, others on images of ``data``, which then no method is judged on.
        calibration: how many of these, drawn evenly from the classes by ``seed``.
        console: where to print; standard output if None.

    Returns:
        what ``evaluate.json`` holds: conditions, and for each model its methods and their comparisons.

    Raises:
        ValueError: an argument is not allowed, or ``output`` holds another run's results; the message says which.
        FileNotFoundError: ``data`` or ``weights`` is not there.
        ImportError: timm, matplotlib or scikit-learn is not installed.
    """
    names = _resolve_models(models)
    _require(names)
    chosen = _resolve_methods(methods)
    if integer:
        _check_integer(names, data, dtype, calibration)
        chosen += WHOLE_NETWORKS
    for argument, value, least in (("batch", batch, 1), ("workers", workers, 0)):
        if value < least:
            raise ValueError(f"{argument} must be at least {least}, got {value}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if weights is not None and len(names) > 1:
        raise ValueError(f"weights belong to one model, got {len(names)} models")
    started = time.monotonic()
    # a pipe has no width, and rich would fold the table into 80 columns
    console = console or Console(width=None if sys.stdout.isatty() else 140)
    with _Processes() as processes:
        target = resolve_device(device, processes.local_rank)
        if target.type == "cuda":
            torch.cuda.set_device(target)
        settings = _Settings(
            data=str(data),
            output=Path(output),
            pretrained=pretrained,
            weights=None if weights is None else Path(weights),
            batch=batch,
            workers=workers,
            subset=subset,
            seed=seed,
            device=target,
            dtype=dtype,
            overwrite=overwrite,
            calibration=calibration,
        )
        columns = (
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
        )  # fmt: skip
        silent = not (sys.stderr.isatty() and processes.first)
        with Progress(*columns, console=Console(stderr=True), transient=True, disable=silent) as progress:
            results = [_evaluate_model(name, chosen, settings, processes, progress) for name in names]
        report = {"conditions": _conditions(settings, processes, time.monotonic() - started), "models": results}
        processes.from_first(lambda: publish(report, settings.output, console))
    return report


def _conditions(settings: _Settings, processes: _Processes, seconds: float) -> dict[str, Any]:
    import timm

    from qflash import __version__

    return {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "qflash": __version__,
        "torch": torch.__version__,
        "timm": timm.__version__,
        "device": _device_name(settings.device),
        "processes": processes.count,
        "threads": torch.get_num_threads(),
        "data": settings.data if settings.data == SHIPPED else Path(settings.data).resolve().name,
        "weights": "pretrained" if settings.pretrained else settings.weights.name if settings.weights else "built in",
        "subset": settings.subset,
        "seed": settings.seed,
        "batch": settings.batch,
        "dtype": settings.dtype,
        "confidence": CONFIDENCE,
        "bootstrap_resamples": RESAMPLES,
        "seconds": round(seconds, 1),
    }
