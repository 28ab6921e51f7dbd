"""Measured rules that families of kernels share. They change speed, never a bit; rules of one family lie beside it.

A number without another note was found on one H200 with Triton 3.6, CUDA-graph replay, medians of nine, all divisions of a
shape in alternation. The data lie in ``benchmarks/archive``; of registers in ``tried_h200.json``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .device import cache_bytes_of, capability_of

REGISTERS_OF_THREE = 168
"""Registers a thread with which a processor (65536 registers) has room for three programs of four warps."""
REGISTERS_OF_THREE_INT8 = 144
"""The same of :mod:`.triton.attention_resident` on int8, where three programs a processor take one round instead of two. It
spills, and is faster."""
REGISTERS_OF_FOUR = 128
"""The same for four programs of four warps, or sixteen of one."""
REGISTERS_OF_SIX = 80
"""The same for six programs of four warps."""


class Work(NamedTuple):
    """What the rules for sharing a call out among programs look at.

    Attributes:
        queries, keys: tokens of a head.
        heads: heads times batch.
        head_dim: channels, the most of query and value.
        fused: whether the kernel quantises, too.
        masked, biased: whether there is a mask or a bias, and whether it is a bias.
        by_channel: whether value or output have a scale a channel.
        processors: streaming multiprocessors of the GPU.
    """

    queries: int
    keys: int
    heads: int
    head_dim: int
    fused: bool
    masked: bool
    biased: bool
    by_channel: bool
    processors: int


def eviction_policy(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor) -> str:
    """Return the L2 policy for the tensors of a call, whose heads are read once: ``"evict_first"`` or none.

    Where the L2 does not hold all of them, what has been read should not push out what is still to be read. With smaller ones
    the policy changes nothing in a network, and slows a call that is repeated on the same tensors.
    """
    size = sum(x.nbytes for x in (query, key, value, out))
    return "evict_first" if query.shape[1] == key.shape[1] and size > cache_bytes_of(query.device) else ""


_FEW_ELEMENTS = 1 << 20


def dependent_launch(device: torch.device, elements: int) -> str:
    """Return how a kernel of an integer network is launched behind the one ahead of it: ``"late"``, ``"early"`` or ``""``.

    From Hopper on a kernel may be launched while the one ahead of it still runs, up to where it needs its results
    (:mod:`.common.dependent_launch`). With "late" the next kernel may do so as programs of this one end, with "early" from
    their beginning. Measured on an H100 (benchmarks/archive/experiments.md): late saves a launch's latency at every size;
    early hides more of it, but the next kernel's programs then crowd on the first processors that have room, and large ones
    lose.

    Args:
        device: of the tensors.
        elements: of the residual stream beside the kernel: rows times channels.
    """
    if device.type == "cpu" or capability_of(device) < (9, 0):
        return ""
    return "early" if elements <= _FEW_ELEMENTS else "late"
