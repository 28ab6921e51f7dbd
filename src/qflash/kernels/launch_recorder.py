"""Kernel launches spelt out, noted while a call makes them, and made again on other tensors."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar, Token
from typing import Any, NamedTuple

import torch

from ..torch_internals import LightDispatchMode
from .device import entered

_aten = torch.ops.aten
# what a call may do between launches, besides views, and still be no more than these launches
_ALLOCATIONS = frozenset((
    _aten.empty.memory_format, _aten.empty_strided.default, _aten.empty_like.default, _aten.new_empty.default,
    _aten.new_empty_strided.default,
))  # fmt: skip
_ALIGNMENT = 512
"""Of temporary tensors in bytes, as PyTorch's own allocations on a GPU have it."""


class ScoreTile(NamedTuple):
    """Scores (query times key) that a program computes.

    Attributes:
        queries, keys: rows and columns, padding included.
        whole: whether that is all of a program's code, or one iteration of its loops over the keys.
    """

    queries: int
    keys: int
    whole: bool


@functools.cache
def _group_type(names: tuple[str, ...]) -> Any:
    return collections.namedtuple("Group", names)


def group(**values: Any) -> Any:
    """Return values, all tensors or all numbers, as one argument of a kernel: a named tuple.

    Triton specialises each of the numbers by itself, whatever the kernel says of the tuple.
    """
    return _group_type(tuple(values))(*values.values())


def kernel_arguments(kernel: Any, arguments: Mapping[str, Any], groups: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return a kernel's arguments by name, some of them made by :func:`group`.

    Args:
        kernel: Triton's function.
        arguments: those of the kernel and of its groups, and perhaps more.
        groups: what the groups have, by the name of the kernel's argument.
    """
    made = {name: group(**{each: arguments[each] for each in names}) for name, names in groups.items()}
    return {name: made[name] if name in made else arguments[name] for name in kernel.arg_names}


def each_argument(arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Return a launch's arguments by name, those of a :func:`group` one by one."""
    for name, x in arguments.items():
        yield from zip(x._fields, x, strict=True) if hasattr(x, "_fields") else ((name, x),)


class KernelLaunch(NamedTuple):
    """One kernel launch: what :func:`.dispatch.launch_attention` runs and ``qflash-lab verify`` compiles.

    Attributes:
        kernel: Triton's function.
        grid: programs.
        arguments: by name, see :func:`kernel_arguments`.
        options: Triton's own, for instance ``num_warps``.
        family: of attention kernels, for instance ``"sm90.resident"``; empty for any other kernel.
        scores: what an attention kernel computes at a time.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, Any]
    family: str = ""
    scores: ScoreTile | None = None

    def run(self) -> None:
        """Launch it on the tensors it names; note it where a :class:`LaunchRecorder` is on."""
        recorder = _recorder.get()
        if recorder is None:
            self.make()
        else:
            recorder.launch(self)

    def make(self) -> None:
        """Launch it, on the GPU that its tensors are on."""
        with entered(self.device):
            self.kernel[self.grid](**self.arguments, **self.options)

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        for x in self.arguments.values():
            tensor = getattr(x, "base", x)
            if isinstance(tensor, torch.Tensor):
                return tensor.device
        raise ValueError(f"a launch of {self.kernel.__name__} must have a tensor among its arguments")

    def launcher(self) -> Callable[..., None]:
        """Return what launches the compiled kernel, given all arguments in order, addresses for tensors.

        It is compiled and loaded for the GPU that the tensors are on, which has to be the current one when it is launched.
        """
        with entered(self.device):
            # looked up, not launched; a compiled kernel asks for all three dimensions
            return self.kernel.warmup(grid=self.grid, **self.arguments, **self.options)[(*self.grid, 1, 1)[:3]]


def launch_kernel(kernel: Any, grid: tuple[int, ...], *values: Any, **named: Any) -> None:
    """Launch ``kernel[grid](*values, **named)``, as a :class:`KernelLaunch`."""
    names = kernel.arg_names
    arguments = dict(zip(names, values, strict=False)) | {name: x for name, x in named.items() if name in names}
    KernelLaunch(kernel, grid, arguments, {name: x for name, x in named.items() if name not in names}).run()


def _has_tensor(x: Any) -> bool:
    if isinstance(x, dict):
        x = tuple(x.values())
    return any(map(_has_tensor, x)) if isinstance(x, (tuple, list)) else isinstance(x, torch.Tensor)


_recorder: ContextVar[LaunchRecorder | None] = ContextVar("recorder", default=None)


class LaunchRecorder(LightDispatchMode):
    """Notes the launches made meanwhile, and whether PyTorch computed anything besides.

    Attributes:
        launches: in order; they keep the tensors that they name.
        is_pure: nothing else happened than launches, allocations and views, so that the launches alone give the same again.
        launching: whether the launches are made, too; if not, tensors may be without memory.
    """

    def __init__(self, *, launching: bool = True) -> None:
        super().__init__()
        self.launching = launching
        self.launches: list[KernelLaunch] = []
        self.is_pure = True
        self._allocated: set[int] = set()
        self._in_launch = False
        self._tokens: list[Token[LaunchRecorder | None]] = []

    def __enter__(self) -> LaunchRecorder:
        self._tokens.append(_recorder.set(self))
        super().__enter__()
        return self

    def __exit__(self, *about: Any) -> None:
        super().__exit__(*about)
        _recorder.reset(self._tokens.pop())

    def launch(self, launch: KernelLaunch) -> None:
        """Note a launch, and make it if launches are made, too."""
        self.launches.append(launch)
        if self.launching:
            # what a launch does is no part of the call around it: the interpreter's copies are PyTorch's
            self._in_launch = True
            try:
                launch.make()
            finally:
                self._in_launch = False

    def dispatch(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make the call; see what it was."""
        result = function(*args, **kwargs)
        if self._in_launch:
            return result
        if function in _ALLOCATIONS:
            self._allocated.add(result.untyped_storage().data_ptr())
        elif not function.is_view and _has_tensor((args, kwargs, result)):
            self.is_pure = False
        return result

    def repeat(self, tensors: Sequence[torch.Tensor | None], out: torch.Tensor) -> Callable[..., torch.Tensor] | None:
        """Return a function that makes the launches again on tensors of the same shapes, strides, types and alignment.

        It keeps the compiled kernels and everything about their arguments but the addresses, which leaves a call little more
        to do than the launches. The caller answers for the tensors being alike.

        Args:
            tensors: what the call took, no two of them from the same address on.
            out: what it returned; every call makes a new one.

        Returns:
            the function, which takes such ``tensors``; None if the launches are not all there is to it, or go somewhere else.
        """
        output = out.untyped_storage().data_ptr()
        if not self.is_pure or not self.launches or out.storage_offset() or output not in self._allocated:
            return None
        # what an address is relative to: the tensors of the call, its output, or one allocation for all that is temporary
        bases = {x.data_ptr(): index for index, x in enumerate(tensors) if x is not None}
        at_out, at_scratch = len(tensors), len(tensors) + 1
        begins: dict[int, int] = {}
        size, used = 0, set()
        steps: list[_Step] = []

        def place_of(tensor: torch.Tensor) -> tuple[int, int] | None:
            """Return what a tensor's address is relative to, and the bytes between."""
            nonlocal size
            storage, address = tensor.untyped_storage(), tensor.data_ptr()
            begin = storage.data_ptr()
            if address in bases:
                base, offset = bases[address], 0
            elif begin not in self._allocated:
                return None
            elif begin == output:
                base, offset = at_out, address - begin
            else:
                if begin not in begins:
                    begins[begin], size = size, size + -(-storage.nbytes() // _ALIGNMENT) * _ALIGNMENT
                base, offset = at_scratch, begins[begin] + address - begin
            used.add(base)
            return base, offset

        for launch in self.launches:
            step = _Step(launch.launcher(), [launch.arguments[name] for name in launch.kernel.arg_names], [], [], [])
            for place, x in enumerate(step.arguments):
                tensors_of = x if isinstance(x, tuple) else (getattr(x, "base", x),)
                if not isinstance(tensors_of[0], torch.Tensor):
                    continue
                places = [place_of(tensor) for tensor in tensors_of]
                found = [each for each in places if each is not None]
                if len(found) < len(places):
                    return None
                # nothing is to stay in memory for a place that is filled anew
                step.arguments[place] = None
                if isinstance(x, tuple):
                    step.groups.append((place, found))
                elif x is tensors_of[0]:
                    step.addresses.append((place, *found[0]))
                else:
                    step.descriptions.append((place, _described(x, 0), *found[0]))
            steps.append(step)
        return _repetition(steps, sorted(used - {at_out, at_scratch}), len(tensors), size, out)


class _Step(NamedTuple):
    """One launch of a repeated call.

    Attributes:
        launch: takes all arguments in order.
        arguments: as they were, None where an address belongs.
        addresses: places of these, what each is relative to (a tensor's index), and the bytes between.
        descriptions: the same of matrices for the copy engine, with the description of each.
        groups: the same of tuples of addresses.
    """

    launch: Callable[..., None]
    arguments: list[Any]
    addresses: list[tuple[int, int, int]]
    descriptions: list[tuple[int, Any, int, int]]
    groups: list[tuple[int, list[tuple[int, int]]]]


def _repetition(
    steps: Sequence[_Step], used: Sequence[int], count: int, scratch_bytes: int, out: torch.Tensor
) -> Callable[..., torch.Tensor]:
    """Return a function that makes launches again on other tensors; see :meth:`LaunchRecorder.repeat`.

    Args:
        used: indices of the tensors whose addresses are among the arguments, of ``count``.
        scratch_bytes: of temporary tensors, one behind the other in one allocation.
        out: an output; new ones are like it.
    """
    shape, strides, dtype, device = out.shape, out.stride(), out.dtype, out.device
    # attributes of modules take time to look up
    empty, empty_strided, int8 = torch.empty, torch.empty_strided, torch.int8

    def again(*tensors: torch.Tensor) -> torch.Tensor:
        out = empty_strided(shape, strides, dtype=dtype, device=device)
        at = [0] * (count + 2)
        for index in used:
            at[index] = tensors[index].data_ptr()
        at[count] = out.data_ptr()
        if scratch_bytes:
            scratch = empty(scratch_bytes, dtype=int8, device=device)
            at[count + 1] = scratch.data_ptr()
        with entered(device):
            for launch, arguments, addresses, descriptions, groups in steps:
                arguments = arguments.copy()
                for place, base, offset in addresses:
                    arguments[place] = at[base] + offset
                for place, description, base, offset in descriptions:
                    arguments[place] = _described(description, at[base] + offset)
                for place, group in groups:
                    arguments[place] = tuple([at[base] + offset for base, offset in group])
                launch(*arguments)
        return out

    return again


class _Address(int):
    """What a description of a matrix needs of a tensor."""

    data_ptr = int.__int__


def _described(description: Any, address: int) -> Any:
    """Return a description for the copy engine of a matrix that lies elsewhere. It is not checked again, which takes longer."""
    other = object.__new__(type(description))
    other.__dict__.update(description.__dict__, base=_Address(address))
    return other


def _stand_in(x: torch.Tensor | None) -> torch.Tensor | None:
    """Return an empty tensor of its own of the same shape, strides, type and alignment."""
    if x is None:
        return None
    last = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    first = (x.data_ptr() & 15) // x.element_size()
    return torch.empty(first + last, dtype=x.dtype, device=x.device).as_strided(x.shape, x.stride(), first)


def record(
    go: Callable[..., torch.Tensor], tensors: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor, Callable[[], Callable[..., torch.Tensor] | None]]:
    """Run ``go(*tensors)``; return its output and what finds out how to repeat it (:meth:`LaunchRecorder.repeat`)."""
    with LaunchRecorder() as recording:
        out = go(*tensors)

    def prepare() -> Callable[..., torch.Tensor] | None:
        addresses = [x.data_ptr() for x in tensors if x is not None]
        if len(set(addresses)) == len(addresses) or not recording.is_pure:
            return recording.repeat(tensors, out)
        # which of them an address is can only be told of others
        apart = [_stand_in(x) for x in tensors]
        # nothing was written to these
        with LaunchRecorder(launching=False) as again:
            like = go(*apart)
        return again.repeat(apart, like)

    return out, prepare
