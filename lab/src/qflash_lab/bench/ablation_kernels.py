"""Small kernels of ``qflash-lab ablate``: appendix A's steps between float and integer attention, and integer throughput.

They measure what a step is worth and serve nothing else: no mask, one scale a tensor, equal numbers of heads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from qflash.specification import fixed_point as fp
from qflash.specification.quantization import QuantizedTensor

LOWEST = tl.constexpr(-(1 << 23))
"""Below every score: ``|S| <= 2**14 * head_dim <= 2**22``."""


@triton.jit
def step_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, q_stride_z, q_stride_h, q_stride_n, k_stride_z, k_stride_h, k_stride_n,
    v_stride_z, v_stride_h, v_stride_n, v_stride_d, o_stride_z, o_stride_h, o_stride_n,
    queries, keys, factor, value_scale, multiplier,
    STEP: tl.constexpr, FRACTION_BITS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One block of queries, online over blocks of keys. ``factor`` brings scores to octaves; V0 to V3 is STEP 0 to 3."""
    z, h = tl.program_id(2).to(tl.int64), tl.program_id(1)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    q_at = q_ptr + z * q_stride_z + h * q_stride_h + rows[:, None] * q_stride_n + d[None, :]
    q = tl.load(q_at, mask=(rows[:, None] < queries) & (d[None, :] < HEAD_DIM), other=0)
    k_base = k_ptr + z * k_stride_z + h * k_stride_h
    v_base = v_ptr + z * v_stride_z + h * v_stride_h
    row_max = tl.full((BLOCK_M,), LOWEST if STEP == 3 else float("-inf"), tl.int32 if STEP == 3 else tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    accumulator = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in range(0, keys, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        valid = n[None, :] < keys
        k = tl.load(k_base + n[None, :] * k_stride_n + d[:, None], mask=valid & (d[:, None] < HEAD_DIM), other=0)
        v_at = v_base + n[:, None] * v_stride_n + d[None, :] * v_stride_d
        v = tl.load(v_at, mask=(n[:, None] < keys) & (d[None, :] < HEAD_DIM), other=0)
        if STEP == 0:
            octaves = tl.dot(q, k) * factor
        else:
            s = tl.dot(q, k, out_dtype=tl.int32)
            octaves = s.to(tl.float32) * factor
        if STEP == 3:
            s = tl.where(valid, s, LOWEST)
            new_max = tl.maximum(row_max, tl.max(s, 1))
            alpha = tl.exp2((row_max - new_max).to(tl.float32) * factor)
            # ShiftExp2 (Algorithm 2) and Requantization (Equation 10) to 7 bits, as recipe "paper" computes them
            t = tl.where(valid, new_max[:, None] - s, 0) * multiplier + (((1 << FRACTION_BITS) + 511) >> 9)
            shift = tl.minimum(t >> FRACTION_BITS, 31)
            if FRACTION_BITS >= 8:
                fraction = (t >> (FRACTION_BITS - 8)) & 255
            else:
                fraction = (t << (8 - FRACTION_BITS)) & 255
            weight = ((512 - fraction) * 127 * (tl.full((BLOCK_M, BLOCK_N), 1 << 14, tl.int32) >> shift)) >> 23
            weight = tl.where(valid, weight, 0)
            total = total * alpha + tl.sum(weight, 1).to(tl.float32)
        else:
            octaves = tl.where(valid, octaves, float("-inf"))
            new_max = tl.maximum(row_max, tl.max(octaves, 1))
            alpha = tl.exp2(row_max - new_max)
            weight = tl.exp2(octaves - new_max[:, None])
            if STEP == 2:
                weight = (weight * 127.0 + 0.5).to(tl.int32)
                total = total * alpha + tl.sum(weight, 1).to(tl.float32)
            else:
                total = total * alpha + tl.sum(weight, 1)
        row_max = new_max
        if STEP >= 2:
            product = tl.dot(weight.to(tl.int8), v, out_dtype=tl.int32).to(tl.float32)
        else:
            product = tl.dot(weight.to(v.dtype), v)
        accumulator = accumulator * alpha[:, None] + product
    out = accumulator / total[:, None] * value_scale
    o_at = o_ptr + z * o_stride_z + h * o_stride_h + rows[:, None] * o_stride_n + d[None, :]
    tl.store(o_at, out.to(o_ptr.dtype.element_ty), mask=(rows[:, None] < queries) & (d[None, :] < HEAD_DIM))


def _key_major(value: torch.Tensor) -> torch.Tensor:
    """Return int8 V with its keys side by side in memory, as the tensor core reads it; rows aligned to 16 bytes."""
    batch, heads, keys, channels = value.shape
    rows = value.new_zeros((batch, heads, channels, -(-keys // 16) * 16))
    rows[..., :keys] = value.mT
    return rows[..., :keys].mT


def prepare_step(
    step: int,
    query: torch.Tensor | QuantizedTensor,
    key: torch.Tensor | QuantizedTensor,
    value: torch.Tensor | QuantizedTensor,
    softmax_scale: float,
    *,
    block: int = 64,
    warps: int = 4,
) -> Callable[[], torch.Tensor]:
    """Return the call of step V0 to V3; scales, and V's order for int8, are prepared beforehand.

    Args:
        step: 0 float16 throughout; 1 int8 Q Kᵀ; 2 int8 P V as well; 3 the integer exponential as well.
        query, key: float16 for step 0, else int8 with one scale, ``(batch, heads, tokens, head_dim)``.
        value: float16 for steps 0 and 1, else int8 with one scale.
        softmax_scale: factor of the scores.
        block: queries and keys a tile.
        warps: warps a program.

    Returns:
        a function that launches the kernel and returns float16 ``(batch, heads, queries, head_dim)``.

    Raises:
        ValueError: an unknown step, or tensors of the wrong kind for it.
    """
    if step not in (0, 1, 2, 3):
        raise ValueError(f"step must be 0, 1, 2 or 3, got {step!r}")
    factor, value_scale, multiplier, bits = softmax_scale * 1.4426950408889634, 1.0, 0, 0
    for name, x, integer in (("query", query, step > 0), ("key", key, step > 0), ("value", value, step > 1)):
        if isinstance(x, QuantizedTensor) != integer or (isinstance(x, QuantizedTensor) and x.scale.numel() != 1):
            needed = "a QuantizedTensor with one scale" if integer else "a float tensor"
            raise ValueError(f"{name} must be {needed} for step {step}, got {type(x).__name__}")
    if isinstance(query, QuantizedTensor) and isinstance(key, QuantizedTensor):
        mantissa, exponent = fp.combine_scales(fp.split_scale(query.scale), fp.split_scale(key.scale), fp.split_float(factor))
        m, f = fp.narrow_multiplier(mantissa, exponent, query.values.shape[-1])
        multiplier, bits = int(m), int(f)
        factor *= float(query.scale) * float(key.scale)
    if isinstance(value, QuantizedTensor):
        value_scale = float(value.scale)
        value = _key_major(value.values)
    q, k = (x.values if isinstance(x, QuantizedTensor) else x for x in (query, key))
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    batch, heads, queries, head_dim = q.shape
    out = torch.empty((batch, heads, queries, head_dim), dtype=torch.float16, device=q.device)
    strides = (*q.stride()[:3], *k.stride()[:3], *value.stride(), *out.stride()[:3])
    constants: dict[str, Any] = {
        "STEP": step, "FRACTION_BITS": bits, "HEAD_DIM": head_dim, "BLOCK_M": block, "BLOCK_N": block,
        "BLOCK_D": max(32, triton.next_power_of_2(head_dim)), "num_warps": warps, "num_stages": 2,
    }  # fmt: skip
    grid = (triton.cdiv(queries, block), heads, batch)

    def call() -> torch.Tensor:
        step_kernel[grid](q, k, value, out, *strides, queries, k.shape[2], factor, value_scale, multiplier, **constants)
        return out

    return call


OPERATIONS = ("multiply", "multiply and shift", "divide")
UNROLL = 16
_BLOCK = 1024


@triton.jit
def throughput_kernel(
    x_ptr, out_ptr, number, shift, other, loops, OPERATION: tl.constexpr, UNROLL: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Apply one integer operation and an exclusive or ``loops * UNROLL`` times to every element."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)
    for _ in range(loops):
        for _ in tl.static_range(UNROLL):
            # the exclusive or keeps the compiler from folding two steps into one
            if OPERATION == 0:
                x = (x * number) ^ other
            elif OPERATION == 1:
                x = ((x * number) >> shift) ^ other
            else:
                x = (x // number) ^ other
    tl.store(out_ptr + at, x)


def prepare_throughput(operation: str, device: torch.device, *, programs: int, loops: int) -> Callable[[], torch.Tensor]:
    """Return the call that does ``programs * 1024 * loops * 16`` times one of :data:`OPERATIONS` (int32).

    Raises:
        ValueError: another operation.
    """
    if operation not in OPERATIONS:
        raise ValueError(f"operation must be one of {OPERATIONS}, got {operation!r}")
    x = torch.arange(1, programs * _BLOCK + 1, dtype=torch.int32, device=device)
    out = torch.empty_like(x)
    kind = OPERATIONS.index(operation)

    def call() -> torch.Tensor:
        throughput_kernel[(programs,)](
            x, out, 45007, 16, 1234567, loops, OPERATION=kind, UNROLL=UNROLL, BLOCK=_BLOCK, num_warps=4
        )
        return out

    return call


def operations(programs: int, loops: int) -> int:
    """Return how many operations a call of :func:`prepare_throughput` does."""
    return programs * _BLOCK * loops * UNROLL
