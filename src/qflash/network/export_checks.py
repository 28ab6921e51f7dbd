"""What the exports of networks require alike."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..specification.fixed_point import SECTION_KEYS
from .graph import IntegerNetwork, check_integer, check_network
from .modules import Attention

if TYPE_CHECKING:
    import numpy as np


def to_export(
    network: IntegerNetwork, path: object, size: int | Sequence[int] | None, *, floats: bool = False
) -> IntegerNetwork:  # fmt: skip
    """Return the network of one image size, which is to be written.

    Args:
        network: of any sizes.
        path: where to.
        size: the first if None.
        floats: whether parts may be in floating point.

    Raises:
        TypeError: ``network`` is not an IntegerNetwork, or ``path`` not a path.
        ValueError: it has no such size, or parts in floating point.
    """
    (check_network if floats else check_integer)(network)
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path must be a string or a path, got {type(path).__name__}")
    return network if size is None else network.at(size)


def check_attention(network: IntegerNetwork, form: str) -> None:
    """Require attention that integer operators of 32 bits can express.

    Args:
        network: to write.
        form: what it is to be written as.

    Raises:
        ValueError: it cannot be written so; the message names the field of the recipe, or the node.
    """
    for field, allowed in (
        ("normalization", ("two_pass",)),
        ("output", ("accumulator",)),
        ("probability_bits", (7, 8)),
    ):
        if getattr(network.recipe, field) not in allowed:
            raise ValueError(
                f"the network's recipe must have {field} {' or '.join(map(repr, allowed))} to be written as {form}, "
                f"got {getattr(network.recipe, field)!r}"
            )
    shapes = network.shapes()
    for node in network.nodes:
        part = network.part(node.name)
        keys = (part.tokens or shapes[node.inputs[-1]][1]) if isinstance(part, Attention) else 0
        if keys > SECTION_KEYS:
            raise ValueError(f"{node.name} must have at most {SECTION_KEYS} keys to be written as {form}, has {keys}")


def exact_array(values: Any, dtype: Any, name: str) -> np.ndarray:
    """Return a constant's numbers as a contiguous array of a type.

    Raises:
        OverflowError: the type does not hold them; the message has the name.
    """
    import numpy as np

    wide = np.asarray(values)
    array = np.ascontiguousarray(wide.astype(dtype)).reshape(wide.shape)
    if not np.array_equal(array, wide):
        raise OverflowError(f"a constant of {name} does not fit {array.dtype}")
    return array
