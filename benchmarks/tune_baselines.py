"""Measure tiles of the baselines' kernels on this GPU, on every shape that ``measure.py`` times them on.

``python benchmarks/tune_baselines.py FOLDER --table lab/src/qflash_lab/baselines/tuned.json`` compiles all candidates in
several processes, measures them one after the other, writes ``FOLDER/baselines_tuned_<card>.json`` and adds what won to the
table that :mod:`qflash_lab.baselines.tuning` reads. Operands are int8 numbers as quantisation makes of the benchmark's inputs;
it is outside the clock.
"""

from __future__ import annotations

import concurrent.futures
import functools
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import track

import measure
from qflash import QuantizedTensor
from qflash.kernels.launch_recorder import KernelLaunch
from qflash_lab.baselines import i_vit, int_flash, qattn, tuning
from qflash_lab.baselines.integer import fixed_point
from qflash_lab.bench import problems as bench_problems
from qflash_lab.bench import records, runner
from qflash_lab.bench import schema as col
from qflash_lab.bench.timers import tidy
from qflash_lab.verify.cases import signature
from qflash_lab.verify.compile import compile_call

NAMES = tuple(name.removesuffix(" kernel") for name in col.BASELINES)
PRODUCTS = {"int-flash-full": "int8", "int-flash-half": "float16", "qattn": "bfloat16"}
"""Of the methods whose kernel is :mod:`qflash_lab.baselines.float_softmax_kernels`."""
TOLERANCES = {"int-flash-full": 0.05, "int-flash-half": 0.005, "qattn": 0.03, "i-vit": 0.0}
"""Root mean square of a candidate's difference from the rule's output, relative to that of the output: keys a tile are part of
the result where weights are rounded."""
WORTH = 0.98
"""A candidate has to take at most this part of the rule's time to displace it."""
ROUNDS = 7
"""Of alternation between the rule's tiles and the best ones."""
MOST_SCORES = 1 << 30
"""Of I-ViT, whose preparation holds them in 64 bits several times."""
UNIT = 5
"""Shiftmax's I₀ on inputs that are uniform in [-4, 4)."""
STEP = 4.0 / 127.0
"""Scale of such inputs."""


class Shape(NamedTuple):
    """A shape that is tuned: its name in tables, the query's (batch, heads, tokens, channels), and the keys."""

    label: str
    query: tuple[int, int, int, int]
    keys: int

    def key(self) -> tuning.BaselineShape:
        """Return the shape as the table has it."""
        batch, heads, queries, channels = self.query
        return tuning.BaselineShape(batch * heads, queries, self.keys, channels, channels)


class Operands(NamedTuple):
    """int8 query, key and value, (batch, heads, tokens, channels)."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


Tiles = tuple[tuple[int, ...], ...]
"""Of a method's kernels, one after the other."""


class Job(NamedTuple):
    """One candidate to compile."""

    method: str
    shape: Shape
    tiles: Tiles


def shapes_of(runs: Iterable[measure.Run]) -> list[Shape]:
    """Return the shapes on which runs time a baseline, each once."""
    found: dict[tuple[Any, ...], Shape] = {}
    for run in runs:
        if run.methods and not set(run.methods) & set(col.BASELINES):
            continue
        for problem in bench_problems.make_problems(run.workloads, run.shapes, run.batches):
            label = f"{problem.workload} b{problem.batch}" if problem.batch else problem.workload
            found.setdefault((problem.shape, problem.keys), Shape(label, problem.shape, problem.keys))
    return list(found.values())


def takes(method: str, shape: Shape) -> bool:
    """Tell whether a method is measured on a shape."""
    batch, heads, queries, _ = shape.query
    return method != "i-vit" or batch * heads * queries * shape.keys <= MOST_SCORES


def draw(shape: Shape, device: torch.device) -> Operands:
    """Draw int8 operands, uniform as the benchmark's inputs are; on the meta device tensors without memory."""
    batch, heads, queries, channels = shape.query
    sizes = [(batch, heads, tokens, channels) for tokens in (queries, shape.keys, shape.keys)]
    if device.type == "meta":
        return Operands(*(torch.empty(size, dtype=torch.int8, device=device) for size in sizes))
    generator = torch.Generator(device).manual_seed(0)
    return Operands(*(torch.randint(-127, 128, size, generator=generator, dtype=torch.int8, device=device) for size in sizes))


def _scaled(values: torch.Tensor, shape: tuple[int, ...]) -> QuantizedTensor:
    return QuantizedTensor.from_kernel(values, torch.full(shape, STEP, dtype=torch.float32, device=values.device))


def launches(method: str, operands: Operands, tiles: Tiles) -> tuple[tuple[KernelLaunch, ...], torch.Tensor]:
    """Return a method's launches with some tiles, and the tensor that they fill.

    Raises:
        ValueError: no such method.
    """
    query, key, value = operands
    factor = query.shape[-1] ** -0.5
    if method not in NAMES:
        raise ValueError(f"method must be one of {NAMES}, got {method!r}")
    out = torch.empty(query.shape, dtype=torch.float16 if "flash" in method else torch.int8, device=query.device)
    if method == "i-vit":
        return i_vit.kernel_calls(query, key, value, out, i_vit_constants(query.shape[-1], key.shape[2]), tiles=tiles), out
    if method == "qattn":
        one = (1, 1, 1, 1)
        scale = torch.full((), STEP, dtype=torch.float32, device=query.device)  # no output is above V
        tensors = _scaled(query, one), _scaled(key, one), _scaled(value, one)
        return (qattn.kernel_call(tensors, factor, out, output_scale=scale, tiles=tiles[0]),), out
    by_token = _scaled(query, (*query.shape[:3], 1)), _scaled(key, (*key.shape[:3], 1))
    if method == "int-flash-full":
        head = torch.full((*value.shape[:2], 1, 1), STEP, dtype=torch.float32, device=value.device)
        given = int_flash.Operands(*by_token, value, head)
    else:
        half = torch.empty(value.shape, dtype=torch.float16, device=value.device).copy_(value)
        if half.device.type != "meta":  # arithmetic there imports much
            half.mul_(STEP)
        given = int_flash.Operands(*by_token, half, None)
    return (int_flash.kernel_call(given, factor, out, tiles=tiles[0]),), out


@functools.cache
def i_vit_constants(channels: int, keys: int) -> i_vit.Constants:
    """Return constants as the inputs would give: a score's deviation is that of two uniform numbers by the channels' root."""
    span = 5.0 * channels**0.5 * 127.0**2 / 3.0
    scores, output = (
        tuple(int(x) for x in fixed_point(torch.tensor(127.0 / most, dtype=torch.float64, device="cpu")))
        for most in (span, 127.0 * 100.0)
    )
    unit, shift = i_vit.shiftmax_constants(torch.tensor(1.0 / UNIT, dtype=torch.float64, device="cpu"), keys)
    return i_vit.Constants((scores[0], scores[1]), int(unit), int(shift), (output[0], output[1]))


def candidates(method: str, shape: Shape) -> tuple[list[tuple[int, ...]], ...]:
    """Return what is measured of each of a method's kernels, the rule's tiles first."""
    from qflash_lab.baselines import float_softmax_kernels, i_vit_kernels

    about = shape.key()
    if method != "i-vit":
        rule = float_softmax_kernels.choose_tiles(about.queries, about.keys, about.head_dim)
        return (tuning.float_softmax_candidates(rule, about),)
    width = i_vit_kernels.aligned_keys(about.keys)
    product, shiftmax = i_vit_kernels.choose_product_tiles, i_vit_kernels.choose_shiftmax_tiles
    return (
        tuning.product_candidates(product(about.keys, about.head_dim), about.queries, width, about.head_dim),
        tuning.shiftmax_candidates(shiftmax(width), width),
        tuning.product_candidates(product(about.value_dim, width), about.queries, about.value_dim, width),
    )


def jobs_of(shapes: Sequence[Shape], methods: Sequence[str]) -> list[Job]:
    """Return what to compile: of all candidates those that Triton compiles apart."""
    seen: set[Any] = set()
    jobs = []
    for shape in shapes:
        operands = draw(shape, torch.device("meta"))
        for method in methods:
            if not takes(method, shape):
                continue
            lists = candidates(method, shape)
            for index in range(max(map(len, lists))):
                tiles = tuple(of[min(index, len(of) - 1)] for of in lists)
                new = {signature(launch) for launch in launches(method, operands, tiles)[0]} - seen
                if new:
                    seen |= new
                    jobs.append(Job(method, shape, tiles))
    return jobs


def compile_job(job: Job, target: str) -> str | None:
    """Compile a candidate for a target, without a GPU; return what went wrong, if anything."""
    try:
        for launch in launches(job.method, draw(job.shape, torch.device("meta")), job.tiles)[0]:
            compile_call(launch, target)
    except Exception as error:  # it is reported, and again when the candidate is to be measured
        return f"{type(error).__name__}: {error}"
    return None


def compile_all(jobs: Sequence[Job], target: str, processes: int, console: Console) -> None:
    """Have Triton compile and keep every candidate."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(processes, mp_context=context) as pool:
        under_way = {pool.submit(compile_job, job, target): job for job in jobs}
        done = concurrent.futures.as_completed(under_way)
        for future in track(done, f"Compiling, {processes} at a time", total=len(jobs), console=console):
            if problem := future.result():
                job = under_way[future]
                console.print(f"{job.method} {job.shape.label} {job.tiles}: {problem.splitlines()[0]}", markup=False)


def difference(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the root mean square of ``out - expected`` relative to that of ``expected``; infinity where it is no number."""
    wanted = expected.float()
    found = float((out.float() - wanted).norm() / wanted.norm().clamp(min=1e-30))
    return found if found == found else float("inf")


def run_all(calls: Sequence[KernelLaunch]) -> Callable[[], None]:
    """Return a call of launches, one after the other."""

    def call() -> None:
        for launch in calls:
            launch.run()

    return call


def agrees(method: str, out: torch.Tensor, expected: torch.Tensor) -> bool:
    """Tell whether an output is the rule's, as far as the method's result does not depend on tiles."""
    return torch.equal(out, expected) if TOLERANCES[method] == 0.0 else difference(out, expected) <= TOLERANCES[method]


def tune(method: str, shape: Shape, operands: Operands, tell: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Measure a method on a shape; return the row of results.

    The kernels of a method of several are measured by themselves, and the best of each together.

    Args:
        method: one of :data:`NAMES`.
        shape: what is measured.
        operands: from :func:`draw` on a CUDA device.
        tell: told about candidates that are left out.
    """

    def alone(launch: KernelLaunch) -> float:
        return runner.medians({method: run_all([launch])}, device, 3)[method]

    device = operands.query.device
    lists = candidates(method, shape)
    rule = tuple(of[0] for of in lists)
    calls, out = launches(method, operands, rule)
    run_all(calls)()
    expected = out.clone()
    best = list(rule)
    for place, found in enumerate(lists):
        times = {rule[place]: alone(calls[place])}
        for tiles in found[1:]:
            try:
                tried, out = launches(method, operands, (*rule[:place], tiles, *rule[place + 1 :]))
                run_all(tried)()
                if not agrees(method, out, expected):
                    tell(f"{method} {shape.label} {tiles}: another result, {difference(out, expected):.2g} away")
                    continue
                times[tiles] = alone(tried[place])
            except Exception as error:  # tiles that do not fit this GPU
                tell(f"{method} {shape.label} {tiles}: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
        best[place] = min(times, key=lambda tiles: times[tiles])
    both = {rule: run_all(calls), tuple(best): run_all(launches(method, operands, tuple(best))[0])}
    medians = runner.medians(both, device, ROUNDS)
    if medians[tuple(best)] > WORTH * medians[rule]:
        best = list(rule)
    return {
        col.METHOD: method,
        col.LABEL: shape.label,
        col.SHAPE: "x".join(map(str, shape.query)),
        col.KEYS: shape.keys,
        col.RULE: [list(tiles) for tiles in rule],
        col.RULE_US: round(medians[rule], 3),
        col.BEST: [list(tiles) for tiles in best],
        col.BEST_US: round(medians[tuple(best)], 3),
    }


def entries(row: dict[str, Any], card: str) -> dict[str, tuple[int, ...]]:
    """Return the table's entries of a row of results: the tiles of kernels that are not the rule's."""
    batch, heads, queries, channels = map(int, row["shape"].split("x"))
    shape = tuning.BaselineShape(batch * heads, queries, row["keys"], channels, channels)
    product = PRODUCTS.get(row["method"])
    kernels = i_vit.KERNELS if product is None else ("float_softmax",)
    return {
        tuning.table_key(card, kernel, product or "int8", shape): tuple(best)
        for kernel, rule, best in zip(kernels, row["rule"], row["best"], strict=True)
        if best != rule
    }


def main(
    folder: Path, shapes: Sequence[Shape], methods: Sequence[str], processes: int, table: Path | None, device: torch.device
) -> list[dict[str, Any]]:
    """Compile, then measure; write results after every shape, and the table at the end; return the rows."""
    console = Console(stderr=True)
    properties = torch.cuda.get_device_properties(device)
    began = time.monotonic()
    if processes > 1:
        jobs = jobs_of(shapes, methods)
        compile_all(jobs, f"sm_{properties.major}{properties.minor}", processes, console)
        console.print(f"{len(jobs)} candidates compiled in {time.monotonic() - began:.0f} s")
    environment = records.environment(device) | {"command": records.command_line("python", *sys.argv)}
    path = folder / f"baselines_tuned_{measure.card_of(properties.name)}.json"
    rows: list[dict[str, Any]] = []
    for shape in track(shapes, "Measuring", console=console):
        operands = draw(shape, device)
        for method in methods:
            if takes(method, shape):
                rows.append(tune(method, shape, operands, functools.partial(console.print, markup=False)))
        del operands
        tidy(device)
        records.write_json(path, {"environment": environment, "rows": rows})
        if table is not None:
            found = {key: tiles for row in rows for key, tiles in entries(row, properties.name).items()}
            about = {"by": "benchmarks/tune_baselines.py", "torch": torch.__version__, "triton": environment["triton"]}
            tuning.write_table(table, found, about)
    console.print(f"{len(rows)} rows in {time.monotonic() - began:.0f} s")
    return rows


if __name__ == "__main__":
    parser = measure.make_parser(__doc__.splitlines()[0])
    parser.add_argument("--table", type=Path, help="add what won to this table")
    parser.add_argument("--method", action="append", choices=NAMES, help="only this; repeatable")
    arguments, runs = measure.parse(parser)
    chosen = [run for run in runs if run.device == "cuda"]
    main(
        arguments.output, shapes_of(chosen), arguments.method or NAMES, arguments.processes, arguments.table,
        torch.device("cuda", torch.cuda.current_device()),
    )  # fmt: skip
