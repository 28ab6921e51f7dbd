"""What :func:`qflash.export_onnx` and :func:`qflash.export_tosa` require alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..specification.fixed_point import SECTION_KEYS
from .graph import IntegerNetwork
from .modules import Attention

if TYPE_CHECKING:
    import numpy as np


def check_path(path: object) -> None:
    """Require a path.

    Raises:
        TypeError: it is something else.
    """
    import os

    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path must be a string or a path, got {type(path).__name__}")


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
