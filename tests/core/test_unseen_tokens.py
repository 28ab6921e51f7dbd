"""Tokens that no query may see: their content changes no bit."""

from __future__ import annotations

import pytest
import torch

import qflash
from helpers import exact_attention
from qflash.recipe import DEFAULT, Recipe

RECIPES = [qflash.PAPER, DEFAULT, qflash.ACCURATE, DEFAULT.replace(smooth_value=True, query_granularity="head")]
FILLS = (0.0, 30.0, 1000.0, 3e38, -6.5e4)
FORMS = ("row", "expanded", "heads", "minus infinity", "finfo.min", "two dimensions")


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def draw_mask(form: str, batch: int, heads: int, queries: int, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a key padding mask in one of its forms; and which keys take part, (batch, heads, keys)."""
    keep = torch.rand(batch, keys, generator=torch.Generator().manual_seed(9)) > 0.35
    keep[:, 2] = True
    if form == "two dimensions":
        return keep[0].expand(queries, keys), keep[:1, None].expand(batch, heads, keys)
    mask = keep[:, None, None]
    if form == "heads":
        each = torch.rand(batch, heads, keys, generator=torch.Generator().manual_seed(8)) > 0.35
        each[..., 2] = True
        return each[:, :, None], each
    if form == "expanded":
        mask = mask.expand(batch, heads, queries, keys)
    elif form == "minus infinity":
        mask = torch.where(mask, 0.5, -torch.inf).expand(batch, 1, queries, keys)
    elif form == "finfo.min":
        mask = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
    return mask, keep[:, None].expand(batch, heads, keys)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("recipe", RECIPES, ids=["paper", "default", "accurate", "smooth_value"])
@pytest.mark.parametrize("backend", ["reference", "auto", "triton"])
@pytest.mark.slow
def test_content_of_hidden_tokens_changes_no_bit(form: str, recipe: Recipe, backend: str) -> None:
    batch, heads, key_heads, queries, keys = (1, 2, 1, 5, 70) if backend == "triton" else (2, 4, 2, 7, 77)
    query, key, value = (
        draw(0, batch, heads, queries, 16),
        draw(1, batch, key_heads, keys, 16),
        draw(2, batch, key_heads, keys, 16),
    )
    mask, seen = draw_mask(form, batch, heads, queries, keys)
    hidden = ~seen.unflatten(1, (key_heads, -1)).any(dim=2)
    first = None
    for fill in FILLS[:3] if backend == "triton" else FILLS:
        k, v = (torch.where(hidden[..., None], factor * fill, x) for factor, x in ((1, key), (-1, value)))
        for _ in range(2):
            out = qflash.attention(query, k, v, mask, enable_gqa=True, recipe=recipe, backend=backend)
            first = out if first is None else first
            assert torch.equal(out, first), fill
    assert first is not None
    exact = exact_attention(query, key, value, mask)
    assert float((first - exact).norm() / exact.norm()) < (0.3 if recipe == qflash.PAPER else 0.03)


@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_content_of_hidden_int8_tokens_changes_no_bit(backend: str) -> None:
    keys = 90
    query, key, value = draw(0, 2, 2, 6, 32), draw(1, 2, 2, keys, 32), draw(2, 2, 2, keys, 32)
    mask, seen = draw_mask("row", 2, 2, 6, keys)
    q, k, v = qflash.quantize(query, "token"), qflash.quantize(key, "token"), qflash.quantize(value, "channel", center=True)
    outputs = []
    for fill in (0, 127, -128):
        values = [x.values.masked_fill(~seen[..., None], fill) for x in (k, v)]
        scale = k.scale.masked_fill(~seen[..., None], 1.0 + abs(fill))
        tensors = q, qflash.QuantizedTensor(values[0], scale), qflash.QuantizedTensor(values[1], v.scale, v.offset)
        for bias in (mask, qflash.quantize_bias(torch.where(mask, 0.0, -torch.inf))):
            out = qflash.int8_attention(*tensors, bias, backend=backend)
            assert isinstance(out, qflash.QuantizedTensor)
            outputs.append(out.values)
    # a bias goes another way to the exponents than a bool mask
    assert all(torch.equal(x, outputs[0]) for x in outputs[::2])
    assert all(torch.equal(x, outputs[1]) for x in outputs[1::2])


def test_keys_behind_the_last_query_do_not_count() -> None:
    query, key, value = draw(0, 1, 2, 70, 16), draw(1, 1, 2, 100, 16), draw(2, 1, 2, 100, 16)
    loud = [torch.cat((x[:, :, :70], x[:, :, 70:] * 1000), dim=2) for x in (key, value)]
    for backend in ("reference", "auto"):
        for recipe in RECIPES:
            out = qflash.attention(query, key, value, is_causal=True, recipe=recipe, backend=backend)
            for _ in range(2):
                assert torch.equal(qflash.attention(query, *loud, is_causal=True, recipe=recipe, backend=backend), out)


def test_where_nothing_is_seen_the_result_is_zero() -> None:
    query, key, value = draw(0, 2, 1, 3, 16), draw(1, 2, 1, 70, 16), draw(2, 2, 1, 70, 16)
    mask = torch.ones(2, 1, 1, 70, dtype=torch.bool)
    mask[0] = False
    out = qflash.attention(query, key, value, mask)
    assert bool((out[0] == 0).all()) and bool((out[1] != 0).any())


def test_a_query_has_a_scale_of_its_own() -> None:
    query, key, value = draw(0, 1, 2, 9, 16), draw(1, 1, 2, 70, 16), draw(2, 1, 2, 70, 16)
    loud = query.clone()
    loud[:, :, 4] = 1000
    one, other = (qflash.attention(x, key, value) for x in (query, loud))
    rest = [i for i in range(9) if i != 4]
    assert torch.equal(one[:, :, rest], other[:, :, rest])
