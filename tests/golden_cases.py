"""The committed golden vectors, and what a back end makes of their inputs."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from types import ModuleType
from typing import Any

import pytest
import torch

from helpers import load_script, same_bits
from qflash.specification.reference import ARITHMETIC_VERSION

ROOT = pathlib.Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "golden"
CHECKER = GOLDEN / "checker.py"
FILES = ("attention", "floats", "networks", "activations", "rotary", "norms", "texts")

needs_golden = pytest.mark.skipif(not CHECKER.is_file(), reason="only the repository has the golden vectors")


@functools.cache
def make_golden() -> ModuleType:
    return load_script(ROOT / "scripts" / "make_golden.py")


@functools.cache
def cases_of(name: str) -> dict[str, Any]:
    version, cases = make_golden().read(GOLDEN / f"{name}.safetensors")
    assert version == ARITHMETIC_VERSION, "write the golden vectors again with scripts/make_golden.py"
    return cases


def differing(cases: dict[str, Any], backend: str, device: torch.device | str = "cpu") -> list[str]:
    """Name the cases whose outputs a back end changes."""
    found = []
    for name, case in cases.items():
        inputs = {role: x.to(device) for role, x in case.inputs.items()}
        got = make_golden().run(dataclasses.replace(case, inputs=inputs), backend)
        bits = case.parameters.get("output") == "bfloat16"
        for role, want in case.outputs.items():
            mine = got[role].cpu()
            if bits and role == "output":
                want, mine = want.view(torch.bfloat16).float(), mine.view(torch.bfloat16).float()
            if not same_bits(mine, want):
                found.append(f"{name}: {role}")
    return found


def require_equal(found: list[str], backend: str) -> None:
    assert not found, (
        f"{backend} gives other bits than golden/ in {len(found)} outputs, first {found[:5]}: a change of bits needs a new "
        "arithmetic version (docs/golden_vectors.md); otherwise it is a bug"
    )
