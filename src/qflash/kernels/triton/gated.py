"""Gated products of an integer network (Triton): the bits of :mod:`qflash.specification.gated`, from sm_80 on.

A program has BLOCK_M rows by BLOCK_N channels; it reads gate and value of each once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.dependent_launch import wait_for_kernels
from ..common.fixed_point import multiply_round
from ..common.network_ops import activate, saturate
from ..heuristics import dependent_launch
from ..launch_recorder import KernelLaunch


@triton.jit(do_not_specialize=("gate_multiplier",))
def gated_kernel(
    x_ptr, multiplier_ptr, offset_ptr, o_ptr, rows, channels, gate_multiplier,
    ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DEPENDENT: tl.constexpr, GUARD: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows by BLOCK_N channels: x int16 (rows, gates and as many values), output (rows, channels); contiguous."""
    wait_for_kernels(DEPENDENT)
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < channels
    there = (m < rows)[:, None] & inside[None, :]
    at = m[:, None] * channels + n[None, :]
    gates = x_ptr + m[:, None] * (2 * channels) + n[None, :]
    gate = tl.load(gates, mask=there, other=0).to(tl.int32)
    value = tl.load(gates + channels, mask=there, other=0).to(tl.int32)
    multiplier = tl.load(multiplier_ptr + n, mask=inside, other=0)
    offset = tl.load(offset_ptr + n, mask=inside, other=0)
    # products that lose 28 and 2 bits, as ones that lose 32
    made = activate(multiply_round(gate << 4, gate_multiplier, GUARD), ACTIVATION)
    product = multiply_round(made << 14, value << 16, GUARD)
    y = multiply_round(product + offset[None, :], multiplier[None, :], GUARD)
    tl.store(o_ptr + at, saturate(y, o_ptr.dtype.element_ty, GUARD), mask=there)


_ROWS, _CHANNELS, _WARPS = 8, 256, 4
"""Of a program: 2048 products, 16 for each of 128 threads."""


def gated_launch(
    x: torch.Tensor, gate_multiplier: int, multiplier: torch.Tensor, offset: torch.Tensor, activation: str, out: torch.Tensor
) -> KernelLaunch:
    """Spell out the launch that makes ``out`` (rows, channels) of ``x``, int16 (rows, 2 * channels); all contiguous."""
    rows, channels = out.shape
    dependent = dependent_launch(x.device, x.numel())
    arguments = {
        "x_ptr": x,
        "multiplier_ptr": multiplier,
        "offset_ptr": offset,
        "o_ptr": out,
        "rows": rows,
        "channels": channels,
        "gate_multiplier": gate_multiplier,
        "ACTIVATION": activation,
        "BLOCK_M": _ROWS,
        "BLOCK_N": _CHANNELS,
        "DEPENDENT": dependent,
        "GUARD": x.device.type == "cpu",
    }
    options = {"num_warps": _WARPS, "launch_pdl": dependent != ""}
    return KernelLaunch(gated_kernel, (triton.cdiv(rows, _ROWS), triton.cdiv(channels, _CHANNELS)), arguments, options)
