"""Layers of an integer network: linear with everything that is fused behind it, and layer normalisation (Triton).

The bits of :mod:`qflash.network.operators`, by the functions of :mod:`.common.network_ops`, on every GPU from sm_80 on.

* A linear layer: a program has BLOCK_M rows by BLOCK_N outputs. Its sums stay in registers, take BLOCK_K
  inputs at a time from the int8 tensor core, and go through the epilogue there: another unit, then residual or GELU, then
  saturation. Hopper has a kernel of its own for most of these (:mod:`.gluon.sm90.linear`).
* Normalisation: a program has BLOCK_M whole rows, which it reads once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.fixed_point import multiply_high
from ..common.network_ops import gelu_int8, normalise, round_shift, row_statistics, saturate
from ..device import processors_of
from ..launch_arguments import LinearCall
from ..launch_recorder import KernelLaunch


@triton.jit(do_not_specialize=("left", "gelu_shift"))
def int8_linear_kernel(
    x_ptr, weight_ptr, bias_ptr, multiplier_ptr, residual_ptr, gelu_multiplier_ptr, gelu_offset_ptr, o_ptr,
    rows, inputs, outputs, left, gelu_shift,
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
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
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
    bias = tl.load(bias_ptr + n, mask=inside, other=0)
    multiplier = tl.load(multiplier_ptr + n, mask=inside, other=0)
    y = multiply_high((sums << left) + bias[None, :], multiplier[None, :], GUARD)
    at = m[:, None] * outputs + n[None, :]
    there = here[:, None] & inside[None, :]
    if RESIDUAL:
        y += tl.load(residual_ptr + at, mask=there, other=0).to(tl.int32)
    if GELU:
        gelu_multiplier = tl.load(gelu_multiplier_ptr + n, mask=inside, other=0)
        gelu_offset = tl.load(gelu_offset_ptr + n, mask=inside, other=0)
        y = gelu_int8(y, gelu_multiplier[None, :], gelu_offset[None, :], gelu_shift)
    else:
        y = saturate(y, OUT_BITS)
    tl.store(o_ptr + at, y.to(o_ptr.dtype.element_ty), mask=there)


MAX_PARTS = 8
"""Parts of a row of channels that a program of :func:`integer_layer_norm_kernel` keeps in registers, at most."""


@triton.jit(do_not_specialize=("epsilon_high", "epsilon_low", "shift"))
def integer_layer_norm_kernel(
    h_ptr, gain_ptr, offset_ptr, o_ptr, rows, epsilon_high, epsilon_low, shift,
    CHANNELS: tl.constexpr, OUT_BITS: tl.constexpr, BLOCK_M: tl.constexpr, PART: tl.constexpr, GUARD: tl.constexpr,
):  # fmt: skip
    """Normalise BLOCK_M rows of int16 (rows, CHANNELS), contiguous, in parts of PART channels.

    Epsilon is ``epsilon_high * 2**30 + epsilon_low``.
    """
    PARTS: tl.constexpr = (CHANNELS + PART - 1) // PART
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.arange(0, PART)
    # all of them, unless the one part is wider than the row
    inside = c < (PART if CHANNELS % PART == 0 else CHANNELS)
    there = (m < rows)[:, None] & inside[None, :]
    total = tl.zeros((BLOCK_M,), tl.int32)
    squares = tl.zeros((BLOCK_M,), tl.int64)
    parts = ()
    for i in tl.static_range(PARTS):
        h = tl.load(h_ptr + m[:, None] * CHANNELS + (i * PART + c)[None, :], mask=there, other=0).to(tl.int32)
        total += tl.sum(h, 1)
        wide = h.to(tl.int64)
        squares += tl.sum(wide * wide, 1)
        parts = parts + (h,)  # type: ignore[assignment]
    epsilon = (total * 0 + epsilon_high).to(tl.int64) * (1 << 30) + epsilon_low
    root, half = row_statistics(total, squares, CHANNELS, epsilon, GUARD)
    for i in tl.static_range(PARTS):
        y = normalise(parts[i] * CHANNELS - total[:, None], root[:, None], half[:, None], GUARD)
        gain = tl.load(gain_ptr + i * PART + c, mask=inside, other=0)
        offset = tl.load(offset_ptr + i * PART + c, mask=inside, other=0)
        y = round_shift(multiply_high(y << 4, gain[None, :], GUARD) + offset[None, :], shift)
        at = m[:, None] * CHANNELS + (i * PART + c)[None, :]
        tl.store(o_ptr + at, saturate(y, OUT_BITS).to(o_ptr.dtype.element_ty), mask=there)


def _blocks(rows: int, inputs: int, outputs: int, processors: int) -> tuple[int, int, int, int]:
    """Return rows, outputs and inputs of a program's block, and its warps: large ones where these are enough for the GPU."""
    depth = 64 if inputs > 32 else 32
    large = triton.cdiv(rows, 128) * triton.cdiv(outputs, 128) >= processors
    return (128, 128, depth, 8) if large else (64, 64, depth, 4)


def linear_launch(call: LinearCall) -> KernelLaunch:
    """Spell out the launch of a linear layer and what is fused with it."""
    (rows, inputs), outputs = call.x.shape, call.weight.shape[0]
    block_m, block_n, block_k, warps = _blocks(rows, inputs, outputs, processors_of(call.x.device))
    arguments = call.epilogue() | {
        "x_ptr": call.x,
        "weight_ptr": call.weight,
        "inputs": inputs,
        "OUT_BITS": 8 * call.out.element_size(),
        "WHOLE": inputs % block_k == 0,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
        "GUARD": call.x.device.type == "cpu",
    }
    arguments = {name: arguments[name] for name in int8_linear_kernel.arg_names}
    grid = (triton.cdiv(rows, block_m), triton.cdiv(outputs, block_n))
    return KernelLaunch(int8_linear_kernel, grid, arguments, {"num_warps": warps, "num_stages": 3})


# rows that a program of two warps normalises; measured on one H100 (benchmarks/results/trials/linear_h100.json)
_MANY_ROWS = 8
_FEW_ROWS = 2


def layer_norm_launch(
    h: torch.Tensor, epsilon: int, gain: torch.Tensor, offset: torch.Tensor, shift: int, out: torch.Tensor
) -> KernelLaunch:
    """Spell out the launch that normalises ``h``, int16 (rows, channels), into ``out``; all contiguous."""
    rows, channels = h.shape
    # whole parts of a row where its channels have a large power of two among their factors, one padded part otherwise
    part = channels & -channels
    if part * MAX_PARTS < channels:
        part = triton.next_power_of_2(channels)
    block = _MANY_ROWS if rows >= 4 * _MANY_ROWS * processors_of(h.device) else _FEW_ROWS
    arguments = {
        "h_ptr": h,
        "gain_ptr": gain,
        "offset_ptr": offset,
        "o_ptr": out,
        "rows": rows,
        # two numbers of 32 bits: kernels are compiled for the width of an argument
        "epsilon_high": epsilon >> 30,
        "epsilon_low": epsilon & ((1 << 30) - 1),
        "shift": shift,
        "CHANNELS": channels,
        "OUT_BITS": 8 * out.element_size(),
        "BLOCK_M": block,
        "PART": part,
        "GUARD": h.device.type == "cpu",
    }
    return KernelLaunch(integer_layer_norm_kernel, (triton.cdiv(rows, block),), arguments, {"num_warps": 2, "num_stages": 1})
