"""What has other names, or none that is public, in some of the releases of Triton that are supported (Gluon)."""

from __future__ import annotations

import typing
from typing import Any

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language import core

barrier = getattr(gl, "barrier", None) or gl.thread_barrier
copy_to_shared = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


def aggregate(cls: type) -> Any:
    """Make a class of values that kernels pass as one, with the annotated fields and with methods.

    Triton 3.6 neither makes a constructor nor reads annotations that are strings.
    """
    fields = cls.__annotations__ = typing.get_type_hints(cls)

    def init(self: Any, *values: Any) -> None:
        for (name, kind), value in zip(fields.items(), values, strict=True):
            setattr(self, name, gl.constexpr(value) if kind is gl.constexpr else value)

    init.__triton_builtin__ = True  # type: ignore[attr-defined]
    cls.__init__ = init  # type: ignore[misc]
    return core._aggregate(cls)
