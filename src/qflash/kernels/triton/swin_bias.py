"""Swin's additive bias: relative positions looked up in a table, plus the mask of shifted windows, in one launch (Triton).

Computes :func:`qflash.integrations.swin_bias.window_bias`. A program writes _BLOCK neighbouring elements of one window
and head, elementwise in registers (grid: parts of a matrix, heads, windows). One launch replaces PyTorch's look-up and
addition, and rows are padded to a multiple of eight elements, which attention reads with wider loads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...specification.memory_format import padded_row
from ..launch_recorder import KernelLaunch

_BLOCK = 512


@triton.jit
def window_bias_kernel(
    table_ptr, index_ptr, mask_ptr, o_ptr, distances, table_stride_d, table_stride_h, index_stride_m, index_stride_n,
    mask_stride_w, mask_stride_m, mask_stride_n,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, ROW: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write BLOCK elements of the (QUERIES, ROW) bias of one window and head, in nats; columns from KEYS on are 0.

    An index outside the table gives NaN.
    """
    h, window = tl.program_id(1), tl.program_id(2).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m, n = at // ROW, at % ROW
    inside = (m < QUERIES) & (n < KEYS)
    distance = tl.load(index_ptr + m * index_stride_m + n * index_stride_n, mask=inside, other=0).to(tl.int64)
    # an index outside the table must not read other memory
    there = (distance >= 0) & (distance < distances)
    bias = tl.load(table_ptr + distance * table_stride_d + h * table_stride_h, mask=inside & there, other=0.0).to(tl.float32)
    bias = tl.where(there, bias, float("nan"))
    if MASKED:
        mask = tl.load(mask_ptr + window * mask_stride_w + m * mask_stride_m + n * mask_stride_n, mask=inside, other=0.0)
        bias += mask.to(tl.float32)
    base = o_ptr + (window * tl.num_programs(1) + h) * (QUERIES * ROW)
    # columns past KEYS are stored too, as zeros
    tl.store(base + at, bias.to(o_ptr.dtype.element_ty), mask=at < QUERIES * ROW)


def launch_window_bias(table: torch.Tensor, index: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Run :func:`qflash.integrations.swin_bias.window_bias` on the GPU; return its result with padded rows.

    The shape is (windows, heads, tokens, tokens rounded up to a multiple of eight).
    """
    distances, heads = table.shape
    queries, keys = index.shape
    row, windows = padded_row(keys), 1 if mask is None else len(mask)
    dtype = table.dtype if mask is None else torch.promote_types(table.dtype, mask.dtype)
    out = table.new_empty((windows, heads, queries, row), dtype=dtype)
    arguments = {
        "table_ptr": table,
        "index_ptr": index,
        # without a mask the pointer is not read; any tensor will do
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
