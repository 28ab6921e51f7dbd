"""A linear segmentation head on a vision transformer's patch tokens, in floating point and as part of an integer network."""

import argparse
import dataclasses

import torch
from torch import nn

import qflash
from qflash_lab.evaluation.small_models import calibration_images, load_digits_split, load_model

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--train", type=int, default=600, help="images that the head is fitted on")
parser.add_argument("--test", type=int, default=200, help="other images, to judge by")
given = parser.parse_args()

BACKGROUND = 10
"""The class of a patch without ink; others are the digit that the ink belongs to."""


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
    """Of predicted patches: the share that is right, and the mean intersection over union of classes."""

    right: float
    mean_iou: float

    @classmethod
    def of(cls, predicted: torch.Tensor, labels: torch.Tensor, classes: int) -> "Scores":
        both = torch.bincount(labels.flatten() * classes + predicted.flatten(), minlength=classes**2).view(classes, classes)
        hit = both.diagonal().double()
        union = both.sum(0) + both.sum(1) - hit
        return cls(float(hit.sum() / both.sum()), float((hit / union)[union > 0].mean()))

    def __str__(self) -> str:
        return f"{100 * self.right:.1f} % of patches right, mean IoU {100 * self.mean_iou:.1f} %"


def patch_labels(images: torch.Tensor, digits: torch.Tensor, patch: int) -> torch.Tensor:
    """Return what each patch of uint8 images (batch, 1, height, width) shows: (batch, patches)."""
    ink = nn.functional.avg_pool2d(images.float(), patch).flatten(1) > 80
    return torch.where(ink, digits[:, None], BACKGROUND)


classifier = load_model("digits-vit")
model = Dense(classifier.backbone, nn.Linear(192, BACKGROUND + 1)).eval()
split = load_digits_split()
train = classifier.pixels(split.train_images[: given.train])
test = classifier.pixels(split.images[: given.test])
train_labels = patch_labels(train, split.train_labels[: given.train], 4)
test_labels = patch_labels(test, split.labels[: given.test], 4)

with torch.inference_mode():
    features = torch.cat([model.tokens((batch / 255 - 0.5) / 0.5) for batch in train.split(100)])
model.head = fit(features.flatten(0, 1), train_labels.flatten(), BACKGROUND + 1)
with torch.inference_mode():
    in_floats = torch.cat([model((batch / 255 - 0.5) / 0.5) for batch in test.split(100)])

calibration = classifier.pixels(calibration_images("digits")).split(16)
statistics = {"mean": (0.5,), "std": (0.5,), "progress": False}
# integer features, to which any float head may be put: tokens are int32, dequantize makes floats of them
encoder = qflash.quantize_model(model, calibration, outputs=Dense.tokens, **statistics)
with torch.inference_mode():
    float_head = torch.cat([model.head(encoder.dequantize(encoder(batch))) for batch in test.split(100)])
# the head as well in integers: from uint8 pixels to int32 logits of every patch
network = qflash.quantize_model(model, calibration, **statistics)
in_integers = torch.cat([network(batch) for batch in test.split(100)])

for name, logits in (
    ("float features, float head", in_floats),
    ("integer features, float head", float_head),
    ("integer features, integer head", in_integers),
):
    print(f"{name}: {Scores.of(logits.argmax(-1), test_labels, BACKGROUND + 1)}")
