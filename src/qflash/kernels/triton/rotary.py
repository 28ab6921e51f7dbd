"""Rotary positions of an integer network (Triton): the bits of :mod:`qflash.specification.rotary`, from sm_80 on.

A program has BLOCK_T tokens of an image by BLOCK pairs of channels. It reads both channels of a pair and the word with their
cosine and sine once, and writes both.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.dependent_launch import wait_for_kernels
from ..common.fixed_point import multiply_round
from ..common.network_ops import saturate
from ..heuristics import dependent_launch
from ..launch_arguments import image_divisor
from ..launch_recorder import KernelLaunch


@triton.jit
def _finish(sums, channel, offset_ptr, multiplier_ptr, o_ptr, at, inside, there, PLAIN: tl.constexpr, GUARD: tl.constexpr):
    offset = tl.load(offset_ptr + channel, mask=inside, other=0)
    multiplier = tl.load(multiplier_ptr + channel, mask=inside, other=0)
    y = multiply_round(sums + offset[None, :], multiplier[None, :], GUARD)
    tl.store(o_ptr + at, saturate(y, o_ptr.dtype.element_ty, PLAIN), mask=there)


@triton.jit(do_not_specialize=("tokens", "blocks", "image_inverse", "image_bits"))
def rotary_kernel(
    x_ptr, turns_ptr, offset_ptr, multiplier_ptr, o_ptr, tokens, blocks, image_inverse, image_bits,
    CHANNELS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK: tl.constexpr,
    WARPS: tl.constexpr, DEPENDENT: tl.constexpr, GUARD: tl.constexpr,
):  # fmt: skip
    """Rotate BLOCK pairs of channels of BLOCK_T tokens of an image: x int16 and the output (images, tokens, CHANNELS).

    turns is int32 (HEADS, tokens, HALF): cosines in the lower, sines in the upper 16 bits. All are contiguous.
    """
    wait_for_kernels(DEPENDENT)
    # an image has so many blocks; a division would be one of floats
    program = tl.program_id(0).to(tl.int64)
    image = (program * image_inverse) >> image_bits
    t = (program - image * blocks) * BLOCK_T + tl.arange(0, BLOCK_T)
    pair = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    head, i = pair // HALF, pair % HALF
    inside = pair < CHANNELS // 2
    there = (t < tokens)[:, None] & inside[None, :]
    first = head * (2 * HALF) + i
    at = (image * tokens + t)[:, None] * CHANNELS + first[None, :]
    table_row = (head % HEADS)[None, :] * tokens + t[:, None]
    turn = tl.load(turns_ptr + table_row * HALF + i[None, :], mask=there, other=0)
    a = tl.load(x_ptr + at, mask=there, other=0).to(tl.int32)
    b = tl.load(x_ptr + at + HALF, mask=there, other=0).to(tl.int32)
    cosine, sine = (turn << 16) >> 16, turn >> 16
    PLAIN: tl.constexpr = GUARD or BLOCK_T * BLOCK < 4 * 32 * WARPS
    one, other = a * cosine - b * sine, b * cosine + a * sine
    _finish(one, first, offset_ptr, multiplier_ptr, o_ptr, at, inside, there, PLAIN, GUARD)
    _finish(other, first + HALF, offset_ptr, multiplier_ptr, o_ptr, at + HALF, inside, there, PLAIN, GUARD)


_WARPS = 4
_TOKENS = 8
_PAIRS = 256
"""Of a program: 2048 pairs, 16 for each of 128 threads."""


def rotary_launch(
    x: torch.Tensor, turns: torch.Tensor, offset: torch.Tensor, multiplier: torch.Tensor, out: torch.Tensor
) -> KernelLaunch:
    """Spell out the launch that rotates ``x``, int16 (images, tokens, channels), into ``out``; all contiguous."""
    images, tokens, channels = x.shape
    heads, _, half = turns.shape
    dependent = dependent_launch(x.device, x.numel())
    blocks = triton.cdiv(tokens, _TOKENS)
    block = min(_PAIRS, triton.next_power_of_2(channels // 2))
    arguments = {
        "x_ptr": x,
        "turns_ptr": turns,
        "offset_ptr": offset,
        "multiplier_ptr": multiplier,
        "o_ptr": out,
        "tokens": tokens,
        "blocks": blocks,
        **image_divisor(images * blocks, blocks),
        "CHANNELS": channels,
        "HEADS": heads,
        "HALF": half,
        "BLOCK_T": _TOKENS,
        "BLOCK": block,
        "WARPS": _WARPS,
        "DEPENDENT": dependent,
        "GUARD": x.device.type == "cpu",
    }
    grid = (images * blocks, triton.cdiv(channels // 2, block))
    options = {"num_warps": _WARPS, "num_stages": 1, "launch_pdl": dependent != ""}
    return KernelLaunch(rotary_kernel, grid, arguments, options)
