"""Long rows on Hopper (:mod:`qflash.kernels.gluon.sm90.attention_streaming`) has the reference's bits, at random."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

import qflash
from helpers import attention_launches, draw_scale, lay_out, same_bits
from qflash import execution, plan_cache
from qflash.kernels.families import Choice
from qflash.kernels.gluon.sm90 import launch as sm90
from qflash.kernels.launch_recorder import KernelLaunch
from qflash.kernels.tiles import SM90_STREAMING, Tiles
from qflash.kernels.triton.quantize_streaming import launch_quantize_long
from qflash.specification import reference
from qflash.specification.attention_call import float_call, int8_call
from qflash.specification.recipe import DEFAULT, Recipe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9, reason="written for compute capability 9.0"
    ),
]

CUDA = torch.device("cuda")
PLAIN = ("contiguous", "tokens_first", "packed")
TILES = Tiles(64, 128, 4, 3, 168, family=SM90_STREAMING)
"""Rows whose keys fit shared memory are another kernel's first."""


def sizes(chance: random.Random, others: tuple[int, ...]) -> tuple[tuple[int, int, int, int], ...]:
    batch, heads, group, head_dim = (
        chance.randint(1, 2),
        chance.randint(1, 3),
        chance.choice((1, 1, 2)),
        chance.choice((64, 128, *others)),
    )
    keys = chance.choice((289, 300, 330, 383, 384, 385, 511, 512, 545, 577, 700, 777, 1024, 1025, 1500, 5000))
    few = (batch, heads, keys, head_dim)
    return (batch, heads * group, chance.choice((33, 64, 65, 197, 300)), head_dim), few, few


@pytest.mark.parametrize("geometry", range(60))
def test_int8_attention_has_the_reference_bits(geometry: int) -> None:
    chance = random.Random(geometry)
    shapes = sizes(chance, (48, 72, 80, 120))
    grains = chance.choice(("tensor", "head", "token")), chance.choice(("tensor", "head")), chance.choice(("tensor", "channel"))
    output_scale = chance.choice((None, "tensor", "head", "channel"))
    for draw in range(5):
        generator = torch.Generator(CUDA).manual_seed(100 * geometry + draw)

        def integers(size: tuple[int, ...], draw: int = draw, generator: torch.Generator = generator) -> torch.Tensor:
            if draw == 3:  # the largest and smallest
                return torch.randint(0, 2, size, generator=generator, device=CUDA, dtype=torch.int16).mul(255).sub(128).char()
            return torch.randint(-128, 128, size, generator=generator, device=CUDA, dtype=torch.int16).char()

        q, k, v = (lay_out(integers(size), chance.choice(PLAIN)) for size in shapes)
        # exponents that cannot reach 256 octaves, that do, whose unit is octaves, and hardly any
        amplitude = (0.01, 0.05, 3.0, 0.03, 1e-6)[draw]
        scales = [draw_scale(size, kind, generator) * amplitude for size, kind in zip(shapes, grains, strict=True)]
        if draw == 1:
            scales[geometry % 3].view(-1)[0] = torch.nan
        out_scale = None if output_scale is None else draw_scale(shapes[0], output_scale, generator) * amplitude / 2
        dtype = chance.choice((torch.float16, torch.bfloat16, torch.float32)) if out_scale is None else torch.int8
        out = torch.empty(shapes[0], dtype=dtype, device=CUDA)
        arguments: tuple[Any, ...] = (q, scales[0], k, scales[1], v, scales[2], None, False, shapes[0][3] ** -0.5, out_scale)
        calls = attention_launches(int8_call(*arguments, out.dtype, DEFAULT), out, tiles=TILES)
        names = [call.kernel.__name__ for call in calls]
        if any(x.data_ptr() % 16 for x in (q, k)):  # 72 or 120 channels behind others
            expected = ["long_kernel"]
        else:  # rows of 72, 80 and 120 channels begin inside lines of memory
            expected = ["pack_key_kernel"] * (shapes[0][3] in (72, 80, 120)) + ["long_hopper_kernel"]
        assert names == ["pack_value_kernel", *expected], shapes
        for call in calls:
            call.run()
        assert same_bits(out, reference.int8_attention(int8_call(*arguments, dtype, DEFAULT))), (shapes, draw, dtype)


@pytest.mark.parametrize("geometry", range(20))
def test_from_floats_it_has_the_reference_bits(geometry: int) -> None:
    chance = random.Random(1000 + geometry)
    shapes, dtype = sizes(chance, (40, 72)), chance.choice((torch.float16, torch.bfloat16, torch.float32))
    for draw, amplitude in enumerate((1.0, 0.01, 30.0)):
        generator = torch.Generator(CUDA).manual_seed(100 * geometry + draw)
        floats = [(torch.randn(size, generator=generator, device=CUDA) * amplitude).to(dtype) for size in shapes]
        if draw == 2:
            floats[geometry % 3].view(-1)[5] = (torch.nan, torch.inf)[geometry % 2]
        q, k, v = (lay_out(x, chance.choice(PLAIN)) for x in floats)
        # one that was made before would be repeated
        plan_cache._plans.clear()
        with (
            mock.patch("qflash.kernels.dispatch.launch_quantize_long", wraps=launch_quantize_long) as quantize,
            mock.patch("qflash.kernels.dispatch.sm90.quantize_in_clusters", wraps=sm90.quantize_in_clusters) as clusters,
            mock.patch("qflash.kernels.dispatch.one_launch", return_value=Choice(None, TILES, {})),
        ):
            got = qflash.attention(q, k, v, enable_gqa=True)
        call = float_call(q, k, v, None, False, 0.1, DEFAULT)
        if dtype != torch.float32 and sm90.quantizes_in_clusters(call):
            assert clusters.called and not quantize.called, shapes
        else:
            # two-byte queries are quantised by the attention kernel itself
            (arguments, _) = quantize.call_args
            assert (arguments[0] is None) == (dtype != torch.float32), dtype
        expected = execution.attention(q, k, v, None, False, shapes[0][3] ** -0.5, DEFAULT.key, "reference")
        assert same_bits(got, expected), (shapes, dtype, draw)
        assert len(plan_cache._plans) == 2
        assert same_bits(qflash.attention(q, k, v, enable_gqa=True), expected), (shapes, dtype, draw)


@pytest.mark.parametrize(
    ("keys", "head_dim", "blocks"),
    [(513, 64, 4), (2500, 64, 8), (1300, 104, 8), (4097, 56, 16), (2100, 128, 16), (5120, 128, 16)],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_each_cluster_that_quantises_has_the_reference_bits(keys: int, head_dim: int, blocks: int, dtype: torch.dtype) -> None:
    generator = torch.Generator(CUDA).manual_seed(keys)
    q, k, v = (torch.randn(2, 2, n, head_dim, generator=generator, device=CUDA).to(dtype) for n in (65, keys, keys))
    k[0, 1, keys - 1, 3] = torch.nan
    call = float_call(q, k, v, None, False, 0.1, DEFAULT)
    assert sm90.quantizes_in_clusters(call) and sm90.quantize_in_clusters(call).value_sums.shape[2] == blocks
    with mock.patch("qflash.kernels.dispatch.one_launch", return_value=Choice(None, TILES, {})):
        got = qflash.attention(q, k, v, scale=0.1)
    assert same_bits(got, execution.attention(q, k, v, None, False, 0.1, DEFAULT.key, "reference"))


@contextlib.contextmanager
def noted_kernels() -> Iterator[list[str]]:
    """Note the names of the kernels that are launched meanwhile."""
    names: list[str] = []
    make = KernelLaunch.make

    def noted(launch: KernelLaunch) -> None:
        names.append(launch.kernel.__name__)
        make(launch)

    with mock.patch.object(KernelLaunch, "make", noted):
        yield names


def _draw_bias(chance: random.Random, size: tuple[int, ...], dtype: torch.dtype, draw: int) -> torch.Tensor:
    """A bias, small, far from 0, with marks, or with hidden keys; its rows begin at multiples of eight elements, or not.

    Of ``dtype`` bool a mask that shows few keys or many, some rows none, and hides some from all.
    """
    if dtype == torch.bool:
        mask = torch.rand(size, device=CUDA, generator=torch.Generator(CUDA).manual_seed(draw)) < (0.01, 0.5, 0.98)[draw % 3]
        mask[0, -1, 3 % size[2]] = False
        mask[..., chance.randrange(size[3]) :: 7] = False
        return mask
    generator = torch.Generator(CUDA).manual_seed(draw)
    rows = torch.empty((*size[:-1], size[-1] + (-size[-1] % 8 or chance.choice((0, 1, 8)))), dtype=dtype, device=CUDA)
    bias = rows.fill_(torch.nan)[..., : size[-1]]
    bias.copy_(torch.randn(size, generator=generator, device=CUDA) * chance.choice((0.1, 3.0, 100.0)))
    if draw == 1:
        bias += chance.choice((-5000, -1500, 1500, 30000))
    if draw == 2:
        for number in (-torch.inf, torch.inf, torch.nan, torch.finfo(dtype).min, torch.finfo(dtype).max):
            row, column = chance.randrange(size[2]), chance.randrange(size[3])
            bias[-1, 0, row, column : column + chance.choice((1, 1, 200))] = number
        bias[0, -1, 3 % size[2]] = -torch.inf
    if draw == 3:
        bias[..., chance.randrange(1, size[3]) :] = chance.choice((-torch.inf, torch.finfo(dtype).min))
    return bias


@pytest.mark.parametrize("geometry", range(90))
def test_with_a_mask_it_has_the_reference_bits(geometry: int) -> None:
    chance = random.Random(2000 + geometry)
    query, key, value = sizes(chance, (40, 72, 80, 96))
    keys = chance.choice((key[2], chance.choice((65, 72, 100, 130, 196, 197, 200, 256, 257))))
    shapes = query, (*key[:2], keys, key[3]), (*value[:2], keys, value[3])
    dtype = chance.choice((torch.float16, torch.bfloat16))
    kind = chance.choice((torch.float16, torch.bfloat16, torch.bool))
    recipe = DEFAULT.replace(smooth_value=chance.random() < 0.5)
    batch, heads, queries, _ = shapes[0]
    bias_shape = chance.choice((1, batch)), chance.choice((1, heads)), chance.choice((1, queries, queries)), shapes[1][2]
    for draw, amplitude in enumerate((1.0, 1.0, 1.0, 0.1, 300.0)):
        generator = torch.Generator(CUDA).manual_seed(100 * geometry + draw)
        floats = [(torch.randn(size, generator=generator, device=CUDA) * amplitude).to(dtype) for size in shapes]
        q, k, v = (lay_out(x, chance.choice(PLAIN)) for x in floats)
        bias = _draw_bias(chance, bias_shape, kind, draw)
        plan_cache._plans.clear()
        with noted_kernels() as names:
            got = qflash.attention(q, k, v, bias, enable_gqa=True, recipe=recipe)
        held = keys <= 256 and key[3] <= 96
        assert names[-1] == ("hopper_kernel" if held else "long_hopper_kernel" if keys > 128 else "short_kernel"), shapes
        expected = execution.attention(q, k, v, bias, False, shapes[0][3] ** -0.5, recipe.key, "reference")
        assert same_bits(got, expected), (shapes, bias_shape, dtype, kind, draw)
        assert same_bits(qflash.attention(q, k, v, bias, enable_gqa=True, recipe=recipe), expected), "the second call"


def test_what_it_does_not_take_goes_elsewhere() -> None:
    one = torch.ones(1, 1, 1, 1, device=CUDA)
    x = torch.ones(2, 2, 300, 64, device=CUDA, dtype=torch.int8)
    # heads between the rows of the batch: no matrix has all keys for rows, so they are copied
    apart = torch.ones(2, 2, 300 * 64 + 16, device=CUDA, dtype=torch.int8)[..., : 300 * 64].unflatten(2, (300, 64))
    token = torch.ones(2, 2, 300, 1, device=CUDA)
    mask = torch.ones(1, 1, 300, 300, device=CUDA, dtype=torch.bool)

    def kernel(
        key: torch.Tensor,
        key_scale: torch.Tensor = one,
        mask: torch.Tensor | None = None,
        causal: bool = False,
        recipe: Recipe = DEFAULT,
    ) -> str:
        out = torch.empty_like(x)
        return attention_launches(
            int8_call(x, one, key, key_scale, x, one, mask, causal, 0.1, one, out.dtype, recipe), out, tiles=TILES
        )[-1].kernel.__name__

    assert kernel(x) == kernel(x[:1].expand(2, -1, -1, -1)) == kernel(apart) == "long_hopper_kernel"
    assert kernel(x, mask=mask) == "long_hopper_kernel"
    others = (
        kernel(lay_out(x, "channels_first")),
        kernel(x, token),
        kernel(x, causal=True),
        kernel(x, recipe=qflash.ACCURATE),
    )
    assert set(others) == {"long_kernel"}

    def of_bias(bias: torch.Tensor) -> str:
        floats = x.half()
        with noted_kernels() as names:
            qflash.attention(floats, floats, floats, bias)
        return names[-1]

    bias = torch.zeros(2, 1, 300, 304, device=CUDA, dtype=torch.float16)
    assert of_bias(bias[..., :300]) == of_bias(bias[:1, ..., :300]) == "long_hopper_kernel"
    # rows that the copy engine does not read, one for all queries
    rows = bias[..., :300].contiguous(), bias[..., 1:301], bias[:, :, :1, :300], bias[..., :1]
    assert {of_bias(each) for each in rows} == {"long_hopper_kernel"}
    assert of_bias(bias[..., :300].float()) == "long_kernel"
