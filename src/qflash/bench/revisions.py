"""Two revisions of QFlash timed in one run, by turns: ``qflash bench --base REF``.

Each revision has a process of its own, with its package first on the path, that runs :mod:`.bench.revision_worker`. In every
round both take a sample, in alternating order, so that both meet the same state of the machine; a ratio is that of the two
samples of a round.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from rich.table import Table

from .console import progress_bar, table_console
from .latency import MODES
from .problems import Problem, check_input
from .records import environment, write_csv, write_json

PACKAGE = pathlib.Path(__file__).resolve().parents[1]
FIELDS = (
    "workload", "batch", "shape", "keys", "causal", "bias", "input", "dtype", "mode", "recipe", "base_us", "new_us", "ratio",
    "ratio_q1", "ratio_q3", "samples", "error",
)  # fmt: skip


def _git(folder: str, *arguments: str) -> bytes:
    try:
        done = subprocess.run(["git", "-C", folder, *arguments], capture_output=True, check=False)
    except FileNotFoundError as error:
        raise ValueError(
            "--base takes a git revision, and there is no git here; a folder with the package does, too"
        ) from error
    if done.returncode:
        raise ValueError(done.stderr.decode(errors="replace").strip().splitlines()[-1])
    return done.stdout


def export(base: str, folder: pathlib.Path) -> tuple[pathlib.Path, str]:
    """Return a folder that holds the package of a revision, and the revision's name.

    Args:
        base: a git revision of the repository that this package lies in, or a folder that holds a package ``qflash``.
        folder: empty; what git gives goes there.

    Raises:
        ValueError: neither; the message says why.
    """
    given = pathlib.Path(base)
    if (given / "qflash" / "__init__.py").is_file():
        return given.resolve(), str(given)
    try:
        root, prefix = _git(str(PACKAGE), "rev-parse", "--show-toplevel", "--show-prefix").decode().splitlines()
        commit = _git(root, "rev-parse", "--verify", "--end-of-options", f"{base}^{{commit}}").decode().strip()
        packed = _git(root, "archive", "--format=tar", f"{commit}:{prefix.rstrip('/')}")
    except (ValueError, IndexError) as error:
        raise ValueError(
            f"base must be a git revision with {PACKAGE.name} where it is now, or a folder that holds the package, got {base!r}"
            + (f": {error}" if isinstance(error, ValueError) else "")
        ) from error
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        safe: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        archive.extractall(folder / PACKAGE.name, **safe)
    return folder, commit[:10]


class Worker:
    """A process that times one revision."""

    def __init__(self, folder: pathlib.Path) -> None:
        """Start it.

        Args:
            folder: holds the package.
        """
        code = pathlib.Path(__file__).with_name("revision_worker.py").read_text(encoding="utf-8")
        path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH", ""))))
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | {"PYTHONPATH": path},
        )  # fmt: skip

    def ask(self, **order: Any) -> dict[str, Any]:
        """Return the answer to an order.

        Raises:
            RuntimeError: the revision cannot do it, or its process has ended; the message says why.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(order), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process that times a revision ended with status {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@contextlib.contextmanager
def _workers(base: str) -> Iterator[tuple[Worker, Worker, str]]:
    """Start a process for the base and one for this package."""
    with tempfile.TemporaryDirectory() as made, contextlib.ExitStack() as stack:
        folder, name = export(base, pathlib.Path(made))
        pair = []
        for place in (folder, PACKAGE.parent):
            worker = Worker(place)
            stack.callback(worker.close)
            found = pathlib.Path(worker.ask(do="name")["package"]).resolve()
            if found != (place / PACKAGE.name).resolve():
                raise RuntimeError(f"Python imports qflash from {found}, not from {place}")
            pair.append(worker)
        yield pair[0], pair[1], name


def _compare(base: Worker, new: Worker, order: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Time both revisions on one problem in one mode, by turns."""
    for worker in (base, new):
        worker.ask(do="prepare", **order)
    times: dict[Worker, list[float]] = {base: [], new: []}
    for index in range(rounds):
        for worker in (base, new) if index % 2 == 0 else (new, base):
            times[worker].append(worker.ask(do="sample")["us"])
    ratios = [after / before for before, after in zip(times[base], times[new], strict=True)]
    quartiles = statistics.quantiles(ratios, n=4) if rounds > 1 else [ratios[0]] * 3
    return {
        "base_us": round(statistics.median(times[base]), 3),
        "new_us": round(statistics.median(times[new]), 3),
        "ratio": round(statistics.median(ratios), 4),
        "ratio_q1": round(quartiles[0], 4),
        "ratio_q3": round(quartiles[2], 4),
        "samples": rounds,
    }


def render(rows: Sequence[dict[str, Any]], name: str) -> Table:
    """Return the table of a comparison; a ratio below 1 is faster than the base."""
    table = Table(title=f"QFlash now against {name}; microseconds, below 1 is faster")
    for column in ("problem", "batch", "mode", "recipe"):
        table.add_column(column)
    for column in (name, "now", "ratio", "quartiles"):
        table.add_column(column, justify="right")
    for row in rows:
        label = row["workload"] + " causal" * row["causal"] + " bias" * row["bias"]
        about = (label, str(row["batch"] or ""), row["mode"], row["recipe"])
        if row["error"]:
            table.add_row(*about, "-", "-", "-", row["error"])
            continue
        numbers = (f"{row['base_us']:.2f}", f"{row['new_us']:.2f}", f"{row['ratio']:.3f}")
        table.add_row(*about, *numbers, f"{row['ratio_q1']:.3f} to {row['ratio_q3']:.3f}")
    return table


def run_revisions(
    problems: Sequence[Problem],
    base: str,
    *,
    modes: Sequence[str],
    recipes: Sequence[str],
    kind: str,
    dtype: torch.dtype,
    device: torch.device,
    rounds: int,
    output: pathlib.Path | None = None,
) -> dict[str, Any]:
    """Compare this package with another revision of it; print the table, write ``revisions.json`` and ``.csv``.

    Args:
        problems: see :func:`.problems.make_problems`.
        base: see :func:`export`.
        modes: ``"kernel"``, ``"end-to-end"`` or ``"eager"`` (until the call is issued).
        recipes: presets.

    Returns:
        what ``revisions.json`` holds.

    Raises:
        ValueError: an unknown mode or revision, or fewer than one round.
        RuntimeError: a process for a revision did not start.
    """
    for mode in modes:
        if mode not in MODES:
            raise ValueError(f"mode must be one of {MODES}, got {mode!r}")
    check_input(kind)
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    console = table_console()
    rows: list[dict[str, Any]] = []
    with _workers(base) as (before, now, name):
        record: dict[str, Any] = {
            "what": "two revisions of QFlash by turns, a process each; ratio: now by base, of the samples of a round",
            "base": name,
            "environment": environment(device),
            "rows": rows,
        }
        with progress_bar(len(problems) * len(modes) * len(recipes)) as tick:
            for problem in problems:
                for mode, recipe in ((mode, recipe) for mode in modes for recipe in recipes):
                    rows.append(_row(before, now, problem, mode, recipe, kind, dtype, device, rounds))
                    tick(f"{problem.label} {mode}")
                    if output is not None:
                        write_json(output / "revisions.json", record)
                        write_csv(output / "revisions.csv", rows, FIELDS)
    console.print(render(rows, name))
    ratios = [row["ratio"] for row in rows if row["error"] is None]
    if ratios:
        console.print(f"Geometric mean of {len(ratios)} ratios: {statistics.geometric_mean(ratios):.4f}")
    return record


def _row(
    before: Worker, now: Worker, problem: Problem, mode: str, recipe: str, kind: str, dtype: torch.dtype, device: torch.device,
    rounds: int,
) -> dict[str, Any]:  # fmt: skip
    name = str(dtype).removeprefix("torch.")
    row: dict[str, Any] = dict.fromkeys(FIELDS) | {
        "workload": problem.workload, "batch": problem.batch, "shape": "x".join(map(str, problem.shape)),
        "keys": problem.keys, "causal": problem.causal, "bias": problem.bias, "input": kind, "dtype": name, "mode": mode,
        "recipe": recipe,
    }  # fmt: skip
    order = {
        "shape": problem.shape, "keys": problem.keys, "windows": problem.windows, "causal": problem.causal,
        "bias": problem.bias, "inputs": kind, "dtype": name, "device": str(device), "mode": mode, "recipe": recipe,
    }  # fmt: skip
    try:
        return row | _compare(before, now, order, rounds)
    except RuntimeError as error:
        return row | {"error": str(error)}
