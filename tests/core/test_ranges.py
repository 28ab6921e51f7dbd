"""Ranges of numbers at the ends of their type and of what is not finite, the order of tokens, and residuals of moved ones."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import qflash
from helpers import same_bits
from qflash import backends, segments
from qflash.specification import layers as op
from qflash.specification import quantization
from qflash.specification.attention_call import Lengths, VarlenCall
from qflash.specification.recipe import ACCURATE, DEFAULT

BACKENDS = ["reference", *(() if backends.cpu_missing() else ("cpu",))]
END = torch.finfo(torch.float32).max
CENTRED = {
    "key": DEFAULT.replace(key_granularity="head"),
    "key a token": DEFAULT.replace(smooth_key=True, key_granularity="token"),
    "balance": ACCURATE.replace(smooth_key=True, rotate=False),
    "value": DEFAULT.replace(smooth_value=True),
    "rotated": ACCURATE.replace(smooth_key=True, rotate=True),
}


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def packed_and_separate(tensors: list[torch.Tensor], recipe: Any, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to two sequences of (tokens, heads, channels) at once, and to each."""
    query, key, value = tensors
    lengths = torch.tensor([0, 5, len(query)], dtype=torch.int32)
    packed = qflash.varlen_attention(
        query, key, value, lengths, lengths, 8, 8, recipe=recipe, backend=backend, scale=1e-3
    )  # fmt: skip
    each = [[x[first:last].transpose(0, 1)[None] for x in tensors] for first, last in ((0, 5), (5, len(query)))]
    out = [qflash.attention(*x, recipe=recipe, backend="reference", scale=1e-3)[0].transpose(0, 1) for x in each]
    return packed, torch.cat(out)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CENTRED)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_middle_of_a_range_whose_ends_have_no_sum(name: str, sign: float, backend: str) -> None:
    """Both ends above half of the largest float: their sum is infinite, their midrange is not."""
    query, key, value = (draw(seed, 13, 2, 8) for seed in range(3))
    key, value = (sign * END * (0.9 + 0.02 * x.clamp(-4, 4)) for x in (key, value))
    for tensors in ([query, key, value * 1e-30], [query, key * 1e-30, value]):
        packed, each = packed_and_separate(tensors, CENTRED[name], backend)
        assert same_bits(packed, each)
        assert each.isfinite().all()


@pytest.mark.parametrize("name", CENTRED)
def test_what_is_quantised_for_a_gpu_has_such_middles_too(name: str) -> None:
    query, key, value = (END * (0.9 + 0.02 * draw(seed, 13, 2, 8).clamp(-4, 4)) for seed in range(3))
    lengths = Lengths(*(torch.tensor([0, 5, 13], dtype=torch.int32),) * 2, 8, 8)
    call = VarlenCall(query, key, value, None, None, lengths, False, 1.0, torch.float32, CENTRED[name])
    found = segments.quantize(segments.prepare(call))
    assert found.scales is not None
    for scale, x in ((found.scales.key, found.key), (found.scales.value, found.value)):
        assert scale.isfinite().all()
        assert all(part.abs().amax() >= 126 for part in x.split([5, 8]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_middles_and_steps_next_to_the_largest_float(backend: str) -> None:
    x = torch.stack((END * (0.9 + 0.1 * torch.rand(9, generator=torch.Generator().manual_seed(0))),) * 2, dim=-1)
    x[:, 1] *= -1
    low, high = (end.double() for end in torch.aminmax(x, dim=0))
    middle, least = quantization.least_scale(low.float(), high.float())
    torch.testing.assert_close(middle.double(), low / 2 + high / 2, rtol=1e-6, atol=0)
    torch.testing.assert_close(least.double(), torch.maximum((high - low) / 253, middle.double().abs() / 2**21))
    centred = quantization.center_channels(x)
    torch.testing.assert_close(centred.double(), x.double() - (low / 2 + high / 2), rtol=1e-3, atol=float(END) * 1e-7)
    # ends of either sign, whose difference has no float either
    middle, least = quantization.least_scale(torch.tensor([-END]), torch.tensor([END]))
    assert middle.item() == 0 and least.item() == pytest.approx(END / 126.5, rel=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", CENTRED)
def test_what_is_not_finite_reaches_its_scale(name: str, special: float, backend: str) -> None:
    """As the least or the greatest, first or last of its channel, in the packed form as in the other."""
    for token in (0, 2, 4):
        for which in (1, 2):
            tensors = [draw(seed, 13, 2, 8).abs() + 1 for seed in range(3)]
            tensors[which] = tensors[which] * (-1.0 if token else 1.0)
            tensors[which][token, 1, 3] = special
            packed, each = packed_and_separate(tensors, CENTRED[name], backend)
            assert same_bits(packed, each)
            assert each[:5].isnan().any() and each[5:].isfinite().all()


def unstable(usual: Any) -> Any:
    """Return a sort that has equal elements in any order where nobody asks for theirs."""

    def sort(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("stable"):
            return usual(x, *args, **kwargs)
        dim = kwargs.get("dim", -1)
        back = usual(x.flip(dim), *args, **{**kwargs, "stable": True})
        return x.shape[dim] - 1 - back

    return sort


@pytest.mark.parametrize("granularity", ["head", "token"])
def test_hidden_tokens_become_copies_in_the_order_of_the_seen_ones(granularity: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Token i becomes the i-th of those that are seen, counted round: where a sort leaves the order open, too.

    Rows of more than 64 keys give what rounding took to the mean of the values, copies included.
    """
    monkeypatch.setattr(torch, "argsort", unstable(torch.argsort))
    recipe = DEFAULT.replace(key_granularity=granularity, value_granularity="channel")
    query, key, value = draw(0, 2, 2, 7, 8), draw(1, 2, 2, 100, 8), draw(2, 2, 2, 100, 8)
    mask = torch.rand(2, 1, 1, 100, generator=torch.Generator().manual_seed(3)) > 0.6
    copies = [x.clone() for x in (key, value)]
    for image in range(2):
        seen = mask[image, 0, 0].nonzero().flatten().tolist()
        for token in range(100):
            if token not in seen:
                for x, original in zip(copies, (key, value), strict=True):
                    x[image, :, token] = original[image, :, seen[token % len(seen)]]
    for backend in BACKENDS:
        got = qflash.attention(query, key, value, mask, recipe=recipe, backend=backend)
        # here every hidden token is a copy already
        full = mask.expand(2, 1, 7, 100).contiguous()
        want = qflash.attention(query, *copies, full, recipe=recipe, backend=backend)
        assert same_bits(got, want), backend


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_residual_comes_from_where_its_token_goes(backend: str) -> None:
    chance = torch.Generator().manual_seed(0)
    x = torch.randint(-128, 128, (3, 10, 12), generator=chance).to(torch.int8)
    weight = torch.randint(-127, 128, (9, 12), generator=chance).to(torch.int8)
    bias = torch.randint(-1000, 1000, (9,), generator=chance).to(torch.int32)
    multiplier = torch.full((9,), 1 << 24, dtype=torch.int32)
    residual = torch.randint(-30000, 30000, (3, 10, 9), generator=chance).to(torch.int16)
    scatter = torch.randperm(10, generator=chance).to(torch.int32)
    got = torch.ops.qflash.int8_linear(x, weight, bias, multiplier, 2, residual, scatter, torch.int16, backend)
    want = torch.empty_like(residual)
    for token, place in enumerate(scatter.tolist()):
        sums = op.rescale(op.integer_matmul(x[:, token], weight), 2, bias, multiplier)
        want[:, place] = op.saturate(sums + residual[:, place], torch.int16)
    assert torch.equal(got, want)
    assert not torch.equal(want, residual)


@pytest.mark.parametrize("backend", BACKENDS)
def test_keys_behind_the_last_query_take_their_scales_along(backend: str) -> None:
    """Of causal attention, with a scale for each key: also where two keys become one."""
    for queries, keys in ((1, 2), (2, 3), (3, 9)):
        tensors = [
            qflash.quantize(draw(i, 1, 2, n, 8), "token" if i < 2 else "channel") for i, n in enumerate((queries, keys, keys))
        ]
        first = [qflash.QuantizedTensor(x.values[:, :, :queries], scale) for x, scale in (
            (tensors[1], tensors[1].scale[:, :, :queries]), (tensors[2], tensors[2].scale))]  # fmt: skip
        options = {"is_causal": True, "backend": backend, "out_dtype": torch.float32}
        assert same_bits(qflash.int8_attention(*tensors, **options), qflash.int8_attention(tensors[0], *first, **options))
