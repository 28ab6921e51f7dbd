"""Images as integer networks take them: :func:`image_transform` makes uint8 tensors of PIL images."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from ..optional_packages import require_packages


class ImageTransform:
    """Turns a PIL image into uint8 (channels, height, width): resized and cropped, not normalised.

    What it leaves to the network is ``(pixels / 255 - mean) / std``: pass ``mean`` and ``std`` to
    :func:`qflash.quantize_model`.

    Attributes:
        size: (channels, height, width) of what it returns.
        mean, std: of the channels, of pixels from 0 to 1.
    """

    def __init__(
        self, pixels: Callable[[Any], torch.Tensor], size: Sequence[int], mean: Sequence[float], std: Sequence[float]
    ) -> None:
        self._pixels = pixels
        self.size, self.mean, self.std = tuple(map(int, size)), tuple(map(float, mean)), tuple(map(float, std))

    def __call__(self, image: Any) -> torch.Tensor:
        """Return the pixels of a PIL image; of other modes than the network's (a palette, alpha, greys) it is converted.

        Raises:
            TypeError: it is something else.
            ValueError: it has more than 8 bits a channel.
        """
        if not is_image(image):
            raise TypeError(f"image must be of PIL (PIL.Image.open), got {type(image).__name__}")
        return self._pixels(_converted(image, "L" if self.size[0] == 1 else "RGB"))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(size={self.size}, mean={self.mean}, std={self.std})"


def is_image(x: Any) -> bool:
    """Tell whether something is an image of PIL, without importing it."""
    return any(each.__module__ == "PIL.Image" and each.__name__ == "Image" for each in type(x).__mro__)


def _converted(image: Any, mode: str) -> Any:
    """Return a PIL image in a mode of 8 bits.

    Raises:
        ValueError: it has more, which PIL cuts off at 255.
    """
    if image.mode == "F" or image.mode.startswith("I"):
        raise ValueError(
            f"image must have 8 bits a channel, has mode {image.mode}; of 16 bits "
            "Image.fromarray((numpy.asarray(image) / 257).astype('uint8')) keeps 8"
        )
    return image.convert(mode)


def check_size(size: int | Sequence[int] | None) -> tuple[int, int] | None:
    """Return (height, width) of a size, or None.

    Raises:
        ValueError: it is neither a positive number nor two.
    """
    if size is None:
        return None
    numbers = (size, size) if isinstance(size, int) else tuple(size) if isinstance(size, Sequence) else ()
    if len(numbers) != 2 or any(type(x) is not int or x < 1 for x in numbers):
        raise ValueError(f"size must be a number of pixels or (height, width), got {size!r}")
    return numbers


def image_transform(source: Any, size: int | Sequence[int] | None = None) -> ImageTransform:
    """Return a function from a PIL image to a uint8 tensor: a model's own preprocessing without the normalisation.

    Args:
        source: a model of timm, its ``pretrained_cfg``, or an image processor of transformers (``AutoImageProcessor``, what
            holds one, as ``CLIPProcessor``, or its dictionary). One that makes patches of images of any proportions (SigLIP 2
            NaFlex) stands for one size: the largest square that its ``max_num_patches`` allow.
        size: pixels of each side, or (height, width), in place of the source's; how much is cropped stays in proportion.

    Raises:
        TypeError: ``source`` is something else.
        ValueError: a processor does more than resizing, cropping, rescaling and normalising, or ``size`` is not a size.
        ImportError: timm, or torchvision, is not installed.

    Example::

        transform = qflash.image_transform(model)
        dataset = torchvision.datasets.ImageFolder(folder, transform)
        network = qflash.quantize_model(model, DataLoader(dataset, 32), mean=transform.mean, std=transform.std)
    """
    size = check_size(size)
    source = getattr(source, "image_processor", source)
    config = getattr(source, "pretrained_cfg", source)
    if hasattr(config, "to_dict") and hasattr(config, "architecture"):  # timm's PretrainedCfg
        config = config.to_dict()
    if isinstance(config, Mapping) and "input_size" in config:
        return _of_timm(source, config, size)
    if isinstance(source, Mapping) and isinstance(source.get("image_processor_type"), str):
        source, size = _processor_of(source), size or check_size(source.get("qflash_size"))
    if callable(source) and hasattr(source, "image_mean") and hasattr(source, "preprocess"):
        return _of_processor(source, size)
    advice = "; pass AutoImageProcessor.from_pretrained(...) of the same name" if hasattr(source, "config") else ""
    raise TypeError(
        "source must be a model of timm, its pretrained_cfg or an image processor of transformers, got "
        f"{type(source).__name__}{advice}"
    )


def _of_timm(model: Any, config: Mapping[str, Any], size: tuple[int, int] | None) -> ImageTransform:
    require_packages("image_transform", "timm")
    from timm.data import create_transform, resolve_data_config

    channels, *own = config["input_size"]
    # a model made for another size than its weights'
    made = getattr(getattr(model, "patch_embed", None), "img_size", None)
    height, width = size or made or own
    found = resolve_data_config(pretrained_cfg=dict(config), args={"input_size": (channels, height, width)}, verbose=False)
    return ImageTransform(create_transform(**found, normalize=False), found["input_size"], found["mean"], found["std"])


def _processor_of(config: Mapping[str, Any]) -> Any:
    """Return the processor of transformers that ``to_dict`` describes."""
    require_packages("image_transform", "transformers")
    import transformers

    kind: Any = getattr(transformers, config["image_processor_type"], None)
    if transformers.image_processing_base.ImageProcessingMixin not in getattr(kind, "__mro__", ()):
        raise ValueError(f"image_processor_type must be one of transformers, got {config['image_processor_type']!r}")
    return kind.from_dict({name: x for name, x in config.items() if name != "qflash_size"})


def _of_processor(processor: Any, size: tuple[int, int] | None) -> ImageTransform:
    if "spatial_shapes" in processor.model_input_names:
        return _of_patches(processor, size)
    options: dict[str, Any] = {"return_tensors": "pt"}
    if size is not None:
        options["size"] = {"height": size[0], "width": size[1]}
        if getattr(processor, "do_center_crop", False):
            shortest, crop = (_sides(getattr(processor, name)) for name in ("size", "crop_size"))
            options |= {"size": {"shortest_edge": round(max(size) * shortest / crop)}, "crop_size": options["size"]}

    def pixels(image: Any) -> torch.Tensor:
        found = torch.as_tensor(processor(image, do_rescale=False, do_normalize=False, **options)["pixel_values"][0])
        return found.round().clamp(0, 255).to(torch.uint8) if found.is_floating_point() else found.to(torch.uint8)

    probe = _probe()
    wanted, made = torch.as_tensor(processor(probe, **options)["pixel_values"][0]).float(), pixels(probe)
    return ImageTransform(pixels, made.shape, *_require_resizing(processor, made, wanted))


def _require_resizing(processor: Any, made: torch.Tensor, wanted: torch.Tensor) -> tuple[list[float], list[float]]:
    """Return the mean and the deviation of each channel that a processor normalises by, if that is all it does to pixels.

    Args:
        made: pixels of an image, uint8 (channels, height, width).
        wanted: what the processor makes of the image, of the same shape.

    Raises:
        ValueError: it does more.
    """
    means, deviations = _statistics(processor, len(made))
    mean, std = (torch.tensor(x, dtype=torch.float32, device="cpu").view(-1, 1, 1) for x in (means, deviations))
    # a processor that rescales before it resizes does not round to whole grey levels
    if wanted.shape != made.shape or bool((((made / 255 - mean) / std - wanted) * std).abs().max() > 1.5 / 255):
        raise ValueError(
            f"{type(processor).__name__} does more than resizing, cropping, rescaling and normalising; transform images "
            "yourself to uint8 (channels, height, width), and pass mean and std"
        )
    return means, deviations


def _statistics(processor: Any, channels: int) -> tuple[list[float], list[float]]:
    """Return the mean and the deviation of each channel, of pixels from 0 to 1, that a processor normalises by."""
    unit = 255.0 * (processor.rescale_factor if processor.do_rescale else 1.0)
    means, deviations = (
        [float(x) / unit for x in (getattr(processor, name) if processor.do_normalize else (plain,) * channels)]
        for name, plain in (("image_mean", 0.0), ("image_std", 1.0))
    )
    return means, deviations


def _of_patches(processor: Any, size: tuple[int, int] | None) -> ImageTransform:
    """Return what resizes images as a processor does that cuts them into patches."""
    import numpy as np

    patch, most = (getattr(processor, name, None) for name in ("patch_size", "max_num_patches"))
    if not (isinstance(patch, int) and isinstance(most, int) and patch > 0 and most > 0 and processor.do_resize):
        raise ValueError(
            f"{type(processor).__name__} must resize images to at most max_num_patches patches of patch_size, got "
            f"do_resize={getattr(processor, 'do_resize', None)}, max_num_patches={most}, patch_size={patch}; transform images "
            "yourself to uint8 (channels, height, width), and pass mean and std"
        )
    side = math.isqrt(most) * patch
    height, width = size or (side, side)
    if height % patch or width % patch:
        raise ValueError(f"size must be of multiples of {patch}, the side of a patch, got {height} x {width}")

    def resized(image: Any, height: int, width: int) -> torch.Tensor:
        found = image.resize((width, height), processor.resample)
        return torch.from_numpy(np.array(found)).permute(2, 0, 1).contiguous()

    probe = _probe()
    cut = processor(probe, return_tensors="pt")
    down, across = (int(x) for x in cut["spatial_shapes"][0])
    patches = torch.as_tensor(cut["pixel_values"][0]).float()[: down * across].reshape(down, across, patch, patch, -1)
    whole = patches.permute(4, 0, 2, 1, 3).flatten(3).flatten(1, 2)
    statistics = _require_resizing(processor, resized(probe, *whole.shape[1:]), whole)
    return ImageTransform(lambda image: resized(image, height, width), (3, height, width), *statistics)


def _sides(size: Any) -> int:
    """Return the shortest side that a processor's size asks for."""
    found = [getattr(size, name, None) or dict(size).get(name) for name in ("shortest_edge", "height", "width")]
    return min(int(x) for x in found if x)


def _probe() -> Any:
    """Return a PIL image of noise."""
    import numpy as np
    from PIL import Image

    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (300, 340, 3), dtype=np.uint8))


def pixels_of(images: Iterable[Any], transform: ImageTransform | None) -> torch.Tensor:
    """Return PIL images as uint8 (images, channels, height, width).

    Args:
        images: at least one.
        transform: that they go through; None takes them as they are.

    Raises:
        ValueError: without a transform they have several sizes; or one has more than 8 bits a channel.
    """
    if transform is not None:
        return torch.stack([transform(image) for image in images])
    import numpy as np

    found = [torch.from_numpy(np.array(_converted(image, "RGB"))).permute(2, 0, 1) for image in images]
    if len({x.shape for x in found}) > 1:
        raise ValueError(
            "images of PIL must have one size, or go through qflash.image_transform(processor); got "
            f"{sorted({tuple(x.shape[:0:-1]) for x in found})[:4]} (width, height)"
        )
    return torch.stack(found)
