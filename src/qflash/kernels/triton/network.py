"""Layers of an integer network: linear with everything that is fused behind it, and layer normalisation (Triton).

The bits of :mod:`qflash.specification.layers`, by the functions of :mod:`.common.network_ops`, on every GPU from sm_80 on.

* A linear layer: a program has BLOCK_M rows by BLOCK_N outputs. Its sums stay in registers, take BLOCK_K
  inputs at a time from the int8 tensor core, and go through the epilogue there: another unit, then residual or activation, then
  saturation. Hopper has a kernel of its own for most of these (:mod:`.gluon.sm90.linear`).
* Normalisation: a program has BLOCK_M whole rows, which it reads once.
* The mean over an image's tokens, and the cutting of images into patches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ...specification.layers import row_constants
from ..common.dependent_launch import wait_for_kernels
from ..common.fixed_point import multiply_round
from ..common.network_ops import activate, normalise, places_of, row_factors, saturate
from ..device import processors_of
from ..heuristics import dependent_launch
from ..launch_arguments import LinearCall, LinearPlan, image_divisor
from ..launch_recorder import KernelLaunch


@triton.jit(
    do_not_specialize=(
        "left",
        "activation_constant",
        "tokens",
        "image_inverse",
        "image_bits",
        "out_tokens",
        "first",
        "residual_tokens",
    )
)
def int8_linear_kernel(
    x_ptr, weight_ptr, bias_ptr, multiplier_ptr, residual_ptr, activation_multiplier_ptr, activation_offset_ptr, o_ptr,
    places_ptr,
    rows, inputs, outputs, tokens, image_inverse, image_bits, out_tokens, first, residual_tokens, left, activation_constant,
    EPILOGUE: tl.constexpr, PLAN: tl.constexpr, GUARD: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows by BLOCK_N outputs of a linear layer.

    x is int8 or int16 (rows, inputs), the weights int8 (outputs, inputs), residual int16 and output (rows, outputs), all
    contiguous. EPILOGUE and PLAN are of :mod:`..launch_arguments`.
    """
    BLOCK_M: tl.constexpr = PLAN.BLOCK_M
    BLOCK_N: tl.constexpr = PLAN.BLOCK_N
    BLOCK_K: tl.constexpr = PLAN.BLOCK_K
    WHOLE: tl.constexpr = PLAN.WHOLE
    PLACES: tl.constexpr = EPILOGUE.PLACES
    RESIDUAL: tl.constexpr = EPILOGUE.RESIDUAL
    ACTIVATION: tl.constexpr = EPILOGUE.ACTIVATION
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    here, inside = m < rows, n < outputs
    x_ptrs = x_ptr + m[:, None] * inputs + k[None, :]
    weight_ptrs = weight_ptr + n[None, :].to(tl.int64) * inputs + k[:, None]
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    WIDE: tl.constexpr = x_ptr.dtype.element_ty == tl.int16
    low = tl.zeros((BLOCK_M if WIDE else 1, BLOCK_N), tl.int32)
    for start in range(0, inputs, BLOCK_K):
        if WHOLE:
            x = tl.load(x_ptrs, mask=here[:, None], other=0)
            weight = tl.load(weight_ptrs, mask=inside[None, :], other=0)
        else:
            x = tl.load(x_ptrs, mask=here[:, None] & (k < inputs - start)[None, :], other=0)
            weight = tl.load(weight_ptrs, mask=inside[None, :] & (k < inputs - start)[:, None], other=0)
        if WIDE:
            # x = 256 high + low + 128, both in int8
            low = tl.dot(((x & 255) - 128).to(tl.int8), weight, low, out_dtype=tl.int32)
            low += 128 * tl.sum(weight.to(tl.int32), 0)[None, :]
            sums = tl.dot((x >> 8).to(tl.int8), weight, sums, out_dtype=tl.int32)
        else:
            sums = tl.dot(x, weight, sums, out_dtype=tl.int32)
        x_ptrs += BLOCK_K
        weight_ptrs += BLOCK_K
    if WIDE:
        sums = (sums << 8) + low
    bias = tl.load(bias_ptr + n, mask=inside, other=0)
    multiplier = tl.load(multiplier_ptr + n, mask=inside, other=0)
    y = multiply_round((sums << left) + bias[None, :], multiplier[None, :], GUARD)
    if PLACES != "":
        to, beside, here = places_of(
            m, rows, places_ptr, tokens, image_inverse, image_bits, out_tokens, first, residual_tokens,
            PLACES == "table",
        )  # fmt: skip
    else:
        to, beside = m, m
    there = here[:, None] & inside[None, :]
    at = to[:, None] * outputs + n[None, :]
    if RESIDUAL:
        y += tl.load(residual_ptr + beside[:, None] * outputs + n[None, :], mask=there, other=0).to(tl.int32)
    if ACTIVATION != "":
        activation_multiplier = tl.load(activation_multiplier_ptr + n, mask=inside, other=0)
        activation_offset = tl.load(activation_offset_ptr + n, mask=inside, other=0)
        y = activate(y, ACTIVATION) * activation_multiplier[None, :] + activation_offset[None, :]
        out = saturate(y >> activation_constant, tl.int8, GUARD)
    else:
        out = saturate(y, o_ptr.dtype.element_ty, GUARD)
    tl.store(o_ptr + at, out, mask=there)


MAX_PARTS = 12
"""Parts of a row of channels that a program of :func:`integer_layer_norm_kernel` keeps in registers, at most."""

_NORM_PART = 256
"""Channels a part at most where there are many rows, whose squares take two registers each."""


@triton.jit(
    do_not_specialize=("pitch", "epsilon_high", "epsilon_low", "shift", "tokens", "new_tokens", "image_inverse", "image_bits")
)
def integer_layer_norm_kernel(
    h_ptr, gain_ptr, offset_ptr, o_ptr, gather_ptr, residual_ptr,
    rows, pitch, epsilon_high, epsilon_low, shift, tokens, new_tokens, image_inverse, image_bits,
    CHANNELS: tl.constexpr, CONSTANTS: tl.constexpr, PIECES: tl.constexpr, HEADS: tl.constexpr, BLOCK_M: tl.constexpr,
    PART: tl.constexpr, WARPS: tl.constexpr, DEPENDENT: tl.constexpr, GUARD: tl.constexpr, CENTRED: tl.constexpr,
):  # fmt: skip
    """Normalise BLOCK_M rows of CHANNELS int16, contiguous, in parts of PART channels.

    A row is one of h (rows, CHANNELS); with HEADS > 0 so many rows lie one behind the other, and ``pitch`` numbers behind their
    beginning the next ones; or, with PIECES > 0, joined of so many tokens of h (images, tokens, CHANNELS / PIECES),
    their numbers in gather (new tokens, PIECES). Epsilon is ``epsilon_high * 2**30 + epsilon_low``. CONSTANTS are those of
    rows, :func:`.layers.row_constants`. The residual is int16 (rows, CHANNELS), or None, which leaves no argument of the
    compiled kernel. Unless CENTRED the mean stays.
    """
    wait_for_kernels(DEPENDENT)
    WIDTH: tl.constexpr = CHANNELS // PIECES if PIECES else CHANNELS
    PARTS: tl.constexpr = (WIDTH + PART - 1) // PART
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.arange(0, PART)
    # all of them, unless the one part is wider than the row
    inside = c < (PART if WIDTH % PART == 0 else WIDTH)
    here = m < rows
    # of channels that lie a part apart; a thread adds its own before others'
    sums = tl.zeros((BLOCK_M, PART), tl.int32)
    squares = tl.zeros((BLOCK_M, PART), tl.int64)
    parts = ()
    if PIECES:
        image = (m * image_inverse) >> image_bits
        new_token = (m - image * new_tokens).to(tl.int32)
    for i in tl.static_range(PARTS * (PIECES if PIECES else 1)):
        start = m // HEADS * pitch + m % HEADS * WIDTH if HEADS else m * WIDTH
        seen = here
        if PIECES:
            token = tl.load(gather_ptr + new_token * PIECES + i // PARTS, mask=here, other=0)
            seen = here & (token >= 0) & (token < tokens)
            start = (image * tokens + token) * WIDTH
        at = start[:, None] + (i % PARTS * PART + c)[None, :]
        h = tl.load(h_ptr + at, mask=seen[:, None] & inside[None, :], other=0).to(tl.int32)
        sums += h
        wide = h.to(tl.int64)
        squares += wide * wide
        parts = parts + (h,)  # type: ignore[assignment]
    total = tl.sum(sums, 1)
    if not CENTRED:
        total = total * 0
    epsilon = (total * 0 + epsilon_high).to(tl.int64) * (1 << 30) + epsilon_low
    channels, total, factor, right = row_factors(total, tl.sum(squares, 1), epsilon, CHANNELS, CONSTANTS, GUARD)
    there = here[:, None] & inside[None, :]
    PLAIN: tl.constexpr = GUARD or BLOCK_M * PART < 4 * 32 * WARPS
    for i in tl.static_range(PARTS * (PIECES if PIECES else 1)):
        channel = i // PARTS * WIDTH + i % PARTS * PART + c
        y = normalise(parts[i], channels[:, None], total[:, None], factor[:, None], right[:, None], GUARD)
        # loaded for every row: what a thread needs then comes to it without shared memory
        every = tl.broadcast_to(channel[None, :], (BLOCK_M, PART))
        gain = tl.load(gain_ptr + every, mask=inside[None, :], other=0)
        offset = tl.load(offset_ptr + every, mask=inside[None, :], other=0)
        # rounded half up; the sum is below 2**31
        half = 1 << (shift - 1)
        y = (multiply_round(y << 4, gain, GUARD) + offset + half) >> shift
        if residual_ptr is not None:
            y += tl.load(residual_ptr + m[:, None] * CHANNELS + channel[None, :], mask=there, other=0).to(tl.int32)
        out = saturate(y, o_ptr.dtype.element_ty, PLAIN)
        tl.store(o_ptr + m[:, None] * CHANNELS + channel[None, :], out, mask=there)


@triton.jit(do_not_specialize=("left", "tokens", "new_tokens", "image_inverse", "image_bits"))
def integer_narrow_kernel(
    h_ptr, multiplier_ptr, offset_ptr, o_ptr, gather_ptr,
    rows, width, left, tokens, new_tokens, image_inverse, image_bits,
    PIECES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, DEPENDENT: tl.constexpr, GUARD: tl.constexpr,
):  # fmt: skip
    """Bring BLOCK_M rows by BLOCK_C channels of int16 (rows, width), contiguous, to another unit.

    With PIECES > 0 a row is token ``gather[row]`` of an image's, h (images, tokens, width), and so many rows next to each other
    are one of the output's, with a number for each of its channels; ``new_tokens`` are an image's rows.
    """
    wait_for_kernels(DEPENDENT)
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    here, inside = m < rows, c < width
    start, seen, piece = m, here, m * 0
    if PIECES:
        image = (m * image_inverse) >> image_bits
        place = m - image * new_tokens
        token = tl.load(gather_ptr + place, mask=here, other=0)
        seen = here & (token >= 0) & (token < tokens)
        start, piece = image * tokens + token, place % PIECES
    there = here[:, None] & inside[None, :]
    h = tl.load(h_ptr + start[:, None] * width + c[None, :], mask=seen[:, None] & inside[None, :], other=0).to(tl.int32)
    channel = piece[:, None] * width + c[None, :]
    offset = tl.load(offset_ptr + channel, mask=there, other=0)
    multiplier = tl.load(multiplier_ptr + channel, mask=there, other=0)
    y = saturate(multiply_round((h << left) + offset, multiplier, GUARD), o_ptr.dtype.element_ty, GUARD)
    tl.store(o_ptr + m[:, None] * width + c[None, :], y, mask=there)


@triton.jit(do_not_specialize=("tokens", "left"))
def integer_mean_kernel(
    x_ptr, offset_ptr, multiplier_ptr, o_ptr, tokens, channels, image_stride, left,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, DEPENDENT: tl.constexpr, GUARD: tl.constexpr,
):  # fmt: skip
    """Average BLOCK_C channels of an image's tokens, int16 (images, tokens, channels), images ``image_stride`` apart."""
    wait_for_kernels(DEPENDENT)
    image = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = c < channels
    sums = tl.zeros((BLOCK_T, BLOCK_C), tl.int32)
    for start in range(0, tokens, BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)
        at = t[:, None].to(tl.int64) * channels + c[None, :]
        there = (t < tokens)[:, None] & inside[None, :]
        sums += tl.load(x_ptr + image * image_stride + at, mask=there, other=0).to(tl.int32)
    offset = tl.load(offset_ptr + c, mask=inside, other=0)
    multiplier = tl.load(multiplier_ptr + c, mask=inside, other=0)
    y = multiply_round((tl.sum(sums, 0) << left) + offset, multiplier, GUARD)
    tl.store(o_ptr + image * channels + c, saturate(y, o_ptr.dtype.element_ty, True), mask=inside)


@triton.jit
def patches_kernel(
    images_ptr, prefix_ptr, x_ptr, o_ptr,
    CHANNELS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
    PREFIX: tl.constexpr, OUTPUTS: tl.constexpr, LINES: tl.constexpr, ACROSS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Cut one row of an image's patches, HIGH pixels high, into int8 (images, patches, values); prefix tokens go first.

    Images are uint8 (images, CHANNELS, HEIGHT, WIDTH), contiguous; a patch is HIGH by WIDE pixels and its values are ordered by
    channel, row and column. The first PREFIX numbers of an image's output are those of the prefix; the output has OUTPUTS an
    image. LINES at a time of ACROSS pixels, no less than WIDTH, are taken.
    """
    COLUMNS: tl.constexpr = WIDTH // WIDE
    VALUES: tl.constexpr = CHANNELS * HIGH * WIDE
    # images first: of these a grid has room for more
    image, row = tl.program_id(0).to(tl.int64), tl.program_id(1)
    x = tl.arange(0, ACROSS)
    images_ptr += image * (CHANNELS * HEIGHT * WIDTH) + row * (HIGH * WIDTH)
    x_ptr += (image * (HEIGHT // HIGH) + row) * (COLUMNS * VALUES)
    for start in tl.static_range(0, CHANNELS * HIGH, LINES):
        line = start + tl.arange(0, LINES)
        channel, y = line // HIGH, line % HIGH
        there = (line < CHANNELS * HIGH)[:, None] & (x < COLUMNS * WIDE)[None, :]
        pixels = tl.load(images_ptr + (channel * (HEIGHT * WIDTH) + y * WIDTH)[:, None] + x[None, :], mask=there, other=0)
        value = (x // WIDE * VALUES + x % WIDE)[None, :] + (line * WIDE)[:, None]
        tl.store(x_ptr + value, (pixels ^ 128).to(tl.int8, bitcast=True), mask=there)
    for start in tl.static_range(0, PREFIX, BLOCK):
        i = start + tl.arange(0, BLOCK)
        there = (i < PREFIX) & (row == 0)
        tl.store(o_ptr + image * OUTPUTS + i, tl.load(prefix_ptr + i, mask=there, other=0), mask=there)


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
        "PLAN": LinearPlan(block_m, block_n, block_k, inputs % block_k == 0),
        "GUARD": call.x.device.type == "cpu",
    }
    arguments = {name: arguments[name] for name in int8_linear_kernel.arg_names}
    grid = (triton.cdiv(rows, block_m), triton.cdiv(outputs, block_n))
    return KernelLaunch(int8_linear_kernel, grid, arguments, {"num_warps": warps, "num_stages": 3})


def _norm_tile(rows: int, channels: int, width: int, processors: int) -> tuple[int, int, int]:
    """Return rows a program of a normalisation, its warps, and channels a part of its rows.

    A thread of the networks that were measured has 12 to 64 numbers: with more, a processor has registers for too few programs
    to hide the time of loads (benchmarks/archive/few_tiles_h200.json). Parts are whole where a token's channels have a large
    power of two among their factors. With few rows of one token each, a program lasts as long as its loads wait, one behind the
    other: rows of 129 to 2048 channels are one padded part (norm_tiles_h200.json).

    Args:
        rows, channels: of the output.
        width: channels of a token, of which a row has one or several.
        processors: of the GPU.
    """
    block, warps = (32, 2) if channels <= 128 else (4, 2) if channels <= 256 else (4, 4)
    part, padded = width & -width, triton.next_power_of_2(width)
    if rows < 2 * block * processors:
        if rows <= 4 * processors and width == channels and 128 < padded <= 2048:
            return (4, 8, padded) if padded <= 256 else (1, 4, padded)
        block, warps = 2, 2 if channels <= 512 else 4
    if part * MAX_PARTS < channels:
        part = padded
    elif block > 2:
        part = min(part, max(_NORM_PART, triton.next_power_of_2(triton.cdiv(channels, MAX_PARTS))))
    return block, warps, part


def heads_apart(h: torch.Tensor) -> bool:
    """Tell whether ``h`` (..., tokens, heads, channels) is contiguous but for a gap behind each token."""
    if h.dim() < 3:
        return False
    gaps = [*h.shape[1:-2], h.stride(-3)]
    wanted = [math.prod(gaps[i:]) for i in range(len(gaps))]
    return list(h.stride()) == [*wanted, h.shape[-1], 1]


def layer_norm_launch(
    h: torch.Tensor,
    epsilon: int,
    gain: torch.Tensor,
    offset: torch.Tensor,
    shift: int,
    out: torch.Tensor,
    gather: torch.Tensor | None = None,
    *,
    centred: bool = True,
    residual: torch.Tensor | None = None,
) -> KernelLaunch:
    """Spell out the launch that normalises ``h``, int16 (..., channels), into ``out`` (rows, channels); all contiguous.

    Args:
        h: or heads of tokens that lie apart, see :func:`heads_apart`.
        gather: int32 (new tokens, pieces), as :func:`qflash.network.execution.integer_layer_norm` takes it.
        centred: whether the mean is taken out.
        residual: int16 (rows, channels) for int16 outputs, or None.
    """
    rows, channels = out.shape
    width = h.shape[-1]
    heads, pitch = (0, 0) if h.is_contiguous() else (h.shape[-2], h.stride(-3))
    new_tokens, pieces = (1, 0) if gather is None else gather.shape
    block, warps, part = _norm_tile(rows, channels, width, processors_of(h.device))
    dependent = dependent_launch(h.device, out.numel())
    arguments = {
        "h_ptr": h,
        "gain_ptr": gain,
        "offset_ptr": offset,
        "o_ptr": out,
        "gather_ptr": gain if gather is None else gather,
        "residual_ptr": residual,
        "rows": rows,
        "pitch": pitch,
        # two numbers of 32 bits: kernels are compiled for the width of an argument
        "epsilon_high": epsilon >> 30,
        "epsilon_low": epsilon & ((1 << 30) - 1),
        "shift": shift,
        "tokens": h.shape[-2] if pieces else 1,
        "new_tokens": new_tokens,
        **image_divisor(rows, new_tokens),
        "CHANNELS": channels,
        "CONSTANTS": tuple(row_constants(channels)),
        "PIECES": pieces,
        "HEADS": heads,
        "BLOCK_M": block,
        "PART": part,
        "WARPS": warps,
        "DEPENDENT": dependent,
        "GUARD": h.device.type == "cpu",
        "CENTRED": centred,
    }
    options = {"num_warps": warps, "num_stages": 1, "launch_pdl": dependent != ""}
    return KernelLaunch(integer_layer_norm_kernel, (triton.cdiv(rows, block),), arguments, options)


_NARROW_ROWS, _NARROW_CHANNELS = 8, 128


def narrow_launch(
    h: torch.Tensor, multiplier: torch.Tensor, left: int, offset: torch.Tensor, out: torch.Tensor, gather: torch.Tensor | None
) -> KernelLaunch:
    """Spell out the launch that brings ``h``, int16 (..., channels), to the unit of ``out``; all contiguous.

    Args:
        gather: int32 (new tokens, pieces), as :func:`qflash.network.operators.narrow.integer_narrow` takes it.
    """
    width = h.shape[-1]
    rows = out.numel() // width
    new_tokens = 1 if gather is None else gather.numel()
    dependent = dependent_launch(h.device, out.numel())
    arguments = {
        "h_ptr": h,
        "multiplier_ptr": multiplier,
        "offset_ptr": offset,
        "o_ptr": out,
        "gather_ptr": offset if gather is None else gather,
        "rows": rows,
        "width": width,
        "left": left,
        "tokens": 1 if gather is None else h.shape[-2],
        "new_tokens": new_tokens,
        **image_divisor(rows, new_tokens),
        "PIECES": 0 if gather is None else gather.shape[1],
        "BLOCK_M": _NARROW_ROWS,
        "BLOCK_C": _NARROW_CHANNELS,
        "DEPENDENT": dependent,
        "GUARD": h.device.type == "cpu",
    }
    grid = triton.cdiv(rows, _NARROW_ROWS), triton.cdiv(width, _NARROW_CHANNELS)
    return KernelLaunch(integer_narrow_kernel, grid, arguments, {"num_warps": 4, "launch_pdl": dependent != ""})


# small blocks of channels: an image alone leaves most processors without work otherwise
_MEAN_TOKENS, _MEAN_CHANNELS = 64, 64


def mean_launch(x: torch.Tensor, multiplier: torch.Tensor, left: int, offset: torch.Tensor, out: torch.Tensor) -> KernelLaunch:
    """Spell out the launch that averages the tokens of ``x``, int16 (images, tokens, channels), into ``out``.

    All are contiguous, but images may lie further apart.
    """
    images, tokens, channels = x.shape
    dependent = dependent_launch(x.device, x.numel())
    arguments = {
        "x_ptr": x,
        "offset_ptr": offset,
        "multiplier_ptr": multiplier,
        "o_ptr": out,
        "tokens": tokens,
        "channels": channels,
        "image_stride": x.stride(0),
        "left": left,
        "BLOCK_T": _MEAN_TOKENS,
        "BLOCK_C": _MEAN_CHANNELS,
        "DEPENDENT": dependent,
        "GUARD": x.device.type == "cpu",
    }
    options = {"num_warps": 4, "launch_pdl": dependent != ""}
    return KernelLaunch(integer_mean_kernel, (images, triton.cdiv(channels, _MEAN_CHANNELS)), arguments, options)


_PATCH_BLOCK = 4096
"""Pixels, and numbers of the prefix, that a program of :func:`patches_kernel` takes at a time."""


def patches_launch(
    images: torch.Tensor, patch_size: Sequence[int], x: torch.Tensor, prefix: torch.Tensor | None, out: torch.Tensor
) -> KernelLaunch:
    """Spell out the launch that cuts images into patches ``x`` and brings the prefix to ``out``; all contiguous.

    Args:
        images: uint8 (batch, channels, height, width).
        patch_size: (height, width).
        x: int8 (batch, patches, values).
        prefix: int16 (1, tokens, outputs), or None.
        out: int16 (batch, tokens + patches, outputs).
    """
    batch, channels, height, width = images.shape
    across = triton.next_power_of_2(width)
    arguments = {
        "images_ptr": images,
        "prefix_ptr": out if prefix is None else prefix,
        "x_ptr": x,
        "o_ptr": out,
        "CHANNELS": channels,
        "HEIGHT": height,
        "WIDTH": width,
        "HIGH": patch_size[0],
        "WIDE": patch_size[1],
        "PREFIX": 0 if prefix is None else prefix.numel(),
        "OUTPUTS": out[0].numel(),
        "LINES": max(1, min(_PATCH_BLOCK // across, triton.next_power_of_2(channels * patch_size[0]))),
        "ACROSS": across,
        "BLOCK": _PATCH_BLOCK,
    }
    return KernelLaunch(patches_kernel, (batch, height // patch_size[0]), arguments, {"num_warps": 4})
