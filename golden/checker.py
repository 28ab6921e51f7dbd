#!/usr/bin/env python3
"""Recompute golden vectors from the documents alone: ``python golden/checker.py FILE...``.

A second implementation of docs/algorithm.md and docs/integer_network.md in plain NumPy. It imports nothing of qflash and
shares no code with it, so an error in either shows as a mismatch; it needs only numpy and safetensors. It is written to
be read beside the two pages: sections carry the numbers of their steps. Integers are held in int64 and no operation
wraps; the widths that hardware needs are in the tables of bounds in docs/algorithm.md and docs/integer_network.md.

docs/golden_vectors.md describes the files.
"""

from __future__ import annotations

import argparse
import json
import math
import sys

import numpy as np
from safetensors import SafetensorError, safe_open

# Integer helpers. ``>>`` of NumPy's signed integers is the arithmetic shift of the documents.


def mulhi(a, b):
    """High half of a signed 32 × 32-bit product: floor."""
    return (a * b) >> 32


def mul(a, b, n):
    """Product of two signed 32-bit numbers, shifted right by n and rounded half up."""
    return (a * b + (1 << (n - 1))) >> n


def shift(a, n):
    """``a << n``, or ``a >> -n`` where n is negative; both may be arrays."""
    n = np.asarray(n, np.int64)
    return np.where(n >= 0, a << np.clip(n, 0, 62), a >> np.clip(-n, 0, 62))


def rs(a, n):
    """Right shift by n ≥ 0 that rounds half up."""
    n = np.clip(np.asarray(n, np.int64), 0, 62)
    return np.where(n > 0, ((a >> np.maximum(n - 1, 0)) + 1) >> 1, a)


def saturate(a, bits):
    """Clamp to the range of a signed integer of so many bits."""
    return np.clip(a, -(1 << (bits - 1)), (1 << (bits - 1)) - 1)


def bit_length(a):
    """Number of bits of each non-negative integer; 0 for 0."""
    a = np.asarray(a, np.int64)
    length = np.zeros_like(a)
    for step in (32, 16, 8, 4, 2, 1):
        large = (a >> step) > 0
        length += np.where(large, step, 0)
        a = np.where(large, a >> step, a)
    return length + a


def float32(a):
    """Round to float32, ties to even."""
    return np.asarray(a, np.float32)


def split(a):
    """A positive normal float32 as m · 2^e, m with 24 bits."""
    bits = float32(a).view(np.int32).astype(np.int64)
    return (bits & 0x7FFFFF) | 0x800000, ((bits >> 23) & 255) - 150


def per_query_head(x, heads):
    """Repeat each head of key or value for the query heads that share it."""
    return np.repeat(x, heads // x.shape[1], axis=1) if x.shape[1] > 1 else x


# docs/algorithm.md, step 1: quantisation. Only this, the conversion of a float bias (step 2) and float outputs (step 9)
# compute with floats. A product of two float32 is exact in float64, so np.rint of it rounds once, ties to even.

SMALLEST_SCALE, LARGEST_SCALE = 2.0**-126, 129 * 2.0**114
SHARED_AXES = {"tensor": (0, 1, 2, 3), "head": (2, 3), "token": (3,), "channel": (2,)}


def usable_scale(scale, amplitude):
    """Keep a scale within what scales may be; 1 where the amplitude is 0, NaN where it is not finite."""
    scale = np.where(amplitude == 0, 1, np.clip(scale, float32(SMALLEST_SCALE), float32(LARGEST_SCALE)))
    return float32(np.where(np.isfinite(amplitude), scale, np.nan))


def to_int8(exact):
    """Round to int8, ties to even; 0 for NaN."""
    return saturate(np.rint(np.where(np.isnan(exact), 0, exact)), 8).astype(np.int8)


def quantize_with_scale(x, scale):
    return to_int8(x.astype(np.float64) * (float32(1) / scale))


def quantize(x, granularity):
    """Int8 values and scales of (batch, heads, tokens, channels)."""
    x = float32(x)
    amplitude = np.abs(x).max(axis=SHARED_AXES[granularity], keepdims=True)
    scale = usable_scale(amplitude * float32(1 / 127), amplitude)
    return quantize_with_scale(x, scale), scale


def midrange(x):
    """Middle and half width of every channel's range over the tokens, in float32."""
    low, high = x.min(axis=2, keepdims=True) / 2, x.max(axis=2, keepdims=True) / 2
    return low + high, high - low


def quantize_centered(x, granularity):
    """``smooth_value``: int8 values, scales and offsets, with a zero point in the middle of every channel's range."""
    x = float32(x)
    middle, half = midrange(x)
    least = np.maximum(half * float32(1 / 126.5), np.abs(middle) * float32(2.0**-21))
    if granularity != "channel":
        least = least.max(axis=SHARED_AXES[granularity], keepdims=True)
    scale = usable_scale(least, least)
    inverse = (float32(1) / scale).astype(np.float64)
    zero = np.rint(middle * inverse) + 0.0  # +0, never −0
    return to_int8(x * inverse - zero), scale, float32(zero) * scale


def balance(query, key):
    """Powers of two per channel of a key head that bring the amplitudes of query and key together."""
    batch, heads, _, channels = query.shape
    groups = heads // key.shape[1]
    above = np.abs(query).max(axis=2).reshape(batch, -1, groups, channels).max(axis=2)[:, :, None]
    below = np.abs(key).max(axis=2, keepdims=True)
    usable = (above > 0) & (below > 0) & np.isfinite(above) & np.isfinite(below)
    e = np.trunc((np.frexp(above)[1] - np.frexp(below)[1]) / 2).astype(np.int32)
    e = np.where(usable, e, 0)
    return np.ldexp(query, -np.repeat(e, groups, axis=1)), np.ldexp(key, e)


def rotate(x):
    """Divide by the size, then Hadamard butterflies over the channels, padded with zeros to a power of two."""
    size = 1 << (x.shape[-1] - 1).bit_length()
    x = np.pad(x / float32(size), [(0, 0)] * 3 + [(0, size - x.shape[-1])])
    stride = 1
    while stride < size:
        pairs = x.reshape(*x.shape[:-1], size // (2 * stride), 2, stride)
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        x = np.stack([first + second, first - second], axis=-2).reshape(x.shape)
        stride *= 2
    return x


def without_unseen(key, value, key_scale, mask, bias, causal, queries, recipe):
    """Replace tokens that no query sees by copies of seen ones, or leave them out where attention is causal.

    Of int8 tensors, whose keys have a scale here, only where there is a scale a key or an exact row sum.
    """
    keys = key.shape[2]
    if causal and keys > queries:
        cut = key_scale if key_scale is None or key_scale.shape[2] == 1 else key_scale[:, :, :queries]
        return key[:, :, :queries], value[:, :, :queries], cut
    rows = mask if mask is not None else bias
    per_token = key_scale is not None and key_scale.shape[2] > 1
    if rows is None or rows.shape[3] == 1 or not (key_scale is None or per_token or has_exact_sum(recipe, keys)):
        return key, value, key_scale
    seen = (rows if mask is not None else rows > -BIAS_LIMIT).any(axis=2)
    if seen.shape[1] not in (1, key.shape[1]):
        seen = seen.reshape(len(seen), key.shape[1], -1, keys).any(axis=2)  # seen by a query head that shares the key head
    seen = np.broadcast_to(seen, key.shape[:3])
    key, value, key_scale = key.copy(), value.copy(), key_scale.copy() if per_token else key_scale
    for place in np.ndindex(*key.shape[:2]):
        tokens, hidden = np.flatnonzero(seen[place]), np.flatnonzero(~seen[place])
        if len(tokens):
            for x in (key, value, key_scale) if per_token else (key, value):
                x[place][hidden] = x[place][tokens[hidden % len(tokens)]]
    return key, value, key_scale


# Step 2: from scales to multiplier and shift.

BUDGET = 57344
BIAS_LIMIT = 2**28
MASKED_SCORE = -(2**31)
BIAS_MASKED, BIAS_POISON, BIAS_EVEN = -(2**30), 2**30, 2**30 - 1


def combine(query_scale, key_scale, softmax_scale):
    """R and E with s_Q · s_K · softmax_scale · log2(e) ≈ R · 2^−E, 2^30 ≤ R < 2^31."""
    (m_Q, e_Q), (m_K, e_K) = split(query_scale), split(key_scale)
    fraction, e_C = math.frexp(softmax_scale * math.log2(math.e))
    m_C, e_C = round(fraction * 2**24), e_C - 24
    if m_C == 2**24:
        m_C, e_C = 2**23, e_C + 1
    R = ((((m_K * m_C) >> 22) * m_Q) >> 22) << 3
    left = 31 - bit_length(R)
    return R << left, -(e_Q + e_K + e_C + 41 - left)


def multiplier(R, E, most):
    """M = round(s · 2^F) for the largest F ≤ 24 with M ≤ most."""
    M = np.full_like(R, most)
    F = np.zeros_like(R)
    for bits in range(25):
        right = E - bits
        candidate = np.where(right > 0, rs(R, right), most + 1)
        fits = candidate <= most
        M, F = np.where(fits, candidate, M), np.where(fits, bits, F)
    return M, F


def column_multiplier(key_scale, d):
    """A for each key token, the power of two that is the common scale, and c."""
    c = (65536 // d).bit_length() - 1
    m, e = split(key_scale)
    largest = e.max(axis=2, keepdims=True)
    return rs(m, 24 - c + largest - e), float32(2.0 ** (largest + 24)), c


def wide_multiplier(R, E, c, most):
    """R and F of one high product for each score, F at most ``most``."""
    F = E + c - 32
    return np.where(F < 0, 2**31 - 1, shift(R, -np.maximum(F - most, 0))), np.clip(F, 0, most)


def fixed_point_bias(bias):
    """An additive float bias (…, queries, keys) in 1/65536 octaves, with marks."""
    bias = float32(bias)
    largest = bias.max(axis=-1, keepdims=True)
    base = np.where((np.abs(largest) > 1024) & np.isfinite(largest), largest, float32(0))
    product = (bias - base) * float32(math.log2(math.e) * 2**16)
    fixed = np.rint(np.where(np.isnan(product), 0, np.clip(product, -BIAS_LIMIT, BIAS_LIMIT))).astype(np.int64)
    even = np.abs(base) >= 2.0**64
    fixed = np.where(even & (bias == base), BIAS_EVEN, fixed)
    fixed = np.where((even & (bias < base)) | (bias == -np.inf), BIAS_MASKED, fixed)
    return np.where(np.isnan(bias) | (bias == np.inf), BIAS_POISON, fixed)


class Scores:
    """Scores of all rows in one unit, and what turns a difference of two into an exponent.

    ``values`` are S, y or z; ``exponent(difference)`` is t without t0, in octaves with ``F`` fraction bits.
    """

    def __init__(self, query, key, query_scale, key_scale, softmax_scale, bias):
        d = query.shape[-1]
        S = query @ np.swapaxes(key, -1, -2)
        if key_scale.shape[2] == 1:
            R, E = combine(query_scale, key_scale, softmax_scale)
            M, F = multiplier(R, E, (BUDGET if bias is None else BUDGET // 2) // d)
            self.F, self.values, self.exponent = F, S, lambda difference: difference * M
            if bias is not None:
                self.F = np.minimum(F, 16)
                self.values = ((S * M) >> (F - self.F)) + (bias >> (16 - self.F))
        else:
            A, common, c = column_multiplier(key_scale, d)
            A = np.swapaxes(A, -1, -2)
            R, E = combine(query_scale, common, softmax_scale)
            R, self.F = wide_multiplier(R, E, c, 24 if bias is None else 16)
            self.values, self.exponent = S * A, lambda difference: mulhi(difference, R)
            if bias is not None:
                self.values = mulhi(self.values, R) + (bias >> (16 - self.F))
        if bias is not None:
            # Step 3: marks of a bias.
            self.exponent = lambda difference: difference
            self.values = np.where(bias == BIAS_MASKED, MASKED_SCORE, self.values)
            self.values = np.where(bias >= BIAS_EVEN, bias, self.values)


# Step 4: the exponential.

OFFSETS = {"linear": {7: 1, 8: 1, 15: 1}, "quadratic": {7: 303, 8: 301, 15: 299}}
SHIFTS = {
    "linear": {7: (14, 23), 8: (14, 23), 15: (7, 16)},
    "quadratic": {7: (12, 23), 8: (13, 23), 15: (13, 16)},
}


def octave_and_fraction(t, F):
    return np.minimum(t >> F, 31), shift(t, 8 - F) & 255


def weights(t, F, exponential, bits, rounding):
    """P, and w: the weight before it is rounded, with seven fraction bits."""
    t = t + -((-OFFSETS[exponential][bits] << F) // 512)
    q, f = octave_and_fraction(t, F)
    g = (512 - f) * ((1 << bits) - 1) if exponential == "linear" else (511 - f) ** 2 + 2**17
    up, down = SHIFTS[exponential][bits]
    w = shift(g, up + 7 - down - q)
    return (w + (64 if rounding == "nearest" else 0)) >> 7, w


# Steps 6 and 7: accumulation, row sum and missing mass.


def has_exact_sum(recipe, keys):
    """Whether a row of so many keys is divided by the sum of P before it is rounded."""
    return (
        recipe["row_sum"] == "exact"
        and recipe["probability_bits"] == 8
        and recipe["probability_rounding"] == "nearest"
        and recipe["normalization"] == "two_pass"
        and recipe["output"] == "accumulator"
        and keys > 64
    )


def two_pass(scores, visible, value, recipe):
    """O, the divisor, and its fraction bits."""
    m = np.where(visible, scores.values, MASKED_SCORE).max(axis=-1, keepdims=True)
    t = scores.exponent(np.where(visible, m - scores.values, 0))
    P, w = weights(t, scores.F, recipe["exponential"], recipe["probability_bits"], recipe["probability_rounding"])
    P, w = np.where(visible, P, 0), np.where(visible, w, 0)
    l, O = P.sum(axis=-1, keepdims=True), P @ value
    keys = value.shape[2]
    if not has_exact_sum(recipe, keys):
        return O, l, 0, m
    L = np.maximum(w.sum(axis=-1, keepdims=True), 128 * l)
    missing = (L - 128 * l) >> 8
    mean = (mulhi(8 * value.sum(axis=2, keepdims=True), 2**31 // keys) + 1) >> 1
    return O + missing * mean, L, 7, m


def release_factor(step, F):
    """ScaleRelease's factor with 24 fraction bits, of a rise of the maximum with F."""
    q, f = octave_and_fraction(step, F)
    return ((512 - f) << 15) >> q


def online(scores, visible, value, recipe):
    """Algorithm 1: a running maximum, and ScaleRelease before each block of keys."""
    shape = np.broadcast_shapes(scores.values.shape, visible.shape)
    values = np.where(visible, scores.values, MASKED_SCORE)
    m = np.full((*shape[:-1], 1), MASKED_SCORE)
    l, O = np.zeros_like(m), np.zeros((*shape[:-1], value.shape[-1]), np.int64)
    for start in range(0, shape[-1], recipe["key_block"]):
        block = values[..., start : start + recipe["key_block"]]
        seen = block > MASKED_SCORE
        risen = np.maximum(m, block.max(axis=-1, keepdims=True))
        first = m == MASKED_SCORE  # nothing has been summed yet
        alpha = release_factor(scores.exponent(np.where(first, 0, risen - m)), scores.F)
        t = scores.exponent(np.where(seen, risen - block, 0))
        P, _ = weights(t, scores.F, recipe["exponential"], recipe["probability_bits"], recipe["probability_rounding"])
        P = np.where(seen, P, 0)
        O = ((O * alpha) >> 24) + P @ value[:, :, start : start + recipe["key_block"]]
        l = ((l * alpha) >> 24) + P.sum(axis=-1, keepdims=True)
        m = risen
    return np.clip(O, -128 * l, 128 * l), l, 0, m


# Step 8: normalisation, and step 9: output.


def reciprocal(D):
    """About 2^60 / D for 2^30 ≤ D < 2^31."""
    x = 1515870810 - mul(D, 2021161080, 32)
    for _ in range(3):
        x = x + mul(x, 2**28 - mul(D, x, 32), 28)
    return x


def output_ratio(value_scale, output_scale):
    """R and e with s_V / s_O ≈ R · 2^−e, 2^30 ≤ R < 2^31."""
    (m_V, e_V), (m_O, e_O) = split(value_scale), split(output_scale)
    R = mulhi(m_V << 7, reciprocal(m_O << 7)) << 2
    left = 31 - bit_length(R)
    return R << left, 30 - (e_V - e_O) + left


def fused_multiply_add(a, b, c):
    """float32 a · b + c, rounded once: the sum in float64 is rounded to odd, so that rounding it again is harmless."""
    product, c = a.astype(np.float64) * b.astype(np.float64), np.broadcast_to(c, np.broadcast(a, b, c).shape)
    c = c.astype(np.float64)
    total = product + c
    part = total - product
    error = (product - (total - part)) + (c - part)
    bits = total.view(np.int64)
    inexact_even = (error != 0) & (bits & 1 == 0) & np.isfinite(total)
    away = (error > 0) == (total > 0)
    return float32(np.where(inexact_even, bits + np.where(away, 1, -1), bits).view(np.float64))


def attention(
    query, key, value, query_scale, key_scale, value_scale, recipe, softmax_scale,
    offset=None, mask=None, bias=None, causal=False, output_scale=None, floats=False, ids=None,
):  # fmt: skip
    """Int8 query, key and value (batch, heads, tokens, channels) to int8, or to float32 with ``floats``.

    Scales broadcast against their tensor; mask (True takes part) and bias, in fixed point, against the scores. Causal
    attention takes neither. Keys whose id is negative, in ids (batch, keys), take no part.
    """
    heads, queries = query.shape[1:3]
    key, value, key_scale = without_unseen(key, value, key_scale, mask, bias, causal, queries, recipe)
    query, key, value = (x.astype(np.int64) for x in (query, key, value))
    key, value, key_scale, value_scale = (per_query_head(x, heads) for x in (key, value, key_scale, value_scale))

    scores = Scores(query, key, query_scale, key_scale, softmax_scale, bias)
    visible = scores.values > MASKED_SCORE
    if causal:
        visible = visible & np.tri(queries, key.shape[2], dtype=bool)
    if mask is not None:
        visible = visible & mask
    if ids is not None:
        visible = visible & (ids >= 0)[:, None, None, : key.shape[2]]
    accumulate = online if recipe["normalization"] == "online" else two_pass
    O, divisor, fraction_bits, m = accumulate(scores, visible, value, recipe)

    empty = divisor == 0
    divisor = np.where(empty, 1, divisor)
    B = bit_length(divisor)
    x = reciprocal(divisor << (31 - B))
    B = B - fraction_bits
    floored = recipe["output"] == "value_scale"
    if floored:
        O = O // divisor  # floor; the page has it without a division

    if not floats:
        R, e = output_ratio(value_scale, value_scale if output_scale is None else output_scale)
        product = mulhi(O << 23, R >> 2) if floored else mulhi(shift(O, 24 - B), mul(x, R, 32))
        return np.where(empty, 0, saturate(rs(product, np.clip(e - 11, 0, 31)), 8))
    average = float32(O)
    if not floored:
        average = average * np.ldexp(float32(x), -(29 + B))
    if offset is None:
        out = average * value_scale
    else:
        out = fused_multiply_add(average, value_scale, per_query_head(offset, heads))
    out = np.where(empty, float32(0), out)
    poisoned = (m == BIAS_POISON) & (bias is not None)
    for scale in (query_scale, key_scale, value_scale):
        bad = ~((scale > 0) & np.isfinite(scale))
        poisoned = poisoned | (bad.any(axis=2, keepdims=True) if scale is key_scale else bad)
    return np.where(poisoned, float32(np.nan), out)


def float_attention(query, key, value, recipe, softmax_scale, mask=None, bias=None, causal=False):
    """Float query, key and value to float32: step 1, then :func:`attention`. The bias is in nats."""
    query, key, value = (float32(x) for x in (query, key, value))
    bias = None if bias is None else fixed_point_bias(bias)
    key, value, _ = without_unseen(key, value, None, mask, bias, causal, query.shape[2], recipe)
    if recipe["smooth_key"]:
        key = key - midrange(key)[0]
    if recipe["balance"]:
        query, key = balance(query, key)
    if recipe["rotate"]:
        query, key = rotate(query), rotate(key)
        softmax_scale = softmax_scale * query.shape[-1]
    query, query_scale = quantize(query, recipe["query_granularity"])
    key, key_scale = quantize(key, recipe["key_granularity"])
    offset = None
    if recipe["smooth_value"]:
        value, value_scale, offset = quantize_centered(value, recipe["value_granularity"])
    else:
        value, value_scale = quantize(value, recipe["value_granularity"])
    return attention(
        query, key, value, query_scale, key_scale, value_scale, recipe, softmax_scale, offset, mask, bias, causal, floats=True
    )


# docs/integer_network.md


def rescale(acc, left, b, R):
    """Change of unit of int32 sums: b and R for each output, left for the layer."""
    return mul((acc << left) + b, R, 32)


def gelu_tail(r):
    """In the unit 3.28 / 4096."""
    z = mul(r, r, 9)
    w = mul(z, 59898 - 10 * r, 15)
    h = (w << 2) + (18588 - 23 * r)
    return mul(w, h, 20)


def silu_tail(r):
    """In the unit 8 / 4096."""
    z = mul(r, r, 9)
    w = mul(z, 12111 - 11 * r + 2 * z, 15)
    h = 118687 + 11 * r - 5 * z
    return mul(w, h, 22)


def activation(name, u):
    """f of u, in its unit."""
    r = np.maximum(4096 - np.abs(u), 0)
    tail = {"gelu": gelu_tail, "silu": silu_tail, "relu": np.zeros_like}[name](r)
    return np.minimum(np.maximum(u, 0), 2**17 - 1) - tail


def activate(name, u, M, B, n):
    """Sums in the activation's unit to int8."""
    return saturate((activation(name, u) * M + B) >> n, 8)


def gated(x, A, R, B, name, bits):
    """int16 (…, gates and as many values) to int8, int16 or int32."""
    gate, value = np.split(x.astype(np.int64), 2, axis=-1)
    u = mul(gate, A, 28)
    p = mul(activation(name, u), value, 2)
    return saturate(mul(p + B, R, 32), bits)


def inverse_root(v):
    """About 2^44 / √v for 2^28 ≤ v < 2^30."""
    x = 1145106637 - mul(v, 654339257, 30)
    for _ in range(3):
        x = x + mul(x, 2**28 - mul(mul(x, x, 30), v, 30), 29)
    return x


def row_constants(C):
    """I and i with 4 / C ≈ I · 2^−i, K and j with 4 / √C ≈ K · 2^−(30 + j), both rounded."""
    i = 27 + (C - 1).bit_length()
    I = (2 ** (i + 3) // C + 1) // 2
    j = (C.bit_length() - 1) // 2 - 2
    K = (math.isqrt(2 ** (66 + 2 * j) // C) + 1) // 2
    return I, i, K, j


def normalise(h, E, centred=True):
    """N: rows without their mean and deviation, or over their root mean square, with 20 fraction bits."""
    C = h.shape[-1]
    I, i, K, j = row_constants(C)
    S = h.sum(axis=-1, keepdims=True) if centred else 0
    m = mul(S, I, i) if centred else 0
    e = 4 * h - m
    # V from sums of 32 bits, as the page has it
    p, q = e >> 9, e & 511
    sums = ((p * p).sum(axis=-1, keepdims=True), (p * q).sum(axis=-1, keepdims=True), (q * q).sum(axis=-1, keepdims=True))
    assert all((np.abs(each) < 2**31).all() for each in sums)
    V = (sums[0] << 18) + (sums[1] << 10) + sums[2] + E
    k = (bit_length(V) - 29) >> 1
    v = np.maximum(shift(V, -2 * k), 2**28)
    f = mul(inverse_root(v), K, 30)
    l = 8 - k - j
    return mul(mul(C * h - S, 1 << (l + 5), 5), f, 32)


def layer_norm(h, E, G, B, n, bits, centred=True, residual=None):
    """int16 rows (…, channels) to int8, int16 or int32; a residual is added before saturation."""
    N = normalise(h.astype(np.int64), E, centred)
    out = rs(mul(N, G, 28) + B, n)
    return saturate(out if residual is None else residual + out, bits)


def narrow(h, b, R, left, bits):
    """int16 rows (…, channels) in another unit for each channel."""
    return saturate(rescale(h.astype(np.int64), left, b, R), bits)


def linear(x, W, b, R, left, bits=None, residual=None):
    """int8 or int16 rows to int8, int16, int32 or, without bits, what GELU takes; a residual is added before saturation."""
    out = rescale(x.astype(np.int64) @ W.astype(np.int64), left, b, R)
    if bits is None:
        return out
    return saturate(out if residual is None else residual + out, bits)


def cut_patches(images, size):
    """uint8 (batch, channels, height, width) to int8 (batch, patches, channel × row × column), whole patches."""
    batch, channels, height, width = images.shape
    down, across = size
    x = images[:, :, : height // down * down, : width // across * across].astype(np.int64) - 128
    x = x.reshape(batch, channels, height // down, down, width // across, across)
    return x.transpose(0, 2, 4, 1, 3, 5).reshape(batch, -1, channels * down * across)


def mean(h, b, R, left, bits):
    """Mean over the tokens of (batch, tokens, channels), 1 / tokens being in the ratio."""
    return saturate(rescale(h.astype(np.int64).sum(axis=1), left, b, R), bits)


def rotary(x, cos, sin, b, R):
    """int16 (batch, tokens, channels) to int8; cos and sin are (heads, tokens, half the channels of a head)."""
    heads, tokens, half = cos.shape
    x = x.astype(np.int64).reshape(len(x), tokens, -1, heads, 2, half)
    first, second = x[..., 0, :], x[..., 1, :]
    cos, sin = (each.transpose(1, 0, 2)[:, None] for each in (cos, sin))
    turned = np.stack([first * cos - second * sin, second * cos + first * sin], axis=-2)
    return saturate(rescale(turned.reshape(len(x), tokens, -1), 0, b, R), 8)


def cosines_and_sines(turns):
    """The lower and the upper 16 bits of int32, each with its sign."""
    low = turns.astype(np.int64) % 2**16
    return np.where(low < 2**15, low, low - 2**16), turns.astype(np.int64) >> 16


def embed(ids, table, positions, padded):
    """Rows of a table by ids, where ``padded`` row 0 for a negative id, plus one for each place; int16."""
    rows = table[np.maximum(ids, 0) if padded else ids].astype(np.int64)
    return rows if positions is None else saturate(rows + positions[: ids.shape[1]].astype(np.int64), 16)


def select_token(h, ids, token):
    """The token of each text whose id is the first that is ``token``, or the first of the largest where that is None."""
    wanted = ids.max(axis=1, keepdims=True) if token is None else token
    places = [next((t for t, is_it in enumerate(row) if is_it), 0) for row in ids == wanted]
    return np.stack([text[place] for text, place in zip(h, places, strict=True)])


def text_attention(parts, ids, heads, first, causal, **given):
    """int8 (batch, tokens, 3 × heads × channels) to (batch, tokens that ask, heads × channels).

    Keys whose id is negative, in ids (batch, tokens), and later ones than the query where it is causal, take no part.
    """
    batch, tokens, _ = parts.shape
    query, key, value = parts.reshape(batch, tokens, 3, heads, -1).transpose(2, 0, 3, 1, 4)
    out = attention(query[:, :, : first or tokens], key, value, ids=ids, causal=causal, **given)
    return out.transpose(0, 2, 1, 3).reshape(batch, first or tokens, -1)


def to_windows(x, grid, window, roll):
    """(batch, rows × columns, channels) to (batch × windows, tokens, channels), rolled up and left."""
    (rows, columns), (high, wide) = grid, window
    x = np.roll(x.reshape(len(x), rows, columns, -1), (-roll[0], -roll[1]), axis=(1, 2))
    x = x.reshape(len(x), rows // high, high, columns // wide, wide, -1)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(-1, high * wide, x.shape[-1])


def from_windows(x, grid, window, roll):
    """The inverse of to_windows."""
    (rows, columns), (high, wide) = grid, window
    x = x.reshape(-1, rows // high, columns // wide, high, wide, x.shape[-1])
    x = x.transpose(0, 1, 3, 2, 4, 5).reshape(-1, rows, columns, x.shape[-1])
    return np.roll(x, roll, axis=(1, 2)).reshape(len(x), rows * columns, -1)


def join_patches(h, grid):
    """Join 2 × 2 tokens of (batch, rows × columns, channels): upper left, lower left, upper right, lower right."""
    x = h.reshape(len(h), *grid, -1)
    x = np.concatenate([x[:, row::2, column::2] for column in (0, 1) for row in (0, 1)], axis=-1)
    return x.reshape(len(h), -1, x.shape[-1])


# Whole networks: docs/integer_network.md, "Files".


class Network:
    """The nodes of a network with their tensors and constants; each method is an operator.

    Methods take the name and sizes of a node, and the values of its inputs.
    """

    def __init__(self, parameters, tensors):
        self.parameters, self.tensors = parameters, tensors

    def get(self, name, own):
        return self.tensors[f"{name}.{own}"].astype(np.int64)

    def words(self, name, own, tokens, channels):
        """int16 numbers (tokens, channels), stored two by two in an int32."""
        return self.tensors[f"{name}.{own}"].view(np.int16)[: tokens * channels].reshape(tokens, channels).astype(np.int64)

    def layer(self, name):
        """W (inputs, outputs), b, R and left."""
        W, b, R = (self.get(name, own) for own in ("weight", "bias", "multiplier"))
        return W.T, b, R, self.parameters["constants"][name]["left"]

    def linear(self, name, sizes, x, residual=None):
        if not sizes["tokens"]:
            return linear(x, *self.layer(name), BITS[sizes["dtype"]], residual)
        places = self.get(name, "scatter")
        residual = None if residual is None else residual[:, places]
        out = np.empty((*x.shape[:2], sizes["outputs"]), np.int64)
        out[:, places] = linear(x, *self.layer(name), BITS[sizes["dtype"]], residual)
        return out

    def wide_linear(self, name, sizes, x):
        return linear(x, *self.layer(name), 32)

    def with_activation(self, name, x, by):
        M, B = self.get(name, f"{by}_multiplier"), self.get(name, f"{by}_offset")
        return activate(by, linear(x, *self.layer(name)), M, B, self.parameters["constants"][name][f"{by}_shift"])

    def linear_gelu(self, name, sizes, x):
        return self.with_activation(name, x, "gelu")

    def linear_silu(self, name, sizes, x):
        return self.with_activation(name, x, "silu")

    def linear_relu(self, name, sizes, x):
        return self.with_activation(name, x, "relu")

    def gated(self, name, sizes, x):
        A = self.parameters["constants"][name]["gate_multiplier"]
        R, B = self.get(name, "multiplier"), self.get(name, "offset")
        return gated(x, A, R, B, sizes["activation"], BITS[sizes["dtype"]])

    def patch_embedding(self, name, sizes, images):
        position, channels = 0, sizes["outputs"]
        if sizes["positions"]:
            position = self.words(name, "position_words", sizes["positions"], channels)
        h = linear(cut_patches(images, sizes["patch_size"]), *self.layer(name), 16, position)
        if sizes["prefix_tokens"]:
            prefix = self.words(name, "prefix_words", sizes["prefix_tokens"], channels)
            h = np.concatenate([np.broadcast_to(prefix, (len(h), *prefix.shape)), h], axis=1)
        return h

    def gathered(self, name, sizes, h):
        return h[:, self.get(name, "gather")].reshape(len(h), sizes["gather"][0], -1) if sizes["gather"] else h

    def narrow(self, name, sizes, h):
        b, R = self.get(name, "offset"), self.get(name, "multiplier")
        return narrow(self.gathered(name, sizes, h), b, R, self.parameters["constants"][name]["left"], 8)

    def token_embedding(self, name, sizes, ids):
        table, count = self.words(name, "table_words", sizes["vocabulary"], sizes["channels"]), sizes["positions"]
        positions = self.words(name, "position_words", count, sizes["channels"]) if count else None
        return embed(ids, table, positions, sizes.get("padded", False))

    def select_token(self, name, sizes, h, ids):
        return select_token(h, ids, sizes["token"])

    def rms_norm(self, name, sizes, h, residual=None):
        return self.layer_norm(name, sizes, h, residual, centred=False)

    def layer_norm(self, name, sizes, h, residual=None, centred=True):
        h = self.gathered(name, sizes, h)
        if sizes["part"]:
            first, heads = sizes["part"]
            h = h[..., first : first + heads * sizes["channels"]].reshape(*h.shape[:2], heads, -1)
        constants = self.parameters["constants"][name]
        gain, offset = self.get(name, "gain"), self.get(name, "offset")
        bits = BITS[sizes["dtype"]]
        out = layer_norm(h, constants["epsilon"], gain, offset, constants["shift"], bits, centred, residual)
        return out[:, 0] if sizes["single"] else out

    def mean(self, name, sizes, h):
        if h.shape[1] != sizes["tokens"]:
            h = h[:, sizes["first"] : sizes["first"] + sizes["tokens"]]
        b, R = self.get(name, "offset"), self.get(name, "multiplier")
        return mean(h, b, R, self.parameters["constants"][name]["left"], BITS[sizes["dtype"]])

    def rotary(self, name, sizes, x):
        x = x.reshape(*x.shape[:2], sizes["channels"])
        return rotary(x, *cosines_and_sines(self.get(name, "turns")), self.get(name, "offset"), self.get(name, "multiplier"))

    def attention(self, name, sizes, *parts):
        heads, dim, ids = sizes["heads"], sizes["head_dim"], None
        if sizes.get("padded"):
            *parts, ids = parts
        views = []
        for part in parts:
            tokens = sizes["tokens"] or part.shape[1]
            views += list(
                part.reshape(-1, tokens, math.prod(part.shape[2:]) // (heads * dim), heads, dim).transpose(2, 0, 3, 1, 4)
            )
        if sizes["queries"]:
            constant = self.get(name, "query")
            views = [np.broadcast_to(constant, (len(views[0]), *constant.shape[1:])), *views]
        query, key, value = views
        query = query[:, :, : sizes["first"] or None]
        scales = [self.tensors[f"{name}.{role}_scale"].view(np.float32) for role in ("query", "key", "value", "output")]
        bias = None
        if sizes["bias"]:
            bias = self.get(name, "bias")
            bias = np.tile(bias, (len(query) // len(bias), 1, 1, 1))  # window by window, image by image
        out = attention(
            query, key, value, *scales[:3], self.parameters["recipe"], sizes["softmax_scale"], bias=bias,
            causal=sizes.get("causal", False), output_scale=scales[3], ids=ids,
        )  # fmt: skip
        return out.transpose(0, 2, 1, 3).reshape(len(parts[0]), -1, heads * dim)

    def first(self, name, sizes, h):
        return h[:, : sizes["count"]]

    def join(self, name, sizes, *parts):
        return np.concatenate(parts, axis=-1)

    def widen(self, name, sizes, h):
        return h if sizes["token"] is None else h[:, sizes["token"]]

    def tokens(self, name, sizes, h):
        h = h[:, sizes["first"] : sizes["first"] + sizes["count"]]
        if sizes.get("joined") is not None:
            return h.reshape(len(h), *sizes["joined"])
        if sizes["shape"] is None:
            return h
        h = h.reshape(len(h), *sizes["shape"], -1)
        return h.transpose(0, 3, 1, 2) if sizes["channels_first"] else h

    def run(self, images):
        """Values of all nodes by name, in their order."""
        values = {"images": images}
        for node in self.parameters["nodes"]:
            operator = NODES[node["operator"]]
            values[node["name"]] = operator(self, node["name"], node["sizes"], *(values[name] for name in node["inputs"]))
        return values


NODES = {
    "Linear": Network.linear,
    "WideLinear": Network.wide_linear,
    "LinearGelu": Network.linear_gelu,
    "LinearSilu": Network.linear_silu,
    "LinearRelu": Network.linear_relu,
    "Gated": Network.gated,
    "PatchEmbedding": Network.patch_embedding,
    "LayerNorm": Network.layer_norm,
    "Mean": Network.mean,
    "Attention": Network.attention,
    "First": Network.first,
    "Join": Network.join,
    "Widen": Network.widen,
    "Tokens": Network.tokens,
    "Rotary": Network.rotary,
    "RmsNorm": Network.rms_norm,
    "Narrow": Network.narrow,
    "TokenEmbedding": Network.token_embedding,
    "SelectToken": Network.select_token,
}


# Files: docs/golden_vectors.md.

ARITHMETIC_VERSION = 3
BITS = {"int8": 8, "int16": 16, "int32": 32}


def to_type(x, name):
    """Round float32 to an output type, ties to even. bfloat16, which NumPy lacks, stays in float32."""
    if name != "bfloat16":
        return x.astype(name)
    bits = x.view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)
    return np.where(np.isnan(x), x, rounded)


def from_bfloat16(bits):
    return (bits.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def masks(inputs):
    """Keyword arguments of a mask: bool, or a bias."""
    mask = inputs.get("mask")
    if mask is None:
        return {}
    return {"mask": mask} if mask.dtype == bool else {"bias": mask}


def scales(inputs):
    return (inputs[f"{role}_scale"] for role in ("query", "key", "value"))


def run_int8_attention(p, x):
    out = attention(
        x["query"], x["key"], x["value"], *scales(x), p["recipe"], p["scale"], offset=x.get("value_offset"),
        causal=p["causal"], output_scale=x.get("output_scale"), floats=p["output"] != "int8", **masks(x),
    )  # fmt: skip
    return {"output": to_type(out, p["output"])}


def run_attention(p, x):
    out = float_attention(x["query"], x["key"], x["value"], p["recipe"], p["scale"], causal=p["causal"], **masks(x))
    return {"output": to_type(out, p["output"])}


def run_quantize(p, x):
    made = (quantize_centered if p["center"] else quantize)(x["x"], p["granularity"])
    return dict(zip(("values", "scale", "offset"), made, strict=False))


def run_score_multiplier(p, x):
    R, E = combine(x["query_scale"], x["key_scale"], p["scale"])
    M, F = multiplier(R, E, BUDGET // p["head_dim"])
    M_biased, F_biased = multiplier(R, E, BUDGET // 2 // p["head_dim"])
    return {"R": R, "E": E, "M": M, "F": F, "M_biased": M_biased, "F_biased": F_biased}


def run_column_multiplier(p, x):
    A, common, c = column_multiplier(x["key_scale"], p["head_dim"])
    R, E = combine(x["query_scale"], common, p["scale"])
    R, F = wide_multiplier(R, E, c, 24)
    return {"A": A, "R": R, "F": F}


def run_exponential(p, x):
    t, F = x["t"].astype(np.int64), x["F"].astype(np.int64)
    out = {rounding: weights(t, F, p["exponential"], p["bits"], rounding) for rounding in ("nearest", "floor")}
    exact = {"w": out["nearest"][1]} if p["bits"] == 8 else {}
    release = {"release": release_factor(t, F)} if p["exponential"] == "linear" else {}
    return {rounding: P for rounding, (P, _) in out.items()} | exact | release


def run_output_ratio(p, x):
    R, e = output_ratio(x["value_scale"], x["output_scale"])
    return {"R": R, "shift": np.clip(e - 11, 0, 31)}


def layer(x):
    """W (inputs, outputs), b and R of a linear layer in int64."""
    return x["weight"].astype(np.int64).T, x["bias"].astype(np.int64), x["multiplier"].astype(np.int64)


def run_linear(p, x):
    residual = x.get("residual")
    return {"output": linear(x["x"], *layer(x), p["left"], BITS[p["output"]], residual)}


def run_with_activation(by, p, x):
    u = linear(x["x"], *layer(x), p["left"])
    M, B = x[f"{by}_multiplier"].astype(np.int64), x[f"{by}_offset"].astype(np.int64)
    return {"output": activate(by, u, M, B, p[f"{by}_shift"])}


def run_gated(p, x):
    R, B = x["multiplier"].astype(np.int64), x["offset"].astype(np.int64)
    return {"output": gated(x["x"], p["gate_multiplier"], R, B, p["activation"], BITS[p["output"]])}


def run_layer_norm(p, x):
    G, B = x["gain"].astype(np.int64), x["offset"].astype(np.int64)
    return {"output": layer_norm(x["h"], p["epsilon"], G, B, p["shift"], BITS[p["output"]])}


def run_head_norm(p, x):
    first, heads = p["part"]
    C = x["gain"].size
    rows = x["h"][..., first : first + heads * C].reshape(*x["h"].shape[:2], heads, C)
    return run_layer_norm(p, {**x, "h": rows})


def run_rotary(p, x):
    b, R = (x[name].astype(np.int64) for name in ("offset", "multiplier"))
    return {"output": rotary(x["x"], *cosines_and_sines(x["turns"]), b, R)}


def run_norm(p, x):
    G, B = x["gain"].astype(np.int64), x["offset"].astype(np.int64)
    bits = BITS[p["output"]]
    return {"output": layer_norm(x["h"], p["epsilon"], G, B, p["shift"], bits, p["centred"], x.get("residual"))}


def run_narrow(p, x):
    b, R = x["offset"].astype(np.int64), x["multiplier"].astype(np.int64)
    return {"output": narrow(x["h"], b, R, p["left"], BITS[p["output"]])}


def run_text_attention(p, x):
    given = {f"{role}_scale": x[f"{role}_scale"] for role in ("query", "key", "value", "output")}
    given |= {"recipe": p["recipe"], "softmax_scale": p["scale"], "bias": x.get("bias")}
    return {"output": text_attention(x["x"], x.get("ids"), p["heads"], p["first"], p["causal"], **given)}


def run_row_constants(p, x):
    found = np.array([row_constants(C) for C in x["C"].tolist()])
    return dict(zip(("I", "i", "K", "j"), found.T, strict=True))


def run_mean(p, x):
    b, R = x["offset"].astype(np.int64), x["multiplier"].astype(np.int64)
    return {"output": mean(x["h"], b, R, p["left"], BITS[p["output"]])}


def run_windows(p, x):
    windows = to_windows(x["x"], p["grid"], p["window"], p["shift"])
    return {"windows": windows, "joined": from_windows(windows, p["grid"], p["window"], p["shift"])}


def run_patch_merging(p, x):
    G, B = x["gain"].astype(np.int64), x["offset"].astype(np.int64)
    joined = layer_norm(join_patches(x["h"], p["grid"]), p["epsilon"], G, B, p["norm_shift"], 8)
    return {"output": linear(joined, *layer(x), p["left"], 16)}


def run_network(p, x):
    values = Network(p, {role.removeprefix("network."): tensor for role, tensor in x.items()}).run(x["images"])
    made = {f"node.{node['name']}": values[node["name"]] for node in p["nodes"]}
    return made | {name: values[node] for name, node in p["outputs"].items()}


OPERATIONS = {
    "quantize": run_quantize,
    "quantize_with_scale": lambda p, x: {"values": quantize_with_scale(x["x"], x["scale"])},
    "quantize_bias": lambda p, x: {"bias": fixed_point_bias(x["bias"])},
    "score_multiplier": run_score_multiplier,
    "column_multiplier": run_column_multiplier,
    "exponential": run_exponential,
    "reciprocal": lambda p, x: {"x": reciprocal(x["D"].astype(np.int64))},
    "output_ratio": run_output_ratio,
    "int8_attention": run_int8_attention,
    "attention": run_attention,
    "linear": run_linear,
    "linear_gelu": lambda p, x: run_with_activation("gelu", p, x),
    "linear_silu": lambda p, x: run_with_activation("silu", p, x),
    "linear_relu": lambda p, x: run_with_activation("relu", p, x),
    "gated": run_gated,
    "multiply_add": lambda p, x: {"sum": fused_multiply_add(x["a"], x["b"], x["c"])},
    "inverse_root": lambda p, x: {"x": inverse_root(x["v"].astype(np.int64))},
    "row_constants": run_row_constants,
    "normalise": lambda p, x: {"N": normalise(x["h"].astype(np.int64), p["epsilon"])},
    "layer_norm": run_layer_norm,
    "head_norm": run_head_norm,
    "rotary": run_rotary,
    "norm": run_norm,
    "narrow": run_narrow,
    "mean": run_mean,
    "token_embedding": lambda p, x: {"output": embed(x["ids"], x["table"], x.get("position"), p["padded"])},
    "select_token": lambda p, x: {"output": select_token(x["h"], x["ids"], p["token"])},
    "text_attention": run_text_attention,
    "patches": lambda p, x: {"output": cut_patches(x["images"], p["patch_size"])},
    "windows": run_windows,
    "patch_merging": run_patch_merging,
    "network": run_network,
}


def read(path):
    """Yield name, operation, parameters, inputs and outputs of each case of a file."""
    with safe_open(path, framework="numpy") as file:
        header = file.metadata() or {}
        if header.get("format") != "qflash golden vectors":
            raise ValueError(f"{path} holds no golden vectors of QFlash")
        version = int(header["arithmetic_version"])
        if version != ARITHMETIC_VERSION:
            raise ValueError(f"{path} has arithmetic version {version}, this checker computes version {ARITHMETIC_VERSION}")
        parts = {}
        for full in file.keys():  # noqa: SIM118 - the file is no dictionary
            name, role = full.rsplit("/", 1)
            parts.setdefault(name, {})[role] = file.get_tensor(full)
    recipes = json.loads(header["recipes"])
    for name, about in json.loads(header["cases"]).items():
        parameters = about["parameters"]
        if "recipe" in parameters:
            parameters["recipe"] = recipes[parameters["recipe"]]
        inputs, outputs = parts[f"{name}/in"], parts[f"{name}/out"]
        inputs |= {role: from_bfloat16(inputs[role]) for role in about.get("bfloat16", ())}
        if parameters.get("output") == "bfloat16":
            outputs["output"] = from_bfloat16(outputs["output"])
        yield name, about["operation"], parameters, inputs, outputs


def compare(want, got):
    """Say how outputs differ: bits, but any NaN equals any other, and −0 is not +0. Empty if they do not."""
    if sorted(want) != sorted(got):
        return f"outputs are {sorted(got)}, not {sorted(want)}"
    for role, expected in want.items():
        found = np.asarray(got[role])
        if found.shape != expected.shape:
            return f"{role} has shape {found.shape}, not {expected.shape}"
        equal = found == expected
        if expected.dtype.kind == "f":
            equal = (equal & (np.signbit(found) == np.signbit(expected))) | (np.isnan(found) & np.isnan(expected))
        if not equal.all():
            place = tuple(int(i) for i in np.argwhere(~equal)[0])
            wrong = np.count_nonzero(~equal)
            return f"{role}: {wrong} of {equal.size} differ, first at {place}: {found[place]}, not {expected[place]}"
    return ""


def check(path, report=print):
    """Check one file; returns the numbers of cases and of those that differ."""
    cases = wrong = 0
    for name, operation, parameters, inputs, outputs in read(path):
        # overflow to infinity, and NaN, are part of what float cases hold
        with np.errstate(all="ignore"):
            difference = compare(outputs, OPERATIONS[operation](parameters, inputs))
        cases += 1
        wrong += bool(difference)
        if difference:
            report(f"MISMATCH {path}: {name} ({operation}): {difference}")
    return cases, wrong


def main():
    parser = argparse.ArgumentParser(description="Check golden vectors of QFlash against an independent computation.")
    parser.add_argument("files", nargs="+", metavar="FILE", help="safetensors files of golden vectors")
    failed = False
    for path in parser.parse_args().files:
        try:
            cases, wrong = check(path)
        except (OSError, ValueError, SafetensorError) as error:
            print(f"ERROR {path}: {error}")
            failed = True
            continue
        print(f"{path}: {cases} cases, {wrong} mismatches")
        failed |= wrong > 0 or cases == 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
