"""Proof by disassembly: the int8 -> int8 attention kernels hold no floating-point instruction.

Every case is compiled by the launcher's own code path, for each target architecture and without a GPU:
Triton's JIT is given a driver that only knows the target, and the call that
:func:`qflash.kernels.attention.attention_calls` spells out for meta tensors. The machine code is then
disassembled (:mod:`.sass`) with the tools that ship inside Triton's package, and counted.

Only these kernels are looked at. Quantising floats and writing float outputs is float arithmetic by nature.

What the assembler was seen to get wrong is looked for as well: products that read the next block's queries
(:func:`early_operands`), and accesses outside shared memory (:mod:`.addresses`).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import multiprocessing
import os
import pathlib
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from .addresses import accesses_outside
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

if TYPE_CHECKING:
    from rich.table import Table

    from .recipe import Recipe

TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")


class VerificationError(RuntimeError):
    """Verification cannot run here (no Triton, no disassembler, the interpreter is on, an unknown name)."""


# --- what is verified -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    """One attention problem whose int8 -> int8 kernel is compiled and read.

    Attributes:
        name: what ``--case`` takes.
        tokens: queries and keys.
        head_dim: channels of query, key and value.
        recipe: a preset's name; it also sets the granularity of the scales.
        mask: ``"none"``, ``"bool"`` (batch, 1, N, N), ``"bias"`` (1, heads, N, N) or ``"windows"``: a bias of
            (windows, heads, N, N) that repeats over the batch, as Swin's, with aligned rows.
        causal: whether query i sees only keys 0 to i.
        granularity: one granularity for all scales instead of the recipe's.
        key_heads: heads of key and value, fewer than query's 4 for grouped queries.
        batch: batch elements; the tiles depend on it.
        kernel: which of the launches the problem takes.
    """

    name: str
    tokens: int
    head_dim: int
    recipe: str = "default"
    mask: str = "none"
    causal: bool = False
    granularity: str | None = None
    key_heads: int = 4
    batch: int = 8
    kernel: str = "short_kernel"


CASES = (
    Case("vit", 197, 64),  # A1-A3: DeiT-T/S/B differ only in the number of heads, which is no constant of the kernel
    Case("vit-hundreds", 197, 64, batch=128),  # of heads: one program each, with a tail of a few queries on Hopper
    Case("vit-257", 257, 64, batch=128, kernel="long_kernel"),  # CLIP, DINOv2: held whole on Hopper alone
    Case("vit-577", 577, 64, batch=128, kernel="long_kernel"),  # 384 pixels: walked over twice there
    Case("vit-1370", 1370, 64, batch=24, kernel="long_kernel"),  # DINOv2, 518 pixels: programs there go from head to head
    Case("vit-bool-tensor", 197, 64, mask="bool", granularity="tensor"),
    Case("vit-bias", 197, 64, mask="bias"),
    Case("vit-80", 197, 80),
    Case("vit-257-80", 257, 80, batch=128, kernel="long_kernel"),  # ViT-H: channels in two spans on Hopper
    Case("vit-729-72", 729, 72, batch=256, kernel="long_kernel"),  # SigLIP, 384 pixels: both, and walked over twice
    Case("vit-paper", 197, 64, recipe="paper", kernel="long_kernel"),
    Case("vit-accurate", 197, 64, recipe="accurate"),
    Case("swin", 49, 32),  # A4-A7: the four stages differ only in windows and heads
    Case("swin-bool", 49, 32, mask="bool"),
    Case("swin-windows", 49, 32, mask="windows"),
    Case("swin-thousands", 49, 32, mask="windows", batch=1024),  # a program takes several windows with the same bias
    Case("swin-causal", 49, 32, causal=True),
    Case("long-64", 4096, 64, kernel="long_kernel"),
    Case("long-128", 4096, 128, kernel="long_kernel"),
    Case("long-causal-gqa", 4096, 64, causal=True, key_heads=1, kernel="long_kernel"),
    Case("long-accurate", 4096, 64, recipe="accurate", kernel="long_kernel"),
    Case("pack-value", 4096, 64, kernel="pack_value_kernel"),
)


def kernel_call(case: Case, target: str) -> Any:
    """Return the kernel launch of a case, spelt out by the launcher itself, on tensors without memory."""
    import torch

    from .kernels.attention import attention_calls
    from .layout import empty_bias
    from .quantization import scale_shape
    from .recipe import resolve_recipe

    recipe: Recipe = resolve_recipe(case.recipe)
    batch, heads, tokens, head_dim = case.batch, 4, case.tokens, case.head_dim

    def values(*shape: int, dtype: torch.dtype = torch.int8) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def scale(x: torch.Tensor, granularity: str) -> torch.Tensor:
        return values(*scale_shape(x.shape, case.granularity or granularity), dtype=torch.float32)

    query = values(batch, heads, tokens, head_dim)
    key = values(batch, case.key_heads, tokens, head_dim)
    value = values(batch, case.key_heads, tokens, head_dim)
    mask = {
        "none": None,
        "bool": values(batch, 1, tokens, tokens, dtype=torch.bool),
        "bias": values(1, heads, tokens, tokens, dtype=torch.int32),
        "windows": empty_bias(query, (batch // 2, heads, tokens, tokens), torch.int32),
    }[case.mask]
    number = int(target.removeprefix("sm_"))
    calls = attention_calls(
        query,
        scale(query, recipe.query_granularity),
        key,
        scale(key, recipe.key_granularity),
        value,
        scale(value, recipe.value_granularity),
        mask,
        case.causal,
        head_dim**-0.5,
        scale(query, recipe.value_granularity),
        torch.empty_like(query),
        recipe,
        capability=(number // 10, number % 10),
    )
    # V is packed first, if it is
    return calls[0 if case.kernel == "pack_value_kernel" else -1]


# --- compiling without a GPU ------------------------------------------------------------------------------


class _TargetDriver:
    """As much of a Triton driver as compiling needs: it names the target and knows no device."""

    def __init__(self, target: str) -> None:
        self.target = target

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", int(self.target.removeprefix("sm_")), 32)

    def get_current_device(self) -> str:
        # Triton keys its in-memory cache by device; a name of our own keeps targets, and real GPUs, apart
        return f"qflash-verify:{self.target}"

    def get_current_stream(self, device: object) -> int:
        return 0


@contextlib.contextmanager
def _pretend(target: str) -> Iterator[None]:
    from triton.runtime import driver

    before = driver._active
    driver.set_active(_TargetDriver(target))
    try:
        yield
    finally:
        driver._active = before


def compile_call(call: Any, target: str) -> Any:
    """Compile a launch for a target as the JIT would before launching it there.

    Args:
        call: has ``kernel``, ``grid``, ``arguments`` (by name) and ``options``, as
            :class:`qflash.kernels.calls.Call` has.
        target: for instance ``"sm_90"``.

    Returns:
        Triton's compiled kernel; ``asm`` holds its PTX and cubin.
    """
    with _pretend(target), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call.kernel.warmup(grid=call.grid, **call.arguments, **call.options)


# --- what is looked for ------------------------------------------------------------------------------------


def early_operands(instructions: Sequence[Instruction]) -> list[Instruction]:
    """Return products that read registers to which queries of the next block are on their way.

    In the loop over blocks of :mod:`.kernels.hopper`, the smallest with loads, products and stores, what is loaded is for the
    next turn: until something else stands in its registers no product may read them. The assembler of Triton 3.6 was seen to
    let them, from PTX that does not, where loads depend on a predicate (heads of 72 channels, a form of the kernel not in use).
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


# --- one kernel, one report -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Report:
    """What the machine code of one kernel on one target is made of.

    Attributes:
        float_instructions: each as ``"OPCODE at file:line"`` with its count; empty is what is to be proved.
        constant_moves: HFMA2 that only load a constant.
        tensor_core: the matrix instructions with their counts.
        instructions: all of them, padding left out.
        per_score: instructions per score: of one turn of the hot loops (all passes), or of the whole kernel
            where one tile holds the row.
        hot_loops: instructions of one turn of each pass's hot loop; empty for a single tile.
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
        """Whether the kernel compiled and holds no float instruction."""
        return self.error is None and self.float_count == 0

    def to_dict(self) -> dict[str, Any]:
        """Return the fields and what follows from them, for JSON."""
        return {**dataclasses.asdict(self), "float_count": self.float_count, "passed": self.passed}


def examine(call: Any, name: str, target: str, dump: pathlib.Path | None = None) -> Report:
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
    block_m, block_n, tiles = (call.arguments.get(name, 0) for name in ("BLOCK_M", "BLOCK_N", "TILES"))
    block_n = call.arguments.get("SPAN", block_n) * call.arguments.get("UNROLL", 1)
    columns = block_n * max(tiles, 1)
    if call.kernel.__name__ == "hopper_kernel":
        from .kernels.tiles import row_widths

        # rows that are walked over have loops, of so many tiles of 128 keys a turn
        turn = call.arguments["TURN"]
        columns, tiles = (128 * turn, 0) if turn else (sum(row_widths(call.arguments["KEYS"])), 1)
    elif call.kernel.__name__ == "windows_kernel":
        from .kernels.windows import has_half, widths

        # its code is one tile of sixteen queries a warp, which may be walked through, and then one of eight for the rest
        half = has_half(call.arguments["QUERIES"], warps, call.arguments["SPLITS"])
        block_m, columns, tiles = 16 * warps + 8 * half, sum(widths(call.arguments["KEYS"])), 1
    error = None
    if call.kernel.__name__ == "hopper_kernel" and (early := early_operands(instructions)):
        error = f"{early[0].opcode} at {early[0].source} takes the next block's queries for this one's"
    if target == "sm_90":
        outside, _ = accesses_outside(instructions, 32 * warps, compiled.metadata.shared)
        if outside:
            error = f"{outside[0].opcode} at {outside[0].source} leaves the block's shared memory"
    scores = block_m * columns
    hot = [] if tiles else hot_loop_sizes(instructions)
    floats = Counter(f"{i.opcode} at {i.source}" for i in instructions if is_float(i))
    return Report(
        case=name,
        target=target,
        kernel=call.kernel.__name__,
        tile=f"{block_m}x{columns}" if scores else "",
        warps=warps,
        stages=compiled.metadata.num_stages,
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


def _examine_case(case: Case, target: str, dump: pathlib.Path | None) -> Report:
    try:
        return examine(kernel_call(case, target), case.name, target, dump)
    except VerificationError:
        raise
    except Exception as error:  # a kernel that does not compile is a finding, and Triton raises anything
        lines = str(error).strip().splitlines() or [""]
        return Report(case.name, target, error=f"{type(error).__name__}: {lines[-1]}"[:300])


# --- all of them ------------------------------------------------------------------------------------------


def _pick(kind: str, wanted: Sequence[str], known: Sequence[str]) -> list[str]:
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise VerificationError(f"unknown {kind} {', '.join(unknown)}; known: {', '.join(known)}")
    return [name for name in known if not wanted or name in wanted]


def verify(
    cases: Sequence[str] = (),
    targets: Sequence[str] = (),
    *,
    dump: pathlib.Path | None = None,
    workers: int | None = None,
    progress: bool = False,
) -> list[Report]:
    """Compile and read every case for every target, in parallel processes.

    Args:
        cases: names from :data:`CASES`; all if empty.
        targets: names from :data:`TARGETS`; all if empty.
        dump: a folder for PTX and SASS, made if missing.
        workers: processes; one per CPU core this process may use if None, at most 16.
        progress: show a progress bar on standard error.

    Returns:
        one report per case and target, in that order.

    Raises:
        VerificationError: an unknown name, no Triton, no disassembler, or Triton's interpreter is on.
    """
    from .backends import interpreting, triton_missing

    names = _pick("case", cases, [case.name for case in CASES])
    capabilities = _pick("target", targets, TARGETS)
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
    jobs = [(case, target) for case in CASES if case.name in names for target in capabilities]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    count = min(workers or min(cores, 16), len(jobs))
    reports: dict[tuple[str, str], Report] = {}
    with contextlib.ExitStack() as stack:
        advance = stack.enter_context(_progress(len(jobs), progress))
        # a fresh interpreter each: forking after PyTorch has started its threads is asking for deadlocks
        pool = stack.enter_context(concurrent.futures.ProcessPoolExecutor(count, multiprocessing.get_context("spawn")))
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


def render(reports: Sequence[Report]) -> Table:
    """Return the reports as a table for the terminal."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title="int8 → int8 attention kernels: machine code", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("case", "target", "tile, warps", "products"):
        table.add_column(heading, no_wrap=True)
    for heading in ("float", "moves", "instr.", "a score", "regs", "spills", "shared"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.caption = (
        "float: float instructions. moves: HFMA2 that only load a constant. a score: instructions per score, of one turn of "
        "the loops over the keys or, where one tile holds the row, of the whole kernel. spills: LDL and STL."
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
            f"[red]{report.float_count}[/red]" if report.float_count else "[green]0[/green]",
            str(report.constant_moves),
            str(report.instructions),
            "" if report.per_score is None else f"{report.per_score:.1f}",
            "?" if report.registers is None else str(report.registers),
            str(report.spills),
            str(report.shared),
        )
    return table
