"""Outputs are finite, and as close to float64 attention as the documented errors of the steps allow."""

from __future__ import annotations

import dataclasses

import torch
from hypothesis import given
from hypothesis import strategies as st

import qflash
from fuzz import examples
from fuzz.calls import DTYPES, Call, IntegerCall, calls, integer_calls
from fuzz.error_bound import error_of_floats, error_of_integers

WORK = 1 << 19
SMALL_BIASES = ("none", "causal", "padding", "bool", "bias", "padding bias")


def most_of_bound(out: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor) -> float:
    """Return the largest error as a share of its bound."""
    assert bool(out.isfinite().all() & bound.isfinite().all())
    share = (out.double() - exact).abs() / bound.clamp(min=2.0**-1000)
    return float(share.max()) if share.numel() else 0.0


@examples(50)
@given(calls(masks=SMALL_BIASES, work=WORK))
def test_floats_are_within_their_bounds(call: Call) -> None:
    tensors = call.tensors()
    assert most_of_bound(call.run("auto", tensors), *error_of_floats(call, *tensors)) <= 1


@examples(50)
@given(integer_calls(masks=SMALL_BIASES, work=WORK), st.sampled_from(DTYPES))
def test_integers_are_within_their_bounds(call: IntegerCall, out_dtype: torch.dtype) -> None:
    call = dataclasses.replace(call, fixed=False, out_dtype=out_dtype)
    tensors, mask = call.tensors()
    (out,) = call.run("auto")
    assert most_of_bound(out, *error_of_integers(call, tensors, mask, out)) <= 1


def test_the_bound_tells_a_chord_from_a_parabola() -> None:
    one = Call(
        batch=1, key_heads=1, group=1, queries=64, keys=64, head_dim=32, value_dim=32, dtype=torch.float32,
        recipe=qflash.DEFAULT.replace(probability_bits=15), mask="none", mask_dims=(False, False),
        layouts=("contiguous",) * 4, offsets=(0,) * 4, kinds=("normal",) * 3, scale=None, seed=0,
    )  # fmt: skip
    call = IntegerCall(one, ("token", "head", "channel"), False, False, False, torch.float32, "value")
    tensors, mask = call.tensors()
    wrong = dataclasses.replace(call, call=dataclasses.replace(one, recipe=one.recipe.replace(exponential="linear")))
    shares = []
    for each in (call, wrong):
        (out,) = each.run("auto")
        shares.append(most_of_bound(out, *error_of_integers(call, tensors, mask, out)))
    assert shares[0] < 1 < shares[1]
