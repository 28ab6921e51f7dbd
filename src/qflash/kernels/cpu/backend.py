"""The back end ``"cpu"``: the C kernels of :mod:`.launch`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ... import segments
from ...plan_cache import Run, Tensors
from ...reference_backend import KernelBackend, Prepare
from ...specification.attention_call import AttentionCall, VarlenCall
from ...specification.layers import Activation, LinearIntegers
from ...specification.memory_format import as_four
from ...unseen_tokens import leaves_out_keys, searches, seen_tokens
from . import launch, network


class CpuBackend(KernelBackend):
    """C kernels; see :class:`qflash.reference_backend.Backend`."""

    quantizers = launch

    def attend_repeatably(
        self, make: Callable[..., AttentionCall], tensors: Tensors, place: int
    ) -> tuple[torch.Tensor, Prepare]:
        out = self.attend(make(*tensors))

        def prepare() -> Run | None:
            call = make(*tensors)
            # keys that are left out are other addresses' views
            plan = None if leaves_out_keys(call) else launch.prepare_attention(call, out)
            if plan is None or not searches(call):
                return plan
            layouts = [None if x is None else (x.shape, x.stride()) for x in tensors]

            def run(*given: torch.Tensor | None) -> torch.Tensor:
                views = [x if x is None or y is None else x.as_strided(*y) for x, y in zip(given, layouts, strict=True)]
                call = make(*views)
                # hidden tokens are replaced in every call anew
                seen = seen_tokens(call, self.quantize_bias, self.shown_tokens)
                return plan(*given) if bool(seen.all()) else self.attend(call)

            return run

        return out, prepare

    def attend_int8(self, call: AttentionCall) -> torch.Tensor:
        return launch.launch_attention(self.with_fixed_bias(call))

    def attend_varlen(self, call: VarlenCall) -> torch.Tensor:
        return launch.launch_varlen(segments.prepare(call))

    def shown_tokens(self, mask: torch.Tensor, key_heads: int) -> torch.Tensor:
        return launch.launch_seen(mask, key_heads)

    def quantize_with_scale(self, x: torch.Tensor, scale: torch.Tensor, center: torch.Tensor | None = None) -> torch.Tensor:
        steps, middle = (each if each is None or each.dim() > 3 else as_four(each) for each in (scale, center))
        # of whole heads or channels; a scale for each token has no kernel
        if all(each is None or (each.dim() == 4 and each.shape[0] == each.shape[2] == 1) for each in (steps, middle)):
            assert steps is not None
            return launch.launch_quantize_values(as_four(x), steps, middle).reshape(x.shape)
        return super().quantize_with_scale(x, scale, center)

    def linear(
        self,
        x: torch.Tensor,
        layer: LinearIntegers,
        out_dtype: torch.dtype,
        residual: torch.Tensor | None = None,
        activation: Activation | None = None,
        scatter: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if scatter is None:
            return network.launch_linear(x, layer, out_dtype, residual, activation)
        # row i of the output is that of the token which goes there
        order = torch.empty_like(scatter)
        order[scatter.to(torch.int64)] = torch.arange(len(scatter), dtype=torch.int32, device="cpu")
        return network.launch_linear(network.gather_rows(x, order), layer, out_dtype, residual, activation)

    def layer_norm(
        self, h: torch.Tensor, epsilon: int, gain: torch.Tensor, offset: torch.Tensor, shift: int, out_dtype: torch.dtype,
        gather: torch.Tensor | None = None, *, centred: bool = True, residual: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        h = network.gather_tokens(h, gather)
        return network.launch_layer_norm(h, epsilon, gain, offset, shift, out_dtype, centred=centred, residual=residual)

    def narrow(
        self, h: torch.Tensor, multiplier: torch.Tensor, left: int, offset: torch.Tensor, out_dtype: torch.dtype,
        gather: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        return network.launch_narrow(network.gather_tokens(h, gather), multiplier, left, offset, out_dtype)

    mean = staticmethod(network.launch_mean)
    embed = staticmethod(network.launch_embedding)
    gated = staticmethod(network.launch_gated)
    rotary = staticmethod(network.launch_rotary)
