"""Attention of other packages, called as their authors say: what ``--peer`` takes by name.

None of them is a dependency. Each is imported when it is prepared, so that one that is missing, does not load or refuses a
shape has a row with the reason, and the others are measured.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from types import ModuleType
from typing import Any

import torch

from . import schema as col
from .problems import Inputs, Scaled
from .runner import TimedMethod
from .timers import TimedCall

FLOAT8 = torch.float8_e4m3fn
"""The 8-bit type of FlashAttention-3 and cuDNN."""

_PROBABILITY_SCALE = 256.0
"""cuDNN's scale of P, which lies in [0, 1]: the largest power of two whose product fits e4m3, for the least underflow."""


@dataclasses.dataclass(frozen=True)
class Peer:
    """A method of another package.

    Attributes:
        package: what pip calls it.
        mode: ``"end-to-end"`` or, where it takes tensors quantised beforehand, ``"kernel"``.
        prepare: makes the call to time.
        function: what takes the arguments of ``scaled_dot_product_attention``; None where it takes float8 alone.
    """

    package: str
    mode: str
    prepare: Callable[[Inputs], TimedCall]
    function: Callable[..., torch.Tensor] | None = None


def _load(module: str, package: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{module} cannot be imported ({error}); pip install {package}") from error


def _refuse_mask(name: str, attn_mask: torch.Tensor | None) -> None:
    if attn_mask is not None:
        raise NotImplementedError(f"{name} takes no attention mask")


def flash_attention_3(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    splits: int = 1,
    scales: Mapping[str, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Call FlashAttention-3 (Shah et al., 2024) of the package ``fa3-fwd``.

    Args:
        query, key, value: ``(batch, heads, tokens, head_dim)``, bfloat16 or float8; this package was built without float16.
        attn_mask: must be None.
        is_causal, scale: as of ``scaled_dot_product_attention``.
        splits: parts of the keys that are computed apart; 1 is the package's default, 0 lets it choose.
        scales: ``q_descale`` and so on, float32 ``(batch, heads)``, for float8.

    Raises:
        ImportError: the package is not installed, or does not load.
        NotImplementedError: there is a mask.
    """
    _refuse_mask("FlashAttention-3", attn_mask)
    attend = _load("fa3_fwd_interface", "fa3-fwd").flash_attn_func
    tensors = (x.transpose(1, 2) for x in (query, key, value))
    out: torch.Tensor = attend(*tensors, softmax_scale=scale, causal=is_causal, num_splits=splits, **(scales or {}))
    return out.transpose(1, 2)


def sage_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> torch.Tensor:
    """Call SageAttention (Zhang et al., 2024) of the package ``sageattention`` 1, with its defaults.

    It subtracts the keys' mean from ``key`` itself, which changes no softmax.

    Args:
        query, key, value: ``(batch, heads, tokens, head_dim)``.
        attn_mask: must be None; the package would ignore it.
        is_causal, scale: as of ``scaled_dot_product_attention``.

    Raises:
        ImportError: the package is not installed, or does not load.
        NotImplementedError: there is a mask.
    """
    _refuse_mask("SageAttention", attn_mask)
    out: torch.Tensor = _load("sageattention", "sageattention==1.0.6").sageattn(
        query, key, value, is_causal=is_causal, sm_scale=scale
    )
    return out


def to_float8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a tensor in float8 with one scale, and that scale (float32, no dimensions): ``x`` is about their product."""
    scale = x.abs().amax().float() / torch.finfo(FLOAT8).max
    return (x.float() / scale).to(FLOAT8), scale


def _unmasked(inputs: Inputs, name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    query, key, value, mask = inputs.folded()
    _refuse_mask(name, mask)
    return query, key, value


def _prepare_flash_attention_3(inputs: Inputs, *, splits: int) -> TimedCall:
    """FlashAttention-3 in bfloat16, whatever the run's dtype is; float16 is rounded to it before the clock starts."""
    query, key, value = (x.to(torch.bfloat16) for x in _unmasked(inputs, "FlashAttention-3"))
    causal = inputs.problem.causal
    return lambda: flash_attention_3(query, key, value, is_causal=causal, splits=splits)


def _prepare_flash_attention_3_float8(inputs: Inputs) -> TimedCall:
    """FlashAttention-3 from float8 tensors with one scale each, to bfloat16."""
    (query, of_query), (key, of_key), (value, of_value) = map(to_float8, _unmasked(inputs, "FlashAttention-3"))
    one_each = {"q_descale": of_query, "k_descale": of_key, "v_descale": of_value}
    scales = {name: scale.expand(key.shape[:2]).contiguous() for name, scale in one_each.items()}
    causal = inputs.problem.causal
    return lambda: flash_attention_3(query, key, value, is_causal=causal, scales=scales)


def _prepare_sage(inputs: Inputs) -> TimedCall:
    query, key, value = _unmasked(inputs, "SageAttention")
    return functools.partial(sage_attention, query, key.clone(), value, is_causal=inputs.problem.causal)


def _prepare_cudnn_float8(inputs: Inputs) -> TimedCall:
    """cuDNN's attention from float8 to float8, one scale a tensor; the output's is fitted beforehand."""
    query, key, value = _unmasked(inputs, "cuDNN in float8")
    cudnn = _load("cudnn", "nvidia-cudnn-frontend")
    device, handle = query.device, cudnn.create_handle()
    quantised = {name: to_float8(x) for name, x in (("q", query), ("k", key), ("v", value))}
    out = torch.empty_like(quantised["q"][0])
    largest = [torch.zeros((1, 1, 1, 1), dtype=torch.float32, device=device) for _ in range(2)]

    def scalar(number: float | torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(number, dtype=torch.float32, device=device).reshape(1, 1, 1, 1).clone()

    output_scale = scalar(1.0)
    factors = {
        **{f"descale_{name}": scalar(scale) for name, (_, scale) in quantised.items()},
        "descale_s": scalar(1 / _PROBABILITY_SCALE), "scale_s": scalar(_PROBABILITY_SCALE), "scale_o": output_scale,
    }  # fmt: skip

    def build(with_largest: bool) -> tuple[Any, dict[Any, torch.Tensor]]:
        kinds = cudnn.data_type
        graph = cudnn.pygraph(
            handle=handle, io_data_type=kinds.FP8_E4M3, intermediate_data_type=kinds.FLOAT, compute_data_type=kinds.FLOAT
        )

        def declare(name: str, tensor: torch.Tensor) -> Any:
            kind = kinds.FP8_E4M3 if tensor.dtype == FLOAT8 else kinds.FLOAT
            return graph.tensor(name=name, dim=list(tensor.shape), stride=list(tensor.stride()), data_type=kind)

        bound = {name: tensor for name, (tensor, _) in quantised.items()} | factors
        named = {name: declare(name, tensor) for name, tensor in bound.items()}
        product, _, *amax = graph.sdpa_fp8(
            **named, attn_scale=query.shape[-1] ** -0.5, use_causal_mask=inputs.problem.causal, generate_stats=False
        )
        product.set_output(True).set_dim(list(out.shape)).set_stride(list(out.stride())).set_data_type(kinds.FP8_E4M3)
        given = {named[name]: tensor for name, tensor in bound.items()} | {product: out}
        for declared, tensor in zip(amax, largest, strict=True):
            declared.set_output(with_largest).set_dim([1, 1, 1, 1]).set_stride([1, 1, 1, 1]).set_data_type(kinds.FLOAT)
            if with_largest:
                given[declared] = tensor
        graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        return graph, given

    scale, limit = scalar(1.0), torch.finfo(FLOAT8).max

    def fit(largest_output: torch.Tensor) -> None:
        """Set the output's scale; float8 rounds by up to a sixteenth."""
        scale.copy_(largest_output * (17 / 16 / limit))
        output_scale.copy_(1 / scale)

    def make(with_largest: bool) -> TimedCall:
        graph, given = build(with_largest)
        workspace = torch.empty(max(1, graph.get_workspace_size()), dtype=torch.uint8, device=device)

        def call() -> Scaled:
            cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream(device).cuda_stream)
            graph.execute(given, workspace, handle=handle)
            return Scaled(out, scale)

        # as for int8 kernels the output's scale is fitted: by a first call, whose values exceed V's by rounding alone
        fit(value.abs().amax().float())
        fit(call().dequantize().abs().amax())
        return call

    try:  # without the largest value of P and of the output, which inference does not need
        return make(False)
    except Exception:  # the package has errors of its own
        return make(True)


PEERS = {
    col.FA3: Peer("fa3-fwd", "end-to-end", functools.partial(_prepare_flash_attention_3, splits=1), flash_attention_3),
    col.FA3_SPLIT: Peer(
        "fa3-fwd", "end-to-end", functools.partial(_prepare_flash_attention_3, splits=0),
        functools.partial(flash_attention_3, splits=0),
    ),
    col.SAGE: Peer("sageattention", "end-to-end", _prepare_sage, sage_attention),
    col.FA3_FLOAT8: Peer("fa3-fwd", "kernel", _prepare_flash_attention_3_float8),
    col.CUDNN_FLOAT8: Peer("nvidia-cudnn-frontend", "kernel", _prepare_cudnn_float8),
}  # fmt: skip
"""By the names of tables."""

ALL = "all"
"""What stands for every one of them."""


def named(texts: Sequence[str]) -> list[str]:
    """Return the names in :data:`PEERS` that texts ask for, :data:`ALL` among them.

    Raises:
        ValueError: a text is no name.
    """
    for text in texts:
        if text != ALL and text not in PEERS:
            raise ValueError(f"peer must be NAME=module:callable, {ALL}, or one of {tuple(PEERS)}, got {text!r}")
    return [name for name in PEERS if name in texts or ALL in texts]


def function_of(name: str) -> Callable[..., torch.Tensor]:
    """Return what stands for ``scaled_dot_product_attention`` in a model.

    Raises:
        ValueError: no name in :data:`PEERS`, or of a method that takes float8.
    """
    if name not in PEERS or (function := PEERS[name].function) is None:
        known = tuple(name for name, peer in PEERS.items() if peer.function is not None)
        raise ValueError(f"peer must be NAME=module:callable or one of {known}, got {name!r}")
    return function


def methods(names: Sequence[str]) -> list[TimedMethod[Inputs]]:
    """Return the methods of some names in :data:`PEERS`."""
    return [TimedMethod(name, PEERS[name].mode, PEERS[name].prepare) for name in names]


def versions(names: Sequence[str]) -> dict[str, str | None]:
    """Return the installed version of the package of each of those names that is in :data:`PEERS`; None: not installed."""
    found: dict[str, str | None] = {}
    for name in names:
        if name in PEERS:
            package = PEERS[name].package
            found[package] = None
            with contextlib.suppress(metadata.PackageNotFoundError):
                found[package] = metadata.version(package)
    return found
