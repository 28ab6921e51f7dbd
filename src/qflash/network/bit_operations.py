"""Bit operations of a whole network, in integers and in floating point: :func:`bit_operations`."""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .graph import IntegerNetwork, check_integer
from .inputs import input_dtype, input_shape

OPERAND_BITS = 8
"""Of weights and activations of an integer network, and of query, key and value."""


@dataclasses.dataclass(frozen=True)
class BitOperations:
    """Multiply-adds of a network's matrix products for one image, and what they come to in bit operations (BOPs).

    Attributes:
        linear: multiply-adds of linear layers, patch embedding and head among them; one with an int16 input counts as two.
        scores: of Q Kᵀ, all attention layers.
        values: of P V.
        probability_bits: width of P in the integer network, as it is multiplied.
    """

    linear: int
    scores: int
    values: int
    probability_bits: int

    @property
    def multiply_adds(self) -> int:
        """Of all products."""
        return self.linear + self.scores + self.values

    @property
    def integer(self) -> float:
        """BOPs of the integer network, in 10^9."""
        others = (self.linear + self.scores) * OPERAND_BITS
        return (others + self.values * self.probability_bits) * OPERAND_BITS / 1e9

    def floating(self, bits: int = 32) -> float:
        """Return the BOPs of the float network with operands of so many bits, in 10^9."""
        return self.multiply_adds * bits * bits / 1e9

    def __str__(self) -> str:
        return (
            f"{self.integer:.4g} GBOPs an image in integers, {self.floating():.4g} in float32 "
            f"({self.floating() / self.integer:.1f} times), {self.floating(16):.4g} in float16"
        )


class _Products(TorchDispatchMode):
    """Adds up the multiply-adds of QFlash's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = self.scores = self.values = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = getattr(func, "overloadpacket", None)
        if str(packet).startswith("qflash.int8_linear"):  # with an activation or without
            x, weight = args[:2]
            self.linear += math.prod(x.shape[:-1]) * weight.numel() * x.element_size()
        elif packet is torch.ops.qflash.patch_embedding:
            images, (high, wide), weight = args[:3]
            self.linear += len(images) * (images.shape[2] // high) * (images.shape[3] // wide) * weight.numel()
        elif packet is torch.ops.qflash.int8_attention:
            query, _, key, _, value = args[:5]
            pairs = math.prod(query.shape[:3]) * key.shape[2]
            self.scores += pairs * query.shape[3]
            self.values += pairs * value.shape[3]
        return func(*args, **(kwargs or {}))


@torch.inference_mode()
def bit_operations(network: IntegerNetwork) -> BitOperations:
    """Count the bit operations of an integer network and of the float network it was made of, for one image.

    The bit operations of a matrix product are its multiply-adds times the widths of both operands, as in van Baalen et al.,
    *Bayesian Bits*, NeurIPS 2020: ``BOPs = MACs * b_w * b_a``. What has no product of two operands is not counted:
    normalisation, activations, softmax, changes of unit, additions. Both are counted with the products that the integer network
    computes: rows that no output reads, which a class token's head leaves in the last block, are in neither.
    :func:`qflash_lab.evaluation.summaries.bit_operations` counts the two products of attention alone.

    Args:
        network: what :func:`qflash.quantize_model` or :func:`qflash.load_model` returns. It is copied and run on meta tensors,
            which have shapes and no values.

    Raises:
        TypeError: ``network`` is not an integer network.
        ValueError: a part of it is kept in floating point.
    """
    check_integer(network)
    twin = copy.deepcopy(network).to("meta")
    with _Products() as products:
        twin(torch.empty((1, *input_shape(twin.image)), dtype=input_dtype(twin.image), device="meta"))
    wide = twin.recipe.probability_bits > OPERAND_BITS
    return BitOperations(products.linear, products.scores, products.values, (1 + wide) * OPERAND_BITS)
