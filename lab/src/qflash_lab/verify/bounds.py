"""Bounds of every integer that attention and integer networks form: ``python -m qflash_lab.verify.bounds``.

Computes docs/algorithm.md, step by step, on integer intervals instead of integers, with the constants and, where they
work on Python's integers, the functions of :mod:`.specification.fixed_point` and :mod:`.specification.layers`. It covers every
recipe, every head dimension, rows of every length, of one section or several, and any scales and values. Where two quantities
depend on each other (an output's sum on the row's, a deviation on the variance) the relation is used, and said beside it.

An interval says what may happen, and a proof that it fits its type needs no input. ``tests/lab/verify/test_bounds.py`` has
inputs that come close to the ends.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import torch

from qflash.specification import fixed_point as fp
from qflash.specification import layers as op
from qflash.specification import rotary
from qflash.specification.gated import GATE_BITS, PRODUCT_SHIFT
from qflash.specification.recipe import Recipe

WIDTHS = {
    "int8": (-(1 << 7), (1 << 7) - 1),
    "uint8": (0, (1 << 8) - 1),
    "int16": (-(1 << 15), (1 << 15) - 1),
    "int32": (-(1 << 31), (1 << 31) - 1),
    "uint32": (0, (1 << 32) - 1),
    "int48": (-(1 << 47), (1 << 47) - 1),
    "int64": (-(1 << 63), (1 << 63) - 1),
}
"""Types of the kernels, by name, with their ends; they keep what int48 holds, an accumulator of TOSA, in 64 bits."""


class Interval(NamedTuple):
    """All integers from ``low`` to ``high``."""

    low: int
    high: int

    def __add__(self, other: object) -> Interval:
        """Return the interval of sums."""
        it = _interval(other)
        return Interval(self.low + it.low, self.high + it.high)

    def __neg__(self) -> Interval:
        return Interval(-self.high, -self.low)

    def __sub__(self, other: object) -> Interval:
        return self + -_interval(other)

    def __mul__(self, other: object) -> Interval:
        """Return the interval of products of numbers that have nothing to do with each other."""
        it = _interval(other)
        ends = [a * b for a in self for b in it]
        return Interval(min(ends), max(ends))

    def __lshift__(self, by: int) -> Interval:
        return Interval(self.low << by, self.high << by)

    def __rshift__(self, by: int) -> Interval:
        return Interval(self.low >> by, self.high >> by)

    def __or__(self, other: object) -> Interval:
        """Return the smallest interval around both."""
        it = _interval(other)
        return Interval(min(self.low, it.low), max(self.high, it.high))

    @property
    def magnitude(self) -> int:
        """The largest absolute value."""
        return max(abs(self.low), abs(self.high))


def _interval(x: object) -> Interval:
    if isinstance(x, Interval):
        return x
    assert isinstance(x, int), x
    return Interval(x, x)


def around(x: int) -> Interval:
    """Return the interval from ``-x`` to ``x``."""
    return Interval(-x, x)


def high_product(a: Interval, b: Interval) -> Interval:
    """Return ``mulhi``: the high 32 bits of products."""
    return (a * b) >> 32


def rounded_product(a: Interval, b: object, shift: int) -> Interval:
    """Return ``mul``: products, shifted right and rounded half up."""
    return (a * b + (1 << (shift - 1))) >> shift


INT8 = Interval(-128, 127)

_integers: Any = fp
"""Functions that are written for tensors, and work on Python's integers and on intervals as well."""


@dataclasses.dataclass
class Quantity:
    """An intermediate result over all cases.

    Attributes:
        step: of docs/algorithm.md, or the operator of docs/integer_network.md.
        name: as there.
        range: what it may be.
        width: its narrowest type in any kernel.
        case: where its magnitude is largest.
    """

    step: str
    name: str
    range: Interval
    width: str
    case: str

    @property
    def bits_left(self) -> float:
        """How many times it could be doubled before it left its type."""
        low, high = WIDTHS[self.width]
        ends = ((low, self.range.low), (high + 1, self.range.high))
        return min((math.log2(end / value) for end, value in ends if value * end > 0), default=math.inf)


class Quantities:
    """Quantities in the order in which they are first met.

    Attributes:
        quantities: by step and name.
    """

    def __init__(self) -> None:
        self.quantities: dict[tuple[str, str], Quantity] = {}

    def __call__(self, step: str, name: str, value: Interval, width: str, case: str = "") -> Interval:
        """Note what a quantity may be in one case; return that.

        Raises:
            OverflowError: it does not fit its type.
        """
        low, high = WIDTHS[width]
        if value.low > value.high:
            raise ValueError(f"{name} (step {step}) would be from {value.low} to {value.high}")
        if value.low < low or value.high > high:
            raise OverflowError(f"{name} (step {step}; {case or 'any case'}) spans {tuple(value)}, which {width} does not hold")
        known = self.quantities.get((step, name))
        if known is None:
            self.quantities[step, name] = Quantity(step, name, value, width, case)
            return value
        assert known.width == width, (name, width)
        if value.magnitude > known.range.magnitude:
            known.case = case
        known.range = known.range | value
        return value


def recipes() -> Iterator[Recipe]:
    """Give every recipe whose arithmetic on int8 tensors differs."""
    for exponential, bits, rounding, row_sum, normalization, block, output in itertools.product(
        ("linear", "quadratic"), (7, 8, 15), ("nearest", "floor"), ("exact", "rounded"), ("two_pass", "online"),
        (32, 64, 128, 256), ("accumulator", "value_scale"),
    ):  # fmt: skip
        if normalization == "two_pass" and block != Recipe().key_block:
            continue
        try:
            yield Recipe(
                exponential=exponential, probability_bits=bits, probability_rounding=rounding, row_sum=row_sum,
                normalization=normalization, key_block=block, output=output,
            )  # fmt: skip
        except ValueError:  # choices that exclude each other
            continue


def bound_scales(note: Quantities) -> None:
    """Step 2, once a row: the product of the scales."""
    mantissa = note("2", "mantissas of the scales", Interval(1 << 23, (1 << 24) - 1), "int32")
    first = note("2", "mantissa(s_K) · mantissa(scale)", mantissa * mantissa, "int64") >> 22
    second = note("2", "(… >> 22) · mantissa(s_Q)", first * mantissa, "int64") >> 22
    product = note("2", "(… >> 22) << 3", second << 3, "int32")
    # shifted up by a bit below 2**30 and by another below 2**29
    parts = Interval(1 << 30, product.high), Interval(1 << 29, (1 << 30) - 1) << 1, Interval(product.low, (1 << 29) - 1) << 2
    scale = note("2", "R", _union(iter(parts)), "int32")
    assert scale.low == 1 << 30


def _union(parts: Iterator[Interval]) -> Interval:
    whole = next(parts)
    for part in parts:
        whole = whole | part
    return whole


def _offsets() -> list[int]:
    """Return all offsets c0 of an exponent."""
    return [fp.probability_constants(exponential, bits)[0] for exponential in ("linear", "quadratic") for bits in (7, 8, 15)]


def bound_scores(note: Quantities, head_dim: int) -> None:
    """Steps 2 to 4, once a score, for the four ways from a product of query and key to an exponent."""
    d, case = head_dim, f"d = {head_dim}"
    scale = Interval(1 << 30, (1 << 31) - 1)
    # -128 * 127 is the lowest product of two int8, -128 * -128 the highest
    score = note("2", "S", INT8 * INT8 * d, "int32", case)
    # VNNI takes query + 128, and starts from -128 times the sum of the key's channels
    begin = note("2", "-128 · Σ k (VNNI)", INT8 * -128 * d, "int32", case)
    note("2", "partial sums of S (VNNI)", begin + Interval(0, 255) * INT8 * d, "int32", case)
    deficit = Interval(0, score.high - score.low)

    def exponent(t: Interval, most_fraction_bits: int = fp.MAX_FRACTION_BITS) -> None:
        offset = max(_integers.exponent_offset(c0, most_fraction_bits) for c0 in _offsets())
        note("4", "t", t + note("4", "t0", Interval(1, int(offset)), "int32", case), "int32", case)

    for biased in (False, True):
        most = fp.most_multiplier(d, biased)
        # the shift begins where M has most's bits and takes one more if that is too much
        shift = 32 - most.bit_length()
        assert _integers.round_shift(scale.high, shift) <= most, "M leaves its budget"
        multiplier = note("2", "M with a bias" if biased else "M", Interval(0, most), "int32", case)
        if biased:
            wide = note("2", "S · M with a bias", score * multiplier, "int32", case)
            _bound_bias(note, wide, "one key scale", case, exponent)
        else:
            exponent(note("2", "(m - S) · M", deficit * multiplier, "int32", case))
            # in ONNX a hidden key has BIAS_MASKED in the place of this
            seen = note("3", "S · M of a visible key", score * multiplier, "int32", case)
            assert seen.low > fp.BIAS_MASKED, "a visible key would be taken for a hidden one"
    column_bits = fp.column_bits(d)
    column = note("2", "A", Interval(0, _integers.round_shift((1 << 24) - 1, 24 - column_bits)), "int32", case)
    y = note("2", "y = S · A", score * column, "int32", case)
    wide_scale = note("2", "R for y", Interval(0, scale.high), "int32", case)
    exponent(high_product(note("2", "m - y", Interval(0, y.high - y.low), "int32", case), wide_scale))
    _bound_bias(note, high_product(y, wide_scale), "a key scale a token", case, exponent)


def _bound_bias(note: Quantities, wide: Interval, way: str, case: str, exponent: Callable[[Interval, int], None]) -> None:
    bias = around(fp.BIAS_LIMIT)
    z = note("2", f"z, {way}", wide + bias, "int32", case)
    assert z.low > fp.BIAS_MASKED and z.high < fp.BIAS_EVEN, "an honest score would be taken for a mark"
    # a mark that is a row's maximum is above all honest scores; a masked key's exponent is not used
    most = Interval(z.low, max(z.high, fp.SCORE_POISON, fp.BIAS_EVEN))
    exponent(Interval(0, note("2", f"m - z, {way}", most - z, "int32", case).high), fp.BIAS_FRACTION_BITS)


@functools.lru_cache
def _probability_ranges(exponential: str, bits: int, nearest: bool) -> dict[str, Interval]:
    """Try every fraction and number of octaves."""
    offset, up, down = fp.probability_constants(exponential, bits)
    half = 1 << (down - 1) if nearest else 0
    # an exponent is never below its offset, which leaves out fractions before the first octave
    least = [_integers.exponent_offset(offset, f) for f in range(fp.MAX_FRACTION_BITS + 1)]
    first = min(((t << max(0, 8 - f)) >> max(0, f - 8)) & 255 for f, t in enumerate(least) if t >> f == 0)
    found: dict[str, set[int]] = {name: set() for name in ("g", "raised", "value", "rounded", "P", "w", "lost")}
    for octaves in range(32):
        for fraction in range(first if octaves == 0 else 0, 256):
            g = _integers.exp2_mantissa(fraction, exponential, bits)
            value = (g << up) >> octaves
            probability, fine = (value + half) >> down, value >> (down - fp.FINE_BITS)
            lost = fine - (probability << fp.FINE_BITS)
            for name, number in zip(found, (g, g << up, value, value + half, probability, fine, lost), strict=True):
                found[name].add(number)
    return {name: Interval(min(numbers), max(numbers)) for name, numbers in found.items()}


def bound_probabilities(note: Quantities, recipe: Recipe) -> tuple[Interval, Interval, Interval]:
    """Steps 4 and 5 over every fraction and number of octaves; return P, w and w - 128 P."""
    bits, exponential = recipe.probability_bits, recipe.exponential
    ranges = _probability_ranges(exponential, bits, recipe.probability_rounding == "nearest")
    case = f"{exponential}, {bits} bits"
    note("4", "g", ranges["g"], "int32", case)
    note("4", "g · 2^up", ranges["raised"], "uint32", case)
    note("4", "g · 2^(up - q)", ranges["value"], "int32", case)
    note("4", "g · 2^(up - q) + 2^(down - 1)", ranges["rounded"], "int32", case)
    p = note("4", f"P, {bits} bits", ranges["P"], "int32", case)
    assert p.high <= (1 << bits) - 1
    if bits == 7:
        note("5", "P as an operand, 7 bits", p, "int8", case)
    elif bits == 8:
        note("5", "127 - P as an operand, 8 bits", -p + 127, "int8", case)
        note("5", "P as an operand, 8 bits", p, "uint8", case)
    else:
        note("5", "high byte of P, 15 bits", p >> 8, "int8", case)
        note("5", "low byte of P less 128, 15 bits", Interval(-128, 127), "int8", case)
    if recipe.takes_exact_sum(fp.MAX_KEYS):
        note("4", "w", ranges["w"], "int32", case)
    return p, ranges["w"], ranges["lost"]


class RowSums(NamedTuple):
    """What normalisation takes, of rows of one kind of length.

    Attributes:
        row: the largest row sum.
        fine_bits: its fraction bits.
        numerator: the largest magnitude of an output's sum, at most 128 times the row sum.
        sections: whether rows have several sections.
    """

    row: int
    fine_bits: int
    numerator: int
    sections: bool


def bound_sums(note: Quantities, recipe: Recipe, p: Interval, w: Interval, lost: Interval, sections: bool) -> RowSums:
    """Steps 6 and 7 of the longest row of one section or, with ``sections``, of several: all sums grow with the row's length.

    The sums of a section fit the types of one. Those of several are added up in 64 bits, but for sums that fit 32 anyway.
    """
    keys, bits = fp.MAX_KEYS if sections else fp.SECTION_KEYS, recipe.probability_bits
    case = f"{recipe.exponential}, {bits} bits, N = {keys}"

    def sums(step: str, name: str, value: Interval, width: str, wide: str, where: str = case) -> Interval:
        return note(step, f"{name}, longer rows" if sections else name, value, wide if sections else width, where)

    row = (
        sums("6", "l, 15 bits", p * keys, "int32", "int64")
        if bits == 15
        else sums("6", "l, 7 and 8 bits", p * keys, "int32", "int32")
    )
    if recipe.normalization == "online":
        # every release rounds down: a unit a block
        blocks = -(-keys // recipe.key_block)
        where = f"{case}, blocks of {recipe.key_block}"
        o = sums("6", "O, online", p * INT8 * keys + Interval(-blocks, 0), "int32", "int64", where)
        factor = note("6", "alpha", Interval(0, 512 << 15), "int32", case)
        sums("6", "O · alpha", o * factor, "int64", "int64")
        sums("6", "l · alpha", row * factor, "int64", "int64")
        sums("6", "128 · l, online", row * 128, "int64", "int64")
        return RowSums(row.high, 0, 128 * row.high, sections)
    if bits == 15:
        if not sections:
            high = note("6", "O of the high byte, 15 bits", (p >> 8) * INT8 * keys, "int32", case)
            low = note("6", "O of the low byte, 15 bits", Interval(0, 255) * INT8 * keys, "int32", case)
            note("6", "256 · O_high + O_low", (high << 8) + low, "int64", case)
        o = sums("6", "O, 15 bits", p * INT8 * keys, "int64", "int64")
        return RowSums(row.high, 0, o.magnitude, sections)
    o = sums("6", "O, 7 and 8 bits", p * INT8 * keys, "int32", "int64")
    if bits == 8:
        sums("6", "Σ (127 - P) · V", Interval(127 - p.high, 127 - p.low) * INT8 * keys, "int32", "int64")
        sums("6", "128 · Σ V", INT8 * 128 * keys, "int32", "int64")
    if not recipe.takes_exact_sum(keys):
        return RowSums(row.high, 0, o.magnitude, sections)
    fine = sums("7", "Σ w", w * keys, "int32", "int64")
    whole = sums("7", "128 · l", row * (1 << fp.FINE_BITS), "int32", "int64")
    total = sums("7", "L", Interval(0, max(fine.high, whole.high)), "int32", "int64")
    # L - 128 l is what rounding took from each key
    missing = sums("7", "missing", Interval(0, lost.high * keys) >> (fp.FINE_BITS + 1), "int32", "int64")
    sums("7", "8 · Σ V", INT8 * 8 * keys, "int32", "int32")
    # N · floor(2^31 / N) ≤ 2^31 whatever N is: with the sum of N values that cancels N
    mean = note("7", "M", _integers.round_shift((INT8 * 8 * (1 << 31)) >> 32, 1), "int32", case)
    sums("7", "missing · M", missing * mean, "int32", "int64")
    # |O| ≤ 128 l, and |missing · M| ≤ 256 · missing ≤ L - 128 l
    sums("7", "O with the missing mass", around(total.high), "int32", "int64")
    return RowSums(total.high, fp.FINE_BITS, total.high, sections)


PIECES = 1 << 11
"""Parts of a Newton step's argument: interval arithmetic on each is narrow, although it forgets how x depends on D."""


def _pieces(low: int, high: int) -> Iterator[Interval]:
    step = -(-(high - low) // PIECES)
    for start in range(low, high, step):
        yield Interval(start, min(high, start + step) - 1)


def bound_reciprocal(note: Quantities) -> Interval:
    """Step 8, the reciprocal of every divisor; return its range."""
    found = []
    for divisor in _pieces(1 << 30, 1 << 31):
        note("8", "D", divisor, "int32")
        x = -rounded_product(divisor, fp.RECIPROCAL_SLOPE, 32) + fp.RECIPROCAL_START
        note("8", "x at the start", x, "int32")
        for _ in range(3):
            error = -note("8", "mul(D, x, 32)", rounded_product(divisor, x, 32), "int32") + (1 << 28)
            # x (2 - x D / 2^60) is at most 2^60 / D, whatever x is; half a unit of the error is x / 2^29
            most = -(-(1 << 60) // divisor.low) + (x.high >> 29) + 1
            x = x + rounded_product(x, note("8", "2^28 - mul(D, x, 32)", error, "int32"), 28)
            x = Interval(x.low, min(x.high, most))
        found.append(note("8", "x", x, "int32"))
    return _union(iter(found))


def bound_output(note: Quantities, recipe: Recipe, sums: RowSums, inverse: Interval) -> None:
    """Steps 8 and 9. An output's sum is at most 128 times the row sum, in the row sum's unit, for every row."""
    row, fine_bits, numerator, sections = sums
    bits = recipe.probability_bits
    case = f"{recipe.exponential}, {bits} bits{', exact row sum' if fine_bits else ''}{', longer rows' if sections else ''}"
    if bits == 15 and not sections:
        note("8", "O << 24, 15 bits", around(numerator) << 24, "int64", case)
    aligned = Interval(0, 0)
    for length in range(1, row.bit_length() + 1):
        largest = min(row, (1 << length) - 1)
        # |O| ≤ 128 l; with an exact row sum |O| ≤ L, which has the seven bits more
        most = largest if fine_bits else 128 * largest
        shift = length - fine_bits
        # a shift to the right floors
        aligned |= around(most) << (24 - shift) if shift < 24 else around(most) >> (shift - 24)
    name = "O << (24 - B), 15 bits" if bits == 15 else "O << (24 - B), exact row sum" if fine_bits else "O << (24 - B)"
    scaled = note("8", f"{name}, longer rows" if sections else name, aligned, "int32", case)
    ratio = note("9", "R of s_V / s_O", _output_ratio(note, inverse), "int32")
    if recipe.output == "value_scale":
        whole = note("8", "mulhi(O << (24 - B), x) >> 21", (scaled * inverse) >> 53, "int32", case)
        floor = note("8", "floor(O / l)", INT8 | Interval(-128, 128), "int32", case)
        note("8", "O - floor · l", around(numerator) - whole * row, "int64", case)
        by = note("9", "R >> 2", ratio >> 2, "int32")
        note("9", "mulhi of an output at s_V", high_product(note("9", "floor << 23", floor << 23, "int32"), by), "int32", case)
        return
    by = note("9", "mul(x, R, 32)", rounded_product(inverse, ratio, 32), "int32")
    out = note("9", "mulhi(O << (24 - B), mul(x, R, 32))", high_product(scaled, by), "int32", case)
    note("9", "the same with half a unit", out + 1, "int32", case)


def _output_ratio(note: Quantities, inverse: Interval) -> Interval:
    """Return the range of :func:`qflash.specification.fixed_point.output_multiplier`'s R."""
    value = note("9", "mantissa(s_V) << 7", Interval(1 << 23, (1 << 24) - 1) << 7, "int32")
    ratio = note("9", "mulhi(mantissa(s_V) << 7, x) << 2", high_product(value, inverse) << 2, "int32")
    return Interval(1 << 30, ratio.high) | (Interval(ratio.low, (1 << 30) - 1) << 1)


def bound_attention(head_dims: Sequence[int] | None = None) -> Quantities:
    """Bound every step of attention for every recipe; ``head_dims`` are all there may be if None.

    Raises:
        OverflowError: an intermediate does not fit its type.
    """
    note = Quantities()
    bound_scales(note)
    for head_dim in head_dims or range(1, fp.MAX_HEAD_DIM + 1):
        bound_scores(note, head_dim)
    inverse = None
    for recipe in recipes():
        probabilities = bound_probabilities(note, recipe)
        inverse = inverse or bound_reciprocal(note)
        for sections in (False, True):
            bound_output(note, recipe, bound_sums(note, recipe, *probabilities, sections), inverse)
    return note


def bound_linear(note: Quantities) -> None:
    """A linear layer, whose sums are held to their bound when it is made; activations' tails over every number there is."""
    int32 = Interval(*op.INT32)
    # -2^31 itself is no sum: 128 Σ|W| << left and |b| are below 2^31 together
    sums = note("linear", "(acc << left) + b", around((1 << 31) - 1), "int32", "every left")
    ratio = Interval(0, int32.high)
    u = note("linear", "mul((acc << left) + b, R, 32)", rounded_product(sums, ratio, 32), "int32", "every left")
    note("linear", "with a residual", u + Interval(*op.INT16), "int32", "every left")

    r = torch.arange(op.TAIL_END + 1, dtype=torch.int64, device="cpu")
    tails = {"GELU": _gelu_tail, "SiLU": _silu_tail}
    for name, tail in tails.items():

        def seen(quantity: str, x: torch.Tensor, name: str = name) -> torch.Tensor:
            note(name, quantity, Interval(int(x.min()), int(x.max())), "int32", "every r")
            return x

        note(name, "4096 - |u|", Interval(op.TAIL_END - u.magnitude, op.TAIL_END), "int32", "every u")
        found = tail(r, seen)
        value = Interval(-int(found.max()), op.ACTIVATION_LIMIT - int(found.min()))
        scale = Interval(0, op.MAX_ACTIVATION_MULTIPLIER)
        note(name, "g · M + B", value * scale + around((1 << 30) - 1), "int32", "every u")


def bound_gated(note: Quantities) -> None:
    """A gated product; the tails of activations are those of a linear layer."""
    int16, ratio = Interval(*op.INT16), Interval(0, (1 << 31) - 1)
    u = note("gated", "u = mul(gate, A, 28)", rounded_product(int16, ratio, GATE_BITS), "int32", "every gate")
    every = torch.arange(-op.TAIL_END, op.TAIL_END + 1, dtype=torch.int64, device="cpu")
    for name, (function, _) in op.ACTIVATIONS.items():
        found = function(every)
        made = Interval(int(found.min()), min(u.high, op.ACTIVATION_LIMIT))
        product = note("gated", "p = mul(f(u), v, 2)", rounded_product(made, int16, PRODUCT_SHIFT), "int32", name)
        total = note("gated", "p + B", product + around((1 << 30) - 1), "int32", name)
        note("gated", "mul(p + B, R, 32)", rounded_product(total, ratio, 32), "int32", name)


def _gelu_tail(r: torch.Tensor, seen: Callable[[str, torch.Tensor], torch.Tensor]) -> torch.Tensor:
    g, c, e, d = op.GELU_CONSTANTS
    z = seen("z", seen("r · r + half", r * r + (1 << 8)) >> 9)
    w = seen("w", seen("z · (59898 - 10 r) + half", z * (g - c * r) + (1 << 14)) >> 15)
    h = seen("h = (w << 2) + 18588 - 23 r", (w << 2) + (e - d * r))
    return seen("w · h + half", w * h + (1 << 19)) >> 20


def _silu_tail(r: torch.Tensor, seen: Callable[[str, torch.Tensor], torch.Tensor]) -> torch.Tensor:
    g, c, e, f = op.SILU_CONSTANTS
    z = seen("z", seen("r · r + half", r * r + (1 << 8)) >> 9)
    w = seen("w", seen("z · (12111 - 11 r + 2 z) + half", z * (g - c * r + 2 * z) + (1 << 14)) >> 15)
    h = seen("h = 118687 + 11 r - 5 z", e + c * r - f * z)
    return seen("w · h + half", w * h + (1 << 21)) >> 22


def bound_layer_norm(note: Quantities) -> None:
    """Layer normalisation of every number of channels."""
    int16, int32 = Interval(*op.INT16), Interval(*op.INT32)
    reach = int16.high - int16.low
    furthest = widest = 0
    roots = _interval(1 << 30)
    for channels in range(1, op.MAX_CHANNELS + 1):
        case = f"C = {channels}"
        by = op.row_constants(channels)
        inverse = note("norm", "I", _interval(by.inverse), "int32", case)
        roots |= note("norm", "K", _interval(by.root), "int32", case)
        total = note("norm", "S", int16 * channels, "int32", case)
        note("norm", "m", rounded_product(total, inverse, by.bits), "int32", case)
        note("norm", "C · h", int16 * channels, "int32", case)
        note("norm", "d = C · h - S", around((channels - 1) * reach), "int32", case)
        # m is half a unit and what I lacks from four times the mean
        lacks = Fraction(total.magnitude * abs(by.inverse * channels - (4 << by.bits)), channels << by.bits)
        off = Fraction(1, 2) + lacks
        e = note("norm", "e = 4 h - m", around(math.floor(Fraction(4 * (channels - 1) * reach, channels) + off)), "int32", case)
        p, q = note("norm", "p = e >> 9", e >> 9, "int32", case), Interval(0, 511)
        note("norm", "Σ p²", Interval(0, p.magnitude**2) * channels, "int32", case)
        note("norm", "Σ p q", p * q * channels, "int32", case)
        note("norm", "Σ q²", q * q * channels, "int32", case)
        # Σ e² is that about the mean, at most with half of the numbers at each end, and C times what m is off, squared
        variance = Interval(0, 4 * channels * reach**2 + math.ceil(channels * off**2))
        note("norm", "V = Σ e² + E", variance + Interval(0, op.MAX_EPSILON), "int48", case)
        # Σ d² is at most C² V / 16, so that one d² is at most C (C - 1) V / 16; V is below (v + 1) · 4^k, so with l = 8 - k - j
        # (d 2^l)² is below this, times v + 1
        square = channels * (channels - 1) << (12 - 2 * by.shift)
        furthest, widest = max(furthest, square), max(widest, square * by.root**2)
    scaled = note("norm", "d 2^l, rounded", around(math.isqrt(furthest << 30) + 1), "int32", "every C")
    # x is at most 2^44 / √v + 3, and with it x √(v + 1) at most 2^44 + 2^18; f has half a unit more than x K / 2^30, which
    # with d 2^l below 2^31 and the rounding of both products is less than 2
    assert scaled.high < 1 << 31
    most = ((math.isqrt(widest) + 1) * ((1 << 44) + (1 << 18)) >> 62) + 2
    n = note("norm", "N", around(most), "int32", f"C = {op.MAX_CHANNELS}")
    note("norm", "mul(N, G, 28) + B", rounded_product(n, int32, 28) + around((1 << 30) - 1), "int32", f"C = {op.MAX_CHANNELS}")
    waiting = list(_pieces(1 << 28, 1 << 30))
    while waiting:
        v = waiting.pop()
        found = _inverse_root(v)
        beyond = next((name for name, one in found.items() if one.magnitude > 1 << 30), None)
        if beyond is not None:
            # intervals may be too wide for the bound, single numbers are not
            if v.low == v.high:
                raise OverflowError(f"{beyond} (step norm; v = {v.low}) is {found[beyond].low}, beyond 2^30")
            middle = (v.low + v.high) // 2
            waiting += [Interval(v.low, middle), Interval(middle + 1, v.high)]
            continue
        for name, one in found.items():
            note("norm", name, one, "int32")
        note("norm", "f", rounded_product(found["x"], roots, 30), "int32")


def bound_rotary(note: Quantities) -> None:
    """Rotary positions with any angles."""
    product = note("rotary", "a cos", Interval(*op.INT16) * around(rotary.ONE), "int32")
    sums = note("rotary", "a cos - b sin", product + product, "int32")
    sums = note("rotary", "a cos - b sin + B", sums + around(rotary.MOST_OFFSET), "int32")
    note("rotary", "mul(a cos - b sin + B, R, 32)", rounded_product(sums, Interval(0, op.INT32[1]), 32), "int32")


def bound_rms_norm(note: Quantities) -> None:
    """Normalisation without a mean, of every number of channels, and what a residual adds; the rest is as with a mean."""
    int16, int32 = Interval(*op.INT16), Interval(*op.INT32)
    furthest = widest = 0
    for channels in range(1, op.MAX_CHANNELS + 1):
        case, by = f"C = {channels}", op.row_constants(channels)
        note("norm", "C · h", int16 * channels, "int32", case)
        p = note("norm", "p = e >> 9", (int16 * 4) >> 9, "int32", case)
        note("norm", "Σ p²", Interval(0, p.magnitude**2) * channels, "int32", case)
        variance = Interval(0, 16 * channels * int16.magnitude**2)
        note("norm", "V = Σ e² + E", variance + Interval(0, op.MAX_EPSILON - 1), "int48", case)
        # one d² is at most C² V / 16; see :func:`bound_layer_norm`
        square = channels**2 << (12 - 2 * by.shift)
        furthest, widest = max(furthest, square), max(widest, square * by.root**2)
    note("norm", "d 2^l, rounded", around(math.isqrt(furthest << 30) + 1), "int32", "every C")
    most = ((math.isqrt(widest) + 1) * ((1 << 44) + (1 << 18)) >> 62) + 2
    assert most <= op.most_normalised(False)
    n = note("norm", "N", around(most), "int32", f"C = {op.MAX_CHANNELS}")
    w = note("norm", "mul(N, G, 28) + B", rounded_product(n, int32, 28) + around((1 << 30) - 1), "int32", "without a mean")
    note("norm", "with a residual", Interval((w.low + 1) >> 1, (w.high + 1) >> 1) + int16, "int32", "n = 1")


def bound_narrow(note: Quantities) -> None:
    """A residual stream in another unit; :meth:`qflash.network.operators.narrow.Narrow.check_values` has the bound."""
    sums = note("narrow", "(h << left) + b", Interval(*op.INT32), "int32", "every left")
    note("narrow", "mul(…, R, 32)", rounded_product(sums, Interval(0, op.INT32[1]), 32), "int32", "every left")


def bound_embedding(note: Quantities) -> None:
    """Embeddings of ids: a row of the table and one of the positions."""
    int16 = Interval(*op.INT16)
    note("embedding", "table + position", int16 + int16, "int32", "every id")


def _inverse_root(v: Interval) -> dict[str, Interval]:
    """Return the quantities of :func:`qflash.specification.layers.inverse_root`."""
    found = {"v": v}
    x = -rounded_product(v, op.ROOT_SLOPE, 30) + op.ROOT_START
    for step in range(3):
        found[f"x before step {step + 1}"] = x
        found[f"mul(x, x, 30), step {step + 1}"] = square = rounded_product(x, x, 30)
        found[f"2^28 - mul(mul(x, x, 30), v, 30), step {step + 1}"] = error = -rounded_product(square, v, 30) + (1 << 28)
        # x + 2 x (1/4 - x² v) is at most 1 / (2 √v), whatever x is; a unit of the error is x / 2^29
        most = math.isqrt((1 << 88) // v.low) + (x.high >> 29) + 2
        x = x + rounded_product(x, error, 29)
        x = Interval(x.low, min(x.high, most))
    return found | {"x": x}


def bound_network() -> Quantities:
    """Bound the operators of integer networks.

    Raises:
        OverflowError: an intermediate does not fit its type.
    """
    note = Quantities()
    bound_linear(note)
    bound_gated(note)
    bound_layer_norm(note)
    bound_rotary(note)
    bound_rms_norm(note)
    bound_narrow(note)
    bound_embedding(note)
    return note


@dataclasses.dataclass
class Newton:
    """What a Newton iteration gives for arguments that were all tried, not bounded.

    Attributes:
        tried: how many arguments.
        low, high: ends of the results.
        worst: largest relative error.
    """

    tried: int
    low: int
    high: int
    worst: float


def try_reciprocal(step: int = 1) -> Newton:
    """Run :func:`.specification.fixed_point.reciprocal` on every ``step``-th divisor of ``[2**30, 2**31)``, and on the last."""
    return _try(1 << 30, 1 << 31, step, fp.reciprocal, lambda d: 2.0**60 / d)


def try_inverse_root(step: int = 1) -> Newton:
    """Run :func:`qflash.specification.layers.inverse_root` on every ``step``-th v of ``[2**28, 2**30)``, and on the last."""
    return _try(1 << 28, 1 << 30, step, op.inverse_root, lambda v: 2.0**44 / v.sqrt())


_Map = Callable[[torch.Tensor], torch.Tensor]


def _try(first: int, end: int, step: int, function: _Map, exact: _Map) -> Newton:
    found = Newton(0, 1 << 62, 0, 0.0)
    size = step << 20
    for start in range(first, end, size):
        x = torch.arange(start, min(end, start + size), step, dtype=torch.int64, device="cpu")
        if start + size >= end:
            x = torch.cat((x, torch.tensor([end - 1], dtype=torch.int64, device="cpu")))
        out = function(x)
        found.tried += x.numel()
        found.low, found.high = min(found.low, int(out.min())), max(found.high, int(out.max()))
        found.worst = max(found.worst, float((out / exact(x.double()) - 1).abs().max()))
    return found


def main() -> None:
    """Print the largest magnitude of every intermediate result, and the bits that its type has left."""
    parser = argparse.ArgumentParser(prog="python -m qflash_lab.verify.bounds", description=main.__doc__)
    parser.add_argument("--format", choices=("table", "json"), default="table")
    parser.add_argument("--every", action="store_true", help="run the Newton iterations on all their arguments, too; minutes")
    arguments = parser.parse_args()
    quantities = [*bound_attention().quantities.values(), *bound_network().quantities.values()]
    tried = {"reciprocal": try_reciprocal(), "inverse_root": try_inverse_root()} if arguments.every else {}
    if arguments.format == "json":
        rows = [{**dataclasses.asdict(one), "bits_left": round(one.bits_left, 3)} for one in quantities]
        found = {name: dataclasses.asdict(one) for name, one in tried.items()}
        print(
            json.dumps(
                {
                    "section_keys": fp.SECTION_KEYS,
                    "max_keys": fp.MAX_KEYS,
                    "max_head_dim": fp.MAX_HEAD_DIM,
                    "quantities": rows,
                    "newton": found,
                },
                indent=1,
            )
        )
        return
    for one in quantities:
        left = f"{one.bits_left:5.2f}" if math.isfinite(one.bits_left) else "  all"
        largest = one.range.magnitude
        size = f"2^{math.log2(largest):.3f}" if largest else "0"
        print(f"{one.step:>6}  {one.name:34}  {size:>9}  {one.width:6}  {left} bits left  {one.case}")
    for name, newton in tried.items():
        print(
            f"{name}: {newton.tried} arguments, {newton.low} to {newton.high}, relative error 2^{math.log2(newton.worst):.2f}"
        )


if __name__ == "__main__":
    main()
