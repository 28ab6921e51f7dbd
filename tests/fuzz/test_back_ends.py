"""Back ends return the same bits, in a first call and in repeated ones."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import qflash
from fuzz import examples
from fuzz.calls import (
    DTYPES,
    INTERPRETED_WORK,
    KINDS,
    Call,
    IntegerCall,
    PackedCall,
    calls,
    integer_calls,
    numbers,
    packed_calls,
    place,
)
from helpers import DEVICE, LAYOUTS, same_bits
from qflash.backends import cpu_missing

needs_a_compiler = pytest.mark.skipif(cpu_missing() is not None, reason=str(cpu_missing()))
in_the_interpreter = pytest.mark.skipif(DEVICE.type == "cuda", reason="tests/gpu draws cases on a GPU")


def same_parts(got: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> bool:
    """Tell whether all tensors have the same bits."""
    return all(same_bits(one, other) for one, other in zip(got, expected, strict=True))


@needs_a_compiler
@examples(40)
@given(calls())
def test_floats_in_c(call: Call) -> None:
    expected = call.run("reference")
    assert same_bits(call.run("cpu"), expected)
    # found again in the plan cache, for these numbers and for others
    assert same_bits(call.run("cpu"), expected)
    others = call.tensors(1)
    assert same_bits(call.run("cpu", others), call.run("reference", others))


@needs_a_compiler
@examples(30)
@given(integer_calls())
def test_integers_in_c(call: IntegerCall) -> None:
    expected = call.run("reference")
    for _ in range(2):
        assert same_parts(call.run("cpu"), expected)


@needs_a_compiler
@examples(60)
@given(packed_calls())
def test_packed_sequences_in_c(call: PackedCall) -> None:
    expected = call.separately()
    assert same_bits(call.run("reference"), expected)
    for _ in range(2):
        assert same_bits(call.run("cpu"), expected)


@in_the_interpreter
@examples(2)
@given(calls(work=INTERPRETED_WORK))
def test_floats_in_the_interpreter(call: Call) -> None:
    assert same_bits(call.run("triton"), call.run("reference"))


@in_the_interpreter
@examples(2)
@given(integer_calls(work=INTERPRETED_WORK))
def test_integers_in_the_interpreter(call: IntegerCall) -> None:
    assert same_parts(call.run("triton"), call.run("reference"))


@in_the_interpreter
@examples(12)
@given(packed_calls(work=INTERPRETED_WORK))
def test_packed_sequences_in_the_interpreter(call: PackedCall) -> None:
    assert same_bits(call.run("triton"), call.separately())


SPECIAL = (None, None, math.nan, math.inf, -math.inf, 3e38, 1e-42)


@st.composite
def float_tensors(draw: st.DrawFn) -> torch.Tensor:
    """Draw a tensor of two to five dimensions, with any strides."""
    tokens = st.sampled_from((1, 2, 3, 16, 17, 33, 64, 65))
    shape = (draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(tokens), draw(tokens))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 20)))
    x = numbers(draw(st.sampled_from(KINDS)), shape, draw(st.sampled_from(DTYPES)), generator)
    special = draw(st.sampled_from(SPECIAL))
    if special is not None:
        x.view(-1)[draw(st.integers(0, x.numel() - 1))] = special
    x = place(x, draw(st.sampled_from(LAYOUTS)), draw(st.sampled_from((0, 1, 3, 8))))
    rank = draw(st.integers(2, 5))
    return x[0, 0] if rank == 2 else x[0] if rank == 3 else x if rank == 4 else x[:, None]


def check_quantisation(x: torch.Tensor, granularity: str, center: bool, given_scale: bool, backend: str) -> None:
    """Compare with the reference, and what is finite with ``x`` itself."""
    if center and granularity == "token":
        granularity = "head"
    if given_scale:
        scale = torch.rand(x.shape[-1:], generator=torch.Generator().manual_seed(0)) * 0.1 + 0.01
        one, other = (qflash.quantize(x, scale=scale, backend=name) for name in (backend, "reference"))
    else:
        one, other = (qflash.quantize(x, granularity, center=center, backend=name) for name in (backend, "reference"))
        if bool(x.isfinite().all()):
            error = (other.dequantize().double() - x.double()).abs()
            limit = 0.5 * other.scale.double() * (1 + 2.0**-16) + (0 if other.offset is None else other.offset.abs() * 2.0**-22)
            assert bool((error <= limit).all())
            assert int(other.values.min()) >= -127
    assert same_bits(one.values, other.values) and same_bits(one.scale, other.scale)
    assert (one.offset is None) == (other.offset is None)
    assert one.offset is None or other.offset is None or same_bits(one.offset, other.offset)


QUANTISATIONS = float_tensors(), st.sampled_from(("tensor", "head", "token", "channel")), st.booleans(), st.booleans()


@needs_a_compiler
@examples(50)
@given(*QUANTISATIONS)
def test_quantisation_in_c(x: torch.Tensor, granularity: str, center: bool, given_scale: bool) -> None:
    check_quantisation(x, granularity, center, given_scale, "cpu")


@in_the_interpreter
@examples(3)
@given(*QUANTISATIONS)
def test_quantisation_in_the_interpreter(x: torch.Tensor, granularity: str, center: bool, given_scale: bool) -> None:
    check_quantisation(x, granularity, center, given_scale, "triton")
