"""Launches of the portable attention kernels, which take every call."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import triton

from ...specification import fixed_point as fp
from ...specification.attention_call import AttentionCall, Scales, VarlenCall
from ..common.quantize_ops import chunk_tokens
from ..device import capability_of
from ..launch_arguments import (
    MOST_BLOCKS,
    KernelRequest,
    broadcast_strides,
    call_arguments,
    launch_options,
    needs_wide_offsets,
    parts,
    place_arguments,
    row_arguments,
)
from ..launch_recorder import KernelLaunch, ScoreTile
from ..tiles import (
    PORTABLE,
    SHORT_ROW,
    SM90_RESIDENT,
    AttentionShape,
    Tiles,
    is_short,
    kernel_width,
    most_queries,
    packed_width,
)
from .attention_resident import short_kernel
from .attention_streaming import long_kernel, pack_key_kernel, pack_mask_kernel, pack_value_kernel
from .constants import RESIDENT_GROUPS, STREAMING_GROUPS, attention_arguments
from .rules import split_resident, streaming_plan

_PACKED_KEYS = 256
"""Keys that are packed at a time."""


def _own(tiles: Tiles, call: AttentionCall) -> Tiles:
    """Return tiles as these kernels take them.

    Raises:
        ValueError: they have more queries a block.
    """
    most = most_queries(call.value_dim)
    if tiles.family == SM90_RESIDENT:
        # chosen for another memory format; the kernels that take this one have fewer queries of wide heads
        tiles = tiles._replace(block_m=min(tiles.block_m, most))
    if tiles.block_m > most:
        raise ValueError(f"BLOCK_M must be at most {most} here, got {tiles.block_m}")
    return tiles


def resident_refusal(request: KernelRequest, tiles: Tiles) -> str | None:
    """Return why :mod:`.triton.attention_resident` does not take the call, or None: one or two tiles have to hold a row."""
    call = request.call
    if call.recipe.normalization != "two_pass":
        return "it takes normalization='two_pass' alone"
    if request.fragment_order:
        return "V was brought to the order of the kernel for Hopper that streams"
    widest = triton.next_power_of_2(max(call.head_dim, call.value_dim))
    if triton.cdiv(call.keys, tiles.block_n) > 2 or widest > 128:
        return "one or two tiles do not hold a row"
    if request.fused and (not is_short(request.shape) or widest * triton.next_power_of_2(call.keys) > 64 * SHORT_ROW):
        return "it quantises up to 256 keys of up to 64 channels, and fewer of more"
    return request.too_wide or request.unquantisable


def resident_launches(request: KernelRequest, tiles: Tiles) -> list[KernelLaunch]:
    """Spell out the launches of :mod:`.triton.attention_resident`."""
    call = request.call
    narrow = max(call.head_dim, call.value_dim) <= 64 and call.recipe.probability_bits == 8
    narrow = narrow and (request.fused or call.mask is None)
    tiles = split_resident(_own(tiles, call)._replace(family=PORTABLE), request.work, narrow)
    constants = row_arguments(request, tiles)
    scores = ScoreTile(tiles.block_m, tiles.block_n * constants["TILES"], whole=True)
    launches = []
    for part in parts(request):
        arguments = part.arguments | constants | place_arguments(request, part)
        arguments = attention_arguments(short_kernel, arguments, RESIDENT_GROUPS)
        grid = (tiles.splits, call.heads, part.batch)
        launches.append(KernelLaunch(short_kernel, grid, arguments, launch_options(tiles), "triton.resident", scores))
    return launches


def streaming_refusal(request: KernelRequest, tiles: Tiles) -> str | None:
    """Return why :mod:`.triton.attention_streaming` does not take the call, or None: tensors have to be quantised already."""
    return "it takes what is quantised already" if request.fused else None


def streaming_launches(request: KernelRequest, tiles: Tiles) -> list[KernelLaunch]:
    """Spell out the launches of :mod:`.triton.attention_streaming`: V brought to the tensor core's order, and attention."""
    call, sums = request.call, request.value_sums
    tiles = _own(tiles, call)
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
        "VARLEN": False,
        "cu_q_ptr": call.query,
        "cu_k_ptr": call.query,
    }
    blocks = triton.cdiv(call.queries, tiles.block_m)
    scores = ScoreTile(tiles.block_m, tiles.block_n, whole=False)
    for part in parts(request):
        given = (call.query, 0) if sums is None else (part.of(sums), sums.shape[2])
        arguments = part.arguments | dict(zip(("sums_ptr", "parts"), given, strict=True)) | constants
        arguments = attention_arguments(long_kernel, arguments, STREAMING_GROUPS)
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
    width = packed_width(channels) if fragment_order else channels
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


def pack_key(key: torch.Tensor) -> tuple[torch.Tensor, list[KernelLaunch]]:
    """Return K in rows of a kernel's width, a view with K's shape, and the launches that fill it.

    Args:
        key: int8, rows of multiples of eight channels that begin at multiples of eight bytes.
    """
    batch, heads, keys, channels = key.shape
    packed = torch.empty((batch, heads, keys, kernel_width(channels)), dtype=torch.int8, device=key.device)
    launches = []
    for start in range(0, batch, MOST_BLOCKS):
        arguments = {
            "k_ptr": key[start:],
            "packed_ptr": packed[start:],
            **{f"k_stride_{axis}": key.stride(dim) // 8 for dim, axis in enumerate("zhn")},
            "keys": keys,
            "WORDS": channels // 8,
            "WIDTH": packed.shape[3] // 8,
            "BLOCK_N": _PACKED_KEYS,
        }
        grid = (triton.cdiv(keys, _PACKED_KEYS), heads, min(MOST_BLOCKS, batch - start))
        launches.append(KernelLaunch(pack_key_kernel, grid, arguments, {"num_warps": 4}))
    return packed[..., :channels], launches


def pack_mask(mask: torch.Tensor, rows: int, keys: int) -> tuple[torch.Tensor, list[KernelLaunch]]:
    """Return a mask in rows that begin at multiples of 16 bytes, (period, heads, rows, keys), a view, and what fills it.

    Args:
        mask: bool or float, (period, heads, rows | 1, keys | 1), any strides.
    """
    kind = mask.dtype
    if kind == torch.bool:
        mask = mask.view(torch.uint8)
    period, heads = mask.shape[:2]
    padded = triton.cdiv(keys * mask.element_size(), 16) * 16 // mask.element_size()
    packed = torch.empty((period, heads, rows, padded), dtype=mask.dtype, device=mask.device)
    strides = broadcast_strides(mask, (0, 1, 2, 3))
    block_n = min(1024, triton.next_power_of_2(keys))
    values = (mask, packed, *strides, heads, rows, keys, padded, block_n, needs_wide_offsets(mask))
    arguments = dict(zip(pack_mask_kernel.arg_names, values, strict=True))
    grid = (period * heads * rows, triton.cdiv(keys, block_n))
    return packed.view(kind)[..., :keys], [KernelLaunch(pack_mask_kernel, grid, arguments, {"num_warps": 4})]


def one_element(call: VarlenCall) -> AttentionCall:
    """Return packed sequences as a call of one batch element, for what arguments of all calls are made of."""
    query, key, value = (x[None].transpose(1, 2) for x in (call.query, call.key, call.value))
    scales = None
    if call.scales is not None:
        scales = Scales(*(x if x is None else x[None].transpose(1, 2) for x in call.scales))  # type: ignore[arg-type]
    return AttentionCall(query, key, value, scales, None, call.is_causal, call.softmax_scale, call.out_dtype, call.recipe)


def varlen_arguments(call: VarlenCall, out: torch.Tensor) -> dict[str, Any]:
    """Return pointers and strides of packed sequences; those of a batch are 0 but of what there is for each sequence.

    Float tensors have no scales.
    """
    scales, recipe = call.scales, call.recipe
    arguments: dict[str, Any] = {"cu_q_ptr": call.lengths.queries, "cu_k_ptr": call.lengths.keys, "sums_ptr": call.value_sums}
    for name, x in {"q": call.query, "k": call.key, "v": call.value, "o": out}.items():
        arguments |= {f"{name}_ptr": x, f"{name}_stride_z": 0, f"{name}_stride_h": x.stride(1)}
        arguments |= {f"{name}_stride_n": x.stride(0), f"{name}_stride_d": x.stride(2)}
    if scales is None:
        return arguments
    given = {"qs": call.query if scales.query is None else scales.query, "ks": scales.key, "vs": scales.value}
    given |= {"os": scales.value, "vo": scales.value if scales.offset is None else scales.offset}
    # a sequence may have a single token, which tells nothing of what shares a scale
    by_token = {"qs": recipe.query_granularity == "token", "ks": recipe.key_granularity == "token"}
    for name, x in given.items():
        heads, channels = (0 if x.shape[dim] == 1 else x.stride(dim) for dim in (1, 2))
        token = by_token.get(name, False)
        arguments |= {f"{name}_ptr": x, f"{name}_stride_h": heads, f"{name}_stride_z": 0 if token else x.stride(0)}
        arguments |= {f"{name}_stride_n": x.stride(0) if token else 0} if name in by_token else {f"{name}_stride_d": channels}
    return arguments


def varlen_launches(call: VarlenCall, out: torch.Tensor, guard: bool) -> list[KernelLaunch]:
    """Spell out attention of packed int8 sequences: a launch for up to 65535 of them.

    Args:
        call: int8 tensors with their scales and the sums of V.
        out: (queries, heads, value channels).
        guard: compile for Triton's interpreter.
    """
    lengths, recipe, sums = call.lengths, call.recipe, call.value_sums
    assert sums is not None
    one = one_element(call)
    shape = AttentionShape(
        recipe, one.head_dim, one.value_dim, lengths.most_queries, max(SHORT_ROW + 1, lengths.most_keys),
        one.heads * lengths.sequences, masked=True,
    )  # fmt: skip
    tiles = streaming_plan(shape, capability_of(out.device))
    if recipe.normalization == "two_pass" and lengths.most_keys <= 64:
        tiles = tiles._replace(block_n=min(tiles.block_n, 64))
    request = KernelRequest(one, out[None].transpose(1, 2), guard)
    arguments = call_arguments(request, tiles) | varlen_arguments(call, out)
    tokens = (call.query, call.key, out) if call.packed_value else (call.query, call.key, call.value, out)
    arguments |= {
        "keys": lengths.most_keys,
        "queries": lengths.most_queries,
        "inverse_count": 0,  # found for each sequence
        "parts": sums.shape[2],
        "KEY_TOKEN": recipe.key_granularity == "token",
        "QUERY_TOKEN": recipe.query_granularity == "token",
        "EXACT": recipe.takes_exact_sum(lengths.most_keys),
        "ONLINE": recipe.normalization != "two_pass",
        "VALUE_SUMS": call.packed_value and not call.is_causal,
        # offsets begin with the sequence, and with the first head
        "WIDE_OFFSETS": any(
            x.stride(0) * max(lengths.most_queries, lengths.most_keys) + x.stride(1) * x.shape[1] >= 1 << 31 for x in tokens
        ),
        "WIDE_SUMS": lengths.most_keys > fp.SECTION_KEYS,
        "VARLEN": True,
        "VALUE_ROWS": not call.packed_value,
        "mask_ptr": call.query,
        **{f"mask_stride_{axis}": 0 for axis in "zhmn"},
    }
    of_tokens = {"qs_ptr": arguments["QUERY_TOKEN"], "ks_ptr": arguments["KEY_TOKEN"]}
    of_sequences = ["cu_q_ptr", "cu_k_ptr", "sums_ptr", "vs_ptr", "os_ptr", "vo_ptr"]
    of_sequences += [name for name, token in of_tokens.items() if not token]
    scores = ScoreTile(tiles.block_m, tiles.block_n, whole=False)
    blocks, launches = triton.cdiv(lengths.most_queries, tiles.block_m), []
    for start in range(0, lengths.sequences, MOST_BLOCKS):
        pointers = {name: arguments[name][start:] for name in of_sequences}
        grid = (blocks, one.heads, min(MOST_BLOCKS, lengths.sequences - start))
        given = attention_arguments(long_kernel, arguments | pointers, STREAMING_GROUPS)
        launches.append(KernelLaunch(long_kernel, grid, given, launch_options(tiles), "triton.streaming", scores))
    return launches
