"""The self-test of an ONNX file: images by a formula, and the logits they must give. :func:`check_onnx` runs it."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .graph import IntegerNetwork
from ..specification.texts import with_padding
from .inputs import takes_ids
from .quality import sqnr_db

INPUT, IDS, MASK, OUTPUT = "images", "input_ids", "attention_mask", "logits"
"""Names of the model's input, of images or of ids, perhaps with a mask, and of its output."""
COUNT = 2
"""Images of the self-test; a model of a larger batch gets them again and again."""
RUNTIMES = ("onnxruntime", "reference", "openvino")
"""What :func:`check_onnx` knows: onnxruntime, ONNX's reference evaluator, OpenVINO on the CPU."""


def _mix(n: torch.Tensor) -> torch.Tensor:
    """Return 8 bits that look random, of whole numbers below 2**31; no product has more than 63 bits."""
    n = n * 0x9E3779B1 & 0xFFFFFFFF
    return (((n >> 15) ^ n) * 0x45D9F3B & 0xFFFFFFFF) >> 24


def self_test_images(count: int, channels: int, height: int, width: int) -> torch.Tensor:
    """Return the images of the self-test, uint8 (count, channels, height, width): 8 by 8 blocks with noise.

    docs/onnx.md has the formula.
    """
    plane = torch.arange(count * channels, dtype=torch.int64, device="cpu").view(count, channels, 1, 1)
    y = torch.arange(height, dtype=torch.int64, device="cpu")[:, None]
    x = torch.arange(width, dtype=torch.int64, device="cpu")
    blocks = 64 * plane + 8 * (8 * y // height) + 8 * x // width
    pixels = (plane * height + y) * width + x
    return ((3 * _mix(blocks) + _mix(pixels)) >> 2).to(torch.uint8)


def self_test_ids(count: int, tokens: int, vocabulary: int) -> torch.Tensor:
    """Return the ids of the self-test, int64 (count, tokens); docs/onnx.md has the formula."""
    n = torch.arange(count * tokens, dtype=torch.int64, device="cpu")
    return ((_mix(n) << 16 | _mix(n + 77777) << 8 | _mix(n + 12345)) % vocabulary).view(count, tokens)


def _half_mask(ids: torch.Tensor) -> torch.Tensor:
    """Return the mask of the self-test, int64 (count, tokens): of every second text the second half is padding."""
    mask = torch.ones_like(ids)
    mask[1::2, (ids.shape[1] + 1) // 2 :] = 0
    return mask


def output_names(network: IntegerNetwork) -> list[str]:
    """Return the names of a network's outputs in its ONNX file: ``"logits"`` of one, their own of several."""
    return [OUTPUT] if len(network.outputs) == 1 else list(network.outputs)


def self_test(network: IntegerNetwork) -> str:
    """Return the self-test of a network as its file holds it: JSON with the outputs of each image, by name."""
    images = (self_test_ids if takes_ids(network.image) else self_test_images)(COUNT, *network.image)
    if network.is_padded:
        images = with_padding(images, _half_mask(images))
    # the caller's choice of a back end may be for another device
    twin = copy.copy(network)
    twin.backend = "auto"
    with torch.inference_mode():
        found = twin.run(images.to(next(network.buffers()).device))
    return json.dumps({name: x.tolist() for name, x in zip(output_names(network), found.values(), strict=True)})


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a runtime made of the self-test.

    Attributes:
        runtime: its name and version, and how it was run.
        problem: None if its logits are those of the file, or as close as floats are where the network keeps parts in floating
            point; else how they differ, or why it could not run.
    """

    runtime: str
    problem: str | None


def check_onnx(
    path: str | os.PathLike[str], runtimes: Sequence[str] | None = None, providers: Sequence[str] | None = None
) -> list[Outcome]:
    """Run the self-test of a file that :func:`qflash.export_onnx` wrote, and compare every bit.

    Args:
        path: of the file.
        runtimes: of :data:`RUNTIMES`; None for all that are installed.
        providers: of onnxruntime, each run by itself with the CPU's for what it lacks; None for all that it has here.

    Raises:
        ImportError: the package ``onnx``, or a runtime that is asked for, is not installed.
        ValueError: the file is no ONNX model or has no self-test, or there is no such runtime or provider.
        OSError: the file cannot be read.
    """
    from ..optional_packages import require_packages

    for name in runtimes or ():
        if name not in RUNTIMES:
            raise ValueError(f"runtime must be one of {', '.join(RUNTIMES)}, got {name!r}")
    packages = {name: "onnx" if name == "reference" else name for name in RUNTIMES}
    needed = {"onnx", *(packages[name] for name in runtimes or ()), *(["onnxruntime"] if providers else [])}
    require_packages("check-onnx", *sorted(needed))
    path = Path(path)
    inputs, wanted, has_floats = _read(path)
    outcomes = []
    for name in runtimes or [name for name in RUNTIMES if importlib.util.find_spec(packages[name]) is not None]:
        for runtime, run in _WAYS[name](path, providers):
            try:
                found = run(inputs, list(wanted))
                problems = [_difference(name, x, got, has_floats) for (name, x), got in zip(wanted.items(), found, strict=True)]
                problem = "; ".join(filter(None, problems)) or None
            except Exception as error:
                problem = f"cannot run it: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
            outcomes.append(Outcome(runtime, problem))
    return outcomes


def _read(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor], bool]:
    """Return the inputs of a file's self-test, what it wants of them by the output's name, and whether parts are floats."""
    import onnx

    with path.open("rb") as file:
        content = file.read()
    try:
        model = onnx.load_from_string(content)
    except Exception as error:  # protobuf has changed its exception's place
        raise ValueError(f"{path} is no readable ONNX file: {error}") from error
    texts = {entry.key: entry.value for entry in model.metadata_props}
    if "self_test" not in texts:
        raise ValueError(f"{path} has no self-test: qflash.export_onnx did not write it, or an earlier QFlash did")
    try:
        entries = json.loads(texts["self_test"])
        wanted = {name: torch.tensor(x, dtype=torch.int32, device="cpu") for name, x in entries.items()}
        given = next(x for x in model.graph.input if x.name in (INPUT, IDS))
        batch, *sizes = (size.dim_value for size in given.type.tensor_type.shape.dim)
        if given.name == IDS:
            sizes.append(int(texts["vocabulary"]))
        odd = [tuple(x.shape) for x in wanted.values() if x.dim() < 2 or len(x) != COUNT]
        if not wanted or odd or min(sizes) < 1 or math.prod(sizes) > 1 << 31 or len(sizes) != (2 if given.name == IDS else 3):
            raise ValueError(f"outputs of shape {odd} for {given.name} of {' x '.join(map(str, sizes))}")
    except (
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        RuntimeError,
        OverflowError,
        RecursionError,
        StopIteration,
    ) as error:
        raise ValueError(f"{path} has a self-test that is damaged: {type(error).__name__}: {error}") from error
    which = torch.arange(batch or COUNT, dtype=torch.int64, device="cpu") % COUNT
    images = (self_test_ids if given.name == IDS else self_test_images)(COUNT, *sizes)[which]
    inputs = {given.name: images}
    if any(x.name == MASK for x in model.graph.input):
        inputs[MASK] = _half_mask(self_test_ids(COUNT, *sizes))[which]
    return (
        {name: x.numpy() for name, x in inputs.items()},
        {name: x[which] for name, x in wanted.items()},
        "float_parts" in texts,
    )


LEAST_FLOAT_DB = 30.0
"""Signal to noise of outputs where parts are in floating point: one rounding the other way changes integers behind it."""


def _difference(name: str, want: torch.Tensor, found: Any, has_floats: bool) -> str | None:
    """Say how an output differs from the one wanted; None if they are the same, or close where parts are floats."""
    got = torch.as_tensor(found)
    if got.dtype != want.dtype or got.shape != want.shape:
        return f"{name} must be {want.dtype} {tuple(want.shape)}, are {got.dtype} {tuple(got.shape)}"
    if has_floats:
        db = sqnr_db(want.double(), got.double())
        return None if db >= LEAST_FLOAT_DB else f"{name} have {db:.1f} dB, at least {LEAST_FLOAT_DB:.0f} are wanted of floats"
    wrong = int((got != want).sum())
    most = int((got.long() - want.long()).abs().max()) if wrong else 0
    return f"{wrong} of {want.numel()} {name} differ, by up to {most}" if wrong else None


_Way = Iterator[tuple[str, Callable[[Any, list[str]], Any]]]
"""Names of runtimes, and functions of arrays by the inputs' names and of names of outputs."""


def _onnxruntime(path: Path, providers: Sequence[str] | None) -> _Way:
    """Yield name and function of every provider and level of optimisation."""
    import onnxruntime

    here = onnxruntime.get_available_providers()
    for name in providers or ():
        if name not in here:
            raise ValueError(f"provider must be one of {', '.join(here)}, which onnxruntime has here, got {name!r}")
    # Azure's sends models elsewhere and computes nothing here
    for provider in providers or [name for name in here if name != "AzureExecutionProvider"]:
        for level in onnxruntime.GraphOptimizationLevel.__members__.values():

            def run(inputs: Any, names: list[str], provider: str = provider, level: Any = level) -> Any:
                options = onnxruntime.SessionOptions()
                options.graph_optimization_level = level
                # errors are raised as well
                options.log_severity_level = 4
                with_cpu = list(dict.fromkeys((provider, "CPUExecutionProvider")))
                return onnxruntime.InferenceSession(str(path), options, providers=with_cpu).run(names, inputs)

            yield f"onnxruntime {onnxruntime.__version__}, {provider}, {level.name}", run


def _reference(path: Path, _: Sequence[str] | None) -> _Way:
    import onnx
    from onnx.reference import ReferenceEvaluator

    yield (
        f"onnx {onnx.__version__}, reference evaluator",
        lambda inputs, names: ReferenceEvaluator(str(path)).run(names, inputs),
    )


def _openvino(path: Path, _: Sequence[str] | None) -> _Way:
    import openvino

    yield (
        f"openvino {openvino.__version__.partition('-')[0]}, CPU",
        lambda inputs, names: [openvino.Core().compile_model(str(path), "CPU")(inputs)[name] for name in names],
    )


_WAYS = {"onnxruntime": _onnxruntime, "reference": _reference, "openvino": _openvino}
