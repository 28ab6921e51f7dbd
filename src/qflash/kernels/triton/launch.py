"""Launches of the portable attention kernels, which take every call."""

from __future__ import annotations

import dataclasses

import torch
import triton

from ... import fixed_point as fp
from ..common.quantize_ops import chunk_tokens
from ..heuristics import split_resident
from ..launch_arguments import (
    MOST_BLOCKS,
    KernelRequest,
    call_arguments,
    launch_options,
    needs_wide_offsets,
    parts,
    row_arguments,
)
from ..launch_recorder import KernelLaunch, ScoreTile
from ..tiles import PORTABLE, Tiles, kernel_width
from .attention_resident import short_kernel
from .attention_streaming import long_kernel, pack_value_kernel

_PACKED_KEYS = 256
"""Keys of V that are packed at a time."""


def accepts_resident(request: KernelRequest, tiles: Tiles) -> bool:
    """Tell whether one or two tiles hold a row, which makes attention one launch, quantisation included."""
    call = request.call
    widest = triton.next_power_of_2(max(call.head_dim, call.value_dim))
    fits = triton.cdiv(call.keys, tiles.block_n) <= 2 and widest <= 128
    return call.recipe.normalization == "two_pass" and fits and not request.wide_offsets


def resident_launches(request: KernelRequest, tiles: Tiles) -> list[KernelLaunch]:
    """Spell out the launches of :mod:`.triton.attention_resident`."""
    call = request.call
    narrow = max(call.head_dim, call.value_dim) <= 64 and call.recipe.probability_bits == 8
    narrow = narrow and (request.fused or call.mask is None)
    tiles = split_resident(tiles._replace(kernel=PORTABLE), request.work, narrow)
    constants = row_arguments(request, tiles)
    scores = ScoreTile(tiles.block_m, tiles.block_n * constants["TILES"], whole=True)
    return [
        KernelLaunch(
            short_kernel, (tiles.splits, call.heads, part.batch), part.arguments | constants, launch_options(tiles),
            "triton.resident", scores,
        )
        for part in parts(request)
    ]  # fmt: skip


def accepts_streaming(request: KernelRequest, tiles: Tiles) -> bool:
    """Tell whether tensors are quantised already: rows of any length are fine."""
    return not request.fused


def streaming_launches(request: KernelRequest, tiles: Tiles) -> list[KernelLaunch]:
    """Spell out the launches of :mod:`.triton.attention_streaming`: V brought to the tensor core's order, and attention."""
    call, sums = request.call, request.value_sums
    two_pass = call.recipe.normalization == "two_pass"
    launches: list[KernelLaunch] = []
    if two_pass and sums is None:
        value, sums, launches = pack_value(call.value, False)
        request = dataclasses.replace(request, call=dataclasses.replace(call, value=value))
    constants = call_arguments(request, tiles) | {
        "keys": call.keys,
        "inverse_count": fp.inverse_count(call.keys),
        "ONLINE": not two_pass,
        "VALUE_SUMS": sums is not None and not call.is_causal,
        "WIDE_SUMS": call.keys > fp.SECTION_KEYS,
        "WIDE_OFFSETS": request.wide_offsets,
    }
    blocks = triton.cdiv(call.queries, tiles.block_m)
    scores = ScoreTile(tiles.block_m, tiles.block_n, whole=False)
    for part in parts(request):
        given = (call.query, 0) if sums is None else (part.of(sums), sums.shape[2])
        arguments = part.arguments | dict(zip(("sums_ptr", "parts"), given, strict=True)) | constants
        grid = (blocks, call.heads, part.batch)
        launches.append(KernelLaunch(long_kernel, grid, arguments, launch_options(tiles), "triton.streaming", scores))
    return launches


def pack_value(value: torch.Tensor, fragment_order: bool) -> tuple[torch.Tensor, torch.Tensor, list[KernelLaunch]]:
    """Return V with its keys side by side, the sums of its channels, and the launches that fill both.

    The view returned has V's shape; its storage is (batch, heads, channels, keys up to a multiple of 128), zero
    past the end, and if ``fragment_order`` permuted, channels up to a kernel's width
    (:func:`.triton.attention_streaming.pack_value_kernel`). The sums are those of chunks of keys, (batch, heads, chunks,
    channels).
    """
    batch, heads, keys, channels = value.shape
    width = kernel_width(channels) if fragment_order else channels
    padded = triton.cdiv(keys, 128) * 128
    packed = torch.empty((batch, heads, width, padded), dtype=torch.int8, device=value.device)
    chunk = chunk_tokens(padded, _PACKED_KEYS)
    parts = triton.cdiv(padded, chunk)
    sums = torch.empty((batch, heads, parts, width), dtype=torch.int32, device=value.device)
    block = min(64, triton.next_power_of_2(width))
    launches = []
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
            "PERMUTED": fragment_order,
            "WIDE_OFFSETS": needs_wide_offsets(value),
        }
        grid = (triton.cdiv(width, block) * parts, heads, min(MOST_BLOCKS, batch - start))
        launches.append(KernelLaunch(pack_value_kernel, grid, arguments, {"num_warps": 4, "num_stages": 2}))
    return packed[:, :, :channels, :keys].mT, sums, launches
