"""The same module as :mod:`qflash.integrations.patching`, under the name that pickles of patched models give."""

import sys

from .integrations import patching

sys.modules[__name__] = patching
