"""Write an integer network as a program in C: :func:`export_c`.

The file ``network.bin``, in words of 64 bits, little-endian:

* ``QFLASHC2``; bytes of the arena; where constants begin; place of the images in the arena, and their bytes; how many calls;
  how many outputs; (images, channels, height, width); 0
* for each output: its name (64 bytes, ended by a zero), place in the arena, dimensions, four sizes, scale (float64), 0
* for each call: number in :data:`FUNCTIONS`, how many pointers, how many integers; pointers as (0 constant, 1 arena or -1 NULL,
  place in bytes); integers
* constants, at a multiple of 64 bytes; the sum of all words before, each times the odd number of its place
"""

from __future__ import annotations

import importlib.resources
import os
import pathlib
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..scalars import whole_number
from .cpu_graph import make_plan
from .export_checks import to_export
from .graph import IntegerNetwork

if TYPE_CHECKING:
    from ..kernels.cpu.plan import Plan

FUNCTIONS = ("linear", "layer_norm", "attention", "mean", "patches", "move_rows", "gated", "rotary", "narrow")
"""Functions of C that a network calls, in the order of ``runtime.c``."""
NAME_BYTES = 64
"""Of an output, with a zero at the end."""
_LINE = 64
_KERNELS = ("attention.c", "network.c", "threads.c", "products.h", "threads.h")
_PROGRAM = ("runtime.c", "main.c", "qflash_network.h", "arm.c", "paths.h", "Makefile")
SOURCES = ("runtime.c", "network.c", "attention.c", "threads.c")
"""What other programs, and WebAssembly, are compiled of."""


def export_c(
    network: IntegerNetwork, folder: str | os.PathLike[str], *, batch: int = 1, size: int | Sequence[int] | None = None
) -> None:
    """Write a network as C sources with its weights: ``make`` builds a program that prints what the network computes.

    ``./network images.raw`` takes uint8 pixels (batch, channels, height, width) and prints int32 outputs, bit for bit those of
    the network; ``qflash_network.h`` is the interface for other programs. A C compiler with GCC's vector types is all that is
    needed, GCC or Clang. The machine that builds it need not be this one, but has to be little-endian, as all current ones are.

    Args:
        network: what :func:`qflash.quantize_model` or :func:`qflash.load_model` returns, on the CPU.
        folder: is made if it is not there. Files of the same names are replaced.
        batch: images of a call, at least 1.
        size: of the images, of a network with several; the first of ``network.image_sizes`` if None.

    Raises:
        TypeError: an argument is of another type.
        ValueError: ``batch`` is below 1, a node has no C kernel, or an output's name is too long.
        RuntimeError: there are no C kernels on this machine.
        OSError: the folder cannot be written to.
    """
    write_program(to_export(network, folder, size), folder, batch)


def write_program(network: IntegerNetwork, folder: str | os.PathLike[str], batch: int = 1) -> None:
    """Write what :func:`export_c` does, of a network and a path that were checked."""
    batch = whole_number("batch", batch, 1)
    for name in network.outputs:
        if len(name.encode()) >= NAME_BYTES:
            raise ValueError(f"names of outputs must have at most {NAME_BYTES - 1} bytes, got {name!r}")
    plan, images = make_plan(network, batch)
    content = _written(plan, images, network.scales)
    place = pathlib.Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    here = importlib.resources.files("qflash.kernels.cpu")
    for source, names in ((here, _KERNELS), (here.joinpath("program"), _PROGRAM)):
        for name in names:
            (place / name).write_bytes(source.joinpath(name).read_bytes())
    (place / "network.bin").write_bytes(content)


def _words(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}q", *numbers)


def _aligned(size: int) -> int:
    return -(-size // _LINE) * _LINE


def _written(plan: Plan, images: torch.Tensor, scales: dict[str, float]) -> bytes:
    """Return the file's bytes."""
    constants = bytearray()
    places: dict[int, int] = {}

    def place_of(x: torch.Tensor) -> int:
        storage = x.untyped_storage()
        if storage.data_ptr() not in places:
            constants.extend(bytes(_aligned(len(constants)) - len(constants)))
            places[storage.data_ptr()] = len(constants)
            constants.extend(torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).numpy().tobytes())
        return places[storage.data_ptr()]

    calls = []
    for call, pointers in zip(plan.calls, plan.pointers, strict=True):
        flat = []
        for each in pointers:
            if each is None:
                flat += [-1, 0]
            elif each.constant is None:
                flat += [1, each.place]
            else:
                flat += [0, place_of(each.constant) + each.place]
        integers = list(call.arguments.integers)
        calls.append(_words(FUNCTIONS.index(call.function), len(flat) // 2, len(integers), *flat, *integers))
    outputs = []
    for name, (place, like) in plan.outputs.items():
        sizes = [*like.shape, *(1,) * (4 - like.dim())]
        scale = struct.pack("<d", scales[name])
        outputs.append(name.encode().ljust(NAME_BYTES, b"\0") + _words(place, like.dim(), *sizes) + scale + _words(0))
    body = b"".join((*outputs, *calls))
    begin = _aligned(8 + 11 * 8 + len(body))
    header = _words(
        plan.arena_bytes, begin, plan.given, images.numel(), len(calls), len(outputs), *images.shape, 0
    )  # fmt: skip
    constants.extend(bytes(_aligned(len(constants)) - len(constants)))
    whole = (b"QFLASHC2" + header + body).ljust(begin, b"\0") + bytes(constants)
    return whole + struct.pack("<Q", _checksum(whole))


def _checksum(content: bytes) -> int:
    """Return the sum of all words of eight bytes, each times the odd number of its place, modulo 2**64."""
    import numpy as np

    words = np.frombuffer(content, "<u8")
    return int((words * (2 * np.arange(len(words), dtype=np.uint64) + np.uint64(1))).sum())
