"""One network for images of several sizes: what it has of its own at each, :class:`OtherSize`.

At another size a network differs in tables of tokens alone: position embeddings, rotary positions, masks, how many tokens a
mean is of. All else, weights above all, is there once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..integrations.images import check_size
from .modules import IntegerModule
from .quality import Quality

Size = tuple[int, int]
"""(height, width) in pixels."""


def shown(size: Sequence[int]) -> str:
    """Return a size for a message."""
    return f"{size[0]} x {size[1]}"


def key_of(size: Sequence[int]) -> str:
    """Return the name of a size in a network, in a file and in a ``state_dict``."""
    return f"{size[0]}x{size[1]}"


def whole_sizes(sizes: Sequence[int | Sequence[int]]) -> tuple[Size, ...]:
    """Return sizes as (height, width).

    Raises:
        ValueError: there are none, one is no size, or comes twice.
    """
    if isinstance(sizes, str) or not isinstance(sizes, Sequence) or not sizes:
        raise ValueError(f"sizes must be a list of (height, width) or numbers of pixels, got {sizes!r}")
    found = [check_size(size) for size in sizes]
    if None in found or len(set(found)) < len(found):
        raise ValueError(f"sizes must be (height, width) or numbers of pixels, each once, got {list(sizes)}")
    return tuple(size for size in found if size is not None)


def module_tree(modules: Mapping[str, IntegerModule]) -> nn.Module:
    """Return a module that holds modules at names with dots."""
    root = nn.Module()
    for name, module in modules.items():
        place = root
        *parents, last = name.split(".")
        for parent in parents:
            if parent not in place._modules:
                place.add_module(parent, nn.Module())
            place = place._modules[parent]  # type: ignore[assignment]
        place.add_module(last, module)
    return root


def own_copy(part: IntegerModule) -> IntegerModule:
    """Return a module that has the same tensors, all of them as its own."""
    made = copy.copy(part)
    made._buffers, made._non_persistent_buffers_set = dict(part._buffers), set()
    return made


class OtherSize(nn.Module):
    """What a network has at another size.

    Attributes:
        image: (channels, height, width).
        names: of nodes that have a module of their own here, whose operator is the same.
        parts: these modules. Tensors that are equal to the network's are the network's: they are not persistent here.
        quality: as the network's, of images of this size.
    """

    def __init__(self, image: Sequence[int], modules: Mapping[str, IntegerModule], quality: Quality | None = None) -> None:
        super().__init__()
        self.image, self.names, self.quality = tuple(image), frozenset(modules), quality
        self.parts = module_tree(modules)

    def part(self, name: str) -> IntegerModule:
        """Return the module of one of :attr:`names`."""
        module = self.parts.get_submodule(name)
        assert isinstance(module, IntegerModule)
        return module

    def link(self, part_of: Callable[[str], IntegerModule]) -> None:
        """Take the tensors that are not persistent here from the network's modules."""
        for name in self.names:
            part, shared = self.part(name), part_of(name)
            for tensor in part._non_persistent_buffers_set:
                part._buffers[tensor] = shared._buffers[tensor]


def dequantized(output: Any, scale: float) -> Any:
    """Return an int32 output, or a list of them, as float32."""
    return [x.to(torch.float32) * scale for x in output] if isinstance(output, list) else output.to(torch.float32) * scale
