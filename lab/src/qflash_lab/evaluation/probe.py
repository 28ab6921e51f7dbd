"""Two classifiers on the features of a network that was trained on something else: a linear probe and nearest neighbours.

Both are computed in closed form, so that a difference between two attention methods is not one of training.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

PENALTIES = tuple(10.0**power for power in range(-6, 2))
"""Ridge penalties that are tried, for features of variance 1 and a mean over the images."""
HELD_OUT = 0.1
"""Share of the training images that the penalty is chosen on."""
NEIGHBOURS = 20
TEMPERATURE = 0.07
"""Of the neighbours' votes: each counts exp(cosine / temperature)."""

_BLOCK = 1024
"""Images whose similarities to all training images are in memory at a time."""


@dataclasses.dataclass(frozen=True)
class LinearProbe:
    """A linear classifier.

    Attributes:
        mean, deviation: float64 (channels,), taken out of features beforehand.
        weight: float64 (channels, classes).
        bias: float64 (classes,).
        penalty: of :data:`PENALTIES`, the one chosen.
    """

    mean: torch.Tensor
    deviation: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor
    penalty: float

    def predict(self, features: torch.Tensor) -> torch.Tensor:
        """Return the classes (count,) int64 of features (count, channels)."""
        return (((features.double() - self.mean) / self.deviation) @ self.weight + self.bias).argmax(1)


def fit_probe(
    features: torch.Tensor, labels: torch.Tensor, classes: int, seed: int = 0, penalties: Sequence[float] = PENALTIES
) -> LinearProbe:
    """Fit ridge regression to one-hot labels, in float64.

    The penalty is the one with the most right answers on a tenth of the images, drawn with ``seed``; the probe is then
    fitted to all of them.

    Args:
        features: (count, channels), any float dtype.
        labels: int64 (count,).
        classes: how many there are.
        seed: of the draw.
        penalties: to choose from, ascending; the larger of two that are level.

    Raises:
        ValueError: fewer than two images, or features that are not finite.
    """
    count = len(features)
    if count < 2:
        raise ValueError(f"features must be of at least 2 images, got {count}")
    if not features.isfinite().all():
        raise ValueError("features must be finite")
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed), dtype=torch.int64, device="cpu").to(
        features.device
    )
    judged = order[: max(1, int(count * HELD_OUT))]
    rest = order[len(judged) :]
    chosen, most = penalties[0], -1
    for penalty, probe in zip(penalties, _ridge(features[rest], labels[rest], classes, penalties), strict=True):
        right = int((probe.predict(features[judged]) == labels[judged]).sum())
        if right >= most:
            chosen, most = penalty, right
    return _ridge(features, labels, classes, [chosen])[0]


def _ridge(features: torch.Tensor, labels: torch.Tensor, classes: int, penalties: Sequence[float]) -> list[LinearProbe]:
    x = features.double()
    mean = x.mean(0)
    # a channel that does not vary says nothing
    deviation = x.std(0, correction=0).clamp_min(1e-12)
    x = (x - mean) / deviation
    targets = torch.nn.functional.one_hot(labels, classes).double()
    bias = targets.mean(0)
    gram = x.T @ x / len(x)
    cross = x.T @ (targets - bias) / len(x)
    unit = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    return [LinearProbe(mean, deviation, torch.linalg.solve(gram + p * unit, cross), bias, p) for p in penalties]


def predict_neighbours(
    train: torch.Tensor, labels: torch.Tensor, features: torch.Tensor, classes: int, neighbours: int = NEIGHBOURS
) -> torch.Tensor:
    """Classify by the nearest training images in cosine, whose votes weigh more the nearer they are.

    Args:
        train: (images, channels), any float dtype.
        labels: int64 (images,).
        features: (count, channels).
        classes: how many there are.
        neighbours: how many vote; all if there are fewer.

    Returns:
        int64 (count,).
    """
    known = torch.nn.functional.normalize(train.float(), dim=1)
    found = []
    for part in features.split(_BLOCK):
        similar, places = (torch.nn.functional.normalize(part.float(), dim=1) @ known.T).topk(
            min(neighbours, len(known)), dim=1
        )
        votes = torch.zeros(len(part), classes, dtype=torch.float64, device=part.device)
        votes.scatter_add_(1, labels[places], (similar.double() / TEMPERATURE).exp())
        found.append(votes.argmax(1))
    return torch.cat(found)


def nearest(embeddings: torch.Tensor, count: int) -> torch.Tensor:
    """Return the places (rows, count) of the rows nearest to each row in cosine, itself left out, nearest first."""
    unit = torch.nn.functional.normalize(embeddings.double(), dim=1)
    similar = unit @ unit.T
    similar.fill_diagonal_(-torch.inf)
    return similar.topk(count, dim=1).indices
