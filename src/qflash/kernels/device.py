"""What a launch needs to know of a GPU; of another device those of an H100."""

from __future__ import annotations

import functools
from contextvars import ContextVar

import torch


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
