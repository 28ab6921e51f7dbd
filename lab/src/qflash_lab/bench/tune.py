"""``qflash-lab tune``: measure tiles on this GPU and keep the fastest, for the shapes one runs.

Every candidate has to return the rules' bits before it is timed. What wins goes into the user's table
(:mod:`qflash.kernels.tuning_table`), which later processes read.
"""

from __future__ import annotations

import datetime
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from triton.errors import TritonError

from qflash.api import quantize
from qflash.kernels import tuning_table
from qflash.kernels.device import processors_of
from qflash.kernels.dispatch import one_launch
from qflash.kernels.families import choose_family, choose_tiles
from qflash.kernels.launch_arguments import KernelRequest
from qflash.kernels.tiles import AttentionShape, Tiles
from qflash.kernels.tuning_table import candidates, table_key
from qflash.paths import make_cache_folder, write_whole
from qflash.specification.attention_call import float_call, int8_call
from qflash.specification.recipe import DEFAULT

from . import problems as bench_problems
from . import runner
from . import schema as col

WORTH = 0.98
"""A candidate has to take at most this part of the rules' time to displace them."""
_ROUNDS = 9


def tune_shape(
    shape: tuple[int, int, int, int], keys: int, *, fused: bool, device: torch.device, tick: Callable[[], None] = lambda: None
) -> tuple[Tiles, Tiles, float, float]:
    """Measure one shape.

    Args:
        shape: (batch, heads, queries, head_dim) of the query.
        keys: keys a row.
        fused: the kernel that quantises float16, or the one on int8.
        device: a CUDA device.
        tick: called after every candidate.

    Returns:
        the rules' tiles, the fastest, and the microseconds a call of both.
    """
    batch, heads, queries, head_dim = shape
    generator = torch.Generator(device).manual_seed(0)
    sizes = (queries, keys, keys)
    query, key, value = (
        (torch.rand((batch, heads, size, head_dim), generator=generator, dtype=torch.float32, device=device) * 8 - 4).half()
        for size in sizes
    )
    about = AttentionShape(DEFAULT, head_dim, head_dim, queries, keys, batch * heads, fused)
    rule = choose_tiles(about, torch.cuda.get_device_capability(device))
    factor = head_dim**-0.5
    if fused:
        call = float_call(query, key, value, None, False, factor, DEFAULT)
    else:
        q, k, v = (quantize(x) for x in (query, key, value))
        given = (q.values, q.scale, k.values, k.scale, v.values, v.scale)
        call = int8_call(*given, None, False, factor, v.scale, torch.int8, DEFAULT)
    out = torch.empty_like(call.query)
    request = KernelRequest(call, out)
    expected: torch.Tensor | None = None
    times: dict[Tiles, float] = {}
    for tiles in candidates(rule, head_dim, queries, keys, processors_of(device)):
        try:
            launches = choose_family(request, tiles).launches(request)
            out.zero_()

            def run(launches: list[Any] = launches) -> None:
                for launch in launches:
                    launch.run()

            run()
            if expected is None:
                expected = out.clone()
            if torch.equal(out, expected):
                times[tiles] = runner.medians({tiles: run}, device, _ROUNDS)[tiles]
        except (RuntimeError, ValueError, TritonError):  # tiles that do not fit this GPU, or that its assembler refuses
            if expected is None:
                raise
        tick()
    fastest = min(times, key=lambda tiles: times[tiles])
    if times[fastest] > WORTH * times[rule]:
        fastest = rule
    return rule, fastest, times[rule], times[fastest]


def _fusable(shape: tuple[int, int, int, int], keys: int, device: torch.device) -> bool:
    """Tell whether one launch can quantise and attend there, as :func:`tune_shape` would ask for it."""
    batch, heads, _, head_dim = shape
    query, key = (torch.empty(size, dtype=torch.float16, device=device) for size in (shape, (batch, heads, keys, head_dim)))
    return one_launch(float_call(query, key, key, None, False, head_dim**-0.5, DEFAULT)).family is not None


def save_table(tiles: dict[str, Tiles], about: dict[str, object]) -> pathlib.Path:
    """Add to the table (entries of other devices stay) and use it from now on; returns its path.

    Raises:
        OSError: it cannot be written.
    """
    make_cache_folder()
    tuning_table.read_table.cache_clear()  # what another process has added
    merged = {**tuning_table.read_table(), **tiles}
    path = tuning_table.table_path()
    write_whole(
        path,
        json.dumps(
            {
                "about": about,
                "kernels": tuning_table.KERNELS_VERSION,
                "tiles": {key: list(entry) for key, entry in merged.items()},
            },
            indent=1,
        )
        + "\n",
    )
    tuning_table.read_table.cache_clear()
    return path


def run_tune(problems: Sequence[bench_problems.Problem], device: torch.device) -> list[dict[str, Any]]:
    """Measure every problem, int8 and (where one launch can do it) fused; keep what won; return the rows.

    Raises:
        ValueError: ``device`` is not a CUDA device.
        OSError: what won cannot be kept.
    """
    if device.type != "cuda":
        raise ValueError(f"device must be a CUDA device, got {device}: tiles are for the GPU kernels")
    make_cache_folder()  # before the time is spent
    from rich.progress import Progress

    name = torch.cuda.get_device_name(device)
    found: dict[str, Tiles] = {}
    rows: list[dict[str, Any]] = []
    with Progress(transient=True) as progress:
        task = progress.add_task("tune", total=None)
        for problem in problems:
            windows_batch, heads, queries, head_dim = problem.shape
            for fused in (False, True):
                if fused and not _fusable(problem.shape, problem.keys, device):
                    continue
                progress.update(task, description=f"{'x'.join(map(str, problem.shape))} {'fused' if fused else 'int8'}")
                rule, best, before, after = tune_shape(
                    problem.shape, problem.keys, fused=fused, device=device, tick=lambda: progress.advance(task)
                )
                if best != rule:
                    load = windows_batch * heads
                    about = AttentionShape(DEFAULT, head_dim, head_dim, queries, problem.keys, load, fused)
                    found[table_key(name, about)] = best
                shape = "x".join(map(str, problem.shape))
                kernel = "fused" if fused else "int8"
                times = {col.RULE_US: round(before, 3), col.BEST_US: round(after, 3)}
                rows.append({col.SHAPE: shape, "kernel": kernel, col.RULE: list(rule), col.BEST: list(best)} | times)
    origin: dict[str, object] = {"device": name, "torch": torch.__version__, "date": datetime.date.today().isoformat()}
    save_table(found, origin)
    return rows
