"""One call of attention, as every back end takes it: :class:`AttentionCall`, :class:`VarlenCall` of packed sequences."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch

from .recipe import Recipe


class Scales(NamedTuple):
    """Scales of int8 tensors, float32 and broadcastable to them.

    Attributes:
        query: last dimension 1; None for a float query that a kernel quantises on the way, with a scale a token.
        key: last dimension 1.
        value: token dimension 1.
        output: of an int8 output, token dimension 1; else None.
        offset: added to float outputs, (batch | 1, heads of value | 1, 1, channels | 1); None for none.
    """

    query: torch.Tensor | None
    key: torch.Tensor
    value: torch.Tensor
    output: torch.Tensor | None
    offset: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True)
class AttentionCall:
    """Arguments of one attention, canonical and checked.

    Attributes:
        query, key, value: ``(batch, heads, tokens, channels)``: int8, or float tensors to be quantised by the recipe. Key and
            value may have fewer heads (grouped-query attention).
        scales: of int8 tensors; None where they are float.
        mask: bool (True takes part), int32 fixed-point bias (:func:`qflash.quantize_bias`) or, beside float tensors, a float
            bias in nats; of shape ``(period, heads | 1, queries | 1, keys | 1)``, it repeats over the batch.
        is_causal: query i sees keys 0 to i.
        softmax_scale: positive factor of the scores, dimensionless.
        out_dtype: int8, float16, bfloat16 or float32.
        recipe: the numerical choices. Of int8 tensors those about exponential, P, normalisation and output.
        like: a tensor whose order in memory the output takes (:func:`.memory_format.empty_output`); query if None.
        places: int32 (period of the mask, heads of key | 1, keys): from where a kernel that quantises takes each token of key
            and value (:mod:`.kernels.triton.unseen_tokens`); None: each from its own.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scales: Scales | None
    mask: torch.Tensor | None
    is_causal: bool
    softmax_scale: float
    out_dtype: torch.dtype
    recipe: Recipe
    like: torch.Tensor | None = None
    places: torch.Tensor | None = None

    @property
    def batch(self) -> int:
        """Batch elements."""
        return self.query.shape[0]

    @property
    def heads(self) -> int:
        """Heads of query."""
        return self.query.shape[1]

    @property
    def queries(self) -> int:
        """Tokens of query."""
        return self.query.shape[2]

    @property
    def keys(self) -> int:
        """Tokens of key and value."""
        return self.key.shape[2]

    @property
    def head_dim(self) -> int:
        """Channels of query and key."""
        return self.query.shape[3]

    @property
    def value_dim(self) -> int:
        """Channels of value and of the output."""
        return self.value.shape[3]

    @property
    def is_masked(self) -> bool:
        """Whether anything is done to the scores: a mask, a bias, a causal order."""
        return self.is_causal or self.mask is not None

    @property
    def mask_kind(self) -> str:
        """``"none"``, ``"bool"`` or ``"bias"``."""
        return "none" if self.mask is None else "bool" if self.mask.dtype == torch.bool else "bias"

    @property
    def has_token_keys(self) -> bool:
        """Whether there is a scale for each key, not one a head or tensor."""
        return self.scales is not None and self.scales.key.shape[2] > 1

    @property
    def exact_sum(self) -> bool:
        """Whether outputs are divided by the sum of probabilities before rounding, and the missing mass goes to V's mean."""
        return self.recipe.takes_exact_sum(self.keys)

    @property
    def order(self) -> torch.Tensor:
        """The tensor whose order in memory the output takes."""
        return self.query if self.like is None else self.like


class Lengths(NamedTuple):
    """Where sequences begin and end.

    Attributes:
        queries, keys: cumulative lengths, (sequences + 1,), int32 or int64, on the tensors' device.
        most_queries, most_keys: no sequence has more.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    most_queries: int
    most_keys: int

    @property
    def sequences(self) -> int:
        """Their number."""
        return self.queries.shape[0] - 1


@dataclasses.dataclass(frozen=True)
class VarlenCall:
    """Attention of packed sequences, canonical and checked.

    Attributes:
        query, key, value: ``(tokens, heads, channels)``: float, or int8 with scales. Key and value may have fewer heads.
        scales: of int8 tensors: for each token (tokens, heads, 1), or for each sequence (sequences, heads | 1, channels | 1).
        value_sums: of int8 values, of chunks of each sequence's tokens, (sequences, heads, chunks, channels), int32.
        lengths: of the sequences.
        is_causal: query i of a sequence sees its keys 0 to i.
        softmax_scale: positive factor of the scores.
        out_dtype: float16, bfloat16 or float32.
        recipe: the numerical choices.
        packed_value: int8 values lie as :func:`.triton.quantize_streaming.launch_quantize_long` leaves those of sequences.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scales: Scales | None
    value_sums: torch.Tensor | None
    lengths: Lengths
    is_causal: bool
    softmax_scale: float
    out_dtype: torch.dtype
    recipe: Recipe
    packed_value: bool = False


def int8_call(
    query: torch.Tensor,
    query_scale: torch.Tensor | None,
    key: torch.Tensor,
    key_scale: torch.Tensor,
    value: torch.Tensor,
    value_scale: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    softmax_scale: float,
    output_scale: torch.Tensor | None,
    out_dtype: torch.dtype,
    recipe: Recipe,
    *,
    value_offset: torch.Tensor | None = None,
    like: torch.Tensor | None = None,
) -> AttentionCall:
    """Make a call on int8 tensors of the operator's flat arguments; see :class:`AttentionCall`."""
    scales = Scales(query_scale, key_scale, value_scale, output_scale, value_offset)
    return AttentionCall(query, key, value, scales, mask, is_causal, softmax_scale, out_dtype, recipe, like)


def float_call(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    softmax_scale: float,
    recipe: Recipe,
) -> AttentionCall:
    """Make a call on float tensors of the operator's flat arguments; the output has the query's dtype."""
    return AttentionCall(query, key, value, None, mask, is_causal, softmax_scale, query.dtype, recipe)
