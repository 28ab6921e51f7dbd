"""No intermediate result can leave its type (:mod:`qflash_lab.verify.bounds`), and inputs that come close to every bound."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from typing import ClassVar

import pytest
import torch

import qflash
from helpers import same_bits
from network_cases import extremes
from qflash import backends
from qflash.kernels.cpu import launch as cpu
from qflash.specification import fixed_point as fp
from qflash.specification import layers as op
from qflash.specification import reference, rotary
from qflash.specification.attention_call import int8_call
from qflash.specification.gated import gated
from qflash.specification.recipe import Recipe
from qflash_lab.verify import bounds
from qflash_lab.verify.bounds import Interval

ONE = torch.ones(1, 1, 1, 1)


@functools.cache
def attention_bounds() -> dict[tuple[str, str], bounds.Quantity]:
    return bounds.bound_attention().quantities


@functools.cache
def network_bounds() -> dict[tuple[str, str], bounds.Quantity]:
    return bounds.bound_network().quantities


def test_everything_fits_its_type() -> None:
    """They raise where it does not."""
    assert len(attention_bounds()) > 50 and len(network_bounds()) > 25
    for one in (*attention_bounds().values(), *network_bounds().values()):
        low, high = bounds.WIDTHS[one.width]
        assert low <= one.range.low <= one.range.high <= high and one.bits_left >= 0


def test_the_bounds_of_the_documents() -> None:
    """Docs/algorithm.md, Overflow, and docs/integer_network.md."""

    def at(step: str, name: str) -> Interval:
        of_networks = step in ("linear", "GELU", "SiLU", "gated", "norm", "rotary", "embedding")
        return (network_bounds() if of_networks else attention_bounds())[step, name].range

    assert at("2", "S") == (-127 * 128 * 512, 2**23)
    assert at("2", "(m - S) · M").high == 32640 * 57344
    assert at("4", "t").high < 0.877 * 2**31
    assert at("2", "y = S · A").magnitude == 2**30
    assert at("2", "m - y").high == 32640 * 2**16
    assert at("2", "z, a key scale a token").magnitude < 2**29 + 2**28 and at("2", "z, one key scale").magnitude < 2**29 + 2**28
    assert at("2", "m - z, a key scale a token").high <= 2**30 + 2**29 + 2**28
    assert at("4", "g · 2^up").high < 2**31.6
    assert at("4", "w").high == 32674
    assert at("7", "L").high < 0.9972 * 2**31
    assert at("7", "M").magnitude == 256
    assert at("7", "missing · M").magnitude < 2**22
    assert at("8", "O << (24 - B)").magnitude == 2**31 - 256
    assert at("8", "O << (24 - B), exact row sum").magnitude == at("8", "O << (24 - B), 15 bits").magnitude == 2**31 - 2
    assert at("8", "2^28 - mul(D, x, 32)").magnitude < 2**24
    assert at("6", "l, 7 and 8 bits, longer rows").high < 2**28 and at("6", "l, 15 bits, longer rows").high < 2**35
    assert at("7", "L, longer rows").high < 2**35 and at("7", "8 · Σ V, longer rows").magnitude == 2**30
    assert at("6", "O, 7 and 8 bits, longer rows").magnitude < 2**35 and at("6", "O, 15 bits, longer rows").magnitude < 2**42
    assert at("6", "O · alpha, longer rows").magnitude < 2**34 * 2**24
    for name in ("O << (24 - B)", "O << (24 - B), exact row sum", "O << (24 - B), 15 bits"):
        assert at("8", f"{name}, longer rows").low >= -(2**31) and at("8", f"{name}, longer rows").high <= 2**31 - 1
    assert at("9", "mul(x, R, 32)").magnitude <= 2**29 + 1
    assert at("9", "mulhi(O << (24 - B), mul(x, R, 32))").magnitude <= 2**28 + 1
    assert at("linear", "mul((acc << left) + b, R, 32)").magnitude <= 2**30
    assert at("GELU", "r · r + half").high == 4096**2 + 256
    assert at("GELU", "w").high == 18977
    assert at("SiLU", "w").high == 32591 and at("SiLU", "w · h + half").high < 2**30
    assert at("gated", "u = mul(gate, A, 28)").magnitude == 2**18
    assert at("gated", "p = mul(f(u), v, 2)").magnitude <= 2**30 and at("gated", "p + B").magnitude < 2**31
    assert at("norm", "m").magnitude == 2**17
    assert at("norm", "e = 4 h - m").magnitude < 2**18
    assert at("norm", "p = e >> 9") == (-512, 511)
    for name in ("Σ p²", "Σ p q", "Σ q²"):
        assert at("norm", name).magnitude <= 2**30
    assert 0.999 * 2**47 < at("norm", "V = Σ e² + E").high < 2**47
    assert at("norm", "d = C · h - S").magnitude < 2**28
    assert max(at("norm", f"x before step {step}").high for step in (1, 2, 3)) < 2**30 and at("norm", "x").high <= 2**30
    assert at("norm", "I").low >= 2**29 and at("norm", "I").high < 2**30
    assert at("norm", "K").low >= 2**29 and at("norm", "K").high == 2**30
    assert at("norm", "f").high <= 2**30
    assert at("norm", "d 2^l, rounded").magnitude <= 2**30
    assert at("rotary", "a cos - b sin").magnitude == 2**30
    assert at("rotary", "a cos - b sin + B").magnitude == 2**31 - 1
    assert at("rotary", "mul(a cos - b sin + B, R, 32)").magnitude <= 2**30
    assert at("norm", "N").magnitude < 2**26 + 4
    assert at("embedding", "table + position") == (-(2**16), 2**16 - 2)
    assert at("3", "S · M of a visible key").low > -(2**30)


@pytest.mark.parametrize(
    ("owner", "name", "factor", "what"),
    [
        (fp, "MULTIPLIER_BUDGET", 2, r"\(m - S\) · M"),
        (fp, "SECTION_KEYS", 2, "O|l"),
        (fp, "MAX_KEYS", 4, "8 · Σ V"),
        (fp, "BIAS_LIMIT", 4, "an honest score"),
        (fp, "BIAS_MASKED", 0.75, "a visible key"),
        (fp, "RECIPROCAL_START", 2, "x at the start"),
        (op, "ROOT_START", 2, "x before step 1"),
        (op, "MAX_CHANNELS", 2, "Σ p²|Σ p q|Σ q²|V"),
        (op, "MAX_EPSILON", 2, "V = "),
        (op, "ACTIVATION_LIMIT", 2, "g · M"),
        (rotary, "ONE", 2, "a cos - b sin"),
        (rotary, "MOST_OFFSET", 2, r"a cos - b sin \+ B"),
    ],
)
def test_a_constant_that_is_too_large_is_noticed(
    owner: object, name: str, factor: float, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, int(getattr(owner, name) * factor))
    with pytest.raises((OverflowError, AssertionError), match=what):
        bounds.bound_attention([1, 64, 512]) if owner is fp else bounds.bound_network()


@pytest.mark.parametrize("step", [4099, 65537])
def test_newton_iterations_stay_in_their_ranges(step: int) -> None:
    for found, known, most in (
        (bounds.try_reciprocal(step), attention_bounds()["8", "x"].range, 2.0**-28),
        (bounds.try_inverse_root(step), network_bounds()["norm", "x"].range, 2.0**-24),
    ):
        assert known.low <= found.low and found.high <= known.high
        assert found.low >= 2**29 - 64 and found.high < 2**30
        assert 0 < found.worst < most


def test_the_command_prints_every_quantity(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    note = bounds.Quantities()
    note.quantities = network_bounds()
    monkeypatch.setattr(bounds, "bound_attention", bounds.Quantities)
    monkeypatch.setattr(bounds, "bound_network", lambda: note)
    monkeypatch.setattr("sys.argv", ["bounds", "--format", "json"])
    bounds.main()
    said = json.loads(capsys.readouterr().out)
    assert [(one["step"], one["name"]) for one in said["quantities"]] == list(network_bounds())
    monkeypatch.setattr("sys.argv", ["bounds"])
    bounds.main()
    assert len(capsys.readouterr().out.splitlines()) == len(network_bounds())


class Extremes(fp.Checker):
    """Notes the ends of what it checks."""

    seen: ClassVar[dict[str, Interval]] = {}

    def __call__(self, name: str, x: torch.Tensor, low: int, high: int) -> torch.Tensor:
        super().__call__(name, x, low, high)
        if self.enabled and x.numel():
            here = Interval(int(x.min()), int(x.max()))
            self.seen[name] = self.seen.get(name, here) | here
        return x


def rows(*numbers: int, channels: int) -> torch.Tensor:
    """Return int8 tokens each of whose channels has one number."""
    return torch.tensor(numbers, dtype=torch.int8).view(1, 1, -1, 1).expand(1, 1, len(numbers), channels).contiguous()


def scale_for(multiplier: int, fraction_bits: int) -> float:
    """Return the softmax scale with which M is ``multiplier``, as the scales of query and key are 1."""
    return multiplier * 2.0**-fraction_bits / math.log2(math.e)


FINE = 1 - 2.0**-24
"""A scale whose mantissa has all of its bits: A is then 2**c."""


def widest(recipe: Recipe) -> list[tuple]:
    """Return calls at the ends of scores and exponents, by way of a score."""
    found = []
    for d in (1, 64, fp.MAX_HEAD_DIM):
        query, key, value = rows(-128, 127, channels=d), rows(-128, 127, channels=d), rows(-128, 127, channels=3)
        bias = torch.tensor([fp.BIAS_LIMIT, -fp.BIAS_LIMIT], dtype=torch.int32).view(1, 1, 1, 2)
        marked = torch.tensor([fp.SCORE_POISON, -fp.BIAS_LIMIT], dtype=torch.int32).view(1, 1, 1, 2)
        column = torch.full((1, 1, 2, 1), FINE)
        for key_scale in (ONE, column):
            for mask in (None, bias, bias.flip(-1), marked):
                for fraction_bits in (0, 16, 24):
                    scale = scale_for(fp.most_multiplier(d, mask is not None), fraction_bits)
                    found.append((query, ONE, key, key_scale, value, ONE, mask, False, scale, None, torch.float32, recipe))
                # as fine as a bias, and as large as R lets it be
                for scale in (scale_for(1, 17 - fp.column_bits(d)) * (1 - 2.0**-20), 2.0**60):
                    found.append((query, ONE, key, key_scale, value, ONE, mask, False, scale, None, torch.float32, recipe))
    return found


def longest(recipe: Recipe, keys: int) -> list[tuple]:
    """Return calls of a row of ``keys``: all keys have the largest weight, or one and all others lose the most by rounding."""
    found = []
    # query 1, one unit of a score 1/256 octave; the weight's fraction before rounding is largest at some distance
    offset, _, _ = fp.probability_constants(recipe.exponential, recipe.probability_bits)
    distance = torch.arange(256)
    t = (distance << 16) + int(fp.exponent_offset(offset, torch.tensor(24)))
    w = fp.fine_probability(t, torch.tensor(24), recipe.exponential, recipe.probability_bits)
    lost = w - (fp.round_shift(w, fp.FINE_BITS) << fp.FINE_BITS)
    furthest = int(lost.argmax())
    query = rows(1, channels=1)
    for down in {0, furthest}:
        key = torch.full((1, 1, keys, 1), 127 - down, dtype=torch.int16).clamp(-128, 127).to(torch.int8)
        key[:, :, 0] = 127
        value = torch.tensor([-128, 127], dtype=torch.int8).expand(1, 1, keys, 2)
        for output, dtype in ((None, torch.float32), (ONE, torch.int8))[: 1 + (down > 0)]:
            found.append((query, ONE, key, ONE, value, ONE, None, False, scale_for(1, 8), output, dtype, recipe))
    return found


RECIPES = {
    "default": qflash.DEFAULT,
    "accurate": qflash.ACCURATE,
    "linear": Recipe(exponential="linear"),
    "seven bits": Recipe(exponential="linear", probability_bits=7, output="value_scale"),
    "paper": qflash.PAPER.replace(key_block=256),
}


@pytest.fixture(scope="module")
def reached() -> dict[str, dict[str, Interval]]:
    """By recipe, what the checked reference met in all calls; the kernels have its bits."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "Checker", Extremes)
        for name, recipe in RECIPES.items():
            patch.setattr(Extremes, "seen", {})
            for arguments in (*widest(recipe), *longest(recipe, fp.SECTION_KEYS)):
                call = int8_call(*arguments)
                checked = reference.int8_attention(call, checked=True)
                assert same_bits(reference.int8_attention(call), checked)
                if not backends.cpu_missing():
                    assert same_bits(cpu.launch_attention(call), checked)
            found[name] = dict(Extremes.seen)
    return found


LIMITS: dict[str, Callable[[str], tuple[str, str]]] = {
    "S": lambda _: ("2", "S"),
    "y": lambda _: ("2", "y = S · A"),
    "z": lambda _: ("2", "z, a key scale a token"),
    "t": lambda _: ("4", "t"),
    "l": lambda name: ("6", "l, 15 bits" if name == "accurate" else "l, 7 and 8 bits"),
    "L": lambda _: ("7", "Σ w"),
    "L or l": lambda _: ("7", "L"),
    "twice the mean of V": lambda _: ("7", "M"),
    "w": lambda _: ("4", "w"),
    "O with the missing mass": lambda _: ("7", "O with the missing mass"),
}


@pytest.mark.parametrize("name", RECIPES)
def test_worst_inputs_stay_inside_and_come_close(name: str, reached: dict[str, dict[str, Interval]]) -> None:
    for quantity, known in LIMITS.items():
        if quantity not in reached[name]:
            assert name not in ("default", "linear")
            continue
        seen, limit = reached[name][quantity], attention_bounds()[known(name)].range
        assert limit.low <= seen.low and seen.high <= limit.high, quantity
    reach = {
        quantity: reached[name][quantity].magnitude / attention_bounds()[known(name)].range.magnitude
        for quantity, known in LIMITS.items()
        if quantity in reached[name] and not (quantity in ("l", "P") and name in ("seven bits", "paper"))
    }
    assert min(reach.values()) > 0.98, reach
    wide = 38 if name == "accurate" else 31
    share = {"accurate": 0.999, "default": 0.99, "linear": 0.99}.get(name, 0.24)
    assert share < reached[name]["O"].magnitude / 2.0**wide < 1


@pytest.mark.parametrize("name", ["default", "accurate"])
def test_the_longest_rows_stay_inside_and_come_close(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "Checker", Extremes)
    monkeypatch.setattr(Extremes, "seen", {})
    for arguments in longest(RECIPES[name], fp.MAX_KEYS)[:2]:
        reference.int8_attention(int8_call(*arguments), checked=True)
    sums = {"l": ("6", "l, 15 bits"), "O": ("6", "O, 15 bits")}
    if name == "default":
        sums = {"L": ("7", "Σ w"), "L or l": ("7", "L"), "8 times the sum of V": ("7", "8 · Σ V")}
    for quantity, (step, known) in sums.items():
        limit = attention_bounds()[step, f"{known}, longer rows"].range
        seen = Extremes.seen[quantity]
        assert limit.low <= seen.low and seen.high <= limit.high, quantity
        assert seen.magnitude > 0.98 * limit.magnitude, quantity


def test_layers_at_their_ends_stay_inside() -> None:
    met: dict[str, Interval] = {}

    def check(name: str, x: torch.Tensor, low: int, high: int) -> torch.Tensor:
        here = Interval(int(x.min()), int(x.max()))
        met[name] = met.get(name, here) | here
        return fp.Checker(True)(name, x, low, high)

    every = torch.arange(-op.TAIL_END, op.ACTIVATION_LIMIT + 1)
    ends = torch.tensor([op.MAX_ACTIVATION_MULTIPLIER], dtype=torch.int32), torch.tensor([(1 << 30) - 1], dtype=torch.int32)
    for name in op.ACTIVATIONS:
        op.activate(every[:, None], op.Activation(name, *ends, 8), check)  # type: ignore[arg-type]
    corner = torch.tensor([[32767, -32768], [-32768, 32767], [32767, 32767]], dtype=torch.int16)
    for factor in ((1 << 31) - 1, 1 << 30):
        gated(corner, factor, ends[0] * 0, ends[1], "silu", torch.int8, check)  # type: ignore[arg-type]
    lonely = torch.full((4, op.MAX_CHANNELS), -(1 << 15), dtype=torch.int16)
    lonely[0, 0] = 32767
    lonely[1, ::2] = 32767
    lonely[2, 0] = -(1 << 15) + 1
    gain, offset = (torch.full((op.MAX_CHANNELS,), end, dtype=torch.int32) for end in ((1 << 31) - 1, (1 << 30) - 1))
    # the number of channels with the least j beside it, and a variance just below a power of four
    single = torch.zeros(1, op.MAX_CHANNELS - 1, dtype=torch.int16)
    single[0, 0] = 8191
    op.normalise(single, 0, check)  # type: ignore[arg-type]
    for epsilon in (0, op.MAX_EPSILON):
        op.layer_norm(lonely, epsilon, gain, offset, 29, torch.int8, check)  # type: ignore[arg-type]
    lonely = torch.full((3, op.MAX_CHANNELS), -(1 << 15), dtype=torch.int16)
    lonely[1:, 1:] = 0
    lonely[2, 1] = 1
    for epsilon in (0, op.MAX_EPSILON - 1):
        op.layer_norm(lonely, epsilon, gain, offset, 29, torch.int8, check, centred=False)  # type: ignore[arg-type]
    op.narrow(lonely[:1, :1], gain[:1], 15, torch.full((1,), -(1 << 30), dtype=torch.int32), check=check)  # type: ignore[arg-type]
    corners = torch.tensor([[-32768], [32767]], dtype=torch.int16)
    for places in (corners, corners.flip(0)):
        op.embed_tokens(torch.tensor([[0, 1]]), corners, places, check)  # type: ignore[arg-type]
    limits = {
        "table + position": ("embedding", "table + position"),
        "GELU: z": ("GELU", "z"),
        "f M + B": ("GELU", "g · M + B"),
        "gated: u": ("gated", "u = mul(gate, A, 28)"),
        "gated: p": ("gated", "p = mul(f(u), v, 2)"),
        "SiLU: z": ("SiLU", "z"),
        "SiLU: w": ("SiLU", "w"),
        "SiLU: h": ("SiLU", "h = 118687 + 11 r - 5 z"),
        "GELU: w": ("GELU", "w"),
        "S": ("norm", "S"),
        "m": ("norm", "m"),
        "V": ("norm", "V = Σ e² + E"),
        "d": ("norm", "d = C · h - S"),
        "x": ("norm", "x"),
        "f": ("norm", "f"),
        "d 2**l": ("norm", "d 2^l, rounded"),
        "N": ("norm", "N"),
        "mul(N, G, 28) + B": ("norm", "mul(N, G, 28) + B"),
        "(acc << left) + b": ("narrow", "(h << left) + b"),
    }
    for name, key in limits.items():
        limit = network_bounds()[key].range
        assert limit.low <= met[name].low and met[name].high <= limit.high, name
        assert met[name].magnitude > 0.98 * limit.magnitude, name
    for layer in extremes():
        layer.check_bounds()
