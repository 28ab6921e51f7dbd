"""What each step of the integer attention is worth: ``qflash-lab ablate`` (the paper's appendix, and this library's own steps).

Accuracy comes from plain formulas or from the back end ``auto`` picks, on any device. Latency and throughput are the GPU's
where there is one; without it, nothing but the plain timing of integer operations is measured, and is called that.
"""

from __future__ import annotations

import functools
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from qflash.api import int8_attention, quantize
from qflash.specification.recipe import DEFAULT, PAPER

from . import console as bench_console
from . import figures, latency, problems, report, runner, tables
from . import methods as bench_methods
from . import schema as col
from . import timers as bench_timers
from .ablation_formulas import ACCUMULATIONS, KEY_BLOCK, STEPS, TILES, accumulation, step_formula
from .ablation_recipes import (
    INPUTS,
    SEEDS,
    Tick,
    attention_rows,
    granularity_rows,
    ladder_rows,
    measure_rows,
    single_changes,
)
from .ablation_tables import FIELDS, PARTS, draw, sections
from .metrics import exact_attention, sqnr, summary
from .schema import Row
from .workloads import get_workload, paper_inputs

GPU_BATCH, CPU_BATCH = 1024, 8
_ACCURACY_BATCH = 8

# --- appendix A: from float to integer, step by step -----------------------------------------------------------------


def _prepare_kernel(inputs: problems.Inputs, *, step: int) -> bench_timers.TimedCall:
    from .ablation_kernels import prepare_step

    tensors: list[Any] = [inputs.query.half(), inputs.key.half(), inputs.value.half()]
    for place in range(min(3, step and step + 1)):
        tensors[place] = quantize(tensors[place], "tensor")
    query, key, value = tensors
    return prepare_step(step, query, key, value, inputs.query.shape[-1] ** -0.5, block=KEY_BLOCK)


def kernel_methods(device: torch.device) -> list[bench_methods.TimedMethod[problems.Inputs]]:
    """Return what appendix A compares on a GPU: SDPA's FlashAttention-2, the kernels V0 to V3, QFlash's own as V4."""
    methods = [m for m in bench_methods.make_methods(device) if m.name == col.SDPA_FLASH]
    for step, (name, _) in enumerate(STEPS[:4]):
        methods.append(bench_methods.TimedMethod(name, "kernel", functools.partial(_prepare_kernel, step=step), is_ours=True))
    methods.append(bench_methods.TimedMethod("V4 paper", "kernel", _prepare_paper, is_ours=True))
    methods.append(bench_methods.TimedMethod("V4 default", "kernel", _prepare_default, is_ours=True))
    return methods


def _prepare_paper(inputs: problems.Inputs) -> bench_timers.TimedCall:
    """int8 to int8 at V's scale, as Algorithm 1 has it."""
    query, key, value = (quantize(x, "tensor") for x in (inputs.query, inputs.key, inputs.value))
    return functools.partial(int8_attention, query, key, value, recipe=PAPER)


def _prepare_default(inputs: problems.Inputs) -> bench_timers.TimedCall:
    return bench_methods._prepare_qflash_int8(inputs, recipe=DEFAULT, backend="auto")


def kernel_part(device: torch.device, batch: int, rounds: int, tick: Tick) -> list[Row]:
    """Measure V0 to V4: SQNR of the formulas, and on a GPU latency and SQNR of the kernels.

    Args:
        device: where.
        batch: images of A2 for the kernels; the formulas take at most 8, at each seed.
        rounds: samples a kernel.
        tick: called after every row.

    Returns:
        rows; ``speedup`` of a kernel is V0's time (the same Triton kernel in float16) over its own.
    """
    rows: list[Row] = []
    workload, few = get_workload("A2"), min(batch, _ACCURACY_BATCH)
    drawn = [paper_inputs(workload, few, seed, device=device) for seed in SEEDS]
    for step, (name, title) in enumerate(STEPS):
        found = [sqnr(exact_attention(*inputs), step_formula(step, *inputs)) for inputs in drawn]
        row = {"part": "kernel", "group": "formula", "label": name, "title": title, "input": f"A2, batch {few}"}
        rows.append(row | summary(found))
        tick(f"formula {name}")
    if device.type == "cuda":
        problem = problems.Problem("A2", batch, workload.shape(batch), workload.tokens)
        options: dict[str, Any] = {"kind": "uniform", "dtype": torch.float16, "device": device, "rounds": rounds}
        timed = latency.measure(problem, kernel_methods(device), ("kernel", "end-to-end"), **options, tick=tick)
        base = next((row[col.MEDIAN_US] for row in timed if row[col.METHOD] == "V0"), None)
        for row in timed:
            speedup = round(base / row[col.MEDIAN_US], 3) if base and row[col.MEDIAN_US] else None
            known = {"part": "kernel", "group": "kernel", "label": row[col.METHOD], "input": f"A2, batch {batch}"}
            rows.append(row | known | {col.SPEEDUP: speedup})
    return rows


# --- appendix B.1: scale accumulation against scale release ----------------------------------------------------------


def scales_part(device: torch.device, tick: Tick) -> list[Row]:
    """Measure :data:`ACCUMULATIONS` over :data:`TILES` tiles of 64 keys; 64 queries, 4 heads, d = 64, uniform in [-4, 4)."""
    rows = []
    for tiles in TILES:
        found: dict[str, list[float]] = {kind: [] for kind in ACCUMULATIONS}
        for seed in SEEDS:
            generator = torch.Generator().manual_seed(seed)

            def draw(tokens: int, generator: torch.Generator = generator) -> torch.Tensor:
                uniform = torch.rand((1, 4, tokens, 64), generator=generator, dtype=torch.float32, device="cpu")
                return (uniform * 8 - 4).to(device)

            inputs = draw(KEY_BLOCK), draw(tiles * KEY_BLOCK), draw(tiles * KEY_BLOCK)
            exact = exact_attention(*inputs)
            for kind, values in found.items():
                values.append(sqnr(exact, accumulation(kind, *inputs)))
        for kind, values in found.items():
            row: dict[str, Any] = {"part": "scales", "group": kind, "label": f"{tiles} tiles", "tiles": tiles}
            rows.append(row | {col.INPUT: "uniform"} | summary(values))
        tick(f"{tiles} tiles")
    return rows


# --- appendix B.2: division against multiply and shift ---------------------------------------------------------------


def _cpu_operations(x: torch.Tensor) -> dict[str, Callable[[], object]]:
    out = torch.empty_like(x)

    def shifted() -> None:
        torch.mul(x, 45007, out=out)
        torch.bitwise_right_shift(out, 16, out=out)

    return {
        "multiply": lambda: torch.mul(x, 45007, out=out),
        "multiply and shift": shifted,
        "divide": lambda: torch.div(x, 45007, rounding_mode="trunc", out=out),
    }


def throughput_part(device: torch.device, rounds: int, tick: Tick) -> list[Row]:
    """Measure int32 operations a second: on a GPU in a Triton kernel, elsewhere by PyTorch's own (a pass an operation)."""
    calls: dict[str, Callable[[], object]]
    if device.type == "cuda":
        from .ablation_kernels import OPERATIONS, operations, prepare_throughput

        programs, loops = 16 * torch.cuda.get_device_properties(device).multi_processor_count, 16
        count = operations(programs, loops)
        method = "int32 in registers, Triton: the operation and an exclusive or, 16 x 16 times an element"
        calls = {name: prepare_throughput(name, device, programs=programs, loops=loops) for name in OPERATIONS}
    else:
        count = 1 << 15
        method = "plain timing of PyTorch's int32 operations on 2^15 elements in cache; multiply and shift are two passes"
        calls = _cpu_operations(torch.arange(1, count + 1, dtype=torch.int32, device="cpu"))
    fields = col.pick(col.PART, col.GROUP, col.LABEL, col.INPUT, col.METHOD, *col.TIMES, col.GOPS, col.ERROR)
    runs = []
    for name, call in calls.items():
        row = col.empty(fields, part="throughput", group="int32", label=name, input=method, method=name)
        runs.append(runner.Run(row, lambda call=call: (call, {}), "kernel"))  # type: ignore[misc]
    rows = runner.measure(runs, device, rounds, tick=tick)
    for row in rows:
        if row[col.MEDIAN_US] is not None:
            row[col.GOPS] = round(count / row[col.MEDIAN_US] / 1e3, 3)
    return rows


# --- appendix B.3, this library's own steps, and the run -------------------------------------------------------------


@torch.inference_mode()
def run_ablate(
    *,
    parts: Sequence[str] = PARTS,
    device: torch.device,
    batch: int | None = None,
    rounds: int = 15,
    output: pathlib.Path | None = None,
) -> dict[str, Any]:
    """Measure, print tables and write ``ablate.json``, ``.csv`` and a plot a part into ``output``.

    Args:
        parts: of :data:`PARTS`.
        device: a CUDA device or the CPU.
        batch: images of A2 for V0 to V4; 1024 on a GPU (the paper's), 8 on a CPU if None.
        rounds: samples of every time.
        output: made if it is not there.

    Returns:
        what ``ablate.json`` holds: environment, conditions and rows.

    Raises:
        ValueError: an unknown part; batch or rounds below 1.
    """
    for part in parts:
        if part not in PARTS:
            raise ValueError(f"part must be one of {PARTS}, got {part!r}")
    batch = batch if batch is not None else GPU_BATCH if device.type == "cuda" else CPU_BATCH
    if batch < 1 or rounds < 1:
        raise ValueError(f"batch and rounds must be at least 1, got {batch} and {rounds}")
    started = time.monotonic()
    done = report.Report(
        "ablate", "ablation of the integer attention", device, FIELDS, output,
        sqnr=f"{report.SQNR}; mean, lowest and highest over seeds {SEEDS}",
        timing=latency.timing_method(device, rounds) if device.type == "cuda" else "no GPU: no kernel was timed",
        inputs={name: text for name, (text, _) in INPUTS.items()},
    )  # fmt: skip
    steps = [*ladder_rows(), *attention_rows(single_changes())]
    grid = granularity_rows()
    jobs = {"kernel": len(STEPS) + 7 * (device.type == "cuda"), "scales": len(TILES), "throughput": 3}
    jobs |= {"granularity": len(grid), "steps": len(steps)}
    with bench_console.progress_bar(sum(jobs[part] for part in PARTS if part in parts)) as tick:
        for part in PARTS:
            if part not in parts:
                continue
            if part == "kernel":
                rows = kernel_part(device, batch, rounds, tick)
            elif part == "scales":
                rows = scales_part(device, tick)
            elif part == "throughput":
                rows = throughput_part(device, rounds, tick)
            elif part == "granularity":
                rows = list(measure_rows(grid, ("A2", "normal", "outliers"), device, tick))
            else:
                rows = list(measure_rows(steps, tuple(INPUTS), device, tick))
            done.add({col.PART: part} | row for row in rows)
    done.record["seconds"] = round(time.monotonic() - started, 1)
    done.begin()
    record = done.finish(*(tables.console(frame, title, 2) for _, title, frame in sections(done.record)))
    if output is not None:
        try:
            drawn = {part: draw(record, part) for part in PARTS}
            for part, figure in drawn.items():
                if figure is not None:
                    figures.write_figure(output, f"ablate-{part}", figure)
        except ImportError as error:
            done.console.print(f"No plots: {error}")
    return record
