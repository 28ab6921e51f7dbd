"""The bias of windows, looked up in a table and added to a mask in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...memory_format import padded_row
from ..launch_recorder import KernelLaunch

_BLOCK = 512


@triton.jit
def window_bias_kernel(
    table_ptr, index_ptr, mask_ptr, o_ptr, distances, table_stride_d, table_stride_h, index_stride_m, index_stride_n,
    mask_stride_w, mask_stride_m, mask_stride_n,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, ROW: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A part of one window and head of the bias, rows of ROW elements; see :func:`.swin_bias.window_bias`."""
    h, window = tl.program_id(1), tl.program_id(2).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m, n = at // ROW, at % ROW
    inside = (m < QUERIES) & (n < KEYS)
    distance = tl.load(index_ptr + m * index_stride_m + n * index_stride_n, mask=inside, other=0).to(tl.int64)
    # a number that the table has not is no reason to read what lies elsewhere
    there = (distance >= 0) & (distance < distances)
    bias = tl.load(table_ptr + distance * table_stride_d + h * table_stride_h, mask=inside & there, other=0.0).to(tl.float32)
    bias = tl.where(there, bias, float("nan"))
    if MASKED:
        mask = tl.load(mask_ptr + window * mask_stride_w + m * mask_stride_m + n * mask_stride_n, mask=inside, other=0.0)
        bias += mask.to(tl.float32)
    base = o_ptr + (window * tl.num_programs(1) + h) * (QUERIES * ROW)
    # behind a row as well, zeros
    tl.store(base + at, bias.to(o_ptr.dtype.element_ty), mask=at < QUERIES * ROW)


def launch_window_bias(table: torch.Tensor, index: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Run :func:`qflash.integrations.swin_bias.window_bias` on the GPU; its result, with whole rows.

    That is (windows, heads, tokens, tokens up to a multiple of eight).
    """
    distances, heads = table.shape
    queries, keys = index.shape
    row, windows = padded_row(keys), 1 if mask is None else len(mask)
    dtype = table.dtype if mask is None else torch.promote_types(table.dtype, mask.dtype)
    out = table.new_empty((windows, heads, queries, row), dtype=dtype)
    arguments = {
        "table_ptr": table,
        "index_ptr": index,
        # any tensor fills the place
        "mask_ptr": table if mask is None else mask,
        "o_ptr": out,
        "distances": distances,
        "table_stride_d": table.stride(0),
        "table_stride_h": table.stride(1),
        "index_stride_m": index.stride(0),
        "index_stride_n": index.stride(1),
        **{f"mask_stride_{axis}": 0 if mask is None else mask.stride(dim) for dim, axis in enumerate("wmn")},
        "QUERIES": queries,
        "KEYS": keys,
        "ROW": row,
        "MASKED": mask is not None,
        "BLOCK": _BLOCK,
    }
    grid = (triton.cdiv(queries * row, _BLOCK), heads, windows)
    KernelLaunch(window_bias_kernel, grid, arguments, {"num_warps": 4, "num_stages": 1}).run()
    return out
