"""The same module as :mod:`qflash.specification.reference`, under the name that documents of earlier releases give."""

import sys

from .specification import reference

sys.modules[__name__] = reference
