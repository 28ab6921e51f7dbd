"""Build the vision models of transformers with attn_implementation="integer" and report how each attends.

``python scripts/sweep_transformers.py [part of a class's name ...]``. Models come from their usual configs, without memory
for weights (PyTorch's meta device), which takes two minutes for all. A line says how often the registered function was
called, what was named in a warning, or which error there was. The exit status is 1 if attention ran in floating point that
:func:`qflash.float_attention` does not name. Models that need other inputs than pixels are built, but not run.
"""

from __future__ import annotations

import sys
import warnings
from types import FrameType
from typing import Any
from unittest import mock

import torch
import transformers
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers.models.auto import modeling_auto

import qflash
from qflash.integrations import transformers as hugging_face

NO_ATTENTION = {
    "EfficientLoFTRForKeypointMatching": "confidences of pairs of points",
    "LogBinomialSoftmax": "bins of depth",
    "MgpstrA3Module": "weights of characters, without queries",
    "Sam2MultiScaleAttention": "weights besides those of the function it looks up, which are thrown away",
    "SuperPointInterestPointDecoder": "scores of points",
}
"""Modules with a softmax that is none of an attention, as read in their source."""


class Softmaxes(TorchFunctionMode):
    """Notes from which modules a softmax or one of PyTorch's attention functions is called."""

    def __init__(self) -> None:
        self.callers: set[str] = set()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if "softmax" in name or name == "scaled_dot_product_attention":
            frame: FrameType | None = sys._getframe(1)
            while frame is not None:
                module = frame.f_locals.get("self", frame.f_locals.get("module"))
                if isinstance(module, nn.Module) and not isinstance(module, nn.Softmax):
                    self.callers.add(type(module).__name__)
                    break
                frame = frame.f_back
        return function(*args, **(kwargs or {}))


def list_models() -> list[str]:
    """Return the names of all classes that take pixels first, as transformers' automatic classes choose them."""
    names: dict[str, None] = {}
    for table, classes in vars(modeling_auto).items():
        if table.startswith("MODEL_") and table.endswith("_MAPPING_NAMES"):
            for each in classes.values():
                names |= dict.fromkeys(each if isinstance(each, (tuple, list)) else (each,))
    found = []
    for name in names:
        try:
            if getattr(transformers, name).main_input_name == "pixel_values":
                found.append(name)
        except (AttributeError, ImportError):  # of other libraries that are not installed
            continue
    return sorted(found)


def make(name: str, implementation: str) -> Any:
    """Build a model on the meta device."""
    model_class = getattr(transformers, name)
    options = {"architecture": "vit_tiny_patch16_224"} if name.startswith("TimmWrapper") else {}
    with torch.device("meta"):
        return model_class._from_config(model_class.config_class(**options), attn_implementation=implementation).eval()


def run(model: Any) -> tuple[set[str], str]:
    """Run a model on an image, a pair or a video; returns which modules call a softmax, and an error if none could be."""
    config = model.config
    size = getattr(config, "image_size", None) or getattr(getattr(config, "vision_config", None), "image_size", None) or 224
    if isinstance(size, dict):
        size = (size["height"], size["width"])
    height, width = size[-2:] if isinstance(size, (tuple, list)) else (size, size)
    channels = getattr(config, "num_channels", None) or getattr(config, "in_channels", None) or 3
    callers, error = set(), ""
    for lead in ((1,), (1, 2), (1, getattr(config, "num_frames", None) or 16)):
        try:
            with torch.no_grad(), torch.device("meta"), Softmaxes() as seen:
                callers = seen.callers
                model(pixel_values=torch.zeros(*lead, channels, height, width))
            return callers, ""
        except Exception as problem:
            error = error or f"{type(problem).__name__}: {problem}".partition("\n")[0][:80]
    return callers, error


def report(name: str) -> bool:
    """Print a line about one model; False if attention was in floating point without a word."""
    try:
        make(name, "eager")
    except Exception as problem:
        print(f"{name}: not built at all: {type(problem).__name__}")
        return True
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            model = make(name, "integer")
        except ValueError as problem:
            print(f"{name}: ValueError: {problem}")
            return True
    warned = [str(each.message).partition("up, ")[2] for each in told if "attn_implementation=" in str(each.message)]
    with mock.patch.object(hugging_face, "attention", wraps=qflash.attention) as called, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        callers, error = run(model)
    named = set(qflash.float_attention(model).values())
    silent = callers - named - set(NO_ATTENTION)
    said = not named or bool(warned)
    print(
        f"{name}: {called.call_count} calls"
        + f", warned of {' | '.join(warned)}" * bool(warned)
        + f", not run to its end ({error})" * bool(error)
        + f", SILENT: {sorted(silent)}" * bool(silent)
        + ", NOT WARNED" * (not said),
        flush=True,
    )
    return said and not silent


def main(parts: list[str]) -> int:
    transformers.logging.set_verbosity_error()
    qflash.register_attention()
    names = [name for name in list_models() if not parts or any(part in name for part in parts)]
    silent = [name for name in names if not report(name)]
    print(f"{len(names)} models, {len(silent)} in floating point without a word{': ' * bool(silent)}{', '.join(silent)}")
    return bool(silent)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
