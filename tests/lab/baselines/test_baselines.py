"""Every attention method: the protocol they share."""

from __future__ import annotations

import functools
import json
import math
import pathlib

import pytest
import torch

from helpers import DEVICE, exact_attention, make_inputs
from qflash import QuantizedTensor
from qflash_lab.baselines import METHODS, get_method
from qflash_lab.baselines.fq_vit import log_int_softmax
from qflash_lab.baselines.i_bert import i_exp
from qflash_lab.baselines.integer import Scores
from qflash_lab.bench.metrics import sqnr
from qflash_lab.bench.workloads import get_workload, paper_inputs

GRAINS = ("tensor", "head", "token", "channel", "none")


def test_names_and_fields() -> None:
    assert list(METHODS) == [method.name for method in METHODS.values()]
    assert len({method.title for method in METHODS.values()}) == len(METHODS)
    for method in METHODS.values():
        assert {method.query_granularity, method.key_granularity, method.value_granularity} <= set(GRAINS)
        assert all(width in (4, 8, 16, 32) for pair in method.bits for width in pair)
    with pytest.raises(ValueError, match=r"method must be one of fp32, .*got 'nonsense'"):
        get_method("nonsense")


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_method_is_attention(name: str, dtype: torch.dtype) -> None:
    query, key, value = make_inputs(2, 3, 20, 33, 16, 24, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    keep = torch.rand(2, 1, 20, 33, generator=generator) < 0.6
    keep[..., 0] = True
    bias = torch.randn(1, 3, 20, 33, generator=generator).to(dtype)
    for mask, scale in ((None, None), (None, 0.5), (keep, None), (bias, 0.3)):
        out = METHODS[name].attention(query, key, value, attn_mask=mask, scale=scale)
        assert out.shape == (*value.shape[:2], 20, 24)
        assert out.dtype == dtype
        assert sqnr(exact_attention(query, key, value, mask, scale=scale), out) > 10.0


# Independent formulas: plain Python integers and loops, straight from the papers' equations.


def to_int8(x: torch.Tensor) -> tuple[list[list[int]], float]:
    scale = float(x.abs().max()) / 127
    return [[round(v / scale) for v in row] for row in x.double().tolist()], scale


def products(a: list[list[int]], b: list[list[int]]) -> list[list[int]]:
    """Return A Bᵀ."""
    return [[sum(x * y for x, y in zip(left, right, strict=True)) for right in b] for left in a]


def i_vit_row(row: list[int], scale: float, bits: int = 7) -> list[float]:
    """Shiftmax (I-ViT, Algorithm 1) of 8-bit scores; floats hold the weights."""
    unit = round(1 / scale)
    n = min(15, int(math.log2(2**24 / (len(row) * unit))))  # 15 in I-ViT; less where the sum would pass 2**24
    weights = []
    for score in row:
        x = score - max(row)
        p = x + math.floor(x / 2) - math.floor(x / 16)
        octaves = min(p // -unit, n)
        remainder = max(p, -n * unit) + octaves * unit
        weights.append((math.floor(remainder / 2) + unit) * 2**n // 2**octaves)
    return [((2**31 - 1) // sum(weights)) * w // 2 ** (31 - bits) / 2**bits for w in weights]


def i_exp_row(row: list[int], scale: float, up: int = 0) -> list[int]:
    """i-exp (I-BERT, Algorithms 1 and 3), with ln 2 / S rounded up as its code does."""
    ln2, b = math.ceil(math.log(2) / scale), math.floor(1.353 / scale)
    c = math.floor(0.344 / (0.3585 * scale**2))
    weights = []
    for score in row:
        q = score - max(row)
        z = -q // ln2
        weights.append(((q + z * ln2 + b) ** 2 + c) * 2**up // 2**z)
    return weights


def i_bert_row(row: list[int], scale: float) -> list[float]:
    exact = i_exp_row(row, scale)
    sixteen = [math.floor(w * 32767 / max(exact) + 0.5) for w in exact]
    return [w * (2**32 // sum(sixteen)) // 2**24 / 256 for w in sixteen]


def fq_vit_row(row: list[int], scale: float) -> list[float]:
    """Log-Int-Softmax: 4-bit logarithms of the rounded quotient, ties of the mantissa at 1.5."""
    exact = i_exp_row(row, scale, up=16)
    weights = []
    for w in exact:
        quotient = math.floor(sum(exact) / w + 0.5) if w else 1 << 60
        octaves = int(math.log2(quotient / 1.5)) + 1 if quotient > 1 else 0
        weights.append(2.0**-octaves if octaves < 16 else 0.0)
    return weights


ROWS = {"i-vit": i_vit_row, "i-vit-16": functools.partial(i_vit_row, bits=15), "i-bert": i_bert_row, "fq-vit": fq_vit_row}


def plain_attention(name: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """One head, without the requantisation of the output."""
    (q, q_scale), (k, k_scale), (v, v_scale) = map(to_int8, (query, key, value))
    scores, scale = products(q, k), q_scale * k_scale * query.shape[-1] ** -0.5
    if name != "i-bert":
        flat = [x for row in scores for x in row]
        step = max(map(abs, flat)) / 127 if name.startswith("i-vit") else (max(flat) - min(flat)) / 255
        scores, scale = [[math.floor(x / step + 0.5) for x in row] for row in scores], scale * step
    weights = [ROWS[name](row, scale) for row in scores]
    return torch.tensor(weights, dtype=torch.float64) @ torch.tensor(v, dtype=torch.float64) * v_scale


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("amplitude", [1.0, 2.0, 3.0])
def test_integer_softmax_is_the_papers(name: str, amplitude: float) -> None:
    query, key, value = make_inputs(1, 1, 24, 37, 16, seed=int(10 * amplitude), amplitude=amplitude)
    expected = plain_attention(name, query[0, 0], key[0, 0], value[0, 0])
    out = METHODS[name].attention(query, key, value)[0, 0].double()
    step = float(expected.abs().max()) / 127
    assert float((out - expected).abs().max()) <= 0.5 * step * (1 + 1e-4)  # only the output's rounding lies between
    assert float(expected.abs().max()) > 0.5


@pytest.mark.parametrize("name", ROWS)
def test_masks_remove_keys(name: str) -> None:
    """A key that is masked, in whichever way, leaves what the others give; only the scales may see it."""
    query, key, value = make_inputs(1, 2, 12, 20, 16, seed=5, amplitude=2.0)
    keep = torch.ones(12, 20, dtype=torch.bool)
    keep[:, 15:] = False
    few = METHODS[name].attention(query, key[:, :, :15], value[:, :, :15])
    out = METHODS[name].attention(query, key, value, attn_mask=keep)
    assert sqnr(few, out) > 25.0  # the inputs' scales are those of 20 keys
    for masked in (-100.0, -math.inf):
        bias = torch.zeros(12, 20).masked_fill(~keep, masked)
        assert torch.equal(METHODS[name].attention(query, key, value, attn_mask=bias), out)
    keep[3] = False
    assert not METHODS[name].attention(query, key, value, attn_mask=keep)[:, :, 3].any()


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("amplitude", [1e-6, 1e-3, 1.0, 30.0, 1e4])
def test_any_scale_stays_finite(name: str, amplitude: float) -> None:
    query, key, value = make_inputs(1, 1, 16, 40, 32, amplitude=amplitude)
    out = METHODS[name].attention(query, key, value)
    assert bool(out.isfinite().all())
    assert float(out.abs().max()) <= 1.6 * float(value.abs().max())  # FQ-ViT's weights do not sum to one
    value[0, 0, 0, 0] = math.nan
    assert bool(METHODS[name].attention(query, key, value).isnan().all())


def test_diffuse_attention_vanishes_in_seven_bits() -> None:
    """A weight below 1/128 is floored to zero: a property of I-ViT's P that QFlash's does not share."""
    query, key, value = make_inputs(1, 1, 8, 300, 32, amplitude=0.01)
    assert not METHODS["i-vit"].attention(query, key, value).any()
    exact = exact_attention(query, key, value)
    assert sqnr(exact, METHODS["i-vit-16"].attention(query, key, value)) > 20.0
    assert sqnr(exact, METHODS["qflash-default"].attention(query, key, value)) > 35.0


@pytest.mark.parametrize("shape", [(1, 3, 197, 64), (2, 2, 49, 32), (1, 1, 5, 20), (1, 2, 130, 96)])
def test_i_vit_kernels_are_the_formula(shape: tuple[int, int, int, int]) -> None:
    batch, heads, tokens, head_dim = shape
    inputs = [x.to(DEVICE) for x in make_inputs(batch, heads, tokens, head_dim=head_dim, seed=tokens, amplitude=1.5)]
    prepare = METHODS["i-vit"].prepare
    assert prepare is not None
    out = prepare(*inputs)()
    assert isinstance(out, QuantizedTensor)
    exact = METHODS["i-vit"].attention(*(x.double().float() for x in inputs))
    assert torch.equal((exact / out.scale).round().to(torch.int8), out.values)
    assert torch.allclose(exact, out.dequantize(), rtol=1e-5)


@pytest.mark.parametrize(("workload", "paper"), [("A2", 25.80), ("A7", 25.22)])
def test_i_vit_has_the_papers_sqnr(workload: str, paper: float) -> None:
    """The figure follows the largest score drawn, through round(1 / S): the paper's lies among the seeds'."""
    found = []
    for seed in range(6):
        inputs = paper_inputs(get_workload(workload), 8, seed)
        found.append(sqnr(exact_attention(*inputs), METHODS["i-vit"].attention(*inputs)))
    assert min(found) < paper < max(found)
    assert abs(sum(found) / len(found) - paper) < 1.5


def test_i_exp_is_that_of_the_implementation_in_transformers() -> None:
    """I-BERT's i-exp there: the same polynomial expanded, and a shift left that leaves 30 fraction bits."""
    module = pytest.importorskip("transformers.models.ibert.quant_modules").IntSoftmax(8, quant_mode=True)
    for scale in (2.0**-12, 2.0**-8, 0.02):
        values = torch.arange(0, -round(9 / scale), -max(1, round(0.01 / scale)))[None]
        step = torch.tensor(scale, dtype=torch.float64)
        theirs, unit = module.int_exp(values.double(), step)
        ours, _ = i_exp(Scores(values, step, None))
        exact = torch.exp(values.double() * scale)
        # what a shift right by z cuts off, and the constants' floors
        assert float((ours.double() * 0.3585 * scale**2 - theirs * unit).abs().max()) < 3 * scale
        assert float((theirs * unit - exact).abs().max()) < 0.0025 + 2 * scale


def test_i_exp_has_the_gap_of_its_polynomial() -> None:
    """At fine scales i-exp and the exponential differ by no more than the polynomial does: 0.002, at -ln 2 and near 0."""
    scale = 2.0**-14
    values = torch.arange(0, -round(12 / scale), -1)[None]
    exp, most = i_exp(Scores(values, torch.tensor(scale, dtype=torch.float64), None))
    gap = float((exp.double() / most.double() - torch.exp(values.double() * scale)).abs().max())
    assert 0.0019 < gap < 0.0020


def test_log_int_softmax_is_that_of_its_authors() -> None:
    """FQ-ViT's own code gave these maps (recorded). Its polynomial is expanded, so that a weight at a tie may differ."""
    recorded = json.loads((pathlib.Path(__file__).parent / "fq_vit_outputs.json").read_text())
    scores = torch.arange(96) * 7919 % 256 - 128
    for case in recorded["cases"]:
        # eight-bit scores that span all of 8 bits are not requantised
        values = torch.cat((scores, torch.tensor([127, -128])))[None]
        weights, bits = log_int_softmax(Scores(values, torch.tensor(case["scale"], dtype=torch.float64), None))
        got = torch.where(weights[0] > 0, bits - weights[0].clamp(min=1).log2(), -1.0).to(torch.int64)
        wanted = torch.tensor(case["octaves"])
        kept = (got >= 0) & (wanted >= 0)
        assert torch.equal(got >= 0, wanted >= 0)
        assert int((got - wanted)[kept].abs().max()) <= 1
        assert float((got == wanted)[kept].float().mean()) > 0.95
