"""What cannot be exported is refused by name, whether the packages that write files are installed or not."""

from __future__ import annotations

import importlib.util
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

import qflash
from qflash.network.graph import IntegerNetwork, Node
from qflash.network.modules import Attention, LayerNorm, Linear, PatchEmbedding
from small_networks import draw


def small_network(recipe: qflash.Recipe = qflash.DEFAULT, side: int = 8) -> Any:
    """Return a network of one attention, all zeros."""
    parts: dict[str, tuple[Any, tuple[str, ...]]] = {
        "embed": (PatchEmbedding(3, (1, 1), 8, 0, 0), ("images",)),
        "norm": (LayerNorm(8, "int8"), ("embed",)),
        "qkv": (Linear(8, 24, "int8"), ("norm",)),
        "core": (Attention(1, 8, 0.125, recipe.key), ("qkv",)),
        "head": (Linear(8, 2, "int32"), ("core",)),
    }
    nodes = [Node(name, inputs) for name, (_, inputs) in parts.items()]
    return IntegerNetwork(nodes, {name: part for name, (part, _) in parts.items()}, (3, side, side), recipe, {"output": "head"})


@pytest.mark.parametrize("export", ["export_tosa", "export_onnx"])
def test_more_keys_than_32_bits_hold_are_refused(export: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match=r"core must have at most 65536 keys to be written as [TO][OSNAX]+, has 66049"):
        getattr(qflash, export)(small_network(side=257), tmp_path / "network")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("form", ["TOSA", "ONNX"])
@pytest.mark.parametrize(
    ("recipe", "field"),
    [
        (qflash.ACCURATE, "probability_bits 7 or 8 to be written as {}, got 15"),
        (qflash.PAPER, "normalization 'two_pass' to be written as {}, got 'online'"),
        (qflash.DEFAULT.replace(output="value_scale"), "output 'accumulator' to be written as {}, got 'value_scale'"),
    ],
)
def test_a_recipe_without_a_form_is_named(recipe: qflash.Recipe, field: str, form: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match=field.format(form)):
        getattr(qflash, f"export_{form.lower()}")(small_network(recipe), tmp_path / "network")
    assert not list(tmp_path.iterdir())


def test_float_parts_are_refused(made: Callable[[str], tuple[Any, Any]], tmp_path: pathlib.Path) -> None:
    model, _ = made("class token")
    network = qflash.quantize_model(model, [draw(model, 24)], keep_float=["blocks.1.mlp"], progress=False)
    with pytest.raises(ValueError, match=r"must hold integers only, but keeps in floating point: .*blocks\.1\.mlp\.fc1"):
        qflash.export_tosa(network, tmp_path / "network.tosa")


def test_wrong_arguments_are_named(tmp_path: pathlib.Path) -> None:
    network, path = small_network(), tmp_path / "network.tosa"
    with pytest.raises(TypeError, match="network must be what quantize_model returns, got Linear"):
        qflash.export_tosa(torch.nn.Linear(2, 2), path)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="path must be a string or a path, got int"):
        network.export_tosa(3)  # type: ignore[arg-type]
    for batch in (True, 1.0, None, "dynamic"):
        with pytest.raises(TypeError, match="batch must be an integer, got"):
            network.export_tosa(path, batch=batch)  # type: ignore[arg-type]
    for batch in (0, -1):
        with pytest.raises(ValueError, match=f"batch must be at least 1, got {batch}"):
            network.export_tosa(path, batch=batch)
    with pytest.raises(TypeError, match="int16 must be True or False, got 1"):
        network.export_tosa(path, int16=1)  # type: ignore[arg-type]


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r'export_tosa also needs tosa_serializer: pip install "?tosa-tools'):
        small_network().export_tosa(tmp_path / "network.tosa")
