"""The specification of an integer network's operators, in plain PyTorch integers on any device.

These functions define the bits; ``docs/integer_network.md`` has the same as equations. Attention is
:func:`.reference.int8_attention`. Static choices (multipliers, shifts, constants) are worked out from floats when a
network is quantised (:mod:`qflash.network.conversion`); from then on there is no float operation.

A product of two numbers of 32 bits is always ``mul(a, b, n) = (a b + 2**(n - 1)) >> n``,
:func:`.fixed_point.multiply_round`.

The bound of every quantity stands where it is computed, in a ``check``; :mod:`qflash_lab.verify.bounds` proves them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from .fixed_point import Checker, bit_length, multiply_round, round_shift

INT8 = (-128, 127)
INT16 = (-32768, 32767)
INT32 = (-(1 << 31), (1 << 31) - 1)
LIMITS = {torch.int8: INT8, torch.int16: INT16, torch.int32: INT32}
"""The ends that a result saturates at, by its type."""

MAX_CHANNELS = 4096
"""Most channels of a normalisation: four times the mean is found exactly enough, and sums of squares have 46 bits."""
MAX_EPSILON = 1 << 46
"""Largest E of :func:`normalise`, with which its variance stays below 2**47."""
NORM_FRACTION_BITS = 20
"""Fraction bits of a normalised activation, before its channel's gain."""

_UNCHECKED = Checker(False)


def integer_matmul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply int8 or int16 activations (..., inputs) by int8 weights (outputs, inputs): int32 (..., outputs), exact.

    On a CPU in int32. PyTorch has no integer product on every other device; there float64 holds all sums exactly.
    """
    if x.device.type == "cpu":
        return torch.matmul(x.to(torch.int32), weight.to(torch.int32).mT)
    return torch.matmul(x.to(torch.float64), weight.to(torch.float64).mT).to(torch.int32)


def rescale(
    sums: torch.Tensor, left: int, bias: torch.Tensor, multiplier: torch.Tensor, check: Checker = _UNCHECKED
) -> torch.Tensor:
    """Bring sums to another unit: ``mul((sums << left) + b, R, 32)``, int64.

    Args:
        sums: int32 or int64 (..., outputs).
        left: 0 to 30.
        bias: b, int32 (outputs,), in the unit of the shifted sums.
        multiplier: R, int32 ``[0, 2**31)``, (outputs,): the ratio of the units is ``R * 2**(left - 32)``.
        check: for the bound.
    """
    wide = (check("acc", sums, *INT32).to(torch.int64) << left) + bias
    rescaled = multiply_round(check("(acc << left) + b", wide, *INT32), multiplier)
    return check("rescale(acc)", rescaled, -(1 << 30), 1 << 30)


def saturate(x: torch.Tensor, dtype: torch.dtype, check: Checker = _UNCHECKED) -> torch.Tensor:
    """Clamp to a type's range and take the type."""
    return check("y", x.clamp(*LIMITS[dtype]).to(dtype), *LIMITS[dtype])


def add_residual(x: torch.Tensor, residual: torch.Tensor, check: Checker = _UNCHECKED) -> torch.Tensor:
    """Add the residual stream, int16, to rescaled sums, before these are saturated."""
    return x + check("residual", residual, *INT16)


TAIL_END = 4096
"""From here on the tail of an activation counts as 0."""
ACTIVATION_LIMIT = (1 << 17) - 1
"""Larger numbers count as this one."""
MAX_ACTIVATION_MULTIPLIER = 1 << 13
"""Largest M of :func:`activate`."""
GELU_UNIT = 3.28 / TAIL_END
"""What a unit of :func:`gelu` stands for."""
GELU_CONSTANTS = 59898, 10, 18588, 23
"""Of the tail; fitted for the least largest error, with units in which both small factors are whole."""
SILU_UNIT = 8 / TAIL_END
"""What a unit of :func:`silu` stands for."""
SILU_CONSTANTS = 12111, 11, 118687, 5
"""Of the tail, as those of GELU."""


class Activation(NamedTuple):
    """What follows the change of unit of a linear layer.

    Attributes:
        name: of :data:`ACTIVATIONS`.
        multiplier, offset, shift: M, B and n of :func:`activate`.
    """

    name: str
    multiplier: torch.Tensor
    offset: torch.Tensor
    shift: int


class LinearIntegers(NamedTuple):
    """What a linear layer multiplies by and adds; see :func:`qflash.network.execution.int8_linear`."""

    weight: torch.Tensor
    bias: torch.Tensor
    multiplier: torch.Tensor
    left: int


def _less_tail(x: torch.Tensor, name: str, tail: Callable[[torch.Tensor], torch.Tensor], check: Checker) -> torch.Tensor:
    """Return ``min(max(x, 0), limit) - tail(r)`` with ``r = max(end - |x|, 0)``, int64."""
    x = check(f"{name}: u", x.to(torch.int64), -(1 << 30), 1 << 30)
    rest = check(f"{name}: r", (TAIL_END - x.abs()).clamp(min=0), 0, TAIL_END)
    return check(f"{name}: g", relu(x) - tail(rest), -(1 << 15), ACTIVATION_LIMIT)


def relu(x: torch.Tensor, check: Checker = _UNCHECKED) -> torch.Tensor:
    """Return ``min(max(x, 0), limit)``, int64; any unit."""
    return x.to(torch.int64).clamp(0, ACTIVATION_LIMIT)


def gelu(x: torch.Tensor, check: Checker = _UNCHECKED) -> torch.Tensor:
    """Return GELU by a polynomial: ``min(max(x, 0), limit) - tail(|x|)``, int64, within 0.0023.

    ``tail(a) = a (1 - Phi(a))`` is ``w (w - d r + e)`` with ``r = 1 - a / 3.28`` and ``w = r**2 (g - r)`` but for their
    units, and 0 beyond 3.28.

    Args:
        x: any shape, below 2**30 in magnitude, in :data:`GELU_UNIT`.
        check: for the bounds.

    Returns:
        the same unit.
    """

    def tail(rest: torch.Tensor) -> torch.Tensor:
        g, c, e, d = GELU_CONSTANTS
        square = check("GELU: z", multiply_round(rest, rest, 9), 0, 1 << 15)
        first = check("GELU: w", multiply_round(square, g - c * rest, 15), 0, 18977)
        second = check("GELU: h", (first << 2) + (e - d * rest), 0, 18588)
        return multiply_round(first, second, 20)

    return _less_tail(x, "GELU", tail, check)


def silu(x: torch.Tensor, check: Checker = _UNCHECKED) -> torch.Tensor:
    """Return SiLU, ``x sigmoid(x)``, by a polynomial: ``min(max(x, 0), limit) - tail(|x|)``, int64, within 0.0039.

    ``tail(a) = a sigmoid(-a)`` is ``w (e + c r - f z)`` with ``r = 1 - a / 8``, ``z = r**2`` and ``w = z (g - c r + 2 z)`` but
    for their units, and 0 beyond 8. ``x sigmoid(s x)`` is ``silu(s x) / s``: another unit (QuickGELU has s = 1.702).

    Args:
        x: any shape, below 2**30 in magnitude, in :data:`SILU_UNIT`.
        check: for the bounds.

    Returns:
        the same unit.
    """

    def tail(rest: torch.Tensor) -> torch.Tensor:
        g, c, e, f = SILU_CONSTANTS
        line = c * rest
        square = check("SiLU: z", multiply_round(rest, rest, 9), 0, 1 << 15)
        first = check("SiLU: w", multiply_round(square, g - line + 2 * square, 15), 0, 32591)
        second = check("SiLU: h", e + line - f * square, -97, 121787)
        return multiply_round(first, second, 22)

    return _less_tail(x, "SiLU", tail, check)


ACTIVATIONS: dict[str, tuple[Callable[..., torch.Tensor], float | None]] = {
    "gelu": (gelu, GELU_UNIT),
    "silu": (silu, SILU_UNIT),
    "relu": (relu, None),
}
"""Functions by name, and what a unit of theirs stands for; None where any will do."""


def activate(x: torch.Tensor, by: Activation, check: Checker = _UNCHECKED) -> torch.Tensor:
    """Return an activation in int8, with a step and a zero point for every channel: ``(f(x) M + B) >> n``.

    Args:
        x: int64 (..., channels), below 2**30 in magnitude.
        by: f and M, int32 (channels,), ``[0, 2**13]``; B, int32 (channels,), ``|B| < 2**30``, half a unit for rounding
            included; n, 0 to 30.
        check: for the bounds.
    """
    wide = ACTIVATIONS[by.name][0](x, check) * by.multiplier + by.offset
    return saturate(check("f M + B", wide, *INT32) >> by.shift, torch.int8, check)


ROOT_START, ROOT_SLOPE = 1145106637, 654339257
"""The line ``1.0664 - 0.6094 v`` on [1/4, 1), in 1/2**30: 0.5 / sqrt(v) within 8.6 %."""


def inverse_root(v: torch.Tensor) -> torch.Tensor:
    """Return about ``2**44 / sqrt(v)`` for ``2**28 <= v < 2**30``: no division, no root, three Newton steps.

    ``x <- x + x (1/4 - x**2 v) * 2`` for x and v as fractions of 2**30; each step takes an error e to ``1.5 e**2``. The
    result lies within ``2**-24`` relatively.
    """
    x = ROOT_START - multiply_round(v, ROOT_SLOPE, 30)
    for _ in range(3):
        error = (1 << 28) - multiply_round(multiply_round(x, x, 30), v, 30)
        x = x + multiply_round(x, error, 29)
    return x


class RowConstants(NamedTuple):
    """What :func:`normalise` multiplies by, of the number of channels C alone; made by :func:`row_constants`.

    Attributes:
        inverse, bits: ``4 / C`` is ``inverse * 2**-bits``, with 30 bits.
        root, shift: ``4 / sqrt(C)`` is ``root * 2**(-30 - shift)``, root in [2**29, 2**30], rounded.
    """

    inverse: int
    bits: int
    root: int
    shift: int


@functools.cache
def row_constants(channels: int) -> RowConstants:
    """Return the constants of rows of 1 to :data:`MAX_CHANNELS` channels."""
    bits = 27 + (channels - 1).bit_length()
    shift = (channels.bit_length() - 1) // 2 - 2
    root = (math.isqrt((1 << (66 + 2 * shift)) // channels) + 1) >> 1
    return RowConstants(((8 << bits) // channels + 1) >> 1, bits, root, shift)


def most_normalised(centred: bool) -> int:
    """Return the largest N of :func:`normalise`: of 4096 channels one may be 64 times their root mean square, and x rounds."""
    return (1 << 26) + (0 if centred else 4)


def normalise(h: torch.Tensor, epsilon: int, check: Checker = _UNCHECKED, *, centred: bool = True) -> torch.Tensor:
    """Take mean and deviation out of rows: int64 (..., channels) with 20 fraction bits.

    Without ``centred`` the mean stays, and rows are divided by their root mean square: S and m are 0, all else is the same.

    The variance is that about a quarter of a whole number, ``m / 4``, next to the mean: it is at most 1/64 too large, and a
    sum of squares of 19 bits, which needs no number of 64 bits.

    Args:
        h: int16 (..., channels), at most 4096 channels.
        epsilon: E, ``[0, 2**46]``: what the network adds to the variance, times ``16 channels / (unit of h)**2``. Below 2**46
            where the mean stays.
        check: for the bounds.
        centred: whether the mean is taken out.
    """
    channels = h.shape[-1]
    by = row_constants(channels)
    h = check("h", h, *INT16).to(torch.int64)
    total = check("S", h.sum(dim=-1, keepdim=True), -(1 << 27), 1 << 27) if centred else torch.zeros_like(h[..., :1])
    middle = check("m", multiply_round(total, by.inverse, by.bits), -(1 << 17), 1 << 17)
    variance = (4 * h - middle).square().sum(dim=-1, keepdim=True) + epsilon
    bits = bit_length(check("V", variance, 0, (1 << 47) - 1))
    # an even shift that leaves 29 or 30 bits
    half = (bits - 29) >> 1
    v = torch.where(half < 0, variance << (-2 * half).clamp(min=0), variance >> (2 * half).clamp(min=0))
    v = check("v", v.clamp(min=1 << 28), 1 << 28, (1 << 30) - 1)
    root = check("x", inverse_root(v), (1 << 29) - 64, 1 << 30)
    factor = check("f", multiply_round(root, by.root, 30), (1 << 28) - 64, 1 << 30)
    difference = check("d", channels * h - total, -(1 << 28), (1 << 28) - 1)
    # from 2**-5 to 2**25, and the result below 2**31
    left = 8 - half - by.shift
    scaled = check("d 2**l", multiply_round(difference, 1 << (left + 5), 5), *INT32)
    return check("N", multiply_round(scaled, factor), -most_normalised(centred), most_normalised(centred))


def layer_norm(
    h: torch.Tensor,
    epsilon: int,
    gain: torch.Tensor,
    offset: torch.Tensor,
    shift: int,
    dtype: torch.dtype,
    check: Checker = _UNCHECKED,
    *,
    centred: bool = True,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Normalise rows and bring every channel to its own unit: ``mul(N, G, 28) + B``, shifted right, rounded and saturated.

    Args:
        h: int16 (..., channels).
        epsilon: see :func:`normalise`.
        gain: G, int32 (channels,), either sign.
        offset: B, int32 (channels,), ``|B| < 2**30``.
        shift: 1 to 29.
        dtype: int8, int16 or int32.
        check: for the bounds.
        centred: see :func:`normalise`.
        residual: int16 (..., channels), added before saturation, or None.
    """
    rows = normalise(h, epsilon, check, centred=centred)
    out = round_shift(check("mul(N, G, 28) + B", multiply_round(rows, gain, 28) + offset, *INT32), shift)
    return saturate(out if residual is None else add_residual(out, residual, check), dtype, check)


def narrow(
    h: torch.Tensor,
    multiplier: torch.Tensor,
    left: int,
    offset: torch.Tensor,
    dtype: torch.dtype = torch.int8,
    check: Checker = _UNCHECKED,
) -> torch.Tensor:
    """Bring every channel to a unit and a zero point of its own: :func:`rescale`, saturated.

    Args:
        h: int16 (..., channels).
        multiplier, left, offset: R, shift and b of :func:`rescale`, int32 (channels,).
        dtype: int8, int16 or int32.
        check: for the bound.
    """
    return saturate(rescale(h, left, offset, multiplier, check), dtype, check)


def embed_tokens(
    ids: torch.Tensor, table: torch.Tensor, position: torch.Tensor | None, check: Checker = _UNCHECKED
) -> torch.Tensor:
    """Return ``sat16(table[ids] + position)``, int16 (batch, tokens, channels).

    Args:
        ids: int32 or int64 (batch, tokens), below the table's rows.
        table: int16 (vocabulary, channels).
        position: int16 (tokens, channels), or None.
        check: for the bound.
    """
    h = table.index_select(0, ids.flatten()).view(*ids.shape, table.shape[1])
    if position is None:
        return h
    return saturate(check("table + position", h.to(torch.int32) + position, -(1 << 16), (1 << 16) - 2), torch.int16, check)


def token_mean(
    x: torch.Tensor,
    multiplier: torch.Tensor,
    left: int,
    offset: torch.Tensor,
    dtype: torch.dtype,
    check: Checker = _UNCHECKED,
) -> torch.Tensor:
    """Average tokens in another unit: :func:`rescale` of their sums, saturated, (batch, channels).

    Args:
        x: int16 (batch, tokens, channels).
        multiplier, left, offset: R, shift and b of :func:`rescale` for sums over all tokens, int32 (channels,).
        dtype: int8, int16 or int32.
        check: for the bound.
    """
    return saturate(rescale(x.sum(dim=1, dtype=torch.int64), left, offset, multiplier, check), dtype, check)


def pixels_to_int8(images: torch.Tensor) -> torch.Tensor:
    """Return uint8 pixels less 128, int8: the top bit changes, nothing else."""
    return (images ^ 128).view(torch.int8)


def patches(images: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    """Cut uint8 images (batch, channels, height, width) into int8 patches (batch, patches, channels * height * width).

    Pixels behind the last whole patch of a row or a column are left out, as a convolution leaves them.
    """
    batch, channels, height, width = images.shape
    rows, columns = height // size[0], width // size[1]
    whole = images[:, :, : rows * size[0], : columns * size[1]]
    x = pixels_to_int8(whole).reshape(batch, channels, rows, size[0], columns, size[1])
    return x.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def gather_tokens(h: torch.Tensor, gather: torch.Tensor) -> torch.Tensor:
    """Join tokens (batch, tokens, channels) to others (batch, len(gather), pieces * channels).

    Args:
        h: any dtype.
        gather: (new tokens, pieces): of which tokens each is made.
    """
    return h.index_select(1, gather.flatten()).reshape(h.shape[0], gather.shape[0], gather.shape[1] * h.shape[2])


def scatter_tokens(x: torch.Tensor, scatter: torch.Tensor) -> torch.Tensor:
    """Bring token i of (batch, tokens, channels) to place ``scatter[i]``."""
    return torch.empty_like(x).index_copy_(1, scatter.to(torch.int64), x)


def window_order(grid: tuple[int, int], window: tuple[int, int], shift: tuple[int, int]) -> torch.Tensor:
    """Return the tokens of a grid as Swin's windows have them, int32 (tokens, 1), for :func:`gather_tokens`.

    The grid is rolled by the shift, up and to the left, and cut into windows, row by row, as are the tokens in them.

    Args:
        grid, window, shift: (rows, columns) of tokens; the grid is a multiple of the window.
    """
    (rows, columns), (high, wide) = grid, window
    tokens = torch.arange(rows * columns, dtype=torch.int32, device="cpu").view(grid)
    tokens = tokens.roll((-shift[0], -shift[1]), dims=(0, 1))
    return tokens.view(rows // high, high, columns // wide, wide).transpose(1, 2).reshape(-1, 1)


def merge_order(grid: tuple[int, int]) -> torch.Tensor:
    """Return the tokens of a grid two by two as Swin merges them, int32 (tokens / 4, 4), for :func:`gather_tokens`."""
    rows, columns = grid
    tokens = torch.arange(rows * columns, dtype=torch.int32, device="cpu")
    return tokens.view(rows // 2, 2, columns // 2, 2).permute(0, 2, 3, 1).reshape(-1, 4)
