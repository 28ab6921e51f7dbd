"""From tensors to kernel launches: which kernel, with which tiles and arguments; and the launch itself."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import triton

from .. import fixed_point as fp
from ..memory_format import has_aligned_rows
from ..recipe import Recipe
from .device import processors_of
from .gluon.sm90.launch import held_by_hand, long_arguments, meant_for_long_hopper, rows_of_keys
from .gluon.windows.launch import share_windows
from .heuristics import choose_tiles, division, eviction_policy, split, worth_compiling
from .launch_arguments import MOST_BLOCKS, Scales, broadcast_strides, kernel_constants, launch_options, new_output, side_by_side
from .launch_recorder import Call
from .tiles import (
    GENERAL,
    HOPPER,
    LONG_HOPPER,
    SHORT_ROW,
    WINDOWS,
    Tiles,
    fits_hopper,
    fits_windows,
    is_held,
    is_short,
    most_queries,
)
from .triton.attention_resident import short_kernel
from .triton.attention_streaming import long_kernel
from .triton.launch import pack_value
from .triton.quantize_streaming import launch_quantize_long
from .tuning_table import tiles_for


@functools.cache
def _by_hand(kernel: int) -> Any:
    # only where they run: they need a part of Triton that the interpreter has not
    if kernel == LONG_HOPPER:
        from .gluon.sm90.attention_streaming import long_hopper_kernel as found
    elif kernel == HOPPER:
        from .gluon.sm90.attention_resident import hopper_kernel as found
    else:
        from .gluon.windows.attention import windows_kernel as found
    return found


def _calls(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scales: Scales | None,
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
    hopper = plain and not dealt and held_by_hand(tiles, recipe, query, key, value) and side_by_side(out, 8)
    most = most_queries(value_dim)
    if tiles.kernel == HOPPER and not hopper:
        # meant for tensors that lie otherwise; the kernel that has these takes fewer queries of wide heads
        tiles = tiles._replace(block_m=min(tiles.block_m, most))
    if tiles.block_m > most and not hopper:
        raise ValueError(f"BLOCK_M must be at most {most} here, got {tiles.block_m}")
    short = two_pass and (hopper or row_tiles <= 2) and max(block_d, block_dv) <= 128
    if scales is None and not short:
        raise ValueError(f"one launch cannot quantise and attend to {keys} keys with {tiles}")
    key_rows = None if short else rows_of_keys(key)
    if two_pass and not short and sums is None:
        dealt = (
            plain
            and meant_for_long_hopper(tiles, recipe, query, key, value)
            and key_rows is not None
            and all(map(side_by_side, (query, key, out)))
        )
        value, sums, calls = pack_value(value, dealt)
    if dealt:
        # three programs a processor, or with wider heads two
        tiles = tiles._replace(block_m=64, warps=4, registers=168 if head_dim <= 64 else 0)
    kind = "none" if mask is None else "bool" if mask.dtype == torch.bool else "bias"
    windows = (
        tiles.kernel == WINDOWS
        and fits_windows(recipe, head_dim, value_dim, queries, keys)
        and kind != "bool"
        and not (guard or is_causal or key_token)
        and all(map(side_by_side, (query, key, value, out)))
    )
    mask_view = query if mask is None else mask.view(torch.uint8) if mask.dtype == torch.bool else mask
    constant = fp.split_float(softmax_scale * math.log2(math.e))
    # a mask of one image's windows repeats over the batch; one that is given per batch element is sliced with it
    period = 0 if mask is None or mask.shape[0] in (1, batch) else mask.shape[0]
    step = MOST_BLOCKS // max(period, 1) * max(period, 1)
    if short:
        tiles = split(
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
            aligned = mask is not None and has_aligned_rows(broadcast_strides(mask, (0, 1, 2, 3)), 4)
            # measured: of int8, with a processor to itself a program has its values sooner if every warp loads them
            divided = tiles.warps == 4 and (scales is None or batch * heads > processors_of(query.device))
            fixed |= {"QUERIES": queries, "ONE_SCALE": one_scale, "ALIGNED": aligned, "DIVIDED": divided}
            fixed["POLICY"] = eviction_policy(query, key, value, out)
        if hopper:
            fixed |= division(tiles, queries, keys, head_dim, heads, batch, scales is None, processors_of(query.device))
            # measured: of rows held whole 1 % faster at most, or slower; of int8 not yet
            walked = scales is None and fixed["TURN"]
            fixed["POLICY"] = eviction_policy(query, key, value, out) if walked else ""
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
            strides = (0, 0, 0) if x is query else broadcast_strides(x, tuple(dim for dim, _ in axes))
            arguments.update({f"{name}_stride_{axis}": stride for (_, axis), stride in zip(axes, strides, strict=True)})
        arguments["mask_ptr"] = mask_view if period else part(mask_view)
        if not short:
            arguments["sums_ptr"], arguments["parts"] = (query, 0) if sums is None else (part(sums), sums.shape[2])
        strides = (0, 0, 0, 0) if mask is None else broadcast_strides(mask_view, (0, 1, 2, 3))
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
            arguments |= long_arguments(part(key)[:part_batch], part(value)[:part_batch], key_rows)
            arguments["QUANTIZE"] = query.dtype != torch.int8
        if windows:
            periods = 1 if mask is None or mask.shape[0] == 1 else period or part_batch
            grid, shared, tiles = share_windows(tiles, part_batch, heads, queries, periods, mask, query.device)
            arguments |= shared
        if named:
            arguments = {name: arguments[name] for name in kernel.arg_names}
        calls.append(Call(kernel, grid, arguments, launch_options(tiles)))
    return calls


def _tiles_for(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, fused: bool, masked: bool, recipe: Recipe) -> Tiles:
    batch, heads, queries, head_dim = query.shape
    keys = key.shape[2]
    sizes = recipe, head_dim, value.shape[3], queries, keys, batch * heads, fused, query.device
    tiles = tiles_for(*sizes, masked=masked)
    if query.is_cuda and tiles.kernel == HOPPER and not is_held(keys) and not worth_compiling(keys):
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
            as :func:`.triton.quantize_streaming.launch_quantize_long` leaves them; for rows that do not fit two tiles.
        dealt: they lie in the order of :mod:`.sm90.attention_streaming`, which is then the kernel. Then query may be float16 or
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
    scales = Scales(query_scale, key_scale, value_scale, output_scale)
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
    return held_by_hand(_tiles_for(query, key, value, True, False, recipe), recipe, query, key, value)


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
    out = new_output(query if like is None else like, value, out_dtype)
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
    out = new_output(query, value, query.dtype)
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

    For rows that :func:`fusable` does not take and recipes that :func:`.triton.quantize_streaming.quantizes_long` does.
    """
    out = new_output(query, value, query.dtype)
    if out.numel() == 0 or key.shape[2] == 0:
        return out.zero_().to(query.dtype)
    guard, masked = query.device.type == "cpu", is_causal or mask is not None
    tiles = _tiles_for(query, key, value, False, masked, recipe)
    dealt = not (masked or guard) and side_by_side(out) and meant_for_long_hopper(tiles, recipe, query, key, value)
    late = dealt and query.element_size() == 2 and side_by_side(query)
    found = launch_quantize_long(None if late else query, key, value, recipe.smooth_key, dealt)
    for call in attention_calls(
        query if found.query is None else found.query, found.query_scale, found.key, found.key_scale, found.value,
        found.value_scale, mask, is_causal, softmax_scale, None, out, recipe, tiles=tiles, guard=guard,
        value_sums=found.value_sums, dealt=dealt,
    ):  # fmt: skip
        call.run()
    return out.to(query.dtype)
