"""What was stored with earlier releases still loads: pickles, exported programs, documented paths."""

from __future__ import annotations

import importlib
import pickle

import pytest
import timm
import torch

import qflash
from helpers import same_bits

SCHEMAS = {
    "quantize": "(Tensor x, str granularity, str backend) -> (Tensor, Tensor)",
    "quantize_centered": "(Tensor x, str granularity, str backend) -> (Tensor, Tensor, Tensor)",
    "quantize_with_scale": "(Tensor x, Tensor scale, str backend, Tensor? center=None) -> Tensor",
    "quantize_bias": "(Tensor bias) -> Tensor",
    "int8_attention": "(Tensor query, Tensor query_scale, Tensor key, Tensor key_scale, Tensor value, Tensor value_scale, "
    "Tensor? mask, bool is_causal, float scale, Tensor? output_scale, ScalarType out_dtype, str recipe, str backend, "
    "Tensor? value_offset=None) -> Tensor",
    "attention": "(Tensor query, Tensor key, Tensor value, Tensor? mask, bool is_causal, float scale, str recipe, str backend) "
    "-> Tensor",
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas_of_operators_stay(name: str) -> None:
    """An exported program names the operator and its arguments; one with a default may come behind them."""
    assert str(getattr(torch.ops.qflash, name).default._schema) == f"qflash::{name}{SCHEMAS[name]}"


def test_recipes_of_exported_programs_stay() -> None:
    """A program holds a recipe as its key."""
    stored = (
        '{"balance": false, "exponential": "quadratic", "key_block": 64, "key_granularity": "head", '
        '"normalization": "two_pass", "output": "accumulator", "probability_bits": 8, "probability_rounding": "nearest", '
        '"query_granularity": "token", "rotate": false, "smooth_key": true, "value_granularity": "channel"}'
    )
    assert qflash.Recipe.from_key(stored) == qflash.DEFAULT.replace(row_sum="rounded", smooth_value=False)
    for recipe in (qflash.PAPER, qflash.DEFAULT, qflash.ACCURATE):
        assert qflash.Recipe.from_key(recipe.key) == recipe


def moved(stored: bytes, now: str, before: str) -> bytes:
    """Return a pickle of protocol 0 with a module's earlier name, as an earlier release wrote it."""
    assert f"c{now}\n".encode() in stored
    return stored.replace(f"c{now}\n".encode(), f"c{before}\n".encode())


@torch.no_grad()
@pytest.mark.parametrize("name", ["qflash.patching", "qflash.integrations.timm"])
def test_pickles_of_patched_models_load(name: str) -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, num_classes=3).eval()
    images = torch.randn(2, 3, 32, 32)
    wanted = qflash.patch(model)(images)
    stored = moved(pickle.dumps(model, protocol=0), "qflash.integrations.patching", name)
    loaded = pickle.loads(stored)
    assert same_bits(loaded(images), wanted)
    assert qflash.unpatch(loaded) is loaded


def test_pickles_of_quantised_tensors_load() -> None:
    x = qflash.quantize(torch.randn(1, 2, 3, 4))
    stored = pickle.dumps(x, protocol=0)
    assert b"cqflash.quantization\nQuantizedTensor\n" in stored
    assert torch.equal(pickle.loads(stored).dequantize(), x.dequantize())


def test_pickles_of_recipes_load() -> None:
    stored = moved(pickle.dumps(qflash.ACCURATE, protocol=0), "qflash.specification.recipe", "qflash.recipe")
    assert pickle.loads(stored) == pickle.loads(pickle.dumps(qflash.ACCURATE)) == qflash.ACCURATE


@pytest.mark.parametrize(
    "path", ["qflash.patching", "qflash.quantization", "qflash.reference", "qflash.recipe", "qflash_lab.baselines"]
)
def test_documented_modules_stay(path: str) -> None:
    package, _, name = path.partition(".")
    module = importlib.import_module(path)
    assert getattr(importlib.import_module(package), name) is module
    if name == "patching":
        assert module.patch is qflash.patch and module.ADAPTERS
