"""Float models by name: of timm, of a hub, or from a folder; :func:`load_float_model`."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import json
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..optional_packages import require_packages
from .images import ImageTransform, check_size, image_transform

_CONFIG = "config.json"


@dataclasses.dataclass(frozen=True)
class FloatModel:
    """A float model, and what prepares its images.

    Attributes:
        name: that it was asked for.
        model: float32, in eval mode.
        transform: makes uint8 tensors of images.
        images: what ``transform`` was made of: timm's ``pretrained_cfg``, or a processor of transformers, as a dictionary.
        labels: names of the classes, or none.
    """

    name: str
    model: nn.Module
    transform: ImageTransform
    images: dict[str, Any]
    labels: tuple[str, ...]


def load_float_model(name: str, *, random_weights: bool = False, size: int | tuple[int, int] | None = None) -> FloatModel:
    """Return a float model by name.

    Args:
        name: one of timm's names; ``hf-hub:owner/name`` of a timm model; ``owner/name`` of a transformers model; or a folder
            with a ``config.json`` of transformers or timm, and safetensors.
        random_weights: draw weights (seed 0) and download none. A folder's configuration is used.
        size: pixels of each side, or (height, width), in place of the model's; positions are resampled.

    Raises:
        ValueError: there is no such model, or it has no vision tower, or cannot take the size.
        ImportError: timm or transformers is not installed.
        OSError: the model is not there, or the hub cannot be reached.
    """
    size = check_size(size)
    torch.manual_seed(0)
    folder = Path(name)
    if folder.is_dir():
        if not (folder / _CONFIG).is_file():
            raise ValueError(f"folder {name} must hold a {_CONFIG} of transformers or timm")
        about = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
        is_timm, source = "pretrained_cfg" in about, f"local-dir:{name}"
    else:
        is_timm, source = "/" not in name or name.startswith(("hf-hub:", "hf_hub:", "timm/")), name
        if name.startswith("timm/"):
            source = f"hf-hub:{name}"
    if is_timm:
        return _of_timm(name, source, random_weights, size)
    return _of_transformers(name, random_weights, size)


def _of_timm(name: str, source: str, random_weights: bool, size: tuple[int, int] | None) -> FloatModel:
    require_packages(f"model {name}", "timm")
    import timm

    if ":" not in source and not timm.is_model(source):
        near = difflib.get_close_matches(source, timm.list_models(), 3)
        raise ValueError(
            f"there is no model and no folder {name!r}; timm's names are alike: {', '.join(near) or 'none'}; write owner/name "
            "for transformers models of the hub"
        )
    try:
        model = timm.create_model(source, pretrained=not random_weights, **({} if size is None else {"img_size": size}))
    except TypeError as error:
        if size is None:
            raise
        raise ValueError(f"model {name} cannot be made for another size: {error}") from error
    config = dict(model.pretrained_cfg)
    labels = tuple(config.get("label_names") or ())
    if not labels and (subset := timm.data.infer_imagenet_subset(model)):
        info = timm.data.ImageNetInfo(subset)
        labels = tuple(info.index_to_description(number) for number in range(info.num_classes()))
    transform = image_transform(model, size)
    images = {key: x for key, x in config.items() if key in ("interpolation", "crop_pct", "crop_mode") and x is not None}
    images |= {"input_size": list(transform.size), "mean": list(transform.mean), "std": list(transform.std)}
    return FloatModel(name, model.float().eval(), transform, images, labels)


def _check_loaded(name: str, model: nn.Module, missing: Collection[str]) -> None:
    """Require weights that were read; warn of those that were drawn.

    Raises:
        ValueError: none was read.
    """
    if missing and set(missing) >= {each for each, _ in model.named_parameters()}:
        raise ValueError(f"{name} has no weights of a {type(model).__name__}: none of its names is there")
    if missing:
        some = ", ".join(sorted(missing)[:4])
        warnings.warn(f"{name} lacks {len(missing)} weights of {type(model).__name__}, which are random: {some}", stacklevel=4)


def _of_transformers(name: str, random_weights: bool, size: tuple[int, int] | None) -> FloatModel:
    require_packages(f"model {name}", "transformers")
    import transformers

    config = transformers.AutoConfig.from_pretrained(name)
    kinds = list(config.architectures or [])
    # the tower of images of a model of two; a classifier has its own
    tower = getattr(config, "vision_config", None) if kinds and kinds[0].endswith("Model") else None
    if tower is not None:
        kinds = [kind.removesuffix("Model").removesuffix("Vision") + "VisionModel" for kind in kinds]
    found = getattr(transformers, kinds[0], None) if kinds else None
    if found is None or found.main_input_name != "pixel_values":
        texts = "; quantize_model takes encoders of texts, the command takes images" if found is not None else ""
        raise ValueError(
            f"{_CONFIG} of {name} must name a vision model of transformers in architectures, got {config.architectures}{texts}"
        )
    if random_weights:
        model = found(config if tower is None else tower)
    else:
        model, loaded = found.from_pretrained(name, output_loading_info=True)
        _check_loaded(name, model, loaded["missing_keys"])
    processor = transformers.AutoImageProcessor.from_pretrained(name)
    transform = image_transform(processor, size)
    model = model.float().eval()
    if size is not None and "interpolate_pos_encoding" in inspect.signature(model.forward).parameters:
        model.forward = functools.partial(model.forward, interpolate_pos_encoding=True)
    names = getattr(config, "id2label", None) or {}
    labels = tuple(names[number] for number in sorted(names))
    if labels == tuple(f"LABEL_{number}" for number in range(len(labels))):
        labels = ()
    images = json.loads(processor.to_json_string())
    return FloatModel(name, model, transform, {**images, "qflash_size": size and list(size)}, labels)
