"""What a launch needs to know of a GPU, of another device that of an H100; and how a GPU becomes the current one."""

from __future__ import annotations

import contextlib
import functools
from contextvars import ContextVar
from typing import Any

import torch

_AS_IT_IS = contextlib.nullcontext()


def entered(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which a GPU is the current one, where Triton compiles and launches; of another device without effect.

    Where the GPU is the current one already it costs less than a microsecond.
    """
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _AS_IT_IS
    return torch.cuda.device(device)


def is_capturing(device: torch.device) -> bool:
    """Tell whether a GPU's current stream is being captured in a CUDA graph."""
    with entered(device):
        return torch.cuda.is_current_stream_capturing()


@functools.cache
def _processors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


STAND_IN_PROCESSORS = 132
"""Streaming multiprocessors of a device that is no GPU: an H100's."""


def processors_of(device: torch.device) -> int:
    """Return a GPU's streaming multiprocessors; of another device :data:`STAND_IN_PROCESSORS`."""
    return _processors(device.index or 0) if device.type == "cuda" else STAND_IN_PROCESSORS


STAND_IN: ContextVar[tuple[int, int]] = ContextVar("STAND_IN", default=(9, 0))
"""Compute capability of a device that is no GPU."""


def capability_of(device: torch.device) -> tuple[int, int]:
    """Return a GPU's compute capability; of another device :data:`STAND_IN`."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else STAND_IN.get()


@functools.cache
def _cache_bytes(index: int) -> int:
    return torch.cuda.get_device_properties(index).L2_cache_size


def cache_bytes_of(device: torch.device) -> int:
    """Return the bytes of a GPU's L2; of another device those of an H100."""
    return _cache_bytes(device.index or 0) if device.type == "cuda" else 50 << 20


@functools.cache
def device_name(index: int) -> str:
    return torch.cuda.get_device_name(index)
