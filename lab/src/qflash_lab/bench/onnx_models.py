"""Float models in onnxruntime, as they are and in its own int8: what integer networks are compared with on a CPU."""

from __future__ import annotations

import contextlib
import io
import logging
import pathlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

Run = Callable[[torch.Tensor], torch.Tensor]
"""Takes images as the float model does, and returns what it returns."""

_INPUT, _OUTPUT = "images", "logits"
_OPSET = 17


def export_float(model: nn.Module, sample: torch.Tensor, path: pathlib.Path) -> pathlib.Path:
    """Write a float model as an ONNX graph for any batch, with constants folded; return its path.

    Args:
        model: float32, on the CPU, in evaluation mode.
        sample: float32 images (1, channels, height, width).
        path: of the file.
    """
    from onnxruntime.quantization.shape_inference import quant_pre_process

    plain = path.with_suffix(".plain.onnx")
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        # what the tracer says about the models' own code
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model, (sample,), str(plain), input_names=[_INPUT], output_names=[_OUTPUT],
            dynamic_axes={_INPUT: {0: "batch"}, _OUTPUT: {0: "batch"}}, opset_version=_OPSET, dynamo=False,
        )  # fmt: skip
    quant_pre_process(str(plain), str(path), skip_symbolic_shape=True)
    plain.unlink()
    return path


_LINEAR = ["MatMul", "Gemm"]


def _linear_nodes(path: pathlib.Path) -> list[str]:
    """Return the names of the products by constant matrices."""
    import onnx

    graph = onnx.load(path, load_external_data=False).graph
    constant = {item.name for item in graph.initializer}
    return [node.name for node in graph.node if node.op_type in _LINEAR and node.input[1] in constant]


def quantise_static(
    path: pathlib.Path,
    calibration: torch.Tensor,
    made: pathlib.Path,
    *,
    unsigned: bool,
    linear_only: bool = False,
    wide: bool = False,
    reduce_range: bool = False,
) -> pathlib.Path:
    """Write onnxruntime's static QDQ quantisation of a graph, weights per channel, ranges by minima and maxima.

    Args:
        path: what :func:`export_float` wrote.
        calibration: float32 images (count, channels, height, width).
        made: path of the new graph, which is returned.
        unsigned: activations are uint8 instead of int8: what onnxruntime has the fastest products for on x86.
        linear_only: quantise inputs and weights of products by constant matrices alone, in place of all operators that
            onnxruntime can quantise.
        wide: activations are uint16.
        reduce_range: weights have 7 bits, so that kernels without VNNI do not saturate.
    """
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self.parts: Iterator[torch.Tensor] = iter(calibration.split(1))

        def get_next(self) -> dict[str, Any] | None:
            part = next(self.parts, None)
            return None if part is None else {_INPUT: part.numpy()}

    activations = QuantType.QUInt16 if wide else QuantType.QUInt8 if unsigned else QuantType.QInt8
    only: dict[str, Any] = {}
    if linear_only:
        # its option MatMulConstBOnly counts in dynamic quantisation alone
        only = {"nodes_to_quantize": _linear_nodes(path), "extra_options": {"OpTypesToExcludeOutputQuantization": _LINEAR}}
    with _quiet():
        quantize_static(
            str(path), str(made), Reader(), quant_format=QuantFormat.QDQ, per_channel=True, weight_type=QuantType.QInt8,
            activation_type=activations, reduce_range=reduce_range, **only,
        )  # fmt: skip
    return made


def quantise_dynamic(path: pathlib.Path, made: pathlib.Path) -> pathlib.Path:
    """Write onnxruntime's dynamic quantisation: products by constant matrices in int8, scales of activations at run time."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with _quiet():
        quantize_dynamic(str(path), str(made), per_channel=True, weight_type=QuantType.QInt8)
    return made


def load(path: pathlib.Path, threads: int) -> Run:
    """Return what runs a graph on the CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    # its threads would go on waiting busily while something else is timed
    options.add_session_config_entry("session.force_spinning_stop", "1")
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(None, {_INPUT: images.numpy()})[0])


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep onnxruntime from advising what was done: the graph is prepared."""
    before = logging.root.level
    logging.root.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logging.root.setLevel(before)
