"""From tensors to kernel launches: which kernel, with which tiles and arguments; and the launch itself."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
import triton

from .. import fixed_point as fp
from ..layout import empty_output, has_aligned_rows
from ..recipe import Recipe
from .calls import Call
from .long import long_kernel, pack_value_kernel
from .long_quantize import launch_quantize_long
from .quantize import chunk_tokens
from .short import short_kernel
from .tiles import (
    GENERAL,
    HOPPER,
    LONG_HOPPER,
    SHORT_ROW,
    WINDOWS,
    Tiles,
    cache_bytes_of,
    choose_tiles,
    fits_block,
    fits_hopper,
    fits_long_hopper,
    fits_windows,
    is_crowded,
    is_held,
    is_short,
    kernel_width,
    most_programs,
    most_queries,
    processors_of,
    share_walk,
    shared_bytes,
    tiles_for,
    widest_span,
)

_MOST_BLOCKS = 65535


def kernel_constants(
    recipe: Recipe, head_dim: int, value_dim: int, mask: str, is_causal: bool, key_token: bool, guard: bool
) -> dict[str, Any]:
    """Return the constexpr arguments that follow from the recipe and the shapes (tiles excepted)."""
    offset, _, _ = fp.probability_constants(recipe.exponential, recipe.probability_bits)
    most = fp.most_multiplier(head_dim, mask == "bias")
    return {
        "HEAD_DIM": head_dim,
        "VALUE_DIM": value_dim,
        "BLOCK_D": max(32, triton.next_power_of_2(head_dim)),
        "BLOCK_DV": max(16, triton.next_power_of_2(value_dim)),
        "MASK": mask,
        "CAUSAL": is_causal,
        "KEY_TOKEN": key_token,
        "QUADRATIC": recipe.exponential == "quadratic",
        "BITS": recipe.probability_bits,
        "NEAREST": recipe.probability_rounding == "nearest",
        "OFFSET": offset,
        "FLOOR_OUTPUT": recipe.output == "value_scale",
        "COLUMN_BITS": fp.column_bits(head_dim),
        "MOST": most,
        "MOST_BITS": most.bit_length(),
        "CHECK": is_causal or mask != "none",
        "GUARD": guard,
    }


@functools.cache
def _by_hand(kernel: int) -> Any:
    # only where they run: they need a part of Triton that the interpreter has not
    if kernel == LONG_HOPPER:
        from .long_hopper import long_hopper_kernel as found
    elif kernel == HOPPER:
        from .hopper import hopper_kernel as found
    else:
        from .windows import windows_kernel as found
    return found


def _side_by_side(x: torch.Tensor, piece: int = 16) -> bool:
    """Whether channels are neighbours and every row can be copied ``piece`` bytes at a time."""
    whole = piece // x.element_size()
    return (
        x.stride(3) == 1 and x.data_ptr() % 16 == 0 and all(x.stride(dim) % whole == 0 for dim in range(3) if x.shape[dim] > 1)
    )


def _split_walked(tiles: Tiles, queries: int, keys: int, heads: int, head_dim: int, fused: bool, processors: int) -> Tiles:
    """:func:`_split` for rows that :mod:`.hopper` walks over twice."""
    room = most_programs(shared_bytes(keys, head_dim))
    if not tiles.splits and queries > 64:
        if fits_block(64, 8, head_dim, keys) and head_dim <= 64 and triton.cdiv(queries, 64) * heads <= processors:
            # as long as one warp's chain of instructions: two share it, and hold the row
            return tiles._replace(block_m=64, warps=8, splits=triton.cdiv(queries, 64))
        if room == 1 or triton.cdiv(queries, 128) * heads <= processors:
            # eight warps to a processor, by which its keys are fetched once
            tiles = tiles._replace(block_m=128, warps=8)
    each = 1 if tiles.warps == 8 else min(room, 3 if head_dim <= 64 else 2)
    splits, programs = min(triton.cdiv(queries, tiles.block_m), tiles.splits), 0
    if not splits:
        splits, programs, duration = share_walk(queries, heads, each, processors, head_dim, fused)
        if each == 2 and (heads <= processors or not (fused and head_dim > 64)):
            # two programs of four warps on most processors: if eight warps are as soon done, one fetches the keys instead of
            # two; where each quantises several wide heads the other works meanwhile
            alone = share_walk(queries, heads, 1, processors, head_dim, fused)
            most = alone.programs or head_dim > 64 or 2 * (programs or splits * heads) > 3 * processors
            if most and alone.duration <= duration:
                tiles, each, splits, programs = tiles._replace(block_m=128, warps=8), 1, alone.splits, alone.programs
    registers = tiles.registers or (168 if each == 3 and (programs or splits * heads) > 2 * processors else 0)
    return tiles._replace(splits=splits, programs=programs, registers=registers)


def _past_blocks(tiles: Tiles, queries: int, head_dim: int) -> int:
    """Columns of products for the few queries past whole blocks, 8 or 16; 0 if :mod:`.hopper_last` cannot take them apart."""
    left = queries % tiles.block_m
    return (8 if left <= 8 else 16) if tiles.warps == 4 and head_dim > 32 and 0 < left <= 16 else 0


def _split_held(
    tiles: Tiles, queries: int, keys: int, heads: int, head_dim: int, fused: bool, by_channel: bool, processors: int
) -> Tiles:
    """:func:`_split` for rows that :mod:`.hopper` holds whole."""
    narrow, wide = head_dim <= 64, widest_span(head_dim) > 64
    # programs that a processor has room for: more keys and wide heads take registers, and eight warps take all there are
    places = 3 if narrow and keys <= SHORT_ROW else 1 if tiles.warps == 8 else 2
    blocks = triton.cdiv(queries, tiles.block_m)
    splits = min(blocks, tiles.splits or max(1, places * processors // max(1, heads)))
    if not tiles.splits:
        if splits * heads <= processors and (fused or not narrow):
            # with processors to spare a call takes as long as one warp's chain of instructions: two share it
            return tiles._replace(warps=8, splits=splits)
        if splits * heads > processors >= heads > 0:
            # A program a processor fetches the keys fewer times than several; if it has to quantise, too, with eight warps.
            alone = processors // heads
            if fused and not wide and (places == 3 or not narrow):
                return tiles._replace(block_m=128, warps=8, splits=min(triton.cdiv(queries, 128), alone))
            if not fused and places == 3 and alone == triton.cdiv(queries, 128) > 1:
                # a block of 128 by eight warps is sooner done than two of 64, one behind the other
                return tiles._replace(block_m=128, warps=8, splits=alone)
            # of two programs each has half of the processor
            pays = alone > 1 if places == 3 else triton.cdiv(blocks, alone) < 2 * triton.cdiv(blocks, splits)
            if not fused and not wide and pays:
                return tiles._replace(splits=alone)
    # three programs a processor instead of two: up to 256 keys at the price of a few spills; int8 images of a few more tokens,
    # whose last queries are apart, without any, unless scales differ from channel to channel
    few_more = not (fused or by_channel) and narrow and keys <= SHORT_ROW + 8 and _past_blocks(tiles, queries, head_dim) == 8
    third = places == 3 or few_more
    registers = 168 if third and splits * heads > 2 * processors else 0
    return tiles._replace(splits=splits, registers=tiles.registers or registers)


def _split(
    tiles: Tiles,
    queries: int,
    keys: int,
    heads: int,
    head_dim: int,
    narrow: bool,
    fused: bool,
    masked: bool,
    by_channel: bool,
    device: torch.device,
) -> Tiles:
    """Fill in how many programs share a head, so that the machine is full but keys are not fetched more often than needed."""
    processors = processors_of(device)
    if tiles.kernel == HOPPER:
        if tiles.programs:
            return tiles._replace(splits=0)
        if is_held(keys, tiles.across):
            return _split_held(tiles, queries, keys, heads, head_dim, fused, by_channel, processors)
        return _split_walked(tiles, queries, keys, heads, head_dim, fused, processors)
    splits = min(triton.cdiv(queries, tiles.block_m), tiles.splits or max(1, 3 * processors // max(1, heads)))
    registers = tiles.registers
    if tiles.kernel == WINDOWS:
        # The queries of few windows are shared out among warps; one warp a window loads and prepares the keys once. A bias is
        # waited for longer than keys are prepared.
        loads = (4 if fused else 3, 8) if masked else (7, 7) if fused else (3, 8)
        splits = tiles.splits or (4 if heads <= loads[0] * processors else 2 if heads <= loads[1] * processors else 1)
        splits = min(splits, triton.next_power_of_2(triton.cdiv(queries, 16)))
        # one program is sooner launched than several; beside a bias two warps of one would have to pass on its marks
        warps = 1 if masked and splits < 4 else splits
        # sixteen programs a processor instead of fourteen
        registers = 128 if fused and not masked else 0
        return tiles._replace(splits=splits // warps, warps=warps, registers=registers)
    if not registers and tiles.warps == 4 and tiles.block_n > 64 and narrow:
        programs = splits * heads
        if fused and programs > 2 * processors:
            # three programs a processor instead of two, where there are enough of them
            registers = 168
        elif not fused and 2 * processors < programs <= 3 * processors:
            registers = 144  # costs spills, but one round instead of two
    return tiles._replace(splits=splits, registers=registers)


def _strides(x: torch.Tensor, dims: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(0 if x.shape[dim] == 1 else x.stride(dim) for dim in dims)


def _options(tiles: Tiles) -> dict[str, Any]:
    # a product and a sum fused by the compiler would round differently; where one is meant it is spelt out
    options: dict[str, Any] = {"num_warps": tiles.warps, "num_stages": tiles.stages, "enable_fp_fusion": False}
    if tiles.registers:
        options["maxnreg"] = tiles.registers
    return options


_UNIT = 1 << 30
"""One, in the unit of inverses that :mod:`.windows` multiplies by instead of dividing."""
_PACKED_KEYS = 256
"""Keys of V that are packed at a time."""
_LONG_TILE = 128
"""Keys a tile of :mod:`.long_hopper`."""
_MOST_LENGTHS = 32
"""Lengths of rows, of those that are walked over, that :mod:`.hopper` is compiled for in a process unless tiles are given."""
_lengths: set[int] = set()


def _pack_value(value: torch.Tensor, dealt: bool) -> tuple[torch.Tensor, torch.Tensor, list[Call]]:
    """Return V with its keys side by side, the sums of its channels, and the launches that fill both.

    The view returned has V's shape; its storage is (batch, heads, channels, keys up to a multiple of 128), zero
    past the end, and if ``dealt`` in another order, channels up to a kernel's width (:func:`.long.pack_value_kernel`). The
    sums are those of chunks of keys, (batch, heads, chunks, channels).
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
    for start in range(0, batch, _MOST_BLOCKS):
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
        grid = (triton.cdiv(width, block) * parts, heads, min(_MOST_BLOCKS, batch - start))
        calls.append(Call(pack_value_kernel, grid, arguments, {"num_warps": 4, "num_stages": 2}))
    return packed[:, :, :channels, :keys].mT, sums, calls


def _key_rows(key: torch.Tensor) -> tuple[int, int, int] | None:
    """Return where a head's keys lie if all keys are rows of one matrix: rows a batch, rows and columns a head."""
    stride_z, stride_h, stride_n = (key.stride(dim) if key.shape[dim] > 1 else 0 for dim in range(3))
    if stride_n <= 0 or stride_z % stride_n:
        return None
    rows_h, columns_h = divmod(stride_h, stride_n)
    if columns_h * (key.shape[1] - 1) + key.shape[3] > stride_n:
        return None
    return stride_z // stride_n, rows_h, columns_h


def _matrix(x: torch.Tensor, rows: int, columns: int, stride: int, block: tuple[int, int]) -> Any:
    """Describe int8 rows for the copy engine, which fetches blocks of them to shared memory."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = gl.NVMMASharedLayout(swizzle_byte_width=min(block[1], 128), element_bitwidth=8, rank=2)
    return TensorDescriptor(x, [rows, columns], [stride, 1], list(block), layout)


def _long_steps(width: int, keys: int) -> tuple[int, int]:
    """Return how many keys :mod:`.long_hopper` takes at a time, and how many times a turn of its loops.

    Two tiles at a time where they fit; else two steps a turn where their number is even.
    """
    if width <= 64:
        return 2 * _LONG_TILE, 1
    return _LONG_TILE, 2 if triton.cdiv(keys, _LONG_TILE) % 2 == 0 else 1


def _last_step(keys: int, span: int) -> int:
    """Return the columns of the last step: whole tiles, and one of 32, 64 or 128."""
    whole, left = divmod(keys % span or span, _LONG_TILE)
    return whole * _LONG_TILE + (max(32, triton.next_power_of_2(left)) if left else 0)


def _long_arguments(key: torch.Tensor, value: torch.Tensor, rows: tuple[int, int, int]) -> dict[str, Any]:
    """Return what :mod:`.long_hopper` takes in place of pointers to keys and packed values."""
    batch, heads, keys, channels = key.shape
    width = kernel_width(channels)
    span, unroll = _long_steps(width, keys)
    rows_z, rows_h, columns_h = rows
    count = (batch - 1) * rows_z + (heads - 1) * rows_h + keys
    columns, padded = (heads - 1) * columns_h + channels, value.stride(3)
    return {
        "k_desc": _matrix(key, count, columns, key.stride(2), (span, width)),
        "v_desc": _matrix(value, batch * heads * width, padded, padded, (width, _LONG_TILE)),
        "SPAN": span,
        "UNROLL": unroll,
        "LEFT": _last_step(keys, span),
        "k_rows_z": rows_z,
        "k_rows_h": rows_h,
        "k_columns_h": columns_h,
    }


def _meant_for_long_hopper(tiles: Tiles, recipe: Recipe, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Tell whether :mod:`.long_hopper` may be asked and knows the shapes and the recipe, wherever the tensors lie."""
    sizes = query.shape[3], value.shape[3], query.shape[2], key.shape[2]
    return tiles.kernel in (HOPPER, LONG_HOPPER) and fits_long_hopper(recipe, *sizes)


def _held_by_hand(tiles: Tiles, recipe: Recipe, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Tell whether :mod:`.hopper` takes tensors that lie so, if the output does, without a mask and with a key scale a head."""
    return (
        tiles.kernel == HOPPER
        and fits_hopper(recipe, query.shape[3], value.shape[3], query.shape[2], key.shape[2])
        and fits_block(tiles.block_m, tiles.warps, query.shape[3], key.shape[2])
        and query.element_size() <= 2
        and all(_side_by_side(x, 8) for x in (query, key, value))
    )


def _share_windows(
    tiles: Tiles, windows: int, heads: int, queries: int, periods: int, mask: torch.Tensor | None, device: torch.device
) -> tuple[tuple[int, int, int], dict[str, Any], Tiles]:
    """Share windows out among programs of :mod:`.windows`: grid, arguments and registers.

    Args:
        periods: windows after which the bias ``mask`` repeats. Programs may take several windows with the same bias.
    """
    processors, fixed = processors_of(device), mask is not None and mask.dtype == torch.int32
    one_block = 16 * tiles.warps * tiles.splits >= queries
    repeats = windows // periods
    groups = repeats
    if mask is not None:
        # measured: programs of one block are sooner done with more registers, and to convert a bias takes as many
        room, registers = (12, 168) if one_block or not fixed else (16, 128)
        # several warps of a program have one window
        groups = repeats if tiles.warps > 1 else min(repeats, max(1, room * processors // (heads * periods * tiles.splits)))
        groups = triton.cdiv(repeats, triton.cdiv(repeats, groups))
        tiles = tiles._replace(registers=registers)
    several = groups * periods < windows
    programs = groups * tiles.splits * heads * periods
    layers = triton.cdiv(programs, processors)
    # where a program has one block, what it takes to find its place counts for more than a bias that is near; a quotient by
    # a rounded inverse is right below the limit
    together = fixed and not one_block and programs * max(groups, heads) < _UNIT and layers <= _MOST_BLOCKS
    arguments = {
        "windows": windows,
        "periods": periods,
        "groups": groups,
        "heads": heads,
        "groups_inverse": triton.cdiv(_UNIT, groups),
        "heads_inverse": triton.cdiv(_UNIT, heads),
        "share": programs // processors,
        "longer": programs % processors,
        "SEVERAL": several,
        # worth it where it saves a conversion
        "STAGED": several and not fixed,
        "TOGETHER": together,
        "SPLITS": tiles.splits,
    }
    if together:
        return (processors, layers, 1), arguments, tiles
    return (groups * tiles.splits, heads, periods), arguments, tiles


def _eviction_policy(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor) -> str:
    """Say how the L2 is to treat the tensors of a call, whose heads are read once.

    If it does not hold all of them, what has been read is not to push out what is still to be read. Measured: smaller ones are
    level in a network and slower in a call that is made again.
    """
    size = sum(x.nbytes for x in (query, key, value, out))
    return "evict_first" if query.shape[1] == key.shape[1] and size > cache_bytes_of(query.device) else ""


class _Scales(NamedTuple):
    """Scales of int8 tensors, as the kernels take them; of query None if it is float."""

    query: torch.Tensor | None
    key: torch.Tensor
    value: torch.Tensor
    output: torch.Tensor | None


def _division(
    tiles: Tiles, queries: int, keys: int, head_dim: int, heads: int, batch: int, fused: bool, processors: int
) -> dict[str, int | str]:
    """Return the constants of :mod:`.hopper` that say how a call's work is divided and what a program does with its part."""
    across, splits = tiles.across, tiles.splits
    blocks = triton.cdiv(queries, tiles.block_m)
    twice = not is_held(keys, across)
    # measured: it pays where one program walks over a head's int8 queries and shares its processor with another; from floats
    # with narrow heads, of rows walked over where a block takes longest, of those held whole where one round of programs takes
    # all heads or a processor has two of them
    walks = max(1, splits) < blocks and splits <= (2 if fused and not twice else 1)
    if not fused:
        pays = batch * heads > processors
    elif head_dim > 64:
        pays = False
    else:
        pays = not tiles.registers if twice else keys > SHORT_ROW or batch * heads <= 3 * processors
    tail = _past_blocks(tiles, queries, head_dim) if walks and pays else 0
    if twice and most_programs(shared_bytes(keys, head_dim, tail)) < (3 if tiles.registers else 2):
        tail = 0
    # Products that begin at the sums of V's channels are fewer instructions, but start later, which other programs hide (all
    # of it measured). Beside last queries from floats registers have no room for them.
    programs = splits * batch * heads
    if twice:
        begin = batch * heads > processors
    else:
        begin = programs > processors or (fused and across == 1)
        begin = begin and not (fused and tail)
    sums = "begin" if begin else "end"
    # Tensor cores that are idle anyway find the sums sooner than instructions do, for a block or two; beside the outputs of
    # wide heads registers have no room for it.
    few = 0 < programs <= processors and 2 * splits * tiles.block_m >= queries
    if few and not (tail or twice or is_crowded(keys)) and (head_dim <= 64 or across > 1):
        sums = "products"
    # programs that go from head to head have to know how many blocks that is
    whole = 0 if splits else blocks - (tail > 0)
    # a loop of one turn is none, and its four tiles are more than registers hold
    turn = 0 if not twice else 1 if tiles.registers or keys < 512 else 2
    return {
        "WALK": not splits or splits < blocks,
        "TAIL": tail,
        "ACROSS": across,
        "SUMS": sums,
        "TURN": turn,
        "BLOCKS": whole,
        "HEADS": heads if whole else 0,
        # measured: programs with more to do first, where a processor has three of them
        "SPREAD": tail > 0 and splits > 1 and keys <= SHORT_ROW,
    }


def _calls(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scales: _Scales | None,
    mask: torch.Tensor | None,
    is_causal: bool,
    softmax_scale: float,
    out: torch.Tensor,
    recipe: Recipe,
    tiles: Tiles,
    guard: bool,
    value_sums: torch.Tensor | None = None,
    dealt: bool = False,
) -> list[Call]:
    """Spell out the launches for int8 tensors with their scales, or (short rows) for float tensors without.

    Where V is ``dealt`` query may be float: it is quantised on the way, with a scale a token.
    """
    batch, heads, queries, head_dim = query.shape
    keys, value_dim = key.shape[2], value.shape[3]
    block_d, block_dv = triton.next_power_of_2(head_dim), triton.next_power_of_2(value_dim)
    two_pass = recipe.normalization == "two_pass"
    row_tiles = triton.cdiv(keys, tiles.block_n)
    sums = value_sums
    calls: list[Call] = []
    key_token = scales is not None and scales.key.shape[2] > 1
    value_channel = recipe.value_granularity == "channel" if scales is None else scales.value.shape[3] > 1
    output_channel = scales is not None and scales.output is not None and scales.output.shape[3] > 1
    plain = not (is_causal or mask is not None or key_token or guard)
    hopper = plain and not dealt and _held_by_hand(tiles, recipe, query, key, value) and _side_by_side(out, 8)
    most = most_queries(value_dim)
    if tiles.kernel == HOPPER and not hopper:
        # meant for tensors that lie otherwise; the kernel that has these takes fewer queries of wide heads
        tiles = tiles._replace(block_m=min(tiles.block_m, most))
    if tiles.block_m > most and not hopper:
        raise ValueError(f"BLOCK_M must be at most {most} here, got {tiles.block_m}")
    short = two_pass and (hopper or row_tiles <= 2) and max(block_d, block_dv) <= 128
    if scales is None and not short:
        raise ValueError(f"one launch cannot quantise and attend to {keys} keys with {tiles}")
    key_rows = None if short else _key_rows(key)
    if two_pass and not short and sums is None:
        dealt = (
            plain
            and _meant_for_long_hopper(tiles, recipe, query, key, value)
            and key_rows is not None
            and all(map(_side_by_side, (query, key, out)))
        )
        value, sums, calls = _pack_value(value, dealt)
    if dealt:
        # three programs a processor, or with wider heads two
        tiles = tiles._replace(block_m=64, warps=4, registers=168 if head_dim <= 64 else 0)
    kind = "none" if mask is None else "bool" if mask.dtype == torch.bool else "bias"
    windows = (
        tiles.kernel == WINDOWS
        and fits_windows(recipe, head_dim, value_dim, queries, keys)
        and kind != "bool"
        and not (guard or is_causal or key_token)
        and all(map(_side_by_side, (query, key, value, out)))
    )
    mask_view = query if mask is None else mask.view(torch.uint8) if mask.dtype == torch.bool else mask
    constant = fp.split_float(softmax_scale * math.log2(math.e))
    # a mask of one image's windows repeats over the batch; one that is given per batch element is sliced with it
    period = 0 if mask is None or mask.shape[0] in (1, batch) else mask.shape[0]
    step = _MOST_BLOCKS // max(period, 1) * max(period, 1)
    if short:
        tiles = _split(
            tiles if hopper or windows else tiles._replace(kernel=GENERAL),
            queries,
            keys,
            batch * heads,
            max(head_dim, value_dim),
            max(head_dim, value_dim) <= 64 and recipe.probability_bits == 8 and (scales is None or mask is None),
            scales is None,
            mask is not None,
            value_channel or output_channel,
            query.device,
        )
    fixed: dict[str, Any] = {
        "queries": queries,
        "constant_mantissa": constant[0],
        "constant_exponent": constant[1],
        "GROUP": heads // key.shape[1],
        "MASK_PERIOD": period,
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "VALUE_ROWS": value.stride(2) != 1 or value.shape[2] == 1,
    }
    if short:
        blocks = tiles.splits
        fixed |= {"TILES": row_tiles, "KEYS": keys, "QUANTIZE": scales is None, "CENTER": scales is None and recipe.smooth_key}
        if windows:
            one_scale = scales is not None and all(x is None or x.numel() == 1 for x in scales)
            # a thread takes four neighbours of a bias at once
            aligned = mask is not None and has_aligned_rows(_strides(mask, (0, 1, 2, 3)), 4)
            # measured: of int8, with a processor to itself a program has its values sooner if every warp loads them
            divided = tiles.warps == 4 and (scales is None or batch * heads > processors_of(query.device))
            fixed |= {"QUERIES": queries, "ONE_SCALE": one_scale, "ALIGNED": aligned, "DIVIDED": divided}
            fixed["POLICY"] = _eviction_policy(query, key, value, out)
        if hopper:
            fixed |= _division(tiles, queries, keys, head_dim, heads, batch, scales is None, processors_of(query.device))
            # measured: of rows held whole 1 % faster at most, or slower; of int8 not yet
            walked = scales is None and fixed["TURN"]
            fixed["POLICY"] = _eviction_policy(query, key, value, out) if walked else ""
    else:
        blocks = triton.cdiv(queries, tiles.block_m)
        fixed |= {"keys": keys, "ONLINE": not two_pass, "VALUE_SUMS": sums is not None and not is_causal}
    if scales is None:
        # the kernel finds the scales and reads none; any tensor fills the places
        given = dict.fromkeys(("qs", "ks", "vs", "os"), query)
        query_token = recipe.query_granularity == "token"
    else:
        given = {"qs": query if scales.query is None else scales.query, "ks": scales.key, "vs": scales.value}
        given["os"] = scales.value if scales.output is None else scales.output
        query_token = scales.query is None or scales.query.shape[2] > 1
    fixed |= {
        "QUERY_TOKEN": query_token,
        "VALUE_CHANNEL": value_channel,
        "OUTPUT_CHANNEL": output_channel,
        **kernel_constants(recipe, head_dim, value_dim, kind, is_causal, key_token, guard),
    }
    named = hopper or windows or dealt
    for start in range(0, batch, step):

        def part(x: torch.Tensor, start: int = start) -> torch.Tensor:
            return x if start == 0 or x.shape[0] == 1 else x[start:]

        arguments: dict[str, Any] = {}
        for name, x in (("q", query), ("k", key), ("v", value), ("o", out)):
            arguments[f"{name}_ptr"] = part(x)
            arguments.update({f"{name}_stride_{axis}": x.stride(dim) for dim, axis in enumerate("zhnd")})
        for name, x in given.items():
            arguments[f"{name}_ptr"] = part(x)
            axes = ((0, "z"), (1, "h"), (2, "n")) if name in ("qs", "ks") else ((0, "z"), (1, "h"), (3, "d"))
            strides = (0, 0, 0) if x is query else _strides(x, tuple(dim for dim, _ in axes))
            arguments.update({f"{name}_stride_{axis}": stride for (_, axis), stride in zip(axes, strides, strict=True)})
        arguments["mask_ptr"] = mask_view if period else part(mask_view)
        if not short:
            arguments["sums_ptr"], arguments["parts"] = (query, 0) if sums is None else (part(sums), sums.shape[2])
        strides = (0, 0, 0, 0) if mask is None else _strides(mask_view, (0, 1, 2, 3))
        arguments.update({f"mask_stride_{axis}": stride for axis, stride in zip("zhmn", strides, strict=True)})
        part_batch = min(step, batch - start)
        grid = (blocks, heads, part_batch)
        if hopper:
            total = fixed["BLOCKS"] * heads * part_batch
            share = triton.cdiv(total, max(1, tiles.programs))
            arguments |= {"share": share, "total": total}
            if fixed["SPREAD"]:
                grid = (heads, part_batch, blocks)
            elif total:
                grid = (triton.cdiv(total, share), 1, 1)
        arguments |= fixed
        kernel = _by_hand(LONG_HOPPER if dealt else tiles.kernel) if named else short_kernel if short else long_kernel
        if dealt:
            assert key_rows is not None
            arguments |= _long_arguments(part(key)[:part_batch], part(value)[:part_batch], key_rows)
            arguments["QUANTIZE"] = query.dtype != torch.int8
        if windows:
            periods = 1 if mask is None or mask.shape[0] == 1 else period or part_batch
            grid, shared, tiles = _share_windows(tiles, part_batch, heads, queries, periods, mask, query.device)
            arguments |= shared
        if named:
            arguments = {name: arguments[name] for name in kernel.arg_names}
        calls.append(Call(kernel, grid, arguments, _options(tiles)))
    return calls


def _worth_compiling(keys: int) -> bool:
    """Tell whether :mod:`.hopper` may be compiled for rows of so many keys: it takes seconds for each length."""
    if keys not in _lengths and len(_lengths) < _MOST_LENGTHS:
        _lengths.add(keys)
    return keys in _lengths


def _tiles_for(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, fused: bool, masked: bool, recipe: Recipe) -> Tiles:
    batch, heads, queries, head_dim = query.shape
    keys = key.shape[2]
    sizes = recipe, head_dim, value.shape[3], queries, keys, batch * heads, fused, query.device
    tiles = tiles_for(*sizes, masked=masked)
    if query.is_cuda and tiles.kernel == HOPPER and not is_held(keys) and not _worth_compiling(keys):
        return tiles_for(*sizes, masked=masked, walk=False)
    return tiles


def attention_calls(
    query: torch.Tensor,
    query_scale: torch.Tensor | None,
    key: torch.Tensor,
    key_scale: torch.Tensor,
    value: torch.Tensor,
    value_scale: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    softmax_scale: float,
    output_scale: torch.Tensor | None,
    out: torch.Tensor,
    recipe: Recipe,
    *,
    tiles: tuple[int, ...] | None = None,
    guard: bool = False,
    capability: tuple[int, int] | None = None,
    value_sums: torch.Tensor | None = None,
    dealt: bool = False,
) -> list[Call]:
    """Return the launches that fill ``out`` with the attention of int8 tensors, in order.

    Rows that fit two tiles are one launch; longer ones first bring V to the tensor core's order, which pays
    because every block of queries reads it. More than 65535 batch elements are split.

    Args:
        tiles: :class:`Tiles` or its first fields, for tests and tuning; chosen by shape if None.
        guard: compile for Triton's interpreter, without inline assembly.
        capability: the architecture to choose tiles for; the query's device if None.
        value_sums: of the channels of chunks of V (batch, heads, chunks, channels), if its tokens lie side by side already,
            as :func:`.long_quantize.launch_quantize_long` leaves them; for rows that do not fit two tiles.
        dealt: they lie in the order of :mod:`.long_hopper`, which is then the kernel. Then query may be float16 or
            bfloat16, with None for its scale: it is quantised on the way, with a scale a token.
    """
    if tiles:
        chosen = Tiles(*tiles)
    elif capability:
        batch, heads, queries, head_dim = query.shape
        chosen = choose_tiles(
            recipe,
            head_dim,
            value.shape[3],
            queries,
            key.shape[2],
            capability,
            heads=batch * heads,
            masked=is_causal or mask is not None,
        )
    else:
        chosen = _tiles_for(query, key, value, False, is_causal or mask is not None, recipe)
    scales = _Scales(query_scale, key_scale, value_scale, output_scale)
    return _calls(query, key, value, scales, mask, is_causal, softmax_scale, out, recipe, chosen, guard, value_sums, dealt)


def _finds_scales(recipe: Recipe) -> bool:
    """Tell whether one program can find the scales that a recipe asks for."""
    return (
        recipe.query_granularity in ("head", "token")
        and recipe.key_granularity == "head"
        and recipe.value_granularity in ("head", "channel")
        and not recipe.balance
        and not recipe.rotate
    )


def fusable(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, is_causal: bool, recipe: Recipe
) -> bool:
    """Tell whether one launch can quantise and attend: keys and values that a program holds, and scales that it can find."""
    head_dim, value_dim, keys = query.shape[3], value.shape[3], key.shape[2]
    if not _finds_scales(recipe):
        return False
    if (
        is_short(recipe, head_dim, value_dim, keys)
        and triton.next_power_of_2(max(head_dim, value_dim)) * triton.next_power_of_2(keys) <= 64 * SHORT_ROW
    ):
        return True
    masked, on_cpu = is_causal or mask is not None, query.device.type == "cpu"
    # sizes before tiles: long rows come by here in every call
    if masked or on_cpu or not fits_hopper(recipe, head_dim, value_dim, query.shape[2], keys):
        return False
    return _held_by_hand(_tiles_for(query, key, value, True, False, recipe), recipe, query, key, value)


def fused_calls(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    softmax_scale: float,
    out: torch.Tensor,
    recipe: Recipe,
    *,
    tiles: tuple[int, ...] | None = None,
    guard: bool = False,
) -> list[Call]:
    """Return the launches (one per 65535 batch elements) that quantise float tensors and fill ``out`` with their attention.

    Only for what :func:`fusable` accepts. The mask is bool or float.
    """
    chosen = Tiles(*tiles) if tiles else _tiles_for(query, key, value, True, is_causal or mask is not None, recipe)
    return _calls(query, key, value, None, mask, is_causal, softmax_scale, out, recipe, chosen, guard)


def _new_output(like: torch.Tensor, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # the interpreter truncates where bfloat16 must round, so there PyTorch does that one conversion
    stored = torch.float32 if like.device.type == "cpu" and dtype == torch.bfloat16 else dtype
    return empty_output(like, value.shape[3], stored)


def launch_attention(
    query: torch.Tensor,
    query_scale: torch.Tensor,
    key: torch.Tensor,
    key_scale: torch.Tensor,
    value: torch.Tensor,
    value_scale: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    softmax_scale: float,
    output_scale: torch.Tensor | None,
    out_dtype: torch.dtype,
    recipe: Recipe,
    *,
    like: torch.Tensor | None = None,
    tiles: tuple[int, ...] | None = None,
) -> torch.Tensor:
    """Run :func:`qflash.reference.int8_attention` on the GPU: same arguments, same bits."""
    out = _new_output(query if like is None else like, value, out_dtype)
    if out.numel() == 0 or key.shape[2] == 0:
        return out.zero_().to(out_dtype)
    for call in attention_calls(
        query, query_scale, key, key_scale, value, value_scale, mask, is_causal, softmax_scale, output_scale, out, recipe,
        tiles=tiles, guard=query.device.type == "cpu",
    ):  # fmt: skip
        call.run()
    return out.to(out_dtype)


def launch_fused(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    softmax_scale: float,
    recipe: Recipe,
    *,
    tiles: tuple[int, ...] | None = None,
) -> torch.Tensor:
    """Quantise float tensors and attend in one launch.

    Raises:
        ValueError: :func:`fusable` does not accept the recipe and shapes.
    """
    if not fusable(query, key, value, mask, is_causal, recipe):
        raise ValueError(
            f"one launch cannot quantise and attend here: {recipe}, {key.shape[2]} keys of {query.shape[3]} channels"
        )
    out = _new_output(query, value, query.dtype)
    if out.numel() == 0:
        return out.to(query.dtype)
    for call in fused_calls(
        query, key, value, mask, is_causal, softmax_scale, out, recipe, tiles=tiles, guard=query.device.type == "cpu"
    ):
        call.run()
    return out.to(query.dtype)


def launch_long(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    softmax_scale: float,
    recipe: Recipe,
) -> torch.Tensor:
    """Quantise float tensors in two launches and attend in a third, which may quantise query; the mask is bool or fixed point.

    For rows that :func:`fusable` does not take and recipes that :func:`.long_quantize.quantizes_long` does.
    """
    out = _new_output(query, value, query.dtype)
    if out.numel() == 0 or key.shape[2] == 0:
        return out.zero_().to(query.dtype)
    guard, masked = query.device.type == "cpu", is_causal or mask is not None
    tiles = _tiles_for(query, key, value, False, masked, recipe)
    dealt = not (masked or guard) and _side_by_side(out) and _meant_for_long_hopper(tiles, recipe, query, key, value)
    late = dealt and query.element_size() == 2 and _side_by_side(query)
    found = launch_quantize_long(None if late else query, key, value, recipe.smooth_key, dealt)
    for call in attention_calls(
        query if found.query is None else found.query, found.query_scale, found.key, found.key_scale, found.value,
        found.value_scale, mask, is_causal, softmax_scale, None, out, recipe, tiles=tiles, guard=guard,
        value_sums=found.value_sums, dealt=dealt,
    ):  # fmt: skip
        call.run()
    return out.to(query.dtype)
