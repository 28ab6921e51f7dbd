"""Rotary positions: the integers, what capture takes for a rotation of queries and keys, and what is refused."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import qflash
from helpers import DEVICE, same_bits
from network_cases import CHECK, draw_rotary
from qflash.network.capture.operations import UnsupportedError
from qflash.network.operators.rotary import Rotary
from qflash.specification.rotary import MOST_OFFSET, ONE, pack_turns, rotary, unpack_turns
from small_networks import decibels, draw_images, in_ours, rewrite

Turn = Callable[[torch.Tensor], torch.Tensor]
HEADS, TOKENS, WIDTH = 2, 17, 12
"""Of the model below: a class token and 16 patches."""


# --- the operator


def test_words_hold_both_numbers() -> None:
    ends = torch.tensor([-ONE, -1, 0, 1, 12345, ONE])
    cos, sin = ends.repeat(6), ends.repeat_interleave(6)
    words = pack_turns(cos, sin)
    assert words.dtype == torch.int32
    found = unpack_turns(words)
    assert torch.equal(found[0], cos) and torch.equal(found[1], sin)


def test_pairs_are_turned_and_rounded_once() -> None:
    torch.manual_seed(0)
    x = torch.randint(-32768, 32768, (2, 9, 24), dtype=torch.int16)
    angle = 6.3 * torch.rand(1, 9, 6, dtype=torch.float64)
    turns = pack_turns((angle.cos() * ONE).round(), (angle.sin() * ONE).round())
    multiplier = torch.randint(1 << 9, 1 << 11, (24,), dtype=torch.int32)
    offset = torch.randint(-MOST_OFFSET, MOST_OFFSET + 1, (24,), dtype=torch.int32) >> 3
    got = rotary(x, turns, offset, multiplier, torch.int32, CHECK)
    cos, sin = (table.double()[0, :, None] for table in unpack_turns(turns))
    a, b = x.double().unflatten(-1, (2, 2, 6)).unbind(-2)
    exact = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-2).flatten(2)
    assert torch.equal(got.double(), ((exact + offset) * multiplier.double() / 2**32 + 0.5).floor())
    saturated = rotary(x, turns, offset, multiplier)
    assert torch.equal(saturated, got.clamp(-128, 127).to(torch.int8)) and int((saturated.int() != got).sum()) > 0
    # beside the rotation itself an error of half a step, and that of the tables
    want = Rotary.turned(x.double(), angle.cos(), angle.sin())
    error = (got - (want * ONE + offset) * multiplier / 2**32).abs()
    assert float(error.max()) < 0.5 + 2 * 32768 * 0.5 * (1 << 11) / 2**32


def test_sums_reach_their_bounds_and_no_further() -> None:
    most = torch.full((2,), (1 << 31) - 1, dtype=torch.int32)
    offset, beyond = torch.tensor([MOST_OFFSET, -MOST_OFFSET], dtype=torch.int32), most
    for pair in ((-32768, -32768), (-32768, 32767), (32767, 32767)):
        x = torch.tensor(pair, dtype=torch.int16).view(1, 1, 2)
        for cos, sin in ((ONE, ONE), (ONE, -ONE), (-ONE, ONE), (-ONE, -ONE)):
            turns = pack_turns(torch.full((1, 1, 1), cos), torch.full((1, 1, 1), sin))
            for each in (offset, -offset):
                rotary(x, turns, each, most, torch.int32, CHECK)
    with pytest.raises(OverflowError, match=r"b cos \+ a sin|<< left"):
        rotary(x, turns, -beyond, most, torch.int32, CHECK)


def test_back_ends_agree_on_heads_with_tables_of_their_own() -> None:
    for number, half in enumerate((4, 16, 32, 33)):
        layer = draw_rotary(3 * number + 2, half)
        assert same_bits(layer.run("triton", DEVICE), layer.run("reference"))
        assert same_bits(layer.run("cpu"), layer.run("reference"))


def test_arguments_that_do_not_fit_are_refused() -> None:
    x, turns = torch.zeros(2, 5, 16, dtype=torch.int16), torch.zeros(2, 5, 4, dtype=torch.int32)
    constants = torch.zeros(16, dtype=torch.int32)
    call = torch.ops.qflash.rotary
    for arguments, kind, message in (
        ((x.int(), turns, constants, constants, torch.int8, "cpu"), TypeError, "x must be int16"),
        ((x, turns.short(), constants, constants, torch.int8, "cpu"), TypeError, "turns must be int32"),
        ((x[0], turns, constants, constants, torch.int8, "cpu"), ValueError, "x must have at least 3 dimensions"),
        ((x, turns[:, :4], constants, constants, torch.int8, "cpu"), ValueError, r"turns must be \(heads, tokens, half"),
        (
            (x, turns.expand(3, 2, 5, 4)[:, 0], constants, constants, torch.int8, "cpu"),
            ValueError,
            "x must have whole heads of 8",
        ),
        ((x, turns, constants[:8], constants, torch.int8, "cpu"), ValueError, r"offset must have shape \(16,\), got \(8,\)"),
        ((x, turns, constants, constants.to("meta"), torch.int8, "cpu"), ValueError, "multiplier is on meta"),
        ((x, turns, constants, constants, torch.float32, "cpu"), TypeError, "out_dtype must be int8, int16 or int32"),
        ((x, turns, constants, constants, torch.int8, "none"), ValueError, "backend"),
    ):
        with pytest.raises(kind, match=message):
            call(*arguments)
    for sizes, message in (
        ((16, (1, 5, 3)), "channels must be whole heads"), ((16, (5, 4)), "turns must .*have 3 numbers"),
        ((0, (1, 5, 4)), "channels must be whole and from 1"), ((16, None), "turns must .*have 3 numbers"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            Rotary(*sizes)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("turns", (ONE + 1) << 16, "a sine must be from -16384 to 16384"),
        ("turns", ONE + 1, "a cosine must be from -16384 to 16384"),
        ("offset", 1 << 30, "offset must be from"),
        ("multiplier", -1, "multiplier must be from 0"),
    ],
)
def test_integers_beyond_their_bounds_are_refused(name: str, value: int, message: str) -> None:
    module = Rotary(16, (1, 5, 4))
    module.check_values()
    module.get_buffer(name).flatten()[3] = value
    with pytest.raises(ValueError, match=message):
        module.check_values()


def test_the_operator_is_registered_as_pytorch_wants_it() -> None:
    for number in (1, 2, 3):
        torch.library.opcheck(torch.ops.qflash.rotary.default, (*draw_rotary(number).arguments, "reference"))


# --- models


def halves(x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


def neighbours(x: torch.Tensor) -> torch.Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


@functools.cache
def angles(*shape: int) -> torch.Tensor:
    """Return angles for some tokens and pairs; :func:`build` has them made before a tracer asks, which takes no generator."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(shape[-1])) * 6


def _sum(x: torch.Tensor, other: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    return x * angle.cos() + other * angle.sin()


def in_halves(x: torch.Tensor) -> torch.Tensor:
    return _sum(x, halves(x), angles(TOKENS, WIDTH // 2).repeat(1, 2))


def of_neighbours(x: torch.Tensor) -> torch.Tensor:
    return _sum(x, neighbours(x), angles(TOKENS, WIDTH // 2).repeat_interleave(2, dim=1))


def behind_a_prefix(x: torch.Tensor) -> torch.Tensor:
    angle = angles(TOKENS - 1, WIDTH // 2).repeat_interleave(2, dim=1)
    return torch.cat((x[:, :, :1], _sum(x[:, :, 1:], neighbours(x[:, :, 1:]), angle)), dim=2)


def of_each_head(x: torch.Tensor) -> torch.Tensor:
    return _sum(x, halves(x), angles(HEADS, TOKENS, WIDTH // 2).repeat(1, 1, 2))


def in_two_parts(x: torch.Tensor) -> torch.Tensor:
    """As complex numbers are multiplied, each half by itself."""
    (a, b), angle = x.chunk(2, dim=-1), angles(TOKENS, WIDTH // 2)
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), dim=-1)


def in_pairs(x: torch.Tensor) -> torch.Tensor:
    """The first channel of each pair is in the first term of both."""
    (a, b), angle = (x[..., ::2], x[..., 1::2]), angles(TOKENS, WIDTH // 2)
    return torch.stack((a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()), dim=-1).flatten(-2)


def in_part(x: torch.Tensor) -> torch.Tensor:
    """Half of the channels only, as GPT-NeoX has it."""
    some, rest = x[..., : WIDTH // 2], x[..., WIDTH // 2 :]
    return torch.cat((_sum(some, halves(some), angles(TOKENS, 3).repeat(1, 2)), rest), dim=-1)


def before_heads_move(x: torch.Tensor) -> torch.Tensor:
    """On (batch, tokens, heads, channels)."""
    x = x.transpose(1, 2)
    return _sum(x, halves(x), angles(TOKENS, WIDTH // 2).repeat(1, 2)[:, None]).transpose(1, 2)


def backwards(x: torch.Tensor) -> torch.Tensor:
    return _sum(x, -neighbours(x), angles(TOKENS, WIDTH // 2).repeat_interleave(2, dim=1))


def as_it_is(x: torch.Tensor) -> torch.Tensor:
    return x


TURNS: dict[str, Turn] = {
    each.__name__: each
    for each in (
        in_halves, of_neighbours, behind_a_prefix, of_each_head, in_two_parts, in_pairs, in_part, before_heads_move, backwards,
    )
}  # fmt: skip


class Model(nn.Module):
    """Two blocks of attention on a class token and 16 patches, without an MLP."""

    def __init__(
        self, query: Turn, key: Turn, *, norms: Any = nn.Identity, values: Any = nn.Identity, pool: str = "mean"
    ) -> None:
        super().__init__()
        wide = HEADS * WIDTH
        self.turns, self.pool = (query, key), pool
        self.embed, self.token = nn.Conv2d(3, wide, 4, 4), nn.Parameter(torch.randn(1, 1, wide))
        self.blocks = nn.ModuleList(
            nn.ModuleDict({
                "norm": nn.LayerNorm(wide), "qkv": nn.Linear(wide, 3 * wide), "proj": nn.Linear(wide, wide),
                "q_norm": norms(WIDTH), "k_norm": norms(WIDTH),
                "v_norm": values(WIDTH),
            }) for _ in range(2)
        )  # fmt: skip
        self.norm, self.head = nn.LayerNorm(wide), nn.Linear(wide, 5)

    def forward(self, images: torch.Tensor) -> Any:
        x = self.embed(images).flatten(2).mT
        x = torch.cat((self.token.expand(x.shape[0], -1, -1), x), dim=1)
        for block in self.blocks:
            qkv = block["qkv"](block["norm"](x)).unflatten(-1, (3, HEADS, WIDTH)).permute(2, 0, 3, 1, 4)
            query, key = self.turns[0](block["q_norm"](qkv[0])), self.turns[1](block["k_norm"](qkv[1]))
            out = nn.functional.scaled_dot_product_attention(query, key, block["v_norm"](qkv[2]))
            x = x + block["proj"](out.transpose(1, 2).flatten(2))
        x = self.norm(x)
        return self.head(x[:, 0] if self.pool == "token" else x.mean(dim=1))


def build(query: Turn, key: Turn | None = None, **options: Any) -> Model:
    torch.manual_seed(0)
    model = Model(query, query if key is None else key, **options).eval()
    with torch.no_grad():
        for x in model.parameters():
            x.add_(0.3 * torch.randn_like(x) if x.dim() == 1 else x)
        model(torch.zeros(1, 3, 16, 16))
    return model


def quantise(model: Model) -> Any:
    images = draw_images(24, 3, 16)
    return qflash.quantize_model(model, [images], mean=[0.5] * 3, std=[0.5] * 3, progress=False)


@pytest.mark.slow
@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize(
    "options",
    [{}, {"norms": nn.LayerNorm}, {"norms": nn.RMSNorm}, {"pool": "token"}, {"norms": nn.LayerNorm, "pool": "token"}],
    ids=str,
)
def test_every_spelling_of_a_turn_becomes_integers(turn: str, options: dict[str, Any]) -> None:
    model = build(TURNS[turn], **options)
    network = quantise(model)
    kinds = [type(network.part(node.name)).__name__ for node in network.nodes]
    # query and key share a launch but for normalisations between
    assert kinds.count("Rotary") == (4 if options.get("norms") else 2)
    assert kinds.count("RmsNorm") == (4 if options.get("norms") is nn.RMSNorm else 0)
    images = draw_images(12, 3, 16, seed=3)
    with torch.inference_mode():
        want = model(images.float() / 127.5 - 1)
    got = network.dequantize(network(images))
    assert decibels(want - want.mean(0), got - got.mean(0)) > 20
    reference = copy.deepcopy(network)
    reference.backend = "reference"
    assert torch.equal(reference(images), network(images))


@pytest.mark.parametrize("turn", [in_halves, as_it_is])
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_values_are_normalised_with_queries_and_keys(turn: Turn, norm: Any) -> None:
    model = build(turn, norms=nn.LayerNorm, values=norm)
    network = quantise(model)
    kinds = [type(network.part(node.name)).__name__ for node in network.nodes]
    assert kinds.count("RmsNorm") == (2 if norm is nn.RMSNorm else 0)
    assert kinds.count("Rotary") == (4 if turn is in_halves else 0)
    assert network.quality.sqnr_db > 30
    with pytest.raises(UnsupportedError, match="only query and key together, or both with the values, can be normalised"):
        quantise(build(turn, values=norm))


def test_without_the_turn_the_network_is_another() -> None:
    model = build(in_halves)
    network = quantise(model)
    for block in range(2):
        turns = network.part(_rotary_names(network)[block]).turns
        turns.copy_(pack_turns(torch.full(turns.shape, ONE), torch.zeros(turns.shape)))
    images = draw_images(12, 3, 16, seed=3)
    with torch.inference_mode():
        want = model(images.float() / 127.5 - 1)
    assert decibels(want - want.mean(0), network.dequantize(network(images)) - want.mean(0)) < 15


def _rotary_names(network: Any) -> list[str]:
    return [node.name for node in network.nodes if isinstance(network.part(node.name), Rotary)]


def test_a_class_token_alone_asks_in_the_last_block() -> None:
    network = quantise(build(behind_a_prefix, pool="token"))
    cores = [network.part(node.name) for node in network.nodes if type(network.part(node.name)).__name__ == "Attention"]
    assert [core.first for core in cores] == [0, 1]


def grows(x: torch.Tensor) -> torch.Tensor:
    return _sum(1.5 * x, 1.5 * halves(x), angles(TOKENS, 6).repeat(1, 2) / 20)


def reflects(x: torch.Tensor) -> torch.Tensor:
    return _sum(x, x.roll(6, dims=-1), angles(TOKENS, 6).repeat(1, 2))


def of_two_angles(x: torch.Tensor) -> torch.Tensor:
    return _sum(x, halves(x), angles(TOKENS, WIDTH))


def of_three(x: torch.Tensor) -> torch.Tensor:
    return _sum(x, x.roll(4, dims=-1), angles(TOKENS, 6).repeat(1, 2))


def twice(x: torch.Tensor) -> torch.Tensor:
    return in_halves(in_halves(x))


def with_other_tokens(x: torch.Tensor) -> torch.Tensor:
    return _sum(x, x.roll(1, dims=2), angles(TOKENS, 6).repeat(1, 2))


def across_heads(x: torch.Tensor) -> torch.Tensor:
    return _sum(x, x.roll(1, dims=1), angles(TOKENS, 6).repeat(1, 2))


def with_a_term(x: torch.Tensor) -> torch.Tensor:
    rotated = _sum(x[..., :6], halves(x[..., :6]), angles(TOKENS, 3).repeat(1, 2))
    return torch.cat((rotated, x[..., 6:] + torch.linspace(-1, 1, 6)), -1)


@pytest.mark.parametrize(
    ("query", "key", "message"),
    [
        (in_halves, of_neighbours, "query and key are rotated by different angles"),
        (in_halves, lambda x: x, "query and key are rotated by different angles"),
        (lambda x: x, in_halves, "query and key are rotated by different angles"),
        (grows, grows, "it makes channels larger"),
        (reflects, reflects, "the two channels of a pair are not rotated by one angle"),
        (of_two_angles, of_two_angles, "the two channels of a pair are not rotated by one angle"),
        (of_three, of_three, "channels are not added in pairs, the same for all tokens and heads"),
        (twice, twice, "has no integer form"),
        (with_other_tokens, with_other_tokens, "has no integer form"),
        (with_a_term, with_a_term, "something is added to channels before or behind them"),
        (across_heads, across_heads, "a channel is added to one of another head"),
    ],
)
def test_other_sums_are_refused_by_name(query: Turn, key: Turn, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        quantise(build(query, key))


def test_a_damaged_table_in_a_file_is_refused(tmp_path: Any) -> None:
    network = quantise(build(in_halves))
    name = _rotary_names(network)[0]
    network.part(name).turns[0, 0, 0] = ONE + 1
    network.save(tmp_path / "network")
    with pytest.raises(ValueError, match=f"{name}: a cosine must be from -16384 to 16384"):
        qflash.load_model(tmp_path / "network")
    network.part(name).turns[0, 0, 0] = ONE
    network.save(tmp_path / "network")

    def change(ours: dict[str, Any]) -> None:
        for node in ours["nodes"]:
            if node["name"] == name:
                node["sizes"]["turns"][1] = 5

    content = rewrite((tmp_path / "network").read_bytes(), in_ours(change))
    (tmp_path / "network").write_bytes(content)
    with pytest.raises(ValueError, match="turns"):
        qflash.load_model(tmp_path / "network", verify=False)
