"""Compile all kernels of a model before its first call, several at a time: :func:`warmup`.

The model runs once with operators that only note what they are called with. Processes of their own then make the same calls
on tensors of the same shapes and strides, and compile what these would launch; Triton keeps it on disk. At last the model
runs for good.
"""

from __future__ import annotations

import json
import os
import pathlib
import queue
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from .scalars import unboxed
from .validation import check_flags

_KEYS = {"qflash.attention.default": 1, "qflash.int8_attention.default": 2}
"""Which argument of an operator is the key, whose tokens are a row's length."""


def _spell(x: Any) -> Any:
    """Return an argument of an operator as JSON has it; of a tensor what a kernel is compiled for."""
    if isinstance(x, torch.Tensor):
        return {"shape": list(x.shape), "stride": list(x.stride()), "dtype": str(x.dtype).removeprefix("torch.")}
    if isinstance(x, torch.dtype):
        return {"type": str(x).removeprefix("torch.")}
    if isinstance(x, (list, tuple)):
        return [_spell(each) for each in x]
    return x


def _read(x: Any, device: torch.device) -> Any:
    """Return what :func:`_spell` spelled; tensors have no content."""
    if isinstance(x, list):
        return [_read(each, device) for each in x]
    if not isinstance(x, dict):
        return x
    if "type" in x:
        return getattr(torch, x["type"])
    return torch.empty_strided(x["shape"], x["stride"], dtype=getattr(torch, x["dtype"]), device=device)


class _Calls(TorchDispatchMode):
    """Notes calls of this package's operators, which return zeros meanwhile; all others are made."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, torch.device] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace != "qflash":
            return function(*args, **(kwargs or {}))
        device = next(x.device for x in args if isinstance(x, torch.Tensor))
        self.found[json.dumps([str(function), [_spell(x) for x in args]])] = device

        def bare(x: torch.Tensor) -> torch.Tensor:
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")

        def filled(x: torch.Tensor) -> torch.Tensor:
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device).zero_()

        out = function(*pytree.tree_map_only(torch.Tensor, bare, args), **(kwargs or {}))
        return pytree.tree_map_only(torch.Tensor, filled, out)


def note_calls(model: Callable[..., Any], examples: tuple[Any, ...]) -> dict[str, torch.device]:
    """Run ``model`` on every example without this package's operators; return what they were called with, and where."""
    with torch.no_grad(), _Calls() as calls:
        for example in examples:
            model(*example) if isinstance(example, tuple) else model(example)
    return calls.found


def compile_call(call: str, device: torch.device) -> int:
    """Compile what a call noted by :func:`note_calls` would launch, and launch nothing; return the number of launches."""
    from .kernels.launch_recorder import LaunchRecorder

    name, args = json.loads(call)
    _, operator, overload = name.split(".")
    with torch.no_grad(), LaunchRecorder(launching=False) as recorder:
        getattr(getattr(torch.ops.qflash, operator), overload)(*_read(args, device))
    for launch in recorder.launches:
        launch.launcher()
    return len(recorder.launches)


def serve() -> None:
    """Compile the calls that come by standard input, one a line; answer each with a line: empty, or what went wrong."""
    from .kernels import lengths

    device = torch.device(sys.argv[1])
    lengths.expect_all()
    torch.cuda.set_device(device)
    for line in sys.stdin:
        try:
            compile_call(line, device)
            answer = ""
        except Exception as error:
            answer = f"{type(error).__name__}: {error}".replace("\n", " ")
        print(answer, flush=True)


def _worker(device: torch.device) -> subprocess.Popen[str]:
    from .paths import with_package

    command = [sys.executable, "-c", "from qflash.precompile import serve; serve()", str(device)]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env=with_package(pathlib.Path(__file__).resolve().parents[1]),
    )  # fmt: skip


def compile_in_processes(
    calls: dict[str, torch.device],
    processes: int,
    tick: Callable[[], None],
    start: Callable[[torch.device], subprocess.Popen[str]] = _worker,
) -> list[str]:
    """Compile for calls of one device, each process one at a time; return what went wrong.

    Args:
        calls: from :func:`note_calls`.
        processes: how many.
        tick: called after every call.
        start: starts a process that does what :func:`serve` does.
    """
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for call in calls:
        waiting.put(call)
    wrong: list[str] = []

    def feed() -> None:
        with start(next(iter(calls.values()))) as process:
            assert process.stdin is not None and process.stdout is not None
            while True:
                try:
                    call = waiting.get_nowait()
                except queue.Empty:
                    process.stdin.close()
                    return
                try:
                    process.stdin.write(call + "\n")
                    process.stdin.flush()
                    answer = process.stdout.readline()
                except OSError:
                    answer = ""
                if answer != "\n":
                    wrong.append(answer.strip() or "the process ended")
                tick()
                if not answer:
                    return

    threads = [threading.Thread(target=feed) for _ in range(min(processes, len(calls)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wrong


def warmup(model: Callable[..., Any], *examples: Any, processes: int | None = None, progress: bool = True) -> int:
    """Compile all kernels that a model needs for some inputs, several at a time, so that no later call waits for them.

    On a Hopper GPU rows of more than 288 keys have a kernel for each length. A process compiles at most four of these as they
    come, and all those that were warmed up; further lengths run a slower kernel with the same bits. Triton keeps compiled
    kernels on disk, and this function keeps the lengths (``lengths.json`` in the cache folder), so later processes use both
    without compiling.

    Args:
        model: a module or function that calls this package, for instance after :func:`qflash.patch`. It is called twice an
            example without gradients, the first time with zeros for what integer attention returns.
        examples: inputs, as later calls have them: shape, strides, dtype and device matter, content does not. A tuple is
            several arguments.
        processes: that compile side by side; as many as there are CPU cores if None.
        progress: show a bar.

    Returns:
        the number of different operator calls that were compiled for; 0 on a CPU, where the one library is compiled by the
        first call.

    Raises:
        TypeError: ``model`` cannot be called, or ``progress`` is no bool.
        ValueError: no example, fewer than one process, or tensors on several GPUs.
    """
    if not callable(model):
        raise TypeError(f"model must be a module or function, got {type(model).__name__}")
    if not examples:
        raise ValueError("examples must be inputs of the model, at least one; got none")
    processes = unboxed(processes)
    if processes is not None and (type(processes) is not int or processes < 1):
        raise ValueError(f"processes must be an integer of at least 1 or None, got {processes!r}")
    check_flags(progress=progress)
    calls = {call: device for call, device in note_calls(model, examples).items() if device.type == "cuda"}
    if len(set(calls.values())) > 1:
        raise ValueError(f"model must be on one GPU, got {', '.join(sorted(map(str, set(calls.values()))))}")
    if calls:
        from rich.progress import Progress

        from .kernels import lengths

        with Progress(transient=True, disable=not progress) as bar:
            task = bar.add_task("Compiling", total=len(calls))
            wrong = compile_in_processes(calls, processes or os.cpu_count() or 1, lambda: bar.advance(task))
        if wrong:
            warnings.warn(f"{len(wrong)} of {len(calls)} calls were not compiled for beforehand: {wrong[0]}", stacklevel=2)
        found = rows_of(calls)
        lengths.expect(found)
        try:
            lengths.keep(found)
        except OSError as error:
            warnings.warn(f"later processes will not know the lengths: {error}", stacklevel=2)
    with torch.no_grad():
        for example in examples:
            model(*example) if isinstance(example, tuple) else model(example)
    return len(calls)


def rows_of(calls: dict[str, torch.device]) -> set[int]:
    """Return the lengths of rows among calls of attention."""
    spelled = (json.loads(call) for call in calls)
    return {args[_KEYS[name]]["shape"][-2] for name, args in spelled if name in _KEYS}
