"""Put QFlash into a model that is already built: :func:`patch` and :func:`unpatch`.

A patched module keeps its object, parameters, buffers, hooks and state_dict keys; only its class becomes a
subclass whose ``forward`` calls :func:`qflash.attention`, or an attention function of the caller's choice. A
model family is one :class:`Adapter`: where its attention class lives and a forward function written against that
class's public attributes.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import has_torch_function

from .. import plan_cache
from ..api import attention, causal_mask
from ..recipe import Recipe, resolve_recipe
from ..validation import check_backend, check_flags
from .inspection import described, float_attention, listed
from .swin_bias import window_bias

ModelT = TypeVar("ModelT", bound=nn.Module)
AttentionFunction = Callable[..., torch.Tensor]
"""Takes query, key, value, ``attn_mask`` and ``scale``; see ``attention`` of :func:`patch`."""


@dataclasses.dataclass(frozen=True)
class Adapter:
    """How one family of attention modules is recognised and replaced.

    Attributes:
        name: what error messages call it.
        package: the distribution to install for it, also its top-level module.
        classes: ``"module:Class"`` paths; several where the class has moved between releases.
        forward: the replacement for ``forward``; its first argument is the module, whose recipe and back end
            it passes on by calling :func:`_attend`.
        unused: submodules that ``forward`` does not call.
    """

    name: str
    package: str
    classes: tuple[str, ...]
    forward: Callable[..., torch.Tensor]
    unused: tuple[str, ...] = ("attn_drop", "softmax")

    def takes(self, module_class: type) -> bool:
        """Tell whether ``forward`` may stand in for ``module_class``'s own.

        A subclass that overrides ``forward`` computes something this adapter does not know and is left alone.
        """
        for path in self.classes:
            # A model can only hold a class whose module has been imported, so nothing is imported here.
            home, _, name = path.partition(":")
            known = getattr(sys.modules.get(home), name, None)
            if isinstance(known, type) and issubclass(module_class, known) and module_class.forward is known.forward:  # type: ignore[attr-defined]
                return True
        return False


@dataclasses.dataclass(frozen=True)
class _Kept:
    """A tensor worked out from others, which are looked at again whenever it is asked for.

    Attributes:
        sources: what it was worked out from.
        marks: where these lay, of what type, and how many times they had been written to.
        result: the tensor.
    """

    sources: tuple[torch.Tensor, ...]
    marks: tuple[Any, ...]
    result: torch.Tensor

    def holds(self, sources: tuple[torch.Tensor, ...]) -> bool:
        """Tell whether it would come out the same again."""
        same = len(sources) == len(self.sources) and all(a is b for a, b in zip(sources, self.sources, strict=True))
        return same and self.marks == _marks(sources)


def _marks(tensors: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
    # Module.to() leaves a parameter's object and changes everything else of it; what is made in inference mode counts no writes
    return tuple((x.data_ptr(), x.dtype, x.device, None if x.is_inference() else x._version) for x in tensors)


def _keep(module: Any, sources: tuple[torch.Tensor, ...], function: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Return ``function(*sources)``, or what it returned the last time if the sources were the same."""
    kept = module._qflash_kept
    if kept is not None and kept.holds(sources):
        return kept.result
    result = function(*sources)
    if plan_cache.place_of([source.detach() for source in sources]) is None:
        # something else than a kernel was on the way, such as a trace or a fake tensor, to which the result belongs
        return result
    if result.is_cuda:
        if torch.cuda.is_current_stream_capturing():
            # not there before the graph has run, and then the graph's own
            return result
        # from now on other streams may read it, and nobody reads the one before any more
        torch.cuda.synchronize(result.device)
    module.__dict__["_qflash_kept"] = _Kept(sources, _marks(sources), result)
    return result


class _Patched(nn.Module):
    """Marks a patched module's class; recipe, back end and attention function are the instance's own."""

    _qflash_base: type
    _qflash_recipe: Recipe
    _qflash_backend: str
    _qflash_attention: AttentionFunction | None = None
    _qflash_keep_bias: bool = False
    _qflash_kept: _Kept | None
    _qflash_mask: Callable[[], torch.Tensor | None]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # The subclass is made at run time and cannot be imported by name; its base can. What was kept is worked out again.
        return _rebuild, (self._qflash_base,), {**self.__getstate__(), **_nothing_kept()}

    def __prepare_scriptable__(self) -> nn.Module:
        raise TypeError(
            "torch.jit.script compiles Python's source, and that of QFlash is none it knows: use torch.jit.trace, torch.export "
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
    return {"_qflash_kept": None, "_qflash_mask": _no_mask}


def _attend(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, is_causal: bool = False
) -> torch.Tensor:
    """Call the attention the module was patched to; arguments and shapes are those of :func:`qflash.attention`."""
    if module.training and module.attn_drop.p > 0.0:
        raise RuntimeError(
            f"attention dropout {module.attn_drop.p} is active, and QFlash is for inference: call model.eval(), "
            "or qflash.unpatch(model) before training"
        )
    # Under autocast a query/key norm may return float32 beside a float16 value; SDPA would bring them together too.
    query, key = query.to(value.dtype), key.to(value.dtype)
    if module._qflash_attention is not None:
        return _attend_with(module._qflash_attention, query, key, value, mask, is_causal, module.scale)
    return attention(
        query,
        key,
        value,
        mask,
        is_causal=is_causal,
        scale=module.scale,
        recipe=module._qflash_recipe,
        backend=module._qflash_backend,
    )


def _attend_with(
    function: AttentionFunction,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float,
) -> torch.Tensor:
    """Call ``function`` on four-dimensional tensors; leading dimensions are flattened into the batch and restored.

    Such a function knows neither ``is_causal`` nor a mask that repeats over the batch: both become a mask it can
    broadcast, which costs the copy that :func:`qflash.attention` avoids.
    """
    if isinstance(query, torch.fx.Proxy):
        raise TypeError(
            "torch.fx cannot trace a model patched with attention=, because a graph holds no function of the caller's: trace "
            "it patched without, or unpatched"
        )
    if is_causal:
        if mask is not None:
            raise ValueError("attn_mask and is_causal=True exclude each other; put the causal part into attn_mask")
        mask = causal_mask(query, key)
    lead = query.shape[:-3]
    if mask is not None:
        mask = mask.reshape((1,) * max(query.dim() - mask.dim(), 0) + tuple(mask.shape))
        if any(size != 1 for size in mask.shape[:-3]):
            mask = mask.expand(*lead, *mask.shape[-3:])
        mask = mask.flatten(0, -4)
    out = function(query.flatten(0, -4), key.flatten(0, -4), value.flatten(0, -4), attn_mask=mask, scale=scale)
    return out.to(value.dtype).unflatten(0, lead)


def _heads(module: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Project (batch, tokens, channels) to query, key and value, each a view (batch, heads, tokens, head_dim)."""
    packed = module.qkv(x).unflatten(-1, (3, module.num_heads, -1))
    query, key, value = packed.permute(2, 0, 3, 1, 4).unbind(0)
    return query, key, value


def _timm_attention(self: Any, x: torch.Tensor, attn_mask: torch.Tensor | None = None, is_causal: bool = False) -> torch.Tensor:
    """Stand in for timm's ``Attention.forward``.

    Args:
        self: the module.
        x: (batch, tokens, channels).
        attn_mask: bool or float, broadcastable to (batch, heads, tokens, tokens).
        is_causal: token i sees tokens 0 to i.

    Returns:
        (batch, tokens, output channels).

    Raises:
        RuntimeError: in training mode with attention dropout.
    """
    query, key, value = _heads(self, x)
    query, key = self.q_norm(query), self.k_norm(key)
    out = _attend(self, query, key, value, attn_mask, is_causal).transpose(1, 2).flatten(2)
    # Releases differ: neither of these two is there in all of them, and either may be None.
    norm, gate = getattr(self, "norm", None), getattr(self, "gate", None)
    if norm is not None:
        out = norm(out)
    if gate is not None:
        out = out * gate(x).sigmoid()
    return self.proj_drop(self.proj(out))


def _window_bias(module: Any, mask: torch.Tensor | None) -> torch.Tensor:
    """Return what a Swin layer adds to its scores: (1 or windows, heads, tokens, tokens).

    With ``patch(..., keep_bias=True)`` it is worked out once, unless the mask is another tensor in every call.
    """
    table, index = module.relative_position_bias_table, module.relative_position_index
    keep = module._qflash_keep_bias and not torch.compiler.is_compiling() and not has_torch_function((table, index, mask))
    if keep and mask is not None and module._qflash_mask() is not mask:
        module.__dict__["_qflash_mask"] = weakref.ref(mask)
        keep = False
    if not keep or (torch.is_grad_enabled() and table.requires_grad):
        return window_bias(table, index, mask)
    return _keep(module, (table, index) if mask is None else (table, index, mask), window_bias)


def _timm_window_attention(self: Any, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Stand in for the forward of timm's Swin ``WindowAttention``.

    Args:
        self: the module.
        x: (images * windows, tokens, channels), the windows of one image next to each other.
        mask: float (windows, tokens, tokens) for shifted windows, added to the scores, or None.

    Returns:
        (images * windows, tokens, channels).

    Raises:
        RuntimeError: in training mode with attention dropout.
    """
    query, key, value = _heads(self, x)
    bias = _window_bias(self, mask)
    if mask is None:
        out = _attend(self, query, key, value, bias)
    else:
        # With the windows in a dimension of their own the mask broadcasts over the images: its size does not
        # depend on the batch.
        windows = mask.shape[0]
        query, key, value = (part.unflatten(0, (-1, windows)) for part in (query, key, value))
        out = _attend(self, query, key, value, bias).flatten(0, 1)
    return self.proj_drop(self.proj(out.transpose(1, 2).flatten(2)))


ADAPTERS: tuple[Adapter, ...] = (
    Adapter(
        "timm Attention (ViT, DeiT and relatives)",
        "timm",
        ("timm.layers.attention:Attention", "timm.models.vision_transformer:Attention"),
        _timm_attention,
    ),
    Adapter("timm WindowAttention (Swin)", "timm", ("timm.models.swin_transformer:WindowAttention",), _timm_window_attention),
)
"""The supported families."""


def _adapter_for(module_class: type) -> Adapter | None:
    return next((adapter for adapter in ADAPTERS if adapter.takes(module_class)), None)


def is_supported(module: nn.Module) -> bool:
    """Tell whether :func:`patch` takes a module."""
    return _adapter_for(type(module)) is not None


def _idle_hooks(module: nn.Module, adapter: Adapter) -> Iterator[str]:
    """Return which submodules have hooks that a patched module does not get to."""
    for name in adapter.unused:
        held = getattr(module, name, None)
        if isinstance(held, nn.Module) and any(
            (held._forward_hooks, held._forward_pre_hooks, held._backward_hooks, held._backward_pre_hooks)
        ):
            yield name


@functools.cache
def _patched_class(base: Any, adapter: Adapter) -> type[nn.Module]:
    """Return the subclass of ``base`` (a module class) that runs ``adapter.forward``; always the same one."""
    # pickle finds a bound method by its name
    adapter.forward.__name__ = "forward"
    body = {"__module__": __name__, "__doc__": base.__doc__, "_qflash_base": base, "forward": adapter.forward}
    return type(f"QFlash{base.__name__}", (_Patched, base), body)


def _rebuild(base: Any) -> nn.Module:
    """Make an empty patched module for pickle and copy, which then fill in its state."""
    adapter = _adapter_for(base)
    if adapter is None:
        raise TypeError(f"{base.__module__}.{base.__name__} is no attention module that this version of QFlash supports")
    patched = _patched_class(base, adapter)
    return patched.__new__(patched)


def _own_forwards(module: nn.Module) -> list[tuple[dict[str, Any], str]] | None:
    """Find where an instance holds its class's ``forward``: names in dictionaries; None if it has another one.

    A hook of accelerate replaces ``forward`` and calls ``_old_forward``; when removed it leaves that as ``forward``.
    """
    held = module.__dict__
    if "forward" not in held:
        return []
    own, outer = types.MethodType(type(module).forward, module), held["forward"]
    if outer == own:
        return [(held, "forward")]
    if "_hf_hook" in held and held.get("_old_forward") == own == getattr(outer, "__wrapped__", None):
        return [(held, "_old_forward"), (outer.__dict__, "__wrapped__")]
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
) -> ModelT:
    """Make every supported attention module of ``model`` compute with :func:`qflash.attention`, in place.

    Parameters, buffers, hooks and state_dict keys stay as they are. Patching again replaces all
    that is said here. The patched model is for inference: attention dropout raises, and backward() is not implemented.
    Attention of other kinds stays as it is and is named in a warning (:func:`qflash.float_attention`); so are hooks on the
    attention's dropout and softmax, which are not called any more.

    Args:
        model: any module that holds timm ``Attention`` or Swin ``WindowAttention``, or is one.
        recipe: see :func:`qflash.attention`.
        backend: see :func:`qflash.attention`.
        attention: compute with this function instead, called as
            ``attention(query, key, value, attn_mask=mask, scale=scale)``: float tensors (batch, heads, tokens,
            head_dim), a bool or additive mask broadcastable to (batch, heads, queries, keys) or None, and the factor
            of the scores. It returns (batch, heads, queries, head_dim). Excludes ``recipe`` and ``backend``.
        keep_bias: for weights that stay as they are: look the bias of a Swin layer up, and add the mask of shifted windows
            to it, in the first calls only instead of in every one. It needs memory for the sum, (windows, heads, tokens,
            tokens) a layer. Weights that are loaded or changed later are noticed, but not by a CUDA graph captured before,
            nor if they are written to through ``.data`` or in inference mode: then patch again. Without effect under
            ``torch.compile`` and where the bias needs a gradient.

    Returns:
        ``model`` itself.

    Raises:
        TypeError: ``model`` is not a module, ``recipe`` not a recipe, ``attention`` cannot be called, or ``keep_bias``
            is neither True nor False.
        ValueError: the model holds no supported attention module, or one whose ``forward`` was replaced on the instance
            (but for accelerate's hooks, which stay); no such recipe or back end; or one of them is given with
            ``attention``. The model is then unchanged.
        ImportError: no library whose models can be patched is installed.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    choices = resolve_recipe(recipe)
    check_backend(backend)
    check_flags(keep_bias=keep_bias)
    if attention is not None:
        if not callable(attention):
            raise TypeError(
                f"attention must be a function of (query, key, value, attn_mask, scale), got {type(attention).__name__}"
            )
        if recipe is not None or backend != "auto":
            raise ValueError(
                "attention takes the place of QFlash's own, so that recipe and backend have no meaning; leave them out"
            )
    found: list[tuple[str, nn.Module, type]] = []
    for name, module in model.named_modules():
        kind: Any = type(module)
        if issubclass(kind, _Patched):
            found.append((name, module, kind))
        elif (adapter := _adapter_for(kind)) is not None:
            found.append((name, module, _patched_class(kind, adapter)))
    if not found:
        packages = sorted({adapter.package for adapter in ADAPTERS})
        if all(importlib.util.find_spec(package) is None for package in packages):
            raise ImportError(f'qflash.patch works on models of {", ".join(packages)}: pip install "qflash[timm]"')
        supported = "; ".join(adapter.name for adapter in ADAPTERS)
        raise ValueError(
            f"{type(model).__name__} holds no attention module that QFlash can replace. Supported: {supported}; "
            "for models of transformers there is qflash.register_attention"
        )
    _change_classes(found)
    for _, module, _ in found:
        module._qflash_recipe = choices  # type: ignore[assignment]
        module._qflash_backend = backend  # type: ignore[assignment]
        # not by setattr: a function that is itself a module would become a submodule and enter the state_dict
        module.__dict__ |= {"_qflash_attention": attention, "_qflash_keep_bias": keep_bias, **_nothing_kept()}
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
    if left := float_attention(model):
        warnings.warn(
            f"{type(model).__name__} keeps attention in floating point that qflash.patch does not know, {described(left)}",
            stacklevel=2,
        )
    return model


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
        for key in [key for key in module.__dict__ if key.startswith("_qflash_")]:
            del module.__dict__[key]
    return model
