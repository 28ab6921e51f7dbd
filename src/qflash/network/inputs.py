"""What a network takes: uint8 images, or ids of the tokens of texts.

``IntegerNetwork.image`` says which: (channels, height, width) of an image, or (tokens, vocabulary) of a text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..specification.texts import with_padding
from .execution import check_images

IMAGES = "images"
"""Name of a network's input."""
MOST_PIXELS = 1 << 26
"""Of an image; tables of tokens grow with them."""
MOST_TOKENS = 1 << 16
"""Of a text."""


def takes_ids(image: Sequence[int]) -> bool:
    """Tell whether a network takes ids."""
    return len(image) == 2


def check_sizes(image: Sequence[int]) -> None:
    """Require sizes of an image, or of a text.

    Raises:
        ValueError: they are something else.
    """
    whole = all(type(x) is int and x > 0 for x in image)
    if whole and len(image) == 2 and image[0] <= MOST_TOKENS and image[1] <= 1 << 24:
        return
    if not whole or len(image) != 3 or image[1] * image[2] > MOST_PIXELS:
        raise ValueError(
            f"image must be (channels, height, width) of at most {MOST_PIXELS} pixels, or (tokens, vocabulary) of at most "
            f"{MOST_TOKENS} tokens, got {tuple(image)}"
        )


def input_shape(image: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of what a network takes, without the batch."""
    return (image[0],) if takes_ids(image) else tuple(image)


def input_dtype(image: Sequence[int]) -> torch.dtype:
    """Return the type of what a network takes; ids may be int32, too."""
    return torch.int64 if takes_ids(image) else torch.uint8


def check_input(x: torch.Tensor, image: Sequence[int], *, shorter: bool = False) -> None:
    """Require what a network takes.

    Args:
        x: images or ids.
        image: see :class:`.graph.IntegerNetwork`.
        shorter: whether texts may have fewer tokens.

    Raises:
        TypeError, ValueError: it is something else; the message names it.
        RuntimeError: a tracer is at work that cannot take a network.
    """
    if not takes_ids(image):
        check_images(x, image[0], (image[1], image[2]))
        return
    if not isinstance(x, torch.Tensor) or x.dtype not in (torch.int32, torch.int64):
        found = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
        raise TypeError(f"ids must be an int32 or int64 tensor (batch, tokens), got {found}")
    if x.dim() != 2 or not (1 <= x.shape[1] <= image[0] if shorter else x.shape[1] == image[0]):
        raise ValueError(
            f"ids must have shape (batch, {image[0]}){' or fewer tokens' * shorter}, the tokens of the calibration texts, got "
            f"{tuple(x.shape)}"
        )


TEXT = ("input_ids", "attention_mask", "token_type_ids")
"""What tokenisers return."""


def text_ids(given: Mapping[str, Any], padded: bool) -> torch.Tensor:
    """Return ids, int32 or int64 (batch, tokens), with -1 where there is no token, of what a tokeniser returns.

    Args:
        given: tensors by the names of :data:`TEXT`, or None; other names are passed over.
        padded: whether a mask may have zeros.

    Raises:
        TypeError, ValueError: a tensor is no such, or says what an integer network does not take.
    """
    ids = given.get("input_ids")
    if not isinstance(ids, torch.Tensor) or ids.dtype not in (torch.int32, torch.int64) or ids.dim() != 2:
        found = f"{ids.dtype} {tuple(ids.shape)}" if isinstance(ids, torch.Tensor) else type(ids).__name__
        raise TypeError(f"input_ids must be an int32 or int64 tensor (batch, tokens), got {found}")
    for name in TEXT[1:]:
        x = given.get(name)
        if x is None:
            continue
        if not isinstance(x, torch.Tensor) or x.shape != ids.shape:
            found = str(tuple(x.shape)) if isinstance(x, torch.Tensor) else type(x).__name__
            raise ValueError(f"{name} must be a tensor of the shape of input_ids, {tuple(ids.shape)}, got {found}")
        if name == "attention_mask" and padded:
            ids = with_padding(ids, x.to(ids.device))
            continue
        usual = int(name == "attention_mask")
        if torch.compiler.is_compiling():
            raise ValueError(
                f"{name} must be left out under torch.compile: nothing can look there whether it is {usual} everywhere"
            )
        if bool((x != usual).any()):
            why = "of one segment"
            if usual:
                why = "without padding, since the first calibration batch had no mask that the model takes"
            raise ValueError(f"{name} must be {usual} everywhere: the integer network takes texts {why}")
    return ids
