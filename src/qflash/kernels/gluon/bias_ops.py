"""A float bias beside scores: its conversion to octaves, and sums with and without marks (Gluon).

Steps 2 and 3 of ``docs/algorithm.md`` with a bias, with the integers of :func:`.common.tile_ops.scores`. -inf, NaN and biases
far from 0 need marks, and selects per score. Kernels compute without them first (:func:`clamped_bias`), see whether that was
right, and compute again with them where it was not.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..common.quantize_ops import bias_base, bias_to_fixed
from ..common.tile_ops import BIAS_EVEN, BIAS_LIMIT, BIAS_MASKED, BIAS_POISON, MASKED
from .row_ops import beside_rows

# Two 16-bit floats, each at least -4096 -> units of 1/65536 octaves: times 65536 * log2(e), rounded, then rounded to integers
# as in :func:`.common.quantize_ops.bias_to_fixed`.
_TO_FIXED = "mul.rn.f32 a, a, 0f47B8AA3B; mul.rn.f32 b, b, 0f47B8AA3B; cvt.rni.s32.f32 $0, a; cvt.rni.s32.f32 $1, b;}"
CLAMPED_F16 = gl.constexpr(
    "{.reg .b32 c; .reg .b16 x, y; .reg .f32 a, b; mov.b32 c, 0xEC00EC00; max.f16x2 c, $2, c; mov.b32 {x, y}, c; "
    "cvt.f32.f16 a, x; cvt.f32.f16 b, y; " + _TO_FIXED
)
CLAMPED_BF16 = gl.constexpr(
    "{.reg .b32 c, d; .reg .f32 a, b; mov.b32 c, 0xC580C580; max.bf16x2 c, $2, c; shl.b32 d, c, 16; mov.b32 a, d; "
    "and.b32 d, c, 0xFFFF0000; mov.b32 b, d; " + _TO_FIXED
)


@gluon.jit
def clamped_bias(bias):
    """A tile of a bias of 16-bit floats in 1/65536 octaves, int32; what is less than -4096 nats, and NaN, counts as that.

    Beside a key whose bias is at least -1024 nats, no such key has a P other than 0, if scores differ by less than 2**27
    units: what is left of 3072 nats is more than 64 octaves. So is what is left of the limit at which
    :func:`qflash.quantize_bias` clamps.
    """
    if gl.bfloat16 == bias.dtype:
        x = gl.inline_asm_elementwise(CLAMPED_BF16, "=r,=r,r", [bias], gl.int32, True, 2)
    else:
        x = gl.inline_asm_elementwise(CLAMPED_F16, "=r,=r,r", [bias], gl.int32, True, 2)
    return x


@gluon.jit
def fixed_with_marks(bias, row_max):
    """A tile of a float bias in 1/65536 octaves, with marks; ``row_max`` is the largest bias of each row."""
    L: gl.constexpr = bias.type.layout
    row_max = beside_rows(row_max, L)
    base, even = bias_base(row_max)
    fixed = bias_to_fixed(bias - base, False)
    fixed = gl.where(even, gl.where(bias == row_max, BIAS_EVEN, BIAS_MASKED), fixed)
    fixed = gl.where(bias == float("-inf"), BIAS_MASKED, fixed)
    return gl.where(bias < float("inf"), fixed, BIAS_POISON)


@gluon.jit
def scaled_scores(s, scale):
    """Scores in octaves, the unit of the bias, with 16 fraction bits unless a score unit is too large for that."""
    L: gl.constexpr = s.type.layout
    multiplier, drop = scale
    return (s * beside_rows(multiplier, L)) >> beside_rows(drop, L)


@gluon.jit
def add_any_bias(s, bias, fraction_bits):
    """Scores of :func:`scaled_scores` plus a bias with marks, as in :func:`.common.tile_ops.scores`."""
    L: gl.constexpr = s.type.layout
    z = s + (bias >> (16 - beside_rows(fraction_bits, L)))
    z = gl.where(bias > BIAS_LIMIT, bias, z)
    return gl.where(bias == BIAS_MASKED, MASKED, z)
