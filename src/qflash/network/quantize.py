"""Quantise a whole network: :func:`quantize_model`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import nn

from ..recipe import Recipe, resolve_recipe
from . import swin_transformer, vision_transformer
from .calibration import check_method, make_observers, observing, progress_bar
from .execution import check_images
from .mixed import keep_in_float
from .models import IntegerNetwork

_FAMILIES: tuple[tuple[str, str, ModuleType], ...] = (
    ("timm.models.vision_transformer", "VisionTransformer", vision_transformer),
    ("timm.models.swin_transformer", "SwinTransformer", swin_transformer),
)


def _family(model: nn.Module) -> ModuleType:
    for home, name, family in _FAMILIES:
        # a subclass may compute something else
        if type(model).__module__ == home and type(model).__name__ == name:
            return family
    raise TypeError(
        "model must be timm's VisionTransformer (ViT, DeiT, DINOv2) or SwinTransformer, not a subclass of it and not patched, "
        f"got {type(model).__module__}.{type(model).__name__}"
    )


def _statistics(model: Any, mean: Sequence[float] | None, std: Sequence[float] | None) -> tuple[list[float], list[float]]:
    config = getattr(model, "pretrained_cfg", None) or {}
    channels = model.patch_embed.proj.in_channels
    found = []
    for name, given in (("mean", mean), ("std", std)):
        values = config.get(name) if given is None else given
        if values is None:
            raise ValueError(f"{name} must be given: the model's pretrained_cfg has none")
        numbers = [float(x) for x in values]
        if len(numbers) != channels or (name == "std" and min(numbers) <= 0):
            raise ValueError(f"{name} must be {channels} numbers{' above 0' if name == 'std' else ''}, got {numbers}")
        found.append(numbers)
    return found[0], found[1]


def quantize_model(
    model: nn.Module,
    calibration_batches: Iterable[Any],
    recipe: Recipe | str | None = None,
    *,
    method: str = "minmax",
    percentile: float = 99.99,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    keep_float: Sequence[str] = (),
    progress: bool = True,
) -> IntegerNetwork:
    """Quantise a vision transformer to integers, weights and activations of 8 bits, after training.

    The result takes uint8 images and returns int32 logits (times ``output_scale``); nothing between is a float. Static scales
    are found on the calibration images. ``docs/integer_network.md`` says what is computed and what is folded away.

    Args:
        model: timm's ``VisionTransformer`` (ViT, DeiT, DINOv2) or ``SwinTransformer``, float, in eval mode. It is not changed.
        calibration_batches: uint8 images (batch, channels, height, width), 0 to 255, or tuples that begin with them as a data
            loader gives; 32 to 64 images are enough. The model runs on one at a time, so that the same images give the same
            network however they are divided into batches.
        recipe: of attention (exponential, probabilities, row sum); scales are static whatever it says of granularity.
        method: how a channel's range is found: ``"minmax"``, ``"percentile"`` or ``"mse"``. Vision transformers have a few
            massive activations that carry the result: clipping them, as the last two do, mostly costs accuracy. They look at up
            to 4096 tokens of each tensor.
        percentile: for that method, above 50 and at most 100.
        mean, std: of the image channels, of pixels in [0, 1]; the model's ``pretrained_cfg`` if None.
        keep_float: parts that stay in floating point, to find what costs accuracy: ``"blocks.3.attention"``,
            ``"blocks.3.mlp"`` (``"stages.1.0.mlp"`` of a Swin). Such a network cannot be saved.
        progress: show a bar.

    Raises:
        TypeError: of the model, or of images that are not uint8.
        ValueError: the model is in training mode or has a layer without an integer form here (all are named), there are no
            images, they have the wrong size, NaN turns up, or an argument is none of its choices.
    """
    family = _family(model)
    if model.training:
        raise ValueError("model must be in eval mode, call model.eval()")
    problems = list(family.unsupported(model))
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ValueError(f"model has parts without an integer form: {'; '.join(problems[:5])}{more}")
    check_method(method, percentile)
    choices = resolve_recipe(recipe)
    means, deviations = _statistics(model, mean, std)
    parameter = next(model.parameters())
    size = tuple(model.patch_embed.img_size)  # type: ignore[union-attr, arg-type]
    shift, factor = (
        torch.tensor(x, dtype=torch.float32, device=parameter.device).view(1, -1, 1, 1) for x in (means, deviations)
    )
    inputs, outputs = family.observed(model)
    observers = make_observers(inputs, outputs, method != "minmax")
    count = 0
    with torch.inference_mode(), progress_bar(progress, "images") as tick:
        for batch in calibration_batches:
            images = batch[0] if isinstance(batch, (tuple, list)) else batch
            check_images(images, len(means), size)
            with observing(model, observers):
                # one at a time: a float product of another number of rows may round otherwise
                for image in images:
                    x = (image[None].to(parameter.device).to(torch.float32) / 255 - shift) / factor
                    model(x.to(parameter.dtype))
                    tick(1)
            count += len(images)
    if not count:
        raise ValueError("calibration_batches must hold at least one image, got none")
    ranges = {name: observer.range(method, percentile) for name, observer in observers.items() if observer.count}
    network: IntegerNetwork = family.convert(model, ranges, means, deviations, choices)
    keep_in_float(network, model, keep_float)
    return network.to(parameter.device)
