"""Launches of the kernels for Hopper (sm_90): attention, and linear layers of integer networks.

The kernels are imported where they run: they need a part of Triton that the interpreter has not.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
import triton

from ....specification import fixed_point as fp
from ....specification.attention_call import AttentionCall, VarlenCall
from ...device import capability_of, processors_of
from ...heuristics import REGISTERS_OF_THREE, dependent_launch, eviction_policy
from ...launch_arguments import (
    CONSTANT,
    MOST_BLOCKS,
    SCALE_POINTERS,
    SCALE_STRIDES,
    KernelRequest,
    LinearCall,
    LinearPlan,
    broadcast_strides,
    call_arguments,
    dependent_attention,
    launch_options,
    mask_period,
    needs_wide_offsets,
    parts,
    place_arguments,
    row_arguments,
    side_by_side,
)
from ...launch_recorder import KernelLaunch, ScoreTile, group, kernel_arguments, launch_kernel
from ...settled import count_launch
from ...tiles import (
    SHORT_ROW,
    SM90_RESIDENT,
    SM90_STREAMING,
    AttentionShape,
    Tiles,
    channel_spans,
    fits_block,
    kernel_width,
    packed_width,
    row_widths,
    value_width,
    widest_span,
)
from ...triton.launch import one_element, pack_key, pack_mask, pack_value, varlen_arguments
from ...triton.quantize_streaming import LongQuantized, new_quantized
from ..constants import Ring, recipe_of, row_strides_of, strides_of
from .rules import (
    CLUSTER_WARPS,
    LINE,
    choose_cluster,
    choose_linear_tiles,
    division,
    most_packed_keys,
    packed_order,
    resident_misfit,
    split_packed,
    split_sm90_resident,
    streams,
)

_STREAMING_TILE = 128
"""Keys a tile of :mod:`.sm90.attention_streaming`."""
_STREAMING_QUERIES = 64
"""Its queries a block."""


@functools.cache
def _resident_kernel() -> Any:
    from .attention_resident import hopper_kernel

    return hopper_kernel


@functools.cache
def _linear_kernel() -> Any:
    from .linear import hopper_linear_kernel

    return hopper_linear_kernel


@functools.cache
def _packed_kernel() -> Any:
    from .attention_packed import packed_hopper_kernel

    return packed_hopper_kernel


@functools.cache
def _cluster_kernel() -> Any:
    from .quantize import cluster_quantize_kernel

    return cluster_quantize_kernel


@functools.cache
def _streaming_kernel() -> Any:
    from .attention_streaming import long_hopper_kernel

    return long_hopper_kernel


def _with_aligned_mask(request: KernelRequest, block: int) -> tuple[KernelRequest, list[KernelLaunch]]:
    """Return the request with a mask that kernels can read, and the launches that copy it if they must.

    Args:
        block: rows that the copy engine brings at a time, which are rows of one matrix whatever the heads and batch; a row for
            all queries is written so many times. 0: threads read four neighbours of a row, which may be for all queries.
    """
    call, mask = request.call, request.call.mask
    if mask is None:
        return request, []
    strides, rows = broadcast_strides(mask, (0, 1, 2)), mask.shape[2]
    whole = 16 // mask.element_size() if block else 4
    fits = mask.shape[3] == call.keys and mask.stride(3) == 1 and not mask.data_ptr() % 16
    fits = fits and not any(stride % whole for stride in strides)
    if block:
        fits = fits and rows == call.queries and strides[2] >= call.keys and not any(x % strides[2] for x in strides[:2])
    if fits:
        return request, []
    copied, launches = pack_mask(mask, block if block and rows == 1 else rows, call.keys)
    return dataclasses.replace(request, call=dataclasses.replace(call, mask=copied)), launches


# --- a row's keys and values in shared memory ---------------------------------------------------------------


def resident_refusal(request: KernelRequest, tiles: Tiles) -> str | None:
    """Return why :mod:`.sm90.attention_resident` does not take the call, or None."""
    call = request.call
    if reason := _refusal(request, resident_misfit(request.shape, request.capability), tiles, (SM90_RESIDENT,)):
        return reason
    if request.unquantisable:
        return request.unquantisable
    if not fits_block(tiles.block_m, tiles.warps, call.head_dim, call.keys):
        return f"it has no registers for {tiles}"
    if call.query.element_size() > 2:
        return "it takes int8, float16 and bfloat16"
    if request.value_sums is not None or request.fragment_order:
        return "V was brought to the order of kernels that stream"
    given = (call.query, call.key, call.value, request.out)
    fits = all(x is None or side_by_side(x, 8) for x in given) and not request.wide_offsets
    return None if fits else "channels must be neighbours, and rows begin at multiples of 8 bytes"


def _refusal(request: KernelRequest, misfit: str | None, tiles: Tiles, families: tuple[str, ...]) -> str | None:
    """Return why no kernel of Hopper's takes a call, whatever its memory format, or None."""
    if request.guard:
        return "Triton's interpreter has no Gluon"
    if misfit or request.call.has_token_keys:
        return misfit or "it takes one key scale a head"
    if tiles.family in families:
        return None
    return f"the tiles are for {tiles.family}: from `qflash-lab tune`, or to compile for no further length (qflash.warmup does)"


def resident_launches(request: KernelRequest, tiles: Tiles) -> list[KernelLaunch]:
    """Spell out the launches of :mod:`.sm90.attention_resident`."""
    kernel = _resident_kernel()
    request, launches = _with_aligned_mask(request, 0)
    call, work = request.call, request.work
    tiles = split_sm90_resident(tiles, work)
    plan, dependent, policy = division(tiles, work, call.heads), dependent_attention(request), ""
    if request.fused and plan.UNROLL:
        # measured: where keys are read once 1 % at most, or slower; on int8 not yet
        policy = eviction_policy(call.query, call.key, call.value, request.output)
    plan = dataclasses.replace(
        plan, PLACES=call.places is not None, PERIOD=mask_period(call), POLICY=policy, DEPENDENT=dependent
    )
    constants = row_arguments(request, tiles)
    constants |= {"RECIPE": recipe_of(constants), "PLAN": plan}
    options = launch_options(tiles) | {"launch_pdl": dependent != ""}
    columns = 128 * plan.UNROLL if plan.UNROLL else sum(row_widths(call.keys))
    scores = ScoreTile(tiles.block_m, columns, whole=not plan.UNROLL)
    for part in parts(request):
        grid = (tiles.splits, call.heads, part.batch)
        total = plan.BLOCKS * call.heads * part.batch
        share = triton.cdiv(total, max(1, tiles.programs))
        if plan.SPREAD:
            grid = (call.heads, part.batch, tiles.splits)
        elif total:
            grid = (triton.cdiv(total, share), 1, 1)
        arguments = part.arguments | place_arguments(request, part)
        arguments |= constants | {"share": share, "total": total, "STRIDES": strides_of(arguments, True)}
        arguments = kernel_arguments(kernel, arguments, {})
        launches.append(KernelLaunch(kernel, grid, arguments, options, "sm90.resident", scores))
    return launches


# --- keys and values that pass through shared memory --------------------------------------------------------


def rows_of_keys(key: torch.Tensor) -> tuple[int, int, int] | None:
    """Return where a head's keys lie if all keys are rows of one matrix: rows a batch, rows and columns a head."""
    stride_z, stride_h, stride_n = (key.stride(dim) if key.shape[dim] > 1 else 0 for dim in range(3))
    if stride_n <= 0 or stride_z % stride_n:
        return None
    rows_h, columns_h = divmod(stride_h, stride_n)
    if columns_h * (key.shape[1] - 1) + key.shape[3] > stride_n:
        return None
    return stride_z // stride_n, rows_h, columns_h


def _in_lines(key: torch.Tensor) -> bool:
    """Tell whether the copy engine can read int8 keys where they are, and of wide heads no row that begins inside a line.

    Measured on an H200: with rows of 80 bytes the kernel takes 1.4 times as long as with rows of 128 (``long_rows_h200.json``).
    """
    aligned = key.shape[3] <= 64 or all(key.stride(dim) % LINE == 0 for dim in range(3) if key.shape[dim] > 1)
    return aligned and rows_of_keys(key) is not None and side_by_side(key)


def _description(x: torch.Tensor, shape: list[int], strides: list[int], block: list[int]) -> Any:
    """Describe numbers for the copy engine, which fetches blocks of them to shared memory, swizzled for wgmma."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    size = x.element_size()
    layout = gl.NVMMASharedLayout(
        swizzle_byte_width=min(block[-1] * size, 128), element_bitwidth=8 * size, rank=len(shape)
    )  # fmt: skip
    return TensorDescriptor(x, shape, strides, block, layout)


def _matrix(x: torch.Tensor, rows: int, columns: int, stride: int, block: tuple[int, int]) -> Any:
    """Describe rows, ``stride`` apart."""
    return _description(x, [rows, columns], [stride, 1], list(block))


def _streaming_registers(head_dim: int) -> int:
    """Return the most registers of a thread of :mod:`.sm90.attention_streaming`: three programs a processor, or wider two."""
    return REGISTERS_OF_THREE if widest_span(head_dim) <= 64 else 0


def streaming_steps(channels: int, keys: int, masked: bool = False) -> tuple[int, int]:
    """Return how many keys :mod:`.sm90.attention_streaming` takes at a time, and how many times in an iteration of its loops.

    Two tiles at a time where they fit; else two steps an iteration where their number is even. Two spans would spill then. A
    mask takes the shared memory of both.
    """
    if masked:
        return _STREAMING_TILE, 1
    if channels <= 64:
        return 2 * _STREAMING_TILE, 1
    even = triton.cdiv(keys, _STREAMING_TILE) % 2 == 0
    return _STREAMING_TILE, 2 if even and len(channel_spans(channels)) == 1 else 1


def last_step(keys: int, span: int) -> int:
    """Return the columns of the last step: whole tiles, and one of 64 or 128. Each number of them is a kernel to compile."""
    whole, left = divmod(keys % span or span, _STREAMING_TILE)
    return whole * _STREAMING_TILE + (max(64, triton.next_power_of_2(left)) if left else 0)


def _streaming_arguments(key: torch.Tensor, value: torch.Tensor, rows: tuple[int, int, int], span: int) -> dict[str, Any]:
    """Return what :mod:`.sm90.attention_streaming` takes in place of pointers to keys and packed values.

    ``rows`` is from :func:`rows_of_keys`; ``span`` is the keys of a step.
    """
    batch, heads, keys, channels = key.shape
    widths, value_widths = ([width(part) for part in channel_spans(channels)] for width in (kernel_width, value_width))
    packed_rows = batch * heads * packed_width(channels)
    rows_z, rows_h, columns_h = rows
    count = (batch - 1) * rows_z + (heads - 1) * rows_h + keys
    columns, padded = (heads - 1) * columns_h + channels, value.stride(3)
    k_descs = [_matrix(key, count, columns, key.stride(2), (span, width)) for width in widths]
    v_descs = [_matrix(value, packed_rows, padded, padded, (width, _STREAMING_TILE)) for width in value_widths]
    return {
        "k_desc": k_descs[0],
        "k_last_desc": k_descs[-1],
        "v_desc": v_descs[0],
        "v_last_desc": v_descs[-1],
        "k_rows_z": rows_z,
        "k_rows_h": rows_h,
        "k_columns_h": columns_h,
    }


_STREAMING_GROUPS = {
    "scales": SCALE_POINTERS,
    "cu": ("cu_q_ptr", "cu_k_ptr"),
    "q_strides": ("q_stride_z", "q_stride_h"),
    "strides": (
        "k_columns_h",
        "o_stride_z",
        "o_stride_h",
        "mask_rows_z",
        "mask_rows_h",
        "mask_step",
        *SCALE_STRIDES,
    ),
    "constant": CONSTANT,
}
"""What :mod:`.sm90.attention_streaming` takes as tuples."""
_NO_MASK = {"mask_desc": None, "mask_rows_z": 0, "mask_rows_h": 0, "mask_step": 0}


def _streaming_kernel_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of :mod:`.sm90.attention_streaming` among others."""
    arguments = arguments | {"STRIDES": row_strides_of(arguments | {"mask_stride_m": 0, "mask_stride_n": 0})}
    return kernel_arguments(_streaming_kernel(), _NO_MASK | arguments, _STREAMING_GROUPS)


def _mask_arguments(mask: torch.Tensor, queries: int) -> dict[str, Any]:
    """Return what :mod:`.sm90.attention_streaming` takes of a mask; one of fewer rows has those of every block."""
    stride_z, stride_h, stride = broadcast_strides(mask, (0, 1, 2))
    rows = stride_z // stride, stride_h // stride
    count = (mask.shape[0] - 1) * rows[0] + (mask.shape[1] - 1) * rows[1] + mask.shape[2]
    desc = _matrix(mask, count, mask.shape[3], stride, (_STREAMING_QUERIES, _STREAMING_TILE))
    step = int(mask.shape[2] == queries)
    return {"mask_desc": desc, "mask_rows_z": rows[0], "mask_rows_h": rows[1], "mask_step": step}


def _streams(request: KernelRequest, tiles: Tiles) -> str | None:
    """Return why :mod:`.sm90.attention_streaming` does not know shapes and recipe, or None."""
    return _refusal(request, streams(request.shape, request.capability), tiles, (SM90_RESIDENT, SM90_STREAMING))


def takes_fragment_order(request: KernelRequest, tiles: Tiles) -> bool:
    """Tell whether keys and values of a float call should be quantised for :mod:`.sm90.attention_streaming`, in its order."""
    fits = side_by_side(request.output) and not needs_wide_offsets(request.call.query, request.out)
    return fits and _streams(request, tiles) is None


def streaming_refusal(request: KernelRequest, tiles: Tiles) -> str | None:
    """Return why :mod:`.sm90.attention_streaming` does not take the call, or None: V may have been left in its order."""
    call = request.call
    if request.fragment_order:
        return None
    if reason := _streams(request, tiles):
        return reason
    if request.fused:
        return "it quantises no keys and values"
    fits = all(side_by_side(x, 8) for x in (call.query, call.key, request.output)) and not request.wide_offsets
    fits = fits and request.value_sums is None
    return None if fits else "channels must be neighbours, and rows begin at multiples of 8 bytes"


def streaming_launches(request: KernelRequest, tiles: Tiles) -> list[KernelLaunch]:
    """Spell out the launches of :mod:`.sm90.attention_streaming`: what has to be packed of V, K and a mask, and attention."""
    call, sums, kernel = request.call, request.value_sums, _streaming_kernel()
    launches: list[KernelLaunch] = []
    if sums is None:
        value, sums, launches = pack_value(call.value, True)
        key = call.key
        if not _in_lines(key):
            key, more = pack_key(key)
            launches += more
        call = dataclasses.replace(call, key=key, value=value)
    request, more = _with_aligned_mask(dataclasses.replace(request, call=call), _STREAMING_QUERIES)
    call, launches = request.call, launches + more
    tiles = tiles._replace(block_m=_STREAMING_QUERIES, warps=4, registers=_streaming_registers(call.head_dim))
    constants = call_arguments(request, tiles) | {"keys": call.keys, "inverse_count": fp.inverse_count(call.keys)}
    constants["RECIPE"] = recipe_of(constants | {"QUANTIZE": call.query.dtype != torch.int8})
    rows, blocks = rows_of_keys(call.key), triton.cdiv(call.queries, tiles.block_m)
    assert rows is not None
    masked = call.mask is not None
    span, unroll = streaming_steps(call.value_dim, call.keys, masked)
    last = span if masked else last_step(call.keys, span)
    constants["RING"] = Ring(span, unroll, last, call.keys % span == 0, False, mask_period(call))
    constants |= {"cu_q_ptr": call.query, "cu_k_ptr": call.query}
    for part in parts(request):
        arguments = part.arguments | constants | {"sums_ptr": part.of(sums), "parts": sums.shape[2]}
        arguments |= _streaming_arguments(part.of(call.key)[: part.batch], part.of(call.value)[: part.batch], rows, span)
        if masked:
            arguments |= _mask_arguments(arguments["mask_ptr"], call.queries)
        scores = ScoreTile(tiles.block_m, span * unroll, whole=False)
        arguments = _streaming_kernel_arguments(arguments)
        grid = (blocks, call.heads, part.batch)
        launches.append(KernelLaunch(kernel, grid, arguments, launch_options(tiles), "sm90.streaming", scores))
    return launches


# --- keys and values quantised before -----------------------------------------------------------------------


def quantizes_in_clusters(call: AttentionCall) -> bool:
    """Tell whether :mod:`.sm90.quantize` takes a float call's keys and values for :mod:`.sm90.attention_streaming`."""
    tensors = call.key, call.value
    fits = all(x.element_size() == 2 and side_by_side(x) for x in tensors) and not needs_wide_offsets(*tensors)
    fits = fits and call.places is None and call.value_dim == call.head_dim
    return fits and choose_cluster(call.keys, call.head_dim) is not None


def quantize_in_clusters(call: AttentionCall) -> LongQuantized:
    """Quantise keys and values by :mod:`.sm90.quantize`, in the order of :mod:`.sm90.attention_streaming`."""
    key, value, recipe = call.key, call.value, call.recipe
    batch, heads, tokens, channels = key.shape
    cluster, padded = choose_cluster(tokens, channels), triton.cdiv(tokens, _STREAMING_TILE) * _STREAMING_TILE
    assert cluster is not None
    packed, found = new_quantized(key, value, recipe, True, padded, cluster.blocks)
    width = packed.shape[2]
    low, high = (key.new_empty((batch, heads, 2, width // 2, cluster.blocks), dtype=torch.int32) for _ in range(2))
    strides = {
        f"{name}_stride_{axis}": x.stride(dim) for name, x in (("k", key), ("v", value)) for dim, axis in enumerate("zhn")
    }  # fmt: skip
    # without centring the pointer to offsets is not used; any tensor will do
    offset = found.value_scale if found.value_offset is None else found.value_offset
    launch_kernel(
        _cluster_kernel(), (1, heads, 2 * batch), key, value, low, high, found.key, found.key_scale, packed, found.value_scale,
        offset, found.value_sums, group(**strides), tokens,
        group(channels=channels, key_stride_n=found.key.stride(2), words=padded // 4),
        CENTER=recipe.smooth_key, CENTER_VALUE=recipe.smooth_value, BLOCKS=cluster.blocks, D=width, TILES=cluster.tiles,
        WARPS=CLUSTER_WARPS, num_warps=CLUSTER_WARPS, num_ctas=cluster.blocks, enable_fp_fusion=False,
    )  # fmt: skip
    return found


# --- packed sequences ---------------------------------------------------------------------------------------


def _sequences_refusal(call: VarlenCall) -> str | None:
    """Return why no kernel of this family takes packed sequences of this type, on this device, or None."""
    if call.query.device.type == "cpu":
        return "Triton's interpreter has no Gluon"
    if call.query.element_size() != 2 or call.is_causal:
        return "it takes 16-bit floats and no causal order"
    return None


def packed_refusal(call: VarlenCall) -> str | None:
    """Return why :mod:`.sm90.attention_packed` does not take packed float sequences, or is not the fastest, or None."""
    query, key, value, lengths = call.query, call.key, call.value, call.lengths
    shape = AttentionShape(call.recipe, query.shape[2], value.shape[2], 64, SHORT_ROW)
    if reason := _sequences_refusal(call) or resident_misfit(shape, capability_of(query.device)):
        return reason
    most = most_packed_keys(query.shape[2], query.shape[1] * lengths.sequences, processors_of(query.device))
    if not (0 < lengths.most_keys <= most and lengths.sequences <= MOST_BLOCKS):
        return f"it takes up to {most} keys a sequence here and {MOST_BLOCKS} sequences"
    views = [x[None].transpose(1, 2) for x in (query, key, value)]
    fits = all(side_by_side(x, 8) for x in views) and not needs_wide_offsets(*views)
    return None if fits else "channels must be neighbours, and rows begin at multiples of 8 bytes"


def packed_launch(call: VarlenCall, out: torch.Tensor) -> KernelLaunch:
    """Spell out the launch of :mod:`.sm90.attention_packed`."""
    lengths, recipe, kernel = call.lengths, call.recipe, _packed_kernel()
    tile = 64 if lengths.most_keys <= 64 else 128
    tiles = Tiles(64, tile, 4, 1, REGISTERS_OF_THREE)
    heads, blocks = call.query.shape[1], triton.cdiv(lengths.most_queries, tiles.block_m)
    parts = split_packed(blocks, heads * lengths.sequences, processors_of(call.query.device))
    request = KernelRequest(one_element(call), out[None].transpose(1, 2))
    arguments = call_arguments(request, tiles) | varlen_arguments(call, out)
    arguments |= {
        "share": triton.cdiv(blocks, parts),
        "most_keys": lengths.most_keys,
        "TILES": triton.cdiv(lengths.most_keys, tile),
        "ORDERED": packed_order(lengths.sequences, lengths.most_keys),
    }
    exact = recipe.takes_exact_sum(lengths.most_keys)
    arguments |= {"QUANTIZE": True, "CENTER": recipe.smooth_key, "QUERY_TOKEN": True, "EXACT": exact}
    arguments |= {"RECIPE": recipe_of(arguments), "STRIDES": strides_of(arguments, False)}
    arguments = kernel_arguments(kernel, arguments, {})
    scores = ScoreTile(tiles.block_m, tile, whole=False)
    return KernelLaunch(kernel, (parts, heads, lengths.sequences), arguments, launch_options(tiles), "sm90.packed", scores)


def varlen_refusal(call: VarlenCall) -> str | None:
    """Return why :mod:`.sm90.attention_streaming` does not take packed float sequences whose keys and values are quantised for
    it, or None."""
    query, value, lengths = call.query, call.value, call.lengths
    shape = AttentionShape(
        call.recipe, query.shape[2], value.shape[2], max(64, lengths.most_queries), max(SHORT_ROW + 1, lengths.most_keys)
    )  # fmt: skip
    if reason := _sequences_refusal(call) or streams(shape, capability_of(query.device)):
        return reason
    view = query[None].transpose(1, 2)
    fits = side_by_side(view) and not needs_wide_offsets(view)
    return None if fits else "channels must be neighbours, and rows begin at multiples of 16 bytes"


def varlen_launch(call: VarlenCall, out: torch.Tensor) -> KernelLaunch:
    """Spell out :mod:`.sm90.attention_streaming` for packed sequences: float queries, int8 keys, packed int8 values."""
    lengths, sums, kernel = call.lengths, call.value_sums, _streaming_kernel()
    assert sums is not None
    one = one_element(call)
    tiles = Tiles(64, _STREAMING_TILE, 4, 1, _streaming_registers(one.head_dim))
    request = KernelRequest(one, out[None].transpose(1, 2), False, sums, True)
    rows = rows_of_keys(one.key)
    assert rows is not None
    arguments = call_arguments(request, tiles) | varlen_arguments(call, out)
    arguments |= _streaming_arguments(one.key, one.value, rows, _STREAMING_TILE)
    exact = call.recipe.takes_exact_sum(lengths.most_keys)
    arguments |= {
        "RING": Ring(_STREAMING_TILE, 1, _STREAMING_TILE, False, True),
        "RECIPE": recipe_of(arguments | {"QUANTIZE": True, "QUERY_TOKEN": True, "EXACT": exact}),
        "queries": lengths.most_queries,
        "keys": lengths.most_keys,
        "inverse_count": 0,  # found for each sequence
        "parts": sums.shape[2],
    }
    arguments = _streaming_kernel_arguments(arguments)
    grid = (triton.cdiv(lengths.most_queries, tiles.block_m), one.heads, lengths.sequences)
    scores = ScoreTile(tiles.block_m, _STREAMING_TILE, whole=False)
    return KernelLaunch(kernel, grid, arguments, launch_options(tiles), "sm90.streaming", scores)


# --- linear layers of integer networks ----------------------------------------------------------------------

_LINEAR_DEPTH = 128
"""Inputs a step of :mod:`.sm90.linear`: the widest row that the copy engine swizzles."""


def linear_refusal(call: LinearCall) -> str | None:
    """Return why :mod:`.sm90.linear` does not take the call, or None.

    What the copy engine reads begins and goes on at multiples of 16 bytes; outputs are in groups of 8 to 64.
    """
    outputs, inputs = call.weight.shape
    if call.x.device.type == "cpu" or capability_of(call.x.device) != (9, 0):
        return "it is for Hopper (sm_90)"
    if call.x.dtype != torch.int8:
        return "it takes int8"
    if inputs % 16 or outputs % (16 if call.gated else 8) or (call.x.data_ptr() | call.weight.data_ptr()) & 15:
        return "it takes multiples of 16 inputs and of 8 outputs, 16 if gated, from addresses that are multiples of 16"
    return None


def linear_launch(call: LinearCall) -> KernelLaunch:
    """Spell out the launch of :mod:`.sm90.linear`."""
    kernel = _linear_kernel()
    (rows, inputs), outputs = call.x.shape, call.weight.shape[0]
    processors = processors_of(call.x.device)
    tiles = choose_linear_tiles(rows, inputs, outputs, processors)
    wide, high = triton.cdiv(outputs, tiles.block_n), triton.cdiv(rows, tiles.block_m)
    programs = min(wide * high, processors * tiles.programs)
    group = min(outputs & -outputs, 64)
    # of a group's outputs, those that a lane has of every eight accumulator columns are neighbours
    shape = [outputs // group, group // 8, 4, 2, inputs]
    strides = [group * inputs, 2 * inputs, group // 4 * inputs, inputs, 1]
    if call.gated:
        # of every two columns one is a gate and one its value
        strides = [group // 2 * inputs, inputs, group // 8 * inputs, outputs // 2 * inputs, 1]
    block = [tiles.block_n // group, group // 8, 4, 2, _LINEAR_DEPTH]
    dependent = dependent_launch(call.x.device, rows * min(inputs, outputs))
    plan = LinearPlan(
        tiles.block_m, tiles.block_n, _LINEAR_DEPTH, outputs % tiles.block_n == 0, group, tiles.stages, dependent,
        EARLY=count_launch() and dependent == "early",
        # a program with one tile has no products of another while it waits; registers hold the numbers of a narrow one
        AHEAD=not call.gated and tiles.block_n == 64 and programs == wide * high,
    )  # fmt: skip
    arguments = call.epilogue() | {
        "x_desc": _description(call.x, [rows, inputs], [inputs, 1], [tiles.block_m, _LINEAR_DEPTH]),
        "weight_desc": _description(call.weight, shape, strides, block),
        "steps": triton.cdiv(inputs, _LINEAR_DEPTH),
        "inverse_wide": triton.cdiv(1 << 30, wide),
        "down": programs // wide,
        "across": programs % wide,
        "PLAN": plan,
    }
    arguments = kernel_arguments(kernel, arguments, {})
    options = {"num_warps": tiles.warps, "maxnreg": tiles.registers, "launch_pdl": dependent != ""}
    return KernelLaunch(kernel, (programs,), arguments, options)
