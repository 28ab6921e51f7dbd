"""The specification: integer attention in plain PyTorch tensors, on any device.

This module defines the bits. Every kernel must return exactly these integers, whatever its tiles, device
or instructions. Read :func:`int8_attention` top to bottom next to ``docs/algorithm.md``.

Integer matrix products are formed with float GEMMs that cannot round: every partial sum stays below 2**24
(float32) or 2**53 (float64), so the result *is* the integer product. PyTorch has no int8 GEMM that runs
everywhere.
"""

from __future__ import annotations

import dataclasses
import math

import torch

from . import fixed_point as fp
from .attention_call import AttentionCall, Scales
from .fixed_point import Checker
from .memory_format import empty_output
from .recipe import Recipe

ARITHMETIC_VERSION = 3
"""Of the bits that :func:`int8_attention`, quantisation and the operators of integer networks return. A change of any of them
needs a new number, new golden vectors and a line in docs/golden_vectors.md."""
DEFAULT_TILE = 1024
_ROWS_AT_ONCE = 1 << 23


def _exact_matmul(a: torch.Tensor, b: torch.Tensor, most: int, out: torch.dtype) -> torch.Tensor:
    """Multiply integer matrices exactly; ``most`` bounds every partial sum's magnitude."""
    dtype = torch.float32 if most < 2**24 and a.device.type == "cpu" else torch.float64
    return torch.matmul(a.to(dtype), b.to(dtype)).to(out)


class _Scores:
    """Scores of all queries against one tile of keys, in an integer unit common to the row.

    The exponent of a weight is then ``t = (rowmax - score) * multiplier`` (per-tensor or per-head key scale,
    no bias) or the difference of scores already in the log2 domain.
    """

    def __init__(
        self, call: AttentionCall, query_scale: torch.Tensor, key_scale: torch.Tensor, check: Checker, work: torch.dtype
    ) -> None:
        self.query, self.key, self.mask, self.is_causal = call.query, call.key, call.mask, call.is_causal
        self.check, self.work = check, work
        mask, softmax_scale = call.mask, call.softmax_scale
        self.head_dim = call.head_dim
        self.biased = mask is not None and mask.dtype == torch.int32
        self.per_token = key_scale.shape[2] > 1
        constant = fp.split_float(softmax_scale * math.log2(math.e))
        reference = fp.split_scale(key_scale)
        if self.per_token:
            self.column, reference = fp.column_multiplier(key_scale, self.head_dim)
        mantissa, exponent = fp.combine_scales(fp.split_scale(query_scale), reference, constant)
        self.drop: torch.Tensor | int = 0
        if self.per_token:
            most = fp.BIAS_FRACTION_BITS if self.biased else fp.MAX_FRACTION_BITS
            self.multiplier, self.fraction_bits = fp.wide_multiplier(mantissa, exponent, self.head_dim, most)
        else:
            self.multiplier, self.fraction_bits = fp.narrow_multiplier(mantissa, exponent, self.head_dim, self.biased)
            if self.biased:
                self.drop = check("F - F'", (self.fraction_bits - fp.BIAS_FRACTION_BITS).clamp(min=0), 0, 8)
                self.fraction_bits = self.fraction_bits - self.drop
        if self.per_token:
            check("A", self.column, 0, 1 << fp.column_bits(self.head_dim))
        check("R of scores" if self.per_token else "M", self.multiplier, 0, (1 << 31) - 1)
        check("F", self.fraction_bits, 0, fp.MAX_FRACTION_BITS)

    def tile(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the scores against keys ``start:stop`` and which of them take part (None: all)."""
        d = self.head_dim
        key = self.key[:, :, start:stop]
        s = _exact_matmul(self.query, key.mT, d << 14, self.work)
        self.check("S", s, -d << 14, d << 14)
        valid = None
        if self.per_token:
            s = s * self.column[..., start:stop].to(self.work)
            self.check("y", s, -(1 << 30), 1 << 30)
        if self.mask is not None:
            part = self.mask[..., start:stop] if self.mask.shape[-1] > 1 else self.mask
            if self.biased:
                if self.per_token:
                    s = fp.multiply_high(s, self.multiplier).to(self.work)
                else:
                    s = (s * self.multiplier.to(self.work)) >> self.drop
                valid = part != fp.BIAS_MASKED
                shift = (fp.BIAS_FRACTION_BITS - self.fraction_bits).to(self.work)
                marked = part > fp.BIAS_LIMIT
                bias = torch.where(valid & ~marked, part.to(self.work), 0)
                s = s + (bias >> shift)
                self.check("z", s, -(1 << 30) + 1, (1 << 30) - 1)
                s = torch.where(marked, part.to(self.work), s)
            else:
                valid = part
        if self.is_causal:
            rows = torch.arange(s.shape[2], dtype=torch.int64, device=s.device).view(-1, 1)
            columns = torch.arange(start, stop, dtype=torch.int64, device=s.device)
            causal = columns <= rows
            valid = causal if valid is None else valid & causal
        if valid is not None:
            s = torch.where(valid, s, fp.SCORE_MASKED)
        return s, valid

    def exponent(self, row_max: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        """Return the exponents ``-log2`` of the weights, fixed point with ``fraction_bits``."""
        if self.biased:
            return row_max - s
        if self.per_token:
            return fp.multiply_high(row_max.to(torch.int64) - s, self.multiplier).to(self.work)
        return (row_max - s) * self.multiplier.to(self.work)


def int8_attention(call: AttentionCall, *, tile: int = DEFAULT_TILE, checked: bool = False) -> torch.Tensor:
    """Attention on int8 tensors whose softmax runs in integers (Algorithm 1 with better arithmetic).

    Args:
        call: int8 tensors with their scales; a bias is in fixed point.
        tile: keys per step. It changes memory, never a bit, except that ``normalization="online"`` ignores
            it for the recipe's ``key_block``.
        checked: compute in int64 and require every declared bound.

    Returns:
        ``(batch, heads, queries, value channels)`` of ``out_dtype``.

    Raises:
        OverflowError: in checked mode, an intermediate left its declared range.
    """
    query, key, value, scales, mask, recipe, out_dtype = (
        call.query, call.key, call.value, call.scales, call.mask, call.recipe, call.out_dtype,
    )  # fmt: skip
    assert scales is not None and scales.query is not None
    batch, heads, queries, keys = call.batch, call.heads, call.queries, call.keys
    out = empty_output(call.order, call.value_dim, out_dtype)
    if out.numel() == 0:
        return out
    if keys == 0:
        return out.zero_()
    group = heads // key.shape[1]

    def per_head(x: torch.Tensor) -> torch.Tensor:
        return x.repeat_interleave(group, dim=1) if group > 1 and x.shape[1] > 1 else x

    query_scale, output_scale = scales.query, scales.output
    key, value, key_scale, value_scale = map(per_head, (key, value, scales.key, scales.value))
    offset = None if scales.offset is None or out_dtype == torch.int8 else per_head(scales.offset)
    if output_scale is not None:
        output_scale = per_head(output_scale) if output_scale.shape[1] != heads else output_scale
    if mask is not None and 1 < mask.shape[0] < batch:
        mask = mask.repeat(batch // mask.shape[0], 1, 1, 1)
    width = min(tile, keys)
    rows = max(1, _ROWS_AT_ONCE // max(1, heads * queries * width))

    def part(x: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        return x if x.shape[0] == 1 else x[start:stop]

    for start in range(0, batch, rows):
        stop = min(batch, start + rows)
        check = Checker(checked)
        few = dataclasses.replace(
            call, query=query[start:stop], key=key[start:stop], mask=None if mask is None else part(mask, start, stop)
        )
        for role, x in (("query", few.query), ("key", few.key), ("value", value[start:stop])):
            check(role, x, -128, 127)
        scales_of = part(query_scale, start, stop), part(key_scale, start, stop)
        scores = _Scores(few, *scales_of, check, torch.int64 if checked else torch.int32)
        attend = _online if recipe.normalization == "online" else _two_pass
        numerator, denominator, row_max = attend(scores, value[start:stop], recipe, width)
        result = _finish(
            numerator,
            denominator,
            fp.FINE_BITS if call.exact_sum else 0,
            scales._replace(
                value=part(value_scale, start, stop),
                output=None if output_scale is None else part(output_scale, start, stop),
                offset=None if offset is None else part(offset, start, stop),
            ),
            out_dtype,
            recipe,
            check,
        )
        if out_dtype != torch.int8:
            bad = ~(fp.usable_scale(part(query_scale, start, stop)) & _all_usable(part(key_scale, start, stop)))
            if scores.biased:
                bad = bad | (row_max >= fp.SCORE_POISON)
            result = torch.where(bad | ~fp.usable_scale(part(value_scale, start, stop)), math.nan, result)
        out[start:stop] = result.to(out_dtype)
    return out


def _all_usable(key_scale: torch.Tensor) -> torch.Tensor:
    return fp.usable_scale(key_scale).all(dim=2, keepdim=True)


def _row_max(current: torch.Tensor | None, s: torch.Tensor) -> torch.Tensor:
    here = s.amax(dim=-1, keepdim=True)
    return here if current is None else torch.maximum(current, here)


def _probabilities(
    scores: _Scores, s: torch.Tensor, valid: torch.Tensor | None, row_max: torch.Tensor, recipe: Recipe, exact: bool = False
) -> torch.Tensor:
    """Probabilities of a tile of scores; if ``exact`` before rounding, with :data:`.fixed_point.FINE_BITS` fraction bits."""
    offset, _, _ = fp.probability_constants(recipe.exponential, recipe.probability_bits)
    # a row that has seen no key yet has no maximum: any other base will do, its probabilities are dropped
    base = torch.where(row_max == fp.SCORE_MASKED, 0, row_max)
    if valid is not None:
        s = torch.where(valid, s, base)
    t = scores.exponent(base, s)
    t = t + fp.exponent_offset(offset, scores.fraction_bits).to(t.dtype)
    scores.check("t", t, 0, (1 << 31) - 1)
    bits = recipe.probability_bits
    if exact:
        p = fp.fine_probability(t, scores.fraction_bits, recipe.exponential, bits)
        scores.check("w", p, 0, ((1 << bits) << fp.FINE_BITS) - (1 << fp.FINE_BITS - 1) - 1)
    else:
        p = fp.probability(t, scores.fraction_bits, recipe.exponential, bits, recipe.probability_rounding == "nearest")
        scores.check("P", p, 0, (1 << bits) - 1)
    return p if valid is None else torch.where(valid, p, 0)


def _two_pass(
    scores: _Scores, value: torch.Tensor, recipe: Recipe, width: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """True row maximum first, then P and P V against it: integer sums, the same in any order."""
    keys = value.shape[2]
    row_max: torch.Tensor | None = None
    kept = None
    for start in range(0, keys, width):
        kept = scores.tile(start, min(keys, start + width))
        row_max = _row_max(row_max, kept[0])
    assert row_max is not None and kept is not None
    scores.check("m", row_max, fp.SCORE_MASKED, fp.SCORE_POISON)
    exact = recipe.takes_exact_sum(keys)
    numerator: torch.Tensor | int = 0
    denominator: torch.Tensor | int = 0
    fine: torch.Tensor | int = 0
    for start in range(0, keys, width):
        stop = min(keys, start + width)
        s, valid = kept if width >= keys else scores.tile(start, stop)
        p = _probabilities(scores, s, valid, row_max, recipe, exact)
        if exact:
            fine = fine + p.sum(dim=-1, keepdim=True, dtype=torch.int64)
            p = fp.round_shift(p, fp.FINE_BITS)
        most = (128 << recipe.probability_bits) * (stop - start)
        numerator = numerator + _exact_matmul(p, value[:, :, start:stop], most, torch.int64)
        denominator = denominator + p.sum(dim=-1, keepdim=True, dtype=torch.int64)
    assert isinstance(numerator, torch.Tensor) and isinstance(denominator, torch.Tensor)
    sections = -(-keys // fp.SECTION_KEYS)
    most = sections << (38 if recipe.probability_bits == 15 else 31)
    scores.check("O", numerator, -most, most - 1)
    scores.check("l", denominator, 0, (sections << (31 if recipe.probability_bits == 15 else 24)) - 1)
    if exact:
        assert isinstance(fine, torch.Tensor)
        scores.check("L", fine, 0, (sections << 31) - 1)
        total = torch.maximum(fine, denominator << fp.FINE_BITS)
        scores.check("L or l", total, 0, (sections << 31) - 1)
        missing = (total - (denominator << fp.FINE_BITS)) >> (fp.FINE_BITS + 1)
        sums = value.sum(dim=2, keepdim=True, dtype=torch.int64)
        scores.check("8 times the sum of V", sums << 3, -(1 << 30), (1 << 30) - 1)
        mean = fp.twice_mean(sums, keys)
        scores.check("twice the mean of V", mean, -256, 256)
        numerator, denominator = numerator + missing * mean, total
        scores.check("O with the missing mass", numerator, -most, most - 1)
    return numerator, denominator, row_max


def _online(
    scores: _Scores, value: torch.Tensor, recipe: Recipe, _width: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Algorithm 1's loop: running maximum, ScaleRelease (a floored multiply) after every block of keys."""
    keys = value.shape[2]
    sections = -(-keys // fp.SECTION_KEYS)
    row_max = numerator = denominator = None
    for start in range(0, keys, recipe.key_block):
        stop = min(keys, start + recipe.key_block)
        s, valid = scores.tile(start, stop)
        new_max = _row_max(row_max, s)
        p = _probabilities(scores, s, valid, new_max, recipe)
        product = _exact_matmul(p, value[:, :, start:stop], (128 << 7) * (stop - start), torch.int64)
        total = p.sum(dim=-1, keepdim=True, dtype=torch.int64)
        if row_max is None or numerator is None or denominator is None:
            numerator, denominator = product, total
        else:
            seen = row_max != fp.SCORE_MASKED
            step = scores.exponent(torch.where(seen, new_max, 0), torch.where(seen, row_max, 0))
            factor = fp.release_factor(step, scores.fraction_bits).to(torch.int64)
            numerator = ((numerator * factor) >> 24) + product
            denominator = ((denominator * factor) >> 24) + total
        row_max = new_max
        scores.check("O", numerator, -(sections << 31), (sections << 31) - 1)
        scores.check("l", denominator, 0, (sections << 24) - 1)
    assert numerator is not None and denominator is not None and row_max is not None
    # ScaleRelease floors both sums apart, which can leave |O| a few units above 128 l; no average can be there
    return numerator.clamp(-128 * denominator, 128 * denominator), denominator, row_max


def _finish(
    numerator: torch.Tensor,
    denominator: torch.Tensor,
    fine_bits: int,
    scales: Scales,
    out_dtype: torch.dtype,
    recipe: Recipe,
    check: Checker,
) -> torch.Tensor:
    """Normalise by the integer reciprocal and bring the result to the output's type (float32 if not int8).

    The denominator has ``fine_bits`` fraction bits. An offset is added to the float outputs of rows that have a key.
    """
    value_scale, output_scale, offset = scales.value, scales.output, scales.offset
    multiplier, shift = value_scale, value_scale
    if out_dtype == torch.int8:
        assert output_scale is not None
        multiplier, shift = fp.output_multiplier(value_scale, output_scale)
        check("R", multiplier, 1 << 30, (1 << 31) - 1)
        check("e - 11", shift, 0, 31)
    if recipe.output == "value_scale":
        floor = fp.floored_quotient(numerator, denominator)
        if out_dtype == torch.int8:
            return check("out", fp.requantize(floor << 23, multiplier >> 2, shift), -128, 127)
        return _with_offset(floor.to(torch.float32), value_scale, offset, denominator)
    bits, inverse = fp.row_inverse(denominator)
    bits = (bits - fine_bits).clamp(min=0)
    check("B", bits, 0, 42)
    check("x", inverse, 1 << 29, (1 << 30) + 1)
    if out_dtype == torch.int8:
        aligned = check("O << (24 - B)", fp.left_aligned(numerator, bits), -(1 << 31), (1 << 31) - 1)
        row = check("mul(x, R, 32)", fp.multiply_round(inverse, multiplier), 0, 1 << 29)
        return check("out", fp.requantize(aligned, row, shift), -128, 127)
    average = numerator.to(torch.float32) * fp.times_power_of_two(inverse.to(torch.float32), -29 - bits)
    return _with_offset(average, value_scale, offset, denominator)


def _with_offset(
    average: torch.Tensor, value_scale: torch.Tensor, offset: torch.Tensor | None, denominator: torch.Tensor
) -> torch.Tensor:
    """Scale averages of int8 values, and add the offset in the same rounding; rows without a key stay 0."""
    if offset is None:
        return average * value_scale
    out = fp.fused_multiply_add(average, value_scale.expand_as(average), offset.expand_as(average))
    return torch.where(denominator > 0, out, 0.0)
