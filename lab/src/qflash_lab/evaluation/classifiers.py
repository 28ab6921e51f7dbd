"""The models and images ``qflash-lab evaluate`` works on: timm models with an image folder, or the package's own."""

from __future__ import annotations

import dataclasses
import hashlib
import random
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qflash.optional_packages import install_hint

from . import small_models
from .small_models import MODELS

PAPER_MODELS = {
    "ViT-S": "vit_small_patch16_224.augreg_in21k_ft_in1k",
    "ViT-B": "vit_base_patch16_224.augreg2_in21k_ft_in1k",
    "DeiT-T": "deit_tiny_patch16_224.fb_in1k",
    "DeiT-S": "deit_small_patch16_224.fb_in1k",
    "DeiT-B": "deit_base_patch16_224.fb_in1k",
    "Swin-T": "swin_tiny_patch4_window7_224.ms_in1k",
    "Swin-S": "swin_small_patch4_window7_224.ms_in1k",
}
"""Table 5's models by the paper's short name, in its order. The paper names no checkpoints; these are the weights of
these architectures whose Top-1 in timm's own list is nearest to Table 5's FP32 accuracy (within 0.15 points)."""

SHIPPED = "shipped"
"""What stands for the images that come with a small model where a folder could stand."""

FASHION_PART = "the shipped part of Fashion-MNIST"
"""What tables call the test images that come with the package."""

_IMAGENET_CLASSES = 1000


@dataclasses.dataclass(frozen=True)
class Images:
    """Labelled images, all of a set or some of it.

    Attributes:
        dataset: ``dataset[i]`` is an image tensor and a label.
        ids: what the per-image results call image i: its path below the folder, or its place in the split.
        labels: the class of image i, as the model counts classes.
        classes: how many classes there are.
        identity: what distinguishes this set from another; part of a run's fingerprint.
    """

    dataset: Any
    ids: Sequence[str]
    labels: Sequence[int]
    classes: int
    identity: dict[str, Any]


class _Labelled:
    """An image folder with the model's class numbers in place of the folder's; items are (image, label)."""

    def __init__(self, folder: Any, labels: Sequence[int]) -> None:
        self.folder = folder
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.folder[index][0], self.labels[index]


def resolve_model_name(name: str) -> str:
    """Return timm's name (or the small model's) for a short name of the paper, a timm name or a small model.

    Raises:
        ValueError: no such model.
        ImportError: timm is not installed.
    """
    if name in MODELS:
        return name
    short = {key.lower(): value for key, value in PAPER_MODELS.items()}
    if name.lower() in short:
        return short[name.lower()]
    timm = require_timm()
    if not timm.is_model(name):
        close = timm.list_models(f"*{name}*")[:8] if name.strip("*") else []
        hint = f"; timm has for instance {', '.join(close)}" if close else ""
        raise ValueError(
            f"model must be one of {', '.join(PAPER_MODELS)}, {', '.join(MODELS)} or a name timm knows, got {name!r}{hint}"
        )
    return name


def require_timm() -> Any:
    """Return timm.

    Raises:
        ImportError: it is not installed; the message says how to.
    """
    try:
        import timm
    except ImportError as error:
        raise ImportError(f"image models need timm: {install_hint('timm')}") from error
    return timm


def load_classifier(
    name: str, data: str | Path, *, pretrained: bool = False, weights: Path | str | None = None
) -> tuple[nn.Module, Images]:
    """Build a model, fill in its weights and open the images it is to classify.

    Class folders whose number is the model's are taken in alphabetical order, as timm's training does. Fewer folders
    named by WordNet identifiers (``n01440764``) are found among ImageNet's 1000 classes by that name.

    Args:
        name: see :func:`resolve_model_name`.
        data: a folder with one folder of images per class, or a text file with a path and a class number in each line; for
            Fashion-MNIST's models a folder with its idx files; or :data:`SHIPPED`, the images that come with a small model.
        pretrained: download timm's weights for the model, or take them from its cache.
        weights: a safetensors file or torch checkpoint (loaded with ``weights_only``) instead.

    Returns:
        a float32 model on the CPU in eval mode, and the images, preprocessed as timm's configuration of the model says.

    Raises:
        ValueError: the arguments do not fit together, ``weights`` does not hold this model's parameters, there are no images,
            or the classes are not the model's.
        FileNotFoundError: ``weights`` or ``data`` is not there.
        ImportError: timm or scikit-learn is not installed.
    """
    full = resolve_model_name(name)
    if weights is not None:
        if pretrained:
            raise ValueError("weights and pretrained exclude each other; give one of them")
        if not Path(weights).is_file():
            raise FileNotFoundError(f"weights must be a file, got {weights}")
    if full in MODELS:
        if pretrained:
            raise ValueError(f"{name} comes with its weights; pretrained is for timm's models")
        images = _small_images(full, data)
        if weights is None:
            return small_models.load_model(full), images
        small = small_models.build_model(full)
        _fill(small, weights, None)
        return small.eval(), images
    if str(data) == SHIPPED:
        raise ValueError(
            f"data must be an image folder for {name}; only {', '.join(MODELS)} come with images "
            f"(a folder that is itself called {SHIPPED!r} can be given as ./{SHIPPED})"
        )
    if weights is None and not pretrained:
        raise ValueError(f"{name} has no weights of its own: give pretrained (--pretrained) or a weights file (--weights)")
    timm = require_timm()
    folder = _open_folder(data)
    synsets = _synset_labels(folder.classes)
    own_classes = pretrained or synsets is not None
    model = timm.create_model(full, pretrained=pretrained, **({} if own_classes else {"num_classes": len(folder.classes)}))
    if weights is not None:
        # original checkpoints (DeiT, Swin, augreg) name some parameters differently; each timm module knows its own
        _fill(model, weights, getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None))
    return model.eval(), _folder_images(folder, synsets, model)


def _fill(model: nn.Module, weights: Path | str, rename: Any) -> None:
    from timm.models import load_checkpoint

    try:
        load_checkpoint(model, str(weights), strict=True, filter_fn=rename, weights_only=True)
    except Exception as error:  # whatever the readers of two formats make of a file of another kind, or of another model's
        said = textwrap.shorten(f"{type(error).__name__}: {error}", 300)
        raise ValueError(f"weights must hold this model's parameters, got {weights}: {said}") from error


def _small_images(name: str, data: str | Path) -> Images:
    dataset = MODELS[name].dataset
    shipped = str(data) == SHIPPED
    if dataset == "digits" and not shipped:
        raise ValueError(f"{name} classifies scikit-learn's digits: data must be {SHIPPED!r}, got {str(data)!r}")
    split = small_models.load_images(dataset, None if shipped else Path(data))
    images, labels = split.images, split.labels
    digest = hashlib.sha256(images.numpy().tobytes() + labels.numpy().tobytes()).hexdigest()
    called = "digits" if dataset == "digits" else FASHION_PART if shipped else "Fashion-MNIST"
    return Images(
        dataset=torch.utils.data.TensorDataset(images, labels),
        ids=[f"held-out/{index}" for index in range(len(labels))],
        labels=labels.tolist(),
        classes=10,
        identity={"name": called, "images": len(labels), "sha256": digest},
    )


class _Listed(torch.utils.data.Dataset[tuple[Any, int]]):
    """Images that a text file lists, a path and a class number in each line; the interface of torchvision's ImageFolder.

    Attributes:
        root: the folder of the file, which paths begin at.
        samples: path and class of each image.
        classes: names of classes, which are their numbers, from 0 to the largest.
        transform: of an image.
    """

    def __init__(self, path: Path) -> None:
        self.root, self.samples, self.transform = path.parent, [], (lambda image: image)
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if not line.strip():
                continue
            name, _, label = line.strip().rpartition(" ")
            if not name.strip() or not label.isdecimal():
                raise ValueError(f"data: line {number} of {path.name} must be a path and a class number, got {line!r}")
            image = self.root / name.strip()
            if not image.is_file():
                raise FileNotFoundError(f"data: line {number} of {path.name} names {name.strip()!r}, which is not there")
            self.samples.append((str(image), int(label)))
        if not self.samples:
            raise ValueError(f"data: {path.name} lists no images")
        self.classes = [str(number) for number in range(1 + max(label for _, label in self.samples))]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        from torchvision.datasets.folder import default_loader

        path, label = self.samples[index]
        return self.transform(default_loader(path)), label


def _open_folder(data: str | Path) -> Any:
    from torchvision.datasets import ImageFolder

    if Path(data).is_file():
        return _Listed(Path(data))
    if not Path(data).is_dir():
        raise FileNotFoundError(f"data must be a folder with one folder of images per class, or a list of images, got {data}")
    try:
        return ImageFolder(str(data))
    except FileNotFoundError as error:
        raise ValueError(f"data must hold one folder of images per class, each with at least one image: {error}") from error


def _synset_labels(classes: Sequence[str]) -> dict[str, int] | None:
    """Map WordNet identifiers to ImageNet's class numbers; None where a folder is not named by one."""
    from timm.data import ImageNetInfo

    info = ImageNetInfo("imagenet-1k")
    numbers = {info.index_to_label_name(index): index for index in range(_IMAGENET_CLASSES)}
    return {name: numbers[name] for name in classes} if all(name in numbers for name in classes) else None


def _folder_images(folder: Any, synsets: dict[str, int] | None, model: Any) -> Images:
    from timm.data import create_transform, resolve_data_config

    classes = int(model.num_classes)
    if synsets is not None and classes == _IMAGENET_CLASSES:
        to_label = [synsets[name] for name in folder.classes]
    elif len(folder.classes) == classes or (isinstance(folder, _Listed) and len(folder.classes) < classes):
        to_label = list(range(len(folder.classes)))
    else:
        raise ValueError(
            f"data must have the model's {classes} classes, or folders named by ImageNet's WordNet identifiers, "
            f"got {len(folder.classes)} folders: {', '.join(folder.classes[:5])}{', ...' if len(folder.classes) > 5 else ''}"
        )
    config = resolve_data_config({}, model=model)
    folder.transform = create_transform(**config, is_training=False)
    root = Path(folder.root)
    ids = [Path(path).relative_to(root).as_posix() for path, _ in folder.samples]
    labels = [to_label[target] for _, target in folder.samples]
    # names, labels and sizes: reading every byte would take as long as a run
    digest = hashlib.sha256()
    for name, label, (path, _) in zip(ids, labels, folder.samples, strict=True):
        digest.update(f"{name}\0{label}\0{Path(path).stat().st_size}\n".encode())
    identity = {
        "name": root.resolve().name,
        "images": len(ids),
        "sha256": digest.hexdigest(),
        "preprocessing": {key: list(value) if isinstance(value, tuple) else value for key, value in config.items()},
    }
    return Images(_Labelled(folder, labels), ids, labels, classes, identity)


def draw_subset(labels: Sequence[int], count: int | None, seed: int = 0) -> list[int]:
    """Choose ``count`` images, as evenly over the classes as they allow; a smaller subset lies inside a larger one.

    Every class is shuffled, and so is the order of the classes; then one image of each class is taken in turn.

    Args:
        labels: the class of every image.
        count: how many; all of them if None.
        seed: seed of the shuffles.

    Returns:
        places in ``labels``, ascending.

    Raises:
        ValueError: ``count`` is not between 1 and the number of images.
    """
    if count is None:
        return list(range(len(labels)))
    if not 1 <= count <= len(labels):
        raise ValueError(f"subset must be between 1 and the {len(labels)} images there are, got {count}")
    rng = random.Random(seed)
    places: dict[int, list[int]] = {}
    for place, label in enumerate(labels):
        places.setdefault(label, []).append(place)
    classes = sorted(places)
    for label in classes:
        rng.shuffle(places[label])
    rng.shuffle(classes)

    def in_turn() -> Iterator[int]:
        for turn in range(max(map(len, places.values()))):
            for label in classes:
                if turn < len(places[label]):
                    yield places[label][turn]

    order = in_turn()
    return sorted(next(order) for _ in range(count))


def digest_weights(model: nn.Module) -> str:
    """Return the SHA-256 over the names, dtypes, shapes and bytes of a model's parameters and buffers."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
