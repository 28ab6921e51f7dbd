"""``qflash evaluate``: Top-1 and Top-5 of image classifiers with any method in their attention (Table 5).

Only attention is quantised, dynamically, while everything else stays in floating point, as in the paper's Top-1
experiment. A scale that is shared over a batch depends on which images are in it, so the batches are fixed before any
is computed: batch b holds the same images whatever the number of processes, and whether or not a run was interrupted.
Every image's outcome is kept, so that methods are compared on the same images.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import datetime
import functools
import hashlib
import json
import math
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from torch import nn

from ..baselines import METHODS, get_method
from ..integrations.timm import patch, unpatch
from ..optional_packages import require_packages
from ..paths import write_whole
from ..validation import resolve_device
from .classifiers import DIGITS, DIGITS_MODELS, PAPER_MODELS, Images, digest_weights, draw_subset, load_classifier
from .outcome_store import LOSS_DIGITS, MOST_GUESSES, Outcome, Store, to_csv
from .statistics import CONFIDENCE, RESAMPLES, bootstrap_difference, mcnemar_exact, wilson_interval

REFERENCE = "fp32"
"""The method every other is compared with; it is always evaluated."""

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
SIGNIFICANCE = 1.0 - CONFIDENCE

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
        result = self.gather(result)[0]
        if isinstance(result, Exception):
            raise result
        return result


# --- one method on one model --------------------------------------------------------------------------------


@torch.inference_mode()
def attention_products(model: nn.Module, shape: Sequence[int]) -> list[tuple[int, int]]:
    """Count the multiply-adds of both matrix products of every attention call for one image.

    The model runs once on meta tensors, which have shapes and no values.

    Args:
        model: a model that :func:`qflash.patch` knows; it is copied.
        shape: (channels, height, width) of an image.

    Returns:
        for each call those of Q Kᵀ (Equation 3) and those of P V.

    Raises:
        ValueError: the model holds no supported attention module.
    """
    calls: list[tuple[int, int]] = []

    def count(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **_: Any) -> torch.Tensor:
        scores = query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2]
        calls.append((scores * query.shape[3], scores * value.shape[3]))
        return query.new_empty((*query.shape[:3], value.shape[3]))

    twin = patch(copy.deepcopy(model).to("meta"), attention=count)
    twin(torch.empty((1, *shape), device="meta", dtype=next(twin.parameters()).dtype))
    return calls


def bit_operations(products: Sequence[tuple[int, int]], method: Any) -> tuple[float, float]:
    """Return the bit operations (BOPs) of a model's attention for one image, in 10^9, in two ways of counting.

    The usual one is multiply-adds times the widths of both operands, summed over both products. Table 5 gives no
    formula. Its figures are 192 H N² D per layer where both products are int8 and 384 H N² D where P and V have 16
    bits: Q Kᵀ counted twice and P V once, at the widths of their operands (DeiT-B prints 137.0 where this gives 137.3).
    Its ViT-S and ViT-B rows are half of what their heads (Table 1) give.

    Args:
        products: from :func:`attention_products`.
        method: declares the widths of its operands.

    Returns:
        as usually counted, and as the paper counts.
    """
    (query, key), (probability, value) = method.bits
    first = sum(count for count, _ in products) * query * key
    second = sum(count for _, count in products) * probability * value
    return (first + second) / 1e9, (2 * first + second) / 1e9


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
def _attending(model: nn.Module, method: Any) -> Iterator[nn.Module]:
    """Put ``method`` into the model's attention for the length of a ``with`` block."""
    try:
        yield patch(model, attention=method.attention)
    finally:
        unpatch(model)


# --- summaries ----------------------------------------------------------------------------------------------


def _summary(
    method: Any, outcomes: Sequence[Outcome], exact: Sequence[Outcome], products: Sequence[tuple[int, int]], seed: int
) -> dict[str, Any]:
    """Summarise one method; shares and their intervals in percent, differences in points."""
    count = len(outcomes)
    right = [outcome.top1 for outcome in outcomes]
    reference = [outcome.top1 for outcome in exact]
    usual, papers = bit_operations(products, method)
    low, high = wilson_interval(sum(right), count)
    result: dict[str, Any] = {
        "method": method.name,
        "title": method.title,
        "integer_only": method.integer_only,
        "bits": [list(pair) for pair in method.bits],
        "gbops": usual,
        "gbops_as_in_paper": papers,
        "right": sum(right),
        "top1_percent": 100.0 * sum(right) / count,
        "top1_interval_percent": [100.0 * low, 100.0 * high],
        "top5_percent": 100.0 * sum(outcome.top5 for outcome in outcomes) / count,
        "not_finite": sum(not outcome.predictions for outcome in outcomes),
    }
    if method.name != REFERENCE:
        result["against_fp32"] = _comparison(reference, right, seed) | {
            "same_prediction_percent": 100.0
            * sum(a.predictions[:1] == b.predictions[:1] for a, b in zip(exact, outcomes, strict=True))
            / count,
            "loss_change": _loss_change(exact, outcomes),
        }
    return result


def _loss_change(first: Sequence[Outcome], second: Sequence[Outcome]) -> float | None:
    """Return the mean absolute difference of the losses, in nats, of images with finite logits under both; None without any."""
    changes = [abs(b.loss - a.loss) for a, b in zip(first, second, strict=True) if a.predictions and b.predictions]
    return math.fsum(changes) / len(changes) if changes else None


def _comparison(first: Sequence[bool], second: Sequence[bool], seed: int) -> dict[str, Any]:
    low, high = bootstrap_difference(first, second, seed)
    return {
        "difference_points": 100.0 * (sum(second) - sum(first)) / len(first),
        "difference_interval_points": [100.0 * low, 100.0 * high],
        "lost": sum(a and not b for a, b in zip(first, second, strict=True)),
        "gained": sum(b and not a for a, b in zip(first, second, strict=True)),
        "mcnemar_p": mcnemar_exact(first, second),
    }


def compare_outcomes(first: Sequence[Outcome], second: Sequence[Outcome], seed: int = 0) -> dict[str, Any]:
    """Compare the Top-1 of two methods on the same images.

    Args:
        first, second: outcomes of the same images in the same order.
        seed: seed of the bootstrap.

    Returns:
        ``difference_points`` (second minus first) with its bootstrap interval, how many images only the first
        (``lost``) and only the second (``gained``) gets right, and the p-value of McNemar's exact test.

    Raises:
        ValueError: the images are not the same.
    """
    if [o.index for o in first] != [o.index for o in second]:
        raise ValueError("second must hold first's images in the same order")
    return _comparison([o.top1 for o in first], [o.top1 for o in second], seed)


def _integer_verdict(
    summaries: Sequence[dict[str, Any]], pairs: dict[tuple[str, str], dict[str, Any]]
) -> dict[str, Any] | None:
    """Say which integer-only method is best, and which are not distinguishable from it by McNemar's test."""
    ours = [summary for summary in summaries if summary["integer_only"]]
    if not ours:
        return None
    most = max(summary["right"] for summary in ours)
    best = [summary["method"] for summary in ours if summary["right"] == most]
    tied = []
    for summary in ours:
        name = summary["method"]
        if name in best:
            continue
        pair = pairs.get((best[0], name)) or pairs[(name, best[0])]
        if pair["mcnemar_p"] >= SIGNIFICANCE:
            tied.append({"method": name, "mcnemar_p": pair["mcnemar_p"]})
    changes = [(change, s["method"]) for s in ours if (change := s["against_fp32"]["loss_change"]) is not None]
    return {
        "best": best,
        "top1_percent": next(s["top1_percent"] for s in ours if s["right"] == most),
        "tied": tied,
        "by_loss_change": [name for _, name in sorted(changes)],
    }


# --- a whole run --------------------------------------------------------------------------------------------


@functools.cache
def _source_digest() -> str:
    """Return the SHA-256 of this package's source: another method may be behind the same name tomorrow."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
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


def _resolve_models(names: Sequence[str]) -> list[str]:
    wanted = [each for name in names for each in (PAPER_MODELS if name == "all" else (name,))]
    if not wanted:
        raise ValueError("model must name at least one model, got none")
    return list(dict.fromkeys(wanted))


def _require(models: Sequence[str]) -> None:
    digits = ["sklearn"] if any(name in DIGITS_MODELS for name in models) else []
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


def _evaluate_model(
    name: str, methods: Sequence[Any], settings: _Settings, processes: _Processes, progress: Progress
) -> dict[str, Any]:
    """Evaluate one model with every method; all processes return the same."""
    model, images = load_classifier(name, settings.data, pretrained=settings.pretrained, weights=settings.weights)
    dtype = DTYPES[settings.dtype]
    places = draw_subset(images.labels, settings.subset, settings.seed)
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
    }
    if any(other != fingerprint for other in processes.gather(fingerprint)):
        raise ValueError(
            f"the processes do not agree on the run of {name}: data, weights, device and versions must be the same"
        )
    store = Store(settings.output / _folder_name(name), min(MOST_GUESSES, images.classes), METHODS)
    processes.from_first(lambda: store.open(fingerprint, settings.overwrite))
    products = attention_products(model, images.dataset[0][0].shape)
    model.to(device=settings.device, dtype=dtype)
    batches = _batches(places, settings.batch)

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
            with store.appender(method.name, processes.rank) as file, _attending(model, method):
                for done in _classify(model, images, mine, settings.device, dtype, settings.workers):
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
    summaries = [_summary(method, outcomes[method.name], exact, products, settings.seed) for method in methods]
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
        "integer_only": _integer_verdict(summaries, pairs),
        "pairs": [{"first": a, "second": b, **pair} for (a, b), pair in pairs.items()],
    }


def run_evaluate(
    models: Sequence[str],
    methods: Sequence[str] = ("all",),
    *,
    data: str | Path = DIGITS,
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
    console: Console | None = None,
) -> dict[str, Any]:
    """Measure Top-1 and Top-5, print a table and write ``evaluate.json``, ``evaluate.csv`` and ``evaluate.svg``.

    Under ``torchrun`` the batches are shared out among the processes; every process returns the same, the first one
    prints and writes. A run that was interrupted is taken up where it stopped when it is called again.

    Args:
        models: short names of Table 5, names of timm, digits models (``digits-vit``, ``digits-swin``); ``all`` is
            Table 5's seven.
        methods: names of :data:`qflash.baselines.METHODS`, or ``all``; the float32 reference is always among them.
        data: a folder with one folder of images per class, or ``digits``, the held-out digits.
        output: folder for the results; per-image results lie in one folder per model, one file per method.
        pretrained: download timm's weights.
        weights: take them from this safetensors file or torch checkpoint instead; for one model.
        batch: images per step; it shapes the scales of methods that share one over the batch.
        workers: processes that read images, for each process that computes; none for the digits.
        subset: only that many images, drawn evenly from the classes.
        seed: seed of the subset and of the bootstrap.
        device: cpu, cuda or cuda:N; if None a CUDA device if there is one. Under torchrun cuda is each process's own.
        dtype: float32, float16 or bfloat16, of everything but the method's own arithmetic.
        overwrite: remove the results of an earlier run with other settings.
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
            # the digits are in memory already
            workers=0 if str(data) == DIGITS else workers,
            subset=subset,
            seed=seed,
            device=target,
            dtype=dtype,
            overwrite=overwrite,
        )
        columns = (
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
        )  # fmt: skip
        silent = not (sys.stderr.isatty() and processes.first)
        with Progress(*columns, console=Console(stderr=True), transient=True, disable=silent) as progress:
            results = [_evaluate_model(name, chosen, settings, processes, progress) for name in names]
        report = {"conditions": _conditions(settings, processes, time.monotonic() - started), "models": results}
        processes.from_first(lambda: _publish(report, settings.output, console))
    return report


def _conditions(settings: _Settings, processes: _Processes, seconds: float) -> dict[str, Any]:
    import timm

    from .. import __version__

    return {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "qflash": __version__,
        "torch": torch.__version__,
        "timm": timm.__version__,
        "device": _device_name(settings.device),
        "processes": processes.count,
        "threads": torch.get_num_threads(),
        "data": settings.data if settings.data == DIGITS else Path(settings.data).resolve().name,
        "weights": "pretrained" if settings.pretrained else settings.weights.name if settings.weights else "built in",
        "subset": settings.subset,
        "seed": settings.seed,
        "batch": settings.batch,
        "dtype": settings.dtype,
        "confidence": CONFIDENCE,
        "bootstrap_resamples": RESAMPLES,
        "seconds": round(seconds, 1),
    }


# --- what is shown ------------------------------------------------------------------------------------------

_COLUMNS = (
    "model", "method", "integer_only", "bits", "gbops", "gbops_as_in_paper", "images", "right", "top1_percent", "top1_low",
    "top1_high", "top5_percent", "difference_points", "difference_low", "difference_high", "lost", "gained", "mcnemar_p",
    "same_prediction_percent", "loss_change", "not_finite",
)  # fmt: skip


def _bits(summary: dict[str, Any]) -> str:
    return ", ".join("x".join(str(width) for width in pair) for pair in summary["bits"])


def _rows(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Flatten the report to one row per model and method, keyed by :data:`_COLUMNS`."""
    rows = []
    for result in report["models"]:
        for summary in result["methods"]:
            against = summary.get("against_fp32", {})
            row = {key: summary.get(key, against.get(key, "")) for key in _COLUMNS}
            row |= {"model": result["model"], "images": result["images"], "bits": _bits(summary)}
            row |= dict(zip(("top1_low", "top1_high"), summary["top1_interval_percent"], strict=True))
            row |= dict(
                zip(("difference_low", "difference_high"), against.get("difference_interval_points", ("", "")), strict=True)
            )
            rows.append(row)
    return rows


def _publish(report: dict[str, Any], folder: Path, console: Console) -> None:
    """Print the table and write the files."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "evaluate.json", json.dumps(report, indent=1, allow_nan=False) + "\n")
    rows = _rows(report)
    write_whole(
        folder / "evaluate.csv",
        to_csv([_COLUMNS, *([f"{x:.6g}" if isinstance(x, float) else x for x in row.values()] for row in rows)]),
    )
    _plot(report, folder / "evaluate.svg")
    conditions = report["conditions"]
    for result in report["models"]:
        console.print(_table(result, conditions))
        for line in _sentences(result):
            console.print(line, highlight=False)
    console.print(f"Results: {folder / 'evaluate.json'}, per image: {folder}/MODEL/METHOD.csv", highlight=False)


def _table(result: dict[str, Any], conditions: dict[str, Any]) -> Table:
    title = f"{result['model']}: {result['images']} images of {conditions['data']}"
    caption = (
        f"{conditions['device']}, {conditions['dtype']}, batches of {conditions['batch']}. "
        f"Brackets: {CONFIDENCE:.0%} intervals (Wilson; paired bootstrap). "
        "Lost, gained: images right with FP32 only, with the method only. p: McNemar, exact. "
        "Loss change: mean absolute difference of an image's cross entropy to FP32's, nats."
    )
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
    for header in ("method", "integer", "bits QK, PV"):
        table.add_column(header)
    for header in ("GBOPs", "paper's", "Top-1 %", "Top-5 %", "to FP32, points", "lost", "gained", "p", "loss change"):
        table.add_column(header, justify="right")
    for s in result["methods"]:
        low, high = s["top1_interval_percent"]
        cells = [
            s["method"],
            "yes" if s["integer_only"] else "no",
            _bits(s),
            f"{s['gbops']:.3g}",
            f"{s['gbops_as_in_paper']:.3g}",
        ]
        cells += [f"{s['top1_percent']:.2f} [{low:.2f}, {high:.2f}]", f"{s['top5_percent']:.2f}"]
        if "against_fp32" in s:
            a = s["against_fp32"]
            low, high = a["difference_interval_points"]
            cells += [f"{a['difference_points']:+.2f} [{low:+.2f}, {high:+.2f}]"]
            cells += [str(a["lost"]), str(a["gained"]), f"{a['mcnemar_p']:.2g}"]
            cells += ["-" if a["loss_change"] is None else f"{a['loss_change']:.2g}"]
        table.add_row(*cells)
    return table


def _sentences(result: dict[str, Any]) -> list[str]:
    """Say in words which integer-only method is best, and what went wrong."""
    lines = []
    verdict = result["integer_only"]
    if verdict is not None:
        line = f"Integer-only, most images right: {', '.join(verdict['best'])} ({verdict['top1_percent']:.2f} %)."
        if verdict["tied"]:
            names = ", ".join(f"{tie['method']} (p = {tie['mcnemar_p']:.2g})" for tie in verdict["tied"])
            line += f" Not distinguishable from it on these images (McNemar, {SIGNIFICANCE:.0%}): {names}."
        if verdict["by_loss_change"]:
            line += f" Closest to FP32 by loss change: {', '.join(verdict['by_loss_change'][:3])}."
        lines.append(line)
    for summary in result["methods"]:
        if summary["not_finite"]:
            lines.append(f"{summary['method']}: {summary['not_finite']} images without finite logits, counted as wrong.")
    return lines


def _plot(report: dict[str, Any], path: Path) -> None:
    """Draw Top-1 with its interval by method, one panel per model."""
    import matplotlib
    from matplotlib.figure import Figure

    results = report["models"]
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "qflash", "font.family": "sans-serif"}):
        columns = min(len(results), 4)
        lines = math.ceil(len(results) / columns)
        height = lines * (0.8 + 0.28 * len(results[0]["methods"])) + 0.4
        figure = Figure(figsize=(1.6 + 3.2 * columns, height), layout="constrained")
        panels = figure.subplots(lines, columns, squeeze=False, sharey=True).flatten()
        for axes in panels[len(results) :]:
            axes.set_axis_off()
        for axes, result in zip(panels, results, strict=False):
            summaries = result["methods"]
            for place, s in enumerate(summaries):
                low, high = s["top1_interval_percent"]
                colour = "#3b82c4" if s["integer_only"] else "#6b7480"
                axes.plot([low, high], [place, place], "-", color=colour)
                axes.plot(s["top1_percent"], place, "o" if s["integer_only"] else "s", color=colour, markersize=5)
            axes.axvline(summaries[0]["top1_percent"], color="#6b7480", linewidth=0.8, linestyle=":")
            axes.set_yticks(range(len(summaries)), [s["title"] for s in summaries])
            axes.set_title(result["model"], fontsize="medium")
            axes.set_xlabel("Top-1, %")
            axes.spines[["top", "right"]].set_visible(False)
        panels[0].set_ylim(len(results[0]["methods"]) - 0.4, -0.6)
        marks = [matplotlib.lines.Line2D([], [], color=c, marker=m, label=t) for c, m, t in (
            ("#3b82c4", "o", "integer-only"), ("#6b7480", "s", "not integer-only"),
        )]  # fmt: skip
        figure.legend(handles=marks, loc="outside lower center", ncols=2, frameon=False)
        figure.savefig(path, metadata={"Date": None})
