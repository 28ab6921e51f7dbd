"""QAttn (Kluska et al., CVPR 2024 workshops): int8 Q Kᵀ, float softmax, bfloat16 P V, one scale a tensor.

Q, K and V are int8 with one scale each. The int32 scores are multiplied by the product of Q's and K's scales,
FlashAttention-2's online softmax follows in float32, and the weights, rounded to bfloat16, are multiplied with V in
bfloat16 with float32 sums. V's scale multiplies the sums instead of V's elements: int8 values are exact in
bfloat16, and scaled ones would not be. The original writes int8 at one scale a tensor, and so does the kernel of
:func:`prepare`, at a scale fitted beforehand; ``attention`` is from float to float and does not round its output.

SQNR on the QFlash paper's inputs (batch 8): 37.5 dB on A2 and 38.2 dB on A7, where that paper's accuracy table has 34.12
and 34.75. The difference arises around the attention, not in it. The paper times and tests the original as it is, which
belongs to a bfloat16 model with int8 activations between layers. With bfloat16 inputs quantised by a quotient that is
rounded to bfloat16 too (in steps of half an integer above 64), and an int8 output of one scale whose conversion cuts off
the fraction, this formula has 33.9 and 34.7 dB, within 0.3 dB of the paper; the tests show it. Which of these steps the
paper's run took is inferred from its figures. None is taken here, in the baseline's favour.

The kernel (:mod:`qflash_lab.baselines.float_softmax_kernels`) takes no mask, as there is none in the method's paper; with a
mask :func:`.online.attend` takes the plain formula on every device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from qflash.api import quantize
from qflash.specification.quantization import QuantizedTensor, scale_from_amplitude

from .method import Method
from .online import BLOCK, LOG2_E, attend, check_kernel, integer_scores, online_softmax

if TYPE_CHECKING:
    from qflash.kernels.launch_recorder import KernelLaunch

Operands = tuple[QuantizedTensor, QuantizedTensor, QuantizedTensor]
"""Query, key and value, int8 with one scale each."""


def quantize_operands(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Operands:
    """Quantise query, key and value."""
    return quantize(query), quantize(key), quantize(value)


def formula(operands: Operands, attn_mask: torch.Tensor | None, scale: float, *, block: int = BLOCK) -> torch.Tensor:
    """Compute the attention of quantised operands in plain PyTorch.

    Args:
        operands: query, key and value with one scale each.
        attn_mask: bool (True takes part) or additive, broadcastable to (batch, heads, queries, keys), or None.
        scale: factor of the scores.
        block: keys a tile.

    Returns:
        float32 (batch, heads, queries, value channels).
    """
    query, key, value = operands
    wide = value.values.to(torch.float32)

    def product(weights: torch.Tensor, start: int) -> torch.Tensor:
        return weights.to(torch.bfloat16).to(torch.float32) @ wide[..., start : start + block, :]

    row = query.scale * key.scale * (scale * LOG2_E)
    scores = integer_scores(query.values, key.values)
    return online_softmax(scores, row.reshape(1, 1, 1, 1), product, attn_mask, block=block) * value.scale


def kernel_call(
    operands: Operands,
    scale: float,
    out: torch.Tensor,
    *,
    output_scale: torch.Tensor | None = None,
    tiles: tuple[int, ...] | None = None,
) -> KernelLaunch:
    """Return the kernel launch that fills ``out`` from the operands.

    Args:
        operands: query, key and value with one scale each.
        scale: factor of the scores.
        out: (batch, heads, queries, value channels), contiguous, float, or int8 with ``output_scale``.
        output_scale: float32 of shape (), of an int8 ``out``.
        tiles: see :func:`.float_softmax_kernels.float_softmax_call`.

    Raises:
        ValueError: an int8 output without a scale, or a float one with it.
    """
    from .float_softmax_kernels import float_softmax_call

    query, key, value = operands
    return float_softmax_call(
        query.values.contiguous(), query.scale.reshape(()), key.values.contiguous(), key.scale.reshape(()),
        value.values.contiguous(), value.scale.reshape(()), scale, out, "bfloat16",
        output_scale=output_scale, tiles=tiles,
    )  # fmt: skip


def prepare(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Callable[[], QuantizedTensor]:
    """Quantise, fit the output's scale and return a call that launches the kernel alone.

    Args:
        query, key, value: float (batch, heads, tokens, channels) on a CUDA device, or on the CPU in Triton's interpreter.

    Returns:
        a function of no arguments that returns the same int8 tensor (batch, heads, queries, value channels), with its scale,
        every time.

    Raises:
        TypeError: not a float tensor.
        ValueError: the kernel cannot run there or on these shapes.
    """
    check_kernel("QAttn", query, key, value)
    operands, factor = quantize_operands(query, key, value), query.shape[-1] ** -0.5
    exact = torch.empty((*query.shape[:3], value.shape[3]), dtype=torch.float32, device=query.device)
    kernel_call(operands, factor, exact).run()
    output_scale = scale_from_amplitude(exact.abs().amax())
    out = torch.empty_like(exact, dtype=torch.int8)
    del exact
    call = kernel_call(operands, factor, out, output_scale=output_scale)

    def run() -> QuantizedTensor:
        call.run()
        return QuantizedTensor.from_kernel(out, output_scale)

    return run


QATTN = Method(
    "qattn", "QAttn", "tensor", "tensor", "tensor", False, ((8, 8), (16, 16)),
    functools.partial(attend, quantize_operands=quantize_operands, formula=formula, kernel_call=kernel_call),
    prepare,
)  # fmt: skip
