"""Calls of every function of the CPU kernels over shapes, strides, masks, recipes, groups and lengths with tails.

A call is drawn from its number, so that a failure is repeated by it. Each compares bits with the specification.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import random
from collections.abc import Callable, Iterator

import torch

import qflash
from helpers import (
    GPU,
    INTERPRETER,
    LAYOUTS,
    Limits,
    draw_case,
    draw_fused_case,
    draw_recipe,
    lay_out,
    move_far,
    same_bits,
)
from network_cases import (
    MOVING,
    draw_gated,
    draw_layer_norm,
    draw_linear,
    draw_narrow,
    draw_norm,
    draw_rotary,
    extremes,
)
from qflash.execution import attend, quantize_with_scale
from qflash.kernels.cpu import launch
from qflash.specification import layers as operators
from qflash.specification import quantization, reference
from qflash.specification.attention_call import float_call, int8_call
from qflash.specification.fixed_point import MAX_HEAD_DIM, MAX_KEYS, SECTION_KEYS
from qflash.specification.recipe import PRESETS, Recipe
from qflash.unseen_tokens import leaves_out_keys, searches, shown_tokens

CPU = torch.device("cpu")
LONG = dataclasses.replace(
    GPU, batches=(1,), key_heads=(1, 2), groups=(1, 2), tokens=(40, 511, 512, 513, 577, 1000, 1024, 1025, 2049), work=200
)
"""Rows around attention.c's CHUNK of 512 keys and longer, with few enough blocks for a CPU."""
TAILS = dataclasses.replace(
    INTERPRETER,
    head_dims=(1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65),
    tokens=(1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 15, 16, 17, 23, 24, 25, 31, 32, 33, 47, 48, 49, 63, 64, 65),
)
"""All ends of vectors of 4 to 16 lanes, of pairs and fours of operands, and of blocks of 6 to 24 rows."""


def _check_case(number: int, limits: Limits) -> None:
    call = int8_call(*draw_case(number, limits).arguments(CPU))
    assert same_bits(launch.launch_attention(call), reference.int8_attention(call))


def _check_floats(number: int) -> None:
    """A call on float tensors, made and repeated, so that quantisation and attention are one call of C the second time."""
    case = draw_fused_case(number, small=True)
    query, key, value, mask, causal, scale, recipe = case.arguments(CPU)
    if number % 4 == 0:
        recipe = list(PRESETS.values())[number // 4 % len(PRESETS)]
    recipe = recipe.replace(smooth_value=number % 3 == 0)
    call = float_call(query, key, value, mask, causal, scale, recipe)
    expected = attend(call, "reference")
    first = attend(call, "cpu")
    assert same_bits(first, expected)
    # hidden tokens are replaced before, in every call anew
    repeat = None if leaves_out_keys(call) or searches(call) else launch.prepare_attention(call, first)
    if repeat is not None:
        assert same_bits(repeat(query, key, value, mask), expected)


def _check_repeated_int8(number: int) -> None:
    arguments = draw_case(number, INTERPRETER).arguments(CPU)
    call = int8_call(*arguments)
    expected = reference.int8_attention(call)
    repeat = launch.prepare_attention(call, expected)
    if repeat is None:
        return
    query, query_scale, key, key_scale, value, value_scale, mask, _, _, output_scale, _, _ = arguments
    again = repeat(query, query_scale, key, key_scale, value, value_scale, mask, output_scale, None)
    assert same_bits(again, expected)


def _check_quantisation(number: int) -> None:
    chance = random.Random(number)
    channels = chance.choice((1, 3, 16, 20, 31, 32, 33, 64, 128))
    shape = (chance.randint(1, 3), chance.randint(1, 3), chance.randint(1, 40), channels)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(number)) * 10.0 ** chance.choice((-42, -20, -3, 0, 4, 30))
    if chance.random() < 0.4:
        spot = tuple(chance.randrange(size) for size in shape)
        x[spot] = chance.choice((math.nan, math.inf, -math.inf, 3e38, 0.0, -0.0))
    x = lay_out(x.to(chance.choice((torch.float16, torch.bfloat16, torch.float32))), chance.choice(LAYOUTS))
    granularity = chance.choice(quantization.GRANULARITIES)
    center = chance.random() < 0.5
    y = quantization.center_channels(x) if center else x
    scale = quantization.scale_from_amplitude(quantization.amplitude(y, granularity))
    values, found = launch.launch_quantize(x, granularity, center)
    assert same_bits(found, scale) and same_bits(values, quantization.quantize_values(y, scale))
    if granularity != "token":
        got, expected = launch.launch_quantize_centered(x, granularity), quantization.quantize_centered(x, granularity)
        assert all(same_bits(one, other) for one, other in zip(got, expected, strict=True))


def _check_given(number: int) -> None:
    """Quantisation with given steps, of heads or channels, less given middles or none."""
    chance = random.Random(number)
    generator = torch.Generator().manual_seed(number)
    channels = chance.choice((1, 3, 15, 16, 17, 20, 31, 32, 33, 64, 65, 128))
    batch, heads, tokens = chance.randint(1, 3), chance.randint(1, 3), chance.randint(1, 40)

    def each() -> tuple[int, ...]:
        return 1, chance.choice((1, heads)), 1, chance.choice((1, channels))

    size = 10.0 ** chance.choice((-30, -3, 0, 4, 30))
    scale = (torch.rand(each(), generator=generator) + 0.5) * size
    for odd in (math.nan, 2.0**-126, 1e-42, 3e38):
        if chance.random() < 0.1:
            scale[tuple(chance.randrange(most) for most in scale.shape)] = odd
    center = None if chance.random() < 0.3 else torch.randn(each(), generator=generator) * size * chance.choice((0, 1, 100))
    # ends, ties, and what lies just inside and outside of the ends
    steps = torch.randn((batch, heads, tokens, channels), generator=generator) * chance.choice((1, 60, 1000))
    if chance.random() < 0.5:
        steps = (steps * 2).round() / 2
    x = steps * scale + (0 if center is None else center)
    for odd in (math.nan, math.inf, -math.inf, 3e38, 0.0, -0.0):
        if chance.random() < 0.2:
            x[tuple(chance.randrange(most) for most in x.shape)] = odd
    x = lay_out(x.to(chance.choice((torch.float16, torch.bfloat16, torch.float32))), chance.choice(LAYOUTS))
    got = launch.launch_quantize_values(x, scale, center)
    assert same_bits(got, quantize_with_scale(x, scale, "reference", center))


def _draw_lengths(chance: random.Random, layout: str, limit: int) -> list[int]:
    """Draw the lengths of packed sequences, none of which is longer than ``limit``."""
    if layout == "one":
        return [chance.choice((1, 2, 17, 64, 65, 130))]
    if layout == "many":
        return [chance.randint(0, 4) for _ in range(chance.randint(20, 50))]
    if layout == "long":
        return [chance.choice((3, limit)), 0, chance.choice((1, limit - 1))]
    lengths = [chance.choice(TAILS.tokens) for _ in range(chance.randint(2, 6))]
    if layout == "ones":
        lengths = [1] * len(lengths)
    for place in range(len(lengths)):
        if layout == "empty" and chance.random() < 0.5:
            lengths[place] = 0
    return lengths


PACKED_LAYOUTS = ("one", "many", "long", "ones", "tails", "tails", "empty", "empty")
"""Of packed sequences: a single one; many short and empty ones; rows around attention.c's CHUNK; a token each; the ends of
vectors; some empty."""


def _draw_packed_recipe(number: int, chance: random.Random) -> Recipe:
    if number % 6 == 0:
        return list(PRESETS.values())[number // 6 % len(PRESETS)]
    return draw_recipe(chance).replace(
        query_granularity=chance.choice(("tensor", "head", "token")),
        key_granularity=chance.choice(("tensor", "head", "token")),
        value_granularity=chance.choice(("tensor", "head", "channel")),
        row_sum=chance.choice(("exact", "rounded")),
        smooth_key=chance.random() < 0.5,
        smooth_value=chance.random() < 0.5,
        # both are PyTorch's, before the call of C, and give it other strides
        balance=chance.random() < 0.1,
        rotate=chance.random() < 0.1,
    )


def _check_packed(number: int) -> None:
    """Packed sequences, of lengths that are the same for queries and keys or not."""
    chance = random.Random(number)
    generator = torch.Generator().manual_seed(number)
    layout = PACKED_LAYOUTS[number % len(PACKED_LAYOUTS)]
    queries = _draw_lengths(chance, layout, 100)
    keys = list(queries)
    if chance.random() < 0.7:
        drawn = itertools.cycle(_draw_lengths(chance, layout, chance.choice((513, 1030))))
        keys = [next(drawn) for _ in queries]
    key_heads, group = chance.choice((1, 2, 3)), chance.choice((1, 1, 2, 3))
    head_dim, value_dim = (chance.choice(TAILS.head_dims) for _ in range(2))
    dtype, size = chance.choice((torch.float16, torch.bfloat16, torch.float32)), chance.choice((1, 1, 8))
    tensors = []
    sizes = (queries, key_heads * group, head_dim), (keys, key_heads, head_dim), (keys, key_heads, value_dim)
    for lengths, heads, channels in sizes:
        x = torch.randn((1, heads, sum(lengths), channels), generator=generator) * size + chance.choice((0, 3))
        if x.numel() and chance.random() < 0.15:
            x[tuple(chance.randrange(most) for most in x.shape)] = chance.choice((math.nan, math.inf, -math.inf, 0.0))
        tensors.append(lay_out(x.to(dtype), chance.choice(LAYOUTS))[0].transpose(0, 1))
    kind = chance.choice((torch.int32, torch.int64))
    cumulative = [torch.tensor([0, *itertools.accumulate(lengths)], dtype=kind) for lengths in (queries, keys)]
    # of the longest only a bound need be known
    most = [max(lengths) + chance.choice((0, 0, 7)) for lengths in (queries, keys)]
    options = {"is_causal": chance.random() < 0.5, "enable_gqa": True, "recipe": _draw_packed_recipe(number, chance)}
    got, expected = (
        qflash.varlen_attention(*tensors, *cumulative, *most, **options, backend=backend) for backend in ("cpu", "reference")
    )
    assert same_bits(got, expected)


def _check_bias(number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    chance = random.Random(number)
    shape = tuple(chance.choice((1, 2, 5, 17, 40)) for _ in range(chance.randint(1, 4)))
    bias = torch.randn(shape, generator=generator) * 10.0 ** chance.choice((-3, 0, 3, 20, 37))
    if len(shape) > 1 and chance.random() < 0.5:
        bias = move_far(bias, generator)
    for mark in (math.nan, math.inf, -math.inf, torch.finfo(torch.float32).min):
        if chance.random() < 0.3:
            bias = torch.where(torch.rand(shape, generator=generator) < 0.1, torch.tensor(mark), bias)
    assert same_bits(launch.launch_quantize_bias(bias), quantization.bias_to_fixed(bias))


def _check_seen(number: int) -> None:
    generator, chance = torch.Generator().manual_seed(number), random.Random(number)
    key_heads, group = chance.choice((1, 2, 3)), chance.choice((1, 2))
    heads = chance.choice((1, key_heads * group))
    shape = chance.choice((1, 2)), heads, chance.choice((1, 2, 9)), chance.choice((2, 5, 17, 40))
    mask = torch.rand(shape, generator=generator) < chance.choice((0.02, 0.3, 0.9, 1.0))
    if chance.random() < 0.5:
        mask = torch.where(mask, torch.randint(-100, 100, shape, generator=generator), chance.choice((-(1 << 28), -(1 << 30))))
        mask = mask.to(torch.int32)
    mask = lay_out(mask, chance.choice(LAYOUTS))
    assert torch.equal(launch.launch_seen(mask, key_heads), shown_tokens(mask, key_heads))


def _ends(size: tuple[int, ...], chance: random.Random) -> torch.Tensor:
    """Return int8 numbers at the ends of their range, in one of several patterns along the last dimension."""
    kind = chance.randrange(4)
    if kind == 3:
        generator = torch.Generator().manual_seed(chance.getrandbits(40))
        return torch.where(torch.rand(size, generator=generator) < 0.5, 127, -128).to(torch.int8)
    row = torch.tensor([(-128, -128), (127, 127), (-128, 127)][kind]).repeat(size[-1] // 2 + 1)[: size[-1]]
    return row.to(torch.int8).expand(size).contiguous()


def _check_ends(number: int) -> None:
    """Numbers and scales at the ends of what they may be."""
    chance = random.Random(number)
    head_dim, keys = chance.choice((1, 2, 64, 511, MAX_HEAD_DIM)), chance.choice((1, 3, 70, 513))
    value_dim = chance.choice((1, 5, 16, MAX_HEAD_DIM))
    query, key, value = (_ends((1, 1, *size), chance) for size in ((3, head_dim), (keys, head_dim), (keys, value_dim)))
    octaves = (-126, -60, -30, -8, 0, 30, 100, 127)
    query_scale, key_scale, value_scale, output_scale = (
        torch.full((1, 1, 1, 1), 2.0 ** chance.choice(octaves)) for _ in range(4)
    )
    if chance.random() < 0.4:
        key_scale = torch.exp2(torch.linspace(-126, 126, keys)).view(1, 1, keys, 1)
    for scale in (query_scale, value_scale):
        if chance.random() < 0.1:
            scale.fill_(chance.choice((math.nan, math.inf, 0.0, 1e-42)))
    mask = None
    if chance.random() < 0.4:
        marks = (1 << 28, -(1 << 28), 0, -(1 << 30), (1 << 30) - 1, 1 << 30)
        mask = torch.tensor([chance.choice(marks[: chance.choice((3, 4, 6))]) for _ in range(keys)], dtype=torch.int32)
        mask = mask.view(1, 1, 1, keys)
    recipe = chance.choice([*PRESETS.values(), qflash.Recipe(exponential="linear", probability_bits=15)])
    dtype = chance.choice((torch.int8, torch.float32))
    softmax_scale = 2.0 ** chance.choice((-60, -20, -3, 0, 30))
    call = int8_call(
        query, query_scale, key, key_scale, value, value_scale, mask, False, softmax_scale,
        output_scale if dtype == torch.int8 else None, dtype, recipe,
    )  # fmt: skip
    assert same_bits(launch.launch_attention(call), reference.int8_attention(call))


_LENGTHS = (2 * SECTION_KEYS + 5, SECTION_KEYS, MAX_KEYS, SECTION_KEYS + 1)


def _check_longest(number: int) -> None:
    """Rows of one section, of several and the longest there may be, with the largest sums."""
    chance = random.Random(number)
    keys = _LENGTHS[number % len(_LENGTHS)]
    query, value = _ends((1, 1, 2, 2), chance), _ends((1, 1, keys, 3), chance)
    key = torch.zeros(1, 1, keys, 2, dtype=torch.int8)
    one = torch.ones(1, 1, 1, 1)
    recipe = list(PRESETS.values())[number % len(PRESETS)]
    whole = number // 4 % 2
    call = int8_call(
        query, one, key, one, value, one, None, False, 1.0, one if whole else None, torch.int8 if whole else torch.float32,
        recipe,
    )  # fmt: skip
    assert same_bits(launch.launch_attention(call), reference.int8_attention(call))


def _check_linear(number: int) -> None:
    layer = draw_linear(number)
    assert same_bits(layer.run("cpu"), layer.run("reference"))


def _check_deep_linear(number: int) -> None:
    chance = random.Random(number)
    layer = draw_linear(number, most=chance.choice((400, 700)))
    assert same_bits(layer.run("cpu"), layer.run("reference"))


def _check_layer_norm(number: int) -> None:
    layer = draw_layer_norm(number, channels=operators.MAX_CHANNELS if number % 20 == 19 else None)
    assert same_bits(layer.run("cpu"), layer.run("reference"))


def _check_gated(number: int) -> None:
    layer = draw_gated(number)
    assert same_bits(layer.run("cpu"), layer.run("reference"))


def _check_moving(number: int) -> None:
    layer = MOVING[number % len(MOVING)](number)
    assert same_bits(layer.run("cpu"), layer.run("reference"))


def _check_rotary(number: int) -> None:
    layer = draw_rotary(number)
    assert same_bits(layer.run("cpu"), layer.run("reference"))


def _check_norm(number: int) -> None:
    layer = (draw_norm, draw_narrow)[number % 2](number // 2)
    assert same_bits(layer.run("cpu"), layer.run("reference"))


_extremes = functools.cache(extremes)


def _check_extreme_layer(number: int) -> None:
    layer = _extremes()[number % len(_extremes())]
    assert same_bits(layer.run("cpu"), layer.run("reference"))


CHECKS: dict[str, tuple[Callable[[int], None], int]] = {
    "attention": (lambda number: _check_case(number, INTERPRETER), 300),
    "tails": (lambda number: _check_case(5000 + number, TAILS), 400),
    "long rows": (lambda number: _check_case(2000 + number, LONG), 12),
    "longest rows": (_check_longest, 12),
    "ends of the ranges": (_check_ends, 150),
    "repeated calls": (lambda number: _check_repeated_int8(9000 + number), 100),
    "float calls": (_check_floats, 200),
    "packed sequences": (_check_packed, 320),
    "quantisation": (_check_quantisation, 300),
    "quantisation with given middles": (_check_given, 150),
    "bias": (_check_bias, 100),
    "hidden tokens": (_check_seen, 60),
    "linear layers": (_check_linear, 200),
    "large linear layers": (_check_deep_linear, 15),
    "layer normalisation": (_check_layer_norm, 60),
    "gated products": (_check_gated, 60),
    "rows, means and patches": (_check_moving, 60),
    "rotary positions": (_check_rotary, 60),
    "norms without a mean, with a residual; narrowed streams": (_check_norm, 80),
    "layers at the ends of their ranges": (_check_extreme_layer, 384),
}
"""What is checked, and how many calls a full run makes of each."""


def checks(share: float) -> Iterator[tuple[str, int, Callable[[int], None]]]:
    """Give kinds, numbers and functions of a run; ``share`` of a full one (1), and at least one of each kind."""
    for kind, (check, count) in CHECKS.items():
        for number in range(max(1, round(share * count))):
            yield kind, number, check


def threads_for(work: int) -> int:
    """Return some number of threads, 1 to 3, whatever the work is worth."""
    return 1 + work % 3
