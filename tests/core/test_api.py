"""The public functions mean what torch's scaled_dot_product_attention means."""

from __future__ import annotations

import itertools
import math
import pathlib
import re
import sys

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import qflash
from helpers import DEVICE, LAYOUTS, dequantize_all, exact_attention, make_inputs, quantize_all, same_bits
from qflash_lab.bench.metrics import sqnr

PRESETS = ("default", "accurate", "paper")
# the least SQNR in dB against float attention on N(0, 1) inputs of some tens of keys
LEAST = {"default": 31.0, "accurate": 33.0, "paper": 10.0}


@pytest.mark.parametrize("recipe", PRESETS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_means_what_sdpa_means(layout: str, dtype: torch.dtype, recipe: str) -> None:
    inputs = make_inputs(2, 3, 40, 50, 32, 48, dtype=dtype, layout=layout)
    out = qflash.attention(*inputs, recipe=recipe)
    assert out.dtype == dtype
    assert out.shape == (2, 3, 40, 48)
    assert (out if inputs[0].stride(1) > inputs[0].stride(2) else out.transpose(1, 2)).is_contiguous()
    expected = scaled_dot_product_attention(*(x.float() for x in inputs))
    assert sqnr(expected, out) > LEAST[recipe]


@pytest.mark.parametrize(
    ("lead", "tokens", "recipe"), [((2,), 20, "default"), ((1, 2), 20, "accurate"), ((1,), 260, "default")]
)
@pytest.mark.parametrize("backend", ["reference", "cpu", "triton"])
@pytest.mark.slow
def test_the_next_projection_needs_no_copy(backend: str, lead: tuple[int, ...], tokens: int, recipe: str) -> None:
    """Heads and tokens lie in memory as the query's do, in the first call and in a repeated one; so does SDPA's output."""
    device = DEVICE if backend == "triton" else torch.device("cpu")
    packed = torch.randn(*lead, tokens, 3, 2, 32, device=device).transpose(-4, -2)
    query, key, value = packed.unbind(-3)
    apart = [x.contiguous() for x in (query, key, value)]
    for _ in range(2):
        out = qflash.attention(query, key, value, recipe=recipe, backend=backend)
        assert out.transpose(-2, -3).is_contiguous()
        together = qflash.attention(*apart, recipe=recipe, backend=backend)
        assert together.is_contiguous()
        assert same_bits(out, together)
        int8 = [qflash.QuantizedTensor((x * 20).to(torch.int8), torch.tensor(0.05, device=device)) for x in (query, key, value)]
        assert int8[0].values.stride(-2) == 2 * 32
        assert qflash.int8_attention(*int8, recipe=recipe, backend=backend).values.transpose(-2, -3).is_contiguous()


OPTIONS = {
    "causal": {"is_causal": True},
    "scale": {"scale": 0.05},
    "a large scale": {"scale": 1.0},
    "gqa": {"enable_gqa": True},
    "gqa and causal": {"enable_gqa": True, "is_causal": True},
    "bool": {"attn_mask": torch.rand(1, 6, 40, 40, generator=torch.Generator().manual_seed(0)) < 0.5},
    "bool rows": {"attn_mask": torch.rand(40, 40, generator=torch.Generator().manual_seed(1)) < 0.5},
    "padding": {"attn_mask": (torch.arange(40) < torch.tensor([[25], [40]]))[:, None, None]},
    "float": {"attn_mask": torch.randn(2, 6, 40, 40, generator=torch.Generator().manual_seed(2))},
    "float heads": {"attn_mask": torch.randn(6, 1, 40, generator=torch.Generator().manual_seed(3))},
    "float and gqa": {"attn_mask": torch.randn(40, 40, generator=torch.Generator().manual_seed(4)), "enable_gqa": True},
}


@pytest.mark.parametrize("recipe", PRESETS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options_mean_what_they_mean_in_sdpa(options: dict, recipe: str) -> None:
    inputs = make_inputs(2, 6, 40, head_dim=32, key_heads=2 if options.get("enable_gqa") else 6)
    expected = scaled_dot_product_attention(*inputs, **options)
    without = {name: value for name, value in options.items() if name == "enable_gqa"}
    out = qflash.attention(*inputs, recipe=recipe, **options)
    assert sqnr(expected, out) > LEAST[recipe]
    if options != without:
        assert sqnr(expected, qflash.attention(*inputs, recipe=recipe, **without)) < 15, "the option changes nothing"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_float_mask_may_have_any_float_dtype(dtype: torch.dtype) -> None:
    inputs = make_inputs()
    mask = torch.randn(40, 40, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert sqnr(scaled_dot_product_attention(*inputs, mask.float()), qflash.attention(*inputs, mask)) > 31


@pytest.mark.parametrize("rank", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_leading_dimensions_are_batch(backend: str, rank: int) -> None:
    lead = (1, 2, 2)[6 - rank :] if rank > 3 else ()
    heads = 2 if rank > 2 else 1
    query, key, value = make_inputs(math.prod(lead), heads, 9, 12, 16)
    shape = lead + ((heads,) if rank > 2 else ())
    inputs = [x.reshape(*shape, *x.shape[-2:]).to(DEVICE) for x in (query, key, value)]
    mask = torch.rand((*shape, 9, 12), generator=torch.Generator().manual_seed(0)) < 0.7
    out = qflash.attention(*inputs, mask.to(DEVICE), backend=backend)
    assert out.shape == (*shape, 9, 16)
    expected = qflash.attention(query, key, value, mask.reshape(-1, heads, 9, 12), backend="reference")
    assert same_bits(out.cpu().reshape(expected.shape), expected)


def canonical(x: torch.Tensor, lead: tuple[int, ...]) -> torch.Tensor:
    """Return ``x`` for leading dimensions that are one, spread over all of them."""
    return x.expand(*lead, *x.shape[-3:]).reshape(-1, *x.shape[-3:]) if x.dim() > 3 else x


LEADS = [(), (1,), (3,), *itertools.product((1, 2), (1, 3)), *itertools.product((1, 2), (1, 2), (1, 3))]


@pytest.mark.parametrize("lead", LEADS)
def test_what_broadcasts_over_leading_dimensions_is_as_if_spread(lead: tuple[int, ...]) -> None:
    """Masks and scales of fewer dimensions than the tensors, or ones in place of some."""
    whole = (2, 2, 3)[-max(2, len(lead)) :]
    tensors = [torch.randint(-99, 100, (*whole, 2, 5, 8), generator=torch.Generator().manual_seed(i)) for i in range(3)]
    values = [x.to(torch.int8) for x in tensors]
    generator = torch.Generator().manual_seed(9)
    for rest in ((2, 5, 5), (1, 5, 5), (2, 1, 5), (1, 1, 1)):
        hidden = torch.rand((*lead, *rest), generator=generator) < 0.6
        ones = [torch.ones(())] * 3
        scale = torch.rand((*lead, rest[0], 1, 1), generator=generator) / 50 + 0.01
        for mask, scales in ((hidden, ones), (None, [scale] * 3), (None, [scale, *ones[1:]]), (None, [*ones[:2], scale])):
            given = [qflash.QuantizedTensor(x, y) for x, y in zip(values, scales, strict=True)]
            spread = [qflash.QuantizedTensor(canonical(x.values, whole), canonical(x.scale, whole)) for x in given]
            want_mask = None if mask is None else canonical(mask, whole)
            out, expected = qflash.int8_attention(*given, mask), qflash.int8_attention(*spread, want_mask, backend="reference")
            assert isinstance(out, qflash.QuantizedTensor) and isinstance(expected, qflash.QuantizedTensor)
            assert torch.equal(out.values.reshape(expected.shape), expected.values), rest


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (1, 2, 1, 12), (2, 1, 9, 1), (9, 12), (12,), (), (2, 1, 1), (1,)])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks_broadcast(kind: str, shape: tuple[int, ...]) -> None:
    inputs = make_inputs(2, 2, 9, 12, 16)
    draw = torch.rand(shape, generator=torch.Generator().manual_seed(5))
    mask = draw < 0.7 if kind == "bool" else draw * 4
    full = mask.expand(2, 2, 9, 12)
    assert same_bits(qflash.attention(*inputs, mask), qflash.attention(*inputs, full))
    # what a mask hides is searched for only where it says by its shape that all queries see the same keys
    hides = kind == "bool" and full.stride(2) == 0 and full.stride(3) != 0
    assert hides or same_bits(qflash.attention(*inputs, mask), qflash.attention(*inputs, full.clone()))


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("recipe", PRESETS)
@pytest.mark.parametrize(
    ("batch", "heads", "queries", "keys", "value_dim"),
    [(0, 2, 5, 6, 8), (2, 0, 5, 6, 8), (2, 2, 0, 6, 8), (2, 2, 5, 0, 8), (2, 2, 1, 1, 8), (2, 2, 5, 6, 1), (0, 0, 0, 0, 8)],
)
def test_empty_and_single_dimensions(batch: int, heads: int, queries: int, keys: int, value_dim: int, recipe: str, backend: str) -> None:  # fmt: skip  # noqa: E501
    inputs = tuple(x.to(DEVICE) for x in make_inputs(batch, heads, queries, keys, 16, value_dim))
    out = qflash.attention(*inputs, recipe=recipe, backend=backend)
    assert out.shape == (batch, heads, queries, value_dim)
    if keys == 0:
        assert not out.any()
    int8 = qflash.int8_attention(*quantize_all(inputs), recipe=recipe, backend=backend)
    assert isinstance(int8, qflash.QuantizedTensor)
    assert int8.shape == out.shape


@pytest.mark.parametrize("recipe", PRESETS)
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_zeros_have_sdpas_answer(zero: int, recipe: str) -> None:
    inputs = make_inputs(2, 2, 20)
    inputs[zero].zero_()
    out = qflash.attention(*inputs, recipe=recipe)
    if zero == 2:
        assert not out.any()
    else:
        # equal scores: the mean, from which the paper's output at s_V keeps little
        assert sqnr(scaled_dot_product_attention(*inputs), out) > (33 if recipe != "paper" else 5)


def test_values_without_channels_give_outputs_without_channels() -> None:
    query, key, value = make_inputs(2, 2, 5, 6, 16)
    assert qflash.attention(query, key, value[..., :0]).shape == (2, 2, 5, 0)


def test_presets_by_name_and_by_value() -> None:
    inputs = make_inputs()
    by_name = {name: qflash.attention(*inputs, recipe=name) for name in PRESETS}
    for name, recipe in (("default", qflash.DEFAULT), ("accurate", qflash.ACCURATE), ("paper", qflash.PAPER)):
        assert same_bits(by_name[name], qflash.attention(*inputs, recipe=recipe))
    assert same_bits(by_name["default"], qflash.attention(*inputs))
    assert not torch.equal(by_name["default"], by_name["accurate"])
    assert not torch.equal(by_name["default"], by_name["paper"])


def test_recipes_are_frozen_values_with_a_round_trip() -> None:
    recipe = qflash.DEFAULT.replace(probability_bits=15)
    assert qflash.Recipe.from_key(recipe.key) == recipe != qflash.DEFAULT
    assert len({recipe, qflash.DEFAULT, qflash.DEFAULT.replace()}) == 2
    with pytest.raises(AttributeError):
        recipe.probability_bits = 8  # type: ignore[misc]


@pytest.mark.parametrize("where", [0, 1, 2])
@pytest.mark.parametrize("recipe", PRESETS)
def test_backward_says_that_there_is_no_gradient(where: int, recipe: str) -> None:
    inputs = make_inputs(1, 1, 5)
    inputs[where].requires_grad_()
    out = qflash.attention(*inputs, recipe=recipe)
    with pytest.raises(NotImplementedError, match="inference"):
        out.sum().backward()
    with torch.no_grad():
        assert not qflash.attention(*inputs, recipe=recipe).requires_grad


def test_backward_of_quantize_says_that_there_is_no_gradient() -> None:
    x = torch.randn(2, 3, requires_grad=True)
    for scale in (None, 0.1):
        quantized = qflash.quantize(x, scale=scale)
        assert not quantized.values.requires_grad
        if quantized.scale.requires_grad:
            with pytest.raises(NotImplementedError):
                quantized.dequantize().sum().backward()


# --- the integer-only path ----------------------------------------------------------------------------------


def assert_rounded(out: qflash.QuantizedTensor, wide: torch.Tensor) -> None:
    """The int8 output is the float output rounded to its scale and saturated."""
    wanted = (wide.double() / out.scale.double()).clamp(-128, 127)
    assert float((out.values - wanted).abs().max()) < 0.501


def test_int8_output_is_at_the_value_scale_by_default() -> None:
    tensors = quantize_all(make_inputs(2, 3, 40, 50))
    out = qflash.int8_attention(*tensors)
    assert isinstance(out, qflash.QuantizedTensor)
    assert out.values.dtype == torch.int8
    assert torch.equal(out.scale, tensors[2].scale)
    assert_rounded(out, qflash.int8_attention(*tensors, out_dtype=torch.float32))


@pytest.mark.parametrize("grain", ["tensor", "head", "channel"])
@pytest.mark.parametrize("key_heads", [2, 6])
def test_default_output_scale_follows_the_value(key_heads: int, grain: str) -> None:
    query, key, value = make_inputs(2, 6, 40, 50, key_heads=key_heads)
    tensors = (qflash.quantize(query), qflash.quantize(key), qflash.quantize(value, grain))
    out = qflash.int8_attention(*tensors, enable_gqa=True)
    assert isinstance(out, qflash.QuantizedTensor)
    assert_rounded(out, qflash.int8_attention(*tensors, enable_gqa=True, out_dtype=torch.float32))


@pytest.mark.parametrize("scale", [0.004, torch.tensor(0.004), torch.full((1, 3, 1, 1), 0.004), torch.full((48,), 0.004)])
def test_given_output_scales_are_used(scale: float | torch.Tensor) -> None:
    tensors = quantize_all(make_inputs(2, 3, 40, 50, 32, 48))
    out = qflash.int8_attention(*tensors, output_scale=scale)
    assert isinstance(out, qflash.QuantizedTensor)
    assert_rounded(out, qflash.int8_attention(*tensors, out_dtype=torch.float32))
    assert int(out.values.max()) == 127


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("recipe", PRESETS)
def test_float_output_is_what_the_call_on_floats_returns(recipe: str, dtype: torch.dtype) -> None:
    choices = {"default": qflash.DEFAULT, "accurate": qflash.ACCURATE, "paper": qflash.PAPER}[recipe]
    choices = choices.replace(smooth_key=False, smooth_value=False, balance=False)
    inputs = make_inputs(2, 3, 40, 50, dtype=dtype)
    out = qflash.int8_attention(*quantize_all(inputs, choices), out_dtype=dtype, recipe=choices)
    assert same_bits(out, qflash.attention(*inputs, recipe=choices))


def test_wider_outputs_are_roundings_of_the_widest() -> None:
    tensors = quantize_all(make_inputs())
    wide = qflash.int8_attention(*tensors, out_dtype=torch.float32)
    for dtype in (torch.float16, torch.bfloat16):
        assert same_bits(qflash.int8_attention(*tensors, out_dtype=dtype), wide.to(dtype))


@pytest.mark.parametrize("rank", [2, 3, 5])
@pytest.mark.parametrize("grains", [("tensor", "tensor", "tensor"), ("token", "token", "channel"), ("head", "head", "head")])
def test_int8_attention_takes_any_rank(grains: tuple[str, ...], rank: int) -> None:
    lead = (2, 2, 3)[5 - rank :]
    generator = torch.Generator().manual_seed(rank)
    inputs = [torch.randn((*lead, 9, 16), generator=generator) for _ in range(3)]
    tensors = [qflash.quantize(x, grain) for x, grain in zip(inputs, grains, strict=True)]
    out = qflash.int8_attention(*tensors, out_dtype=torch.float32)
    assert sqnr(exact_attention(*dequantize_all(tuple(tensors))), out) > 38
    int8 = qflash.int8_attention(*tensors)
    assert isinstance(int8, qflash.QuantizedTensor)
    assert int8.shape == inputs[0].shape
    assert torch.equal(int8.scale, tensors[2].scale)


# --- back ends ----------------------------------------------------------------------------------------------


def test_auto_has_the_reference_bits_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_inputs(1, 1, 5)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert same_bits(qflash.attention(*inputs), qflash.attention(*inputs, backend="reference"))
    with pytest.raises(ValueError, match="TRITON_INTERPRET"):
        qflash.attention(*inputs, backend="triton")
    with pytest.raises(ValueError, match="TRITON_INTERPRET"):
        qflash.quantize(inputs[0], backend="triton")


def test_a_missing_triton_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from qflash import backends

    monkeypatch.setattr(backends, "triton_missing", lambda: "Triton is not installed")
    with pytest.raises(ValueError, match="not installed"):
        qflash.attention(*make_inputs(1, 1, 5), backend="triton")


@pytest.mark.parametrize(
    ("version", "gluon", "said"),
    [
        ("3.2.0", False, "Triton 3.2.0"), ("3.5.1", True, "Triton 3.5.1"), ("3.6.0", False, "no Gluon"),
        ("unknown", False, "no Gluon"), (None, False, "not installed"),
        ("3.6.0", True, None), ("3.10.0+git1", True, None), ("4.0", True, None), ("unknown", True, None),
    ],
)  # fmt: skip
def test_a_triton_that_cannot_compile_the_kernels_is_not_used(
    version: str | None, gluon: bool, said: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """What is found is a folder with the files that are looked at; importing it would fail."""
    from qflash import backends, info

    if version is not None:
        folder = tmp_path / "triton"
        (folder / "experimental" / ("gluon" if gluon else "")).mkdir(parents=True)
        (folder / "__init__.py").write_text(f'raise ImportError\n__version__ = "{version}"\n')
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(backends, "triton_missing", backends.triton_missing.__wrapped__)
    monkeypatch.setattr(backends, "_capability", lambda index: (9, 0))
    backends._warn_of_reference.cache_clear()
    gpu = torch.device("cuda", 0)
    if said is None:
        assert backends.triton_missing() is None and backends.resolve_backend("auto", gpu) == "triton"
        return
    reason = backends.triton_missing()
    assert reason is not None and said in reason and "3.6 or newer" in reason
    with pytest.warns(RuntimeWarning, match=re.escape(reason)) as warned:
        assert [backends.resolve_backend("auto", gpu) for _ in range(2)] == ["reference"] * 2
    assert len(warned) == 1
    with pytest.raises(ValueError, match=re.escape(reason)):
        backends.resolve_backend("triton", gpu)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert info.collect_info()["triton_missing"] == reason


def test_a_gpu_without_the_instructions_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    from qflash import backends

    monkeypatch.setattr(backends, "triton_missing", lambda: None)
    monkeypatch.setattr(backends, "_capability", lambda index: (7, 5))
    backends._warn_of_reference.cache_clear()
    gpu, reason = torch.device("cuda", 0), "sm_75 has no supported int8 tensor-core path"
    with pytest.warns(RuntimeWarning, match=reason) as warned:
        assert [backends.resolve_backend("auto", gpu) for _ in range(2)] == ["reference"] * 2
    assert len(warned) == 1
    with pytest.raises(ValueError, match=reason):
        backends.resolve_backend("triton", gpu)
    monkeypatch.setattr(backends, "_capability", lambda index: (8, 0))
    assert backends.resolve_backend("auto", gpu) == "triton"


def test_the_oldest_triton_is_the_declared_one() -> None:
    from qflash.backends import MINIMUM_TRITON

    declared = (pathlib.Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert re.findall(r'"triton>=([\d.]+);', declared) == [".".join(map(str, MINIMUM_TRITON))]


def test_inputs_are_left_alone() -> None:
    for recipe in PRESETS:
        inputs = make_inputs()
        kept = [x.clone() for x in inputs]
        qflash.attention(*inputs, recipe=recipe)
        assert all(torch.equal(x, copy) for x, copy in zip(inputs, kept, strict=True))
