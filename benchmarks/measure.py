"""Measure what docs/performance/tables.md says about attention: every ``qflash-lab bench`` that it needs, on this machine.

``python benchmarks/measure.py FOLDER`` writes a JSON and a CSV file a run, named after it and the GPU; the committed ones lie
in ``benchmarks/results``. Kernels are compiled by several processes first, which one process would do one after the other.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track

import pages
from qflash_lab.bench import schema as col
from qflash_lab.bench.problems import LONG
from qflash_lab.bench.workloads import WORKLOADS

# those that have a bias
WINDOWS = ("A4", "A5", "A6", "A7")
# heads, tokens, channels of the models in the tables of other vision transformers
MODELS = (
    "16,257,64", "12,261,64", "12,401,64", "12,577,64", "16,577,64", "12,785,64", "12,1025,64", "12,1370,64",
    "16,256,72", "16,729,72", "16,257,80", "16,577,80",
)  # fmt: skip

# whose eager calls are timed: images, heads, tokens, channels of small and of large calls
CALLED = ("8,6,197,64", "64,3,49,32", "1,12,577,64", "1,12,1024,64", "1,12,2048,64", "1,16,1024,128")


@dataclasses.dataclass(frozen=True)
class Run:
    """One call of ``qflash-lab bench``; all but ``name`` are its options. No methods are all of them."""

    name: str
    workloads: tuple[str, ...] = ()
    batches: tuple[int, ...] = (1, 8, 64)
    shapes: tuple[str, ...] = ()
    methods: tuple[str, ...] = (*col.FP16, *col.BASELINES, *col.OURS)
    modes: tuple[str, ...] = ("kernel", "end-to-end")
    bias: bool = False
    rounds: int = 15
    device: str = "cuda"
    dtype: str | None = None
    peers: tuple[str, ...] = ()

    def options(self) -> list[str]:
        """Return the command line behind ``qflash-lab bench``."""
        several = {
            "--workload": self.workloads,
            "--batch": map(str, self.batches),
            "--shape": self.shapes,
            "--method": self.methods,
            "--mode": self.modes,
            "--peer": self.peers,
            "--dtype": (self.dtype,) if self.dtype else (),
        }
        options = [word for name, values in several.items() for value in values for word in (name, value)]
        return [*options, *(["--bias"] if self.bias else []), "--rounds", str(self.rounds), "--device", self.device]

    def parts(self) -> list[Run]:
        """Return the run workload by workload and shape by shape, to compile for; what others compiled is left out."""
        compiled = tuple(name for name in self.methods if name not in (*col.FP16, *NOT_COMPILED))
        alone = dataclasses.replace(self, workloads=(), shapes=(), methods=compiled, rounds=1)
        parts = [dataclasses.replace(alone, workloads=(name,)) for name in self.workloads]
        return parts + [dataclasses.replace(alone, shapes=(shape,)) for shape in self.shapes]


NOT_COMPILED = tuple(name for name in col.PEERS if name != col.SAGE)
"""Peers whose kernels come as machine code."""


def _long(least: int, most: int) -> tuple[str, ...]:
    """Return the long rows of so many keys."""
    return tuple(",".join(map(str, shape)) for shape in LONG if least <= shape[2] <= most)


RUNS = (
    Run("bench", tuple(workload.name for workload in WORKLOADS)),
    Run("bench_bias", WINDOWS, methods=(col.SDPA_CUDNN, col.SDPA_EFFICIENT, *col.OURS), bias=True),
    Run("bench_1024", shapes=_long(1024, 1024)),
    Run("bench_long", shapes=_long(4096, 16384)),
    Run(
        "shapes",
        shapes=tuple(f"{images},{model}" for images in (1, 8, 64) for model in MODELS),
        methods=(*col.FP16, col.INT_FLASH_FULL, col.QATTN, *col.OURS),
        rounds=9,
    ),
    # int8 in, int8 out has an eager call only where there are kernels
    Run("bench_eager", ("A2",), batches=(8,), methods=(), modes=("kernel", "end-to-end", "eager")),
    Run("eager_shapes", shapes=CALLED, methods=(*col.FP16, *col.OURS), modes=("kernel", "end-to-end", "eager")),
)
"""Under the names that ``performance_tables.py`` reads, behind which the card stands there."""

# images, heads, tokens, channels of models and of long rows that show where 16-bit kernels for Hopper alone are ahead
HOPPER = (
    "8,6,197,64", "64,12,197,64", "1,16,577,64", "8,16,577,64", "64,16,577,64", "64,16,729,72", "1,12,1370,64",
    "1,16,1374,64", "8,16,1374,64", "8,16,1024,80", "8,16,1024,128", "4,16,4096,64", "4,16,4096,80", "1,24,4608,128",
    "1,16,16384,64", "1,16,16384,128",
)  # fmt: skip
_FLOAT_PEERS, _FLOAT8 = (col.FA3, col.FA3_SPLIT, col.SAGE), (col.FA3_FLOAT8, col.CUDNN_FLOAT8)
_BESIDE_PEERS = Run("peers", tuple(workload.name for workload in WORKLOADS), shapes=HOPPER)
PEER_RUNS = (
    *(
        dataclasses.replace(
            _BESIDE_PEERS,
            name=f"peers_{dtype}",
            methods=(*col.FP16, *_FLOAT_PEERS, col.FA3_FLOAT8, *col.OURS),
            dtype=dtype,
            peers=(*_FLOAT_PEERS, col.FA3_FLOAT8),
        )
        for dtype in ("float16", "bfloat16")
    ),
    dataclasses.replace(
        _BESIDE_PEERS, name="peers_float8", methods=(*_FLOAT8, col.QFLASH_INT8), modes=("kernel",), peers=_FLOAT8
    ),
)
"""Beside packages that a machine may lack; measured where they are asked for."""

CPU_RUN = Run(
    "cpu",
    tuple(workload.name for workload in WORKLOADS),
    batches=(1, 8),
    shapes=("2,8,1024,64", "1,8,4096,64", "1,4,4096,128"),
    methods=(col.SDPA, f"{col.QFLASH_INT8} cpu", f"{col.QFLASH} cpu", f"{col.QFLASH} reference"),
    rounds=9,
    device="cpu",
)
"""What the tables of CPUs show; measured where it is asked for."""
ALL_RUNS = (*RUNS, *PEER_RUNS, CPU_RUN)


def card_of(device: str) -> str:
    """Return what files' names have for a GPU: ``h100`` for ``NVIDIA H100 80GB HBM3``."""
    return pages.card(device).lower()


def bench(run: Run, folder: Path, printed: int | None = None) -> int:
    """Call ``qflash-lab bench`` in a process of its own, printing here or to ``printed``; return its exit status."""
    command = [sys.executable, "-m", "qflash_lab", "bench", *run.options(), "--output", str(folder)]
    return subprocess.run(command, stdout=printed, stderr=subprocess.STDOUT).returncode


def compile_for(runs: Sequence[Run], processes: int, console: Console) -> None:
    """Have every kernel compiled and kept by Triton; a part that fails says why when it is timed."""
    parts = [part for run in runs for part in run.parts()]
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(processes) as pool:
        under_way = [pool.submit(bench, part, Path(folder, str(i)), subprocess.DEVNULL) for i, part in enumerate(parts)]
        done = concurrent.futures.as_completed(under_way)
        for part in track(done, f"Compiling, {processes} at a time", total=len(parts), console=console):
            part.result()


def main(output: Path, runs: Sequence[Run], processes: int) -> int:
    """Compile, then measure one run after the other; return the number of those that failed."""
    console = Console(stderr=True)
    if processes > 1:
        compile_for(runs, processes, console)
    output.mkdir(parents=True, exist_ok=True)
    card = card_of(torch.cuda.get_device_name()) if torch.cuda.is_available() else "cpu"
    failed = 0
    for run in runs:
        console.print(f"[bold]{run.name}[/bold]")
        name = run.name if run is CPU_RUN else f"{run.name}_{card}"
        part = output / f"{name}.part"  # stays, with the rows so far, where the run is cut short
        if bench(run, part) != 0:
            failed += 1
            continue
        for kind in ("json", "csv"):
            shutil.move(part / f"bench.{kind}", output / f"{name}.{kind}")
        shutil.rmtree(part)
    return failed


def make_parser(description: str) -> argparse.ArgumentParser:
    """Return a parser of what programs take that measure :data:`RUNS`: a folder, some runs, and processes to compile with."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("output", type=Path, metavar="FOLDER", help="where the results go")
    parser.add_argument("--run", action="append", choices=[run.name for run in ALL_RUNS], help="only this; repeatable")
    parser.add_argument(
        "--processes", type=int, default=min(16, os.cpu_count() or 1), help="that compile side by side; 1: none beforehand"
    )
    return parser


def parse(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, list[Run]]:
    """Return the arguments of such a program and the runs that they choose; end it if they cannot be used here."""
    arguments = parser.parse_args()
    if arguments.processes < 1:
        parser.error(f"--processes must be at least 1, got {arguments.processes}")
    chosen = [run for run in ALL_RUNS if (run.name in arguments.run if arguments.run else run in RUNS)]
    if not torch.cuda.is_available() and any(run.device == "cuda" for run in chosen):
        parser.error("it measures a GPU, and PyTorch finds none; on a CPU it measures --run cpu")
    return arguments, chosen


if __name__ == "__main__":
    arguments, chosen = parse(make_parser(__doc__.splitlines()[0]))
    sys.exit(1 if main(arguments.output, chosen, arguments.processes) else 0)
