"""Latency beside accuracy: QFlash, PyTorch's attention and other functions on the same inputs in one run (Figure 3).

On a CUDA device a call is captured many times over in a CUDA graph and the graph is replayed, so that the device's
time is measured and not Python's; ``eager`` measures the rest. Methods take turns, in alternating order, and every
row carries its SQNR against float64 softmax attention. What fails becomes a row with its error.
"""

from __future__ import annotations

import csv
import dataclasses
import datetime
import functools
import gc
import importlib
import importlib.util
import json
import math
import pathlib
import platform
import re
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, TypeVar

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from . import figures, nvml
from .api import align_bias, attention, causal_mask, int8_attention, quantize, quantize_bias
from .backends import resolve_backend, triton_version
from .baselines import METHODS
from .baselines import Method as Baseline
from .baselines.method import FLOAT
from .metrics import sqnr
from .quantization import QuantizedTensor
from .recipe import DEFAULT, PRESETS, Recipe
from .validation import BACKENDS, resolve_device
from .workloads import WORKLOADS, get_workload

MODES = ("kernel", "end-to-end", "eager")
INPUTS = ("uniform", "normal")
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
RECIPES: dict[str, Recipe] = {
    **PRESETS,
    "per-tensor": DEFAULT.replace(
        query_granularity="tensor", key_granularity="tensor", value_granularity="tensor", smooth_key=False
    ),
}
"""What ``--recipe`` takes: the presets, and DEFAULT's arithmetic with one scale a tensor and no preparation."""

LONG = ((4, 32, 1024, 64), (4, 32, 4096, 64), (2, 32, 16384, 64), (4, 16, 1024, 128), (4, 16, 4096, 128), (2, 16, 16384, 128))
"""The shapes that ``--workload long`` stands for."""

FUSED_SDPA = {
    "sdpa flash": SDPBackend.FLASH_ATTENTION,
    "sdpa cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa efficient": SDPBackend.EFFICIENT_ATTENTION,
}
"""PyTorch's fused kernels on a GPU, by their names in tables."""

GPU_BATCHES, CPU_BATCHES = (1, 8, 64), (1, 8)

_GRAPH_US = 1000.0
_MOST_CALLS = 200
"""Calls in a graph: as many as take a millisecond, so that the clock's resolution and the launch do not matter."""

_EAGER_CALLS = 50
"""Far fewer than fill the launch queue (1024 entries) even at ten launches a call: issuing never waits for the device."""

_EXACT_SCORES = 1 << 24
"""Scores that the float64 reference may hold at once (128 MiB); beyond that it is computed on a part."""

_CPU_SECONDS = 10.0

Call = Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class Problem:
    """One attention to time.

    Attributes:
        workload: ``"A1"`` to ``"A7"``, or the shape as text.
        batch: images, for a workload; None for a plain shape.
        shape: of the query, ``(batch, heads, queries, head_dim)``.
        keys: tokens of key and value.
        windows: windows an image has (a factor of ``shape[0]``): the period of the bias over the batch.
        causal: query i sees keys 0 to i.
        bias: an additive ``(windows, heads, queries, keys)`` bias.
    """

    workload: str
    batch: int | None
    shape: tuple[int, int, int, int]
    keys: int
    windows: int = 1
    causal: bool = False
    bias: bool = False

    @property
    def label(self) -> str:
        """Name for tables and plots, without the batch."""
        return self.workload + " causal" * self.causal + " bias" * self.bias

    @property
    def operations(self) -> int:
        """Multiply and add operations of both products, ``4 * batch * heads * head_dim`` a score; masked ones not counted."""
        batch, heads, queries, head_dim = self.shape
        scores = sum(min(i + 1, self.keys) for i in range(queries)) if self.causal else queries * self.keys
        return 4 * batch * heads * head_dim * scores


def parse_shape(text: str) -> tuple[tuple[int, int, int, int], int]:
    """Read ``"Z,H,N,D"`` or ``"Z,H,N,D,Nk"`` (commas or x); return ((batch, heads, queries, head_dim), keys).

    Raises:
        ValueError: not four or five positive integers.
    """
    try:
        numbers = [int(part) for part in text.replace("x", ",").split(",")]
    except ValueError:
        numbers = []
    if len(numbers) not in (4, 5) or min(numbers) < 1:
        raise ValueError(f"shape must be Z,H,N,D or Z,H,N,D,Nk with positive integers, got {text!r}")
    batch, heads, queries, head_dim = numbers[:4]
    return (batch, heads, queries, head_dim), numbers[4] if len(numbers) == 5 else queries


def make_problems(
    workloads: Sequence[str], shapes: Sequence[str], batches: Sequence[int], *, causal: bool = False, bias: bool = False
) -> list[Problem]:
    """Return the problems to time: workloads at every batch, then fixed shapes; with ``bias`` each without and with it.

    Args:
        workloads: names of Table 1, ``"all"`` of them, or ``"long"``; all if neither these nor ``shapes`` are given.
        shapes: see :func:`parse_shape`.
        batches: images, for the workloads.
        causal: a causal mask in every problem.
        bias: excludes ``causal``.

    Raises:
        ValueError: an unknown workload, a bad shape or batch, or causal with bias.
    """
    if causal and bias:
        raise ValueError("causal and bias exclude each other: scaled_dot_product_attention takes one of them")
    names: list[str] = []
    fixed: list[tuple[tuple[int, int, int, int], int]] = []
    for name in workloads or (() if shapes else ("all",)):
        if name == "long":
            fixed += [(shape, shape[2]) for shape in LONG]
        elif name == "all":
            names += [workload.name for workload in WORKLOADS]
        else:
            try:
                names.append(get_workload(name).name)
            except ValueError:
                known = ", ".join(w.name for w in WORKLOADS)
                raise ValueError(f"workload must be one of {known}, all or long, got {name!r}") from None
    fixed += [parse_shape(text) for text in shapes]
    found = []
    for batch in batches:
        for name in names:
            workload = get_workload(name)
            found.append(Problem(name, batch, workload.shape(batch), workload.tokens, workload.windows, causal))
    for shape, keys in fixed:
        text = "x".join(map(str, shape)) + ("" if keys == shape[2] else f"x{keys}")
        found.append(Problem(text, None, shape, keys, 1, causal))
    if bias:
        found = [dataclasses.replace(problem, bias=with_bias) for problem in found for with_bias in (False, True)]
    return list(dict.fromkeys(found))


# --- inputs ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Inputs:
    """A problem's query, key and value ``(batch, heads, tokens, head_dim)`` and bias ``(windows, heads, queries, keys)``.

    The bias has aligned rows (:func:`qflash.align_bias`), which every method gets.
    """

    problem: Problem
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    bias: torch.Tensor | None

    def folded(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return query, key, value and mask in four dimensions, as SDPA takes them.

        With a bias the windows of an image become heads (a view), so that the mask repeats over images by
        broadcasting. That favours SDPA, and so do its aligned rows, which spare the memory-efficient back end a copy in
        every call.
        """
        if self.bias is None:
            return self.query, self.key, self.value, None
        windows, heads, queries, keys = self.bias.shape
        mask = self.bias.reshape(1, windows * heads, queries, keys)
        query, key, value = (x.reshape(-1, windows * heads, *x.shape[2:]) for x in (self.query, self.key, self.value))
        return query, key, value, mask

    def nested(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return query, key and value; with a bias the windows are a dimension of their own, as in ``qflash.patch``."""
        if self.bias is None:
            return self.query, self.key, self.value
        query, key, value = (x.unflatten(0, (-1, len(self.bias))) for x in (self.query, self.key, self.value))
        return query, key, value


def swin_bias(windows: int, heads: int, queries: int, keys: int, generator: torch.Generator) -> torch.Tensor:
    """Draw the additive bias of a Swin layer: relative position bias and, between regions of shifted windows, -100.

    The table's entries are N(0, 1): trained ones reach a few units, fresh ones (0.02) would be no test. One
    window an image is not shifted, as in Swin's last stage. Where tokens and windows are no squares (ViT, plain
    shapes) every entry of the bias is N(0, 1).

    Returns:
        float32 ``(windows, heads, queries, keys)``, in nats.
    """
    side, across = math.isqrt(keys), math.isqrt(windows)
    if queries != keys or side * side != keys or across * across != windows:
        return torch.randn((windows, heads, queries, keys), generator=generator, dtype=torch.float32, device="cpu")
    table = torch.randn(((2 * side - 1) ** 2, heads), generator=generator, dtype=torch.float32, device="cpu")
    token = torch.arange(keys, dtype=torch.int64, device="cpu")
    rows, columns = token // side, token % side
    index = (rows[:, None] - rows + side - 1) * (2 * side - 1) + columns[:, None] - columns + side - 1
    bias = table[index].permute(2, 0, 1).repeat(windows, 1, 1, 1)
    if across > 1:
        size, shift = side * across, side // 2
        line = torch.arange(size, dtype=torch.int64, device="cpu")
        region = (line >= size - side).int() + (line >= size - shift).int()
        image = (3 * region[:, None] + region).reshape(across, side, across, side)
        parts = image.transpose(1, 2).reshape(windows, keys)
        bias += torch.where(parts[:, :, None] == parts[:, None, :], 0.0, -100.0)[:, None]
    return bias


def check_input(kind: str) -> None:
    """Require one of :data:`INPUTS`.

    Raises:
        ValueError: another value.
    """
    if kind not in INPUTS:
        raise ValueError(f"input must be one of {INPUTS}, got {kind!r}")


def make_inputs(problem: Problem, kind: str, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Inputs:
    """Draw a problem's tensors on the CPU (the same on every device).

    Args:
        problem: the shapes.
        kind: ``"uniform"`` in [-4, 4), as the paper's operator experiments, or ``"normal"``, N(0, 1).
        dtype: of all tensors.
        device: where they go.
        seed: of a generator of this call's own.

    Raises:
        ValueError: another ``kind``.
    """
    check_input(kind)
    generator = torch.Generator().manual_seed(seed)
    batch, heads, queries, head_dim = problem.shape

    def draw(tokens: int) -> torch.Tensor:
        shape = (batch, heads, tokens, head_dim)
        if kind == "normal":
            return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(device, dtype)
        return (torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu") * 8.0 - 4.0).to(device, dtype)

    query, key, value = draw(queries), draw(problem.keys), draw(problem.keys)
    bias = None
    if problem.bias:
        bias = align_bias(swin_bias(problem.windows, heads, queries, problem.keys, generator).to(device, dtype))
    return Inputs(problem, query, key, value, bias)


# --- accuracy -------------------------------------------------------------------------------------------------


def exact_part(inputs: Inputs, most_scores: int = _EXACT_SCORES) -> tuple[torch.Tensor, tuple[slice, slice, slice], str]:
    """Return float64 softmax attention on as much of a problem as ``most_scores`` scores allow.

    Whole batch elements are dropped first, then heads, then query rows (every so many, over the whole length).

    Returns:
        the reference ``(batch, heads, queries, value_dim)`` of that part, the slices of the first three
        dimensions that it covers, and the part in words.
    """
    batch, heads, queries, _ = inputs.query.shape
    keys = inputs.key.shape[2]
    fitting = max(1, most_scores // (queries * keys))
    some_batch = min(batch, max(1, fitting // heads))
    some_heads = min(heads, fitting)
    step = max(1, -(-queries * keys // most_scores))
    part = slice(0, some_batch), slice(0, some_heads), slice(0, None, step)
    query = inputs.query[part].double()
    key, value = (x[part[:2]].double() for x in (inputs.key, inputs.value))
    scores = query @ key.mT * query.shape[-1] ** -0.5
    if inputs.bias is not None:
        window = torch.arange(some_batch, dtype=torch.int64, device=query.device) % len(inputs.bias)
        scores += inputs.bias[window][:, part[1], part[2]].double()
    if inputs.problem.causal:
        row = torch.arange(queries, dtype=torch.int64, device=query.device)[part[2]]
        scores.masked_fill_(torch.arange(keys, dtype=torch.int64, device=query.device) > row[:, None], -math.inf)
    words = "whole"
    if (some_batch, some_heads, step) != (batch, heads, 1):
        words = f"batch {some_batch}/{batch}, heads {some_heads}/{heads}, every row" + (f" in {step}" if step > 1 else "")
    return torch.softmax(scores, dim=-1) @ value, part, words


def as_tensor(out: object, problem: Problem) -> torch.Tensor:
    """Return a method's output as ``(batch, heads, queries, value_dim)``, dequantised.

    Raises:
        TypeError: not a tensor.
        ValueError: of another size.
    """
    if isinstance(out, QuantizedTensor):
        out = out.dequantize()
    if not isinstance(out, torch.Tensor):
        raise TypeError(f"the method returned {type(out).__name__}, a tensor is needed")
    if out.numel() != math.prod(problem.shape):
        raise ValueError(f"the method returned shape {tuple(out.shape)} for query {problem.shape}")
    return out.reshape(problem.shape)


# --- methods --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Method:
    """Something that computes attention.

    Attributes:
        name: what tables call it.
        mode: ``"kernel"`` (int8 in, quantised before the clock starts) or ``"end-to-end"`` (float in, float out).
        prepare: makes, from the inputs, the call to time; what it does itself is not timed. The call returns
            a tensor or a :class:`qflash.QuantizedTensor`.
        context: entered around all calls, outside the clock.
        is_sdpa: one of PyTorch's back ends in the run's dtype, to which ratios refer.
        is_ours: drawn in QFlash's colours.
        is_baseline: a method of :mod:`qflash.baselines`; like ours it is timed only in the modes asked for.
    """

    name: str
    mode: str
    prepare: Callable[[Inputs], Call]
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    is_sdpa: bool = False
    is_ours: bool = False
    is_baseline: bool = False


def _refuse_scores(needed: int, device: torch.device) -> None:
    """Raise MemoryError where a method that materialises its scores would not fit."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 8 << 30
    if needed > 0.4 * free:  # warm-up and graph have pools of their own
        raise MemoryError(f"not run: its scores need about {needed / 2**30:.0f} GiB, {free / 2**30:.0f} GiB are free")


def _prepare_sdpa(inputs: Inputs, *, dtype: torch.dtype | None = None, materialises: bool = False) -> Call:
    query, key, value, mask = (x if x is None or dtype is None else x.to(dtype) for x in inputs.folded())
    assert query is not None and key is not None and value is not None
    if materialises:
        # computed in float32 whatever the inputs are
        _refuse_scores(3 * 4 * math.prod(query.shape[:3]) * key.shape[2], query.device)
    causal = inputs.problem.causal
    return lambda: scaled_dot_product_attention(query, key, value, mask, is_causal=causal)


def _prepare_qflash(inputs: Inputs, *, recipe: Recipe, backend: str) -> Call:
    query, key, value = inputs.nested()
    bias, causal = inputs.bias, inputs.problem.causal
    return lambda: attention(query, key, value, bias, is_causal=causal, recipe=recipe, backend=backend)


def _prepare_qflash_int8(inputs: Inputs, *, recipe: Recipe, backend: str) -> Call:
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


def _prepare_peer(inputs: Inputs, *, function: Callable[..., Any]) -> Call:
    query, key, value, mask = inputs.folded()
    causal = inputs.problem.causal
    return lambda: function(query, key, value, attn_mask=mask, is_causal=causal, scale=None)


def _prepare_baseline(inputs: Inputs, *, method: Baseline, kernel: bool) -> Call:
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


def _baseline_methods(device: torch.device) -> Iterator[Method]:
    """Yield what the paper compares with; on a GPU only what has kernels, for a formula's time says nothing there."""
    for method in METHODS.values():
        if method.query_granularity == FLOAT or method.name.startswith("qflash"):
            continue  # PyTorch's own and ours are there already
        on_gpu = device.type == "cuda"
        if on_gpu and method.prepare is not None:
            prepare = functools.partial(_prepare_baseline, method=method, kernel=True)
            yield Method(f"{method.name} kernel", "kernel", prepare, is_baseline=True)
        if not on_gpu or (method.prepare is not None and not method.integer_only):
            prepare = functools.partial(_prepare_baseline, method=method, kernel=False)
            yield Method(method.name, "end-to-end", prepare, is_baseline=True)


def _qflash_methods(recipes: Sequence[str], device: torch.device) -> Iterator[Method]:
    if device.type == "cuda":
        backends = {"": "auto"}
    else:  # Triton's interpreter is for tests, its time says nothing
        backends = {f" {name}": name for name in BACKENDS if name not in ("auto", "triton") and _runs(name, device)}
    for suffix, backend in backends.items():
        for recipe in recipes:
            label = suffix if recipe == "default" else f"{suffix} {recipe}"
            options = {"recipe": RECIPES[recipe], "backend": backend}
            if recipe != "per-tensor":  # on int8 tensors it would be DEFAULT again
                prepare = functools.partial(_prepare_qflash_int8, **options)  # type: ignore[arg-type]
                yield Method(f"qflash int8{label}", "kernel", prepare, is_ours=True)
            prepare = functools.partial(_prepare_qflash, **options)  # type: ignore[arg-type]
            yield Method(f"qflash{label}", "end-to-end", prepare, is_ours=True)


def _runs(backend: str, device: torch.device) -> bool:
    try:
        resolve_backend(backend, device)
    except ValueError:
        return False
    return True


def _sdpa_methods(device: torch.device) -> Iterator[Method]:
    if device.type != "cuda":
        yield Method("sdpa", "end-to-end", _prepare_sdpa, is_sdpa=True)
        return
    for name, backend in (*FUSED_SDPA.items(), ("sdpa math", SDPBackend.MATH)):
        prepare = functools.partial(_prepare_sdpa, materialises=backend is SDPBackend.MATH)
        yield Method(name, "end-to-end", prepare, functools.partial(sdpa_kernel, backend), is_sdpa=True)
    exact = functools.partial(_prepare_sdpa, dtype=torch.float32, materialises=True)
    yield Method("sdpa math fp32", "end-to-end", exact, functools.partial(sdpa_kernel, SDPBackend.MATH))


def import_peer(text: str) -> tuple[str, Callable[..., Any]]:
    """Import a third-party function given as ``NAME=module:callable``; return its name and itself.

    The function is called as ``function(query, key, value, attn_mask=None, is_causal=False, scale=None)``.

    Raises:
        ValueError: the text has another form, or what it names cannot be imported or called; the message says why.
    """
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


def load_peer(text: str) -> Method:
    """Make a method of a third-party function; see :func:`import_peer`."""
    name, function = import_peer(text)
    return Method(name, "end-to-end", functools.partial(_prepare_peer, function=function))


MethodT = TypeVar("MethodT", bound="_Named")


class _Named(Protocol):
    @property
    def name(self) -> str: ...


def select(methods: Sequence[Method], only: Sequence[str]) -> list[Method]:
    """Return the methods named in ``only``, or if it is empty all but PyTorch's unfused ones (Tables 2 and 3)."""
    return [m for m in methods if (m.name in only if only else not m.name.startswith("sdpa math"))]


def make_methods(
    device: torch.device, recipes: Sequence[str] = ("default",), peers: Sequence[str] = (), only: Sequence[str] = ()
) -> list[Method]:
    """Return every method that can be timed on ``device``, in the order of the tables.

    Args:
        device: a CUDA device or the CPU.
        recipes: QFlash's recipes, keys of :data:`RECIPES`.
        peers: see :func:`load_peer`.
        only: names to keep; all if empty.

    Raises:
        ValueError: a name in ``recipes``, ``peers`` or ``only`` is unknown or not unique.
    """
    check_recipes(recipes)
    found = [
        *_sdpa_methods(device),
        *_baseline_methods(device),
        *_qflash_methods(recipes, device),
        *(load_peer(text) for text in peers),
    ]
    return keep_named(found, only)


def check_recipes(recipes: Sequence[str]) -> None:
    """Require keys of :data:`RECIPES`, or raise ValueError."""
    for recipe in recipes:
        if recipe not in RECIPES:
            raise ValueError(f"recipe must be one of {tuple(RECIPES)}, got {recipe!r}")


def keep_named(found: Sequence[MethodT], only: Sequence[str]) -> list[MethodT]:
    """Return the methods called as in ``only``, or all if it is empty.

    Raises:
        ValueError: two methods have one name, or none has a name in ``only``.
    """
    names = [method.name for method in found]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two methods are called {name!r}; give the peer another name")
    for name in only:
        if name not in names:
            raise ValueError(f"method must be one of {names}, got {name!r}")
    return [method for method in found if not only or method.name in only]


# --- timing ---------------------------------------------------------------------------------------------------


def settle_calls(measure: Callable[[int], float]) -> int:
    """Return how many calls to time at once, those that ``measure`` was last asked for: about a millisecond, 200 at most.

    Of few calls Python's and the launch's part is the larger, and another program on the machine may be the largest. So they
    become more until they last half of that.

    Args:
        measure: times so many calls at once and returns the microseconds of one.
    """
    calls, wanted = 0, 1
    while wanted > calls:
        calls = wanted
        us = measure(calls)
        if calls * us < _GRAPH_US / 2:
            wanted = min(_MOST_CALLS, round(_GRAPH_US / max(us, 0.1)))
    return calls


class GraphTimer:
    """Times a call by replaying a CUDA graph of many of it, behind one replay that keeps the device busy meanwhile."""

    def __init__(self, call: Call) -> None:
        """Warm up and capture.

        Raises:
            Exception: whatever the call or its capture raises.
        """
        self._call = call  # the graph holds addresses, the call the tensors they belong to
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                call()
            # A call that waits for the device cannot be captured; found here it leaves no half-made graph behind.
            torch.cuda.set_sync_debug_mode("error")
            try:
                call()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self.calls = settle_calls(self._try)

    def _try(self, calls: int) -> float:
        """Make it ``calls`` a sample and return the least microseconds of a few samples."""
        self.calls = calls
        self._graph = self._capture(self._call)
        return min(self.sample()["us"] for _ in range(5))

    def _capture(self, call: Call) -> torch.cuda.CUDAGraph:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph):
                for _ in range(self.calls):
                    call()
        finally:  # a capture that fails leaves its own stream current
            torch.cuda.set_stream(stream)
        torch.cuda.synchronize()
        return graph

    def replay(self) -> None:
        """Enqueue :attr:`calls` calls."""
        self._graph.replay()

    def sample(self) -> dict[str, float]:
        """Return the device's time of one call in microseconds."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._graph.replay()
        begin.record()
        self._graph.replay()
        end.record()
        end.synchronize()
        return {"us": begin.elapsed_time(end) * 1000.0 / self.calls}


class EagerTimer:
    """Times a call as a program without graphs makes it: until the device is done, and until the call is issued."""

    def __init__(self, call: Call, context: Callable[[], AbstractContextManager[Any]]) -> None:
        """Warm up."""
        self._call, self._context = call, context
        self.calls = 1
        with context():
            for _ in range(3):
                call()
        once = min(self.sample()["us"] for _ in range(3))
        self.calls = max(5, min(_EAGER_CALLS, round(50_000 / max(once, 1.0))))

    def sample(self) -> dict[str, float]:
        """Return microseconds a call: ``us`` until the device is done, ``issue_us`` until the last call returned
        (wall clock) and ``cpu_us``, the process's CPU time until then."""
        call, calls = self._call, self.calls
        with self._context():
            torch.cuda.synchronize()
            cpu, begin = time.process_time(), time.perf_counter()
            for _ in range(calls):
                call()
            issued, cpu_issued = time.perf_counter(), time.process_time()
            torch.cuda.synchronize()
            done = time.perf_counter()
        scale = 1e6 / calls
        return {"us": (done - begin) * scale, "issue_us": (issued - begin) * scale, "cpu_us": (cpu_issued - cpu) * scale}


class CpuTimer:
    """Times a call on the CPU by the wall clock."""

    def __init__(self, call: Call, context: Callable[[], AbstractContextManager[Any]]) -> None:
        """Warm up and choose how many calls make one sample (at least five milliseconds)."""
        self._call, self._context = call, context
        self.calls = 1
        self.sample()
        self.calls = max(1, min(_MOST_CALLS, math.ceil(5000.0 / max(self.sample()["us"], 1.0))))

    def sample(self) -> dict[str, float]:
        """Return microseconds a call."""
        with self._context():
            cpu, begin = time.process_time(), time.perf_counter()
            for _ in range(self.calls):
                self._call()
            end, cpu_end = time.perf_counter(), time.process_time()
        scale = 1e6 / self.calls
        return {"us": (end - begin) * scale, "cpu_us": (cpu_end - cpu) * scale}


Timer = GraphTimer | EagerTimer | CpuTimer


def make_timer(method: Method, call: Call, mode: str, device: torch.device) -> Timer:
    """Return the timer for ``mode`` on ``device``."""
    if device.type != "cuda":
        return CpuTimer(call, method.context)
    if mode == "eager":
        return EagerTimer(call, method.context)
    with method.context():
        return GraphTimer(call)


def describe(error: BaseException) -> str:
    """Return an exception in one line; of a failed capture, what made it fail."""
    while isinstance(error.__context__, Exception) and error.__cause__ is None and "captur" in str(error).lower():
        error = error.__context__
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


@contextmanager
def explained() -> Iterator[None]:
    """Add to SDPA's "no kernel" the reason, which it gives as warnings only; other warnings pass by unseen."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            yield
        except RuntimeError as error:
            if not re.search("No (available kernel|viable backend)", str(error)):
                raise
            texts = [str(warning.message).split(" (Triggered internally")[0].strip() for warning in said]
            reasons = [text for text in texts if not re.search("not used because|runtime disabled", text)]
            raise RuntimeError("; ".join(dict.fromkeys(reasons)) or str(error)) from error


def tidy(device: torch.device) -> None:
    """Give back what a method has left in memory."""
    gc.collect()
    if device.type == "cuda":
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError:  # a broken context breaks every later method, and each says so in its own row
            return


@dataclasses.dataclass
class _Runner:
    method: Method
    mode: str
    row: dict[str, Any]
    timer: Timer | None = None
    samples: list[dict[str, float]] = dataclasses.field(default_factory=list)
    seconds: float = 0.0


def summarise(samples: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return median, quartiles and extremes of the samples' ``us``, and the medians of what else they hold."""
    times = sorted(sample["us"] for sample in samples)
    quartiles = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3
    result = {
        "median_us": quartiles[1],
        "q1_us": quartiles[0],
        "q3_us": quartiles[2],
        "min_us": times[0],
        "max_us": times[-1],
    }
    for name in samples[0]:
        if name != "us":
            result[name] = statistics.median(sample[name] for sample in samples)
    return {name: round(value, 3) for name, value in result.items()}


FIELDS = (
    "workload", "batch", "shape", "keys", "causal", "bias", "input", "dtype", "mode", "method", "median_us", "q1_us", "q3_us",
    "min_us", "max_us", "samples", "calls", "issue_us", "cpu_us", "tops", "best_sdpa", "ratio", "bias_cost", "sqnr_db",
    "sqnr_of", "error",
)  # fmt: skip
"""Columns of ``bench.csv`` and keys of a row; what does not apply is None."""


def measure(
    problem: Problem,
    methods: Sequence[Method],
    modes: Sequence[str],
    *,
    kind: str,
    dtype: torch.dtype,
    device: torch.device,
    rounds: int,
    tick: Callable[[str], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """Time every method on one problem, in turns, and return one row a method and mode, keys :data:`FIELDS`.

    ``ratio`` is the time of the fastest of PyTorch's back ends in the run's dtype (``best_sdpa``), in the same
    way of measuring, divided by the row's. SDPA and peers are measured whatever the modes are.
    """
    inputs = make_inputs(problem, kind, dtype, device)
    wanted, part, words = exact_part(inputs)
    runners: list[_Runner] = []
    for method in methods:
        graph_modes = [method.mode] if method.mode in modes or not (method.is_ours or method.is_baseline) else []
        if device.type != "cuda":
            chosen = graph_modes or ([method.mode] if "eager" in modes else [])
        else:
            only_eager = tuple(modes) == ("eager",)
            eager = ["eager"] if "eager" in modes and (method.mode != "kernel" or "kernel" in modes) else []
            chosen = (graph_modes if not only_eager else []) + eager
        if not chosen:
            continue
        base: dict[str, Any] = dict.fromkeys(FIELDS)
        base |= {
            "workload": problem.workload,
            "batch": problem.batch,
            "shape": "x".join(map(str, problem.shape)),
            "keys": problem.keys,
            "causal": problem.causal,
            "bias": problem.bias,
            "input": kind,
            "dtype": str(dtype).removeprefix("torch."),
            "method": method.name,
        }
        call: Call | None = None
        for mode in chosen:
            runner = _Runner(method, mode, base | {"mode": mode})
            runners.append(runner)
            try:
                if call is None:
                    with explained(), method.context():
                        made = method.prepare(inputs)
                        got = as_tensor(made(), problem)[part]
                    call = made
                    base["sqnr_db"], base["sqnr_of"] = round(sqnr(wanted, got), 2), words
                    runner.row |= {"sqnr_db": base["sqnr_db"], "sqnr_of": words}
                    del got
                runner.timer = make_timer(method, call, mode, device)
            except Exception as error:
                runner.row["error"] = describe(error)
                tidy(device)
        tick(method.name)
    ready = [runner for runner in runners if runner.timer is not None]
    for index in range(rounds):
        for runner in ready if index % 2 == 0 else reversed(ready):
            enough = device.type != "cuda" and runner.seconds > _CPU_SECONDS and len(runner.samples) >= 3
            if runner.timer is None or enough:
                continue
            begin = time.monotonic()
            try:
                runner.samples.append(runner.timer.sample())
            except Exception as error:
                runner.row["error"], runner.timer = describe(error), None
            runner.seconds += time.monotonic() - begin
    for runner in runners:
        if runner.timer is not None and runner.samples:
            runner.row |= summarise(runner.samples)
            runner.row |= {"samples": len(runner.samples), "calls": runner.timer.calls}
            runner.row["tops"] = round(problem.operations / runner.row["median_us"] / 1e6, 2)
    for is_eager in (False, True):
        add_ratios([(r.method.is_sdpa, r.row) for r in runners if (r.mode == "eager") is is_eager])
    rows = [runner.row for runner in runners]
    del runners, ready, inputs, call
    tidy(device)
    return rows


def add_ratios(timed: Sequence[tuple[bool, dict[str, Any]]]) -> None:
    """Set ``best_sdpa`` and ``ratio`` of rows timed in the same way, each with whether it is one of PyTorch's back ends."""
    done = [(is_sdpa, row) for is_sdpa, row in timed if row["median_us"] is not None]
    best = min((row for is_sdpa, row in done if is_sdpa), key=lambda row: float(row["median_us"]), default=None)
    if best is not None:
        for _, row in done:
            row["best_sdpa"] = best["method"]
            row["ratio"] = round(best["median_us"] / row["median_us"], 3)


def add_bias_costs(rows: Sequence[dict[str, Any]]) -> None:
    """Set ``bias_cost`` of rows with a bias: their time over the same method's without it."""

    def key(row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row[name] for name in ("workload", "batch", "shape", "keys", "mode", "method"))

    plain = {key(row): row["median_us"] for row in rows if not row["bias"] and row["median_us"] is not None}
    for row in rows:
        if row["bias"] and row["median_us"] is not None and key(row) in plain:
            row["bias_cost"] = round(row["median_us"] / plain[key(row)], 3)


# --- output ---------------------------------------------------------------------------------------------------


def environment(device: torch.device) -> dict[str, Any]:
    """Return what a reader needs to judge or repeat a measurement: device, versions, clocks, date, command line."""
    from . import __version__
    from .info import _driver_version

    found: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(["qflash", *sys.argv[1:]]),
        "qflash": __version__,
        "torch": torch.__version__,
        "triton": triton_version(),
        "python": platform.python_version(),
        "device_type": device.type,
    }
    if device.type != "cuda":
        return found | {"device": f"{platform.machine()} CPU", "threads": torch.get_num_threads()}
    properties = torch.cuda.get_device_properties(device)
    return found | {
        "device": properties.name,
        "capability": f"sm_{properties.major}{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "driver": _driver_version(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nvml": nvml.snapshot(device),
    }


def finite(x: Any) -> Any:
    """Replace what JSON has no word for (NaN, infinity) by its name, recursively."""
    if isinstance(x, dict):
        return {key: finite(value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [finite(value) for value in x]
    return str(x) if isinstance(x, float) and not math.isfinite(x) else x


def write_json(path: pathlib.Path, record: dict[str, Any]) -> None:
    """Write a record, making its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(finite(record), indent=1, allow_nan=False) + "\n", encoding="utf-8")


def write_csv(path: pathlib.Path, rows: Iterable[dict[str, Any]], fields: Sequence[str]) -> None:
    """Write rows, an empty cell for None."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fields, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)


def draw(rows: Sequence[dict[str, Any]], title: str) -> Any:
    """Draw Figure 3: latency in grouped bars, one panel a batch and one for plain shapes; graph (or CPU) rows only.

    Returns:
        a matplotlib Figure.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: no row has a time.
    """
    timed = [row for row in rows if row["median_us"] is not None and row["mode"] != "eager"]
    timed = timed or [row for row in rows if row["median_us"] is not None]
    if not timed:
        raise ValueError("no method was timed, there is nothing to draw")
    figure, found = figures.panels(timed, "batch", _label, width=11, height=3.2)
    for axes, batch, series in found:
        for name, mine, spots, width, colour in series:
            middle = [row["median_us"] for row in mine]
            spread = [
                [row["median_us"] - row["q1_us"] for row in mine],
                [row["q3_us"] - row["median_us"] for row in mine],
            ]
            hatch = "//" if name.startswith("qflash") else None
            axes.bar(spots, middle, width, yerr=spread, color=colour, hatch=hatch, label=name, error_kw={"lw": 0.6})
        least = min(row["median_us"] for one in series for row in one.rows)
        axes.set_yscale("log")
        axes.set_ylim(bottom=10.0 ** math.floor(math.log10(0.9 * least)))
        axes.set_ylabel("µs a call")
        axes.set_title("given shapes" if batch is None else f"batch {batch}", loc="left", fontsize="medium")
    figures.add_legend(figure)
    figure.suptitle(title, fontsize="medium")
    return figure


def _label(row: dict[str, Any]) -> str:
    return row["workload"] + " causal" * row["causal"] + " bias" * row["bias"]


def render(rows: Sequence[dict[str, Any]], title: str) -> Table:
    """Return the rows as a table."""
    table = Table(title=title, title_justify="left", caption_justify="left")
    eager = any(row["issue_us"] is not None for row in rows)
    bias = any(row["bias"] for row in rows)
    for heading in ("workload", "batch", "mode", "method"):
        table.add_column(heading, no_wrap=True)
    headings = ["median µs", "quartiles", *(["issue µs", "CPU µs"] if eager else []), "TOPS", "ratio"]
    for heading in (*headings, *(["bias ÷ none"] if bias else []), "SQNR dB"):
        table.add_column(heading, justify="right", no_wrap=True)
    last: tuple[Any, ...] | None = None
    for row in rows:
        here = (row["workload"], row["batch"], row["bias"])
        if last is not None and here != last:
            table.add_section()
        first = (_label(row), str(row["batch"] or "-")) if here != last else ("", "")
        last = here
        if row["median_us"] is None:
            cells = ["failed", *[""] * (len(headings) - 1)]
        else:
            cells = [format_number(row["median_us"]), f"{format_number(row['q1_us'])} - {format_number(row['q3_us'])}"]
            cells += [format_number(row["issue_us"]), format_number(row["cpu_us"])] if eager else []
            cells += [format_number(row["tops"]), format_number(row["ratio"])]
        cells += [format_number(row["bias_cost"])] if bias else []
        table.add_row(*first, row["mode"], row["method"], *cells, format_number(row["sqnr_db"]))
    return table


def print_errors(rows: Sequence[dict[str, Any]], console: Console) -> None:
    """Print the rows that failed, with the reason."""
    for row in rows:
        if row["error"]:
            where = f"{_label(row)} b{row['batch']}" if row["batch"] else _label(row)
            console.print(f"failed: {where}, {row['mode']}, {row['method']}: {row['error']}", markup=False, soft_wrap=True)


def format_number(x: float | None) -> str:
    """Return a number as tables show it."""
    if x is None:
        return "-"
    return f"{x:.0f}" if math.isfinite(x) and abs(x) >= 1000 else f"{x:.2f}"


@contextmanager
def progress_bar(total: int) -> Iterator[Callable[[str], None]]:
    """Show a bar on standard error if it is a terminal; yields a function that names what is done and moves on by one."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description:40.40}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("starting", total=total)
        yield lambda done: progress.update(task, advance=1, description=done)


def table_console() -> Console:
    """Return standard output's console; a pipe has no width, and rich would fold a table into 80 columns."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(width=200, highlight=False)


def pick_device(name: str | None) -> torch.device:
    """Return the device called ``name``, or the GPU if there is one, or the CPU.

    Raises:
        ValueError: no device's name, a CUDA device that is not there, or a device that is neither CUDA nor CPU.
    """
    device = resolve_device(name)
    if device.type not in ("cuda", "cpu"):
        raise ValueError(f"device must be cuda or cpu, got {name!r}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def pick_dtype(name: str | None, device: torch.device) -> torch.dtype:
    """Return the dtype called ``name``, or float16 on a GPU and float32 on the CPU.

    Raises:
        ValueError: unknown name.
    """
    if name is None:
        return torch.float16 if device.type == "cuda" else torch.float32
    if name not in DTYPES:
        raise ValueError(f"dtype must be one of {tuple(DTYPES)}, got {name!r}")
    return DTYPES[name]


def timing_method(device: torch.device, rounds: int) -> str:
    """Say in words how times are taken."""
    if device.type != "cuda":
        return (
            f"CPU back ends on {platform.machine()}, {torch.get_num_threads()} threads, wall clock, warm, methods in turns "
            f"(order reversed every round), median of up to {rounds} samples (at least 3, {_CPU_SECONDS:.0f} s a method), "
            "each of at least 5 ms or one call; baselines are plain PyTorch formulas; no GPU was measured, and calls are eager "
            "whatever the mode"
        )
    return (
        f"kernel, end-to-end: device time by CUDA events around the replay of a CUDA graph of 1 to {_MOST_CALLS} calls (about "
        f"1 ms), behind an untimed replay, warm caches; eager: {_EAGER_CALLS} calls or fewer between two synchronisations. "
        f"Methods in turns (order reversed every round), median of {rounds} samples. ratio: fastest SDPA back end of the run's "
        "dtype ÷ row. SDPA and peers are float in, float out in every mode; baselines' kernels have int8 (or their float V) "
        "in, float16 out (I-ViT: int8 out)"
    )


@torch.inference_mode()
def run_bench(
    problems: Sequence[Problem],
    methods: Sequence[Method],
    *,
    modes: Sequence[str] = ("kernel", "end-to-end"),
    kind: str = "uniform",
    dtype: torch.dtype,
    device: torch.device,
    rounds: int = 15,
    output: pathlib.Path | None = None,
) -> dict[str, Any]:
    """Measure, print the table and write ``bench.json``, ``.csv``, ``.png`` and ``.svg`` into ``output``.

    ``bench.json`` and ``bench.csv`` are written after every problem, so that a run that is cut short leaves what it had.

    Returns:
        what ``bench.json`` holds: environment, timing (in words) and rows.

    Raises:
        ValueError: an unknown mode, or fewer than one round.
    """
    for mode in modes:
        if mode not in MODES:
            raise ValueError(f"mode must be one of {MODES}, got {mode!r}")
    check_input(kind)
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    record: dict[str, Any] = {
        "what": "latency of attention with its accuracy",
        "environment": environment(device),
        "timing": timing_method(device, rounds),
        "sqnr": "20 log10(|ref| / |out - ref|) against float64 softmax attention on the inputs before quantisation",
        "modes": list(modes),
        "rows": [],
    }
    rows: list[dict[str, Any]] = record["rows"]
    console = table_console()
    console.print(f"{record['environment']['device']}. {record['timing']}.\n")
    with progress_bar(len(problems) * len(methods)) as tick:
        for problem in problems:
            label = f"{problem.label} b{problem.batch}" if problem.batch else problem.label

            def step(done: str, label: str = label) -> None:
                tick(f"{label} {done}")

            try:
                rows += measure(problem, methods, modes, kind=kind, dtype=dtype, device=device, rounds=rounds, tick=step)
            except Exception as error:  # inputs or reference did not fit
                tidy(device)
                failed: dict[str, Any] = dict.fromkeys(FIELDS)
                rows.append(
                    failed
                    | {
                        "workload": problem.workload, "batch": problem.batch, "shape": "x".join(map(str, problem.shape)),
                        "keys": problem.keys, "causal": problem.causal, "bias": problem.bias, "input": kind,
                        "dtype": str(dtype).removeprefix("torch."), "mode": "-", "method": "(none)", "error": describe(error),
                    }
                )  # fmt: skip
            if output is not None:
                add_bias_costs(rows)
                write_json(output / "bench.json", record)
                write_csv(output / "bench.csv", rows, FIELDS)
    add_bias_costs(rows)
    if device.type == "cuda":
        record["environment"]["nvml_after"] = nvml.snapshot(device)
    title = f"{kind} inputs, {str(dtype).removeprefix('torch.')}"
    console.print(render(rows, title))
    print_errors(rows, console)
    if output is not None:
        write_json(output / "bench.json", record)
        write_csv(output / "bench.csv", rows, FIELDS)
        try:
            figures.write_figure(output, "bench", draw(rows, f"{record['environment']['device']}, {title}"))
            console.print(f"Written to {output}: bench.json, bench.csv, bench.png, bench.svg")
        except (ImportError, ValueError) as error:
            console.print(f"Written to {output}: bench.json, bench.csv; no plot: {error}")
    return record
