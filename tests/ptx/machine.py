"""What runs a kernel: memory, warps, programs, launches."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from qflash.kernels.launch_recorder import each_argument
from qflash_lab.verify.compile import compile_call

from .bits import LANES, SHARED, UNSIGNED, Bits, Step
from .parser import _operands, _statements


class Kernel:
    """A compiled kernel, as a list of steps."""

    def __init__(self, ptx: str) -> None:
        head, _, body = ptx[ptx.index(".visible .entry") :].partition("{\n")
        self.parameters = re.findall(r"\.param\s[^,\n]*?(\w+_param_\d+)", head)
        self.threads = int(re.search(r"\.reqntid\s+(\d+)", head)[1])  # type: ignore[index]
        blocks = re.search(r"\.reqnctapercluster\s+(\d+)", head)
        self.blocks = int(blocks[1]) if blocks else 1
        self.labels: dict[str, int] = {}
        self.steps: list[Step] = []
        self.text: list[str] = []
        for statement in _statements("{" + body):
            if statement.endswith(":"):
                self.labels[statement[:-1]] = len(self.steps)
            else:
                self.steps.append(self._step(statement))
                self.text.append(statement)

    def _step(self, statement: str) -> Step:
        found = re.fullmatch(r"(?:@(!?)(\S+)\s+)?(\S+)(?:\s+(.*))?", statement)
        assert found, statement
        negated, predicate, opcode, rest = found.groups()
        name, *modifiers = opcode.split(".")
        make = INSTRUCTIONS.get(name)
        # what these two change is done for those that have them
        changed = {"sat": opcode.startswith("cvt.pack"), "ftz": name == "rcp"}
        if make is None or any(x in modifiers and not here for x, here in changed.items()):
            raise NotImplementedError(statement)
        if name == "bra":
            return _branch(self, rest, predicate, bool(negated))
        step = make(modifiers, _operands(rest or ""))
        if predicate is None:
            return step

        def when(warp: Warp) -> str | None:
            mask = warp.registers[predicate]
            warp.mask = warp.mask & (~mask if negated else mask)
            try:
                return step(warp) if warp.mask.any() else None
            finally:
                warp.mask = ALL

        return when


INSTRUCTIONS: dict[str, Callable[[Sequence[str], Sequence[str]], Step]] = {}
"""By name: what makes a step of modifiers and operands. The modules of instructions fill it."""

ALL = np.ones(LANES, dtype=bool)

_LANE = np.arange(LANES)


class Memory:
    """The bytes of the tensors among some arguments, at their own addresses."""

    def __init__(self, arguments: Iterable[Any]) -> None:
        self.parts: list[tuple[int, int, Bits]] = []
        seen = set()
        for argument in arguments:
            tensor = argument.base if isinstance(argument, TensorDescriptor) else argument
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            if storage.data_ptr() in seen or not storage.nbytes():
                continue
            seen.add(storage.data_ptr())
            flat = torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload]
            self.parts.append((storage.data_ptr(), storage.nbytes(), flat.numpy()))

    def find(self, address: Bits, size: int) -> tuple[Bits, Bits]:
        """Return the bytes that hold these addresses and where in them they are."""
        if (address % size).any():
            raise IndexError(f"addresses of {size} bytes are not aligned: {address[address % size != 0]}")
        for start, length, part in self.parts:
            if start <= address[0] < start + length:
                offset = (address - np.uint64(start)).astype(np.int64)
                if (offset < 0).any() or (offset + size > length).any():
                    break
                return part, offset
        raise IndexError(f"{size} bytes outside every tensor, at {address[:4]}")


def _gather(part: Bits, offset: Bits, size: int, width: int) -> list[Bits]:
    """Numbers of ``width`` bits out of ``size`` bytes a lane."""
    found = part[offset[:, None] + np.arange(size)]
    return list(np.ascontiguousarray(found).view(UNSIGNED[width]).T)


def _scatter(part: Bits, offset: Bits, numbers: Sequence[Bits]) -> None:
    found = np.ascontiguousarray(np.stack(numbers, axis=1)).view(np.uint8)
    part[offset[:, None] + np.arange(found.shape[1])] = found


SPECIAL = ("tid", "ctaid", "nctaid", "laneid", "clusterid", "nclusterid", "cluster_ctarank")

CLUSTER = -1
"""The number of the barrier of all blocks of a cluster."""


class Warp:
    """One warp of a program: its registers, where it is, and what it has sent for."""

    def __init__(self, program: Program, number: int) -> None:
        self.program, self.number = program, number
        self.registers: dict[str, Any] = {}
        self.mask = ALL
        self.at = 0
        self.barrier: tuple[int, int] | None = None
        self.arrived = False  # at the barrier of its cluster
        self.queues: dict[str, list[list[Callable[[], None]]]] = {"wgmma": [[]], "cp": [[]]}

    def run(self) -> Iterator[str]:
        """Run to the end, stopping at every barrier (``"barrier"``) and wherever others have to come first (``"spin"``)."""
        steps = self.program.kernel.steps
        while self.at < len(steps):
            here = self.at
            self.at += 1
            try:
                state = steps[here](self)
            except Exception as error:
                raise RuntimeError(f"{self.program.kernel.text[here]}: {error!r}") from error
            if state == "end":
                return
            if state is not None:
                yield state

    def wait(self, queue: str, left: int) -> None:
        """Do what was sent for, but for the last ``left`` groups."""
        groups = self.queues[queue]
        while len(groups) - 1 > left:
            for work in groups.pop(0):
                work()

    def read(self, name: str, width: int = 32) -> Bits:
        """The bits of an operand for every lane."""
        if name in self.registers:
            x = self.registers[name]
            if width > 1 and x.itemsize * 8 != width:
                raise TypeError(f"{name} has {x.itemsize * 8} bits, not {width}")
            return x
        if name[0] == "%" and name[1:].partition(".")[0] in SPECIAL:
            return self._special(name[1:])
        if name == "global_smem":
            return np.full(LANES, SHARED, dtype=UNSIGNED[width])
        if name in self.program.parameters:
            # the address of one, which only a description of a tensor is asked for
            return np.full(LANES, self.program.kernel.parameters.index(name), dtype=UNSIGNED[width])
        if name[0] == "%" or "@" in name:
            # nobody has written it: some number
            noise = self.program.noise.integers(0, 2**16, LANES)
            return noise % 2 == 1 if width == 1 else noise.astype(UNSIGNED[width])
        return constant(name, width)

    def _special(self, name: str) -> Bits:
        if name == "laneid":
            return _LANE.astype(np.uint32)
        if name == "cluster_ctarank":
            return np.full(LANES, self.program.rank, dtype=np.uint32)
        kind, _, axis = name.partition(".")
        at = "xyz".index(axis)
        if kind == "tid":
            return (LANES * self.number + _LANE if at == 0 else 0 * _LANE).astype(np.uint32)
        if self.program.kernel.blocks > 1 and "cluster" not in kind:
            raise NotImplementedError(f"{name} in a cluster")
        index = self.program.index if kind in ("ctaid", "clusterid") else self.program.grid
        return np.full(LANES, index[at], dtype=np.uint32)

    def write(self, name: str, x: Bits) -> None:
        """Set a register in the lanes that take part."""
        if name == "_":
            return
        if self.mask is not ALL and name in self.registers:
            x = np.where(self.mask, x, self.registers[name])
        self.registers[name] = x


def constant(text: str, width: int) -> Bits:
    """A literal as bits."""
    if text[:2] == "0f":
        number = int(text[2:], 16)
    else:
        number = int(text.rstrip("U"), 0)
    if width == 1:
        return np.full(LANES, number != 0)
    return np.full(LANES, number & (2**width - 1), dtype=UNSIGNED[width])


class Program:
    """One program of a grid, or one block of a program that is a cluster."""

    def __init__(
        self, kernel: Kernel, grid: tuple[int, int, int], index: tuple[int, int, int], rank: int, parameters: dict[str, Any],
        memory: Memory, shared: int, late: bool,
    ) -> None:  # fmt: skip
        self.kernel, self.grid, self.index, self.parameters, self.memory = kernel, grid, index, parameters, memory
        self.rank, self.late = rank, late
        # a program's own: what it finds in memory does not depend on what was run before it
        self.noise = np.random.default_rng((*index, rank))
        self.shared = self.noise.integers(0, 256, shared, dtype=np.uint8)
        self.announced: dict[int, Announcement] = {}
        self.tensor_memory = self.noise.integers(0, 2**32, (128, 512), dtype=np.uint32)
        self.uncommitted: list[Callable[[], None]] = []

    def run(self, backwards: bool) -> Iterator[None]:
        """Run to the end, stopping where the other blocks of the cluster have to come as far."""
        warps = [Warp(self, number) for number in range(self.kernel.threads // LANES)]
        running = {warp: warp.run() for warp in (reversed(warps) if backwards else warps)}
        idle = 0
        while running:
            idle += 1
            for warp, run in list(running.items()):
                if warp.barrier is not None:
                    continue
                state = next(run, "end")
                if state != "spin":
                    idle = 0
                if state == "end":
                    del running[warp]
            if running and all(warp.barrier is not None and warp.barrier[0] == CLUSTER for warp in running):
                yield
            if self._open(running, self.kernel.threads):
                idle = 0
            if idle > 4:
                raise RuntimeError("every warp waits for something that nobody is going to do")

    @staticmethod
    def _open(running: dict[Warp, Iterator[str]], threads: int) -> bool:
        """Let those go on who are all at one barrier; tell whether there are any."""
        at: dict[int, list[Warp]] = {}
        for warp in running:
            if warp.barrier is not None:
                at.setdefault(warp.barrier[0], []).append(warp)
        opened = False
        for waiting in at.values():
            assert waiting[0].barrier is not None
            if LANES * len(waiting) == (waiting[0].barrier[1] or threads):
                opened = True
                for warp in waiting:
                    warp.barrier = None
        return opened

    def send(self, queue: list[Callable[[], None]], work: Callable[[], None]) -> None:
        """Do asynchronous work, or keep it until it is waited for."""
        if self.late:
            queue.append(work)
        else:
            work()

    def find_shared(self, address: Bits, size: int) -> Bits:
        """Offsets of shared addresses."""
        offset = address.astype(np.int64) - SHARED
        if (offset < 0).any() or (offset + size > len(self.shared)).any() or (offset % size).any():
            raise IndexError(f"{size} bytes of shared memory at {offset[:4]} of {len(self.shared)}")
        return offset


def run_together(blocks: Sequence[Program], backwards: bool = False) -> None:
    """Run the blocks of a cluster, or a program of one block, from one barrier of all of them to the next."""
    going = [block.run(backwards) for block in (reversed(blocks) if backwards else blocks)]
    while going:
        waiting = [run for run in going if next(run, "end") is None]
        if 0 < len(waiting) < len(going):
            raise RuntimeError("blocks of a cluster wait for others that have ended")
        going = waiting


_read = functools.lru_cache(maxsize=8)(Kernel)
"""Tests launch a kernel several times in a row; its steps keep nothing from one to the next."""


def launch(
    call: Any, *, late: bool = False, backwards: bool = False, target: str = "sm_90", edit: Callable[[str], str] = str
) -> None:
    """Compile a launch on tensors of the CPU and run it.

    Args:
        call: the launch (:class:`qflash.kernels.launch_recorder.KernelLaunch`).
        late: whether asynchronous work is done as late as may be, instead of at once.
        backwards: whether the last warp takes its turn first.
        target: what it is compiled for.
        edit: what is done to the PTX first, to see that mistakes are noticed.
    """
    compiled = compile_call(call, target)
    kernel = _read(edit(compiled.asm["ptx"]))
    values: list[Any] = []
    for name, kind in compiled.src.signature.items():
        value = call.arguments[name]
        pairs = zip(value, kind, strict=True) if isinstance(kind, tuple) else ((value, kind),)
        for x, of in pairs:
            if of == "constexpr":
                continue
            if isinstance(x, TensorDescriptor):
                values += [x, *x.shape, *x.strides]
            else:
                values.append(x.data_ptr() if isinstance(x, torch.Tensor) else int(x))
    # behind them two of the launcher's own
    parameters = dict(zip(kernel.parameters, [*values, 0, 0], strict=True))
    memory = Memory(value for _, value in each_argument(call.arguments))
    grid = tuple(call.grid)
    with np.errstate(all="ignore"):
        for z in range(grid[2]):
            for y in range(grid[1]):
                for x in range(grid[0]):
                    blocks = [
                        Program(kernel, grid, (x, y, z), rank, parameters, memory, compiled.metadata.shared, late)
                        for rank in range(kernel.blocks)
                    ]
                    run_together(blocks, backwards)


def _is_register(name: str) -> bool:
    return name[0] == "%" or "@" in name or name == "global_smem"


def _branch(kernel: Kernel, label: str, predicate: str | None, negated: bool) -> Step:
    def step(warp: Warp) -> None:
        if predicate is not None:
            taken = warp.registers[predicate] ^ negated
            if taken.all() != taken.any():
                raise NotImplementedError(f"lanes of a warp part at a branch to {label}")
            if not taken.any():
                return
        warp.at = kernel.labels[label]

    return step


def _register_width(name: str) -> int:
    """The width of a register of the kernel's own, by its name."""
    return {"%rs": 16, "%rd": 64, "%r": 32}[name.rstrip("0123456789")]


class Announcement:
    """An ``mbarrier``: so many arrivals and bytes are still to come in this phase."""

    def __init__(self, count: int) -> None:
        self.count, self.pending, self.bytes, self.phase = count, count, 0, 0
        self.kept: list[Callable[[], None]] = []
        self.asked: set[Warp] = set()

    def turn(self) -> None:
        """Begin the next phase if nothing of this one is missing."""
        if self.pending == 0 and self.bytes == 0:
            self.phase, self.pending = self.phase + 1, self.count
            self.asked.clear()
