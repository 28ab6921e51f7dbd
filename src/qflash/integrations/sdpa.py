"""Integer attention for code that calls ``torch.nn.functional.scaled_dot_product_attention``: :class:`sdpa`.

A torch function mode serves better than ``torch.nn.attention.register_flash_attention_impl``: that one is for the whole
process, CUDA only, behind PyTorch's choice of a kernel, and never sees a mask. A mode is one thread's, sees whole calls under
whatever name the caller holds the function, and is traced by ``torch.compile`` and ``torch.export``.

The tasks of asyncio that share a thread share its modes. So a mode only brings calls here; whose they are, a context variable
tells, of which each task has its own value.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

from ..api import attention
from ..backends import why_unavailable
from ..specification.recipe import Recipe, resolve_recipe
from ..torch_internals import (
    constant_in_traces,
    leave_function_mode,
    sdpa_kernel,
    traces_context_variables,
    without_function_modes,
)  # fmt: skip
from ..validation import check_backend, reason_for_float

FALLBACKS = ("warn", "error", "quiet")
WEIGHTS_WANTED = "multi_head_attention_forward returns attention weights (need_weights=True), which are never formed here"
NESTED = "its input is a nested tensor of strided layout, which only kernels of PyTorch take"

_FLOAT = F.scaled_dot_product_attention
_MULTI_HEAD = F.multi_head_attention_forward
_NEED_WEIGHTS = list(inspect.signature(_MULTI_HEAD).parameters).index("need_weights")
_ORDINARY = frozenset((torch.Tensor, torch.nn.Parameter))
_NOTHING = (None,)
"""Has a torch function only where a mode is on."""
_lock = threading.Lock()
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def check_fallback(fallback: object) -> None:
    """Require one of :data:`FALLBACKS`.

    Raises:
        ValueError: another value.
    """
    if fallback not in FALLBACKS:
        raise ValueError(f"fallback must be one of {FALLBACKS}, got {fallback!r}")


class AttentionReport:
    """Counts calls that ran in integers, and those that did not with the reason.

    Calls that ``torch.compile`` traces are counted once, when they are compiled, and only in a context that is entered
    outside the compiled function.

    Attributes:
        integer: calls that ran in integers.
        fallbacks: calls that ran in floating point, by reason.
    """

    def __init__(self) -> None:
        self.integer = 0
        self.fallbacks: Counter[str] = Counter()

    def note(self, reason: str | None) -> bool:
        """Count a call, in floating point for a reason or in integers; return whether this is the first for the reason."""
        with _lock:
            if reason is None:
                self.integer += 1
                return False
            self.fallbacks[reason] += 1
            return self.fallbacks[reason] == 1

    def __str__(self) -> str:
        lines = [f"{self.integer} attention calls in integers, {sum(self.fallbacks.values())} in floating point"]
        return "\n".join(lines + [f"  {count} x {reason}" for reason, count in self.fallbacks.most_common()])


class _Thread(threading.local):
    """What a thread is doing.

    Attributes:
        decided: a call that :func:`call_alone` makes, which no context is to take up.
    """

    decided = False


_thread = _Thread()


class _Entry:
    """That a context was entered once.

    Attributes:
        context: which.
        outer: what was entered before by the same task or thread, or None.
        is_on: whether it has not been left since, here or in a task that was started inside and goes on behind it.
    """

    def __init__(self, context: sdpa, outer: _Entry | None) -> None:
        self.context, self.outer, self.is_on = context, outer, True


_innermost: ContextVar[_Entry | None] = ContextVar("innermost", default=None)
"""What the task or thread entered last, without contexts entered in code that is being traced."""


def _deciding() -> sdpa | None:
    """Return the context that decides about the calls of this task or thread; None where none is on."""
    entry = _innermost.get()
    while entry is not None and not entry.is_on:
        entry = entry.outer
    return None if entry is None else entry.context


def _warn(reason: str) -> None:
    warnings.warn(f"an attention call stays in floating point: {reason}", stacklevel=4)


@constant_in_traces
def _note_traced(reason: str | None, fallback: str) -> None:
    """Count a call while Dynamo traces it, in the context that is on outside, or the process's."""
    report = _deciding() or _process
    first = report.note(reason) if report is not None else True
    if reason is not None and fallback == "warn" and first:
        _warn(reason)


def _note(reason: str | None, fallback: str, report: AttentionReport | None) -> None:
    if torch.compiler.is_dynamo_compiling():
        _note_traced(reason, fallback)
    else:
        first = report.note(reason) if report is not None else True
        if reason is not None and fallback == "warn" and first:
            _warn(reason)
    if reason is not None and fallback == "error":
        raise RuntimeError(f"an attention call cannot run in integers, and fallback='error': {reason}")


def call_alone(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a function whose attention no mode of this thread is to take up."""
    decided, _thread.decided = _thread.decided, True
    try:
        return func(*args, **kwargs)
    finally:
        _thread.decided = decided


def has_nested(tensors: Iterable[Any]) -> bool:
    """Tell whether a nested tensor of strided layout is among some arguments; it has no shape that could be asked for."""
    return any(isinstance(x, torch.Tensor) and x.is_nested and x.layout == torch.strided for x in tensors)


def as_sdpa_returns(
    out: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None,
    is_causal: bool, scale: float | None, enable_gqa: bool,
) -> torch.Tensor:  # fmt: skip
    """Return an output of attention with the strides that scaled_dot_product_attention gives it, which views depend on.

    PyTorch's fused kernels keep the order in which query's dimensions lie in memory, or put tokens before heads; where they do
    not take a call its output is contiguous.

    Args:
        out: of :func:`qflash.attention`.
        query, key, value, attn_mask, is_causal, scale, enable_gqa: what the call was given.
    """
    if type(out) is not torch.Tensor or out.is_nested:
        return out
    mask = attn_mask if type(attn_mask) is torch.Tensor else None
    kernel = sdpa_kernel(query, key, value, mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
    if kernel is None:
        # in a trace the operator's own order stays, which is query's or its tokens before its heads
        rank = query.dim()
        if rank in (3, 4) and key.dim() == value.dim() == rank and out.shape == query.shape and key.shape[0] == query.shape[0]:
            return out
        kernel = "plain"
    if kernel == "plain" or out.numel() == 0:
        return out.flatten().view(out.shape)
    if kernel == "efficient":
        heads_last = out.transpose(-3, -2)
        return heads_last.flatten().view(heads_last.shape).transpose(-3, -2)
    if out.shape != query.shape:
        return out
    return with_strides(out, torch.empty_like(query, device="meta").stride())


def with_strides(x: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor with these strides: itself where it has them, else a copy."""
    if x.stride() == strides:
        return x
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)


@constant_in_traces
def _why_unavailable(backend: str, device: torch.device) -> str | None:
    return why_unavailable(backend, device)


def attend_or_fall_back(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    recipe: Recipe | str | None = None,
    backend: str = "auto",
    fallback: str = "warn",
    report: AttentionReport | None = None,
    fall_back: Callable[..., torch.Tensor] = _FLOAT,
) -> torch.Tensor:
    """Run a call of scaled_dot_product_attention in integers if it qualifies, and by another function if not.

    Args:
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa: as PyTorch's function takes them.
        recipe, backend: see :func:`qflash.attention`.
        fallback: what to do for a call that does not qualify: ``"warn"`` once for each reason, ``"error"``, or be ``"quiet"``.
        report: counts the call; None for none.
        fall_back: called with the same eight arguments (``scale`` and ``enable_gqa`` by name) if it does not qualify.

    Raises:
        RuntimeError: the call does not qualify and ``fallback`` is ``"error"``; the message has the reason.
    """
    if has_nested((query, key, value, attn_mask)):
        reason: str | None = NESTED
    else:
        reason = reason_for_float(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if reason is None and backend != "auto":
        reason = _why_unavailable(backend, query.device)
    _note(reason, fallback, report)
    if reason is None:
        integer = attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, recipe=recipe, backend=backend
        )  # fmt: skip
        return as_sdpa_returns(integer, query, key, value, attn_mask, is_causal, scale, enable_gqa)
    arguments = query, key, value, attn_mask, dropout_p, is_causal
    out: torch.Tensor = call_alone(fall_back, arguments, {"scale": scale, "enable_gqa": enable_gqa})
    return out


LAYERS: tuple[Any, ...] = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)
"""Modules of PyTorch that have a fused fast path."""


def _with_names(function: Any, **names: Any) -> Any:
    """Return a function of Python that has other functions under some of its global names."""
    other = types.FunctionType(
        function.__code__, {**function.__globals__, **names}, function.__name__, function.__defaults__, function.__closure__
    )
    other.__kwdefaults__ = function.__kwdefaults__
    return other


class _FastTorch:
    """Stands for ``torch`` in the forward of one of :data:`LAYERS`, which finds the fast path on, whatever the switch is."""

    backends = types.SimpleNamespace(mha=types.SimpleNamespace(get_fastpath_enabled=lambda: True))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@functools.cache
def _fast(forward: Any) -> Any:
    return _with_names(forward, torch=_FastTorch()) if isinstance(forward, types.FunctionType) else forward


def call_fast(forward: Any, layer: Any, args: Any, kwargs: Any) -> Any:
    """Call the forward of one of :data:`LAYERS` with its fast path, the only one that takes nested tensors.

    The attention in it is for the caller to count: the module inside a ``nn.TransformerEncoderLayer`` may not be called.
    """
    with without_function_modes():
        if isinstance(layer, nn.TransformerEncoder):
            # its layers are modules of their own, which count
            return _fast(forward)(layer, *args, **kwargs)
        return call_alone(_fast(forward), (layer, *args), kwargs)


@functools.cache
def _falling_back(own: Any) -> Any:
    """Return a forward of one of :data:`LAYERS` that takes nested tensors with the fast path switched off."""

    @functools.wraps(own)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not has_nested((*args, *kwargs.values())):
            return own(self, *args, **kwargs)
        choices = _deciding() or _process
        if choices is not None and not _thread.decided and not isinstance(self, nn.TransformerEncoder):
            _note(NESTED, choices.fallback, choices)
        return call_fast(own, self, args, kwargs)

    return forward


class _FastPath:
    """PyTorch's switch for the fused layers of ``nn.MultiheadAttention`` and ``nn.TransformerEncoder``: one for all threads.

    A function mode alone keeps them off, but not where Dynamo traces. They refuse nested tensors then, so that their forward
    is another one meanwhile.
    """

    def __init__(self) -> None:
        self.users = 0
        self.before = True
        self.forwards: list[tuple[Any, Any, Any]] = []

    def switch_off(self) -> None:
        """Switch it off for one more user."""
        with _lock:
            if self.users == 0:
                self.before = torch.backends.mha.get_fastpath_enabled()
                torch.backends.mha.set_fastpath_enabled(False)
                self.forwards = [(layer, layer.forward, _falling_back(layer.forward)) for layer in LAYERS]
                for layer, _, other in self.forwards:
                    layer.forward = other
            self.users += 1

    def restore(self) -> None:
        """Put it back when the last user is gone."""
        with _lock:
            self.users -= 1
            if self.users == 0:
                torch.backends.mha.set_fastpath_enabled(self.before)
                for layer, own, other in self.forwards:
                    if layer.forward is other:
                        layer.forward = own


_fast_path = _FastPath()


def _wants_weights(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether a call of multi_head_attention_forward wants attention weights."""
    return bool(args[_NEED_WEIGHTS] if len(args) > _NEED_WEIGHTS else kwargs.get("need_weights", True))


def _check_key_padding_mask(mask: torch.Tensor, keys: int, batch: int) -> None:
    """Do what PyTorch's function of this name does, which Dynamo does not trace."""
    if mask.shape[0] != batch or mask.shape[1] != keys:
        raise AssertionError(f"Expected key_padding_mask of shape {(batch, keys)}, but got {tuple(mask.shape)}")


# it does not offer itself to the modes, which then see what it calls
_multi_head_body = _with_names(
    _MULTI_HEAD, has_torch_function=lambda _tensors: False, _check_key_padding_mask=_check_key_padding_mask
)


class sdpa(AttentionReport, TorchFunctionMode, contextlib.ContextDecorator):  # noqa: N801
    """Run everything inside that calls ``scaled_dot_product_attention`` in integers; a context or a decorator.

    A call that :func:`qflash.attention` does not take goes to PyTorch's function and is counted with its reason. So does one
    that needs a gradient. ``nn.MultiheadAttention`` and ``nn.TransformerEncoder`` are reached as well; attention weights
    (``need_weights=True``) are a reason to stay in floating point. Where contexts are nested only the inner one acts.

    A context acts in the thread that enters it; with asyncio in the task that enters it and in tasks started inside.
    :meth:`enable` acts in all threads of the process. Where both apply the context decides, except in code that
    ``torch.compile`` traces. A context that a generator enters also acts in its caller, from a yield until the context is left.

    The context is its own :class:`report <AttentionReport>`: ``integer``, ``fallbacks``, ``str()``. Entered again it counts on.

    Args:
        recipe, backend: see :func:`qflash.attention`.
        fallback: ``"warn"`` once for each reason, ``"error"`` to raise a RuntimeError with the reason, or ``"quiet"``.

    Raises:
        TypeError, ValueError: an argument is not one of the allowed values.

    Example::

        with qflash.sdpa() as report, torch.inference_mode():
            model(images)
        print(report)
    """

    def __init__(self, recipe: Recipe | str | None = None, *, fallback: str = "warn", backend: str = "auto") -> None:
        super().__init__()
        resolve_recipe(recipe)
        check_backend(backend)
        check_fallback(fallback)
        self.recipe, self.fallback, self.backend = recipe, fallback, backend
        self._entries: list[_Entry] = []
        self._traced_fast_paths: list[bool] = []

    def __enter__(self) -> sdpa:
        if torch.compiler.is_dynamo_compiling():
            # Dynamo traces no call of set_fastpath_enabled
            self._traced_fast_paths.append(torch.backends.mha._is_fastpath_enabled)
            torch.backends.mha._is_fastpath_enabled = False
        else:
            _fast_path.switch_off()
            self._note_entry()
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            super().__exit__(*exception)
            torch.backends.mha._is_fastpath_enabled = self._traced_fast_paths.pop()
            return
        # between entering and leaving another task or generator may have entered modes of its own
        leave_function_mode(self)
        self._note_exit()
        _fast_path.restore()

    def _note_entry(self) -> None:
        entry = _Entry(self, _innermost.get())
        with _lock:
            self._entries.append(entry)
        _innermost.set(entry)

    def _note_exit(self) -> None:
        """End this task's or thread's last entry; without one, as where another task closes a generator, the last of all."""
        own = _innermost.get()
        while own is not None and not (own.is_on and own.context is self):
            own = own.outer
        with _lock:
            entry = self._entries[-1] if own is None else own
            self._entries.remove(entry)
        entry.is_on = False
        last = _innermost.get()
        while last is not None and not last.is_on:
            last = last.outer
        _innermost.set(last)

    def __call__(self, func: FunctionT) -> FunctionT:
        """Return a function that runs inside of the context, from call to return; of a coroutine function to its end.

        Raises:
            TypeError: it is a generator function, whose code runs after the call.
        """
        if inspect.isgeneratorfunction(func) or inspect.isasyncgenfunction(func):
            raise TypeError(f"func must be no generator function, got {func.__qualname__}: enter the context inside of it")
        if not inspect.iscoroutinefunction(func):
            return super().__call__(func)

        @functools.wraps(func)
        async def inside(*args: Any, **kwargs: Any) -> Any:
            with self:
                return await func(*args, **kwargs)

        return inside  # type: ignore[return-value]

    def attend(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Take a call of scaled_dot_product_attention, in integers or not."""
        return attend_or_fall_back(
            *args, **kwargs, recipe=self.recipe, backend=self.backend, fallback=self.fallback, report=self
        )  # fmt: skip

    def __torch_function__(self, func: Any, types: Iterable[type], args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _thread.decided or func not in (_FLOAT, _process_attention, _MULTI_HEAD, _process_multi_head):
            return func(*args, **kwargs)
        # contexts that are entered in traced code are noted there alone
        traced = torch.compiler.is_dynamo_compiling() and (self._traced_fast_paths or not traces_context_variables())
        context = self if traced else _deciding()
        if context is None:
            # this mode is another task's
            return func(*args, **kwargs)
        if func in (_FLOAT, _process_attention):
            return context.attend(*args, **kwargs)
        if _wants_weights(args, kwargs):
            _note(WEIGHTS_WANTED, context.fallback, context)
            # contexts further out do not count it, too
            return call_alone(_MULTI_HEAD, args, kwargs)
        if _ORDINARY.issuperset(types):
            with context:
                return _multi_head_body(*args, **kwargs)
        return _MULTI_HEAD(*args, **kwargs)

    @staticmethod
    def enable(recipe: Recipe | str | None = None, *, fallback: str = "warn", backend: str = "auto") -> sdpa:
        """Do the same for the whole process, every thread, until :meth:`disable`; enabling again replaces the choices.

        ``torch.nn.functional.scaled_dot_product_attention`` becomes another function, wherever a loaded module has it by
        name, and the fast path of ``nn.MultiheadAttention`` is switched off. What a module loaded later imports by name is
        that function, too, and does what PyTorch's does when disabled.

        Args:
            recipe, fallback, backend: as for a context.

        Returns:
            the report: counts of all threads.
        """
        global _process
        choices = sdpa(recipe, fallback=fallback, backend=backend)
        with _enabling:
            if _process is None:
                _fast_path.switch_off()
                try:
                    _put_in_place(_FLOAT, _process_attention)
                    _put_in_place(_MULTI_HEAD, _process_multi_head)
                except BaseException:
                    _put_back()
                    raise
            _process = choices
        return choices

    @staticmethod
    def disable() -> None:
        """Undo :meth:`enable`; without effect where it is not on."""
        global _process
        with _enabling:
            if _process is None:
                return
            _process = None
            _put_back()


_process: sdpa | None = None
"""What :meth:`sdpa.enable` chose."""
_enabling = threading.Lock()


def _put_in_place(old: Any, new: Any) -> None:
    """Give every module that has a function by name another one; of PyTorch's own only ``torch.nn.functional``."""
    for name, module in list(sys.modules.items()):
        if name == __name__ or (name.partition(".")[0] == "torch" and module is not F):
            continue
        for key, value in list(getattr(module, "__dict__", {}).items()):
            if value is old:
                setattr(module, key, new)


def _put_back() -> None:
    """Undo what :meth:`sdpa.enable` did, in whole or in part."""
    try:
        _put_in_place(_process_attention, _FLOAT)
        _put_in_place(_process_multi_head, _MULTI_HEAD)
    finally:
        _fast_path.restore()


def _process_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Stand for PyTorch's scaled_dot_product_attention while :meth:`sdpa.enable` is on."""
    # a mode first, as for PyTorch's function; a subclass is asked by what this one calls
    if has_torch_function(_NOTHING):
        return handle_torch_function(
            _process_attention, _NOTHING, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
        )  # fmt: skip
    choices = _process
    if choices is None or _thread.decided:
        return _FLOAT(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    return choices.attend(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def _process_multi_head(*args: Any, **kwargs: Any) -> Any:
    """Stand for PyTorch's multi_head_attention_forward, whose attention is reached anyway: count what it keeps."""
    if has_torch_function(_NOTHING):
        return handle_torch_function(_process_multi_head, _NOTHING, *args, **kwargs)
    choices = _process
    if choices is not None and _wants_weights(args, kwargs):
        _note(WEIGHTS_WANTED, choices.fallback, choices)
    return _MULTI_HEAD(*args, **kwargs)
