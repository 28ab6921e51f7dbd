"""Random layers of an integer network, within the bounds of :mod:`qflash.specification.layers`, and what they must give."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Sequence
from typing import Any

import torch

import qflash
from qflash.network import execution, operators  # noqa: F401 - register the operators
from qflash.network.modules import DTYPES as MODULE_DTYPES
from qflash.network.modules import Attention, Linear, LinearActivation
from qflash.network.operators import rotary as _rotary_operator  # noqa: F401 - registers the operator
from qflash.network.operators.gated import Gated
from qflash.specification import layers as op
from qflash.specification.fixed_point import Checker
from qflash.specification.gated import gated
from qflash.specification.rotary import MOST_OFFSET, ONE, pack_turns, rotary

DTYPES = (torch.int8, torch.int16, torch.int32)
BITS = {torch.int8: 8, torch.int16: 16, torch.int32: 31}
CHECK = Checker(True)


def integers(low: int, high: int, shape: tuple[int, ...], dtype: torch.dtype, chance: random.Random) -> torch.Tensor:
    """Return random integers of ``[low, high)``."""
    generator = torch.Generator().manual_seed(chance.getrandbits(40))
    return torch.randint(low, high, shape, generator=generator).to(dtype)


def spread_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """Return equal numbers that lie elsewhere: as they are, the dimensions the other way round, every other one, or odd."""
    if layout == "transposed":
        return x.mT.contiguous().mT if x.dim() > 1 else x
    if layout == "strided":
        wide = torch.stack((x, torch.ones_like(x)), dim=-1)
        return wide[..., 0]
    if layout == "misaligned":
        return torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape)
    return x


LAYOUTS = ("contiguous", "contiguous", "transposed", "strided", "misaligned")


@dataclasses.dataclass(frozen=True)
class Layer:
    """A call of one of the operators.

    Attributes:
        name: of the operator.
        arguments: without the back end.
    """

    name: str
    arguments: tuple[Any, ...]

    def run(self, backend: str, device: torch.device | str = "cpu") -> torch.Tensor:
        """Return what a back end makes of it, on the CPU."""
        arguments = [x.to(device) if isinstance(x, torch.Tensor) else x for x in self.arguments]
        return getattr(torch.ops.qflash, self.name)(*arguments, backend).cpu()

    def check_bounds(self) -> None:
        """Run the specification with its bounds looked at."""
        if self.name == "integer_layer_norm":
            h, epsilon, gain, offset, shift, gather, dtype = self.arguments
            h = h if gather is None else op.gather_tokens(h, gather)
            op.layer_norm(h, epsilon, gain, offset, shift, dtype, CHECK)
            return
        if self.name == "integer_norm":
            h, epsilon, gain, offset, shift, gather, residual, centred, dtype = self.arguments
            h = h if gather is None else op.gather_tokens(h, gather)
            op.layer_norm(h, epsilon, gain, offset, shift, dtype, CHECK, centred=centred, residual=residual)
            return
        if self.name == "integer_narrow":
            h, multiplier, left, offset, gather, dtype = self.arguments
            op.narrow(h if gather is None else op.gather_tokens(h, gather), multiplier, left, offset, dtype, CHECK)
            return
        if self.name == "patch_embedding":
            images, size, weight, bias, multiplier, left, *_ = self.arguments
            op.rescale(op.integer_matmul(op.patches(images, size), weight), left, bias, multiplier, CHECK)
            return
        if self.name == "integer_mean":
            op.token_mean(*self.arguments, CHECK)
            return
        if self.name == "gated":
            gated(*self.arguments, CHECK)
            return
        if self.name == "int8_linear_gated":
            x, weight, bias, multiplier, left, *product = self.arguments
            made = op.rescale(op.integer_matmul(x, weight), left, bias, multiplier, CHECK)
            gated(op.saturate(made, torch.int16), *product, CHECK)
            return
        if self.name == "rotary":
            rotary(*self.arguments, CHECK)
            return
        x, weight, bias, multiplier, left, *rest = self.arguments
        sums = op.rescale(op.integer_matmul(x, weight), left, bias, multiplier, CHECK)
        if (name := self.name.removeprefix("int8_linear_")) in op.ACTIVATIONS:
            op.activate(sums, op.Activation(name, *rest), CHECK)

    def __repr__(self) -> str:
        about = (f"{tuple(x.shape)}" if isinstance(x, torch.Tensor) else str(x) for x in self.arguments)
        return f"{self.name}({', '.join(about)})"


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    kind: str,
    chance: random.Random,
    left: int | None = None,
) -> Layer:
    """Return a linear layer with constants that suit its sums.

    Args:
        x: int8 or int16 (..., inputs).
        weight: int8 (outputs, inputs).
        kind: ``"int8"``, ``"int16"``, ``"int32"``, ``"residual"`` or an activation.
        chance: for the constants.
        left: as far as sums allow if None.
    """
    outputs = weight.shape[0]
    largest = int((weight.long().abs().sum(dim=1) << (8 * x.element_size() - 1)).max()) if outputs else 1
    room = 30 - largest.bit_length()
    most = room if left is None else left
    left = chance.choice((0, most, chance.randint(0, most))) if left is None else left
    assert left <= room
    # the bias doubles the sums at most, which `room` allows for
    bias = integers(-(largest << left), (largest << left) + 1, (outputs,), torch.int32, chance)
    wanted = {"int8": 8, "int16": 16, "residual": 14, "int32": 30}.get(kind, 13)
    bits = min(31, max(2, wanted + 36 - largest.bit_length() - left + chance.randint(-3, 2)))
    multiplier = integers(1 << (bits - 2), 1 << bits, (outputs,), torch.int32, chance)
    if chance.random() < 0.2:
        multiplier = integers(0, 1 << 31, (outputs,), torch.int32, chance)
    constants = (x, weight, bias, multiplier, left)
    if kind in op.ACTIVATIONS:
        shift = chance.choice((0, 30, chance.randint(8, 22)))
        factor = integers(0, (1 << 13) + 1, (outputs,), torch.int32, chance)
        high = min(30, shift + 7)
        offset = integers(-(1 << high) + 1, 1 << high, (outputs,), torch.int32, chance)
        return Layer(f"int8_linear_{kind}", (*constants, factor, offset, shift))
    dtype = torch.int16 if kind == "residual" else getattr(torch, kind)
    residual = None
    if kind == "residual":
        residual = integers(-32768, 32768, (*x.shape[:-1], outputs), torch.int16, chance)
        if chance.random() < 0.3:
            residual = torch.where(residual > 0, 32767, -32768).to(torch.int16)
        residual = spread_out(residual, chance.choice(LAYOUTS))
    return Layer("int8_linear", (*constants, residual, None, dtype))


KINDS = ("int8", "int16", "int32", "residual", *op.ACTIVATIONS)


def draw_linear(number: int, most: int = 150) -> Layer:
    """Return a random linear layer of up to ``most`` rows, inputs and outputs; some take int16."""
    chance = random.Random(number)
    shape = chance.choice(((chance.randint(1, most),), (chance.randint(0, 3), chance.randint(1, most // 2)), ()))
    inputs = chance.choice((chance.randint(1, 40), chance.randint(1, 2 * most), 16 * chance.randint(1, 12)))
    outputs = chance.choice((chance.randint(1, most), 16 * chance.randint(1, 8)))
    kind = KINDS[number % len(KINDS)]
    dtype, most_weight = torch.int8, 128
    if number % 4 == 3 and kind not in op.ACTIVATIONS:
        dtype, most_weight = torch.int16, min(128, (1 << 14) // inputs)
    ends = op.LIMITS[dtype]
    x = integers(ends[0], ends[1] + 1, (*shape, inputs), dtype, chance)
    weight = integers(-most_weight, most_weight, (outputs, inputs), torch.int8, chance)
    if chance.random() < 0.15:
        x = torch.full_like(x, chance.choice(ends))
    if chance.random() < 0.15:
        weight = torch.full_like(weight, chance.choice((-most_weight, most_weight - 1)))
    x, weight = spread_out(x, chance.choice(LAYOUTS)), spread_out(weight, chance.choice(LAYOUTS))
    return linear(x, weight, kind, chance)


def draw_layer_norm(number: int, channels: int | None = None, rows: int = 13) -> Layer:
    """Return a random normalisation; some rows are constant, at the ends, or zero but for one channel."""
    chance = random.Random(number)
    channels = channels or chance.choice((1, 2, chance.randint(1, 40), chance.randint(1, 700), 64 * chance.randint(1, 8)))
    shape = chance.choice(((rows, channels), (chance.randint(0, 2), rows, channels)))
    spread = chance.choice((1, 30, 3000, 32768))
    h = integers(-spread, spread, shape, torch.int16, chance)
    if h.numel():
        first = h.view(-1, channels)
        first[0], first[1], first[2], first[3] = 0, -32768, 32767, chance.randint(-9, 9)
        first[4, ::2], first[4, 1::2] = 32767, -32768
        first[5], first[5, 0] = 0, 32767
        first[6], first[6, -1] = 5, 6
    epsilon = chance.choice((0, 1, 7, 16 * channels, chance.getrandbits(40), 1 << 46))
    gain = integers(-(1 << 31), 1 << 31, (channels,), torch.int32, chance)
    offset = integers(-(1 << 30) + 1, 1 << 30, (channels,), torch.int32, chance)
    if chance.random() < 0.7:
        offset = offset >> 8
    shift = chance.choice((1, 29, chance.randint(8, 28)))
    h, dtype = spread_out(h, chance.choice(LAYOUTS)), DTYPES[number % 3]
    return Layer("integer_layer_norm", (h, epsilon, gain, offset, shift, None, dtype))


def shuffled(tokens: int, chance: random.Random) -> torch.Tensor:
    """Return the numbers of tokens in random order, int32."""
    return torch.tensor(chance.sample(range(tokens), tokens), dtype=torch.int32)


def draw_joined_norm(number: int, width: int | None = None) -> Layer:
    """Return a random normalisation of rows that are joined of one to five tokens."""
    chance = random.Random(number)
    images, tokens, pieces = (
        chance.randint(0 if number % 8 == 0 else 1, 3),
        chance.randint(1, 20),
        chance.choice((1, 1, 2, 4, 5)),
    )
    width = width or chance.choice((1, chance.randint(1, 40), 32 * chance.randint(1, 7)))
    one = draw_layer_norm(number, width * pieces).arguments
    h = integers(-3000, 3000, (images, tokens, width), torch.int16, chance)
    shape = chance.randint(1, 25), pieces
    gather = integers(0, tokens, shape, torch.int32, chance)
    if pieces == 1 and number % 2:
        gather = shuffled(tokens, chance)[:, None]
    gather = spread_out(gather, chance.choice(LAYOUTS))
    return Layer("integer_layer_norm", (spread_out(h, chance.choice(LAYOUTS)), *one[1:5], gather, one[6]))


def draw_scattered_linear(number: int) -> Layer:
    """Return a random linear layer, with a residual or without, whose tokens go to other places."""
    chance = random.Random(number)
    shape = chance.randint(0 if number % 8 == 0 else 1, 3), chance.randint(1, 40), 16 * chance.randint(1, 9)
    outputs = chance.choice((chance.randint(1, 90), 32 * chance.randint(1, 4)))
    x = integers(-128, 128, shape, torch.int8, chance)
    weight = integers(-128, 128, (outputs, shape[2]), torch.int8, chance)
    layer = linear(x, weight, ("residual", "int8", "residual", "int16", "int32")[number % 5], chance).arguments
    return Layer("int8_linear", (*layer[:6], spread_out(shuffled(shape[1], chance), chance.choice(LAYOUTS)), layer[7]))


def draw_embedding(number: int) -> Layer:
    """Return a random patch embedding, with and without positions and prefix tokens, and pixels behind the last patch."""
    chance = random.Random(number)
    size = chance.choice(((1, 1), (2, 3), (4, 4), (7, 7), (16, 16), (14, 14)))
    sides = [chance.randint(1, 3) * side + number % 2 * chance.randint(0, side - 1) for side in size]
    shape = chance.randint(0 if number % 8 == 0 else 1, 3), chance.choice((1, 3, 5)), *sides
    images = spread_out(integers(0, 256, shape, torch.uint8, chance), chance.choice(LAYOUTS))
    outputs, inputs = chance.choice((chance.randint(1, 90), 32 * chance.randint(1, 4))), shape[1] * size[0] * size[1]
    patches = (shape[2] // size[0]) * (shape[3] // size[1])
    weight = integers(-128, 128, (outputs, inputs), torch.int8, chance)
    constants = linear(integers(0, 1, (1, inputs), torch.int8, chance), weight, "residual", chance).arguments[1:5]
    position, prefix = (
        integers(-32768, 32768, (1, tokens, outputs), torch.int16, chance) if chance.random() < 0.7 else None
        for tokens in (patches, chance.choice((0, 1, 3)))
    )  # fmt: skip
    return Layer("patch_embedding", (images, size, *constants, position, prefix))


def draw_mean(number: int) -> Layer:
    """Return a random mean over tokens, some behind a prefix."""
    chance = random.Random(number)
    shape = chance.randint(0 if number % 8 == 0 else 1, 4), chance.choice((1, chance.randint(1, 70))), chance.randint(1, 300)
    x = integers(-32768, 32768, shape, torch.int16, chance)
    if number % 3 == 0:
        x = torch.full_like(x, chance.choice((-32768, 32767)))
    if number % 2:
        x = torch.cat((torch.ones_like(x[:, :1]), x), dim=1)[:, 1:]
    else:
        x = spread_out(x, chance.choice(LAYOUTS))
    # the offset doubles the sums at most
    left = chance.randint(0, 15 - shape[1].bit_length())
    most = shape[1] << (15 + left)
    offset = integers(-most, most, shape[2:], torch.int32, chance)
    bits = min(31, 33 + chance.choice((8, 16)) - most.bit_length())
    multiplier = integers(0, 1 << bits, shape[2:], torch.int32, chance)
    return Layer("integer_mean", (x, multiplier, left, offset, DTYPES[number % 3]))


def draw_gated(number: int) -> Layer:
    """Return a random gated product; some inputs are at the ends of their range."""
    chance = random.Random(number)
    channels = chance.choice((1, chance.randint(1, 40), chance.randint(1, 600), 64 * chance.randint(1, 6)))
    shape = chance.choice(
        ((chance.randint(1, 30),), (chance.randint(0 if number % 8 == 0 else 1, 3), chance.randint(1, 15)), ())
    )
    x = integers(-32768, 32768, (*shape, 2 * channels), torch.int16, chance)
    if number % 4 == 1:
        gate, value = x.chunk(2, dim=-1)
        gate.fill_(chance.choice((-32768, 32767)))
        value.fill_(chance.choice((-32768, 32767)))
    return Layer("gated", (spread_out(x, chance.choice(LAYOUTS)), *_gated_constants(number, channels, chance)))


def _gated_constants(number: int, channels: int, chance: random.Random) -> tuple[Any, ...]:
    factor = chance.choice(((1 << 31) - 1, 0, chance.getrandbits(31), 1 << 24))
    # products reach 2**30, outputs 2**7 to 2**29
    wanted = {torch.int8: 9, torch.int16: 17, torch.int32: 31}[DTYPES[number % 3]]
    multiplier = integers(0, 1 << chance.randint(wanted, 31), (channels,), torch.int32, chance)
    offset = integers(1 - (1 << 30), 1 << 30, (channels,), torch.int32, chance) >> chance.choice((0, 0, 7))
    name = list(op.ACTIVATIONS)[number // 3 % len(op.ACTIVATIONS)]
    return factor, multiplier, offset, name, DTYPES[number % 3]


def draw_linear_gated(number: int, rows: int = 0, inputs: int = 0, channels: int = 0) -> Layer:
    """Return a random linear layer with a gated product behind it, of up to 150 rows, or of a size."""
    chance = random.Random(number)
    rows = rows or chance.randint(1, 150)
    inputs = inputs or chance.choice((chance.randint(1, 40), 16 * chance.randint(1, 30)))
    channels = channels or chance.choice((chance.randint(1, 40), 8 * chance.randint(1, 40)))
    x = integers(-128, 128, (rows, inputs), torch.int8, chance)
    weight = integers(-128, 128, (2 * channels, inputs), torch.int8, chance)
    if number % 5 == 1:
        x = torch.full_like(x, chance.choice((-128, 127)))
    x, weight = spread_out(x, chance.choice(LAYOUTS)), spread_out(weight, chance.choice(LAYOUTS))
    constants = linear(x, weight, "int16", chance).arguments[1:5]
    return Layer("int8_linear_gated", (x, *constants, *_gated_constants(number, channels, chance)))


def draw_rotary(number: int, half: int | None = None) -> Layer:
    """Return random rotary positions of one to six heads, with a table for all heads or one for each."""
    chance = random.Random(number)
    half = half or chance.choice((1, chance.randint(1, 40), 8 * chance.randint(1, 8)))
    heads, tokens = chance.choice((1, chance.randint(1, 3))), chance.randint(1, 20)
    shape = chance.randint(0 if number % 8 == 0 else 1, 3), tokens, chance.randint(1, 2) * heads * 2 * half
    x = integers(-32768, 32768, shape, torch.int16, chance)
    if number % 4 == 1:
        x = torch.full_like(x, chance.choice((-32768, 32767)))
    generator = torch.Generator().manual_seed(chance.getrandbits(40))
    angle = 7 * torch.rand((heads, tokens, half), generator=generator)
    turns = pack_turns((angle.cos() * ONE).round(), (angle.sin() * ONE).round())
    if number % 3 == 0:
        turns = pack_turns(*(integers(-ONE, ONE + 1, (heads, tokens, half), torch.int32, chance) for _ in range(2)))
    if number % 4 == 1:
        ends = [chance.choice((-ONE, 0, ONE)) for _ in range(2)]
        turns = pack_turns(*(torch.full((heads, tokens, half), end) for end in ends))
    offset = integers(-MOST_OFFSET, MOST_OFFSET + 1, shape[2:], torch.int32, chance) >> chance.choice((0, 6))
    bits = chance.choice((9, 11, 18, 31))
    multiplier = integers(0, 1 << bits, shape[2:], torch.int32, chance)
    x, turns = spread_out(x, chance.choice(LAYOUTS)), spread_out(turns, chance.choice(LAYOUTS))
    return Layer("rotary", (x, turns, offset, multiplier, DTYPES[number % 7 % 3]))


def draw_norm(number: int) -> Layer:
    """Return a random normalisation without a mean, with a residual, or both; every other one takes tokens from elsewhere."""
    chance = random.Random(number)
    h, epsilon, *constants, gather, dtype = (draw_joined_norm if number % 2 else draw_layer_norm)(number).arguments
    centred = number % 3 == 2
    residual = None
    if centred or number % 5 < 2:
        dtype = torch.int16
        shape = h.shape if gather is None else (h.shape[0], gather.shape[0], len(constants[0]))
        residual = spread_out(integers(-32768, 32768, tuple(shape), torch.int16, chance), chance.choice(LAYOUTS))
    epsilon = min(epsilon, op.MAX_EPSILON - (not centred))
    return Layer("integer_norm", (h, epsilon, *constants, gather, residual, centred, dtype))


def draw_narrow(number: int) -> Layer:
    """Return a random residual stream to be brought to another unit; every other one takes tokens from elsewhere."""
    chance = random.Random(number)
    h, _, gain, _, _, gather, _ = (draw_joined_norm if number % 2 else draw_layer_norm)(number).arguments
    left = chance.randint(0, 14)
    # the offset doubles the shifted numbers at most
    most = 1 << (15 + left)
    offset = integers(-most, most, (len(gain),), torch.int32, chance)
    multiplier = integers(0, 1 << chance.choice((31, 25 - left)), (len(gain),), torch.int32, chance)
    return Layer("integer_narrow", (h, multiplier, left, offset, gather, DTYPES[number % 5 % 3]))


MOVING = (
    draw_joined_norm,
    draw_scattered_linear,
    draw_embedding,
    draw_mean,
    draw_gated,
    draw_linear_gated,
    draw_norm,
    draw_narrow,
    draw_rotary,
)
"""Draws of layers that take tokens from other places, bring them there, or average them; and of some that do neither."""


def edge_norms() -> list[Layer]:
    """Return normalisations at the ends of their ranges, of which nothing but the normalised rows' last bit is lost.

    Numbers of channels around those where their constants change, up to the most; rows of one value; and variances V next to
    powers of four, where an inverse root is largest.
    """
    chance = random.Random(2)
    found = []

    def add(h: torch.Tensor, epsilon: int) -> None:
        gain, offset = torch.full(h.shape[1:], 1 << 29, dtype=torch.int32), torch.zeros(h.shape[1:], dtype=torch.int32)
        found.append(Layer("integer_layer_norm", (h, epsilon, gain, offset, 1, None, torch.int32)))
        # the mean stays
        epsilon = min(epsilon, op.MAX_EPSILON - 1)
        found.append(Layer("integer_norm", (h, epsilon, gain, offset, 1, None, None, False, torch.int32)))

    for channels in (1, 2, 3, 16, 17, 32, 33, 64, 65, 4095, 4096):
        h = integers(-32768, 32768, (6, channels), torch.int16, chance)
        h[0], h[1], h[2], h[3] = 32767, -32768, 0, -32768
        h[2, 0], h[3, 0] = 1, 32767
        h[4, ::2], h[4, 1::2] = 32767, -32768
        for epsilon in (0, chance.choice((1 << 46, chance.getrandbits(44)))):
            add(h, epsilon)
    pair = torch.tensor([[1, -1]], dtype=torch.int16)
    for power in range(6, 48, 2):
        for less in (32, 33):
            # (4 h - m)**2 of the two is 32
            add(pair, (1 << power) - less)
    return found


def extremes() -> list[Layer]:
    """Return layers at the ends of their ranges."""
    chance = random.Random(1)
    found = edge_norms()
    for value, weights in ((-128, -128), (-128, 127), (127, -128), (127, 127)):
        for inputs in (1, 31, 64, 200):
            x, weight = torch.full((7, inputs), value, dtype=torch.int8), torch.full((33, inputs), weights, dtype=torch.int8)
            found += [linear(x, weight, kind, chance, left) for kind in KINDS for left in (0, 3, None)]
    x, weight = (integers(-128, 128, (20, 48), torch.int8, chance) for _ in range(2))
    found += [linear(x, weight, name, chance) for name in op.ACTIVATIONS for _ in range(7)]
    found += [draw_layer_norm(number, channels) for number, channels in enumerate((1, 1, 1, 2, 3, 4096, 4096, 4096))]
    # where inputs of activations pass the largest that counts, 2**17 - 1, in steps of one
    x, one, unit = torch.arange(-5, 5, dtype=torch.int8)[:, None], torch.ones(1, dtype=torch.int32), torch.tensor([1 << 30])
    constants = 4 * ((1 << 17) - 1) * one, unit.to(torch.int32), 2, one, -(1 << 17) * one, 0
    found += [Layer(f"int8_linear_{name}", (x, one[None].to(torch.int8), *constants)) for name in op.ACTIVATIONS]
    ends = torch.tensor([-32768, -32767, -1, 0, 1, 32766, 32767], dtype=torch.int16)
    x = torch.stack(torch.meshgrid(ends, ends, indexing="ij"), dim=-1).view(-1, 2)
    for name, factor in itertools.product(op.ACTIVATIONS, ((1 << 31) - 1, 1 << 30)):
        for offset in (1 - (1 << 30), (1 << 30) - 1):
            found.append(
                Layer(
                    "gated",
                    (
                        x,
                        factor,
                        *(torch.tensor([end], dtype=torch.int32) for end in ((1 << 31) - 1, offset)),
                        name,
                        torch.int32,
                    ),
                )
            )
    return found


def fill_linear(module: Linear, largest: int) -> None:
    """Draw a linear layer's integers, with the largest multiplier ``largest``, whose first sums are as large as they get."""
    outputs = module.bias.numel()
    module.weight.copy_(torch.randint(-127, 128, module.weight.shape))
    module.weight[0] = 127
    module.bias.copy_(torch.randint(-(1 << 16), 1 << 16, (outputs,)))
    module.multiplier.copy_(torch.randint(0, largest, (outputs,)))
    module.multiplier[:2] = largest


def linear_module(left: int, bits: int, dtype: str) -> tuple[Linear, torch.Tensor]:
    """Make a linear layer with multipliers of ``bits``, and int8 inputs some of which are at the ends."""
    torch.manual_seed(bits)
    module = Linear(64, 24, dtype)
    fill_linear(module, (1 << bits) - 1)
    module.left = left
    x = torch.randint(-128, 128, (2, 7, 64), dtype=torch.int8)
    x[0, :2], x[0, 1] = 127, -128
    return module, x


def activated_module(kind: type[LinearActivation], bits: int, shift: int) -> LinearActivation:
    """Make a linear layer of 32 inputs and 16 outputs with an activation, some of whose constants are at their ends."""
    module = kind(32, 16)
    fill_linear(module, (1 << bits) - 1)
    module.left = 8
    setattr(module, f"{module.activation}_shift", shift)
    _, multiplier, offset, _ = module.activated
    multiplier.copy_(torch.randint(0, op.MAX_ACTIVATION_MULTIPLIER + 1, (16,)))
    offset.copy_(torch.randint(1 - (1 << 30), 1 << 30, (16,)))
    multiplier[:2], offset[:2] = op.MAX_ACTIVATION_MULTIPLIER, (1 << 30) - 1
    return module


def gated_module(layer: Layer) -> Gated:
    """Make the module of a call of ``gated``."""
    _, factor, multiplier, offset, activation, dtype = layer.arguments
    module = Gated(len(multiplier), next(name for name, each in MODULE_DTYPES.items() if each == dtype), activation)
    module.gate_multiplier = factor
    module.multiplier.copy_(multiplier)
    module.offset.copy_(offset)
    return module


def attention_module(
    recipe: qflash.Recipe, bias_shape: Sequence[int] | None = None, window: int = 0, finest: float = 1e-6
) -> Attention:
    """Make attention whose heads have scales from where all scores are alike to where the largest takes all.

    Args:
        recipe, bias_shape, window: of :class:`qflash.network.modules.Attention`.
        finest: the least output scale of a head; with 1e-6 an output needs no shift.
    """
    heads, width = 6, 16
    module = Attention(heads, width, 0.25, recipe.key, bias_shape, window)
    scales = torch.tensor([1e-9, 2e-4, 0.02, 0.3, 4.0, 1e3])
    for name, scale in (
        ("query", scales.view(1, heads, 1, 1)),
        ("key", (scales.sqrt() + 0.01).view(1, heads, 1, 1)),
        ("value", torch.rand(1, heads, 1, width) + 0.5),
        ("output", torch.rand(1, heads, 1, width) * 0.5 + 0.2),
    ):
        getattr(module, f"{name}_scale").copy_(scale.to(torch.float32).view(torch.int32))
    # the least shift of an output, and the largest
    module.output_scale[0, :, 0, :2] = torch.tensor([finest, 1e4]).view(torch.int32)
    if module.bias is not None:
        module.bias.copy_(torch.randint(-(1 << 20), 1 << 20, module.bias.shape))
        module.bias[-1, 0, 0, 0], module.bias[-1, 0, 0, 1] = -(1 << 28), 1 << 28
    return module


EXPORTED_RECIPES = {
    "default": qflash.DEFAULT,
    "rounded": qflash.DEFAULT.replace(row_sum="rounded"),
    "linear": qflash.DEFAULT.replace(exponential="linear"),
    "7 bits": qflash.DEFAULT.replace(probability_bits=7),
    "floor": qflash.DEFAULT.replace(probability_rounding="floor"),
    "7 bits linear floor": qflash.DEFAULT.replace(probability_bits=7, exponential="linear", probability_rounding="floor"),
}
"""Recipes of attention that ONNX and TOSA have forms for."""
