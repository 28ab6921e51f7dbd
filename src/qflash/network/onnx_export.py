"""Write an integer network as ONNX, with integer operators only: :func:`export_onnx`."""

from __future__ import annotations

import os
from pathlib import Path

from ..scalars import unboxed
from .models import IntegerNetwork, check_integer

INPUT, OUTPUT, BATCH = "images", "logits", "batch"
"""Names of the input, the output, and of a batch dimension that is left open."""


def export_onnx(network: IntegerNetwork, path: str | os.PathLike[str], *, batch: int | str = "dynamic") -> None:
    """Write a network as an ONNX model from uint8 images to int32 logits whose every operator and tensor is integer.

    Its results are those of the network, bit for bit, in any runtime that computes ONNX's integer operators as they are
    defined. ``docs/onnx.md`` lists the operators. The model needs opset 18; its metadata hold ``output_scale``.

    Args:
        network: what :func:`qflash.quantize_model` or :func:`qflash.load_model` returns, on any device.
        path: of the file; one that is there is replaced.
        batch: images in a batch, at least 1, or ``"dynamic"`` to leave that open.

    Raises:
        ImportError: the package ``onnx`` is not installed.
        TypeError: an argument is of another type.
        ValueError: ``batch`` is none of these, a part of the network is kept in floating point, or its recipe of attention has
            no form in ONNX: that needs ``normalization="two_pass"``, ``output="accumulator"`` and 7 or 8 ``probability_bits``.
        OSError: the file cannot be written.
    """
    from ..optional_packages import require_packages

    check_integer(network)
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path must be a string or a path, got {type(path).__name__}")
    batch = unboxed(batch)
    if isinstance(batch, bool) or not isinstance(batch, (int, str)):
        raise TypeError(f"batch must be 'dynamic' or an integer, got {type(batch).__name__}")
    if batch != "dynamic" and (isinstance(batch, str) or batch < 1):
        raise ValueError(f"batch must be 'dynamic' or an integer of at least 1, got {batch!r}")
    require_packages("export_onnx", "onnx")

    import numpy as np
    import onnx

    from .. import __version__
    from ..recipe import Recipe
    from .onnx_graph import Graph, Value
    from .onnx_operators import check_recipe, whole_network

    shape = network.shape
    check_recipe(Recipe.from_key(shape.recipe))
    graph = Graph()
    images = Value(INPUT, np.dtype(np.uint8))
    logits, outputs = whole_network(graph, network, images)
    size = BATCH if batch == "dynamic" else batch
    model = graph.model(
        [(images, (size, shape.image_channels, *shape.image_size))],
        [(logits, OUTPUT, (size, outputs))],
        type(network).__name__,
        __version__,
        {"output_scale": repr(network.output_scale)},
    )
    onnx.save_model(model, Path(path))
