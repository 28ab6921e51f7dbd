"""The compiled CPU kernels return the reference's bits; where they cannot be compiled the back end says why."""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
import shutil
import subprocess
import sys

import pytest
import torch

import qflash
from helpers import GPU, INTERPRETER, LAYOUTS, draw_case, lay_out, make_inputs, same_bits
from qflash import backends, quantization, reference
from qflash.kernels import cpu
from qflash.recipe import PRESETS

CPU = torch.device("cpu")
LARGE = dataclasses.replace(GPU, work=40)
"""The GPU's tokens (up to 2049) and head counts, with few enough blocks for a CPU."""


@pytest.fixture(autouse=True)
def _needs_a_compiler(request: pytest.FixtureRequest) -> None:
    if "without" not in request.node.name and backends.cpu_missing():
        pytest.skip(str(backends.cpu_missing()))


@pytest.mark.parametrize("first", range(0, 600, 30))
def test_kernel_has_the_reference_bits(first: int) -> None:
    for number in range(first, first + 30):
        case = draw_case(number, INTERPRETER)
        arguments = case.arguments(CPU)
        assert same_bits(cpu.launch_attention(*arguments), reference.int8_attention(*arguments)), case


@pytest.mark.parametrize("first", range(2000, 2040, 5))
def test_long_rows_have_the_reference_bits(first: int) -> None:
    for number in range(first, first + 5):
        case = draw_case(number, LARGE)
        arguments = case.arguments(CPU)
        assert same_bits(cpu.launch_attention(*arguments), reference.int8_attention(*arguments)), case
