"""The same module as :mod:`qflash.integrations.timm`, under the name that pickles of patched models give."""

import sys

from .integrations import timm

sys.modules[__name__] = timm
