"""INT-FlashAttention (Chen et al., 2024, arXiv:2409.16997): int8 products inside FlashAttention-2's float softmax.

Q and K are int8 with one scale a token (their Section 3); the scores are made float again by the product of the two
scales, and the softmax is FlashAttention-2's online one in floating point.

* **Full**: the weights become int8 as well, ``round(127 exp(S - m))`` with the running maximum m of the row, and V is
  int8, so that both products are integer ones; each tile's int32 sums are added up in float32. The normaliser sums the
  weights before they are rounded: rounded ones lose 1.0 to 1.3 dB on the QFlash paper's inputs and miss its figures by
  as much. V has one scale a head, as in the QFlash paper's Table 5.
* **Half**: weights and V are float16, with float32 sums.

SQNR on the QFlash paper's inputs (batch 8; its accuracy table's figure in brackets): Full 36.8 dB on A2 (36.92) and 37.6 on
A7 (37.80), with tiles of 64 keys (32: 36.9 and 37.7); Half 38.1 (38.19) and 39.0 (39.07).

The kernel (:mod:`qflash_lab.baselines.float_softmax_kernels`) takes no mask, as there is none in the method's paper; with a
mask :func:`.online.attend` takes the plain formula on every device.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import torch

from qflash.api import quantize
from qflash.specification.quantization import QuantizedTensor

from .method import FLOAT, Bits, Method
from .online import BLOCK, LOG2_E, attend, integer_scores, online_softmax, prepare_kernel

if TYPE_CHECKING:
    from qflash.kernels.launch_recorder import KernelLaunch


class Operands(NamedTuple):
    """What the attention kernel reads: int8 query and key with a scale a token, value int8 with a scale a head or float16."""

    query: QuantizedTensor
    key: QuantizedTensor
    value: torch.Tensor
    value_scale: torch.Tensor | None


def quantize_operands(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, full: bool) -> Operands:
    """Quantise query, key and, if ``full``, value; see :class:`Operands`."""
    quantized_query, quantized_key = quantize(query, "token"), quantize(key, "token")
    if not full:
        return Operands(quantized_query, quantized_key, value.to(torch.float16), None)
    quantized_value = quantize(value, "head")
    return Operands(quantized_query, quantized_key, quantized_value.values, quantized_value.scale)


def formula(operands: Operands, attn_mask: torch.Tensor | None, scale: float, *, block: int = BLOCK) -> torch.Tensor:
    """Compute the attention of quantised operands in plain PyTorch.

    Args:
        operands: from :func:`quantize_operands`.
        attn_mask: bool (True takes part) or additive, broadcastable to (batch, heads, queries, keys), or None.
        scale: factor of the scores.
        block: keys a tile.

    Returns:
        float32 (batch, heads, queries, value channels).
    """
    query, key, value, value_scale = operands
    wide = value.to(torch.float32)
    scores = integer_scores(query.values, key.values) * key.scale.mT
    full = value_scale is not None

    def product(weights: torch.Tensor, start: int) -> torch.Tensor:
        rounded = weights.round() if full else weights.to(torch.float16).to(torch.float32)
        return rounded @ wide[..., start : start + block, :]

    row = query.scale * (scale * LOG2_E)
    out = online_softmax(scores, row, product, attn_mask, most=127.0 if full else 1.0, block=block)
    return out if value_scale is None else out * value_scale


def kernel_call(operands: Operands, scale: float, out: torch.Tensor, *, tiles: tuple[int, ...] | None = None) -> KernelLaunch:
    """Return the kernel launch that fills ``out`` (batch, heads, queries, value channels), contiguous, from the operands."""
    from .float_softmax_kernels import float_softmax_call, pack_value, tiles_for

    query, key, value, value_scale = operands
    full = value_scale is not None
    product = "int8" if full else "float16"
    chosen = tiles or tiles_for(product, query.values, key.values, value.shape[-1])
    return float_softmax_call(
        query.values.contiguous(), query.scale, key.values.contiguous(), key.scale,
        pack_value(value, chosen[1]) if full else value.contiguous(), value_scale, scale, out, product, tiles=chosen,
    )  # fmt: skip


def _method(name: str, title: str, value_granularity: str, bits: Bits, *, full: bool) -> Method:
    operands = functools.partial(quantize_operands, full=full)
    attention = functools.partial(attend, quantize_operands=operands, formula=formula, kernel_call=kernel_call)
    prepare = functools.partial(prepare_kernel, title="INT-FlashAttention", quantize_operands=operands, kernel_call=kernel_call)
    return Method(name, title, "token", "token", value_granularity, False, bits, attention, prepare)


INT_FLASH_FULL = _method("int-flash-full", "INT-Flash-Full", "head", ((8, 8), (8, 8)), full=True)
INT_FLASH_HALF = _method("int-flash-half", "INT-Flash-Half", FLOAT, ((8, 8), (16, 16)), full=False)
