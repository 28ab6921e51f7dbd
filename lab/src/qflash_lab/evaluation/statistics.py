"""How sure a Top-1 figure is, and whether two methods on the same images differ: intervals and an exact test."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.stats import binomtest

CONFIDENCE = 0.95
RESAMPLES = 10_000


def wilson_interval(right: int, count: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return Wilson's score interval of a proportion (Wilson, JASA 22, 1927).

    Unlike the normal interval it stays inside [0, 1] and is not empty when every image is right.

    Args:
        right: successes.
        count: trials, at least 1.
        confidence: coverage, between 0 and 1.

    Returns:
        lower and upper end, as proportions.

    Raises:
        ValueError: ``count`` is not positive, ``right`` not between 0 and ``count``, or ``confidence`` not in (0, 1).
    """
    if count < 1:
        raise ValueError(f"count must be at least 1, got {count}")
    if not 0 <= right <= count:
        raise ValueError(f"right must be between 0 and count={count}, got {right}")
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence must be between 0 and 1, got {confidence}")
    low, high = binomtest(right, count).proportion_ci(confidence, method="wilson")
    return float(low), float(high)


def _discordant(first: Sequence[bool], second: Sequence[bool]) -> tuple[int, int]:
    """Count the images only ``first`` and only ``second`` gets right."""
    if len(first) != len(second):
        raise ValueError(f"second must have as many images as first ({len(first)}), got {len(second)}")
    pairs = list(zip(first, second, strict=True))
    return sum(1 for a, b in pairs if a and not b), sum(1 for a, b in pairs if b and not a)


def mcnemar_exact(first: Sequence[bool], second: Sequence[bool]) -> float:
    """Return the two-sided p-value of McNemar's exact test that two methods are right equally often.

    Of the images that only one of them gets right, each is as likely to be either's under the null hypothesis: a
    sign test (McNemar, Psychometrika 12, 1947, in its binomial form).

    Args:
        first, second: whether each method is right, image by image, in the same order.

    Raises:
        ValueError: the lengths differ.
    """
    only_first, only_second = _discordant(first, second)
    discordant = only_first + only_second
    return float(binomtest(only_first, discordant).pvalue) if discordant else 1.0


def paired(first: Sequence[bool], second: Sequence[bool]) -> dict[str, Any]:
    """Return what rows say of two methods on the same images.

    Args:
        first, second: whether each method is right, image by image, in the same order.

    Returns:
        ``lost`` and ``gained``, the images that only the first and only the second gets right, and ``mcnemar_p``.
    """
    lost, gained = _discordant(first, second)
    return {"lost": lost, "gained": gained, "mcnemar_p": mcnemar_exact(first, second)}


def bootstrap_difference(
    first: Sequence[bool],
    second: Sequence[bool],
    seed: int = 0,
    resamples: int = RESAMPLES,
    confidence: float = CONFIDENCE,
) -> tuple[float, float]:
    """Return the percentile bootstrap interval of ``second``'s share of right answers minus ``first``'s.

    Images are drawn with replacement, both methods' answers together. An image contributes -1, 0 or 1, so that a
    resample is one draw from a multinomial distribution: the same law as drawing the images one by one, which is what
    ``scipy.stats.bootstrap`` does, in a memory of images times resamples.

    Args:
        first, second: whether each method is right, image by image, in the same order; not empty.
        seed: seed of the resampling.
        resamples: how many.
        confidence: coverage, between 0 and 1.

    Returns:
        lower and upper end, as differences of proportions.

    Raises:
        ValueError: the lengths differ or are 0.
    """
    lost, gained = _discordant(first, second)
    count = len(first)
    if count < 1:
        raise ValueError("first must hold at least 1 image, got none")
    shares = np.array([lost, gained, count - lost - gained]) / count
    drawn = np.random.default_rng(seed).multinomial(count, shares, size=resamples)
    differences = (drawn[:, 1] - drawn[:, 0]) / count
    low, high = np.quantile(differences, [0.5 - confidence / 2.0, 0.5 + confidence / 2.0])
    return float(low), float(high)
