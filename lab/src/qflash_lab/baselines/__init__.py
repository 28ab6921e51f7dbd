"""Attention methods behind one protocol: what the paper compares and QFlash's own presets, one module a method."""

from __future__ import annotations

from .floating import FP16_FLASH, FP32
from .fq_vit import FQ_VIT
from .i_bert import I_BERT
from .i_vit import I_VIT, I_VIT_16
from .int_flash import INT_FLASH_FULL, INT_FLASH_HALF
from .method import Bits, Method
from .presets import QFLASH
from .qattn import QATTN
from .qflash_paper import AUTHORS, PRINTED

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        FP32,
        FP16_FLASH,
        *QFLASH,
        PRINTED,
        AUTHORS,
        I_VIT,
        I_VIT_16,
        I_BERT,
        FQ_VIT,
        INT_FLASH_FULL,
        INT_FLASH_HALF,
        QATTN,
    )
}
"""All methods by name: the float references, QFlash's presets, the paper's own arithmetic, then the rows of its Table 5."""

__all__ = ["AUTHORS", "METHODS", "PRINTED", "Bits", "Method", "get_method"]


def get_method(name: str) -> Method:
    """Return the method called ``name``.

    Raises:
        ValueError: no method has that name.
    """
    if name not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {name!r}")
    return METHODS[name]
