"""Layers of an integer network: linear with everything that is fused behind it, and layer normalisation (Triton).

The bits of :mod:`qflash.network.operators`, by the functions of :mod:`.common.network_ops`, on every GPU from sm_80 on.

* A linear layer: a program has BLOCK_M rows by BLOCK_N outputs. Its sums stay in registers, start from the bias, take BLOCK_K
  inputs at a time from the int8 tensor core, and go through the epilogue there: another unit, then residual or GELU, then
  saturation.
* Normalisation: a program has BLOCK_M whole rows, which it reads once.

The sizes of blocks are those that fill registers and shared memory; they were not tuned by measurement.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.fixed_point import multiply_high
from ..common.network_ops import gelu_int8, normalise, rescale, round_shift, row_statistics, saturate
from ..device import processors_of
from ..launch_recorder import KernelLaunch


@triton.jit(do_not_specialize=("left", "shift", "gelu_bits", "gelu_shift"))
def int8_linear_kernel(
    x_ptr, weight_ptr, bias_ptr, multiplier_ptr, residual_ptr, gelu_multiplier_ptr, gelu_offset_ptr, o_ptr,
    rows, inputs, outputs, left, shift, gelu_bits, gelu_shift,
    OUT_BITS: tl.constexpr, RESIDUAL: tl.constexpr, GELU: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GUARD: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows by BLOCK_N outputs of a linear layer.

    x is int8 (rows, inputs), the weights int8 (outputs, inputs), residual int16 and output (rows, outputs), all contiguous.
    WHOLE: the inputs are a multiple of BLOCK_K.
    """
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    here, inside = m < rows, n < outputs
    x_ptrs = x_ptr + m[:, None] * inputs + k[None, :]
    weight_ptrs = weight_ptr + n[None, :].to(tl.int64) * inputs + k[:, None]
    bias = tl.load(bias_ptr + n, mask=inside, other=0)
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.int32) + bias[None, :]
    for start in range(0, inputs, BLOCK_K):
        if WHOLE:
            x = tl.load(x_ptrs, mask=here[:, None], other=0)
            weight = tl.load(weight_ptrs, mask=inside[None, :], other=0)
        else:
            x = tl.load(x_ptrs, mask=here[:, None] & (k < inputs - start)[None, :], other=0)
            weight = tl.load(weight_ptrs, mask=inside[None, :] & (k < inputs - start)[:, None], other=0)
        sums = tl.dot(x, weight, sums, out_dtype=tl.int32)
        x_ptrs += BLOCK_K
        weight_ptrs += BLOCK_K
    multiplier = tl.load(multiplier_ptr + n, mask=inside, other=0)
    y = rescale(sums, multiplier[None, :], left, shift, GUARD)
    at = m[:, None] * outputs + n[None, :]
    there = here[:, None] & inside[None, :]
    if RESIDUAL:
        y += tl.load(residual_ptr + at, mask=there, other=0).to(tl.int32)
    if GELU:
        gelu_multiplier = tl.load(gelu_multiplier_ptr + n, mask=inside, other=0)
        gelu_offset = tl.load(gelu_offset_ptr + n, mask=inside, other=0)
        y = gelu_int8(y, gelu_bits, gelu_multiplier[None, :], gelu_offset[None, :], gelu_shift)
    else:
        y = saturate(y, OUT_BITS)
    tl.store(o_ptr + at, y.to(o_ptr.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=("epsilon_high", "epsilon_low", "shift"))
def integer_layer_norm_kernel(
    h_ptr, gain_ptr, offset_ptr, o_ptr, rows, epsilon_high, epsilon_low, shift,
    CHANNELS: tl.constexpr, OUT_BITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, GUARD: tl.constexpr,
):  # fmt: skip
    """Normalise BLOCK_M rows of int16 (rows, CHANNELS), contiguous; epsilon is ``epsilon_high * 2**30 + epsilon_low``."""
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.arange(0, BLOCK_C)
    inside = c < CHANNELS
    there = (m < rows)[:, None] & inside[None, :]
    at = m[:, None] * CHANNELS + c[None, :]
    h = tl.load(h_ptr + at, mask=there, other=0).to(tl.int32)
    total = tl.sum(h, 1)
    squares = tl.sum((h * h).to(tl.int64), 1)
    epsilon = (total * 0 + epsilon_high).to(tl.int64) * (1 << 30) + epsilon_low
    root, half = row_statistics(total, squares, CHANNELS, epsilon, GUARD)
    y = normalise(h * CHANNELS - total[:, None], root[:, None], half[:, None], GUARD)
    gain = tl.load(gain_ptr + c, mask=inside, other=0)
    offset = tl.load(offset_ptr + c, mask=inside, other=0)
    y = round_shift(multiply_high(y << 4, gain[None, :], GUARD) + offset[None, :], shift)
    tl.store(o_ptr + at, saturate(y, OUT_BITS).to(o_ptr.dtype.element_ty), mask=there)


def _blocks(rows: int, inputs: int, outputs: int, processors: int) -> tuple[int, int, int, int]:
    """Return rows, outputs and inputs of a program's block, and its warps: large ones where these are enough for the GPU."""
    depth = 64 if inputs > 32 else 32
    large = triton.cdiv(rows, 128) * triton.cdiv(outputs, 128) >= processors
    return (128, 128, depth, 8) if large else (64, 64, depth, 4)


def launch_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    multiplier: torch.Tensor,
    left: int,
    shift: int,
    residual: torch.Tensor | None,
    out_dtype: torch.dtype,
    gelu: tuple[int, torch.Tensor, torch.Tensor, int] | None = None,
) -> torch.Tensor:
    """Run a linear layer and what is fused with it.

    Arguments are those of :func:`qflash.network.execution.int8_linear`, which checks them.

    Args:
        gelu: fraction bits, M, B and shift of :func:`qflash.network.operators.gelu_int8`, for int8 outputs.
    """
    outputs, inputs = weight.shape
    out = torch.empty((*x.shape[:-1], outputs), dtype=out_dtype, device=x.device)
    if out.numel() == 0:
        return out
    rows = out.numel() // outputs
    bits, gelu_multiplier, gelu_offset, gelu_shift = (0, bias, bias, 0) if gelu is None else gelu
    block_m, block_n, block_k, warps = _blocks(rows, inputs, outputs, processors_of(x.device))
    arguments = {
        "x_ptr": x.contiguous(),
        "weight_ptr": weight.contiguous(),
        "bias_ptr": bias.contiguous(),
        "multiplier_ptr": multiplier.contiguous(),
        # a pointer that is not read; any tensor will do
        "residual_ptr": out if residual is None else residual.contiguous(),
        "gelu_multiplier_ptr": gelu_multiplier.contiguous(),
        "gelu_offset_ptr": gelu_offset.contiguous(),
        "o_ptr": out,
        "rows": rows,
        "inputs": inputs,
        "outputs": outputs,
        "left": left,
        "shift": shift,
        "gelu_bits": bits,
        "gelu_shift": gelu_shift,
        "OUT_BITS": 8 * out.element_size(),
        "RESIDUAL": residual is not None,
        "GELU": gelu is not None,
        "WHOLE": inputs % block_k == 0,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
        "GUARD": x.device.type == "cpu",
    }
    grid = (triton.cdiv(rows, block_m), triton.cdiv(outputs, block_n))
    KernelLaunch(int8_linear_kernel, grid, arguments, {"num_warps": warps, "num_stages": 3}).run()
    return out


def launch_layer_norm(
    h: torch.Tensor, epsilon: int, gain: torch.Tensor, offset: torch.Tensor, shift: int, out_dtype: torch.dtype
) -> torch.Tensor:
    """Normalise rows; arguments are those of :func:`qflash.network.execution.integer_layer_norm`, which checks them."""
    out = torch.empty(h.shape, dtype=out_dtype, device=h.device)
    if out.numel() == 0:
        return out
    channels = h.shape[-1]
    width = triton.next_power_of_2(channels)
    block = max(1, 1024 // width)
    arguments = {
        "h_ptr": h.contiguous(),
        "gain_ptr": gain.contiguous(),
        "offset_ptr": offset.contiguous(),
        "o_ptr": out,
        "rows": h.numel() // channels,
        # two numbers of 32 bits: kernels are compiled for the width of an argument
        "epsilon_high": epsilon >> 30,
        "epsilon_low": epsilon & ((1 << 30) - 1),
        "shift": shift,
        "CHANNELS": channels,
        "OUT_BITS": 8 * out.element_size(),
        "BLOCK_M": block,
        "BLOCK_C": width,
        "GUARD": h.device.type == "cpu",
    }
    grid = (triton.cdiv(arguments["rows"], block),)
    KernelLaunch(integer_layer_norm_kernel, grid, arguments, {"num_warps": 4, "num_stages": 1}).run()
    return out
