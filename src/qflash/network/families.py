"""The model families that can be quantised as a whole: :func:`family_of`, :func:`read`."""

from __future__ import annotations

from types import ModuleType

from torch import nn

from . import swin_transformer, vision_transformer
from .float_network import FloatNetwork

_FAMILIES: tuple[tuple[str, str, ModuleType], ...] = (
    ("timm.models.vision_transformer", "VisionTransformer", vision_transformer),
    ("timm.models.swin_transformer", "SwinTransformer", swin_transformer),
)


def family_of(model: nn.Module) -> ModuleType:
    """Return the module with ``read`` and ``convert`` of a model's family.

    Raises:
        TypeError: there is none.
    """
    for home, name, family in _FAMILIES:
        # a subclass may compute something else
        if type(model).__module__ == home and type(model).__name__ == name:
            return family
    raise TypeError(
        "model must be timm's VisionTransformer (ViT, DeiT, DINOv2) or SwinTransformer, not a subclass of it and not patched, "
        f"got {type(model).__module__}.{type(model).__name__}"
    )


def read(model: nn.Module) -> FloatNetwork:
    """Describe a model.

    Raises:
        TypeError: it is of no known family.
        ValueError: a part has no integer form; the message names it.
    """
    plan: FloatNetwork = family_of(model).read(model)
    return plan
