"""A noted row of C calls that is made again on other numbers: :class:`Plan`.

Tensors that calls write lie in one piece of memory, the arena, where each is as long as it is needed. All others are constants.
"""

from __future__ import annotations

import ctypes
import dataclasses
import threading
from collections.abc import Mapping, Sequence

import torch

from .launch import Call, arguments_type, check_memory, load
from .network import LINEAR

LINE = 64
"""Bytes of a cache line; arrays begin at multiples of it."""
_Run = arguments_type(("function", "arguments"), 0)


@dataclasses.dataclass
class _Array:
    """Memory that tensors of calls lie in.

    Attributes:
        tensor: one of them, which keeps it.
        size: bytes.
        first, last: the calls between which it is in use, where calls write it; None for a constant.
        place: where it lies in the arena, in bytes.
    """

    tensor: torch.Tensor
    size: int
    first: int | None = None
    last: int = 0
    place: int = 0


def _address(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _places(arrays: Sequence[_Array]) -> int:
    """Choose a place in the arena for each array, in the order of their first use; return the arena's bytes."""
    taken: list[_Array] = []
    end = 0
    for array in sorted(arrays, key=lambda each: (each.first, -each.size)):
        assert array.first is not None
        taken = sorted((each for each in taken if each.last >= array.first), key=lambda each: each.place)
        at = 0
        for other in taken:
            if at + array.size <= other.place:
                break
            at = max(at, other.place + other.size)
        array.place = at
        taken.append(array)
        end = max(end, at + array.size)
    return end


@dataclasses.dataclass(frozen=True)
class Pointer:
    """What a pointer of a call is: ``place`` bytes behind the begin of a constant or of the arena."""

    constant: torch.Tensor | None
    place: int


class Plan:
    """Calls that turn an input into outputs, on memory of their own.

    Attributes:
        calls: as they were noted.
        pointers: of each call, in the order of its tensors; None for NULL.
        arena_bytes: memory that all written arrays take.
        given: place of the input in the arena.
        outputs: place of each output in the arena, and a tensor of its shape and type, by its name.
    """

    def __init__(self, calls: Sequence[Call], given: torch.Tensor, outputs: Mapping[str, torch.Tensor]) -> None:
        """Lay the memory out.

        Args:
            calls: noted.
            given: the input of the first, contiguous.
            outputs: tensors that calls have written, contiguous.

        Raises:
            ValueError: an output was written by no call.
        """
        self.calls = list(calls)
        arrays: dict[int, _Array] = {}

        def array_of(x: torch.Tensor) -> _Array:
            bytes_of = -(-x.untyped_storage().nbytes() // LINE) * LINE
            return arrays.setdefault(_address(x), _Array(x, bytes_of))

        array_of(given).first = 0
        for number, call in enumerate(self.calls):
            for name, x in zip(call.pointers, call.tensors, strict=True):
                if x is not None:
                    array = array_of(x)
                    array.last = number
                    if name == "out" and array.first is None:
                        array.first = number
        for name, x in outputs.items():
            array = array_of(x)
            array.last = len(self.calls)
            if array.first is None:
                raise ValueError(f"output {name!r} is written by no call")
        self.arena_bytes = _places([array for array in arrays.values() if array.first is not None])

        def pointer(x: torch.Tensor) -> Pointer:
            array, behind = arrays[_address(x)], x.data_ptr() - _address(x)
            return Pointer(array.tensor, behind) if array.first is None else Pointer(None, array.place + behind)

        self.pointers = [[None if x is None else pointer(x) for x in call.tensors] for call in self.calls]
        self.given = pointer(given).place
        self.outputs = {name: (pointer(x).place, torch.empty_like(x, device="meta")) for name, x in outputs.items()}


class Runner:
    """Runs a plan. Calls of one runner wait for each other; those of several do not.

    Weights of linear layers are packed once, and all memory that calls need is reserved: C allocates none in a run, once it has
    its threads.
    """

    def __init__(self, plan: Plan, given: torch.Tensor) -> None:
        """Reserve memory and pack weights.

        Args:
            plan: to run.
            given: a tensor like the input.

        Raises:
            MemoryError: there is too little.
        """
        library = load()
        self._lock = threading.Lock()
        self._kept: list[torch.Tensor] = []
        self._arena = self._memory(plan.arena_bytes)
        self._given = self._view(plan.given, given)
        self._outputs = {name: self._view(place, like) for name, (place, like) in plan.outputs.items()}
        packed: dict[tuple[int, ...], int] = {}
        self._arguments = []
        scratch = 0
        for call, pointers in zip(plan.calls, plan.pointers, strict=True):
            own = type(call.arguments).from_buffer_copy(call.arguments)
            for name, pointer in zip(call.pointers, pointers, strict=True):
                setattr(own, name, None if pointer is None else self._at(pointer))
            if isinstance(own, LINEAR) and own.integers[7] == 1:  # of int8 inputs
                key = own.weight, own.integers[1], own.integers[2]
                if key not in packed:
                    packed[key] = self._memory(library.qflash_packed_bytes(ctypes.byref(own))).data_ptr()
                    own.packed = packed[key]
                    library.qflash_pack(ctypes.byref(own))
                own.packed = packed[key]
            if hasattr(own, "scratch"):
                scratch = max(scratch, getattr(library, f"qflash_{call.function}_scratch")(ctypes.byref(own)))
            self._arguments.append(own)
        for_all = self._memory(scratch).data_ptr()
        for own in self._arguments:
            if hasattr(own, "scratch"):
                own.scratch = for_all
        self._calls = (_Run * len(self._arguments))()
        for run, call, own in zip(self._calls, plan.calls, self._arguments, strict=True):
            run.function = ctypes.cast(getattr(library, f"qflash_{call.function}"), ctypes.c_void_p).value
            run.arguments = ctypes.addressof(own)
        self._count = ctypes.c_int64(len(self._arguments))
        self._run = library.qflash_run

    def _memory(self, size: int) -> torch.Tensor:
        whole = torch.empty(size + LINE, dtype=torch.uint8, device="cpu")
        self._kept.append(whole)
        return whole[-whole.data_ptr() % LINE :][:size]

    def _view(self, place: int, like: torch.Tensor) -> torch.Tensor:
        size = like.numel() * like.element_size()
        return self._arena[place : place + size].view(like.dtype).view(like.shape)

    def _at(self, pointer: Pointer) -> int:
        if pointer.constant is None:
            return self._arena.data_ptr() + pointer.place
        self._kept.append(pointer.constant)
        return _address(pointer.constant) + pointer.place

    def __call__(self, given: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return new tensors with the outputs.

        Raises:
            MemoryError: there is too little.
        """
        with self._lock:
            self._given.copy_(given)
            check_memory(self._run(self._calls, ctypes.byref(self._count)), "for a forward pass")
            return {name: x.clone() for name, x in self._outputs.items()}
