"""The kernel for Hopper (:mod:`qflash.kernels.gluon.sm90.attention_resident`) has the reference's bits, at random."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import qflash
from helpers import attention_launches, draw_scale, eviction_policy, lay_out, same_bits
from qflash import execution
from qflash.kernels.common.quantize_ops import inverse_scale
from qflash.kernels.gluon.sm90.rules import resident_misfit
from qflash.kernels.tiles import (
    SM90_BLOCKS,
    SM90_RESIDENT,
    AttentionShape,
    Tiles,
    fits_block,
    row_fits_registers,
)
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
HAND = {"block_m": 64, "block_n": 128, "warps": 4, "stages": 1, "family": SM90_RESIDENT}
PLAIN = ("contiguous", "tokens_first", "packed")
SCALES = ("tensor", "head", "token", "channel")


def tiles(chance: random.Random, shape: Shape) -> tuple[int, ...]:
    block_m, warps = chance.choice([block for block in SM90_BLOCKS if fits_block(*block, shape.head_dim, shape.keys)])
    hand = HAND | {"block_m": block_m, "warps": warps, "registers": chance.choice((0, 168))}
    blocks = -(-shape.queries // block_m)
    if chance.random() < 0.3:
        # from head to head
        return Tiles(**hand, programs=chance.randint(1, blocks * shape.heads * shape.batch + 1))
    return Tiles(**hand, splits=chance.randint(1, blocks))


def either_way(chance: random.Random, call: Any) -> None:
    """Take the sums of V's channels off outputs in any way that the kernel knows; the rules choose by the number of heads."""
    assert call.kernel.__name__ == "hopper_kernel"
    across = call.options["num_warps"] * 16 // call.arguments["BLOCK_M"]
    plan = call.arguments["PLAN"]
    assert (plan.UNROLL == 0) == row_fits_registers(call.arguments["KEYS"], across)
    possible = plan.TAIL == plan.UNROLL == 0
    assert possible or plan.SUMS != "products"
    sums = chance.choice(("begin", "end", "products") if possible else ("begin", "end"))
    call.arguments["PLAN"] = dataclasses.replace(plan, SUMS=sums)


def shared(queries: int, keys: int) -> dict[str, int]:
    """A program a head, or of rows that programs pass over, some from head to head, with three blocks at most."""
    return {"programs": 137} if keys > 288 and queries % 2 == 0 else {"splits": 1}


@dataclasses.dataclass(frozen=True)
class Shape:
    batch: int
    heads: int
    group: int
    queries: int
    keys: int
    head_dim: int

    def sizes(self) -> tuple[tuple[int, int, int, int], ...]:
        few = (self.batch, self.heads // self.group, self.keys, self.head_dim)
        return (self.batch, self.heads, self.queries, self.head_dim), few, few


def draw_shape(chance: random.Random, head_dims: tuple[int, ...]) -> Shape:
    group = chance.choice((1, 1, 2))
    head_dim = chance.choice(head_dims)
    keys = chance.choice((65, 96, 100, 128, 129, 160, 161, 192, 196, 197, 224, 225, 255, 256))
    if chance.random() < 0.3:
        keys = chance.choice((257, 261, 264, 265, 272, 273, 288))
    if chance.random() < 0.4:
        # passed over twice, or by two warps with the row in registers
        passed = (289, 300, 321, 384, 385, 401, 416, 425, 512, 545, 577, 600, 608, 609, 650, 785, 833, 880, 1025, 1370, 1700)
        keys = chance.choice(
            [keys for keys in passed if not resident_misfit(AttentionShape(DEFAULT, head_dim, head_dim, 64, keys), (9, 0))]
        )
    return Shape(
        chance.randint(1, 3),
        group * chance.randint(1, 3),
        group,
        chance.choice((1, 17, 33, 64, 65, 141, 197, 300)),
        keys,
        head_dim,
    )


@pytest.mark.parametrize("geometry", range(60))
def test_int8_attention_has_the_reference_bits(geometry: int) -> None:
    chance = random.Random(geometry)
    shape = draw_shape(chance, (32, 64, 64, 128, 16, 40, 72, 80, 96))
    chosen = tiles(chance, shape)
    # packed with others, heads of 40 bytes begin where no vector does, and another kernel takes them
    layouts = PLAIN if shape.head_dim % 16 == 0 else PLAIN[:2]
    query_scale, key_scale, value_scale = (
        chance.choice(SCALES[:3]),
        chance.choice(SCALES[:2]),
        chance.choice(("tensor", "head", "channel")),
    )
    output_scale = chance.choice((None, "tensor", "head", "channel"))
    for draw in range(4):
        generator = torch.Generator(CUDA).manual_seed(100 * geometry + draw)
        sizes = shape.sizes()
        if draw == 3:
            # the largest and smallest integers
            int8 = [
                torch.randint(0, 2, size, generator=generator, device=CUDA, dtype=torch.int16).mul(255).sub(128).to(torch.int8)
                for size in sizes
            ]
        else:
            int8 = [
                torch.randint(-128, 128, size, generator=generator, device=CUDA, dtype=torch.int16).to(torch.int8)
                for size in sizes
            ]
        q, k, v = (lay_out(x, chance.choice(layouts)) for x in int8)
        amplitude = (0.03, 1e-3, 3.0, 1e-6)[draw]
        scales = [
            draw_scale(size, kind, generator) * amplitude
            for size, kind in zip(sizes, (query_scale, key_scale, value_scale), strict=True)
        ]
        if draw == 1:
            scales[draw % 3].view(-1)[0] = torch.nan
        out_scale = (
            None
            if output_scale is None
            else draw_scale((*sizes[0][:3], shape.head_dim), output_scale, generator) * amplitude / 2
        )
        dtype = chance.choice((torch.float16, torch.bfloat16, torch.float32)) if out_scale is None else torch.int8
        out = torch.empty(sizes[0], dtype=dtype, device=CUDA)
        factor = shape.head_dim**-0.5
        arguments: tuple[Any, ...] = (q, scales[0], k, scales[1], v, scales[2], None, False, factor, out_scale)
        (call,) = attention_launches(int8_call(*arguments, out.dtype, DEFAULT), out, tiles=chosen)
        either_way(chance, call)
        call.run()
        assert same_bits(out, reference.int8_attention(int8_call(*arguments, dtype, DEFAULT))), (shape, chosen, draw, dtype)


@pytest.mark.parametrize(
    ("keys", "head_dim"),
    [
        *itertools.product((65, 100, 128, 197, 225, 240, 256, 257, 288), (64, 80, 128)),
        *((321, 64), (401, 64), (577, 64), (768, 64), (321, 80), (352, 128), (197, 72), (257, 96), (321, 96)),
    ],
)
@pytest.mark.parametrize("queries", [65, 72, 137, 197, 208])
def test_the_last_few_queries_have_the_reference_bits(queries: int, keys: int, head_dim: int) -> None:
    """One program a head, or programs that go from head to head: up to 16 queries past whole blocks go a way of their own."""
    generator = torch.Generator(CUDA).manual_seed(queries + keys)
    # more heads than processors: of fewer a program takes blocks alone
    shape = Shape(2, 68, 1, queries, keys, head_dim)
    chosen = Tiles(**HAND, registers=168 if keys <= 288 else 0, **shared(queries, keys))
    for draw, dtype in enumerate((torch.int8, torch.int8, torch.float16)):
        q, k, v = (
            torch.randint(-128, 128, size, generator=generator, device=CUDA, dtype=torch.int16).to(torch.int8)
            for size in shape.sizes()
        )
        grains = ("tensor", "tensor", "tensor", "tensor") if draw == 0 else ("token", "head", "channel", "channel")
        sizes = (*shape.sizes(), shape.sizes()[0])
        scales = [draw_scale(size, kind, generator) * 0.03 for size, kind in zip(sizes, grains, strict=True)]
        if draw == 2:
            scales[0].view(-1)[-1] = torch.nan
        out = torch.empty(shape.sizes()[0], dtype=dtype, device=CUDA)
        out_scale = scales[3] if dtype == torch.int8 else None
        arguments: tuple[Any, ...] = (q, scales[0], k, scales[1], v, scales[2], None, False, head_dim**-0.5, out_scale)
        (call,) = attention_launches(int8_call(*arguments, out.dtype, DEFAULT), out, tiles=chosen)
        assert call.kernel.__name__ == "hopper_kernel"
        assert (8 if queries % 64 <= 8 else 16) == call.arguments["PLAN"].TAIL
        call.run()
        assert same_bits(out, reference.int8_attention(int8_call(*arguments, dtype, DEFAULT))), draw


@pytest.mark.parametrize("head_dim", [40, 64])
@pytest.mark.parametrize("keys", [100, 197, 257, 288, 300, 401, 577, 768])
@pytest.mark.parametrize("queries", [65, 137, 208])
def test_the_last_few_queries_are_quantised_alike(queries: int, keys: int, head_dim: int) -> None:
    generator = torch.Generator(CUDA).manual_seed(queries + keys)
    sizes = Shape(2, 2, 1, queries, keys, head_dim).sizes()
    # two of eight recipes each, or compiling would take minutes
    for recipe, dtype in zip(RECIPES[(queries + keys + head_dim // 8) % 4 :: 4], (torch.float16, torch.bfloat16), strict=True):
        q, k, v = (torch.randn(size, generator=generator, device=CUDA).to(dtype) for size in sizes)
        q[0, 0, -1] = torch.nan
        out = torch.empty_like(q)
        chosen = Tiles(**HAND, **shared(queries, keys))
        if keys <= 288 and queries > 128:
            chosen = chosen._replace(splits=2)
        (call,) = attention_launches(float_call(q, k, v, None, False, head_dim**-0.5, recipe), out, tiles=chosen)
        assert call.kernel.__name__ == "hopper_kernel"
        assert (8 if queries % 64 <= 8 else 16) == call.arguments["PLAN"].TAIL
        assert (keys <= 256 and queries > 128) == call.arguments["PLAN"].SPREAD
        call.run()
        assert same_bits(out, execution.attention(q, k, v, None, False, head_dim**-0.5, recipe.key, "reference")), (
            recipe,
            dtype,
        )


RECIPES = [
    DEFAULT.replace(query_granularity=query, value_granularity=value, smooth_key=smooth)
    for query, value, smooth in itertools.product(("head", "token"), ("head", "channel"), (False, True))
]


@pytest.mark.parametrize("geometry", range(60))
def test_fused_attention_has_the_reference_bits(geometry: int) -> None:
    chance = random.Random(1000 + geometry)
    shape = draw_shape(chance, (32, 64, 64, 128, 24, 40, 72, 80, 96))
    if resident_misfit(
        AttentionShape(DEFAULT, shape.head_dim, shape.head_dim, shape.queries, shape.keys, fused=True), (9, 0)
    ):  # fmt: skip
        shape = dataclasses.replace(shape, queries=33)
    chosen, recipe = tiles(chance, shape), chance.choice(RECIPES)
    dtype = chance.choice((torch.float16, torch.bfloat16))
    for draw in range(4):
        generator = torch.Generator(CUDA).manual_seed(100 * geometry + draw)
        amplitude = (1.0, 0.01, 30.0, 1.0)[draw]
        floats = [(torch.randn(size, generator=generator, device=CUDA) * amplitude).to(dtype) for size in shape.sizes()]
        if draw == 3:
            floats[geometry % 3].view(-1)[5] = (torch.nan, torch.inf, 0.0)[geometry % 2]
            floats[1][0, 0] = 0  # a head of zeros
        q, k, v = (lay_out(x, chance.choice(PLAIN)) for x in floats)
        out = torch.empty_like(floats[0])
        (call,) = attention_launches(float_call(q, k, v, None, False, shape.head_dim**-0.5, recipe), out, tiles=chosen)
        either_way(chance, call)
        call.arguments["PLAN"] = dataclasses.replace(call.arguments["PLAN"], POLICY=eviction_policy(geometry))
        call.run()
        expected = execution.attention(q, k, v, None, False, shape.head_dim**-0.5, recipe.key, "reference")
        assert same_bits(out, expected), (shape, chosen, recipe, dtype, draw)


@pytest.mark.parametrize(
    ("tokens", "head_dim"),
    [(197, 64), (257, 64), (256, 72), (257, 80), (401, 64), (401, 88), (577, 64), (577, 80), (729, 72), (1025, 64), (577, 32)],
)
@pytest.mark.parametrize("heads", [6, 48, 90, 130, 400])
def test_the_rules_take_it_at_every_load(heads: int, tokens: int, head_dim: int) -> None:
    q, k, v = (torch.randn(heads, 1, tokens, head_dim, device=CUDA, dtype=torch.float16) for _ in range(3))
    assert same_bits(qflash.attention(q, k, v), qflash.attention(q, k, v, backend="reference"))
    int8 = [qflash.quantize(x) for x in (q, k, v)]
    got, expected = (qflash.int8_attention(*int8, backend=backend) for backend in ("auto", "reference"))
    assert same_bits(got.values, expected.values)  # type: ignore[union-attr]


@pytest.mark.parametrize("head_dim", [32, 64])
def test_lengths_that_are_not_compiled_for_go_elsewhere(head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from qflash.kernels import dispatch, lengths

    monkeypatch.setattr(lengths, "_first", set())
    monkeypatch.setattr(lengths, "_all", False)
    monkeypatch.setattr(lengths, "MOST_LENGTHS", 1)
    for tokens, taken in ((401, True), (402, False), (401, True)):
        q, k, v = (torch.randn(1, 2, tokens, head_dim, device=CUDA, dtype=torch.float16) for _ in range(3))
        assert (dispatch.one_launch(float_call(q, k, v, None, False, 1.0, DEFAULT)).family is not None) == taken
        assert same_bits(qflash.attention(q, k, v), qflash.attention(q, k, v, backend="reference"))


@triton.jit
def count_wrong_reciprocals(wrong_ptr, start, BLOCK: tl.constexpr):
    x = (start + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.float32, bitcast=True)
    exact = tl.inline_asm_elementwise("rcp.rn.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    differ = inverse_scale(x, False).to(tl.int32, bitcast=True) != exact.to(tl.int32, bitcast=True)
    tl.atomic_add(wrong_ptr, tl.sum(differ.to(tl.int32), 0))


def test_reciprocals_of_scales_are_correctly_rounded() -> None:
    # every float from the smallest scale there is to the largest amplitude / 127
    first, last, block = 0x00800000, 0x7C010204, 4096
    wrong = torch.zeros(1, dtype=torch.int32, device=CUDA)
    count_wrong_reciprocals[((last - first) // block + 1,)](wrong, first, block)
    assert wrong.item() == 0


def test_what_it_does_not_take_goes_elsewhere() -> None:
    from qflash.kernels.tiles import Tiles

    chosen = Tiles(**HAND)
    one = torch.ones(1, 1, 1, 1, device=CUDA)
    x = torch.ones(1, 2, 197, 64, device=CUDA, dtype=torch.int8)
    padded = torch.ones(1, 2, 197, 68, device=CUDA, dtype=torch.int8)[..., :64]
    token = torch.ones(1, 2, 197, 1, device=CUDA)
    mask = torch.ones(1, 1, 197, 197, device=CUDA, dtype=torch.bool)

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

    assert kernel(x) == "hopper_kernel"
    others = (kernel(padded), kernel(x, token), kernel(x, mask=mask), kernel(x, causal=True), kernel(x, recipe=qflash.ACCURATE))
    assert set(others) == {"short_kernel"}
    wide = x.float()
    assert (
        attention_launches(float_call(wide, wide, wide, None, False, 0.1, DEFAULT), torch.empty_like(wide), tiles=chosen)[
            0
        ].kernel.__name__
        == "short_kernel"
    )
