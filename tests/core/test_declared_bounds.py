"""The ranges that the specification requires of its integers are the documented ones: a wider one would hide an overflow."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

import qflash
from helpers import make_inputs
from qflash.specification import layers as op
from qflash.specification import quantization, reference
from qflash.specification.attention_call import int8_call
from qflash.specification.fixed_point import Checker
from qflash.specification.recipe import Recipe

UNSIGNED_31, SIGNED_32 = (0, 2**31 - 1), (-(2**31), 2**31 - 1)


class Recorder(Checker):
    """Notes the ranges that are required, and requires them."""

    ranges: ClassVar[dict[str, tuple[int, int]]] = {}

    def __call__(self, name: str, x: torch.Tensor, low: int, high: int) -> torch.Tensor:
        self.ranges[name] = low, high
        return super().__call__(name, x, low, high)


@pytest.fixture
def ranges(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[int, int]]:
    monkeypatch.setattr(Recorder, "ranges", {})
    monkeypatch.setattr(reference, "Checker", Recorder)
    return Recorder.ranges


SUMS = {
    **dict.fromkeys(("query", "key", "value", "out"), (-128, 127)),
    "F": (0, 24), "S": (-(2**14) * 16, 2**14 * 16), "t": UNSIGNED_31,
}  # fmt: skip
NORMALISED = {
    "B": (0, 42), "x": (2**29, 2**30 + 1), "R": (2**30, 2**31 - 1), "e - 11": (0, 31), "O << (24 - B)": SIGNED_32,
    "mul(x, R, 32)": (0, 2**29), "m": (-(2**31), 2**30),
}  # fmt: skip
ATTENTION = {
    "default": {
        **SUMS, **NORMALISED, "M": UNSIGNED_31, "F - F'": (0, 8), "w": (0, 256 * 128 - 65), "l": (0, 2**24 - 1),
        "L": UNSIGNED_31, "L or l": UNSIGNED_31, "O": SIGNED_32,
        "8 times the sum of V": (-(2**30), 2**30 - 1), "twice the mean of V": (-256, 256),
        "O with the missing mass": SIGNED_32,
    },
    "accurate": {
        **SUMS, **NORMALISED, "A": (0, 2**12), "R of scores": UNSIGNED_31, "y": (-(2**30), 2**30), "P": (0, 2**15 - 1),
        "l": UNSIGNED_31, "O": (-(2**38), 2**38 - 1),
    },
    "paper": {
        **SUMS, **{name: NORMALISED[name] for name in ("R", "e - 11")}, "M": UNSIGNED_31, "F - F'": (0, 8), "P": (0, 127),
        "l": (0, 2**24 - 1), "O": SIGNED_32,
    },
}  # fmt: skip
"""For 16 channels and rows of one section; docs/algorithm.md, overflow."""


@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name: str, ranges: dict[str, tuple[int, int]]) -> None:
    recipe: Recipe = qflash.recipe.PRESETS[name]
    grains = recipe.query_granularity, recipe.key_granularity, recipe.value_granularity
    tensors = [qflash.quantize(x, grain) for x, grain in zip(make_inputs(1, 1, 5, 70, 16), grains, strict=True)]
    parts = [part for x in tensors for part in (x.values, x.scale.view((1,) * (4 - x.scale.dim()) + x.scale.shape))]
    for mask in (None, quantization.bias_to_fixed(torch.zeros(1, 1, 1, 70))):
        for scale, dtype in ((None, torch.float32), (torch.ones(1, 1, 1, 1), torch.int8)):
            call = int8_call(*parts, mask, False, 0.25, scale, dtype, recipe)
            reference.int8_attention(call, checked=True)
    assert ranges == {**ATTENTION[name], "z": (-(2**30) + 1, 2**30 - 1)}


def test_networks(ranges: dict[str, tuple[int, int]]) -> None:
    check, ones = Recorder(True), torch.ones(3, dtype=torch.int32)
    int8 = torch.ones(3, 3, dtype=torch.int8)
    op.rescale(op.integer_matmul(int8, int8), 9, ones, ones, check)
    x = torch.arange(-300, 300, 200, dtype=torch.int16)
    for name in op.ACTIVATIONS:
        op.activate(x.to(torch.int64), op.Activation(name, ones, ones, 3), check)
    op.layer_norm(x[None], 1, ones, ones, 3, torch.int8, check)
    assert ranges == {
        "acc": SIGNED_32, "(acc << left) + b": SIGNED_32, "rescale(acc)": (-(2**30), 2**30), "y": (-128, 127),
        "GELU: u": (-(2**30), 2**30), "GELU: r": (0, 4096), "GELU: z": (0, 2**15), "GELU: w": (0, 18977),
        "GELU: h": (0, 18588), "GELU: g": (-(2**15), 2**17 - 1), "SiLU: u": (-(2**30), 2**30), "SiLU: r": (0, 4096),
        "SiLU: z": (0, 2**15), "SiLU: w": (0, 32591), "SiLU: h": (-97, 121787), "SiLU: g": (-(2**15), 2**17 - 1),
        "f M + B": SIGNED_32, "h": (-(2**15), 2**15 - 1), "v": (2**28, 2**30 - 1),
        "S": (-(2**27), 2**27), "m": (-(2**17), 2**17), "V": (0, 2**47 - 1), "x": (2**29 - 64, 2**30),
        "f": (2**28 - 64, 2**30), "d": (-(2**28), 2**28 - 1), "d 2**l": SIGNED_32, "N": (-(2**26), 2**26),
        "mul(N, G, 28) + B": SIGNED_32,
    }  # fmt: skip
