"""qflash.attention where ``scaled_dot_product_attention`` is called: its arguments, broadcasting, autocast, causal biases."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy
import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import qflash
from helpers import make_inputs, same_bits
from qflash.reference_backend import Backend

SDPA = F.scaled_dot_product_attention


def draw(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in shapes]


SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...] | None, bool]] = {
    "batch of key": ((2, 4, 5, 8), (1, 4, 7, 8), (1, 4, 7, 8), None, False),
    "batch of value": ((2, 4, 5, 8), (2, 4, 7, 8), (1, 4, 7, 8), (5, 7), False),
    "no batch of key": ((2, 4, 5, 8), (4, 7, 8), (4, 7, 8), None, False),
    "one head": ((2, 4, 5, 8), (2, 1, 7, 8), (2, 1, 7, 8), (4, 5, 7), False),
    "one head of key": ((2, 4, 5, 8), (1, 1, 7, 8), (2, 4, 7, 8), None, False),
    "no heads": ((2, 4, 5, 8), (7, 8), (7, 8), None, False),
    "five dimensions": ((2, 4, 5, 8), (3, 2, 4, 7, 8), (2, 4, 7, 8), (3, 1, 1, 5, 7), False),
    "two batches": ((2, 3, 4, 5, 8), (2, 1, 4, 7, 8), (1, 3, 1, 7, 8), None, False),
    "groups": ((2, 4, 5, 8), (1, 2, 7, 8), (1, 2, 7, 8), None, True),
    "groups, one head of value": ((2, 4, 5, 8), (2, 2, 7, 8), (2, 1, 7, 8), None, True),
    "batch of query": ((1, 4, 5, 8), (3, 4, 7, 8), (3, 4, 7, 8), (3, 1, 5, 7), False),
    "heads of query": ((1, 1, 5, 8), (3, 4, 7, 8), (3, 4, 7, 8), (3, 4, 5, 7), False),
    "no batch of query": ((5, 8), (2, 3, 7, 8), (3, 7, 8), None, False),
}


@pytest.mark.parametrize("recipe", ["default", "accurate", "paper"])
@pytest.mark.parametrize("case", SHAPES)
def test_batch_and_heads_broadcast(case: str, recipe: str) -> None:
    *shapes, mask_shape, grouped = SHAPES[case]
    query, key, value = draw(*shapes)  # type: ignore[arg-type]
    mask = None if mask_shape is None else draw(mask_shape)[0]
    want = SDPA(query, key, value, mask, enable_gqa=grouped)
    results = []
    for backend in ("cpu", "reference"):
        for _ in range(2):
            out = qflash.attention(query, key, value, mask, enable_gqa=grouped, recipe=recipe, backend=backend)
            assert out.shape == want.shape and (out - want).norm() < (0.3 if recipe == "paper" else 0.03) * want.norm()
            results.append(out)
    assert all(same_bits(out, results[0]) for out in results)
    lead = want.shape[:-2]
    heads = lead[-1] if len(lead) else 1
    expanded = [
        x.expand(
            *lead[:-1], x.shape[-3] if grouped and x is not query and x.dim() > 2 and x.shape[-3] > 1 else heads, *x.shape[-2:]
        )
        for x in (query, key, value)
    ]
    if not grouped and recipe == "default":
        # as if each had been given its own copy; balance and a tensor's scale look at more than one head
        copies = [x.contiguous() for x in expanded]
        assert same_bits(qflash.attention(*copies, mask, recipe=recipe), results[0])
    tensors = qflash.quantize(query, "token"), qflash.quantize(key, "head"), qflash.quantize(value, "channel", center=True)
    for _ in range(2):
        out = qflash.int8_attention(*tensors, mask, enable_gqa=grouped, out_dtype=torch.float32)
        assert isinstance(out, torch.Tensor) and out.shape == want.shape and (out - want).norm() < 0.05 * want.norm()
        low = qflash.int8_attention(*tensors, mask, enable_gqa=grouped, output_scale=0.02)
        assert isinstance(low, qflash.QuantizedTensor) and (low.dequantize() - want).norm() < 0.05 * want.norm()


def test_what_is_expanded_is_quantised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = draw((6, 4, 5, 8), (1, 2, 7, 8), (1, 2, 7, 8))
    seen = []
    find = Backend.quantize

    def noting(backend: Backend, x: torch.Tensor, *options: Any) -> Any:
        seen.append(tuple(x.shape))
        return find(backend, x, *options)

    monkeypatch.setattr(Backend, "quantize", noting)
    qflash.attention(query, key, value, enable_gqa=True, backend="reference")
    # the second of each pair is what the first asks for
    assert seen == [(6, 4, 5, 8), (6, 2, 7, 8), (1, 2, 7, 8), (6, 2, 7, 8), (1, 2, 7, 8)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_followed(dtype: torch.dtype) -> None:
    query, key, value = make_inputs(1, 2, 5, 7, 16)
    want = qflash.attention(query.to(dtype), key.to(dtype), value.to(dtype))
    half = query.half(), key.half(), value.half()
    for _ in range(2):
        qflash.attention(query, key, value)
        qflash.attention(*half)
        with torch.autocast("cpu", dtype=dtype):
            for given in ((query, key, value), half, (query, key.half(), value.bfloat16()), (query.to(dtype), key, value)):
                out = qflash.attention(*given)
                assert out.dtype == dtype == SDPA(*given).dtype
            assert same_bits(qflash.attention(query, key, value), want)
            with torch.autocast("cpu", enabled=False):
                assert qflash.attention(query, key, value).dtype == torch.float32
    with pytest.raises(TypeError, match="key must have query's dtype"):
        qflash.attention(query, key.half(), value)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("number", [numpy.float16(0.25), numpy.float32(0.25), numpy.float64(0.25), numpy.int64(1), 1])
def test_numbers_of_numpy(number: Any) -> None:
    query, key, value = make_inputs(1, 2, 5, 7, 16)
    want = qflash.attention(query, key, value, scale=float(number))
    for _ in range(2):
        out = qflash.attention(query, key, value, scale=number, dropout_p=type(number)(0))
        assert same_bits(out, want)
    with pytest.raises(TypeError, match="scale must be a number"):
        qflash.attention(query, key, value, scale=numpy.bool_(True))  # type: ignore[arg-type]


@pytest.mark.parametrize(("queries", "keys"), [(5, 9), (9, 5), (6, 6)])
def test_causal_biases(queries: int, keys: int) -> None:
    query, key, value = make_inputs(2, 2, queries, keys, 16)
    int8 = qflash.quantize(query), qflash.quantize(key), qflash.quantize(value)
    with pytest.warns(UserWarning, match="NaN") if queries > keys else contextlib.nullcontext():
        lower = causal_lower_right(queries, keys)
    upper = causal_upper_left(queries, keys)
    right = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    for bias, given in (
        (upper, {"is_causal": True}),
        (lower, {"attn_mask": right} if queries != keys else {"is_causal": True}),
    ):
        assert same_bits(qflash.attention(query, key, value, bias), qflash.attention(query, key, value, **given))
        out = qflash.int8_attention(*int8, bias, out_dtype=torch.float32)
        assert same_bits(out, qflash.int8_attention(*int8, **given, out_dtype=torch.float32))  # type: ignore[arg-type]
        with qflash.sdpa(fallback="error") as report:
            out = SDPA(query, key, value, bias)
            assert same_bits(out, qflash.attention(query, key, value, **given))
        assert report.integer == 1
    with pytest.raises(ValueError, match="exclude each other"):
        qflash.attention(query, key, value, upper, is_causal=True)
    with pytest.raises(ValueError, match=f"causal bias of {queries} queries and {keys} keys, got 3 and 4"):
        qflash.attention(query, key, value, causal_upper_left(3, 4))
    with qflash.sdpa(fallback="quiet") as report:
        SDPA(query, key, value, causal_upper_left(3, 4))
    assert list(report.fallbacks) == [f"attn_mask must be a causal bias of {queries} queries and {keys} keys, got 3 and 4"]


def test_in_the_place_of_pytorchs_function(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer = torch.nn.TransformerDecoderLayer(32, 4, 64, batch_first=True).eval()
    x, memory = draw((2, 5, 32), (2, 9, 32))
    query, key, value = make_inputs(2, 4, 9, 7, 16)
    with torch.no_grad():
        want = layer(x, memory, tgt_is_causal=True, tgt_mask=torch.nn.Transformer.generate_square_subsequent_mask(5))
        monkeypatch.setattr(F, "scaled_dot_product_attention", qflash.attention)
        out = layer(x, memory, tgt_is_causal=True, tgt_mask=torch.nn.Transformer.generate_square_subsequent_mask(5))
        assert 0 < (out - want).norm() < 0.02 * want.norm()
        mask = torch.ones(9, 7, dtype=torch.bool).tril()
        by_name = F.scaled_dot_product_attention(
            query=query, key=key, value=value, attn_mask=mask, dropout_p=0.0, is_causal=False, scale=0.2, enable_gqa=False
        )
        by_place = F.scaled_dot_product_attention(query, key, value, mask, 0.0, False, scale=0.2)
    assert same_bits(by_name, by_place) and same_bits(by_name, qflash.attention(query, key, value, mask, scale=0.2))
