"""Which attention of a model computes in floating point, told by what its code names: :func:`float_attention`.

Nothing is run. A module counts as attention if its class calls one of PyTorch's attention functions, or a softmax between
matrix products, or a softmax and says in its name what it is. A softmax alone may be a gate, a loss or a classifier's.
"""

from __future__ import annotations

import dis
import functools
import inspect
import sys
import types
from collections.abc import Iterator
from typing import Any

from torch import nn

_WHOLE = {"scaled_dot_product_attention", "multi_head_attention_forward"}
_SOFTMAX = {"softmax", "Softmax"}
_PRODUCTS = {"matmul", "bmm", "baddbmm", "einsum"}
_BY_NAME = "ALL_ATTENTION_FUNCTIONS"
"""Where modules of transformers look up the function that their config names."""


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _has_products(code: types.CodeType) -> bool:
    """Tell whether a softmax stands beside two matrix products or more."""
    used = [(each.opname, each.argval, each.argrepr) for each in dis.get_instructions(code)]
    # before Python 3.11 the operator has an instruction of its own
    products = sum(name in _PRODUCTS or text == "@" or kind == "BINARY_MATRIX_MULTIPLY" for kind, name, text in used)
    return products > 1 and any(name in _SOFTMAX for name in code.co_names)


@functools.cache
def _names_used(module_class: Any) -> frozenset[str]:
    """Return the names that a class's methods look up, and the functions of the same file that they call.

    Among them is ``@softmax@`` if that is between matrix products.
    """
    used: set[str] = set()
    for parent in module_class.__mro__[: module_class.__mro__.index(nn.Module)]:
        seen: set[Any] = set()
        # what static methods, class methods and properties hold, too
        waiting = [getattr(each, "__func__", getattr(each, "fget", each)) for each in vars(parent).values()]
        while waiting:
            function = inspect.unwrap(waiting.pop())
            if not isinstance(function, types.FunctionType) or function in seen:
                continue
            seen.add(function)
            found = set(_names(function.__code__))
            used |= found
            if _has_products(function.__code__):
                used.add("@softmax@")
            called = (function.__globals__.get(name) for name in found)
            waiting += [each for each in called if getattr(each, "__module__", None) == function.__module__]
    return frozenset(used)


def _attends(module: nn.Module) -> bool:
    kind: Any = type(module)
    used = _names_used(kind)
    if isinstance(module, nn.MultiheadAttention) or used & {"@softmax@", *_WHOLE}:
        return True
    return bool(used & _SOFTMAX) and any(part in kind.__name__.lower() for part in ("attention", "attn"))


def goes_by_name(name: object) -> bool:
    """Tell whether :func:`qflash.register_attention` has put a function into transformers' table under this name."""
    table = getattr(sys.modules.get("transformers.modeling_utils"), _BY_NAME, {})
    return isinstance(name, str) and getattr(table.get(name), "__module__", None) == "qflash.integrations.transformers"


def float_attention(model: nn.Module) -> dict[str, str]:
    """Find the attention modules of a model that compute in floating point.

    What is patched does not, nor what looks a registered function up. The rest is told by its code, which is not run: of
    a class that attends in an unusual way nothing may be known.

    Args:
        model: any module.

    Returns:
        the classes' names by the modules' dotted names; empty if all attention that was found runs in integers.

    Raises:
        TypeError: ``model`` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        kind: Any = type(module)
        if hasattr(kind, "_qflash_base") or not _attends(module):
            continue
        if _BY_NAME in _names_used(kind) and goes_by_name(
            getattr(getattr(module, "config", None), "_attn_implementation", None)
        ):
            continue
        found[name] = kind.__name__
    return found


def listed(names: list[str], most: int = 4) -> str:
    """Name modules by their dotted names, the first few if there are many."""
    shown = ", ".join(name or "the model itself" for name in names[:most])
    return shown + f" and {len(names) - most} more" * (len(names) > most)


def described(modules: dict[str, str]) -> str:
    """Name modules with their classes, the first few of each class."""
    kinds: dict[str, list[str]] = {}
    for name, kind in modules.items():
        kinds.setdefault(kind, []).append(name)
    return "; ".join(f"{kind}: {listed(names, 3)}" for kind, names in kinds.items())
