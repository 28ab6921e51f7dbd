"""QFlash: fused attention whose matrix products and softmax run in integers."""

from .api import align_bias, attention, int8_attention, quantize, quantize_bias
from .hugging_face import register_attention
from .inspection import float_attention
from .patching import patch, unpatch
from .quantization import QuantizedTensor
from .recipe import ACCURATE, DEFAULT, PAPER, Recipe

__version__ = "0.1.0"
__all__ = [
    "ACCURATE",
    "DEFAULT",
    "PAPER",
    "QuantizedTensor",
    "Recipe",
    "align_bias",
    "attention",
    "float_attention",
    "int8_attention",
    "patch",
    "quantize",
    "quantize_bias",
    "register_attention",
    "unpatch",
]
