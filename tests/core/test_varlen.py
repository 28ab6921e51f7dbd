"""Packed sequences have the bits of separate calls, in every back end; what is wrong with their lengths is said."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import qflash
from helpers import DEVICE, same_bits, slow
from qflash import backends, segments
from qflash.specification.attention_call import Lengths, VarlenCall
from qflash.specification.fixed_point import MAX_KEYS
from qflash.specification.recipe import ACCURATE, DEFAULT, PAPER

RECIPES = {
    "default": DEFAULT,
    "accurate": ACCURATE,
    "paper": PAPER,
    "tensor": DEFAULT.replace(
        query_granularity="tensor", key_granularity="tensor", value_granularity="tensor", smooth_value=True
    ),
    "head": DEFAULT.replace(query_granularity="head", key_granularity="token", value_granularity="head", rotate=True),
}
LENGTHS = {
    "odd, one and none": ([1, 0, 19, 70, 3], [7, 0, 0, 140, 66]),
    "one sequence": ([33], [33]),
    "around 64": ([5, 64, 65], [64, 65, 1]),
    "many": ([2] * 30, [3] * 30),
}


def packed(lengths: tuple[list[int], list[int]], heads: int = 4, key_heads: int = 2, seed: int = 0, **options: Any) -> tuple:
    """Return the seven arguments of a call."""
    generator = torch.Generator().manual_seed(seed)
    sizes = (sum(lengths[0]), heads, 16), (sum(lengths[1]), key_heads, 16), (sum(lengths[1]), key_heads, 20)
    tensors = [torch.randn(size, generator=generator).to(**options) for size in sizes]
    tensors[2] += 1  # off its centre
    cumulative = [torch.tensor([0, *itertools.accumulate(each)], dtype=torch.int32) for each in lengths]
    return *tensors, *cumulative, max(lengths[0]), max(lengths[1])


def separately(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
    """Return what separate calls of attention give."""
    cu_q, cu_k, *_ = rest
    outputs = []
    for i in range(len(cu_q) - 1):
        sequence = [x[c[i] : c[i + 1]].transpose(0, 1)[None] for x, c in ((query, cu_q), (key, cu_k), (value, cu_k))]
        outputs.append(qflash.attention(*sequence, **options, backend="reference")[0].transpose(0, 1))
    return torch.cat(outputs)


@pytest.fixture
def _compiler() -> None:
    if backends.cpu_missing():
        pytest.skip(str(backends.cpu_missing()))


@pytest.mark.usefixtures("_compiler")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.slow
def test_bits_are_those_of_separate_calls(name: str, recipe: str, causal: bool) -> None:
    for heads, key_heads, dtype in ((4, 2, torch.float32), (1, 1, torch.bfloat16)):
        arguments = packed(LENGTHS[name], heads, key_heads, dtype=dtype)
        options = {"is_causal": causal, "enable_gqa": True, "recipe": RECIPES[recipe], "scale": 0.3}
        expected = separately(*arguments, **options)
        for backend in ("reference", "cpu"):
            assert same_bits(qflash.varlen_attention(*arguments, **options, backend=backend), expected), backend


@pytest.mark.skipif(DEVICE.type == "cuda", reason="tests/gpu does the same on a GPU")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_one_launch_has_the_bits_of_separate_calls(recipe: str, causal: bool) -> None:
    # two blocks of queries and an exact sum beside a rounded one; of one recipe, for the interpreter's sake
    longest = 70 if recipe == "default" else 9
    arguments = packed(([1, 0, longest], [7, 0, 66]), 2, 1, dtype=torch.float16)
    options = {"is_causal": causal, "enable_gqa": True, "recipe": RECIPES[recipe]}
    assert same_bits(qflash.varlen_attention(*arguments, **options, backend="triton"), separately(*arguments, **options))


TOKEN_KEYS = {
    "8 bits": DEFAULT.replace(key_granularity="token"),
    "15 bits": ACCURATE,
    "7 bits online": PAPER.replace(key_granularity="token"),
    "two pass": PAPER.replace(key_granularity="token", normalization="two_pass", output="accumulator"),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("recipe", TOKEN_KEYS)
@pytest.mark.parametrize("backend", ["reference", "cpu", slow("triton")])
@pytest.mark.parametrize(("seed", "loud"), enumerate((100, 300, 1000)))
def test_one_key_goes_its_own_way_beside_many(seed: int, loud: int, backend: str, recipe: str, causal: bool) -> None:
    # a single key has one scale a head, where the unit of its exponent is another than with a scale for each key
    if backend == "triton" and DEVICE.type == "cuda":
        backend = "auto"
    if backend == "cpu" and backends.cpu_missing():
        pytest.skip(str(backends.cpu_missing()))
    options = {"is_causal": causal, "enable_gqa": True, "recipe": TOKEN_KEYS[recipe]}
    query, key, *rest = packed(([1, 3, 1, 2, 0], [1, 9, 7, 1, 2]), 2, 1, seed)
    arguments = query * loud, key * loud, *rest
    got = qflash.varlen_attention(*arguments, **options, backend=backend)
    assert same_bits(got, separately(*arguments, **options))


@pytest.mark.parametrize("backend", ["cpu", slow("triton")])
@pytest.mark.parametrize("recipe", ["default", "paper", "head"])
def test_the_longest_length_that_is_said_changes_no_bit(recipe: str, backend: str) -> None:
    # with 65537 keys sums are those of sections, in 64 bits
    if backend == "cpu" and backends.cpu_missing():
        pytest.skip(str(backends.cpu_missing()))
    if backend == "triton" and DEVICE.type == "cuda":
        backend = "auto"
    *arguments, queries, keys = packed(([1, 0, 5], [7, 3, 66]), 2, 1)
    options = {"enable_gqa": True, "recipe": RECIPES[recipe]}
    expected = separately(*arguments, **options)
    for most in (keys, keys + 1, 128, 257, (1 << 16) + 1):
        got = qflash.varlen_attention(*arguments, queries + 3, most, **options, backend=backend)
        assert same_bits(got, expected), most


@pytest.mark.usefixtures("_compiler")
def test_any_strides_and_types_of_lengths_will_do() -> None:
    query, key, value, cu_q, cu_k, *longest = packed(LENGTHS["odd, one and none"])
    expected = separately(query, key, value, cu_q, cu_k, enable_gqa=True)
    strange = (
        query.transpose(0, 1).contiguous().transpose(0, 1), key.mT.contiguous().mT,
        torch.stack((value, value), dim=-1)[..., 0],
    )  # fmt: skip
    lengths = cu_q.to(torch.int64), torch.stack((cu_k, cu_k), dim=-1)[:, 0]
    for backend in ("reference", "cpu"):
        assert same_bits(qflash.varlen_attention(*strange, *lengths, *longest, enable_gqa=True, backend=backend), expected)


@pytest.mark.parametrize("special", [math.nan, math.inf])
@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("recipe", ["default", "accurate", "tensor"])
def test_what_is_not_finite_stays_in_its_sequence(recipe: str, which: int, special: float) -> None:
    arguments = packed(LENGTHS["around 64"], 2, 1)
    arguments[which][10, 0, 3] = special
    options = {"enable_gqa": True, "recipe": RECIPES[recipe]}
    expected = separately(*arguments, **options)
    assert expected.isnan().any() and expected[-65:].isfinite().all()
    # what quantises for the GPU, and the specification's attention on that
    lengths = Lengths(*arguments[3:])
    call = VarlenCall(*arguments[:3], None, None, lengths, False, 0.25, torch.float32, RECIPES[recipe])
    found = segments.quantize(segments.prepare(call))
    assert found.scales is not None
    scale = found.scales[which]
    assert bool(scale.isnan().any()) and bool(scale[-1].isfinite().all())
    for backend in ("reference", *(() if backends.cpu_missing() else ("cpu",))):
        assert same_bits(qflash.varlen_attention(*arguments, **options, backend=backend), expected), backend


def test_nothing_gives_nothing() -> None:
    x, none = torch.randn(0, 2, 16), torch.tensor([0])
    for cumulative in (none, torch.tensor([0, 0, 0])):
        assert qflash.varlen_attention(x, x, x, cumulative, cumulative, 0, 0).shape == (0, 2, 16)


X = torch.randn(9, 2, 16)
CUMULATIVE = torch.tensor([0, 4, 9])
BAD: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "rank": (ValueError, r"query must have the shape \(tokens, heads, channels\)", {"query": X[None]}),
    "dtype": (TypeError, "key must have query's dtype", {"key": X.half()}),
    "heads": (ValueError, "enable_gqa=True", {"key": X[:, :1], "value": X[:, :1]}),
    "no group": (ValueError, "multiple of key's", {"key": X.repeat(1, 2, 1), "value": X.repeat(1, 2, 1)}),
    "value's tokens": (ValueError, "value must have key's tokens", {"value": X[:5]}),
    "channels": (ValueError, "key must have query's head dimension", {"key": X[..., :8]}),
    "float lengths": (TypeError, "cu_seqlens_q must be int32, int64, got float32", {"cu_seqlens_q": CUMULATIVE.float()}),
    "list": (TypeError, "cu_seqlens_k must be a torch.Tensor, got list", {"cu_seqlens_k": [0, 4, 9]}),
    "lengths' rank": (ValueError, r"cu_seqlens_k must have the shape \(sequences \+ 1,\)", {"cu_seqlens_k": CUMULATIVE[None]}),
    "device": (ValueError, "cu_seqlens_k is on meta", {"cu_seqlens_k": CUMULATIVE.to("meta")}),
    "number": (ValueError, "as many sequences as cu_seqlens_q", {"cu_seqlens_k": torch.tensor([0, 9])}),
    "first": (ValueError, "cu_seqlens_q must begin with 0, got 1", {"cu_seqlens_q": torch.tensor([1, 4, 9])}),
    "last": (
        ValueError,
        "cu_seqlens_k must end with the number of tokens, 9, got 8",
        {"cu_seqlens_k": torch.tensor([0, 4, 8])},
    ),
    "falling": (ValueError, r"cu_seqlens_k must not fall, got \[0, 10, 9\]", {"cu_seqlens_k": torch.tensor([0, 10, 9])}),
    "short": (ValueError, "max_seqlen_q must be at least the longest of cu_seqlens_q, 5, got 4", {"max_seqlen_q": 4}),
    "negative": (ValueError, "max_seqlen_k must not be negative", {"max_seqlen_k": -1}),
    "tensor": (TypeError, "max_seqlen_k must be an integer, got Tensor", {"max_seqlen_k": torch.tensor([5, 5])}),
    "too long": (ValueError, f"max_seqlen_k must be at most {MAX_KEYS}", {"max_seqlen_k": MAX_KEYS + 1}),
    "causal": (TypeError, "is_causal", {"is_causal": None}),
    "scale": (ValueError, "scale", {"scale": -1.0}),
    "backend": (ValueError, "backend", {"backend": "gpu"}),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_named(name: str) -> None:
    error, message, change = BAD[name]
    good = {"query": X, "key": X, "value": X, "cu_seqlens_q": CUMULATIVE, "cu_seqlens_k": CUMULATIVE}
    with pytest.raises(error, match=message):
        qflash.varlen_attention(**(good | {"max_seqlen_q": 5, "max_seqlen_k": 5} | change))


def test_there_is_no_gradient() -> None:
    out = qflash.varlen_attention(X.clone().requires_grad_(), X, X, CUMULATIVE, CUMULATIVE, 5, 5)
    with pytest.raises(NotImplementedError, match="no gradient"):
        out.sum().backward()


def test_the_operator_can_be_compiled() -> None:
    @torch.compile(fullgraph=True, dynamic=True, backend="eager")
    def compiled(x: torch.Tensor, cumulative: torch.Tensor, longest: int) -> torch.Tensor:
        return qflash.varlen_attention(x, x, x, cumulative, cumulative, longest, longest) + 0

    for cumulative in (CUMULATIVE, torch.tensor([0, 1, 8])):
        x, longest = X[: cumulative[-1]], int(cumulative.diff().max())
        expected = qflash.varlen_attention(x, x, x, cumulative, cumulative, longest, longest)
        assert same_bits(compiled(x, cumulative, longest), expected)


# --- nested tensors --------------------------------------------------------------------------------------------------


def jagged(*lengths: int, heads: int = 2, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    sequences = [torch.randn(length, heads, 16, generator=generator) for length in lengths]
    return torch.nested.nested_tensor(sequences, layout=torch.jagged).transpose(1, 2)


@pytest.mark.parametrize("causal", [False, True])
def test_jagged_tensors_have_the_bits_of_separate_calls(causal: bool) -> None:
    query, key = jagged(3, 70, 1), jagged(4, 66, 9, heads=1, seed=1)
    options = {"is_causal": causal, "enable_gqa": True, "recipe": "accurate"}
    out = qflash.attention(query, key, key, **options)
    assert out.layout == torch.jagged and out.shape[:2] == (3, 2)
    for got, q, k in zip(out.unbind(), query.unbind(), key.unbind(), strict=True):
        assert same_bits(got, qflash.attention(q[None], k[None], k[None], **options)[0])


def test_sdpa_takes_jagged_tensors() -> None:
    x = jagged(3, 70, 1)
    with torch.no_grad(), qflash.sdpa() as report:
        out = F.scaled_dot_product_attention(x, x, x)
    assert (report.integer, report.fallbacks.total()) == (1, 0)
    assert same_bits(out.transpose(1, 2).values(), qflash.attention(x, x, x).transpose(1, 2).values())


@pytest.mark.parametrize(
    ("error", "message", "change"),
    [
        (TypeError, "key must be a nested tensor of jagged layout", {"key": X[None]}),
        (ValueError, "attn_mask must be None", {"attn_mask": torch.ones(1, dtype=torch.bool)}),
        (ValueError, "query must have the shape", {"query": jagged(3, 5).transpose(1, 2)}),
        (ValueError, "dropout_p must be 0", {"dropout_p": 0.5}),
        (ValueError, "as many sequences", {"query": jagged(3, 5, 1)}),
        (ValueError, "value must have sequences of the same lengths", {"value": jagged(5, 3)}),
    ],
)
def test_bad_jagged_tensors_are_named(error: type[Exception], message: str, change: dict[str, Any]) -> None:
    x = jagged(3, 5)
    with pytest.raises(error, match=message):
        qflash.attention(**({"query": x, "key": x, "value": x} | change))


def with_holes(kind: str) -> torch.Tensor:
    """Return a nested tensor (2, heads, jagged, channels) of 4 and 3 tokens with others between them."""
    whole = torch.randn(2, 7, 3, 8, generator=torch.Generator().manual_seed(0))
    if kind == "narrow":
        x = torch.nested.narrow(whole, 1, torch.tensor([0, 1]), torch.tensor([4, 3]), layout=torch.jagged)
    else:
        places, lengths = torch.tensor([0, 7, 14]), torch.tensor([4, 3])
        x = torch.nested.nested_tensor_from_jagged(whole.flatten(0, 1), offsets=places, lengths=lengths)
    return x.transpose(1, 2)


@pytest.mark.parametrize("kind", ["narrow", "lengths"])
@pytest.mark.parametrize("where", ["query", "key", "value"])
def test_what_is_advised_closes_holes(kind: str, where: str) -> None:
    holes = with_holes(kind)
    with pytest.raises(ValueError, match="have no holes") as refused:
        qflash.attention(*(with_holes(kind) if name == where else closed(holes) for name in ("query", "key", "value")))
    advice = str(refused.value).split("; ")[1].removesuffix(" closes them")
    assert str(refused.value).startswith(f"{where} must have")
    out = qflash.attention(*[eval(f"holes.{advice}", {"holes": holes})] * 3)
    for got, x in zip(out.unbind(), holes.unbind(), strict=True):
        assert same_bits(got, qflash.attention(x[None], x[None], x[None])[0])


def closed(x: torch.Tensor) -> torch.Tensor:
    return torch.nested.as_nested_tensor([each.transpose(0, 1) for each in x.unbind()], layout=torch.jagged).transpose(1, 2)
