"""The back end ``"triton"``: the kernels for NVIDIA GPUs, which Triton's interpreter runs on a CPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from ..plan_cache import CPU, Tensors
from ..reference_backend import KernelBackend, Prepare
from ..specification.attention_call import AttentionCall, VarlenCall
from ..specification.layers import Activation, LinearIntegers
from ..specification.memory_format import as_four
from ..unseen_tokens import first_keys, leaves_out_keys, once, searches
from . import dispatch, layers
from .launch_recorder import record
from .triton import quantize
from .triton.unseen_tokens import launch_places, take


class GpuBackend(KernelBackend):
    """Triton's and Gluon's kernels; see :class:`qflash.reference_backend.Backend`. :mod:`.dispatch` chooses among them."""

    quantizers = quantize

    def attend(self, call: AttentionCall) -> torch.Tensor:
        if call.mask is not None:
            call = dataclasses.replace(call, mask=once(call.mask))
        if leaves_out_keys(call):
            call = first_keys(call)
        is_float = call.scales is None
        choice = dispatch.one_launch(call) if is_float and not dispatch.is_faster_apart(call) else None
        whole = choice is not None and choice.family is not None
        apart = is_float and not whole and dispatch.can_quantize_apart(call)
        if not whole and not (apart and dispatch.streams_masked(call)) and (apart or searches(call)):
            call = self.with_fixed_bias(call)
        if searches(call):
            # by launches that can be made again, and without waiting for a GPU
            places = launch_places(call)
            call = dataclasses.replace(call, places=places) if whole or apart else take(call, places)
        if whole:
            return dispatch.launch_fused(call, choice)
        if apart:
            return dispatch.launch_long(call)
        return self.attend_floats(call) if call.scales is None else self.attend_int8(call)

    def attend_repeatably(
        self, make: Callable[..., AttentionCall], tensors: Tensors, place: int
    ) -> tuple[torch.Tensor, Prepare]:
        if place == CPU:
            return super().attend_repeatably(make, tensors, place)
        return record(lambda *given: self.attend(make(*given)), tensors)

    def attend_int8(self, call: AttentionCall) -> torch.Tensor:
        return dispatch.launch_attention(self.with_fixed_bias(call))

    def attend_varlen(self, call: VarlenCall) -> torch.Tensor:
        return dispatch.launch_varlen(call)

    def quantize_with_scale(self, x: torch.Tensor, scale: torch.Tensor, center: torch.Tensor | None = None) -> torch.Tensor:
        middle = None if center is None else as_four(center.expand(*x.shape[:-2], 1, x.shape[-1]))
        return quantize.launch_quantize_values(as_four(x), as_four(scale.expand(x.shape)), middle).reshape(x.shape)

    def linear(
        self,
        x: torch.Tensor,
        layer: LinearIntegers,
        out_dtype: torch.dtype,
        residual: torch.Tensor | None = None,
        activation: Activation | None = None,
        scatter: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return layers.launch_linear(x, layer, out_dtype, residual, activation, scatter)

    layer_norm = staticmethod(layers.launch_layer_norm)
    narrow = staticmethod(layers.launch_narrow)
    mean = staticmethod(layers.launch_mean)
    embed = staticmethod(layers.launch_embedding)
    gated = staticmethod(layers.launch_gated)
    linear_gated = staticmethod(layers.launch_linear_gated)
    rotary = staticmethod(layers.launch_rotary)
