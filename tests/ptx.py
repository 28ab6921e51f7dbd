"""Runs compiled kernels on a CPU, from their PTX: what lets the kernels in Gluon be tested where there is no GPU.

A program's warps run one after the other, each up to a barrier, 32 lanes at a time as numpy arrays. Registers hold bits;
what an instruction makes of them is its own affair, as in PTX. Memory is the tensors of the launch and nothing else: a
load or store beside them, or one that is not aligned, raises. Shared memory and registers begin as noise.

Asynchronous work (products, copies) is done either when it is sent for (``late=False``) or when it is waited for
(``late=True``). A kernel that waits for too little, or overwrites what is still to be read, is wrong in one of the two.
Warps take their turns in either order, for the same reason.

Source: the PTX ISA's descriptions of its instructions. Only those are here that the kernels have.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from qflash.verify.compile import compile_call

LANES = 32
SHARED = 0x1000
"""Where shared memory begins."""

Bits = np.ndarray
Step = Callable[["Warp"], str | None]

UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
WIDTH = {
    "pred": 1, "b8": 8, "u8": 8, "s8": 8, "b16": 16, "u16": 16, "s16": 16, "f16": 16, "bf16": 16, "b32": 32, "u32": 32,
    "s32": 32, "f32": 32, "f16x2": 32, "bf16x2": 32, "b64": 64, "u64": 64, "s64": 64, "f32x2": 64,
    "s16x2": 32, "u16x2": 32,
}  # fmt: skip


# --- reading PTX ------------------------------------------------------------------------------------------


def _closing(text: str, at: int) -> int:
    """Where the brace that opens at ``at`` is closed."""
    depth = 0
    for i in range(at, len(text)):
        depth += (text[i] == "{") - (text[i] == "}")
        if depth == 0:
            return i
    raise ValueError("a brace is not closed")


def _statements(text: str) -> Iterator[str]:
    """Yield a kernel's labels (with a colon) and instructions; names of an inner block are made unique."""
    text = re.sub(r"//[^\n]*", "", text)
    text = re.sub(r"(?m)^\s*\.(loc|file|pragma)\b[^\n]*$", "", text)
    blocks: list[dict[str, str]] = []
    count = 0
    token = ""

    def renamed(statement: str) -> str:
        for block in reversed(blocks):
            statement = re.sub(r"(?<![\w$%.])[A-Za-z_]\w*(?![\w.])", lambda m, b=block: b.get(m[0], m[0]), statement)
        return statement

    for at, c in enumerate(text):
        if c == "{" and not token.strip():
            # labels and declarations of an inner block are its own
            body = text[at + 1 : _closing(text, at)] if blocks else ""
            names = [n for part in re.findall(r"\.reg\s+\.\w+\s+([^;<]*);", body) for n in re.split(r"[\s,]+", part) if n]
            names += re.findall(r"(?:^|[;\s])([A-Za-z_]\w*):(?!:)", body)
            blocks.append({name: f"{name}@{count}" for name in names if not name.startswith("%")})
            count += 1
        elif c == "}" and not token.strip():
            blocks.pop()
            if not blocks:
                return
        elif c == ";":
            statement = " ".join(token.split())
            token = ""
            if statement and not statement.startswith("."):
                yield renamed(statement)
        elif c == ":" and re.fullmatch(r"\s*[\w$]+", token) and text[at + 1] in " \t\n}":
            yield renamed(token.strip()) + ":"
            token = ""
        else:
            token += c


def _operands(text: str) -> list[str]:
    """Split operands at the commas outside braces and brackets."""
    parts, depth, part = [], 0, ""
    for c in text:
        depth += (c in "{[") - (c in "}]")
        if c == "," and depth == 0:
            parts.append(part.strip())
            part = ""
        else:
            part += c
    return [*parts, part.strip()] if part.strip() else parts


def _listed(text: str) -> list[str]:
    """The registers of a vector operand, or the one register."""
    return [part.strip() for part in text.strip("{} ").split(",")]


class Kernel:
    """A compiled kernel, as a list of steps."""

    def __init__(self, ptx: str) -> None:
        head, _, body = ptx[ptx.index(".visible .entry") :].partition("{\n")
        self.parameters = re.findall(r"\.param\s[^,\n]*?(\w+_param_\d+)", head)
        self.threads = int(re.search(r"\.reqntid\s+(\d+)", head)[1])  # type: ignore[index]
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
        make = globals().get(f"_make_{name}")
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


ALL = np.ones(LANES, dtype=bool)
_LANE = np.arange(LANES)
_NOISE = np.random.default_rng(0)


# --- memory -----------------------------------------------------------------------------------------------


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


# --- a warp -----------------------------------------------------------------------------------------------


class Warp:
    """One warp of a program: its registers, where it is, and what it has sent for."""

    def __init__(self, program: Program, number: int) -> None:
        self.program, self.number = program, number
        self.registers: dict[str, Any] = {}
        self.mask = ALL
        self.at = 0
        self.barrier: tuple[int, int] | None = None
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
        if name[0] == "%" and name[1:].partition(".")[0] in ("tid", "ctaid", "nctaid", "laneid"):
            return self._special(name[1:])
        if name == "global_smem":
            return np.full(LANES, SHARED, dtype=UNSIGNED[width])
        if name in self.program.parameters:
            # the address of one, which only a description of a tensor is asked for
            return np.full(LANES, self.program.kernel.parameters.index(name), dtype=UNSIGNED[width])
        if name[0] == "%" or "@" in name:
            # nobody has written it: some number
            noise = _NOISE.integers(0, 2**16, LANES)
            return noise % 2 == 1 if width == 1 else noise.astype(UNSIGNED[width])
        return constant(name, width)

    def _special(self, name: str) -> Bits:
        if name == "laneid":
            return _LANE.astype(np.uint32)
        kind, _, axis = name.partition(".")
        at = "xyz".index(axis)
        if kind == "tid":
            return (LANES * self.number + _LANE if at == 0 else 0 * _LANE).astype(np.uint32)
        return np.full(LANES, (self.program.index if kind == "ctaid" else self.program.grid)[at], dtype=np.uint32)

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
    """One program of a grid."""

    def __init__(
        self, kernel: Kernel, grid: tuple[int, int, int], index: tuple[int, int, int], parameters: dict[str, Any],
        memory: Memory, shared: int, late: bool, backwards: bool,
    ) -> None:  # fmt: skip
        self.kernel, self.grid, self.index, self.parameters, self.memory = kernel, grid, index, parameters, memory
        self.late = late
        self.shared = _NOISE.integers(0, 256, shared, dtype=np.uint8)
        self.announced: dict[int, Announcement] = {}
        self.tensor_memory = _NOISE.integers(0, 2**32, (128, 512), dtype=np.uint32)
        self.uncommitted: list[Callable[[], None]] = []
        warps = [Warp(self, number) for number in range(kernel.threads // LANES)]
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
            if self._open(running, kernel.threads):
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
        if kind == "constexpr":
            continue
        value = call.arguments[name]
        if isinstance(value, TensorDescriptor):
            values += [value, *value.shape, *value.strides]
        else:
            values.append(value.data_ptr() if isinstance(value, torch.Tensor) else int(value))
    # behind them two of the launcher's own
    parameters = dict(zip(kernel.parameters, [*values, 0, 0], strict=True))
    memory = Memory(call.arguments.values())
    grid = tuple(call.grid)
    with np.errstate(all="ignore"):
        for z in range(grid[2]):
            for y in range(grid[1]):
                for x in range(grid[0]):
                    Program(kernel, grid, (x, y, z), parameters, memory, compiled.metadata.shared, late, backwards)


# --- instructions: numbers --------------------------------------------------------------------------------


def _type(modifiers: Sequence[str]) -> str:
    return modifiers[-1]


def _signed(x: Bits) -> Bits:
    return x.view(SIGNED[x.itemsize * 8])


def _of(kind: str, x: Bits) -> Bits:
    """Bits as the numbers of a type, of which a pair has twice as many."""
    if kind in ("s16x2", "u16x2"):
        return np.ascontiguousarray(x).view(np.int16 if kind[0] == "s" else np.uint16)
    if kind[0] == "s":
        return _signed(x)
    if kind in ("f32", "f32x2"):
        return np.ascontiguousarray(x).view(np.float32)
    if kind == "f16":
        return x.view(np.float16)
    if kind == "bf16":
        return (x.astype(np.uint32) << 16).view(np.float32)
    return x


def _bits(x: Bits, kind: str = "") -> Bits:
    """Numbers as bits; a bfloat16 is a float32 of which the upper half counts."""
    if x.dtype == bool:
        return x
    if kind == "bf16":
        return (x.view(np.uint32) >> 16).astype(np.uint16)
    return x.view(UNSIGNED[WIDTH.get(kind, x.itemsize * 8)])


def _plain(function: Callable[..., Bits], kind: str, operands: Sequence[str]) -> Step:
    """An instruction whose operands and result are all of one type."""
    target, *sources = operands
    width = WIDTH[kind]
    if kind.endswith("f16x2"):
        function = _pairs(kind, function)
    fixed = [None if _is_register(name) else _of(kind, constant(name, width)) for name in sources]

    def step(warp: Warp) -> None:
        x = [_of(kind, warp.read(n, width)) if f is None else f for n, f in zip(sources, fixed, strict=True)]
        warp.write(target, _bits(function(*x), kind))

    return step


def _is_register(name: str) -> bool:
    return name[0] == "%" or "@" in name or name == "global_smem"


def _pairs(kind: str, function: Callable[..., Bits]) -> Callable[..., Bits]:
    """A function of 16-bit floats on both halves of words."""
    half = kind.removesuffix("x2")

    def both(*x: Bits) -> Bits:
        halves = [_of(half, np.ascontiguousarray(word).view(np.uint16)) for word in x]
        return _bits(function(*halves), half).view(np.uint32)

    return both


def _sum(modifiers: Sequence[str], operands: Sequence[str], function: Callable[[Bits, Bits], Bits]) -> Step:
    if list(modifiers[-2:-1]) != ["f32"]:
        return _plain(function, _type(modifiers), operands)
    # a 16-bit float and a float32
    target, a, b = operands

    def step(warp: Warp) -> None:
        narrow = _of(modifiers[-1], warp.read(a, 16)).astype(np.float32)
        warp.write(target, _bits(function(narrow, warp.read(b).view(np.float32))))

    return step


def _make_add(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    return _sum(modifiers, operands, lambda a, b: a + b)


def _make_sub(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    return _sum(modifiers, operands, lambda a, b: a - b)


def _high(a: Bits, b: Bits) -> Bits:
    wide = np.int64 if a.dtype == np.int32 else np.uint64
    return ((a.astype(wide) * b.astype(wide)) >> wide(32)).astype(a.dtype)


def _wide(kind: str, operands: Sequence[str], add: bool) -> Step:
    """A product of twice the width, which may be added to something."""
    target, a, b, *c = operands
    width = WIDTH[kind]
    both = SIGNED if kind[0] == "s" else UNSIGNED

    def step(warp: Warp) -> None:
        x, y = (_of(kind, warp.read(name, width)).astype(both[2 * width]) for name in (a, b))
        product = x * y
        if add:
            product = product + _of(kind[0] + str(2 * width), warp.read(c[0], 2 * width))
        warp.write(target, _bits(product))

    return step


def _make_mul(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    if modifiers[0] == "wide":
        return _wide(_type(modifiers), operands, False)
    if modifiers[0] == "hi":
        return _plain(_high, _type(modifiers), operands)
    return _plain(lambda a, b: a * b, _type(modifiers), operands)


def _make_mad(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    if modifiers[0] == "wide":
        return _wide(_type(modifiers), operands, True)
    return _plain(lambda a, b, c: a * b + c, _type(modifiers), operands)


def _fused(a: Bits, b: Bits, c: Bits) -> Bits:
    """``a * b + c`` rounded once: the sum in float64 rounded to odd, which keeps what the second rounding needs."""
    product, c = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = product + c
    rest = total - product
    error = (product - (total - rest)) + (c - rest)
    even = (total.view(np.int64) & 1) == 0
    odd = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    return np.where((error != 0) & even & np.isfinite(total), odd, total).astype(np.float32)


def _make_fma(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    return _plain(_fused, _type(modifiers), operands)


def _make_rcp(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    # of the approximation a kernel may expect no more than that a Newton step makes it right
    return _plain(lambda a: (1.0 / a.astype(np.float64)).astype(np.float32), "f32", operands)


def _make_rem(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    return _plain(np.fmod, _type(modifiers), operands)


def _make_neg(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    return _plain(lambda a: -a, _type(modifiers), operands)


def _make_abs(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    return _plain(np.abs, _type(modifiers), operands)


def _extreme(modifiers: Sequence[str], operands: Sequence[str], nan: Any, number: Any) -> Step:
    kind = _type(modifiers)
    function = nan if "NaN" in modifiers or kind[0] in "su" else number
    # of two numbers or, on newer targets, three
    return _plain(lambda *x: functools.reduce(function, x), kind, operands)


def _make_min(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    return _extreme(modifiers, operands, np.minimum, np.fmin)


def _make_max(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    return _extreme(modifiers, operands, np.maximum, np.fmax)


def _make_and(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    return _plain(lambda a, b: a & b, _type(modifiers), operands)


def _make_or(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    return _plain(lambda a, b: a | b, _type(modifiers), operands)


def _make_xor(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    return _plain(lambda a, b: a ^ b, _type(modifiers), operands)


def _make_not(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    return _plain(lambda a: ~a, _type(modifiers), operands)


def _shift(kind: str, operands: Sequence[str], left: bool) -> Step:
    """A shift, by at most as many bits as there are: amounts above clamp."""
    target, source, amount = operands
    width = WIDTH[kind]

    def step(warp: Warp) -> None:
        x, n = _of(kind, warp.read(source, width)), warp.read(amount, 32)
        inside = np.minimum(n, width - 1).astype(x.dtype)
        result = x << inside if left else x >> inside
        if left or kind[0] != "s":
            result = np.where(n >= width, x.dtype.type(0), result)
        warp.write(target, _bits(result))

    return step


def _make_shl(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    return _shift(_type(modifiers), operands, True)


def _make_shr(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    return _shift(_type(modifiers), operands, False)


def _make_bfe(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    kind = _type(modifiers)
    start, length = int(operands[2]), int(operands[3])

    def field(a: Bits) -> Bits:
        up = a << a.dtype.type(WIDTH[kind] - start - length)
        return up >> a.dtype.type(WIDTH[kind] - length)

    return _plain(field, kind, operands[:2])


def _make_bfi(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    assert _type(modifiers) == "b32"
    start, length = int(operands[3]), int(operands[4])
    mask = np.uint32((2**length - 1) << start)
    return _plain(lambda a, b: (b & ~mask) | ((a << np.uint32(start)) & mask), "b32", operands[:3])


def _make_clz(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    assert _type(modifiers) == "b32"
    return _plain(lambda a: (32 - np.frexp(a.astype(np.float64))[1]).astype(np.uint32), "b32", operands)


def _make_prmt(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    def permute(a: Bits, b: Bits, selector: Bits) -> Bits:
        source = np.stack((a, b), axis=1).view(np.uint8)
        which = (selector[:, None] >> (4 * np.arange(4, dtype=np.uint32))) & 15
        found = np.take_along_axis(source, (which & 7).astype(np.int64), axis=1)
        signs = np.where(found & 128, np.uint8(255), np.uint8(0))
        return np.ascontiguousarray(np.where(which & 8, signs, found)).view(np.uint32)[:, 0]

    return _plain(permute, "b32", operands)


def _four(x: Bits) -> Bits:
    """The four signed bytes of each word."""
    return np.ascontiguousarray(x).view(np.int8).reshape(-1, 4).astype(np.int32)


def _make_dp4a(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    return _plain(lambda a, b, c: (_four(a) * _four(b)).sum(1, dtype=np.int32).view(np.uint32) + c, "b32", operands)


def _make_vabsdiff4(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    def add(a: Bits, b: Bits, c: Bits) -> Bits:
        x, y = (np.ascontiguousarray(v).view(np.uint8).reshape(-1, 4).astype(np.int32) for v in (a, b))
        return np.abs(x - y).sum(1).astype(np.uint32) + c

    return _plain(add, "b32", operands)


def _round(x: Bits, low: int, high: int) -> Bits:
    return np.where(np.isnan(x), 0.0, np.clip(np.rint(x.astype(np.float64)), low, high)).astype(np.int64)


def _make_cvt(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    if modifiers[0] == "pack":

        def pack(a: Bits, b: Bits, c: Bits) -> Bits:
            x, y = (np.clip(_signed(v), -128, 127).astype(np.int64) & 255 for v in (a, b))
            return (((c.astype(np.int64) & 0xFFFF) << 16) | (x << 8) | y).astype(np.uint32)

        return _plain(pack, "b32", operands)
    to, source = modifiers[-2:]
    target = operands[0]
    if to in ("f16x2", "bf16x2"):

        def both(warp: Warp) -> None:
            high, low = (warp.read(name).view(np.float32) for name in operands[1:])
            halves = [_narrow(x, to.removesuffix("x2")).astype(np.uint32) for x in (high, low)]
            warp.write(target, (halves[0] << 16) | halves[1])

        return both

    def step(warp: Warp) -> None:
        width = WIDTH[source]
        # of a register that is wider the lower bits count
        held = warp.registers.get(operands[1])
        raw = warp.read(operands[1], max(width, 16) if held is None else held.itemsize * 8)
        x = _of(source, raw.astype(UNSIGNED[width]))
        if to == "f32":
            x = x.astype(np.float32)
        elif to in ("f16", "bf16"):
            x = _narrow(x, to)
        elif source[0] == "f":
            assert modifiers[0] == "rni" and to == "s32"
            x = _round(x, -(2**31), 2**31 - 1).astype(np.int32)
        else:
            both = SIGNED if to[0] == "s" else UNSIGNED
            x = x.astype(both[WIDTH[to]])
            if WIDTH[to] == 8:
                # no register is so narrow: the sign goes on
                x = x.astype(both[_register_width(target)])
        warp.write(target, _bits(x))

    return step


def _narrow(x: Bits, kind: str) -> Bits:
    """float32 as the bits of a 16-bit float, to nearest even."""
    return _bits(
        torch.from_numpy(np.ascontiguousarray(x))
        .to(torch.float16 if kind == "f16" else torch.bfloat16)
        .view(torch.int16)
        .numpy()
    )


def _make_selp(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    target, a, b, p = operands
    width = WIDTH[_type(modifiers)]
    return lambda warp: warp.write(target, np.where(warp.read(p, 1), warp.read(a, width), warp.read(b, width)))


_COMPARE: dict[str, Callable[[Bits, Bits], Bits]] = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
    "ltu": lambda a, b: ~(a >= b), "leu": lambda a, b: ~(a > b), "gtu": lambda a, b: ~(a <= b), "geu": lambda a, b: ~(a < b),
    "equ": lambda a, b: ~((a < b) | (a > b)), "neu": lambda a, b: ~(a == b),
    "num": lambda a, b: (a == a) & (b == b), "nan": lambda a, b: (a != a) | (b != b),
}  # fmt: skip


def _compared(compare: str, kind: str, x: Bits, y: Bits) -> Bits:
    if compare == "ne" and kind[0] not in "su" and "f" in kind:
        # ordered: false beside NaN
        return (x < y) | (x > y)
    return _COMPARE[compare](x, y)


def _make_setp(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    compare, *joined, kind = modifiers
    target, a, b, *rest = operands
    width = WIDTH[kind]
    if kind in ("f16x2", "bf16x2"):
        first, second = target.split("|")

        def both(warp: Warp) -> None:
            words = (np.ascontiguousarray(warp.read(name)).view(np.uint16) for name in (a, b))
            found = _compared(compare, kind, *(_of(kind.removesuffix("x2"), x) for x in words)).reshape(LANES, 2)
            warp.write(first, found[:, 0])
            warp.write(second, found[:, 1])

        return both
    assert "|" not in target

    def step(warp: Warp) -> None:
        x, y = (_of(kind, warp.read(name, width)) for name in (a, b))
        result = _compared(compare, kind, x, y)
        if joined:
            other = warp.read(rest[0], 1)
            result = result | other if joined[0] == "or" else result & other
        warp.write(target, result)

    return step


def _make_mov(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    target, source = operands
    width = WIDTH[_type(modifiers)]
    if source[0] == "{":
        parts = _listed(source)

        def join(warp: Warp) -> None:
            x = np.stack([warp.read(name, width // len(parts)) for name in parts], axis=1)
            warp.write(target, np.ascontiguousarray(x).view(UNSIGNED[width])[:, 0])

        return join
    if target[0] == "{":
        names = _listed(target)

        def split(warp: Warp) -> None:
            x = np.ascontiguousarray(warp.read(source, width)).view(UNSIGNED[width // len(names)]).reshape(LANES, -1)
            for name, part in zip(names, x.T, strict=True):
                warp.write(name, np.ascontiguousarray(part))

        return split
    return lambda warp: warp.write(target, warp.read(source, width))


def _make_cvta(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    return lambda warp: warp.write(operands[0], warp.read(operands[1], 64))


# --- instructions: control and exchange -------------------------------------------------------------------


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


_make_bra = _branch


def _make_ret(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    return lambda warp: "end"


def _make_trap(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    def step(warp: Warp) -> str:
        raise AssertionError("a trap was reached")

    return step


def _make_bar(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    if modifiers[0] == "warp":
        return lambda warp: None

    def step(warp: Warp) -> str:
        number, *count = (int(warp.read(name)[0]) for name in operands)
        warp.barrier = number, count[0] if count else 0
        return "barrier"

    return step


_make_barrier = _make_bar


def _make_elect(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    return lambda warp: warp.write(operands[0].partition("|")[2], _LANE == 0)


def _make_shfl(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    kind = modifiers[1]
    target, source, lane = operands[0].partition("|")[0], operands[1], operands[2]
    # the lanes that exchange are those alike in the bits of a mask
    alike = int(operands[3], 0) >> 8
    assert kind in ("bfly", "idx") and int(operands[3], 0) & 255 == 31

    def step(warp: Warp) -> None:
        which = warp.read(lane).astype(np.int64)
        within = _LANE ^ which if kind == "bfly" else which
        warp.write(target, warp.read(source)[(_LANE & alike) | (within & 31 & ~alike)])

    return step


def _make_vote(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    assert modifiers[1] in ("any", "all")
    fold = np.any if modifiers[1] == "any" else np.all
    return lambda warp: warp.write(operands[0], np.full(LANES, fold(warp.read(operands[1], 1))))


def _make_redux(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    kind = _type(modifiers)
    beside_nan = kind == "f32" and "NaN" not in modifiers
    fold = {
        "max": np.nanmax if beside_nan else np.max, "min": np.nanmin if beside_nan else np.min, "add": np.sum,
        "or": np.bitwise_or.reduce, "and": np.bitwise_and.reduce,
    }[modifiers[1]]  # fmt: skip
    assert set(modifiers[2:-1]) <= {"abs", "NaN"}, modifiers

    def step(warp: Warp) -> None:
        x = _of(kind, warp.read(operands[1]))
        if "abs" in modifiers:
            x = np.abs(x)
        warp.write(operands[0], _bits(np.full(LANES, fold(x), dtype=x.dtype)))

    return step


# --- instructions: memory ---------------------------------------------------------------------------------


def _register_width(name: str) -> int:
    """The width of a register of the kernel's own, by its name."""
    return {"%rs": 16, "%rd": 64, "%r": 32}[name.rstrip("0123456789")]


def _address(text: str) -> tuple[str, int]:
    base, _, offset = text.strip("[] ").partition("+")
    return base.strip(), int(offset or 0)


def _make_ld(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    kind = _type(modifiers)
    width = WIDTH[kind]
    names = _listed(operands[0])
    base, offset = _address(operands[1])
    if modifiers[0] == "param":
        wide = kind[0] == "s" or kind == "b64"

        def parameter(warp: Warp) -> None:
            name = warp.program.kernel.parameters[int(warp.read(base, 64)[0])] if base[0] == "%" else base
            number = warp.program.parameters[name]
            # an s32 in a register of 64 bits
            register = 64 if wide and names[0].startswith("%rd") else width
            warp.write(names[0], np.full(LANES, number & (2**register - 1), dtype=UNSIGNED[register]))

        return parameter
    size = len(names) * width // 8
    register = _register_width(names[0])

    def step(warp: Warp) -> None:
        mask = warp.mask
        if "shared" in modifiers[0]:
            address = warp.read(base)[mask].astype(np.int64) + offset
            part, at = warp.program.shared, warp.program.find_shared(address, size)
        else:
            part, at = warp.program.memory.find(warp.read(base, 64)[mask] + np.uint64(offset), size)
        for name, x in zip(names, _gather(part, at, size, width), strict=True):
            full = np.zeros(LANES, dtype=UNSIGNED[register])
            full[mask] = _of(kind, x) if kind[0] == "s" else x
            warp.write(name, full)

    return step


def _make_st(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    width = WIDTH[_type(modifiers)]
    names = _listed(operands[1])
    base, offset = _address(operands[0])
    size = len(names) * width // 8

    def step(warp: Warp) -> None:
        mask = warp.mask
        numbers = [
            warp.read(name, _register_width(name) if _is_register(name) else width)[mask].astype(UNSIGNED[width])
            for name in names
        ]
        if "shared" in modifiers[0]:
            part = warp.program.shared
            at = warp.program.find_shared(warp.read(base)[mask].astype(np.int64) + offset, size)
        else:
            part, at = warp.program.memory.find(warp.read(base, 64)[mask] + np.uint64(offset), size)
        _scatter(part, at, numbers)

    return step


def _make_cp(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    if modifiers[1] == "commit_group":
        return lambda warp: warp.queues["cp"].append([])
    if modifiers[1] == "wait_group":
        return lambda warp: warp.wait("cp", int(operands[0]))
    if modifiers[1] == "bulk":
        return _copy_tile(modifiers, operands)
    assert modifiers[1] in ("ca", "cg"), modifiers
    (to, to_offset), (source, offset) = _address(operands[0]), _address(operands[1])
    size = int(operands[2], 0)

    def step(warp: Warp) -> None:
        mask = warp.mask
        at = warp.program.find_shared(warp.read(to)[mask].astype(np.int64) + to_offset, size)
        taken = warp.read(operands[3])[mask] if len(operands) > 3 else np.full(len(at), size)
        address = warp.read(source, 64)[mask] + np.uint64(offset)

        def copy() -> None:
            warp.program.shared[at[:, None] + np.arange(size)] = 0
            there = taken > 0
            if there.any():
                assert (taken[there] == size).all()
                part, start = warp.program.memory.find(address[there], size)
                warp.program.shared[at[there][:, None] + np.arange(size)] = part[start[:, None] + np.arange(size)]

        warp.program.send(warp.queues["cp"][-1], copy)

    return step


def _make_createpolicy(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    # nothing looks at it: where the L2 keeps something changes no number
    return lambda warp: warp.write(operands[0], np.zeros(LANES, dtype=np.uint64))


def _make_prefetch(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    base, offset = _address(operands[0])

    def step(warp: Warp) -> None:
        # it changes nothing, but has to be for something that is there
        warp.program.memory.find(warp.read(base, 64)[warp.mask] + np.uint64(offset), 1)

    return step


def _make_fence(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    return lambda warp: None


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


def _make_mbarrier(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    kind = modifiers[0]
    at = {"init": 0, "inval": 0, "arrive": 1, "try_wait": 1}[kind]
    base, offset = _address(operands[at])

    def step(warp: Warp) -> str | None:
        announced = warp.program.announced
        (address,) = {int(x) + offset for x in warp.read(base)[warp.mask]}
        if kind == "init":
            announced[address] = Announcement(int(operands[1]))
            return None
        if kind == "inval":
            del announced[address]
            return None
        here = announced[address]
        if kind == "arrive":
            assert modifiers[1] == "expect_tx" and warp.mask.sum() == 1
            here.bytes += int(warp.read(operands[2])[0])
            here.pending -= 1
            here.turn()
            return None
        parity = int(warp.read(operands[2])[0])
        if here.phase % 2 == parity and here.kept:
            # late: what has been sent for comes when a warp has asked and asks again
            while warp in here.asked and here.kept:
                here.kept.pop(0)()
            here.asked.add(warp)
        done = here.phase % 2 != parity
        warp.write(operands[0], np.full(LANES, done))
        return None if done else "spin"

    return step


def _swizzled(at: Bits, pitch: int) -> Bits:
    """Addresses with sixteen bytes changing places by the number of the row of 128 bytes they lie in."""
    return at ^ ((at >> 7 & (pitch // 16 - 1)) << 4)


def _copy_tile(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    """A tile of a described matrix, zeros beyond its edges, to shared memory with its pieces of sixteen bytes swizzled."""
    assert modifiers[2:4] == ["tensor", "2d"]
    to, to_offset = _address(operands[0])
    map_name, columns, rows = (part.strip() for part in re.split(r"[,{}]+", operands[1].strip("[]")) if part.strip())
    base, offset = _address(operands[2])

    def step(warp: Warp) -> None:
        (lane,) = np.flatnonzero(warp.mask)
        program = warp.program
        described = program.parameters[program.kernel.parameters[int(warp.read(map_name, 64)[lane])]]
        width = described.layout.swizzle_byte_width
        here = program.announced[int(warp.read(base)[lane]) + offset]
        target = int(warp.read(to)[lane]) + to_offset
        column, row = (int(_signed(warp.read(name))[lane]) for name in (columns, rows))
        height, across = described.block_shape[0], min(described.block_shape[1], width)

        def copy() -> None:
            y, x = row + np.arange(height)[:, None], column + np.arange(across)[None, :]
            inside = (y >= 0) & (y < described.shape[0]) & (x >= 0) & (x < described.shape[1])
            matrix = (
                torch.as_strided(described.base, described.shape, described.strides).view(torch.int8).numpy().view(np.uint8)
            )
            tile = np.where(inside, matrix[np.where(inside, y, 0), np.where(inside, x, 0)], np.uint8(0))
            at = _swizzled(target + np.arange(height)[:, None] * across + np.arange(across)[None, :], width)
            program.shared[program.find_shared(at.reshape(-1), 1)] = tile.reshape(-1)
            here.bytes -= tile.size
            here.turn()

        program.send(here.kept, copy)

    return step


def _matrix_places(warp: Warp, address: str, count: int, transposed: bool) -> Bits:
    """Where the bytes of a thread's words lie: (count, lanes, 4), of matrices of 8 x 8 halves.

    Lane 8 i + j has the address of row j of matrix i, sixteen bytes. A word is two halves of a row or, transposed, a column.
    """
    base, offset = _address(address)
    rows = warp.program.find_shared(warp.read(base).astype(np.int64)[: 8 * count] + offset, 16).reshape(count, 8)
    near, far = _LANE[:, None] // 4, 2 * (_LANE[:, None] % 4) + np.arange(2)
    row, column = (far, near) if transposed else (near, far)
    halves = rows[:, row] + 2 * column
    return (halves[..., None] + np.arange(2)).reshape(count, LANES, 4)


def _make_ldmatrix(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    names = _listed(operands[0])

    def step(warp: Warp) -> None:
        for name, at in zip(names, _matrix_places(warp, operands[1], len(names), "trans" in modifiers), strict=True):
            warp.write(name, warp.program.shared[at].view(np.uint32)[:, 0])

    return step


def _make_stmatrix(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    names = _listed(operands[1])

    def step(warp: Warp) -> None:
        for name, at in zip(names, _matrix_places(warp, operands[0], len(names), "trans" in modifiers), strict=True):
            warp.program.shared[at] = _four(warp.read(name)).astype(np.uint8)

    return step


# --- instructions: products -------------------------------------------------------------------------------


def _saturated(x: Bits) -> Bits:
    return np.clip(x, -(2**31), 2**31 - 1).astype(np.int32)


def _rows_of(words: Sequence[Bits]) -> Bits:
    """The (16, 32) left operand of which a thread has four words."""
    matrix = np.zeros((16, 32), dtype=np.int8)
    for i, word in enumerate(words):
        rows, columns = _LANE // 4 + 8 * (i & 1), 4 * (_LANE % 4) + 16 * (i >> 1)
        matrix[rows[:, None], columns[:, None] + np.arange(4)] = _four(word)
    return matrix


def _spread_out(product: Bits) -> list[Bits]:
    """A (16, N) product as a thread's registers: two neighbouring columns of two rows eight apart, then the next columns."""
    return [
        np.ascontiguousarray(product[_LANE // 4 + 8 * (i >> 1), 2 * (_LANE % 4) + (i & 1) + start]).view(np.uint32)
        for start in range(0, product.shape[1], 8)
        for i in range(4)
    ]


def _brought_together(words: Sequence[Bits], columns: int) -> Bits:
    """Undo :func:`_spread_out`."""
    matrix = np.zeros((16, columns), dtype=np.int64)
    for i, word in enumerate(words):
        matrix[_LANE // 4 + 8 * (i >> 1 & 1), 2 * (_LANE % 4) + (i & 1) + 8 * (i // 4)] = _signed(word)
    return matrix


def _make_mma(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    assert modifiers[2] == "m16n8k32" and modifiers[-4:] == ["s32", "s8", "s8", "s32"], modifiers
    d, a, b, c = map(_listed, operands)

    def step(warp: Warp) -> None:
        left = _rows_of([warp.read(name) for name in a]).astype(np.int64)
        right = np.zeros((32, 8), dtype=np.int64)
        for i, name in enumerate(b):
            rows = 4 * (_LANE % 4) + 16 * i
            right[rows[:, None] + np.arange(4), (_LANE // 4)[:, None]] = _four(warp.read(name))
        product = left @ right + _brought_together([warp.read(name) for name in c], 8)
        for name, x in zip(d, _spread_out(_saturated(product)), strict=True):
            warp.write(name, x)

    return step


def _described(warp: Warp, descriptor: int, rows: int, pitch: int, across: bool = False) -> Bits:
    """The (rows, 32) bytes of a matrix in shared memory, whose rows lie side by side (K-major) or, ``across``, columns.

    Of the descriptor's swizzling, which targets number differently, ``pitch`` is the width, or 0.
    """
    start, stride = (descriptor & 0x3FFF) << 4, (descriptor >> 32 & 0x3FFF) << 4
    leading = (descriptor >> 16 & 0x3FFF) << 4
    n, k = np.arange(rows)[:, None], np.arange(32)[None, :]
    if across and pitch == 0:
        at = start + n % 16 + n // 16 * stride + k % 8 * 16 + k // 8 * leading
    elif across:
        at = start + n % pitch + n // pitch * leading + k % 8 * pitch + k // 8 * stride
    elif pitch == 0:
        at = start + n // 8 * stride + n % 8 * 16 + k // 16 * leading + k % 16
    else:
        at = start + n // 8 * stride + n % 8 * pitch + k
    if pitch:
        at = _swizzled(at, pitch)
    return warp.program.shared[warp.program.find_shared(at.reshape(-1), 1)].reshape(rows, 32).view(np.int8)


def _make_wgmma(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    if modifiers[0] == "fence":
        return lambda warp: None
    if modifiers[0] == "commit_group":
        return lambda warp: warp.queues["wgmma"].append([])
    if modifiers[0] == "wait_group":
        return lambda warp: warp.wait("wgmma", int(operands[0]))
    shape = re.fullmatch(r"m64n(\d+)k32", modifiers[3])
    assert shape and modifiers[-3:] == ["s32", "s8", "s8"] and len(operands) == 4, (modifiers, operands)
    columns = int(shape[1])
    d, a = _listed(operands[0]), _listed(operands[1])
    b, keep = operands[2], operands[3]

    def described(warp: Warp, descriptor: int, rows: int) -> Bits:
        return _described(warp, descriptor, rows, (0, 128, 64, 32)[descriptor >> 62])

    def step(warp: Warp) -> None:
        right = int(warp.read(b, 64)[0])
        kept = bool(warp.read(keep, 1)[0])
        left = [warp.read(name, 64 if len(a) == 1 else 32) for name in a]

        def multiply() -> None:
            if len(a) == 1:
                rows = described(warp, int(left[0][0]), 64)[16 * (warp.number % 4) :][:16]
            else:
                rows = _rows_of(left)
            product = rows.astype(np.int64) @ described(warp, right, columns).astype(np.int64).T
            if kept:
                product = product + _brought_together([warp.registers[name] for name in d], columns)
            for name, x in zip(d, _spread_out(product.astype(np.int32)), strict=True):
                warp.registers[name] = x

        warp.program.send(warp.queues["wgmma"][-1], multiply)

    return step


def _make_tcgen05(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    """The fifth generation's: operands and sums in tensor memory, 128 lanes of 512 words."""
    kind = modifiers[0]
    if kind in ("relinquish_alloc_permit", "dealloc", "wait::ld", "wait::st", "fence"):
        return lambda warp: None
    if kind in ("ld", "st"):
        return _tensor_memory(modifiers, operands)
    if kind == "alloc":
        base, offset = _address(operands[0])

        def allocate(warp: Warp) -> None:
            at = warp.program.find_shared(warp.read(base)[:1].astype(np.int64) + offset, 4)
            _scatter(warp.program.shared, at, [np.zeros(1, dtype=np.uint32)])

        return allocate
    if kind == "commit":
        base, offset = _address(operands[0])

        def commit(warp: Warp) -> None:
            program = warp.program
            (address,) = {int(x) + offset for x in warp.read(base)[warp.mask]}
            here, work = program.announced[address], program.uncommitted
            program.uncommitted = []

            def finish() -> None:
                for one in work:
                    one()
                here.pending -= 1
                here.turn()

            program.send(here.kept, finish)

        return commit
    assert kind == "mma" and modifiers[1:] == ["cta_group::1", "kind::i8"], modifiers
    return _tensor_product(operands)


def _tensor_memory(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    """Words from or to the quarter of the lanes that a warp has: a lane for each thread, or half of them in two pieces."""
    shape, count = modifiers[3], int(modifiers[4].removeprefix("x"))
    load = modifiers[0] == "ld"
    names = _listed(operands[0] if load else operands[-1])
    base, offset = _address(operands[1] if load else operands[0])
    assert shape in ("32x32b", "16x32bx2") and len(names) == count
    split = int(operands[2] if load else operands[1]) if shape == "16x32bx2" else 0

    def step(warp: Warp) -> None:
        address = int(warp.read(base)[0]) + offset
        lanes = (address >> 16) + (_LANE % 16 if split else _LANE)
        assert (lanes // 32 == warp.number % 4).all(), "lanes of another warp's"
        start = (address & 0xFFFF) + (split * (_LANE // 16) if split else 0 * _LANE)
        for i, name in enumerate(names):
            if load:
                warp.write(name, warp.program.tensor_memory[lanes, start + i])
            else:
                warp.program.tensor_memory[lanes, start + i] = warp.read(name)

    return step


def _tensor_product(operands: Sequence[str]) -> Step:
    (to, to_offset), b, kinds, keep = _address(operands[0]), *operands[2:]
    held = operands[1].startswith("[")
    a, a_offset = _address(operands[1])

    def step(warp: Warp) -> None:
        (lane,) = np.flatnonzero(warp.mask)
        program = warp.program
        form = int(warp.read(kinds)[lane])
        rows, columns = (form >> 24 & 31) << 4, (form >> 17 & 63) << 3
        assert form & 0x7FFF == 0x4A0, "signed bytes, sums of 32 bits"
        left, right = int(warp.read(a, 32 if held else 64)[lane]) + a_offset, int(warp.read(b, 64)[lane])
        target, kept = int(warp.read(to)[lane]) + to_offset, bool(warp.read(keep, 1)[lane])
        # sixteen rows to each quarter of the lanes, or thirty-two
        lanes = np.arange(rows) // (rows // 4) * 32 + np.arange(rows) % (rows // 4)

        def described(descriptor: int, count: int, across: bool = False) -> Bits:
            return _described(warp, descriptor, count, {0: 0, 2: 128, 4: 64, 6: 32}[descriptor >> 61], across)

        def multiply() -> None:
            memory = program.tensor_memory
            if held:
                words = np.ascontiguousarray(memory[lanes + (left >> 16)][:, (left & 0xFFFF) + np.arange(8)])
                x = words.view(np.int8).reshape(rows, 32)
            else:
                x = described(left, rows, bool(form >> 15 & 1))
            product = x.astype(np.int64) @ described(right, columns, bool(form >> 16 & 1)).astype(np.int64).T
            place = (lanes + (target >> 16))[:, None], (target & 0xFFFF) + np.arange(columns)[None, :]
            if kept:
                product = product + _signed(memory[place])
            memory[place] = product.astype(np.int32).view(np.uint32)

        program.send(program.uncommitted, multiply)

    return step
