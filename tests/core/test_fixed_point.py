"""The fixed-point arithmetic against Python's integers and fractions, its bounds, and its twin in Triton."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
import triton
import triton.language as tl

import qflash
from helpers import DEVICE, random_scales
from qflash.kernels.common import fixed_point as integer
from qflash.specification import fixed_point as fp
from qflash.specification import reference
from qflash.specification.attention_call import int8_call
from qflash.specification.recipe import Recipe

HEAD_DIMS = (1, 2, 3, 16, 31, 32, 48, 64, 65, 80, 127, 128, 255, 256, 512)
LOG2E = math.log2(math.e)
EXPONENTIALS = [(exponential, bits) for exponential in ("linear", "quadratic") for bits in (7, 8, 15)]


def combined(seed: int, count: int = 3000) -> tuple[torch.Tensor, torch.Tensor, list[Fraction]]:
    """Return R, E and the exact product for scales whose product spans 2**-60 to 2**40."""
    query, key = random_scales(count, seed, -30, 20), random_scales(count, seed + 1, -30, 20)
    constant = fp.split_float(0.125 * LOG2E)
    mantissa, exponent = fp.combine_scales(fp.split_scale(query), fp.split_scale(key), constant)
    exact = [Fraction(q) * Fraction(k) * Fraction(0.125 * LOG2E) for q, k in zip(query.tolist(), key.tolist(), strict=True)]
    return mantissa, exponent, exact


def relative_error(got: Fraction, exact: Fraction) -> float:
    return float(abs(got / exact - 1))


def test_split_scale_is_exact_for_normal_floats() -> None:
    scales = random_scales(2000, 0, -125, 120)
    mantissa, exponent = fp.split_scale(scales)
    assert int(mantissa.min()) >= 1 << 23
    assert int(mantissa.max()) < 1 << 24
    for scale, m, e in zip(scales.tolist(), mantissa.tolist(), exponent.tolist(), strict=True):
        assert Fraction(scale) == m * Fraction(2) ** e


@pytest.mark.parametrize("value", [1.0, 0.125, LOG2E, 1 - 2.0**-30, 2.0**-60, 3.1e17, 1 / 3])
def test_split_float_rounds_to_24_bits(value: float) -> None:
    mantissa, exponent = fp.split_float(value)
    assert 1 << 23 <= mantissa < 1 << 24
    assert relative_error(mantissa * Fraction(2) ** exponent, Fraction(value)) <= 2.0**-24


def test_combined_scale_keeps_its_declared_precision() -> None:
    mantissa, exponent, exact = combined(1)
    assert int(mantissa.min()) >= 1 << 30
    assert int(mantissa.max()) < 1 << 31
    worst = max(
        relative_error(m / Fraction(2) ** e, s) for m, e, s in zip(mantissa.tolist(), exponent.tolist(), exact, strict=True)
    )
    assert 2.0**-26 < worst < 2.0**-21


@pytest.mark.parametrize(
    ("mantissas", "octaves"), [((1 << 23,) * 3, 2), ((13753330, 8624188, 9953450), 1), ((10692762, 13477351, 16384578), 0)]
)
def test_combined_scale_at_the_lower_end_of_an_octave(mantissas: tuple[int, int, int], octaves: int) -> None:
    """Three mantissas whose product, floored twice, is a power of two."""
    query, key, constant = mantissas
    zero = torch.tensor([0])
    mantissa, exponent = fp.combine_scales((torch.tensor([query]), zero), (torch.tensor([key]), zero), (constant, 0))
    assert mantissa.tolist() == [1 << 30]
    assert exponent.tolist() == [octaves - 41]
    assert relative_error(Fraction(1 << 30) / Fraction(2) ** (octaves - 41), Fraction(query * key * constant)) < 2.0**-21


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_narrow_multiplier_is_the_rounded_scale_within_its_bounds(head_dim: int) -> None:
    mantissa, exponent, exact = combined(head_dim)
    multiplier, fraction_bits = fp.narrow_multiplier(mantissa, exponent, head_dim)
    most = 57344 // head_dim
    assert int(multiplier.min()) >= 0
    assert int(multiplier.max()) <= most
    assert int(fraction_bits.min()) >= 0
    assert int(fraction_bits.max()) <= fp.MAX_FRACTION_BITS
    seen = set()
    for m, f, s in zip(multiplier.tolist(), fraction_bits.tolist(), exact, strict=True):
        wanted = s * 2**f
        # a saturated scale already puts two different scores further apart than P can show
        if f == 0 and wanted > most + 1:
            assert m == most
            seen.add("saturated")
            continue
        assert abs(m - wanted) <= Fraction(1, 2) + Fraction(most, 2**21)
        if f < fp.MAX_FRACTION_BITS:
            # F is as large as the bound lets it be: one more bit would leave it
            assert 2 * wanted > most - 1
            seen.add("full")
        else:
            seen.add("tiny")
    assert seen == {"saturated", "full", "tiny"}


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("most_bits", [fp.BIAS_FRACTION_BITS, fp.MAX_FRACTION_BITS])
def test_wide_multiplier_stands_for_the_scale(head_dim: int, most_bits: int) -> None:
    mantissa, exponent, exact = combined(head_dim + 1000)
    multiplier, fraction_bits = fp.wide_multiplier(mantissa, exponent, head_dim, most_bits)
    assert int(multiplier.min()) >= 0
    assert int(multiplier.max()) < 1 << 31
    assert int(fraction_bits.min()) >= 0
    assert int(fraction_bits.max()) <= most_bits
    column = 1 << fp.column_bits(head_dim)
    checked = 0
    for m, f, s in zip(multiplier.tolist(), fraction_bits.tolist(), exact, strict=True):
        unit = s * 2**f * 2**32 / column
        if unit >= 1 << 31:
            assert (m, f) == ((1 << 31) - 1, 0)
            continue
        if f < most_bits:
            assert relative_error(Fraction(m), unit) < 2.0**-21
        assert abs(m - unit) <= 1 + unit / 2**21
        checked += 1
    assert checked > 1000


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_column_multipliers_stand_for_the_token_scales(head_dim: int) -> None:
    scale = random_scales(4 * 50, head_dim, -40, -20).reshape(2, 2, 50, 1)
    column, (mantissa, exponent) = fp.column_multiplier(scale, head_dim)
    bits = fp.column_bits(head_dim)
    assert (1 << bits) * head_dim <= 65536 < (2 << bits) * head_dim
    assert column.shape == (2, 2, 1, 50)
    assert int(column.min()) >= 0
    assert int(column.max()) <= 1 << bits
    unit = mantissa.double() * torch.exp2(exponent.double()) * 2.0**-bits
    error = (column.mT * unit - scale.double()).abs() / unit
    assert float(error.max()) <= 0.5
    assert int(column.amax(dim=-1).min()) >= 1 << (bits - 1)


def test_bit_length_is_pythons() -> None:
    ends = [n for bit in range(1, 62) for n in ((1 << bit) - 1, 1 << bit, (1 << bit) + 1, 3 << (bit - 1))]
    numbers = [*range(2000), *ends, (1 << 62) - 1]
    assert fp.bit_length(torch.tensor(numbers)).tolist() == [n.bit_length() for n in numbers]


def divisors() -> torch.Tensor:
    """Return normalised divisors: an even grid over [2**30, 2**31), its ends, and random ones."""
    generator = torch.Generator().manual_seed(0)
    low, high = 1 << 30, 1 << 31
    grid = torch.arange(low, high, 4093)
    random_ones = torch.randint(low, high, (200_000,), generator=generator)
    return torch.cat((grid, random_ones, torch.arange(low, low + 5000), torch.arange(high - 5000, high)))


def test_reciprocal_keeps_28_bits() -> None:
    divisor = divisors()
    got = fp.reciprocal(divisor)
    assert int(got.min()) >= 1 << 29
    assert int(got.max()) < 1 << 30
    # got * divisor < 2**62 is exact in int64
    error = (got * divisor - (1 << 60)).abs().max().item() / 2.0**60
    assert error < 2.0**-28


def rows_of_sums(width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Numerators and row sums as they occur, the largest quotients of +-128 among them."""
    generator = torch.Generator().manual_seed(width)
    most = 1 << (24 if width == 31 else 31)
    octave = torch.randint(0, most.bit_length() - 1, (40_000,), generator=generator)
    spread = ((1 << octave) * (1 + torch.rand(40_000, generator=generator, dtype=torch.float64))).long()
    denominator = torch.cat((torch.arange(1, 5000), spread, torch.arange(most - 3000, most)))
    share = torch.rand(denominator.shape, generator=generator, dtype=torch.float64) * 2 - 1
    share[::7] = 1
    share[3::7] = -1
    return (share * 128 * denominator).long(), denominator


@pytest.mark.parametrize("width", [31, 38])
def test_row_inverse_and_floored_quotient(width: int) -> None:
    numerator, denominator = rows_of_sums(width)
    bits, inverse = fp.row_inverse(denominator)
    assert int(inverse.min()) >= 1 << 29
    assert int(inverse.max()) < 1 << 30
    error = torch.ldexp(inverse.double() * denominator.double(), -29 - bits) - 1
    assert float(error.abs().max()) <= 2.0**-28
    assert int(((numerator << 24) >> bits).abs().max()) < 1 << 31
    assert torch.equal(fp.floored_quotient(numerator, denominator), torch.div(numerator, denominator, rounding_mode="floor"))


def test_the_inverse_of_an_empty_row_is_that_of_one() -> None:
    bits, inverse = fp.row_inverse(torch.tensor([0, 1]))
    assert bits.tolist() == [0, 1]
    assert int(inverse[0]) == int(inverse[1])


def test_quotient_of_an_empty_row_is_zero() -> None:
    assert fp.floored_quotient(torch.tensor([0, 5, -5]), torch.tensor([0, 0, 0])).tolist() == [0, 0, 0]


def test_output_multiplier_is_the_ratio_of_the_scales() -> None:
    value, output = random_scales(3000, 5, -20, 10), random_scales(3000, 6, -20, 10)
    multiplier, shift = fp.output_multiplier(value, output)
    assert int(multiplier.min()) >= 1 << 30
    assert int(multiplier.max()) < 1 << 31
    assert int(shift.min()) >= 0
    assert int(shift.max()) <= 31
    checked = unshifted = 0
    for v, o, m, s in zip(value.tolist(), output.tolist(), multiplier.tolist(), shift.tolist(), strict=True):
        ratio = Fraction(v) / Fraction(o)
        # a shift cannot be negative: what is larger yet saturates
        if s < 31 and ratio < 1 << 20:
            # requantize: O / l is scaled * x * 2**-53, and scaled * x * R goes down by 64 bits and the shift
            assert relative_error(Fraction(m, 2 ** (11 + s)), ratio) < 2.0**-23
            checked += 1
            unshifted += s == 0
    assert checked > 1000
    assert unshifted > 10


def test_requantize_is_the_exact_rounding_but_next_to_a_tie() -> None:
    value, output = random_scales(4000, 8, -8, 8), random_scales(4000, 9, -8, 8)
    multiplier, shift = fp.output_multiplier(value, output)
    numerator, denominator = (x[:4000] for x in rows_of_sums(31))
    bits, inverse = fp.row_inverse(denominator)
    got = fp.requantize((numerator << 24) >> bits, fp.multiply_round(inverse, multiplier), shift)
    near = 0
    for i, (v, o) in enumerate(zip(value.tolist(), output.tolist(), strict=True)):
        exact = Fraction(int(numerator[i]), int(denominator[i])) * Fraction(v) / Fraction(o)
        wanted = min(max(math.floor(exact + Fraction(1, 2)), -128), 127)
        if int(got[i]) != wanted:
            # the multiplier is 2**-23 off, so |exact| * 2**-23 and a unit of the last place decide a tie
            tie = abs(exact - math.floor(exact) - Fraction(1, 2))
            assert tie <= abs(exact) / 2**22 + Fraction(1, 2**10), (exact, int(got[i]))
            near += 1
    assert near < 10
    assert {-128, 127} <= set(got.tolist())


@pytest.mark.parametrize(("exponential", "bits"), EXPONENTIALS)
def test_largest_weight_fits_its_bits_for_every_precision(exponential: str, bits: int) -> None:
    offset, _, _ = fp.probability_constants(exponential, bits)
    fraction_bits = torch.arange(29)
    start = fp.exponent_offset(offset, fraction_bits)
    for rounding in (True, False):
        narrow = fp.probability(start.int(), fraction_bits, exponential, bits, rounding)
        wide = fp.probability(start, fraction_bits, exponential, bits, rounding)
        assert torch.equal(narrow.long(), wide), "int32 wrapped"
        assert int(wide.max()) <= (1 << bits) - 1
        assert int(wide.min()) >= (1 << bits - 1) - 1
        assert int(wide[9:].min()) >= int(0.65 * (1 << bits))


@pytest.mark.parametrize(("exponential", "bits"), EXPONENTIALS)
@pytest.mark.parametrize("fraction_bits", [0, 1, 4, 7, 8, 9, 12, 16])
def test_probability_is_the_power_of_two(exponential: str, bits: int, fraction_bits: int) -> None:
    offset, _, _ = fp.probability_constants(exponential, bits)
    fraction = torch.tensor(fraction_bits)
    start = int(fp.exponent_offset(offset, fraction))
    t = torch.arange(start, start + 20 * (1 << fraction_bits))
    exact = fp.probability(t, fraction, exponential, bits, True)
    assert torch.equal(fp.probability(t.int(), fraction, exponential, bits, True).long(), exact), "int32 wrapped"
    floored = fp.probability(t, fraction, exponential, bits, False)
    assert bool(((exact - floored) >= 0).all())
    assert bool(((exact - floored) <= 1).all())
    assert bool((exact[1:] <= exact[:-1]).all()), "not monotonic"
    # P = C 2**-t for some common factor C, up to the interpolation (all of its spread), the cell of 1/256 octave
    # that the fraction is read in, and the rounding
    weight = torch.exp2(-t.double() / (1 << fraction_bits))
    above = {"linear": 0.0615, "quadratic": 0.0054}[exponential]
    below = 2.0 ** (-1 / 256) if fraction_bits > 8 else 1.0
    least = ((exact - 0.5) / (weight * (1 + above))).max()
    most = ((exact + 0.5) / (weight * below)).min()
    assert float(least) <= float(most)
    # and the test can tell: half the declared interpolation error is not enough
    tight = ((exact - 0.5) / (weight * (1 + above / 2))).max()
    assert bits < 15 or fraction_bits < 4 or float(tight) > float(((exact + 0.5) / weight).min())


@pytest.mark.parametrize("fraction_bits", [0, 3, 8, 12])
def test_release_factor_is_one_at_zero_and_close_to_the_power_of_two(fraction_bits: int) -> None:
    step = torch.arange(0, 24 << fraction_bits)
    factor = fp.release_factor(step, torch.tensor(fraction_bits))
    assert int(factor[0]) == 1 << 24
    wanted = torch.exp2(24 - step.double() / (1 << fraction_bits))
    assert bool(((factor - wanted).abs() <= wanted * 0.0645 + 1).all())
    assert bool((factor[1:] <= factor[:-1]).all())


# --- int32 safety -------------------------------------------------------------------------------------------


def extreme(pattern: str, shape: tuple[int, ...]) -> torch.Tensor:
    if pattern == "signs":
        return torch.where(torch.arange(shape[-2])[:, None] % 2 == 0, 127, -128).expand(shape).to(torch.int8)
    return torch.full(shape, {"high": 127, "low": -128}[pattern], dtype=torch.int8)


def checked_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, recipe: Recipe, key_scale=None, mask=None
) -> None:
    one = torch.ones(1, 1, 1, 1)
    key_scale = one if key_scale is None else key_scale
    arguments = (query, one, key, key_scale, value, one, mask, False, scale, None, torch.float32, recipe)
    safe = reference.int8_attention(int8_call(*arguments), checked=True)
    assert torch.equal(safe, reference.int8_attention(int8_call(*arguments))), "int32 differs from int64"


SAFE_RECIPES = [
    Recipe(exponential="linear", probability_bits=7),
    Recipe(exponential="quadratic", probability_bits=8),
    Recipe(exponential="quadratic", probability_bits=15),
    qflash.PAPER.replace(key_block=256),
]


@pytest.mark.parametrize("recipe", SAFE_RECIPES, ids=["linear 7", "quadratic 8", "quadratic 15", "paper"])
@pytest.mark.parametrize("head_dim", [1, 2, 31, 64, 100, 255, 256, 512])
@pytest.mark.slow
def test_extreme_inputs_stay_inside_int32(head_dim: int, recipe: Recipe) -> None:
    for query, key, value in (
        ("high", "high", "high"),
        ("low", "low", "low"),
        ("low", "signs", "low"),
        ("high", "signs", "high"),
    ):
        tensors = (
            extreme(query, (1, 1, 2, head_dim)), extreme(key, (1, 1, 70, head_dim)), extreme(value, (1, 1, 70, head_dim)),
        )  # fmt: skip
        token_scales = torch.exp2(-torch.arange(70.0) % 40).reshape(1, 1, 70, 1)
        bias = torch.where(torch.arange(70) % 3 == 0, fp.BIAS_LIMIT, -fp.BIAS_LIMIT).to(torch.int32).reshape(1, 1, 1, 70)
        for scale in (2.0**-60, 2.0**-25, 0.03, 1.0, 2.0**60):
            checked_attention(*tensors, scale, recipe)
            checked_attention(*tensors, scale, recipe, key_scale=token_scales)
            checked_attention(*tensors, scale, recipe, mask=bias)


@pytest.mark.parametrize("recipe", SAFE_RECIPES, ids=["linear 7", "quadratic 8", "quadratic 15", "paper"])
@pytest.mark.parametrize("sign", ["high", "low"])
@pytest.mark.parametrize("keys", [fp.SECTION_KEYS, 2 * fp.SECTION_KEYS + 1])
def test_long_rows_stay_inside_their_bounds(keys: int, sign: str, recipe: Recipe) -> None:
    value = extreme(sign, (1, 1, keys, 2))
    query, key = extreme("high", (1, 1, 1, 2)), extreme("high", (1, 1, keys, 2))
    checked_attention(query, key, value, 1.0, recipe)


@pytest.mark.parametrize("recipe", SAFE_RECIPES[1:3], ids=["quadratic 8", "quadratic 15"])
def test_the_longest_row_stays_inside_its_bounds(recipe: Recipe) -> None:
    value, key = extreme("low", (1, 1, fp.MAX_KEYS, 1)), extreme("high", (1, 1, fp.MAX_KEYS, 1))
    checked_attention(extreme("high", (1, 1, 1, 1)), key, value, 1.0, recipe)


def test_checker_refuses_what_leaves_its_range() -> None:
    x = torch.tensor([-3, 5])
    assert fp.Checker(True)("x", x, -3, 5) is x
    assert fp.Checker(False)("x", x, 0, 0) is x
    for low, high in ((-2, 5), (-3, 4)):
        with pytest.raises(OverflowError, match="x spans"):
            fp.Checker(True)("x", x, low, high)


def test_observer_sees_what_the_reference_names_and_requires_its_range() -> None:
    x, seen = torch.tensor([-3, 5]), []
    with fp.observed(lambda *quantity: seen.append(quantity)):
        assert fp.Checker(False)("x", x, -3, 5) is x
        with pytest.raises(OverflowError, match="x spans"):
            fp.Checker(False)("x", x, -2, 5)
    fp.Checker(False)("x", x, -3, 5)
    assert seen == [("x", x, -3, 5)]


def test_checked_mode_notices_a_row_that_is_too_long() -> None:
    keys = fp.MAX_KEYS + 4096
    query, key = extreme("high", (1, 1, 1, 1)), extreme("high", (1, 1, keys, 1))
    with pytest.raises(OverflowError, match="8 times the sum of V"):
        checked_attention(query, key, extreme("low", (1, 1, keys, 1)), 1.0, SAFE_RECIPES[1])


def test_checked_mode_notices_a_multiplier_that_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp, "MULTIPLIER_BUDGET", 4 * fp.MULTIPLIER_BUDGET)
    query, key, value = (extreme(pattern, (1, 1, 2, 64)) for pattern in ("low", "signs", "low"))
    with pytest.raises(OverflowError, match="t spans"):
        checked_attention(query, key, value, 1.0, SAFE_RECIPES[1])


# --- the Triton twin ----------------------------------------------------------------------------------------

GUARD = DEVICE.type == "cpu"
LANES = 1024


@triton.jit
def twin_kernel(a_ptr, b_ptr, c_ptr, x_ptr, y_ptr, WHAT: tl.constexpr, HEAD_DIM: tl.constexpr, COLUMN_BITS: tl.constexpr, MOST: tl.constexpr, GUARD: tl.constexpr, LANES: tl.constexpr):  # fmt: skip  # noqa: E501
    """Apply one function of kernels/integer.py to up to three int32 vectors; two results."""
    lane = tl.arange(0, LANES)
    a = tl.load(a_ptr + lane)
    b = tl.load(b_ptr + lane)
    c = tl.load(c_ptr + lane)
    x = a
    y = a
    if WHAT == "combine":
        mantissa, exponent = integer.split_scale(b)
        x, y = integer.combine_scales(a, mantissa, exponent, c, MOST)
    elif WHAT == "narrow":
        x, y = integer.narrow_multiplier(a, b, MOST, HEAD_DIM, GUARD)
    elif WHAT == "wide":
        x, y = integer.wide_multiplier(a, b, COLUMN_BITS, MOST)
    elif WHAT == "column":
        x = integer.column_multiplier(a, b, COLUMN_BITS)
    elif WHAT == "reciprocal":
        x = integer.reciprocal(a, GUARD)
    elif WHAT == "bit_length":
        x = integer.bit_length(a, GUARD)
    elif WHAT == "output_multiplier":
        x, y = integer.output_multiplier(a, b, GUARD)
    elif WHAT == "requantize" or WHAT == "requantize alike":
        shift = c & 31
        if WHAT == "requantize alike":
            shift = tl.load(c_ptr) & 31
        half = integer.half_of(shift)
        x = integer.requantize(a, b, c >> 5, shift, half, 1, GUARD)
        y = integer.requantize(-a, b, c >> 5, shift, half, -1, GUARD)
    elif WHAT == "release":
        x = integer.release_factor(a, b, GUARD)
    elif WHAT == "offset":
        x = integer.exponent_offset(HEAD_DIM, a)
    elif WHAT == "usable":
        x = integer.usable_scale(a).to(tl.int32)
    tl.store(x_ptr + lane, x)
    tl.store(y_ptr + lane, y)


def run_twin(
    what: str, a: torch.Tensor, b: torch.Tensor | None = None, c: torch.Tensor | None = None, **constants: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the twin on vectors of any length, in launches of LANES."""
    length = a.numel()
    vectors = []
    for vector in (a, a if b is None else b, a if c is None else c):
        vector = vector.view(torch.int32) if vector.dtype == torch.float32 else vector.to(torch.int32)
        vectors.append(torch.cat((vector, vector[:1].expand(-length % LANES))).contiguous().to(DEVICE))
    x, y = torch.empty_like(vectors[0]), torch.empty_like(vectors[0])
    settings = {"HEAD_DIM": 1, "COLUMN_BITS": 10, "MOST": 28, **constants}
    for start in range(0, x.numel(), LANES):
        part = [vector[start : start + LANES] for vector in (*vectors, x, y)]
        twin_kernel[(1,)](*part, WHAT=what, GUARD=GUARD, LANES=LANES, **settings)
    return x[:length].cpu().long(), y[:length].cpu().long()


def assert_twins(got: tuple[torch.Tensor, torch.Tensor], *expected: torch.Tensor) -> None:
    for mine, wanted in zip(got, expected, strict=False):
        assert torch.equal(mine, wanted.long())


@pytest.mark.parametrize("constant", [LOG2E, 0.125 * LOG2E, 2.0**-60, 3e17])
def test_twin_combine_scales(constant: float) -> None:
    query, key = random_scales(2 * LANES, 1, -125, 120), random_scales(2 * LANES, 2, -125, 120)
    mantissa, exponent = fp.split_float(constant)
    expected = fp.combine_scales(fp.split_scale(query), fp.split_scale(key), (mantissa, exponent))
    assert_twins(run_twin("combine", query, key, torch.full_like(query, mantissa, dtype=torch.int32), MOST=exponent), *expected)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_twin_multipliers(head_dim: int) -> None:
    mantissa, exponent, _ = combined(head_dim + 7, 2 * LANES)
    exponent = exponent + torch.arange(2 * LANES) % 60 - 30
    bits = fp.column_bits(head_dim)
    most = fp.MULTIPLIER_BUDGET // head_dim
    got = run_twin("narrow", mantissa, exponent, MOST=most, HEAD_DIM=most.bit_length())
    assert_twins(got, *fp.narrow_multiplier(mantissa, exponent, head_dim))
    for most in (fp.BIAS_FRACTION_BITS, fp.MAX_FRACTION_BITS):
        got = run_twin("wide", mantissa, exponent, COLUMN_BITS=bits, MOST=most)
        assert_twins(got, *fp.wide_multiplier(mantissa, exponent, head_dim, most))
    scale = random_scales(LANES, head_dim, -60, 40).reshape(1, 1, LANES, 1)
    column, (_, exponent) = fp.column_multiplier(scale, head_dim)
    largest = (exponent - 1).expand(scale.shape).flatten()
    assert_twins(run_twin("column", scale.flatten(), largest, COLUMN_BITS=bits), column.flatten())


def test_twin_reciprocal_and_bit_length() -> None:
    divisor = divisors()[:: max(1, divisors().numel() // (20 * LANES))]
    assert_twins(run_twin("reciprocal", divisor), fp.reciprocal(divisor))
    numbers = torch.cat((torch.arange(LANES), (1 << torch.arange(31)) - 1, 1 << torch.arange(31)))
    assert_twins(run_twin("bit_length", numbers), fp.bit_length(numbers))


def test_twin_output_multiplier_and_requantize() -> None:
    value, output = random_scales(4 * LANES, 3, -125, 120), random_scales(4 * LANES, 4, -125, 120)
    output[::2] = value[::2] * torch.exp2(torch.randn(2 * LANES, generator=torch.Generator().manual_seed(0)))
    multiplier, shift = fp.output_multiplier(value, output)
    assert_twins(run_twin("output_multiplier", value, output), multiplier, shift)
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(1, 25, (4 * LANES,), generator=generator)
    numerator = torch.randint(1 - (1 << 31), 1 << 31, (4 * LANES,), generator=generator) >> (24 - bits)
    by = fp.multiply_round(torch.full_like(multiplier, (1 << 30) - 1), multiplier)
    wanted = fp.requantize(numerator << (24 - bits), by, shift)
    assert_twins(run_twin("requantize", numerator, by, shift + 32 * bits), wanted, wanted)
    # one shift for all channels, whose roundings then go into the product
    for alike in range(32):
        part = slice(128 * alike, 128 * (alike + 1))
        fits = numerator[part] >> (alike % 2 * 12)
        wanted = fp.requantize(fits << (24 - bits[part]), by[part], torch.full_like(by[part], alike))
        assert_twins(run_twin("requantize alike", fits, by[part], alike + 32 * bits[part]), wanted, wanted)


def test_twin_release_factor_and_exponent_offset() -> None:
    generator = torch.Generator().manual_seed(0)
    step = torch.randint(0, (1 << 31) - 1, (4 * LANES,), generator=generator) >> torch.randint(
        0, 31, (4 * LANES,), generator=generator
    )
    fraction_bits = torch.arange(4 * LANES) % 29
    assert_twins(run_twin("release", step, fraction_bits), fp.release_factor(step, fraction_bits))
    for exponential, bits in EXPONENTIALS:
        offset, _, _ = fp.probability_constants(exponential, bits)
        every = torch.arange(29)
        assert_twins(run_twin("offset", every, HEAD_DIM=offset), fp.exponent_offset(offset, every))


def aligned_probability(t: torch.Tensor, fraction_byte: int) -> torch.Tensor:
    """What ``gluon.ptx_ops.FINE_PROBABILITY`` computes, word for word; Gluon does not run here, its arithmetic does."""
    t = t & 0xFFFFFFFF
    x = ((t >> 8 * fraction_byte) & 255) - 512
    return (x * x + (1 << 17)) >> (t >> 8 * fraction_byte + 8).clamp(max=63)


@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_an_exponential_aligned_to_bytes_has_the_specified_bits(head_dim: int) -> None:
    mantissa, exponent, _ = combined(head_dim, 20000)
    multiplier, fraction_bits = (x[:, None] for x in fp.narrow_multiplier(mantissa, exponent, head_dim))
    generator = torch.Generator().manual_seed(head_dim)
    lowest, highest = -128 * 127 * head_dim, 128 * 128 * head_dim
    row_max = torch.randint(lowest, highest + 1, (len(mantissa), 1), generator=generator)
    below = torch.rand(len(mantissa), 64, generator=generator, dtype=torch.float64) * 23
    s = torch.maximum(row_max - torch.exp2(below).to(torch.int64) + 1, torch.tensor(lowest))
    offset, _, _ = fp.probability_constants("quadratic", 8)
    begin = fp.exponent_offset(offset, fraction_bits)
    expected = fp.fine_probability((row_max - s) * multiplier + begin, fraction_bits, "quadratic", 8)

    up = fp.MAX_FRACTION_BITS - fraction_bits
    slope = torch.where(multiplier >> fraction_bits >= 64, 1 << 30, multiplier << up)
    start = (begin << up) + (3 << 24) + (1 << 16) + row_max * slope
    # every score may be raised to what is nothing anyway ...
    least = row_max - (1 << (fraction_bits + 7 - fp.bit_length(multiplier)).clamp(0, 24))
    raised = aligned_probability(start - torch.maximum(s, least) * slope, 2)
    assert int((raised.max() + 64) >> 7) == 255
    assert torch.equal(raised, expected)
    # ... and need not be where no exponent comes near 256 octaves: by the sum of a query's magnitudes, or any query's
    as_it_is = aligned_probability(start - s * slope, 2)
    assert not torch.equal(as_it_is, expected)
    for most in (-(-s.abs().amax(1, keepdim=True) // 128) * 128, head_dim << 14):
        reach = (most + row_max) * multiplier
        safe = (reach >> fraction_bits < 236).expand_as(s)
        assert 0.1 < safe.double().mean() < 0.9
        assert torch.equal(as_it_is[safe], expected[safe])
        # the same decision without a shift, in 32 bits without a sign
        assert int(reach.min()) >= 0 and int(reach.max()) < 1 << 31 and int((236 << fraction_bits).max()) < 1 << 32
        assert torch.equal((reach < 236 << fraction_bits).expand_as(s), safe)


def test_an_exponential_of_16_fraction_bits_has_the_specified_bits() -> None:
    offset, _, _ = fp.probability_constants("quadratic", 8)
    # up to a mark of a key that takes no part, below any other maximum
    far = torch.randint(0, 7 << 28, (1 << 16,), generator=torch.Generator().manual_seed(3))
    below = torch.cat((torch.arange(1 << 21), 1 << torch.arange(31), far))
    begin = (offset << 7) + (3 << 16) + (1 << 8)
    got = aligned_probability(below.clamp(max=(1 << 31) - 1 - begin) + begin, 1)
    bits = torch.tensor(16)
    assert torch.equal(got, fp.fine_probability(below + fp.exponent_offset(offset, bits), bits, "quadratic", 8))


def test_four_probabilities_are_rounded_and_packed() -> None:
    every = torch.arange(255 * 128 + 64)
    some = torch.cat((every[:300], every[-300:], every[::97]))
    for a, b in ((every[:, None], some[None, ::9]), (some[::9, None], every[None, :])):
        word = (0x7F7F7F7F - 2 * a - (b << 17)) & 0xFFFFFFFF
        assert torch.equal((word >> 8) & 255, (127 - ((a + 64) >> 7)).expand_as(word) & 255)
        assert torch.equal(word >> 24, (127 - ((b + 64) >> 7)).expand_as(word) & 255)
        # as the kernel forms it where it also sums them: the two side by side, twice
        assert torch.equal((0x7F7F7F7F - 2 * (a + (b << 16))) & 0xFFFFFFFF, word)


def test_denominators_of_more_than_31_bits_have_inverses() -> None:
    denominators = [(1 << bits) + part for bits in range(62) for part in (0, (1 << bits) // 3, (1 << bits) - 1)]
    bits, x = fp.row_inverse(torch.tensor(denominators))
    exact = [(1 << 29 + length) / number for length, number in zip(bits.tolist(), denominators, strict=True)]
    assert torch.allclose(x.double(), torch.tensor(exact, dtype=torch.float64), rtol=2.0**-27, atol=0.0)


def test_quotients_are_floored_beside_multiples_of_the_denominator() -> None:
    """Where the reciprocal's quotient is above the exact one, too."""
    generator = torch.Generator().manual_seed(0)
    denominator = torch.cat((
        torch.randint(1 << 30, 1 << 31, (5000,), generator=generator), torch.randint(1, 1 << 30, (5000,), generator=generator),
        torch.arange(1, 500), torch.arange((1 << 31) - 500, 1 << 31),
    ))  # fmt: skip
    times = torch.tensor([-128, -127, -1, 0, 1, 7, 100, 127, 128])[:, None, None]
    beside = torch.arange(-3, 4)[None, :, None]
    numerator = (times * denominator + beside).clamp(-128 * denominator, 128 * denominator)
    expected = torch.div(numerator, denominator, rounding_mode="floor")
    assert torch.equal(fp.floored_quotient(numerator, denominator.expand_as(numerator)), expected)


def test_the_inverse_of_a_number_of_keys_fits_31_bits() -> None:
    assert [fp.inverse_count(keys) for keys in (1, 2, 3, fp.MAX_KEYS)] == [2**31 - 1, 2**30, 2**31 // 3, 2**11]


def test_powers_of_two_are_exact_over_the_whole_range() -> None:
    exponent = torch.arange(-250, 251)
    for x in (1.5, -(2.0**-100), 2.0**100):
        exact = x * torch.exp2(exponent.double())
        normal = (exact.abs() >= 2.0**-126) & (exact.abs() < 2.0**128)
        # half of the way must not leave float32 either
        normal &= (x * torch.exp2((exponent >> 1).double())).abs() < 2.0**128
        got = fp.times_power_of_two(torch.full((501,), x), exponent)
        assert torch.equal(got.double()[normal], exact[normal])
        assert int(normal.sum()) > 100


def test_twin_usable_scale() -> None:
    scale = torch.tensor([1.0, 2.0**-149, 3.4028234663852886e38, 0.0, -1.0, -0.0, math.inf, -math.inf, math.nan, -math.nan])
    expected = torch.tensor([True, True, True] + [False] * 7)
    assert torch.equal(fp.usable_scale(scale), expected)
    assert_twins(run_twin("usable", scale), expected)


@pytest.mark.parametrize("exponential", ["quadratic", "linear"])
@pytest.mark.parametrize("bits", [7, 8])
def test_one_shift_of_32_bits_is_the_product_with_a_power_of_two(exponential: str, bits: int) -> None:
    """What cpu.c does with every mantissa and every number of octaves, rounded or not."""
    fraction, octaves = torch.arange(256)[:, None], torch.arange(32)[None, :]
    mantissa = fp.exp2_mantissa(fraction, exponential, bits)
    _, up, down = fp.probability_constants(exponential, bits)
    for half in (0, 1 << (down - 1)):
        assert int(mantissa.max() << up) + half < 2**32
        assert torch.equal((((mantissa << up) >> octaves) + half) >> down, (mantissa * ((1 << up) >> octaves) + half) >> down)
