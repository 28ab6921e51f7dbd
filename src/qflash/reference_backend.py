"""What a back end does with a call: :class:`Backend`, which does all of it by the specification. Kernels take steps over."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .plan_cache import Run, Tensors
from .specification import gated, layers, quantization, reference, rotary
from .specification.attention_call import AttentionCall, Scales, VarlenCall, float_call
from .specification.gated import GatedIntegers
from .specification.layers import Activation, LinearIntegers
from .specification.memory_format import as_four, is_expanded
from .unseen_tokens import once, searches, shown_tokens, without_unseen

Prepare = Callable[[], "Run | None"]


class Backend:
    """The reference, in PyTorch on every device, and what the back ends with kernels are made of.

    :func:`.backends.find_backend` finds the one of a call, once; steps of a call are methods of the same object.
    """

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Go the whole way: quantise float tensors by the recipe, turn a float bias into fixed point, attend."""
        if call.mask is not None:
            call = dataclasses.replace(call, mask=once(call.mask))
        if searches(call):
            # once for both the search and attention
            call = self.with_fixed_bias(call)
        call = without_unseen(call, self.quantize_bias, self.shown_tokens)
        return self.attend_floats(call) if call.scales is None else self.attend_int8(call)

    def attend_repeatably(
        self, make: Callable[..., AttentionCall], tensors: Tensors, place: int
    ) -> tuple[torch.Tensor, Prepare]:
        """Attend, and return what finds out how to do so again on other tensors.

        Args:
            make: makes the call of tensors.
            tensors: of the operator, in its order.
            place: where they are: :func:`.plan_cache.place_of`.
        """
        return self.attend(make(*tensors)), lambda: None

    def attend_floats(self, call: AttentionCall) -> torch.Tensor:
        """Quantise tensor by tensor, after what the recipe does to channels, and attend."""
        query, key, value, recipe, scale = call.query, call.key, call.value, call.recipe, call.softmax_scale
        center = recipe.smooth_key
        if recipe.balance or recipe.rotate:
            if center:
                key, center = quantization.center_channels(key), False
            if recipe.balance:
                query, key = quantization.balance_channels(query, key)
            if recipe.rotate:
                query, key = quantization.hadamard_transform(query), quantization.hadamard_transform(key)
                scale = scale * query.shape[-1]
        query_values, query_scale = self.quantize(query, recipe.query_granularity)
        key_values, key_scale = self.quantize(key, recipe.key_granularity, center)
        value_offset = None
        if recipe.smooth_value:
            given = value[:1] if is_expanded(value) else value
            value_values, value_scale, value_offset = self.quantize_centered(given, recipe.value_granularity)
            value_values = value_values.expand(value.shape)
        else:
            value_values, value_scale = self.quantize(value, recipe.value_granularity)
        quantised = dataclasses.replace(
            call,
            query=query_values,
            key=key_values,
            value=value_values,
            scales=Scales(query_scale, key_scale, value_scale, None, value_offset),
            softmax_scale=scale,
            like=call.query,
        )
        return self.attend_int8(quantised)

    def attend_int8(self, call: AttentionCall) -> torch.Tensor:
        """Attend to int8 tensors."""
        return reference.int8_attention(self.with_fixed_bias(call))

    def attend_varlen(self, call: VarlenCall) -> torch.Tensor:
        """Attend to packed float sequences: here, as it is specified, by a call for each."""
        out = call.query.new_zeros((*call.query.shape[:2], call.value.shape[2]))
        begins = list(zip(call.lengths.queries.tolist(), call.lengths.keys.tolist(), strict=True))
        for (first_query, first_key), (end_query, end_key) in itertools.pairwise(begins):
            query = call.query[first_query:end_query].transpose(0, 1)[None]
            key, value = (x[first_key:end_key].transpose(0, 1)[None] for x in (call.key, call.value))
            one = float_call(query, key, value, None, call.is_causal, call.softmax_scale, call.recipe)
            out[first_query:end_query] = self.attend(one)[0].transpose(0, 1)
        return out

    def with_fixed_bias(self, call: AttentionCall) -> AttentionCall:
        """Return the call with a float mask in fixed point."""
        if call.mask is None or not call.mask.is_floating_point():
            return call
        return dataclasses.replace(call, mask=self.quantize_bias(call.mask))

    def shown_tokens(self, mask: torch.Tensor, key_heads: int) -> torch.Tensor:
        """See :func:`.unseen_tokens.shown_tokens`."""
        return shown_tokens(mask, key_heads)

    def quantize(self, x: torch.Tensor, granularity: str, center: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantise a tensor of any rank, finding its scales: ``(values, scale)``. An expanded batch is quantised once.

        Args:
            x: float.
            granularity: see :func:`qflash.quantize`.
            center: subtract every channel's midrange first.
        """
        if is_expanded(x):
            values, scale = self.quantize(x[:1], granularity, center)
            return values.expand(x.shape), scale if granularity == "tensor" else scale.expand(x.shape[0], *scale.shape[1:])
        return self._quantize(x, granularity, center)

    def _quantize(self, x: torch.Tensor, granularity: str, center: bool) -> tuple[torch.Tensor, torch.Tensor]:
        if center:
            x = quantization.center_channels(x)
        scale = quantization.scale_from_amplitude(quantization.amplitude(x, granularity))
        return quantization.quantize_values(x, scale), scale

    def quantize_centered(self, x: torch.Tensor, granularity: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Quantise a tensor of any rank with a zero point per channel: ``(values, scale, offset)``."""
        return quantization.quantize_centered(x, granularity)

    def quantize_with_scale(self, x: torch.Tensor, scale: torch.Tensor, center: torch.Tensor | None = None) -> torch.Tensor:
        """Quantise a tensor of any rank with given scales.

        Args:
            x: float (..., tokens, channels).
            scale: float32, broadcastable to x.
            center: float32, broadcastable to x and the same for all tokens; subtracted first, in float32. None for nothing.
        """
        return quantization.quantize_values(x if center is None else x.to(torch.float32) - center, scale)

    def quantize_bias(self, bias: torch.Tensor) -> torch.Tensor:
        """Turn an additive float mask of any rank into fixed point, contiguous; see :func:`qflash.quantize_bias`."""
        return quantization.bias_to_fixed(bias)

    def linear(
        self,
        x: torch.Tensor,
        layer: LinearIntegers,
        out_dtype: torch.dtype,
        residual: torch.Tensor | None = None,
        activation: Activation | None = None,
        scatter: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run a linear layer, then add a residual or apply an activation; see :mod:`qflash.network.execution`.

        Args:
            scatter: where output and residual have each token; None: in the same place.
        """
        near = residual if residual is None or scatter is None else residual.index_select(1, scatter)
        out = layers.rescale(layers.integer_matmul(x, layer.weight), layer.left, layer.bias, layer.multiplier)
        if activation is not None:
            out = layers.activate(out, activation)
        else:
            out = layers.saturate(out if near is None else layers.add_residual(out, near), out_dtype)
        return out if scatter is None else layers.scatter_tokens(out, scatter)

    def layer_norm(
        self, h: torch.Tensor, epsilon: int, gain: torch.Tensor, offset: torch.Tensor, shift: int, out_dtype: torch.dtype,
        gather: torch.Tensor | None = None, *, centred: bool = True, residual: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Normalise rows, each of one token or of those that ``gather`` names; see :mod:`qflash.network.execution`."""
        h = h if gather is None else layers.gather_tokens(h, gather)
        return layers.layer_norm(h, epsilon, gain, offset, shift, out_dtype, centred=centred, residual=residual)

    def narrow(
        self, h: torch.Tensor, multiplier: torch.Tensor, left: int, offset: torch.Tensor, out_dtype: torch.dtype,
        gather: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Bring a residual stream, or tokens of it, to int8; see :mod:`qflash.network.operators.narrow`."""
        h = h if gather is None else layers.gather_tokens(h, gather)
        return layers.narrow(h, multiplier, left, offset, out_dtype)

    def embed_tokens(self, ids: torch.Tensor, table: torch.Tensor, position: torch.Tensor | None) -> torch.Tensor:
        """Bring ids of tokens to the residual stream; see :mod:`qflash.network.operators.token_embedding`."""
        return layers.embed_tokens(ids, table, position)

    def mean(
        self, x: torch.Tensor, multiplier: torch.Tensor, left: int, offset: torch.Tensor, out_dtype: torch.dtype
    ) -> torch.Tensor:
        """Average tokens; see :mod:`qflash.network.execution`."""
        return layers.token_mean(x, multiplier, left, offset, out_dtype)

    def embed(
        self,
        images: torch.Tensor,
        patch_size: Sequence[int],
        layer: LinearIntegers,
        position: torch.Tensor | None,
        prefix: torch.Tensor | None,
    ) -> torch.Tensor:
        """Bring images to the residual stream; see :mod:`qflash.network.execution`."""
        batch = images.shape[0]
        residual = None if position is None else position.expand(batch, -1, -1)
        h = self.linear(layers.patches(images, patch_size), layer, torch.int16, residual)
        return h if prefix is None else torch.cat((prefix.expand(batch, -1, -1), h), dim=1)

    def gated(
        self, x: torch.Tensor, gate_multiplier: int, multiplier: torch.Tensor, offset: torch.Tensor, activation: str,
        out_dtype: torch.dtype,
    ) -> torch.Tensor:  # fmt: skip
        """Multiply values by activations of gates; see :mod:`qflash.network.operators.gated`."""
        return gated.gated(x, gate_multiplier, multiplier, offset, activation, out_dtype)

    def linear_gated(
        self, x: torch.Tensor, layer: LinearIntegers, product: GatedIntegers, out_dtype: torch.dtype
    ) -> torch.Tensor:
        """Run a linear layer to int16 and the gated product of its outputs."""
        return self.gated(self.linear(x, layer, torch.int16), *product, out_dtype)

    def rotary(
        self, x: torch.Tensor, turns: torch.Tensor, offset: torch.Tensor, multiplier: torch.Tensor, out_dtype: torch.dtype
    ) -> torch.Tensor:
        """Rotate pairs of channels; see :mod:`qflash.network.operators.rotary`."""
        return rotary.rotary(x, turns, offset, multiplier, out_dtype)


class KernelBackend(Backend):
    """A back end with kernels, which take tensors of four dimensions.

    Attributes:
        quantizers: a module with ``launch_quantize``, ``launch_quantize_centered`` and ``launch_quantize_bias``.
    """

    quantizers: Any

    def _quantize(self, x: torch.Tensor, granularity: str, center: bool) -> tuple[torch.Tensor, torch.Tensor]:
        values, scale = self.quantizers.launch_quantize(as_four(x), granularity, center)
        return values.reshape(x.shape), scale.reshape(quantization.scale_shape(x.shape, granularity))

    def quantize_centered(self, x: torch.Tensor, granularity: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        values, scale, offset = self.quantizers.launch_quantize_centered(as_four(x), granularity)
        shapes = quantization.scale_shape(x.shape, granularity), quantization.scale_shape(x.shape, "channel")
        return values.reshape(x.shape), scale.reshape(shapes[0]), offset.reshape(shapes[1])

    def quantize_bias(self, bias: torch.Tensor) -> torch.Tensor:
        fixed: torch.Tensor = self.quantizers.launch_quantize_bias(as_four(bias))
        return fixed.reshape(bias.shape)
