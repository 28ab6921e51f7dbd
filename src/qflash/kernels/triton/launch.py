"""Launches of the portable attention kernels."""

from __future__ import annotations

import torch
import triton

from ..common.quantize_ops import chunk_tokens
from ..launch_arguments import MOST_BLOCKS
from ..launch_recorder import Call
from ..tiles import (
    kernel_width,
)
from .attention_streaming import pack_value_kernel

_PACKED_KEYS = 256

"""Keys of V that are packed at a time."""


def pack_value(value: torch.Tensor, dealt: bool) -> tuple[torch.Tensor, torch.Tensor, list[Call]]:
    """Return V with its keys side by side, the sums of its channels, and the launches that fill both.

    The view returned has V's shape; its storage is (batch, heads, channels, keys up to a multiple of 128), zero
    past the end, and if ``dealt`` in another order, channels up to a kernel's width
    (:func:`.triton.attention_streaming.pack_value_kernel`). The sums are those of chunks of keys, (batch, heads, chunks,
    channels).
    """
    batch, heads, keys, channels = value.shape
    width = kernel_width(channels) if dealt else channels
    padded = triton.cdiv(keys, 128) * 128
    packed = torch.empty((batch, heads, width, padded), dtype=torch.int8, device=value.device)
    chunk = chunk_tokens(padded, _PACKED_KEYS)
    parts = triton.cdiv(padded, chunk)
    sums = torch.empty((batch, heads, parts, width), dtype=torch.int32, device=value.device)
    block = min(64, triton.next_power_of_2(width))
    calls = []
    for start in range(0, batch, MOST_BLOCKS):
        arguments = {
            "v_ptr": value[start:],
            "packed_ptr": packed[start:],
            "sums_ptr": sums[start:],
            **{f"v_stride_{axis}": value.stride(dim) for dim, axis in enumerate("zhnd")},
            "keys": keys,
            "padded": padded,
            "chunk": chunk,
            "VALUE_DIM": channels,
            "WIDTH": width,
            "BLOCK_C": block,
            "BLOCK_N": _PACKED_KEYS,
            "DEALT": dealt,
        }
        grid = (triton.cdiv(width, block) * parts, heads, min(MOST_BLOCKS, batch - start))
        calls.append(Call(pack_value_kernel, grid, arguments, {"num_warps": 4, "num_stages": 2}))
    return packed[:, :, :channels, :keys].mT, sums, calls
