"""The same module as :mod:`qflash.specification.recipe`, under the name that pickles of recipes give."""

import sys

from .specification import recipe

sys.modules[__name__] = recipe
