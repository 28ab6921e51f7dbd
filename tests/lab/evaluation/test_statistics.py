"""Intervals and McNemar's test against other ways of computing them."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from qflash_lab.evaluation.statistics import bootstrap_difference, mcnemar_exact, wilson_interval


@pytest.mark.parametrize(("right", "count"), [(0, 10), (10, 10), (8, 10), (530, 540), (39_800, 50_000)])
def test_wilson_ends_solve_the_score_equation(right: int, count: int) -> None:
    # the ends are the p whose score statistic (share - p) / sqrt(p (1 - p) / count) is the normal quantile
    low, high = wilson_interval(right, count)
    share = right / count
    assert 0.0 <= low <= share <= high <= 1.0
    for end in {low, high} - {0.0, 1.0}:
        assert abs(share - end) / math.sqrt(end * (1 - end) / count) == pytest.approx(1.959963985, rel=1e-8)


def test_wilson_known_values() -> None:
    assert wilson_interval(8, 10) == pytest.approx((0.4901625, 0.9433178), abs=1e-6)
    assert wilson_interval(0, 10) == pytest.approx((0.0, 0.2775328), abs=1e-6)


def test_the_ends_of_all_and_none_are_exact() -> None:
    for count in range(1, 200):
        assert wilson_interval(count, count)[1] == 1.0 and wilson_interval(0, count)[0] == 0.0


def pair(lost: int, gained: int, both: int = 5) -> tuple[list[bool], list[bool]]:
    first = [True] * lost + [False] * gained + [True] * both + [False] * 3
    second = [False] * lost + [True] * gained + [True] * both + [False] * 3
    return first, second


@pytest.mark.parametrize(("lost", "gained"), [(0, 0), (1, 0), (0, 1), (1, 9), (9, 1), (4, 5), (5, 5), (30, 17)])
def test_mcnemar_is_the_two_sided_sign_test(lost: int, gained: int) -> None:
    trials = lost + gained
    # every outcome at least as far from the middle as the one seen
    far = sum(math.comb(trials, k) for k in range(trials + 1) if abs(2 * k - trials) >= abs(lost - gained))
    assert mcnemar_exact(*pair(lost, gained)) == pytest.approx(far / 2**trials, rel=1e-12)


def test_mcnemar_known_values_and_many_images() -> None:
    assert mcnemar_exact(*pair(1, 9)) == 22 / 1024
    # near the normal approximation with continuity correction: z = 399 / sqrt(20 400)
    expected = math.erfc(399 / math.sqrt(20_400) / math.sqrt(2))
    assert mcnemar_exact(*pair(10_400, 10_000)) == pytest.approx(expected, rel=1e-2)


def test_bootstrap_is_that_of_drawing_images() -> None:
    first, second = pair(30, 17, 200)
    random.Random(0).shuffle(first)
    random.Random(0).shuffle(second)
    low, high = bootstrap_difference(first, second, seed=1)
    assert (low, high) == bootstrap_difference(first, second, seed=1)
    assert (low, high) != bootstrap_difference(first, second, seed=2, resamples=101)
    difference = np.array(second, dtype=float) - np.array(first)
    drawn = np.random.default_rng(3).choice(difference, size=(4000, len(difference))).mean(axis=1)
    assert (low, high) == pytest.approx(tuple(np.quantile(drawn, [0.025, 0.975])), abs=0.008)
    assert low < difference.mean() < high
    assert bootstrap_difference(first, first) == (0.0, 0.0)
    assert bootstrap_difference([True], [False]) == (-1.0, -1.0)
    # the sign: second gains images that first loses
    assert bootstrap_difference([False] * 20, [True] * 20) == (1.0, 1.0)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="count"):
        wilson_interval(0, 0)
    with pytest.raises(ValueError, match="right"):
        wilson_interval(11, 10)
    for confidence in (0.0, 1.0, 95):
        with pytest.raises(ValueError, match="confidence"):
            wilson_interval(1, 10, confidence)
    for function in (mcnemar_exact, bootstrap_difference):
        with pytest.raises(ValueError, match="as many images"):
            function([True], [True, False])
    with pytest.raises(ValueError, match="at least 1"):
        bootstrap_difference([], [])
