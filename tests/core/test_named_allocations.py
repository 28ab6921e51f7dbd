"""Every tensor that the package makes says its dtype and device: PyTorch's defaults are the caller's to set."""

from __future__ import annotations

import ast
import pathlib

import pytest

import qflash

_FACTORIES = frozenset((
    "arange", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones", "rand", "randint", "randn", "randperm",
    "scalar_tensor", "tensor", "zeros",
))  # fmt: skip
_FILES = sorted(pathlib.Path(qflash.__file__).parent.rglob("*.py"))


def _unnamed(source: str) -> list[int]:
    """Return the lines with a factory function of PyTorch's that is called without ``dtype`` or ``device``."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _FACTORIES):
            continue
        if isinstance(node.func.value, ast.Name) and node.func.value.id == "torch":
            named = {keyword.arg for keyword in node.keywords}
            if not {"dtype", "device"} <= named:
                lines.append(node.lineno)
    return lines


@pytest.mark.parametrize("file", _FILES, ids=lambda file: file.stem)
def test_allocations_name_dtype_and_device(file):
    assert _unnamed(file.read_text(encoding="utf-8")) == []


def test_the_search_finds_them():
    assert _unnamed("a = torch.empty(3)\nb = torch.ones(3, dtype=x)\nc = torch.tensor(1, dtype=x, device=y)") == [1, 2]
