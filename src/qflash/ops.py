"""The operators PyTorch sees (``torch.ops.qflash``): implementations, fakes, and what backward says.

Operators take canonical arguments, which :mod:`qflash.api` prepares: four dimensions ``(batch, heads, tokens,
channels)``, masks of shape ``(period, heads | 1, queries | 1, keys | 1)`` that repeat over the batch, a recipe
as its key, a back end's name (possibly ``"auto"``). What a call found out is kept for the next one
(:mod:`qflash.plan_cache`), which a compiled model makes here and not by way of :mod:`qflash.api`.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import math
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from . import batching, varlen
from .execution import attention, int8_attention, quantize, quantize_bias, quantize_centered, quantize_with_scale
from .specification import quantization
from .specification.memory_format import empty_output

_LIBRARY = torch.library.Library("qflash", "DEF")
_LIBRARY.define("quantize(Tensor x, str granularity, str backend) -> (Tensor, Tensor)")
_LIBRARY.define("quantize_centered(Tensor x, str granularity, str backend) -> (Tensor, Tensor, Tensor)")
_LIBRARY.define("quantize_with_scale(Tensor x, Tensor scale, str backend, Tensor? center=None) -> Tensor")
_LIBRARY.define("quantize_bias(Tensor bias) -> Tensor")
_LIBRARY.define(
    "int8_attention(Tensor query, Tensor query_scale, Tensor key, Tensor key_scale, Tensor value, Tensor value_scale, "
    "Tensor? mask, bool is_causal, float scale, Tensor? output_scale, ScalarType out_dtype, str recipe, str backend, "
    "Tensor? value_offset=None) -> Tensor"
)
_LIBRARY.define(
    "attention(Tensor query, Tensor key, Tensor value, Tensor? mask, bool is_causal, float scale, str recipe, "
    "str backend) -> Tensor"
)
_LIBRARY.define(
    "varlen_attention(Tensor query, Tensor key, Tensor value, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, "
    "SymInt max_seqlen_k, bool is_causal, float scale, str recipe, str backend) -> Tensor"
)


def _fake_quantize(x: torch.Tensor, granularity: str, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    shape = quantization.scale_shape(x.shape, granularity)
    return x.new_empty(x.shape, dtype=torch.int8), x.new_empty(shape, dtype=torch.float32)


def _fake_quantize_centered(x: torch.Tensor, granularity: str, backend: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    offset = x.new_empty(quantization.scale_shape(x.shape, "channel"), dtype=torch.float32)
    return *_fake_quantize(x, granularity, backend), offset


def _fake_quantize_with_scale(
    x: torch.Tensor, scale: torch.Tensor, backend: str, center: torch.Tensor | None = None
) -> torch.Tensor:
    return x.new_empty(x.shape, dtype=torch.int8)


def _fake_quantize_bias(bias: torch.Tensor) -> torch.Tensor:
    return bias.new_empty(bias.shape, dtype=torch.int32)


def _fake_int8_attention(query: torch.Tensor, *arguments: Any) -> torch.Tensor:
    value, out_dtype = arguments[3], arguments[9]
    return empty_output(query, value.shape[3], out_dtype)


def _fake_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
    return empty_output(query, value.shape[3], query.dtype)


def _fake_varlen_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
    return query.new_empty((query.shape[0], query.shape[1], value.shape[2]))


def _no_backward(ctx: Any, *grads: Any) -> None:
    raise NotImplementedError("QFlash is for inference: integer attention has no gradient")


for _name, _implementation, _fake in (
    ("quantize", quantize, _fake_quantize),
    ("quantize_centered", quantize_centered, _fake_quantize_centered),
    ("quantize_with_scale", quantize_with_scale, _fake_quantize_with_scale),
    ("quantize_bias", quantize_bias, _fake_quantize_bias),
    ("int8_attention", int8_attention, _fake_int8_attention),
    ("attention", attention, _fake_attention),
    ("varlen_attention", varlen.varlen_attention, _fake_varlen_attention),
):
    _LIBRARY.impl(_name, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"qflash::{_name}", _fake, lib=_LIBRARY)
    torch.library.register_vmap(f"qflash::{_name}", batching.RULES[_name], lib=_LIBRARY)

for _name in ("quantize", "quantize_centered", "quantize_with_scale", "int8_attention", "attention", "varlen_attention"):
    torch.library.register_autograd(f"qflash::{_name}", _no_backward, lib=_LIBRARY)


def _count(query: Sequence[int], keys: int, value_dim: int) -> int:
    """Count multiplications and additions of both matrix products, as PyTorch does for its own attention."""
    return 2 * math.prod(query[:3]) * keys * (query[3] + value_dim)


def _attention_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any) -> int:
    return _count(query, key[2], value[3])


def _int8_attention_flops(
    query: Sequence[int], query_scale: Any, key: Sequence[int], key_scale: Any, value: Sequence[int], *_: Any, **__: Any
) -> int:
    return _count(query, key[2], value[3])


def _register_flops() -> None:
    from torch.utils.flop_counter import register_flop_formula

    register_flop_formula(torch.ops.qflash.attention)(_attention_flops)
    register_flop_formula(torch.ops.qflash.int8_attention)(_int8_attention_flops)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function once a module has been imported.

    PyTorch's counter of operations imports Triton, which takes longer than all of QFlash and is of no use on most imports.
    """

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self.name, self.then = name, then

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self.then()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if "torch.utils.flop_counter" in sys.modules:
    _register_flops()
else:
    sys.meta_path.insert(0, _AfterImport("torch.utils.flop_counter", _register_flops))
