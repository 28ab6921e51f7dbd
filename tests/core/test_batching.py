"""torch.vmap of the operators: one call, with the bits of the separate calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import qflash
from helpers import same_bits


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "qflash" in str(function):
            self.seen.append(str(function).split(".")[1])
        return function(*args, **(kwargs or {}))


def calls_of_vmap(
    function: Callable[..., torch.Tensor], args: tuple[torch.Tensor, ...], dims: tuple[int | None, ...]
) -> list[str]:
    """Compare vmap with the separate calls, and return which operators it called."""
    size = next(x.shape[dim] for x, dim in zip(args, dims, strict=True) if dim is not None)
    parts = [[x if dim is None else x.select(dim, i) for x, dim in zip(args, dims, strict=True)] for i in range(size)]
    want = torch.stack([function(*part) for part in parts])
    with Counting() as mode:
        out = torch.vmap(function, dims)(*args)
    assert same_bits(out, want)
    return mode.seen


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


Q, K, V = drawn(3, 2, 4, 5, 8), drawn(3, 2, 4, 7, 8), drawn(3, 2, 4, 7, 6)
CASES: dict[str, tuple[tuple[torch.Tensor, ...], tuple[int | None, ...]]] = {
    "all": ((Q, K, V), (0, 0, 0)),
    "query": ((Q, K[0], V[0]), (0, None, None)),
    "key": ((Q[0], K, V[0]), (None, 0, None)),
    "other dimensions": ((Q.movedim(0, 2), K.movedim(0, 4), V.movedim(0, 1)), (2, 4, 1)),
    "mask of each": ((Q, K, V, drawn(3, 5, 7)), (0, 0, 0, 0)),
    "mask of each, and batch": ((Q, K, V, drawn(3, 2, 1, 5, 7)), (0, 0, 0, 0)),
    "mask of all": ((Q, K, V, drawn(2, 4, 5, 7)), (0, 0, 0, None)),
    "mask alone": ((Q[0], K[0], V[0], drawn(3, 5, 7)), (None, None, None, 0)),
    "three dimensions": ((Q[:, 0], K[:, 0], V[:, 0]), (0, 0, 0)),
    "two dimensions": ((Q[:, 0, 0], K[:, 0, 0], V[:, 0, 0]), (0, 0, 0)),
}


@pytest.mark.parametrize("recipe", ["default", "accurate", "paper"])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("case", CASES)
def test_attention(case: str, backend: str, recipe: str) -> None:
    args, dims = CASES[case]

    def call(*tensors: torch.Tensor) -> torch.Tensor:
        return qflash.attention(*tensors, recipe=recipe, backend=backend)

    # a scale of a whole tensor is one call's own
    assert calls_of_vmap(call, args, dims) == ["attention"] * (3 if recipe == "paper" else 1)
    if case == "three dimensions" and recipe == "default":
        inner = tuple(x.movedim(1, 0) for x in args)
        assert calls_of_vmap(torch.vmap(call), inner, (1, 1, 1)) == ["attention"]


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize(
    "granularities", [("token", "head", "channel"), ("tensor", "token", "tensor"), ("head", "tensor", "head")]
)
@pytest.mark.parametrize("case", CASES)
def test_int8_attention(case: str, granularities: tuple[str, str, str], backend: str) -> None:
    args, dims = CASES[case]

    def quantized(*tensors: torch.Tensor, center: bool = False) -> list[qflash.QuantizedTensor]:
        return [
            qflash.quantize(x, granularity, center=center and x is tensors[2], backend=backend)
            for x, granularity in zip(tensors[:3], granularities, strict=True)
        ]

    def to_float(*tensors: torch.Tensor) -> torch.Tensor:
        mask = tensors[3] if len(tensors) > 3 else None
        out = qflash.int8_attention(*quantized(*tensors, center=True), mask, out_dtype=torch.float32, backend=backend)
        assert isinstance(out, torch.Tensor)
        return out

    def to_int8(*tensors: torch.Tensor) -> torch.Tensor:
        out = qflash.int8_attention(*quantized(*tensors), *tensors[3:], backend=backend)
        assert isinstance(out, qflash.QuantizedTensor)
        return out.dequantize()

    for function in (to_float, to_int8):
        assert calls_of_vmap(function, args, dims).count("int8_attention") == 1


@pytest.mark.parametrize("dims", [(0, 0), (None, 0), (0, None)])
def test_given_scales(dims: tuple[int | None, int | None]) -> None:
    x, scale = drawn(3, 2, 5, 8), drawn(3, 2, 1, 8).abs() + 0.1
    args = x if dims[0] is not None else x[0], scale if dims[1] is not None else scale[0]
    assert calls_of_vmap(lambda x, scale: qflash.quantize(x, scale=scale).values, args, dims) == ["quantize_with_scale"]
    assert calls_of_vmap(lambda x, scale: qflash.quantize(x, scale=scale).values, (x, scale[:, 0]), (0, 0)) == [
        "quantize_with_scale"
    ]

    def centred(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return torch.ops.qflash.quantize_with_scale(x, scale, "auto", 3 * scale)

    assert calls_of_vmap(centred, args, dims) == ["quantize_with_scale"]


def test_a_bias() -> None:
    assert calls_of_vmap(qflash.quantize_bias, (drawn(4, 3, 5),), (1,)) == ["quantize_bias"]
