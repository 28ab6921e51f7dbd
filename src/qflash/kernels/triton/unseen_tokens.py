"""Where tokens that no query sees get copies from, found and copied on the GPU (Triton): :mod:`qflash.unseen_tokens`.

1. :func:`seen_kernel`: which tokens a query sees, a block of keys a program. It reads rows of the mask from the last on until
   every key of the block is seen, so that a mask that hides nothing is read in small part.
2. :func:`place_kernel`: for each token its own place, or that of a seen one; a head a program. Where one block has all keys of
   a head the first kernel does it.
3. :func:`take_kernel`: rows of a tensor from these places, for what does not take them from there itself.

Nothing looks at the mask on the host: the launches are the same whether a token is hidden or not.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl

from ...specification import fixed_point as fp
from ...specification.attention_call import AttentionCall
from ..common.quantize_ops import bias_base, bias_to_fixed, highest
from ..launch_arguments import MOST_BLOCKS, broadcast_strides, needs_wide_offsets
from ..launch_recorder import launch_kernel
from ..tiles import SHORT_ROW

LOWEST_BIAS = tl.constexpr(-fp.BIAS_LIMIT)
_KEYS = 128
"""Keys of a block where rows are long."""
_FLOAT_KEYS = 512
"""The same of a float mask, of which programs read whole rows."""
HIDDEN_NATS = tl.constexpr(2840.0)
"""A key that lies so far below a row's largest, or below 0, is hidden: 2**28 fixed-point units are 2839.2 nats."""


@triton.jit
def _write_places(seen_ptr, order_ptr, place_ptr, keys, BLOCK_N: tl.constexpr):
    """Write where each token of a head is taken from, from what is seen; ``order_ptr`` has room for a number a key."""
    count = 0
    for start in range(0, keys, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        seen = tl.load(seen_ptr + n, mask=n < keys, other=0)
        tl.store(order_ptr + count + tl.cumsum(seen, 0) - seen, n, mask=seen > 0)
        count += tl.sum(seen, 0)
    # other threads of the program wrote them
    tl.debug_barrier()
    for start in range(0, keys, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        stays = (tl.load(seen_ptr + n, mask=n < keys, other=1) > 0) | (count == 0)
        other = tl.load(order_ptr + n % tl.maximum(count, 1), mask=stays == 0, other=0)
        tl.store(place_ptr + n, tl.where(stays, n, other), mask=n < keys)


@triton.jit
def _largest(row_ptrs, stride_n, keys, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The largest of whole rows of a float mask, float32 (rows, 1); a NaN counts as infinity."""
    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    for start in range(0, keys, BLOCK_N):
        n = tl.minimum(start + tl.arange(0, BLOCK_N), keys - 1)[None, :]
        x = tl.load(row_ptrs + n * stride_n).to(tl.float32)
        row_max = tl.maximum(row_max, tl.max(tl.where(x == x, x, float("inf")), 1))
    return row_max[:, None]


@triton.jit
def _surely_hidden(x, row_ptrs, stride_n, keys):
    """Where a float mask hides keys, whatever else is in the rows: far below others, of this block and of either end."""
    n = tl.arange(0, 64)[None, :]
    bound = tl.max(tl.where(x == x, x, float("-inf")), 1)
    for end in tl.static_range(2):
        at = tl.minimum(n, keys - 1) if end == 0 else tl.maximum(keys - 1 - n, 0)
        some = tl.load(row_ptrs + at * stride_n).to(tl.float32)
        bound = tl.maximum(bound, tl.max(tl.where(some == some, some, float("-inf")), 1))
    return (x == float("-inf")) | (x < tl.minimum(bound, 0.0)[:, None] - HIDDEN_NATS)


@triton.jit
def _visible(x, row_max, MASK: tl.constexpr, GUARD: tl.constexpr):
    """Which keys a mask shows, 1 or 0, as :func:`qflash.unseen_tokens.seen_tokens` says.

    ``row_max`` is the largest of each row of a float mask.
    """
    if MASK == "bool":
        visible = x != 0
    elif MASK == "fixed":
        visible = x > LOWEST_BIAS
    else:
        base, even = bias_base(row_max)
        visible = tl.where(even, x == base, bias_to_fixed(x - base, GUARD) > LOWEST_BIAS) | (x != x)
    return visible.to(tl.int32)


@triton.jit
def seen_kernel(
    mask_ptr, seen_ptr, order_ptr, place_ptr, mask_stride_z, mask_stride_h, mask_stride_m, mask_stride_n, rows, keys,
    MASK: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WHOLE: tl.constexpr,
    WIDE_OFFSETS: tl.constexpr, GUARD: tl.constexpr,
):  # fmt: skip
    """Write which tokens of a block of keys a query sees, of program (block, head of key, element of the mask's batch).

    GROUP heads of the mask belong to a head of key. With WHOLE the block has all keys, and their places are written, too.
    """
    z, h = tl.program_id(2).to(tl.int64), tl.program_id(1)
    if WIDE_OFFSETS:
        h = tl.cast(h, tl.int64)
        mask_stride_m, mask_stride_n = tl.cast(mask_stride_m, tl.int64), tl.cast(mask_stride_n, tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.minimum(n, keys - 1)[None, :] * mask_stride_n
    blocks = tl.cdiv(rows, BLOCK_M)
    seen = tl.zeros((BLOCK_N,), tl.int32)
    missing, left = 1, blocks * GROUP
    while (left > 0) & (missing > 0):
        left -= 1
        # where the last row sees most, as in a causal mask, it is read first
        row = tl.minimum(left % blocks * BLOCK_M + tl.arange(0, BLOCK_M), rows - 1)[:, None] * mask_stride_m
        head = h * GROUP + left // blocks
        row_ptrs = mask_ptr + z * mask_stride_z + head * mask_stride_h + row
        x = tl.load(row_ptrs + columns)
        row_max = tl.zeros((BLOCK_M, 1), tl.float32)
        if MASK == "float":
            x = x.to(tl.float32)
            if WHOLE:
                row_max = highest(x, 1, GUARD)[:, None]
            else:
                # whole rows are read only where a key that is missing could be seen
                unsure = (seen == 0)[None, :] & (_surely_hidden(x, row_ptrs, mask_stride_n, keys) == 0)
                if tl.max(tl.max(unsure.to(tl.int32), 1), 0) > 0:
                    row_max = _largest(row_ptrs, mask_stride_n, keys, BLOCK_M, BLOCK_N)
        seen = tl.maximum(seen, tl.max(_visible(x, row_max, MASK, GUARD), 0))
        missing = 1 - tl.min(seen, 0)
    at = (z * tl.num_programs(1) + h) * keys
    tl.store(seen_ptr + at + n, seen, mask=n < keys)
    if WHOLE:
        tl.debug_barrier()
        _write_places(seen_ptr + at, order_ptr + at, place_ptr + at, keys, BLOCK_N)


@triton.jit
def place_kernel(seen_ptr, order_ptr, place_ptr, keys, BLOCK_N: tl.constexpr):
    """Write the places of the tokens of head x, of a mask's element and a head of key."""
    at = tl.program_id(0).to(tl.int64) * keys
    _write_places(seen_ptr + at, order_ptr + at, place_ptr + at, keys, BLOCK_N)


@triton.jit
def take_kernel(
    x_ptr, place_ptr, out_ptr, x_stride_z, x_stride_h, x_stride_n, x_stride_d, place_stride_z, place_stride_h, first, period,
    tokens, channels, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, WIDE_OFFSETS: tl.constexpr,
):  # fmt: skip
    """Copy tokens (batch, heads, tokens, channels) from their places, a block of a head a program; the copy is contiguous."""
    z, h = tl.program_id(2).to(tl.int64), tl.program_id(1)
    n, d = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    if WIDE_OFFSETS:
        h, x_stride_n = tl.cast(h, tl.int64), tl.cast(x_stride_n, tl.int64)
    # the launch has the batch from element ``first`` on
    place = tl.load(place_ptr + (first + z) % period * place_stride_z + h * place_stride_h + n, mask=n < tokens, other=0)
    inside = (n[:, None] < tokens) & (d[None, :] < channels)
    x = tl.load(x_ptr + z * x_stride_z + h * x_stride_h + place[:, None] * x_stride_n + d[None, :] * x_stride_d, mask=inside)
    out = out_ptr + ((z * tl.num_programs(1) + h) * tokens + n[:, None]) * channels + d[None, :]
    tl.store(out, x, mask=inside)


def launch_places(call: AttentionCall) -> torch.Tensor:
    """Return for each token the one to take, (period, heads of key | 1, keys), int32, on the device of the mask.

    Args:
        call: one that :func:`qflash.unseen_tokens.searches`.
    """
    mask, key_heads = call.mask, call.key.shape[1]
    assert mask is not None
    period, heads, rows, keys = mask.shape
    kind = "bool" if mask.dtype == torch.bool else "fixed" if mask.dtype == torch.int32 else "float"
    shared = 1 if heads == 1 else key_heads
    whole = keys <= SHORT_ROW
    block = triton.next_power_of_2(keys) if whole else _KEYS if kind != "float" else _FLOAT_KEYS
    block_m = max(1, min(triton.next_power_of_2(rows), (2048 if whole or kind != "float" else 8192) // block))
    seen, order, place = (torch.empty((period, shared, keys), dtype=torch.int32, device=mask.device) for _ in range(3))
    if kind == "bool":
        mask = mask.view(torch.uint8)
    strides = broadcast_strides(mask, (0, 1, 2, 3))
    for start in range(0, period, MOST_BLOCKS):
        some = slice(start, start + MOST_BLOCKS)
        grid = (triton.cdiv(keys, block), shared, min(MOST_BLOCKS, period - start))
        launch_kernel(
            seen_kernel, grid, mask[some], seen[some], order[some], place[some], *strides, rows, keys, MASK=kind,
            GROUP=heads // shared, BLOCK_M=block_m, BLOCK_N=block, WHOLE=whole,
            WIDE_OFFSETS=needs_wide_offsets(mask), GUARD=mask.device.type == "cpu", num_warps=4,
        )  # fmt: skip
    if not whole:
        launch_kernel(place_kernel, (period * shared,), seen, order, place, keys, BLOCK_N=1024, num_warps=4)
    return place


def _take(x: torch.Tensor, place: torch.Tensor, heads: int) -> torch.Tensor:
    """Return tokens from their places, (batch, heads, tokens, channels)."""
    batch, have, tokens, channels = x.shape
    if have != heads:
        x = x.expand(batch, heads, tokens, channels)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block_d = triton.next_power_of_2(channels)
    block_n = max(1, min(triton.next_power_of_2(tokens), 4096 // block_d))
    period = place.shape[0]
    strides = broadcast_strides(place, (0, 1))
    for start in range(0, batch, MOST_BLOCKS):
        grid = (triton.cdiv(tokens, block_n), heads, min(MOST_BLOCKS, batch - start))
        launch_kernel(
            take_kernel, grid, x[start:], place, out[start:], *x.stride(), *strides, start, period, tokens, channels,
            BLOCK_N=block_n, BLOCK_D=block_d, WIDE_OFFSETS=needs_wide_offsets(x), num_warps=4,
        )  # fmt: skip
    return out


def take(call: AttentionCall, place: torch.Tensor) -> AttentionCall:
    """Return the call with tokens of key and value, and scales of tokens, copied from their places (:func:`launch_places`)."""
    heads, scales = call.key.shape[1], call.scales
    if call.has_token_keys:
        assert scales is not None
        each = scales.key.expand(call.batch, heads, call.keys, 1)
        scales = scales._replace(key=_take(each, place, heads))
    return dataclasses.replace(call, key=_take(call.key, place, heads), value=_take(call.value, place, heads), scales=scales)
