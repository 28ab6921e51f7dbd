"""The paper's own arithmetic: against plain Python integers, and against what the authors' kernel returned."""

from __future__ import annotations

import json
import math
import pathlib
from typing import Any

import pytest
import torch

from helpers import exact_attention, make_inputs
from qflash import PAPER
from qflash import attention as qflash_attention
from qflash_lab.baselines import AUTHORS, METHODS, PRINTED
from qflash_lab.bench.metrics import sqnr
from qflash_lab.bench.workloads import get_workload, paper_inputs

# What the original kernel (github.com/EfficientCompLab/qflash at 46adca5) returned in Triton's interpreter.
RECORDED = json.loads((pathlib.Path(__file__).parent / "authors_outputs.json").read_text())


def numbers(shape: list[int], step: int, amplitude: float) -> torch.Tensor:
    """Return float16 values in [-4, 4] times an amplitude, the same on every machine."""
    numbered = torch.arange(math.prod(shape)) * step % 2003
    return (numbered.double() / 2002 * 8 - 4).mul(amplitude).half().view(shape)


@pytest.mark.parametrize("case", RECORDED["cases"], ids=lambda case: f"{case['shape']}-{case['amplitude']}")
def test_authors_is_what_their_kernel_returns(case: dict[str, Any]) -> None:
    shape, amplitude = case["shape"], case["amplitude"]
    query, key, value = numbers(shape, 7919, amplitude), numbers(shape, 6007, amplitude), numbers(shape, 4231, 1.0)
    out = AUTHORS.attention(query, key, value)
    assert torch.equal((out / (value.abs().amax() / 127)).round().to(torch.int8).flatten()[::7], torch.tensor(case["int8"]))


def printed_row(scores: list[int], values: list[list[int]], octave: float) -> list[int]:
    """One query of Algorithm 1 with Algorithm 2 and Equations 9 and 10, in Python's integers."""
    inverse = round(1 / octave)
    ratio = octave * 127
    shift = 8 - math.floor(math.log2(ratio))
    multiplier = round(ratio * 2**shift)

    def exp2(x: int) -> int:
        q = x * round(-octave * 2**32) >> 32
        return (((x + q * inverse) >> 1) + inverse) >> q

    highest, total, out = -(2**21), 0, [0] * len(values[0])
    for start in range(0, len(scores), 64):
        block = scores[start : start + 64]
        above = max([highest, *block])
        weights = [min(exp2(s - above) * multiplier >> shift, 127) for s in block]
        alpha = exp2(highest - above)
        total = total * alpha // inverse + sum(weights)
        for channel in range(len(out)):
            product = sum(w * row[channel] for w, row in zip(weights, values[start : start + 64], strict=True))
            out[channel] = out[channel] * alpha // inverse + product
        highest = above
    return [max(-128, min(127, o // total)) for o in out]


@pytest.mark.parametrize("amplitude", [0.3, 1.0, 2.0])
def test_printed_is_algorithm_1(amplitude: float) -> None:
    query, key, value = make_inputs(1, 1, 12, 150, 32, seed=3, amplitude=amplitude)
    steps = [float(x.abs().max() / 127) for x in (query, key, value)]
    q, k, v = ([[round(x / step) for x in row] for row in t[0, 0].tolist()] for t, step in zip((query, key, value), steps))  # noqa: B905
    octave = steps[0] * steps[1] * 32**-0.5 * math.log2(math.e)
    scores = [[sum(a * b for a, b in zip(left, right, strict=True)) for right in k] for left in q]
    expected = torch.tensor([printed_row(row, v, octave) for row in scores])
    out = PRINTED.attention(query, key, value)[0, 0] / steps[2]
    assert torch.equal(out.round().int(), expected.int())
    assert int(expected.abs().max()) > 3


def mean_sqnr(name: str, workload: str) -> float:
    found = []
    for seed in range(3):
        inputs = paper_inputs(get_workload(workload), 8, seed)
        found.append(sqnr(exact_attention(*inputs), METHODS[name].attention(*inputs)))
    return sum(found) / len(found)


def test_no_reading_gives_the_printed_pair() -> None:
    """The paper prints 32.50 dB (A2) and 31.02 dB (A7): rounding gives the first, flooring the second, none both."""
    pairs = {
        name: (mean_sqnr(name, "A2"), mean_sqnr(name, "A7")) for name in ("qflash-printed", "qflash-authors", "qflash-paper")
    }
    for first, second in pairs.values():
        assert abs(first - 32.50) > 0.5 or abs(second - 31.02) > 0.5
    assert abs(pairs["qflash-authors"][0] - 32.50) < 0.5
    assert abs(pairs["qflash-printed"][1] - 31.02) < 0.7


def test_printed_is_near_the_preset() -> None:
    """On the paper's inputs 1 / s is in the thousands, where PAPER's fixed point and the printed steps differ little."""
    query, key, value = paper_inputs(get_workload("A7"), 1)
    preset = qflash_attention(query, key, value, recipe=PAPER, backend="reference")
    exact = exact_attention(query, key, value)
    assert abs(sqnr(exact, PRINTED.attention(query, key, value)) - sqnr(exact, preset)) < 0.7


def test_scales_that_the_printed_constants_do_not_take() -> None:
    query, key, value = make_inputs(1, 1, 16, 16, 32, amplitude=1.0)
    for method in (PRINTED, AUTHORS):
        with pytest.raises(ZeroDivisionError, match=r"s = [\d.]+ octaves"):
            method.attention(query * 300, key * 300, value)
        with pytest.raises(OverflowError, match="must fit 32 bits"):
            method.attention(query * 1e-5, key * 1e-5, value)
    with pytest.raises(ZeroDivisionError, match="s = 0 octaves"):  # s_Q s_K underflows in float16
        AUTHORS.attention((query * 1e-3).half(), (key * 1e-3).half(), value.half())
    query[0, 0, 0, 0] = math.nan
    for method in (PRINTED, AUTHORS):
        assert bool(method.attention(query, key, value).isnan().all())
