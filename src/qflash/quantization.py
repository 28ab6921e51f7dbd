"""The same module as :mod:`qflash.specification.quantization`, under the name that pickles of QuantizedTensor give."""

import sys

from .specification import quantization

sys.modules[__name__] = quantization
