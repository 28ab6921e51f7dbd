"""Put QFlash into a model that is already built: :func:`patch` and :func:`unpatch`.

A patched module keeps its object, parameters, buffers, hooks and state_dict keys; only its class becomes a subclass. There
are two kinds. An :class:`Adapter` has a ``forward`` written anew against the public attributes of one class, which calls
:func:`qflash.attention`, or an attention function of the caller's choice. Any other module that attends keeps its own
``forward``, which runs inside :class:`qflash.integrations.function_mode.IntegerAttention`.
"""

from __future__ import annotations

import functools
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn

from ..specification.recipe import Recipe, resolve_recipe
from ..torch_internals import constant_in_traces
from ..validation import check_backend, check_flags
from . import static_scales, timm
from .adapter import Adapter, AttentionFunction, call_chosen
from .deferred_scores import is_deferred, work_out
from .function_mode import NOT_SEEN, IntegerAttention
from .inspection import Layer, attends, coverage, described, listed, route_of, why_float
from .sdpa import LAYERS, NESTED, _thread, call_fast, has_nested
from .timm import ADAPTERS

ModelT = TypeVar("ModelT", bound=nn.Module)


class _Patched(nn.Module):
    """Marks a patched module's class; recipe, back end and attention function are the instance's own."""

    _qflash_base: type
    _qflash_recipe: Recipe
    _qflash_backend: str
    _qflash_attention: AttentionFunction | None = None
    _qflash_keep_bias: bool = False
    _qflash_strict: bool = False
    _qflash_route: str
    _qflash_calls: Counter[str | None]
    _qflash_weights: bool = False
    _qflash_kept: Any
    _qflash_watch: Callable[..., bool] | None = None
    _qflash_dynamic: str | None = None
    _qflash_mask: Callable[[], torch.Tensor | None]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # The subclass is made at run time and cannot be imported by name; its base can. What was kept is worked out again.
        return _rebuild, (self._qflash_base,), {**self.__getstate__(), **_nothing_kept()}

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *arguments: Any) -> None:
        problem = static_scales.prepare_loading(self, state_dict, prefix)
        if problem is not None:
            # the last argument is PyTorch's list of what to raise, whether keys may be missing or not
            arguments[-1].append(problem)
            static_scales.take_out(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def __prepare_scriptable__(self) -> nn.Module:
        raise TypeError(
            "torch.jit.script compiles Python's source, and does not understand QFlash's: use torch.jit.trace, torch.export "
            "or torch.compile, or qflash.unpatch(model) first"
        )

    def extra_repr(self) -> str:
        if self._qflash_attention is not None:
            text = f"attention={getattr(self._qflash_attention, '__qualname__', self._qflash_attention)}"
        else:
            text = f"recipe={self._qflash_recipe}, backend={self._qflash_backend!r}"
        return text + ", keep_bias=True" * self._qflash_keep_bias


def _no_mask() -> None:
    """Stand for a weak reference to a mask that there is not."""


def _nothing_kept() -> dict[str, Any]:
    return {
        "_qflash_kept": None, "_qflash_mask": _no_mask, "_qflash_calls": Counter(), "_qflash_weights": False,
        "_qflash_watch": None,
    }  # fmt: skip


def _adapter_for(module_class: type) -> Adapter | None:
    return next((adapter for adapter in ADAPTERS if adapter.takes(module_class)), None)


def is_supported(module: nn.Module) -> bool:
    """Tell whether :func:`patch` takes a module."""
    return _adapter_for(type(module)) is not None or (attends(module) and why_float(module) is None)


def _idle_hooks(module: nn.Module, adapter: Adapter) -> Iterator[str]:
    """Return which submodules have hooks that a patched module does not get to."""
    for name in adapter.unused:
        submodule = getattr(module, name, None)
        if isinstance(submodule, nn.Module) and any(
            (submodule._forward_hooks, submodule._forward_pre_hooks, submodule._backward_hooks, submodule._backward_pre_hooks)
        ):
            yield name


_CARRIERS = (nn.TransformerEncoder, nn.TransformerEncoderLayer)
"""Modules of PyTorch that go around their attention module where no mode is on."""


def _proxy_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return next((each for each in (*args, *kwargs.values()) if isinstance(each, torch.fx.Proxy)), None)


@constant_in_traces
def _warn_traced(kind: str, reason: str) -> None:
    _warn_of_float(kind, reason)


def _warn_of_float(kind: str, reason: str) -> None:
    warnings.warn(f"{kind}: attention stays in floating point: {reason}", stacklevel=2)


def _note(module: Any, reason: str | None) -> None:
    """Count an attention of a module: in floating point for a reason, or in integers. Dynamo's calls are not counted."""
    if reason is not None and module._qflash_strict:
        raise RuntimeError(f"{module._qflash_base.__name__}: attention cannot run in integers, and strict=True: {reason}")
    if torch.compiler.is_dynamo_compiling():
        if reason is not None:
            _warn_traced(module._qflash_base.__name__, reason)
        return
    calls = module._qflash_calls
    calls[reason] += 1
    if reason is not None and calls[reason] == 1:
        _warn_of_float(module._qflash_base.__name__, reason)


def _note_nested(layer: Any) -> None:
    """Count the attention of a layer of PyTorch that runs with its fast path; an encoder's layers count theirs themselves."""
    if not _thread.decided and not isinstance(layer, nn.TransformerEncoder):
        for module in layer.modules():
            if isinstance(module, _Patched) and not isinstance(module, _CARRIERS):
                _note(module, NESTED)


def _forward_within(base: Any) -> Callable[..., Any]:
    """Return the ``forward`` of a class with its attention answered."""
    own = base.forward
    is_carrier, is_layer = issubclass(base, _CARRIERS), issubclass(base, LAYERS)

    @functools.wraps(own)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        proxy = _proxy_of(args, kwargs)
        if proxy is not None:
            # what the attention is put together from has no nodes of its own: the module is one
            return proxy.tracer.create_proxy("call_module", proxy.tracer.path_of_module(self), args, kwargs)
        if is_layer and has_nested((*args, *kwargs.values())):
            _note_nested(self)
            return call_fast(own, self, args, kwargs)
        mode = IntegerAttention(functools.partial(call_chosen, self), functools.partial(_note, self))
        with mode:
            out = own(self, *args, **kwargs)
            if is_deferred((out,)):
                mode.weights = True
                out = work_out(out)
        if mode.weights and not torch.compiler.is_dynamo_compiling():
            self.__dict__["_qflash_weights"] = True
        if mode.seen == 0 and not is_carrier:
            _note(self, NOT_SEEN)
        return out

    return forward


@functools.cache
def _patched_class(base: Any, adapter: Adapter | None) -> type[nn.Module]:
    """Return the subclass of ``base`` (a module class) that attends by an adapter or by itself; always the same one."""
    forward = _forward_within(base) if adapter is None else adapter.forward
    # pickle finds a bound method by its name
    forward.__name__ = "forward"
    route = route_of(base) if adapter is None else "adapter"
    body = {
        "__module__": __name__, "__doc__": base.__doc__, "_qflash_base": base, "_qflash_route": route, "forward": forward,
    }  # fmt: skip
    return type(f"QFlash{base.__name__}", (_Patched, base), body)


def _rebuild(base: Any) -> nn.Module:
    """Make an empty patched module for pickle and copy, which then fill in its state."""
    patched = _patched_class(base, _adapter_for(base))
    return patched.__new__(patched)


# where pickles of earlier releases look for them
vars(timm).update(_rebuild=_rebuild, _no_mask=_no_mask)


def _own_forwards(module: nn.Module) -> list[tuple[dict[str, Any], str]] | None:
    """Find where an instance holds its class's ``forward``: names in dictionaries; None if it has another one.

    A hook of accelerate replaces ``forward`` and calls ``_old_forward``; when removed it leaves that as ``forward``.
    """
    names = module.__dict__
    if "forward" not in names:
        return []
    own, outer = types.MethodType(type(module).forward, module), names["forward"]
    if outer == own:
        return [(names, "forward")]
    if "_hf_hook" in names and names.get("_old_forward") == own == getattr(outer, "__wrapped__", None):
        return [(names, "_old_forward"), (outer.__dict__, "__wrapped__")]
    return None


def _change_classes(found: Iterable[tuple[str, nn.Module, type]]) -> None:
    """Give modules, with their names in the model, other classes, whose ``forward`` takes the place of theirs everywhere.

    Raises:
        ValueError: a module has a ``forward`` that is not its class's. All are then unchanged.
    """
    changes = [(name, module, kind, _own_forwards(module)) for name, module, kind in found]
    foreign = [name for name, _, _, places in changes if places is None]
    if foreign:
        raise ValueError(
            f"forward was replaced on {listed(foreign)}, by something other than a hook of accelerate, and would go on "
            "calling what it calls now: put it back (del module.forward) and wrap it again afterwards"
        )
    for _, module, kind, places in changes:
        module.__class__ = kind
        for holder, name in places or ():
            holder[name] = types.MethodType(module.__class__.forward, module)


def patch(
    model: ModelT,
    recipe: Recipe | str | None = None,
    backend: str = "auto",
    *,
    attention: AttentionFunction | None = None,
    keep_bias: bool = False,
    strict: bool = False,
) -> ModelT:
    """Make the attention of ``model`` compute with :func:`qflash.attention`, in place.

    Attention is found in modules of any library. timm's ``Attention`` and the ``WindowAttention`` of Swin and Swin V2 get
    another ``forward``. All other modules keep theirs: while it runs, its calls of ``scaled_dot_product_attention``, or of a
    softmax between two products, are computed in integers. :func:`qflash.coverage` lists them.

    Parameters, buffers, hooks and state_dict keys stay as they are. Patching again replaces all arguments and drops the static
    scales of :func:`qflash.calibrate`. The patched model is for inference: attention dropout raises, and backward() is not
    implemented. A warning names attention that stays in floating point, with the reason: here where that is known already,
    otherwise in the call that shows it. It also names hooks on dropout and softmax inside timm's attention, which are no longer
    called.

    Args:
        model: any module that holds attention, or is one.
        recipe: see :func:`qflash.attention`.
        backend: see :func:`qflash.attention`.
        attention: compute with this function instead, called as
            ``attention(query, key, value, attn_mask=mask, scale=scale)``: float tensors (batch, heads, tokens,
            head_dim), a bool or additive mask broadcastable to (batch, heads, queries, keys) or None, and the factor
            of the scores. It returns (batch, heads, queries, head_dim). Excludes ``recipe`` and ``backend``.
        keep_bias: compute the bias of timm's Swin and Swin V2, plus the mask of shifted windows, in a layer's first calls and
            keep the sum, (windows, heads, tokens, tokens) a layer, in place of computing it in every call. Changed weights are
            noticed, except by a CUDA graph captured before, and except if they are written to through ``.data`` or in inference
            mode: then patch again. ``torch.compile`` takes the sums that exist when it compiles, so call the model twice
            before; after weights change call the model once without the compiled code. No effect where the bias needs a
            gradient.
        strict: raise an error in place of the warning: here, before anything changes, or a RuntimeError in the call that shows
            that attention stays in floating point.

    Returns:
        ``model`` itself.

    Raises:
        TypeError: ``model`` is not a module, ``recipe`` not a recipe, ``attention`` cannot be called, or ``keep_bias``
            or ``strict`` is neither True nor False.
        ValueError: the model holds no attention that can be replaced, or a module whose ``forward`` was replaced on the
            instance (but for accelerate's hooks, which stay); no such recipe or back end; one of them is given with
            ``attention``; or attention would stay in floating point with ``strict``. The model is then unchanged.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    choices = resolve_recipe(recipe)
    check_backend(backend)
    check_flags(keep_bias=keep_bias, strict=strict)
    if attention is not None:
        if not callable(attention):
            raise TypeError(
                f"attention must be a function of (query, key, value, attn_mask, scale), got {type(attention).__name__}"
            )
        if recipe is not None or backend != "auto":
            raise ValueError(
                "attention takes the place of QFlash's own, so that recipe and backend have no meaning; leave them out"
            )
    found, left = _find(model)
    if not any(issubclass(kind, _Patched) and not issubclass(kind, _CARRIERS) for _, _, kind in found):
        raise ValueError(
            f"{type(model).__name__} holds no attention that QFlash can replace"
            + (
                f": {described(left)}"
                if left
                else ", neither calls of scaled_dot_product_attention nor a softmax between products"
            )
        )
    if strict and left:
        raise ValueError(
            f"strict=True, and {type(model).__name__} has attention that stays in floating point: {described(left)}"
        )
    _change_classes(found)
    for _, module, _ in found:
        module._qflash_recipe = choices  # type: ignore[assignment]
        module._qflash_backend = backend  # type: ignore[assignment]
        # not by setattr: a function that is itself a module would become a submodule and enter the state_dict
        module.__dict__ |= {
            "_qflash_attention": attention, "_qflash_keep_bias": keep_bias, "_qflash_strict": strict,
            "_qflash_dynamic": None, **_nothing_kept(),
        }  # fmt: skip
        # which were found for what was patched before
        module._modules.pop(static_scales.NAME, None)
    idle = [
        f"{name}.{child}" if name else child
        for name, module, kind in found
        if (adapter := _adapter_for(kind._qflash_base)) is not None  # type: ignore[attr-defined]
        for child in _idle_hooks(module, adapter)
    ]
    if idle:
        warnings.warn(
            f"hooks will not be called on {listed(idle)}: there are no probabilities in floating point that would pass there",
            stacklevel=2,
        )
    if left:
        warnings.warn(f"{type(model).__name__} keeps attention in floating point: {described(left)}", stacklevel=2)
    return model


def _find(model: nn.Module) -> tuple[list[tuple[str, nn.Module, type]], list[Layer]]:
    """Return modules to patch, with their names and new classes, and the layers that stay in floating point."""
    found: list[tuple[str, nn.Module, type]] = []
    for name, module in model.named_modules():
        kind: Any = type(module)
        if issubclass(kind, _Patched):
            found.append((name, module, kind))
        elif (adapter := _adapter_for(kind)) is not None:
            found.append((name, module, _patched_class(kind, adapter)))
        elif isinstance(module, _CARRIERS) or (attends(module) and why_float(module) is None):
            found.append((name, module, _patched_class(kind, None)))
    taken = {name for name, _, _ in found}
    return found, [layer for layer in coverage(model) if layer.route is None and layer.name not in taken]


def unpatch(model: ModelT) -> ModelT:
    """Give every patched attention module of ``model`` its own class back, in place.

    Args:
        model: any module; one that is not patched stays as it is.

    Returns:
        ``model`` itself.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: the ``forward`` of a patched module was replaced on the instance, or its class by a subclass. The model
            is then unchanged.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    patched = [(name, module) for name, module in model.named_modules() if isinstance(module, _Patched)]
    derived = [name for name, module in patched if "_qflash_base" not in type(module).__dict__]
    if derived:
        raise ValueError(
            f"{listed(derived)}: the class was changed after patching, as torch.nn.utils.parametrize and fully_shard do; "
            "undo that first"
        )
    _change_classes((name, module, module._qflash_base) for name, module in patched)
    for _, module in patched:
        module._modules.pop(static_scales.NAME, None)
        for key in [key for key in module.__dict__ if key.startswith("_qflash_")]:
            del module.__dict__[key]
    return model
