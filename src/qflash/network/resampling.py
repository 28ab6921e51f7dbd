"""How a network comes to further image sizes: float models at a size, and what differs of networks that come of them."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from .capture.operations import UnsupportedError
from .graph import IntegerNetwork
from .modules import IntegerModule, Linear
from .outputs import copy_of
from .sizes import OtherSize, Size, own_copy, shown

_OF_TOKENS = {"position_words", "prefix_words", "scatter"}
"""Tensors of a linear layer that depend on how many tokens there are."""


def resized(images: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    """Return uint8 images in another size, bilinear with smoothing; anything that has the size as it is."""
    if tuple(images.shape[2:]) == tuple(size):
        return images
    found = nn.functional.interpolate(images.float(), tuple(size), mode="bilinear", antialias=True, align_corners=False)
    return found.round().clamp(0, 255).to(torch.uint8)


def _interpolates(module: nn.Module, args: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return args, {"interpolate_pos_encoding": True, **options}


def model_at(model: nn.Module, size: Size) -> nn.Module:
    """Return a float model as its library runs it on images of a size: itself, or a copy that resamples its positions.

    Models of transformers get ``interpolate_pos_encoding=True``, models of timm ``set_input_size``, unless they take any size
    by themselves or change their windows with it.

    Raises:
        UnsupportedError: a copy is needed and cannot be made.
    """
    change: Callable[[nn.Module], object] | None = None
    resize, own = getattr(model, "set_input_size", None), None
    if "interpolate_pos_encoding" in inspect.signature(model.forward).parameters:
        own = getattr(getattr(model, "config", None), "image_size", None)

        def change(made: nn.Module) -> object:
            return made.register_forward_pre_hook(_interpolates, with_kwargs=True)
    elif callable(resize) and not getattr(model, "dynamic_img_size", False):
        parameters = inspect.signature(resize).parameters
        own = getattr(getattr(model, "patch_embed", None), "img_size", None)
        if "img_size" in parameters and "window_size" not in parameters and own is not None:

            def change(made: Any) -> object:
                return made.set_input_size(img_size=size)

    own = (own, own) if isinstance(own, int) else None if own is None else tuple(own)
    if change is None or own == size:
        return model
    try:
        # timm writes to tensors of modules; the hook changes none
        made = copy.deepcopy(model) if callable(resize) else copy_of(model)
        if made is model:
            raise TypeError("its modules cannot be copied")
        change(made)
    except Exception as error:  # whatever foreign code raises
        raise UnsupportedError(f"its positions cannot be resampled: {error}") from error
    return made


def _constants(part: IntegerModule) -> dict[str, int]:
    return {name: getattr(part, name) for name in part.constants}


def check_same_nodes(network: IntegerNetwork, other: IntegerNetwork) -> None:
    """Require a network of another size to have the same operators.

    Raises:
        UnsupportedError: it has others; the message names the first.
    """
    for one, two in zip(network.nodes, other.nodes, strict=False):
        if one != two or type(network.part(one.name)) is not type(other.part(two.name)):
            raise UnsupportedError(f"{two.name} is a part of it there, in the place of {one.name} at the first size")
    if len(network.nodes) != len(other.nodes) or network.outputs != other.outputs:
        raise UnsupportedError("it has other operators there than at the first size")


def difference(network: IntegerNetwork, other: IntegerNetwork) -> OtherSize:
    """Return what a network of another size has that differs; all else of it is given up.

    Args:
        network: of the first size.
        other: with the same operators and scales.

    Raises:
        UnsupportedError: weights or scales differ.
    """
    if network.scales != other.scales or network.units != other.units:
        raise UnsupportedError(f"the model has other scales at {shown(other.image[1:])} pixels")
    own: dict[str, IntegerModule] = {}
    for node in network.nodes:
        base, part = network.part(node.name), other.part(node.name)
        tensors = base.tensors()
        same = {name for name, x in part.tensors().items() if name in tensors and torch.equal(x, tensors[name])}
        differs = part.tensors().keys() - same
        if not differs and part.sizes == base.sizes and _constants(part) == _constants(base):
            continue
        if isinstance(part, Linear) and not differs <= _OF_TOKENS:
            raise UnsupportedError(f"{node.name} has other weights at {shown(other.image[1:])} pixels")
        own[node.name] = own_copy(part)
        own[node.name]._non_persistent_buffers_set = same
    return OtherSize(other.image, own, other.quality)
