"""Proof by disassembly: kernels of int8 attention and of integer networks hold no floating-point instruction.

Every case is compiled for each target architecture without a GPU: an operator's own code is run on tensors without memory,
which spells out its launches (:func:`launches`), and Triton's JIT is given a driver that only knows the target. The machine
code is then disassembled (:mod:`.verify.sass`) with the tools that ship inside Triton's package, and counted.

Cases are a list with names of their own (:data:`CASES`) and whatever else the operators launch in the calls of :func:`calls`,
once for everything that Triton compiles apart (:func:`signature`).

Kernels that read or write floats hold float instructions by nature. They are compiled and read, too, for what the assembler
was seen to get wrong: products that read the next block's queries (:func:`early_operands`), and accesses outside shared
memory (:mod:`.verify.shared_memory`).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import multiprocessing
import os
import pathlib
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from rich.table import Table

from qflash.kernels.launch_recorder import KernelLaunch, each_argument

from .cases import CASES, AnyCase, calls, distinct_cases, fits_pattern, kernel_call, may_fit_pattern
from .compile import TARGETS, compile_call
from .sass import (
    DisassemblyError,
    Instruction,
    disassemble,
    disassemblers,
    hot_loop_sizes,
    is_constant_move,
    is_float,
    is_tensor_core,
    parse_sass,
    product_loops,
)
from .shared_memory import accesses_outside

_SCALES = ("qs_ptr", "ks_ptr", "vs_ptr", "os_ptr")
"""Float scales, of which a kernel without a float instruction reads the bits."""


class VerificationError(RuntimeError):
    """Verification cannot run here (no Triton, no disassembler, the interpreter is on, an unknown name)."""


def early_operands(instructions: Sequence[Instruction]) -> list[Instruction]:
    """Return products that read registers to which queries of the next block are on their way.

    In the loop over blocks of :mod:`.sm90.attention_resident`, the smallest with loads, products and stores, what is loaded is
    for the next iteration: until something else stands in its registers no product may read them. The assembler of Triton 3.6
    was seen to let them, from PTX that does not, where loads depend on a predicate (heads of 72 channels, a form of the kernel
    not in use).
    """
    wanted = {"LDG", "STG"}
    loops = [body for body in product_loops(instructions) if wanted <= {i.base for i in body}]
    found: list[Instruction] = []
    awaited: set[str] = set()
    for instruction in min(loops, key=len, default=[]):
        others = instruction.operand_list[1:]
        if is_tensor_core(instruction):
            # four registers of int8 are the left operand, unless it lies in shared memory
            left = re.match(r"R(\d+)", others[0])
            if left and awaited & {f"R{int(left[1]) + index}" for index in range(4)}:
                found.append(instruction)
        elif registers := set(instruction.written):
            # a copy is as good as what it is of
            copied = "MOV" in instruction.opcode and awaited & set(re.findall(r"\bR\d+", ",".join(others)))
            awaited = awaited | registers if instruction.base == "LDG" or copied else awaited - registers
    return found


@dataclasses.dataclass(frozen=True)
class Report:
    """What the machine code of one kernel on one target is made of.

    Attributes:
        integer: whether it is to hold no float instruction: it reads and writes no floats but scales.
        float_instructions: each as ``"OPCODE at file:line"`` with its count; empty is what is to be proved.
        constant_moves: HFMA2 that only load a constant.
        tensor_core: the matrix instructions with their counts.
        instructions: all of them, padding left out.
        per_score: instructions per score: of one iteration of the hot loops (all passes), or of the whole kernel
            where one tile holds the row.
        hot_loops: instructions of one iteration of each pass's hot loop; empty for a single tile.
        spills: loads from and stores to local memory (LDL, STL).
        stack: bytes of stack a thread; None without cuobjdump, as ``registers``.
        shared: bytes of shared memory a block.
        error: why there is no machine code, or what else is wrong with it.
    """

    case: str
    target: str
    kernel: str = ""
    tile: str = ""
    warps: int = 0
    stages: int = 0
    integer: bool = True
    float_instructions: dict[str, int] = dataclasses.field(default_factory=dict)
    constant_moves: int = 0
    tensor_core: dict[str, int] = dataclasses.field(default_factory=dict)
    instructions: int = 0
    per_score: float | None = None
    hot_loops: list[int] = dataclasses.field(default_factory=list)
    registers: int | None = None
    spills: int = 0
    stack: int | None = None
    shared: int = 0
    error: str | None = None

    @property
    def float_count(self) -> int:
        """The number of float instructions."""
        return sum(self.float_instructions.values())

    @property
    def passed(self) -> bool:
        """Whether the kernel compiled without an error and, if it is to be of integers, holds no float instruction."""
        return self.error is None and not (self.integer and self.float_count)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields and what follows from them, for JSON."""
        return {**dataclasses.asdict(self), "float_count": self.float_count, "passed": self.passed}


def examine(call: KernelLaunch, name: str, target: str, dump: pathlib.Path | None = None) -> Report:
    """Compile one launch for one target and count its machine code.

    Args:
        call: see :func:`compile_call`.
        name: goes into the report and the names of dumped files.
        target: for instance ``"sm_90"``.
        dump: an existing folder for the PTX and the SASS.
    """
    compiled = compile_call(call, target)
    sass, usage = disassemble(compiled.asm["cubin"])
    if dump is not None:
        (dump / f"{name}.{target}.ptx").write_text(compiled.asm["ptx"])
        (dump / f"{name}.{target}.sass").write_text(sass)
    instructions = parse_sass(sass)
    if not instructions:
        raise VerificationError(f"the disassembler printed no instruction for {name} on {target}")
    warps = compiled.metadata.num_warps
    tile = call.scores
    error = None
    if call.family == "sm90.resident" and (early := early_operands(instructions)):
        error = f"{early[0].opcode} at {early[0].source} takes the next block's queries for this one's"
    if target == "sm_90":
        outside, _ = accesses_outside(instructions, 32 * warps, compiled.metadata.shared)
        if outside:
            error = f"{outside[0].opcode} at {outside[0].source} leaves the block's shared memory"
    scores = tile.queries * tile.keys if tile else 0
    hot = [] if tile and tile.whole else hot_loop_sizes(instructions)
    floats = Counter(f"{i.opcode} at {i.source}" for i in instructions if is_float(i))
    return Report(
        case=name,
        target=target,
        kernel=call.kernel.__name__,
        tile=f"{tile.queries}x{tile.keys}" if tile else "",
        warps=warps,
        stages=compiled.metadata.num_stages,
        integer=not any(
            isinstance(x, torch.Tensor) and x.is_floating_point() and argument not in _SCALES
            for argument, x in each_argument(call.arguments)
        ),
        float_instructions=dict(floats.most_common()),
        constant_moves=sum(map(is_constant_move, instructions)),
        tensor_core=dict(Counter(i.opcode for i in instructions if is_tensor_core(i)).most_common()),
        instructions=len(instructions),
        per_score=round((sum(hot) or len(instructions)) * 32 * warps / scores, 2) if scores else None,
        hot_loops=hot,
        registers=usage.get("reg"),
        spills=sum(i.base in ("LDL", "STL") for i in instructions),
        stack=usage.get("stack"),
        shared=compiled.metadata.shared,
        error=error,
    )


def _examine_case(case: AnyCase, target: str, dump: pathlib.Path | None) -> Report:
    try:
        return examine(kernel_call(case, target), case.name, target, dump)
    except VerificationError:
        raise
    except Exception as error:  # a kernel that does not compile is a finding, and Triton raises anything
        lines = str(error).strip().splitlines() or [""]
        return Report(case.name, target, error=f"{type(error).__name__}: {lines[-1]}"[:300])


def _pick_targets(wanted: Sequence[str]) -> list[str]:
    if unknown := [name for name in wanted if name not in TARGETS]:
        raise VerificationError(f"unknown target {', '.join(unknown)}; known: {', '.join(TARGETS)}")
    return [name for name in TARGETS if not wanted or name in wanted]


def _refuse_pattern(pattern: str) -> VerificationError:
    named = ", ".join(case.name for case in CASES)
    return VerificationError(f"unknown case {pattern}; known: {named}, and others of which '197x64-*' fits some")


def _pick_jobs(patterns: Sequence[str], targets: Sequence[str], apply: Callable[..., Any]) -> list[tuple[AnyCase, str]]:
    """Return (case, target) for what is compiled and has a name that a pattern fits, in the order of the cases.

    Args:
        apply: maps a function over targets, several at a time.
    """
    found = list(apply(functools.partial(distinct_cases, patterns=patterns), targets))
    jobs = [(case, target) for target, cases in zip(targets, found, strict=True) for case in cases]
    for pattern in patterns:
        if not any(fits_pattern(case.name, (pattern,)) for case, _ in jobs):
            raise _refuse_pattern(pattern)
    order = {name: index for index, name in enumerate(dict.fromkeys(case.name for case, _ in jobs))}
    return sorted(jobs, key=lambda job: order[job[0].name])


def sample_size(sample: str, total: int) -> int:
    """Return how many of ``total`` a sample has: a number, as ``"40"``, or a share, as ``"1/40"``; at most all.

    Raises:
        VerificationError: ``sample`` is neither.
    """
    found = re.fullmatch(r"0*([1-9]\d*)(?:/0*([1-9]\d*))?", sample)
    if not found:
        raise VerificationError(f"sample must be a number of launches or a share as 1/40, got {sample!r}")
    return min(total, int(found[1]) if found[2] is None else -(-total * int(found[1]) // int(found[2])))


def draw_sample(every: Sequence[Any], sample: str, seed: int) -> list[Any]:
    """Return a sample, in order; see :func:`sample_size`."""
    drawn = random.Random(seed).sample(range(len(every)), sample_size(sample, len(every)))
    return [every[index] for index in sorted(drawn)]


def verify(
    cases: Sequence[str] = (),
    targets: Sequence[str] = (),
    *,
    dump: pathlib.Path | None = None,
    workers: int | None = None,
    progress: bool = False,
    sample: str | None = None,
    seed: int = 0,
) -> list[Report]:
    """Compile and read every case for every target, in parallel processes.

    Args:
        cases: names, or patterns as a shell's, of :data:`CASES` and of calls (:func:`distinct`); all if empty.
        targets: names from :data:`TARGETS`; all if empty.
        dump: a folder for PTX and SASS, made if missing.
        workers: processes; one per CPU core this process may use if None.
        progress: show a progress bar on standard error.
        sample: only so many of them, or such a share, drawn at random: see :func:`sample_size`.
        seed: what that is drawn with.

    Returns:
        one report per case and target, in that order.

    Raises:
        VerificationError: an unknown name, not a sample, no Triton, no disassembler, or Triton's interpreter is on.
    """
    from qflash.backends import interpreting, triton_missing

    capabilities = _pick_targets(targets)
    names = [case.name for case in (*CASES, *calls())] if cases else []
    for pattern in cases:
        if not any(may_fit_pattern(name, (pattern,)) for name in names):
            raise _refuse_pattern(pattern)
    if sample is not None:
        sample_size(sample, 1)
    if missing := triton_missing():
        raise VerificationError(missing)
    if interpreting():
        raise VerificationError("TRITON_INTERPRET is set, so nothing would be compiled; unset it")
    try:
        disassemblers()
    except DisassemblyError as error:
        raise VerificationError(str(error)) from error
    if dump is not None:
        dump.mkdir(parents=True, exist_ok=True)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    reports: dict[tuple[str, str], Report] = {}
    with contextlib.ExitStack() as stack:
        # a fresh interpreter each: forking after PyTorch has started its threads is asking for deadlocks
        context = multiprocessing.get_context("spawn")
        pool = stack.enter_context(concurrent.futures.ProcessPoolExecutor(workers or cores, context))
        jobs = _pick_jobs(cases, capabilities, pool.map)
        if sample is not None:
            total = len(jobs)
            jobs = draw_sample(jobs, sample, seed)
            print(f"{len(jobs)} of {total} launches, drawn with --seed {seed}", file=sys.stderr)
        advance = stack.enter_context(_progress(len(jobs), progress))
        # the longest compilations first, so that none of them is left over at the end
        running = {
            pool.submit(_examine_case, case, target, dump): (case.name, target)
            for case, target in sorted(jobs, key=lambda job: -job[0].tokens)
        }
        try:
            for future in concurrent.futures.as_completed(running):
                reports[running[future]] = future.result()
                advance(*running[future])
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [reports[case.name, target] for case, target in jobs]


@contextlib.contextmanager
def _progress(total: int, show: bool) -> Iterator[Any]:
    if not show:
        yield lambda *_: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("compiling", total=total)
        yield lambda case, target: bar.update(task, advance=1, description=f"compiled {case} for {target}")


def _float_cell(report: Report) -> str:
    if not report.integer:
        return f"({report.float_count})"
    return f"[red]{report.float_count}[/red]" if report.float_count else "[green]0[/green]"


def render(reports: Sequence[Report]) -> Table:
    """Return the reports as a table for the terminal."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title="Kernels: machine code", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("case", "target", "tile, warps", "products"):
        table.add_column(heading, no_wrap=True)
    for heading in ("float", "moves", "instr.", "a score", "regs", "spills", "shared"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.caption = (
        "float: float instructions, in brackets where a kernel reads or writes floats. moves: HFMA2 that only load a "
        "constant. a score: instructions per score, of an iteration of the loops over keys or, where one tile holds the row, "
        "of the whole kernel. spills: LDL and STL."
    )
    table.caption_justify = "left"
    previous = None
    for report in reports:
        if previous not in (None, report.case):
            table.add_section()
        first = report.case if report.case != previous else ""
        previous = report.case
        if report.error:
            table.add_row(first, report.target, "[red]failed[/red]")
            continue
        table.add_row(
            first,
            report.target,
            f"{report.tile}, {report.warps}",
            ", ".join(sorted({opcode.partition(".")[0] for opcode in report.tensor_core})) or "none",
            _float_cell(report),
            str(report.constant_moves),
            str(report.instructions),
            "" if report.per_score is None else f"{report.per_score:.1f}",
            "?" if report.registers is None else str(report.registers),
            str(report.spills),
            str(report.shared),
        )
    return table
