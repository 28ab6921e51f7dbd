"""The kernel for windows (:mod:`qflash.kernels.gluon.windows.attention`) has the reference's bits, at random."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch

import qflash
from helpers import attention_launches, draw_scale, eviction_policy, lay_out, move_far, same_bits
from qflash import execution
from qflash.kernels.tiles import WINDOWS, Tiles
from qflash.specification import reference
from qflash.specification.attention_call import float_call, int8_call
from qflash.specification.recipe import DEFAULT, Recipe
from qflash.unseen_tokens import without_unseen

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
PLAIN = ("contiguous", "tokens_first", "packed")


@dataclasses.dataclass(frozen=True)
class Geometry:
    """One compiled kernel; the number of windows, the period of the bias and how programs share them vary below it."""

    heads: int
    group: int
    queries: int
    keys: int

    def sizes(self, batch: int) -> tuple[tuple[int, int, int, int], ...]:
        few = (batch, self.heads // self.group, self.keys, 32)
        return (batch, self.heads, self.queries, 32), few, few


def draw_geometry(chance: random.Random) -> Geometry:
    group = chance.choice((1, 1, 2))
    return Geometry(
        group * chance.randint(1, 3),
        group,
        chance.choice((49, 49, 9, 16, 24, 25, 33, 48, 56, 57, 64)),
        chance.choice((49, 49, 33, 40, 41, 48, 50, 56, 57, 63, 64)),
    )


def draw_bias(chance: random.Random, geometry: Geometry, batch: int, generator: torch.Generator) -> torch.Tensor | None:
    """None, or a bias in nats: whole or broadcast, now and then with -inf (rows of it, too), NaN and +inf, or very large."""
    kind = chance.choice(("none", "none", "plain", "masked", "poisoned", "large", "far"))
    if kind == "none":
        return None
    periods = [period for period in (1, 2, 4, batch) if batch % period == 0]
    shape = (
        chance.choice(periods),
        chance.choice((1, geometry.heads)),
        chance.choice((1, geometry.queries, geometry.queries)),
        chance.choice((1, geometry.keys, geometry.keys)),
    )
    bias = torch.randn(shape, generator=generator, device=CUDA) * (1000 if kind == "large" else 2)
    if kind in ("masked", "poisoned"):
        bias[torch.rand(shape, generator=generator, device=CUDA) < 0.3] = -torch.inf
        bias[0, 0, 0] = -torch.inf
    if kind == "poisoned":
        bias.view(-1)[chance.randrange(bias.numel())] = torch.nan
        bias.view(-1)[chance.randrange(bias.numel())] = torch.inf
    if kind == "far":
        bias = move_far(bias, generator)
    return bias


def lay_out_bias(chance: random.Random, bias: torch.Tensor) -> torch.Tensor:
    """The same bias as it is, with aligned rows, or with rows that are aligned to one another but not to memory."""
    kind = chance.choice(("dense", "aligned", "aligned", "shifted"))
    if kind == "dense":
        return bias
    if kind == "aligned":
        return qflash.align_bias(bias)
    keys = bias.shape[-1]
    shift = chance.randint(1, 7)
    rows = torch.full((*bias.shape[:-1], -(-keys // 8) * 8 + 8), 77, dtype=bias.dtype, device=bias.device)
    return rows[..., shift : shift + keys].copy_(bias)


def tiles(chance: random.Random) -> Tiles:
    return Tiles(64, 64, 4, 1, splits=chance.choice((0, 1, 2, 4)), family=WINDOWS)


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Let programs with a bias take several windows although there are few, as on one to three processors."""
    from qflash.kernels import device

    processors = 1 + request.node.callspec.params["case"] % 3
    monkeypatch.setattr(device, "_processors", lambda index: processors)


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize("case", range(40))
def test_int8_attention_has_the_reference_bits(case: int) -> None:
    chance = random.Random(case)
    geometry = draw_geometry(chance)
    # half of the cases have the one scale a tensor that programs read once
    one = case % 2 == 0
    query_scale = "tensor" if one else chance.choice(("tensor", "head", "token"))
    key_scale = "tensor" if one else chance.choice(("tensor", "head"))
    value_scale = "tensor" if one else chance.choice(("tensor", "head", "channel"))
    output_scale = chance.choice((None, "tensor")) if one else chance.choice((None, "tensor", "head", "channel"))
    for draw in range(4):
        batch = chance.choice((1, 4, 8, 12))
        generator = torch.Generator(CUDA).manual_seed(100 * case + draw)
        sizes = geometry.sizes(batch)
        steps = (1, 255) if draw == 3 else (255, 1)  # the last: the largest and smallest integers
        int8 = [
            torch.randint(0, steps[0] + 1, size, generator=generator, device=CUDA, dtype=torch.int16)
            .mul(steps[1])
            .sub(128)
            .to(torch.int8)
            for size in sizes
        ]
        q, k, v = (lay_out(x, chance.choice(PLAIN)) for x in int8)
        amplitude = (0.03, 1e-3, 3.0, 1e-6)[draw]
        scales = [
            draw_scale(size, kind, generator) * amplitude
            for size, kind in zip(sizes, (query_scale, key_scale, value_scale), strict=True)
        ]
        if draw == 1:
            scales[case % 3].view(-1)[0] = torch.nan
        out_scale = None if output_scale is None else draw_scale(sizes[0], output_scale, generator) * amplitude / 2
        dtype = chance.choice((torch.float16, torch.bfloat16, torch.float32)) if out_scale is None else torch.int8
        bias = draw_bias(chance, geometry, batch, generator)
        mask = None if bias is None else lay_out_bias(chance, qflash.quantize_bias(bias))
        chosen = tiles(chance)
        out = torch.empty(sizes[0], dtype=dtype, device=CUDA)
        arguments: tuple[Any, ...] = (q, scales[0], k, scales[1], v, scales[2], mask, False, 32**-0.5, out_scale)
        (call,) = attention_launches(int8_call(*arguments, out.dtype, DEFAULT), out, tiles=chosen)
        assert call.kernel.__name__ == "windows_kernel"
        plan = call.arguments["PLAN"]
        call.arguments["PLAN"] = dataclasses.replace(plan, POLICY=eviction_policy(case))
        call.run()
        expected = reference.int8_attention(int8_call(*arguments, dtype, DEFAULT))
        assert same_bits(out, expected), (geometry, batch, chosen, draw, dtype, None if bias is None else bias.shape)


RECIPES = [
    DEFAULT.replace(query_granularity=query, value_granularity=value, smooth_key=smooth)
    for query in ("head", "token")
    for value in ("head", "channel")
    for smooth in (False, True)
]


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize("case", range(40))
def test_fused_attention_has_the_reference_bits(case: int) -> None:
    chance = random.Random(1000 + case)
    geometry, recipe = draw_geometry(chance), chance.choice(RECIPES)
    dtype = chance.choice((torch.float16, torch.float16, torch.bfloat16, torch.float32))
    for draw in range(4):
        batch = chance.choice((1, 4, 8, 12))
        generator = torch.Generator(CUDA).manual_seed(100 * case + draw)
        amplitude = (1.0, 0.01, 30.0, 1.0)[draw]
        floats = [(torch.randn(size, generator=generator, device=CUDA) * amplitude).to(dtype) for size in geometry.sizes(batch)]
        if draw == 3:
            floats[case % 3].view(-1)[5] = (torch.nan, torch.inf)[case % 2]
            floats[1][0, 0] = 0  # a head of zeros
        q, k, v = (lay_out(x, chance.choice(PLAIN)) for x in floats)
        bias = draw_bias(chance, geometry, batch, generator)
        mask = None if bias is None else lay_out_bias(chance, bias.to(chance.choice((dtype, torch.float32))))
        chosen = tiles(chance)
        out = torch.empty_like(floats[0])
        attended = without_unseen(float_call(q, k, v, mask, False, 32**-0.5, recipe), execution.quantize_bias)
        (call,) = attention_launches(attended, out, tiles=chosen)
        assert call.kernel.__name__ == "windows_kernel"
        plan = call.arguments["PLAN"]
        call.arguments["PLAN"] = dataclasses.replace(plan, POLICY=eviction_policy(case))
        call.run()
        expected = execution.attention(q, k, v, mask, False, 32**-0.5, recipe.key, "reference")
        assert same_bits(out, expected), (geometry, batch, chosen, recipe, dtype, draw, None if bias is None else bias.shape)


@pytest.mark.parametrize("windows", [1, 40, 100, 300, 1000])
@pytest.mark.parametrize("biased", [False, True])
def test_the_rules_take_it_at_every_load(windows: int, biased: bool) -> None:
    images = 20 if windows > 20 else 1
    q, k, v = (torch.randn(images, windows // images, 3, 49, 32, device=CUDA, dtype=torch.float16) for _ in range(3))
    bias = qflash.align_bias(torch.randn(windows // images, 3, 49, 49, device=CUDA)) if biased else None
    assert same_bits(qflash.attention(q, k, v, bias), qflash.attention(q, k, v, bias, backend="reference"))
    int8 = [qflash.quantize(x) for x in (q, k, v)]
    got, expected = (qflash.int8_attention(*int8, bias, backend=backend) for backend in ("auto", "reference"))
    assert same_bits(got.values, expected.values)  # type: ignore[union-attr]


def test_what_it_does_not_take_goes_elsewhere() -> None:
    chosen = Tiles(64, 64, 4, 1, family=WINDOWS)
    one = torch.ones(1, 1, 1, 1, device=CUDA)
    x = torch.ones(2, 2, 49, 32, device=CUDA, dtype=torch.int8)
    padded = torch.ones(2, 2, 49, 40, device=CUDA, dtype=torch.int8)[..., :32]
    token = torch.ones(2, 2, 49, 1, device=CUDA)
    boolean = torch.ones(1, 1, 49, 49, device=CUDA, dtype=torch.bool)

    def kernel(
        q: torch.Tensor,
        key_scale: torch.Tensor = one,
        mask: torch.Tensor | None = None,
        causal: bool = False,
        recipe: Recipe = DEFAULT,
    ) -> str:
        calls = attention_launches(
            int8_call(q, one, x, key_scale, x, one, mask, causal, 0.1, one, torch.empty_like(x).dtype, recipe),
            torch.empty_like(x),
            tiles=chosen,
        )
        return calls[-1].kernel.__name__

    assert kernel(x) == kernel(x, mask=boolean.int()) == "windows_kernel"
    others = (
        kernel(padded),
        kernel(x, token),
        kernel(x, mask=boolean),
        kernel(x, causal=True),
        kernel(x, recipe=qflash.ACCURATE),
    )
    assert set(others) == {"short_kernel"}
