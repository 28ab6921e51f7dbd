"""Write an integer network as a TOSA graph: :func:`export_tosa`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from ..scalars import whole_number
from ..validation import check_flags
from .export_checks import check_attention, to_export
from .graph import IntegerNetwork
from .inputs import input_shape, takes_ids
from .onnx_check import IDS, INPUT, output_names


def export_tosa(
    network: IntegerNetwork,
    path: str | os.PathLike[str],
    *,
    batch: int = 1,
    size: int | Sequence[int] | None = None,
    int16: bool = False,
) -> dict[str, Mapping[str, int]]:
    """Write a network as a TOSA graph (a flatbuffer, ``.tosa``) of the integer profile alone, or with EXT-INT16.

    The graph takes the bytes of uint8 images as int8 (batch, channels, height, width), for TOSA has no other 8 bits, and
    returns int32 logits: those of the network, bit for bit, wherever TOSA's integer operators are computed as they are defined.
    ``docs/tosa.md`` lists them and what was run. Weights and constants are in the file.

    Args:
        network: what :func:`qflash.quantize_model` or :func:`qflash.load_model` returns, on any device.
        path: of the file; an existing one is replaced only after the new one is complete.
        batch: images in a batch, at least 1. TOSA's shapes are static.
        size: of the images, of a network with several; the first of ``network.image_sizes`` if None.
        int16: use tables of the extension EXT-INT16, with which linear layers' GELU and SiLU have fewer operators.

    Returns:
        how many operators each node became, without constants: by the node's name and the operator's.

    Raises:
        ImportError: the package ``tosa-tools`` is not installed.
        TypeError: an argument is of another type.
        ValueError: ``batch`` is below 1, or the network has no form in this profile: parts in floating point, a recipe of
            attention without ``normalization="two_pass"``, ``output="accumulator"`` and 7 or 8 ``probability_bits``, more than
            65536 keys, a value with ``2**19`` times the scale of its output, or about 2 GB of constants.
        OSError: the file cannot be written.
    """
    from ..optional_packages import require_packages

    network = to_export(network, path, size)
    check_flags(int16=int16)
    batch = whole_number("batch", batch, 1)
    check_attention(network, "TOSA")
    require_packages("export_tosa", "tosa_serializer")

    import numpy as np

    from ..paths import write_whole
    from .tosa_graph import Graph
    from .tosa_operators import whole_network

    graph = Graph(int16)
    ids = takes_ids(network.image)
    given = graph.input(IDS if ids else INPUT, np.int32 if ids else np.int8, (batch, *input_shape(network.image)))
    found = whole_network(graph, network, given)
    shapes = network.shapes()
    for (name, value), public in zip(found.items(), output_names(network), strict=True):
        made = network.outputs[name]
        with graph.scope(made):
            graph.output(value, public, (batch, *shapes[made][1:]))
    write_whole(os.path.realpath(path), graph.serialize())
    return {name: dict(count) for name, count in graph.counts.items()}
