"""Which attention of a model runs in integers, and why the rest does not: :func:`coverage`.

Nothing is run. A module counts as attention if its class calls one of PyTorch's attention functions, or a softmax and two
matrix products, or a softmax and says in its name what it is. A softmax alone may be a gate, a loss or a classifier's.
"""

from __future__ import annotations

import dataclasses
import dis
import functools
import inspect
import sys
import types
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from . import static_scales

_WHOLE = {"scaled_dot_product_attention", "multi_head_attention_forward", "dispatch_attention_fn"}
"""Attention functions: of PyTorch, and what chooses one in diffusers."""
_SOFTMAX = {"softmax", "Softmax"}
_PRODUCTS = {"matmul", "bmm", "baddbmm", "einsum"}
_BY_NAME = "ALL_ATTENTION_FUNCTIONS"
"""Where modules of transformers look up the function that their config names."""

_CHANNELS = "it attends over channels, not tokens"
_LINEAR = "it is linear in the tokens: its softmax is not over the scores of query and key"
_MIXED = "it mixes heads between the products and the softmax"
_GATE = "its softmax weighs branches or positions, without query and key"
_BATCH = "its products run over the images of a batch, with one channel"
_WEIGHTS = "attention weights are worked out in floating point besides"
NOT_REPLACED: dict[str, str] = {
    **dict.fromkeys(
        (
            "timm.models.xcit:XCA",
            "timm.models.edgenext:CrossCovarianceAttn",
            "timm.models.davit:ChannelAttention",
            "timm.models.davit:ChannelAttentionV2",
        ),
        _CHANNELS,
    ),
    **dict.fromkeys(
        (
            "timm.layers.lambda_layer:LambdaLayer",
            "timm.models.coat:FactorAttnConvRelPosEnc",
            "timm.models.mobilevit:LinearSelfAttention",
            "timm.models.efficientvim:HSMSSD",
        ),
        _LINEAR,
    ),
    **dict.fromkeys(("timm.models.volo:OutlookAttention", "timm.layers.selective_kernel:SelectiveKernelAttn"), _GATE),
    **dict.fromkeys(("timm.models.cait:TalkingHeadAttn", "timm.models.efficientformer_v2:Attention2d"), _MIXED),
    "timm.models.convit:GPSA": "it adds probabilities of positions to those of query and key",
    "timm.models.csatv2:SpatialTransformerBlock": _BATCH,
}
"""Why classes with a softmax or an attention function are not patched, as ``"module:Class"``."""


@dataclasses.dataclass(frozen=True)
class Layer:
    """One module that attends.

    Attributes:
        name: dotted name in the model; "" is the model itself.
        kind: name of its class.
        route: how its attention comes to run in integers: ``"adapter"`` (its forward was written anew), ``"sdpa"`` (its calls
            of scaled_dot_product_attention are answered), ``"softmax"`` (products and softmax that it spells out are put
            together), ``"transformers"`` (:func:`qflash.register_attention`), ``"network"`` (a part of an integer network,
            :func:`qflash.quantize_model`); None if it does not.
        reason: why it stays in floating point, or some of its calls did; None if none is known.
        integer_calls: calls in integers by a patched module that is not an adapter's, outside ``torch.compile``.
        float_calls: calls of the same in floating point.
        forms_weights: attention weights were worked out in floating point besides, since the caller may want them
            (``need_weights=True`` of nn.MultiheadAttention).
        is_static: the scales of query, key and value are those that :func:`qflash.calibrate` found, or a state_dict contained.
        dynamic: why :func:`qflash.calibrate` left it with dynamic scales; None if it did not.
    """

    name: str
    kind: str
    route: str | None
    reason: str | None = None
    integer_calls: int = 0
    float_calls: int = 0
    forms_weights: bool = False
    is_static: bool = False
    dynamic: str | None = None

    @property
    def is_integer(self) -> bool:
        """Tell whether all that is known of it runs in integers."""
        return self.route is not None and self.reason is None

    @property
    def remark(self) -> str:
        """What a table says beside the route."""
        dynamic = f"its scales stay dynamic: {self.dynamic}" if self.dynamic else ""
        return self.reason or _WEIGHTS * self.forms_weights or dynamic


@dataclasses.dataclass(frozen=True)
class Coverage:
    """The layers of a model that attend; ``str()`` is a table of them.

    Attributes:
        layers: in the order of ``named_modules``.
    """

    layers: tuple[Layer, ...]

    def __iter__(self) -> Iterator[Layer]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def integer(self) -> tuple[Layer, ...]:
        """Layers in integers."""
        return tuple(layer for layer in self.layers if layer.is_integer)

    @property
    def floating(self) -> tuple[Layer, ...]:
        """Layers that stay in floating point, or some of whose calls did."""
        return tuple(layer for layer in self.layers if not layer.is_integer)

    @property
    def static(self) -> tuple[Layer, ...]:
        """Layers whose scales do not depend on the data."""
        return tuple(layer for layer in self.layers if layer.is_static)

    def __str__(self) -> str:
        head = f"{len(self.integer)} of {len(self)} attention layers in integers"
        if self.static:
            head += f", {len(self.static)} with static scales"
        if not self.layers:
            return "no attention found"
        rows = [
            (
                layer.name or "(the model)", layer.kind, (layer.route or "float") + ", static" * layer.is_static, layer.remark,
            )
            for layer in self.layers
        ]  # fmt: skip
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = ["  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]) for row in rows]
        return "\n".join([head, *(line.rstrip() for line in lines)])


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _count_products(code: types.CodeType) -> int:
    used = [(each.opname, each.argval, each.argrepr) for each in dis.get_instructions(code)]
    # before Python 3.11 the operators have instructions of their own
    return sum(name in _PRODUCTS or text in ("@", "@=") or kind.endswith("_MATRIX_MULTIPLY") for kind, name, text in used)


def _goes_on(method: Any) -> bool:
    """Tell whether a method may call the one that it overrides."""
    code = getattr(inspect.unwrap(method) if callable(method) else method, "__code__", None)
    return code is None or "__class__" in code.co_freevars or "forward" in code.co_names


@functools.cache
def _names_used(module_class: Any) -> frozenset[str]:
    """Return the names that a class's methods look up, and the functions of the same file that they call.

    Among them is ``@softmax@`` if there are two products or more, in one function with a softmax or in several methods of a
    class whose softmax is in a method with one of the products.
    """
    used: set[str] = set()
    overridden: set[str] = set()
    for parent in module_class.__mro__:
        if parent in (nn.Module, object):
            break
        seen: set[Any] = set()
        products, beside = 0, False
        # what static methods, class methods and properties hold, too
        own = {
            name: getattr(each, "__func__", getattr(each, "fget", each))
            for name, each in vars(parent).items()
            if name not in overridden
        }
        overridden |= {name for name, each in own.items() if not _goes_on(each)}
        waiting = list(own.values())
        while waiting:
            function = inspect.unwrap(waiting.pop())
            if not isinstance(function, types.FunctionType) or function in seen:
                continue
            seen.add(function)
            found = set(_names(function.__code__))
            used |= found
            here = _count_products(function.__code__)
            products += here
            beside |= here > 0 and bool(_SOFTMAX & set(function.__code__.co_names))
            called = (function.__globals__.get(name) for name in found)
            waiting += [each for each in called if getattr(each, "__module__", None) == function.__module__]
        if products > 1 and beside:
            used.add("@softmax@")
    return frozenset(used)


def attends(module: nn.Module) -> bool:
    """Tell whether a module counts as attention."""
    kind: Any = getattr(type(module), "_qflash_base", type(module))
    used = _names_used(kind)
    # attention modules of diffusers hand themselves to an object that attends
    processor: Any = type(getattr(module, "processor", None))
    if "__call__" in dir(processor) and "processor" in used and not issubclass(processor, nn.Module):
        used = used | _names_used(processor)
    if isinstance(module, nn.MultiheadAttention) or used & {"@softmax@", *_WHOLE}:
        return True
    return bool(used & _SOFTMAX) and any(part in kind.__name__.lower() for part in ("attention", "attn"))


def route_of(module_class: Any) -> str:
    """Return by which of its calls a class attends: ``"sdpa"`` or ``"softmax"``."""
    used = _names_used(module_class)
    by_torch = issubclass(module_class, nn.MultiheadAttention) or used & {*_WHOLE, _BY_NAME, "processor"}
    return "sdpa" if by_torch else "softmax"


def goes_by_name(name: object) -> bool:
    """Tell whether :func:`qflash.register_attention` has put a function into transformers' table under this name."""
    table = getattr(sys.modules.get("transformers.modeling_utils"), _BY_NAME, {})
    return isinstance(name, str) and getattr(table.get(name), "__module__", None) == "qflash.integrations.transformers"


def _name_looked_up(module: nn.Module) -> str | None:
    """Return the name that a module of transformers looks its attention up by; None if it looks none up."""
    kind: Any = type(module)
    if _BY_NAME not in _names_used(kind):
        return None
    return getattr(getattr(module, "config", None), "_attn_implementation", None)


def why_float(module: nn.Module) -> str | None:
    """Return why :func:`qflash.patch` leaves a module that attends as it is; None if it does not."""
    if isinstance(module, torch.jit.ScriptModule):
        return "it is a TorchScript module, whose calls cannot be answered"
    for kind in type(module).__mro__:
        reason = NOT_REPLACED.get(f"{kind.__module__}:{kind.__name__}")
        if reason is not None:
            return reason
    name = _name_looked_up(module)
    if goes_by_name(name):
        return f"attn_implementation={name!r} attends in integers already"
    if name not in (None, "eager", "sdpa"):
        return f"attn_implementation={name!r} calls a kernel of its own; choose 'sdpa' or 'eager'"
    return None


def _layer(name: str, module: Any) -> Layer:
    kind: Any = type(module)
    base = getattr(kind, "_qflash_base", None)
    if base is None:
        if goes_by_name(_name_looked_up(module)):
            return Layer(name, kind.__name__, "transformers")
        return Layer(name, kind.__name__, None, why_float(module) or "qflash.patch has not been called")
    calls: Counter[str | None] = module._qflash_calls
    reasons = [reason for reason, _ in calls.most_common() if reason is not None]
    floats = sum(calls[reason] for reason in reasons)
    is_static = static_scales.NAME in module._modules
    return Layer(
        name, base.__name__, kind._qflash_route, "; ".join(reasons) or None, calls[None], floats, module._qflash_weights,
        is_static, None if is_static else module._qflash_dynamic,
    )  # fmt: skip


def coverage(model: nn.Module) -> Coverage:
    """List the attention of a model: which layers run in integers and by which route, and why the others do not.

    The model is not run. A patched module is judged by its calls so far: after one that could not run in integers it is listed
    as floating point, with that call's reason. A module that is not patched is judged by its code, so an unusual form of
    attention may be missed.

    Args:
        model: any module.

    Returns:
        the layers; ``print`` shows a table.

    Raises:
        TypeError: ``model`` is not a module.

    Example::

        qflash.patch(model)
        model(images)
        print(qflash.coverage(model))
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    layers = []
    for name, module in model.named_modules():
        if getattr(module, "is_integer_attention", False):
            layers.append(Layer(name, type(module).__name__, "network", is_static=True))
        elif attends(module):
            layers.append(_layer(name, module))
    return Coverage(tuple(layers))


def float_attention(model: nn.Module) -> dict[str, str]:
    """Name the layers of :func:`coverage` that stay in floating point.

    Args:
        model: any module.

    Returns:
        the classes' names by the modules' dotted names; empty if all attention that was found runs in integers.

    Raises:
        TypeError: ``model`` is not a module.
    """
    return {layer.name: layer.kind for layer in coverage(model).floating}


def listed(names: list[str], most: int = 4) -> str:
    """Name modules by their dotted names, the first few if there are many."""
    shown = ", ".join(name or "the model itself" for name in names[:most])
    return shown + f" and {len(names) - most} more" * (len(names) > most)


def described(layers: Iterable[Layer]) -> str:
    """Name layers with their classes and reasons, the first few of each class."""
    kinds: dict[tuple[str, str | None], list[str]] = {}
    for layer in layers:
        kinds.setdefault((layer.kind, layer.reason), []).append(layer.name)
    return "; ".join(f"{kind}{f' ({reason})' if reason else ''}: {listed(names, 3)}" for (kind, reason), names in kinds.items())
