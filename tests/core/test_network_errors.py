"""Operators of integer networks refuse what does not fit, with the same words whatever the back end and in shapes alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qflash.network import execution, operators  # noqa: F401 - register the operators

BACKENDS = ("reference", "cpu", "triton", "auto")


def ints(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


LINEAR: dict[str, Any] = {
    "x": ints(3, 8, dtype=torch.int8), "weight": ints(5, 8, dtype=torch.int8), "bias": ints(5), "multiplier": ints(5),
    "left": 1, "residual": None, "scatter": None, "out_dtype": torch.int16,
}  # fmt: skip
GELU = {name: x for name, x in LINEAR.items() if name not in ("residual", "scatter", "out_dtype")} | {
    "gelu_multiplier": ints(5), "gelu_offset": ints(5), "gelu_shift": 3,
}  # fmt: skip
NORM: dict[str, Any] = {
    "h": ints(3, 8, dtype=torch.int16), "epsilon": 1, "gain": ints(8), "offset": ints(8), "shift": 2, "gather": None,
    "out_dtype": torch.int8,
}  # fmt: skip
SILU = {name.replace("gelu", "silu"): x for name, x in GELU.items()}
SUM = {name: x for name, x in NORM.items() if name != "out_dtype"} | {
    "residual": None, "centred": False, "out_dtype": torch.int16,
}  # fmt: skip
NARROW = {name: NORM[name] for name in ("h",)} | {
    "multiplier": ints(8), "left": 1, "offset": ints(8), "gather": None, "out_dtype": torch.int8,
}  # fmt: skip
CALLS = {
    "int8_linear": LINEAR, "int8_linear_gelu": GELU, "int8_linear_silu": SILU, "integer_layer_norm": NORM, "integer_norm": SUM,
    "integer_narrow": NARROW,
}  # fmt: skip
MEAN: dict[str, Any] = {
    "x": ints(2, 3, 8, dtype=torch.int16), "multiplier": ints(8), "left": 1, "offset": ints(8), "out_dtype": torch.int8,
}  # fmt: skip
GATED: dict[str, Any] = {
    "x": ints(3, 8, dtype=torch.int16), "gate_multiplier": 5, "multiplier": ints(4), "offset": ints(4), "activation": "silu",
    "out_dtype": torch.int8,
}  # fmt: skip
LINEAR_GATED: dict[str, Any] = {
    "x": ints(3, 8, dtype=torch.int8), "weight": ints(8, 8, dtype=torch.int8), "bias": ints(8), "multiplier": ints(8),
    "left": 1, "gate_multiplier": 1, "product_multiplier": ints(4), "product_offset": ints(4), "activation": "silu",
    "out_dtype": torch.int8,
}  # fmt: skip
TOKENS = ints(2, 3, 8, dtype=torch.int8)
EMBEDDING: dict[str, Any] = {
    "images": ints(2, 2, 4, 6, dtype=torch.uint8), "patch_size": (2, 2), "weight": ints(5, 8, dtype=torch.int8),
    "bias": ints(5), "multiplier": ints(5), "left": 1, "position": ints(1, 6, 5, dtype=torch.int16),
    "prefix": ints(1, 2, 5, dtype=torch.int16),
}  # fmt: skip

WRONG = [
    ("int8_linear", "x", ints(3, 8), TypeError, "x must be int8, int16, got int32"),
    ("int8_linear_gelu", "x", ints(3, 8, dtype=torch.int16), TypeError, "x must be int8, got int16"),
    ("int8_linear", "x", ints(3, 7, dtype=torch.int8), ValueError, r"x must have the weight's 8 inputs.*\(3, 7\)"),
    ("int8_linear", "x", torch.tensor(1, dtype=torch.int8), ValueError, "x must have at least 1 dimensions"),
    ("int8_linear", "weight", ints(5, 8, dtype=torch.uint8), TypeError, "weight must be int8, got uint8"),
    ("int8_linear", "weight", ints(1, 5, 8, dtype=torch.int8), ValueError, "weight must be .outputs, inputs."),
    ("int8_linear", "weight", ints(5, 0, dtype=torch.int8), ValueError, "at least one input"),
    ("int8_linear", "bias", ints(4), ValueError, r"bias must have shape \(5,\), got \(4,\)"),
    ("int8_linear", "bias", torch.ones(5), TypeError, "bias must be int32, got float32"),
    ("int8_linear", "multiplier", ints(1, 5), ValueError, r"multiplier must have shape \(5,\)"),
    ("int8_linear", "left", 31, ValueError, "left must be 0 to 30, got 31"),
    ("int8_linear", "out_dtype", torch.float32, TypeError, "out_dtype must be int8, int16 or int32, got float32"),
    ("int8_linear", "residual", ints(3, 5), TypeError, "residual must be int16, got int32"),
    ("int8_linear", "residual", ints(1, 5, dtype=torch.int16), ValueError, r"residual must have the output's shape \(3, 5\)"),
    ("int8_linear_gelu", "x", ints(3, 9, dtype=torch.int8), ValueError, "x must have the weight's 8 inputs"),
    ("int8_linear_gelu", "gelu_multiplier", ints(6), ValueError, r"gelu_multiplier must have shape \(5,\)"),
    ("int8_linear_gelu", "gelu_offset", ints(5, dtype=torch.int64), TypeError, "gelu_offset must be int32, got int64"),
    ("int8_linear_gelu", "gelu_shift", -1, ValueError, "gelu_shift must be 0 to 30, got -1"),
    ("int8_linear_silu", "silu_offset", ints(6), ValueError, r"silu_offset must have shape \(5,\)"),
    ("integer_layer_norm", "h", ints(3, 8, dtype=torch.int8), TypeError, "h must be int16, got int8"),
    ("integer_layer_norm", "h", ints(3, 4097, dtype=torch.int16), ValueError, "h must have 1 to 4096 channels"),
    ("integer_layer_norm", "h", ints(3, 0, dtype=torch.int16), ValueError, "h must have 1 to 4096 channels"),
    ("integer_layer_norm", "gain", ints(9), ValueError, r"gain must have shape \(8,\)"),
    ("integer_layer_norm", "epsilon", (1 << 46) + 1, ValueError, "epsilon must be 0 to 70368744177664, got 70368744177665"),
    ("integer_layer_norm", "epsilon", -1, ValueError, "epsilon must be 0 to 70368744177664, got -1"),
    ("integer_layer_norm", "shift", 30, ValueError, "shift must be 1 to 29, got 30"),
    ("integer_layer_norm", "out_dtype", torch.uint8, TypeError, "out_dtype must be int8, int16 or int32, got uint8"),
    ("int8_linear", "scatter", ints(3), ValueError, r"scatter must hold a place for every token of x.*\(3,\) for \(3, 8\)"),
    ("integer_layer_norm", "gather", ints(3, 1), ValueError, r"gather must be .new tokens, pieces.*\(3, 1\) for \(3, 8\)"),
    ("gated", "x", ints(3, 8, dtype=torch.int8), TypeError, "x must be int16, got int8"),
    ("gated", "x", ints(3, 7, dtype=torch.int16), ValueError, r"x must have gates and as many values .*\(3, 7\)"),
    ("gated", "gate_multiplier", -1, ValueError, "gate_multiplier must be from 0 to 2147483647, got -1"),
    ("gated", "multiplier", ints(8), ValueError, r"multiplier must have shape \(4,\), got \(8,\)"),
    ("gated", "offset", ints(4, dtype=torch.int64), TypeError, "offset must be int32, got int64"),
    ("gated", "activation", "tanh", ValueError, "activation must be one of gelu, silu, relu, got 'tanh'"),
    ("gated", "out_dtype", torch.float32, TypeError, "out_dtype must be int8, int16 or int32, got float32"),
    ("int8_linear_gated", "x", ints(3, 8, dtype=torch.int16), TypeError, "x must be int8, got int16"),
    ("int8_linear_gated", "weight", ints(5, 8, dtype=torch.int8), ValueError, r"bias must have shape \(5,\)"),
    ("int8_linear_gated", "left", 31, ValueError, "left must be 0 to 30, got 31"),
    ("int8_linear_gated", "gate_multiplier", -1, ValueError, "gate_multiplier must be from 0 to 2147483647, got -1"),
    ("int8_linear_gated", "product_multiplier", ints(8), ValueError, r"product_multiplier must have shape \(4,\), got \(8,\)"),
    ("int8_linear_gated", "product_offset", ints(4, dtype=torch.int64), TypeError, "product_offset must be int32, got int64"),
    ("integer_norm", "h", ints(3, 8), TypeError, "h must be int16, got int32"),
    ("integer_norm", "epsilon", 1 << 46, ValueError, "epsilon must be below 70368744177664 where the mean stays"),
    ("integer_norm", "residual", ints(3, 8), TypeError, "residual must be int16, got int32"),
    ("integer_norm", "residual", ints(3, 7, dtype=torch.int16), ValueError, r"residual must have the output's shape \(3, 8\)"),
    ("integer_norm", "gain", ints(9), ValueError, r"gain must have shape \(8,\)"),
    ("integer_narrow", "h", ints(3, 8), TypeError, "h must be int16, got int32"),
    ("integer_narrow", "multiplier", ints(7), ValueError, r"multiplier must have shape \(8,\), got \(7,\)"),
    ("integer_narrow", "left", 31, ValueError, "left must be 0 to 30, got 31"),
    ("integer_narrow", "gather", ints(3, 1), ValueError, r"gather must be .new tokens, pieces.*\(3, 1\) for \(3, 8\)"),
    ("integer_narrow", "out_dtype", torch.float32, TypeError, "out_dtype must be int8, int16 or int32, got float32"),
    ("integer_mean", "x", ints(2, 3, 8), TypeError, "x must be int16, got int32"),
    ("integer_mean", "x", ints(2, 0, 8, dtype=torch.int16), ValueError, "at least one token, got shape .2, 0, 8."),
    ("integer_mean", "multiplier", ints(7), ValueError, r"multiplier must have shape \(8,\), got \(7,\)"),
    ("integer_mean", "left", 31, ValueError, "left must be 0 to 30, got 31"),
    ("integer_mean", "out_dtype", torch.float32, TypeError, "out_dtype must be int8, int16 or int32, got float32"),
    ("patch_embedding", "images", ints(2, 2, 4, 6), TypeError, "images must be uint8, got int32"),
    ("patch_embedding", "images", ints(2, 2, 4, 1, dtype=torch.uint8), ValueError, r"one patch of \(2, 2\), got .*4, 1"),
    ("patch_embedding", "images", ints(2, 2, 0, 6, dtype=torch.uint8), ValueError, r"one patch of \(2, 2\), got .*0, 6"),
    ("patch_embedding", "images", ints(2, 3, 4, 6, dtype=torch.uint8), ValueError, "weight must have the 12 inputs"),
    ("patch_embedding", "patch_size", (2, 0), ValueError, r"patch_size must be .height, width., at least 1 each, got \(2, 0\)"),
    ("patch_embedding", "bias", ints(6), ValueError, r"bias must have shape \(5,\)"),
    ("patch_embedding", "left", 31, ValueError, "left must be 0 to 30, got 31"),
    ("patch_embedding", "position", ints(1, 5, 5, dtype=torch.int16), ValueError, r"position must have shape \(1, 6, 5\)"),
    ("patch_embedding", "prefix", ints(2, 2, 5, dtype=torch.int16), ValueError, r"prefix must have shape \(1, tokens, 5\)"),
    ("patch_embedding", "prefix", ints(1, 2, 5), TypeError, "prefix must be int16, got int32"),
]


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("int8_linear", {"x": TOKENS, "scatter": ints(3)}, "scatter must hold numbers below the 3 tokens, each of them once"),
        ("int8_linear", {"x": TOKENS, "scatter": ints(3) * 3}, "scatter must hold numbers below the 3 tokens"),
        ("int8_linear", {"x": TOKENS, "scatter": -ints(3)}, "scatter must hold numbers below the 3 tokens"),
        ("int8_linear", {"x": TOKENS, "scatter": ints(2)}, "scatter must hold a place for every token"),
        ("integer_layer_norm", {"h": TOKENS.short(), "gather": ints(4, 1) * 3}, "gather must hold numbers below the 3 tokens"),
        ("integer_layer_norm", {"h": TOKENS.short(), "gather": -ints(4, 1)}, "gather must hold numbers below the 3 tokens"),
        ("integer_layer_norm", {"h": TOKENS.short(), "gather": ints(4)}, "gather must be at least|gather must have at least"),
        ("integer_layer_norm", {"h": TOKENS.short(), "gather": ints(4, 2)}, r"gain must have shape \(16,\)"),
        ("integer_norm", {"h": TOKENS.short(), "gather": ints(4, 1) * 3}, "gather must hold numbers below the 3 tokens"),
        ("integer_narrow", {"h": TOKENS.short(), "gather": -ints(4, 1)}, "gather must hold numbers below the 3 tokens"),
        ("integer_narrow", {"h": TOKENS.short(), "gather": ints(4, 2)}, r"multiplier must have shape \(16,\)"),
        ("integer_layer_norm", {"h": TOKENS.short(), "gather": ints(4, 600)}, "h must have 1 to 4096 channels of 600 tokens"),
    ],
)
def test_tokens_must_exist(name: str, changes: dict[str, Any], words: str) -> None:
    for backend in BACKENDS:
        with pytest.raises(ValueError, match=words):
            call(name, CALLS[name] | changes, backend)


def call(name: str, arguments: dict[str, Any], backend: str) -> torch.Tensor:
    return getattr(torch.ops.qflash, name)(*arguments.values(), backend)


@pytest.mark.parametrize(("name", "argument", "value", "error", "words"), WRONG, ids=lambda x: x if isinstance(x, str) else "")
def test_what_does_not_fit_is_refused(name: str, argument: str, value: Any, error: type[Exception], words: str) -> None:
    arguments = (
        {"patch_embedding": EMBEDDING, "integer_mean": MEAN, "gated": GATED, "int8_linear_gated": LINEAR_GATED} | CALLS
    )[name] | {argument: value}
    for backend in BACKENDS:
        with pytest.raises(error, match=words):
            call(name, arguments, backend)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = {name: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
        with pytest.raises(error, match=words):
            call(name, fakes, "auto")


def test_a_residual_is_for_int16() -> None:
    arguments = LINEAR | {"residual": ints(3, 5, dtype=torch.int16), "out_dtype": torch.int8}
    with pytest.raises(TypeError, match="out_dtype must be int16 with a residual, got int8"):
        call("int8_linear", arguments, "auto")
    arguments = SUM | {"residual": ints(3, 8, dtype=torch.int16), "out_dtype": torch.int8}
    with pytest.raises(TypeError, match="out_dtype must be int16 with a residual, got int8"):
        call("integer_norm", arguments, "auto")


@pytest.mark.parametrize("name", CALLS)
def test_unknown_back_ends_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="backend must be one of"):
        call(name, CALLS[name], "gpu")


@pytest.mark.parametrize("name", CALLS)
def test_other_devices_are_refused(name: str) -> None:
    first = next(iter(CALLS[name]))
    arguments = {key: x.to("meta") if key != first and isinstance(x, torch.Tensor) else x for key, x in CALLS[name].items()}
    with pytest.raises(ValueError, match="is on meta, the activations are on cpu"):
        call(name, arguments, "auto")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CALLS)
def test_empty_batches_and_single_rows_work(name: str, backend: str) -> None:
    arguments = CALLS[name]
    first = next(iter(arguments))
    rows = arguments[first]
    expected = call(name, arguments, "reference")
    for shape in ((0,), (2, 0), (0, 4)):
        got = call(name, arguments | {first: rows[:0].reshape(*shape, rows.shape[1])}, backend)
        assert got.shape == (*shape, expected.shape[1]) and got.dtype == expected.dtype
    assert torch.equal(call(name, arguments | {first: rows[0]}, backend), expected[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_images_have_empty_outputs(backend: str) -> None:
    none = {"images": EMBEDDING["images"][:0]}
    assert call("patch_embedding", EMBEDDING | none, backend).shape == (0, 2 + 6, 5)
    assert call("patch_embedding", EMBEDDING | none | {"prefix": None}, backend).shape == (0, 6, 5)
    got = call("integer_mean", MEAN | {"x": MEAN["x"][:0]}, backend)
    assert got.shape == (0, 8) and got.dtype == torch.int8
