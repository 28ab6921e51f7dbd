"""What ``qflash-lab evaluate`` says of a method: accuracy with intervals, against FP32 and others, and bit operations."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from qflash.integrations.patching import patch

from .outcome_store import Outcome
from .statistics import CONFIDENCE, bootstrap_difference, paired, wilson_interval

REFERENCE = "fp32"
"""The method every other is compared with; it is always evaluated."""

SIGNIFICANCE = 1.0 - CONFIDENCE


@torch.inference_mode()
def attention_products(model: nn.Module, shape: Sequence[int]) -> list[tuple[int, int]]:
    """Count the multiply-adds of both matrix products of every attention call for one image.

    The model runs once on meta tensors, which have shapes and no values.

    Args:
        model: a model that :func:`qflash.patch` knows; it is copied.
        shape: (channels, height, width) of an image.

    Returns:
        for each call those of Q Kᵀ (Equation 3) and those of P V.

    Raises:
        ValueError: the model holds no supported attention module.
    """
    calls: list[tuple[int, int]] = []

    def count(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **_: Any) -> torch.Tensor:
        scores = query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2]
        calls.append((scores * query.shape[3], scores * value.shape[3]))
        return query.new_empty((*query.shape[:3], value.shape[3]))

    twin = patch(copy.deepcopy(model).to("meta"), attention=count)
    twin(torch.empty((1, *shape), device="meta", dtype=next(twin.parameters()).dtype))
    return calls


def bit_operations(products: Sequence[tuple[int, int]], method: Any) -> tuple[float, float]:
    """Return the bit operations (BOPs) of a model's attention for one image, in 10^9, in two ways of counting.

    The usual one is multiply-adds times the widths of both operands, summed over both products. Table 5 gives no
    formula. Its figures are 192 H N² D per layer where both products are int8 and 384 H N² D where P and V have 16
    bits: Q Kᵀ counted twice and P V once, at the widths of their operands (DeiT-B prints 137.0 where this gives 137.3).
    Its ViT-S and ViT-B rows are half of what their heads (Table 1) give.

    Args:
        products: from :func:`attention_products`.
        method: declares the widths of its operands.

    Returns:
        as usually counted, and as the paper counts.
    """
    (query, key), (probability, value) = method.bits
    first = sum(count for count, _ in products) * query * key
    second = sum(count for _, count in products) * probability * value
    return (first + second) / 1e9, (2 * first + second) / 1e9


def summarise(
    method: Any, outcomes: Sequence[Outcome], exact: Sequence[Outcome], products: Sequence[tuple[int, int]], seed: int
) -> dict[str, Any]:
    """Summarise one method; shares and their intervals in percent, differences in points."""
    count = len(outcomes)
    right = [outcome.top1 for outcome in outcomes]
    reference = [outcome.top1 for outcome in exact]
    usual, papers = bit_operations(products, method)
    low, high = wilson_interval(sum(right), count)
    result: dict[str, Any] = {
        "method": method.name,
        "title": method.title,
        "integer_only": method.integer_only,
        "bits": [list(pair) for pair in method.bits],
        "gbops": usual,
        "gbops_as_in_paper": papers,
        "right": sum(right),
        "top1_percent": 100.0 * sum(right) / count,
        "top1_interval_percent": [100.0 * low, 100.0 * high],
        "top5_percent": 100.0 * sum(outcome.top5 for outcome in outcomes) / count,
        "not_finite": sum(not outcome.predictions for outcome in outcomes),
    }
    if method.name != REFERENCE:
        result["against_fp32"] = _comparison(reference, right, seed) | {
            "same_prediction_percent": 100.0
            * sum(a.predictions[:1] == b.predictions[:1] for a, b in zip(exact, outcomes, strict=True))
            / count,
            "loss_change": _loss_change(exact, outcomes),
        }
    return result


def _loss_change(first: Sequence[Outcome], second: Sequence[Outcome]) -> float | None:
    """Return the mean absolute difference of the losses, in nats, of images with finite logits under both; None without any."""
    changes = [abs(b.loss - a.loss) for a, b in zip(first, second, strict=True) if a.predictions and b.predictions]
    return math.fsum(changes) / len(changes) if changes else None


def _comparison(first: Sequence[bool], second: Sequence[bool], seed: int) -> dict[str, Any]:
    low, high = bootstrap_difference(first, second, seed)
    return {
        "difference_points": 100.0 * (sum(second) - sum(first)) / len(first),
        "difference_interval_points": [100.0 * low, 100.0 * high],
        **paired(first, second),
    }


def compare_outcomes(first: Sequence[Outcome], second: Sequence[Outcome], seed: int = 0) -> dict[str, Any]:
    """Compare the Top-1 of two methods on the same images.

    Args:
        first, second: outcomes of the same images in the same order.
        seed: seed of the bootstrap.

    Returns:
        ``difference_points`` (second minus first) with its bootstrap interval, how many images only the first
        (``lost``) and only the second (``gained``) gets right, and the p-value of McNemar's exact test.

    Raises:
        ValueError: the images are not the same.
    """
    if [o.index for o in first] != [o.index for o in second]:
        raise ValueError("second must hold first's images in the same order")
    return _comparison([o.top1 for o in first], [o.top1 for o in second], seed)


def integer_verdict(summaries: Sequence[dict[str, Any]], pairs: dict[tuple[str, str], dict[str, Any]]) -> dict[str, Any] | None:
    """Say which integer-only method is best, and which are not distinguishable from it by McNemar's test."""
    ours = [summary for summary in summaries if summary["integer_only"]]
    if not ours:
        return None
    most = max(summary["right"] for summary in ours)
    best = [summary["method"] for summary in ours if summary["right"] == most]
    tied = []
    for summary in ours:
        name = summary["method"]
        if name in best:
            continue
        pair = pairs.get((best[0], name)) or pairs[(name, best[0])]
        if pair["mcnemar_p"] >= SIGNIFICANCE:
            tied.append({"method": name, "mcnemar_p": pair["mcnemar_p"]})
    changes = [(change, s["method"]) for s in ours if (change := s["against_fp32"]["loss_change"]) is not None]
    return {
        "best": best,
        "top1_percent": next(s["top1_percent"] for s in ours if s["right"] == most),
        "tied": tied,
        "by_loss_change": [name for _, name in sorted(changes)],
    }
