"""The CPU kernels in a process of their own: built with sanitizers, for other instruction sets, or for another machine.

:class:`DriverLibrary` stands in for the library that :func:`qflash.kernels.cpu.launch.load` returns. Each call goes to
``driver.c`` with copies of exactly the memory that the call's sizes and strides reach, and outputs come back.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import dataclasses
import math
import os
import pathlib
import platform
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO

import pytest

from qflash import plan_cache
from qflash.kernels.cpu import launch

HERE = pathlib.Path(__file__).resolve().parent
KERNELS = pathlib.Path(launch.__file__).resolve().parent
MAGIC = 0x6873616C6671
"""What calls and results begin with."""
_LINE = 64
_FILL = 0xA5

SANITIZE = (
    "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fsanitize=float-cast-overflow,float-divide-by-zero",
    "-fno-sanitize-recover=all",
)  # fmt: skip
RACES = ("-g", "-fno-omit-frame-pointer", "-fsanitize=thread")
"""ThreadSanitizer. What threads wait for in OpenMP it knows of Clang's runtime, through LLVM's Archer, and not of GCC's."""
TRAP = ("-fsanitize=undefined", "-fsanitize=float-cast-overflow", "-fsanitize-undefined-trap-on-error")
"""Undefined behaviour ends the process without a word, but also without a library that may be missing for the target."""
# Memory that was not written yet holds anything but zeros, so that bits depend on a read of it. Stacks are not moved to the
# heap to find uses after a return: there GCC 12.2 puts vectors of 64 bytes where an aligned access to them ends the program
# (its bug 110027), and no kernel hands out an address on its stack.
SANITIZER_OPTIONS = {
    "ASAN_OPTIONS": "malloc_fill_byte=190:max_malloc_fill_size=1073741824:detect_stack_use_after_return=0:detect_leaks=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1:ignore_noninstrumented_modules=1",
}
_OWN_FLAGS = tuple(flag for flag in launch._FLAGS if flag not in ("-shared", "-fPIC"))
_IN_C = ("-w", "-include", str(HERE / "vectors_in_c.h"))


@dataclasses.dataclass(frozen=True)
class Level:
    """An instruction set that the C sources know.

    Attributes:
        flags: what chooses it.
        needs: what the CPU must have, as ``/proc/cpuinfo`` calls it.
        machine: what ``platform.machine()`` must be, or the target where ``compiler`` is a cross compiler.
        compiler: command of a cross compiler, or empty.
        emulator: command that runs the target's programs, or empty.
    """

    flags: tuple[str, ...]
    needs: tuple[str, ...] = ()
    machine: str = "x86_64"
    compiler: str = ""
    emulator: str = ""

    def missing(self) -> str | None:
        """Return why it cannot be built or run here, or None."""
        if self.compiler:
            absent = [name for name in (self.compiler, self.emulator) if not shutil.which(name)]
            return f"{' and '.join(absent)} not found" if absent else None
        if self.machine and platform.machine() != self.machine:
            return f"this machine is {platform.machine()}, not {self.machine}"
        try:
            launch._compiler()
        except launch.BuildError as error:
            return str(error)
        file = pathlib.Path("/proc/cpuinfo")
        known = file.read_text(encoding="utf-8").split() if file.is_file() else []
        absent = [name for name in self.needs if name not in known]
        return f"this CPU has no {', '.join(absent)}" if absent else None


def _arm(architecture: str) -> Level:
    """Return 64-bit Arm of an architecture, cross-compiled."""
    flags = ("-static", f"-march={architecture}")
    return Level(flags, machine="aarch64", compiler="aarch64-linux-gnu-gcc", emulator="qemu-aarch64")


LEVELS = {
    "native": Level(("-march=native", "-mprefer-vector-width=512"), machine=""),
    "portable": Level(("-U__SSE2__",)),
    "sse2": Level(("-march=x86-64",)),
    "avx2": Level(("-march=haswell",), ("avx2", "bmi2", "fma")),
    "avx-vnni": Level(("-march=haswell", "-mavxvnni"), ("avx2", "avx_vnni")),
    "avx-vnni in C": Level(("-march=haswell", *_IN_C, "-DIN_C_AVXVNNI"), ("avx2", "bmi2", "fma")),
    "avx512": Level(("-march=skylake-avx512", "-mprefer-vector-width=512"), ("avx512bw", "avx512dq", "avx512vl")),
    "avx512 in C": Level((*_IN_C, "-DIN_C_AVX512")),
    "avx512-vnni": Level(("-march=cascadelake", "-mprefer-vector-width=512"), ("avx512bw", "avx512_vnni")),
    "avx512-vnni in C": Level((*_IN_C, "-DIN_C_AVX512", "-DIN_C_AVX512VNNI")),
    "amx": Level(
        ("-march=cascadelake", "-mamx-tile", "-mamx-int8", "-mprefer-vector-width=512"), ("avx512bw", "avx512_vnni", "amx_int8")
    ),
    "aarch64": _arm("armv8-a"),
    "aarch64 dot product": _arm("armv8.2-a+dotprod"),
    "aarch64 i8mm": _arm("armv8.2-a+dotprod+i8mm"),
}
"""All of them. Those "in C" run the code for an instruction set with its instructions written out in C."""


NOTHING = "int main(void) { return 0; }\n"
MEETING = """
#include <omp.h>
int main(int count, char **words) {
    int seen[2] = {0};
    (void)words;
#pragma omp parallel num_threads(2)
    {
        seen[omp_get_thread_num()] = 1;
        if (count == 1) {
#pragma omp barrier
        }
        if (!seen[1 - omp_get_thread_num()]) count += 0;
    }
    return 0;
}
"""
"""Threads that read what the other has written, behind a barrier; with an argument without one, which is a race."""


def _cannot_run(text: str, checks: Sequence[str], *words: str) -> str | None:
    """Return why a C program cannot be built with ``checks``, or does not end well, or None."""
    try:
        compiler = launch._compiler()
    except launch.BuildError as error:
        return str(error)
    with tempfile.TemporaryDirectory() as folder:
        source, program = pathlib.Path(folder, "one.c"), pathlib.Path(folder, "one")
        source.write_text(text, encoding="utf-8")
        for command in ([*compiler, *checks, str(source), "-o", str(program)], [str(program), *words]):
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
                env={**os.environ, **SANITIZER_OPTIONS},
            )  # fmt: skip
            if done.returncode:
                said = done.stderr.strip("=\n ").splitlines() or [f"exit status {done.returncode}"]
                return f"{compiler[0]}: {said[0]}"
    return None


def sanitizers_missing() -> str | None:
    """Return why the compiler here makes no programs with sanitizers that run, or None."""
    reason = _cannot_run(NOTHING, SANITIZE)
    return f"no sanitizers that run here: {reason}" if reason else None


def races_missing() -> str | None:
    """Return why ThreadSanitizer does not tell races between OpenMP's threads from none here, or None."""
    checks = (*RACES, "-fopenmp")
    if reason := _cannot_run(NOTHING, checks):
        return f"no ThreadSanitizer that runs here: {reason}"
    if reason := _cannot_run(MEETING, checks):
        return f"ThreadSanitizer does not know OpenMP's barriers here (it does with clang and libomp): {reason}"
    return None if _cannot_run(MEETING, checks, "race") else "ThreadSanitizer does not find a race here"


class DriverError(RuntimeError):
    """The driver could not be built, or ended on a call; the message has what it said."""


def build(level: Level, folder: pathlib.Path, checks: Sequence[str], optimise: str = "", threads: bool = True) -> pathlib.Path:
    """Compile the kernels and the driver; return the program.

    Args:
        level: for which instructions.
        folder: where it goes.
        checks: :data:`SANITIZE`, :data:`RACES`, :data:`TRAP` or nothing.
        optimise: instead of the optimisation that the kernels are shipped with.
        threads: whether with OpenMP.

    Raises:
        DriverError: the compiler refused it.
    """
    compiler = [level.compiler] if level.compiler else launch._compiler()
    program = folder / "driver"
    sources = [str(HERE / "driver.c"), *(str(KERNELS / name) for name in launch._SOURCES)]
    flags = [*_OWN_FLAGS, *([optimise] if optimise else []), *level.flags, *(["-fopenmp"] if threads else [])]
    command = [*compiler, *flags, *checks, f"-I{KERNELS}", *sources, "-o", str(program), "-lm"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    if done.returncode:
        raise DriverError(f"{' '.join(command)}\n{done.stderr}")
    return program


@dataclasses.dataclass
class _Buffer:
    """Memory that a call reaches.

    Attributes:
        data: what is in it before.
        address: where it is in this process.
        output: whether it is written.
        pointers: where in it there are addresses, and of which buffers.
    """

    data: bytes
    address: int = 0
    output: bool = False
    pointers: list[tuple[int, int]] = dataclasses.field(default_factory=list)


def _span(sizes: Sequence[int], strides: Sequence[int], item: int) -> int:
    """Return the bytes from the first element to the end of the last."""
    return 0 if 0 in sizes else item * (1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)))


_Spans = Callable[[Sequence[int]], dict[str, int]]
"""Bytes behind each pointer of a structure, by its integers."""


def _attention_spans(x: Sequence[int]) -> dict[str, int]:
    batch, heads, key_heads, queries, keys, head_dim, value_dim, *rest = x
    numbers = iter(rest)
    q, k, v = ([next(numbers) for _ in range(4)] for _ in range(3))
    qs, ks, vs, os, vo, o = ([next(numbers) for _ in range(3)] for _ in range(6))
    m = [next(numbers) for _ in range(4)]
    period, masked, _, _, output_group, int8_output, *_ = numbers
    mask = _span((period, heads, queries, keys), m, 4 if masked == 2 else 1)
    return {
        "q": _span((batch, heads, queries, head_dim), q, 1),
        "k": _span((batch, key_heads, keys, head_dim), k, 1),
        "v": _span((batch, key_heads, keys, value_dim), v, 1),
        "qs": _span((batch, heads, queries), qs, 4),
        "ks": _span((batch, key_heads, keys), ks, 4),
        "vs": _span((batch, key_heads, value_dim), vs, 4),
        "os": _span((batch, heads // output_group, value_dim), os, 4),
        "offset": _span((batch, key_heads, value_dim), vo, 4),
        "mask": mask if masked else 0,
        "out": _span((batch, heads, queries, value_dim), (*o, 1), 1 if int8_output else 4),
        "scratch": 0,
    }


def _conversion_spans(x: Sequence[int]) -> dict[str, int]:
    sizes, strides, granularity, center = x[:4], x[4:8], x[8], x[9]
    batch, heads, tokens, channels = sizes
    scales = (1, batch * heads, batch * heads * tokens, batch * heads * channels)[granularity]
    offsets = batch * heads * channels * 4
    if center == launch._GIVEN:
        scales, offsets = heads * channels, heads * channels * 4
    return {"x": _span(sizes, strides, 4), "values": math.prod(sizes), "scale": 4 * scales, "offset": offsets}


def _linear_spans(x: Sequence[int]) -> dict[str, int]:
    rows, inputs, outputs, _, item, _, _, input_bytes, _ = x
    constants = dict.fromkeys(("bias", "multiplier", "activation_multiplier", "activation_offset"), 4 * outputs)
    activations = {"x": input_bytes * rows * inputs, "residual": 2 * rows * outputs, "out": item * rows * outputs}
    # weights are packed in the call
    return {"weight": outputs * inputs, **constants, **activations, "packed": 0, "scratch": 0}


def _norm_spans(x: Sequence[int]) -> dict[str, int]:
    rows, channels, _, _, item, *_ = x
    activations = {"h": 2 * rows * channels, "residual": 2 * rows * channels, "out": item * rows * channels}
    return activations | {"gain": 4 * channels, "offset": 4 * channels}


def _narrow_spans(x: Sequence[int]) -> dict[str, int]:
    rows, channels, _, _, item = x
    constants = {"multiplier": 4 * channels, "offset": 4 * channels}
    return constants | {"h": 2 * rows * channels, "out": item * rows * channels}


def _gated_spans(x: Sequence[int]) -> dict[str, int]:
    rows, channels, _, _, item, _ = x
    return {"x": 4 * rows * channels, "multiplier": 4 * channels, "offset": 4 * channels, "out": item * rows * channels}


def _mean_spans(x: Sequence[int]) -> dict[str, int]:
    images, tokens, channels, image, token, _, item = x
    last = (images - 1) * image + (tokens - 1) * token + channels
    return {"x": 2 * last, "multiplier": 4 * channels, "offset": 4 * channels, "out": item * images * channels}


def _patches_spans(x: Sequence[int]) -> dict[str, int]:
    size = math.prod(x[:4])
    return {"x": size, "out": size}


def _rotary_spans(x: Sequence[int]) -> dict[str, int]:
    rows, tokens, channels, heads, half, item, _ = x
    constants = {"turns": 4 * heads * tokens * half, "offset": 4 * channels, "multiplier": 4 * channels}
    return {"x": 2 * rows * channels, **constants, "out": item * rows * channels}


class DriverLibrary:
    """What :func:`qflash.kernels.cpu.launch.load` returns, with the functions in another process.

    Attributes:
        calls: how many have been made.
        pointer_bytes: of the machine that the driver runs on, 8 or 4.
        record: where calls are written, too, for a machine that this one cannot run.
        answers: where what the driver returns is written, too.
    """

    _ORDER = (
        "attention", "attention_at", "quantize", "bias", "float_attention", "linear", "layer_norm", "varlen_attention", "seen",
        "gated", "mean", "patches", "move_rows", "rotary", "narrow",
    )  # fmt: skip
    """Functions by their numbers in ``driver.c``."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], pointer_bytes: int = 8) -> None:
        """Start nothing yet.

        Args:
            command: program and arguments.
            environment: of the process.
            pointer_bytes: of the machine that the program runs on.
        """
        self.command, self.environment, self.pointer_bytes = list(command), environment, pointer_bytes
        self.record: BinaryIO | None = None
        self.answers: BinaryIO | None = None
        self.calls = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._said: Any = None
        for name in self._ORDER:
            setattr(self, f"qflash_{name}", getattr(self, f"_{name}"))

    def close(self) -> None:
        """End the process, and require that it ended well.

        Raises:
            DriverError: it did not.
        """
        if self._process is None:
            return
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        status, said = self._process.returncode, self._words()
        self._process = None
        if status:
            raise DriverError(f"the driver ended with status {status}\n{said}")

    def _words(self) -> str:
        self._said.seek(0)
        return self._said.read().decode(errors="replace")

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._said = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the process
            self._process = subprocess.Popen(
                self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, env=self.environment
            )
        return self._process

    def _call(self, name: str, buffers: list[_Buffer], arguments: Sequence[int]) -> int:
        """Have a call made, and write its outputs where they belong."""
        numbers = [MAGIC, self._ORDER.index(name), len(buffers), len(arguments)]
        parts = [struct.pack(f"<{len(numbers)}q", *numbers)]
        for one in buffers:
            flat = [number for pointer in one.pointers for number in pointer]
            about = (len(one.data), one.address % _LINE, int(one.output), len(one.pointers), *flat)
            parts += [struct.pack(f"<{len(about)}q", *about), one.data]
        parts.append(struct.pack(f"<{len(arguments)}q", *arguments))
        said = b"".join(parts)
        self.calls += 1
        if self.record is not None:
            self.record.write(said)
        process = self._running()
        assert process.stdin is not None and process.stdout is not None
        wanted = 16 + sum(len(one.data) for one in buffers if one.output)
        try:
            process.stdin.write(said)
            process.stdin.flush()
            got = process.stdout.read(wanted)
        except BrokenPipeError:
            got = b""
        if len(got) != wanted:
            process.wait()
            status, words = process.returncode, self._words()
            self._process = None
            raise DriverError(f"qflash_{name}: the driver ended with status {status}\n{words}")
        if self.answers is not None:
            self.answers.write(got)
        magic, result = struct.unpack("<2q", got[:16])
        assert magic == MAGIC
        at = 16
        for one in buffers:
            if one.output:
                ctypes.memmove(one.address, got[at : at + len(one.data)], len(one.data))
                at += len(one.data)
        return result

    @staticmethod
    def _add(buffers: list[_Buffer], address: int, size: int, output: bool) -> int:
        """Add memory, and return its number; -1 for NULL. What is written is not sent."""
        if not address:
            return -1
        buffers.append(_Buffer(bytes([_FILL]) * size if output else ctypes.string_at(address, size), address, output))
        return len(buffers) - 1

    def _add_struct(self, buffers: list[_Buffer], value: Any, spans: _Spans, outputs: Sequence[str]) -> int:
        """Add a structure, and what its pointers point to."""
        sizes, at = spans(list(value.integers)), len(buffers)
        buffers.append(_Buffer(self._without_pointers(value)))
        for place, (name, _) in enumerate(value._fields_[:-1]):
            number = self._add(buffers, getattr(value, name) or 0, sizes[name], name in outputs)
            if number >= 0:
                buffers[at].pointers.append((place * self.pointer_bytes, number))
        return at

    def _without_pointers(self, value: Any) -> bytes:
        """Return a structure as the driver's machine has it, with NULL for all pointers, which integers of 8 bytes follow."""
        pointers = len(value._fields_) - 1
        return bytes(-(-self.pointer_bytes * pointers // 8) * 8) + bytes(value)[8 * pointers :]

    def _simple(self, name: str, argument: Any, spans: _Spans, outputs: Sequence[str]) -> int:
        buffers: list[_Buffer] = []
        return self._call(name, buffers, [self._add_struct(buffers, argument._obj, spans, outputs)])

    def _attention(self, argument: Any) -> int:
        return self._simple("attention", argument, _attention_spans, ("out",))

    def _quantize(self, argument: Any) -> int:
        given = argument._obj.integers[9] == launch._GIVEN
        return self._simple("quantize", argument, _conversion_spans, ("values",) if given else ("values", "scale", "offset"))

    def _linear(self, argument: Any) -> int:
        return self._simple("linear", argument, _linear_spans, ("out",))

    def _layer_norm(self, argument: Any) -> int:
        return self._simple("layer_norm", argument, _norm_spans, ("out",))

    def _gated(self, argument: Any) -> int:
        return self._simple("gated", argument, _gated_spans, ("out",))

    def _mean(self, argument: Any) -> int:
        return self._simple("mean", argument, _mean_spans, ("out",))

    def _patches(self, argument: Any) -> int:
        return self._simple("patches", argument, _patches_spans, ("out",))

    def _move_rows(self, argument: Any) -> int:
        images, rows, size, x_image, x_row, out_image, out_row, _ = argument._obj.integers
        index = argument._obj.index
        last = max((ctypes.c_int32 * rows).from_address(index)) if index else rows - 1
        # what lies between rows of the output stays
        spans = {
            "x": (images - 1) * x_image + last * x_row + size, "index": 4 * rows,
            "out": (images - 1) * out_image + (rows - 1) * out_row + size,
        }  # fmt: skip
        return self._simple("move_rows", argument, lambda _: spans, ("out",))

    def _rotary(self, argument: Any) -> int:
        return self._simple("rotary", argument, _rotary_spans, ("out",))

    def _narrow(self, argument: Any) -> int:
        return self._simple("narrow", argument, _narrow_spans, ("out",))

    def _bias(self, x: int, out: int, sizes: Any) -> None:
        rows, keys, _ = sizes._obj
        buffers: list[_Buffer] = []
        given = [self._add(buffers, x, 4 * rows * keys, False), self._add(buffers, out, 4 * rows * keys, True)]
        buffers.append(_Buffer(bytes(sizes._obj)))
        self._call("bias", buffers, [*given, len(buffers) - 1])

    def _seen(self, mask: int, seen: int, sizes: Any) -> None:
        period, heads, group, rows, keys, *strides, biased, _ = sizes._obj
        last = sum((size - 1) * stride for size, stride in zip((period, heads * group, rows, keys), strides, strict=True))
        buffers: list[_Buffer] = []
        given = [
            self._add(buffers, mask, (1 + last) * (4 if biased else 1), False),
            self._add(buffers, seen, period * heads * keys, True),
        ]
        buffers.append(_Buffer(bytes(sizes._obj)))
        self._call("seen", buffers, [*given, len(buffers) - 1])

    def _attention_at(self, like: Any, *addresses: int) -> int:
        sizes = _attention_spans(list(like._obj.integers))
        buffers = [_Buffer(self._without_pointers(like._obj))]
        names = launch._POINTERS
        given = [self._add(buffers, at, sizes[name], name == "out") for name, at in zip(names, addresses, strict=True)]
        return self._call("attention_at", buffers, [0, *given])

    def _float_attention(self, three: Any, like: Any, *addresses: int) -> int:
        sizes = [_conversion_spans(list(one.integers))["x"] for one in three._obj]
        whole = _attention_spans(list(like._obj.integers))
        buffers = [
            _Buffer(b"".join(self._without_pointers(one) for one in three._obj)),
            _Buffer(self._without_pointers(like._obj)),
        ]
        sizes += [whole["mask"], whole["out"]]
        given = [
            self._add(buffers, at, size, number == 4) for number, (at, size) in enumerate(zip(addresses, sizes, strict=True))
        ]
        return self._call("float_attention", buffers, [0, 1, *given])

    def _varlen_attention(self, three: Any, like: Any, packing: Any, out: int) -> int:
        buffers = [
            _Buffer(b"".join(self._without_pointers(one) for one in three._obj)),
            _Buffer(self._without_pointers(like._obj)),
        ]
        for index, one in enumerate(three._obj):
            number = self._add(buffers, one.x or 0, _conversion_spans(list(one.integers))["x"], False)
            if number >= 0:
                buffers[0].pointers.append((index * len(self._without_pointers(one)), number))
        lengths = dict.fromkeys(("cu_q", "cu_k"), 8 * (packing._obj.integers[0] + 1))
        where = self._add_struct(buffers, packing._obj, lambda _: lengths, ())
        queries, heads, value_dim = three._obj[0].integers[2], like._obj.integers[1], like._obj.integers[6]
        buffers.append(_Buffer(bytes([_FILL]) * (4 * queries * heads * value_dim), out, True))
        return self._call("varlen_attention", buffers, [0, 1, where, len(buffers) - 1])


@contextlib.contextmanager
def kernels_in(library: DriverLibrary, threads_for: Callable[[int], int] = launch.threads_for) -> Iterator[DriverLibrary]:
    """Have the CPU back end's calls made by a driver, repeated ones as well; at the end it must have ended well.

    Args:
        library: what makes them.
        threads_for: how many threads a number of multiply-adds gets.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "load", lambda: library)
        patch.setattr(launch, "threads_for", threads_for)
        patch.setattr(plan_cache, "_plans", collections.OrderedDict())
        patch.setattr(plan_cache, "_unrepeatable", collections.OrderedDict())
        yield library
    library.close()
