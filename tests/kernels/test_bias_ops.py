"""The bounds behind :mod:`qflash.kernels.gluon.bias_ops`, which converts a bias without marks (docs/algorithm.md, step 3)."""

from __future__ import annotations

import math
import re

import pytest

from qflash.specification import fixed_point as fp

bias = pytest.importorskip("qflash.kernels.gluon.sm90.bias")
bias_ops = pytest.importorskip("qflash.kernels.gluon.bias_ops")

UNIT = math.log2(math.e) * 2**fp.BIAS_FRACTION_BITS
"""Of a fixed-point bias, a nat."""
CLAMP = 4096


def most_score() -> int:
    """Return the most that a score without a bias has in octaves, after the shift that a bias without marks asks for."""
    return max(fp.most_multiplier(channels, True) * (channels << 14) for channels in range(1, 513)) >> bias.LEAST_DROP.value


def test_a_clamped_key_has_no_weight_here_nor_in_the_specification() -> None:
    row_max = -most_score() - round(fp.MOST_BIAS_MAXIMUM * UNIT)
    for clamped in (-round(CLAMP * UNIT), -fp.BIAS_LIMIT):
        # P is 0 from 64 octaves below the row maximum on
        assert row_max - (most_score() + clamped) >= 64 << fp.BIAS_FRACTION_BITS


def test_sums_do_not_wrap() -> None:
    assert most_score() + round(CLAMP * UNIT) < fp.SCORE_POISON
    assert most_score() + round(fp.MOST_BIAS_MAXIMUM * UNIT) < fp.SCORE_POISON


def test_the_clamp_is_what_the_assembly_has() -> None:
    import torch

    for dtype, code in ((torch.float16, bias_ops.CLAMPED_F16.value), (torch.bfloat16, bias_ops.CLAMPED_BF16.value)):
        (word,) = re.findall(r"mov.b32 c, 0x([0-9A-F]{8});", code)
        halves = torch.tensor([int(word[:4], 16), int(word[4:], 16)]).to(torch.uint16).view(dtype)
        assert halves.tolist() == [-CLAMP, -CLAMP]
