"""Two revisions of QFlash timed in one run, alternating: ``qflash-lab bench --base REF`` and ``qflash-lab models --base REF``.

Each revision has processes of its own, with its package first on the path, that run :mod:`qflash_lab.bench.revision_worker`.
This process draws the inputs and judges the outputs; it times nothing. In every round one process of either revision takes
a sample, the first one alternating, so that both meet the same state of the machine; a ratio is that of the two samples of a
round.
"""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import json
import pathlib
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import qflash
from qflash.paths import with_package

from . import latency, report, runner, tables
from . import models as timed_models
from . import schema as col
from .console import progress_bar
from .errors import describe
from .methods import PER_TENSOR, check_recipes
from .metrics import sqnr
from .problems import Problem, as_tensor, check_input, exact_part, make_inputs
from .schema import Row
from .timers import tidy

PACKAGE = pathlib.Path(qflash.__file__).resolve().parent
_START = """
import os, runpy, sys
script, sys.argv[1:] = sys.argv[1], [str(os.dup(1))]
os.dup2(2, 1)
sys.path[:] = filter(None, sys.path)
runpy.run_path(script, run_name="__main__")
"""
"""Runs the worker with no working folder on the path: it answers on standard output, other prints go to standard error."""

_RESULTS = (
    col.BASE_US, col.NEW_US, col.RATIO, col.RATIO_Q1, col.RATIO_Q3, col.SAMPLES, col.SAME_BITS, col.BASE_SQNR_DB,
    col.NEW_SQNR_DB, col.SQNR_OF, col.ERROR,
)  # fmt: skip

PROCESSES = 3
"""Processes of either revision. One may be slower than another with the same code for as long as it lives, for instance by
where its memory lies (18 % on a CPU); a single one would not show it. Odd, so that all processes come first equally often."""

FIELDS = col.pick(*col.PROBLEM, col.MODE, col.RECIPE, *_RESULTS)
"""Columns of ``revisions.csv``; ``same_bits``: whether both revisions returned the same."""

MODEL_FIELDS = col.pick(col.MODEL, col.BATCH, col.DTYPE, col.METHOD, *_RESULTS)
"""Columns of ``models_revisions.csv``."""


class RevisionError(RuntimeError):
    """A revision cannot be timed, or cannot do what it is asked for; the message says why."""


def _git(folder: pathlib.Path, *arguments: str) -> bytes:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, check=False)
    except FileNotFoundError as error:
        raise ValueError("there is no git here; a folder that holds the package does as well") from error
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise ValueError(lines[-1] if lines else f"git {arguments[0]} failed")
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
        prefix = _git(PACKAGE, "rev-parse", "--show-prefix").decode().strip()
        root = pathlib.Path(_git(PACKAGE, "rev-parse", "--show-toplevel").decode().strip())
        commit = _git(root, "rev-parse", "--verify", "--end-of-options", f"{base}^{{commit}}").decode().strip()
        packed = _git(root, "archive", "--format=tar", f"{commit}:{prefix.rstrip('/')}")
    except ValueError as error:
        raise ValueError(
            f"base must be a git revision with {PACKAGE.name} where it is now, or a folder that holds the package, got "
            f"{base!r}: {error}"
        ) from error
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        safe: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        archive.extractall(folder / PACKAGE.name, **safe)
    return folder, commit[:10]


def name_running() -> str:
    """Return the commit of the package that runs, and whether it has changes; its folder where git does not know it."""
    try:
        _git(PACKAGE, "ls-files", "--error-unmatch", "__init__.py")
        commit = _git(PACKAGE, "rev-parse", "HEAD").decode().strip()[:10]
        return commit + " with changes" * bool(_git(PACKAGE, "status", "--porcelain", "--", "."))
    except ValueError:
        return str(PACKAGE)


class Worker:
    """A process that times one revision.

    Attributes:
        name: the revision's, for messages.
    """

    def __init__(self, folder: pathlib.Path, name: str) -> None:
        """Start it.

        Args:
            folder: holds the package.
            name: what the revision is called.
        """
        self.name = name
        script = pathlib.Path(__file__).with_name("revision_worker.py")
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            encoding="utf-8", env=with_package(folder),
        )  # fmt: skip

    def ask(self, do: str, **order: Any) -> dict[str, Any]:
        """Return the answer to an order.

        Raises:
            RevisionError: the revision cannot do it, or its process has ended; the message says why.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps({"do": do, **order}), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise RevisionError(f"{self.name}: the process that times it ended with status {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RevisionError(f"{self.name}: {answer['error']}")
        return answer

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


class Side:
    """The processes of one revision, sampled one after the other."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._turns = itertools.cycle(workers)

    def sample(self) -> float:
        """Return the microseconds of one call, by the next process."""
        us: float = next(self._turns).ask("sample")["us"]
        return us


class Comparison:
    """Both revisions, ready to be timed on inputs that are handed over in files.

    Attributes:
        base, new: the processes of either revision, as many of one as of the other.
        device: where they run.
        rounds: samples of either.
    """

    def __init__(
        self, base: Sequence[Worker], new: Sequence[Worker], folder: pathlib.Path, device: torch.device, rounds: int
    ) -> None:
        self.base, self.new = base, new
        self._folder, self.device, self.rounds = folder, device, rounds

    def give(self, **inputs: Any) -> None:
        """Write what the calls that are timed next work on."""
        torch.save(inputs, self._folder / "inputs.pt")

    def compare(self, judge: Callable[[torch.Tensor], float], **order: Any) -> dict[str, Any]:
        """Time both revisions on the inputs given last, in alternation.

        Args:
            judge: returns the SQNR of an output.
            order: what to time, for :mod:`qflash_lab.bench.revision_worker`.

        Returns:
            the fields of a row that hold results; ``error`` where a revision failed.
        """
        row: Row = {}
        failed = []
        outputs = []
        for column, workers in ((col.BASE_SQNR_DB, self.base), (col.NEW_SQNR_DB, self.new)):
            path = self._folder / "output.pt"
            paths = {"inputs": str(self._folder / "inputs.pt"), "output": str(path)}
            try:
                for worker in workers:
                    worker.ask("prepare", **order, **paths, device=str(self.device))
                outputs.append(torch.load(path))
                row[column] = round(judge(outputs[-1].to(self.device)), 2)
            except Exception as error:
                failed.append(str(error) if isinstance(error, RevisionError) else f"{workers[0].name}: {describe(error)}")
        try:
            if failed:
                return row | {col.ERROR: "; ".join(failed)}
            row[col.SAME_BITS] = torch.equal(*outputs)
            return row | self._by_turns()
        except RevisionError as error:
            return row | {col.ERROR: str(error)}
        finally:
            for worker in (*self.base, *self.new):
                with contextlib.suppress(RevisionError):  # the next order says so
                    worker.ask("forget")

    def _by_turns(self) -> Row:
        sides = {"base": Side(self.base), "new": Side(self.new)}
        times: dict[str, list[float]] = runner.by_turns(sides, self.rounds, self.device)
        # one may have got a sample more
        ratios = [new / base for base, new in zip(times["base"], times["new"], strict=False)]
        quartiles = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
        return {
            col.BASE_US: round(statistics.median(times["base"]), 3),
            col.NEW_US: round(statistics.median(times["new"]), 3),
            col.RATIO: round(quartiles[1], 4),
            col.RATIO_Q1: round(quartiles[0], 4),
            col.RATIO_Q3: round(quartiles[2], 4),
            col.SAMPLES: len(ratios),
        }


@contextlib.contextmanager
def start_comparison(base: str, device: torch.device, rounds: int, processes: int = PROCESSES) -> Iterator[Comparison]:
    """Start processes for the revision ``base`` and as many for this package.

    Args:
        base: see :func:`export`.
        device: where they run.
        rounds: samples a revision.
        processes: of either revision; fewer if there are fewer rounds.

    Raises:
        ValueError: see :func:`export`.
        RevisionError: a process did not start, or imports another package than it should.
    """
    with tempfile.TemporaryDirectory() as made, contextlib.ExitStack() as stack:
        scratch = pathlib.Path(made)
        folder, name = export(base, scratch / "base")
        sides: list[list[Worker]] = []
        for place, called in ((folder, name), (PACKAGE.parent, "new")):
            sides.append([])
            for _ in range(min(processes, rounds)):
                sides[-1].append(Worker(place, called))
                stack.callback(sides[-1][-1].close)
        for place, workers in zip((folder, PACKAGE.parent), sides, strict=True):
            for worker in workers:
                found = pathlib.Path(worker.ask("about", threads=torch.get_num_threads())["package"]).resolve()
                if found != (place / PACKAGE.name).resolve():
                    raise RevisionError(f"{worker.name}: Python imports qflash from {found}, not from {place}")
        yield Comparison(sides[0], sides[1], scratch, device, rounds)


def recipe_order(name: str) -> dict[str, Any]:
    """Return a recipe in the words of an order: a preset, which each revision defines, and changes to it."""
    return {"recipe": "default", "changes": PER_TENSOR} if name == "per-tensor" else {"recipe": name, "changes": {}}


def timing_method(device: torch.device, rounds: int) -> str:
    """Say in words how times are taken."""
    if device.type == "cuda":
        how = "device time by CUDA events around the replay of a CUDA graph; eager: wall time until the call is issued"
        many = f"{rounds}"
    else:
        how = f"wall clock on the CPU, {torch.get_num_threads()} threads"
        many = f"up to {rounds}"
    return (
        f"{how}; up to {PROCESSES} processes a revision, samples alternate (order reversed every round), never at once; ratio: "
        f"new ÷ base in a round, median and quartiles of {many} rounds, below 1 the new one is faster"
    )


TABLE = (
    tables.Column("base µs", col.BASE_US),
    tables.Column("new µs", col.NEW_US),
    tables.Column("new ÷ base", col.RATIO, ".3f"),
    tables.Column("quartiles", tables.between(col.RATIO_Q1, col.RATIO_Q3, 3)),
    tables.Column("same bits", col.SAME_BITS, lambda same: "-" if same is None else "yes" if same else "no"),
    tables.Column("base SQNR dB", col.BASE_SQNR_DB),
    tables.Column("new SQNR dB", col.NEW_SQNR_DB),
)
"""Of the tables on the console, behind what tells the rows apart."""


def _report(name: str, what: str, both: Comparison, fields: Sequence[str], output: pathlib.Path | None) -> report.Report:
    done = report.Report(
        name, what, both.device, fields, output,
        base=both.base[0].name, new=name_running(), timing=timing_method(both.device, both.rounds),
        sqnr="20 log10(|ref| / |out - ref|) against float attention on the same inputs",
    )  # fmt: skip
    done.begin()
    return done


def _finish(done: report.Report, *about: tables.Column) -> dict[str, Any]:
    title = f"QFlash {done.record['new']} (new) against {done.record['base']} (base)"
    record = done.finish(tables.render(done.rows, (*about, *TABLE), title))
    ratios = [row[col.RATIO] for row in done.rows if row[col.ERROR] is None]
    if ratios:
        done.console.print(f"Geometric mean of {len(ratios)} ratios: {statistics.geometric_mean(ratios):.4f}")
    return record


def _check(recipes: Sequence[str], rounds: int) -> None:
    check_recipes(recipes)
    runner.check_rounds(rounds)


@torch.inference_mode()
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
        problems, kind, dtype, device, output: as of :func:`qflash_lab.bench.latency.run_bench`.
        base: see :func:`export`.
        modes: ``"kernel"``, ``"end-to-end"`` or ``"eager"`` (on a GPU until the call is issued).
        recipes: keys of :data:`qflash_lab.bench.methods.RECIPES`; each revision uses its own preset of that name.
        rounds: samples a revision.

    Returns:
        what ``revisions.json`` holds.

    Raises:
        ValueError: an unknown mode, recipe or revision, or fewer than one round.
        RevisionError: a process for a revision did not start.
    """
    for mode in modes:
        if mode not in latency.MODES:
            raise ValueError(f"mode must be one of {latency.MODES}, got {mode!r}")
    check_input(kind)
    _check(recipes, rounds)
    # on int8 tensors, per-tensor would be the default recipe again
    cases = [pair for pair in itertools.product(modes, recipes) if pair != ("kernel", "per-tensor")]
    with start_comparison(base, device, rounds) as both, progress_bar(len(problems) * len(cases)) as tick:
        done = _report("revisions", "two revisions of QFlash's attention", both, FIELDS, output)
        for problem in problems:
            known = latency.problem_row(problem, FIELDS, kind, dtype)
            for mode, recipe, found in _attention_rows(both, problem, cases, kind, dtype, device):
                done.add([known | {col.MODE: mode, col.RECIPE: recipe} | found])
                tick(f"{problem.label} {mode} {recipe}")
    return _finish(
        done, tables.names("workload", col.problem_label), tables.names("batch", lambda row: row[col.BATCH] or "-"),
        tables.names("mode", col.MODE), tables.names("recipe", col.RECIPE),
    )  # fmt: skip


def _attention_rows(
    both: Comparison, problem: Problem, cases: Sequence[tuple[str, str]], kind: str, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, str, Row]]:
    """Yield each mode and recipe with what both revisions do on one problem."""
    try:
        inputs = make_inputs(problem, kind, dtype, device)
        wanted, part, words = exact_part(inputs)
        query, key, value = inputs.nested()
        both.give(query=query, key=key, value=value, bias=inputs.bias)
    except Exception as error:  # inputs or reference did not fit
        tidy(device)
        for mode, recipe in cases:
            yield mode, recipe, {col.ERROR: describe(error)}
        return
    del inputs, query, key, value
    tidy(device)

    def judge(out: torch.Tensor) -> float:
        return sqnr(wanted, as_tensor(out, problem)[part])

    for mode, recipe in cases:
        order = {"what": "attention", "mode": mode, "causal": problem.causal, **recipe_order(recipe)}
        yield mode, recipe, both.compare(judge, **order) | {col.SQNR_OF: words}


@torch.inference_mode()
def run_model_revisions(
    names: Sequence[str],
    batches: Sequence[int],
    base: str,
    *,
    recipes: Sequence[str],
    dtype: torch.dtype,
    device: torch.device,
    rounds: int,
    pretrained: bool = False,
    image_size: int | None = None,
    output: pathlib.Path | None = None,
) -> dict[str, Any]:
    """Compare whole models with this package and another revision; write ``models_revisions.json`` and ``.csv``.

    Args and errors as of :func:`run_revisions` and :func:`qflash_lab.bench.models.run_models`.

    Returns:
        what ``models_revisions.json`` holds.
    """
    _check(recipes, rounds)
    loaded = timed_models.load_patchable(names, pretrained, image_size)
    variants = timed_models.own_variants(recipes)
    cases = {
        name: [method for method in variants if timed_models.applies(method, model)] for name, (model, _) in loaded.items()
    }
    jobs = len(batches) * sum(map(len, cases.values()))
    with start_comparison(base, device, rounds) as both, progress_bar(jobs) as tick:
        done = _report("models_revisions", "whole models with two revisions of QFlash", both, MODEL_FIELDS, output)
        for (name, (model, size)), batch in itertools.product(loaded.items(), batches):
            kind = str(dtype).removeprefix("torch.")
            images = timed_models.draw_images(batch, size, device)
            with sdpa_kernel(SDPBackend.MATH):
                wanted = copy.deepcopy(model).to(device)(images)
            plain, images = timed_models.without_qflash(model, images)
            both.give(model=plain, images=images.cpu())
            for method in cases[name]:
                recipe, keep_bias = variants[method]
                order = {"what": "model", "mode": "end-to-end", "dtype": kind, "keep_bias": keep_bias}
                found = both.compare(lambda out, wanted=wanted: sqnr(wanted, out), **order, **recipe_order(recipe))  # type: ignore[misc]
                row = col.empty(MODEL_FIELDS, model=name, batch=batch, dtype=kind, method=method, sqnr_of="logits")
                done.add([row | found])
                tick(f"{name} b{batch} {method}")
    return _finish(done, tables.names("model", col.MODEL), tables.names("batch", col.BATCH), tables.names("method", col.METHOD))
