"""Keep an integer network in a file: :func:`save_model` and :func:`load_model`."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from pathlib import Path
from typing import Any

import torch

from ..reference import ARITHMETIC_VERSION
from .models import (
    IntegerNetwork,
    SwinStage,
    SwinTransformer,
    SwinTransformerShape,
    VisionTransformer,
    VisionTransformerShape,
    check_integer,
)
from .modules import IntegerModule
from .quality import Quality

KEY = "qflash integer network"
"""Where the file's header has ours."""
VERSION = 1
"""Of the file's form."""
_KINDS: dict[str, tuple[type[Any], type[Any]]] = {
    "VisionTransformer": (VisionTransformer, VisionTransformerShape),
    "SwinTransformer": (SwinTransformer, SwinTransformerShape),
}


def _constants(network: IntegerNetwork) -> dict[str, dict[str, int]]:
    return {
        name: {constant: getattr(module, constant) for constant in module.constants}
        for name, module in network.named_modules()
        if isinstance(module, IntegerModule) and module.constants
    }


def _reason(error: Exception) -> str:
    """Return what is wrong with a header: our own words, or Python's with their kind."""
    return str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"


def network_header(network: IntegerNetwork) -> dict[str, Any]:
    """Return what a file's header says of a network, as JSON holds it."""
    quality = {} if network.quality is None else {"quality": dataclasses.asdict(network.quality)}
    return {
        "version": VERSION,
        "arithmetic_version": ARITHMETIC_VERSION,
        "kind": type(network).__name__,
        "shape": dataclasses.asdict(network.shape),
        "constants": _constants(network),
        "output_scale": network.output_scale,
        "units": network.units,
        **quality,
    }


def save_model(network: IntegerNetwork, path: str | os.PathLike[str]) -> None:
    """Write an integer network to a safetensors file: integers, and a header with its shape and shifts.

    Raises:
        TypeError: ``network`` is none.
        ValueError: a part of it is kept in floating point.
        OSError: the file cannot be written.
    """
    from safetensors.torch import save_file

    check_integer(network)
    header = network_header(network)
    tensors = {name: x.contiguous() for name, x in network.state_dict().items()}
    save_file(tensors, Path(path), metadata={KEY: json.dumps(header)})


@torch.inference_mode(False)  # what is made is to be written to, in any mode
def load_model(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> IntegerNetwork:
    """Read an integer network that :func:`save_model` wrote. Nothing in the file is executed.

    Args:
        path: of the file.
        device: where it is put.

    Raises:
        ValueError: it is no such file, of another version, truncated, or its tensors do not fit its header.
        OSError: it cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no integer network at {path}")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - the file is no dictionary
    except SafetensorError as error:
        raise ValueError(f"{path} is no readable safetensors file: {error}") from error
    if KEY not in metadata:
        raise ValueError(f"{path} is no integer network of QFlash: its header has no {KEY!r}")
    try:
        header = json.loads(metadata[KEY])
        version = header["version"]
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} holds no whole integer network: {_reason(error)}") from error
    if version != VERSION:
        raise ValueError(f"{path} is of version {version}, this QFlash reads {VERSION}; quantise the model again")
    # files from before the entry are of the first
    arithmetic = header.get("arithmetic_version", 1)
    if arithmetic != ARITHMETIC_VERSION:
        raise ValueError(
            f"{path} is for arithmetic version {arithmetic}, this QFlash computes version {ARITHMETIC_VERSION}, which gives "
            "other integers; quantise the model again"
        )
    try:
        network = network_from_header(header, tensors)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise ValueError(f"{path} holds no whole integer network: {_reason(error)}") from error
    return network.to(device).eval()


def network_from_header(header: dict[str, Any], tensors: dict[str, torch.Tensor]) -> IntegerNetwork:
    """Return the network that :func:`network_header` and its tensors describe.

    Raises:
        ValueError: tensors are missing, not known, or do not fit the header, or integers do not keep their bounds
            (:meth:`.models.IntegerNetwork.check_values`). What else is wrong with a header raises what Python does.
    """
    # a block has tensors of its own; so a header cannot ask for blocks without end
    if header["shape"].get("depth", 0) > len(tensors):
        raise ValueError(f"{header['shape']['depth']} blocks cannot come of {len(tensors)} tensors")
    kind, shape_type = _KINDS[header["kind"]]
    shape = {name: _tuples(value) for name, value in header["shape"].items()}
    if "stages" in shape:
        shape["stages"] = tuple(SwinStage(**{k: _tuples(v) for k, v in stage.items()}) for stage in header["shape"]["stages"])
    network: IntegerNetwork = kind(shape_type(**shape))
    own = network.state_dict()
    if own.keys() != tensors.keys():
        raise ValueError(f"tensors {sorted(own.keys() ^ tensors.keys())[:3]} are missing or not known")
    for name, x in tensors.items():
        if x.shape != own[name].shape or x.dtype != own[name].dtype:
            raise ValueError(f"{name} must be {own[name].dtype} {tuple(own[name].shape)}, is {x.dtype} {tuple(x.shape)}")
    network.load_state_dict(tensors)
    modules: dict[str, Any] = dict(network.named_modules())
    if header["constants"].keys() != _constants(network).keys():
        raise ValueError("its constants do not fit its shape")
    for name, constants in header["constants"].items():
        for constant in modules[name].constants:
            value = constants[constant]
            if type(value) is not int:
                raise ValueError(f"{name}.{constant} must be an integer, is {value!r}")
            setattr(modules[name], constant, value)
    network.output_scale = float(header["output_scale"])
    network.units = tuple(float(x) for x in header["units"])
    if not all(0 < x < math.inf for x in (network.output_scale, *network.units)):
        raise ValueError(f"output_scale {network.output_scale} and units {network.units} must be positive and finite")
    network.quality = Quality.from_header(header["quality"]) if "quality" in header else None
    network.check_values()
    return network


def _tuples(x: Any) -> Any:
    return tuple(_tuples(each) for each in x) if isinstance(x, list) else x
