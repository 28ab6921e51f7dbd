"""Which back end runs where, and why one is not available: :func:`find_backend`. :mod:`qflash.info` prints what is known."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import pathlib
import re
import warnings

import torch

from .reference_backend import Backend

MINIMUM_CAPABILITY = (8, 0)
"""NVIDIA Ampere: the first architecture whose int8 tensor-core instructions Triton targets."""


MINIMUM_TRITON = (3, 6)
"""The oldest Triton that compiles the kernels."""


def triton_version() -> str | None:
    """Return the version of the Triton that would be imported, which need not be a distribution of that name."""
    spec = importlib.util.find_spec("triton")
    if spec is not None and spec.origin is not None:
        text = pathlib.Path(spec.origin).read_text(encoding="utf-8")
        if found := re.search(r"^__version__ = ['\"]([^'\"]+)", text, re.MULTILINE):
            return found[1]
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def triton_missing() -> str | None:
    """Return why there is no Triton that compiles the kernels, or None. Nothing is imported: the interpreter has no Gluon."""
    needed = f"the kernels need Triton {MINIMUM_TRITON[0]}.{MINIMUM_TRITON[1]} or newer"
    spec = importlib.util.find_spec("triton")
    if spec is None:
        return f"Triton is not installed, {needed}"
    version = triton_version()
    numbers = re.match(r"(\d+)\.(\d+)", version or "")
    if numbers is not None and tuple(map(int, numbers.groups())) < MINIMUM_TRITON:
        return f"this is Triton {version}, {needed}"
    if not any(pathlib.Path(folder, "experimental", "gluon").is_dir() for folder in spec.submodule_search_locations or ()):
        return f"this Triton ({version or 'of no known version'}) has no Gluon, {needed}"
    return None


def interpreting() -> bool:
    """Tell whether Triton's CPU interpreter is on (``TRITON_INTERPRET=1`` before the kernels are imported)."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")


@functools.cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def architecture_unsupported(capability: tuple[int, int]) -> str | None:
    """Return why the kernels are not for GPUs of a compute capability, or None when they are."""
    if capability < MINIMUM_CAPABILITY:
        return f"sm_{capability[0]}{capability[1]} has no supported int8 tensor-core path (sm_80 or newer needed)"
    return None


def triton_unavailable(device: torch.device) -> str | None:
    """Return why ``backend="triton"`` cannot run on ``device``, or None when it can."""
    missing = triton_missing()
    if missing:
        return missing
    if device.type == "cuda":
        if torch.version.hip:
            return "the kernels are written for NVIDIA GPUs, this is a ROCm build of PyTorch"
        capability = _capability(device.index if device.index is not None else torch.cuda.current_device())
        return architecture_unsupported(capability)
    if device.type == "cpu":
        return None if interpreting() else "on the CPU the kernels run only in Triton's interpreter (TRITON_INTERPRET=1)"
    if device.type == "meta":
        return None  # launches are spelt out there, and nothing runs
    return f"the kernels run on CUDA devices, not on {device.type}"


@functools.cache
def cpu_missing() -> str | None:
    """Return why the compiled CPU kernels cannot be had here, or None. The first look compiles them (seconds, once)."""
    from .kernels.cpu import launch as cpu

    try:
        cpu.load()
    except cpu.BuildError as error:
        return str(error)
    return None


def cpu_unavailable(device: torch.device) -> str | None:
    """Return why ``backend="cpu"`` cannot run on ``device``, or None when it can."""
    return cpu_missing() if device.type == "cpu" else f"it runs on the CPU, not on {device.type}"


def auto_backend(device: torch.device) -> tuple[str, str | None]:
    """Return what ``"auto"`` is on ``device``, and why it is not the fast one that such devices have, or None."""
    if device.type == "cpu":
        reason = cpu_missing()
        return ("reference" if reason else "cpu"), reason
    if device.type == "cuda":
        reason = triton_unavailable(device)
        return ("reference" if reason else "triton"), reason
    return "reference", None


@functools.cache
def _warn_of_reference(kind: str, reason: str) -> None:
    """Warn once a process that ``"auto"`` is slow."""
    warnings.warn(
        f"backend='auto' is the reference here ({kind}), which returns the same bits much more slowly: {reason}. "
        "Change that (`qflash info` shows what is available), or ask for backend='reference', which does not warn",
        RuntimeWarning,
        stacklevel=3,
    )


def why_unavailable(backend: str, device: torch.device) -> str | None:
    """Return why a back end asked for by name cannot run on ``device``, or None when it can."""
    reason = {"triton": triton_unavailable, "cpu": cpu_unavailable}.get(backend, lambda _: None)(device)
    return f"backend={backend!r} cannot run on {device}: {reason}" if reason else None


def resolve_backend(backend: str, device: torch.device) -> str:
    """Turn ``"auto"`` into a back end's name; check that a named one can run on ``device``.

    ``"auto"`` is Triton on an NVIDIA GPU it supports, the compiled kernels on a CPU where they can be had, and the
    reference everywhere else, with one warning where a faster one could be had. A named back end is never replaced by
    another.

    Raises:
        ValueError: ``"triton"`` or ``"cpu"`` was asked for and cannot run there; the message says why.
    """
    if backend == "auto":
        chosen, reason = auto_backend(device)
        if reason:
            _warn_of_reference(device.type, reason)
        return chosen
    reason = why_unavailable(backend, device)
    if reason:
        raise ValueError(reason)
    return backend


@functools.cache
def named_backend(backend: str) -> Backend:
    """Return the back end of a name that :func:`resolve_backend` returns."""
    if backend == "cpu":
        from .kernels.cpu.backend import CpuBackend

        return CpuBackend()
    if backend == "triton":
        from .kernels.backend import GpuBackend

        return GpuBackend()
    return Backend()


def find_backend(backend: str, device: torch.device) -> Backend:
    """Return the back end of a call, which does all of it; see :func:`resolve_backend`."""
    return named_backend(resolve_backend(backend, device))
