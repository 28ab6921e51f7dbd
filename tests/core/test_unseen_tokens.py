"""Tokens that no query may see: their content changes no bit."""

from __future__ import annotations

import itertools

import pytest
import torch

import qflash
from helpers import DEVICE, exact_attention, slow
from qflash.specification.attention_call import float_call
from qflash.specification.memory_format import as_four
from qflash.specification.recipe import DEFAULT, Recipe
from qflash.unseen_tokens import without_unseen

RECIPES = [qflash.PAPER, DEFAULT, qflash.ACCURATE, DEFAULT.replace(smooth_value=True, query_granularity="head")]
FILLS = (0.0, 30.0, 1000.0, 3e38, -6.5e4)
FORMS = ("row", "expanded", "heads", "minus infinity", "finfo.min", "two dimensions")
ROWS = ("rows", "rows of heads", "rows of one image", "causal rows", "rows of a bias", "rows of finfo.min", "far rows")


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


def draw_rows(form: str, batch: int, heads: int, queries: int, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a mask with a row of its own for each query, in contiguous memory; and which keys any row shows, as above."""
    generator = torch.Generator().manual_seed(7)
    shape = 1 if form == "rows of one image" else batch, heads if form in ("rows of heads", "far rows") else 1, queries, keys
    keep = torch.rand(*shape[:2], 1, keys, generator=generator) > 0.35
    keep[..., 2] = True
    # each key that is kept is seen by one row at least, and no row sees all
    turn = torch.randint(queries, (*shape[:2], 1, keys), generator=generator)
    mask = keep & ((torch.rand(shape, generator=generator) > 0.6) | (turn == torch.arange(queries)[:, None]))
    if form == "causal rows":
        mask = keep & torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    seen = mask.any(dim=2).expand(batch, heads, keys)
    if form == "rows of a bias":
        mask = torch.where(mask, torch.randn(shape, generator=generator), -torch.inf)
    elif form == "rows of finfo.min":
        mask = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
    elif form == "far rows":
        # what is 3000 nats below the largest of its row is hidden, wherever that lies
        base = torch.tensor([0.0, 1e30, -5000.0, 4000.0])[torch.arange(queries) % 4][:, None]
        mask = torch.where(mask, base, torch.where(base > 1e20, 0.0, base - 3000.0))
    return mask, seen


@pytest.mark.parametrize("form", [*FORMS, *ROWS])
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
    mask, seen = (draw_rows if form in ROWS else draw_mask)(form, batch, heads, queries, keys)
    assert not seen.all()
    hidden = ~seen.unflatten(1, (key_heads, -1)).any(dim=2)
    first = None
    for fill in FILLS[:3] if backend == "triton" else FILLS:
        k, v = (torch.where(hidden[..., None], factor * fill, x) for factor, x in ((1, key), (-1, value)))
        for _ in range(2):
            out = qflash.attention(query, k, v, mask, enable_gqa=True, recipe=recipe, backend=backend)
            first = out if first is None else first
            assert torch.equal(out, first), fill
    assert first is not None
    if form == "far rows":
        return
    exact = exact_attention(query, key, value, mask)
    assert float((first - exact).norm() / exact.norm()) < (0.3 if recipe == qflash.PAPER else 0.03)


@pytest.mark.parametrize("form", ["row", "rows", "rows of heads"])
@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_content_of_hidden_int8_tokens_changes_no_bit(backend: str, form: str) -> None:
    keys = 90
    query, key, value = draw(0, 2, 2, 6, 32), draw(1, 2, 2, keys, 32), draw(2, 2, 2, keys, 32)
    mask, seen = (draw_rows if form in ROWS else draw_mask)(form, 2, 2, 6, keys)
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


BACK_ENDS = ["reference", "auto", "triton"] if DEVICE.type == "cpu" else ["reference", "auto"]
OFTEN = [slow(name) if name == "triton" else name for name in BACK_ENDS]
"""For tests of so many calls that the interpreter takes long."""


def in_other_memory(mask: torch.Tensor, shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Return a mask of ``shape`` in several layouts; ``mask`` broadcasts to it."""
    whole = mask.expand(shape)
    wide = whole.new_zeros((*shape[:-1], shape[-1] + 7))
    wide[..., 3:-4] = whole
    return {
        "as given": mask,
        "expanded": whole,
        "contiguous": whole.contiguous(),
        "transposed": whole.mT.contiguous().mT,
        "heads last": whole.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
        "part of a wider one": wide[..., 3:-4],
        "batch expanded": whole[:1].contiguous().expand(shape),
    }


@pytest.mark.parametrize("kind", ["bool", "float", "fixed"])
@pytest.mark.parametrize("backend", OFTEN)
def test_memory_of_a_mask_changes_no_bit(backend: str, kind: str) -> None:
    # one mask for the whole batch, in which tokens 6 to 8 are hidden and loud
    batch, heads, tokens = 2, 2, 9
    query, key, value = (draw(seed, batch, heads, tokens, 16) for seed in range(3))
    key[:, :, 6:], value[:, :, 6:] = key[:, :, 6:] * 1000, value[:, :, 6:] * 1000
    seen = (torch.arange(tokens) < 6)[None, None, None]
    mask = seen if kind == "bool" else torch.where(seen, 0.25, -torch.inf)
    exact = exact_attention(query, key, value, mask)
    recipe = "accurate" if kind == "fixed" else None
    outputs = {}
    for name, each in in_other_memory(mask, (batch, heads, tokens, tokens)).items():
        if kind == "fixed":
            # scales of tokens, whose largest a hidden one would be
            q, k, v = (qflash.quantize(x, by) for x, by in ((query, "token"), (key, "token"), (value, "head")))
            out = qflash.int8_attention(
                q, k, v, qflash.quantize_bias(each), recipe=recipe, out_dtype=torch.float32, backend=backend
            )
        else:
            out = qflash.attention(query, key, value, each, backend=backend)
        assert isinstance(out, torch.Tensor)
        outputs[name] = out
        if kind != "fixed":
            assert float((out - exact).norm() / exact.norm()) < 0.02, name
    assert all(torch.equal(out, outputs["as given"]) for out in outputs.values())


@pytest.mark.parametrize("recipe", [DEFAULT, qflash.ACCURATE], ids=["default", "accurate"])
@pytest.mark.parametrize("backend", BACK_ENDS)
def test_a_repeated_call_looks_at_its_own_mask(backend: str, recipe: Recipe) -> None:
    query, key, value = (draw(seed, 1, 1, 70, 16) for seed in range(3))
    masks = [torch.ones(70, 70, dtype=torch.bool).tril() for _ in range(4)]
    masks[1][:, 50:] = False
    masks[3][:, :40] = False
    for mask in (*masks, *masks):
        loud = ~mask.any(dim=0)[:, None]
        k, v = torch.where(loud, 1e4, key), torch.where(loud, -1e4, value)
        out = qflash.attention(query, k, v, mask, recipe=recipe, backend=backend)
        assert torch.equal(out, qflash.attention(query, key, value, mask, recipe=recipe, backend="reference"))


def test_a_bias_that_hides_nothing_changes_nothing() -> None:
    # -100 nats, as Swin's windows have it, and a key that one row alone sees
    query, key, value = (draw(seed, 4, 2, 49, 32) for seed in range(3))
    bias = draw(3, 4, 2, 49, 49) - 100.0 * (torch.rand(4, 1, 49, 49, generator=torch.Generator().manual_seed(4)) < 0.5)
    mask = torch.zeros(49, 49, dtype=torch.bool)
    mask[:, 0] = mask[17] = True
    for each in (bias, mask):
        call = float_call(query, key, value, as_four(each), False, 32**-0.5, DEFAULT)
        assert without_unseen(call, qflash.quantize_bias) is call


def test_heads_of_a_group_see_together() -> None:
    # key head 0 is seen by query heads 0 and 1, each of which sees half
    query, key, value = draw(0, 1, 4, 5, 16), draw(1, 1, 2, 8, 16), draw(2, 1, 2, 8, 16)
    mask = torch.zeros(1, 4, 5, 8, dtype=torch.bool)
    mask[:, 0, :, :3], mask[:, 1, 2, 3:6], mask[:, 2:, :, :4] = True, True, True
    hidden = torch.zeros(1, 2, 8, 1, dtype=torch.bool)
    hidden[:, 0, 6:], hidden[:, 1, 4:] = True, True
    for backend in BACK_ENDS:
        options = {"enable_gqa": True, "backend": backend}
        out = qflash.attention(query, key, value, mask, **options)
        loud = (torch.where(hidden, 1e4, x) for x in (key, value))
        assert torch.equal(qflash.attention(query, *loud, mask, **options), out)
        # a token that one of the heads sees counts
        other = key.clone()
        other[:, 0, 4] *= 100
        assert not torch.equal(qflash.attention(query, other, value, mask, **options)[:, 0], out[:, 0])


@pytest.mark.parametrize("backend", OFTEN)
@pytest.mark.parametrize("expanded", [False, True])
def test_without_tokens_there_is_nothing_to_see(backend: str, expanded: bool) -> None:
    for batch, heads, queries, keys in itertools.product((0, 2), (0, 2), (0, 3), (0, 1, 9)):
        query, key, value = (torch.randn(batch, heads, tokens, 8) for tokens in (queries, keys, keys))
        ones = torch.ones(1, 1, 1, keys) if expanded else torch.ones(batch, heads, queries, keys)
        for mask in (None, ones.bool(), ones, ones - torch.inf):
            hides_all = mask is not None and mask.is_floating_point() and mask.numel() > 0 and bool(mask.isinf().all())
            mask = None if mask is None else mask.expand(batch, heads, queries, keys)
            out = qflash.attention(query, key, value, mask, backend=backend)
            assert out.shape == (batch, heads, queries, 8)
            assert bool(out.any()) == (out.numel() > 0 and keys > 0 and not hides_all)
            tensors = [qflash.quantize(x, "token", backend=backend) for x in (query, key)]
            fixed = qflash.quantize_bias(mask) if mask is not None and mask.is_floating_point() else mask
            got = qflash.int8_attention(
                *tensors, qflash.quantize(value, backend=backend), fixed, recipe="accurate", out_dtype=torch.float32,
                backend=backend,
            )  # fmt: skip
            assert isinstance(got, torch.Tensor) and got.shape == out.shape


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
