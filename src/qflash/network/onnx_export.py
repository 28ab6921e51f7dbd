"""Write an integer network as ONNX, with integer operators only: :func:`export_onnx`."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..scalars import unboxed, whole_number
from ..specification.reference import ARITHMETIC_VERSION
from ..specification.texts import PADDING
from ..validation import check_flags
from .export_checks import check_attention, to_export
from .graph import IntegerNetwork
from .inputs import input_shape, takes_ids
from .onnx_check import IDS, INPUT, MASK, output_names, self_test

BATCH = "batch"
"""Name of a batch dimension that is left open."""
EXTERNAL_DATA_THRESHOLD = 2_000_000_000
"""Bytes of tensors that one file holds; with its nodes it stays below protobuf's limit of 2^31."""
_LEAST_LARGE = 1024
"""Bytes of a tensor that may go into the other file; shapes and shifts, which tools look at, are smaller."""
_ALIGNMENT = 64


def export_onnx(
    network: IntegerNetwork,
    path: str | os.PathLike[str],
    *,
    batch: int | str = "dynamic",
    external_data_threshold: int = EXTERNAL_DATA_THRESHOLD,
    inline: bool = False,
    size: int | Sequence[int] | None = None,
    int64: bool = True,
) -> None:
    """Write a network as an ONNX model from uint8 images to int32 logits whose every operator and tensor is integer.

    Its results are those of the network, bit for bit, in any runtime that computes ONNX's integer operators as they are
    defined; ``qflash check-onnx`` tells whether a runtime does. ``docs/onnx.md`` lists the operators, what the metadata hold,
    and runtimes. Nodes that ``keep_float`` left in floating point become ONNX's float operators, which runtimes round in their
    own ways; the metadata name them. The model needs opset 18. The network is run once, on two images, for the self-test.

    Args:
        network: what :func:`qflash.quantize_model` or :func:`qflash.load_model` returns, on any device.
        path: of the file; an existing one is replaced only after the new one is complete.
        batch: images in a batch, at least 1, or ``"dynamic"`` to leave that open.
        external_data_threshold: if the tensors have more bytes than that, at most 2e9, they are written to a file beside it,
            named ``path``, 16 digits and ``.data``. Both files then belong together.
        inline: write all nodes into one graph. False makes a node of each operator of the network, which calls a function
            that the file holds (domain ``qflash``); OpenVINO does not support functions.
        size: of the images, of a network with several; the first of ``network.image_sizes`` if None. A file is
            of one size.
        int64: False computes in 32 bits alone, in operators that are exact in OpenVINO's CPU plugin as well; only shapes and
            axes are int64.

    Raises:
        ImportError: the package ``onnx`` is not installed.
        TypeError: an argument is of another type.
        ValueError: ``batch`` or ``external_data_threshold`` is not in its range, or the network's recipe of attention has no
            form in ONNX: that needs ``normalization="two_pass"``, ``output="accumulator"`` and 7 or 8 ``probability_bits``; or
            attention has more than 65536 keys; or, without ``int64``, a node is kept in floating point.
        OverflowError: without ``int64``, a number has no form in 32 bits; the message names the node.
        OSError: the file cannot be written.
    """
    from ..optional_packages import require_packages

    network = to_export(network, path, size, floats=True)
    check_flags(inline=inline, int64=int64)
    batch = unboxed(batch)
    if isinstance(batch, bool) or not isinstance(batch, (int, str)):
        raise TypeError(f"batch must be 'dynamic' or an integer, got {type(batch).__name__}")
    if batch != "dynamic" and (isinstance(batch, str) or batch < 1):
        raise ValueError(f"batch must be 'dynamic' or an integer of at least 1, got {batch!r}")
    threshold = whole_number("external_data_threshold", external_data_threshold)
    if not 0 <= threshold <= EXTERNAL_DATA_THRESHOLD:
        raise ValueError(f"external_data_threshold must be from 0 to {EXTERNAL_DATA_THRESHOLD}, got {threshold}")
    check_attention(network, "ONNX")
    if not int64 and (floats := network.float_parts()):
        raise ValueError(f"nodes in floating point cannot be written without 64 bits: {', '.join(floats)}")
    require_packages("export_onnx", "onnx")

    import numpy as np

    from .. import __version__
    from .onnx_functions import add_functions
    from .onnx_graph import Graph, Value
    from .onnx_narrow import NarrowGraph
    from .onnx_operators import whole_network

    graph = Graph() if int64 else NarrowGraph()
    ids = takes_ids(network.image)
    images = Value(IDS if ids else INPUT, np.dtype(np.int64 if ids else np.uint8))
    count = BATCH if batch == "dynamic" else batch
    shapes = network.shapes()
    inputs, taken = [images], images
    if network.is_padded:
        inputs.append(Value(MASK, np.dtype(np.int64)))
    if ids and not int64:
        taken = _narrow_ids(graph, inputs, network.image[1])
    elif network.is_padded:
        zero, padding = graph.constant(0, np.int64), graph.constant(PADDING, np.int64)
        taken = graph.node("Where", graph.node("Equal", inputs[1], zero, dtype=np.bool_), padding, images, dtype=np.int64)
    found = whole_network(graph, network, taken)
    outputs = [
        (graph.node("Identity", value), public, (count, *shapes[network.outputs[name]][1:]))
        for (name, value), public in zip(found.items(), output_names(network), strict=True)
    ]
    model = graph.model(
        [(x, (count, *input_shape(network.image))) for x in inputs],
        outputs,
        type(network).__name__,
        __version__,
        {
            "output_scale": json.dumps(dict(zip(output_names(network), network.scales.values(), strict=True)))
            if len(outputs) > 1
            else repr(network.output_scale),
            "arithmetic_version": str(ARITHMETIC_VERSION),
            "kind": type(network).__name__,
            "qflash_version": __version__,
            **({"vocabulary": str(network.image[1])} if ids else {}),
            **({"float_parts": json.dumps(parts)} if (parts := network.float_parts()) else {}),
            "self_test": self_test(network),
        },
    )
    if not inline:
        add_functions(model, graph.spans, frozenset(graph.tables))
    _add_shapes(model)
    _write(model, Path(os.path.realpath(path)), threshold)


def _narrow_ids(graph: Any, inputs: Sequence[Any], vocabulary: int) -> Any:
    """Return ids as int32, with :data:`PADDING` where a mask is 0, in a :class:`.onnx_narrow.NarrowGraph`."""
    import numpy as np

    ids = graph.known(graph.cast(inputs[0], np.int32), 0, vocabulary - 1)
    if len(inputs) == 1:
        return ids
    # of all numbers in a mask -2**31 alone has no magnitude in 32 bits
    mask = graph.known(graph.cast(inputs[1], np.int32), 1 - (1 << 31), (1 << 31) - 1)
    seen = graph.minimum(graph.node("Abs", mask), 1)
    return graph.add(graph.multiply(graph.subtract(ids, PADDING), seen), PADDING)


def _large(model: Any) -> list[Any]:
    return [x for x in model.graph.initializer if len(x.raw_data) >= _LEAST_LARGE]


def _add_shapes(model: Any) -> None:
    """Write types and shapes of all tensors into a model."""
    import onnx
    from onnx import helper

    # large tensors as inputs: their numbers do not matter, and inference would copy them
    large = _large(model)
    names = {x.name for x in large}
    graph = helper.make_graph(
        model.graph.node,
        "shapes",
        [*model.graph.input, *(helper.make_tensor_value_info(x.name, x.data_type, x.dims) for x in large)],
        model.graph.output,
        [x for x in model.graph.initializer if x.name not in names],
    )
    skeleton = helper.make_model(
        graph, opset_imports=model.opset_import, ir_version=model.ir_version, functions=list(model.functions)
    )
    inferred = onnx.shape_inference.infer_shapes(skeleton, check_type=True, strict_mode=True, data_prop=True)
    model.graph.value_info.extend(inferred.graph.value_info)


def _write(model: Any, path: Path, threshold: int) -> None:
    """Write a model to one file or two."""
    from ..paths import whole_file, write_whole

    data_path, parts = None, []
    if sum(len(x.raw_data) for x in model.graph.initializer) > threshold:
        large = _large(model)
        digest = hashlib.sha256(b"".join(hashlib.sha256(x.raw_data).digest() for x in large)).hexdigest()
        # the name says what is in the file, so an old model never meets new data
        data_path = path.with_name(f"{path.name}.{digest[:16]}.data")
        parts = _take_out(large, data_path.name)
    known = set(_data_files(path))
    try:
        if data_path is not None:
            with whole_file(data_path) as file:
                for part in parts:
                    file.write(part)
        write_whole(path, model.SerializeToString(deterministic=True))
    except BaseException:
        if data_path is not None and data_path not in known:
            data_path.unlink(missing_ok=True)
        raise
    for old in known - {data_path}:
        # somebody else may be exporting to the same path
        with contextlib.suppress(OSError):
            old.unlink()


def _take_out(tensors: list[Any], location: str) -> list[bytes]:
    """Let tensors of a model lie in a file beside it; return the parts of that file."""
    from onnx import TensorProto
    from onnx.external_data_helper import set_external_data

    parts: list[bytes] = []
    end = 0
    for tensor in tensors:
        raw = tensor.raw_data
        set_external_data(tensor, location, offset=end, length=len(raw))
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        parts += [raw, bytes(-len(raw) % _ALIGNMENT)]
        end += len(raw) + len(parts[-1])
    return parts


def _data_files(path: Path) -> list[Path]:
    """Return the files with tensors that exports to this path have left."""
    pattern = re.compile(re.escape(path.name) + r"\.[0-9a-f]{16}\.data")
    try:
        return [each for each in path.parent.iterdir() if pattern.fullmatch(each.name)]
    except OSError:
        # writing says what is wrong with the folder
        return []
