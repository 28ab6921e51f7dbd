"""What is measured against what: functions that compute attention."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from qflash.api import align_bias, attention, causal_mask, int8_attention, quantize, quantize_bias
from qflash.backends import resolve_backend
from qflash.specification.recipe import DEFAULT, PRESETS, Recipe
from qflash.validation import BACKENDS

from ..baselines import METHODS, Method
from ..baselines.method import FLOAT
from . import peers as packages
from . import schema as col
from .errors import describe
from .problems import Inputs
from .runner import TimedMethod, choose
from .timers import TimedCall

PER_TENSOR: dict[str, Any] = {
    "query_granularity": "tensor", "key_granularity": "tensor", "value_granularity": "tensor", "smooth_key": False,
}  # fmt: skip
"""What recipe ``per-tensor`` changes in DEFAULT: one scale a tensor and no preparation."""

RECIPES: dict[str, Recipe] = {**PRESETS, "per-tensor": DEFAULT.replace(**PER_TENSOR)}
"""What ``--recipe`` takes: the presets, and DEFAULT's arithmetic with one scale a tensor and no preparation."""

FUSED_SDPA = {
    col.SDPA_FLASH: SDPBackend.FLASH_ATTENTION,
    col.SDPA_CUDNN: SDPBackend.CUDNN_ATTENTION,
    col.SDPA_EFFICIENT: SDPBackend.EFFICIENT_ATTENTION,
}
"""PyTorch's fused kernels on a GPU, by their names in tables."""

_GPU, _CPU = ("cuda",), ("cpu",)


def _refuse_scores(needed: int, device: torch.device) -> None:
    """Raise MemoryError where a method that materialises its scores would not fit."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 8 << 30
    if needed > 0.4 * free:  # warm-up and graph have pools of their own
        raise MemoryError(f"not run: its scores need about {needed / 2**30:.0f} GiB, {free / 2**30:.0f} GiB are free")


def _prepare_sdpa(inputs: Inputs, *, dtype: torch.dtype | None = None, materialises: bool = False) -> TimedCall:
    query, key, value, mask = (x if x is None or dtype is None else x.to(dtype) for x in inputs.folded())
    assert query is not None and key is not None and value is not None
    if materialises:
        # computed in float32 whatever the inputs are
        _refuse_scores(3 * 4 * math.prod(query.shape[:3]) * key.shape[2], query.device)
    causal = inputs.problem.causal
    return lambda: scaled_dot_product_attention(query, key, value, mask, is_causal=causal)


def _prepare_qflash(inputs: Inputs, *, recipe: Recipe, backend: str) -> TimedCall:
    query, key, value = inputs.nested()
    bias, causal = inputs.bias, inputs.problem.causal
    return lambda: attention(query, key, value, bias, is_causal=causal, recipe=recipe, backend=backend)


def _prepare_qflash_int8(inputs: Inputs, *, recipe: Recipe, backend: str) -> TimedCall:
    """int8 to int8 with one scale a tensor (the paper's setting) and an output scale fitted beforehand."""
    query, key, value = (quantize(x, backend=backend) for x in inputs.nested())
    bias = None if inputs.bias is None else align_bias(quantize_bias(inputs.bias))
    run = functools.partial(
        int8_attention, query, key, value, bias, is_causal=inputs.problem.causal, recipe=recipe, backend=backend
    )
    calibration = run(out_dtype=torch.float32)
    assert isinstance(calibration, torch.Tensor)
    scale = calibration.abs().amax() / 127
    return functools.partial(run, output_scale=scale)


def _prepare_peer(inputs: Inputs, *, function: Callable[..., Any]) -> TimedCall:
    *tensors, mask = inputs.folded()
    # some write into their inputs, which are other methods' too
    query, key, value = (x.clone() for x in tensors)
    causal = inputs.problem.causal
    return lambda: function(query, key, value, attn_mask=mask, is_causal=causal, scale=None)


def _prepare_baseline(inputs: Inputs, *, method: Method, kernel: bool) -> TimedCall:
    """A baseline's kernels on tensors quantised beforehand, or the whole of it, float in and out."""
    query, key, value, mask = inputs.folded()
    causal = inputs.problem.causal
    if query.is_cuda and (causal or mask is not None):
        raise NotImplementedError(f"{method.title}'s kernels take no mask")
    if method.integer_only or not query.is_cuda:  # I-ViT's kernels and all plain formulas; int64 is the widest
        _refuse_scores(3 * 8 * math.prod(query.shape[:3]) * key.shape[2], query.device)
    if kernel:
        assert method.prepare is not None
        return method.prepare(query, key, value)
    if causal:
        mask = causal_mask(query, key)
    return lambda: method.attention(query, key, value, attn_mask=mask)


def _baseline_methods() -> Iterator[TimedMethod[Inputs]]:
    """Yield what the paper compares with; on a GPU only what has kernels, for a formula's time says nothing there."""
    for method in METHODS.values():
        if method.query_granularity == FLOAT or method.name.startswith(col.QFLASH):
            continue  # PyTorch's own and ours are listed apart
        run = functools.partial(_prepare_baseline, method=method)
        if method.prepare is not None:
            prepare = functools.partial(run, kernel=True)
            yield TimedMethod(f"{method.name} kernel", "kernel", prepare, is_baseline=True, devices=_GPU)
        devices = _GPU + _CPU if method.prepare is not None and not method.integer_only else _CPU
        yield TimedMethod(method.name, "end-to-end", functools.partial(run, kernel=False), is_baseline=True, devices=devices)


def _qflash_methods(recipes: Sequence[str]) -> Iterator[TimedMethod[Inputs]]:
    # on a CPU every back end by its name; Triton's interpreter is for tests, its time says nothing
    own = [name for name in BACKENDS if name not in ("auto", "triton") and _runs_on_cpu(name)]
    for suffix, backend, devices in (("", "auto", _GPU), *((f" {name}", name, _CPU) for name in own)):
        for recipe in recipes:
            label = suffix if recipe == "default" else f"{suffix} {recipe}"
            options: dict[str, Any] = {"recipe": RECIPES[recipe], "backend": backend}
            if recipe != "per-tensor":  # on int8 tensors it would be DEFAULT again
                prepare = functools.partial(_prepare_qflash_int8, **options)
                yield TimedMethod(f"{col.QFLASH_INT8}{label}", "kernel", prepare, is_ours=True, devices=devices)
            prepare = functools.partial(_prepare_qflash, **options)
            yield TimedMethod(f"{col.QFLASH}{label}", "end-to-end", prepare, is_ours=True, devices=devices)


def _runs_on_cpu(backend: str) -> bool:
    try:
        resolve_backend(backend, torch.device("cpu"))
    except ValueError:
        return False
    return True


def _sdpa_methods() -> Iterator[TimedMethod[Inputs]]:
    yield TimedMethod(col.SDPA, "end-to-end", _prepare_sdpa, is_sdpa=True, devices=_CPU)
    for name, backend in (*FUSED_SDPA.items(), ("sdpa math", SDPBackend.MATH)):
        prepare = functools.partial(_prepare_sdpa, materialises=backend is SDPBackend.MATH)
        yield TimedMethod(name, "end-to-end", prepare, functools.partial(sdpa_kernel, backend), is_sdpa=True, devices=_GPU)
    exact = functools.partial(_prepare_sdpa, dtype=torch.float32, materialises=True)
    context = functools.partial(sdpa_kernel, SDPBackend.MATH)
    yield TimedMethod("sdpa math fp32", "end-to-end", exact, context, devices=_GPU)


def import_peer(text: str) -> tuple[str, Callable[..., Any]]:
    """Return the name of a third-party function and itself, of :mod:`qflash_lab.bench.peers` or ``NAME=module:callable``.

    The function is called as ``function(query, key, value, attn_mask=None, is_causal=False, scale=None)``.

    Raises:
        ValueError: the text has another form, or what it names cannot be imported or called; the message says why.
    """
    if "=" not in text:
        return text, packages.function_of(text)
    name, equals, path = text.partition("=")
    module, colon, attribute = path.partition(":")
    if not (name.strip() and equals and module and colon and attribute):
        raise ValueError(f"peer must be NAME=module:callable, got {text!r}")
    try:
        function: Any = importlib.import_module(module)
        for part in attribute.split("."):
            function = getattr(function, part)
    except Exception as error:  # a third party's module may raise anything
        raise ValueError(f"peer {name!r} cannot be imported from {path!r}: {describe(error)}") from error
    if not callable(function):
        raise ValueError(f"peer {name!r}: {path!r} is a {type(function).__name__}, not a callable")
    return name.strip(), function


def load_peers(texts: Sequence[str]) -> list[TimedMethod[Inputs]]:
    """Return the methods of third parties, each a name in :data:`qflash_lab.bench.peers.PEERS`, all of them or a function.

    Raises:
        ValueError: see :func:`import_peer`.
    """
    given = (
        TimedMethod(name, "end-to-end", functools.partial(_prepare_peer, function=function))
        for name, function in (import_peer(text) for text in texts if "=" in text)
    )
    return [*packages.methods(packages.named([text for text in texts if "=" not in text])), *given]


def select(methods: Sequence[TimedMethod[Inputs]], only: Sequence[str]) -> list[TimedMethod[Inputs]]:
    """Return the methods named in ``only``, or if it is empty all but PyTorch's unfused ones (Tables 2 and 3)."""
    return [m for m in methods if (m.name in only if only else not m.name.startswith("sdpa math"))]


def make_methods(
    device: torch.device, recipes: Sequence[str] = ("default",), peers: Sequence[str] = (), only: Sequence[str] = ()
) -> list[TimedMethod[Inputs]]:
    """Return every method that can be timed on ``device``, in the order of the tables.

    Args:
        device: a CUDA device or the CPU.
        recipes: QFlash's recipes, keys of :data:`RECIPES`.
        peers: see :func:`load_peers`.
        only: names to keep; all if empty.

    Raises:
        ValueError: a name in ``recipes``, ``peers`` or ``only`` is unknown or not unique.
    """
    check_recipes(recipes)
    found = [*_sdpa_methods(), *_baseline_methods(), *_qflash_methods(recipes), *load_peers(peers)]
    return choose(found, device, only)


def check_recipes(recipes: Sequence[str]) -> None:
    """Require keys of :data:`RECIPES`, or raise ValueError."""
    for recipe in recipes:
        if recipe not in RECIPES:
            raise ValueError(f"recipe must be one of {tuple(RECIPES)}, got {recipe!r}")
