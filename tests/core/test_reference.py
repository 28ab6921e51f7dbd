"""The specification against float softmax, and what its bits may depend on."""

from __future__ import annotations

import math

import pytest
import torch

import qflash
from helpers import DEVICE, INTERPRETER, dequantize_all, draw_case, exact_attention, make_inputs, quantize_all, same_bits
from qflash import backends
from qflash.specification import fixed_point as fp
from qflash.specification import quantization, reference
from qflash.specification.attention_call import int8_call
from qflash.specification.recipe import Recipe
from qflash_lab.bench.metrics import sqnr

FLOAT32 = torch.float32
# the least SQNR against float softmax on the same int8 tensors, N(0, 1) inputs
PRECISION = {
    ("linear", 7): 30.0,
    ("linear", 8): 31.0,
    ("linear", 15): 31.0,
    ("quadratic", 7): 33.0,
    ("quadratic", 8): 40.0,
    ("quadratic", 15): 52.0,
}
TWO_PASS = [Recipe(exponential=exponential, probability_bits=bits) for exponential, bits in PRECISION]
NAMES = [f"{exponential} {bits}" for exponential, bits in PRECISION]


@pytest.fixture(autouse=True)
def _auto_is_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tested here is the specification, whatever else this machine could run."""
    monkeypatch.setattr(backends, "cpu_missing", lambda: "the specification is tested")


def attend(tensors: tuple[qflash.QuantizedTensor, ...], mask=None, recipe=None, **options) -> torch.Tensor:
    return qflash.int8_attention(*tensors, mask, out_dtype=FLOAT32, recipe=recipe, backend="reference", **options)


@pytest.mark.parametrize("recipe", TWO_PASS, ids=NAMES)
@pytest.mark.parametrize("grains", [("tensor", "tensor", "tensor"), ("token", "token", "channel"), ("head", "head", "head")])
@pytest.mark.parametrize("shape", [(2, 3, 64, 64, 64), (1, 4, 50, 200, 32), (2, 2, 33, 64, 80)])
def test_close_to_float_softmax_on_the_same_tensors(recipe: Recipe, grains: tuple[str, ...], shape: tuple[int, ...]) -> None:
    tensors = tuple(qflash.quantize(x, grain) for x, grain in zip(make_inputs(*shape), grains, strict=True))
    exact = exact_attention(*dequantize_all(tensors))
    got = sqnr(exact, attend(tensors, recipe=recipe))
    assert got >= PRECISION[recipe.exponential, recipe.probability_bits]


def test_every_rung_of_the_ladder_is_a_gain() -> None:
    tensors = quantize_all(make_inputs(2, 6, 197, head_dim=64))
    exact = exact_attention(*dequantize_all(tensors))
    ladder = [
        qflash.PAPER,
        Recipe(exponential="linear", probability_bits=7, probability_rounding="floor"),
        Recipe(exponential="linear", probability_bits=7),
        Recipe(exponential="linear", probability_bits=8),
        Recipe(exponential="quadratic", probability_bits=8),
        Recipe(exponential="quadratic", probability_bits=15),
    ]
    reached = [sqnr(exact, attend(tensors, recipe=recipe)) for recipe in ladder]
    assert reached == sorted(reached)


@pytest.mark.parametrize("number", range(1000, 1060))
def test_tile_and_checked_mode_leave_the_bits_alone(number: int) -> None:
    arguments = draw_case(number, INTERPRETER).arguments(torch.device("cpu"))
    expected = reference.int8_attention(int8_call(*arguments))
    for tile in (16, 64, 1024):
        for checked in (False, True):
            assert same_bits(reference.int8_attention(int8_call(*arguments), tile=tile, checked=checked), expected), (
                tile,
                checked,
            )


@pytest.mark.parametrize("queries", [1, 2, 5])
@pytest.mark.parametrize("keys", [2, 3])
def test_few_keys_have_scales_of_their_own(keys: int, queries: int) -> None:
    query, key, value = make_inputs(1, 2, queries, keys)
    tensors = quantize_all((query, key * torch.tensor([1.0, 0.01, 0.3])[:keys, None], value), qflash.ACCURATE)
    assert tensors[1].granularity == "token"
    assert sqnr(exact_attention(*dequantize_all(tensors)), attend(tensors, recipe=qflash.ACCURATE)) > 50


@pytest.mark.parametrize("kind", ["bool", "bias"])
@pytest.mark.parametrize("keys", [1, 2, 3])
def test_a_tile_may_be_a_single_key(keys: int, kind: str) -> None:
    tensors = quantize_all(make_inputs(1, 2, 5, keys))
    drawn = torch.randn((1, 1, 5, keys), generator=torch.Generator().manual_seed(0))
    mask = quantization.bias_to_fixed(drawn) if kind == "bias" else drawn > -0.5
    parts = [part for x in tensors for part in (x.values, x.scale.view(1, 1, 1, 1))]
    call = int8_call(*parts, mask, False, 0.25, None, FLOAT32, qflash.DEFAULT)
    assert same_bits(reference.int8_attention(call, tile=1), reference.int8_attention(call))


def test_online_depends_on_its_key_block() -> None:
    tensors = quantize_all(make_inputs(1, 4, 300, head_dim=64))
    recipe = qflash.PAPER.replace(output="accumulator")
    outputs = {block: attend(tensors, recipe=recipe.replace(key_block=block)) for block in (32, 64, 256)}
    assert not torch.equal(outputs[32], outputs[64])
    assert not torch.equal(outputs[64], outputs[256])
    one_block = attend(tensors, recipe=recipe.replace(normalization="two_pass"))
    assert sqnr(one_block, outputs[64]) > 24


def test_online_equals_two_pass_in_one_block() -> None:
    tensors = quantize_all(make_inputs(2, 2, 60, head_dim=32))
    recipe = qflash.PAPER.replace(key_block=64)
    assert same_bits(attend(tensors, recipe=recipe), attend(tensors, recipe=recipe.replace(normalization="two_pass")))


# balancing evens a whole group of query heads against their key at once, so it is left out here
@pytest.mark.parametrize("recipe", [qflash.DEFAULT, qflash.ACCURATE.replace(balance=False), qflash.PAPER])
@pytest.mark.parametrize("key_heads", [1, 2, 3])
def test_grouped_queries_are_repeated_heads(recipe: Recipe, key_heads: int) -> None:
    query, key, value = make_inputs(2, 6, 20, 33, key_heads=key_heads)
    got = qflash.attention(query, key, value, enable_gqa=True, recipe=recipe)
    repeated = (x.repeat_interleave(6 // key_heads, dim=1) for x in (key, value))
    assert same_bits(got, qflash.attention(query, *repeated, recipe=recipe))


@pytest.mark.parametrize("recipe", ["default", "accurate", "paper"])
@pytest.mark.parametrize(("queries", "keys"), [(40, 40), (17, 70), (70, 17), (1, 9)])
def test_causal_is_a_lower_triangle_of_true(recipe: str, queries: int, keys: int) -> None:
    inputs = make_inputs(2, 2, queries, keys)
    seen = inputs[0], inputs[1][:, :, :queries], inputs[2][:, :, :queries]
    mask = torch.ones(queries, min(queries, keys), dtype=torch.bool).tril()
    assert same_bits(qflash.attention(*inputs, is_causal=True, recipe=recipe), qflash.attention(*seen, mask, recipe=recipe))


@pytest.mark.parametrize("recipe", ["default", "accurate", "paper"])
def test_a_bias_of_zero_and_minus_infinity_is_a_bool_mask(recipe: str) -> None:
    inputs = make_inputs(2, 2, 40, 50)
    mask = torch.rand((2, 1, 40, 50), generator=torch.Generator().manual_seed(0)) < 0.6
    mask[0, 0, 3] = False
    bias = torch.zeros(mask.shape).masked_fill(~mask, -math.inf)
    with_bool, with_bias = (qflash.attention(*inputs, m, recipe=recipe) for m in (mask, bias))
    assert not with_bias[0, :, 3].any()
    if recipe == "paper":
        # output floored at s_V: a unit of the last place is a whole step of int8
        assert sqnr(with_bool, with_bias) > 15
    else:
        # the same mathematics through the wide multiplier instead of the narrow one
        assert sqnr(with_bool, with_bias) > (40 if recipe == "default" else 55)


@pytest.mark.parametrize("kind", ["bool", "bias"])
@pytest.mark.parametrize("shape", [(1, 2, 1, 1, 1), (1, 2, 3, 1, 40), (1, 2, 1, 9, 1), (1, 2, 3, 9, 40)])
def test_a_mask_that_repeats_over_the_batch_is_the_repeated_mask(shape: tuple[int, ...], kind: str) -> None:
    query, key, value = (x.unflatten(0, (3, 2)) for x in make_inputs(6, 3, 9, 40))
    tensors = quantize_all((query, key, value))
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    mask = drawn if kind == "bias" else drawn > -0.5
    whole = mask.expand(3, 2, 3, 9, 40).contiguous()
    assert same_bits(attend(tensors, mask), attend(tensors, whole))


def test_bias_is_added_to_the_scores() -> None:
    inputs = make_inputs(2, 3, 40, 50)
    bias = torch.randn((1, 3, 40, 50), generator=torch.Generator().manual_seed(0)) * 3
    for grains, least in ((None, 42), (qflash.ACCURATE, 42)):
        tensors = quantize_all(inputs, grains)
        exact = exact_attention(*dequantize_all(tensors), bias)
        assert sqnr(exact, attend(tensors, bias)) > least
        assert sqnr(exact, attend(tensors)) < 10
        assert same_bits(attend(tensors, bias), attend(tensors, qflash.quantize_bias(bias)))


@pytest.mark.parametrize("recipe", [qflash.DEFAULT, qflash.ACCURATE, qflash.PAPER], ids=["default", "accurate", "paper"])
@pytest.mark.parametrize("kind", ["bool", "bias"])
def test_rows_without_a_key_are_zero(kind: str, recipe: Recipe) -> None:
    tensors = quantize_all(make_inputs(2, 2, 20, 130))
    mask = torch.ones(20, 130, dtype=torch.bool)
    mask[4] = False
    mask[5, :128] = False
    if kind == "bias":
        mask = torch.zeros(mask.shape).masked_fill(~mask, -math.inf)
    out = attend(tensors, mask, recipe)
    assert not out[:, :, 4].any()
    assert out[:, :, 5].any()
    assert not out.isnan().any()
    int8 = qflash.int8_attention(*tensors, mask, recipe=recipe)
    assert isinstance(int8, qflash.QuantizedTensor)
    assert not int8.values[:, :, 4].any()


@pytest.mark.parametrize("huge", [-1e30, torch.finfo(FLOAT32).min, -3000.0])
@pytest.mark.parametrize("recipe", ["default", "accurate"])
def test_a_huge_negative_bias_hides_a_key_unless_all_are_hidden(recipe: str, huge: float) -> None:
    inputs = make_inputs(1, 2, 20, 30)
    hidden = torch.rand((20, 30), generator=torch.Generator().manual_seed(0)) < 0.5
    hidden[7] = True
    bias = torch.zeros(20, 30).masked_fill(hidden, huge)
    out = qflash.attention(*inputs, bias, recipe=recipe)
    # a row whose biases are all alike is a row without bias, unless they are so large that scores are nothing beside them
    assert sqnr(exact_attention(*inputs, bias), out) > 30
    assert out[:, :, 7].abs().sum() > 0


@pytest.mark.parametrize("recipe", ["default", "accurate", "paper"])
@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [0, 1, 2])
@pytest.mark.slow
def test_what_is_not_finite_reaches_the_output(where: int, bad: float, backend: str, recipe: str) -> None:
    inputs = tuple(x.to(DEVICE) for x in make_inputs(2, 2, 9, head_dim=16))
    inputs[where][1, 0, 2, 3] = bad
    out = qflash.attention(*inputs, recipe=recipe, backend=backend)
    touched = out.isnan()
    assert touched.any()
    # the row or column that float attention would lose is lost here
    if where == 0:
        assert touched[1, 0, 2].all()
    elif where == 1:
        assert touched[1, 0].all()
    else:
        assert touched[1, 0, :, 3].all()
    if recipe != "paper":
        # shared scales spread it, but not to other heads
        assert not touched[0].any()
        assert not touched[1, 1].any()


@pytest.mark.parametrize("where", [0, 1, 2])
def test_what_is_not_finite_reaches_the_float_output_of_the_integer_path(where: int) -> None:
    inputs = make_inputs(2, 2, 9, head_dim=16)
    inputs[where][1, 0, 2, 3] = math.nan
    assert attend(quantize_all(inputs)).isnan().all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("recipe", ["default", "accurate", "paper"])
def test_a_mask_that_is_not_finite_reaches_its_row(recipe: str, bad: float) -> None:
    inputs = make_inputs(1, 2, 9, 40)
    bias = torch.zeros(9, 40)
    bias[4, 11] = bad
    touched = qflash.attention(*inputs, bias, recipe=recipe).isnan()
    assert touched[:, :, 4].all()
    assert touched.sum() == touched[:, :, 4].numel()


@pytest.mark.parametrize("recipe", [*TWO_PASS, qflash.ACCURATE], ids=[*NAMES, "accurate"])
def test_permuting_the_keys_leaves_the_bits_alone(recipe: Recipe) -> None:
    query, key, value = make_inputs(2, 2, 40, 90)
    order = torch.randperm(90, generator=torch.Generator().manual_seed(0))
    expected = qflash.attention(query, key, value, recipe=recipe)
    assert same_bits(qflash.attention(query, key[:, :, order], value[:, :, order], recipe=recipe), expected)


@pytest.mark.parametrize("recipe", ["default", "accurate"])
def test_execution_is_batch_invariant(recipe: str) -> None:
    inputs = make_inputs(5, 3, 40, 60)
    mask = torch.rand((5, 1, 40, 60), generator=torch.Generator().manual_seed(0)) < 0.7
    whole = qflash.attention(*inputs, mask, recipe=recipe)
    for i in range(5):
        alone = qflash.attention(*(x[i : i + 1] for x in inputs), mask[i : i + 1], recipe=recipe)
        assert same_bits(whole[i : i + 1], alone)
    for h in range(3):
        assert same_bits(whole[:, h : h + 1], qflash.attention(*(x[:, h : h + 1] for x in inputs), mask, recipe=recipe))


def test_chunks_of_the_batch_leave_the_bits_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (2001, 2002, 2003, 2004, 2005, 2006):
        case = draw_case(number, INTERPRETER)
        arguments = case.arguments(torch.device("cpu"))
        expected = reference.int8_attention(int8_call(*arguments))
        with monkeypatch.context() as patch:
            patch.setattr(reference, "_ROWS_AT_ONCE", 1)
            assert same_bits(reference.int8_attention(int8_call(*arguments)), expected)


@pytest.mark.parametrize("recipe", ["default", "accurate", "paper"])
def test_queries_do_not_see_each_other(recipe: str) -> None:
    tensors = quantize_all(make_inputs(1, 2, 40, 50))
    whole = attend(tensors, recipe=recipe)
    query = qflash.QuantizedTensor(tensors[0].values[:, :, 7:19], tensors[0].scale)
    assert same_bits(attend((query, *tensors[1:]), recipe=recipe), whole[:, :, 7:19])


def test_equal_scores_give_the_mean_of_the_values() -> None:
    query, key, value = make_inputs(2, 2, 10, 77)
    for recipe in TWO_PASS:
        tensors = quantize_all((torch.zeros_like(query), key, value))
        mean = dequantize_all(tensors)[2].mean(dim=2, keepdim=True).expand(2, 2, 10, 32)
        # P is one number for every key: only the normalisation rounds, and with an exact sum the mean of V
        within = 2.0**-10 if recipe.takes_exact_sum(77) else 2.0**-18
        assert float((attend(tensors, recipe=recipe) - mean).abs().max()) <= float(tensors[2].scale) * within


def test_one_key_gives_its_value() -> None:
    for amplitude in (1e-4, 1.0, 1e3):
        tensors = quantize_all(make_inputs(2, 2, 10, 1, amplitude=amplitude))
        value = dequantize_all(tensors)[2].expand(2, 2, 10, 32)
        for recipe in (*TWO_PASS, qflash.PAPER):
            error = (attend(tensors, recipe=recipe) - value).abs().max()
            assert float(error) <= float(tensors[2].scale) * 2.0**-15


@pytest.mark.parametrize("keys", [511, 512, 600, 1000])
def test_matrix_products_are_exact_whatever_their_bound(keys: int) -> None:
    """The largest probabilities, and a sum that is odd, which float32 does not hold beyond 2**24."""
    p = torch.full((1, 1, 1, keys), 255)
    value = torch.full((1, 1, keys, 1), 127)
    value[..., 0, 0] -= 1 - keys % 2
    product = reference._exact_matmul(p, value, (128 << 8) * keys, torch.int64)
    assert int(product) == 255 * int(value.sum())
    assert int(product) % 2 == 1


def test_a_fixed_point_bias_at_its_limit_is_added() -> None:
    """The same for all keys, it changes nothing; above the limit it would stand for infinity."""
    tensors = quantize_all(make_inputs(1, 2, 5, 9, 16))
    limit = torch.full((1, 1, 5, 9), fp.BIAS_LIMIT, dtype=torch.int32)
    assert same_bits(attend(tensors, limit), attend(tensors, torch.zeros_like(limit)))
