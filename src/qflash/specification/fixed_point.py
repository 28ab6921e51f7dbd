"""Fixed point: from float scales to integer multipliers and shifts, and the bounds that keep int32 safe.

Everything here is integer arithmetic on the *bits* of float32 scales, so that the same function can run
inside a kernel that holds no float instruction, on a host, or in an accelerator that is handed
(mantissa, exponent) pairs. The functions work on PyTorch integer tensors of any device and never
synchronise. :mod:`qflash.kernels.common.fixed_point` is the same arithmetic in Triton; the tests hold the two equal.

Notation: ``s = s_Q * s_K * scale * log2(e)`` is the paper's scale of a score in the log2 domain
(Equation 5); a score S stands for the weight ``2**(s * (S - m))`` with ``m`` the row maximum.

Bounds (|values| <= 128, ``d`` the head dimension, ``N`` the number of keys); :class:`Checker` enforces
each of them in the reference's checked mode:

====================  ==============================================  =======================
quantity              bound                                           why
====================  ==============================================  =======================
S                     ``|S| <= 2**14 d``                              d products of two int8
m - S                 ``< 2**15 d``                                   both ends cannot be -128
M                     ``<= 57344 / d`` (0.875 * 2**16 / d)            chosen; half with a bias
S M                   ``<= 0.875 * 2**30``                            product of the two
t = (m - S) M + t0    ``< 2**31``                                     0.875 * 2**31 + 0.6 * 2**24
y = S A (per-token)   ``<= 2**30``                                    A <= 2**16 / d
z (with a bias)       ``< 2**29 + 2**28``                             S M or y R / 2**32, bias clamped; or a mark
row sum l             ``< 2**24`` (8 bits), ``< 2**31`` (15 bits)     N <= 65536
accumulator O         ``< 2**31``                                     255 * 128 * 65536
====================  ==============================================  =======================

The last two are those of a section of :data:`SECTION_KEYS` keys. Longer rows are sums of up to 16 sections, in 64 bits.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from contextvars import ContextVar

import torch

SECTION_KEYS = 65536
"""Most keys whose sums fit 32 bits: 255 * 128 * 65536 < 2**31. Longer rows are added up section by section in 64 bits."""
MAX_KEYS = 1 << 20
"""Most keys in a row: eight times the sum of a value channel, 8 * 128 * 2**20 = 2**30, still fits 32 bits."""

MAX_HEAD_DIM = 512
"""Most channels of a head. The multiplier of a score has 57344 / 512 = 112 steps there, half with a bias."""
MULTIPLIER_BUDGET = 57344
MAX_FRACTION_BITS = 24
"""Three bytes: an exponent with as many has its octaves in a byte of their own."""
BIAS_FRACTION_BITS = 16
BIAS_LIMIT = 1 << 28
BIAS_MASKED = -(1 << 30)
"""Fixed-point bias of a key that takes no part (minus infinity)."""
BIAS_POISON = 1 << 30
"""Fixed-point bias that marks a NaN or plus infinity; its row comes out as NaN."""
BIAS_EVEN = BIAS_POISON - 1
"""Fixed-point bias of keys that share their row evenly, whatever their scores: a bias beside which these are nothing."""
MOST_BIAS_MAXIMUM = 1024.0
"""A row whose largest bias (nats) is further than this from 0 is taken relative to it: only differences count."""
LEAST_EVEN_MAXIMUM = 2.0**64
"""From here on a row's largest bias (nats) swallows every score, in float64 as well."""
SCORE_POISON = 1 << 30
"""What a poisoned score is set to: above every other."""
SCORE_MASKED = -(1 << 31)


Observer = Callable[[str, torch.Tensor, int, int], None]
"""Is called with a quantity's name, its values and the ends of its declared range."""
_observer: ContextVar[Observer | None] = ContextVar("_observer", default=None)


@contextlib.contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Show ``observer`` every named quantity that the reference computes in the block, and require all declared ranges."""
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


class Checker:
    """Raises when an integer tensor leaves its declared range (the reference's checked mode)."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled

    def __call__(self, name: str, x: torch.Tensor, low: int, high: int) -> torch.Tensor:
        """Return ``x``; when enabled or :func:`observed`, first require ``low <= x <= high`` everywhere.

        Raises:
            OverflowError: an element lies outside; the message names the quantity and its extremes.
        """
        observer = _observer.get()
        if (self.enabled or observer is not None) and x.numel():
            got_low, got_high = int(x.min()), int(x.max())
            if got_low < low or got_high > high:
                raise OverflowError(f"{name} spans [{got_low}, {got_high}], declared [{low}, {high}]")
        if observer is not None:
            observer(name, x, low, high)
        return x


def split_float(value: float) -> tuple[int, int]:
    """Split a positive Python float into a 24-bit mantissa and an exponent, ``value ~ mantissa * 2**exponent``."""
    fraction, exponent = math.frexp(value)
    mantissa = round(fraction * 2**24)
    if mantissa == 1 << 24:
        mantissa, exponent = 1 << 23, exponent + 1
    return mantissa, exponent - 24


def split_scale(scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split float32 scales into mantissa (``[2**23, 2**24)``) and exponent, both int64, by their bits."""
    bits = scale.contiguous().view(torch.int32).to(torch.int64)
    return (bits & 0x7FFFFF) | 0x800000, ((bits >> 23) & 0xFF) - 150


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """Return ``2**exponent`` as float32, by its bits; ``-126 <= exponent <= 127``."""
    return ((exponent.to(torch.int32) + 127) << 23).view(torch.float32)


def times_power_of_two(x: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    """Return ``x * 2**exponent`` for float32 ``x`` and ``-250 <= exponent <= 250``.

    Exact unless the result (or, on the way, half the exponent's) is no normal float32. ``torch.ldexp`` computes in
    PyTorch's default dtype, and ``2**exponent`` itself may be none of float32's.
    """
    half = exponent >> 1
    return x * power_of_two(half) * power_of_two(exponent - half)


def usable_scale(scale: torch.Tensor) -> torch.Tensor:
    """Tell which float32 scales are positive and finite, by their bits (bool, same shape)."""
    bits = scale.contiguous().view(torch.int32)
    return (bits > 0) & (bits < 0x7F800000)


def multiply_high(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the high 32 bits of the 64-bit product of two signed 32-bit integers (floor), as int64."""
    return (a.to(torch.int64) * b.to(torch.int64)) >> 32


def multiply_round(a: torch.Tensor, b: torch.Tensor | int, shift: int = 32) -> torch.Tensor:
    """Return the product of two signed 32-bit integers, shifted right and rounded half up: int64, below ``2**31`` where used.

    One operation of integer machines: TOSA's ``MUL``, and its ``RESCALE`` with ``SINGLE_ROUND``.
    """
    product = a.to(torch.int64) * (b.to(torch.int64) if isinstance(b, torch.Tensor) else b)
    return (product + (1 << (shift - 1))) >> shift


def round_shift(x: torch.Tensor, shift: torch.Tensor | int) -> torch.Tensor:
    """Shift right by ``shift >= 1``, rounding half up, without forming ``x + half``."""
    return ((x >> (shift - 1)) + 1) >> 1


def combine_scales(
    query: tuple[torch.Tensor, torch.Tensor], key: tuple[torch.Tensor, torch.Tensor], constant: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Multiply three (mantissa, exponent) pairs: ``s = R * 2**-E`` with ``2**30 <= R < 2**31``.

    Args:
        query: mantissa and exponent of the query scale.
        key: the same of the key scale, broadcastable.
        constant: the same of ``scale * log2(e)``.

    Returns:
        R and E, int64, of the broadcast shape. The relative error of R is below 2**-21.
    """
    # key and constant first: a kernel forms their product once, the rest for every row
    product = (((key[0] * constant[0]) >> 22) * query[0]) >> 22
    product = product << 3
    extra = (product < 1 << 30).to(torch.int64) + (product < 1 << 29).to(torch.int64)
    exponent = query[1] + key[1] + constant[1] + 44 - 3 - extra
    return product << extra, -exponent


def most_multiplier(head_dim: int, biased: bool) -> int:
    """Return the bound on M: a bias shares the 32 bits of a score, which costs M one of them."""
    return (MULTIPLIER_BUDGET // 2 if biased else MULTIPLIER_BUDGET) // head_dim


def narrow_multiplier(
    mantissa: torch.Tensor, exponent: torch.Tensor, head_dim: int, biased: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn ``s = R * 2**-E`` into the multiplier and shift of one 32-bit multiply-add per score.

    Returns:
        ``(M, F)`` with ``M = round(s * 2**F) <= most_multiplier(head_dim, biased)`` and ``0 <= F <= 24``, F as large as the
        bound on M lets it be. For scales so large that F would be negative M is the bound and F is 0:
        two different scores are then already more than 200 octaves apart.
    """
    most = most_multiplier(head_dim, biased)
    shift = torch.full_like(mantissa, 31 - most.bit_length())
    shift = shift + (round_shift(mantissa, shift) > most).to(torch.int64)
    fraction = exponent - shift
    shift = (shift + (fraction - MAX_FRACTION_BITS).clamp(min=0)).clamp(max=33)
    multiplier = torch.where(fraction < 0, most, round_shift(mantissa, shift))
    return multiplier, fraction.clamp(0, MAX_FRACTION_BITS)


def column_bits(head_dim: int) -> int:
    """Return how many bits a per-key multiplier A may have: ``2**bits * head_dim <= 2**16``."""
    return (65536 // head_dim).bit_length() - 1


def column_multiplier(scale: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Turn per-token key scales into small integer multipliers and one common reference scale per head.

    Args:
        scale: float32, shape (batch, heads, keys, 1).

    Returns:
        A: int64 ``(batch, heads, 1, keys)`` with ``A <= 2**column_bits``; and the (mantissa, exponent) of the
        reference, shape ``(batch, heads, 1, 1)``, so that ``s_K[j] ~ A[j] * 2**-column_bits * reference``.
    """
    mantissa, exponent = split_scale(scale)
    largest = exponent.amax(dim=2, keepdim=True)
    shift = (24 - column_bits(head_dim) + largest - exponent).clamp(max=31)
    multiplier = round_shift(mantissa, shift)
    return multiplier.mT, (torch.full_like(largest, 1 << 23), largest + 1)


def wide_multiplier(
    mantissa: torch.Tensor, exponent: torch.Tensor, head_dim: int, most_fraction_bits: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn ``s = R * 2**-E`` into the multiplier of one multiply-high on ``y = S * A``.

    Returns:
        ``(R, F)`` such that ``(y * R) >> 32`` is the score in the log2 domain with F fraction bits,
        ``0 <= F <= most_fraction_bits``.
    """
    fraction = exponent + column_bits(head_dim) - 32
    excess = (fraction - most_fraction_bits).clamp(0, 31)
    multiplier = torch.where(fraction < 0, (1 << 31) - 1, mantissa >> excess)
    return multiplier, fraction.clamp(0, most_fraction_bits)


def bit_length(x: torch.Tensor) -> torch.Tensor:
    """Return the bit length of ``0 <= x < 2**63`` (0 for 0), int64."""
    x = x.to(torch.int64)
    length = torch.zeros_like(x)
    for step in (32, 16, 8, 4, 2, 1):
        big = x >= 1 << step
        length = torch.where(big, length + step, length)
        x = torch.where(big, x >> step, x)
    return length + x


RECIPROCAL_START = 1515870810
RECIPROCAL_SLOPE = 2021161080


def reciprocal(divisor: torch.Tensor) -> torch.Tensor:
    """Return about ``2**60 / divisor`` for ``2**30 <= divisor < 2**31``: no division, three Newton steps.

    The start ``48/17 - 32/17 d`` is the minimax line on [1/2, 1); every step squares its error of 1/17. The
    result lies within ``2**-27`` of the exact reciprocal, relatively.
    """
    x = RECIPROCAL_START - multiply_round(divisor, RECIPROCAL_SLOPE)
    for _ in range(3):
        error = (1 << 28) - multiply_round(divisor, x)
        x = x + multiply_round(x, error, 28)
    return x


def row_inverse(denominator: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``(bits, x)`` with ``1 / denominator ~ x * 2**-(29 + bits)``, ``2**29 <= x <= 2**30 + 1``.

    Args:
        denominator: int64 in ``[0, 2**62)``, of which the upper 31 bits count; where it is 0 the result is that of 1 with no
            bits.
    """
    bits = bit_length(denominator)
    upper = torch.where(denominator > 0, denominator, 1) >> (bits - 31).clamp(min=0)
    return bits, reciprocal(upper << (31 - bits.clamp(min=1)).clamp(min=0))


def left_aligned(numerator: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Return ``floor(numerator * 2**(24 - bits))`` of int64 numerators: below ``2**31`` in magnitude for a quotient.

    Args:
        numerator: int64, ``|numerator| < 2**(bits + 7)``.
        bits: of the denominator, :func:`row_inverse`.
    """
    return (numerator << (24 - bits).clamp(min=0)) >> (bits - 24).clamp(min=0)


def floored_quotient(numerator: torch.Tensor, denominator: torch.Tensor) -> torch.Tensor:
    """Return ``floor(numerator / denominator)``, exactly; 0 where the denominator is 0.

    The reciprocal's quotient is a hair off; one remainder puts the floor right.

    Args:
        numerator: int64, ``|numerator| <= 128 * denominator``.
        denominator: int64 in ``[0, 2**31)``, broadcastable.
    """
    bits, inverse = row_inverse(denominator)
    floor = multiply_high(left_aligned(numerator, bits), inverse) >> 21
    remainder = numerator - floor * denominator
    floor = floor + (remainder >= denominator).to(torch.int64) - (remainder < 0).to(torch.int64)
    return torch.where(denominator > 0, floor, 0)


def output_multiplier(value_scale: torch.Tensor, output_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn ``s_V / s_O`` into a multiplier and a shift for :func:`requantize`.

    Returns:
        ``(R, shift)`` int64 of the broadcast shape, ``2**30 <= R < 2**31``, ``0 <= shift <= 31``.
    """
    value, value_exponent = split_scale(value_scale)
    output, output_exponent = split_scale(output_scale)
    ratio = multiply_high(value << 7, reciprocal(output << 7)) << 2
    small = ratio < 1 << 30
    exponent = 30 - (value_exponent - output_exponent) + small.to(torch.int64)
    return torch.where(small, ratio << 1, ratio), (exponent - 11).clamp(0, 31)


def requantize(scaled: torch.Tensor, multiplier: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """Bring an output to int8 at the output scale: one multiply-high, rounded half up, saturated to [-128, 127].

    Args:
        scaled: int64, :func:`left_aligned` O.
        multiplier: int64, ``mul(x, R, 32)``: the row's inverse times the channel's :func:`output_multiplier`.
        shift: of :func:`output_multiplier`.
    """
    wide = multiply_high(scaled, multiplier)
    rounded = torch.where(shift > 0, round_shift(wide, shift.clamp(min=1)), wide)
    return rounded.clamp(-128, 127)


def probability_constants(exponential: str, bits: int) -> tuple[int, int, int]:
    """Return ``(offset, up, down)``: how an exponential's mantissa becomes a ``bits``-wide probability.

    ``offset`` (in 1/512 octaves) is added to every exponent so that the largest weight rounds to at most
    ``2**bits - 1`` instead of wrapping, and sits in the middle of its 1/256-octave cell; a common factor of
    all weights cancels in the normalisation. A probability is ``(mantissa * 2**(up - q)) >> down``, rounded.
    """
    if exponential == "quadratic":
        return {7: (303, 12, 23), 8: (301, 13, 23), 15: (299, 13, 16)}[bits]
    return {7: (1, 14, 23), 8: (1, 14, 23), 15: (1, 7, 16)}[bits]


def exponent_offset(offset: int, fraction_bits: torch.Tensor) -> torch.Tensor:
    """Bring ``offset`` (1/512 octaves) to ``fraction_bits`` fraction bits, rounding up so that it never vanishes."""
    return ((offset << fraction_bits) + 511) >> 9


def exp2_mantissa(fraction: torch.Tensor, exponential: str, bits: int) -> torch.Tensor:
    """Return the mantissa of ``2**-f`` for ``f = fraction / 256``, ``0 <= fraction <= 255``.

    ``"linear"`` (Equation 7, the chord between two integers): ``(512 - fraction) * (2**bits - 1)``.
    ``"quadratic"``: with ``g = 511 - fraction``, ``g**2 + 2**17``. That is ``3 * 2**16`` times
    ``1 + n (n + 2) / 3`` at ``n = 1 - f``, the parabola through 2**0 and 2**1 that one square can give.
    """
    if exponential == "linear":
        return (512 - fraction) * ((1 << bits) - 1)
    mantissa = 511 - fraction
    return mantissa * mantissa + (1 << 17)


def _fraction_of_octave(t: torch.Tensor, fraction_bits: torch.Tensor) -> torch.Tensor:
    """Return the top 8 of the ``fraction_bits`` fraction bits of ``t``; zeros stand for those it does not have."""
    return ((t << (8 - fraction_bits).clamp(min=0)) >> (fraction_bits - 8).clamp(min=0)) & 255


def probability(t: torch.Tensor, fraction_bits: torch.Tensor, exponential: str, bits: int, nearest: bool) -> torch.Tensor:
    """Turn fixed-point exponents into unnormalised probabilities, ``P ~ (2**bits - 1) * 2**(-t / 2**F)``.

    Args:
        t: integers in ``[0, 2**31)`` with ``fraction_bits`` fraction bits, offset included
            (:func:`exponent_offset`).
        fraction_bits: F, broadcastable, 0 to 24.
        exponential, bits, nearest: see :class:`qflash.Recipe`.

    Returns:
        integers in ``[0, 2**bits)``, of ``t``'s shape and dtype. With exact row sums, which the default recipe takes for more
        than 64 keys, :func:`qflash.reference` rounds what :func:`fine_probability` returns in place of this.
    """
    _, up, down = probability_constants(exponential, bits)
    fraction_bits = fraction_bits.to(t.dtype)
    octaves = (t >> fraction_bits).clamp(max=31)
    fraction = _fraction_of_octave(t, fraction_bits)
    mantissa = exp2_mantissa(fraction, exponential, bits)
    if bits == 15:
        # the mantissa needs 32 unsigned bits once shifted up; its tail below the last bit of P is kept
        value = ((mantissa.to(torch.int64) << up) >> octaves).to(t.dtype)
    else:
        value = mantissa * ((1 << up) >> octaves)
    return (value + (1 << (down - 1)) if nearest else value) >> down


FINE_BITS = 7
"""Fraction bits of a probability before it is rounded, where the row sum takes it so (``row_sum="exact"``)."""
MOST_ROUNDED_KEYS = 64
"""Most keys of a row whose sum is always that of rounded probabilities: what so few of them lose is small."""


def fine_probability(t: torch.Tensor, fraction_bits: torch.Tensor, exponential: str, bits: int) -> torch.Tensor:
    """Return the probabilities of :func:`probability` before rounding, with :data:`FINE_BITS` fraction bits, floored.

    ``(w + 64) >> 7`` of the result w is what :func:`probability` returns for ``nearest``.
    """
    _, up, down = probability_constants(exponential, bits)
    fraction_bits = fraction_bits.to(t.dtype)
    octaves = (t >> fraction_bits).clamp(max=24)
    fraction = _fraction_of_octave(t, fraction_bits)
    return exp2_mantissa(fraction, exponential, bits) >> (octaves + (down - FINE_BITS - up))


def inverse_count(keys: int) -> int:
    """Return ``2**31 / keys``, floored, below ``2**31``: the multiplier of :func:`twice_mean`."""
    return min(2**31 // keys, 2**31 - 1)


def twice_mean(sums: torch.Tensor, keys: int) -> torch.Tensor:
    """Return twice the mean of ``keys`` int8 values from their sums, rounded: int64, at most 256 in magnitude."""
    return round_shift(multiply_high(sums << 3, torch.full_like(sums, inverse_count(keys))), 1)


def fused_multiply_add(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Return ``a * b + c`` of float32 tensors, rounded once to float32 like the instruction.

    float64 holds the product exactly. Its sum with ``c`` is rounded to odd (where it is not exact, the neighbour with an odd
    mantissa is taken), and then rounding once more to float32 is as good as rounding once.
    """
    product, addend = a.to(torch.float64) * b.to(torch.float64), c.to(torch.float64)
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    bits = total.contiguous().view(torch.int64)
    inexact = (error != 0) & total.isfinite() & ((bits & 1) == 0)
    step = torch.where((error > 0) == (total > 0), 1, -1)
    return (bits + torch.where(inexact, step, 0)).view(torch.float64).to(torch.float32)


def release_factor(step: torch.Tensor, fraction_bits: torch.Tensor) -> torch.Tensor:
    """Return ScaleRelease's factor ``2**(-step / 2**F)`` with 24 fraction bits, linear, exactly 1 at 0.

    The paper's alpha (Algorithm 1, step 4; appendix A.2.1), without the offset of the probabilities.
    """
    fraction_bits = fraction_bits.to(step.dtype)
    octaves = (step >> fraction_bits).clamp(max=31)
    fraction = _fraction_of_octave(step, fraction_bits)
    return ((512 - fraction) << 15) >> octaves
