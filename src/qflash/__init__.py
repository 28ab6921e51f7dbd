"""QFlash: fused attention whose matrix products and softmax run in integers."""

import os
import sys
from typing import TYPE_CHECKING

__version__ = "0.1.0"
__all__ = [
    "ACCURATE",
    "DEFAULT",
    "PAPER",
    "QuantizedTensor",
    "Recipe",
    "align_bias",
    "attention",
    "calibrate",
    "compare",
    "coverage",
    "explain",
    "export_c",
    "export_onnx",
    "export_tosa",
    "export_web",
    "float_attention",
    "image_transform",
    "int8_attention",
    "load_model",
    "patch",
    "quantize",
    "quantize_bias",
    "quantize_model",
    "register_attention",
    "save_model",
    "sdpa",
    "sentence_transformer",
    "transformers_model",
    "unpatch",
    "varlen_attention",
    "warmup",
    "zero_shot_model",
]


def _is_command() -> bool:
    """Tell whether this process is the command (``qflash``, ``python -m qflash``), whose help needs no PyTorch."""
    if sys.argv[:1] == ["-m"]:  # while Python looks for the module that it is to run
        return sys.orig_argv[-len(sys.argv)] == __name__
    return os.path.basename("".join(sys.argv[:1])) in ("qflash", "qflash.exe")


if TYPE_CHECKING or not _is_command():
    # pickles of earlier releases ask for their classes by these names
    from . import patching as patching
    from . import quantization as quantization
    from . import recipe as recipe
    from . import reference as reference
    from .api import align_bias, attention, int8_attention, quantize, quantize_bias, varlen_attention
    from .explanation import explain
    from .integrations.calibrate import calibrate
    from .integrations.images import image_transform
    from .integrations.inspection import coverage, float_attention
    from .integrations.patching import patch, unpatch
    from .integrations.sdpa import sdpa
    from .integrations.transformers import register_attention
    from .network.c_export import export_c
    from .network.compare import compare
    from .network.hugging_face import sentence_transformer, transformers_model
    from .network.onnx_export import export_onnx
    from .network.quantize import quantize_model
    from .network.storage import load_model, save_model
    from .network.tosa_export import export_tosa
    from .network.web_export import export_web
    from .network.zero_shot import zero_shot_model
    from .precompile import warmup
    from .specification.quantization import QuantizedTensor
    from .specification.recipe import ACCURATE, DEFAULT, PAPER, Recipe
else:

    def __getattr__(name: str) -> object:
        """Import everything, operators included, when a public name is first asked for."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from . import api, explanation, precompile
        from .integrations import calibrate, images, inspection, patching, sdpa
        from .integrations import transformers as names_of_attention
        from .network import c_export, compare, hugging_face, onnx_export, storage, tosa_export, web_export, zero_shot
        from .network import quantize as network
        from .specification import quantization, recipe

        networks = network, storage, onnx_export, tosa_export, c_export, web_export, compare, hugging_face, zero_shot
        models = patching, calibrate, inspection, images, names_of_attention, sdpa
        homes = recipe, quantization, *models, *networks, precompile, explanation, api
        names = {name: x for home in homes for name, x in vars(home).items()}
        globals().update({public: names[public] for public in __all__})
        return names[name]

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
