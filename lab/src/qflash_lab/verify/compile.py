"""Compiling a launch for a target without a GPU."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

from qflash.kernels.launch_recorder import KernelLaunch

TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")


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


def compile_call(call: KernelLaunch, target: str) -> Any:
    """Compile a launch for a target as the JIT would before launching it there.

    Args:
        call: has ``kernel``, ``grid``, ``arguments`` (by name) and ``options``, as
            :class:`qflash.kernels.launch_recorder.KernelLaunch` has.
        target: for instance ``"sm_90"``.

    Returns:
        Triton's compiled kernel; ``asm`` holds its PTX and cubin.
    """
    with _pretend(target), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call.kernel.warmup(grid=call.grid, **call.arguments, **call.options)
