"""I-ViT (Li and Gu, ICCV 2023): an unfused integer pipeline around Shiftmax, the paper's integer-only baseline.

    int8 Q Kᵀ → int32 → int8 → Shiftmax → 7-bit P → int8 P V → int32 → int8

Shiftmax is I-ViT's Algorithm 1 (Section 3.3). With a score x (8 bits, minus its row's maximum) at scale S and
I₀ = round(1 / S):

    ShiftExp    p = x + (x >> 1) - (x >> 4)             x·log₂e, as 1.4375·x
                q = ⌊-p / I₀⌋,  r = -p - q·I₀            octaves and remainder
                e = ((-r >> 1) + I₀) << (n - q)         chord of 2⁻ʳ
    IntDiv      P = (⌊2³¹ / Σe⌋ · e) >> 24               7 fraction bits, floor

Scores are requantised to int8 at one scale, as its models and its TVM operators do. That is what limits it: on the
QFlash paper's inputs 1 / S is about 5, and I₀ keeps nothing of its fraction, so that the softmax's temperature is off by up
to a tenth, depending on the largest score drawn. Its TVM operators give P 7 bits, which drops weights below 1/128; its
PyTorch models give P 15, which int8 products cannot take. The first is ``i-vit``, the second ``i-vit-16``.

:func:`prepare` runs ``i-vit`` as three Triton kernels with tensors in device memory between them and the requantisations in
the products' epilogues. Shiftmax's I₀ and n are constants of its compiled kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch

from qflash.specification.quantization import QuantizedTensor

from .integer import Scores, fixed_point, integer_attention, integer_product, make_scores, quantize_input
from .method import Method
from .tuning import BaselineShape, tuned_tiles

if TYPE_CHECKING:
    from qflash.kernels.launch_recorder import KernelLaunch

FRACTION_BITS, WIDE_FRACTION_BITS = 7, 15
"""Of P: k_out = 8 and 16 with the sign."""

MOST_SHIFT = 15
_SUM_BITS = 24
"""Σe stays below 2²⁴, so that ⌊2³¹ / Σe⌋ has at least 7 bits. I-ViT fixes n at 15 and lets the sum run into 2³¹ where scores
are small or many; here n gives way."""


KERNELS = ("i_vit_scores", "i_vit_shiftmax", "i_vit_values")
"""The three kernels, by their names in the table of tiles."""


class Constants(NamedTuple):
    """What fixes the scales of a call of the kernels.

    Attributes:
        scores, output: multiplier and shift that requantise the two products, see :func:`.integer.requantize`.
        unit, shift: I₀ and n of Shiftmax.
    """

    scores: tuple[int, int]
    unit: int
    shift: int
    output: tuple[int, int]


def shiftmax_constants(scale: torch.Tensor, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return I₀ and n of Shiftmax.

    I₀ is kept in 1 ... 2²⁴ / keys: 1 / S rounds to zero for S > 2.

    Args:
        scale: nats a unit of the 8-bit score, float64, one element.
        keys: of a row.

    Returns:
        two int64 tensors of one element.
    """
    most = (1 << _SUM_BITS) // keys
    unit = (1.0 / scale).nan_to_num(1.0).clamp(1, most).round().to(torch.int64)
    room = torch.log2(most / unit.double()).floor().to(torch.int64)
    return unit, room.clamp(0, MOST_SHIFT)


def shiftmax(scores: Scores, fraction_bits: int = FRACTION_BITS) -> tuple[torch.Tensor, int]:
    """Return I-ViT's attention weights, below 2**fraction_bits, of scores of 8 bits (Algorithm 1)."""
    unit, shift = shiftmax_constants(scores.scale, scores.values.shape[-1])
    x = scores.below_maximum()
    x = x + (x >> 1) - (x >> 4)
    x = -torch.maximum(x, -shift * unit)
    octaves = x // unit
    remainder = x - octaves * unit
    exp = ((-remainder >> 1) + unit) << (shift - octaves)
    if scores.keep is not None:
        exp = exp.masked_fill(~scores.keep, 0)
    factor = (2**31 - 1) // exp.sum(dim=-1, keepdim=True).clamp(min=1)
    return factor * exp >> (31 - fraction_bits), fraction_bits


def _softmax(scores: Scores, fraction_bits: int = FRACTION_BITS) -> tuple[torch.Tensor, int]:
    eight = scores.requantize(127, scores.amplitude())
    return shiftmax(Scores(eight.values.clamp(-128, 127), eight.scale, eight.keep), fraction_bits)


def kernel_calls(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    constants: Constants,
    *,
    tiles: tuple[tuple[int, ...] | None, ...] = (),
) -> tuple[KernelLaunch, KernelLaunch, KernelLaunch]:
    """Return the launches of product, Shiftmax and product that fill ``out``; scores and weights lie in tensors of their own.

    Args:
        query, key, value: int8, contiguous (batch, heads, tokens, channels).
        out: int8, contiguous (batch, heads, queries, value channels).
        constants: scales in integers.
        tiles: of the three kernels, for tests and tuning; None, or none at all: the table's, or by the kernels' rules.

    Raises:
        ImportError: there is no Triton.
    """
    from .float_softmax_kernels import pack_value
    from .i_vit_kernels import ALIGNMENT, aligned_keys, product_call, shiftmax_call

    keys = key.shape[2]
    shape = BaselineShape(query.shape[0] * query.shape[1], query.shape[2], keys, query.shape[3], value.shape[3])
    first, second, third = tiles or (tuned_tiles(kernel, "int8", shape, query.device) for kernel in KERNELS)
    scores = torch.empty((*query.shape[:3], aligned_keys(keys)), dtype=torch.int8, device=query.device)
    weights = torch.empty(scores.shape, dtype=torch.int8, device=query.device)
    # V lies (channels, keys): the int8 tensor core reads both operands along the keys
    packed = pack_value(value, ALIGNMENT)
    return (
        product_call(query, key.mT, scores, *constants.scores, tiles=first),
        shiftmax_call(scores, weights, keys, constants.unit, constants.shift, tiles=second),
        product_call(weights, packed.mT, out, *constants.output, tiles=third),
    )


def prepare(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Callable[[], QuantizedTensor]:
    """Quantise, fix the scales of scores and output (I-ViT's are static) and return a call of the three kernels.

    Args:
        query, key, value: float (batch, heads, tokens, channels) on a CUDA device, or on the CPU in Triton's interpreter.

    Returns:
        a function of no arguments that returns the int8 output with its scale, (batch, heads, queries, value channels).

    Raises:
        ImportError: there is no Triton.
    """
    (query_int8, query_scale), (key_int8, key_scale), (value_int8, value_scale) = map(quantize_input, (query, key, value))
    unit = (query_scale.double() * key_scale.double() * query.shape[-1] ** -0.5).reshape(())
    scores = make_scores(query_int8, key_int8, unit)
    span = scores.amplitude()
    eight = scores.requantize(127, span)
    eight = Scores(eight.values.clamp(-128, 127), eight.scale, None)
    weights, bits = shiftmax(eight)
    most = integer_product(weights, value_int8, key.shape[-2] << (bits + 7)).abs().amax().clamp(min=1)
    first, second = ((int(x), int(y)) for x, y in (fixed_point(127 / amplitude.double()) for amplitude in (span, most)))
    i_0, shift = (int(x) for x in shiftmax_constants(eight.scale, key.shape[-2]))
    output_scale = (value_scale.double() * most * 2.0**-bits / 127).float()
    del scores, eight, weights
    output = torch.empty((*query.shape[:3], value.shape[3]), dtype=torch.int8, device=query.device)
    operands = query_int8.contiguous(), key_int8.contiguous(), value_int8.contiguous()
    calls = kernel_calls(*operands, output, Constants(first, i_0, shift, second))

    def run() -> QuantizedTensor:
        for call in calls:
            call.run()
        return QuantizedTensor.from_kernel(output, output_scale)

    return run


I_VIT = Method(
    "i-vit", "I-ViT", "tensor", "tensor", "tensor", True, ((8, 8), (8, 8)),
    functools.partial(integer_attention, softmax=_softmax), prepare,
)  # fmt: skip
I_VIT_16 = Method(
    "i-vit-16", "I-ViT, 16-bit P", "tensor", "tensor", "tensor", True, ((8, 8), (16, 8)),
    functools.partial(integer_attention, softmax=functools.partial(_softmax, fraction_bits=WIDE_FRACTION_BITS)),
)  # fmt: skip
